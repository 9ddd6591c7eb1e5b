"""`python -m evals reproduce PAPER`, end to end with stand-in models and tasks: the page, resuming, what is missing."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import yaml

from evals import presets
from evals.__main__ import main
from evals.harness import reproduce

TASKS = Path(__file__).parent / "harness"
LLADA, DREAM = "D2F_LLaDA_Instruct_8B_Lora", "D2F_Dream_Base_7B_Lora"
SHORT = "gen_length=16,block_length=8,bos=0"  # the stand-in tokenizers have no start token


@pytest.fixture
def tasks(monkeypatch, tmp_path):
    """A folder with stand-ins for the papers' tasks, of problems that lie here."""
    monkeypatch.chdir(TASKS)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    kept = yaml.safe_load((TASKS / "_words.yaml").read_text())["filter_list"][0]["filter"]
    folder = tmp_path / "tasks"
    folder.mkdir()
    both = [{"name": name, "filter": kept} for name in ("strict-match", "flexible-extract")]
    files = {split: str(TASKS / "test.jsonl") for split in ("train", "test")}  # enough for eight examples
    for task in ("gsm8k", "gsm8k_cot"):
        own = {"include": f"{TASKS}/words.yaml", "task": task, "filter_list": both}
        own["dataset_kwargs"] = {"data_files": files}
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(own))
    return folder


@pytest.fixture
def call(tasks, tmp_path, capsys):
    """Runs the command: (status, printed, complaints, page, names of the presets that ran)."""

    def run(*flags):
        known = ["--include-path", str(tasks), "--limit", "2", "--set", SHORT, "--out", str(tmp_path / "out")]
        status = main(["reproduce", "d2f", "--only", "gsm8k", *known, *flags])
        printed = capsys.readouterr()
        page = tmp_path / "out" / "index.md"
        ran = [line.split()[0] for line in printed.out.splitlines() if line.startswith("d2f/")]
        return status, printed.out, printed.err, page.read_text() if page.exists() else "", ran

    return run


def test_a_paper_from_stand_ins_to_its_page(call, llada_tiny, dream_tiny, tmp_path):
    """What has no model is listed with what makes one; the same command runs only what was not there."""
    first, second = "d2f/llada-instruct/gsm8k", "d2f/dream-base/gsm8k"
    status, out, err, page, ran = call("--model", f"{LLADA}={llada_tiny.folder}")
    assert status == 0, err
    assert status == 0 and ran == [first] and "1 of 2 presets measured" in out
    scores = [line for line in page.splitlines() if line.startswith(f"| `{first}`")]
    assert len(scores) == len(presets.find(first).metrics)
    assert all("| 77.3 (paper) |" in line and "| modified |" in line and "52.5 / " in line for line in scores)
    assert any(line.startswith(f"| `{second}`") and "not run" in line for line in page.splitlines())
    assert f"--base dream-7b-base --out {DREAM}, or pass --model {DREAM}=DIR" in page
    own = tmp_path / "out" / first.replace("/", "-")
    assert (own / "results.json").exists() and not [path for path in own.iterdir() if path.is_dir()]
    row = json.loads((own / "row.json").read_text())
    assert row["comparison"]["rows"][0]["ours"] is not None and row["counts"]["texts"] == 2
    status, out, _, page, ran = call(
        "--model", f"{LLADA}={llada_tiny.folder}", "--model", f"{DREAM}={dream_tiny.folder}"
    )
    assert status == 0 and ran == [second] and "2 of 2 presets measured" in out and "not run" not in page
    run = next(line for line in page.splitlines() if line.startswith("python -m evals lm") and second in line)
    assert run.split()[4:] == [*f"--model {dream_tiny.folder} --preset {second} --limit 2".split(), "--set", SHORT,
                               "--out", str(tmp_path / "out")]  # fmt: skip
    status, _, _, page, ran = call("--model", f"{LLADA}={llada_tiny.folder}", "--dtype", "bfloat16")
    assert status == 0 and ran == [first]  # other weights are measured anew
    assert f"--preset {first} --limit 2 --dtype bfloat16 --set" in page


def test_what_fails_stops_nothing_else(call, llada_tiny, tmp_path):
    """And is tried again by the same command."""
    broken = tmp_path / "broken"
    broken.mkdir()
    flags = ("--model", f"{LLADA}={broken}", "--model", f"{DREAM}={llada_tiny.folder}")
    for _ in range(2):
        status, out, err, page, ran = call(*flags)
        assert status == 2 and "1 presets failed" in err and "is not a converted checkpoint" in err
        assert "| failed |" in page and "d2f/llada-instruct/gsm8k" in ran


def test_plans_and_mistakes(call, capsys):
    status, out, _, page, _ = call("--plan")
    assert status == 0 and not page and out.count("python -m evals lm") == 2
    for flags, sentence in (
        (["--model", "LLaDA"], "names no folder"),
        (["--model", "LLaDA-8B=x"], f"no preset of this paper is of a model 'LLaDA-8B'; they are of {LLADA}"),
        (["--only", "chess"], "no preset of d2f contains 'chess'"),
        ([], "none of 2 presets can run: .* is not here"),
    ):
        status, _, err, _, _ = call(*flags)
        assert status == 2 and err.count("\n") == 1 and re.search(sentence, err), err
    assert main(["reproduce", "d2", "--plan"]) == 2 and "did you mean" in capsys.readouterr().err


def test_every_paper_has_a_plan(capsys):
    """All presets stand in it, and each names what it needs."""
    for paper in reproduce.papers():
        assert main(["reproduce", paper, "--plan"]) == 0
    printed = capsys.readouterr().out
    for name, preset in presets.presets().items():
        assert f"--preset {name} " in printed
        if preset.kind == "generate" and "verifier" in preset.spec.types:
            assert "it needs --verifier DIR" in printed
