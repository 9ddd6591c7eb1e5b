"""Plots of sweeps, drawn without a display."""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from dllm_jax.errors import DllmError
from evals.area import front

# Okabe and Ito's colours, which all kinds of colour vision tell apart; markers and dashes repeat the distinction.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", ":")


@dataclasses.dataclass(frozen=True)
class Curve:
    """A series of points, in the order in which they are joined.

    Attributes:
        label: for the legend.
        x, y: the points; y in percent.
        y_error: standard errors of y, in percent.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    y_error: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        x_label: what x is.
        curves: what is drawn.
        smaller_is_better: which way the Pareto front is drawn; None draws none.
    """

    x_label: str
    curves: Sequence[Curve]
    smaller_is_better: bool | None = None


def require_matplotlib() -> Any:
    """The figure class of matplotlib, which draws into files without a display.

    Raises:
        DllmError: when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DllmError("plots need matplotlib; install it by pip install 'dllm_jax[evals]'") from None
    return Figure


def draw(panels: Sequence[Panel], title: str) -> bytes:
    """`figure` as a PNG.

    Raises:
        DllmError: when matplotlib is not installed.
    """
    file = io.BytesIO()
    figure(panels, title).savefig(file, format="png", dpi=160)
    return file.getvalue()


def figure(panels: Sequence[Panel], title: str) -> Any:
    """The panels side by side as a matplotlib figure; curves of the same label look the same everywhere.

    Raises:
        DllmError: when matplotlib is not installed.
    """
    drawn = require_matplotlib()(figsize=(max(5.6 * len(panels), 6.4), 5.0), layout="constrained")
    axes = drawn.subplots(1, len(panels), squeeze=False)[0]
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    for ax, panel in zip(axes, panels, strict=True):
        _draw_panel(ax, panel, labels)
    handles, names = axes[0].get_legend_handles_labels()
    drawn.legend(
        handles, names, loc="outside lower center", ncols=min(len(labels), len(panels) + 1), fontsize=8, frameon=False
    )
    drawn.suptitle(title, fontsize=10)
    return drawn


def _draw_panel(ax: Any, panel: Panel, labels: Sequence[str]) -> None:
    for curve in panel.curves:
        number = labels.index(curve.label)
        ax.errorbar(
            curve.x,
            curve.y,
            yerr=curve.y_error,
            label=curve.label,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[number // len(COLOURS) % len(DASHES)],
            markersize=4,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
            alpha=0.9,
        )
    if panel.smaller_is_better is not None:
        _draw_front(ax, panel)
    ax.set_xlabel(panel.x_label)
    ax.set_ylabel("accuracy, %")
    ax.set_xlim(left=0)
    low, high = ax.get_ylim()
    ax.set_ylim(max(low, -2), min(max(high, low + 5), 102))  # error bars may go beyond what accuracies can
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_front(ax: Any, panel: Panel) -> None:
    """Light steps along the points that no other one beats."""
    x = [value for curve in panel.curves for value in curve.x]
    y = [value for curve in panel.curves for value in curve.y]
    best = front(x if panel.smaller_is_better else [-value for value in x], y)
    steps = [(x[i], y[i]) for i in best]
    ax.step(*zip(*steps, strict=True), where="post", color="0.75", linewidth=5, alpha=0.5, zorder=0)
