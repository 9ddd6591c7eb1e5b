"""Confidence threshold: commit everything the model is confident enough of."""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.checks import check_number, check_steps, check_threshold
from samplers.rules.base import BlockView, Number, Rule, not_masks, per_row, rank
from samplers.tokens.predictions import Predictions


@pytree(static=("skip_masks",))
class Threshold(Rule):
    """Commits every position whose confidence reaches the threshold, and always the most confident (Fast-dLLM,
    2505.22618).

    dInfer's definition (arXiv 2510.08666) is ``Threshold(0.8, tolerance=1e-5, skip_masks=True)``.

    Attributes:
        threshold: in [0, 1]; inf, or a little above 1, commits one position per step. Default: Fast-dLLM's
            published one.
        steps: None, or a brake on parallelism: after forward i (from 0) of a block at most (i + 1) / S of its masks are
            committed, S = steps / number of blocks (Fast-dLLM's block-free sampler for Dream). Default: none, as in
            Fast-dLLM's block sampler; a brake costs forwards.
        tolerance: what is this close to the most confident position is committed with it. Default: none, as in
            Fast-dLLM.
        skip_masks: where the mask token itself is the most probable, a position waits as long as there are others. Else
            its best other token takes part. Default: off, as in Fast-dLLM; dInfer has it on.
    """

    threshold: Number = 0.9
    steps: int | jax.Array | None = None
    tolerance: Number | None = None
    skip_masks: bool = False

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_threshold("threshold", self.threshold)
        check_number("tolerance", self.tolerance, 0.0)
        if self.steps is not None:
            check_steps(self.steps, num_blocks)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        candidates = not_masks(predictions, view.undecided) if self.skip_masks else view.undecided
        accepted = reaching(predictions.confidence, view, candidates, self.threshold, self.tolerance)
        if self.steps is not None:
            place = rank(predictions.confidence, accepted)
            steps = jnp.maximum(jnp.asarray(self.steps) // view.num_blocks, 1)
            committed = view.block_undecided - view.undecided.sum(axis=-1)
            allowed = jnp.minimum(view.step + 1, steps) * view.block_undecided // steps - committed
            accepted &= place < jnp.maximum(allowed, 1)[:, None]
        return accepted, state


def reaching(
    confidence: jax.Array, view: BlockView, candidates: jax.Array, threshold: Number, tolerance: Number | None
) -> jax.Array:
    """The candidates whose confidence reaches the threshold, and always the most confident of them.

    Args:
        confidence: [B, W] float32.
        candidates: [B, W] bool, among `view.undecided`.
        threshold, tolerance: scalars or [B]; None is no tolerance.
    """
    highest = rank(confidence, candidates) == 0
    accepted = (confidence >= view.at_least(threshold)) | highest
    if tolerance is not None:
        peak = jnp.where(candidates, confidence, -jnp.inf).max(axis=-1, keepdims=True)
        accepted |= confidence >= peak - per_row(tolerance)
    return candidates & accepted
