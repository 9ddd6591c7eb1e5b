"""From logits to predictions: the token each position would get, and how sure the model is, in one pass in float32."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.pytree import pytree
from samplers.noise import gumbel

ScoreFrom = Literal["raw", "sampling"]


@pytree()
class Sampling:
    """How a token is drawn at a position; every rule combines with every setting.

    Order of operations (Dream's): divide by the temperature, cut to top_p, cut to top_k, draw.

    Attributes:
        temperature: 0 or None is greedy; None also leaves the random numbers out of the program. Scalar or [B].
        top_p: keep the smallest set of tokens whose probability exceeds top_p; None keeps all.
        top_k: keep the k most probable tokens (ties with the k-th stay); None keeps all.
        suppress: [n] int32 ids that are never written, as if their logits were -inf (LLaDA's `logits_eos_inf`).
        defer: [n] int32 ids whose positions are committed last: after the token is chosen their logits count as -inf
            in every score, so that such a position has confidence 0 (LLaDA's `confidence_eos_eot_inf`), and the worst
            of every other score.
    """

    temperature: float | jax.Array | None = None
    top_p: float | jax.Array | None = None
    top_k: int | jax.Array | None = None
    suppress: jax.Array | None = None
    defer: jax.Array | None = None


@pytree()
class Predictions:
    """What a rule may look at, each [B, W]; what it does not use is never computed.

    Attributes:
        token: int32, the token that would be written; never the mask token.
        confidence: probability of that token.
        max_probability: largest probability over the vocabulary.
        margin: difference of the two largest probabilities.
        entropy: of the distribution over the whole vocabulary, in nats, not below 0.
        mask_wins: bool, whether the mask token itself has the largest logit.
    """

    token: jax.Array
    confidence: jax.Array
    max_probability: jax.Array
    margin: jax.Array
    entropy: jax.Array
    mask_wins: jax.Array
    finite: jax.Array


def predict(
    logits: jax.Array,
    sampling: Sampling,
    *,
    mask_id: int,
    score_from: ScoreFrom,
    uniform: jax.Array | None,
) -> Predictions:
    """Chooses tokens and scores them.

    Args:
        logits: [B, W, V] float32.
        mask_id: this id is never chosen; its probability still counts in every score.
        score_from: "raw" scores the model's own distribution, "sampling" the tempered and truncated one (Dream's).
        uniform: [B, W, V] draws in (0, 1), needed when `sampling.temperature` is not None.
    """
    if sampling.suppress is not None:
        logits = logits.at[..., sampling.suppress].set(-jnp.inf)
    tempered = temper(logits, sampling)
    keep = kept(tempered, sampling)
    token = _choose(tempered, keep, sampling, mask_id, uniform)
    score = logits
    if score_from == "sampling":
        score = tempered if keep is None else jnp.where(keep, tempered, -jnp.inf)
    mask_wins = jnp.argmax(logits, axis=-1) == mask_id
    if sampling.defer is None:
        return _score(score, token, mask_wins)
    late = jnp.isin(token, sampling.defer)
    return _last(_score(score.at[..., sampling.defer].set(-jnp.inf), token, mask_wins), late, logits.shape[-1])


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
    ordered = jnp.sort(z, axis=-1, descending=True)
    count = jnp.full(z.shape[:-1], z.shape[-1], jnp.int32)
    if sampling.top_p is not None:
        total = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        count = 1 + jnp.sum(total[..., :-1] <= column(sampling.top_p), axis=-1)  # those before it decide
    if sampling.top_k is not None:
        count = jnp.minimum(count, column(sampling.top_k)[..., 0])
    last = jnp.take_along_axis(ordered, jnp.maximum(count, 1)[..., None] - 1, axis=-1)
    return z >= last


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


def truncate(z: jax.Array, keep: jax.Array | None, mask_id: int) -> jax.Array:
    """z with -inf at what is never drawn: the mask token, and what did not survive, `keep` as `kept` gives it."""
    z = jnp.where(jnp.arange(z.shape[-1]) == mask_id, -jnp.inf, z)
    if keep is None:
        return z
    best = z == z.max(axis=-1, keepdims=True)  # stays even when only the mask token had survived
    return jnp.where(keep | best, z, -jnp.inf)


def _choose(
    z: jax.Array, keep: jax.Array | None, sampling: Sampling, mask_id: int, uniform: jax.Array | None
) -> jax.Array:
    z = truncate(z, keep, mask_id)
    if sampling.temperature is not None:
        if uniform is None:
            raise ValueError("a temperature needs uniform draws")
        z = z + jnp.where(column(sampling.temperature) > 0, gumbel(uniform), 0.0)
    return jnp.argmax(z, axis=-1).astype(jnp.int32)


def _score(score: jax.Array, token: jax.Array, mask_wins: jax.Array) -> Predictions:
    peak = score.max(axis=-1, keepdims=True)
    centred = score - peak
    weight = jnp.exp(centred)
    total = weight.sum(axis=-1)
    mean = jnp.where(weight > 0, weight * centred, 0.0).sum(axis=-1) / total  # 0 * -inf counts as 0
    top = jnp.argmax(score, axis=-1, keepdims=True)
    second = jnp.where(jnp.arange(score.shape[-1]) == top, -jnp.inf, centred).max(axis=-1)
    chosen = jnp.take_along_axis(centred, token[..., None], axis=-1)[..., 0]
    return Predictions(
        token=token,
        confidence=jnp.exp(chosen) / total,
        max_probability=1.0 / total,
        margin=(1.0 - jnp.exp(second)) / total,
        entropy=jnp.maximum(jnp.log(total) - mean, 0.0),
        mask_wins=mask_wins,
        finite=jnp.isfinite(total),
    )


def _last(scores: Predictions, late: jax.Array, vocab_size: int) -> Predictions:
    return dataclasses.replace(
        scores,
        max_probability=jnp.where(late, 0.0, scores.max_probability),
        margin=jnp.where(late, -1.0, scores.margin),
        entropy=jnp.where(late, jnp.log(float(vocab_size)), scores.entropy),
    )
