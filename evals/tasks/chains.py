"""Chains of digits, each its neighbour's plus a number: what is written together, in which order, and by which keys
decides whether they agree.

The canvas is pairs of a symbol, which is given, and a digit, which is a mask:

    7     the digit is 7
    ?     the digit is anyone's choice
    d     the digit is the one on its left plus 3 (a to j are 0 to 9), modulo 10
    D     the digit is the one on its right plus 3 (A to J)

    ?.c.A.D.7.b.b.     might become     ?0c2A0D077b8b9

(The 0 of A is that of D, which is the 7 on its right plus 3.) A chain is one 7 or ?, capitals before it and small
letters behind it. Every digit is a sum of two, but it is known only when its neighbour is: digits of different chains
can be written together, those behind a ? cannot before one of them is there, and a chain whose 7 stands on the right is
read from right to left. An answer is right when all of its digits are.

Ids: 0 the end token (never in a chain), 1 to 10 the digits, 11 to 20 a to j, 21 to 30 A to J, 31 the question mark,
32 the start token, 33 the mask.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from dllm_jax.errors import DllmError
from evals import tokens
from evals.tasks.base import Draws, Example, Ids, SymbolTask, Verdict, draw_of_split, draws_for

_DIGITS, _LEFT, _RIGHT, _ANY = "0123456789", "abcdefghij", "ABCDEFGHIJ", "?"
SYMBOLS = {
    tokens.EOS: 0,
    **{symbol: 1 + i for i, symbol in enumerate(_DIGITS + _LEFT + _RIGHT + _ANY)},
    tokens.BOS: 32,
    tokens.MASK: 33,
}
_FIRST = SYMBOLS["0"]
_PATTERN = r"<\|\w+\|>|[0-9a-jA-J?]"

Start = Literal["left", "anywhere"]


@dataclasses.dataclass(frozen=True)
class Chains(SymbolTask):
    """Chains of digits, each its neighbour's plus a number.

    Attributes:
        length: digits of an answer.
        chain: shortest and longest chain; the last of an answer may be shorter.
        start: where a chain's 7 or ? stands: on its "left", so that it is read from left to right, or "anywhere".
        free: share of the chains that start with a ?, from 0 to 1.
        seed: another seed gives other examples of the same splits.
    """

    name: ClassVar[str] = "chains"
    pattern: ClassVar[str] = _PATTERN

    length: int = 256
    chain: tuple[int, int] = (8, 40)
    start: Start = "anywhere"
    free: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.chain
        if not 1 <= low <= high:
            raise DllmError(f"chain {low}-{high} is no range of lengths; give the shortest and the longest, as 8-40")
        if self.length < max(low, 8):
            raise DllmError(f"length is {self.length}; an answer has at least {max(low, 8)} digits")
        if self.start not in ("left", "anywhere"):
            raise DllmError(f"start is {self.start!r}; choose left or anywhere")
        if not 0 <= self.free <= 1:
            raise DllmError(f"free is {self.free}; give a share of the chains between 0 and 1")

    def example(self, split: str, index: int) -> Example:
        draws = draws_for(self.name, self.seed, split, index)
        symbols = draw_of_split(self.name, split, lambda: self._draw_symbols(draws), lambda drawn: drawn)
        return Example(
            prompt_ids=np.zeros(0, np.int32),
            answer_ids=_pairs(symbols, _solve(symbols, draws)),
            given=np.tile([True, False], self.length),
            problem=symbols,
        )

    def verify(self, example: Example, ids: Ids) -> Verdict:
        correct = bool(self._kept(example, ids).all())
        return Verdict(correct=correct, strict=correct, exact=bool(np.array_equal(ids, example.answer_ids)))

    def partial(self, example: Example, ids: Ids) -> float:
        """Share of the symbols that the digits keep."""
        return float(self._kept(example, ids).mean())

    @property
    def symbols(self) -> Mapping[str, int]:
        return SYMBOLS

    @property
    def prompt_width(self) -> int:
        return 0

    @property
    def answer_width(self) -> int:
        return 2 * self.length

    def _draw_symbols(self, draws: Draws) -> str:
        """The symbols: chains until the answer is full."""
        symbols: list[str] = []
        while (rest := self.length - len(symbols)) > 0:
            count = min(draws.between(*self.chain), rest)
            start = 0 if self.start == "left" else draws.below(count)
            symbols += [draws.choice(_RIGHT) for _ in range(start)]
            symbols.append(_ANY if draws.below(1000) < 1000 * self.free else draws.choice(_DIGITS))
            symbols += [draws.choice(_LEFT) for _ in range(count - start - 1)]
        return "".join(symbols)

    @staticmethod
    def _kept(example: Example, ids: Ids) -> np.ndarray:
        """[A] bool, which symbols the digits of an answer keep."""
        symbols: str = example.problem
        digits = np.full(len(symbols) + 2, -1)  # with a place on either side that is no digit
        written = np.array(list(ids)[1 : 2 * len(symbols) : 2], int) - _FIRST
        digits[1 : 1 + len(written)] = np.where((written >= 0) & (written < 10), written, -1)
        own = digits[1:-1]
        kinds, numbers = _table(symbols)
        beside = np.where(kinds == 1, digits[:-2], digits[2:])
        wanted = np.where(kinds == 0, numbers, np.where(beside < 0, -2, (beside + numbers) % 10))
        return (own >= 0) & ((kinds == 3) | (own == wanted))


def _table(symbols: str) -> tuple[np.ndarray, np.ndarray]:
    """[A] kinds (0 a digit, 1 a link to the left, 2 one to the right, 3 anything) and [A] numbers of symbols."""
    places = np.array([(_DIGITS + _LEFT + _RIGHT + _ANY).index(symbol) for symbol in symbols])
    return places // 10, places % 10


def _pairs(symbols: str, digits: Sequence[int]) -> np.ndarray:
    """[2 A] int32, every symbol and its digit."""
    pairs = [(SYMBOLS[symbol], _FIRST + digit) for symbol, digit in zip(symbols, digits, strict=True)]
    return np.array(pairs, np.int32).reshape(-1)


def _solve(symbols: Sequence[str], draws: Draws) -> list[int]:
    """The digits of an answer; those of a ? are drawn."""
    digits = [int(symbol) if symbol in _DIGITS else draws.below(10) if symbol == _ANY else -1 for symbol in symbols]
    for i, symbol in enumerate(symbols):
        if symbol in _LEFT:
            digits[i] = (digits[i - 1] + _LEFT.index(symbol)) % 10
    for i in range(len(symbols) - 1, -1, -1):
        if symbols[i] in _RIGHT:
            digits[i] = (digits[i + 1] + _RIGHT.index(symbols[i])) % 10
    return digits
