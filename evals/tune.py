"""The sampler with the fewest forwards, or least time, that keeps a share of a reference's accuracy (docs/tune.md).

The search looks at problems of the validation split, the same for all, by successive halving: rounds on more and more
problems, each of which drops what is surely below the floor, and of the rest all but the best few by fronts of accuracy
and cost (Schmucker et al., arXiv 2106.12639). Then problems of the test split, which took no part in that, prove the
floor: candidates are ordered from the safest to the fastest, and each is tested at full confidence
(`evals.paired_test`) as long as all before it have passed. Such a fixed sequence announces a candidate that breaks the
promise no more often than a single test would, however many are tried (Maurer et al. 1995; Angelopoulos et al., arXiv
2110.01052), because the first of those that break it would have to pass. Order and bets come from the validation
problems alone.

Questions that repeat are left out, and held-out problems serve one run alone (`evals.held_out`).

Outcomes are on the disk as soon as they are there, and everything else is computed from them: a run that was cut off
goes on.
"""

import argparse
import collections
import dataclasses
import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dllm_jax import Model
from dllm_jax.errors import DllmError
from dllm_jax.json_lines import JsonLines
from dllm_jax.params.quantized import dtype_label
from dllm_jax.storage import write_file
from evals import files, flags, plots
from evals.aup_metric import front
from evals.held_out import Record, draw_different, hashes_of
from evals.models import Models
from evals.paired_test import Pairs, at_least, at_most, best_bet, log_wealth, needed
from evals.runner import check_count, prepare, run, surroundings
from evals.sampler import SamplerSpec, all_samplers, parse_sampler, parse_samplers, read_grid
from evals.tasks import Example, Task, make_task
from samplers.engine.program import numbers_of, program_of
from samplers.engine.runner import Engines

GRID = Path(__file__).parent / "grids" / "tune.toml"
FEWEST = 8  # samplers that go on after a round, if there are as many
TELLING = 32  # problems of which a reference that is any good solves one
REPORT = 512  # problems, at most, that are lost when a run is cut off

Objective = Literal["nfe", "seconds"]

