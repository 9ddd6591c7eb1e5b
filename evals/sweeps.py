"""Many samplers on the same examples: a table, Pareto plots, and the area under each curve."""

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dllm_jax import Model
from dllm_jax.storage import write_file
from evals import files, plots
from evals.aup_metric import ALPHA, DROP, ONE, from_one
from evals.distributed import ALONE, Processes
from evals.models import Models
from evals.runner import Report, draw_examples, run
from evals.sampler import SamplerConfig
from evals.tasks import Example, Task
from samplers.checks import check_length
from samplers.engine.runner import Engines

COLUMNS = (
    "sampler model series accuracy accuracy_stderr strict_accuracy exact_match nfe nfe_stderr full_forwards "
    "verifier_forwards tokens tokens_per_forward committed_per_forward tokens_per_second seconds compile_seconds n "
    "batch_size"
).split()

AXES = {
    "accuracy": plots.ACCURACY,
    "nfe": "forwards per example (NFE)",
    "tokens_per_second": "tokens per second",
    "tokens_per_forward": "tokens per forward",
    "committed_per_forward": "accepted per forward",
    "tokens": "tokens per answer",
}
"""Field of a report -> its name on an axis."""


@dataclasses.dataclass
class Sweep:
    """The reports of a sweep so far.

    Attributes:
        samplers, reports: what was run, in order.
        programs: how many were compiled; samplers that differ in numbers only share one.
    """

    samplers: list[SamplerConfig] = dataclasses.field(default_factory=list)
    reports: list[Report] = dataclasses.field(default_factory=list)
    programs: int = 0

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per sampler, with its model as the sampler names it, and its series."""
        pairs = zip(self.samplers, self.reports, strict=True)
        rows = (
            {**report.summary(), "model": sampler.model or report.model, "series": sampler.series}
            for sampler, report in pairs
        )
        return [{name: row[name] for name in COLUMNS} for row in rows]

    def series(self) -> dict[str, list[Report]]:
        """Series -> its reports, most forwards first; a sampler that names its model is in a series of that."""
        found: dict[str, list[Report]] = {}
        for sampler, report in zip(self.samplers, self.reports, strict=True):
            found.setdefault(sampler.series, []).append(report)
        return {name: sorted(reports, key=lambda report: -report.nfe) for name, reports in found.items()}

    def areas(self) -> dict[str, float]:
        """Series -> AUP; the best accuracy is that of the whole sweep. All series of a model begin at its most accurate
        report of one token per forward; those of a model without such a report cannot be compared, and are left out."""
        best = 100 * max(report.accuracy for report in self.reports)
        point = lambda report: (report.tokens_per_forward, 100 * report.accuracy)
        starts = dict[str | None, tuple[float, float]]()
        for sampler, report in zip(self.samplers, self.reports, strict=True):
            if report.tokens_per_forward > 0 and report.committed_per_forward <= ONE:
                starts[sampler.model] = max(starts.get(sampler.model, (0.0, -1.0)), point(report), key=lambda p: p[1])
        models, found = {sampler.series: sampler.model for sampler in self.samplers}, {}
        for name, reports in self.series().items():
            points = [point(report) for report in reports if report.tokens_per_forward > 0]
            start = starts.get(models[name])
            area = None if start is None else from_one(points, best, start)
            if area is not None:
                found[name] = area
        return found

    def summary(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {
            "aup": self.areas(),
            "aup_definition": f"arXiv 2601.07568: tokens per forward from one, percent, alpha {ALPHA:g}, drop {DROP:g}",
            "programs_compiled": self.programs,
            "reports": [report.summary() for report in self.reports],
        }


def sweep(
    model: Model | Models,
    task: Task,
    samplers: Sequence[SamplerConfig],
    *,
    n: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    split: str = "test",
    counts: Sequence[str] = (),
    processes: Processes = ALONE,
    progress: bool | None = None,
) -> Iterator[Sweep]:
    """Runs the samplers on the same examples and yields the reports so far after each.

    Arguments and errors are those of `evals.run`; all models are loaded and all samplers built, and so checked, before
    the first one runs.
    """
    models = model if isinstance(model, Models) else Models(model)
    check_length("n", n, optional=True)
    check_length("batch_size", batch_size)
    built = [models.build(sampler, task) for sampler in samplers]
    drawn, engines, found = dict[Any, list[Example]](), Engines(), Sweep()
    for sampler, (chosen, bound, _) in zip(samplers, built, strict=True):
        tokens = None if bound is task else id(chosen)  # a task with tokens of its own gives every model the same
        if tokens not in drawn:
            drawn[tokens] = draw_examples(bound, split, n, progress)
        report = run(
            models,
            task,
            sampler,
            n=n,
            batch_size=batch_size,
            seed=seed,
            split=split,
            examples=drawn[tokens],
            counts=counts,
            engines=engines,
            processes=processes,
            progress=progress,
        )
        found.samplers.append(sampler)
        found.reports.append(report)
        found.programs = len(engines.programs)
        yield found


def write_tables(folder: Path, found: Sweep, more: Mapping[str, Any] = types.MappingProxyType({})) -> None:
    """Writes results.json, with more facts about the whole, and results.csv."""
    write_file(folder / "results.json", files.as_json({**found.summary(), **more}))
    write_file(folder / "results.csv", files.as_csv(found.rows()))


def pareto_plot(found: Sweep) -> bytes:
    """Accuracy against forwards and against tokens per second, with each series' AUP, as a PNG."""
    areas, panels = found.areas(), []
    for x, smaller_is_better in (("nfe", True), ("tokens_per_second", False)):
        curves = [
            curve_of(f"{name}  (AUP {areas[name]:.0f})" if name in areas else name, [[report] for report in reports], x)
            for name, reports in found.series().items()
        ]
        panels.append(plots.Panel(AXES[x], curves, smaller_is_better))
    return plots.draw(panels, title(found))


def curve_of(
    label: str,
    points: Sequence[Sequence[Report]],
    x: str | Sequence[float],
    y: str = "accuracy",
    *,
    front: bool = False,
) -> plots.Curve:
    """A curve whose points are means over reports, with their standard deviation where one has several.

    Args:
        x: a field of the reports, or the places on the axis.
        y: a field of the reports.
        front: join the points of the Pareto front only.
    """
    scale = 100.0 if y == "accuracy" else 1.0
    several = any(len(point) > 1 for point in points)
    return plots.Curve(
        label=label,
        x=[_mean(point, x) for point in points] if isinstance(x, str) else x,
        y=[scale * _mean(point, y) for point in points],
        y_error=[scale * _mean(point, "accuracy_stderr") for point in points] if y == "accuracy" else None,
        x_spread=[_spread(point, x) for point in points] if several and isinstance(x, str) else None,
        y_spread=[scale * _spread(point, y) for point in points] if several else None,
        front=front,
    )


def _mean(point: Sequence[Report], field: str) -> float:
    return float(np.mean([getattr(report, field) for report in point]))


def _spread(point: Sequence[Report], field: str) -> float:
    """Standard deviation over the reports; 0 for one."""
    return float(np.std([getattr(report, field) for report in point], ddof=1)) if len(point) > 1 else 0.0


def title(found: Sweep) -> str:
    """Models, task, examples, dtype and devices in one line."""
    first = found.reports[0]
    models = ", ".join(dict.fromkeys(row["model"] for row in found.rows()))
    kinds = ", ".join(dict.fromkeys(report.dtype for report in found.reports))
    where = f"{first.hardware['devices']} x {first.hardware['device']}"
    return f"{models} on {first.task}: {first.n} {first.split} examples, {kinds}, {where}"
