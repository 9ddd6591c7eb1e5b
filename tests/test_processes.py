"""Evaluations shared by several processes: here two threads that meet as processes do, and real ones over loopback."""

import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import free_ports, one_error

import evals
from dllm_jax import DllmError
from dllm_jax.parallel import multihost
from evals import distributed as processes_module
from evals.__main__ import main
from evals.distributed import ALONE, Processes, meeting

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from evals.harness import model as harness_model
from evals.harness.model import DllmLM
from evals.harness.requests import slowest_seconds
from evals.harness.tasks import functions
from evals.presets import Preset, select
from evals.sandbox import ProgramOutcome

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "tests" / "harness"
SAMPLER = "topk:k=4,gen_length=16,block_length=8"


class Coordinator:
    """What processes meet at, for threads."""

    def __init__(self):
        self.known, self.changed = {}, threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self.changed:
            assert key not in self.known
            self.known[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key, milliseconds):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.known, 60)
            return self.known[key]


@pytest.fixture
def together(monkeypatch):
    """Calls a function of `Processes` in so many of them; what it returned or raised in each."""

    def call(work, count=2):
        coordinator = Coordinator()
        monkeypatch.setattr(multihost, "coordinator", lambda: coordinator)

        def one(process):
            mine = Processes(process, count)
            try:
                return work(mine)
            except DllmError as error:
                mine.fail(error)
                return error

        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    return call


def test_everything_is_gathered_in_order(together):
    work = lambda mine: [mine.gather([mine.index, "ä"]), mine.gather(list(mine.mine(range(5))))]
    assert together(work, 3) == [[[[0, "ä"], [1, "ä"], [2, "ä"]], [[0, 3], [1, 4], [2]]]] * 3
    assert ALONE.gather({"a": 1}) == [{"a": 1}] and ALONE.mine("abc") == "abc" and ALONE.first
    assert Processes(1, 3).most(7) == 3 and not Processes(1, 3).first


def test_all_end_with_the_sentence_of_one(together):
    def work(mine):
        mine.gather(0)
        if mine.index == 1:
            raise DllmError("the disk is full")
        return mine.gather(1)

    told = [str(error) for error in together(work, 3)]
    assert told == ["process 1 of 3: the disk is full", "the disk is full", "process 1 of 3: the disk is full"]


def test_others_than_the_first_keep_silent(monkeypatch, capsys):
    monkeypatch.setattr(multihost, "join", lambda *_, **__: None)
    monkeypatch.setattr(multihost, "count", lambda: 2)
    for process in (0, 1):
        monkeypatch.setattr(multihost, "index", lambda process=process: process)
        with meeting("host:1,2,0") as found:
            assert processes_module.current_processes() is found
            print(f"I am {found.index}")
        assert processes_module.current_processes() is ALONE
    assert capsys.readouterr().out == "I am 0\n"


