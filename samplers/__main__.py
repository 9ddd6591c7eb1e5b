"""Samples from a converted checkpoint: `python -m samplers "prompt" --model DIR_OR_NAME --rule RULE --cache CACHE`,
or `--sampler d2f:block_length=8,tau_add=0.1`, `--sampler apd:verifier=DIR_OR_NAME,weight=0.7,window=16`.

On a terminal the canvas is shown while it is being unmasked; through a pipe the text alone is written, and the
statistics go to the standard error. A prompt is taken as it is: write line breaks as the shell does, $'like\\nthis'.
"""

import argparse
import contextlib
import dataclasses
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
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import dllm_jax
from dllm_jax import DllmError, Model, checkpoint
from dllm_jax.tokenizer import Tokenizer, has_tokenizer
from dllm_jax.tools.command import Parser, run_printing
from samplers.block import BlockSampler
from samplers.caches import CACHES
from samplers.checks import check_number, refuse_unknown
from samplers.engine import Result
from samplers.generate import CanvasSampler, Generation, Prompt, generate, prepare
from samplers.live import printable, settings_of, title, watch
from samplers.makers import MAKERS
from samplers.presets import PRESETS, preset
from samplers.rules import RULES
from samplers.smoothing import Smoothing
from samplers.specs import SamplerSpec, option_kinds, parse_sampler
from samplers.timing import Programs

