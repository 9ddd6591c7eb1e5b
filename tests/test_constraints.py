"""Constraints on the form of answers: exact against all completions, and every finished answer is accepted."""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_same_row, one_error, refuses, wait_until
from test_engine import EOS, MASK, ROWS, first_layers, keys

from dllm_jax import FunctionDenoiser, Model
from samplers import (
    EB,
    BlockSampler,
    Credit,
    Dream,
    DualCache,
    Dynamic,
    Engine,
    Factor,
    Hierarchical,
    LLaDA,
    NoCache,
    PrefixCache,
    Sampling,
    Smoothing,
    Threshold,
    TopK,
    VicinityCache,
    generate,
    infill,
    make_sampler,
    sample_jit,
)
from samplers import canvas as canvases
from samplers.cli import sample as cli
from samplers.constraints import automaton as automata
from samplers.constraints.automaton import bytes_of, constraint_of, schema_regex, token_constraint
from samplers.constraints.byte_table import is_balanced
from samplers.constraints.constraint import DEAD, START, Constraint
from samplers.engine.program import run_steps_jit
from samplers.rules.base import Change
from samplers.text.prompts import pad_prompts
from samplers.tokens.predictions import given, predict

# The sets, against all completions -----------------------------------------------------------------------------------

V, G, W, END, HOLE, DEPTH = 5, 5, 3, 3, 4, 40  # tokens 0 to 2 are text, then the end token and the mask


def automaton(seed: int, states: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """A random automaton over text tokens, which end tokens may follow where it accepts: states [Q, V] and accept [Q],
    the last state being that after an end token."""
    draw = np.random.default_rng(seed)
    table = np.zeros((states + 1, V), np.int16)
    table[START:states, :END] = draw.integers(0, states, (states - 1, END))
    accept = np.append(draw.random(states) < 0.4, True)
    accept[DEAD] = False
    accept[draw.integers(START, states)] = True
    table[np.flatnonzero(accept), END] = states
    return table, accept


def accepted(table: np.ndarray, accept: np.ndarray, tokens) -> bool:
    state = START
    for token in tokens:
        state = table[state, token]
    return bool(accept[state])


def constrained(seeds) -> list[tuple[np.ndarray, np.ndarray, Constraint]]:
    """Random automata that accept something of some length up to G."""
    found = []
    for seed in seeds:
        table, accept = automaton(seed)
        try:
            constraint = token_constraint(table, accept)
            constraint.check(G)
        except Exception as error:
            assert "matches" in str(error) or "shortest" in str(error), error
            continue
        found.append((table, accept, constraint))
    return found


def per_row(constraints: list[Constraint]) -> Constraint:
    states, classes = (max(sizes) for sizes in zip(*(one.sizes for one in constraints), strict=True))
    grown = [one.padded(states, classes) for one in constraints]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *grown)


