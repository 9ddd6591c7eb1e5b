"""Figures of papers, each one command: a task, the samplers of every curve, panels, and comparisons in words.

Figures 6 and 7 of EB-Sampler (arXiv 2505.24857), Figures 3, 4 and 6 and Table 2 of APD (arXiv 2506.00413), the tables
of D2F (arXiv 2508.09192), of NI-Sampling (arXiv 2604.18471) and of dInfer's trajectory compression (arXiv 2510.08666)
as curves. A new figure is an entry in `FIGURES`.
"""

import argparse
import dataclasses
import string
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dllm_jax.errors import DllmError
from evals import plots, stderr
from evals.runner import Report
from evals.sampler import SamplerConfig, parse_sampler, parse_samplers, unique
from evals.sweeps import Sweep, title
from evals.tasks import TASKS, Task, TextTask


@dataclasses.dataclass(frozen=True)
class Line:
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
class PanelSpec:
    """A panel of a figure.

    Attributes:
        x: a field of the reports; with `swept` the name of what is swept.
        y: a field of the reports.
        lines: labels of the lines that are drawn; without any, all.
        swept: option of the samplers whose values are the x axis, one place each; None if x is a field.
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
    """

    subject: str
    plain: str
    helped: str
    name: str


@dataclasses.dataclass(frozen=True)
class Figure:
    """What a figure is made of.

    Attributes:
        about: for the list of commands.
        task: as it is written on the command line; what `fits` may take its place.
        templates: its lines, with options of the command where they are needed.
        panels: what is drawn.
        columns: panels side by side.
        options: flag -> how it is added to the command's parser.
        comparisons: what is said of the outcome.
        n: examples, by default.
    """

    about: str
    task: str
    templates: Sequence[Line]
    panels: Sequence[PanelSpec]
    columns: int
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    comparisons: Sequence[EqualAccuracy] = ()
    n: int = 512

    @property
    def task_name(self) -> str:
        return self.task.partition(":")[0]

    def fits(self, task: Task) -> bool:
        """Whether it can be made of a task: its own, or, where that has answers in words, any text."""
        return task.name == self.task_name or (TASKS[self.task_name].stops and isinstance(task, TextTask))

    def lines(self, options: argparse.Namespace) -> list[Line]:
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


@dataclasses.dataclass(frozen=True)
class Point:
    """A place on a curve: one report, or the mean over several trained indicators.

    Attributes:
        samplers: their specs; the first is the point's name.
        reports: one of each.
    """

    samplers: Sequence[str]
    reports: Sequence[Report]

    def mean(self, field: str) -> float:
        return float(np.mean([getattr(report, field) for report in self.reports]))

    def half(self, field: str, which: int) -> float:
        """Mean of a field of the rows over every second problem, from the first (0) or the second (1) on."""
        return float(np.mean([getattr(row, field) for report in self.reports for row in report.rows[which::2]]))

    def spread(self, field: str) -> float:
        """Standard deviation over the indicators; 0 for one."""
        values = [getattr(report, field) for report in self.reports]
        return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


Points = Mapping[str, Sequence[Point]]
"""Label of a line -> its points."""


def samplers_of(lines: Sequence[Line]) -> list[SamplerConfig]:
    """All samplers of the lines, each once."""
    return unique(sampler for line in lines for sampler in line.samplers)


def points_of(found: Sweep, lines: Sequence[Line]) -> dict[str, list[Point]]:
    """The points of every line, in its order."""
    reports = {str(sampler): report for sampler, report in zip(found.samplers, found.reports, strict=True)}
    points = {}
    for line in lines:
        groups: dict[str, list[str]] = {}
        for sampler in line.samplers:
            groups.setdefault(str(sampler.without("indicator")), []).append(str(sampler))
        points[line.label] = [Point(names, [reports[name] for name in names]) for names in groups.values()]
    return points


def plot(figure: Figure, found: Sweep, lines: Sequence[Line]) -> bytes:
    """The figure as a PNG."""
    points, fronts = points_of(found, lines), {line.label for line in lines if line.front}
    return plots.draw([_panel(spec, points, fronts) for spec in figure.panels], title(found), figure.columns)


