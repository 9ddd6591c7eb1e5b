"""Broken, hostile and unsupported checkpoints: each is refused in one sentence, and nothing is left behind."""

import errno
import json
import shutil
import struct
import subprocess
import sys
from collections import namedtuple

import hub_files
import huggingface_hub
import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from conftest import one_error, refuses

import convert
from convert.__main__ import main
from convert.safetensors_reader import DTYPES, read_header
from dllm_jax.checkpoints import checkpoint
from dllm_jax.errors import DllmError

Q_PROJ = "model.transformer.blocks.1.q_proj.weight"
HEAD = "model.transformer.ff_out.weight"
GATE = "model.layers.1.mlp.experts.5.gate_proj.weight"


def weights(change):
    """A breaker that changes the dict of tensors."""

    def breaker(folder):
        arrays = {name: array.copy() for name, array in hub_files.tensors(folder).items()}
        change(arrays)
        hub_files.write(folder / hub_files.SINGLE, arrays)

    return breaker


def index_entry(name, shard):
    """A breaker that makes two shards and says that a tensor lies in another file."""
    return sharded(lambda folder, weight_map: weight_map.update({name: shard}))


def value(number, dtype="float32", name=HEAD):
    """A breaker that stores all tensors as `dtype` and puts one bad value into the last place of one."""

    def change(arrays):
        arrays.update({other: array.astype(dtype) for other, array in arrays.items()})
        arrays[name][-1, -1] = number

    return weights(change)


def header(change):
    """A breaker that changes the header and leaves the data."""

    def breaker(folder):
        values, data = hub_files.split(folder / hub_files.SINGLE)
        values.pop("__metadata__", None)
        change(values)
        hub_files.join(folder / hub_files.SINGLE, values, data)

    return breaker


def entry(**changes):
    """A breaker that changes the header's entry of one tensor."""
    return header(lambda values: values[Q_PROJ].update(changes))


def config(**changes):
    """A breaker that changes config.json; `...` removes a field."""
    return lambda folder: hub_files.edit_json(folder / "config.json", **changes)


def content(name, data):
    """A breaker that replaces a file."""
    return lambda folder: (folder / name).write_bytes(data)


def sharded(change):
    """A breaker that makes two shards and changes the index."""

    def breaker(folder):
        hub_files.write_sharded(folder, hub_files.tensors(folder), 2)
        index = json.loads((folder / hub_files.INDEX).read_text())
        change(folder, index["weight_map"])
        (folder / hub_files.INDEX).write_text(json.dumps(index))

    return breaker


def replace_weights(name):
    """A breaker that leaves only a file of another kind."""
    return lambda folder: (folder / hub_files.SINGLE).rename(folder / name)


def truncated(folder):
    file = folder / hub_files.SINGLE
    file.write_bytes(file.read_bytes()[:-1000])


