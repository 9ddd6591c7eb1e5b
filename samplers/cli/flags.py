"""Flags of the model and its sampler, for every command that samples; their defaults come from the checkpoint."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from dllm_jax import DllmError, Model, spec
from samplers.caches import CACHES
from samplers.command_buffers import use_command_buffers
from samplers.config.presets import PRESETS
from samplers.config.registry import LOOPS, fields_of, type_of
from samplers.config.sampler_config import (
    COMMAND_LINE,
    GENERATION_DEFAULTS,
    SamplerConfig,
    defaults_of,
    read_options,
    refuse_twice,
    split_spec,
)
from samplers.loops.block import BlockSampler
from samplers.rules import RULES
from samplers.text.prompt_files import read_prompts
from samplers.tokens.predictions import Sampling
from samplers.tokens.smoothing import Smoothing


def add_model(parser: argparse.ArgumentParser) -> None:
    """Flags of the model, and of the loop that samples from it."""
    add_weights(parser)
    parser.add_argument(
        "--command-buffers", action="store_true", help="run each generation as one CUDA graph (one NVIDIA GPU)"
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Flags of the model alone."""
    add = parser.add_argument
    add("--model", metavar="DIR_OR_NAME", help="converted checkpoint: a folder, or a name in ~/.cache/dllm_jax")
    add("--dtype", help="bfloat16, float16 or float32; as stored by default")
    add("--quantize", metavar="BITS", help="int8 or int4: bits of kernels; as stored by default")


def command_buffers_of(options: argparse.Namespace) -> AbstractContextManager[None]:
    """In which to build what samples: `use_command_buffers` if the flag asks for it."""
    return use_command_buffers() if options.command_buffers else nullcontext()


def add_sampler(parser: argparse.ArgumentParser) -> None:
    """Flags of the sampler; unset ones are left out. Write options of your own classes in `--sampler`."""
    add = parser.add_argument
    specs = "as in d2f:block_length=8@MODEL_DIR, or MODULE:CLASS:NAME=VALUE with options of your own class"
    add("--sampler", metavar="SPEC", help=f"{', '.join(LOOPS)} or a rule, {specs}")
    add("--preset", metavar="NAME", help=f"published settings, changed by other options: {', '.join(PRESETS)}")
    names: set[str] = set()

    def add_to(group: Any) -> Callable[..., None]:
        return lambda *flags, **how: names.add(group.add_argument(*flags, default=argparse.SUPPRESS, **how).dest)

    _add_sampling(add_to(parser.add_argument_group("sampling", "defaults come from the checkpoint where it has them")))
    _add_part_options(add_to(parser.add_argument_group("options of rules, cache policies and samplers", "see --list")))
    parser.set_defaults(sampler_flags=names)


