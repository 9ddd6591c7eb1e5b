"""Typed decisions on a task of fields: how many are right, in how many forwards, and how far probabilities can be
trusted; beside generating an answer and parsing it.

An answer is right when all its fields are. Calibration is of single fields, each with the probability of the value that
was decided: the expected calibration error is the mean distance between confidence and accuracy in ten bins of equal
width (arXiv 1706.04599), its standard error by resampling problems. A temperature is chosen on validation problems, by
the nats of the right values.
"""

import argparse
import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dllm_jax import DllmError
from dllm_jax.storage import write_file
from evals import files, plots, stderr
from evals.flags import add_batch, add_model, add_task, command, models_of
from evals.models import Models
from evals.runner import USUAL, environment_of, run
from evals.sampler import parse_sampler
from evals.tasks import Task, make_task
from samplers import Decision, decide

BINS = 10
RESAMPLED = 500  # times, for the standard error of a calibration error
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)


@dataclasses.dataclass(frozen=True)
class Scored:
    """One way to fill the fields of n examples.

    Attributes:
        way: "decide" with its options, or a sampler whose answers are parsed.
        accuracy: share of examples with all fields right, with its error by Wilson's interval.
        forwards: mean, one after the other; `rows` the mean number of sequences that they ran for an example.
        calibration: expected calibration error of single fields, with its standard error; None for parsed answers.
        nats: mean -log p of a field's right value, with its standard error over examples; None for parsed answers.
        by_field: share of right values of each field; empty for parsed answers.
        pairs: [n, F, 2] confidences, and 1 where the value is right; for the plot.
    """

    way: str
    n: int
    accuracy: float
    accuracy_stderr: float
    forwards: float
    rows: float
    calibration: float | None = None
    calibration_stderr: float | None = None
    nats: float | None = None
    nats_stderr: float | None = None
    by_field: Mapping[str, float] = dataclasses.field(default_factory=dict)
    pairs: np.ndarray | None = dataclasses.field(default=None, repr=False)

    def summary(self) -> dict[str, Any]:
        """As a row of CSV."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("by_field", "pairs")]
        return {name: getattr(self, name) for name in names} | dict(self.by_field)


def score_decisions(
    models: Models, task: Task, options: Mapping[str, Any], *, n: int, split: str, seed: int, batch_size: int
) -> Scored:
    """Decides the fields of the first n examples of a split.

    Args:
        options: of `samplers.decide`.

    Raises:
        DllmError: for a task without fields, and as `decide`.
    """
    model = models.of(parse_sampler("topk"))
    bound = task.bind(model)
    if bound.fields is None:
        raise DllmError(f"{task} has no fields to decide; give one such as word-problems:wording=fields")
    examples = [bound.example(split, index) for index in range(n)]
    prompts = [example.prompt_ids.tolist() for example in examples]
    found = decide(model, prompts, bound.fields, seed=seed, batch_size=batch_size, **options)
    wanted = [bound.decided(example) for example in examples]
    return _scored(", ".join(["decide", *(f"{name}={value}" for name, value in options.items())]), found, wanted)


def _scored(way: str, found: Sequence[Decision], wanted: Sequence[Mapping[str, Any]]) -> Scored:
    names, both = list(wanted[0]), list(zip(found, wanted, strict=True))
    right = np.asarray([[one.values[name] == own[name] for name in names] for one, own in both])
    sure = np.asarray([[one.probabilities[name][one.values[name]] for name in names] for one in found])
    true = np.asarray([[one.probabilities[name][own[name]] for name in names] for one, own in both])
    pairs, nats = np.stack([sure, right], axis=2), -np.log(np.maximum(true, np.finfo(float).tiny)).mean(axis=1)
    accuracy, draws = float(right.all(axis=1).mean()), np.random.default_rng(0)
    again = [calibration_error(pairs[draws.integers(0, len(pairs), len(pairs))]) for _ in range(RESAMPLED)]
    return Scored(
        way=way,
        n=len(found),
        accuracy=accuracy,
        accuracy_stderr=stderr.of_share(accuracy, len(found)),
        forwards=float(np.mean([one.nfe for one in found])),
        rows=float(np.mean([one.rows for one in found])),
        calibration=calibration_error(pairs),
        calibration_stderr=float(np.std(again, ddof=1)),
        nats=float(nats.mean()),
        nats_stderr=stderr.of_mean(nats.tolist()),
        by_field=dict(zip(names, right.mean(axis=0).tolist(), strict=True)),
        pairs=pairs,
    )


def calibration_error(pairs: np.ndarray) -> float:
    """The expected calibration error of confidences and outcomes [..., 2]."""
    return float(sum(share * abs(confidence - right) for confidence, right, share in bins_of(pairs)))


def bins_of(pairs: np.ndarray) -> list[tuple[float, float, float]]:
    """Of each bin that has any: mean confidence, share that is right, and the bin's share of all."""
    confidence, right = pairs.reshape(-1, 2).T
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    filled = [place == at for at in np.unique(place)]
    return [(float(confidence[own].mean()), float(right[own].mean()), float(own.mean())) for own in filled]


