"""Static key/value buffers: a tuple of per-layer pairs, written in place, never concatenated.

Per-layer buffers in a tuple are twice as fast inside a compiled loop as one stacked array, which XLA copies.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.parallel.layout import apart_on_cuda


class LayerKV(NamedTuple):
    """Keys (after RoPE) and values of one layer, each [B, S, K, H]."""

    key: jax.Array
    value: jax.Array


KVCache = tuple[LayerKV, ...]

UNROLLED_ROWS = 32  # that are written one by one where that is faster, more in rounds; the program grows with them


def empty(heads: Sequence[tuple[int, int]], batch: int, length: int, dtype: jnp.dtype) -> KVCache:
    """Zero-filled buffers for `length` positions: a pair of [batch, length, K, H] for each layer's (K, H)."""
    shapes = [(batch, length, *own) for own in heads]
    return tuple(LayerKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes)


def with_room(kv: KVCache, count: int) -> KVCache:
    """Buffers with so many further positions, which are zeros."""
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, count), (0, 0), (0, 0))), kv)


def slice_rows(x: jax.Array, start: jax.Array, width: int) -> jax.Array:
    """x[b, start[b] : start[b] + width] for every row: [B, S, ...] and [B] -> [B, width, ...].

    As with `lax.dynamic_slice`, a start that would run past the end is moved back to S - width.
    """
    if x.shape[0] == 1:  # one row needs no gather: a plain slice is what XLA fuses best
        return lax.dynamic_slice_in_dim(x, start[0], width, axis=1)
    return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width, axis=0))(x, start)


def write_rows(buffer: jax.Array, new: jax.Array, start: jax.Array, write: jax.Array | None = None) -> jax.Array:
    """buffer with new[b] written at start[b] of row b: [B, S, ...], [B, W, ...], [B] -> [B, S, ...].

    Where `write` [B, W] is False the buffer keeps its old content, so that a window of static width can stand for
    a shorter span.
    """
    if write is not None:
        write = write.reshape(write.shape + (1,) * (new.ndim - 2))
    if buffer.shape[0] == 1:
        new = _or_old(buffer, new, start, write)
        return lax.dynamic_update_slice_in_dim(buffer, new, start[0], axis=1)
    return lax.platform_dependent(buffer, new, start, write, tpu=_write_one_by_one, default=_write_together)


def _or_old(buffer: jax.Array, new: jax.Array, start: jax.Array, write: jax.Array | None) -> jax.Array:
    return new if write is None else jnp.where(write, new, slice_rows(buffer, start, new.shape[1]))


def _write_together(buffer: jax.Array, new: jax.Array, start: jax.Array, write: jax.Array | None) -> jax.Array:
    """All rows by one scatter: a single kernel on GPU, but a loop over the rows on TPU.

    On GPU what is written is made apart: where it is partly the buffer's old content, a kernel that read and wrote the
    buffer would need a copy of it.
    """
    new = apart_on_cuda(_or_old(buffer, new, start, write))
    return jax.vmap(lambda row, value, at: lax.dynamic_update_slice_in_dim(row, value, at, axis=0))(buffer, new, start)


def _write_one_by_one(buffer: jax.Array, new: jax.Array, start: jax.Array, write: jax.Array | None) -> jax.Array:
    """Row by row, in rounds where there are many.

    A TPU tiles an array's last two axes. Attention reads [B, K, S, H]; a gather of the old content, or a loop that
    carries [B, S, K, H], would make it copy the buffer from and to another layout.
    """
    rows, heads_first = buffer.shape[0], buffer.ndim == 4 and buffer.shape[0] > UNROLLED_ROWS
    ordered = lambda x: jnp.swapaxes(x, 1, 2) if heads_first else x
    of_row = lambda x, row: lax.dynamic_slice_in_dim(x, row, 1, axis=0)
    buffer, new, write = ordered(buffer), ordered(new), None if write is None else ordered(write)
    zeros = [jnp.int32(0)] * (buffer.ndim - 1)

    def put(row: jax.Array, buffer: jax.Array) -> jax.Array:
        value, at = of_row(new, row), [row, *zeros]
        at[2 if heads_first else 1] = start[row]
        if write is not None:
            value = jnp.where(of_row(write, row), value, lax.dynamic_slice(buffer, at, value.shape))
        return lax.dynamic_update_slice(buffer, value, at)

    return ordered(lax.fori_loop(0, rows, put, buffer, unroll=min(rows, UNROLLED_ROWS)))


def scatter_rows(buffer: jax.Array, new: jax.Array, positions: jax.Array, write: jax.Array | None = None) -> jax.Array:
    """buffer with new[b, t] written at positions[b, t] of row b: [B, S, ...], [B, T, ...], [B, T] -> [B, S, ...].

    Where `write` [B, T] is False nothing is written. Positions that are written must differ.
    """
    if write is not None:
        positions = jnp.where(write, positions, buffer.shape[1])  # after the end, which is dropped
    return jax.vmap(lambda row, value, at: row.at[at].set(value, mode="drop"))(buffer, new, positions)


def gather_rows(x: jax.Array, positions: jax.Array) -> jax.Array:
    """x[b, positions[b, t]] for every row: [B, S, ...] and [B, T] -> [B, T, ...]."""
    return jax.vmap(lambda row, at: row[at])(x, positions)


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """One row of each of P equal parts of the batch: [B, ...] and [P] -> [P, ...], rows counted within their part."""
    if rows.shape[0] == 1:
        return lax.dynamic_index_in_dim(x, rows[0], axis=0)
    parts = x.reshape(rows.shape[0], x.shape[0] // rows.shape[0], *x.shape[1:])  # -1 fails where nothing is in it
    return jax.vmap(lambda part, row: lax.dynamic_index_in_dim(part, row, axis=0, keepdims=False))(parts, rows)


def put_rows(x: jax.Array, new: jax.Array, rows: jax.Array, write: jax.Array | None = None) -> jax.Array:
    """x with one row of each of P equal parts of the batch replaced, where `write` [P]: what `take_rows` takes.

    Args:
        x: [n B, S, ...]: n consecutive entries belong to a row of the batch.
        new: [n P, T, ...], of the first T <= S positions.
    """
    count = rows.shape[0]
    if count > 1:
        parts = (x.reshape(count, -1, *x.shape[1:]), new.reshape(count, -1, *new.shape[1:]), rows[:, None])
        if write is None:
            return jax.vmap(put_rows)(*parts).reshape(x.shape)
        return jax.vmap(put_rows)(*parts, write[:, None]).reshape(x.shape)
    start = (rows[0] * new.shape[0],) + (0,) * (x.ndim - 1)
    new = new.astype(x.dtype)
    if write is not None:
        new = jnp.where(write[0], new, lax.dynamic_slice(x, start, new.shape))
    return lax.dynamic_update_slice(x, new, start)
