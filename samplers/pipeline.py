"""The pipeline sampler: several blocks are decoded at once under block-causal attention, with an exact cache.

Discrete diffusion forcing (D2F, arXiv 2508.09192, section 4.3) for models that were trained so (`train.d2f`). A row's
blocks form a pipeline: the next one is appended as soon as enough of the last is decoded, and while the block before
it is not nearly complete it commits only what the model is sure of. Because no position sees a later block, the keys
and values of a complete block are final: they are computed once with its final tokens, along with the forward of the
blocks behind it, and never again.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.errors import DllmError
from dllm_jax.kv_cache import KVCache, LayerKV, slice_rows, write_rows
from dllm_jax.pytree import pytree, vary_like
from samplers import stopping
from samplers.block import check_rule, check_sampling, generation, laid_out, result_of, sure_of
from samplers.caches import DenoiserLike
from samplers.caches.base import switch_in_place
from samplers.caches.prefix import window_widths
from samplers.checks import check_choice, check_length, check_number
from samplers.engine import Result
from samplers.inputs import checked
from samplers.noise import Noise, source_of
from samplers.pipeline_denoiser import BlockCausalDenoiser, block_causal
from samplers.predictions import Predictions, Sampling, predicted
from samplers.rules.base import PROXIES, BlockView, Number, Proxy, Rule, error_of, per_row, rank
from samplers.stopping import Stop, StopState

Carry = tuple[KVCache, Any]
"""What a forward changes in place: the buffers, and the rule's state."""


@pytree()
class PipelineState:
    """Everything a step reads and writes; every leaf but the buffers' starts with the batch axis. N is the number of
    blocks of the longest generation, L their length.

    Attributes:
        tokens: [B, S] int32: each row its prompt, at once followed by its canvas, then padding; S = P + N L.
        canvas_start, gen_lengths, decoded_at, nfe, full_forwards, cache_updates, done: as in `BlockState`.
        appended_at: [B, N] int32, the row's forward before which the block joined the pipeline; -1 before that.
        cached: [B] int32, complete blocks whose keys and values are final in the buffers; those of the prompt are from
            the first forward on.
        rule: state of the rule for every block, leaves [B, N, ...].
        kv: key/value buffers of S positions.
        stop: state of the stop condition.
        noise: source of random numbers, None where nothing is drawn.
    """

    tokens: jax.Array
    canvas_start: jax.Array
    gen_lengths: jax.Array
    decoded_at: jax.Array
    appended_at: jax.Array
    cached: jax.Array
    nfe: jax.Array
    full_forwards: jax.Array
    cache_updates: jax.Array
    done: jax.Array
    rule: Any
    kv: KVCache
    stop: StopState | None
    noise: Noise | None


class Blocks(NamedTuple):
    """What is read off a state about each row's blocks.

    Attributes:
        masked: [B, N, L] bool.
        ratio: [B, N] float32, share of the block's positions that hold tokens.
        appended: [B] int32, blocks in the pipeline, complete ones included.
        complete: [B] int32, those before the first that has masks.
        total: [B] int32, blocks of the row's generation.
        ended: [B] bool, whether an end token was committed.
    """

    masked: jax.Array
    ratio: jax.Array
    appended: jax.Array
    complete: jax.Array
    total: jax.Array
    ended: jax.Array


@pytree()
class _Sure(Rule):
    """D2F's own rule: everything above the threshold, which may be nothing."""

    threshold: Number

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        return view.masked & (predictions.confidence > per_row(self.threshold)), state


