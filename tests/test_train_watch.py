"""What a run looks at while it trains: it changes nothing, is the same after a kill, and is what evaluation says."""

import dataclasses
import json
import re
import struct
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_evals_training import SETTINGS
from test_train_block import block_settings
from test_train_compression import compression_settings, write_folder
from test_train_d2f import d2f_settings
from test_train_indicator import run_settings as indicator_settings
from test_train_run import assert_same, interrupting, latest_state, lines
from test_train_uniform import FIELDS as CANVAS_FIELDS
from train_toys import LLADA, Finite, Listed, Reverse, dllm_jax_example, model_fields, run_config, settings

import dllm_jax
import evals
import train
from dllm_jax import Denoiser, DllmError, random_model
from dllm_jax.checkpoints import checkpoint
from evals.tasks import make_task
from samplers import generate
from train import evaluation
from train.__main__ import main
from train.batches import batch_of
from train.curves import join_short_lines
from train.data.heldout import choose_examples, split_heldout
from train.device_peaks import data_sheet
from train.evaluation import HeldOut
from train.losses import LEVELS
from train.objectives import OBJECTIVES
from train.run_dir import WATCH_SECONDS
from train.settings import build_settings
from train.setup import read_parts
from train.step import training_mesh
from train.trainer import placement_of

ROOT = Path(__file__).parents[1]
MASKED = OBJECTIVES["masked-diffusion"]
WATCHED = {"data__source": "train_toys:finite", "data__heldout": 0.3, "optimizer__ema": 0.9}


def looks(out):
    """The lines about looks, without times."""
    return [
        {name: x for name, x in line.items() if name != WATCH_SECONDS} for line in lines(out) if WATCH_SECONDS in line
    ]


def written(folder, prompts):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


# What is held out


def test_what_is_held_out_stays_held_out_when_the_data_grow():
    rng = np.random.default_rng(0)
    examples = [dllm_jax_example(rng.integers(0, 10, 5), rng.integers(0, 10, 5)) for _ in range(400)]
    told = lambda source: {tuple(source.example(i).prompt_ids) for i in range(len(source))}
    kept, held = split_heldout(Listed(examples[100:] + examples[100:110]), 0.2)
    assert 40 < len(held) < 85 and len(kept) + len(held) == 310 and not told(kept) & told(held)
    more, more_held = split_heldout(Listed(examples), 0.2)
    assert told(kept) < told(more) and told(held) < told(more_held)
    assert told(split_heldout(Listed(examples), 0.1)[1]) < told(more_held)  # a larger share holds out those, and others
    few = [choose_examples(more_held, 10).example(i) for i in range(10)]
    assert len({tuple(one.prompt_ids) for one in few}) == 10 and len(choose_examples(Reverse(), 10)) == 10
    with pytest.raises(DllmError, match="holds out all examples of 1; choose another share"):
        split_heldout(Listed([examples[0]]), 1.0)
    with pytest.raises(DllmError, match="is for data with an end"):
        split_heldout(Reverse(), 0.5)


def test_a_run_never_sees_what_is_held_out(tmp_path):
    config = run_config(tmp_path, watch__every=1, **WATCHED)
    parts, _ = read_parts(config).check_examples(config, progress=False)
    told = lambda rows, count: {tuple(rows(i).tokens) for i in range(count)}
    kept, held = len(parts.rows.source), len(parts.heldout.source)
    assert kept + held == len(Finite()) and kept and held
    assert not told(parts.rows, 5 * kept) & told(parts.heldout, held)


