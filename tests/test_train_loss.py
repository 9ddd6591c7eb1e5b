"""The objective against its formula, and every way of computing it against the plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import programs_in
from train_toys import DREAM, LLADA

import dllm_jax
from dllm_jax import Denoiser
from dllm_jax.config import Experts
from dllm_jax.params.specs import init_params
from samplers.likelihood.estimators import masked_loss
from train.config import LoraPart
from train.lora import adapter_shapes, attach_adapters
from train.losses import Batch, Noised, diffusion_loss
from train.objectives.masked_diffusion import (
    MaskedDiffusion,
    MaskedDiffusionPart,
    corrupt,
    mask_probabilities,
    soft_inputs,
)
from train.step import REMAT

B, T = 4, 12
PROMPTS, LENGTHS = np.array([3, 0, 5, 2]), np.array([12, 12, 10, 7])


def make_batch(kind):
    rng = np.random.default_rng(0)
    position = np.arange(T)
    prompts = PROMPTS if kind == "sft" else np.zeros(B, int)
    lengths = LENGTHS if kind == "sft" else np.full(B, T)
    targets = (position >= prompts[:, None]) & (position < lengths[:, None])
    if kind == "sft":
        targets[0, 6:8] = False  # given inside the answer
    return Batch(jnp.asarray(rng.integers(0, 20, (B, T))), jnp.asarray(targets), jnp.asarray(lengths))


def denoiser_of(config):
    params = init_params(config, jax.random.key(1), dtype="float32")
    return Denoiser(config, {name: x * 8 if x.ndim > 1 else x for name, x in params.items()})  # far from uniform


def reference(denoiser, batch, noised, eps):
    """Sum over masked of CE / p / number of targets, mean over rows; float64 on the host, one row after another."""
    total = 0.0
    logits = np.asarray(jax.jit(Denoiser.__call__)(denoiser, noised.inputs, noised.lengths), np.float64)
    for b in range(B):
        first = 1 if denoiser.config.shift else 0
        targets = [i for i in range(T) if bool(batch.targets[b, i]) and i >= first]
        masked = [i for i in range(T) if int(noised.inputs[b, i]) == denoiser.mask_id]
        assert set(masked) <= set(targets)
        row = 0.0
        for i in masked:
            z = logits[b, i]
            row += np.log(np.sum(np.exp(z - z.max()))) + z.max() - z[int(batch.tokens[b, i])]
            p = 1.0 / (float(noised.weights[b, i]) * len(targets))
            assert eps - 1e-6 <= p <= 1.0 + 1e-6
        total += row / p / len(targets) if masked else 0.0
    return total / B


@pytest.mark.parametrize("kind", ["sft", "pretrain"])
@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_loss_is_the_formula(config, kind):
    denoiser, batch = denoiser_of(config), make_batch(kind)
    noised = corrupt(jax.random.key(2), batch, denoiser, eps=0.1)
    wanted = reference(denoiser, batch, noised, 0.1)
    loss = jax.jit(diffusion_loss)(denoiser, noised)
    np.testing.assert_allclose(loss.loss.value, wanted, rtol=1e-5)
    assert wanted > 1.0


def test_row_loss_is_that_of_the_likelihood():
    """`samplers.likelihood.estimators.masked_loss` of the same masks, over the number of answer tokens."""
    for config in (LLADA, DREAM):
        denoiser = denoiser_of(config)
        tokens = jax.random.randint(jax.random.key(0), (1, T), 0, 20)
        targets = (jnp.arange(T) >= 4)[None]
        noised = corrupt(jax.random.key(3), Batch(tokens, targets, jnp.array([T])), denoiser, eps=0.3)
        probability = 1.0 / (jnp.max(noised.weights) * 8)
        wanted = jax.jit(masked_loss)(denoiser, tokens[0, :4], tokens[0, 4:], noised.inputs[:, 4:], probability[None])
        np.testing.assert_allclose(jax.jit(diffusion_loss)(denoiser, noised).loss.value, wanted / 8, rtol=1e-5)


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_chunks_and_remat_change_nothing(config):
    denoiser = denoiser_of(config)
    noised = corrupt(jax.random.key(5), make_batch("sft"), denoiser)

    def gradient(scan=False, **options):
        loss = lambda params: diffusion_loss(Denoiser(config, params, scan=scan), noised, **options)
        return jax.jit(jax.value_and_grad(lambda params: (loss(params).loss.value, loss(params)), has_aux=True))(
            denoiser.params
        )

    (_, plain), wanted = gradient()
    for options in (
        {"chunk": 5},
        {"chunk": 8, "groups": 2, "remat": REMAT["layers"]},
        {"chunk": 1000, "remat": REMAT["matmuls"]},
        {"scan": True, "remat": REMAT["layers"]},
    ):
        (_, losses), found = gradient(**options)
        np.testing.assert_allclose(losses[:2], plain[:2], rtol=2e-6)
        np.testing.assert_allclose(*(list(one.by_level.values()) for one in (losses, plain)), rtol=2e-6)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_soft_inputs_are_what_smoothing_adds(config):
    """Masks get what one forward expects there; its predictions have no gradient, and chunks change nothing."""
    denoiser, first = denoiser_of(config), 1 if config.shift else 0
    noised = corrupt(jax.random.key(5), make_batch("sft"), denoiser)._replace(alpha=jnp.array([0.3, 0.0, 0.1, 0.2]))
    logits = np.asarray(jax.jit(Denoiser.__call__)(denoiser, noised.inputs, noised.lengths), np.float64)
    share = np.exp(logits - logits.max(-1, keepdims=True))
    expected = (share / share.sum(-1, keepdims=True)) @ np.asarray(denoiser.params["embed.embedding"], np.float64)
    masked = np.asarray(noised.inputs)[..., None] == denoiser.mask_id
    wanted = np.where(masked, expected * np.asarray(noised.alpha)[:, None, None], 0)
    for chunk in (0, 5, 1000):
        found = jax.jit(functools.partial(soft_inputs, chunk=chunk))(denoiser, noised)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert masked[:, first:].any() and not np.asarray(found)[1].any()

    objective = MaskedDiffusion(MaskedDiffusionPart(smoothing=0.3))
    learn = lambda params: objective.loss(Denoiser(config, params), Denoiser(config, {}), noised)[0]
    constant = lambda params: diffusion_loss(Denoiser(config, params), noised, soft=jnp.asarray(wanted)).loss.value
    for one, other in zip(*(jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(denoiser.params))
                            for loss in (learn, constant)), strict=True):  # fmt: skip
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert abs(learn(denoiser.params) - diffusion_loss(denoiser, noised).loss.value) > 1e-3


def test_weights_of_soft_inputs_are_drawn_for_each_row():
    batch = Batch(*(jnp.zeros((512, *x.shape[1:]), x.dtype) for x in make_batch("sft")[:3]))
    draw = lambda smoothing: MaskedDiffusion(MaskedDiffusionPart(smoothing=smoothing)).corrupt(
        jax.random.key(0), batch, Denoiser(LLADA, {})
    )
    assert draw(0.0).alpha is None
    alpha, plain = np.asarray(draw(0.3).alpha), draw(0.0)
    assert alpha.shape == (512,) and 0 <= alpha.min() < 0.01 and 0.29 < alpha.max() < 0.3
    np.testing.assert_array_equal(draw(0.3).inputs, plain.inputs)  # the masks are the same without


def test_layers_as_a_loop_are_the_layers():
    """Also where they are not all alike: experts behind a dense layer, and adapters beside some kernels."""
    experts = Experts(num_experts=4, per_token=2, dim=8, dense_layers=(0,))
    config = LLADA.replace(num_layers=5, experts=experts)
    params, part = denoiser_of(config).params, LoraPart(rank=2, targets=("layers.4.attn.*",))
    ones = {name: 0.1 * jnp.ones(shape) for name, shape in adapter_shapes(config, part).items()}
    kernels = attach_adapters(params, ones, part, jax.random.key(0))
    tokens, lengths = make_batch("sft").tokens, jnp.asarray(LENGTHS)
    run = jax.jit(lambda kernels, scan: Denoiser(config, kernels, scan=scan).forward(tokens, lengths), static_argnums=1)
    for found, wanted in zip(*(jax.tree.leaves(run(kernels, scan)) for scan in (True, False)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    loops = [text.count("stablehlo.while") for text in (run.lower(kernels, scan).as_text() for scan in (True, False))]
    assert loops[0] >= loops[1] + 1  # layers 1 to 3
    noised = corrupt(jax.random.key(5), make_batch("sft"), Denoiser(LLADA, {}))
    loss = lambda params: diffusion_loss(Denoiser(LLADA, params, scan=True), noised).loss.value
    assert "stablehlo.while" in jax.jit(loss).lower(denoiser_of(LLADA).params).as_text()  # the objective has it too


def test_chunks_keep_no_logits_for_the_backward_pass():
    """With 16 rows of 32 positions and 5000 tokens, all float32 logits would take 10 MB."""
    config = LLADA.replace(vocab_size=5000, num_layers=1)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype="float32"))
    row = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct((16, *shape), dtype)
    noised = Noised(row(32), row(32), row(32, dtype=jnp.float32), row())

    def temporaries(chunk):
        loss = lambda params, noised: diffusion_loss(Denoiser(config, params), noised, chunk=chunk).loss.value
        return jax.jit(jax.grad(loss)).lower(params, noised).compile().memory_analysis().temp_size_in_bytes

    logits = 16 * 32 * 5000 * 4
    assert temporaries(0) > logits
    assert temporaries(8) < logits / 4


def test_chunks_add_up_what_is_learned_alone_and_pass_no_head_through_conditionals():
    """A frozen vocabulary head costs no gradient of its size; autodiff would write the head for each chunk."""
    config = LLADA.replace(vocab_size=5000, num_layers=1)
    params = init_params(config, jax.random.key(0), dtype="float32")
    noised = corrupt(jax.random.key(5), make_batch("sft"), Denoiser(config, {}))
    size = config.embed_dim * config.vocab_size

    def results(name, learned):
        """Arrays of the head's size that an operation gives in the gradient of some parameters."""
        loss = lambda some: diffusion_loss(Denoiser(config, {**params, **some}), noised, chunk=8).loss.value
        program = jax.make_jaxpr(jax.grad(loss))({key: params[key] for key in learned}).jaxpr
        found = [each for part in programs_in(program) for each in part.eqns if each.primitive.name == name]
        assert found
        return sum(out.aval.size == size for each in found for out in each.outvars)

    (head,) = (key for key in params if key.startswith("lm_head"))
    layer = next(key for key in params if key.startswith("layers"))
    assert results("scan", [head, layer]) == 1 and results("scan", [layer]) == 0
    assert results("cond", [head, layer]) == 0


