"""What asks a server, for `benchmarks.serve` and its faults: requests with their answers alone, a server, a client."""

import contextlib
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from dllm_jax import Model
from evals.tasks import make_task
from samplers import generate

MODEL, WIDTH, LENGTH = "word-problems", 64, 32
SAMPLER: dict[str, Any] = {"rule": "topk", "cache": "dual", "gen_length": LENGTH, "block_length": LENGTH}
LENGTHS = (8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request and its answer alone."""

    prompt: str
    length: int
    text: str
    tokens: int


Ask = Callable[[Asked], Awaitable[str]]


def requests(model: Model, count: int) -> list[Asked]:
    """Held-out word problems, and what `generate` answers; nothing is drawn, so seeds mean nothing."""
    task, rng = make_task(MODEL), random.Random(0)
    prompts = [task.texts("test", i)[0] for i in range(count)]  # type: ignore[attr-defined]
    lengths = [rng.choice(LENGTHS) for _ in prompts]
    found: list[Asked] = []
    for length in LENGTHS:
        own = [prompt for prompt, wanted in zip(prompts, lengths, strict=True) if wanted == length]
        answers = generate(model, own, batch_size=32, progress=False, **{**SAMPLER, "gen_length": length})
        pairs = zip(own, answers, strict=True)
        found += [Asked(prompt, length, answer.text, len(answer.tokens)) for prompt, answer in pairs]
    rng.shuffle(found)
    return found


# A server ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Served:
    """A server in a process of its own."""

    url: str
    process: subprocess.Popen[str]

    def metric(self, name: str) -> float:
        """One of its numbers."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    def end(self) -> int:
        """Interrupts it; its exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@contextlib.contextmanager
def server(folder: Path, slots: int, *options: str) -> Iterator[Served]:
    """Starts a server of the model, and ends it."""
    numbers = [text for name, value in SAMPLER.items() for text in ("--" + name.replace("_", "-"), str(value))]
    room = ["--port", "0", "--slots", str(slots), "--prompt-length", str(WIDTH), "--no-draws", *options]
    line = [sys.executable, "-m", "samplers", "serve", "--model", str(folder), *numbers, *room]
    root = str(Path(__file__).resolve().parents[1])
    own, pipe, none = os.environ | {"PYTHONPATH": root}, subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(line, env=own, stdout=pipe, stderr=none, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            yield Served(said.split()[-1], process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


@contextlib.asynccontextmanager
async def asking(url: str) -> AsyncIterator[Ask]:
    """How a server is asked."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as client:

        async def ask(asked: Asked) -> str:
            body = {"prompt": asked.prompt, "max_tokens": asked.length}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["text"])

        yield ask


# Naive batches --------------------------------------------------------------------------------------------------------
