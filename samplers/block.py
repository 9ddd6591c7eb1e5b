"""The block sampler: any unmasking rule, with any cache policy, over semi-autoregressive blocks."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.kv_cache import slice_rows, write_rows
from dllm_jax.pytree import pytree, vary_like
from samplers import stopping
from samplers.caches import CachePolicy, DenoiserLike, NoCache, Request
from samplers.engine import Result
from samplers.guidance import Guided
from samplers.inputs import checked
from samplers.noise import KeyNoise, Noise, Purpose, check_key, row_keys
from samplers.predictions import Predictions, Sampling, predict
from samplers.rules.base import BlockView, Rule, check_length, check_number, check_whole
from samplers.stopping import Stop, StopState

COMPAT = ("eos-fill-after-window",)


@pytree()
class BlockState:
    """Everything a step reads and writes; every leaf but the cache's starts with the batch axis.

    Attributes:
        tokens: [B, S] int32: each row its prompt, at once followed by its canvas, then padding.
        canvas_start: [B], the row's prompt length.
        gen_lengths: [B], positions the row generates, at most G.
        decoded_at: [B, G], as in `Result`.
        block, block_step, block_masks: [B], the active block, forwards spent on it, masks it had when entered.
        nfe, full_forwards: [B], as in `Result`.
        done: [B] bool.
        rule, cache, stop: state of the rule, the cache policy and the stop condition.
        noise: source of random numbers, None where nothing is drawn.
    """

    tokens: jax.Array
    canvas_start: jax.Array
    gen_lengths: jax.Array
    decoded_at: jax.Array
    block: jax.Array
    block_step: jax.Array
    block_masks: jax.Array
    nfe: jax.Array
    full_forwards: jax.Array
    done: jax.Array
    rule: Any
    cache: Any
    stop: StopState | None
    noise: Noise | None


@pytree(static=("gen_length", "block_length", "canvas_length", "fill_after_eos", "compat"))
class BlockSampler:
    """Unmasks a canvas block by block; the rule decides inside the active block, the policy how it is predicted.

    Attributes:
        rule: which positions are committed.
        gen_length: G, positions to generate.
        block_length: length of a block; the last may be shorter. None is one block.
        cache: which keys and values are reused.
        sampling: how tokens are drawn; greedy by default.
        stop: when a row ends before its canvas is full; None runs to the end. See `stopping.stop_on`.
        guidance: scale of classifier-free guidance; None runs without.
        canvas_length: pad every row with masks to this total length, prompt included; masks behind the generation
            are context and stay (EB-Sampler pads to the model's maximum length). None adds none; a row whose prompt
            and generation are longer gets none.
        fill_after_eos: as soon as an end-of-sequence token is committed, all positions behind it become it, committed
            or not, and count as context from then on (Fast-dLLM's early stop). Fewer forwards, slightly other tokens.
        compat: quirks of official code, for comparing with it: "eos-fill-after-window" skips that filling after a
            forward that rebuilt a cache.
    """

    rule: Rule
    gen_length: int
    block_length: int | None = None
    cache: CachePolicy = NoCache()
    sampling: Sampling = Sampling()
    stop: Stop | None = None
    guidance: float | jax.Array | None = None
    canvas_length: int | None = None
    fill_after_eos: bool = False
    compat: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_length("gen_length", self.gen_length)
        check_length("block_length", self.block_length, optional=True)
        check_length("canvas_length", self.canvas_length, optional=True)
        if self.block_length is not None and not 1 <= self.block_length <= self.gen_length:
            raise DllmError(f"block_length {self.block_length} must be between 1 and gen_length {self.gen_length}")
        if self.canvas_length is not None and self.canvas_length < self.gen_length:
            total = "it counts the prompt and the generation"
            raise DllmError(f"canvas_length {self.canvas_length} is below gen_length {self.gen_length}; {total}")
        if unknown := sorted(set(self.compat) - set(COMPAT)):
            raise DllmError(f"compat option {unknown[0]!r} is unknown; choose from {', '.join(COMPAT)}")
        if isinstance(self.rule, Rule):
            self.rule.check(self.gen_length, self.num_blocks)
        if isinstance(self.sampling, Sampling):
            check_number("temperature", self.sampling.temperature, 0.0)
            check_number("top_p", self.sampling.top_p, 0.0, 1.0)
            check_whole("top_k", self.sampling.top_k, 1)
        check_number("guidance", self.guidance, 0.0)

    @property
    def width(self) -> int:
        """Length of a block."""
        return self.block_length or self.gen_length

    @property
    def num_blocks(self) -> int:
        """Blocks of a generation, the last one possibly shorter."""
        return -(-self.gen_length // self.width)

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
    ) -> BlockState:
        """The state before the first forward.

        Args:
            prompt, prompt_lengths, key: as in `samplers.sample`.
            gen_lengths: [B] int32, positions each row generates, at most `gen_length`, which is the default. A row's
                canvas ends there; what lies behind is padding. Changing them recompiles nothing.
            given: [B, G] int32, tokens the canvas comes with, the mask id where a token is to be generated; for
                infilling. None generates all.
            noise: source of random numbers instead of `key`, such as a `TableNoise`.

        Raises:
            DllmError: for wrong shapes or dtypes, a prompt shorter than the family needs, prompt lengths that do not
                fit (where they are concrete), or a missing key.
        """
        self._check_parts()
        prompt, prompt_lengths, gen_lengths, given = checked(
            denoiser, prompt, prompt_lengths, gen_lengths, given, self.gen_length
        )
        check_key(key, prompt.shape[0])
        batch, width = prompt.shape
        length = max(width + self.gen_length, self.canvas_length or 0)
        tokens = jnp.pad(prompt, ((0, 0), (0, length - width)))
        position = jnp.arange(length)
        tokens = jnp.where(position >= prompt_lengths[:, None], denoiser.mask_id, tokens)
        if given is not None:
            tokens = write_rows(tokens, given, prompt_lengths)
        end = self._lengths(prompt_lengths, gen_lengths)
        tokens = jnp.where(position >= end[:, None], denoiser.eos_id, tokens)
        zeros = jnp.zeros((batch,), jnp.int32)
        if noise is None and key is not None:
            noise = KeyNoise(row_keys(key, batch))
        state = BlockState(
            tokens=tokens,
            canvas_start=prompt_lengths,
            gen_lengths=gen_lengths,
            decoded_at=jnp.full((batch, self.gen_length), -1, jnp.int32),
            block=zeros,
            block_step=zeros,
            block_masks=zeros,
            nfe=zeros,
            full_forwards=zeros,
            done=jnp.zeros((batch,), bool),
            rule=self.rule.init(batch),
            cache=None,
            stop=None if self.stop is None else stopping.begin(self.stop, batch),
            noise=noise,
        )
        cache = self.cache.init(self._guided(denoiser, state), batch, length)
        state = vary_like(prompt, dataclasses.replace(state, cache=cache))
        return self._move_on(denoiser, state, jnp.ones((batch,), bool))

    def step(self, denoiser: DenoiserLike, state: BlockState) -> BlockState:
        """One forward, one decision and one commit for every row that is not finished (and need not wait)."""
        guided = self._guided(denoiser, state)
        view, request = self._look(denoiser, state)
        hidden, cache, ran, full = self.cache.predict(guided, request, state.cache)
        predictions = self._predict(guided, hidden, view)
        select, rule = self.rule.decide(predictions, view, state.rule)
        select &= ran[:, None]
        rule = jax.tree.map(lambda new, old: jnp.where(_like(ran, new), new, old), rule, state.rule)

        first = request.start - state.canvas_start
        tokens = jnp.where(select, predictions.token, slice_rows(state.tokens, request.start, self.width))
        decoded_at = jnp.where(select, state.nfe[:, None], slice_rows(state.decoded_at, first, self.width))
        state = dataclasses.replace(
            state,
            tokens=write_rows(state.tokens, tokens, request.start),
            decoded_at=write_rows(state.decoded_at, decoded_at, first),
            rule=rule,
            cache=cache,
        )
        if self.fill_after_eos:
            state = self._fill_after_eos(denoiser, state, ran & ~full if self.compat else ran)
        masks_left = jnp.any(self._block_masks(denoiser, state), axis=1)
        leaving = ran & self.rule.block_done(view, masks_left)
        state = dataclasses.replace(
            state,
            block_step=state.block_step + ran,
            nfe=state.nfe + ran,
            full_forwards=state.full_forwards + full,
        )
        return self._move_on(denoiser, state, leaving)

    def is_done(self, state: BlockState) -> jax.Array:
        """[B] bool: rows whose generation has ended."""
        return state.done

    def result(self, denoiser: DenoiserLike, state: BlockState) -> Result:
        """The generation so far."""
        generated = self._generated(denoiser, state)
        generated = jnp.where(generated == denoiser.mask_id, denoiser.eos_id, generated)
        ends = generated == denoiser.eos_id
        lengths = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1), self.gen_length).astype(jnp.int32)
        if state.stop is not None:
            lengths = jnp.minimum(lengths, state.stop.length)
        return Result(generated, lengths, state.decoded_at, state.nfe, state.full_forwards)

    def _check_parts(self) -> None:
        """Raises DllmError for parts of the wrong kind: here, because JAX builds samplers of other things as well."""
        if not isinstance(self.rule, Rule):
            raise DllmError(f"rule is {self.rule!r}; give a rule object, such as make_rule('threshold')")
        if isinstance(self.cache, type) or not hasattr(self.cache, "predict"):
            raise DllmError(f"cache is {self.cache!r}; give a policy object, such as make_cache('dual')")
        if not isinstance(self.sampling, Sampling):
            raise DllmError(f"sampling is {self.sampling!r}; give a Sampling")

    def _lengths(self, prompt_lengths: jax.Array, gen_lengths: jax.Array) -> jax.Array:
        """Valid positions of every row, [B]."""
        return jnp.maximum(prompt_lengths + gen_lengths, self.canvas_length or 0)

    def _generated(self, denoiser: DenoiserLike, state: BlockState) -> jax.Array:
        """The generation's tokens, [B, G]; what lies behind a row's own length reads as the end of the sequence."""
        tokens = slice_rows(state.tokens, state.canvas_start, self.gen_length)
        return jnp.where(jnp.arange(self.gen_length) < state.gen_lengths[:, None], tokens, denoiser.eos_id)

    def _guided(self, denoiser: DenoiserLike, state: BlockState) -> DenoiserLike:
        if self.guidance is None:
            return denoiser
        ours = write_rows(jnp.zeros_like(state.tokens, bool), state.decoded_at >= 0, state.canvas_start)
        return cast(DenoiserLike, Guided(denoiser, (state.tokens != denoiser.mask_id) & ~ours, self.guidance))

    def _block_masks(self, denoiser: DenoiserLike, state: BlockState) -> jax.Array:
        """[B, G] bool, masked positions of each row's active block."""
        position = jnp.arange(self.gen_length)
        return (self._generated(denoiser, state) == denoiser.mask_id) & (position // self.width == state.block[:, None])

    def _look(self, denoiser: DenoiserLike, state: BlockState) -> tuple[BlockView, Request]:
        first = state.block * self.width
        start = jnp.minimum(first, self.gen_length - self.width)
        positions = start[:, None] + jnp.arange(self.width, dtype=jnp.int32)
        masked = jnp.take_along_axis(self._block_masks(denoiser, state), positions, axis=1)
        view = BlockView(
            masked=masked,
            positions=positions,
            first=first,
            step=state.block_step,
            block_masks=state.block_masks,
            num_blocks=-(-state.gen_lengths // self.width),
            noise=state.noise,
            nfe=state.nfe,
        )
        request = Request(
            inputs=state.tokens,
            lengths=self._lengths(state.canvas_start, state.gen_lengths),
            longest_suffix=self.gen_length if self.canvas_length is None else state.tokens.shape[1],
            block=state.block,
            block_start=state.canvas_start + first,
            block_end=state.canvas_start + jnp.minimum(first + self.width, state.gen_lengths),
            start=state.canvas_start + start,
            width=self.width,
            ragged=self.gen_length % self.width != 0,
            active=~state.done,
        )
        return view, request

    def _predict(self, denoiser: DenoiserLike, hidden: jax.Array, view: BlockView) -> Predictions:
        uniform = None
        if self.sampling.temperature is not None:
            uniform = view.draw(Purpose.TOKENS, denoiser.vocab_size)
        return predict(
            denoiser.logits(hidden),
            self.sampling,
            mask_id=denoiser.mask_id,
            score_from=self.rule.score_from,
            uniform=uniform,
        )

    def _fill_after_eos(self, denoiser: DenoiserLike, state: BlockState, rows: jax.Array) -> BlockState:
        generated = self._generated(denoiser, state)
        ends = generated == denoiser.eos_id
        position = jnp.arange(self.gen_length)
        first = jnp.where(ends.any(axis=1) & rows, jnp.argmax(ends, axis=1), self.gen_length)
        behind = (position > first[:, None]) & (position < state.gen_lengths[:, None])
        newly = behind & (generated == denoiser.mask_id)
        kept = slice_rows(state.tokens, state.canvas_start, self.gen_length)
        filled = jnp.where(behind, denoiser.eos_id, kept)
        return dataclasses.replace(
            state,
            tokens=write_rows(state.tokens, filled, state.canvas_start),
            decoded_at=jnp.where(newly, state.nfe[:, None], state.decoded_at),
        )

    def _move_on(self, denoiser: DenoiserLike, state: BlockState, leaving: jax.Array) -> BlockState:
        """Checks the stop condition, and takes rows that leave their block to the next one that has masks."""
        masked = self._generated(denoiser, state) == denoiser.mask_id
        done = state.done | (leaving & ~masked.any(axis=1))
        stop = state.stop
        if self.stop is not None and stop is not None:
            stop = stopping.advance(
                self.stop, stop, self._generated(denoiser, state), state.gen_lengths, denoiser.mask_id
            )
            done |= stop.length != stopping.NEVER
        entering = leaving & ~done
        block = jnp.where(entering, jnp.argmax(masked, axis=1).astype(jnp.int32) // self.width, state.block)
        state = dataclasses.replace(state, block=block, done=done, stop=stop)
        masks = self._block_masks(denoiser, state).sum(axis=1, dtype=jnp.int32)
        return dataclasses.replace(
            state,
            block_step=jnp.where(entering, 0, state.block_step),
            block_masks=jnp.where(entering, masks, state.block_masks),
        )


def _like(rows: jax.Array, leaf: jax.Array) -> jax.Array:
    return rows.reshape(rows.shape + (1,) * (leaf.ndim - 1))
