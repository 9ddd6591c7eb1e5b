"""Flags that say what runs and how it samples, for every command that does; defaults are the checkpoint's to say."""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from dllm_jax import DllmError, spec
from dllm_jax.cli.command import Parser
from samplers.caches import CACHES
from samplers.config.factory import read, refuse_twice
from samplers.config.presets import PRESETS
from samplers.config.registry import LOOPS, PARTS, USUAL, fields_of, is_outside, kind_of, named
from samplers.loops.block import BlockSampler
from samplers.rules import RULES
from samplers.tokens.predictions import Sampling
from samplers.tokens.smoothing import Smoothing


def add_model(parser: argparse.ArgumentParser) -> None:
    """Flags of the model."""
    add = parser.add_argument
    add("--model", metavar="DIR_OR_NAME", help="converted checkpoint: a folder, or a name in ~/.cache/dllm_jax")
    add("--dtype", help="bfloat16, float16 or float32; as stored by default")
    add("--quantize", metavar="BITS", help="int8 or int4: kernels in so many bits; as stored by default")


def add_sampler(parser: argparse.ArgumentParser, said: Sequence[str] = ()) -> None:
    """Flags of the sampler; only those that were written are in the options.

    Args:
        said: the command line, whose rule or cache policy of somebody's own has flags as well.

    Raises:
        DllmError: when such a part cannot be imported, or is none.
    """
    add = parser.add_argument
    add("--sampler", metavar="SPEC", help=f"{', '.join(LOOPS)} or a rule, as in d2f:block_length=8@MODEL_DIR")
    add("--preset", metavar="NAME", help=f"published settings, changed by other options: {', '.join(PRESETS)}")
    _add_sampling(parser.add_argument_group("sampling", "defaults are the model's own, where it came with some"))
    kinds = {name: kind for part in own_parts(said).values() for name, kind in part.items()}
    _add_part_options(parser.add_argument_group("options of rules, cache policies and samplers", "see --list"), kinds)


def own_parts(said: Sequence[str]) -> dict[str, dict[str, type]]:
    """The rules and cache policies of somebody's own that a command line names, "module:Class": part -> name -> class.

    Raises:
        DllmError: when one cannot be imported, or is none.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    for flag in ("--rule", "--cache", "--sampler"):
        parser.add_argument(flag, nargs="?")
    found = vars(parser.parse_known_args(said)[0])
    names = {part: [found[part]] for part in PARTS}
    if found["sampler"] is not None:
        name, options, _ = read(found["sampler"])
        names["rule"].append(name)
        for part in PARTS:
            names[part].append(options.get(part))
    return {part: {name: named(part, name) for name in names[part] if is_outside(name)} for part in PARTS}


def said_by(options: argparse.Namespace, usual: argparse.Namespace) -> tuple[str | None, dict[str, Any], str | None]:
    """The name of the sampler, its options as they were written, in its spec and by flags, and the model's name.

    Args:
        usual: what the parser gives for an empty command line.

    Raises:
        DllmError: for what is said twice, and an unknown preset.
    """
    flags = {name: value for name, value in vars(options).items() if name not in usual}
    if options.preset is not None and options.preset not in PRESETS:
        raise DllmError(f"no preset is called {options.preset!r}; choose one of {', '.join(PRESETS)}")
    if options.sampler is None:
        return options.preset, flags, options.model
    if options.preset is not None:
        raise DllmError("--preset has no effect beside --sampler; leave one out")
    name, written, model = read(options.sampler)
    refuse_twice(written, flags)
    return name, {**written, **flags}, model or options.model


def _add_sampling(group: Any) -> None:
    add = functools.partial(group.add_argument, default=argparse.SUPPRESS)
    numbers = ", ".join(f"{field.name} ({field.default})" for field in dataclasses.fields(Smoothing))
    add("--rule", metavar="RULE", help=f"{', '.join(RULES)}, or MODULE:CLASS of your own (default: threshold)")
    add("--cache", metavar="CACHE", help=f"{', '.join(CACHES)}, or MODULE:CLASS of your own (default: dual)")
    add("--gen-length", metavar="N", help="positions to generate (default: 256)")
    add("--block-length", metavar="N", help="length of a block, 0 is one block (default: 32)")
    add("--align-blocks", action="store_true", help="blocks begin at multiples of their length, prompt included")
    add(
        "--sub-block-length",
        metavar="N",
        help="a block diffusion model's blocks in smaller ones of this length",
    )
    add("--smoothing", nargs="?", const="true", metavar="NAME=VALUE,...", help=f"iteration smoothing, with {numbers}")
    add("--temperature", metavar="T", help="0 takes the most probable token (default)")
    add("--top-p", metavar="P", help="draw from the smallest set of tokens above this probability")
    add("--top-k", metavar="N", help="draw from so many most probable tokens")
    add("--cfg", metavar="SCALE", dest="guidance", help="classifier-free guidance (default: 0, none)")
    add("--stop", action="append", metavar="TEXT", help="end an answer before this text; repeatable")
    add("--stop-id", action="append", type=int, metavar="ID", dest="stop", help="the same for a token id")
    add("--suppress", action="append", metavar="TEXT", help="never write this text, which is one token; repeatable")
    add("--suppress-id", action="append", type=int, metavar="ID", dest="suppress", help="the same for a token id")
    add("--ignore-eos", action="store_true", help="go on behind the model's end tokens")
    add("--fill-after-eos", action="store_true", help="write nothing more behind an end-of-sequence token")
    add("--canvas-length", metavar="N", help="pad prompt and canvas with masks to this length")


def _add_part_options(group: Any, own: Mapping[str, type]) -> None:
    """A flag for every field of a rule, a cache policy or a sampler that is not one of all samplers."""
    common = {field.name for field in (*fields_of(BlockSampler), *fields_of(Sampling))}
    takers: dict[str, dict[str, type]] = {}
    for name, kind in {**RULES, **CACHES, **LOOPS, **own}.items():
        for option in written_fields(kind):
            takers.setdefault(option, {})[name] = kind
    for option, kinds in takers.items():
        names = ", ".join(f"{name} (default: {default_of(kind, option)})" for name, kind in kinds.items())
        words = sorted({word for kind in kinds.values() for word in spec.choices(kind_of(kind, option))})
        about = f"of {names}" + (f": {', '.join(words)}" if words else "")
        if option not in common:
            group.add_argument(
                flag_of(option), metavar="VALUE", default=argparse.SUPPRESS, help=about.replace("%", "%%")
            )


def written_fields(kind: type) -> list[str]:
    """What can be written of a rule, a cache policy or a sampler."""
    return [field.name for field in fields_of(kind) if spec.is_writable(kind_of(kind, field.name))]


def flag_of(option: str) -> str:
    return "--" + option.replace("_", "-")


def default_of(kind: type, option: str) -> str:
    value = next(field.default for field in fields_of(kind) if field.name == option)
    if value is dataclasses.MISSING:
        return {"steps": "one per token", "gen_length": str(USUAL.options["gen_length"])}.get(option, "required")
    return spec.format_value(value)
