"""Experts in XLA's own operations: rounds of a batched product, and grouped products over tokens sorted by expert.

On TPU `lax.ragged_dot` is a kernel over tiles of sorted rows: it reads the weights of each expert that is chosen once,
in place and as they are stored (int8 too), and pads rows to tiles only (`in_groups`). On CPU and NVIDIA GPUs it becomes
one dense product of E times the work and memory. There, for int4 and float16, and for gradients, a batched product over
all experts reads all weights in place, once a round (`in_rounds`); it splits over the experts, over their hidden width
and over the batch without any annotation of devices. A loop over tiles of one expert each slices the weights at places
that are data, so that a compiler has to gather split weights; it is also a long chain of small products.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from dllm_jax.kernels.experts import tokamax
from dllm_jax.params.products import ACTIVATIONS, Activation, Table, product, product_of_sums, sums
from dllm_jax.params.quantized import QuantizedKernel

TILE_ROWS: Mapping[str, int] = types.MappingProxyType({"cpu": 32, "default": 256})
"""Rows an expert runs in one round, about where arithmetic takes as long as reading its weights: below, rows are free,
above, padding costs. 32 is measured (`benchmarks/moe.py`); 256 is bfloat16 FLOPs per byte of current accelerators."""


class Grouped(NamedTuple):
    """What computes grouped products: XLA's `lax.ragged_dot`, or tokamax for this device."""

    device: jax.Device | None = None

    def __call__(self, rows: jax.Array, tables: Table, sizes: jax.Array) -> jax.Array:
        """Rows sorted by group times their groups' matrices, in their dtype: [A, in], [G, in, out], [G] -> [A, out]."""
        if not isinstance(tables, QuantizedKernel):
            of_device = lax.ragged_dot if self.device is None else functools.partial(tokamax.ragged_dot, self.device)
            return of_device(rows, tables.astype(rows.dtype), sizes)
        y = lax.ragged_dot(rows, tables.values, sizes, preferred_element_type=jnp.dtype(jnp.float32))
        group = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
        return (y * tables.scale[group, 0]).astype(rows.dtype)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 7))
def in_groups(
    by: Grouped,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w_in: Table,
    w_out: Table,
    first: jax.Array | None = None,
    activation: Activation = "silu",
) -> jax.Array:
    """`apply_experts` by grouped products over the whole batch, in the dtype of x, which is not float16.

    Where a gradient is asked for it is `in_rounds`. What `vmap` maps over becomes part of the batch, unless it has
    experts of its own.

    Args:
        first: which expert is the first of those here, where they are a device's part; the others add zero.
    """
    return _one_batch(by, activation)(x, ids, weights, w_in, w_out, first)


def _in_groups(
    by: Grouped,
    activation: Activation,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w_in: Table,
    w_out: Table,
    first: jax.Array | None,
) -> jax.Array:
    expert = _among(ids.reshape(-1), w_out.shape[0], first)
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.sum(expert[:, None] == jnp.arange(w_out.shape[0]), axis=0, dtype=jnp.int32)
    rows = x.reshape(-1, x.shape[-1])[order // ids.shape[-1]]
    # Gate and up are groups of their own, and the other's are empty: a slice of the weights would be a copy.
    halves, none = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), w_in), jnp.zeros_like(sizes)
    gate, up = (by(rows, halves, jnp.stack(pair, 1).reshape(-1)) for pair in ((sizes, none), (none, sizes)))
    y = by(ACTIVATIONS[activation](gate) * up, w_out, sizes)[jnp.argsort(order)]
    if first is not None:  # rows after all groups may be unwritten
        y = jnp.where((expert < w_out.shape[0])[:, None], y, 0)
    return jnp.einsum("btkd,btk->btd", y.reshape(*ids.shape, -1), weights)


def _among(ids: jax.Array, num_experts: int, first: jax.Array | None) -> jax.Array:
    """Ids counted from the `first` expert here; that of an expert elsewhere is E."""
    if first is None:
        return ids
    return jnp.where((ids >= first) & (ids < first + num_experts), ids - first, num_experts)


