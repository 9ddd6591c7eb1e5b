"""`show` and `compare`: generations as people look at them."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from dllm_jax import DllmError
from samplers.checks import check_number
from samplers.cli.outputs import write
from samplers.engine.engine import Request
from samplers.generation import Generation
from samplers.text.display import ASCII, UNICODE, printable
from samplers.viewer import page, picture
from samplers.viewer.colors import SCALE, as_hex, colour_at
from samplers.viewer.terminal import Frame, Watched
from samplers.viewer.timeline import UNWRITTEN, Cell, Story, cells_at, share_of, story_of

ENDINGS = (".html", ".gif", ".png")
COLOURS = ("forward", "confidence")
NARROWEST = 44
"""Columns of a terminal that a canvas needs to stand beside another."""

Shown = Generation | Request | Watched


def show(answers: Shown | Sequence[Shown], *, colour: str = "forward") -> "View":
    """Shows generations: in a notebook as HTML that goes through the forwards, on a terminal in colours.

    Args:
        answers: what `generate`, `infill`, `record`, `watch` or an `Engine` gave, or a list of them. Edits and full
            forwards are marked where they are known, which is what `record` and `watch` are for.
        colour: what the colour of a token means: "forward", the one that wrote it, or "confidence", the model's
            probability of it then.

    Returns:
        The view, to be saved or shown again.

    Raises:
        DllmError: for anything else.
    """
    listed = list(answers) if isinstance(answers, list | tuple) and not isinstance(answers, Watched) else [answers]
    return view_of(listed, colour=colour).shown()


def compare(answers: Mapping[str, Shown] | Sequence[Shown], *, colour: str = "forward") -> "View":
    """Shows generations side by side, forward by forward.

    Args:
        answers: name -> generation, or a list of generations that are called by their samplers.
        colour: as in `show`.

    Returns:
        The view, to be saved or shown again.

    Raises:
        DllmError: for anything else.
    """
    if isinstance(answers, Mapping):
        return view_of(list(answers.values()), [str(name) for name in answers], colour).shown()
    if isinstance(answers, Shown) or not isinstance(answers, Sequence):
        raise DllmError("compare takes several generations; give a dict or a list of them, or use show")
    return view_of(list(answers), [None] * len(answers), colour).shown()


def view_of(answers: Sequence[Any], names: Sequence[str | None] | None = None, colour: str = "forward") -> "View":
    """A view, which is not shown yet.

    Args:
        names: of the answers, None for the sampler's; by default they are numbered where there are several.

    Raises:
        DllmError: for answers that cannot be shown.
    """
    if colour not in COLOURS:
        raise DllmError(f"colour is {colour!r}; choose one of {', '.join(COLOURS)}")
    if not answers:
        raise DllmError("there is nothing to show; give at least one generation")
    if names is None:
        names = [None] if len(answers) == 1 else [f"{i} of {len(answers)}" for i in range(1, len(answers) + 1)]
    stories = [story_of(_generation(one), name) for one, name in zip(answers, names, strict=True)]
    return View(_told_apart(stories), colour)


def check_path(path: str | Path) -> Path:
    """Where a view can be saved.

    Raises:
        DllmError: for another ending than .html, .gif and .png, a folder that does not exist, and pictures where there
            is nothing to draw them with.
    """
    found = Path(path).expanduser()
    if found.suffix.lower() not in ENDINGS:
        raise DllmError(f"{path} has no ending of a view; name a file that ends in {', '.join(ENDINGS)}")
    if not found.parent.is_dir():
        raise DllmError(f"the folder {found.parent} of {found.name} does not exist; make it")
    if found.is_dir():
        raise DllmError(f"{path} is a folder; name a file")
    if found.suffix.lower() != ".html":
        picture.require()
    return found


class View:
    """Generations as people look at them: a notebook's cell shows it, `save` writes it.

    Attributes:
        stories: what happened on each canvas.
        colour: what colours mean, "forward" or "confidence".
    """

    def __init__(self, stories: Sequence[Story], colour: str) -> None:
        self.stories, self.colour = stories, colour
        self._cell: int | None = None

    def html(self) -> str:
        """A part of a page that needs nothing else; any number of them may be in one."""
        return page.part(self.stories, self.colour)

    def save(self, path: str | Path, *, seconds: float | None = None, font: str | Path | None = None) -> Path:
        """Writes a page (.html), a film (.gif) or its end (.png), all of it or nothing.

        Args:
            path: where; a file that is there is replaced.
            seconds: of a frame of a film; by default all of them take 8 s, within bounds.
            font: a TrueType file for pictures; by default DejaVu Sans Mono, which has no Chinese, Japanese or Korean.
                Characters that it lacks are drawn as escapes.

        Returns:
            The path.

        Raises:
            DllmError: for another ending, options that have no effect, a font that cannot be read, and where the file
                cannot be written.
        """
        found = check_path(path)
        kind = found.suffix.lower()
        check_number("seconds", seconds, 0.0)
        if kind != ".gif" and seconds is not None:
            raise DllmError(f"seconds has no effect on {found.name}, which is no film; leave it out, or save a .gif")
        if kind == ".html":
            if font is not None:
                raise DllmError(f"font has no effect on {found.name}, whose reader has fonts; leave it out")
            write(found, page.page(self.stories, self.colour))
        elif kind == ".gif":
            write(found, picture.gif(self.stories, self.colour, font, seconds))
        else:
            write(found, picture.png(self.stories, self.colour, font))
        return found

    def shown(self) -> "View":
        """Itself, when it has been shown: in a notebook's cell, else on the standard output."""
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
        """Shows it as the value of a cell, unless that cell has shown it already."""
        if self._cell is None or self._cell != _cell_number():
            self._display()

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        names = ", ".join(story.name for story in self.stories)
        return f"View({names}; {max(story.forwards for story in self.stories)} forwards)"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        last = max(story.forwards for story in self.stories)
        frames: list[Any] = [_frame(story, self.colour, last) for story in self.stories]
        marks = (ASCII if options.ascii_only else UNICODE).marks
        prompts = [Text(printable(story.prompt, options.ascii_only, marks), style="dim") for story in self.stories]
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


