"""Batches of rows on the devices; a process computes the rows of its own."""

import dataclasses

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from train.config import TrainConfig
from train.data import Row, Rows
from train.losses import Batch, Documents


@dataclasses.dataclass(frozen=True)
class HostBatches:
    """A process's part of batches, by the position of their first row: NumPy alone, for any process to compute.

    Attributes:
        needed: [parts, rows] bool, the rows that are computed; the others stay 0.
    """

    rows: Rows
    needed: np.ndarray

    @classmethod
    def of_shape(cls, rows: Rows, shape: tuple[int, int], sharding: Sharding) -> "HostBatches":
        """The rows of this process's devices.

        Args:
            shape: [parts, rows of each].
            sharding: of arrays [parts, rows, ...].
        """
        needed = np.zeros(shape, bool)
        for index in sharding.addressable_devices_indices_map(shape).values():
            needed[index] = True
        return cls(rows, needed)

    @classmethod
    def of_steps(cls, rows: Rows, config: TrainConfig, sharding: Sharding) -> "HostBatches":
        """The batches of a run's steps, [accumulate, rows, ...]."""
        size, parts = config.optimizer.batch, config.optimizer.accumulate
        return cls.of_shape(rows, (parts, size // parts), sharding)

    def __call__(self, first: int, end: int | None = None) -> Batch:
        """The rows from number `first` on, as arrays of NumPy.

        Args:
            end: rows from this number on only fill the batch up, see `Batch.lengths`.
        """
        shape, length = self.needed.shape, self.rows.width(first)
        numbers = first + np.arange(self.needed.size).reshape(shape)
        found = {at: _row(self.rows, int(numbers[at]), end) for at in zip(*np.nonzero(self.needed), strict=True)}
        tokens, targets = np.zeros((*shape, length), np.int32), np.zeros((*shape, length), bool)
        lengths, steps = np.zeros(shape, np.int32), np.full((*shape, length), -1, np.int32)
        for at, row in found.items():
            tokens[at], targets[at], lengths[at] = row.tokens, row.targets, row.length
            if row.step is not None:
                steps[at] = row.step
        ordered = any(row.step is not None for row in found.values())
        documents = None
        if self.rows.in_documents:
            bounds = np.zeros((2, *shape, length), np.int32)
            for at, row in found.items():
                bounds[:, *at] = np.stack(row.documents or ())
            documents = Documents(*bounds)
        return Batch(tokens, targets, lengths, steps if ordered else None, documents)  # type: ignore[arg-type]


def place_batch(batch: Batch, sharding: Sharding) -> Batch:
    """A batch of `HostBatches` on the devices."""
    place = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    found: Batch = jax.tree.map(place, batch)
    return found


def device_batch(rows: Rows, first: int, config: TrainConfig, sharding: NamedSharding) -> Batch:
    """The batch of a step, [accumulate, rows, ...], from position `first` of the data on."""
    return place_batch(HostBatches.of_steps(rows, config, sharding)(first), sharding)


def batch_of(rows: Rows, first: int, shape: tuple[int, int], sharding: Sharding, end: int | None = None) -> Batch:
    """The rows from number `first` on; arguments as of `HostBatches`."""
    return place_batch(HostBatches.of_shape(rows, shape, sharding)(first, end), sharding)


def _row(rows: Rows, number: int, end: int | None) -> Row:
    row = rows(number)
    if end is None or number < end:
        return row
    step = None if row.step is None else np.full_like(row.step, -1)
    return Row(row.tokens, np.zeros_like(row.targets), 0, step, row.documents)
