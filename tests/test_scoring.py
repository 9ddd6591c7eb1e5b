"""Scores of many pairs: against sums over every mask, alone and together, and the draws themselves bit for bit."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses
from train_toys import DREAM, LLADA

import dllm_jax
from samplers import BlockSampler, TopK, sample_jit, score, score_each
from samplers.likelihood.estimators import draw_masks, log_likelihood
from samplers.text.prompts import pad_prompts

LONG = LLADA.replace(max_length=64)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
ANSWERS = [[3, 5], [1, 2, 11], [1], [1, 2, 10, 2, 3, 11, 3, 5, 7], [4, 10]]
PAIRS = [(PROMPT[2 * i :], answer) for i, answer in enumerate(ANSWERS)]
SEEDS = [5, 6, 7, 8, 9]
ROWS = 16  # of all batches but where others are the point: so they share programs, as do sequences of up to 32 tokens


def model_of(config, mesh=None):
    """Random weights, large enough for predictions to depend on what is masked."""
    model = dllm_jax.random_model(config, mesh=mesh)
    return dataclasses.replace(model, params={name: x * 25 if x.ndim > 1 else x for name, x in model.params.items()})


@pytest.fixture(scope="module")
def llada():
    return model_of(LONG)


@pytest.fixture(scope="module")
def dream():
    return model_of(DREAM.replace(max_length=64))


logits_of = jax.jit(lambda denoiser, rows, lengths: denoiser(rows, lengths))


def sums(model, prompt, answer, end=(), guidance=None):
    """Of every mask of an answer, by hand: the masked places, and the sum of the log-probabilities there."""
    denoiser, length = model.denoiser, len(prompt) + len(answer) + len(end)
    subsets = [list(s) for n in range(1, len(answer) + 1) for s in itertools.combinations(range(len(answer)), n)]
    rows = np.zeros((ROWS, 32), np.int32)
    rows[:, :length] = [*prompt, *answer, *end]
    for row, places in zip(rows, subsets, strict=False):
        row[len(prompt) + np.asarray(places)] = denoiser.mask_id
    run = lambda rows: logits_of(denoiser, rows, jnp.full(ROWS, length))
    found = run(rows)
    if guidance is not None:
        without = run(np.where(np.arange(32) < len(prompt), denoiser.mask_id, rows))
        found = without + (guidance + 1) * (found - without)
    scores = np.asarray(jax.nn.log_softmax(found, axis=-1), np.float64)
    at = lambda row, place: scores[row, len(prompt) + place, answer[place]]
    return [(places, sum(at(row, place) for place in places)) for row, places in enumerate(subsets)]


def expected(sums, length, weight):
    """The mean of an estimator that gives masks of n tokens this weight."""
    return sum(weight(len(places), length) * value for places, value in sums)


def llada_weight(n, length):
    """P(n tokens) P(these) length / n."""
    return 1 / length / math.comb(length, n) * length / n


def dream_weight(n, length):
    """The mean over p of P(these alone) / p, for p uniform on [1e-3, 1]; Simpson's rule is exact for polynomials of
    degree 3, so for answers of up to four tokens."""
    f = lambda p: p ** (n - 1) * (1 - p) ** (length - n)
    return (f(1e-3) + 4 * f((1 + 1e-3) / 2) + f(1.0)) / 6


WEIGHTS = {"llada": llada_weight, "dream": dream_weight}


@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_every_mask_gives_the_bound_itself(llada, guidance):
    options = {"estimator": "exact", "samples": 512, "guidance": guidance, "batch_size": ROWS}
    for (prompt, answer), own in zip(PAIRS, score(llada, PAIRS, seeds=SEEDS, **options), strict=True):
        assert own.forwards == 2 ** len(answer) - 1
        if own.forwards <= ROWS:
            wanted = expected(sums(llada, prompt, answer, guidance=guidance or None), len(answer), llada_weight)
            assert own.log_likelihood == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_token_by_token(llada, guidance):
    """One at a time, with what follows masked or with all others known: sums of single log-probabilities."""
    options = {"guidance": guidance, "batch_size": ROWS, "samples": 1, "mc_batch": 1}
    chain, pseudo = (score(llada, PAIRS, seeds=SEEDS, estimator=x, **options) for x in ("left-to-right", "pseudo"))
    for number, (prompt, answer) in enumerate(PAIRS):
        length, mask_id = len(prompt) + len(answer), llada.denoiser.mask_id
        rows, places = np.zeros((2, ROWS, 32), np.int32), np.arange(len(answer))
        rows[:, :, :length] = [*prompt, *answer]
        for place in places + len(prompt):
            rows[0, place - len(prompt), place:length] = rows[1, place - len(prompt), place] = mask_id
        for own, some in zip((chain[number], pseudo[number]), rows, strict=True):
            run = lambda rows, length=length: logits_of(llada.denoiser, rows, jnp.full(ROWS, length))
            found = run(some)
            if guidance:
                without = run(np.where(np.arange(32) < len(prompt), mask_id, some))
                found = without + (guidance + 1) * (found - without)
            wanted = jax.nn.log_softmax(found, axis=-1)[places, len(prompt) + places, np.asarray(answer)].sum()
            assert own.log_likelihood == pytest.approx(float(wanted), rel=1e-4)
            assert (own.forwards, own.stderr) == (len(answer), 0.0)


@pytest.mark.parametrize("mc_batch", [1, 4, 16])
@pytest.mark.parametrize("estimator", ["llada", "dream"])
def test_the_standard_error_is_that_of_many_estimates(request, estimator, mc_batch):
    """The mean of its square is their variance; by the copies of a single batch up to what stratifying saves."""
    model, repeats, answer = request.getfixturevalue(estimator), 256, [1, 2, 11, 3]
    options = {"estimator": estimator, "samples": 16, "mc_batch": mc_batch, "batch_size": ROWS}
    found = score(model, [(PROMPT, answer)] * repeats, seeds=range(repeats), **options)
    spread = np.var([own.log_likelihood for own in found], ddof=1)
    reported = np.mean([own.stderr**2 for own in found])
    assert 0.7 * spread < reported < (1.5 if mc_batch < 16 else 3.0) * spread


def test_where_nothing_is_drawn_there_is_no_noise(llada):
    scores = lambda answer, **options: score(llada, [(PROMPT, answer)], seeds=[1], batch_size=ROWS, **options)[0]
    assert scores([5]).stderr == scores([5], samples=1, mc_batch=1).stderr == 0.0
    assert scores([5, 3, 4], estimator="exact").stderr == 0.0
    assert scores([5, 3, 4], samples=1, mc_batch=1).stderr is None, "one copy says nothing of its noise"
    assert scores([5, 3, 4], samples=2, mc_batch=1).stderr > 0


@pytest.mark.parametrize("mc_batch", [1, 4])
@pytest.mark.parametrize("estimator", ["llada", "dream"])
def test_the_estimate_is_right_on_average(request, estimator, mc_batch):
    """Within four standard errors of the mean of many estimates, for answers of 2 to 4 tokens."""
    model, repeats = request.getfixturevalue(estimator), 256
    end = [model.denoiser.eos_id] if estimator == "dream" else []
    for answer in ([4, 5], [5, 10, 3], [1, 2, 11, 3]):
        options = {"estimator": estimator, "samples": 4, "mc_batch": mc_batch, "batch_size": ROWS}
        found = score(model, [(PROMPT, answer)] * repeats, seeds=range(repeats), **options)
        values = np.asarray([own.log_likelihood for own in found])
        wanted = expected(sums(model, PROMPT, answer, end), len(answer), WEIGHTS[estimator])
        error = values.std(ddof=1) / math.sqrt(repeats)
        assert 0 < error < 0.1 * abs(wanted), "else this shows nothing"
        assert abs(values.mean() - wanted) < 4 * error


def test_one_token_is_exact_in_one_forward(llada):
    pairs = [(PROMPT, [5]), (PROMPT[2:], [1])]
    for own, pair in zip(score(llada, pairs, seeds=[0, 0], batch_size=ROWS), pairs, strict=True):
        assert own.log_likelihood == pytest.approx(sums(llada, *pair)[0][1], rel=1e-5)
        assert own.forwards == 1


@pytest.mark.parametrize(("estimator", "guidance"), [("llada", 0.5), ("dream", 0.0)])
def test_a_pair_is_that_of_log_likelihood(dream, estimator, guidance):
    """Whose key is the seed's; there every copy is run, here the different ones."""
    options = {"num_samples": 16, "batch_size": 8, "estimator": estimator, "guidance": guidance or None}
    alone = jax.jit(lambda denoiser, *pair, key: log_likelihood(denoiser, *pair, key=key, **options))
    prompt, answer = PAIRS[1]
    wanted = alone(dream.denoiser, jnp.asarray(prompt), jnp.asarray(answer), key=jax.random.key(6))
    shared = {"samples": 16, "mc_batch": 8, "estimator": estimator, "guidance": guidance, "batch_size": ROWS}
    own = score(dream, PAIRS, seeds=SEEDS, **shared)[1]
    assert own.log_likelihood == pytest.approx(float(wanted), rel=1e-5)
    assert own.forwards <= 7


