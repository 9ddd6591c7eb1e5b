"""Models that read causally and draft blocks (Nemotron-Labs-Diffusion): against loops written out without a cache, the
distributions they must have, and the engine's properties."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDENS, assert_same_row, refuses
from test_slots import BIAS, arrivals, assert_alone

import convert
import dllm_jax
from dllm_jax import Model, load, make_mesh
from dllm_jax.checkpoints import draft_adapter
from dllm_jax.indicator import IndicatorConfig, init_indicator
from dllm_jax.params.low_rank import LowRank
from dllm_jax.params.quantized import num_bytes
from dllm_jax.params.specs import init_params
from samplers import (
    NI,
    Autoregressive,
    BlockSampler,
    ContextBlocks,
    Engine,
    Sampling,
    SelfSpeculation,
    Threshold,
    TopK,
    Verifier,
    make_sampler,
    sample_jit,
    score,
    stop_on,
)
from samplers.config.costs import costs_of
from samplers.generate import generate
from samplers.testing import TINY as LLADA
from samplers.text.prompts import pad_prompts

TINY = GOLDENS / "checkpoints" / "nemotron-diffusion-tiny"
CASES = json.loads((GOLDENS / "nemotron-diffusion.json").read_text())["cases"]
PROMPTS = [case["prompt"] for case in CASES if case["name"] in ("ar-01", "ar-02", "diffusion-01", "linear-spec-02")]
GEN, ROOM = 24, 80


@pytest.fixture(scope="module")
def model(nemotron_tiny) -> Model:
    """The tiny checkpoint, with its draft adapter."""
    return nemotron_tiny


@pytest.fixture(scope="module")
def rough(model) -> Model:
    """Its config with random weights of large queries and keys, whose drafts are mostly wrong."""
    params = init_params(model.config, jax.random.key(1))
    larger = lambda name, x: 8.0 * x if "kernel" in name else x
    return dataclasses.replace(model, params={name: larger(name, x) for name, x in params.items()})


def run(model: Model, sampler, rows=PROMPTS, **options):
    return jax.device_get(sample_jit(sampler, model.denoiser, *pad_prompts(rows), **options))


def same_answers(one, other) -> None:
    """The tokens up to the ends, which are at the same places; tokens that were written after an end may differ."""
    assert one.lengths.tolist() == other.lengths.tolist()
    for row, length in enumerate(one.lengths):
        assert one.tokens[row, :length].tolist() == other.tokens[row, :length].tolist()


def logits_of(model: Model, tokens: list[int], causal: int) -> np.ndarray:
    """Of a sequence whose first `causal` positions are read, and whose others see everything; without a cache."""
    padding = [0] * (ROOM - len(tokens))
    visible = [at + 1 if at < causal else len(tokens) for at in range(len(tokens))] + padding
    found = _logits(model.denoiser, jnp.asarray([tokens + padding]), jnp.asarray([visible]))
    return np.asarray(found)[0, : len(tokens)].astype(np.float64)


@jax.jit
def _logits(denoiser: dllm_jax.Denoiser, tokens: jax.Array, visible: jax.Array) -> jax.Array:
    return denoiser.logits(denoiser.forward(tokens, visible)[0])


def plain_softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def without_mask(z: np.ndarray, mask_id: int) -> int:
    return int(np.argmax(np.where(np.arange(len(z)) == mask_id, -np.inf, z)))


def blocks_written_out(model: Model, prompt: list[int], length: int, block: int, threshold: float) -> tuple[list, int]:
    """`ContextBlocks(Threshold)` without an end, as a loop of Python that recomputes everything."""
    config, tokens, forwards = model.config, list(prompt), 0
    while len(tokens) < len(prompt) + length:
        start, end = len(tokens), min(len(tokens) + block, len(prompt) + length)
        tokens.append(without_mask(logits_of(model, tokens, start)[-1], config.mask_id))
        tokens += [config.mask_id] * (end - start - 1)
        forwards += 1
        masked = list(range(start + 1, end))
        while masked:
            z = logits_of(model, tokens, start)
            best = {at: without_mask(z[at], config.mask_id) for at in masked}
            sure = {at: plain_softmax(z[at])[best[at]] for at in masked}
            first = max(masked, key=lambda at: sure[at])
            for at in [at for at in masked if sure[at] >= threshold or at == first]:
                tokens[at] = best[at]
                masked.remove(at)
            forwards += 1
    return tokens[len(prompt) :], forwards


@pytest.mark.parametrize("which", ["model", "rough"])
def test_blocks_equal_a_loop_without_a_cache(which, request) -> None:
    found_model = request.getfixturevalue(which)
    found = run(found_model, ContextBlocks(GEN, 7, Threshold(0.7)), PROMPTS[:2])  # the last block is shorter
    for row, prompt in enumerate(PROMPTS[:2]):
        tokens, forwards = blocks_written_out(found_model, prompt, GEN, 7, 0.7)
        assert found.tokens[row].tolist() == tokens
        assert int(found.nfe[row]) == forwards


@pytest.mark.parametrize("which", ["model", "rough"])
def test_self_speculation_writes_what_the_causal_model_would(which, request) -> None:
    """Whatever is drafted, and however; a greedy loop without a cache, too."""
    found_model = request.getfixturevalue(which)
    stop = stop_on([found_model.config.eos_id], vocab_size=found_model.config.vocab_size)
    wanted = run(found_model, Autoregressive(GEN, stop=stop))
    tokens = list(PROMPTS[0])
    for _ in range(GEN):
        tokens.append(without_mask(logits_of(found_model, tokens, len(tokens))[-1], found_model.config.mask_id))
    length = int(wanted.lengths[0])
    assert wanted.tokens[0, :length].tolist() == tokens[len(PROMPTS[0]) :][:length]
    for sampler in (
        SelfSpeculation(GEN, 8, stop=stop),
        SelfSpeculation(GEN, 32, adapter=found_model.draft_adapter, stop=stop),
        SelfSpeculation(GEN, 5, Threshold(0.8), stop=stop),
        SelfSpeculation(GEN, 1, stop=stop),
    ):
        found = run(found_model, sampler)
        same_answers(found, wanted)
        cycles = found.verifier_forwards - 1
        drafts = 0 if sampler.block_length == 1 else 1
        assert sampler.rule is not None or (found.nfe == 1 + (1 + drafts) * cycles).all()
        assert (found.most_accepted <= max(sampler.block_length, 1)).all()
    assert which == "rough" or (found.nfe >= wanted.nfe).all()


def test_drafts_that_are_right_save_forwards(model) -> None:
    ends = [model.config.eos_id]
    alone = run(model, Autoregressive(GEN, stop=stop_on(ends, vocab_size=model.config.vocab_size)))
    found = run(model, make_sampler(model, f"self-speculation:gen_length={GEN}"))
    same_answers(found, alone)
    assert found.nfe.sum() < 0.6 * alone.nfe.sum()
    written = (found.decoded_at >= 0).sum(axis=1)
    np.testing.assert_allclose(found.mean_accepted, written / found.nfe)


RULES = ("threshold:threshold=0.8", "eb:gamma=0.1", "credit", "hierarchical", "topk:k=2", "dream:steps=12", "factor")


@pytest.mark.parametrize(
    "spec",
    [*(f"{rule}{',' if ':' in rule else ':'}block_length=8" for rule in RULES)]
    + ["self-speculation", "self-speculation:rule=eb,gamma=0.3,block_length=6", "autoregressive"]
    + ["self-speculation:accept=residual,temperature=0.8", "threshold:temperature=0.7,top_p=0.9,block_length=8"]
    + ["apd:verifier=self,lookahead=8,window=1", "leftright:lookahead=8,window=2"],
)
def test_batch_equals_single(model, spec: str) -> None:
    sampler = make_sampler(model, spec, gen_length=GEN)
    keys = jax.random.split(jax.random.key(3), len(PROMPTS))
    lengths = jnp.asarray([GEN, 7, GEN, 16])
    found = run(model, sampler, key=keys, gen_lengths=lengths)
    assert (found.nfe > 0).all() and (found.broken_at < 0).all()
    for row, prompt in enumerate(PROMPTS):
        padded = pad_prompts([prompt], pad_prompts(PROMPTS)[0].shape[1])
        own = {"key": keys[row : row + 1], "gen_lengths": lengths[row : row + 1]}
        alone = sample_jit(sampler, model.denoiser, *padded, **own)
        assert_same_row(found, row, jax.device_get(alone), 0)


def test_an_indicator_inside_blocks(model) -> None:
    """Whatever it judges is written besides the usual rule's; rows stay independent."""
    config = model.config
    shape = IndicatorConfig(1, 16, config.embed_dim, config.embed_dim, num_values=8, num_tokens=2)
    indicator = init_indicator(shape, jax.random.key(0))
    found = {}
    for threshold in (0.0, 1.0):
        rule = NI(indicator, indicator_threshold=threshold, base=Threshold(0.9))
        sampler = ContextBlocks(GEN, 8, rule)
        found[threshold] = run(model, sampler)
        alone = sample_jit(sampler, model.denoiser, *pad_prompts(PROMPTS[:1], pad_prompts(PROMPTS)[0].shape[1]))
        assert_same_row(found[threshold], 0, jax.device_get(alone), 0)
    plain = run(model, ContextBlocks(GEN, 8))
    assert found[1.0].tokens.tolist() == plain.tokens.tolist() and found[1.0].nfe.tolist() == plain.nfe.tolist()
    assert (found[0.0].nfe == 2 * GEN // 8).all()  # a read and one draft of each block


def test_a_verifier_that_is_the_model_itself(model) -> None:
    """APD at R = 0 keeps what the causal reading agrees with; in windows nothing changes, as what is read is final."""
    sampler = make_sampler(model, "apd:verifier=self,weight=0,lookahead=8", gen_length=GEN)
    assert isinstance(sampler.verifier, Verifier) and sampler.verifier.denoiser.config.is_causal
    whole = run(model, sampler)
    same_answers(run(model, dataclasses.replace(sampler, window=1)), whole)
    assert costs_of(model, sampler, 1, 32).weights == num_bytes(model.params)
    with refuses("cannot be read causally"):
        _ = dllm_jax.Denoiser(LLADA, {}).as_causal


@pytest.mark.parametrize("accept", ["match", "residual"])
def test_drawn_tokens_have_the_causal_distribution(rough, accept: str) -> None:
    """The first two tokens of many generations, against the product of the causal probabilities."""
    count, temperature, prompt = 1500, 1.3, PROMPTS[1][:6]
    sampling = Sampling(temperature=temperature, top_k=3)
    sampler = SelfSpeculation(4, 4, accept=accept, sampling=sampling)
    keys = jax.random.split(jax.random.key(0), count)
    found = run(rough, sampler, [prompt] * count, key=keys).tokens[:, :3]

    def best(tokens: list[int]) -> dict[int, float]:
        z = logits_of(rough, tokens, len(tokens))[-1] / temperature
        z[rough.config.mask_id] = -np.inf
        three = np.argsort(-z)[:3]
        return dict(zip(three.tolist(), plain_softmax(z[three]), strict=True))

    wanted = {
        (a, b, c): p * q * r
        for a, p in best(prompt).items()
        for b, q in best([*prompt, a]).items()
        for c, r in best([*prompt, a, b]).items()
    }
    counts = {key: 0 for key in wanted}
    for row in found.tolist():
        counts[tuple(row)] += 1  # no other can be drawn
    for key, share in wanted.items():
        error = np.sqrt(share * (1 - share) / count)
        assert abs(counts[key] / count - share) < 5 * error + 1e-3, (key, counts[key] / count, share)


def test_residuals_accept_more(model) -> None:
    """Of the same model and temperature, over many generations."""
    rows, keys = PROMPTS * 16, jax.random.split(jax.random.key(5), 16 * len(PROMPTS))
    each = {}
    for accept in ("match", "residual"):
        sampler = SelfSpeculation(GEN, 8, accept=accept, sampling=Sampling(temperature=1.0))
        each[accept] = run(model, sampler, rows, key=keys).nfe.mean()
    assert each["residual"] < each["match"]


def test_temperature_zero_draws_nothing_of_the_residual(model) -> None:
    greedy = run(model, SelfSpeculation(GEN, 8))
    cold = Sampling(temperature=jnp.zeros(len(PROMPTS)))
    found = run(model, SelfSpeculation(GEN, 8, accept="residual", sampling=cold), key=jax.random.key(0))
    assert found.tokens.tolist() == greedy.tokens.tolist() and found.nfe.tolist() == greedy.nfe.tolist()


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        ("threshold:block_length=8", [{"threshold": 0.5}, {"threshold": 0.99}, {"temperature": 0.7} | BIAS]),
        ("self-speculation:block_length=8", [BIAS, {"temperature": 0.9}]),
        ("self-speculation:accept=residual,temperature=0.5", [{}, {"temperature": 1.0}]),
        ("autoregressive", [{}]),
    ],
)
def test_as_alone_in_any_order_of_arrival(model, spec: str, numbers: list[dict]) -> None:
    draws = any("temperature" in options for options in numbers) and "temperature" not in spec
    engine = Engine(model, spec, slots=3, prompt_length=96, gen_length=GEN, draws=draws)
    found = arrivals(engine, numbers, np.random.default_rng(0), 7)
    for request in found:
        if request.result is not None:
            assert_alone(engine, request)


