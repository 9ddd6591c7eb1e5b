"""Attention on TPUs whose scores never leave the chip: Pallas kernels, forward and backward.

One kernel for the result and one for the gradients, as in FlashAttention-2 (arXiv 2307.08691): a tile of queries meets
the keys tile by tile, with a running maximum and sum; then a tile of keys meets the queries tile by tile, whose
gradient stays in the core's memory until the last tile of keys. The scores are computed again from what the forward
pass kept, the logarithm of each query's sum. Tiles that see nothing of each other are left out. Scores lie as [keys,
queries], so that a number for each query is a row.

No TPU ran them yet: they compile for one, and their numbers are tested in Pallas' interpreter. So they are used where
`use_kernels("tpu")` asks for them only.

Shape letters: B batch, T queries, S keys, N heads, K heads of keys and values, H head size; R, C those of a tile.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as for_tpu

from dllm_jax.kernels.attention.xla import UNSEEN, attend_own_blocks, block_starts, fill, merge

TILE = 256
"""Width of every tile, of which lengths are filled up to a multiple."""

HEAD_DIMS = (64, 128, 256)

KEPT = "attention"
"""Name of what the forward pass computed, for rematerialisation to keep."""

VMEM = 32 * 2**20
"""Bytes of a core's own memory that a kernel may fill: more than a v4 has, a quarter of a v5e's. Longer rows run in
parts, each of some queries and some keys."""


def refusal(device: jax.Device | None, query: Any, *others: Any) -> str | None:
    """Why they cannot attend, None if they can; operands as of `attend` or `attend_in_blocks`, or their shapes."""
    if device is not None and re.search(r"v[234]\b", device.device_kind):
        return f"they fill more of a core's own memory than a {device.device_kind} has"
    size, width = query.shape[3], jnp.dtype(query.dtype).itemsize
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"they are for float32 and bfloat16, and the model computes in {query.dtype}"
    if size not in HEAD_DIMS or size * width > 512:
        return f"heads of {size} in {query.dtype} are not of 64, 128 or 256 numbers in 512 bytes"
    return None


def attend(
    device: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    since: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """softmax(query key / sqrt(H)) value over the first `visible` keys of each query: [B, T, N, H], with a gradient.

    Products are as exact as the platform's default, sums and softmax in float32.

    Args:
        device: of no interest.
        query: [B, T, N, H].
        key, value: [B, S, K, H], K dividing N.
        visible: [B, T or 1] int32.
        since: of these keys the first that is seen, [B, T or 1] int32; None for all.
        interpret: run one operation after the other, on any platform.
    """
    return attend_with_sums(query, key, value, visible, since, interpret)[0]


def attend_in_blocks(device: Any, block_length: int, *operands: jax.Array, interpret: bool = False) -> jax.Array:
    """`attention_in_blocks` by the kernels for what lies before each block, of which the rest is a small part.

    Args:
        operands: query, own keys and values, those before, visible and, if there is one, since [B, T or 1].
        device, interpret: as of `attend`.
    """
    query, key, value, *before, visible = operands[:6]
    end, since = jnp.minimum(block_starts(query, block_length), visible), operands[6] if operands[6:] else None
    part, sums = attend_with_sums(query, before[0], before[1], end, since, interpret)
    own, own_sums = attend_own_blocks(block_length, query, key, value, visible)
    return merge(own, own_sums, part, sums)


def attend_with_sums(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, since: jax.Array | None, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """`attend`, and the logarithm of each query's sum of exponentials, [B, T, N] float32, to merge it with a result
    over other keys. Where a query sees none it is next to minus infinity."""
    bounds = [jnp.minimum(visible, key.shape[1]), *([] if since is None else [since])]
    seen = jnp.stack([fill(jnp.broadcast_to(x, query.shape[:2]), TILE) for x in bounds], axis=1)[:, None]
    heads_first = (jnp.swapaxes(fill(x, TILE), 1, 2) for x in (query, key, value))
    out, sums = _attend(interpret, *heads_first, seen)
    positions_first = lambda x: jnp.swapaxes(x, 1, 2)[:, : query.shape[1]]
    return positions_first(out), positions_first(sums[:, :, 0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    interpret: bool, query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """[B, N, T, H], [B, K, S, H] twice and `visible`, or that and `since`, [B, 1, 1 or 2, T] -> [B, N, T, H] and
    [B, N, 1, T], of filled lengths."""
    return _forward(interpret, query, key, value, seen)[0]


def _forward(interpret: bool, *operands: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    query, key, value, seen = operands

    def of(some: slice) -> list[jax.Array]:
        mine, parts = query[:, :, some], []
        rows = jax.ShapeDtypeStruct((*mine.shape[:2], 1, mine.shape[2]), jnp.float32)  # [B, N, 1, T]
        for place in _spans(key):
            tiled, whole = [mine, _of_keys(place, seen[..., some])], [x[:, :, place] for x in (key, value)]
            parts.append(_kernel(_result, interpret, tiled, whole, [mine, rows], []))
        return functools.reduce(_merge, parts)

    outs, sums = zip(*map(of, _spans(query)), strict=True)
    # What rematerialisation keeps.
    found = checkpoint_name(jnp.concatenate(outs, 2), KEPT), checkpoint_name(jnp.concatenate(sums, 3), KEPT)
    return found, (*operands, *found)


def _spans(x: jax.Array) -> list[slice]:
    """Parts of about the same length of which a core's own memory holds what a kernel sees of x [B, heads, length, H]:
    all queries, what comes back to them and, in float32, their gradient, and at the same time those of the next head;
    forward all keys and values."""
    row = (4 * x.dtype.itemsize + 8) * max(x.shape[3], 128)  # filled up to 128 lanes
    parts = -(-x.shape[2] * row // (VMEM * 5 // 8))
    size = -(-x.shape[2] // (parts * TILE)) * TILE
    return [slice(start, min(start + size, x.shape[2])) for start in range(0, x.shape[2], size)]


def _of_keys(place: slice, seen: jax.Array) -> jax.Array:
    """What queries see of some keys, counted from the first of these."""
    return jnp.clip(seen - place.start, 0, place.stop - place.start)


def _merge(some: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
    """Results over two sets of keys as one over both, and the sums' logarithm."""
    (out, sums), (other, other_sums) = some, others
    return [merge(out, sums[:, :, 0], other, other_sums[:, :, 0]), jnp.logaddexp(sums, other_sums)]


