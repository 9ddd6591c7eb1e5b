"""One mixture-of-experts layer at LLaDA-MoE's shapes, against the plain ways to compute it: `python -m benchmarks.moe`.

Every row of the table is one implementation at one dtype, number of tokens and kind of routing:

    rounds       the library's on CPU (`dllm_jax.kernels.experts`), compiled with the routing as data
    groups       the library's on TPU, tokens sorted by expert and `jax.lax.ragged_dot`, and on NVIDIA GPUs where
                 tokamax runs, by its kernels; elsewhere a dense product
    loop         every expert in turn on all tokens, weighted by the router (zero where it was not chosen)
    einsum       the same as two products over all experts at once

Routing is `even` (random, as of a balanced router) or `same` (every token goes to the same experts, as masked positions
tend to). Seconds are the median of repeats that take turns; compilation is apart. `floor` is what the device could do:
reading the weights of the experts that are hit at the measured copy rate, or the chosen experts' arithmetic at the
measured matmul rate, whichever takes longer.

    python -m benchmarks.moe --json benchmarks/results/moe-cpu.json
    python -m benchmarks.moe --size tiny
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.roofline import Ceilings, Row, measure_ceilings, timed
from dllm_jax.kernels.experts import EXPERTS, RAGGED, TILE_ROWS, Grouped, in_groups, in_rounds

Apply = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
MOST_FLOPS = 1.5e12  # of what is run: more would take a CPU too long; its memory is still reported
PATIENCE = 10.0  # seconds of repeats after which a variant is not repeated any more


@dataclasses.dataclass(frozen=True)
class Size:
    """Shapes of the layer: width D, experts E, their width F, experts per token."""

    dim: int = 2048
    experts: int = 64
    width: int = 1024
    per_token: int = 8


SIZES = {"llada-moe": Size(), "tiny": Size(dim=64, experts=8, width=32, per_token=2)}


def rounds(*operands: Any) -> jax.Array:
    """The library's rounds, as many rows at a time as on this device."""
    return in_rounds(TILE_ROWS.get(jax.default_backend(), TILE_ROWS["default"]), *operands)


def groups(*operands: jax.Array) -> jax.Array:
    """The library's grouped products, as on this device."""
    return in_groups(_grouped(*operands), *operands)


def _grouped(*operands: jax.Array) -> Grouped:
    """By tokamax where it runs these here, else by `jax.lax.ragged_dot`."""
    device, (kernel,) = jax.local_devices()[0], EXPERTS.kernels
    return Grouped(None if kernel.refusal(device, *operands) else device)


def _shares(ids: jax.Array, weights: jax.Array, experts: int) -> jax.Array:
    """[B, T, k] -> each token's weight for every expert, [B, T, E]."""
    return jnp.sum(jax.nn.one_hot(ids, experts, dtype=weights.dtype) * weights[..., None], axis=2)