# Draws ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["llada", "dream"])
def test_draws_know_nothing_of_the_width(estimator):
    """Bit for bit, in programs of other widths, and beside others under vmap."""
    draw = functools.partial(draw_masks, num_samples=24, batch_size=8, estimator=estimator)
    keys, lengths = jax.vmap(jax.random.key)(jnp.arange(3)), jnp.asarray([3, 7, 5])
    wanted, ratios = jax.jit(jax.vmap(lambda key, length: draw(key, length, 7)))(keys, lengths)
    masked, others = jax.jit(jax.vmap(lambda key, length: draw(key, length, 64)))(keys, lengths)
    np.testing.assert_array_equal(masked[:, :, :7], wanted)
    np.testing.assert_array_equal(ratios, others)
    assert not masked[:, :, 7:].any()
    own, shares = jax.jit(lambda key: draw(key, 5, 5))(keys[2])
    np.testing.assert_array_equal(own, wanted[2, :, :5])
    np.testing.assert_array_equal(shares, ratios[2])


def test_answers_of_one_seed_share_their_draws():
    """So where one of two tokens is masked, it is the same one beside a third."""
    draw = jax.jit(lambda length: draw_masks(jax.random.key(4), length, 8, num_samples=64, batch_size=1)[0])
    short, long = np.asarray(draw(2)), np.asarray(draw(3))
    one = (short.sum(axis=1) == 1) & (long[:, :2].sum(axis=1) == 1)
    assert one.sum() > 8
    np.testing.assert_array_equal(short[one, :2], long[one, :2])


