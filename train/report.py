"""What a run tells while it goes: a progress bar, lines of JSON, and how much of the device it uses."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

import jax
import jax.numpy as jnp
from jax import lax
from tqdm import tqdm

from dllm_jax.checkpoint import write_error
from dllm_jax.config import ModelConfig
from dllm_jax.transformer import param_specs
from train.config import TrainConfig
from train.objectives import objective_of


def step_flops(config: TrainConfig, model: ModelConfig, length: int) -> float:
    """Floating-point operations of the matrix products that one step needs: forward, and backward with twice as many.

    All layers on all positions and full attention; the vocabulary head on half of them, the share that is masked on
    average. What rematerialisation computes again does not count, nor do gradients of frozen weights, nor an indicator.
    How often these are computed, the objective says.

    Args:
        length: positions per row.
    """
    rows = config.optimizer.batch
    per_token = sum(_products(name, spec.shape, model) for name, spec in param_specs(model).items())
    head = model.embed_dim * model.vocab_size / 2
    attention = 2 * length * model.num_heads * model.head_dim * model.num_layers
    objective = objective_of(config)
    passes = objective.passes(objective.trained(config, model))
    products = passes.layers * per_token + passes.attention * attention + passes.head * head
    return 2.0 * rows * length * products


def _products(name: str, shape: tuple[int, ...], model: ModelConfig) -> float:
    """Multiplications per token with one parameter of the layers."""
    if len(shape) < 2 or not name.startswith("layers."):
        return 0.0
    if len(shape) == 2:
        return float(math.prod(shape)) if not name.endswith(".bias") else 0.0
    experts = model.experts
    return math.prod(shape) * (experts.per_token / experts.num_experts if experts else 1.0)


def matmul_rate(dtype: str, size: int | None = None, repeats: int = 3) -> float:
    """Floating-point operations per second of a large matrix product on one device, the best of a few."""
    size = size or (1024 if jax.default_backend() == "cpu" else 8192)
    x, w = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    w = w / math.sqrt(size)
    chain = jax.jit(lambda x, w: lax.fori_loop(0, 8, lambda _, x: x @ w, x))
    jax.block_until_ready(chain(x, w))
    seconds = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(chain(x, w))
        seconds = min(seconds, time.perf_counter() - start)
    return 8 * 2 * size**3 / seconds


class Reporter:
    """Counts steps and writes metrics; silent in all processes but the first. Use it by `with`."""

    def __init__(self, config: TrainConfig, model: ModelConfig, path: Path, done: int, *, progress: bool) -> None:
        """Prepares a report to the file `path` from step `done` on.

        Args:
            progress: show a progress bar.
        """
        self._config, self._path, self._done = config, path, done
        self._silent = jax.process_index() > 0
        self._model, self._lengths = model, list[int]()
        devices = math.prod(config.compute.mesh.values())
        self._peak = matmul_rate(config.compute.dtype) * devices if config.log.mfu else None
        self._bar: Any = tqdm(
            total=config.steps,
            initial=done,
            unit="step",
            disable=self._silent or not progress,
            mininterval=0.2 if sys.stderr.isatty() else 30.0,
        )
        self._file: TextIO | None = None
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        if not self._silent:
            with self._writing():
                self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._file is not None:
            with contextlib.suppress(OSError):  # which was told when it was written
                self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._path, error) from None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens meanwhile, such as compilation."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def count(self, length: int) -> None:
        """Notes a step on rows of so many positions."""
        self._lengths.append(length)

    def report(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Writes the metrics of the steps since the last report."""
        seconds, steps = time.perf_counter() - self._start, step - self._done
        line: dict[str, float] = {"step": step, **metrics}
        line["tokens_per_second"] = self._config.optimizer.batch * sum(self._lengths) / seconds
        flops = sum(step_flops(self._config, self._model, length) for length in self._lengths)
        if self._peak is not None:
            line["mfu"] = flops / seconds / self._peak
        line["seconds"] = seconds
        self._bar.update(steps)
        shown = {"loss": f"{metrics.get('loss', math.nan):.4f}", "tok/s": f"{line['tokens_per_second']:.0f}"}
        self._bar.set_postfix(shown | ({"mfu": f"{line['mfu']:.1%}"} if "mfu" in line else {}), refresh=False)
        if self._file is not None:
            with self._writing():
                self._file.write(json.dumps({name: _rounded(value) for name, value in line.items()}) + "\n")
                self._file.flush()
        self._done, self._start, self._lengths = step, time.perf_counter(), []
        return line


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def on_host(metrics: Sequence[Mapping[str, jax.Array | float]]) -> list[dict[str, float]]:
    """The scalars of several steps on the host; waits for the device."""
    return [{name: float(jnp.asarray(value)) for name, value in step.items()} for step in jax.device_get(metrics)]
