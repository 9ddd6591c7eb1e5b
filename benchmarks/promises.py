"""Whether the promise of `python -m evals tune` holds on problems that it never saw.

    python -m benchmarks.promises evals/results/tune-sudoku --json evals/results/tune-sudoku/promise.json

The reference and the chosen sampler on test problems of another seed, without those that were in the search or in the
proof. What is kept is told with a standard error, as this is a measurement and no proof.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import evals
from benchmarks import command
from dllm_jax import DllmError
from evals.models import Models
from evals.paired_test import Pairs
from evals.sampler import parse_sampler
from evals.tasks import make_task

Row = dict[str, Any]

COLUMNS = ("sampler", "n", "accuracy", "accuracy_stderr", "nfe")


def report(options: argparse.Namespace) -> Row:
    """Everything that is measured, as it is written to the file."""
    try:
        told = json.loads((options.tuning / "tuning.json").read_text())
    except (OSError, ValueError) as error:
        raise DllmError(f"{options.tuning} holds no tuning.json of python -m evals tune ({error})") from None
    if told["chosen"] is None:
        raise DllmError(f"nothing was promised in {options.tuning}; tune with a lower --floor first")
    models, task = Models(told["model"], told["dtype"], told["quantize"]), make_task(told["task"])
    reference, chosen = parse_sampler(told["reference"]), parse_sampler(told["chosen"])
    bound = make_task(told["task"], seed=options.seed).bind(models.of(chosen))
    seen = {task.example("validation", i).problem for i in range(told["validation"])}
    seen |= {task.example("test", i).problem for i in range(told["n"])}
    drawn = (bound.example("test", i) for i in itertools.count())
    examples = list(itertools.islice((example for example in drawn if example.problem not in seen), options.n))
    score = lambda sampler: evals.run(models, bound, sampler, n=options.n, examples=examples)
    reports = [score(reference), score(chosen)]
    pairs = Pairs.of(*([row.correct for row in found.rows] for found in reports))
    spread = math.sqrt(pairs.lost + pairs.gained) / (pairs.both + pairs.lost)
    return {
        "command": f"python -m benchmarks.promises {options.tuning} --n {options.n} --seed {options.seed}",
        "floor": told["floor"],
        "kept": pairs.kept,
        "kept_stderr": spread,
        "holds": pairs.kept >= told["floor"],
        "lost": pairs.lost,
        "gained": pairs.gained,
        "rows": [{name: getattr(found, name) for name in COLUMNS} for found in reports],
    }


def print_rows(rows: Sequence[Row]) -> None:
    """A line for the reference and one for what was chosen."""
    for row in rows:
        accuracy = f"{100 * row['accuracy']:.2f} +- {100 * row['accuracy_stderr']:.2f} %"
        print(f"{row['sampler']:40} {accuracy} of {row['n']} problems, {row['nfe']:.2f} forwards")


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("tuning", type=Path, metavar="DIR", help="folder that python -m evals tune wrote")
    made.add_argument("--n", type=int, default=2000, help="problems (default 2000)")
    made.add_argument("--seed", type=int, default=1, help="of the task (default 1)")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    options = parser().parse_args(arguments)
    options.dtype = None  # that of the tuning
    return command.run(options, report, print_rows)


if __name__ == "__main__":
    sys.exit(main())
