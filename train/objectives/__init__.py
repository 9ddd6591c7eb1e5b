"""What training is for, by the name of its command. A new objective is one file in this folder and one name here."""

import types
from collections.abc import Iterable, Mapping
from pathlib import Path

from dllm_jax.errors import DllmError
from train.config import TrainConfig
from train.objectives.autoregressive import Autoregressive
from train.objectives.base import Feed, Objective, Passes
from train.objectives.block_diffusion import BlockDiffusion
from train.objectives.compression import Compression
from train.objectives.d2f import D2F
from train.objectives.dpo import Dpo
from train.objectives.grpo import Grpo
from train.objectives.indicator import FinalTokens
from train.objectives.joint import Joint
from train.objectives.masked_diffusion import MaskedDiffusion
from train.objectives.uniform_diffusion import UniformDiffusion
from train.run_dir import read_settings
from train.settings import build_settings, read_table

OBJECTIVES: Mapping[str, type[Objective]] = types.MappingProxyType(
    {
        objective.config.command: objective
        for objective in (
            MaskedDiffusion,
            D2F,
            BlockDiffusion,
            Joint,
            UniformDiffusion,
            Autoregressive,
            FinalTokens,
            Compression,
            Dpo,
            Grpo,
        )
    }
)

__all__ = ["OBJECTIVES", "Feed", "Objective", "Passes", "config_of_run", "objective_of", "read_config"]


def objective_of(config: TrainConfig) -> Objective:
    """What a run trains for."""
    return OBJECTIVES[config.command].of(config)


def read_config(path: str | Path, overrides: Iterable[str] = (), command: str = "") -> TrainConfig:
    """The settings in a TOML file, changed by overrides such as ``optimizer.lr=3e-4``, for one of `OBJECTIVES`.

    Args:
        command: the objective's name; by default that in the file, or masked-diffusion.

    Raises:
        DllmError: for a file that cannot be read, unknown keys, values of another type or out of range.
    """
    values = read_table(path, overrides)
    command = command or values.get("command", "masked-diffusion")
    if command not in OBJECTIVES:
        raise DllmError(f"{path}: command is {command!r}; choose one of {', '.join(OBJECTIVES)}")
    return build_settings(OBJECTIVES[command].config, values)


def config_of_run(folder: str | Path) -> TrainConfig:
    """The settings of the run in a folder, wherever that is by now, for one device.

    Raises:
        DllmError: for a folder without a run.
    """
    values = read_settings(folder) | {"out": str(folder)}
    values["compute"] |= {"mesh": {}}
    return build_settings(OBJECTIVES[values.get("command", "masked-diffusion")].config, values)