def test_dream_covers_its_ratios_evenly_and_masks_by_them():
    masked, ratio = draw_masks(jax.random.key(0), 64, 64, num_samples=64, batch_size=32, estimator="dream")
    for batch in np.asarray(ratio, np.float64).reshape(2, 32):
        np.testing.assert_allclose(np.diff(np.sort(batch)), 0.999 / 32, atol=1e-6)
        assert 1e-3 <= batch.min() and batch.max() <= 1.0
    share = np.asarray(masked).mean(axis=1)
    assert np.abs(share - np.asarray(ratio)).max() < 5 * 0.5 / math.sqrt(64)


@pytest.mark.parametrize("estimator", ["llada", "dream"])
def test_neighbours_order_and_padding_change_nothing(llada, estimator):
    """Forwards, so different masks, are as many, and scores the same up to the rounding of other shapes."""
    options = {"samples": 16, "mc_batch": 8, "estimator": estimator}
    order = [3, 0, 4, 2, 1]
    longer = [*PAIRS, (PROMPT * 2, PROMPT)]  # which makes spans wider, and begins the first batch of another length
    wanted = score(llada, PAIRS, seeds=SEEDS, batch_size=ROWS, **options)
    mixed = score(llada, [PAIRS[i] for i in order], seeds=[SEEDS[i] for i in order], batch_size=5, **options)
    beside = score(llada, longer, seeds=[*SEEDS, 1], batch_size=ROWS, **options)[:5]
    pairs = zip(PAIRS, SEEDS, strict=True)
    alone = [score(llada, [pair], seeds=[seed], batch_size=ROWS, **options)[0] for pair, seed in pairs]
    for found in ([mixed[order.index(i)] for i in range(5)], beside, alone):
        assert [own.forwards for own in found] == [own.forwards for own in wanted]
        numbers = ([(own.log_likelihood, own.stderr) for own in scores] for scores in (found, wanted))
        np.testing.assert_allclose(*numbers, rtol=1e-4, atol=1e-5)


def test_prompts_are_cut_on_the_left(dream):
    options = {"seeds": [3], "samples": 16, "mc_batch": 8, "batch_size": ROWS, "estimator": "dream"}
    cut = score(dream, [(PROMPT, [4, 5])], max_length=8, **options)
    assert cut == score(dream, [(PROMPT[-5:], [4, 5])], **options)


# Greedy, progress, meshes --------------------------------------------------------------------------------------------


