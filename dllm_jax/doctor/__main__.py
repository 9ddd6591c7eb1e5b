"""Reports what is on this machine, which implementation of attention and experts it takes, and whether each is right.

python -m dllm_jax.doctor
python -m dllm_jax.doctor --out doctor.json       # attach this file to a bug report
"""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dllm_jax.cli.command import Parser, console, run_printing
from dllm_jax.doctor import examine
from dllm_jax.errors import DllmError

GIB = 2**30


def command_line() -> argparse.ArgumentParser:
    """The command's options."""
    parser = Parser(
        prog="python -m dllm_jax.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write everything to this file, as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0 if all is well, 1 if something is wrong, 2 after a mistake."""
    found: dict[str, Any] = {}

    def work() -> None:
        options = command_line().parse_args(arguments)
        if options.out and not options.out.parent.is_dir():
            raise DllmError(f"--out {options.out} is in no folder; make {options.out.parent} first")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a kernel that fails warns of is in the report
            found.update(examine())
        show(found)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")

    status = run_printing(work, "close what else uses it")
    return status or int(not found.get("ok", True))


def show(found: dict[str, Any]) -> None:
    """Prints a report: versions, devices, choices, checks, and the verdict in the last line."""
    print(", ".join(f"{name} {number}" for name, number in found["versions"].items() if number))
    for name, value in found["environment"].items():
        print(f"{name}={value}")
    for device in found["devices"]:
        has = f", compute capability {device['compute_capability']}" if device["compute_capability"] else ""
        memory = f", {device['memory_bytes'] / GIB:.1f} GiB" if device["memory_bytes"] else ""
        print(f"device: {device['kind']} ({device['platform']}{has}{memory})")
    choices = Table("operation", "call", "dtype", "takes", "why not the others", box=None)
    for row in found["choices"]:
        others = "; ".join(f"{name}: {reason}" for name, reason in row["others"].items())
        choices.add_row(row["operation"], row["call"], row["dtype"], row["implementation"], others)
    checks = Table("operation", "implementation", "dtype", "largest error", "seconds", "", box=None)
    for row in found["checks"]:
        worst = max((error for error in row["errors"].values() if error is not None), default=None)
        error, seconds = (
            "-" if worst is None else f"{worst:.1e}",
            "-" if row["seconds"] is None else str(row["seconds"]),
        )
        what = (row["operation"], row["implementation"], row["dtype"])
        checks.add_row(*what, error, seconds, "right" if row["ok"] else row["problem"])
    for table in (choices, checks):
        print()
        console().print(table)
    print(f"\n{'ok' if found['ok'] else 'wrong'}: {found['verdict']}")


if __name__ == "__main__":
    sys.exit(main())
