"""`python -m samplers` and its live view: what a user sees on a terminal, through a pipe and as JSON."""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
import tokenizers
import transformers
from conftest import one_error
from rich.console import Console

import dllm_jax
import samplers
from dllm_jax.checkpoints import checkpoint
from samplers import CACHES, RULES, Generation, Smoothing
from samplers.cli import report
from samplers.cli import sample as cli
from samplers.engine.engine import Stats
from samplers.text.display import END, Speller, printable
from samplers.viewer import terminal
from samplers.viewer.terminal import LiveView

PROMPT = "Q: Tom has 12 books. Tom buys 23.\nA: "
OTHER = "Q: Ann has 40 pens. Ann buys 17.\nA: "
SHORT = ("--gen-length", "16", "--block-length", "8")
SHAPE = {"gen_length": 16, "block_length": 8}
GENERAL = [name for name, policy in CACHES.items() if not getattr(policy, "in_order", False)]  # those for any model


@pytest.fixture
def run(capsys, llada_tiny):
    """Runs the command line on the tiny LLaDA: (status, standard output, standard error)."""

    def call(*arguments):
        status = cli.main([*arguments, "--model", str(llada_tiny.folder)])
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def asked(monkeypatch):
    """Replaces sampling by a record of what it was asked for: {"prompts": ..., and all options}."""
    seen, really = {}, cli.prepare

    def prepare(model, prompts, **options):
        config = options["sampler"]
        seen.update({**options, **config.options, "sampler": config.name}, prompts=prompts)
        return really(model, prompts, **options)

    def run_all(model, sampler, requests, batch_size, **_):
        for request in requests:
            request.seconds = 1.0
            request.generation = Generation(f"answer {request.number}", [65], 1, 1, 1, 0, [0], [65], [-0.5])
        return SimpleNamespace(stats=Stats(seconds=1.0)), requests

    for name, stand_in in (("prepare", prepare), ("run_all", run_all)):
        monkeypatch.setattr(cli, name, stand_in)
    return seen


@pytest.fixture
def stdin(monkeypatch):
    """Sets the standard input to a text, or to a terminal by None."""

    def put(text):
        stream = io.StringIO(text or "")
        stream.isatty = lambda: text is None
        monkeypatch.setattr(sys, "stdin", stream)

    return put


@pytest.fixture(scope="module")
def answer(llada_tiny):
    return samplers.generate(llada_tiny, PROMPT, **SHAPE)


def test_through_a_pipe_the_text_is_alone_and_plain(run, answer):
    status, out, err = run(PROMPT, *SHORT)
    assert (status, out) == (0, answer.text + "\n")
    assert "\x1b" not in out + err
    first, line = err.splitlines()
    assert "compiling" in first  # which takes several seconds, in which nothing else is said
    assert f"NFE {answer.nfe} ({answer.full_forwards} full + {answer.nfe - answer.full_forwards} window)" in line
    assert f"{len(answer.tokens)} tokens, {answer.tokens_per_forward:.2f} per forward" in line
    assert "tokens/s" in line and "compiled before in" in line
    assert "threshold=0.9" in line and "dual" in line and "float32 on " in line


def test_json_has_the_trajectory_the_speed_and_the_settings(run, answer):
    status, out, err = run(PROMPT, *SHORT, "--json")
    assert (status, err) == (0, "")
    (line,) = map(json.loads, out.splitlines())
    assert line["logprobs"] == pytest.approx(answer.logprobs, rel=1e-4) and len(line["logprobs"]) == len(line["tokens"])
    told = (line["text"], line["tokens"], line["prompt_tokens"], line["nfe"], line["full_forwards"])
    assert told == (answer.text, answer.tokens, answer.prompt_tokens, answer.nfe, answer.full_forwards)
    assert (line["decoded_at"], line["canvas"]) == (answer.decoded_at, answer.canvas)
    assert line["tokens_per_second"] == pytest.approx(len(answer.tokens) / line["seconds"])
    assert line["tokens_per_forward"] == answer.tokens_per_forward and line["compile_seconds"] > 0
    settings = line["settings"]
    plain = {"steps": None, "tolerance": None, "skip_masks": False}
    assert settings["rule"] == {"name": "threshold", "threshold": 0.9, **plain}
    assert settings["cache"] == {"name": "dual", "refresh_every": None, "prompt_block_length": None}
    assert (settings["gen_length"], settings["block_length"]) == (16, 8)
    assert (settings["model"], settings["dtype"], settings["seed"]) == ("llada-tiny", "float32", 0)
    assert settings["versions"]["jax"] == jax.__version__


