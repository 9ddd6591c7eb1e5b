"""The canvas on a terminal while it is being unmasked, one forward after another.

watched = watch(model, "Question", rule="eb", gamma=0.2)      # or watch(model, "Question", sampler)
print(watched.generation.text)
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from dllm_jax import Model
from samplers.checks import check_number
from samplers.config.factory import CanvasSampler
from samplers.config.registry import title
from samplers.engine.engine import Request, requests_of
from samplers.generate import prepare
from samplers.generation import Generation
from samplers.rules import Rule
from samplers.sampler import Result, warn_if_broken
from samplers.text.display import ASCII, END, UNICODE, Glyphs, Speller, printable
from samplers.text.prompts import Prompt
from samplers.trace import compile_steps, steps_of

SHORTEST_FRAME, LONGEST_SHOW = 0.1, 8.0  # seconds that an automatic delay aims at

MASK, FRESH, END_STYLE, BORDER = "dim", "bold reverse green", "dim", "dim"


class Watched(NamedTuple):
    """What `watch` saw.

    Attributes:
        generation: the same as `record` gives.
        seconds: time of the forwards, each a call of its own; drawing and delays are not in it.
        compile_seconds: time before, for compiling a step.
    """

    generation: Generation
    seconds: float
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Frame:
    """One moment of a generation; print it with rich.

    Attributes:
        header: facts for the line above.
        texts: what stands at each position, None where it is masked.
        fresh: positions that the last forward committed.
        block_length: positions between two borders.
        styles: of each position besides, as rich writes them; "" for none.
        whole: draw all of it, and not only what fits the screen.
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
        rows = max(options.max_height - 2, 1)  # the header, and a line that stays free for the cursor
        if console.is_terminal and len(lines) > rows and not self.whole:
            start = min(max(focus - rows // 3, 0), len(lines) - rows)
            lines = lines[start : start + rows]
        yield from lines

    def _lines(self, glyphs: Glyphs, options: ConsoleOptions) -> tuple[list[Text], int]:
        """The canvas, broken between tokens, and the number of the line with the first mask."""
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
        """(text, style, whether it is a mask) of everything in the canvas."""
        for position, text in enumerate(self.texts):
            if position and position % self.block_length == 0:
                yield glyphs.border, BORDER, False
            if text is None:
                yield glyphs.mask, MASK, True
                continue
            style = FRESH if position in self.fresh else END_STYLE if text == END else ""
            own = self.styles[position] if self.styles else ""
            yield printable(text, ascii_only, glyphs.marks), own or style, False


def watch(
    model: Model,
    prompt: Prompt,
    sampler: str | Rule | CanvasSampler | None = None,
    *,
    chat: bool = False,
    system: str | None = None,
    seed: int = 0,
    delay: float | None = None,
    console: Console | None = None,
    keep: bool = True,
    **options: Any,
) -> Watched:
    """Answers one prompt and draws the canvas after every forward.

    Args:
        prompt, sampler, chat, system, seed, options: as in `samplers.generate`, for a single prompt.
        delay: seconds to wait after a frame; by default just long enough that a small model can be followed.
        console: where to draw; the standard output, or the notebook's cell, by default.
        keep: leave the last frame on the screen.

    Raises:
        DllmError: for bad prompts or options; before anything is compiled.
    """
    check_number("delay", delay, 0.0)
    sampler, rows, keys = prepare(model, [prompt], sampler=sampler, chat=chat, system=system, seed=seed, **options)
    (request,) = requests_of(sampler, rows, keys, stop=options.get("stop") or ())
    return watch_request(model, sampler, request, delay=delay, console=console, keep=keep)


def watch_request(
    model: Model,
    sampler: CanvasSampler,
    request: Request,
    *,
    delay: float | None = None,
    console: Console | None = None,
    keep: bool = True,
) -> Watched:
    """`watch` for a request, whose numbers are the sampler's."""
    draw = functools.partial(_canvas, sampler, Speller(model))
    blank = Frame(["compiling", title(sampler)], [None] * sampler.gen_length, (), sampler.width)
    with _screen(console or Console(), keep) as show:
        show(blank)
        compile_seconds = compile_steps(model, sampler, [request])
        for result, took in steps_of(model, sampler, request):
            show(draw(result))
            time.sleep(_automatic(sampler.gen_length, took) if delay is None else delay)
        show(draw(result, last=True))
    warn_if_broken(result, [0])
    return Watched(request.generation, request.seconds, compile_seconds)


@contextlib.contextmanager
def _screen(console: Console, keep: bool) -> Iterator[Callable[[Frame], None]]:
    """Shows frames, each in the place of the one before: on a terminal, or in the output of a notebook's cell."""
    if console.is_jupyter:  # rich's Live would need ipywidgets
        from IPython.display import clear_output

        def show(frame: Frame) -> None:
            clear_output(wait=True)
            console.print(frame)

        yield show
        if not keep:
            clear_output()
        return
    with Live(console=console, auto_refresh=False, transient=not keep) as live:
        yield lambda frame: live.update(frame, refresh=True)


def _automatic(gen_length: int, took: float) -> float:
    """Delay after a forward: a frame stays for a tenth of a second, less where very many may come."""
    return max(min(SHORTEST_FRAME, LONGEST_SHOW / gen_length) - took, 0.0)


def _canvas(sampler: CanvasSampler, spell: Speller, result: Result, last: bool = False) -> Frame:
    """A frame of the only row of a result."""
    decoded_at, nfe, full = result.decoded_at[0].tolist(), int(result.nfe[0]), int(result.full_forwards[0])
    written = [at >= 0 for at in decoded_at]
    fresh = () if last else {i for i, at in enumerate(decoded_at) if at == nfe - 1 and at >= 0}
    header = [
        f"forward {nfe}",
        f"NFE {full} full + {nfe - full} window",
        f"{written.count(False)} masks left",
        title(sampler),
    ]
    return Frame(header, spell(result.tokens[0].tolist(), written), fresh, sampler.width)
