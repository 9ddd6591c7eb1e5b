"""Copies of the tiny hub checkpoints that tests may change or break, with a reader and writer of their own."""

import json
import math
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CHECKPOINTS = Path(__file__).parent / "goldens" / "checkpoints"
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32"}
NUMPY = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def copy(name: str, folder: Path) -> Path:
    """A copy of `llada-tiny`, `dream-tiny` or `qwen2-tiny` in a new folder."""
    return shutil.copytree(CHECKPOINTS / name, folder, copy_function=shutil.copyfile)


def edit_json(path: Path, **changes: Any) -> None:
    """Sets fields of a JSON file; a value of `...` removes the field."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a hub checkpoint, whatever its files are called."""
    return {name: array for path in sorted(folder.glob("*.safetensors")) for name, array in read(path).items()}


def read(path: Path) -> dict[str, np.ndarray]:
    """One safetensors file."""
    header, data = split(path)
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], NUMPY[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def write(path: Path, arrays: Mapping[str, np.ndarray], change: Callable[[dict], None] = lambda header: None) -> None:
    """One safetensors file; `change` may spoil its header."""
    header, end = {}, 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    change(header)
    join(path, header, b"".join(array.tobytes() for array in arrays.values()))


def write_sharded(folder: Path, arrays: Mapping[str, np.ndarray], count: int) -> None:
    """Several files and their index instead of the single one; neighbours go to different files."""
    (folder / SINGLE).unlink()
    names = {name: f"model-{i % count + 1:05d}-of-{count:05d}.safetensors" for i, name in enumerate(arrays)}
    for shard in set(names.values()):
        write(folder / shard, {name: array for name, array in arrays.items() if names[name] == shard})
    total = sum(array.nbytes for array in arrays.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}))


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """A safetensors file of a header and data that need not fit each other."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def num_bytes(entry: Mapping[str, Any]) -> int:
    """Bytes that a header's entry needs."""
    return math.prod(entry["shape"]) * np.dtype(NUMPY[entry["dtype"]]).itemsize
