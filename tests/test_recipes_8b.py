"""The recipes for published models: whole, said right in their heads, and compiled at the models' own widths."""

import json
import math
import re
from pathlib import Path

import jax
import pytest
from conftest import ROOT, one_error
from train_toys import DREAM, LLADA

import dllm_jax
import train
from benchmarks import compile as bench
from benchmarks import recipes
from benchmarks.compile import model_of
from dllm_jax import PUBLISHED
from dllm_jax.models.transformer import param_specs
from dllm_jax.parallel.sharding import param_shardings
from evals import presets
from samplers import make_sampler
from train.objectives import objective_of
from train.settings import read_table
from train.trainable import WholeModel

FOLDER = Path(train.__path__[0]) / "configs" / "8b"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
RESULTS = Path(bench.__file__).parent / "results" / "compile-recipes.json"
MEASURED = json.loads(RESULTS.read_text())


def head(name):
    return "".join(line for line in (FOLDER / f"{name}.toml").open() if line.startswith("#"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_whole(name):
    path = FOLDER / f"{name}.toml"
    config = train.read_config(path)
    assert read_table(path)["command"] == config.command and config.out == f"runs/{name}"
    model = model_of(config)
    assert model.num_layers == PUBLISHED[config.model.init].num_layers and config.data.length <= model.max_length
    assert config.compute.dtype == "bfloat16" and config.compute.mesh == {"fsdp": 8}
    rows = config.optimizer.batch // config.optimizer.accumulate
    assert rows % 8 == 0, "rows that are computed at a time are split over eight devices"
    said = head(name)
    assert f"python -m train {config.command} --config train/configs/8b/{name}.toml" in said
    assert f"--out {config.model.init}\n" in said
    assert bool(config.lora.rank) == (f"runs/{name}/adapters" in said)
    for preset in re.findall(r"--preset (\S+)", said):
        presets.find(preset)
    assert (
        "google-deepmind/gemma" in said or "arXiv" in said or "llada-sft-full.toml" in said or "llada-d2f.toml" in said
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_head_names_samplers_that_there_are(name):
    """Those that need no folder of a user's."""
    config = DREAM if "dream" in name else LLADA
    model = dllm_jax.random_model(config.replace(max_length=4096))
    for spec in re.findall(r"--sampler (\S+)", head(name)):
        if "indicator=" not in spec:
            assert make_sampler(model, spec).gen_length >= 256


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_in_a_head_is_what_was_compiled(name):
    """For eight H100s at least; on GPUs the line through a few layers."""
    config = train.read_config(FOLDER / f"{name}.toml")
    layers = model_of(config).num_layers
    rows = [row for row in MEASURED if row["config"] == name and row["length"] == config.data.length]
    whole = [row for row in rows if row["layers"] == layers]
    assert "h100:8" in [row["target"] for row in whole]
    assert [line for line in head(name).splitlines() if line.startswith("#   ") and " of " in line] == [
        recipes.line(row) for row in whole
    ]
    for row in whole:
        assert row["peak_bytes"] <= row["memory_bytes"]
        if "from" in row:
            same = [r for r in rows if all(r.get(key) == row.get(key) for key in ("target", "mesh", "implementation"))]
            few, more = (next(r for r in same if r["layers"] == n) for n in row["from"])
            assert recipes.extended(few, more, layers) == row


@pytest.mark.parametrize("name", ["llada-sft-full", "dream-d2f", "dream-ni", "llada-moe-compression"])
def test_two_layers_of_a_recipe_are_compiled(name):
    """With the model's own widths and without any of its weights; the vocabulary head stays out of the loop over
    chunks, and the arguments are an eighth of what there is."""
    config = train.read_config(FOLDER / f"{name}.toml")
    setting = bench.Setting.of(config, bench.mesh_of(jax.devices(), "fsdp=8"), 2)
    found = bench.describe(bench.compiled("train", setting), setting)
    assert "vocabulary" in [row["loop"] for row in found["loops"]]
    assert not [fault for fault in bench.faults(found) if "sends" in fault]
    trained = objective_of(config).trainable(config, setting.config)
    masters = trained.shardings(setting.mesh)
    wanted = sum(12 * math.prod(masters[name].shard_shape(shape)) for name, shape in trained.shapes().items())
    if not isinstance(trained, WholeModel):
        frozen, specs = param_shardings(setting.config, setting.mesh), param_specs(setting.config)
        wanted += sum(2 * math.prod(frozen[name].shard_shape(spec.shape)) for name, spec in specs.items())
    rows = config.optimizer.batch // 8 * config.data.length * (4 + 1 + 4 * objective_of(config).trajectories)
    assert found["argument_bytes"] == pytest.approx(wanted + rows, rel=1e-3)  # weights, moments, frozen weights, rows


def test_the_page_has_all_programs(capsys):
    assert recipes.main(["--show", str(RESULTS)]) == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "scale.md").read_text()


def test_rows_take_the_place_of_those_before(tmp_path, capsys, monkeypatch):
    row = {"config": "llada-d2f", "target": "v6e:2x4", "mesh": "fsdp=8", "model": "llada-8b-instruct", "layers": 32}
    row |= {"argument_bytes": 2**30, "temporary_bytes": 2**31, "peak_bytes": 3 * 2**30, "memory_bytes": 2**35}
    row |= {"length": 1024, "implementation": "auto", "busy_seconds": 3.0, "sent_seconds": 1.0, "model_seconds": 1.5}
    asked = []
    compiled = lambda options, more: asked.append(options.settings) or {name: row.get(name) for name in recipes.KEPT}
    monkeypatch.setattr(bench, "report", compiled)
    out = tmp_path / "rows.json"
    others = [{**row, "target": "h100:8"}, {**row, "length": 32768}]
    out.write_text(json.dumps([{**row, "peak_bytes": 1}, *others]))
    path = str(FOLDER / "llada-d2f.toml")
    assert recipes.main([path, "optimizer.accumulate=4", "--target", "v6e:2x4", "--json", str(out)]) == 0
    assert asked == [["optimizer.accumulate=4"]]
    told = "#   v6e:2x4      fsdp=8     3.0 of 32 (arguments 1.0, temporary 2.0)\nmodel FLOPs utilisation 38% to 50%\n"
    assert capsys.readouterr().out == f"{path}\n{told}"
    found = json.loads(out.read_text())
    assert [found[0], found[2]] == others and found[1].items() >= row.items()
    monkeypatch.undo()
    assert recipes.main([path, "--target", "v9"]) == 2
    assert "'v9'" in one_error(capsys)
