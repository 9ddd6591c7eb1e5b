"""Conversion of the tiny checkpoints: right names and values, there and back, nothing half done, nothing forgotten."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hub_files
import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from conftest import one_error, refuses
from safetensors import safe_open

import convert
import convert.published
import dllm_jax
from convert import to_jax
from convert.__main__ import main
from convert.adapters import KERNEL, A, Adapters, B, read_adapters, save_adapters
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import FAMILIES, PUBLISHED, HubConfig
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.layers import Rope, rope_frequencies
from dllm_jax.params.specs import abstract_params, init_params

TINY = ("llada", "dream", "qwen2")  # LLaDA-MoE has its own tests in test_moe.py
ROOT = Path(__file__).parents[1]
BF16 = np.dtype(ml_dtypes.bfloat16)


def source_of(family):
    return hub_files.CHECKPOINTS / f"{family}-tiny"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The three tiny checkpoints, converted once."""
    folder = tmp_path_factory.mktemp("converted")
    for family in TINY:
        convert.convert(family, source_of(family), folder / family)
    return folder


def params_of(folder):
    return {name: np.asarray(array) for name, array in checkpoint.load_params(folder).items()}


def assert_same_params(first, second):
    first, second = params_of(first), params_of(second)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


# --- values and configs -----------------------------------------------------------------------------------------------


def test_logits_of_the_converted_llada_are_the_golden_ones(done):
    golden = np.load(hub_files.CHECKPOINTS.parent / "llada-tiny-forward.npz")
    denoiser = Denoiser(checkpoint.load_config(done / "llada"), checkpoint.load_params(done / "llada"))
    for kind in ("", "long_"):
        np.testing.assert_allclose(denoiser(golden[f"{kind}ids"]), golden[f"{kind}logits"], atol=1e-4)


@pytest.mark.parametrize("family", TINY)
def test_every_tensor_arrives(done, family):
    arrived = params_of(done / family)
    original = hub_files.tensors(source_of(family))
    assert len(arrived) == len(original)
    for slot in FAMILIES[family].layouts[0].slots(checkpoint.load_config(done / family)):
        array = arrived[slot.ours]
        np.testing.assert_array_equal(array.T if slot.transpose else array, original[slot.hub], err_msg=slot.ours)
    assert convert.verify(source_of(family), done / family) == len(original)


def test_source_notes_say_what_and_not_where(done):
    notes = checkpoint.load_source(done / "dream")
    file = source_of("dream") / "model.safetensors"
    assert notes["source"] == "dream-tiny" and notes["family"] == "dream" and notes["revision"] is None
    assert notes["config"] == json.loads((source_of("dream") / "config.json").read_text())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert notes["files"] == {"model.safetensors": {"bytes": file.stat().st_size, "sha256": digest}}
    assert str(hub_files.CHECKPOINTS.parent) not in json.dumps(notes)


def test_llada_1_5_is_llada_by_another_name(tmp_path):
    config = convert.convert("llada-1.5", source_of("llada"), tmp_path / "out")
    assert config.family == "llada"
    assert checkpoint.load_source(tmp_path / "out")["family"] == "llada-1.5"


