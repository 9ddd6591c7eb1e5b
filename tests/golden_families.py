"""How the cases of each golden file are run; a new family is one entry in `FAMILIES`."""

from collections.abc import Callable
from typing import Any

import golden_apd
import golden_block
import golden_d2f
import golden_dinfer
import golden_nemotron
import golden_ni
import jax
import jax.numpy as jnp
import numpy as np
import official
from golden_base import (
    Assets,
    Case,
    Family,
    assert_row,
    cases_of,
    check,
    full_forward,
    generate,
    lengths_of,
    sample_rows,
)
from safetensors import safe_open

import convert
import dllm_jax
from dllm_jax.models.denoiser import Span
from dllm_jax.models.layers import Rope, rope_angles
from dllm_jax.models.transformer import bind
from samplers import (
    CACHES,
    EB,
    BlockSampler,
    LLaDA,
    Sampling,
    Threshold,
    TopK,
    stop_on,
)
from samplers.likelihood.estimators import is_greedy, mask_counts, masked_loss
from samplers.text.prompts import bucket_length, pad_prompts
from train.trajectory import first_match, forwards_until

_loss = jax.jit(masked_loss)
_is_greedy = jax.jit(is_greedy)
_logits = jax.jit(lambda denoiser, tokens, lengths=None: denoiser(tokens, lengths))


def _steps(args: dict) -> jax.Array:
    """As data: whether the case's blocks share the steps evenly is not known from the padded length."""
    return jnp.asarray(args["steps"])


# LLaDA's own sampler and likelihood ----------------------------------------------------------------------------------


def _llada_cases(content: dict) -> list[Case]:
    counts = [{"name": f"mask_counts-{i}", "counts": case} for i, case in enumerate(content.get("mask_counts", []))]
    return cases_of(content) + counts


def _llada_noise(case: Case, assets: Assets) -> official.TableNoise | None:
    inputs = case.get("inputs", {})
    if "uniform_confidence" in inputs:
        return official.TableNoise(order=jnp.asarray(inputs["uniform_confidence"], jnp.float32))
    if "noise_key" in inputs:
        return official.TableNoise(tokens=jnp.asarray(np.load(assets.path(inputs["noise_file"]))[inputs["noise_key"]]))
    return None


def _run_llada(case: Case, assets: Assets) -> None:
    if "counts" in case:
        counts = case["counts"]
        found = mask_counts(jnp.asarray(counts["k"]), counts["batch_size"], counts["target_len"], to_even=True)
        assert np.asarray(found).tolist() == counts["counts"]
        return
    args = case["args"]
    run = {"log_likelihood": _run_likelihood, "suffix_greedy": _run_greedy}.get(args.get("task"), _run_llada_sampler)
    run(case, assets)


def _run_llada_sampler(case: Case, assets: Assets) -> None:
    args = case["args"]
    sampler = BlockSampler(
        official.LLaDA(_steps(args), remasking=args["remasking"]),
        **lengths_of(args),
        guidance=args["cfg_scale"] or None,
        sampling=Sampling(
            temperature=args["temperature"] or None,
            suppress=jnp.asarray([args["eos_id"]]) if args["logits_eos_inf"] else None,
            defer=jnp.asarray([args["eos_id"], args["eot_id"]]) if args["confidence_eos_eot_inf"] else None,
        ),
    )
    if args.get("padding") == "left":
        _run_left_padded(case, assets, sampler)
        return
    check(generate(case, assets, sampler, _llada_noise(case, assets)), case)


def _stripped(case: Case) -> list[list[int]]:
    """The prompts of a left-padded batch without their padding."""
    if "attention_mask" in case:
        pairs = zip(case["prompt"], case["attention_mask"], strict=True)
        return [[token for token, valid in zip(row, mask, strict=True) if valid] for row, mask in pairs]
    longest = max(len(row) for row in case["prompt"])
    pad = case["args"]["pad_id"]
    rows = []
    for row in case["prompt"]:
        assert len(row) <= longest
        start = next(i for i, token in enumerate(row) if token != pad)
        rows.append(row[start:])
    return rows


def _run_left_padded(case: Case, assets: Assets, sampler: BlockSampler) -> None:
    """Our rows are left-aligned: the reference's padding is dropped and every row must still give its tokens."""
    rows, expected, mask_id = _stripped(case), case["expected"], case["args"]["mask_id"]
    denoiser = assets.model(case["checkpoint"]).denoiser
    result = sample_rows(denoiser, sampler, rows, [case["args"]["gen_length"]] * len(rows))
    for i in range(len(rows)):
        nfe = expected["nfe"][i] if isinstance(expected["nfe"], list) else expected["nfe"]
        assert_row(result, i, expected["tokens"][i], expected["steps"][i], nfe, mask_id)


