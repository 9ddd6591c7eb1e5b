"""Training of models with a canvas: the uniform-diffusion objective against its formula, runs, and frozen parameters.
`tests/test_parity_gemma.py` compares with transformers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses
from test_renoise import CONFIG
from test_train_grpo import assert_same, latest_state
from test_train_run import interrupting
from train_toys import LLADA, Reverse, model_fields, settings

import convert
import dllm_jax
import train
from dllm_jax.checkpoints import checkpoint
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.params.specs import init_params
from samplers import Renoise, sample_jit
from train.lora import merge_adapters
from train.losses import Batch
from train.objectives import OBJECTIVES
from train.objectives.uniform_diffusion import UniformDiffusion, UniformDiffusionPart, canvas_starts
from train.run_dir import METRICS_FILE
from train.settings import build_settings

L, T = CONFIG.block_length, 12
PUBLISHED = "diffusion-gemma-26b"
SMALL = CONFIG.replace(vocab_size=24, eos_id=20, pad_id=20, bos_id=22, end_ids=(20,), rope_theta=1e4, block_length=6)


def batch_of() -> Batch:
    """Rows with an answer of two canvases, one of three that reach the row's end, two turns, and none."""
    tokens = jax.random.randint(jax.random.key(0), (4, T), 4, 20)
    place = jnp.arange(T)
    spans = [(place >= 3) & (place < 9), place >= 2, (place >= 1) & (place < 4) | (place >= 7), place < 0]
    return Batch(tokens, jnp.stack(spans), jnp.asarray([9, T, T, 0]))


def denoiser_of(config=CONFIG) -> Denoiser:
    params = init_params(config, jax.random.key(1))
    return Denoiser(config, {name: x * 8 if x.ndim > 1 else x for name, x in params.items()})


FIELDS = {"published": PUBLISHED, "config": model_fields(SMALL, PUBLISHED)}


def settings_of(out, **changes):
    return build_settings(OBJECTIVES["uniform-diffusion"].config, settings(out, **{"model": FIELDS, **changes}))


def test_every_run_of_targets_is_cut_into_canvases() -> None:
    starts = [np.flatnonzero(row).tolist() for row in canvas_starts(batch_of().targets, L)]
    assert starts == [[3, 7], [2, 6, 10], [1, 7, 11], []]


def test_noise() -> None:
    batch, denoiser, objective = (
        batch_of(),
        denoiser_of(),
        UniformDiffusion(UniformDiffusionPart(self_conditioning=0.3)),
    )
    draw = jax.jit(jax.vmap(lambda key: objective.corrupt(key, batch, denoiser)))
    noised = jax.tree.map(np.asarray, draw(jax.random.split(jax.random.key(2), 4000)))
    assert (noised.weights == [1, 1, 1, 0]).all()
    assert abs(noised.conditioned.mean() - 0.3) < 0.02
    for row, first, end in ((0, 3, 7), (0, 7, 9), (1, 2, 6), (1, 10, 12), (2, 1, 4), (2, 7, 11), (2, 11, 12)):
        own = noised.start[:, row] == first
        count = 2 if row == 0 else 3
        assert abs(own.mean() - 1 / count) < 0.04
        wanted = [*batch.tokens[row, first:end].tolist(), *[CONFIG.eos_id] * (first + L - end)]
        assert (noised.canvas[own, row] == wanted).all()
    changed = (noised.inputs != noised.canvas)[:, :3]
    assert abs(changed.mean() - 0.5 * (1 - 1 / CONFIG.vocab_size)) < 0.02  # t is uniform
    assert changed.mean(axis=-1).std() > 0.25  # and a row's
    assert len(np.unique(noised.inputs)) == CONFIG.vocab_size
    learned = noised.learned[0]
    assert (learned == (np.arange(T) > 0) & (np.arange(T) < np.asarray(batch.lengths)[:, None])).all()