def truncated_shard(folder):
    hub_files.write_sharded(folder, hub_files.tensors(folder), 2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def overlap(values):
    values[Q_PROJ]["data_offsets"] = values["model.transformer.blocks.0.q_proj.weight"]["data_offsets"]


def doubled_tensor(folder, weight_map):
    first, second = sorted(set(weight_map.values()))
    arrays = hub_files.read(folder / second)
    name = next(name for name, shard in weight_map.items() if shard == first)
    hub_files.write(folder / second, arrays | {name: hub_files.read(folder / first)[name]})


def moved_tensor(folder, weight_map):
    weight_map[Q_PROJ] = next(shard for shard in weight_map.values() if shard != weight_map[Q_PROJ])


def disagreeing_tokens(folder):
    content("added_tokens.json", b'{"<|eot_id|>": 3}')(folder)
    content("tokenizer.json", b'{"added_tokens": [{"content": "<|eot_id|>", "id": 4}]}')(folder)


def nothing(folder):
    """A breaker that leaves everything as it is, for a family that the checkpoint is not of."""


def one_layer_fused(arrays):
    for kind in ("gate", "up", "down"):
        for e in range(8):
            del arrays[f"model.layers.1.mlp.experts.{e}.{kind}_proj.weight"]
    fused_layer(arrays, 1)


def fused_layer(arrays, layer):
    arrays[f"model.layers.{layer}.mlp.w1"] = np.zeros((8, 256, 128), np.float32)
    arrays[f"model.layers.{layer}.mlp.w2"] = np.zeros((8, 128, 128), np.float32)


SAFETENSORS = hub_files.SINGLE
BLOCKS = "model.transformer.blocks"
BIAS = "model.layers.0.mlp.expert_bias"
INSIDE_MLP = "model.layers.0.mlp.shared_expert.up_proj.weight"
LLADA = [  # what the sentence names, and how the checkpoint is broken
    (Q_PROJ, weights(lambda a: a.pop(Q_PROJ))),
    ("and 17 more", weights(lambda a: [a.pop(n) for n in list(a)[:20]])),
    ("model.extra", weights(lambda a: a.update({"model.extra": a[HEAD]}))),
    ("ln_f.bias", weights(lambda a: a.update({"model.transformer.ln_f.bias": a[HEAD][0]}))),
    (f"{BLOCKS}.3.", config(n_layers=3)),
    (f"{BLOCKS}.4.", config(n_layers=5)),
    ("2000000000 layers", config(n_layers=2_000_000_000)),
    ("[135, 128]", weights(lambda a: a.update({HEAD: a[HEAD][:-1]}))),
    ("[128, 136]", weights(lambda a: a.update({HEAD: a[HEAD].T.copy()}))),
    (f"{BLOCKS}.01", weights(lambda a: a.update({Q_PROJ.replace("1", "01"): a[Q_PROJ]}))),
    ("int32", weights(lambda a: a.update({Q_PROJ: a[Q_PROJ].astype("int32")}))),
    (f"{HEAD} contains NaN", value(np.nan)),
    (f"{HEAD} contains NaN", value(np.nan, ml_dtypes.bfloat16)),
    (f"{HEAD} contains infinity", value(-np.inf)),
    (f"{HEAD} contains infinity", value(np.inf, "float16")),
    (HEAD, weights(lambda a: a.pop(HEAD))),
    ("wte.weight", config(weight_tying=True)),
    # safetensors files
    (SAFETENSORS, truncated),
    ("00002-of-00002.safetensors", truncated_shard),
    (SAFETENSORS, content(SAFETENSORS, b"")),
    (SAFETENSORS, content(SAFETENSORS, struct.pack("<Q", 1 << 40) + b"{}")),
    (SAFETENSORS, content(SAFETENSORS, struct.pack("<Q", 4) + b"\xff{]}")),
    (SAFETENSORS, content(SAFETENSORS, struct.pack("<Q", 2) + b"[]")),
    ("Git LFS", content(SAFETENSORS, b"version https://git-lfs.github.com/spec/v1\n")),
    ("q_proj.weight", header(overlap)),  # either of the two
    (SAFETENSORS, header(lambda v: v.pop(Q_PROJ))),
    (SAFETENSORS, lambda folder: (folder / SAFETENSORS).open("ab").write(b"more")),
    (SAFETENSORS, entry(data_offsets=[1 << 40, (1 << 40) + 65536])),
    (Q_PROJ, entry(data_offsets=[65536, 0])),
    (SAFETENSORS, entry(data_offsets=[-65536, 0])),
    (SAFETENSORS, entry(shape=[128, 127])),
    (SAFETENSORS, entry(shape="128x128")),
    (SAFETENSORS, entry(shape=[128, True, 128])),
    (SAFETENSORS, entry(shape=[1 << 60, 1 << 60])),
    ("F33", entry(dtype="F33")),
    ("'F4'", entry(dtype="F4", shape=[256, 512])),
    ("data_offsets", header(lambda v: v[Q_PROJ].pop("data_offsets"))),
    ("'a\\nb'", header(lambda v: v.update({"a\nb": v.pop(Q_PROJ)}))),
    # the index
    ("../outside", index_entry(HEAD, "../outside.safetensors")),
    ("/etc/passwd", index_entry(HEAD, "/etc/passwd")),
    ("pytorch_model.bin", index_entry(HEAD, "pytorch_model.bin")),
    ("model-9.safetensors", index_entry(HEAD, "model-9.safetensors")),
    ("two files", sharded(doubled_tensor)),
    (Q_PROJ, sharded(moved_tensor)),
    ("model.ghost", index_entry("model.ghost", "model-00001-of-00002.safetensors")),
    (Q_PROJ, sharded(lambda f, m: m.pop(Q_PROJ))),
    (hub_files.INDEX, content(hub_files.INDEX, b"?")),
    (hub_files.INDEX, content(hub_files.INDEX, b"{}")),
    (hub_files.INDEX, content(hub_files.INDEX, b'{"weight_map": {}}')),
    (hub_files.INDEX, content(hub_files.INDEX, b'{"weight_map": {"a": 1}}')),
    ("both", content(hub_files.INDEX, b'{"weight_map": {"a": "b.safetensors"}}')),
    # folders and other files
    ("pytorch_model.bin", replace_weights("pytorch_model.bin")),
    ("weights.pth", replace_weights("weights.pth")),
    (SAFETENSORS, lambda folder: (folder / SAFETENSORS).unlink()),
    ("config.json", emptied),
    ("config.json", lambda folder: (folder / "config.json").unlink()),
    *(("config.json", content("config.json", data)) for data in (b"{", b"\xff\xfe\x00", b"[]")),
    ("GPT9", config(architectures=["GPT9"])),
    ("gpt9", config(architectures=None, model_type="gpt9")),
    ("use dream", config(architectures=["DreamModel"])),
    ("another tokenizer file", disagreeing_tokens),
    ("added tokens", content("tokenizer.json", b'{"added_tokens": [7]}')),
    ("generation_config.json", content("generation_config.json", b"?")),
]
QWEN2 = [
    ("sliding_window", config(use_sliding_window=...)),
    ("lm_head.weight", config(tie_word_embeddings=False)),
    (
        "model.embed_tokens.weight",
        weights(lambda a: a.update({"lm_head.weight": a["model.embed_tokens.weight"] + 1})),
    ),
    ("layers.1.self_attn.k_proj.bias", weights(lambda a: a.pop("model.layers.1.self_attn.k_proj.bias"))),
]
LLADA_MOE = [
    (GATE, weights(lambda a: a.pop(GATE))),
    ("layers.2.mlp.gate", weights(lambda a: a.pop("model.layers.2.mlp.gate.weight"))),
    ("and 69 more", weights(lambda a: [a.pop(name) for name in list(a) if "experts" in name])),
    ("mlp.experts.8.gate", weights(lambda a: a.update({GATE.replace(".5.", ".8."): a[GATE]}))),
    ("two layouts", weights(one_layer_fused)),
    ("two layouts", weights(lambda a: fused_layer(a, 0))),
    ("[127, 128]", weights(lambda a: a.update({GATE: a[GATE][:-1]}))),
    ("mlp.experts.05", weights(lambda a: a.update({GATE.replace(".5.", ".05."): a[GATE]}))),
    ("int32", weights(lambda a: a.update({GATE: a[GATE].astype("int32")}))),
    (f"{GATE} contains NaN", value(np.nan, name=GATE)),
    (INSIDE_MLP, weights(lambda a: a.update({INSIDE_MLP: a[GATE]}))),
    (BIAS, weights(lambda a: a.update({BIAS: np.zeros(8, np.float32)}))),
    (BIAS, config(moe_router_enable_expert_bias=True)),
    ("layers.0.shared_expert", config(shared_expert_intermediate_size=64)),
    ("layers.0.mlp.experts.0.", config(moe_layer_freq=[0, 1, 1])),
    ("[9, 128]", config(num_experts=9)),
    ("2000000000 experts", config(num_experts=2_000_000_000)),
    ("2000000000", config(num_hidden_layers=2_000_000_000)),
    (SAFETENSORS, truncated),
    ("num_experts 8", config(num_experts_per_tok=9)),
    ("use llada", config(architectures=["LLaDAModelLM"])),
]
# Values of config.json that are not implemented, missing or impossible; the sentence names the field.
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}
LLADA_FIELDS = [
    *({name: True} for name in ("alibi", "include_bias", "include_qkv_bias", "attention_layer_norm", "input_emb_norm")),
    *({name: True} for name in ("scale_logits", "multi_query_attention")),
    *({name: ...} for name in ("rope_theta", "rms_norm_eps", "mask_token_id", "n_kv_heads", "scale_logits")),
    *({"rope": False}, {"rope": 1}, {"rope_scaling": {"type": "linear", "factor": 2}}, {"activation_type": "gelu"}),
    *({"layer_norm_type": "default"}, {"block_type": "sequential"}, {"embedding_size": 256}, {"pad_token_id": ...}),
    *({"n_layers": "4"}, {"n_heads": 4.5}, {"n_heads": 3}, {"rope_theta": -1.0}, {"eos_token_id": "</s>"}),
]
QWEN2_FIELDS = [
    *({"use_sliding_window": True}, {"hidden_act": "gelu"}, {"rope_scaling": YARN}, {"rope_parameters": {}}),
    *({"tie_word_embeddings": ...}, {"head_dim": 15}),
]
MOE_FIELDS = [
    *({"router_num_group": 4}, {"router_topk_group": 2}, {"moe_router_score_function": "sigmoid"}),
    *({"norm_topk_prob": True}, {"routed_scaling_factor": 2.5}, {"attention_bias": True}, {"hidden_act": "gelu"}),
    *({"partial_rotary_factor": 0.5}, {"rope_scaling": YARN}, {"rope_theta": -1}, {"rope_theta": ...}),
    *({"num_experts": ...}, {"mask_token_id": ...}, {"moe_layer_freq": [1, 1]}, {"moe_layer_freq": [0, 0, 0]}),
]