REFERENCE, GOES_ON, PROVEN, UNPROVEN = "reference", "goes on", "proven", "not proven"
SURELY_BELOW, BELOW, BEATEN = "surely below the floor", "below the floor here", "others were better"


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is looked for.

    Attributes:
        floor: share of the reference's accuracy that is to be kept, in (0, 1).
        objective: what is to be least, forwards ("nfe") or seconds per problem.
        confidence: that the floor is kept, in [0.5, 1).
        n: held-out problems, of the test split, at most.
        validation: problems that the search looks at, at most.
    """

    floor: float
    objective: Objective = "nfe"
    confidence: float = 0.95
    n: int = 2000
    validation: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.floor < 1:
            raise DllmError(f"floor is {self.floor:g}; it is a share of the reference's accuracy between 0 and 1")
        if not 0.5 <= self.confidence < 1:
            raise DllmError(f"confidence is {self.confidence:g}; it must be at least 0.5 and below 1")
        if self.objective not in ("nfe", "seconds"):
            raise DllmError(f"objective is {self.objective!r}; choose nfe or seconds")
        check_count("n", self.n)
        check_count("validation", self.validation)

    def check_provable(self) -> None:
        """Raises DllmError when there are too few held-out problems for the floor even if no problem is lost."""
        evidence, most = needed(self.confidence), 0.99  # the largest of `paired`'s bets
        least = math.ceil(evidence / log_wealth(Pairs(1, 0, 0, 0), self.floor, [most]))
        if self.n < least:
            lower = math.floor(1000 * (1 - math.expm1(evidence / self.n) / most)) / 1000
            instead = f"--floor {lower:g} at most, or " if lower > 0 else ""
            raise DllmError(
                f"a floor of {self.floor:g} takes {least} held-out problems without a miss at {100 * self.confidence:g}"
                f" % confidence, and there are {self.n}; pass {instead}more problems (--n)"
            )

    @property
    def rounds(self) -> list[int]:
        """Problems of each round of the search."""
        return sorted({max(self.validation // parts, 1) for parts in (16, 4, 1)})

    @property
    def looks(self) -> list[int]:
        """Held-out problems after which a candidate may be proven."""
        return sorted({-(-self.n * quarters // 4) for quarters in (1, 2, 3, 4)})


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """What a sampler did on the first problems of a split.

    Attributes:
        correct: of each problem.
        nfe, seconds: mean forwards and time per problem.
    """

    correct: Sequence[bool]
    nfe: float
    seconds: float


Score = Callable[[SamplerSpec, str, int], Outcomes]  # sampler, split, how many of its problems


@dataclasses.dataclass(frozen=True)
class Trial:
    """A sampler beside the reference on the same problems.

    Attributes:
        stage: "round 1" and so on, or "held out".
        pairs: who solved how many.
        at_least, at_most: one-sided bounds of the share of the reference's accuracy that is kept.
        nfe, seconds: per problem.
        fate: what was decided.
    """

    stage: str
    split: str
    sampler: SamplerSpec
    pairs: Pairs
    at_least: float
    at_most: float
    nfe: float
    seconds: float
    fate: str

    def row(self) -> dict[str, Any]:
        """A flat row of the table."""
        pairs = self.pairs
        return {
            "stage": self.stage,
            "split": self.split,
            "n": pairs.n,
            "sampler": str(self.sampler),
            "accuracy": pairs.accuracy,
            "reference_accuracy": pairs.reference_accuracy,
            "difference": pairs.accuracy - pairs.reference_accuracy,
            "kept": pairs.kept,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "lost": pairs.lost,
            "gained": pairs.gained,
            "nfe": self.nfe,
            "seconds": self.seconds,
            "fate": self.fate,
        }


@dataclasses.dataclass
class Tuning:
    """What is known so far: all trials, in order."""

    goal: Goal
    reference: SamplerSpec
    trials: list[Trial] = dataclasses.field(default_factory=list)

    @property
    def chosen(self) -> Trial | None:
        """The fastest that was proven."""
        return next((trial for trial in reversed(self.trials) if trial.fate == PROVEN), None)

    def cost(self, trial: Trial) -> float:
        """What is to be least."""
        return trial.nfe if self.goal.objective == "nfe" else trial.seconds

    def told(self) -> str:
        """The promise, or what is missing."""
        trial, sure = self.chosen, f"{100 * self.goal.confidence:g} %"
        if trial is None:
            return self._missed(sure)
        reference = self.trials[self.trials.index(trial) - 1]
        right, theirs = trial.pairs.accuracy, trial.pairs.reference_accuracy
        costs = f"{trial.nfe:.1f} forwards instead of {reference.nfe:.1f}"
        if self.goal.objective == "seconds":
            costs = f"{1000 * trial.seconds:.3g} ms a problem instead of {1000 * reference.seconds:.3g}; {costs}"
        return (
            f"at least {_down(trial.at_least)} % of the reference's accuracy at {sure} confidence, on "
            f"{trial.pairs.n} held-out problems ({100 * right:.1f} against {100 * theirs:.1f} % solved); {costs}"
        )

    def _missed(self, sure: str) -> str:
        asked = f"{100 * self.goal.floor:g} % of the reference's accuracy"
        last = self.trials[-1].stage
        tried = [trial for trial in self.trials if trial.stage == last and trial.fate != REFERENCE]
        best = max(tried, key=lambda trial: trial.at_least if trial.fate == UNPROVEN else trial.pairs.kept)
        problems = f"{best.pairs.n} {'held-out' if best.fate == UNPROVEN else 'validation'} problems"
        miss = 100 * (self.goal.floor - best.at_least)
        told = f"{best.sampler} keeps {100 * best.pairs.kept:.1f} % on {problems}, at least {_down(best.at_least)} %"
        advice = "pass a lower --floor, more problems by --n, or other samplers"
        return (
            f"no sampler was proven to keep {asked}: the best, {told} at {sure} confidence, "
            f"{miss:.1f} points short; {advice}"
        )


def _down(share: float) -> str:
    """In percent, never more than it is."""
    return f"{math.floor(1000 * share + 1e-6) / 10:.1f}"


def tune(score: Score, reference: SamplerSpec, samplers: Sequence[SamplerSpec], goal: Goal) -> Iterator[Tuning]:
    """Searches, then proves; yields what is known after each round and each candidate that was to be proven.

    Raises:
        DllmError: when the reference solves no problem.
    """
    found, alive = Tuning(goal, reference), list(samplers)
    for number, n in enumerate(goal.rounds, start=1):
        stage = (f"round {number}", "validation", reference)
        first, *others = (_trial(score, goal, *stage, sampler, n) for sampler in (reference, *alive))
        if not first.pairs.kept > 0:
            if n < min(goal.validation, TELLING):
                continue  # chance may do that to so few problems, which then tell nothing of others either
            raise DllmError(f"the reference {reference} solves none of {n} problems; name another by --reference")
        left = _ladder(others, found) if n == goal.validation else _best(others, found)
        found.trials += [first, *(dataclasses.replace(trial, fate=_fate(trial, left, goal)) for trial in others)]
        alive = [trial.sampler for trial in left]
        yield found
        if not alive:
            return
    for candidate in left:
        found.trials += _proved(score, found, candidate)
        yield found
        if found.trials[-1].fate == UNPROVEN:
            return


def _trial(
    score: Score, goal: Goal, stage: str, split: str, reference: SamplerSpec, sampler: SamplerSpec, n: int
) -> Trial:
    outcomes = score(sampler, split, n)
    pairs = Pairs.of(score(reference, split, n).correct, outcomes.correct)
    bounds = at_least(pairs, goal.confidence), at_most(pairs, goal.confidence)
    return Trial(stage, split, sampler, pairs, *bounds, outcomes.nfe, outcomes.seconds, REFERENCE)


def _best(trials: Sequence[Trial], found: Tuning) -> list[Trial]:
    """A quarter of them in their order, eight at least: of those that may keep the floor the front of accuracy and
    cost, then the front of the others, and so on; of one front first those that keep the floor here, the fastest first.
    """
    floor, cost, order = found.goal.floor, found.cost, list[Trial]()
    left = [trial for trial in trials if trial.at_most >= floor]
    while left:
        layer = [left[i] for i in front([cost(trial) for trial in left], [trial.pairs.accuracy for trial in left])]
        order += sorted(layer, key=lambda trial: (trial.pairs.kept < floor, cost(trial)))
        left = [trial for trial in left if trial not in layer]
    best = order[: max(len(trials) // 4, FEWEST)]
    return [trial for trial in trials if trial in best]


def _ladder(trials: Sequence[Trial], found: Tuning) -> list[Trial]:
    """What is to be proven, from the safest to the fastest, each faster than all before it."""
    floor = found.goal.floor
    hopeful = [trial for trial in trials if trial.pairs.kept >= floor]
    evidence = [log_wealth(trial.pairs, floor) for trial in hopeful]
    return [hopeful[i] for i in reversed(front([found.cost(trial) for trial in hopeful], evidence))]


def _fate(trial: Trial, left: Sequence[Trial], goal: Goal) -> str:
    if trial in left:
        return GOES_ON
    return SURELY_BELOW if trial.at_most < goal.floor else BELOW if trial.pairs.kept < goal.floor else BEATEN


def _proved(score: Score, found: Tuning, candidate: Trial) -> list[Trial]:
    """The reference and the candidate on held-out problems, as few as prove it, or as many as show that the number of
    problems will not do even if no other is lost."""
    goal, held_out = found.goal, ("held out", "test", found.reference)
    enough = needed(goal.confidence)
    bet = best_bet(candidate.pairs, goal.floor, goal.n, enough)
    wealth = lambda pairs: log_wealth(pairs, goal.floor, [bet])
    for n in goal.looks:
        trial = _trial(score, goal, *held_out, candidate.sampler, n)
        proven = wealth(trial.pairs) >= enough
        best = dataclasses.replace(trial.pairs, both=trial.pairs.both + goal.n - n)
        if proven or wealth(best) < enough:
            break
    low = at_least(trial.pairs, goal.confidence, [bet])
    return [
        _trial(score, goal, *held_out, found.reference, n),
        dataclasses.replace(trial, at_least=low, fate=PROVEN if proven else UNPROVEN),
    ]


class Scorer:
    """Outcomes of samplers on a task's problems, which are kept in a file; those that stand there are not run again.

    Attributes:
        samplers: those that it was given, without repetitions and without the reference.
        goal: with as many problems as there are.
        problems: a hash of all questions.
    """

    def __init__(
        self,
        models: Models,
        task: Task,
        reference: SamplerSpec,
        samplers: Sequence[SamplerSpec],
        goal: Goal,
        *,
        batch_size: int = 64,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        """Loads the models, builds all samplers and draws all problems.

        Raises:
            DllmError: as `evals.run`, for a floor that so many problems cannot prove, and when another run has judged
                some of the held-out problems; before anything is compiled.

        Warns:
            RuntimeWarning: when problems were left out.
        """
        goal.check_provable()
        self._models, self._task = models, task
        self._how: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "progress": progress}
        self._engines, self._drawn = Engines(), dict[Any, Mapping[str, list[Example]]]()
        self._entries = dict[tuple[str, str], list[Mapping[str, Any]]]()
        self._output: JsonLines | None = None
        self._settings: Mapping[str, Any] = {}
        self.goal = goal
        different = dict[Any, tuple[SamplerSpec, Any]]()  # with what was built, as keys are of things that are there
        for sampler in (reference, *samplers):
            for split, examples in self._examples(sampler).items():
                batches = prepare(models, task, sampler, None, batch_size, seed, split, examples=examples)[1]
            numbers = tuple(float(number) for number in numbers_of(batches.sampler))
            key = (id(batches.model), program_of(batches.sampler), numbers)
            different.setdefault(key, (sampler, batches.sampler))
        self.samplers = [sampler for sampler, _ in different.values() if sampler is not reference]
        if not self.samplers:
            raise DllmError(f"there is no sampler but the reference {reference}; pass others by --sampler or --grid")
        questions = {split: hashes_of(task, examples) for split, examples in self._examples(reference).items()}
        self.problems = _digest([*questions["validation"], "", *questions["test"]])
        model, tried = models.of(reference), _digest(self.samplers)
        about = {"task": str(task), "reference": str(reference), "samplers": tried, "problems": self.problems}
        self._held_out = questions["test"]
        self._record = Record(
            str(getattr(model, "folder", None) or model.name),
            {**dataclasses.asdict(self.goal), **about, "seed": seed, "dtype": dtype_label(model.params)},
        )
        self._record.check(task, self._held_out)

    def keep(self, output: JsonLines, settings: Mapping[str, Any]) -> None:
        """Takes the outcomes of a file, and writes further ones there.

        Raises:
            DllmError: when it was made with other settings, or another process writes it.
        """
        output.compare(settings)
        entries = list(output.entries())
        output.begin()
        self._output, self._settings = output, settings
        for entry in entries:
            self._entries.setdefault((entry["sampler"], entry["split"]), []).append(entry)

    def __call__(self, sampler: SamplerSpec, split: str, n: int) -> Outcomes:
        """Outcomes on the first n problems of a split."""
        entries = self._entries.setdefault((str(sampler), split), [])
        while (done := sum(len(entry["nfe"]) for entry in entries)) < n:
            entries.append(self._run(sampler, split, done, min(n - done, REPORT)))
        correct = [right for entry in entries for right in entry["correct"]][:n]
        nfe = [count for entry in entries for count in entry["nfe"]][:n]
        seconds = [entry["seconds"] / len(entry["nfe"]) for entry in entries for _ in entry["nfe"]][:n]
        return Outcomes([bool(right) for right in correct], sum(nfe) / n, sum(seconds) / n)

    def _run(self, sampler: SamplerSpec, split: str, first: int, n: int) -> Mapping[str, Any]:
        examples = self._examples(sampler)[split][first : first + n]
        if split == "test":
            self._record.add(self._held_out[: first + n])
        where: dict[str, Any] = {"split": split, "first": first, "examples": examples, "engines": self._engines}
        report = run(self._models, self._task, sampler, n=n, **where, **self._how)
        entry = {
            "line": 1 if self._output is None else self._output.done + 1,
            "sampler": str(sampler),
            "split": split,
            "correct": [int(row.correct) for row in report.rows],
            "nfe": [row.nfe for row in report.rows],
            "seconds": report.seconds,
            "settings": self._settings,
        }
        if self._output is not None:
            self._output.append(entry)
        return entry

    def _examples(self, sampler: SamplerSpec) -> Mapping[str, list[Example]]:
        """Split -> its problems; a task with tokens of its own gives every model the same."""
        model = self._models.of(sampler)
        bound = self._task.bind(model)
        tokens = None if bound is self._task else id(model)
        if tokens not in self._drawn:
            self._drawn[tokens] = self._draw(bound)
        return self._drawn[tokens]

    def _draw(self, task: Task) -> Mapping[str, list[Example]]:
        """The problems of both splits, and how many there are; no question is in both, or twice in one."""
        taken, found, left_out = set[str](), dict[str, list[Example]](), dict[str, int]()
        for split, n in (("validation", self.goal.validation), ("test", self.goal.n)):
            found[split], left_out[split] = draw_different(task, split, n, taken, self._how["progress"])
            if not found[split]:
                raise DllmError(f"all {left_out[split]} {split} problems are in the search as well; give others")
        if sum(left_out.values()) and not self._drawn:
            told = [f"{count} of {split}" for split, count in left_out.items() if count]
            warnings.warn(f"problems that repeat others are left out: {', '.join(told)}", RuntimeWarning, 4)
        self.goal = dataclasses.replace(self.goal, n=len(found["test"]), validation=len(found["validation"]))
        self.goal.check_provable()
        return found


def _digest(items: Sequence[Any]) -> str:
    return hashlib.sha256("\n".join(map(str, items)).encode()).hexdigest()[:12]


def fastest(
    model: Model | Models,
    task: str | Task,
    samplers: str | SamplerSpec | Sequence[str | SamplerSpec] = (),
    *,
    floor: float,
    reference: str | SamplerSpec = "topk",
    objective: Objective = "nfe",
    confidence: float = 0.95,
    n: int = 2000,
    validation: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool | None = None,
) -> Tuning:
    """The whole search without a folder: a `Tuning` whose `chosen` is the fastest sampler that was proven, if any, and
    whose `told()` is the promise.

    Args:
        model, task, batch_size, seed, progress: as in `evals.run`.
        samplers: what is tried, specs with lists of values among them; by default `grids/tune.toml`.
        floor, objective, confidence, n, validation: see `Goal`; as many validation problems as n by default. Of fewer
            problems all are taken.
        reference: what accuracy is compared with.

    Raises:
        DllmError: as `evals.run`, for a goal that makes no sense or that so many problems cannot prove, when another
            run has judged some of the held-out problems, and when the reference solves no problem.

    Warns:
        RuntimeWarning: when problems were left out because they repeat others.
    """
    goal = Goal(floor, objective, confidence, n, n if validation is None else validation)
    listed = [samplers] if isinstance(samplers, str | SamplerSpec) else samplers
    tried = [x for text in listed for x in (parse_samplers(text) if isinstance(text, str) else [text])]
    against = parse_sampler(reference) if isinstance(reference, str) else reference
    models = model if isinstance(model, Models) else Models(model)
    problems = make_task(task) if isinstance(task, str) else task
    how: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "progress": progress}
    scorer = Scorer(models, problems, against, tried or read_grid(GRID), goal, **how)
    (found,) = collections.deque(tune(scorer, against, scorer.samplers, scorer.goal), maxlen=1)
    return found


def add(commands: Any) -> None:
    """The command `python -m evals tune`."""
    about = "find the fastest sampler that keeps a share of a reference's accuracy: tuning.json, .csv and .png"
    add = flags.command(commands, "tune", _tune, about)
    flags.add_model(add)
    flags.add_task(add)
    add("--floor", type=float, required=True, metavar="SHARE", help="of the reference's accuracy, such as 0.99")
    add("--reference", default="topk", metavar="SPEC", help="what it is compared with (default: topk, one at a time)")
    add("--sampler", action="append", default=[], metavar="SPEC", help="to be tried, with lists: eb:gamma=0.1|1")
    add("--grid", metavar="FILE", help="TOML with [[sampler]] tables; by default, with no --sampler, grids/tune.toml")
    add("--objective", default="nfe", metavar="WHAT", help="what is to be least: nfe or seconds (default: nfe)")
    add("--confidence", type=float, default=0.95, metavar="P", help="that the floor is kept (default: 0.95)")
    add("--n", type=int, default=2000, metavar="N", help="held-out problems of the test split, at most (default: 2000)")
    add("--validation", type=int, metavar="N", help="problems of the search, at most (default: as --n)")
    flags.add_batch(add)
    add("--out", default="tuning", metavar="DIR", help="folder of the results; the same command goes on there")


def _tune(options: argparse.Namespace) -> None:
    validation = options.n if options.validation is None else options.validation
    goal = Goal(options.floor, options.objective, options.confidence, options.n, validation)
    task, reference = make_task(options.task), parse_sampler(options.reference)
    asked = options.sampler or options.grid
    samplers = all_samplers(options.sampler, options.grid) if asked else read_grid(GRID)
    models = flags.models_of(options)
    plots.require_matplotlib()
    folder = files.make_folder(options.out)
    scorer = Scorer(models, task, reference, samplers, goal, batch_size=options.batch_size, seed=options.seed)
    names = ("model", "dtype", "quantize", "task", "reference", "seed")
    settings = {name: getattr(options, name) for name in names} | dataclasses.asdict(scorer.goal)
    settings |= {"samplers": _digest(scorer.samplers), "problems": scorer.problems}
    with JsonLines(folder / "outcomes.jsonl") as output:
        scorer.keep(output, settings)
        about, told = {**settings, **surroundings(models.of(reference))}, 0
        for found in tune(scorer, reference, scorer.samplers, scorer.goal):
            _write(folder, found, about)
            print(_summary(found.trials[told:]), flush=True)
            told = len(found.trials)
        _write(folder, found, {"told": found.told(), **about})
        write_file(folder / "tuning.png", plot(found))
    where = f"tuning.json, tuning.csv, tuning.png in {folder}"
    if found.chosen is None:
        raise DllmError(f"{found.told()} ({where})")
    print(f"--sampler '{found.chosen.sampler}'\n{found.told()}\n{where}")


def _write(folder: Path, found: Tuning, about: Mapping[str, Any]) -> None:
    rows = [trial.row() for trial in found.trials]
    chosen = None if found.chosen is None else str(found.chosen.sampler)
    write_file(folder / "tuning.json", files.as_json({"chosen": chosen, **about, "trials": rows}))
    write_file(folder / "tuning.csv", files.as_csv(rows))


def _summary(trials: Sequence[Trial]) -> str:
    """A round, or a candidate that was to be proven, in one line."""
    first, last = trials[0], trials[-1]
    where = f"{first.stage}: {first.pairs.n} {first.split} problems"
    if last.fate in (PROVEN, UNPROVEN):
        kept = f"{100 * last.pairs.kept:.1f} % kept, at least {_down(last.at_least)} %"
        return f"{where} | {last.sampler} | {kept} | NFE {last.nfe:.2f} | {last.fate}"
    fates = [trial.fate for trial in trials[1:]]
    dropped = [f"{fates.count(fate)} {why}" for fate, why in _DROPPED.items() if fate in fates]
    told = "; dropped: " + ", ".join(dropped) if dropped else ""
    return f"{where} | kept {fates.count(GOES_ON)} of {len(fates)} samplers{told}"


_DROPPED = {BEATEN: "slower or less accurate", BELOW: "below the floor here", SURELY_BELOW: "surely below the floor"}


def plot(found: Tuning) -> bytes:
    """Cost against the share that is kept, each sampler where it was looked at last, as a PNG."""
    latest = {str(trial.sampler): trial for trial in found.trials}
    dropped = [SURELY_BELOW, BELOW, BEATEN]
    groups = {"reference": [REFERENCE], "dropped": dropped, "not proven": [GOES_ON, UNPROVEN], "proven": [PROVEN]}
    low = max(100 * found.goal.floor - 15, 0)
    curves = []
    for label, fates in groups.items():
        points = [t for t in latest.values() if t.fate in fates and t is not found.chosen]
        shown = sorted((found.cost(t), 100 * t.pairs.kept) for t in points if 100 * t.pairs.kept >= low)
        below = f" ({len(points) - len(shown)} below the plot)" if len(shown) < len(points) else ""
        if shown:
            x, y = zip(*shown, strict=True)
            curves.append(plots.Curve(label + below, x, y, faint=label == "dropped"))
    if (best := found.chosen) is not None:
        curves.append(plots.Curve(f"chosen: {best.sampler}", [found.cost(best)], [100 * best.pairs.kept]))
    label = "forwards per problem (NFE)" if found.goal.objective == "nfe" else "seconds per problem"
    top = max((y for curve in curves for y in curve.y), default=100)
    panel = plots.Panel(
        label,
        curves,
        y_label="of the reference's accuracy, %",
        level=(100 * found.goal.floor, "floor"),
        y_range=(low, max(top, 100) + 1),
    )
    return plots.draw([panel], f"{len(latest) - 1} samplers beside {found.reference}")