def flat(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return jnp.zeros((*tokens.shape, V))


NOTHING = FunctionDenoiser(flat, mask_id=HOLE, eos_id=END)


@functools.partial(jax.jit, static_argnums=3)
def look(constraint: Constraint, given_tokens: jax.Array, start: jax.Array, width: int):
    """What fits in windows from position `start` [B] of canvases that come with tokens."""
    batch = given_tokens.shape[0]
    prompt = jnp.zeros((batch, 1), jnp.int32)
    canvas = canvases.begin(NOTHING, prompt, None, gen_length=G, length=G, key=jax.random.key(0), given=given_tokens)
    _, window = constraint.look(constraint.begin(canvas), canvas, 1 + start, width)
    return window.allowed(jnp.arange(V)), window


def cases(count: int):
    """Automata, each with a canvas that some answer of it leads through: a random part of its tokens is written, all of
    them before a random position, at which a window begins."""
    draw, found = np.random.default_rng(0), []
    for table, accept, constraint in constrained(range(count)):
        answers = [x for x in itertools.product(range(HOLE), repeat=G) if accepted(table, accept, x)]
        assert answers
        answer = answers[draw.integers(len(answers))]
        start = int(draw.integers(G - W + 1))
        written = (draw.random(G) < 0.4) | (np.arange(G) < start)
        canvas = np.where(written, answer, HOLE)
        fitting = [x for x in answers if all(a == b for a, b in zip(canvas, x, strict=True) if a != HOLE)]
        found.append((table, accept, constraint, canvas, start, fitting))
    return found


CASES = cases(DEPTH)


def test_what_fits_is_what_some_completion_has() -> None:
    """Of random automata and canvases, one per row: at an undecided position the allowed tokens are exactly those of
    the completions that are accepted; all rows share a program, and a row's is that of its own constraint alone."""
    assert len(CASES) > DEPTH // 2
    canvas, start = np.stack([case[3] for case in CASES]), np.asarray([case[4] for case in CASES])
    rows = per_row([case[2] for case in CASES])
    allowed, _ = look(rows, canvas, start, W)
    for row, (_, _, own, cells, first, fitting) in enumerate(CASES):
        wanted = np.zeros((W, V), bool)
        for place in range(W):
            at = first + place
            if cells[at] != HOLE:
                continue
            wanted[place, [x[at] for x in fitting]] = True
            np.testing.assert_array_equal(allowed[row, place], wanted[place])
        if row < 3:
            alone, _ = look(own.padded(*rows.sizes), cells[None], np.asarray([first]), W)
            np.testing.assert_array_equal(alone[0], allowed[row])


def test_tokens_that_fit_alone_but_not_together_wait() -> None:
    """Of all that is chosen, what fits with the chosen further left is written: brute force says the same."""
    canvas, start = np.stack([case[3] for case in CASES]), np.asarray([case[4] for case in CASES])
    _, window = look(per_row([case[2] for case in CASES]), canvas, start, W)
    tokens = np.take_along_axis(canvas, start[:, None] + np.arange(W), axis=1)
    undecided = tokens == HOLE
    draw, waited = np.random.default_rng(1), 0
    chosen = undecided & (draw.random(undecided.shape) < 0.7)
    fits = np.asarray(window.allowed(jnp.arange(V)))
    words = np.where(chosen, np.argmax(fits * draw.random(fits.shape), axis=2), tokens)
    change = window.joint(Change(jnp.asarray(words), jnp.asarray(undecided & ~chosen)))
    left = np.asarray(change.undecided)
    for row, (_, _, _, _, first, fitting) in enumerate(CASES):
        kept = fitting
        for at in range(W):
            if not undecided[row, at]:
                continue
            fewer = [x for x in kept if x[first + at] == words[row, at]]
            writes = bool(chosen[row, at] and fewer)
            assert left[row, at] == (not writes), (row, at)
            assert change.tokens[row, at] == (words[row, at] if writes else HOLE)
            kept = fewer if writes else kept
            waited += chosen[row, at] and not writes
    assert waited > 3  # some could not be written together


def test_one_token_that_fits_is_certain() -> None:
    """Scores are of the distribution over what fits; a token's log-probability stays the model's own."""
    logits = jnp.asarray([[[2.0, 1.0, 0.0, -1.0, 5.0]] * 2])
    only = jnp.asarray([[[False, True, False, False, False], [True, True, False, False, False]]])
    found = predict(
        given(logits), Sampling(), mask_id=4, score_from="raw", draw=None, allowed=lambda ids: only[..., ids]
    )
    two = jax.nn.softmax(logits[0, 0, :2])
    np.testing.assert_array_equal(found.token, [[1, 0]])
    np.testing.assert_allclose(found.confidence, [[1.0, two[0]]], rtol=1e-6)
    np.testing.assert_allclose(found.margin, [[1.0, two[0] - two[1]]], rtol=1e-5)
    np.testing.assert_allclose(found.entropy, [[0.0, -(two * jnp.log(two)).sum()]], rtol=1e-5, atol=1e-7)
    own = jax.nn.log_softmax(logits[0, 0])
    np.testing.assert_allclose(found.logprob, [[own[1], own[0]]], rtol=1e-6)
    assert not found.mask_wins.any()


# Whole generations ---------------------------------------------------------------------------------------------------

LENGTH = 10
RULES = {
    "threshold": Threshold(0.5),
    "all at once": Threshold(0.0),
    "topk": TopK(3, proxy="margin"),
    "eb": EB(3.0),
    "factor": Factor(3.0),
    "llada": LLaDA(6),
    "dream": Dream(6),
    "credit": Credit(0.4),
    "hierarchical": Hierarchical(0.4, 0.1),
    "dynamic": Dynamic(0.4, steps=3),
}


def noisy(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Logits that are a hash of place, token and the row's canvas: random, and other ones after every commit."""
    seen = jnp.cumsum(tokens * (1 + jnp.arange(tokens.shape[1])), axis=1)[:, -1:, None]
    mixed = (tokens[..., None] * 7 + jnp.arange(V) * 131 + jnp.arange(tokens.shape[1])[:, None] * 17 + seen * 29) % 97
    return jnp.sin(mixed * 12.9898) * 4


NOISY = FunctionDenoiser(noisy, mask_id=HOLE, eos_id=END)
AUTOMATA = [found for found in constrained(range(100, 180)) if found[2].least[0] > 1][:6]


@pytest.mark.parametrize("name", RULES)
def test_every_generation_is_accepted(name: str) -> None:
    """Whatever the logits, the rule, the blocks and the temperature: every row is accepted, and a row with its own
    constraint is that row alone with the constraint shared. Each forward writes something."""
    rule, count = RULES[name], len(AUTOMATA)
    rows = per_row([constraint for _, _, constraint in AUTOMATA])
    prompt = jnp.asarray(np.random.default_rng(2).integers(0, END, (count, 3)), jnp.int32)
    lengths = jnp.asarray([LENGTH - row % 3 for row in range(count)])
    for block_length, temperature in [(LENGTH, None), (5, 1.0)]:
        options = {"gen_length": LENGTH, "block_length": block_length, "sampling": Sampling(temperature)}
        sampler = BlockSampler(rule, constraint=rows, **options)
        found = sample_jit(sampler, NOISY, prompt, key=keys(count), gen_lengths=lengths)
        for row, (table, accept, _) in enumerate(AUTOMATA):
            tokens = np.asarray(found.tokens[row, : lengths[row]])
            assert accepted(table, accept, tokens), (row, tokens)
            assert len(np.unique(found.decoded_at[row, : lengths[row]])) == found.nfe[row]
        if name == "threshold" and temperature is not None:
            one = BlockSampler(rule, constraint=AUTOMATA[1][2].padded(*rows.sizes), **options)
            alone = sample_jit(one, NOISY, prompt[1:2], key=keys(count)[1:2], gen_lengths=lengths[1:2])
            assert_same_row(alone, 0, found, 1)


def test_logits_that_are_not_finite_end_in_an_accepted_row() -> None:
    """`broken_at` says that it means nothing, but it has the form, and it ends."""
    broken = FunctionDenoiser(lambda tokens, lengths: noisy(tokens, lengths) * jnp.nan, mask_id=HOLE, eos_id=END)
    table, accept, constraint = AUTOMATA[0]
    sampler = BlockSampler(Threshold(0.5), gen_length=LENGTH, constraint=constraint)
    found = sample_jit(sampler, broken, jnp.zeros((1, 1), jnp.int32))
    assert accepted(table, accept, found.tokens[0]) and found.broken_at[0] == 0


def test_given_tokens_are_part_of_the_answer() -> None:
    """Tokens in later blocks bind earlier ones."""
    for table, accept, constraint in AUTOMATA:
        answers = (x for x in itertools.product(range(HOLE), repeat=LENGTH) if accepted(table, accept, x))
        answer = next(itertools.islice(answers, 40, None), None)
        if answer is None:
            continue
        canvas = np.where(np.arange(LENGTH) % 3 == 2, answer, HOLE).astype(np.int32)
        sampler = BlockSampler(Threshold(0.0), gen_length=LENGTH, block_length=2, constraint=constraint)
        found = sample_jit(sampler, NOISY, jnp.zeros((1, 1), jnp.int32), given=canvas[None])
        tokens = np.asarray(found.tokens[0])
        assert accepted(table, accept, tokens) and (tokens[2::3] == canvas[2::3]).all()


@pytest.fixture(scope="module")
def llada(llada_tiny) -> Model:
    return first_layers(llada_tiny, 2)


def sums(vocab_size: int) -> Constraint:
    """Digits, an equals sign, digits, a full stop; then end tokens."""
    states = np.zeros((7, vocab_size), np.int16)
    digits = [ord(x) for x in "0123456789"]
    states[1, digits], states[2, digits], states[3, digits], states[4, digits] = 2, 2, 4, 4
    states[2, ord("=")], states[4, ord(".")] = 3, 5
    states[[5, 6], EOS] = 6
    return token_constraint(states, np.asarray([False] * 5 + [True] * 2))


@pytest.mark.parametrize(
    "cache", [NoCache(), PrefixCache(), DualCache(), VicinityCache()], ids=lambda x: type(x).__name__
)
def test_cached_loops_keep_it(llada, cache) -> None:
    """A model's own answers, with smoothing and guidance too, in a batch as alone."""
    width, length = 96, 12
    prompt, lengths = pad_prompts(ROWS, width)
    extra = {"smoothing": Smoothing()} if isinstance(cache, PrefixCache) else {}
    extra |= {"guidance": 0.5} if isinstance(cache, DualCache) else {}
    options = {"gen_length": length, "block_length": 4, "cache": cache, "sampling": Sampling(0.8), **extra}
    sampler = BlockSampler(Threshold(0.3), constraint=sums(llada.config.vocab_size), **options)
    found = sample_jit(sampler, llada.denoiser, prompt, lengths, key=keys(4))
    for row in range(4):
        text = "".join(map(chr, found.tokens[row, : found.lengths[row]]))
        assert re.fullmatch(r"[0-9]+=[0-9]+\.", text), text
        assert MASK not in found.tokens[row]
    if isinstance(cache, DualCache):
        alone = sample_jit(sampler, llada.denoiser, prompt[1:2], lengths[1:2], key=keys(4)[1:2])
        assert_same_row(alone, 0, found, 1)


# Texts ---------------------------------------------------------------------------------------------------------------

PATTERNS = [
    r"[0-9]{1,3}(\.[0-9]+)?",
    r"(yes|no|it depends), because [a-z ]{4,9}\.",
    r"a*(b|ab?)c+",
    r"é[à-ü]{2}|\p{Greek}+",
    r"[^x]{3}",
    r"^(\^|a)+\$$",
]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}, "s": {"enum": ["a", 'b"\\', None, 2.5]}},
    "required": ["n", "ok", "s"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bytes_match_as_the_expression_does(pattern: str) -> None:
    """Texts that match, and texts one character away."""
    machine, draw = bytes_of(pattern), np.random.default_rng(0)
    alphabet = "0123456789.abcxyz ,éàπω"
    samples = {"^a$", "12", "3.5", "yes, because it is.", "aabcc", "éàâ", "πω", "abc", "", "it depends, because of it."}
    for _ in range(200):
        text = list(draw.choice(sorted(samples)))
        at = int(draw.integers(len(text) + 1))
        text[at : at + int(draw.integers(2))] = [str(draw.choice(list(alphabet)))] * int(draw.integers(2))
        samples.add("".join(text))
    wanted = re.compile(pattern.replace(r"\p{Greek}", "[α-ω]"))
    hits = 0
    for text in samples:
        state = START
        for byte in text.encode():
            state = machine.table[state, byte]
        assert bool(machine.accept[state]) == bool(wanted.fullmatch(text)), text
        hits += bool(machine.accept[state])
    assert hits


def test_tokens_of_many_bytes_are_their_bytes() -> None:
    """Every token from every state is its bytes one after another; those that lead everywhere alike share a class."""
    pieces = [bytes([i]) for i in range(256)] + [b"12", b"1.5", b".5", b"0.25", b"5.5.5", "é".encode(), b"", b"<end>"]
    machine, end = bytes_of(PATTERNS[0]), len(pieces) - 1
    constraint = constraint_of(machine, pieces, [end])
    classes, table = constraint.classes[0], constraint.table[0]
    reach = {START: START}  # of the constraint -> of the bytes; states that nothing comes through are dead
    todo = [START]
    while todo:
        state = todo.pop()
        for token, piece in enumerate(pieces[:end]):
            other = reach[state]
            for byte in piece:
                other = int(machine.table[other, byte])
            found = int(table[classes[token], state])
            assert (found == DEAD) == (not piece or other == DEAD), (piece, state)
            if found != DEAD and found not in reach:
                reach[found] = other
                todo.append(found)
            assert found == DEAD or reach[found] == other
        after = table[classes[end], state]
        assert (after != DEAD) == machine.accept[reach[state]] == constraint.accept[0, state]
    assert len({classes[pieces.index(x)] for x in (b"1", b"2", b"12")}) == 2 and constraint.least == [1]


def test_schemas_are_json_of_their_kind() -> None:
    machine = bytes_of(schema_regex(SCHEMA))

    def matches(text: str) -> bool:
        state = START
        for byte in text.encode():
            state = machine.table[state, byte]
        return bool(machine.accept[state])

    for value in SCHEMA["properties"]["s"]["enum"]:
        assert matches(json.dumps({"n": -3, "ok": True, "s": value}))
    assert not matches('{"n": 1.5, "ok": true, "s": "a"}') and not matches('{"n": 1, "ok": true}')
    machine = bytes_of(schema_regex({"type": "string", "pattern": "^a|b$"}))
    assert matches('"a"') and matches('"b"') and not matches('"a') and not matches('b"')
    either = bytes_of(schema_regex({"oneOf": [{"type": "integer"}, {"type": "number"}]}))
    assert either.accept[either.table[START, ord("3")]]  # which is both, and so not oneOf's
    machine = bytes_of(schema_regex({"type": "object"}))
    deep = {"a": {"b": [1, "é", None], "c": {}}, "d": [[-1.5e-7]], "e": 'quote " and \\ and \n'}
    assert matches(json.dumps(deep, ensure_ascii=False)) and matches("{}") and not matches('{"a": {"b": {"c": {}}}}')


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "integer", "minimum": 3}, "minimum"),
        ({"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2}, "maxProperties"),
        ({"type": "string", "pattern": "[a-z]+", "minLength": 3}, "minLength, pattern"),
        ({"type": "object", "anyOf": [{"type": "null"}]}, "anyOf, type"),
        ({"type": "object", "properties": {'a"b': {"type": "null"}}}, "property"),
        ({"type": "object", "properties": {}, "required": ["x"]}, "requires 'x'"),
        ({"type": "string", "format": "email"}, "email"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"anyOf": [{"type": "string"}, {"not": {"type": "null"}}]}, "not"),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "allOf"),
        ({"type": "string", "pattern": ".*"}, "quotes"),
        ({"type": "nothing"}, "json_schema"),
        ({"type": "string", "default": {1, 2}}, "JSON"),
        ("object", "json_schema"),
    ],
)
def test_what_a_schema_cannot_keep_is_refused(schema, word: str) -> None:
    with refuses(word):
        schema_regex(schema)


