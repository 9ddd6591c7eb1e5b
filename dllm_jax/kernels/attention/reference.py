"""What attention is, in a few lines: all scores at once, in the dtype of the operands. Shapes as of `attention`."""

import jax
import jax.numpy as jnp


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, since: jax.Array | None = None
) -> jax.Array:
    """softmax(query key / sqrt(H)) value over the keys [since, visible) of each query; of a query that sees none, the
    mean of all values."""
    place = jnp.arange(key.shape[1])
    seen = (place < visible[..., None]) & (place >= (0 if since is None else since[..., None]))  # [B, T or 1, S]
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def attend_in_blocks(block_length: int, *operands: jax.Array) -> jax.Array:
    """`attention_in_blocks`: over the keys `before` ahead of a query's block, and `own` within it.

    Args:
        operands: query, own keys and values, those before, visible, and since if there is one.
    """
    query, key, value, key_before, value_before, visible, *since = operands
    place = jnp.arange(query.shape[1])
    start = (place // block_length * block_length)[:, None]
    ahead = place < jnp.minimum(start, visible[..., None])
    ahead = ahead & (place >= since[0][..., None]) if since else ahead
    seen = jnp.concatenate([ahead, (place >= start) & (place < visible[..., None])], -1)
    both = (jnp.concatenate(pair, axis=1) for pair in ((key_before, key), (value_before, value)))
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in both)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)
