"""The canvas viewer: what was written when, in notebooks, on terminals, pages and pictures."""

import dataclasses
import io
import json
import re
import sys
from types import SimpleNamespace

import IPython.display
import numpy as np
import PIL.Image
import pytest
import tokenizers
import transformers
from browser import CHROMIUM, Browser
from conftest import refuses
from rich.console import Console

import samplers
from evals import __main__ as evals_cli
from samplers import compare, generate, show
from samplers.cli import sample as cli
from samplers.generation import Generation, Trace
from samplers.sampler import Result
from samplers.text.display import END
from samplers.viewer import View, colors, picture, view
from samplers.viewer.terminal import LiveView
from samplers.viewer.timeline import EDITED, GIVEN, REOPENED, RESPELLED, UNWRITTEN, WRITTEN, cells_at, timeline_of

PROMPT = "Q: Tom has 12 books. Tom buys 23.\nA: "
OTHER = "Q: Ann has 40 pens. Ann buys 17.\nA: "
SHAPE = {"gen_length": 16, "block_length": 8}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """What is shown is not printed; returns all that was."""
    shown = []
    monkeypatch.setattr(view.Console, "print", lambda self, what: shown.append(what))
    return shown


@pytest.fixture(scope="module")
def answer(llada_tiny):
    return generate(llada_tiny, PROMPT, **SHAPE)


@pytest.fixture(scope="module")
def whole(llada_tiny):
    return generate(llada_tiny, PROMPT, trace=True, **SHAPE)


@pytest.fixture(scope="module")
def revised(llada_tiny):
    options = {"rule": "remask", "cache": "none", "temperature": 1.0, "gen_length": 16, "block_length": 0}
    return generate(llada_tiny, PROMPT, trace=True, **options)


def data_of(html):
    """The data of every view in a page."""
    return [json.loads(found) for found in re.findall(r'type="application/json"[^>]*>(.*?)</script>', html, re.DOTALL)]


def replayed(told, forward=None):
    """Canvas, forwards (from 0) and changes by kind of a timeline in a page."""
    tokens, at, kinds = [-1] * told["length"], [-1] * told["length"], set()
    for number, frame in enumerate(told["frames"][: None if forward is None else forward + 1]):
        for position, kind, token, _, _ in frame:
            kinds.add(kind)
            tokens[position] = token
            at[position] = {WRITTEN: number - 1, EDITED: number - 1, REOPENED: -1}.get(kind, at[position])
    return tokens, at, kinds


def by_hand(pieces, moments, prompt=(), given=(), **said):
    """A generation of a vocabulary of byte strings; moments are (tokens, decoded_at) pairs, of one forward each."""
    vocabulary = by_hand_vocabulary(pieces)
    arrays = [(np.asarray(tokens), np.asarray(at)) for tokens, at in moments]
    length = len(arrays[0][0])
    steps = [result_by_hand(number, *pair) for number, pair in enumerate(arrays)]
    tokens, at = (x.tolist() for x in arrays[-1])
    flags = np.isin(np.arange(length), given)
    trace = Trace(*vocabulary, said.pop("name", "by hand"), said.pop("block", 4), list(prompt), flags, steps)
    return Generation("", tokens, len(prompt), len(arrays) - 1, 0, 0, at, tokens, [None] * length, trace=trace)


def result_by_hand(nfe, tokens, decoded_at):
    """What is known after some forwards, of which all covered the whole sequence."""
    counts = dict.fromkeys(("nfe", "full_forwards", "cache_updates"), np.asarray([nfe]))
    others = {"lengths": np.asarray([len(tokens)]), "edits": np.asarray([0]), "broken_at": np.asarray([-1])}
    logprobs = np.full((1, len(tokens)), -0.1, np.float32)
    return Result(tokens=tokens[None], decoded_at=decoded_at[None], logprobs=logprobs, **counts, **others)


