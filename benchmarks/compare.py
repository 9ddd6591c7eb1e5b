"""Compares two checkouts of this repository by running one benchmark in both, in turns.

    git worktree add ../old COMMIT
    python -m benchmarks.compare --runs 3 --json FILE ../old -- --model tiny --rules threshold,eb --caches none,dual
    python -m benchmarks.compare --of train --json compare.json ../old

Options after `--` go to `python -m benchmarks.sample`, or the benchmark of `--of`, in both. Runs alternate, so that a
slow hour hits both; ratios are of medians, above 1 where this checkout is better.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parents[1]


class Benchmark(NamedTuple):
    """What is compared of a benchmark's rows.

    Attributes:
        key: fields that identify a row.
        high: fields that are better high.
        low: fields that are better low.
    """

    key: tuple[str, ...]
    high: tuple[str, ...]
    low: tuple[str, ...]

    @property
    def figures(self) -> tuple[str, ...]:
        """All fields that are compared."""
        return (*self.high, *self.low)


BENCHMARKS: Mapping[str, Benchmark] = {
    "sample": Benchmark(("engine", "rule", "cache", "batch"), ("tokens_per_second",), ("nfe", "compile_seconds")),
    "train": Benchmark(("case", "batch"), ("tokens_per_second",), ("data_ms_per_step", "compile_seconds")),
}


def measure(checkout: Path, arguments: list[str], name: str = "sample") -> dict[str, Any]:
    """The report of one run of a benchmark in a checkout.

    Raises:
        SystemExit: when it fails there, after its own message.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json", str(out)]
        if subprocess.run(command, cwd=checkout, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"error: {' '.join(command[1:])} failed in {checkout}")
        report: dict[str, Any] = json.loads(out.read_text())
    if isinstance(report["rows"], dict):
        report["rows"] = [{"case": case, **row} for case, row in report["rows"].items()]
    return report


def compared(
    old: list[dict[str, Any]], new: list[dict[str, Any]], of: Benchmark = BENCHMARKS["sample"]
) -> list[dict[str, Any]]:
    """A row for each that both measured: medians over the runs, and ratios."""
    before, after = _medians(old, of), _medians(new, of)
    rows = []
    for key in [key for key in after if key in before]:
        one, other = before[key], after[key]
        ratios = {f"{name}_ratio": other[name] / one[name] for name in of.high}
        ratios |= {f"{name}_ratio": one[name] / other[name] for name in of.low}
        values = {f"{name}_{when}": row[name] for when, row in (("old", one), ("new", other)) for name in row}
        rows.append(dict(zip(of.key, key, strict=True)) | values | ratios)
    return rows


def _medians(reports: list[dict[str, Any]], of: Benchmark) -> dict[tuple, dict[str, float]]:
    names = of.figures
    found: dict[tuple, list[dict[str, Any]]] = {}
    for report in reports:
        for row in report["rows"]:
            if all(isinstance(row.get(name), (int, float)) for name in names):
                found.setdefault(tuple(row[name] for name in of.key), []).append(row)
    return {key: {name: statistics.median(row[name] for row in rows) for name in names} for key, rows in found.items()}


def main() -> int:
    """Runs both in turns and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--of", choices=BENCHMARKS, default="sample", help="the benchmark (default: %(default)s)")
    parser.add_argument("own", nargs=argparse.REMAINDER, help="options of the benchmark, after --")
    options = parser.parse_args()
    own, of = [part for part in options.own if part != "--"], BENCHMARKS[options.of]
    reports: dict[Path, list[dict[str, Any]]] = {options.old: [], HERE: []}
    for _ in range(options.runs):
        for checkout, found in reports.items():
            found.append(measure(checkout, own, options.of))
    rows = compared(reports[options.old], reports[HERE], of)
    print(f"{'':44}{''.join(f'{name:>19}' for name in of.figures)}   new over old")
    for row in rows:
        numbers = [row[f"{name}_ratio"] for name in of.figures]
        print(f"{' '.join(str(row[name]) for name in of.key):44}{''.join(f'{number:19.2f}' for number in numbers)}")
    if options.json:
        names = ("model", "dtype", "hardware", "device", "cpu_cores", "versions")
        about = {name: reports[HERE][0][name] for name in names if name in reports[HERE][0]}
        command = f"python -m benchmarks.compare --of {options.of} --runs {options.runs} OLD -- {' '.join(own)}"
        report = {"command": command, "commits": [_commit(options.old), _commit(HERE)], **about, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _commit(checkout: Path) -> str:
    """The commit of a checkout, as far as git knows."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True)
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
