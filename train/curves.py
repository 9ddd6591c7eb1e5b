"""Curves of runs: `python -m train plot --run DIR --run DIR --out curves.png`."""

import collections
import io
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax import buckets
from dllm_jax.errors import DllmError
from dllm_jax.storage import folder_path, write_file
from train.run_dir import METRICS_FILE, WATCH_SECONDS

FORMATS = ("png", "svg", "pdf")
USUAL = ("loss", "lr", "accuracy")
_HELD_OUT = ("heldout_", "heldout_ema_")  # drawn with the metric of the steps

Line = dict[str, Any]


def plot_runs(runs: Sequence[str | Path], out: str | Path, metrics: Sequence[str] = ()) -> list[str]:
    """Draws metrics of one or several runs over their steps, and returns their names.

    A panel shows a metric of the steps, and the same of held-out rows dashed. Standard errors in the log are bars.

    Args:
        runs: folders.
        out: a file whose name ends in one of `FORMATS`.
        metrics: names as in the log; by default those of `USUAL` that are there.

    Raises:
        DllmError: for a folder without a log, a metric that none has, another format, without matplotlib, and when the
            file cannot be written.
    """
    out = Path(out)
    if out.suffix[1:] not in FORMATS:
        raise DllmError(f"{out} is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file; name one by --out")
    logs = read_logs(runs)
    there = metric_names(logs)
    if missing := [name for name in metrics if name not in there]:
        raise DllmError(f"no run has the metric {missing[0]!r}; there are {', '.join(sorted(there - {'step'}))}")
    chosen = list(metrics) or drawable(USUAL, there)
    if not chosen:
        raise DllmError(f"{runs[0]} has nothing to draw yet; wait for its first line")
    write_file(out, draw(logs, chosen, out.suffix[1:]))
    return chosen


def read_logs(runs: Sequence[str | Path]) -> dict[str, list[Line]]:
    """The logs of runs by short names, without short lines.

    Raises:
        DllmError: as `read_log`.
    """
    return {name: join_short_lines(read_log(run)) for name, run in zip(short_names(runs), runs, strict=True)}


def metric_names(logs: Mapping[str, Sequence[Line]]) -> set[str]:
    """What any log has numbers of."""
    return {name for log in logs.values() for line in log for name in line if is_number(line[name])}


def drawable(metrics: Sequence[str], there: Collection[str]) -> list[str]:
    """Those of some metrics that are there, of the steps or of held-out rows."""
    return [name for name in metrics if name in there or any(held + name in there for held in _HELD_OUT)]


def read_log(run: str | Path, name: str = METRICS_FILE) -> list[Line]:
    """The lines of a run's log in order, without one that is being written.

    Args:
        name: of the log in the run's folder.

    Raises:
        DllmError: for a folder without one.
    """
    path, found = folder_path(run) / name, list[Line]()
    try:
        with buckets.reach(path):
            lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DllmError(f"{run} is no training run: {path} could not be read ({error})") from None
    for line in lines:
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def is_number(value: Any) -> bool:
    """Whether a value of a line is a metric's."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def short_names(runs: Sequence[str | Path]) -> list[str]:
    """Names of runs: their folders, relative to the folder that all are in."""
    if any(buckets.is_address(run) for run in runs):
        return [str(run) for run in runs]
    paths = [Path(run).absolute() for run in runs]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def join_short_lines(log: Sequence[Line]) -> list[Line]:
    """A log in which short lines are joined with the next, with means over the steps of both.

    A line is short, as where a run was interrupted, if it is about less than half as many steps as most lines."""
    counts = collections.Counter(line["steps"] for line in log if "steps" in line)
    usual = counts.most_common(1)[0][0] if counts else 0
    found: list[Line] = []
    short: list[Line] = []
    for line in log:
        if "steps" not in line:
            found.append(line)
            continue
        short.append(line)
        if 2 * sum(part["steps"] for part in short) >= usual:
            found.append(_mean(short))
            short = []
    return sorted(found + short, key=lambda line: line["step"])


def _mean(parts: Sequence[Line]) -> Line:
    names = [name for name in parts[-1] if all(is_number(line.get(name)) for line in parts)]
    steps = sum(line["steps"] for line in parts)
    means = {name: sum(line["steps"] * line[name] for line in parts) / steps for name in names}
    return {**parts[-1], **means, "step": parts[-1]["step"], "steps": steps}


def draw(logs: Mapping[str, Sequence[Line]], metrics: Sequence[str], kind: str) -> bytes:
    """A panel of each metric, as a file whose kind is one of `FORMATS`.

    Raises:
        DllmError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DllmError("plots need matplotlib; install it by pip install 'dllm_jax[evals]'") from None
    figure = Figure(figsize=(5.2 * len(metrics), 4.0), layout="constrained")
    for ax, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        for number, (run, log) in enumerate(logs.items()):
            for name, dashes, mark in ((metric, "-", ""), *((held + metric, "--", ".") for held in _HELD_OUT)):
                points = [line for line in log if is_number(line.get(name))]
                if not points:
                    continue
                label = run if name == metric else f"{run}: {name}"
                style = {"color": f"C{number % 10}", "linestyle": ":" if "ema" in name else dashes, "label": label}
                marker = mark or ("." if WATCH_SECONDS in points[0] else "")
                errors = [line.get(f"{name}_stderr") for line in points]
                bars = errors if all(error is not None for error in errors) else None
                steps, values = [line["step"] for line in points], [line[name] for line in points]
                ax.errorbar(steps, values, yerr=bars, marker=marker, linewidth=1.2, capsize=2, **style)
        ax.set_xlabel("step")
        ax.set_ylabel(metric)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=7, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=160)
    return file.getvalue()
