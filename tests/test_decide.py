"""Typed decisions: against combinations scored by hand, by models whose slots depend on each other and by those whose
do not; rows are independent; and mistakes are one sentence."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_error, refuses
from test_renoise import CONFIG as CANVAS

import dllm_jax
from convert import embedded
from dllm_jax import Denoiser, FunctionDenoiser, make_mesh
from dllm_jax.models.denoiser import Span
from dllm_jax.text.tokenizer import load_tokenizer
from samplers import Renoise, Sampling, decide, sample_jit
from samplers.cli import decide as command
from samplers.cli import sample as cli
from samplers.decisions.questions import prepare_questions
from samplers.text.prompts import encode_prompt

A, B = 97, 98  # what the byte-level tokenizer makes of "a" and "b"
FIELDS = {"answer": ["yes", "no"], "urgency": range(1, 6)}
PROMPTS = ["Is the sky blue?", "Is a very much longer question answered as it is alone?\n", [65, 66, 67]]


def with_function(model, fn):
    """The model with its tokenizer, and this function from tokens to logits in the place of its parameters."""
    config, made = model.config, dataclasses.replace(model)
    made.__dict__["denoiser"] = FunctionDenoiser(fn, config.mask_id, config.eos_id, vocab_size=config.vocab_size)
    return made


@pytest.fixture(scope="module")
def independent(llada_tiny):
    """A position's logits depend on its distance to the end alone, so slots know nothing of each other."""
    table = 3.0 * jax.random.normal(jax.random.key(0), (64, llada_tiny.config.vocab_size))
    place = lambda tokens, lengths: lengths[:, None] - 1 - jnp.arange(tokens.shape[1])
    model = with_function(llada_tiny, lambda tokens, lengths: table[jnp.clip(place(tokens, lengths), 0, 63)])
    return model, np.asarray(jax.nn.log_softmax(table), np.float64)


PAIR = np.asarray([[0.48, 0.12], [0.04, 0.36]])  # p(first, second) of "a" and "b"


@pytest.fixture(scope="module")
def dependent(llada_tiny):
    """Two slots after a prompt of one token, with the joint distribution `PAIR` in every state of the other."""
    pair, mask, size = jnp.asarray(PAIR), llada_tiny.config.mask_id, llada_tiny.config.vocab_size

    def given(table, other):
        """Of a slot [B, V], from the table [own, other] and the other's tokens [B]."""
        own = table / table.sum(axis=0)
        at = jnp.where(other == A, 0, 1)
        shares = jnp.where((other == mask)[:, None], table.sum(axis=1), own[:, at].T)
        return jnp.full((len(other), size), -30.0).at[:, jnp.asarray([A, B])].set(jnp.log(shares))

    def fn(tokens, lengths):
        logits = jnp.zeros((*tokens.shape, size))
        logits = logits.at[:, 1].set(given(pair, tokens[:, 2]))
        return logits.at[:, 2].set(given(pair.T, tokens[:, 1]))

    return with_function(llada_tiny, fn)


