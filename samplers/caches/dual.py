"""Dual cache: only the active block is run; everything before and after it is read from the buffers."""

import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.caches.base import BlockCache, DenoiserLike, Request, Windows, window_forward


@pytree()
class DualCache(BlockCache):
    """Fast-dLLM's DualCache (arXiv 2505.22618, section 3.2): an approximation, refreshed at every block's start."""

    def windows(self, denoiser: DenoiserLike, request: Request) -> Windows:
        fresh = None
        if request.ragged:
            positions = request.start[:, None] + jnp.arange(request.width)
            fresh = (positions >= request.block_start[:, None]) & (positions < request.block_end[:, None])
        feed = (request.start, request.width)
        run = lambda kv: window_forward(denoiser, request, kv, feed, fresh)
        return Windows([run], 0, request.block_start, request.block_end)
