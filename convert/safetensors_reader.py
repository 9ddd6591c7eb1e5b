"""Reads safetensors files without torch: their library checks the header, then slices of tensors are memory maps.

Nothing in a downloaded file is trusted: the header's length, every name, dtype, shape and offset is checked against the
file before any tensor is touched. What is left to the caller is whether the *values* make sense. Their library would
map a whole file for as long as it is open, which counts as resident memory; a block's map leaves with the block.
"""

import dataclasses
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dllm_jax.errors import DllmError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
BLOCK_BYTES = 4 * 2**20  # mapped at a time: bounds resident memory whatever the tensor's size

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `offset` counts from the start of the file."""

    name: str
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_folder(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint in the hub's format, single-file or sharded, in the order of files and offsets.

    Raises:
        DllmError: when there are no safetensors files (only pickles, or nothing), when the index names files that are
            missing or outside the folder, when shards and index disagree, and for any damaged file.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if not index.exists():
        if not single.exists():
            raise _no_weights(folder)
        return read_header(single)
    weight_map = _read_index(index)
    shards = sorted(set(weight_map.values()))
    if single.exists() and SINGLE_FILE not in shards:
        raise DllmError(f"{folder} holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is out of date")
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise DllmError(f"{index} names {absent[0]!r}, which is missing from the folder; download the checkpoint again")
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(folder / shard).items():
            if name in entries:
                raise DllmError(f"tensor {name} is in two files of {folder}: {entries[name].path.name} and {shard}")
            if weight_map.get(name) != shard:
                raise DllmError(f"{shard} holds {name}, but {index} does not say so; download the checkpoint again")
            entries[name] = entry
    if absent := sorted(weight_map.keys() - entries.keys()):
        raise DllmError(f"{index} promises {absent[0]!r} in {weight_map[absent[0]]}, which does not hold it")
    return entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file by name, in the order of their offsets.

    Raises:
        DllmError: when the file is not a complete and consistent safetensors file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
        if start == b"version ":
            raise _damaged(path, "it is a Git LFS pointer instead of the weights")
        with safe_open(path, "numpy") as file:  # checks that tensors fill the file one after the other
            found = [(name, file.get_slice(name)) for name in file.offset_keys()]
            tensors = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in found]
    except OSError as error:
        raise DllmError(f"{path} cannot be read ({error.strerror or error}); check the file") from None
    except SafetensorError as error:
        raise _damaged(path, "".join(filter(str.isprintable, str(error).rpartition("header: ")[2]))) from None
    entries: dict[str, TensorEntry] = {}
    end = 8 + int.from_bytes(start, "little")
    for name, dtype, shape in tensors:
        if not name.isprintable():  # it would end up in messages, and on terminals
            raise _damaged(path, f"its header names a tensor {name!r}")
        if dtype not in DTYPES:
            raise _damaged(path, f"the dtype {dtype!r} of {name} is not supported")
        entries[name] = TensorEntry(name, path, DTYPES[dtype], shape, end)
        end += entries[name].nbytes
    return entries


def blocks(entry: TensorEntry, max_bytes: int = BLOCK_BYTES) -> list[slice]:
    """Slices of the tensor's first axis of at most `max_bytes` (or one row) each."""
    rows = entry.shape[0]
    step = max(1, max_bytes * rows // max(entry.nbytes, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def read_block(entry: TensorEntry, rows: slice) -> np.ndarray:
    """One slice of the first axis as a read-only memory map; its pages leave memory with the last reference.

    Raises:
        DllmError: when the file has gone or cannot be mapped.
    """
    row_bytes = entry.nbytes // entry.shape[0]
    count, offset = rows.stop - rows.start, entry.offset + rows.start * row_bytes
    try:
        raw = np.memmap(entry.path, np.uint8, "r", offset=offset, shape=(count * row_bytes,))
    except (OSError, ValueError) as error:
        raise DllmError(f"{entry.path} cannot be read any more ({error}); did it change meanwhile?") from None
    return np.asarray(raw).view(entry.dtype).reshape(count, *entry.shape[1:])


def _read_index(path: Path) -> dict[str, str]:
    again = "download the checkpoint again"
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        raise DllmError(f"{path} is not a readable index with a weight_map; {again}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise DllmError(f"{path}: its weight_map does not map tensor names to file names; {again}")
    if not weight_map:
        raise DllmError(f"{path} lists no tensors; {again}")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise DllmError(f"{path} names {shard!r}, which is not a safetensors file inside the folder; {again}")
    return weight_map


def _no_weights(folder: Path) -> DllmError:
    if pickles := sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_ENDINGS):
        return DllmError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when read and are refused; "
            "save the model as safetensors first"
        )
    return DllmError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; it is not a checkpoint in the hub's format")


def _damaged(path: Path, why: str) -> DllmError:
    return DllmError(f"{path} is damaged: {why}; download it again")
