"""Samples from a converted checkpoint: `python -m samplers "prompt" --model DIR_OR_NAME --rule RULE --cache CACHE`,
or `--sampler d2f:block_length=8,tau_add=0.1`, `--sampler apd --verifier DIR_OR_NAME --weight 0.7 --window 16`.

On a terminal the canvas is shown while it is being unmasked; through a pipe the text alone is written, and the
statistics go to the standard error. A prompt is taken as it is: write line breaks as the shell does, $'like\\nthis'.

`python -m samplers --infill "The capital is<gap:8>, founded in<gap:4>." --model DIR_OR_NAME` fills the gaps of a
text; with a prompt beside it, the text is the answer to that.

`python -m samplers serve --model DIR_OR_NAME` is a server in the shape of OpenAI's (`... serve --help`). A first
argument `serve` always means that; as a prompt the word goes behind an option: `--model DIR_OR_NAME serve`.
"""

import argparse
import contextlib
import functools
import inspect
import io
import json
import logging
import math
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

import dllm_jax
from dllm_jax import DllmError, Model
from dllm_jax.loading import outline
from dllm_jax.quantized import told_dtype
from dllm_jax.tools import spec
from dllm_jax.tools.command import Parser, run_printing
from samplers.answers import Generation
from samplers.build import CanvasSampler, defaults_of, typed, with_verifier
from samplers.caches import CACHES
from samplers.checks import check_number
from samplers.flags import add_model, add_sampler, default_of, flag_of, said_by, written_fields
from samplers.generate import answered, prepare
from samplers.infill import Infilling, filled, prepare_infill, requests_for
from samplers.live import printable, watch
from samplers.presets import PRESETS
from samplers.prompts import Prompt
from samplers.registry import LOOPS, kind_of, settings_of, title
from samplers.requests import Request, requests_of
from samplers.rules import RULES
from samplers.running import run_all
from samplers.smoothing import Smoothing

JSON_LINES = (".jsonl", ".ndjson")


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the prompts; 0 when it worked, 2 after a mistake, which is printed as one sentence."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what it raises as well
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may hold what the terminal's encoding cannot
    said = sys.argv[1:] if arguments is None else list(arguments)
    if said[:1] == ["serve"]:
        return _serve(said[1:])
    work = lambda: _run(_parser().parse_intermixed_args(said))
    return run_printing(work, "use a smaller --batch-size or --gen-length")


def _serve(said: Sequence[str]) -> int:
    """`python -m samplers serve`, which brings what this command does without."""
    from samplers.serving.command import run

    return run_printing(lambda: run(said), "use fewer --slots, or a smaller --gen-length or --prompt-length")


