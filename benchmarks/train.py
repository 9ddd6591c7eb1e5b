"""Training measured: tokens per second, and the share of the device's rate of matrix products that it reaches.

    python -m benchmarks.train --json benchmarks/results/train-cpu.json

One step of the trainer (noise, forward, backward, AdamW) on random tokens, compiled ahead and timed without reporting.
Model FLOPs are those of `train.logs.step_flops`; the rate of matrix products is measured before and after each row,
and the better one taken.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.roofline import measure_ceilings, timed
from dllm_jax.models.transformer import num_params
from train.batches import device_batch
from train.config import TrainConfig
from train.data import Example
from train.logs import step_flops
from train.objectives.masked_diffusion import MaskedDiffusionConfig
from train.settings import build_settings
from train.setup import read_parts
from train.step import training_mesh
from train.trainer import Run, placement_of

SMALL = {"vocab_size": 136, "embed_dim": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
LARGER = {"vocab_size": 1000, "embed_dim": 256, "num_layers": 6, "num_heads": 8, "num_kv_heads": 8, "head_dim": 32}
SPECIAL = {"eos_id": 1, "pad_id": 1, "mask_id": 2, "bos_id": 3, "end_ids": [1], "max_length": 2048, "dtype": "float32"}
CASES: Mapping[str, dict[str, Any]] = {
    "small": {"model": SMALL | {"mlp_dim": 384}, "length": 64},
    "larger": {"model": LARGER | {"mlp_dim": 704}, "length": 128},
    "larger, layers rematerialised": {"model": LARGER | {"mlp_dim": 704}, "length": 128, "remat": "layers"},
    "larger, head in chunks of 512": {"model": LARGER | {"mlp_dim": 704}, "length": 128, "chunk": 512},
    "larger, two parts": {"model": LARGER | {"mlp_dim": 704}, "length": 128, "accumulate": 2},
}


class RandomTokens:
    """An endless source of random tokens: a third prompt, the rest answer."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self._vocab_size, self._length = vocab_size, length

    def example(self, index: int) -> Example:
        """Example `index`."""
        ids = np.random.default_rng(index).integers(4, self._vocab_size, self._length)
        return Example(ids[: self._length // 3], ids[self._length // 3 :])


def settings(case: Mapping[str, Any], batch: int, dtype: str) -> TrainConfig:
    """The case as settings of a run whose folder is never made."""
    model = {**case["model"], **SPECIAL}
    options = {"vocab_size": model["vocab_size"], "length": case["length"]}
    values = {
        "out": str(Path(tempfile.gettempdir()) / "unused"),
        "steps": 1000,
        "model": {"config": model},
        "data": {"source": f"{__spec__.name}:RandomTokens", "options": options, "length": case["length"]},
        "objective": {"chunk": case.get("chunk", 0)},
        "optimizer": {"batch": batch, "accumulate": case.get("accumulate", 1)},
        "compute": {"remat": case.get("remat", "none"), "dtype": dtype},
    }
    return build_settings(MaskedDiffusionConfig, values)


def measure(config: TrainConfig, repeats: int, patience: float, quick: bool) -> dict[str, Any]:
    """Times one case; see the module's text."""
    parts = read_parts(config)
    run = Run(config, parts, placement_of(config, parts.model, training_mesh(config)))
    state, key = run.initial_state(), jax.random.key(0)
    start = time.perf_counter()
    batch = device_batch(parts.rows, 0, config, run.placement.batch)
    data_seconds = time.perf_counter() - start
    start = time.perf_counter()
    program = run.stepper.jit_step(state).lower(state, {}, batch, key).compile()
    compile_seconds = time.perf_counter() - start
    ceiling = lambda: measure_ceilings(config.compute.dtype, quick=quick, repeats=3, patience=patience).matmul

    def step() -> Any:
        nonlocal state
        state, metrics = program(state, {}, batch, key)
        return state, metrics

    step()
    before = ceiling()
    timings = [timed(step, patience) for _ in range(repeats)]
    peak = max(before, ceiling())
    seconds = statistics.median(took for took, _ in timings)
    flops = step_flops(config, parts.model, config.data.length)
    busy = [others for _, others in timings if others is not None]
    return {
        "parameters": num_params(parts.model),
        "batch": config.optimizer.batch,
        "length": config.data.length,
        "dtype": config.compute.dtype,
        "step_ms": round(seconds * 1e3, 2),
        "fastest_step_ms": round(min(took for took, _ in timings) * 1e3, 2),
        "tokens_per_second": round(config.optimizer.batch * config.data.length / seconds),
        "model_gflops_per_step": round(flops / 1e9, 2),
        "matmul_gflops_per_second": round(peak / 1e9, 1),
        "model_flops_utilisation": round(flops / seconds / peak, 3),
        "best_model_flops_utilisation": round(flops / min(took for took, _ in timings) / peak, 3),
        "data_ms_per_step": round(data_seconds * 1e3, 2),
        "compile_seconds": round(compile_seconds, 2),
        "other_cores_busy": round(statistics.median(busy), 2) if busy else None,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for a quiet machine, per timing")
    parser.add_argument("--quick", action="store_true", help="the first case and a small ceiling only")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    rows = {}
    for name, case in list(CASES.items())[: 1 if options.quick else None]:
        config = settings(case, options.batch, options.dtype)
        rows[name] = measure(config, options.repeats, options.patience, options.quick)
        print(name, json.dumps(rows[name]))
    result = {
        "what": "one training step of tiny models, random tokens, against the rate of matrix products of the same run",
        "device": jax.devices()[0].device_kind,
        "cpu_cores": os.cpu_count(),
        "versions": {package: version(package) for package in ("jax", "optax")},
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
