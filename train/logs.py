"""What a run reports: a progress bar, lines of JSON, other writers, and the share of the device's peak that it uses."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from tqdm import tqdm

from dllm_jax.cli import progress_bars
from dllm_jax.config import ModelConfig
from dllm_jax.models.transformer import param_specs
from dllm_jax.storage import write_error
from train.config import TrainConfig
from train.device_peaks import data_sheet
from train.objectives import objective_of
from train.run_dir import GENERATIONS_FILE, METRICS_FILE
from train.writers import Writer, writers

_IN_BAR = {"held out": "heldout_loss", "accuracy": "accuracy"}


def step_flops(config: TrainConfig, model: ModelConfig, length: int) -> float:
    """Floating-point operations of the matrix products that one step needs: forward, and backward with twice as many.

    All layers on all positions and full attention; the vocabulary head on half of them, the share that is masked on
    average. What rematerialisation computes again does not count, nor do gradients of frozen weights, nor an indicator.
    The objective gives the number of passes.

    Args:
        length: positions per row.
    """
    rows = config.optimizer.batch
    per_token = sum(_products(name, spec.shape, model) for name, spec in param_specs(model).items())
    head = model.embed_dim * model.vocab_size / 2
    attention = 2 * length * model.num_heads * model.head_dim * model.num_layers
    objective = objective_of(config)
    passes = objective.passes(objective.trainable(config, model))
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


class Evaluation(NamedTuple):
    """One evaluation of a run's weights, see `train.evaluation`.

    Attributes:
        metrics: by name.
        generations: "prompt", "text" and "nfe" of each answer; for a task's problems also "correct".
    """

    metrics: dict[str, float]
    generations: list[dict[str, Any]]


class Peak(NamedTuple):
    """The peak that utilisation is a share of.

    Attributes:
        rate: floating-point operations per second of all devices.
        about: the peak and its source in words.
    """

    rate: float
    about: str

    @classmethod
    def of(cls, dtype: str, devices: int) -> Self:
        """The data sheet's, or where there is none the rate that one device is measured at."""
        kind = jax.devices()[0].device_kind
        sheet = data_sheet(kind, dtype)
        rate = sheet or matmul_rate(dtype)
        source = "data sheet" if sheet else "measured"
        return cls(rate * devices, f"{rate * devices / 1e12:.4g} TFLOP/s of {devices} x {kind}, {dtype}, {source}")


class Reporter:
    """Counts steps and writes reports; silent in all processes but the first. Use it by `with`."""

    def __init__(self, config: TrainConfig, model: ModelConfig, folder: Path, done: int, *, progress: bool) -> None:
        """Prepares reports to the files of a run's folder, and to `log.to`, from step `done` on.

        Args:
            progress: show a progress bar.
        """
        self._config, self._folder, self._done = config, folder, done
        self._silent = jax.process_index() > 0
        self._model, self._lengths = model, list[int]()
        devices = math.prod(config.compute.mesh.values())
        self._peak = Peak.of(config.compute.dtype, devices) if config.log.mfu else None
        self._bar: Any = tqdm(
            total=config.steps,
            initial=done,
            unit="step",
            disable=self._silent or not progress,
            mininterval=progress_bars.interval(),
        )
        self._shown: dict[str, str] = {}
        self._writers: list[Writer] = []
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        if not self._silent:
            with self._writing(METRICS_FILE) as path:
                path.open("a").close()
            self._writers = writers(self._config, self._folder, self._done)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        for writer in self._writers:
            writer.close()

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        try:
            yield self._folder / name
        except OSError as error:
            raise write_error(self._folder / name, error) from None

    @contextlib.contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        """Leaves the block's time, such as compilation, out of rates, and shows the activity in front of the bar."""
        start = time.perf_counter()
        self._bar.set_description(doing)
        yield
        self._bar.set_description(None)
        self._start += time.perf_counter() - start

    def count(self, length: int) -> None:
        """Counts a step on rows of this length."""
        self._lengths.append(length)

    def report(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Writes the metrics of the steps since the last report."""
        seconds, steps = time.perf_counter() - self._start, step - self._done
        line: dict[str, float] = {"step": step, **metrics}
        line["tokens_per_second"] = self._config.optimizer.batch * sum(self._lengths) / seconds
        flops = sum(step_flops(self._config, self._model, length) for length in self._lengths)
        if self._peak is not None:
            line["mfu"] = flops / seconds / self._peak.rate
        line |= {"steps": steps, "seconds": seconds}
        self._bar.update(steps)
        shown = {name: f"{metrics[name]:.4f}" for name in ("reward", "loss") if name in metrics}
        shown |= {"tok/s": f"{line['tokens_per_second']:.0f}"}
        self._show(shown | ({"mfu": f"{line['mfu']:.1%}"} if "mfu" in line else {}))
        of = {} if self._peak is None else {"mfu_of": self._peak.about}
        self._write_line(step, "train", line, of)
        self._done, self._start, self._lengths = step, time.perf_counter(), []
        return line

    def report_evaluation(self, step: int, found: Evaluation) -> None:
        """Writes the evaluation after this many steps."""
        self._show({name: f"{found.metrics[key]:.4g}" for name, key in _IN_BAR.items() if key in found.metrics})
        self._write_line(step, "watch", {"step": step, **found.metrics})
        if self._silent or not found.generations:
            return
        with self._writing(GENERATIONS_FILE) as path, path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **one}, ensure_ascii=False) + "\n" for one in found.generations)
        for writer in self._writers:
            writer.answers(step, found.generations)
        if not self._bar.disable:
            first = found.generations[0]
            self._bar.write(f"step {step}: {first['prompt']!r} -> {first['text']!r}", file=sys.stderr)

    def _show(self, values: Mapping[str, str]) -> None:
        self._shown |= values
        self._bar.set_postfix(self._shown, refresh=False)

    def _write_line(
        self, step: int, kind: str, line: Mapping[str, float], texts: Mapping[str, str] | None = None
    ) -> None:
        if self._silent:
            return
        rounded = {name: _round(value) for name, value in line.items()} | dict(texts or {})
        with self._writing(METRICS_FILE) as path, path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rounded) + "\n")
        for writer in self._writers:
            writer.numbers(step, {f"{kind}/{name}": value for name, value in line.items() if name != "step"})


def _round(value: float) -> float | None:
    """As JSON takes it, which has no number that is not finite."""
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def fetch_metrics(metrics: Sequence[Mapping[str, jax.Array | float]]) -> list[dict[str, float]]:
    """The scalars of several steps on the host; waits for the device."""
    return [{name: float(jnp.asarray(value)) for name, value in step.items()} for step in jax.device_get(metrics)]
