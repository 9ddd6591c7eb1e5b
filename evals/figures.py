"""Figures of sweeps: lines of samplers, panels of their reports, and comparisons in words (see `paper_figures`)."""

import argparse
import dataclasses
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dllm_jax.errors import DllmError
from evals import plots, stderr
from evals.runner import Report
from evals.sampler import SamplerConfig, parse_sampler, parse_samplers, unique
from evals.sweeps import AXES, Sweep, curve_of, title
from evals.tasks import TASKS, Task, TextTask


@dataclasses.dataclass(frozen=True)
class FigureLine:
    """A curve of a figure.

    Attributes:
        label: for the legend.
        specs: its samplers, in order; those that differ in their indicator only are one point. {NAME} stands for an
            option of the figure's command; without that option the line is left out.
        few_programs: what `--few-programs` appends to the last spec.
        front: join the points of its Pareto front only, as they have no order.
    """

    label: str
    specs: Sequence[str]
    few_programs: str = ""
    front: bool = False

    @property
    def samplers(self) -> list[SamplerConfig]:
        return [sampler for text in self.specs for sampler in parse_samplers(text)]


@dataclasses.dataclass(frozen=True)
class FigurePanel:
    """A panel of a figure.

    Attributes:
        x: a field of the reports; with `swept` the name of the swept option.
        y: a field of the reports.
        lines: labels of the lines that are drawn; all by default.
        swept: option of the samplers whose values are the places on the x axis; None if x is a field.
        front: draw the Pareto front of all lines; never of a swept option.
    """

    x: str
    y: str = "accuracy"
    lines: Sequence[str] = ()
    swept: str | None = None
    front: bool = True


