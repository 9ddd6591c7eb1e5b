"""Batches of rows on the devices; a process computes the rows of its own."""

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from train.config import TrainConfig
from train.data import Row, Rows
from train.losses import Batch, Documents


def device_batch(rows: Rows, first: int, config: TrainConfig, sharding: NamedSharding) -> Batch:
    """The batch of a step, [accumulate, rows, ...], from position `first` of the data on."""
    size, parts = config.optimizer.batch, config.optimizer.accumulate
    return batch_of(rows, first, (parts, size // parts), sharding)


def batch_of(rows: Rows, first: int, shape: tuple[int, int], sharding: Sharding, end: int | None = None) -> Batch:
    """The rows from number `first` on.

    Args:
        shape: [parts, rows of each].
        sharding: of arrays [parts, rows, ...].
        end: rows from this number on only fill the batch up, see `Batch.lengths`.
    """
    length = rows.width(first)
    needed = np.zeros(shape, bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        needed[index] = True
    numbers = first + np.arange(needed.size).reshape(shape)
    found = {at: _row(rows, int(numbers[at]), end) for at in zip(*np.nonzero(needed), strict=True)}
    tokens, targets = np.zeros((*shape, length), np.int32), np.zeros((*shape, length), bool)
    lengths, steps = np.zeros(shape, np.int32), np.full((*shape, length), -1, np.int32)
    for at, row in found.items():
        tokens[at], targets[at], lengths[at] = row.tokens, row.targets, row.length
        if row.step is not None:
            steps[at] = row.step
    ordered = any(row.step is not None for row in found.values())
    place = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    documents = None
    if rows.in_documents:
        bounds = np.zeros((2, *shape, length), np.int32)
        for at, row in found.items():
            bounds[:, *at] = np.stack(row.documents or ())
        documents = Documents(*map(place, bounds))
    return Batch(place(tokens), place(targets), place(lengths), place(steps) if ordered else None, documents)


def _row(rows: Rows, number: int, end: int | None) -> Row:
    row = rows(number)
    if end is None or number < end:
        return row
    step = None if row.step is None else np.full_like(row.step, -1)
    return Row(row.tokens, np.zeros_like(row.targets), 0, step, row.documents)
