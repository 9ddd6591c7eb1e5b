"""Our sweeps and published points: accuracy over tokens per forward, and the area under it (AUP).

    python -m evals sweep --model DIR --task ... --sampler ... --out runs/mine --count d3llm
    python -m evals aup --results runs/mine --task gsm8k --out runs/aup

Published points lie in `evals/published/aup.json`, each with its source; the file says what its fields are. A method's
area depends on the best accuracy of all that it is compared with, so all areas are computed anew, ours included.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from dllm_jax.cli.command import console
from dllm_jax.errors import DllmError
from dllm_jax.storage import write_file
from evals import files, plots, stderr
from evals.aup_metric import LEADERBOARD, ONE, from_one
from evals.sampler import parse_sampler

PUBLISHED = Path(__file__).parent / "published" / "aup.json"
_NEEDED = "model task sampler accuracy accuracy_stderr tokens_per_forward committed_per_forward nfe".split()
BOARD = "d3llm/"


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting of a method on a task.

    Attributes:
        accuracy: in percent, with its standard error where we measured it.
        tokens_per_forward, nfe: None if the source does not report it.
        setting: in words, or the sampler's spec.
    """

    accuracy: float
    tokens_per_forward: float | None
    nfe: float | None
    setting: str
    accuracy_stderr: float | None = None


@dataclasses.dataclass(frozen=True)
class Method:
    """The points of one method with one model on one task, by one source.

    Attributes:
        name: for people.
        source: short name of the paper; None for ours.
        counting: how its tokens and forwards are counted.
        start: where its curve begins, a point of one token per forward; None where that is among its own, if there is
            one.
    """

    name: str
    model: str
    task: str
    points: tuple[Point, ...]
    source: str | None = None
    counting: str = "tokens before the first end"
    start: Point | None = None

    @property
    def label(self) -> str:
        if self.source is not None:
            return f"{self.name}, {self.model} [{self.source}]"
        return self.name if "@" in self.name else f"{self.name} ({self.model})"

    @property
    def fastest(self) -> Point:
        return max(self.points, key=lambda point: (point.tokens_per_forward or 0.0, -(point.nfe or 0.0)))

    def area(self, best: float) -> float | None:
        """AUP; None where no point has tokens per forward, or the curve does not begin at one token per forward."""
        known = [_pair(point) for point in self.points if point.tokens_per_forward]
        return from_one(known, best, None if self.start is None else _pair(self.start))


def _pair(point: Point) -> tuple[float, float]:
    return point.tokens_per_forward or 0.0, point.accuracy


