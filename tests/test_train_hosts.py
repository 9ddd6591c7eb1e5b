"""Runs of several processes over loopback: trained, killed, stopped, resumed, exported; and how they fail together."""

import concurrent.futures
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import free_ports
from test_evals_training import SETTINGS
from test_train_grpo import LIKED
from test_train_run import ENVIRONMENT, assert_same, interrupting, latest_state, lines
from train_toys import LLADA, Reverse, model_fields, of_lengths, run_config, settings, write_toml

import convert
import dllm_jax
import train
from dllm_jax.checkpoints import checkpoint
from dllm_jax.parallel import multihost
from train import multihost_stop
from train.__main__ import main
from train.config import CheckpointPart
from train.multihost_stop import SharedStopRequest
from train.objectives.grpo import GrpoConfig
from train.settings import build_settings
from train.states import States

pytestmark = pytest.mark.processes

MESH = {"data": 2, "fsdp": 2}


class Pair:
    """Two processes of a run, by default with two devices each; what they say is in files."""

    def __init__(self, tmp_path, out, own=((), ()), devices=2, command="masked-diffusion", **changes):
        toml = write_toml(tmp_path / "run.toml", settings(out, **{"compute__mesh": MESH, **changes}))
        run = [sys.executable, "-m", "train", command, "--config", str(toml), "--no-progress"]
        address = f"127.0.0.1:{free_ports(1)[0]}"
        environment = os.environ | ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(devices)}
        self.out, self.files = Path(out), [tmp_path / f"said-{i}.txt" for i in range(2)]
        self.processes = [
            subprocess.Popen(
                [*run, *own[i], "--distributed", f"{address},2,{i}"],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for i, file in enumerate(path.open("w") for path in self.files)
        ]

    def at(self, step):
        """Waits until the log tells of a step."""
        log = self.out / "metrics.jsonl"
        self.until(lambda: log.is_file() and any(f'{{"step": {step},' in line for line in log.read_text().splitlines()))

    def until(self, true):
        begin = time.monotonic()
        while not true():
            assert time.monotonic() < begin + 300 and all(one.poll() is None for one in self.processes), self.said()
            time.sleep(0.02)

    def end(self, seconds=300):
        """Statuses, and what was said."""
        try:
            found = [process.wait(seconds) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return found, self.said()

    def said(self):
        return [path.read_text() for path in self.files]


def errors(said):
    return [line for line in said.splitlines() if line.startswith("error: ")]


def losses(out):
    """Of the steps, and of what was held out."""
    return [(line["step"], line[name]) for line in lines(out) for name in ("loss", "heldout_loss") if name in line]


def test_two_processes_that_are_killed_and_stopped_end_like_one(tmp_path):
    """The same mesh in one process gives the same numbers but for the order in which sums over devices are taken."""
    changes = {"steps": 120, "optimizer__ema": 0.9, "checkpoint__every": 30, "log__every": 5}
    slow = {"data__source": "train_toys:Slow"}
    out = tmp_path / "two"
    killed = Pair(tmp_path, out, **changes, **slow)
    killed.at(30)
    killed.until(lambda: (out / "state" / "30").is_dir())
    killed.processes[1].kill()
    statuses, said = killed.end()
    assert statuses[0] not in (0, 75) and statuses[1] == -signal.SIGKILL, said  # JAX ends the other
    stopped = Pair(tmp_path, out, **changes, **slow)
    stopped.at(40)
    stopped.processes[1].terminate()
    statuses, said = stopped.end()
    assert statuses == [75, 75], said
    told = [text.splitlines()[-1] for text in said]
    assert told[0] == told[1] and told[0].startswith("interrupted after step ")
    with States(out / "state", CheckpointPart(), clean=False) as states:
        assert f"after step {states.latest};" in told[0] and 40 <= states.latest < 120
    statuses, said = Pair(tmp_path, out, **changes, **slow).end()
    assert statuses == [0, 0] and f"written to {out}/model" in said[0] and "written" not in said[1], said
    assert Pair(tmp_path, tmp_path / "whole", **changes).end()[0] == [0, 0]
    found = latest_state(out)
    assert_same(found, latest_state(tmp_path / "whole"))  # bit by bit
    told, wanted = losses(out), losses(tmp_path / "whole")
    assert told[:8] == wanted[:8] and told[-1] == wanted[-1]  # between them the line of the step of the stop
    for name, value in checkpoint.iter_params(out / "model"):
        np.testing.assert_array_equal(value, found[f"trained:{name}"])
    assert main(["write-model", "--run", str(out), "--out", str(tmp_path / "again")]) == 0
    assert_same(*(dict(checkpoint.iter_params(folder)) for folder in (tmp_path / "again", out / "model")))
    assert checkpoint.load_source(out / "model") == checkpoint.load_source(tmp_path / "again")
    convert.export(out / "model", tmp_path / "hub", progress=False)
    assert (tmp_path / "hub" / "config.json").is_file()


def kept_states(out, part):
    with States(out / "state", CheckpointPart(**part), clean=False) as states:
        return states.metrics


def test_two_processes_train_like_one(tmp_path):
    """The same mesh in one process gives the same numbers, but for the order of the terms in sums over devices."""
    kept = {"every": 2, "keep": 1, "best": 2, "metric": "heldout_loss", "weights": "ema"}
    changes = {"steps": 6, "checkpoint": kept, "optimizer__ema": 0.5, "watch": {"every": 2}}
    of = lambda name: {**of_lengths(tmp_path, tmp_path / f"{name}-cache"), "heldout": 0.3}
    data = {name: of(name) for name in ("one", "two")}
    train.train(run_config(tmp_path / "one", compute__mesh=MESH, data=data["one"], **changes))
    statuses, said = Pair(tmp_path, tmp_path / "two", data=data["two"], **changes).end()
    assert statuses == [0, 0], said
    first, second = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert [step for step, _ in first] == [step for step, _ in second]
    np.testing.assert_allclose([loss for _, loss in second], [loss for _, loss in first], rtol=1e-4)
    states = [kept_states(tmp_path / name, kept) for name in ("one", "two")]
    assert list(states[0]) == list(states[1]) and len(states[0]) >= 2 and 6 in states[0]
    for one, two in zip(*(found.values() for found in states), strict=True):
        np.testing.assert_allclose(two["heldout_loss"], one["heldout_loss"], rtol=1e-4)
    wanted = dllm_jax.load(tmp_path / "one" / "model").params
    for name, x in dllm_jax.load(tmp_path / "two" / "model").params.items():
        np.testing.assert_allclose(x, wanted[name], atol=2e-4, err_msg=name)


def test_two_processes_that_split_the_weights_train_in_buckets(tmp_path):
    """One program for each length; their collectives, of one device per process, have to meet in one order."""
    model = LLADA.replace(
        vocab_size=256, embed_dim=128, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=32, mlp_dim=384
    )
    changes = {"model__config": model_fields(model), "compute__mesh": {"fsdp": 2}, "optimizer__batch": 16}
    data = of_lengths(tmp_path, tmp_path / "cache")
    statuses, said = Pair(tmp_path, tmp_path / "run", devices=1, data=data, **changes).end(120)
    assert statuses == [0, 0], said
    assert all(np.isfinite(loss) for _, loss in losses(tmp_path / "run"))


def test_two_processes_write_adapters(tmp_path):
    train.train(run_config(tmp_path / "base", steps=2, checkpoint__every=2))
    changes = {"model": {"init": str(tmp_path / "base" / "model")}, "lora": {"rank": 2}, "steps": 4}
    train.train(run_config(tmp_path / "one", compute__mesh=MESH, **changes))
    statuses, said = Pair(tmp_path, tmp_path / "two", **changes).end()
    assert statuses == [0, 0], said
    (config, part, one, base), two = (train.load_adapters(tmp_path / name / "adapters") for name in ("one", "two"))
    assert (config, part, base) == (two[0], two[1], two[3])
    for name, value in one.items():
        np.testing.assert_allclose(two[2][name], value, atol=2e-4, err_msg=name)


def test_two_processes_sample_and_learn_like_one(tmp_path):
    """Rewards of each group are computed by one of them. A run that is stopped and resumed ends like one that is not,
    bit by bit; one process with the same mesh gives the same numbers, but for the order of the terms in sums over
    devices. By such a difference, of 1e-6, a draw of the second round is another one for one seed in thousands."""
    data = LIKED["data"] | {"source": "train_toys:SlowLiked"}
    logs = {name: tmp_path / f"{name}.txt" for name in ("one", "two", "stopped")}
    options = lambda name: {"data": data | {"options": {"log": str(logs[name]), "seconds": float(name == "stopped")}}}
    changes = LIKED | {"steps": 6, "objective": {"num_iterations": 2, "loss_type": "dapo"}, "optimizer__ema": 0.9}
    stopped = Pair(tmp_path, tmp_path / "stopped", command="grpo", **changes | options("stopped"))
    stopped.at(2)
    stopped.processes[1].terminate()
    statuses, said = stopped.end()
    assert statuses == [75, 75], said
    with States(tmp_path / "stopped" / "state", CheckpointPart(), clean=False) as states:
        assert states.latest == 4
    for name in ("stopped", "two"):
        statuses, said = Pair(tmp_path, tmp_path / name, command="grpo", **changes | options(name)).end()
        assert statuses == [0, 0], said
    assert_same(*(latest_state(tmp_path / name) for name in ("stopped", "two")))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "two")
    one = settings(tmp_path / "one", compute__mesh=MESH, **changes | options("one"))
    train.train(build_settings(GrpoConfig, one))
    wanted, found = (losses(tmp_path / name) for name in ("one", "two"))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)  # losses of advantages, which are about 0
    rewards = [[line["reward"] for line in lines(tmp_path / name)] for name in ("one", "two")]
    assert rewards[0] == rewards[1] and len(set(rewards[0])) > 1
    for name, x in latest_state(tmp_path / "one").items():
        np.testing.assert_allclose(latest_state(tmp_path / "two")[name], x, atol=2e-4, err_msg=name)
    by_process = [logs[name].read_text().split() for name in ("one", "two")]
    assert sorted(by_process[1]) == ["0"] * 12 + ["1"] * 12 and by_process[0] == ["0"] * 24


