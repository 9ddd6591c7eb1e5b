"""The notebook runs from top to bottom, with the small model and with random weights in the real one's format."""

from pathlib import Path

import jax
import nbformat
import pytest
from nbclient import NotebookClient

import dllm_jax
from convert import embedded
from convert.hub_config import copied_files
from convert.to_hub import export
from dllm_jax import checkpoint
from dllm_jax.params import init_params

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def published_model(out):
    """A folder such as the hub has of Fast-dLLM v2: one narrow layer with the embedded models' vocabulary."""
    ids = {"vocab_size": 517, "eos_id": 0, "pad_id": 0, "mask_id": 1, "end_ids": (0, 2), "bos_id": 3}
    sizes = {"num_layers": 1, "embed_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_dim": 32}
    config = dllm_jax.published("fast-dllm-v2-1.5b").replace(**sizes, **ids, max_length=512, dtype="float32")
    files = copied_files(embedded.source("word-problems"))
    checkpoint.save(out / "ours", config, init_params(config, jax.random.key(0)).items(), files=files)
    export(out / "ours", out / "hub")
    return out / "hub"


@pytest.mark.parametrize("real", (False, True))
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, real, tmp_path, monkeypatch):
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path / "home"))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    changes = {"PROBLEMS = 64": "PROBLEMS = 4"}  # the same cells on fewer problems
    if real:
        changes["REAL = jax.default_backend()"] = "REAL = True or jax.default_backend()"
        changes["Efficient-Large-Model/Fast_dLLM_v2_1.5B"] = str(published_model(tmp_path))
    for old, new in changes.items():
        assert sum(old in cell.source for cell in notebook.cells) == 1
        for cell in notebook.cells:
            cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    texts = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "forwards" in texts and (real or "#### 17" in texts)
