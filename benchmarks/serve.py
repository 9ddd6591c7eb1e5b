"""The server under load: `python -m benchmarks.serve --json benchmarks/results/serve-cpu.json`.

Each client asks for one answer after another of 8, 16 or 32 positions, one token a forward, on the embedded model of
word problems, in three ways of one run:

* engine: `python -m samplers serve`, whose slots take the next request as soon as they are free;
* one at a time: the same server with a single slot;
* naive batches: the waiting requests, up to the engine's number of slots, in one call of `sample_jit`, which is as
  slow as its slowest row; in this process, so without HTTP.

Ratios are of tokens per second to one at a time. Faults of clients are tested in `tests/test_serve.py`.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax
from benchmarks import command
from convert import embedded
from dllm_jax import Model
from evals.tasks import make_task
from samplers import generate, make_sampler, sample_jit
from samplers.text.prompts import encode_prompt, pad_prompts

MODEL, WIDTH, LENGTH = "word-problems", 64, 32
SAMPLER: dict[str, Any] = {"rule": "topk", "cache": "dual", "gen_length": LENGTH, "block_length": LENGTH}
LENGTHS = (8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Question:
    """A request, and the answer of `generate` to it alone."""

    prompt: str
    length: int
    text: str
    tokens: int


Ask = Callable[[Question], Awaitable[str]]


def questions(model: Model, count: int) -> list[Question]:
    """Held-out word problems, and what `generate` answers; nothing is drawn, so seeds mean nothing."""
    task, rng = make_task(MODEL), random.Random(0)
    prompts = [task.texts("test", i)[0] for i in range(count)]  # type: ignore[attr-defined]
    lengths = [rng.choice(LENGTHS) for _ in prompts]
    found: list[Question] = []
    for length in LENGTHS:
        own = [prompt for prompt, wanted in zip(prompts, lengths, strict=True) if wanted == length]
        answers = generate(model, own, batch_size=32, progress=False, **{**SAMPLER, "gen_length": length})
        pairs = zip(own, answers, strict=True)
        found += [Question(prompt, length, answer.text, len(answer.tokens)) for prompt, answer in pairs]
    rng.shuffle(found)
    return found


# A server ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(folder: Path, slots: int, *options: str) -> Iterator[str]:
    """Runs a server of the model; its URL."""
    numbers = [text for name, value in SAMPLER.items() for text in ("--" + name.replace("_", "-"), str(value))]
    flags = ["--port", "0", "--slots", str(slots), "--prompt-length", str(WIDTH), "--no-draws", *options]
    line = [sys.executable, "-m", "samplers", "serve", "--model", str(folder), *numbers, *flags]
    root = str(Path(__file__).resolve().parents[1])
    environment, pipe = os.environ | {"PYTHONPATH": root}, subprocess.PIPE
    with subprocess.Popen(line, env=environment, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        try:
            yield ready.split()[-1]  # "... at http://127.0.0.1:PORT"
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


@contextlib.asynccontextmanager
async def over_http(url: str) -> AsyncIterator[Ask]:
    """Asks a server."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as client:

        async def ask(question: Question) -> str:
            body = {"prompt": question.prompt, "max_tokens": question.length}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["text"])

        yield ask


# Naive batches --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def in_batches(model: Model, size: int) -> AsyncIterator[Ask]:
    """Answers waiting requests together, one batch after another."""
    sampler = make_sampler(model, **SAMPLER)
    waiting: asyncio.Queue[tuple[Question, asyncio.Future[str]]] = asyncio.Queue()

    def run(batch: Sequence[Question]) -> list[str]:
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
            texts = await asyncio.to_thread(run, [question for question, _ in batch])
            for (_, future), text in zip(batch, texts, strict=True):
                future.set_result(text)

    async def ask(question: Question) -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting.put_nowait((question, future))
        return await future

    task = asyncio.create_task(work())
    yield ask
    task.cancel()


# Measuring ------------------------------------------------------------------------------------------------------------


async def load(ask: Ask, work: Sequence[Question], clients: int) -> dict[str, Any]:
    """This many clients do all the work together."""
    await asyncio.gather(*(ask(question) for question in work[:2]))  # programs are compiled before
    left, seconds, wrong = list(reversed(work)), list[float](), 0

    async def client() -> None:
        nonlocal wrong
        while left:
            question, start = left.pop(), time.perf_counter()
            text = await ask(question)
            seconds.append(time.perf_counter() - start)
            wrong += text != question.text

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    took = time.perf_counter() - start
    middle, late = np.quantile(seconds, (0.5, 0.95)).tolist()
    return {
        "requests": len(work),
        "seconds": took,
        "tokens_per_second": sum(question.tokens for question in work) / took,
        "last_token_seconds": {"median": middle, "p95": late},
        "differ_from_generate": wrong,
    }


async def measured(url: str, work: Sequence[Question], clients: int) -> dict[str, Any]:
    async with over_http(url) as ask:
        return await load(ask, work, clients)


async def measured_batches(model: Model, size: int, work: Sequence[Question], clients: int) -> dict[str, Any]:
    async with in_batches(model, size) as ask:
        return await load(ask, work, clients)


def rows_of(model: Model, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The three ways at each number of clients, alternating so that what else the machine does hits all."""
    work = questions(model, max(options.requests))
    rows = []
    with server(folder, options.slots, "--queue", "999") as engine, server(folder, 1, "--queue", "999") as single:
        for clients, count in zip(options.clients, options.requests, strict=True):
            found = {
                "one at a time": asyncio.run(measured(single, work[:count], clients)),
                "naive batches": asyncio.run(measured_batches(model, options.slots, work[:count], clients)),
                "engine": asyncio.run(measured(engine, work[:count], clients)),
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
    add("--about", default="", help="what else the machine did, for the file")
    add("--dtype", help="float32 on a CPU, bfloat16 elsewhere")
    add("--json", type=Path)
    options = parser.parse_args(arguments)
    options.load = os.getloadavg()[0]
    return command.run(options, report, show)


if __name__ == "__main__":
    sys.exit(main())
