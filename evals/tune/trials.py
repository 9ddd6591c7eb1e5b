"""The sampler with the fewest forwards, or least time, that keeps a share of a reference's accuracy (docs/tune.md).

The search uses problems of the validation split, the same for all samplers, by successive halving: each round has more
problems, drops what is surely below the floor, and of the rest all but the best few by fronts of accuracy and cost
(Schmucker et al., arXiv 2106.12639). Then problems of the test split, which took no part in that, prove the
floor: candidates are ordered from the safest to the fastest, and each is tested at full confidence
(`evals.paired_test`) as long as all before it have passed. Such a fixed sequence announces a candidate that breaks the
promise no more often than a single test would, however many are tried (Maurer et al. 1995; Angelopoulos et al., arXiv
2110.01052), because the first of those that break it would have to pass. Order and bets come from the validation
problems alone.

Questions that repeat are left out, and held-out problems serve one run alone (`evals.tune.held_out`).

Outcomes are written to disk at once, and everything else is computed from them, so a killed run resumes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from dllm_jax.errors import DllmError
from evals import stderr
from evals.aup_metric import front
from evals.paired_test import Pairs, at_least, at_most, best_bet, log_wealth, needed
from evals.sampler import SamplerConfig
from samplers.checks import check_length

FEWEST = 8  # samplers that enter the next round, if there are as many
ENOUGH = 32  # problems of which any useful reference solves one

Objective = Literal["nfe", "seconds"]

REFERENCE, GOES_ON, PROVEN, UNPROVEN = "reference", "goes on", "proven", "not proven"
SURELY_BELOW, BELOW, BEATEN = "surely below the floor", "below the floor here", "others were better"


@dataclasses.dataclass(frozen=True)
class Goal:
    """The goal of a search.

    Attributes:
        floor: share of the reference's accuracy that a sampler must keep, in (0, 1).
        objective: the cost to minimise, forwards ("nfe") or seconds per problem.
        confidence: that the floor is kept, in [0.5, 1).
        n: held-out problems, of the test split, at most.
        validation: problems of the search, at most.
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
        check_length("n", self.n)
        check_length("validation", self.validation)

    def check_provable(self) -> None:
        """Raises DllmError when there are too few held-out problems for the floor even if no problem is lost."""
        evidence, most = needed(self.confidence), 0.99  # the largest of `paired_test`'s bets
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
    def checkpoints(self) -> list[int]:
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


Score = Callable[[SamplerConfig, str, int], Outcomes]  # sampler, split, how many of its problems


@dataclasses.dataclass(frozen=True)
class Trial:
    """A sampler and the reference on the same problems.

    Attributes:
        stage: "round 1" and so on, or "held out".
        pairs: who solved how many.
        at_least, at_most: one-sided bounds of the share of the reference's accuracy that is kept.
        nfe, seconds: per problem.
        fate: what was decided.
    """

    stage: str
    split: str
    sampler: SamplerConfig
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
            "accuracy_stderr": stderr.of_share(pairs.accuracy, pairs.n),
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
    """All trials so far, in order."""

    goal: Goal
    reference: SamplerConfig
    trials: list[Trial] = dataclasses.field(default_factory=list)

    @property
    def chosen(self) -> Trial | None:
        """The fastest that was proven."""
        return next((trial for trial in reversed(self.trials) if trial.fate == PROVEN), None)

    def cost(self, trial: Trial) -> float:
        """What the search minimises."""
        return trial.nfe if self.goal.objective == "nfe" else trial.seconds

    def promise(self) -> str:
        """What was proven, or what is missing."""
        trial, sure = self.chosen, f"{100 * self.goal.confidence:g} %"
        if trial is None:
            return self._shortfall(sure)
        reference = self.trials[self.trials.index(trial) - 1]
        right, theirs = trial.pairs.accuracy, trial.pairs.reference_accuracy
        costs = f"{trial.nfe:.1f} forwards instead of {reference.nfe:.1f}"
        if self.goal.objective == "seconds":
            costs = f"{1000 * trial.seconds:.3g} ms a problem instead of {1000 * reference.seconds:.3g}; {costs}"
        return (
            f"at least {percent_down(trial.at_least)} % of the reference's accuracy at {sure} confidence, on "
            f"{trial.pairs.n} held-out problems ({100 * right:.1f} against {100 * theirs:.1f} % solved); {costs}"
        )

    def _shortfall(self, sure: str) -> str:
        goal = f"{100 * self.goal.floor:g} % of the reference's accuracy"
        last = self.trials[-1].stage
        tried = [trial for trial in self.trials if trial.stage == last and trial.fate != REFERENCE]
        best = max(tried, key=lambda trial: trial.at_least if trial.fate == UNPROVEN else trial.pairs.kept)
        problems = f"{best.pairs.n} {'held-out' if best.fate == UNPROVEN else 'validation'} problems"
        miss = 100 * (self.goal.floor - best.at_least)
        least = f"at least {percent_down(best.at_least)} %"
        found = f"{best.sampler} keeps {100 * best.pairs.kept:.1f} % on {problems}, {least}"
        advice = "pass a lower --floor, more problems by --n, or other samplers"
        return (
            f"no sampler was proven to keep {goal}: the best, {found} at {sure} confidence, "
            f"{miss:.1f} points short; {advice}"
        )


