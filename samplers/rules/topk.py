"""The k most confident positions in every step, by any error proxy."""

from typing import Any

import jax
import numpy as np

from dllm_jax.pytree import pytree
from samplers.checks import check_choice, check_whole
from samplers.rules.base import PROXIES, BlockView, ProxyOrRandom, Rule, ordering_of, per_row, rank
from samplers.tokens.predictions import Predictions


@pytree(static=("proxy",))
class TopK(Rule):
    """Commits the k positions of smallest error (the baseline of EB-Sampler, arXiv 2505.24857; k = 1 is "Top-1").

    Attributes:
        k: positions that a forward commits. Default: one, which gives up no accuracy for speed.
        proxy: error that orders the positions; "random" orders them by chance and needs a key. Default: the score by
            which LLaDA and Fast-dLLM order them.
    """

    k: int | jax.Array = 1
    proxy: ProxyOrRandom = "confidence"

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_whole("k", self.k, 1)
        check_choice("proxy", self.proxy, (*PROXIES, "random"))

    def forwards(self, undecided: int, num_blocks: int) -> tuple[int, int]:
        count = -(-undecided // np.asarray(self.k))
        return int(count.min()), int(count.max())

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        error = ordering_of(predictions, view, self.proxy)
        return view.undecided & (rank(-error, view.undecided) < per_row(self.k)), state
