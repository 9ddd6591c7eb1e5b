"""What a cache policy is: how one step's hidden states are computed, and which keys and values are kept for the
next."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike, Span, block_causal, block_length_of
from dllm_jax.models.kv_cache import put_rows, write_rows
from dllm_jax.pytree import pytree, vary_like
from samplers.checks import check_length, check_whole
from samplers.rowwise import each_row, run_if


@pytree(static=("length", "width", "longest_suffix", "ragged", "all_positions"))
class ForwardRequest:
    """What one step asks of the policy. All positions are absolute; every leaf begins with the batch axis.

    Attributes:
        inputs: tokens [B, S], or input embeddings [B, S, D]; with guidance the pairs that `guidance.paired` makes.
        lengths: [B], valid positions, prompt and canvas.
        first_block: [B], where the row's first block begins.
        block: [B], number of the active block.
        block_start, block_end: [B], where it begins and ends.
        start: [B], where the span of `width` positions begins that covers the block.
        active: [B] bool, rows that are not finished.
        nfe: [B], forwards of the row so far.
        length: S.
        width: W, of the block's span.
        longest_suffix: no row has more valid positions than this from its first block's start on.
        ragged: whether a block may be shorter than `width`; its span then holds other positions too.
        all_positions: whether the hidden states of everything that is run are wanted, not of the span alone.
    """

    inputs: jax.Array
    lengths: jax.Array
    first_block: jax.Array
    block: jax.Array
    block_start: jax.Array
    block_end: jax.Array
    start: jax.Array
    active: jax.Array
    nfe: jax.Array
    length: int
    width: int
    longest_suffix: int
    ragged: bool
    all_positions: bool

    @property
    def span(self) -> Span:
        """Where the active block lies."""
        return Span(self.start, self.width)


class Outcome(NamedTuple):
    """What a policy returns: every active row has had one forward.

    Attributes:
        hidden: for `DenoiserLike.logits`: [B, width, D] of the span; of all positions, [B, S, D], when the request asks
            for them, and then meaningless outside [low, high).
        state: the policy's new state.
        full: [B] bool, the rows whose forward covered the whole sequence.
        updated: [B] bool, of those, the rows whose keys and values were all stored for later forwards.
        low, high: [B], which positions were run, as far as they may be undecided.
    """

    hidden: jax.Array
    state: Any
    full: jax.Array
    updated: jax.Array
    low: jax.Array
    high: jax.Array


class CachePolicy(Protocol):
    """A cache policy: a pytree (`dllm_jax.pytree`) with these two methods."""

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> Any:
        """State before the first forward, for sequences of `length` buffer positions."""
        ...

    def predict(self, denoiser: DenoiserLike, request: ForwardRequest, state: Any) -> Outcome:
        """Runs one forward for every active row."""
        ...


def full_forward(
    denoiser: DenoiserLike, request: ForwardRequest, visible: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """A forward over everything: hidden states as `Outcome` wants them, and the keys and values of all positions.

    Args:
        visible: as of `Denoiser.forward`; by default each row's length.
    """
    visible = request.lengths if visible is None else visible
    if not request.all_positions:
        return denoiser.forward(request.inputs, visible, outputs=request.span)
    width = min(request.longest_suffix, request.length - denoiser.min_prompt_length)
    start = jnp.minimum(request.block_start, request.length - width)  # nothing is undecided before the block
    hidden, kv = denoiser.forward(request.inputs, visible, outputs=Span(start, width))
    return spread(hidden, start, request.length), kv


class Window(NamedTuple):
    """A forward over part of the sequence.

    Attributes:
        span: positions that are run.
        write: [B, width] bool, those whose keys and values are stored; None for all.
    """

    span: Span
    write: jax.Array | None = None


def window_forward(denoiser: DenoiserLike, request: ForwardRequest, window: Window, kv: Any) -> tuple[jax.Array, Any]:
    """A forward over a window: hidden states as `Outcome` wants them, and the updated buffers."""
    span, write = window
    run = lambda outputs: denoiser.forward(
        request.inputs, request.lengths, at=span, kv=kv, write=write, outputs=outputs
    )
    if request.all_positions:
        hidden, new = run(None)
        return spread(hidden, span.start, request.length), new
    # rows that are finished, or run everything, may lie outside the window: their hidden states are unused
    return run(Span(jnp.clip(request.start, span.start, span.start + span.width - request.width), request.width))


def spread(hidden: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """Hidden states [B, W, D] at their absolute positions start[b] ... of [B, length, D], zeros elsewhere."""
    batch, _, dim = hidden.shape
    return write_rows(vary_like(hidden, jnp.zeros((batch, length, dim), hidden.dtype)), hidden, start)


class Windows(NamedTuple):
    """What a block cache can run instead of a full forward.

    Attributes:
        windows: the program holds each.
        choice: number of the one to run now, for all rows or [B] for each.
        low, high: [B], the positions that each row runs then, as far as they may be undecided.
    """

    windows: Sequence[Window]
    choice: jax.Array | int
    low: jax.Array
    high: jax.Array


def own_positions(request: ForwardRequest) -> jax.Array | None:
    """Which positions of the active block's span are its own, [B, width] bool; None for all."""
    if not request.ragged:
        return None
    positions = request.span.positions
    return (positions >= request.block_start[:, None]) & (positions < request.block_end[:, None])