def last_alone(found):
    """The same as if it had not been traced."""
    return dataclasses.replace(found, trace=dataclasses.replace(found.trace, steps=found.trace.steps[-1:]))


def by_hand_vocabulary(pieces):
    # Byte-level vocabularies write printable Latin-1 as itself, and the other bytes from U+0100 on, in order.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    stand_ins = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    words = ["".join(stand_ins[b] for b in piece) for piece in pieces]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}))
    core.decoder = tokenizers.decoders.ByteLevel()
    config = SimpleNamespace(eos_id=99, end_ids=(99,), vocab_size=100)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core), config


# Data


@pytest.mark.parametrize("made", ["answer", "whole"])
def test_the_page_has_every_token_in_the_forward_that_wrote_it(made, request):
    answer = request.getfixturevalue(made)
    (told,) = data_of(show(answer).html())[0]["timelines"]
    assert len(told["frames"]) == answer.nfe + 1
    tokens, at, kinds = replayed(told)
    assert (tokens, at) == (answer.canvas, answer.decoded_at)
    for forward in range(answer.nfe + 1):
        before, _, _ = replayed(told, forward)
        early = [wrote < forward and wrote >= 0 for wrote in answer.decoded_at]
        if forward < answer.nfe:
            assert [token >= 0 for token in before] == early
    shares = {p: c for frame in told["frames"] for p, kind, _, _, c in frame if kind == WRITTEN}
    for position, logprob in enumerate(answer.logprobs):
        if logprob is not None:
            assert shares[position] == pytest.approx(1000 * np.exp(logprob), abs=1)


def test_what_is_traced_is_what_is_generated(answer, whole, llada_tiny):
    assert whole == answer and [step.nfe[0] for step in whole.trace.steps] == list(range(1, answer.nfe + 1))
    assert len(answer.trace.steps) == 1
    timeline = timeline_of(whole)
    assert len(timeline.full) == answer.full_forwards and len(timeline.updated) == answer.cache_updates
    assert timeline.full[0] == 1 and timeline_of(answer).full is None
    with LiveView(delay=0, console=Console(file=io.StringIO())) as live:
        watched = generate(llada_tiny, PROMPT, trace=True, on_update=live, **SHAPE)
    assert timeline_of(watched) == timeline
    assert watched == answer


def test_several_prompts_are_traced_together_as_they_are_generated(llada_tiny, whole):
    traced = generate(llada_tiny, [PROMPT, OTHER], trace=True, **SHAPE)
    assert traced == generate(llada_tiny, [PROMPT, OTHER], **SHAPE)
    first = timeline_of(traced[0])
    kinds = lambda timeline: [[change[:3] for change in frame] for frame in timeline.frames]
    assert kinds(first) == kinds(timeline_of(whole)) and first.full == timeline_of(whole).full


def test_updates_tell_what_each_step_wrote(answer, llada_tiny):
    updates = []
    assert generate(llada_tiny, [PROMPT], on_update=updates.append, **SHAPE) == [answer]
    assert [update.nfe for update in updates] == list(range(1, answer.nfe + 1))
    assert [update.done for update in updates] == [False] * (answer.nfe - 1) + [True]
    at = {position: update.nfe - 1 for update in updates for position in update.written}
    assert [at.get(position, -1) for position in range(16)] == answer.decoded_at


def test_edits_and_positions_masked_again_are_shown(revised):
    timeline = timeline_of(revised)
    kinds = [change.kind for frame in timeline.frames for change in frame]
    assert REOPENED in kinds or EDITED in kinds
    cells = cells_at(timeline, timeline.forwards)
    assert [cell.token for cell in cells] == revised.canvas
    assert [cell.at - 1 for cell in cells] == revised.decoded_at
    told = data_of(show(revised).html())[0]["timelines"][0]
    assert replayed(told)[:2] == (revised.canvas, revised.decoded_at)
    assert any(cell.previous for cell in cells)


