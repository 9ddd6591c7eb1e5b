"""Whole runs of tiny models: learning, continuing after kills, shardings, adapters, command line."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_toys import LLADA, Reverse, model_fields, run_config, settings, write_toml

import convert
import dllm_jax
import train
from benchmarks import hlo
from dllm_jax import Denoiser, DllmError
from dllm_jax.config import Experts
from dllm_jax.parallel.sharding import param_shardings
from dllm_jax.params.low_rank import LowRankKernel
from dllm_jax.params.products import product
from dllm_jax.params.specs import init_params
from samplers import generate
from train.__main__ import main
from train.batches import device_batch
from train.config import CheckpointPart, LoraPart
from train.data import Rows
from train.lora import adapter_shapes, attach_adapters
from train.optimizer import decay_mask, learning_rate, make_optimizer, update_average
from train.run_dir import RunFolder
from train.setup import read_parts
from train.states import States, flat_leaves
from train.step import Placement, Stepper, training_mesh

ROOT = Path(__file__).parents[1]
MOE = LLADA.replace(family="llada-moe", qk_norm=True, experts=Experts(num_experts=4, per_token=2, dim=8))
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


def lines(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def latest_state(out):
    """Every leaf of the latest state by name, on the host."""
    from orbax.checkpoint import v1 as ocp

    with States(Path(out) / "state", CheckpointPart(), clean=False) as states:
        step = states.latest
    path = Path(out) / "state" / str(step)
    like = {name: np.empty(x.shape, x.dtype) for name, x in ocp.metadata(path).metadata.items()}
    return {name: np.asarray(x) for name, x in ocp.load(path, like).items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def one_step(config, steps=1):
    """State and metrics after some steps, without a folder."""
    parts, mesh = read_parts(config), training_mesh(config)
    placement = Placement(mesh, param_shardings(parts.model, mesh))
    stepper = Stepper(config, parts.model, placement)
    state = stepper.start(init_params(parts.model, jax.random.key(0), dtype="float32", shardings=placement.trained))
    program, metrics = stepper.jit_step(state), []
    for step in range(steps):
        batch = device_batch(parts.rows, step * config.optimizer.batch, config, placement.batch)
        state, metric = program(state, {}, batch, jax.random.key(0))
        metrics.append(metric)
    return state, jax.device_get(metrics)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return one_step(run_config(tmp_path_factory.mktemp("plain") / "out"), steps=2)


def assert_close(found, wanted, tolerance=2e-4):
    np.testing.assert_allclose(found[1][1]["loss"], wanted[1][1]["loss"], rtol=1e-4)
    np.testing.assert_allclose(found[1][1]["grad_norm"], wanted[1][1]["grad_norm"], rtol=1e-3)
    for name, x in wanted[0].trained.items():
        np.testing.assert_allclose(found[0].trained[name], x, atol=tolerance, err_msg=name)


def test_accumulation_is_one_large_batch(plain, tmp_path):
    assert_close(one_step(run_config(tmp_path, optimizer__accumulate=4), steps=2), plain)


@pytest.mark.parametrize(("chunk", "scan"), [(0, "on"), (16, "auto")])
def test_a_mesh_changes_nothing(plain, chunk, scan, tmp_path):
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    config = run_config(tmp_path, compute__mesh=mesh, objective__chunk=chunk, compute__scan=scan)
    found = one_step(config, steps=2)
    assert_close(found, plain)
    kernel = found[0].trained["layers.0.attn.q_proj.kernel"]
    assert len({str(shard.index) for shard in kernel.addressable_shards}) == 4  # fsdp x tensor
    moments = [x for name, x in flat_leaves(found[0].optimizer).items() if name.endswith("layers.0.attn.q_proj.kernel")]
    assert len(moments) == 2 and all(x.sharding == kernel.sharding for x in moments)


def test_the_vocabulary_head_crosses_the_wire_once(tmp_path):
    """However many chunks there are: in the compiled step no loop sends anything near the head's size."""
    model = LLADA.replace(vocab_size=3000, num_layers=1)
    axes = {"data": 2, "fsdp": 2, "tensor": 2}
    changes = {"model__config": model_fields(model), "compute__mesh": axes, "objective__chunk": 8}
    config = run_config(tmp_path, **changes)
    parts, mesh = read_parts(config), training_mesh(config)
    placement = Placement(mesh, param_shardings(parts.model, mesh))
    stepper = Stepper(config, parts.model, placement)
    state = stepper.abstract_state(jax.eval_shape(lambda: init_params(parts.model, jax.random.key(0), dtype="float32")))
    batch = device_batch(parts.rows, 0, config, placement.batch)
    text = stepper.jit_step(state).lower(state, {}, batch, jax.random.key(0)).compile().as_text()
    root = hlo.loops(hlo.read(text), lambda own, at: "loop")
    head = model.embed_dim * model.vocab_size * 4 / axes["tensor"]
    sent = [(depth, sum(total for _, total in loop.collectives.values())) for depth, loop in root.walk()]
    assert len(sent) > 1 and max(total for depth, total in sent if depth) < head / 10
    assert sum(total for _, total in sent) < 8 * head


