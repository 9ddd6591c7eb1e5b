"""Factor decoding: the more positions are committed together, the surer each must be."""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.checks import check_number
from samplers.predictions import Predictions
from samplers.rules.base import BlockView, Number, Rule, per_row, rank


@pytree(static=("compat",))
class Factor(Rule):
    """Commits the n surest positions for the largest n with (n + 1) (1 - c_n) <= factor (Fast-dLLM, 2505.22618).

    The bound rises and the confidence falls with n, so every position can be tested by its own rank.

    Attributes:
        factor: above 0; larger commits more.
        compat: the official code's end of the list: when all but the last position pass, the last is taken untested.
    """

    factor: Number = 1.0
    compat: bool = False

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_number("factor", self.factor, 0.0)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        place = rank(predictions.confidence, view.masked)
        passes = (predictions.confidence >= 1.0 - per_row(self.factor) / (place + 2)) | (place == 0)
        accepted = view.masked & passes
        if self.compat:
            masks = view.masked.sum(axis=-1, keepdims=True)
            others_pass = jnp.sum(accepted & (place < masks - 1), axis=-1, keepdims=True) == masks - 1
            accepted |= view.masked & others_pass
        return accepted, state
