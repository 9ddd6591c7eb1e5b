"""Scoring, sweeps and the command line: an oracle gets everything right, a random model nothing, numbers add up."""

import argparse
import dataclasses
import json
import math
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_evals_tasks import config_for

import evals
from dllm_jax import Denoiser, DllmError, random_model
from dllm_jax.checkpoints import checkpoint
from dllm_jax.models.transformer import tile_of
from dllm_jax.pytree import pytree
from evals import __main__ as cli
from evals import aup_metric, figures, files, paper_figures, plots, stderr
from evals.models import Models
from evals.runner import prepare_batches
from evals.sampler import all_samplers, parse_sampler, parse_samplers, read_grid
from evals.tasks import make_task
from samplers.config.presets import PRESETS

SUDOKU = "sudoku:box_rows=2,box_columns=2"
N = 10


@pytree(static=("vocab_size", "mask_id", "eos_id"))
class Oracle:
    """A denoiser that finds its input among known sequences [N, S] and predicts what is missing; positions of `wrong`
    sequences [N] it predicts as the end token."""

    known: jax.Array
    wrong: jax.Array
    vocab_size: int
    mask_id: int
    eos_id: int
    min_prompt_length = 0
    batch_parts = vocab_parts = 1

    def empty_cache(self, batch, length):
        return ()

    def forward(self, inputs, lengths, *, outputs):
        fits = (inputs[:, None] == self.known[:, : inputs.shape[1]]) | (inputs[:, None] == self.mask_id)
        fits |= jnp.arange(inputs.shape[1]) >= lengths[:, None, None]
        row = jnp.argmax(fits.all(axis=-1), axis=-1)
        tokens = jnp.take_along_axis(self.known[row], outputs.positions, axis=1)
        return jnp.where(self.wrong[row, None], self.eos_id, tokens)[..., None], ()

    def logits(self, hidden, tile=None):
        return tile_of(50.0 * jax.nn.one_hot(hidden[..., 0], self.vocab_size), 2, tile, 1)


def oracle(task, n=N, wrong=()):
    """A model that knows the first n test examples by heart, but for those that it gets wrong."""
    config = config_for(task)
    known = np.full((n, task.prompt_width + 2 * task.answer_width), config.eos_id, np.int32)
    for row in range(n):
        example = task.example("test", row)
        ids = np.concatenate([example.prompt_ids, example.answer_ids])
        known[row, : len(ids)] = ids
    denoiser = Oracle(
        jnp.asarray(known),
        jnp.isin(jnp.arange(n), jnp.asarray(wrong, int)),
        config.vocab_size,
        config.mask_id,
        config.eos_id,
    )
    params = {"known": denoiser.known}
    return SimpleNamespace(
        config=config,
        denoiser=denoiser,
        params=params,
        name="oracle",
        folder=None,
        require_tokenizer=lambda: task._coding[0],
    )


@pytest.fixture(scope="module")
def random_sudoku(tmp_path_factory):
    """A random model of 4x4 Sudoku as a checkpoint's folder."""
    model = random_model(config_for(make_task(SUDOKU)), key=3)
    folder = tmp_path_factory.mktemp("models") / "random-sudoku"
    checkpoint.save(folder, model.config, model.params.items())
    return folder


@pytest.fixture
def command(capsys):
    """Runs the command line: (status, standard output, standard error)."""

    def call(*arguments):
        status = cli.main(list(map(str, arguments)))
        return status, *capsys.readouterr()

    return call


# Scoring


@pytest.mark.parametrize("name", ["word-problems", SUDOKU, "maze:size=4"])
def test_whoever_knows_the_answers_gets_everything_right(name):
    task = make_task(name)
    report = evals.run(oracle(task), task, "topk:k=3", n=N, batch_size=4, progress=False)
    assert (report.accuracy, report.strict_accuracy, report.exact_match) == (1, 1, 1)
    assert report.accuracy_stderr == pytest.approx(1 / (2 * (N + 1)))  # Wilson's: nobody is right for certain
    examples = [task.example("test", i) for i in range(N)]
    if name == "word-problems":
        targets = [task.answer_width] * N  # nothing shows where it ends, and the most confident tokens come first
        tokens = [len(e.answer_ids) - 1 for e in examples]
        assert all(row.nfe <= math.ceil(width / 3) for row, width in zip(report.rows, targets, strict=True))
    else:
        tokens = [int(e.targets.sum()) for e in examples]
        assert [row.nfe for row in report.rows] == [math.ceil(count / 3) for count in tokens]
    assert [row.tokens for row in report.rows] == tokens
    assert report.tokens == pytest.approx(np.mean(tokens))
    assert report.nfe == pytest.approx(np.mean([row.nfe for row in report.rows]))
    assert report.tokens_per_forward == pytest.approx(sum(tokens) / sum(row.nfe for row in report.rows))
    assert report.full_forwards == report.nfe and report.seconds > 0 and report.tokens_per_second > 0


