"""How long the first generation of a process takes, for every rule and loop, and what kept programs save.

    python -m benchmarks.first_call --json benchmarks/results/first-call-cpu.json

Every sampler runs twice, each time in a process of its own: with an empty folder of compiled programs, as after an
installation (`empty`), and with what that left there, as in later commands (`kept`). Of each process the first
`generate` counts: it traces, compiles or reads programs, and runs. `next` is a second one of the same, which only runs,
and loading is apart. Samplers that the model cannot run are listed with the reason.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dllm_jax
from benchmarks import command
from benchmarks.sample import describe_hardware
from convert import embedded
from dllm_jax import DllmError
from samplers import LOOPS, RULES, generate, parse_sampler

Row = dict[str, Any]

PROMPT = "Q: Eve has 12 pears. Eve finds 9. How many pears does Eve have?\nA: "


def measure_here(model: str, sampler: str, gen_length: int) -> Row:
    """Seconds of loading, of the first generation and of the next one in this process."""
    start = time.perf_counter()
    loaded = dllm_jax.load(model)
    seconds = {"load": time.perf_counter() - start}
    for name in ("first", "next"):
        start = time.perf_counter()
        generate(loaded, PROMPT, sampler=sampler, gen_length=gen_length)
        seconds[name] = time.perf_counter() - start
    return seconds


def measure(model: str, sampler: str, gen_length: int) -> Row:
    """A row of the table: a process with an empty folder of programs, and one with what it left."""
    row: Row = {"sampler": sampler}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("empty", "kept"):
            found = _in_a_process(model, sampler, gen_length, folder)
            if "refused" in found:
                return row | found
            row |= {name: found["first"], "next": found["next"], "load": found["load"]}
        row["kept_bytes"] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return row | {"saved": 1 - row["kept"] / row["empty"]}


def _in_a_process(model: str, sampler: str, gen_length: int, folder: str) -> Row:
    """What `measure_here` finds in a new process, or the sentence with which the model refuses the sampler."""
    options = ["--one", sampler, "--model", model, "--gen-length", str(gen_length)]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": folder}
    environment.pop("JAX_ENABLE_COMPILATION_CACHE", None)
    work = [sys.executable, "-m", "benchmarks.first_call", *options]
    done = subprocess.run(work, env=environment, capture_output=True, text=True)
    if done.returncode == 2 and done.stderr.startswith("error: "):
        return {"refused": done.stderr.removeprefix("error: ").strip()}
    if done.returncode:
        raise DllmError(f"{sampler} failed: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def report(options: argparse.Namespace) -> Row:
    """Everything that is measured."""
    model = str(embedded.install(options.model)) if options.model in embedded.names() else options.model
    samplers = [str(parse_sampler(text)) for text in options.sampler or (*RULES, *LOOPS)]
    return {
        "command": f"python -m benchmarks.first_call --model {options.model} --gen-length {options.gen_length}",
        "hardware": describe_hardware(),
        "versions": {"jax": version("jax")},
        "rows": [measure(model, sampler, options.gen_length) for sampler in samplers],
    }


def show(rows: Sequence[Row]) -> None:
    """A table of seconds, and what was refused."""
    print(f"{'sampler':14} {'empty':>8} {'kept':>8} {'next':>8} {'load':>8} {'saved':>6} {'kept MB':>8}")
    for row in rows:
        if "refused" in row:
            print(f"{row['sampler']:14} {row['refused']}")
            continue
        seconds = " ".join(f"{row[name]:8.2f}" for name in ("empty", "kept", "next", "load"))
        print(f"{row['sampler']:14} {seconds} {row['saved']:6.0%} {row['kept_bytes'] / 1e6:8.1f}")


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="long-problems", help="embedded model or checkpoint (default: long-problems)")
    made.add_argument("--sampler", action="append", metavar="SPEC", help="repeatable (default: every rule and loop)")
    made.add_argument("--gen-length", type=int, default=64, help="positions to generate (default: 64)")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    made.add_argument(
        "--one", metavar="SAMPLER", help="measure one sampler in this process, as the command does itself"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    options = parser().parse_args(arguments)
    if options.one:
        work = lambda: print(json.dumps(measure_here(options.model, options.one, options.gen_length)))
        return command.status_of(work)
    options.dtype = "float32"
    return command.run(options, report, show)


if __name__ == "__main__":
    raise SystemExit(main())
