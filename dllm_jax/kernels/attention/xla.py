"""Attention in XLA's own operations, with the scores of some queries at a time: the fallback of every kernel, and what
kernels merge their part of a block's keys with.

Shape letters: B batch, T queries, S keys, N heads, K heads of keys and values, H head size.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.models.kv_cache import LayerKV
from dllm_jax.params.products import redirect_gradient

QUERIES = 512
"""Queries whose scores exist at a time: of 32 heads and 4096 keys 256 MiB, instead of 2 GiB for as many queries."""

UNSEEN = -1e30
"""Score of a key that a query does not see: finite, so that one that sees none gets a mean instead of NaN."""


def fill(x: jax.Array, multiple: int) -> jax.Array:
    """[B, T, ...] with zeros after, up to a T that is a multiple."""
    return jnp.pad(x, [(0, -length % multiple if axis == 1 else 0) for axis, length in enumerate(x.shape)])


def in_parts(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    since: jax.Array | None = None,
    queries: int = QUERIES,
) -> jax.Array:
    """`attention` in XLA's own operations.

    From twice `queries` positions on they are taken `queries` at a time, and the scores of each part are computed again
    in the backward pass instead of being kept. A query's result is that of the whole: its softmax is its own.
    """
    length = query.shape[1]
    if length < 2 * queries:
        return _attend(query, key, value, visible, since)
    parts = lambda bound: None if bound is None or bound.shape[1] == 1 else _parts(bound, queries)
    or_whole = lambda part, whole: whole if part is None else part
    of_parts = _parts(query, queries), parts(visible), parts(since)
    reread = _reread(LayerKV(key, value))

    @jax.checkpoint
    def of_part(part: tuple[jax.Array, jax.Array | None, jax.Array | None]) -> jax.Array:
        return _attend(part[0], *reread(), or_whole(part[1], visible), or_whole(part[2], since))

    found = lax.map(of_part, of_parts)  # [T / queries, B, queries, N, H]
    return jnp.moveaxis(found, 0, 1).reshape(query.shape[0], -1, *query.shape[2:])[:, :length]


def block_starts(query: jax.Array, block_length: int) -> jax.Array:
    """The first position of each query's block, [T] int32."""
    return jnp.arange(query.shape[1], dtype=jnp.int32) // block_length * block_length


def merge(own: jax.Array, own_sums: jax.Array, before: jax.Array, sums: jax.Array) -> jax.Array:
    """Attention to both of two sets of keys, from the results [..., H] and the logarithms of the sums of exponentials
    [...] of each; in the dtype of `before`."""
    share = jax.nn.sigmoid(own_sums - sums)[..., None]
    return (own * share + before.astype(jnp.float32) * (1.0 - share)).astype(before.dtype)


