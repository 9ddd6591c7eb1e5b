"""Answers of a given form: of block diffusion models, on meshes, for each gap of a text, and where they are refused."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_same_row, converted, refuses, wait_until
from test_block_diffusion import PROMPTS
from test_constraints import END, HOLE, NOISY, G, V, accepted, look
from test_engine import EOS, MASK, first_layers, keys
from test_prefill import SYSTEM

import dllm_jax
from dllm_jax import Model, make_mesh
from samplers import BlockSampler, Engine, Sampling, Threshold, generate, infill, make_sampler, sample_jit, stop_on
from samplers.caches import ExactCache, SubBlockCache
from samplers.config.registry import LOOPS
from samplers.constraints import automaton
from samplers.constraints.automaton import bytes_of, gaps_constraint, token_constraint
from samplers.constraints.constraint import DEAD, START
from samplers.rules import FastDllmV2
from samplers.text.prompts import pad_prompts

# Block diffusion ------------------------------------------------------------------------------------------------------

VOCAB, LENGTH = 136, 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A converted model of each family, by name."""
    return functools.cache(lambda family: converted(family, tmp_path_factory))


@pytest.fixture(scope="module")
def llada(llada_tiny) -> Model:
    return first_layers(llada_tiny, 2)


def sums() -> tuple[np.ndarray, np.ndarray]:
    """Digits, an equals sign, two digits, a full stop; then end tokens: states [Q, V] and accept [Q]."""
    states, digits = np.zeros((8, VOCAB), np.int16), [ord(x) for x in "0123456789"]
    states[1, digits], states[2, digits], states[3, digits], states[4, digits] = 2, 2, 4, 5
    states[2, ord("=")], states[5, ord(".")] = 3, 6
    states[[6, 7], EOS] = 7
    return states, np.arange(8) > 5


def fitting(table: np.ndarray, accept: np.ndarray, tokens: np.ndarray, undecided: np.ndarray) -> np.ndarray:
    """Which tokens fit at each position of a whole canvas, [N, V], one product of matrices after another."""
    steps = np.zeros((len(tokens), len(table), len(table)), bool)
    for at, token in enumerate(tokens):
        for state, row in enumerate(table):
            steps[at, state, row if undecided[at] else row[token]] = True
    steps[:, :, DEAD] = False
    before, after = [np.arange(len(table)) == START], [accept]
    for step in steps:
        before.append(before[-1] @ step)
    for step in steps[::-1]:
        after.append(step @ after[-1])
    return np.stack(
        [(reached[:, None] & rest[table]).any(axis=0) for reached, rest in zip(before, after[-2::-1], strict=False)]
    )


@jax.jit
def step(sampler: BlockSampler, denoiser, state):
    """The state after a step; and before it the active block's undecided positions and what fits there."""
    view, request = sampler._look(sampler._in_blocks(denoiser), state)
    _, window = sampler.constraint.look(state.form, state.canvas, request.start, sampler.width)
    return sampler.step(denoiser, state), (view.undecided, view.positions, window.allowed(jnp.arange(VOCAB)))


