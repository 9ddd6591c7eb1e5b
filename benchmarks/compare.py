"""Two checkouts of this repository, in turns: what `benchmarks.sample` measures in the one over the other.

    git worktree add ../old COMMIT
    python -m benchmarks.compare --runs 3 --json FILE ../old -- --model tiny --rules threshold,eb --caches none,dual

What stands behind `--` goes to `python -m benchmarks.sample` in either. Runs alternate, so that a slow hour hits both;
ratios are of medians, above 1 where this checkout is better.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
KEY = ("engine", "rule", "cache", "batch")
BETTER_HIGH, BETTER_LOW = ("tokens_per_second",), ("nfe", "compile_seconds")


def measure(checkout: Path, arguments: list[str]) -> dict[str, Any]:
    """The report of one run in a checkout.

    Raises:
        SystemExit: when it fails there; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "benchmarks.sample", *arguments, "--json", str(out)]
        if subprocess.run(command, cwd=checkout, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"error: {' '.join(command[1:])} failed in {checkout}")
        report: dict[str, Any] = json.loads(out.read_text())
        return report


def compared(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per rule, cache and batch that both measured: medians over the runs, and ratios."""
    before, after = _medians(old), _medians(new)
    rows = []
    for key in [key for key in after if key in before]:
        one, other = before[key], after[key]
        ratios = {f"{name}_ratio": other[name] / one[name] for name in BETTER_HIGH}
        ratios |= {f"{name}_ratio": one[name] / other[name] for name in BETTER_LOW}
        values = {f"{name}_{when}": row[name] for when, row in (("old", one), ("new", other)) for name in row}
        rows.append(dict(zip(KEY, key, strict=True)) | values | ratios)
    return rows


def _medians(reports: list[dict[str, Any]]) -> dict[tuple, dict[str, float]]:
    names = (*BETTER_HIGH, *BETTER_LOW)
    found: dict[tuple, list[dict[str, Any]]] = {}
    for report in reports:
        for row in report["rows"]:
            if all(isinstance(row.get(name), (int, float)) for name in names):
                found.setdefault(tuple(row[name] for name in KEY), []).append(row)
    return {key: {name: statistics.median(row[name] for row in rows) for name in names} for key, rows in found.items()}


def main() -> int:
    """Runs both in turns and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("sample", nargs=argparse.REMAINDER, help="options of benchmarks.sample, behind --")
    options = parser.parse_args()
    options.sample = [part for part in options.sample if part != "--"]
    reports: dict[Path, list[dict[str, Any]]] = {options.old: [], HERE: []}
    for _ in range(options.runs):
        for checkout, found in reports.items():
            found.append(measure(checkout, options.sample))
    rows = compared(reports[options.old], reports[HERE])
    print(f"{'rule':24} {'cache':9} {'batch':>5} {'tokens/s':>9} {'forwards':>9} {'compile':>8}   new over old")
    for row in rows:
        name = row["rule"] if row["engine"] == "compiled" else f"{row['rule']} ({row['engine']})"
        numbers = [row[f"{part}_ratio"] for part in (*BETTER_HIGH, *BETTER_LOW)]
        print(f"{name:24} {row['cache']:9} {row['batch']:5} {numbers[0]:9.2f} {numbers[1]:9.2f} {numbers[2]:8.2f}")
    if options.json:
        about = {name: reports[HERE][0].get(name) for name in ("model", "dtype", "hardware", "versions")}
        command = f"python -m benchmarks.compare OLD --runs {options.runs} -- {' '.join(options.sample)}"
        report = {"command": command, "commits": [_commit(options.old), _commit(HERE)], **about, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _commit(checkout: Path) -> str:
    """The commit of a checkout, as far as git knows."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True)
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