def by_hand(logprobs, fields, ids_of, after):
    """Scores of all combinations where slots are independent: [values of the first, values of the second].

    Args:
        after: tokens after each field's slot, the end token included; the second field's values have one length.
    """
    second = [ids_of(value) for value in fields[1]]
    score = lambda ids, end: sum(logprobs[end + len(ids) - 1 - at, token] for at, token in enumerate(ids))
    one = np.asarray([score(ids_of(value), after[0] + len(second[0])) for value in fields[0]])
    return one[:, None] + np.asarray([score(ids, after[1]) for ids in second])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_independent_slots_are_each_combination_scored(independent, temperature):
    """The first field's values have one to three tokens, the second's two."""
    model, logprobs = independent
    fields = {"word": ["a", "no", "yes"], "n": range(10, 15)}
    ids_of = lambda value: [ord(c) for c in str(value)]
    scores = by_hand(logprobs, [*fields.values()], ids_of, (len(" and ") + len(".") + 1, len(".") + 1)) / temperature
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    options = {"template": "It is {word} and {n}.", "temperature": temperature}
    found = decide(model, "Q", fields, **options)
    joint = decide(model, "Q", fields, joint=True, **options)
    for decision in (found, joint):
        for name, own in zip(fields, (shares.sum(axis=1), shares.sum(axis=0)), strict=True):
            np.testing.assert_allclose([*decision.probabilities[name].values()], own, atol=1e-5)
    combinations = itertools.product(fields["word"], fields["n"])
    np.testing.assert_allclose([joint.joint[pair] for pair in combinations], shares.ravel(), atol=1e-5)
    assert joint.dependence < 1e-4 and found.joint is None and found.dependence is None
    assert found.nfe == joint.nfe == 1 and found.rows == 3
    best = np.unravel_index(shares.argmax(), shares.shape)
    assert found.values == joint.values == {"word": fields["word"][best[0]], "n": fields["n"][best[1]]}
    np.testing.assert_allclose(found.expected["n"], shares.sum(axis=0) @ np.arange(10, 15), atol=1e-4)
    assert set(found.expected) == {"n"}
    np.testing.assert_allclose(found.mass["n"], np.exp((scores * temperature)[0] - _word(logprobs)).sum(), rtol=1e-4)


def _word(logprobs):
    """The score of the first field's first value."""
    return logprobs[len(" and 10.") + 1, A]


def test_dependent_slots_are_told(dependent):
    found = decide(dependent, [[65]], {"one": ["a", "b"], "two": ["a", "b"]}, template="{one}{two}", joint=True)[0]
    np.testing.assert_allclose(np.reshape([*found.joint.values()], (2, 2)), PAIR, atol=1e-6)
    product = np.outer(PAIR.sum(axis=1), PAIR.sum(axis=0))
    np.testing.assert_allclose(found.dependence, (PAIR * np.log(PAIR / product)).sum(), atol=1e-6)
    assert found.values == {"one": "a", "two": "a"} and found.rows == 1 + 3
    np.testing.assert_allclose(found.mass["one"], 1.0, atol=1e-5)


@pytest.mark.parametrize(("gamma", "nfe"), [(None, 1), (0.0, 2), (0.68, 2), (0.7, 1)])
def test_the_surest_field_is_decided_first(dependent, gamma, nfe):
    """Entropies are 0.673 and 0.692 nats; the second is then read given the first."""
    fields = {"one": ["a", "b"], "two": ["a", "b"]}
    (found,) = decide(dependent, [[65]], fields, template="{one}{two}", gamma=gamma and gamma - 0.01)
    two = PAIR.sum(axis=0) if nfe == 1 else PAIR[0] / PAIR[0].sum()
    np.testing.assert_allclose([*found.probabilities["one"].values()], PAIR.sum(axis=1), atol=1e-6)
    np.testing.assert_allclose([*found.probabilities["two"].values()], two, atol=1e-6)
    assert (found.nfe, found.rows) == (nfe, nfe)


def by_forward(model, prompt, forward):
    """The probabilities of `FIELDS` with the default template, from one forward's logits [1, S, V] for each length."""
    ids, mask = encode_prompt(model, prompt), model.denoiser.mask_id
    spell = lambda text: [ord(c) for c in text]
    before = spell(("" if ids[-1] == 10 or not isinstance(prompt, str) else "\n") + "answer: ")
    shares = {}
    for value in ("yes", "no"):  # the second's canvas is that of the shortest values
        body = [*before, *[mask] * len(value), *spell("\nurgency: "), mask, model.denoiser.eos_id]
        logprobs = jax.nn.log_softmax(forward(jnp.asarray([ids + body]), len(ids)))[0]
        shares[value] = sum(logprobs[len(ids) + len(before) + at, ord(c)] for at, c in enumerate(value))
        urgency = [logprobs[len(ids) + len(body) - 2, ord(str(n))] for n in range(1, 6)]
    softmax = lambda scores: np.asarray(jax.nn.softmax(jnp.asarray(scores)))
    return softmax([shares["yes"], shares["no"]]), softmax(urgency)


def close_to(decision, own, atol=1e-4):
    for shares, wanted in zip(decision.probabilities.values(), own, strict=True):
        np.testing.assert_allclose([*shares.values()], wanted, atol=atol)


