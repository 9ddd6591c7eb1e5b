"""Sudoku with one solution, of any box shape, as the canvas of EB-Sampler's Figure 7 (arXiv 2505.24857).

A board is its cells row by row with an end-of-line token between rows: 81 + 8 = 89 tokens for 9x9. There is no prompt:
clues and line ends are given, the blanks are masks. The number of blanks is drawn evenly from a range.

Ids: 0 the end token (never on a board), 1 to 9 the digits, 10 the end of a line, 11 the start token, 12 the mask.

Candidates are kept as one big integer per digit with a bit per cell, so that all cells of the board are checked in a
handful of operations; a puzzle stays unique without a clue when no solution has another digit there.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from dllm_jax.errors import DllmError
from evals import tokens
from evals.tasks.base import Draws, Example, Ids, SymbolTask, Verdict, draw_of_split, draws_for

LINE_END = 10
SYMBOLS = {
    tokens.EOS: 0,
    **{str(digit): digit for digit in range(1, 10)},
    "\n": LINE_END,
    tokens.BOS: 11,
    tokens.MASK: 12,
}
_PATTERN = r"<\|\w+\|>|[1-9\n]"
_FEWEST_CELLS_BY_SOLUTION = 36  # 4x4 has only 12 solutions up to renaming, so there the puzzles are split instead


class Board(NamedTuple):
    """A puzzle and its one solution; cells row by row, 0 is blank."""

    clues: tuple[int, ...]
    solution: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Sudoku(SymbolTask):
    """Sudoku puzzles with exactly one solution.

    Attributes:
        box_rows, box_columns: shape of a box; the grid has as many rows, columns and digits as a box has cells. 3 and 3
            is the usual Sudoku, 2 and 2 is 4x4, 2 and 3 is 6x6.
        blanks: fewest and most blanks; None is 37 to 68 % of the cells, 30 to 55 for 9x9. A puzzle has fewer than
            drawn when no clue can go any more.
        pool: dig only so many puzzles, a few milliseconds each, and make every example from one of them by exchanging
            digits, rows and columns, which takes microseconds; for training on accelerators. 0 digs each anew.
        seed: another seed gives other examples of the same splits.

    Solutions are split up to renaming of digits, not up to swaps of rows, columns and boxes.
    """

    name: ClassVar[str] = "sudoku"
    pattern: ClassVar[str] = _PATTERN

    box_rows: int = 3
    box_columns: int = 3
    blanks: tuple[int, int] | None = None
    pool: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.box_rows, self.box_columns) < 1 or not 4 <= self.size <= 9:
            shape = f"{self.box_rows} x {self.box_columns}"
            raise DllmError(
                f"a box of {shape} cells makes no grid of 4 to 9 digits; choose 2 x 2, 2 x 3, 2 x 4 or 3 x 3"
            )
        low, high = self.blank_range
        if not 1 <= low <= high < self.size**2:
            raise DllmError(f"blanks {low}-{high} is no range within a grid of {self.size**2} cells")
        if self.pool < 0:
            raise DllmError(f"pool is {self.pool}; give a number of puzzles, or 0 for none")

    @property
    def size(self) -> int:
        """Rows, columns and digits."""
        return self.box_rows * self.box_columns

    @property
    def blank_range(self) -> tuple[int, int]:
        """Fewest and most blanks."""
        cells = self.size**2
        return self.blanks or (round(0.37 * cells), round(0.68 * cells))

    def example(self, split: str, index: int) -> Example:
        board = self._draw_exchange(split, index) if self.pool else self._draw_board(split, index)
        return Example(
            prompt_ids=np.zeros(0, np.int32),
            answer_ids=self._serialise(board.solution),
            given=self._serialise(board.clues) != 0,
            problem=board,
        )

    def verify(self, example: Example, ids: Ids) -> Verdict:
        # There is one solution only: whatever keeps the clues and satisfies all constraints is the reference.
        exact = bool(np.array_equal(ids, example.answer_ids))
        return Verdict(correct=exact, strict=exact, exact=exact)

    @property
    def symbols(self) -> Mapping[str, int]:
        return SYMBOLS

    @property
    def prompt_width(self) -> int:
        return 0

    @property
    def answer_width(self) -> int:
        return self.size**2 + self.size - 1

    def _draw_board(self, split: str, index: int) -> Board:
        """Example `index` of the puzzles that are dug."""
        draws, grid = draws_for(self.name, self.seed, split, index), _grid(self.box_rows, self.box_columns)
        if self.size**2 < _FEWEST_CELLS_BY_SOLUTION:
            return draw_of_split(
                self.name, split, lambda: self._dig(grid, grid.solution(draws), draws), self._canonical
            )
        solution = draw_of_split(self.name, split, lambda: grid.solution(draws), rename_digits)
        return self._dig(grid, solution, draws)

    def _dig(self, grid: "Grid", solution: Sequence[int], draws: Draws) -> Board:
        """Digs blanks in random order, each of which leaves the solution the only one."""
        wanted, clues = draws.between(*self.blank_range), list(solution)
        order = list(range(len(clues)))
        draws.shuffle(order)
        for cell in order:
            if not wanted:
                break
            if grid.can_go(clues, cell):
                clues[cell] = 0
                wanted -= 1
        return Board(tuple(clues), tuple(solution))

    def _draw_exchange(self, split: str, index: int) -> Board:
        """One of the pool with digits, rows and columns exchanged so that it stays in the split."""
        base = self._pool_board(split, index % self.pool)
        draws = draws_for(f"{self.name} exchanged", self.seed, split, index)
        return draw_of_split(self.name, split, lambda: self._exchange(base, draws), self._canonical)

    def _exchange(self, base: Board, draws: Draws) -> Board:
        rows, columns = self._lines(self.box_rows, draws), self._lines(self.box_columns, draws)
        cells = [row * self.size + column for row in rows for column in columns]
        names = list(range(1, self.size + 1))
        draws.shuffle(names)
        renamed = [0, *names]
        return Board(*(tuple([renamed[board[cell]] for cell in cells]) for board in base))

    def _lines(self, band: int, draws: Draws) -> list[int]:
        """The rows, or columns, in an order that keeps boxes together: bands of so many lines change places whole."""
        bands = [list(range(first, first + band)) for first in range(0, self.size, band)]
        for lines in bands:
            draws.shuffle(lines)
        draws.shuffle(bands)
        return [line for lines in bands for line in lines]

    def _pool_board(self, split: str, number: int) -> Board:
        known = self._pools.setdefault(split, {})
        if number not in known:
            known[number] = tuple(map(bytes, self._draw_board(split, number)))
        return Board(*map(tuple, known[number]))

    @functools.cached_property
    def _pools(self) -> dict[str, dict[int, tuple[bytes, ...]]]:
        """Split -> number -> clues and solution of what was dug so far."""
        return {}

    def _canonical(self, board: Board) -> str:
        by_solution = self.size**2 >= _FEWEST_CELLS_BY_SOLUTION
        return rename_digits(board.solution if by_solution else board.clues)

    def _serialise(self, cells: Sequence[int]) -> np.ndarray:
        rows = np.array(cells, np.int32).reshape(self.size, self.size)
        lines = np.full((self.size, self.size + 1), LINE_END, np.int32)
        lines[:, :-1] = rows
        return lines.reshape(-1)[:-1]


def rename_digits(cells: Sequence[int]) -> str:
    """The cells with digits named in order of appearance, so that renaming digits makes no other problem."""
    names = {0: "."}
    return "".join([names.setdefault(cell, str(len(names))) for cell in cells])


class Grid:
    """The geometry of one box shape, and what can be said about boards of it.

    `candidates[d]` has the bit of every cell that may still hold digit d + 1.
    """

    def __init__(self, box_rows: int, box_columns: int) -> None:
        size = box_rows * box_columns
        self.size, self.full = size, (1 << size * size) - 1
        units: dict[tuple[str, int, int], int] = {}
        keys = []
        for cell in range(size * size):
            row, column = divmod(cell, size)
            own = [("row", row, 0), ("column", 0, column), ("box", row // box_rows, column // box_columns)]
            for key in own:
                units[key] = units.get(key, 0) | 1 << cell
            keys.append(own)
        self.units = tuple(units.values())
        self.peers = tuple(
            functools.reduce(int.__or__, (units[key] for key in own)) & ~(1 << cell) for cell, own in enumerate(keys)
        )

    def candidates(self, cells: Sequence[int]) -> list[int]:
        """What the clues leave open."""
        placed, blocked, filled = [0] * self.size, [0] * self.size, 0
        for cell, digit in enumerate(cells):
            if digit:
                placed[digit - 1] |= 1 << cell
                blocked[digit - 1] |= self.peers[cell]
                filled |= 1 << cell
        blank = self.full & ~filled
        return [blank & ~blocked[digit] | placed[digit] for digit in range(self.size)]

    def can_go(self, clues: Sequence[int], cell: int) -> bool:
        """Whether the solution stays the only one without the clue in this cell."""
        digit, bit = clues[cell], 1 << cell
        candidates = self.candidates([*clues[:cell], 0, *clues[cell + 1 :]])
        candidates[digit - 1] &= ~bit  # is there a solution with another digit here?
        return self.solve(candidates) is None

    def solution(self, draws: Draws) -> list[int]:
        """A random full grid."""
        first = list(range(1, self.size + 1))
        draws.shuffle(first)
        solved = self.solve(self.candidates(first + [0] * (self.size**2 - self.size)), draws)
        if solved is None:
            raise AssertionError("every first row can be completed")
        return [next(d + 1 for d in range(self.size) if solved[d] >> cell & 1) for cell in range(self.size**2)]

    def solve(self, candidates: list[int], draws: Draws | None = None) -> list[int] | None:
        """A solution within the candidates, which are changed, or None; `draws` tries digits in random order."""
        choices = self._propagate(candidates, hidden=draws is None)  # a full grid is found sooner without
        if choices is None:
            return None
        two, more = choices
        if not two | more:
            return candidates
        cells = two or more
        bit = cells & -cells
        digits = [digit for digit in range(self.size) if candidates[digit] & bit]
        if draws is not None:
            draws.shuffle(digits)
        for digit in digits:
            trial = [board & ~bit for board in candidates]
            trial[digit] |= bit
            solved = self.solve(trial, draws)
            if solved is not None:
                return solved
        return None

    def _propagate(self, candidates: list[int], hidden: bool) -> tuple[int, int] | None:
        """Strikes what single candidates rule out, until nothing changes.

        Args:
            hidden: also look for digits that have one place in a unit.

        Returns:
            the cells with two candidates and those with more, or None when a cell or a unit has none.
        """
        done = 0
        while True:
            once = twice = thrice = 0
            for board in candidates:
                thrice |= twice & board
                twice |= once & board
                once |= board
            if once != self.full:
                return None
            fresh = once & ~twice & ~done
            if fresh:
                done |= fresh
                self._strike(candidates, fresh)
                continue
            found = self._hidden(candidates, twice) if hidden and twice else False
            if found is None:
                return None
            if not found:
                return twice & ~thrice, thrice

    def _strike(self, candidates: list[int], cells: int) -> None:
        """Strikes the digits of decided cells from their peers."""
        for digit, board in enumerate(candidates):
            decided = board & cells
            while decided:
                low = decided & -decided
                board &= ~self.peers[low.bit_length() - 1]
                decided ^= low
            candidates[digit] = board

    def _hidden(self, candidates: list[int], open_cells: int) -> bool | None:
        """Decides cells that are the only place of a digit in a unit: whether any was, None where one has no place."""
        found = False
        for digit, board in enumerate(candidates):
            only = 0
            for unit in self.units:
                places = board & unit
                if not places:
                    return None
                if not places & (places - 1):
                    only |= places
            only &= open_cells
            if only:
                found = True
                open_cells &= ~only
                for other in range(self.size):
                    if other != digit:
                        candidates[other] &= ~only
        return found


@functools.cache
def _grid(box_rows: int, box_columns: int) -> Grid:
    return Grid(box_rows, box_columns)
