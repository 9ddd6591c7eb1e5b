"""Plots of sweeps, drawn without a display."""

import dataclasses
import io
import textwrap
from collections.abc import Sequence
from typing import Any

from dllm_jax.errors import DllmError
from evals.aup_metric import front

# Okabe and Ito's colours, which all kinds of colour vision distinguish, as markers and dashes do.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", ":")


ACCURACY = "accuracy, %"


@dataclasses.dataclass(frozen=True)
class Curve:
    """A series of points, in the order in which they are joined.

    Attributes:
        label: for the legend.
        x, y: the points.
        y_error: standard errors of y; None draws none.
        x_spread, y_spread: standard deviations over trained models, drawn as broad bars; None draws none.
        front: join only the points that no other of the curve beats, and draw the others faintly; for settings that
            have no order.
        published: draw it in grey with its number for a mark, unlike our own.
        faint: draw all points faintly and join none.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    y_error: Sequence[float] | None = None
    x_spread: Sequence[float] | None = None
    y_spread: Sequence[float] | None = None
    front: bool = False
    published: bool = False
    faint: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        x_label, y_label: what x and y are; both axes begin at 0, but for accuracy's.
        curves: what is drawn.
        smaller_is_better: which way the Pareto front is drawn; None draws none.
        ticks: names of the places 0, 1 ... on the x axis, where these are no numbers.
        level: a y to draw a line at, and what it is; None draws none.
        y_range: of the y axis, which leaves out what lies beyond; None is that of the points.
    """

    x_label: str
    curves: Sequence[Curve]
    smaller_is_better: bool | None = None
    y_label: str = ACCURACY
    ticks: Sequence[str] | None = None
    level: tuple[float, str] | None = None
    y_range: tuple[float, float] | None = None


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


def draw(panels: Sequence[Panel], title: str, columns: int | None = None, caption: str = "") -> bytes:
    """`figure` as a PNG.

    Raises:
        DllmError: when matplotlib is not installed.
    """
    file = io.BytesIO()
    figure(panels, title, columns, caption).savefig(file, format="png", dpi=160)
    return file.getvalue()


def figure(panels: Sequence[Panel], title: str, columns: int | None = None, caption: str = "") -> Any:
    """The panels as a matplotlib figure, so many side by side, with a caption below; curves of the same label look the
    same everywhere.

    Raises:
        DllmError: when matplotlib is not installed.
    """
    columns = columns or len(panels)
    rows = -(-len(panels) // columns)
    curves = [curve for panel in panels for curve in panel.curves]
    labels = list(dict.fromkeys(curve.label for curve in sorted(curves, key=lambda curve: curve.published)))
    ours = len({curve.label for curve in curves if not curve.published})
    many = len(labels) > ours
    width, height = (5.6, 5.0) if rows == 1 else (4.2, 3.4)
    more = 0.13 * -(-len(labels) // (columns + 1)) if many else 0.0
    drawn = require_matplotlib()(figsize=(max(width * columns, 6.4), height * rows + more), layout="constrained")
    axes = drawn.subplots(rows, columns, squeeze=False).ravel()
    for ax, panel in zip(axes, panels, strict=False):
        _draw_panel(ax, panel, labels, ours)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    size = 6 if many else 8
    label_width = size / 130 * max(map(len, labels)) + 0.5  # inches, with the line's sample
    handles = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    drawn.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=max(min(len(labels), columns + 1, int(drawn.get_figwidth() // label_width)), 1),
        fontsize=size,
        frameon=False,
        title=textwrap.fill(caption, int(20 * drawn.get_figwidth())),
        title_fontsize=6,
    )
    drawn.suptitle(textwrap.fill(title, int(13 * drawn.get_figwidth())), fontsize=10)
    return drawn


def _draw_panel(ax: Any, panel: Panel, labels: Sequence[str], ours: int) -> None:
    for curve in panel.curves:
        if curve.published:
            _draw_published(ax, curve, 1 + labels.index(curve.label) - ours)
        else:
            _draw_curve(ax, curve, labels.index(curve.label), panel.smaller_is_better)
    if panel.smaller_is_better is not None:
        _draw_front(ax, panel)
    ax.set_xlabel(panel.x_label)
    ax.set_ylabel(panel.y_label)
    if panel.ticks is None:
        ax.set_xlim(left=0)
    else:
        ax.set_xticks(range(len(panel.ticks)), panel.ticks)
    if panel.level is not None:
        ax.axhline(panel.level[0], color="0.3", linestyle="--", linewidth=1)
        ax.annotate(panel.level[1], (1, panel.level[0]), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    low, high = ax.get_ylim()
    if panel.y_range is not None:
        ax.set_ylim(panel.y_range)
    elif panel.y_label == ACCURACY:
        ax.set_ylim(max(low, -2), min(max(high, low + 5), 102))  # error bars may go beyond what accuracies can
    else:
        ax.set_ylim(bottom=0)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_curve(ax: Any, curve: Curve, number: int, smaller_is_better: bool | None) -> None:
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    dashes = DASHES[number // len(COLOURS) % len(DASHES)]
    ax.errorbar(
        curve.x,
        curve.y,
        yerr=curve.y_error,
        label=None if curve.front else curve.label,
        color=colour,
        marker=marker,
        linestyle="none" if curve.front or curve.faint else dashes,
        markersize=4,
        linewidth=1.2,
        elinewidth=0.8,
        capsize=2,
        alpha=0.25 if curve.front or curve.faint else 0.9,
    )
    if curve.x_spread is not None or curve.y_spread is not None:
        wide = {"linestyle": "none", "color": colour, "elinewidth": 3.0, "alpha": 0.35}
        ax.errorbar(curve.x, curve.y, xerr=curve.x_spread, yerr=curve.y_spread, **wide)
    if curve.front:
        x, y = zip(*_front_of(curve.x, curve.y, smaller_is_better), strict=True)
        ax.plot(x, y, label=curve.label, color=colour, marker=marker, linestyle=dashes, markersize=5, linewidth=1.4)


def _draw_published(ax: Any, curve: Curve, number: int) -> None:
    """In grey, with a number for a mark: there may be dozens."""
    ax.plot(curve.x, curve.y, color="0.75", linewidth=0.7, zorder=1)
    look = {"markersize": 4 + 2 * len(str(number)), "markeredgewidth": 0.3, "color": "0.3"}
    ax.plot(curve.x, curve.y, marker=f"${number}$", linestyle="none", label=curve.label, zorder=1, **look)


def _draw_front(ax: Any, panel: Panel) -> None:
    """Light steps along the points that no other one beats."""
    x = [value for curve in panel.curves for value in curve.x]
    y = [value for curve in panel.curves for value in curve.y]
    steps = _front_of(x, y, panel.smaller_is_better)
    ax.step(*zip(*steps, strict=True), where="post", color="0.75", linewidth=5, alpha=0.5, zorder=0)


def _front_of(x: Sequence[float], y: Sequence[float], smaller_is_better: bool | None) -> list[tuple[float, float]]:
    best = front([-value for value in x] if smaller_is_better is False else x, y)
    return [(x[i], y[i]) for i in best]
