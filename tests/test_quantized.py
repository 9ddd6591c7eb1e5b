"""Weights in 8 and 4 bits: how far they are off, what is computed with them, how they are stored, split and refused."""

import dataclasses
import json
import math
import shutil

import hub_files
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import one_error, programs_in, refuses
from hypothesis import given, settings
from train_toys import LLADA, run_config

import convert
import dllm_jax
import train.lora
from convert.__main__ import main as convert_main
from dllm_jax import Denoiser, Span
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import Experts
from dllm_jax.models.transformer import Tile
from dllm_jax.parallel.sharding import Layout
from dllm_jax.params.low_rank import LowRankKernel
from dllm_jax.params.products import mixed_rows, product, product_of_sums, rows
from dllm_jax.params.quantized import Form, QuantizedKernel, quantize_kernel, quantize_on_host
from dllm_jax.params.specs import forms
from dllm_jax.testing import check_denoiser
from samplers import BlockSampler, DualCache, PrefixCache, Smoothing, Threshold, sample_jit
from samplers.cli.sample import main as samplers_main
from train.setup import read_parts

BITS = ("int8", "int4")
# In four bits two groups of 32 inputs from the stream, four of 128 from the heads and from the hidden units.
CONFIG = LLADA.replace(embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=128, mlp_dim=512)
MOE = LLADA.replace(
    family="llada-moe", embed_dim=64, num_layers=1, head_dim=32, qk_norm=True, experts=Experts(4, 2, 64)
)


def random_model(config, quantize=None, **options):
    """Random weights of order one over the square root of the inputs, so that logits are far from uniform."""
    model = dllm_jax.random_model(config, **options)
    grown = {name: x * 4 if x.ndim > 1 else x for name, x in model.params.items()}
    if quantize is None:
        return dataclasses.replace(model, params=grown)
    config = config.replace(quantize=quantize)
    params = {
        name: quantize_kernel(x, forms(config)[name]) if name in forms(config) else x for name, x in grown.items()
    }
    return dataclasses.replace(model, config=config, params=params)


def plain(params):
    """What quantized parameters stand for, in float32."""
    return {name: x.dequantize(jnp.float32) if isinstance(x, QuantizedKernel) else x for name, x in params.items()}


@jax.jit
def logits(denoiser, tokens):
    return denoiser(tokens)


def assert_same(first, second):
    """The same trees of the same bits."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A plain checkpoint, and its config's weights."""
    folder = tmp_path_factory.mktemp("quantized") / "plain"
    checkpoint.save(folder, CONFIG, random_model(CONFIG).params.items())
    return folder


@pytest.fixture(scope="module", params=BITS)
def stored(request, tmp_path_factory):
    """The tiny LLaDA in eight and four bits, converted: its folder."""
    out = tmp_path_factory.mktemp("quantized") / request.param
    convert.convert("llada", hub_files.CHECKPOINTS / "llada-tiny", out, quantize=request.param)
    return out


# How far weights are off ----------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.floats(-1e30, -1e-30), st.floats(-1.0, 1.0))


@settings(max_examples=100)
@given(st.data(), st.sampled_from(BITS), st.sampled_from([np.float32, ml_dtypes.bfloat16]), st.integers(0, 1))
def test_no_weight_is_off_by_more_than_half_its_scale(data, bits, dtype, axis) -> None:
    shape = data.draw(st.sampled_from([(8, 1), (8, 4), (12, 3), (16, 2)]))[:: -1 if axis else 1]
    arrays = hypothesis.extra.numpy.arrays(np.float32, shape, elements=NUMBERS.map(np.float32))
    weights = data.draw(arrays).astype(dtype)
    groups = 1 if bits == "int8" else 2
    kernel = quantize_kernel(weights, Form(bits, axis, groups))
    assert (kernel.values.dtype, kernel.scale.dtype, kernel.shape) == (np.int8, np.float32, shape)
    scale = np.repeat(kernel.scale, shape[axis] // groups, axis)
    found = np.asarray(kernel.dequantize(jnp.float32)).astype(np.float64)
    assert (np.abs(found - weights.astype(np.float64)) <= scale * 0.50001).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("shape", "axis", "groups"), [((8, 10), 0, 2), ((10, 8), 1, 2), ((3, 8, 2, 5), 1, 2)])
