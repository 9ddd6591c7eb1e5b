"""Several whole examples in a row: which ones stand together."""

from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """An example, or a part of one that is longer than a row.

    Attributes:
        example: its number.
        start, end: which of the example's tokens.
    """

    example: int
    start: int
    end: int


class Packing:
    """Rows of pieces, by best fit decreasing: the longest first, each into the fullest row that still has room.

    Attributes:
        padding: share of all rows' positions that hold no token.
    """

    def __init__(self, lengths: np.ndarray, width: int, align: int = 1) -> None:
        """
        Args:
            lengths: [N], tokens of each example; one that is longer than a row is cut into pieces of `width`.
            width: positions of a row.
            align: every piece begins at a multiple of it.
        """
        lengths = np.asarray(lengths, np.int64)
        counts = -(-lengths // width)
        self._examples = np.repeat(np.arange(len(lengths)), counts)
        self._starts = width * (np.arange(len(self._examples)) - np.repeat(np.cumsum(counts) - counts, counts))
        self._ends = np.minimum(self._starts + width, lengths[self._examples])
        sizes = np.minimum(-(-(self._ends - self._starts) // align) * align, width)
        rows, used = np.empty(len(sizes), np.int64), 0
        rest = [list[int]() for _ in range(width + 1)]  # rows by their free positions
        some = 0  # bit s: whether a row has s of them
        for piece in np.argsort(-sizes, kind="stable").tolist():
            size = int(sizes[piece])
            fits = some >> size
            if fits:
                free = size + (fits & -fits).bit_length() - 1
                row = rest[free].pop()
                some ^= 0 if rest[free] else 1 << free
            else:
                free, row, used = width, used, used + 1
            rows[piece] = row
            rest[free - size].append(row)
            some |= 1 << (free - size)
        self._pieces = np.argsort(rows, kind="stable")
        self._bounds = np.searchsorted(rows[self._pieces], np.arange(used + 1))
        self.padding = 1.0 - float(lengths.sum()) / max(used * width, 1)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def row(self, number: int) -> list[Piece]:
        """The pieces of a row, in the order of the examples."""
        pieces = self._pieces[self._bounds[number] : self._bounds[number + 1]]
        return [Piece(*map(int, (self._examples[p], self._starts[p], self._ends[p]))) for p in pieces]
