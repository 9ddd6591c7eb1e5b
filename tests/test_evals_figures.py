"""The papers' figures as commands: what each runs, how few programs that takes, what it draws and says."""

import dataclasses
import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from test_evals_tasks import config_for

from dllm_jax import random_model
from dllm_jax.indicator import load_indicator
from evals import __main__ as cli
from evals import figures, paper_figures, plots, stderr, sweeps
from evals.runner import Report
from evals.tasks import make_task

WORDS = make_task("word-problems:difficulty=easy")
BLOCKS = {"family": "llada2", "attention": "block", "block_length": 8}
CAUSAL = {"family": "qwen2", "attention": "causal", "shift": True}


def toy(name):
    """A model of the word problems' tokens; one whose name begins with ar is causal, with block one of blocks."""
    kinds = {"ar": CAUSAL, "bl": BLOCKS}
    config = config_for(WORDS, **kinds.get(name[:2], {}))
    return dataclasses.replace(random_model(config, key=0), name=name, tokenizer=WORDS._coding[0])


@pytest.fixture
def measured(monkeypatch, small):
    """Replaces models by toys and scoring by a formula; what was scored: [(model, sampler)]."""
    seen, toys = [], {}
    monkeypatch.setattr(
        "evals.models.dllm_jax.load", lambda name, **_: toys.get(name) or toys.setdefault(name, toy(name))
    )

    def run(models, task, sampler, *, n, batch_size, seed, split, examples, counts, engines, processes, progress):
        seen.append((models.of(sampler).name, sampler))
        loss = sum(sampler.numbers.values()) * (0.01 if sampler.name == "ni" else 1)
        engines.programs.add(sampler.without("indicator").series)
        seed_of_indicator = len(sampler.options.get("indicator", ""))
        nfe, accuracy = 2.0 + 10 / (1 + loss) + seed_of_indicator, 1 / (1 + 0.1 * loss)
        numbers = {name: 0.0 for name, kind in Report.__annotations__.items() if kind is float}
        numbers |= {"nfe": nfe, "accuracy": accuracy, "accuracy_stderr": 0.02, "tokens": 20.0, "seconds": 1.0}
        numbers |= {"tokens_per_forward": 20 / nfe, "tokens_per_second": 40 / nfe, "committed_per_forward": 21 / nfe}
        about = {"model": models.of(sampler).name, "task": str(task), "sampler": str(sampler), "settings": {}}
        machine = {"hardware": {"devices": 1, "device": "cpu"}, "versions": {}, "dtype": "float32", "parameters": 1}
        rows = tuple(SimpleNamespace(correct=accuracy, nfe=nfe) for _ in range(n))
        return Report(**about, **machine, **numbers, split=split, seed=seed, n=n, batch_size=batch_size, rows=rows)

    monkeypatch.setattr(sweeps, "run", run)
    return seen


@pytest.fixture
def figure(capsys, tmp_path, measured):
    """Runs a figure's command: (status, printed, complaints, results)."""
    pytest.importorskip("matplotlib")

    def call(name, *options):
        task = ("--task", str(WORDS)) if name not in ("eb-sudoku", "eb-maze") else ()
        status = cli.main(["figure", name, "--model", "model", *task, "--n", "3", "--out", str(tmp_path), *options])
        printed = capsys.readouterr()
        if status == 0:
            assert sorted(os.listdir(tmp_path)) == [f"{name}.png", "results.csv", "results.json"]
            assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        results = json.loads((tmp_path / "results.json").read_text()) if status == 0 else None
        return status, *printed, results

    return call


def points(name, **options):
    """All samplers of a figure."""
    return figures.samplers_of(paper_figures.FIGURES[name].lines(SimpleNamespace(**options)))


def programs(samplers):
    return len({sampler.without("indicator").series for sampler in samplers})


