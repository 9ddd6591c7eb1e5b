"""Room for the stop patterns of many requests in one table, so that a compiled program runs any of them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.errors import DllmError
from samplers.stopping import Stop, sequence_table, string_table

PER_REQUEST = 8
"""Patterns that a request may bring."""

Pattern = str | int


@dataclasses.dataclass
class _Place:
    start: int
    states: int
    users: int = 0


class StopPool:
    """The patterns of a sampler, which all requests have, and those of the requests that are in slots.

    State 0 completes nothing and stays: where patterns begin that a request does not use. Equal patterns share their
    states; those that nobody uses stay until the room is needed.
    """

    def __init__(self, base: Stop | None, vocab_size: int, states: int, pieces: Callable[[], Sequence[bytes]]) -> None:
        """
        Args:
            base: the patterns that all requests have.
            states: room for those of requests, in states of the automaton; 0 for none.
            pieces: gives the bytes of each token.
        """
        self._base, self._vocab_size, self._pieces = base, vocab_size, functools.cache(pieces)
        self._first = 1 + (0 if base is None else base.table.shape[0])
        self._states = states
        self._places: dict[Pattern, _Place] = {}
        self.stop: Stop | None = None
        if base is not None or states:
            total = self._first + states
            table = np.zeros((total, vocab_size), np.int32)
            accept = np.zeros(total, bool)
            if base is not None:
                table[1 : self._first] = np.asarray(base.table) + 1
                accept[1 : self._first] = base.accept
            start, drop = self._row(())
            self.stop = Stop(jnp.asarray(table), jnp.asarray(start), jnp.asarray(accept), jnp.asarray(drop))

    def rows(self, batch: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """`start` and `drop` of rows without patterns of their own, [B, N]; None where there are no patterns at all."""
        if self.stop is None:
            return None, None
        start, drop = self._row(())
        return np.tile(start, (batch, 1)), np.tile(drop, (batch, 1))

    def check(self, patterns: Sequence[Pattern]) -> None:
        """Raises DllmError for patterns that there will never be room for."""
        if not patterns:
            return
        if len(set(patterns)) > PER_REQUEST:
            raise DllmError(f"stop has {len(set(patterns))} patterns; a request may bring {PER_REQUEST}")
        needed = sum(self._size(pattern) for pattern in set(patterns))
        if needed > self._states:
            room = f"this engine has room for {self._states}; build it with larger stop_states"
            raise DllmError(f"the stop patterns of the request need {needed} states and {room}")

    def has_room(self, patterns: Sequence[Pattern]) -> bool:
        """Whether `take` would find room now."""
        return self._fitted(patterns) is not None

    def take(self, patterns: Sequence[Pattern]) -> tuple[np.ndarray, np.ndarray]:
        """`start` and `drop` [N] of a request's row, whose patterns are in the table from now on."""
        fitted = self._fitted(patterns)
        if fitted is None:
            raise DllmError("there is no room for the stop patterns of this request; ask has_room first")
        for pattern in fitted.keys() - self._places.keys():
            self._write(pattern, fitted[pattern].start)
        self._places = fitted
        for pattern in set(patterns):
            fitted[pattern].users += 1
        return self._row(patterns)

    def give_back(self, patterns: Sequence[Pattern]) -> None:
        """Ends the use of what was taken."""
        for pattern in set(patterns):
            self._places[pattern].users -= 1

    # -----------------------------------------------------------------------------------------------------------------

    def _size(self, pattern: Pattern) -> int:
        if pattern == "":
            raise DllmError("a stop string is empty; leave it out")
        return 1 + (len(pattern.encode()) if isinstance(pattern, str) else 1)

    def _fitted(self, patterns: Sequence[Pattern]) -> dict[Pattern, _Place] | None:
        """The places with those of the patterns among them, or None; unused ones go only where there is no gap."""
        used = {pattern: place for pattern, place in self._places.items() if place.users or pattern in patterns}
        for places in (dict(self._places), used):
            new = [pattern for pattern in dict.fromkeys(patterns) if pattern not in places]
            if all(self._fit(places, pattern) for pattern in new):
                return places
        return None

    def _fit(self, places: dict[Pattern, _Place], pattern: Pattern) -> bool:
        """Finds a gap for one pattern."""
        at, size = self._first, self._size(pattern)
        for place in sorted(places.values(), key=lambda place: place.start):
            if place.start - at >= size:
                break
            at = place.start + place.states
        if at + size > self._first + self._states:
            return False
        places[pattern] = _Place(at, size)
        return True

    def _write(self, pattern: Pattern, start: int) -> None:
        assert self.stop is not None
        if isinstance(pattern, str):
            table = string_table(pattern, self._pieces(), self._vocab_size)
        else:
            table = sequence_table((pattern,), self._vocab_size)
        accept = np.arange(len(table)) == len(table) - 1
        padded = -(-len(table) // 16) * 16  # few programs
        index = np.where(np.arange(padded) < len(table), np.arange(padded) + start, self._first + self._states)
        fill = lambda x: np.concatenate([x, np.zeros((padded - len(table), *x.shape[1:]), x.dtype)])
        new = _written(self.stop.table, self.stop.accept, index, fill(table + np.int32(start)), fill(accept))
        self.stop = dataclasses.replace(self.stop, table=new[0], accept=new[1])

    def _row(self, patterns: Sequence[Pattern]) -> tuple[np.ndarray, np.ndarray]:
        """[N] of the base's patterns, the request's, and none."""
        own = list(dict.fromkeys(patterns))
        start = [] if self._base is None else (np.asarray(self._base.start) + 1).tolist()
        drop = [] if self._base is None else np.asarray(self._base.drop).tolist()
        none = [0] * ((PER_REQUEST if self._states else 0) - len(own))
        start += [self._places[pattern].start for pattern in own] + none
        drop += [0 if isinstance(pattern, str) else 1 for pattern in own] + none
        return np.asarray(start, np.int32), np.asarray(drop, np.int32)


@jax.jit
def _written(table: Any, accept: Any, index: Any, rows: Any, accepted: Any) -> tuple[jax.Array, jax.Array]:
    """The table [Q, V] and what accepts [Q], new at some states; states behind the end are dropped."""
    return table.at[index].set(rows, mode="drop"), accept.at[index].set(accepted, mode="drop")