def test_blocks_on_the_host_are_the_whole(monkeypatch, bits, shape, axis, groups) -> None:
    weights = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    monkeypatch.setattr("dllm_jax.params.quantized.BLOCK_ELEMENTS", 20)
    form = Form(bits, axis, groups if bits == "int4" else 1)
    assert_same(quantize_on_host(weights, form), quantize_kernel(weights, form))


def test_four_bits_lie_two_to_a_byte() -> None:
    weights = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)  # four groups of four inputs
    kernel = quantize_kernel(weights, Form("int4", 0, 4))
    assert kernel.values.shape == (8, 2) and kernel.scale.shape == (4, 2) and kernel.shape == (16, 2)
    low, high = ((x.reshape(2, 4, 2)) for x in ((kernel.values << 4) >> 4, kernel.values >> 4))
    wanted = np.stack([low, high], 1) * kernel.scale.reshape(2, 2, 1, 2)
    np.testing.assert_array_equal(np.asarray(kernel.dequantize(jnp.float32)), wanted.reshape(16, 2))


# What is computed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_products_are_those_of_the_weights_they_stand_for(bits) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    kernel = quantize_kernel(jax.random.normal(keys[0], (64, 24)), Form(bits, 0, 1 if bits == "int8" else 4))
    weights, x = kernel.dequantize(jnp.float32), jax.random.normal(keys[1], (3, 5, 64))
    for part in (x, x[0], x[0, 0]):
        np.testing.assert_allclose(product(part, kernel), part @ weights, atol=1e-5)
    np.testing.assert_allclose(jax.jit(product)(x, kernel), x @ weights, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(product, in_axes=(1, None))(x, kernel).swapaxes(0, 1), x @ weights, atol=1e-5)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[:, ::-1]]), kernel)
    each = jnp.stack([x[0] @ weights, x[1] @ weights[:, ::-1]])
    np.testing.assert_allclose(jax.vmap(product)(x[:2], several), each, atol=1e-5)
    small = x.astype(jnp.bfloat16)
    assert product(small, kernel).dtype == jnp.bfloat16 and product(small, kernel, jnp.float32).dtype == jnp.float32
    a, b = jax.random.normal(keys[2], (64, 2)), jnp.ones((2, 24))
    adapted = LowRankKernel(kernel, a, b, None, 0.5, 0.0)
    np.testing.assert_allclose(product(x, adapted), x @ weights + 0.5 * x @ a @ b, atol=1e-4)


def test_rows_and_mixtures_of_a_table() -> None:
    table = quantize_kernel(
        jax.random.normal(jax.random.key(0), (20, 8)) * jnp.logspace(-6, 0, 20)[:, None], Form("int8", 1, 1)
    )
    weights = table.dequantize(jnp.float32)
    index = jnp.array([[3, 1], [19, 3]])
    np.testing.assert_array_equal(rows(table, index, jnp.float32), weights[index])
    shares = jax.nn.softmax(jax.random.normal(jax.random.key(1), (2, 3, 20)))
    np.testing.assert_allclose(mixed_rows(shares, table, jnp.float32), shares @ weights, atol=1e-6)
    np.testing.assert_allclose(mixed_rows(shares, table, jnp.float16), shares @ weights, atol=2e-3)


@pytest.mark.parametrize(("family", "bits"), [("dream", "int4"), ("qwen2", "int8"), ("lladamoe", "int8")])
def test_a_quantized_model_is_the_model_of_the_weights_it_stands_for(request, family, bits) -> None:
    found = dllm_jax.load(request.getfixturevalue(f"{family}_tiny").folder, quantize=bits)
    assert found.config.quantize == bits
    kinds = {name: x.bits for name, x in found.params.items() if isinstance(x, QuantizedKernel)}
    assert kinds.pop("embed.embedding") == kinds.pop("lm_head.kernel", "int8") == "int8" and set(kinds.values()) == {
        bits
    }
    assert not [name for name in kinds if "norm" in name or "bias" in name or "router" in name]
    assert ("layers.0.mlp.w_in" in kinds) == (family == "lladamoe")
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 128)
    wanted = Denoiser(found.config, plain(found.params))
    np.testing.assert_allclose(logits(found.denoiser, tokens), logits(wanted, tokens), atol=2e-4)


class Split(Denoiser):
    """As if the vocabulary lay on four devices."""

    vocab_parts = 4