def test_figures_are_of_many_points_and_few_programs():
    apd = [
        points("apd", verifier="ar", ar=ar, few_programs=few)
        for ar, few in ((None, False), (None, True), ("ar2", True))
    ]
    assert list(map(len, apd)) == [65 + 11, 76, 82] and list(map(programs, apd)) == [28, 11, 13]
    d2f = [points("d2f", student="student", ar=ar, block_model=block) for ar, block in (("ar", "block"), (None, None))]
    assert list(map(len, d2f)) == [61 + 10 + 15 + 3 * 8 + 6, 110] and list(map(programs, d2f)) == [17, 15]
    ni = points("ni", indicator=["a", "b"], block_length=16)
    assert len(ni) == 3 * (6 + 5 + 4 + 3 + 4 * 5 * 2) + 5 * 2 and programs(ni) == 3 * 8 + 1
    dinfer = [points("dinfer", compressed=compressed) for compressed in (None, "c")]
    assert list(map(len, dinfer)) == [3 * 2 * (4 + 4 + 3), 132] and list(map(programs, dinfer)) == [18, 36]
    fast = points("fast-dllm")
    assert len(fast) == 1 + (6 + 5) * 3 * 4 and programs(fast) == 1 + 2 * 3 * 4
    nemotron = points("nemotron", drafting="drafts", student=None)
    assert len(nemotron) == 1 + 2 + 2 * (6 + 5 + 4 + 3 + 5) + 4 + 4 + 8 + 6 and programs(nemotron) == 1 + 2 * 6 + 12 + 1
    assert [len(points("compression", compressed="b", control=c, block_length=16)) for c in ("c", None)] == [18, 12]


@pytest.fixture
def small(monkeypatch):
    """Figures with the first and the last value of every list, as every sampler is built."""
    fewer = lambda spec: re.sub(r"(?<==)([^=|,@]+)\|[^=,@]*\|([^=|,@]+)", r"\1|\2", spec)
    line = lambda line: dataclasses.replace(line, specs=[fewer(spec) for spec in line.specs])
    figure = lambda figure: dataclasses.replace(figure, templates=[line(one) for one in figure.templates])
    monkeypatch.setattr(cli, "FIGURES", {name: figure(one) for name, one in paper_figures.FIGURES.items()})


def test_apd_compares_the_verifier_s_weight_with_fixed_steps(figure, measured):
    status, out, err, results = figure("apd", "--verifier", "ar")
    assert status == 0 and "25 points, 16 programs" in out
    curves = results["curves"]
    assert list(map(len, curves.values())) == [2, 2, 3, 3, 8, 1, 2, 2, 2, 1, 1]
    first, second = results["notes"]
    assert first.startswith(
        "APD, independent noise, temperature 0.2: at accuracy within one standard error of the best"
    )
    assert "best shared noise's" in first and second.startswith("APD, no noise")
    assert curves["fixed k, left to right"][0] == curves["window W, k = 1"][0] == curves["lookahead M, k = 1"][0]
    assert curves["lookahead M, k = 1"][-1] == "leftright:tokens_per_step=1,lookahead=4"
    assert curves["verifier alone"] == ["leftright:window=1,lookahead=1@ar"]
    assert [model for model, _ in measured].count("ar") == 2  # with and without a temperature
    status, out, err, results = figure("apd", "--verifier", "ar", "--ar", "ar2")
    assert status == 0 and "28 points" in out
    assert results["curves"]["APD, verified by it"][0] == "apd:verifier=ar2,weight=0.1"
    assert results["curves"]["autoregressive model"] == ["leftright:window=1,lookahead=1@ar2"]