LLADA_8B = {
    **{"architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32},
    **{"n_kv_heads": 32, "mlp_hidden_size": 12288, "vocab_size": 126464, "embedding_size": 126464, "rope": True},
    **{"max_sequence_length": 4096, "rope_theta": 500000.0, "rope_full_precision": True, "layer_norm_type": "rms"},
    **{"layer_norm_with_affine": True, "rms_norm_eps": 1e-05, "activation_type": "silu", "block_type": "llama"},
    **{"include_bias": False, "include_qkv_bias": False, "bias_for_layer_norm": False, "attention_layer_norm": False},
    **{"weight_tying": False, "scale_logits": False, "input_emb_norm": False, "alibi": False, "mlp_ratio": 4},
    **{"mask_token_id": 126336, "eos_token_id": 126081, "pad_token_id": 126081, "multi_query_attention": None},
}
DREAM_7B = {
    **{"architectures": ["DreamModel"], "model_type": "Dream", "hidden_size": 3584, "num_hidden_layers": 28},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "rope_scaling": None},
    **{"tie_word_embeddings": False, "hidden_act": "silu", "use_sliding_window": False, "sliding_window": None},
    **{"mask_token_id": 151666, "bos_token_id": 151643, "eos_token_id": 151643, "pad_token_id": 151643},
}
QWEN_05B = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24},
    **{"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936},
    **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768},
    **{"tie_word_embeddings": True, "hidden_act": "silu", "use_sliding_window": False},
    **{"bos_token_id": 151643, "eos_token_id": 151643},
}
QWEN3_8B = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288},
    **{"vocab_size": 151936, "max_position_embeddings": 32768, "max_window_layers": 36, "rms_norm_eps": 1e-06},
    **{"rope_theta": 1000000, "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu"},
    **{"use_sliding_window": False, "sliding_window": None, "attention_bias": False, "attention_dropout": 0.0},
    **{"bos_token_id": 151643, "eos_token_id": 151643},
}
LLAMA_1B = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192},
    **{"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0},
    "rope_scaling": {
        **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
        "original_max_position_embeddings": 8192,
    },
    **{"tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    **{"bos_token_id": 128000, "eos_token_id": 128001, "pretraining_tp": 1, "use_cache": True},
}
LLAMA_TOKENIZER = {"tokens": {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eot_id|>": 128009}}
QWEN_TOKENIZER = {
    "tokenizer": {"pad_token": "<|endoftext|>"},
    "tokens": {"<|endoftext|>": 151643, "<|im_end|>": 151645},
}


@pytest.mark.parametrize(
    ("family", "values", "extra", "name"),
    [
        pytest.param("llada", LLADA_8B, {}, "llada-8b-instruct", id="llada-8b"),
        pytest.param("dream", DREAM_7B, {}, "dream-7b-instruct", id="dream-7b"),
        pytest.param("qwen2", QWEN_05B, QWEN_TOKENIZER, "qwen2.5-0.5b", id="qwen2.5-0.5b"),
        pytest.param("qwen3", QWEN3_8B, QWEN_TOKENIZER, "qwen3-8b-base", id="qwen3-8b"),
        pytest.param("llama", LLAMA_1B, LLAMA_TOKENIZER, "llama-3.2-1b", id="llama-3.2-1b"),
        pytest.param(
            "qwen2",
            {**{k: v for k, v in QWEN_05B.items() if k != "rope_theta"}, "layer_types": ["full_attention"] * 24}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"generation": {"pad_token_id": 151643, "eos_token_id": [151645, 151643]}},
            "qwen2.5-0.5b",
            id="qwen2.5-0.5b saved by transformers 5",
        ),
    ],
)
def test_configs_as_published(family, values, extra, name):
    assert FAMILIES[family].read_config(HubConfig(values, "config.json", **extra)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("values", "tokens", "expected"),
    [
        pytest.param({}, {"<|eot_id|>": 126348, "<|startoftext|>": 126080}, ((126081, 126348), 126080), id="tokenizer"),
        pytest.param({}, {"<|eot_id|>": 7}, ((126081, 7), 126080), id="the tokenizer wins over the published id"),
        pytest.param({}, {"<|eot_id|>": 999999}, ((126081,), 126080), id="outside the vocabulary"),
        pytest.param({"mask_token_id": 5}, {}, ((126081,), None), id="another model of that vocabulary size"),
        pytest.param({"mask_token_id": 5, "bos_token_id": 1}, {}, ((126081,), 1), id="bos from the config"),
        pytest.param({"eos_token_id": [2, 3], "mask_token_id": 5}, {}, ((2, 3), None), id="several ends of sequence"),
        pytest.param({"n_kv_heads": None}, {}, ((126081, 126348), 126080), id="kv heads null"),
    ],
)
def test_special_ids_of_llada(values, tokens, expected):
    config = FAMILIES["llada"].read_config(HubConfig(LLADA_8B | values, "config.json", tokens=tokens))
    assert (config.end_ids, config.bos_id) == expected
    assert config.num_kv_heads == 32


@pytest.mark.parametrize("family", [*TINY, "llama"])
def test_junk_in_any_field_gives_a_config_or_a_sentence(family):
    values = {"llada": LLADA_8B, "dream": DREAM_7B, "qwen2": QWEN_05B | {"pad_token_id": 1}, "llama": LLAMA_1B}[family]
    junk = (None, True, -1, 0, 3, 1.5, float("nan"), 10**30, "x", [], [1], {}, {"rope_type": "default"})
    for name in [*values, "rope_parameters", "layer_types", "head_dim", "rope_scaling"]:
        for value in junk:
            try:
                FAMILIES[family].read_config(HubConfig(values | {name: value}, "config.json"))
            except DllmError as error:
                assert "\n" not in str(error)


def test_llama_3_turns_slow_pairs_slower():
    """Pairs that turn once or less within the original length by the factor, those that turn 4 times or more not."""
    stretched, plain = (
        np.asarray(rope_frequencies(Rope(64, 500000.0, llama3=llama3)))
        for llama3 in (PUBLISHED["llama-3.2-1b"].llama3, None)
    )
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(stretched[turns <= 1], plain[turns <= 1] / 32, rtol=1e-6)
    np.testing.assert_array_equal(stretched[turns >= 4], plain[turns >= 4])
    between = (turns > 1) & (turns < 4)
    assert between.any() and (plain[between] / 32 < stretched[between]).all() and (stretched < plain)[between].all()


def test_end_of_turn_from_tokenizer_files(tmp_path):
    source = hub_files.copy("llada-tiny", tmp_path / "source")
    (source / "meta.json").unlink()
    decoder = {
        "128": {"content": "<|endoftext|>"},
        "130": {"content": "<|eot_id|>"},
        "9": {"content": "<|startoftext|>"},
    }
    (source / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    (source / "added_tokens.json").write_text(json.dumps({"<|eot_id|>": 130}))
    config = convert.convert("llada", source, tmp_path / "out")
    assert (config.end_ids, config.bos_id) == ((128, 130), 9)


# --- files ------------------------------------------------------------------------------------------------------------


def test_sharded_and_single_file_are_the_same(done, tmp_path):
    source = hub_files.copy("llada-tiny", tmp_path / "source")
    hub_files.write_sharded(source, hub_files.tensors(source), 3)
    convert.convert("llada", source, tmp_path / "out")
    assert_same_params(done / "llada", tmp_path / "out")
    assert len(checkpoint.load_source(tmp_path / "out")["files"]) == 3


def test_data_that_is_not_aligned(done, tmp_path):
    source = hub_files.copy("llada-tiny", tmp_path / "source")
    header, data = hub_files.split(source / hub_files.SINGLE)
    text = json.dumps(header).encode()
    hub_files.join(source / hub_files.SINGLE, text + b" " * (1 + len(text) % 2), data)
    convert.convert("llada", source, tmp_path / "out")
    assert_same_params(done / "llada", tmp_path / "out")


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")],
)
def test_dtypes(tmp_path, stored, dtype):
    source = hub_files.copy("qwen2-tiny", tmp_path / "source")
    arrays = {name: array.astype(stored) for name, array in hub_files.tensors(source).items()}
    hub_files.write(source / hub_files.SINGLE, arrays)
    config = convert.convert("qwen2", source, tmp_path / "out", dtype=None if stored == dtype else dtype)
    assert config.dtype == dtype
    arrived = params_of(tmp_path / "out")
    for slot in FAMILIES["qwen2"].layouts[0].slots(config):
        array = arrived[slot.ours]
        assert array.dtype.name == dtype
        expected = arrays[slot.hub].astype(dtype)
        np.testing.assert_array_equal(array.T if slot.transpose else array, expected, err_msg=slot.ours)
    assert convert.verify(source, tmp_path / "out") == len(arrays)


def test_blocks_cover_a_tensor(tmp_path, monkeypatch):
    from convert import safetensors_reader, tensors

    array = np.arange(7 * 6, dtype=np.float32).reshape(7, 6)
    hub_files.write(tmp_path / "one.safetensors", {"w": array, "v": array[0]})
    entries = safetensors_reader.read_header(tmp_path / "one.safetensors")
    for max_bytes in (1, 24, 50, 100, 1000):
        monkeypatch.setattr(tensors, "blocks", lambda entry, n=max_bytes: safetensors_reader.blocks(entry, n))
        found = tensors.load([tensors.Piece(entries["w"], transpose=True)], (6, 7), array.dtype)
        np.testing.assert_array_equal(found, array.T)
        np.testing.assert_array_equal(tensors.load([tensors.Piece(entries["v"])], (6,), array.dtype), array[0])


def test_a_stored_copy_of_a_tied_head_and_frequencies_are_harmless(done, tmp_path):
    source = hub_files.copy("qwen2-tiny", tmp_path / "source")
    arrays = hub_files.tensors(source)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    hub_files.write(source / hub_files.SINGLE, arrays)
    convert.convert("qwen2", source, tmp_path / "out")
    assert_same_params(done / "qwen2", tmp_path / "out")


def test_a_tied_llada(tmp_path):
    source = hub_files.copy("llada-tiny", tmp_path / "source")
    hub_files.edit_json(source / "config.json", weight_tying=True)
    arrays = hub_files.tensors(source)
    del arrays["model.transformer.ff_out.weight"]
    hub_files.write(source / hub_files.SINGLE, arrays)
    assert convert.convert("llada", source, tmp_path / "out").tied_embeddings
    assert "lm_head.kernel" not in checkpoint.stored_params(tmp_path / "out")


def test_tokenizer_files_come_along_and_code_does_not(tmp_path):
    source = hub_files.copy("llada-tiny", tmp_path / "source")
    plain = {
        "vocab.json": "{}",
        "merges.txt": "#version",
        "chat_template.jinja": "{{ x }}",
        "generation_config.json": "{}",
    }
    unwanted = {"modeling_llada.py": "boom()", "tokenizer.pkl": "x", "pytorch_model.bin": "x", "README.md": "x"}
    for name, content in (plain | unwanted).items():
        (source / name).write_text(content)
    convert.convert("llada", source, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *plain,
        *("config.json", "generation.json", "source.json", "params", "meta.json"),
    }
    assert (tmp_path / "out" / "merges.txt").read_text() == "#version"


# --- back to the hub --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TINY)
def test_there_and_back(done, tmp_path, family):
    source, out = source_of(family), tmp_path / "hub"
    convert.export(done / family, out)
    with safe_open(out / "model.safetensors", framework="np") as file:  # the format's own reader
        assert file.metadata() == {"format": "pt"}
        exported = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    original = hub_files.tensors(source)
    assert exported.keys() == original.keys()
    for name, array in original.items():
        np.testing.assert_array_equal(exported[name], array, err_msg=name)
    for name in ("config.json", "meta.json"):
        assert json.loads((out / name).read_text()) == json.loads((source / name).read_text())
    convert.convert(family, out, tmp_path / "again")
    assert_same_params(done / family, tmp_path / "again")
    assert checkpoint.load_config(tmp_path / "again") == checkpoint.load_config(done / family)


def test_export_in_shards_and_another_dtype(done, tmp_path):
    convert.export(done / "dream", tmp_path / "hub", dtype="bfloat16", max_shard_bytes=400_000)
    index = json.loads((tmp_path / "hub" / hub_files.INDEX).read_text())
    shards = sorted(path.name for path in (tmp_path / "hub").glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 3 and set(index["weight_map"].values()) == set(shards)
    for shard in shards:
        assert (tmp_path / "hub" / shard).stat().st_size < 410_000
        assert all(index["weight_map"][name] == shard for name in hub_files.read(tmp_path / "hub" / shard))
    original = hub_files.tensors(source_of("dream"))
    exported = hub_files.tensors(tmp_path / "hub")
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in exported.values())
    assert exported.keys() == original.keys()
    for name, array in original.items():
        np.testing.assert_array_equal(exported[name], array.astype(BF16), err_msg=name)
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert convert.verify(tmp_path / "hub", done_as(tmp_path, "dream", tmp_path / "hub")) == len(original)


def done_as(tmp_path, family, source):
    convert.convert(family, source, tmp_path / "converted")
    return tmp_path / "converted"


SMALL = dict(vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48) | dict(
    max_length=64, eos_id=1, pad_id=2, end_ids=(1, 3), dtype="float32"
)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(PUBLISHED["llada-8b-base"].replace(**SMALL, mask_id=5, bos_id=6), id="llada"),
        pytest.param(
            PUBLISHED["llada-8b-base"].replace(**SMALL, mask_id=5, bos_id=None, tied_embeddings=True), id="tied"
        ),
        pytest.param(PUBLISHED["dream-7b-base"].replace(**SMALL, mask_id=5, bos_id=6), id="dream"),
        pytest.param(PUBLISHED["qwen2.5-7b"].replace(**SMALL | {"head_dim": 16}), id="qwen2 with wide heads"),
    ],
)
def test_a_checkpoint_that_was_trained_here_goes_to_the_hub_and_back(tmp_path, config: ModelConfig):
    import jax

    checkpoint.save(tmp_path / "trained", config, init_params(config, jax.random.key(0)).items())
    convert.export(tmp_path / "trained", tmp_path / "hub")
    convert.convert(config.family, tmp_path / "hub", tmp_path / "again")
    assert checkpoint.load_config(tmp_path / "again") == config
    assert_same_params(tmp_path / "trained", tmp_path / "again")


