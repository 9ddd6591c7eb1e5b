"""Attention in which a query sees the first keys, or the last of those, with softmax in float32: fused on TPU and on
NVIDIA GPUs, else in XLA's own operations, which are the reference, with the scores of some queries at a time.

Shape letters: B batch, T queries, S keys, N heads, K heads of keys and values, H head size.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.kernels.dispatch import kernels_run
from dllm_jax.kernels.pallas_attention import UNSEEN, Backend, fill, fits, fused, fused_with_sums
from dllm_jax.models.kv_cache import LayerKV
from dllm_jax.parallel.layout import LayoutLike
from dllm_jax.params.products import redirect_gradient

QUERIES = 512
"""Queries whose scores exist at a time: of 32 heads and 4096 keys 256 MiB, instead of 2 GiB for as many queries."""

FUSED_FROM = 256
"""Queries from which kernels are used: of fewer, such as a block's, the scores are less than the keys and values."""

QUERY, KEYS = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
"""Logical axes of queries, and of keys and values."""


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    layout: LayoutLike | None = None,
    since: jax.Array | None = None,
) -> jax.Array:
    """softmax(query key / sqrt(H)) value, over the first `visible` keys of each query: [B, T, N, H].

    Args:
        query: [B, T, N, H].
        key, value: [B, S, K, H], K dividing N.
        visible: [B, T or 1] int32.
        layout: how the heads lie on a mesh; None for one device, and where the caller places everything, which is done
            without kernels where there are several.
        since: [B, T or 1] int32, of the visible keys only those from here on are seen (a sliding window), which the
            kernels do not support; None for all.
    """
    if since is not None:
        return in_parts(query, key, value, visible, since=since)
    return _on_platforms(fused, in_parts, (query, key, value, visible), layout)


def _on_platforms(
    kernel: Callable[..., jax.Array],
    otherwise: Callable[..., jax.Array],
    operands: tuple[jax.Array, ...],
    layout: LayoutLike | None,
) -> jax.Array:
    """`kernel(backend, *operands)` where there is one that takes them, else `otherwise(*operands)`.

    Args:
        operands: queries, some pairs of keys and values, and what is visible.
        layout: as of `attention`.
    """
    query, key, *others, visible = operands
    if query.shape[1] < FUSED_FROM or not kernels_run(query.dtype, layout) or not _heads_together(layout):
        return otherwise(*operands)
    operands = query, key, *others, jnp.broadcast_to(visible, query.shape[:2])
    axes = (QUERY, *(KEYS for _ in operands[1:-1]), ("batch", None))
    locally = (lambda function: function) if layout is None else lambda function: layout.locally(function, axes, QUERY)
    backends: tuple[Backend, ...] = ("tpu", "cuda")
    taken = [each for each in backends if fits(each, query.shape[1], key.shape[1], query.shape[3], query.dtype)]
    on = {backend: locally(functools.partial(kernel, backend)) for backend in taken}
    return lax.platform_dependent(*operands, **on, default=otherwise)


def _heads_together(layout: LayoutLike | None) -> bool:
    """Whether heads of keys lie where the queries' that share them do."""
    if layout is None or not jax.sharding.get_abstract_mesh().empty:
        return True
    return layout.parts("heads") == layout.parts("kv_heads")