def test_noise():
    batch = Batch(jnp.zeros((2000, T), jnp.int32), jnp.arange(T)[None] >= jnp.full((2000, 1), 2), jnp.full(2000, T))
    shifted, plain = denoiser_of(DREAM), denoiser_of(LLADA)
    noised = corrupt(jax.random.key(0), batch, plain, eps=0.01)
    masked = noised.inputs == plain.mask_id
    assert not masked[:, :2].any()
    np.testing.assert_allclose(masked[:, 2:].mean(), 0.505, atol=0.02)  # E[t] with t ~ U(0.01, 1)
    np.testing.assert_allclose(jnp.sum(noised.weights, axis=1).mean(), 1.0, atol=0.05)  # E[1 / t of the masked] = 1
    everything = batch._replace(targets=jnp.ones_like(batch.targets))
    inputs = corrupt(jax.random.key(0), everything, shifted).inputs
    assert not (inputs[:, 0] == shifted.mask_id).any() and (inputs[:, 1] == shifted.mask_id).any()


def test_noise_does_not_depend_on_how_a_batch_is_divided():
    denoiser, batch = denoiser_of(LLADA), make_batch("sft")
    whole = corrupt(jax.random.key(0), batch, denoiser, stratified=True)
    divided = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    parts = corrupt(jax.random.key(0), divided, denoiser, stratified=True)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(a, b.reshape(a.shape))


