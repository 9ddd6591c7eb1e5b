"""Attention in which a query sees the first keys, with softmax in float32: fused on TPU and NVIDIA GPUs, else in XLA's
own operations, which are the reference, with the scores of some queries at a time.

Shape letters: B batch, T queries, S keys, N heads, K heads of keys and values, H head size.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.fused_attention import fill, fits, fused
from dllm_jax.layout import Layout, LogicalAxes
from dllm_jax.own_kernels import kernels_run

QUERIES = 512
"""Queries whose scores exist at a time: of 32 heads and 4096 keys 256 MiB, instead of 2 GiB for as many queries."""

FUSED_FROM = 256
"""Queries from which kernels are used: of fewer, such as a block's, the scores are less than the keys and values."""

QUERY, KEYS = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
AXES: tuple[LogicalAxes, ...] = (QUERY, KEYS, KEYS, ("batch", None))
"""Logical axes of queries, keys, values and of what is visible."""


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, layout: Layout | None = None
) -> jax.Array:
    """softmax(query key / sqrt(H)) value, over the first `visible` keys of each query: [B, T, N, H].

    Args:
        query: [B, T, N, H].
        key, value: [B, S, K, H], K dividing N.
        visible: [B, T or 1] int32.
        layout: how the heads lie on a mesh; None for one device, and where the caller places everything, which is done
            without kernels where there are several.
    """
    if query.shape[1] < FUSED_FROM or not kernels_run(query.dtype, layout) or not _can_fuse(query, key, layout):
        return in_parts(query, key, value, visible)
    visible = jnp.broadcast_to(visible, query.shape[:2])
    locally = (lambda function: function) if layout is None else lambda function: layout.locally(function, AXES, QUERY)
    on = {backend: locally(functools.partial(fused, backend)) for backend in ("tpu", "cuda")}
    return lax.platform_dependent(query, key, value, visible, **on, default=in_parts)


def _can_fuse(query: jax.Array, key: jax.Array, layout: Layout | None) -> bool:
    """Whether the kernels take these operands, and heads of keys lie where the queries' that share them do."""
    if layout is not None and jax.sharding.get_abstract_mesh().empty:
        if layout.parts("heads") != layout.parts("kv_heads"):
            return False
    return fits(query.shape[1], key.shape[1], query.shape[3], query.dtype)


def in_parts(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, queries: int = QUERIES
) -> jax.Array:
    """`attention` in XLA's own operations.

    From twice `queries` positions on they are taken so many at a time, and the scores of each part are computed again
    in the backward pass instead of being kept. A query's result is that of the whole: its softmax is its own.
    """
    length = query.shape[1]
    if length < 2 * queries:
        return _attend(query, key, value, visible)
    of_parts = _parts(query, queries), _parts(visible, queries) if visible.shape[1] > 1 else None

    @jax.checkpoint
    def of_part(part: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        return _attend(part[0], key, value, visible if part[1] is None else part[1])

    found = lax.map(of_part, of_parts)  # [T / queries, B, queries, N, H]
    return jnp.moveaxis(found, 0, 1).reshape(query.shape[0], -1, *query.shape[2:])[:, :length]


def _parts(x: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] in parts [T / size, B, size, ...]; the last is filled up with zeros."""
    x = fill(x, size)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array) -> jax.Array:
    mask = (jnp.arange(key.shape[1], dtype=jnp.int32) < visible[..., None])[:, None]  # [B, 1, T or 1, S]
    attend = functools.partial(jax.nn.dot_product_attention, mask=mask)
    if query.dtype != jnp.float16:
        return attend(query, key, value)

    def in_float32(*operands: jax.Array) -> jax.Array:
        query, key, value = (x.astype(jnp.float32) for x in operands)
        return attend(query, key, value).astype(jnp.float16)

    # JAX asks for float16 products with float32 sums, which compilers for CPU and TPU do not know.
    return lax.platform_dependent(query, key, value, cuda=attend, default=in_float32)
