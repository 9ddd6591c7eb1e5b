"""How the D2F cases are run: pipelined decoding, noise schedule, attention mask, distillation loss."""

import jax.numpy as jnp
import numpy as np
from golden_base import Assets, Case, assert_row

import convert
import dllm_jax
from samplers import PipelineSampler, stream
from samplers.generate import bucket_length, pad_prompts

_FORCED = {"default": "confidence", "neg_entropy": "entropy", "margin_confidence": "margin"}


def run(case: Case, assets: Assets) -> None:
    {"pipeline_decode": _run_decode}[case["type"]](case, assets)


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
    source = assets.path(case["lora"])
    if source not in assets.converted:
        out = assets.converted["folder"] / f"{case['lora']}-{len(assets.converted)}"
        convert.convert_adapters(source, model.folder, out)
        assets.converted[source] = dllm_jax.load(out)
    return assets.converted[source]


def _run_decode(case: Case, assets: Assets) -> None:
    args, expected = case["args"], case["expected"]
    denoiser = model_of(case, assets).denoiser
    prompt, lengths = pad_prompts([case["prompt"]], max(128, bucket_length(len(case["prompt"]))))
    whole = args["gen_length"] // args["block_length"] * args["block_length"]
    sampler = sampler_of(args)
    states = list(stream(sampler, denoiser, prompt, lengths, gen_lengths=jnp.asarray([whole])))
    result = sampler.result(denoiser, states[-1])
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
    assert _windows(sampler, states, len(case["prompt"])) == expected["windows"]


def _windows(sampler: PipelineSampler, states: list, prompt_length: int) -> list[dict[str, int]]:
    """What each forward ran: from the first position whose keys and values were not final to the last block's end."""
    cached = [0] + [prompt_length + int(state.cached[0]) * sampler.block_length for state in states[1:]]
    ends = [prompt_length + int((state.appended_at[0] >= 0).sum()) * sampler.block_length for state in states[1:]]
    return [
        {"start": start, "length": end - start, "cache_after": after}
        for start, end, after in zip(cached, ends, cached[1:], strict=False)
    ]
