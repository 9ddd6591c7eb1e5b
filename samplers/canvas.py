"""The canvas: what every sampler reads and writes, whatever its loop. A set, not the mask token, says which positions
are undecided, and a written position may be written or masked again.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.models.kv_cache import slice_rows, write_rows
from dllm_jax.pytree import pytree
from samplers import stopping
from samplers.inputs import check_given, check_lengths, open_id
from samplers.sampler import Result
from samplers.stopping import Stop, StopState
from samplers.tokens.noise import Noise, source_of


@pytree()
class Canvas:
    """The state that all samplers share; every leaf starts with the batch axis. G is the length of the generation.

    Attributes:
        tokens: [B, S] int32: in each row the prompt, its canvas right after it, then padding.
        undecided: [B, G] bool, positions that are to be decided.
        prompt_lengths: [B] int32, where each row's canvas begins.
        gen_lengths: [B] int32, positions the row generates, at most G.
        decoded_at: [B, G] int32, the row's forward (from 0) that wrote the position last; -1 where none did.
        logprobs: [B, G] float32, the token's log-probability in that forward; NaN where none chose the token.
        edits: [B] int32, how often a written token was replaced by another.
        nfe, full_forwards, cache_updates, broken_at: [B] int32, as in `Result`.
        done: [B] bool.
        stop: state of the stop condition, None without one.
        noise: source of random numbers, None where nothing is drawn.
    """

    tokens: jax.Array
    undecided: jax.Array
    prompt_lengths: jax.Array
    gen_lengths: jax.Array
    decoded_at: jax.Array
    logprobs: jax.Array
    edits: jax.Array
    nfe: jax.Array
    full_forwards: jax.Array
    cache_updates: jax.Array
    broken_at: jax.Array
    done: jax.Array
    stop: StopState | None
    noise: Noise | None

    @property
    def gen_length(self) -> int:
        """G."""
        return self.undecided.shape[1]

    def generation(self, eos_id: int) -> jax.Array:
        """The generation's tokens, [B, G]; positions after a row's own length read as the end of the sequence."""
        tokens = slice_rows(self.tokens, self.prompt_lengths, self.gen_length)
        return jnp.where(jnp.arange(self.gen_length) < self.gen_lengths[:, None], tokens, eos_id)

    def prompt_part(self, width: int) -> jax.Array:
        """[B] int32, positions of the prompt that belong to a row's first block, where blocks of `width` begin at the
        prompt's start."""
        return self.prompt_lengths % width

    def of_window(self, x: jax.Array, start: jax.Array, width: int) -> jax.Array:
        """x [B, G] bool at the sequence's positions start[b] ... , [B, W]; False outside the canvas."""
        return _shifted(x, start - self.prompt_lengths, width)

    def of_canvas(self, x: jax.Array, start: jax.Array) -> jax.Array:
        """x [B, W, ...], of the sequence's positions start[b] ... , at the canvas's positions, [B, G, ...]; False or 0
        elsewhere."""
        return _shifted(x, self.prompt_lengths - start, self.gen_length)

    def write(
        self, start: jax.Array, tokens: jax.Array, logprobs: jax.Array, undecided: jax.Array, rows: jax.Array
    ) -> "Canvas":
        """The canvas after a forward's decisions.

        Args:
            start: [B] int32, the sequence's position of the first token.
            tokens, logprobs, undecided: [B, W], new tokens, their log-probabilities (used only where a token is
                written), and what is undecided after them. Positions outside the canvas stay.
            rows: [B] bool, rows that are written.
        """
        width = tokens.shape[1]
        old, was_undecided = slice_rows(self.tokens, start, width), self.of_window(self.undecided, start, width)
        inside = rows[:, None] & self.of_window(jnp.arange(self.gen_length) < self.gen_lengths[:, None], start, width)
        edited = inside & ~was_undecided & ~undecided & (tokens != old)
        written = self.of_canvas(edited | (inside & was_undecided & ~undecided), start)
        reopened = self.of_canvas(inside & ~was_undecided & undecided, start)
        return dataclasses.replace(
            self,
            tokens=write_rows(self.tokens, jnp.where(inside, tokens, old), start),
            undecided=(self.undecided & ~written) | reopened,
            decoded_at=jnp.where(written, self.nfe[:, None], jnp.where(reopened, -1, self.decoded_at)),
            logprobs=jnp.where(written, self.of_canvas(logprobs, start), jnp.where(reopened, jnp.nan, self.logprobs)),
            edits=self.edits + edited.sum(axis=1, dtype=jnp.int32),
        )

    def counted(self, ran: jax.Array, full: jax.Array, updated: jax.Array, finite: jax.Array) -> "Canvas":
        """The canvas after a forward of rows `ran` [B].

        Args:
            full, updated: [B] bool, which of them count as full forwards and as cache updates.
            finite: [B] bool, whether the model's logits were.
        """
        broke = ran & ~finite & (self.broken_at < 0)
        return dataclasses.replace(
            self,
            nfe=self.nfe + ran,
            full_forwards=self.full_forwards + (ran & full),
            cache_updates=self.cache_updates + (ran & updated),
            broken_at=jnp.where(broke, self.nfe, self.broken_at),
        )

    def stopped(self, stop: Stop | None, eos_id: int, pending: jax.Array) -> tuple["Canvas", jax.Array]:
        """Advances the stop condition, and returns the rows [B] bool in which it now holds.

        Args:
            pending: [B, G] bool, positions that may still change, the undecided ones among them.
        """
        if stop is None or self.stop is None:
            return self, self.done & False
        read = stopping.advance(stop, self.stop, self.generation(eos_id), self.gen_lengths, pending)
        return dataclasses.replace(self, stop=read), read.length != stopping.NEVER

    def result(self, eos_id: int, end_ids: jax.Array | None = None) -> Result:
        """The generation so far.

        Args:
            end_ids: [n] int32, tokens that end it besides `eos_id`, for samplers whose stop condition lacks them.
        """
        tokens = jnp.where(self.undecided, eos_id, self.generation(eos_id))
        ends = (tokens == eos_id) if end_ids is None else (tokens == eos_id) | jnp.isin(tokens, end_ids)
        lengths = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1), tokens.shape[1]).astype(jnp.int32)
        if self.stop is not None:
            lengths = jnp.minimum(lengths, self.stop.length)
        names = ("decoded_at", "logprobs", "nfe", "full_forwards", "cache_updates", "edits", "broken_at")
        return Result(tokens, lengths, **{name: getattr(self, name) for name in names})