def test_two_processes_answer_like_one(tmp_path):
    """Prompts and a task, with the weights where they are. Before the first step nothing is summed over devices."""
    table = tomllib.loads(SETTINGS)
    watch = {"every": 2, "task": "word-problems:difficulty=easy", "n": 6, "prompts": ["Q: Tom has 2 books."]}
    kept = {"every": 2, "best": 1, "metric": "accuracy"}
    changes = {"watch": watch, "checkpoint": kept, "steps": 2, "optimizer__batch": 4, "optimizer__warmup": 1}
    changes |= {name: table[name] for name in ("model", "data")}
    train.train(run_config(tmp_path / "one", compute__mesh=MESH, **changes))
    statuses, said = Pair(tmp_path, tmp_path / "two", **changes).end()
    assert statuses == [0, 0], said
    told = [(tmp_path / name / "generations.jsonl").read_text().splitlines() for name in ("one", "two")]
    first = [[line for line in map(json.loads, text) if line["step"] == 0] for text in told]
    assert first[0] == first[1] and len(first[0]) == 5 and len(told[1]) == 10
    scores = [[line["accuracy"] for line in lines(tmp_path / name) if "accuracy" in line] for name in ("one", "two")]
    assert scores[0][0] == scores[1][0] and len(scores[1]) == 2
    assert kept_states(tmp_path / "two", kept)[2]["accuracy"] == scores[1][1]


