"""EB-Sampler: the longest prefix of the most confident positions whose joint dependence error is bounded by entropy."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.pytree import pytree
from samplers.checks import check_choice, check_number
from samplers.rules.base import PROXIES, BlockView, Number, ProxyOrRandom, Rule, ordering_of
from samplers.tokens.predictions import Predictions, ScoreFrom


@pytree(static=("proxy", "score_from"))
class EB(Rule):
    """Entropy-bounded unmasking (arXiv 2505.24857, algorithm 1).

    Attributes:
        gamma: bound on the sum minus the maximum of the committed positions' entropies, in nats; 0 commits about one
            position per step, infinity all. 0.1 is a good start. Default: a good start; where one wrong token spoils
            all, as in Sudoku, a thousandth of it (`evals/results`).
        proxy: error that orders the positions: "confidence" suits LLaDA, "entropy" Dream; "random" orders them by
            chance and needs a key. Default: the bound's own measure.
        score_from: "sampling" takes entropies and errors of the tempered and truncated distribution, from which the
            tokens are drawn, the paper's p. "raw" takes those of the model's own. Default: raw, as at a low temperature
            all other entropies fall to 0, and gamma no longer bounds anything.
    """

    gamma: Number = 0.1
    proxy: ProxyOrRandom = "entropy"
    score_from: ScoreFrom = "raw"

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_number("gamma", self.gamma, 0.0)
        check_choice("proxy", self.proxy, (*PROXIES, "random"))
        check_choice("score_from", self.score_from, ("raw", "sampling"))

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        error = ordering_of(predictions, view, self.proxy)
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
