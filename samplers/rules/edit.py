"""LLaDA2.1's decoding: masks become tokens, and tokens other tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.checks import check_number, check_threshold, check_whole
from samplers.rules.base import BlockView, Change, Number, Rule, per_row, rank
from samplers.tokens.predictions import Predictions


class EditState(NamedTuple):
    """What is remembered of the active block.

    Attributes:
        post: [B] int32, forwards that found nothing undecided.
        edited: [B] bool, whether the last forward replaced a token.
    """

    post: jax.Array
    edited: jax.Array


@pytree()
class Edit(Rule):
    """Mask-to-token and token-to-token editing of LLaDA2.1's published sampler, on any model.

    Every forward does both, from the same predictions and with confidence strictly above the thresholds:

    - undecided positions above `threshold` are committed, or the `num_to_transfer` most confident if fewer are above
      it;
    - a written token is replaced where another one is predicted above `editing_threshold`.

    A block is complete when a forward found nothing undecided and replaces nothing, or after `max_post_steps`
    forwards that found nothing undecided. The published sampler's modes are (threshold, editing_threshold) = (0.5,
    0.0) for speed and (0.7, 0.5) for quality; at 0.0 every other best token is written, and a block may oscillate until
    its steps are spent. Prompt, given tokens and earlier blocks are never edited.

    Attributes:
        threshold, editing_threshold: above 1 nothing reaches them. Default: careful ones, which change little; the
            model's published modes are given above.
        max_post_steps: 0 leaves a block as soon as nothing is undecided. Default: room to settle.
        num_to_transfer: positions that a forward commits at least. Default: one, as a forward that commits nothing
            would be lost.
        penalty: subtracted from the logit that a position gives to the token on its left, within a block, against
            repetitions (SGLang's `penalty_lambda`); None for none. Default: none, as in LLaDA2.1's own sampler.
    """

    threshold: Number = 0.95
    editing_threshold: Number = 0.9
    max_post_steps: int | jax.Array = 16
    num_to_transfer: int | jax.Array = 1
    penalty: Number | None = None

    revises = True

    @property
    def reads_logits(self) -> bool:  # type: ignore[override]
        return self.penalty is not None

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_threshold("threshold", self.threshold)
        check_threshold("editing_threshold", self.editing_threshold)
        check_whole("max_post_steps", self.max_post_steps, 0)
        check_whole("num_to_transfer", self.num_to_transfer, 1)
        check_number("penalty", self.penalty, 0.0)

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        return EditState(jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool))

    def adjust(self, logits: jax.Array, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        if self.penalty is None:
            return logits, state
        left = jnp.pad(view.tokens[:, :-1], ((0, 0), (1, 0)))
        inner = view.positions > view.first[:, None]
        repeated = jnp.arange(logits.shape[-1]) == jnp.where(inner, left, -1)[..., None]
        return logits - repeated * per_row(per_row(self.penalty)), state

    def change(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[Change, Any]:
        sure, least = predictions.confidence, jnp.maximum(jnp.asarray(self.num_to_transfer), 1)
        high = view.undecided & (sure > view.at_least(self.threshold))
        enough = high.sum(axis=1) >= least
        commit = jnp.where(enough[:, None], high, view.undecided & (rank(sure, view.undecided) < per_row(least)))
        replace = view.written & (sure > per_row(self.editing_threshold)) & (predictions.token != view.tokens)
        tokens = jnp.where(commit | replace, predictions.token, view.tokens)
        post = jnp.where(view.step == 0, 0, state.post) + ~view.undecided.any(axis=1)
        return Change(tokens, view.undecided & ~commit), EditState(post, replace.any(axis=1))

    def block_done(self, view: BlockView, left: jax.Array, state: Any) -> jax.Array:
        quiet = ~view.undecided.any(axis=1) & ~state.edited
        return ~left & (quiet | (state.post >= self.max_post_steps))

    def most_steps(self, view: BlockView) -> jax.Array:
        """Every forward commits a position, or is one of the `max_post_steps` after the last commit."""
        return view.block_undecided + self.max_post_steps
