"""Log-likelihoods of many answers: thousands of pairs of prompt and answer through a few compiled programs.

    scores = score(model, [(prompt_ids, answer_ids), ...], seeds=[...])    # of `samplers.likelihood.estimators`

A row of a batch is one masked copy of one answer, so short answers fill batches as well as long ones. Copies of an
answer that came out with the same masks are run once: they differ in nothing.
"""

import collections
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import numpy as np
from tqdm import tqdm

from dllm_jax import DllmError, Model
from dllm_jax.models.denoiser import DenoiserLike, Span
from dllm_jax.parallel.sharding import batch_sharding, check_splits
from samplers.checks import check_choice, check_length, check_number, check_whole
from samplers.likelihood import estimators
from samplers.likelihood.estimators import check_samples, draw_masks, greedy, least_prompt, masked_logprobs
from samplers.text.prompts import bucket_length, pad_prompts

Estimator = Literal["llada", "llada-official", "dream", "exact", "left-to-right", "pseudo"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)

T = TypeVar("T")

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of the answer behind it."""


@dataclasses.dataclass(frozen=True)
class Score:
    """What the model thinks of an answer.

    Attributes:
        log_likelihood: the estimate of log p(answer | prompt), in nats.
        is_greedy: whether decoding the surest position first, one per forward, gives the answer; False if not asked.
        forwards: of the model that this took, a guided one counted once.
        stderr: standard error of `log_likelihood` over draws of masks, in nats, from the spread of the batches of
            `mc_batch` copies, or of the copies where there is one batch; 0 where nothing is drawn, None where a single
            copy says nothing of it.
    """

    log_likelihood: float
    is_greedy: bool
    forwards: int
    stderr: float | None = None


def score(model: Model, pairs: Sequence[Pair], *, seeds: Sequence[int], **options: Any) -> list[Score]:
    """Scores of all pairs in their order; arguments and errors are those of `score_each`."""
    found = dict(score_each(model, pairs, seeds=seeds, **options))
    return [found[index] for index in range(len(pairs))]


def score_each(
    model: Model,
    pairs: Sequence[Pair],
    *,
    seeds: Sequence[int],
    samples: int = 128,
    mc_batch: int = 16,
    estimator: Estimator = "llada",
    guidance: float = 0.0,
    greedy: bool = False,
    batch_size: int = 32,
    max_length: int | None = None,
    progress: bool | None = None,
) -> Iterator[tuple[int, Score]]:
    """Scores pairs, and hands each out as soon as it is known, with its number in `pairs`: the longest first.

    A pair's draws depend on its seed alone, not on other pairs, batch_size or order, so its score is the same up to the
    rounding of forwards in batches of other shapes. Answers to one question should share a seed: their masks are then
    alike, and the noise of their difference smaller.

    Args:
        seeds: a whole number for each pair.
        samples: masked copies of each answer; of "exact", the most that an answer may need. "left-to-right" and
            "pseudo" draw none.
        mc_batch: copies that are stratified together; divides samples.
        estimator: as in `likelihood.draw_masks`; or "exact", the bound itself, by every mask that an answer can have:
            2^A - 1 of A tokens. "left-to-right" is the chain rule, the sum of log p(token | prompt, tokens before it),
            with what follows masked; "pseudo" the sum of log p(token | prompt, all other tokens): A forwards each.
        guidance: scale of classifier-free guidance, with the whole prompt masked; 0 runs without.
        greedy: also find out whether greedy decoding gives the answer, in at most as many forwards as it has tokens.
        batch_size: rows of a forward, and pairs that are decoded together.
        max_length: longest sequence, "dream"'s end token included: prompts are cut on the left until they fit. None is
            the model's context, and what does not fit there is refused.
        progress: a progress bar over pairs; by default where someone is watching.

    Raises:
        DllmError: for bad pairs or numbers; before anything is compiled.

    Warns:
        RuntimeWarning: at the end, when log-likelihoods were not numbers, naming the first pair.
    """
    if not isinstance(model, Model):
        raise DllmError(f"model is of type {type(model).__name__}; load one by dllm_jax.load")
    check_choice("estimator", estimator, ESTIMATORS)
    drawn = estimator if estimator in estimators.ESTIMATORS else "llada"
    check_samples(drawn, samples=samples, mc_batch=mc_batch)
    check_number("guidance", guidance, 0)
    check_length("batch_size", batch_size)
    if max_length is not None:
        check_whole("max_length", max_length, 1, model.config.max_length)
    if model.layout is not None:
        check_splits(model.layout.mesh, batch_size, "rows of a batch")
    plan = _Plan(model, samples, mc_batch, estimator, guidance or None, greedy, batch_size)
    checked = _checked(plan, pairs, seeds, max_length)
    return plan.run(checked, progress)


# Pairs ---------------------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    """One pair: its number and seed, its sequence [T] int32, and how many tokens of that are prompt and answer."""

    number: int
    seed: int
    tokens: np.ndarray
    prompt: int
    answer: int

    @property
    def span(self) -> slice:
        return slice(self.prompt, self.prompt + self.answer)


def _checked(plan: "_Plan", pairs: Sequence[Pair], seeds: Sequence[int], max_length: int | None) -> list[_Pair]:
    if len(seeds) != len(pairs):
        raise DllmError(f"there are {len(seeds)} seeds for {len(pairs)} pairs; give each pair one")
    for number, seed in enumerate(seeds):
        if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:  # JAX drops the bits above
            raise DllmError(f"the seed of pair {number} is {seed!r}; it must be a whole number from 0 to 2^32 - 1")
    numbered = enumerate(zip(seeds, pairs, strict=True))
    return [_pair(plan, number, int(seed), pair, max_length) for number, (seed, pair) in numbered]


def _pair(plan: "_Plan", number: int, seed: int, pair: Pair, max_length: int | None) -> _Pair:
    if isinstance(pair, str | bytes) or not hasattr(pair, "__len__") or len(pair) != 2:
        raise DllmError(f"pair {number} is no pair of a prompt and an answer, both token ids")
    prompt, answer = _ids(plan.model, number, "prompt", pair[0]), _ids(plan.model, number, "answer", pair[1])
    denoiser, least = plan.model.denoiser, least_prompt(plan.model.denoiser, plan.estimator)
    if not answer.size:
        raise DllmError(f"the answer of pair {number} is empty; give at least one token")
    if prompt.size < least:
        raise DllmError(f"the prompt of pair {number} is empty; give at least one token")
    if plan.estimator == "exact" and 2**answer.size - 1 > plan.samples:
        needs = f"the answer of pair {number} has {answer.size} tokens, so {2**answer.size - 1} masks"
        raise DllmError(f"{needs}, and samples is {plan.samples}; raise it, or use another estimator")
    end = [denoiser.eos_id] if plan.estimator == "dream" else []
    limit = plan.model.config.max_length if max_length is None else max_length
    room = limit - answer.size - len(end)
    if room < (prompt.size if max_length is None else least):
        way_out = "shorten it, or let max_length cut its prompt" if max_length is None else "shorten its answer"
        total = prompt.size + answer.size + len(end)
        raise DllmError(f"pair {number} has {total} tokens and there is room for {limit}; {way_out}")
    prompt = prompt[max(prompt.size - room, 0) :]
    return _Pair(number, seed, np.concatenate([prompt, answer, end]).astype(np.int32), prompt.size, answer.size)


def _ids(model: Model, number: int, what: str, ids: Any) -> np.ndarray:
    """Token ids as an array of whole numbers."""
    found = np.asarray(ids)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise DllmError(f"the {what} of pair {number} is no list of token ids; encode it by the model's tokenizer")
    vocab_size = model.config.vocab_size
    if outside := found[(found < 0) | (found >= vocab_size)].tolist():
        raise DllmError(
            f"the {what} of pair {number} has token {outside[0]}, outside the vocabulary of {vocab_size} tokens"
        )
    if model.denoiser.mask_id in found:
        raise DllmError(f"the {what} of pair {number} contains the mask token; leave it out")
    return found


# Masks ---------------------------------------------------------------------------------------------------------------


class _Masks(NamedTuple):
    """The different masks of an answer of A tokens, and what the estimate is made of: its copies.

    Attributes:
        masked: [n, A] bool, a forward each.
        scored: [n, A] bool, the tokens whose log-probabilities are summed.
        copies: [c] int, the mask of each copy; n for one without any, whose sum is 0.
        weights: [c] float64, what the sum of each copy is multiplied by.
        batches: of equally many copies, drawn independently; 0 where nothing was drawn.
    """

    masked: np.ndarray
    scored: np.ndarray
    copies: np.ndarray
    weights: np.ndarray
    batches: int = 0

    def estimate(self, sums: np.ndarray) -> tuple[float, float | None]:
        """The log-likelihood and its standard error, see `Score`, from the sum under each mask [n] float64."""
        parts = self.weights * np.append(sums, 0.0)[self.copies]
        total = float(parts.sum())
        if not self.batches:
            return total, 0.0
        drawn = parts.reshape(self.batches, -1).sum(axis=1) if self.batches > 1 else parts
        return total, math.sqrt(len(drawn)) * float(drawn.std(ddof=1)) if len(drawn) > 1 else None


@functools.partial(jax.jit, static_argnames=("width", "num_samples", "batch_size", "estimator"))
def _drawn(seeds: jax.Array, lengths: jax.Array, *, width: int, **options: Any) -> tuple[jax.Array, jax.Array]:
    """`draw_masks` for every pair, of the keys `jax.random.key(seed)`."""
    draw = lambda seed, length: draw_masks(jax.random.key(seed), length, width, **options)
    return jax.vmap(draw)(seeds, lengths)


def _different(masked: np.ndarray, ratio: np.ndarray, batches: int) -> _Masks:
    """Drawn copies [samples, A], equal ones run once, and not at all those without a mask, unless all are so."""
    _, first, copies = np.unique(np.packbits(masked, axis=1), axis=0, return_index=True, return_inverse=True)
    different, copies = masked[first], copies.reshape(-1)
    runs = different.any(axis=1) if masked.any() else np.ones(len(different), bool)
    numbers = np.where(runs, np.cumsum(runs) - 1, runs.sum())
    weights = 1.0 / (ratio.astype(np.float64) * len(masked))
    return _Masks(different[runs], different[runs], numbers[copies], weights, batches)


@functools.cache
def _every(length: int) -> _Masks:
    """All masks of an answer, with the weights that LLaDA's copies have on average: 1 / (n C(A, n)) of n tokens."""
    masked = np.asarray(list(itertools.product((False, True), repeat=length))[1:])
    counts = masked.sum(axis=1)
    weights = np.asarray([1.0 / (n * math.comb(length, n)) for n in counts.tolist()])
    return _Masks(masked, masked, np.arange(len(masked)), weights)