@pytest.mark.parametrize("spec", ["threshold:block_length=8", "self-speculation:block_length=8", "autoregressive"])
def test_given_tokens_stay(model, spec: str) -> None:
    sampler = make_sampler(model, spec, gen_length=GEN, ignore_eos=True)
    given = np.full((len(PROMPTS), GEN), model.config.mask_id)
    given[:, [0, 5, 6, 7, 20]] = 65
    given[1, :16] = 66
    found = run(model, sampler, given=jnp.asarray(given))
    kept = given != model.config.mask_id
    assert (found.tokens[kept] == given[kept]).all() and (found.decoded_at[kept] == -1).all()
    assert (found.decoded_at[~kept] >= 0).all() and (found.edits == 0).all()
    alone = sample_jit(sampler, model.denoiser, *pad_prompts(PROMPTS[:1], 64), given=jnp.asarray(given[:1]))
    assert_same_row(found, 0, jax.device_get(alone), 0)


def test_on_a_mesh(model, tmp_path) -> None:
    source = tmp_path / "tiny"
    convert.convert("nemotron", TINY, source)
    mesh = make_mesh(data=2, tensor=2)
    split = load(source, mesh=mesh)
    assert split.draft_adapter is not None
    for spec in ("threshold:block_length=8", "self-speculation:block_length=8"):
        sampler = make_sampler(split, spec, gen_length=GEN)
        one = run(model, make_sampler(model, spec, gen_length=GEN))
        found = run(split, sampler)
        assert found.tokens.tolist() == one.tokens.tolist() and found.nfe.tolist() == one.nfe.tolist()


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantized_models_draft_and_read(model, tmp_path, bits) -> None:
    convert.convert("nemotron", TINY, tmp_path / bits, quantize=bits)
    found_model = load(tmp_path / bits)
    assert found_model.draft_adapter is not None
    found = run(found_model, make_sampler(found_model, "self-speculation", gen_length=GEN))
    same_answers(found, run(found_model, make_sampler(found_model, "autoregressive", gen_length=GEN)))