BROKEN = [("(", "regex"), ("a)(b", "regex"), ("(?=a)b", "regex"), ("(a|b)*a(a|b){12}", "states")]


@pytest.mark.parametrize(("pattern", "word"), BROKEN)
def test_expressions_that_cannot_be_compiled_are_refused(pattern: str, word: str) -> None:
    with refuses(word):
        bytes_of(pattern)


@pytest.mark.parametrize("pattern", ["a", "(a)[)](b)", r"\)(a)[]()]\(", "(a(b)|c)"])
def test_pairs_of_parentheses_are_found_without_building_anything(pattern: str) -> None:
    assert is_balanced(pattern) and is_balanced(schema_regex({"type": "object"}))
    assert not any(map(is_balanced, (f"{pattern})(", f"[{pattern}[a]]", f"(?x){pattern}")))


@pytest.mark.parametrize("rule", ["threshold", "eb", "topk"])
def test_texts_match(llada, rule: str) -> None:
    """Also at a temperature, and with blocks that end in the middle of the answer."""
    pattern = r"(yes|no|it depends), because [a-z ]{4,9}\."
    options = {"rule": rule, "gen_length": 32, "block_length": 8, "temperature": 0.7, "regex": pattern}
    for answer in generate(llada, ["Is it so?", "Why?"], **options):
        assert re.fullmatch(pattern, answer.text), answer.text


