"""From an autoregressive model to a diffusion model: the weights stay, and attention may open step by step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses
from test_train_loss import denoiser_of, make_batch
from train_toys import DREAM, LLADA, run_config, settings

import convert
import dllm_jax
import train
from dllm_jax import Denoiser
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import Llama3Rope
from dllm_jax.params.specs import init_params
from samplers import make_sampler, sample
from train.objectives.block_diffusion import BlockDiffusionConfig
from train.objectives.masked_diffusion import MaskedDiffusion, MaskedDiffusionPart
from train.settings import build_settings
from train.setup import adapt_config

CAUSAL = {"attention": "causal", "shift": True, "mask_id": None}
QWEN2 = LLADA.replace(family="qwen2", qkv_bias=True, num_kv_heads=1, tied_embeddings=True, **CAUSAL)
QWEN3 = LLADA.replace(family="qwen3", qk_norm=True, num_kv_heads=1, bos_id=None, **CAUSAL)
LLAMA = LLADA.replace(family="llama", num_kv_heads=1, **CAUSAL)
KINDS = {"llada-8b-base": LLAMA, "dream-7b-base": QWEN2, "fast-dllm-v2-1.5b": QWEN2, "sdar-8b-chat": QWEN3}
STEPS = 4


@pytest.mark.parametrize("kind", KINDS)
def test_with_causal_visibility_it_is_the_autoregressive_model(kind):
    """To the bit. A family without the shift has the same logits one position earlier."""
    causal = denoiser_of(KINDS[kind])
    model = Denoiser(adapt_config(causal.config.replace(mask_id=21), kind), causal.params)
    assert (model.config.is_causal, model.mask_id) == (False, 21)
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 20)
    visible = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32) + 1, (2, 12))
    found = model.logits(model.forward(tokens, visible)[0])
    found = found if model.config.shift else jnp.roll(found, 1, axis=1)
    wanted = causal(tokens)
    np.testing.assert_array_equal(found[:, 1:], wanted[:, 1:])
    assert np.abs(model(tokens) - wanted).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_a_checkpoint_writes_a_model_that_samples_and_goes_to_the_hub(kind, tmp_path):
    """Its weights are the checkpoint's bytes where nothing is learned."""
    config, name = KINDS[kind], "fast-dllm-v2" if "fast" in kind else kind.partition("-")[0]
    params = init_params(config, jax.random.key(0), dtype="float32")
    checkpoint.save(tmp_path / "causal", config, params.items())
    values = settings(tmp_path / "run", steps=1, optimizer__lr=0.0, optimizer__warmup=0)
    values["model"] = {"init": str(tmp_path / "causal"), "adapt": kind, "config": {"mask_id": 21}}
    if name in ("dream", "llada"):
        build = run_config(tmp_path / "run", steps=1, optimizer__lr=0.0, optimizer__warmup=0)
        build = dataclasses.replace(build, model=dataclasses.replace(build.model, **values["model"]))
    else:
        build = build_settings(BlockDiffusionConfig, values | {"objective": {"block_length": 4}})
    model = dllm_jax.load(train.train(build).folder)
    assert (model.config.family, model.config.mask_id, model.config.eos_id) == (name, 21, config.eos_id)
    assert model.config.block_length == (None if name in ("dream", "llada") else 4)
    assert model.params.keys() == params.keys()
    for parameter, value in params.items():
        np.testing.assert_array_equal(model.params[parameter], value, err_msg=parameter)
    sampler = make_sampler(model, "threshold", gen_length=8)
    result = sample(sampler, model.denoiser, jnp.asarray([[1, 2, 3, 4]]))
    assert result.tokens.shape == (1, 8) and (np.asarray(result.tokens) != 21).all()
    convert.export(model.folder, tmp_path / "hub")
    convert.convert(name, tmp_path / "hub", tmp_path / "again")
    again = dllm_jax.load(tmp_path / "again")
    assert again.config.replace(bos_id=None) == model.config.replace(bos_id=None)
    assert all((again.params[parameter] == value).all() for parameter, value in model.params.items())