def prompts_of(options: argparse.Namespace) -> list[Any]:
    """The prompts of the command line, a file, or the standard input."""
    if options.prompt and options.prompts is not None:
        raise DllmError("prompts were given both on the command line and by --prompts; choose one")
    if options.prompt:
        return options.prompt
    if options.prompts is not None:
        return read_prompts(options.prompts)
    if sys.stdin is None or sys.stdin.isatty():
        raise DllmError("no prompt was given; write one after the command, or name a file by --prompts")
    try:
        return [sys.stdin.read().removesuffix("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise DllmError(f"the standard input could not be read ({error})") from None


def model_name(options: argparse.Namespace) -> str:
    """The model's folder or name, in the sampler's spec or by its flag.

    Raises:
        DllmError: when there is none.
    """
    spec_model = None if options.sampler is None else split_spec(options.sampler)[2]
    if (found := spec_model or options.model) is None:
        raise DllmError("no model was named; pass --model DIR_OR_NAME")
    return str(found)


def read_flags(options: argparse.Namespace, look: Callable[[str], Model]) -> tuple[Model, SamplerConfig]:
    """The model and the sampler that flags and a spec name.

    Args:
        look: gives a model, without its parameters, by its folder or name.

    Raises:
        DllmError: for options that are written twice, unknown names, no model, and as `read_options`.
    """
    name = options.preset
    flags = {flag: value for flag, value in vars(options).items() if flag in options.sampler_flags}
    if "json_schema" in flags:
        flags["json_schema"] = _read_schema(flags["json_schema"])
    if name is not None and name not in PRESETS:
        raise DllmError(f"no preset is called {name!r}; choose one of {', '.join(PRESETS)}")
    if options.sampler is not None:
        if name is not None:
            raise DllmError("--preset has no effect with --sampler; leave one out")
        name, written, _ = split_spec(options.sampler)
        refuse_twice(written, flags)
        flags |= written
    model = look(model_name(options))
    return model, read_options(name, flags, defaults_of(model), COMMAND_LINE)


def _read_schema(path: str) -> Any:
    """A JSON file."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise DllmError(f"--json-schema: {path} could not be read as JSON ({error})") from None


def _add_sampling(add: Callable[..., None]) -> None:
    numbers = ", ".join(f"{field.name} ({field.default})" for field in dataclasses.fields(Smoothing))
    add("--rule", metavar="RULE", help=f"{', '.join(RULES)}, or MODULE:CLASS of your own (default: threshold)")
    add("--cache", metavar="CACHE", help=f"{', '.join(CACHES)}, or MODULE:CLASS of your own (default: dual)")
    add("--gen-length", metavar="N", help="positions to generate (default: 256)")
    add("--block-length", metavar="N", help="length of a block, 0 is one block (default: 32)")
    add("--align-blocks", action="store_true", help="begin blocks at multiples of their length, from the prompt on")
    add(
        "--sub-block-length",
        metavar="N",
        help="decode a block diffusion model's blocks in smaller ones of this length",
    )
    add("--smoothing", nargs="?", const="true", metavar="NAME=VALUE,...", help=f"iteration smoothing, with {numbers}")
    add("--temperature", metavar="T", help="0 takes the most probable token (default)")
    add("--top-p", metavar="P", help="draw from the smallest set of tokens above this probability")
    add("--top-k", metavar="N", help="draw from the N most probable tokens")
    add("--cfg", metavar="SCALE", dest="guidance", help="classifier-free guidance (default: 0, none)")
    add("--stop", action="append", metavar="TEXT", help="end an answer before this text; repeatable")
    add("--stop-id", action="append", type=int, metavar="ID", dest="stop", help="the same for a token id")
    add("--suppress", action="append", metavar="TEXT", help="never write this text, which is one token; repeatable")
    add("--suppress-id", action="append", type=int, metavar="ID", dest="suppress", help="the same for a token id")
    add("--ignore-eos", action="store_true", help="continue after the model's end tokens")
    add("--fill-after-eos", action="store_true", help="fill the rest of the canvas with end tokens after the first one")
    add("--regex", metavar="PATTERN", help="a regular expression that the whole answer matches")
    add("--json-schema", metavar="FILE", help="a JSON schema; the answer is JSON of it")
    add("--canvas-length", metavar="N", help="pad prompt and canvas with masks to this length")


def _add_part_options(add: Callable[..., None]) -> None:
    """A flag for every field of a rule, a cache policy or a sampler that is not one of all samplers."""
    common = {field.name for field in (*fields_of(BlockSampler), *fields_of(Sampling))}
    takers: dict[str, dict[str, type]] = {}
    for name, kind in {**RULES, **CACHES, **LOOPS}.items():
        for option in written_fields(kind):
            takers.setdefault(option, {})[name] = kind
    for option, kinds in takers.items():
        names = ", ".join(f"{name} (default: {default_of(kind, option)})" for name, kind in kinds.items())
        words = sorted({word for kind in kinds.values() for word in spec.choices(type_of(kind, option))})
        about = f"of {names}" + (f": {', '.join(words)}" if words else "")
        if option not in common:
            add(flag_of(option), metavar="VALUE", help=about.replace("%", "%%"))


def written_fields(kind: type) -> list[str]:
    """What can be written of a rule, a cache policy or a sampler."""
    return [field.name for field in fields_of(kind) if spec.is_writable(type_of(kind, field.name))]


def flag_of(option: str) -> str:
    return "--" + option.replace("_", "-")


def default_of(kind: type, option: str) -> str:
    value = next(field.default for field in fields_of(kind) if field.name == option)
    if value is dataclasses.MISSING:
        length = str(GENERATION_DEFAULTS.options["gen_length"])
        return {"steps": "one per token", "gen_length": length}.get(option, "required")
    return spec.format_value(value)