@dataclasses.dataclass(frozen=True)
class EqualAccuracy:
    """A comparison in words: forwards of two lines at equal accuracy.

    Attributes:
        subject: what the sentence begins with.
        plain, helped: labels of the lines.
        name: of the helped line, in the sentence.
        baseline: of the plain line, in the sentence.
    """

    subject: str
    plain: str
    helped: str
    name: str
    baseline: str = "threshold"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure's grid of samplers and its panels.

    Attributes:
        about: for the list of commands.
        task: as it is written on the command line; `fits` says what may replace it.
        templates: its lines, with options of the command in their specs.
        panels: what is drawn.
        options: flag -> how it is added to the command's parser.
        comparisons: sentences about the outcome.
        columns: panels in a row, at most.
        n: examples, by default.
    """

    about: str
    task: str
    templates: Sequence[FigureLine]
    panels: Sequence[FigurePanel]
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    comparisons: Sequence[EqualAccuracy] = ()
    columns: int = 2
    n: int = 512

    @property
    def task_name(self) -> str:
        return self.task.partition(":")[0]

    def fits(self, task: Task) -> bool:
        """Whether it can be made of a task: its own or, if that has answers in words, any text."""
        return task.name == self.task_name or (TASKS[self.task_name].stops and isinstance(task, TextTask))

    def lines(self, options: argparse.Namespace) -> list[FigureLine]:
        """The lines with the command's options in their specs.

        Raises:
            DllmError: for a path that a spec cannot hold, or one that is given twice.
        """
        names = [flag.removeprefix("--").replace("-", "_") for flag in self.options]
        given = {name: _as_option(value) for name in names if (value := getattr(options, name)) is not None}
        few = getattr(options, "few_programs", False)
        found = []
        for line in self.templates:
            needed = {field for spec in line.specs for _, field, _, _ in string.Formatter().parse(spec) if field}
            if needed <= given.keys():
                specs = [spec.format(**given) for spec in line.specs]
                specs[-1] += line.few_programs if few else ""
                found.append(dataclasses.replace(line, specs=specs))
        return found


Point = Sequence[Report]
"""A point of a curve: one report, or the mean of the reports of several trained indicators."""


def samplers_of(lines: Sequence[FigureLine]) -> list[SamplerConfig]:
    """All samplers of the lines, each once."""
    return unique(sampler for line in lines for sampler in line.samplers)


def points_of(found: Sweep, lines: Sequence[FigureLine]) -> dict[str, list[Point]]:
    """Label of a line -> its points, in its order."""
    reports = {str(sampler): report for sampler, report in zip(found.samplers, found.reports, strict=True)}
    points: dict[str, list[Point]] = {}
    for line in lines:
        groups: dict[str, list[Report]] = {}
        for sampler in line.samplers:
            groups.setdefault(str(sampler.without("indicator")), []).append(reports[str(sampler)])
        points[line.label] = list(groups.values())
    return points


def draw_figure(figure: Figure, found: Sweep, lines: Sequence[FigureLine]) -> bytes:
    """The figure as a PNG."""
    points, fronts = points_of(found, lines), {line.label for line in lines if line.front}
    panels = []
    for panel in figure.panels:
        shown = {label: points[label] for label in panel.lines or points if label in points}
        if not shown:
            continue
        x: str | Sequence[float] = panel.x
        smaller = panel.x == "nfe" if panel.front else None
        ticks = None
        if panel.swept is not None:
            (line,) = shown.values()
            x, smaller = range(len(line)), None
            ticks = [str(parse_sampler(point[0].sampler).options.get(panel.swept, "none")) for point in line]
        curves = [curve_of(label, line, x, panel.y, front=label in fronts) for label, line in shown.items()]
        panels.append(plots.Panel(AXES.get(panel.x, panel.x), curves, smaller, AXES[panel.y], ticks))
    return plots.draw(panels, title(found), min(figure.columns, len(panels)))


def summarize_figure(figure: Figure, found: Sweep, lines: Sequence[FigureLine]) -> dict[str, Any]:
    """What results.json has besides the reports: the samplers of every curve, and the comparisons."""
    points = points_of(found, lines)
    compared = [one for one in figure.comparisons if {one.plain, one.helped} <= points.keys()]
    notes = [
        compare_lines(one.subject, points[one.plain], one.name, points[one.helped], one.baseline) for one in compared
    ]
    return {"curves": {line.label: [str(sampler) for sampler in line.samplers] for line in lines}, "notes": notes}


def compare_lines(
    subject: str, plain: Sequence[Point], name: str, helped: Sequence[Point], baseline: str = "threshold"
) -> str:
    """A sentence: the fewest forwards within one standard error of the best plain accuracy. Points are chosen on
    half of the problems and measured on the others: the best of many is too good on the problems that chose it."""
    rows = len(plain[0][0].rows)
    if rows < 2:
        return f"{subject}: no points are compared, as that takes one problem to choose them on and another to measure"
    chosen_on, measured_on = 0, 1
    best = max(plain, key=lambda point: (_half(point, "correct", chosen_on), -_half(point, "nfe", chosen_on)))
    accuracy = _half(best, "correct", chosen_on)
    floor = accuracy - stderr.of_share(accuracy, rows - rows // 2)
    at = f"{subject}: at accuracy within one standard error of the best {baseline}'s (at least {100 * floor:.1f} %)"
    ours, theirs = ([p for p in some if _half(p, "correct", chosen_on) >= floor] for some in (helped, plain))
    if not ours:
        return f"{at} no {name} point stands"
    mine, other = (min(some, key=lambda p: _half(p, "nfe", chosen_on)) for some in (ours, theirs))
    ratio = _half(other, "nfe", measured_on) / max(_half(mine, "nfe", measured_on), 1.0)
    which = f"chosen on {rows - rows // 2} problems, measured on {rows // 2} others"
    return (
        f"{at}, {which}: NFE {_describe(mine, measured_on)} against {_describe(other, measured_on)}, ratio {ratio:.2f}"
    )


def _half(point: Point, field: str, which: int) -> float:
    """Mean of a field of the rows over every second problem, from the first (0) or the second (1) on."""
    return float(np.mean([getattr(row, field) for report in point for row in report.rows[which::2]]))


def _describe(point: Point, which: int) -> str:
    """A point with its forwards and accuracy on a half of the problems, its numbers and the length of its blocks."""
    sampler = parse_sampler(point[0].sampler)
    varied = {**sampler.numbers, **{k: v for k, v in sampler.options.items() if k == "block_length"}}
    numbers = ", ".join(f"{name} {value:g}" for name, value in varied.items())
    each = [_half([report], "nfe", which) for report in point]
    several = f" +- {np.std(each, ddof=1):.2f} over {len(each)} indicators" if len(each) > 1 else ""
    accuracy, problems = _half(point, "correct", which), len(point[0].rows[which::2])
    solved = stderr.as_percent(accuracy, stderr.of_share(accuracy, problems))
    return f"{_half(point, 'nfe', which):.2f}{several} ({numbers}; {solved} %)"


def _as_option(value: Any) -> str:
    """An option of the command as it is written in a spec: a number, a folder or name, or several of these."""
    values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    for text in values:
        if not text or set(text) & set(",|@"):
            raise DllmError(f"{text!r} cannot be written in a sampler; give a path without comma, bar and @")
    if len(set(values)) < len(values):
        raise DllmError(f"{values[0]} was given twice; an average over both would hide how much training varies")
    return "|".join(values)
