"""No cache: every forward covers the whole sequence."""

from typing import Any

from dllm_jax.pytree import pytree
from samplers.caches.base import DenoiserLike, Outcome, Request, full_forward


@pytree()
class NoCache:
    """Exact, and the slowest. Rows move through their blocks independently."""

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> Any:
        return ()

    def predict(self, denoiser: DenoiserLike, request: Request, state: Any) -> Outcome:
        hidden, _ = full_forward(denoiser, request)
        active, none = request.active, request.active & False
        return Outcome(hidden, state, active, active, none, request.block_start, request.lengths)
