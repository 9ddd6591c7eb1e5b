"""Standard errors of shares and of means."""

import math
from collections.abc import Sequence

import numpy as np


def of_share(share: float, n: int) -> float:
    """Of a share of n problems: half of Wilson's interval at one standard error, which is not 0 for none or all."""
    return math.sqrt(share * (1 - share) / n + 1 / (4 * n * n)) / (1 + 1 / n)


def as_percent(share: float, error: float) -> str:
    """A share with its standard error, as 98.6 +- 0.5: in percent, with one digit after the point or with as many as
    show an error that is not 0."""
    digits = max(1, math.ceil(-math.log10(200 * error))) if error else 1
    return f"{100 * share:.{digits}f} +- {100 * error:.{digits}f}"


def of_mean(values: Sequence[float]) -> float:
    """Of the mean of some numbers, by their sample standard deviation; 0 for one."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
