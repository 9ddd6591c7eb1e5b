"""What an unmasking rule is: a pure function from predictions and the block's state to what is written and what stays
undecided."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike
from samplers.tokens.noise import Noise, Purpose, gumbel
from samplers.tokens.predictions import (
    Predictions,
    Sampling,
    ScoreFrom,
    given,
    logprob_of,
    logprobs_of,
    predict,
    readout,
)

Number = float | jax.Array
Proxy = Literal["confidence", "entropy", "margin"]
PROXIES: tuple[Proxy, ...] = ("confidence", "entropy", "margin")
ProxyOrRandom = Literal[Proxy, "random"]


@dataclasses.dataclass(frozen=True)
class BlockView:
    """The active block of every row, as a rule receives it. W is the block length.

    Attributes:
        undecided: [B, W] bool, the positions that may be committed now.
        positions: [B, W] int32, relative to the start of the generation.
        first: [B] int32, position of the block's first token.
        step: [B] int32, forwards this row has spent on this block before this one.
        block_undecided: [B] int32, undecided positions the block had when the row entered it.
        num_blocks: [B] int32, blocks of the row's generation.
        noise: source of random numbers, None where the caller gave none.
        nfe: [B] int32, forwards of the row before this one.
        tokens: [B, W] int32, the block's current tokens.
        written: [B, W] bool, the block's positions that hold a token of this generation.
        mask_id: the mask token's id.
        heads: [B, W] bool, positions that begin one of a block diffusion model's blocks; None of another model.
        caution: [B] float32, thresholds on the confidence count as at least this (see `Smoothing`); None for no such
            bound.
    """

    undecided: jax.Array
    positions: jax.Array
    first: jax.Array
    step: jax.Array
    block_undecided: jax.Array
    num_blocks: jax.Array
    noise: Noise | None
    nfe: jax.Array
    tokens: jax.Array
    written: jax.Array
    mask_id: int
    heads: jax.Array | None = None
    caution: jax.Array | None = None

    def at_least(self, threshold: "Number") -> jax.Array:
        """A rule's threshold on the confidence, at least `caution`, against [B, W]."""
        wanted = per_row(threshold)
        return wanted if self.caution is None else jnp.maximum(wanted, self.caution[:, None])

    def draw(self, purpose: Purpose, ids: jax.Array | None = None) -> jax.Array:
        """Fresh draws in (0, 1) for the block's positions: [B, W], or [B, W, n] for each of some ids [n].

        Raises:
            DllmError: when the generation was started without a key.
        """
        if self.noise is None:
            raise DllmError("this sampler draws random numbers and was given none; pass key=jax.random.key(seed)")
        return self.noise.uniform(purpose, self.nfe, self.positions, ids)

    def uniform(self) -> jax.Array:
        """Fresh draws in (0, 1) that order or select the block's positions, [B, W]."""
        return self.draw(Purpose.ORDER)

    def gumbel(self) -> jax.Array:
        """Fresh standard Gumbel noise for the block's positions, [B, W]."""
        return gumbel(self.uniform())


class Change(NamedTuple):
    """What a rule returns: the block after the forward.

    Attributes:
        tokens: [B, W] int32.
        undecided: [B, W] bool, what is undecided then.
    """

    tokens: jax.Array
    undecided: jax.Array


def committed(select: jax.Array, predictions: Predictions, view: BlockView) -> Change:
    """The common case: some undecided positions [B, W] get their predicted tokens, nothing else changes."""
    return Change(jnp.where(select, predictions.token, view.tokens), view.undecided & ~select)


class Form(Protocol):
    """What the form of the answer asks of a window; `samplers.constraints.constraint.Window` is one."""

    def allowed(self, ids: jax.Array) -> jax.Array:
        """Which of some tokens [n] fit at each position: [B, W, n] bool."""
        ...

    def mended(self, token: jax.Array) -> jax.Array:
        """Tokens [B, W] int32, each that does not fit replaced by one that does."""
        ...

    def joint(self, change: Change) -> Change:
        """The change without what does not fit together with the rest of it."""
        ...


