"""Unmasking rules and scores against brute force, without a model."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
from conftest import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from samplers import (
    EB,
    Credit,
    Dream,
    DualCache,
    Factor,
    Hierarchical,
    LLaDA,
    NoCache,
    Predictions,
    PrefixCache,
    Sampling,
    Smoothing,
    Threshold,
    TopK,
)
from samplers.rules import BlockView, Rule
from samplers.rules.base import progressing
from samplers.rules.eb import select
from samplers.tokens.noise import KeyNoise, Purpose
from samplers.tokens.predictions import given as given_logits
from samplers.tokens.predictions import predict

WIDTH = 8  # one width, so that every example reuses the compiled operations

scores = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5, 0.9, 1.0]), min_size=WIDTH, max_size=WIDTH)
masks = st.lists(st.booleans(), min_size=WIDTH, max_size=WIDTH)


def predictions_of(confidence, entropy=None, mask_wins=None) -> Predictions:
    confidence = jnp.asarray(confidence, jnp.float32)[None]
    entropy = 1.0 - confidence if entropy is None else jnp.asarray(entropy, jnp.float32)[None]
    return Predictions(
        token=jnp.zeros(confidence.shape, jnp.int32),
        confidence=confidence,
        logprob=jnp.log(confidence),
        max_probability=confidence,
        margin=confidence,
        entropy=entropy,
        mask_wins=jnp.zeros(confidence.shape, bool) if mask_wins is None else jnp.asarray(mask_wins)[None],
        finite=jnp.ones(confidence.shape, bool),
    )


def view_of(undecided, step: int = 0, block_undecided: int | None = None, num_blocks: int = 1) -> BlockView:
    undecided = jnp.asarray(undecided)[None]
    count = int(undecided.sum()) if block_undecided is None else block_undecided
    return BlockView(
        undecided=undecided,
        positions=jnp.arange(undecided.shape[1])[None],
        first=jnp.zeros((1,), jnp.int32),
        step=jnp.asarray([step]),
        block_undecided=jnp.asarray([count]),
        num_blocks=jnp.asarray([num_blocks]),
        noise=KeyNoise(jax.random.key(3)[None]),
        nfe=jnp.asarray([step]),
        tokens=jnp.zeros(undecided.shape, jnp.int32),
        written=~undecided,
        mask_id=1,
    )


def decide(rule: Rule, confidence, masked, mask_wins=None, **view) -> list[int]:
    predictions = predictions_of(confidence, mask_wins=mask_wins)
    chosen, _ = rule.decide(predictions, view_of(masked, **view), rule.init(1, WIDTH, 2))
    return np.flatnonzero(np.asarray(chosen[0])).tolist()


def order_of(confidence, masked) -> list[int]:
    """Masked positions by descending confidence, lower position first."""
    return sorted((i for i in range(len(masked)) if masked[i]), key=lambda i: (-confidence[i], i))


@settings(max_examples=60)
@given(scores, masks, st.integers(1, WIDTH))
def test_topk(confidence, masked, k) -> None:
    assert decide(TopK(k, proxy="confidence"), confidence, masked) == sorted(order_of(confidence, masked)[:k])


@settings(max_examples=60)
@given(scores, masks, st.sampled_from([0.0, 0.3, 0.5, 0.95, 1.5]))
def test_threshold(confidence, masked, threshold) -> None:
    order = order_of(confidence, masked)
    wanted = {i for i in order if confidence[i] >= threshold} | set(order[:1])
    assert decide(Threshold(threshold), confidence, masked) == sorted(wanted)


@settings(max_examples=60)
@given(scores, masks, masks, st.sampled_from([0.3, 0.9, 1.0]), st.sampled_from([1e-5, 0.2]))
def test_threshold_as_dinfer_defines_it(confidence, masked, mask_wins, threshold, tolerance) -> None:
    """limit = min(threshold, best - tolerance) over positions whose best token is not the mask token; where there are
    none, one position all the same."""
    order = order_of(confidence, masked)
    candidates = [i for i in order if not mask_wins[i]]
    limit = min(threshold, max((np.float32(confidence[i]) - np.float32(tolerance) for i in candidates), default=0.0))
    wanted = [i for i in candidates if confidence[i] >= limit] or order[:1]
    rule = Threshold(threshold, tolerance=tolerance, skip_masks=True)
    assert decide(rule, confidence, masked, mask_wins=mask_wins) == sorted(wanted)


def hierarchical_brute_force(confidence, masked, candidates, threshold, low_threshold) -> list[int]:
    taken, run = set(), []
    for i in range(len(masked) + 1):
        if i < len(masked) and masked[i]:
            run.append(i)
            continue
        members = [j for j in run if candidates[j]]
        best = max((confidence[j] for j in members), default=None)
        taken |= {j for j in members if confidence[j] == best and (low_threshold is None or best > low_threshold)}
        run = []
    everyone = [i for i in range(len(masked)) if masked[i] and candidates[i]]
    taken |= {i for i in everyone if threshold is not None and confidence[i] > threshold}
    taken |= set(sorted(everyone, key=lambda i: (-confidence[i], i))[:1])
    return sorted(taken or order_of(confidence, masked)[:1])


numbers = st.sampled_from([None, 0.0, 0.25, 0.5, 0.9])


@settings(max_examples=150)
@given(scores, masks, masks, numbers, numbers)
def test_hierarchical_equals_brute_force(confidence, masked, mask_wins, threshold, low_threshold) -> None:
    """Ties, segments without candidates, no segment at all; always progress."""
    candidates = [not wins for wins in mask_wins]
    wanted = hierarchical_brute_force(confidence, masked, candidates, threshold, low_threshold)
    assert decide(Hierarchical(threshold, low_threshold), confidence, masked, mask_wins=mask_wins) == wanted


def test_hierarchical_halves_recursively() -> None:
    """Where confidence peaks in the middle of every run, 1, 2, 4, 8 positions are committed."""
    width = 15
    confidence = [0.3 + 0.1 * ((i + 1) & -(i + 1)).bit_length() for i in range(width)]
    masked, counts = [True] * width, []
    while any(masked):
        predictions, view = predictions_of(confidence), view_of(masked)
        chosen = np.asarray(Hierarchical(None, 0.2).decide(predictions, view, ())[0][0])
        counts.append(int(chosen.sum()))
        masked = [one and not now for one, now in zip(masked, chosen, strict=True)]
    assert counts == [1, 2, 4, 8]


def test_credit_grows_decays_and_is_reset() -> None:
    """C' = decay C + p^boost at the best token of masked positions, from nothing in a block's first forward."""
    rule = Credit(weight=0.7, boost=0.5, decay=0.8)
    logits = jax.random.normal(jax.random.key(0), (1, WIDTH, 3))
    probability = np.asarray(jax.nn.softmax(logits))[0]
    best, masked = probability.argmax(axis=-1), np.arange(WIDTH) % 3 != 0
    expected = np.zeros((WIDTH, 3))
    state = jnp.full((1, WIDTH, 3), 9.0)  # of another block
    for step in range(3):
        adjusted, state = rule.adjust(logits, view_of(masked, step=step), state)
        expected *= 0.8
        expected[masked, best[masked]] += np.sqrt(probability[masked, best[masked]])
        np.testing.assert_allclose(state[0], expected, rtol=1e-5)
        np.testing.assert_allclose(adjusted[0], logits[0] + 0.7 * np.log1p(expected), rtol=1e-5)


def test_caution_raises_thresholds_only() -> None:
    """Iteration smoothing's bound counts for `threshold`, never for `low_threshold`."""
    confidence, masked = [0.95, 0.7, 0.1, 0.6, 0.1, 0.2, 0.65, 0.2], [True, True, False, True, False, True, True, True]
    view = dataclasses.replace(view_of(masked), caution=jnp.asarray([0.9]))
    taken = lambda rule: np.flatnonzero(rule.decide(predictions_of(confidence), view, ())[0][0]).tolist()
    assert taken(Threshold(0.5)) == [0]
    assert taken(Threshold(0.97)) == [0]
    assert taken(Hierarchical(0.5, 0.55)) == [0, 3, 6]