def heldout_of(config):
    """The loss of held-out rows and the arrays of a model for it, and its rows."""
    parts, _ = read_parts(config).check_examples(config, progress=False)
    placement = placement_of(config, parts.model, training_mesh(config))
    weights = random_model(parts.model, key=5, mesh=placement.mesh).params
    return HeldOut(config, parts.heldout, parts.model, placement), weights, parts.heldout


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2}])
def test_the_last_batch_counts_as_many_rows_as_it_has(tmp_path, mesh):
    """The loss of a causal model, in which nothing is drawn, against rows one by one."""
    from train_toys import SPECIAL

    causal = dllm_jax.published_config("qwen2.5-0.5b")
    fields = {name: value for name, value in model_fields().items() if name in (*SPECIAL, "vocab_size", "max_length")}
    sizes = {"embed_dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 16}
    values = settings(tmp_path, watch={"every": 1, "rows": 13}, compute__mesh=mesh, data__pad=False)
    values["model"] = {"published": "qwen2.5-0.5b", "config": fields | sizes | {"dtype": "float32"}}
    measure, weights, rows = heldout_of(build_settings(OBJECTIVES["autoregressive"].config, values | validation()))
    found = measure(weights, {})
    denoiser, losses = Denoiser(rows.config, {name: jax.device_get(x) for name, x in weights.items()}), []
    assert causal.attention == "causal" and len(rows.source) == 13
    for number in range(13):
        row = rows(number)
        log = jax.nn.log_softmax(denoiser(jnp.asarray(row.tokens)[None], jnp.asarray([row.length])))[0]
        at = np.flatnonzero(row.targets)
        losses.append(-np.mean([log[i, row.tokens[i]] for i in at]))
    np.testing.assert_allclose(found["loss"], np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(found["cross_entropy"], np.mean(losses), rtol=1e-5)  # all answers are of one length


@pytest.mark.parametrize("changes", [{}, {"objective__chunk": 5, "compute__mesh": {"data": 2}}])
def test_cross_entropy_by_noise_level(changes, tmp_path):
    """Against every masked position by itself, with the t that its weight tells."""
    config = build_settings(MASKED.config, settings(tmp_path, **changes) | validation())
    measure, weights, rows = heldout_of(config)
    found, objective = measure(weights, {}), MASKED.of(config)
    objective = dataclasses.replace(objective, settings=objective.evaluation_settings())
    denoiser = Denoiser(rows.config, {name: jax.device_get(x) for name, x in weights.items()})
    entropies = {name: [] for name in LEVELS}
    for first in (0, 8):
        batch = batch_of(rows, first, (1, 8), jax.sharding.SingleDeviceSharding(jax.devices()[0]), end=13)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), evaluation._NOISE), first)
        noised = jax.tree.map(lambda x: x[0], objective.corrupt(key, batch, denoiser))
        assert noised.level is None
        log = jax.nn.log_softmax(denoiser(noised.inputs, noised.lengths))
        count = batch.targets[0].sum(axis=1)
        for row, position in np.argwhere(noised.weights > 0):
            quarter = int(4 / (noised.weights[row, position] * count[row]))
            entropies[LEVELS[quarter]].append(-log[row, position, noised.tokens[row, position]])
    assert all(entropies.values())
    for name, values in entropies.items():
        np.testing.assert_allclose(found[name], np.mean(values), rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(found["cross_entropy"], np.mean(sum(entropies.values(), [])), rtol=1e-5)


def test_few_rows_have_few_noise_levels_and_steps_report_none(tmp_path):
    train.train(run_config(tmp_path, steps=2, watch={"every": 2, "source": "train_toys:finite", "rows": 1}))
    found = [sum(name.removeprefix("heldout_") in LEVELS for name in line) for line in lines(tmp_path)]
    assert found == [1, 1, 0]


def validation():
    """Held-out rows from a source of their own."""
    return {"watch": {"every": 1, "rows": 13, "source": "train_toys:Reverse", "options": {"seed": 7}}}


def test_meshes_and_accumulation_measure_the_same(tmp_path):
    """Noise is drawn by a row's number in its batch, so batches of one size have the same."""
    found = []
    for changes in ({"optimizer__batch": 8}, {"compute__mesh": {"data": 2, "tensor": 2}}, {"optimizer__batch": 16}):
        parts = {"optimizer__accumulate": 2} if changes.get("optimizer__batch") == 16 else {}
        measure, weights, _ = heldout_of(
            build_settings(OBJECTIVES["masked-diffusion"].config, settings(tmp_path, **changes, **parts) | validation())
        )
        found.append(measure(weights, {})["loss"])
    np.testing.assert_allclose(found, found[0], rtol=1e-5)


# Runs


def test_looks_change_nothing_and_are_the_same_after_a_kill(tmp_path, monkeypatch):
    changes = WATCHED | {"checkpoint__every": 3, "steps": 9}
    watch = {"every": 2, "file": written(tmp_path, [[1, 2, 3], [4, 5]]), "sampler": "topk:gen_length=4,block_length=4"}
    train.train(run_config(tmp_path / "blind", **changes))
    train.train(run_config(tmp_path / "whole", **changes, watch=watch))
    assert_same(latest_state(tmp_path / "whole"), latest_state(tmp_path / "blind"))
    wanted = looks(tmp_path / "whole")
    assert [line["step"] for line in wanted] == [0, 2, 4, 6, 8, 9]
    assert wanted[0]["heldout_loss"] == wanted[0]["heldout_ema_loss"] != wanted[-1]["heldout_ema_loss"]
    assert not looks(tmp_path / "blind")

    out = tmp_path / "killed"
    # Examples are asked for 41 times in the checks and 40 times ahead of the first step, 16 times by the first look.
    monkeypatch.setattr("train_toys.Reverse.example", stopping_after(Reverse.example, 112))
    with pytest.raises(train.Interrupted):
        train.train(run_config(out, **changes, watch=watch))
    monkeypatch.undo()
    with (out / "metrics.jsonl").open("a") as file:  # of a process that was killed later
        file.write(json.dumps({"step": 8, "heldout_loss": 0.0, WATCH_SECONDS: 1.0}) + "\n")
    with (out / "generations.jsonl").open("a") as file:
        file.write(json.dumps({"step": 8, "prompt": "?"}) + '\n{"step": 8, "pro')
    assert train.train(run_config(out, **changes, watch=watch)).started > 0
    assert looks(out) == wanted
    assert (out / "generations.jsonl").read_text() == (tmp_path / "whole" / "generations.jsonl").read_text()


def stopping_after(example, calls):
    """A signal at the so many-th call."""
    count = iter(range(10**9))
    return lambda self, number: interrupting(example, number if next(count) == calls else -1)(self, number)


def objective_settings(name, out, base, folder):
    if name == "d2f":
        return d2f_settings(out, base), "d2f:block_length=3,gen_length=6"
    if name == "block-diffusion":
        return block_settings(out, data__length=16), "threshold:gen_length=8"
    if name == "compression":
        values = compression_settings(out, base, folder)
        values["lora"] = {"rank": 2, "dropout": 0.5}
        values["data"]["options"]["correct"] = False
        return values, "threshold:gen_length=4,block_length=4"
    if name == "indicator":
        values = indicator_settings(out, base, folder, objective={"dropout": 0.5})
        return values, "ni:gen_length=4"
    if name == "joint":
        model = {"init": str(base), "adapt": "nemotron-diffusion-3b"}
        values = settings(out, model=model, data__length=16, objective={"block_length": 4})
        return values, "self-speculation:gen_length=4,block_length=4"
    if name == "dpo":
        changes = {"lora": {"rank": 2}, "model": {"init": str(base)}, "data__source": "train_toys:pairs"}
        return settings(out, **changes), "topk:gen_length=4"
    if name == "uniform-diffusion":
        return settings(out, model=CANVAS_FIELDS, data__length=16), "renoise:gen_length=6,steps=3"
    if name == "autoregressive":
        values = settings(out, data__answer_length=6)  # which is how long its answers are
        values["model"]["published"] = "qwen2.5-0.5b"
        return values, ""
    return settings(out, lora={"rank": 2, "dropout": 0.5}, model={"init": str(base)}), "topk:gen_length=4"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model, out = random_model(LLADA.replace(num_layers=1), key=3), tmp_path_factory.mktemp("models") / "base"
    checkpoint.save(out, model.config, model.params.items())
    return out


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "grpo"])  # which learns from its own answers
def test_every_objective_is_watched_under_the_same_noise(name, tmp_path, base):
    """With a learning rate of 0 every look sees the same weights, so it must say the same: no dropout, no new noise."""
    values, sampler = objective_settings(name, tmp_path / "run", base, write_folder(tmp_path / "trajectories"))
    values |= {"steps": 2, "watch": {"every": 1, "file": written(tmp_path, [[1, 2, 3]]), "sampler": sampler}}
    values["optimizer"] |= {"lr": 0.0, "warmup": 0, "batch": 4}
    if name in ("compression", "indicator"):
        values["data"]["heldout"] = 0.4
    else:
        values["watch"] |= {"source": "train_toys:pairs" if name == "dpo" else "train_toys:finite", "rows": 6}
    train.train(build_settings(OBJECTIVES[name].config, values))
    first, *others = looks(tmp_path / "run")
    assert len(others) == 2 and np.isfinite(first["heldout_loss"]) and first["heldout_loss"] > 0
    assert all({**line, "step": 0} == first for line in others)
    answers = [json.loads(line) for line in (tmp_path / "run" / "generations.jsonl").read_text().splitlines()]
    assert len(answers) == 3 and all(answer["nfe"] > 0 for answer in answers)


