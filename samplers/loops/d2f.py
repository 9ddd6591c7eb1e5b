"""The pipeline sampler: several blocks are decoded at once under block-causal attention, with an exact cache.

Discrete diffusion forcing (D2F, arXiv 2508.09192, section 4.3) for models that were trained so
(`train.objectives.d2f`), block diffusion models among them. A row's blocks form a pipeline: the next one is appended as
soon as enough of the last is decoded, and while the block before it is not nearly complete it commits only what the
model is sure of. Because no position sees a later block, the keys and values of a complete block are final: they are
computed once with its final tokens, along with the forward of the blocks after it, and never again.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike, Span, block_causal, block_length_of
from dllm_jax.models.kv_cache import slice_rows, write_rows
from dllm_jax.pytree import pytree, vary_like
from samplers import canvas as canvases
from samplers.canvas import Canvas
from samplers.checks import check_choice, check_length, check_number, check_threshold
from samplers.loops.block import check_alignment, check_rule, check_sampling
from samplers.rowwise import each_row, run_if
from samplers.rules.base import PROXIES, BlockView, Number, Proxy, Rule, error_of, judged, per_row, predicted, rank
from samplers.sampler import Result
from samplers.stopping import Stop
from samplers.tokens.noise import Noise
from samplers.tokens.predictions import Predictions, Sampling


@pytree()
class PipelineState:
    """Everything a step reads and writes; every leaf but the buffers' starts with the batch axis. N is the number of
    blocks of the longest generation, L their length.

    Attributes:
        canvas: tokens, what is undecided, counters; S = P + N L.
        appended_at: [B, N] int32, the row's forward before which the block joined the pipeline; -1 before that.
        cached: [B] int32, complete blocks whose keys and values are final in the buffers; those of the prompt are from
            the first forward on.
        rule: state of the rule for every block, leaves [B, N, ...].
        kv: key/value buffers of S positions.
    """

    canvas: Canvas
    appended_at: jax.Array
    cached: jax.Array
    rule: Any
    kv: Any


class Blocks(NamedTuple):
    """What is read off a state about each row's blocks.

    Attributes:
        undecided: [B, N, L] bool.
        ratio: [B, N] float32, share of the block's positions that hold tokens.
        appended: [B] int32, blocks in the pipeline, complete ones included.
        complete: [B] int32, those before the first that has undecided positions.
        total: [B] int32, blocks of the row's generation.
        ended: [B] bool, whether an end token was committed.
    """

    undecided: jax.Array
    ratio: jax.Array
    appended: jax.Array
    complete: jax.Array
    total: jax.Array
    ended: jax.Array


@pytree(static=("length",))
class Opening:
    """What a row's first forward reads, leaves [B, ...]: tokens of the prompts and the first block, how many of them a
    position sees, and where the block begins. `length` is that of the block."""

    tokens: jax.Array
    visible: jax.Array
    start: jax.Array
    length: int


@pytree()
class _Sure(Rule):
    """D2F's own rule: everything above the threshold, which may be nothing."""

    threshold: Number

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        return view.undecided & (predictions.confidence > per_row(self.threshold)), state