@pytest.mark.parametrize(("threshold", "first"), [(0.8, 10), (0.9, 5), (0.95, 3)])
def test_a_threshold_acts_only_from_where_smoothing_s_schedule_has_fallen_to_it(threshold, first) -> None:
    """As dInfer's page says: max(threshold, 1 - 0.02 t), t from 0; a position just above the threshold waits before."""
    confidence, masked = [threshold + 0.005, 0.999, *[0.0] * 6], [True, True] + [False] * 6

    def taken(t: int) -> list[int]:
        view = dataclasses.replace(view_of(masked, step=t), caution=Smoothing().caution(jnp.asarray([t])))
        return np.flatnonzero(Threshold(threshold).decide(predictions_of(confidence), view, ())[0][0]).tolist()

    assert [taken(t) for t in range(first + 3)] == [[1]] * first + [[0, 1]] * 3


@settings(max_examples=60)
@given(scores, masks, st.sampled_from([0.0, 0.5, 1.0, 1.9, 3.0]), st.sampled_from([Factor, official.Factor]))
def test_factor_walks_the_list(confidence, masked, factor, kind) -> None:
    """The walk of the published code: stop at the first n whose confidence is below 1 - factor / (n + 1)."""
    order, taken = order_of(confidence, masked), 0
    count = len(order)
    for n in range(1, count + 1):
        last_untested = kind is official.Factor and n == count
        if n > 1 and not last_untested and np.float32(confidence[order[n - 1]]) < np.float32(1 - factor / (n + 1)):
            break
        taken = n
    assert decide(kind(factor), confidence, masked) == sorted(order[:taken])