def test_a_batch_answers_like_its_prompts_alone(run, llada_tiny, answer):
    status, out, err = run(PROMPT, OTHER, PROMPT, *SHORT, "--batch-size", "2", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [line["prompt"] for line in lines] == [PROMPT, OTHER, PROMPT]
    other = samplers.generate(llada_tiny, OTHER, **SHAPE)
    assert [line["decoded_at"] for line in lines] == [answer.decoded_at, other.decoded_at, answer.decoded_at]
    assert [line["tokens"] for line in lines] == [answer.tokens, other.tokens, answer.tokens]
    assert all(line["seconds"] > 0 for line in lines)
    assert lines[0]["compile_seconds"] == lines[2]["compile_seconds"]  # all share one program


@pytest.fixture
def needed(ni_indicator):
    """Rule -> the options that it cannot do without."""
    return {"ni": ("--indicator", str(ni_indicator))}


@pytest.mark.parametrize(("rule", "cache"), [("ni", "none"), ("edit", "prefix"), ("hierarchical", "vicinity")])
def test_rules_run(run, needed, rule, cache):
    status, out, err = run(PROMPT, "--rule", rule, "--cache", cache, "--json", *SHORT, *needed.get(rule, ()))
    line = json.loads(out)
    assert (status, line["settings"]["rule"]["name"], line["settings"]["cache"]["name"]) == (0, rule, cache)
    if RULES[rule].revises:  # whose forwards may write what is written again, or nothing
        assert set(line["decoded_at"]) <= set(range(line["nfe"]))
    else:
        assert sorted(set(line["decoded_at"])) == list(range(line["nfe"]))
    assert (line["full_forwards"] == line["nfe"]) == (cache == "none")


@pytest.mark.parametrize("cache", GENERAL)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_accepted_with_every_cache(run, asked, needed, rule, cache):
    status, out, err = run(PROMPT, "--rule", rule, "--cache", cache, *SHORT, *needed.get(rule, ()))
    assert (status, out, asked["rule"], asked["cache"]) == (0, "answer 0\n", rule, cache)


def test_options_arrive_with_their_types(run, asked):
    run("a", "--rule", "dream", "--steps", "8", "--alg", "origin", "--eps", "1e-2", "--alg-temp", "0.5", *SHORT)
    names = ("prompts", "rule", "steps", "alg", "eps", "alg_temp", "gen_length", "block_length")
    assert [asked[name] for name in names] == [["a"], "dream", 8, "origin", 0.01, 0.5, 16, 8]
    run("a", "b", "--rule=eb", "--gamma=inf", "--cfg=1.5", "--top-p=0.9", "--top-k=3", "--seed=7", "--block-length=0")
    names = ("gamma", "guidance", "top_p", "top_k", "seed", "block_length")
    assert [asked[name] for name in names] == [float("inf"), 1.5, 0.9, 3, 7, 0]
    run("a", "--stop", "\n\n", "--stop", "Q:", "--stop-id", "65", "--ignore-eos", "--fill-after-eos", "--chat")
    names = ("stop", "ignore_eos", "fill_after_eos", "chat")
    assert [asked[name] for name in names] == [["\n\n", "Q:", 65], True, True, True]
    run("a", "--suppress", "0", "--suppress-id", "65")
    assert asked["suppress"] == ["0", 65]


def test_cache_policies_and_smoothing_have_options(run, asked):
    run("a", "--cache", "vicinity", "--prefix-look", "4", "--warmup=0", "--smoothing", "weight=0.2", "--align-blocks")
    names = ("cache", "prefix_look", "warmup", "smoothing", "smoothing_weight", "align_blocks")
    assert [asked[name] for name in names] == ["vicinity", 4, 0, True, 0.2, True]
    run("a", "--cache", "dual", "--refresh-every", "4", "--smoothing", "--json")
    assert (asked["refresh_every"], asked["smoothing"]) == (4, True)


def test_a_preset_is_changed_by_what_is_written(run, asked):
    def settings(*arguments):
        return json.loads(run("a", *arguments, "--json")[1])["settings"]

    found = settings("--preset", "llada-moe-td", "--gen-length", "16", "--block-length=8", "--threshold=0.7")
    assert found["rule"] == {"name": "hierarchical", "threshold": 0.7, "low_threshold": 0.62}
    assert (found["cache"]["name"], found["cache"]["warmup"], found["gen_length"]) == ("vicinity", 4, 16)
    assert found["align_blocks"] and found["smoothing"] == dataclasses.asdict(Smoothing(weight=0.3))
    found = settings("--preset", "llada-moe-cache", "--rule", "eb", "--cache=dual", *SHORT)
    assert found["rule"] == {"name": "eb", "gamma": 0.1, "proxy": "entropy", "score_from": "raw"}
    assert (
        found["cache"] == {"name": "dual", "refresh_every": None, "prompt_block_length": None} and found["align_blocks"]
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("'threshold'", ["--rule=eb", "--threshold=0.9"]),
        ("'warmup'", ["--cache=none", "--warmup=2"]),
        ("'few'", ["--cache=vicinity", "--warmup=few"]),
        ("prefix_look", ["--cache=vicinity", "--prefix-look=-1"]),
        ("refresh_every", ["--cache=dual", "--refresh-every=0"]),
        ("'alpha'", ["--smoothing=alpha=1"]),
        ("'much'", ["--smoothing=weight=much"]),
        ("weight of the smoothing", ["--smoothing=weight=-1"]),
        ("'fastest'", ["--preset=fastest"]),
        ("'d4f'", ["--sampler=d4f"]),
        ("rule=eb", ["--sampler=threshold", "--rule=eb"]),
        ("'gamma'", ["--sampler=d2f", "--gamma=1"]),
        ("--preset", ["--sampler=d2f", "--preset=fast-dllm"]),
        ("'block_length'", ["--sampler=leftright", "--block-length=8"]),
        ("gen_length", ["--sampler=d2f:gen_length=8", "--gen-length=16"]),
        ("verifier", ["--sampler=apd:weight=0.5"]),
        ("/nowhere", ["--sampler=apd:verifier=/nowhere"]),
        ("tau_add", ["--sampler=d2f:tau_add=2"]),
        ("a prompt of 1 tokens", ["--gen-length=1000"]),
        ("NVIDIA", ["--command-buffers"]),
    ],
)
def test_mistakes_come_before_the_parameters_are_read(llada_tiny, capsys, monkeypatch, name, options):
    monkeypatch.setattr(cli.dllm_jax, "load", pytest.fail)
    assert cli.main(["a", *options, "--model", str(llada_tiny.folder)]) == 2
    assert name in one_error(capsys)


