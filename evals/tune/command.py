"""The search for the fastest sampler: from Python, and as `python -m evals tune`."""

import argparse
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax import Model
from dllm_jax.errors import DllmError
from dllm_jax.json_lines import JsonLines
from dllm_jax.storage import write_file
from evals import files, flags, plots, stderr
from evals.models import Models
from evals.runner import environment_of
from evals.sampler import SamplerConfig, all_samplers, parse_sampler, parse_samplers, read_grid
from evals.tasks import Task, make_task
from evals.tune.scorer import TuneScorer, digest_of
from evals.tune.trials import (
    BEATEN,
    BELOW,
    GOES_ON,
    PROVEN,
    REFERENCE,
    SURELY_BELOW,
    UNPROVEN,
    Goal,
    Objective,
    Trial,
    Tuning,
    percent_down,
    search,
)

GRID = Path(__file__).parents[1] / "grids" / "tune.toml"


def fastest(
    model: Model | Models,
    task: str | Task,
    samplers: str | SamplerConfig | Sequence[str | SamplerConfig] = (),
    *,
    floor: float,
    reference: str | SamplerConfig = "topk",
    objective: Objective = "nfe",
    confidence: float = 0.95,
    n: int = 2000,
    validation: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool | None = None,
) -> Tuning:
    """The whole search without a folder: a `Tuning` whose `chosen` is the fastest sampler that was proven, if any, and
    whose `promise()` says what was proven.

    Args:
        model, task, batch_size, seed, progress: as in `evals.run`.
        samplers: the candidates; specs may have lists of values; by default `grids/tune.toml`.
        floor, objective, confidence, n, validation: see `Goal`; as many validation problems as n by default. Of fewer
            problems all are taken.
        reference: what accuracy is compared with.

    Raises:
        DllmError: as `evals.run`, for a goal that makes no sense or that so many problems cannot prove, when another
            run used some of the held-out problems, and when the reference solves no problem.

    Warns:
        RuntimeWarning: when problems were left out because they repeat others.
    """
    goal = Goal(floor, objective, confidence, n, n if validation is None else validation)
    listed = [samplers] if isinstance(samplers, str | SamplerConfig) else samplers
    tried = [x for text in listed for x in (parse_samplers(text) if isinstance(text, str) else [text])]
    against = parse_sampler(reference) if isinstance(reference, str) else reference
    models = model if isinstance(model, Models) else Models(model)
    problems = make_task(task) if isinstance(task, str) else task
    how: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "progress": progress}
    scorer = TuneScorer(models, problems, against, tried or read_grid(GRID), goal, **how)
    (found,) = collections.deque(search(scorer, against, scorer.samplers, scorer.goal), maxlen=1)
    return found


def add(commands: Any) -> None:
    """The command `python -m evals tune`."""
    about = "find the fastest sampler that keeps a share of a reference's accuracy: tuning.json, .csv and .png"
    add = flags.command(commands, "tune", _tune, about)
    flags.add_model(add)
    flags.add_task(add)
    add("--floor", type=float, required=True, metavar="SHARE", help="of the reference's accuracy, such as 0.99")
    add("--reference", default="topk", metavar="SPEC", help="whose accuracy counts (default: topk, one at a time)")
    add("--sampler", action="append", default=[], metavar="SPEC", help="candidates, with lists: eb:gamma=0.1|1")
    add("--grid", metavar="FILE", help="TOML with [[sampler]] tables; by default, with no --sampler, grids/tune.toml")
    add("--objective", default="nfe", metavar="WHAT", help="the cost to minimise: nfe or seconds (default: nfe)")
    add("--confidence", type=float, default=0.95, metavar="P", help="that the floor is kept (default: 0.95)")
    add("--n", type=int, default=2000, metavar="N", help="held-out problems of the test split, at most (default: 2000)")
    add("--validation", type=int, metavar="N", help="problems of the search, at most (default: as --n)")
    flags.add_batch(add)
    add("--out", default="tuning", metavar="DIR", help="folder of the results; the same command resumes")


