"""Static key/value buffers: a tuple of per-layer pairs, written in place, never concatenated.

Per-layer buffers in a tuple are twice as fast inside a compiled loop as one stacked array, which XLA copies.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class LayerKV(NamedTuple):
    """Keys (after RoPE) and values of one layer, each [B, S, K, H]."""

    key: jax.Array
    value: jax.Array


KVCache = tuple[LayerKV, ...]


def empty(num_layers: int, batch: int, length: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """Zero-filled buffers for `length` positions: num_layers pairs of [batch, length, num_kv_heads, head_dim]."""
    shape = (batch, length, num_kv_heads, head_dim)
    return tuple(LayerKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers))


def slice_rows(x: jax.Array, start: jax.Array, width: int) -> jax.Array:
    """x[b, start[b] : start[b] + width] for every row: [B, S, ...] and [B] -> [B, width, ...].

    As with `lax.dynamic_slice`, a start that would run past the end is moved back to S - width.
    """
    if x.shape[0] == 1:  # one row needs no gather: a plain slice is what XLA fuses best
        return lax.dynamic_slice_in_dim(x, start[0], width, axis=1)
    return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width, axis=0))(x, start)


def write_rows(buffer: jax.Array, new: jax.Array, start: jax.Array, fresh: jax.Array | None = None) -> jax.Array:
    """buffer with new[b] written at start[b] of row b: [B, S, ...], [B, W, ...], [B] -> [B, S, ...].

    Where `fresh` [B, W] is False the buffer keeps its old content, so that a window of static width can stand for
    a shorter span.
    """
    if fresh is not None:
        mask = fresh.reshape(fresh.shape + (1,) * (new.ndim - 2))
        new = jnp.where(mask, new, slice_rows(buffer, start, new.shape[1]))
    if buffer.shape[0] == 1:
        return lax.dynamic_update_slice_in_dim(buffer, new, start[0], axis=1)
    return jax.vmap(lambda row, value, at: lax.dynamic_update_slice_in_dim(row, value, at, axis=0))(buffer, new, start)