def percent_down(share: float) -> str:
    """In percent, rounded down."""
    return f"{math.floor(1000 * share + 1e-6) / 10:.1f}"


def search(score: Score, reference: SamplerConfig, samplers: Sequence[SamplerConfig], goal: Goal) -> Iterator[Tuning]:
    """Searches, then proves; yields all trials after each round and each candidate.

    Raises:
        DllmError: when the reference solves no problem.
    """
    found, alive = Tuning(goal, reference), list(samplers)
    for number, n in enumerate(goal.rounds, start=1):
        stage = (f"round {number}", "validation", reference)
        first, *others = (_try_sampler(score, goal, *stage, sampler, n) for sampler in (reference, *alive))
        if not first.pairs.kept > 0:
            if n < min(goal.validation, ENOUGH):
                continue  # may be chance with so few problems, which then say nothing about other samplers either
            raise DllmError(f"the reference {reference} solves none of {n} problems; name another by --reference")
        left = _ladder(others, found) if n == goal.validation else _best(others, found)
        found.trials += [first, *(dataclasses.replace(trial, fate=_fate(trial, left, goal)) for trial in others)]
        alive = [trial.sampler for trial in left]
        yield found
        if not alive:
            return
    for candidate in left:
        found.trials += _prove(score, found, candidate)
        yield found
        if found.trials[-1].fate == UNPROVEN:
            return


def _try_sampler(
    score: Score, goal: Goal, stage: str, split: str, reference: SamplerConfig, sampler: SamplerConfig, n: int
) -> Trial:
    outcomes = score(sampler, split, n)
    pairs = Pairs.of(score(reference, split, n).correct, outcomes.correct)
    bounds = at_least(pairs, goal.confidence), at_most(pairs, goal.confidence)
    return Trial(stage, split, sampler, pairs, *bounds, outcomes.nfe, outcomes.seconds, REFERENCE)


def _best(trials: Sequence[Trial], found: Tuning) -> list[Trial]:
    """A quarter of the trials, eight at least, in their order.

    Of those that may keep the floor the front of accuracy and cost comes first, then the front of the others, and so
    on; within a front those that keep the floor here, the fastest first.
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
    """The candidates to prove, from the safest to the fastest, each faster than all before it."""
    floor = found.goal.floor
    hopeful = [trial for trial in trials if trial.pairs.kept >= floor]
    evidence = [log_wealth(trial.pairs, floor) for trial in hopeful]
    return [hopeful[i] for i in reversed(front([found.cost(trial) for trial in hopeful], evidence))]


def _fate(trial: Trial, left: Sequence[Trial], goal: Goal) -> str:
    if trial in left:
        return GOES_ON
    return SURELY_BELOW if trial.at_most < goal.floor else BELOW if trial.pairs.kept < goal.floor else BEATEN


def _prove(score: Score, found: Tuning, candidate: Trial) -> list[Trial]:
    """The reference and the candidate on held-out problems: as few as prove it, or as show that all of them cannot even
    if no other is lost."""
    goal, held_out = found.goal, ("held out", "test", found.reference)
    enough = needed(goal.confidence)
    bet = best_bet(candidate.pairs, goal.floor, goal.n, enough)
    wealth = lambda pairs: log_wealth(pairs, goal.floor, [bet])
    for n in goal.checkpoints:
        trial = _try_sampler(score, goal, *held_out, candidate.sampler, n)
        proven = wealth(trial.pairs) >= enough
        best = dataclasses.replace(trial.pairs, both=trial.pairs.both + goal.n - n)
        if proven or wealth(best) < enough:
            break
    low = at_least(trial.pairs, goal.confidence, [bet])
    return [
        _try_sampler(score, goal, *held_out, found.reference, n),
        dataclasses.replace(trial, at_least=low, fate=PROVEN if proven else UNPROVEN),
    ]
