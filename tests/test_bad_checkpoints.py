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

import convert
from convert.__main__ import main
from convert.safetensors_reader import DTYPES, read_header
from dllm_jax.checkpoints import checkpoint
from dllm_jax.errors import DllmError

Q_PROJ = "model.transformer.blocks.1.q_proj.weight"
HEAD = "model.transformer.ff_out.weight"


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


def duplicate_key(folder):
    values, data = hub_files.split(folder / hub_files.SINGLE)
    text = json.dumps(values)
    hub_files.join(folder / hub_files.SINGLE, (text[:-1] + f', "{HEAD}": {json.dumps(values[HEAD])}}}').encode(), data)


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


BREAKAGES = [
    # tensors
    ("missing tensor", weights(lambda a: a.pop(Q_PROJ)), f"missing {Q_PROJ}"),
    ("many missing tensors", weights(lambda a: [a.pop(n) for n in list(a) if ".2." in n]), "blocks.2.ff_norm"),
    ("extra tensor", weights(lambda a: a.update({"model.extra": a[HEAD]})), "unexpected model.extra"),
    (
        "bias",
        weights(lambda a: a.update({"model.transformer.ln_f.bias": a[HEAD][0]})),
        "unexpected model.transformer.ln_f",
    ),
    ("more layers than the config", config(n_layers=3), "unexpected model.transformer.blocks.3."),
    ("fewer layers than the config", config(n_layers=5), "missing model.transformer.blocks.4."),
    ("absurdly many layers", config(n_layers=2_000_000_000), "39 tensors, too few for the 2000000000 layers"),
    ("misshapen tensor", weights(lambda a: a.update({HEAD: a[HEAD][:-1]})), "has shape [135, 128], not [136, 128]"),
    (
        "transposed tensor",
        weights(lambda a: a.update({HEAD: a[HEAD].T.copy()})),
        "has shape [128, 136], not [136, 128]",
    ),
    (
        "leading zero",
        weights(lambda a: a.update({Q_PROJ.replace("1", "01"): a[Q_PROJ]})),
        "unexpected model.transformer",
    ),
    ("integer tensor", weights(lambda a: a.update({Q_PROJ: a[Q_PROJ].astype("int32")})), "is stored as int32"),
    ("several faults", weights(lambda a: [a.pop(n) for n in list(a)[:20]]), "and 17 more"),
    ("NaN", value(np.nan), f"tensor {HEAD} contains NaN"),
    ("infinity", value(-np.inf), f"tensor {HEAD} contains infinity"),
    ("NaN in bfloat16", value(np.nan, ml_dtypes.bfloat16), f"tensor {HEAD} contains NaN"),
    ("infinity in float16", value(np.inf, "float16"), f"tensor {HEAD} contains infinity"),
    ("untied but missing head", weights(lambda a: a.pop(HEAD)), f"missing {HEAD}"),
    (
        "tied but another head",
        config(weight_tying=True),
        "differs from model.transformer.wte.weight although the config",
    ),
    # safetensors files
    ("truncated file", truncated, "is damaged: it is truncated"),
    ("truncated shard", truncated_shard, "00002-of-00002.safetensors is damaged: it is truncated"),
    ("empty file", content(hub_files.SINGLE, b""), "is damaged: its header claims 0 bytes"),
    (
        "header longer than the file",
        content(hub_files.SINGLE, struct.pack("<Q", 1 << 40) + b"{}"),
        "claims 1099511627776",
    ),
    ("header that is not JSON", content(hub_files.SINGLE, struct.pack("<Q", 4) + b"\xff{]}"), "its header is not JSON"),
    ("header that is a list", content(hub_files.SINGLE, struct.pack("<Q", 2) + b"[]"), "is not a JSON object"),
    (
        "git lfs pointer",
        content(hub_files.SINGLE, b"version https://git-lfs.github.com/spec/v1\n"),
        "a Git LFS pointer",
    ),
    ("overlapping offsets", header(overlap), "overlap those of another tensor"),
    ("bytes of no tensor", header(lambda v: v.pop(Q_PROJ)), "unaccounted bytes before"),
    ("bytes after the last tensor", lambda f: (f / hub_files.SINGLE).open("ab").write(b"more"), "belong to no tensor"),
    ("offsets outside the file", entry(data_offsets=[1 << 40, (1 << 40) + 65536]), "unaccounted bytes before"),
    ("offsets backwards", entry(data_offsets=[65536, 0]), "has -65536 bytes, but its shape and dtype need 65536"),
    ("negative offsets", entry(data_offsets=[-65536, 0]), "are not lists of sizes"),
    ("size that does not fit the shape", entry(shape=[128, 127]), "but its shape and dtype need 65024"),
    ("shape that is no list", entry(shape="128x128"), "are not lists of sizes"),
    ("shape with a boolean", entry(shape=[128, True, 128]), "are not lists of sizes"),
    ("absurd shape", entry(shape=[1 << 60, 1 << 60]), "but its shape and dtype need"),
    ("unknown dtype", entry(dtype="F33"), "the dtype 'F33' of model.transformer.blocks.1.q_proj.weight is unknown"),
    ("entry without offsets", header(lambda v: v[Q_PROJ].pop("data_offsets")), "without dtype, shape and data_offsets"),
    ("line break in a name", header(lambda v: v.update({"a\nb": v.pop(Q_PROJ)})), "names a tensor 'a\\nb'"),
    ("tensor twice in the header", duplicate_key, "its header names a tensor twice"),
    # the index
    ("index with a file outside", index_entry(HEAD, "../outside.safetensors"), "'../outside.safe"),
    ("index with an absolute path", index_entry(HEAD, "/etc/passwd"), "not a safetensors file inside"),
    ("index with a pickle", index_entry(HEAD, "pytorch_model.bin"), "not a safetensors file inside"),
    ("index with a missing file", index_entry(HEAD, "model-9.safetensors"), "missing from the folder"),
    ("tensor in two shards", sharded(doubled_tensor), "is in two files of"),
    ("tensor in the other shard", sharded(moved_tensor), "does not say so"),
    ("tensor in no shard", index_entry("model.ghost", "model-00001-of-00002.safetensors"), "promises 'model.ghost'"),
    ("tensor not in the index", sharded(lambda f, m: m.pop(Q_PROJ)), "does not say so"),
    ("index that is not JSON", content(hub_files.INDEX, b"?"), "is not a readable index"),
    ("index without a map", content(hub_files.INDEX, b"{}"), "is not a readable index"),
    ("index of nothing", content(hub_files.INDEX, b'{"weight_map": {}}'), "lists no tensors"),
    (
        "index of numbers",
        content(hub_files.INDEX, b'{"weight_map": {"a": 1}}'),
        "does not map tensor names to file names",
    ),
    (
        "index beside another single file",
        content(hub_files.INDEX, b'{"weight_map": {"a": "b.safetensors"}}'),
        "holds both",
    ),
    # folders
    ("pickle only", replace_weights("pytorch_model.bin"), "holds only pickled weights (pytorch_model.bin)"),
    ("pth only", replace_weights("weights.pth"), "holds only pickled weights (weights.pth)"),
    ("no weights", lambda f: (f / hub_files.SINGLE).unlink(), "has neither model.safetensors nor"),
    ("empty folder", emptied, "config.json is missing"),
    # config.json
    ("missing config.json", lambda f: (f / "config.json").unlink(), "config.json is missing"),
    ("config.json that is not JSON", content("config.json", b"{"), "config.json is not valid JSON"),
    ("config.json that is not text", content("config.json", b"\xff\xfe\x00"), "config.json is not valid JSON"),
    ("config.json that is a list", content("config.json", b"[]"), "config.json holds no JSON object"),
    (
        "unknown architecture",
        config(architectures=["GPT9"]),
        "architecture 'GPT9' is not supported; supported are LLaDA",
    ),
    ("unknown model type", config(architectures=None, model_type="gpt9"), "model_type 'gpt9' is not supported"),
    (
        "another family",
        config(architectures=["DreamModel"]),
        "belongs to a dream checkpoint, not llada; use dream instead",
    ),
    ("alibi", config(alibi=True), "alibi = true is not implemented, only false"),
    ("no rope", config(rope=False), "rope = false is not implemented, only true"),
    ("rope scaling", config(rope_scaling={"type": "linear", "factor": 2}), 'rope_scaling = {"type": "linear"'),
    ("biases", config(include_bias=True), "include_bias = true is not implemented"),
    ("qkv biases", config(include_qkv_bias=True), "include_qkv_bias = true is not implemented"),
    ("QK norm", config(attention_layer_norm=True), "attention_layer_norm = true is not implemented"),
    ("embedding norm", config(input_emb_norm=True), "input_emb_norm = true is not implemented"),
    ("scaled logits", config(scale_logits=True), "scale_logits = true is not implemented"),
    ("another activation", config(activation_type="gelu"), 'activation_type = "gelu" is not implemented, only "silu"'),
    ("another norm", config(layer_norm_type="default"), 'layer_norm_type = "default" is not implemented, only "rms"'),
    ("another block", config(block_type="sequential"), 'block_type = "sequential" is not implemented, only "llama"'),
    ("multi-query attention", config(multi_query_attention=True), "multi_query_attention = true is not implemented"),
    ("padded embedding", config(embedding_size=256), "embedding_size = 256 is not implemented, only null or 136"),
    ("one instead of true", config(rope=1), "rope = 1 is not implemented, only true"),
    ("missing rope_theta", config(rope_theta=...), "lacks the field rope_theta, which decides results"),
    ("missing rms_norm_eps", config(rms_norm_eps=...), "lacks the field rms_norm_eps"),
    ("missing mask token", config(mask_token_id=...), "lacks the field mask_token_id"),
    ("missing kv heads", config(n_kv_heads=...), "lacks the field n_kv_heads"),
    ("missing switch", config(scale_logits=...), "lacks the field scale_logits"),
    ("missing pad token", config(pad_token_id=...), "pad_token_id is None, but must be a token id"),
    ("text for a number", config(n_layers="4"), "n_layers is '4', but must be an integer from 1"),
    ("fraction for a number", config(n_heads=4.5), "n_heads is 4.5, but must be an integer"),
    ("negative theta", config(rope_theta=-1.0), "rope_theta is -1.0, but must be a positive number"),
    ("heads that do not divide the width", config(n_heads=3), "d_model 128 is not a multiple of n_heads 3"),
    ("kv heads that do not divide the heads", config(n_kv_heads=3), "num_heads 4 is not a multiple of num_kv_heads 3"),
    ("mask token outside the vocabulary", config(mask_token_id=136), "mask_id 136 lies outside the vocabulary of 136"),
    ("end of sequence that is text", config(eos_token_id="</s>"), "eos_token_id is '</s>', but must be a token id"),
    # tokenizer files
    ("tokenizer files that disagree", disagreeing_tokens, "another tokenizer file says 3"),
    ("malformed added tokens", content("tokenizer.json", b'{"added_tokens": [7]}'), "added tokens of"),
    (
        "generation config that is not JSON",
        content("generation_config.json", b"?"),
        "generation_config.json is not valid",
    ),
]


