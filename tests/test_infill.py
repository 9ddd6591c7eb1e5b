"""Texts with gaps: what is fixed stays, every gap is filled, rows are independent, and mistakes are one sentence."""

import json
import sys

import pytest
from conftest import one_error, refuses

import dllm_jax
import samplers
from convert import embedded
from samplers import infill
from samplers.cli import sample as cli
from samplers.infill import Template, parse_template, prepare_infill
from samplers.text.prompts import encode_prompt

CAPITAL = "The capital is<gap:8>, founded in<gap:4>."
TEXTS = [CAPITAL, "Tom has <gap:12>.\n", "<gap:3>x<gap:2>"]
SHAPE = {"block_length": 8}


def check(found, text):
    """An infilling's parts fit its template, and all gaps are filled with text."""
    template = parse_template(text)
    assert len(found.gaps) == len(template.gaps)
    gaps = [*found.gaps, ""]
    assert found.text == "".join(piece + gap for piece, gap in zip(template.pieces, gaps, strict=True))
    assert len(found.tokens) == found.committed == sum(template.gaps)
    assert not set(found.tokens) & {128, 129, 130, 131, 132, 133, 134, 135}  # these have no text


@pytest.mark.parametrize(
    "text, pieces, gaps",
    [
        (CAPITAL, ("The capital is", ", founded in", "."), (8, 4)),
        ("<gap:1><gap:02>", ("", "", ""), (1, 2)),
        (r"a \<gap:8> b<gap:3>", ("a <gap:8> b", ""), (3,)),
        (r"a\\<gap:8>", ("a\\", ""), (8,)),
        (r"a\\\<gap> \n<gap:8>", ("a\\<gap> \\n", ""), (8,)),
        ("<gaps> <gap <GAP:2> gap:3><gap:1>", ("<gaps> <gap <GAP:2> gap:3>", ""), (1,)),
        ("a <edit>b\n</edit><gap:2></edit><edit>c</edit>", ("a ", "", "</edit>", ""), ("b\n", 2, "c")),
        (r"\<edit>b</edit><edit>c</edit>", ("<edit>b</edit>", ""), ("c",)),
    ],
)
def test_templates(text, pieces, gaps):
    assert parse_template(text) == Template(pieces, gaps)


@pytest.mark.parametrize(("text", "sentence"), [("a<edit>b", "has no </edit>"), ("<edit></edit>", "has no text")])
def test_edits_without_a_text(text, sentence):
    with refuses(sentence):
        parse_template(text)


def test_an_edit_is_a_gap_of_its_text(llada_tiny):
    """Of a model with a mask token, which does not see what it replaces."""
    edit, gap = infill(llada_tiny, ["The <edit>old</edit> end", "The <gap:3> end"], **SHAPE)
    assert (edit.text, edit.gaps) == (gap.text, gap.gaps)


@pytest.mark.parametrize("gap", ["<gap>", "<gap:>", "<gap:0>", "<gap:-1>", "<gap: 8>", "<gap:x>", "<gap 8>", "<gap=8>"])
def test_gaps_without_a_length(gap):
    with refuses(gap, "<gap:8>"):
        parse_template(f"a<gap:2>b{gap}")


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_rows_are_filled_as_alone(llada_tiny, cache):
    """Canvases and prompts of different lengths, one prompt empty."""
    rows = infill(llada_tiny, TEXTS, cache=cache, batch_size=2, **SHAPE)
    for found, text in zip(rows, TEXTS, strict=True):
        check(found, text)
    assert infill(llada_tiny, TEXTS[1], cache=cache, **SHAPE) == rows[1]
    assert [row.prompt_tokens for row in rows] == [len("The capital is"), len("Tom has "), 0]
    assert len(rows[0].canvas) == len(rows[0].decoded_at) == 8 + len(", founded in") + 4 + 1


