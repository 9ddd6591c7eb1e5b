"""Dual cache: only the active block is run; everything before and after it is read from the buffers."""

from dllm_jax.pytree import pytree
from samplers.caches.base import BlockCache, Request, Window, Windows


@pytree()
class DualCache(BlockCache):
    """Fast-dLLM's DualCache (arXiv 2505.22618, section 3.2): an approximation, refreshed at every block's start."""

    def windows(self, first: int, request: Request) -> Windows:
        write = None
        if request.ragged:
            positions = request.span.positions
            write = (positions >= request.block_start[:, None]) & (positions < request.block_end[:, None])
        return Windows([Window(request.span, write)], 0, request.block_start, request.block_end)