@functools.cache
def read_published() -> Mapping[str, Any]:
    """The data file, see its "schema"."""
    found: Mapping[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return found


def published_methods(task: str) -> list[Method]:
    """The published methods on a benchmark, or on one of d3LLM's boards.

    Args:
        task: such as "math", whatever the prompt, or "d3llm/math", its points and prompts alone.

    Raises:
        DllmError: for a task without published points.
    """
    if task not in published_tasks():
        raise DllmError(f"no published points are of {task!r}; choose one of {', '.join(published_tasks())}")
    known, groups = read_published(), dict[tuple[str, ...], list[Mapping[str, Any]]]()
    for point in known["points"]:
        if task in (point["benchmark"], f"{BOARD}{point.get('board')}"):
            key = tuple(point[name] for name in ("source", "method", "model", "task", "counting"))
            groups.setdefault(key, []).append(point)
    return [
        Method(name, model, task, tuple(map(_published_point, points)), known["sources"][source]["short"], counting)
        for (source, name, model, task, counting), points in groups.items()
    ]


def published_tasks() -> list[str]:
    """The tasks with published points, see `published_methods`."""
    points = read_published()["points"]
    return [*dict.fromkeys(point["benchmark"] for point in points), *(f"{BOARD}{board}" for board in LEADERBOARD)]


def board_of(task: str) -> str | None:
    """The board that a task names; None where it is a benchmark."""
    return task.removeprefix(BOARD) if task.startswith(BOARD) else None


def _published_point(point: Mapping[str, Any]) -> Point:
    return Point(point["accuracy"], point.get("tokens_per_forward"), point.get("nfe"), point.get("setting", ""))


def best_accuracy(task: str, methods: Iterable[Method]) -> float:
    """y_max in percent, over all points, and over d3LLM's own comparison where the task is one of its boards."""
    every = (point.accuracy for method in methods for point in method.points)
    return max(*every, read_published()["best"].get(board_of(task), 0.0))


def published_areas(task: str) -> dict[str, float]:
    """Method -> AUP on one of d3LLM's boards as it was published, for LLaDA; those without published points too."""
    board = board_of(task)
    return {a["method"]: a["areas"][board] for a in read_published()["areas"] if board in a.get("areas", ())}


# Ours


def reports_of(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The reports of sweeps and of `lm`, from their results.json or the folders that hold them.

    Raises:
        DllmError: for a file that cannot be read or holds no reports.
    """
    return [report for path in paths for report in _reports(Path(path))]


def _reports(path: Path) -> list[dict[str, Any]]:
    path = path / "results.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_bytes())["reports"]
        if found and all(name in report for report in found for name in _NEEDED):
            return list(found)
    except OSError as error:
        raise DllmError(f"{path} could not be read ({error}); name a sweep's folder") from None
    except (ValueError, TypeError, KeyError):
        pass
    raise DllmError(
        f"{path} holds no reports; name the folder or the results.json of python -m evals sweep, figure or lm"
    )


def sampler_methods(reports: Sequence[Mapping[str, Any]]) -> list[Method]:
    """Our methods: samplers that differ in their numbers only are one, as in a sweep. All of a model and task begin at
    their most accurate report of one token per forward."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for report in reports:
        series = parse_sampler(report["sampler"]).series
        groups.setdefault((series, report["model"], report["task"]), []).append(report)
    point = lambda report: _point(report, report["tokens_per_forward"])
    return [
        Method(*key, tuple(map(point, some)), start=None if (base := _base(reports, some[0])) is None else point(base))
        for key, some in groups.items()
    ]


def _base(reports: Sequence[Mapping[str, Any]], fast: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The most accurate report of one token per forward, of the same model and task; None where there is none."""
    same = (r for r in reports if (r["model"], r["task"]) == (fast["model"], fast["task"]))
    bases = (r for r in same if r["committed_per_forward"] <= ONE and r["tokens_per_forward"] > 0)
    return max(bases, key=lambda report: float(report["accuracy"]), default=None)


def two_points(base: Mapping[str, Any], fast: Mapping[str, Any]) -> tuple[Point, Point]:
    """The points that d3LLM publishes of a method: one token per forward, whose parallelism is 1 by definition though
    an answer that ends early has fewer tokens than forwards, and one accelerated setting, counted as d3LLM counts.

    Raises:
        DllmError: for a report without that count.
    """
    if "d3llm" not in fast.get("compat_count", {}):
        raise DllmError(f"{fast['sampler']} was not counted as d3LLM does; sweep again with --count d3llm")
    return _point(base, 1.0), _point(fast, fast["compat_count"]["d3llm"]["tokens_per_forward"])


def two_point_methods(reports: Sequence[Mapping[str, Any]]) -> list[Method]:
    """Our methods by that protocol: each accelerated sampler is one, with the best of one token per forward of the
    same model and task.

    Raises:
        DllmError: as `two_points`, and where one of the two is missing.
    """
    methods = []
    for fast in (report for report in reports if report["committed_per_forward"] > ONE):
        base = _base(reports, fast)
        if base is None:
            raise DllmError(f"no report of {fast['model']} has one token per forward; sweep over topk:k=1 as well")
        points = two_points(base, fast)
        methods.append(Method(fast["sampler"], fast["model"], fast["task"], points, counting="d3llm"))
    if not methods:
        raise DllmError("no report has more than one token per forward; sweep over a faster sampler as well")
    return methods


def _point(report: Mapping[str, Any], tokens_per_forward: float) -> Point:
    accuracy, error = 100 * report["accuracy"], 100 * report["accuracy_stderr"]
    return Point(accuracy, tokens_per_forward, report["nfe"], report["sampler"], error)


# Outputs


def method_rows(methods: Sequence[Method], best: float) -> list[dict[str, Any]]:
    """One flat row per method with the point that has most tokens per forward, or fewest forwards; the largest area
    first, those without one at the end."""
    table = [
        {
            "method": method.name,
            "model": method.model,
            "task": method.task,
            "source": method.source or "ours",
            "counting": method.counting,
            "points": len(method.points),
            "fastest_accuracy": method.fastest.accuracy,
            "fastest_accuracy_stderr": method.fastest.accuracy_stderr,
            "fastest_tokens_per_forward": method.fastest.tokens_per_forward,
            "fastest_nfe": method.fastest.nfe,
            "aup": method.area(best),
        }
        for method in methods
    ]
    return sorted(table, key=lambda row: -(row["aup"] or 0.0))


def plot(methods: Sequence[Method], title: str) -> bytes:
    """Accuracy over tokens per forward and, where something published has forwards alone, over forwards: ours as
    curves, published points in grey; a PNG."""
    panels = [_panel(methods, "tokens_per_forward", "tokens per forward")]
    if any(p.tokens_per_forward is None for method in methods for p in method.points):
        panels.append(_panel(methods, "nfe", "forwards per example (NFE)"))
    known = read_published()["sources"].values()
    used = {method.source for method in methods}
    cited = [f"[{s['short']}] {s['title']}, arXiv {s['arxiv']} ({s['hardware']})" for s in known if s["short"] in used]
    note = "Grey numbers: published, counted as each paper counts, with its prompts. "
    return plots.draw(panels, title, caption=note + "; ".join(cited))


def _panel(methods: Sequence[Method], field: str, label: str) -> plots.Panel:
    """Our methods first, so that they have the first colours."""
    found = []
    for method in sorted(methods, key=lambda method: method.source is not None):
        known = [point for point in method.points if getattr(point, field)]
        if field == "nfe" and method.source is not None:  # the other panel has points with both
            known = [point for point in known if point.tokens_per_forward is None]
        known = sorted(known, key=lambda point: float(getattr(point, field)))
        if known:
            found.append(_curve(method, known, field))
    return plots.Panel(label, found)


def _curve(method: Method, points: Sequence[Point], field: str) -> plots.Curve:
    ours = method.source is None
    return plots.Curve(
        label=method.label,
        x=[getattr(point, field) for point in points],
        y=[point.accuracy for point in points],
        y_error=[point.accuracy_stderr or 0.0 for point in points] if ours else None,
        published=not ours,
    )


# Command


def add(commands: Any) -> None:
    """The command `python -m evals aup`."""
    about = "sweeps and published points: aup.json, aup.csv and aup.png"
    command = commands.add_parser("aup", help=about, description=about, allow_abbrev=False)
    command.set_defaults(command=_run)
    add = command.add_argument
    about = "folder of a sweep, or of lm, or its results.json; several may follow"
    add("--results", nargs="+", action="extend", required=True, metavar="PATH", help=about)
    add(
        "--task",
        required=True,
        metavar="NAME",
        help=f"published points to compare with: {', '.join(published_tasks())}",
    )
    add("--two-points", action="store_true", help="d3LLM's protocol; needs sweeps with --count d3llm and topk:k=1")
    add("--out", required=True, metavar="DIR", help="folder of the results")


def _run(options: argparse.Namespace) -> None:
    plots.require_matplotlib()
    theirs, reports = published_methods(options.task), reports_of(options.results)
    ours = two_point_methods(reports) if options.two_points else sampler_methods(reports)
    folder, methods = files.make_folder(options.out), [*ours, *theirs]
    best = best_accuracy(options.task, methods)
    table = method_rows(methods, best)
    entries = [{**dataclasses.asdict(method), "aup": method.area(best)} for method in methods]
    write_file(folder / "aup.json", files.as_json({"task": options.task, "best": best, "methods": entries}))
    write_file(folder / "aup.csv", files.as_csv(table))
    measured = ", ".join(dict.fromkeys(f"{method.model} on {method.task}" for method in ours))
    write_file(folder / "aup.png", plot(methods, f"{measured}, and published {options.task}"))
    _print(table, best)
    if areas := published_areas(options.task):
        y_max = f"{read_published()['best'][board_of(options.task)]:.2f}"
        print(f"published with y_max {y_max}: " + ", ".join(f"{name} {area:.1f}" for name, area in areas.items()))
    print(f"{len(ours)} methods of ours, {len(theirs)} published; aup.json, aup.csv, aup.png in {folder}")


def _print(table: Sequence[Mapping[str, Any]], best: float) -> None:
    shown = Table(title=f"AUP with the best accuracy {best:.2f} %", box=box.SIMPLE, title_justify="left")
    for name in ("method", "model", "source", "counting", "at its fastest", "tokens/forward", "NFE", "points", "AUP"):
        shown.add_column(name, overflow="fold")
    number = lambda value, form: "-" if value is None else format(value, form)
    for row in table:
        accuracy, rho, nfe = (row[f"fastest_{name}"] for name in ("accuracy", "tokens_per_forward", "nfe"))
        error = row["fastest_accuracy_stderr"]
        score = number(accuracy, ".2f") if error is None else stderr.as_percent(accuracy / 100, error / 100)
        numbers = (rho, ".2f"), (nfe, ".1f"), (row["points"], "d"), (row["aup"], ".1f")
        style = "bold" if row["source"] == "ours" else None
        words = (row[name] for name in ("method", "model", "source", "counting"))
        shown.add_row(*words, score, *(number(*pair) for pair in numbers), style=style)
    console().print(shown)
