"""The notebooks run from top to bottom, with the small models and with random weights in the published ones' format."""

import ast
import importlib
import json
import re
import shutil
import time
from pathlib import Path

import jax
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

import dllm_jax
from convert import embedded, published
from convert.hub_config import copied_files
from convert.to_hub import export
from dllm_jax import checkpoint
from dllm_jax.params import init_params
from samplers import parse_samplers

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SWITCH = 'REAL = jax.default_backend() == "gpu"'
IDS = {"vocab_size": 517, "eos_id": 0, "pad_id": 0, "mask_id": 1, "end_ids": (0, 2), "bos_id": 3}
NARROW = {"num_layers": 1, "embed_dim": 32, "num_heads": 2, "head_dim": 16, "mlp_dim": 32, "max_length": 512}

TINY = {  # the same cells on less
    "convert-and-quantize": {'"float16", 16, 4': '"float16", 2, 2', "None, 128, 64": "None, 16, 16"},
    "speed-against-quality": {"PROBLEMS, HELD_OUT = 64, 128": "PROBLEMS, HELD_OUT = 16, 40"},
    "train-indicator-and-student": {"PROMPTS, STEPS, PROBLEMS = 1024, 200, 128": "PROMPTS, STEPS, PROBLEMS = 32, 4, 8"},
}
CLAIMS = {  # what the small model's run prints
    "convert-and-quantize": r"full +\d.*right[\s\S]*int8 +\d.*right[\s\S]*int4 +\d.*right",
    "quickstart": r"#### 17[\s\S]* forwards",
    "samplers-in-your-jit": r"0\.99 .*#### 16[\s\S]*d log p",
    "speed-against-quality": r"4 programs for[\s\S]* AUP ",
    "train-indicator-and-student": r"times as fast[\s\S]*d2f .* forwards",
}

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The hub's cache on this machine, with models such as it has: one narrow layer, the embedded models' vocabulary."""
    cache = tmp_path_factory.mktemp("hub")
    files = copied_files(embedded.source("word-problems"))
    for name in ("fast-dllm-v2-1.5b", "llada-8b-instruct"):
        config = dllm_jax.published(name)
        heads = 2 if config.num_kv_heads == config.num_heads else 1
        config = config.replace(**NARROW, **IDS, num_kv_heads=heads, dtype="float32")
        checkpoint.save(cache / name, config, init_params(config, jax.random.key(0)).items(), files=files)
        repository = cache / f"models--{published.HUB[name].repository.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        (repository / "snapshots").mkdir()
        export(cache / name, repository / "snapshots" / ("0" * 40))
    return cache


def sources(path, kind="code"):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def python_of(path):
    """All code of a notebook as Python, lines for IPython included."""
    return "\n".join(map(TransformerManager().transform_cell, sources(path)))


def changed(notebook, changes):
    """The notebook with texts replaced, each of which stands there once."""
    for old, new in changes.items():
        assert sum(cell.source.count(old) for cell in notebook.cells) == 1, old
        for cell in notebook.cells:
            cell.source = cell.source.replace(old, new)
    return notebook


@pytest.mark.parametrize("real", (False, True), ids=("small", "published"))
@each
def test_a_notebook_runs(path, real, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copy(path, tmp_path)
    switch = {SWITCH: f"REAL = {real}"}
    notebook = changed(nbformat.read(path, as_version=4), switch | TINY.get(path.stem, {}))
    start = time.perf_counter()
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    print(f"{path.stem}: {time.perf_counter() - start:.0f} s")
    texts = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert real or re.search(CLAIMS[path.stem], texts), texts
