"""Two samplers on the same problems: which share of the one's accuracy the other keeps, with bounds for any n.

R and C, 0 or 1, say whether the reference and the candidate solve a problem. The candidate keeps less than a share f of
the reference's accuracy where E[C - f R] < 0. Against that one bets on every problem: a wealth of 1 is multiplied by
1 + b (C - f R), with a bet b in (0, 1) that was chosen before. If the candidate keeps less all the same, the wealth is
a supermartingale, and by Ville's inequality it ever reaches 1 / (1 - confidence) with a probability of 1 - confidence
at most: whatever the number of problems, however rare the differences, and with a look at it after every problem
(Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", J. R. Stat. Soc. B 86, 2024). There
is no normal approximation in it, which would be wrong here, where three problems of a thousand decide. With none lost
it takes 305 problems for 99 % at a confidence of 95 %; the exact binomial test of a number fixed before takes 299.

The wealth depends on four counts alone, so neither on the order of problems nor on how often a run was cut off.
Negative bets, the other way round, bound the share from above.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

_BETS = (0.99, 0.5, 0.25, 0.12, 0.06, 0.03)  # for whoever knows nothing: equal parts of the wealth on each
_CHOICE = tuple(percent / 100 for percent in range(1, 100))


@dataclasses.dataclass(frozen=True)
class Pairs:
    """How often two samplers solved the same problems.

    Attributes:
        both: problems that both solved.
        lost: that the reference alone solved.
        gained: that the candidate alone solved.
        neither: that none solved.
    """

    both: int
    lost: int
    gained: int
    neither: int

    @classmethod
    def of(cls, reference: Sequence[bool], candidate: Sequence[bool]) -> Self:
        """The counts of outcomes, in the same order."""
        r, c = np.asarray(reference, bool), np.asarray(candidate, bool)
        return cls(*(int(np.sum(x)) for x in (r & c, r & ~c, ~r & c, ~r & ~c)))

    @property
    def n(self) -> int:
        return self.both + self.lost + self.gained + self.neither

    @property
    def accuracy(self) -> float:
        """The candidate's."""
        return (self.both + self.gained) / self.n

    @property
    def reference_accuracy(self) -> float:
        return (self.both + self.lost) / self.n

    @property
    def kept(self) -> float:
        """Share of the reference's accuracy; NaN where that is 0."""
        solved = self.both + self.lost
        return (self.both + self.gained) / solved if solved else math.nan


def log_wealth(pairs: Pairs, share: float, bets: Sequence[float] = _BETS) -> float:
    """Evidence, in nats, that the candidate keeps more than this share; of negative bets, that it keeps less.

    Args:
        share: in [0, 1].
        bets: in (-1, 1), all of one sign; equal parts of the wealth lie on each.
    """
    return float(np.logaddexp.reduce(_log_wealths(pairs, share, bets)) - math.log(len(bets)))


def needed(confidence: float) -> float:
    """The evidence, in nats, that a confidence takes."""
    return -math.log1p(-confidence)


def best_bet(pairs: Pairs, share: float, n: int, evidence: float) -> float:
    """The bet with which most of n further problems may be lost and the evidence still comes together.

    Args:
        pairs: problems that are like the further ones, which say how many are gained and how many none solves.
    """
    bets = np.asarray(_CHOICE)
    usual = dataclasses.replace(pairs, both=pairs.both + pairs.lost, lost=0)
    spare = n / pairs.n * _log_wealths(usual, share, bets) - evidence
    return _CHOICE[int(np.argmax(spare / -np.log1p(-bets * share)))]


def at_least(pairs: Pairs, confidence: float, bets: Sequence[float] = _BETS) -> float:
    """One-sided lower bound of the share that is kept, in [0, 1]: the largest that the evidence speaks for."""
    return _last(lambda share: log_wealth(pairs, share, bets) >= needed(confidence))


def at_most(pairs: Pairs, confidence: float) -> float:
    """One-sided upper bound of the share that is kept, in [0, 1]; 1 where less is not proven."""
    against = [-bet for bet in _BETS]
    return _last(lambda share: log_wealth(pairs, share, against) < needed(confidence))


def _log_wealths(pairs: Pairs, share: float, bets: Sequence[float] | np.ndarray) -> np.ndarray:
    """What each bet alone would have made."""
    bet = np.asarray(bets)
    won = pairs.both * np.log1p(bet * (1 - share)) + pairs.gained * np.log1p(bet)
    return won + pairs.lost * np.log1p(-bet * share)


def _last(holds: Callable[[float], bool]) -> float:
    """The end of the shares from 0 on for which something holds, from below."""
    if holds(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
