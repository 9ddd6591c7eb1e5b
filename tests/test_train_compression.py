"""Trajectories as training data, and compression: what the source reads, the loss, and whole runs."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_evals_tasks import config_for
from train_toys import DREAM, LLADA, settings

import dllm_jax
import train
from dllm_jax import Denoiser, DllmError, random_model
from dllm_jax.checkpoints import checkpoint
from dllm_jax.params.specs import init_params
from evals.__main__ import main
from evals.tasks import make_task
from evals.trajectories import _write
from train.config import DataPart
from train.data import Rows
from train.data.shards import Trajectories, shards
from train.losses import Batch
from train.objectives import read_config
from train.objectives.compression import Compression, CompressionConfig, CompressionPart, draw_states
from train.settings import build_settings
from train.setup import read_parts

MASK, EOS, T = LLADA.mask_id, LLADA.eos_id, 12
SUDOKU = "sudoku:box_rows=2,box_columns=2"


def write_folder(folder, *, correct=True):
    """Seven trajectories in two shards: canvases of 8 in which about two positions are written per step; in the first,
    position 5 is never written and position 0 was given."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for first, end in ((0, 4), (4, 7)):
        lengths = rng.integers(1, 5, end - first)
        tokens, step = rng.integers(0, 10, (end - first, 8)), rng.permuted(np.tile(np.arange(8) // 2, (4, 1)), axis=1)
        step = step[: end - first]
        if not first:
            step[:2] = [-1, 0, 1, 1, 2, -1, 3, 3], [2, 1, 0, 0, 1, 2, -1, -1]
            tokens[0, 5] = MASK
        arrays = {
            "prompts": rng.integers(10, 20, lengths.sum()).astype(np.uint16),
            "prompt_lengths": lengths.astype(np.int32),
            "gen_lengths": np.asarray([8, 8 if first else 6, 8, 8][: end - first], np.int32),
            "tokens": tokens.astype(np.uint16),
            "step": step.astype(np.int16),
            "nfe": np.full(end - first, 4),
        }
        arrays |= {"correct": np.arange(first, end) % 3 == 0} if correct else {}
        _write(folder / f"trajectories-{first:08d}-{end:08d}.npz", arrays)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "trajectories")


def batch_of(folder, count=7):
    rows = Rows(Trajectories(folder, correct=False), DataPart(length=T, shuffle=False), "sft", LLADA, 0)
    found = [rows(i) for i in range(count)]
    stacked = [jnp.asarray(np.stack([row[i] for row in found])) for i in range(4)]
    return Batch(*stacked)


def test_the_source_gives_canvases_and_their_steps(folder):
    source = Trajectories(folder, correct=False)
    assert not source._loaded and len(source) == 7 and source.width <= T
    batch, number = batch_of(folder), 0
    for shard in shards(folder):
        data, whole = shard.load(), shard.trajectories()
        for row in range(shard.end - shard.first):
            prompt, gen = int(data["prompt_lengths"][row]), int(data["gen_lengths"][row])
            wanted = [*whole.prompt[row, :prompt], *whole.tokens[row, :gen]]
            assert batch.tokens[number, : prompt + gen].tolist() == wanted
            assert batch.step[number].tolist() == [-1] * prompt + data["step"][row, :gen].tolist() + [-1] * (
                T - prompt - gen
            )
            assert batch.lengths[number] == prompt + gen  # no end tokens are added behind a canvas
            number += 1
    assert np.array_equal(batch.targets, batch.step >= 0)
    assert (batch.tokens[0] == MASK).sum() == 1  # what was never written stays a mask
    right = Trajectories(folder, correct=True)
    assert [right.example(i).prompt_ids.tolist() for i in range(len(right))] == [
        source.example(i).prompt_ids.tolist() for i in (0, 3, 6)
    ]


def test_two_states_are_any_pair_alike():
    draws = jax.random.uniform(jax.random.key(0), (4000, 2))
    low, high = (np.asarray(x) for x in draw_states(draws, jnp.full(4000, 3)))
    counts = np.bincount(low * 4 + high, minlength=16).reshape(4, 4)
    assert not np.tril(counts).any()
    assert np.abs(counts[np.triu_indices(4, 1)] - 4000 / 6).max() < 5 * math.sqrt(4000 / 6)
    edges = jnp.asarray([[0.0, 0.0], [0.9999999, 0.9999999]])
    assert [x.tolist() for x in draw_states(edges, jnp.array([1, 1]))] == [[0, 0], [1, 1]]
    assert [x.tolist() for x in draw_states(edges, jnp.array([0, 0]))] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_the_loss_in_a_loop(config, folder):
    params = init_params(config, jax.random.key(1), dtype="float32")
    denoiser, batch = (
        Denoiser(config, {name: x * 8 if x.ndim > 1 else x for name, x in params.items()}),
        batch_of(folder),
    )
    whole, pieces = (Compression(CompressionPart(chunk=chunk)) for chunk in (0, 5))
    noised = whole.corrupt(jax.random.key(2), batch, denoiser)
    logits = jax.jit(lambda tokens, lengths: denoiser(tokens, lengths))(noised.inputs, batch.lengths)
    log_p, total, spans = np.asarray(jax.nn.log_softmax(logits)), 0.0, 0
    for row in range(7):
        step, tokens = np.asarray(batch.step[row]), np.asarray(batch.tokens[row])
        masked = (np.asarray(noised.inputs[row]) == MASK) & (tokens != MASK)
        start = step[masked].min() if masked.any() else step.max() + 1
        assert np.array_equal(masked, step >= start)  # a state of the trajectory
        targets = np.flatnonzero(noised.weights[row])
        end = step[targets].max() + 1
        assert np.array_equal(np.flatnonzero((step >= start) & (step < end)), targets) and end > start
        total -= sum(log_p[row, i, tokens[i]] for i in targets)
        spans += end - start
    assert spans > 7
    for objective in (whole, pieces):
        found, metrics = jax.jit(lambda noised, o=objective: o.loss(denoiser, denoiser, noised))(noised)
        np.testing.assert_allclose(found, total / 7, rtol=1e-5)
        count = int((noised.weights > 0).sum())
        np.testing.assert_allclose(metrics["cross_entropy"], total / count, rtol=1e-5)


def compression_settings(out, base, folder, **changes):
    values = settings(out, data__options={"path": str(folder), "correct": True}, **changes)
    values["model"] = {"init": str(base)}
    values["data"]["source"] = "trajectories"
    return values


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model, out = random_model(LLADA.replace(num_layers=1), key=3), tmp_path_factory.mktemp("models") / "base"
    checkpoint.save(out, model.config, model.params.items())
    return out


def test_training_lowers_the_loss(tmp_path, base, folder):
    values = compression_settings(tmp_path / "whole", base, folder, steps=20, optimizer__lr=3e-2)
    outcome = train.train(build_settings(CompressionConfig, values))
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"]
    assert dllm_jax.load(outcome.folder).config == dllm_jax.load(base).config


def test_refusals(tmp_path, base, folder):
    config = lambda **changes: build_settings(CompressionConfig, compression_settings(tmp_path / "x", base, **changes))
    with pytest.raises(DllmError, match="holds no trajectories"):
        read_parts(config(folder=tmp_path))
    unknown = write_folder(tmp_path / "unknown", correct=False)
    with pytest.raises(DllmError, match="does not say which answers are correct"):
        read_parts(config(folder=unknown))
    with pytest.raises(DllmError, match="data.length is 8"):
        read_parts(config(folder=folder, data__length=8)).rows(1)
    other = compression_settings(tmp_path / "x", base, folder)
    other["data"] = {"source": "train_toys:Reverse", "length": 12}
    with pytest.raises(DllmError, match="data.source"):
        read_parts(build_settings(CompressionConfig, other))
    with pytest.raises(DllmError, match="'data.options.correct'"):
        read_parts(config(folder=folder, data__options__corect=True))
    config = read_config("train/configs/compression-long-problems.toml", command="compression")
    assert config.checkpoint.weights == "ema" and config.data.options["correct"]
    assert not (tmp_path / "x").exists()


def test_trajectories_of_a_split_and_what_its_checker_says(tmp_path, capsys, monkeypatch):
    task = make_task(SUDOKU)
    model = random_model(config_for(task), key=3)
    checkpoint.save(tmp_path / "model", model.config, model.params.items())
    monkeypatch.setattr(
        type(task), "verify", lambda self, example, ids: dataclasses.make_dataclass("V", ["correct"])(ids[0] % 2 == 0)
    )
    what = ["trajectories", "--model", str(tmp_path / "model"), "--sampler", "topk:k=4", "--no-progress", "--n", "6"]
    what += ["--task", SUDOKU, "--out", str(tmp_path / "out"), "--batch-size", "4"]
    assert main([*what, "--split", "validation"]) == 0
    (shard,) = shards(tmp_path / "out")
    data = shard.load()
    first = task.example("validation", 0)
    canvas = data["tokens"][0]
    assert (canvas[np.asarray(first.given)] == first.answer_ids[np.asarray(first.given)]).all()
    assert np.array_equal(data["correct"], data["tokens"][:, 0] % 2 == 0)
    assert json.loads((tmp_path / "out" / "trajectories.json").read_text())["split"] == "validation"
    assert main(what) == 2
    assert "was made with split 'validation', not 'train'" in capsys.readouterr().err
    assert main([*what, "--split", "test"]) == 2
    both = ["trajectories", "--model", "x", "--data", "y", "--sampler", "topk", "--out", "z"]
    for more, sentence in ((["--split", "train"], "--split is for --task"), (["--task", SUDOKU], "pass one of them")):
        assert main([*both, *more]) == 2
        assert sentence in capsys.readouterr().err


def test_trajectories_of_a_file_and_the_sampler_that_they_are_of(tmp_path, capsys):
    """The folder says all of it, defaults included; one that is older says less and goes on."""
    model = random_model(LLADA.replace(num_layers=1, max_length=64), key=3)
    checkpoint.save(tmp_path / "model", model.config, model.params.items())
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": [{i}, 2], "answer": [3]}}\n' for i in range(5)))
    what = ["trajectories", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl"), "--no-progress"]
    what += ["--batch-size", "4", "--shard-size", "3", "--out", str(tmp_path / "out"), "--sampler"]
    assert main([*what, "topk:k=4,gen_length=8,cache=prefix", "--n", "3"]) == 0
    path = tmp_path / "out" / "trajectories.json"
    about = json.loads(path.read_text())
    told = about["settings"]
    assert told["rule"] == {"name": "topk", "k": 4, "proxy": "confidence"}
    assert (told["cache"]["name"], told["gen_length"], told["block_length"]) == ("prefix", 8, 8)
    (shard,) = shards(tmp_path / "out")
    assert (shard.load()["nfe"] == 2).all()  # eight positions in one block, four at a time
    assert main([*what, "topk:k=2,gen_length=8"]) == 2
    assert "was made with sampler" in capsys.readouterr().err
    path.write_text(json.dumps({name: value for name, value in about.items() if name != "settings"}))
    assert main([*what, "topk:k=4,gen_length=8,cache=prefix"]) == 0
    assert [shard.end for shard in shards(tmp_path / "out")] == [3, 5]