def loop(x: jax.Array, ids: jax.Array, weights: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Every expert in turn, on all tokens; arguments and result as of `dllm_jax.kernels.experts.apply_experts`."""
    shares = _shares(ids, weights, len(w_in))

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        gate, up = x @ w_in[number, 0], x @ w_in[number, 1]
        return total + (jax.nn.silu(gate) * up) @ w_out[number] * shares[..., number][..., None]

    return lax.fori_loop(0, len(w_in), add, jnp.zeros_like(x))


def einsum(x: jax.Array, ids: jax.Array, weights: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """All experts on all tokens at once; arguments and result as of `dllm_jax.kernels.experts.apply_experts`."""
    copies = jnp.broadcast_to(x, (len(w_in), 2, *x.shape))  # else XLA transposes the weights
    hidden = jnp.einsum("egbtd,egdf->egbtf", copies, w_in)
    every = jnp.einsum("ebtf,efd->ebtd", jax.nn.silu(hidden[:, 0]) * hidden[:, 1], w_out)
    return jnp.einsum("ebtd,bte->btd", every, _shares(ids, weights, len(w_in)))


VARIANTS: dict[str, Apply] = {"rounds": rounds, "groups": groups, "loop": loop, "einsum": einsum}


def make_operands(size: Size, tokens: int, dtype: str, routing: str) -> tuple[jax.Array, ...]:
    """Random inputs, weights and routing of one batch row."""
    keys = jax.random.split(jax.random.key(0), 4)
    logits = jax.random.normal(keys[0], (1, tokens, size.experts))
    logits = logits if routing == "even" else jnp.broadcast_to(logits[:, :1], logits.shape)
    weights, ids = lax.top_k(jax.nn.softmax(logits), size.per_token)
    scaled = lambda key, *shape: jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)
    w_in = scaled(keys[1], size.experts, 2, size.dim, size.width)
    w_out = scaled(keys[2], size.experts, size.width, size.dim)
    return jax.random.normal(keys[3], (1, tokens, size.dim), dtype), ids, weights.astype(dtype), w_in, w_out


def floor_seconds(size: Size, ids: jax.Array, dtype: str, ceilings: Ceilings) -> tuple[float, str]:
    """The least time on this device, and what sets it."""
    per_expert = 3 * size.dim * size.width
    reading = len(jnp.unique(ids)) * per_expert * jnp.dtype(dtype).itemsize / ceilings.copy
    arithmetic = 2 * ids.size * per_expert / ceilings.matmul
    return max((reading, "weights"), (arithmetic, "arithmetic"))


def flops(variant: str, size: Size, operands: Sequence[jax.Array]) -> float:
    """What a variant multiplies at least: whether it will be run at all. Groups are dense per assignment without
    a kernel."""
    tokens, has_kernel = operands[0].shape[1], jax.default_backend() in RAGGED or _grouped(*operands).device
    groups = size.per_token * (1 if has_kernel else size.experts)
    rows = {"rounds": size.per_token, "groups": groups}.get(variant, size.experts)
    return 6.0 * rows * tokens * size.dim * size.width


def measure(
    size: Size, tokens: int, dtype: str, routing: str, ceilings: Ceilings, repeats: int, variants: list[str]
) -> list[Row]:
    """One row per variant, timed in turns; `rounds`, which the others are compared with, comes first."""
    operands = make_operands(size, tokens, dtype, routing)
    floor, bound = floor_seconds(size, operands[1], dtype, ceilings)
    programs: dict[str, Callable[..., jax.Array]] = {}
    rows: list[Row] = []
    for name in variants:
        start = time.perf_counter()
        programs[name] = compiled = jax.jit(VARIANTS[name]).lower(*operands).compile()
        compile_seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        rows.append(
            {"variant": name, "dtype": dtype, "tokens": tokens, "routing": routing}
            | {"temp_mib": memory.temp_size_in_bytes / 2**20 if memory else None, "compile_seconds": compile_seconds}
        )
    running = [row for row in rows if flops(row["variant"], size, operands) <= MOST_FLOPS]
    results = {row["variant"]: jax.block_until_ready(programs[row["variant"]](*operands)) for row in running}
    times: dict[str, list[tuple[float, float | None]]] = {row["variant"]: [] for row in running}
    for _ in range(repeats):
        for name, timings in times.items():
            if sum(seconds for seconds, _ in timings) < PATIENCE:
                timings.append(timed(lambda name=name: programs[name](*operands)))  # type: ignore[misc]
    for row in running:
        timings = times[row["variant"]]
        seconds = statistics.median(timing[0] for timing in timings)
        difference = jnp.abs(results[row["variant"]].astype(jnp.float32) - results["rounds"].astype(jnp.float32))
        row |= {
            "seconds": seconds,
            "over_rounds": seconds / statistics.median(timing[0] for timing in times["rounds"]),
            "fraction_of_floor": floor / seconds,
            "floor_set_by": bound,
            "repeats": len(timings),
            "others_busy": statistics.median(timing[1] or 0.0 for timing in timings),
            "difference": float(difference.max()),
        }
    return rows


def print_rows(rows: list[Row]) -> None:
    """A table; a dash for what was not run."""
    print(
        f"{'variant':11}{'dtype':>9}{'tokens':>7}{'routing':>8}{'ms':>9}{'x rounds':>9}{'of floor':>9}{'temp MiB':>9}"
    )
    for row in rows:
        head = f"{row['variant']:11}{row['dtype']:>9}{row['tokens']:7}{row['routing']:>8}"
        timing = f"{'-':>9}{'-':>9}{'-':>9}"
        if "seconds" in row:
            timing = f"{1e3 * row['seconds']:9.1f}{row['over_rounds']:9.2f}{row['fraction_of_floor']:9.0%}"
        print(f"{head}{timing}{row['temp_mib'] or 0:9.0f}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="llada-moe", help="shapes of the layer (default llada-moe)")
    parser.add_argument("--tokens", default="32,96,1200", help="tokens of a forward (default 32,96,1200)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="default float32,bfloat16")
    parser.add_argument("--routings", default="even,same", help="default even,same")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="rounds first; default all")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    size, variants = SIZES[options.size], options.variants.split(",")
    about = {
        "command": " ".join(["python -m benchmarks.moe", *(arguments or sys.argv[1:])]),
        "layer": dataclasses.asdict(size),
        "hardware": {"device": jax.devices()[0].device_kind, "cpu_cores": os.cpu_count()}
        | {"load_average_at_start": round(os.getloadavg()[0], 1)},
        "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy")}
        | {"python": platform.python_version()},
    }
    rows: list[Row] = []
    ceilings: dict[str, Ceilings] = {}
    for dtype in options.dtypes.split(","):
        ceilings[dtype] = measure_ceilings(dtype, quick=options.size == "tiny")
        for tokens in map(int, options.tokens.split(",")):
            for routing in options.routings.split(","):
                new = measure(size, tokens, dtype, routing, ceilings[dtype], options.repeats, variants)
                print_rows(new)
                rows += new
                if options.json:  # after every group: an interrupted run has measured something too
                    measured = {"ceilings": {name: dataclasses.asdict(x) for name, x in ceilings.items()}, "rows": rows}
                    options.json.write_text(json.dumps(about | measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
