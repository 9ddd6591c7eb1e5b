"""Vicinity refresh: like the dual cache, but the block's neighbours are run along with it."""

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.caches.base import BlockCache, BlockCacheState, DenoiserLike, Request, Windows, window_forward
from samplers.checks import check_whole

_TWICE = -2  # of BlockCacheState.built_for: built, and to be built once more


@pytree(static=("prefix_look", "after_look", "compat"))
class VicinityCache(BlockCache):
    """dInfer's vicinity refresh (arXiv 2510.08666): KV drifts most near what was just decoded, so that is kept fresh.

    A row's first forwards run everything (warm-up); then keys and values are stored, and rebuilt when the row enters a
    block. All other forwards run the block and `prefix_look` positions before it and `after_look` behind it; only the
    block is decoded.

    Attributes:
        refresh_every: also rebuild in each forward of a row whose number is a multiple of this, from its second block
            on; None does at block starts only.
        prefix_look: positions before the block that are run with it.
        after_look: positions behind the block that are run with it.
        warmup: forwards of a row that run everything and store nothing.
        compat: keys and values first stored in another block than the first are built once more after one window, as
            the official code does.
    """

    prefix_look: int = 16
    after_look: int = 16
    warmup: int | jax.Array = 4
    compat: bool = False

    def check(self) -> None:
        super().check()
        for name in ("prefix_look", "after_look"):
            check_whole(name, getattr(self, name), 0)
        check_whole("warmup", self.warmup, 0)

    def warming(self, request: Request) -> jax.Array:
        return request.nfe < jnp.asarray(self.warmup)

    def stale(self, request: Request, state: BlockCacheState) -> jax.Array:
        again = (state.built_for == _TWICE) & ~state.just_built
        often = self.due(request.nfe, state) & (request.block > 0)
        return ((state.built_for != request.block) & (state.built_for != _TWICE)) | again | often

    def built(self, request: Request, state: BlockCacheState) -> jax.Array:
        if not self.compat:
            return request.block
        return jnp.where((state.built_for == -1) & (request.block > 0), _TWICE, request.block)

    def windows(self, denoiser: DenoiserLike, request: Request) -> Windows:
        first, length = denoiser.min_prompt_length, request.inputs.shape[1]
        width = min(self.prefix_look + request.width + self.after_look, length - first)
        low = jnp.maximum(request.block_start - self.prefix_look, first)
        high = jnp.minimum(request.block_end + self.after_look, request.lengths)
        start = jnp.minimum(jnp.minimum(low, request.start), length - width)
        positions = start[:, None] + jnp.arange(width)
        fresh = (positions >= low[:, None]) & (positions < high[:, None])
        run = lambda kv: window_forward(denoiser, request, kv, (start, width), fresh)
        return Windows([run], 0, low, high)