def eb_brute_force(error, entropy, candidates, gamma) -> list[int]:
    order = sorted((i for i in range(len(error)) if candidates[i]), key=lambda i: (error[i], i))
    best = 1 if order else 0
    for j in range(1, len(order) + 1):
        taken = [entropy[i] for i in order[:j]]
        if sum(taken) - max(taken) <= gamma + 1e-9:
            best = max(best, j)
    return sorted(order[:best])


@settings(max_examples=150)
@given(scores, scores, masks, st.sampled_from([0.0, 0.1, 0.35, 0.5, 1.0, 2.0, math.inf]))
def test_eb_select_equals_brute_force(error, entropy, candidates, gamma) -> None:
    """Ties, zeros, one candidate and none, gamma 0 and infinity; values are multiples of 1/20, so sums are exact."""
    found = select(*(jnp.asarray(x)[None] for x in (error, entropy, candidates)), gamma + 1e-6)
    assert np.flatnonzero(np.asarray(found[0])).tolist() == eb_brute_force(error, entropy, candidates, gamma)


@settings(max_examples=60)
@given(scores, masks, st.integers(0, 5), st.sampled_from([0.0, 0.35, 1.0, math.inf]), st.integers(1, WIDTH))
def test_a_random_order_is_that_of_the_draws(confidence, masked, step, gamma, k) -> None:
    """Other draws in every forward; the bound is still of the entropies, here 1 - confidence."""
    draws = np.asarray(view_of(masked, step=step).uniform()[0])
    order = sorted((i for i in range(WIDTH) if masked[i]), key=lambda i: draws[i])
    assert decide(TopK(k, proxy="random"), confidence, masked, step=step) == sorted(order[:k])
    wanted = eb_brute_force(draws, [1 - x for x in confidence], masked, gamma)
    assert decide(EB(gamma + 1e-6, proxy="random"), confidence, masked, step=step) == wanted


def test_a_random_order_is_uniform_and_needs_a_key() -> None:
    rows = 20_000
    view = dataclasses.replace(
        view_of([False, True, True, True]), noise=KeyNoise(jax.random.split(jax.random.key(0), rows))
    )
    repeat = lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:]))
    view = dataclasses.replace(
        view, undecided=repeat(view.undecided), positions=repeat(view.positions), nfe=repeat(view.nfe)
    )
    predictions = jax.tree.map(repeat, predictions_of([0.9, 0.8, 0.7, 0.6]))
    chosen, _ = TopK(1, proxy="random").decide(predictions, view, ())
    share = np.asarray(chosen).mean(axis=0)
    assert share[0] == 0 and abs(share[1:] - 1 / 3).max() < 5 * math.sqrt(2 / 9 / rows)
    for rule in (TopK(1, proxy="random"), EB(proxy="random")):
        with refuses("pass key"):
            rule.decide(predictions, dataclasses.replace(view, noise=None), ())