@pytest.mark.parametrize("kind", [Denoiser, Split])
@pytest.mark.parametrize("family", ["llada", "qwen2"])  # a head of its own, and one tied to the table
def test_tiles_of_the_vocabulary_are_parts_of_the_whole(request, family, kind) -> None:
    model = dllm_jax.load(request.getfixturevalue(f"{family}_tiny").folder, quantize="int8")
    denoiser = object.__new__(kind)
    denoiser.__dict__.update(vars(model.denoiser))
    hidden = jax.random.normal(jax.random.key(1), (2, 3, model.config.embed_dim))
    part = denoiser.vocab_size // denoiser.vocab_parts
    ids = (np.arange(denoiser.vocab_parts)[:, None] * part + np.arange(5, 14)).reshape(-1)
    found = denoiser.logits(hidden, Tile(jnp.asarray(5), 9))
    np.testing.assert_allclose(found, denoiser.logits(hidden)[..., ids], atol=1e-5)


def test_its_denoiser_keeps_all_promises() -> None:
    """Int4 in all layers, their experts among them, int8 in table and head."""
    assert "tiles of the vocabulary" in check_denoiser(random_model(MOE, "int4").denoiser)


@pytest.mark.parametrize(
    ("cache", "bits", "dtype"), [(PrefixCache(), "int4", "float32"), (DualCache(), "int8", "float16")], ids=str
)
def test_rows_of_a_batch_are_what_they_are_alone(cache, bits, dtype) -> None:
    smoothing = Smoothing() if bits == "int8" else None
    sampler = BlockSampler(Threshold(0.5), 12, 6, cache=cache, smoothing=smoothing)
    model = random_model(CONFIG, bits, dtype=dtype)
    prompt, lengths = jnp.arange(16).reshape(2, 8) % 19, jnp.array([8, 5])
    together = sample_jit(sampler, model.denoiser, prompt, lengths)
    assert not np.isin(together.tokens, CONFIG.mask_id).any() and (together.broken_at < 0).all()
    for row in range(2):
        alone = sample_jit(sampler, model.denoiser, prompt[row : row + 1], lengths[row : row + 1])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_array_equal(alone.decoded_at[0], together.decoded_at[row])


@pytest.mark.parametrize("quantize", BITS)
def test_weights_become_floats_as_operands_of_products_alone(quantize) -> None:
    """In a window's forward and its logits: so a compiler may fuse the conversion with the product, as TPU's does. That
    of the CPU makes it a temporary array."""
    model = random_model(CONFIG, quantize)
    kv, lengths = model.denoiser.empty_cache(1, 12), jnp.array([12])
    window = lambda denoiser, tokens, kv: denoiser.logits(
        denoiser.forward(tokens, lengths, at=Span(jnp.array([4]), 5), kv=kv)[0]
    )
    program = jax.make_jaxpr(window)(model.denoiser, jnp.zeros((1, 12), jnp.int32), kv)
    sizes = {math.prod(x.shape) for x in model.params.values() if isinstance(x, QuantizedKernel)}
    made = 0
    for jaxpr in programs_in(program.jaxpr):
        for equation in jaxpr.eqns:
            (*_, out) = equation.outvars
            if out.aval.size not in sizes or not jnp.issubdtype(out.aval.dtype, jnp.floating):
                continue
            (use,) = [other for other in jaxpr.eqns if any(operand is out for operand in other.invars)]
            allowed = {"convert_element_type": "dot_general"}
            if quantize == "int4" and equation.invars[0].aval.ndim > 2:  # not of the head
                allowed = {"convert_element_type": "mul", "mul": "dot_general"}
            assert use.primitive.name == allowed[equation.primitive.name]
            made += use.primitive.name == "dot_general"
    assert made == 7 * CONFIG.num_layers + 1  # of every kernel and the head; the table's rows are gathered small