@pytree(static=("gen_length", "block_length", "align_blocks", "in_flight", "forced"))
class PipelineSampler:
    """D2F's pipelined block decoding; every unmasking rule may decide inside the blocks.

    Before each forward a row appends at most one block: if no end token was committed yet and at least `tau_add` of its
    last block is decoded (the prompt counts as complete). A block is fully active while at least `tau_act` of the block
    before it is decoded: there the rule decides, and if it chooses nothing the most confident position is committed. In
    other blocks a position's confidence must also exceed `threshold`. The first block that has masks is always fully
    active, so every forward that sees masks commits.

    A rule that reads hidden states (`NI`) is evaluated once per forward, for all blocks in the pipeline: what it judges
    final is committed in blocks that are not fully active as well, with the same effect as `threshold`. Keys and values
    of unfinished blocks are not kept, so nothing written ahead is stale, and it looks ahead by default; one that does
    not (`scope="block"`) is evaluated for the fully active blocks alone.

    A row ends when all its appended blocks are complete and none may follow. Positions of blocks that were never
    appended read as the end of the sequence.

    In `Result`, a full forward is a row's first, which covers prompt and first block; a cache update is a forward that
    made keys and values final (the prompt's or those of complete blocks).

    Attributes:
        gen_length: G, positions to generate. Default: 256, enough for a reasoned answer.
        block_length: L; the last block may be shorter (the official code leaves it out, which is `gen_lengths` rounded
            down to a multiple of L). Default: D2F's; take the one that the student was trained with.
        align_blocks: blocks begin at multiples of L counted from the prompt's start, and not at its end, so that
            a row's first may begin within its prompt, as a block diffusion model's do. Default: off, as in D2F.
        tau_add: decoded share of the last block at which the next is appended. Default: D2F's for most tasks.
        tau_act: decoded share of a block at which the next is fully active. Default: D2F's.
        threshold: tau_conf; a confidence must be above it in blocks that are not fully active. Default: D2F's.
        rule: what is committed in fully active blocks; None is D2F's own, all above `threshold`. Default:
            none, as published.
        forced: what orders the positions when the rule chooses none: the official code's "default", "neg_entropy" and
            "margin_confidence". Default: the official code's.
        in_flight: most blocks from the first whose keys and values are not final on; a row at the bound appends no
            block before one is cached, and may spend a forward on caching alone, which the unbounded official pipeline
            does not. None is no bound. Default: none, as published.
        end_ids: [n] int32, tokens that end a row, after which it appends no block; its answer ends before it.
            None is the end-of-sequence token.
        sampling: how tokens are drawn; greedy by default.
        stop: when a row ends although blocks in the pipeline have masks; None completes them all, as D2F does. Default:
            none, as D2F; a row still appends nothing after an end token.
    """

    gen_length: int
    block_length: int = 32
    align_blocks: bool = False
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
        check_threshold("threshold", self.threshold)
        check_choice("forced", self.forced, PROXIES)
        if isinstance(self.rule, Rule):
            self.rule.check(self.gen_length, None if self.align_blocks else self.num_blocks)
        check_sampling(self.sampling)

    canvas_length = None  # nothing follows the generation

    @property
    def width(self) -> int:
        """Length of a block."""
        return self.block_length

    @property
    def num_blocks(self) -> int:
        """N, blocks of a generation, the most where they are aligned."""
        before = self.block_length - 1 if self.align_blocks else 0
        return -(-(before + self.gen_length) // self.block_length)

    def forwards(self, prompt_length: int) -> tuple[int, int]:
        """Fewest and most forwards of a row after a prompt of this length, if no end token ends it before: one appends
        a block at most, and commits a position at least, but for those of a row at the bound of its blocks in
        flight."""
        before = prompt_length % self.block_length if self.align_blocks else 0
        blocks = -(-(before + self.gen_length) // self.block_length)
        return blocks, self.gen_length + (0 if self.in_flight is None else blocks)

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
        if self._rule.revises:
            raise DllmError("a rule that revises what is written cannot decide in a pipeline; use BlockSampler")
        config = getattr(denoiser, "config", None)
        if config is not None and config.is_causal:
            raise DllmError(f"a {config.family} model has causal attention; give a diffusion model")
        if config is not None and config.has_causal_context:
            raise DllmError(f"a {config.family} model was not trained to draft several blocks at once; name a rule")
        check_alignment(denoiser, self.align_blocks)
        canvas = canvases.begin(
            denoiser,
            prompt,
            prompt_lengths,
            gen_length=self.gen_length,
            length=self.num_blocks * self.block_length,
            key=key,
            gen_lengths=gen_lengths,
            given=given,
            noise=noise,
            stop=self.stop,
        )
        batch, length = canvas.tokens.shape
        rule = self._rule.init(batch, self.block_length, denoiser.vocab_size)
        state = PipelineState(
            canvas=canvas,
            appended_at=jnp.full((batch, self.num_blocks), -1, jnp.int32),
            cached=jnp.zeros((batch,), jnp.int32),
            rule=jax.tree.map(lambda x: jnp.repeat(x[:, None], self.num_blocks, axis=1), rule),
            kv=denoiser.empty_cache(batch, length),
        )
        return self._ended(denoiser, vary_like(prompt, state))

    def step(self, denoiser: DenoiserLike, state: PipelineState) -> PipelineState:
        """Appends blocks, runs one forward over every row's window, and commits."""
        state = self._append(denoiser, state)
        canvas, blocks = state.canvas, self._blocks(denoiser, state)
        ran, opening, start = ~canvas.done, self._opening(denoiser, state), self._start(canvas)
        found, kv = self._forward(denoiser, state, blocks)
        tokens = jnp.where(found.token >= 0, found.token, slice_rows(canvas.tokens, start, self._length))
        undecided = canvas.of_window(canvas.undecided, start, self._length) & (found.token < 0)
        canvas = canvas.write(start, tokens, found.logprob, undecided, ran)
        updated = opening | (blocks.complete > state.cached)
        state = dataclasses.replace(
            state,
            canvas=canvas.counted(ran, opening, updated, found.finite),
            cached=jnp.where(ran, blocks.complete, state.cached),
            rule=found.rule,
            kv=kv,
        )
        return self._ended(denoiser, state)

    def is_done(self, state: PipelineState) -> jax.Array:
        """[B] bool: rows whose generation has ended."""
        return state.canvas.done

    def result(self, denoiser: DenoiserLike, state: PipelineState) -> Result:
        """The generation so far."""
        return state.canvas.result(denoiser.eos_id, self.end_ids)

    def pending(self, state: PipelineState) -> jax.Array:
        """[B, G] bool, positions that may still change: the undecided ones."""
        return state.canvas.undecided

    def visible(self, denoiser: DenoiserLike, canvas: Canvas) -> jax.Array:
        """[B, S] int32, how many positions each sees; to a block diffusion model the prompt is blocks as well."""
        start = self._start(canvas)
        begin = start if block_length_of(denoiser) is None else jnp.zeros_like(start)
        visible = block_causal(canvas.tokens.shape[1], begin, self.block_length)
        return jnp.minimum(visible, (canvas.prompt_lengths + canvas.gen_lengths)[:, None])

    @property
    def _length(self) -> int:
        """Positions of all blocks, N L."""
        return self.num_blocks * self.block_length

    def _prompt_part(self, canvas: Canvas) -> jax.Array:
        """[B] int32, positions of the prompt that belong to a row's first block."""
        return canvas.prompt_part(self.block_length if self.align_blocks else 1)

    def _start(self, canvas: Canvas) -> jax.Array:
        """[B] int32, where a row's first block begins."""
        return canvas.prompt_lengths - self._prompt_part(canvas)

    def _alone(self, denoiser: DenoiserLike, state: PipelineState) -> jax.Array:
        """[B] bool, rows whose first block holds a position that is never predicted, and so not refreshed by a window:
        until its keys and values are final it is run whole, and alone."""
        return (self._start(state.canvas) < denoiser.min_prompt_length) & (state.cached == 0)

    def _opening(self, denoiser: DenoiserLike, state: PipelineState) -> jax.Array:
        """[B] bool, rows whose next forward is over prompt and first block."""
        return ~state.canvas.done & ((state.canvas.nfe == 0) | self._alone(denoiser, state))

    def _blocks(self, denoiser: DenoiserLike, state: PipelineState) -> Blocks:
        count, length, canvas = self.num_blocks, self.block_length, state.canvas
        undecided = canvas.of_window(canvas.undecided, self._start(canvas), self._length).reshape(-1, count, length)
        left, before = undecided.sum(axis=-1, dtype=jnp.int32), self._prompt_part(canvas)
        ends = jnp.minimum(jnp.arange(1, count + 1) * length - before[:, None], canvas.gen_lengths[:, None])
        size = jnp.maximum(ends - jnp.maximum(jnp.arange(count) * length - before[:, None], 0), 0)
        appended = jnp.sum(state.appended_at >= 0, axis=1, dtype=jnp.int32)
        whole = (left == 0) & (jnp.arange(count) < appended[:, None])
        end_ids = jnp.asarray([denoiser.eos_id]) if self.end_ids is None else self.end_ids
        return Blocks(
            undecided=undecided,
            ratio=(size - left) / jnp.maximum(size, 1),
            appended=appended,
            complete=jnp.cumprod(whole, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32),
            total=-(-(before + canvas.gen_lengths) // length),
            ended=jnp.any((canvas.decoded_at >= 0) & jnp.isin(canvas.generation(denoiser.eos_id), end_ids), axis=1),
        )

    def _append(self, denoiser: DenoiserLike, state: PipelineState) -> PipelineState:
        """Rows whose last block is decoded far enough append the next."""
        blocks = self._blocks(denoiser, state)
        last = jnp.take_along_axis(_after_prompt(blocks.ratio), blocks.appended[:, None], axis=1)[:, 0]
        most = jnp.where(self._alone(denoiser, state), 1, self.most_in_flight)
        space = (blocks.appended < blocks.total) & (blocks.appended - state.cached < most)
        grows = ~state.canvas.done & ~blocks.ended & space & (last >= jnp.asarray(self.tau_add))
        new = grows[:, None] & (jnp.arange(self.num_blocks) == blocks.appended[:, None])
        return dataclasses.replace(state, appended_at=jnp.where(new, state.canvas.nfe[:, None], state.appended_at))

    def _forward(self, denoiser: DenoiserLike, state: PipelineState, blocks: Blocks) -> tuple["Found", Any]:
        """What every row's forward decides, and the buffers: of a row's first one over its prompt and first block, of
        the others over the smallest window that holds every row's blocks in flight."""
        canvas, nothing, start = state.canvas, self._nothing(state), self._start(state.canvas)
        visible, opening = self.visible(denoiser, canvas), self._opening(denoiser, state)
        others = ~canvas.done & ~opening
        length = canvas.tokens.shape[1] - self._length + self.block_length
        request = Opening(canvas.tokens[:, :length], visible[:, :length], start, self.block_length)
        hidden, kv = each_row(opening, denoiser.batch_parts, lambda part: _open(denoiser, part), request, state.kv)
        first = jnp.zeros_like(state.cached)
        decide = lambda found, kv: (self._decide(denoiser, state, blocks, opening, hidden, first, found), kv)
        found, kv = run_if(opening.any(), decide, nothing, kv)

        def window(count: int, found: "Found", kv: Any) -> tuple["Found", Any]:
            """A forward over `count` blocks from the first on whose keys and values are not final."""
            first = jnp.minimum(state.cached, self.num_blocks - count)
            place = first[:, None] * self.block_length + jnp.arange(count * self.block_length)
            write = (place >= state.cached[:, None] * self.block_length) & others[:, None]
            span = Span(start + first * self.block_length, place.shape[1])
            hidden, kv = denoiser.forward(canvas.tokens, visible, at=span, kv=kv, write=write)
            return self._decide(denoiser, state, blocks, others, hidden, first, found), kv

        needed = jnp.max(jnp.where(others, blocks.appended - state.cached, 0))
        widths = _window_widths(self.most_in_flight)
        choice = sum(((needed > width).astype(jnp.int32) for width in widths[:-1]), jnp.int32(0))
        for number, count in enumerate(widths):
            wanted = others.any() & (choice == number)
            found, kv = run_if(wanted, functools.partial(window, count), found, kv)
        return found, kv

    def _nothing(self, state: PipelineState) -> "Found":
        """The decisions before any forward: none."""
        batch = state.cached.shape[0]
        token, finite = jnp.full((batch, self._length), -1, jnp.int32), jnp.ones((batch,), bool)
        logprob = jnp.zeros(token.shape, jnp.float32)
        return Found(*vary_like(state.cached, (token, logprob, finite)), state.rule)

    def _decide(
        self,
        denoiser: DenoiserLike,
        state: PipelineState,
        blocks: Blocks,
        rows: jax.Array,
        hidden: jax.Array,
        first: jax.Array,
        found: "Found",
    ) -> "Found":
        """What the hidden states [B, n L, D] of n blocks from block `first` [B] on decide in some rows [B] bool, with
        what was found in others."""
        batch, length, canvas = first.shape[0], self.block_length, state.canvas
        count = hidden.shape[1] // length
        of_window = lambda x: slice_rows(x, first, count)
        by_block = lambda x: x.reshape(batch, count, length, *x.shape[2:])
        start = self._start(canvas)
        in_blocks = lambda x: canvas.of_window(x, start, self._length).reshape(batch, -1, length)
        live = (jnp.arange(self.num_blocks) < blocks.appended[:, None])[..., None]
        before = _after_prompt(blocks.ratio)[:, :-1]
        written = in_blocks(canvas.decoded_at >= 0)
        entered = blocks.undecided.sum(-1, dtype=jnp.int32) + written.sum(-1, dtype=jnp.int32)
        undecided, full = of_window(blocks.undecided & live), of_window(before) >= jnp.asarray(self.tau_act)[..., None]
        tokens = slice_rows(canvas.tokens, start, self._length).reshape(batch, -1, length)
        logits = denoiser.logits(hidden) if self._rule.reads_hidden else None
        place = (first * length - self._prompt_part(canvas))[:, None] + jnp.arange(count * length, dtype=jnp.int32)
        decide = lambda *parts: self._decide_block(denoiser, state, blocks.total, count, *parts)
        token, logprob, finite, new = jax.vmap(decide, in_axes=1, out_axes=1)(
            by_block(hidden),
            jax.tree.map(by_block, logits),
            first[:, None] + jnp.arange(count),
            undecided,
            of_window(written),
            of_window(tokens),
            full,
            of_window(canvas.nfe[:, None] - state.appended_at),
            of_window(entered),
            jax.tree.map(of_window, state.rule),
            jax.tree.map(by_block, self._judged(denoiser, hidden, logits, undecided, full, place)),
        )
        mine = of_window(live[..., 0]) & rows[:, None]
        put = lambda old, new: write_rows(old, new, first, mine)
        everywhere = jnp.broadcast_to(rows[:, None], (batch, count * length))
        return Found(
            write_rows(found.token, token.reshape(batch, -1), first * length, everywhere),
            write_rows(found.logprob, logprob.reshape(batch, -1), first * length, everywhere),
            found.finite & (finite.all(axis=1) | ~rows),
            jax.tree.map(put, found.rule, new),
        )

    def _judged(
        self,
        denoiser: DenoiserLike,
        hidden: jax.Array,
        logits: jax.Array | None,
        undecided: jax.Array,
        full: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, jax.Array] | None:
        """What the rule judges final of the undecided positions [B, n, L] of n blocks, [B, n L] in the generation, by
        their hidden states [B, n L, D]: the best tokens there, else -1, and the best tokens' log-probabilities,
        [B, n L] each; None for a rule that reads none."""
        if logits is None:
            return None
        asked = undecided if self._rule.looks_ahead(cached=False) else undecided & full[..., None]
        asked = asked.reshape(logits.shape[:2])
        return judged(denoiser, self._rule, self.sampling, hidden, logits, asked, positions)

    def _decide_block(
        self,
        denoiser: DenoiserLike,
        state: PipelineState,
        total: jax.Array,
        count: int,
        hidden: jax.Array,
        logits: jax.Array | None,
        block: jax.Array,
        undecided: jax.Array,
        written: jax.Array,
        tokens: jax.Array,
        full: jax.Array,
        step: jax.Array,
        entered: jax.Array,
        rule_state: Any,
        best: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """One block of every row, block [B], of `count` side by side: the tokens that are committed [B, L], -1
        elsewhere; their log-probabilities [B, L]; whether the logits were finite [B]; and the rule's new state."""
        first = block * self.block_length - self._prompt_part(state.canvas)
        positions = first[:, None] + jnp.arange(self.block_length, dtype=jnp.int32)
        in_blocks = block_length_of(denoiser) is not None
        view = BlockView(
            undecided=undecided,
            positions=positions,
            first=first,
            step=step,
            block_undecided=entered,
            num_blocks=total,
            noise=state.canvas.noise,
            nfe=state.canvas.nfe,
            tokens=tokens,
            written=written,
            mask_id=denoiser.mask_id,
            heads=jnp.broadcast_to(jnp.arange(self.block_length) == 0, undecided.shape) if in_blocks else None,
        )
        predictions, rule_state = predicted(
            denoiser, self._rule, self.sampling, hidden, view, rule_state, logits=logits, simultaneous=count
        )
        chosen, rule_state = self._rule.decide(predictions, view, rule_state)
        score = predictions.confidence if self.forced == "confidence" else -error_of(predictions, self.forced)
        forced = undecided & (rank(score, undecided) == 0) & ~chosen.any(axis=1, keepdims=True)
        above = chosen & (predictions.confidence > per_row(self.threshold))
        select = jnp.where(full[:, None], chosen | forced, above)
        token, logprob = jnp.where(select, predictions.token, -1), predictions.logprob
        if best is not None:
            final = best[0] >= 0
            token, logprob = jnp.where(final, best[0], token), jnp.where(final, best[1], logprob)
        return token, logprob, jnp.all(predictions.finite | ~undecided, axis=1), rule_state

    def _ended(self, denoiser: DenoiserLike, state: PipelineState) -> PipelineState:
        """Which rows have ended."""
        blocks = self._blocks(denoiser, state)
        canvas, stopped = state.canvas.stopped(self.stop, denoiser.eos_id, state.canvas.undecided)
        nothing_left = ~jnp.any(canvas.undecided, axis=1)
        done = canvas.done | nothing_left | (blocks.ended & (blocks.complete == blocks.appended)) | stopped
        return dataclasses.replace(state, canvas=dataclasses.replace(canvas, done=done))


class Found(NamedTuple):
    """What forwards decide.

    Attributes:
        token: [B, N L] int32, what is committed; -1 elsewhere.
        logprob: [B, N L] float32, log-probabilities of what is committed.
        finite: [B] bool, whether the model's logits were.
        rule: the rule's new state.
    """

    token: jax.Array
    logprob: jax.Array
    finite: jax.Array
    rule: Any


def _open(denoiser: DenoiserLike, request: Opening) -> tuple[jax.Array, Any]:
    """A forward over prompts and first blocks: hidden states of the blocks, and keys and values of everything."""
    least = denoiser.min_prompt_length
    outputs = Span(jnp.maximum(request.start, least), request.length)
    hidden, kv = denoiser.forward(request.tokens, request.visible, outputs=outputs)
    padded = jnp.concatenate([hidden[:, :least], hidden], axis=1)  # for a position that has no predictor
    return slice_rows(padded, least - (outputs.start - request.start), request.length), kv


def _window_widths(most: int) -> list[int]:
    """Sizes of windows in blocks: the most that may be in flight, its half, ... down to one, in ascending order."""
    widths = [most]
    while widths[-1] > 1:
        widths.append(-(-widths[-1] // 2))
    return widths[::-1]


def _after_prompt(ratio: jax.Array) -> jax.Array:
    """Shares of the prompt, which is complete, and of the blocks after it: [B, N] -> [B, N + 1]."""
    return jnp.concatenate([jnp.ones_like(ratio[:, :1]), ratio], axis=1)