def test_greedy_decoding(llada):
    prompts, sampler = [PROMPT, PROMPT[4:]], BlockSampler(TopK(1), 4)
    rows, lengths = pad_prompts(prompts)
    right = np.asarray(sample_jit(sampler, llada.denoiser, rows, lengths).tokens).tolist()
    wrong = [*right[0][:3], (right[0][3] + 1) % 20]
    canvas = np.pad([[*PROMPT, llada.denoiser.mask_id]], ((0, ROWS - 1), (0, 20)))
    worst = int(logits_of(llada.denoiser, canvas, np.full(ROWS, 12))[0, 11, :20].argmin())
    pairs = [*zip(prompts, right, strict=True), (prompts[0], wrong), (prompts[0], [worst])]
    options = {"seeds": [0] * 4, "samples": 1, "mc_batch": 1, "batch_size": ROWS}
    found, without = score(llada, pairs, greedy=True, **options), score(llada, pairs, **options)
    assert [own.is_greedy for own in found] == [True, True, False, False]
    assert [own.log_likelihood for own in found] == [own.log_likelihood for own in without]
    assert without == [dataclasses.replace(own, is_greedy=False, forwards=1) for own in found]
    assert all(2 <= own.forwards <= 5 for own in found) and found[3].forwards == 2


def test_scores_come_as_they_are_known(llada, capsys):
    """The longest first, so that who keeps them loses little."""
    run = score_each(llada, PAIRS, seeds=SEEDS, samples=16, mc_batch=8, batch_size=ROWS, progress=True)
    first, _ = next(run)
    rest = [number for number, _ in run]
    assert [first, *rest] == sorted(range(5), key=lambda number: -sum(map(len, PAIRS[number])))
    assert "5/5" in capsys.readouterr().err
    assert score(llada, [], seeds=[]) == []


def test_a_broken_model_is_one_warning(llada):
    name = "layers.0.attn.q_proj.kernel"
    params = {**llada.params, name: llada.params[name].at[0, 0].set(jnp.nan)}
    broken = dataclasses.replace(llada, params=params)
    with pytest.warns(RuntimeWarning, match="pair 3 and of 4 others"):
        found = score(broken, PAIRS, seeds=SEEDS, samples=16, mc_batch=8, batch_size=ROWS)
    assert all(math.isnan(own.log_likelihood) for own in found)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_a_mesh_gives_the_same(llada):
    split = model_of(LONG, dllm_jax.make_mesh(data=2))
    options = {"seeds": SEEDS, "samples": 16, "mc_batch": 8, "batch_size": ROWS, "greedy": True, "guidance": 0.5}
    for own, other in zip(score(split, PAIRS, **options), score(llada, PAIRS, **options), strict=True):
        near = {name: pytest.approx(getattr(other, name), rel=1e-4) for name in ("log_likelihood", "stderr")}
        assert own == dataclasses.replace(other, **near)
    with refuses("9", "2 devices"):
        score(split, PAIRS, **{**options, "batch_size": 9})


BAD = {
    "no answer": ({"pairs": [(PROMPT, [])]}, "pair 0"),
    "no prompt": ({"pairs": [([], [1])], "estimator": "dream"}, "pair 0"),
    "text": ({"pairs": [("Q:", "A")]}, "pair 0"),
    "no pair": ({"pairs": [PROMPT]}, "pair 0"),
    "fractions": ({"pairs": [(PROMPT, [1.5])]}, "pair 0"),
    "outside": ({"pairs": [(PROMPT, [1000])]}, "1000"),
    "mask": ({"pairs": [(PROMPT, [21])]}, "mask token"),
    "long": ({"pairs": [(PROMPT * 100, [1])]}, "pair 0 1101 64"),
    "long answer": ({"pairs": [(PROMPT, PROMPT)], "max_length": 10}, "pair 0 22 10"),
    "limit": ({"max_length": 10**6}, "max_length 64"),
    "seeds": ({"seeds": [1, 2]}, "2 seeds"),
    "large seed": ({"seeds": [2**32]}, "seed of pair 0"),
    "samples": ({"samples": 12, "mc_batch": 8}, "mc_batch"),
    "estimator": ({"estimator": "best"}, "best pseudo"),
    "masks": ({"estimator": "exact", "samples": 4, "mc_batch": 1}, "samples"),
    "guidance": ({"guidance": -1}, "guidance"),
    "batch": ({"batch_size": 0}, "batch_size"),
    "model": ({"model": "llada"}, "model"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_one_sentence_before_anything_runs(llada, name):
    options, words = BAD[name]
    arguments = {"model": llada, "pairs": [(PROMPT, [3, 4, 5])], "seeds": [0], **options}
    with refuses(*words.split()):
        score_each(**arguments)  # it runs nothing before its first score is asked for
