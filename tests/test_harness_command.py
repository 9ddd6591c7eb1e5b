"""`python -m evals lm` from the command line to its files: our own tasks on local problems, and likelihoods."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")

import yaml
from test_programs import confined

from evals import sandbox, stderr
from evals.__main__ import main
from evals.harness import command
from evals.harness.tasks import FOLDER

TASKS = Path(__file__).parent / "harness"
GSM8K = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
HUMANEVAL = [
    {"task_id": "T/0", "prompt": "def one():\n", "entry_point": "one", "canonical_solution": "", "test": "one()"}
]


@pytest.fixture(autouse=True)
def local(monkeypatch, tmp_path):
    monkeypatch.chdir(TASKS)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("DLLM_UNSAFE_PROGRAMS", raising=False)
    sandbox.require_box.cache_clear()


def include(folder, name, rows):
    """A file of one's own that asks problems of one's own as a task of ours does."""
    data = folder / "test.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"include": str(FOLDER / f"{name}.yaml"), "task": "own", "dataset_path": "json", "dataset_name": None}
    own["dataset_kwargs"] = {"data_files": {"test": str(data)}}
    (folder / "own.yaml").write_text(yaml.safe_dump(own))
    return ["--tasks", "own", "--include-path", str(folder)]


def lm(model, *flags, folder):
    """The status of the command, and its results where it worked."""
    status = main(["lm", "--model", str(model.folder), "--out", str(folder / "out"), *flags])
    return status, None if status else json.loads((folder / "out" / "results.json").read_text())["presets"]


def test_a_task_of_ours_from_a_preset_to_the_table(llada_tiny, tmp_path, capsys):
    """Chat with the fixed examples as turns, of which the cut prompt has the end."""
    task = include(tmp_path, "dllm_gsm8k_oc", GSM8K)
    smaller = "gen_length=16,block_length=8,max_prompt=96"
    preset = ["--preset", "llada-instruct/gsm8k/block", "--limit", "2", "--set", smaller, *task]
    status, (told,) = lm(llada_tiny, *preset, "--log-samples", folder=tmp_path)
    assert status == 0 and told["counts"]["texts"] == 2 and 1 <= told["counts"]["nfe"] <= 16
    (row,) = told["scores"]
    assert row["metric"] == "exact_match,none" and row["shots"] == 4
    (samples,) = (tmp_path / "out").glob("*/samples_own.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert row["score"] == sum(line["exact_match"] for line in lines) / 2
    assert "The answer is 18" in lines[1]["arguments"][0][0] and "1 + 1?" in lines[1]["arguments"][0][0]
    (answers,) = (tmp_path / "out" / "answers").glob("*.jsonl")
    assert [len(json.loads(line)["prompt_ids"]) for line in answers.read_text().splitlines()] == [96, 96]
    assert "prompts of more than 96 tokens" in capsys.readouterr().err


def test_counts_of_papers_and_the_leaderboard(llada_tiny, tmp_path, capsys):
    """Answers' own seconds are known where one is sampled at a time; `evals aup` reads what was written."""
    flags = ["--tasks", "words", "--include-path", ".", "--sampler", "topk:k=4,gen_length=8", "--limit", "2"]
    out = tmp_path / "out"
    for size, known in (("2", False), ("1", True)):
        shutil.rmtree(out, ignore_errors=True)
        status, (told,) = lm(llada_tiny, *flags, "--count", "apd", "--batch-size", size, folder=tmp_path)
        counted = told["counts"]["compat_count"]["apd"]
        assert status == 0 and ("mean_tokens_per_second" in counted) == known
        assert counted["tokens"] == 8 and counted["nfe"] == told["counts"]["nfe"] == 2
    assert "own as apd counts: n 2 | tokens 8" in capsys.readouterr().out
    assert "own as apd counts" in (out / "table.txt").read_text()
    (report,) = json.loads((out / "results.json").read_text())["reports"]
    (row,) = told["scores"]
    assert report["accuracy"] == row["score"] and report["metric"] == row["metric"] and report["n"] == 2
    pytest.importorskip("matplotlib")
    assert main(["aup", "--results", str(out), "--task", "gsm8k", "--out", str(tmp_path / "aup")]) == 0
    methods = json.loads((tmp_path / "aup" / "aup.json").read_text())["methods"]
    (ours,) = (method for method in methods if method["source"] is None)
    assert ours["model"] == "llada-tiny" and ours["points"][0]["tokens_per_forward"] == report["tokens_per_forward"]


