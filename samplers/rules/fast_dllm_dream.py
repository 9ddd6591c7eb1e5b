"""How Fast-dLLM's block sampler for Dream orders its work; for comparison with the official code only."""

from typing import Any

import jax

from dllm_jax.pytree import pytree
from samplers.predictions import Predictions, ScoreFrom
from samplers.rules.base import BlockView, Rule


@pytree()
class FastDllmDream(Rule):
    """A compat rule around another: the block's first forward commits its first position and nothing else.

    The official window cannot predict its first position (its left neighbour is outside), so the cache-building pass
    must fill it; our `Denoiser` has no such gap and needs no such rule.
    """

    rule: Rule

    @property
    def score_from(self) -> ScoreFrom:  # type: ignore[override]
        return self.rule.score_from

    @property
    def reads_logits(self) -> bool:  # type: ignore[override]
        return self.rule.reads_logits

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        self.rule.check(gen_length, num_blocks)

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        return self.rule.init(batch, width, vocab_size)

    def adjust(self, logits: jax.Array, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        return self.rule.adjust(logits, view, state)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        select, state = self.rule.decide(predictions, view, state)
        opening = (view.step == 0)[:, None]
        first = view.masked & (view.positions == view.first[:, None])
        return (opening & first) | (~opening & select), state

    def block_done(self, view: BlockView, masks_left: jax.Array) -> jax.Array:
        return self.rule.block_done(view, masks_left) & (view.step > 0)
