"""Block diffusion: an exact cache is no approximation, rows are independent, and what is asked for is possible."""

import dataclasses
import functools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDENS, converted, refuses
from train_toys import LLADA

import convert
import dllm_jax
from convert.__main__ import main as convert_main
from dllm_jax import random_model
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import Experts
from dllm_jax.indicator import IndicatorConfig, init_indicator
from samplers import (
    EB,
    NI,
    BlockSampler,
    Credit,
    Hierarchical,
    NoCache,
    PipelineSampler,
    Threshold,
    make_sampler,
    sample_jit,
    stop_on,
)
from samplers.caches import ExactCache, SubBlockCache
from samplers.engine.engine import Engine
from samplers.engine.requests import Request
from samplers.rules import Dynamic, Edit, FastDllmV2
from samplers.text.prompts import pad_prompts
from samplers.tokens.noise import row_keys

SHAPE = {"gen_length": 40, "block_length": 8, "align_blocks": True}
PROMPTS = [list(b"Q: Sam has 21 pens."), list(b"Sam"), list(b"Max buys 3 apples, Eve 12. How many?"), list(b"12345678")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A converted model of each family, by name."""
    return functools.cache(lambda family: converted(family, tmp_path_factory))


def generate(model, rule, cache, prompts=PROMPTS, **options):
    sampler = BlockSampler(rule, cache=cache, stop=stop_on([model.config.eos_id], vocab_size=136), **SHAPE, **options)
    return jax.device_get(sample_jit(sampler, model.denoiser, *pad_prompts(prompts, 40)))


RULES = {
    "threshold": Threshold(0.6),
    "eb": EB(0.3),
    "credit": Credit(0.6),
    "hierarchical": Hierarchical(0.8, 0.4),
    "dynamic": Dynamic(0.6, 3),
    "edit": Edit(0.4, 0.2, 3),
}


def assert_same(found, wanted, rows=slice(None)):
    for name in ("tokens", "lengths", "decoded_at", "nfe", "edits"):
        np.testing.assert_array_equal(getattr(found, name)[rows], getattr(wanted, name), err_msg=name)


@pytest.mark.parametrize(
    ("family", "rule"), [*(("sdar", rule) for rule in RULES), ("llada2", "edit"), ("fast-dllm-v2", "threshold")]
)
def test_the_exact_cache_is_no_approximation(models, family, rule) -> None:
    model = models(family)
    found = generate(model, RULES[rule], ExactCache())
    assert_same(found, generate(model, RULES[rule], NoCache()))
    assert (found.full_forwards == 1).all() or model.config.shift  # which runs everything in the first block


def test_an_indicator_decides_inside_blocks(models) -> None:
    model = models("llada2")
    width = model.config.embed_dim
    indicator = init_indicator(IndicatorConfig(1, 8, width, width, 4, 2), jax.random.key(5))
    rule = NI(steps=20, indicator=indicator, threshold=0.7, indicator_threshold=0.5, scope="block")
    found = generate(model, rule, ExactCache())
    assert_same(found, generate(model, rule, NoCache()))
    assert (found.nfe < generate(model, Threshold(0.7), ExactCache()).nfe).any()


@pytest.mark.parametrize("sub_block_length", (None, 4))
def test_the_first_token_of_a_block_is_predicted_by_the_block_before(models, sub_block_length) -> None:
    model = models("fast-dllm-v2")
    found = generate(model, FastDllmV2(0.6), ExactCache(), sub_block_length=sub_block_length)
    assert_same(found, generate(model, FastDllmV2(0.6), NoCache(), sub_block_length=sub_block_length))
    for row, prompt in enumerate(PROMPTS):
        at = found.decoded_at[row]
        for first in range(-len(prompt) % 8, 40, 8):
            others = at[first + 1 : first + 8]
            assert at[first] < 0 or not (others == at[first]).any()


@pytest.mark.parametrize(
    "family, cache, options",
    (("llada2", ExactCache(), {}), ("fast-dllm-v2", SubBlockCache(), {"sub_block_length": 4})),
)
def test_a_row_alone_is_that_of_a_batch(models, family, cache, options) -> None:
    together = generate(models(family), Threshold(0.6), cache, **options)
    for row, prompt in enumerate(PROMPTS):
        assert_same(together, generate(models(family), Threshold(0.6), cache, [prompt], **options), slice(row, row + 1))


def test_requests_in_slots_are_those_of_a_batch(models) -> None:
    model = models("sdar")
    together = generate(model, Dynamic(0.6), ExactCache())
    sampler = BlockSampler(
        Dynamic(0.6), cache=ExactCache(), stop=stop_on([model.config.eos_id], vocab_size=136), **SHAPE
    )
    engine = Engine(model, sampler, slots=2, prompt_length=40)
    keys = np.asarray(jax.random.key_data(row_keys(jax.random.key(0), len(PROMPTS))))
    asked = [engine.submit(Request(prompt, 40, key)) for prompt, key in zip(PROMPTS, keys, strict=True)]
    assert len(list(engine.results())) == len(PROMPTS)
    for row, request in enumerate(asked):
        assert_same(together, request.result, slice(row, row + 1))


def test_editing_that_nothing_reaches_is_threshold_decoding(models) -> None:
    model = models("llada2")
    found = generate(model, Edit(0.7, math.inf, 0), ExactCache())
    wanted = generate(model, Dynamic(0.7), ExactCache())
    for row in range(len(PROMPTS)):  # Edit stops at the end of a block, the other within
        both = (found.decoded_at[row] >= 0) & (wanted.decoded_at[row] >= 0)
        np.testing.assert_array_equal(found.tokens[row][both], wanted.tokens[row][both])
        assert both.sum() == (wanted.decoded_at[row] >= 0).sum()


def test_a_given_token_counts_and_a_given_block_is_run_once(models) -> None:
    model, mask_id = models("sdar"), 129
    given = np.full((1, 40), mask_id)
    given[0, :16] = list(b"0123456789abcdef")
    given[0, 30] = 65
    found = {}
    for cache in (ExactCache(), NoCache()):
        sampler = BlockSampler(Threshold(0.6), cache=cache, **SHAPE)
        prompt, lengths = pad_prompts([list(b"12345678")], 40)
        found[type(cache)] = sample_jit(sampler, model.denoiser, prompt, lengths, given=jnp.asarray(given))
    exact, plain = found[ExactCache], found[NoCache]
    np.testing.assert_array_equal(exact.tokens, plain.tokens)
    assert exact.tokens[0, 30] == 65
    assert int(exact.nfe[0]) == int(plain.nfe[0]) + 2


def test_a_block_diffusion_model_is_sampled_in_its_blocks_by_default(models) -> None:
    for family, length in (("sdar", 4), ("llada2", 32), ("fast-dllm-v2", 32)):
        sampler = make_sampler(models(family), gen_length=64)
        assert (sampler.block_length, sampler.align_blocks, type(sampler.cache)) == (length, True, ExactCache)
    assert make_sampler(models("llada2"), gen_length=64, block_length=16).block_length == 16


def test_what_makes_no_sense_is_refused(models, llada_tiny) -> None:
    prompt = jnp.zeros((1, 8), jnp.int32)
    with refuses("exact cache"):
        BlockSampler(Threshold(), cache=ExactCache(), **SHAPE).init(llada_tiny.denoiser, prompt)
    with refuses("align_blocks"):
        BlockSampler(Threshold(), 32, 8).init(models("sdar").denoiser, prompt)
    with refuses("block_length 8"):
        BlockSampler(Threshold(), sub_block_length=3, **SHAPE)
    with refuses("sub_block_length"):
        BlockSampler(Threshold(), sub_block_length=4, **SHAPE).init(llada_tiny.denoiser, prompt)
    with refuses("block of 32"):
        make_sampler(models("llada2"), gen_length=20)


SMALL = LLADA.replace(
    family="llada2",
    vocab_size=40,
    num_kv_heads=1,
    mlp_dim=24,
    rope_dim=4,
    norm_eps=1e-6,
    max_length=64,
    eos_id=38,
    pad_id=38,
    mask_id=39,
    bos_id=None,
    end_ids=(38,),
    attention="block",
    block_length=4,
    qk_norm=True,
    experts=Experts(8, 2, 6, 6, True, (0,), score="sigmoid", normalize=True, scale=2.5, groups=4, top_groups=2),
    dtype="bfloat16",
)


def test_routers_stay_float32(tmp_path) -> None:
    """In a bfloat16 model, in its checkpoint, and in the hub's format and back."""
    config = SMALL.replace(block_length=32)  # of which the hub's format says nothing
    model = random_model(config)
    kinds = {name: str(x.dtype) for name, x in model.params.items()}
    wide = {"layers.1.mlp.router", "layers.1.mlp.bias"}
    assert {name for name, kind in kinds.items() if kind == "float32"} == wide
    host = {name: np.asarray(x) for name, x in model.params.items()}
    host["layers.1.mlp.bias"] = np.linspace(0.0, 0.1, 8, dtype=np.float32)
    checkpoint.save(tmp_path / "ours", config, iter(host.items()))
    convert.export(tmp_path / "ours", tmp_path / "hub")
    assert convert.convert("llada2", tmp_path / "hub", tmp_path / "again") == config
    for name, value in dllm_jax.load(tmp_path / "again").params.items():
        assert str(value.dtype) == kinds[name]
        np.testing.assert_array_equal(np.asarray(value), host[name], err_msg=name)
    assert convert.verify(tmp_path / "hub", tmp_path / "again") > 0


SDAR_NAMES = {
    "SDAR-8B-Chat": 4,
    "SDAR-30B-A3B-Sci": 4,
    "SDAR-4B-Chat-b32": 32,
    "models--JetLM--SDAR-1.7B-Chat-b16/snapshots/0123abc": 16,
    "models--JetLM--SDAR-1.7B-Chat/snapshots/0123abc": 4,
    "models--somebody--mine/snapshots/0123abc": None,
    "0123abc": None,
}


@pytest.mark.parametrize("name", SDAR_NAMES)
def test_an_sdar_checkpoint_that_does_not_say_its_blocks(name, tmp_path, capsys) -> None:
    """Published config.json files lack `block_size`: the name says it, also in the hub's cache, or the user does."""
    folder, out, wanted = tmp_path / name, tmp_path / "out", SDAR_NAMES[name]
    shutil.copytree(GOLDENS / "checkpoints" / "sdar-tiny", folder)
    values = json.loads((folder / "config.json").read_text())
    del values["block_size"]
    (folder / "config.json").write_text(json.dumps(values))
    command = ["sdar", "--source", str(folder), "--out", str(out), "--no-progress"]
    if wanted is None:
        assert convert_main(command) == 2 and "--block-length" in capsys.readouterr().err and not out.exists()
        command += ["--block-length", "8"]
    else:
        assert convert_main([*command, "--block-length", "8"]) == 2 and not out.exists()
    assert convert_main(command) == 0
    assert checkpoint.load_config(out).block_length == (wanted or 8)
    assert convert.verify(folder, out) > 0
    convert.export(out, tmp_path / "again")  # says it, and needs no name
    assert convert.convert("sdar", tmp_path / "again", tmp_path / "back").block_length == (wanted or 8)


def test_a_block_length_is_asked_of_sdar_alone(tmp_path) -> None:
    with refuses("block_length"):
        convert.convert("llada2", GOLDENS / "checkpoints" / "llada2-tiny", tmp_path / "out", block_length=8)


@pytest.mark.parametrize("change", ({"groups": 3}, {"top_groups": 9}, {"groups": 8}, {"score": "relu"}, {"scale": 0.0}))
def test_experts_that_cannot_be_are_refused(change) -> None:
    assert SMALL.experts is not None
    with refuses():
        dataclasses.replace(SMALL.experts, **change)


@pytest.mark.parametrize(
    "change", ({"attention": "causal"}, {"block_length": None}, {"block_length": 0}, {"rope_dim": 3}, {"rope_dim": 10})
)
def test_configs_that_cannot_be_are_refused(change) -> None:
    with refuses():
        SMALL.replace(**change)


# Several blocks in flight ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, rule",
    [("llada2", "threshold"), ("sdar", "eb"), ("fast-dllm-v2", "fast-dllm-v2")],
)
def test_a_pipeline_of_one_block_is_the_block_sampler(models, family, rule) -> None:
    """A block that follows a complete one alone: the same forwards, those that make its keys and values final too."""
    model, rule = models(family), {**RULES, "fast-dllm-v2": FastDllmV2(0.6)}[rule]
    stop = stop_on([model.config.eos_id], vocab_size=136)
    never = jnp.asarray([], jnp.int32)
    sampler = PipelineSampler(**SHAPE, rule=rule, tau_add=1.0, tau_act=1.0, end_ids=never, stop=stop)
    found = jax.device_get(sample_jit(sampler, model.denoiser, *pad_prompts(PROMPTS, 40)))
    assert_same(found, generate(model, rule, ExactCache()))


@pytest.mark.parametrize("family", ["sdar", "fast-dllm-v2"])
def test_several_blocks_in_flight(models, family) -> None:
    """Of any number of blocks: a row is that of a batch, and buffers hold what recomputing everything gives."""
    model = models(family)
    sampler = PipelineSampler(**SHAPE, tau_add=0.3, tau_act=0.6, threshold=0.5)
    together = jax.device_get(sample_jit(sampler, model.denoiser, *pad_prompts(PROMPTS, 40)))
    assert (together.nfe < generate(model, Threshold(0.5), ExactCache()).nfe).any()
    for row, prompt in enumerate(PROMPTS):
        alone = jax.device_get(sample_jit(sampler, model.denoiser, *pad_prompts([prompt], 40)))
        assert_same(together, alone, slice(row, row + 1))
    narrow = dataclasses.replace(sampler, in_flight=5)  # other windows, the same blocks
    assert_same(jax.device_get(sample_jit(narrow, model.denoiser, *pad_prompts(PROMPTS, 40))), together)
