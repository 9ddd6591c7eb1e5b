"""Rules that take back what was written: ReMDM's remasking and LLaDA2.1's editing."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_equal, refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from test_combinations import CACHES, GEN_LENGTHS
from test_engine import BLOCK, EOS, GEN, MASK, first_layers, run

from dllm_jax import Model
from dllm_jax.models.denoiser import FunctionDenoiser
from dllm_jax.pytree import pytree
from samplers import (
    BlockSampler,
    Dream,
    Edit,
    LLaDA,
    PipelineSampler,
    Predictions,
    Remask,
    Result,
    Rule,
    Smoothing,
    Threshold,
    sample_jit,
    stop_on,
)
from samplers.rules import RULES, BlockView
from samplers.rules.base import Change
from samplers.tokens.noise import KeyNoise

# Rules alone, against loops over numbers ------------------------------------------------------------------------------

W, HOLE = 6, 9  # a block's length, the mask token

levels = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5, 0.9, 1.0]), min_size=W, max_size=W)
tokens = st.lists(st.integers(0, 2), min_size=W, max_size=W)
kinds = st.lists(st.sampled_from(["open", "written", "given"]), min_size=W, max_size=W)


def view_of(kind: list[str], standing: list[int], step: int = 1, block_undecided: int = W) -> BlockView:
    undecided = jnp.asarray([[one == "open" for one in kind]])
    return BlockView(
        undecided=undecided,
        positions=jnp.arange(W)[None],
        first=jnp.zeros((1,), jnp.int32),
        step=jnp.asarray([step]),
        block_undecided=jnp.asarray([block_undecided]),
        num_blocks=jnp.asarray([1]),
        noise=KeyNoise(jax.random.key(3)[None]),
        nfe=jnp.asarray([step]),
        tokens=jnp.where(undecided, HOLE, jnp.asarray([standing])),
        written=jnp.asarray([[one == "written" for one in kind]]),
        mask_id=HOLE,
    )


def predictions_of(confidence: list[float], predicted: list[int]) -> Predictions:
    score = jnp.asarray([confidence], jnp.float32)
    yes = jnp.ones(score.shape, bool)
    return Predictions(jnp.asarray([predicted]), score, jnp.log(score), score, score, 1.0 - score, ~yes, yes)


def changed(rule: Rule, confidence, predicted, view: BlockView, state: Any) -> tuple[Any, Any, Any]:
    change, state = rule.change(predictions_of(confidence, predicted), view, state)
    return np.asarray(change.tokens[0]), np.asarray(change.undecided[0]), state


@settings(max_examples=40)
@given(levels, tokens, tokens, kinds, st.sampled_from([0.1, 0.5, 1.5]), st.sampled_from([0.0, 0.5, 0.9]), st.data())
def test_edit_commits_and_replaces(confidence, predicted, standing, kind, threshold, editing, data) -> None:
    least = data.draw(st.integers(1, 3))
    rule = Edit(threshold, editing, num_to_transfer=least)
    found, undecided, state = changed(rule, confidence, predicted, view_of(kind, standing), rule.init(1, W, 10))
    order = sorted((i for i in range(W) if kind[i] == "open"), key=lambda i: -confidence[i])
    high = [i for i in order if confidence[i] > threshold]
    commit = high if len(high) >= least else order[:least]
    edits = [i for i in range(W) if kind[i] == "written" and confidence[i] > editing and predicted[i] != standing[i]]
    wanted = [HOLE if one == "open" else token for one, token in zip(kind, standing, strict=True)]
    for i in (*commit, *edits):
        wanted[i] = predicted[i]
    assert found.tolist() == wanted
    assert np.flatnonzero(undecided).tolist() == sorted(set(order) - set(commit))
    assert (int(state.post[0]), bool(state.edited[0])) == (not order, bool(edits))


class Drawn(NamedTuple):
    """Noise that somebody has chosen, [1, W]."""

    numbers: jax.Array

    def uniform(self, purpose, step, positions, ids=None) -> jax.Array:
        return self.numbers


@pytest.mark.parametrize("schedule", ["conf", "cap", "rescale"])
@settings(max_examples=30)
@given(levels, levels, kinds, st.integers(0, 7), st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.data())
def test_remask_draws_from_the_published_posterior(schedule, confidence, past, kind, step, eta, data) -> None:
    """Alpha at both times, sigma and the two probabilities as the paper has them; draws lie just beside these."""
    if step == 0:
        kind = ["given" if one == "written" else one for one in kind]
    steps, before, later = 8, step / 8, (step + 1) / 8
    highest = min(1.0, (1 - later) / before) if before else 1.0
    sigma = np.full(W, min(eta, highest) if schedule == "cap" else eta * highest)
    if schedule == "conf":
        weight = np.asarray([np.exp(-past[i]) if kind[i] == "written" else 0.0 for i in range(W)])
        sigma *= weight / max(weight.sum(), 1e-9)
    chance = np.where([one == "open" for one in kind], (later - (1 - sigma) * before) / (1 - before), sigma)
    wanted = np.asarray(data.draw(st.lists(st.booleans(), min_size=W, max_size=W)))
    happens = ((wanted & (chance > 1e-6)) | (chance > 0.98)) & [one != "given" for one in kind]
    draw = np.where(happens, chance * 0.999, np.maximum(chance * 1.001, 1e-7))

    view = view_of(kind, [1] * W, step)
    view = dataclasses.replace(view, noise=Drawn(jnp.asarray([draw], jnp.float32)))
    rule = Remask(steps, schedule, eta)
    state = rule.init(1, W, 10)._replace(confidence=jnp.asarray([past], jnp.float32))
    found, undecided, after = changed(rule, confidence, [2] * W, view, state)
    for i, one in enumerate(kind):
        assert undecided[i] == (happens[i] if one == "written" else one == "open" and not happens[i])
        assert found[i] == (HOLE if undecided[i] else 2 if one == "open" else 1)
        if one == "open" and happens[i]:
            assert after.confidence[0, i] == np.float32(confidence[i])


@pytest.mark.parametrize("schedule", ["cap", "rescale"])
def test_remasking_keeps_the_marginals(schedule) -> None:
    """Theorem of ReMDM: whatever sigma is, a share alpha of all positions is written at each time."""
    rows, steps = 3000, 5
    rule = Remask(steps, schedule, 0.6)
    view = view_of(["open"] * W, [0] * W, 0)
    wide = lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:]))
    view = dataclasses.replace(
        view,
        **{
            field: wide(getattr(view, field))
            for field in ("undecided", "positions", "tokens", "block_undecided", "num_blocks")
        },
        written=jnp.zeros((rows, W), bool),
        noise=KeyNoise(jax.random.split(jax.random.key(0), rows)),
    )
    predictions = jax.tree.map(wide, predictions_of([0.5] * W, [1] * W))
    state, reopened = rule.init(rows, W, 10), 0
    for step in range(steps):
        at = jnp.full((rows,), step)
        view = dataclasses.replace(view, step=at, nfe=at)
        change, state = rule.change(predictions, view, state)
        reopened += int((change.undecided & ~view.undecided).sum())
        assert abs(float(1 - change.undecided.mean()) - (step + 1) / steps) < 0.02
        view = dataclasses.replace(view, undecided=change.undecided, written=~change.undecided, tokens=change.tokens)
    assert reopened > rows and not view.undecided.any()


@settings(max_examples=40)
@given(levels, tokens, tokens, kinds, st.integers(1, 4), st.sampled_from([0.0, 0.3, 0.6]), st.integers(0, 4))
def test_remask_below_a_threshold(confidence, predicted, standing, kind, step, threshold, budget) -> None:
    rule, steps, spent = Remask(5, threshold=threshold, budget=budget), 5, 1
    state = rule.init(1, W, 10)._replace(reopened=jnp.asarray([spent]))
    found, undecided, after = changed(rule, confidence, predicted, view_of(kind, standing, step), state)
    order = sorted((i for i in range(W) if kind[i] == "open"), key=lambda i: -confidence[i])
    commit = order[: -(-len(order) // (steps - step))]
    level = np.asarray(confidence, np.float32)
    now = [c if p == s else min(1 - c, c) for c, p, s in zip(level, predicted, standing, strict=True)]
    low = sorted((i for i in range(W) if kind[i] == "written" and now[i] < np.float32(threshold)), key=lambda i: now[i])
    reopen = low[: max(budget - spent, 0)] if step + 1 < steps else []
    assert np.flatnonzero(undecided).tolist() == sorted((set(order) - set(commit)) | set(reopen))
    assert (found[undecided] == HOLE).all() and int(after.reopened[0]) == spent + len(reopen)
    assert all(found[i] == predicted[i] for i in commit)
    kept = [i for i in range(W) if kind[i] != "open" and i not in reopen]
    assert all(found[i] == standing[i] for i in kept)


@pytest.mark.parametrize(
    ("name", "rule", "options"),
    [
        ("threshold", "edit", {"threshold": -0.1}),
        ("editing_threshold", "edit", {"editing_threshold": float("nan")}),
        ("max_post_steps", "edit", {"max_post_steps": -1}),
        ("num_to_transfer", "edit", {"num_to_transfer": 0.5}),
        ("steps 3", "remask", {"steps": 3}),
        ("eta", "remask", {"steps": 4, "eta": 1.5}),
        ("'loop'", "remask", {"steps": 4, "schedule": "loop"}),
        ("threshold", "remask", {"steps": 4, "threshold": -1}),
        ("budget", "remask", {"steps": 4, "budget": 1.5}),
    ],
)
def test_numbers_that_make_no_sense(name, rule, options) -> None:
    with refuses(name):
        BlockSampler(RULES[rule](**options), gen_length=8, block_length=4)


# In the engine, on functions ------------------------------------------------------------------------------------------

V, END, BLANK = 12, 10, 11  # the vocabulary, its end and its mask token
LENGTH, WIDTH = 12, 4
TABLE = np.random.default_rng(0).normal(size=(3, V, V)).astype(np.float32) * 1.5


def of_neighbours(ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Logits that depend on a token and the ones beside it."""
    return sum(jnp.asarray(part)[jnp.roll(ids, shift, 1)] for part, shift in zip(TABLE, (-1, 0, 1), strict=True))