@pytest.mark.parametrize("options", [{"sampler": "d2f"}, {"rule": "llada", "temperature": 1.0}, {"rule": "edit"}])
def test_samplers_that_fill(llada_tiny, options):
    """A row does not depend on the longest canvas, steps of a schedule and drawn numbers included."""
    rows = infill(llada_tiny, TEXTS[:2], **SHAPE, **options)
    for found, text in zip(rows, TEXTS, strict=False):
        check(found, text)
    assert infill(llada_tiny, TEXTS[0], **SHAPE, **options) == rows[0]


def test_a_model_that_needs_a_first_token(dream_tiny):
    check(infill(dream_tiny, CAPITAL, **SHAPE), CAPITAL)
    with refuses("dream-tiny"):
        infill(dream_tiny, "<gap:3> x")


def test_an_answer_is_begun_and_ended(llada_tiny):
    """A prompt before the template, as text and as a chat; for all templates or one for each."""
    text = "So:<gap:4>!<|eot_id|>"
    chat = prepare_infill(llada_tiny, [text], prompt="Why?", chat=True)
    asked = encode_prompt(llada_tiny, "Why?", chat=True)
    assert chat.prompts == [asked + [ord(c) for c in "So:"]]
    tokens, given = chat.canvases[0]
    assert tokens[4:].tolist() == [ord("!"), 131] and given.tolist() == [False] * 4 + [True] * 2
    assert prepare_infill(llada_tiny, [text], prompt=[{"role": "user", "content": "Why?"}]).prompts == chat.prompts
    each = prepare_infill(llada_tiny, TEXTS[1:], prompt=["a", [98]]).prompts
    assert each == [[ord(c) for c in "aTom has "], [98]]
    assert prepare_infill(llada_tiny, TEXTS[1:], prompt="ab").prompts[1] == [97, 98]
    found = infill(llada_tiny, text, prompt="Why?", chat=True, **SHAPE)
    check(found, text)
    assert found.canvas[4:] == [ord("!"), 131] and found.text.startswith("So:")


def test_an_end_token_before_a_gap_ends_nothing(llada_tiny):
    text = "a<gap:3><|endoftext|>b<gap:3>"
    check(infill(llada_tiny, text, **SHAPE), text)


def test_few_lengths_are_compiled(llada_tiny):
    lengths = lambda text, **options: prepare_infill(llada_tiny, [text], **options).sampler.gen_length
    assert [lengths(f"a<gap:{n}>", block_length=8) for n in (1, 8, 9)] == [8, 8, 16]
    assert [lengths(f"a<gap:{n}>", block_length=0) for n in (1, 33, 65)] == [32, 64, 96]
    assert lengths("a<gap:511>") == 511  # of the 512 that the model was trained for
    assert lengths("a<gap:3>", sampler="d2f:block_length=16") == 16
    assert lengths("a<gap:3>", sampler=samplers.Threshold(0.5)) == 32


def test_nothing_to_fill(llada_tiny):
    assert infill(llada_tiny, []) == []


@pytest.mark.parametrize(
    ("name", "templates", "options"),
    [
        ("'no gap'", "no gap", {}),
        ("int", [3], {}),
        ("int", 3, {}),
        ("mask token", "a<|mask|><gap:2>", {}),
        ("position 513", "a<gap:512>", {}),
        ("512 tokens", "a<gap:999999999>", {}),
        ("gen_length", CAPITAL, {"gen_length": 8}),
        ("gen_length", CAPITAL, {"sampler": "topk:gen_length=8"}),
        ("stop", CAPITAL, {"stop": ["x"]}),
        ("left to right", CAPITAL, {"sampler": "leftright"}),
        ("left to right", CAPITAL, {"sampler": "apd"}),
        ("BlockSampler", CAPITAL, {"sampler": samplers.BlockSampler(samplers.Threshold(), 8)}),
        ("'best'", CAPITAL, {"rule": "best"}),
        ("'gamma'", CAPITAL, {"gamma": 1}),
        ("block_length", CAPITAL, {"block_length": "8"}),
        ("'abc'", CAPITAL, {"suppress": "abc"}),
        ("'abc'", CAPITAL, {"suppress": ["abc"]}),
        ("prompt=", CAPITAL, {"chat": True}),
        ("2 prompts", CAPITAL, {"prompt": ["a", "b"]}),
        ("prompt", CAPITAL, {"prompt": ""}),
        ("seed", CAPITAL, {"seed": -1}),
        ("batch_size", CAPITAL, {"batch_size": 0}),
        ("'caf\u00e9'", "caf\u00e9<gap:2>", {}),
    ],
)
def test_mistakes_are_one_sentence(monkeypatch, llada_tiny, name, templates, options):
    monkeypatch.setattr(sys.modules[prepare_infill.__module__], "run_all", pytest.fail)  # nothing is to be sampled
    with refuses(name):
        infill(llada_tiny, templates, **options)


