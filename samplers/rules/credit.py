"""Credit decoding: predictions that stay the same over forwards are trusted earlier."""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.checks import check_number, check_threshold
from samplers.rules.base import BlockView, Number, Rule, not_masks, per_row
from samplers.rules.threshold import reaching
from samplers.tokens.predictions import Predictions


@pytree()
class Credit(Rule):
    """Threshold decoding on logits that remember (arXiv 2510.06133; dInfer, arXiv 2510.08666).

    Each position and token of the active block has a credit C, zero when a row enters the block. In every forward
    C decays by `decay`, then the best token of each masked position gains its probability to the power `boost`, and
    ``logits + weight * ln(1 + C)`` replace the logits.

    Attributes:
        threshold: every position whose confidence reaches it is committed, and always the most confident. A position
            where the mask token itself is most probable waits as long as there are others. Default: dInfer's published
            one.
        tolerance: what is this close to the most confident position is committed with it. Default: dInfer's.
        weight: of the credit (alpha). Default: dInfer's.
        boost: exponent of the gain (gamma); below 1 it favours uncertain but stable predictions. Default: dInfer's.
        decay: what is left of the credit from forward to forward (beta). Default: dInfer's.
    """

    threshold: Number = 0.8
    tolerance: Number = 1e-5
    weight: Number = 0.7
    boost: Number = 0.2
    decay: Number = 0.8

    reads_logits = True

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_threshold("threshold", self.threshold)
        for name in ("tolerance", "weight", "boost"):
            check_number(name, getattr(self, name), 0.0)
        check_number("decay", self.decay, 0.0, 1.0)

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        return jnp.zeros((batch, width, vocab_size), jnp.float32)

    def adjust(self, logits: jax.Array, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        column = lambda value: per_row(value)[..., None]
        kept = jnp.where(view.step == 0, 0.0, jnp.asarray(self.decay))[:, None, None] * state
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        peak = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), best, axis=-1)
        gain = jnp.exp(peak * column(self.boost))
        here = (jnp.arange(logits.shape[-1]) == best) & view.undecided[..., None]
        credit = kept + jnp.where(here, gain, 0.0)
        return logits + column(self.weight) * jnp.log1p(credit), credit

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        candidates = not_masks(predictions, view.undecided)
        return reaching(predictions.confidence, view, candidates, self.threshold, self.tolerance), state