def test_d2f_sets_the_student_beside_its_teacher_and_an_autoregressive_model(figure, measured):
    status, out, err, results = figure("d2f", "--student", "student", "--ar", "ar")
    assert status == 0 and "34 points, 12 programs" in out
    assert list(map(len, results["curves"].values())) == [1, 4, 4, 4, 4, 4, 4, 4, 4, 1]
    models = [model for model, _ in measured]
    assert {name: models.count(name) for name in set(models)} == {"model": 9, "student": 24, "ar": 1}
    assert [note.partition(":")[0] for note in results["notes"]] == [
        "D2F",
        "D2F, one block in flight",
        "D2F, single state",
    ]
    assert "block_length" in results["notes"][0]
    alone = results["curves"]["D2F, one block in flight"][-1]
    assert alone == "d2f:block_length=32,tau_add=0.1,tau_act=0.95,threshold=0.95,in_flight=1@student"
    single = results["curves"]["D2F, single state"][0]
    assert single == "d2f:block_length=8,tau_add=0.95,tau_act=0.95,threshold=0.5@student"
    status, out, err, results = figure("d2f", "--student", "student", "--block-model", "block")
    assert status == 0 and results["curves"]["block diffusion model"] == [
        "threshold:threshold=0.5@block",
        "threshold:threshold=0.95@block",
    ]
    assert results["notes"][-1].startswith("block diffusion model: at accuracy")


def test_fast_dllm_compares_caches_and_rules_with_the_threshold_without_a_cache(figure):
    status, out, err, results = figure("fast-dllm")
    assert status == 0 and "25 points, 13 programs" in out
    labels = [label for label in results["curves"] if label not in ("one token per forward", "threshold, no cache")]
    assert [note.partition(":")[0] for note in results["notes"]] == labels and len(labels) == 5
    assert results["curves"]["factor, dual cache"][-1] == "factor:factor=2,cache=dual,block_length=64"


def test_dinfer_has_every_decoder_with_every_cache_and_smoothing_and_a_compressed_model(figure, measured):
    status, out, err, results = figure("dinfer")
    assert status == 0 and "36 points, 18 programs" in out
    assert len(results["curves"]) == 18 and len(results["notes"]) == 15
    smooth = results["curves"]["hierarchical and smoothing, vicinity"][0]
    assert smooth == "hierarchical:threshold=0.8,low_threshold=0.62,cache=vicinity,block_length=32,smoothing=true"
    measured.clear()
    status, out, err, results = figure("dinfer", "--compressed", "after")
    assert status == 0 and "72 points" in out and len(results["notes"]) == 33
    assert [model for model, _ in measured].count("after") == 36
    assert any(note.startswith("compressed, credit, dual cache: at accuracy") for note in results["notes"])


def test_ni_averages_over_indicators_and_compares_at_equal_accuracy(figure, monkeypatch, ni_indicator):
    loaded = load_indicator(ni_indicator)
    monkeypatch.setattr("samplers.config.factory.load_indicator", lambda path: loaded)
    status, out, err, results = figure("ni", "--indicator", "a", "--indicator", "bcd")
    assert status == 0 and "76 points, 25 programs" in out
    notes = {note.partition(":")[0]: note for note in results["notes"]}
    assert len(notes) == 3 * 7 + 1
    first = notes["NI and threshold 0.9, no cache"]
    best = 1 / (1 + 0.03)
    least = 100 * (best - stderr.of_share(best, 2))
    assert first.startswith(
        "NI and threshold 0.9, no cache: at accuracy within one standard error of the best threshold's "
        f"(at least {least:.1f}"
    )
    assert "chosen on 2 problems, measured on 1 others" in first
    assert "+- 1.41 over 2 indicators" in first and "ratio" in first and first in out
    assert {"NI and threshold 0.9, prefix cache", "NI and credit, dual cache"} <= notes.keys()
    rest = "NI and threshold 0.9, dual cache, rest"
    assert rest in notes and all("scope=rest,cache=dual" in sampler for sampler in results["curves"][rest])
    status, out, err, _ = figure("ni", "--indicator", "a", "--indicator", "a")
    assert (status, out) == (2, "") and "a was given twice" in err


