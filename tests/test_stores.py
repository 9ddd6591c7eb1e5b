"""Runs and models in an object store: the same as in a folder, whatever networks do."""

import errno
import importlib.util
import json
import signal
from pathlib import Path

import numpy as np
import pytest
from conftest import one_error, refuses
from test_train_run import assert_same, interrupting, latest_state, lines
from train_toys import Reverse, run_config, settings, write_toml

import dllm_jax
import train
from dllm_jax import buckets
from dllm_jax.checkpoints import checkpoint
from dllm_jax.indicator import load_indicator, save_indicator
from train.__main__ import main

CHANGES = {"steps": 8, "checkpoint__every": 2, "log__every": 1, "optimizer__ema": 0.5}
CHANGES |= {"watch": {"every": 4, "rows": 8, "source": "train_toys:Reverse", "options": {"seed": 1}}}


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Where local copies are."""
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A run in a folder."""
    out = tmp_path_factory.mktemp("local") / "run"
    train.train(run_config(out, **CHANGES))
    return out


def command(tmp_path, out, **changes):
    toml = write_toml(tmp_path / "run.toml", settings(out, **{**CHANGES, **changes}))
    return main(["masked-diffusion", "--config", str(toml), "--no-progress"])


def told(out):
    """What lines of the log say, but for times."""
    found = [{name: x for name, x in line.items() if "second" not in name} for line in lines(out)]
    return found, (out / "run.json").exists(), json.loads((out / "result.json").read_text())


def assert_same_run(found, wanted):
    assert told(found) == told(wanted)
    assert_same(latest_state(found), latest_state(wanted))
    assert_same(*(dict(checkpoint.iter_params(out / "model")) for out in (found, wanted)))


def test_a_run_that_is_interrupted_is_the_run_in_a_folder(bucket, local, tmp_path, monkeypatch, capsys):
    out = "gs://bucket/interrupted/run"
    monkeypatch.setattr("train_toys.Reverse.example", interrupting(Reverse.example, 8 * 4, signal.SIGTERM))
    assert command(tmp_path, out) == 75
    monkeypatch.undo()
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path / "home"))
    stopped = bucket.fetched(out, tmp_path / "stopped")
    steps = [int(path.name) for path in (stopped / "state").iterdir()]
    assert max(steps) == lines(stopped)[-1]["step"] < 8 and not (stopped / "model").exists()
    assert command(tmp_path, out) == 0
    assert f"written to {out}/model" in capsys.readouterr().out
    assert_same_run(bucket.fetched(out, tmp_path / "whole"), local)

    model = dllm_jax.load(f"{out}/model")
    assert_same(model.params, dllm_jax.load(local / "model").params)
    assert model.name == "model"
    for to in (str(tmp_path / "again"), f"{out}-again"):
        assert main(["write-model", "--run", out, "--out", to]) == 0
        assert_same(dllm_jax.load(to).params, model.params)
    assert main(["write-model", "--run", out, "--out", f"{out}-again"]) == 2
    assert f"{out}-again" in capsys.readouterr().err
    assert main(["plot", "--run", out, "--out", str(tmp_path / "curves.png")]) == 0
    assert command(tmp_path, out, optimizer__lr=1.0) == 2
    assert "optimizer.lr" in capsys.readouterr().err
    assert command(tmp_path, "gs://bucket/interrupted") == 2
    assert "gs://bucket/interrupted" in capsys.readouterr().err


def test_adapters_begin_and_end_in_a_bucket(bucket, local, tmp_path):
    base = "gs://bucket/adapters/base"
    bucket.files.put(str(local / "model"), base, recursive=True)  # as people copy a model there
    changes = {"model": {"init": base}, "lora__rank": 2, "steps": 2}
    outcome = train.train(run_config("gs://bucket/adapters/run", **changes))
    config, part, values, named = train.load_adapters(str(outcome.folder))
    assert (config, part.rank, named) == (dllm_jax.load(base).config, 2, base)
    other = train.train(run_config(tmp_path / "run", **{**changes, "model": {"init": str(local / "model")}}))
    assert_same(values, train.load_adapters(other.folder)[2])
    changes["lora__init"] = f"{outcome.folder}"
    train.train(run_config(tmp_path / "more", **changes))
    assert main(["merge-lora", "--base", base, "--adapters", f"{outcome.folder}", "--out", "gs://bucket/merged"]) == 0
    kernel = "layers.0.attn.q_proj.kernel"
    assert np.any(dllm_jax.load("gs://bucket/merged").params[kernel] != dllm_jax.load(base).params[kernel])


