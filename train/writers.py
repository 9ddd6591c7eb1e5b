"""Where metrics are logged besides the run's own files: TensorBoard, by tensorboardX, and Weights & Biases, by wandb.

out/tensorboard/   event files
out/wandb/         what its client keeps; with WANDB_MODE=offline nothing leaves the machine until `wandb sync`
out/wandb-id       by which a resumed run is the same run there
"""

import dataclasses
import importlib
import os
import secrets
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dllm_jax.errors import DllmError
from train.config import TrainConfig, WriterName
from train.run_dir import WANDB_FILE

# Each is installed by an extra of the writer's name.
_PACKAGES: Mapping[WriterName, str] = types.MappingProxyType({"tensorboard": "tensorboardX", "wandb": "wandb"})


class Writer(Protocol):
    """Takes what a run reports."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Takes numbers by name, such as "train/loss"."""
        ...

    def answers(self, step: int, generations: Sequence[Mapping[str, Any]]) -> None:
        """Takes the generations of an evaluation, see `train.logs.Evaluation`."""
        ...

    def close(self) -> None:
        """Writes what is still buffered."""
        ...


def check_writers(names: Sequence[WriterName]) -> None:
    """Raises DllmError where a package is missing."""
    for name in names:
        _library(name)


def writers(config: TrainConfig, folder: Path, done: int) -> list[Writer]:
    """Those that `log.to` names.

    Args:
        folder: of the run.
        done: steps that were done before; earlier reports about later steps are void.
    """
    kinds: Mapping[WriterName, Callable[..., Writer]] = {"tensorboard": TensorBoard, "wandb": WandB}
    return [kinds[name](config, folder, done) for name in dict.fromkeys(config.log.to)]


class TensorBoard:
    """Event files; what they hold of steps after `done` is hidden."""

    def __init__(self, config: TrainConfig, folder: Path, done: int) -> None:
        self._writer = _library("tensorboard").SummaryWriter(logdir=str(folder / "tensorboard"), purge_step=done + 1)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def answers(self, step: int, generations: Sequence[Mapping[str, Any]]) -> None:
        indented = lambda text: "".join(f"    {line}\n" for line in str(text).splitlines())
        parts = [
            f"{indented(one['prompt'])}\nin {one['nfe']} forwards\n\n{indented(one['text'])}" for one in generations
        ]
        self._writer.add_text("watch/generations", "\n---\n".join(parts), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, which a resumed run continues. Its curves are over `step`: steps that a killed run had
    reported come again with the same values."""

    def __init__(self, config: TrainConfig, folder: Path, done: int) -> None:
        self._library = _library("wandb")
        path = folder / WANDB_FILE
        if not path.is_file():
            path.write_text(secrets.token_hex(8))
        try:
            self._run = self._library.init(
                project=os.environ.get("WANDB_PROJECT", "dllm_jax"),
                id=path.read_text().strip(),
                name=config.out,
                dir=str(folder),
                config=dataclasses.asdict(config),
                resume="allow",
            )
        except Exception as error:  # its client raises whatever accounts and networks do
            advice = "log in by wandb login, or set WANDB_MODE=offline"
            raise DllmError(f'log.to "wandb": no run could be begun ({error}); {advice}') from None
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def answers(self, step: int, generations: Sequence[Mapping[str, Any]]) -> None:
        columns = ["prompt", "text", "nfe", "correct"]
        rows = [[str(one.get(name, "")) for name in columns] for one in generations]
        self._run.log({"watch/generations": self._library.Table(columns=columns, data=rows), "step": step})

    def close(self) -> None:
        self._run.finish()


def _library(name: WriterName) -> Any:
    package = _PACKAGES[name]
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DllmError(
            f'log.to "{name}" needs the package {package}; install it: pip install "dllm_jax[{name}]"'
        ) from None