def add(commands: Any) -> None:
    """Declares `python -m evals decide`."""
    flag = command(commands, "decide", _run, "typed decisions: right in how many forwards, and how well calibrated")
    add_model(flag)
    add_task(flag)
    flag("--n", type=int, default=USUAL, metavar="N", help=f"examples of the test split (default: {USUAL})")
    add_batch(flag)
    flag("--gamma", type=float, action="append", default=[], metavar="NATS", help="as of decide; repeatable")
    flag("--joint", action="store_true", help="also score every combination of values")
    flag("--sampler", action="append", default=[], metavar="SPEC", help="parse its answers; repeatable")
    flag("--out", required=True, metavar="DIR", help="folder of results.json, results.csv, calibration.png")


def _run(options: argparse.Namespace) -> None:
    models, task = models_of(options), make_task(options.task)
    specs = [parse_sampler(text) for text in options.sampler]
    plots.require_matplotlib()
    how: dict[str, Any] = {"n": options.n, "seed": options.seed, "batch_size": options.batch_size}
    folder, found = files.make_folder(options.out), list[Scored]()

    def keep(scored: Scored) -> None:
        found.append(scored)
        error = "" if scored.calibration is None else f"  calibration {scored.calibration:.3f}, {scored.nats:.3f} nats"
        share = stderr.as_percent(scored.accuracy, scored.accuracy_stderr)
        print(f"{share:>14} %  {scored.forwards:6.2f} forwards  {scored.way}{error}", flush=True)
        model = models.of(parse_sampler("topk"))
        about = {"model": model.name, "task": str(task), **how, **environment_of(model)}
        rows = [one.summary() for one in found]
        write_file(folder / "results.json", files.as_json({**about, "rows": rows}))
        names = list(dict.fromkeys(name for row in rows for name in row))
        write_file(folder / "results.csv", files.as_csv([{name: row.get(name) for name in names} for row in rows]))

    def validation(temperature: float) -> float:
        return score_decisions(models, task, {"temperature": temperature}, split="validation", **how).nats or 0.0

    best = min(TEMPERATURES, key=validation)
    gammas = [{"gamma": gamma} for gamma in options.gamma]
    ways: list[dict[str, Any]] = [{}, {"temperature": best}, *gammas, *([{"joint": True}] * options.joint)]
    for way in ways:
        keep(score_decisions(models, task, way, split="test", **how))
    for spec in specs:
        report = run(models, task, spec, **how)
        keep(Scored(str(spec), report.n, report.accuracy, report.accuracy_stderr, report.nfe, report.nfe))
    write_file(folder / "calibration.png", draw(found))
    print(f"{len(found)} ways; results.json, results.csv, calibration.png in {folder}")


def draw(found: Sequence[Scored]) -> bytes:
    """Accuracy of single fields against the probability of what was decided, as a PNG."""
    figure = plots.require_matplotlib()(figsize=(5.2, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
    for one, colour in zip((one for one in found if one.pairs is not None), plots.COLOURS * 2, strict=False):
        assert one.pairs is not None
        bins = bins_of(one.pairs)
        errors = [stderr.of_share(right, max(round(share * one.pairs.size / 2), 1)) for _, right, share in bins]
        axes.errorbar(
            *zip(*[bar[:2] for bar in bins], strict=True), yerr=errors, color=colour, marker="o", markersize=4,
            linewidth=1.2, capsize=2, label=f"{one.way} ({one.calibration:.3f})",
        )  # fmt: skip
    axes.set_xlabel("probability of the value that was decided")
    axes.set_ylabel("share that is right")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(fontsize=8, frameon=False, title="calibration error", title_fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()
