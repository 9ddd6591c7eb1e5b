"""`show`, `compare` and the views that they return."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from dllm_jax import DllmError
from dllm_jax.storage import write_file
from samplers.checks import check_number
from samplers.engine.requests import Request
from samplers.generation import Generation
from samplers.text.display import ASCII, UNICODE, printable
from samplers.viewer import page, picture
from samplers.viewer.colors import SCALE, as_hex, colour_at
from samplers.viewer.terminal import CanvasText
from samplers.viewer.timeline import UNWRITTEN, Cell, Timeline, cells_at, scale_position, timeline_of

ENDINGS = (".html", ".gif", ".png")
COLOURS = ("forward", "confidence")
NARROWEST = 44
"""Columns of a terminal that each of several canvases side by side needs."""

Answer = Generation | Request


def show(answers: Answer | Sequence[Answer], *, colour: str = "forward") -> "View":
    """Shows generations: in a notebook as HTML that steps through the forwards, on a terminal in colours.

    Args:
        answers: what `generate`, `infill` or an `Engine` returned, or a list of them. Edits and full forwards are
            marked in answers made with `trace=True`.
        colour: what the colour of a token means: "forward", the one that wrote it, or "confidence", the model's
            probability of it then.

    Returns:
        The view, to be saved or shown again.

    Raises:
        DllmError: for anything else.
    """
    listed = list(answers) if isinstance(answers, list | tuple) else [answers]
    return view_of(listed, colour=colour).show()


def compare(answers: Mapping[str, Answer] | Sequence[Answer], *, colour: str = "forward") -> "View":
    """Shows generations side by side, forward by forward.

    Args:
        answers: name -> generation, or a list of generations, which are named by their samplers.
        colour: as in `show`.

    Returns:
        The view, to be saved or shown again.

    Raises:
        DllmError: for anything else.
    """
    if isinstance(answers, Mapping):
        return view_of(list(answers.values()), [str(name) for name in answers], colour).show()
    if isinstance(answers, Answer) or not isinstance(answers, Sequence):
        raise DllmError("compare takes several generations; give a dict or a list of them, or use show")
    return view_of(list(answers), [None] * len(answers), colour).show()


def view_of(answers: Sequence[Any], names: Sequence[str | None] | None = None, colour: str = "forward") -> "View":
    """A view, without showing it.

    Args:
        names: of the answers, None for the sampler's name; by default several answers are numbered.

    Raises:
        DllmError: for answers that cannot be shown.
    """
    if colour not in COLOURS:
        raise DllmError(f"colour is {colour!r}; choose one of {', '.join(COLOURS)}")
    if not answers:
        raise DllmError("there is nothing to show; give at least one generation")
    if names is None:
        names = [None] if len(answers) == 1 else [f"{i} of {len(answers)}" for i in range(1, len(answers) + 1)]
    timelines = [timeline_of(_generation_of(one), name) for one, name in zip(answers, names, strict=True)]
    return View(_number_names(timelines), colour)


def check_path(path: str | Path) -> Path:
    """The path to save a view at.

    Raises:
        DllmError: for an ending other than .html, .gif and .png, a folder that does not exist, and pictures without
            the packages to draw them.
    """
    found = Path(path).expanduser()
    if found.suffix.lower() not in ENDINGS:
        raise DllmError(f"{path} has no ending of a view; name a file that ends in {', '.join(ENDINGS)}")
    if not found.parent.is_dir():
        raise DllmError(f"the folder {found.parent} of {found.name} does not exist; make it")
    if found.is_dir():
        raise DllmError(f"{path} is a folder; name a file")
    if found.suffix.lower() != ".html":
        picture.import_tools()
    return found


class View:
    """Generations to look at: the output of a notebook's cell, or a file by `save`.

    Attributes:
        timelines: one per generation.
        colour: what colours mean, "forward" or "confidence".
    """

    def __init__(self, timelines: Sequence[Timeline], colour: str) -> None:
        self.timelines, self.colour = timelines, colour
        self._cell: int | None = None

    def html(self) -> str:
        """An HTML fragment that needs nothing else; a page may have any number of them."""
        return page.fragment(self.timelines, self.colour)

    def save(self, path: str | Path, *, seconds: float | None = None, font: str | Path | None = None) -> Path:
        """Writes a page (.html), a film (.gif) or its last frame (.png), the whole file or nothing.

        Args:
            path: the file; an existing one is replaced.
            seconds: of a frame of a film; by default all of them take 8 s, within bounds.
            font: a TrueType file for pictures; by default DejaVu Sans Mono, which has no Chinese, Japanese or Korean.
                Characters that it lacks are drawn as escapes.

        Returns:
            The path.

        Raises:
            DllmError: for another ending, options without effect, an unreadable font, and a file that cannot be
                written.
        """
        found = check_path(path)
        kind = found.suffix.lower()
        check_number("seconds", seconds, 0.0)
        if kind != ".gif" and seconds is not None:
            raise DllmError(f"seconds has no effect on {found.name}, which is no film; leave it out, or save a .gif")
        if kind == ".html":
            if font is not None:
                raise DllmError(f"font has no effect on {found.name}, whose reader has fonts; leave it out")
            write_file(found, page.full_page(self.timelines, self.colour))
        elif kind == ".gif":
            write_file(found, picture.gif(self.timelines, self.colour, font, seconds))
        else:
            write_file(found, picture.png(self.timelines, self.colour, font))
        return found

    def show(self) -> "View":
        """Shows the view in a notebook's cell, else on the standard output, and returns it."""
        if (cell := _cell_number()) is not None:
            self._display()
            self._cell = cell
        else:
            Console().print(self)
        return self

    def _display(self) -> None:
        from IPython.display import display

        display({"text/html": self.html(), "text/plain": repr(self)}, raw=True)

    def _ipython_display_(self) -> None:
        """Shows the view as the value of a cell, unless the cell has shown it."""
        if self._cell is None or self._cell != _cell_number():
            self._display()

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        names = ", ".join(timeline.name for timeline in self.timelines)
        return f"View({names}; {max(timeline.forwards for timeline in self.timelines)} forwards)"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        last = max(timeline.forwards for timeline in self.timelines)
        frames: list[Any] = [_canvas_text(timeline, self.colour, last) for timeline in self.timelines]
        marks = (ASCII if options.ascii_only else UNICODE).marks
        prompts = [Text(printable(each.prompt, options.ascii_only, marks), style="dim") for each in self.timelines]
        if len(set(map(str, prompts))) == 1:
            yield from filter(None, prompts[:1])
        else:
            frames = [Group(prompt, frame) for prompt, frame in zip(prompts, frames, strict=True)]
        if len(frames) > 1 and options.max_width // len(frames) >= NARROWEST:
            table = Table.grid(padding=(0, 2), expand=True)
            for _ in frames:
                table.add_column(ratio=1)
            table.add_row(*frames)
            yield table
        else:
            yield from frames
        yield _legend(self.colour, last, console)


