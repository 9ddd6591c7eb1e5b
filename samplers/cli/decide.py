"""Choices and scores, each read from a slot of a template instead of from an answer's text:
`python -m samplers decide "Is the sky blue?" --field answer=yes,no --field urgency=1..5 --model DIR_OR_NAME`.

The template follows the prompt; by default it has a line `name: {name}` for each field. All slots are read from one
forward; `--gamma` decides the surest first and reads the others again, `--joint` scores every combination. More is in
docs/decide.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

import dllm_jax
from dllm_jax import DllmError
from dllm_jax.checkpoints.loading import outline
from dllm_jax.cli.command import Parser
from samplers.cli.flags import add_weights, prompts_of
from samplers.decisions.answers import Decision
from samplers.decisions.decide import decide
from samplers.decisions.questions import prepare_questions, value_text
from samplers.text.display import printable

SHOWN = 6
"""Values of a field that are printed, the most probable first."""

LITTLE_MASS = 0.5
"""Share of the model's probability below which a field's line says it."""


def run(arguments: Sequence[str]) -> None:
    """Decides for all prompts.

    Raises:
        DllmError: for bad options, and as `samplers.decide`.
    """
    options = command_line().parse_intermixed_args(arguments)
    if options.model is None:
        raise DllmError("no model was named; pass --model DIR_OR_NAME")
    prompts, fields = prompts_of(options), _fields_of(options.field or [])
    names = ("template", "chat", "system", "gamma", "joint", "temperature", "seed")
    settings = {name: getattr(options, name) for name in names}
    bare = outline(options.model)
    prepare_questions(bare, prompts, fields, **settings)  # mistakes come before gigabytes are read
    with Console(stderr=True).status(f"loading {bare.name}", spinner="line"):
        model = dllm_jax.load(options.model, dtype=options.dtype, quantize=options.quantize)
    began = time.monotonic()
    found = decide(model, prompts, fields, **settings, batch_size=options.batch_size)
    seconds = time.monotonic() - began
    for number, (prompt, decision) in enumerate(zip(prompts, found, strict=True), start=1):
        if options.json:
            print(json.dumps({"prompt": prompt, **decision.to_json()}), flush=True)
            continue
        if len(found) > 1:
            print(f"--- {number} of {len(found)}")
        _print(decision)
    if not options.json:
        rows, most = sum(decision.rows for decision in found), max(decision.nfe for decision in found)
        print(f"NFE {most}, {rows} sequences, {seconds:.2f} s with compiling", file=sys.stderr)


def command_line() -> argparse.ArgumentParser:
    """The options, for the command itself and for `dllm completion`."""
    parser = Parser(
        prog="python -m samplers decide",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt", nargs="*", help="one or more prompts; without any, the standard input is one")
    add("--prompts", metavar="FILE", help='one prompt per line, or JSON lines with "prompt" or "messages"')
    add("--field", action="append", metavar="NAME=VALUES", help=_FIELD)
    add("--template", metavar="TEXT", help="what follows the prompt, with {name} where a field's value stands")
    add("--gamma", type=float, metavar="NATS", help="decide the surest fields first, within this bound")
    add("--joint", action="store_true", help="score every combination of values by the chain rule")
    add("--temperature", type=float, default=1.0, metavar="T", help="divides the values' scores (default: 1)")
    add("--chat", action="store_true", help="take a prompt as a user's message in the model's chat format")
    add("--system", metavar="TEXT", help="system message; implies --chat")
    add("--seed", type=int, default=0, metavar="N", help="of a model without a mask token (default: 0)")
    add("--batch-size", type=int, default=32, metavar="N", help="sequences of a forward (default: 32)")
    add("--json", action="store_true", help="one JSON object per prompt")
    add_weights(parser)
    return parser


_FIELD = "a field and its values: answer=yes,no, urgency=1..5, or a list in JSON; repeatable"


def _fields_of(written: Sequence[str]) -> dict[str, list[Any]]:
    fields: dict[str, list[Any]] = {}
    for text in written:
        name, equals, values = text.partition("=")
        if not equals:
            raise DllmError(f"--field {text} has no values; write NAME=VALUE,VALUE such as answer=yes,no")
        if name in fields:
            raise DllmError(f"--field {name} is given twice; give each field once")
        fields[name] = _values_of(name, values)
    if not fields:
        raise DllmError("no field was given; pass --field NAME=VALUES such as --field answer=yes,no")
    return fields


def _values_of(name: str, text: str) -> list[Any]:
    """A range 1..5, a list in JSON, or values between commas: numbers or booleans if all are, else strings."""
    first, dots, last = text.partition("..")
    if dots and _is_whole(first) and _is_whole(last):
        return list(range(int(first), int(last) + 1))
    if text.startswith("["):
        try:
            return list(json.loads(text))
        except ValueError as error:
            raise DllmError(f"--field {name}: {text} is no list in JSON ({error})") from None
    values = text.split(",")
    try:
        typed = [json.loads(value) for value in values]
    except ValueError:
        return values
    kinds = {type(value) for value in typed}
    return typed if kinds <= {int, float} or kinds == {bool} else values


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _print(decision: Decision) -> None:
    width = max(map(len, decision.values))
    for name, value in decision.values.items():
        shares = sorted(decision.probabilities[name].items(), key=lambda pair: -pair[1])
        parts = [f"{printable(value_text(own))} {share:.1%}" for own, share in shares[:SHOWN]]
        parts += [f"{len(shares) - SHOWN} more"] * (len(shares) > SHOWN)
        notes = [", ".join(parts)]
        if name in decision.expected:
            notes.append(f"mean {decision.expected[name]:.3g}")
        if decision.mass[name] < LITTLE_MASS:
            notes.append(f"the model gives all these values only {decision.mass[name]:.1%}")
        print(f"{name:{width}}  {printable(value_text(value))}  ({'; '.join(notes)})")
    if decision.dependence is not None:
        print(f"dependence of the fields: {decision.dependence:.3g} nats")
