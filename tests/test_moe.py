"""LLaDA-MoE: the experts against a plain loop, on meshes against one device, and both layouts there and back."""

import dataclasses
import functools
import json
import re

import hub_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_bad_checkpoints import GATE, check_refused, refused
from test_quantized import random_model
from train_toys import LLADA

import convert
import dllm_jax
from benchmarks import hlo
from benchmarks import moe as benchmark
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import Experts, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import FAMILIES, PUBLISHED, HubConfig
from dllm_jax.kernels import experts as moe
from dllm_jax.kernels.experts.xla import Grouped
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.transformer import num_params
from dllm_jax.parallel.sharding import Layout, ShardingRules
from dllm_jax.params.quantized import Form, quantize_kernel
from dllm_jax.params.specs import init_params
from samplers import BlockSampler, DualCache, Threshold, sample_jit

SOURCE = hub_files.CHECKPOINTS / "lladamoe-tiny"
SIZES = {"vocab_size": 32, "embed_dim": 16, "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 24}
SMALL = LLADA.replace(
    **SIZES,
    family="llada-moe",
    rope_theta=100.0,
    max_length=64,
    eos_id=1,
    pad_id=1,
    mask_id=2,
    bos_id=None,
    end_ids=(1,),
    qk_norm=True,
    experts=Experts(num_experts=6, per_token=2, dim=12),
)


def small(**changes):
    """SMALL with some fields changed; those of `Experts` by their names."""
    own = {name: changes.pop(name) for name in list(changes) if name in {f.name for f in dataclasses.fields(Experts)}}
    return SMALL.replace(experts=dataclasses.replace(SMALL.experts, **own), **changes)


def random_params(config, seed=0):
    """Weights of order one, norms and biases included."""
    rng = np.random.default_rng(seed)
    shapes = {name: array.shape for name, array in init_params(config, jax.random.key(0)).items()}
    return {
        name: (rng.normal(size=shape) / (4 if len(shape) > 1 else 1)).astype(np.float32)
        + (1 if name.endswith("scale") else 0)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny checkpoint, converted and loaded."""
    out = tmp_path_factory.mktemp("moe") / "tiny"
    convert.convert("llada-moe", SOURCE, out)
    return dllm_jax.load(out)


# --- a reference in numpy, written from the equations, one token and one expert at a time -----------------------------


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rms(x, scale, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale


def plain_experts(config, part, x):
    """[T, D] -> [T, D]; `part` gives the layer's parameters by their names below `mlp.`."""
    out = np.zeros_like(x)
    for token, m in enumerate(x):
        scores = softmax(m @ part("router"))
        if config.experts.expert_bias:
            scores = scores + part("bias")
        for e in np.argsort(-scores, kind="stable")[: config.experts.per_token]:
            gate, up = m @ part("w_in")[e, 0], m @ part("w_in")[e, 1]
            out[token] += scores[e] * ((silu(gate) * up) @ part("w_out")[e])
    return out + (plain_mlp(lambda name: part("shared." + name), x) if config.experts.shared_dim else 0)


def plain_mlp(part, x):
    return (silu(x @ part("gate_proj.kernel")) * (x @ part("up_proj.kernel"))) @ part("down_proj.kernel")


def plain_forward(config, params, tokens):
    """Logits [T, V] of one row, in float64."""
    params = {name: np.asarray(array, np.float64) for name, array in params.items()}
    angle = np.arange(len(tokens))[:, None] * config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)

    def heads(x, scale=None):
        x = x.reshape(len(x), -1, config.head_dim)
        x = x if scale is None else rms(x, scale, config.norm_eps)
        return x if config.clip_qkv is None else np.clip(x, -config.clip_qkv, config.clip_qkv)

    def rope(x):
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    h = params["embed.embedding"][tokens]
    for layer in range(config.num_layers):
        part = lambda name, layer=layer: params[f"layers.{layer}.{name}"]
        a = rms(h, part("attn_norm.scale"), config.norm_eps)
        q = rope(heads(a @ part("attn.q_proj.kernel"), part("attn.q_norm.scale") if config.qk_norm else None))
        k = rope(heads(a @ part("attn.k_proj.kernel"), part("attn.k_norm.scale") if config.qk_norm else None))
        v = heads(a @ part("attn.v_proj.kernel"))
        k, v = (np.repeat(x, config.num_heads // config.num_kv_heads, axis=1) for x in (k, v))
        attention = softmax(np.einsum("tnh,snh->nts", q, k) / np.sqrt(config.head_dim))
        h = h + np.einsum("nts,snh->tnh", attention, v).reshape(len(h), -1) @ part("attn.o_proj.kernel")
        m = rms(h, part("mlp_norm.scale"), config.norm_eps)
        mlp = lambda name, layer=layer: params[f"layers.{layer}.mlp.{name}"]
        h = h + (plain_mlp(mlp, m) if layer in config.experts.dense_layers else plain_experts(config, mlp, m))
    return rms(h, params["final_norm.scale"], config.norm_eps) @ params["lm_head.kernel"]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SMALL, id="published switches"),
        pytest.param(small(shared_dim=20, expert_bias=True, per_token=3), id="shared expert and expert bias"),
        pytest.param(small(dense_layers=(0,), clip_qkv=0.7, qk_norm=False), id="dense layer, clipped, no norms"),
        pytest.param(small(num_experts=5, per_token=5, dim=7, clip_qkv=0.5), id="all experts"),
        pytest.param(small(num_experts=1, per_token=1), id="one expert"),
    ],
)
def test_logits_are_those_of_a_plain_loop(config, monkeypatch):
    monkeypatch.setattr(moe, "TILE_ROWS", {"default": 8})  # so that several rounds are needed
    params = random_params(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 13))
    found = Denoiser(config, {name: jnp.asarray(array) for name, array in params.items()})(jnp.asarray(tokens))
    for row in range(2):
        np.testing.assert_allclose(found[row], plain_forward(config, params, tokens[row]), atol=2e-4, rtol=1e-4)


