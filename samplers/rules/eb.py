"""EB-Sampler: the longest prefix of the most confident positions whose joint dependence error is bounded by entropy."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.pytree import pytree
from samplers.checks import check_choice, check_number
from samplers.rules.base import PROXIES, BlockView, Number, Proxy, Rule, error_of
from samplers.tokens.predictions import Predictions


@pytree(static=("proxy",))
class EB(Rule):
    """Entropy-bounded unmasking (arXiv 2505.24857, algorithm 1).

    Attributes:
        gamma: bound on the sum minus the maximum of the committed positions' entropies, in nats; 0 commits about one
            position per step, infinity all. 0.1 is a good start. Default: a good start; where one wrong token spoils
            all, as in Sudoku, a thousandth of it (`evals/results`).
        proxy: error that orders the positions: "confidence" suits LLaDA, "entropy" Dream. Default: the bound's own
            measure.
    """

    gamma: Number = 0.1
    proxy: Proxy = "entropy"

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_number("gamma", self.gamma, 0.0)
        check_choice("proxy", self.proxy, PROXIES)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        error = error_of(predictions, self.proxy)
        return select(error, predictions.entropy, view.undecided, self.gamma), state


def select(error: jax.Array, entropy: jax.Array, candidates: jax.Array, gamma: Number) -> jax.Array:
    """The positions one EB step commits.

    With entropies h_1, h_2, ... in ascending order of error, the bound of the first j positions is
    B_j = (h_1 + ... + h_j) - max(h_1 ... h_j) = sum over i = 2..j of min(h_i, max(h_1 .. h_{i-1})). The second form
    has no cancellation: B_1 is exactly 0 and B_j never falls, in floating point too.

    Args:
        error, entropy: [B, W] float32.
        candidates: [B, W] bool.
        gamma: scalar or [B].

    Returns:
        [B, W] bool: those of the first k candidates, k = max{j : B_j <= gamma}; at least one where there is any.
    """
    order = jnp.argsort(jnp.where(candidates, error, jnp.inf), axis=-1, stable=True)
    ordered = jnp.take_along_axis(jnp.where(candidates, entropy, 0.0), order, axis=-1)
    largest = lax.cummax(ordered, axis=ordered.ndim - 1)
    before = jnp.concatenate([jnp.zeros_like(largest[..., :1]), largest[..., :-1]], axis=-1)
    bound = jnp.cumsum(jnp.minimum(ordered, before), axis=-1)
    taken = bound <= jnp.asarray(gamma)[..., None]
    place = jnp.argsort(order, axis=-1)
    return candidates & jnp.take_along_axis(taken, place, axis=-1)
