"""The server under load: `python -m benchmarks.serve --json benchmarks/results/serve-cpu.json`.

Each client asks for one answer after another of 8, 16 or 32 positions, one token a forward, on the embedded model of
word problems, in ways that take turns in one run:

* engine: `python -m samplers serve`, whose slots take the next request as soon as they are free, and whose steps run
  as many rows as there are requests;
* all slots: the same, `--no-buckets`, whose steps run all slots;
* one at a time: the same server with a single slot;
* naive batches: the waiting requests, up to the engine's number of slots, in one call of `sample_jit`, which is as
  slow as its slowest row; in this process, so without HTTP; not with `--stream`.

Ratios are of tokens per second to one at a time. Programs are compiled before. With `--stream` clients read texts while
they are written: seconds to the first text, and between texts. Memory is the most that a server's process has held so
far. Faults of clients are tested in `tests/test_serve.py`.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

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


class Heard(NamedTuple):
    """An answer as it came: its text, and when each part of it did, in seconds after the request."""

    text: str
    times: list[float]


class Way(NamedTuple):
    """A way to get answers.

    Attributes:
        ask: gets one.
        settle: waits until the programs for the load so far are compiled.
    """

    ask: Callable[[Question], Awaitable[Heard]]
    settle: Callable[[], Awaitable[None]]


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
def server(folder: Path, slots: int, *options: str) -> Iterator[tuple[str, int]]:
    """Runs a server of the model; its URL and process."""
    numbers = [text for name, value in SAMPLER.items() for text in ("--" + name.replace("_", "-"), str(value))]
    flags = ["--port", "0", "--slots", str(slots), "--prompt-length", str(WIDTH), "--no-draws", *options]
    line = [sys.executable, "-m", "samplers", "serve", "--model", str(folder), *numbers, *flags]
    root = str(Path(__file__).resolve().parents[1])
    environment, pipe = os.environ | {"PYTHONPATH": root}, subprocess.PIPE
    with subprocess.Popen(line, env=environment, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        try:
            yield ready.split()[-1], process.pid  # "... at http://127.0.0.1:PORT"
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


@contextlib.asynccontextmanager
async def over_http(url: str, stream: bool) -> AsyncIterator[Way]:
    """Asks a server."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as client:

        async def ask(question: Question) -> Heard:
            body = {"prompt": question.prompt, "max_tokens": question.length, "stream": stream}
            start, texts, times = time.perf_counter(), list[str](), list[float]()
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    message = line.removeprefix("data: ")
                    if message in ("", "[DONE]"):
                        continue
                    if text := str(json.loads(message)["choices"][0]["text"]):
                        texts.append(text)
                        times.append(time.perf_counter() - start)
            return Heard("".join(texts), times)

        async def settle() -> None:
            while "dllm_compiling 1.0" in (await client.get("/metrics")).text:
                await asyncio.sleep(0.1)

        yield Way(ask, settle)


# Naive batches --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def in_batches(model: Model, size: int) -> AsyncIterator[Way]:
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

    async def ask(question: Question) -> Heard:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        waiting.put_nowait((question, future))
        return Heard(await future, [time.perf_counter() - start])

    async def settle() -> None:
        """There is one program, of the first batch."""

    task = asyncio.create_task(work())
    yield Way(ask, settle)
    task.cancel()


# Measuring ------------------------------------------------------------------------------------------------------------


async def load(way: Way, work: Sequence[Question], clients: int) -> dict[str, Any]:
    """This many clients do all the work together."""
    heard = list[tuple[Question, Heard, float]]()

    async def run(work: Sequence[Question]) -> float:
        left, start = list(reversed(work)), time.perf_counter()

        async def client() -> None:
            while left:
                question, asked = left.pop(), time.perf_counter()
                heard.append((question, await way.ask(question), time.perf_counter() - asked))

        await asyncio.gather(*(client() for _ in range(clients)))
        return time.perf_counter() - start

    for _ in range(2):  # so that the programs for this load are compiled; the second load shows which others it fits
        await run(work[: 2 * clients])
        await way.settle()
    heard.clear()
    took = await run(work)
    quantiles = lambda values, *of: dict(zip(map("p{}".format, of), np.percentile(values, of).tolist(), strict=True))
    between = [gap for _, one, _ in heard for gap in np.diff(one.times)]
    return {
        "requests": len(work),
        "seconds": took,
        "tokens_per_second": sum(question.tokens for question in work) / took,
        "last_token_seconds": quantiles([seconds for _, _, seconds in heard], 50, 95),
        "first_text_seconds": quantiles([one.times[0] for _, one, _ in heard if one.times], 50, 95),
        "between_texts_seconds": quantiles(between, 50, 99) if between else None,
        "differ_from_generate": sum(one.text != question.text for question, one, _ in heard),
    }