def in_parts(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    queries: int = QUERIES,
    since: jax.Array | None = None,
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


def attention_in_blocks(
    query: jax.Array,
    own: LayerKV,
    before: LayerKV,
    visible: jax.Array,
    block_length: int,
    layout: LayoutLike | None = None,
) -> jax.Array:
    """`attention` whose keys and values are `own` in a query's block and `before` ahead of it: [B, T, N, H].

    Args:
        query: [B, T, N, H] of all positions, float32 or bfloat16.
        own, before: of the same positions, [B, T, K, H] each, K dividing N.
        visible: [B, T or 1] int32, at most the end of a query's block.
        block_length: L, dividing T; block c is [c L, (c + 1) L).
        layout: as of `attention`.
    """
    fused, otherwise = (functools.partial(run, block_length) for run in (blocks_fused, blocks_in_parts))
    return _on_platforms(fused, otherwise, (query, *own, *before, visible), layout)


def blocks_fused(block_length: int, backend: Backend, *operands: jax.Array) -> jax.Array:
    """`attention_in_blocks` by a kernel for what lies ahead of each block, of which the rest is a small part.

    Args:
        operands: query, own keys and values, those before, and visible [B, T].
    """
    query, key, value, *before, visible = operands
    starts = jnp.arange(query.shape[1], dtype=jnp.int32) // block_length * block_length
    ahead, sums = fused_with_sums(backend, query, before[0], before[1], jnp.minimum(starts, visible))
    of_own = jax.checkpoint(functools.partial(_own_blocks, block_length))  # keeps no scores for the backward pass
    in_block, own_sums = of_own(query, key, value, visible)
    share = jax.nn.sigmoid(own_sums - sums)[..., None]
    return (in_block * share + ahead.astype(jnp.float32) * (1.0 - share)).astype(query.dtype)


def _own_blocks(
    block_length: int, query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention to a query's own block alone: [B, T, N, H] float32, and the logarithm of each sum, [B, T, N]."""
    (batch, length, heads, size), groups = query.shape, key.shape[2]
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
    at a time as `in_parts`; operands as of `blocks_fused`."""
    query, *kvs, visible = operands
    own, before = LayerKV(*kvs[:2]), LayerKV(*kvs[2:])
    shape, heads = query.shape, own.key.shape[2]
    fold = lambda x, *heads: x.reshape(shape[0], -1, block_length, *heads)  # [B, C, L, ...]
    visible = fold(jnp.broadcast_to(visible, shape[:2]))
    starts = jnp.broadcast_to(jnp.arange(0, shape[1], block_length, dtype=jnp.int32), visible.shape[:2])
    keys_values = (fold(x, heads, shape[3]) for x in own)
    blocks = fold(query, heads, shape[2] // heads, shape[3]), *keys_values, starts, visible
    count, size = visible.shape[1], max(QUERIES // block_length, 1)
    if count < 2 * size:
        return _attend_in_blocks(before, *blocks).reshape(shape)
    reread = _reread(before)
    of_part = jax.checkpoint(lambda *part: _attend_in_blocks(reread(), *part))
    found = lax.map(lambda part: of_part(*part), tuple(_parts(x, size) for x in blocks))
    return jnp.moveaxis(found, 0, 1).reshape(shape[0], -1, *found.shape[3:])[:, :count].reshape(shape)


def _attend_in_blocks(
    before: LayerKV, query: jax.Array, key: jax.Array, value: jax.Array, starts: jax.Array, visible: jax.Array
) -> jax.Array:
    """Of C blocks of L queries, G of whose heads share one of keys: [B, C, L, K, G, H].

    Args:
        before: [B, S, K, H] each.
        query: [B, C, L, K, G, H].
        key, value: [B, C, L, K, H].
        starts, visible: [B, C] and [B, C, L] int32.
    """
    kept, starts, visible = before.key.shape[1], starts[:, :, None, None], visible[..., None]
    score = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    seen = jnp.arange(kept) < jnp.minimum(starts, visible), starts + jnp.arange(key.shape[2]) < visible
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
    attend = functools.partial(jax.nn.dot_product_attention, mask=mask)
    if query.dtype != jnp.float16:
        return attend(query, key, value)

    def in_float32(*operands: jax.Array) -> jax.Array:
        query, key, value = (x.astype(jnp.float32) for x in operands)
        return attend(query, key, value).astype(jnp.float16)

    # JAX asks for float16 products with float32 sums, which compilers for CPU and TPU do not know.
    return lax.platform_dependent(query, key, value, cuda=attend, default=in_float32)