def test_a_model_without_a_tokenizer(llada_tiny):
    with refuses("tokenizer"):
        infill(dllm_jax.random_model(llada_tiny.config), CAPITAL)


def test_suppressed_texts_stay_out_of_gaps(llada_tiny):
    first = infill(llada_tiny, CAPITAL, **SHAPE)
    banned = sorted(set(first.gaps[0]))
    found = infill(llada_tiny, CAPITAL, suppress=banned, **SHAPE)
    assert not set("".join(found.gaps)) & set(banned)


def test_both_sides_count(tmp_path):
    """A trained model, whose tokens are of several letters, finds what lies between a problem and its steps."""
    model = dllm_jax.load(embedded.install("word-problems", tmp_path / "word-problems"))
    problem = "Q: Sam has 26 nuts. Sam buys 10. Sam keeps one of 3 equal parts.\nA: "
    found = infill(model, problem + "<gap:5>. 36/3=<gap:1>. #### <gap:1>", rule="topk")
    assert found.gaps == ["26+10=36", "12", "12"] and found.text == problem + "26+10=36. 36/3=12. #### 12"
    assert (found.nfe, len(found.tokens)) == (7, 7)


@pytest.fixture
def run(capsys, llada_tiny):
    def call(*arguments):
        status = cli.main([*arguments, "--model", str(llada_tiny.folder)])
        return status, *capsys.readouterr()

    return call


def test_from_the_shell(run, llada_tiny):
    status, out, err = run("--infill", CAPITAL, "--block-length", "8")
    wanted = infill(llada_tiny, CAPITAL, **SHAPE)
    assert (status, out) == (0, wanted.text + "\n") and f"12 tokens, {12 / wanted.nfe:.2f} per forward" in err
    more = ("--block-length=8", "--suppress=a", "--json")
    status, out, err = run("Why?", "--infill", CAPITAL, "--infill", "b<gap:2>", *more)
    lines = [json.loads(line) for line in out.splitlines()]
    wanted = infill(llada_tiny, [CAPITAL, "b<gap:2>"], prompt="Why?", suppress=["a"], **SHAPE)
    assert [(line["prompt"], line["template"]) for line in lines] == [("Why?", CAPITAL), ("Why?", "b<gap:2>")]
    assert [(line["text"], line["gaps"], line["tokens"]) for line in lines] == [
        (one.text, one.gaps, one.tokens) for one in wanted
    ]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("<gap>", ["--infill", "a<gap>"]),
        ("gen_length", ["--infill", CAPITAL, "--gen-length=8"]),
        ("chat", ["--infill", CAPITAL, "--chat"]),
        ("left to right", ["--infill", CAPITAL, "--sampler=leftright"]),
        ("2 prompts", ["a", "b", "--infill", CAPITAL]),
    ],
)
def test_mistakes_in_the_shell(llada_tiny, capsys, monkeypatch, name, arguments):
    monkeypatch.setattr(cli.dllm_jax, "load", pytest.fail)
    assert cli.main([*arguments, "--model", str(llada_tiny.folder)]) == 2
    assert name in one_error(capsys)