@pytest.mark.parametrize(
    ("family", "rule", "cache", "options"),
    [
        ("sdar", Threshold(0.3), ExactCache(), {"block_length": 4}),
        ("llada2", Threshold(0.0), ExactCache(), {"block_length": 8, "fill_after_eos": True}),
        ("fast-dllm-v2", FastDllmV2(0.3), SubBlockCache(), {"block_length": 8, "sub_block_length": 4}),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_block_diffusion_models_keep_a_form(models, family, rule, cache, options) -> None:
    """In every forward exactly those tokens fit that some completion of the whole canvas has, whatever later blocks
    become; a token that a later block comes with counts. Answers have the form, and a row is as alone."""
    model, (table, accept) = models(family), sums()
    sampler = BlockSampler(
        rule,
        LENGTH,
        cache=cache,
        align_blocks=True,
        sampling=Sampling(0.8),
        stop=stop_on([EOS], vocab_size=VOCAB),
        constraint=token_constraint(table, accept),
        **options,
    )
    prompt, prompt_lengths = pad_prompts(PROMPTS, 40)
    lengths, given = jnp.asarray([LENGTH, 17, LENGTH, 9]), np.full((4, LENGTH), MASK, np.int32)
    given[2, 13] = ord("=")
    own = {"key": keys(4), "gen_lengths": lengths, "given": jnp.asarray(given)}
    state, forwards = jax.jit(BlockSampler.init)(sampler, model.denoiser, prompt, prompt_lengths, **own), 0
    while not state.canvas.done.all():
        canvas = jax.device_get(dataclasses.replace(state.canvas, noise=None, stop=None))
        state, found = step(sampler, model.denoiser, state)
        for row, (undecided, positions, allowed) in enumerate(zip(*jax.device_get(found), strict=True)):
            first, length = canvas.prompt_lengths[row], int(lengths[row])
            tokens = canvas.tokens[row, first : first + length]
            if not canvas.done[row]:
                wanted = fitting(table, accept, tokens, canvas.undecided[row, :length])
                np.testing.assert_array_equal(allowed[undecided], wanted[positions[undecided]])
        forwards += 1
    result = jax.device_get(sampler.result(model.denoiser, state))
    for row in range(4):
        assert accepted(table, accept, result.tokens[row, : lengths[row]]), result.tokens[row]
    assert result.tokens[2, 13] == ord("=") and forwards == max(result.nfe)
    for row in (0, 2):
        mine = {name: value[row : row + 1] for name, value in own.items()}
        alone = sample_jit(sampler, model.denoiser, prompt[row : row + 1], prompt_lengths[row : row + 1], **mine)
        assert_same_row(alone, 0, result, row)


@pytest.mark.parametrize(
    "room",
    [{}, {"prefix_cache": 1 << 20, "prefill_chunk": 16}, {"prefix_cache": 1 << 20, "buckets": True, "draws": True}],
    ids=["plain", "chunks", "buckets and draws"],
)
def test_requests_of_a_block_diffusion_model_bring_their_own_form(models, llada_tiny, room) -> None:
    """Each gets the answer of `generate` alone: prompts read in pieces, beginnings shared, programs of any size."""
    model = dataclasses.replace(models("sdar"), tokenizer=llada_tiny.tokenizer)
    shape = {"gen_length": 24, "block_length": 8}
    engine = Engine(model, "threshold:threshold=0.3", slots=2, prompt_length=128, constraint_states=64, **room, **shape)
    draw = {"temperature": 0.9} if "draws" in room else {}
    asked = [{"regex": "[0-9]{2,9}=[0-9]+"}, {}, {"regex": "(yes|no)!", **draw}, {"regex": "[a-f]{24}"}, {**draw}]
    prompts = [SYSTEM * (1 + number % 2) + list(b"Why?") for number in range(len(asked))]
    pairs = enumerate(zip(prompts, asked, strict=True))
    requests = [engine.submit(engine.request(prompt, seed=number, **own)) for number, (prompt, own) in pairs]
    assert len(list(engine.results())) == len(asked)
    wait_until(lambda: not engine.compiling)
    assert any(request.cached for request in requests) == ("prefix_cache" in room)
    for number, (request, own) in enumerate(zip(requests, asked, strict=True)):
        sampler = make_sampler(model, "threshold:threshold=0.3", **shape, **own)
        (alone,) = generate(model, [prompts[number]], sampler=sampler, seed=number)
        assert (request.generation.tokens, request.generation.nfe) == (alone.tokens, alone.nfe)
        assert "regex" not in own or re.fullmatch(own["regex"], request.generation.text)


# Meshes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "axes"),
    [("llada", {"data": 2}), ("llada", {"tensor": 2}), ("sdar", {"data": 2, "tensor": 2})],
    ids=["llada, data", "llada, tensor", "sdar, both"],
)
def test_on_a_mesh(models, family, axes) -> None:
    """A form for all rows, and one for each, are those of one device."""
    whole = models(family)
    whole = dataclasses.replace(whole, tokenizer=models("llada").tokenizer)
    split = dataclasses.replace(dllm_jax.load(whole.folder, mesh=make_mesh(**axes)), tokenizer=whole.tokenizer)
    options = {"rule": "threshold", "threshold": 0.3, "gen_length": 16, "block_length": 8}
    texts, pattern = ["Is it so?", "Why?"], "(yes|no), [a-z ]{4,9}!"
    asked = [{"regex": pattern}, {"regex": "[0-9]{2,9}=[0-9]+"}, {}]

    def answers(model: Model) -> list:
        shared = generate(model, texts, regex=pattern, temperature=0.7, **options)
        engine = Engine(model, slots=2, prompt_length=32, constraint_states=64, **options)
        own = [engine.submit(engine.request(f"Q{n}", seed=n, **form)) for n, form in enumerate(asked)]
        list(engine.results())
        return [*shared, *(request.generation for request in own)]

    wanted, found = answers(first_layers(whole, 1)), answers(first_layers(split, 1))
    assert [(answer.tokens, answer.nfe) for answer in found] == [(answer.tokens, answer.nfe) for answer in wanted]
    assert all(re.fullmatch(pattern, answer.text) for answer in found[:3])


# Gaps -----------------------------------------------------------------------------------------------------------------

PIECES = [b"a", b"b", b"ab", b"", b""]


@pytest.mark.parametrize(
    ("patterns", "canvas"),
    [
        (["a*b", "(ab|b)+"], [HOLE, HOLE, 1, HOLE, HOLE]),
        (["b*a?", "b*"], [HOLE, HOLE, 1, HOLE, HOLE]),  # which gap a b belongs to is not open
        (["(a|b)+", "ab"], [HOLE, 0, 2, HOLE, HOLE]),
        (["ab", "b", "(ab)+"], [HOLE, 1, HOLE, 0, HOLE]),
        (["(ab)*b"], [HOLE, HOLE, HOLE, END, 2]),  # what the canvas comes with need not be text
    ],
)
def test_each_gap_has_its_own_form(patterns: list[str], canvas: list[int]) -> None:
    """What fits is what some completion has in which each gap alone matches its expression; generations are such."""
    constraint, gaps = gaps_constraint([bytes_of(pattern) for pattern in patterns], PIECES), []
    for place, token in enumerate(canvas):
        if token == HOLE:
            gaps = [*gaps[:-1], [*gaps[-1], place]] if gaps and gaps[-1][-1] == place - 1 else [*gaps, [place]]
    texts = lambda tokens: [b"".join(PIECES[tokens[at]] for at in gap).decode() for gap in gaps]
    choices = itertools.product(*(range(3) if token == HOLE else [token] for token in canvas))
    fits = lambda tokens: all(map(re.fullmatch, patterns, texts(tokens)))
    answers = [tokens for tokens in choices if fits(tokens)]
    assert len(gaps) == len(patterns) and 0 < len(answers) < 3 ** sum(map(len, gaps))
    constraint.check(G, np.where(np.asarray(canvas) == HOLE, -1, canvas))
    allowed, _ = look(constraint, np.asarray([canvas], np.int32), np.asarray([0]), G)
    for at in itertools.chain(*gaps):
        np.testing.assert_array_equal(allowed[0, at], np.isin(np.arange(V), [tokens[at] for tokens in answers]))
    for block_length in (5, 2):
        sampler = BlockSampler(Threshold(0.0), G, block_length, sampling=Sampling(1.0), constraint=constraint)
        many = jnp.tile(jnp.asarray([canvas], jnp.int32), (8, 1))
        found = sample_jit(sampler, NOISY, jnp.zeros((8, 1), jnp.int32), key=keys(8), given=many)
        assert all(fits(tokens) for tokens in found.tokens.tolist())


TEXT = "Q: two and two?\nA:<gap:3>. Sure:<gap:4>!"


def test_a_template_has_a_form_for_each_gap(llada) -> None:
    """Of texts and schemas, of any text, and of several templates at once."""
    found = infill(llada, [TEXT, "Is<gap:2>? <gap:7>"], regex=[" ?[0-9]{2,3}", "[a-z]+"], block_length=8)
    for one in found:
        assert re.fullmatch(" ?[0-9]{2,3}", one.gaps[0]) and re.fullmatch("[a-z]+", one.gaps[1])
    found = infill(llada, TEXT, json_schema=[{"enum": [125, 300]}, None], block_length=8)
    assert found.gaps[0] in ("125", "300")


@pytest.mark.parametrize(
    ("text", "options", "word"),
    [
        (TEXT, {"regex": ["[0-9]+"]}, "length of regex is 1"),
        ("a<gap:3><gap:2>", {"regex": ["[0-9]+", None]}, "adjoin"),
        (TEXT, {"regex": ["[0-9]{2}", None]}, "given"),
        (TEXT, {"regex": ["[0-9]+", "é"]}, "matches"),
        (TEXT, {"regex": ["[0-9]+", ""]}, "regex is ''"),
        (TEXT, {"regex": []}, "length of regex is 0"),
        (TEXT, {"regex": ["[a-z]+", None], "json_schema": [{}, None]}, "both"),
    ],
)
def test_forms_that_gaps_cannot_have_are_refused(llada, text, options, word) -> None:
    with refuses(word):
        infill(llada, text, **options)


def test_forms_of_gaps_have_a_bound_together(llada, monkeypatch) -> None:
    monkeypatch.setattr(automaton, "MOST_STATES", 40)
    with refuses("states, of 40"):
        infill(llada, TEXT, regex=["[a-z]{25}", "[a-z]{25}"])


def test_a_form_that_nothing_of_this_length_has_is_refused(llada) -> None:
    """Where no end token may follow an answer, and where no gaps are."""
    with refuses("16 tokens", "form"):
        generate(llada, "Why?", gen_length=16, regex="[0-9]{3}", suppress="ends")
    with refuses("16 tokens", "form"):
        generate(llada, "Why?", gen_length=16, regex=["[0-9]+", "[a-z]+"])


# Where forms are refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_their_own_keep_no_form(llada, name: str) -> None:
    for form in ({"regex": "a+"}, {"json_schema": {"type": "null"}}):
        with refuses(name, *form, "name a rule"):
            make_sampler(llada, name, gen_length=16, **form)


def test_drafts_over_a_causal_context_keep_no_form(nemotron_tiny) -> None:
    with refuses("regex", "causal context"):
        make_sampler(nemotron_tiny, "threshold", gen_length=16, regex="a+")
    with refuses("ContextBlocks", "constraint_states"):
        Engine(nemotron_tiny, "threshold", gen_length=16, slots=1, constraint_states=32)
