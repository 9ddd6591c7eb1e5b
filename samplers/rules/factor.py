"""Factor decoding: the more positions are committed together, the more confident each must be."""

from typing import Any

import jax

from dllm_jax.pytree import pytree
from samplers.checks import check_number
from samplers.rules.base import BlockView, Number, Rule, per_row, rank
from samplers.tokens.predictions import Predictions


@pytree()
class Factor(Rule):
    """Commits the n most confident positions for the largest n with (n + 1) (1 - c_n) <= factor (Fast-dLLM,
    2505.22618).

    The bound rises and the confidence falls with n, so every position can be tested by its own rank.

    Attributes:
        factor: above 0; larger commits more. Default: Fast-dLLM's published one.
    """

    factor: Number = 1.0

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_number("factor", self.factor, 0.0)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        place = rank(predictions.confidence, view.undecided)
        passes = (predictions.confidence >= 1.0 - per_row(self.factor) / (place + 2)) | (place == 0)
        return view.undecided & passes, state