def test_the_draft_adapter_is_converted_checked_and_exported(model, tmp_path) -> None:
    convert.convert("nemotron", TINY, tmp_path / "ours")
    convert.export(tmp_path / "ours", tmp_path / "hub")
    name = "linear_spec_lora/adapter_model.safetensors"
    assert (tmp_path / "hub" / name).read_bytes() == (TINY / name).read_bytes()
    assert json.loads((tmp_path / "hub/config.json").read_text()) == json.loads((TINY / "config.json").read_text())
    convert.convert("nemotron", tmp_path / "hub", tmp_path / "again")
    one, other = (draft_adapter.read_adapter(tmp_path / name, model.config) for name in ("ours", "again"))
    assert one is not None and other is not None and one[1] == other[1] == 4.0
    jax.tree.map(np.testing.assert_array_equal, one[0], other[0])
    damaged = tmp_path / "ours" / draft_adapter.FILE
    damaged.write_bytes(damaged.read_bytes()[:40])
    with refuses(draft_adapter.FILE, "convert the checkpoint again"):
        load(tmp_path / "ours")
    shutil.copytree(TINY, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "linear_spec_lora")
    convert.convert("nemotron", tmp_path / "bare", tmp_path / "without")
    found = load(tmp_path / "without")
    assert found.draft_adapter is None
    with refuses("without an adapter"):
        make_sampler(found, "self-speculation:adapter=true")


