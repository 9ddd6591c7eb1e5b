"""Confidence-threshold decoding: every position that is sure enough, at least one."""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.predictions import Predictions
from samplers.rules.base import BlockView, Number, Rule, check_number, check_steps, per_row, rank


@pytree()
class Threshold(Rule):
    """Commits every position whose confidence reaches the threshold, and always the surest (Fast-dLLM, 2505.22618).

    Attributes:
        threshold: in [0, 1]; above 1 it commits one position per step.
        steps: None, or a brake on parallelism: after forward i (from 0) of a block at most (i + 1) / S of its masks
            are committed, S = steps / number of blocks (Fast-dLLM's block-free sampler for Dream).
    """

    threshold: Number = 0.9
    steps: int | jax.Array | None = None

    def check(self, gen_length: int, num_blocks: int) -> None:
        check_number("threshold", self.threshold, 0.0)
        if self.steps is not None:
            check_steps(self.steps, num_blocks)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        place = rank(predictions.confidence, view.masked)
        accepted = (predictions.confidence >= per_row(self.threshold)) | (place == 0)
        if self.steps is not None:
            steps = jnp.maximum(jnp.asarray(self.steps) // view.num_blocks, 1)
            committed = view.block_masks - view.masked.sum(axis=-1)
            allowed = jnp.minimum(view.step + 1, steps) * view.block_masks // steps - committed
            accepted &= place < jnp.maximum(allowed, 1)[:, None]
        return view.masked & accepted, state
