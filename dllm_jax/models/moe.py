"""The experts of a mixture: tokens sorted by expert and a grouped product where there is one, else products in rounds.

On TPU `lax.ragged_dot` is a kernel over tiles of sorted rows: it reads the weights of each expert that is chosen once,
in place and as they are stored (int8 too), and pads rows to tiles only (`in_groups`). Elsewhere it becomes one dense
product of E times the work and memory, on CPU as on NVIDIA GPUs, which therefore have a kernel of our own
(`dllm_jax/kernels/pallas_experts.py`).

On CPU, for int4 and float16, which neither kernel takes, and for gradients, a batched product over all experts reads
all weights in place, once a round (`in_rounds`); it splits over the experts, over their hidden width and over the batch
without any annotation of devices. A loop over tiles of one expert each, in XLA's own operations, slices the weights at
places that are data, so that a compiler has to gather split weights; it is also a long chain of small products.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding

from dllm_jax.kernels import pallas_experts
from dllm_jax.kernels.dispatch import kernels_run
from dllm_jax.parallel.layout import LayoutLike, MeshAxes, mesh_names
from dllm_jax.params.products import ACTIVATIONS, Activation, Table, product, product_of_sums, sums
from dllm_jax.params.quantized import QuantizedKernel

TILE_ROWS: Mapping[str, int] = types.MappingProxyType({"cpu": 32, "default": 256})
"""Rows an expert runs in one round, about where arithmetic takes as long as reading its weights: below, rows are free,
above, padding costs. 32 is measured (`benchmarks/moe.py`); 256 is bfloat16 FLOPs per byte of current accelerators."""

By = Literal["ragged_dot", "cuda", "interpret"]
"""What computes grouped products: XLA's operation, or our kernel as `dllm_jax.kernels.pallas_experts` runs it."""

GROUPED: Mapping[str, By] = types.MappingProxyType({"tpu": "ragged_dot", "cuda": "cuda"})
"""Platforms that have a kernel, and which."""

TOKENS = ("batch", None, None)
AXES = (("expert", None, None, "mlp"), ("expert", "mlp", None))
"""Logical axes of tokens, and of `w_in` and `w_out` where they are used; what else splits them is gathered first."""


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


class Routing(NamedTuple):
    """How tokens were sent to experts, as sums over those that count: of a layer, or of the L layers with experts, when
    each has an axis in front.

    Attributes:
        chosen: [E] float32, how many chose each expert.
        probability: [E] float32, of the router's softmax over all experts.
        square: scalar float32, of the square of logsumexp of the router's scores.
        tokens: scalar float32, how many count.
    """

    chosen: jax.Array
    probability: jax.Array
    square: jax.Array
    tokens: jax.Array


def routing_of(scores: jax.Array, ids: jax.Array, counted: jax.Array) -> Routing:
    """The routing of tokens with the router's scores [B, T, E] float32, which went to `ids` [B, T, k], where `counted`
    [B, T] bool."""
    total = lambda x: jnp.sum(jnp.where(counted.reshape(*counted.shape, *(1,) * (x.ndim - 2)), x, 0), axis=(0, 1))
    chosen = jnp.any(ids[..., None] == jnp.arange(scores.shape[-1]), axis=-2)
    square = jnp.square(jax.nn.logsumexp(scores, axis=-1))
    ones = jnp.ones(counted.shape, jnp.float32)
    return Routing(*map(total, (chosen.astype(jnp.float32), jax.nn.softmax(scores, axis=-1), square, ones)))


def apply_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w_in: Table,
    w_out: Table,
    layout: LayoutLike | None = None,
    activation: Activation = "silu",
) -> jax.Array:
    """sum_k weights[..., k] * expert[ids[..., k]](x), with expert(x) = (activation(x gate) * (x up)) w_out.

    Every assignment is computed, and (up to padding) nothing else. A token's result depends on no other token.

    Reverse mode goes through it, forward mode does not.

    Args:
        x: [B, T, D].
        ids: [B, T, k] int32 below E, no expert twice for one token.
        weights: [B, T, k], in the dtype of x.
        w_in: [E, 2, D, F], gate first; w_out: [E, F, D]; either may be quantized.
        layout: how tokens and experts lie on a mesh; None for one device, and where the caller places everything (on
            TPU tokens and experts that are split without a layout are gathered, unless there is a gradient; on CUDA
            they are run in rounds where there are several devices).
        activation: our kernel for CUDA has silu only; others are run in rounds there.

    Returns:
        [B, T, D] in the `sums` of the dtype of x.
    """
    on: dict[str, Callable[..., jax.Array]] = {
        platform: functools.partial(in_rounds, rows, activation=activation) for platform, rows in TILE_ROWS.items()
    }
    for platform, by in GROUPED.items():
        if _groups(by, x, w_in, layout) and (by == "ragged_dot" or activation == "silu"):
            on[platform] = functools.partial(_on_parts, by, layout, activation)
    if on_cpus(layout):
        # Nothing is left to the platform: the gradient would be a conditional with collectives in it, which XLA's CPU
        # backend runs in each process in another order.
        return on.get("cpu", on["default"])(x, ids, weights, w_in, w_out)
    return lax.platform_dependent(x, ids, weights, w_in, w_out, **on)