class Rule:
    """Base of all unmasking rules; subclasses are pytrees (`dllm_jax.pytree`) whose numbers are traced leaves.

    Numbers are scalars, or [B] arrays for a value per row. State is a pytree of arrays with a leading batch axis.

    Most rules choose in `decide` which undecided positions are committed. One that `revises`, that is changes written
    tokens or masks them again, returns the new block from `change`; its tokens are final once the block is complete.

    The sampler makes sure that a generation ends: if a rule commits nothing, the most confident undecided position is
    committed. A rule whose forwards may commit nothing, or that revises, bounds its forwards by `most_steps` instead.
    """

    score_from: ScoreFrom = "raw"
    reads_hidden: bool = False  # whether `judge` is called
    reads_logits: bool = False  # whether `adjust` is called; only then do logits of a whole block exist
    revises: bool = False

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        """Raises DllmError when the rule's numbers make no sense with these lengths; the number of blocks is None
        where it differs by row."""

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        """State for `batch` rows of blocks of `width` at the start of a generation."""
        return ()

    def adjust(self, logits: jax.Array, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        """The logits [B, W, V] float32 that tokens and scores are taken from, and the new state. Called only for rules
        that set `reads_logits`."""
        return logits, state

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        """Which positions are committed, [B, W] bool (a subset of `view.undecided`), and the new state."""
        raise NotImplementedError

    def change(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[Change, Any]:
        """The block after this forward, and the new state. Only positions that are `view.undecided` or `view.written`
        may change."""
        select, state = self.decide(predictions, view, state)
        return committed(select, predictions, view), state

    def most_steps(self, view: BlockView) -> jax.Array | None:
        """[B] int32, the forwards on a block after which all that is undecided is committed and the row leaves it. None
        if every forward must commit something."""
        return None

    def forwards(self, undecided: int, num_blocks: int) -> tuple[int, int]:
        """Fewest and most forwards on a block, as far as the rule's numbers determine them.

        Args:
            undecided: the block's undecided positions when the row enters it.
            num_blocks: blocks of the row's generation.
        """
        most = self.most_steps(_view_entered(undecided, num_blocks))
        return 1, undecided if most is None else int(jnp.max(most))

    @property
    def may_idle(self) -> bool:
        """Whether forwards may commit nothing, and `most_steps` bounds them."""
        return self.most_steps(_view_entered(1, 1)) is not None

    def block_done(self, view: BlockView, left: jax.Array, state: Any) -> jax.Array:
        """[B] bool, whether a row may leave its block after this forward.

        Args:
            view: the block before it.
            left: [B] bool, whether positions are undecided after it.
            state: the new state.
        """
        return ~left

    def judge(self, denoiser: DenoiserLike, hidden: jax.Array, logits: jax.Array, best: Predictions) -> jax.Array:
        """Positions that are committed besides those of `decide`, [B, W] bool, by the model's hidden states. The
        sampler calls it for the active block, and for later ones if the rule `looks_ahead`; it drops positions that are
        not undecided, and those whose best token is the mask or a deferred one. A position that is committed this way
        gets its best token, never a drawn one.

        Args:
            hidden: [B, W, D], as `DenoiserLike.logits` takes them.
            logits: [B, W, V] float32, of these.
            best: the most probable tokens and their scores.
        """
        raise NotImplementedError

    def looks_ahead(self, cached: bool) -> bool:
        """Whether `judge` is called for later blocks as well, as far as a forward runs them.

        Args:
            cached: whether a cache policy reuses keys and values, in which tokens written ahead are still masks.
        """
        return False


def _view_entered(undecided: int, num_blocks: int) -> BlockView:
    """A row as it enters a block of this many positions, all undecided."""
    no, none = jnp.zeros((1, undecided), bool), jnp.zeros((1,), jnp.int32)
    entered, blocks = jnp.full((1,), undecided), jnp.full((1,), num_blocks)
    return BlockView(~no, no + none, none, none, entered, blocks, None, none, no + none, no, 0)


def predicted(
    denoiser: DenoiserLike,
    rule: Rule,
    sampling: Sampling,
    hidden: jax.Array,
    view: BlockView,
    state: Any,
    *,
    logits: jax.Array | None = None,
    simultaneous: int = 1,
    form: Form | None = None,
) -> tuple[Predictions, Any]:
    """What a rule receives of a block's hidden states [B, W, D], and its new state. Logits of the whole block exist
    only for rules that read them, and whatever such a rule makes of them, `Predictions.logprob` is the model's.

    Args:
        logits: [B, W, V] float32, of the hidden states, where the caller has them already.
        simultaneous: as in `Readout`.
        form: tokens and scores are of what fits it, which is all for None.
    """
    draw = None if sampling.temperature is None else functools.partial(view.draw, Purpose.TOKENS)
    tiled = functools.partial(dataclasses.replace, simultaneous=simultaneous)
    if rule.reads_logits and logits is None:
        logits = denoiser.logits(hidden)
    own = tiled(readout(denoiser, hidden) if logits is None else given(logits))
    scores = own
    if rule.reads_logits:
        assert logits is not None
        fitting = logits
        if form is not None:  # a rule's memory is of what may be written
            fitting = jnp.where(form.allowed(jnp.arange(logits.shape[-1])), logits, -jnp.inf)
        adjusted, state = rule.adjust(fitting, view, state)
        scores = tiled(given(adjusted))
    allowed = None if form is None else form.allowed
    found = predict(scores, sampling, mask_id=denoiser.mask_id, score_from=rule.score_from, draw=draw, allowed=allowed)
    if form is not None:
        found = dataclasses.replace(found, token=form.mended(found.token))
    if sampling.target is not None:
        token = sampling.target_at(view.positions)
        found = dataclasses.replace(found, token=token, logprob=logprobs_of(own, token))
    elif logits is not None and rule.reads_logits:
        found = dataclasses.replace(found, logprob=logprob_of(logits, found.token))
    return found, state


def judged(
    denoiser: DenoiserLike,
    rule: Rule,
    sampling: Sampling,
    hidden: jax.Array,
    logits: jax.Array,
    undecided: jax.Array,
    positions: jax.Array,
    form: Form | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Of some undecided positions [B, W] those that a rule judges final by hidden states [B, W, D] and their logits
    [B, W, V]: the best token there, -1 elsewhere, [B, W] int32; and the best tokens' log-probabilities, float32.

    Args:
        positions: [B, W] int32, relative to the start of the generation.
        form: as in `predicted`.
    """
    plain, allowed = Sampling(suppress=sampling.suppress, defer=sampling.defer), None if form is None else form.allowed
    best = predict(given(logits), plain, mask_id=denoiser.mask_id, score_from="raw", draw=None, allowed=allowed)
    final = rule.judge(denoiser, hidden, logits, best) & undecided & ~best.mask_wins & best.finite
    if plain.defer is not None:
        final &= ~jnp.isin(best.token, plain.defer)
    token, logprob = best.token, best.logprob
    if sampling.target is not None:
        token = sampling.target_at(positions)
        logprob = logprob_of(logits, token)
    return jnp.where(final, token, -1), logprob


def progressing(rule: Rule, change: Change, predictions: Predictions, view: BlockView) -> tuple[Change, jax.Array]:
    """The change, completed so that every generation ends, and the rows [B] bool whose block ends with it: see
    `Rule`."""
    most = rule.most_steps(view)
    if most is None:
        idle = ~jnp.any(view.undecided & ~change.undecided, axis=1, keepdims=True)
        best = jnp.argmax(jnp.where(view.undecided, predictions.confidence, -1.0), axis=1)[:, None]
        forced = idle & view.undecided & (jnp.arange(view.undecided.shape[1]) == best)
        return Change(jnp.where(forced, predictions.token, change.tokens), change.undecided & ~forced), idle[
            :, 0
        ] & False
    last = view.step + 1 >= most
    forced = last[:, None] & change.undecided
    tokens = jnp.where(forced, jnp.where(view.undecided, predictions.token, view.tokens), change.tokens)
    return Change(tokens, change.undecided & ~forced), last


class Decision(NamedTuple):
    """What became of a block in a forward.

    Attributes:
        predictions: what the rule received.
        change: the block after it.
        logprobs: [B, W] float32, log-probabilities of what was written; NaN for what was not predicted.
        last: [B] bool, rows whose block ends with this forward.
        state: of the rule.
        logits: [B, W, V] float32, where they were made.
    """

    predictions: Predictions
    change: Change
    logprobs: jax.Array
    last: jax.Array
    state: Any
    logits: jax.Array | None


def decided(
    denoiser: DenoiserLike,
    rule: Rule,
    sampling: Sampling,
    hidden: jax.Array,
    view: BlockView,
    state: Any,
    active: jax.Array,
    *,
    logits: jax.Array | None = None,
    form: Form | None = None,
) -> Decision:
    """What a rule makes of a block's hidden states [B, W, D], completed so that every generation ends.

    Args:
        active: [B] bool, rows in which the rule may judge by hidden states.
        logits: as in `predicted`; made here for rules that read logits or hidden states.
        form: what is written must fit it, together; None is no form.
    """
    if logits is None and (rule.reads_hidden or rule.reads_logits):
        logits = denoiser.logits(hidden)
    predictions, state = predicted(denoiser, rule, sampling, hidden, view, state, logits=logits, form=form)
    change, state = rule.change(predictions, view, state)
    change, last = progressing(rule, change, predictions, view)
    logprobs = jnp.where(change.tokens == predictions.token, predictions.logprob, jnp.nan)
    if rule.reads_hidden and logits is not None:
        asked = view.undecided & active[:, None]
        best, sure = judged(denoiser, rule, sampling, hidden, logits, asked, view.positions, form)
        change = Change(jnp.where(best >= 0, best, change.tokens), change.undecided & (best < 0))
        logprobs = jnp.where(best >= 0, sure, logprobs)
    if form is not None:
        change = form.joint(change)
    return Decision(predictions, change, logprobs, last, state, logits)


def per_row(value: Number) -> jax.Array:
    """A scalar or [B] number as something that broadcasts against [B, W]."""
    return jnp.asarray(value)[..., None]


def rank(score: jax.Array, candidates: jax.Array) -> jax.Array:
    """0 for the largest score among the candidates, 1 for the next ...; ties go to the lower position.

    [B, W] -> [B, W] int32; all other positions rank after them. Counting comparisons costs W^2
    cheap operations and no sort.
    """
    score = jnp.where(candidates, score, -jnp.inf)
    index = jnp.arange(score.shape[-1])
    mine, other = score[..., :, None], score[..., None, :]
    earlier = index[None, :] < index[:, None]
    tie_first = jnp.where(candidates[..., :, None] == candidates[..., None, :], earlier, candidates[..., None, :])
    return jnp.sum((other > mine) | ((other == mine) & tie_first), axis=-1, dtype=jnp.int32)


def not_masks(predictions: Predictions, undecided: jax.Array) -> jax.Array:
    """The undecided positions whose best token is not the mask token itself, [B, W] bool; if there are none, the most
    confident undecided position alone, so that a step can always commit something."""
    free = undecided & ~predictions.mask_wins
    stuck = undecided & ~jnp.any(free, axis=-1, keepdims=True)
    return free | (stuck & (rank(predictions.confidence, stuck) == 0))


def error_of(predictions: Predictions, proxy: Proxy) -> jax.Array:
    """EB-Sampler's error proxy (section 3 of arXiv 2505.24857), [B, W]: smaller is more confident."""
    match proxy:
        case "confidence":
            return -predictions.max_probability
        case "entropy":
            return predictions.entropy
        case "margin":
            return -predictions.margin


def ordering_of(predictions: Predictions, view: BlockView, proxy: ProxyOrRandom) -> jax.Array:
    """What orders the positions, [B, W], the smallest first: an error proxy, or for "random" a draw.

    Raises:
        DllmError: for "random" when the generation was started without a key.
    """
    return view.uniform() if proxy == "random" else error_of(predictions, proxy)