def test_stratified_probabilities_are_uniform_and_spread():
    spread = mask_probabilities(jax.random.key(0), 64, 1e-3, stratified=True)
    np.testing.assert_allclose(np.sort(spread), 1e-3 + 0.999 * (np.arange(64) + 0.5) / 64, atol=0.5 / 64 + 1e-6)
    first = jax.vmap(lambda key: mask_probabilities(key, 8, 1e-3, stratified=True)[0])(
        jax.random.split(jax.random.key(1), 2000)
    )
    np.testing.assert_allclose(np.quantile(first, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.04)


@pytest.mark.parametrize("name", ["llada-moe", "qwen2-tied"])
def test_other_configs_have_a_gradient_everywhere(name):
    if name == "llada-moe":
        from dllm_jax.config import Experts

        config = LLADA.replace(family="llada-moe", qk_norm=True, experts=Experts(num_experts=4, per_token=2, dim=8))
    else:
        config = DREAM.replace(tied_embeddings=True)
    denoiser, batch = denoiser_of(config), make_batch("pretrain")
    noised = corrupt(jax.random.key(0), batch, denoiser)
    gradient = jax.jit(jax.grad(lambda params: diffusion_loss(Denoiser(config, params), noised, chunk=16).loss.value))(
        denoiser.params
    )
    assert dllm_jax.models.transformer.param_specs(config).keys() == gradient.keys()
    for name, x in gradient.items():
        assert np.isfinite(x).all() and (np.any(x != 0) or name.endswith("k_proj.bias")), name