def test_adapters_act_on_their_rows_alone(model) -> None:
    assert isinstance(model.draft_adapter, LowRank)
    tokens, lengths = jnp.asarray(pad_prompts(PROMPTS[:2])[0]), jnp.asarray(pad_prompts(PROMPTS[:2])[1])
    on = model.denoiser.with_adapter(model.draft_adapter)(tokens, lengths)
    mixed = model.denoiser.with_adapter(model.draft_adapter, jnp.asarray([True, False]))(tokens, lengths)
    off = model.denoiser(tokens, lengths)
    np.testing.assert_allclose(mixed[0], on[0], atol=1e-5)
    np.testing.assert_allclose(mixed[1], off[1], atol=1e-5)
    assert np.abs(on[0] - off[0]).max() > 0.1


def test_a_thought_ends_within_its_budget(model) -> None:
    """Where the model has not ended it; and what follows depends on it."""
    plain = run(model, Autoregressive(GEN)).tokens
    for sampler in (Autoregressive(GEN), SelfSpeculation(GEN, 4), ContextBlocks(GEN, 4)):
        found = run(model, dataclasses.replace(sampler, thinking_budget=6, end_think=33)).tokens
        first = [row.tolist().index(33) for row in found]  # of a read that accepts a draft the last token
        assert min(first) >= 6 and max(first) <= (9 if isinstance(sampler, SelfSpeculation) else 6)
        early = run(model, dataclasses.replace(sampler, thinking_budget=GEN - 1, end_think=int(plain[0, 2]))).tokens
        assert early[0].tolist() == run(model, sampler).tokens[0].tolist()  # it ended by itself
    one = run(model, Autoregressive(GEN, thinking_budget=jnp.asarray([6, 9, 12, 15]), end_think=33)).tokens
    assert [row.tolist().index(33) for row in one] == [6, 9, 12, 15]