def test_an_original_config_that_is_no_longer_true_is_not_exported(done, tmp_path):
    params = params_of(done / "llada")
    config = checkpoint.load_config(done / "llada").replace(max_length=1024)
    notes = checkpoint.load_source(done / "llada")
    checkpoint.save(tmp_path / "trained", config, params.items(), source=notes)
    convert.export(tmp_path / "trained", tmp_path / "hub")
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["max_sequence_length"] == 1024


@pytest.mark.parametrize("name", ["llada-8b-base", "llada-moe-7b-a1b-base", "dream-7b-base", "qwen2.5-0.5b"])
def test_every_parameter_has_one_place_in_every_layout(name):
    """The slots' pieces cover each parameter exactly once, and no two tensors share a name."""
    config = PUBLISHED[name].replace(num_layers=11)
    shapes = {ours: array.shape for ours, array in abstract_params(config).items()}
    for layout in FAMILIES[config.family].layouts:
        slots = list(layout.slots(config))
        assert len({slot.hub for slot in slots}) == len(slots)
        covered = {
            ours: np.zeros(shape[:1] + tuple(min(size, 2) for size in shape[1:])) for ours, shape in shapes.items()
        }
        for slot in slots:
            for index in slot.pieces:
                covered[slot.ours][index] += 1
            assert np.prod(slot.shape) * len(slots_of(slots, slot.ours)) == np.prod(shapes[slot.ours])
        assert all((counts == 1).all() for counts in covered.values())


