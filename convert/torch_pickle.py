"""Reads a state dict that PyTorch's `save` wrote, without PyTorch and without running anything the file asks for.

Such a file is a zip archive: `<name>/data.pkl`, a pickle that describes tensors, and `<name>/data/<key>`, their bytes.
The pickle may only name what is listed here; every other callable is refused, and those listed are replaced by ours.
"""

import collections
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dllm_jax.errors import DllmError

_DTYPES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}


class _StorageKind(NamedTuple):
    """Stands for a class such as torch.FloatStorage."""

    name: str


class _Lazy(NamedTuple):
    """A tensor that has not been read: element `offset` of a storage on, in row-major order."""

    key: str
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]


def read_state_dict(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a state dict by name, in the stored dtype.

    Raises:
        DllmError: for a file that is damaged, of PyTorch's old format, or more than a dict of plain tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path, archive)
    except zipfile.BadZipFile:
        raise DllmError(f"{path} is not of PyTorch's zip format; save it anew as safetensors") from None
    except OSError as error:
        raise DllmError(f"{path} cannot be read ({error.strerror}); check the file") from None


def _read(path: Path, archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    pickles = [name for name in archive.namelist() if name.endswith("data.pkl") and name.count("/") <= 1]
    if len(pickles) != 1:
        raise DllmError(f"{path} holds {len(pickles)} data.pkl, not one; save it anew as safetensors")
    stem = pickles[0].removesuffix("data.pkl")
    if f"{stem}byteorder" in archive.namelist() and archive.read(f"{stem}byteorder") != b"little":
        raise DllmError(f"{path} was written on a big-endian machine; save it anew as safetensors")
    try:
        with archive.open(pickles[0]) as file:
            found = _Unpickler(file, path).load()
    except DllmError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise DllmError(f"{path} is damaged: its pickle cannot be read ({error}); download it again") from None
    if not isinstance(found, dict) or not all(isinstance(x, _Lazy) for x in found.values()):
        raise DllmError(f"{path} holds more than a dict of tensors; save its state dict as safetensors")
    return {str(name): _array(path, archive, stem, tensor) for name, tensor in found.items()}


class _Unpickler(pickle.Unpickler):
    """Builds dicts and `_Lazy` tensors, and nothing else."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file, encoding="utf-8")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name.

        Raises:
            DllmError: for every name that a state dict does not need.
        """
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in _DTYPES:
            return _StorageKind(name)
        raise DllmError(f"{self._path} asks for {module}.{name}, which is refused; save its state dict as safetensors")

    def persistent_load(self, pid: Any) -> Any:
        """("storage", kind, key, device, elements) -> (key, dtype)."""
        _, kind, key, _, _ = pid
        return str(key), _DTYPES[kind.name]


def _rebuild(storage: tuple[str, np.dtype], offset: int, shape: Any, stride: Any, *_: Any) -> _Lazy:
    shape = tuple(int(size) for size in shape)
    plain = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    counted = [(have, want) for have, want, size in zip(stride, plain, shape, strict=True) if size > 1]
    if any(have != want for have, want in counted):
        raise ValueError(f"a tensor of shape {shape} has strides {tuple(stride)}")
    return _Lazy(storage[0], storage[1], int(offset), shape)


def _array(path: Path, archive: zipfile.ZipFile, stem: str, tensor: _Lazy) -> np.ndarray:
    size, name = math.prod(tensor.shape), f"{stem}data/{tensor.key}"
    try:
        data = archive.read(name)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DllmError(f"{path} is damaged: {name} cannot be read ({error}); download it again") from None
    if tensor.offset < 0 or (tensor.offset + size) * tensor.dtype.itemsize > len(data):
        raise DllmError(f"{path} is damaged: {name} has {len(data)} bytes, fewer than its tensor; download it again")
    return np.frombuffer(data, tensor.dtype, size, tensor.offset * tensor.dtype.itemsize).reshape(tensor.shape)
