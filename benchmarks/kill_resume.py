"""Kills a training run with SIGKILL at random moments and compares what it becomes with a run that was left alone.

    python -m benchmarks.kill_resume --json benchmarks/results/kill-resume.json

Each of the kills comes at a random moment after the start of the process, so that they fall into starting, compiling,
stepping, reporting and writing states alike. At the end every array of the training state and of the written model
must be the same bit by bit.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from dllm_jax.checkpoints import checkpoint
from train.run_dir import METRICS_FILE, MODEL_FOLDER, STATE_FOLDER

STEPS, EVERY = 3000, 10
SETTINGS = f"""
steps = {STEPS}
model.config = {{vocab_size = 32, embed_dim = 32, num_layers = 2, num_heads = 2, num_kv_heads = 2, head_dim = 16, \
mlp_dim = 64, max_length = 64, eos_id = 30, pad_id = 30, mask_id = 31, bos_id = 29, end_ids = [30], dtype = "float32"}}
data = {{source = "jsonl", length = 24, options = {{path = "data.jsonl"}}}}
optimizer = {{batch = 8, ema = 0.99}}
checkpoint.every = {EVERY}
log = {{every = 5, mfu = false}}
"""


def write_inputs(folder: Path) -> None:
    """A config and a data set of 50 examples."""
    (folder / "run.toml").write_text(SETTINGS)
    draws = np.random.default_rng(0).integers(0, 29, (50, 16)).tolist()
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": x[:8], "answer": x[8:]}) + "\n" for x in draws))


def command(out: str) -> list[str]:
    """The command that starts a run and continues it."""
    return [sys.executable, "-m", "train", "masked-diffusion", "--config", "run.toml", "--no-progress", f"out={out}"]


def start(folder: Path, out: str) -> subprocess.Popen:
    """The run as a process."""
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {
        "PYTHONPATH": root,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    return subprocess.Popen(command(out), cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def finish(process: subprocess.Popen) -> None:
    """Waits for a run that must end well."""
    if process.wait():
        raise SystemExit(f"a run ended with status {process.returncode}")


def arrays(out: Path) -> dict[str, np.ndarray]:
    """Everything that a finished run leaves: the last state's arrays and the model's."""
    from orbax.checkpoint import v1 as ocp

    stored = ocp.training.Checkpointer(out / STATE_FOLDER)
    state = stored.load(STEPS)
    stored.close()
    model = {f"model.{name}": x for name, x in checkpoint.iter_params(out / MODEL_FOLDER)}
    return {name: np.asarray(x) for name, x in state.items()} | model


def look(out: Path) -> dict[str, Any]:
    """How far a killed run had come: its whole states, its last line of metrics, and unfinished states."""
    found = os.listdir(out / STATE_FOLDER) if (out / STATE_FOLDER).is_dir() else []
    metrics = (out / METRICS_FILE).read_text().splitlines() if (out / METRICS_FILE).is_file() else []
    return {
        "states": sorted(int(name) for name in found if name.isdigit()),
        "steps_reported": json.loads(metrics[-1])["step"] if metrics else 0,
        "unfinished_writes": len([name for name in found if not name.isdigit()]),
    }


def kill_often(folder: Path, kills: int, seed: int) -> list[dict[str, Any]]:
    """Starts the run again and again, killing it at random moments; one entry per kill."""
    draws, told = np.random.default_rng(seed), []
    for _ in range(kills):
        process, delay = start(folder, "killed"), draws.uniform(2.0, 16.0)
        time.sleep(delay)
        if process.poll() is not None:
            raise SystemExit("the run ended before it could be killed; raise STEPS")
        process.send_signal(signal.SIGKILL)
        process.wait()
        told.append({"killed_after_seconds": round(delay, 2), **look(folder / "killed")})
        print(told[-1], file=sys.stderr)
    return told


def compare(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Which arrays differ in any bit."""
    different = sorted(left.keys() ^ right.keys())
    different += [n for n in left.keys() & right.keys() if left[n].tobytes() != right[n].tobytes()]
    return {"arrays": len(left), "bytes": sum(x.nbytes for x in left.values()), "different": different}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        finish(start(folder, "whole"))
        told = kill_often(folder, options.kills, options.seed)
        finish(start(folder, "killed"))
        outcome = compare(arrays(folder / "whole"), arrays(folder / "killed"))
        lines = [(folder / out / METRICS_FILE).read_text().splitlines() for out in ("whole", "killed")]
    losses = [[(line["step"], line["loss"]) for line in map(json.loads, told_by)] for told_by in lines]
    result = {
        "what": "training killed by SIGKILL at random moments and continued, against a run that was left alone",
        "steps": STEPS,
        "steps_between_states": EVERY,
        "versions": {package: version(package) for package in ("jax", "optax", "orbax-checkpoint")},
        "kills": told,
        **outcome,
        "bitwise_equal": not outcome["different"],
        "same_lines_of_metrics": losses[0] == losses[1],
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if outcome["different"]:
        raise SystemExit("the continued run differs from the one that was left alone")


if __name__ == "__main__":
    main()
