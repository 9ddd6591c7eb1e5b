"""Log-probabilities of written tokens: those of a plain log-softmax of each forward's own logits, whatever chose the
token."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_equal, programs_in
from train_toys import DREAM, LLADA

from dllm_jax import Denoiser, Model
from dllm_jax.models.denoiser import block_causal
from dllm_jax.params.specs import init_params
from dllm_jax.pytree import pytree
from samplers import (
    APD,
    BlockSampler,
    Credit,
    DualCache,
    Edit,
    Hierarchical,
    KeyNoise,
    LeftRight,
    PipelineSampler,
    Remask,
    Sampling,
    Threshold,
    Verifier,
    sample_jit,
    stream,
)
from samplers import Dream as DreamRule
from samplers.generation import answer
from samplers.rules.base import Change
from samplers.tokens import predictions
from samplers.tokens.guidance import Guided, paired
from samplers.tokens.noise import Purpose
from samplers.tokens.predictions import given, logprob_of, predict

GEN, BLOCK = 12, 4
PROMPTS = jnp.asarray([[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0], [3, 1, 4, 1, 5, 0]])
PROMPT_LENGTHS, GEN_LENGTHS = np.array([6, 3, 5]), np.array([12, 10, 5])
KEYS = jax.random.split(jax.random.key(2), 3)
EOS, MASK, V = LLADA.eos_id, LLADA.mask_id, LLADA.vocab_size


def denoiser_of(config, seed: int = 1) -> Denoiser:
    params = init_params(config, jax.random.key(seed), dtype="float32")
    return Denoiser(config, {name: x * 15 if x.ndim > 1 else x for name, x in params.items()})  # far from uniform


MODEL, SHIFTED = denoiser_of(LLADA), denoiser_of(DREAM)
VERIFIER = Verifier(denoiser_of(DREAM.replace(family="qwen2", attention="causal", shift=False), seed=3))
SUPPRESSED = Sampling(suppress=jnp.asarray([3, 7]), defer=jnp.arange(8, 14))
DRAWN = Sampling(temperature=0.8, top_p=0.9)
MIXED = Sampling(temperature=jnp.asarray([0.0, 1.2, 0.7]), top_k=9, suppress=SUPPRESSED.suppress, defer=jnp.arange(2))


@pytree(static=("ahead",))
class Judging(Threshold):
    """Also commits every position whose best token has a probability above `above`."""

    above: float = 0.2
    ahead: bool = True

    reads_hidden = True

    def looks_ahead(self, cached: bool) -> bool:
        return self.ahead

    def judge(self, denoiser, hidden, logits, best):
        return best.confidence > self.above


@pytree()
class Other(Threshold):
    """Commits two positions of each forward, the first of them with a token that nobody predicted."""

    def change(self, predictions, view, state):
        place = jnp.cumsum(view.undecided, axis=1) * view.undecided
        tokens = jnp.where(place == 1, (predictions.token + 1) % MASK, jnp.where(place == 2, predictions.token, -1))
        chosen = (place == 1) | (place == 2)
        return Change(jnp.where(chosen, tokens, view.tokens), view.undecided & ~chosen), state


@jax.jit
def by_all(denoiser, tokens):
    """Log-probabilities [B, S, V] of a forward of everything, as most samplers without a cache run it."""
    hidden, _ = denoiser.forward(tokens, PROMPT_LENGTHS + GEN_LENGTHS)
    return jax.nn.log_softmax(denoiser.logits(hidden))


@jax.jit
def by_blocks(denoiser, tokens):
    """The same under the pipeline's mask."""
    visible = block_causal(tokens.shape[1], jnp.asarray(PROMPT_LENGTHS), BLOCK)
    hidden, _ = denoiser.forward(tokens, jnp.minimum(visible, (PROMPT_LENGTHS + GEN_LENGTHS)[:, None]))
    return jax.nn.log_softmax(denoiser.logits(hidden))


@jax.jit
def by_guidance(denoiser, tokens):
    """The same of guided logits; no token of the canvas is given."""
    place = jnp.arange(tokens.shape[1])
    inside = (place >= PROMPT_LENGTHS[:, None]) & (place < (PROMPT_LENGTHS + GEN_LENGTHS)[:, None])
    guided = Guided(denoiser, 0.7)
    hidden, _ = guided.forward(paired(denoiser, tokens, ~inside & (tokens != MASK)), PROMPT_LENGTHS + GEN_LENGTHS)
    return jax.nn.log_softmax(guided.logits(hidden))


