"""Renoise on small random models: against the loop written out without a cache, rows that are strangers, and refusals.
`tests/test_parity_gemma.py` compares with transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses

import convert
import dllm_jax
from dllm_jax import ModelConfig, param_shardings
from dllm_jax.config import Experts, Gemma
from dllm_jax.families import FAMILIES, HubConfig
from dllm_jax.models.denoiser import Denoiser
from samplers import (
    Engine,
    Renoise,
    Request,
    Sampling,
    Threshold,
    generate,
    infill,
    make_sampler,
    sample_jit,
    stop_on,
    stream,
)
from samplers.config.costs import costs_of
from samplers.infill import prepare_infill, requests_for
from samplers.inputs import start_from
from samplers.loops.block import BlockSampler
from samplers.tokens import predictions
from samplers.tokens.noise import KeyNoise, Purpose, row_keys

L, VOCAB, END = 4, 48, 3
CONFIG = ModelConfig(
    family="diffusion-gemma",
    vocab_size=VOCAB,
    embed_dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    rope_theta=100.0,
    norm_eps=1e-6,
    max_length=64,
    eos_id=END,
    pad_id=0,
    mask_id=None,
    end_ids=(END,),
    attention="canvas",
    block_length=L,
    tied_embeddings=True,
    experts=Experts(num_experts=4, per_token=2, dim=12, normalize=True),
    gemma=Gemma(window=3, full_layers=(1,), head_dim=12, num_kv_heads=1, rope_theta=1000.0, rope_pairs=2, softcap=30.0),
    dtype="float32",
)
ROWS = [[5, 6, 7, 8, 9, 10, 11], [20, 21], [30, 31, 32, 33]]
SAMPLER = Renoise(10, L, 8, 2.0, 0.2, 0.02, 1, 0.5)  # three canvases, of the last only half


@pytest.fixture(scope="module")
def model():
    """Random weights large enough that logits differ, and scalars of encoder and decoder apart."""
    found = dllm_jax.random_model(CONFIG)
    scale = lambda name, x: x * 1.2 if name.endswith("encoder_scalar") else x * 8 if x.ndim > 1 else x
    return dataclasses.replace(found, params={name: scale(name, x) for name, x in found.params.items()})


def batch_of(rows):
    width = max(map(len, rows))
    tokens = jnp.asarray([row + [0] * (width - len(row)) for row in rows])
    return tokens, jnp.asarray([len(row) for row in rows])


def run(model, sampler=SAMPLER, rows=ROWS, keys=None, **options):
    keys = row_keys(jax.random.key(4), len(rows)) if keys is None else keys
    return sample_jit(sampler, model.denoiser, *batch_of(rows), key=keys, **options)


def test_what_it_takes_is_told(model):
    """`samplers.config.costs`: all rows' canvases at a time, and forwards within what was told."""
    told, found = costs_of(model, SAMPLER, 3, 7), run(model)
    assert dict(told.rows) == {L: 3} and told.forwards == SAMPLER.forwards(7) == (6, 24)
    assert told.forwards[0] <= int(found.nfe.min()) and int(found.nfe.max()) <= told.forwards[1]


