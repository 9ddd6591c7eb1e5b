"""Training of the neural indicator: labels, features and loss against loops, whole runs, and what is refused."""

import csv
import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_train_compression import T, batch_of, write_folder
from test_train_run import assert_same, latest_state
from train_toys import DREAM as DREAM_TOY
from train_toys import LLADA as LLADA_TOY
from train_toys import settings, write_toml

import dllm_jax
import train
from dllm_jax import Denoiser, DllmError, random_model
from dllm_jax.checkpoints import checkpoint
from dllm_jax.indicator import Indicator, IndicatorConfig, init_indicator, load_indicator, save_indicator
from dllm_jax.params.specs import init_params
from evals.__main__ import main as evals_main
from evals.indicator import precision_recall, score_indicator
from samplers import NI
from train.__main__ import main
from train.objectives import read_config
from train.objectives.indicator import FinalTokens, IndicatorPart, IndicatorRun, auc, gather_evidence
from train.settings import build_settings
from train.setup import read_parts

LLADA, DREAM = (config.replace(num_layers=1) for config in (LLADA_TOY, DREAM_TOY))
SHAPE = IndicatorConfig(depth=2, width=8, hidden_dim=16, embed_dim=16, num_values=3, num_tokens=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "trajectories")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model, out = random_model(LLADA, key=3), tmp_path_factory.mktemp("models") / "base"
    checkpoint.save(out, model.config, model.params.items())
    return out


def denoiser_of(config):
    params = init_params(config, jax.random.key(1), dtype="float32")
    return Denoiser(config, {name: x * 4 if x.ndim > 1 else x for name, x in params.items()})


def partly_right(denoiser, batch):
    """The batch with tokens that the model predicts itself at five of six positions, in the state before they are
    written: else hardly any step could be merged."""
    best = jax.jit(lambda tokens, lengths: denoiser(tokens, lengths).at[..., denoiser.mask_id].set(-jnp.inf).argmax(-1))
    tokens = np.asarray(batch.tokens).copy()
    for start in range(4):
        inputs = np.where(np.asarray(batch.step) >= start, denoiser.mask_id, tokens)
        now = (np.asarray(batch.step) == start) & (np.arange(T) % 6 > 0)
        tokens = np.where(now, best(inputs, batch.lengths), tokens)
    return batch._replace(tokens=jnp.asarray(tokens)), best


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_labels_are_what_running_the_model_again_confirms(config, folder):
    """The steps that one forward does at once are those of the longest run of steps that end in the same state."""
    denoiser, first = denoiser_of(config), config.shift
    batch, best = partly_right(denoiser, batch_of(folder))
    objective = FinalTokens(IndicatorPart())
    read = jax.jit(lambda states: [gather_evidence(SHAPE, denoiser, states, chunk=chunk) for chunk in (0, 21)])
    labels, together = [], 0
    for number in range(3):
        states = objective.corrupt(jax.random.key(number), batch, denoiser)
        whole, pieces = read(states)
        jax.tree.map(np.testing.assert_array_equal, whole.label, pieces.label)
        keep = lambda x, masked=whole.masked: np.asarray(x)[np.asarray(masked)]
        for one, other in zip((*whole.features, whole.confidence), (*pieces.features, pieces.confidence), strict=True):
            np.testing.assert_allclose(keep(one), keep(other), atol=1e-5)
        predicted = np.asarray(best(states.inputs, states.lengths))
        for row in range(7):
            step, final = np.asarray(batch.step[row]), np.asarray(batch.tokens[row])
            reached = int(states.reached[row])
            assert 0 <= reached <= step.max()
            assert np.array_equal(states.inputs[row], np.where(step >= reached, config.mask_id, final))
            until = reached + 1
            while until <= step.max() and (predicted[row] == final)[(step >= reached) & (step <= until)].all():
                until += 1
            wanted = (step >= reached) & (step < until)
            together += until - reached > 1
            assert np.array_equal(whole.label[row], wanted[first:])
            assert np.array_equal(whole.masked[row], (step >= reached)[first:])
            labels.append(wanted.sum())
    assert together > 3 and min(labels) > 0