def test_a_share_is_printed_with_an_error_that_is_not_0():
    shown = [
        stderr.as_percent(share, stderr.of_share(share, n)) for share, n in ((0.986328125, 512), (1, 512), (1, 5000))
    ]
    assert shown == ["98.6 +- 0.5", "100.0 +- 0.1", "100.00 +- 0.01"]


def test_accuracy_counts_what_is_right_and_does_not_depend_on_the_batch_size():
    task = make_task(SUDOKU)
    model, engines = oracle(task, wrong=(0, 4, 7)), evals.Engines()
    one, other, all_at_once = (
        evals.run(model, task, "topk:k=2", n=N, batch_size=size, engines=engines, progress=False) for size in (4, 3, 64)
    )
    assert [row.correct for row in one.rows] == [i not in (0, 4, 7) for i in range(N)]
    assert one.accuracy == 0.7 and one.accuracy_stderr == pytest.approx(math.sqrt(0.7 * 0.3 / N + 1 / 400) / 1.1)
    assert one.nfe_stderr == pytest.approx(np.std([row.nfe for row in one.rows], ddof=1) / math.sqrt(N))
    assert one.rows == other.rows == all_at_once.rows and len(engines.programs) == 3
    assert (one.batch_size, all_at_once.batch_size) == (4, N)


def test_a_random_model_gets_nothing_right(random_sudoku):
    import dllm_jax

    model = dllm_jax.load(random_sudoku)
    engines = evals.Engines()
    one = evals.run(model, SUDOKU, "topk:k=2", n=N, batch_size=5, engines=engines, progress=False)
    again = evals.run(model, SUDOKU, "topk:k=2", n=N, batch_size=5, engines=engines, progress=False)
    assert one.accuracy == 0.0 and one.compile_seconds > 0 and again.compile_seconds == 0
    assert again.rows == one.rows and isinstance(model.denoiser, Denoiser)
    assert json.loads(files.as_json(one.summary()))["settings"]["k"] == 2


def test_a_shifted_model_gets_a_start_token_where_there_is_no_prompt():
    task = make_task(SUDOKU)
    model = random_model(config_for(task, shift=True, family="dream"))
    report = evals.run(model, task, "topk:k=16", n=2, batch_size=2, progress=False)
    assert all(len(row.ids) == task.answer_width for row in report.rows)


def test_text_is_encoded_in_the_model_s_own_tokens(llada_tiny):
    task = make_task("word-problems:difficulty=easy").bind(llada_tiny)
    example = task.example("test", 0)
    prompt, answer = task.texts("test", 0)
    assert (
        bytes(example.prompt_ids.tolist()).decode() == prompt
        and bytes(example.answer_ids[:-1].tolist()).decode() == answer
    )
    assert example.answer_ids[-1] == llada_tiny.config.eos_id and task.verify(example, example.answer_ids[:-1]).exact
    assert len(example.answer_ids) <= task.answer_width < 40
    assert not task.verify(example, [10**9, -1, 3]).correct


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"examples": []}, "the number of examples is 0"),
        ({"n": 0}, "n is 0"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"split": "dev"}, "'dev'"),
        ({"sampler": "topk:k=0"}, "k is 0"),
        ({"sampler": "topk:block_length=99,k=0"}, "k is 0"),
        ({"sampler": "topk:gen_length=4"}, "gen_length"),
        ({"task": "maze:size=4"}, "maze"),
        ({"task": "word-problems"}, "tokenizer"),
    ],
)
def test_mistakes_are_found_before_anything_is_compiled(changes, complaint):
    model, engines = random_model(config_for(make_task(SUDOKU))), evals.Engines()
    arguments = {"task": SUDOKU, "sampler": "topk", "engines": engines, **changes}
    with pytest.raises(DllmError) as caught:
        evals.run(model, **arguments)
    assert complaint in str(caught.value) and "\n" not in str(caught.value) and not engines.programs


