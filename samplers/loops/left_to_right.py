"""Strictly left-to-right decoding with a dLLM: what `APD` and `LeftRight` share."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike, Span
from dllm_jax.models.kv_cache import slice_rows
from dllm_jax.pytree import pytree, vary_like
from samplers import canvas as canvases
from samplers.canvas import Canvas
from samplers.checks import check_length, check_whole
from samplers.loops.block import check_is_sampling, check_sampling
from samplers.rowwise import each_row, run_if
from samplers.sampler import Result
from samplers.stopping import Stop
from samplers.tokens.noise import Noise, Purpose, gumbel
from samplers.tokens.predictions import Sampling, column, kept, logprob_of, temper, truncate

Whole = int | jax.Array


@pytree()
class LeftRightState:
    """Everything a step reads and writes; all leaves but the buffers' start with the batch axis.

    Attributes:
        canvas: tokens, what is undecided (all after what was written), counters.
        written: [B], how many positions hold a token.
        accepted: [B], how many the row's last step wrote.
        most_accepted: [B], the most that one of its steps wrote.
        kv: the dLLM's keys and values; None without a window.
        verifier_kv: the verifier's; None without one.
    """

    canvas: Canvas
    written: jax.Array
    accepted: jax.Array
    most_accepted: jax.Array
    kv: Any
    verifier_kv: Any


@pytree()
class DraftResult(Result):
    """A `Result`, with the verifier's work.

    Attributes:
        verifier_forwards: [B] int32, forwards of the verifier; its reading of the prompt counts with the first.
        most_accepted: [B] int32, the most tokens that one step wrote.
    """

    verifier_forwards: jax.Array
    most_accepted: jax.Array

    @property
    def mean_accepted(self) -> jax.Array:
        """[B] float32, tokens per step; those after an end of the sequence count, as they were written."""
        return (self.decoded_at >= 0).sum(axis=-1) / jnp.maximum(self.nfe, 1)


@pytree(static=("reach",))
class Frontier:
    """Where a row stands; all positions are absolute, all leaves begin with the batch axis.

    Attributes:
        tokens: [B, S'], as much of the sequence as a full forward may read.
        next: [B], the first position that is not written.
        left, right: [B], the dLLM runs [left, right); nothing exists after it.
        start: [B], L positions from here on cover [next, right); the same for a row whatever its neighbours.
        open: [B, L] bool, which of these are to be drafted; a token that was given is written as it is.
        reach: L.
    """

    tokens: jax.Array
    next: jax.Array
    left: jax.Array
    right: jax.Array
    start: jax.Array
    open: jax.Array
    reach: int

    @property
    def span(self) -> Span:
        """What may be drafted."""
        return Span(self.start, self.reach)

    @property
    def undecided(self) -> jax.Array:
        """[B, L] bool, which of these are to be written."""
        positions = self.span.positions
        return (positions >= self.next[:, None]) & (positions < self.right[:, None])

    def among_first(self, count: jax.Array | int) -> jax.Array:
        """[B, L] bool, the positions from `start` up to the `count`-th that is drafted, and what was given behind it.

        Args:
            count: scalar or [B].
        """
        rank = jnp.cumsum(self.open & self.undecided, axis=1)
        return rank <= jnp.broadcast_to(jnp.asarray(count), rank.shape[:1])[:, None]


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
    limits: tuple[int, int] | None

    canvas_length = None  # nothing follows the generation

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
        limits = (
            _limit("window", self.window, self.most_window, 1),
            _limit("lookahead", self.lookahead, self.most_lookahead, self.gen_length),
        )
        object.__setattr__(self, "limits", limits)

    def forwards(self, prompt_length: int) -> tuple[int, int]:
        """Fewest and most forwards of the dLLM on a row, if no end token ends it before."""
        return -(-self.gen_length // self.reach), self.gen_length

    def start_parts(self, denoiser: DenoiserLike) -> None:
        """Raises DllmError for parts that do not fit the model; before the first forward."""

    def write(
        self, denoiser: DenoiserLike, state: LeftRightState, front: Frontier, draft: Draft
    ) -> tuple[jax.Array, Any]:
        """Which drafted positions are written, [B, L] bool: a run from `front.next` on, at least that one; and the
        verifier's buffers after it."""
        raise NotImplementedError

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
        given: jax.Array | None = None,
        noise: Noise | None = None,
    ) -> LeftRightState:
        """The state before the first forward of the dLLM; a verifier has read the prompt.

        Args:
            prompt, prompt_lengths, key: as in `samplers.sample`.
            gen_lengths: [B] int32, positions each row generates, at most `gen_length`, which is the default. Changing
                them recompiles nothing.
            given: [B, G] int32, tokens the canvas comes with, the mask id where a token is to be generated. They are
                written in their turn, as no token of a step.
            noise: source of random numbers instead of `key`. It draws for positions counted from the first that is
                drafted, so a `TableNoise` holds [steps, lookahead, V] uniforms.

        Raises:
            DllmError: for wrong shapes or dtypes, a prompt shorter than the models need, lengths that do not fit
                (where they are concrete), parts that do not fit the model, or a missing key.
        """
        check_is_sampling(self.sampling)
        if self.sampling.defer is not None:
            raise DllmError("defer has no effect on what is written from left to right; leave it out, or use suppress")
        self.start_parts(denoiser)
        canvas = canvases.begin(
            denoiser,
            prompt,
            prompt_lengths,
            gen_length=self.gen_length,
            length=self.gen_length,
            key=key,
            gen_lengths=gen_lengths,
            given=given,
            noise=noise,
            stop=self.stop,
        )
        if canvas.noise is None and self.sampling.temperature is not None:
            raise DllmError("a temperature draws random numbers; pass key=jax.random.key(seed)")
        batch, length = canvas.tokens.shape
        zeros = jnp.zeros((batch,), jnp.int32)
        state = LeftRightState(
            canvas=canvas,
            written=zeros,
            accepted=zeros,
            most_accepted=zeros,
            kv=None if self.window is None else denoiser.empty_cache(batch, length),
            verifier_kv=self.read_prompt(prompt, canvas, length),
        )
        return vary_like(prompt, state)

    def read_prompt(self, prompt: jax.Array, canvas: Canvas, length: int) -> Any:
        """A verifier's buffers of `length` positions after the prompt."""
        return None

    def step(self, denoiser: DenoiserLike, state: LeftRightState) -> LeftRightState:
        """One forward of the dLLM for every row that is not finished, and what it writes of its draft."""
        canvas, front = state.canvas, self._frontier(denoiser, state)
        ran = ~canvas.done
        hidden, kv, whole = self._forward(denoiser, state, front)
        draft = self._draft(denoiser, state, front, denoiser.logits(hidden))
        select, verifier_kv = self.write(denoiser, state, front, draft)
        select &= front.undecided & ran[:, None]
        accepted = select.sum(axis=1, dtype=jnp.int32)
        tokens = jnp.where(select, draft.token, slice_rows(canvas.tokens, *front.span))
        undecided = canvas.of_window(canvas.undecided, *front.span) & ~select
        logprobs = logprob_of(draft.logits, draft.token)
        finite = jnp.all(jnp.isfinite(draft.logits.max(axis=-1)) | ~front.undecided, axis=1)
        state = dataclasses.replace(
            state,
            canvas=canvas.write(front.start, tokens, logprobs, undecided, ran).counted(
                ran, whole, whole & (self.window is not None), finite
            ),
            written=state.written + accepted,
            accepted=jnp.where(ran, accepted, state.accepted),
            most_accepted=jnp.maximum(state.most_accepted, (select & front.open).sum(axis=1, dtype=jnp.int32)),
            kv=kv,
            verifier_kv=verifier_kv,
        )
        return self._move_on(denoiser, state)

    def is_done(self, state: LeftRightState) -> jax.Array:
        """[B] bool: rows whose generation has ended."""
        return state.canvas.done

    def result(self, denoiser: DenoiserLike, state: LeftRightState) -> DraftResult:
        """The generation so far."""
        found, nfe = state.canvas.result(denoiser.eos_id), state.canvas.nfe
        forwards = jnp.zeros_like(nfe) if state.verifier_kv is None else nfe
        return DraftResult(**vars(found), verifier_forwards=forwards, most_accepted=state.most_accepted)

    def visible(self, denoiser: DenoiserLike, canvas: Canvas) -> jax.Array:
        """[B] int32, what a forward without window and lookahead sees, as `Denoiser.forward` takes it."""
        return canvas.prompt_lengths + canvas.gen_lengths

    def pending(self, state: LeftRightState) -> jax.Array:
        """[B, G] bool, positions that may still change: the undecided ones."""
        return state.canvas.undecided

    @property
    def reach(self) -> int:
        """L, the most positions that are drafted at once."""
        return min(self._limits[1], self.gen_length)

    @property
    def _limits(self) -> tuple[int, int]:
        assert self.limits is not None
        return self.limits

    def _window_width(self, length: int, least: int) -> int:
        """Positions that a window forward runs: the window, what the step before wrote, and the lookahead."""
        return min(self._limits[0] - 1 + min(2 * self.reach, self.gen_length), length - least)

    def _frontier(self, denoiser: DenoiserLike, state: LeftRightState) -> Frontier:
        canvas, least = state.canvas, denoiser.min_prompt_length
        first = canvas.prompt_lengths + state.written
        right = canvas.prompt_lengths + canvas.gen_lengths
        if self.lookahead is not None:
            right = jnp.minimum(first + jnp.clip(jnp.asarray(self.lookahead), 1, self.reach), right)
        left, length = jnp.zeros_like(first), canvas.tokens.shape[1]
        if self.window is not None:
            window = jnp.clip(jnp.asarray(self.window), 1, self._limits[0])
            left = jnp.where(canvas.nfe > 0, jnp.maximum(first - state.accepted - window + 1, 0), 0)
            # full forwards are a row's first, and the few whose window reaches the sequence's beginning
            needed = max(length - self.gen_length + self.reach, self._window_width(length, least) + least)
            length = min(needed, length)
        start = canvas.prompt_lengths + jnp.minimum(state.written, self.gen_length - self.reach)
        undecided = canvas.of_window(canvas.undecided, start, self.reach)
        return Frontier(canvas.tokens[:, :length], first, left, right, start, undecided, self.reach)

    def _forward(
        self, denoiser: DenoiserLike, state: LeftRightState, front: Frontier
    ) -> tuple[jax.Array, Any, jax.Array]:
        """Hidden states [B, L, D] from `front.start` on, the buffers, and the rows whose forward ran everything."""
        tokens, active, least = state.canvas.tokens, ~state.canvas.done, denoiser.min_prompt_length
        if state.kv is None:
            return denoiser.forward(tokens, _visible(denoiser, tokens, front), outputs=front.span)[0], None, active
        # The first position of a shifted family is never in a window: windows that begin there run everything.
        whole = active & ((state.canvas.nfe == 0) | (front.left < least))
        width = self._window_width(tokens.shape[1], least)
        alone = lambda part: denoiser.forward(part.tokens, _visible(denoiser, part.tokens, part), outputs=part.span)

        def windowed(hidden: jax.Array, kv: Any) -> tuple[jax.Array, Any]:
            start = jnp.maximum(jnp.minimum(jnp.minimum(front.left, front.start), tokens.shape[1] - width), least)
            span = Span(start, width)
            write = (span.positions >= front.left[:, None]) & (span.positions < front.right[:, None])
            # rows that run everything may reach beyond the window: their hidden states are unused
            outputs = Span(jnp.clip(front.start, start, start + width - self.reach), self.reach)
            write &= ~whole[:, None]
            visible = _visible(denoiser, tokens, front)
            found, kv = denoiser.forward(tokens, visible, at=span, kv=kv, write=write, outputs=outputs)
            return jnp.where(whole[:, None, None], hidden, found), kv

        hidden, kv = each_row(whole, denoiser.batch_parts, alone, front, state.kv)
        hidden, kv = run_if((active & ~whole).any(), windowed, hidden, kv)
        return hidden, kv, whole

    def _draft(self, denoiser: DenoiserLike, state: LeftRightState, front: Frontier, logits: jax.Array) -> Draft:
        """Draws a token for each position from the dLLM's own distribution there."""
        sampling, noise = self.sampling, None
        z = jnp.where(self.blocked(denoiser), -jnp.inf, temper(logits, sampling))
        z = truncate(z, kept(z, sampling), denoiser.mask_id)
        if sampling.temperature is not None:
            noise = self.draw_gumbel(denoiser, state, front, Purpose.TOKENS)
            noise = jnp.where(column(sampling.temperature) > 0, noise, 0.0)
        token = jnp.argmax(z if noise is None else self.perturbed(z, noise), axis=-1).astype(jnp.int32)
        if sampling.target is not None:
            token = sampling.target_at(front.span.positions - state.canvas.prompt_lengths[:, None])
        token = jnp.where(front.open, token, slice_rows(state.canvas.tokens, *front.span))
        return Draft(token, logits, z > -jnp.inf, noise)

    def draw_gumbel(
        self, denoiser: DenoiserLike, state: LeftRightState, front: Frontier, purpose: Purpose
    ) -> jax.Array:
        """Standard Gumbel noise for every position that is drafted and every id, [B, L, V]."""
        if state.canvas.noise is None:
            raise ValueError("a temperature needs a source of random numbers")
        ahead = jnp.maximum(front.span.positions - front.next[:, None], 0)
        ids = jnp.arange(denoiser.vocab_size)
        return gumbel(state.canvas.noise.uniform(purpose, state.canvas.nfe, ahead, ids))

    def perturbed(self, z: jax.Array, noise: jax.Array) -> jax.Array:
        """The tempered logits [B, L, V] with Gumbel noise, whose largest is the draw."""
        return z + noise

    def _move_on(self, denoiser: DenoiserLike, state: LeftRightState) -> LeftRightState:
        """Ends rows that are full, or whose stop condition holds."""
        canvas, stopped = state.canvas.stopped(self.stop, denoiser.eos_id, state.canvas.undecided)
        done = canvas.done | ~canvas.undecided.any(axis=1) | stopped
        return dataclasses.replace(state, canvas=dataclasses.replace(canvas, done=done))


def _visible(denoiser: DenoiserLike, tokens: jax.Array, front: Frontier) -> jax.Array:
    """What a forward over these tokens [B, S] sees, as `Denoiser.forward` takes it: everything, of a model with a
    causal context what is written causally."""
    config = getattr(denoiser, "config", None)
    if config is None or not config.has_causal_context:
        return front.right
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return jnp.where(position < front.next[:, None], position + 1, front.right[:, None])


def _limit(what: str, value: Any, most: int | None, otherwise: int) -> int:
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
