"""Training data by worker processes: rows and text per second, and what is left to the process that trains.

    python -m benchmarks.data --json benchmarks/results/data-cpu.json

Rows and text are counted once the processes work. `start` is the seconds to the first batch, `start, 10^9 examples`
those of a shuffled source of so many, each a function of its number. `speed` is per second of wall time and depends on
what else runs (`load_average`); `own_cpu` is the CPU time of the process that trains, in seconds per 1000 rows or per
MB. Every number of workers is measured in turn, and that again `--repeats` times.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import dllm_jax
from benchmarks import command
from benchmarks.sample import describe_hardware
from convert import embedded
from dllm_jax import Model
from train.batches import HostBatches
from train.config import DataPart
from train.data import Example, Loader, Rows, Setup, Source, make_referenced, source_of_split
from train.data.cache import StoredExample, batch_entries, encode_batch
from train.data.entries import EntryForm
from train.data.files import jsonl
from train.data.workers import map_in_order

Row = dict[str, Any]
PROMPT = "Q: Eve has 12 pears. Eve finds 9. How many pears does Eve have?\nA: "
ANSWER = "Eve has 12 pears. Eve finds 9 pears, 12 + 9 = 21. The answer is 21."
TEMPLATE = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TALK = {"messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": ANSWER}] * 2}


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A source of 10^9 examples."""

    def __len__(self) -> int:
        return 10**9

    def example(self, index: int) -> Example:
        """Some tokens, drawn by the number."""
        return Example(np.zeros(0, np.int32), np.random.default_rng(index).integers(5, 500, 256, dtype=np.int32))


def batches(model: Model, source: Source, part: DataPart) -> HostBatches:
    """Batches of 64 rows."""
    return HostBatches(Rows(source, part, "pretrain", model.config, 0, 64, True), np.ones((1, 64), bool))


def measure_rows(make: HostBatches, workers: int, seconds: float) -> Row:
    """Of batches after the first."""
    begun = time.perf_counter()
    with Loader(make, workers).values(range(0, 10**12, 64)) as values:
        next(values)
        start, cpu = time.perf_counter(), time.process_time()
        for count in itertools.count(64, 64):
            next(values)
            if (spent := time.perf_counter() - start) > seconds:
                own = (time.process_time() - cpu) / count * 1000
                return {"start": start - begun, "speed": count / spent, "own_cpu": own}
    raise AssertionError("the numbers have no end")


def measure_start(model: Model, workers: int) -> Row:
    """From a source of 10^9 examples to its first batch."""
    start = time.perf_counter()
    make = batches(model, Numbers(), DataPart(length=256))
    with Loader(make, workers).values(range(0, 10**9, 64)) as values:
        next(values)
        return {"start": time.perf_counter() - start}


def measure_text(model: Model, entry: Row, workers: int, megabytes: float) -> Row:
    """Of JSON lines that are tokenised, after as many batches as are under way at once."""
    line = json.dumps(entry)
    lines = itertools.repeat((0, 1, line), round(megabytes * 1e6 / len(line)))
    work = functools.partial(encode_batch, Setup(model.config, model.tokenizer, 256), EntryForm())
    batches, before = list(batch_entries(lines, 1)), 2 * workers + 1
    with contextlib.closing(map_in_order(work, batches, workers)) as values:
        for _ in range(before):
            next(values)
        start, cpu = time.perf_counter(), time.process_time()
        assert all(isinstance(example, StoredExample) for found in values for *_, example in found)
        size = len(line) * sum(map(len, batches[before:])) / 1e6
        return {"speed": size / (time.perf_counter() - start), "own_cpu": (time.process_time() - cpu) / size}


def report(options: argparse.Namespace) -> Row:
    """Everything that is measured."""
    model = dllm_jax.load(str(embedded.install("word-problems")))
    assert model.tokenizer is not None
    model.tokenizer.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as name:
        measures: dict[str, Callable[[int], Row]] = {}
        measures["conversations (MB)"] = functools.partial(measure_text, model, TALK, megabytes=options.megabytes)
        (Path(name) / "talk.jsonl").write_text(f"{json.dumps(TALK)}\n" * 1000)
        setup = Setup(model.config, model.tokenizer, 256, cache=Path(name) / "cache")
        text = jsonl(setup, path=name, concatenate=True)
        task = source_of_split(make_referenced("evals.tasks:make_task", {"task": "word-problems"}), "word-problems")
        for what, source in (("text", text), ("a task in Python", task)):
            make = batches(model, source, DataPart(length=256))
            measures[f"rows of {what}"] = functools.partial(measure_rows, make, seconds=options.seconds)
        measures["start, 10^9 examples"] = functools.partial(measure_start, model)
        loads = [os.getloadavg()[0]]
        found: dict[tuple[str, int], list[Row]] = {}
        for _ in range(options.repeats):
            for what, workers in itertools.product(measures, options.workers):
                found.setdefault((what, workers), []).append(measures[what](workers))
                print(what, workers, found[what, workers][-1], file=sys.stderr)
            loads.append(os.getloadavg()[0])
    about = f"--workers {' '.join(map(str, options.workers))} --repeats {options.repeats}"
    return {
        "command": f"python -m benchmarks.data {about} --seconds {options.seconds:g} --megabytes {options.megabytes:g}",
        "hardware": describe_hardware(),
        "versions": {name: version(name) for name in ("jax", "numpy", "grain", "tokenizers", "transformers")},
        "load_average": [round(load, 1) for load in loads],
        "rows": [{"what": what, "workers": n, **_spread(rows)} for (what, n), rows in found.items()],
    }


def _spread(rows: list[Row]) -> Row:
    """[least, median, most] of each number."""
    spread = lambda values: [min(values), statistics.median(values), max(values)]
    return {"n": len(rows)} | {name: spread([row[name] for row in rows]) for name in rows[0]}


def show(rows: list[Row]) -> None:
    """Prints a line for each measure and number of workers."""
    for row in rows:
        numbers = {name: value for name, value in row.items() if isinstance(value, list)}
        shown = "  ".join(f"{name} {x[1]:.4g} ({x[0]:.4g} - {x[2]:.4g})" for name, x in numbers.items())
        print(f"{row['what']:24} {row['workers']} workers, n = {row['n']}: {shown}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="processes")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement of rows")
    parser.add_argument("--megabytes", type=float, default=3.0, help="of text")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.set_defaults(dtype=None)
    return command.run(parser.parse_args(arguments), report, show)


if __name__ == "__main__":
    sys.exit(main())