@pytest.mark.parametrize("proxy", ["confidence", "entropy", "margin"])
@pytest.mark.parametrize("score_from", ["raw", "sampling"])
def test_eb_of_the_distribution_that_is_drawn_from(score_from, proxy) -> None:
    """Against NumPy in float64: temperature and top-p change p, and with it the order and the bound."""
    logits = np.random.default_rng(1).normal(size=(64, WIDTH, 12)) * np.linspace(0.5, 6, 64)[:, None, None]
    sampling = Sampling(temperature=0.5, top_p=0.8)
    found = predict(
        given_logits(jnp.asarray(logits, jnp.float32)),
        sampling,
        mask_id=MASK,
        score_from=score_from,
        draw=lambda ids: jnp.full((64, WIDTH, 12), 0.5),
    )
    p = np.exp(logits / 0.5 if score_from == "sampling" else logits)
    p /= p.sum(axis=-1, keepdims=True)
    if score_from == "sampling":
        ordered = -np.sort(-p, axis=-1)
        before = np.cumsum(ordered, axis=-1) - ordered
        least = np.where(before <= 0.8, ordered, 1.0).min(axis=-1, keepdims=True)  # the last that is kept
        p = np.where(p >= least, p, 0.0)
        p /= p.sum(axis=-1, keepdims=True)
    entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1)
    best = -np.sort(-p, axis=-1)[..., :2]
    error = {"confidence": -best[..., 0], "entropy": entropy, "margin": best[..., 1] - best[..., 0]}[proxy]
    view = dataclasses.replace(view_of([True] * WIDTH), undecided=jnp.ones((64, WIDTH), bool))
    chosen, _ = EB(1.5, proxy, score_from).decide(found, view, ())
    counts = set()
    for row in range(64):
        wanted = eb_brute_force(error[row], entropy[row], [True] * WIDTH, 1.5)
        assert np.flatnonzero(np.asarray(chosen[row])).tolist() == wanted
        counts.add(len(wanted))
    assert len(counts) > 2


def counts_per_step(rule: Rule, masks: int) -> list[int]:
    """How many positions each forward commits when the rule runs a block of this many masks to its end."""
    score = jax.random.uniform(jax.random.key(0), (1, masks))
    predictions = predictions_of(score[0])

    @jax.jit
    def step(masked, index, state):
        view = view_of(jnp.zeros((masks,), bool), block_undecided=masks)
        view = dataclasses.replace(view, undecided=masked, step=index[None], nfe=index[None])
        change, state = rule.change(predictions, view, state)
        change, last = progressing(rule, change, predictions, view)
        done = last | rule.block_done(view, change.undecided.any(axis=1), state)
        return masked & ~change.undecided, state, done[0]

    masked, state, counts, done = jnp.ones((1, masks), bool), rule.init(1, WIDTH, 2), [], False
    while not done:
        chosen, state, done = step(masked, jnp.int32(len(counts)), state)
        assert not bool((chosen & ~masked).any())
        counts.append(int(chosen.sum()))
        masked &= ~chosen
    assert not bool(masked.any())
    return counts


@pytest.mark.parametrize(
    ("masks", "steps", "expected"),
    [(8, 8, [1] * 8), (16, 3, [6, 5, 5]), (8, 1, [8]), (5, 20, [1] * 5), (7, 4, [2, 2, 2, 1])],
)
def test_llada_quota(masks: int, steps: int, expected: list[int]) -> None:
    assert counts_per_step(LLaDA(steps), masks) == expected
    assert counts_per_step(LLaDA(steps, remasking="random"), masks) == expected
    assert counts_per_step(official.LLaDA(steps), masks) == expected + [0] * (steps - len(expected))


@pytest.mark.parametrize(
    ("masks", "steps", "expected"),
    [
        (32, 32, [0] + [1] * 30 + [2]),
        (32, 16, [1] + [2] * 14 + [3]),
        (32, 8, [3] + [4] * 6 + [5]),
        (24, 7, [3, 3, 3, 3, 3, 4, 5]),
        (40, 12, [3] * 9 + [4, 4, 5]),
        (256, 256, [0] + [1] * 254 + [2]),
        (24, 48, [0] * 25 + [1] * 22 + [2]),
    ],
)
def test_dream_schedule(masks: int, steps: int, expected: list[int]) -> None:
    """The published counts; by default the forwards that would commit nothing are not run."""
    assert counts_per_step(official.Dream(steps), masks) == expected
    assert counts_per_step(Dream(steps), masks) == [count for count in expected if count]


