"""How well an indicator recognises tokens that are final already, on trajectories that it was not trained on.

Of every trajectory one state is drawn and restored, as in training (`train.objectives.indicator`). At its masked
positions the indicator's scores stand against the model's own: the probability of its best token, by which a threshold
decides.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import Denoiser, DllmError, Model
from dllm_jax.indicator import Indicator
from evals.plots import Curve, Panel, draw
from samplers.checks import check_length
from samplers.text.prompts import bucket_length
from train.config import DataPart
from train.data import Rows
from train.data.shards import ABOUT_FILE, Trajectories
from train.losses import Batch
from train.objectives.indicator import RolledBack, auc, gather_evidence, roll_back

POINTS = 200  # of a curve, as it is written


@dataclasses.dataclass(frozen=True)
class PrecisionRecall:
    """A score's precision and recall at every threshold that makes a difference, from the highest down. Positions are
    chosen by a score above the threshold, as NI sampling chooses them.

    Attributes:
        thresholds, precision, recall: [N].
    """

    thresholds: np.ndarray
    precision: np.ndarray
    recall: np.ndarray

    def lowest(self, precision: float) -> int | None:
        """Number of the smallest threshold at which the precision is reached; None where it never is."""
        found = np.flatnonzero(self.precision >= precision)
        return int(found[-1]) if len(found) else None

    def threshold(self, precision: float) -> float:
        """The smallest threshold at which the precision is reached; 1, which chooses nothing, where it never is."""
        place = self.lowest(precision)
        return 1.0 if place is None else float(self.thresholds[place])

    def points(self) -> list[dict[str, float]]:
        """At most `POINTS` of them, evenly in recall, the last among them."""
        wanted = np.linspace(self.recall[0], self.recall[-1], POINTS)
        chosen = np.unique(np.minimum(np.searchsorted(self.recall, wanted), len(self.recall) - 1))
        names = ("thresholds", "precision", "recall")
        columns = [getattr(self, name)[chosen].tolist() for name in names]
        return [dict(zip(("threshold", *names[1:]), row, strict=True)) for row in zip(*columns, strict=True)]


@dataclasses.dataclass(frozen=True)
class IndicatorReport:
    """The quality of an indicator.

    Attributes:
        model, split: what was scored, and which examples the trajectories are of, "" if unknown.
        n, positions: trajectories, and masked positions of their states.
        positives: share of the positions whose tokens could have been written.
        auc, confidence_auc: of the indicator's scores, and of the probability of the best token.
        curve, confidence_curve: precision and recall of both.
    """

    model: str
    split: str
    n: int
    positions: int
    positives: float
    auc: float
    confidence_auc: float
    curve: PrecisionRecall = dataclasses.field(repr=False)
    confidence_curve: PrecisionRecall = dataclasses.field(repr=False)

    def rows(self) -> list[dict[str, Any]]:
        """Points of both curves, for a table."""
        curves = {"indicator": self.curve, "probability": self.confidence_curve}
        return [{"score": name, **point} for name, curve in curves.items() for point in curve.points()]

    def plot(self) -> bytes:
        """Both curves as a PNG.

        Raises:
            DllmError: when matplotlib is not installed.
        """
        named = {
            f"indicator, AUC {self.auc:.3f}": self.curve,
            f"probability alone, AUC {self.confidence_auc:.3f}": self.confidence_curve,
        }
        curves = []
        for label, curve in named.items():
            points = curve.points()
            x, y = ([100 * point[name] for point in points] for name in ("recall", "precision"))
            curves.append(Curve(label, x, y))
        title = f"{self.model}: which masked tokens are final, {self.positions} positions"
        return draw([Panel("recall, %", curves, y_label="precision, %")], title)

    def describe(self, precision: float) -> str:
        """The report in one line, with the smallest threshold of a precision."""
        of = f"{self.n} {self.split} trajectories".replace("  ", " ")
        scored = f"AUC {self.auc:.3f} (probability alone {self.confidence_auc:.3f})"
        shares = f"{100 * self.positives:.1f} % of {self.positions} positions final"
        place = self.curve.lowest(precision)
        if place is None:
            return f"{of} | {scored} | {shares} | no threshold reaches precision {100 * precision:g} %"
        threshold, found, recall = (float(x[place]) for x in vars(self.curve).values())
        reached = f"threshold {threshold:.4g} has precision {100 * found:.2f} % and recall {100 * recall:.1f} %"
        return f"{of} | {scored} | {shares} | {reached}"


def score_indicator(
    model: Model,
    indicator: Indicator,
    trajectories: str | Path,
    *,
    n: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> IndicatorReport:
    """Scores an indicator on trajectories 0 to n - 1 of a folder, all by default; the batch size changes nothing.

    Raises:
        DllmError: for bad numbers, a folder without trajectories, or an indicator or trajectories of another model.
    """
    check_length("n", n, optional=True)
    check_length("batch_size", batch_size)
    folder = Path(trajectories).expanduser()
    source = Trajectories(folder, correct=False)
    length = bucket_length(source.width)
    rows = Rows(source, DataPart(length=length, shuffle=False), "sft", model.config, seed)
    count = min(n or len(source), len(source))
    parts = []
    for first in range(0, count, batch_size):
        numbers = np.minimum(np.arange(first, first + batch_size), count - 1)
        size = min(count - first, batch_size)
        found = _score(indicator, model.denoiser, _states(rows, numbers, seed, model))
        parts.append([np.asarray(x)[:size] for x in found])
    masked = np.concatenate([part[2].ravel() for part in parts])
    scores, confidence, label = (np.concatenate([part[i].ravel() for part in parts])[masked] for i in (0, 1, 3))
    if not len(scores):
        raise DllmError(f"the trajectories in {folder} have no steps; make others")
    area = lambda x: float(auc(jnp.asarray(x), jnp.asarray(label), jnp.ones(len(x), bool)))
    return IndicatorReport(
        model.name,
        _split(folder),
        count,
        len(scores),
        float(label.mean()),
        area(scores),
        area(confidence),
        precision_recall(scores, label),
        precision_recall(confidence, label),
    )


def precision_recall(scores: np.ndarray, label: np.ndarray) -> PrecisionRecall:
    """The curve of scores [N] of which `label` [N] bool are to be chosen."""
    order = np.argsort(-scores, kind="stable")
    ordered, right = scores[order], np.cumsum(label[order])
    last = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1)  # of equal scores all or none
    below = np.append(ordered[last[:-1] + 1], 0.0)
    return PrecisionRecall(below, right[last] / (last + 1), right[last] / max(int(label.sum()), 1))


def _states(rows: Rows, numbers: np.ndarray, seed: int, model: Model) -> RolledBack:
    """The trajectories of these numbers at a state that depends on the seed and the number alone."""
    found = [rows(int(number)) for number in numbers]
    stacked = lambda name: jnp.asarray(np.stack([getattr(row, name) for row in found]))
    batch = Batch(stacked("tokens"), stacked("targets"), stacked("length"), stacked("step"))
    steps = [max(int(row.step.max()) + 1, 1) for row in found if row.step is not None]
    draws = [np.random.default_rng([seed, int(i)]).integers(count) for i, count in zip(numbers, steps, strict=True)]
    keys = jax.random.split(jax.random.key(0), len(found))  # of dropout, of which there is none here
    return roll_back(batch, jnp.asarray(draws, jnp.int32), keys, model.denoiser.mask_id)


@jax.jit
def _score(indicator: Indicator, denoiser: Denoiser, states: RolledBack) -> tuple[jax.Array, ...]:
    """Scores of the indicator, of the model, masked positions and labels, each [B, W]."""
    found = gather_evidence(indicator.config, denoiser, states)
    return indicator.scores(*found.features), found.confidence, found.masked, found.label


def _split(folder: Path) -> str:
    try:
        return str(json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8")).get("split", ""))
    except (OSError, ValueError, AttributeError):
        return ""
