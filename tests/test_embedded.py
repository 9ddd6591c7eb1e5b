"""The models that come with the library: complete, as good as they say, and installed without harm."""

import json
import shutil

import jax
import numpy as np
import pytest
from conftest import refuses

import dllm_jax
import evals
from convert import embedded
from convert.__main__ import main as convert_main
from dllm_jax import DllmError
from dllm_jax.checkpoints.checkpoint import EMBEDDED, find
from evals.__main__ import main as evals_main
from train.objectives import read_config

EXPECTED = {
    "chains": "chains",
    "word-problems": "word-problems",
    "long-problems": "word-problems",
    "sudoku": "sudoku",
    "maze": "maze",
}
LEAST = {"chains": 0.7}  # of a task that is meant to be hard; 0.9 of others
EXAMPLES = {"long-problems": 12, "chains": 12}  # of 64 forwards each


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> model, each installed once."""
    home = tmp_path_factory.mktemp("home")
    return {name: dllm_jax.load(embedded.install(name, home / name)) for name in embedded.names()}


def scores(name):
    return json.loads((embedded.source(name) / "scores.json").read_text())


def test_a_model_that_was_not_installed_yet_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert sorted(EMBEDDED) == sorted(embedded.names())
    for name in EMBEDDED:
        with refuses(f"python -m convert embedded {name}"):
            find(name)


def test_all_are_there_and_small():
    assert set(embedded.names()) == set(EXPECTED)
    files = [path for name in EXPECTED for path in embedded.source(name).iterdir()]
    assert sum(path.stat().st_size for path in files) < 40e6


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_each_comes_with_its_recipe_log_and_scores(name):
    folder = embedded.source(name)
    recipe = read_config(folder / "recipe.toml")
    assert recipe.data.options["task"] == EXPECTED[name]
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == recipe.steps and log[-1]["loss"] < log[0]["loss"] / 5
    told = scores(name)
    assert told["split"] == "test" and told["n"] >= 500 and told["accuracy"] >= LEAST.get(name, 0.9)
    assert told["settings"]["rule"] == "topk" and told["settings"].get("k", 1) == 1


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_each_is_as_good_as_it_says(name, models):
    told, n = scores(name), EXAMPLES.get(name, 48)
    sampler = f"topk:gen_length={told['settings']['gen_length']}" if name == "long-problems" else "topk"
    found = evals.run(models[name], told["task"], sampler, n=n, batch_size=n, progress=False)
    spread = 4 * np.sqrt(told["accuracy"] * (1 - told["accuracy"]) / n) + 1 / n
    assert found.accuracy >= told["accuracy"] - spread
    assert found.parameters == told["parameters"]


def test_a_model_is_converted_once_and_again_when_it_is_another(tmp_path, monkeypatch):
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path))
    folder = embedded.install("maze")
    assert folder == tmp_path / "maze"
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert embedded.install("maze") == folder and (folder / "config.json").stat().st_mtime_ns == stamp
    source = folder / "source.json"
    source.write_text(source.read_text().replace('"sha256": "', '"sha256": "0'))  # as of an earlier version
    model = embedded.load("maze")
    assert model.folder == folder and (folder / "config.json").stat().st_mtime_ns != stamp
    assert jax.tree.all(jax.tree.map(lambda x: bool(np.isfinite(x).all()), model.params))


def test_a_copy_with_another_tokenizer_is_replaced(tmp_path):
    out = embedded.install("sudoku", tmp_path / "sudoku")
    (out / "tokenizer_config.json").write_text("{}")
    embedded.install("sudoku", out)
    assert (out / "tokenizer_config.json").read_bytes() == embedded.source("sudoku").joinpath(
        "tokenizer_config.json"
    ).read_bytes()


def test_a_folder_with_something_else_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path))
    (tmp_path / "maze").mkdir()
    (tmp_path / "maze" / "notes.txt").write_text("mine")
    with pytest.raises(DllmError):
        embedded.install("maze")
    assert (tmp_path / "maze" / "notes.txt").read_text() == "mine"


def test_unknown_names_are_refused(capsys):
    with refuses("'chess'", "maze"):
        embedded.load("chess")
    assert convert_main(["embedded", "chess"]) == 2
    assert "choose one of" in capsys.readouterr().err


def test_models_are_installed_and_found_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path))
    assert convert_main(["embedded", "sudoku"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "sudoku")
    task = scores("sudoku")["task"]
    specs = ["--sampler", "eb:gamma=0.1", "--sampler", "topk:k=8"]
    assert evals_main(["compare", "--model", "sudoku", "--task", task, "--index", "3", *specs]) == 0
    shown = capsys.readouterr().out
    assert "eb:gamma=0.1" in shown and "topk:k=8" in shown and shown.count("right") + shown.count("wrong") == 2
    shutil.rmtree(tmp_path / "sudoku")
    assert evals_main(["compare", "--model", "sudoku", "--task", task]) == 2