async def measured(at: tuple[str, int], work: Sequence[Question], clients: int, stream: bool) -> dict[str, Any]:
    """A server under load, and its memory."""
    url, process = at
    async with over_http(url, stream) as way:
        found = await load(way, work, clients)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {**found, "memory_mib": int(status["VmHWM"].split()[0]) / 1024}


async def measured_batches(model: Model, size: int, work: Sequence[Question], clients: int) -> dict[str, Any]:
    async with in_batches(model, size) as way:
        return await load(way, work, clients)


def rows_of(model: Model, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The ways at each number of clients, alternating so that what else the machine does hits all."""
    work, rows = questions(model, max(options.requests)), []
    ways = {"one at a time": (1,), "all slots": (options.slots, "--no-buckets"), "engine": (options.slots,)}
    with contextlib.ExitStack() as stack:
        open_server = lambda slots, *flags: stack.enter_context(server(folder, slots, "--queue", "999", *flags))
        servers = {way: open_server(*about) for way, about in ways.items()}
        for clients, count in zip(options.clients, options.requests, strict=True):
            run = lambda at, clients=clients, count=count: measured(at, work[:count], clients, options.stream)
            found = {way: asyncio.run(run(at)) for way, at in servers.items()}
            if not options.stream:
                batches = measured_batches(model, options.slots, work[:count], clients)
                found["naive batches"] = asyncio.run(batches)
            base = found["one at a time"]["tokens_per_second"]
            for way, row in found.items():
                rows.append({"clients": clients, "way": way, "ratio": row["tokens_per_second"] / base, **row})
                show(rows[-1:], header=len(rows) == 1, file=sys.stderr)
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
        "stream": options.stream,
        "slots": options.slots,
        "rows": rows,
    }


def show(rows: Sequence[dict[str, Any]], header: bool = True, file: TextIO | None = None) -> None:
    """Prints the rows; seconds are medians, and of texts the 99th percentile of what lies between two."""
    if header:
        times = f"{'last s':>9}{'first s':>9}{'between':>9}"
        print(f"{'clients':>7}  {'way':14}{'tokens/s':>9}{'ratio':>7}{times}{'MiB':>7}{'differ':>8}", file=file)
    for row in rows:
        between = row["between_texts_seconds"]
        own = [row["last_token_seconds"]["p50"], row["first_text_seconds"]["p50"], between and between["p99"]]
        numbers = f"{row['tokens_per_second']:9.0f}{row['ratio']:7.2f}"
        numbers += "".join(f"{'-':>9}" if value is None else f"{value:9.3f}" for value in own)
        numbers += f"{row.get('memory_mib', 0):7.0f}{row['differ_from_generate']:8}"
        print(f"{row['clients']:7}  {row['way']:14}{numbers}", file=file)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--slots", type=int, default=8, help="of the engine, and rows of a naive batch")
    add("--clients", type=int, nargs="+", default=[1, 8, 64, 200])
    add("--requests", type=int, nargs="+", default=[24, 96, 192, 400], help="for each number of clients")
    add("--stream", action="store_true", help="clients read texts while they are written")
    add("--about", default="", help="what else the machine did, for the file")
    add("--dtype", help="float32 on a CPU, bfloat16 elsewhere")
    add("--json", type=Path)
    options = parser.parse_args(arguments)
    options.load = os.getloadavg()[0]
    return command.run(options, report, show)


if __name__ == "__main__":
    sys.exit(main())