@functools.cache
def _one_batch(by: Grouped, activation: Activation) -> Callable[..., jax.Array]:
    """`_in_groups` with a rule for `vmap`: mapped tokens are rows of a larger batch, mapped experts take turns."""
    apply = custom_vmap(lambda *operands: _in_groups(by, activation, *operands))

    @apply.def_vmap
    def _(size: int, mapped: Sequence[Any], *operands: Any) -> tuple[jax.Array, bool]:
        everywhere = lambda x, is_mapped: x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
        if any(jax.tree.leaves(mapped[3:])):
            return lax.map(lambda each: apply(*each), jax.tree.map(everywhere, operands, tuple(mapped))), True
        tokens = [everywhere(*pair) for pair in zip(operands[:3], mapped[:3], strict=True)]
        y = apply(*(x.reshape(-1, *x.shape[2:]) for x in tokens), *operands[3:])
        return y.reshape(size, -1, *y.shape[1:]), True

    return apply


def _in_groups_forward(by: Grouped, *operands: Any) -> tuple[jax.Array, tuple]:
    """By rounds, as the gradient: XLA makes that of a `ragged_dot`'s weights by a dense product of E times the work, on
    TPU too."""
    return in_rounds(TILE_ROWS["default"], *operands), operands[:6]


def _in_groups_backward(by: Grouped, activation: Activation, operands: tuple, gradient: jax.Array) -> tuple:
    rounds = functools.partial(in_rounds, TILE_ROWS["default"], activation=activation)
    return _floats(operands)[1](_pull(rounds, operands, gradient))


in_groups.defvjp(_in_groups_forward, _in_groups_backward)