def _generation(answer: Any) -> Generation:
    if isinstance(answer, Watched | Request):
        return answer.generation
    if isinstance(answer, Generation):
        return answer
    kind = type(answer).__name__
    raise DllmError(f"a {kind} cannot be shown; give what generate, infill, record, watch or an Engine gave")


def _told_apart(stories: Sequence[Story]) -> list[Story]:
    """The stories, numbered where they have the same name."""
    names = [story.name for story in stories]
    number = lambda i: f"{names[i]} ({names[: i + 1].count(names[i])})" if names.count(names[i]) > 1 else names[i]
    return [dataclasses.replace(story, name=number(i)) for i, story in enumerate(stories)]


def _frame(story: Story, colour: str, last: int) -> Frame:
    """How a canvas ended."""
    cells = cells_at(story, story.forwards)
    edits = [f"{story.edits} edits"] if story.edits else []
    nfe = f"NFE {story.full_forwards} full + {story.forwards - story.full_forwards} window"
    texts, styles = [cell.text for cell in cells], [_style(cell, share_of(cell, colour, last)) for cell in cells]
    return Frame([story.name, nfe, story.speed, *edits], texts, (), story.block_length, styles, whole=True)


def _style(cell: Cell, share: float | None) -> str:
    """Of a cell at some share of the scale, as rich writes it."""
    if share is None:
        return "dim" if cell.kind == UNWRITTEN else ""
    ground, ink = colour_at(share).css
    return f"{'underline2 ' if cell.was else ''}{ink} on {ground}"


def _legend(colour: str, last: int, console: Console) -> Text:
    """What the colours mean; nothing where there are none."""
    if console.no_color or console.color_system is None:
        return Text("")
    low, high = ("forward 1 ", f" {last}") if colour == "forward" else ("confidence 0 ", " 1")
    bar = Text(low, style="dim")
    for found in SCALE[::2]:
        bar.append(" ", f"on {as_hex(found.ground)}")
    return bar.append(high, "dim")


def _cell_number() -> int | None:
    """Of the notebook's cell that runs; None elsewhere."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    return shell.execution_count if shell is not None and shell.has_trait("kernel") else None
