"""A `Trace` replayed forward by forward as a `Timeline`, which all viewers draw."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dllm_jax import DllmError
from samplers.generation import Generation, Trace
from samplers.sampler import Result
from samplers.text.display import END, Speller, printable

WRITTEN, EDITED, REOPENED, GIVEN, UNWRITTEN, RESPELLED = range(6)
"""Why a cell changes: a forward wrote it, replaced its token, or masked it again; it was given; it is after the end,
where nothing was written; its token is the same, but new neighbours change its text."""

PAGE_MARKS = {"\n": "↵\n", "\t": "⇥", END: "∎"}
"""Marks of characters; a line break is kept after its mark."""


def page_text(text: str) -> str:
    """A token's text for a page or a picture, without control characters except the line break after its mark."""
    return printable(text, marks=PAGE_MARKS)


class CellChange(NamedTuple):
    """A change of a cell by a forward.

    Attributes:
        position: of the canvas.
        kind: one of the above.
        token: its id, -1 where the cell is masked.
        text: its own, as a `Speller` gives it; "" where the cell is masked.
        confidence: the model's probability of the token in that forward; None where no forward chose it.
    """

    position: int
    kind: int
    token: int
    text: str
    confidence: float | None


@dataclasses.dataclass
class Cell:
    """One position of a canvas after some forward.

    Attributes:
        kind, token, text, confidence: as in `CellChange`; None, -1, "" and None where it is masked.
        at: the forward, from 1, that wrote it last; None where none did.
        previous: texts of the tokens that stood there before.
    """

    kind: int | None = None
    token: int = -1
    text: str = ""
    confidence: float | None = None
    at: int | None = None
    previous: tuple[str, ...] = ()

    def apply(self, change: CellChange, forward: int) -> None:
        """Applies a change by a forward, from 1; 0 is the initial canvas."""
        if change.kind in (EDITED, REOPENED):
            self.previous = (*self.previous, self.text)
        if change.kind in (WRITTEN, EDITED):
            self.at = forward
        elif change.kind == REOPENED:
            self.at = None
        self.kind = None if change.kind == REOPENED else self.kind if change.kind == RESPELLED else change.kind
        self.token, self.text, self.confidence = change.token, change.text, change.confidence


class Replay:
    """The canvas of one generation, brought up to date by its results.

    Attributes:
        cells: all positions, in their current state.
    """

    def __init__(self, trace: Trace, spell: Speller | None = None) -> None:
        """
        Args:
            trace: its vocabulary and given positions are used, its steps are not.
            spell: the vocabulary's speller, if there is one already.
        """
        self.cells = [Cell() for _ in trace.given]
        self._given, self._spell = trace.given, spell or Speller(trace)

    def advance(self, result: Result, forward: int, ended: bool) -> list[CellChange]:
        """Brings the cells to their state after a forward.

        Args:
            result: on the host, with a batch of one, after that forward or a later one; of a later one it takes what
                was written until that forward, as if nothing had been replaced since.
            forward: forwards so far.
            ended: this is the last forward, after which unwritten positions hold end tokens.

        Returns:
            What changed.
        """
        length = len(self.cells)
        tokens, decoded_at, logprobs = (
            np.asarray(x)[0, :length] for x in (result.tokens, result.decoded_at, result.logprobs)
        )
        written = (decoded_at >= 0) & (decoded_at < forward)
        shown = written | self._given | ended
        kinds = [self._kind(i, shown[i], written[i], int(tokens[i])) for i in range(length)]
        if all(kind is None for kind in kinds):
            return []
        changes, texts = list[CellChange](), self._spell(tokens.tolist(), shown.tolist())
        for i, (kind, text) in enumerate(zip(kinds, texts, strict=True)):
            if kind == REOPENED:
                changes.append(CellChange(i, kind, -1, "", None))
            elif kind is not None or (self.cells[i].kind is not None and self.cells[i].text != text):
                kind = RESPELLED if kind is None else kind
                changes.append(CellChange(i, kind, int(tokens[i]), text or "", _probability(logprobs[i])))
        for change in changes:
            self.cells[change.position].apply(change, forward)
        return changes

    def _kind(self, position: int, shown: bool, written: bool, token: int) -> int | None:
        """Why a cell changes, None where it does not."""
        cell = self.cells[position]
        if not shown:
            return None if cell.kind is None else REOPENED
        if cell.kind is not None:
            return EDITED if cell.token != token else None
        return GIVEN if self._given[position] else WRITTEN if written else UNWRITTEN


