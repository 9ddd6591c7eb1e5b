"""Dual cache: only the active block is run; everything before and after it is read from the buffers."""

from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.pytree import pytree
from samplers.caches.base import BlockCacheState, ForwardRequest, RefreshedCache, Window, Windows, own_positions


@pytree()
class DualCache(RefreshedCache):
    """Fast-dLLM's DualCache (arXiv 2505.22618, section 3.2): an approximation, refreshed at every block's start."""

    def windows(self, denoiser: DenoiserLike, request: ForwardRequest, state: BlockCacheState) -> Windows:
        write = own_positions(request)
        return Windows([Window(request.span, write)], 0, request.block_start, request.block_end)