def test_likelihoods_are_causal(model) -> None:
    pair = (PROMPTS[0], [49, 56, 43])
    (found,) = score(model, [pair], seeds=[0], estimator="left-to-right", greedy=True)
    z = logits_of(model, [*pair[0], *pair[1]], len(pair[0]) + 3)
    wanted = sum(np.log(plain_softmax(z[len(pair[0]) - 1 + at])[token]) for at, token in enumerate(pair[1]))
    np.testing.assert_allclose(found.log_likelihood, wanted, atol=1e-4)
    assert found.is_greedy
    with refuses("left-to-right"):
        score(model, [pair], seeds=[0])


def test_generate_takes_the_checkpoints_settings(model) -> None:
    one, other = generate(model, [PROMPTS[0], PROMPTS[1]], gen_length=GEN)
    assert one.nfe < GEN and other.tokens
    sampler = make_sampler(model, gen_length=GEN)
    assert isinstance(sampler, ContextBlocks) and sampler.block_length == 32
    assert isinstance(make_sampler(model, "eb"), ContextBlocks)


def test_refusals(model, llada_tiny, qwen2_tiny) -> None:
    for option, value in (("cache", "dual"), ("guidance", 1.0), ("smoothing", True), ("sub_block_length", 4)):
        with refuses(option, "nemotron"):
            make_sampler(model, "threshold", **{option: value})
    with refuses("revises"):
        make_sampler(model, "edit")
    with refuses("ContextBlocks"):
        run(model, BlockSampler(TopK(1), gen_length=8))
    with refuses("several blocks"):
        run(model, make_sampler(model, "d2f:block_length=4", gen_length=8))
    with refuses("read causally"):
        run(llada_tiny, SelfSpeculation(8, 4))
    with refuses("cannot draft", "block_length=1"):
        run(qwen2_tiny, SelfSpeculation(8, 4))
    with refuses("takes no rule"):
        make_sampler(model, "self-speculation:accept=residual,rule=eb")
    with refuses("end_think"):
        Autoregressive(8, thinking_budget=3)
    with refuses("</think>"):
        make_sampler(model, "autoregressive:thinking_budget=3")
    with refuses("temperature"):
        run(model, SelfSpeculation(8, 4, sampling=Sampling(temperature=1.0)))


def test_causal_models_generate_token_by_token(qwen2_tiny) -> None:
    """As APD's loop does with a window of one position."""
    config = qwen2_tiny.config.replace(mask_id=qwen2_tiny.config.vocab_size - 1)
    found_model = dataclasses.replace(qwen2_tiny, config=config)
    found = run(found_model, make_sampler(found_model, "autoregressive", gen_length=GEN))
    other = run(found_model, make_sampler(found_model, "leftright:window=1,lookahead=1", gen_length=GEN))
    same_answers(found, other)
    assert found.nfe.tolist() == other.nfe.tolist()
