"""Timelines as pictures: a canvas after some forward as PNG, all of them one after another as GIF."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dllm_jax import DllmError
from samplers.text.display import UNICODE, printable
from samplers.viewer.colors import RGB, colour_at
from samplers.viewer.timeline import Cell, Timeline, cells_at, page_text, scale_position

PAPER, CARD, INK, DIM, LINE = (251, 250, 247), (255, 255, 255), (29, 29, 31), (109, 105, 99), (220, 216, 208)
FRESH, FULL, MASK = (18, 130, 76), (154, 91, 0), (222, 219, 212)

SIZE, LEADING, MARGIN = 14, 21, 12  # pixels of the letters, from line to line, and around things
LONGEST_FILM, SHORTEST_FRAME, LONGEST_FRAME, HOLD = 8.0, 0.04, 0.4, 2.5  # seconds
COLOURS = 96  # of a GIF: the scale, its letters, and shades between letters and ground


def png(timelines: Sequence[Timeline], colour: str, font: str | Path | None = None) -> bytes:
    """How the canvases ended.

    Raises:
        DllmError: as `gif`.
    """
    drawing = _Drawing(timelines, colour, _font(font))
    for _ in drawing.frames():
        pass
    file = io.BytesIO()
    drawing.image.save(file, format="PNG", optimize=True)
    return file.getvalue()


def gif(
    timelines: Sequence[Timeline], colour: str, font: str | Path | None = None, seconds: float | None = None
) -> bytes:
    """A looping film: a frame before the first forward and one after each; the last is held.

    Args:
        seconds: per frame; by default all of them take 8 s, within bounds.

    Raises:
        DllmError: without Pillow or matplotlib, and for a font that cannot be read.
    """
    drawing = _Drawing(timelines, colour, _font(font))
    palette = _palette(drawing)
    images = [image.quantize(palette=palette, dither=0) for image in _Drawing(timelines, colour, drawing.font).frames()]
    each = min(max(LONGEST_FILM / len(images), SHORTEST_FRAME), LONGEST_FRAME) if seconds is None else seconds
    milliseconds = [max(round(1000 * each), 20)] * len(images)
    milliseconds[-1] = max(round(1000 * HOLD), milliseconds[0])
    file = io.BytesIO()
    more = {"save_all": True, "append_images": images[1:], "duration": milliseconds, "loop": 0}
    images[0].save(file, format="GIF", optimize=True, **more)
    return file.getvalue()


def import_tools() -> Any:
    """Pillow's ImageFont and the file of matplotlib's monospaced font.

    Raises:
        DllmError: when one of them is not installed.
    """
    try:
        import matplotlib
        from PIL import ImageFont
    except ImportError:
        raise DllmError("pictures need Pillow and matplotlib; install them by pip install 'dllm_jax[view]'") from None
    return ImageFont, Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"


def _font(file: str | Path | None) -> Any:
    fonts, usual = import_tools()
    try:
        return fonts.truetype(str(file or usual), SIZE)
    except OSError as error:
        raise DllmError(f"the font {file or usual} could not be read ({error}); name a TrueType file") from None


def _palette(drawing: "_Drawing") -> Any:
    """An image with the palette of all frames, made of the last frame and of a middle one with masks."""
    from PIL import Image

    middle, number = None, drawing.last // 2
    for forward, image in enumerate(drawing.frames()):
        if forward == number:
            middle = image.copy()
    assert middle is not None
    both = Image.new("RGB", (middle.width, 2 * middle.height))
    both.paste(middle, (0, 0))
    both.paste(drawing.image, (0, middle.height))
    return both.quantize(COLOURS)


class _Drawing:
    """An image that frames are drawn on, each over the one before.

    Attributes:
        image: the current frame.
        font: for all text.
        last: forwards of the longest timeline.
    """

    def __init__(self, timelines: Sequence[Timeline], colour: str, font: Any) -> None:
        from PIL import Image, ImageDraw

        self.font, self.last = font, max(timeline.forwards for timeline in timelines)
        columns, characters = _grid(len(timelines))
        self._width = round(characters * font.getlength("m")) + 2 * MARGIN
        text = _Text(font)
        panels = [_Panel(timeline, colour, self.last, self._width, text) for timeline in timelines]
        prompts = {timeline.prompt for timeline in timelines}
        self._prompt = prompts.pop() if len(prompts) == 1 else ""
        across = columns * (self._width + MARGIN) - MARGIN
        lines = text.wrap(page_text(self._prompt), across)[-3:] if self._prompt else []
        top, place = MARGIN + LEADING * len(lines) + (MARGIN if lines else 0), list[tuple[int, int]]()
        for first in range(0, len(panels), columns):
            row = panels[first : first + columns]
            place += [(MARGIN + i * (self._width + MARGIN), top) for i in range(len(row))]
            top += max(panel.height for panel in row) + MARGIN
        used = min(columns, len(panels))
        size = MARGIN + used * (self._width + MARGIN), top + LEADING + MARGIN
        self.image = Image.new("RGB", size, PAPER)
        self._draw = ImageDraw.Draw(self.image)
        for number, line in enumerate(lines):
            self._draw.text((MARGIN, MARGIN + number * LEADING), line, DIM, font)
        self._panels = list(zip(panels, place, strict=True))
        self._draw_legend(top, colour)

    def frames(self) -> Iterator[Any]:
        """The image before the first forward and after each; always the same object."""
        for panel, at in self._panels:
            panel.begin(self._draw, at)
        for forward in range(self.last + 1):
            for panel, at in self._panels:
                panel.draw(self._draw, at, forward)
            yield self.image

    def _draw_legend(self, top: int, colour: str) -> None:
        low, high = ("forward 1", str(self.last)) if colour == "forward" else ("confidence 0", "1")
        x, y = MARGIN, top
        self._draw.text((x, y), low, DIM, self.font)
        x += round(self.font.getlength(low + " "))
        for i in range(100):
            self._draw.rectangle((x + i, y + 4, x + i, y + 15), colour_at(i / 99).ground)
        self._draw.text((x + 108, y), high, DIM, self.font)
        x += round(self.font.getlength(high)) + 132
        marks = [("written now", FRESH)]
        marks += [("full forward", FULL)] if any(panel.timeline.full for panel, _ in self._panels) else []
        marks += [("was another token", INK)] if any(panel.timeline.revised for panel, _ in self._panels) else []
        for name, mark in marks:
            ground = mark if mark == FULL else None
            if mark == INK:
                self._draw.line((x, y + 11, x + 11, y + 11), mark)
                self._draw.line((x, y + 13, x + 11, y + 13), mark)
            else:
                self._draw.rectangle((x, y + 4, x + 11, y + 15), ground, mark, 2)
            self._draw.text((x + 18, y), name, DIM, self.font)
            x += round(self.font.getlength(name)) + 42


class _Text:
    """Texts as a font can draw them."""

    def __init__(self, font: Any) -> None:
        self.font = font
        self._missing = bytes(font.getmask("\uffff"))
        self._drawn: dict[str, str] = {}

    def drawable(self, text: str) -> str:
        """The text, with escapes for characters that the font lacks."""
        return "".join(self._drawn.get(c) or self._check_glyph(c) for c in text)

    def width(self, text: str) -> int:
        return round(self.font.getlength(text))

    def wrap(self, text: str, width: int) -> list[str]:
        """Lines of at most `width` pixels."""
        lines = [""]
        for c in self.drawable(text):
            if c == "\n" or self.width(lines[-1] + c) > width:
                lines.append("")
            lines[-1] += c if c != "\n" else ""
        return lines

    def _check_glyph(self, c: str) -> str:
        lacks = c != "\n" and bytes(self.font.getmask(c)) == self._missing
        self._drawn[c] = printable(c, ascii_only=True) if lacks else c
        return self._drawn[c]


class _Panel:
    """One timeline in the image: its name, facts, canvas and forwards."""

    def __init__(self, timeline: Timeline, colour: str, last: int, width: int, text: _Text) -> None:
        self.timeline, self._colour, self._last, self._width, self._text = timeline, colour, last, width, text
        self._boxes, lines = self._place_cells()
        self._canvas = 2 * LEADING + 4
        self._chart = self._canvas + lines * LEADING + 2 * MARGIN + 4
        self.height = self._chart + 24
        self._cells: list[Cell] = []
        self._fresh: set[int] = set()

    def _place_cells(self) -> tuple[list[tuple[int, int, int]], int]:
        """(x, line, width) of each cell, wide enough for all of its texts, and the number of lines."""
        widest, breaks = [self._text.width(UNICODE.mask)] * self.timeline.length, set[int]()
        for frame in self.timeline.frames:
            for change in frame:
                text = self._text.drawable(page_text(change.text))
                widest[change.position] = max(widest[change.position], self._text.width(text.replace("\n", "")))
        for position, cell in enumerate(cells_at(self.timeline, self.timeline.forwards)):
            breaks |= {position} if "\n" in cell.text else set()
        boxes, x, line, room = list[tuple[int, int, int]](), 0, 0, self._width - 2 * MARGIN
        for position, width in enumerate(widest):
            x += 9 if position % self.timeline.block_length == 0 and x else 0
            if x and x + width > room:
                x, line = 0, line + 1
            boxes.append((x, line, min(width, room)))
            x += width
            if position in breaks:
                x, line = 0, line + 1
        return boxes, line + 1

    def begin(self, draw: Any, at: tuple[int, int]) -> None:
        """Draws the empty canvas."""
        x, y = at
        self._cells, self._fresh = [Cell() for _ in range(self.timeline.length)], set()
        draw.text((x, y), self._shorten(self.timeline.name), INK, self._text.font)
        draw.rectangle((x, y + self._canvas, x + self._width, y + self._chart - 8), CARD, LINE)
        for position in range(self.timeline.length):
            self._draw_cell(draw, at, position)
            if position and position % self.timeline.block_length == 0:
                left, top = self._corner_of(at, position)
                draw.line((left - 5, top + 1, left - 5, top + LEADING - 3), LINE)

    def draw(self, draw: Any, at: tuple[int, int], forward: int) -> None:
        """Draws what a forward changed."""
        x, y = at
        facts = self._facts(forward)
        if forward <= self.timeline.forwards:
            changes = self.timeline.frames[forward]
            for change in changes:
                self._cells[change.position].apply(change, forward)
            before = self._fresh
            at_now = (change.position for change in changes if self._cells[change.position].at == forward)
            self._fresh = set(at_now) if forward else set()
            for position in {change.position for change in changes} | before:
                self._draw_cell(draw, at, position)
        elif self._fresh:
            before, self._fresh = self._fresh, set()
            for position in before:
                self._draw_cell(draw, at, position)
        draw.rectangle((x, y + LEADING, x + self._width, y + 2 * LEADING), PAPER)
        draw.text((x, y + LEADING), self._shorten(facts), DIM, self._text.font)
        self._draw_bars(draw, at, forward)

    def _facts(self, forward: int) -> str:
        timeline = self.timeline
        done = sum(cell.at is not None for cell in self._cells)
        if forward < timeline.forwards:
            return f"forward {forward} of {timeline.forwards}, {done} written"
        return f"NFE {timeline.forwards}, {timeline.speed}"

    def _shorten(self, text: str) -> str:
        text = self._text.drawable(text)
        while self._text.width(text) > self._width:
            text = text[:-2] + "…"
        return text

    def _corner_of(self, at: tuple[int, int], position: int) -> tuple[int, int]:
        x, line, _ = self._boxes[position]
        return at[0] + MARGIN + x, at[1] + self._canvas + MARGIN + line * LEADING

    def _draw_cell(self, draw: Any, at: tuple[int, int], position: int) -> None:
        left, top = self._corner_of(at, position)
        cell, width = self._cells[position], self._boxes[position][2]
        right, bottom = left + max(width - 2, 0), top + LEADING - 3
        ground, ink = self._colours(cell)
        draw.rectangle((left, top, left + width - 1, bottom), CARD)
        if cell.kind is None:
            draw.rectangle((left, top + 3, max(right - 1, left), bottom - 3), MASK)
        else:
            draw.rectangle((left, top, right, bottom), ground)
            draw.text((left, top), self._text.drawable(page_text(cell.text)).replace("\n", ""), ink, self._text.font)
        if cell.previous:
            for below in (0, 2):
                draw.line((left, bottom - below, right, bottom - below), ink if cell.kind is not None else DIM)
        if position in self._fresh:
            draw.rectangle((left, top, right, bottom), None, FRESH, 2)

    def _colours(self, cell: Cell) -> tuple[RGB, RGB]:
        position = scale_position(cell, self._colour, self._last)
        return (CARD, DIM) if position is None else tuple(colour_at(position))  # type: ignore[return-value]

    def _draw_bars(self, draw: Any, at: tuple[int, int], forward: int) -> None:
        """Draws the tokens of each forward up to this one, and marks full forwards."""
        x, base = at[0], at[1] + self._chart + 16
        draw.rectangle((x, base - 16, x + self._width, base + 6), PAPER)
        counts = [sum(change.kind <= 1 for change in frame) for frame in self.timeline.frames]
        most, step = max([1, *counts[1:]]), self._width / self._last if self._last else self._width
        for k in range(1, min(forward, self.timeline.forwards) + 1):
            left, right = round(x + (k - 1) * step), max(round(x + k * step) - 2, round(x + (k - 1) * step))
            draw.rectangle((left, base - round(15 * counts[k] / most), right, base), DIM)
            if self.timeline.full is not None and k in self.timeline.full:
                draw.rectangle((left, base + 2, right, base + 5), FULL)


def _grid(panels: int) -> tuple[int, int]:
    """Columns of panels, and characters per line of each."""
    return (1, 80) if panels == 1 else (2, 48) if panels <= 4 else (3, 40)
