"""Gradients in bfloat16 against float32, and of a batch in parts against the whole: every parameter, each family and
objective, 8,192 tokens of which about half are masks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_renoise import CONFIG as GEMMA
from train_toys import LLADA, settings

import dllm_jax
from dllm_jax import Denoiser
from dllm_jax.config import Experts
from dllm_jax.models.transformer import param_specs
from dllm_jax.params.specs import cast_for_training, init_params
from train.losses import Batch
from train.objectives import OBJECTIVES
from train.rollout import Rollout
from train.settings import build_settings
from train.step import Placement, Stepper, training_mesh
from train.trainable import WholeModel

ROWS, LENGTH, PROMPT = 16, 512, 32
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
WORST, OF_INDICATOR = 0.02, 0.05  # which reads the most probable token, sometimes another one in bfloat16

SIZES = {"vocab_size": 256, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_dim": 128}
DENSE = LLADA.replace(**SIZES, max_length=LENGTH, eos_id=250, pad_id=250, mask_id=251, bos_id=252, end_ids=(250,))
EXPERTS = Experts(num_experts=8, per_token=2, dim=32)
SIGMOID = dataclasses.replace(
    EXPERTS, shared_dim=32, expert_bias=True, dense_layers=(0,), score="sigmoid", normalize=True, scale=2.5
)
BLOCKS = {"attention": "block", "block_length": 32}
FAMILIES = {
    "llada": DENSE,
    "dream": DENSE.replace(family="dream", shift=True, qkv_bias=True),
    "llada-moe": DENSE.replace(family="llada-moe", qk_norm=True, experts=EXPERTS),
    "sdar": DENSE.replace(family="sdar", **BLOCKS, qk_norm=True),
    "fast-dllm-v2": DENSE.replace(family="fast-dllm-v2", **BLOCKS, shift=True, qkv_bias=True, tied_embeddings=True),
    "llada2": DENSE.replace(family="llada2", **BLOCKS, qk_norm=True, experts=SIGMOID),
    "qwen2": DENSE.replace(family="qwen2", attention="causal", shift=True, qkv_bias=True),
}
SHARES = {"low": 0.4, "high": 0.6}
INDICATOR = {"depth": 2, "width": 64, "num_values": 8, "num_tokens": 1}  # of more tokens some are nearly as probable
LORA = {"rank": 4, "alpha": 8.0}
OF_FAMILIES = {
    **{family: (family, "masked-diffusion", {"eps": 0.5}) for family in ("llada", "dream", "llada-moe")},
    **{family: (family, "block-diffusion", SHARES) for family in ("sdar", "fast-dllm-v2", "llada2")},
    "qwen2": ("qwen2", "autoregressive", {}),
}
OF_OBJECTIVES = {
    "bound": ("sdar", "block-diffusion", SHARES | {"loss": "bound", "complementary": True}),
    "confidence": ("sdar", "block-diffusion", SHARES | {"confidence": 2.0, "chunk": 256}),
    "smoothing": ("llada", "masked-diffusion", {"eps": 0.5, "smoothing": 0.3, "chunk": 256}),
    "adapters": ("llada2", "block-diffusion", SHARES, {"lora": LORA}),
    "routers": ("llada-moe", "masked-diffusion", {"eps": 0.5}, {"router": {"balance": 0.01, "z": 0.001}}),
    "d2f": ("llada", "d2f", SHARES, {"lora": LORA}),
    "compression": ("llada", "compression", {"chunk": 256}),
    "indicator": ("llada", "indicator", {"dropout": 0.0, "positive_weight": 3.0}, {"indicator": INDICATOR}),
    "grpo": ("llada", "grpo", {"states": 1, "chunk": 256}),
}
CASES = OF_FAMILIES | OF_OBJECTIVES
IN_PARTS = ["llada", "sdar", "qwen2", "bound", "d2f", "compression", "indicator", "grpo"]


def rows(command, parts=1, short=False):
    """Rows of frequent and rare tokens, whole or half of them short; of trajectories 16 steps wrote each."""
    rng = np.random.default_rng(0)
    tokens = (rng.zipf(1.3, (ROWS, LENGTH)) % 250).astype(np.int32)
    lengths = np.where(np.arange(ROWS) < ROWS // 2, LENGTH // 8, LENGTH) if short else np.full(ROWS, LENGTH)
    inside = (np.arange(LENGTH) >= PROMPT) & (np.arange(LENGTH) < lengths[:, None])
    step = np.where(inside, rng.integers(0, 16, (ROWS, LENGTH)), -1)
    batch = Batch(tokens, inside, lengths.astype(np.int32), step.astype(np.int32))
    if command == "grpo":
        share = (1 / inside.sum(axis=1)).astype(np.float32)
        batch = Rollout(*batch[:1], batch.step, inside, batch.lengths, rng.normal(size=ROWS).astype(np.float32), share)
    return jax.tree.map(lambda x: jnp.asarray(x.reshape(parts, ROWS // parts, *x.shape[1:])), batch)


def stepper_of(case, dtype, parts=1, mesh=None):
    family, command, objective, tables = (*case, {})[:4]
    compute, optimizer = {"dtype": dtype, "mesh": mesh or {}}, {"batch": ROWS, "accumulate": parts, "warmup": 0}
    values = settings("out", compute=compute, optimizer=optimizer, objective=objective, data__length=LENGTH, **tables)
    values["model"] = {"init": "base"} if "lora" in tables or command == "indicator" else {}
    if command == "grpo":
        values |= {"rollout": {"prompts": 2, "num_generations": ROWS // 2}}
    config = build_settings(OBJECTIVES[command].config, values)
    placed, model = training_mesh(config), FAMILIES[family]
    trained = OBJECTIVES[command].of(config).trainable(config, model)
    return Stepper(config, model, Placement(placed, trained.shardings(placed))), trained


def gradient_of(case, dtype, parts=1, mesh=None, short=False):
    """Of every trained parameter, and what was reported."""
    stepper, trained = stepper_of(case, dtype, parts, mesh)
    model, place = stepper.trainable.model, stepper.placement
    weights = init_params(model, jax.random.key(0), dtype="float32")
    frozen = {}
    if trained.shapes().keys() != weights.keys():
        specs, rounded = param_specs(model), lambda x: x.astype("bfloat16").astype("float32")
        frozen = {name: rounded(x).astype(specs[name].stored_dtype(dtype)) for name, x in weights.items()}
        draw = lambda name, shape: 0.05 * jax.random.normal(jax.random.key(len(name)), shape)
        weights = {name: draw(name, shape) for name, shape in trained.shapes().items()}
    weights = {name: jax.device_put(x, place.trained[name]) for name, x in weights.items()}
    frozen = jax.device_put(frozen, place.replicated)
    batch = jax.device_put(rows(case[1], parts, short), place.batch)

    @jax.jit
    def run(weights, frozen, batch):
        noised = stepper.add_noise(batch, jax.random.key(1), jnp.int32(0))
        return stepper.gradient(weights, frozen, noised, jax.random.key(2))

    return jax.device_get(run(weights, frozen, batch))


exact = functools.cache(lambda name, short=False: gradient_of(CASES[name], "float32", short=short))


def assert_close(found, wanted, worst, share=1e-4):
    """By norms of each parameter's gradient, or of this share of the whole gradient's where its own is smaller."""
    norm = lambda x: np.linalg.norm(x.astype(np.float64))
    least = share * np.sqrt(sum(norm(x) ** 2 for x in wanted.values()))
    assert least > 0
    errors = {name: norm(found[name] - x) / max(norm(x), least) for name, x in wanted.items()}
    name = max(errors, key=errors.__getitem__)
    print(f"{name}: {errors[name]:.2%}; the embedding table: {errors.get('embed.embedding', 0):.2%}")
    assert errors[name] < worst, name


@pytest.mark.parametrize("mesh", [None, MESH], ids=["one device", "mesh"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_in_bfloat16_are_those_in_float32(name, mesh):
    worst = OF_INDICATOR if name == "indicator" else WORST
    assert_close(gradient_of(CASES[name], "bfloat16", mesh=mesh)[0], exact(name)[0], worst)


@pytest.mark.parametrize(("parts", "mesh"), [(2, None), (8, None), (4, MESH)], ids=["2", "8", "4 on a mesh"])
@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_of_a_batch_are_the_whole(name, parts, mesh):
    """Also where rows are short in some parts and long in others, and so are means of what is reported."""
    found, wanted = gradient_of(CASES[name], "float32", parts, mesh, short=True), exact(name, short=True)
    assert_close(found[0], wanted[0], 1e-4)
    for told in wanted[1].keys() - {"auc"}:
        np.testing.assert_allclose(found[1][told], wanted[1][told], rtol=1e-4, err_msg=told)


def test_results_keep_routers_in_float32(tmp_path):
    """In the checkpoint, loaded again, and in what is sampled while a run goes on."""
    model = FAMILIES["llada2"].replace(dtype="bfloat16")
    config = build_settings(OBJECTIVES["block-diffusion"].config, settings("out", model={}))
    trained, weights = WholeModel(config, model), init_params(model, jax.random.key(0), dtype="float32")
    trained.write(tmp_path / "model", weights, steps=1, files={})
    written = dllm_jax.load(tmp_path / "model").params
    for params in (written, trained.for_sampling(weights, {}).params):
        for name, x in params.items():
            kept = name.endswith((".router", "mlp.bias"))
            assert x.dtype == ("float32" if kept else "bfloat16"), name
            np.testing.assert_array_equal(x, weights[name].astype(x.dtype), err_msg=name)


def test_gemma_has_the_gradients_of_float32():
    """Of its encoder and its decoder, which nothing trains yet.

    Its scores are not divided by the root of the heads' size: with scales of 1 random heads would choose keys by what
    bfloat16 rounds. The final norm undoes the last layer's scalars, whose gradient is 0.
    """
    sizes = {**SIZES, "num_layers": 2, "max_length": LENGTH}
    special = {"eos_id": 250, "pad_id": 250, "end_ids": (250,), "bos_id": 252}
    config = GEMMA.replace(**sizes, **special, dtype="float32")
    weights, batch = init_params(config, jax.random.key(0)), rows("masked-diffusion")
    weights |= {name: 0.3 * x for name, x in weights.items() if name.endswith(("q_norm.scale", "k_norm.scale"))}
    tokens, lengths = batch.tokens[0], batch.lengths[0]

    def loss(weights, dtype):
        model = config.replace(dtype=dtype)
        denoiser = Denoiser(model, cast_for_training(model, weights))
        hidden, kv = denoiser.forward(tokens, lengths)
        half = jnp.full(ROWS, LENGTH // 2, jnp.int32)
        canvas = tokens[:, -config.block_length :]
        soft = jax.lax.stop_gradient(denoiser.embed(canvas)) / 2
        decoded, _ = denoiser.denoise(canvas, soft, half, kv)
        cross = lambda hidden, wanted: (
            -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(denoiser.logits(hidden)), wanted[..., None], axis=-1))
        )
        return cross(hidden[:, :-1], tokens[:, 1:]) + cross(decoded, canvas)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    assert_close(*(jax.device_get(gradient(weights, dtype)) for dtype in ("bfloat16", "float32")), WORST, 1e-3)