def checked(sampler: Any, denoiser: Denoiser = MODEL, model=by_all, unknown=None, **options) -> Any:
    """Runs step by step and compares with what a plain forward of every state says about the tokens that were written
    from it; the last write counts. Returns the result.

    Args:
        unknown: (state's canvas) -> [B, G] bool, written positions that have no log-probability.
    """
    options = {"key": KEYS, "gen_lengths": jnp.asarray(GEN_LENGTHS), **options}
    wanted, before, state = np.full((3, GEN), np.nan, np.float32), None, None
    for state in stream(sampler, denoiser, PROMPTS, jnp.asarray(PROMPT_LENGTHS), **options):
        canvas = jax.tree.map(np.array, dataclasses.replace(state.canvas, noise=None))  # a step takes it
        if before is not None:
            found = np.asarray(model(denoiser, before.tokens))
            fresh = (canvas.decoded_at == before.nfe[:, None]) & ~before.done[:, None]
            rows, places = np.nonzero(fresh)
            at = rows, PROMPT_LENGTHS[rows] + places
            wanted[fresh] = found[(*at, canvas.tokens[at])]
            wanted[canvas.decoded_at < 0] = np.nan
            if unknown is not None:
                wanted[unknown(canvas)] = np.nan
            np.testing.assert_allclose(canvas.logprobs, wanted, rtol=1e-4, atol=2e-5)
        before = canvas
    result = sampler.result(denoiser, state)
    np.testing.assert_array_equal(result.logprobs, before.logprobs)
    return result


def blocks(rule, **options) -> BlockSampler:
    return BlockSampler(rule, gen_length=GEN, block_length=BLOCK, **options)


SAMPLINGS = {"greedy": Sampling(), "without": SUPPRESSED, "drawn": DRAWN, "mixed": MIXED}
REVISING = {"edit": Edit(0.3, 0.2), "remask": Remask(GEN), "unsure": Remask(GEN, threshold=0.5)}
PIPELINES = [(None, Sampling()), (Credit(0.3, weight=2.0), MIXED), (Judging(0.6), MIXED)]
RULES = {
    "threshold": Threshold(0.3),
    "hierarchical": Hierarchical(0.3, 0.1),
    "credit": Credit(0.3, weight=2.0),
    "dream": DreamRule(6),
    "judging": Judging(0.6, ahead=False),
    "ahead": Judging(0.6),
}
# every rule where tokens are drawn, cut, suppressed and deferred at once, and every sampling with one rule
GRID = [(rule, "mixed") for rule in RULES] + [("threshold", "greedy"), ("threshold", "without"), ("dream", "drawn")]


@pytest.mark.parametrize(("rule", "sampling"), GRID)
def test_as_a_plain_forward_says(rule: str, sampling: str) -> None:
    result = checked(blocks(RULES[rule], sampling=SAMPLINGS[sampling]))
    inside = np.arange(GEN) < GEN_LENGTHS[:, None]
    assert np.isfinite(result.logprobs[inside]).all() and np.isnan(result.logprobs[~inside]).all()


def test_in_tiles(monkeypatch) -> None:
    monkeypatch.setattr(predictions, "TILE_ELEMENTS", 1)
    monkeypatch.setattr(predictions, "LANES", 1)
    jax.clear_caches()
    for sampling in (Sampling(), MIXED):
        checked(blocks(RULES["threshold"], sampling=sampling))
    jax.clear_caches()


def test_with_a_shifted_model_and_with_guidance() -> None:
    checked(blocks(Threshold(0.3)), SHIFTED)
    checked(blocks(Threshold(0.3), guidance=0.7), model=by_guidance)


@pytest.mark.parametrize("rule", REVISING.values(), ids=REVISING.keys())
def test_the_last_write_counts(rule) -> None:
    result = checked(blocks(rule, sampling=Sampling(temperature=1.0)))
    assert np.isfinite(result.logprobs[result.decoded_at >= 0]).all()
    if isinstance(rule, Edit):
        assert result.edits.any()


def test_what_nobody_predicted_has_none() -> None:
    first = []

    def unknown(canvas):
        """The first position of every two that were written together."""
        same = (canvas.decoded_at[:, 1:] == canvas.decoded_at[:, :-1]) & (canvas.decoded_at[:, 1:] >= 0)
        alone = np.array([[(row == at).sum() == 1 for at in row] for row in canvas.decoded_at])
        first.append(np.pad(same, ((0, 0), (0, 1))) | (alone & (canvas.decoded_at >= 0)))
        return first[-1]

    result = checked(blocks(Other()), unknown=unknown)
    assert np.isnan(result.logprobs[first[-1]]).all() and np.isfinite(result.logprobs).any()


