"""How tokens were sent to the experts of a mixture, which losses and metrics of training read."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


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