def broken_fields(fields):
    return [(name, config(**field)) for field in fields for name in field]


BROKEN = {  # a family and a checkpoint
    ("llada", "llada-tiny"): [*LLADA, *broken_fields(LLADA_FIELDS)],
    ("qwen2", "qwen2-tiny"): [*QWEN2, *broken_fields(QWEN2_FIELDS), ('"yarn"', config(rope_parameters=YARN))],
    ("llada-moe", "lladamoe-tiny"): [*LLADA_MOE, *broken_fields(MOE_FIELDS)],
    ("dream", "dream-tiny"): broken_fields([{"mask_token_id": ...}]),
    ("dream", "qwen2-tiny"): [("qwen2 checkpoint, not dream", nothing)],
    ("llada", "lladamoe-tiny"): [("use llada-moe", nothing), ("use llada-moe", config(architectures=...))],
}


def refused(arguments, capsys):
    """Runs the command line, which must fail; its one sentence."""
    assert main(arguments) == 2
    return one_error(capsys)


def check_refused(family, checkpoint, name, breaker, tmp_path, capsys, *options):
    """Converting a broken copy of a checkpoint fails with a sentence that has the name, and leaves nothing."""
    source, out = hub_files.copy(checkpoint, tmp_path / "source"), tmp_path / "out"
    breaker(source)
    assert name in refused([family, "--source", str(source), "--out", str(out), *options], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("family", "checkpoint", "name", "breaker"),
    [
        pytest.param(*kind, *row, id=f"{'-'.join(kind)}-{i}-{row[0][:30]}")
        for kind, rows in BROKEN.items()
        for i, row in enumerate(rows)
    ],
)
def test_broken_checkpoints(family, checkpoint, name, breaker, tmp_path, capsys):
    check_refused(family, checkpoint, name, breaker, tmp_path, capsys)


