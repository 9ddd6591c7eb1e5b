"""Prefix cache: keys and values before the active block are reused, the block and what follows is run."""

import jax.numpy as jnp

from dllm_jax.models.denoiser import DenoiserLike, Span
from dllm_jax.pytree import pytree
from samplers.caches.base import BlockCacheState, ForwardRequest, RefreshedCache, Window, Windows

WIDTHS = 3
"""Windows that a program holds at most."""


@pytree()
class PrefixCache(RefreshedCache):
    """Fast-dLLM's prefix cache (arXiv 2505.22618, section 3.2): refreshed at every block's start.

    The suffix shrinks from block to block, but shapes are static: the program holds windows of a third, two thirds and
    all of the canvas, and runs the smallest that covers every row's suffix: a third more work than needed on average.
    """

    def windows(self, denoiser: DenoiserLike, request: ForwardRequest, state: BlockCacheState) -> Windows:
        first = denoiser.min_prompt_length
        end = jnp.maximum(request.lengths, request.start + request.width)  # a row's last block may be cut off
        needed = jnp.max(jnp.where(request.active, end - request.start, 0))

        def window(width: int) -> Window:
            span = Span(jnp.maximum(end - width, first), width)
            return Window(span, span.positions >= request.block_start[:, None])

        widths = window_widths(min(request.longest_suffix, request.length - first), request.width)
        choice = sum(((needed > width).astype(jnp.int32) for width in widths[:-1]), jnp.int32(0))
        return Windows([window(width) for width in widths], choice, request.block_start, request.lengths)


def window_widths(longest: int, block_length: int) -> list[int]:
    """Sizes of windows in ascending order: equal shares of the longest suffix in whole blocks, and itself."""
    blocks = -(-longest // block_length)
    shares = {-(-blocks * share // WIDTHS) * block_length for share in range(1, WIDTHS)}
    return [*sorted(width for width in shares if width < longest), longest]
