"""No cache: every forward covers the whole sequence."""

from typing import Any

from dllm_jax.pytree import pytree
from samplers.caches.base import DenoiserLike, Outcome, Request


@pytree()
class NoCache:
    """Exact, and the slowest. Rows move through their blocks independently."""

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> Any:
        return ()

    def predict(self, denoiser: DenoiserLike, request: Request, state: Any) -> Outcome:
        hidden, _ = denoiser.full(request.inputs, request.lengths, request.start, request.width)
        return Outcome(hidden, state, request.active, request.active)