def test_given_and_filled_tokens_have_none() -> None:
    tokens = np.full((3, GEN), MASK)
    tokens[:, [1, 2, 9]] = 4
    result = checked(blocks(Threshold(0.3)), given=jnp.asarray(tokens))
    assert np.isnan(result.logprobs[tokens == 4]).all()
    listed = answer(Model(LLADA, {}, None, "toy"), [1], jax.device_get(result), 0).logprobs
    assert listed[1:3] == [None, None] and None not in listed[3:9]
    json.dumps(listed, allow_nan=False)

    tokens[:] = MASK
    tokens[1, 5] = EOS  # so that an end is there as soon as what is before it
    sampler = blocks(Threshold(0.3), fill_after_eos=True)
    result = sample_jit(sampler, MODEL, PROMPTS, jnp.asarray(PROMPT_LENGTHS), key=KEYS, given=jnp.asarray(tokens))
    behind = np.cumsum(np.asarray(result.tokens) == EOS, axis=1) > 1
    assert behind[1, 6:].all() and np.isnan(result.logprobs[behind]).all()
    assert np.isfinite(result.logprobs[1, :5]).all() and np.isnan(result.logprobs[1, 5])


@pytest.mark.parametrize(("rule", "sampling"), PIPELINES)
def test_in_the_pipeline(rule, sampling) -> None:
    sampler = PipelineSampler(GEN, BLOCK, tau_add=0.2, tau_act=0.6, threshold=0.3, rule=rule, sampling=sampling)
    result = checked(sampler, model=by_blocks)
    assert np.isfinite(result.logprobs[result.decoded_at >= 0]).all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, suppress=jnp.asarray([3, 7]))])
def test_from_left_to_right(sampling) -> None:
    checked(LeftRight(GEN, 2, sampling=sampling))
    checked(APD(VERIFIER, GEN, weight=0.8, sampling=sampling), SHIFTED)


def test_a_batch_and_its_rows_agree() -> None:
    sampler = blocks(Threshold(0.3), sampling=MIXED, cache=DualCache())
    together = jax.device_get(sample_jit(sampler, MODEL, PROMPTS, jnp.asarray(PROMPT_LENGTHS), key=KEYS))
    for row in range(3):
        one = dataclasses.replace(MIXED, temperature=MIXED.temperature[row : row + 1])
        alone = blocks(Threshold(0.3), sampling=one, cache=DualCache())
        found = sample_jit(alone, MODEL, PROMPTS[row : row + 1], PROMPT_LENGTHS[row : row + 1], key=KEYS[row : row + 1])
        for name, mine in vars(jax.device_get(found)).items():
            assert_equal(mine[0], getattr(together, name)[row], name)


def test_numbers_and_no_numbers() -> None:
    logits = jax.random.normal(jax.random.key(0), (1, 5, V)) * 9
    logits = logits.at[0, 1, 4].set(jnp.nan).at[0, 2, 5].set(jnp.inf).at[0, 3].set(-jnp.inf).at[0, 4, 2:].set(-jnp.inf)
    draw = lambda ids: KeyNoise(KEYS[:1]).uniform(Purpose.TOKENS, jnp.zeros(1, int), jnp.arange(5)[None], ids)
    for sampling in (Sampling(), SUPPRESSED, Sampling(temperature=1.0, top_p=0.9)):
        found = predict(given(logits), sampling, mask_id=0, score_from="raw", draw=draw)
        wanted = jnp.take_along_axis(jax.nn.log_softmax(logits), found.token[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(found.logprob, wanted, rtol=1e-5)
        assert np.isnan(found.logprob[0]).tolist() == [False, True, True, True, False]
        np.testing.assert_allclose(logprob_of(logits, found.token), wanted, rtol=1e-5)


def exponentials(jaxpr) -> int:
    """How many exponentials of a whole vocabulary a program has, those of the programs in it included."""
    found = [each for part in programs_in(jaxpr) for each in part.eqns if each.primitive.name in ("exp", "exp2")]
    return sum(each.outvars[0].aval.shape[-1:] == (V,) for each in found)


@pytest.mark.parametrize(("sampling", "count"), [(Sampling(), 1), (Sampling(temperature=0.7), 1), (SUPPRESSED, 2)])
def test_what_it_costs(sampling, count) -> None:
    """Nothing where the scores are the model's own; else one sum more in the same pass."""
    sampler = blocks(Threshold(0.3), sampling=sampling)
    state = sampler.init(MODEL, PROMPTS, jnp.asarray(PROMPT_LENGTHS), key=KEYS)
    assert exponentials(jax.make_jaxpr(sampler.step)(MODEL, state).jaxpr) == count