def _probability(logprob: float) -> float | None:
    return math.exp(min(float(logprob), 0.0)) if math.isfinite(logprob) else None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One generation. G positions, N forwards.

    Attributes:
        name: of the sampler, or another that was chosen.
        prompt: its text.
        length: G.
        block_length: positions between two borders.
        tokens: of the answer.
        full_forwards, edits: how many.
        frames: N + 1 lists of changes: what the canvas comes with, then what each forward did.
        full: forwards, from 1, that covered the whole sequence; None where only the end is known.
        updated: forwards, from 1, whose keys and values were all stored for later ones; likewise.
    """

    name: str
    prompt: str
    length: int
    block_length: int
    tokens: int
    full_forwards: int
    edits: int
    frames: Sequence[Sequence[CellChange]]
    full: Sequence[int] | None
    updated: Sequence[int] | None

    @property
    def forwards(self) -> int:
        """N."""
        return len(self.frames) - 1

    @property
    def revised(self) -> bool:
        """Whether a token that was written is known to have changed."""
        return any(change.kind in (EDITED, REOPENED) for frame in self.frames for change in frame)

    @property
    def speed(self) -> str:
        """Answer tokens per forward, for people."""
        return f"{self.tokens / max(self.forwards, 1):.2f} tokens per forward"

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON: every text once, and a change as [position, kind, id, number of its text, confidence in
        thousandths or -1]."""
        texts: dict[str, int] = {}
        short = lambda change: [
            change.position,
            change.kind,
            change.token,
            texts.setdefault(page_text(change.text), len(texts)),
            -1 if change.confidence is None else round(1000 * change.confidence),
        ]
        frames = [[short(change) for change in frame] for frame in self.frames]
        own = {"prompt": page_text(self.prompt), "speed": self.speed, "frames": frames, "texts": list(texts)}
        return {**vars(self), **own}


def cells_at(timeline: Timeline, forward: int) -> list[Cell]:
    """All cells after this many forwards."""
    cells = [Cell() for _ in range(timeline.length)]
    for number, frame in enumerate(timeline.frames[: forward + 1]):
        for change in frame:
            cells[change.position].apply(change, number)
    return cells


def scale_position(cell: Cell, colour: str, last: int) -> float | None:
    """A cell's place on the scale of colours, in [0, 1]; None where no forward wrote it.

    Args:
        colour: what colours mean, "forward" or "confidence".
        last: forwards of the longest timeline.
    """
    if cell.at is None:
        return None
    return cell.confidence if colour == "confidence" else (cell.at - 1) / max(last - 1, 1)


def timeline_of(generation: Generation, name: str | None = None) -> Timeline:
    """The timeline of an answer.

    Raises:
        DllmError: for an answer without a trace, which was made by hand.
    """
    trace = generation.trace
    if trace is None:
        raise DllmError("this Generation has no trace; show what generate, infill or an Engine returned")
    spell = Speller(trace)
    end = trace.steps[-1]
    complete = len(trace.steps) > 1 or end.nfe[0] <= 1  # the end is the only forward
    return Timeline(
        name=trace.sampler if name is None else name,
        prompt="".join(text or "" for text in spell(trace.prompt, [True] * len(trace.prompt))),
        length=len(trace.given),
        block_length=trace.block_length,
        tokens=len(generation.tokens),
        full_forwards=generation.full_forwards,
        edits=int(end.edits[0]),
        frames=list(_frames(trace, spell)),
        full=_forwards(trace.steps, "full_forwards") if complete else None,
        updated=_forwards(trace.steps, "cache_updates") if complete else None,
    )


def _forwards(steps: Sequence[Result], count: str) -> list[int]:
    """Forwards, from 1, in which a count grew."""
    counts = [0, *(int(getattr(step, count)[0]) for step in steps)]
    return [int(step.nfe[0]) for step, before, now in zip(steps, counts, counts[1:], strict=False) if now > before]


def _frames(trace: Trace, spell: Speller) -> Iterator[list[CellChange]]:
    """The initial canvas, then the changes of each forward."""
    replay, end = Replay(trace, spell), int(trace.steps[-1].nfe[0])
    by_forward, step = {int(step.nfe[0]): step for step in trace.steps}, trace.steps[0]
    for forward in range(end + 1):
        step = by_forward.get(forward, step)
        yield replay.advance(step, forward, ended=forward == end)
