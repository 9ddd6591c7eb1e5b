"""What clients do to a server, as a table: tried, survived, lost.

Every row is a server at work for clients that do nothing wrong, and others that do. "survived" are answers of the
former that equal `generate`'s, or refusals in OpenAI's words; "lost" are all others, and must be none.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.serve_client import SAMPLER, WIDTH, Asked, Served, asking, requests, server
from dllm_jax import Model
from samplers import generate

SLOTS = 8
REFUSED = (400, 404, 413, 422, 429)


async def all_of(model: Model, folder: Path, streams: int) -> list[dict[str, Any]]:
    """All faults, one after another on one server, but for the last."""
    work, rows = requests(model, streams), []
    with server(folder, SLOTS, "--queue", str(2 * streams)) as served:
        faults: dict[str, Callable[[], Coroutine[Any, Any, dict[str, Any]]]] = {
            f"{streams} streams at once": lambda: _streams(served, work, leave=0.0),
            "random disconnects": lambda: _streams(served, work, leave=0.3),
            "malformed bodies": lambda: _beside(served, work, [_garbage(i) for i in range(len(work))]),
            "oversize bodies": lambda: _beside(served, work, [b'{"prompt": "' + b"a" * (2 << 20)] * 24),
            "characters of all kinds": lambda: _unicode(served, model),
        }
        for name, fault in faults.items():
            rows.append({"fault": name, **await fault()})
        rows.append({"fault": "nothing left behind", **await _idle(served)})
    with server(folder, SLOTS, "--queue", "8") as served:
        rows.append({"fault": "a full queue", **await _streams(served, work, leave=0.0)})
    with server(folder, SLOTS, "--queue", str(streams)) as served:
        rows.append({"fault": "an interrupt while all run", **await _interrupted(served, work[:64])})
    return rows


def _row(outcomes: Sequence[str]) -> dict[str, Any]:
    """Counts: equal, refused and left are fine."""
    kinds = ("equal", "refused", "left")
    counts = {kind: outcomes.count(kind) for kind in kinds if kind in outcomes}
    fine = sum(counts.values())
    return {"tried": len(outcomes), "survived": fine, "lost": len(outcomes) - fine, **counts}


async def _streams(served: Served, work: Sequence[Asked], leave: float) -> dict[str, Any]:
    """Streams of OpenAI's client, some of which are closed early."""
    rng = random.Random(1)
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=600)

    async def one(asked: Asked, parts: int | None) -> str:
        got, count = "", 0
        try:
            stream = await client.completions.create(
                model="word-problems", prompt=asked.prompt, max_tokens=asked.length, stream=True
            )
            async for part in stream:
                if count == parts:
                    await stream.close()
                    return "left"
                got, count = got + part.choices[0].text, count + 1
        except openai.APIStatusError as error:
            return "refused" if error.status_code in REFUSED else "lost"
        except openai.APIError:
            return "lost"
        return "equal" if got == asked.text else "lost"

    leaving = [rng.randrange(3) if rng.random() < leave else None for _ in work]
    async with client:
        return _row(await asyncio.gather(*(one(*pair) for pair in zip(work, leaving, strict=True))))


async def _beside(served: Served, work: Sequence[Asked], bodies: Sequence[bytes]) -> dict[str, Any]:
    """Bad bodies, and good requests among them."""
    kind = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=served.url, timeout=600) as client, asking(served.url) as ask:

        async def bad(body: bytes) -> str:
            answer = await client.post("/v1/chat/completions", content=body, headers=kind)
            told = set(answer.json().get("error", {})) == {"message", "type", "param", "code"}
            return "refused" if answer.status_code in REFUSED and told else "lost"

        async def good(asked: Asked) -> str:
            return "equal" if await ask(asked) == asked.text else "lost"

        return _row(await asyncio.gather(*map(bad, bodies), *map(good, work[: len(bodies)])))


def _garbage(seed: int) -> bytes:
    """A body that is wrong in some way: random bytes, a cut or changed body, fields of other types."""
    rng = random.Random(seed)
    good = {"model": "word-problems", "messages": [{"role": "user", "content": "Q"}], "max_tokens": 4}
    text = json.dumps(good).encode()
    wrong: Any = rng.choice(([], None, "x", -1, 1e308, {"a": []}, True))
    field = rng.choice(("messages", "max_tokens", "model", "temperature", "stop", "n", "seed"))
    choices = (
        rng.randbytes(rng.randrange(200)),
        text[: rng.randrange(len(text) - 1)],
        json.dumps({**good, field: wrong, "messages": wrong}).encode(),
        json.dumps({**good, "threshold": {"$gt": 0}}).encode(),
        b"[" * rng.randrange(1, 50_000),
    )
    return choices[seed % len(choices)]


async def _unicode(served: Served, model: Model) -> dict[str, Any]:
    """Prompts of any characters."""
    rng = random.Random(2)
    points = [*range(32, 0xD800), *range(0xE000, 0x30000)]
    texts = ["".join(map(chr, rng.choices(points, k=rng.randrange(1, WIDTH // 4)))) for _ in range(48)]
    answers = generate(model, texts, batch_size=16, progress=False, **SAMPLER)
    length = int(SAMPLER["gen_length"])
    work = [Asked(text, length, answer.text, 0) for text, answer in zip(texts, answers, strict=True)]
    return await _streams(served, work, leave=0.0)


async def _idle(served: Served) -> dict[str, Any]:
    """Whether slots and queue are empty after all that."""
    await asyncio.sleep(1.0)
    left = served.metric("dllm_slots_busy") + served.metric("dllm_queue_length")
    return _row(["lost" if left else "equal"])


async def _interrupted(served: Served, work: Sequence[Asked]) -> dict[str, Any]:
    """An interrupt when everything is admitted, of which all is answered; the exit status counts as one more."""
    asked = asyncio.ensure_future(_streams(served, work, leave=0.0))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while served.metric("dllm_queue_length") + served.metric("dllm_slots_busy") < len(work) - SLOTS:
                await asyncio.sleep(0.05)
    status = await asyncio.to_thread(served.end)
    row = await asked
    ended = _row(["equal" if status == 0 else "lost"])
    return {name: row.get(name, 0) + ended.get(name, 0) for name in row}
