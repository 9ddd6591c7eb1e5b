"""The pipeline sampler against a plain loop that recomputes everything, and its properties."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_same_row, refuses
from jax.sharding import PartitionSpec
from test_combinations import AnyOf
from train_toys import DREAM, LLADA

from dllm_jax import Denoiser, make_mesh
from dllm_jax.indicator import IndicatorConfig, init_indicator
from dllm_jax.models.denoiser import Span, block_causal
from dllm_jax.params.specs import init_params
from dllm_jax.pytree import pytree
from samplers import EB, NI, PipelineSampler, Sampling, sample, sample_jit, stop_on, stream
from samplers.rules.ni import features_of

LENGTH, GEN, WIDTH = 4, 12, 6
PROMPTS = np.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0], [3, 1, 4, 1, 5, 0]])
PROMPT_LENGTHS, GEN_LENGTHS = np.array([6, 3, 5]), np.array([12, 10, 3])
TAUS = {
    "tau_add": np.array([0.1, 0.5, 1.0], np.float32),
    "tau_act": np.array([0.95, 0.5, 0.95], np.float32),
    "threshold": np.array([0.3, 0.4, 0.5], np.float32),
}
INDICATOR = init_indicator(IndicatorConfig(1, 8, LLADA.embed_dim, LLADA.embed_dim, 4, 2), jax.random.key(5))


def denoiser_of(config):
    params = init_params(config, jax.random.key(1), dtype="float32")
    return Denoiser(config, {name: x * 25 if x.ndim > 1 else x for name, x in params.items()})  # far from uniform


# The plain loop ------------------------------------------------------------------------------------------------------


@jax.jit
def looked_at(denoiser, tokens, prompt_length, length):
    """Of one row, every position computed anew under the block-causal mask: probabilities [T, V], the best tokens and
    an indicator's scores [T]."""
    first = denoiser.min_prompt_length
    visible = jnp.minimum(block_causal(len(tokens), prompt_length[None], LENGTH), length)
    outputs = Span(jnp.asarray([first]), len(tokens) - first)
    hidden, _ = denoiser.forward(tokens[None], visible, outputs=outputs)
    logits = denoiser.logits(hidden)
    best = jnp.argmax(logits.at[..., denoiser.mask_id].set(-jnp.inf), axis=-1)
    scores = INDICATOR.scores(*features_of(INDICATOR.config, denoiser, hidden, logits, best))
    return [jnp.pad(x[0], [(first, 0)] + [(0, 0)] * (x.ndim - 2)) for x in (jax.nn.softmax(logits), best, scores)]


def d2f(threshold):
    """D2F's own choice among the masked positions of a block: place -> (probabilities, confidence)."""
    return lambda block, *_: [i for i, (_, confidence) in block.items() if confidence > threshold]


