"""Block diffusion over a causal context, for models that read and draft with one set of weights
(Nemotron-Labs-Diffusion, arXiv 2607.05722), and what it shares with `SelfSpeculation` and `Autoregressive`.

    read    causal; stores keys and values that stay; row i predicts token i + 1
    draft   the block sees all that was read and all of itself; row i predicts token i

A block begins with a token that is known already, its seed: a read predicts the one after it. A row reads or drafts,
and both are a forward over the L positions of its block, so rows of a batch never wait for each other. A draft's keys
and values are written after what was read, where the next forward overwrites them: nothing is rolled back.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser, DenoiserLike, Span
from dllm_jax.models.kv_cache import slice_rows, write_rows
from dllm_jax.params.low_rank import LowRank
from dllm_jax.pytree import pytree, vary_like
from samplers import canvas as canvases
from samplers.canvas import Canvas
from samplers.checks import check_length, check_whole
from samplers.loops.block import check_is_sampling, check_rule, check_sampling
from samplers.rowwise import each_row, run_if
from samplers.rules.base import BlockView, Decision, Rule, decided, predicted
from samplers.rules.threshold import Threshold
from samplers.sampler import Result
from samplers.stopping import Stop
from samplers.tokens.noise import Noise
from samplers.tokens.predictions import Predictions, Sampling

Whole = int | jax.Array


@pytree()
class ContextState:
    """Everything a step reads and writes; all leaves start with the batch axis. L is the length of a block.

    Attributes:
        canvas: tokens, what is undecided, counters.
        start: [B] int32, the sequence's position of the block's seed; all before it is read.
        block: [B, L] int32, the seed and what is drafted after it, masks elsewhere.
        open: [B, L] bool, positions of the block that are to be drafted. A row without any reads.
        block_step, block_undecided: [B] int32, forwards spent on the draft, and its open positions when it began.
        rule: state of the rule.
        scores: [B, L, V] float32, the log-probabilities that the draft was drawn by; None where no sampler needs them.
        most_accepted: [B] int32, the most tokens that one read wrote.
        kv: keys and values.
    """

    canvas: Canvas
    start: jax.Array
    block: jax.Array
    open: jax.Array
    block_step: jax.Array
    block_undecided: jax.Array
    rule: Any
    scores: jax.Array | None
    most_accepted: jax.Array
    kv: Any


class CausalContext:
    """Base of the samplers; a subclass says what a read makes of a draft."""

    rule: Rule | None
    gen_length: int
    block_length: int
    sampling: Sampling
    stop: Stop | None
    thinking_budget: Whole | None
    end_think: Whole | None
    adapter: LowRank | None = None
    causal_context: bool = True

    canvas_length: ClassVar[None] = None  # no answer follows the generation
    cut_blocks: ClassVar[bool]
    """Whether the last block ends with the generation; else it is drafted to its full length."""

    def __post_init__(self) -> None:
        check_length("gen_length", self.gen_length)
        check_length("block_length", self.block_length)
        check_sampling(self.sampling, revises=self.drafting_rule.revises)
        if self.drafting_rule.revises:
            raise DllmError("a rule that revises what it wrote does not fit a causal context; choose another")
        self.drafting_rule.check(self.gen_length, self.num_blocks)
        if isinstance(self.sampling, Sampling) and self.sampling.target is not None:
            raise DllmError("no target can be written over a causal context, which reads what it wrote")
        check_whole("thinking_budget", self.thinking_budget, 0)
        if self.thinking_budget is not None and self.end_think is None:
            raise DllmError("thinking_budget needs end_think, the token that ends a thought; pass it as well")

    @property
    def width(self) -> int:
        """L."""
        return self.block_length

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest generation."""
        return -(-self.gen_length // self.block_length)

    @property
    def drafting_rule(self) -> Rule:
        """The rule, by default one that takes all of a draft from one forward."""
        return _AT_ONCE if self.rule is None else self.rule

    def new_seed(
        self, state: ContextState, found: Predictions, logits: jax.Array | None, known: jax.Array, prompt: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What a read makes of a draft.

        Args:
            found: row i of which predicts the token after position i of the block.
            logits: [B, L, V] float32, where the sampler `needs_logits`.
            known: [B, L] bool, whether the token after position i was given.
            prompt: [B] bool, rows that read their prompt, whose first row alone counts.

        Returns:
            Tokens [B, L] int32, for the positions after each of the block; which of them are written, bool, as far as
            they are undecided; and by how many positions the block moves on, [B] int32, at least one.
        """
        raise NotImplementedError

    def drafted(self, canvas: Canvas, state: ContextState, decision: Decision, rows: jax.Array) -> Canvas:
        """The canvas after a draft of some rows [B] bool; their forward is counted later."""
        raise NotImplementedError

    def budget_place(self, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where a thought that is too long ends, the generation's position [B] int32, and the rows [B] bool in which it
        ends now.

        Args:
            end: [B] int32, the generation's position of the next seed.
        """
        raise NotImplementedError

    needs_logits: ClassVar[bool] = False

    # The protocol of samplers ----------------------------------------------------------------------------------------

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
    ) -> ContextState:
        """The state before the first forward, which reads the prompt.

        Args:
            prompt, prompt_lengths, key: as in `samplers.sample`; prompts have a token at least.
            gen_lengths: [B] int32, positions each row generates, at most `gen_length`, which is the default. Changing
                them recompiles nothing.
            given: [B, G] int32, tokens the canvas comes with, the mask id where a token is to be generated. They are
                read in their turn; a draft sees those of its block.
            noise: source of random numbers instead of `key`.

        Raises:
            DllmError: for another model, wrong shapes or dtypes, lengths that do not fit (where they are concrete), or
                a missing key.
        """
        model, rule = self.checked(denoiser), self.drafting_rule
        check_rule(rule, self.sampling)
        check_is_sampling(self.sampling)
        canvas = canvases.begin(
            denoiser,
            prompt,
            prompt_lengths,
            gen_length=self.gen_length,
            length=self.gen_length + self.block_length,
            key=key,
            gen_lengths=gen_lengths,
            given=given,
            noise=noise,
            stop=self.stop,
        )
        if canvas.noise is None and self.sampling.temperature is not None:
            raise DllmError("a temperature draws random numbers; pass key=jax.random.key(seed)")
        batch, length = canvas.tokens.shape
        if rule.reads_hidden:  # a model that has none raises here, before anything is compiled
            denoiser.embed(canvas.tokens[:1, :1])
        zeros = jnp.zeros((batch,), jnp.int32)
        start = canvas.prompt_lengths - 1
        scored = self.needs_logits and self.sampling.temperature is not None
        state = ContextState(
            canvas=canvas,
            start=start,
            block=slice_rows(canvas.tokens, start, self.block_length),
            open=jnp.zeros((batch, self.block_length), bool),
            block_step=zeros,
            block_undecided=zeros,
            rule=rule.init(batch, self.block_length, denoiser.vocab_size),
            scores=jnp.zeros((batch, self.block_length, denoiser.vocab_size), jnp.float32) if scored else None,
            most_accepted=zeros,
            kv=model.empty_cache(batch, length),
        )
        return vary_like(prompt, state)

    def step(self, denoiser: DenoiserLike, state: ContextState) -> ContextState:
        """One forward for every row that is not finished: of its prompt, of its draft, or of its finished block."""
        canvas, active = state.canvas, ~state.canvas.done
        reads = active & ~state.open.any(axis=1)
        drafts, prompt = active & ~reads, active & (canvas.nfe == 0)
        hidden, kv = self._forward(denoiser, state, reads, prompt)
        view, rule = self._view(state, reads, denoiser.mask_id), self.drafting_rule
        logits = denoiser.logits(hidden) if self.needs_logits else None
        decision = decided(denoiser, rule, self.sampling, hidden, view, state.rule, drafts, logits=logits)
        read = decision.predictions
        if rule.reads_logits:  # whose adjusted logits are for drafts
            read = predicted(denoiser, _AT_ONCE, self.sampling, hidden, view, (), logits=decision.logits)[0]
        canvas = self.drafted(canvas, state, decision, drafts)
        row_of = lambda rows, x: rows.reshape(rows.shape + (1,) * (x.ndim - 1))
        kept = lambda new, old: jnp.where(row_of(drafts, new), new, old)
        state = dataclasses.replace(
            state,
            canvas=canvas,
            block=kept(decision.change.tokens, state.block),
            open=kept(decision.change.undecided, state.open),
            block_step=state.block_step + drafts,
            rule=jax.tree.map(kept, decision.state, state.rule),
            scores=self._scores(state, logits, view, decision),
            kv=kv,
        )
        state = self._read(denoiser, state, read, logits, reads, prompt)
        asked = jnp.where(drafts[:, None], view.undecided, jnp.arange(self.block_length) == 0)
        finite = jnp.all(read.finite | ~asked, axis=1)
        canvas = state.canvas.counted(active, prompt, reads, finite)
        canvas, stopped = canvas.stopped(self.stop, denoiser.eos_id, canvas.undecided)
        done = canvas.done | ~canvas.undecided.any(axis=1) | stopped
        return dataclasses.replace(state, canvas=dataclasses.replace(canvas, done=done))

    def is_done(self, state: ContextState) -> jax.Array:
        """[B] bool: rows whose generation has ended."""
        return state.canvas.done

    def result(self, denoiser: DenoiserLike, state: ContextState) -> Result:
        """The generation so far."""
        return state.canvas.result(denoiser.eos_id)

    def pending(self, state: ContextState) -> jax.Array:
        """[B, G] bool, positions that may still change: the undecided ones."""
        return state.canvas.undecided

    # -----------------------------------------------------------------------------------------------------------------

    def checked(self, denoiser: DenoiserLike) -> Denoiser:
        """The model without a shift by one.

        Raises:
            DllmError: for a model that cannot be read causally, and a causal one that would have to draft.
        """
        config = getattr(denoiser, "config", None)
        if config is None or not (config.has_causal_context or config.is_causal):
            family = "this" if config is None else f"a {config.family}"
            raise DllmError(f"{family} model cannot be read causally; use another sampler, or a nemotron model")
        if config.is_causal and self.block_length > 1:
            raise DllmError(f"a {config.family} model cannot draft; set block_length=1, which generates token by token")
        assert isinstance(denoiser, Denoiser)
        return denoiser.unshifted

    def _forward(
        self, denoiser: DenoiserLike, state: ContextState, reads: jax.Array, prompt: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Hidden states [B, L, D] of the blocks, and the buffers."""
        model, canvas, width = self.checked(denoiser), state.canvas, self.block_length
        tokens = write_rows(canvas.tokens, state.block, state.start)
        length, end = tokens.shape[1], state.start + width
        if self.cut_blocks:
            end = jnp.minimum(end, canvas.prompt_lengths + canvas.gen_lengths)
        own = jnp.arange(length, dtype=jnp.int32) + 1
        if not self.causal_context:
            own = jnp.where(prompt, canvas.prompt_lengths, end)[:, None]
        visible = jnp.broadcast_to(jnp.where(reads[:, None], own, end[:, None]), tokens.shape)
        span, room = Span(state.start, width), length - self.gen_length - 1  # of a prompt, and what fills a block
        alone = lambda part: model.forward(part[0], part[1], outputs=Span(part[2], width))
        hidden, kv = each_row(
            prompt, model.batch_parts, alone, (tokens[:, :room], visible[:, :room], state.start), state.kv
        )
        others = ~canvas.done & ~prompt
        write = None if others.shape[0] == 1 else jnp.broadcast_to(others[:, None], (others.shape[0], width))
        drafting = model if self.adapter is None else model.with_adapter(self.adapter, ~reads)

        def windowed(hidden: jax.Array, kv: Any) -> tuple[jax.Array, Any]:
            found, kv = drafting.forward(tokens, visible, at=span, kv=kv, write=write)
            return jnp.where(prompt[:, None, None], hidden, found), kv

        return run_if(others.any(), windowed, hidden, kv)

    def _view(self, state: ContextState, reads: jax.Array, mask_id: int) -> BlockView:
        """The blocks as a rule receives them, with nothing to decide in rows that read."""
        canvas = state.canvas
        first = state.start - canvas.prompt_lengths
        place = first[:, None] + jnp.arange(self.block_length, dtype=jnp.int32)
        return BlockView(
            undecided=state.open & ~reads[:, None],
            positions=place + reads[:, None],  # of the tokens that are predicted
            first=first,
            step=state.block_step,
            block_undecided=state.block_undecided,
            num_blocks=-(-canvas.gen_lengths // self.block_length),
            noise=canvas.noise,
            nfe=canvas.nfe,
            tokens=state.block,
            written=jnp.zeros_like(state.open),
            mask_id=mask_id,
        )

    def _scores(
        self, state: ContextState, logits: jax.Array | None, view: BlockView, decision: Decision
    ) -> jax.Array | None:
        """What the draft was drawn by, after a forward."""
        if state.scores is None or logits is None:
            return state.scores
        new = view.undecided & ~decision.change.undecided
        return jnp.where(new[..., None], self.log_probabilities(logits, view.mask_id), state.scores)

    def log_probabilities(self, logits: jax.Array, mask_id: int) -> jax.Array:
        """Of what a token is drawn from, [B, L, V] float32, for samplers that need them."""
        raise NotImplementedError

    def _read(
        self,
        denoiser: DenoiserLike,
        state: ContextState,
        found: Predictions,
        logits: jax.Array | None,
        reads: jax.Array,
        prompt: jax.Array,
    ) -> ContextState:
        """The state after some rows [B] bool have read: the next seed is written, and the next block begins at it."""
        canvas, after = state.canvas, state.start + 1
        of_generation = jnp.arange(self.gen_length) < canvas.gen_lengths[:, None]
        undecided = canvas.of_window(canvas.undecided, after, self.block_length)
        known = canvas.of_window(of_generation & ~canvas.undecided, after, self.block_length)
        tokens, new, count = self.new_seed(state, found, logits, known, prompt)
        count = jnp.where(prompt, 1, count)
        new &= undecided & reads[:, None] & (jnp.arange(self.block_length) < count[:, None])
        start = state.start + jnp.where(reads, count, 0)
        tokens = jnp.where(new, tokens, slice_rows(canvas.tokens, after, self.block_length))
        place, forced = self._end_of_thought(canvas, start, tokens, new, reads)
        here = forced[:, None] & (after[:, None] + jnp.arange(self.block_length) == place[:, None])
        tokens = jnp.where(here, self._end_think(start), tokens)
        logprobs = jnp.where(tokens == found.token, found.logprob, self._logprobs(logits, tokens))
        logprobs = jnp.where(here, jnp.nan, logprobs)
        canvas = canvas.write(after, tokens, logprobs, undecided & ~new, reads)
        if self.thinking_budget is not None:  # further on in the next block
            ahead = forced & canvas.of_window(canvas.undecided, place, 1)[:, 0]
            end = self._end_think(start).astype(jnp.int32)
            canvas = canvas.write(place, end, jnp.full(end.shape, jnp.nan), end < 0, ahead)
        block = slice_rows(canvas.tokens, start, self.block_length)
        positions = Span(start, self.block_length).positions
        inside = positions < (canvas.prompt_lengths + canvas.gen_lengths)[:, None]
        masked = canvas.of_window(canvas.undecided, start, self.block_length) | (~inside & (not self.cut_blocks))
        if self.causal_context:  # the seed is there
            masked &= positions > start[:, None]
        row = reads[:, None]
        masked = jnp.where(row, masked, state.open)
        block = jnp.where(row, jnp.where(masked, denoiser.mask_id, block), state.block)
        accepted = new.sum(axis=1, dtype=jnp.int32)
        return dataclasses.replace(
            state,
            canvas=canvas,
            start=start,
            block=block,
            open=masked,
            block_step=jnp.where(reads, 0, state.block_step),
            block_undecided=jnp.where(reads, masked.sum(axis=1, dtype=jnp.int32), state.block_undecided),
            most_accepted=jnp.maximum(state.most_accepted, accepted),
        )

    def _logprobs(self, logits: jax.Array | None, tokens: jax.Array) -> jax.Array:
        """Log-probabilities of tokens [B, L] that are not the predicted ones."""
        return jnp.full(tokens.shape, jnp.nan, jnp.float32)

    def _end_think(self, rows: jax.Array) -> jax.Array:
        """The token that ends a thought, of each of some rows [B]: [B, 1] int32."""
        return jnp.broadcast_to(jnp.asarray(-1 if self.end_think is None else self.end_think), rows.shape)[:, None]

    def _end_of_thought(
        self, canvas: Canvas, start: jax.Array, tokens: jax.Array, new: jax.Array, reads: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Where the token that ends a thought is put because the budget is spent, the sequence's position [B], and in
        which rows [B] bool."""
        if self.thinking_budget is None:
            return start, reads & False
        end = start - canvas.prompt_lengths
        place, forced = self.budget_place(end)
        generation = slice_rows(canvas.tokens, canvas.prompt_lengths, self.gen_length)
        ends = self._end_think(end)
        earlier = (jnp.arange(self.gen_length) < end[:, None]) & ~canvas.undecided & (generation == ends)
        last = jnp.cumsum(new, axis=1) == new.sum(axis=1, keepdims=True)
        thought = earlier.any(axis=1) | (new & ~last & (tokens == ends)).any(axis=1)
        return canvas.prompt_lengths + place, reads & forced & ~thought


_AT_ONCE = Threshold(0.0)


@pytree(static=("gen_length", "block_length", "causal_context"))
class ContextBlocks(CausalContext):
    """Block diffusion over a causal context (arXiv 2607.05722): a rule decides inside each block, whose first token is
    the causal model's; a finished block is read once, which stores it and predicts the next block's first token.

    For these models a rule's name makes it, as it makes a `BlockSampler` for others; blocks begin at the prompt's end.
    In `Result`, `nfe` counts the read of the prompt and of every finished block but the last, `cache_updates` these
    reads.

    Attributes:
        gen_length: G, positions to generate. Default: 256, enough for a reasoned answer.
        block_length: L. Default: 32, as published.
        rule: what is committed. Default: a threshold of 0.9, as published.
        sampling: how tokens are drawn; greedy by default.
        stop: when a row ends before its canvas is full; None runs to the end. Default: the model's end tokens.
        thinking_budget: position of the answer at which a thought ends, where the model has not ended it. Default:
            none.
        end_think: the token that ends a thought. Default: the tokenizer's `</think>`.
        causal_context: read causally, as the published models were trained. False reads the prompt, and then each
            block, with attention in both directions, and blocks have no seed. Default: on.
    """

    gen_length: int
    block_length: int = 32
    rule: Rule = Threshold()
    sampling: Sampling = Sampling()
    stop: Stop | None = None
    thinking_budget: Whole | None = None
    end_think: Whole | None = None
    causal_context: bool = True

    cut_blocks = True

    def forwards(self, prompt_length: int) -> tuple[int, int]:
        """Fewest and most forwards of a row, if no end token ends it before."""
        sizes = [min(self.block_length, self.gen_length - at) for at in range(0, self.gen_length, self.block_length)]
        masks = [size - self.causal_context for size in sizes]
        each = [self.rule.forwards(count, len(sizes)) for count in masks if count]
        return len(sizes) + sum(least for least, _ in each), len(sizes) + sum(most for _, most in each)

    def new_seed(
        self, state: ContextState, found: Predictions, logits: jax.Array | None, known: jax.Array, prompt: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        count = jnp.where(prompt, 1, self.block_length)
        last = jnp.arange(self.block_length) == count[:, None] - 1
        return found.token, last & self.causal_context, count

    def drafted(self, canvas: Canvas, state: ContextState, decision: Decision, rows: jax.Array) -> Canvas:
        return canvas.write(state.start, decision.change.tokens, decision.logprobs, decision.change.undecided, rows)

    def budget_place(self, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        place = jnp.broadcast_to(jnp.asarray(self.thinking_budget, jnp.int32), end.shape)
        return place, (place >= end) & (place < end + self.block_length)
