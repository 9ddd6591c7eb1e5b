"""LLaDA's own sampler: a fixed number of steps per block, the most confident (or random) positions first."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.pytree import pytree
from samplers.checks import check_choice, check_steps
from samplers.rules.base import BlockView, Rule, rank
from samplers.tokens.predictions import Predictions


@pytree(static=("remasking",))
class LLaDA(Rule):
    """Low-confidence or random remasking (arXiv 2502.09992, algorithms 4 and 5; Fast-dLLM's fixed quota is the same).

    A block of n masks gets S = steps / number of blocks forwards; forward i commits n div S positions, one more in
    the first n mod S. With more steps than masks the empty forwards are not run.

    Attributes:
        steps: forwards of the whole generation, a multiple of the number of blocks. Default: one a position, the most
            careful; fewer are faster and lose accuracy.
        remasking: "low_confidence" commits the most confident positions, "random" random ones. Default: that of LLaDA's
            own `generate`.
    """

    steps: int | jax.Array
    remasking: Literal["low_confidence", "random"] = "low_confidence"

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_steps(self.steps, num_blocks)
        check_choice("remasking", self.remasking, ("low_confidence", "random"))

    def block_steps(self, view: BlockView) -> jax.Array:
        """S, [B] int32."""
        return jnp.maximum(jnp.asarray(self.steps) // view.num_blocks, 1)

    def forwards(self, undecided: int, num_blocks: int) -> tuple[int, int]:
        steps = np.clip(np.asarray(self.steps) // num_blocks, 1, undecided)
        return int(steps.min()), int(steps.max())

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        steps = self.block_steps(view)
        quota = view.block_undecided // steps + (view.step < view.block_undecided % steps)
        score = predictions.confidence if self.remasking == "low_confidence" else view.uniform()
        return view.undecided & (rank(score, view.undecided) < jnp.maximum(quota, 1)[:, None]), state