def test_the_loss_and_what_is_reported(folder, monkeypatch):
    denoiser = denoiser_of(LLADA)
    batch, _ = partly_right(denoiser, batch_of(folder))
    indicator = init_indicator(SHAPE, jax.random.key(5))
    canvas = int((batch.step >= 0).sum(axis=1).max())  # beside which nothing is looked at
    assert canvas < batch.step.shape[1]
    plain, dropped = FinalTokens(IndicatorPart(3.0, 0.0), canvas), FinalTokens(IndicatorPart(dropout=0.5))
    states = plain.corrupt(jax.random.key(0), batch, denoiser)

    @jax.jit
    def read(indicator, denoiser):
        seen = gather_evidence(SHAPE, denoiser, states)
        return seen, indicator.logits(*seen.features)

    seen, logits = read(indicator, denoiser)
    masked, label, scores = (np.asarray(x) for x in (seen.masked, seen.label, jax.nn.softmax(logits)[..., 1]))
    threshold = float(np.median(scores[masked]))
    monkeypatch.setattr("train.objectives.indicator.PUBLISHED_THRESHOLD", threshold)

    @jax.jit
    def losses(params, base):
        def of(objective, params, base):
            return objective.loss(Indicator(SHAPE, params), Denoiser(LLADA, base), states)

        whole = jax.value_and_grad(functools.partial(of, plain), (0, 1), has_aux=True)(params, base)
        return whole, of(dropped, params, base)[0]

    ((loss, told), (own, others)), other = losses(dict(indicator.params), dict(denoiser.params))
    assert all(np.any(x) for x in own.values()) and not any(np.any(x) for x in others.values())
    entropy = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, label.astype(int)))[masked]
    label, scores = label[masked], scores[masked]
    np.testing.assert_allclose(loss, np.average(entropy, weights=np.where(label, 3.0, 1.0)), rtol=1e-5)
    wins = scores[label][:, None] - scores[~label]
    np.testing.assert_allclose(told["auc"], ((wins > 0) + 0.5 * (wins == 0)).mean(), rtol=1e-5)
    chosen = scores > threshold
    assert 0 < chosen.sum() < len(chosen)
    np.testing.assert_allclose(told["precision"], label[chosen].mean(), rtol=1e-6)
    np.testing.assert_allclose(told["recall"], label[chosen].sum() / label.sum(), rtol=1e-6)
    np.testing.assert_allclose(told["positives"], label.mean(), rtol=1e-6)
    assert abs(other - loss) > 1e-3


def test_auc_counts_ties_as_halves_and_empty_classes_as_nothing():
    rng = np.random.default_rng(0)
    scores, label, masked = rng.integers(0, 5, 60) / 5, rng.random(60) < 0.4, rng.random(60) < 0.8
    label &= masked
    wins = scores[label][:, None] - scores[masked & ~label]
    found = jax.jit(auc)(*map(jnp.asarray, (scores.astype(np.float32), label, masked)))
    np.testing.assert_allclose(found, ((wins > 0) + 0.5 * (wins == 0)).mean(), rtol=1e-6)
    assert jax.jit(auc)(jnp.asarray(scores, jnp.float32), jnp.asarray(masked), jnp.asarray(masked)) == 0.5


def test_dropout_keeps_the_mean_and_its_rate():
    indicator = init_indicator(SHAPE, jax.random.key(0))
    ones = Indicator(SHAPE, {n: jnp.zeros_like(x) if "blocks" in n else x for n, x in indicator.params.items()})
    features = (jnp.ones((5, 16)), jnp.ones((5, 2, 16)), jnp.ones((5, 3)))
    run = jax.jit(lambda indicator, rate: indicator.logits(*features, dropout=(jax.random.key(1), rate)))
    np.testing.assert_array_equal(run(ones, 0.5), ones.logits(*features))  # nothing is added, so nothing dropped
    np.testing.assert_allclose(run(indicator, 0.0), indicator.logits(*features), atol=1e-6)
    rows = run(indicator, 0.5)
    assert len(np.unique(np.asarray(rows)[:, 0])) == 5  # each position has draws of its own


def run_settings(out, base, folder, **changes):
    small = {"width": 8, "depth": 1, "num_values": 3, "num_tokens": 2}
    values = settings(out, data__options={"path": str(folder)}, indicator=small, **changes)
    values["model"], values["data"]["source"] = {"init": str(base)}, "trajectories"
    return values