@pytest.mark.parametrize("name", ["llada_tiny", "dream_tiny", "lladamoe_tiny"])
def test_models_read_slots_as_their_forward_does(name, request):
    model = request.getfixturevalue(name)
    for prompt, found in zip(PROMPTS, decide(model, PROMPTS, FIELDS), strict=True):
        close_to(found, by_forward(model, prompt, lambda tokens, _: model.denoiser(tokens)))
        assert (found.nfe, found.rows) == (1, 2) and found.prompt_tokens == len(encode_prompt(model, prompt))


def test_a_causal_context(nemotron_tiny):
    """The prompt is read causally, and the canvas is drafted after its keys and values."""

    def forward(tokens, start):
        model, length = nemotron_tiny.denoiser, tokens.shape[1]
        causal = model.as_causal.forward(tokens[:, :start], jnp.asarray([start]))[1]
        room = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, length - start), (0, 0), (0, 0))), causal)
        span = Span(jnp.asarray([start]), length - start)
        hidden, _ = model.forward(tokens, jnp.asarray([length]), at=span, kv=room)
        return jnp.pad(model.logits(hidden), ((0, 0), (start, 0), (0, 0)))

    for prompt, found in zip(PROMPTS, decide(nemotron_tiny, PROMPTS, FIELDS), strict=True):
        close_to(found, by_forward(nemotron_tiny, prompt, forward))


def test_a_canvas_of_random_tokens(llada_tiny):
    """The decoder's first step, of the tokens that the sampler draws from the same key."""
    ids = {"vocab_size": llada_tiny.config.vocab_size, "eos_id": 128, "pad_id": 128, "end_ids": (128,)}
    config = CANVAS.replace(block_length=8, **ids)
    found = dllm_jax.random_model(config)
    params = {name: x * 8 if x.ndim > 1 else x for name, x in found.params.items()}
    model = dataclasses.replace(found, params=params, tokenizer=llada_tiny.tokenizer)
    given = jnp.asarray([[ord("x"), ord("="), -1, ord(";"), -1, 128, 128, 128]])
    key = jax.random.fold_in(jax.random.key(7), 0)[None]
    others = Sampling(suppress=jnp.asarray([*range(33), *range(127, config.vocab_size)]))
    sampler = Renoise(8, block_length=8, steps=1, stop=None, sampling=others)
    result = sample_jit(sampler, model.denoiser, jnp.asarray([[65, 66, 67]]), key=key, given=given)
    letters = [chr(token) for token in range(33, 127)]
    fields = {"one": letters, "two": letters}
    (decided,) = decide(model, [[65, 66, 67]], fields, template="x={one};{two}", seed=7)
    for name, at in (("one", 2), ("two", 4)):
        token = chr(int(result.tokens[0, at]))
        share = decided.probabilities[name][token] * decided.mass[name]
        np.testing.assert_allclose(np.log(share), result.logprobs[0, at], atol=1e-4)
        assert decided.values[name] == token
    other = decide(model, [[65, 66, 67]], fields, template="x={one};{two}", seed=8)[0]
    assert abs(np.subtract(*([*found.probabilities["one"].values()] for found in (other, decided)))).max() > 1e-3
    both = decide(model, [[65, 66, 67]] * 2, fields, template="x={one};{two}", seed=7)
    close_to(both[0], [[*shares.values()] for shares in decided.probabilities.values()])
    with refuses("a canvas 8"):
        decide(model, "A", fields, template="much longer {one} {two}")


@pytest.mark.parametrize("options", [{}, {"gamma": 0.0}, {"joint": True}])
def test_rows_are_independent(llada_tiny, options):
    together = decide(llada_tiny, PROMPTS, FIELDS, batch_size=4, **options)
    for prompt, found in zip(PROMPTS, together, strict=True):
        alone = decide(llada_tiny, [prompt], FIELDS, batch_size=32, **options)[0]
        assert (alone.values, alone.nfe, alone.rows) == (found.values, found.nfe, found.rows)
        close_to(alone, [[*shares.values()] for shares in found.probabilities.values()])
    assert decide(llada_tiny, [], FIELDS) == []


