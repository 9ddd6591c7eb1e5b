"""Samples from a converted checkpoint: `python -m samplers "prompt" --model DIR_OR_NAME --rule RULE --cache CACHE`,
or `--sampler d2f:block_length=8,tau_add=0.1`, `--sampler apd --verifier DIR_OR_NAME --weight 0.7 --window 16`.

On a terminal the canvas is shown while it is being unmasked; through a pipe only the text is written, and the
statistics go to the standard error. A prompt is taken as it is: write line breaks as the shell does, $'like\\nthis'.

`python -m samplers --infill "The capital is<gap:8>, founded in<gap:4>." --model DIR_OR_NAME` fills the gaps of a
text; with a prompt, the text is the form of the answer to it.

`--save-view FILE.html` shows how the canvas was written, forward by forward (docs/viewer.md); also .gif and .png.

`python -m samplers --prompts in.jsonl --out out.jsonl --model DIR_OR_NAME` answers a file of any size, a line of
JSON for each line; after a kill the same command resumes, and `--shard I/N` answers part I of N (docs/batch.md).

`python -m samplers --explain --model DIR_OR_NAME ...` prints where every setting comes from, how many
forwards there will be, and what memory they take. It reads no weights (docs/choose.md).

`python -m samplers serve --model DIR_OR_NAME` runs a server with OpenAI's API (`... serve --help`), and
`python -m samplers decide` reads choices and scores from one forward (`... decide --help`). These first arguments
always mean that; to prompt with such a word, put it after an option: `--model DIR_OR_NAME serve`.
"""

import argparse
import contextlib
import functools
import io
import json
import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

import dllm_jax
from dllm_jax import DllmError, Model, spec
from dllm_jax.checkpoints.loading import load_shapes, outline
from dllm_jax.cli import docs
from dllm_jax.cli.command import Parser, run_printing
from dllm_jax.params.quantized import dtype_label
from samplers.caches import CACHES
from samplers.checks import check_number, check_whole
from samplers.cli.batch_files import SLOTS, LazyModel, answer_file, check_flags, shard_of
from samplers.cli.flags import (
    add_model,
    add_sampler,
    command_buffers_of,
    default_of,
    flag_of,
    model_name,
    prompts_of,
    read_flags,
    written_fields,
)
from samplers.cli.report import Totals, answer_json, print_statistics, print_text, run_json, settings_json, speed_json
from samplers.config.costs import costs_of
from samplers.config.explain import Setting, explanation_json, list_settings, print_explanation
from samplers.config.factory import CanvasSampler
from samplers.config.presets import PRESETS
from samplers.config.registry import LOOPS, type_of
from samplers.config.sampler_config import defaults_of
from samplers.engine.requests import Request, requests_of
from samplers.engine.runner import Runner, run_all
from samplers.generate import prepare
from samplers.generation import Generation
from samplers.infill import infilling_of, prepare_infill, requests_for
from samplers.rules import RULES
from samplers.text.prompts import bucket_length
from samplers.tokens.smoothing import Smoothing
from samplers.viewer.terminal import LiveView
from samplers.viewer.view import check_path, view_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the prompts; 0 when it worked, 2 after a mistake, which is printed as one sentence."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what it raises as well
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may hold what the terminal's encoding cannot
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["serve"]:
        return _serve(words[1:])
    if words[:1] == ["decide"]:
        return _decide(words[1:])
    work = lambda: _run(command_line().parse_intermixed_args(words))
    return run_printing(work, "use a smaller --batch-size or --gen-length")


def _serve(words: Sequence[str]) -> int:
    """`python -m samplers serve`, whose packages are imported only here."""
    from samplers.serving.cli import run

    return run_printing(lambda: run(words), "use fewer --slots, or a smaller --gen-length or --prompt-length")


def _decide(words: Sequence[str]) -> int:
    """`python -m samplers decide`."""
    from samplers.cli.decide import run

    return run_printing(lambda: run(words), "use a smaller --batch-size")


