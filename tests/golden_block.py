"""Cases of block diffusion: LLaDA2's, SDAR's and Fast-dLLM v2's samplers, serving engines' loops, models and parts."""

import dataclasses
from typing import Any

import golden_block_loss
import jax
import jax.numpy as jnp
import numpy as np
import official
from golden_base import Assets, Case, full_forward, padded
from safetensors import safe_open

import convert
from dllm_jax.config import Experts
from dllm_jax.models.denoiser import Denoiser, Span
from dllm_jax.models.transformer import MoE
from samplers import BlockSampler, Rule, Threshold, stop_on, stream
from samplers.caches import ExactCache, SubBlockCache
from samplers.rules import Dynamic, Edit, FastDllmV2
from samplers.text.prompts import bucket_length


def run(case: Case, assets: Assets) -> None:
    """One case, whatever kind it is."""
    kinds = {
        "forward": _run_forward,
        "cached_forward": _run_cached_forward,
        "router": _run_router,
        "layout": _run_layout,
        "block_diffusion_loss": golden_block_loss.run_loss,
    }
    samplers = {
        "llada2.0": _run_llada20,
        "llada2.1": _run_llada21,
        "sdar": _run_sdar,
        "fast-dllm-v2": _run_fast_dllm_v2,
        "dinfer-block-diffusion": _run_dinfer,
        "sglang-low-confidence": _run_sglang,
        "sglang-joint-threshold": _run_sglang,
    }
    found = samplers[case["args"]["sampler"]] if case["kind"] == "generate" else kinds[case["kind"]]
    found(case, assets)


# Generations ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a row's forwards did. Positions count from the end of the prompt.

    Attributes:
        tokens: of all positions up to the end of the row's last block; the mask id where nothing was written.
        steps: per forward what was written over a mask, [position, token].
        edits: per forward what was written over a token, [position, old, new].
        blocks: per forward, where the row's block begins, from the prompt's first token on.
    """

    tokens: list[int]
    steps: list[list[list[int]]]
    edits: list[list[list[int]]]
    blocks: list[int]


def _sampler(case: Case, rule: Rule, ends: list[int], kind: Any = BlockSampler, **options: Any) -> BlockSampler:
    """A sampler with the case's blocks; numbers that differ by case are data, so that many cases share a program."""
    args = case["args"]
    length = args.get("gen_length", args.get("max_new_tokens"))
    room = max(64, bucket_length(length + args["block_length"] - 1))
    if longer := max((len(row) for row in _prompts(case)), default=0) - min(len(row) for row in _prompts(case)):
        room = bucket_length(room + longer)
    stop = stop_on(ends, vocab_size=136) if ends else None
    options = {"cache": ExactCache(), "align_blocks": True, "block_length": args["block_length"], **options}
    return kind(rule, gen_length=room, stop=stop, **options)


def _prompts(case: Case) -> list[list[int]]:
    return case["prompts"] if "prompts" in case else [case["prompt"]]


def _traces(case: Case, assets: Assets, sampler: BlockSampler, lengths: list[int]) -> list[Trace]:
    """Samples the case's prompts; what every row's forwards did.

    Args:
        lengths: of each row's canvas.
    """
    rows, model = _prompts(case), assets.model(case["checkpoint"])
    states = stream(sampler, model.denoiser, *padded(rows, 64), gen_lengths=jnp.asarray(lengths))
    canvases = []
    for state in states:
        canvas = state.canvas
        tokens = np.where(canvas.undecided, case["args"]["mask_id"], canvas.generation(model.config.eos_id))
        canvases.append((tokens, np.asarray(canvas.nfe), np.asarray(state.block) * sampler.width))
    return [_trace(canvases, row, length, case["args"]["mask_id"]) for row, length in enumerate(lengths)]