@pytest.fixture(scope="module")
def written_to(llada_tiny, tmp_path_factory):
    """A folder of a causal model beside the tiny LLaDA: a verifier of the same tokens."""
    config = llada_tiny.config.replace(family="qwen2", attention="causal", shift=True, qkv_bias=True)
    beside = dllm_jax.random_model(config, key=1)
    folder = tmp_path_factory.mktemp("beside") / "verifier"
    checkpoint.save(folder, beside.config, beside.params.items())
    for path in llada_tiny.folder.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def test_the_pipeline_runs_from_the_shell(run):
    status, out, err = run(PROMPT, "--sampler", "d2f:block_length=8,threshold=0.5", "--gen-length", "16", "--json")
    line = json.loads(out)
    assert (status, err, line["verifier_forwards"], len(line["canvas"])) == (0, "", None, 16)
    assert sorted({at for at in line["decoded_at"] if at >= 0}) == list(range(line["nfe"]))
    numbers = {"name": "d2f", "threshold": 0.5, "tau_add": 0.1, "block_length": 8, "gen_length": 16, "rule": None}
    assert {name: line["settings"][name] for name in numbers} == numbers


def test_a_verifier_and_the_sampler_s_own_model_are_found(capsys, llada_tiny, written_to):
    """The same answer as from Python, and how drafts fared."""
    spec = f"apd:verifier={written_to},weight=0.8,window=8,lookahead=8,gen_length=16@{llada_tiny.folder}"
    options = {"weight": 0.8, "window": 8, "lookahead": 8, "gen_length": 16, "stop": ["e"]}
    wanted = samplers.generate(llada_tiny, PROMPT, sampler="apd", verifier=dllm_jax.load(written_to), **options)
    assert cli.main([PROMPT, "--sampler", spec, "--stop", "e"]) == 0
    out, err = capsys.readouterr()
    assert out == wanted.text + "\n" and "apd weight=0.8 window=8 lookahead=8" in err
    assert f"{wanted.committed / wanted.nfe:.2f} accepted per forward, {wanted.nfe} verifier forwards" in err