# float16 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "quantize"), [(CONFIG, None), (CONFIG, "int8"), (MOE, "int4")], ids=["llada", "llada-int8", "moe-int4"]
)
def test_float16_stays_finite_where_its_range_ends(config, quantize) -> None:
    """Hidden units of 1e6 and a stream of 1e7, which float16 has no numbers for."""
    model = random_model(config, quantize)
    grown = dict(model.params)
    for name in ("gate_proj.kernel", "up_proj.kernel", "down_proj.kernel", "w_in", "w_out"):
        for layer in range(config.num_layers):
            if (full := f"layers.{layer}.mlp.{name}") in grown:
                scaled = lambda x: x * 150 if x.dtype == jnp.float32 else x
                grown[full] = jax.tree.map(scaled, grown[full])
    narrow = {name: x if isinstance(x, QuantizedKernel) else x.astype(jnp.float16) for name, x in grown.items()}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(narrow))
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 20)
    wide, half = Denoiser(model.config, grown), Denoiser(model.config.replace(dtype="float16"), narrow)
    hidden = jax.jit(lambda denoiser: denoiser.forward(tokens, jnp.array([9, 9]))[0])
    assert half.dtype == jnp.float16 and hidden(half).dtype == jnp.float32 and jnp.abs(hidden(half)).max() > 65504
    np.testing.assert_allclose(hidden(half), hidden(wide), rtol=0.02, atol=0.02 * float(jnp.abs(hidden(wide)).max()))
    wanted = logits(wide, tokens)
    np.testing.assert_allclose(logits(half, tokens), wanted, atol=0.05 * float(jnp.abs(wanted).max()))
    assert {x.dtype for x in jax.tree.leaves(half.empty_cache(2, 9))} == {jnp.dtype("float16")}


def test_what_does_not_fit_float16_is_scaled_and_the_rest_is_not() -> None:
    kernel = jax.random.normal(jax.random.key(0), (64, 8)).astype(jnp.float16)
    x = jax.random.normal(jax.random.key(1), (3, 64)) * jnp.array([[1.0], [1e6], [1e-3]])
    found = product_of_sums(x, kernel, jnp.dtype("float16"))
    assert found.dtype == jnp.float32
    wanted = x @ kernel.astype(jnp.float32)
    largest = np.abs(wanted).max(axis=1, keepdims=True)
    np.testing.assert_allclose(found / largest, wanted / largest, atol=1e-2)
    fitting = product(x.astype(jnp.float16), kernel, jnp.float32)
    np.testing.assert_array_equal(found[0::2], fitting[0::2])
    assert not jnp.isfinite(product(x.astype(jnp.float16), kernel)).all()
    assert jnp.isnan(product_of_sums(x.at[0, 0].set(jnp.nan), kernel, jnp.dtype("float16"))[0]).all()


# On disk --------------------------------------------------------------------------------------------------------------


def test_converting_is_loading_is_saving(stored, llada_tiny, tmp_path) -> None:
    """Bit for bit the same weights, whichever way they were quantized."""
    bits = stored.name
    found, loaded = dllm_jax.load(stored), dllm_jax.load(llada_tiny.folder, quantize=bits)
    assert found.config == loaded.config == llada_tiny.config.replace(quantize=bits)
    assert json.loads((stored / "config.json").read_text())["quantize"] == bits
    assert_same(found.params, loaded.params)
    checkpoint.save(tmp_path / "again", loaded.config, loaded.params.items())
    assert_same(dllm_jax.load(tmp_path / "again", quantize=bits).params, found.params)
    assert convert.verify(hub_files.CHECKPOINTS / "llada-tiny", stored) == len(
        hub_files.tensors(hub_files.CHECKPOINTS / "llada-tiny")
    )
    entries, name = checkpoint.stored_params(stored), "layers.0.mlp.down_proj.kernel"
    assert not {name, "lm_head.kernel"} & entries.keys()
    assert entries["lm_head.kernel.int8"].dtype == np.int8 and entries[f"{name}.scale"].dtype == np.float32
    values = entries[f"{name}.{bits}"]
    assert values.dtype == np.int8 and tuple(values.shape) == ((384, 128) if bits == "int8" else (192, 128))
    assert_same(dict(checkpoint.iter_params(stored, [name])), {name: jax.tree.map(np.asarray, found.params[name])})


def test_the_dtype_is_that_of_products(stored) -> None:
    as_stored, half = dllm_jax.load(stored), dllm_jax.load(stored, dtype="bfloat16")
    for name, param in half.params.items():
        if isinstance(param, QuantizedKernel):
            assert_same(param, as_stored.params[name])
        else:
            assert param.dtype == jnp.bfloat16
    assert half.denoiser.dtype == jnp.bfloat16 and half.denoiser(jnp.ones((1, 4), jnp.int32)).dtype == jnp.float32


