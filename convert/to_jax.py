"""From the hub's format to ours: one parameter at a time, so that memory stays far below the checkpoint's size."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from convert.adapters import read_draft_adapter
from convert.hub_folder import copied_files
from convert.moves import Move, plan_moves
from convert.output import byte_bar, check_out, check_space, keep_refreshing
from convert.source import open_source
from convert.tensors import as_dtype, load
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import ModelConfig, Quantize, check_quantize
from dllm_jax.errors import DllmError
from dllm_jax.families import find_family
from dllm_jax.params.quantized import num_bytes
from dllm_jax.params.specs import abstract_params, float32_params
from dllm_jax.storage import sha256


def convert(
    family: str,
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    quantize: Quantize | None = None,
    revision: str | None = None,
    block_length: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> ModelConfig:
    """Converts a checkpoint in the hub's format into a folder that `dllm_jax.checkpoints.checkpoint` loads.

    Args:
        family: a key of `dllm_jax.families.FAMILIES`, such as "llada".
        source: a folder with config.json and safetensors files, or a repository id, which is downloaded.
        out: the new folder; it appears whole at the end or not at all.
        dtype: "bfloat16", "float16" or "float32"; the source's own by default.
        quantize: "int8" or "int4" stores the kernels so, quantized from `dtype`; None stores them as they are.
        revision: branch, tag or commit of a repository.
        block_length: of an SDAR checkpoint whose config.json and name do not say how long its blocks are.
        overwrite: replace `out` if it is a checkpoint already.
        progress: show a bar on stderr when that is a terminal.

    Returns:
        The config of the converted model.

    Raises:
        DllmError: for every source that is damaged, incomplete or not implemented, and for a full disk.
    """
    record = find_family(family)
    if dtype is not None:
        as_dtype(dtype)
    check_quantize(quantize)
    check_out(out, source=source, overwrite=overwrite, kind=checkpoint.PARAMS_FOLDER)
    if block_length is not None and not record.asks_block_length:
        raise DllmError(f"block_length is for sdar checkpoints, and this is a {family} one; leave it out")
    opened = open_source(source, record, revision, block_length)
    config = record.read_config(opened.hub)
    generation = checkpoint.load_generation(opened.folder) or record.generation_options(opened.hub)
    moves = plan_moves(record, config, opened.entries, str(opened.folder))
    config = config.replace(dtype=dtype or _common_dtype(moves, config, str(opened.folder)), quantize=quantize)
    check_space(out, num_bytes(abstract_params(config)))
    notes: dict[str, Any] = {
        "family": family,
        "source": opened.name,
        "revision": opened.revision,
        "dtypes": _dtypes(moves),
        "config": dict(opened.hub.values),
    }
    files = copied_files(opened.folder) | checkpoint.generation_file(generation)
    files |= read_draft_adapter(opened.folder, config)
    with byte_bar(sum(move.nbytes for move in moves), progress) as bar, keep_refreshing(bar):
        tensors = checkpoint.quantize_params(_stream(moves, config, notes, bar), config, opened.name)
        checkpoint.save(out, config, tensors, files=files, source=notes, overwrite=overwrite)
    return config


def _stream(
    moves: list[Move], config: ModelConfig, notes: dict[str, Any], bar: "tqdm[Any]"
) -> Iterator[tuple[str, np.ndarray]]:
    """The converted tensors, not quantized yet, counted by a bar in bytes; files are hashed meanwhile, and their hashes
    noted before the stream ends.

    `checkpoint.save` writes the notes after the last tensor, so that a file is read from disk only once.
    """
    dtype, kept, hashes = as_dtype(config.dtype), float32_params(config), dict[Path, Future[str]]()
    with ThreadPoolExecutor(1) as pool:
        for move in moves:
            for path in dict.fromkeys(piece.entry.path for piece in move.pieces):
                if path not in hashes:
                    hashes[path] = pool.submit(sha256, path)
            yield move.target, load(move.pieces, move.shape, as_dtype("float32") if move.target in kept else dtype)
            bar.update(move.nbytes)
        bar.set_description("writing")  # what is left of it: a group of tensors, and what joins all of them
        notes["files"] = {
            path.name: {"bytes": path.stat().st_size, "sha256": digest.result()} for path, digest in hashes.items()
        }


def _dtypes(moves: list[Move]) -> list[str]:
    return sorted({piece.entry.dtype.name for move in moves for piece in move.pieces})


def _common_dtype(moves: list[Move], config: ModelConfig, where: str) -> str:
    kept = float32_params(config)
    found = _dtypes([move for move in moves if move.target not in kept])
    if len(found) != 1:
        raise DllmError(f"{where} mixes the dtypes {', '.join(found)}; say which one to write with --dtype")
    return found[0]
