"""From hidden states to predictions: the token each position would get, and how confident the model is, in float32.

The vocabulary is read in tiles, of which one exists at a time: running statistics (Milakov and Gimelshein, arXiv
1805.02867) give maximum, sum of exponentials, entropy and margin, and Gumbel noise draws, all in one pass. What top-p
and top-k leave is found by searching for the least score that stays, not by sorting.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.models.transformer import Tile, tile_of
from dllm_jax.pytree import pytree
from samplers.tokens.noise import gumbel

ScoreFrom = Literal["raw", "sampling"]
Draw = Callable[[jax.Array], jax.Array]
"""Uniforms in (0, 1), [B, W, n], for ids [n] int32."""

Allowed = Callable[[jax.Array], jax.Array]
"""Which of some ids [n] int32 may be written, [B, W, n] bool."""

Mix = Callable[[jax.Array, Tile], jax.Array]

NO_MASK = -1  # the mask token of a model that has none

T = TypeVar("T")

TILE_ELEMENTS = 2**23  # float32 numbers of a tile, 32 MiB
TILES_IN_ONE = 8  # the room in which all is one tile: of several, GPUs copy each one's part of the head in every pass
LANES = 128  # a tile's width is a multiple, and
LEAST_LANES = 8  # at least this many of them, or the head's product is too narrow for its weights
DIGIT_BITS = 4  # of the threshold, that are found by one pass over several tiles


@pytree()
class Sampling:
    """How a token is drawn at a position; every rule combines with every setting.

    Order of operations (Dream's): divide by the temperature, cut to top_p, cut to top_k, draw.

    Attributes:
        temperature: 0 or None is greedy; None also leaves the random numbers out of the program. Scalar or [B].
            Default: none, the most probable tokens, as in most published evaluations.
        top_p: keep the smallest set of tokens whose probability exceeds top_p; None keeps all. Default: none, which
            counts only where tokens are drawn.
        top_k: keep the k most probable tokens (ties with the k-th stay); None keeps all. Default: none, which counts
            only where tokens are drawn.
        suppress: [n] int32 ids that are never written, as if their logits were -inf (LLaDA's `logits_eos_inf`).
            Default: none; end tokens are wanted where answers have an end.
        defer: [n] int32 ids whose positions are committed last: after the token is chosen their logits count as -inf in
            every score, so that such a position has confidence 0 (LLaDA's `confidence_eos_eot_inf`), and the worst of
            every other score. Default: none; end tokens are wanted where answers have an end.
        target: [B, G] int32, tokens that are written in place of the predicted ones (teacher forcing). What is written
            when stays the rule's choice by its own predictions, and `Predictions.logprob` is the target's. Not with
            samplers that revise what they wrote. None writes what is predicted; it is no option.
    """

    temperature: float | jax.Array | None = None
    top_p: float | jax.Array | None = None
    top_k: int | jax.Array | None = None
    suppress: jax.Array | None = None
    defer: jax.Array | None = None
    target: jax.Array | None = None

    def target_at(self, positions: jax.Array) -> jax.Array:
        """The target at positions [B, W] of the generation: [B, W] int32, any token outside it."""
        assert self.target is not None
        return jnp.take_along_axis(self.target, jnp.clip(positions, 0, self.target.shape[1] - 1), axis=1)


@pytree()
class Predictions:
    """What a rule may use, each [B, W]; unused scores are never computed.

    Attributes:
        token: int32, the token that would be written; never the mask token.
        confidence: probability of that token.
        logprob: log of the probability that the model itself gives that token: of its logits as they are, with
            temperature 1, nothing cut off, suppressed or deferred, and the mask token's share counted, whatever the
            scores are of. NaN where the logits are not finite, or leave no token to choose.
        max_probability: largest probability over the vocabulary.
        margin: difference of the two largest probabilities.
        entropy: of the distribution over the whole vocabulary, in nats, not below 0.
        mask_wins: bool, whether the mask token itself has the largest logit; never where it may not be written.
        finite: bool, whether the model's logits are numbers: none is NaN, and the largest is not infinite (single ones
            may be -inf). Where they are not, the token is any but the mask token and every score is its worst.
    """

    token: jax.Array
    confidence: jax.Array
    logprob: jax.Array
    max_probability: jax.Array
    margin: jax.Array
    entropy: jax.Array
    mask_wins: jax.Array
    finite: jax.Array


@dataclasses.dataclass(frozen=True)
class Readout:
    """The scores of positions [B, W] over the vocabulary, a tile at a time.

    Attributes:
        of: a tile's scores, [B, W, parts * width] float32.
        positions: (B, W).
        vocab_size: V.
        parts: how many parts a `Tile` sees the vocabulary as; divides V.
        simultaneous: readouts that `jax.vmap` runs at once; they share the room for tiles.
    """

    of: Callable[[Tile], jax.Array]
    positions: tuple[int, ...]
    vocab_size: int
    parts: int = 1
    simultaneous: int = 1

    @property
    def part(self) -> int:
        """Entries of a part of the vocabulary."""
        return self.vocab_size // self.parts

    @property
    def width(self) -> int:
        """Entries of every part that a tile has; the last tile may be narrower."""
        columns = math.prod(self.positions) * self.parts * self.simultaneous
        if columns * self.part <= TILES_IN_ONE * TILE_ELEMENTS:
            return self.part
        fitting = TILE_ELEMENTS // columns
        return min(self.part, max(fitting // LANES, LEAST_LANES) * LANES)

    def ids(self, tile: Tile) -> jax.Array:
        """The tokens of a tile's scores, [parts * width] int32."""
        first = jnp.arange(self.parts, dtype=jnp.int32)[:, None] * self.part + tile.start
        return (first + jnp.arange(tile.width, dtype=jnp.int32)).reshape(-1)


def readout(denoiser: DenoiserLike, hidden: jax.Array) -> Readout:
    """The model's scores of hidden states [B, W, D], computed tile by tile."""
    of = functools.partial(denoiser.logits, hidden)
    return Readout(of, hidden.shape[:2], denoiser.vocab_size, denoiser.vocab_parts)


def given(logits: jax.Array, parts: int = 1) -> Readout:
    """Scores that exist already, [B, W, V] float32."""
    return Readout(lambda tile: tile_of(logits, 2, tile, parts), logits.shape[:2], logits.shape[2], parts)


def predict(
    scores: Readout,
    sampling: Sampling,
    *,
    mask_id: int,
    score_from: ScoreFrom,
    draw: Draw | None,
    allowed: Allowed | None = None,
) -> Predictions:
    """Chooses tokens and scores them. Of equals the lowest id wins.

    One pass over the vocabulary; where top_p or top_k counts, that is with a temperature or for scores "sampling", two
    passes and those of the search. If there is more than one tile, each pass computes the head's product anew: the
    price of not keeping the logits.

    Args:
        scores: the model's logits.
        mask_id: this id is never chosen; its probability still counts in every score.
        score_from: "raw" scores the model's own distribution, "sampling" the tempered and truncated one (Dream's).
        draw: needed when `sampling.temperature` is not None.
        allowed: what may be written; every score is then of the distribution over it, the mask token's share too, so
            that a position where one token may be written is certain of it. None is all.
    """
    logits = _once(scores, scores.of)
    plan = _Plan(sampling, mask_id, score_from, draw, allowed)
    cuts = sampling.top_p is not None or sampling.top_k is not None
    counts = sampling.temperature is not None or score_from == "sampling"  # the best token survives anyway
    cut = _cut(scores, logits, plan) if cuts and counts else None
    found = _reduce(scores, lambda tile: _tally(logits(tile), scores.ids(tile), plan, cut), _tallied)
    return _concluded(found, plan, cut, scores.vocab_size)


class Drawn(NamedTuple):
    """The draws and scores of positions [B, W], none of which has a mask token.

    Attributes:
        token: int32, drawn.
        best: int32, the most probable token.
        logprob: of the best one, as in `Predictions`.
        entropy: in nats, of the distribution that was drawn from.
        finite: bool, as in `Predictions`.
        soft: [B, W, D] float32, the embedding that this distribution expects.
    """

    token: jax.Array
    best: jax.Array
    logprob: jax.Array
    entropy: jax.Array
    finite: jax.Array
    soft: jax.Array


def draw_and_expect(scores: Readout, sampling: Sampling, *, draw: Draw, mix: Mix) -> Drawn:
    """Draws tokens, and mixes the vocabulary's embeddings by the probabilities they are drawn with, in the same pass.

    Args:
        scores: the model's logits.
        sampling: with a temperature.
        mix: weights of a tile's tokens, [B, W, parts * width] float32, and the tile -> the sum of their embeddings.
    """
    plan, logits = _Plan(sampling, NO_MASK, "sampling", draw, None), _once(scores, scores.of)
    cuts = sampling.top_p is not None or sampling.top_k is not None
    cut = _cut(scores, logits, plan) if cuts else None

    def read(tile: Tile) -> tuple[_Tally, jax.Array]:
        raw, ids = logits(tile), scores.ids(tile)
        tally = _tally(raw, ids, plan, cut)
        score = _scored(raw, ids, plan, cut)[2]
        return tally, mix(jnp.exp(score - _centre(tally.mass.peak)[..., None]), tile)

    def merge(one: tuple[_Tally, jax.Array], other: tuple[_Tally, jax.Array]) -> tuple[_Tally, jax.Array]:
        tally = _tallied(one[0], other[0])
        share = lambda part: jnp.exp(part[0].mass.peak - _centre(tally.mass.peak))[..., None] * part[1]
        return tally, share(one) + share(other)

    found, mixed = _reduce(scores, read, merge)
    known = _concluded(found, plan, cut, scores.vocab_size)
    assert found.total is not None  # a temperature divides what is scored
    return Drawn(
        token=known.token,
        best=found.top.token,
        logprob=found.top.value - _centre(found.peak) - jnp.log(found.total),
        entropy=known.entropy,
        finite=known.finite,
        soft=mixed / found.mass.total[..., None],
    )


def logprob_of(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Log-probabilities of tokens [B, W] int32 by logits [B, W, V] float32, as in `Predictions`: [B, W] float32."""
    peak, own = logits.max(axis=-1), jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return own - peak - jnp.log(jnp.exp(logits - peak[..., None]).sum(axis=-1))


def logprobs_of(scores: Readout, token: jax.Array) -> jax.Array:
    """Log-probabilities of tokens, read tile by tile; NaN where a score is.

    Args:
        token: [B, W] int32, or [B, W, C] for several at a position.

    Returns:
        float32 of the same shape.
    """

    def read(tile: Tile) -> tuple[_Sum, jax.Array]:
        logits, ids = scores.of(tile), scores.ids(tile)
        score = lambda token: jnp.where(ids == token[..., None], logits, -jnp.inf).max(axis=-1)
        own = score(token) if token.ndim == 2 else jax.vmap(score, in_axes=-1, out_axes=-1)(token)
        return _sum(logits), own

    def merge(one: tuple[_Sum, jax.Array], other: tuple[_Sum, jax.Array]) -> tuple[_Sum, jax.Array]:
        return _summed(one[0], other[0]), jnp.maximum(one[1], other[1])

    (peak, total), own = _reduce(scores, read, merge)
    peak, total = (x if token.ndim == 2 else x[..., None] for x in (peak, total))
    return own - peak - jnp.log(total)


def most_probable(scores: Readout, count: int, mask_id: int) -> tuple[jax.Array, jax.Array]:
    """The tokens of the largest log-probabilities, the most probable first, but the mask token, whose share counts;
    read tile by tile: [B, W, count] int32 and float32."""

    def read(tile: Tile) -> tuple[jax.Array, jax.Array, _Sum]:
        logits, ids = scores.of(tile), scores.ids(tile)
        most = min(count, len(ids))
        values, place = ranked(jnp.where(ids == mask_id, -jnp.inf, logits), most)
        pad = lambda x, missing: jnp.pad(x, [(0, 0), (0, 0), (0, count - most)], constant_values=missing)
        return pad(values, -jnp.inf), pad(ids[place], 0), _sum(logits)

    def merge(one: Any, other: Any) -> tuple[jax.Array, jax.Array, _Sum]:
        values, ids = (jnp.concatenate(pair, axis=-1) for pair in zip(one[:2], other[:2], strict=True))
        values, place = lax.top_k(values, count)
        return values, jnp.take_along_axis(ids, place, axis=-1), _summed(one[2], other[2])

    values, ids, (peak, total) = _reduce(scores, read, merge)
    return ids, values - (_centre(peak) + jnp.log(total))[..., None]


def column(value: float | jax.Array) -> jax.Array:
    """A scalar or [B] number as something that broadcasts against [B, W, V]."""
    return jnp.asarray(value)[..., None, None]


def temper(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits over the temperature, [B, W, V]; as they are where it is 0 or None."""
    if sampling.temperature is None:
        return logits
    temperature = column(sampling.temperature)
    return logits / jnp.where(temperature > 0, temperature, 1.0)


def kept(z: jax.Array, sampling: Sampling) -> jax.Array | None:
    """Which vocabulary entries survive top_p and top_k, [B, W, V]; None when neither is set."""
    if sampling.top_p is None and sampling.top_k is None:
        return None
    scores = given(z)
    mass = _reduce(scores, lambda tile: _mass(scores.of(tile)), _together)
    return _code(z) >= _last_kept(scores, scores.of, sampling, mass)[..., None]


def ranked(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k(logits, count)` in two searches, which is faster over a vocabulary: the same values and tokens, in the
    same order.

    The vocabulary is cut into groups. The `count` groups with the largest peaks hold the `count` best tokens: any other
    token has as many at least as large before it, the peaks of these. Both searches are over sqrt(V count) numbers.

    Args:
        logits: [..., V] float32.
        count: at most V.

    Returns:
        Values in falling order, the first of equals first, and their tokens: [..., count] float32 and int32.
    """
    size = logits.shape[-1]
    width = math.isqrt(size // count)
    groups = -(-size // width)
    if groups + count * width > size // 2:
        return lax.top_k(logits, count)
    rest = [(0, 0)] * (logits.ndim - 1)
    folded = jnp.pad(logits, [*rest, (0, groups * width - size)], constant_values=-jnp.inf)
    folded = folded.reshape(*logits.shape[:-1], groups, width)
    best = jnp.sort(lax.top_k(folded.max(axis=-1), count)[1], axis=-1)  # in order, so that equals stay in theirs
    found = jnp.take_along_axis(folded, best[..., None], axis=-2)
    values, place = lax.top_k(found.reshape(*logits.shape[:-1], count * width), count)
    return values, jnp.take_along_axis(best, place // width, axis=-1) * width + place % width


def truncate(z: jax.Array, survives: jax.Array | None, mask_id: int) -> jax.Array:
    """z with -inf at what is never drawn: the mask token, and what does not survive, as `kept` gives it."""
    z = jnp.where(jnp.arange(z.shape[-1]) == mask_id, -jnp.inf, z)
    if survives is None:
        return z
    best = z == z.max(axis=-1, keepdims=True)  # stays even when only the mask token had survived
    return jnp.where(survives | best, z, -jnp.inf)


@jax.named_scope("vocabulary")
def _reduce(scores: Readout, read: Callable[[Tile], T], merge: Callable[[T, T], T]) -> T:
    """Merges `read` of all tiles, of which only one exists at a time.

    The last tile has what the full ones leave, so that no slice reaches beyond its part and is moved back. It is read
    first and outside the loop: its result has the type that the loop carries, also within `jax.shard_map`.
    """
    width = scores.width
    full = (scores.part - 1) // width
    found = read(Tile(full * width, scores.part - full * width))
    if not full:
        return found
    return lax.fori_loop(0, full, lambda number, found: merge(found, read(Tile(number * width, width))), found)


def _once(scores: Readout, read: Callable[[Tile], T]) -> Callable[[Tile], T]:
    """`read`; if all is one tile it runs once, here, and not again in every pass."""
    if scores.width < scores.part:
        return read
    found = read(Tile(0, scores.part))
    return lambda tile: found


def _without(scores: jax.Array, ids: jax.Array, unwanted: jax.Array | None) -> jax.Array:
    """Scores [..., n] of ids [n] with -inf at some."""
    return scores if unwanted is None else jnp.where(jnp.isin(ids, unwanted), -jnp.inf, scores)


# Running statistics, all [B, W] --------------------------------------------------------------------------------------


class _Sum(NamedTuple):
    """Of logits: the largest, and the sum of e^(logit - peak)."""

    peak: jax.Array
    total: jax.Array


def _sum(logits: jax.Array) -> _Sum:
    peak = logits.max(axis=-1)
    return _Sum(peak, jnp.exp(logits - _centre(peak)[..., None]).sum(axis=-1))


def _summed(one: _Sum, other: _Sum) -> _Sum:
    peak = jnp.maximum(one.peak, other.peak)
    share = lambda part: jnp.exp(part.peak - _centre(peak)) * part.total
    return _Sum(peak, share(one) + share(other))


class _Mass(NamedTuple):
    """Of scores: the two largest, the sum of weights e^(score - peak), and the sum of weight * (score - peak)."""

    peak: jax.Array
    second: jax.Array
    total: jax.Array
    moment: jax.Array


def _mass(score: jax.Array) -> _Mass:
    peak, top = score.max(axis=-1), jnp.argmax(score, axis=-1, keepdims=True)
    second = jnp.where(jnp.arange(score.shape[-1]) == top, -jnp.inf, score).max(axis=-1)
    centred = score - _centre(peak)[..., None]
    weight = jnp.exp(centred)
    moment = jnp.where(weight > 0, weight * centred, 0.0).sum(axis=-1)  # 0 * -inf counts as 0
    return _Mass(peak, second, weight.sum(axis=-1), moment)


def _centre(peak: jax.Array) -> jax.Array:
    """What is subtracted from scores: their peak, but 0 where nothing is above -inf."""
    return jnp.where(peak > -jnp.inf, peak, 0.0)


def _together(one: _Mass, other: _Mass) -> _Mass:
    peak = jnp.maximum(one.peak, other.peak)
    second = jnp.maximum(jnp.minimum(one.peak, other.peak), jnp.maximum(one.second, other.second))
    total, moment = jnp.zeros_like(peak), jnp.zeros_like(peak)
    for mass in (one, other):
        shift = jnp.maximum(mass.peak - _centre(peak), -200.0)  # below e^-200 = 0 nothing is left of a weight
        total += jnp.exp(shift) * mass.total
        moment += jnp.exp(shift) * (mass.moment + shift * mass.total)
    return _Mass(peak, second, total, moment)


class _Best(NamedTuple):
    """The largest of some values: the value, its id, what is scored there, and the model's logit; None where that is
    the score."""

    value: jax.Array
    token: jax.Array
    score: jax.Array
    raw: jax.Array | None


def _best(value: jax.Array, ids: jax.Array, score: jax.Array, raw: jax.Array | None = None) -> _Best:
    at = jnp.argmax(value, axis=-1, keepdims=True)
    take = lambda x: jnp.take_along_axis(x, at, axis=-1)[..., 0]
    return _Best(take(value), ids[at[..., 0]], take(score), None if raw is None else take(raw))


def _better(one: _Best, other: _Best) -> _Best:
    wins = (other.value > one.value) | ((other.value == one.value) & (other.token < one.token))
    return jax.tree.map(lambda mine, theirs: jnp.where(wins, theirs, mine), one, other)


# The search for what top_p and top_k leave ---------------------------------------------------------------------------


class _Cut(NamedTuple):
    """What truncation leaves, each [B, W].

    Attributes:
        kept: codes from here on survive.
        drawn: so do these for drawing: the best token stays even when only the mask token had survived.
        best: the most probable token but the mask token, and its logit.
    """

    kept: jax.Array
    drawn: jax.Array
    best: _Best


def _cut(scores: Readout, logits: Callable[[Tile], jax.Array], plan: "_Plan") -> _Cut:
    sampling, mask_id = plan.sampling, plan.mask_id
    tempered = lambda raw, ids: temper(_writable(raw, ids, plan), sampling)

    def read(tile: Tile) -> tuple[_Mass, _Best]:
        raw, ids = logits(tile), scores.ids(tile)
        z = tempered(raw, ids)
        return _mass(z), _best(jnp.where(ids == mask_id, -jnp.inf, z), ids, raw)

    mass, best = _reduce(scores, read, lambda one, two: (_together(one[0], two[0]), _better(one[1], two[1])))
    last = _last_kept(scores, lambda tile: tempered(logits(tile), scores.ids(tile)), sampling, mass)
    return _Cut(last, jnp.minimum(last, _code(best.value)), best)


def _code(z: jax.Array) -> jax.Array:
    """uint32 in the order of the floats z, equal where they are (0.0 and -0.0)."""
    bits = lax.bitcast_convert_type(z, jnp.uint32)
    half = jnp.uint32(2**31)
    return jnp.where(bits < half, bits + half, 0 - bits)


def _last_kept(scores: Readout, z: Callable[[Tile], jax.Array], sampling: Sampling, mass: _Mass) -> jax.Array:
    """The largest code at and above which the probability exceeds top_p, or top_k entries lie: that of the last entry
    that stays, ties with it included; 0 where all stay. [B, W] uint32.

    Its digits are found one after another, the first the highest. In several tiles a digit has `DIGIT_BITS`, so that
    the vocabulary is read 32 / DIGIT_BITS times; one tile lies in memory, where single bits cost fewer comparisons.

    Args:
        z: a tile's scores.
        mass: of all scores.
    """
    bits = DIGIT_BITS if scores.width < scores.part else 1
    peak, row = _centre(mass.peak)[..., None], lambda value: jnp.asarray(value)[..., None]

    def weighed(tile: Tile) -> tuple[jax.Array, jax.Array]:
        score = z(tile)
        return _code(score), jnp.exp(score - peak)

    entries = _once(scores, weighed)

    def above(tile: Tile, limits: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        code, weight = entries(tile)
        share = lambda limit: jnp.where(code >= limit[..., None], weight, 0.0).sum(axis=-1)
        count = lambda limit: jnp.sum(code >= limit[..., None], axis=-1, dtype=jnp.int32)
        wanted = (share, sampling.top_p), (count, sampling.top_k)
        return tuple(None if value is None else lax.map(of, limits) for of, value in wanted)  # type: ignore[return-value]

    def narrowed(number: int | jax.Array, low: jax.Array) -> jax.Array:
        shift = jnp.asarray(32 - bits * (number + 1), jnp.uint32)
        limits = low + (jnp.arange(1, 2**bits, dtype=jnp.uint32) << shift)[:, None, None]
        share, count = _reduce(scores, lambda tile: above(tile, limits), functools.partial(jax.tree.map, jnp.add))
        enough = jnp.zeros(limits.shape, bool)
        if share is not None:
            enough |= share > row(sampling.top_p) * mass.total
        if count is not None:
            enough |= count >= jnp.maximum(row(sampling.top_k), 1)
        return low + (jnp.sum(enough, axis=0, dtype=jnp.uint32) << shift)

    first = narrowed(0, jnp.zeros(scores.positions, jnp.uint32))  # outside the loop, as in `_reduce`
    return lax.fori_loop(1, 32 // bits, narrowed, first)


# The pass that chooses and scores ------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """The arguments of `predict`."""

    sampling: Sampling
    mask_id: int
    score_from: ScoreFrom
    draw: Draw | None
    allowed: Allowed | None


class _Tally(NamedTuple):
    """What is known of the vocabulary so far.

    Attributes:
        peak: the largest of the model's logits; NaN if one is.
        top: the best logit, the mask token's included.
        choice: the token that is written, chosen among what may be.
        mass: of what is scored.
        total: sum of e^(logit - peak) of the model's logits; None where these are scored, so that `mass` has it.
    """

    peak: jax.Array
    top: _Best
    choice: _Best
    mass: _Mass
    total: jax.Array | None


def _writable(raw: jax.Array, ids: jax.Array, plan: _Plan) -> jax.Array:
    """A tile's logits with -inf at what may not be written."""
    logits = _without(raw, ids, plan.sampling.suppress)
    return logits if plan.allowed is None else jnp.where(plan.allowed(ids), logits, -jnp.inf)


def _scored(raw: jax.Array, ids: jax.Array, plan: _Plan, cut: _Cut | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A tile's logits without what is suppressed, the same tempered, and what is scored; `defer` is applied later."""
    logits = _writable(raw, ids, plan)
    z = temper(logits, plan.sampling)
    if plan.score_from == "raw":
        return logits, z, logits
    return logits, z, z if cut is None else jnp.where(_code(z) >= cut.kept[..., None], z, -jnp.inf)


def _tally(raw: jax.Array, ids: jax.Array, plan: _Plan, cut: _Cut | None) -> _Tally:
    sampling, (logits, z, score) = plan.sampling, _scored(raw, ids, plan, cut)
    value = jnp.where(ids == plan.mask_id, -jnp.inf, z)
    if cut is not None:
        value = jnp.where(_code(z) >= cut.drawn[..., None], value, -jnp.inf)
    if sampling.temperature is not None:
        if plan.draw is None:
            raise ValueError("a temperature needs uniform draws")
        value = value + jnp.where(column(sampling.temperature) > 0, gumbel(plan.draw(ids)), 0.0)
    score = _without(score, ids, sampling.defer)
    top, mass, peak = _best(logits, ids, logits), _mass(score), raw.max(axis=-1)
    if score is raw:  # nothing was divided, cut or left out
        return _Tally(peak, top, _best(value, ids, score), mass, None)
    total = jnp.exp(raw - _centre(peak)[..., None]).sum(axis=-1)
    return _Tally(peak, top, _best(value, ids, score, raw), mass, total)


def _tallied(one: _Tally, other: _Tally) -> _Tally:
    peak, total = jnp.maximum(one.peak, other.peak), None
    if one.total is not None and other.total is not None:
        total = jnp.exp(one.peak - _centre(peak)) * one.total + jnp.exp(other.peak - _centre(peak)) * other.total
    return _Tally(
        peak,
        _better(one.top, other.top),
        _better(one.choice, other.choice),
        _together(one.mass, other.mass),
        total,
    )


def _concluded(found: _Tally, plan: _Plan, cut: _Cut | None, vocab_size: int) -> Predictions:
    mass, choice, defer = found.mass, found.choice, plan.sampling.defer
    finite = jnp.isfinite(found.peak)
    chosen = finite & (choice.value > -jnp.inf)
    token, raw = jnp.full_like(choice.token, int(plan.mask_id == 0)), jnp.full_like(choice.score, jnp.nan)
    if cut is not None:  # nothing survives only if the last bits of this pass's product differ
        left = finite & (cut.best.value > -jnp.inf)
        token, raw = jnp.where(left, cut.best.token, token), jnp.where(left, cut.best.score, raw)
    token = jnp.where(chosen, choice.token, token)
    raw = jnp.where(chosen, choice.score if choice.raw is None else choice.raw, raw)
    scored = finite & (mass.total > 0)  # something is left after `suppress` and `defer`
    worst = ~scored if defer is None else ~scored | jnp.isin(token, defer)
    return Predictions(
        token=token,
        confidence=jnp.where(scored & chosen, jnp.exp(choice.score - _centre(mass.peak)) / mass.total, 0.0),
        logprob=raw - _centre(found.peak) - jnp.log(mass.total if found.total is None else found.total),
        max_probability=jnp.where(worst, 0.0, 1.0 / mass.total),
        margin=jnp.where(worst, -1.0, (1.0 - jnp.exp(mass.second - _centre(mass.peak))) / mass.total),
        entropy=jnp.where(
            worst,
            jnp.log(float(vocab_size)),
            jnp.maximum(jnp.log(mass.total) - mass.moment / mass.total, 0.0),
        ),
        mask_wins=finite & (found.top.token == plan.mask_id),
        finite=finite,
    )
