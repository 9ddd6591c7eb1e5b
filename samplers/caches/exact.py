"""Exact cache of block diffusion: keys and values of complete blocks are final, and nothing is ever refreshed."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike, Span, block_length_of
from dllm_jax.models.kv_cache import slice_rows
from dllm_jax.pytree import pytree
from samplers.caches.base import (
    BlockCache,
    BlockCacheState,
    ForwardRequest,
    Outcome,
    Window,
    Windows,
    full_forward,
    own_positions,
)


@pytree(static=("block_length", "least"))
class ExactState(BlockCacheState):
    """`BlockCacheState`, and what the model's blocks are.

    Attributes:
        block_length: of the model's blocks.
        least: the first position that the model can predict.
    """

    block_length: int
    least: int

    def after_reading(self, row: jax.Array, kv: Any, count: jax.Array) -> Self:
        state = super().after_reading(row, kv, count)
        return dataclasses.replace(state, built_for=self.built_for.at[row].set(0))

    def own(self, request: ForwardRequest) -> jax.Array:
        """[B] int32, where the model's block begins that the active block is, or is a part of."""
        return request.block_start // self.block_length * self.block_length


@pytree()
class ExactCache(BlockCache):
    """For models whose blocks attend to themselves and everything before them (LLaDA2, arXiv 2512.15745; SDAR,
    2510.06303).

    A row's first forward runs its prompt and first block. Every other runs its block, against keys and values of all
    before, which are those of final tokens; the first forward of a block also runs the block before it, once more and
    with its final tokens. So tokens are those of a sampler without a cache, and so are the forwards.
    """

    in_order = True

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> ExactState:
        block_length = block_length_of(denoiser)
        if block_length is None:
            raise DllmError("the exact cache is for block diffusion models; use 'dual' or 'prefix' with this one")
        state = super().init(denoiser, batch, length)
        return ExactState(**vars(state), block_length=block_length, least=denoiser.min_prompt_length)

    def prompt_blocks(self, denoiser: DenoiserLike) -> int | None:
        return block_length_of(denoiser)

    def kept(self, denoiser: DenoiserLike, first_block: Any) -> Any:
        """Complete blocks: what predicts a block's first token sees no further than these."""
        length: Any = block_length_of(denoiser)
        return first_block // length * length

    def stale(self, request: ForwardRequest, state: BlockCacheState) -> jax.Array:
        """Rows that begin; and where the first position is never predicted, and so not refreshed by itself, those where
        it is not final."""
        assert isinstance(state, ExactState)
        return (state.built_for < 0) | (state.final < state.least)

    def rebuilt(self, request: ForwardRequest, state: BlockCacheState, rows: jax.Array) -> BlockCacheState:
        assert isinstance(state, ExactState)
        state = dataclasses.replace(state, final=jnp.where(request.active, state.own(request), state.final))
        return super().rebuilt(request, state, rows)

    def whole(self, denoiser: DenoiserLike, request: ForwardRequest) -> tuple[jax.Array, Any]:
        """Over prompt and first block alone (and the second, see `stale`): later positions are not attended to."""
        if request.all_positions or request.longest_suffix == request.length:
            return full_forward(denoiser, request)
        block_length: Any = denoiser.block_length  # type: ignore[attr-defined]
        room = request.length - request.longest_suffix + request.width  # no prompt is longer
        length = min(request.length, room + block_length * (1 + denoiser.min_prompt_length))
        return full_forward(denoiser, dataclasses.replace(request, inputs=request.inputs[..., :length]))

    def windows(self, denoiser: DenoiserLike, request: ForwardRequest, state: BlockCacheState) -> Windows:
        assert isinstance(state, ExactState)
        one, two = (self.window(count * state.block_length, request, state) for count in (1, 2))
        outdated = request.active & ~self.stale(request, state) & (state.own(request) > state.final)
        return Windows([one, two], outdated.any().astype(jnp.int32), request.block_start, request.block_end)

    def window(self, width: int, request: ForwardRequest, state: ExactState) -> Window:
        """The last `width` positions of each row up to the end of its block, which may be cut off by the sequence's."""
        width = min(width, request.length - state.least)
        start = jnp.minimum(state.own(request) + state.block_length - width, request.start)
        span = Span(jnp.clip(start, state.least, request.length - width), width)
        return Window(span, span.positions >= state.final[:, None])


@pytree(static=("mask_id",))
class SubBlockState(ExactState):
    """`ExactState`, and what decides whether the entries of a row's block can be used.

    Attributes:
        made_for: [B] int32, where the model's block begins whose entries are those of a whole forward; -1 for none.
        mask_id: the mask token's.
    """

    made_for: jax.Array
    mask_id: int


@pytree()
class SubBlockCache(ExactCache):
    """Fast-dLLM v2's sub-block cache (arXiv 2509.26328, section 3.3): exact between blocks, a dual cache inside.

    Of a block that is decoded in smaller ones most forwards run those alone; keys and values of the rest of the block
    are those of its last whole forward: the first one that knows its first token, and any while the first position of
    the smaller block is undecided.
    """

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> SubBlockState:
        state = super().init(denoiser, batch, length)
        return SubBlockState(**vars(state), made_for=state.built_for, mask_id=denoiser.mask_id)

    def stale(self, request: ForwardRequest, state: BlockCacheState) -> jax.Array:
        assert isinstance(state, SubBlockState)
        return (state.built_for < 0) | (super().stale(request, state) & (self._blocks(request, state) > 0))

    def windows(self, denoiser: DenoiserLike, request: ForwardRequest, state: BlockCacheState) -> Windows:
        assert isinstance(state, SubBlockState)
        wide = [self.window(count * state.block_length, request, state) for count in (1, 2)]
        choice = self._blocks(request, state)
        return Windows(
            [Window(request.span, own_positions(request)), *wide], choice, request.block_start, request.block_end
        )

    def predict(self, denoiser: DenoiserLike, request: ForwardRequest, state: BlockCacheState) -> Outcome:
        assert isinstance(state, SubBlockState)
        own, outcome = state.own(request), super().predict(denoiser, request, state)
        whole = request.active & (outcome.full | (self._blocks(request, state) > 0))
        made = whole & ~_is_mask(request, state, own)
        made_for = jnp.where(made, own, state.made_for)
        return outcome._replace(state=dataclasses.replace(outcome.state, made_for=made_for))

    def _blocks(self, request: ForwardRequest, state: SubBlockState) -> jax.Array:
        """[B] int32, of how many of the model's blocks each row runs everything; 0 runs the active one alone."""
        own = state.own(request)
        whole = (state.made_for != own) | _is_mask(request, state, request.block_start)
        return jnp.where(own > state.final, 2, whole.astype(jnp.int32))


def _is_mask(request: ForwardRequest, state: SubBlockState, positions: jax.Array) -> jax.Array:
    """Whether the token at a position [B] of each row is the mask, [B] bool."""
    tokens = request.inputs
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise DllmError("the sub-block cache asks which tokens are masks, which smoothing hides; use the exact cache")
    tokens = tokens if tokens.ndim == 2 else tokens[:, 0]
    return slice_rows(tokens, positions, 1)[:, 0] == state.mask_id
