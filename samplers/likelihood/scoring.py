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
from samplers.likelihood.estimators import (
    DRAWN_ESTIMATORS,
    check_samples,
    decode_greedily,
    draw_masks,
    least_prompt,
    masked_logprobs,
)
from samplers.text.prompts import bucket_length, next_power, pad_prompts

Estimator = Literal["llada", "llada-official", "dream", "exact", "left-to-right", "pseudo"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)

T = TypeVar("T")

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of the answer after it."""


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of an answer.

    Attributes:
        log_likelihood: the estimate of log p(answer | prompt), in nats.
        is_greedy: whether decoding the most confident position first, one per forward, gives the answer; False without
            `greedy`.
        forwards: of the model; a guided one counts once.
        stderr: standard error of `log_likelihood` over draws of masks, in nats, from the spread of the batches of
            `mc_batch` copies, or of the copies of a single batch; 0 where nothing is drawn, None for a single copy.
    """

    log_likelihood: float
    is_greedy: bool
    forwards: int
    stderr: float | None = None


def score(model: Model, pairs: Sequence[Pair], *, seeds: Sequence[int], **options: Any) -> list[Score]:
    """Scores of all pairs in their order; arguments and errors as of `score_each`."""
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
    """Scores pairs and yields each score as soon as it is known, with its number in `pairs`: the longest first.

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
        greedy: also check whether greedy decoding gives the answer, in at most as many forwards as it has tokens.
        batch_size: rows of a forward, and pairs that are decoded together.
        max_length: longest sequence, "dream"'s end token included: prompts are cut on the left until they fit. None is
            the model's context, and what does not fit there is refused.
        progress: a progress bar over pairs; by default on a terminal.

    Raises:
        DllmError: for bad pairs or numbers; before anything is compiled.

    Warns:
        RuntimeWarning: at the end, for log-likelihoods that are not finite; it names the first pair.
    """
    if not isinstance(model, Model):
        raise DllmError(f"model is of type {type(model).__name__}; load one by dllm_jax.load")
    check_choice("estimator", estimator, ESTIMATORS)
    drawn = estimator if estimator in DRAWN_ESTIMATORS else "llada"
    check_samples(drawn, samples=samples, mc_batch=mc_batch)
    check_number("guidance", guidance, 0)
    check_length("batch_size", batch_size)
    if max_length is not None:
        check_whole("max_length", max_length, 1, model.config.max_length)
    if model.config.has_causal_context:
        if estimator != "left-to-right":
            what = f"the likelihood of a {model.config.family} model is that of its causal reading"
            raise DllmError(f"{what}; set estimator to left-to-right, which is exact")
        model = dataclasses.replace(model, config=model.denoiser.as_causal.config)
    if model.layout is not None:
        check_splits(model.layout.mesh, batch_size, "rows of a batch")
    scorer = _Scorer(model, samples, mc_batch, estimator, guidance or None, greedy, batch_size)
    return scorer.run(_check_pairs(scorer, pairs, seeds, max_length), progress)


# Pairs ---------------------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    """A pair: its number and seed, its sequence [T] int32, and how many of its tokens are prompt and answer."""

    number: int
    seed: int
    tokens: np.ndarray
    prompt: int
    answer: int

    @property
    def span(self) -> slice:
        return slice(self.prompt, self.prompt + self.answer)


def _check_pairs(scorer: "_Scorer", pairs: Sequence[Pair], seeds: Sequence[int], max_length: int | None) -> list[_Pair]:
    if len(seeds) != len(pairs):
        raise DllmError(f"there are {len(seeds)} seeds for {len(pairs)} pairs; give each pair one")
    for number, seed in enumerate(seeds):
        if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:  # JAX drops the bits above
            raise DllmError(f"the seed of pair {number} is {seed!r}; it must be a whole number from 0 to 2^32 - 1")
    numbered = enumerate(zip(seeds, pairs, strict=True))
    return [_check_pair(scorer, number, int(seed), pair, max_length) for number, (seed, pair) in numbered]


def _check_pair(scorer: "_Scorer", number: int, seed: int, pair: Pair, max_length: int | None) -> _Pair:
    if isinstance(pair, str | bytes) or not hasattr(pair, "__len__") or len(pair) != 2:
        raise DllmError(f"pair {number} is no pair of a prompt and an answer, both token ids")
    prompt, answer = (
        _check_ids(scorer.model, number, "prompt", pair[0]),
        _check_ids(scorer.model, number, "answer", pair[1]),
    )
    denoiser, least = scorer.model.denoiser, least_prompt(scorer.model.denoiser, scorer.estimator)
    if not answer.size:
        raise DllmError(f"the answer of pair {number} is empty; give at least one token")
    if prompt.size < least:
        raise DllmError(f"the prompt of pair {number} is empty; give at least one token")
    if scorer.estimator == "exact" and 2**answer.size - 1 > scorer.samples:
        needs = f"the answer of pair {number} has {answer.size} tokens, so {2**answer.size - 1} masks"
        raise DllmError(f"{needs}, and samples is {scorer.samples}; raise it, or use another estimator")
    end = [denoiser.eos_id] if scorer.estimator == "dream" else []
    limit = scorer.model.config.max_length if max_length is None else max_length
    room = limit - answer.size - len(end)
    if room < (prompt.size if max_length is None else least):
        way_out = "shorten it, or let max_length cut its prompt" if max_length is None else "shorten its answer"
        total = prompt.size + answer.size + len(end)
        raise DllmError(f"pair {number} has {total} tokens and there is room for {limit}; {way_out}")
    prompt = prompt[max(prompt.size - room, 0) :]
    return _Pair(number, seed, np.concatenate([prompt, answer, end]).astype(np.int32), prompt.size, answer.size)