def test_an_edit_keeps_what_stood_there():
    moments = [([0, 0], [-1, -1]), ([0, 1], [0, 0]), ([2, 1], [1, 0]), ([2, 1], [1, -1]), ([2, 0], [1, 3])]
    timeline = timeline_of(by_hand([b"a", b"b", b"c"], moments))
    changes = [[change[:2] for change in frame] for frame in timeline.frames]
    assert changes == [[], [(0, WRITTEN), (1, WRITTEN)], [(0, EDITED)], [(1, REOPENED)], [(1, WRITTEN)]]
    cells = cells_at(timeline, 4)
    assert [(cell.text, cell.at, cell.previous) for cell in cells] == [("c", 2, ("a",)), ("a", 4, ("b",))]
    assert [cell.kind for cell in cells_at(timeline, 3)] == [EDITED, None]


def test_given_tokens_are_there_at_once_and_those_behind_the_end_at_last():
    moments = [([0, 1, 0, 99], [-1] * 4), ([0, 1, 0, 99], [0, -1, -1, -1]), ([0, 1, 0, 99], [0, -1, 1, -1])]
    found = by_hand([b"a", b"b"], moments, given=[1])
    for answer in (found, last_alone(found)):
        changes = [[change[:2] for change in frame] for frame in timeline_of(answer).frames]
        assert changes == [[(1, GIVEN)], [(0, WRITTEN)], [(2, WRITTEN), (3, UNWRITTEN)]]


def test_a_character_of_several_tokens_appears_when_it_is_complete():
    moments = [([0, 1], [-1, -1]), ([0, 1], [0, -1]), ([0, 1], [0, 1])]
    timeline = timeline_of(by_hand([b"\xc3", b"\xa9"], moments))
    assert [[(c.position, c.kind, c.text) for c in frame] for frame in timeline.frames[1:]] == [
        [(0, WRITTEN, "\\xc3")],
        [(0, RESPELLED, ""), (1, WRITTEN, "é")],
    ]


def test_an_engine_s_requests_tell_of_their_own_numbers_and_tokens(llada_tiny):
    engine = samplers.Engine(llada_tiny, "threshold", slots=2, prompt_length=64, **SHAPE)
    given = [49, *[llada_tiny.config.mask_id] * 15]
    engine.submit(engine.request(PROMPT))
    engine.submit(engine.request(PROMPT, threshold=0.5, given=given, gen_length=12))
    first, second = sorted(engine.results(), key=lambda request: request.number)
    found = compare([first, second])
    assert [timeline.name for timeline in found.timelines] == ["threshold=0.9 × dual", "threshold=0.5 × dual"]
    assert found.timelines[0] == timeline_of(first.generation)
    assert [change[:3] for change in found.timelines[1].frames[0]] == [(0, GIVEN, 49)]
    assert (found.timelines[0].length, found.timelines[1].length) == (16, 12)


# Pages


def test_no_text_escapes_into_the_page():
    pieces = [
        b"</script><script>alert(1)</script>",
        b"<img src=x>",
        "\u202eשלום".encode(),
        b"a\nb",
        b"\xff",
        b"&amp;@ID@",
    ]
    tokens = list(range(6))
    html = show(by_hand(pieces, [(tokens, [-1] * 6), (tokens, [0] * 6)], prompt=tokens, name="<b>&")).html()
    outside = re.sub(r"<style>.*?</style>|<script>.*</script>", "", html, flags=re.DOTALL)
    assert html.count("<script") == 2 and html.count("</script") == 2
    assert "<img" not in html and "<b>" not in html and "alert(1)</pre>" not in outside
    told = data_of(html)[0]["timelines"][0]
    assert told["texts"][0] == pieces[0].decode() and "@ID@" in told["texts"][5]
    assert told["texts"][2:5] == ["\\u202eשלום", "a↵\nb", "\\xff"]
    assert told["name"] == "<b>&" and "&lt;b&gt;&amp;:" in html