def test_random_models_are_quantized_on_the_device(tmp_path) -> None:
    checkpoint.save(tmp_path / "plain", CONFIG, dllm_jax.random_model(CONFIG).params.items())
    found, loaded = dllm_jax.random_model(CONFIG, quantize="int4"), dllm_jax.load(tmp_path / "plain", quantize="int4")
    assert found.config == CONFIG.replace(quantize="int4")
    assert jax.tree.structure(found.params) == jax.tree.structure(loaded.params)
    for one, other in zip(plain(found.params).values(), plain(loaded.params).values(), strict=True):
        apart = np.abs(one - other)  # a compiler may round otherwise, where the largest weight is between two numbers
        assert apart.max() < 0.1 / 7 and (apart > 1e-6).mean() < 1e-2


# On a mesh ------------------------------------------------------------------------------------------------------------

needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@needs_eight
@pytest.mark.parametrize(("bits", "axes"), [("int8", {"fsdp": 2, "tensor": 2}), ("int4", {"data": 2, "tensor": 2})])
def test_on_a_mesh_it_is_the_model_of_one_device(saved, tmp_path, bits, axes) -> None:
    mesh, one = dllm_jax.make_mesh(**axes), dllm_jax.load(saved, quantize=bits)
    checkpoint.save(tmp_path / "stored", one.config, one.params.items())
    shardings = dllm_jax.param_shardings(one.config, mesh)
    for split in (dllm_jax.load(saved, quantize=bits, mesh=mesh), dllm_jax.load(tmp_path / "stored", mesh=mesh)):
        assert_same(split.params, one.params)
        assert jax.tree.map(lambda x: x.sharding, split.params) == shardings
    made = dllm_jax.random_model(CONFIG, quantize=bits, mesh=mesh)
    assert jax.tree.map(lambda x: x.sharding, made.params) == shardings
    tokens = jax.random.randint(jax.random.key(0), (2, 10), 0, 20)
    np.testing.assert_allclose(logits(split.denoiser, tokens), logits(one.denoiser, tokens), atol=1e-4)
    values, scale = (one.params["layers.0.attn.o_proj.kernel"].values, one.params["layers.0.attn.o_proj.kernel"].scale)
    assert (values.shape, scale.shape) == (((512, 64), (1, 64)) if bits == "int8" else ((256, 64), (4, 64)))
    spec = shardings["layers.0.attn.o_proj.kernel"].scale.spec
    assert tuple(spec) == ((None, "fsdp") if bits == "int8" else ("tensor", None))


@needs_eight
def test_experts_lie_with_their_scales() -> None:
    mesh, config = dllm_jax.make_mesh(expert=2, tensor=2), MOE.replace(quantize="int8")
    shardings = dllm_jax.param_shardings(config, mesh)["layers.0.mlp.w_in"]
    assert tuple(shardings.values.spec) == ("expert", None, None, "tensor") == tuple(shardings.scale.spec)
    way_back = dllm_jax.param_shardings(config, mesh)["layers.0.mlp.w_out"]
    assert tuple(way_back.values.spec) == ("expert", "tensor", None) and tuple(way_back.scale.spec) == (
        "expert",
        None,
        None,
    )
    model = random_model(MOE, "int8")
    placed = Denoiser(config, jax.device_put(model.params, dllm_jax.param_shardings(config, mesh)), Layout(mesh))
    tokens = jax.random.randint(jax.random.key(0), (2, 10), 0, 20)
    np.testing.assert_allclose(logits(placed, tokens), logits(model.denoiser, tokens), atol=1e-4)


@needs_eight
def test_a_group_is_not_torn_apart() -> None:
    mesh = dllm_jax.make_mesh(tensor=2)
    torn = CONFIG.replace(mlp_dim=192, quantize="int4")
    with refuses("layers.0.mlp.down_proj.kernel", "2 devices"):
        dllm_jax.param_shardings(torn, mesh)
    for fitting in (torn.replace(quantize="int8"), torn.replace(mlp_dim=512), torn.replace(quantize=None)):
        dllm_jax.param_shardings(fitting, mesh)


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["int3", "INT8", 8, ["int8"]])
def test_unknown_bits(saved, tmp_path, quantize) -> None:
    source, out = hub_files.CHECKPOINTS / "llada-tiny", tmp_path / "out"
    for work in (
        lambda: dllm_jax.load(saved, quantize=quantize),
        lambda: dllm_jax.random_model(CONFIG, quantize=quantize),
        lambda: CONFIG.replace(quantize=quantize),
        lambda: convert.convert("llada", source, out, quantize=quantize),
        lambda: convert.convert("llada", "nobody/nothing", out, quantize=quantize),  # before anything is downloaded
    ):
        with refuses(str(quantize)):
            work()
    assert not out.exists()


