"""One step of D2F's distillation, in time and memory, and what it is at full depth: `python -m benchmarks.d2f`.

A step is the trainer's: noise, the teacher's forward, the student's forward and backward, AdamW on the adapters, with
random weights and tokens. It is measured at two depths, from which time and memory follow for any other by a straight
line: layers are alike, and embeddings, head and loss are there once. Seconds are the least of the repeats, which other
work on the machine disturbs least.

Each depth is measured twice: with the logits of `--chunk` masked positions at a time, as the trainer does, and with
those of all positions at once. What the chunks save is the difference; a layer costs the same either way, so both lines
rise by the mean of what the two measure.

    python -m benchmarks.d2f --size llada-8b --depths 1,3 --batch 1 --length 1024 --json d2f.json      # one GPU
    python -m benchmarks.d2f --json benchmarks/results/d2f-cpu.json

Memory is that of the compiled program (arguments, results in new buffers, temporary); where the device counts what was
allocated, `device_peak_gib` is its highest so far, and cases run from the smallest to the largest. Model FLOPs are
those of `train.logs.step_flops`, the rate of matrix products that of the same run.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command
from benchmarks.roofline import Row, measure_ceilings, timed
from dllm_jax import DllmError, ModelConfig, published
from dllm_jax.params.specs import init_params
from train.config import TrainConfig
from train.logs import step_flops
from train.losses import Batch
from train.objectives.d2f import D2FConfig
from train.settings import build
from train.step import Stepper, training_mesh
from train.trainer import placement_of

GIB = 2**30
LLADA = published("llada-8b-instruct")
SPECIAL: Mapping[str, Any] = {"eos_id": 1, "pad_id": 1, "mask_id": 2, "bos_id": 3, "end_ids": (1,)}
HEADS: Mapping[str, Any] = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
SIZES: Mapping[str, ModelConfig] = {
    "llada-8b": LLADA,
    "small": LLADA.replace(vocab_size=32768, embed_dim=512, mlp_dim=1536, **HEADS, **SPECIAL),
    "tiny": LLADA.replace(vocab_size=64, embed_dim=32, mlp_dim=64, num_heads=2, num_kv_heads=2, head_dim=16, **SPECIAL),
}


def settings(options: argparse.Namespace, chunk: int) -> TrainConfig:
    """The settings of a run whose folder is never made and whose base is never read."""
    values = {
        "out": "unused",
        "steps": 1000,
        "model": {"init": "random weights"},
        "data": {"length": options.length},
        "objective": {"chunk": chunk},
        "lora": {"rank": options.rank, "alpha": float(options.rank)},
        "optimizer": {"batch": options.batch},
        "compute": {"dtype": options.dtype, "remat": options.remat},
    }
    return build(D2FConfig, values)


def prepared(config: TrainConfig, model: ModelConfig, row: Row) -> Callable[[], Any]:
    """Compiles the step and writes compile time and memory into `row`; each call of the result is one step."""
    stepper = Stepper(config, model, placement_of(config, model, training_mesh(config)))
    key, shape = jax.random.key(0), (1, config.optimizer.batch, config.data.length)
    state = stepper.start(stepper.trained.fresh(key, stepper.placement.trained))
    base = init_params(model, key, dtype=config.compute.dtype)
    tokens = jax.random.randint(key, shape, 4, model.vocab_size - 4, jnp.int32)
    answers = jnp.broadcast_to(jnp.arange(shape[-1]) >= shape[-1] // 3, shape)
    batch = Batch(tokens, answers, jnp.full(shape[:2], shape[-1], jnp.int32))
    start = time.perf_counter()
    program = stepper.jitted(state).lower(state, base, batch, key).compile()
    row |= {"compile_seconds": round(time.perf_counter() - start, 2)} | program_memory(program)

    def step() -> Any:
        nonlocal state
        state, metrics = program(state, base, batch, key)
        return metrics

    return step


def program_memory(program: Any) -> Row:
    """What a compiled program needs, in GiB: arguments, temporary, results that reuse no argument, and their sum."""
    found = program.memory_analysis()
    if found is None:
        return {}
    sizes = {
        "arguments": found.argument_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
    }
    sizes["program"] = sum(sizes.values())
    return {f"{name}_gib": round(size / GIB, 4) for name, size in sizes.items()}


def measure(options: argparse.Namespace, depth: int) -> list[Row]:
    """One depth, with the chunked and the whole head; their repeats take turns."""
    model, everything = SIZES[options.size].replace(num_layers=depth), options.batch * options.length
    rows: list[Row] = []
    steps: list[Callable[[], Any]] = []
    for name, chunk in {"chunked": min(options.chunk, everything), "whole": everything}.items():
        rows.append({"layers": depth, "logits": name, "positions_at_a_time": chunk})
        steps.append(prepared(settings(options, chunk), model, rows[-1]))
        jax.block_until_ready(steps[-1]())
        if peak := (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
            rows[-1]["device_peak_gib"] = round(peak / GIB, 3)
    timings = [[timed(step, options.patience) for step in steps] for _ in range(options.repeats)]
    for row, taken in zip(rows, zip(*timings, strict=True), strict=True):
        row["seconds"] = min(seconds for seconds, _ in taken)
        row["median_seconds"] = statistics.median(seconds for seconds, _ in taken)
        row["others_busy"] = round(statistics.median(others or 0.0 for _, others in taken), 2)
    return rows


def with_rates(rows: Sequence[Row], options: argparse.Namespace, matmul: float) -> list[Row]:
    """The rows with tokens per second and the share of the rate of matrix products that the model's FLOPs reach."""

    def more(row: Row) -> Row:
        config = settings(options, 1)
        flops = step_flops(config, SIZES[options.size].replace(num_layers=row["layers"]), config.data.length)
        tokens = options.batch * options.length
        return {"tokens_per_second": tokens / row["seconds"], "mfu": flops / row["seconds"] / matmul, "flops": flops}

    return [row | more(row) for row in rows]