@pytest.mark.parametrize("model", [LLADA, MOE], ids=["dense", "experts"])
def test_the_collectives_of_a_step_are_in_no_conditional(model, tmp_path):
    """XLA's CPU backend runs conditionals in any order, in each process another: their collectives would not meet."""
    config = run_config(tmp_path, compute__mesh={"fsdp": 2}, model__config=model_fields(model))
    parts, mesh = read_parts(config), training_mesh(config)
    stepper = Stepper(config, parts.model, Placement(mesh, param_shardings(parts.model, mesh)))
    state = stepper.abstract_state(jax.eval_shape(lambda: init_params(parts.model, jax.random.key(0), dtype="float32")))
    batch = device_batch(parts.rows, 0, config, stepper.placement.batch)
    text = stepper.jit_step(state).lower(state, {}, batch, jax.random.key(0)).compile().as_text()
    computations = dict(re.findall(r"^(?:ENTRY )?%([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    sends = lambda body: re.search(r" (all-|reduce-scatter|collective-)[a-z-]+\(", body) is not None
    assert any(map(sends, computations.values()))
    branches = re.findall(r" conditional\(.*?, (?:branch_computations|true_computation)=(.*?), metadata", text)
    for name in re.findall(r"%([\w.-]+)", " ".join(branches)):
        assert not sends(computations.get(name, "")), name


def test_bfloat16_keeps_float32_masters_and_a_float32_average(plain, tmp_path):
    state, metrics = one_step(run_config(tmp_path, compute__dtype="bfloat16", optimizer__ema=0.9), steps=2)
    assert {x.dtype.name for x in state.trained.values()} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves((state.optimizer, state.average))} <= {"float32", "int32"}
    np.testing.assert_allclose(metrics[1]["loss"], plain[1][1]["loss"], rtol=0.03)
    assert metrics[1]["loss"] != plain[1][1]["loss"]
    kernel = np.asarray(state.trained["lm_head.kernel"])
    assert np.any(kernel != kernel.astype(jnp.bfloat16).astype(np.float32))


def test_average_schedule_and_decay_mask():
    average, params = {"w": jnp.array([1.0])}, {"w": jnp.array([2.0])}
    for step, decay in ((0, 0.1), (2, 0.25), (10_000, 0.9)):  # min(0.9, (1 + step) / (10 + step))
        found = update_average(average, params, jnp.int32(step), 0.9)["w"]
        np.testing.assert_allclose(found, decay * 1.0 + (1 - decay) * 2.0, rtol=1e-6)
    part = run_config("x", optimizer__lr=1.0, optimizer__warmup=4, optimizer__final_ratio=0.1).optimizer
    rate = learning_rate(part, 20)
    np.testing.assert_allclose([rate(0), rate(2), rate(4), rate(12), rate(20)], [0, 0.5, 1, 0.55, 0.1], atol=1e-6)
    params = {"a.kernel": jnp.ones((2, 2)), "a.bias": jnp.ones(2), "norm.scale": jnp.ones(2)}
    assert decay_mask(params) == {"a.kernel": True, "a.bias": False, "norm.scale": False}
    part = dataclasses.replace(part, lr=0.1, warmup=0, weight_decay=0.5)
    optimizer = make_optimizer(part, 20)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose([x.mean() for x in updates.values()], [0.0, -0.05, 0.0], atol=1e-7)
    gradient = {name: jnp.full_like(x, 100.0) for name, x in params.items()}
    clip = optax.clip_by_global_norm(1.0)
    assert abs(float(optax.tree.norm(clip.update(gradient, clip.init(params))[0])) - 1.0) < 1e-5


def test_muon_orthogonalises_the_layers_matrices_and_leaves_the_rest_to_adamw():
    key = jax.random.key(0)
    shapes = {"embed.embedding": (6, 8), "layers.0.w.kernel": (8, 8), "layers.0.mlp.w_out": (3, 8, 8), "a.scale": (8,)}
    gradient = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    part = run_config("x", optimizer__lr=1.0, optimizer__warmup=0, optimizer__clip=0.0).optimizer
    told = {}
    for name in ("muon", "adamw"):
        optimizer = make_optimizer(dataclasses.replace(part, name=name), 20)
        told[name], _ = optimizer.update(gradient, optimizer.init(params), params)
    for name in ("layers.0.w.kernel", "layers.0.mlp.w_out"):  # experts: one matrix after another
        update = told["muon"][name].reshape(-1, 8, 8)
        values = np.linalg.svd(update, compute_uv=False) / (0.2 * np.sqrt(8))  # an update's root mean square is 0.2
        assert values.shape[0] in (1, 3) and values.min() > 0.5 and values.max() < 1.4
        assert np.linalg.cond(gradient[name].reshape(-1, 8, 8)).max() > 10
    for name in ("embed.embedding", "a.scale"):  # the first step of Adam is the gradient's sign
        np.testing.assert_allclose(np.abs(told["adamw"][name]), 1.0, rtol=1e-3)
        assert np.array_equal(np.sign(told["muon"][name]), np.sign(told["adamw"][name]))


def test_muon_on_a_mesh_is_muon(tmp_path):
    states = [
        one_step(run_config(tmp_path, optimizer__name="muon", compute__mesh=mesh), steps=2)
        for mesh in ({}, {"data": 2, "fsdp": 2, "tensor": 2})
    ]
    (alone, _), (split, metrics) = states
    np.testing.assert_allclose(metrics[1]["loss"], states[0][1][1]["loss"], rtol=1e-5)
    for name, value in alone.trained.items():
        np.testing.assert_allclose(split.trained[name], value, rtol=2e-4, atol=2e-6, err_msg=name)
    kernel = split.trained["layers.0.mlp.up_proj.kernel"]
    moments = [x for x in jax.tree.leaves(split.optimizer) if x.shape == kernel.shape]
    assert moments and all(x.sharding == kernel.sharding for x in moments)


def test_learns_a_toy_task_and_the_result_samples_and_exports(tmp_path):
    out = tmp_path / "run"
    config = run_config(
        out,
        steps=800,
        model__config=model_fields(LLADA.replace(embed_dim=32, head_dim=16, mlp_dim=64)),
        data__options={"digits": 3},
        data__length=8,
        optimizer__batch=32,
        optimizer__ema=0.9,
        checkpoint__weights="ema",
        checkpoint__every=800,
        log__every=200,
        log__mfu=True,
    )
    outcome = train.train(config)
    told = lines(out)
    assert [line["step"] for line in told] == [200, 400, 600, 800]
    assert told[0]["loss"] > told[-1]["loss"] and told[-1]["loss"] < 0.35
    assert told[-1]["tokens_per_second"] > 0 and 0 < told[-1]["mfu"]
    model = dllm_jax.load(outcome.folder)
    assert model.config.dtype == "float32"
    prompts = [Reverse(3).example(10_000 + i).prompt_ids.tolist() for i in range(200)]
    answers = generate(model, prompts, rule="topk", cache="none", gen_length=5, block_length=5, batch_size=64)
    right = [answer.tokens[:3] == prompt[::-1] for prompt, answer in zip(prompts, answers, strict=True)]
    assert sum(right) >= 100  # of 200, where guesses have none; 147 on one machine, with other instructions others
    convert.export(outcome.folder, tmp_path / "hub", progress=False)
    assert (tmp_path / "hub" / "config.json").is_file()
    again = train.train(config)
    assert (again.started, again.metrics) == (800, {})


def command(tmp_path, out, **changes):
    toml = write_toml(tmp_path / f"{Path(out).name}.toml", settings(out, **changes))
    return [sys.executable, "-m", "train", "masked-diffusion", "--config", str(toml), "--no-progress"]


def test_killed_runs_continue_bit_exactly(tmp_path):
    """SIGKILL at random moments, saves among them: the final state is that of a run that was left alone."""
    changes = {"steps": 24, "optimizer__ema": 0.9, "checkpoint__every": 2, "data__source": "train_toys:finite"}
    train.train(run_config(tmp_path / "whole", **changes))
    out, rng = tmp_path / "killed", np.random.default_rng(0)
    run = command(tmp_path, out, **changes)
    for _ in range(2):
        seen = len(lines(out)) if (out / "metrics.jsonl").is_file() else 0
        process = subprocess.Popen(run, env=os.environ | ENVIRONMENT, stderr=subprocess.DEVNULL)
        while process.poll() is None and (not (out / "metrics.jsonl").is_file() or len(safe_lines(out)) <= seen):
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.3))
        assert process.poll() is None, "the run ended before it was killed; give it more steps"
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(run, env=os.environ | ENVIRONMENT, check=True, capture_output=True)
    assert_same(latest_state(out), latest_state(tmp_path / "whole"))
    one, two = dllm_jax.load(out / "model").params, dllm_jax.load(tmp_path / "whole" / "model").params
    assert_same(*({name: np.asarray(x) for name, x in params.items()} for params in (one, two)))
    same = lambda told: [{name: line[name] for name in ("step", "loss", "lr")} for line in told]
    assert same(lines(out)) == same(lines(tmp_path / "whole"))