def ni(steps, threshold):
    """What NI commits without its indicator, in a block's forward `step`, when it had `masks` at first."""

    def decide(block, step, masks, num_blocks):
        per_block = max(steps // num_blocks, 1)
        quota = max(masks // per_block + (step < masks % per_block), 1)
        most_confident = sorted(block, key=lambda i: -block[i][1])[:quota]
        return [i for i in block if i in most_confident or block[i][1] >= threshold]

    return decide


def eb(gamma):
    """EB-Sampler with the confidence as its proxy."""

    def decide(block, *_):
        order = sorted(block, key=lambda i: -block[i][0].max())
        entropies = [-np.sum(p * np.log(np.maximum(p, 1e-30))) for p in (block[i][0] for i in order)]
        bound = lambda k: sum(entropies[:k]) - max(entropies[:k])
        return order[: max((k for k in range(1, len(order) + 1) if bound(k) <= gamma), default=0)]

    return decide


def reference(denoiser, prompt, canvas, tau_add, tau_act, threshold, decide, sure_above=1.0, ahead=True):
    """D2F's loop without a cache: all blocks are there from the start, those that are not appended are ignored.

    Args:
        canvas: what the generation comes with, masks where tokens are to be generated.
        decide: the rule.
        sure_above: the indicator's threshold.
        ahead: whether it is asked for blocks that are not fully active.
    """
    start, end, blocks = len(prompt), len(prompt) + len(canvas), -(-len(canvas) // LENGTH)
    tokens = np.full(WIDTH + GEN, denoiser.eos_id)
    tokens[:end] = [*prompt, *canvas]
    canvas, decoded_at, appended_at, ended, nfe = tokens[start:end], np.full(GEN, -1), [], False, 0
    span = lambda b: range(b * LENGTH, min((b + 1) * LENGTH, len(canvas)))
    masks = lambda b: [i for i in span(b) if canvas[i] == denoiser.mask_id]
    ratio = lambda b: 1.0 if b < 0 else float(np.float32(1 - len(masks(b)) / len(span(b))))
    at_first = [len(masks(b)) for b in range(blocks)]
    while any(map(masks, range(blocks))) and not (ended and not any(map(masks, range(len(appended_at))))):
        if len(appended_at) < blocks and not ended and ratio(len(appended_at) - 1) >= tau_add:
            appended_at.append(nfe)
        full = [ratio(b - 1) >= tau_act for b in range(len(appended_at))]
        found = looked_at(denoiser, jnp.asarray(tokens), jnp.asarray(start), jnp.asarray(end))
        probability, best, score = (np.asarray(x)[start:end] for x in found)
        sure = (score > sure_above) & (probability.argmax(-1) != denoiser.mask_id)
        for b, places in enumerate([masks(b) for b in range(len(appended_at))]):
            block = {i: (probability[i], probability[i, best[i]]) for i in places}
            chosen = decide(block, nfe - appended_at[b], at_first[b], blocks) if block else []
            known = [i for i in block if sure[i] and (full[b] or ahead)]
            if not full[b]:
                chosen = [i for i in chosen if block[i][1] > threshold]
            elif block and not chosen:
                chosen = [max(block, key=lambda i: block[i][1])]
            for i in {*chosen, *known}:
                canvas[i], decoded_at[i] = best[i], nfe
                ended |= best[i] == denoiser.eos_id
        nfe += 1
    return np.where(canvas == denoiser.mask_id, denoiser.eos_id, canvas), decoded_at, nfe


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_ragged_batch_with_a_cache_is_each_row_without(config):
    denoiser = denoiser_of(config)
    sampler = PipelineSampler(GEN, LENGTH, **{name: jnp.asarray(value) for name, value in TAUS.items()})
    result = sample_jit(sampler, denoiser, PROMPTS, PROMPT_LENGTHS, gen_lengths=GEN_LENGTHS)
    for row, (prompt, length, gen) in enumerate(zip(PROMPTS, PROMPT_LENGTHS, GEN_LENGTHS, strict=True)):
        taus = {name: value[row] for name, value in TAUS.items()}
        canvas = [denoiser.mask_id] * gen
        found = reference(denoiser, prompt[:length], canvas, **taus, decide=d2f(taus["threshold"]))
        assert_row(result, row, *found)
    assert min(result.nfe) > 1
    assert result.full_forwards.tolist() == [1, 1, 1]


def assert_row(result, row, tokens, decoded_at, nfe):
    assert result.tokens[row, : len(tokens)].tolist() == tokens.tolist()
    assert result.decoded_at[row].tolist() == decoded_at.tolist()
    assert int(result.nfe[row]) == nfe


# Rules, noise, given tokens and stopping: one program for them all ---------------------------------------------------


@pytree()
class NIOrEB(AnyOf):
    """Both in one program, told apart by a number that is data."""

    reads_hidden = True

    def judge(self, *arguments) -> jax.Array:
        return self.rules[0].judge(*arguments)

    def looks_ahead(self, cached: bool) -> bool:
        return self.rules[0].looks_ahead(cached)


ROWS = 8
STEPS, SPREAD = 9, np.linspace(0, 1, ROWS).astype(np.float32)
MORE = {
    "prompt": np.random.default_rng(0).integers(0, 10, (ROWS, WIDTH)),
    "prompt_lengths": np.array([6, 3, 5, 1, 6, 2, 4, 5]),
    "gen_lengths": np.array([12, 10, 3, 12, 7, 12, 9, 12]),
}
# tau_add lies below tau_act in the first rows, above it in the last
NUMBERS = {"tau_add": 0.1 + 0.8 * SPREAD, "tau_act": 0.95 - 0.5 * SPREAD, "threshold": 0.35 + 0.2 * SPREAD}
RULES = {"ni": (0, 0.15 + 0.2 * SPREAD), "eb": (1, np.ones_like(SPREAD))}  # number, the indicator's threshold
EB_GAMMA = 0.4 + 2 * SPREAD


def sampler_of(
    rule="ni", scope="auto", temperature=0.0, stop=(LLADA.mask_id,) * 2, end=LLADA.eos_id, rows=None, sure_above=None
):
    """For some of the rows, all by default. Everything but the scope is data: one program for one model."""
    rows = jnp.arange(ROWS) if rows is None else rows
    number, usual = RULES[rule]
    own = lambda values: jnp.asarray(values, jnp.float32)[rows]
    rules = (
        NI(INDICATOR, 0.5, own(usual if sure_above is None else sure_above), jnp.int32(STEPS), scope),
        EB(own(EB_GAMMA), "confidence"),
    )
    return PipelineSampler(
        GEN,
        LENGTH,
        **{name: own(value) for name, value in NUMBERS.items()},
        rule=NIOrEB(rules, jnp.int32(number)),
        end_ids=jnp.asarray([end]),
        sampling=Sampling(temperature=own(np.broadcast_to(temperature, ROWS))),
        stop=stop_on(sequences=[stop], vocab_size=LLADA.vocab_size),
    )


def keys_of(seed=7):
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(jnp.arange(ROWS))


NOTHING = np.full((ROWS, GEN), LLADA.mask_id)


def run(denoiser, sampler, **changes) -> Any:
    return jax.device_get(sample_jit(sampler, denoiser, **{"key": keys_of(), "given": NOTHING, **MORE, **changes}))


GIVEN = np.where(np.random.default_rng(1).random((ROWS, GEN)) < 0.4, np.arange(ROWS * GEN).reshape(ROWS, GEN) % 10, 21)
GIVEN[0, :LENGTH], GIVEN[1, LENGTH : 2 * LENGTH], GIVEN[2] = 4, LLADA.eos_id, LLADA.mask_id  # whole blocks, or nothing


@pytest.mark.parametrize(("config", "scope"), [(LLADA, "auto"), (DREAM, "block")], ids=["llada", "dream"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_in_a_ragged_batch_are_the_plain_loop(config, scope, rule):
    """With tokens that are given, which stay, and without; every row with numbers of its own."""
    denoiser, (_, sure_above) = denoiser_of(config), RULES[rule]
    for given in (NOTHING, GIVEN):
        result = run(denoiser, sampler_of(rule, scope), given=given)
        for row in range(ROWS):
            prompt = MORE["prompt"][row, : MORE["prompt_lengths"][row]]
            canvas = given[row, : MORE["gen_lengths"][row]]
            numbers = {name: value[row] for name, value in NUMBERS.items()}
            numbers |= {"sure_above": sure_above[row], "ahead": scope == "auto"}
            decide = ni(STEPS, 0.5) if rule == "ni" else eb(EB_GAMMA[row])
            assert_row(result, row, *reference(denoiser, prompt, canvas, decide=decide, **numbers))
            kept = canvas != denoiser.mask_id
            assert (result.tokens[row, : len(canvas)] == canvas)[kept].all()
            assert (result.decoded_at[row, : len(canvas)][kept] == -1).all()


def test_the_indicator_saves_forwards():
    """It is asked: with the same quota and threshold, never sure needs more forwards than sometimes sure."""
    denoiser = denoiser_of(LLADA)
    sometimes, never = (run(denoiser, sampler_of(sure_above=above)) for above in (None, np.ones(ROWS)))
    assert (sometimes.nfe <= never.nfe).all() and (sometimes.nfe < never.nfe).any()


def test_rows_are_independent_at_a_temperature():
    """Drawn tokens are the row's own: whatever its slot, its neighbours and what lies behind its prompt."""
    denoiser = denoiser_of(LLADA)
    together = run(denoiser, sampler_of(temperature=0.8), given=GIVEN)
    behind = np.arange(WIDTH) >= MORE["prompt_lengths"][:, None]
    for order in ([5, 3, 0, 7, 6, 1, 4, 2], [3, 3, 3, 6, 6, 0, 0, 0]):
        rows = np.array(order)
        moved = {name: value[rows] for name, value in MORE.items()}
        moved["prompt"] = np.where(behind[rows], 11, moved["prompt"])
        sampler = sampler_of(temperature=0.8, rows=rows)
        other = run(denoiser, sampler, **moved, given=GIVEN[rows], key=keys_of()[rows])
        for slot, row in enumerate(order):
            assert_same_row(together, row, other, slot)
    others = [run(denoiser, sampler_of(temperature=0.8), given=GIVEN, key=keys_of(seed)) for seed in (8, 9, 10)]
    differ = [(other.tokens != together.tokens).any(axis=1) for other in others]
    assert np.any(differ, axis=0).sum() >= ROWS - 2


def test_a_stop_sequence_ends_a_row_early():
    """What was written until then is what is written without it."""
    denoiser, endless = denoiser_of(LLADA), {"end": LLADA.vocab_size}
    whole = run(denoiser, sampler_of(**endless))
    stop = whole.tokens[3, 2:4]
    stopped = run(denoiser, sampler_of(stop=tuple(map(int, stop)), **endless))
    written = stopped.decoded_at >= 0
    for field in ("tokens", "decoded_at"):
        np.testing.assert_array_equal(getattr(stopped, field)[written], getattr(whole, field)[written])
    assert stopped.nfe[3] < whole.nfe[3] and (stopped.nfe <= whole.nfe).all()
    for row, length in enumerate(MORE["gen_lengths"]):
        found = [i for i in range(length - 1) if (whole.tokens[row, i : i + 2] == stop).all()]
        if found:
            assert written[row, : found[0] + 2].all() and stopped.lengths[row] <= found[0]
        else:
            assert written[row, :length].all() and stopped.nfe[row] == whole.nfe[row]


def test_in_vmap_within_shard_map_it_is_the_same():
    """Eight devices with a row each, whose batch of one is mapped once more; half of them drawn."""
    denoiser = denoiser_of(LLADA)
    temperature = np.where(np.arange(ROWS) % 2, 0.8, 0.0)
    expected = run(denoiser, sampler_of(temperature=temperature), given=GIVEN)

    def alone(denoiser, row, inputs):
        return sample(sampler_of(temperature=temperature, rows=row[None]), denoiser, **inputs)

    inputs = {name: value[:, None] for name, value in {**MORE, "given": GIVEN, "key": keys_of()}.items()}
    mapped = jax.shard_map(
        jax.vmap(alone, in_axes=(None, 0, 0)),
        mesh=make_mesh(data=8),
        in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
    )
    found = jax.device_get(jax.jit(mapped)(jax.device_get(denoiser), np.arange(ROWS), inputs))
    for row in range(ROWS):
        assert_same_row(expected, row, jax.tree.map(lambda x: x[:, 0], found), row)


@pytest.mark.parametrize("options", [{"rule": EB(0.5)}, {"in_flight": 1}], ids=["eb", "one-in-flight"])
def test_progress_and_frozen_blocks(options):
    """Every forward commits or caches, nothing is committed twice, the bound holds, keys of cached blocks stay."""
    denoiser = denoiser_of(LLADA)
    sampler = PipelineSampler(GEN, LENGTH, end_ids=jnp.asarray([denoiser.vocab_size]), **options)
    # a step takes the state before it
    states = [jax.tree.map(np.array, state) for state in stream(sampler, denoiser, PROMPTS, PROMPT_LENGTHS)]
    for before, after in zip(states, states[1:], strict=False):
        old, new = before.canvas, after.canvas
        wrote = (new.decoded_at >= 0).sum(1) > (old.decoded_at >= 0).sum(1)
        assert (wrote | (after.cached > before.cached) | old.done).all()
        assert np.where(old.decoded_at >= 0, new.decoded_at == old.decoded_at, True).all()
        flight = (after.appended_at >= 0).sum(1) - before.cached
        assert int(flight.max()) <= sampler.most_in_flight
        for row in range(3):
            final = int(before.cached[row]) * LENGTH + int(PROMPT_LENGTHS[row]) if int(old.nfe[row]) else 0
            earlier, later = (state.kv[1].key[row, :final] for state in (before, after))
            assert (earlier == later).all()
    result = sampler.result(denoiser, states[-1])
    assert (np.asarray(result.decoded_at) >= 0).all()
    assert not (np.asarray(result.tokens) == denoiser.mask_id).any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gen_length 12", {"block_length": 16}),
        ("tau_add", {"tau_add": 1.5}),
        ("in_flight", {"in_flight": 0}),
        ("'luck'", {"forced": "luck"}),
        ("rule", {"rule": "threshold"}),
    ],
)
def test_refusals(name, options):
    with refuses(name):
        PipelineSampler(**{"gen_length": GEN, "block_length": LENGTH, **options}).init(denoiser_of(LLADA), PROMPTS)


def test_a_causal_model_is_refused():
    config = LLADA.replace(attention="causal")
    with refuses("diffusion model"):
        PipelineSampler(GEN, LENGTH).init(denoiser_of(config), PROMPTS)
