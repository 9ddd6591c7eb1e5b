"""The block sampler: any unmasking rule, with any cache policy, over semi-autoregressive blocks."""

import dataclasses
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.errors import DllmError
from dllm_jax.kv_cache import slice_rows, write_rows
from dllm_jax.pytree import pytree, vary_like
from samplers import stopping
from samplers.caches import CachePolicy, DenoiserLike, NoCache, Outcome, Request
from samplers.checks import check_length, check_number, check_whole
from samplers.engine import Result
from samplers.guidance import Guided
from samplers.inputs import checked
from samplers.noise import Noise, Purpose, source_of
from samplers.predictions import Predictions, Sampling, predict
from samplers.rules.base import BlockView, Rule
from samplers.smoothing import Smoothing
from samplers.stopping import Stop, StopState

COMPAT = ("eos-fill-after-window", "every-block", "lockstep", "stop-after-block")


@pytree()
class BlockState:
    """Everything a step reads and writes; every leaf but the cache's starts with the batch axis.

    Attributes:
        tokens: [B, S] int32: each row its prompt, at once followed by its canvas, then padding.
        canvas_start: [B], the row's prompt length.
        gen_lengths: [B], positions the row generates, at most G.
        decoded_at: [B, G], as in `Result`.
        block, block_step, block_masks: [B], the active block, forwards spent on it, masks it had when entered.
        nfe, full_forwards, cache_updates: [B], as in `Result`.
        done: [B] bool.
        rule, cache, stop: state of the rule, the cache policy and the stop condition.
        noise: source of random numbers, None where nothing is drawn.
        soft: [B, S, D], what smoothing adds to the embedding of a position while it is masked; None without.
        repeats: [B], iterations until the row may leave its block; None without `unroll`.
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
    cache_updates: jax.Array
    done: jax.Array
    rule: Any
    cache: Any
    stop: StopState | None
    noise: Noise | None
    soft: jax.Array | None
    repeats: jax.Array | None


@pytree(static=("gen_length", "block_length", "align_blocks", "canvas_length", "fill_after_eos", "unroll", "compat"))
class BlockSampler:
    """Unmasks a canvas block by block; the rule decides inside the active block, the policy how it is predicted.

    Attributes:
        rule: which positions are committed.
        gen_length: G, positions to generate.
        block_length: length of a block; the last may be shorter. None is one block.
        cache: which keys and values are reused.
        smoothing: carry what each forward expects at masked positions over to the next; None does not.
        align_blocks: blocks begin at multiples of block_length counted from the prompt's start, so that a row's first
            may begin within its prompt and be shorter (dInfer's `start_block_align`).
        sampling: how tokens are drawn; greedy by default.
        stop: when a row ends before its canvas is full; None runs to the end. See `stopping.stop_on`.
        guidance: scale of classifier-free guidance; None runs without.
        canvas_length: pad every row with masks to this total length, prompt included; masks behind the generation
            are context and stay (EB-Sampler pads to the model's maximum length). None adds none; a row whose prompt
            and generation are longer gets none.
        fill_after_eos: as soon as an end-of-sequence token is committed, all positions behind it become it, committed
            or not, and count as context from then on (Fast-dLLM's early stop). Fewer forwards, slightly other tokens.
        unroll: None looks after every forward whether a block is complete. (most, n) is dInfer's loop, for comparing
            with it: only after masks // n iterations, at least one and at most so many; its forwards on complete
            blocks change nothing there, but count. A forward that rebuilt a cache is one iteration with the next.
        compat: quirks of official code, for comparing with it: "eos-fill-after-window" skips that filling after a
            forward that rebuilt a cache; "stop-after-block" completes the block in which a stop condition holds;
            "every-block" enters blocks that are complete already, for one forward each, as NI's code does;
            "lockstep" keeps rows of equal lengths in a block until all have completed it, still counting forwards.
    """

    rule: Rule
    gen_length: int
    block_length: int | None = None
    cache: CachePolicy = NoCache()
    smoothing: Smoothing | None = None
    align_blocks: bool = False
    sampling: Sampling = Sampling()
    stop: Stop | None = None
    guidance: float | jax.Array | None = None
    canvas_length: int | None = None
    fill_after_eos: bool = False
    unroll: tuple[int | jax.Array, int | jax.Array] | None = None
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
        if self.unroll is not None:
            for what, number in zip(("the most", "the masks per iteration"), self.unroll, strict=True):
                check_whole(f"{what} of unroll", number, 1)
        parts: tuple[Any, ...] = (self.cache, self.smoothing)
        for part in parts:
            if hasattr(part, "check") and not isinstance(part, type):
                part.check()
        if isinstance(self.rule, Rule):
            self.rule.check(self.gen_length, None if self.align_blocks else -(-self.gen_length // self.width))
        check_sampling(self.sampling)
        check_number("guidance", self.guidance, 0.0)

    @property
    def width(self) -> int:
        """Length of a block."""
        return self.block_length or self.gen_length

    def blocks(self, prompt_length: int, gen_length: int | None = None) -> list[tuple[int, int]]:
        """The blocks of a row as absolute positions (start, end), the prompt's first token being 0.

        Args:
            prompt_length: of the row.
            gen_length: positions that the row generates; the sampler's by default.
        """
        end = prompt_length + (self.gen_length if gen_length is None else gen_length)
        first = prompt_length - (prompt_length % self.width if self.align_blocks else 0)
        return [(start, min(start + self.width, end)) for start in range(first, end, self.width)]

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
        batch, width = prompt.shape
        noise = source_of(noise, key, batch)
        length = max(width + self.gen_length, self.canvas_length or 0)
        end = self._lengths(prompt_lengths, gen_lengths)
        tokens = laid_out(denoiser, prompt, prompt_lengths, given, end, length)
        zeros = jnp.zeros((batch,), jnp.int32)
        before = zeros - 1 if "every-block" in self.compat else zeros
        state = BlockState(
            tokens=tokens,
            canvas_start=prompt_lengths,
            gen_lengths=gen_lengths,
            decoded_at=jnp.full((batch, self.gen_length), -1, jnp.int32),
            block=before,
            block_step=zeros,
            block_masks=zeros,
            nfe=zeros,
            full_forwards=zeros,
            cache_updates=zeros,
            done=jnp.zeros((batch,), bool),
            rule=self.rule.init(batch, self.width, denoiser.vocab_size),
            cache=None,
            stop=None if self.stop is None else stopping.begin(self.stop, batch),
            noise=noise,
            soft=None if self.smoothing is None else jnp.zeros_like(denoiser.embed(tokens)),
            repeats=None if self.unroll is None else zeros,
        )
        cache = self.cache.init(self._guided(denoiser, state), batch, length)
        state = vary_like(prompt, dataclasses.replace(state, cache=cache))
        return self._move_on(denoiser, state, jnp.ones((batch,), bool))

    def step(self, denoiser: DenoiserLike, state: BlockState) -> BlockState:
        """One forward, one decision and one commit for every row that is not finished (and need not wait)."""
        guided = self._guided(denoiser, state)
        view, request = self._look(guided, state)
        outcome = self.cache.predict(guided, request, state.cache)
        ran = outcome.ran
        hidden = slice_rows(outcome.hidden, request.start, self.width) if request.wide else outcome.hidden
        logits = guided.logits(hidden)
        adjusted, rule = self.rule.adjust(logits, view, state.rule)
        predictions = predicted(guided, self.rule, self.sampling, adjusted, view)
        select, rule = self.rule.decide(predictions, view, rule)
        select &= ran[:, None]

        tokens = jnp.where(select, predictions.token, slice_rows(state.tokens, request.start, self.width))
        if self.rule.reads_hidden:
            sure, best = sure_of(guided, self.rule, self.sampling, hidden, logits, view.masked & ran[:, None])
            select, tokens = select | sure, jnp.where(sure, best, tokens)
        newly = _on_canvas(select, view.positions, self.gen_length)
        soft = state.soft
        if self.smoothing is not None and soft is not None:
            soft = self._soften(guided, request, outcome, logits, self.smoothing.alpha(state.nfe), soft)
        state = dataclasses.replace(
            state,
            tokens=write_rows(state.tokens, tokens, request.start),
            decoded_at=jnp.where(newly, state.nfe[:, None], state.decoded_at),
            rule=jax.tree.map(lambda new, old: jnp.where(_like(ran, new), new, old), rule, state.rule),
            cache=outcome.state,
            soft=soft,
        )
        if self._looks_ahead:
            state = self._write_ahead(guided, request, outcome, state)
        if self.fill_after_eos:
            skipped = outcome.full if "eos-fill-after-window" in self.compat else ran & False
            state = self._fill_after_eos(denoiser, state, ran & ~skipped)
        leaving, repeats = self._leaving(denoiser, state, view, outcome)
        state = dataclasses.replace(
            state,
            block_step=state.block_step + ran,
            nfe=state.nfe + ran,
            full_forwards=state.full_forwards + outcome.full,
            cache_updates=state.cache_updates + outcome.updated,
            repeats=repeats,
        )
        return self._move_on(denoiser, state, leaving)

    def is_done(self, state: BlockState) -> jax.Array:
        """[B] bool: rows whose generation has ended."""
        return state.done

    def result(self, denoiser: DenoiserLike, state: BlockState) -> Result:
        """The generation so far."""
        return result_of(denoiser, state, self._generated(denoiser, state))

    def _check_parts(self) -> None:
        """Raises DllmError for parts of the wrong kind: here, because JAX builds samplers of other things as well."""
        check_rule(self.rule, self.sampling)
        if isinstance(self.cache, type) or not hasattr(self.cache, "predict"):
            raise DllmError(f"cache is {self.cache!r}; give a policy object, such as DualCache()")
        if not (self.smoothing is None or isinstance(self.smoothing, Smoothing)):
            raise DllmError(f"smoothing is {self.smoothing!r}; give a Smoothing or None")

    def _lengths(self, prompt_lengths: jax.Array, gen_lengths: jax.Array) -> jax.Array:
        """Valid positions of every row, [B]."""
        return jnp.maximum(prompt_lengths + gen_lengths, self.canvas_length or 0)

    def _generated(self, denoiser: DenoiserLike, state: BlockState) -> jax.Array:
        """The generation's tokens, [B, G]; what lies behind a row's own length reads as the end of the sequence."""
        return generation(denoiser, state, self.gen_length)

    def _guided(self, denoiser: DenoiserLike, state: BlockState) -> DenoiserLike:
        if self.guidance is None:
            return denoiser
        ours = write_rows(jnp.zeros_like(state.tokens, bool), state.decoded_at >= 0, state.canvas_start)
        return cast(DenoiserLike, Guided(denoiser, (state.tokens != denoiser.mask_id) & ~ours, self.guidance))

    def _prompt_part(self, state: BlockState) -> jax.Array:
        """[B], positions of the prompt that belong to a row's first block."""
        return state.canvas_start % self.width if self.align_blocks else jnp.zeros_like(state.canvas_start)

    def _num_blocks(self, state: BlockState) -> jax.Array:
        """[B], blocks of each row's generation."""
        return -(-(self._prompt_part(state) + state.gen_lengths) // self.width)

    def _block_masks(self, denoiser: DenoiserLike, state: BlockState) -> jax.Array:
        """[B, G] bool, masked positions of each row's active block."""
        block = (self._prompt_part(state)[:, None] + jnp.arange(self.gen_length)) // self.width
        return (self._generated(denoiser, state) == denoiser.mask_id) & (block == state.block[:, None])

    def _inputs(self, denoiser: DenoiserLike, state: BlockState) -> jax.Array:
        """What the model is fed: tokens [B, S], or embeddings [B, S, D] that are soft at the masks."""
        if state.soft is None:
            return state.tokens
        soft = jnp.where((state.tokens == denoiser.mask_id)[..., None], state.soft, 0)
        return denoiser.embed(state.tokens) + soft

    def _look(self, denoiser: DenoiserLike, state: BlockState) -> tuple[BlockView, Request]:
        prompt_part, least = self._prompt_part(state), denoiser.min_prompt_length
        first = state.block * self.width - prompt_part
        start = jnp.maximum(state.canvas_start + jnp.minimum(first, self.gen_length - self.width), least)
        positions = (start - state.canvas_start)[:, None] + jnp.arange(self.width, dtype=jnp.int32)
        masks = self._block_masks(denoiser, state)
        masked = (positions >= 0) & jnp.take_along_axis(masks, jnp.maximum(positions, 0), axis=1)
        view = BlockView(
            masked=masked,
            positions=positions,
            first=first,
            step=state.block_step,
            block_masks=state.block_masks,
            num_blocks=self._num_blocks(state),
            noise=state.noise,
            nfe=state.nfe,
            caution=None if self.smoothing is None else self.smoothing.caution(state.nfe),
        )
        canvas = self.gen_length + (self.width - 1 if self.align_blocks else 0)
        request = Request(
            inputs=self._inputs(denoiser, state),
            lengths=self._lengths(state.canvas_start, state.gen_lengths),
            longest_suffix=canvas if self.canvas_length is None else state.tokens.shape[1],
            block=state.block,
            block_start=jnp.maximum(state.canvas_start + first, least),
            block_end=state.canvas_start + jnp.minimum(first + self.width, state.gen_lengths),
            start=start,
            width=self.width,
            ragged=self.align_blocks or self.gen_length % self.width != 0,
            active=~state.done,
            nfe=state.nfe,
            iteration=state.nfe if self.smoothing is not None else state.nfe - state.cache_updates,
            wide=self.smoothing is not None or self._looks_ahead,
        )
        return view, request

    def _soften(
        self,
        denoiser: DenoiserLike,
        request: Request,
        outcome: Outcome,
        logits: jax.Array,
        alpha: jax.Array,
        soft: jax.Array,
    ) -> jax.Array:
        """The soft inputs after a forward, new at what it ran: the block from its logits, what lies behind it in pieces
        of a block's length, so that no more logits are held at once."""

        def write(soft: jax.Array, logits: jax.Array, start: jax.Array, first: jax.Array) -> jax.Array:
            positions = start[:, None] + jnp.arange(self.width)
            low, high = jnp.maximum(outcome.low, first)[:, None], outcome.high[:, None]
            fresh = outcome.ran[:, None] & (positions >= low) & (positions < high)
            mean = denoiser.expected_embedding(logits) * alpha[:, None, None]
            return write_rows(soft, mean.astype(soft.dtype), start, fresh)

        def piece(number: jax.Array, soft: jax.Array) -> jax.Array:
            first = request.start + (number + 1) * self.width
            start = jnp.minimum(first, soft.shape[1] - self.width)
            return write(soft, denoiser.logits(slice_rows(outcome.hidden, start, self.width)), start, first)

        behind = jnp.where(outcome.ran, outcome.high - request.start - self.width, 0)
        pieces = -(-jnp.max(jnp.maximum(behind, 0)) // self.width)
        return lax.fori_loop(0, pieces, piece, write(soft, logits, request.start, request.start))

    @property
    def _looks_ahead(self) -> bool:
        return self.rule.reads_hidden and self.rule.looks_ahead(not isinstance(self.cache, NoCache))

    def _write_ahead(self, denoiser: DenoiserLike, request: Request, outcome: Outcome, state: BlockState) -> BlockState:
        """Commits what the rule is sure of behind the active block, as far as the forward ran, in pieces of a block's
        length, so that no more logits are held at once."""
        high = jnp.minimum(outcome.high, state.canvas_start + state.gen_lengths)

        def piece(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            tokens, decoded_at = carry
            first = request.block_end + number * self.width
            start = jnp.minimum(first, tokens.shape[1] - self.width)
            positions = start[:, None] + jnp.arange(self.width)
            masked = slice_rows(tokens, start, self.width) == denoiser.mask_id
            masked &= outcome.ran[:, None] & (positions >= first[:, None]) & (positions < high[:, None])
            hidden = slice_rows(outcome.hidden, start, self.width)
            sure, best = sure_of(denoiser, self.rule, self.sampling, hidden, denoiser.logits(hidden), masked)
            newly = _on_canvas(sure, positions - state.canvas_start[:, None], self.gen_length)
            return write_rows(tokens, best, start, sure), jnp.where(newly, state.nfe[:, None], decoded_at)

        behind = jnp.where(outcome.ran, high - request.block_end, 0)
        pieces = -(-jnp.max(jnp.maximum(behind, 0)) // self.width)
        tokens, decoded_at = lax.fori_loop(0, pieces, piece, (state.tokens, state.decoded_at))
        return dataclasses.replace(state, tokens=tokens, decoded_at=decoded_at)

    def _leaving(
        self, denoiser: DenoiserLike, state: BlockState, view: BlockView, outcome: Outcome
    ) -> tuple[jax.Array, jax.Array | None]:
        """[B] bool, the rows that leave their block after this forward, and the new `repeats`."""
        masks = self._count(self._block_masks(denoiser, state), state)
        leaving = outcome.ran & self.rule.block_done(view, masks > 0)
        if state.repeats is None:
            return leaving, None
        repeats = state.repeats - (outcome.ran & ~outcome.updated)
        leaving &= repeats == 0
        return leaving, jnp.where(repeats == 0, self._iterations(masks), repeats)

    def _count(self, masks: jax.Array, state: BlockState) -> jax.Array:
        """[B], how many masks there are; with "lockstep" those of all rows together."""
        count = masks.sum(axis=1, dtype=jnp.int32)
        if "lockstep" in self.compat:
            return jnp.broadcast_to(jnp.where(state.done, 0, count).sum(dtype=jnp.int32), count.shape)
        return count

    def _iterations(self, masks: jax.Array) -> jax.Array:
        """[B], iterations until the next look at a block with so many masks."""
        most, per_iteration = self.unroll or (1, 1)
        return jnp.clip(masks // per_iteration, 1, most)

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
        generated = self._generated(denoiser, state)
        masked = generated == denoiser.mask_id
        one_by_one = "every-block" in self.compat
        complete = state.block + 1 >= self._num_blocks(state) if one_by_one else ~masked.any(axis=1)
        done = state.done | (leaving & complete)
        stop, ended = stopping.ended(self.stop, state.stop, generated, state.gen_lengths, denoiser.mask_id)
        done |= ended & leaving if "stop-after-block" in self.compat else ended
        entering = leaving & ~done
        next_mask = self._prompt_part(state) + jnp.argmax(masked, axis=1).astype(jnp.int32)
        block = jnp.where(entering, state.block + 1 if one_by_one else next_mask // self.width, state.block)
        state = dataclasses.replace(state, block=block, done=done, stop=stop)
        masks = self._block_masks(denoiser, state)
        repeats = state.repeats
        if repeats is not None:
            repeats = jnp.where(entering, self._iterations(self._count(masks, state)), repeats)
        return dataclasses.replace(
            state,
            block_step=jnp.where(entering, 0, state.block_step),
            block_masks=jnp.where(entering, masks.sum(axis=1, dtype=jnp.int32), state.block_masks),
            repeats=repeats,
        )


class Canvas(Protocol):
    """What the states of samplers have in common; see `BlockState`."""

    @property
    def tokens(self) -> jax.Array: ...
    @property
    def canvas_start(self) -> jax.Array: ...
    @property
    def gen_lengths(self) -> jax.Array: ...
    @property
    def decoded_at(self) -> jax.Array: ...
    @property
    def nfe(self) -> jax.Array: ...
    @property
    def full_forwards(self) -> jax.Array: ...
    @property
    def cache_updates(self) -> jax.Array: ...
    @property
    def stop(self) -> StopState | None: ...


def check_sampling(sampling: Any) -> None:
    """Raises DllmError for numbers that make no sense."""
    if isinstance(sampling, Sampling):
        check_number("temperature", sampling.temperature, 0.0)
        check_number("top_p", sampling.top_p, 0.0, 1.0)
        check_whole("top_k", sampling.top_k, 1)


def check_rule(rule: Any, sampling: Any) -> None:
    """Raises DllmError for things that are no rule and no sampling."""
    if not isinstance(rule, Rule):
        raise DllmError(f"rule is {rule!r}; give a rule object, such as Threshold()")
    check_is_sampling(sampling)


def check_is_sampling(sampling: Any) -> None:
    """Raises DllmError for something else."""
    if not isinstance(sampling, Sampling):
        raise DllmError(f"sampling is {sampling!r}; give a Sampling")


def laid_out(
    denoiser: DenoiserLike,
    prompt: jax.Array,
    prompt_lengths: jax.Array,
    given: jax.Array | None,
    end: jax.Array,
    length: int,
) -> jax.Array:
    """The tokens [B, length] of a start: each row its prompt, masks or what is `given` [B, G] up to `end` [B], and
    end-of-sequence tokens behind."""
    tokens = jnp.pad(prompt, ((0, 0), (0, length - prompt.shape[1])))
    position = jnp.arange(length)
    tokens = jnp.where(position >= prompt_lengths[:, None], denoiser.mask_id, tokens)
    if given is not None:
        tokens = write_rows(tokens, given, prompt_lengths)
    return jnp.where(position >= end[:, None], denoiser.eos_id, tokens)


def generation(denoiser: DenoiserLike, state: Canvas, gen_length: int) -> jax.Array:
    """The generation's tokens, [B, G]; what lies behind a row's own length reads as the end of the sequence."""
    tokens = slice_rows(state.tokens, state.canvas_start, gen_length)
    return jnp.where(jnp.arange(gen_length) < state.gen_lengths[:, None], tokens, denoiser.eos_id)


def predicted(
    denoiser: DenoiserLike, rule: Rule, sampling: Sampling, logits: jax.Array, view: BlockView
) -> Predictions:
    """What a rule gets to see of the logits [B, W, V] of a block."""
    uniform = None if sampling.temperature is None else view.draw(Purpose.TOKENS, denoiser.vocab_size)
    return predict(logits, sampling, mask_id=denoiser.mask_id, score_from=rule.score_from, uniform=uniform)


def sure_of(
    denoiser: DenoiserLike, rule: Rule, sampling: Sampling, hidden: jax.Array, logits: jax.Array, masked: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of some masked positions [B, W] those that a rule is sure of by hidden states [B, W, D] and their logits
    [B, W, V], and the best token everywhere, [B, W]."""
    plain = Sampling(suppress=sampling.suppress, defer=sampling.defer)
    best = predict(logits, plain, mask_id=denoiser.mask_id, score_from="raw", uniform=None)
    sure = rule.sure(denoiser, hidden, logits, best) & masked & ~best.mask_wins
    if plain.defer is not None:
        sure &= ~jnp.isin(best.token, plain.defer)
    return sure, best.token


def result_of(denoiser: DenoiserLike, state: Canvas, generated: jax.Array) -> Result:
    """The result of a state whose generation [B, G] may hold masks."""
    generated = jnp.where(generated == denoiser.mask_id, denoiser.eos_id, generated)
    ends = generated == denoiser.eos_id
    lengths = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1), generated.shape[1]).astype(jnp.int32)
    if state.stop is not None:
        lengths = jnp.minimum(lengths, state.stop.length)
    return Result(generated, lengths, state.decoded_at, state.nfe, state.full_forwards, state.cache_updates)


def _on_canvas(select: jax.Array, positions: jax.Array, gen_length: int) -> jax.Array:
    """A choice [B, W] among consecutive positions, which may begin in the prompt, as one among the canvas, [B, G]."""
    place = jnp.arange(gen_length) - positions[:, :1]
    inside = (place >= 0) & (place < select.shape[1])
    return inside & jnp.take_along_axis(select, jnp.clip(place, 0, select.shape[1] - 1), axis=1)


def _like(rows: jax.Array, leaf: jax.Array) -> jax.Array:
    return rows.reshape(rows.shape + (1,) * (leaf.ndim - 1))
