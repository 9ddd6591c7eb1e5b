"""Iteration smoothing: masks carry over what the last forward expected in their place."""

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.checks import check_number


@pytree()
class Smoothing:
    """dInfer's iteration smoothing (arXiv 2510.08666): soft inputs, which combine with every rule and cache policy.

    After each forward, a position that is still masked goes into the next one as
    ``embedding(mask) + alpha(t) * sum over v of p_v embedding(v)``, p being its predicted distribution over the whole
    vocabulary; t counts the row's forwards. Meanwhile rules that have a threshold on the confidence use at least
    ``1 - threshold_decay * t`` (EB, top-k, factor and schedules have none and are not affected). A row that ends within
    ``(1 - threshold) / threshold_decay`` forwards never uses its threshold itself.

    Attributes:
        weight: largest alpha (dInfer's `cont_weight`). Default: dInfer's.
        initial: alpha after a row's first forward (`cont_weight_init`). Default: dInfer's.
        growth: what alpha grows by in each forward (`cont_weight_growth`). Default: dInfer's.
        threshold_decay: what the lowest threshold falls by in each forward, from 1. Default: dInfer's.
    """

    weight: float | jax.Array = 0.3
    initial: float | jax.Array = 0.15
    growth: float | jax.Array = 0.02
    threshold_decay: float | jax.Array = 0.02

    def check(self) -> None:
        """Raises DllmError for numbers that make no sense."""
        for name in ("weight", "initial", "growth", "threshold_decay"):
            check_number(f"{name} of the smoothing", getattr(self, name), 0.0)

    def alpha(self, t: jax.Array) -> jax.Array:
        """Weight of the expectation after forward t: [B] int32 -> [B] float32."""
        growing = jnp.asarray(self.initial) + jnp.asarray(self.growth) * t
        return jnp.minimum(growing, jnp.asarray(self.weight)).astype(jnp.float32)

    def caution(self, t: jax.Array) -> jax.Array:
        """Least threshold in forward t: [B] int32 -> [B] float32."""
        return (1.0 - jnp.asarray(self.threshold_decay) * t).astype(jnp.float32)
