"""Dual cache: only the active block is run; everything before and after it is read from the buffers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.caches.base import BlockCache, DenoiserLike, Forward, Request


@pytree()
class DualCache(BlockCache):
    """Fast-dLLM's DualCache (arXiv 2505.22618, section 3.2): an approximation, refreshed at every block's start."""

    def windows(self, denoiser: DenoiserLike, request: Request) -> tuple[Sequence[Forward], jax.Array | int]:
        fresh = None
        if request.ragged:
            positions = request.start[:, None] + jnp.arange(request.width)
            fresh = (positions >= request.block_start[:, None]) & (positions < request.block_end[:, None])
        feed = (request.start, request.width)
        return [lambda kv: denoiser.window(request.inputs, request.lengths, kv, feed, fresh=fresh)], 0