def _run_likelihood(case: Case, assets: Assets) -> None:
    args, expected, inputs = case["args"], case["expected"], case["inputs"]
    denoiser = assets.model(case["checkpoint"]).denoiser
    room = bucket_length(len(case["answer"]))
    padded = lambda rows: np.pad(
        np.asarray(rows, np.int32), [(0, 0)] * (np.ndim(rows) - 1) + [(0, room - len(rows[0]))]
    )
    (prompt,), (prompt_length,) = pad_prompts([case["prompt"]])
    losses = [
        float(
            _loss(
                denoiser,
                prompt,
                jnp.asarray(padded([case["answer"]])[0]),
                jnp.asarray(padded(perturbed)),
                jnp.asarray(ratio),
                prompt_length=prompt_length,
                answer_length=len(case["answer"]),
                guidance=args["cfg_scale"] or None,
            )
        )
        for perturbed, ratio in zip(inputs["perturbed_answer"], inputs["mask_ratio"], strict=True)
    ]
    np.testing.assert_allclose(losses, expected["batch_losses"], atol=expected["tolerance"])
    assert abs(-float(np.mean(losses)) - expected["log_likelihood"]) <= expected["tolerance"]


def _run_greedy(case: Case, assets: Assets) -> None:
    denoiser = assets.model(case["checkpoint"]).denoiser
    prompt, answer = pad_prompts([case["prompt"]]), pad_prompts([case["answer"]])
    found = _is_greedy(denoiser, prompt[0], answer[0], prompt[1], answer[1], guidance=case["args"]["cfg_scale"] or None)
    assert bool(found[0]) is case["expected"]["is_greedy"]


# Forward passes ------------------------------------------------------------------------------------------------------