def test_a_page_loads_nothing_and_holds_several_views(answer, whole, tmp_path):
    path = show(answer).save(tmp_path / "one.html")
    page = path.read_text()
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", page)
    found = show(answer)
    both = found.html() + found.html() + show(whole).html()
    ids = re.findall(r'<div class="dllm-view" id="([^"]+)"', both)
    assert len(set(ids)) == 3 and all(
        both.count(f'"{name}"') == 2 and both.count(f'"{name}-data"') == 2 for name in ids
    )
    style = re.search(r"<style>(.*?)</style>", found.html(), re.DOTALL)[1]
    selectors = [part for rule in re.findall(r"([^{}]+)\{", style) for part in rule.split(",")]
    assert all(".dllm-view" in part for part in selectors)


def test_a_long_generation_makes_a_small_page():
    rng, length, forwards = np.random.default_rng(0), 1024, 256
    order = rng.permutation(length) * forwards // length
    tokens = rng.integers(0, 60, length)
    moments = [(tokens, np.where(order < k, order, -1)) for k in range(forwards + 1)]
    html = show(by_hand([bytes([97 + i % 26]) * (1 + i // 26) for i in range(60)], moments, block=32)).html()
    assert len(html) < 200_000
    assert replayed(data_of(html)[0]["timelines"][0])[1] == order.tolist()


def test_samplers_of_one_name_are_told_apart(answer, whole):
    names = lambda found: [timeline.name for timeline in found.timelines]
    assert names(compare([answer, whole])) == ["threshold=0.9 × dual (1)", "threshold=0.9 × dual (2)"]
    assert names(compare({"a": answer, "b": whole})) == ["a", "b"]
    assert names(show([answer, whole])) == ["1 of 2", "2 of 2"]
    data = data_of(compare([answer, whole]).html())[0]
    assert data["prompt"].startswith("Q: Tom") and "↵\n" in data["prompt"]


# Colours


def test_the_scale_rises_in_lightness_and_reads_well():
    light = [colors.luminance(found.ground) for found in colors.SCALE]
    assert light == sorted(set(light)) and light[0] < 0.05 and light[-1] > 0.7
    assert min(colors.contrast(*found) for found in colors.SCALE) >= 4.5
    for name in ("ink", "dim"):
        for ground in ("paper", "card"):
            for mode in (0, 1):
                assert colors.contrast(paper(name)[mode], paper(ground)[mode]) >= 4.5, (name, ground, mode)
    assert all(colors.contrast(a, b) >= 4.5 for a, b in zip(paper("fresh"), paper("fresh-ink"), strict=True))


def paper(name):
    """A colour of pages in light and dark."""
    found = re.search(rf"--{name}: light-dark\((#\w+), (#\w+)\)", colors.PAPER)
    return [tuple(bytes.fromhex(hexed[1:])) for hexed in found.groups()]


# Terminals


def printed(found, **options):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, **options)
    with console.capture() as capture:
        REAL_PRINT(console, found)
    return capture.get()


REAL_PRINT = Console.print


def test_on_a_terminal_tokens_have_the_colour_of_their_forward(whole):
    out = printed(show(whole), width=100, color_system="truecolor")
    assert f"NFE {whole.full_forwards} full" in out and timeline_of(whole).speed in out
    grounds = {";".join(map(str, found.ground)) for found in colors.SCALE}
    seen = set(re.findall(r"48;2;(\d+;\d+;\d+)m", out.rpartition("forward 1")[0]))
    assert seen <= grounds and len(seen) == len(set(whole.decoded_at) - {-1})
    assert f"{whole.nfe}" in out.rpartition("forward 1")[2]


def test_no_color_is_honoured(whole, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = printed(compare([whole, whole]), width=100)
    assert "48;" not in out and "38;" not in out and "forward 1" not in out and whole.text[:8] in out


@pytest.mark.parametrize("width", [1, 12, 40])
def test_narrow_terminals(whole, revised, width):
    out = printed(compare([whole, revised]), width=width, no_color=True)
    assert all(len(re.sub(r"\x1b\[[\d;]*m", "", line)) <= width for line in out.splitlines())


def test_wide_terminals_put_canvases_side_by_side(whole):
    wide = printed(compare({"one": whole, "two": whole}), width=140, no_color=True)
    assert any("one" in line and "two" in line for line in wide.splitlines())
    slim = printed(compare({"one": whole, "two": whole}), width=60, no_color=True)
    assert not any("one ·" in line and "two ·" in line for line in slim.splitlines())


def test_show_prints_on_a_terminal_and_displays_once_in_a_notebook(whole, quiet, monkeypatch):
    found = show(whole)
    assert quiet == [found] and isinstance(found, View)
    displayed, cell = [], SimpleNamespace(execution_count=7, has_trait=lambda name: name == "kernel")
    monkeypatch.setattr(IPython, "get_ipython", lambda: cell)
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: displayed.append(data))
    found = show(whole)
    found._ipython_display_()  # as the value of the same cell
    assert len(quiet) == 1 and len(displayed) == 1
    assert "dllm-view" in displayed[0]["text/html"] and displayed[0]["text/plain"].startswith("View(threshold=0.9")
    cell.execution_count = 8
    found._ipython_display_()
    assert len(displayed) == 2 and "dllm-view" in found._repr_html_()


# Pictures


def test_a_film_has_a_frame_for_every_forward(whole, tmp_path):
    path = show(whole).save(tmp_path / "x.gif")
    with PIL.Image.open(path) as film:
        assert film.n_frames == whole.nfe + 1
        durations, last = [], None
        for number in range(film.n_frames):
            film.seek(number)
            durations.append(film.info["duration"])
            last = film.convert("RGB")
    assert durations[-1] >= 2500 > durations[0] and len(set(durations[:-1])) == 1
    with PIL.Image.open(show(whole).save(tmp_path / "x.png")) as image:
        assert image.size == last.size
        colours_at_end = {found for _, found in image.convert("RGB").getcolors(1 << 20)}
    wrote = {picture.colour_at((at) / max(whole.nfe - 1, 1)).ground for at in whole.decoded_at if at >= 0}
    assert wrote <= colours_at_end
    path = show(whole).save(tmp_path / "slow.gif", seconds=1.5)
    with PIL.Image.open(path) as film:
        assert film.info["duration"] == 1500


def test_pictures_of_several_canvases(whole, revised, tmp_path):
    found = compare([whole, revised, whole, revised, whole], colour="confidence")
    with PIL.Image.open(found.save(tmp_path / "x.GIF")) as film:
        assert film.n_frames == max(whole.nfe, revised.nfe) + 1
    assert found.save(tmp_path / "x.png").stat().st_size < 150_000


def test_characters_that_the_font_lacks_are_escaped(tmp_path):
    moments = [([0], [-1]), ([0], [0])]
    texts = {"missing": "\u4e2d", "escaped": "\\u4e2d", "present": "\u00e9"}
    for name, text in texts.items():
        show(by_hand([text.encode()], moments)).save(tmp_path / f"{name}.png")
    missing, escaped, present = ((tmp_path / f"{name}.png").read_bytes() for name in texts)
    assert missing == escaped != present


def test_a_picture_of_a_long_canvas_is_small(tmp_path):
    rng, length, forwards = np.random.default_rng(0), 256, 64
    order, tokens = rng.permutation(length) * forwards // length, rng.integers(0, 26, length)
    moments = [(tokens, np.where(order < k, order, -1)) for k in range(forwards + 1)]
    path = show(by_hand([bytes([97 + i]) * 3 for i in range(26)], moments, block=32)).save(tmp_path / "x.gif")
    assert path.stat().st_size < 600_000


# Files and mistakes


MISTAKES = {
    "a text": (lambda a: show("text"), "str"),
    "a number": (lambda a: show([a, 3]), "int"),
    "nothing": (lambda a: show([]), "generation"),
    "one": (lambda a: compare(a), "compare"),
    "colour": (lambda a: show(a, colour="red"), "'red'"),
    "no trace": (lambda a: show(dataclasses.replace(a, trace=None)), "trace"),
    "ending": (lambda a: show(a).save("x.svg"), "x.svg"),
    "folder": (lambda a: show(a).save("/nowhere/x.html"), "/nowhere"),
    "seconds": (lambda a: show(a).save("x.png", seconds=1.0), "seconds"),
    "negative": (lambda a: show(a).save("x.gif", seconds=-1.0), "seconds"),
    "font of a page": (lambda a: show(a).save("x.html", font="a.ttf"), "font"),
    "no font": (lambda a: show(a).save("x.png", font="/nowhere.ttf"), "/nowhere.ttf"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence(case, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, name = MISTAKES[case]
    with refuses(name):
        call(answer)
    assert not list(tmp_path.iterdir())


def test_a_request_that_has_not_ended_is_not_shown(llada_tiny):
    engine = samplers.Engine(llada_tiny, slots=1, prompt_length=64, **SHAPE)
    with refuses("request 0"):
        show(engine.submit(engine.request(PROMPT)))


def test_pictures_need_pillow_and_matplotlib(answer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refuses("dllm_jax[view]"):
        show(answer).save(tmp_path / "x.png")
    show(answer).save(tmp_path / "x.html")


# Commands


@pytest.fixture
def run(capsys, llada_tiny):
    def call(*arguments):
        status = cli.main([*arguments, "--model", str(llada_tiny.folder), "--gen-length", "16", "--block-length", "8"])
        return status, *capsys.readouterr()

    return call


def test_the_command_saves_a_view(run, tmp_path, answer):
    path = tmp_path / "x.html"
    status, out, err = run(PROMPT, OTHER, "--save-view", str(path))
    assert status == 0 and answer.text in out and "single steps for the view" in err
    first, second = data_of(path.read_text())[0]["timelines"]
    assert replayed(first)[1] == answer.decoded_at and (first["name"], second["name"]) == ("1 of 2", "2 of 2")
    assert len(first["full"]) == answer.full_forwards


def test_the_command_saves_an_infilling(llada_tiny, capsys, tmp_path):
    said = ["--infill", "Tom has<gap:3> books.", "--model", str(llada_tiny.folder), "--cache", "none"]
    assert cli.main([*said, "--save-view", str(tmp_path / "x.gif"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["gaps"]) == 1
    with PIL.Image.open(tmp_path / "x.gif") as film:
        assert film.n_frames == told["nfe"] + 1


def test_the_live_view_is_saved(run, tmp_path, answer, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, out, err = run(PROMPT, "--delay", "0", "--save-view", str(tmp_path / "x.html"))
    assert (status, err) == (0, "") and answer.text in out
    assert data_of((tmp_path / "x.html").read_text())[0]["timelines"][0]["full"]


@pytest.mark.parametrize(
    "arguments, name",
    [
        (("a", "--save-view", "x.txt"), "x.txt"),
        (("a", "--save-view", "/nowhere/x.gif"), "/nowhere"),
        (("--prompts", "x", "--save-view", "x.html"), "--save-view"),
    ],
)
def test_mistakes_come_before_anything_is_read(run, monkeypatch, arguments, name):
    monkeypatch.setattr(cli, "outline", pytest.fail)
    status, out, err = run(*arguments)
    assert (status, out) == (2, "") and err.startswith("error: ") and name in err and err.count("\n") == 1


def test_compared_samplers_are_saved_side_by_side(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DLLM_JAX_HOME", str(tmp_path / "home"))
    from convert import embedded

    folder, path = embedded.load("sudoku").folder, tmp_path / "x.html"
    said = ["compare", "--model", str(folder), "--task", "sudoku:box_rows=2,box_columns=3", "--sampler", "topk:k=4"]
    more = ["--sampler", "threshold"]
    assert evals_cli.main([*said, *more]) == 0
    table = capsys.readouterr().out
    assert evals_cli.main([*said, *more, "--save-view", str(path)]) == 0
    assert capsys.readouterr().out == table
    timelines = data_of(path.read_text())[0]["timelines"]
    assert [timeline["name"] for timeline in timelines] == ["topk:k=4", "threshold"]
    assert all(GIVEN in replayed(timeline)[2] for timeline in timelines)
    assert evals_cli.main([*said, "--save-view", "x.pdf"]) == 2
    assert "x.pdf" in capsys.readouterr().err


# In a browser


@pytest.fixture
def browser(tmp_path):
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    found = Browser(tmp_path / "profile")
    yield found
    found.close()


KEY = """(name, where) => (where || document.activeElement).dispatchEvent(
  new KeyboardEvent("keydown", {key: name, bubbles: true, cancelable: true}))"""


@pytest.mark.processes
def test_a_browser_goes_through_the_forwards(whole, revised, browser, tmp_path):
    page = tmp_path / "two.html"
    one = show(whole).save(tmp_path / "x.html").read_text()
    page.write_text(one.replace("</body>", show(revised).html() + "</body>"))
    browser.call("Page.enable")
    errors = "window.wrong = []; addEventListener('error', event => wrong.push(event.message))"
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=errors)
    browser.open(page.as_uri())
    assert browser.run("wrong") == []
    first, second = (f"document.querySelectorAll('.dllm-view')[{i}]" for i in range(2))
    last = whole.nfe
    assert browser.run(f"{first}.dataset.forward") == str(last)
    assert browser.run(f"{second}.dataset.forward") == str(revised.nfe)
    cells = f"[...{first}.querySelectorAll('.canvas .cell:not(.masked)')]"
    seen = lambda: browser.run(f"{cells}.map(cell => Number(cell.dataset.at))")
    heard = lambda: browser.run(f"{first}.querySelector('[aria-live]').textContent")
    said = []
    browser.run(f"({KEY})('Home', {first}.querySelector('button'))")
    assert seen() == [] and f"Forward 0 of {last}" in heard()
    for forward in range(1, last + 1):
        browser.run(f"({KEY})('ArrowRight', {first}.querySelector('button'))")
        assert browser.run(f"{first}.querySelector('.count').textContent") == f"forward {forward} of {last}"
        if forward < last:
            assert seen() == [i for i, at in enumerate(whole.decoded_at) if 0 <= at < forward]
        assert heard() not in said
        said.append(heard())
    browser.run(f"({KEY})('ArrowLeft', {first}.querySelector('button'))")
    assert browser.run(f"{first}.dataset.forward") == str(last - 1)
    assert browser.run(f"{second}.dataset.forward") == str(revised.nfe)  # which is a view of its own
    browser.run(f"({KEY})('End', {first}.querySelector('button'))")
    text = browser.run(f"{first}.querySelector('.canvas').innerText")
    assert whole.text[:6].split("\n")[0] in text
    assert browser.run("wrong") == []


@pytest.mark.processes
def test_a_browser_tells_of_tokens_and_plays(whole, browser, tmp_path):
    browser.open(show(whole).save(tmp_path / "x.html").as_uri())
    detail = lambda: browser.run("document.querySelector('.detail').textContent")
    browser.run("document.querySelectorAll('[role=option]')[0].focus()")
    at = whole.decoded_at[0] + 1
    assert detail().startswith("position 0: “") and f"id {whole.canvas[0]}, forward {at}, confidence" in detail()
    browser.run(f"({KEY})('ArrowRight')")
    assert detail().startswith("position 1: “")
    assert browser.run("document.activeElement.getAttribute('aria-label')") == detail()
    browser.run("document.querySelector('details').open = true")
    count = "document.querySelectorAll('table tr').length"
    browser.wait(f"{count} === 17")
    ground = "getComputedStyle(document.querySelector('[role=option]')).backgroundColor"
    by_forward = browser.run(ground)
    browser.run("window.by = document.querySelector('select'); by.value = 'confidence'")
    browser.run("by.dispatchEvent(new Event('change'))")
    share = cells_at(timeline_of(whole), whole.nfe)[0].confidence
    wanted = "rgb({}, {}, {})".format(*colors.colour_at(round(share, 3)).ground)
    assert browser.run(ground) == wanted and by_forward.startswith("rgb(")
    browser.run(f"({KEY})('End', document.querySelector('button'))")
    for _ in range(2):
        browser.run(f"({KEY})('ArrowLeft', document.querySelector('button'))")
    browser.run("document.querySelector('button').click()")
    assert browser.run("document.querySelector('button').textContent") == "Pause"
    browser.wait("document.querySelector('button').textContent === 'Play'")
    assert browser.run("document.querySelector('.dllm-view').dataset.forward") == str(whole.nfe)


@pytest.mark.processes
def test_a_browser_has_a_dark_page(whole, browser, tmp_path):
    path = show(whole).save(tmp_path / "x.html").as_uri()
    found = {}
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(path)
        style = "getComputedStyle(document.querySelector('.dllm-view'))"
        found[scheme] = browser.run(f"[{style}.backgroundColor, {style}.color]")
    for mode, scheme in enumerate(("light", "dark")):
        assert found[scheme] == ["rgb({}, {}, {})".format(*paper(name)[mode]) for name in ("paper", "ink")]


@pytest.mark.processes
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_scrolls_no_page_sideways(whole, browser, tmp_path, width):
    """However long a sampler's name is; and marks of the legend look as what they stand for."""
    names = ["threshold:threshold=0.9,cache=dual,block_length=8," + "x" * 150, "topk"]
    path = compare(dict.fromkeys(names, whole)).save(tmp_path / "x.html")
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    browser.open(path.as_uri())
    room, used = (browser.run(f"document.documentElement.{side}Width") for side in ("client", "scroll"))
    assert used <= room <= width
    looks = "(at, what) => getComputedStyle(document.querySelector(at))[what]"
    stroke, mark = (
        browser.run(f"({looks})('{at}', '{what}')")
        for at, what in ((".chart rect.full", "fill"), (".legend .full", "color"))
    )
    assert stroke == mark != browser.run(f"({looks})('.legend', 'color')")


@pytest.mark.processes
def test_a_browser_draws_texts_as_texts(browser, tmp_path):
    pieces = [
        b"</script><script>document.title=1</script>",
        b"<img src=x onerror=document.title=2>",
        b"a\n",
        b"",
        b"\xff",
    ]
    tokens = list(range(5))
    made = by_hand(pieces, [(tokens, [-1] * 5), (tokens, [0] * 5)])
    browser.open(show(made).save(tmp_path / "x.html").as_uri())
    texts = browser.run("[...document.querySelectorAll('[role=option]')].map(cell => cell.textContent)")
    assert texts == [pieces[0].decode(), pieces[1].decode(), "a↵\n", "<3>", "\\xff"]
    assert browser.run("document.title") == "by hand" and browser.run("document.images.length") == 0


def test_an_end_token_has_a_mark():
    timeline = timeline_of(by_hand([b"a"], [([0, 99], [-1, -1]), ([0, 99], [0, 0])]))
    assert [change.text for change in timeline.frames[1]] == ["a", END]
    assert timeline.as_json()["texts"] == ["a", "∎"]
