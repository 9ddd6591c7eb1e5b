"""Accuracy under parallelism (AUP), the weighted area that d3LLM compares decoders by (arXiv 2601.07568).

Points (rho_i, y_i) have the parallelism rho in tokens per forward, ascending, and the accuracy y in percent. Points
whose accuracy is more than 5 below that of the first, least parallel one, are left out. Then

    AUP = rho_1 y_1 + sum over i >= 2 of (rho_i - rho_{i-1}) (y_i W(y_i) + y_{i-1} W(y_{i-1})) / 2
    W(y) = min(exp(-3 (1 - y / y_max)), 1)

where y_max is the best accuracy on the task among all that is compared, autoregressive baselines included. A sampler
that is always right scores 100 times its most tokens per forward; one that trades accuracy away scores less than the
plain area. The first term has no weight, so a single point scores rho_1 y_1, and areas of curves that begin elsewhere
cannot be compared: d3LLM's all begin at one token per forward. So do those of `from_one`.
"""

import math
from collections.abc import Sequence

from dllm_jax.errors import DllmError

ALPHA = 3.0
DROP = 5.0  # percent
ONE = 1.0 + 1e-6
"""Most tokens per forward at which a curve begins."""
LEADERBOARD = ("gsm8k-cot", "math", "mbpp", "humaneval", "long-gsm8k")
"""d3LLM's tasks, whose areas make one score; those with a plus (humaneval+, mbpp+) are reported but do not count."""


def aup(
    parallelism: Sequence[float],
    accuracy: Sequence[float],
    best: float,
    *,
    alpha: float = ALPHA,
    drop: float = DROP,
) -> float:
    """Accuracy under parallelism of one sampler's points, in any order.

    Args:
        parallelism: tokens per forward of each point, above 0.
        accuracy: of each point, in percent.
        best: y_max, in percent.
        alpha: penalty for accuracy below the best.
        drop: points that are more than this below the least parallel one are left out, in percent.

    Raises:
        DllmError: for no points, lists of different lengths, and numbers that cannot be.
    """
    if not parallelism or len(parallelism) != len(accuracy):
        raise DllmError(f"{len(parallelism)} parallelisms and {len(accuracy)} accuracies make no curve; give pairs")
    if min(parallelism) <= 0 or not all(0 <= y <= 100 for y in (*accuracy, best)):
        raise DllmError("a curve has parallelisms above 0 and accuracies from 0 to 100 percent; correct the numbers")
    # Of points of equal parallelism the best comes first, so that the area does not depend on their order.
    points = sorted(zip(parallelism, accuracy, strict=True), key=lambda point: (point[0], -point[1]))
    points = [point for point in points if point[1] >= points[0][1] - drop]
    weighed = [(rho, y * _weight(y, best, alpha)) for rho, y in points]
    steps = zip(weighed, weighed[1:], strict=False)
    return points[0][0] * points[0][1] + sum((b[0] - a[0]) * (b[1] + a[1]) / 2 for a, b in steps)


def from_one(
    points: Sequence[tuple[float, float]], best: float, start: tuple[float, float] | None = None
) -> float | None:
    """The area of a curve that begins at one token per forward, so that it can be compared with others.

    Args:
        points: parallelism and accuracy in percent of each.
        start: where it begins, in place of its own points that are no more parallel; None is its own first point.

    Returns:
        AUP; None where there are no points, or the first has more than one token per forward.
    """
    curve = points if start is None else [start, *(point for point in points if point[0] > start[0])]
    if not points or min(curve)[0] > ONE:
        return None
    return aup([rho for rho, _ in curve], [y for _, y in curve], best)


def front(cost: Sequence[float], accuracy: Sequence[float]) -> list[int]:
    """Indices of the points that no other one beats in both, in order of cost (smaller is better)."""
    found: list[int] = []
    for i in sorted(range(len(cost)), key=lambda i: (cost[i], -accuracy[i])):
        if not found or accuracy[i] > accuracy[found[-1]]:
            found.append(i)
    return found


def _weight(y: float, best: float, alpha: float) -> float:
    return min(math.exp(-alpha * (1 - y / best)), 1.0) if best > 0 else 1.0