def test_samplers_with_loops_of_their_own_have_a_live_view(run, monkeypatch, llada_tiny):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    spec = "leftright:tokens_per_step=4,window=8,lookahead=8"
    status, out, err = run(PROMPT, "--sampler", spec, "--gen-length", "16", "--delay", "0")
    assert (status, err) == (0, "") and "leftright tokens_per_step=4 window=8 lookahead=8" in out
    assert all(f"forward {number} " in out for number in range(4)) and "accepted per forward, 0 verifier" in out


def test_rules_are_named_as_samplers_too(run, asked):
    run("a", "--sampler", "eb:gamma=0.2,cache=dual,block_length=8", "--gen-length=16", "--stop=Q:")
    wanted = {"sampler": "eb", "gamma": 0.2, "cache": "dual", "block_length": 8, "gen_length": 16, "stop": ["Q:"]}
    assert {name: asked[name] for name in wanted} == wanted
    status, out, err = run("a", "--sampler", "llada-moe-td:threshold=0.7", "--gen-length=16", "--json")
    settings = json.loads(out)["settings"]
    assert settings["rule"] == {"name": "hierarchical", "threshold": 0.7, "low_threshold": 0.62}
    assert (settings["block_length"], settings["gen_length"], settings["align_blocks"]) == (16, 16, True)


def test_flags_may_stand_beside_a_sampler(run, asked):
    run("a", "--sampler", "d2f:tau_add=0.2", "--rule", "eb", "--gamma", "0.2", "--tau-act", "0.5", *SHORT)
    wanted = {"sampler": "d2f", "tau_add": 0.2, "rule": "eb", "gamma": 0.2, "tau_act": 0.5, "gen_length": 16}
    assert {name: asked[name] for name in wanted} == wanted


def test_infinity_is_valid_json(run, asked):
    status, out, err = run("a", "--rule", "eb", "--gamma", "inf", "--json")
    line = json.loads(out, parse_constant=pytest.fail)
    assert line["settings"]["rule"] == {"name": "eb", "gamma": "inf", "proxy": "entropy", "score_from": "raw"}
    status, out, err = run("a", "--sampler", "d2f:rule=eb,gamma=inf", "--json")
    assert json.loads(out, parse_constant=pytest.fail)["settings"]["rule"] == line["settings"]["rule"]


def test_prompts_stand_before_and_after_options(capsys, asked, llada_tiny):
    assert cli.main(["a", "--model", str(llada_tiny.folder), "b", "--json", "c"]) == 0
    assert asked["prompts"] == ["a", "b", "c"]


def test_prompts_of_the_standard_input(run, asked, stdin):
    stdin("Q: one\nA: two\n")
    assert run()[:2] == (0, "answer 0\n")
    assert asked["prompts"] == ["Q: one\nA: two"]
    stdin(None)
    status, out, err = run()
    assert status == 2 and err.startswith("error: no prompt was given")