def _parser() -> argparse.ArgumentParser:
    """What says how to sample is in the options only where it was written: defaults are the checkpoint's to say."""
    parser = Parser(
        prog="python -m samplers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt", nargs="*", help="one or more prompts; without any, the standard input is one")
    add("--prompts", metavar="FILE", help='one prompt per line, or JSON lines with "prompt" or "messages"; - is stdin')
    add(
        "--infill",
        action="append",
        metavar="TEXT",
        help="fill this text's gaps, <gap:8> is one of 8 tokens; repeatable",
    )
    add_model(parser)
    add("--list", action="store_true", help="print rules, cache policies and samplers with their options")
    add("--chat", action="store_true", help="take a prompt as a user's message in the model's chat format")
    add("--system", metavar="TEXT", help="system message; implies --chat")
    add("--seed", type=int, default=0, metavar="N", help="of the random numbers, where any are drawn (default: 0)")
    add("--batch-size", type=int, metavar="N", help="prompts sampled together (default: all)")
    add_sampler(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object per prompt: text, tokens, trajectory, speed, settings")
    add("--no-live", action="store_true", help="do not show the canvas while it is being unmasked")
    add("--delay", type=float, metavar="SECONDS", help="of the live view, after each forward")
    return parser


def _run(options: argparse.Namespace) -> None:
    if options.list:
        print(_listing())
        return
    name, texts, named = said_by(options, _parser().parse_args([]))
    if named is None:
        raise DllmError("no model was named; pass --model DIR_OR_NAME")
    check_number("delay", options.delay, 0.0)
    check_number("batch_size", options.batch_size, 1)
    work, bare = _work(options), outline(named)
    said = typed(name, texts, under=defaults_of(bare)).options
    always = {"sampler": name, "chat": options.chat, "system": options.system, "seed": options.seed}
    work.prepare(bare, **with_verifier(said, outline), **always)  # mistakes come before gigabytes are read
    load = functools.partial(dllm_jax.load, dtype=options.dtype, quantize=options.quantize)
    with Console(stderr=True).status(f"loading {named}", spinner="line"):
        model, settings = load(named), {**with_verifier(said, load), **always}
    ready = work.prepare(model, **settings)
    shown = sys.stdout.isatty() and not (options.json or options.no_live or options.infill)
    if shown and len(work.lines) == 1:
        _show_live(model, work.lines[0]["prompt"], ready.sampler, settings, options.delay)
        return
    runner, done = run_all(model, ready.sampler, ready.requests, options.batch_size)
    told, answers = _told(options, said, model, ready.sampler), []
    for line, request in zip(work.lines, done, strict=True):
        answers.append(ready.answer_of(request))
        if options.json:
            print(json.dumps(line | _json(answers[-1], request.seconds, runner.compile_seconds, told)), flush=True)
    if not options.json:
        _print_texts(answers)
        speed = f"{runner.seconds:.3f} s, compiled before in {runner.compile_seconds:.1f} s"
        _print_statistics(answers, runner.seconds, speed, model, ready.sampler)


class _Work(NamedTuple):
    """What is asked for.

    Attributes:
        lines: the question of each answer, for JSON.
        prepare: (model, settings) -> what is to be run, after all checks.
    """

    lines: list[dict[str, Any]]
    prepare: Callable[..., "_Ready"]


class _Ready(NamedTuple):
    """What is to be run, and what makes an answer of a request that has ended."""

    sampler: CanvasSampler
    requests: list[Request]
    answer_of: Callable[[Request], Generation]


def _work(options: argparse.Namespace) -> _Work:
    if options.infill is None:
        prompts = _prompts(options)
        return _Work([{"prompt": prompt} for prompt in prompts], functools.partial(_generation, prompts))
    templates = options.infill
    given: list[Any] = _prompts(options) if options.prompt or options.prompts is not None else [None]
    prompt, each = (given[0], given * len(templates)) if len(given) == 1 else (given, given)
    lines = [{"prompt": one, "template": template} for one, template in zip(each, templates, strict=False)]
    return _Work(lines, functools.partial(_infilling, templates, prompt))


def _generation(prompts: list[Any], model: Model, **settings: Any) -> _Ready:
    sampler, rows, keys = prepare(model, prompts, **settings)
    return _Ready(sampler, requests_of(sampler, rows, keys, settings.get("stop") or ()), answered)


def _infilling(templates: list[str], prompt: Any, model: Model, **settings: Any) -> _Ready:
    plan = prepare_infill(model, templates, prompt=prompt, **settings)
    return _Ready(plan.sampler, requests_for(model, plan), functools.partial(filled, model, plan))


def _show_live(
    model: Model, prompt: Prompt, sampler: CanvasSampler, settings: dict[str, Any], delay: float | None
) -> None:
    watched = watch(model, prompt, delay=delay, keep=False, **settings)
    _print_texts([watched.generation])
    steps = f"{watched.seconds:.3f} s of single steps for the live view"
    speed = f"{steps}, compiled before in {watched.compile_seconds:.1f} s; --no-live runs them as one program"
    _print_statistics([watched.generation], watched.seconds, speed, model, sampler)


def _prompts(options: argparse.Namespace) -> list[Any]:
    if options.prompt and options.prompts is not None:
        raise DllmError("prompts were given both on the command line and by --prompts; choose one")
    if options.prompt:
        return options.prompt
    if options.prompts is not None:
        return _prompts_of_file(options.prompts)
    if sys.stdin is None or sys.stdin.isatty():
        raise DllmError("no prompt was given; write one behind the command, or name a file by --prompts")
    return [_read("-").removesuffix("\n")]


def _prompts_of_file(name: str) -> list[Any]:
    """The prompts in a file, one per line that is not blank."""
    where = "line" if name == "-" else f"{name} line"
    lines = [line.removesuffix("\r") for line in _read(name).split("\n")]
    numbered = [(f"{where} {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise DllmError(f"{'the standard input' if name == '-' else name} has no prompts; write one per line")
    if name.endswith(JSON_LINES) or _is_entry(numbered[0][1]):
        return [_entry(line, where) for where, line in numbered]
    return [line for _, line in numbered]


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DllmError(f"{'the standard input' if name == '-' else name} could not be read ({error})") from None


def _is_entry(line: str) -> bool:
    """Whether the first line of a file without a telling name is a JSON line."""
    with contextlib.suppress(json.JSONDecodeError, RecursionError):
        entry = json.loads(line)
        return isinstance(entry, dict) and not {"prompt", "messages"}.isdisjoint(entry)
    return False


def _entry(line: str, where: str) -> Any:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DllmError(f"{where} is not valid JSON ({error})") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise DllmError(f'{where} must be an object with either "prompt" or "messages"')
    prompt = entry.get("prompt", entry.get("messages"))
    if not isinstance(prompt, list if "messages" in entry else (str, list)):
        raise DllmError(f"{where}: {prompt!r} is no prompt; a text, token ids or messages are")
    return prompt


def _print_texts(answers: Sequence[Generation]) -> None:
    for number, answer in enumerate(answers, start=1):
        if len(answers) > 1:
            print(f"--- {number} of {len(answers)}")
        print(_for_terminal(answer.text) if sys.stdout.isatty() else answer.text)


def _print_statistics(
    answers: Sequence[Generation], seconds: float, speed: str, model: Model, sampler: CanvasSampler
) -> None:
    """One line, below the text on a terminal, else apart from it; of several prompts the sums."""
    nfe, full = sum(answer.nfe for answer in answers), sum(answer.full_forwards for answer in answers)
    tokens = sum(len(answer.tokens) for answer in answers)
    parts = [
        *([f"{len(answers)} prompts"] if len(answers) > 1 else []),
        f"NFE {nfe} ({full} full + {nfe - full} window)",
        f"{tokens} tokens, {tokens / max(nfe, 1):.2f} per forward",
        *_drafts(answers, nfe),
        f"{tokens / seconds:.1f} tokens/s ({speed})",
        title(sampler),
        f"{model.name}, {told_dtype(model.params)} on {_device(model)}",
    ]
    line, stream = " | ".join(parts), sys.stdout if sys.stdout.isatty() else sys.stderr
    ascii_only = not (stream.encoding or "").lower().startswith("utf")
    print(printable(line.replace("×", "x") if ascii_only else line, ascii_only), file=stream)


def _drafts(answers: Sequence[Generation], nfe: int) -> list[str]:
    """How drafts fared, of samplers that write from left to right."""
    verified = [answer.verifier_forwards for answer in answers if answer.verifier_forwards is not None]
    if not verified:
        return []
    accepted = sum(answer.committed for answer in answers) / max(nfe, 1)
    return [f"{accepted:.2f} accepted per forward, {sum(verified)} verifier forwards"]


def _device(model: Model) -> str:
    devices = sorted(jax.tree.leaves(model.params)[0].devices(), key=lambda device: device.id)
    return f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind


def _for_terminal(text: str) -> str:
    """An answer as it is, but for characters that would steer the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: printable(match[0]), text)


def _told(options: argparse.Namespace, said: Mapping[str, Any], model: Model, sampler: Any) -> dict[str, Any]:
    """The settings of a run, for its JSON."""
    always = {name: getattr(options, name) for name in ("chat", "system", "seed", "batch_size", "preset", "sampler")}
    versions = {"dllm_jax": dllm_jax.__version__, "jax": jax.__version__, "python": platform.python_version()}
    drawn = {name: getattr(sampler.sampling, name) for name in ("temperature", "top_p", "top_k")}
    told = {"stop": [], "ignore_eos": False, **drawn, **said, **settings_of(sampler), "block_length": sampler.width}
    none = {"temperature": 0.0, "guidance": 0.0}
    told |= {name: value for name, value in none.items() if told.get(name, 0) is None}
    about = {"device": _device(model), "dtype": told_dtype(model.params), "versions": versions}
    return {"model": model.name, **_finite(told), **always, **about}


def _finite(value: Any) -> Any:
    """Infinities as text, since JSON has no number for them."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json(answer: Generation, seconds: float, compile_seconds: float, settings: dict[str, Any]) -> dict[str, Any]:
    """One answer's part of a line; `seconds` is the time from its admission to its end, beside others."""
    return {
        "text": answer.text,
        **({"gaps": answer.gaps} if isinstance(answer, Infilling) else {}),
        "tokens": answer.tokens,
        "logprobs": answer.logprobs,
        "prompt_tokens": answer.prompt_tokens,
        "nfe": answer.nfe,
        "full_forwards": answer.full_forwards,
        "cache_updates": answer.cache_updates,
        "verifier_forwards": answer.verifier_forwards,
        "tokens_per_forward": answer.tokens_per_forward,
        "seconds": seconds,
        "compile_seconds": compile_seconds,
        "tokens_per_second": len(answer.tokens) / seconds,
        "trajectory": answer.decoded_at,
        "canvas": answer.canvas,
        "settings": settings,
    }


def _listing() -> str:
    """All rules, cache policies and samplers with their options, smoothing, and the presets."""
    width = min(shutil.get_terminal_size().columns, 110)
    lines = ["rules, by --rule:", *_listed(RULES, width)]
    lines += ["", "cache policies, by --cache:", *_listed(CACHES, width)]
    lines += ["", "samplers with a loop of their own, by --sampler NAME:option=value,option=value or flags:"]
    lines += [*_listed(LOOPS, width), "", *_wrapped(f"--smoothing: {_summary(Smoothing)}", width, "  ")]
    lines += ["", "presets, by --preset:", ""]
    for name, options in PRESETS.items():
        told = ", ".join(f"{option} {value}" for option, value in options.items() if option != "smoothing")
        smooth = ", smoothing" if "smoothing" in options else ""
        lines += _wrapped(f"{name}: {told}{smooth}", width, "  ")
    return "\n".join(lines)


def _listed(table: Mapping[str, type], width: int) -> Iterator[str]:
    for name, kind in table.items():
        yield ""
        yield from _wrapped(f"{name}: {_summary(kind)}", width, "  ")
        about = _attribute_docs(kind)
        for option in written_fields(kind):
            words = ", ".join(spec.choices(kind_of(kind, option)))
            values = f"(default: {default_of(kind, option)}{words and f'; one of {words}'})"
            yield from _wrapped(f"    {flag_of(option)} {values} {about.get(option, '')}", width, "        ")


def _wrapped(text: str, width: int, indent: str) -> Iterator[str]:
    yield from textwrap.wrap(text, width, subsequent_indent=indent)


def _summary(kind: type) -> str:
    """The first paragraph of a class's documentation on one line."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def _attribute_docs(kind: type) -> dict[str, str]:
    """Attribute -> its sentence in the documentation of the class, or of the class that it comes from."""
    sections = [(inspect.getdoc(base) or "").partition("Attributes:\n")[2] for base in reversed(kind.__mro__)]
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", "\n".join(sections), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


if __name__ == "__main__":
    sys.exit(main())
