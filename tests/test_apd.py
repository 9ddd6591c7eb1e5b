"""Adaptive parallel decoding: an independent reference, the distributions it must have, and the engine's properties.

Models are two layers with random weights, made so that their distributions are far from uniform and differ.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
import tokenizers
import transformers
from conftest import assert_same_row, refuses
from test_evals_runner import oracle

import dllm_jax
from dllm_jax import Denoiser, FunctionDenoiser, make_mesh
from dllm_jax.families import published_config
from dllm_jax.models.kv_cache import slice_rows
from dllm_jax.pytree import pytree
from evals.sampler import parse_samplers
from evals.tasks import make_task
from samplers import (
    APD,
    Engine,
    KeyNoise,
    LeftRight,
    Sampling,
    Verifier,
    sample,
    sample_jit,
    stop_on,
    stream,
    verifier_for,
)
from samplers.generate import generate
from samplers.text.prompts import pad_prompts
from samplers.tokens.noise import Purpose, gumbel

V, EOS, MASK, GEN = 14, 12, 13, 16
SMALL = {
    "vocab_size": V,
    "embed_dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 16,
    "eos_id": EOS,
    "pad_id": EOS,
    "end_ids": (EOS,),
    "bos_id": None,
}
PROMPTS = [[1, 2, 3, 4, 5], [7], [3, EOS, 8, 1, 2, 9, 4, 4, 2], [5, 1, 11]]


def random_denoiser(name: str, seed: int, **changes) -> Denoiser:
    config = published_config(name).replace(**SMALL, **changes)
    model = dllm_jax.random_model(config, key=seed, dtype="float32")
    params = {
        k: v if "norm" in k else v * (60 if "embed" in k or "lm_head" in k else 30) for k, v in model.params.items()
    }
    return Denoiser(model.config, params)


DREAM = random_denoiser("dream-7b-base", 0, mask_id=MASK)
LLADA = random_denoiser("llada-8b-base", 1, mask_id=MASK)
VERIFIER = Verifier(random_denoiser("qwen2.5-0.5b", 2))
MODELS = {"dream": DREAM, "llada": LLADA}


def keys(number: int) -> jax.Array:
    return jax.random.split(jax.random.key(5), number)


def run(sampler, model: str = "dream", rows=(0, 1, 2, 3), width: int = 12, **options):
    prompt, lengths = pad_prompts([PROMPTS[row] for row in rows], width)
    key = keys(4)[jnp.asarray(rows)]
    return jax.device_get(sample_jit(sampler, MODELS[model], prompt, lengths, key=key, **options))


def accepted(result, row: int) -> list[int]:
    return np.bincount(result.decoded_at[row][result.decoded_at[row] >= 0]).tolist()


# A reference: Algorithm 1 of the paper in NumPy, with a full forward of both models for every step --------------------


@jax.jit
def _logits(denoiser: Denoiser, tokens: jax.Array, length: jax.Array) -> jax.Array:
    return denoiser(tokens[None], length[None])[0]


def reference(
    denoiser: Denoiser, prompt: list[int], key: jax.Array, weight, temperature, lookahead, target, top_k=V, given=None
):
    """The tokens, and how many of them each step accepted; of given ones none."""
    given = np.full(GEN, MASK) if given is None else np.asarray(given)
    x, out, counts = np.asarray([*prompt, *given]), [], []
    noise = KeyNoise(key[None])
    while (given[len(out) :] == MASK).any():
        cur = len(prompt) + len(out)
        right = min(cur + lookahead, len(prompt) + GEN)
        uniform = noise.uniform(Purpose.TOKENS, jnp.asarray([len(counts)]), jnp.arange(GEN)[None], jnp.arange(V))
        g = np.asarray(gumbel(uniform))[0, : right - cur] if temperature else 0.0
        other = noise.uniform(Purpose.TARGET, jnp.asarray([len(counts)]), jnp.arange(GEN)[None], jnp.arange(V))
        z = np.asarray(_logits(denoiser, jnp.asarray(x), jnp.asarray(right)))[cur:right]
        scale = temperature or 1.0
        cut = z < np.sort(z, axis=-1)[:, -top_k, None]
        cut[:, MASK] = True
        draft = np.where(cut, -np.inf, z / scale + g * (temperature if target == "greedy" else 1.0)).argmax(-1)
        known = given[len(out) : len(out) + len(draft)]
        draft = np.where(known == MASK, draft, known)
        trial = x.copy()
        trial[cur:right] = draft
        v = np.asarray(_logits(VERIFIER.denoiser, jnp.asarray(trial), jnp.asarray(right)))[cur:right]
        mixed = weight * z + (1 - weight) * v
        if target in ("shared", "independent") and temperature:
            own = np.asarray(gumbel(other))[0, : right - cur] if target == "independent" else g
            mixed = np.where(cut, -np.inf, mixed / temperature + own)
        mixed[:, MASK] = -np.inf
        agrees = draft == mixed.argmax(-1)
        agrees |= (known != MASK) | (np.cumsum(known == MASK) == 1)
        n = len(agrees) if agrees.all() else int(agrees.argmin())
        x[cur : cur + n] = draft[:n]
        out, counts = [*out, *draft[:n].tolist()], [*counts, int((known[:n] == MASK).sum())]
    return [*out, *given[len(out) :].tolist()], counts


@pytest.mark.parametrize(
    ("model", "target"),
    [("dream", "shared"), ("llada", "none"), ("llada", "shared"), ("dream", "independent"), ("dream", "greedy")],
)
def test_equals_a_reference_without_caches(model: str, target: str) -> None:
    """Weights and temperatures differ by row; one program for all."""
    weight, temperature = [0.8, 0.5, 0.3, 0.6], [1.0, 0.7, 0.0, 0.4]
    lookahead, top_k = [16, 6, 16, 9], [V, 5, 3, V]
    sampler = (official.APD if target == "greedy" else APD)(
        VERIFIER,
        GEN,
        noise="none" if target == "greedy" else target,
        weight=jnp.asarray(weight),
        lookahead=jnp.asarray(lookahead),
        most_lookahead=GEN,
        sampling=Sampling(temperature=jnp.asarray(temperature), top_k=jnp.asarray(top_k)),
    )
    result, total = run(sampler, model), []
    for row in range(4):
        settings = weight[row], temperature[row], lookahead[row], target
        tokens, counts = reference(MODELS[model], PROMPTS[row], keys(4)[row], *settings, top_k=top_k[row])
        assert result.tokens[row].tolist() == tokens
        assert accepted(result, row) == counts
        assert result.nfe[row] == result.verifier_forwards[row] == len(counts)
        assert result.most_accepted[row] == max(counts)
        np.testing.assert_allclose(result.mean_accepted[row], np.mean(counts), rtol=1e-6)
        total += counts
    assert max(total) > 1 and min(total) == 1


@pytest.mark.parametrize("kind", ["apd", "one", "three", "window"])
def test_given_tokens_are_written_in_their_turn(kind: str) -> None:
    """They cost no forward, whether they stand alone, in a run that is longer than the lookahead, or at the end."""
    given = np.full((4, GEN), MASK)
    given[0, ::2], given[1, [0, 1, 9]], given[2, 3:12], given[3, -4:] = 3, 7, 5, 2
    options = {"lookahead": 6} | ({"window": GEN + 12} if kind == "window" else {})
    count = 3 if kind == "three" else 1
    weight = 0.6 if kind in ("apd", "window") else 1.0
    sampler = APD(VERIFIER, GEN, weight=weight, **options) if weight < 1 else LeftRight(GEN, count, **options)
    result = run(sampler, given=jnp.asarray(given))
    for row in range(4):
        if weight < 1:
            rest = (keys(4)[row], weight, 0.0, 6, "none")
            tokens, counts = reference(DREAM, PROMPTS[row], *rest, given=given[row])
        else:
            tokens, counts = left_to_right(PROMPTS[row], given[row], count, 6)
        assert result.tokens[row].tolist() == tokens and accepted(result, row) == counts
        assert result.nfe[row] == len(counts) and result.most_accepted[row] == max(counts)
        known = given[row] != MASK
        assert (result.tokens[row] == given[row])[known].all() and (
            result.decoded_at[row] < 0
        ).tolist() == known.tolist()
        alone = run(sampler, rows=(row,), given=jnp.asarray(given[row : row + 1]))
        assert_same_row(result, row, alone, 0)


def left_to_right(prompt, given, count, lookahead):
    """The tokens, and how many each step wrote, of steps that write `count` tokens."""
    x, written, counts = np.asarray([*prompt, *given]), 0, []
    while (given[written:] == MASK).any():
        cur = len(prompt) + written
        right = min(cur + lookahead, len(prompt) + GEN)
        z = np.array(_logits(DREAM, jnp.asarray(x), jnp.asarray(right)))[cur:right]
        z[:, MASK] = -np.inf
        known = given[written : written + len(z)]
        n = int((np.cumsum(known == MASK) <= count).sum())
        x[cur : cur + n] = np.where(known == MASK, z.argmax(-1), known)[:n]
        written, counts = written + n, [*counts, int((known[:n] == MASK).sum())]
    return x[len(prompt) :].tolist(), counts


# Distributions -------------------------------------------------------------------------------------------------------

MANY = 4096


@pytest.fixture(scope="module")
def many():
    """The first two steps of many rows of one prompt, half the weight each, and what the two models say there."""
    prompt, lengths = jnp.tile(jnp.asarray([PROMPTS[0]]), (MANY, 1)), jnp.full((MANY,), 5)
    sampler = APD(VERIFIER, 3, weight=0.5, sampling=Sampling(temperature=2.0))
    result = jax.device_get(sample_jit(sampler, DREAM, prompt, lengths, key=keys(MANY)))
    canvas = jnp.asarray(PROMPTS[0] + [MASK] * 3)
    raw = np.asarray(_logits(DREAM, canvas, jnp.asarray(8)))[5:] / 2.0
    return result, raw


def softmax(z: np.ndarray) -> np.ndarray:
    """Without the mask token, over the last axis."""
    z = np.where(np.arange(V) == MASK, -np.inf, z)
    weight = np.exp(z - z.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def assert_drawn_from(tokens: np.ndarray, probability: np.ndarray) -> None:
    """A chi-square test at 5 standard deviations, rare tokens taken together."""
    counts, wanted = np.bincount(tokens, minlength=V), probability * len(tokens)
    rare = wanted < 8
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], max(wanted[rare].sum(), 1e-9))
    assert len(wanted) > 4
    statistic = ((counts - wanted) ** 2 / np.maximum(wanted, 1.0)).sum()
    degrees = len(wanted) - 1
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_first_tokens_of_steps_follow_the_dllm(many) -> None:
    """Of the first step, and of the second after the most common first token that was accepted alone."""
    result, raw = many
    assert_drawn_from(result.tokens[:, 0], softmax(raw[0]))
    alone = result.decoded_at[:, 1] == 1
    common = np.bincount(result.tokens[alone, 0]).argmax()
    chosen = alone & (result.tokens[:, 0] == common)
    assert chosen.sum() > 200
    canvas = jnp.asarray([*PROMPTS[0], common, MASK, MASK])
    later = np.asarray(_logits(DREAM, canvas, jnp.asarray(8)))[6] / 2.0
    assert_drawn_from(result.tokens[chosen, 1], softmax(later))


def test_coupling_disagrees_as_little_as_it_must(many) -> None:
    """Between draft and target lies a rate of disagreement of at least TV, and at most 2 TV / (1 + TV)."""
    result, raw = many
    tested = 0
    for first in range(V):
        rows = result.tokens[:, 0] == first
        if rows.sum() < 150:
            continue
        canvas = jnp.asarray([*PROMPTS[0], first, MASK, MASK])
        verified = np.asarray(_logits(VERIFIER.denoiser, canvas, jnp.asarray(8)))[6] / 2.0
        draft, target = softmax(raw[1]), softmax((raw[1] + verified) / 2)
        distance = np.abs(draft - target).sum() / 2
        rate, slack = np.mean(result.decoded_at[rows, 1] > 0), 4 * np.sqrt(0.25 / rows.sum())
        assert distance - slack <= rate <= 2 * distance / (1 + distance) + slack
        tested += 1
    assert tested >= 3


@pytree()
class Fixed(Verifier):
    """Gives the same scores everywhere."""

    logits: jax.Array | None = None

    def scores(self, tokens, lengths, kv, at, write, vocab_size):
        return jnp.broadcast_to(self.logits, (*write.shape, V)), kv


@pytest.mark.parametrize("weight", [0.2, 0.5, 0.9])
def test_acceptance_is_as_likely_as_theory_says(weight) -> None:
    """The positions after the first: of independent draws sum p q, of draws with shared noise the sum over tokens of
    1 / sum_y max(p_y / p_x, q_y / q_x), without noise p of the best token; within 5 standard deviations, with fixed
    keys. Sharing accepts most; whatever the target, the draft is a sample of p."""
    z, v = (np.random.default_rng(seed).normal(size=V).astype(np.float32) * 1.5 for seed in (0, 1))
    denoiser = FunctionDenoiser(lambda z, tokens, lengths: jnp.broadcast_to(z, (*tokens.shape, V)), MASK, EOS, z, V)
    prompt, lengths = jnp.tile(jnp.asarray([PROMPTS[0]]), (MANY, 1)), jnp.full((MANY,), 5)
    temperature, top_p, rates = 0.7, 0.9, {}
    order = np.argsort(-z)
    before = np.cumsum(softmax_of_all(z / temperature)[order]) - softmax_of_all(z / temperature)[order]
    left = np.zeros(V, bool)
    left[order[before <= top_p]] = True
    left[MASK] = False
    over_left = lambda x: softmax_of_all(np.where(left, x, -np.inf))
    mixed = weight * z + (1 - weight) * v
    p, q = over_left(z / temperature), over_left(mixed / temperature)
    with np.errstate(divide="ignore", invalid="ignore"):
        larger = np.maximum(p[None] / p[:, None], q[None] / q[:, None])[np.ix_(left, left)].sum(axis=1)
    best = np.where(np.arange(V) == MASK, -np.inf, mixed).argmax()
    exact = {"shared": (1 / larger).sum(), "independent": (p * q).sum(), "none": p[best]}
    for noise, wanted in exact.items():
        sampler = APD(
            Fixed(VERIFIER.denoiser, logits=jnp.asarray(v)),
            3,
            weight=weight,
            noise=noise,
            sampling=Sampling(temperature=temperature, top_p=top_p),
        )
        result = jax.device_get(sample_jit(sampler, denoiser, prompt, lengths, key=keys(MANY)))
        assert_drawn_from(result.tokens[:, 0], p)
        rates[noise] = [(result.decoded_at[:, position] == 0).mean() for position in (1, 2)]
        for rate, chance in zip(rates[noise], (wanted, wanted**2), strict=True):
            assert abs(rate - chance) <= 5 * np.sqrt(chance * (1 - chance) / MANY), (noise, rate, chance)
    assert rates["shared"][0] > rates["independent"][0] and exact["shared"] > exact["independent"]


def softmax_of_all(z: np.ndarray) -> np.ndarray:
    weight = np.exp(z.astype(np.float64) - z.max())
    return weight / weight.sum()


def test_only_shared_noise_accepts_all_that_the_dllm_alone_decides() -> None:
    """At weight 1 target and draft are one distribution. Without a temperature there is no noise to choose."""
    options = {"weight": 1.0, "sampling": Sampling(temperature=2.0)}
    forwards = {
        noise: run(APD(VERIFIER, GEN, noise=noise, **options)).nfe for noise in ("shared", "independent", "none")
    }
    assert (forwards["shared"] == 1).all() and (forwards["independent"] > 1).all() and (forwards["none"] > 1).all()
    greedy = [run(APD(VERIFIER, GEN, weight=0.6, noise=noise)) for noise in forwards]
    for row in range(4):
        assert_same_row(greedy[0], row, greedy[1], row)
        assert_same_row(greedy[0], row, greedy[2], row)
    with refuses("noise 'some'"):
        APD(VERIFIER, GEN, noise="some")


def test_the_ends_of_the_weight() -> None:
    """Weight 1 accepts everything the lookahead holds at once; weight 0 what the verifier draws with the same noise."""
    sampling = Sampling(temperature=2.0, top_p=0.99)
    result = run(APD(VERIFIER, GEN, weight=jnp.asarray([1.0, 1.0, 0.0, 0.0]), lookahead=5, sampling=sampling))
    assert [accepted(result, row) for row in (0, 1)] == [[5, 5, 5, 1]] * 2
    assert result.nfe[2:].min() > 4
    result = run(APD(VERIFIER, GEN, weight=0.0))
    later = 0
    for row in range(4):
        canvas = jnp.asarray(PROMPTS[row] + result.tokens[row].tolist())
        scores = np.asarray(_logits(VERIFIER.denoiser, canvas, jnp.asarray(len(canvas))))[-GEN:]
        wanted = np.where(np.arange(V) == MASK, -np.inf, scores).argmax(-1)
        at = result.decoded_at[row]
        continued = np.append(False, at[1:] == at[:-1])
        assert (result.tokens[row] == wanted)[continued].all()
        later += continued.sum()
    assert later > 0


@pytree()
class Opinion(Verifier):
    """Agrees with every draft (sign 1) or with none (sign -1)."""

    sign: float = 1.0

    def scores(self, tokens, lengths, kv, at, write, vocab_size):
        drafted = slice_rows(tokens, *at)
        return self.sign * 1e6 * jax.nn.one_hot(drafted, vocab_size), kv


def test_verifiers_that_always_and_never_agree() -> None:
    """All at once, or one by one, which is the left-to-right baseline with its cache."""
    options = {"window": 3, "lookahead": 7}
    agreeing = run(APD(Opinion(VERIFIER.denoiser, sign=1.0), GEN, weight=0.4, **options))
    contrary = run(APD(Opinion(VERIFIER.denoiser, sign=-1.0), GEN, weight=0.4, **options))
    baseline = run(LeftRight(GEN, **options))
    assert agreeing.nfe.tolist() == [3] * 4
    assert contrary.nfe.tolist() == [GEN] * 4
    for field in ("tokens", "decoded_at", "nfe", "full_forwards", "cache_updates"):
        np.testing.assert_array_equal(getattr(contrary, field), getattr(baseline, field))
    assert baseline.verifier_forwards.tolist() == [0] * 4 and baseline.most_accepted.tolist() == [1] * 4


def test_the_baseline_writes_k_tokens() -> None:
    """As far as the lookahead and the generation go; K may differ by row."""
    result = run(LeftRight(GEN, tokens_per_step=jnp.asarray([1, 3, 5, 9]), lookahead=6))
    assert [accepted(result, row) for row in range(4)] == [[1] * 16, [3] * 5 + [1], [5, 5, 5, 1], [6, 6, 4]]


# Windows -------------------------------------------------------------------------------------------------------------


WINDOWED = APD(
    VERIFIER,
    GEN,
    weight=0.6,
    window=2,
    lookahead=6,
    sampling=Sampling(temperature=0.8, top_p=0.95),
    stop=stop_on([EOS, 4], vocab_size=V),
)


@pytest.mark.parametrize("model", MODELS)
def test_windows_that_hold_everything_change_nothing(model: str) -> None:
    sampling = Sampling(temperature=0.7)
    options = {"weight": 0.6, "sampling": sampling}
    plain = run(APD(VERIFIER, GEN, **options), model)
    whole = run(APD(VERIFIER, GEN, window=40, lookahead=GEN, **options), model)
    for field in ("tokens", "decoded_at", "nfe", "most_accepted"):
        np.testing.assert_array_equal(getattr(plain, field), getattr(whole, field))
    narrow = run(APD(VERIFIER, GEN, window=1, **options), model)
    assert (plain.tokens != narrow.tokens).any()  # stale keys and values do change something
    assert narrow.full_forwards.tolist() == narrow.cache_updates.tolist() == [1] * 4
    assert plain.full_forwards.tolist() == plain.nfe.tolist() and not plain.cache_updates.any()


def test_forwards_run_a_window() -> None:
    """A step of the dLLM runs W - 1 + 2 M positions, and the one before them, of which a shifted family reads."""
    widths = []

    @pytree()
    class Spy:
        inner: Denoiser

        def __getattr__(self, name):
            return getattr(object.__getattribute__(self, "inner"), name)

        def forward(self, inputs, visible, *, at=None, outputs, **options):
            if at is not None:
                widths.append((at.width, outputs.width))
            return self.inner.forward(inputs, visible, at=at, outputs=outputs, **options)

    sampler = APD(VERIFIER, GEN, window=3, lookahead=4)
    prompt, lengths = pad_prompts(PROMPTS, 12)
    jax.eval_shape(lambda spy: sampler.step(spy, sampler.init(spy, prompt, lengths)), Spy(DREAM))
    assert set(widths) == {(3 - 1 + 2 * 4, 4)}


def test_verifier_buffers_hold_what_was_accepted() -> None:
    """While streaming, the entries before the first unwritten position are those of one forward over the tokens."""
    sampler = WINDOWED
    prompt, lengths = pad_prompts(PROMPTS, 12)
    forward = jax.jit(lambda tokens: VERIFIER.prefill(tokens, jnp.full((4,), 12 + GEN), 12 + GEN))
    states = [jax.tree.map(jnp.copy, state) for state in stream(sampler, DREAM, prompt, lengths, key=keys(4))]
    found, expected = jax.device_get(sampler.result(DREAM, states[-1])), run(sampler)
    for row in range(4):
        assert_same_row(found, row, expected, row)
    for state in (states[1], states[len(states) // 2], states[-1]):
        wanted = forward(state.canvas.tokens)
        for row, end in enumerate(np.asarray(state.canvas.prompt_lengths + state.written)):
            for found, exact in zip(jax.tree.leaves(state.verifier_kv), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(found[row, :end], exact[row, :end], rtol=2e-4, atol=2e-4)


# The engine's contracts ----------------------------------------------------------------------------------------------


def test_batch_equals_single() -> None:
    """Ragged prompts, rows that end at different times: each row is what it is alone, in another slot or padding."""
    gen_lengths = jnp.asarray([16, 9, 16, 12])
    together = run(WINDOWED, gen_lengths=gen_lengths)
    assert len(set(together.nfe.tolist())) > 1
    for row in range(4):
        assert_same_row(together, row, run(WINDOWED, rows=(row,), gen_lengths=gen_lengths[row, None]), 0)
    other = run(WINDOWED, rows=(3, 2, 1, 0), width=20, gen_lengths=gen_lengths[::-1])
    for row in range(4):
        assert_same_row(together, row, other, 3 - row)
        at = together.decoded_at[row]
        written = at[at >= 0]
        assert (np.diff(written) >= 0).all() and len(np.unique(written)) == together.nfe[row]  # progress, in order
        assert (at >= 0).sum() <= gen_lengths[row] and (together.tokens[row] != MASK).all()


def test_stopping_looks_at_generated_tokens_only() -> None:
    """End tokens in the prompt stop nothing; what the last step wrote behind one stays, later positions are empty."""
    ended_by = lambda token: run(LeftRight(GEN, tokens_per_step=5, stop=stop_on([token], vocab_size=V)))
    endless = ended_by(MASK)
    assert endless.nfe.tolist() == [4] * 4
    token = int(endless.tokens[0, 2])
    stopped = ended_by(token)
    assert stopped.lengths[0] == endless.tokens[0].tolist().index(token)
    assert stopped.nfe[0] == 1 and (stopped.decoded_at[0] >= 0).sum() == 5
    np.testing.assert_array_equal(stopped.tokens[0, :5], endless.tokens[0, :5])
    assert (stopped.tokens[0, 5:] == EOS).all()
    in_prompt = PROMPTS[2][0]
    assert in_prompt not in endless.tokens[2, :5] and ended_by(in_prompt).nfe[2] > 1


def test_numbers_compile_nothing(compiled) -> None:
    """Weights, windows, lookaheads, temperatures, prompts, seeds, and other parameters of the verifier."""

    def call(weight: float, window: int, lookahead: int, temperature: float, scale: float, row: int):
        params = {name: scale * value for name, value in VERIFIER.denoiser.params.items()}
        sampler = APD(
            Verifier(Denoiser(VERIFIER.denoiser.config, params)),
            GEN,
            weight=weight,
            window=window,
            lookahead=lookahead,
            sampling=Sampling(temperature=temperature),
            most_window=6,
            most_lookahead=8,
        )
        return run(sampler, rows=(row,))

    first = call(0.9, 2, 8, 0.5, 1.0, 0)
    compiled.clear()
    again = call(0.1, 6, 3, 0.5, 1.0, 0)
    call(0.5, 1, 1, 0.0, 0.5, 2)
    assert not compiled
    assert first.nfe[0] != again.nfe[0]
    exact = run(APD(VERIFIER, GEN, weight=0.1, window=2, lookahead=3, sampling=Sampling(temperature=0.0)), rows=(0,))
    assert_same_row(exact, 0, call(0.1, 2, 3, 0.0, 1.0, 0), 0)


def test_the_verifier_is_data() -> None:
    """Its parameters are arguments of the program, and a generation is one program."""
    prompt, lengths = pad_prompts(PROMPTS, 12)
    program = jax.make_jaxpr(sample)(WINDOWED, DREAM, prompt, lengths, key=jax.random.key(0))
    shape = (V, SMALL["embed_dim"])
    assert shape in [var.aval.shape for var in program.jaxpr.invars]
    assert not any(getattr(const, "shape", ()) == shape for const in program.consts)
    assert "while" in str(program) and "callback" not in str(program)


def test_inside_jit_vmap_and_shard_map() -> None:
    prompt, lengths = pad_prompts(PROMPTS, 12)
    expected = run(WINDOWED)
    mesh, split = make_mesh(data=2), jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(
        lambda sampler, denoiser, *batch: sample(sampler, denoiser, *batch[:2], key=batch[2]),
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(), split, split, split),
        out_specs=split,
    )
    sharded = jax.device_get(jax.jit(mapped)(WINDOWED, DREAM, prompt, lengths, keys(4)))
    for row in range(4):
        assert_same_row(sharded, row, expected, row)
    plain, weights = APD(VERIFIER, GEN), jnp.asarray([0.2, 0.6])
    at = lambda weight: sample(dataclasses.replace(plain, weight=weight), DREAM, prompt, lengths, key=keys(4))
    swept = jax.tree.map(lambda x: x[1], jax.device_get(jax.jit(jax.vmap(at))(weights)))
    expected = run(dataclasses.replace(plain, weight=0.6))
    for row in range(4):
        assert_same_row(swept, row, expected, row)


# Vocabularies --------------------------------------------------------------------------------------------------------


def test_token_maps() -> None:
    """A verifier of shuffled ids and its map is the same verifier; ids that it lacks are never drafted."""
    order = np.random.default_rng(0).permutation(V)
    model = VERIFIER.denoiser
    table = model.params["embed.embedding"]
    shuffled = Denoiser(model.config, {**model.params, "embed.embedding": jnp.zeros_like(table).at[order].set(table)})
    plain = run(APD(VERIFIER, GEN, weight=0.5))
    mapped = run(APD(Verifier(shuffled, jnp.asarray(order)), GEN, weight=0.5))
    np.testing.assert_array_equal(plain.tokens, mapped.tokens)
    np.testing.assert_array_equal(plain.decoded_at, mapped.decoded_at)
    common = np.bincount(plain.tokens.ravel()).argmax()
    lacking = run(APD(Verifier(shuffled, jnp.asarray(order).at[common].set(-1)), GEN, weight=0.5))
    assert (lacking.tokens != common).all()


@pytest.mark.parametrize("size", [11, 20])
def test_the_common_prefix_of_ids_is_compared(size: int) -> None:
    """The verifier has fewer or more ids: those that both have decide, and no others are drafted."""
    config = VERIFIER.denoiser.config.replace(vocab_size=size, eos_id=1, pad_id=1, end_ids=(1,))
    table = VERIFIER.denoiser.params["embed.embedding"]
    rows = jnp.concatenate([table, 3 * table[:6]])[:size]
    other = Verifier(Denoiser(config, {**VERIFIER.denoiser.params, "embed.embedding": rows}))
    result = run(APD(other, GEN, weight=0.5))
    if size > V:
        np.testing.assert_array_equal(result.tokens, run(APD(VERIFIER, GEN, weight=0.5)).tokens)
    assert result.tokens.max() < size


def test_verifiers_of_models(dream_tiny, qwen2_tiny, llada_tiny) -> None:
    """`verifier_for` compares tokenizers; text goes in and comes out."""
    verifier = verifier_for(dream_tiny, qwen2_tiny)
    answer = generate(dream_tiny, "Q: Tom has 12 books.\nA: ", sampler=APD(verifier, 8, weight=0.7))
    assert len(answer.canvas) == 8 and answer.nfe <= 8
    with refuses("causal"):
        verifier_for(dream_tiny, llada_tiny)
    untold = [
        dataclasses.replace(qwen2_tiny, config=qwen2_tiny.config.replace(vocab_size=size), tokenizer=None, name="other")
        for size in (136, 200)
    ]
    verifier_for(dream_tiny, untold[0])
    with refuses("tokenizers"):
        verifier_for(dream_tiny, untold[1])
    with refuses("136 tokens"):
        verifier_for(dream_tiny, qwen2_tiny, np.full(136, 136))

    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 65}))
    core.decoder = tokenizers.decoders.Fuse()
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    with refuses("token_map"):
        verifier_for(dream_tiny, dataclasses.replace(qwen2_tiny, tokenizer=other))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("window is 0", {"window": 0}),
        ("window is 2.5", {"window": 2.5}),
        ("most_window", {"window": jnp.asarray(3)}),  # which an array cannot do without
        ("most_window 8", {"window": 9, "most_window": 8}),
        ("lookahead is 0", {"lookahead": 0}),
        ("most_lookahead is 0", {"most_lookahead": 0}),
        ("weight", {"weight": 1.5}),
        ("gen_length", {"gen_length": 0}),
        ("top_p", {"sampling": Sampling(top_p=2.0)}),
    ],
)
def test_refusals_when_built(name: str, options: dict) -> None:
    with refuses(name):
        APD(**{"verifier": VERIFIER, "gen_length": 8, **options})


@pytest.mark.parametrize(
    ("name", "sampler", "options"),
    [
        ("NoneType", APD(None, 8), {}),
        ("int32[3]", APD(Verifier(VERIFIER.denoiser, jnp.zeros(3, int)), 8), {}),
        ("prompt", APD(VERIFIER, 8), {"prompt": jnp.zeros((1, 0), int)}),
        ("length 0 of row 0", APD(VERIFIER, 8), {"prompt_lengths": jnp.asarray([0])}),
        ("given", APD(VERIFIER, 8), {"given": jnp.zeros((1, 7), int)}),
        ("key=", APD(VERIFIER, 8, sampling=Sampling(temperature=1.0)), {}),
        ("defer", LeftRight(8, sampling=Sampling(defer=jnp.asarray([1]))), {}),
        ("sampling is None", LeftRight(8, sampling=None), {}),
    ],
)
def test_refusals_at_the_start(name: str, sampler, options: dict) -> None:
    with refuses(name):
        sampler.init(LLADA, **{"prompt": jnp.asarray([[1, 2]]), **options})


def test_refusals_of_parts() -> None:
    with refuses("dict"):
        Verifier({})
    with refuses("tokens_per_step"):
        LeftRight(8, tokens_per_step=0)


# As samplers of the evaluations --------------------------------------------------------------------------------------


def test_evals_know_samplers_from_left_to_right(monkeypatch) -> None:
    """`apd` and `leftright` are specs with options of their own; numbers make curves; verifiers are loaded."""
    task = make_task("maze:size=4")
    model = oracle(task)
    beside = dataclasses.replace(
        dllm_jax.random_model(VERIFIER.denoiser.config.replace(vocab_size=model.config.vocab_size), key=0), name="other"
    )
    specs = parse_samplers("apd:verifier=there,weight=0.3|0.6,window=2,lookahead=9,temperature=0.5")
    assert {spec.series for spec in specs} == {"apd:verifier=there,window=2,lookahead=9,temperature=0.5"}
    config = specs[0].for_canvas(task).load_verifier({"there": beside}.__getitem__)
    model_of_size = dataclasses.replace(beside, config=model.config)
    built = config.build(model_of_size)
    loaded: list[str] = []
    monkeypatch.setattr(dllm_jax, "load", lambda name: loaded.append(name) or beside)
    engine = Engine(model_of_size, specs[0].for_canvas(task), slots=1, prompt_length=8)
    assert engine.request([1, 2], weight=0.5).numbers != engine.request([1, 2], weight=0.6).numbers
    assert loaded == ["there"]
    assert isinstance(built, APD) and (built.weight, built.window, built.lookahead) == (0.3, 2, 9)
    assert built.gen_length == task.answer_width
    with refuses("verifier"):
        parse_samplers("apd:weight=0.5")[0].for_canvas(task).build(model)
    with refuses("'cache'"):
        parse_samplers("leftright:cache=dual")
