"""The block sampler: any unmasking rule, with any cache policy, over semi-autoregressive blocks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike, Span, block_causal, block_length_of
from dllm_jax.models.kv_cache import slice_rows, write_rows
from dllm_jax.pytree import pytree, vary_like
from samplers import canvas as canvases
from samplers.caches import CachePolicy, ForwardRequest, NoCache, Outcome
from samplers.canvas import Canvas
from samplers.checks import check_length, check_number, check_whole
from samplers.constraints.constraint import Constraint, ConstraintState
from samplers.rules.base import BlockView, Rule, decided, judged
from samplers.sampler import Result
from samplers.stopping import Stop
from samplers.tokens.guidance import Guided, paired
from samplers.tokens.noise import Noise
from samplers.tokens.predictions import Sampling, given, most_probable, readout
from samplers.tokens.smoothing import Smoothing


@pytree()
class BlockState:
    """Everything a step reads and writes; every leaf but the cache's starts with the batch axis.

    Attributes:
        canvas: tokens, what is undecided, counters.
        block, block_step, block_undecided: [B], the active block, forwards spent on it, and its undecided positions
            when it was entered.
        rule, cache: state of the rule and the cache policy.
        soft: [B, S, D], what smoothing adds to the embedding of a position while it is undecided; None without.
        form: how far the constraint has read; None without one.
        top: the most probable tokens [B, G, K] int32 of the forward that wrote each position, and their
            log-probabilities [B, G, K] float32; None where nobody asks for them.
    """

    canvas: Canvas
    block: jax.Array
    block_step: jax.Array
    block_undecided: jax.Array
    rule: Any
    cache: Any
    soft: jax.Array | None
    form: ConstraintState | None
    top: tuple[jax.Array, jax.Array] | None


@pytree(static=("gen_length", "block_length", "align_blocks", "sub_block_length", "canvas_length", "fill_after_eos"))
class BlockSampler:
    """Unmasks a canvas block by block; the rule decides inside the active block, the policy how it is predicted.

    Every active row gets one forward per step. A subclass may override `leaves`, `next_block`, `ends` and `filled`,
    which say when a row leaves its block, where it goes, when it has ended and what an end token fills.

    Attributes:
        rule: what is committed. It has no default of its own, see `GENERATION_DEFAULTS`.
        gen_length: G, positions to generate. It has no default of its own, see `GENERATION_DEFAULTS`.
        block_length: length of a block; the last may be shorter. None is one block. Default: none, nothing but the rule
            restricts the order.
        cache: which keys and values are reused. Default: none, exact.
        smoothing: carry what each forward expects at undecided positions over to the next; None does not. Default:
            none, what the model was trained with.
        align_blocks: blocks begin at multiples of block_length counted from the prompt's start, so that a row's first
            may begin within its prompt and be shorter (dInfer's `start_block_align`). Block diffusion models need that;
            their blocks are then `block_length` long, whatever they were trained with. Default: off, so that all blocks
            are equally long.
        sub_block_length: of a block diffusion model, decode each block in smaller ones of this length, from left to
            right (Fast-dLLM v2); must divide `block_length`. None decodes it at once. Default: none, the block as the
            model learned it.
        sampling: how tokens are drawn; greedy by default.
        stop: when a row ends before its canvas is full; None runs to the end. See `stopping.stop_on`. Default: the
            model's end tokens.
        guidance: scale of classifier-free guidance; None runs without. Default: none; it doubles the rows of each
            forward.
        canvas_length: pad every row with masks to this total length, prompt included; masks after the generation are
            context and stay (EB-Sampler pads to the model's maximum length). None adds none; a row whose prompt and
            generation are longer gets none. Default: none; masks after the generation cost work.
        fill_after_eos: as soon as an end-of-sequence token is final, all positions after it become it, committed or
            not, and count as context from then on (Fast-dLLM's early stop). Fewer forwards, slightly other tokens.
            Default: off, which changes no token.
        constraint: the form of the answer, which every finished row has: `samplers.constraint_for` makes one. Not for
            rules that revise, whose forwards may commit nothing, or that look ahead. None is any.
    """

    rule: Rule
    gen_length: int
    block_length: int | None = None
    cache: CachePolicy = NoCache()
    smoothing: Smoothing | None = None
    align_blocks: bool = False
    sub_block_length: int | None = None
    sampling: Sampling = Sampling()
    stop: Stop | None = None
    guidance: float | jax.Array | None = None
    canvas_length: int | None = None
    fill_after_eos: bool = False
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        check_length("gen_length", self.gen_length)
        check_length("block_length", self.block_length, optional=True)
        check_length("canvas_length", self.canvas_length, optional=True)
        if self.block_length is not None and not 1 <= self.block_length <= self.gen_length:
            raise DllmError(f"block_length {self.block_length} must be between 1 and gen_length {self.gen_length}")
        check_length("sub_block_length", self.sub_block_length, optional=True)
        if self.sub_block_length is not None and (self.block_length or self.gen_length) % self.sub_block_length:
            lengths = f"sub_block_length {self.sub_block_length} does not divide block_length {self.block_length}"
            raise DllmError(f"{lengths}; choose a divisor")
        if self.canvas_length is not None and self.canvas_length < self.gen_length:
            total = "it counts the prompt and the generation"
            raise DllmError(f"canvas_length {self.canvas_length} is below gen_length {self.gen_length}; {total}")
        if isinstance(self.rule, str | type) or isinstance(self.cache, str | type):  # JAX builds none of these
            self._check_parts()
        parts: tuple[Any, ...] = (self.cache, self.smoothing)
        for part in parts:
            if hasattr(part, "check") and not isinstance(part, type):
                part.check()
        if isinstance(self.rule, Rule):
            self.rule.check(self.gen_length, None if self.align_blocks else -(-self.gen_length // self.width))
        check_sampling(self.sampling, revises=getattr(self.rule, "revises", False))
        check_number("guidance", self.guidance, 0.0)
        if self.constraint is not None:
            self._check_constraint(self.constraint)

    @property
    def width(self) -> int:
        """Length of what is decoded at a time: a block, or a smaller one of it."""
        return self.sub_block_length or self.block_length or self.gen_length

    def blocks(self, prompt_length: int, gen_length: int | None = None) -> list[tuple[int, int]]:
        """The blocks of a row as absolute positions (start, end), the prompt's first token being 0.

        Args:
            prompt_length: of the row.
            gen_length: positions that the row generates; the sampler's by default.
        """
        end = prompt_length + (self.gen_length if gen_length is None else gen_length)
        first = prompt_length - (prompt_length % self.width if self.align_blocks else 0)
        return [(start, min(start + self.width, end)) for start in range(first, end, self.width)]

    def forwards(self, prompt_length: int) -> tuple[int, int]:
        """Fewest and most forwards of a row after a prompt of this length, if no end token ends it before."""
        spans = self.blocks(prompt_length)
        each = [self.rule.forwards(end - max(start, prompt_length), len(spans)) for start, end in spans]
        least = 1 if self.looks_ahead else sum(least for least, _ in each)
        return least, sum(most for _, most in each) if self.constraint is None else self.gen_length

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
                canvas ends there; later positions are padding. Changing them recompiles nothing.
            given: [B, G] int32, tokens the canvas comes with, the mask id where a token is to be generated; for
                infilling. None generates all.
            noise: source of random numbers instead of `key`.

        Raises:
            DllmError: for wrong shapes or dtypes, a prompt shorter than the family needs, prompt lengths that do not
                fit (where they are concrete), or a missing key.
        """
        self._check_parts()
        self._check_blocks(denoiser)
        denoiser = self._in_blocks(denoiser)
        canvas = canvases.begin(
            denoiser,
            prompt,
            prompt_lengths,
            gen_length=self.gen_length,
            length=self.gen_length,
            context=self.canvas_length or 0,
            key=key,
            gen_lengths=gen_lengths,
            given=given,
            noise=noise,
            stop=self.stop,
        )
        batch, length = canvas.tokens.shape
        if self.rule.reads_hidden:  # a model that has none raises here, before anything is compiled
            denoiser.embed(canvas.tokens[:1, :1])
        zeros = jnp.zeros((batch,), jnp.int32)
        state = BlockState(
            canvas=canvas,
            block=zeros,
            block_step=zeros,
            block_undecided=zeros,
            rule=self.rule.init(batch, self.width, denoiser.vocab_size),
            cache=self.cache.init(self._guided(denoiser), batch, length),
            soft=None if self.smoothing is None else jnp.zeros_like(denoiser.embed(canvas.tokens)),
            form=None if self.constraint is None else self.constraint.begin(canvas),
            top=None,
        )
        return self._move_on(denoiser, vary_like(prompt, state), jnp.ones((batch,), bool))

    def step(self, denoiser: DenoiserLike, state: BlockState) -> BlockState:
        """One forward, one decision and one commit for every row that is not finished."""
        denoiser = self._in_blocks(denoiser)
        guided, active = self._guided(denoiser), ~state.canvas.done
        view, request = self._look(denoiser, state)
        outcome = self.cache.predict(guided, request, state.cache)
        hidden = slice_rows(outcome.hidden, *request.span) if request.all_positions else outcome.hidden
        logits, form, window = None if self.smoothing is None else guided.logits(hidden), state.form, None
        if self.constraint is not None and form is not None:
            form, window = self.constraint.look(form, state.canvas, request.start, self.width)
        decision = decided(
            guided, self.rule, self.sampling, hidden, view, state.rule, active, logits=logits, form=window
        )
        change, logits = decision.change, decision.logits
        outside = (
            state.canvas.of_window(state.canvas.undecided, *request.span) & ~view.undecided
        )  # of other blocks in the span
        undecided = change.undecided | outside
        canvas = state.canvas.write(request.start, change.tokens, decision.logprobs, undecided, active)
        top = state.top
        if top is not None:
            scores = readout(guided, hidden) if logits is None else given(logits)
            found = most_probable(scores, top[0].shape[2], denoiser.mask_id)
            wrote = active[:, None] & (canvas.decoded_at == canvas.nfe[:, None])
            put = lambda old, new: jnp.where(wrote[..., None], canvas.of_canvas(new, request.start), old)
            top = jax.tree.map(put, top, found)
        soft = state.soft
        if self.smoothing is not None and soft is not None and logits is not None:
            soft = self._soften(guided, request, outcome, logits, self.smoothing.alpha(canvas.nfe), soft)
        state = dataclasses.replace(
            state,
            canvas=self._write_ahead(guided, request, outcome, canvas) if self.looks_ahead else canvas,
            block_step=state.block_step + active,
            rule=jax.tree.map(lambda new, old: jnp.where(_like(active, new), new, old), decision.state, state.rule),
            cache=outcome.state,
            soft=soft,
            form=form,
            top=top,
        )
        if self.fill_after_eos and not self.rule.revises:
            state = dataclasses.replace(state, canvas=self.filled(denoiser, state, active, outcome))
        leaving, state = self.leaves(state, view, outcome, decision.last)
        if self.fill_after_eos and self.rule.revises:  # nothing of a block is final before
            state = dataclasses.replace(state, canvas=self.filled(denoiser, state, leaving, outcome))
        asked = view.undecided | view.written if self.rule.revises else view.undecided
        finite = jnp.all(decision.predictions.finite | ~asked, axis=1)
        canvas = state.canvas.counted(active, outcome.full, outcome.updated, finite)
        return self._move_on(denoiser, dataclasses.replace(state, canvas=canvas), leaving)

    def is_done(self, state: BlockState) -> jax.Array:
        """[B] bool: rows whose generation has ended."""
        return state.canvas.done

    def result(self, denoiser: DenoiserLike, state: BlockState) -> Result:
        """The generation so far."""
        return state.canvas.result(denoiser.eos_id)

    def visible(self, denoiser: DenoiserLike, canvas: Canvas) -> jax.Array:
        """What a forward without a cache sees, as `Denoiser.forward` takes it: [B] int32, of a block diffusion model
        [B, S]."""
        ends = self._ends(canvas)
        length = block_length_of(self._in_blocks(denoiser))
        if length is None:
            return ends
        return jnp.minimum(block_causal(canvas.tokens.shape[1], jnp.zeros_like(ends), length), ends[:, None])

    def pending(self, state: BlockState) -> jax.Array:
        """[B, G] bool, positions that may still change: the undecided ones, and under a rule that revises those of the
        active block."""
        undecided = state.canvas.undecided
        return undecided | (self._in_block(state) & ~state.canvas.done[:, None]) if self.rule.revises else undecided

    # What a subclass may do otherwise --------------------------------------------------------------------------------

    def leaves(
        self, state: BlockState, view: BlockView, outcome: Outcome, last: jax.Array
    ) -> tuple[jax.Array, BlockState]:
        """Which rows leave their block after a forward, [B] bool, and the state.

        Args:
            state: after what the forward wrote, but before it is counted.
            view: the block before it.
            outcome: of the forward.
            last: [B] bool, rows that may not stay.
        """
        left = self.block_undecided(state).any(axis=1)
        return ~state.canvas.done & (self.rule.block_done(view, left, state.rule) | last), state

    def next_block(self, state: BlockState) -> tuple[jax.Array, jax.Array]:
        """The block that a row enters when it leaves its own, and whether there is none: [B] int32 and [B] bool."""
        undecided = state.canvas.undecided
        if getattr(self.cache, "in_order", False):
            return jnp.where(state.canvas.nfe == 0, 0, state.block + 1), ~undecided.any(axis=1)
        first = self._prompt_part(state.canvas) + jnp.argmax(undecided, axis=1).astype(jnp.int32)
        return first // self.width, ~undecided.any(axis=1)

    def entered(self, state: BlockState, rows: jax.Array) -> BlockState:
        """The state after some rows [B] bool have entered the block that it names."""
        count = self.block_undecided(state).sum(axis=1, dtype=jnp.int32)
        return dataclasses.replace(
            state,
            block_step=jnp.where(rows, 0, state.block_step),
            block_undecided=jnp.where(rows, count, state.block_undecided),
        )

    def ends(self, state: BlockState, stopped: jax.Array, leaving: jax.Array) -> jax.Array:
        """Which rows end early, [B] bool, of those whose stop condition holds and those that leave their block."""
        return stopped

    def filled(self, denoiser: DenoiserLike, state: BlockState, rows: jax.Array, outcome: Outcome) -> Canvas:
        """The canvas with everything filled after the first end token of some rows [B], whose written tokens
        are final."""
        canvas = state.canvas
        final = (canvas.generation(denoiser.eos_id) == denoiser.eos_id) & ~canvas.undecided
        position = jnp.arange(self.gen_length)
        first = jnp.where(final.any(axis=1), jnp.argmax(final, axis=1), self.gen_length)
        after = (position > first[:, None]) & (position < canvas.gen_lengths[:, None])
        after &= rows[:, None]
        kept = slice_rows(canvas.tokens, canvas.prompt_lengths, self.gen_length)
        replaced = after & (kept != denoiser.eos_id)
        return dataclasses.replace(
            canvas,
            tokens=write_rows(canvas.tokens, jnp.where(after, denoiser.eos_id, kept), canvas.prompt_lengths),
            undecided=canvas.undecided & ~after,
            decoded_at=jnp.where(after & canvas.undecided, canvas.nfe[:, None], canvas.decoded_at),
            logprobs=jnp.where(replaced, jnp.nan, canvas.logprobs),
        )

    # -----------------------------------------------------------------------------------------------------------------

    def _check_parts(self) -> None:
        """Raises DllmError for parts of the wrong kind: here, because JAX builds samplers of other things as well."""
        check_rule(self.rule, self.sampling)
        if isinstance(self.cache, type) or not hasattr(self.cache, "predict"):
            ways = "give a policy object, such as DualCache(); make_sampler takes names"
            raise DllmError(f"cache is {self.cache!r}; {ways}")
        if not (self.smoothing is None or isinstance(self.smoothing, Smoothing)):
            raise DllmError(f"smoothing is {self.smoothing!r}; give a Smoothing or None")

    def _check_constraint(self, constraint: Constraint) -> None:
        """Raises DllmError for what is no constraint, one with longer answers alone, and parts that cannot keep it."""
        if not isinstance(constraint, Constraint):
            raise DllmError(f"constraint is a {type(constraint).__name__}; make one by samplers.constraint_for")
        constraint.check_length(self.gen_length)
        if not isinstance(self.rule, Rule):
            return
        name = type(self.rule).__name__
        if self.rule.revises:
            raise DllmError(f"{name} changes what it wrote, which breaks a constraint; choose a rule that does not")
        if self.rule.may_idle:
            raise DllmError(
                f"{name} writes all that is left in its last forward, which breaks a constraint; use another"
            )
        if self.looks_ahead:
            raise DllmError(f"{name} writes after the active block, where no constraint is kept; set scope='block'")
        if self.sampling.target is not None:
            raise DllmError("a target may break the constraint; leave one of them out")

    def _check_blocks(self, denoiser: DenoiserLike) -> None:
        """Raises DllmError for a block diffusion model whose blocks are not the sampler's, and the reverse."""
        config = getattr(denoiser, "config", None)
        if config is not None and config.has_causal_context:
            raise DllmError(f"a {config.family} model drafts over a causal context; use ContextBlocks, or make_sampler")
        check_alignment(denoiser, self.align_blocks)
        if self.sub_block_length is not None and block_length_of(denoiser) is None:
            raise DllmError("sub_block_length is for block diffusion models; set block_length for this one")

    def _in_blocks(self, denoiser: DenoiserLike) -> DenoiserLike:
        """A block diffusion model with the sampler's blocks; another as it is."""
        if block_length_of(denoiser) is None or not hasattr(denoiser, "in_blocks"):
            return denoiser
        found: DenoiserLike = denoiser.in_blocks(self.block_length)
        return found

    def _ends(self, canvas: Canvas) -> jax.Array:
        """[B] int32, where each row's sequence ends, the masks after its generation included."""
        return jnp.maximum(canvas.prompt_lengths + canvas.gen_lengths, self.canvas_length or 0)

    def _guided(self, denoiser: DenoiserLike) -> DenoiserLike:
        return denoiser if self.guidance is None else Guided(denoiser, self.guidance)

    def _prompt_part(self, canvas: Canvas) -> jax.Array:
        """[B], positions of the prompt that belong to a row's first block."""
        return canvas.prompt_part(self.width if self.align_blocks else 1)

    def num_blocks(self, canvas: Canvas) -> jax.Array:
        """[B] int32, blocks of each row's generation."""
        return -(-(self._prompt_part(canvas) + canvas.gen_lengths) // self.width)

    def _in_block(self, state: BlockState) -> jax.Array:
        """[B, G] bool, positions of each row's active block."""
        place = self._prompt_part(state.canvas)[:, None] + jnp.arange(self.gen_length)
        return place // self.width == state.block[:, None]

    def block_undecided(self, state: BlockState) -> jax.Array:
        """[B, G] bool, undecided positions of each row's active block."""
        return state.canvas.undecided & self._in_block(state)

    def _inputs(self, denoiser: DenoiserLike, state: BlockState) -> jax.Array:
        """The model's inputs: tokens [B, S], or embeddings [B, S, D] that are soft where it is undecided; with
        guidance pairs of them."""
        canvas, inputs = state.canvas, state.canvas.tokens
        on_sequence = lambda x: canvas.of_window(x, jnp.zeros_like(canvas.prompt_lengths), inputs.shape[1])
        given = ~on_sequence(canvas.undecided | (canvas.decoded_at >= 0)) & (inputs != denoiser.mask_id)
        if state.soft is not None:
            inputs = denoiser.embed(inputs) + jnp.where(on_sequence(canvas.undecided)[..., None], state.soft, 0)
        return inputs if self.guidance is None else paired(denoiser, inputs, given)

    def _look(self, denoiser: DenoiserLike, state: BlockState) -> tuple[BlockView, ForwardRequest]:
        canvas, least = state.canvas, denoiser.min_prompt_length
        prompt_part = self._prompt_part(canvas)
        first = state.block * self.width - prompt_part
        start = jnp.maximum(canvas.prompt_lengths + jnp.minimum(first, self.gen_length - self.width), least)
        block_length, positions = block_length_of(denoiser), Span(start, self.width).positions
        of_window = lambda x: canvas.of_window(x & self._in_block(state), start, self.width)
        view = BlockView(
            undecided=of_window(canvas.undecided),
            positions=(start - canvas.prompt_lengths)[:, None] + jnp.arange(self.width, dtype=jnp.int32),
            first=first,
            step=state.block_step,
            block_undecided=state.block_undecided,
            num_blocks=self.num_blocks(canvas),
            noise=canvas.noise,
            nfe=canvas.nfe,
            tokens=slice_rows(canvas.tokens, start, self.width),
            written=of_window(canvas.decoded_at >= 0),
            mask_id=denoiser.mask_id,
            heads=None if block_length is None else positions % block_length == 0,
            caution=None if self.smoothing is None else self.smoothing.caution(canvas.nfe),
        )
        longest = self.gen_length + (self.width - 1 if self.align_blocks else 0)
        request = ForwardRequest(
            inputs=self._inputs(denoiser, state),
            lengths=self._ends(canvas),
            first_block=jnp.maximum(canvas.prompt_lengths - prompt_part, least),
            block=state.block,
            block_start=jnp.maximum(canvas.prompt_lengths + first, least),
            block_end=canvas.prompt_lengths + jnp.minimum(first + self.width, canvas.gen_lengths),
            start=start,
            active=~canvas.done,
            nfe=canvas.nfe,
            length=canvas.tokens.shape[1],
            width=self.width,
            longest_suffix=longest if self.canvas_length is None else canvas.tokens.shape[1],
            ragged=self.align_blocks or self.gen_length % self.width != 0,
            all_positions=self.smoothing is not None or self.looks_ahead,
        )
        return view, request

    def _soften(
        self,
        denoiser: DenoiserLike,
        request: ForwardRequest,
        outcome: Outcome,
        logits: jax.Array,
        alpha: jax.Array,
        soft: jax.Array,
    ) -> jax.Array:
        """The soft inputs after a forward, new at what it ran: the block from its logits, what lies after it in pieces
        of a block's length, so that no more logits are held at once."""

        def write(soft: jax.Array, logits: jax.Array, start: jax.Array, first: jax.Array) -> jax.Array:
            positions = start[:, None] + jnp.arange(self.width)
            low, high = jnp.maximum(outcome.low, first)[:, None], outcome.high[:, None]
            ran = request.active[:, None] & (positions >= low) & (positions < high)
            mean = denoiser.expected_embedding(logits) * alpha[:, None, None]
            return write_rows(soft, mean.astype(soft.dtype), start, ran)

        def piece(number: jax.Array, soft: jax.Array) -> jax.Array:
            first = request.start + (number + 1) * self.width
            start = jnp.minimum(first, soft.shape[1] - self.width)
            return write(soft, denoiser.logits(slice_rows(outcome.hidden, start, self.width)), start, first)

        pieces = self._pieces(request.active, outcome.high - request.start - self.width)
        return lax.fori_loop(0, pieces, piece, write(soft, logits, request.start, request.start))

    def _pieces(self, rows: jax.Array, count: jax.Array) -> jax.Array:
        """How many pieces of a block's length cover `count` [B] positions of these rows [B]."""
        return -(-jnp.max(jnp.where(rows, jnp.maximum(count, 0), 0)) // self.width)

    @property
    def looks_ahead(self) -> bool:
        """Whether positions after the active block may be written."""
        return self.rule.reads_hidden and self.rule.looks_ahead(not isinstance(self.cache, NoCache))

    def _write_ahead(self, denoiser: DenoiserLike, request: ForwardRequest, outcome: Outcome, canvas: Canvas) -> Canvas:
        """Commits what the rule judges final after the active block, as far as the forward ran, in pieces of a block's
        length, so that no more logits are held at once."""
        high = jnp.minimum(outcome.high, canvas.prompt_lengths + canvas.gen_lengths)

        def piece(number: jax.Array, canvas: Canvas) -> Canvas:
            first = request.block_end + number * self.width
            start = jnp.minimum(first, request.length - self.width)
            positions = start[:, None] + jnp.arange(self.width)
            undecided = canvas.of_window(canvas.undecided, start, self.width)
            asked = undecided & request.active[:, None] & (positions >= first[:, None]) & (positions < high[:, None])
            hidden = slice_rows(outcome.hidden, start, self.width)
            logits, place = denoiser.logits(hidden), positions - canvas.prompt_lengths[:, None]
            best, sure = judged(denoiser, self.rule, self.sampling, hidden, logits, asked, place)
            tokens = jnp.where(best >= 0, best, slice_rows(canvas.tokens, start, self.width))
            return canvas.write(start, tokens, sure, undecided & (best < 0), request.active)

        pieces = self._pieces(request.active, high - request.block_end)
        return lax.fori_loop(0, pieces, piece, canvas)

    def _move_on(self, denoiser: DenoiserLike, state: BlockState, leaving: jax.Array) -> BlockState:
        """Takes rows that leave their block to the next with undecided positions, and reads the stop condition."""
        block, complete = self.next_block(state)
        done = state.canvas.done | (leaving & complete)
        entering = leaving & ~done
        state = dataclasses.replace(
            state, block=jnp.where(entering, block, state.block), canvas=dataclasses.replace(state.canvas, done=done)
        )
        canvas, stopped = state.canvas.stopped(self.stop, denoiser.eos_id, self.pending(state))
        canvas = dataclasses.replace(canvas, done=done | self.ends(state, stopped, leaving))
        return self.entered(dataclasses.replace(state, canvas=canvas), entering)


def check_sampling(sampling: Any, *, revises: bool = False) -> None:
    """Raises DllmError for numbers that make no sense, and for a target where what is written is revised."""
    if isinstance(sampling, Sampling):
        if revises and sampling.target is not None:
            raise DllmError(
                "a target is written once, and this sampler revises what it wrote; choose one that does not"
            )
        check_number("temperature", sampling.temperature, 0.0)
        check_number("top_p", sampling.top_p, 0.0, 1.0)
        check_whole("top_k", sampling.top_k, 1)


def check_rule(rule: Any, sampling: Any) -> None:
    """Raises DllmError for things that are no rule and no sampling."""
    if not isinstance(rule, Rule):
        raise DllmError(f"rule is {rule!r}; give a rule object, such as Threshold(); make_sampler takes names")
    kind = type(rule)
    if kind.adjust is not Rule.adjust and kind.reads_logits is Rule.reads_logits:
        raise DllmError(f"{kind.__name__}.adjust is never called; set reads_logits = True, or leave it out")
    check_is_sampling(sampling)


def check_alignment(denoiser: DenoiserLike, aligned: bool) -> None:
    """Raises DllmError for a block diffusion model whose blocks are not the sampler's."""
    if block_length_of(denoiser) is not None and not aligned:
        raise DllmError("a block diffusion model's blocks begin at position 0; set align_blocks=True")


def check_is_sampling(sampling: Any) -> None:
    """Raises DllmError for something else."""
    if not isinstance(sampling, Sampling):
        raise DllmError(f"sampling is {sampling!r}; give a Sampling")


def _like(rows: jax.Array, leaf: jax.Array) -> jax.Array:
    return rows.reshape(rows.shape + (1,) * (leaf.ndim - 1))