def _backward(
    interpret: bool, saved: tuple[jax.Array, ...], gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    query, key, value, seen, out, sums = saved
    gradient, of_sums = gradients
    mean = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)[:, :, None]  # [B, N, 1, T]
    mean -= of_sums  # a score changes its query's sum by the key's weight

    def of(some: slice, place: slice) -> list[jax.Array]:
        """Gradients of some keys and their values, for every head of queries, and of some queries."""
        tiled, mine = [x[:, :, place] for x in (key, value)], query[:, :, some]
        like = lambda x: jax.ShapeDtypeStruct((*query.shape[:2], *x.shape[2:]), jnp.float32)
        whole = [mine, _of_keys(place, seen[..., some]), gradient[:, :, some], sums[..., some], mean[..., some]]
        return _kernel(_gradients, interpret, tiled, whole, list(map(like, tiled)), [like(mine)])

    found = [[of(some, place) for place in _spans(key)] for some in _spans(query)]
    total = functools.partial(functools.reduce, jnp.add)
    to_query = jnp.concatenate([total(part for _, _, part in parts) for parts in found], 2)

    def of_keys(which: int) -> jax.Array:
        whole = jnp.concatenate([total(each[which] for each in parts) for parts in zip(*found, strict=True)], 2)
        return whole.reshape(*key.shape[:2], -1, *key.shape[2:]).sum(2).astype(key.dtype)  # over heads that share one

    return to_query.astype(query.dtype), of_keys(0), of_keys(1), None


_attend.defvjp(_forward, _backward)


def _kernel(
    body: Callable[..., None],
    interpret: bool,
    tiled: Sequence[jax.Array],
    whole: Sequence[jax.Array],
    outputs: Sequence[Any],
    gathered: Sequence[Any],
) -> list[jax.Array]:
    """Runs a kernel for every row of the batch, head of queries and tile.

    Arrays are [B, heads, length, H], or [B, heads, 1 or 2, length] of a number or two each; the heads of queries share
    what has fewer. A kernel sees a tile of `tiled`, the first of which has H, and of `outputs`, and all of `whole` by
    tiles. All tiles of a head, one after the other, write into what is `gathered`.
    """
    batch, heads = outputs[0].shape[:2]
    length = outputs[0].shape[2]

    def spec(x: Any, tile: int | None) -> pl.BlockSpec:
        in_rows = x.shape[2] <= 2  # no length is
        head = lambda n: lax.div(n, heads // x.shape[1])  # what // becomes asks for a TPU that is there
        width = tile or x.shape[3 if in_rows else 2]
        at = lambda i: i if tile else 0
        if in_rows:
            return pl.BlockSpec((None, None, x.shape[2], width), lambda b, n, i: (b, head(n), 0, at(i)))
        return pl.BlockSpec((None, None, width, x.shape[3]), lambda b, n, i: (b, head(n), at(i), 0))

    varies = jax.typeof(tiled[0]).manual_axis_type  # in a caller's `shard_map`
    call = pl.pallas_call(
        functools.partial(body, TILE),
        grid=(batch, heads, length // TILE),
        in_specs=[spec(x, TILE) for x in tiled] + [spec(x, None) for x in whole],
        out_specs=[spec(x, TILE) for x in outputs] + [spec(x, None) for x in gathered],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varies) for x in (*outputs, *gathered)],
        compiler_params=None if interpret else _params("arbitrary" if gathered else "parallel"),
        interpret=interpret,
        name=body.__name__.strip("_"),
    )
    return call(*tiled, *whole)


