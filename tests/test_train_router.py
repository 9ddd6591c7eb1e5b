"""The losses of a mixture's routers: against NumPy, their gradients, what counts, and where there are none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_toys import LLADA, model_fields, run_config

import train
from dllm_jax import Denoiser, DllmError, published_config
from dllm_jax.config import Experts
from dllm_jax.models.denoiser import block_causal
from dllm_jax.models.layers import Rope, rope_angles
from dllm_jax.models.transformer import MoE, bind
from dllm_jax.params.specs import init_params
from train.config import LoraPart, RouterPart
from train.lora import adapter_shapes, attach_adapters
from train.losses import Batch, Noised, router_losses
from train.objectives import OBJECTIVES
from train.objectives.block_diffusion import BlockDiffusion, BlockDiffusionPart, NoisyCopies
from train.objectives.compression import Compression, CompressionPart
from train.objectives.d2f import D2F, D2FPart, NoisyBlocks
from train.objectives.masked_diffusion import MaskedDiffusion, MaskedDiffusionPart
from train.settings import build_settings
from train.step import REMAT

B, T = 4, 12
PART = RouterPart(balance=0.3, z=0.02)
MOE = LLADA.replace(
    family="llada-moe",
    qk_norm=True,
    num_layers=4,
    experts=Experts(num_experts=4, per_token=2, dim=8, dense_layers=(1,)),
)
LENGTHS = np.array([12, 9, 12, 4])


def denoiser_of(config=MOE, scan=False):
    params = init_params(config, jax.random.key(1), dtype="float32")
    return Denoiser(config, {name: x * 8 if x.ndim > 1 else x for name, x in params.items()}, scan=scan)


def make_noised():
    rng = np.random.default_rng(0)
    tokens, masked = rng.integers(0, 20, (B, T)), rng.random((B, T)) < 0.5
    masked &= np.arange(T) < LENGTHS[:, None]
    inputs = np.where(masked, MOE.mask_id, tokens)
    return Noised(*map(jnp.asarray, (inputs, tokens, masked.astype(np.float32), LENGTHS)))


def reference(denoiser, inputs, visible):
    """Both losses and the largest share, layer by layer in float64 on what the routers read; [B, T], [B, T or 1]."""
    model, experts = bind(denoiser.config, denoiser.params), denoiser.config.experts
    positions = jnp.broadcast_to(jnp.arange(T), inputs.shape)
    turn = rope_angles(positions, Rope(denoiser.config.head_dim, denoiser.config.rope_theta))
    x, balance, z, shares = model.embed_tokens(inputs), [], [], []
    for layer in model.layers:
        y = layer.attn_norm(x)
        x = x + layer.attn.attend(y, turn, layer.attn.keys_values(y, turn), visible)
        y = layer.mlp_norm(x)
        if not isinstance(layer.mlp, MoE):
            x = x + layer.mlp(y)
            continue
        counted = np.arange(T) < LENGTHS[:, None]
        scores = np.asarray(y, np.float64)[counted] @ np.asarray(layer.mlp.router[...], np.float64)
        most = scores.max(axis=1, keepdims=True)
        log = most[:, 0] + np.log(np.exp(scores - most).sum(axis=1))
        chosen = np.argsort(-scores, axis=1)[:, : experts.per_token].reshape(-1)
        share = np.bincount(chosen, minlength=experts.num_experts) / len(chosen)
        probability = np.exp(scores - log[:, None]).mean(axis=0)
        balance.append(experts.num_experts * np.sum(share * probability))
        z.append(np.mean(log**2))
        shares.append(share)
        x = x + layer.mlp(y)[0]
    return {"balance": np.mean(balance), "router_z": np.mean(z), "largest_expert": np.max(shares)}


def check(loss, metrics, plain, wanted):
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    expected = plain + PART.balance * wanted["balance"] + PART.z * wanted["router_z"]
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert metrics["loss"] == loss


@pytest.mark.parametrize("scan", [False, True], ids=["layers", "loop"])
@pytest.mark.parametrize("remat", ["none", "layers"])
def test_losses_are_the_formulas(scan, remat):
    """However layers are run; the objective's own loss is as without them, and is reported without theirs."""
    denoiser, noised = denoiser_of(scan=scan), make_noised()
    objective = MaskedDiffusion(MaskedDiffusionPart(chunk=8), router=PART)
    run = lambda objective: jax.jit(lambda *x: objective.loss(*x, remat=REMAT[remat]))(denoiser, denoiser, noised)
    plain, of_plain = run(dataclasses.replace(objective, router=RouterPart()))
    assert of_plain.keys() == {"loss", "cross_entropy"}
    check(*run(objective), plain, reference(denoiser, noised.inputs, jnp.asarray(LENGTHS)[:, None]))


def test_a_student_in_blocks_is_what_counts():
    denoiser, noised = denoiser_of(), make_noised()
    prompts = jnp.asarray([2, 0, 3, 1])
    blocks = NoisyBlocks(*noised[:4], prompts)
    part = D2FPart(block_length=4, target="data", chunk=8)
    run = lambda router: jax.jit(D2F(part, router=router).loss)(denoiser, denoiser, blocks)
    visible = jnp.minimum(block_causal(T, prompts, 4), noised.lengths[:, None])
    check(*run(PART), run(RouterPart())[0], reference(denoiser, noised.inputs, visible))