@pytest.mark.parametrize(
    ("dtype", "name", "breaker"),
    [
        ("float64", "'float64'", nothing),
        ("float16", HEAD, value(70000.0)),
        ("float16", HEAD, value(1e6, ml_dtypes.bfloat16)),
        ("bfloat16", HEAD, value(3.4e38)),
    ],
)
def test_dtypes_that_do_not_fit(dtype, name, breaker, tmp_path, capsys):
    check_refused("llada", "llada-tiny", name, breaker, tmp_path, capsys, "--dtype", dtype)


def test_mixed_dtypes(tmp_path, capsys):
    breaker = weights(lambda arrays: arrays.update({HEAD: arrays[HEAD].astype("float16")}))
    check_refused("llada", "llada-tiny", "float16, float32", breaker, tmp_path, capsys)


# --- outputs ----------------------------------------------------------------------------------------------------------

LLADA_TINY = str(hub_files.CHECKPOINTS / "llada-tiny")


def test_output_that_exists(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    sentence = refused(["llada", "--source", LLADA_TINY, "--out", str(tmp_path / "out")], capsys)
    assert "--overwrite" in sentence


def test_output_below_a_file_or_in_its_place(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    for out, options in (("file/out", ()), ("file/deeper/out", ()), ("file", ("--overwrite",))):
        sentence = refused(["llada", "--source", LLADA_TINY, "--out", str(tmp_path / out), *options], capsys)
        assert str(tmp_path / "file") in sentence
    assert (tmp_path / "file").read_text() == "kept"


def test_overwriting_something_else(tmp_path, capsys):
    source = hub_files.copy("llada-tiny", tmp_path / "home" / "source")
    (tmp_path / "home" / "thesis.txt").write_text("kept")
    for out in (tmp_path / "home", source):
        sentence = refused(["llada", "--source", str(source), "--out", str(out), "--overwrite"], capsys)
        assert str(out) in sentence
    sentence = refused(["llada", "--source", LLADA_TINY, "--out", str(tmp_path / "home"), "--overwrite"], capsys)
    assert str(tmp_path / "home") in sentence
    assert (tmp_path / "home" / "thesis.txt").read_text() == "kept"
    assert sorted(path.name for path in source.iterdir()) == ["config.json", "meta.json", hub_files.SINGLE]


def test_a_disk_that_is_too_small(tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 9 * 10**8, 10**6))
    sentence = refused(["llada", "--source", LLADA_TINY, "--out", str(tmp_path / "below" / "out")], capsys)
    assert "0.07 GB" in sentence
    assert not list(tmp_path.iterdir())


def full_disk(*args, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fills_up(tmp_path, capsys, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    convert.convert("llada", LLADA_TINY, tmp_path / "done")
    save, calls = ocp.partial.save, []

    def fills_up(*args, **options):
        calls.append(args)
        return full_disk() if len(calls) == 3 else save(*args, **options)

    monkeypatch.setattr(ocp.partial, "save", fills_up)
    monkeypatch.setattr(checkpoint, "GROUP_BYTES", 1)
    sentence = refused(["llada", "--source", LLADA_TINY, "--out", str(tmp_path / "out")], capsys)
    assert "is full" in sentence
    monkeypatch.setattr("convert.to_hub._write_tensor", full_disk)
    arguments = ["export", "--checkpoint", str(tmp_path / "done"), "--out", str(tmp_path / "hub")]
    assert "is full" in refused(arguments, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_a_write_that_really_fails(tmp_path):
    """The kernel refuses files above half a megabyte: what a full disk looks like from within Orbax."""
    limited = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)); "
        "runpy.run_module('convert', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", limited, "llada", "--source", LLADA_TINY, "--out", str(tmp_path / "out")]
    root = hub_files.CHECKPOINTS.parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ") and str(tmp_path / "out") in run.stderr
    assert run.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --- arguments --------------------------------------------------------------------------------------------------------

OUT = ["--out", "{out}"]
ARGUMENTS = [
    ("COMMAND", []),
    ("'gpt9'", ["gpt9"]),
    ("--source", ["llada", *OUT]),
    ("--fast", ["llada", "--source", LLADA_TINY, *OUT, "--fast"]),
    ("/no/such/folder", ["llada", "--source", "/no/such/folder", *OUT]),
    ("is a file", ["llada", "--source", f"{LLADA_TINY}/config.json", *OUT]),
    ("repository", ["llada", "--source", LLADA_TINY, *OUT, "--revision", "x"]),
    ("/no/such", ["export", "--checkpoint", "/no/such", *OUT]),
    (LLADA_TINY, ["export", "--checkpoint", LLADA_TINY, *OUT]),
    (LLADA_TINY, ["verify", "--source", LLADA_TINY, "--checkpoint", LLADA_TINY]),
]


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS)
def test_arguments(name, arguments, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert name in refused([out if argument == "{out}" else argument for argument in arguments], capsys)
    assert not list(tmp_path.iterdir())


def test_a_download_that_fails(tmp_path, capsys, monkeypatch):
    def fails(*args, **options):
        raise OSError("could not connect\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    sentence = refused(["llada", "--source", "someone/model", "--out", str(tmp_path / "out")], capsys)
    assert "could not connect" in sentence


def test_python_functions_refuse_in_the_same_way(tmp_path):
    with refuses("'gpt9'", "llada-1.5"):
        convert.convert("gpt9", LLADA_TINY, tmp_path / "out")
    with refuses("'int8'"):
        convert.convert("llada", LLADA_TINY, tmp_path / "out", dtype="int8")


def test_exports_that_cannot_be(tmp_path, capsys):
    done, out = tmp_path / "done", str(tmp_path / "hub")
    config = convert.convert("llada", LLADA_TINY, done)
    arguments = ["export", "--checkpoint", str(done), "--out", out]
    assert "'5 parsecs'" in refused([*arguments, "--max-shard-size", "5 parsecs"], capsys)
    assert "0 bytes" in refused([*arguments, "--max-shard-size", "0GB"], capsys)
    assert "'int4'" in refused([*arguments, "--dtype", "int4"], capsys)
    assert str(done) in refused([*arguments[:-1], str(done), "--overwrite"], capsys)

    params = dict(checkpoint.iter_params(done))
    params["final_norm.scale"] = np.full_like(params["final_norm.scale"], np.nan)
    checkpoint.save(tmp_path / "nan", config, params.items())
    arguments[2] = str(tmp_path / "nan")
    assert "final_norm.scale" in refused(arguments, capsys)

    wider = config.replace(head_dim=16)
    checkpoint.save(tmp_path / "wide", wider, narrowed(params, 64).items())
    arguments[2] = str(tmp_path / "wide")
    assert "head_dim 16" in refused(arguments, capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done", "nan", "wide"]


INPUT_KERNELS = ("q_proj.kernel", "k_proj.kernel", "v_proj.kernel")


def narrowed(params, width):
    """Attention with fewer columns: heads of half the size."""
    inputs = {name: array[:, :width] for name, array in params.items() if name.endswith(INPUT_KERNELS)}
    return params | inputs | {name: array[:width] for name, array in params.items() if name.endswith("o_proj.kernel")}


# --- any bytes --------------------------------------------------------------------------------------------------------

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3))
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES]) | JSON,
        "shape": st.lists(st.integers(0, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | JSON,
    },
)


def check_reader(path):
    """The reader's promise: entries that lie one after another inside the file, or a sentence."""
    try:
        entries = read_header(path)
    except DllmError as error:
        assert "\n" not in str(error)
        return
    for entry in entries.values():
        assert entry.nbytes == int(np.prod(entry.shape, dtype=object)) * entry.dtype.itemsize
    assert sum(entry.nbytes for entry in entries.values()) <= path.stat().st_size


@hypothesis.given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    check_reader(path)


@hypothesis.given(st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=3) | JSON, st.integers(0, 64))
def test_any_header(tmp_path_factory, values, size):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    hub_files.join(path, values if isinstance(values, dict) else json.dumps(values).encode(), b"x" * size)
    check_reader(path)
