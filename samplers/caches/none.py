"""No cache: every forward covers the whole sequence."""

from typing import Any

from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.pytree import pytree
from samplers.caches.base import ForwardRequest, Outcome, full_forward


@pytree()
class NoCache:
    """Exact, and the slowest."""

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> Any:
        return ()

    def predict(self, denoiser: DenoiserLike, request: ForwardRequest, state: Any) -> Outcome:
        hidden, _ = full_forward(denoiser, request)
        active, none = request.active, request.active & False
        return Outcome(hidden, state, active, none, request.block_start, request.lengths)