def _generation_of(answer: Any) -> Generation:
    if isinstance(answer, Request):
        return answer.generation
    if isinstance(answer, Generation):
        return answer
    kind = type(answer).__name__
    raise DllmError(f"a {kind} cannot be shown; give what generate, infill or an Engine returned")


def _number_names(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The timelines, numbered where names repeat."""
    names = [timeline.name for timeline in timelines]
    number = lambda i: f"{names[i]} ({names[: i + 1].count(names[i])})" if names.count(names[i]) > 1 else names[i]
    return [dataclasses.replace(timeline, name=number(i)) for i, timeline in enumerate(timelines)]


def _canvas_text(timeline: Timeline, colour: str, last: int) -> CanvasText:
    """The last state of a canvas."""
    cells = cells_at(timeline, timeline.forwards)
    edits = [f"{timeline.edits} edits"] if timeline.edits else []
    nfe = f"NFE {timeline.full_forwards} full + {timeline.forwards - timeline.full_forwards} window"
    texts, styles = [cell.text for cell in cells], [_style(cell, scale_position(cell, colour, last)) for cell in cells]
    header = [timeline.name, nfe, timeline.speed, *edits]
    return CanvasText(header, texts, (), timeline.block_length, styles, whole=True)


def _style(cell: Cell, position: float | None) -> str:
    """The style of a cell at some position of the scale, as rich writes it."""
    if position is None:
        return "dim" if cell.kind == UNWRITTEN else ""
    ground, ink = colour_at(position).css
    return f"{'underline2 ' if cell.previous else ''}{ink} on {ground}"


def _legend(colour: str, last: int, console: Console) -> Text:
    """The legend of the colours; empty without colours."""
    if console.no_color or console.color_system is None:
        return Text("")
    low, high = ("forward 1 ", f" {last}") if colour == "forward" else ("confidence 0 ", " 1")
    bar = Text(low, style="dim")
    for found in SCALE[::2]:
        bar.append(" ", f"on {as_hex(found.ground)}")
    return bar.append(high, "dim")


def _cell_number() -> int | None:
    """The number of the running notebook cell; None outside of notebooks."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    return shell.execution_count if shell is not None and shell.has_trait("kernel") else None