def refused(arguments, capsys):
    """Runs the command line, which must fail; its one sentence."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.endswith("\n") and printed.err.count("\n") == 1
    return printed.err


def table(rows):
    return [pytest.param(*row[1:], id=row[0]) for row in rows]


def check_refused(family, name, breaker, sentence, tmp_path, capsys, *options):
    source, out = hub_files.copy(name, tmp_path / "source"), tmp_path / "out"
    breaker(source)
    assert sentence in refused([family, "--source", str(source), "--out", str(out), *options], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("breaker", "sentence"), table(BREAKAGES))
def test_broken_llada(breaker, sentence, tmp_path, capsys):
    check_refused("llada", "llada-tiny", breaker, sentence, tmp_path, capsys)


QWEN2_BREAKAGES = [
    ("sliding window on", config(use_sliding_window=True), "use_sliding_window = true is not implemented, only false"),
    ("sliding window unsaid", config(use_sliding_window=...), "sliding_window = 512 is not implemented, only null"),
    ("sliding layers", config(layer_types=["sliding_attention"] * 2), "implemented only as full_attention"),
    ("another activation", config(hidden_act="gelu"), 'hidden_act = "gelu" is not implemented, only "silu"'),
    ("yarn", config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), 'rope_scaling = {"rope_type": "yarn"'),
    ("yarn of transformers 5", config(rope_parameters={"rope_type": "yarn", "rope_theta": 1.0}), 'rope_type = "yarn"'),
    ("empty rope_parameters", config(rope_parameters={}), "rope_parameters lacks the field rope_type"),
    ("unknown tying", config(tie_word_embeddings=...), "lacks the field tie_word_embeddings"),
    ("untied without a head", config(tie_word_embeddings=False), "missing lm_head.weight"),
    (
        "tied with another head",
        weights(lambda a: a.update({"lm_head.weight": a["model.embed_tokens.weight"] + 1})),
        "lm_head.weight differs from model.embed_tokens.weight although the config ties them",
    ),
    (
        "missing bias",
        weights(lambda a: a.pop("model.layers.1.self_attn.k_proj.bias")),
        "missing model.layers.1.self_attn.k_proj.bias",
    ),
    ("odd heads", config(head_dim=15), "head_dim 15 is odd"),
]


@pytest.mark.parametrize(("breaker", "sentence"), table(QWEN2_BREAKAGES))
def test_broken_qwen2(breaker, sentence, tmp_path, capsys):
    check_refused("qwen2", "qwen2-tiny", breaker, sentence, tmp_path, capsys)


def test_dream_without_a_mask_token(tmp_path, capsys):
    breaker = config(mask_token_id=...)
    check_refused("dream", "dream-tiny", breaker, "lacks the field mask_token_id", tmp_path, capsys)


def test_qwen2_is_not_dream(tmp_path, capsys):
    check_refused("dream", "qwen2-tiny", lambda folder: None, "qwen2 checkpoint, not dream", tmp_path, capsys)


def test_llada_moe_is_not_llada_although_it_says_so(tmp_path, capsys):
    sentence = "belongs to a llada-moe checkpoint, not llada; use llada-moe instead"
    check_refused("llada", "lladamoe-tiny", lambda folder: None, sentence, tmp_path, capsys)
    (tmp_path / "second").mkdir()
    check_refused("llada", "lladamoe-tiny", config(architectures=...), sentence, tmp_path / "second", capsys)


DTYPES_REFUSED = [
    ("unknown", "float64", lambda folder: None, "dtype 'float64' is not supported; use bfloat16, float16 or float32"),
    ("float32 too large", "float16", value(70000.0), f"tensor {HEAD} has values too large for float16; choose --dtype"),
    (
        "bfloat16 too large",
        "float16",
        value(1e6, ml_dtypes.bfloat16),
        f"tensor {HEAD} has values too large for float16",
    ),
    ("largest float32", "bfloat16", value(3.4e38), f"tensor {HEAD} has values too large for bfloat16"),
]


@pytest.mark.parametrize(("dtype", "breaker", "sentence"), table(DTYPES_REFUSED))
def test_dtypes_that_do_not_fit(dtype, breaker, sentence, tmp_path, capsys):
    check_refused("llada", "llada-tiny", breaker, sentence, tmp_path, capsys, "--dtype", dtype)


def test_mixed_dtypes(tmp_path, capsys):
    breaker = weights(lambda arrays: arrays.update({HEAD: arrays[HEAD].astype("float16")}))
    check_refused("llada", "llada-tiny", breaker, "mixes the dtypes float16, float32; say which", tmp_path, capsys)


# --- outputs ----------------------------------------------------------------------------------------------------------

LLADA = str(hub_files.CHECKPOINTS / "llada-tiny")


def test_output_that_exists(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    sentence = refused(["llada", "--source", LLADA, "--out", str(tmp_path / "out")], capsys)
    assert "exists already; choose another --out, or pass --overwrite" in sentence


def test_output_below_a_file_or_in_its_place(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    for out, options in (("file/out", ()), ("file/deeper/out", ()), ("file", ("--overwrite",))):
        sentence = refused(["llada", "--source", LLADA, "--out", str(tmp_path / out), *options], capsys)
        assert "is not a folder" in sentence or "is a file; choose a folder" in sentence
    assert (tmp_path / "file").read_text() == "kept"


def test_overwriting_something_else(tmp_path, capsys):
    source = hub_files.copy("llada-tiny", tmp_path / "home" / "source")
    (tmp_path / "home" / "thesis.txt").write_text("kept")
    for out in (tmp_path / "home", source):
        sentence = refused(["llada", "--source", str(source), "--out", str(out), "--overwrite"], capsys)
        assert "holds the source" in sentence
    sentence = refused(["llada", "--source", LLADA, "--out", str(tmp_path / "home"), "--overwrite"], capsys)
    assert "holds something other than a checkpoint and is not overwritten" in sentence
    assert (tmp_path / "home" / "thesis.txt").read_text() == "kept"
    assert sorted(path.name for path in source.iterdir()) == ["config.json", "meta.json", hub_files.SINGLE]


def test_a_disk_that_is_too_small(tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 9 * 10**8, 10**6))
    sentence = refused(["llada", "--source", LLADA, "--out", str(tmp_path / "below" / "out")], capsys)
    assert "needs 0.07 GB and its disk has 0.00 GB free" in sentence
    assert not list(tmp_path.iterdir())


def full_disk(*args, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fills_up(tmp_path, capsys, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    convert.convert("llada", LLADA, tmp_path / "done")
    save, calls = ocp.partial.save, []

    def fills_up(*args, **options):
        calls.append(args)
        return full_disk() if len(calls) == 3 else save(*args, **options)

    monkeypatch.setattr(ocp.partial, "save", fills_up)
    monkeypatch.setattr(checkpoint, "GROUP_BYTES", 1)
    sentence = refused(["llada", "--source", LLADA, "--out", str(tmp_path / "out")], capsys)
    assert "is full; free space or choose another output folder (nothing was left behind)" in sentence
    monkeypatch.setattr("convert.to_hub._write_tensor", full_disk)
    arguments = ["export", "--checkpoint", str(tmp_path / "done"), "--out", str(tmp_path / "hub")]
    assert "is full; free space or choose another output folder" in refused(arguments, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_a_write_that_really_fails(tmp_path):
    """The kernel refuses files above half a megabyte: what a full disk looks like from within Orbax."""
    limited = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)); "
        "runpy.run_module('convert', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", limited, "llada", "--source", LLADA, "--out", str(tmp_path / "out")]
    root = hub_files.CHECKPOINTS.parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {tmp_path / 'out'} could not be written (File too large)")
    assert run.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --- arguments --------------------------------------------------------------------------------------------------------

ARGUMENTS = [
    ("no command", [], "the following arguments are required: COMMAND"),
    ("unknown command", ["gpt9"], "invalid choice: 'gpt9'"),
    ("no source", ["llada", "--out", "{out}"], "the following arguments are required: --source"),
    ("unknown option", ["llada", "--source", LLADA, "--out", "{out}", "--fast"], "unrecognized arguments: --fast"),
    (
        "no such folder",
        ["llada", "--source", "/no/such/folder", "--out", "{out}"],
        "there is no folder /no/such/folder",
    ),
    (
        "a file",
        ["llada", "--source", f"{LLADA}/config.json", "--out", "{out}"],
        "is a file; give the folder that holds",
    ),
    (
        "folder with a revision",
        ["llada", "--source", LLADA, "--out", "{out}", "--revision", "x"],
        "is for repository ids",
    ),
    ("no checkpoint", ["export", "--checkpoint", "/no/such", "--out", "{out}"], "no checkpoint at /no/such"),
    ("hub format", ["export", "--checkpoint", LLADA, "--out", "{out}"], "is not a converted checkpoint"),
    ("verify without one", ["verify", "--source", LLADA, "--checkpoint", LLADA], "is not a converted checkpoint"),
]


@pytest.mark.parametrize(("arguments", "sentence"), table(ARGUMENTS))
def test_arguments(arguments, sentence, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert sentence in refused([out if argument == "{out}" else argument for argument in arguments], capsys)
    assert not list(tmp_path.iterdir())


def test_a_download_that_fails(tmp_path, capsys, monkeypatch):
    def fails(*args, **options):
        raise OSError("could not connect\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    sentence = refused(["llada", "--source", "someone/model", "--out", str(tmp_path / "out")], capsys)
    assert "downloading it from the hub failed (could not connect); check the name" in sentence


def test_python_functions_refuse_in_the_same_way(tmp_path):
    with pytest.raises(
        DllmError, match="no family is called 'gpt9'; choose one of llada, llada-1.5, llada-moe, llada2, dream, "
    ):
        convert.convert("gpt9", LLADA, tmp_path / "out")
    with pytest.raises(DllmError, match="dtype 'int8' is not supported"):
        convert.convert("llada", LLADA, tmp_path / "out", dtype="int8")


def test_exports_that_cannot_be(tmp_path, capsys):
    done, out = tmp_path / "done", str(tmp_path / "hub")
    config = convert.convert("llada", LLADA, done)
    arguments = ["export", "--checkpoint", str(done), "--out", out]
    assert "'5 parsecs' is not a size" in refused([*arguments, "--max-shard-size", "5 parsecs"], capsys)
    assert "must be positive" in refused([*arguments, "--max-shard-size", "0GB"], capsys)
    assert "dtype 'int4' is not supported" in refused([*arguments, "--dtype", "int4"], capsys)
    assert "holds the source" in refused([*arguments[:-1], str(done), "--overwrite"], capsys)

    params = dict(checkpoint.iter_params(done))
    params["final_norm.scale"] = np.full_like(params["final_norm.scale"], np.nan)
    checkpoint.save(tmp_path / "nan", config, params.items())
    arguments[2] = str(tmp_path / "nan")
    assert "tensor final_norm.scale contains NaN" in refused(arguments, capsys)

    wider = config.replace(head_dim=16)
    checkpoint.save(tmp_path / "wide", wider, narrowed(params, 64).items())
    arguments[2] = str(tmp_path / "wide")
    assert "head_dim 16 is not embed_dim / num_heads" in refused(arguments, capsys)
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