@pytest.mark.parametrize("examples", [7, 1])
def test_a_run_is_shared(together, llada_tiny, tmp_path, examples):
    """Of one example the second process has nothing to do."""
    lines = [json.dumps({"prompt": "count " * (i % 3) + f"to {i}: ", "target": str(i)}) for i in range(examples)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    task = f"text:file={tmp_path / 'questions.jsonl'},score=contains"
    work = lambda mine=ALONE: evals.run(
        llada_tiny, task, SAMPLER + ",temperature=1.0", batch_size=2, counts=["ni", "apd"], processes=mine
    )
    alone, reports = work(), together(work)
    told = lambda report: {
        name: value
        for name, value in dataclasses.asdict(report).items()
        if name not in ("seconds", "compile_seconds", "tokens_per_second", "occupancy", "compat_count", "batch_size")
    }
    assert told(reports[0]) == told(reports[1]) == told(alone) and len(alone.rows) == examples
    assert reports[0] == reports[1] and 0 < reports[0].occupancy <= 1
    tokens = sum(row.tokens for row in alone.rows)
    assert reports[0].tokens_per_second == pytest.approx(tokens / reports[0].seconds)
    plain = lambda report: {
        (name, field): value
        for name, told in report.compat_count.items()
        for field, value in told.items()
        if "second" not in field
    }
    assert plain(reports[0]) == plain(alone)


# lm-evaluation-harness -----------------------------------------------------------------------------------------------


def asked():
    """Six texts, one of them twice."""
    made = [
        Instance("generate_until", {"n": i}, (f"count to {i}: ", {"until": ["\n\n"]}), 0, ("made", i, 1))
        for i in range(6)
    ]
    return [*made, made[0]]


@pytest.fixture
def ran(monkeypatch):
    """The prompts that were really run."""
    found, original = [], harness_model.Runner.run

    def run(self, requests, longest):
        for request in original(self, requests, longest):
            found.append(request.prompt)
            yield request

    monkeypatch.setattr(harness_model.Runner, "run", run)
    return found


def test_texts_are_shared_and_go_on(together, llada_tiny, tmp_path, ran):
    """By as many processes, or by others, whatever parts there are."""
    preset = select(None, SAMPLER + ",temperature=1.0", None, {})[0]

    def work(mine=ALONE, answers=tmp_path):
        lm = DllmLM(llada_tiny, preset, answers=answers, processes=mine, progress=False, batch_size=2)
        return lm.generate_until(asked()), {k: v for k, v in lm.counts().items() if "second" not in k}

    whole = work(answers=None)
    assert len(set(whole[0])) == 7 and whole[1]["texts"] == 7
    ran.clear()
    assert together(work) == [whole, whole] and len(ran) == 7
    parts = sorted(tmp_path.glob("[!.]*.part-*"))
    assert [path.name.partition(".jsonl")[2] for path in parts] == [".part-0-of-2", ".part-1-of-2"]
    assert [len(path.read_text().splitlines()) for path in parts] == [4, 3]
    first = parts[0].read_text().splitlines(keepends=True)
    parts[0].write_text(first[0] + first[1][:20])  # as a kill leaves it
    ran.clear()
    assert together(work) == [whole, whole] and len(ran) == 3
    parts[0].write_text(first[0] + first[1][:20])
    ran.clear()
    assert together(work, 3) == [whole] * 3 and len(ran) == 3
    ran.clear()
    assert work() == whole and not ran


def test_seconds_are_those_of_the_slowest_process():
    lines = [{"share": share, "wall": wall} for share, wall in [((0, 2), 1.0), ((1, 2), 5.0), ((0, 2), 2.0)]]
    assert slowest_seconds(lines) == 5.0
    assert slowest_seconds([*lines, {"share": [0, 1], "wall": 0.5}]) == 5.5  # another run, by one


def test_likelihoods_are_shared(together, llada_tiny, tmp_path):
    preset = Preset("likely", "", "", None, "raw", kind="likelihood", samples=2, mc_batch=1)
    made = [Instance("loglikelihood", {"n": i}, ("one ", "two"[: i + 1]), 0, ("made", i, 1)) for i in range(3)]
    work = lambda mine=ALONE: DllmLM(
        llada_tiny, preset, answers=tmp_path, processes=mine, progress=False
    ).loglikelihood(made)
    found = together(work)
    assert found[0] == found[1] and len(list(tmp_path.glob("[!.]*.part-*"))) == 2
    for path in tmp_path.iterdir():
        path.unlink()
    alone = work()
    assert [one for one, _ in found[0]] == pytest.approx([one for one, _ in alone], rel=1e-5)


def test_programs_are_judged_once(together, monkeypatch):
    """Each by one of the processes, and all know what came of it."""
    ran = []

    def run_programs(programs, **_):
        ran.extend(programs)
        return [ProgramOutcome("right" in program, "" if "right" in program else "no", 0.1) for program in programs]

    monkeypatch.setattr(functions, "run_programs", run_programs)
    answers = [[f"right {i}", f"wrong {i}"] for i in range(3)] + [["right 3"]]

    def work(mine=ALONE):
        processes_module._CURRENT.set(mine)  # as `meeting` does
        return functions._run_answers(answers, [{}] * 4, lambda _, text: text)

    alone = work()
    assert [[one["program"] for one in row] for row in alone] == answers
    assert [[one["passed"] for one in row] for row in alone] == [[True, False]] * 3 + [[True]]
    ran.clear()
    assert together(work, 3) == [alone] * 3 and sorted(ran) == sorted(text for row in answers for text in row)


# Real processes ------------------------------------------------------------------------------------------------------


def pair(*arguments, models):
    """Two processes over loopback: what became of them."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    where = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "evals", *map(str, arguments), "--model", str(models[i])]
            + ["--distributed", f"{address},2,{i}"],
            env=os.environ | where,
            cwd=TASKS,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    told = [process.communicate(timeout=200) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, told, strict=True)]


def test_two_processes_run_and_sweep(llada_tiny, tmp_path, capsys):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"prompt": f"to {i}: ", "target": "a"}) for i in range(5)))
    flags = ["--task", f"text:file={questions},score=contains", "--batch-size", "2"]
    flags = [*flags, "--sampler", SAMPLER]
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    assert main(["run", *flags, "--model", str(llada_tiny.folder), "--results", str(alone)]) == 0
    found = pair("run", *flags, "--results", shared, "--json", models=[llada_tiny.folder] * 2)
    assert [one[0] for one in found] == [0, 0], found
    assert shared.read_text() == alone.read_text() and found[1][1] == ""
    told = json.loads(found[0][1])
    assert told["n"] == 5 and told["hardware"]["processes"] == 2
    found = pair(
        "sweep",
        *flags,
        "--sampler",
        SAMPLER + ",temperature=1.0",
        "--out",
        tmp_path / "out",
        models=[llada_tiny.folder] * 2,
    )
    assert [one[0] for one in found] == [0, 0], found
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["reports"]) == 2


def test_two_processes_of_the_harness(llada_tiny, tmp_path, monkeypatch):
    """And one that has no model, with whose sentence both end."""
    monkeypatch.chdir(TASKS)
    flags = ["lm", "--tasks", "words", "--include-path", ".", "--sampler", SAMPLER, "--batch-size", "2", "--limit", "5"]
    found = pair(*flags, "--out", tmp_path / "shared", models=[llada_tiny.folder] * 2)
    assert [one[0] for one in found] == [0, 0], found
    assert "exact_match,answer" in found[0][1] and found[1][1] == ""
    assert main([*flags, "--model", str(llada_tiny.folder), "--out", str(tmp_path / "alone")]) == 0
    (one,), (two,) = (
        json.loads((tmp_path / name / "results.json").read_text())["presets"] for name in ("alone", "shared")
    )
    assert one["scores"] == two["scores"]
    counts = [{k: v for k, v in told["counts"].items() if "second" not in k} for told in (one, two)]
    assert counts[0] == counts[1] and counts[0]["texts"] == 5
    assert len(list((tmp_path / "shared" / "answers").glob("[!.]*.part-*"))) == 2
    found = pair(*flags, models=[llada_tiny.folder, tmp_path / "absent"])
    assert [one[0] for one in found] == [2, 2], found
    assert "error: process 1 of 2:" in found[0][2] and all("absent" in one[2] for one in found)


def test_a_mesh_is_of_one_process(capsys, monkeypatch):
    monkeypatch.setattr(multihost, "join", lambda *_, **__: None)
    flags = ["--task", "sudoku", "--sampler", "topk", "--model", "absent", "--mesh", "data=1", "--distributed"]
    assert main(["run", *flags]) == 2
    assert "--mesh" in one_error(capsys)
