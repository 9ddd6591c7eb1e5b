"""Our scores next to the published ones."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from dllm_jax import Model, ModelConfig
from dllm_jax.errors import DllmError
from evals import stderr
from evals.presets.checks import config_of
from evals.presets.preset import Preset, PublishedScore

ERRORS, POINTS = 2.0, 1.0
"""A score within these standard errors and points of a published one counts as the same: platforms differ as much."""


@dataclasses.dataclass(frozen=True)
class ScoreRow:
    """One of our scores and one published number.

    Attributes:
        metric: as lm-eval names it.
        ours: the score in percent; None where the results have none.
        stderr: its standard error in points: lm-eval's, and by Wilson's interval where it gives none, or 0; None where
            the number of problems is not known either, which then counts as 0.
        published: what it is compared with; None for a metric of which nothing is published.
        told: "within", "below by 3.2", "above by 3.2" (points); "modified" or "limited to 20" if the run is not the
            preset's, which is then not judged; "" where there is nothing to compare.
    """

    metric: str
    ours: float | None
    stderr: float | None
    published: PublishedScore | None
    told: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Our scores and the published ones.

    Attributes:
        preset: what was run, changes and all.
        changes: what of it is not as published, see `modify`.
        model: what was run, where that is known.
        rows: for each metric one per published number.
        warnings: the preset's, and one where another model than the published was run.
    """

    preset: Preset
    changes: tuple[str, ...]
    model: str
    rows: tuple[ScoreRow, ...]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        about = {"preset": self.preset.name, "hash": self.preset.hash, "status": self.preset.status}
        about |= {"published_model": self.preset.model, "model": self.model, "source": self.preset.source}
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {**about, "changes": list(self.changes), "rows": rows, "warnings": list(self.warnings)}

    def table(self) -> Table:
        """The rows as a table of rich; changes and warnings stand below it."""
        columns = ("metric", Column("ours", justify="right"), Column("published", justify="right"), "", "of", "source")
        below = [f"modified: {change}" for change in self.changes] + [f"warning: {text}" for text in self.warnings]
        title = f"{self.preset.name}, status {self.preset.status}"
        table = Table(*columns, box=box.SIMPLE, title=title, caption=Text("\n".join(below), justify="left"))
        for row in self.rows:
            ours = "-" if row.ours is None else f"{row.ours:.1f}"
            if row.ours is not None and row.stderr is not None:
                ours += f" ± {row.stderr:.1f}"
            number = row.published
            theirs = ("-", "", "") if number is None else (f"{number.value:g}", number.what, number.source)
            table.add_row(*(Text(cell) for cell in (row.metric, ours, theirs[0], row.told, *theirs[1:])))
        return table


def comparison(
    preset: Preset, results: Mapping[str, Any], changes: Sequence[str] = (), model: Model | None = None
) -> Comparison:
    """Compares what lm-eval found with what was published.

    A score is "within" when it lies at most 2 standard errors and 1 point from the published one. The error is that of
    the difference: the published score is of as many problems, and so has an error too.

    Args:
        preset: what was run.
        results: what `lm_eval.simple_evaluate` returns, with `results["results"][task]["exact_match,none"]` and
            `"exact_match_stderr,none"` as shares of 1; without its "n-samples" the published error counts as ours.
        changes: what `modify` said was changed.
        model: what was run; None leaves that out.

    Raises:
        DllmError: for results without the preset's task.
    """
    tasks = {**results.get("groups", {}), **results["results"]}
    if preset.task not in tasks:
        raise DllmError(f"the results have no task {preset.task!r} of preset {preset.name}; they have {list(tasks)}")
    numbers, unjudged, n = tasks[preset.task], _unjudged(preset, changes), problems_of(results, preset.task)
    rows = []
    for metric in preset.metrics:
        metric_name, _, which = metric.partition(",")
        ours, error = _percent(numbers.get(metric)), _percent(numbers.get(f"{metric_name}_stderr,{which}"))
        error = error or (error if ours is None else _error_of(ours, n, error))
        found = [number for number in preset.published if number.metric in ("", metric)]
        for number in found:
            apart = math.hypot(error or 0.0, _error_of(number.value, n, error) or 0.0)
            rows.append(ScoreRow(metric, ours, error, number, unjudged or _judge(ours, apart, number.value)))
        rows += [] if found else [ScoreRow(metric, ours, error, None, unjudged)]
    other = [] if model is None else other_model(preset, model)
    name = "" if model is None else model.name
    return Comparison(preset, tuple(changes), name, tuple(rows), (*other, *preset.warnings))


def other_model(preset: Preset, model: Model) -> list[str]:
    """A sentence where a model plainly is not the one that a preset's numbers are of; base and instruct models differ
    in their names alone."""
    wanted, found = config_of(preset), model.config
    of = f"the published numbers are of {preset.model}"
    if wanted is not None and _size(wanted) != _size(found):
        return [f"{of} ({_describe_model(wanted)}), and {model.name} is {_describe_model(found)}"]
    kinds = [kind for kind in ("base", "instruct") if kind in preset.model.lower() and kind not in model.name.lower()]
    others = [kind for kind in ("base", "instruct") if kind in model.name.lower() and kind not in preset.model.lower()]
    return [f"{of}, and {model.name} calls itself {others[0]}"] if kinds and others else []


def _size(config: ModelConfig) -> tuple[str | int, ...]:
    return config.family, config.num_layers, config.embed_dim, config.vocab_size


def _describe_model(config: ModelConfig) -> str:
    return f"{config.family}, {config.num_layers} layers of {config.embed_dim}, {config.vocab_size} tokens"


def _unjudged(preset: Preset, changes: Sequence[str]) -> str:
    """Why a run is not the preset's; empty where it is."""
    if not changes:
        return ""
    only_limited = preset.limit is not None and all(change.startswith("limit: ") for change in changes)
    return f"limited to {preset.limit}" if only_limited else "modified"


def _percent(value: Any) -> float | None:
    return 100 * value if isinstance(value, int | float) and math.isfinite(value) else None


def problems_of(results: Mapping[str, Any], task: str) -> int:
    """How many problems of a task, or of all tasks of a group, were asked; 0 where the results do not say."""
    parts = results.get("group_subtasks", {}).get(task)
    if parts:
        return sum(problems_of(results, part) for part in parts)
    return int(results.get("n-samples", {}).get(task, {}).get("effective", 0))


def _error_of(score: float, n: int, otherwise: float | None) -> float | None:
    """The standard error in points of a score in percent on n problems; where n is 0, or it is no share, the other."""
    return 100 * stderr.of_share(score / 100, n) if n and 0 <= score <= 100 else otherwise


def _judge(ours: float | None, error: float, published: float) -> str:
    if ours is None:
        return "not measured"
    apart = ours - published
    if abs(apart) <= ERRORS * error + POINTS:
        return "within"
    return f"{'above' if apart > 0 else 'below'} by {abs(apart):.1f}"
