"""Vicinity refresh: like the dual cache, but the block's neighbours are run along with it."""

import jax
import jax.numpy as jnp

from dllm_jax.models.denoiser import DenoiserLike, Span
from dllm_jax.pytree import pytree
from samplers.caches.base import BlockCacheState, ForwardRequest, RefreshedCache, Window, Windows
from samplers.checks import check_whole


@pytree(static=("prefix_look", "after_look"))
class VicinityCache(RefreshedCache):
    """dInfer's vicinity refresh (arXiv 2510.08666): KV drifts most near what was just decoded, so that is kept fresh.

    A row's first forwards run everything (warm-up); then keys and values are stored, and rebuilt when the row enters a
    block. All other forwards run the block and `prefix_look` positions before it and `after_look` after it; only the
    block is decoded.

    Attributes:
        prefix_look: positions before the block that run with it. Default: dInfer's.
        after_look: positions after the block that run with it. Default: dInfer's.
        warmup: forwards of a row that run everything and store nothing. Default: dInfer's.
    """

    prefix_look: int = 16
    after_look: int = 16
    warmup: int | jax.Array = 4

    def check(self) -> None:
        super().check()
        for name in ("prefix_look", "after_look"):
            check_whole(name, getattr(self, name), 0)
        check_whole("warmup", self.warmup, 0)

    def warming(self, request: ForwardRequest) -> jax.Array:
        return request.nfe < jnp.asarray(self.warmup)

    def windows(self, denoiser: DenoiserLike, request: ForwardRequest, state: BlockCacheState) -> Windows:
        first = denoiser.min_prompt_length
        width = min(self.prefix_look + request.width + self.after_look, request.length - first)
        low = jnp.maximum(request.block_start - self.prefix_look, first)
        if self.prompt_block_length is not None:
            low = jnp.maximum(low, self.kept(denoiser, request.first_block))
        high = jnp.minimum(request.block_end + self.after_look, request.lengths)
        span = Span(jnp.minimum(jnp.minimum(low, request.start), request.length - width), width)
        write = (span.positions >= low[:, None]) & (span.positions < high[:, None])
        return Windows([Window(span, write)], 0, low, high)
