"""Cases of `ni-sampling.json`: the indicator alone, its scores on a model, the merging criterion, whole generations."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import official
from golden_base import Assets, Case, check, generate, lengths_of, padded

from convert.indicator import convert_indicator
from dllm_jax import Denoiser
from dllm_jax.indicator import Indicator, load_indicator
from samplers import NI, BlockSampler, Threshold
from samplers.rules.ni import features_of
from samplers.tokens.predictions import Sampling, given, predict
from train.trajectory import best_tokens, merge_steps, mergeable_steps, trajectory_of

_forward = jax.jit(lambda indicator, *features: (indicator.logits(*features), indicator.scores(*features)))
merged_order = jax.jit(merge_steps)
mergeable_steps = jax.jit(mergeable_steps)


def run(case: Case, assets: Assets) -> None:
    """One case, whatever its type is."""
    types = {
        "indicator_forward": _run_forward,
        "indicator_scores": _run_scores,
        "merge_logic": _run_merge_logic,
        "trajectory_merge_labels": _run_merge_labels,
        "ni_generate": _run_generate,
    }
    types[case["type"]](case, assets)


def _indicator(name: str, assets: Assets) -> Indicator:
    def make(source: Path, out: Path) -> Indicator:
        convert_indicator(source, out)
        return load_indicator(out)

    return assets.once(name, make)


def _run_forward(case: Case, assets: Assets) -> None:
    inputs, expected, wanted = case["inputs"], case["expected"], case["config"]
    indicator = _indicator(case["weights"], assets)
    config = indicator.config
    assert (config.depth, config.width, config.num_values) == (wanted["depth"], wanted["width"], wanted["topk"] or 0)
    assert (config.num_tokens, config.mix) == (wanted["input_topk_token"], wanted["concat_proj"])
    assert config.num_params == expected["num_params"]
    embeddings = np.asarray(inputs["top1_emb"])[:, None]
    if config.num_tokens > 1:
        extra = np.asarray(inputs["extra_emb"]).reshape(len(embeddings), config.num_tokens - 1, -1)
        embeddings = np.concatenate([embeddings, extra], axis=1)
    values = inputs.get("topk_values") or np.zeros((len(embeddings), 0))
    features = (np.asarray(x, np.float32) for x in (inputs["hidden"], embeddings, values))
    logits, scores = _forward(indicator, *features)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5)
    np.testing.assert_allclose(scores, expected["scores"], atol=1e-5)


@jax.jit
def _scored(indicator: Indicator, denoiser: Denoiser, tokens: jax.Array, length: jax.Array) -> dict[str, jax.Array]:
    """Of every position [1, S] of a sequence: its score, and what it is made of."""
    hidden, _ = denoiser.forward(tokens, length)
    logits = denoiser.logits(hidden)
    best = predict(given(logits), Sampling(), mask_id=denoiser.mask_id, score_from="raw", draw=None)
    features = features_of(indicator.config, denoiser, hidden, logits, best.token)
    top_values, top_tokens = jax.lax.top_k(jax.nn.softmax(logits), 4)
    return {
        "scores": indicator.scores(*features)[0],
        "top_values": top_values[0],
        "top_tokens": top_tokens[0],
        "hidden_first4": features[0][0, :, :4],
        "values": features[2][0],
    }


def _score(indicator: Indicator, denoiser: Denoiser, ids: list[int]) -> dict[str, np.ndarray]:
    tokens, lengths = padded([ids], 192)
    return {name: np.asarray(x)[: len(ids)] for name, x in _scored(indicator, denoiser, tokens, lengths).items()}


def _run_scores(case: Case, assets: Assets) -> None:
    expected, ids = case["expected"], np.asarray(case["input_ids"])
    indicator = _indicator(f"{case['indicator']}.safetensors", assets)
    found = _score(indicator, assets.model(case["checkpoint"]).denoiser, ids.tolist())
    masked = np.flatnonzero(ids == case["mask_id"])
    assert (masked - case["prompt_length"]).tolist() == expected["masked_positions"]
    np.testing.assert_array_equal(found["top_tokens"][masked], expected["top_tokens"])
    for name, tolerance in (("scores", 1e-4), ("top_values", 1e-5), ("hidden_first4", 1e-4)):
        np.testing.assert_allclose(found[name][masked], expected[name], atol=tolerance, err_msg=name)
    own = found["values"][masked][:, :4]
    np.testing.assert_allclose(own, np.asarray(expected["top_values"])[:, : own.shape[1]], atol=1e-5)


def _run_merge_logic(case: Case, assets: Assets) -> None:
    expected, right = case["expected"], np.asarray(case["predicted_right"], bool)
    step = np.zeros(len(right), np.int32)
    for number, positions in enumerate(case["order"]):
        step[positions] = number
    label, until = mergeable_steps(step[None], right[None], jnp.asarray([case["rollback"]]))
    assert int(until[0]) - case["rollback"] == expected["merged_steps"]
    assert np.flatnonzero(label[0]).tolist() == sorted(expected["label_one"])
    waiting = ~np.asarray(label[0]) & (step >= case["rollback"])
    assert np.flatnonzero(waiting).tolist() == sorted(expected["label_zero"])


def _run_merge_labels(case: Case, assets: Assets) -> None:
    args, expected = case["args"], case["expected"]
    denoiser = assets.model(case["checkpoint"]).denoiser
    threshold = 1.01 if args["threshold"] is None else args["threshold"]  # above 1: one position per step
    result = generate(case, assets, BlockSampler(Threshold(threshold), **lengths_of(args)))
    check(result, case)
    prompt, lengths = padded([case["prompt"]])
    gen_lengths = jnp.asarray([args["gen_length"]])
    trajectory = trajectory_of(result, prompt, lengths, mask_id=args["mask_id"], gen_lengths=gen_lengths)
    for label in expected["labels"]:
        reached = jnp.asarray([label["rollback"]])
        canvas, right = _state(denoiser, trajectory, reached)
        found, until = mergeable_steps(trajectory.step, right, reached)
        assert int(until[0]) - label["rollback"] == label["merged_steps"]
        assert np.flatnonzero(found[0]).tolist() == sorted(label["label_one"])
        assert int((canvas == args["mask_id"])[0, : args["gen_length"]].sum()) == label["num_masked"]
    order = merged_order(denoiser, trajectory)
    steps = [np.flatnonzero(order.step[0] == number).tolist() for number in range(int(order.steps[0]))]
    assert steps == [sorted(step) for step in expected["merged_order"]]
    assert (int(order.steps[0]), int(order.forced[0])) == (expected["merged_steps"], 0)


@jax.jit
def _state(denoiser: Denoiser, trajectory: Any, reached: jax.Array) -> tuple[jax.Array, jax.Array]:
    canvas = jnp.where(trajectory.step >= reached[:, None], denoiser.mask_id, trajectory.tokens)
    return canvas, best_tokens(denoiser, trajectory, canvas) == trajectory.tokens


def _run_generate(case: Case, assets: Assets) -> None:
    """As the official code does, which enters complete blocks; and where recorded, as ours does by default."""
    args, expected = case["args"], case["expected"]
    indicator = _indicator(f"{case['indicator']}.safetensors", assets)
    rule = NI(
        indicator,
        float("inf") if args["prob_threshold"] is None else args["prob_threshold"],
        indicator_threshold=args["indicator_threshold"],
        steps=jnp.asarray(args["steps"]),
    )
    check(generate(case, assets, official.NISampling(rule, **lengths_of(args))), case)
    if "variant_skip_finished_blocks" in case:
        ours = {**case, "expected": {**expected, **case["variant_skip_finished_blocks"]}}
        check(generate(ours, assets, BlockSampler(rule, **lengths_of(args))), ours)
    start = case["prompt"] + [args["mask_id"]] * args["gen_length"]
    found = _score(indicator, assets.model(case["checkpoint"]).denoiser, start)
    np.testing.assert_allclose(found["scores"][len(case["prompt"]) :], expected["scores_step0"], atol=1e-4)
