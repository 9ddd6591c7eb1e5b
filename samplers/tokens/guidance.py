"""Classifier-free guidance: a denoiser that also runs the sequence without its condition and extrapolates."""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.models.denoiser import DenoiserLike, Span, block_length_of
from dllm_jax.models.transformer import Tile
from dllm_jax.pytree import pytree


@pytree()
class Guided:
    """logits = U + (scale + 1) (L - U), U with every given position masked (LLaDA, arXiv 2502.09992, equation 16).

    One call runs both, so that a guided forward counts as one and combines with every cache. Its inputs are pairs, as
    `paired` makes them. The two of a row follow each other in the doubled batch, so that a mesh which splits the batch
    keeps them together; hidden states of the two lie side by side, [B, W, 2 D].

    Attributes:
        denoiser: the model.
        scale: scalar or [B]; 0 is no guidance.
    """

    denoiser: DenoiserLike
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
    def min_prompt_length(self) -> int:
        return self.denoiser.min_prompt_length

    @property
    def block_length(self) -> int | None:
        return block_length_of(self.denoiser)

    @property
    def batch_parts(self) -> int:
        return self.denoiser.batch_parts

    @property
    def vocab_parts(self) -> int:
        return self.denoiser.vocab_parts

    def empty_cache(self, batch: int, length: int) -> Any:
        return self.denoiser.empty_cache(2 * batch, length)

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.denoiser.embed(tokens)

    def expected_embedding(self, logits: jax.Array) -> jax.Array:
        return self.denoiser.expected_embedding(logits)

    def forward(
        self,
        inputs: jax.Array,
        visible: jax.Array,
        *,
        at: Span | jax.Array | None = None,
        kv: Any = None,
        write: jax.Array | None = None,
        outputs: Span | None = None,
    ) -> tuple[jax.Array, Any]:
        """As `Denoiser.forward`, of pairs [B, 2, S] or [B, 2, S, D]."""
        hidden, kv = self.denoiser.forward(
            inputs.reshape(-1, *inputs.shape[2:]),
            _twice(visible),
            at=_twice(at),
            kv=kv,
            write=_twice(write),
            outputs=_twice(outputs),
        )
        return jnp.concatenate([hidden[0::2], hidden[1::2]], axis=-1), kv

    def final_hidden(self, hidden: jax.Array) -> jax.Array:
        """Those of the conditional half."""
        return self.denoiser.final_hidden(jnp.split(hidden, 2, axis=-1)[0])

    def logits(self, hidden: jax.Array, tile: Tile | None = None) -> jax.Array:
        both = jnp.concatenate(jnp.split(hidden, 2, axis=-1), axis=1)  # the head is read once
        conditional, unconditional = jnp.split(self.denoiser.logits(both, tile), 2, axis=1)
        scale = jnp.asarray(self.scale)[..., None, None]
        return unconditional + (scale + 1.0) * (conditional - unconditional)


def paired(denoiser: DenoiserLike, inputs: jax.Array, given: jax.Array) -> jax.Array:
    """The inputs of a guided forward: tokens [B, S] or embeddings [B, S, D] and, next to them, the same with every
    position masked that was not generated, `given` [B, S] bool: [B, 2, S] or [B, 2, S, D]."""
    if jnp.issubdtype(inputs.dtype, jnp.integer):
        return jnp.stack([inputs, jnp.where(given, denoiser.mask_id, inputs)], axis=1)
    mask = denoiser.embed(jnp.full((1, 1), denoiser.mask_id))
    return jnp.stack([inputs, jnp.where(given[..., None], mask, inputs)], axis=1)


def _twice(x: Any) -> Any:
    """Every row twice, one after the other."""
    if isinstance(x, Span):
        return Span(_twice(x.start), x.width)
    return None if x is None else jnp.repeat(x, 2, axis=0)
