"""The rule of block diffusion models: confident positions, or else a step's share of the block."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.checks import check_choice, check_threshold, check_whole
from samplers.rules.base import BlockView, Number, Rule, rank
from samplers.tokens.predictions import Predictions

Order = Literal["confidence", "position"]
ORDERS: tuple[Order, ...] = ("confidence", "position")


@pytree(static=("order",))
class Dynamic(Rule):
    """Commits every position whose confidence exceeds the threshold, if these are the step's share of the block's
    positions or more, and else the share alone, the most confident first.

    SDAR's `low_confidence_dynamic` (arXiv 2510.06303), and LLaDA2.0's sampler (arXiv 2512.15745). Without a threshold
    it is `low_confidence_static`, and in order of position `sequential`.

    Attributes:
        threshold: above 1 nothing exceeds it; None commits the shares. Default: SDAR's.
        steps: forwards that a block is shared over, the first ones get the remainder; None shares one position to
            each. Default: none, the most careful.
        order: which positions are a share. Default: that of SDAR's and LLaDA2.0's sampler.
    """

    threshold: Number | None = 0.9
    steps: int | jax.Array | None = None
    order: Order = "confidence"

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_threshold("threshold", self.threshold)
        check_whole("steps", self.steps, 1)
        check_choice("order", self.order, ORDERS)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        sure, width = predictions.confidence, view.undecided.shape[1]
        steps = jnp.asarray(width if self.steps is None else self.steps)
        share = width // steps + (view.step < width % steps)
        first = sure if self.order == "confidence" else jnp.broadcast_to(-jnp.arange(width), sure.shape)
        shared = view.undecided & (rank(first, view.undecided) < share[:, None])
        if self.threshold is None:
            return shared, state
        high = view.undecided & (sure > view.at_least(self.threshold))
        return jnp.where((high.sum(axis=1) >= share)[:, None], high, shared), state
