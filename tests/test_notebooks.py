"""The notebooks run from top to bottom, with the small models and with random weights in the published ones' format."""

import ast
import functools
import importlib
import inspect
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

import dllm_jax
from convert import embedded, published
from convert.hub_folder import copied_files
from convert.to_hub import export
from dllm_jax.checkpoints import checkpoint
from dllm_jax.families import REPOSITORIES
from dllm_jax.params.specs import init_params
from samplers import parse_samplers

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SWITCH = 'REAL = jax.default_backend() == "gpu"'
IDS = {"vocab_size": 517, "eos_id": 0, "pad_id": 0, "mask_id": 1, "end_ids": (0, 2), "bos_id": 3}
NARROW = {"num_layers": 1, "embed_dim": 64, "num_heads": 2, "head_dim": 32, "mlp_dim": 64, "max_length": 512}
OURS = ("dllm_jax", "convert", "samplers", "train", "evals")
TINY = {  # the same cells on less
    "convert-and-quantize": {'"float16", 16, 4': '"float16", 2, 2', "None, 128, 64": "None, 16, 16"},
    "speed-against-quality": {"PROBLEMS, HELD_OUT = 64, 128": "PROBLEMS, HELD_OUT = 16, 40"},
    "train-indicator-and-student": {"PROMPTS, STEPS, PROBLEMS = 1024, 200, 128": "PROMPTS, STEPS, PROBLEMS = 32, 4, 8"},
}
RANDOM = {"speed-against-quality": {"score=number": "score=operator:ne"}}  # any answer is right, as none would be
KINDS = ("code", "markdown")
SHOWN = ("stream", "display_data", "execute_result")  # but no error
CLAIMS = {  # what the small model's run prints
    "convert-and-quantize": r"full +\d.*right[\s\S]*int8 +\d.*right[\s\S]*int4 +\d.*right",
    "quickstart": r"#### 17[\s\S]* forwards",
    "samplers-in-your-jit": r"0\.99 .*#### 17[\s\S]*d log p",
    "speed-against-quality": r"4 programs for[\s\S]* AUP ",
    "train-indicator-and-student": r"times as fast[\s\S]*d2f, student .* forwards",
}

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The hub's cache with models such as the hub has: one narrow layer, the embedded models' vocabulary, a chat."""
    cache = tmp_path_factory.mktemp("hub")
    files = copied_files(embedded.source("word-problems"))
    tokenizer = json.loads(files["tokenizer_config.json"])
    tokenizer.pop("chat_template", None)
    files["tokenizer_config.json"] = json.dumps(tokenizer).encode()
    for name in ("fast-dllm-v2-1.5b", "llada-8b-instruct"):
        config = dllm_jax.published_config(name)
        heads = 2 if config.num_kv_heads == config.num_heads else 1
        config = config.replace(**NARROW, **IDS, num_kv_heads=heads, dtype="float32")
        checkpoint.save(cache / name, config, init_params(config, jax.random.key(0)).items(), files=files)
        repository = cache / f"models--{REPOSITORIES[name].replace('/', '--')}"
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
    """The notebook with texts replaced, each of which is there once."""
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
    notebook = changed(
        nbformat.read(path, as_version=4),
        switch | TINY.get(path.stem, {}) | (RANDOM.get(path.stem, {}) if real else {}),
    )
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert real or re.search(CLAIMS[path.stem], texts), texts


@each
def test_outputs_are_not_kept(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None and not cell.metadata
    assert sum(cell.source.count(SWITCH) for cell in notebook.cells) == 1


@each
def test_the_page_with_outputs_is_of_this_notebook(path):
    """`python -m docs.tools.notebooks docs/notebooks NAME` makes it anew."""
    kept = FOLDER.parent / "docs" / "notebooks" / path.name
    assert [sources(kept, kind) for kind in KINDS] == [sources(path, kind) for kind in KINDS]
    cells = [cell for cell in nbformat.read(kept, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert "stream" in {output.output_type for output in outputs} <= {*SHOWN}
    texts = [output.get("text", "") + output.get("data", {}).get("text/html", "") for output in outputs]
    assert not any(re.search(r"/(home|root|tmp|work)/", text) for text in texts)  # whose machine it was


@each
def test_the_first_cell_installs_what_there_is(path, tmp_path, monkeypatch):
    """A wheel next to the notebook, or else a clone there, or else the checkout around it; with CUDA where there is an
    NVIDIA GPU. A folder of the library's name is not the library."""
    cell = TransformerManager().transform_cell(sources(path)[0])
    assert cell == TransformerManager().transform_cell(sources(NOTEBOOKS[0])[0])
    asked = []

    def first_cell(folder):
        shell = SimpleNamespace(run_line_magic=lambda name, line: asked.append((name, line)))
        monkeypatch.chdir(folder)
        names = {"get_ipython": lambda: shell}
        exec(cell, names)
        return asked.pop()[1].replace("{package}", names["package"]) if asked else None

    assert first_cell(FOLDER) is None  # it is here
    find = lambda name: None if name == "samplers" else object()
    monkeypatch.setattr("importlib.util.find_spec", find)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert first_cell(FOLDER) == f'install -q "{FOLDER.parent}[evals,view]"'
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi")
    (tmp_path / "dllm_jax-0.1.0-py3-none-any.whl").touch()
    assert first_cell(tmp_path) == f'install -q "{tmp_path}/dllm_jax-0.1.0-py3-none-any.whl[cuda,evals,view]"'
    clone = tmp_path / "beside" / "dllm_jax"
    clone.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="put a wheel or a clone of dllm_jax beside this notebook"):
        first_cell(clone.parent)
    (clone / "pyproject.toml").touch()
    assert first_cell(clone.parent) == f'install -q "{clone}[cuda,evals,view]"'


@each
def test_what_both_branches_call_is_there(path):
    """Also what runs on a GPU only: modules, names, arguments of calls, models, samplers."""
    tree, names = ast.parse(python_of(path)), {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: importlib.import_module(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    checked = 0
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        dotted = ast.unparse(call.func)
        first, *rest = dotted.split(".")
        known = first in names and re.fullmatch(r"[\w.]+", dotted)
        found = functools.reduce(getattr, rest, names[first]) if known else None
        if inspect.isfunction(found) and found.__module__.split(".")[0] in OURS:
            arguments = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
            keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            inspect.signature(found).bind_partial(*arguments, **keywords)
            checked += 1
        if found in (published.load, published.install) and isinstance(call.args[0], ast.Constant):
            assert call.args[0].value in REPOSITORIES
    assert checked > 5
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in parts]
    for text in texts:
        if (
            isinstance(text, str)
            and re.fullmatch(r"[a-z0-9-]+:[a-z_]+=[^{}\s]+", text)
            and not text.startswith("text:")
        ):
            assert parse_samplers(text)