def test_a_mesh_decides_alike(llada_tiny):
    mesh = make_mesh(data=4, tensor=2)
    split = dllm_jax.load(llada_tiny.folder, mesh=mesh)
    wanted = decide(llada_tiny, PROMPTS, FIELDS, joint=True)
    for mine, own in zip(decide(split, PROMPTS, FIELDS, joint=True, batch_size=8), wanted, strict=True):
        close_to(mine, [[*shares.values()] for shares in own.probabilities.values()])
    with refuses("batch"):
        decide(split, PROMPTS, FIELDS, batch_size=6)


def test_spaces_are_where_the_tokenizer_has_them(llada_tiny):
    """With tokens `: ` and ` e`: a number's space is the piece's, and a word's that begins so is its own."""
    ids = {"vocab_size": 517, "eos_id": 0, "pad_id": 0, "mask_id": 1, "end_ids": (0, 2), "bos_id": 3}
    config = llada_tiny.config.replace(num_layers=1, **ids)
    tokenizer = load_tokenizer(embedded.source("word-problems"), config)
    model = dataclasses.replace(dllm_jax.random_model(config), tokenizer=tokenizer)
    fields = {"n": [35, 7], "word": ["even", "eggs"]}
    (question,) = prepare_questions(model, ["Q"], fields, template="n: {n}, it is {word}.", **PLAIN)
    texts = lambda rows: [tokenizer.decode(row) for row in rows]
    assert texts(question.form.pieces) == ["n: ", ", it is", ".<|endoftext|>"]
    assert [texts(field.ids) for field in question.form.fields] == [["35", "7"], [" even", " eggs"]]
    assert question.form.fields[0].lengths == [1]


def test_templates_and_values(llada_tiny):
    """Braces, spaces, JSON's spelling, chats, and the order of slots."""
    fields = {"flag": [True, False], "x": [0.5, 1, "one"], "text": ["a, b", "c"]}
    found = decide(llada_tiny, "Q", fields, template="{{{text}}} {flag}\n{x}", joint=True)
    assert list(found.values) == ["text", "flag", "x"] and set(found.probabilities["x"]) == {0.5, 1, "one"}
    assert found.expected == {} and len(found.joint) == 12 and sum(found.joint.values()) == pytest.approx(1.0)
    written = json.loads(json.dumps(found.to_json()))
    assert written["probabilities"]["flag"].keys() == {"true", "false"} and len(written["joint"]) == 12
    assert written["joint"][0]["values"] == {"text": "a, b", "flag": True, "x": 0.5}
    chat = decide(llada_tiny, "Why?", FIELDS, chat=True)
    assert chat.prompt_tokens == len(encode_prompt(llada_tiny, "Why?", chat=True))
    message = decide(llada_tiny, [[{"role": "user", "content": "Why?"}]], FIELDS)[0]
    assert message == chat
    numpy = decide(llada_tiny, "Q", {"n": np.arange(3)})
    assert numpy.values["n"] in (0, 1, 2) and type(numpy.values["n"]) is int


def test_logits_that_are_not_finite(llada_tiny):
    model = with_function(llada_tiny, lambda tokens, lengths: jnp.full((*tokens.shape, 136), jnp.nan))
    with refuses("prompt 0", "not finite"):
        decide(model, "Q", FIELDS)


