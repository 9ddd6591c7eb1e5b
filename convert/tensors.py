"""Values of tensors, block by block: finiteness, casts, transposes and comparisons without full-size temporaries."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import ml_dtypes
import numpy as np

from convert.safetensors_reader import TensorEntry, blocks, read_block
from dllm_jax.errors import DllmError
from dllm_jax.families.base import Index

# All exponent bits set means NaN or infinity: a test on integers, ten times as fast as isfinite on bfloat16.
_EXPONENT = {"bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00), "float32": (np.uint32, 0x7F800000)}
FLOAT_DTYPES = tuple(_EXPONENT)

R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stored tensor, or a run of bytes of one, and the part of our array that it is.

    Attributes:
        entry: where it lies.
        index: array[index] is the part, a view.
        transpose: it is stored transposed.
    """

    entry: TensorEntry
    index: Index = ()
    transpose: bool = False

    def rows_of(self, array: np.ndarray) -> np.ndarray:
        """The view of our array whose rows are those of the entry."""
        part = array[self.index]
        return part.T if self.transpose else part


def as_dtype(name: str) -> np.dtype:
    """The numpy dtype of "bfloat16", "float16" or "float32".

    Raises:
        DllmError: for any other name.
    """
    if name not in FLOAT_DTYPES:
        raise DllmError(f"dtype {name!r} is not supported; use bfloat16, float16 or float32")
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def checked_cast(block: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """`block` in `dtype`; the block itself when it has that dtype already.

    Raises:
        DllmError: naming the tensor, when a value is NaN or infinite, or becomes infinite by the cast.
    """
    if not _all_finite(block):
        kind = "NaN" if np.isnan(block.astype(np.float32)).any() else "infinity"
        raise DllmError(f"tensor {name} contains {kind}; the checkpoint is damaged, download or train it again")
    if block.dtype == dtype:
        return block
    with np.errstate(over="ignore"):
        cast = block.astype(dtype)
    if not _all_finite(cast):
        raise DllmError(f"tensor {name} has values too large for {dtype}; choose --dtype {block.dtype} or float32")
    return cast


def load(pieces: Sequence[Piece], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new host array in `dtype` put together from its pieces, checked for NaN and infinity on the way.

    Raises:
        DllmError: as `checked_cast`, and when the file cannot be read.
    """
    out = np.empty(shape, dtype)
    bits = _bits(out)

    def copy(piece: Piece, rows: slice) -> None:
        block = _bits(checked_cast(read_block(piece.entry, rows), dtype, piece.entry.name))
        target = piece.rows_of(bits)[rows]
        if piece.transpose:
            _transpose(block, target.T)
        else:
            target[...] = block

    _each_block(copy, pieces)
    return out


def count_differences(pieces: Sequence[Piece], stored: np.ndarray) -> int:
    """How many values of `stored` are not, bit by bit, those of its pieces cast to its dtype.

    Raises:
        DllmError: as `checked_cast`, and when the file cannot be read.
    """
    bits = _bits(stored)

    def count(piece: Piece, rows: slice) -> int:
        expected = _bits(checked_cast(read_block(piece.entry, rows), stored.dtype, piece.entry.name))
        return int(np.count_nonzero(piece.rows_of(bits)[rows] != expected))

    return sum(_each_block(count, pieces))


def same_bits(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return all(np.array_equal(_bits(read_block(first, s)), _bits(read_block(second, s))) for s in blocks(first))


def _transpose(block: np.ndarray, out: np.ndarray) -> None:
    """`out[...] = block.T` for a contiguous block, by words of 8 bytes first: numpy takes as long for a word as for one
    value of 2 bytes."""
    lanes = 8 // block.itemsize
    if block.shape[1] % lanes:
        out[...] = block.T
        return
    words = np.ascontiguousarray(block.view(np.uint64).T).view(block.dtype).reshape(-1, block.shape[0], lanes)
    for lane in range(lanes):
        out[lane::lanes] = words[..., lane]


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(_EXPONENT[array.dtype.name][0])  # numpy copies integers faster than bfloat16


def _all_finite(block: np.ndarray) -> bool:
    unsigned, exponent = _EXPONENT[block.dtype.name]
    return not ((block.view(unsigned) & unsigned(exponent)) == exponent).any()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def _each_block(work: Callable[[Piece, slice], R], pieces: Iterable[Piece]) -> list[R]:
    parts = [(piece, rows) for piece in pieces for rows in blocks(piece.entry)]
    return list(_pool().map(lambda part: work(*part), parts))  # numpy lets go of the GIL while it copies