def on_cpus(layout: LayoutLike | None) -> bool:
    """Whether arrays lie on a mesh of CPUs."""
    return layout is not None and layout.mesh.devices.flat[0].platform == "cpu"


def _groups(by: By, x: jax.Array, w_in: Table, layout: LayoutLike | None) -> bool:
    """Whether `in_groups` can run this, and on a mesh knows what each device is to run."""
    stored = not isinstance(w_in, QuantizedKernel) or w_in.bits == "int8"
    mesh = jax.sharding.get_abstract_mesh()
    if not (stored and x.dtype != jnp.float16 and (mesh.empty or mesh.are_all_axes_manual)):
        return False
    if by != "ragged_dot" and not (kernels_run(x.dtype, layout) and pallas_experts.fits(_part(w_in, layout))):
        return False
    return layout is None or not {*mesh_names(*layout.spec(x, TOKENS))} & {*mesh_names(*_split(w_in, layout))}


def _part(w_in: Table, layout: LayoutLike | None) -> tuple[int, ...]:
    """The shape of a device's part."""
    if layout is None:
        return w_in.shape
    return NamedSharding(layout.mesh, layout.spec(w_in, AXES[0])).shard_shape(w_in.shape)


def _on_parts(
    by: By,
    layout: LayoutLike | None,
    activation: Activation,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *tables: Table,
) -> jax.Array:
    """`in_groups` of each device's tokens with its part of the experts, summed over the devices that share tokens.

    So are gradients, whose rounds then need no other device's weights: what is split for storage alone is gathered once
    a layer, and its gradient summed once. Rounds of the whole do both in every round.
    """
    if layout is None or not jax.sharding.get_abstract_mesh().empty:
        return in_groups(by, x, ids, weights, *tables, None, activation)
    tokens, (experts, width) = layout.spec(x, TOKENS), _split(tables[0], layout)

    def part(x: jax.Array, ids: jax.Array, weights: jax.Array, w_in: Table, w_out: Table) -> jax.Array:
        first = lax.axis_index(experts) * w_out.shape[0] if experts else None
        return lax.psum(in_groups(by, x, ids, weights, w_in, w_out, first, activation), mesh_names(experts, width))

    place = lambda table, axes: jax.tree.map(lambda x: layout.spec(x, axes), table)
    specs = (tokens, tokens, tokens, *map(place, tables, AXES))
    mapped = jax.shard_map(part, mesh=layout.mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return mapped(x, ids, weights, *tables)


def _split(w_in: Table, layout: LayoutLike) -> tuple[MeshAxes, MeshAxes]:
    """The mesh axes that split the experts, and their hidden width."""
    experts, _, _, width = layout.spec(jax.tree.leaves(w_in)[0], AXES[0])
    return experts, width


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 7))
def in_groups(
    by: By,
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
    by: By,
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
    by_dot = functools.partial(_by_ragged_dot, activation)
    run = by_dot if by == "ragged_dot" else functools.partial(pallas_experts.experts, by)
    y = run(x.reshape(-1, x.shape[-1]), order, sizes, w_in, w_out)
    if first is not None:  # rows after all groups may be unwritten
        y = jnp.where((expert < w_out.shape[0])[:, None], y, 0)
    return jnp.einsum("btkd,btk->btd", y.reshape(*ids.shape, -1), weights)


def _among(ids: jax.Array, num_experts: int, first: jax.Array | None) -> jax.Array:
    """Ids counted from the `first` expert here; that of an expert elsewhere is E."""
    if first is None:
        return ids
    return jnp.where((ids >= first) & (ids < first + num_experts), ids - first, num_experts)


def _by_ragged_dot(
    activation: Activation, x: jax.Array, order: jax.Array, sizes: jax.Array, w_in: Table, w_out: Table
) -> jax.Array:
    """As `grouped.experts`."""
    rows = x[order // (len(order) // len(x))]
    # Gate and up are groups of their own, and the other's are empty: a slice of the weights would be a copy.
    halves, none = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), w_in), jnp.zeros_like(sizes)
    gate, up = (_grouped(rows, halves, jnp.stack(pair, 1).reshape(-1)) for pair in ((sizes, none), (none, sizes)))
    return _grouped(ACTIVATIONS[activation](gate) * up, w_out, sizes)[jnp.argsort(order)]


def _grouped(rows: jax.Array, tables: Table, sizes: jax.Array) -> jax.Array:
    """Rows sorted by group times their groups' matrices, in their dtype: [A, in], [G, in, out], [G] -> [A, out]."""
    if not isinstance(tables, QuantizedKernel):
        return lax.ragged_dot(rows, tables.astype(rows.dtype), sizes)
    y = lax.ragged_dot(rows, tables.values, sizes, preferred_element_type=jnp.dtype(jnp.float32))
    group = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
    return (y * tables.scale[group, 0]).astype(rows.dtype)


@functools.cache
def _one_batch(by: By, activation: Activation) -> Callable[..., jax.Array]:
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


def _in_groups_forward(by: By, *operands: Any) -> tuple[jax.Array, tuple]:
    """By rounds, as the gradient: XLA makes that of a `ragged_dot`'s weights by a dense product of E times the work, on
    TPU too, and our kernel has none."""
    return in_rounds(TILE_ROWS["default"], *operands), operands[:6]


def _in_groups_backward(by: By, activation: Activation, operands: tuple, gradient: jax.Array) -> tuple:
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