def safe_lines(out):
    return (out / "metrics.jsonl").read_text().splitlines()


def seen_rows(monkeypatch):
    """The positions of the rows that are made, in order; what is made ahead of the end among them."""
    seen, row = [], Rows.__call__
    monkeypatch.setattr(Rows, "__call__", lambda self, position: seen.append(position) or row(self, position))
    return seen


def of_digits(path, count):
    entries = ({"prompt": [i % 10], "answer": [i // 10, i % 10]} for i in range(count))
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return {"source": "jsonl", "options": {"path": str(path)}, "cache": str(path.parent / "cache"), "length": 12}


def test_a_run_knows_its_data(tmp_path, monkeypatch):
    """Lines that are appended or edited give another order, and are refused, or continued with at the position."""
    out, path = tmp_path / "out", tmp_path / "lines.jsonl"
    config = lambda count, steps: run_config(out, steps=steps, log__every=1, data=of_digits(path, count))
    train.train(config(50, 3))
    known = json.loads((out / "data.json").read_text())
    assert known["examples"] == 50
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(DllmError, match=r"had 50 examples and has 60 now.*--allow-change data"):
        train.train(config(60, 6))
    edited = config(50, 6)
    path.write_text(path.read_text().replace('"answer": [4, 9]', '"answer": [4, 8]'))
    with pytest.raises(DllmError, match="holds other examples"):
        train.train(edited)
    assert before == {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    seen = seen_rows(monkeypatch)
    assert train.train(config(60, 6), allow_change=["data"]).started == 3
    assert [position for position in seen if position >= 24][:24] == list(range(24, 48))
    changed = next(line["changed"] for line in lines(out) if "changed" in line)
    assert changed["data"] == [known, json.loads((out / "data.json").read_text())]
    assert train.train(config(60, 9)).started == 6  # the data of the run by now
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(path.read_bytes())
    same = config(60, 12)
    options = dataclasses.replace(same.data, options={"path": str(moved)})
    train.train(dataclasses.replace(same, data=options), allow_change=["data.options.path"])  # the same elsewhere


def test_weights_are_written_without_the_data(tmp_path):
    out, data = tmp_path / "out", of_digits(tmp_path / "lines.jsonl", 50)
    train.train(run_config(out, steps=3, data=data))
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "lines.jsonl").unlink()
    assert main(["write-model", "--run", str(out), "--out", str(tmp_path / "again")]) == 0
    params = [dllm_jax.load(folder).params for folder in (out / "model", tmp_path / "again")]
    assert_same(*params)


def test_a_changed_batch_repeats_no_rows_and_leaves_none_out(tmp_path, monkeypatch):
    data = of_digits(tmp_path / "lines.jsonl", 50)
    config = lambda steps, batch, **more: run_config(
        tmp_path / "out", steps=steps, optimizer__batch=batch, data={**data, **more}
    )
    train.train(config(3, 8))
    seen = seen_rows(monkeypatch)
    assert train.train(config(6, 4), allow_change=["optimizer.batch"]).started == 3
    assert [position for position in seen if position] == list(range(24, 36))  # 0 is looked at before
    seen.clear()
    assert train.train(config(9, 2), allow_change=["optimizer.batch"]).started == 6
    assert [position for position in seen if position] == list(range(36, 42))
    with pytest.raises(DllmError, match="data.bucket"):
        train.train(config(12, 8, bucket=4), allow_change=["optimizer.batch", "data.bucket"])
    with pytest.raises(DllmError, match="data.bucket"):  # 42 is amid a batch
        train.train(config(12, 4, bucket=4), allow_change=["optimizer.batch", "data.bucket"])


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path):
    config = run_config(tmp_path / "run", steps=3)
    with RunFolder(config).hold(), pytest.raises(dllm_jax.DllmError, match="another process trains in"):
        train.train(config)
    half = tmp_path / "run" / "state" / "3.orbax-checkpoint-tmp"  # what another process is writing
    half.mkdir(parents=True)
    with RunFolder(config).states(training=False) as states:
        assert states.latest is None
    assert half.is_dir()
    assert train.train(config).step == 3


def test_the_result_is_what_was_asked_for_last_and_written_by_one_process(tmp_path, monkeypatch):
    """A run that has ended writes other weights, and more steps', where they are wanted; and holds its folder then."""
    out = tmp_path / "run"
    of = lambda **changes: run_config(out, **{"steps": 4, "optimizer__ema": 0.5, **changes})
    original, writes = train.trainable.WholeModel.write, []

    def write(self, *arguments, **options):
        with pytest.raises(DllmError, match="another process trains in"), RunFolder(of()).hold():
            pass
        writes.append(options["steps"])
        original(self, *arguments, **options)

    monkeypatch.setattr(train.trainable.WholeModel, "write", write)
    model = lambda config: dllm_jax.load(train.train(config).folder).params["lm_head.kernel"]
    raw, average = model(of()), model(of(checkpoint__weights="ema"))
    state = latest_state(out)
    np.testing.assert_array_equal(raw, state["trained:lm_head.kernel"])
    np.testing.assert_array_equal(average, state["average:lm_head.kernel"])
    assert np.any(raw != average) and writes == [4, 4]
    np.testing.assert_array_equal(model(of(checkpoint__weights="ema")), average)
    assert writes == [4, 4]  # it was there
    shutil.rmtree(out / "model")
    np.testing.assert_array_equal(model(of()), raw)


def test_interrupted_run_keeps_its_step(tmp_path, monkeypatch):
    out = tmp_path / "run"
    config = run_config(out, steps=7, checkpoint__every=100)
    monkeypatch.setattr("train_toys.Reverse.example", interrupting(Reverse.example, index=8 * 5))
    with pytest.raises(train.Interrupted, match="interrupted after step"):
        train.train(config)
    monkeypatch.undo()
    outcome = train.train(config)
    assert outcome.started > 0
    train.train(run_config(tmp_path / "whole", steps=7))
    assert_same(latest_state(out), latest_state(tmp_path / "whole"))


def interrupting(example, index, sent=signal.SIGTERM):
    def wrapped(self, number):
        if number == index:
            os.kill(os.getpid(), sent)
        return example(self, number)

    return wrapped


def test_lora_trains_adapters_only_and_merges(tmp_path):
    train.train(run_config(tmp_path / "base", steps=2, checkpoint__every=2))
    base = tmp_path / "base" / "model"
    changes = {"model": {"init": str(base)}, "lora": {"rank": 2, "alpha": 8.0}}
    outcome = train.train(run_config(tmp_path / "lora", **changes))
    config, part, adapters, named = train.load_adapters(outcome.folder)
    assert (config, part.rank, part.alpha, named) == (dllm_jax.load(base).config, 2, 8.0, str(base))
    assert len(adapters) == 2 * 4 * config.num_layers
    assert adapters["layers.1.attn.o_proj.lora_a"].shape == (16, 2)
    assert all(np.any(adapters[name]) for name in adapters)
    state = latest_state(tmp_path / "lora")
    assert not any("mlp" in name or "kernel" in name for name in state)

    known = json.loads((tmp_path / "lora" / "run.json").read_text())
    del known["lora"]["dropout"]  # as of a run that is older than the setting
    (tmp_path / "lora" / "run.json").write_text(json.dumps(known))
    assert train.train(run_config(tmp_path / "lora", **changes)).started == outcome.step
    with pytest.raises(DllmError, match=r"lora.dropout = 0.0, not 0.5"):
        train.train(run_config(tmp_path / "lora", **changes | {"lora": changes["lora"] | {"dropout": 0.5}}))

    arguments = ["merge-lora", "--base", str(base), "--adapters", str(outcome.folder), "--out", str(tmp_path / "m")]
    assert main(arguments) == 0
    plain, merged = dllm_jax.load(base), dllm_jax.load(tmp_path / "m")
    a, b = adapters["layers.0.attn.q_proj.lora_a"], adapters["layers.0.attn.q_proj.lora_b"]
    name = "layers.0.attn.q_proj.kernel"
    np.testing.assert_allclose(merged.params[name], plain.params[name] + 4.0 * a @ b, atol=1e-6)
    np.testing.assert_array_equal(merged.params["lm_head.kernel"], plain.params["lm_head.kernel"])
    tokens = jnp.arange(12)[None]
    seen = train.add_adapters(plain.params, {n: jnp.asarray(x) for n, x in adapters.items()}, 4.0)
    np.testing.assert_allclose(merged.denoiser(tokens), dllm_jax.Denoiser(plain.config, seen)(tokens), atol=1e-5)


def test_adapters_beside_kernels_compute_what_merged_ones_do():
    config = LLADA.replace(num_layers=1)
    params = init_params(config, jax.random.key(0), dtype="float32")
    part = LoraPart(rank=3, alpha=6.0, dropout=0.5, targets=("*.attn.[qkvo]_proj.kernel", "*.mlp.*", "lm_head.kernel"))
    keys = iter(jax.random.split(jax.random.key(1), 64))
    shapes = adapter_shapes(config, part)
    adapters = {name: 0.3 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    tokens = jnp.arange(12)[None]

    @jax.jit
    def compare(adapters, key):
        apart = lambda adapters: Denoiser(config, attach_adapters(params, adapters, part))(tokens)
        merged = lambda adapters: Denoiser(config, train.add_adapters(params, adapters, part.scale))(tokens)
        values, pull = zip(*(jax.vjp(of, adapters) for of in (apart, merged)), strict=True)
        gradients = [back(jnp.cos(value))[0] for value, back in zip(values, pull, strict=True)]
        return values, gradients, Denoiser(config, attach_adapters(params, adapters, part, key))(tokens)

    (apart, merged), gradients, dropped = compare(adapters, jax.random.key(2))
    np.testing.assert_allclose(apart, merged, rtol=1e-4, atol=1e-4)
    for name in adapters:
        np.testing.assert_allclose(gradients[0][name], gradients[1][name], rtol=1e-3, atol=1e-3, err_msg=name)
    assert np.abs(dropped - apart).max() > 0.1
    assert (dropped == compare(adapters, jax.random.key(2))[-1]).all()
    assert (dropped != compare(adapters, jax.random.key(3))[-1]).any()


def test_dropout_leaves_the_adapters_mean_and_the_kernel_alone():
    x, kernel = jnp.ones((4, 50)), jnp.zeros((50, 2))
    a, b = jnp.eye(50)[:, :2], jnp.eye(2)
    draws = jax.random.split(jax.random.key(0), 500)
    found = jax.vmap(lambda key: product(x, LowRankKernel(kernel, a, b, key, 3.0, 0.25)))(draws)
    assert set(np.unique(np.round(found, 4))) == {0.0, 4.0}  # each input of A by itself, scaled up
    np.testing.assert_allclose(found.mean(), 3.0, atol=0.1)
    np.testing.assert_array_equal(
        product(x, LowRankKernel(kernel + 1, a * 0, b, draws[0], 3.0, 0.25)), x @ (kernel + 1)
    )


def test_lora_on_a_mesh_is_lora(tmp_path):
    train.train(run_config(tmp_path / "base", steps=2, checkpoint__every=2))
    changes = {"model": {"init": str(tmp_path / "base" / "model")}, "lora": {"rank": 2, "targets": ["*.mlp.*.kernel"]}}
    losses = []
    for mesh in ({}, {"fsdp": 2, "tensor": 2}):
        out = tmp_path / f"lora{len(mesh)}"
        train.train(run_config(out, compute__mesh=mesh, **changes))
        losses.append([line["loss"] for line in lines(out)])
    np.testing.assert_allclose(*losses, rtol=1e-4)