@pytest.mark.parametrize("name", ["sdar-8b-chat", "sdar-30b-a3b-chat", "llada2.0-mini", "llada-moe-7b-a1b-base"])
def test_the_usual_layout_is_one_that_holds_the_model(name, tmp_path):
    """So that exports need no --layout, and adapters of attention have places beside experts."""
    config = PUBLISHED[name].replace(num_layers=2)
    assert FAMILIES[config.family].layout(None, config).holds(config)
    kernel = next(name for name in abstract_params(config) if name.startswith("layers.1.attn") and KERNEL in name)
    rows, columns = abstract_params(config)[kernel].shape
    stem = kernel.removesuffix(KERNEL)
    values = {f"{stem}{A}": np.ones((rows, 2), np.float32), f"{stem}{B}": np.ones((2, columns), np.float32)}
    save_adapters(tmp_path / "adapters", config, Adapters(values, rank=2, alpha=4, base="base"))
    again = read_adapters(tmp_path / "adapters", config)
    assert again.kernels == (kernel,) and again.values.keys() == values.keys()


def slots_of(slots, ours):
    return [slot for slot in slots if slot.ours == ours]


# --- verification -----------------------------------------------------------------------------------------------------


def test_verify_finds_one_flipped_bit(tmp_path):
    convert.convert("llada", source_of("llada"), tmp_path / "out")
    kernel = dict(checkpoint.iter_params(tmp_path / "out", ["layers.0.attn.q_proj.kernel"]))
    wanted = kernel["layers.0.attn.q_proj.kernel"].tobytes()
    (file,) = [
        path for path in (tmp_path / "out" / "params").rglob("*") if path.is_file() and wanted in path.read_bytes()
    ]
    content = bytearray(file.read_bytes())
    content[content.find(wanted) + 1000] ^= 1
    file.write_bytes(content)
    with refuses("layers.0.attn.q_proj.kernel", "1 of 16384"):
        convert.verify(source_of("llada"), tmp_path / "out")