# Samplers as text


def test_a_sampler_is_read_with_its_types():
    sampler = parse_sampler("eb:gamma=0.1,proxy=margin,cache=dual,block_length=8,temperature=0,fill_after_eos=true")
    assert sampler.name == "eb" and sampler.options == {
        "gamma": 0.1,
        "proxy": "margin",
        "cache": "dual",
        "block_length": 8,
        "temperature": 0.0,
        "fill_after_eos": True,
    }
    assert sampler.numbers == {"gamma": 0.1} and "gamma" not in sampler.series
    assert parse_sampler(str(sampler)) == sampler and str(parse_sampler("topk")) == "topk"
    assert parse_sampler("eb:gamma=inf,block_length=none").options == {"gamma": math.inf, "block_length": None}


def test_options_of_cache_policies_and_presets_are_known():
    sampler = parse_sampler("topk:cache=vicinity,warmup=2,prefix_look=4,smoothing=true")
    assert sampler.options == {"cache": "vicinity", "warmup": 2, "prefix_look": 4, "smoothing": True}
    sampler = parse_sampler("fast-dllm:threshold=0.7")
    settings = {"rule": "threshold", "threshold": 0.7, "cache": "dual", "block_length": 32}
    assert sampler.settings == settings and sampler.numbers == {"threshold": 0.7} and sampler.series == "fast-dllm"
    task = make_task("word-problems:difficulty=hard")
    for name in PRESETS:
        built = parse_sampler(name).for_canvas(task).build(oracle(task, n=1))
        assert built.gen_length == task.answer_width
    assert parse_sampler("fast-dllm:gen_length=16").for_canvas(task).build(oracle(task, n=1)).gen_length == 16


def test_lists_make_one_sampler_per_value():
    found = parse_samplers("eb:gamma=0.01|0.1|1,proxy=entropy|margin")
    assert [str(sampler) for sampler in found][:2] == ["eb:gamma=0.01,proxy=entropy", "eb:gamma=0.01,proxy=margin"]
    assert len(found) == 6 and len({sampler.series for sampler in found}) == 2
    together = all_samplers(["eb:gamma=0.01|0.1,proxy=entropy|margin", "eb:gamma=0.1|1,proxy=entropy"])
    assert [str(sampler) for sampler in together] == [
        "eb:gamma=0.01,proxy=entropy",
        "eb:gamma=0.1,proxy=entropy",
        "eb:gamma=1,proxy=entropy",
        "eb:gamma=0.01,proxy=margin",
        "eb:gamma=0.1,proxy=margin",
    ]


def test_a_grid_is_read_from_toml(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text('[[sampler]]\nrule = "eb"\ngamma = [0.1, inf]\n[[sampler]]\nrule = "topk"\nk = 2\ncache = "dual"\n')
    assert [str(sampler) for sampler in read_grid(path)] == ["eb:gamma=0.1", "eb:gamma=inf", "topk:k=2,cache=dual"]
    path.write_text(
        '[[sampler]]\nrule = "apd"\nverifier = "ar"\nweight = [0.5, 1]\nmodel = "dream"\n'
        '[[sampler]]\nsampler = "d2f"\nrule = ["eb", "topk"]\ntau_add = 0.1\n'
        '[[sampler]]\nsampler = "d2f"\nrule = "eb"\ngamma = [0.1]\nmodel = "student"\n'
        '[[sampler]]\nsampler = "leftright"\nwindow = 1\nlookahead = 1\nmodel = "ar"\n'
    )
    assert [str(sampler) for sampler in read_grid(path)] == [
        "apd:verifier=ar,weight=0.5@dream",
        "apd:verifier=ar,weight=1@dream",
        "d2f:rule=eb,tau_add=0.1",
        "d2f:rule=topk,tau_add=0.1",
        "d2f:rule=eb,gamma=0.1@student",
        "leftright:window=1,lookahead=1@ar",
    ]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("best", "'best'"),
        ("eb:gama=1", "'gama'; did you mean 'gamma'?"),
        ("eb:gamma=x", "gamma 'x'"),
        ("topk:k=1.5", "k '1.5'"),
        ("eb:proxy=luck", "proxy 'luck'"),
        ("eb:warmup=2", "'warmup'"),
        ("eb:cache=huge", "'huge'"),
        ("eb:fill_after_eos=1", "fill_after_eos '1'"),
        ("eb:gamma", "'gamma'"),
        ("eb:gamma=0.1|1", "gamma=0.1|1"),
        (":gamma=1", ":gamma=1"),
    ],
)
def test_bad_samplers_are_one_sentence(text, complaint):
    with pytest.raises(DllmError) as caught:
        parse_sampler(text)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[sampler]]\n",
        "sampler = 3\n",
        "[[sampler]]\nrule = 3\n",
        "[[sampler]]\nrule='eb'\nmodel=3",
        "=",
        "[[sampler]]\nrule='no'\n",
    ],
)
def test_bad_grids_are_one_sentence(tmp_path, text):
    (tmp_path / "grid.toml").write_text(text)
    with pytest.raises(DllmError) as caught:
        read_grid(tmp_path / "grid.toml")
    assert "\n" not in str(caught.value)


