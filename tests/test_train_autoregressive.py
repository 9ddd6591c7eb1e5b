"""Training of causal models: the loss, what is refused, and that the result decodes from left to right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_toys import LLADA, model_fields, settings

import dllm_jax
import train
from dllm_jax.checkpoints import checkpoint
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser, Span
from dllm_jax.params.specs import init_params
from samplers import LeftRight, sample_jit
from train.losses import Batch
from train.objectives import read_config
from train.objectives.autoregressive import Autoregressive, AutoregressiveConfig, AutoregressivePart
from train.settings import build_settings
from train.setup import adapt_config, read_parts

CAUSAL = LLADA.replace(family="qwen2", attention="causal", shift=True, qkv_bias=True)


def run_config(out, **changes):
    values = settings(out, model__published="qwen2.5-0.5b", model__config=causal_fields(), **changes)
    values["objective"] = {name: x for name, x in values.get("objective", {}).items() if name in ("kind", "chunk")}
    return build_settings(AutoregressiveConfig, values)


def causal_fields():
    published = dataclasses.asdict(dllm_jax.published_config("qwen2.5-0.5b"))
    fields = {name: x for name, x in dataclasses.asdict(CAUSAL).items() if x != published[name]}
    return {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}


@pytest.mark.parametrize("chunk", [0, 4])
def test_loss_is_the_cross_entropy_of_the_next_token(chunk):
    denoiser = Denoiser(CAUSAL, init_params(CAUSAL, jax.random.key(0)))
    tokens = jax.random.randint(jax.random.key(1), (3, 9), 0, 20)
    targets = jnp.arange(9) >= jnp.array([[0], [4], [7]])
    lengths = jnp.array([9, 9, 8])
    targets &= jnp.arange(9) < lengths[:, None]
    objective = Autoregressive(AutoregressivePart(chunk=chunk))
    noised = objective.corrupt(jax.random.key(2), Batch(tokens, targets, lengths), denoiser)
    assert np.array_equal(noised.inputs, tokens)
    found, metrics = jax.jit(lambda noised: objective.loss(denoiser, denoiser, noised))(noised)
    rows = []
    for row in range(3):  # one row at a time, cut at every position: nothing behind can have been seen
        wanted = [i for i in range(1, 9) if targets[row, i]]
        raw = [_next(denoiser, jnp.pad(tokens[row, :i], (0, 9 - i)), jnp.array([i])) for i in wanted]
        rows.append(optax.softmax_cross_entropy_with_integer_labels(jnp.stack(raw), tokens[row, jnp.array(wanted)]))
    np.testing.assert_allclose(found, np.mean([row.mean() for row in rows]), rtol=1e-5)
    np.testing.assert_allclose(metrics["cross_entropy"], np.concatenate(rows).mean(), rtol=1e-5)


@jax.jit
def _next(denoiser, tokens, length):
    """Logits of what follows the first `length` of tokens [T], [V]."""
    return denoiser.logits(denoiser.forward(tokens[None], length + 1, outputs=Span(length, 1))[0])[0, 0]


def test_a_trained_model_decodes_with_its_cache(tmp_path):
    toy = {"data__options": {"digits": 2}, "data__length": 6}
    config = run_config(tmp_path / "run", steps=150, optimizer__batch=32, optimizer__lr=1e-2, **toy)
    outcome = train.train(config)
    assert outcome.metrics["loss"] < 0.2
    model = dllm_jax.load(outcome.folder)
    assert model.config.attention == "causal"
    row = read_parts(config).rows(3)
    prompt = jnp.asarray(row.tokens[: int(np.argmax(row.targets))])[None]
    cached = sample_jit(LeftRight(3, window=1, lookahead=1), model.denoiser, prompt)
    plain = sample_jit(LeftRight(3), model.denoiser, prompt)
    assert np.array_equal(cached.tokens, plain.tokens) and cached.nfe == 3
    assert np.array_equal(cached.tokens[0, :2], prompt[0, -2:][::-1])


def test_a_checkpoint_becomes_a_model_of_another_kind(tmp_path):
    folder = tmp_path / "llada"
    params = init_params(LLADA, jax.random.key(0), dtype="float32")
    checkpoint.save(folder, LLADA, params.items())
    values = settings(tmp_path / "ar", steps=1, optimizer__lr=0.0, optimizer__warmup=0)
    values |= {"model": {"init": str(folder), "adapt": "qwen2.5-0.5b"}, "objective": {}}
    causal = dllm_jax.load(train.train(build_settings(AutoregressiveConfig, values)).folder)
    assert (causal.config.family, causal.config.attention, causal.config.shift) == ("qwen2", "causal", True)
    assert causal.config.embed_dim == LLADA.embed_dim
    for name, value in causal.denoiser.params.items():
        assert np.array_equal(value, params.get(name, jnp.zeros_like(value)))
    back = adapt_config(causal.config, "dream-7b-base")
    assert (back.family, back.attention, back.qkv_bias) == ("dream", "bidirectional", True)
    with pytest.raises(DllmError, match="only one of them has experts"):
        adapt_config(LLADA, "llada-moe-7b-a1b-base")
    with pytest.raises(DllmError, match=r"set model\.init, or model\.published"):
        train.train(run_config(tmp_path / "none", model__adapt="dream-7b-base"))


def test_models_are_trained_by_their_own_command(tmp_path):
    both = build_settings(
        AutoregressiveConfig, settings(tmp_path / "a", model__config=model_fields()) | {"objective": {"kind": "sft"}}
    )
    with pytest.raises(dllm_jax.DllmError, match="a llada model"):
        read_parts(both)
    config = read_config("train/configs/ar-word-problems.toml", command="autoregressive")
    assert read_parts(config).model.attention == "causal"
    with pytest.raises(dllm_jax.DllmError, match="there is no setting 'objective.eps'"):
        read_config("train/configs/ar-word-problems.toml", ["objective.eps=0.1"], "autoregressive")