def written_out(denoiser, prompt, key, sampler, gen_length, given=()):
    """One row, step by step on the host, everything encoded anew for each canvas: tokens and steps of each canvas.
    `given` has the tokens of some positions, and tokens that others start from, -1 for the rest."""
    uniform = lambda purpose, ids=None: jax.jit(
        lambda nfe, first: KeyNoise(key[None]).uniform(purpose, nfe[None], first + jnp.arange(L)[None], ids)[0]
    )
    tokens_of, ids_of = uniform(Purpose.TOKENS, jnp.arange(VOCAB)), uniform(Purpose.CANVAS)
    fill = lambda nfe, first: (np.asarray(ids_of(jnp.asarray(nfe), first)) * VOCAB).astype(int)
    encode = jax.jit(lambda tokens, end: denoiser.forward(tokens, end)[1])
    decode = jax.jit(lambda canvas, soft, end, kv: denoiser.logits(denoiser.denoise(canvas, soft, end, kv)[0])[0])
    table = np.asarray(denoiser.embed(jnp.arange(VOCAB)[None])[0], np.float64)
    known, nfe, counts = list(prompt), 0, []
    given = np.pad(np.asarray(given, int), (0, 3 * L - len(given)), constant_values=-1)
    for first in range(0, gen_length, L):
        own = given[first : first + L]
        start = np.where(own < -1, start_from(own), fill(nfe, first))
        free, pin = own < 0, lambda tokens, own=own: np.where(own < 0, tokens, own)
        end = jnp.asarray([len(known)])
        kv = encode(jnp.asarray([known + [0] * (24 - len(known))]), end)
        canvas, soft, last, same = pin(start), np.zeros((L, 16)), None, 0
        for n in range(sampler.steps, 0, -1):
            z = decode(jnp.asarray(canvas)[None], jnp.asarray(soft, jnp.float32)[None], end, kv)
            z = np.asarray(z, np.float64)
            z /= sampler.t_min + (sampler.t_max - sampler.t_min) * n / sampler.steps
            p = np.exp(z - z.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            entropy = -(p * np.log(p)).sum(-1)
            gumbel = -np.log(-np.log(np.asarray(tokens_of(jnp.asarray(nfe), first), np.float64)))
            token = (z + gumbel).argmax(-1)
            order = np.flatnonzero(free)[np.argsort(entropy[free])]
            kept = np.zeros(L, bool)
            kept[order] = np.cumsum(entropy[order]) - entropy[order] <= sampler.gamma
            best, nfe = pin(z.argmax(-1)), nfe + 1
            canvas, soft = pin(np.where(kept, token, fill(nfe, first))), p @ table
            same = same + 1 if last is not None and (best == last).all() else 0
            last = best
            if not free.any() or (same >= sampler.stability and entropy[free].mean() < sampler.confidence):
                break
        known += last.tolist()
        counts.append(sampler.steps - n + 1)
    return known[len(prompt) :][:gen_length], counts


def test_as_written_out_without_a_cache(model):
    """Prompts shorter and longer than the window, canvases of several lengths, all rows beside each other."""
    result, keys = run(model), row_keys(jax.random.key(4), len(ROWS))
    every = []
    for row, prompt in enumerate(ROWS):
        tokens, counts = written_out(model.denoiser, prompt, keys[row], SAMPLER, 10)
        np.testing.assert_array_equal(result.tokens[row], tokens)
        assert (result.nfe[row], result.cache_updates[row], result.full_forwards[row]) == (sum(counts), 3, 1)
        every += counts
    assert len(set(every)) > 1 and (np.asarray(result.broken_at) == -1).all()


GIVEN = [
    [-1, 40, -1, 41, -1, -1, -1, -1, 42, 43],
    [44, 45, 46, 47, -1, -1, 2, -1, -1, -1],  # a whole canvas
    [-1] * 10,
]
STARTED = [[*map(start_from, [40, 41, 42, 43, 44, 45]), -1, 7, 8, 9], [-1] * 7 + [start_from(0)] * 3, [-1] * 10]


@pytest.mark.parametrize("given", [GIVEN, STARTED])
def test_given_tokens_stay_and_are_seen(model, given):
    """As written out; a canvas that comes whole takes one step; rows do not see each other's. Tokens to start from are
    seen by the first step of their canvas alone."""
    keys = row_keys(jax.random.key(4), len(ROWS))
    result, free = run(model, given=jnp.asarray(given)), run(model)
    for row, prompt in enumerate(ROWS):
        tokens, counts = written_out(model.denoiser, prompt, keys[row], SAMPLER, 10, given[row])
        np.testing.assert_array_equal(result.tokens[row], tokens)
        assert int(result.nfe[row]) == sum(counts)
        kept = np.asarray(given[row]) >= 0
        assert (np.asarray(result.tokens[row])[kept] == np.asarray(given[row])[kept]).all()
        assert ((np.asarray(result.decoded_at[row]) < 0) == kept).all()
        assert np.isnan(np.asarray(result.logprobs[row])[kept]).all()
    assert result.tokens[2].tolist() == free.tokens[2].tolist()
    assert result.tokens[0].tolist() != free.tokens[0].tolist()
    engine = Engine(model, SAMPLER, slots=2, prompt_length=8)
    asked = [
        Request(ROWS[row], 10, np.asarray(jax.random.key_data(keys[row])), given=np.asarray(given[row], np.int32))
        for row in (2, 0, 1)
    ]
    for request in asked:
        engine.submit(request)
    list(engine.results())
    for request, row in zip(asked, (2, 0, 1), strict=True):
        assert request.result.tokens[0].tolist() == result.tokens[row].tolist()
        assert request.result.nfe[0] == result.nfe[row]


def test_infilling(llada_tiny):
    """Gaps of a text, with a tokenizer; and an answer of which only a span may change."""
    config = CONFIG.replace(vocab_size=llada_tiny.config.vocab_size, eos_id=128, pad_id=128, end_ids=(128,))
    model = dataclasses.replace(dllm_jax.random_model(config), tokenizer=llada_tiny.tokenizer)
    found, other = infill(model, ["12 + 12 = <gap:2>. So<gap:3>!", "a<gap:1>b"], steps=4)
    assert found.text.startswith("12 + 12 = ") and found.text.endswith("!") and [len(g) for g in found.gaps] == [2, 3]
    assert ". So" in found.text and other.text[0] == "a" and other.text[-1] == "b"
    plan = prepare_infill(model, ["12 <edit>+ 1</edit> = <gap:2>"], steps=4)
    (request,) = requests_for(model, plan)
    old, (space, equals, _) = model.tokenizer.encode("+ 1"), model.tokenizer.encode(" = ")
    assert request.given[:8].tolist() == [*map(start_from, old), space, equals, space, -1, -1]


def test_rows_are_independent(model):
    """A row's answer is that of its batch of one, under `vmap` too, and is another's with another key."""
    result, keys = run(model), row_keys(jax.random.key(4), len(ROWS))
    tokens, lengths = batch_of(ROWS)
    for row in range(len(ROWS)):
        alone = sample_jit(SAMPLER, model.denoiser, tokens[row : row + 1], lengths[row : row + 1], key=keys[row][None])
        close = lambda mine, own, row=row: np.testing.assert_allclose(mine[row], own[0], rtol=1e-4, atol=1e-5)
        jax.tree.map(close, result, alone)
    one = lambda prompt, length, key: sample_jit(SAMPLER, model.denoiser, prompt[None], length[None], key=key[None])
    mapped = jax.jit(jax.vmap(one))(tokens, lengths, keys)
    np.testing.assert_array_equal(mapped.tokens[:, 0], result.tokens)
    other = run(model, keys=jnp.flip(keys)).tokens
    assert (np.asarray(other) != np.asarray(result.tokens)).any(axis=1)[[0, 2]].all()


def test_numbers_compile_nothing_and_may_differ_by_row(model, compiled):
    numbers = {"steps": [5, 3, 1], "gamma": [1.0, 0.0, 9.0], "t_max": [0.5, 0.9, 0.3], "stability": [1, 0, 2]}
    rows = dataclasses.replace(SAMPLER, **{name: jnp.asarray(values) for name, values in numbers.items()})
    result = run(model, rows)
    for row in range(3):
        own = dataclasses.replace(SAMPLER, **{name: values[row] for name, values in numbers.items()})
        np.testing.assert_array_equal(run(model, own).tokens[row], result.tokens[row])
        if row == 0:
            compiled.clear()
    assert not compiled
    assert result.nfe[2] == 3  # of three canvases one step each


def test_ends(model):
    """At the canvas of the first end token, or where the row's own length is full."""
    free = run(model)
    end = int(free.tokens[0, 5])  # in the second canvas
    stops = dataclasses.replace(SAMPLER, stop=stop_on([end], vocab_size=VOCAB))
    result = run(model, stops)
    length = int(np.argmax(np.asarray(free.tokens[0]) == end))
    assert result.lengths[0] == length
    finished = (length // L + 1) * L
    np.testing.assert_array_equal(result.tokens[0, :finished], free.tokens[0, :finished])
    assert (np.asarray(result.tokens[0, finished:]) == END).all() and result.nfe[0] < free.nfe[0]
    short = run(model, gen_lengths=jnp.asarray([3, 4, 5]))
    np.testing.assert_array_equal(short.cache_updates, [1, 1, 2])
    for row, length in enumerate((3, 4, 5)):
        np.testing.assert_array_equal(short.tokens[row, :length], free.tokens[row, :length])
        assert (np.asarray(short.decoded_at[row, length:]) == -1).all()


def test_a_stream_believes_finished_canvases_only(model):
    final = None
    for state in stream(SAMPLER, model.denoiser, *batch_of(ROWS), key=jax.random.key(0)):
        pending = np.asarray(SAMPLER.pending(state))
        tokens = np.where(pending, -1, np.asarray(SAMPLER.result(model.denoiser, state).tokens))
        if final is not None:
            assert (tokens[final >= 0] == final[final >= 0]).all()
        final = tokens
    assert (final >= 0).all()


def test_slots_give_what_a_row_alone_gives(model):
    """More requests than slots, with numbers and end tokens of their own."""
    sampler = dataclasses.replace(SAMPLER, stop=stop_on([END], vocab_size=VOCAB))
    said = {name: getattr(SAMPLER, name) for name in ("gen_length", "steps", "gamma", "t_max", "t_min", "confidence")}
    engine = Engine(model, "renoise", slots=2, prompt_length=8, **said)
    asked = [{}, {"steps": 2}, {"gamma": 0.0, "stability": 0}, {"t_max": 0.9}, {}]
    requests = [engine.submit(engine.request(ROWS[i % 3], seed=i, **own)) for i, own in enumerate(asked)]
    assert len(list(engine.results())) == len(asked)
    for i, (request, own) in enumerate(zip(requests, asked, strict=True)):
        prompt = jnp.zeros((1, 8), int).at[0, : len(request.prompt)].set(jnp.asarray(request.prompt))
        keys, lengths = row_keys(jax.random.key(i), 1), jnp.asarray([len(request.prompt)])
        alone = sample_jit(dataclasses.replace(sampler, **own), model.denoiser, prompt, lengths, key=keys)
        close = lambda mine, other: np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
        jax.tree.map(close, request.result, jax.device_get(alone))
    with refuses("given", "outside the vocabulary"):
        engine.submit(engine.request(ROWS[0], given=np.full(10, VOCAB, np.int32)))
    with refuses("given token 48", "outside the vocabulary"):
        engine.submit(engine.request(ROWS[0], given=np.full(10, start_from(VOCAB), np.int32)))
    drawing = Engine(model, "renoise", slots=2, draws=True, **said)
    assert drawing.sampler.sampling == Sampling(top_p=1.0, top_k=VOCAB)
    with refuses("temperature"):
        drawing.request(ROWS[0], temperature=0.7)


def test_the_vocabulary_in_tiles(model, monkeypatch):
    """Tokens and expected embeddings do not depend on how much of the vocabulary exists at a time."""
    scores = jax.random.normal(jax.random.key(1), (2, 3, VOCAB)) * 3
    draw = lambda ids: jax.random.uniform(jax.random.key(2), (2, 3, VOCAB), minval=1e-6)[..., ids]
    sampling = Sampling(jnp.asarray([0.5, 0.9]), suppress=jnp.asarray([7, 8]))
    cut = dataclasses.replace(sampling, top_p=0.7)
    mix, of = model.denoiser.mixed_embeddings, predictions.given(scores)
    find = lambda: [predictions.draw_and_expect(of, choice, draw=draw, mix=mix) for choice in (sampling, cut)]
    whole, nucleus = both = find()
    for name, value in (("TILE_ELEMENTS", 1), ("LANES", 5), ("LEAST_LANES", 2)):
        monkeypatch.setattr(predictions, name, value)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), find(), both)
    z = scores.at[..., 7:9].set(-jnp.inf) / jnp.asarray([0.5, 0.9])[:, None, None]
    np.testing.assert_allclose(whole.soft, model.denoiser.expected_embedding(z), atol=1e-5)
    np.testing.assert_array_equal(whole.best, jnp.argmax(z, axis=-1))
    assert (nucleus.entropy < whole.entropy).all() and (nucleus.best == whole.best).all()
    np.testing.assert_allclose(
        whole.logprob, jnp.take_along_axis(jax.nn.log_softmax(scores), whole.best[..., None], -1)[..., 0], atol=1e-5
    )


