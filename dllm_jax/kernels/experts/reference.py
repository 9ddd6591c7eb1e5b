"""What experts compute, in a few lines: every expert for every token. Shapes as of `apply_experts`."""

import jax
import jax.numpy as jnp


def apply(x: jax.Array, ids: jax.Array, weights: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """sum_k weights[..., k] * expert[ids[..., k]](x), with expert(x) = (silu(x gate) * (x up)) w_out."""
    hidden = jnp.einsum("btd,egdf->begtf", x, w_in)
    every = jnp.einsum("betf,efd->betd", jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1], w_out)
    share = jnp.sum(jax.nn.one_hot(ids, len(w_in), axis=1, dtype=x.dtype) * weights[:, None], axis=-1)
    return jnp.einsum("betd,bet->btd", every, share)