@pytree(static=("gen_length", "block_length", "in_flight", "forced"))
class PipelineSampler:
    """D2F's pipelined block decoding; every unmasking rule may decide inside the blocks.

    Before each forward a row appends at most one block: if no end token was committed yet and at least `tau_add` of its
    last block is decoded (the prompt counts as complete). A block is fully active while at least `tau_act` of the block
    before it is decoded: there the rule decides, and if it chooses nothing the surest position is committed. In other
    blocks a position must also be surer than `threshold`. The first block that has masks is always fully active, so
    every forward that sees masks commits.

    A rule that reads hidden states (`NI`) is asked once per forward, for all blocks in the pipeline: what it is sure of
    is committed in blocks that are not fully active as well, where its word counts as much as `threshold`. Keys and
    values of unfinished blocks are not kept, so nothing written ahead is stale, and it looks ahead by default; one that
    does not (`scope="block"`) is asked for the fully active blocks alone.

    A row ends when all its appended blocks are complete and none may follow. Positions of blocks that were never
    appended read as the end of the sequence.

    In `Result`, a full forward is a row's first, which covers prompt and first block; a cache update is a forward that
    made keys and values final (the prompt's or those of complete blocks).

    Attributes:
        gen_length: G, positions to generate.
        block_length: L; the last block may be shorter (the official code leaves it out, which is `gen_lengths` rounded
            down to a multiple of L).
        tau_add: decoded share of the last block at which the next is appended.
        tau_act: decoded share of a block at which the next is fully active.
        threshold: tau_conf; a confidence must be above it in blocks that are not fully active.
        rule: what is committed in fully active blocks; None is D2F's own, all that is surer than `threshold`.
        forced: what orders the positions when the rule chooses none: the official code's "default", "neg_entropy" and
            "margin_confidence".
        in_flight: most blocks from the first whose keys and values are not final on; a row at the bound appends no
            block before one is cached, and may spend a forward on caching alone, which the unbounded official pipeline
            does not. None is no bound.
        end_ids: [n] int32, tokens after which a row appends no more blocks; None is the end-of-sequence token.
        sampling: how tokens are drawn; greedy by default.
        stop: when a row ends although blocks in the pipeline have masks; None completes them all, as D2F does.
    """

    gen_length: int
    block_length: int = 32
    tau_add: Number = 0.1
    tau_act: Number = 0.95
    threshold: Number = 0.9
    rule: Rule | None = None
    forced: Proxy = "confidence"
    in_flight: int | None = None
    end_ids: jax.Array | None = None
    sampling: Sampling = Sampling()
    stop: Stop | None = None

    def __post_init__(self) -> None:
        check_length("gen_length", self.gen_length)
        check_length("block_length", self.block_length)
        check_length("in_flight", self.in_flight, optional=True)
        if self.block_length > self.gen_length:
            raise DllmError(f"block_length {self.block_length} must be between 1 and gen_length {self.gen_length}")
        check_number("tau_add", self.tau_add, 0.0, 1.0)
        check_number("tau_act", self.tau_act, 0.0, 1.0)
        check_number("threshold", self.threshold, 0.0)
        check_choice("forced", self.forced, PROXIES)
        if isinstance(self.rule, Rule):
            self.rule.check(self.gen_length, self.num_blocks)
        check_sampling(self.sampling)

    canvas_length = None  # nothing lies behind the generation

    @property
    def width(self) -> int:
        """Length of a block."""
        return self.block_length

    @property
    def num_blocks(self) -> int:
        """N, blocks of a generation."""
        return -(-self.gen_length // self.block_length)

    @property
    def most_in_flight(self) -> int:
        """Blocks of the widest window."""
        return min(self.in_flight or self.num_blocks, self.num_blocks)

    @property
    def _rule(self) -> Rule:
        return _Sure(self.threshold) if self.rule is None else self.rule

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
    ) -> PipelineState:
        """The state before the first forward; arguments and errors are those of `BlockSampler.init`."""
        check_rule(self._rule, self.sampling)
        prompt, prompt_lengths, gen_lengths, given = checked(
            denoiser, prompt, prompt_lengths, gen_lengths, given, self.gen_length
        )
        block_causal(denoiser, prompt_lengths, self.block_length)  # is it possible?
        batch, width = prompt.shape
        noise = source_of(noise, key, batch)
        length = width + self.num_blocks * self.block_length
        zeros = jnp.zeros((batch,), jnp.int32)
        rule = self._rule.init(batch, self.block_length, denoiser.vocab_size)
        state = PipelineState(
            tokens=laid_out(denoiser, prompt, prompt_lengths, given, prompt_lengths + gen_lengths, length),
            canvas_start=prompt_lengths,
            gen_lengths=gen_lengths,
            decoded_at=jnp.full((batch, self.gen_length), -1, jnp.int32),
            appended_at=jnp.full((batch, self.num_blocks), -1, jnp.int32),
            cached=zeros,
            nfe=zeros,
            full_forwards=zeros,
            cache_updates=zeros,
            done=jnp.zeros((batch,), bool),
            rule=jax.tree.map(lambda x: jnp.repeat(x[:, None], self.num_blocks, axis=1), rule),
            kv=denoiser.empty_cache(batch, length),
            stop=None if self.stop is None else stopping.begin(self.stop, batch),
            noise=noise,
        )
        return self._ended(denoiser, vary_like(prompt, state))

    def step(self, denoiser: DenoiserLike, state: PipelineState) -> PipelineState:
        """Appends blocks, runs one forward over every row's window, and commits."""
        state = self._append(denoiser, state)
        blocks = self._blocks(denoiser, state)
        ran = ~state.done
        written, (kv, rule) = self._forward(denoiser, state, blocks)
        select = (written >= 0) & ran[:, None]
        kept = slice_rows(state.tokens, state.canvas_start, written.shape[1])
        tokens = write_rows(state.tokens, jnp.where(select, written, kept), state.canvas_start)
        first = state.nfe == 0
        state = dataclasses.replace(
            state,
            tokens=tokens,
            decoded_at=jnp.where(select[:, : self.gen_length], state.nfe[:, None], state.decoded_at),
            cached=jnp.where(ran, blocks.complete, state.cached),
            nfe=state.nfe + ran,
            full_forwards=state.full_forwards + (ran & first),
            cache_updates=state.cache_updates + (ran & (first | (blocks.complete > state.cached))),
            rule=rule,
            kv=kv,
        )
        return self._ended(denoiser, state)

    def is_done(self, state: PipelineState) -> jax.Array:
        """[B] bool: rows whose generation has ended."""
        return state.done

    def result(self, denoiser: DenoiserLike, state: PipelineState) -> Result:
        """The generation so far."""
        return result_of(denoiser, state, generation(denoiser, state, self.gen_length))

    def _blocks(self, denoiser: DenoiserLike, state: PipelineState) -> Blocks:
        count, length = self.num_blocks, self.block_length
        tokens = slice_rows(state.tokens, state.canvas_start, count * length)
        masked = (tokens == denoiser.mask_id).reshape(-1, count, length)
        left = masked.sum(axis=-1, dtype=jnp.int32)
        size = jnp.clip(state.gen_lengths[:, None] - jnp.arange(count) * length, 0, length)
        appended = jnp.sum(state.appended_at >= 0, axis=1, dtype=jnp.int32)
        whole = (left == 0) & (jnp.arange(count) < appended[:, None])
        ends = jnp.asarray([denoiser.eos_id]) if self.end_ids is None else self.end_ids
        return Blocks(
            masked=masked,
            ratio=(size - left) / jnp.maximum(size, 1),
            appended=appended,
            complete=jnp.cumprod(whole, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32),
            total=-(-state.gen_lengths // length),
            ended=jnp.any((state.decoded_at >= 0) & jnp.isin(tokens[:, : self.gen_length], ends), axis=1),
        )

    def _append(self, denoiser: DenoiserLike, state: PipelineState) -> PipelineState:
        """Rows whose last block is decoded far enough append the next."""
        blocks = self._blocks(denoiser, state)
        last = jnp.take_along_axis(_after_prompt(blocks.ratio), blocks.appended[:, None], axis=1)[:, 0]
        room = (blocks.appended < blocks.total) & (blocks.appended - state.cached < self.most_in_flight)
        grows = ~state.done & ~blocks.ended & room & (last >= jnp.asarray(self.tau_add))
        new = grows[:, None] & (jnp.arange(self.num_blocks) == blocks.appended[:, None])
        return dataclasses.replace(state, appended_at=jnp.where(new, state.nfe[:, None], state.appended_at))

    def _forward(self, denoiser: DenoiserLike, state: PipelineState, blocks: Blocks) -> tuple[jax.Array, Carry]:
        """Runs the smallest window that holds every row's blocks in flight: tokens to write [B, N L] (-1 where none),
        the buffers and the rule's state.

        The first forward runs the prompts and the first block instead.
        """
        causal = block_causal(denoiser, state.canvas_start, self.block_length)
        needed = jnp.max(jnp.where(state.done, 0, blocks.appended - state.cached))
        widths = window_widths(self.most_in_flight, 1)
        choice = sum((needed > width).astype(jnp.int32) for width in widths[:-1]) + 1
        opening = jnp.any(~state.done & (state.nfe == 0))
        opened = functools.partial(self._open, causal, state, blocks)
        branches = [opened, *(functools.partial(self._window, causal, state, blocks, width) for width in widths)]
        index = jnp.where(opening, 0, choice)
        return switch_in_place(index, cast(Any, branches), cast(Any, (state.kv, state.rule)))  # type: ignore[return-value]

    def _open(
        self, causal: BlockCausalDenoiser, state: PipelineState, blocks: Blocks, carry: Carry
    ) -> tuple[jax.Array, Carry]:
        """A forward over the prompts and the first block."""
        width = state.tokens.shape[1] - (self.num_blocks - 1) * self.block_length
        lengths = state.canvas_start + jnp.minimum(state.gen_lengths, self.block_length)
        hidden, new = causal.full(state.tokens[:, :width], lengths, state.canvas_start, self.block_length)
        first = jnp.zeros_like(state.cached)
        written, rule = self._decide(causal, state, blocks, hidden, first, carry[1])
        put = lambda buffer, x: lax.dynamic_update_slice_in_dim(buffer, x.astype(buffer.dtype), 0, axis=1)
        return written, (tuple(LayerKV(*map(put, old, layer)) for old, layer in zip(carry[0], new, strict=True)), rule)

    def _window(
        self, causal: BlockCausalDenoiser, state: PipelineState, blocks: Blocks, count: int, carry: Carry
    ) -> tuple[jax.Array, Carry]:
        """A forward over `count` blocks from the first on whose keys and values are not final."""
        first = jnp.minimum(state.cached, self.num_blocks - count)
        width = count * self.block_length
        place = first[:, None] * self.block_length + jnp.arange(width)
        fresh = place >= state.cached[:, None] * self.block_length
        feed = (state.canvas_start + first * self.block_length, width)
        lengths = state.canvas_start + state.gen_lengths
        hidden, kv = causal.window(state.tokens, lengths, carry[0], feed, fresh=fresh)
        written, rule = self._decide(causal, state, blocks, hidden, first, carry[1])
        return written, (kv, rule)

    def _decide(
        self,
        denoiser: DenoiserLike,
        state: PipelineState,
        blocks: Blocks,
        hidden: jax.Array,
        first: jax.Array,
        rule_state: Any,
    ) -> tuple[jax.Array, Any]:
        """What the hidden states [B, n L, D] of n blocks from block `first` [B] on commit, as tokens [B, N L], -1 where
        nothing is written, and the rule's new state."""
        batch, length = first.shape[0], self.block_length
        count = hidden.shape[1] // length
        of_window = lambda x: slice_rows(x, first, count)
        by_block = lambda x: x.reshape(batch, count, length, *x.shape[2:])
        live = (jnp.arange(self.num_blocks) < blocks.appended[:, None])[..., None]
        before = _after_prompt(blocks.ratio)[:, :-1]
        decoded = jnp.pad(state.decoded_at >= 0, ((0, 0), (0, self.num_blocks * length - self.gen_length)))
        entered = blocks.masked.sum(-1, dtype=jnp.int32) + decoded.reshape(batch, -1, length).sum(-1, dtype=jnp.int32)
        masked, full = of_window(blocks.masked & live), of_window(before) >= jnp.asarray(self.tau_act)[..., None]
        logits = denoiser.logits(hidden) if self._rule.reads_hidden else None
        decide = lambda *parts: self._decide_block(denoiser, state, blocks.total, count, *parts)
        token, new = jax.vmap(decide, in_axes=1, out_axes=1)(
            by_block(hidden),
            jax.tree.map(by_block, logits),
            first[:, None] + jnp.arange(count),
            masked,
            full,
            of_window(state.nfe[:, None] - state.appended_at),
            of_window(entered),
            jax.tree.map(of_window, rule_state),
            jax.tree.map(by_block, self._sure(denoiser, hidden, logits, masked, full)),
        )
        rows = of_window(live[..., 0]) & ~state.done[:, None]
        keep = lambda old, new: write_rows(old, new, first, rows)
        nothing = vary_like(token, jnp.full((batch, self.num_blocks * length), -1, jnp.int32))
        written = write_rows(nothing, token.reshape(batch, -1), first * length)
        return written, jax.tree.map(keep, rule_state, new)

    def _sure(
        self, denoiser: DenoiserLike, hidden: jax.Array, logits: jax.Array | None, masked: jax.Array, full: jax.Array
    ) -> tuple[jax.Array, jax.Array] | None:
        """Which masked positions [B, n, L] of n blocks the rule is sure of by their hidden states [B, n L, D], and the
        best tokens, both [B, n L]; None for a rule that reads none."""
        if logits is None:
            return None
        asked = masked if self._rule.looks_ahead(cached=False) else masked & full[..., None]
        return sure_of(denoiser, self._rule, self.sampling, hidden, logits, asked.reshape(logits.shape[:2]))

    def _decide_block(
        self,
        denoiser: DenoiserLike,
        state: PipelineState,
        total: jax.Array,
        count: int,
        hidden: jax.Array,
        logits: jax.Array | None,
        block: jax.Array,
        masked: jax.Array,
        full: jax.Array,
        step: jax.Array,
        entered: jax.Array,
        rule_state: Any,
        read: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, Any]:
        """One block of every row, block [B], of `count` beside each other: the tokens that are committed [B, L], -1
        elsewhere."""
        positions = block[:, None] * self.block_length + jnp.arange(self.block_length, dtype=jnp.int32)
        view = BlockView(
            masked=masked,
            positions=positions,
            first=positions[:, 0],
            step=step,
            block_masks=entered,
            num_blocks=total,
            noise=state.noise,
            nfe=state.nfe,
        )
        predictions, rule_state = predicted(
            denoiser, self._rule, self.sampling, hidden, view, rule_state, logits=logits, beside=count
        )
        chosen, rule_state = self._rule.decide(predictions, view, rule_state)
        score = predictions.confidence if self.forced == "confidence" else -error_of(predictions, self.forced)
        known, best = (chosen & False, predictions.token) if read is None else read
        surest = masked & (rank(score, masked) == 0) & ~chosen.any(axis=1, keepdims=True)
        sure = chosen & (predictions.confidence > per_row(self.threshold))
        select = jnp.where(full[:, None], chosen | surest, sure)
        return jnp.where(known, best, jnp.where(select, predictions.token, -1)), rule_state

    def _ended(self, denoiser: DenoiserLike, state: PipelineState) -> PipelineState:
        """Which rows have ended."""
        blocks = self._blocks(denoiser, state)
        nothing_left = ~jnp.any(blocks.masked, axis=(1, 2))
        generated = generation(denoiser, state, self.gen_length)
        stop, ended = stopping.ended(self.stop, state.stop, generated, state.gen_lengths, denoiser.mask_id)
        done = state.done | nothing_left | (blocks.ended & (blocks.complete == blocks.appended)) | ended
        return dataclasses.replace(state, done=done, stop=stop)


def _after_prompt(ratio: jax.Array) -> jax.Array:
    """Shares of the prompt, which is complete, and of the blocks behind it: [B, N] -> [B, N + 1]."""
    return jnp.concatenate([jnp.ones_like(ratio[:, :1]), ratio], axis=1)