def test_texts_parse(llada) -> None:
    options = {"gen_length": 40, "block_length": 10, "suppress": ["7"]}
    (answer,) = generate(llada, ["Q: one?"], json_schema=SCHEMA, **options)
    found = json.loads(answer.text)
    assert found.keys() == {"n", "ok", "s"} and type(found["n"]) is int and found["s"] in ("a", 'b"\\', None, 2.5)
    assert "7" not in answer.text


def test_the_command_takes_a_schema_and_an_expression(llada_tiny, tmp_path, capsys) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    model = ["--model", str(llada_tiny.folder), "--gen-length", "40", "--no-live"]
    assert cli.main(["Q: one?", *model, "--json-schema", str(tmp_path / "schema.json"), "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert json.loads(line["text"]).keys() == {"n", "ok", "s"}
    assert cli.main(["Q: one?", *model, "--explain", "--regex", "(a|b)+"]) == 0
    assert "(a|b)+" in capsys.readouterr().out
    assert cli.main(["Q: one?", *model, "--json-schema", str(tmp_path / "none.json")]) == 2
    assert "--json-schema" in one_error(capsys)


def test_a_template_and_a_form(llada) -> None:
    """The form is of the text from the first gap on."""
    found = infill(llada, "Q: two and two?\nA:<gap:3>. Sure:<gap:2>", regex=r" [0-9]{2}\. Sure:[a-z]{2}")
    assert re.fullmatch(r" [0-9]{2}", found.gaps[0]) and re.fullmatch("[a-z]{2}", found.gaps[1])
    with refuses("given"):
        infill(llada, "Q: two and two?\nA:<gap:3>. Sure:<gap:2>", regex=r" [0-9]{2}\. Cure:[a-z]{2}")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"regex": "[a-z]{20}"}, "20 tokens"),
        ({"regex": "é"}, "matches"),
        ({"regex": ""}, "regex"),
        ({"regex": "a+", "json_schema": SCHEMA}, "both"),
        ({"regex": "a+", "stop": ["b"]}, "stop"),
        ({"regex": "a+", "rule": "remask"}, "Remask"),
        ({"regex": "a+", "rule": "edit"}, "Edit"),
        ({"regex": "a+", "rule": "dream", "alg": "origin"}, "Dream"),
        ({"regex": "a+", "sampler": "d2f"}, "regex"),
        ({"regex": "a+", "sampler": "leftright"}, "regex"),
        ({"regex": "7", "suppress": ["7"]}, "matches"),
    ],
)
def test_what_cannot_keep_a_form_is_refused(llada, options, word: str) -> None:
    with refuses(word):
        make_sampler(llada, gen_length=16, **options)