def extrapolated(rows: Sequence[Row], layers: int) -> list[Row]:
    """The rows of two depths continued to another along straight lines, for each kind of logits."""
    pairs = [[row for row in rows if row["logits"] == name] for name in ("chunked", "whole")]
    span = pairs[0][1]["layers"] - pairs[0][0]["layers"]
    steps = (layers - pairs[0][0]["layers"]) / span
    sizes = [name for name in rows[0] if name == "seconds" or name.endswith("_gib") and name != "device_peak_gib"]
    rise = {name: statistics.mean(high[name] - low[name] for low, high in pairs) for name in sizes}
    return [
        {"layers": layers, "logits": low["logits"], "extrapolated": True}
        | {name: low[name] + steps * rise[name] for name in sizes}
        for low, _ in pairs
    ]


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured, as it is written to the file."""
    depths = sorted(int(depth) for depth in options.depths.split(","))
    if len(set(depths)) != 2 or depths[0] < 1:
        raise DllmError(f"depths {options.depths} are not two different numbers of layers; write --depths 1,3")
    ceiling = lambda: measure_ceilings(options.dtype, quick=options.quick, repeats=3, patience=options.patience).matmul
    matmul = ceiling()
    rows = [row for depth in depths for row in measure(options, depth)]
    matmul = max(matmul, ceiling())
    rows = with_rates([*rows, *extrapolated(rows, options.layers)], options, matmul)
    shapes = ("vocab_size", "embed_dim", "mlp_dim", "num_heads", "head_dim")
    chosen = ("size", "batch", "length", "rank", "dtype", "remat", "chunk", "repeats")
    return {
        "what": "one D2F distillation step (teacher and student, LoRA), random weights and tokens; lines of "
        f"{options.layers} layers are extrapolated from {depths[0]} and {depths[1]}",
        "options": {name: getattr(options, name) for name in chosen},
        "model": {name: getattr(SIZES[options.size], name) for name in shapes},
        "device": jax.devices()[0].device_kind,
        "cpu_cores": os.cpu_count(),
        "versions": {package: version(package) for package in ("jax", "optax")},
        "matmul_gflops_per_second": round(matmul / 1e9, 1),
        "rows": rows,
    }


def print_rows(rows: Sequence[Row]) -> None:
    """A table; what is extrapolated has a star."""
    print(f"{'layers':>7} {'logits':8}{'s/step':>9}{'tokens/s':>10}{'MFU':>7}{'temp GiB':>10}{'program GiB':>12}")
    for row in rows:
        layers = f"{row['layers']}{'*' if row.get('extrapolated') else ''}"
        sizes = [f"{row[name]:.3f}" if name in row else "-" for name in ("temporary_gib", "program_gib")]
        rates = f"{row['seconds']:9.3f}{row['tokens_per_second']:10.1f}{row['mfu']:7.3f}"
        print(f"{layers:>7} {row['logits']:8}{rates}{sizes[0]:>10}{sizes[1]:>12}")


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--size", choices=SIZES, default="small")
    made.add_argument("--depths", default="2,4", help="two numbers of layers that are measured")
    made.add_argument("--layers", type=int, default=32, help="the number of layers to extrapolate to")
    made.add_argument("--batch", type=int, default=2)
    made.add_argument("--length", type=int, default=256, help="positions of a row, a third of them prompt")
    made.add_argument("--rank", type=int, default=32)
    made.add_argument("--dtype", choices=["float32", "bfloat16"], help="by default bfloat16 on accelerators alone")
    made.add_argument("--remat", choices=["none", "layers", "matmuls"], default="layers")
    made.add_argument("--chunk", type=int, default=256, help="masked positions whose logits exist at a time")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--patience", type=float, default=0.0, help="seconds to wait for a quiet machine, per timing")
    made.add_argument("--quick", action="store_true", help="a small ceiling")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    return command.run(parser().parse_args(arguments), report, print_rows)


if __name__ == "__main__":
    raise SystemExit(main())
