"""Sampling a model with a canvas (DiffusionGemma): no mask token, no commitment. Every step draws the whole canvas
anew, keeps what is jointly confident, and makes everything else random tokens again.

A row's canvases come one after the other. The model's encoder reads what is finished, prompt and canvases, into buffers
of keys and values; its decoder runs the canvas in every step, and receives the embeddings that the step before expected
(self-conditioning).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser, DenoiserLike, Span
from dllm_jax.models.kv_cache import put_rows, slice_rows, take_rows
from dllm_jax.pytree import pytree, vary_like
from samplers import canvas as canvases
from samplers.canvas import Canvas
from samplers.checks import check_length, check_number, check_whole
from samplers.inputs import start_from
from samplers.loops.block import check_sampling
from samplers.rowwise import run_if
from samplers.rules.base import Number
from samplers.rules.eb import select
from samplers.sampler import Result
from samplers.stopping import Stop
from samplers.tokens.noise import Noise, Purpose, token_of
from samplers.tokens.predictions import Sampling, draw_and_expect, readout

Whole = int | jax.Array


@pytree()
class RenoiseState:
    """Everything a step reads and writes; every leaf starts with the batch axis. L is the length of a canvas.

    Attributes:
        canvas: tokens, counters; S = P and whole canvases. Its tokens are the best ones of the last step.
        finished: [B] int32, finished canvases.
        step: [B] int32, steps of the current canvas so far.
        unchanged: [B] int32, how many of its last steps left the best tokens as they were.
        noisy: [B, L] int32, the input of the next step's decoder.
        best: [B, L] int32, the most probable tokens of the last step.
        soft: [B, L, D], the embeddings that it expected; zeros before a canvas's first.
        given: [B, N L] int32, tokens that all N canvases come with, -1 where one is to be generated, below that
            where it starts from one (`samplers.inputs.start_from`).
        kv: key/value buffers of S positions.
    """

    canvas: Canvas
    finished: jax.Array
    step: jax.Array
    unchanged: jax.Array
    noisy: jax.Array
    best: jax.Array
    soft: jax.Array
    given: jax.Array
    kv: Any


@pytree(static=("gen_length", "block_length"))
class Renoise:
    """DiffusionGemma's sampler, for models whose `attention` is "canvas".

    A canvas begins as random tokens. In step n = steps, steps - 1, ... 1, logits are divided by the temperature
    t_min + (t_max - t_min) n / steps and a token is drawn everywhere. Those whose entropies, in rising order, sum up to
    at most gamma without the own one are kept (EB-Sampler's bound, arXiv 2505.24857; at least one), all others become
    random tokens again. Nothing stays committed. The canvas is finished when the most probable tokens were the same in
    `stability` further steps and the mean entropy is below `confidence`, or after the last step; these tokens are the
    answer. A row ends with the canvas that has an end token.

    In `Result`, `nfe` counts the decoder's forwards, `cache_updates` those before which the encoder read a prompt or
    a canvas, and `full_forwards` the ones before which it read the prompt. Until its canvas is finished a token is
    provisional; `edits` counts those that were replaced. Given tokens stay in every step's input and in the canvas, and
    count in no entropy; tokens to start from are in the first step's input alone, as `decoder_input_ids` in
    transformers.

    Attributes:
        gen_length: G, positions to generate; a last canvas that reaches beyond is cut. Default: 256, a whole canvas of
            the published model.
        block_length: L, length of a canvas, as the model was trained. Default: DiffusionGemma's.
        steps: most steps of a canvas. Default: the checkpoint's published one.
        gamma: bound on the kept tokens' entropies, in nats. Default: the checkpoint's published one.
        t_max, t_min: temperatures, the first step's and the one that the last step comes close to. Default: the
            checkpoint's published ones.
        stability: steps that must confirm the tokens; 0 asks for none. Default: the checkpoint's published one.
        confidence: mean entropy in nats below which a canvas may be finished early; 0 never finishes one. Default: the
            checkpoint's published one.
        sampling: `suppress`, `top_p` and `top_k`; the temperature is a schedule here.
        stop: when a row ends besides; None fills all canvases. Default: the model's end tokens.
    """

    gen_length: int
    block_length: int = 256
    steps: Whole = 48
    gamma: Number = 0.1
    t_max: Number = 0.8
    t_min: Number = 0.4
    stability: Whole = 1
    confidence: Number = 0.005
    sampling: Sampling = Sampling()
    stop: Stop | None = None

    canvas_length = None  # no answer follows the generation
    draws = ("top_p", "top_k")

    def __post_init__(self) -> None:
        check_length("gen_length", self.gen_length)
        check_length("block_length", self.block_length)
        check_whole("steps", self.steps, 1)
        check_whole("stability", self.stability, 0)
        for name in ("gamma", "t_max", "t_min", "confidence"):
            check_number(name, getattr(self, name), 0.0)
        check_sampling(self.sampling, revises=True)
        if self.sampling.temperature is not None:
            raise DllmError("renoise has no one temperature; set those of its first and last step, t_max and t_min")
        if self.sampling.defer is not None:
            raise DllmError("defer has no effect where nothing is committed; leave it out, or use suppress")

    @property
    def width(self) -> int:
        """Length of a canvas."""
        return self.block_length

    def forwards(self, prompt_length: int) -> tuple[int, int]:
        """Fewest and most forwards of the decoder on a row, if no end token ends it before."""
        steps, confirmed = np.asarray(self.steps), np.asarray(self.stability) + 1
        least, most = np.minimum(steps, confirmed).min(), steps.max()
        return self.num_canvases * int(least), self.num_canvases * int(most)

    @property
    def num_canvases(self) -> int:
        """Canvases of the longest generation."""
        return -(-self.gen_length // self.block_length)

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
    ) -> RenoiseState:
        """The state before the first step; the encoder has read the prompts.

        Args:
            prompt, prompt_lengths, key: as in `samplers.sample`.
            gen_lengths: [B] int32, positions each row generates, at most `gen_length`, which is the default.
            given: [B, G] int32, tokens the canvases come with, -1 where one is to be generated, and -2 - t where one
                is that starts from token t instead of a random one; for infilling and edits.
            noise: source of random numbers instead of `key`. For `Purpose.CANVAS` it is drawn from at each row's count
                of the forward that sees the random token.

        Raises:
            DllmError: for another model, wrong shapes or dtypes, lengths that do not fit (where they are concrete), or
                a missing key.
        """
        model = with_canvas(denoiser)
        length = self.num_canvases * self.block_length
        canvas = canvases.begin(
            model,
            prompt,
            prompt_lengths,
            gen_length=self.gen_length,
            length=length,
            key=key,
            gen_lengths=gen_lengths,
            given=None if given is None else jnp.maximum(jnp.asarray(given, jnp.int32), -1),
            noise=noise,
            stop=self.stop,
            fill=model.eos_id,
        )
        if canvas.noise is None:
            raise DllmError("renoise draws random numbers; pass key=jax.random.key(seed)")
        batch, total = canvas.tokens.shape
        kv, width = model.empty_cache(batch, total), total - length
        if width:
            read = model.forward(canvas.tokens[:, :width], canvas.prompt_lengths)[1]
            into = lambda buffer, new: lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), (0, 0, 0, 0))
            kv = jax.tree.map(into, kv, read)
        zeros = jnp.zeros((batch,), jnp.int32)
        none = jnp.zeros((batch, self.block_length), jnp.int32)
        embeddings = jax.eval_shape(model.embed, none)
        state = RenoiseState(
            canvas=canvas,
            finished=zeros,
            step=zeros,
            unchanged=zeros,
            noisy=none,
            best=none,
            soft=jnp.zeros(embeddings.shape, embeddings.dtype),
            given=jnp.full((batch, length), -1, jnp.int32),
            kv=kv,
        )
        if given is not None:
            state = dataclasses.replace(state, given=state.given.at[:, : self.gen_length].set(given))
        state = dataclasses.replace(state, noisy=self._enter(state, self._random_tokens(model, state)))
        return vary_like(prompt, state)

    def step(self, denoiser: DenoiserLike, state: RenoiseState) -> RenoiseState:
        """One forward of the decoder for every row that is not done, before which the encoder reads the canvas that a
        row has finished."""
        model, canvas = with_canvas(denoiser), state.canvas
        ran, span = ~canvas.done, self._span(state)
        reads = ran & (state.step == 0)
        kv = _read_canvas(model, canvas.tokens, span, reads & (state.finished > 0), state.kv)
        hidden, kv = model.denoise(state.noisy, state.soft, span.start, kv)
        found = draw_and_expect(
            readout(model, hidden),
            dataclasses.replace(self.sampling, temperature=self._temperature(state)),
            draw=lambda ids: self._uniform(state, Purpose.TOKENS, ids),
            mix=model.mixed_embeddings,
        )
        free, best = self._given(state) < 0, self._pin(state, found.best)
        same = (state.step > 0) & (best == state.best).all(axis=1)
        unchanged = jnp.where(same, state.unchanged + 1, 0)
        entropy = jnp.where(free, found.entropy, 0.0).sum(axis=1) / jnp.maximum(free.sum(axis=1), 1)
        calm = (unchanged >= jnp.asarray(self.stability)) & (entropy < jnp.asarray(self.confidence))
        ends = ran & (calm | (state.step + 1 >= jnp.asarray(self.steps)) | ~free.any(axis=1))
        finite = found.finite.all(axis=1)
        canvas = canvas.write(span.start, best, found.logprob, jnp.zeros_like(found.finite), ran)
        state = dataclasses.replace(
            state,
            canvas=canvas.counted(ran, reads & (state.finished == 0), reads, finite),
            finished=state.finished + ends,
            step=jnp.where(ends, 0, state.step + 1),
            unchanged=unchanged,
            best=best,
            soft=jnp.where(ends[:, None, None], 0, found.soft).astype(state.soft.dtype),
            kv=kv,
        )
        kept = select(found.entropy, found.entropy, free, self.gamma) & ~ends[:, None]
        noisy = jnp.where(kept, found.token, self._random_tokens(model, state))
        return self._ended(model, dataclasses.replace(state, noisy=self._enter(state, noisy)))

    def is_done(self, state: RenoiseState) -> jax.Array:
        """[B] bool: rows whose generation has ended."""
        return state.canvas.done

    def result(self, denoiser: DenoiserLike, state: RenoiseState) -> Result:
        """The generation so far."""
        return state.canvas.result(denoiser.eos_id)

    def pending(self, state: RenoiseState) -> jax.Array:
        """[B, G] bool, positions that may still change: all that are not of a finished canvas."""
        place = jnp.arange(self.gen_length)
        first = state.finished * self.block_length
        return (place >= first[:, None]) & (place < state.canvas.gen_lengths[:, None])

    def _span(self, state: RenoiseState) -> Span:
        """The current canvas."""
        number = jnp.minimum(state.finished, self.num_canvases - 1)  # of a row that is done, any
        return Span(state.canvas.prompt_lengths + number * self.block_length, self.block_length)

    def _given(self, state: RenoiseState) -> jax.Array:
        """[B, L] int32, `given` of the current canvas."""
        number = jnp.minimum(state.finished, self.num_canvases - 1)
        return slice_rows(state.given, number * self.block_length, self.block_length)

    def _pin(self, state: RenoiseState, tokens: jax.Array) -> jax.Array:
        """Tokens [B, L] of the current canvas, with those that it came with in their places."""
        given = self._given(state)
        return jnp.where(given < 0, tokens, given)

    def _enter(self, state: RenoiseState, noisy: jax.Array) -> jax.Array:
        """The input [B, L] of the next step: in a canvas's first one, with the tokens that it starts from."""
        starts = (self._given(state) < -1) & (state.step == 0)[:, None]
        return self._pin(state, jnp.where(starts, start_from(self._given(state)), noisy))

    def _temperature(self, state: RenoiseState) -> jax.Array:
        """Of each row's next step, [B]."""
        steps, low, high = (jnp.asarray(x) for x in (self.steps, self.t_min, self.t_max))
        return low + (high - low) * ((steps - state.step) / steps)

    def _uniform(self, state: RenoiseState, purpose: Purpose, ids: jax.Array | None = None) -> jax.Array:
        """Draws for the current canvas."""
        assert state.canvas.noise is not None
        positions = self._span(state).positions - state.canvas.prompt_lengths[:, None]
        return state.canvas.noise.uniform(purpose, state.canvas.nfe, positions, ids)

    def _random_tokens(self, denoiser: Denoiser, state: RenoiseState) -> jax.Array:
        """Tokens [B, L] int32 for the next forward, each of the vocabulary as likely as any other."""
        return token_of(self._uniform(state, Purpose.CANVAS), denoiser.vocab_size)

    def _ended(self, denoiser: Denoiser, state: RenoiseState) -> RenoiseState:
        """Which rows have ended."""
        pending = self.pending(state)
        canvas, stopped = state.canvas.stopped(self.stop, denoiser.eos_id, pending)
        done = canvas.done | ~pending.any(axis=1) | stopped
        return dataclasses.replace(state, canvas=dataclasses.replace(canvas, done=done))


def with_canvas(denoiser: DenoiserLike) -> Denoiser:
    """The denoiser of a model with a canvas.

    Raises:
        DllmError: for any other.
    """
    if isinstance(denoiser, Denoiser) and denoiser.config.has_canvas:
        return denoiser
    raise DllmError("renoise runs a decoder of a canvas; give it a diffusion-gemma model, or use BlockSampler")


def _read_canvas(denoiser: Denoiser, tokens: jax.Array, span: Span, rows: jax.Array, kv: Any) -> Any:
    """The buffers after the encoder has read, for some rows [B] bool, the canvas before the span; each row alone, or
    one of each part of a batch that lies on several devices, so that it costs what these rows need."""
    parts = denoiser.batch_parts if rows.shape[0] % denoiser.batch_parts == 0 else 1

    def read(tokens: jax.Array, end: jax.Array, kv: Any) -> Any:
        return denoiser.forward(tokens, end, at=Span(jnp.maximum(end - span.width, 0), span.width), kv=kv)[1]

    if rows.shape[0] == 1:
        return run_if(rows[0], lambda _, kv: ((), read(tokens, span.start, kv)), (), kv)[1]

    def next_row(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        pending, kv = carry
        index, write = jnp.argmax(pending, axis=1), pending.any(axis=1)
        own = lambda x: take_rows(x, index)
        new = read(own(tokens), own(span.start), jax.tree.map(own, kv))
        pending &= jnp.arange(pending.shape[1]) != index[:, None]
        return pending, jax.tree.map(lambda old, new: put_rows(old, new, index, write), kv, new)

    return lax.while_loop(lambda carry: carry[0].any(), next_row, (rows.reshape(parts, -1), kv))[1]
