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
"""Bytes of a core's own memory that a kernel may fill: more than a v4 has, a quarter of a v5e's."""


def refusal(device: jax.Device | None, query: Any, key: Any, value: Any, visible: Any, since: Any = None) -> str | None:
    """Why they cannot attend, None if they can; operands as of `attend` or their shapes."""
    if since is not None:
        return "they know no first key, of a sliding window or of a document"
    if device is not None and re.search(r"v[234]\b", device.device_kind):
        return f"they fill more of a core's own memory than a {device.device_kind} has"
    return _refusal(query, key)


def refusal_in_blocks(device: jax.Device | None, *operands: Any) -> str | None:
    """As `refusal`, of `attend_in_blocks`."""
    return refusal(device, *operands[:3], *operands[5:])


def _refusal(query: Any, key: Any) -> str | None:
    """Why sizes do not fit.

    A core's own memory has to hold all queries of one head in the backward pass, what comes back to them and, in
    float32, their gradient, and at the same time those of the next head; forward all keys and values.
    """
    size, width = query.shape[3], jnp.dtype(query.dtype).itemsize
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"they are for float32 and bfloat16, and the model computes in {query.dtype}"
    if size not in HEAD_DIMS or size * width > 512:
        return f"heads of {size} in {query.dtype} are not of 64, 128 or 256 numbers in 512 bytes"
    longest = max(query.shape[1], key.shape[1])
    if (4 * width + 8) * -(-longest // TILE) * TILE * max(size, 128) > VMEM * 5 // 8:  # rows are filled up to 128 lanes
        return f"{longest} positions of a head do not fit into a core's memory"
    return None


def attend(
    device: Any, query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """softmax(query key / sqrt(H)) value over the first `visible` keys of each query: [B, T, N, H], with a gradient.

    Products are as exact as the platform's default, sums and softmax in float32.

    Args:
        device: of no interest.
        query: [B, T, N, H].
        key, value: [B, S, K, H], K dividing N.
        visible: [B, T or 1] int32.
        interpret: run one operation after the other, on any platform.
    """
    return attend_with_sums(query, key, value, visible, interpret)[0]


def attend_in_blocks(device: Any, block_length: int, *operands: jax.Array, interpret: bool = False) -> jax.Array:
    """`attention_in_blocks` by the kernels for what lies before each block, of which the rest is a small part.

    Args:
        operands: query, own keys and values, those before, and visible [B, T or 1].
        device, interpret: as of `attend`.
    """
    query, key, value, *before, visible = operands
    end = jnp.minimum(block_starts(query, block_length), visible)
    part, sums = attend_with_sums(query, before[0], before[1], end, interpret)
    own, own_sums = attend_own_blocks(block_length, query, key, value, visible)
    return merge(own, own_sums, part, sums)


def attend_with_sums(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """`attend`, and the logarithm of each query's sum of exponentials, [B, T, N] float32, to merge it with a result
    over other keys. Where a query sees none it is next to minus infinity."""
    visible = jnp.broadcast_to(jnp.minimum(visible, key.shape[1]), query.shape[:2])
    heads_first = (jnp.swapaxes(fill(x, TILE), 1, 2) for x in (query, key, value))
    out, sums = _attend(interpret, *heads_first, fill(visible, TILE)[:, None, None])
    positions_first = lambda x: jnp.swapaxes(x, 1, 2)[:, : query.shape[1]]
    return positions_first(out), positions_first(sums[:, :, 0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    interpret: bool, query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """[B, N, T, H], [B, K, S, H] twice and [B, 1, 1, T] -> [B, N, T, H] and [B, N, 1, T], of filled lengths."""
    return _forward(interpret, query, key, value, visible)[0]


def _forward(interpret: bool, *operands: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    query, key, value, visible = operands
    rows = jax.ShapeDtypeStruct((*query.shape[:2], 1, query.shape[2]), jnp.float32)  # [B, N, 1, T]
    found = _kernel(_result, interpret, [query, visible], [key, value], [query, rows], [])
    out, sums = (checkpoint_name(x, KEPT) for x in found)
    return (out, sums), (*operands, out, sums)


def _backward(
    interpret: bool, saved: tuple[jax.Array, ...], gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    query, key, value, visible, out, sums = saved
    gradient, of_sums = gradients
    mean = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)[:, :, None]  # [B, N, 1, T]
    mean -= of_sums  # a score changes its query's sum by the key's weight
    # Of keys and values one for every head of queries, whose sum is that of the head they share.
    each = jax.ShapeDtypeStruct((*query.shape[:2], *key.shape[2:]), jnp.float32)
    whole = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    of_queries = [query, visible, gradient, sums, mean]
    to_key, to_value, to_query = _kernel(_gradients, interpret, [key, value], of_queries, [each, each], [whole])
    shared = lambda x: x.reshape(*key.shape[:2], -1, *key.shape[2:]).sum(2)
    return to_query.astype(query.dtype), shared(to_key).astype(key.dtype), shared(to_value).astype(key.dtype), None


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

    Arrays are [B, heads, length, H], or [B, heads, 1, length] of a number each; the heads of queries share what has
    fewer. A kernel sees a tile of `tiled`, the first of which has H, and of `outputs`, and all of `whole` by tiles. All
    tiles of a head, one after the other, write into what is `gathered`.
    """
    batch, heads = outputs[0].shape[:2]
    length = outputs[0].shape[2]

    def spec(x: Any, tile: int | None) -> pl.BlockSpec:
        in_rows = x.shape[2] == 1
        head = lambda n: lax.div(n, heads // x.shape[1])  # what // becomes asks for a TPU that is there
        width = tile or x.shape[3 if in_rows else 2]
        at = lambda i: i if tile else 0
        if in_rows:
            return pl.BlockSpec((None, None, 1, width), lambda b, n, i: (b, head(n), 0, at(i)))
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


def _scores(key: jax.Array, query: jax.Array, visible: jax.Array, first: jax.Array) -> jax.Array:
    """[C, H] of the keys from `first` on, [R, H], [1, R] -> [C, R] float32."""
    scores = _dot(key, query, 1, 1) / math.sqrt(query.shape[1])
    place = first + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    return jnp.where(place < visible, scores, UNSEEN)


def _seen(visible: jax.Array, tile: int) -> jax.Array:
    """Number of tiles of keys that some query sees."""
    return lax.div(jnp.max(visible) + tile - 1, tile)


def _result(tile: int, *refs: Any) -> None:
    query_ref, visible_ref, key_ref, value_ref, out_ref, sums_ref = refs
    query, visible = query_ref[...], visible_ref[...]  # [R, H], [1, R]

    def add(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        most, total, result = carry  # [1, R], [1, R], [H, R]
        at = pl.ds(pl.multiple_of(i * tile, tile), tile)
        scores = _scores(key_ref[at, :], query, visible, i * tile)
        new = jnp.maximum(most, jnp.max(scores, axis=0, keepdims=True))
        weights, keep = jnp.exp(scores - new), jnp.exp(most - new)
        value = value_ref[at, :]
        result = result * keep + _dot(value, weights.astype(value.dtype), 0, 0)
        return new, total * keep + jnp.sum(weights, axis=0, keepdims=True), result

    rows = (1, query.shape[0])
    start = jnp.full(rows, UNSEEN, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(query.shape[::-1], jnp.float32)
    most, total, result = lax.fori_loop(0, _seen(visible, tile), add, start)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    out_ref[...] = (result / total).T.astype(out_ref.dtype)
    sums_ref[...] = most + jnp.log(total)


def _gradients(tile: int, *refs: Any) -> None:
    key_ref, value_ref, query_ref, visible_ref, gradient_ref, sums_ref, mean_ref, *to_refs = refs
    to_key_ref, to_value_ref, to_query_ref = to_refs
    key, value = key_ref[...], value_ref[...]  # [C, H]
    first = pl.program_id(2) * tile
    scale = 1 / math.sqrt(key.shape[1])

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        to_query_ref[...] = jnp.zeros_like(to_query_ref)

    def add(i: jax.Array, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = pl.ds(pl.multiple_of(i * tile, tile), tile)
        query, gradient, visible = query_ref[at, :], gradient_ref[at, :], visible_ref[:, at]

        def meet() -> tuple[jax.Array, jax.Array]:
            weights = jnp.exp(_scores(key, query, visible, first) - sums_ref[:, at])  # [C, R]
            to_scores = weights * (_dot(value, gradient, 1, 1) - mean_ref[:, at])
            to_scores = (to_scores * scale).astype(query.dtype)
            to_query_ref[at, :] += _dot(to_scores, key, 0, 0)
            to_value = _dot(weights.astype(gradient.dtype), gradient, 1, 0)
            return totals[0] + _dot(to_scores, query, 1, 0), totals[1] + to_value

        return lax.cond(jnp.max(visible) > first, meet, lambda: totals)

    none = jnp.zeros(key.shape, jnp.float32)
    to_key_ref[...], to_value_ref[...] = lax.fori_loop(0, query_ref.shape[0] // tile, add, (none, none))