def _one_by_one(length: int, estimator: str) -> _Masks:
    """Every token by itself: with what follows masked as well ("left-to-right"), or alone ("pseudo")."""
    scored = np.eye(length, dtype=bool)
    masked = np.triu(np.ones((length, length), bool)) if estimator == "left-to-right" else scored
    return _Masks(masked, scored, np.arange(length), np.ones(length))


# Forwards ------------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A row of a forward: a pair under one of its masks, [A] bool, of which some tokens are scored, [A] bool."""

    pair: _Pair
    number: int
    masked: np.ndarray
    scored: np.ndarray


@dataclasses.dataclass
class _Tally:
    """What is known of a pair so far: the sums [n] float64 of rows that came back, and how many are still out."""

    masks: _Masks
    is_greedy: bool
    forwards: int
    sums: np.ndarray = dataclasses.field(init=False)
    out: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.out = len(self.masks.masked)
        self.forwards += self.out
        self.sums = np.zeros(self.out)

    def take(self, number: int, value: float) -> bool:
        """Puts a row's sum in its place; whether it was the last."""
        self.sums[number] = value
        self.out -= 1
        return not self.out


@functools.partial(jax.jit, static_argnames="width")
def _sums(
    denoiser: DenoiserLike,
    tokens: jax.Array,
    masked: jax.Array,
    lengths: jax.Array,
    prompts: jax.Array,
    starts: jax.Array,
    scored: jax.Array,
    guidance: Any,
    *,
    width: int,
) -> jax.Array:
    options: Any = {"span": Span(starts, width), "prompt_lengths": prompts, "guidance": guidance, "scored": scored}
    return masked_logprobs(denoiser, tokens, masked, lengths, **options)


