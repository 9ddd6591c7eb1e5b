"""From our format back to the hub's: safetensors shards with an index, config.json and the tokenizer's files."""

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from convert.adapters import write_draft_adapter
from convert.hub_folder import CONFIG_FILE, GENERATION_FILE, copied_files, with_tokenizer
from convert.output import byte_bar, check_out, check_space
from convert.safetensors_reader import BLOCK_BYTES, DTYPES, INDEX_FILE, SINGLE_FILE
from convert.tensors import as_dtype, checked_cast
from dllm_jax import storage
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import CheckpointLayout, Family, Slot, find_family
from dllm_jax.models.transformer import num_params
from dllm_jax.params.specs import float32_params

MAX_SHARD_BYTES = 5 * 10**9
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def export(
    folder: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    layout: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> None:
    """Writes a converted or trained checkpoint in the hub's format, for PyTorch and for publishing.

    config.json is the original one as long as it still describes the model; else it is written from the ModelConfig.

    Args:
        folder: a checkpoint folder of ours.
        out: the new folder; it appears whole at the end or not at all.
        dtype: "bfloat16", "float16" or "float32"; the stored one by default.
        layout: for a family that has several, such as "fused" for llada-moe; the usual one by default.
        max_shard_bytes: size above which the weights are split into several files; a tensor is never split.
        files: more files to put next to them, such as a model card.
        overwrite: replace `out` if it holds safetensors files already.
        progress: show a bar on stderr when that is a terminal.

    Raises:
        DllmError: when the checkpoint cannot be read or has no place in its family's format, when a value is not finite
            or does not fit into `dtype`, and for a full disk.
    """
    folder = checkpoint.find(folder)
    config = checkpoint.load_config(folder)
    checkpoint.require_plain(config, folder, "exported")
    config = config.replace(dtype=dtype or _stored_dtype(folder, config))
    if max_shard_bytes < 1:
        raise DllmError(f"the shard size is {max_shard_bytes} bytes, but must be positive")
    family = find_family(config.family)
    chosen = family.layout(layout, config)
    check_out(out, source=folder, overwrite=overwrite, kind="*.safetensors")
    small = {**_config_files(folder, family, chosen, config), **copied_files(folder), **(files or {})}
    shards = _shards(chosen, config, max_shard_bytes)
    check_space(out, num_params(config) * as_dtype(config.dtype).itemsize)
    with storage.atomic_folder(out, overwrite=overwrite) as scratch:
        try:
            _write_weights(scratch, folder, shards, config, progress)
            for name, content in small.items():
                (scratch / name).write_bytes(content)
            write_draft_adapter(folder, scratch, config)
        except OSError as error:
            raise storage.write_error(out, error) from error


def _stored_dtype(folder: Path, config: ModelConfig) -> str:
    stored = checkpoint.stored_params(folder)
    checkpoint.check_names_and_shapes({name: tuple(x.shape) for name, x in stored.items()}, config, str(folder))
    kept = float32_params(config)
    found = sorted({np.dtype(entry.dtype).name for name, entry in stored.items() if name not in kept})
    if len(found) != 1:
        raise DllmError(f"{folder} mixes the dtypes {', '.join(found)}; say which one to write with --dtype")
    return found[0]


def _config_files(folder: Path, family: Family, layout: CheckpointLayout, config: ModelConfig) -> dict[str, bytes]:
    notes = checkpoint.load_source(folder)
    original = notes.get("config")
    architectures = {"architectures": [layout.architecture]}
    if original and _describes(original, folder, family, config):
        original = original | (architectures if len(family.layouts) > 1 else {})
        key = "dtype" if "dtype" in original else "torch_dtype"
        return {CONFIG_FILE: _json(original if notes["dtypes"] == [config.dtype] else {**original, key: config.dtype})}
    written = {**architectures, **family.write_config(config), "torch_dtype": config.dtype}
    if lost := _lost(written, folder, family, config):
        what = f"{', '.join(f'{name} = {getattr(config, name)}' for name in lost)} of {folder}"
        raise DllmError(f"a {family.name} checkpoint of the hub's format cannot say {what}; keep it in ours")
    return {
        CONFIG_FILE: _json(written),
        GENERATION_FILE: _json({"eos_token_id": list(config.end_ids), "pad_token_id": config.pad_id}),
    }


def _describes(original: dict[str, Any], folder: Path, family: Family, config: ModelConfig) -> bool:
    """Whether the config.json of the conversion is still true: training may have changed the model since."""
    try:
        return not _lost(original, folder, family, config)
    except DllmError:
        return False


def _lost(values: dict[str, Any], folder: Path, family: Family, config: ModelConfig) -> list[str]:
    """Fields of a model's config that a config.json reads back otherwise."""
    read = family.read_config(with_tokenizer(values, folder, CONFIG_FILE, name=""))
    # Not in config.json: the dtype is the tensors', and these ids are the tokenizer's.
    read = read.replace(dtype=config.dtype, bos_id=config.bos_id, end_ids=config.end_ids)
    return [name for name, value in vars(config).items() if getattr(read, name) != value]


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _shards(layout: CheckpointLayout, config: ModelConfig, limit: int) -> list[list[Slot]]:
    """The tensors in the backbone's order, a new shard whenever the next one would make it larger than `limit`."""
    shards: list[list[Slot]] = [[]]
    size, dtype_of = 0, _dtypes_of(config)
    for _, parts in itertools.groupby(layout.slots(config), key=lambda slot: slot.tensor):
        slots = list(parts)
        num_bytes = sum(math.prod(slot.shape) * dtype_of(slot).itemsize for slot in slots)
        if shards[-1] and size + num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1] += slots
        size += num_bytes
    return shards