def test_accuracy_is_what_evals_run_says_of_the_trained_model(tmp_path):
    table = SETTINGS.replace("batch = 2", "batch = 4\nlr = 3e-2").replace("steps = 2", "steps = 3")
    watch = (
        '[watch]\nevery = 3\nrows = 6\ntask = "word-problems:difficulty=easy"\nn = 6\nprompts = ["Q: Tom has 2 books."]'
    )
    (tmp_path / "run.toml").write_text(f'out = "{tmp_path / "run"}"\n{table}{watch}\n')
    config, compiled = train.read_config(tmp_path / "run.toml"), count_compiled()
    outcome = train.train(config)
    assert sorted(compiled) == [
        "jit(measure)",
        "jit(run_steps)",
        "jit(run_steps)",
    ]  # of rows, prompts and problems, once each
    model = dllm_jax.load(outcome.folder)
    report = evals.run(model, config.watch.task, "threshold", n=6, batch_size=32, split="validation", seed=config.seed)
    first, last = looks(tmp_path / "run")
    assert (first["step"], last["step"]) == (0, 3) and "heldout_loss" in last
    for name in ("accuracy", "accuracy_stderr"):
        np.testing.assert_allclose(last[name], getattr(report, name), rtol=1e-5)
    np.testing.assert_allclose(last["nfe"], report.nfe, rtol=1e-5)
    answers = [json.loads(line) for line in (tmp_path / "run" / "generations.jsonl").read_text().splitlines()]
    told, *problems = [answer for answer in answers if answer["step"] == 3]
    assert told["text"] == generate(model, "Q: Tom has 2 books.").text
    assert [answer["text"] for answer in problems] == [row.text for row in report.rows[:4]]
    task = make_task(config.watch.task)
    assert problems[1]["prompt"] == task.question(task.example("validation", 1))