NEIGHBOURS = FunctionDenoiser(of_neighbours, mask_id=BLANK, eos_id=END)
PROMPT, PROMPTS = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, END], [2, 2, END, END]]), jnp.asarray([4, 3, 2])


def certain(target) -> FunctionDenoiser:
    """A denoiser that is sure of the tokens that a function wants of tokens [B, S]."""
    return FunctionDenoiser(lambda ids, _: 20.0 * jax.nn.one_hot(target(ids), V), mask_id=BLANK, eos_id=END)


def decoded(rule: Rule, denoiser=NEIGHBOURS, prompt=PROMPT, lengths=PROMPTS, given=None, **options) -> Result:
    sampler = BlockSampler(rule, gen_length=LENGTH, block_length=WIDTH, **options)
    keys = jax.random.split(jax.random.key(1), len(prompt))
    given = {} if given is None else {"given": given}
    return jax.device_get(sample_jit(sampler, denoiser, prompt, lengths, key=keys, **given))


def assert_same(one: Result, other: Result) -> None:
    for name in ("tokens", "decoded_at", "nfe", "edits"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def edited_by_the_sheet(prompt: list[int], width: int, rule: Edit) -> tuple[list[int], list[int], int, int]:
    """LLaDA2.1's loop in NumPy: the generation, when each token was written last, forwards and edits."""
    ids = np.full((1, width + LENGTH), END)
    ids[0, : len(prompt)] = prompt
    ids[0, len(prompt) : len(prompt) + LENGTH] = BLANK
    at, nfe, edits = np.full(LENGTH, -1), 0, 0
    for first in range(0, LENGTH, WIDTH):
        place, post = len(prompt) + first + np.arange(WIDTH), 0
        while True:
            masked = ids[0, place] == BLANK
            post += not masked.any()
            if post > rule.max_post_steps:
                break
            logits = np.asarray(_logits(jnp.asarray(ids)))[0, place]
            share = np.exp(logits - logits.max(-1, keepdims=True))
            share /= share.sum(-1, keepdims=True)
            best = np.where(np.arange(V) == BLANK, -np.inf, logits).argmax(-1)
            sure = share[np.arange(WIDTH), best]
            write = masked & (sure > rule.threshold)
            if write.sum() < rule.num_to_transfer:
                order = np.argsort(np.where(masked, -sure, np.inf), kind="stable")
                write = masked & np.isin(np.arange(WIDTH), order[: rule.num_to_transfer])
            replace = ~masked & (sure > rule.editing_threshold) & (best != ids[0, place])
            ids[0, place] = np.where(write | replace, best, ids[0, place])
            at[first + np.flatnonzero(write | replace)] = nfe
            nfe, edits = nfe + 1, edits + int(replace.sum())
            if not masked.any() and not replace.any():
                break
    return ids[0, len(prompt) : len(prompt) + LENGTH].tolist(), at.tolist(), nfe, edits


_logits = jax.jit(lambda ids: of_neighbours(ids, ids))


@pytest.mark.parametrize(
    "numbers",
    [(0.6, 0.3, 16, 1), (0.5, 0.0, 3, 1), (0.9, 0.4, 2, 2), (0.3, 0.2, 1, 4), (1.5, 0.5, 0, 1), (0.7, 1.5, 16, 1)],
)
def test_edit_is_the_published_loop(numbers) -> None:
    """Tokens, forwards, the last write of each position, and edits, row by row of a ragged batch."""
    found = decoded(Edit(*(jnp.asarray(number) for number in numbers)))
    for row, length in enumerate(PROMPTS):
        wanted = edited_by_the_sheet(PROMPT[row, : int(length)].tolist(), PROMPT.shape[1], Edit(*numbers))
        mine = (found.tokens[row].tolist(), found.decoded_at[row].tolist(), found.nfe[row], found.edits[row])
        assert mine == wanted
    if numbers == (0.5, 0.0, 3, 1):
        assert (found.edits > 0).all()


@pytest.mark.parametrize("threshold", [0.5, 0.8, 2.0])
def test_edit_that_edits_nothing_is_the_threshold(threshold) -> None:
    assert_same(decoded(Edit(jnp.float32(threshold), 1.1, 0)), decoded(Threshold(jnp.float32(threshold))))


@pytest.mark.parametrize("options", [{"threshold": 0.0}, {"threshold": 0.5, "budget": 0}])
@pytest.mark.parametrize("steps", [3, 6, 9, 12, 24])
def test_remask_that_may_not_is_llada(steps, options) -> None:
    assert_same(decoded(Remask(jnp.int32(steps), **options)), decoded(LLaDA(jnp.int32(steps))))


@pytest.mark.parametrize("schedule", ["conf", "cap", "rescale"])
def test_remdm_without_remasking_is_the_plain_sampler(schedule) -> None:
    assert_same(decoded(Remask(12, schedule, 0.0)), decoded(Dream(12, alg="origin", eps=0.0)))


@pytest.mark.parametrize("rule", [Remask(24, "rescale", 1.0), Remask(24), Remask(24, threshold=0.7)])
def test_remasking_ends_in_its_steps(rule) -> None:
    found = decoded(rule)
    assert (found.tokens != BLANK).all() and (found.decoded_at >= 0).all()
    assert (found.nfe <= 24).all() and (found.decoded_at < found.nfe[:, None]).all()
    assert (found.edits == 0).all()  # a position that was opened again is no edit


def test_what_reopens_for_ever_ends_all_the_same() -> None:
    """And what swings for ever: every forward takes back all that was written."""
    found = decoded(Remask(9, threshold=1.1, budget=10**6))
    assert (found.nfe == 9).all() and (found.tokens != BLANK).all()
    last = np.repeat([2, 5, 8], WIDTH)
    assert (found.decoded_at == last).sum() > found.decoded_at.size // 2
    swinging = certain(lambda ids: jnp.where(ids == BLANK, 0, (ids + 1) % 5))
    found = decoded(Edit(0.5, 0.0, 3), swinging)
    assert (found.nfe == 3 * (1 + 3)).all() and (found.edits == LENGTH * 3).all()
    assert (found.tokens == 3).all() and (found.decoded_at == np.repeat([3, 7, 11], WIDTH)).all()


@pytest.mark.parametrize("rule", [Edit(0.5, 0.0, 3), Remask(9, threshold=1.1, budget=100), Remask(9, "cap")])
def test_prompt_and_given_tokens_stay(rule) -> None:
    given = np.full((3, LENGTH), BLANK)
    given[:, [1, 2, 5, 11]] = [[7, 8, 9, 1]]
    given[1, :4] = 3  # a block that is given whole
    found = decoded(rule, given=jnp.asarray(given))
    kept = given != BLANK
    assert (found.tokens[kept] == given[kept]).all() and (found.decoded_at[kept] == -1).all()
    assert (found.decoded_at[~kept] >= 0).all()


def fickle(ids: jax.Array) -> jax.Array:
    """Wants an end at position 1 of the first block until nothing there is undecided; a true one at position 6."""
    place = jnp.arange(ids.shape[1])[None]
    guess = (ids[:, 1:5] == BLANK).any(axis=1, keepdims=True)
    return jnp.where(((place == 2) & guess) | (place == 7), END, place % 5)


ONE, ITS = jnp.asarray([[0], [3]]), jnp.asarray([1, 1])


def test_an_end_counts_only_in_a_complete_block() -> None:
    """An end token that is edited away is none; without a look back it is believed."""
    stop = stop_on([END], vocab_size=V)
    found = decoded(Edit(), certain(fickle), ONE, ITS, stop=stop)
    assert (found.lengths == 6).all() and (found.edits == 1).all() and (found.nfe == 3 + 2).all()
    assert (found.tokens[:, :6] == [1, 2, 3, 4, 0, 1]).all()
    assert found.decoded_at[0].tolist() == [0, 1, 0, 0, 3, 3, 3, 3, -1, -1, -1, -1]
    hasty = decoded(Edit(max_post_steps=0), certain(fickle), ONE, ITS, stop=stop)
    assert (hasty.lengths == 1).all() and (hasty.nfe == 1).all()


def test_what_is_filled_behind_an_end_is_final() -> None:
    """The end token of a complete block fills the rest at once, and nobody edits that."""
    found = decoded(Edit(), certain(fickle), ONE, ITS, fill_after_eos=True)
    assert (found.lengths == 6).all() and (found.edits == 1).all() and (found.nfe == 3 + 2).all()
    assert (found.tokens[:, 6:] == END).all()
    assert (found.decoded_at[:, 7:] == [3, *[4] * 4]).all()


def test_a_model_that_breaks_in_a_look_back_is_told() -> None:
    broken = FunctionDenoiser(
        lambda ids, _: jnp.where((ids == BLANK).any(axis=1)[:, None, None], 20.0 * jax.nn.one_hot(ids * 0, V), jnp.nan),
        mask_id=BLANK,
        eos_id=END,
    )
    found = decoded(Edit(), broken, ONE, ITS)
    assert (found.tokens == 0).all() and (found.broken_at == found.nfe - 1).all()


@pytest.mark.parametrize("rule", [Edit(), Remask(12)])
def test_a_pipeline_refuses_them(rule) -> None:
    with refuses("BlockSampler"):
        PipelineSampler(gen_length=LENGTH, block_length=WIDTH, rule=rule).init(NEIGHBOURS, PROMPT)


# With every cache policy ----------------------------------------------------------------------------------------------

REVISING: dict[str, Rule] = {
    "edit": Edit(0.6, 0.0, 3),
    "edit-quality": Edit(0.7, 0.5),
    "remdm": Remask(GEN, "rescale", 0.5),
    "remdm-conf": Remask(GEN),
    "remask": Remask(GEN, threshold=0.6),
}


@pytree()
class OneOf(Rule):
    """All of them in one program, told apart by a number that is data."""

    rules: tuple[Rule, ...]
    number: jax.Array

    revises = True

    def _choose(self, options: list[Any]) -> Any:
        return jax.tree.map(lambda *leaves: jax.lax.select_n(self.number, *leaves), *options)

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        return tuple(rule.init(batch, width, vocab_size) for rule in self.rules)

    def change(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[Change, Any]:
        found = [rule.change(predictions, view, part) for rule, part in zip(self.rules, state, strict=True)]
        return self._choose([change for change, _ in found]), tuple(part for _, part in found)

    def most_steps(self, view: BlockView) -> jax.Array:
        return self._choose([rule.most_steps(view) for rule in self.rules])

    def block_done(self, view: BlockView, left: jax.Array, state: Any) -> jax.Array:
        return self._choose([rule.block_done(view, left, part) for rule, part in zip(self.rules, state, strict=True)])


def test_every_rule_that_revises_is_here() -> None:
    assert {type(rule) for rule in REVISING.values()} == {rule for rule in RULES.values() if rule.revises}


@pytest.fixture(scope="module")
def llada(llada_tiny) -> Model:
    return first_layers(llada_tiny, 1)


@pytest.mark.parametrize("cache", CACHES)
def test_rows_are_independent_with_every_policy(llada, cache: str) -> None:
    """Ragged prompts and lengths in one batch: each row is what it is alone; it ends in time, nothing undecided."""
    smoothing = Smoothing() if cache == "vicinity" else None
    sampler = functools.partial(
        BlockSampler, gen_length=GEN, block_length=BLOCK, cache=CACHES[cache], smoothing=smoothing
    )
    lengths, edits, reopened = np.asarray(GEN_LENGTHS), 0, 0
    for number, name in enumerate(REVISING):
        rule = OneOf(tuple(REVISING.values()), jnp.int32(number))
        for stop in (EOS, MASK):  # the mask token is never written: never an end
            one = sampler(rule, stop=stop_on([stop], vocab_size=136))
            together = run(llada, one, gen_lengths=jnp.asarray(lengths))
            row = (number + 2 * (stop == EOS)) % 4
            alone = run(llada, one, rows=(row,), gen_lengths=jnp.asarray(lengths[row : row + 1]))
            for field in dataclasses.fields(Result):
                mine, theirs = getattr(together, field.name)[row], getattr(alone, field.name)[0]
                assert_equal(mine, theirs, f"{name}, stop {stop}: {field.name}")
            assert (together.tokens != MASK).all() and (together.decoded_at < together.nfe[:, None]).all()
            assert (together.nfe <= (GEN + 3 * 16 if "edit" in name else GEN)).all()
        inside = np.arange(GEN) < lengths[:, None]  # of the runs to the end
        assert (together.decoded_at[inside] >= 0).all() and (together.decoded_at[~inside] == -1).all()
        edits += int(together.edits.sum())
        written = [len(set(at[:length])) for at, length in zip(together.decoded_at, lengths, strict=True)]
        reopened += int((together.nfe > written).sum())
    assert edits and reopened
