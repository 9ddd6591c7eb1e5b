"""The gain from slots: every sampler over many prompts, through an engine and in plain batches, on embedded models.

    python -m benchmarks.slots --json benchmarks/results/slots-cpu.json

A row's `tokens_per_second` counts answers' tokens; `forwards_per_second` counts every row's forwards, so that its
ratio to top-k's, `of_topk`, is the ratio of tokens per second at equal mean forwards. `over_batches` is the same work
in batches of as many rows, which wait for their slowest. The two take turns; of several repeats the median counts. On
CPU seconds are those of the process, all its threads together. The indicator is untrained: its tokens mean nothing, its
cost is right.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import command
from convert import embedded
from dllm_jax import DllmError, Model
from dllm_jax.indicator import IndicatorConfig, init_indicator
from evals.models import Models
from evals.runner import Batches, prepare_batches
from samplers import NI, sample_jit
from samplers.engine.runner import Engines
from samplers.sampler import Result

Row = dict[str, Any]

clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
"""On CPU seconds of the process, all threads together, which other work on the machine disturbs least."""

TASKS = {"sudoku": "sudoku:box_rows=2,box_columns=3", "word-problems": "word-problems"}
SAMPLERS = ("topk:k=2", "topk:k=4", "eb:gamma=0.1", "threshold:threshold=0.9", "credit:threshold=0.65", "ni")
BASELINE = "topk"


def prepared(model: Model, name: str, sampler: str, n: int, slots: int) -> Batches:
    """The examples as requests of one sampler."""
    found = prepare_batches(Models(model), TASKS[name], "topk" if sampler == "ni" else sampler, n, slots, 0, "test")[1]
    if sampler == "ni":
        config = IndicatorConfig(2, 64, model.config.embed_dim, model.config.embed_dim, 8)
        plain: Any = found.sampler
        found.sampler = dataclasses.replace(plain, rule=NI(init_indicator(config, jax.random.key(0)), 0.6))
    return found


def through_slots(batches: Batches, engines: Engines) -> Callable[[], tuple[float, dict[int, Result], float]]:
    """Runs everything through slots: seconds, results and occupancy."""
    engine = batches.engine(engines)
    engine.compile()

    def run() -> tuple[float, dict[int, Result], float]:
        before, start = engine.stats, clock()
        results = {request.number: result for request, result in batches.results(engine, False, "")}
        took = clock() - start
        return took, results, (engine.stats - before).occupancy

    return run


def in_batches(batches: Batches, results: dict[int, Result]) -> Callable[[], float]:
    """Runs everything in batches: seconds. The last batch must be full."""
    keys = jax.random.wrap_key_data(jax.numpy.asarray(batches.keys))
    parts = [(np.asarray(index), known) for index, _, known in batches.batch(results)]
    sample = lambda index, known: sample_jit(batches.sampler, batches.model.denoiser, key=keys[index], **known)
    jax.block_until_ready(sample(*parts[0]))

    def run() -> float:
        start = clock()
        for part in parts:
            jax.device_get(sample(*part))
        return clock() - start

    return run


def measure(name: str, model: Model, sampler: str, options: argparse.Namespace) -> Row:
    """One row."""
    batches = prepared(model, name, sampler, options.n, options.slots)
    slots = through_slots(batches, Engines())
    _, results, occupancy = slots()
    plain = in_batches(batches, results)
    taken = [(slots()[0], plain()) for _ in range(options.repeats)]
    seconds, in_plain = (statistics.median(column) for column in zip(*taken, strict=True))
    rows = [batches.row_of(result, index) for index, result in results.items()]
    tokens, forwards = sum(row.tokens for row in rows), sum(row.nfe for row in rows)
    return {
        "model": name,
        "sampler": sampler,
        "accuracy": float(np.mean([row.correct for row in rows])),
        "nfe": forwards / len(rows),
        "occupancy": occupancy,
        "tokens_per_second": tokens / seconds,
        "forwards_per_second": forwards / seconds,
        "over_batches": statistics.median(other / own for own, other in taken),
        "seconds": seconds,
        "batch_seconds": in_plain,
    }


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured."""
    if options.n % options.slots:
        raise DllmError(f"n {options.n} is not a multiple of the {options.slots} slots, so batches would not be full")
    found: list[Row] = []
    for name in TASKS:
        model, own = embedded.load(name), list[Row]()
        for sampler in SAMPLERS:
            own.append(measure(name, model, sampler, options))
            show(own[-1:])
        best = max(row["forwards_per_second"] for row in own if row["sampler"].startswith(BASELINE))
        found += [row | {"of_topk": row["forwards_per_second"] / best} for row in own]
    return {
        "command": f"python -m benchmarks.slots --n {options.n} --slots {options.slots} --repeats {options.repeats}",
        "device": jax.devices()[0].device_kind,
        "cpu_cores": os.cpu_count(),
        "versions": {"jax": version("jax")},
        "rows": found,
    }


def show(rows: Sequence[Row]) -> None:
    """A line per row."""
    for row in rows:
        of = f", {row['of_topk']:.2f} of top-k's" if "of_topk" in row else ""
        print(
            f"{row['model']:14} {row['sampler']:24} NFE {row['nfe']:6.2f}  {row['tokens_per_second']:7.0f} tokens/s, "
            f"{row['forwards_per_second']:6.0f} forwards/s{of}; {row['over_batches']:.2f} times batches, "
            f"occupancy {row['occupancy']:.2f}",
            flush=True,
        )


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--n", type=int, default=512, help="problems of each task (default 512)")
    made.add_argument("--slots", type=int, default=64, help="rows that run together (default 64)")
    made.add_argument("--repeats", type=int, default=3, help="of every measurement (default 3)")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    options = parser().parse_args(arguments)
    options.dtype = "float32"
    return command.run(options, report, show)


if __name__ == "__main__":
    raise SystemExit(main())
