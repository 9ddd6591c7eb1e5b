"""The page about runs: what it holds, and that it needs nothing else."""

import json
import re
import shutil

import jax
import pytest
from train_toys import run_config

import train
from train.__main__ import main

SETTINGS = {
    "steps": 4,
    "checkpoint": {"every": 2, "keep": 1, "best": 1, "metric": "heldout_loss"},
    "watch": {"every": 2, "source": "train_toys:finite", "rows": 8},
}
ANSWERS = [{"step": 2, "prompt": "old", "text": "old"}, {"step": 4, "prompt": [1, 2], "text": "<b>&", "nfe": 4}]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a run, and of one with another learning rate and loss, which answers nothing."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("runs")
    train.train(run_config(folder / "one", **SETTINGS))
    shutil.copytree(folder / "one", folder / "two")
    for name, old, new in (("run.json", '"lr": 0.01', '"lr": 0.02'), ("metrics.jsonl", '"loss": ', '"loss": 9')):
        path = folder / "two" / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    (folder / "one" / "generations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ANSWERS))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["report", str(folder / "one"), str(folder / "two"), "--out", str(folder / "page.html")]) == 0
    assert before == {path: path.read_bytes() for path in before} and len(before) + 1 == sum(
        path.is_file() for path in folder.rglob("*")
    )
    return folder, (folder / "page.html").read_text()


def row(text, name):
    """The cells of a row of a table."""
    (found,) = re.findall(rf"<tr[^>]*><th>{re.escape(name)}</th>(.*?)</tr>", text, re.DOTALL)
    return re.findall(r"<td>(.*?)</td>", found, re.DOTALL)


def test_it_needs_no_other_file(page):
    _, text = page
    assert not re.search(r"<script|<link|<img|<iframe|@import|\bsrc=|url\((?!#)|href=\"(?!#)", text)
    assert text.count("<svg ") == text.count("</svg>") and "<!DOCTYPE svg" not in text and "<?xml" not in text


def test_what_it_holds(page):
    folder, text = page
    lines = [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text().splitlines()]
    last = {name: value for line in lines for name, value in line.items()}
    for name in ("loss", "heldout_loss", "heldout_cross_entropy_t25-50", "tokens_per_second"):
        assert float(row(text, name)[0]) == last[name]
    assert row(text, "loss")[1].startswith("9")
    data = json.loads((folder / "one" / "data.json").read_text())
    assert row(text, "examples") == ["no end"] * 2 and row(text, "digest of examples") == [data["digest"]] * 2
    assert row(text, "steps done") == ["4 of 4"] * 2 and row(text, "result")[0] == "weights of step 4, raw"
    assert row(text, "states")[0] == f"4 ({last['heldout_loss']:.4g})" and row(text, "best state")[0].startswith("4, ")
    assert row(text, "started from step") == ["0"] * 2 and f"jax {jax.__version__}, " in row(text, "last with")[1]
    assert row(text, "last on")[0] == f"{jax.device_count()} x cpu"
    assert row(text, "optimizer.lr") == ["0.01", "0.02"] and row(text, "data.length") == ["12", "12"]
    differs = re.findall(r"<tr class=differs><th>(.*?)</th>", text)
    assert differs == ["optimizer.lr"]
    for drawn in ("loss", "cross_entropy_t0-25", "lr", "tokens_per_second"):
        assert f"<!-- {drawn} -->" in text  # the name of a panel's axis
    assert "<!-- one -->" in text and "<!-- two -->" in text
    assert "Answers of one after step 4" in text and row(text, "1") == ["[1, 2]", "&lt;b&gt;&amp;", "4"]
    assert "Answers of two" not in text and "<b>" not in text


def test_a_run_alone_and_what_is_no_run(page, tmp_path, capsys):
    folder, _ = page
    shutil.copytree(folder / "one", tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "state")
    (tmp_path / "one" / "result.json").unlink()
    assert main(["report", str(tmp_path / "one")]) == 0
    text = (tmp_path / "one" / "report.html").read_text()
    assert row(text, "states") == ["none"] and row(text, "result") == ["not written yet"] and "differs>" not in text
    assert not (tmp_path / "one" / "state").exists()
    for folders, sentence in (
        ([tmp_path], "is no training run"),
        ([folder / "one", tmp_path / "absent"], "absent is no training run"),
    ):
        assert main(["report", *map(str, folders), "--out", str(tmp_path / "page.html")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error
    assert not (tmp_path / "page.html").exists()
