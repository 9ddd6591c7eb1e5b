"""`dllm_jax.load`: what a checkpoint folder becomes, where its arrays land, and the sentence for every mistake."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses
from jax.sharding import PartitionSpec as P
from train_toys import LLADA

import dllm_jax
from dllm_jax.checkpoints import checkpoint
from dllm_jax.params.specs import init_params
from dllm_jax.text.tokenizer import ASCII_VOCAB

SIZES = {"vocab_size": 136, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 4, "mlp_dim": 64, "max_length": 64}
CONFIG = LLADA.replace(**SIZES, eos_id=128, pad_id=128, mask_id=129, bos_id=None, end_ids=(128, 131))
META = {"vocab": ASCII_VOCAB, "eos_id": 128, "mask_id": 129, "eot_id": 131}


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def saved(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("home") / "tiny"
    checkpoint.save(folder, CONFIG, params.items(), files={"meta.json": json.dumps(META).encode()})
    return folder


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of the checkpoint that a test may damage."""
    import shutil

    return Path(shutil.copytree(saved, tmp_path / "broken"))


def write_config(folder, **changes):
    values = {**json.loads(CONFIG.to_json()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "gone"}))


def test_a_checkpoint_loads_whole(saved, params):
    model = dllm_jax.load(saved)
    assert (model.config, model.name, model.folder) == (CONFIG, "tiny", saved)
    assert model.params.keys() == params.keys()
    for name, array in params.items():
        np.testing.assert_array_equal(model.params[name], array)
        assert model.params[name].dtype == jnp.float32
    assert model.tokenizer.encode("Hi<|mask|>") == [72, 105, 129]
    assert "embed.embedding" not in repr(model)  # eight billion numbers would not help anybody


def test_a_name_is_looked_up_at_home(saved, monkeypatch):
    monkeypatch.setenv("DLLM_JAX_HOME", str(saved.parent))
    assert dllm_jax.load("tiny").folder == saved


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype("bfloat16")])
def test_dtypes_are_cast(saved, params, dtype):
    model = dllm_jax.load(saved, dtype=dtype)
    assert {array.dtype for array in model.params.values()} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(model.params["embed.embedding"], params["embed.embedding"].astype(jnp.bfloat16))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_a_mesh_gets_its_shards(saved, params):
    mesh = dllm_jax.make_mesh(fsdp=2, tensor=4)
    model = dllm_jax.load(saved, mesh=mesh)
    wanted = dllm_jax.param_shardings(CONFIG, mesh)
    for name, array in model.params.items():
        assert array.sharding == wanted[name], name
        np.testing.assert_array_equal(array, params[name])
    kernel = model.params["layers.0.attn.q_proj.kernel"]
    assert len(kernel.addressable_shards) == 8
    assert kernel.addressable_shards[0].data.size == kernel.size // 8  # heads over tensor, width over fsdp


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_rules_change_the_shards(saved):
    mesh = dllm_jax.make_mesh(tensor=2)
    model = dllm_jax.load(saved, mesh=mesh, rules=dllm_jax.ShardingRules(vocab=None))
    assert model.params["embed.embedding"].sharding.spec == P(None, None)
    assert model.params["layers.0.attn.q_proj.kernel"].sharding.spec == P(None, "tensor")


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_a_mesh_that_does_not_divide_is_refused(saved):
    with refuses("3 devices"):
        dllm_jax.load(saved, mesh=dllm_jax.make_mesh(tensor=3))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_heads_are_split_whole():
    """Eight devices divide the 3584 columns of Dream's queries and the 512 of its keys, but not its heads."""
    config, mesh = dllm_jax.published_config("dream-7b-instruct"), dllm_jax.make_mesh(tensor=8)
    for rules, heads in ((dllm_jax.ShardingRules(), "28"), (dllm_jax.ShardingRules(heads=None), "kv_heads of 4")):
        with refuses(heads, "8 devices"):
            dllm_jax.param_shardings(config, mesh, rules)
    four = dllm_jax.param_shardings(config, dllm_jax.make_mesh(tensor=4))
    assert four["layers.0.attn.k_proj.kernel"].spec == P(None, "tensor")


