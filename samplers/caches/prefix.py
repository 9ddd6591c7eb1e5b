"""Prefix cache: everything before the active block is read from the buffers; the block and what follows is run."""

import functools

import jax
import jax.numpy as jnp

from dllm_jax.kv_cache import KVCache
from dllm_jax.pytree import pytree
from samplers.caches.base import BlockCache, DenoiserLike, Request, Windows, window_forward


@pytree()
class PrefixCache(BlockCache):
    """Fast-dLLM's prefix cache (arXiv 2505.22618, section 3.2): refreshed at every block's start.

    The suffix shrinks from block to block, but shapes are static: the program holds one window per halving of the
    canvas and runs the smallest that covers every row's suffix, at most twice the work needed.
    """

    def windows(self, denoiser: DenoiserLike, request: Request) -> Windows:
        first = denoiser.min_prompt_length
        end = jnp.maximum(request.lengths, request.start + request.width)  # a row's last block may be cut off
        needed = jnp.max(jnp.where(request.active, end - request.start, 0))

        def run(width: int, kv: KVCache) -> tuple[jax.Array, KVCache]:
            start = jnp.maximum(end - width, first)
            fresh = start[:, None] + jnp.arange(width) >= request.block_start[:, None]
            return window_forward(denoiser, request, kv, (start, width), fresh)

        widths = window_widths(min(request.longest_suffix, request.inputs.shape[1] - first), request.width)
        choice = sum((needed > width).astype(jnp.int32) for width in widths[:-1]) if len(widths) > 1 else 0
        forwards = [functools.partial(run, width) for width in widths]
        return Windows(forwards, choice, request.block_start, request.lengths)


def window_widths(longest: int, block_length: int) -> list[int]:
    """Window sizes in ascending order: the longest suffix, its half, ... down to a block."""
    widths = [longest]
    while widths[-1] > block_length:
        widths.append(max(-(-widths[-1] // 2), block_length))
    return widths[::-1]