def _shifted(x: jax.Array, shift: jax.Array, width: int) -> jax.Array:
    """x[b, shift[b] : shift[b] + width] of x [B, N, ...], False or 0 outside: [B, width, ...]."""
    place = shift[:, None] + jnp.arange(width)
    inside = (place >= 0) & (place < x.shape[1])
    over = lambda y: y.reshape(*y.shape, *[1] * (x.ndim - 2))
    found = jnp.take_along_axis(x, over(jnp.clip(place, 0, x.shape[1] - 1)), axis=1)
    return jnp.where(over(inside), found, jnp.zeros_like(found))


def begin(
    denoiser: DenoiserLike,
    prompt: jax.Array,
    prompt_lengths: jax.Array | None,
    *,
    gen_length: int,
    length: int,
    context: int = 0,
    key: jax.Array | None = None,
    gen_lengths: jax.Array | None = None,
    given: jax.Array | None = None,
    noise: Noise | None = None,
    stop: Stop | None = None,
    fill: int | None = None,
) -> Canvas:
    """The canvas before the first forward, of checked inputs; for the arguments of `BlockSampler.init`.

    Args:
        length: S is the prompt's width and this, or `context` if that is longer.
        context: masks fill each row up to this length.
        fill: the token of positions that are not written; the mask token by default.

    Raises:
        DllmError: for wrong shapes or dtypes, and for impossible lengths (where they are concrete: inside jit only
            shapes and dtypes are known).
    """
    prompt, prompt_lengths = checked_prompt(denoiser, prompt, prompt_lengths)
    batch, width = prompt.shape
    check_given(given, (batch, gen_length), denoiser)
    gen_lengths = _checked_lengths("gen", gen_lengths, batch, 1, gen_length)
    noise = source_of(noise, key, batch)
    position = jnp.arange(max(width + length, context))
    tokens = jnp.pad(prompt, ((0, 0), (0, len(position) - width)))
    fill = denoiser.mask_id if fill is None else fill
    tokens = jnp.where(position >= prompt_lengths[:, None], fill, tokens)
    undecided = jnp.arange(gen_length) < gen_lengths[:, None]
    if given is not None:
        given = jnp.asarray(given, jnp.int32)
        missing = given == open_id(denoiser)
        tokens = write_rows(tokens, jnp.where(missing, fill, given), prompt_lengths)
        undecided &= missing
    end = jnp.maximum(prompt_lengths + gen_lengths, context)
    zeros = jnp.zeros((batch,), jnp.int32)
    return Canvas(
        tokens=jnp.where(position >= end[:, None], denoiser.eos_id, tokens),
        undecided=undecided,
        prompt_lengths=prompt_lengths,
        gen_lengths=gen_lengths,
        decoded_at=jnp.full((batch, gen_length), -1, jnp.int32),
        logprobs=jnp.full((batch, gen_length), jnp.nan, jnp.float32),
        edits=zeros,
        nfe=zeros,
        full_forwards=zeros,
        cache_updates=zeros,
        broken_at=zeros - 1,
        done=jnp.zeros((batch,), bool),
        stop=None if stop is None else stopping.begin(stop, batch),
        noise=noise,
    )


def checked_prompt(
    denoiser: DenoiserLike, prompt: Any, prompt_lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Prompts [B, P] and their lengths [B], all P by default, as int32.

    Raises:
        DllmError: for another shape or dtype, and prompts that are too short for the model.
    """
    prompt, low = jnp.asarray(prompt), denoiser.min_prompt_length
    if prompt.ndim != 2 or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise DllmError(f"prompt is {prompt.dtype}{list(prompt.shape)}; it must be integer token ids [batch, length]")
    batch, width = prompt.shape
    if width < low:
        raise DllmError("this model cannot predict its very first position; give a prompt of at least one token")
    return prompt.astype(jnp.int32), _checked_lengths("prompt", prompt_lengths, batch, low, width)


def _checked_lengths(what: str, lengths: jax.Array | None, batch: int, low: int, high: int) -> jax.Array:
    if lengths is None:
        return jnp.full((batch,), high, jnp.int32)
    check_lengths(what, lengths, batch, low, high)
    return jnp.asarray(lengths).astype(jnp.int32)
