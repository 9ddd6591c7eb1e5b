"""What happened on a canvas, forward by forward, as pages and pictures draw it."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dllm_jax import DllmError
from samplers.generation import Generation, Moment, Trace
from samplers.text.display import END, Speller, printable

WRITTEN, EDITED, REOPENED, GIVEN, UNWRITTEN, SPELLED = range(6)
"""Why a cell changes: a forward wrote it, put another token there, or opened it again; it came with the canvas; it lies
behind the end, where nothing was written; its token is the same, and looks different beside new neighbours."""

PAGE_MARKS = {"\n": "↵\n", "\t": "⇥", END: "∎"}
"""Characters that need a mark; a line break is drawn and made."""


def seen(text: str) -> str:
    """A token's text on a page or a picture: nothing in it steers anything, but for the line break behind its mark."""
    return printable(text, marks=PAGE_MARKS)


class Change(NamedTuple):
    """What a forward does to a cell.

    Attributes:
        position: of the canvas.
        kind: one of the above.
        token: its id, -1 where the cell is open.
        text: its own, as a `Speller` gives it; "" where the cell is open.
        confidence: the model's probability of the token in that forward; None where no forward chose it.
    """

    position: int
    kind: int
    token: int
    text: str
    confidence: float | None


@dataclasses.dataclass(frozen=True)
class Story:
    """One generation. G positions, N forwards.

    Attributes:
        name: the sampler, or as it was called.
        prompt: its text.
        length: G.
        block_length: positions between two borders.
        tokens: of the answer.
        full_forwards, edits: how many.
        frames: N + 1 lists of changes: what the canvas comes with, then what each forward did.
        full: forwards, from 1, that covered the whole sequence; None where that was not recorded.
        updated: forwards, from 1, whose keys and values were all stored for later ones; likewise.
    """

    name: str
    prompt: str
    length: int
    block_length: int
    tokens: int
    full_forwards: int
    edits: int
    frames: Sequence[Sequence[Change]]
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

    def told(self) -> dict[str, Any]:
        """All of it as JSON: every text once, and a change as [position, kind, id, number of its text, confidence in
        thousandths or -1]."""
        texts: dict[str, int] = {}
        short = lambda change: [
            change.position,
            change.kind,
            change.token,
            texts.setdefault(seen(change.text), len(texts)),
            -1 if change.confidence is None else round(1000 * change.confidence),
        ]
        frames = [[short(change) for change in frame] for frame in self.frames]
        return {**vars(self), "prompt": seen(self.prompt), "speed": self.speed, "frames": frames, "texts": list(texts)}


@dataclasses.dataclass
class Cell:
    """A position at one moment.

    Attributes:
        at: the forward, from 1, that wrote it last; None where none did.
        was: texts of the tokens that stood there before.
        kind, token, text, confidence: as in `Change`; None and its like where it is open.
    """

    kind: int | None = None
    token: int = -1
    text: str = ""
    confidence: float | None = None
    at: int | None = None
    was: tuple[str, ...] = ()

    def change(self, change: Change, forward: int) -> None:
        """Takes a change by a forward, from 1; 0 is the beginning."""
        if change.kind in (EDITED, REOPENED):
            self.was = (*self.was, self.text)
        if change.kind in (WRITTEN, EDITED):
            self.at = forward
        elif change.kind == REOPENED:
            self.at = None
        self.kind = None if change.kind == REOPENED else self.kind if change.kind == SPELLED else change.kind
        self.token, self.text, self.confidence = change.token, change.text, change.confidence


def cells_at(story: Story, forward: int) -> list[Cell]:
    """All positions after so many forwards."""
    cells = [Cell() for _ in range(story.length)]
    for number, frame in enumerate(story.frames[: forward + 1]):
        for change in frame:
            cells[change.position].change(change, number)
    return cells


