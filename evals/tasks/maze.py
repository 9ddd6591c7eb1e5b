"""Mazes: the path between two cells of a random spanning tree, written as a shuffled list of edges.

The "DFS mazes" of arXiv 2412.05117 as EB-Sampler's Figure 6 uses them (arXiv 2505.24857). One token per item:

    <ADJLIST_START> (r,c) (r,c) ; ... <ADJLIST_END> <ORIGIN_START> (r,c) <ORIGIN_END>
    <TARGET_START> (r,c) <TARGET_END> <PATH_START>            the prompt, 306 tokens for 10 x 10
    (r,c) ... (r,c) <PATH_END>                                the answer, origin and target included

Edges stand in random order and direction. Every index is another maze, so that none needs to be shuffled anew.

Ids: 0 the end token (never in a maze), 1 to 9 the markers, 10 the start token, 11 the mask, then the cells row by row.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from dllm_jax.errors import DllmError
from evals import tokens
from evals.tasks.base import Draws, Example, Ids, SymbolTask, Verdict, draw_of_split, draws_for

MARKERS = (
    "<ADJLIST_START>",
    "<ADJLIST_END>",
    "<ORIGIN_START>",
    "<ORIGIN_END>",
    "<TARGET_START>",
    "<TARGET_END>",
    "<PATH_START>",
    "<PATH_END>",
    ";",
)
FIRST_CELL = len(MARKERS) + 3
_ID = {marker: 1 + i for i, marker in enumerate(MARKERS)}
_PATTERN = r"<\|\w+\|>|<\w+>|;|\(\d+,\d+\)"


class Maze(NamedTuple):
    """A tree of cells, numbered row by row, and the one path between two of them."""

    edges: tuple[tuple[int, int], ...]
    path: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Mazes(SymbolTask):
    """Mazes without loops on a square grid, by randomised depth-first search.

    Attributes:
        size: rows and columns.
        seed: another seed gives other examples of the same splits.
    """

    name: ClassVar[str] = "maze"
    pattern: ClassVar[str] = _PATTERN

    size: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not 4 <= self.size <= 30:  # 3 x 3 has too few trees for a test split
            raise DllmError(f"size is {self.size}; a maze has between 4 and 30 rows")

    def example(self, split: str, index: int) -> Example:
        draws = draws_for(self.name, self.seed, split, index)
        parents = draw_of_split(self.name, split, lambda: _tree(self.size, draws), _canonical)
        cells = self.size**2
        origin = draws.below(cells)
        target = (origin + 1 + draws.below(cells - 1)) % cells
        edges = [(cell, parent) for cell, parent in enumerate(parents) if parent != cell]
        path = _path(parents, origin, target)
        return Example(
            prompt_ids=self._prompt(edges, origin, target, draws),
            answer_ids=np.array([*(FIRST_CELL + cell for cell in path), _ID["<PATH_END>"]], np.int32),
            problem=Maze(tuple(edges), tuple(path)),
        )

    def verify(self, example: Example, ids: Ids) -> Verdict:
        # A tree has one path without detours between two cells; what follows its end does not count.
        maze: Maze = example.problem
        written = [int(i) for i in ids]
        path = written[: written.index(_ID["<PATH_END>"])] if _ID["<PATH_END>"] in written else None
        correct = path == [FIRST_CELL + cell for cell in maze.path]
        return Verdict(correct=correct, strict=correct, exact=bool(np.array_equal(ids, example.answer_ids)))

    @property
    def symbols(self) -> Mapping[str, int]:
        return _symbols(self.size)

    @property
    def prompt_width(self) -> int:
        return 3 * (self.size**2 - 1) + 9

    @property
    def answer_width(self) -> int:
        return self.size**2 + 1

    def _prompt(self, edges: Sequence[tuple[int, int]], origin: int, target: int, draws: Draws) -> np.ndarray:
        """The maze up to <PATH_START>, its edges in random order and direction."""
        shuffled = list(edges)
        draws.shuffle(shuffled)
        ids, semicolon = [_ID["<ADJLIST_START>"]], _ID[";"]
        for one, other in shuffled:
            if draws.below(2):
                one, other = other, one
            ids += (FIRST_CELL + one, FIRST_CELL + other, semicolon)
        ids += (_ID["<ADJLIST_END>"], _ID["<ORIGIN_START>"], FIRST_CELL + origin, _ID["<ORIGIN_END>"])
        ids += (_ID["<TARGET_START>"], FIRST_CELL + target, _ID["<TARGET_END>"], _ID["<PATH_START>"])
        return np.array(ids, np.int32)


@functools.cache
def _symbols(size: int) -> dict[str, int]:
    named = {tokens.EOS: 0, **_ID, tokens.BOS: FIRST_CELL - 2, tokens.MASK: FIRST_CELL - 1}
    return named | {f"({cell // size},{cell % size})": FIRST_CELL + cell for cell in range(size * size)}


@functools.cache
def _neighbours(size: int) -> tuple[tuple[int, ...], ...]:
    def of(cell: int) -> tuple[int, ...]:
        row, column = divmod(cell, size)
        around = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
        return tuple(r * size + c for r, c in around if 0 <= r < size and 0 <= c < size)

    return tuple(of(cell) for cell in range(size * size))


def _tree(size: int, draws: Draws) -> list[int]:
    """A spanning tree by depth-first search with backtracking, as the parent of every cell; the root is its own."""
    neighbours, below = _neighbours(size), draws.below
    root = below(size * size)
    parents = [-1] * (size * size)
    parents[root] = root
    stack = [root]
    while stack:
        cell = stack[-1]
        free = [other for other in neighbours[cell] if parents[other] < 0]
        if not free:
            stack.pop()
            continue
        chosen = free[below(len(free))] if len(free) > 1 else free[0]
        parents[chosen] = cell
        stack.append(chosen)
    return parents


def _canonical(parents: Sequence[int]) -> str:
    """The tree's edges in order, whatever its root: they decide the split."""
    edges = sorted((min(pair), max(pair)) for pair in enumerate(parents) if pair[0] != pair[1])
    return f"{len(parents)} {edges}"


def _path(parents: Sequence[int], origin: int, target: int) -> list[int]:
    """The cells from origin to target."""
    up, down = _to_root(parents, origin), _to_root(parents, target)
    while len(up) > 1 and len(down) > 1 and up[-2] == down[-2]:  # from the root on, as long as both go the same way
        up.pop()
        down.pop()
    return up + down[-2::-1]


def _to_root(parents: Sequence[int], cell: int) -> list[int]:
    path = [cell]
    while parents[cell] != cell:
        cell = parents[cell]
        path.append(cell)
    return path
