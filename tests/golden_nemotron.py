"""Cases of Nemotron-Labs-Diffusion: its three samplers, forwards with and without a cache, rotary angles, its loss."""

import dataclasses
from typing import Any

import golden_base
import jax
import jax.numpy as jnp
import numpy as np
from golden_base import Assets, Case
from golden_block_loss import norms

import convert.adapters
from dllm_jax.families.hub_config import HubConfig
from dllm_jax.families.nemotron import read_yarn
from dllm_jax.models.denoiser import Denoiser, Span
from dllm_jax.models.layers import Rope, rope_angles, rope_frequencies
from dllm_jax.params.low_rank import LowRank
from samplers import Autoregressive, ContextBlocks, Result, SelfSpeculation, Threshold, TopK, stop_on
from samplers.text.prompts import bucket_length
from train.losses import Means
from train.objectives.block_diffusion import NoisyCopies
from train.objectives.joint import Joint, JointPart
from train.trajectory import steps_of


def run(case: Case, assets: Assets) -> None:
    """One case, whatever kind it is."""
    kinds = {
        "forward": _run_forward,
        "cached_forward": _run_cached_forward,
        "rope": _run_rope,
        "joint_loss": _run_joint_loss,
    }
    samplers = {
        "nemotron-ar": _run_autoregressive,
        "nemotron-diffusion": _run_diffusion,
        "nemotron-linear-spec": _run_self_speculation,
    }
    (samplers[case["args"]["sampler"]] if case["kind"] == "generate" else kinds[case["kind"]])(case, assets)


def _sampled(case: Case, assets: Assets, sampler: Any) -> Result:
    """The case's prompt, sampled; numbers and lengths are data, so that cases share programs."""
    args, denoiser = case["args"], assets.model(case["checkpoint"]).denoiser
    eos_id, budget = args["eos_id"], args["max_thinking_tokens"]
    sampler = dataclasses.replace(
        sampler,
        stop=None if eos_id is None else stop_on([eos_id], vocab_size=denoiser.vocab_size),
        thinking_budget=None if budget is None else jnp.asarray(budget),
        end_think=None if budget is None else jnp.asarray(args["end_think_id"]),
    )
    assert args["temperature"] == 0
    return golden_base.sample_rows(denoiser, sampler, [case["prompt"]], [args["max_new_tokens"]])


def _room(args: dict) -> int:
    return max(64, bucket_length(args["max_new_tokens"]))


def _answer(result: Result, eos_id: int | None) -> list[int]:
    """What was written, up to and with the first end token."""
    written = (np.asarray(result.decoded_at[0]) >= 0) | (np.arange(len(result.tokens[0])) < int(result.lengths[0]))
    tokens = np.asarray(result.tokens[0])[written].tolist()
    return tokens[: tokens.index(eos_id) + 1] if eos_id in tokens else tokens


def _run_autoregressive(case: Case, assets: Assets) -> None:
    args, expected = case["args"], case["expected"]
    result = _sampled(case, assets, Autoregressive(_room(args)))
    assert _answer(result, args["eos_id"]) == expected["tokens"]
    assert int(result.nfe[0]) == expected["nfe"]


def _run_diffusion(case: Case, assets: Assets) -> None:
    """Published code reads the last block as well, counts no prompt, and runs a block whose first token is the end."""
    args, expected = case["args"], case["expected"]
    context, budget = args["causal_context"], args["max_thinking_tokens"]
    rule = TopK(1) if args["threshold"] is None else Threshold(args["threshold"])
    result = _sampled(case, assets, ContextBlocks(_room(args), args["block_length"], rule, causal_context=context))
    answer, length = _answer(result, args["eos_id"]), len(expected["tokens"])
    assert answer[:length] == expected["tokens"]
    steps = [[[at, int(result.tokens[0, at])] for at in places] for places in steps_of(result, 0)]
    reads = [number for number, forward in enumerate(expected["forwards"]) if forward[2]]
    drafts = iter(expected["steps"])
    wanted = [None if forward[2] else next(drafts) for forward in expected["forwards"]][:-1]  # None is a read
    if context and answer[-1] == args["eos_id"] and (length - 1) % args["block_length"] == 0:
        wanted = wanted[: reads[-2] + 1]
    assert int(result.nfe[0]) == len(steps) == len(wanted)
    for own, step in zip(steps, wanted, strict=True):
        if step is not None:
            assert own == step
        else:  # the first token of the next block, and perhaps the one that ends a thought
            places = [at for at, _ in own if at != budget]
            assert len(places) == (1 if context else 0) or own[0][0] == budget


def _run_self_speculation(case: Case, assets: Assets) -> None:
    """Published code returns what the last read wrote beyond the length; what was drafted is not in a `Result`."""
    args, expected = case["args"], case["expected"]
    rule = Threshold(args["threshold"]) if args["threshold"] else None
    adapter = _adapter(args["lora"], case, assets)
    result = _sampled(case, assets, SelfSpeculation(_room(args), args["block_length"], rule, adapter))
    assert _answer(result, args["eos_id"]) == expected["tokens"][: args["max_new_tokens"]]
    assert int(result.nfe[0]) == expected["nfe"]
    assert int(result.verifier_forwards[0]) == 1 + len(expected["accepted"])
    written = np.asarray(result.decoded_at[0])
    counts = [int((written == forward).sum()) for forward in np.unique(written[written >= 0])]
    assert counts[0] == 1
    assert counts[1:-1] == expected["accepted"][:-1] and counts[-1] <= expected["accepted"][-1]


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


def _run_joint_loss(case: Case, assets: Assets) -> None:
    """Published code leaves the division of its sums to the caller; NeMo Automodel's loss is ours."""
    args, expected, config = case["args"], case["expected"], assets.model(case["checkpoint"]).config
    objective = Joint(JointPart(weight=args["dlm_loss_weight"], next_token=args["ar_loss_weight"]))
    config = config.replace(block_length=args["block_length"])
    tokens, noisy = jnp.asarray(case["input_ids"]), jnp.asarray(case["noisy_input_ids"])
    masked, share = noisy == config.mask_id, jnp.asarray(args["p_mask"])[:, None]
    targets = jnp.asarray(case["loss_mask"]) > 0 if "loss_mask" in case else jnp.ones_like(masked)
    lengths = jnp.full(len(tokens), tokens.shape[1])
    noised = NoisyCopies(noisy[:, None], tokens, jnp.where(masked, 1.0 / share, 0.0)[:, None], targets, lengths)

    def loss(params: dict) -> tuple[jax.Array, Means]:
        means = objective.means(Denoiser(config, params), Denoiser(config, {}), noised)
        if args["reduction"] == "automodel":
            return means["loss"].value, means
        return args["dlm_loss_weight"] * means["diffusion"].total + means["next_token"].total, means

    (found, means), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(assets.model(case["checkpoint"]).params)
    np.testing.assert_allclose(found, expected["loss"], rtol=2e-6)
    if args["reduction"] == "hub":
        np.testing.assert_allclose(means["diffusion"].total, expected["diffusion_sum"], rtol=2e-6)
        np.testing.assert_allclose(means["next_token"].total, expected["ar_sum"], rtol=2e-6)
        assert int(masked.sum()) + tokens.shape[1] == expected["count"]
    own = norms(gradient, config)
    for name, norm in expected["grad_norms"].items():
        np.testing.assert_allclose(own[name], norm, rtol=5e-5, err_msg=name)
