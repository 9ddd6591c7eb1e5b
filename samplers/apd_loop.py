"""Strictly left-to-right decoding with a dLLM: what `APD` and `LeftRight` share."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.errors import DllmError
from dllm_jax.kv_cache import KVCache, LayerKV, write_rows
from dllm_jax.pytree import pytree, vary_like
from samplers import stopping
from samplers.block import check_is_sampling, check_sampling, generation, laid_out, result_of
from samplers.caches import DenoiserLike
from samplers.caches.base import switch_in_place
from samplers.checks import check_length, check_whole
from samplers.engine import Result
from samplers.inputs import checked
from samplers.noise import Noise, Purpose, gumbel, source_of
from samplers.predictions import Sampling, column, kept, temper, truncate
from samplers.stopping import Stop, StopState

Whole = int | jax.Array


@pytree()
class LeftRightState:
    """Everything a step reads and writes; all leaves but the buffers' start with the batch axis.

    Attributes:
        tokens: [B, S] int32: each row its prompt, at once followed by its canvas, then padding.
        canvas_start: [B], the row's prompt length.
        gen_lengths: [B], positions the row generates, at most G.
        written: [B], how many of them hold a token.
        accepted: [B], how many the row's last step wrote.
        most_accepted: [B], the most that one of its steps wrote.
        decoded_at: [B, G], as in `Result`.
        nfe, full_forwards, cache_updates: [B], as in `Result`.
        done: [B] bool.
        kv: the dLLM's keys and values; None without a window.
        verifier_kv: the verifier's; None without one.
        stop: state of the stop condition.
        noise: source of random numbers, None where nothing is drawn.
    """

    tokens: jax.Array
    canvas_start: jax.Array
    gen_lengths: jax.Array
    written: jax.Array
    accepted: jax.Array
    most_accepted: jax.Array
    decoded_at: jax.Array
    nfe: jax.Array
    full_forwards: jax.Array
    cache_updates: jax.Array
    done: jax.Array
    kv: KVCache | None
    verifier_kv: KVCache | None
    stop: StopState | None
    noise: Noise | None


@pytree()
class DraftResult(Result):
    """A `Result`, and how it came about.

    Attributes:
        verifier_forwards: [B] int32, forwards of the verifier; its reading of the prompt counts with the first.
        most_accepted: [B] int32, the most tokens that one step wrote.
    """

    verifier_forwards: jax.Array
    most_accepted: jax.Array

    @property
    def mean_accepted(self) -> jax.Array:
        """[B] float32, tokens per step; those behind an end of the sequence count, as they were written."""
        return (self.decoded_at >= 0).sum(axis=-1) / jnp.maximum(self.nfe, 1)


class Span(NamedTuple):
    """Where a row stands; all positions are absolute.

    Attributes:
        cur: [B], the first that is not written.
        left, right: [B], the dLLM runs [left, right); behind it nothing exists.
        start: [B], L positions from here on cover [cur, right); the same for a row whatever its neighbours.
        positions: [B, L].
        open: [B, L] bool, which of them are to be drafted.
    """

    cur: jax.Array
    left: jax.Array
    right: jax.Array
    start: jax.Array
    positions: jax.Array
    open: jax.Array


class Draft(NamedTuple):
    """What the dLLM proposes, each position as if all others were still masked.

    Attributes:
        token: [B, L] int32.
        logits: [B, L, V] float32, as the model gives them.
        candidates: [B, L, V] bool, ids that were not cut away; never the mask token.
        noise: [B, L, V], the Gumbel noise that drew the tokens, 0 for rows of temperature 0; None draws nothing.
    """

    token: jax.Array
    logits: jax.Array
    candidates: jax.Array
    noise: jax.Array | None


class LeftToRight:
    """Base of samplers that in each step write the next positions, at least one, from one forward of the dLLM.

    With a window, keys and values of positions further back stay as they were when the window last held them; a
    forward runs the window, not the sequence. Its static width has room for the tokens of the step before, of which
    there may be as many as the lookahead. Without a window every forward runs everything and stores nothing.
    """

    gen_length: int
    window: Whole | None
    lookahead: Whole | None
    sampling: Sampling
    stop: Stop | None
    most_window: int | None
    most_lookahead: int | None
    room: tuple[int, int] | None

    canvas_length = None  # nothing lies behind the generation

    @property
    def width(self) -> int:
        """Length of a block: there is one."""
        return self.gen_length

    def __post_init__(self) -> None:
        check_length("gen_length", self.gen_length)
        check_whole("lookahead", self.lookahead, 1)
        if isinstance(self.window, (int, float, np.number)) and self.window < 1:
            why = "keys and values of what was just accepted were computed while it was a mask"
            raise DllmError(f"window is {self.window:.12g}; it must be at least 1: {why}")
        check_whole("window", self.window, 1)
        check_sampling(self.sampling)
        room = (
            _room("window", self.window, self.most_window, 1),
            _room("lookahead", self.lookahead, self.most_lookahead, self.gen_length),
        )
        object.__setattr__(self, "room", room)

    def start_parts(self, denoiser: DenoiserLike) -> None:
        """Raises DllmError for parts that do not fit the model; before the first forward."""

    def write(
        self, denoiser: DenoiserLike, state: LeftRightState, span: Span, draft: Draft
    ) -> tuple[jax.Array, KVCache | None]:
        """Which drafted positions are written, [B, L] bool: a run from `span.cur` on, at least that one; and the
        verifier's buffers after it."""
        raise NotImplementedError

    @property
    def squared(self) -> bool:
        """Whether the noise is scaled by the temperature once more, as in the official code."""
        return False

    def blocked(self, denoiser: DenoiserLike) -> jax.Array:
        """[V] bool, ids that are never drafted."""
        none = jnp.zeros((denoiser.vocab_size,), bool)
        return none if self.sampling.suppress is None else none.at[self.sampling.suppress].set(True)

    def init(
        self,
        denoiser: DenoiserLike,
        prompt: jax.Array,
        prompt_lengths: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        gen_lengths: jax.Array | None = None,
        given: None = None,
        noise: Noise | None = None,
    ) -> LeftRightState:
        """The state before the first forward of the dLLM; a verifier has read the prompt.

        Args:
            prompt, prompt_lengths, key: as in `samplers.sample`.
            gen_lengths: [B] int32, positions each row generates, at most `gen_length`, which is the default. Changing
                them recompiles nothing.
            given: must be None: what is written from left to right has no gaps to fill.
            noise: source of random numbers instead of `key`. It is asked for positions counted from the first that is
                drafted, so a `TableNoise` holds [steps, lookahead, V] uniforms.

        Raises:
            DllmError: for wrong shapes or dtypes, a prompt shorter than the models need, lengths that do not fit
                (where they are concrete), parts that do not fit the model, or a missing key.
        """
        check_is_sampling(self.sampling)
        if self.sampling.defer is not None:
            raise DllmError("defer has no effect on what is written from left to right; leave it out, or use suppress")
        if given is not None:
            raise DllmError("given tokens cannot be kept by a sampler that writes from left to right; use BlockSampler")
        self.start_parts(denoiser)
        prompt, prompt_lengths, gen_lengths, _ = checked(
            denoiser, prompt, prompt_lengths, gen_lengths, None, self.gen_length
        )
        batch, length = prompt.shape[0], prompt.shape[1] + self.gen_length
        noise = source_of(noise, key, batch)
        if noise is None and self.sampling.temperature is not None:
            raise DllmError("a temperature draws random numbers; pass key=jax.random.key(seed)")
        zeros = jnp.zeros((batch,), jnp.int32)
        state = LeftRightState(
            tokens=laid_out(denoiser, prompt, prompt_lengths, None, prompt_lengths + gen_lengths, length),
            canvas_start=prompt_lengths,
            gen_lengths=gen_lengths,
            written=zeros,
            accepted=zeros,
            most_accepted=zeros,
            decoded_at=jnp.full((batch, self.gen_length), -1, jnp.int32),
            nfe=zeros,
            full_forwards=zeros,
            cache_updates=zeros,
            done=jnp.zeros((batch,), bool),
            kv=None if self.window is None else denoiser.empty_cache(batch, length),
            verifier_kv=self.read_prompt(prompt, prompt_lengths, gen_lengths, length),
            stop=None if self.stop is None else stopping.begin(self.stop, batch),
            noise=noise,
        )
        return vary_like(prompt, state)

    def read_prompt(
        self, prompt: jax.Array, prompt_lengths: jax.Array, gen_lengths: jax.Array, length: int
    ) -> KVCache | None:
        """A verifier's buffers of `length` positions after the prompt."""
        return None

    def step(self, denoiser: DenoiserLike, state: LeftRightState) -> LeftRightState:
        """One forward of the dLLM for every row that is not finished, and what it writes of its draft."""
        span = self._span(state)
        hidden, kv, whole = self._forward(denoiser, state, span)
        draft = self._draft(denoiser, state, span, denoiser.logits(hidden))
        select, verifier_kv = self.write(denoiser, state, span, draft)
        select &= span.open & ~state.done[:, None]
        at = jnp.broadcast_to(state.nfe[:, None], select.shape)
        accepted, ran = select.sum(axis=1, dtype=jnp.int32), ~state.done
        state = dataclasses.replace(
            state,
            tokens=write_rows(state.tokens, draft.token, span.start, select),
            written=state.written + accepted,
            accepted=jnp.where(ran, accepted, state.accepted),
            most_accepted=jnp.maximum(state.most_accepted, accepted),
            decoded_at=write_rows(state.decoded_at, at, span.start - state.canvas_start, select),
            nfe=state.nfe + ran,
            full_forwards=state.full_forwards + whole,
            cache_updates=state.cache_updates + (whole & (self.window is not None)),
            kv=kv,
            verifier_kv=verifier_kv,
        )
        return self._move_on(denoiser, state)

    def is_done(self, state: LeftRightState) -> jax.Array:
        """[B] bool: rows whose generation has ended."""
        return state.done

    def result(self, denoiser: DenoiserLike, state: LeftRightState) -> DraftResult:
        """The generation so far."""
        found = result_of(denoiser, state, generation(denoiser, state, self.gen_length))
        forwards = jnp.zeros_like(state.nfe) if state.verifier_kv is None else state.nfe
        return DraftResult(**vars(found), verifier_forwards=forwards, most_accepted=state.most_accepted)

    @property
    def reach(self) -> int:
        """L, the most positions that are drafted at once."""
        return min(self._room[1], self.gen_length)

    @property
    def _room(self) -> tuple[int, int]:
        assert self.room is not None
        return self.room

    def _window_width(self, length: int, least: int) -> int:
        """Positions that a window forward runs: the window, what the step before wrote, and the lookahead."""
        return min(self._room[0] - 1 + min(2 * self.reach, self.gen_length), length - least)

    def _span(self, state: LeftRightState) -> Span:
        cur = state.canvas_start + state.written
        right = state.canvas_start + state.gen_lengths
        if self.lookahead is not None:
            right = jnp.minimum(cur + jnp.clip(jnp.asarray(self.lookahead), 1, self.reach), right)
        left = jnp.zeros_like(cur)
        if self.window is not None:
            window = jnp.clip(jnp.asarray(self.window), 1, self._room[0])
            left = jnp.where(state.nfe > 0, jnp.maximum(cur - state.accepted - window + 1, 0), 0)
        start = state.canvas_start + jnp.minimum(state.written, self.gen_length - self.reach)
        positions = start[:, None] + jnp.arange(self.reach, dtype=jnp.int32)
        return Span(cur, left, right, start, positions, (positions >= cur[:, None]) & (positions < right[:, None]))

    def _forward(
        self, denoiser: DenoiserLike, state: LeftRightState, span: Span
    ) -> tuple[jax.Array, KVCache | None, jax.Array]:
        """Hidden states [B, L, D] from `span.start` on, the buffers, and the rows whose forward ran everything."""
        active, length, least = ~state.done, state.tokens.shape[1], denoiser.min_prompt_length
        if state.kv is None:
            hidden, _ = denoiser.full(state.tokens, span.right, span.start, self.reach)
            return hidden, None, active
        # The first position of a shifted family is never in a window: windows that begin there run everything.
        whole = active & ((state.nfe == 0) | (span.left < least))
        width = self._window_width(length, least)
        longest = min(max(length - self.gen_length + self.reach, width + least), length)

        def everything(kv: KVCache) -> tuple[jax.Array, KVCache]:
            hidden, new = denoiser.full(state.tokens[:, :longest], span.right, span.start, self.reach)
            return hidden, _stored(kv, new, whole)

        def windowed(kv: KVCache) -> tuple[jax.Array, KVCache]:
            start = jnp.maximum(jnp.minimum(jnp.minimum(span.left, span.start), length - width), least)
            positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)
            fresh = (positions >= span.left[:, None]) & (positions < span.right[:, None]) & ~whole[:, None]
            # rows that run everything may reach beyond the window: their hidden states are not looked at
            target = jnp.clip(span.start, start, start + width - self.reach)
            return denoiser.window(state.tokens, span.right, kv, (start, width), (target, self.reach), fresh)

        kv = state.kv
        in_full, kv = switch_in_place(jnp.where(whole.any(), 0, 1), [everything], kv)
        in_window, kv = switch_in_place(jnp.where((active & ~whole).any(), 0, 1), [windowed], kv)
        return jnp.where(whole[:, None, None], in_full, in_window), kv, whole

    def _draft(self, denoiser: DenoiserLike, state: LeftRightState, span: Span, logits: jax.Array) -> Draft:
        """Draws a token for each position from the dLLM's own distribution there."""
        sampling, noise = self.sampling, None
        z = jnp.where(self.blocked(denoiser), -jnp.inf, temper(logits, sampling))
        z = truncate(z, kept(z, sampling), denoiser.mask_id)
        drawn = z
        if sampling.temperature is not None:
            temperature = column(sampling.temperature)
            noise = jnp.where(temperature > 0, gumbel(_uniform(denoiser, state, span)), 0.0)
            drawn = z + (temperature * noise if self.squared else noise)
        return Draft(jnp.argmax(drawn, axis=-1).astype(jnp.int32), logits, z > -jnp.inf, noise)

    def _move_on(self, denoiser: DenoiserLike, state: LeftRightState) -> LeftRightState:
        """Ends rows that are full, or whose stop condition holds."""
        generated = generation(denoiser, state, self.gen_length)
        stop, ended = stopping.ended(self.stop, state.stop, generated, state.gen_lengths, denoiser.mask_id)
        done = state.done | (state.written >= state.gen_lengths) | ended
        return dataclasses.replace(state, done=done, stop=stop)