def test_a_bucket_that_fails_costs_no_more_than_the_steps_since_the_last_state(bucket, local, tmp_path, capsys):
    out = "gs://bucket/failing/run"
    asked = []

    def failing(part, status, times=10**6):
        def answer(method, request):
            if method == "POST" and part in request and len(asked) < times:
                asked.append(request)
                return status
            return None

        asked.clear()
        return bucket.answering(answer)

    for part in ("run/state/4", "run/metrics.jsonl", "run/model/params", "run/model/config.json"):
        with failing(part, 403):
            assert command(tmp_path, out) == 2
        said = capsys.readouterr().err
        assert asked and said.count("error: ") == 1 and f"error: {out}" in said, said
        assert "could not be reached" in said and "gcloud auth" in said, said
        assert not any(path.endswith(("result.json", "model/config.json")) for path in bucket.files.find(out))
    with failing("run/model", 503, times=2):  # which is tried again
        assert command(tmp_path, out) == 0
    assert_same_run(bucket.fetched(out, tmp_path / "whole"), local)


def test_a_checkpoint_is_copied_once_and_again_when_it_changes(bucket, llada_tiny, tmp_path, monkeypatch):
    address = "gs://bucket/copies/model"
    bucket.files.put(str(llada_tiny.folder), address, recursive=True)
    bucket.files.pipe("gs://bucket/copies/model-other/config.json", b"{}")  # whose name begins alike
    first = checkpoint.find(address)
    assert {path.name for path in first.iterdir()} == {path.name for path in llada_tiny.folder.iterdir()}
    assert_same(dict(checkpoint.iter_params(first)), dict(checkpoint.iter_params(llada_tiny.folder)))
    fetched = []
    with bucket.answering(lambda method, request: fetched.append(request) if "alt=media" in request else None):
        assert checkpoint.find(f"{address}/") == first and not fetched
        bucket.files.pipe(f"{address}/generation.json", b'{"gen_length": 4}')
        second = checkpoint.find(address)
        assert second != first and fetched
    assert checkpoint.load_generation(second) == {"gen_length": 4}
    assert first.is_dir()  # where somebody may be reading

    bucket.files.pipe(f"{address}/generation.json", b"{}")
    objects, times = buckets._objects, iter(range(2))
    monkeypatch.setattr(buckets, "_objects", lambda source: objects(source) | {"written": str(next(times))})
    with refuses(address):
        checkpoint.find(address)
    monkeypatch.setattr(buckets, "_objects", objects)
    assert checkpoint.load_generation(checkpoint.find(address)) == {}

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    bucket.files.pipe(f"{address}/source.json", b"{}")
    monkeypatch.setattr(type(bucket.files), "_get_file", full)
    with refuses("DLLM_JAX_HOME"):
        checkpoint.find(address)
    assert not list((tmp_path / "home").rglob("*.partial"))


def test_an_indicator_goes_to_a_bucket_and_comes_back(bucket, ni_indicator):
    found, address = load_indicator(ni_indicator), "gs://bucket/indicators/tiny"
    save_indicator(address, found)
    again = load_indicator(address)
    assert again.config == found.config
    assert_same(again.params, found.params)
    with refuses(address):
        save_indicator(address, found)
    save_indicator(address, found, source={"made": "again"}, overwrite=True)
    assert checkpoint.load_source(checkpoint.local_folder(address)) == {"made": "again"}


def test_addresses_that_mean_nothing_are_told(bucket, tmp_path, monkeypatch, capsys):
    for out in ("s3://bucket/run", "gs://bucket", "gs://nobody/run"):
        assert command(tmp_path, out) == 2
        assert out.removesuffix("/run") in one_error(capsys)
    for address in ("gs://bucket/absent", "gs://nobody/model", "hf://someone/model"):
        with refuses(address.removesuffix("/model")):
            dllm_jax.load(address)
    assert main(["plot", "--run", "gs://bucket/absent", "--out", str(tmp_path / "curves.png")]) == 2
    assert main(["write-model", "--run", "gs://bucket/absent", "--out", str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err.count("gs://bucket/absent is no training run") == 2
    with bucket.answering(lambda method, request: 401):
        with refuses("gs://bucket/run", "gcloud auth"):
            buckets.list_names(buckets.remote("gs://bucket/run"))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "gcsfs" else found(name, *of))
    assert command(tmp_path, "gs://bucket/run") == 2
    assert "dllm_jax[gcs]" in one_error(capsys)


def test_a_folder_is_told_from_an_address(tmp_path):
    for path in ("run", "/a/gs/b", "c:/x", "a/gs://b", tmp_path):
        assert not buckets.is_address(path), path
    assert str(buckets.remote(Path("gs://bucket/a") / "b")) == "gs://bucket/a/b"
    assert buckets.list_names(tmp_path) == buckets.list_names(tmp_path / "absent") == []