def test_noise_depends_on_the_row_alone() -> None:
    """Not on how long its batch is, nor on how it is divided."""
    batch, denoiser, objective = batch_of(), denoiser_of(), UniformDiffusion(UniformDiffusionPart())
    longer = Batch(*(jnp.pad(x, ((0, 0), (0, 5))) for x in batch[:2]), batch.lengths)
    parts = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    for seed in range(5):
        one = objective.corrupt(jax.random.key(seed), batch, denoiser)
        for other in (longer, parts):
            found = objective.corrupt(jax.random.key(seed), other, denoiser)
            for name in ("start", "canvas", "inputs", "weights", "conditioned"):
                wanted = getattr(one, name)
                np.testing.assert_array_equal(getattr(found, name).reshape(wanted.shape), wanted)


@pytest.mark.parametrize("prompt", [True, False])
def test_the_loss_is_its_formula(prompt: bool) -> None:
    """Row by row, each canvas after nothing but what is before it, as in sampling."""
    batch, denoiser = batch_of(), denoiser_of()
    objective = UniformDiffusion(UniformDiffusionPart(next_token=0.5, prompt=prompt))
    noised = objective.corrupt(jax.random.key(5), batch, denoiser)
    assert len(set(noised.conditioned[:3].tolist())) == 2
    diffusion, next_token = [], []
    for row in range(3):
        start, canvas = int(noised.start[row]), noised.inputs[row][None]
        at = jnp.asarray([start])
        before = jnp.pad(noised.tokens[row, :start], (0, L))[None]
        _, kv = denoiser.forward(before, at)
        decode = lambda soft, canvas=canvas, at=at, kv=kv: denoiser.logits(denoiser.denoise(canvas, soft, at, kv)[0])
        logits = decode(jnp.zeros((1, L, 16)))
        logits = decode(denoiser.expected_embedding(logits)) if noised.conditioned[row] else logits
        log = jax.nn.log_softmax(logits)[0]
        diffusion.append(-log[jnp.arange(L), noised.canvas[row]].mean())
        length = int(noised.lengths[row])
        log = jax.nn.log_softmax(denoiser(noised.tokens[row, :length][None]))[0]
        own = [n for n in range(1, length) if prompt or batch.targets[row, n]]
        next_token.append(-np.mean([log[n - 1, noised.tokens[row, n]] for n in own]))
    means = jax.jit(objective.means)(denoiser, denoiser, noised)
    np.testing.assert_allclose(means["diffusion"].value, np.mean(diffusion), rtol=1e-5)
    np.testing.assert_allclose(means["next_token"].value, np.mean(next_token), rtol=1e-5)
    np.testing.assert_allclose(means["loss"].value, np.mean(diffusion) + 0.5 * np.mean(next_token), rtol=1e-5)
    chunked = dataclasses.replace(objective, settings=dataclasses.replace(objective.settings, chunk=3))
    found = jax.jit(chunked.means)(denoiser, denoiser, noised)
    np.testing.assert_allclose(found["loss"].value, means["loss"].value, rtol=1e-5)
    found = jax.jit(objective.means)(dataclasses.replace(denoiser, scan=True), denoiser, noised)
    np.testing.assert_allclose(found["loss"].value, means["loss"].value, rtol=1e-5)
    alone = dataclasses.replace(objective, settings=dataclasses.replace(objective.settings, next_token=0.0))
    np.testing.assert_allclose(alone.loss(denoiser, denoiser, noised)[0], np.mean(diffusion), rtol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("canvas") / "base"
    checkpoint.save(folder, SMALL, init_params(SMALL, jax.random.key(3)).items())
    return folder


def test_runs_end_resume_and_sample(tmp_path, base, monkeypatch) -> None:
    """A run that is stopped resumes bit for bit, with accumulated parts and frozen routers; its model is sampled,
    exported and read back."""
    own = {"init": str(base), "freeze": ["*.moe.router*"]}
    changes = {"model": own, "steps": 8, "checkpoint__every": 4, "optimizer__accumulate": 2}
    whole = train.train(settings_of(tmp_path / "whole", **changes))
    with monkeypatch.context() as patch:
        patch.setattr(Reverse, "example", interrupting(Reverse.example, 40))  # of the sixth step
        with pytest.raises(train.Interrupted):
            train.train(settings_of(tmp_path / "run", **changes))
    outcome = train.train(settings_of(tmp_path / "run", **changes))
    assert 0 < outcome.started < 8
    assert_same(latest_state(tmp_path / "run"), latest_state(tmp_path / "whole"))
    model, before = dllm_jax.load(whole.folder), dllm_jax.load(base)
    assert model.config.block_length == 6 and model.generation["block_length"] == 6
    same = {name for name, x in model.params.items() if np.array_equal(x, before.params[name])}
    assert same == {name for name in model.params if ".moe.router" in name}
    result = sample_jit(Renoise(6, 6, 4), model.denoiser, jnp.asarray([[1, 2, 3]]), key=jax.random.key(0))
    assert 0 < result.nfe[0] <= 4
    convert.export(whole.folder, tmp_path / "hub")
    convert.convert("diffusion-gemma", tmp_path / "hub", tmp_path / "again")
    again = dllm_jax.load(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, dict(again.params), dict(model.params))


def test_adapters_are_trained_and_merged(tmp_path, base) -> None:
    """On attention and the dense networks, which encoder and decoder share, so that a merged model is the same."""
    lora = {"rank": 2, "targets": ["all-linear", "!*.moe.*"]}
    found = train.train(settings_of(tmp_path / "run", model={"init": str(base)}, lora=lora, steps=4)).folder
    merge_adapters(base, found, tmp_path / "merged")
    model, before = dllm_jax.load(tmp_path / "merged"), dllm_jax.load(base)
    changed = {name for name, x in model.params.items() if not np.array_equal(x, before.params[name])}
    assert {name.split(".", 2)[2] for name in changed if ".0." in name} >= {"attn.v_proj.kernel", "mlp.up_proj.kernel"}
    assert all(name.endswith(".kernel") and "moe" not in name for name in changed)


def test_a_task_is_learned(tmp_path) -> None:
    """Of rows that it never trains on, and by the model that is written."""
    changes = {"steps": 400, "optimizer__batch": 32, "optimizer__warmup": 20, "log__every": 400}
    watch = {"every": 400, "source": "train_toys:Reverse", "options": {"seed": 1}, "rows": 64}
    found = train.train(settings_of(tmp_path / "run", watch=watch, checkpoint__every=400, **changes))
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    before, after = (row["heldout_diffusion"] for row in rows if "heldout_diffusion" in row)
    assert after < 0.6 * before
    model = dllm_jax.load(found.folder)
    prompts = jnp.asarray([Reverse(seed=2).example(index).prompt_ids for index in range(32)])
    result = sample_jit(Renoise(6, 6, 16), model.denoiser, prompts, key=jax.random.key(0))
    assert np.mean(np.asarray(result.tokens)[:, :5] == np.asarray(prompts)[:, ::-1]) > 0.3  # by chance 0.1


def test_refusals(tmp_path) -> None:
    with refuses("data.pad"):
        settings_of(tmp_path / "run", data__pad=True)
    with refuses("python -m train uniform-diffusion"):
        OBJECTIVES["masked-diffusion"].of(settings_of(tmp_path / "run")).fit_model(SMALL, settings_of(tmp_path))
    with refuses("no canvas"):
        UniformDiffusion(UniformDiffusionPart()).fit_model(LLADA, settings_of(tmp_path))
    for pattern, sentence in (("*.nothing", "matches nothing"), ("*", "leave something")):
        with refuses(sentence):
            train.train(settings_of(tmp_path / "run", model={**FIELDS, "freeze": [pattern]}))
    assert not (tmp_path / "run").exists()
