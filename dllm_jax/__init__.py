"""Diffusion language models in JAX: LLaDA, LLaDA-MoE and Dream, from a checkpoint to a denoiser that samplers take.

    import dllm_jax

    model = dllm_jax.load("llada-8b-instruct")          # a folder, or a name under ~/.cache/dllm_jax
    chat = [{"role": "user", "content": "Hello"}]
    ids = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]  # transformers' tokenizer
    logits = model.denoiser(jax.numpy.array([ids]))     # what token belongs at position i

Every mistake in the input is a `DllmError` with one sentence. Importing starts no backend and creates no array.
"""

from dllm_jax.checkpoints.loading import Model, load, random_model
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import PUBLISHED, published_config
from dllm_jax.kernels.dispatch import use_kernels
from dllm_jax.models.denoiser import Denoiser, DenoiserLike, FunctionDenoiser, Span, block_causal
from dllm_jax.parallel.sharding import ShardingRules, batch_sharding, make_mesh, param_shardings

__version__ = "0.1.0"

__all__ = [
    "PUBLISHED",
    "Denoiser",
    "DenoiserLike",
    "DllmError",
    "FunctionDenoiser",
    "Model",
    "ModelConfig",
    "ShardingRules",
    "Span",
    "__version__",
    "batch_sharding",
    "block_causal",
    "load",
    "make_mesh",
    "param_shardings",
    "published_config",
    "random_model",
    "use_kernels",
]
