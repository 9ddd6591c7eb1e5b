"""The experts of a mixture: a grouped matrix product in rounds, good on every platform and on every mesh.

`lax.ragged_dot` is the obvious way and is not used: on CPU, and on NVIDIA GPUs without experimental flags of XLA, it
becomes one dense product of E times the work and memory. A loop over tiles of one expert each slices the weights at
places that are data, so that a compiler has to gather split weights; it is also a long chain of small products. A
batched product over all experts reads the weights in place, once a round, and splits over the experts, over their
hidden width and over the batch without a word about devices in here.
"""

import functools
import types
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.kernels import Table, product, product_of_sums, sums

TILE_ROWS: Mapping[str, int] = types.MappingProxyType({"cpu": 32, "default": 256})
"""Rows an expert runs in one round, about where arithmetic takes as long as reading its weights: below, rows are free,
above, padding costs. 32 is measured (`benchmarks/moe.py`); 256 is bfloat16 FLOPs per byte of current accelerators."""


class Dispatch(NamedTuple):
    """Which token is where. A is T * k, the assignments of a batch row's tokens to experts, in the order of `ids`.

    Attributes:
        order: [B, A] int32, assignments sorted by expert.
        starts: [B, E] int32, where each expert's begin in `order`.
        expert: [B, A] int32, the expert of each assignment.
        rank: [B, A] int32, its place among those of the same expert and batch row.
    """

    order: jax.Array
    starts: jax.Array
    expert: jax.Array
    rank: jax.Array


def apply_experts(x: jax.Array, ids: jax.Array, weights: jax.Array, w_in: Table, w_out: Table) -> jax.Array:
    """sum_k weights[..., k] * expert[ids[..., k]](x), with expert(x) = (silu(x gate) * (x up)) w_out.

    Every assignment is computed, and (up to padding) nothing else: each round is one batched product of up to C tokens
    per expert and batch row against all experts' weights, read in place, and there are as many rounds as the fullest
    expert needs. A token's result depends on no other token.

    Reverse mode goes through it, forward mode does not (the number of rounds is data).

    Args:
        x: [B, T, D].
        ids: [B, T, k] int32 below E, no expert twice for one token.
        weights: [B, T, k], in the dtype of x.
        w_in: [E, D, 2, F], gate first; w_out: [E, F, D]; either may be quantized.

    Returns:
        [B, T, D] in the `sums` of the dtype of x.
    """
    on = {platform: functools.partial(in_rounds, rows) for platform, rows in TILE_ROWS.items()}
    return lax.platform_dependent(x, ids, weights, w_in, w_out, **on)


def in_rounds(tile_rows: int, x: jax.Array, ids: jax.Array, weights: jax.Array, w_in: Table, w_out: Table) -> jax.Array:
    """`apply_experts` with rounds of `tile_rows` rows per expert, shared by the batch's rows, at least 8 for each."""
    batch, length, per_token = ids.shape
    dispatch, sizes = _dispatch(ids.reshape(batch, -1), w_in.shape[0])
    capacity = min(length, max(8, tile_rows // batch))
    if capacity == length:  # room for every token in one round
        y = _round(length, 0, dispatch, x, w_in, w_out)
    else:
        y = _rounds(capacity, -(-jnp.max(sizes) // capacity), dispatch, x, w_in, w_out)
    return jnp.einsum("btkd,btk->btd", y.reshape(batch, length, per_token, -1), weights)


def _dispatch(expert: jax.Array, num_experts: int) -> tuple[Dispatch, jax.Array]:
    """[B, A] -> the dispatch, and how many assignments each expert got [B, E]."""
    order = jnp.argsort(expert, axis=1, stable=True)
    sizes = jnp.sum(expert[..., None] == jnp.arange(num_experts), axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(sizes, axis=1) - sizes
    rank = jnp.argsort(order, axis=1) - jnp.take_along_axis(starts, expert, axis=1)
    return Dispatch(order, starts, expert, rank), sizes


def _round(
    capacity: int, number: jax.Array | int, dispatch: Dispatch, x: jax.Array, w_in: Table, w_out: Table
) -> jax.Array:
    """The outputs [B, A, D] of the assignments of rank number * C .. number * C + C - 1, zero for the others."""
    batch, num_experts = dispatch.starts.shape
    first = number * capacity
    slots = dispatch.starts[..., None] + first + jnp.arange(capacity)
    taken = _rows(dispatch.order, jnp.minimum(slots.reshape(batch, -1), dispatch.order.shape[1] - 1))
    per_token = dispatch.order.shape[1] // x.shape[1]
    inputs = _rows(x, taken // per_token).reshape(batch, num_experts, capacity, -1)
    inputs = jnp.moveaxis(inputs, 1, 0)  # experts first, as in the weights: else XLA transposes those
    hidden = jax.vmap(functools.partial(product, dtype=sums(x.dtype)))(inputs, w_in)
    hidden = jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :]
    outputs = jax.vmap(functools.partial(product_of_sums, dtype=x.dtype))(hidden, w_out)
    outputs = jnp.moveaxis(outputs, 0, 1)
    outputs = outputs.reshape(batch, num_experts * capacity, -1)
    slot = jnp.clip(dispatch.rank - first, 0, capacity - 1)
    here = dispatch.rank // capacity == number
    return jnp.where(here[..., None], _rows(outputs, dispatch.expert * capacity + slot), 0)


def _rows(array: jax.Array, index: jax.Array) -> jax.Array:
    """array[b, index[b]] for every b: [B, N, ...], [B, M] -> [B, M, ...]."""
    return jax.vmap(lambda row, at: row[at])(array, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounds(capacity: int, count: jax.Array, dispatch: Dispatch, x: jax.Array, w_in: Table, w_out: Table) -> jax.Array:
    """The sum of all rounds. Their number is data, which reverse mode cannot go through by itself."""
    part = functools.partial(_round, capacity)
    inputs = _rows(x, dispatch.order // (dispatch.order.shape[1] // x.shape[1]))
    empty = jnp.zeros_like(inputs, sums(x.dtype))
    return lax.fori_loop(0, count, lambda r, y: y + part(r, dispatch, x, w_in, w_out), empty)


def _rounds_forward(
    capacity: int, count: jax.Array, dispatch: Dispatch, *operands: jax.Array
) -> tuple[jax.Array, tuple]:
    return _rounds(capacity, count, dispatch, *operands), (count, dispatch, operands)


def _rounds_backward(capacity: int, saved: tuple, gradient: jax.Array) -> tuple:
    """Round by round again: nothing but the operands is kept from the way there."""
    count, dispatch, operands = saved

    def add(number: jax.Array, sums: tuple) -> tuple:
        _, pull = jax.vjp(lambda *operands: _round(capacity, number, dispatch, *operands), *operands)
        return jax.tree.map(jnp.add, sums, pull(gradient))

    sums = lax.fori_loop(0, count, add, jax.tree.map(jnp.zeros_like, operands))
    return (None, None, *sums)


_rounds.defvjp(_rounds_forward, _rounds_backward)