# --- the grouped product ----------------------------------------------------------------------------------------------


def dense(x, ids, weights, w_in, w_out, activation=jax.nn.silu):
    """Every expert for every token, then the chosen ones' weighted sum."""
    hidden = jnp.einsum("btd,egdf->begtf", x, w_in)
    every = jnp.einsum("betf,efd->betd", activation(hidden[:, :, 0]) * hidden[:, :, 1], w_out)
    share = jnp.sum(jax.nn.one_hot(ids, len(w_in), axis=1, dtype=x.dtype) * weights[:, None], axis=-1)
    return jnp.einsum("betd,bet->btd", every, share)


def operands(batch=3, length=20, experts=8, per_token=2, dtype=jnp.float32, skew=False):
    keys = jax.random.split(jax.random.key(7), 5)
    scores = jax.random.normal(keys[0], (batch, length, experts))
    scores = scores.at[..., 3].add(9.0 if skew else 0.0)  # one expert is everybody's first choice
    weights, ids = jax.lax.top_k(jax.nn.softmax(scores), per_token)
    x = jax.random.normal(keys[1], (batch, length, 16), dtype)
    w_in = jax.random.normal(keys[2], (experts, 2, 16, 32), dtype) / 4
    w_out = jax.random.normal(keys[3], (experts, 32, 16), dtype) / 6
    return x, ids, weights.astype(dtype), w_in, w_out


ROUNDS, ONE_ROUND = (functools.partial(moe.in_rounds, tile_rows) for tile_rows in (8, 1000))
GROUPS = functools.partial(moe.in_groups, Grouped())
every_way = pytest.mark.parametrize("way", [ROUNDS, ONE_ROUND, GROUPS], ids=["rounds", "one round", "groups"])


def loss(apply, ids):
    return lambda x, *rest: jnp.sum(jnp.sin(3 * apply(x, ids, *rest)))


@pytest.mark.parametrize("routing", ["balanced", "one favourite", "all the same", "some have none"])
@every_way
def test_nothing_is_dropped(way, routing):
    x, ids, *rest = operands(skew=routing == "one favourite")
    if routing == "all the same":
        ids = jnp.broadcast_to(jnp.array([6, 2]), ids.shape)
    if routing == "some have none":
        ids = ids % 2 + jnp.array([0, 5])
    found = jax.jit(way)(x, ids, *rest)
    np.testing.assert_allclose(found, dense(x, ids, *rest), atol=1e-5)
    for row in range(len(x)):
        alone = way(x[row : row + 1], ids[row : row + 1], rest[0][row : row + 1], *rest[1:])
        np.testing.assert_allclose(found[row], alone[0], atol=1e-5)