PLAIN = {"gamma": None, "joint": False, "temperature": 1.0}
TWO = {"a": ["x", "y"], "b": ["x", "y"]}
MISTAKES = [
    ("fields", {"fields": ["a"]}),
    ("fields", {"fields": {}}),
    ("give a list", {"fields": {"a": "yes"}}),
    ("at least two", {"fields": {"a": ["x"]}}),
    ("twice", {"fields": {"a": ["x", "x"]}}),
    ("twice", {"fields": {"a": [1, "1"]}}),
    ("twice", {"fields": {"a": [1, 1.0]}}),
    ("empty", {"fields": {"a": ["x", " "]}}),
    ("None", {"fields": {"a": ["x", None]}}),
    ("'a.b'", {"fields": {"a.b": ["x", "y"]}}),
    ("mask token", {"fields": {"a": ["x", "<|mask|>"]}}),
    ("mask token", {"template": "<|mask|>{a}{b}"}),
    ("no {b}", {"template": "{a}"}),
    ("{c}", {"template": "{a}{b}{c}"}),
    ("{a} twice", {"template": "{a}{b}{a}"}),
    ("braces", {"template": "{a}{b}}"}),
    ("no field", {"template": "{a:>3}{b}"}),
    ("temperature", {"temperature": 0.0}),
    ("gamma", {"gamma": -1.0}),
    ("leave one out", {"gamma": 0.1, "joint": True}),
    ("combinations", {"fields": {"a": range(100), "b": range(100)}, "joint": True}),
    ("batch_size", {"batch_size": 0}),
    ("seed", {"seed": -1}),
    ("token ids of one prompt", {"prompts": [1, 2]}),
    ("512", {"prompts": [[65] * 505]}),
]


@pytest.mark.parametrize(("sentence", "change"), MISTAKES, ids=[str(number) for number in range(len(MISTAKES))])
def test_mistakes(llada_tiny, compiled, sentence, change):
    options = {"prompts": "Q", "fields": TWO, **change}
    with refuses(sentence):
        decide(llada_tiny, **options)
    assert not compiled


def test_causal_models_are_refused(qwen2_tiny):
    with refuses("left to right"):
        decide(qwen2_tiny, "Q", TWO)
    with refuses("load one"):
        decide(qwen2_tiny.denoiser, "Q", TWO)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("yes,no", ["yes", "no"]),
        ("1..4", [1, 2, 3, 4]),
        ("-1..1", [-1, 0, 1]),
        ("1,2.5", [1, 2.5]),
        ("true,false", [True, False]),
        ("1,true", ["1", "true"]),
        ('["a, b", 3]', ["a, b", 3]),
        ("1..x,2", ["1..x", "2"]),
    ],
)
def test_values_on_the_command_line(text, values):
    assert command._values_of("a", text) == values


def test_the_command(llada_tiny, capsys):
    words = ["decide", *PROMPTS[:2], "--model", str(llada_tiny.folder)]
    fields = ["--field", "answer=yes,no", "--field", "urgency=1..5"]
    assert cli.main([*words, *fields, "--joint", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line, prompt, wanted in zip(lines, PROMPTS, decide(llada_tiny, PROMPTS[:2], FIELDS, joint=True), strict=False):
        assert line["prompt"] == prompt and line["values"] == wanted.values
        assert line["dependence"] == pytest.approx(wanted.dependence, abs=1e-4)
    assert cli.main([*words, *fields, "--gamma", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert "--- 2 of 2" in out and "answer   " in out and "mean" in out and "NFE" in err
    for wrong, sentence in ((["--field", "answer"], "NAME=VALUE"), ([], "no field"), (["--field", "a=[1"], "JSON")):
        assert cli.main([*words, *wrong]) == 2
        assert sentence in one_error(capsys)
    assert cli.main(["decide", "Q", *fields]) == 2
    assert "--model" in one_error(capsys)


def test_a_denoiser_of_its_own_length(llada_tiny):
    """Prompts up to the context's end: the sequence is not rounded up beyond it, and the window moves back."""
    model = dataclasses.replace(llada_tiny, config=llada_tiny.config.replace(max_length=40))
    assert isinstance(model.denoiser, Denoiser)
    prompt = [65] * (40 - len("x=yes") - 1)
    found = decide(model, [prompt], {"a": ["yes", "no"]}, template="x={a}")[0]
    ids, mask = prompt + [ord("x"), ord("=")], model.denoiser.mask_id
    scores = []
    for value in ("yes", "no"):
        tokens = jnp.asarray([ids + [mask] * len(value) + [model.denoiser.eos_id]])
        logprobs = jax.nn.log_softmax(model.denoiser(tokens))[0]
        scores.append(sum(logprobs[len(ids) + at, ord(c)] for at, c in enumerate(value)))
    np.testing.assert_allclose([*found.probabilities["a"].values()], jax.nn.softmax(jnp.asarray(scores)), atol=1e-4)
