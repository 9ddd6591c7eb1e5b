"""`python -m evals presets`: what there is, and what each is."""

import argparse
import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from dllm_jax.cli.command import console
from dllm_jax.errors import DllmError
from evals import files
from evals.presets import find
from evals.presets.checks import check
from evals.presets.preset import Preset, all_options, describe_preset
from evals.presets.reading import read


def add(commands: Any) -> None:
    """The command `presets`."""
    about = "published settings with their scores: a table, one in full, or a check of all"
    parser = commands.add_parser("presets", help=about, description=about, allow_abbrev=False)
    parser.set_defaults(command=_presets)
    parser.add_argument(
        "pattern", nargs="?", default="*", metavar="NAME", help="a name, a part of one, or a pattern with *"
    )
    parser.add_argument("--check", action="store_true", help="report their faults; needs lm-eval, no network")
    parser.add_argument("--json", action="store_true", help="print them as JSON")


def _presets(options: argparse.Namespace) -> None:
    found, faults = read()
    if options.check:
        _check(found, faults, options.pattern)
        return
    if faults:
        raise DllmError(faults[0])
    if options.json:
        print(files.as_json([as_json(preset) for preset in select_matching(found.values(), options.pattern)]), end="")
    elif options.pattern in found:
        print(describe_preset(found[options.pattern]))
    else:
        console(otherwise=200).print(table(select_matching(found.values(), options.pattern)))


def _check(found: dict[str, Preset], faults: list[str], pattern: str) -> None:
    chosen = select_matching(found.values(), pattern) if found else []
    faults = [*faults, *(fault for preset in chosen for fault in check(preset))]
    for fault in faults:
        print(fault)
    if faults:
        raise DllmError(f"{len(faults)} faults in {len(chosen)} presets; mend them in evals/presets")
    print(f"{len(chosen)} presets, no faults")


def select_matching(presets: Any, pattern: str) -> list[Preset]:
    """The presets whose names a pattern fits, or are or contain it.

    Raises:
        DllmError: when there are none.
    """
    chosen = [preset for preset in presets if preset.name == pattern] or [
        preset for preset in presets if fnmatch.fnmatchcase(preset.name, pattern) or pattern in preset.name
    ]
    return chosen or [find(pattern)]


def as_json(preset: Preset) -> dict[str, Any]:
    """All of a preset, its sampler with all options."""
    options = {} if preset.kind == "likelihood" else all_options(preset.spec)
    return {**dataclasses.asdict(preset), "options": options, "hash": preset.hash}


def table(presets: Sequence[Preset]) -> Table:
    """The presets, one a line."""
    columns = ("name", "task", Column("G/B", justify="right"), "rule", Column("published", justify="right"), "status")
    made = Table(*columns, box=box.SIMPLE)
    for preset in presets:
        scores = ", ".join(f"{number.value:g}" for number in preset.published)
        shots = "" if preset.shots is None else f"@{preset.shots}"
        prompt = f"{preset.task}{shots} {preset.form}{'+bos' * preset.bos}"
        made.add_row(*(Text(cell) for cell in (preset.name, prompt, *_describe_sampler(preset), scores, preset.status)))
    return made


def _describe_sampler(preset: Preset) -> tuple[str, str]:
    """Lengths of a generation and its block, and what decides."""
    if preset.kind == "likelihood":
        return "-", f"likelihood {preset.samples}/{preset.mc_batch}" + f" cfg={preset.guidance:g}" * (
            preset.guidance > 0
        )
    options, decides = all_options(preset.spec), preset.spec.without("gen_length").without("block_length")
    length, block = options["gen_length"], options.get("block_length")
    return f"{length}/{block or length}", str(decides)