def command_line() -> argparse.ArgumentParser:
    """The options, for the command itself and for `dllm completion`."""
    parser = Parser(
        prog="python -m samplers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt", nargs="*", help="one or more prompts; without any, the standard input is one")
    add("--prompts", metavar="FILE", help='one prompt per line, or JSON lines with "prompt" or "messages"; - is stdin')
    add("--out", metavar="FILE", help="write answers to --prompts as JSON lines; after a kill the same command resumes")
    add("--shard", metavar="I/N", help="answer part I of N of --prompts, into OUT-0000I-of-0000N; I from 0 to N - 1")
    add("--on-error", choices=("stop", "skip", "fail"), help=_ON_ERROR)
    add("--distributed", nargs="?", const="", metavar="HOST:PORT,N,I", help=_DISTRIBUTED)
    add(
        "--infill",
        action="append",
        metavar="TEXT",
        help="fill this text's gaps; <gap:8> is a gap of 8 tokens; repeatable",
    )
    add_model(parser)
    add(
        "--explain",
        action="store_true",
        help="print every setting with its origin, the range of forwards, and the memory; loads no weights",
    )
    add("--list", action="store_true", help="print rules, cache policies and samplers with their options")
    add("--chat", action="store_true", help="take a prompt as a user's message in the model's chat format")
    add("--system", metavar="TEXT", help="system message; implies --chat")
    add("--seed", type=int, default=0, metavar="N", help="seed of the random numbers, if any are drawn (default: 0)")
    add("--batch-size", type=int, metavar="N", help="prompts sampled together (default: all; 16 of a file)")
    add_sampler(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object per prompt: text, tokens, decoded_at, speed, settings")
    add("--no-live", action="store_true", help="do not show the canvas while it is being unmasked")
    add("--save-view", metavar="FILE", help="draw the canvas after every forward: .html, .gif or .png (docs/viewer.md)")
    add("--delay", type=float, metavar="SECONDS", help="pause of the live view after each forward")
    return parser


_ON_ERROR = "after a bad line of --prompts (default: stop after the others); fail: skip it, and end with status 2"
_DISTRIBUTED = "answer one shard in each process: numbered by the cluster (SLURM, ...), or as process I of N"


def _run(options: argparse.Namespace) -> None:
    if options.list:
        print(_list_all())
        return
    check_number("delay", options.delay, 0.0)
    check_number("batch_size", options.batch_size, 1)
    check_whole("seed", options.seed, 0, 2**32 - 1)
    check_flags(options)
    _check_view(options)
    if options.explain:
        _explain(options)
        return
    shard = shard_of(options)
    if options.prompts is not None and options.infill is None and not options.prompt:
        answer = functools.partial(answer_file, options, _lazy_model(options), shard)
    else:
        answer = functools.partial(_answer_all, options)
    with command_buffers_of(options):
        answer()


def _check_view(options: argparse.Namespace) -> None:
    """Raises DllmError for a --save-view that cannot be written, or that has no effect."""
    if options.save_view is None:
        return
    check_path(options.save_view)
    if options.prompts is not None and options.infill is None:
        raise DllmError("--save-view shows prompts of the command line, not a file of them; leave out --prompts")


def _explain(options: argparse.Namespace) -> None:
    """Prints where the settings come from and what a run takes, of shapes alone."""
    look = functools.partial(load_shapes, dtype=options.dtype, quantize=options.quantize)
    lazy = _lazy_model(options, look)
    model = lazy.outline
    given = bool(options.prompt) or options.prompts is not None or options.infill is not None
    encoded = given and model.folder is not None  # else there is no tokenizer yet
    prompt = [model.config.eos_id] * min(USUAL_PROMPT, model.config.max_length // 4)
    usual = _Questions([{}], functools.partial(_prepare_prompts, [prompt]))
    questions = _questions_of(options) if given else usual
    sampler, requests, _ = (questions if encoded else usual).prepare(model, **lazy.options)
    number = len(questions.shown)
    together = min(options.batch_size or (SLOTS if options.prompts is not None else number), number)
    length = max(len(request.prompt) for request in requests)
    costs = costs_of(model, sampler, together, bucket_length(length))
    settings = _own_settings(options, model, together)
    if options.prompts is not None:
        settings.append(Setting("prompts", f"{number} of {options.prompts}", "the command line"))
    if not encoded:
        settings.append(Setting("prompt", f"{length} tokens", "the library"))
    settings += list_settings(lazy.sampler.over(defaults_of(model)))
    if options.json:
        print(explanation_json(settings, costs))
    else:
        print_explanation(settings, costs, sampler.gen_length)


USUAL_PROMPT = 128
"""Tokens of the prompt that `--explain` assumes if none is given."""


def _own_settings(options: argparse.Namespace, model: Model, together: int) -> list[Setting]:
    """The command's own settings.

    Args:
        together: rows of a batch.
    """
    chat, batch = options.chat or options.system is not None, options.batch_size
    stored = options.dtype is None and options.quantize is None
    published = model.folder is None
    rows = [  # name, value, whether the command line has it, and its origin otherwise
        ("model", model.name, not published, "the published one"),
        ("weights", dtype_label(model.params), not stored, "the published one" if published else "the checkpoint"),
        ("chat", spec.format_value(chat), chat, "the library"),
        ("seed", str(options.seed), options.seed, "the library"),
        ("batch_size", str(together), batch, "the library"),
        ("command_buffers", spec.format_value(options.command_buffers), options.command_buffers, "the library"),
    ]
    return [Setting(name, value, "the command line" if written else origin) for name, value, written, origin in rows]


def _lazy_model(options: argparse.Namespace, look: Callable[[str], Model] = outline) -> LazyModel:
    """The model and the options of its sampler.

    Args:
        look: gives a model without its parameters.
    """
    bare, sampler = read_flags(options, look)
    always = {"chat": options.chat, "system": options.system, "seed": options.seed}

    def load() -> tuple[Model, dict[str, Any]]:
        load = functools.partial(dllm_jax.load, dtype=options.dtype, quantize=options.quantize)
        with Console(stderr=True).status(f"loading {bare.name}", spinner="line"):
            return load(model_name(options)), {"sampler": sampler.load_verifier(load), **always}

    return LazyModel(bare, sampler, {"sampler": sampler.load_verifier(look), **always}, load)


def _answer_all(options: argparse.Namespace) -> None:
    """Answers prompts or fills gaps that the command line, the standard input or a file gives: all in one run."""
    questions, lazy = _questions_of(options), _lazy_model(options)
    questions.prepare(lazy.outline, **lazy.options)  # mistakes come before gigabytes are read
    model, settings = lazy.load()
    sampler, requests, answer_of = questions.prepare(model, **settings)
    live = _live_view(options) if len(requests) == 1 else None
    if live is None and not options.json:  # which leaves the standard error to errors
        print("compiling, then sampling ...", file=sys.stderr)
    traced = options.save_view is not None
    runner, ended = run_all(model, sampler, requests, options.batch_size, trace=traced, on_update=live)
    shared = settings_json(options, lazy.sampler.options, model.name, sampler) | run_json(model)
    answers = []
    with live or contextlib.nullcontext():
        for question, request in zip(questions.shown, ended, strict=True):
            answers.append(answer_of(request))
            if options.json:
                speed = speed_json(answers[-1], request.seconds, runner.stats.compile_seconds)
                print(json.dumps({**question, **answer_json(answers[-1]), "settings": shared, **speed}), flush=True)
    if not options.json:
        _print_texts(answers)
        totals = Totals()
        for answer in answers:
            totals.add(answer)
        print_statistics(totals, runner.stats.seconds, _timing(options, runner, live is not None), model, sampler)
    if options.save_view is not None:
        view_of(answers).save(options.save_view)


def _live_view(options: argparse.Namespace) -> LiveView | None:
    """The live view of the canvas; None if the output is no terminal, or other output is asked for."""
    if options.json or options.no_live or options.infill or not sys.stdout.isatty():
        return None
    return LiveView(delay=options.delay, keep=False)


def _timing(options: argparse.Namespace, runner: Runner, live: bool) -> str:
    """How long it took, for the line of statistics."""
    view = "live view" if live else "view" if options.save_view else None
    single = f" of single steps for the {view}" if view else ""
    advice = "; --no-live runs them as one program" if live and not options.save_view else ""
    return f"{runner.stats.seconds:.3f} s{single}, compiled before in {runner.stats.compile_seconds:.1f} s{advice}"


class _Questions(NamedTuple):
    """The prompts and templates of the command line.

    Attributes:
        shown: of each answer, for JSON: its prompt, and its template if there is one.
        prepare: (model, settings) -> the sampler, the requests, and what makes the answer of one that has ended; raises
            DllmError for bad settings, and reads no parameters.
    """

    shown: list[dict[str, Any]]
    prepare: Callable[..., tuple[CanvasSampler, list[Request], Callable[[Request], Generation]]]


def _questions_of(options: argparse.Namespace) -> _Questions:
    if options.infill is None:
        prompts = prompts_of(options)
        return _Questions([{"prompt": prompt} for prompt in prompts], functools.partial(_prepare_prompts, prompts))
    templates = options.infill
    given: list[Any] = prompts_of(options) if options.prompt or options.prompts is not None else [None]
    prompt, each = (given[0], given * len(templates)) if len(given) == 1 else (given, given)
    shown = [{"prompt": one, "template": template} for one, template in zip(each, templates, strict=False)]
    return _Questions(shown, functools.partial(_prepare_infilling, templates, prompt))


def _prepare_prompts(prompts: list[Any], model: Model, **settings: Any) -> Any:
    sampler, rows, keys = prepare(model, prompts, **settings)
    requests = requests_of(sampler, rows, keys, settings["sampler"].options.get("stop") or ())
    return sampler, requests, lambda request: request.generation


def _prepare_infilling(templates: list[str], prompt: Any, model: Model, **settings: Any) -> Any:
    plan = prepare_infill(model, templates, prompt=prompt, **settings)
    return plan.sampler, requests_for(model, plan), functools.partial(infilling_of, model, plan)


def _print_texts(answers: Sequence[Generation]) -> None:
    for number, answer in enumerate(answers, start=1):
        if len(answers) > 1:
            print(f"--- {number} of {len(answers)}")
        print_text(answer.text)


def _list_all() -> str:
    """All rules, cache policies and samplers with their options, smoothing, and the presets."""
    width = min(shutil.get_terminal_size().columns, 110)
    lines = ["rules, by --rule:", *_list_options(RULES, width)]
    lines += ["", "cache policies, by --cache:", *_list_options(CACHES, width)]
    lines += ["", "samplers with a loop of their own, by --sampler NAME:option=value,option=value or flags:"]
    lines += [*_list_options(LOOPS, width), "", *_wrap(f"--smoothing: {docs.summary(Smoothing)}", width, "  ")]
    lines += ["", "presets, by --preset:", ""]
    for name, options in PRESETS.items():
        listed = ", ".join(f"{option} {value}" for option, value in options.items() if option != "smoothing")
        smooth = ", smoothing" if "smoothing" in options else ""
        lines += _wrap(f"{name}: {listed}{smooth}", width, "  ")
    return "\n".join(lines)


def _list_options(table: Mapping[str, type], width: int) -> Iterator[str]:
    for name, kind in table.items():
        yield ""
        yield from _wrap(f"{name}: {docs.summary(kind)}", width, "  ")
        about = docs.attributes(kind)
        for option in written_fields(kind):
            words = ", ".join(spec.choices(type_of(kind, option)))
            values = f"(default: {default_of(kind, option)}{words and f'; one of {words}'})"
            meaning, why = about.get(option, docs.About())
            about_it = f"{meaning} Default: {why}." if why else meaning
            yield from _wrap(f"    {flag_of(option)} {values} {about_it}", width, "        ")


def _wrap(text: str, width: int, indent: str) -> Iterator[str]:
    yield from textwrap.wrap(text, width, subsequent_indent=indent)