def _params(order: Literal["parallel", "arbitrary"]) -> for_tpu.CompilerParams:
    """Rows and heads in any order and on any core, tiles in an order."""
    return for_tpu.CompilerParams(dimension_semantics=("parallel", "parallel", order), vmem_limit_bytes=VMEM)


def _dot(x: jax.Array, y: jax.Array, axis_of_x: int, axis_of_y: int) -> jax.Array:
    """Their product over one axis of each, in float32."""
    return lax.dot_general(x, y, (((axis_of_x,), (axis_of_y,)), ((), ())), preferred_element_type=jnp.float32)


def _scores(key: jax.Array, query: jax.Array, seen: jax.Array, first: jax.Array) -> jax.Array:
    """[C, H] of the keys from `first` on, [R, H], [1 or 2, R] -> [C, R] float32."""
    scores = _dot(key, query, 1, 1) / math.sqrt(query.shape[1])
    place = first + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    see = place < seen[:1]
    return jnp.where(see if len(seen) == 1 else see & (place >= seen[1:]), scores, UNSEEN)


def _tiles_seen(seen: jax.Array, tile: int) -> tuple[Any, jax.Array]:
    """The first tile of keys that some query sees, and the one after the last."""
    first = 0 if len(seen) == 1 else lax.div(jnp.min(seen[1:]), tile)
    return first, lax.div(jnp.max(seen[:1]) + tile - 1, tile)


def _result(tile: int, *refs: Any) -> None:
    query_ref, seen_ref, key_ref, value_ref, out_ref, sums_ref = refs
    query, seen = query_ref[...], seen_ref[...]  # [R, H], [1 or 2, R]

    def add(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        most, total, result = carry  # [1, R], [1, R], [H, R]
        at = pl.ds(pl.multiple_of(i * tile, tile), tile)
        scores = _scores(key_ref[at, :], query, seen, i * tile)
        new = jnp.maximum(most, jnp.max(scores, axis=0, keepdims=True))
        weights, keep = jnp.exp(scores - new), jnp.exp(most - new)
        value = value_ref[at, :]
        result = result * keep + _dot(value, weights.astype(value.dtype), 0, 0)
        return new, total * keep + jnp.sum(weights, axis=0, keepdims=True), result

    rows = (1, query.shape[0])
    start = jnp.full(rows, UNSEEN, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(query.shape[::-1], jnp.float32)
    most, total, result = lax.fori_loop(*_tiles_seen(seen, tile), add, start)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    out_ref[...] = (result / total).T.astype(out_ref.dtype)
    sums_ref[...] = most + jnp.log(total)


def _gradients(tile: int, *refs: Any) -> None:
    key_ref, value_ref, query_ref, seen_ref, gradient_ref, sums_ref, mean_ref, *to_refs = refs
    to_key_ref, to_value_ref, to_query_ref = to_refs
    key, value = key_ref[...], value_ref[...]  # [C, H]
    number = pl.program_id(2)
    first, scale = number * tile, 1 / math.sqrt(key.shape[1])

    @pl.when(number == 0)
    def _() -> None:
        to_query_ref[...] = jnp.zeros_like(to_query_ref)

    def add(i: jax.Array, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = pl.ds(pl.multiple_of(i * tile, tile), tile)
        query, gradient, seen = query_ref[at, :], gradient_ref[at, :], seen_ref[:, at]

        def meet() -> tuple[jax.Array, jax.Array]:
            weights = jnp.exp(_scores(key, query, seen, first) - sums_ref[:, at])  # [C, R]
            to_scores = weights * (_dot(value, gradient, 1, 1) - mean_ref[:, at])
            to_scores = (to_scores * scale).astype(query.dtype)
            to_query_ref[at, :] += _dot(to_scores, key, 0, 0)
            to_value = _dot(weights.astype(gradient.dtype), gradient, 1, 0)
            return totals[0] + _dot(to_scores, query, 1, 0), totals[1] + to_value

        begin, end = _tiles_seen(seen, tile)
        return lax.cond((begin <= number) & (number < end), meet, lambda: totals)

    none = jnp.zeros(key.shape, jnp.float32)
    to_key_ref[...], to_value_ref[...] = lax.fori_loop(0, query_ref.shape[0] // tile, add, (none, none))
