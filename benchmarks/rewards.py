"""Held-out accuracy of the states that runs of `python -m train` kept, of GRPO's above all, on the same problems
throughout; of the moving average, where that is what a run writes.

    python -m benchmarks.rewards runs/grpo-sudoku --task sudoku:box_rows=2,box_columns=3 --n 2000 \
        --sampler topk:k=12,proxy=entropy --out evals/results/grpo-sudoku

Answers are greedy unless the sampler has a temperature. A state is compared with the weights before training problem by
problem: of those that only one of both solves, how many each; the standard error of the difference is
sqrt(gained + lost - (gained - lost)^2 / n) / n.
"""

import argparse
import csv
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dllm_jax
import evals
from benchmarks import command
from dllm_jax import Model
from evals.paired_test import Pairs
from evals.plots import Curve, Panel, draw
from evals.tasks import make_task
from samplers.engine.runner import Engines
from train.curves import read_log
from train.lora import add_adapters
from train.objectives import OBJECTIVES
from train.run_dir import RunFolder, read_settings
from train.settings import build_settings
from train.setup import read_parts
from train.step import training_mesh
from train.trainer import Run, placement_of

Row = dict[str, Any]
COLUMNS = ("run", "step", "accuracy", "accuracy_stderr", "gained", "lost", "difference", "difference_stderr", "nfe")


def report(options: argparse.Namespace) -> Row:
    """Everything that is measured, as it is written to the file."""
    task, rows, surroundings, engines = make_task(options.task), list[Row](), {}, Engines()
    examples: Any = None
    starts = dict[str, Any]()  # by the model that runs began with
    for folder in options.runs:
        run = _run(folder)
        base = dllm_jax.load(run.config.model.init, dtype=run.config.compute.dtype)
        with RunFolder(run.config).states(training=False) as states:
            for step in [0, *states.steps[options.every - 1 :: options.every]]:
                found = None if step else starts.get(run.config.model.init)
                if found is None:
                    model = _model(run, run.restore(states, step), base) if step else base
                    bound = task.bind(model)
                    examples = examples or [bound.example(options.split, i) for i in range(options.n)]
                    found = evals.run(
                        model,
                        bound,
                        options.sampler,
                        n=options.n,
                        batch_size=options.batch_size,
                        examples=examples,
                        engines=engines,
                    )
                start = starts.setdefault(run.config.model.init, found)
                pairs = Pairs.of([row.correct for row in start.rows], [row.correct for row in found.rows])
                rows.append({"run": folder.name, "step": step, **_compared(found, pairs)})
                surroundings = {"hardware": found.hardware, "versions": found.versions}
                print({name: rows[-1][name] for name in COLUMNS}, flush=True)
    logs = {folder.name: read_log(folder) for folder in options.runs}
    about = {name: str(getattr(options, name)) for name in ("task", "sampler", "split", "n")}
    return {"about": about, **surroundings, "rows": rows, "training": logs}


def _run(folder: Path) -> Run:
    values = read_settings(folder)
    config = build_settings(OBJECTIVES[values["command"]].config, values | {"out": str(folder)})
    parts = read_parts(config)
    return Run(config, parts, placement_of(config, parts.model, training_mesh(config)))


def _model(run: Run, state: Any, base: Model) -> Model:
    lora = run.config.lora
    weights = state.average if run.config.checkpoint.weights == "ema" else state.trained
    params = add_adapters(base.params, weights, lora.scale) if lora.rank else dict(weights)
    return dataclasses.replace(base, params=params)


def _compared(found: Any, pairs: Pairs) -> Row:
    difference = (pairs.gained - pairs.lost) / pairs.n
    spread = math.sqrt(max(pairs.gained + pairs.lost - pairs.n * difference**2, 0.0)) / pairs.n
    return {
        "accuracy": found.accuracy,
        "accuracy_stderr": found.accuracy_stderr,
        "gained": pairs.gained,
        "lost": pairs.lost,
        "difference": difference,
        "difference_stderr": spread,
        "nfe": found.nfe,
    }


def plot(result: Row) -> bytes:
    """Held-out accuracy by step, with standard errors of the differences to step 0, and the mean reward of what was
    sampled, as a PNG."""
    held_out, sampled = [], []
    for name in dict.fromkeys(row["run"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["run"] == name]
        column = lambda key, rows=rows: [row[key] for row in rows]
        percent = lambda key, rows=rows: [100 * row[key] for row in rows]
        held_out.append(Curve(name, column("step"), percent("accuracy"), percent("difference_stderr")))
        if log := [line for line in result["training"][name] if "reward" in line]:
            width = max(len(log) // 20, 1)
            parts = [log[i : i + width] for i in range(0, len(log), width)]
            means = [statistics.fmean(line["reward"] for line in part) for part in parts]
            sampled.append(Curve(name, [part[-1]["step"] for part in parts], means))
    labels = "held-out accuracy, %; standard error of the difference", "mean reward of sampled answers"
    panels = [
        Panel("steps", curves, y_label=label, y_range=_range(curves))
        for curves, label in zip((held_out, sampled), labels, strict=True)
        if curves
    ]
    return draw(panels, f"{result['about']['task']}: {result['about']['sampler']}, n = {result['about']['n']}")


def _range(curves: Sequence[Curve]) -> tuple[float, float]:
    values = [
        y + side * error
        for curve in curves
        for y, error in zip(curve.y, curve.y_error or [0.0] * len(curve.y), strict=True)
        for side in (-1, 1)
    ]
    room = 0.15 * (max(values) - min(values)) or 1.0
    return min(values) - room, max(values) + room


def show(rows: list[Row]) -> None:
    """Prints the last state of each run."""
    for name in dict.fromkeys(row["run"] for row in rows):
        last = [row for row in rows if row["run"] == name][-1]
        errors = last["difference"] / last["difference_stderr"] if last["difference_stderr"] else math.inf
        print(f"{name}: {last['accuracy']:.2%}, {last['difference']:+.2%}, {errors:.1f} standard errors")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewards", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folders of runs")
    parser.add_argument("--task", required=True, help="as for python -m evals")
    parser.add_argument("--sampler", required=True, help="spec of the sampler that answers")
    parser.add_argument("--split", default="test", choices=["test", "validation"], help="problems (default: test)")
    parser.add_argument("--n", type=int, default=2000, help="how many of them (default: 2000)")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="evaluate every Nth state (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for results.json, results.csv and curve.png")
    options = parser.parse_args(arguments)
    options.dtype, options.json = None, None

    def reported(options: argparse.Namespace) -> Row:
        result = report(options)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
            with (options.out / "results.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(result["rows"])
            (options.out / "curve.png").write_bytes(plot(result))
        return result

    return command.run(options, reported, show)


if __name__ == "__main__":
    sys.exit(main())