@pytree()
class BlockCacheState:
    """Key/value buffers and what is known of each row's part of them.

    Attributes:
        kv: the buffers.
        built_for: [B], the block the row's keys and values were built for; -1 for none.
        built_at: [B], the row's forward that built them; below -1 for none.
        final: [B], how many of the row's first positions have keys and values that stay.
    """

    kv: Any
    built_for: jax.Array
    built_at: jax.Array
    final: jax.Array

    def after_reading(self, row: jax.Array, kv: Any, count: jax.Array) -> Self:
        """The state in which the first `count` positions of a row are read already.

        Args:
            kv: their keys and values, [1, N, ...] at positions 0 ... N - 1, some of which may be beyond the buffers.
        """
        put = lambda old, new: put_rows(old, new[:, : old.shape[1]], row[None])
        return dataclasses.replace(self, kv=jax.tree.map(put, self.kv, kv), final=self.final.at[row].set(count))


@pytree()
class BlockCache:
    """Base of the policies that build a row's keys and values by one full forward now and then.

    The building forward also decodes. Rows that need one get it one by one, as a full forward of few rows is bound by
    arithmetic anyway, and all others their window in the same step: no row waits for another.
    """

    in_order: ClassVar[bool] = False
    """Whether rows enter all of their blocks, complete ones too, each for a forward at least."""

    def check(self) -> None:
        """Raises DllmError for numbers that make no sense."""

    def windows(self, denoiser: DenoiserLike, request: ForwardRequest, state: BlockCacheState) -> Windows:
        """The forwards over part of the sequence, none of which begins before the first position that the model can
        predict."""
        raise NotImplementedError

    def whole(self, denoiser: DenoiserLike, request: ForwardRequest) -> tuple[jax.Array, Any]:
        """The forward that builds: hidden states as `Outcome` wants them, and keys and values from position 0 on."""
        return full_forward(denoiser, request)

    def warming(self, request: ForwardRequest) -> jax.Array:
        """[B] bool, rows that run everything anew without relying on it later."""
        return request.active & False

    def stale(self, request: ForwardRequest, state: BlockCacheState) -> jax.Array:
        """[B] bool, rows whose keys and values must be built before their next window."""
        return state.built_for != request.block

    def prompt_blocks(self, denoiser: DenoiserLike) -> int | None:
        """The length of blocks in which prompts may be read before a row begins; None where they may not."""
        return None

    def kept(self, denoiser: DenoiserLike, first_block: Any) -> Any:
        """How many positions of a prompt are read only once, before the first block that is decoded."""
        return first_block * 0

    def rebuild(
        self, denoiser: DenoiserLike, request: ForwardRequest, state: BlockCacheState, rows: jax.Array
    ) -> tuple[jax.Array, BlockCacheState, jax.Array]:
        """Runs some rows [B] bool anew.

        Returns:
            Hidden states as `Outcome` wants them, the state with their keys and values, and the rows [B] bool whose
            forward covered the whole sequence.
        """
        forward = lambda part: self.whole(denoiser, part)
        hidden, kv = each_row(rows, denoiser.batch_parts, forward, request, state.kv)
        return hidden, dataclasses.replace(state, kv=kv), rows

    def rebuilt(self, request: ForwardRequest, state: BlockCacheState, rows: jax.Array) -> BlockCacheState:
        """The state after a forward in which some rows [B] bool built their keys and values."""
        return dataclasses.replace(
            state,
            built_for=jnp.where(rows, request.block, state.built_for),
            built_at=jnp.where(rows, request.nfe, state.built_at),
        )

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> BlockCacheState:
        none = jnp.full((batch,), -1, jnp.int32)
        return BlockCacheState(denoiser.empty_cache(batch, length), none, none - 1, none + 1)

    def predict(self, denoiser: DenoiserLike, request: ForwardRequest, state: BlockCacheState) -> Outcome:
        warming = request.active & self.warming(request)
        stale = request.active & ~warming & self.stale(request, state)
        full, one = warming | stale, request.active.shape[0] == 1
        others = request.active & ~full
        options = self.windows(denoiser, request, state)

        def windowed(window: Window, rows: jax.Array, hidden: jax.Array, kv: Any) -> tuple[jax.Array, Any]:
            if one:  # which runs this or a full forward
                return window_forward(denoiser, request, window, kv)
            write = rows[:, None] if window.write is None else window.write & rows[:, None]
            write = jnp.broadcast_to(write, (rows.shape[0], window.span.width))
            found, kv = window_forward(denoiser, request, window._replace(write=write), kv)
            return jnp.where(rows[:, None, None], found, hidden), kv

        hidden, state, whole = self.rebuild(denoiser, request, state, full)
        kv = state.kv
        for number, window in enumerate(options.windows):
            rows = others & (options.choice == number)
            hidden, kv = run_if(rows.any(), functools.partial(windowed, window, rows), hidden, kv)
        return Outcome(
            hidden,
            self.rebuilt(request, dataclasses.replace(state, kv=kv), stale),
            whole,
            stale & whole,
            jnp.where(full, request.block_start, options.low),
            jnp.where(full, request.lengths, options.high),
        )