def _check_ids(model: Model, number: int, what: str, ids: Any) -> np.ndarray:
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
    """The distinct masks of an answer of A tokens, and the copies that the estimate is made of.

    Attributes:
        masked: [n, A] bool, a forward each.
        scored: [n, A] bool, the tokens whose log-probabilities are summed.
        copies: [c] int, the number of each copy's mask; n for a copy without one, whose sum is 0.
        weights: [c] float64, factors of the copies' sums.
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
def _draw(seeds: jax.Array, lengths: jax.Array, *, width: int, **options: Any) -> tuple[jax.Array, jax.Array]:
    """`draw_masks` for every pair, of the keys `jax.random.key(seed)`."""
    draw = lambda seed, length: draw_masks(jax.random.key(seed), length, width, **options)
    return jax.vmap(draw)(seeds, lengths)


def _merge_copies(masked: np.ndarray, ratio: np.ndarray, batches: int) -> _Masks:
    """Drawn copies [samples, A]: equal ones are run once, those without a mask not at all unless all are."""
    _, first, copies = np.unique(np.packbits(masked, axis=1), axis=0, return_index=True, return_inverse=True)
    different, copies = masked[first], copies.reshape(-1)
    runs = different.any(axis=1) if masked.any() else np.ones(len(different), bool)
    numbers = np.where(runs, np.cumsum(runs) - 1, runs.sum())
    weights = 1.0 / (ratio.astype(np.float64) * len(masked))
    return _Masks(different[runs], different[runs], numbers[copies], weights, batches)


@functools.cache
def _all_masks(length: int) -> _Masks:
    """All masks of an answer, with the mean weights of LLaDA's copies: 1 / (n C(A, n)) for n tokens."""
    masked = np.asarray(list(itertools.product((False, True), repeat=length))[1:])
    counts = masked.sum(axis=1)
    weights = np.asarray([1.0 / (n * math.comb(length, n)) for n in counts.tolist()])
    return _Masks(masked, masked, np.arange(len(masked)), weights)


def _single_tokens(length: int, estimator: str) -> _Masks:
    """One mask per scored token: with all tokens after it ("left-to-right"), or alone ("pseudo")."""
    scored = np.eye(length, dtype=bool)
    masked = np.triu(np.ones((length, length), bool)) if estimator == "left-to-right" else scored
    return _Masks(masked, scored, np.arange(length), np.ones(length))


# Forwards ------------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A row of a forward: a pair, the number of one of its masks, the mask [A] bool, and its scored tokens [A] bool."""

    pair: _Pair
    number: int
    masked: np.ndarray
    scored: np.ndarray


@dataclasses.dataclass
class _Progress:
    """A pair that is being scored: the sums [n] float64 of its rows, and how many are still missing."""

    masks: _Masks
    is_greedy: bool
    forwards: int
    sums: np.ndarray = dataclasses.field(init=False)
    missing: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.masks.masked)
        self.forwards += self.missing
        self.sums = np.zeros(self.missing)

    def take(self, number: int, value: float) -> bool:
        """Stores a row's sum; returns whether it was the last."""
        self.sums[number] = value
        self.missing -= 1
        return not self.missing


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


_greedy = jax.jit(decode_greedily)

BATCHES_IN_FLIGHT = 2  # batches on the device while the next is made


