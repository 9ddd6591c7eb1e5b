"""The block-causal view of a denoiser: a position sees its own block and all before it, never a later one."""

import dataclasses

import jax
import jax.numpy as jnp

from dllm_jax.denoiser import Denoiser
from dllm_jax.errors import DllmError
from dllm_jax.pytree import pytree
from dllm_jax.transformer import Transformer
from samplers.caches import DenoiserLike


def block_end(positions: jax.Array, prompt_lengths: jax.Array, block_length: int) -> jax.Array:
    """First position behind the block of each position, [B, T] int32 and [B] -> [B, T].

    The prompt is block 0, [0, P); block b >= 1 is [P + (b - 1) L, P + b L) (D2F, arXiv 2508.09192, section 3.2).
    """
    prompt = prompt_lengths[:, None]
    place = positions - prompt
    return jnp.where(place < 0, prompt, prompt + (place // block_length + 1) * block_length)


class _BlockCausal(Transformer):
    """A bound backbone with another mask; it shares the arrays."""

    def __init__(self, model: Transformer, prompt_lengths: jax.Array, block_length: int) -> None:
        self.config, self.embed, self.layers = model.config, model.embed, model.layers
        self.final_norm, self.lm_head = model.final_norm, model.lm_head
        self.prompt_lengths, self.block_length = prompt_lengths, block_length

    def attention_mask(self, positions: jax.Array, lengths: jax.Array, num_keys: int) -> jax.Array:
        """Which key each query may see, [B, 1, T, S]."""
        key = jnp.arange(num_keys, dtype=jnp.int32)
        end = block_end(positions, self.prompt_lengths, self.block_length)
        return super().attention_mask(positions, lengths, num_keys) & (key < end[..., None])[:, None]


@pytree(static=("config", "block_length"))
class BlockCausalDenoiser(Denoiser):
    """A `Denoiser` whose queries see the keys of their own block and of earlier ones alone.

    A shifted family predicts a block's first token from the last position of the block before it, which cannot see the
    block: in training as in decoding. Because no position sees a later block, keys and values of a block are final as
    soon as its tokens are.

    Attributes:
        prompt_lengths: [B] int32, P; the prompt is a block of its own.
        block_length: L, positions per block behind the prompt; the last block may be shorter.
    """

    prompt_lengths: jax.Array
    block_length: int

    @property
    def _model(self) -> Transformer:
        return _BlockCausal(super()._model, self.prompt_lengths, self.block_length)


def block_causal(denoiser: DenoiserLike, prompt_lengths: jax.Array, block_length: int) -> BlockCausalDenoiser:
    """The same parameters with block-causal attention.

    Raises:
        DllmError: for something that is no `dllm_jax.Denoiser`, or one with causal attention.
    """
    if not isinstance(denoiser, Denoiser):
        raise DllmError(f"{type(denoiser).__name__} has no attention mask to change; give a model's denoiser")
    if denoiser.config.attention != "bidirectional":
        raise DllmError(
            f"a {denoiser.config.family} model has {denoiser.config.attention} attention; give a diffusion model"
        )
    fields = {field.name: getattr(denoiser, field.name) for field in dataclasses.fields(Denoiser)}
    return BlockCausalDenoiser(**fields, prompt_lengths=prompt_lengths, block_length=block_length)
