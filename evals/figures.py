"""Figures of papers, each one command: its task, its samplers, its panels and what it says in words.

Figures 6 and 7 of EB-Sampler (arXiv 2505.24857), Figures 3, 4 and 6 and Table 2 of APD (arXiv 2506.00413), the tables
of D2F (arXiv 2508.09192), of NI-Sampling (arXiv 2604.18471) and of dInfer's trajectory compression (arXiv 2510.08666)
as curves. A new figure is an entry in `FIGURES`.
"""

import argparse
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dllm_jax.errors import DllmError
from evals import plots, stderr
from evals.plots import Panel
from evals.runner import Report
from evals.sampler import SamplerSpec, parse_samplers, unique
from evals.sweeps import Sweep, title
from evals.tasks import TASKS, Task, TextTask


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve of a figure.

    Attributes:
        label: for the legend.
        specs: its samplers, in order; those that differ in their indicator only are one point.
        front: join the points of its Pareto front only, as they have no order.
    """

    label: str
    specs: Sequence[str]
    front: bool = False

    @property
    def samplers(self) -> list[SamplerSpec]:
        return [sampler for text in self.specs for sampler in parse_samplers(text)]


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


@dataclasses.dataclass(frozen=True)
class Figure:
    """What a figure is made of.

    Attributes:
        about: for the list of commands.
        task: as it is written on the command line; what `fits` may take its place.
        lines: what is run, from the command's options.
        panels: what is drawn, from the points of all lines.
        columns: panels side by side.
        options: flag -> how it is added to the command's parser.
        notes: sentences about the outcome.
        n: examples, by default.
    """

    about: str
    task: str
    lines: Callable[[argparse.Namespace], list[Line]]
    panels: Callable[[Points], list[Panel]]
    columns: int
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    notes: Callable[[Points], list[str]] = lambda points: []
    n: int = 512

    @property
    def task_name(self) -> str:
        return self.task.partition(":")[0]

    def fits(self, task: Task) -> bool:
        """Whether it can be made of a task: its own, or, where that has answers in words, any text."""
        return task.name == self.task_name or (TASKS[self.task_name].stops and isinstance(task, TextTask))


def samplers_of(lines: Sequence[Line]) -> list[SamplerSpec]:
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
    fronts = {line.label for line in lines if line.front}
    panels = [
        dataclasses.replace(
            panel, curves=[dataclasses.replace(curve, front=curve.label in fronts) for curve in panel.curves]
        )
        for panel in figure.panels(points_of(found, lines))
    ]
    return plots.draw(panels, title(found), figure.columns)


def summary(figure: Figure, found: Sweep, lines: Sequence[Line]) -> dict[str, Any]:
    """What results.json holds besides the reports: the samplers of every curve, and the notes."""
    curves = {line.label: [str(sampler) for sampler in line.samplers] for line in lines}
    return {"curves": curves, "notes": figure.notes(points_of(found, lines))}


def named(path: str) -> str:
    """A model's or an indicator's folder as it stands in a spec.

    Raises:
        DllmError: for a path that a spec cannot hold.
    """
    if not path or set(path) & set(",|@"):
        raise DllmError(f"{path!r} cannot be written in a sampler; give a path without comma, bar and @")
    return path


def _either(values: Sequence[Any]) -> str:
    return "|".join(map(str, values))


# Panels


def _curve(label: str, points: Sequence[Point], x: str | Sequence[float], y: str) -> plots.Curve:
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
    )


_COSTS = {  # field -> its name, and whether less of it is better
    "nfe": ("mean forwards (NFE)", True),
    "tokens_per_second": ("tokens per second", False),
    "tokens_per_forward": ("tokens per forward", False),
}


def _against(points: Points, x: str, front: bool = True) -> Panel:
    """Accuracy of all lines against a cost."""
    label, smaller = _COSTS[x]
    curves = [_curve(name, line, x, "accuracy") for name, line in points.items()]
    return Panel(label, curves, smaller_is_better=smaller if front else None)


# EB-Sampler

# The paper lists neither gammas nor ks for the puzzles; these cover its curves from one token per forward to all.
GAMMAS = (0, 0.00001, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 1, 2, 4, 8, float("inf"))
KS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
PROXIES = ("confidence", "entropy", "margin")


def _eb_lines(options: argparse.Namespace) -> list[Line]:
    """Both samplers with all three proxies: 75 points, six programs."""
    eb = [Line(f"eb:proxy={proxy}", [f"eb:proxy={proxy},gamma={_either(GAMMAS)}"]) for proxy in PROXIES]
    return eb + [Line(f"topk:proxy={proxy}", [f"topk:proxy={proxy},k={_either(KS)}"]) for proxy in PROXIES]


def _eb_panels(points: Points) -> list[Panel]:
    """Accuracy against mean forwards, linear, as in the paper."""
    return [_against(points, "nfe", front=False)]


# APD

WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FIXED = (1, 2, 3, 4, 5, 6, 7, 8)
LOOKAHEADS = (64, 32, 16, 8, 4)
WINDOWS = (64, 32, 16, 8, 4, 1)
GRID = {"weight": (0.5, 0.6, 0.7, 0.8), "window": (8, 16, 32), "lookahead": (8, 16, 32)}
_SWEPT = {  # label of the line -> what is swept
    "APD, R (no W, no M)": "R",
    "fixed k, left to right": "k",
    "lookahead M, k = 1": "M",
    "window W, k = 1": "W",
}
_PAIRS = "APD, R x W x M"
_ALONE = "verifier alone"


def _apd_lines(options: argparse.Namespace) -> list[Line]:
    """One program for all R, one for all k, and one for each other W and M; with --few-programs one per line."""
    apd, few = f"apd:verifier={named(options.verifier)}", options.few_programs
    room = lambda what, values: f",most_{what}={max(values)}" if few else ""
    step = "leftright:tokens_per_step=1"
    ahead = f"{step},lookahead={_either(LOOKAHEADS)}{room('lookahead', LOOKAHEADS)}"
    back = f"{step},window={_either(WINDOWS)}{room('window', WINDOWS)}"
    grid = ",".join(f"{name}={_either(values)}" for name, values in GRID.items())
    rooms = "".join(room(name, GRID[name]) for name in ("window", "lookahead"))
    specs = (
        [f"{apd},weight={_either(WEIGHTS)}"],
        [f"leftright:tokens_per_step={_either(FIXED)}"],
        [step, ahead],
        [step, back],
    )
    return [
        *(Line(label, one) for label, one in zip(_SWEPT, specs, strict=True)),
        Line(_PAIRS, [f"{apd},{grid}{rooms}"], front=True),
        Line(_ALONE, [f"leftright:window=1,lookahead=1@{named(options.verifier)}"]),
    ]


def _apd_panels(points: Points) -> list[Panel]:
    """Accuracy, speed and how much is written over R, k, M and W, then the trade-offs of everything."""
    rows = (("accuracy", plots.ACCURACY), ("tokens_per_second", "tokens per second"))
    panels = [_swept(points, *row, swept) for row in rows for swept in _SWEPT]
    written = ("committed_per_forward", "accepted per forward"), ("tokens", "tokens per answer")
    panels += [_swept(points, *written[what in ("M", "W")], swept) for swept, what in _SWEPT.items()]
    return [*panels, _against(points, "tokens_per_forward"), _against(points, "tokens_per_second")]


def _swept(points: Points, field: str, label: str, swept: str) -> Panel:
    """A field over what a line sweeps."""
    values = {"R": WEIGHTS, "k": FIXED, "M": ("none", *LOOKAHEADS), "W": ("none", *WINDOWS)}[_SWEPT[swept]]
    curve = _curve(swept, points[swept], range(len(values)), field)
    return Panel(_SWEPT[swept], [curve], y_label=label, ticks=list(map(str, values)))


# D2F

BLOCKS = (8, 16, 32)
TAU_CONF = (0.5, 0.7, 0.8, 0.9, 0.95)
FAST_DLLM = (0.5, 0.7, 0.8, 0.9, 0.95)
EB_GAMMAS = (0.01, 0.1, 0.25, 0.5, 1)


def _d2f_lines(options: argparse.Namespace) -> list[Line]:
    """Teacher, autoregressive model and student; thresholds and gammas share programs, blocks do not."""
    student, blocks = named(options.student), f"block_length={_either(BLOCKS)}"
    conf, act = f"threshold={_either(TAU_CONF)}", "tau_act=0.95"
    lines = [
        Line("teacher, one token per forward", ["topk:k=1"]),
        Line("teacher, Fast-dLLM", [f"threshold:threshold={_either(FAST_DLLM)},cache=dual,{blocks}"], front=True),
        Line("D2F", [f"d2f:{blocks},tau_add=0.1,{act},{conf}@{student}"], front=True),
        Line("D2F, single state", [f"d2f:{blocks},tau_add=0.95,{act},{conf}@{student}"], front=True),
        Line(
            "D2F, EB inside",
            [f"d2f:{blocks},tau_add=0.1,{act},rule=eb,gamma={_either(EB_GAMMAS)}@{student}"],
            front=True,
        ),
    ]
    if options.ar is not None:
        lines.append(Line("autoregressive, cached", [f"leftright:window=1,lookahead=1@{named(options.ar)}"]))
    return lines


def _d2f_panels(points: Points) -> list[Panel]:
    return [_against(points, "nfe"), _against(points, "tokens_per_second")]


# NI

THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
NI_BASES = (0.9,)
NI_SCORES = (0.5, 0.6, 0.7, 0.8, 0.9)
_CACHES = {  # policy -> its name, and where the indicator is asked: wherever a forward runs
    "none": ("no cache", "rest"),
    "prefix": ("prefix cache", "rest"),
    "dual": ("dual cache", "block"),
}


def _ni_lines(options: argparse.Namespace) -> list[Line]:
    """Thresholds, and the indicator on top of some, without a cache and with two: two programs each."""
    indicators = [named(path) for path in options.indicator]
    if len(set(indicators)) < len(indicators):
        raise DllmError("an indicator was given twice; an average over both would hide how much training varies")
    lines = []
    for cache, (told, scope) in _CACHES.items():
        where = f"cache={cache},block_length={options.block_length}"
        lines.append(Line(f"threshold, {told}", [f"threshold:threshold={_either(THRESHOLDS)},{where}"]))
        for base in NI_BASES:
            scores = f"indicator_threshold={_either(NI_SCORES)},scope={scope}"
            ni = f"indicator={_either(indicators)},threshold={base},{scores}"
            above = f"threshold {base}" if base <= 1 else "no threshold"
            lines.append(Line(f"NI and {above}, {told}", [f"ni:{ni},{where}"]))
    return lines


def _ni_panels(points: Points) -> list[Panel]:
    """One row per cache."""
    return [
        _against({label: line for label, line in points.items() if label.endswith(told)}, cost)
        for told, _ in _CACHES.values()
        for cost in ("nfe", "tokens_per_second")
    ]


def _ni_notes(points: Points) -> list[str]:
    """The fewest forwards of both at equal accuracy."""
    notes = []
    for told, _ in _CACHES.values():
        helped = [p for label, line in points.items() if label.startswith("NI") and label.endswith(told) for p in line]
        notes.append(_compared(told, points[f"threshold, {told}"], "NI", helped))
    return notes


def _compared(told: str, plain: Sequence[Point], name: str, helped: Sequence[Point]) -> str:
    """A sentence: the fewest forwards within one standard error of the best plain accuracy. Points are chosen on
    half of the problems and measured on the others: where it was chosen, the best of many looks too good."""
    rows = len(plain[0].reports[0].rows)
    if rows < 2:
        return f"{told}: no points are compared, as that takes one problem to choose them on and another to measure"
    chosen_on, measured_on = 0, 1
    best = max(plain, key=lambda point: (point.half("correct", chosen_on), -point.half("nfe", chosen_on)))
    accuracy = best.half("correct", chosen_on)
    floor = accuracy - stderr.of_share(accuracy, rows - rows // 2)
    at = f"{told}: at accuracy within one standard error of the best threshold's (at least {100 * floor:.1f} %)"
    ours, theirs = ([p for p in some if p.half("correct", chosen_on) >= floor] for some in (helped, plain))
    if not ours:
        return f"{at} no {name} point stands"
    mine, other = (min(some, key=lambda p: p.half("nfe", chosen_on)) for some in (ours, theirs))
    ratio = other.half("nfe", measured_on) / max(mine.half("nfe", measured_on), 1.0)
    which = f"chosen on {rows - rows // 2} problems, measured on {rows // 2} others"
    return f"{at}, {which}: NFE {_told(mine, measured_on)} against {_told(other, measured_on)}, ratio {ratio:.2f}"


def _told(point: Point, which: int) -> str:
    """A point with its forwards and accuracy on a half of the problems, and its numbers."""
    (sampler, *_) = parse_samplers(point.samplers[0])
    numbers = ", ".join(f"{name} {value:g}" for name, value in sampler.numbers.items())
    each = [Point(point.samplers, [report]).half("nfe", which) for report in point.reports]
    several = f" +- {np.std(each, ddof=1):.2f} over {len(each)} indicators" if len(each) > 1 else ""
    return f"{point.half('nfe', which):.2f}{several} ({numbers}; {100 * point.half('correct', which):.1f} %)"


# Trajectory compression

_BEFORE, _AFTER, _CONTROL = "before compression", "after compression", "control: same texts, random masks"


def _compression_lines(options: argparse.Namespace) -> list[Line]:
    """The same thresholds on all models, without a cache: one program."""
    spec = f"threshold:threshold={_either(THRESHOLDS)},block_length={options.block_length}"
    others = {_AFTER: options.compressed} | ({_CONTROL: options.control} if options.control else {})
    return [Line(_BEFORE, [spec]), *(Line(label, [f"{spec}@{named(path)}"]) for label, path in others.items())]


def _compression_panels(points: Points) -> list[Panel]:
    return [_against(points, "nfe"), _against(points, "tokens_per_forward")]


def _compression_notes(points: Points) -> list[str]:
    """The fewest forwards of each and of the first at equal accuracy."""
    first, *others = points.items()
    return [_compared(label, first[1], label, line) for label, line in others]


def _flag(about: str, **more: Any) -> Mapping[str, Any]:
    return {"help": about, **more}


_LONG_PROBLEMS = "word-problems:difficulty=long"
_FREE_WORDS = f"{_LONG_PROBLEMS},steps=4-6,wording=free"
_BLOCK_LENGTH = _flag("of all samplers (default: 16)", type=int, default=16, metavar="N")

FIGURES: Mapping[str, Figure] = types.MappingProxyType(
    {
        "eb-sudoku": Figure("EB-Sampler's Figure 7", "sudoku", _eb_lines, _eb_panels, 1, n=2000),
        "eb-maze": Figure("EB-Sampler's Figure 6", "maze", _eb_lines, _eb_panels, 1, n=2000),
        "apd": Figure(
            "APD's Figures 3, 4 and 6 and Table 2",
            _LONG_PROBLEMS,
            _apd_lines,
            _apd_panels,
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
            _d2f_lines,
            _d2f_panels,
            2,
            {
                "--student": _flag("model that D2F trained", required=True, metavar="DIR_OR_NAME"),
                "--ar": _flag("autoregressive model of the same tokens", metavar="DIR_OR_NAME"),
            },
        ),
        "ni": Figure(
            "NI-Sampling against confidence thresholds",
            _FREE_WORDS,
            _ni_lines,
            _ni_panels,
            2,
            {
                "--indicator": _flag(
                    "trained indicator; repeatable, for several seeds", action="append", required=True, metavar="DIR"
                ),
                "--block-length": _BLOCK_LENGTH,
            },
            _ni_notes,
        ),
        "compression": Figure(
            "a model before and after trajectory compression",
            _FREE_WORDS,
            _compression_lines,
            _compression_panels,
            2,
            {
                "--compressed": _flag("model that it was trained to", required=True, metavar="DIR_OR_NAME"),
                "--control": _flag("model trained on the same texts by masked diffusion", metavar="DIR_OR_NAME"),
                "--block-length": _BLOCK_LENGTH,
            },
            _compression_notes,
        ),
    }
)
"""Name -> figure."""