def count_compiled():
    """The names of programs of looks, from now on, as they are compiled."""
    found = []

    def heard(event, duration, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration" and fun_name in ("jit(run_steps)", "jit(measure)"):
            found.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    return found


# Mistakes

PROBLEMS = {"source": "evals.tasks:make_task", "options": {"task": "word-problems"}}
BEST = {
    "checkpoint__best": 1,
    "checkpoint__metric": "heldout_loss",
    "watch__every": 3,
    "watch__source": "train_toys:finite",
}
MISTAKES = {
    "nothing to see": ({"watch__every": 2}, "watch.every"),
    "endless": ({"watch__every": 2, "data__heldout": 0.1}, "data.heldout"),
    "two": ({"watch__every": 2, "data__heldout": 0.1, "watch__source": "jsonl"}, "data.heldout and watch.source"),
    "no such source": ({"watch__every": 2, "watch__source": "nothing:there"}, "nothing:there"),
    "no path": ({"watch__every": 2, "watch__source": "jsonl"}, "watch.options.path"),
    "no tokenizer": ({"watch__every": 2, "watch__prompts": ["x"]}, "tokenizer"),
    "sampler": ({"watch__every": 2, "watch__file": "FILE", "watch__sampler": "topkk"}, "topkk"),
    "task": ({"watch__every": 2, "watch__task": "word-problem"}, "'word-problem'"),
    "other tokens": ({"watch__every": 2, "watch__task": "sudoku"}, "watch.task"),
    "scorer": ({"watch__every": 2, "watch__task": "maze", "watch__scorer": "evals"}, "watch.scorer"),
    "rows": ({"watch__rows": 0}, "watch.rows"),
    "writer": ({"log__to": ["tensorbord"]}, "'tensorbord'"),
    "kept never": ({"checkpoint__keep_every": 4}, "checkpoint.keep_every 4 is no multiple of checkpoint.every 3"),
    "best by nothing": ({"checkpoint__best": 1}, "set checkpoint.metric"),
    "metric of none": ({"checkpoint__metric": "heldout_loss"}, "checkpoint.best is 0"),
    "best unseen": ({"checkpoint__best": 1, "checkpoint__metric": "heldout_loss"}, "watch.every is 0"),
    "best between": (BEST | {"checkpoint__every": 4, "watch__every": 6}, "a multiple of watch.every 6"),
    "best of no number": (BEST | {"checkpoint__metric": "heldout_los"}, "there are heldout_cross_entropy, "),
    "best without average": (BEST | {"checkpoint__metric": "heldout_ema_loss"}, "'heldout_ema_loss' is no number"),
}


def test_a_run_that_never_looks_may_say_at_what(tmp_path):
    changes = {"watch__every": 0, "watch__prompts": ["x"], "watch__source": "jsonl", "watch__task": "word-problems"}
    train.train(run_config(tmp_path / "run", steps=2, **changes))
    assert not (tmp_path / "run" / "generations.jsonl").exists()


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_one_sentence_before_anything_is_written(name, tmp_path):
    changes, offending = MISTAKES[name]
    changes = {key: written(tmp_path, [[1]]) if x == "FILE" else x for key, x in changes.items()}
    with pytest.raises(DllmError, match=offending) as error:
        train.train(run_config(tmp_path / "run", **changes))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_an_objective_without_a_loss_of_rows_has_none_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr("train.objectives.masked_diffusion.MaskedDiffusion.evaluation_settings", lambda self: None)
    for changes in (
        {"data__source": "train_toys:finite", "data__heldout": 0.3},
        {"watch__source": "train_toys:finite"},
    ):
        with pytest.raises(DllmError, match="masked-diffusion"):
            train.train(run_config(tmp_path / "run", watch__every=1, **changes))
    with pytest.raises(DllmError, match="watch.every is set"):
        train.train(run_config(tmp_path / "run", watch__every=1))


def test_bad_held_out_examples_are_found_before_the_first_step(tmp_path):
    watch = {"every": 2, "source": "jsonl", "options": {"path": str(tmp_path / "other.jsonl")}}
    entries = [{"prompt": [1], "answer": [2] * length} for length in (3, 20, 4)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    data = {"source": "train_toys:finite", "length": 12, "cache": str(tmp_path / "cache")}
    config = lambda **more: run_config(tmp_path / "run", steps=2, watch=watch, data=data | more)
    with pytest.raises(DllmError, match="other.jsonl line 2 has 21 tokens and data.length is 12"):
        train.train(config())
    assert not (tmp_path / "run").exists()
    with pytest.warns(UserWarning, match="1 of 3 examples are bad"):
        train.train(config(on_bad="drop"))
    assert "line 2" in (tmp_path / "run" / "dropped.txt").read_text() and len(looks(tmp_path / "run")) == 2


# Writers


class Recorder:
    """A writer's library that keeps what it is told."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *arguments, **options: self.told.append((name, arguments, options)) or self


def test_writers_get_what_the_log_gets_and_go_on(tmp_path, monkeypatch):
    board, weights = Recorder(), Recorder()
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    monkeypatch.setitem(sys.modules, "wandb", weights)
    changes = WATCHED | {"log__to": ["tensorboard", "wandb"], "watch__every": 4, "log__mfu": True}
    changes |= {"watch__file": written(tmp_path, [[1, 2]]), "watch__sampler": "topk:gen_length=4"}
    out = tmp_path / "run"
    train.train(run_config(out, steps=4, **changes))
    train.train(run_config(out, steps=6, **changes))
    opened = [options for name, _, options in board.told if name == "SummaryWriter"]
    assert opened == [{"logdir": str(out / "tensorboard"), "purge_step": step} for step in (1, 5)]
    scalars = [arguments for name, arguments, _ in board.told if name == "add_scalar"]
    for line in lines(out):
        kind = "watch" if WATCH_SECONDS in line else "train"
        for name, value in line.items():
            if name not in ("step", "mfu_of", WATCH_SECONDS, "changed"):
                told = [x for tag, x, step in scalars if (tag, step) == (f"{kind}/{name}", line["step"])]
                np.testing.assert_allclose(told, value, rtol=1e-5)
                assert told
    assert any(name == "add_text" and "[1, 2]" in arguments[1] for name, arguments, _ in board.told)
    started = [options for name, _, options in weights.told if name == "init"]
    assert len(started) == 2 and started[0]["id"] == started[1]["id"] and started[0]["resume"] == "allow"
    logged = [arguments[0] for name, arguments, _ in weights.told if name == "log"]
    assert [one["train/lr"] for one in logged if one["step"] == 6 and "train/lr" in one]
    assert [name for name, *_ in weights.told].count("finish") == 2 and len(
        [x for x in logged if "watch/generations" in x]
    ) == 4
    assert all("measured" in line["mfu_of"] for line in lines(out) if "mfu" in line)


def test_a_writer_that_is_not_installed_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DllmError, match='log.to "wandb" needs the package wandb; install it: pip install "dllm_jax'):
        train.train(run_config(tmp_path / "run", log__to=["wandb"]))
    assert not (tmp_path / "run").exists()


def test_a_writer_that_cannot_begin_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: 1 / 0))
    with pytest.raises(DllmError, match="no run could be begun .*; log in by wandb login, or set WANDB_MODE=offline"):
        train.train(run_config(tmp_path / "run", log__to=["wandb"]))


def test_event_files_are_read_back(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    out = tmp_path / "run"
    train.train(run_config(out, steps=4, log__to=["tensorboard"], watch__every=2, **WATCHED))
    found = {}
    for path in (out / "tensorboard").iterdir():
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            data = data[16 + size :]
    for line in lines(out):
        name = "watch/heldout_loss" if WATCH_SECONDS in line else "train/loss"
        np.testing.assert_allclose(found[name, line["step"]], line[name.split("/")[1]], rtol=1e-5)


# Curves and utilisation


def test_curves_are_drawn_of_several_runs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        told = [{"step": i, "loss": 3.0 - i / 10, "lr": 0.1} for i in range(1, 4)]
        told += [
            {"step": i, "heldout_loss": 3.1, "accuracy": 0.5, "accuracy_stderr": 0.1, WATCH_SECONDS: 1} for i in (0, 3)
        ]
        told += [{"step": 2, "changed": {"optimizer.lr": [0.1, 0.2]}}]
        text = "".join(json.dumps(line) + "\n" for line in told)
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"step": 4, "lo')
    runs = ["--run", str(tmp_path / "one"), "--run", str(tmp_path / "two")]
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert main(["plot", *runs, "--out", str(tmp_path / f"curves.{suffix}")]) == 0
        assert (tmp_path / f"curves.{suffix}").read_bytes().startswith(start)
        assert f"loss, lr, accuracy of {tmp_path / 'one'}, {tmp_path / 'two'}" in capsys.readouterr().out
    assert main(["plot", *runs, "--out", str(tmp_path / "c.svg"), "--metric", "heldout_loss"]) == 0
    drawn = (tmp_path / "c.svg").read_text()
    assert "heldout_loss" in drawn and "<!-- two -->" in drawn and str(tmp_path) not in drawn
    for arguments, sentence in (
        ([*runs, "--out", str(tmp_path / "c.gif")], "is no png, svg or pdf file"),
        ([*runs, "--out", str(tmp_path / "c.svg"), "--metric", "los"], "'los'; there are accuracy,"),
        (["--run", str(tmp_path), "--out", "c.svg"], "is no training run"),
    ):
        assert main(["plot", *arguments]) == 2
        assert sentence in capsys.readouterr().err


def test_a_step_alone_is_no_point_of_a_curve():
    """What an interruption cuts in two is one line again, with the mean of all its steps."""
    tell = lambda step, steps, loss, **more: {"step": step, "loss": loss, "steps": steps, "lr": 0.1, **more}
    log = [tell(10, 10, 3.0), tell(20, 10, 2.0), tell(21, 1, 9.0, note="x"), tell(30, 9, 2.0), tell(33, 3, 1.0)]
    looks = [{"step": 20, "heldout_loss": 2.5, WATCH_SECONDS: 1}]
    found = join_short_lines([*log[:2], *looks, *log[2:]])
    assert [line["step"] for line in found] == [10, 20, 20, 30, 33]
    assert found[3]["loss"] == pytest.approx(2.7) and found[3]["steps"] == 10 and found[4]["loss"] == 1.0
    assert join_short_lines([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
    ]  # of runs that did not count


def test_utilisation_is_of_the_data_sheet_where_there_is_one(tmp_path, monkeypatch):
    assert data_sheet("NVIDIA H100 80GB HBM3", "bfloat16") == 989.5e12
    assert data_sheet("NVIDIA A100-SXM4-80GB", "float32") == data_sheet("NVIDIA A100 80GB PCIe", "float32") == 156e12
    assert data_sheet("TPU v5 lite", "bfloat16") == 197e12
    assert (
        data_sheet("Tesla T4", "bfloat16")
        is data_sheet("cpu", "float32")
        is data_sheet("NVIDIA A1000", "float32")
        is None
    )
    monkeypatch.setattr("train.logs.data_sheet", lambda kind, dtype: 1e12)
    monkeypatch.setattr("train.logs.matmul_rate", lambda *_: pytest.fail("measured"))
    train.train(config := run_config(tmp_path / "run", steps=2, log__mfu=True, compute__mesh={"data": 2}))
    (line,) = lines(tmp_path / "run")
    flops = 2 * train.logs.step_flops(config, read_parts(config).model, 12)
    np.testing.assert_allclose(line["mfu"], flops / line["seconds"] / 2e12, rtol=1e-4)
    assert re.fullmatch(r"2 TFLOP/s of 2 x \S+, float32, data sheet", line["mfu_of"])
