"""Block diffusion's objective against rows of twice the length under one mask, its noise, and whole runs."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_toys import LLADA, Reverse, settings, write_toml

import dllm_jax
import train
from dllm_jax import Denoiser
from dllm_jax.checkpoints.checkpoint import load_generation
from dllm_jax.kernels import attention
from dllm_jax.models.kv_cache import LayerKV
from dllm_jax.models.layers import Rope, rope_angles, rotate
from dllm_jax.models.transformer import bind
from dllm_jax.params.specs import init_params
from train.__main__ import main
from train.losses import Batch, Noised
from train.objectives.block_diffusion import BlockDiffusion, BlockDiffusionPart, corrupt_copies
from train.objectives.masked_diffusion import MaskedDiffusion, MaskedDiffusionPart
from train.setup import adapt_config
from train.step import REMAT

B, T, L = 3, 12, 4
SDAR = LLADA.replace(family="sdar", attention="block", block_length=L, qk_norm=True, num_kv_heads=1)
FAST = SDAR.replace(family="fast-dllm-v2", qk_norm=False, qkv_bias=True, shift=True)


def make_batch():
    rng = np.random.default_rng(0)
    lengths = np.array([T, T, 6])
    targets = (np.arange(T) >= np.array([3, 0, 2])[:, None]) & (np.arange(T) < lengths[:, None])
    return Batch(jnp.asarray(rng.integers(0, 20, (B, T))), jnp.asarray(targets), jnp.asarray(lengths))


def denoiser_of(config):
    params = init_params(config, jax.random.key(1), dtype="float32")
    return Denoiser(config, {name: x * 8 if x.ndim > 1 else x for name, x in params.items()})  # far from uniform


def doubled_logits(denoiser, noisy, clean, share=1.0, in_flight=1):
    """The published form: rows [noisy; clean] under a mask of four parts, every layer written out; of the own block
    all up to a position, and a share of what is left of it. Noisy positions see noisy blocks before theirs in its group
    of those in flight, and clean ones ahead of that."""
    config, model, length = denoiser.config, bind(denoiser.config, denoiser.params), clean.shape[1]
    block = jnp.tile(jnp.arange(length) // config.block_length, 2)
    is_clean = jnp.arange(2 * length) >= length
    place = jnp.tile(jnp.arange(length) % config.block_length, 2)
    until = place + jnp.round(share * (config.block_length - 1 - place))
    ahead, same = block < block[:, None], is_clean[:, None] == is_clean  # [queries, keys]
    grouped = block // in_flight == block[:, None] // in_flight
    own = same & (block[:, None] == block) & (place <= until[:, None])
    noisy_ahead = ~is_clean[:, None] & ~is_clean & ahead & grouped
    mask = own | noisy_ahead | (is_clean & ahead & (is_clean[:, None] | ~grouped))
    turn = rope_angles(jnp.tile(jnp.arange(length), 2)[None], Rope(config.head_dim, config.rope_theta))
    x = model.embed_tokens(jnp.concatenate([noisy, clean], axis=1))
    for layer in model.layers:
        y = layer.attn_norm(x)
        key, value = layer.attn.keys_values(y, turn)
        query = rotate(layer.attn.heads(layer.attn.q_proj(y), layer.attn.q_norm), turn.cos, turn.sin)
        key, value = (jnp.repeat(part, config.num_heads // config.num_kv_heads, axis=2) for part in (key, value))
        scores = jnp.einsum("bqnh,bknh->bnqk", query, key) / config.head_dim**0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bnqk,bknh->bqnh", weights, value)
        x = x + layer.attn.o_proj(out.reshape(*y.shape[:2], -1))
        x = x + layer.mlp(layer.mlp_norm(x))
    logits = model.logits(x[:, :length])
    return jnp.roll(logits, 1, axis=1) if config.shift else logits


TWO = SDAR.replace(block_length=2)  # six blocks in a row, which are no whole number of groups of four
DOUBLED = {
    "sdar": (SDAR, None, 1),
    "sdar-causal": (SDAR, 0, 1),
    "sdar-annealed": (SDAR, 3, 1),
    "fast-dllm-v2": (FAST, None, 1),
    "fast-dllm-v2-causal": (FAST, 0, 1),
    "fast-dllm-v2-annealed": (FAST, 3, 1),
    "one-in-flight": (TWO, None, 1),
    "two-in-flight": (TWO, None, 2),
    "four-in-flight": (TWO, None, 4),
    "four-in-flight-annealed": (TWO, 3, 4),
    "fast-dllm-v2-four-in-flight": (FAST.replace(block_length=2), None, 4),
}


@pytest.mark.parametrize("name", DOUBLED)
def test_loss_is_that_of_doubled_rows(name):
    """And however it is computed: layers as a loop and computed again, logits in chunks and groups."""
    config, step, in_flight = DOUBLED[name]
    steps = 0 if step is None else 5
    part = BlockDiffusionPart(complementary=True, loss="bound", high=0.9, anneal_attention=steps, in_flight=in_flight)
    denoiser, share = denoiser_of(config), 1.0 if step is None else step / steps
    noised = corrupt_copies(jax.random.key(2), make_batch(), denoiser, part)
    noised = BlockDiffusion(part).at_step(noised, jnp.int32(step or 0))
    assert (noised.ahead is None) == (step is None)
    assert noised.lengths.tolist() == [T, T, 8 if config.block_length == L else 6]

    def reference(params):
        flat = lambda x: x.reshape(-1, T)
        clean = jnp.repeat(noised.tokens, 2, axis=0)
        logits = doubled_logits(Denoiser(config, params), flat(noised.inputs), clean, share, in_flight)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, clean)
        return jnp.sum(flat(noised.weights) * entropy) / (2 * jnp.sum(noised.targets))

    def gradient(scan=False, chunk=0, **options):
        objective = BlockDiffusion(dataclasses.replace(part, chunk=chunk))
        loss = lambda params: objective.loss(Denoiser(config, params, scan=scan), denoiser, noised, **options)
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(denoiser.params)

    loss, wanted = jax.jit(jax.value_and_grad(reference))(denoiser.params)
    assert loss > 1.0
    for options in ({}, {"chunk": 6, "groups": 3, "remat": REMAT["layers"], "scan": True}):
        (value, metrics), found = gradient(**options)
        np.testing.assert_allclose(value, loss, rtol=1e-5)
        assert metrics["cross_entropy"] > 1.0
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_queries_in_parts_attend_like_all(monkeypatch):
    """The last part is a block short."""
    draw = lambda number, heads: jax.random.normal(jax.random.key(number), (2, 28, heads, 8))
    query, own, before = draw(0, 4), LayerKV(draw(1, 2), draw(2, 2)), LayerKV(draw(3, 2), draw(4, 2))
    visible = jnp.minimum((jnp.arange(28) // L + 1) * L, jnp.array([[28], [18]]))

    def values():
        loss = lambda *arrays: jnp.sum(jnp.sin(attention.attention_in_blocks(*arrays, visible, L)))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, own, before)

    whole = values()
    monkeypatch.setattr(attention.xla, "QUERIES", 9)
    for found, wanted in zip(jax.tree.leaves(values()), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_single_block_is_masked_diffusion():
    config, part = SDAR.replace(block_length=T), BlockDiffusionPart(noise="sequence", loss="bound")
    denoiser, batch = denoiser_of(config), make_batch()
    batch = batch._replace(lengths=jnp.full(B, T), targets=jnp.broadcast_to(jnp.arange(T) >= 4, (B, T)))
    noised = corrupt_copies(jax.random.key(3), batch, denoiser, part)
    found, _ = jax.jit(BlockDiffusion(part).loss)(denoiser, denoiser, noised)
    rows = Noised(noised.inputs[:, 0], batch.tokens, noised.weights[:, 0] / (T - 4), batch.lengths)
    plain = Denoiser(config.replace(attention="bidirectional", block_length=None), denoiser.params)
    wanted, _ = jax.jit(MaskedDiffusion(MaskedDiffusionPart()).loss)(plain, plain, rows)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert wanted > 0.1


@pytest.mark.parametrize("noise", ["block", "sequence"])
def test_noise(noise):
    part = BlockDiffusionPart(noise=noise, loss="bound", low=0.2, high=0.7, complementary=True)
    denoiser, length, rows = Denoiser(FAST, {}), 64, 40
    tokens = jax.random.randint(jax.random.key(0), (rows, length), 0, 20)
    targets = jnp.broadcast_to(jnp.arange(length) >= 5, tokens.shape)
    batch = Batch(tokens, targets, jnp.full(rows, 62))
    noised = corrupt_copies(jax.random.key(1), batch, denoiser, part)
    first, second = (np.asarray(noised.weights[:, copy]) for copy in (0, 1))
    assert ((first > 0) ^ (second > 0) == np.asarray(targets)).all()  # each target in just one, the filled ones too
    assert ((np.asarray(noised.inputs) == FAST.mask_id) == (np.asarray(noised.weights) > 0)).all()
    assert (np.asarray(noised.tokens[:, 62:]) == FAST.eos_id).all() and (noised.targets.sum(axis=1) == length - 5).all()
    share = np.where(first > 0, 1 / np.maximum(first, 1e-9), 1 - 1 / np.maximum(second, 1e-9))[:, 5:]
    assert share.min() >= 0.2 - 1e-6 and share.max() <= 0.7 + 1e-6
    same = share.reshape(rows, -1)[:, 3:55].reshape(rows, -1, L if noise == "block" else 52)
    np.testing.assert_allclose(same, np.broadcast_to(same[..., :1], same.shape), atol=1e-5)
    assert np.ptp(same[..., 0]) > 0.4 and (noise == "sequence" or np.ptp(same[0, :, 0]) > 0.1)
    assert abs((first > 0)[:, 5:].mean() - share.mean()) < 0.05
    # A row's noise is its own: not the other rows' tokens, nor how the batch is divided, change it.
    other = batch._replace(tokens=tokens.at[1:].set(7))
    np.testing.assert_array_equal(corrupt_copies(jax.random.key(1), other, denoiser, part).inputs[0], noised.inputs[0])
    halves = Batch(*(x.reshape(2, rows // 2, *x.shape[1:]) for x in batch[:3]))
    again = corrupt_copies(jax.random.key(1), halves, denoiser, part)
    np.testing.assert_array_equal(again.inputs.reshape(noised.inputs.shape), noised.inputs)


def test_wrong_tokens_and_masks_that_fill():
    part = BlockDiffusionPart(low=0.5, high=0.5, wrong=0.4, fill="mask")
    tokens = jax.random.randint(jax.random.key(0), (64, T), 0, 20)
    batch = Batch(tokens, jnp.broadcast_to(jnp.arange(T) < 10, tokens.shape), jnp.full(64, 10))
    noised = corrupt_copies(jax.random.key(1), batch, Denoiser(SDAR, {}), part)
    inputs, weights = noised.inputs[:, 0, :10], noised.weights[:, 0]
    masked, wrong = inputs == SDAR.mask_id, (inputs != SDAR.mask_id) & (inputs != tokens[:, :10])
    assert (weights[:, :10] == (masked | wrong)).all()
    assert abs(wrong.mean() - 0.2) < 0.05 and inputs[wrong].max() == SDAR.vocab_size - 1
    assert (noised.inputs[:, 0, 10:] == SDAR.mask_id).all() and (weights[:, 10:] == 0).all()


def block_settings(out, **changes):
    values = settings(out, objective={"block_length": 4, "complementary": True}, **changes)
    values["model"]["config"] |= {"family": "sdar", "attention": "block", "block_length": 8, "qk_norm": True}
    return values


def run(values, command="block-diffusion"):
    out = Path(values["out"])
    path = write_toml(out.with_suffix(".toml"), values)
    return main([command, "--config", str(path), "--no-progress"])


def losses(out):
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]


def test_runs_learn_go_on_bit_for_bit_and_split_over_devices(tmp_path, monkeypatch):
    """With attention that opens until after the step that a run resumes from, and two of three blocks in flight."""
    long = {"steps": 12, "objective__anneal_attention": 10, "objective__in_flight": 2}
    assert run(block_settings(tmp_path / "one", **long)) == 0
    assert run(block_settings(tmp_path / "two", **long, compute__mesh={"data": 2}, objective__chunk=8)) == 0
    np.testing.assert_allclose(losses(tmp_path / "one"), losses(tmp_path / "two"), rtol=1e-3)
    assert losses(tmp_path / "one")[-1] < losses(tmp_path / "one")[0] - 0.2
    example = Reverse.example

    def interrupted(self, index):
        if index == 8 * 7:
            raise KeyboardInterrupt
        return example(self, index)

    monkeypatch.setattr(Reverse, "example", interrupted)
    assert run(block_settings(tmp_path / "part", **long)) == 130
    monkeypatch.undo()
    assert run(block_settings(tmp_path / "part", **long)) == 0
    whole, part = (dllm_jax.load(tmp_path / name / "model") for name in ("one", "part"))
    assert all((whole.params[name] == part.params[name]).all() for name in whole.params)
    assert whole.config.block_length == 4
    told = {"block_length": 4, "align_blocks": True, "cache": "exact"}
    assert load_generation(tmp_path / "one" / "model") == told


def test_an_autoregressive_model_becomes_one_of_blocks(tmp_path):
    causal = settings(tmp_path / "causal", steps=2, model__published="qwen2.5-0.5b")
    causal["model"]["config"] |= {"tied_embeddings": True, "num_kv_heads": 1}
    assert run(causal, "autoregressive") == 0
    model = {"init": str(tmp_path / "causal" / "model"), "adapt": "fast-dllm-v2-1.5b"}
    assert run(block_settings(tmp_path / "blocks", steps=2) | {"model": model}) == 0
    config = dllm_jax.load(tmp_path / "blocks" / "model").config
    assert (config.family, config.attention, config.block_length, config.shift) == ("fast-dllm-v2", "block", 4, True)
    model = {"init": str(tmp_path / "blocks" / "model")}
    assert run(block_settings(tmp_path / "lora", steps=2, lora={"rank": 2}) | {"model": model}) == 0
    train.merge_adapters(tmp_path / "blocks" / "model", tmp_path / "lora" / "adapters", tmp_path / "merged")
    assert dllm_jax.load(tmp_path / "merged").config == config
    without = dllm_jax.published_config("qwen2.5-0.5b")
    assert adapt_config(without, "fast-dllm-v2-1.5b").mask_id == 151665  # the kind's, where the model has none


MISTAKES = {
    "bounds": ({"objective__low": 0.9, "objective__high": 0.5}, "is above objective.high 0.5"),
    "twins": ({"objective__loss": "bound"}, "set it to 0.999 or less"),
    "cut rows": ({"objective__kind": "pretrain", "data__random_length": 0.1}, 'set objective.fill to "mask"'),
    "one share": ({"objective__in_flight": 2, "objective__noise": "sequence"}, 'all alike; set it to "block"'),
    "short rows": (
        {"objective__in_flight": 4},
        "exceeds the 3 blocks of 4 in rows of data.length 12",
    ),
    "length": ({"data__length": 13}, "no whole number of blocks of 4; set it to 16"),
}


def test_mistakes_are_one_sentence(tmp_path, capsys):
    wrong = [(block_settings(tmp_path / "x", **changes), sentence) for changes, sentence in MISTAKES.values()]
    plain = settings(tmp_path / "x") | {"objective": {}}
    for values, sentence in [*wrong, (plain, "has no blocks; set objective.block_length")]:
        assert run(values) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error
    assert run(block_settings(tmp_path / "x") | {"objective": {}}, "masked-diffusion") == 2
    assert "by python -m train block-diffusion" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