def _trace(canvases: list[tuple], row: int, length: int, mask_id: int) -> Trace:
    steps, edits, blocks = [], [], []
    for (old, before, block), (new, after, _) in zip(canvases, canvases[1:], strict=False):
        if before[row] == after[row]:
            continue
        changed = [int(at) for at in np.flatnonzero(old[row] != new[row])]
        pairs = [(at, int(old[row, at]), int(new[row, at])) for at in changed]
        steps.append([[at, token] for at, was, token in pairs if was == mask_id])
        edits.append([[at, was, token] for at, was, token in pairs if was != mask_id])
        blocks.append(int(block[row]))
    return Trace(canvases[-1][0][row, :length].tolist(), steps, edits, blocks)


def _whole_blocks(case: Case, length: int) -> list[int]:
    """Canvases that end with a block, of rows that generate `length` positions after the longest prompt."""
    block, longest = case["args"]["block_length"], max(len(row) for row in _prompts(case))
    return [-(-(longest + length) // block) * block - len(row) for row in _prompts(case)]


def _check(trace: Trace, tokens: list[int], steps: list, edits: list | None = None) -> None:
    assert trace.tokens[: len(tokens)] == tokens
    assert trace.steps == steps
    if edits is not None:
        assert trace.edits == edits


def _run_llada20(case: Case, assets: Assets) -> None:
    args, expected = case["args"], case["expected"]
    rule = Dynamic(args["threshold"], jnp.asarray(min(args["steps"], args["gen_length"] // args["minimal_topk"])))
    options = {"eos_id": args["eos_id"], "early": args["eos_early_stop"]}
    sampler = _sampler(case, rule, [args["eos_id"]], official.BlockDiffusion, **options)
    (trace,) = _traces(case, assets, sampler, _whole_blocks(case, args["gen_length"]))
    _check(trace, expected["canvas"], expected["steps"])
    assert len(trace.steps) == expected["nfe"]
    _check_answer(case)


def _run_llada21(case: Case, assets: Assets) -> None:
    args, expected = case["args"], case["expected"]
    rule = Edit(args["threshold"], args["editing_threshold"], args["max_post_steps"], args["num_to_transfer"])
    sampler = _sampler(case, rule, [args["eos_id"]] if args["eos_early_stop"] else [])
    (trace,) = _traces(case, assets, sampler, _whole_blocks(case, args["gen_length"]))
    _check(trace, expected["canvas"], expected["steps"], expected["edits"])
    assert len(trace.steps) == expected["nfe"]
    _check_answer(case)


def _check_answer(case: Case) -> None:
    """The answer is the beginning of the canvas, up to and with the first end token."""
    tokens, canvas, eos_id = case["expected"]["tokens"], case["expected"]["canvas"], case["args"]["eos_id"]
    assert canvas[: len(tokens)] == tokens
    assert len(tokens) in (case["args"]["gen_length"], canvas.index(eos_id) + 1 if eos_id in canvas else -1)


def _run_sdar(case: Case, assets: Assets) -> None:
    """The official loop runs the prompt in a forward of its own, and every complete block once more to store it."""
    args, expected = case["args"], case["expected"]
    dynamic = args["strategy"] == "low_confidence_dynamic"
    order: Any = "position" if args["strategy"] == "sequential" else "confidence"
    rule = Dynamic(args["threshold"] if dynamic else None, jnp.asarray(args["denoising_steps"]), order)
    sampler = _sampler(case, rule, args["stop_ids"], official.BlockDiffusion)
    (trace,) = _traces(case, assets, sampler, _whole_blocks(case, args["gen_length"]))
    _check(trace, expected["tokens"], expected["steps"])
    stores = sum(stores for _, _, stores in expected["forwards"])
    prefill = len(case["prompt"]) >= args["block_length"]
    assert len(trace.steps) == expected["nfe"] - stores
    assert len(set(trace.blocks)) == stores - prefill


def _run_fast_dllm_v2(case: Case, assets: Assets) -> None:
    """The forward that the official loop stores a block by is our first one of the next block; its tokens are not
    listed."""
    args, expected, block = case["args"], case["expected"], case["args"]["block_length"]
    length, cached = len(case["prompt"]), args["use_block_cache"]
    sampler = _sampler(
        case,
        FastDllmV2(args["threshold"]),
        [args["stop_id"]],
        cache=SubBlockCache() if cached else ExactCache(),
        sub_block_length=args["small_block_size"],
    )
    end = (length // block + args["max_new_tokens"] // block) * block
    (trace,) = _traces(case, assets, sampler, [end - length])
    tokens = expected["tokens"]
    assert trace.tokens[: min(len(tokens), end - length)] == tokens[: end - length]
    is_first = lambda step: [(length + at) % block for at, _ in step] == [0]
    assert [step for step in trace.steps if not is_first(step)] == expected["steps"]
    stored = [last for _, last, stores in expected["forwards"] if stores]
    first = [last - length for last in stored if 0 <= last - length < min(len(tokens), end - length)]
    assert [step[0] for step in trace.steps if is_first(step)] == [[at, tokens[at]] for at in first]


def _run_dinfer(case: Case, assets: Assets) -> None:
    """The rows of a batch walk through blocks together; ours do if they are of equal length."""
    args, expected, rows = case["args"], case["expected"], _prompts(case)
    together = len({len(row) for row in rows}) == 1
    sampler = _sampler(
        case,
        Threshold(args["threshold"], tolerance=1e-5, skip_masks=True),
        [args["eos_id"]] if args["early_stop"] else [],
        official.DInferBlocks,
        most=jnp.asarray(args["maximum_unroll"]),
        per_iteration=jnp.asarray(args["expected_tpf"]),
        lockstep=together,
    )
    lengths = _whole_blocks(case, args["gen_length"])
    for number, trace in enumerate(_traces(case, assets, sampler, lengths)):
        tokens = [args["eos_id"] if token == args["mask_id"] else token for token in trace.tokens]
        assert rows[number] + tokens == expected["tokens"][number]
        steps = [[[at - len(rows[number]), token] for at, token in step[number]] for step in expected["steps"]]
        if together:
            assert trace.steps == steps[: len(trace.steps)]
            assert not any(steps[len(trace.steps) :])
        else:  # with others in the batch a row idles now and then
            assert list(filter(None, trace.steps)) == list(filter(None, steps))


def _run_sglang(case: Case, assets: Assets) -> None:
    """The rows of a batch wait for each other at the end of a block; a row that has ended goes on with the others."""
    args, expected, rows = case["args"], case["expected"], _prompts(case)
    rule: Rule = Dynamic(args["threshold"])
    if args["sampler"] == "sglang-joint-threshold":
        penalty = args["penalty_lambda"] or None
        rule = Edit(args["threshold"], args["edit_threshold"], args["max_post_edit_steps"], penalty=penalty)
    sampler = _sampler(case, rule, [args["eos_id"]], official.BlockDiffusion, eos_id=args["eos_id"])
    traces = _traces(case, assets, sampler, _whole_blocks(case, args["gen_length"]))
    steps, nfe = [[] for _ in rows], 0
    for block in sorted({block for trace in traces for block in trace.blocks}):
        own = [[_changes(trace, at, args) for at, its in enumerate(trace.blocks) if its == block] for trace in traces]
        most = max(map(len, own))
        nfe += most + 1
        for found, row in zip(steps, own, strict=True):
            found += row + [[]] * (most - len(row))
    for number, trace in enumerate(traces):
        written = trace.tokens.index(args["mask_id"]) if args["mask_id"] in trace.tokens else len(trace.tokens)
        assert trace.tokens[:written] == expected["tokens"][number][:written]
        recorded = [[change for change in step[number] if change[0] < written] for step in expected["steps"]]
        assert steps[number] == recorded
    assert nfe == expected["nfe"]


def _changes(trace: Trace, at: int, args: dict) -> list[list[int]]:
    return sorted([[place, args["mask_id"], token] for place, token in trace.steps[at]] + trace.edits[at])


# Parts ---------------------------------------------------------------------------------------------------------------


def _run_forward(case: Case, assets: Assets) -> None:
    """Logits of a model with the case's blocks; raw ones of a shifted family are our aligned ones a position before."""
    denoiser = assets.model(case["checkpoint"]).denoiser.in_blocks(case["args"]["block_length"])
    tokens = np.atleast_2d(case["input_ids"])
    logits, expected = np.asarray(_logits(denoiser, jnp.asarray(tokens))), case["expected"]
    wanted = np.asarray(expected["logits"]).reshape(logits.shape)
    if denoiser.config.shift:
        logits, wanted = logits[:, 1:], wanted[:, :-1]
    np.testing.assert_allclose(logits, wanted, atol=2e-4)


_logits = jax.jit(lambda denoiser, tokens: denoiser(tokens))


def _run_cached_forward(case: Case, assets: Assets) -> None:
    """Windows against keys and values of a prompt; their sums over all layers' prompts."""
    args, expected = case["args"], case["expected"]
    denoiser = assets.model(case["checkpoint"]).denoiser.in_blocks(args["block_length"])
    start, width, prompt = args["prefill"], args["block_length"], case["input_ids"]
    for window, wanted in zip(case["windows"], expected["window_logits"], strict=True):
        tokens = jnp.asarray([[*prompt, *window]])
        lengths = jnp.asarray([tokens.shape[1]])
        _, kv = full_forward(denoiser, tokens, lengths, jnp.asarray([0]), tokens.shape[1])
        for name, sums in (("key", "key_sums"), ("value", "value_sums")):
            found = [float(jnp.sum(getattr(layer, name)[:, :start])) for layer in kv]
            np.testing.assert_allclose(found, expected[sums], atol=1e-2)
        hidden, _ = _window(denoiser, tokens, lengths, kv, jnp.asarray([start]), width)
        np.testing.assert_allclose(denoiser.logits(hidden)[0], wanted, atol=2e-4)


def _window(denoiser: Denoiser, tokens: jax.Array, lengths: jax.Array, kv: Any, start: jax.Array, width: int) -> Any:
    return denoiser.forward(tokens, lengths, at=Span(start, width), kv=kv)


def _run_router(case: Case, assets: Assets) -> None:
    args = case["args"]
    experts = Experts(
        num_experts=args["num_experts"],
        per_token=args["num_experts_per_tok"],
        dim=2,
        expert_bias=True,
        score="sigmoid",
        normalize=True,
        scale=args["routed_scaling_factor"],
        groups=args["n_group"],
        top_groups=args["topk_group"],
    )
    config = dataclasses.replace(assets.model("llada2-tiny").config, embed_dim=len(case["weight"][0]), experts=experts)
    moe = MoE(config, experts)
    moe.router.set_value(jnp.asarray(case["weight"]).T)
    assert moe.bias is not None
    moe.bias.set_value(jnp.asarray(case["expert_bias"]))
    weights, ids = moe.route(moe.scores(jnp.asarray([case["hidden"]], jnp.float32)))
    order = np.argsort(np.asarray(ids[0]), axis=-1)
    expected = case["expected"]
    assert np.take_along_axis(np.asarray(ids[0]), order, axis=-1).tolist() == expected["experts"]
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(weights[0]), order, axis=-1), expected["weights"], atol=1e-5
    )


def _run_layout(case: Case, assets: Assets) -> None:
    """Our merged export of the checkpoint, read by the format's own library."""
    expected, model = case["expected"], assets.model(case["checkpoint"])
    out = assets.new_folder("merged")
    convert.export(model.folder, out, layout="merged")
    with safe_open(out / "model.safetensors", framework="np") as file:
        fused = file.get_tensor(f"model.layers.{case['layer']}.attention.query_key_value.weight")
        gate, *_ = (file.get_tensor(name) for name in expected["merged_names"])
    assert list(fused.shape) == expected["query_key_value"]
    for part in "qkv":
        rows = fused[slice(*expected[f"{part}_rows"])]
        np.testing.assert_allclose(rows.sum(dtype=np.float64), expected[f"{part}_sum"], atol=1e-3)
    assert list(gate.shape) == expected["merged_gate_shape"]
    np.testing.assert_allclose(gate.sum(dtype=np.float64), expected["merged_gate_sum"], atol=1e-3)
    np.testing.assert_allclose(gate[3, 0, :4], expected["expert_3_gate_row0_first4"], atol=1e-6)
    again = convert.convert("llada2", out, out.with_name(out.name + "-again"))
    assert again == model.config
