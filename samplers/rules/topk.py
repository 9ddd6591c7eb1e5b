"""The k surest positions in every step, by any error proxy."""

from typing import Any

import jax

from dllm_jax.pytree import pytree
from samplers.checks import check_choice, check_whole
from samplers.predictions import Predictions
from samplers.rules.base import PROXIES, BlockView, Proxy, Rule, error_of, per_row, rank


@pytree(static=("proxy",))
class TopK(Rule):
    """Commits the k positions of smallest error (the baseline of EB-Sampler, arXiv 2505.24857; k = 1 is "Top-1")."""

    k: int | jax.Array = 1
    proxy: Proxy = "confidence"

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_whole("k", self.k, 1)
        check_choice("proxy", self.proxy, PROXIES)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        return view.open & (rank(-error_of(predictions, self.proxy), view.open) < per_row(self.k)), state