@pytest.mark.parametrize("way", [ROUNDS, GROUPS], ids=["rounds", "groups"])
def test_another_activation(way):
    """Results and gradients."""
    x, ids, *rest = operands()
    apply, exact = functools.partial(way, activation="gelu"), functools.partial(dense, activation=jax.nn.gelu)
    np.testing.assert_allclose(jax.jit(apply)(x, ids, *rest), exact(x, ids, *rest), atol=1e-5)
    of = lambda apply: jax.jit(jax.grad(loss(apply, ids), argnums=(0, 2)))(x, *rest)
    for one, other in zip(of(apply), of(exact), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@every_way
def test_bfloat16(way):
    args = operands(dtype=jnp.bfloat16)
    exact = dense(*(arg if arg.dtype == jnp.int32 else arg.astype(jnp.float32) for arg in args))
    found = way(*args)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.06, rtol=0.03)


@every_way
def test_gradients_are_those_of_the_dense_product(way):
    x, ids, *rest = operands(skew=True)
    found = jax.jit(jax.grad(loss(way, ids), argnums=(0, 1, 2, 3)))(x, *rest)
    wanted = jax.grad(loss(dense, ids), argnums=(0, 1, 2, 3))(x, *rest)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@every_way
def test_int8_and_the_gradient_through_it(way):
    x, ids, weights, *tables = operands(skew=True)
    small = [quantize_kernel(table, Form("int8", axis, 1)) for table, axis in zip(tables, (2, 1), strict=True)]
    large = [table.dequantize(jnp.float32) for table in small]
    np.testing.assert_allclose(way(x, ids, weights, *small), dense(x, ids, weights, *large), atol=1e-5)
    found = jax.jit(jax.grad(loss(way, ids), argnums=(0, 1)))(x, weights, *small)
    for ours, theirs in zip(found, jax.grad(loss(dense, ids), argnums=(0, 1))(x, weights, *large), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("way", [ROUNDS, GROUPS], ids=["rounds", "groups"])
def test_mapped_over_tokens_or_experts(way):
    x, ids, weights, w_in, w_out = operands()
    rows = jax.vmap(lambda *row: way(*(part[None] for part in row), w_in, w_out)[0])
    np.testing.assert_allclose(jax.jit(rows)(x, ids, weights), dense(x, ids, weights, w_in, w_out), atol=1e-5)
    whole = lambda w_in: loss(way, ids)(x, weights, w_in, w_out)
    one = lambda w_in: jax.vmap(lambda x, ids, weights: loss(way, ids[None])(x[None], weights[None], w_in, w_out))
    np.testing.assert_allclose(
        jax.grad(lambda w_in: one(w_in)(x, ids, weights).sum())(w_in), jax.grad(whole)(w_in), atol=1e-4
    )
    models = jnp.stack([w_in, 2 * w_in])
    found = jax.vmap(lambda w_in: way(x, ids, weights, w_in, w_out))(models)
    np.testing.assert_allclose(found[1], dense(x, ids, weights, 2 * w_in, w_out), atol=1e-5)
    gradients = jax.vmap(jax.grad(whole))(models)
    np.testing.assert_allclose(gradients[0], jax.grad(whole)(w_in), atol=1e-4)


def lowered(dtype, bits=None, platform="cuda", layout=None, **sizes):
    """The program of `apply_experts` for a platform."""
    x, ids, weights, *tables = operands(dtype=dtype, **sizes)
    if bits is not None:
        groups = 1 if bits == "int8" else 4
        tables = [quantize_kernel(table, Form(bits, axis, groups)) for table, axis in zip(tables, (2, 1), strict=True)]
    apply = jax.jit(lambda *operands: moe.apply_experts(*operands, layout))
    return apply.trace(x, ids, weights, *tables).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("dtype", "bits", "grouped"),
    [("bfloat16", None, True), ("float32", "int8", True), ("bfloat16", "int4", False), ("float16", None, False)],
)
def test_tpus_have_a_kernel_for_groups(dtype, bits, grouped):
    """XLA's, so that it is no choice."""
    for platform in ("tpu", "cuda", "cpu"):
        with dllm_jax.use_kernels("xla"):
            assert ("ragged_dot" in lowered(dtype, bits, platform)) == (grouped and platform == "tpu")