def test_quantized_embeddings_are_mixed_as_they_are_read(model):
    small = dllm_jax.random_model(CONFIG, quantize="int8").denoiser
    weights = jax.nn.softmax(jax.random.normal(jax.random.key(0), (1, 2, VOCAB)))
    table = small.embed(jnp.arange(VOCAB)[None])[0]
    np.testing.assert_allclose(small.mixed_embeddings(weights), weights @ table, atol=1e-5)
    assert run(dataclasses.replace(model, config=small.config, params=small.params)).tokens.shape == (3, 10)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_on_a_mesh(model):
    mesh = dllm_jax.make_mesh(data=2, expert=2)
    placed = jax.device_put(model.params, dict(param_shardings(CONFIG, mesh)))
    split = Denoiser(CONFIG, placed, dllm_jax.random_model(CONFIG, mesh=mesh).layout)
    rows, keys = [*ROWS, [1, 2, 9]], row_keys(jax.random.key(4), 4)
    result = sample_jit(SAMPLER, split, *batch_of(rows), key=keys)
    np.testing.assert_array_equal(result.tokens, run(model, rows=rows, keys=keys).tokens)


def test_it_ends_whatever_the_logits_are(model):
    broken = dataclasses.replace(model, params=model.params | {"final_norm.scale": jnp.full((16,), jnp.nan)})
    result = run(broken)
    np.testing.assert_array_equal(result.nfe, 3 * 8)
    np.testing.assert_array_equal(result.broken_at, 0)


