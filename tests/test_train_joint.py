"""Training of models that read causally and draft blocks: the joint objective, its adapters for drafts, and runs."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses
from test_train_grpo import assert_same, latest_state
from test_train_run import interrupting
from train_toys import LLADA, Reverse, model_fields, settings

import convert
import dllm_jax
import train
from convert.adapters import install_draft_adapter
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import Yarn
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.params.low_rank import LowRank
from dllm_jax.params.specs import init_params
from samplers import SelfSpeculation, make_sampler, sample_jit
from train.losses import Batch
from train.objectives import OBJECTIVES
from train.objectives.joint import Joint, JointPart
from train.settings import build_settings

B, T, L = 6, 12, 4
MODEL = LLADA.replace(
    family="nemotron", attention="causal-block", block_length=L, yarn=Yarn(8.0, 4, 4.0, 0.5, query_scale=0.1)
)


def batch_of() -> Batch:
    tokens = jax.random.randint(jax.random.key(0), (B, T), 0, 20)
    lengths = jnp.asarray([12, 12, 9, 12, 7, 12])
    position = jnp.arange(T)
    return Batch(tokens, (position >= 3) & (position < lengths[:, None]), lengths)


def denoiser_of(seed: int = 1) -> Denoiser:
    return Denoiser(MODEL, init_params(MODEL, jax.random.key(seed)))


def adapter_of(scale: float) -> LowRank:
    name, shape = "layers.0.attn.o_proj.kernel", (16, 16)
    a, b = (jax.random.normal(jax.random.key(n), s) * scale for n, s in ((2, (shape[0], 2)), (3, (2, shape[1]))))
    return LowRank({name: (a, b)}, 1.0)


def settings_of(out, **changes):
    joint = {"model": {"config": model_fields(MODEL)}, **changes}
    return build_settings(OBJECTIVES["joint"].config, settings(out, **joint))


def test_the_losses_are_those_of_their_modes() -> None:
    """The causal one is that of the model read causally, whatever is masked; the other ignores tokens after a block."""
    denoiser, objective = denoiser_of(), Joint(JointPart(noise="block"))
    noised = objective.corrupt(jax.random.key(4), batch_of(), denoiser)
    means = objective.means(denoiser, denoiser, noised)
    log = jax.nn.log_softmax(denoiser.as_causal(noised.tokens, noised.lengths))
    own = -jnp.take_along_axis(log, noised.tokens[..., None], axis=-1)[..., 0]
    wanted = jnp.sum(jnp.where(noised.targets, own, 0.0)) / jnp.sum(noised.targets)
    np.testing.assert_allclose(means["next_token"].value, wanted, rtol=1e-5)
    both = 0.3 * means["diffusion"].value + means["next_token"].value
    np.testing.assert_allclose(means["loss"].value, both, rtol=1e-6)
    row, at = 0, slice(L, 2 * L)
    alone = dataclasses.replace(denoiser, config=MODEL)
    seen = jnp.concatenate([noised.tokens[row, :L], noised.inputs[row, 0, at]])[None]
    visible = jnp.where(jnp.arange(2 * L) < L, jnp.arange(2 * L) + 1, 2 * L)[None]
    log = jax.nn.log_softmax(alone.logits(alone.forward(seen, visible)[0]))[0, at]
    own = -jnp.take_along_axis(log, noised.tokens[row, at][:, None], axis=-1)[:, 0]
    only = noised._replace(weights=jnp.zeros_like(noised.weights).at[row, 0, at].set(noised.weights[row, 0, at]))
    found = objective.means(denoiser, denoiser, only)["diffusion"].total
    np.testing.assert_allclose(found, jnp.sum(own * noised.weights[row, 0, at]), rtol=1e-4)


def test_draft_adapters_are_off_where_the_row_is_read() -> None:
    denoiser, objective = denoiser_of(), Joint(JointPart(draft_adapter=True))
    noised = objective.corrupt(jax.random.key(4), batch_of(), denoiser)
    seeds = np.arange(T) % L == 0
    learned = np.asarray(noised.weights[:, 0]) > 0
    assert (learned == np.asarray(noised.targets) & ~seeds).all()
    assert (np.asarray(noised.inputs[:, 0]) == MODEL.mask_id)[learned].all()
    assert (np.asarray(noised.inputs[:, 0])[:, seeds] == np.asarray(noised.tokens)[:, seeds]).all()
    drafting = denoiser.with_adapter(adapter_of(1.0))
    found = objective.means(drafting, denoiser, noised)
    assert "next_token" not in found
    idle = objective.means(denoiser.with_adapter(adapter_of(0.0)), denoiser, noised)
    plain = objective.means(denoiser, denoiser, noised)
    np.testing.assert_allclose(idle["loss"].value, plain["loss"].value, rtol=1e-5)
    assert abs(found["loss"].value - plain["loss"].value) > 1e-4
    everywhere = objective.means(drafting, drafting, noised)
    assert abs(found["loss"].value - everywhere["loss"].value) > 1e-5
    with refuses("lora.rank"):
        objective.fit_model(MODEL, settings_of("x"))


def test_runs_end_resume_and_draft(tmp_path, monkeypatch) -> None:
    """A run that is stopped goes on bit for bit; adapters for drafts are trained on it, installed, and change no
    token of greedy self-speculation."""
    whole = train.train(settings_of(tmp_path / "whole", steps=8, checkpoint__every=4))
    with monkeypatch.context() as patch:
        patch.setattr(Reverse, "example", interrupting(Reverse.example, 40))  # of the sixth step
        with pytest.raises(train.Interrupted):
            train.train(settings_of(tmp_path / "run", steps=8, checkpoint__every=4))
    outcome = train.train(settings_of(tmp_path / "run", steps=8, checkpoint__every=4))
    assert 0 < outcome.started < 8
    assert_same(latest_state(tmp_path / "run"), latest_state(tmp_path / "whole"))
    model = dllm_jax.load(whole.folder)
    assert model.config.block_length == L and model.generation["block_length"] == L

    lora = {"rank": 2, "targets": ["layers.*.attn.o_proj.kernel"]}
    changes = {"model": {"init": str(whole.folder)}, "lora": lora, "objective": {"draft_adapter": True}}
    adapters = train.train(settings_of(tmp_path / "adapters", steps=3, **changes)).folder
    shutil.copytree(whole.folder, tmp_path / "drafting")
    install_draft_adapter(adapters, tmp_path / "drafting")
    with refuses("--overwrite"):
        install_draft_adapter(adapters, tmp_path / "drafting")
    with refuses("does not draft for itself"):
        plain = dllm_jax.random_model(LLADA)
        checkpoint.save(tmp_path / "llada", LLADA, plain.params.items())
        install_draft_adapter(adapters, tmp_path / "llada")
    drafting = dllm_jax.load(tmp_path / "drafting")
    sampler = make_sampler(drafting, "self-speculation:block_length=4", gen_length=8, ignore_eos=True)
    assert isinstance(sampler, SelfSpeculation) and sampler.adapter is not None
    prompts = jnp.asarray([[1, 2, 3, 0], [4, 5, 6, 7]]), jnp.asarray([3, 4])
    with_adapter = sample_jit(sampler, drafting.denoiser, *prompts)
    without = sample_jit(dataclasses.replace(sampler, adapter=None), drafting.denoiser, *prompts)
    assert with_adapter.tokens.tolist() == without.tokens.tolist()
    convert.export(tmp_path / "drafting", tmp_path / "hub")
    convert.convert("nemotron", tmp_path / "hub", tmp_path / "again")
    again = dllm_jax.load(tmp_path / "again")
    bare = drafting.config.replace(bos_id=None)  # which the format has not
    assert again.config == bare and again.draft_adapter is not None
    jax.tree.map(np.testing.assert_array_equal, again.draft_adapter.values, drafting.draft_adapter.values)


def test_refusals(tmp_path) -> None:
    with refuses("model.adapt"):
        Joint(JointPart()).fit_model(LLADA, settings_of(tmp_path))
    with refuses("data.length"):
        train.train(settings_of(tmp_path / "run", data__length=13))
    with refuses("leave out objective.in_flight"):
        settings_of(tmp_path / "run", objective__in_flight=2)
    with refuses("python -m train joint"):
        config = settings_of(tmp_path / "run")
        OBJECTIVES["masked-diffusion"].of(config).fit_model(MODEL, config)