@pytest.mark.parametrize("bits", [None, "int8"])
def test_groups_with_some_of_the_experts(bits):
    """Of 8 experts those from the third on, one without a token; sizes of no tile; what is elsewhere adds zero."""
    x, ids, weights, *tables = operands(length=37, per_token=3, skew=True)
    ids = jnp.where(ids == 5, 6, ids)
    tables = [table[2:6] for table in tables]
    if bits:
        tables = [quantize_kernel(table, Form(bits, axis, 1)) for table, axis in zip(tables, (2, 1), strict=True)]
    found = GROUPS(x, ids, weights, *tables, jnp.int32(2))
    np.testing.assert_allclose(found, ROUNDS(x, ids, weights, *tables, jnp.int32(2)), atol=1e-5)
    nobody = GROUPS(x, ids * 0, weights, *tables, jnp.int32(2))
    np.testing.assert_array_equal(nobody, 0)


def test_gradients_of_the_router_reach_its_weights(monkeypatch):
    monkeypatch.setattr(moe, "TILE_ROWS", {"default": 16})  # rounds of 8 rows
    config = small(shared_dim=8, expert_bias=True)
    params = {name: jnp.asarray(array) for name, array in random_params(config).items()}
    tokens = jnp.arange(20).reshape(2, 10)
    gradients = jax.jit(jax.grad(lambda params: jnp.mean(Denoiser(config, params)(tokens) ** 2)))(params)
    assert all(bool(jnp.isfinite(g).all()) for g in gradients.values())
    for name in ("router", "bias", "w_in", "w_out", "shared.up_proj.kernel"):
        assert float(jnp.abs(gradients[f"layers.0.mlp.{name}"]).max()) > 1e-6, name


@every_way
def test_rows_are_independent(way):
    """Other rows of the batch, even broken ones, change no bit; other tokens of the row, nothing but rounding."""
    x, ids, weights, w_in, w_out = operands()
    apply = jax.jit(way)
    wanted = apply(x, ids, weights, w_in, w_out)
    others = apply(x.at[1:].set(jnp.nan), ids.at[1:].set(jnp.array([3, 5])), weights, w_in, w_out)
    np.testing.assert_array_equal(others[0], wanted[0])
    shuffled = apply(x.at[0, 5:].set(jnp.nan), ids.at[0, 5:].set(jnp.array([3, 5])), weights, w_in, w_out)
    np.testing.assert_allclose(shuffled[0, :5], wanted[0, :5], atol=1e-6)


@pytest.mark.parametrize("tile_rows", [8, 1000], ids=["rounds", "one round"])
def test_inside_loops_vmap_and_shard_map(monkeypatch, tile_rows):
    monkeypatch.setattr(moe, "TILE_ROWS", {"default": tile_rows})
    x, ids, weights, w_in, w_out = operands(batch=2)
    apply = lambda x, ids, weights: moe.apply_experts(x, ids, weights, w_in, w_out)
    wanted = dense(x, ids, weights, w_in, w_out)
    one = jax.vmap(lambda *row: apply(*(part[None] for part in row))[0])
    np.testing.assert_allclose(jax.jit(one)(x, ids, weights), wanted, atol=1e-5)
    body = lambda state: (state[0] + 1, apply(x + 0 * state[1], ids, weights))
    looped = jax.jit(lambda x: jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1])
    np.testing.assert_allclose(looped(x), wanted, atol=1e-5)
    mesh = dllm_jax.make_mesh(data=2)
    spec = PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(apply, mesh=mesh, in_specs=spec, out_specs=spec))
    np.testing.assert_allclose(mapped(x, ids, weights), wanted, atol=1e-5)


# --- meshes -----------------------------------------------------------------------------------------------------------

