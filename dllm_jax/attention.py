"""Attention with scores and softmax in float32, of which no more exist at a time than some queries have.

Shape letters: B batch, T queries, S keys, N heads, K heads of keys and values, H head size.
"""

import jax
import jax.numpy as jnp
from jax import lax

QUERIES = 512
"""Queries whose scores exist at a time: of 32 heads and 4096 keys 256 MiB, instead of 2 GiB for as many queries."""


def attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, queries: int = QUERIES) -> jax.Array:
    """softmax(query key / sqrt(H)) value, over the keys that the mask leaves: [B, T, N, H].

    From twice `queries` positions on they are taken so many at a time, and the scores of each part are computed again
    in the backward pass instead of being kept. A query's result is that of the whole: its softmax is its own.

    Args:
        query: [B, T, N, H].
        key, value: [B, S, K, H], K dividing N.
        mask: [B, 1, T or 1, S] bool, True where a query sees a key.
    """
    length = query.shape[1]
    if length < 2 * queries:
        return _attend(query, key, value, mask)
    of_parts = _parts(query, 1, queries), _parts(mask, 2, queries) if mask.shape[2] > 1 else None

    @jax.checkpoint
    def of_part(part: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        return _attend(part[0], key, value, mask if part[1] is None else part[1])

    found = lax.map(of_part, of_parts)  # [T / queries, B, queries, N, H]
    return jnp.moveaxis(found, 0, 1).reshape(query.shape[0], -1, *query.shape[2:])[:, :length]


def _parts(x: jax.Array, axis: int, size: int) -> jax.Array:
    """x in parts along an axis, which lie along a new first one; the last is filled up with zeros."""
    missing = [(0, -length % size if i == axis else 0) for i, length in enumerate(x.shape)]
    x = jnp.pad(x, missing)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    attend = jax.nn.dot_product_attention
    if query.dtype != jnp.float16:
        return attend(query, key, value, mask=mask)

    def in_float32(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        wide = [x.astype(jnp.float32) for x in (query, key, value)]
        return attend(wide[0], wide[1], wide[2], mask=mask).astype(query.dtype)

    # JAX asks for float16 products with float32 sums, which compilers for CPU and TPU do not know.
    directly = lambda query, key, value: attend(query, key, value, mask=mask)
    return lax.platform_dependent(query, key, value, cuda=directly, default=in_float32)