def in_rounds(
    tile_rows: int,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w_in: Table,
    w_out: Table,
    first: jax.Array | None = None,
    activation: Activation = "silu",
) -> jax.Array:
    """`apply_experts` with rounds of `tile_rows` rows per expert, shared by the batch's rows, at least 8 for each.

    Args:
        first: as of `in_groups`.
    """
    batch, length, per_token = ids.shape
    expert = _among(ids.reshape(batch, -1), w_out.shape[0], first)
    dispatch, sizes = _dispatch(expert, w_out.shape[0])
    capacity = min(length, max(8, tile_rows // batch))
    if capacity == length:  # room for every token in one round
        y = _round(length, activation, 0, dispatch, x, w_in, w_out)
    else:
        y = _rounds(capacity, activation, -(-jnp.max(sizes) // capacity), dispatch, x, w_in, w_out)
    if first is not None:
        y = jnp.where((expert < w_out.shape[0])[..., None], y, 0)
    return jnp.einsum("btkd,btk->btd", y.reshape(batch, length, per_token, -1), weights)


def _dispatch(expert: jax.Array, num_experts: int) -> tuple[Dispatch, jax.Array]:
    """[B, A] -> the dispatch, and how many assignments each expert got [B, E]."""
    order = jnp.argsort(expert, axis=1, stable=True)
    sizes = jnp.sum(expert[..., None] == jnp.arange(num_experts), axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(sizes, axis=1) - sizes
    rank = jnp.argsort(order, axis=1) - jnp.take_along_axis(starts, expert, axis=1, mode="clip")
    return Dispatch(order, starts, expert, rank), sizes


def _round(
    capacity: int,
    activation: Activation,
    number: jax.Array | int,
    dispatch: Dispatch,
    x: jax.Array,
    w_in: Table,
    w_out: Table,
) -> jax.Array:
    """The outputs [B, A, D] of the assignments of rank number * C .. number * C + C - 1, zero for the others."""
    batch, num_experts = dispatch.starts.shape
    first = number * capacity
    slots = dispatch.starts[..., None] + first + jnp.arange(capacity)
    taken = _rows(dispatch.order, jnp.minimum(slots.reshape(batch, -1), dispatch.order.shape[1] - 1))
    per_token = dispatch.order.shape[1] // x.shape[1]
    inputs = _rows(x, taken // per_token).reshape(batch, num_experts, capacity, -1)
    inputs = jnp.moveaxis(inputs, 1, 0)  # experts first, as in the weights: else XLA transposes those
    both = jnp.broadcast_to(inputs[:, None], (num_experts, 2, *inputs.shape[1:]))  # for the same reason
    hidden = jax.vmap(jax.vmap(functools.partial(product, dtype=sums(x.dtype))))(both, w_in)
    hidden = ACTIVATIONS[activation](hidden[:, 0]) * hidden[:, 1]
    outputs = jax.vmap(functools.partial(product_of_sums, dtype=x.dtype))(hidden, w_out)
    outputs = jnp.moveaxis(outputs, 0, 1)
    outputs = outputs.reshape(batch, num_experts * capacity, -1)
    slot = jnp.clip(dispatch.rank - first, 0, capacity - 1)
    here = dispatch.rank // capacity == number
    return jnp.where(here[..., None], _rows(outputs, dispatch.expert * capacity + slot), 0)


def _rows(array: jax.Array, index: jax.Array) -> jax.Array:
    """array[b, index[b]] for every b: [B, N, ...], [B, M] -> [B, M, ...]."""
    return jax.vmap(lambda row, at: row[at])(array, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounds(
    capacity: int,
    activation: Activation,
    count: jax.Array,
    dispatch: Dispatch,
    x: jax.Array,
    w_in: Table,
    w_out: Table,
) -> jax.Array:
    """The sum of all rounds. Their number is data, which reverse mode cannot go through by itself."""
    part = functools.partial(_round, capacity, activation)
    inputs = _rows(x, dispatch.order // (dispatch.order.shape[1] // x.shape[1]))
    empty = jnp.zeros_like(inputs, sums(x.dtype))
    return lax.fori_loop(0, count, lambda r, y: y + part(r, dispatch, x, w_in, w_out), empty)


def _rounds_forward(
    capacity: int, activation: Activation, count: jax.Array, dispatch: Dispatch, *operands: jax.Array
) -> tuple[jax.Array, tuple]:
    return _rounds(capacity, activation, count, dispatch, *operands), (count, dispatch, operands)


def _rounds_backward(capacity: int, activation: Activation, saved: tuple, gradient: jax.Array) -> tuple:
    """Round by round again: nothing but the operands is kept from the way there. The rounds' sums are float32."""
    count, dispatch, operands = saved
    floats, filled = _floats(operands)

    def add(number: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        part = lambda *operands: _round(capacity, activation, number, dispatch, *operands)
        return jax.tree.map(jnp.add, totals, _pull(part, operands, gradient))

    zeros = [jnp.zeros_like(x, jnp.float32) for x in floats]
    totals = lax.fori_loop(0, count, add, zeros)
    return (None, None, *filled([total.astype(x.dtype) for total, x in zip(totals, floats, strict=True)]))


_rounds.defvjp(_rounds_forward, _rounds_backward)


def _pull(function: Callable[..., jax.Array], operands: tuple, gradient: jax.Array) -> list[jax.Array]:
    """The cotangents of the floating arrays among the operands."""
    floats, filled = _floats(operands)
    _, pull = jax.vjp(lambda *floats: function(*filled(floats, jax.tree.leaves(operands))), *floats)
    return list(pull(gradient))


def _floats(operands: tuple) -> tuple[list[jax.Array], Callable[..., tuple]]:
    """The floating arrays among the operands, and what fills their places: whole numbers have no cotangent, None."""
    leaves, tree = jax.tree.flatten(operands)
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def filled(floats: Sequence[jax.Array], others: Sequence[jax.Array | None] = (None,) * len(leaves)) -> tuple:
        following = iter(floats)
        pairs = zip(floating, others, strict=True)
        return jax.tree.unflatten(tree, [next(following) if is_floating else other for is_floating, other in pairs])

    return [leaf for leaf, is_floating in zip(leaves, floating, strict=True) if is_floating], filled