@pytree(static=("prompt_block_length",))
class RefreshedCache(BlockCache):
    """Base of the policies that rebuild a row's keys and values when it enters a block.

    Attributes:
        refresh_every: rebuild also in every N-th forward after the one that built them; None rebuilds at block starts
            only. Default: none, as published; more refreshes are nearer to no cache, and slower.
        prompt_block_length: read the prompt once, in blocks of so many tokens, each of which sees itself and what is
            before it, and never refresh them; its last complete block, and what does not fill one, are read with the
            canvas, so choose it as long as a question. None refreshes the prompt with the rest. Default: none, as
            models were trained; with it a refresh costs little more than the canvas does, and an engine reads prompts
            that begin alike once.
    """

    refresh_every: int | jax.Array | None = None
    prompt_block_length: int | None = None

    def check(self) -> None:
        check_whole("refresh_every", self.refresh_every, 1)
        check_length("prompt_block_length", self.prompt_block_length, optional=True)

    def stale(self, request: ForwardRequest, state: BlockCacheState) -> jax.Array:
        stale = super().stale(request, state)
        if self.refresh_every is None:
            return stale
        return stale | (request.nfe - state.built_at >= jnp.asarray(self.refresh_every))

    def prompt_blocks(self, denoiser: DenoiserLike) -> int | None:
        return self.prompt_block_length

    def kept(self, denoiser: DenoiserLike, first_block: Any) -> Any:
        """All complete blocks but the last: a question must be read with the canvas (measured: docs/choose.md)."""
        length: Any = self.prompt_block_length
        return (first_block // length - (first_block >= length)) * length

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> BlockCacheState:
        if self.prompt_block_length is not None and block_length_of(denoiser) is not None:
            raise DllmError("prompt_block_length is not for block diffusion models; use the exact cache instead")
        return super().init(denoiser, batch, length)

    def whole(self, denoiser: DenoiserLike, request: ForwardRequest) -> tuple[jax.Array, Any]:
        if self.prompt_block_length is None:
            return super().whole(denoiser, request)
        kept = self.kept(denoiser, request.first_block)[:, None]
        blocks = block_causal(request.length, jnp.zeros_like(request.lengths), self.prompt_block_length)
        visible = jnp.where(jnp.arange(request.length) < kept, blocks, request.lengths[:, None])
        return full_forward(denoiser, request, visible)

    def rebuild(
        self, denoiser: DenoiserLike, request: ForwardRequest, state: BlockCacheState, rows: jax.Array
    ) -> tuple[jax.Array, BlockCacheState, jax.Array]:
        if self.prompt_block_length is None:
            return super().rebuild(denoiser, request, state, rows)
        kept = self.kept(denoiser, request.first_block)
        anew = rows & (state.final < jnp.maximum(kept, denoiser.min_prompt_length))
        hidden, state, _ = super().rebuild(denoiser, request, state, anew)
        after = lambda part, kv: window_forward(denoiser, part, self._after_prompt(denoiser, part), kv)
        found, kv = each_row(rows & ~anew, denoiser.batch_parts, after, request, state.kv, reads=True)
        state = dataclasses.replace(state, kv=kv, final=jnp.where(rows, kept, state.final))
        return jnp.where((rows & ~anew)[:, None, None], found, hidden), state, anew | (rows & (kept == 0))

    def _after_prompt(self, denoiser: DenoiserLike, request: ForwardRequest) -> Window:
        """Everything after what is kept of the prompt."""
        kept, least = self.kept(denoiser, request.first_block), denoiser.min_prompt_length
        width = min(request.longest_suffix + 2 * (self.prompt_block_length or 1) - 1, request.length - least)
        span = Span(jnp.clip(kept, least, request.length - width), width)
        return Window(span, span.positions >= kept[:, None])