@dataclasses.dataclass
class _Scorer:
    """Scores pairs by the arguments of `score_each`.

    Attributes:
        guidance: None for none.
        widths: for each length of sequences, how many of their positions are scored: enough for the longest answer
            among pairs that are no longer, so that there is one program for each length.
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
        """Yields scores, the longest pairs first: a lack of memory shows at once, and batches have little padding."""
        pairs, broken = sorted(pairs, key=lambda pair: len(pair.tokens), reverse=True), list[int]()
        widest = itertools.accumulate((pair.answer for pair in reversed(pairs)), max)
        self.widths = {self._room(pair): width for pair, width in zip(reversed(pairs), widest, strict=True)}
        started: dict[int, _Progress] = {}
        hide = None if progress is None else not progress
        with tqdm(desc="scoring", unit="pair", total=len(pairs), disable=hide) as bar:
            for row, value in self._run_batches(_batches(self._rows(pairs, started), self.batch_size)):
                number = row.pair.number
                if started[number].take(row.number, value):
                    progressed = started.pop(number)
                    total, stderr = progressed.masks.estimate(progressed.sums)
                    broken += [number] if math.isnan(total) else []
                    bar.update()
                    yield number, Score(total, progressed.is_greedy, progressed.forwards, stderr)
        if broken:
            others = f" and of {len(broken) - 1} others" if len(broken) > 1 else ""
            advice = "the model's logits were not finite; load it in float32, or check its weights"
            warnings.warn(f"the log-likelihood of pair {broken[0]}{others} is no number: {advice}", RuntimeWarning, 2)

    def _room(self, pair: _Pair) -> int:
        """Length of the sequences that a pair is run in."""
        return min(bucket_length(len(pair.tokens)), self.model.config.max_length)

    def _rows(self, pairs: Iterable[_Pair], started: dict[int, _Progress]) -> Iterator[_Row]:
        for part in _batches(pairs, self.batch_size):
            decoded = self._decode_greedily(part) if self.greedy else [(False, 0)] * len(part)
            for pair, (is_greedy, forwards), masks in zip(part, decoded, self._masks(part), strict=True):
                started[pair.number] = _Progress(masks, is_greedy, forwards)
                each = zip(masks.masked, masks.scored, strict=True)
                yield from (_Row(pair, number, *row) for number, row in enumerate(each))

    def _masks(self, pairs: list[_Pair]) -> list[_Masks]:
        if self.estimator == "exact":
            return [_all_masks(pair.answer) for pair in pairs]
        if self.estimator in ("left-to-right", "pseudo"):
            return [_single_tokens(pair.answer, self.estimator) for pair in pairs]
        full = self._fill(pairs)
        masked, ratio = _draw(
            np.asarray([pair.seed for pair in full], np.uint32),
            np.asarray([pair.answer for pair in full], np.int32),
            width=next_power(max(pair.answer for pair in pairs)),
            num_samples=self.samples,
            batch_size=self.mc_batch,
            estimator=self.estimator,
        )
        own = zip(pairs, np.asarray(masked), np.asarray(ratio), strict=False)
        batches = lambda pair: 0 if pair.answer == 1 and self.estimator != "dream" else self.samples // self.mc_batch
        return [_merge_copies(copies[:, : pair.answer], ratios, batches(pair)) for pair, copies, ratios in own]

    def _decode_greedily(self, pairs: list[_Pair]) -> list[tuple[bool, int]]:
        """For each pair whether greedy decoding gives its answer, and in how many forwards."""
        full = self._fill(pairs)
        prompts, prompt_lengths = pad_prompts([pair.tokens[: pair.prompt].tolist() for pair in full])
        answers, lengths = pad_prompts(
            [pair.tokens[pair.span].tolist() for pair in full], next_power(max(pair.answer for pair in pairs))
        )
        arrays = self._place((prompts, answers, prompt_lengths, lengths))
        right, forwards = jax.device_get(_greedy(self.model.denoiser, *arrays, guidance=self.guidance))
        return list(zip(right.tolist(), forwards.tolist(), strict=True))[: len(pairs)]

    def _run_batches(self, batches: Iterable[list[_Row]]) -> Iterator[tuple[_Row, float]]:
        """Every row with its sum of log-probabilities."""
        running = collections.deque[tuple[list[_Row], jax.Array]]()
        for batch in batches:
            running.append((batch, self._forward(batch)))
            if len(running) > BATCHES_IN_FLIGHT:
                yield from _fetch(*running.popleft())
        for batch, sums in running:
            yield from _fetch(batch, sums)

    def _forward(self, rows: list[_Row]) -> jax.Array:
        room, rows = self._room(rows[0].pair), self._fill(rows)
        denoiser = self.model.denoiser
        width = min(next_power(self.widths[room]), room - denoiser.min_prompt_length)
        tokens, (masked, scored) = np.zeros((len(rows), room), np.int32), np.zeros((2, len(rows), room), bool)
        for place, (pair, _, hidden, summed) in enumerate(rows):
            tokens[place, : len(pair.tokens)] = pair.tokens
            masked[place, pair.span], scored[place, pair.span] = hidden, summed
        lengths = np.asarray([len(row.pair.tokens) for row in rows], np.int32)
        prompts = np.asarray([row.pair.prompt for row in rows], np.int32)
        arrays = self._place((tokens, masked, lengths, prompts, np.minimum(prompts, room - width), scored))
        return _sums(denoiser, *arrays, self.guidance, width=width)

    def _fill(self, rows: list[T]) -> list[T]:
        """A full batch: copies of the first row fill the last batch."""
        return rows + rows[:1] * (self.batch_size - len(rows))

    def _place(self, arrays: Any) -> Any:
        layout = self.model.layout
        return arrays if layout is None else jax.device_put(arrays, batch_sharding(layout.mesh, layout.rules))


def _fetch(rows: list[_Row], sums: jax.Array) -> Iterator[tuple[_Row, float]]:
    return zip(rows, jax.device_get(sums).tolist(), strict=False)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items; the last may be shorter."""
    source = iter(items)
    while part := list(itertools.islice(source, size)):
        yield part