@pytest.mark.parametrize("process", [0, 1])
def test_a_reward_that_fails_ends_both(tmp_path, process):
    """With its sentence, also where the other's rewards take longer."""
    data = LIKED["data"] | {"source": "train_toys:SlowLiked", "options": {"fails": process, "seconds": 2.0}}
    statuses, said = Pair(tmp_path, tmp_path / "run", command="grpo", **LIKED | {"data": data}).end()
    assert statuses == [2, 2], said
    sentences = ["the sandbox is gone", f"process {process} of 2: the sandbox is gone"]
    assert [errors(text) for text in said] == [[f"error: {sentences[number != process]}"] for number in range(2)]


def test_a_process_that_fails_ends_both(tmp_path):
    """Amid the steps, where the other one waits for its devices; and before them, when both report its error."""
    changes = {"data__source": "train_toys:Slow", "data__options": {"end": 8 * 20}, "checkpoint__every": 5}
    run = Pair(tmp_path, tmp_path / "run", steps=10**6, **changes)  # it ends, or is given up
    statuses, said = run.end()
    assert statuses[0] not in (0, 75) and statuses[1] == 1, said  # JAX ends the other
    assert "OSError: [Errno 5]" in said[1].splitlines()[-1]
    own = [[], ["data.source=jsonl", f"data.options.path={tmp_path / 'absent.jsonl'}"]]
    statuses, said = Pair(tmp_path, tmp_path / "other", own=own).end()
    assert statuses == [2, 2] and not (tmp_path / "other").exists(), said
    sentence = errors(said[1])[0].removeprefix("error: ")
    assert "absent.jsonl" in sentence and errors(said[0]) == [f"error: process 1 of 2: {sentence}"]


