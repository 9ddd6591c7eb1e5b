"""Where random numbers come from: keys split per row and per step, or a recorded table.

A row's draws depend on its own key and its own count of forwards, never on the batch it runs in.
"""

import enum
from typing import Protocol

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.pytree import pytree


class Purpose(enum.IntEnum):
    """What a draw is for; two purposes of one step never share numbers."""

    TOKENS = 0
    ORDER = 1


class Noise(Protocol):
    """A source of uniform draws for the positions of one step."""

    def uniform(self, purpose: Purpose, step: jax.Array, positions: jax.Array, columns: int | None) -> jax.Array:
        """Draws in (0, 1) for `positions` [B, W] (relative to the generation's start) at each row's `step` [B]:
        [B, W] float32, or [B, W, columns] where columns are given."""
        ...


@pytree()
class KeyNoise:
    """Draws from one typed `jax.random.key` per row, keys [B]."""

    keys: jax.Array

    def uniform(self, purpose: Purpose, step: jax.Array, positions: jax.Array, columns: int | None) -> jax.Array:
        shape = positions.shape[1:] if columns is None else (*positions.shape[1:], columns)

        def draw(key: jax.Array, at: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(key, at), int(purpose))
            return jax.random.uniform(key, shape, minval=jnp.finfo(jnp.float32).tiny)

        return jax.vmap(draw)(self.keys, step)


def check_key(key: jax.Array | None, batch: int) -> None:
    """Raises DllmError for anything but None, a typed key, or a typed key per row."""
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key is not None and not (typed and key.shape in ((), (batch,))):
        raise DllmError(f"key is no typed key, nor [{batch}] of them; make one by jax.random.key(seed)")


def source_of(noise: Noise | None, key: jax.Array | None, batch: int) -> Noise | None:
    """What a generation draws from: `noise`, or else one key or one per row; None for neither.

    Raises:
        DllmError: for a key that is none, or of another number of rows.
    """
    check_key(key, batch)
    return KeyNoise(row_keys(key, batch)) if noise is None and key is not None else noise


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """One key per row [batch]: a [batch] array of keys as it is, a single key folded with each row's number."""
    if key.ndim == 1:
        return key
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))


def gumbel(uniform: jax.Array) -> jax.Array:
    """Standard Gumbel noise -ln(-ln u) from uniforms."""
    tiny = jnp.finfo(jnp.float32).tiny
    return -jnp.log(jnp.maximum(-jnp.log(jnp.maximum(uniform, tiny)), tiny))