def test_a_missing_package_is_named(llada, monkeypatch) -> None:
    monkeypatch.setattr(automata.importlib.util, "find_spec", lambda name: None)
    with refuses("outlines-core", "dllm_jax[constraints]"):
        make_sampler(llada, gen_length=16, regex="never seen before")


# Requests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [False, True])
def test_requests_bring_their_own_form(llada, buckets: bool) -> None:
    """Requests with different forms, and with none, in one engine: each gets the answer of `generate` alone, and none
    compiles a program."""
    options = {"gen_length": 24, "block_length": 8, "cache": "prefix"}
    room = {"slots": 2, "prompt_length": 64, "constraint_states": 128}
    room["top_logprobs"] = 0 if buckets else 2
    engine = Engine(llada, "threshold:threshold=0.3", draws=not buckets, buckets=buckets, **room, **options)
    engine.compile()
    wait_until(lambda: not engine.compiling)
    programs = run_steps_jit._cache_size()
    asked = [
        {"regex": "[0-9]{2,9}=[0-9]+"},
        {},
        {"regex": "(yes|no)!"} | ({} if buckets else {"temperature": 0.9}),
        {} if buckets else {"top_logprobs": 2},
    ]
    requests = [engine.submit(engine.request(f"Q: number {i}?", seed=i, **own)) for i, own in enumerate(asked)]
    assert all(list(engine.results()))
    if not buckets:
        assert run_steps_jit._cache_size() == programs
    for number, (request, own) in enumerate(zip(requests, asked, strict=True)):
        assert (request.top is not None) == bool(own.pop("top_logprobs", 0))
        sampler = make_sampler(llada, "threshold:threshold=0.3", **options, **own)
        (alone,) = generate(llada, [f"Q: number {number}?"], sampler=sampler, seed=number)
        assert request.generation.tokens == alone.tokens and request.generation.nfe == alone.nfe
        assert "regex" not in own or re.fullmatch(own["regex"], request.generation.text)


def test_what_an_engine_has_no_room_for_is_refused(llada) -> None:
    options = {"gen_length": 16, "prompt_length": 16, "slots": 1}
    engine = Engine(llada, "threshold", constraint_states=32, **options)
    for own, word in [
        ({"regex": "[a-z]{40}"}, "32"),
        ({"regex": "[a-z]{20}"}, "20 tokens"),
        ({"regex": "[a-z]+", "stop": ["b"]}, "stop"),
        ({"regex": "[a-z]{9}", "gen_length": 8}, "9 tokens"),
        ({"regex": "a", "json_schema": SCHEMA}, "both"),
    ]:
        with refuses(word):
            engine.request("Q", **own)
    with refuses("constraint_states"):
        Engine(llada, "threshold", **options).request("Q", regex="a+")
    with refuses("constraint_states"):
        Engine(llada, "threshold", regex="a+", constraint_states=32, **options)
    with refuses("constraint_states"):
        Engine(llada, "d2f", constraint_states=32, **options)
    with refuses("Remask"):
        Engine(llada, "remask", constraint_states=32, **options)
