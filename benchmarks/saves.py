"""What saving costs: how long states hold training up, and the memory that writing the model of a run takes.

    python -m benchmarks.saves --json benchmarks/results/saves-cpu.json

A model of some 100 MB is trained for a few steps with AdamW and a moving average, so that a state is four times as
large: once with a state at the end alone, once with several. Then `python -m train write-model` writes its weights; its
peak of resident memory is compared with that of the same command on a model of nearly nothing.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.train import SPECIAL, RandomTokens
from dllm_jax.models.transformer import num_params
from train.objectives.masked_diffusion import MaskedDiffusionConfig
from train.run_dir import States
from train.settings import build
from train.setup import model_config
from train.trainer import train

LARGE = {"vocab_size": 4000, "embed_dim": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
TINY = {"vocab_size": 100, "embed_dim": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16}
LENGTH, BATCH = 64, 4


def config_of(model: dict[str, int], out: Path, steps: int, every: int) -> MaskedDiffusionConfig:
    """A run on random tokens."""
    fields = {**model, **SPECIAL, "mlp_dim": 3 * model["embed_dim"]}
    options = {"vocab_size": model["vocab_size"], "length": LENGTH}
    values = {
        "out": str(out),
        "steps": steps,
        "model": {"config": fields},
        "data": {"source": f"{RandomTokens.__module__}:RandomTokens", "options": options, "length": LENGTH},
        "optimizer": {"batch": BATCH, "ema": 0.9, "warmup": 1},
        "checkpoint": {"every": every, "keep": 1},
        "log": {"every": 1, "mfu": False},
    }
    return build(MaskedDiffusionConfig, values)


def trained(config: MaskedDiffusionConfig) -> dict[str, float]:
    """Seconds of a run's steps, of which so many were spent in beginning to save and in waiting for saves."""
    held, saved = [0.0], 0
    timed = {name: getattr(States, name) for name in ("save", "wait") if hasattr(States, name)}

    def hold(name: str) -> Any:
        def call(self: States, *arguments: Any) -> None:
            nonlocal saved
            start, before = time.perf_counter(), held[0]
            timed[name](self, *arguments)
            held[0] = before + time.perf_counter() - start  # of a wait within a save only once
            saved += name == "save"

        return call

    with mock.patch.multiple(States, **{name: hold(name) for name in timed}):
        train(config)
    lines = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    steps = sum(line["seconds"] for line in lines[1:])
    return {"seconds_of_steps": steps, "seconds_held_up": held[0], "states": saved}


def peak_of_write_model(run: Path, out: Path) -> int:
    """Most resident bytes of the command."""
    command = [sys.executable, "-m", "train", "write-model", "--run", str(run), "--out", str(out), "--overwrite"]
    process, most = subprocess.Popen(command, stdout=subprocess.DEVNULL), 0
    while process.poll() is None:  # ru_maxrss begins with what the process had that started it
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        most = max(most, 1024 * int(found[1]) if found else 0)
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"write-model ended with status {process.returncode}")
    return most


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--every", type=int, default=4, help="steps between states")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        once = trained(config_of(LARGE, folder / "once", options.steps, options.steps))
        often = trained(config_of(LARGE, folder / "often", options.steps, options.every))
        trained(config_of(TINY, folder / "tiny", 2, 2))
        peaks = {of: peak_of_write_model(folder / of, folder / f"{of}-model") for of in ("tiny", "often")}
        state = sum(path.stat().st_size for path in (folder / "often" / "state").rglob("*") if path.is_file())
        shutil.rmtree(folder / "often")
    params = num_params(model_config(config_of(LARGE, folder, 2, 2).model))
    result = {
        "what": "steps with states and without, and the peak of resident memory of python -m train write-model",
        "parameters": params,
        "bytes_of_weights": 4 * params,
        "bytes_of_a_state": state,
        "rows": BATCH,
        "length": LENGTH,
        "steps": options.steps,
        "one_state": once,
        "several_states": often,
        "write_model_peak_bytes": peaks,
        "write_model_bytes_over_a_tiny_models": peaks["often"] - peaks["tiny"],
        "cores": os.cpu_count(),
        "versions": {package: version(package) for package in ("jax", "optax", "orbax-checkpoint")},
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