JSON_LINES = (".jsonl", ".ndjson")
_USUAL = {"rule": "threshold", "cache": "dual"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the prompts; 0 when it worked, 2 after a mistake, which is printed as one sentence."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what it raises as well
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may hold what the terminal's encoding cannot
    return run_printing(lambda: _run(_parse(arguments)), "use a smaller --batch-size or --gen-length")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; a preset's values, or the usual rule and cache policy, stand in for those that were not written."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if options.sampler is not None:
        return options
    written = {name: vars(options)[name] for name in _USUAL if vars(options)[name] is not None}
    values = _USUAL if options.preset is None else preset(options.preset, **written)
    for name, value in values.items():
        names = {f"rule_{name}", f"cache_{name}"} & vars(options).keys() or {name}
        parser.set_defaults(**dict.fromkeys(names, value))
    return parser.parse_intermixed_args(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m samplers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt", nargs="*", help="one or more prompts; without any, the standard input is one")
    add("--prompts", metavar="FILE", help='one prompt per line, or JSON lines with "prompt" or "messages"; - is stdin')
    add("--model", metavar="DIR_OR_NAME", help="converted checkpoint: a folder, or a name in ~/.cache/dllm_jax")
    add("--dtype", help="bfloat16, float16 or float32; as stored by default")
    add("--list", action="store_true", help="print rules, cache policies and samplers with their options")
    _add_sampling(parser.add_argument_group("sampling"))
    _add_part_options(parser.add_argument_group("options of the rules", "see --list for what they mean"), "rule", RULES)
    _add_part_options(parser.add_argument_group("options of the cache policies", "likewise"), "cache", CACHES)
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_sampling(group: Any) -> None:
    add = group.add_argument
    about = f"{', '.join(MAKERS)} or a rule, with options as in d2f:block_length=8; @DIR behind it is its model"
    add("--sampler", metavar="SPEC", help=about)
    add("--preset", metavar="NAME", help=f"published settings, changed by other options: {', '.join(PRESETS)}")
    add("--rule", metavar="RULE", help=f"{', '.join(RULES)} (default: threshold)")
    add("--cache", metavar="CACHE", help=f"{', '.join(CACHES)} (default: dual)")
    add("--gen-length", type=int, default=256, metavar="N", help="positions to generate (default: 256)")
    add("--block-length", type=int, default=32, metavar="N", help="length of a block, 0 is one block (default: 32)")
    add("--align-blocks", action="store_true", help="blocks begin at multiples of their length, prompt included")
    add("--smoothing", nargs="?", const="", metavar="NAME=VALUE,...", help=_SMOOTHING_HELP)
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the most probable token (default)")
    add("--top-p", type=float, metavar="P", help="draw from the smallest set of tokens above this probability")
    add("--top-k", type=int, metavar="N", help="draw from so many most probable tokens")
    add("--cfg", type=float, default=0.0, metavar="SCALE", help="classifier-free guidance (default: 0, none)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text; repeatable")
    add("--stop-id", action="append", default=[], type=int, metavar="ID", help="the same for a token id")
    add("--ignore-eos", action="store_true", help="go on behind the model's end tokens")
    add("--fill-after-eos", action="store_true", help="write nothing more behind an end-of-sequence token")
    add("--canvas-length", type=int, metavar="N", help="pad prompt and canvas with masks to this length")
    add("--chat", action="store_true", help="take a prompt as a user's message in the model's chat format")
    add("--system", metavar="TEXT", help="system message; implies --chat")
    add("--seed", type=int, default=0, metavar="N", help="of the random numbers, where any are drawn (default: 0)")
    add("--batch-size", type=int, metavar="N", help="prompts sampled together (default: all)")


def _add_part_options(group: Any, part: str, table: Mapping[str, type]) -> None:
    for option, takers in _part_options(table).items():
        names = ", ".join(f"{name} (default: {_default(field)})" for name, field in takers.items())
        choices = sorted({choice for name in takers for choice in _choices(table[name], option)})
        about = f"of {names}" + (f": {', '.join(choices)}" if choices else "")
        group.add_argument(_flag(option), dest=f"{part}_{option}", metavar="VALUE", help=about.replace("%", "%%"))


_SMOOTHING_HELP = "iteration smoothing; its numbers are " + ", ".join(
    f"{field.name} ({field.default})" for field in dataclasses.fields(Smoothing)
)


def _smoothing(text: Any) -> Smoothing | None:
    """What was written behind --smoothing: nothing, or some of its numbers; a preset's as it is."""
    if not isinstance(text, str):
        return text
    pairs = [part.partition("=") for part in text.split(",") if part]
    names = [field.name for field in dataclasses.fields(Smoothing)]
    for name, _, _ in pairs:
        if name not in names:
            raise DllmError(f"--smoothing has no number {name!r}; it has {', '.join(names)}")
    try:
        return Smoothing(**{name: float(value) for name, _, value in pairs})
    except ValueError:
        raise DllmError(f"--smoothing {text!r} is not understood; write it like weight=0.3,growth=0.02") from None


def _add_output(group: Any) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="one JSON object per prompt: text, tokens, trajectory, speed, settings")
    add("--no-live", action="store_true", help="do not show the canvas while it is being unmasked")
    add("--delay", type=float, metavar="SECONDS", help="of the live view, after each forward")


def _part_options(table: Mapping[str, type]) -> dict[str, dict[str, dataclasses.Field]]:
    """Option -> name -> field, of everything that the rules or the cache policies can be told."""
    options: dict[str, dict[str, dataclasses.Field]] = {}
    for name, kind in table.items():
        for field in _fields(kind):
            options.setdefault(field.name, {})[name] = field
    return options


def _fields(kind: type) -> list[dataclasses.Field]:
    """Fields that can be written on a command line, without the quirks of official code."""
    fields = [field for field in dataclasses.fields(kind) if field.name != "compat"]
    return [field for field in fields if _kinds(kind, field.name) & {int, float, bool, str}]


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return "one per token" if field.name == "steps" else "required"
    return "none" if field.default is None else str(field.default)


def _run(options: argparse.Namespace) -> None:
    if options.list:
        print(_listing())
        return
    named = _named_model(options)
    check_number("delay", options.delay, 0.0)
    check_number("batch_size", options.batch_size, 1)
    prompts = _prompts(options)
    prepare(_outline(named), prompts, **_settings(options, _outline))  # mistakes come before gigabytes are read
    load = functools.partial(dllm_jax.load, dtype=options.dtype)
    with Console(stderr=True).status(f"loading {named}", spinner="line"):
        model, settings = load(named), _settings(options, load)
    sampler = prepare(model, prompts, **settings)[0]
    if sys.stdout.isatty() and len(prompts) == 1 and not (options.json or options.no_live):
        _show_live(model, prompts[0], sampler, settings, options.delay)
        return
    stopwatch = _Stopwatch()
    answers = generate(model, prompts, batch_size=options.batch_size, run=stopwatch, **settings)
    if options.json:
        told = _told(options, settings, model, sampler)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            seconds = stopwatch.seconds[i // (options.batch_size or len(prompts))]
            print(json.dumps(_json(prompt, answer, seconds, stopwatch.programs.compile_seconds, told)))
        return
    _print_texts(answers)
    seconds = sum(stopwatch.seconds)
    speed = f"{seconds:.3f} s, compiled before in {stopwatch.programs.compile_seconds:.1f} s"
    _print_statistics(answers, seconds, speed, model, sampler)


def _named_model(options: argparse.Namespace) -> str:
    """The model of the sampler, else of the command."""
    of_sampler = None if options.sampler is None else parse_sampler(options.sampler).model
    found: str | None = of_sampler or options.model
    if found is None:
        raise DllmError("no model was named; pass --model DIR_OR_NAME")
    return found


def _show_live(
    model: Model, prompt: Prompt, sampler: CanvasSampler, settings: dict[str, Any], delay: float | None
) -> None:
    watched = watch(model, prompt, delay=delay, keep=False, **settings)
    _print_texts([watched.generation])
    steps = f"{watched.seconds:.3f} s of single steps for the live view"
    speed = f"{steps}, compiled before in {watched.compile_seconds:.1f} s; --no-live runs them as one program"
    _print_statistics([watched.generation], watched.seconds, speed, model, sampler)


class _Stopwatch:
    """Runs batches like `sample_jit`, by a program that is compiled ahead of the first, and times each."""

    def __init__(self) -> None:
        self.programs, self.seconds = Programs(), list[float]()

    def __call__(self, *arguments: Any, **options: Any) -> Result:
        result, took = self.programs.run(*arguments, **options)
        self.seconds.append(took)
        return result


def _outline(path_or_name: str) -> Model:
    """The model without its parameters."""
    folder = checkpoint.find(path_or_name)
    config = checkpoint.load_config(folder)
    tokenizer = Tokenizer.from_folder(folder, config) if has_tokenizer(folder) else None
    return Model(config, {}, tokenizer, folder.resolve().name, folder)


def _settings(options: argparse.Namespace, load: Callable[[str], Model]) -> dict[str, Any]:
    """The options as `generate` takes them; `load` gives a verifier by its folder or name."""
    always = {name: getattr(options, name) for name in ("chat", "system", "seed")}
    if options.sampler is not None:
        return {**_of_spec(options, parse_sampler(options.sampler), load), **always}
    rule, cache = _numbers(options, "rule", RULES), _numbers(options, "cache", CACHES)
    return {"rule": options.rule, **rule, "cache": options.cache, **cache, **_common(options), **always}


def _common(options: argparse.Namespace) -> dict[str, Any]:
    """What flags say whatever the rule."""
    return {
        "smoothing": _smoothing(options.smoothing),
        "align_blocks": options.align_blocks,
        "gen_length": options.gen_length,
        "block_length": options.block_length or None,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "guidance": options.cfg,
        "stop": [*options.stop, *options.stop_id],
        "ignore_eos": options.ignore_eos,
        "fill_after_eos": options.fill_after_eos,
        "canvas_length": options.canvas_length,
    }


def _of_spec(options: argparse.Namespace, sampler: SamplerSpec, load: Callable[[str], Model]) -> dict[str, Any]:
    """The options of --sampler, and what other flags say of it.

    Raises:
        DllmError: for flags of rules, cache policies and presets, for what the sampler does not know, and for what is
            said twice.
    """
    parts = [name for name in vars(options) if name.startswith(("rule_", "cache_")) or name in (*_USUAL, "preset")]
    if beside := [name for name in parts if getattr(options, name) is not None]:
        flag = _flag(beside[0].removeprefix("rule_").removeprefix("cache_"))
        raise DllmError(f"{flag} has no effect beside --sampler; write it into the sampler, as in eb:gamma=0.1")
    usual = _common(_parser().parse_args([]))
    said = {name: value for name, value in _common(options).items() if value != usual[name]}
    refuse_unknown(f"sampler {sampler.name}", said, [*option_kinds(sampler.name, sampler.options), "stop"])
    if twice := sorted(said.keys() & sampler.options.keys()):
        raise DllmError(f"{twice[0]} is in the sampler and a flag of its own; leave one out")
    own_loop = {"sampler": sampler.name} if sampler.name in MAKERS else {}
    whole = preset(sampler.name) if sampler.name in PRESETS else {}
    return {**own_loop, **whole, **sampler.loaded(load), **said}


def _numbers(options: argparse.Namespace, part: str, table: Mapping[str, type]) -> dict[str, Any]:
    """The options of the chosen rule or cache policy.

    Raises:
        DllmError: for one that only others have.
    """
    chosen = getattr(options, part)
    given = {name.removeprefix(f"{part}_"): v for name, v in vars(options).items() if name.startswith(f"{part}_")}
    given = {name: text for name, text in given.items() if text is not None}
    if chosen in table:
        refuse_unknown(f"{part} {chosen}", given, [field.name for field in _fields(table[chosen])])
    return {name: _value(table.get(chosen), name, text) for name, text in given.items()}


def _value(kind: type | None, option: str, text: Any) -> Any:
    """What was written for an option, as the type its field wants; a preset's value as it is."""
    if kind is None or not isinstance(text, str):
        return text
    kinds = _kinds(kind, option)
    try:
        if float in kinds:
            return float(text)
        if int in kinds:
            return int(text)
        return {"true": True, "false": False}[text] if bool in kinds else text
    except (ValueError, KeyError):
        wanted = "number" if float in kinds else "whole number" if int in kinds else "true or false"
        raise DllmError(f"{_flag(option)} {text!r} is no {wanted}") from None


def _kinds(kind: type, option: str) -> set[Any]:
    """The types that an option may have; a choice between words is a string."""
    hint = typing.get_type_hints(kind).get(option)
    united = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if united else (hint,)
    return {str if typing.get_origin(part) is typing.Literal else part for part in parts}


def _choices(kind: type, option: str) -> tuple[Any, ...]:
    hint = typing.get_type_hints(kind)[option]
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


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
        f"{model.name}, {_dtype(model)} on {_device(model)}",
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


def _dtype(model: Model) -> str:
    return next(iter(model.params.values())).dtype.name


def _device(model: Model) -> str:
    devices = sorted(next(iter(model.params.values())).devices(), key=lambda device: device.id)
    return f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind


def _for_terminal(text: str) -> str:
    """An answer as it is, but for characters that would steer the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: printable(match[0]), text)


def _told(
    options: argparse.Namespace, settings: Mapping[str, Any], model: Model, sampler: CanvasSampler
) -> dict[str, Any]:
    """The settings of a run, for its JSON."""
    always = {name: getattr(options, name) for name in ("chat", "system", "seed", "batch_size", "preset")}
    versions = {"dllm_jax": dllm_jax.__version__, "jax": jax.__version__, "python": platform.python_version()}
    return {
        "model": model.name,
        **{name: _finite(settings[name]) for name in _common(options) if name in settings},
        **always,
        "sampler": options.sampler,
        **_finite(_told_of_parts(sampler) if isinstance(sampler, BlockSampler) else settings_of(sampler)),
        "gen_length": sampler.gen_length,
        "block_length": sampler.width,
        "device": _device(model),
        "dtype": _dtype(model),
        "versions": versions,
    }


def _told_of_parts(sampler: BlockSampler) -> dict[str, Any]:
    return {
        "rule": settings_of(sampler.rule),
        "cache": settings_of(sampler.cache),
        "smoothing": None if sampler.smoothing is None else dataclasses.asdict(sampler.smoothing),
    }


def _finite(value: Any) -> Any:
    """Infinities as text, since JSON has no number for them."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json(
    prompt: Any, answer: Generation, seconds: float, compile_seconds: float, settings: dict[str, Any]
) -> dict[str, Any]:
    """One prompt's line; `seconds` is the time of its whole batch."""
    return {
        "prompt": prompt,
        "text": answer.text,
        "tokens": answer.tokens,
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
    lines += ["", "samplers with a loop of their own, by --sampler NAME:option=value,option=value:"]
    lines += _listed_makers(width)
    lines += ["", *_wrapped(f"--smoothing: {_summary(Smoothing)}", width, "  "), "", "presets, by --preset:", ""]
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
        for field in _fields(kind):
            choices = ", ".join(_choices(kind, field.name))
            values = f"(default: {_default(field)}{choices and f'; one of {choices}'})"
            yield from _wrapped(f"    {_flag(field.name)} {values} {about.get(field.name, '')}", width, "        ")


def _listed_makers(width: int) -> Iterator[str]:
    for name, make in MAKERS.items():
        kind, parameters = typing.get_type_hints(make)["return"], inspect.signature(make).parameters
        yield ""
        yield from _wrapped(f"{name}: {_summary(kind)}", width, "  ")
        about, own = _attribute_docs(kind), {field.name for field in dataclasses.fields(kind)}
        for option in filter(own.__contains__, option_kinds(name, {})):
            default = parameters[option].default
            told = "required" if default is inspect.Parameter.empty else f"default: {str(default).lower()}"
            yield from _wrapped(f"    {option} ({told}) {about.get(option, '')}", width, "        ")


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
