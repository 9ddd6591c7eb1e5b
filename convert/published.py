"""Published models by name: `python -m convert published fast-dllm-v2-1.5b`.

model = published.load("fast-dllm-v2-1.5b")  # downloaded and converted at its first use
"""

from pathlib import Path
from typing import Any, NamedTuple

from convert.to_jax import convert
from dllm_jax import Model
from dllm_jax import load as load_checkpoint
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import Quantize, check_quantize
from dllm_jax.errors import DllmError


class Hub(NamedTuple):
    """Where a published model is: the family to convert it as, and its repository on the hub."""

    family: str
    repository: str


HUB = {
    "llada-8b-base": Hub("llada", "GSAI-ML/LLaDA-8B-Base"),
    "llada-8b-instruct": Hub("llada", "GSAI-ML/LLaDA-8B-Instruct"),
    "llada-1.5": Hub("llada-1.5", "GSAI-ML/LLaDA-1.5"),
    "llada-moe-7b-a1b-base": Hub("llada-moe", "inclusionAI/LLaDA-MoE-7B-A1B-Base"),
    "llada-moe-7b-a1b-instruct": Hub("llada-moe", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"),
    "llada2.0-mini": Hub("llada2", "inclusionAI/LLaDA2.0-mini"),
    "llada2.0-flash": Hub("llada2", "inclusionAI/LLaDA2.0-flash"),
    "llada2.1-mini": Hub("llada2", "inclusionAI/LLaDA2.1-mini"),
    "llada2.1-flash": Hub("llada2", "inclusionAI/LLaDA2.1-flash"),
    "sdar-1.7b-chat": Hub("sdar", "JetLM/SDAR-1.7B-Chat"),
    "sdar-4b-chat": Hub("sdar", "JetLM/SDAR-4B-Chat"),
    "sdar-8b-chat": Hub("sdar", "JetLM/SDAR-8B-Chat"),
    "sdar-30b-a3b-chat": Hub("sdar", "JetLM/SDAR-30B-A3B-Chat"),
    "fast-dllm-v2-1.5b": Hub("fast-dllm-v2", "Efficient-Large-Model/Fast_dLLM_v2_1.5B"),
    "fast-dllm-v2-7b": Hub("fast-dllm-v2", "Efficient-Large-Model/Fast_dLLM_v2_7B"),
    "dream-7b-base": Hub("dream", "Dream-org/Dream-v0-Base-7B"),
    "dream-7b-instruct": Hub("dream", "Dream-org/Dream-v0-Instruct-7B"),
    "qwen2.5-0.5b": Hub("qwen2", "Qwen/Qwen2.5-0.5B"),
    "qwen2.5-1.5b": Hub("qwen2", "Qwen/Qwen2.5-1.5B"),
    "qwen2.5-7b": Hub("qwen2", "Qwen/Qwen2.5-7B"),
}
"""The names are those of `dllm_jax.PUBLISHED`."""


def install(
    name: str, folder: str | Path | None = None, *, quantize: Quantize | None = None, progress: bool = False
) -> Path:
    """Downloads and converts a model, unless that was done before, and returns the converted checkpoint.

    The download stays in the hub's own cache, whose weights may be removed afterwards.

    Args:
        name: a key of `HUB`.
        folder: where to; by default the name, with a quantized model's bits behind it ("llada-8b-instruct-int8"), under
            `dllm_jax.checkpoints.checkpoint.home()`, where models are found by name.
        quantize: "int8" or "int4" stores the kernels so.
        progress: show bars on stderr.

    Raises:
        DllmError: for an unknown name, when the folder holds something else, and as `convert.convert`.
    """
    if name not in HUB:
        raise DllmError(f"no published model is called {name!r}; choose one of {', '.join(HUB)}")
    check_quantize(quantize)
    out = checkpoint.home() / (f"{name}-{quantize}" if quantize else name) if folder is None else Path(folder)
    if not (out / checkpoint.PARAMS_FOLDER).is_dir():
        family, repository = HUB[name]
        convert(family, repository, out, quantize=quantize, progress=progress)
    elif (found := checkpoint.load_config(out).quantize) != quantize:
        raise DllmError(f"{out} holds {_told(found)} weights, not {_told(quantize)} ones; name another folder")
    return out


def load(name: str, *, quantize: Quantize | None = None, progress: bool = False, **options: Any) -> Model:
    """A model, installed at its first use.

    Args:
        name, quantize, progress: as in `install`.
        options: those of `dllm_jax.load`.

    Raises:
        DllmError: as `install` and `dllm_jax.load`.
    """
    return load_checkpoint(install(name, quantize=quantize, progress=progress), **options)


def _told(quantize: Quantize | None) -> str:
    return quantize or "unquantized"
