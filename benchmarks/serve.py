"""The server under load: `python -m benchmarks.serve --json benchmarks/results/serve-cpu.json`.

Clients ask one after another for answers of 8, 16 or 32 positions, one token a forward, on the embedded model of word
problems, each as soon as it has its last one, in three ways of one run:

* engine: `python -m samplers serve`, whose slots take the next request as soon as they are free;
* one at a time: the same server with a single slot;
* naive batches: what waits, up to as many as the engine has slots, in one call of `sample_jit`, which is as
  slow as its slowest row; in this process, so without HTTP.

Ratios are of tokens per second to one at a time. Then come the faults, see `benchmarks.serve_faults`.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax
from benchmarks import command, serve_faults
from benchmarks.serve_client import MODEL, SAMPLER, WIDTH, Ask, Asked, asking, requests, server
from convert import embedded
from dllm_jax import Model
from samplers import make_sampler, sample_jit
from samplers.text.prompts import encode_prompt, pad_prompts


@contextlib.asynccontextmanager
async def in_batches(model: Model, size: int) -> AsyncIterator[Ask]:
    """Answers what waits together, one batch after another."""
    sampler = make_sampler(model, **SAMPLER)
    waiting: asyncio.Queue[tuple[Asked, asyncio.Future[str]]] = asyncio.Queue()

    def run(batch: Sequence[Asked]) -> list[str]:
        rows = [batch[min(i, len(batch) - 1)] for i in range(size)]
        ids = [encode_prompt(model, row.prompt) for row in rows]
        lengths = jnp.asarray([row.length for row in rows], jnp.int32)
        result = jax.device_get(
            sample_jit(sampler, model.denoiser, *pad_prompts(ids, WIDTH), key=jax.random.key(0), gen_lengths=lengths)
        )
        texts = [result.tokens[i, : result.lengths[i]] for i in range(len(batch))]
        return [str(model.require_tokenizer().decode(row, skip_special_tokens=True)) for row in texts]

    async def work() -> None:
        while True:
            batch = [await waiting.get()]
            while len(batch) < size and not waiting.empty():
                batch.append(waiting.get_nowait())
            texts = await asyncio.to_thread(run, [asked for asked, _ in batch])
            for (_, future), text in zip(batch, texts, strict=True):
                future.set_result(text)

    async def ask(asked: Asked) -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting.put_nowait((asked, future))
        return await future

    task = asyncio.create_task(work())
    yield ask
    task.cancel()


# Measuring ------------------------------------------------------------------------------------------------------------


async def load(ask: Ask, work: Sequence[Asked], clients: int) -> dict[str, Any]:
    """So many clients do all the work together."""
    await asyncio.gather(*(ask(asked) for asked in work[:2]))  # programs are compiled before
    left, seconds, wrong = list(reversed(work)), list[float](), 0

    async def client() -> None:
        nonlocal wrong
        while left:
            asked, start = left.pop(), time.perf_counter()
            text = await ask(asked)
            seconds.append(time.perf_counter() - start)
            wrong += text != asked.text

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    took = time.perf_counter() - start
    middle, late = np.quantile(seconds, (0.5, 0.95)).tolist()
    return {
        "requests": len(work),
        "seconds": took,
        "tokens_per_second": sum(asked.tokens for asked in work) / took,
        "last_token_seconds": {"median": middle, "p95": late},
        "differ_from_generate": wrong,
    }


async def measured(url: str, work: Sequence[Asked], clients: int) -> dict[str, Any]:
    async with asking(url) as ask:
        return await load(ask, work, clients)


async def measured_batches(model: Model, size: int, work: Sequence[Asked], clients: int) -> dict[str, Any]:
    async with in_batches(model, size) as ask:
        return await load(ask, work, clients)


def rows_of(model: Model, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The three ways at each number of clients, alternating so that what else the machine does hits all."""
    work = requests(model, max(options.requests))
    rows = []
    with server(folder, options.slots, "--queue", "999") as engine, server(folder, 1, "--queue", "999") as single:
        for clients, count in zip(options.clients, options.requests, strict=True):
            found = {
                "one at a time": asyncio.run(measured(single.url, work[:count], clients)),
                "naive batches": asyncio.run(measured_batches(model, options.slots, work[:count], clients)),
                "engine": asyncio.run(measured(engine.url, work[:count], clients)),
            }
            base = found["one at a time"]["tokens_per_second"]
            for way, row in found.items():
                rows.append({"clients": clients, "way": way, "ratio": row["tokens_per_second"] / base, **row})
    return rows


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured."""
    folder = embedded.install(MODEL)
    model = dllm_jax.load(folder, dtype=options.dtype)
    rows = rows_of(model, folder, options)
    faults = asyncio.run(serve_faults.all_of(model, folder, options.streams))
    return {
        "about": options.about,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "load_average_before": options.load,
        "versions": {"jax": jax.__version__, "dllm_jax": dllm_jax.__version__},
        "model": MODEL,
        "dtype": options.dtype,
        "sampler": SAMPLER,
        "slots": options.slots,
        "rows": rows,
        "faults": faults,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows."""
    print(f"{'clients':>7}  {'way':14}{'tokens/s':>9}{'ratio':>7}{'median s':>10}{'p95 s':>8}{'differ':>8}")
    for row in rows:
        last = row["last_token_seconds"]
        numbers = f"{row['tokens_per_second']:9.0f}{row['ratio']:7.2f}{last['median']:10.3f}{last['p95']:8.3f}"
        print(f"{row['clients']:7}  {row['way']:14}{numbers}{row['differ_from_generate']:8}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--slots", type=int, default=8, help="of the engine, and rows of a naive batch")
    add("--clients", type=int, nargs="+", default=[1, 8, 64])
    add("--requests", type=int, nargs="+", default=[24, 96, 192], help="for each number of clients")
    add("--streams", type=int, default=200, help="of the faults")
    add("--about", default="", help="what else the machine did, for the file")
    add("--dtype", help="float32 on a CPU, bfloat16 elsewhere")
    add("--json", type=Path)
    options = parser.parse_args(arguments)
    options.load = os.getloadavg()[0]
    return command.run(options, report, show)


if __name__ == "__main__":
    sys.exit(main())