@pytest.mark.parametrize("first", [0, 1, 2, 5, 1000, 999_999_999])
def test_steps_of_dream_that_would_commit_nothing_cost_next_to_nothing(first):
    """Their number is a client's to say; the first that commits is found, and by few looks."""
    looks = []

    def empty(at):
        looks.append(at)
        assert len(looks) < 300
        return at < jnp.array([first, 3])

    with jax.disable_jit():
        found = Dream(10**9).next_step(jnp.array([0, 2]), empty)
    assert found.tolist() == [first, 3]


def test_dream_origin_commits_each_with_its_chance() -> None:
    counts = counts_per_step(Dream(10, alg="origin"), 2000)
    assert sum(counts) == 2000 and len(counts) <= 10
    assert all(140 < count < 260 for count in counts), counts  # 200 expected each, five standard deviations


def test_alg_temp_draws_without_replacement_by_weight() -> None:
    """Over many draws the position with the largest score is taken most often, and any can be."""
    confidence = jnp.asarray([[0.9, 0.5, 0.1, 0.1]])
    predictions = predictions_of(confidence[0])
    rule = Dream(2, alg="maskgit_plus", alg_temp=0.5, eps=0.5)

    def draw(key):
        view = view_of([True] * 4, block_undecided=4)
        view = BlockView(**{**view.__dict__, "noise": KeyNoise(key[None])})
        return rule.decide(predictions, view, rule.init(1, WIDTH, 2))[0][0]

    taken = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 4000)))
    assert (taken.sum(axis=1) == 1).all()
    share = taken.mean(axis=0)
    weights = np.exp(np.asarray(confidence[0]) / 0.5)
    np.testing.assert_allclose(share, weights / weights.sum(), atol=0.03)


def test_threshold_capped_by_steps() -> None:
    """After forward i at most (i + 1) / steps of the block is committed, whatever the threshold."""
    assert counts_per_step(Threshold(0.0, steps=4), 16) == [4] * 4
    assert counts_per_step(Threshold(0.0), 16) == [16]
    assert counts_per_step(Threshold(float("inf")), 5) == [1] * 5


# Scores and token choice ---------------------------------------------------------------------------------------------

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 12)) * 3, jnp.float32)
MASK = 5


def test_scores_equal_their_definitions() -> None:
    found = predict(given_logits(LOGITS), Sampling(), mask_id=MASK, score_from="raw", draw=None)
    p = np.asarray(jax.nn.softmax(LOGITS), np.float64)
    ordered = np.sort(p, axis=-1)[..., ::-1]
    writable = np.where(np.arange(12) == MASK, -1, p)
    np.testing.assert_array_equal(found.token, writable.argmax(axis=-1))
    np.testing.assert_allclose(found.confidence, writable.max(axis=-1), rtol=1e-5)
    np.testing.assert_allclose(found.max_probability, ordered[..., 0], rtol=1e-5)
    np.testing.assert_allclose(found.margin, ordered[..., 0] - ordered[..., 1], atol=1e-6)
    np.testing.assert_allclose(found.entropy, -(p * np.log(p)).sum(axis=-1), atol=1e-5)


def test_saturated_scores_are_exact() -> None:
    """One certain token: entropy exactly 0, confidence exactly 1; nothing is NaN with -inf logits."""
    logits = jnp.full((1, 1, 12), -jnp.inf).at[0, 0, 3].set(7.0)
    found = predict(given_logits(logits), Sampling(), mask_id=MASK, score_from="raw", draw=None)
    assert [float(x[0, 0]) for x in (found.confidence, found.margin, found.entropy)] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("score_from", ["raw", "sampling"])
def test_truncation_keeps_what_it_should(score_from: str) -> None:
    """top_p drops tokens whose preceding cumulative probability exceeds it; top_k keeps k; scores follow on request."""
    logits = jnp.log(jnp.asarray([[[0.5, 0.3, 0.15, 0.05]]]))
    at = lambda **options: predict(
        given_logits(logits), Sampling(**options), mask_id=9, score_from=score_from, draw=None
    )
    raw = score_from == "raw"
    for options, kept in [
        ({"top_p": 0.4}, 1),
        ({"top_p": 0.55}, 2),
        ({"top_p": 0.9}, 3),
        ({"top_k": 2}, 2),
        ({"top_k": 3, "top_p": 0.55}, 2),
    ]:
        total = 1.0 if raw else float(jnp.exp(logits)[0, 0, :kept].sum())
        np.testing.assert_allclose(at(**options).confidence, [[0.5 / total]], rtol=1e-5)