def test_no_sampler_and_no_file_are_refused(tmp_path):
    with pytest.raises(DllmError, match="--sampler"):
        all_samplers([])
    with pytest.raises(DllmError, match="nothing.toml"):
        read_grid(tmp_path / "nothing.toml")


# Sweeps


def test_samplers_of_several_models_stand_side_by_side(monkeypatch, command, tmp_path):
    """Each model is loaded once, and series of different models stay apart in tables and areas."""
    task, seen = make_task(SUDOKU), []
    known = {"bad": oracle(task, wrong=range(0, N, 2)), "good": oracle(task)}
    monkeypatch.setattr(
        "evals.models.dllm_jax.load",
        lambda name, **_: seen.append(name) or SimpleNamespace(**vars(known[name]) | {"name": name}),
    )
    specs = ["topk:k=1|16", "topk:k=1|16@good", "topk:k=16@bad"]
    *_, found = evals.sweep(Models("bad"), task, all_samplers(specs), n=N, batch_size=N, progress=False)
    assert sorted(seen) == ["bad", "good"] and found.programs == 1
    assert [report.accuracy for report in found.reports] == [0.5, 0.5, 1, 1, 0.5]
    assert list(found.series()) == ["topk", "topk@good", "topk@bad"]
    assert list(found.areas()) == ["topk", "topk@good"], "the other has no one-token-per-forward sampler"
    assert [row["model"] for row in found.rows()] == ["bad"] * 2 + ["good"] * 2 + ["bad"]
    command("compare", "--model", "good", "--task", SUDOKU, "--sampler", "topk@bad", "--sampler", "topk:k=9")
    assert sorted(seen) == ["bad", "bad", "good", "good"]
    status, out, err = command("run", "--task", SUDOKU, "--sampler", "topk@good", "--n", 4, "--json")
    assert status == 0 and json.loads(out)["accuracy"] == 1 and json.loads(out)["sampler"] == "topk@good"


def test_a_sampler_that_names_its_model_is_read_and_written_alike():
    sampler = parse_sampler("d2f:block_length=8,rule=eb,gamma=0.1@runs/ab/model")
    assert sampler.model == "runs/ab/model" and parse_sampler(str(sampler)) == sampler
    assert sampler.series == "d2f:block_length=8,rule=eb@runs/ab/model" and sampler.numbers == {"gamma": 0.1}
    with pytest.raises(DllmError, match="@there"):
        parse_sampler("@there")
    task = make_task(SUDOKU)
    with pytest.raises(DllmError, match="topk@other"):
        prepare_batches(oracle(task), SUDOKU, "topk@other", 1, 1, 0, "test")
    with pytest.raises(DllmError, match="topk@other"):
        parse_sampler("topk@other").build(oracle(task))
    verifier = oracle(task)
    verifier.config = verifier.config.replace(family="qwen2", attention="causal", mask_id=None)
    with pytest.raises(DllmError, match="leftright: oracle"):
        parse_sampler("leftright").for_canvas(task).build(verifier)