def _run_forward(case: Case, assets: Assets) -> None:
    """`llada-tiny-forward.npz`: full, hidden, prefix cache, dual cache, padded batch."""
    data = np.load(assets.path("llada-tiny-forward.npz"))
    denoiser = assets.model("llada-tiny").denoiser
    close = lambda found, wanted: np.testing.assert_allclose(found, wanted, atol=1e-4)
    close(_logits(denoiser, jnp.asarray(data["ids"])), data["logits"])
    close(_logits(denoiser, jnp.asarray(data["long_ids"])), data["long_logits"])

    model = bind(denoiser.config, denoiser.params)
    ids = jnp.asarray(data["ids"][:1])
    positions, visible = jnp.arange(ids.shape[1])[None], jnp.asarray([[ids.shape[1]]])
    hidden = model.embed_tokens(ids)
    close(hidden[0], data["hidden_row0"][0])
    close(model.final_norm(model.forward(hidden, positions, visible)[0])[0], data["hidden_row0"][-1])

    mask = data["padded_mask"].astype(bool)
    lengths = mask.sum(axis=1)
    aligned = np.zeros_like(data["padded_ids"])
    for row, length in enumerate(lengths):
        aligned[row, :length] = data["padded_ids"][row][mask[row]]
    logits = _logits(denoiser, jnp.asarray(aligned), jnp.asarray(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        close(logits[row, :length], data["padded_logits"][row][mask[row]])
    _run_cached_forward(denoiser, data, close)


def _run_cached_forward(denoiser: dllm_jax.Denoiser, data: Any, close: Callable[..., None]) -> None:
    ids = jnp.asarray(data["cache_ids"])
    total = ids.shape[1]
    start, end = int(data["block_start"]), int(data["block_end"])
    at, lengths = jnp.asarray([start]), jnp.asarray([total])
    hidden, cache = full_forward(denoiser, ids, lengths, jnp.asarray([0]), total)
    close(denoiser.logits(hidden), data["cache_logits"])
    close(np.moveaxis(np.asarray(cache[0].value), 1, 2), data["cache_v_layer0"])
    for number in ("1", "2"):
        block = ids.at[:, start:end].set(jnp.asarray(data[f"block_ids_{number}"]))
        hidden, _ = denoiser.forward(block, lengths, at=Span(at, end - start), kv=cache)
        close(denoiser.logits(hidden), data[f"block_logits_{number}"])
    suffix = ids.at[:, start:].set(jnp.asarray(data["suffix_ids"]))
    hidden, _ = denoiser.forward(suffix, lengths, at=Span(at, total - start), kv=cache)
    close(denoiser.logits(hidden), data["suffix_logits"])


# Fast-dLLM -----------------------------------------------------------------------------------------------------------


def _run_fast_dllm(case: Case, assets: Assets) -> None:
    args = case["args"]
    build = {"fast-dllm": _fast_dllm_llada, "fast-dllm-dream": _fast_dllm_dream}[args["sampler"]]
    result = generate(case, assets, build(args))
    check(result, case)
    assert int(result.full_forwards[0]) == case["expected"]["forward_kinds"].count("full")


def _fast_dllm_llada(args: dict) -> BlockSampler:
    if args["threshold"] is not None:
        rule: Any = Threshold(args["threshold"])
    elif args["factor"] is not None:
        rule = official.Factor(args["factor"])
    else:
        rule = LLaDA(_steps(args), remasking=args["remasking"])
    sampler = BlockSampler if args["cache"] == "none" else official.FastDllm
    return sampler(rule, **lengths_of(args), cache=CACHES[args["cache"]](), fill_after_eos=args["early_stop"])


def _fast_dllm_dream(args: dict) -> BlockSampler:
    sampling = Sampling(temperature=args["temperature"] or None, top_p=args["top_p"], top_k=args["top_k"])
    if args["cache"] == "none" and args["alg"] == "confidence_threshold":
        rule: Any = Threshold(args["threshold"], steps=_steps(args))
        return BlockSampler(rule, **lengths_of(args), sampling=sampling)
    if args["cache"] == "none":  # every other name is Dream's own sampler
        return BlockSampler(_dream_rule(args), **lengths_of(args), sampling=sampling)
    if args["alg"] == "confidence_threshold":
        rule = Threshold(args["threshold"])
    else:  # the official block sampler scores by entropy whatever other name it is given
        rule = official.Dream(_steps(args), alg="entropy", eps=args["eps"], alg_temp=args["alg_temp"] or None)
    return BlockSampler(
        official.FastDllmDream(rule),
        **lengths_of(args),
        cache=CACHES[args["cache"]](),
        sampling=sampling,
    )


# Dream ---------------------------------------------------------------------------------------------------------------


def _run_dream(case: Case, assets: Assets) -> None:
    {"forward": _run_dream_forward, "generate": _run_dream_sampler, "generate_batch": _run_dream_sampler}[case["kind"]](
        case, assets
    )


def _run_dream_forward(case: Case, assets: Assets) -> None:
    """The golden's logits are raw: its position i is our aligned position i + 1."""
    denoiser, expected = assets.model(case["checkpoint"]).denoiser, case["expected"]
    batch = isinstance(case["prompt"][0], list)
    rows = _stripped(case) if batch else [case["prompt"]]
    offsets = [len(case["prompt"][0]) - len(row) if batch else 0 for row in rows]
    for number, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        raw = np.asarray(_logits(denoiser, jnp.asarray([[*row, 0]]), jnp.asarray([len(row)])))[0, 1:]
        logits = expected["logits"][number] if batch else expected["logits"]
        found = raw[np.asarray(expected["positions"]) - offset]
        np.testing.assert_allclose(found, logits, atol=expected["atol"])
        argmax = expected["argmax_valid"][number] if batch else expected["argmax"]
        assert raw.argmax(axis=-1).tolist() == argmax[-len(row) :]


def _dream_rule(args: dict) -> official.Dream:
    return official.Dream(_steps(args), alg=args["alg"], eps=args["eps"], alg_temp=args["alg_temp"] or None)


def _run_dream_sampler(case: Case, assets: Assets) -> None:
    args = case["args"]
    sampler = BlockSampler(
        _dream_rule(args),
        **lengths_of(args),
        sampling=Sampling(temperature=args["temperature"] or None, top_p=args["top_p"], top_k=args["top_k"]),
    )
    if case["kind"] == "generate_batch":
        _run_left_padded(case, assets, sampler)
        return
    uniforms = case.get("uniforms")
    noise = None if uniforms is None else official.TableNoise(order=jnp.asarray(uniforms, jnp.float32))
    check(generate(case, assets, sampler, noise), case)


# EB-Sampler ----------------------------------------------------------------------------------------------------------


def _run_eb(case: Case, assets: Assets) -> None:
    args, expected = case["args"], case["expected"]
    if args["sampler"] == "topk":
        rule: Any = TopK(args["k"], proxy=args["error_proxy"])
    else:
        gamma = float("inf") if args["gamma"] is None else args["gamma"]
        rule = EB(gamma, proxy=args["error_proxy"])
    denoiser = assets.model(case["checkpoint"]).denoiser
    stop = stop_on(sequences=args["until"], vocab_size=denoiser.vocab_size) if args["stop_in_sampler"] else None
    sampler = BlockSampler(
        rule,
        **lengths_of(args),
        canvas_length=args["canvas_length"],
        stop=stop,
    )
    result = generate(case, assets, sampler)
    check(result, case)
    if args["until"]:
        assert forwards_until(result, 0, args["until"]) == expected["nfe_until"]
        assert first_match(result, 0, args["until"]) == expected["answer_len"]


# LLaDA-MoE -----------------------------------------------------------------------------------------------------------


def _run_llada_moe(case: Case, assets: Assets) -> None:
    {"forward": _run_moe_forward, "fused_layout": _run_fused_layout}[case["kind"]](case, assets)


def _run_moe_forward(case: Case, assets: Assets) -> None:
    """Logits, and layer by layer the norms of the hidden states and the experts that the router chooses."""
    denoiser, expected = assets.model(case["checkpoint"]).denoiser, case["expected"]
    tokens = jnp.asarray([case["input_ids"]])
    np.testing.assert_allclose(_logits(denoiser, tokens)[0], expected["logits"], atol=1e-3)
    norms, routes = _moe_trace(denoiser, tokens)
    np.testing.assert_allclose(norms, expected["hidden_norms"], atol=1e-3)
    for (weights, experts), wanted in zip(routes, expected["router"], strict=True):
        assert experts[0].tolist() == wanted["experts"]
        np.testing.assert_allclose(weights[0], wanted["weights"], atol=1e-4)


@jax.jit
def _moe_trace(denoiser: dllm_jax.Denoiser, tokens: jax.Array) -> tuple[list[jax.Array], list]:
    model = bind(denoiser.config, denoiser.params)
    positions = jnp.arange(tokens.shape[1])[None]
    visible = jnp.full((1, 1), tokens.shape[1])
    turn = rope_angles(positions, Rope(denoiser.config.head_dim, denoiser.config.rope_theta))
    x = model.embed_tokens(tokens)
    hidden, routes = [x], []
    for layer in model.layers:
        y = layer.attn_norm(x)
        x = x + layer.attn.attend(y, turn, layer.attn.keys_values(y, turn), visible)
        y = layer.mlp_norm(x)
        routes.append(layer.mlp.route(layer.mlp.scores(y)))
        x = x + layer.mlp(y)[0]
        hidden.append(x)
    hidden[-1] = model.final_norm(x)  # as the reference records it
    return [jnp.linalg.norm(x[0], axis=-1) for x in hidden], routes


def _run_fused_layout(case: Case, assets: Assets) -> None:
    """Our fused export of the checkpoint, read by the format's own library."""
    expected, expert = case["expected"], case["expert"]
    out = assets.new_folder("fused")
    convert.export(assets.model(case["checkpoint"]).folder, out, layout="fused")
    with safe_open(out / "model.safetensors", framework="np") as file:
        w1, w2 = (file.get_tensor(case["names"][name]) for name in ("w1", "w2"))
    assert (list(w1.shape), list(w2.shape)) == (expected["w1_shape"], expected["w2_shape"])
    rows = {"w1_gate": w1[expert, 0], "w1_up": w1[expert, w1.shape[1] // 2], "w2": w2[expert, 0]}
    for name, row in rows.items():
        np.testing.assert_allclose(row[:4], expected[f"{name}_row0_first4"], atol=1e-6)
    np.testing.assert_allclose(w1.sum(dtype=np.float64), expected["w1_sum"], atol=1e-2)
    np.testing.assert_allclose(w2.sum(dtype=np.float64), expected["w2_sum"], atol=1e-2)


FAMILIES: dict[str, Family] = {
    "llada-base": Family(_llada_cases, _run_llada, one_of=5),
    "llada-tiny-forward": Family(cases_of, _run_forward),
    "fast-dllm": Family(cases_of, _run_fast_dllm, one_of=5),
    "dream": Family(cases_of, _run_dream, one_of=5),
    "eb": Family(cases_of, _run_eb, one_of=5),
    "d2f": Family(cases_of, golden_d2f.run, one_of=8, one_unit_of=2),
    "dinfer": Family(golden_dinfer.cases, golden_dinfer.run, one_of=12, one_unit_of=2),
    "lladamoe": Family(cases_of, _run_llada_moe),
    "ni-sampling": Family(cases_of, golden_ni.run, one_of=6),
    "apd": Family(cases_of, golden_apd.run, one_of=8),
    "llada2": Family(cases_of, golden_block.run, one_of=8, one_unit_of=2, sampled=False),
    "sdar": Family(cases_of, golden_block.run, one_of=4, one_unit_of=2, sampled=False),
    "nemotron-diffusion": Family(cases_of, golden_nemotron.run, one_of=4, one_unit_of=2),
    "fast-dllm-v2": Family(cases_of, golden_block.run, one_of=4, one_unit_of=2, sampled=False),
}
