"""`--explain`: settings come from where they are said to, and runs take what it prints."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import dllm_jax
from dllm_jax import FunctionDenoiser
from dllm_jax.checkpoints.loading import load_shapes
from dllm_jax.cli import docs
from dllm_jax.models.kv_cache import LayerKV
from dllm_jax.models.transformer import num_params
from dllm_jax.params.quantized import num_bytes
from samplers import CACHES, RULES, BlockSampler, Smoothing, make_sampler, rules, sample_jit
from samplers.cli import sample as cli
from samplers.config.costs import costs_of
from samplers.config.explain import format_bytes, list_settings
from samplers.config.presets import PRESETS, paper_of
from samplers.config.registry import LOOPS, fields_of
from samplers.config.sampler_config import defaults_of, read_options
from samplers.tokens.predictions import Sampling

KINDS = {**RULES, **CACHES, **LOOPS, "sampler": BlockSampler, "draws": Sampling, "smoothing": Smoothing}
PROMPT = "Q: Tom has 12 books. Tom buys 23.\nA: "


@pytest.fixture
def explain(capsys, monkeypatch, llada_tiny):
    """Explains a run of the tiny LLaDA, of which no parameter may be read: (status, standard output and error)."""
    monkeypatch.setattr(dllm_jax, "load", pytest.fail)
    monkeypatch.setattr(dllm_jax.checkpoints.checkpoint, "load_params", pytest.fail)

    def call(*arguments):
        status = cli.main(["--explain", *arguments, "--model", str(llada_tiny.folder)])
        return status, *capsys.readouterr()

    return call


def rows_of(model, name=None, **said):
    config = read_options(name, said, defaults_of(model), "the command line").over(defaults_of(model))
    return {row.name: row for row in list_settings(config)}


# Meanings


@pytest.mark.parametrize("name", KINDS)
def test_every_option_says_what_it_is(name):
    about, kind = docs.attributes(KINDS[name]), KINDS[name].__name__
    for field in fields_of(KINDS[name]):
        assert about.get(field.name, docs.About()).meaning, f"the docstring of {kind} lacks {field.name}"


def test_every_preset_names_its_paper():
    assert all("arXiv" in paper_of(name) for name in PRESETS)


NOTHING = dllm_jax.Model(dllm_jax.published_config("sdar-1.7b-chat"), {}, None, "nothing")


# Origins


def test_settings_come_from_whom_they_are_said_by(llada_tiny):
    model = dataclasses.replace(llada_tiny, generation={"gen_length": 48, "temperature": 0.5})
    found = rows_of(model, "eb", gamma="0.25", cache="vicinity", warmup="2")
    origin = lambda name: (found[name].value, found[name].origin)
    assert origin("rule") == ("eb", "the command line") and origin("gamma") == ("0.25", "the command line")
    assert origin("proxy") == ("entropy", "default of eb") and origin("after_look") == ("16", "default of vicinity")
    assert origin("gen_length") == ("48", "generation.json") and origin("temperature") == ("0.5", "generation.json")
    assert origin("block_length") == ("32", "the library")
    assert origin("guidance") == ("none", "the library")
    assert not any(name.startswith("smoothing_") for name in found)


def test_presets_models_and_parts_of_their_own(llada_tiny):
    found = rows_of(dataclasses.replace(llada_tiny, generation={}), "llada-moe-cache", threshold="0.7")
    assert found["threshold"][1:3] == ("0.7", "the command line")
    assert found["warmup"][1:] == ("4", "preset llada-moe-cache")
    assert found["smoothing_weight"][1:3] == ("0.3", "preset llada-moe-cache")
    blocks = rows_of(NOTHING)
    assert blocks["cache"][1:3] == ("exact", "the model")
    assert rows_of(NOTHING, "llada")["steps"].value == "256"
    loop = rows_of(llada_tiny, "d2f", rule="topk", k="2")
    assert loop["sampler"][1:3] == ("d2f", "the command line") and loop["k"][1:3] == ("2", "the command line")
    assert loop["tau_add"].origin == "default of d2f"


# Costs

LENGTHS = {"gen_length": 24, "block_length": 8}


@pytest.mark.parametrize(
    "rule",
    [rules.TopK(3), rules.LLaDA(12), rules.LLaDA(3), rules.Dream(12), rules.Dream(12, alg="origin")]
    + [rules.Threshold(0.9), rules.Edit(0.2, 0.1, max_post_steps=3), rules.Remask(12), rules.Dynamic(0.9, steps=2)],
    ids=lambda rule: type(rule).__name__,
)
@pytest.mark.parametrize("sure", [0.0, 3.0, 30.0])
def test_forwards_lie_within_what_was_told(rule, sure):
    """Of models that know nothing, something, and everything."""
    logits = sure * jax.random.normal(jax.random.key(0), (64, 16)).at[:, :2].set(-9.0)  # neither mask nor end
    denoiser = FunctionDenoiser(_looked_up, 0, 1, logits, 16)
    result = sample_jit(BlockSampler(rule, **LENGTHS), denoiser, jnp.full((3, 5), 7), key=jax.random.key(1))
    least, most = BlockSampler(rule, **LENGTHS).forwards(5)
    assert least <= int(result.nfe.min()) and int(result.nfe.max()) <= most
    if isinstance(rule, rules.TopK | rules.LLaDA):
        assert least == most


def _looked_up(logits, tokens, lengths):
    return jnp.broadcast_to(logits[: tokens.shape[1]], (*tokens.shape, 16))


@pytest.mark.parametrize("spec", ["d2f:tau_add=0.5", "d2f:in_flight=1,tau_add=0.2", "leftright:tokens_per_step=5"])
def test_loops_of_their_own_keep_to_it_too(llada_tiny, spec):
    shape = {"gen_length": 24} if spec.startswith("leftright") else LENGTHS
    sampler = make_sampler(llada_tiny, spec, ignore_eos=True, **shape)
    result = sample_jit(sampler, llada_tiny.denoiser, jnp.arange(14).reshape(2, 7), jnp.asarray([7, 3]))
    assert sampler.forwards(7)[0] <= int(result.nfe.min()) and int(result.nfe.max()) <= sampler.forwards(7)[1]


@pytest.mark.parametrize(
    "spec, positions",
    [
        ("threshold:cache=dual", (8, 56)),
        ("threshold:cache=vicinity", (40, 56)),
        ("threshold:cache=none", (56,)),
        ("d2f", (8, 16, 24, 40)),  # up to three blocks, and the prompt with the first
    ],
)
def test_memory_is_that_of_the_state(llada_tiny, spec, positions):
    sampler = make_sampler(llada_tiny, spec, **LENGTHS)
    told = costs_of(load_shapes(llada_tiny.folder), sampler, 2, 32)
    state = sampler.init(llada_tiny.denoiser, jnp.ones((2, 32), jnp.int32), key=jax.random.key(0))
    layers = [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, LayerKV)) if isinstance(x, LayerKV)]
    assert told.weights == num_bytes(llada_tiny.params) and told.buffers == num_bytes(layers)
    assert told.buffers + told.state == num_bytes(state)
    assert told.positions == positions


def test_a_verifier_is_counted_and_writing_from_left_to_right_has_windows(dream_tiny, qwen2_tiny):
    model, verifier = load_shapes(dream_tiny.folder), load_shapes(qwen2_tiny.folder)
    sampler = make_sampler(model, "apd", verifier=verifier, gen_length=24, window=4, lookahead=8)
    told = costs_of(model, sampler, 2, 32)
    alone = costs_of(model, make_sampler(model, "leftright", gen_length=24, window=4, lookahead=8), 2, 32)
    assert told.weights == num_bytes(dream_tiny.params) + num_bytes(qwen2_tiny.params) > alone.weights
    assert told.buffers > alone.buffers and told.forwards == (3, 24) and alone.forwards == (24, 24)
    assert alone.positions[0] == 3 + 2 * 8 and len(alone.positions) == 2


def test_guidance_doubles_the_buffers_and_smoothing_keeps_embeddings(llada_tiny):
    model = load_shapes(llada_tiny.folder)
    plain, guided, smooth = (
        costs_of(model, make_sampler(model, "threshold", cache="dual", **LENGTHS, **more), 1, 32)
        for more in ({}, {"guidance": 1.5}, {"smoothing": True})
    )
    assert guided.buffers == 2 * plain.buffers and smooth.buffers == plain.buffers
    assert smooth.state - plain.state >= 56 * model.config.embed_dim * 4


def test_quantized_weights_are_counted_as_they_would_be_loaded(llada_tiny):
    found = load_shapes(llada_tiny.folder, quantize="int8", dtype="bfloat16")
    loaded = dllm_jax.load(llada_tiny.folder, quantize="int8", dtype="bfloat16")
    shapes = lambda params: jax.tree.map(lambda x: (x.shape, x.dtype.name), dict(params))
    assert shapes(found.params) == shapes(loaded.params) and found.config == loaded.config


# The command


def test_it_ends_without_having_loaded_anything(explain, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    status, out, err = explain(PROMPT, "--rule", "topk", "--k", "4", "--gen-length", "32", "--block-length", "8")
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 60
    text = " ".join(out.split())
    assert "k 4 the command line" in text and "cache dual the library" in text
    assert "forwards of a row: 8, fewer if an end token comes before" in text
    assert "positions of a row that a forward runs: 96 in a full one, 8 in a window" in text


def test_as_json(explain):
    status, out, _ = explain("--json", "--gen-length", "16", "--rule", "eb", "--batch-size", "1")
    told = json.loads(out)
    assert status == 0 and {"name": "rule", "value": "eb", "origin": "the command line"} in told["settings"]
    assert "prompt" in {row["name"] for row in told["settings"]} and told["costs"]["batch"] == 1
    assert told["costs"]["total"] > told["costs"]["weights"] > 0 and told["costs"]["fits"] is True


def test_what_does_not_fit_is_said(explain, monkeypatch):
    monkeypatch.setattr("samplers.config.explain.device_memory", lambda: 2**20)
    status, out, _ = explain(PROMPT, "--gen-length", "32")
    assert status == 0 and "of 1.0 MiB (cpu): does not fit; use --quantize" in " ".join(out.split())
    monkeypatch.setattr("samplers.config.explain.device_memory", lambda: None)
    assert "how much memory cpu has is not known" in " ".join(explain(PROMPT, "--gen-length", "32")[1].split())


@pytest.mark.parametrize(
    "line", [("--gamma", "1"), ("--gen-length", "1000"), ("--dtype", "int3"), ("--quantize", "int2")], ids=" ".join
)
def test_mistakes_are_those_of_the_run(explain, line):
    status, out, err = explain(PROMPT, *line)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1


def test_infilling_and_files_are_explained_too(explain, tmp_path):
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    assert "rows together: 3" in explain("--prompts", str(tmp_path / "in.txt"), "--gen-length", "16")[1]
    told = json.loads(explain("--prompts", str(tmp_path / "in.txt"), "--batch-size", "2", "--json")[1])
    rows = {row["name"]: row["value"] for row in told["settings"]}
    assert (rows["prompts"], rows["batch_size"], told["costs"]["batch"]) == (f"3 of {tmp_path / 'in.txt'}", "2", 2)
    assert "rows together: 1" in explain("--infill", "The <gap:4> is.")[1]


def test_a_published_model_needs_no_checkpoint(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path))
    monkeypatch.setattr("samplers.config.explain.device_memory", lambda: 10 * 2**30)
    line = ["--explain", "--model", "llada-8b-instruct", "--preset", "fast-dllm", "--json"]
    weights = []
    for more in ([], ["--quantize", "int8"], ["Why is the sky blue?", "--chat"]):
        assert cli.main([*line, *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["settings"][0]["origin"] == "the published one"
        weights.append((told["costs"]["weights"], told["costs"]["fits"]))
    assert weights[0] == weights[2] == (2 * num_params(dllm_jax.published_config("llada-8b-instruct")), False)
    assert weights[1][0] < 0.6 * weights[0][0] and weights[1][1]
    assert cli.main(["--explain", "--model", "llada-9b"]) == 2
    assert "no checkpoint at llada-9b" in capsys.readouterr().err


def test_sizes():
    assert [format_bytes(n) for n in (512, 2**20, 3 * 2**29)] == ["0.5 KiB", "1.0 MiB", "1.50 GiB"]
