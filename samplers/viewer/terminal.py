"""The canvas on a terminal while it is being unmasked, one forward after another."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.live import Live
from rich.text import Text

from samplers.checks import check_number
from samplers.engine.requests import Request, Update
from samplers.text.display import ASCII, END, UNICODE, Glyphs, printable
from samplers.viewer.timeline import Replay

SHORTEST_FRAME, LONGEST_SHOW = 0.1, 8.0  # seconds that an automatic delay aims at

MASK, FRESH, END_STYLE, BORDER = "dim", "bold reverse green", "dim", "dim"


@dataclasses.dataclass(frozen=True)
class CanvasText:
    """A canvas after a forward, for rich to print.

    Attributes:
        header: facts in the line above the canvas.
        texts: of each position; None where it is masked.
        fresh: positions that the last forward committed.
        block_length: positions between two borders.
        styles: of each position, in rich's syntax; "" for none.
        whole: draw all of it, not only what fits the screen.
    """

    header: Sequence[str]
    texts: Sequence[str | None]
    fresh: Collection[int]
    block_length: int
    styles: Sequence[str] = ()
    whole: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII if options.ascii_only else UNICODE
        header = printable(f" {glyphs.dot} ".join(self.header).replace("×", glyphs.times), options.ascii_only)
        yield Text(header, style="bold", no_wrap=True, overflow="crop")
        lines, focus = self._lines(glyphs, options)
        rows = max(options.max_height - 2, 1)  # the header, and a free line for the cursor
        if console.is_terminal and len(lines) > rows and not self.whole:
            start = min(max(focus - rows // 3, 0), len(lines) - rows)
            lines = lines[start : start + rows]
        yield from lines

    def _lines(self, glyphs: Glyphs, options: ConsoleOptions) -> tuple[list[Text], int]:
        """The canvas, wrapped between tokens, and the number of the line with the first mask."""
        line = functools.partial(Text, no_wrap=True, overflow="crop")
        lines, used, focus, width = [line()], 0, None, max(options.max_width, 1)
        for piece, style, masked in self._pieces(glyphs, options.ascii_only):
            for part in chop_cells(piece, width) if cell_len(piece) > width else [piece]:
                if used + cell_len(part) > width:
                    lines, used = [*lines, line()], 0
                lines[-1].append(part, style)
                used += cell_len(part)
            focus = len(lines) - 1 if masked and focus is None else focus
        return lines, len(lines) - 1 if focus is None else focus

    def _pieces(self, glyphs: Glyphs, ascii_only: bool) -> Iterator[tuple[str, str, bool]]:
        """(text, style, whether it is a mask) of every token and border of the canvas."""
        for position, text in enumerate(self.texts):
            if position and position % self.block_length == 0:
                yield glyphs.border, BORDER, False
            if text is None:
                yield glyphs.mask, MASK, True
                continue
            style = FRESH if position in self.fresh else END_STYLE if text == END else ""
            own = self.styles[position] if self.styles else ""
            yield printable(text, ascii_only, glyphs.marks), own or style, False


class LiveView:
    """Draws the canvas after every forward; an `on_update` of `generate`, for one prompt at a time.

    with LiveView() as live:
        answer = generate(model, "Question", rule="eb", gamma=0.2, on_update=live)
    """

    def __init__(self, *, delay: float | None = None, console: Console | None = None, keep: bool = True) -> None:
        """
        Args:
            delay: seconds to wait after each forward; by default so long that you can follow a small model.
            console: where to draw; by default the standard output or the notebook's cell.
            keep: leave the last canvas on the screen.

        Raises:
            DllmError: for a negative delay.
        """
        check_number("delay", delay, 0.0)
        self._delay, self._keep, self._console = delay, keep, console or Console()
        self._stack = contextlib.ExitStack()
        self._request: Request | None = None
        self._drawn_at = time.perf_counter()

    def __enter__(self) -> "LiveView":
        self._show = self._stack.enter_context(_screen(self._console, self._keep))
        self._show(Text("compiling", style="bold", no_wrap=True, overflow="crop"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def __call__(self, update: Update) -> None:
        """Draws the canvas of a request after a step."""
        if update.request is not self._request:
            self._begin(update.request)
        trace, took = self._trace, time.perf_counter() - self._drawn_at
        self._replay.advance(update.result, update.nfe, ended=update.done)
        self._draw(update.nfe, int(update.result.full_forwards[0]), update.nfe)
        automatic = max(min(SHORTEST_FRAME, LONGEST_SHOW / len(trace.given)) - took, 0.0)
        time.sleep(automatic if self._delay is None else self._delay)
        self._drawn_at = time.perf_counter()
        if update.done:
            self._draw(update.nfe, int(update.result.full_forwards[0]), None)

    def _begin(self, request: Request) -> None:
        self._request, self._trace = request, request.trace
        self._replay, self._drawn_at = Replay(self._trace), time.perf_counter()
        self._draw(0, 0, None)

    def _draw(self, nfe: int, full: int, fresh: int | None) -> None:
        """Draws the cells, and marks those that the forward `fresh` wrote."""
        texts = [None if cell.kind is None else cell.text for cell in self._replay.cells]
        marked = {i for i, cell in enumerate(self._replay.cells) if fresh and cell.at == fresh}
        counts = [f"NFE {full} full + {nfe - full} window", f"{texts.count(None)} masks left"]
        header = [f"forward {nfe}", *counts, self._trace.sampler]
        self._show(CanvasText(header, texts, marked, self._trace.block_length))


@contextlib.contextmanager
def _screen(console: Console, keep: bool) -> Iterator[Callable[[ConsoleRenderable], None]]:
    """Shows canvases, each in place of the one before, on a terminal or in the output of a notebook's cell."""
    if console.is_jupyter:  # rich's Live would need ipywidgets
        from IPython.display import clear_output

        def show(frame: ConsoleRenderable) -> None:
            clear_output(wait=True)
            console.print(frame)

        yield show
        if not keep:
            clear_output()
        return
    with Live(console=console, auto_refresh=False, transient=not keep) as live:
        yield lambda frame: live.update(frame, refresh=True)
