"""AUP against d3LLM's own numbers, the data file of published points, and sweeps beside them."""

import json
import os

import pytest

from dllm_jax import DllmError
from evals import __main__ as cli
from evals.aup_metric import LEADERBOARD, aup
from evals.leaderboard import (
    PUBLISHED,
    best_accuracy,
    method_rows,
    published_areas,
    published_methods,
    read_published,
    sampler_methods,
    two_point_methods,
)
from evals.token_counts import COUNTS

POINT = {"source", "method", "model", "benchmark", "task", "accuracy", "counting"}
MORE = {"board", "setting", "tokens_per_forward", "nfe", "tokens_per_second", "note"}


def report(sampler, accuracy, tpf, nfe, committed=4.0, counted=None):
    return {
        "model": "m",
        "task": "t",
        "sampler": sampler,
        "accuracy": accuracy,
        "accuracy_stderr": 0.01,
        "tokens_per_forward": tpf,
        "nfe": nfe,
        "committed_per_forward": committed,
        "compat_count": {} if counted is None else {"d3llm": {"tokens_per_forward": counted}},
    }


SLOW = report("topk:k=1", 0.76, 0.7, 64.0, committed=1.0)
FAST = report("topk:k=4", 0.74, 2.6, 16.0, counted=2.5)


# Areas


def test_the_sheet_s_vector():
    assert aup([1, 2.77], [74.79, 74.68], 74.98) == pytest.approx(205.8, abs=0.05)


@pytest.mark.parametrize("board", LEADERBOARD)
def test_published_points_give_the_published_areas(board):
    methods, areas = published_methods(f"d3llm/{board}"), published_areas(f"d3llm/{board}")
    best = best_accuracy(f"d3llm/{board}", methods)
    found = {method.name: method.area(best) for method in methods}
    assert {"LLaDA", "Fast-dLLM", "D2F"} <= found.keys() <= areas.keys()
    for name, area in found.items():
        assert area == pytest.approx(areas[name], abs=0.0501), name


def test_the_published_mean_is_over_five_boards():
    for entry in read_published()["areas"]:
        if "areas" in entry:
            assert sum(entry["areas"].values()) / 5 == pytest.approx(entry["mean"], abs=0.051), entry["method"]


# Published points


def test_the_data_file_is_as_it_says():
    known = read_published()
    assert set(known) == {"schema", "sources", "best", "points", "areas"} == {"schema", *known["schema"]}
    assert all({"short", "title", "arxiv", "hardware"} <= set(source) for source in known["sources"].values())
    for point in known["points"]:
        assert POINT <= set(point) <= POINT | MORE, point
        assert 0 < point["accuracy"] < 100 and point["source"] in known["sources"], point
        assert ("nfe" in point) != ("tokens_per_forward" in point), point
        assert point["counting"] in COUNTS or " " in point["counting"], point
        assert point.get("board", LEADERBOARD[0]) in LEADERBOARD, point
    for entry in known["areas"]:
        assert entry["source"] in known["sources"] and set(entry.get("areas", LEADERBOARD)) == set(LEADERBOARD)
    assert PUBLISHED.read_text().isascii()


def test_a_benchmark_has_all_prompts_and_a_board_d3llm_s_alone():
    every, board = published_methods("gsm8k"), published_methods("d3llm/gsm8k-cot")
    assert {method.source for method in every} == {"d3LLM", "NI", "EB", "APD", "dInfer"}
    assert {method.source for method in board} == {"d3LLM"} and set(board) < set(every)
    assert next(m for m in every if m.name.startswith("NI")).area(100.0) is None
    with pytest.raises(DllmError, match="'chess'"):
        published_methods("chess")
    with pytest.raises(DllmError, match="'d3llm/None'"):
        published_methods("d3llm/None")


# Ours


def test_our_samplers_are_curves_by_their_numbers():
    reports = [SLOW, FAST, report("topk:k=2,proxy=entropy", 0.8, 1.2, 32.0), report("eb:gamma=1", 0.1, 0.0, 0.0)]
    found = sampler_methods(reports)
    assert [(m.name, len(m.points)) for m in found] == [("topk", 2), ("topk:proxy=entropy", 1), ("eb", 1)]
    assert found[0].area(80.0) == pytest.approx(aup([0.7, 2.6], [76.0, 74.0], 80.0)) and found[2].area(80.0) is None
    assert found[1].area(80.0) == pytest.approx(aup([0.7, found[1].points[0].tokens_per_forward], [76.0, 80.0], 80.0))
    assert sampler_methods(reports[1:])[1].area(80.0) is None, "of several tokens per forward alone"
    assert (found[0].fastest.accuracy, found[0].fastest.tokens_per_forward) == (74.0, 2.6)
    table = method_rows([*found[:2], *published_methods("d3llm/gsm8k-cot")], 80.0)
    assert [row["aup"] for row in table] == sorted((row["aup"] for row in table), reverse=True)


def test_two_points_are_counted_as_d3llm_does():
    (method,) = two_point_methods([SLOW, FAST])
    assert [(p.tokens_per_forward, p.accuracy) for p in method.points] == [(1.0, 76.0), (2.5, 74.0)]
    with pytest.raises(DllmError, match="no report of m .*topk:k=1"):
        two_point_methods([FAST])
    with pytest.raises(DllmError, match="topk:k=2 .*--count d3llm"):
        two_point_methods([SLOW, report("topk:k=2", 0.7, 1.5, 32.0)])
    with pytest.raises(DllmError, match="no report has more than one token per forward"):
        two_point_methods([SLOW])


def test_a_sweep_beside_published_points_is_one_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "results.json").write_text(json.dumps({"reports": [SLOW, FAST]}))
    out = tmp_path / "out"
    run = ["aup", "--results", str(tmp_path), "--task", "gsm8k", "--out", str(out)]
    assert cli.main(run) == 0
    printed = capsys.readouterr().out
    assert "1 methods of ours, " in printed and "+-" in printed
    assert sorted(os.listdir(out)) == ["aup.csv", "aup.json", "aup.png"]
    assert (out / "aup.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((out / "aup.json").read_text())
    assert found["task"] == "gsm8k" and found["best"] == 86.28  # of all that is compared
    (ours,) = [method for method in found["methods"] if method["source"] is None]
    assert ours["aup"] == pytest.approx(aup([0.7, 2.6], [76.0, 74.0], 86.28))
    assert cli.main([*run[:4], "d3llm/gsm8k-cot", *run[5:], "--two-points"]) == 0
    assert "published with y_max 74.98: LLaDA 72.5" in capsys.readouterr().out
    assert json.loads((out / "aup.json").read_text())["best"] == 76.0


@pytest.mark.parametrize("content", [None, "{", "[]", '{"reports": []}', '{"reports": [{"model": "m"}]}'])
def test_what_is_no_sweep_is_one_sentence(tmp_path, capsys, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["aup", "--results", str(path), "--task", "math", "--out", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ("holds no reports" in error or "could not be read" in error)
    assert not (tmp_path / "o").exists()
