"""Fast-dLLM v2's rule: threshold decoding after a block's first token, which the block before it predicts."""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.checks import check_threshold
from samplers.rules.base import BlockView, Number, Rule, rank
from samplers.tokens.predictions import Predictions


@pytree()
class FastDllmV2(Rule):
    """Commits every position whose confidence exceeds the threshold, and always the most confident (arXiv 2509.26328).

    In a shifted model the first token of a block is predicted by the last position of the block before it, which
    attends to nothing of the block: the forward that makes that block's keys and values final commits this token and no
    other, as an autoregressive model does. In models without blocks of their own it is threshold decoding.

    Attributes:
        threshold: 1 commits one position per step. Default: the published one.
    """

    threshold: Number = 0.9

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_threshold("threshold", self.threshold)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        sure = predictions.confidence
        others = view.undecided & ((sure > view.at_least(self.threshold)) | (rank(sure, view.undecided) == 0))
        if view.heads is None:
            return others, state
        first = view.undecided & view.heads
        return jnp.where(first.any(axis=1, keepdims=True), first, others), state