def _dtypes_of(config: ModelConfig) -> Callable[[Slot], np.dtype]:
    """What each tensor is written as."""
    kept, usual = float32_params(config), as_dtype(config.dtype)
    return lambda slot: as_dtype("float32") if slot.ours in kept else usual


def _write_weights(out: Path, folder: Path, shards: list[list[Slot]], config: ModelConfig, progress: bool) -> None:
    dtype_of = _dtypes_of(config)
    size_of = lambda slot: math.prod(slot.shape) * dtype_of(slot).itemsize
    total = sum(size_of(slot) for shard in shards for slot in shard)
    weight_map: dict[str, str] = {}
    with byte_bar(total, progress) as bar:
        for index, shard in enumerate(shards, 1):
            name = SINGLE_FILE if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= {slot.tensor: name for slot in shard}
            with (out / name).open("wb") as file:
                file.write(_header(shard, dtype_of))
                for slot, array in _with_arrays(shard, folder):
                    _write_tensor(file, array, slot, dtype_of(slot))
                    bar.update(size_of(slot))
    if len(shards) > 1:
        (out / INDEX_FILE).write_bytes(_json({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _with_arrays(shard: list[Slot], folder: Path) -> Iterator[tuple[Slot, np.ndarray]]:
    """Each slot with the parameter it is cut from, which is read once for neighbours."""
    groups = [(ours, list(slots)) for ours, slots in itertools.groupby(shard, key=lambda slot: slot.ours)]
    arrays = checkpoint.iter_params(folder, [ours for ours, _ in groups])
    for (_, slots), (_, array) in zip(groups, arrays, strict=True):
        for slot in slots:
            yield slot, array


def _header(shard: list[Slot], dtype_of: Callable[[Slot], np.dtype]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files that do not say so
    end = 0
    for name, parts in itertools.groupby(shard, key=lambda slot: slot.tensor):
        slots = list(parts)
        dtype = dtype_of(slots[0])
        shape = slots[0].shape if len(slots) == 1 else (sum(slot.shape[0] for slot in slots), *slots[0].shape[1:])
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    return struct.pack("<Q", len(text)) + text


def _write_tensor(file: BinaryIO, array: np.ndarray, slot: Slot, dtype: np.dtype) -> None:
    for index in slot.pieces:
        part = array[index].T if slot.transpose else array[index]
        step = max(1, BLOCK_BYTES * len(part) // part.nbytes)
        for start in range(0, len(part), step):
            block = checked_cast(np.ascontiguousarray(part[start : start + step]), dtype, slot.ours)
            file.write(block.view(np.uint8).data)
