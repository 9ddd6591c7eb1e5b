"""Compares a converted checkpoint with its source, tensor by tensor and bit by bit."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from convert.moves import Move, plan_moves
from convert.output import byte_bar
from convert.source import open_source
from convert.tensors import as_dtype, count_differences, load
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import find_family
from dllm_jax.params.quantized import QuantizedKernel


def verify(source: str | Path, folder: str | Path, *, revision: str | None = None, progress: bool = False) -> int:
    """Reads both sides again and compares every tensor: exact bits, after the cast and the quantization that were done.

    Args:
        source: the folder or repository id that was converted.
        folder: the converted checkpoint.
        revision, progress: as for `convert.convert`.

    Returns:
        The number of the source's tensors that were compared.

    Raises:
        DllmError: when the configs differ, when any tensor differs (the first few are named), or when either side
            cannot be read.
    """
    folder = checkpoint.find(folder)
    config = checkpoint.load_config(folder)
    if "calibrated" in checkpoint.load_source(folder):
        raise DllmError(f"{folder} was quantized for its inputs, in no source's bits; verify what it was made from")
    family = find_family(config.family)
    opened = open_source(source, family, revision, config.block_length)
    expected = dataclasses.asdict(family.read_config(opened.hub).replace(dtype=config.dtype, quantize=config.quantize))
    if changed := [name for name, value in dataclasses.asdict(config).items() if value != expected[name]]:
        raise DllmError(f"the config of {folder} differs from that of {opened.folder} in {', '.join(changed)}")
    moves = plan_moves(family, config, opened.entries, str(opened.folder))
    by_target = {move.target: move for move in moves}
    shapes = {name: tuple(entry.shape) for name, entry in checkpoint.stored_params(folder).items()}
    checkpoint.check_names_and_shapes(shapes, config, str(folder))
    faults = []
    with byte_bar(sum(move.nbytes for move in moves), progress) as bar:
        for name, stored in checkpoint.iter_params(folder):
            move = by_target[name]
            if wrong := _count_differences(move, stored, config):
                faults.append(f"{name} ({wrong} of {math.prod(move.shape)} values)")
            bar.update(move.nbytes)
    if faults:
        more = f" and {len(faults) - 3} more tensors" if len(faults) > 3 else ""
        raise DllmError(
            f"{folder} differs from {opened.folder} in {', '.join(faults[:3])}{more}; convert the checkpoint again"
        )
    return len({piece.entry.name for move in moves for piece in move.pieces})


def _count_differences(move: Move, stored: Any, config: ModelConfig) -> int:
    if not isinstance(stored, QuantizedKernel):
        return count_differences(move.pieces, stored)
    plain = load(move.pieces, move.shape, as_dtype(config.dtype))
    ((_, again),) = checkpoint.quantize_params([(move.target, plain)], config, move.target)
    assert isinstance(again, QuantizedKernel)
    return int(np.sum(again.values != stored.values) + np.sum(again.scale != stored.scale))
