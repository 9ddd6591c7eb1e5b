"""What reading prompts between steps gains: `python -m benchmarks.prefill --json benchmarks/results/prefill-cpu.json`.

A random model of 29 million parameters, in SDAR's form under the exact cache or in LLaDA's under the dual one, in
float32, and an engine of eight slots.

* together: requests with one long beginning arrive at once; seconds until each has its first block, and all are done,
  if it is read for each request and if it is read once; LLaDA's also if it is read in each refresh, as usual.
* between, of SDAR: while four requests are being answered a long prompt arrives; the longest call of the engine from
  then until its row begins, over the usual one, which runs one step of the four, with the prompt at once and in pieces.

Programs are compiled before. Each is repeated; the median counts.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import command
from dllm_jax import Model, published_config, random_model
from samplers import Engine, Request

Row = dict[str, Any]

BLOCK = 32

PUBLISHED = {"sdar": "sdar-8b-chat", "llada": "llada-8b-instruct"}


def model_of(family: str, dtype: str, room: int) -> Model:
    """The model, with a context of `room` positions."""
    sizes = {"vocab_size": 8192, "embed_dim": 384, "num_layers": 13, "mlp_dim": 1024, "head_dim": 64}
    heads = {"num_heads": 6, "num_kv_heads": 6, "max_length": room}
    heads |= {"block_length": BLOCK} if family == "sdar" else {}
    ids = {"mask_id": 8191, "eos_id": 2, "pad_id": 2, "bos_id": 1, "end_ids": (2,)}
    return random_model(published_config(PUBLISHED[family]).replace(dtype=dtype, **sizes, **heads, **ids))


def engine_of(model: Model, options: argparse.Namespace, **own: Any) -> Engine:
    """Answers of two blocks, four tokens a forward, so that all have as many forwards."""
    shape: dict[str, Any] = {"gen_length": 2 * BLOCK, "block_length": BLOCK, "ignore_eos": True}
    in_blocks = {"cache": "dual", "prompt_block_length": options.chunk}
    shape |= in_blocks if options.family == "llada" else {"cache": "exact"}
    shape |= {"slots": 8, "prompt_length": options.prefix + BLOCK}
    made = Engine(model, "topk:k=4", **{**shape, **own})
    made.compile()
    return made


def together(model: Model, options: argparse.Namespace) -> list[Row]:
    """Requests with a common beginning, by an engine that reads it for each of them and one that reads it once."""
    found = []
    once = {"prefix_cache": 1 << 30, "prefill_chunk": options.chunk}
    ways: dict[str, dict[str, Any]] = {"for each request": {}, "once": once}
    if options.family == "llada":
        ways = {"in each refresh": {"prompt_block_length": None}, **ways}
    for name, own in ways.items():
        engine, seen = engine_of(model, options, **own), list[Row]()
        for repeat in range(options.repeats + 1):  # the first compiles
            rng = np.random.default_rng(repeat)
            beginning, ends = rng.integers(3, 8000, options.prefix), rng.integers(3, 8000, (options.requests, BLOCK))
            asked = [engine.request([*beginning.tolist(), *end.tolist()]) for end in ends]
            start, first = time.perf_counter(), dict[Request, float]()
            for request in asked:
                engine.submit(request)
            while not engine.idle:
                for update in engine.step():
                    if update.final >= BLOCK:
                        first.setdefault(update.request, time.perf_counter() - start)
            took = time.perf_counter() - start
            seen.append({"first_block_seconds": statistics.median(first.values()), "seconds": took})
        medians = {key: statistics.median(row[key] for row in seen[1:]) for key in seen[0]}
        found.append({"what": "together", "beginning_is_read": name, **medians})
    for row in found:
        row["over_first"] = found[0]["first_block_seconds"] / row["first_block_seconds"]
    return found


def between(model: Model, options: argparse.Namespace) -> list[Row]:
    """A long prompt that arrives while others run."""
    found = []
    for chunk in (options.prefix + BLOCK, options.chunk):
        engine, ratios = engine_of(model, options, prefill_chunk=chunk), list[float]()
        for repeat in range(options.repeats + 1):
            rng = np.random.default_rng(repeat)
            for _ in range(4):
                engine.submit(engine.request(rng.integers(3, 8000, 8).tolist()))
            engine.step()
            usual = statistics.median(_seconds(engine)[0] for _ in range(3))
            long = engine.submit(engine.request(rng.integers(3, 8000, options.prefix).tolist()))
            calls, begun = list[float](), False
            while not begun:
                took, ran = _seconds(engine)
                calls.append(took)
                begun = long in ran
            ratios.append(max(calls) / usual)
            list(engine.results())
        found.append({"what": "between", "chunk": chunk, "longest_over_usual": statistics.median(ratios[1:])})
    return found


def _seconds(engine: Engine) -> tuple[float, list[Request]]:
    """A call of the engine: how long it took, and the requests that had a step."""
    start = time.perf_counter()
    ran = [update.request for update in engine.step()]
    return time.perf_counter() - start, ran


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured."""
    model = model_of(options.family, options.dtype, options.prefix + 8 * BLOCK)
    about = {"device": jax.devices()[0].device_kind, "cores": os.cpu_count(), "load_average_before": options.load}
    numbers = {name: getattr(options, name) for name in ("family", "dtype", "prefix", "requests", "chunk", "repeats")}
    rows = together(model, options)
    if options.family == "sdar":  # under the dual cache a refresh of the others takes longer than a piece
        rows += between(model, options)
    return {**about, "jax": jax.__version__, **numbers, "rows": rows}


def show(rows: Sequence[Row]) -> None:
    """Prints the rows."""
    for row in rows:
        print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--family", choices=sorted(PUBLISHED), default="sdar")
    add("--prefix", type=int, default=2048, help="tokens of the long beginning (default 2048)")
    add("--requests", type=int, default=32, help="that share it (default 32)")
    add("--chunk", type=int, default=128, help="positions that are read between two steps, LLaDA's block (default 128)")
    add("--repeats", type=int, default=3)
    add("--dtype", help="float32 on a CPU, bfloat16 elsewhere")
    add("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    options.load = os.getloadavg()[0]
    return command.run(options, report, show)


if __name__ == "__main__":
    sys.exit(main())