def test_verify_with_files_that_are_damaged_or_of_another_source(done, tmp_path):
    source = hub_files.copy("llada-tiny", tmp_path / "source")
    arrays = {name: array.copy() for name, array in hub_files.tensors(source).items()}
    for index in range(4):
        arrays[f"model.transformer.blocks.{index}.ff_norm.weight"][3] *= 1.5
    hub_files.write(source / hub_files.SINGLE, arrays)
    with refuses("1 of 128", "1 more"):
        convert.verify(source, done / "llada")
    hub_files.edit_json(source / "config.json", rope_theta=1e4, n_layers=4)
    with refuses("rope_theta"):
        convert.verify(source, done / "llada")
    convert.convert("qwen2", source_of("qwen2"), tmp_path / "out")
    for path in (tmp_path / "out" / "params").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:100])
    with refuses(str(tmp_path / "out")):
        convert.verify(source_of("qwen2"), tmp_path / "out")
    with refuses("llada", "qwen2"):
        convert.verify(source_of("llada"), tmp_path / "out")


# --- interruptions ----------------------------------------------------------------------------------------------------

SLOW = """
import sys, time
from convert import to_jax
from convert.__main__ import main
from convert.adapters import KERNEL, A, Adapters, B, read_adapters, save_adapters
from dllm_jax.checkpoints import checkpoint

checkpoint.GROUP_BYTES, load = 1, to_jax.load
to_jax.load = lambda *args, **options: (time.sleep(0.2), load(*args, **options))[1]
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.processes
def test_a_killed_run_leaves_nothing_and_can_be_started_again(tmp_path):
    out = tmp_path / "out"
    arguments = ["llada", "--source", str(source_of("llada")), "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-c", SLOW, *arguments], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.partial/params*")) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.glob(".out.partial/params*")) and not out.exists()
    assert main(arguments) == 0
    assert convert.verify(source_of("llada"), out) == 39
    assert os.listdir(tmp_path) == ["out"]


def test_an_interrupted_run_cleans_up(tmp_path, monkeypatch, capsys):
    load, calls = to_jax.load, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return load(*args, **options)

    monkeypatch.setattr(to_jax, "load", interrupted)
    monkeypatch.setattr(checkpoint, "GROUP_BYTES", 1)
    assert main(["llada", "--source", str(source_of("llada")), "--out", str(tmp_path / "out")]) == 130
    assert os.listdir(tmp_path) == []
    assert "interrupted" in capsys.readouterr().err


def test_overwriting_keeps_the_old_checkpoint_until_the_new_one_is_there(done, tmp_path, monkeypatch):
    convert.convert("llada", source_of("llada"), tmp_path / "out")
    broken = hub_files.copy("llada-tiny", tmp_path / "broken")
    arrays = {name: array.copy() for name, array in hub_files.tensors(broken).items()}
    arrays["model.transformer.ln_f.weight"][0] = np.nan
    hub_files.write(broken / hub_files.SINGLE, arrays)
    with refuses("NaN"):
        convert.convert("llada", broken, tmp_path / "out", overwrite=True)
    assert_same_params(done / "llada", tmp_path / "out")
    convert.convert("qwen2", source_of("qwen2"), tmp_path / "out", overwrite=True)
    assert_same_params(done / "qwen2", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["broken", "out"]


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_a_repository_id_is_downloaded(tmp_path, monkeypatch):
    asked = {}

    def download(repository, *, revision, allow_patterns):
        asked.update(repository=repository, revision=revision, patterns=allow_patterns)
        return str(hub_files.copy("llada-tiny", tmp_path / "snapshots" / "0123abcd"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    convert.convert("llada", "someone/llada-tiny", tmp_path / "out", revision="main")
    assert (asked["repository"], asked["revision"]) == ("someone/llada-tiny", "main")
    assert set(asked["patterns"]) == {"*.safetensors", "*.json", "*.txt", "*.jinja"}
    notes = checkpoint.load_source(tmp_path / "out")
    assert (notes["source"], notes["revision"]) == ("someone/llada-tiny", "0123abcd")


def test_published_models_are_there_by_name(tmp_path, monkeypatch, capsys):
    """Downloaded and converted once; in float16 on a GPU that has no bfloat16."""
    asked = []

    def download(repository, **_):
        asked.append(repository)
        return str(source_of("llada"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path))
    for _ in range(2):
        model = convert.published.load("llada-8b-instruct")
        assert model.folder == tmp_path / "llada-8b-instruct" and model.params["embed.embedding"].dtype == "float32"
        assert main(["published", "llada-8b-instruct", "--quantize", "int8", "--no-progress"]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'llada-8b-instruct-int8'}\n"
        assert asked == ["GSAI-ML/LLaDA-8B-Instruct"] * 2
    assert checkpoint.load_config(tmp_path / "llada-8b-instruct-int8").quantize == "int8"
    with refuses("int8"):
        convert.published.install("llada-8b-instruct", tmp_path / "llada-8b-instruct-int8")
    with refuses("'llada'"):
        convert.published.load("llada")
    convert.convert("llada", source_of("llada"), tmp_path / "dream-7b-base", dtype="bfloat16")
    assert convert.published.load("dream-7b-base").params["embed.embedding"].dtype == "bfloat16"
    monkeypatch.setattr(dllm_jax.checkpoints.loading, "before_ampere", lambda: True)
    loaded = dllm_jax.load("dream-7b-base")
    assert loaded.denoiser.dtype == "float16" == loaded.params["embed.embedding"].dtype
    assert convert.published.load("dream-7b-base").params["embed.embedding"].dtype == "float16"
    assert convert.published.load("dream-7b-base", dtype="float32").params["embed.embedding"].dtype == "float32"
    assert convert.published.load("llada-8b-instruct").params["embed.embedding"].dtype == "float32"


def test_published_models_are_their_familys():
    for family in FAMILIES.values():
        for model in family.published.values():
            assert (model.config.family, model.config.attention) == (family.name, family.attention)


# --- the command line -------------------------------------------------------------------------------------------------


def test_command_line(tmp_path, capsys):
    source, out, hub = str(source_of("qwen2")), str(tmp_path / "out"), str(tmp_path / "hub")
    assert main(["qwen2", "--source", source, "--out", out, "--dtype", "bfloat16", "--no-progress"]) == 0
    assert main(["verify", "--source", source, "--checkpoint", out]) == 0
    assert main(["export", "--checkpoint", out, "--out", hub, "--max-shard-size", "100KB", "--dtype", "float32"]) == 0
    printed = capsys.readouterr()
    assert "107,584 parameters in bfloat16" in printed.out and "all 26 tensors" in printed.out
    assert printed.err == ""
    assert len(list(Path(hub).glob("*.safetensors"))) > 3
    assert main(["qwen2", "--source", source, "--out", out]) == 2
    assert out in one_error(capsys)
    assert main(["qwen2", "--source", source, "--out", out, "--overwrite"]) == 0