def share_of(cell: Cell, colour: str, last: int) -> float | None:
    """Where on the scale of colours a cell is, in [0, 1]; None for one that no forward wrote.

    Args:
        colour: what colours mean, "forward" or "confidence".
        last: forwards of the longest story.
    """
    if cell.at is None:
        return None
    return cell.confidence if colour == "confidence" else (cell.at - 1) / max(last - 1, 1)


def story_of(generation: Generation, name: str | None = None) -> Story:
    """The story of an answer.

    Raises:
        DllmError: for one that was put together by hand, of which nothing is known but its text.
    """
    trace = generation.trace
    if trace is None:
        raise DllmError("this Generation has no trace; show what generate, infill, record, watch or an Engine gave")
    spell = Speller(trace)
    recorded = len(trace.moments) > 1
    return Story(
        name=trace.sampler if name is None else name,
        prompt="".join(text or "" for text in spell(trace.prompt, [True] * len(trace.prompt))),
        length=len(trace.given),
        block_length=trace.block_length,
        tokens=len(generation.tokens),
        full_forwards=generation.full_forwards,
        edits=trace.edits,
        frames=_frames(trace, spell),
        full=_forwards(trace.moments, "full_forwards") if recorded else None,
        updated=_forwards(trace.moments, "cache_updates") if recorded else None,
    )


def _forwards(moments: Sequence[Moment], count: str) -> list[int]:
    """Forwards, from 1, in which a count grew."""
    pairs = zip(moments, moments[1:], strict=False)
    return [now.nfe for before, now in pairs if getattr(now, count) > getattr(before, count)]


def _frames(trace: Trace, spell: Speller) -> list[list[Change]]:
    """What changed from one moment to the next."""
    length, end = len(trace.given), trace.moments[-1].nfe
    shown, tokens = np.zeros(length, bool), np.full(length, -1)
    texts: list[str | None] = [None] * length
    frames: list[list[Change]] = []
    for forward, now in enumerate(_moments(trace)):
        now_shown = (now.decoded_at >= 0) | trace.given | (forward == end)
        if forward and (now_shown == shown).all() and (now.tokens == tokens)[shown].all():
            frames.append([])
            continue
        now_texts = spell(now.tokens.tolist(), now_shown.tolist())
        changes = []
        for position in range(length):
            kind = _kind(trace, now, now_shown, shown, tokens, position)
            if kind is None and texts[position] != now_texts[position]:
                kind = SPELLED
            if kind is not None:
                changes.append(_change(now, position, kind, now_texts[position]))
        frames.append(changes)
        shown, tokens, texts = now_shown, now.tokens, now_texts
    return frames


def _moments(trace: Trace) -> Iterator[Moment]:
    """The canvas after 0, 1 ... forwards; of an answer that was not recorded, as far as its end tells."""
    last = trace.moments[-1]
    by_forward = {found.nfe: found for found in trace.moments}
    now = trace.moments[0]
    for forward in range(last.nfe + 1):
        now = by_forward.get(forward, now)
        known = now if now.nfe <= forward else last._replace(decoded_at=_until(last.decoded_at, forward))
        yield known


def _until(decoded_at: np.ndarray, forward: int) -> np.ndarray:
    """What was written by so many forwards."""
    return np.where(decoded_at < forward, decoded_at, -1)


def _kind(
    trace: Trace, now: Moment, now_shown: np.ndarray, shown: np.ndarray, tokens: np.ndarray, position: int
) -> int | None:
    """Why a cell changes, None where it does not."""
    if not now_shown[position]:
        return REOPENED if shown[position] else None
    if shown[position]:
        return EDITED if now.tokens[position] != tokens[position] else None
    if trace.given[position]:
        return GIVEN
    return WRITTEN if now.decoded_at[position] >= 0 else UNWRITTEN


def _change(now: Moment, position: int, kind: int, text: str | None) -> Change:
    if kind == REOPENED:
        return Change(position, kind, -1, "", None)
    logprob = float(now.logprobs[position])
    confidence = math.exp(min(logprob, 0.0)) if math.isfinite(logprob) else None
    return Change(position, kind, int(now.tokens[position]), text or "", confidence)