def test_runs_on_one_device_and_on_eight_and_goes_on_bit_exactly(tmp_path, base, folder, capsys):
    curves = []
    for name, every, mesh in (("one", 2, {}), ("eight", 4, {"data": 4, "fsdp": 2})):
        short = {"steps": 4, "checkpoint__every": every, "objective__chunk": 24 if mesh else 0}
        values = run_settings(tmp_path / name, base, folder, compute__mesh=mesh, **short)
        path = write_toml(tmp_path / f"{name}.toml", values)
        assert main(["indicator", "--config", str(path), "--no-progress"]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        curves.append([[json.loads(line)[key] for key in ("loss", "auc", "positives")] for line in lines])
    np.testing.assert_allclose(*curves, rtol=1e-4)
    out = tmp_path / "one"
    assert f"written to {out / 'indicator'}" in capsys.readouterr().out
    found, state = load_indicator(out / "indicator"), latest_state(out)
    assert found.config == dataclasses.replace(SHAPE, depth=1) and not any("layers" in name for name in state)
    assert isinstance(NI(str(out / "indicator")).indicator, Indicator)
    for what in ("state/4", "indicator"):
        shutil.rmtree(out / what)
    assert main(["indicator", "--config", str(tmp_path / "one.toml"), "--no-progress"]) == 0
    assert "(2 before)" in capsys.readouterr().out
    assert_same(latest_state(out), state)
    assert main(["write-model", "--run", str(out), "--out", str(tmp_path / "again")]) == 0
    again = load_indicator(tmp_path / "again")
    assert_same(*({n: np.asarray(x) for n, x in one.params.items()} for one in (found, again)))


MISTAKES = [
    ({"lora": {"rank": 2}}, "lora.rank"),
    ({"optimizer": {"name": "muon", "warmup": 0}}, "optimizer.name"),
    ({"objective": {"kind": "sft"}}, "'objective.kind'"),
    ({"objective": {"dropout": 1.0}}, "objective.dropout"),
    ({"indicator": {"widht": 8}}, "'indicator.width'"),
    ({"indicator": {"num_values": 100}}, "100 best tokens"),
    ({"indicator": {"depth": 0, "num_values": 3}}, "depth"),
    ({"model": {}}, "model.init"),
    ({"data": {"source": "train_toys:Reverse", "length": 12}}, "data.source"),
]


@pytest.mark.parametrize(("change", "name"), MISTAKES)
def test_settings_that_cannot_work_are_refused(change, name, tmp_path, base, folder):
    values = run_settings(tmp_path / "x", base, folder)
    with pytest.raises(DllmError, match=name):
        train.train(build_settings(IndicatorRun, values | change))
    assert not (tmp_path / "x").exists()


def test_the_published_recipe_and_rows_of_trajectories(tmp_path, base, folder):
    config = read_config("train/configs/ni-free-problems.toml", command="indicator")
    assert (config.indicator.width, config.optimizer.final_ratio) == (64, 0.0)
    assert read_parts(build_settings(IndicatorRun, run_settings(tmp_path / "x", base, folder))).rows(0).step is not None


def test_evals_of_an_indicator(tmp_path, base, folder, capsys):
    indicator = init_indicator(SHAPE, jax.random.key(5))
    save_indicator(tmp_path / "ni", indicator)
    what = ["--model", str(base), "--indicator", str(tmp_path / "ni"), "--trajectories", str(folder)]
    what += ["--out", str(tmp_path / "out"), "--precision"]
    assert evals_main(["indicator", *what, "0.1", "--batch-size", "3"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("7 trajectories | AUC ") and told.count("\n") == 1
    report = score_indicator(dllm_jax.load(base), indicator, folder, batch_size=7)
    assert report.describe(0.1) + "\n" == told  # whatever the batch
    rows = list(csv.DictReader((tmp_path / "out" / "precision_recall.csv").open()))
    assert {row["score"] for row in rows} == {"indicator", "probability"} and float(rows[-1]["recall"]) == 1.0
    assert (tmp_path / "out" / "precision_recall.png").read_bytes().startswith(b"\x89PNG")
    assert evals_main(["indicator", *what, "2"]) == 2
    assert "must be above 0 and at most 1" in capsys.readouterr().err


def test_the_smallest_threshold_of_a_precision():
    rng = np.random.default_rng(0)
    scores, label = rng.integers(1, 40, 300) / 40, rng.random(300) < 0.5
    label |= scores > 0.7
    curve = precision_recall(scores, label)
    for wanted in (0.3, 0.6, 0.8, 1.0):
        place = curve.lowest(wanted)
        threshold = curve.thresholds[place]
        assert label[scores > threshold].mean() == pytest.approx(curve.precision[place])
        assert label[scores > threshold].sum() / label.sum() == pytest.approx(curve.recall[place])
        lower = [t for t in [0.0, *np.unique(scores)] if t < threshold]
        assert curve.precision[place] >= wanted > max([label[scores > t].mean() for t in lower], default=0.0)
        assert curve.threshold(wanted) == threshold
    hopeless = precision_recall(scores, np.zeros(300, bool))
    assert hopeless.lowest(0.5) is None and hopeless.threshold(0.5) == 1.0