_greedy = jax.jit(greedy)

AHEAD = 2  # batches that are on the device while the next is made


@dataclasses.dataclass
class _Plan:
    """How pairs are scored: the arguments of `score_each`, and what follows from them.

    Attributes:
        guidance: None without.
        widths: for each length of sequences, how many of their positions are scored: room for the longest answer among
            pairs that are no longer, so that there is one program for each length.
    """

    model: Model
    samples: int
    mc_batch: int
    estimator: Estimator
    guidance: float | None
    greedy: bool
    batch_size: int
    widths: dict[int, int] = dataclasses.field(default_factory=dict)

    def run(self, pairs: Sequence[_Pair], progress: bool | None) -> Iterator[tuple[int, Score]]:
        """The longest first: where memory is short, that shows at once; and rows of a batch are nearly of a length."""
        pairs, broken = sorted(pairs, key=lambda pair: len(pair.tokens), reverse=True), list[int]()
        widest = itertools.accumulate((pair.answer for pair in reversed(pairs)), max)
        self.widths = {self._room(pair): width for pair, width in zip(reversed(pairs), widest, strict=True)}
        tallies: dict[int, _Tally] = {}
        hide = None if progress is None else not progress
        with tqdm(desc="scoring", unit="pair", total=len(pairs), disable=hide) as bar:
            for row, value in self._answers(_parts(self._rows(pairs, tallies), self.batch_size)):
                number = row.pair.number
                if tallies[number].take(row.number, value):
                    tally = tallies.pop(number)
                    total, stderr = tally.masks.estimate(tally.sums)
                    broken += [number] if math.isnan(total) else []
                    bar.update()
                    yield number, Score(total, tally.is_greedy, tally.forwards, stderr)
        if broken:
            others = f" and of {len(broken) - 1} others" if len(broken) > 1 else ""
            advice = "the model's logits were not finite; load it in float32, or check its weights"
            warnings.warn(f"the log-likelihood of pair {broken[0]}{others} is no number: {advice}", RuntimeWarning, 2)

    def _room(self, pair: _Pair) -> int:
        """Positions of the sequences that a pair is run in."""
        return min(bucket_length(len(pair.tokens)), self.model.config.max_length)

    def _rows(self, pairs: Iterable[_Pair], tallies: dict[int, _Tally]) -> Iterator[_Row]:
        for part in _parts(pairs, self.batch_size):
            decoded = self._decoded(part) if self.greedy else [(False, 0)] * len(part)
            for pair, (is_greedy, forwards), masks in zip(part, decoded, self._masks(part), strict=True):
                tallies[pair.number] = _Tally(masks, is_greedy, forwards)
                each = zip(masks.masked, masks.scored, strict=True)
                yield from (_Row(pair, number, *row) for number, row in enumerate(each))

    def _masks(self, pairs: list[_Pair]) -> list[_Masks]:
        if self.estimator == "exact":
            return [_every(pair.answer) for pair in pairs]
        if self.estimator in ("left-to-right", "pseudo"):
            return [_one_by_one(pair.answer, self.estimator) for pair in pairs]
        full = self._filled(pairs)
        masked, ratio = _drawn(
            np.asarray([pair.seed for pair in full], np.uint32),
            np.asarray([pair.answer for pair in full], np.int32),
            width=_power(max(pair.answer for pair in pairs)),
            num_samples=self.samples,
            batch_size=self.mc_batch,
            estimator=self.estimator,
        )
        own = zip(pairs, np.asarray(masked), np.asarray(ratio), strict=False)
        batches = lambda pair: 0 if pair.answer == 1 and self.estimator != "dream" else self.samples // self.mc_batch
        return [_different(copies[:, : pair.answer], ratios, batches(pair)) for pair, copies, ratios in own]

    def _decoded(self, pairs: list[_Pair]) -> list[tuple[bool, int]]:
        """Of each pair whether greedy decoding gives its answer, and in how many forwards."""
        full = self._filled(pairs)
        prompts, prompt_lengths = pad_prompts([pair.tokens[: pair.prompt].tolist() for pair in full])
        answers, lengths = pad_prompts(
            [pair.tokens[pair.span].tolist() for pair in full], _power(max(pair.answer for pair in pairs))
        )
        arrays = self._placed((prompts, answers, prompt_lengths, lengths))
        right, forwards = jax.device_get(_greedy(self.model.denoiser, *arrays, guidance=self.guidance))
        return list(zip(right.tolist(), forwards.tolist(), strict=True))[: len(pairs)]

    def _answers(self, batches: Iterable[list[_Row]]) -> Iterator[tuple[_Row, float]]:
        """Every row with its sum of log-probabilities."""
        running = collections.deque[tuple[list[_Row], jax.Array]]()
        for batch in batches:
            running.append((batch, self._forward(batch)))
            if len(running) > AHEAD:
                yield from _fetched(*running.popleft())
        for batch, sums in running:
            yield from _fetched(batch, sums)

    def _forward(self, rows: list[_Row]) -> jax.Array:
        room, rows = self._room(rows[0].pair), self._filled(rows)
        denoiser = self.model.denoiser
        width = min(_power(self.widths[room]), room - denoiser.min_prompt_length)
        tokens, (masked, scored) = np.zeros((len(rows), room), np.int32), np.zeros((2, len(rows), room), bool)
        for place, (pair, _, hidden, summed) in enumerate(rows):
            tokens[place, : len(pair.tokens)] = pair.tokens
            masked[place, pair.span], scored[place, pair.span] = hidden, summed
        lengths = np.asarray([len(row.pair.tokens) for row in rows], np.int32)
        prompts = np.asarray([row.pair.prompt for row in rows], np.int32)
        arrays = self._placed((tokens, masked, lengths, prompts, np.minimum(prompts, room - width), scored))
        return _sums(denoiser, *arrays, self.guidance, width=width)

    def _filled(self, rows: list[T]) -> list[T]:
        """As many as a batch has; the last one's room is filled by what is in it already."""
        return rows + rows[:1] * (self.batch_size - len(rows))

    def _placed(self, arrays: Any) -> Any:
        layout = self.model.layout
        return arrays if layout is None else jax.device_put(arrays, batch_sharding(layout.mesh, layout.rules))


def _fetched(rows: list[_Row], sums: jax.Array) -> Iterator[tuple[_Row, float]]:
    return zip(rows, jax.device_get(sums).tolist(), strict=False)


def _parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of so many items, the last one shorter."""
    source = iter(items)
    while part := list(itertools.islice(source, size)):
        yield part


def _power(count: int) -> int:
    """The next power of two, so that few widths are ever compiled."""
    return 1 << (count - 1).bit_length()
