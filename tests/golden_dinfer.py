"""Cases of `dinfer.json`: whole generations, batches, and the parts of the official code one by one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import official
from golden_base import Assets, Case, cases_of, full_forward, sample_rows

from dllm_jax import Denoiser
from dllm_jax.models.denoiser import Span
from samplers import (
    BlockSampler,
    Credit,
    NoCache,
    Result,
    Rule,
    Sampling,
    Smoothing,
    Threshold,
    stop_on,
)
from samplers.rules.base import BlockView
from samplers.text.prompts import bucket_length
from samplers.tokens.predictions import given, predict
from train.trajectory import steps_of


def cases(content: dict) -> list[Case]:
    """The generations and unit cases; block layouts have no names of their own."""
    return [{"name": f"layout-{number}", **case} for number, case in enumerate(cases_of(content))]


def run(case: Case, assets: Assets) -> None:
    """One case, whatever kind it is."""
    kinds = {
        "decode_step": _run_decode_steps,
        "block_layout": _run_block_layout,
        "cached_forward": _run_cached_forward,
        "soft_embedding": _run_soft_embedding,
    }
    kinds.get(case.get("kind", ""), _run_generation)(case, assets)


def _rule(args: dict) -> Rule:
    match args["decoder"]:
        case "threshold":
            return Threshold(args["threshold"], tolerance=1e-5, skip_masks=True)
        case "credit":
            return Credit(
                args["threshold"], weight=args["credit_alpha"], boost=args["boost_gamma"], decay=args["decay_beta"]
            )
        case _:
            return official.Hierarchical(args["threshold"], args["low_threshold"])


def _cache(args: dict) -> Any:
    every = args["cache_update_freq"] or 1 << 30  # so rarely that it is never, without making another program
    options = {"refresh_every": every, "smooth": "itersmooth" in args["iteration"]}
    if args["cache"] is None:
        return NoCache()
    if "vicinity" in args["iteration"]:
        looks = {name: args[name] for name in ("prefix_look", "after_look")}
        return official.DInferVicinity(**options, **looks, warmup=args["warmup_steps"])
    return {"prefix": official.DInferPrefix, "dual": official.DInferDual}[args["cache"]](**options)


def _sampler(args: dict, vocab_size: int, equal_lengths: bool) -> BlockSampler:
    """Numbers that differ by case are data, and an option is off by a bound that is never reached, so that many cases
    share a program. The mask token, which is never written, is the end of a sequence without one."""
    smoothing = None
    if "itersmooth" in args["iteration"]:
        names = ("cont_weight", "cont_weight_init", "cont_weight_growth", "threshold_decay")
        smoothing = Smoothing(*(args[name] for name in names))
    one_block = args["block_length"] >= args["gen_length"] and not args["start_block_align"]
    return official.DInfer(
        _rule(args),
        gen_length=max(96, bucket_length(args["gen_length"])),
        block_length=None if one_block else args["block_length"],
        cache=_cache(args),
        smoothing=smoothing,
        align_blocks=args["start_block_align"],
        stop=stop_on([args["eos_id"] if args["eos_id"] >= 0 else args["mask_id"]], vocab_size=vocab_size),
        most=jnp.asarray(args["maximum_unroll"]),
        per_iteration=jnp.asarray(args["expected_tpf"]),
        lockstep=equal_lengths,
    )


def _run_generation(case: Case, assets: Assets) -> None:
    args = case["args"]
    batch = isinstance(case["prompt"][0], list)
    rows = case["prompt"] if batch else [case["prompt"]]
    longest = max(len(row) for row in rows)
    denoiser = assets.model(case["checkpoint"]).denoiser
    gen_lengths = [longest + args["gen_length"] - len(row) for row in rows]
    equal_lengths = len(set(gen_lengths)) == 1
    sampler = _sampler({**args, "gen_length": max(gen_lengths)}, denoiser.vocab_size, equal_lengths)
    result = jax.device_get(sample_rows(denoiser, sampler, rows, gen_lengths))
    if not equal_lengths:
        _check_ragged(result, case, sampler, gen_lengths)
        return
    for row in range(len(rows)):
        _check_row(result, row, case, sampler)
    if batch:
        assert int(result.nfe.max()) == case["expected"]["nfe"]


def _written(result: Result, row: int, args: dict, length: int) -> list[int]:
    """Tokens as the official code leaves them: after the last complete block comes its end-of-sequence id."""
    return np.where(result.decoded_at[row] >= 0, result.tokens[row], args["eos_id"])[:length].tolist()


def _check_row(result: Result, row: int, case: Case, sampler: BlockSampler) -> None:
    args, expected = case["args"], case["expected"]
    batch = isinstance(expected["tokens"][0], list)
    tokens = expected["tokens"][row] if batch else expected["tokens"]
    steps = [step[row] for step in expected["steps"]] if batch else expected["steps"]
    assert _written(result, row, args, len(tokens)) == tokens
    assert steps_of(result, row) == steps[: int(result.nfe[row])]
    assert not any(steps[int(result.nfe[row]) :])
    if batch:
        return
    assert int(result.nfe[row]) == expected["nfe"]
    assert int(result.cache_updates[row]) == expected["cache_updates"]
    total = args["gen_length"]
    full = [forward for forward in expected["forwards"] if forward[:2] == [-len(case["prompt"]), total]]
    assert int(result.full_forwards[row]) == len(full)
    if sampler.smoothing is not None:
        t = np.arange(expected["nfe"])
        np.testing.assert_allclose(sampler.smoothing.alpha(t), expected["alphas"], rtol=1e-6)
        caution = np.maximum(sampler.smoothing.caution(t), args["threshold"])
        np.testing.assert_allclose(caution, expected["thresholds"], rtol=1e-6)


def _check_ragged(result: Result, case: Case, sampler: BlockSampler, gen_lengths: list[int]) -> None:
    """The official rows walk through the blocks together, ours one by one: their steps are put together here."""
    args, expected, rows = case["args"], case["expected"], case["prompt"]
    steps: list[list[list[int]]] = []
    longest = max(len(row) for row in rows)
    for start in range(0, longest + args["gen_length"], args["block_length"]):
        parts = [_steps_in(result, i, start - len(row), start - len(row) + sampler.width) for i, row in enumerate(rows)]
        for number in range(max(len(part) for part in parts)):
            steps.append(
                [
                    [at + len(row) - longest for at in part[number]] if number < len(part) else []
                    for part, row in zip(parts, rows, strict=True)
                ]
            )
    assert steps == expected["steps"]
    assert len(steps) == expected["nfe"]
    for i, row in enumerate(rows):
        assert row + _written(result, i, args, gen_lengths[i]) == expected["sequences"][i]


def _steps_in(result: Result, row: int, low: int, high: int) -> list[list[int]]:
    """What each forward of a row committed while [low, high) was its block."""
    at = result.decoded_at[row]
    place = np.arange(len(at))
    inside = (place >= low) & (place < high) & (at >= 0)
    if not inside.any():
        return []
    later = at[(place >= high) & (at >= 0)]
    end = int(later.min()) if later.size else int(result.nfe[row])
    return [np.flatnonzero(inside & (at == step)).tolist() for step in range(int(at[inside].min()), end)]


# Parts ---------------------------------------------------------------------------------------------------------------


def _run_decode_steps(case: Case, assets: Assets) -> None:
    """The rule alone, on given logits."""
    args = {"credit_alpha": None, "boost_gamma": None, "decay_beta": None, **case["args"], "decoder": case["decoder"]}
    mask_id, rule = args["mask_id"], _rule(args)
    tokens = np.asarray([case["block_tokens"]])
    logits = np.asarray(case["logits"], np.float32)
    state = rule.init(1, tokens.shape[1], logits.shape[-1])
    for number, expected in enumerate(case["expected_tokens"]):
        tokens, state = _decode_step(rule, state, tokens, logits[number], mask_id, number)
        if case["name"] == "threshold-all-mask-argmax-quirk":  # where the official code stalls, ours goes on
            most_confident = np.argmax(np.delete(logits[number], mask_id, axis=-1).max(-1) - _logsumexp(logits[number]))
            assert np.flatnonzero(tokens[0] != mask_id).tolist() == [most_confident]
            return
        assert tokens[0].tolist() == expected
    for position, token, credit in case.get("expected_credit", []):
        np.testing.assert_allclose(np.asarray(state)[0, position, token], credit, atol=2e-5)


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    return np.log(np.exp(logits).sum(axis=-1))


def _decode_step(
    rule: Rule, state: Any, tokens: np.ndarray, logits: np.ndarray, mask_id: int, step: int
) -> tuple[np.ndarray, Any]:
    one, width = jnp.asarray([step]), tokens.shape[1]
    view = BlockView(
        undecided=jnp.asarray(tokens == mask_id),
        positions=jnp.arange(width)[None],
        first=one * 0,
        step=one,
        block_undecided=one,
        num_blocks=one * 0 + 1,
        noise=None,
        nfe=one,
        tokens=jnp.asarray(tokens),
        written=jnp.asarray(tokens != mask_id),
        mask_id=mask_id,
    )
    adjusted, state = rule.adjust(jnp.asarray(logits)[None], view, state)
    predictions = predict(given(adjusted), Sampling(), mask_id=mask_id, score_from="raw", draw=None)
    change, state = rule.change(predictions, view, state)
    return np.asarray(change.tokens), state


def _run_block_layout(case: Case, assets: Assets) -> None:
    sampler = BlockSampler(
        Threshold(),
        gen_length=case["gen_length"],
        block_length=case["block_length"],
        align_blocks=case["start_block_align"],
    )
    assert sampler.blocks(case["prompt_length"]) == [tuple(block) for block in case["expected_blocks"]]


def _run_cached_forward(case: Case, assets: Assets) -> None:
    """Keys and values of one sequence, a window of another one."""
    denoiser = assets.model(case["checkpoint"]).denoiser
    cached = jnp.asarray(case["cached_ids"]).reshape(1, -1)
    low, high = case["window"]
    lengths = jnp.asarray([cached.shape[1]])
    _, cache = full_forward(denoiser, cached, lengths, jnp.asarray([0]), cached.shape[1])
    ids = cached.at[:, low:high].set(jnp.asarray(case["window_ids"]).reshape(1, -1))
    hidden, _ = denoiser.forward(ids, lengths, at=Span(jnp.asarray([low]), high - low), kv=cache)
    expected = np.asarray(case["expected"]["logits"])
    np.testing.assert_allclose(denoiser.logits(hidden)[0], expected.reshape(high - low, -1), atol=1e-3)


@functools.partial(jax.jit, static_argnums=2)
def _soften(denoiser: Denoiser, tokens: jax.Array, width: int) -> jax.Array:
    lengths = jnp.asarray([width])
    hidden, _ = denoiser.forward(tokens, lengths)
    return denoiser.expected_embedding(denoiser.logits(hidden))


def _run_soft_embedding(case: Case, assets: Assets) -> None:
    denoiser, expected = assets.model(case["checkpoint"]).denoiser, case["expected"]
    tokens = jnp.asarray(case["input_ids"]).reshape(1, -1)
    width = tokens.shape[1]
    masked = np.flatnonzero(np.asarray(tokens[0]) == denoiser.mask_id)
    assert masked.tolist() == expected["masked_positions"]
    soft = jnp.where((tokens == denoiser.mask_id)[..., None], case["alpha"] * _soften(denoiser, tokens, width), 0)
    inputs = denoiser.embed(tokens) + soft
    close = functools.partial(np.testing.assert_allclose, atol=1e-4)
    norms = np.linalg.norm(inputs[0], axis=-1)
    wanted = np.asarray(expected["embedding_norms"])
    close(norms if len(wanted) == width else norms[masked], wanted)
    first = np.asarray(expected["embedding_first8"])
    close(inputs[0, :, :8] if len(first) == width else inputs[0, masked, :8], first)
    hidden, _ = full_forward(denoiser, inputs, jnp.asarray([width]), jnp.asarray([0]), width)
    logits = np.asarray(denoiser.logits(hidden)[0])
    logits = logits if len(expected["next_logits_argmax"]) == width else logits[masked]
    assert logits.argmax(axis=-1).tolist() == expected["next_logits_argmax"]
    close(logits.max(axis=-1), expected["next_logits_max"], atol=1e-3)