def _uniform(denoiser: DenoiserLike, state: LeftRightState, span: Span) -> jax.Array:
    if state.noise is None:
        raise ValueError("a temperature needs a source of random numbers")
    ahead = jnp.maximum(span.positions - span.cur[:, None], 0)
    return state.noise.uniform(Purpose.TOKENS, state.nfe, ahead, jnp.arange(denoiser.vocab_size, dtype=jnp.int32))


def _room(what: str, value: Any, most: int | None, otherwise: int) -> int:
    """The largest value that the program has room for."""
    check_length(f"most_{what}", most, optional=True)
    if value is None:
        return otherwise if most is None else most
    known = isinstance(value, (int, np.integer))
    if most is None and not known:
        raise DllmError(f"{what} is an array, so that its largest value is not known; pass most_{what} as well")
    if most is not None and known and value > most:
        raise DllmError(f"{what} {value} exceeds most_{what} {most}; raise that, or leave it out")
    return int(value) if most is None else most


def _stored(kv: KVCache, new: KVCache, rows: jax.Array) -> KVCache:
    """The buffers with the keys and values of some rows [B] replaced, from the first position on."""
    fresh = jnp.broadcast_to(rows[:, None], (rows.shape[0], new[0].key.shape[1]))
    zero = jnp.zeros_like(rows, jnp.int32)
    write = lambda old, value: write_rows(old, value.astype(old.dtype), zero, fresh)
    return tuple(
        LayerKV(*(write(old, value) for old, value in zip(*pair, strict=True))) for pair in zip(kv, new, strict=True)
    )
