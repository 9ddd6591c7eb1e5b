"""The order of examples: a function of the position in an endless sequence.

Each epoch is another permutation of all examples, none of which is ever written down. With buckets it is one in which a
batch's rows are of nearly the same length.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

_ROUNDS = 8
_WORD = 2**64 - 1


def permute(place: int, count: int, key: Sequence[int]) -> int:
    """The entry at `place` of a random permutation of range(count), computed without memory.

    A Feistel network permutes the next power of 4 (at least 64), and is walked along until it comes to a number below
    `count` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, section 4).
    `grain.experimental.index_shuffle` (0.2.18) does the same, but for a `count` of 65,537 is no permutation.

    Args:
        key: of the permutation: whole numbers from 0 on.
    """
    half = max(3, ((count - 1).bit_length() + 1) // 2)
    mask, keys = 2**half - 1, _round_keys(tuple(key))
    while True:
        left, right = place >> half, place & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        place = left << half | right
        if place < count:
            return place


@functools.lru_cache(maxsize=1024)
def _round_keys(key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64).tolist())


def _mix(x: int) -> int:
    """A word in which each bit depends on each of `x`: the last steps of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return x ^ (x >> 31)


@dataclasses.dataclass(frozen=True)
class Order:
    """All examples, a new permutation each epoch.

    Attributes:
        count: N, of the examples.
        key: of the permutations, whole numbers from 0 on.
        shuffle: False keeps the examples as they are.
    """

    count: int
    key: tuple[int, ...]
    shuffle: bool

    def __call__(self, position: int) -> int:
        """The number of the example at a position."""
        epoch, place = divmod(position, self.count)
        return permute(place, self.count, (*self.key, epoch)) if self.shuffle else place


class BucketOrder:
    """All examples, each once an epoch, in batches of nearly the same length.

    An epoch's examples are sorted into buckets by length, each bucket is shuffled, and their concatenation is cut into
    batches, which are shuffled too. A batch that two epochs share has the shortest rows of both.
    """

    def __init__(self, order: Order, lengths: np.ndarray, bucket: int, batch: int) -> None:
        """Sorts; holds 8 bytes per example.

        Args:
            lengths: [N], positions that each example's row needs.
            bucket: widths of batches are multiples of it.
            batch: B, rows of a batch.
        """
        self._order, self._batch = order, batch
        widths = -(-np.maximum(lengths, 1) // bucket)
        self._examples = np.argsort(widths, kind="stable")
        found, self._starts = np.unique(widths[self._examples], return_index=True)
        self._widths, self._ends = found * bucket, np.append(self._starts, len(widths))[1:]

    def __call__(self, position: int) -> int:
        """The number of the example at a position."""
        epoch, rank = position // self._order.count, self._rank(position)
        at = self._bucket(rank)
        start, end = int(self._starts[at]), int(self._ends[at])
        if self._order.shuffle:
            rank = start + permute(rank - start, end - start, (*self._order.key, epoch, at))
        return int(self._examples[rank])

    def width(self, position: int) -> int:
        """Positions that the rows need that are in a position's batch."""
        first = position - position % self._batch
        last, count = first + self._batch - 1, self._order.count
        ranked = [*range(first - first % count + count - 1, last, count), last]  # the longest of each epoch come last
        return max(int(self._widths[self._bucket(self._rank(p))]) for p in ranked)

    def _bucket(self, rank: int) -> int:
        return int(np.searchsorted(self._starts, rank, side="right")) - 1

    def _rank(self, position: int) -> int:
        """Which of an epoch's sorted examples a position has.

        The first and the last of an epoch's positions may lie in batches that are shared with other epochs: they have
        the first ranks. Whole batches have consecutive ranks.
        """
        count, size = self._order.count, self._batch
        epoch, place = divmod(position, count)
        first, end = -(-epoch * count // size), (epoch + 1) * count // size  # the epoch's own batches
        before, own = first * size - epoch * count, (end - first) * size
        if own <= 0 or place < before:
            return place
        if place >= before + own:
            return place - own
        number, row = divmod(place - before, size)
        if self._order.shuffle:
            number = permute(number, end - first, (*self._order.key, epoch, len(self._starts)))
        return count - own + number * size + row