def test_a_metric_that_is_no_share(llada_tiny, tmp_path, capsys):
    """It stands in the table as it is; no report of a sweep, whose accuracy is a share, is made of it."""
    (tmp_path / "own.py").write_text(
        "def results(doc, texts):\n    return {'length': 40}\n\ndef total(items):\n    return sum(items)\n"
    )
    (tmp_path / "own.yaml").write_text(
        f"include: {TASKS}/words.yaml\ntask: own\nprocess_results: !function own.results\n"
        "metric_list: [{metric: length, aggregation: !function own.total, higher_is_better: true}]\n"
    )
    flags = ["--tasks", "own", "--include-path", str(tmp_path), "--sampler", "topk:k=4,gen_length=8", "--limit", "2"]
    status, (told,) = lm(llada_tiny, *flags, folder=tmp_path)
    assert status == 0 and [(row["score"], row["stderr"]) for row in told["scores"]] == [(80, None)]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["reports"] == []
    assert " 80.00 " in capsys.readouterr().out


@pytest.mark.parametrize("name, sentence", [
    ("none", "no count is called 'none'"),
    ("d3llm", "leaves the first 10 examples out; score more than 2"),
])  # fmt: skip
def test_counts_that_cannot_be(name, sentence, llada_tiny, tmp_path, capsys):
    flags = ["--tasks", "words", "--include-path", ".", "--sampler", "topk", "--limit", "2", "--count", name]
    assert lm(llada_tiny, *flags, folder=tmp_path) == (2, None)
    assert sentence in capsys.readouterr().err


def test_likelihoods_of_a_preset(llada_tiny, tmp_path):
    preset = ["--preset", "llada-base/arc_c", "--tasks", "words_choice", "--include-path", "."]
    few = ["--limit", "2", "--set", "samples=2,mc_batch=1"]
    status, (told,) = lm(llada_tiny, *preset, *few, folder=tmp_path)
    assert status == 0 and told["counts"] == {"likelihoods": 8, "forwards": 8 * 2}
    assert {"samples: 128 -> 2", "task: arc_challenge -> words_choice"} <= set(told["changes"])
    assert {row["metric"] for row in told["scores"]} == {"acc,none"}


def test_programs_are_refused_before_anything_is_generated(llada_tiny, tmp_path, monkeypatch, capsys):
    """Where nothing can be confined; --unsafe-code runs them all the same."""
    refused, passed = {"refused": "unshare: Operation not permitted"}, {"passed": True, "reason": "", "seconds": 0.1}
    monkeypatch.setattr(sandbox.running, "_run_box", lambda job: passed if job["unsafe"] else refused)
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")  # so that what the flag sets is taken back
    monkeypatch.setenv("DLLM_UNSAFE_PROGRAMS", "0")
    task = include(tmp_path, "dllm_humaneval_sanitize", HUMANEVAL)
    flags = ["--sampler", "topk:k=8,gen_length=8", *task]
    assert lm(llada_tiny, *flags, folder=tmp_path) == (2, None)
    assert "cannot confine a program" in capsys.readouterr().err
    assert list((tmp_path / "out" / "answers").glob("*.jsonl")) == []
    status, (told,) = lm(llada_tiny, *flags, "--unsafe-code", folder=tmp_path)
    assert status == 0 and told["scores"][0]["score"] == 1
    sandbox.require_box.cache_clear()


@confined
def test_programs_are_run_in_their_box(llada_tiny, tmp_path):
    """What the tiny model writes is no program."""
    task = include(tmp_path, "dllm_humaneval_sanitize", HUMANEVAL)
    status, (told,) = lm(llada_tiny, "--sampler", "topk:k=8,gen_length=8", *task, "--log-samples", folder=tmp_path)
    assert status == 0 and told["scores"][0] | {"score": 0.0} == told["scores"][0]
    (samples,) = (tmp_path / "out").glob("*/samples_own.jsonl")
    assert json.loads(samples.read_text())["filtered_resps"][0][0]["passed"] is False


def test_a_score_without_a_miss_has_an_error():
    """lm-eval's is 0 there; what is no share keeps its own."""
    numbers = {"exact_match,none": 1.0, "exact_match_stderr,none": 0.0, "mean,none": 7.0, "mean_stderr,none": 0.0}
    results = {"results": {"own": numbers}, "n-shot": {}, "n-samples": {"own": {"effective": 10}}}
    exact, mean = command.score_rows(SimpleNamespace(results=results))
    assert exact["stderr"] == stderr.of_share(1.0, 10) > 0 and mean["stderr"] == 0
