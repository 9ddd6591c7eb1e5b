"""Typed decisions on a task: its answers, what is measured of them, and the command."""

import csv
import json

import numpy as np
import pytest
from conftest import ROOT, one_error

from convert import embedded
from evals import __main__ as evals
from evals import stderr
from evals.decisions import bins_of, calibration_error
from evals.tasks import make_task

TASK = "word-problems:difficulty=easy,wording=fields"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The embedded model, which was not trained on fields."""
    return str(embedded.install("word-problems", tmp_path_factory.mktemp("models") / "word-problems"))


def test_answers_are_fields():
    task = make_task(TASK)
    for split in ("train", "test"):
        for index in range(20):
            example = task.example(split, index)
            lines = dict(line.split(": ") for line in task.show(example.answer_ids).split("\n"))
            assert lines == {name: str(value) for name, value in task.decided(example).items()}
            assert list(lines) == list(task.fields) and example.problem.answer == int(lines["answer"])
            assert (lines["even"] == "yes") == (int(lines["answer"]) % 2 == 0)
            assert (lines["more"] == "yes") == (int(lines["answer"]) > example.problem.start)
            assert task.decided(example)["answer"] in task.fields["answer"]
            assert len(example.answer_ids) <= task.answer_width and len(example.prompt_ids) <= task.prompt_width
            assert task.verify(example, example.answer_ids[:-1]).correct
            assert not task.verify(example, example.answer_ids[1:-1]).correct
    assert make_task("word-problems").fields is None


def test_the_calibration_error_is_the_mean_distance_in_bins():
    pairs = np.asarray([[[0.95, 1], [0.91, 0]], [[0.35, 0], [1.0, 1]]])
    wanted = [(0.35, 0.0, 0.25), (np.mean([0.95, 0.91, 1.0]), 2 / 3, 0.75)]
    np.testing.assert_allclose(bins_of(pairs), wanted)
    np.testing.assert_allclose(calibration_error(pairs), 0.25 * 0.35 + 0.75 * (wanted[1][0] - 2 / 3))


def test_the_page_quotes_the_file():
    """Every row, with its errors, in docs/decide.md."""
    page = (ROOT / "docs" / "decide.md").read_text()
    with (ROOT / "evals" / "results" / "decisions" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 8 and {row["n"] for row in rows} == {"512"}
    for row in rows:
        assert f"\n| `{row['way']}` | {line_of(row)} |\n" in page


def line_of(row):
    number = {name: float(value) for name, value in row.items() if value and name != "way"}
    right = stderr.as_percent(number["accuracy"], number["accuracy_stderr"]).replace("+-", "±")
    cells = [right, f"{number['forwards']:.2f}", f"{number['rows']:.3g}"]
    for name, digits in (("calibration", 3), ("nats", 3)):
        error = number.get(f"{name}_stderr")
        cells.append("" if error is None else f"{number[name]:.{digits}f} ± {error:.{digits}f}")
    return " | ".join(cells).replace("|  |", "| |").removesuffix(" ")


def test_the_command(model, tmp_path, capsys):
    words = ["decide", "--model", model, "--n", "8", "--batch-size", "8", "--out", str(tmp_path / "out")]
    more = ["--task", TASK, "--gamma", "0.1", "--joint", "--sampler", "threshold:threshold=0.9"]
    assert evals.main([*words, *more]) == 0
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["way"].split("=")[0] for row in rows] == [
        "decide", "decide, temperature", "decide, gamma", "decide, joint", "threshold:threshold"
    ]  # fmt: skip
    for row in rows[:4]:
        assert 0 <= float(row["calibration"]) <= 1 and float(row["nats"]) > 0 and row["n"] == "8"
        assert float(row["accuracy"]) <= min(float(row[name]) for name in ("answer", "even", "more"))
    assert float(rows[0]["forwards"]) == 1 and 1 <= float(rows[2]["forwards"]) <= 3
    assert rows[4]["calibration"] == "" and float(rows[4]["forwards"]) > 1
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert told["task"] == TASK and len(told["rows"]) == 5 and told["hardware"]
    assert (tmp_path / "out" / "calibration.png").stat().st_size > 5000
    capsys.readouterr()
    assert evals.main([*words, "--task", "word-problems"]) == 2
    assert "no fields" in one_error(capsys)