def test_numbers_are_swept_by_one_program():
    task = make_task(SUDOKU)
    samplers = all_samplers(["topk:k=1|2|4|16", "topk:k=2,proxy=entropy"])
    *_, found = evals.sweep(oracle(task, wrong=(1,)), task, samplers, n=N, batch_size=N, progress=False)
    assert found.programs == 2 and len(found.reports) == 5
    assert [report.compile_seconds > 0 for report in found.reports] == [True, False, False, False, True]
    assert [report.nfe for report in found.reports[:4]] == sorted((r.nfe for r in found.reports[:4]), reverse=True)
    assert found.reports[3].nfe == 1 and {report.accuracy for report in found.reports} == {0.9}
    series = found.series()
    assert list(map(len, series.values())) == [4, 1]
    assert found.areas()["topk"] == pytest.approx(90 * found.reports[3].tokens_per_forward)  # nothing is lost
    assert [row["series"] for row in found.rows()] == ["topk"] * 4 + ["topk:proxy=entropy"]


def test_a_better_point_makes_no_area_smaller():
    """Wherever the others of its series begin."""

    def report(sampler, tokens_per_forward, accuracy):
        counts = {"tokens_per_forward": tokens_per_forward, "committed_per_forward": tokens_per_forward}
        return parse_sampler(sampler), SimpleNamespace(accuracy=accuracy, nfe=32 / tokens_per_forward, **counts)

    def areas(*reports):
        samplers, found = zip(*reports, strict=True)
        return evals.Sweep(list(samplers), list(found)).areas()

    one, bold = report("topk:k=1", 1.0, 0.91), report("threshold:threshold=0.5", 3.0, 0.90)
    safe, other = report("threshold:threshold=0.9", 1.2, 0.91), report("eb:gamma=1", 1.2, 0.91)
    weighted = 90 * math.exp(-3 * (1 - 90 / 91))
    few, more = areas(one, bold, other), areas(one, safe, bold, other)
    assert few["threshold"] == pytest.approx(91 + 2 * (91 + weighted) / 2)
    assert more["threshold"] > few["threshold"] and more["eb"] == few["eb"] == pytest.approx(1.2 * 91)
    assert areas(bold, other) == {}, "without a common start there is nothing to compare"
    assert set(areas(one, bold, report("eb:gamma=1@other", 1.2, 0.91))) == {"topk", "threshold"}, "of another model"
    slower = report("threshold:threshold=0.99", 1.0, 0.89)
    assert areas(one, slower, bold)["threshold"] == few["threshold"], "the start is the best of one token per forward"


def test_a_sweep_checks_all_samplers_first():
    task = make_task(SUDOKU)
    sweep = evals.sweep(oracle(task), task, all_samplers(["topk:k=1", "eb:gamma=-1"]), n=2, progress=False)
    with pytest.raises(DllmError, match="gamma is -1"):
        next(sweep)


def test_plots_are_png_files():
    pytest.importorskip("matplotlib")
    curve = plots.Curve("a", [1, 2], [50, 100], [5, 0])
    many = [dataclasses.replace(curve, label=str(i)) for i in range(30)]
    for panels in ([plots.Panel("x", [curve])], [plots.Panel("x", many, True), plots.Panel("y", many, False)]):
        assert plots.draw(panels, "title").startswith(b"\x89PNG")


def test_plots_without_matplotlib_are_refused_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DllmError, match="matplotlib"):
        plots.require_matplotlib()


# Areas


def test_a_sampler_that_loses_nothing_scores_its_parallelism():
    assert evals.aup([2.0], [80.0], 80.0) == pytest.approx(160)
    assert evals.aup([1.0, 2.0, 5.0], [80.0, 80.0, 80.0], 80.0) == pytest.approx(5 * 80)


def test_lost_accuracy_weighs_less():
    weight = lambda y, best: math.exp(-3 * (1 - y / best))
    hand = 1 * 90 + (3 - 1) * (90 * weight(90, 90) + 86 * weight(86, 90)) / 2
    assert evals.aup([1.0, 3.0], [90.0, 86.0], 90.0) == pytest.approx(hand)
    assert evals.aup([3.0, 1.0], [86.0, 90.0], 90.0) == pytest.approx(hand)
    against_a_better_one = 1 * 90 + (3 - 1) * (90 * weight(90, 100) + 86 * weight(86, 100)) / 2
    assert evals.aup([1.0, 3.0], [90.0, 86.0], 100.0) == pytest.approx(against_a_better_one)