def summary(figure: Figure, found: Sweep, lines: Sequence[Line]) -> dict[str, Any]:
    """What results.json holds besides the reports: the samplers of every curve, and the comparisons."""
    points = points_of(found, lines)
    compared = [one for one in figure.comparisons if one.helped in points]
    notes = [compare(one.subject, points[one.plain], one.name, points[one.helped]) for one in compared]
    return {"curves": {line.label: [str(sampler) for sampler in line.samplers] for line in lines}, "notes": notes}


def compare(subject: str, plain: Sequence[Point], name: str, helped: Sequence[Point]) -> str:
    """A sentence: the fewest forwards within one standard error of the best plain accuracy. Points are chosen on
    half of the problems and measured on the others: where it was chosen, the best of many looks too good."""
    rows = len(plain[0].reports[0].rows)
    if rows < 2:
        return f"{subject}: no points are compared, as that takes one problem to choose them on and another to measure"
    chosen_on, measured_on = 0, 1
    best = max(plain, key=lambda point: (point.half("correct", chosen_on), -point.half("nfe", chosen_on)))
    accuracy = best.half("correct", chosen_on)
    floor = accuracy - stderr.of_share(accuracy, rows - rows // 2)
    at = f"{subject}: at accuracy within one standard error of the best threshold's (at least {100 * floor:.1f} %)"
    ours, theirs = ([p for p in some if p.half("correct", chosen_on) >= floor] for some in (helped, plain))
    if not ours:
        return f"{at} no {name} point stands"
    mine, other = (min(some, key=lambda p: p.half("nfe", chosen_on)) for some in (ours, theirs))
    ratio = other.half("nfe", measured_on) / max(mine.half("nfe", measured_on), 1.0)
    which = f"chosen on {rows - rows // 2} problems, measured on {rows // 2} others"
    return (
        f"{at}, {which}: NFE {_describe(mine, measured_on)} against {_describe(other, measured_on)}, ratio {ratio:.2f}"
    )


def _describe(point: Point, which: int) -> str:
    """A point with its forwards and accuracy on a half of the problems, and its numbers."""
    numbers = ", ".join(f"{name} {value:g}" for name, value in parse_sampler(point.samplers[0]).numbers.items())
    each = [Point(point.samplers, [report]).half("nfe", which) for report in point.reports]
    several = f" +- {np.std(each, ddof=1):.2f} over {len(each)} indicators" if len(each) > 1 else ""
    return f"{point.half('nfe', which):.2f}{several} ({numbers}; {100 * point.half('correct', which):.1f} %)"


def _as_option(value: Any) -> str:
    """An option of the command as it stands in a spec: a number, a folder or name, or several of these."""
    values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    for text in values:
        if not text or set(text) & set(",|@"):
            raise DllmError(f"{text!r} cannot be written in a sampler; give a path without comma, bar and @")
    if len(set(values)) < len(values):
        raise DllmError(f"{values[0]} was given twice; an average over both would hide how much training varies")
    return "|".join(values)


_FIELDS = {
    "accuracy": plots.ACCURACY,
    "nfe": "mean forwards (NFE)",
    "tokens_per_second": "tokens per second",
    "tokens_per_forward": "tokens per forward",
    "committed_per_forward": "accepted per forward",
    "tokens": "tokens per answer",
}
"""Field of a report -> its name on an axis."""


def _panel(spec: PanelSpec, points: Points, fronts: set[str]) -> plots.Panel:
    shown = {label: points[label] for label in spec.lines or points}
    if spec.swept is None:
        curves = [_curve(label, line, spec.x, spec.y, label in fronts) for label, line in shown.items()]
        smaller = spec.x == "nfe" if spec.front else None
        return plots.Panel(_FIELDS[spec.x], curves, smaller_is_better=smaller, y_label=_FIELDS[spec.y])
    ((label, line),) = shown.items()
    ticks = [str(parse_sampler(point.samplers[0]).options.get(spec.swept, "none")) for point in line]
    curve = _curve(label, line, range(len(line)), spec.y)
    return plots.Panel(spec.x, [curve], y_label=_FIELDS[spec.y], ticks=ticks)


def _curve(label: str, points: Sequence[Point], x: str | Sequence[float], y: str, front: bool = False) -> plots.Curve:
    """A curve over a field of the reports, or over given places."""
    scale = 100.0 if y == "accuracy" else 1.0
    several = any(len(point.reports) > 1 for point in points)
    return plots.Curve(
        label=label,
        x=[point.mean(x) for point in points] if isinstance(x, str) else x,
        y=[scale * point.mean(y) for point in points],
        y_error=[scale * point.mean("accuracy_stderr") for point in points] if y == "accuracy" else None,
        x_spread=[point.spread(x) for point in points] if several and isinstance(x, str) else None,
        y_spread=[scale * point.spread(y) for point in points] if several else None,
        front=front,
    )


# The figures

# The paper lists neither gammas nor ks for the puzzles; these cover its curves from one token per forward to all.
_EB = [
    *(
        Line(
            f"eb:proxy={proxy}",
            [f"eb:proxy={proxy},gamma=0|1e-05|0.0001|0.0003|0.001|0.003|0.01|0.03|0.1|0.3|0.5|1|2|4|8|inf"],
        )
        for proxy in ("confidence", "entropy", "margin")
    ),
    *(
        Line(f"topk:proxy={proxy}", [f"topk:proxy={proxy},k=1|2|3|4|6|8|12|16|32"])
        for proxy in ("confidence", "entropy", "margin")
    ),
]

_WEIGHTS, _STEPS = "APD, R (no W, no M)", "fixed k, left to right"
_LOOKAHEADS, _WINDOWS = "lookahead M, k = 1", "window W, k = 1"
_ONE = "leftright:tokens_per_step=1"
_APD = [
    Line(_WEIGHTS, ["apd:verifier={verifier},weight=0.1|0.2|0.3|0.4|0.5|0.6|0.7|0.8|0.9"]),
    Line(_STEPS, ["leftright:tokens_per_step=1|2|3|4|5|6|7|8"]),
    Line(_LOOKAHEADS, [_ONE, f"{_ONE},lookahead=64|32|16|8|4"], few_programs=",most_lookahead=64"),
    Line(_WINDOWS, [_ONE, f"{_ONE},window=64|32|16|8|4|1"], few_programs=",most_window=64"),
    Line(
        "APD, R x W x M",
        ["apd:verifier={verifier},weight=0.5|0.6|0.7|0.8,window=8|16|32,lookahead=8|16|32"],
        few_programs=",most_window=32,most_lookahead=32",
        front=True,
    ),
    Line("verifier alone", ["leftright:window=1,lookahead=1@{verifier}"]),
]
_SWEPT = (
    ("R", _WEIGHTS, "weight", "committed_per_forward"),
    ("k", _STEPS, "tokens_per_step", "committed_per_forward"),
    ("M", _LOOKAHEADS, "lookahead", "tokens"),
    ("W", _WINDOWS, "window", "tokens"),
)
_APD_PANELS = [
    *(PanelSpec(name, "accuracy", [label], option) for name, label, option, _ in _SWEPT),
    *(PanelSpec(name, "tokens_per_second", [label], option) for name, label, option, _ in _SWEPT),
    *(PanelSpec(name, written, [label], option) for name, label, option, written in _SWEPT),
    PanelSpec("tokens_per_forward"),
    PanelSpec("tokens_per_second"),
]

_D2F_BLOCKS, _D2F_THRESHOLDS = "block_length=8|16|32", "threshold=0.5|0.7|0.8|0.9|0.95"
_D2F = [
    Line("teacher, one token per forward", ["topk:k=1"]),
    Line("teacher, Fast-dLLM", [f"threshold:{_D2F_THRESHOLDS},cache=dual,{_D2F_BLOCKS}"], front=True),
    Line("D2F", [f"d2f:{_D2F_BLOCKS},tau_add=0.1,tau_act=0.95,{_D2F_THRESHOLDS}@{{student}}"], front=True),
    Line(
        "D2F, single state", [f"d2f:{_D2F_BLOCKS},tau_add=0.95,tau_act=0.95,{_D2F_THRESHOLDS}@{{student}}"], front=True
    ),
    Line(
        "D2F, EB inside",
        [f"d2f:{_D2F_BLOCKS},tau_add=0.1,tau_act=0.95,rule=eb,gamma=0.01|0.1|0.25|0.5|1@{{student}}"],
        front=True,
    ),
    Line("autoregressive, cached", ["leftright:window=1,lookahead=1@{ar}"]),
]

_THRESHOLDS = "threshold:threshold=0.3|0.5|0.7|0.8|0.9|0.95"
# A cache, its name, and where the indicator is asked: wherever a forward runs.
_NI_CACHES = (("none", "no cache", "rest"), ("prefix", "prefix cache", "rest"), ("dual", "dual cache", "block"))
_NI = [
    line
    for cache, name, scope in _NI_CACHES
    for line in (
        Line(f"threshold, {name}", [f"{_THRESHOLDS},cache={cache},block_length={{block_length}}"]),
        Line(
            f"NI and threshold 0.9, {name}",
            [
                "ni:indicator={indicator},threshold=0.9,indicator_threshold=0.5|0.6|0.7|0.8|0.9,"
                f"scope={scope},cache={cache},block_length={{block_length}}"
            ],
        ),
    )
]

_BEFORE, _AFTER, _CONTROL = "before compression", "after compression", "control: same texts, random masks"
_COMPRESSION = [
    Line(_BEFORE, [f"{_THRESHOLDS},block_length={{block_length}}"]),
    Line(_AFTER, [f"{_THRESHOLDS},block_length={{block_length}}@{{compressed}}"]),
    Line(_CONTROL, [f"{_THRESHOLDS},block_length={{block_length}}@{{control}}"]),
]

_LONG_PROBLEMS = "word-problems:difficulty=long"
_FREE_WORDS = f"{_LONG_PROBLEMS},steps=4-6,wording=free"


def _flag(about: str, **more: Any) -> Mapping[str, Any]:
    return {"help": about, **more}


_BLOCK_LENGTH = _flag("of all samplers (default: 16)", type=int, default=16, metavar="N")

FIGURES: Mapping[str, Figure] = types.MappingProxyType(
    {
        "eb-sudoku": Figure("EB-Sampler's Figure 7", "sudoku", _EB, [PanelSpec("nfe", front=False)], 1, n=2000),
        "eb-maze": Figure("EB-Sampler's Figure 6", "maze", _EB, [PanelSpec("nfe", front=False)], 1, n=2000),
        "apd": Figure(
            "APD's Figures 3, 4 and 6 and Table 2",
            _LONG_PROBLEMS,
            _APD,
            _APD_PANELS,
            4,
            {
                "--verifier": _flag("autoregressive model of the same tokens", required=True, metavar="DIR_OR_NAME"),
                "--few-programs": _flag(
                    "one program per curve; the speed of small W and M is then that of the largest",
                    action="store_true",
                ),
            },
        ),
        "d2f": Figure(
            "D2F against its teacher and an autoregressive model",
            _LONG_PROBLEMS,
            _D2F,
            [PanelSpec("nfe"), PanelSpec("tokens_per_second")],
            2,
            {
                "--student": _flag("model that D2F trained", required=True, metavar="DIR_OR_NAME"),
                "--ar": _flag("autoregressive model of the same tokens", metavar="DIR_OR_NAME"),
            },
        ),
        "ni": Figure(
            "NI-Sampling against confidence thresholds",
            _FREE_WORDS,
            _NI,
            [
                PanelSpec(cost, lines=[f"threshold, {name}", f"NI and threshold 0.9, {name}"])
                for _, name, _ in _NI_CACHES
                for cost in ("nfe", "tokens_per_second")
            ],
            2,
            {
                "--indicator": _flag(
                    "trained indicator; repeatable, for several seeds", action="append", required=True, metavar="DIR"
                ),
                "--block-length": _BLOCK_LENGTH,
            },
            [
                EqualAccuracy(name, f"threshold, {name}", f"NI and threshold 0.9, {name}", "NI")
                for _, name, _ in _NI_CACHES
            ],
        ),
        "compression": Figure(
            "a model before and after trajectory compression",
            _FREE_WORDS,
            _COMPRESSION,
            [PanelSpec("nfe"), PanelSpec("tokens_per_forward")],
            2,
            {
                "--compressed": _flag("model that it was trained to", required=True, metavar="DIR_OR_NAME"),
                "--control": _flag("model trained on the same texts by masked diffusion", metavar="DIR_OR_NAME"),
                "--block-length": _BLOCK_LENGTH,
            },
            [EqualAccuracy(label, _BEFORE, label, label) for label in (_AFTER, _CONTROL)],
        ),
    }
)
"""Name -> figure."""
