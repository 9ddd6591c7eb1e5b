"""Hierarchical decoding: every run of masks gets its most confident position, which cuts the run in two."""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.checks import check_threshold
from samplers.rules.base import BlockView, Number, Rule, not_masks, per_row, rank
from samplers.tokens.predictions import Predictions


@pytree()
class Hierarchical(Rule):
    """dInfer's hierarchical decoding (arXiv 2510.08666).

    The masks of a block fall into segments, runs between decoded positions. Committed are the most confident position
    of each segment (ties together) if its confidence is above `low_threshold`, every position above `threshold`, and
    always the most confident of the block. As each commit splits its segment, 1, 2, 4, ... positions can be committed
    per forward.

    A position where the mask token itself is the most probable is no candidate while its segment has others.

    Attributes:
        threshold: None commits nothing besides the segments' and the block's most confident. Default: dInfer's
            published one.
        low_threshold: None commits every segment's most confident, however uncertain. Default: dInfer's published one.
    """

    threshold: Number | None = 0.92
    low_threshold: Number | None = 0.62

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_threshold("threshold", self.threshold)
        check_threshold("low_threshold", self.low_threshold)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        candidates = not_masks(predictions, view.undecided)
        return self.accepted(predictions.confidence, view, candidates), state

    def accepted(self, confidence: jax.Array, view: BlockView, candidates: jax.Array) -> jax.Array:
        """Which candidates [B, W] bool are committed by their confidence [B, W]."""
        confidence = jnp.where(candidates, confidence, -jnp.inf)
        accepted = confidence == segment_max(confidence, view.undecided)
        if self.low_threshold is not None:
            accepted &= confidence > per_row(self.low_threshold)
        if self.threshold is not None:
            accepted |= confidence > view.at_least(self.threshold)
        return candidates & (accepted | (rank(confidence, candidates) == 0))


def segment_max(score: jax.Array, masked: jax.Array) -> jax.Array:
    """The largest score of each position's run of masked positions, [B, W]; -inf where nothing is masked."""
    segment = jnp.cumsum(~masked, axis=-1)
    together = (segment[..., :, None] == segment[..., None, :]) & masked[..., :, None] & masked[..., None, :]
    return jnp.where(together, score[..., None, :], -jnp.inf).max(axis=-1)