def test_defaults_are_the_models(model):
    sampler = make_sampler(model, gen_length=8)
    assert isinstance(sampler, Renoise) and (sampler.block_length, sampler.steps) == (L, 48)
    found = generate(model, [ROWS[0]], gen_length=8, steps=2, seed=3)[0]
    assert found.nfe <= 4 and len(found.canvas) == 8


LLADA = ModelConfig.from_json(
    CONFIG.replace(attention="bidirectional", block_length=None, gemma=None, experts=None, mask_id=1).to_json()
)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("renoise", lambda m: generate(m, [[5]], sampler="threshold")),
        ("gen_length 2", lambda m: generate(m, [[5]], gen_length=2)),
        ("temperature", lambda m: generate(m, [[5]], temperature=0.5)),
        ("defer", lambda m: generate(m, [[5]], defer="eos")),
        ("steps is 0", lambda m: generate(m, [[5]], steps=0)),
        ("'threshold'", lambda m: generate(m, [[5]], threshold=0.5)),
        ("mask token", lambda m: generate(m, [[5]], sampler=BlockSampler(Threshold(), 8, 4, align_blocks=True))),
        ("key=", lambda m: sample_jit(SAMPLER, m.denoiser, jnp.ones((1, 2), int))),
        ("canvas", lambda m: sample_jit(SAMPLER, dllm_jax.random_model(LLADA).denoiser, jnp.ones((1, 2), int))),
        ("renoise", lambda m: make_sampler(dllm_jax.random_model(LLADA), "renoise")),
        ("gemma", lambda m: CONFIG.replace(gemma=None)),
        ("mask token", lambda m: CONFIG.replace(mask_id=1)),
        ("experts", lambda m: CONFIG.replace(experts=None)),
        ("gemma.full_layers", lambda m: CONFIG.replace(num_layers=1)),
        ("rope_pairs", lambda m: dataclasses.replace(CONFIG.gemma, rope_pairs=7)),
    ],
)
def test_refusals(model, name, use):
    with refuses(name):
        use(model)