def test_a_checkpoint_without_tokenizer(broken):
    (broken / "meta.json").unlink()
    model = dllm_jax.load(broken)
    assert model.tokenizer is None
    with refuses("broken", "tokenizer.json"):
        model.require_tokenizer()
    (broken / "tokenizer.json").write_text("{")
    with refuses("broken"):
        dllm_jax.load(broken)


@pytest.mark.parametrize(
    ("name", "file", "folder"),
    [
        ("merge-lora", "adapter_config.json", None),
        ("model", "run.json", "model"),
        ("adapters", "run.json", "adapters"),
        ("run", "run.json", None),
    ],
)
def test_folders_of_training_say_which_folder_is_meant(tmp_path, name, file, folder):
    (tmp_path / file).touch()
    if folder:
        (tmp_path / folder).mkdir()
    with refuses(str(tmp_path), name):
        dllm_jax.load(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[]", b'{"model_type": "llada"}', None])
def test_a_broken_config(broken, content):
    (broken / "config.json").unlink()
    if content is not None:
        (broken / "config.json").write_bytes(content)
    with refuses("config.json"):
        dllm_jax.load(broken)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("['mlp_dim', 'rope_theta']", {"mlp_dim": "gone", "rope_theta": "gone"}),
        ("['depth']", {"depth": 4}),
        ("experts", {"experts": 4}),
        ("['dim', 'per_token']", {"experts": {"num_experts": 4}}),
        ("clip_qkv", {"clip_qkv": "8"}),
        ("num_layers", {"num_layers": "two"}),
        ("shift", {"shift": "false"}),
        ("rope_theta", {"rope_theta": float("nan")}),
        ("mask_id", {"mask_id": True}),
        ("end_ids", {"end_ids": [1.5]}),
        ("vocab_size", {"vocab_size": 0}),
        ("'int8'", {"dtype": "int8"}),
        ("missing layers.2", {"num_layers": 3}),
        ("unexpected layers.1", {"num_layers": 1}),
        ("128", {"mlp_dim": 128}),
    ],
)
def test_a_config_that_does_not_fit(broken, name, changes):
    write_config(broken, **changes)
    with refuses(name):
        dllm_jax.load(broken)


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt"])
def test_params_without_one_of_their_files(broken, name):
    (broken / "params" / name).unlink()
    with refuses("params"):
        dllm_jax.load(broken)


def test_params_with_cut_data(broken):
    largest = max((path for path in (broken / "params").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    with refuses("params"):
        dllm_jax.load(broken)


@pytest.mark.parametrize("dtype", ["float8", "float64", "int8", "bf16"])
def test_unknown_dtypes(saved, dtype):
    with refuses(dtype):
        dllm_jax.load(saved, dtype=dtype)
    with refuses(dtype):
        dllm_jax.random_model(CONFIG, dtype=dtype)


def test_random_models_follow_their_key(params):
    model = dllm_jax.random_model(CONFIG, dtype="float32")
    assert (model.config, model.name, model.folder, model.tokenizer) == (CONFIG, "random", None, None)
    np.testing.assert_array_equal(model.params["embed.embedding"], params["embed.embedding"])
    other = dllm_jax.random_model(CONFIG, key=jax.random.key(1), dtype="bfloat16")
    assert other.params["embed.embedding"].dtype == jnp.bfloat16
    assert not np.array_equal(other.params["embed.embedding"], params["embed.embedding"])


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_random_models_on_a_mesh(params):
    mesh = dllm_jax.make_mesh(tensor=4)
    model = dllm_jax.random_model(CONFIG, mesh=mesh)
    for name, sharding in dllm_jax.param_shardings(CONFIG, mesh).items():
        assert model.params[name].sharding == sharding
        np.testing.assert_array_equal(model.params[name], params[name])


def test_importing_is_light():
    """No backend is started, no array made, and the slow packages wait until a checkpoint is read."""
    code = (
        "import sys, dllm_jax;"
        "heavy = {'orbax', 'orbax.checkpoint', 'transformers', 'torch', 'tensorstore'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    environment = os.environ | {"JAX_PLATFORMS": "none"}  # which starting a backend would fail at
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=Path(dllm_jax.__file__).parents[1])


def test_the_public_names_exist():
    assert all(hasattr(dllm_jax, name) for name in dllm_jax.__all__)
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert dllm_jax.__version__ == project["version"]
