"""Files of prompts: what a line may say, answers in order, bad lines, and runs that were cut off."""

import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import free_ports, refuses

import samplers
from dllm_jax.cli import progress_bars
from dllm_jax.json_lines import JsonLines
from samplers.cli import sample as cli
from samplers.cli.batch_files import WRITTEN, LineRequests
from samplers.cli.report import answer_json, speed_json
from samplers.text.prompt_files import Line, Needs, PromptFile, prompt_of, read_prompts

SHAPE = {"gen_length": 16, "block_length": 8}
FLAGS = ("--gen-length", "16", "--block-length", "8", "--batch-size", "3")
PROMPTS = [f"Q: Tom has {n} books. Tom buys {n + 11}.\nA: " for n in range(12, 19)]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TIMES = ("seconds", "compile_seconds", "tokens_per_second")


@pytest.fixture
def run(capsys, llada_tiny):
    """Runs the command on the tiny LLaDA: (status, standard output, standard error)."""

    def call(*arguments, flags=FLAGS):
        status = cli.main([*map(str, arguments), *flags, "--model", str(llada_tiny.folder)])
        return status, *capsys.readouterr()

    return call


def write(path, *entries):
    """A file of these lines: texts as they are, others as JSON."""
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in entries))
    return path


def read(path):
    """The lines of a file without their times."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


@pytest.fixture(scope="module")
def sampled(llada_tiny):
    """What `generate` gives for the prompts together, drawn with seed 3."""
    return samplers.generate(llada_tiny, PROMPTS, seed=3, temperature=0.8, **SHAPE)


@pytest.fixture(scope="module")
def alone(llada_tiny):
    """What one line says and asks otherwise, by `generate`."""
    options = {"threshold": 0.5, "temperature": 0.6, "top_k": 5}
    return samplers.generate(llada_tiny, PROMPTS[:1], seed=9, **options, **SHAPE, stop=["3"])[0]


def test_a_file_is_answered_like_a_list(run, tmp_path, sampled):
    """With whatever else the lines have, blank lines, and whatever was done before."""
    entries = [{"prompt": prompt, "id": [n]} for n, prompt in enumerate(PROMPTS)]
    path, out = write(tmp_path / "in.jsonl", *entries[:2], "", *entries[2:]), tmp_path / "out.jsonl"
    drawn = ("--temperature", "0.8", "--seed", "3")
    assert run("--prompts", path, "--out", out, *drawn)[:2] == (0, "")
    found = read(out)
    assert [(line["text"], line["tokens"], line["decoded_at"]) for line in found] == [
        (answer.text, answer.tokens, answer.decoded_at) for answer in sampled
    ]
    assert [line["id"] for line in found] == [[n] for n in range(7)]
    assert [line["line"] for line in found] == [1, 2, 4, 5, 6, 7, 8]
    whole = out.read_text()
    for cut in (len(whole) - 1, whole.index("\n") + 5, 10, 0):  # where a kill may have ended it
        out.write_text(whole[:cut])
        status, told, err = run("--prompts", path, "--out", out, *drawn)
        assert (status, told, read(out)) == (0, "", found) and "tokens/s" in err
    before = out.read_bytes()
    status, _, err = run("--prompts", path, "--out", out, *drawn)
    assert status == 0 and "nothing left to do, 7 lines answered" in err and out.read_bytes() == before
    for other, sentence in [
        (("--temperature", "0.8", "--seed", "4"), "was made with seed 3, not 4; choose another --out"),
        (("--seed", "3"), "was made with temperature 0.8, not 0.0"),
    ]:
        status, _, err = run("--prompts", path, "--out", out, *other)
        assert status == 2 and sentence in err and out.read_bytes() == before


def test_lines_bring_numbers_of_their_own(run, tmp_path, alone):
    said = {"options": {"threshold": 0.5, "temperature": 0.6, "top_k": 5}, "seed": 9, "stop": ["3"]}
    path = write(tmp_path / "in.jsonl", {"prompt": PROMPTS[1]}, {"prompt": PROMPTS[0], **said}, {"prompt": PROMPTS[1]})
    status, out, err = run("--prompts", path, "--json")
    first, own, third = map(json.loads, out.splitlines())
    assert (own["text"], own["tokens"], own["nfe"]) == (alone.text, alone.tokens, alone.nfe)
    assert {name: own[name] for name in said} == said and own["settings"]["temperature"] == 0.0
    assert first["tokens"] == third["tokens"] and {"line", "room", "settings"} <= first.keys()
    assert list(first)[-3:] == list(TIMES)


def test_lines_bring_forms_of_their_own(run, tmp_path, llada_tiny):
    forms = [{"regex": "[0-9]{2,9}"}, {}, {"json_schema": {"enum": [10, "b"]}}, {"regex": "(yes|no)!", "gen_length": 8}]
    entries = [{"prompt": PROMPTS[n], "seed": n, **form} for n, form in enumerate(forms)]
    path = write(tmp_path / "in.jsonl", *entries)
    status, out, err = run("--prompts", path, "--json")
    for line, entry in zip(map(json.loads, out.splitlines()), entries, strict=True):
        own = {name: value for name, value in entry.items() if name != "prompt"}
        (alone,) = samplers.generate(llada_tiny, [entry["prompt"]], **SHAPE | own)
        assert (line["text"], line["tokens"], line["nfe"]) == (alone.text, alone.tokens, alone.nfe)
        assert entry.items() <= line.items()
    for flags in (("--regex", "a+"), ("--sampler", "leftright")):
        status, out, err = run("--prompts", path, *flags, flags=FLAGS[:2])
        assert (status, out) == (2, "") and "leave out regex and json_schema of lines" in err


BAD = {  # a line, and what its sentence has
    '{"prompt": ""}': "prompt",
    '{"prompt": "a<|mask|>"}': "mask token",
    '{"prompt": "a", "tokens": []}': '"tokens"',
    '{"prompt": "a", "x": NaN}': "JSON",
    '{"prompt": 1e999}': "JSON",
    "{": "JSON",
    "[1]": "object",
    '{"id": 7}': '"messages"',
    '{"template": "<gap:3>"}': "--infill",
    '{"messages": [{"content": "a"}]}': "message 0",
    '{"prompt": "a", "options": {"gamma": 1}}': "'gamma'",
    '{"prompt": "a", "options": {"threshold": -1}}': "threshold is -1",
    '{"prompt": "a", "options": {"threshold": "0.5"}}': "'0.5'",
    '{"prompt": "a", "options": {"threshold": null}}': "threshold is None",
    '{"prompt": "a", "options": {"block_length": 4}}': "flag",
    '{"prompt": "a", "options": {"seed": 1}}': '"seed"',
    '{"prompt": "a", "options": {"key": 1}}': "'key'",
    '{"prompt": "a", "options": 5}': "options",
    '{"prompt": "a", "gen_length": 17}': "--gen-length 16",
    '{"prompt": "a", "gen_length": "x"}': "gen_length",
    '{"prompt": "a", "seed": null}': "seed is None",
    '{"prompt": "a", "seed": -1}': "seed is -1",
    '{"prompt": "a", "stop": "x"}': "stop is 'x'",
    '{"prompt": "a", "stop": 5}': "stop is 5",
    '{"prompt": "a", "stop": [""]}': "stop string",
    json.dumps({"prompt": "a", "stop": list("123456789")}): "9 patterns",
    '{"prompt": "a", "stop": ["\\ud800"]}': "surrogate",
    '{"prompt": "a", "regex": "("}': "regex cannot be compiled",
    '{"prompt": "a", "regex": 7}': "regex is 7",
    '{"prompt": "a", "regex": "[a-z]{17}"}': "17 tokens",
    '{"prompt": "a", "regex": "[a-z]{600}"}': "has room for 512",
    '{"prompt": "a", "regex": "a", "stop": ["b"]}': "stop 'b'",
    '{"prompt": "a", "json_schema": {"minimum": 3}}': "'minimum'",
    '{"prompt": "a", "json_schema": "object"}': "json_schema is of type str",
    '{"prompt": "a", "options": {"regex": "a"}}': '"regex" is a key of the line',
    json.dumps({"prompt": [65] * 600}): "600 tokens",
    '{"prompt": [999]}': "token 999",
    '{"prompt": "\\ud800"}': "vocabulary",
}


def test_bad_lines_are_sentences_in_their_place(run, tmp_path, monkeypatch):
    """However many there are, each has one, and the good ones are answered."""
    texts = [text for bad in BAD for text in (bad, json.dumps({"prompt": PROMPTS[0]}))]
    path, out = write(tmp_path / "in.jsonl", *texts), tmp_path / "out.jsonl"
    path.write_bytes(path.read_bytes() + b'{"prompt": "\xff"}\n')
    status, _, err = run("--prompts", path, "--out", out, "--on-error", "skip")
    found = read(out)
    assert status == 0 and len(found) == 2 * len(BAD) + 1 and f"{len(BAD) + 1} lines could not be" in err
    for number, (line, name) in enumerate(zip(found[::2], [*BAD.values(), "UTF-8"], strict=True)):
        assert name in line["error"] and line["line"] == 2 * number + 1
        assert line["error"].count("\n") == 0 and "text" not in line
    assert len({tuple(line["tokens"]) for line in found[1::2]}) == 1
    assert found[14]["id"] == 7 and "settings" in found[0]


def test_a_bad_line_stops_when_those_before_it_are_done(run, tmp_path):
    good = [{"prompt": prompt} for prompt in PROMPTS[:4]]
    path, out = write(tmp_path / "in.jsonl", *good[:3], {"prompt": ""}, good[3]), tmp_path / "out.jsonl"
    status, _, err = run("--prompts", path, "--out", out)
    assert status == 2 and err.startswith(f"error: {path} line 4: ") and err.count("\n") == 1
    assert f"3 lines answered in {out}" in err and "--on-error skip" in err
    assert [line["line"] for line in read(out)] == [1, 2, 3]
    write(path, *good[:3], {"prompt": PROMPTS[5], "options": {"top_p": 0.5}}, good[3])
    assert run("--prompts", path, "--out", out)[0] == 0
    assert [line["prompt"] for line in read(out)] == [*PROMPTS[:3], PROMPTS[5], PROMPTS[3]]


def test_skipping_goes_on_behind_a_bad_line(run, tmp_path):
    path, out = write(tmp_path / "in.jsonl", {"prompt": PROMPTS[0]}, {"prompt": ""}), tmp_path / "out.jsonl"
    assert run("--prompts", path, "--out", out)[0] == 2
    status, _, err = run("--prompts", path, "--out", out, "--on-error", "skip")
    assert status == 0 and f"1 line could not be answered; it has an 'error' in {out}\n" in err
    assert ["error" in line for line in read(out)] == [False, True]


def test_a_run_can_fail_for_bad_lines_when_the_others_are_answered(run, tmp_path):
    lines = [{"prompt": ""}, {"prompt": PROMPTS[0]}]
    path, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    status, _, err = run("--prompts", path, "--out", out, "--on-error", "fail")
    assert status == 2 and f"error: 1 line could not be answered; it has an 'error' in {out}\n" in err
    assert ["error" in line for line in read(out)] == [True, False]


def test_no_prompts_have_no_answers(run, tmp_path, unloaded):
    for name, text in [("in.jsonl", ""), ("in.txt", " \n\n")]:
        path, out = tmp_path / name, tmp_path / f"{name}.out"
        path.write_text(text)
        status, told, err = run("--prompts", path, "--out", out, flags=())
        assert (status, told, out.read_text()) == (0, "", "") and "0 lines answered" in err
        assert run("--prompts", path, flags=())[:2] == (0, "")
        with refuses("no prompts"):
            read_prompts(str(path))


def test_an_interrupt_says_what_is_there(run, tmp_path, monkeypatch):
    def interrupted(self, entry):
        if self.done == 2:
            raise KeyboardInterrupt
        append(self, entry)

    append = JsonLines.append
    monkeypatch.setattr(JsonLines, "append", interrupted)
    path, out = write(tmp_path / "in.jsonl", *({"prompt": prompt} for prompt in PROMPTS[:3])), tmp_path / "out.jsonl"
    status, _, err = run("--prompts", path, "--out", out)
    assert (status, err) == (130, f"interrupted; 2 lines answered in {out}; the same command resumes\n")


def test_where_nobody_watches_a_word_is_said_now_and_then(run, tmp_path, monkeypatch):
    monkeypatch.setattr(progress_bars, "SELDOM", 0.0)
    path, out = write(tmp_path / "in.jsonl", *({"prompt": prompt} for prompt in PROMPTS[:3])), tmp_path / "out.jsonl"
    status, _, err = run("--prompts", path, "--out", out)
    assert status == 0 and "3/3 [" in err and "tokens/s" in err


@pytest.fixture
def unloaded(monkeypatch):
    """A run that must end before a model is loaded."""
    monkeypatch.setattr(cli.dllm_jax, "load", pytest.fail)


OUT = ["--prompts", "IN", "--out", "OUT"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("--prompts", ["--out", "OUT"]),
        ("--on-error", ["a", "--on-error", "skip"]),
        ("--out", [*OUT, "--infill", "<gap:3>"]),
        ("'ask'", ["--prompts", "IN", "--on-error", "ask"]),
        ("same file", ["--prompts", "IN", "--out", "IN"]),
        ("no/such/folder", ["--prompts", "IN", "--out", "no/such/folder/x"]),
        ("regular file", ["--prompts", "IN", "--out", "FOLDER"]),
        ("notes", ["--prompts", "IN", "--out", "NOTES"]),
        ("torn", ["--prompts", "IN", "--out", "TORN"]),
        ("--distributed", ["--prompts", "IN", "--distributed"]),
        ("--shard", ["a", "--shard", "0/2"]),
        ("--prompts", ["--prompts", "-", "--out", "OUT", "--shard", "0/2"]),
        ("--shard 2/2", [*OUT, "--shard", "2/2"]),
        ("--shard 1", [*OUT, "--shard", "1"]),
        ("--shard", [*OUT, "--shard", "0/2", "--distributed"]),
        ("--prompts", ["--prompts", "-", "--out", "OUT", "--distributed"]),
        ("HOST:PORT,N,I", [*OUT, "--distributed", "a:1,2,2"]),
        ("HOST:PORT,N,I", [*OUT, "--distributed", "2,0"]),
        ("512 tokens", [*OUT, "--gen-length", "600"]),
    ],
)
def test_mistakes_come_before_the_model(run, tmp_path, unloaded, name, arguments):
    write(tmp_path / "in.jsonl", {"prompt": "a"})
    (tmp_path / "notes").write_text("dear diary\n")
    (tmp_path / "torn").write_text("dear diary")
    names = {"IN": "in.jsonl", "OUT": "out.jsonl", "FOLDER": "", "NOTES": "notes", "TORN": "torn"}
    before = sorted(tmp_path.iterdir())
    status, out, err = run(*[tmp_path / names[word] if word in names else word for word in arguments], flags=())
    assert (status, out) == (2, "") and err.startswith("error: ") and name in err and err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "torn").read_text() == "dear diary"


CHANGES = {
    "another prompt": (1, {"prompt": "z", "id": 2}),
    "another key": (1, {"prompt": "b", "id": 2, "more": 1}),
    "a key less": (1, {"prompt": "b"}),
    "a truth for a number": (0, {"prompt": "a", "id": True}),
    "no JSON any more": (1, "{"),
    "blank": (1, ""),
    "a line less": (2, ""),
}


def test_every_line_that_is_kept_answers_its_line(run, tmp_path, monkeypatch):
    """Not the last one alone; else nothing is loaded or written."""
    entries = [{"prompt": prompt, "id": number} for number, prompt in enumerate("abc", start=1)]
    path, out = write(tmp_path / "in.jsonl", *entries), tmp_path / "out.jsonl"
    assert run("--prompts", path, "--out", out)[0] == 0
    whole = out.read_text()
    monkeypatch.setattr(cli.dllm_jax, "load", pytest.fail)
    for name, (place, entry) in CHANGES.items():
        write(path, *(entry if number == place else one for number, one in enumerate(entries)))
        status, _, err = run("--prompts", path, "--out", out)
        assert (status, err.count("\n")) == (2, 1) and f"line {place + 1} of {out} is not the answer" in err, name
        assert out.read_text() == whole
    write(path, *entries)
    lines = whole.splitlines()
    write(out, lines[0], '{"prompt": "b", "li', lines[2])
    assert f"line 2 of {out} is not the answer to line 2" in run("--prompts", path, "--out", out)[2]


@pytest.mark.parametrize("stop", ["\ud800", "\udcff"])  # the second is how a shell's \xff arrives
def test_a_stop_that_is_no_text_is_one_sentence(run, tmp_path, unloaded, stop):
    path = write(tmp_path / "in.jsonl", {"prompt": "a"})
    for said in (["a"], ["--prompts", path]):
        status, out, err = run(*said, "--stop", stop)
        assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and "stop" in err


def test_an_unknown_option_of_a_line_names_the_known_ones(llada_tiny):
    """In one order: that of a set differs from run to run."""
    requests = LineRequests(llada_tiny, Needs(1, False), sampler="threshold", **SHAPE)
    with refuses("qqqqqq", "threshold, "):
        requests.request(Line(0, 1, b""), {"prompt": "a", "options": {"qqqqqq": 1}})


CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "name, text, wanted",
    [
        ("lines.txt", "one\r\n\n  two\n", [(1, "one"), (3, "  two")]),
        ("lines.txt", '{"not": "a prompt"}\n{', [(1, '{"not": "a prompt"}'), (2, "{")]),
        ("x.jsonl", '{"prompt": "a\\nb"}\n\n' + json.dumps({"messages": CHAT}), [(1, "a\nb"), (3, CHAT)]),
        ("no-telling-name", '\ufeff{"prompt": [81, 58], "id": 1}\n', [(1, [81, 58])]),
    ],
)
def test_what_files_have(tmp_path, name, text, wanted):
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    source = PromptFile(str(tmp_path / name))
    assert source.needs() == Needs(len(wanted), False)
    found = list(source.lines())
    assert [(line.number, prompt_of(source.entry(line))) for line in found] == wanted
    assert [line.row for line in found] == list(range(len(wanted)))
    assert read_prompts(str(tmp_path / name)) == [prompt for _, prompt in wanted]


def test_room_is_left_for_what_lines_bring(tmp_path):
    room = lambda *entries: PromptFile(str(write(tmp_path / "in.jsonl", *entries))).needs()
    plain = {"prompt": "a"}
    assert room(plain, {**plain, "options": {"threshold": 1}}) == Needs(2, False)
    assert room(plain, {**plain, "options": {"top_k": 1}}, "broken") == Needs(3, True)
    assert room(plain, {**plain, "regex": "a"}) == room({**plain, "json_schema": {}}, plain) == Needs(2, False, True)


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"options": {"temperature": 1}}, "temperature would make another program"),
        ({"regex": "a"}, "regex and json_schema of a request need room"),
    ],
    ids=["draw", "form"],
)
def test_a_pipe_is_read_as_it_comes(run, monkeypatch, llada_tiny, own, problem):
    text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:2])
    more = json.dumps({"prompt": "a", **own}) + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((text + more).encode())))
    wanted = samplers.generate(llada_tiny, PROMPTS[:2], **SHAPE)
    status, out, err = run("--prompts", "-")
    assert (status, out) == (2, "".join(f"--- {n}\n{answer.text}\n" for n, answer in enumerate(wanted, 1)))
    assert f"error: line 3: {problem}; the first line of a pipe decides" in err


def test_the_advice_on_a_line_is_what_helps(llada_tiny):
    """Room that is there already is not what an option lacks, wherever the lines come from."""
    flag, pipe = "pass it as a flag, for all lines", "the first line of a pipe decides"
    for needs, options, advice in [
        (Needs(None, False), {"temperature": 1}, pipe),
        (Needs(3, False), {"temperature": 1}, flag),
        (Needs(None, True), {"block_length": 4}, flag),
        (Needs(None, False), {"gen_length": 99}, "ask for less"),
    ]:
        requests = LineRequests(llada_tiny, needs, sampler="threshold", **SHAPE)
        own = options if "gen_length" in options else {"options": options}
        with refuses(*options, advice):
            requests.request(Line(0, 1, b""), {"prompt": "a", **own})


def test_every_key_of_an_answer_is_refused_in_a_line():
    answer = samplers.Generation("a", [65], 1, 1, 1, 0, [0], [65], [-0.5])
    assert {*answer_json(answer), *speed_json(answer, 1.0, 1.0)} <= set(WRITTEN)


def test_memory_does_not_grow_with_the_file(monkeypatch):
    """A line without end is refused, and the lines of a pipe are read one by one."""

    class Endless(io.RawIOBase):
        left, seen = 40 * 2**20, 0

        def readable(self):
            return True

        def readinto(self, buffer):
            size = min(len(buffer), self.left)
            buffer[:size] = b"x" * size
            self.left -= size
            if size < len(buffer) and size:
                buffer[size - 1 : size] = b"\n"
            return size

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(Endless())))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refuses("line 1", "16 MiB"):
        PromptFile("-")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 70 * 1024


def write_answers(path, *numbers):
    for number in numbers:
        with JsonLines(path) as output:
            output.begin()
            output.append({"line": number, "settings": {}})


def test_a_full_disk_leaves_whole_lines(tmp_path):
    path = tmp_path / "out.jsonl"
    write_answers(path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonLines(path) as output:
        output.begin()
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
        try:
            with refuses(path.name):
                output.append({"line": 2, "settings": {}})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert JsonLines(path).done == 1
    write_answers(path, 2)
    assert [line["line"] for line in read(path)] == [1, 2]


def test_a_file_belongs_to_one_process_at_a_time(tmp_path):
    path = tmp_path / "out.jsonl"
    with JsonLines(path) as one, JsonLines(path) as other:
        one.begin()
        with refuses(path.name):
            other.begin()


def started(llada_tiny, *arguments, **environment):
    command = [sys.executable, "-m", "samplers", "--model", str(llada_tiny.folder), *FLAGS, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def grown(path, count, process):
    """Waits until a file has so many lines, or its process has ended."""
    while lines_of(path) < count and process.poll() is None:
        time.sleep(0.002)


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    """A file whose answers take a while."""
    rng = np.random.default_rng(0)
    words = lambda: " ".join(f"{n}" for n in rng.integers(0, 99, rng.integers(1, 30)))
    entries = [{"prompt": f"Q: {words()}\nA: ", "id": n} for n in range(80)]
    return write(tmp_path_factory.mktemp("long") / "in.jsonl", *entries)


@pytest.mark.processes
def test_killed_at_any_moment(run, tmp_path, llada_tiny, long_file):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    drawn = ("--temperature", "0.7")
    assert started(llada_tiny, "--prompts", long_file, "--out", whole, *drawn).wait() == 0
    chance = random.Random(0)
    for _ in range(4):
        process = started(llada_tiny, "--prompts", long_file, "--out", out, *drawn)
        grown(out, lines_of(out) + 1 + chance.randrange(12), process)
        time.sleep(chance.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert 4 <= lines_of(out) < 80
    assert started(llada_tiny, "--prompts", long_file, "--out", out, *drawn).wait() == 0
    assert read(out) == read(whole) and len(read(out)) == 80


def test_shards_are_concatenated(run, tmp_path, long_file):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    drawn = ("--temperature", "0.7")
    assert run("--prompts", long_file, "--out", whole, *drawn)[0] == 0
    for index in range(3):
        assert run("--prompts", long_file, "--out", out, "--shard", f"{index}/3", *drawn)[0] == 0
    parts = sorted(tmp_path.glob("out.jsonl-*-of-00003"))
    assert [lines_of(part) for part in parts] == [26, 27, 27] and not out.exists()
    out.write_text("".join(part.read_text() for part in parts))
    without_logprobs = lambda path: [line | {"logprobs": None, "room": None} for line in read(path)]
    assert without_logprobs(out) == without_logprobs(whole)
    parts[1].write_text(parts[1].read_text()[:-20])
    before = parts[0].read_bytes()
    for index in range(3):
        assert run("--prompts", long_file, "--out", out, "--shard", f"{index}/3", *drawn)[0] == 0
    assert [lines_of(part) for part in parts] == [26, 27, 27] and parts[0].read_bytes() == before


def test_processes_that_meet_answer_a_shard_each(tmp_path, llada_tiny):
    path, out = write(tmp_path / "in.jsonl", *({"prompt": prompt} for prompt in PROMPTS)), tmp_path / "out.jsonl"
    address = f"127.0.0.1:{free_ports(1)[0]}"
    flags = ("--prompts", path, "--out", out, "--distributed")
    processes = [started(llada_tiny, *flags, f"{address},2,{i}", JAX_NUM_CPU_DEVICES="2") for i in range(2)]
    told = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    found = [line["prompt"] for part in sorted(tmp_path.glob("out.jsonl-*")) for line in read(part)]
    assert found == PROMPTS
