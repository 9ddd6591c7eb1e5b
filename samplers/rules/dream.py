"""Dream's own sampler: a time schedule decides how many positions, a score or chance decides which."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dllm_jax.errors import DllmError
from dllm_jax.pytree import pytree
from samplers.checks import check_choice, check_number, check_steps
from samplers.rules.base import BlockView, Rule, rank
from samplers.tokens.predictions import Predictions, ScoreFrom

Algorithm = Literal["origin", "maskgit_plus", "topk_margin", "entropy"]


_WIDEST = 1 << 29  # so that sums of two stay in int32


@pytree(static=("alg", "score_from"))
class Dream(Rule):
    """`diffusion_generate` of Dream (arXiv 2508.15487).

    Times fall linearly from 1 to eps over the steps; from t to s a share q = 1 - s/t of the masks left is committed,
    in the last step all. "origin" commits each position with probability q; the others commit the trunc(q * masks)
    positions with the largest probability of the chosen token (maskgit_plus), margin (topk_margin) or negative
    entropy (entropy); of equal ones the lower position.

    With blocks, each takes steps / number of blocks of them (Dream itself uses one block).

    Attributes:
        steps: steps of the schedule; those that would commit nothing are not run. Default: one a position, as in
            Dream's evaluations.
        alg: which positions a step commits: a share by chance ("origin"), or the best by the chosen token's probability
            ("maskgit_plus"), margin ("topk_margin") or negative entropy ("entropy"). Default: the one of Dream's
            evaluations.
        eps: last time of the schedule. Default: that of Dream's code.
        alg_temp: draw the positions with probability softmax(score / alg_temp) instead of taking the best. Default:
            none, as in Dream's evaluations.
        score_from: "sampling" scores the tempered and truncated distribution, as published: at low temperature many
            positions tie at certainty and decoding becomes nearly left to right, which serves the Instruct model well.
            "raw" scores the model's own distribution. Default: as published.
    """

    steps: int | jax.Array
    alg: Algorithm = "entropy"
    eps: float | jax.Array = 1e-3
    alg_temp: float | jax.Array | None = None
    score_from: ScoreFrom = "sampling"

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_steps(self.steps, num_blocks)
        check_choice("alg", self.alg, ("origin", "maskgit_plus", "topk_margin", "entropy"))
        check_choice("score_from", self.score_from, ("raw", "sampling"))
        check_number("eps", self.eps, 0.0, 1.0)
        check_number("alg_temp", self.alg_temp, 0.0)
        if isinstance(self.alg_temp, (int, float)) and self.alg_temp == 0:
            raise DllmError("alg_temp is 0; it must be above 0, or None to take the best positions")

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        return jnp.zeros((batch,), jnp.int32)  # the next step of the schedule

    def forwards(self, undecided: int, num_blocks: int) -> tuple[int, int]:
        steps = int(np.max(np.asarray(self.steps))) // num_blocks
        return 1, max(steps if self.alg == "origin" else min(steps, undecided), 1)

    def block_steps(self, view: BlockView) -> jax.Array:
        """Steps of a block's schedule, [B] int32."""
        return jnp.maximum(jnp.asarray(self.steps) // view.num_blocks, 1)

    def _share(self, index: jax.Array, steps: jax.Array) -> jax.Array:
        """1 - s/t of step `index`, without the cancellation: (1 - eps) / (steps - (1 - eps) index); 1 in the last."""
        span = 1.0 - jnp.asarray(self.eps, jnp.float32)
        return jnp.where(index >= steps - 1, 1.0, span / jnp.maximum(steps - span * index, span))

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        steps = self.block_steps(view)
        index = jnp.where(view.step == 0, 0, state)
        if self.alg == "origin":
            return view.undecided & (view.uniform() < self._share(index, steps)[:, None]), index + 1
        masks = view.undecided.sum(axis=-1, dtype=jnp.int32)
        quota = lambda at: jnp.floor(masks * self._share(at, steps)).astype(jnp.int32)
        index = self.next_step(index, lambda at: (quota(at) == 0) & (masks > 0))
        return view.undecided & (
            rank(self._score(predictions, view), view.undecided) < quota(index)[:, None]
        ), index + 1

    def _score(self, predictions: Predictions, view: BlockView) -> jax.Array:
        score = {
            "maskgit_plus": predictions.confidence,
            "topk_margin": predictions.margin,
            "entropy": -predictions.entropy,
        }[self.alg]
        if self.alg_temp is None:
            return score
        return score / jnp.asarray(self.alg_temp)[..., None] + view.gumbel()  # Gumbel top-k: without replacement

    def next_step(self, index: jax.Array, empty: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The step of the schedule that is run, [B], from `index` on: the first that commits something.

        No step after that one is `empty`, so jumps double and halve: there may be millions of empty steps.
        """

        def look(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            at, jump = carry
            skipped = empty(at + jump - 1)
            wider, narrower = jnp.minimum(2 * jump, _WIDEST), jnp.maximum(jump // 2, 1)
            return jnp.where(skipped, at + jump, at), jnp.where(skipped, wider, narrower)

        return lax.while_loop(lambda carry: empty(carry[0]).any(), look, (index, jnp.ones_like(index)))[0]

    def most_steps(self, view: BlockView) -> jax.Array | None:
        return self.block_steps(view) if self.alg == "origin" else None  # where chance may commit nothing