def test_compression_compares_both_models_at_equal_accuracy(figure, measured):
    status, out, err, results = figure("compression", "--compressed", "after", "--control", "c", "--block-length", "32")
    assert status == 0 and "6 points" in out
    before, after, control = results["curves"].values()
    assert after == [f"{sampler}@after" for sampler in before] and "block_length=32" in before[0]
    assert control == [f"{sampler}@c" for sampler in before]
    assert [model for model, _ in measured] == ["model", "model", "after", "after", "c", "c"]
    first, second = results["notes"]
    assert first.startswith("after compression: at accuracy within one standard error") and "ratio 1.00" in first
    assert second.startswith("control: same texts, random masks: at")


def test_points_are_chosen_on_other_problems_than_they_are_measured_on():
    """One that is lucky on the first half is chosen for that, and told with what it does on the second."""

    def point(threshold, first, second):
        rows = [SimpleNamespace(correct=i % 2 < 1, nfe=(first, second)[i % 2]) for i in range(40)]
        return [SimpleNamespace(rows=rows, sampler=f"threshold:threshold={threshold}")]

    note = figures.compare_lines("here", [point(0.9, 20.0, 20.0)], "NI", [point(0.5, 2.0, 10.0), point(0.7, 4.0, 4.0)])
    assert "NFE 10.00 (threshold 0.5; 0.0 +- 2.4 %) against 20.00 (threshold 0.9; 0.0 +- 2.4 %), ratio 2.00" in note
    one = [SimpleNamespace(rows=[SimpleNamespace(correct=1, nfe=1)])]
    assert "no points are compared" in figures.compare_lines("here", [one], "NI", [one])


def test_a_point_over_several_indicators_has_a_spread():
    reports = [SimpleNamespace(accuracy=a, accuracy_stderr=0.1, nfe=n) for a, n in ((0.5, 8.0), (0.7, 10.0))]
    curve = sweeps.curve_of("label", [reports, reports[:1]], "nfe")
    assert curve.x == [9.0, 8.0] and np.allclose(curve.y, [60, 50]) and np.allclose(curve.y_error, 10)
    assert np.allclose(curve.x_spread, [np.sqrt(2), 0]) and np.allclose(curve.y_spread, [10 * np.sqrt(2), 0])
    alone = sweeps.curve_of("label", [reports[:1]], "nfe")
    assert alone.x_spread is None and alone.y_spread is None


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["eb-chess"], "'eb-chess'"),
        (["apd"], "--verifier"),
        (["apd", "--verifier", "a,b"], "'a,b'"),
        (["ni", "--indicator", "nowhere"], "nowhere"),
        (["d2f", "--student", "student", "--task", "maze"], "maze"),
        (["eb-maze", "--few-programs"], "--few-programs"),
    ],
)
def test_mistakes_come_before_anything_is_scored(figure, measured, arguments, complaint):
    status, out, err, _ = figure(arguments[0], *arguments[1:])
    assert (status, out) == (2, "") and err.count("\n") == 1 and complaint in err and not measured


def test_panels_are_laid_out_in_rows_and_share_their_legend():
    pytest.importorskip("matplotlib")
    scattered = plots.Curve("a", [3, 1, 2], [90, 50, 40], [5, 0, 1], [1, 1, 1], [2, 2, 2], front=True)
    named = plots.Panel("W", [plots.Curve("b", range(2), [7.0, 8.0])], y_label="tokens per second", ticks=["none", "8"])
    drawn = plots.figure([named, plots.Panel("NFE", [scattered], True), named], "title", columns=2)
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["b", "a"]
    one, other, _, empty = drawn.axes
    assert [label.get_text() for label in one.get_xticklabels()] == ["none", "8"] and not empty.axison
    long = [plots.Curve(f"{'a long label, ' * 6}{n}", [1], [9.0]) for n in range(4)]
    wide = plots.figure([plots.Panel("NFE", long)] * 2, "title")
    wide.draw_without_rendering()
    assert wide.legends[0].get_window_extent().width <= wide.bbox.width  # no label is cut
    joined = next(line for line in other.get_lines() if line.get_label() == "a")
    assert list(joined.get_xdata()) == [1, 3]  # the third point is beaten