def test_block_diffusion_counts_rows_and_their_copies():
    """Copies without noise are routed as the row is: their sums are twice or three times its own, and so nothing else
    comes out."""
    config = MOE.replace(family="sdar", attention="block", block_length=4)
    denoiser, noised = denoiser_of(config), make_noised()
    found = []
    for complementary in (False, True):
        copies = jnp.repeat(noised.tokens[:, None], 1 + complementary, axis=1)
        rows = NoisyCopies(copies, noised.tokens, jnp.zeros(copies.shape), jnp.asarray(LENGTHS), noised.lengths)
        part = BlockDiffusionPart(complementary=complementary)
        found.append(jax.jit(BlockDiffusion(part, router=PART).loss)(denoiser, denoiser, rows))
    visible = jnp.minimum((jnp.arange(T) // 4 + 1) * 4, noised.lengths[:, None])
    for loss, metrics in found:
        check(loss, metrics, 0.0, reference(denoiser, noised.tokens, visible))


def test_padding_does_not_count():
    denoiser, noised = denoiser_of(), make_noised()
    objective = Compression(CompressionPart(), router=PART)
    other = noised._replace(inputs=jnp.where(jnp.arange(T) < noised.lengths[:, None], noised.inputs, 7))
    assert jnp.any(other.inputs != noised.inputs)
    run = jax.jit(objective.loss)
    for name, value in run(denoiser, denoiser, noised)[1].items():
        assert run(denoiser, denoiser, other)[1][name] == value, name


def test_gradients_are_differences():
    """Of the routers, and of adapters ahead of them, which a fixed router's losses reach too; between two choices of
    other experts, where the losses jump."""
    noised, part = make_noised(), LoraPart(rank=2)
    params = init_params(MOE, jax.random.key(3), dtype="float32")
    draw = np.random.default_rng(1)
    adapters = {name: jnp.asarray(draw.normal(size=shape) * 0.3) for name, shape in adapter_shapes(MOE, part).items()}
    routers = {name: x * 30 for name, x in params.items() if name.endswith("router")}

    @jax.jit
    def penalty(routers, adapters):
        learner = Denoiser(MOE, attach_adapters({**params, **routers}, adapters, part))
        counted = jnp.arange(T) < noised.lengths[:, None]
        routing = learner.forward_with_routing(noised.inputs, noised.lengths, counted)[2]
        return router_losses(routing, 1.0, 0.05)[0], routing.chosen

    gradient, _ = jax.jit(jax.grad(penalty, (0, 1), has_aux=True))(routers, adapters)
    for argument in (0, 1):
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in gradient[argument].values()))

        def at(step, argument=argument, norm=norm):
            moved = [routers, adapters]
            moved[argument] = {name: x + step / norm * gradient[argument][name] for name, x in moved[argument].items()}
            return penalty(*moved)

        (above, chosen), (below, as_chosen) = at(1e-3), at(-1e-3)
        np.testing.assert_array_equal(chosen, as_chosen)
        np.testing.assert_allclose((above - below) / 2e-3, norm, rtol=0.02)


def test_experts_become_even():
    """Routers that send all tokens to the same experts stop doing so."""
    denoiser, noised = denoiser_of(), make_noised()
    bias = {name: x.at[:, 0].add(0.2 * jnp.sign(x.sum(1))) for name, x in denoiser.params.items() if "router" in name}
    objective = MaskedDiffusion(MaskedDiffusionPart(), router=RouterPart(balance=1.0))

    @jax.jit
    def step(routers):
        loss = lambda routers: objective.loss(Denoiser(MOE, {**denoiser.params, **routers}), denoiser, noised)
        (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(routers)
        return jax.tree.map(lambda x, g: x - 0.1 * g, routers, gradient), metrics

    routers, first = step(bias)
    for _ in range(40):
        routers, last = step(routers)
    assert last["balance"] < first["balance"] - 0.05 and last["balance"] >= 0.9
    assert last["largest_expert"] < first["largest_expert"]


def test_a_run_on_a_mesh_is_a_run(tmp_path):
    """The means are of all devices' tokens."""
    found = []
    for mesh in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        experts = {"num_experts": 4, "per_token": 2, "dim": 8, "dense_layers": [1]}
        fields = {**model_fields(MOE), "experts": experts}
        values = {"model__config": fields, "router__balance": 0.3, "router__z": 0.02, "compute__mesh": mesh}
        found.append(train.train(run_config(tmp_path / f"run{len(mesh)}", steps=2, **values)).metrics)
    for name in ("loss", "cross_entropy", "balance", "router_z", "largest_expert", "grad_norm"):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("command", "model", "sentence"),
    [
        ("masked-diffusion", LLADA, "a llada model has no experts to balance; leave out the table router"),
        (
            "block-diffusion",
            published_config("llada2.0-mini"),
            "the router of a llada2 model has no softmax, and is balanced",
        ),
        ("autoregressive", LLADA.replace(attention="causal"), "a llada model has no experts to balance"),
        ("indicator", MOE, "python -m train indicator adds no losses of routers; leave out the table router"),
    ],
)
def test_where_there_are_none(command, model, sentence):
    kind = OBJECTIVES[command].config
    config = build_settings(kind, {"out": "out", "steps": 1000, "router": {"balance": 0.01}, "data": {"length": 32}})
    with pytest.raises(DllmError, match=sentence):
        OBJECTIVES[command].of(config).fit_model(model, config)
    with pytest.raises(DllmError, match="router.z is -1.0; it must be at least 0"):
        build_settings(kind, {"out": "out", "steps": 1000, "router": {"z": -1.0}})


def test_counted_are_positions_up_to_the_lengths():
    objective = MaskedDiffusion(MaskedDiffusionPart(), router=PART)
    assert dataclasses.replace(objective, router=RouterPart()).counted_positions(jnp.asarray([2]), 3) is None
    assert objective.counted_positions(jnp.asarray([2, 0]), 3).tolist() == [[True, True, False], [False] * 3]
    batch = Batch(jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), bool), jnp.asarray([2]))
    assert objective.corrupt(jax.random.key(0), batch, Denoiser(MOE, {})).lengths.tolist() == [2]