def test_a_format_that_cannot_say_what_a_model_is(tmp_path):
    """Llama 3's stretched frequencies are none of LLaDA's: ours keeps them, and an export would lose them."""
    config = LLAMA.replace(llama3=Llama3Rope(8.0, 8))
    checkpoint.save(tmp_path / "causal", config, init_params(config, jax.random.key(0), dtype="float32").items())
    build = run_config(tmp_path / "run", steps=1, optimizer__warmup=0)
    part = {"init": str(tmp_path / "causal"), "adapt": "llada-8b-base", "config": {"mask_id": 21}}
    folder = train.train(dataclasses.replace(build, model=dataclasses.replace(build.model, **part))).folder
    assert dllm_jax.load(folder).config.llama3 == config.llama3
    with refuses("a llada checkpoint of the hub's format cannot say llama3 = Llama3Rope(factor=8.0"):
        convert.export(folder, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_what_cannot_become_a_diffusion_model_is_refused(tmp_path):
    for name, config in (("two", QWEN2), ("three", QWEN3), ("diffusion", DREAM)):
        checkpoint.save(tmp_path / name, config, init_params(config, jax.random.key(0), dtype="float32").items())

    def start(name, adapt, steps=6, **more):
        config = run_config(tmp_path / "run", steps=steps, **more)
        part = dataclasses.replace(config.model, **{"init": str(tmp_path / name), "config": {}, **adapt})
        train.train(dataclasses.replace(config, model=part))

    with refuses("a qwen2 model is causal", "set model.adapt to what it shall become, such as dream-7b-base"):
        start("two", {})
    with refuses("the mask token 151666 for a qwen2 model", "vocabulary of 24 tokens; set model.config.mask_id"):
        start("two", {"adapt": "dream-7b-base"})
    with refuses("is its eos_id; set model.config.mask_id to an id that no text has"):
        start("two", {"adapt": "dream-7b-base", "config": {"mask_id": 20}})
    with refuses("only one of them has qk_norm"):
        start("three", {"adapt": "dream-7b-base", "config": {"mask_id": 21}})
    with refuses("remove model.config.mask_id"):
        start("diffusion", {"config": {"mask_id": 5}})
    with refuses("objective.anneal_attention 7 is longer than the run of 6 steps", "set it to 6 or less"):
        run_config(tmp_path / "run", steps=6, objective__anneal_attention=7)
    assert not (tmp_path / "run").exists()


def test_the_mask_token_is_none_that_text_is_made_of(tmp_path, qwen2_tiny):
    config = run_config(tmp_path / "run")
    part = {"init": str(qwen2_tiny.folder), "adapt": "dream-7b-base", "config": {"mask_id": 97}}
    with refuses("the mask token 97 is the tokenizer's 'a', which text is made of; set model.config.mask_id"):
        train.train(dataclasses.replace(config, model=dataclasses.replace(config.model, **part)))


# --- attention that opens step by step --------------------------------------------------------------------------------


def annealed(config, step, smoothing=0.0):
    """The objective, a model, and a batch as a step learns from it."""
    objective = MaskedDiffusion(MaskedDiffusionPart(eps=0.3, anneal_attention=STEPS, smoothing=smoothing))
    denoiser = denoiser_of(config)
    noised = objective.corrupt(jax.random.key(2), make_batch("sft"), denoiser)
    return objective, denoiser, noised if step is None else objective.at_step(noised, jnp.int32(step))


@functools.partial(jax.jit, static_argnums=0)
def gradient(objective, denoiser, noised):
    loss = lambda params: objective.loss(dataclasses.replace(denoiser, params=params), denoiser, noised)[0]
    return jax.value_and_grad(loss)(denoiser.params)


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=lambda config: config.family)
def test_the_first_step_is_causal_and_the_last_ones_are_not_annealed(config):
    """As a causal model's loss, and to the bit as without annealing; held-out rows always see all."""
    objective, denoiser, first = annealed(config, 0)
    causal = Denoiser(config.replace(attention="causal"), denoiser.params)
    found, wanted = gradient(objective, denoiser, first), gradient(objective, causal, first._replace(ahead=None))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    *_, plain = annealed(config, None)
    whole = gradient(objective, denoiser, plain)
    for step in (STEPS, STEPS + 3):
        last = gradient(objective, denoiser, annealed(config, step)[2])
        jax.tree.map(np.testing.assert_array_equal, last, whole)
    assert abs(found[0] - whole[0]) > 1e-3
    assert objective.corrupt_heldout(jax.random.key(2), make_batch("sft"), denoiser).ahead is None


@pytest.mark.parametrize(("step", "seen"), [(0, 5), (1, 7), (2, 9), (3, 10), (4, 12)])
def test_a_position_sees_its_share_of_what_comes_after_it(step, seen):
    """Position 4 of 12 sees 5 + round(7 step / 4) tokens: of one layer, after which others have passed on what they
    see, the last of these changes it and those after them do not."""
    _, denoiser, noised = annealed(LLADA.replace(num_layers=1), step)

    def hidden(tokens):
        inputs = jnp.broadcast_to(tokens, (4, 12))
        lengths = jnp.full(4, 12, jnp.int32)
        return train.losses.hidden_states(denoiser, inputs, lengths, ahead=noised.ahead)[0, 4]

    tokens = jnp.arange(12, dtype=jnp.int32)
    whole = hidden(tokens)
    assert np.abs(whole - hidden(tokens.at[seen - 1].set(19))).max() > 1e-4
    for later in range(seen, 12):
        np.testing.assert_array_equal(whole, hidden(tokens.at[later].set(19)))


def test_soft_inputs_see_no_more_than_the_model():
    """A token at the end changes what smoothing adds before it only where it is seen."""
    objective, denoiser, noised = annealed(LLADA, 0, smoothing=0.5)
    changed = noised._replace(inputs=noised.inputs.at[:, 6].set(3), tokens=noised.tokens.at[:, 6].set(3))
    before, after = objective.soften(denoiser, noised), objective.soften(denoiser, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.abs(before).max() > 0
    seen = [objective.soften(denoiser, each._replace(ahead=None)) for each in (noised, changed)]
    assert np.abs(seen[0][:, :6] - seen[1][:, :6]).max() > 1e-5
