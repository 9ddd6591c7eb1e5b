"""What bfloat16 moments cost: short runs of the embedded text model's recipe, smaller, with moments in either dtype.

    python -m benchmarks.moments --seeds 2 --json benchmarks/results/moments-cpu.json

Runs of one seed have the same weights at the start, rows and noise; the difference that moments make is set beside the
standard deviation over seeds.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import train
from benchmarks import command
from train.curves import read_log
from train.step import Stepper
from train.trainer import placement_of, prepare, training_mesh

RECIPE = Path(train.__file__).parent / "configs" / "word-problems.toml"
SMALLER = (
    *("model.config.embed_dim=64", "model.config.num_layers=2", "model.config.num_heads=2"),
    *("model.config.num_kv_heads=2", "model.config.mlp_dim=192", "optimizer.batch=32", "optimizer.warmup=30"),
)
RATES = {"adamw": 2e-3, "muon": 3e-3}


def config_of(out: Path, steps: int, seed: int, name: str, moments: str) -> train.TrainConfig:
    """The settings of one run."""
    changes = {"out": out, "steps": steps, "seed": seed, "optimizer.name": name, "optimizer.moments": moments}
    changes |= {"optimizer.lr": RATES[name], "log.every": 50, "log.mfu": "false", "checkpoint.every": steps}
    changes |= {"watch.every": steps, "watch.rows": 512}
    return train.read_config(RECIPE, [*SMALLER, *(f"{key}={value}" for key, value in changes.items())])


def moment_bytes(config: train.TrainConfig) -> int:
    """Bytes of the optimiser's state, by its shapes."""
    model = prepare(config).model
    placement = placement_of(config, model, training_mesh(config))
    stepper = Stepper(config, model, placement)
    arrays = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in stepper.trained.shapes().items()}
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stepper.abstract(arrays).optimizer))


def one(steps: int, seed: int, name: str, moments: str) -> dict[str, Any]:
    """A run and what it came to."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder) / "run", steps, seed, name, moments)
        train.train(config)
        log = read_log(config.out)
        held = next(line for line in reversed(log) if "heldout_loss" in line)
        losses = [line["loss"] for line in log if "lr" in line]
        told = {"heldout_loss": held["heldout_loss"], "heldout_cross_entropy": held["heldout_cross_entropy"]}
        return {
            "optimizer": name,
            "moments": moments,
            "seed": seed,
            "losses": losses,
            **told,
            "bytes": moment_bytes(config),
        }


def report(options: argparse.Namespace) -> dict[str, Any]:
    """All runs, and the differences."""
    rows = []
    for seed, name, moments in itertools.product(range(options.seeds), RATES, ("float32", "bfloat16")):
        rows.append(one(options.steps, seed, name, moments))
        print(json.dumps(rows[-1]), flush=True)
    return {
        "what": "the loss on 512 held-out rows after training with moments in float32 and in bfloat16",
        "steps": options.steps,
        "device": jax.devices()[0].device_kind,
        "cpu_cores": os.cpu_count(),
        "versions": {package: version(package) for package in ("jax", "optax")},
        "differences": [_difference(rows, name) for name in RATES],
        "rows": rows,
    }


def _difference(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    value = {(row["seed"], row["moments"]): row for row in rows if row["optimizer"] == name}
    seeds = sorted({seed for seed, _ in value})
    loss = lambda seed, moments: value[seed, moments]["heldout_cross_entropy"]
    apart = [loss(seed, "bfloat16") - loss(seed, "float32") for seed in seeds]
    return {
        "optimizer": name,
        "mean_difference": round(statistics.mean(apart), 5),
        "standard_error": round(statistics.stdev(apart) / len(apart) ** 0.5, 5),
        "deviation_over_seeds": round(statistics.stdev(loss(seed, "float32") for seed in seeds), 5),
        "bytes": {moments: value[seeds[0], moments]["bytes"] for moments in ("float32", "bfloat16")},
    }


def main() -> int:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moments", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each run (default: 200)")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each kind (default: 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.set_defaults(dtype="float32")
    return command.run(parser.parse_args(), report, lambda rows: None)


if __name__ == "__main__":
    raise SystemExit(main())
