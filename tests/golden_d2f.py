"""How the D2F cases are run: pipelined decoding, noise schedule, attention mask, distillation loss."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from golden_base import Assets, Case, assert_row, padded, sample_rows

import convert
import dllm_jax
from convert.adapters import read_adapters
from dllm_jax.models.denoiser import block_causal
from samplers import PipelineSampler, stream
from samplers.text.prompts import bucket_length
from train.config import LoraPart
from train.lora import attach_adapters
from train.losses import Batch
from train.objectives.d2f import D2F, BlockDraws, D2FPart, NoisyBlocks, block_ratios, corrupt_blocks

_FORCED = {"default": "confidence", "neg_entropy": "entropy", "margin_confidence": "margin"}


def run(case: Case, assets: Assets) -> None:
    """Runs a case by its type."""
    {
        "pipeline_decode": _run_decode,
        "noise_schedule": _run_noise,
        "attention_mask": _run_mask,
        "distill_loss": _run_loss,
    }[case["type"]](case, assets)


# Decoding ------------------------------------------------------------------------------------------------------------


def sampler_of(args: dict) -> PipelineSampler:
    """The case's sampler; the taus are data, and the room holds every case of a block length."""
    return PipelineSampler(
        gen_length=-(-max(64, bucket_length(args["gen_length"])) // args["block_length"]) * args["block_length"],
        block_length=args["block_length"],
        tau_add=args["tau_add"],
        tau_act=args["tau_act"],
        threshold=args["tau_conf"],
        forced=_FORCED[args["confidence"]],
    )


def model_of(case: Case, assets: Assets) -> dllm_jax.Model:
    """The case's checkpoint, with its adapters merged where it has some."""
    model = assets.model(case["checkpoint"])
    if not case.get("lora"):
        return model

    def make(source: Path, out: Path) -> dllm_jax.Model:
        convert.convert_adapters(source, model.folder, out)
        return dllm_jax.load(out)

    return assets.once(case["lora"], make)


def _run_decode(case: Case, assets: Assets) -> None:
    args, expected = case["args"], case["expected"]
    denoiser = model_of(case, assets).denoiser
    whole = args["gen_length"] // args["block_length"] * args["block_length"]
    sampler = sampler_of(args)
    result = sample_rows(denoiser, sampler, [case["prompt"]], [whole])
    tokens = np.asarray(result.tokens[0])
    assert tokens[: args["gen_length"]].tolist() == expected["tokens"]
    assert (tokens[expected["generated_length"] :] == args["eos_id"]).all()
    assert_row(
        result,
        0,
        expected["tokens"][: expected["generated_length"]],
        expected["steps"],
        expected["nfe"],
        args["mask_id"],
    )
    steps = stream(sampler, denoiser, *padded([case["prompt"]]), gen_lengths=jnp.asarray([whole]))
    states = [jax.tree.map(jnp.copy, state) for state in steps]
    assert _windows(sampler, states, len(case["prompt"])) == expected["windows"]


def _windows(sampler: PipelineSampler, states: list, prompt_length: int) -> list[dict[str, int]]:
    """What each forward ran: from the first position whose keys and values were not final to the last block's end."""
    cached = [0] + [prompt_length + int(state.cached[0]) * sampler.block_length for state in states[1:]]
    ends = [prompt_length + int((state.appended_at[0] >= 0).sum()) * sampler.block_length for state in states[1:]]
    return [
        {"start": start, "length": end - start, "cache_after": after}
        for start, end, after in zip(cached, ends, cached[1:], strict=False)
    ]


# Training ------------------------------------------------------------------------------------------------------------


def _run_mask(case: Case, assets: Assets) -> None:
    length = case["args"]["length"]
    end = block_causal(length, jnp.asarray([case["args"]["prompt_length"]]), case["args"]["block_length"])
    rows = ["".join("01"[key < int(last)] for key in range(length)) for last in end[0]]
    assert rows == case["expected"]["allowed_rows"]


def _run_noise(case: Case, assets: Assets) -> None:
    _noised(case, assets.model("llada-tiny").denoiser)


_corrupt = jax.jit(corrupt_blocks, static_argnums=3)


def _noised(case: Case, denoiser: dllm_jax.Denoiser) -> tuple[D2FPart, NoisyBlocks]:
    """The case's batch, noised by its draws and compared. The official code takes the batch's number of blocks."""
    expected, tokens = case["expected"], jnp.asarray(case["input_ids"])
    settings = D2FPart(
        block_length=case["args"]["block_length"],
        end_padding=case["variant"] == "main",
        target="data" if case["args"].get("target") == "data_ce" else "teacher",
    )
    draws = BlockDraws(*(jnp.asarray(case["draws"][name], jnp.float32) for name in ("first", "increments", "tokens")))
    targets = jnp.arange(tokens.shape[1]) >= jnp.asarray(case["prompt_lengths"])[:, None]
    batch = Batch(tokens, targets, jnp.full(len(tokens), tokens.shape[1]))
    blocks = jnp.full(len(tokens), draws.increments.shape[1] + 1)
    ratios = np.asarray(block_ratios(draws, blocks, "monotone", settings.low, settings.high))
    for found, wanted in zip(ratios, expected["block_mask_ratios"], strict=True):
        np.testing.assert_allclose(found[: len(wanted)], wanted, atol=1e-6)
    special = dllm_jax.Denoiser(denoiser.config, {})
    noised = _corrupt(batch, draws, special, settings, blocks)
    assert noised.inputs.tolist() == expected["noisy_ids"]
    assert [np.flatnonzero(row).tolist() for row in np.asarray(noised.weights)] == expected["masked_positions"]
    return settings, noised


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _loss(
    config: dllm_jax.ModelConfig, params: dict, adapters: dict, noised: NoisyBlocks, settings: D2FPart, part: LoraPart
) -> Any:
    base = dllm_jax.Denoiser(config, params)

    def loss(adapters: dict) -> Any:
        return D2F(settings).loss(dllm_jax.Denoiser(config, attach_adapters(params, adapters, part)), base, noised)

    return jax.value_and_grad(loss, has_aux=True)(adapters)


def _run_loss(case: Case, assets: Assets) -> None:
    """The loss, its terms, and the norms of its gradient by adapter."""
    denoiser, expected = assets.model(case["checkpoint"]).denoiser, case["expected"]
    settings, noised = _noised(case, denoiser)
    adapters, part = {}, LoraPart()
    if case["lora"]:
        found = read_adapters(assets.path(case["lora"]), denoiser.config)
        adapters, part = dict(found.values), LoraPart(found.rank, found.alpha)
    run = lambda noised: _loss(denoiser.config, denoiser.params, adapters, noised, settings, part)
    (loss, _), gradient = run(noised)
    np.testing.assert_allclose(loss, expected["loss"], rtol=2e-5)
    weights = np.asarray(noised.weights)
    assert (weights > 0).sum() == expected["num_masked"]
    for term in expected["first_terms"]:
        at = (term["row"], term["pos"])
        np.testing.assert_allclose(weights[at], term["weight"], rtol=1e-5)
        (entropy, _), _ = run(noised._replace(weights=jnp.zeros(weights.shape).at[at].set(1.0)))
        np.testing.assert_allclose(entropy, term["ce"], rtol=1e-4, atol=1e-5)
    if expected["kl_part"] is not None:
        np.testing.assert_allclose(_divergence(run, noised), expected["kl_part"], rtol=1e-4)
    if expected["grad_norms"]:
        _check_gradient(gradient, expected)


def _divergence(run: Callable[[NoisyBlocks], Any], noised: NoisyBlocks) -> float:
    """The weighted mean of the divergence, from its plain means over positions of one weight."""
    weights = np.asarray(noised.weights)
    total = 0.0
    for weight in set(weights[weights > 0].tolist()):
        same = weights == weight
        (_, metrics), _ = run(noised._replace(weights=jnp.where(same, weight, 0.0)))
        total += weight * same.sum() * float(metrics["kl"])
    return total / (weights > 0).sum()


def _check_gradient(gradient: dict, expected: dict) -> None:
    norms = {name: float(jnp.linalg.norm(value)) for name, value in gradient.items()}
    np.testing.assert_allclose(np.linalg.norm(list(norms.values())), expected["grad_norm_total"], rtol=1e-4)
    for name, norm in expected["grad_norms"].items():
        layer, module, part = re.fullmatch(r".*\.(\d+)\.(?:self_attn\.)?(\w+)\.lora_([AB])\.weight", name).groups()
        ours = f"layers.{layer}.attn.{module.replace('attn_out', 'o_proj')}.lora_{part.lower()}"
        np.testing.assert_allclose(norms[ours], norm, rtol=2e-4)