MESHES = [dict(expert=4, tensor=2), dict(data=2, expert=4), dict(tensor=4)]
PROMPT = np.frombuffer(b"Q: Tom has 12 books. Tom buys 23Q: 7 and 8 make how much in all?", np.uint8).reshape(2, 32)


def sampler():
    return BlockSampler(Threshold(0.3), gen_length=32, block_length=16, cache=DualCache())


@pytest.fixture(scope="module", autouse=True)
def several_rounds():
    """Everything in this module that samples runs experts in rounds of 8 tokens; one round is the easier case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "TILE_ROWS", {"default": 16})
        yield


@pytest.fixture(scope="module")
def wanted(tiny):
    """What one device samples."""
    return np.asarray(sample_jit(sampler(), tiny.denoiser, jnp.asarray(PROMPT, jnp.int32)).tokens)


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "-".join(f"{name}{size}" for name, size in axes.items()))
def test_meshes_give_the_same_tokens_and_experts_stay_where_they_are(tiny, wanted, axes):
    mesh = dllm_jax.make_mesh(**axes)
    model = dllm_jax.load(tiny.folder, mesh=mesh)
    shards = mesh.shape.get("expert", 1)
    for name in ("w_in", "w_out"):
        array = model.params[f"layers.0.mlp.{name}"]
        assert array.addressable_shards[0].data.shape[0] == 8 // shards
    prompt = jax.device_put(jnp.asarray(PROMPT, jnp.int32), dllm_jax.batch_sharding(mesh))
    program = sample_jit.lower(sampler(), model.denoiser, prompt).compile()
    np.testing.assert_array_equal(program(sampler(), model.denoiser, prompt).tokens, wanted)
    if shards > 1:
        assert gathered(program.as_text()) < 8 * 128 * 128 // mesh.size  # not even one device's part of w_out


def gathered(program):
    """Elements of the largest result of any all-gather in an optimised program."""
    shapes = re.findall(r"\w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", program)
    assert "while(" in program and shapes
    return max(int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes)


@pytest.fixture
def groups_here(monkeypatch):
    """Grouped products on this platform as on TPU."""
    monkeypatch.setattr(moe, "RAGGED", ("cpu",))
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("axes", "batch"),
    [(dict(expert=4, tensor=2), 3), (dict(data=2, expert=4), 4), (dict(fsdp=4), 4)],
    ids=str,
)
def test_groups_on_meshes(groups_here, axes, batch):
    """Weights stay where they are, and so do tokens that split."""
    layout = Layout(dllm_jax.make_mesh(**axes))
    x, ids, weights, *tables = operands(batch=batch)
    place = lambda table, axes: jax.device_put(table, NamedSharding(layout.mesh, layout.spec(table, axes)))
    placed = [place(*pair) for pair in zip(tables, moe.AXES, strict=True)]
    apply = functools.partial(moe.apply_experts, layout=layout)
    program = jax.jit(apply).lower(x, ids, weights, *placed).compile()
    assert not re.search(r" all-gather(-start)?\(", program.as_text())
    np.testing.assert_allclose(program(x, ids, weights, *placed), dense(x, ids, weights, *tables), atol=1e-5)
    found = jax.jit(jax.grad(loss(apply, ids), argnums=(0, 1, 2, 3)))(x, weights, *placed)
    wanted = jax.grad(loss(dense, ids), argnums=(0, 1, 2, 3))(x, weights, *tables)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_the_rounds_of_a_gradient_send_nothing(groups_here, monkeypatch):
    """What is split for storage is gathered before them, and its gradient summed behind them."""
    monkeypatch.setattr(moe, "TILE_ROWS", {"cpu": 8, "default": 8})
    layout = Layout(dllm_jax.make_mesh(fsdp=4))
    x, ids, weights, *tables = operands(batch=4, length=24)
    stored = (("expert", None, "embed", "mlp"), ("expert", "mlp", "embed"))
    place = lambda table, axes: jax.device_put(table, NamedSharding(layout.mesh, layout.spec(table, axes)))
    placed = [place(*pair) for pair in zip(tables, stored, strict=True)]
    apply = functools.partial(moe.apply_experts, layout=layout)
    gradient = jax.jit(jax.grad(loss(apply, ids), argnums=(0, 1, 2, 3)))
    text = gradient.lower(x, weights, *placed).compile().as_text()
    found = [loop for depth, loop in hlo.loops(hlo.read(text), lambda own, at: "loop").walk() if depth]
    assert found and not any(loop.collectives for loop in found)
    for ours, theirs in zip(gradient(x, weights, *placed), gradient(x, weights, *tables), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("quantize", "axes", "rules"),
    [(None, dict(data=2, expert=2, tensor=2), {}), ("int8", dict(fsdp=4), {"expert": "fsdp", "embed": None})],
    ids=["grouped on each device", "tokens and experts along one axis, so in rounds"],
)
def test_a_model_in_groups(groups_here, quantize, axes, rules):
    model = random_model(small(num_experts=8, dim=32, shared_dim=8, num_kv_heads=2, num_layers=1), quantize)
    layout = Layout(dllm_jax.make_mesh(**axes), ShardingRules(**rules))
    params = jax.device_put(model.params, dllm_jax.param_shardings(model.config, layout.mesh, layout.rules))
    tokens = jnp.arange(40).reshape(4, 10) % 32
    found = jax.jit(lambda denoiser: denoiser(tokens))(Denoiser(model.config, params, layout))
    np.testing.assert_allclose(found, model.denoiser(tokens), atol=1e-4)


def test_a_mesh_with_explicit_axes(tiny, wanted):
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        params = jax.device_put(tiny.params, dict(dllm_jax.param_shardings(tiny.config, mesh)))
        prompt = jax.device_put(jnp.asarray(PROMPT, jnp.int32), NamedSharding(mesh, PartitionSpec("data")))
        result = sample_jit(sampler(), Denoiser(tiny.config, params), prompt)
    np.testing.assert_array_equal(result.tokens, wanted)


# --- configs ----------------------------------------------------------------------------------------------------------

MOE_7B = {
    **{"architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "vocab_size": 157184, "hidden_size": 2048},
    **{"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "attention_bias": False},
    **{"qk_layernorm": True, "clip_qkv": None, "rope_theta": 50000, "rope_scaling": None, "partial_rotary_factor": 1},
    **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "hidden_act": "silu", "num_experts": 64},
    **{"num_experts_per_tok": 8, "expert_intermediate_size": 1024, "dense_intermediate_size": 8192},
    **{"shared_expert_intermediate_size": None, "moe_layer_freq": [1] * 16, "moe_router_score_function": "softmax"},
    **{"moe_router_enable_expert_bias": False, "norm_topk_prob": None, "routed_scaling_factor": 1},
    **{"router_num_group": None, "router_topk_group": None, "router_aux_loss_coef": 0.01, "attention_dropout": 0.0},
    **{"pad_token_id": 156892, "eos_token_id": 156892, "torch_dtype": "bfloat16"},
}


def read(values, **beside):
    return FAMILIES["llada-moe"].read_config(HubConfig(values, "config.json", **beside))


def test_the_published_model():
    config = PUBLISHED["llada-moe-7b-a1b-instruct"]
    assert num_params(config) == 7_356_880_896
    assert read(MOE_7B) == read(MOE_7B | {"mask_token_id": 156895}) == config == PUBLISHED["llada-moe-7b-a1b-base"]
    assert read(MOE_7B, tokens={"<|role_end|>": 156900}).end_ids == (156892, 156900)
    with refuses("mask_token_id"):
        read(MOE_7B | {"vocab_size": 157185})


def test_configs_there_and_back():
    for config in (SMALL, small(shared_dim=4, expert_bias=True, dense_layers=(1,), clip_qkv=3.0)):
        assert ModelConfig.from_json(config.to_json()) == config
        assert hash(ModelConfig.from_json(config.to_json())) == hash(config)
        assert read(FAMILIES["llada-moe"].write_config(config)).replace(dtype="float32") == config
    old = json.loads(PUBLISHED["llada-8b-base"].to_json())
    del old["experts"], old["clip_qkv"]
    assert ModelConfig.from_json(json.dumps(old)) == PUBLISHED["llada-8b-base"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("per_token", dict(per_token=7)),
        ("num_experts", dict(num_experts=0)),
        ("shared_dim", dict(shared_dim=-1)),
        ("[1, 0]", dict(dense_layers=(1, 0))),
        ("layer 2", dict(dense_layers=(2,))),
        ("layer -1", dict(dense_layers=(-1,))),
        ("clip_qkv", dict(clip_qkv=0.0)),
    ],
)
def test_configs_that_make_no_sense(name, changes):
    with refuses(name):
        small(**changes)


def test_junk_in_any_field_gives_a_config_or_a_sentence():
    junk = (None, True, -1, 0, 3, 1.5, float("nan"), 10**30, "x", [], [1], [0] * 16, [2] * 16, {})
    for name in [*MOE_7B, "tie_word_embeddings", "mask_token_id", "sliding_window"]:
        for value in junk:
            try:
                read(MOE_7B | {name: value})
            except DllmError as error:
                assert "\n" not in str(error)


def test_the_benchmark_measures_the_same_layer_four_times(tmp_path):
    file = tmp_path / "moe.json"
    options = ["--size", "tiny", "--tokens", "16", "--dtypes", "float32", "--routings", "same", "--repeats", "1"]
    benchmark.main([*options, "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["variant"] for row in rows] == ["rounds", "groups", "loop", "einsum"]
    assert all(row["seconds"] > 0 and row["difference"] < 1e-5 for row in rows)


def test_chat_template(tiny):
    def render(*turns, **options):
        messages = [{"role": role, "content": text} for role, text in turns]
        return tiny.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    assert render(("user", "Hi {{ 1 }}"), add_generation_prompt=True) == (
        "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Hi {{ 1 }}<|role_end|>"
        "<role>ASSISTANT</role>"
    )
    talk = (("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c"))
    assert render(*talk) == (
        "<role>SYSTEM</role>Be kind.\ndetailed thinking off<|role_end|><role>HUMAN</role>a<|role_end|>"
        "<role>ASSISTANT</role>b<|role_end|><role>HUMAN</role>c<|role_end|>"
    )


# --- checkpoints ------------------------------------------------------------------------------------------------------


def assert_same_params(first, second):
    first, second = checkpoint.load_params(first), checkpoint.load_params(second)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.fixture(scope="module")
def fused(tiny, tmp_path_factory):
    """The tiny checkpoint in the fused layout, made here with numpy alone."""
    folder = tmp_path_factory.mktemp("fused") / "source"
    hub_files.copy("lladamoe-tiny", folder)
    arrays = dict(hub_files.tensors(folder))
    for layer in range(3):
        parts = [
            {part: arrays.pop(f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight") for part in KINDS}
            for e in range(8)
        ]
        both = [np.concatenate([part["gate"], part["up"]]) for part in parts]
        arrays[f"model.layers.{layer}.mlp.w1"] = np.stack(both)
        arrays[f"model.layers.{layer}.mlp.w2"] = np.stack([part["down"] for part in parts])
    hub_files.write(folder / hub_files.SINGLE, arrays)
    hub_files.edit_json(folder / "config.json", architectures=["FusedLLaDAMoEModelLM"])
    return folder


KINDS = ("gate", "up", "down")


def test_every_tensor_arrives(tiny):
    original = hub_files.tensors(SOURCE)
    assert convert.verify(SOURCE, tiny.folder) == len(original) == 3 + 3 * (9 + 8 * 3)
    w_in, w_out = tiny.params["layers.1.mlp.w_in"], tiny.params["layers.1.mlp.w_out"]
    np.testing.assert_array_equal(w_in[5, 0], original[GATE].T)
    np.testing.assert_array_equal(w_in[5, 1], original[GATE.replace("gate", "up")].T)
    np.testing.assert_array_equal(w_out[5], original[GATE.replace("gate", "down")].T)
    np.testing.assert_array_equal(tiny.params["layers.1.mlp.router"], original["model.layers.1.mlp.gate.weight"].T)
    assert (tiny.config.family, tiny.config.mask_id, tiny.config.end_ids) == ("llada-moe", 129, (128, 131))
    assert tiny.config.experts == Experts(num_experts=8, per_token=2, dim=128)


def test_the_fused_layout_is_the_same_model(tiny, fused, tmp_path):
    convert.convert("llada-moe", fused, tmp_path / "ours")
    assert convert.verify(fused, tmp_path / "ours") == 3 + 3 * (9 + 2)
    assert_same_params(tmp_path / "ours", tiny.folder)
    # Which of the two a model came from is not remembered: both sources verify.
    assert convert.verify(SOURCE, tmp_path / "ours") == convert.verify(SOURCE, tiny.folder)


@pytest.mark.parametrize(("origin", "layout"), [("unfused", "fused"), ("fused", "unfused")])
def test_there_and_back(fused, tmp_path, origin, layout):
    sources = {"unfused": SOURCE, "fused": fused}
    convert.convert("llada-moe", sources[origin], tmp_path / "ours")
    convert.export(tmp_path / "ours", tmp_path / "hub", layout=layout, max_shard_bytes=400_000)
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 3
    found, wanted = hub_files.tensors(tmp_path / "hub"), hub_files.tensors(sources[layout])
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert json.loads((tmp_path / "hub" / "config.json").read_text()) == json.loads(
        (sources[layout] / "config.json").read_text()
    )
    convert.convert("llada-moe", tmp_path / "hub", tmp_path / "again")
    assert_same_params(tmp_path / "again", tmp_path / "ours")


@pytest.mark.parametrize("layout", [None, "fused"])
def test_a_checkpoint_that_was_trained_here(tmp_path, layout):
    """With one expert, too, which is a matrix all the same."""
    own = {"num_experts": 1, "per_token": 1, "dim": 1} if layout else {"tied_embeddings": True}
    config = small(shared_dim=20, expert_bias=True, dense_layers=(1,), clip_qkv=2.0, **own)
    checkpoint.save(tmp_path / "trained", config, random_params(config).items())
    convert.export(tmp_path / "trained", tmp_path / "hub", layout=layout)
    convert.convert("llada-moe", tmp_path / "hub", tmp_path / "again")
    assert checkpoint.load_config(tmp_path / "again") == config
    assert_same_params(tmp_path / "again", tmp_path / "trained")


def test_verify_finds_one_flipped_bit(tmp_path, fused):
    convert.convert("llada-moe", fused, tmp_path / "out")
    params = {name: np.asarray(array).copy() for name, array in checkpoint.load_params(tmp_path / "out").items()}
    params["layers.1.mlp.w_in"].view(np.uint32)[5, 1, 3, 7] ^= 1
    config, notes = checkpoint.load_config(tmp_path / "out"), checkpoint.load_source(tmp_path / "out")
    checkpoint.save(tmp_path / "out", config, params.items(), source=notes, overwrite=True)
    with refuses("layers.1.mlp.w_in", "1 of 262144"):
        convert.verify(fused, tmp_path / "out")


def test_without_architectures_the_experts_tell(tmp_path):
    source = hub_files.copy("lladamoe-tiny", tmp_path / "source")
    hub_files.edit_json(source / "config.json", architectures=None)
    assert convert.convert("llada-moe", source, tmp_path / "out").experts


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layers.1.mlp.w2", lambda a: a.pop("model.layers.1.mlp.w2")),
        ("[7, 256, 128]", lambda a: a.update({"model.layers.1.mlp.w1": a["model.layers.1.mlp.w1"][:7]})),
        ("layers.1.mlp.w2", lambda a: a.update({"model.layers.1.mlp.w2": a["model.layers.1.mlp.w2"] * np.inf})),
    ],
    ids=["missing", "misshapen", "infinite"],
)
def test_broken_fused_checkpoints(fused, tmp_path, capsys, name, change):
    arrays = dict(hub_files.tensors(fused))
    change(arrays)
    breaker = lambda folder: hub_files.write(folder / hub_files.SINGLE, arrays)
    check_refused("llada-moe", "lladamoe-tiny", name, breaker, tmp_path, capsys)


def test_layouts_that_a_family_does_not_have(tiny, llada_tiny, tmp_path, capsys):
    command = ["export", "--out", str(tmp_path / "hub"), "--checkpoint"]
    assert "'stacked'" in refused([*command, str(tiny.folder), "--layout", "stacked"], capsys)
    assert "--layout" in refused([*command, str(llada_tiny.folder), "--layout", "fused"], capsys)
