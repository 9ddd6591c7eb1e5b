"""Cases of Nemotron-Labs-Diffusion: its three samplers, forwards with and without a cache, rotary angles, its loss."""

import jax
import jax.numpy as jnp
import numpy as np
from golden_base import Assets, Case

import convert.adapters
from dllm_jax.families.hub_config import HubConfig
from dllm_jax.families.nemotron import read_yarn
from dllm_jax.models.denoiser import Denoiser, Span
from dllm_jax.models.layers import Rope, rope_angles, rope_frequencies
from dllm_jax.params.low_rank import LowRank


def run(case: Case, assets: Assets) -> None:
    """One case, whatever kind it is."""
    kinds = {"forward": _run_forward, "cached_forward": _run_cached_forward, "rope": _run_rope}
    kinds[case["kind"]](case, assets)


def _adapter(name: str | None, case: Case, assets: Assets) -> LowRank | None:
    """The adapter of a folder beside the file or below it; `args.lora` of a case."""
    if name is None:
        return None
    config = assets.model(case["checkpoint"]).config
    found = convert.adapters.read_adapters(assets.path(name), config)
    stems = [kernel.removesuffix(".kernel") for kernel in found.kernels]
    pairs = {f"{s}.kernel": (found.values[f"{s}.lora_a"], found.values[f"{s}.lora_b"]) for s in stems}
    return LowRank(jax.tree.map(jnp.asarray, pairs), found.alpha / found.rank)


def _visible(attention: str, positions: jax.Array) -> jax.Array:
    """What each of these positions [B, T] sees where they are the last ones."""
    return positions + 1 if attention == "causal" else jnp.broadcast_to(positions[:, -1:] + 1, positions.shape)


def _run_forward(case: Case, assets: Assets) -> None:
    denoiser, expected = assets.model(case["checkpoint"]).denoiser, case["expected"]
    tokens = jnp.asarray([case["input_ids"]])
    visible = _visible(case["args"]["attention"], jnp.arange(tokens.shape[1])[None])
    logits = np.asarray(denoiser.logits(denoiser.forward(tokens, visible)[0]))[0]
    np.testing.assert_allclose(logits[expected["positions"]], expected["logits"], atol=1e-4)
    assert logits.argmax(axis=-1).tolist() == expected["argmax"]
    if case["args"]["attention"] == "bidirectional":
        np.testing.assert_allclose(denoiser(tokens)[0], logits, atol=1e-5)
    else:  # the same weights as a causal model, whose entry i scores the token at i
        np.testing.assert_allclose(denoiser.as_causal(tokens)[0, 1:], logits[:-1], atol=1e-4)


def _run_cached_forward(case: Case, assets: Assets) -> None:
    args, expected = case["args"], case["expected"]
    model = assets.model(case["checkpoint"])
    denoiser, tokens = model.denoiser, jnp.asarray([case["input_ids"]])
    length, width = tokens.shape[1], args["block_length"]
    own = jnp.arange(length)[None] + 1
    _, kv = denoiser.forward(tokens, own)
    sums = lambda which: [float(np.asarray(getattr(layer, which), np.float64).sum()) for layer in kv]
    np.testing.assert_allclose(sums("key"), expected["key_sums"], atol=2e-2)
    np.testing.assert_allclose(sums("value"), expected["value_sums"], atol=2e-2)
    adapter = _adapter(args["lora"], case, assets)
    drafting: Denoiser = denoiser if adapter is None else denoiser.with_adapter(adapter, jnp.asarray([True]))
    buffers = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, width), (0, 0), (0, 0)]), kv)
    at = Span(jnp.asarray([length]), width)
    visible = jnp.concatenate([own, _visible(args["attention"], at.positions)], axis=1)
    for window, wanted in zip(case["windows"], expected["window_logits"], strict=True):
        inputs = jnp.concatenate([tokens, jnp.asarray([window])], axis=1)
        hidden, _ = drafting.forward(inputs, visible, at=at, kv=buffers)
        np.testing.assert_allclose(denoiser.logits(hidden)[0], wanted, atol=1e-4)


def _run_rope(case: Case, assets: Assets) -> None:
    args, expected = case["args"], case["expected"]
    yarn = read_yarn(HubConfig(args["rope_parameters"], "rope_parameters"))
    assert yarn is not None
    rope = Rope(args["head_dim"], args["rope_parameters"]["rope_theta"], yarn=yarn)
    np.testing.assert_allclose(rope_frequencies(rope), expected["inv_freq"], rtol=2e-6)
    np.testing.assert_allclose(yarn.attention_factor, expected["attention_factor"], rtol=1e-8)
    turn = rope_angles(jnp.asarray([expected["positions"]]), rope)
    assert turn.query_scale is not None
    np.testing.assert_allclose(turn.query_scale[0, :, 0, 0], expected["query_scale"], rtol=1e-6)
    np.testing.assert_allclose(turn.cos[0, 0, 0], np.full(args["head_dim"] // 2, yarn.attention_factor), rtol=1e-6)