def test_points_far_below_the_first_do_not_count():
    assert evals.aup([1.0, 3.0, 9.0], [90.0, 90.0, 84.9], 90.0) == evals.aup([1.0, 3.0], [90.0, 90.0], 90.0)
    assert evals.aup([1.0, 9.0], [90.0, 85.0], 90.0) > 90
    assert evals.aup([1.0, 2.0], [0.0, 0.0], 0.0) == 0


@pytest.mark.parametrize("points", [([], []), ([1.0], []), ([0.0], [50.0]), ([1.0], [101.0])])
def test_impossible_curves_are_refused(points):
    with pytest.raises(DllmError):
        evals.aup(*points, 50.0)


def test_the_front_holds_what_nothing_beats():
    assert aup_metric.front([3, 1, 2, 2, 4], [90, 50, 60, 70, 90]) == [1, 3, 0]


# Files


def test_json_has_no_infinities():
    assert json.loads(files.as_json({"a": [math.inf, (1.0, math.nan)]})) == {"a": ["inf", [1.0, "nan"]]}


# Command line


def test_run_prints_a_line_or_json_and_writes_the_examples(command, random_sudoku, tmp_path):
    run = ("run", "--model", random_sudoku, "--task", SUDOKU, "--sampler", "topk:k=3", "--n", 6, "--batch-size", 4)
    status, out, err = command(*run, "--results", tmp_path / "new" / "rows.jsonl")
    assert status == 0 and "accuracy   0.0 +- 7.1 %" in out and "tokens per forward" in out
    rows = [json.loads(line) for line in (tmp_path / "new" / "rows.jsonl").read_text().splitlines()]
    assert (
        [row["index"] for row in rows] == list(range(6))
        and all(len(row["ids"]) == 19 for row in rows)
        and all(row["text"] for row in rows)
    )
    status, out, err = command(*run, "--json")
    report = json.loads(out)
    assert report["nfe"] == pytest.approx(np.mean([row["nfe"] for row in rows])) and report["n"] == 6
    assert report["task"] == SUDOKU and report["sampler"] == "topk:k=3" and report["versions"]["jax"] == jax.__version__


def test_sweep_writes_tables_and_a_plot(command, random_sudoku, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "sweep"
    small = ("--model", random_sudoku, "--task", SUDOKU, "--n", 4, "--batch-size", 4)
    status, text, err = command("sweep", *small, "--sampler", "topk:k=1|3|16", "--out", out)
    assert status == 0 and "3 samplers, 1 programs" in text and "AUP" in text
    results = json.loads((out / "results.json").read_text())
    assert [report["sampler"] for report in results["reports"]] == ["topk:k=1", "topk:k=3", "topk:k=16"]
    assert results["programs_compiled"] == 1 and set(results["aup"]) == {"topk"}
    assert len((out / "results.csv").read_text().splitlines()) == 4
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(out)) == ["pareto.png", "results.csv", "results.json"]