def test_draws_follow_the_tempered_truncated_distribution() -> None:
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    rows = 20_000
    uniform = jax.random.uniform(jax.random.key(0), (rows, 1, 4), minval=1e-7)
    sampling = Sampling(temperature=2.0, top_k=3)
    found = predict(
        given_logits(jnp.tile(logits, (rows, 1, 1))), sampling, mask_id=9, score_from="raw", draw=lambda ids: uniform
    )
    share = np.bincount(np.asarray(found.token[:, 0]), minlength=4) / rows
    weights = np.sqrt([0.5, 0.3, 0.15, 0.0])
    np.testing.assert_allclose(share, weights / weights.sum(), atol=0.012)
    raw = np.asarray([0.5, 0.3, 0.15, 0.05])[np.asarray(found.token[:, 0])]
    np.testing.assert_allclose(found.confidence[:, 0], raw, rtol=1e-5)


def test_the_mask_token_is_never_chosen() -> None:
    """Not even when it is all that truncation leaves, or when it is drawn."""
    logits = jnp.zeros((1, 1, 4)).at[0, 0, 1].set(9.0).at[0, 0, 2].set(1.0)
    uniform = jnp.full((1, 1, 4), 0.5)
    for sampling in (Sampling(), Sampling(top_k=1), Sampling(top_p=0.1), Sampling(temperature=1.0, top_k=1)):
        found = predict(given_logits(logits), sampling, mask_id=1, score_from="raw", draw=lambda ids: uniform)
        assert int(found.token[0, 0]) == 2


def test_deferred_tokens_come_last_under_every_score() -> None:
    logits = jnp.asarray([[[9.0, 0.0, 0.0], [0.1, 0.0, 0.0], [0.0, 0.2, 0.0]]])  # sure of 0, of little, of 1
    found = predict(given_logits(logits), Sampling(defer=jnp.asarray([0])), mask_id=9, score_from="raw", draw=None)
    assert found.token[0].tolist() == [0, 0, 1]
    assert float(found.confidence[0, 0]) == 0.0 and float(found.confidence[0, 2]) > 0.5
    view = view_of([True, True, True])
    for rule in (TopK(1), TopK(1, proxy="entropy"), TopK(1, proxy="margin"), EB(0.0), Threshold(0.9), LLaDA(3)):
        chosen, _ = rule.decide(found, view, rule.init(1, WIDTH, 2))
        assert np.flatnonzero(np.asarray(chosen[0])).tolist() == [2], rule


def test_noise_depends_on_key_step_and_purpose_only() -> None:
    noise = KeyNoise(jax.random.split(jax.random.key(0), 2))
    positions = jnp.zeros((2, 5), jnp.int32)
    at = lambda source, step, purpose, place=positions: np.asarray(
        source.uniform(purpose, jnp.asarray(step), place, None)
    )
    first = at(noise, [0, 0], Purpose.ORDER)
    alone = at(KeyNoise(noise.keys[1:]), [0], Purpose.ORDER, positions[:1])
    np.testing.assert_array_equal(first[1], alone[0])
    assert (first[0] != first[1]).all()
    assert (at(noise, [1, 1], Purpose.ORDER) != first).all()
    assert (at(noise, [0, 0], Purpose.TOKENS) != first).all()


def test_structures_of_different_classes_differ() -> None:
    """Two rules or policies with the same fields must never share a program."""
    structure = jax.tree.structure
    assert structure(NoCache()) != structure(DualCache()) != structure(PrefixCache())
    assert structure(TopK(1, proxy="entropy")) != structure(EB(1, proxy="entropy"))
    assert structure(Threshold(0.5)) == structure(Threshold(0.7)) != structure(Threshold(0.5, steps=4))
    leaves, tree = jax.tree.flatten_with_path(EB(0.3))
    assert jax.tree_util.keystr(leaves[0][0]) == ".gamma" and jax.tree.unflatten(tree, [0.3]) == EB(0.3)