def test_what_is_stored_is_not_quantized_to_something_else(stored) -> None:
    other = {"int8": "int4", "int4": "int8"}[stored.name]
    with refuses(stored.name, other):
        dllm_jax.load(stored, quantize=other)


def test_inputs_that_make_no_groups(tmp_path) -> None:
    with refuses("layers.0.attn.k_proj.kernel", "48"):
        dllm_jax.random_model(CONFIG.replace(embed_dim=48), quantize="int4")
    dllm_jax.random_model(CONFIG.replace(embed_dim=48), quantize="int8")


def test_what_needs_plain_weights_says_so(stored, tmp_path) -> None:
    refused = {
        "exported": [lambda: convert.export(stored, tmp_path / "out")],
        "given adapters": [
            lambda: convert.convert_adapters(tmp_path, stored, tmp_path / "out"),
            lambda: train.lora.merge_adapters(stored, tmp_path, tmp_path / "out"),
        ],
        "trained": [lambda: read_parts(run_config(tmp_path / "run", model={"init": str(stored)}))],
    }
    for what, works in refused.items():
        for work in works:
            with refuses(stored.name, what):
                work()
    assert not list(tmp_path.iterdir())


def test_a_plain_stream_is_no_quantized_checkpoint(tmp_path) -> None:
    with refuses("embed.embedding.int8"):
        checkpoint.save(tmp_path / "out", CONFIG.replace(quantize="int8"), random_model(CONFIG).params.items())
    assert not list(tmp_path.iterdir())


def test_a_config_that_says_otherwise_than_the_arrays(stored, tmp_path) -> None:
    folder = shutil.copytree(stored, tmp_path / "broken")
    values = json.loads((folder / "config.json").read_text())
    for quantize in (None, {"int8": "int4", "int4": "int8"}[stored.name]):
        (folder / "config.json").write_text(json.dumps(values | {"quantize": quantize}))
        with refuses("params"):
            dllm_jax.load(folder)
    (folder / "config.json").write_text(json.dumps(values | {"quantize": "int2"}))
    with refuses("'int2'"):
        dllm_jax.load(folder)


def test_weights_that_are_no_numbers(saved, tmp_path) -> None:
    params = dict(checkpoint.iter_params(saved))
    params["lm_head.kernel"] = params["lm_head.kernel"].copy()
    params["lm_head.kernel"][3, 2] = np.nan
    checkpoint.save(tmp_path / "broken", CONFIG, params.items())
    with refuses("lm_head.kernel"):
        dllm_jax.load(tmp_path / "broken", quantize="int8")


def test_values_of_another_dtype(stored, tmp_path) -> None:
    """As if somebody had written floating numbers under the name of small ones."""
    from orbax.checkpoint import v1 as ocp

    folder = shutil.copytree(stored, tmp_path / "broken")
    arrays = dict(ocp.load(folder / "params"))
    shutil.rmtree(folder / "params")
    ocp.save(folder / "params", arrays | {"lm_head.kernel.int8": arrays["lm_head.kernel.int8"].astype(np.float32)})
    with refuses("lm_head.kernel.int8"):
        dllm_jax.load(folder)


# From a shell ---------------------------------------------------------------------------------------------------------


def test_commands(capsys, llada_tiny, tmp_path) -> None:
    source, out = str(hub_files.CHECKPOINTS / "llada-tiny"), tmp_path / "out"
    assert convert_main(["llada", "--source", source, "--out", str(out), "--quantize", "int4", "--no-progress"]) == 0
    assert "parameters in int4, " in capsys.readouterr().out
    assert checkpoint.load_config(out).quantize == "int4"
    short = ["Hi", "--gen-length", "4", "--block-length", "4", "--json"]
    assert samplers_main([*short, "--model", str(llada_tiny.folder), "--quantize", "int4"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["dtype"] == "int4 in float32"
    assert samplers_main([*short, "--model", str(out), "--quantize", "int8"]) == 2
    assert "int4" in one_error(capsys)