@functools.partial(jax.checkpoint, static_argnums=0)  # keeps no scores for the backward pass
def attend_own_blocks(
    block_length: int, query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention to a query's own block alone: [B, T, N, H] float32, and the logarithm of each sum, [B, T, N]."""
    (batch, length, heads, size), groups = query.shape, key.shape[2]
    visible = jnp.broadcast_to(visible, (batch, length))
    fold = lambda x, *heads: x.reshape(batch, -1, block_length, *heads)
    score = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = score("bclkgh,bcmkh->bclkgm", fold(query, groups, heads // groups, size), fold(key, groups, size))
    place = jnp.arange(length, dtype=jnp.int32).reshape(-1, 1, block_length)
    see = (place < fold(visible)[..., None])[:, :, :, None, None]
    scores = jnp.where(see, scores * size**-0.5, UNSEEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    found = score("bclkgm,bcmkh->bclkgh", weights, fold(value, groups, size))
    return found.reshape(query.shape), jax.nn.logsumexp(scores, axis=-1).reshape(query.shape[:3])


def blocks_in_parts(block_length: int, *operands: jax.Array) -> jax.Array:
    """`attention_in_blocks` in XLA's own operations, one softmax over both, for whole blocks of about `QUERIES` queries
    at a time as `in_parts`.

    Args:
        operands: query, own keys and values, those before, visible [B, T or 1], and since if there is one.
    """
    query, own, before = operands[0], LayerKV(*operands[1:3]), LayerKV(*operands[3:5])
    shape, heads = query.shape, own.key.shape[2]
    fold = lambda x, *heads: x.reshape(shape[0], -1, block_length, *heads)  # [B, C, L, ...]
    visible, *since = (fold(jnp.broadcast_to(x, shape[:2])) for x in operands[5:])
    starts = jnp.broadcast_to(jnp.arange(0, shape[1], block_length, dtype=jnp.int32), visible.shape[:2])
    keys_values = (fold(x, heads, shape[3]) for x in own)
    blocks = fold(query, heads, shape[2] // heads, shape[3]), *keys_values, starts, visible, *since
    count, size = visible.shape[1], max(QUERIES // block_length, 1)
    if count < 2 * size:
        return _attend_in_blocks(before, *blocks).reshape(shape)
    reread = _reread(before)
    of_part = jax.checkpoint(lambda *part: _attend_in_blocks(reread(), *part))
    found = lax.map(lambda part: of_part(*part), tuple(_parts(x, size) for x in blocks))
    return jnp.moveaxis(found, 0, 1).reshape(shape[0], -1, *found.shape[3:])[:, :count].reshape(shape)


def _attend_in_blocks(
    before: LayerKV,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    starts: jax.Array,
    visible: jax.Array,
    since: jax.Array | None = None,
) -> jax.Array:
    """Of C blocks of L queries, G of whose heads share one of keys: [B, C, L, K, G, H].

    Args:
        before: [B, S, K, H] each.
        query: [B, C, L, K, G, H].
        key, value: [B, C, L, K, H].
        starts, visible, since: [B, C], [B, C, L] and [B, C, L] int32.
    """
    kept, starts, visible = before.key.shape[1], starts[:, :, None, None], visible[..., None]
    score = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    ahead = jnp.arange(kept) < jnp.minimum(starts, visible)
    ahead = ahead if since is None else ahead & (jnp.arange(kept) >= since[..., None])
    seen = ahead, starts + jnp.arange(key.shape[2]) < visible
    scores = score("bclkgh,bskh->bckgls", query, before.key), score("bclkgh,bcmkh->bckglm", query, key)
    scale = query.shape[-1] ** -0.5
    masked = [jnp.where(see[:, :, None, None], x * scale, UNSEEN) for see, x in zip(seen, scores, strict=True)]
    weights = jax.nn.softmax(jnp.concatenate(masked, axis=-1), axis=-1).astype(value.dtype)
    of_before = score("bckgls,bskh->bclkgh", weights[..., :kept], before.value)
    return (of_before + score("bckglm,bcmkh->bclkgh", weights[..., kept:], value)).astype(query.dtype)


def _reread(kv: LayerKV) -> Callable[[], LayerKV]:
    """What gives keys and values in every turn of a loop, with gradients that are added up in float32."""
    wide, fixed = [x.astype(jnp.float32) for x in kv], lax.stop_gradient(kv)
    return lambda: LayerKV(*map(redirect_gradient, wide, fixed))


def _parts(x: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] in parts [T / size, B, size, ...]; the last is filled up with zeros."""
    x = fill(x, size)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, since: jax.Array | None
) -> jax.Array:
    place = jnp.arange(key.shape[1], dtype=jnp.int32)
    mask = (place < visible[..., None])[:, None]  # [B, 1, T or 1, S]
    if since is not None:
        mask &= (place >= since[..., None])[:, None]
    # JAX asks for float16 products with float32 sums, which a compiler for TPU does not know.
    other = attend_in_float32 if query.dtype == jnp.float16 else attend_by_jax
    operands = query, key, value, mask
    return lax.platform_dependent(*operands, cpu=attend_on_cpu, cuda=attend_by_jax, default=other)


def attend_by_jax(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


def attend_in_float32(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    wide = lambda x: x.astype(jnp.float32)
    return attend_by_jax(wide(query), wide(key), wide(value), mask).astype(query.dtype)


def attend_on_cpu(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """In float32 and with heads before positions, which a CPU multiplies two to three times as fast as the order of
    `jax.nn.dot_product_attention`.

    Args:
        mask: [B, 1, T or 1, S] bool, true where a key is seen.
    """
    (batch, length, heads, size), groups = query.shape, key.shape[2]
    fold = lambda x: jnp.moveaxis(x.astype(jnp.float32), 2, 1).reshape(batch, groups, -1, size)
    scores = jnp.einsum("bkth,bksh->bkts", fold(query) * size**-0.5, fold(key))  # T are those of all heads of a group
    seen = jnp.broadcast_to(mask[:, :, None], (batch, 1, heads // groups, length, key.shape[1]))
    scores = jnp.where(seen.reshape(batch, 1, -1, key.shape[1]), scores, UNSEEN)
    found = jnp.einsum("bkts,bksh->bkth", jax.nn.softmax(scores, axis=-1), fold(value))
    return jnp.moveaxis(found.reshape(batch, heads, length, size), 1, 2).astype(query.dtype)