def test_processes_that_cannot_meet(tmp_path, capsys):
    toml = str(write_toml(tmp_path / "run.toml", settings(tmp_path / "out")))
    for more, sentence in (
        (["--distributed", "here:1,2,2"], "--distributed here:1,2,2: write HOST:PORT,N,I"),
        (["--coordinator", "here:1", "--processes", "2"], "belong together"),
        (["--distributed", "--process", "2"], "belong together"),
        (["--coordinator", "here:1", "--processes", "2", "--process", "2"], "--process 2 is not one of 2 processes"),
        (["--coordinator", "here", "--processes", "2", "--process", "1"], "write HOST:PORT,N,I"),
    ):
        assert main(["masked-diffusion", "--config", toml, *more]) == 2
        assert sentence in capsys.readouterr().err
    code = """from dllm_jax import DllmError
from dllm_jax.parallel import multihost
try:
    multihost.join("")
except DllmError as error:
    print(error)
multihost.join("127.0.0.1:1,2,1", wait=1)"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "error: not all processes met at 127.0.0.1:1 within 1 seconds" in done.stderr
    assert "there is no cluster here" in done.stdout


class Coordinator:
    """What threads that stand for processes meet at."""

    def __init__(self):
        self.known, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            if key in self.known:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.known[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.known, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.known[key]


@pytest.mark.parametrize(
    "asked, steps, done",
    [({1: 5}, 20_000, 0), ({0: 9, 2: 3}, 20_000, 0), ({1: 30}, 30, 0), ({}, 30, 0), ({1: 101}, 120, 100)],
)
def test_processes_agree_on_a_step(asked, steps, done, monkeypatch):
    """However far apart they are, all stop at the same step, which none has passed; or at the end, if it is late. In a
    run that goes on they are asked before anyone has ended a step."""
    coordinator, here, begun = Coordinator(), threading.local(), threading.Event()
    monkeypatch.setattr(multihost, "coordinator", lambda: coordinator)
    monkeypatch.setattr(multihost, "index", lambda: here.index)
    monkeypatch.setattr(multihost, "count", lambda: 3)
    monkeypatch.setattr(multihost_stop, "_NUMBERS", itertools.repeat(0))

    def process(index):
        here.index = index
        stop = SharedStopRequest(done)
        if done and index == 1:
            stop.ask(signal.SIGTERM)
            begun.set()
        assert not done or begun.wait(60)
        for step in range(done + 1, steps + 1):
            time.sleep(0.002 * (index + 1))
            if step == asked.get(index) and not done:
                stop.ask(signal.SIGTERM)
            if stop.after(step):
                break
        stop.close()
        return step

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(process, range(3)))
    assert len(set(ended)) == 1, ended
    assert min(asked.values(), default=steps) <= ended[0] and (ended[0] == steps) == (steps == 30)


ENDLESS = """import signal, sys, threading
import jax, jax.numpy as jnp
from train import multihost_stop
multihost_stop._OVERDUE = 0.1
def wait(x):
    print("it begins", flush=True)
    threading.Event().wait()
with multihost_stop.stop_requests(0):
    jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(wait, x, x))(jnp.zeros(3)))
"""


def test_a_step_that_does_not_end_ends_after_a_signal():
    """The main thread waits for its devices and hears nothing of it."""
    command = [sys.executable, "-c", ENDLESS]
    with subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        try:
            assert run.stdout.readline() == b"it begins\n"
            run.terminate()
            told = run.communicate(timeout=60)[1].decode()
        finally:
            run.kill()
    assert run.returncode == 75 and "the step did not end" in told


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_has_its_status(number, status, tmp_path, monkeypatch, capsys):
    toml = str(write_toml(tmp_path / "run.toml", settings(tmp_path / "run", steps=7, checkpoint__every=100)))
    monkeypatch.setattr("train_toys.Reverse.example", interrupting(Reverse.example, 8 * 4, number))
    assert main(["masked-diffusion", "--config", toml, "--no-progress"]) == status
    assert "interrupted after step" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["masked-diffusion", "--config", toml, "--no-progress"]) == 0


def test_two_processes_in_a_bucket_end_like_two_in_a_folder(bucket, tmp_path):
    changes = {"steps": 24, "optimizer__ema": 0.9, "checkpoint__every": 6, "log__every": 2}
    slow = {"data__source": "train_toys:Slow", "data__options": {"seconds": 0.05}}
    out = "gs://bucket/pair/run"
    killed = Pair(tmp_path, out, **changes, **slow)
    killed.until(lambda: bucket.files.exists(f"{out}/state/6/commit_success.txt"))
    killed.processes[1].kill()
    statuses, said = killed.end()
    assert statuses[0] not in (0, 75) and statuses[1] == -signal.SIGKILL, said
    assert not bucket.files.exists(f"{out}/model")
    statuses, said = Pair(tmp_path, out, **changes, **slow).end()
    assert statuses == [0, 0] and f"written to {out}/model" in said[0], said
    assert Pair(tmp_path, tmp_path / "whole", **changes).end()[0] == [0, 0]
    found = bucket.fetched(out, tmp_path / "found")
    assert_same(latest_state(found), latest_state(tmp_path / "whole"))
    assert losses(found) == losses(tmp_path / "whole")
    assert_same(*(dict(checkpoint.iter_params(folder / "model")) for folder in (found, tmp_path / "whole")))
    assert checkpoint.load_source(found / "model") == checkpoint.load_source(tmp_path / "whole" / "model")