# Checkpoints ----------------------------------------------------------------------------------------------------------

HUB = FAMILIES["diffusion-gemma"].write_config(CONFIG) | {"architectures": ["DiffusionGemmaForBlockDiffusion"]}


def read(**changes):
    text = {name: value for name, value in (HUB["text_config"] | changes).items() if value is not ...}
    return FAMILIES["diffusion-gemma"].read_config(HubConfig(HUB | {"text_config": text}, "config.json"))


def test_config_as_written_and_in_other_words():
    assert read() == CONFIG.replace(dtype="bfloat16")
    assert ModelConfig.from_json(CONFIG.to_json()) == CONFIG
    own = {"per_layer_config": ..., "global_head_dim": 12, "num_global_key_value_heads": 1}
    assert read(**own) == read()
    assert read(**own | {"num_global_key_value_heads": None}).gemma.num_kv_heads == 2
    assert read(final_logit_softcapping=...).gemma.softcap == 30.0


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_activation": "silu"},
        {"use_bidirectional_attention": "all"},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["full_attention"]},
        {"rope_parameters": None},
        {"per_layer_config": {"0": {"head_dim": 4}}},
        {"num_experts": None},
        {"attention_bias": True},
    ],
)
def test_configs_that_are_not_implemented(changes):
    with refuses(*changes):
        read(**changes)


def test_generation_config_is_the_samplers(model):
    said = {"max_new_tokens": 12, "max_denoising_steps": 7, "t_min": 0.2, "eos_token_id": [3, 4], "pad_token_id": None}
    hub = HubConfig(HUB, "config.json", generation=said | {"sampler_config": {"entropy_bound": 0.3, "_cls_name": "E"}})
    usual = FAMILIES["diffusion-gemma"].generation_options(hub)
    sampler = make_sampler(dataclasses.replace(model, generation=usual))
    assert (sampler.gen_length, sampler.steps, sampler.t_min, sampler.gamma, sampler.t_max) == (12, 7, 0.2, 0.3, 0.8)


def test_there_and_back(model, tmp_path):
    """Ours in the hub's format and back, bit by bit, with tensors of images beside, which are left out."""
    dllm_jax.checkpoints.checkpoint.save(tmp_path / "ours", CONFIG, model.params.items())
    convert.export(tmp_path / "ours", tmp_path / "hub")
    assert convert.convert("diffusion-gemma", tmp_path / "hub", tmp_path / "again") == CONFIG
    again = dllm_jax.load(tmp_path / "again")
    assert again.params.keys() == model.params.keys()
    for name, array in model.params.items():
        np.testing.assert_array_equal(again.params[name], array)
    assert convert.verify(tmp_path / "hub", tmp_path / "again") > 40
