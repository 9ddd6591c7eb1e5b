"""Classifier-free guidance: a denoiser that also runs the sequence without its condition and extrapolates."""

import dataclasses

import jax
import jax.numpy as jnp

from dllm_jax.denoiser import Tile
from dllm_jax.kv_cache import KVCache
from samplers.caches.base import DenoiserLike


@dataclasses.dataclass(frozen=True)
class Guided:
    """logits = U + (scale + 1) (L - U), U with every given position masked (LLaDA, arXiv 2502.09992, equation 16).

    One call runs both on a doubled batch, so that a guided forward counts as one and combines with every cache. Hidden
    states of the two lie side by side, [B, W, 2 D].

    Attributes:
        denoiser: the model.
        given: [B, S] bool, positions that were not generated: the prompt, and what the canvas came with.
        scale: scalar or [B]; 0 is no guidance.
    """

    denoiser: DenoiserLike
    given: jax.Array
    scale: float | jax.Array

    @property
    def mask_id(self) -> int:
        return self.denoiser.mask_id

    @property
    def eos_id(self) -> int:
        return self.denoiser.eos_id

    @property
    def vocab_size(self) -> int:
        return self.denoiser.vocab_size

    @property
    def vocab_parts(self) -> int:
        return self.denoiser.vocab_parts

    @property
    def min_prompt_length(self) -> int:
        return self.denoiser.min_prompt_length

    def empty_cache(self, batch: int, length: int) -> KVCache:
        return self.denoiser.empty_cache(2 * batch, length)

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.denoiser.embed(tokens)

    def expected_embedding(self, logits: jax.Array) -> jax.Array:
        return self.denoiser.expected_embedding(logits)

    def _both(self, inputs: jax.Array) -> jax.Array:
        if jnp.issubdtype(inputs.dtype, jnp.integer):
            return jnp.concatenate([inputs, jnp.where(self.given, self.mask_id, inputs)])
        mask = self.embed(jnp.full((1, 1), self.mask_id))
        return jnp.concatenate([inputs, jnp.where(self.given[..., None], mask, inputs)])

    def full(self, inputs: jax.Array, lengths: jax.Array, start: jax.Array, width: int) -> tuple[jax.Array, KVCache]:
        hidden, kv = self.denoiser.full(self._both(inputs), _twice(lengths), _twice(start), width)
        return _beside(hidden), kv

    def window(
        self,
        inputs: jax.Array,
        lengths: jax.Array,
        cache: KVCache,
        feed: tuple[jax.Array, int],
        target: tuple[jax.Array, int] | None = None,
        fresh: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        hidden, kv = self.denoiser.window(
            self._both(inputs),
            _twice(lengths),
            cache,
            (_twice(feed[0]), feed[1]),
            None if target is None else (_twice(target[0]), target[1]),
            None if fresh is None else _twice(fresh),
        )
        return _beside(hidden), kv

    def final_hidden(self, hidden: jax.Array) -> jax.Array:
        """Those of the conditional half."""
        return self.denoiser.final_hidden(jnp.split(hidden, 2, axis=-1)[0])

    def logits(self, hidden: jax.Array, tile: Tile | None = None) -> jax.Array:
        both = jnp.concatenate(jnp.split(hidden, 2, axis=-1))
        conditional, unconditional = jnp.split(self.denoiser.logits(both, tile), 2)
        scale = jnp.asarray(self.scale)[..., None, None]
        return unconditional + (scale + 1.0) * (conditional - unconditional)


def _twice(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, x])


def _beside(hidden: jax.Array) -> jax.Array:
    return jnp.concatenate(jnp.split(hidden, 2), axis=-1)
