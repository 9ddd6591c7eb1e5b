"""Rows and text by worker processes: the same values, errors and ends as without, and no process that remains."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import cloudpickle
import jax
import numpy as np
import pytest
from test_train_run import ENVIRONMENT, assert_same, command, latest_state
from test_train_text import files_of, setup_of, write_lines
from train_toys import (
    LLADA,
    Failing,
    Listed,
    Reverse,
    about_process,
    dllm_jax_example,
    run_config,
    settings,
    write_toml,
)

import train
from dllm_jax import DllmError
from train.__main__ import main
from train.batches import HostBatches
from train.config import DataPart
from train.data import Loader, Rows, Setup, cache
from train.data.checks import Subset
from train.data.files import jsonl
from train.data.mixture import Mixture

pytestmark = pytest.mark.processes
SECONDS = 300  # that processes have to start and to end; they take a few


def batches_of(source, part=None, kind="sft", batch=8):
    part = part or DataPart(length=16, shuffle=False)
    return HostBatches(Rows(source, part, kind, LLADA, 3, batch), np.ones((2, batch // 2), bool))


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def wait_until(done):
    end = time.monotonic() + SECONDS
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
    return done()


def group_of(process):
    """Processes of a group that have not ended."""
    found = subprocess.run(["ps", "-o", "stat=", "-g", str(process.pid)], capture_output=True, text=True).stdout
    return [state for state in found.split() if not state.startswith("Z")]


# A thread


def test_a_thread_works_ahead_in_order_and_its_errors_arrive():
    with Loader(lambda i: i * i).values(range(3, 50)) as values:
        assert list(values) == [i * i for i in range(3, 50)]
    with Loader(lambda i: 1 // (5 - i)).values(range(50)) as values, pytest.raises(ZeroDivisionError):
        list(values)
    with Loader(lambda i: i, 0).values(range(0, 10**9, 8)) as values:
        assert [next(values), next(values)] == [0, 8]  # and leaving does not wait for the rest
    with Loader(about_process, 3).values(range(0)) as values:
        assert not list(values) and not multiprocessing.active_children()


# Processes


def test_batches_do_not_depend_on_the_number_of_processes():
    make, numbers = batches_of(Reverse()), range(40, 40 + 8 * 5, 8)
    wanted = [make(number) for number in numbers]
    for workers in (1, 2):
        with Loader(make, workers).values(numbers) as values:
            assert_equal(list(values), wanted)
        assert not multiprocessing.active_children()


def test_processes_leave_accelerators_and_signals_alone(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")  # which is not there
    with Loader(about_process, 2).values(range(4)) as values:
        numbers, platforms, devices, handlers, processes = zip(*values, strict=True)
    assert numbers == (0, 1, 2, 3) and len(set(processes)) == 2 and os.getpid() not in processes
    assert {*platforms, *devices} == {"cpu"} and set(handlers) == {signal.SIG_IGN}


ENDS = {
    "refuses": (DllmError, "example 21 is gone; fetch it again$"),
    "disk": (OSError, "Input/output error: 'local.jsonl'"),
    "two words": (RuntimeError, "TwoWords: no more"),
    "exits": (SystemExit, "0"),
    "killed": (DllmError, r"a process of data.workers ended \(.*exit code -9\)"),
}


@pytest.mark.parametrize("how", ENDS)
def test_what_goes_wrong_in_a_process_arrives(how):
    kind, sentence = ENDS[how]
    with Loader(batches_of(Failing(at=21, how=how)), 1).values(range(0, 80, 8)) as values:
        assert next(values).tokens.shape == (2, 4, 16) and next(values) is not None
        with pytest.raises(kind, match=sentence):
            next(values)
    assert not multiprocessing.active_children()


def test_what_cannot_be_pickled_is_refused_before_a_run(tmp_path, capsys):
    path = write_toml(tmp_path / "run.toml", settings(tmp_path / "out", data__source="train_toys:Locked"))
    assert main(["masked-diffusion", "--config", str(path), "--no-progress", "data.workers=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: data.workers needs a data source that can be pickled") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def sources(tmp_path):
    """Sources of each kind, with settings."""
    setup = Setup(LLADA, None, 16, cache=tmp_path / "cache")
    pairs = [{"prompt": [i % 9], "answer": [i % 7] * (1 + i % 6)} for i in range(500)]
    path = write_lines(tmp_path / "pairs.jsonl", pairs)
    tokenised, listed = jsonl(setup, path=path), Listed([dllm_jax_example([1], [i % 20]) for i in range(60)])
    part = lambda **more: DataPart(length=16, pad=False, **more)
    return {
        "tokenised": (tokenised, part()),
        "buckets": (tokenised, part(bucket=4)),
        "packed": (tokenised, part(pack=True)),
        "stream": (jsonl(setup, path=path, concatenate=True), part()),
        "mixture": (Mixture([tokenised, listed], [1.0, 2.5]), part()),
        "subset": (Subset(tokenised, np.arange(100, 300)), part()),
    }


def test_sources_travel_and_files_stay(tmp_path):
    for name, (source, part) in sources(tmp_path).items():
        make = batches_of(source, part)
        wanted = [make(number) for number in (0, 8, 480)]
        pickled = cloudpickle.dumps(make)
        there = pickle.loads(pickled)
        assert_equal([there(number) for number in (0, 8, 480)], wanted)
        assert there.rows.source is not source and len(pickled) < 40_000, (name, len(pickled))
        assert source.name(7) == there.rows.source.name(7) if hasattr(source, "name") else True
    tokenised = sources(tmp_path)["tokenised"][0]
    assert len(cloudpickle.dumps(tokenised)) < tokenised.tokens.nbytes / 2


def test_a_run_by_processes_is_the_same_and_resumes(tmp_path, monkeypatch):
    config = lambda name, workers: run_config(tmp_path / name, steps=8, checkpoint__every=2, data__workers=workers)
    train.train(config("alone", 0))
    with monkeypatch.context() as patch:
        patch.setattr("train.multihost_stop.StopRequest.after", lambda self, step: step == 5)  # as after a signal
        with pytest.raises(train.Interrupted):
            train.train(config("out", 2))
    assert not multiprocessing.active_children()
    assert train.train(config("out", 1)).started == 5
    assert not multiprocessing.active_children()
    assert_same(latest_state(tmp_path / "out"), latest_state(tmp_path / "alone"))


def test_an_error_of_a_process_ends_the_command_as_without(tmp_path, capsys):
    options = {"at": 29, "how": "refuses"}
    changed = settings(tmp_path / "out", data__source="train_toys:Failing", data__options=options)
    path = write_toml(tmp_path / "run.toml", changed)
    said = []
    for workers in (0, 2):
        assert main(["masked-diffusion", "--config", str(path), "--no-progress", f"data.workers={workers}"]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] == "error: example 21 is gone; fetch it again\n"
    assert not multiprocessing.active_children()


@contextlib.contextmanager
def slow_run(tmp_path):
    """A command in a group of its own, once it has done some steps."""
    changes = {"steps": 10_000, "log__every": 1, "data__workers": 2, "data__source": "train_toys:Failing"}
    run = command(tmp_path, tmp_path / "out", **changes, data__options={"seconds": 0.01})
    process = subprocess.Popen(run, env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, start_new_session=True)
    try:
        metrics = tmp_path / "out" / "metrics.jsonl"
        assert wait_until(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) > 2), process.poll()
        assert len(group_of(process)) >= 3
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_for_the_whole_group_ends_the_run_after_its_step(number, status, tmp_path):
    """As a terminal and schedulers send it."""
    with slow_run(tmp_path) as process:
        os.killpg(process.pid, number)
        assert process.wait(SECONDS) == status
        assert wait_until(lambda: not group_of(process))
        said = process.stderr.read().decode()
    assert "the same command resumes from there" in said and "Traceback" not in said


def test_processes_end_when_the_run_is_killed(tmp_path):
    with slow_run(tmp_path) as process:
        process.kill()
        process.wait(SECONDS)
        assert wait_until(lambda: not group_of(process))


SCRIPT = """import sys
sys.path.insert(0, {folder!r})
from train_toys import run_config
import train
train.train(run_config({out!r}, data__workers=1))
"""


def test_a_script_without_a_guard_is_told(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=os.path.dirname(__file__), out=str(tmp_path / "out")))
    found = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    assert found.returncode == 1 and 'under if __name__ == "__main__":' in found.stderr.splitlines()[-1]


# Text


def test_processes_tokenise_into_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_CHARACTERS", 16_000)
    lines = [{"prompt": f"{i}?", "answer": "yes " * (i % 9)} for i in range(300)]
    for bad in range(0, 300, 17):
        lines[bad] = {"prompt": "ß", "answer": "x"} if bad % 2 else {"text": 3}
    lines = [lines[1], *lines]  # the first is none of the bad
    path = write_lines(tmp_path / "pairs.jsonl", lines)
    found = []
    for workers in (0, 2):
        setup = setup_of(tmp_path / str(workers))
        source = jsonl(Setup(setup.config, setup.tokenizer, 64, cache=setup.cache, workers=workers), path=path)
        found.append((files_of(tmp_path / str(workers)), len(source), source.faults))
    assert found[0] == found[1] and found[0][1:] == (283, found[0][2]) and len(found[0][2]) == 18
    assert not multiprocessing.active_children()
    folder = next((tmp_path / "2").glob("cache/*"))
    (folder / cache.ABOUT).unlink()  # as after a kill amid a record
    os.truncate(folder / cache.INDEX, 1000)
    jsonl(Setup(setup.config, setup.tokenizer, 64, cache=setup.cache, workers=2), path=path)
    assert files_of(tmp_path / "2") == found[0][0]


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_ends_amid_text_is_named():
    with pytest.raises(DllmError, match=r"a process of data.workers ended \("):
        list(cache.map_in_order(killed, range(9), 2))
    assert not multiprocessing.active_children()
    with pytest.raises(ZeroDivisionError):
        list(cache.map_in_order(lambda i: 1 // (5 - i), range(50), 1))
    assert not multiprocessing.active_children()
