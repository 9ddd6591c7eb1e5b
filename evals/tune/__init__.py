"""The fastest sampler that keeps a share of a reference's accuracy: `python -m evals tune` (docs/tune.md)."""

from evals.tune.command import fastest, plot
from evals.tune.trials import Goal, Outcomes, Trial, Tuning, search

__all__ = ["Goal", "Outcomes", "Trial", "Tuning", "fastest", "plot", "search"]