def _tune(options: argparse.Namespace) -> None:
    validation = options.n if options.validation is None else options.validation
    goal = Goal(options.floor, options.objective, options.confidence, options.n, validation)
    task, reference = make_task(options.task), parse_sampler(options.reference)
    chosen = options.sampler or options.grid
    samplers = all_samplers(options.sampler, options.grid) if chosen else read_grid(GRID)
    models = flags.models_of(options)
    plots.require_matplotlib()
    folder = files.make_folder(options.out)
    scorer = TuneScorer(models, task, reference, samplers, goal, batch_size=options.batch_size, seed=options.seed)
    names = ("model", "dtype", "quantize", "task", "reference", "seed")
    settings = {name: getattr(options, name) for name in names} | dataclasses.asdict(scorer.goal)
    settings |= {"samplers": digest_of(scorer.samplers), "problems": scorer.problems}
    with JsonLines(folder / "outcomes.jsonl") as output:
        scorer.attach_file(output, settings)
        about, printed = {**settings, **environment_of(models.of(reference))}, 0
        for found in search(scorer, reference, scorer.samplers, scorer.goal):
            _write(folder, found, about)
            print(_summary(found.trials[printed:]), flush=True)
            printed = len(found.trials)
        _write(folder, found, {"told": found.promise(), **about})
        write_file(folder / "tuning.png", plot(found))
    where = f"tuning.json, tuning.csv, tuning.png in {folder}"
    if found.chosen is None:
        raise DllmError(f"{found.promise()} ({where})")
    print(f"--sampler '{found.chosen.sampler}'\n{found.promise()}\n{where}")


def _write(folder: Path, found: Tuning, about: Mapping[str, Any]) -> None:
    rows = [trial.row() for trial in found.trials]
    chosen = None if found.chosen is None else str(found.chosen.sampler)
    write_file(folder / "tuning.json", files.as_json({"chosen": chosen, **about, "trials": rows}))
    write_file(folder / "tuning.csv", files.as_csv(rows))


def _summary(trials: Sequence[Trial]) -> str:
    """A round, or a candidate, in one line."""
    first, last = trials[0], trials[-1]
    where = f"{first.stage}: {first.pairs.n} {first.split} problems"
    if last.fate in (PROVEN, UNPROVEN):
        kept = f"{100 * last.pairs.kept:.1f} % kept, at least {percent_down(last.at_least)} %"
        return f"{where} | {last.sampler} | {kept} | NFE {last.nfe:.2f} | {last.fate}"
    fates = [trial.fate for trial in trials[1:]]
    dropped = [f"{fates.count(fate)} {why}" for fate, why in _DROPPED.items() if fate in fates]
    others = "; dropped: " + ", ".join(dropped) if dropped else ""
    return f"{where} | kept {fates.count(GOES_ON)} of {len(fates)} samplers{others}"


_DROPPED = {BEATEN: "slower or less accurate", BELOW: "below the floor here", SURELY_BELOW: "surely below the floor"}


def plot(found: Tuning) -> bytes:
    """Accuracy over cost, each sampler at its last trial with the standard error, the floor of the promise, and the
    chosen sampler's lower bound, as a PNG. The floor and the bound are shares of what the reference solves of the
    chosen sampler's problems, or of those of the last trial where none was proven."""
    latest = {str(trial.sampler): trial for trial in found.trials}
    dropped = [SURELY_BELOW, BELOW, BEATEN]
    groups = {"reference": [REFERENCE], "dropped": dropped, "not proven": [GOES_ON, UNPROVEN], "proven": [PROVEN]}
    best = found.chosen
    solved = (best or found.trials[-1]).pairs.reference_accuracy
    floor = 100 * found.goal.floor * solved
    low = max(floor - 15, 0)
    curves = []
    for label, fates in groups.items():
        points = [t for t in latest.values() if t.fate in fates and t is not best]
        shown = sorted((t for t in points if 100 * t.pairs.accuracy >= low), key=found.cost)
        below = f" ({len(points) - len(shown)} below the plot)" if len(shown) < len(points) else ""
        if shown:
            curves.append(_curve(label + below, found, shown))
    if best is not None:
        curves.append(_curve(f"chosen: {best.sampler}", found, [best]))
        bound, name = 100 * best.at_least * solved, f"its lower bound, {100 * found.goal.confidence:g} % confidence"
        curves.append(plots.Curve(name, [found.cost(best)], [bound]))
    label = "forwards per problem (NFE)" if found.goal.objective == "nfe" else "seconds per problem"
    panel = plots.Panel(label, curves, level=(floor, "floor"), y_range=(low, 101))
    return plots.draw([panel], f"{len(latest) - 1} samplers next to {found.reference}")


def _curve(label: str, found: Tuning, trials: Sequence[Trial]) -> plots.Curve:
    accuracies = [100 * trial.pairs.accuracy for trial in trials]
    errors = [100 * stderr.of_share(trial.pairs.accuracy, trial.pairs.n) for trial in trials]
    return plots.Curve(label, list(map(found.cost, trials)), accuracies, errors, faint=label.startswith("dropped"))