def test_a_figure_is_one_command(command, random_sudoku, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    every = figures.samplers_of(paper_figures.FIGURES["eb-maze"].lines(argparse.Namespace()))
    assert len(every) == 75 and len({sampler.series for sampler in every}) == 6
    lines = [figures.FigureLine("eb", ["eb:gamma=0|inf"]), figures.FigureLine("topk", ["topk:k=1|16"])]
    small = dataclasses.replace(paper_figures.FIGURES["eb-sudoku"], templates=lines)
    monkeypatch.setattr(cli, "FIGURES", {"eb-sudoku": small})
    small = ("--model", random_sudoku, "--task", SUDOKU, "--n", 4, "--batch-size", 4)
    status, text, err = command("figure", "eb-sudoku", *small, "--out", tmp_path)
    assert status == 0 and sorted(os.listdir(tmp_path)) == ["eb-sudoku.png", "results.csv", "results.json"]
    last = json.loads((tmp_path / "results.json").read_text())["reports"]
    assert [report["nfe"] for report in last][1::2] == [1, 1]


def test_show_prints_an_example(command):
    status, out, err = command("show", "--task", SUDOKU)
    board, solution = (text.split() for text in out.strip().split("\n\n"))
    assert status == 0 and len(board) == len(solution) == 4 and "." in "".join(board)
    assert all(a in (".", b) for a, b in zip("".join(board), "".join(solution), strict=True))
    question, answer = command("show", "--task", "word-problems", "--index", 1)[1].strip().split("\n\n")
    assert question.startswith("Q: ") and question.endswith("A: ") and "####" in answer


@pytest.mark.parametrize("width", [60, 80])
def test_compared_samplers_fit_the_terminal(random_sudoku, command, monkeypatch, width):
    """Nothing is cut off; and who waits is told on the standard error what is done."""
    monkeypatch.setenv("COLUMNS", str(width))
    samplers = ["topk:k=4", "threshold:threshold=0.9,cache=dual,block_length=16,temperature=0"]
    flags = [part for sampler in samplers for part in ("--sampler", sampler)]
    status, out, err = command("compare", "--model", random_sudoku, "--task", SUDOKU, *flags)
    assert status == 0 and "…" not in out and max(map(len, out.splitlines())) <= width
    first = "".join(line[2:].split(" ")[0] for line in out.splitlines() if line.startswith("  "))
    assert all(sampler in first for sampler in samplers)
    assert [sum(sampler in line for line in err.splitlines()) for sampler in samplers] == [1, 1]


def test_tokenizer_writes_the_files_of_a_checkpoint(command, tmp_path):
    assert command("tokenizer", "--task", "maze:size=4", "--out", tmp_path)[:2] == (0, f"28 tokens in {tmp_path}\n")
    assert sorted(os.listdir(tmp_path)) == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([], "COMMAND"),
        (["run"], "--task"),
        (
            ["run", "--task", "maze", "--sampler", "eb", "--sampler", "topk"],
            "not 2",
        ),
        (["run", "--task", "maze", "--sampler", "eb"], "--model"),
        (["sweep", "--task", "maze", "--out", ".", "--sampler", "eb@"], "'eb@'"),
        (["compare", "--task", "maze", "--sampler", "eb@/nowhere"], "/nowhere"),
        (["run", "--model", "/nowhere", "--task", "maze", "--sampler", "topk"], "/nowhere"),
        (["run", "--model", "x", "--task", "chess", "--sampler", "topk"], "'chess'"),
        (
            ["run", "--model", "x", "--task", "maze", "--sampler", "luck"],
            "'luck'",
        ),
        (["run", "--model", "x", "--task", "maze", "--sampler", "eb", "--split", "dev"], "'dev'"),
        (["run", "--model", "x", "--task", "maze", "--sampler", "eb", "--n", "many"], "--n"),
        (["sweep", "--model", "x", "--task", "maze", "--out", "o"], "--sampler"),
        (["sweep", "--model", "x", "--task", "maze", "--out", "o", "--grid", "/none.toml"], "/none.toml"),
        (["figure", "eb-chess", "--model", "x", "--out", "o"], "'eb-chess'"),
        (["figure", "eb-maze", "--model", "x", "--out", "o", "--task", "sudoku"], "eb-maze"),
        (["show", "--task", "maze", "--index", "-1"], "index is -1"),
        (["tokenizer", "--task", "maze", "--out", "o", "--vocab-size", "300"], "--vocab-size"),
        (["tokenizer", "--task", "word-problems", "--out", "o", "--vocab-size", "9"], "vocab_size is 9"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(command, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*arguments)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and complaint in err
    assert not os.listdir(tmp_path)


def test_a_crowded_device_is_one_sentence(command, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(cli, "make_task", full)
    status, out, err = command("show", "--task", "maze")
    assert status == 2 and err == "error: the device ran out of memory; use a smaller --batch-size\n"


def test_reports_say_on_what_and_with_what():
    task = make_task(SUDOKU)
    report = evals.run(oracle(task), task, "topk:k=16,proxy=entropy", n=3, batch_size=2, progress=False)
    assert report.hardware["backend"] == jax.default_backend() and set(report.versions) >= {"jax", "dllm_jax", "numpy"}
    assert report.settings["rule"] == "topk" and report.settings["proxy"] == "entropy" and report.dtype == "int32"
    assert "rows" not in report.summary() and len(report.rows) == 3
    assert report.settings["cache"] == "none"


def test_the_shipped_grid_is_valid():
    task = make_task("word-problems")
    samplers = read_grid(os.path.join(os.path.dirname(evals.__file__), "grids", "rules.toml"))
    assert len({sampler.series for sampler in samplers}) == 7
    for sampler in samplers:
        sampler.for_canvas(task).build(oracle(task, n=1))