def test_the_list_needs_no_model(capsys, monkeypatch):
    monkeypatch.setattr(cli.dllm_jax, "load", pytest.fail)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: " in out for name in (*RULES, *CACHES))
    assert "--gamma (default: 0.1) bound on the sum" in out and "--steps (default: one per token)" in out
    assert "apd: Writes as much of the dLLM's draft" in out and "    --verifier (default: required) the" in out
    assert "    --tau-add (default: 0.1) decoded share" in out and "temperature (" not in out
    assert "one of low_confidence, random" in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_help_names_every_option_of_every_rule(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert "of topk (default: confidence), eb (default: entropy): confidence, entropy, margin" in out
    assert "of llada (default: one per token), dream (default: one per token), threshold (default: none)" in out


def test_on_a_terminal_the_text_and_the_statistics_follow_the_live_view(run, monkeypatch, answer):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, out, err = run(PROMPT, *SHORT, "--delay", "0")
    assert (status, err) == (0, "")
    view, _, after = out.rpartition("\x1b[2K")  # the last frame is erased
    assert "masks left" in view and "\x1b[?25h" in view  # and the cursor is back
    text, statistics = after.splitlines()
    assert text == answer.text
    assert f"NFE {answer.nfe} " in statistics and "single steps for the live view" in statistics


@pytest.mark.parametrize("arguments", [("--no-live",), ("b",), ("--json",)])
def test_the_live_view_stays_away(run, asked, monkeypatch, arguments):
    monkeypatch.setattr(cli, "LiveView", pytest.fail)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, out, err = run("a", *arguments)
    assert status == 0 and "answer 0" in out and "live view" not in out
    assert (err == "") == (arguments == ("--json",))  # else it says that it compiles
    assert ("tokens/s" in out.splitlines()[-1]) == (arguments != ("--json",))


def test_an_answer_cannot_steer_the_terminal():
    assert report.for_terminal("a\x1b[2Jb\r\n\tc\x9b　é") == "a\\x1b[2Jb\\r\n\tc\\x9b　é"


@pytest.fixture(scope="module")
def frames(llada_tiny):
    """The live view as a terminal would get it: frames(**what the console is like) -> (the answer, text)."""

    def draw(file=None, **options):
        file = io.StringIO() if file is None else file
        console = Console(file=file, force_terminal=True, **options)
        with LiveView(console=console, delay=0) as live:
            return samplers.generate(llada_tiny, PROMPT, on_update=live, **SHAPE), file

    return draw


def test_the_live_view_shows_every_forward(frames, answer):
    watched, file = frames(width=100, height=20, color_system="standard")
    out = file.getvalue()
    assert watched == answer
    assert "compiling" in out and all(f"forward {number} " in out for number in range(answer.nfe + 1))
    assert "16 masks left" in out and "0 masks left" in out and "threshold=0.9 × dual" in out
    assert "\x1b[2m░" in out and "\x1b[2m│" in out and "\x1b[1;7;32m" in out
    last = out.rpartition("forward")[2]
    assert "░" not in last and "\x1b[1;7;32m" not in last and answer.text[:8] in last


@pytest.mark.parametrize("width, height", [(1, 1), (7, 3), (30, 2)])
def test_the_live_view_fits_any_terminal(frames, answer, width, height):
    watched, file = frames(width=width, height=height)
    assert watched == answer


def test_the_live_view_needs_neither_unicode_nor_colour(frames, answer):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    watched, file = frames(file, width=80, no_color=True)
    file.flush()
    out = file.buffer.getvalue().decode("ascii")
    assert watched == answer
    assert "_" in out and "threshold=0.9 x dual" in out and "\x1b[1;7m" in out and "32m" not in out


def test_a_long_canvas_scrolls_to_the_first_mask():
    texts = ["x"] * 100 + [None] * 100
    canvas = terminal.CanvasText(["head"], texts, (), 200)
    console = Console(file=io.StringIO(), force_terminal=True, width=10, height=8, no_color=True)
    console.print(canvas)
    lines = console.file.getvalue().replace("\x1b[2m", "").replace("\x1b[0m", "").splitlines()
    assert len(lines) == 7 and lines[1:4] == ["x" * 10, "x" * 10, "░" * 10]


def speller(*pieces):
    """A speller of a byte-level vocabulary; its pieces are written in the stand-ins for bytes."""
    vocab = {piece: i for i, piece in enumerate(pieces)} | {"<|mask|>": 8, "<|eos|>": 9}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab))
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<|mask|>", "<|eos|>"])
    config = SimpleNamespace(eos_id=9, end_ids=(9,), vocab_size=10)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    return Speller(SimpleNamespace(tokenizer=tokenizer, config=config))


def test_characters_of_several_tokens_are_put_together():
    spell = speller("âĸ", "Ī", "aĊ", "", "ÿ")
    assert spell([0, 1, 2], [True] * 3) == ["", "█", "a\n"]
    assert spell([0, 1, 2], [True, False, True]) == ["\\xe2\\x96", None, "a\n"]
    assert spell([0, 9, 8, 1], [True] * 4) == ["\\xe2\\x96", END, "<|mask|>", "\\x88"]
    assert spell([3, 4, 0], [True] * 3) == ["<3>", "\\xff", "\\xe2\\x96"]


def test_without_a_tokenizer_ids_are_shown():
    spell = Speller(SimpleNamespace(tokenizer=None, config=SimpleNamespace(eos_id=9, end_ids=(9,))))
    assert spell([5, 9, 7], [True, True, False]) == ["5 ", END, None]


def test_control_characters_are_shown_not_sent():
    assert printable("a\x1b[2J\n\u202eé", marks={"\n": "↵"}) == "a\\x1b[2J↵\\u202eé"
    assert printable("é\ud800", ascii_only=True) == "\\xe9\\ud800"


def test_as_a_user_would_call_it(llada_tiny, answer):
    command = [sys.executable, "-m", "samplers", "--model", str(llada_tiny.folder), *SHORT]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([*command, PROMPT], cwd=root, capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, answer.text + "\n"), done.stderr
    assert "tokens/s" in done.stderr and "\x1b" not in done.stderr
    done = subprocess.run([*command, "--steps", "7"], cwd=root, capture_output=True, text=True, input=PROMPT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: steps 7 is not a multiple of the 2 blocks; choose a multiple\n"
