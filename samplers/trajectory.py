"""Reading a trajectory: what was committed when, on the host."""

from collections.abc import Sequence

import numpy as np

from samplers.engine import Result


def steps_of(result: Result, row: int) -> list[list[int]]:
    """Positions committed by each forward of a row, in order; a forward that committed nothing gives an empty list."""
    decoded_at = np.asarray(result.decoded_at[row])
    return [np.flatnonzero(decoded_at == step).tolist() for step in range(int(result.nfe[row]))]


def forwards_until(result: Result, row: int, sequences: Sequence[Sequence[int]]) -> int | None:
    """Forwards after which one of the token sequences stood in the generation with no mask before its end ("NFE with
    generate_until" of arXiv 2505.24857); None if that never happened."""
    complete_at = np.maximum.accumulate(np.asarray(result.decoded_at[row]))
    ends = [start + len(ids) - 1 for ids in sequences for start in _matches(result, row, ids)]
    return min((int(complete_at[end]) + 1 for end in ends), default=None)


def first_match(result: Result, row: int, sequences: Sequence[Sequence[int]]) -> int | None:
    """Where the earliest of the token sequences begins, as an answer's length; None if none is in the generation."""
    return min((start for ids in sequences for start in _matches(result, row, ids)), default=None)


def _matches(result: Result, row: int, ids: Sequence[int]) -> list[int]:
    """Starts of the sequence within the unbroken, written beginning of the row's generation."""
    written = np.asarray(result.decoded_at[row]) >= 0
    length = len(written) if written.all() else int(np.argmin(written))
    tokens = np.asarray(result.tokens[row])[:length]
    wanted = np.asarray(ids)
    return [start for start in range(length - len(ids) + 1) if (tokens[start : start + len(ids)] == wanted).all()]
