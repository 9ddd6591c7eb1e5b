"""What a server survives: ten minutes of clients of all kinds, and the death of one of two servers behind nginx.

DLLM_JAX_SIEGE_SECONDS shortens the siege, and its answers with it; DLLM_JAX_SIEGE_JSON names a file for its numbers
(`benchmarks/results/siege-cpu.json`).
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import h11
import httpx
import pages
import pytest
from conftest import free_ports, wait_until

from convert import embedded

SECONDS = float(os.environ.get("DLLM_JAX_SIEGE_SECONDS", 600))
ANSWERS = math.ceil(10_000 * SECONDS / 600)
CLIENTS, SLOTS, QUEUE, MOST_BODY = 24, 8, 8, 20_000
KEYS = ("one", "two")
HANGS = 300.0  # seconds for an answer; some take longer where a program is compiled on a busy machine, none so long
MOST_GROWTH = 32.0
"""MiB between the memory after a fifth of the answers and after all: 4 kB for each of 8,000 answers. What one leaves
behind, if it leaves its ticket, body, request or result, is more; what the allocator keeps for later does not grow."""

ROOM = ["--gen-length", "32", "--prompt-length", "64", "--slots", str(SLOTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model of word problems, with a chat format, and a file of keys beside it."""
    found = embedded.install("word-problems", tmp_path_factory.mktemp("siege") / "word-problems")
    (found / "chat_template.jinja").write_text("{% for turn in messages %}{{ turn['content'] }}{% endfor %}")
    (found.parent / "keys").write_text("\n".join(KEYS))
    return found


def start(folder, log, *options, port=0):
    """A server that listens: its process and port."""
    command = [sys.executable, "-m", "samplers", "serve", "--model", str(folder), "--port", str(port), *ROOM, *options]
    as_users = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    with log.open("a") as err:
        keys = ["--api-key-file", str(folder.parent / "keys")]
        process = subprocess.Popen([*command, *keys], env=as_users, stdout=subprocess.PIPE, stderr=err, text=True)
    line = process.stdout.readline()
    assert line, log.read_text()
    return process, int(line.rpartition(":")[2])


# What is asked --------------------------------------------------------------------------------------------------------

PROBLEMS = [
    "Q: Sam has 26 nuts. Sam buys 10. Sam keeps one of 3 equal parts.\nA: ",
    "Q: Eve has 12 pears. Eve finds 9. Eve shares equally among 3.\nA: ",
    "Q: Tom has 12 pears. Tom buys 23.\nA: ",
]
STEP = "[0-9]{2}[-+][0-9]{1,2}=[0-9]{2}"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
CHOICE = {"fields": {"sign": ["+", "-"], "answer": [10, 11, 12]}, "template": "26{sign}10=36. 36/3=12. #### {answer}"}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request with a seed. Its answer alone is the same every time.

    Attributes:
        weight: how often it is drawn.
    """

    kind: str
    route: str
    body: dict
    weight: float

    @property
    def can_stream(self):
        return self.route.endswith("completions")

    def content(self, stream=False):
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return json.dumps({**self.body, **streamed}).encode()


def requests():
    """Some thirty requests, of which most have a few tokens."""

    def of(kind, *bodies, route="completions", weight=1.0):
        for seed, body in enumerate(bodies):
            given = {"prompt": PROBLEMS[seed % 3]} if route in ("completions", "canvas") else {}
            yield Asked(kind, f"/v1/{route}", {**given, "seed": seed, **body}, weight)

    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    ask = [{"role": "user", "content": problem} for problem in PROBLEMS]
    chats = [{"messages": ask[:1], "max_tokens": 3}, {"messages": ask[1:2], "logprobs": True, "top_logprobs": 1}]
    gaps = [{"template": PROBLEMS[0] + "<gap:5>."}, {"template": "<gap:2>. #### <gap:1>", "prompt": PROBLEMS[2]}]
    return [
        *of("short", *({"max_tokens": 1 + i % 4, "temperature": 0.7 * (i % 2)} for i in range(8)), weight=10.0),
        *of("long", {}, {"threshold": 0.7}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9, "top_k": 50}),
        *of(
            "several", {"n": 2, "temperature": 1.0, "max_tokens": 3}, {"prompt": PROBLEMS[:2], "n": 2, "max_tokens": 2}
        ),
        *of("ids", {"prompt": [100, 200, 300], "max_tokens": 4}, {"echo": True, "max_tokens": 3}),
        *of("stop", {"stop": "."}, {"stop": ["#", "="], "temperature": 0.5}),
        *of("logprobs", {"logprobs": 1, "max_tokens": 6}, {"logprobs": 0, "temperature": 0.7}),
        *of("chat", *chats, route="chat/completions"),
        *of("regex", {"regex": STEP}, {"regex": "(yes|no)", "max_tokens": 4, "temperature": 0.7}),
        *of("json", {"response_format": schema}, {"response_format": {"type": "json_object"}, "max_tokens": 12}),
        *of("suffix", {"suffix": " #### 12", "max_tokens": 4}),
        *of("infill", *gaps, route="infill"),
        *of("decide", *({**CHOICE, "prompt": problem} for problem in PROBLEMS[:2]), route="decide"),
        *of("canvas", {}, {"max_tokens": 4, "temperature": 0.7}, route="canvas"),
    ]


REFUSED = [
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b"[" * 10_000, 400),
    ("/v1/completions", {}, 422),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 422),
    ("/v1/completions", {"prompt": "a", "treshold": 1}, 400),
    ("/v1/completions", {"prompt": "a " * 500}, 400),
    ("/v1/completions", {"prompt": "a", "n": SLOTS + QUEUE + 1}, 400),
    ("/v1/completions", {"prompt": "a", "regex": "a", "stop": "b"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "tool"}]}, 422),
    ("/v1/chat/completions", {"messages": [], "model": "other"}, 404),
    ("/v1/infill", {"template": "no gap"}, 400),
    ("/v1/decide", {"prompt": "a", "fields": {}}, 400),
    ("/v1/canvas", {"prompt": "a", "messages": []}, 400),
    ("/v1/nothing", {}, 404),
]


def summary(asked, stream, body):
    """What an answer says, in the same form whether it was streamed; without what differs each time."""
    found = canvas_summary(body) if asked.kind == "canvas" else stream_summary(body) if stream else json.loads(body)
    choices = [choice_summary(choice) for choice in found.get("choices", [])]
    return {
        **{name: value for name, value in found.items() if name not in ("id", "created", "object")},
        "choices": choices,
    }


def choice_summary(choice):
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {"text": text, **{name: choice[name] for name in ("index", "finish_reason", "logprobs")}}


def events(body):
    *events, end = body.decode().removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]", end
    return [json.loads(event.removeprefix("data: ")) for event in events]


def stream_summary(body):
    """A stream as the whole answer that it is."""
    choices = collections.defaultdict(lambda: {"text": "", "finish_reason": None, "logprobs": None})
    for event in (found := events(body)):
        for choice in event["choices"]:
            own = choices[choice["index"]]
            own["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            own |= {name: choice[name] for name in ("index", "finish_reason", "logprobs") if choice[name] is not None}
    return {**found[-1], "choices": [{**choices[i], "index": i} for i in sorted(choices)]}


def text_so_far(body):
    """The text of a stream that was cut, perhaps in the middle of an event."""
    *events, _ = body.decode(errors="ignore").split("\n\n")
    choices = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def canvas_summary(body):
    """The last state of every cell, and the answer."""
    head, *frames, tail = events(body)
    cells = {cell[0]: cell[1:] for frame in frames for cell in frame["cells"]}
    written = sorted({at for frame in frames for at in frame["written"]})
    return {"length": head["length"], "seed": head["seed"], "cells": cells, "written": written, **tail}


def same(mine, alone):
    """Equal; floats up to rounding, which differs between programs of one row and of several."""
    if isinstance(mine, dict) and isinstance(alone, dict):
        return mine.keys() == alone.keys() and all(same(mine[name], alone[name]) for name in mine)
    if isinstance(mine, list) and isinstance(alone, list):
        return len(mine) == len(alone) and all(map(same, mine, alone))
    if isinstance(mine, float) and isinstance(alone, float):
        return math.isclose(mine, alone, rel_tol=1e-3, abs_tol=1e-3)
    return mine == alone


# Clients --------------------------------------------------------------------------------------------------------------


class Cut(Exception):
    """An answer that ended in the middle, with its status (0 before its head) and what came of its body."""

    def __init__(self, status, body):
        super().__init__(f"status {status}, then {body!r:.200}")
        self.status, self.body = status, body


class Client:
    """A client with one connection, which it keeps until it or the server closes it."""

    def __init__(self, port, key=KEYS[0]):
        self.port, self.key, self._writer = port, key, None

    async def ask(self, path, content, *, chunked=False, leave=None, pause=0.0):
        """The status and body of an answer, or None where the client left before it had come.

        Args:
            leave: pieces of the body after which it leaves.
            pause: seconds before it leaves, and before each reading.

        Raises:
            Cut: for an answer that has no end.
        """
        size = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(content)))
        json_type = ("Content-Type", "application/json")
        headers = [("Host", "localhost"), ("Authorization", f"Bearer {self.key}"), json_type, size]
        request = h11.Request(method="POST", target=path, headers=headers)
        await self.open()
        self._writer.writelines(
            self._http.send(event) for event in (request, h11.Data(data=content), h11.EndOfMessage())
        )
        status, pieces = 0, []
        try:
            async with asyncio.timeout(HANGS):
                await self._writer.drain()
                await asyncio.sleep(pause)
                while leave is None or len(pieces) < leave:
                    event = await self._next(pause)
                    if isinstance(event, h11.Response):
                        status = event.status_code
                    elif isinstance(event, h11.Data):
                        pieces.append(bytes(event.data))
                    elif isinstance(event, h11.EndOfMessage):
                        if h11.MUST_CLOSE in (self._http.our_state, self._http.their_state):
                            self.close()
                        else:
                            self._http.start_next_cycle()
                        return status, b"".join(pieces)
        except (h11.RemoteProtocolError, ConnectionError):
            self.close()
            raise Cut(status, b"".join(pieces)) from None
        self.close()
        return None

    async def send(self, content):
        """Sends bytes, whatever they are."""
        await self.open()
        self._writer.write(content)
        await self._writer.drain()

    async def read_to_end(self):
        """What the server sends until it closes."""
        async with asyncio.timeout(HANGS):
            return await self._reader.read()

    async def open(self):
        if self._writer is None:
            self._http = h11.Connection(h11.CLIENT)
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)

    def close(self):
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _next(self, pause):
        while (event := self._http.next_event()) is h11.NEED_DATA:
            await asyncio.sleep(pause)
            self._http.receive_data(await self._reader.read(256 if pause else 65536))
        return event


async def answers_alone(port, table):
    """The answer to each request, one at a time."""
    client, found = Client(port), []
    for asked in table:
        status, body = await client.ask(asked.route, asked.content())
        assert status == 200, (asked, body)
        found.append(summary(asked, False, body))
    client.close()
    return found


async def warm_up(port, table):
    """Has all programs compiled that the table needs: what comes later does not belong to an answer's memory."""
    settled = lambda found: found["dllm_compiling"] == 0
    for count in (8, 4, 2, 1):
        for gap in ({}, {"suffix": "."}):
            body = {"prompt": "Q: ", "max_tokens": 4, "n": count, "temperature": 0.5, **gap}
            for _ in range(2):  # the second runs in the program that the first asked for
                client = Client(port)
                status, _ = await client.ask("/v1/completions", json.dumps(body).encode())
                client.close()
                assert status == 200
                await settle(port, settled)
    decisions = [asked for asked in table if asked.kind == "decide"]
    for count in (1, 2, 3, 5, 9):  # one is read while the others come, which then are read together
        pairs = [(Client(port), asked) for asked in (decisions * 5)[:count]]
        found = await asyncio.gather(*(own.ask(asked.route, asked.content()) for own, asked in pairs))
        assert {status for status, _ in found} == {200}
        for own, _ in pairs:
            own.close()


class Siege:
    """Clients of all kinds that besiege a server, and what became of their requests.

    Attributes:
        counts: requests by kind and outcome.
        sent: requests whose head was sent, which are those that a server counts.
        tokens: of the answers that came.
    """

    def __init__(self, port, table, alone):
        self.port, self.table, self.alone = port, table, alone
        self.counts, self.sent, self.tokens, self.answers = collections.Counter(), 0, 0, 0
        self._rngs = [random.Random(number) for number in range(CLIENTS)]
        self._weights = [asked.weight for asked in table]
        self._kinds = {
            self.whole: 60,
            self.stream: 25,
            self.leave: 5,
            self.read_slowly: 1,
            self.refused: 4,
            self.wrong_key: 1,
            self.oversize: 0.5,
            self.half_header: 1,
            self.half_body: 0.5,
            self.read_nothing: 0.2,
        }

    async def run(self, enough):
        """Until there is enough; the first thing that is wrong ends all."""
        async with asyncio.TaskGroup() as group:
            for rng in self._rngs:
                group.create_task(self._client(rng, enough))

    async def _client(self, rng, enough):
        client = None
        while not enough():
            if client is None or rng.random() < 0.2:
                self._close(client)
                client = Client(self.port, rng.choice(KEYS))
            (act,) = rng.choices([*self._kinds], [*self._kinds.values()])
            await act(rng, client)
        self._close(client)

    def _close(self, client):
        if client is not None:
            client.close()

    async def whole(self, rng, client, stream=False, **options):
        (number,) = rng.choices(range(len(self.table)), self._weights)
        asked = self.table[number]
        stream = stream and asked.can_stream
        self.sent += 1
        found = await client.ask(asked.route, asked.content(stream), **options)
        kind = asked.kind + ", streamed" * stream
        if found is None:
            self.counts[kind, "left"] += 1
            return
        status, body = found
        self.counts[kind, {200: "done", 429: "full"}.get(status, status)] += 1
        if status == 429:
            assert json.loads(body)["error"]["code"] == "queue_full"
            await asyncio.sleep(rng.random())
            return
        assert status == 200, (asked, body)
        mine = summary(asked, stream, body)
        assert same(mine, self.alone[number]), f"{asked}, streamed: {stream}\nhere  {mine}\nalone {self.alone[number]}"
        self.answers += 1
        self.tokens += mine["usage"]["completion_tokens"]

    async def stream(self, rng, client):
        await self.whole(rng, client, stream=True)

    async def leave(self, rng, client):
        """Before the head, or after some pieces of the answer."""
        await self.whole(rng, client, stream=rng.random() < 0.7, leave=rng.randrange(6), pause=rng.random() * 0.1)

    async def read_slowly(self, rng, client):
        await self.whole(rng, client, stream=True, pause=rng.random() * 0.2)

    async def refused(self, rng, client):
        path, body, wanted = rng.choice(REFUSED)
        await self._refused(
            "malformed", wanted, client, path, body if isinstance(body, bytes) else json.dumps(body).encode()
        )

    async def wrong_key(self, rng, client):
        client.key, own = "three", client.key
        await self._refused("wrong key", 401, client, rng.choice(self.table).route, b"{}")
        client.key = own

    async def oversize(self, rng, client):
        body = json.dumps({"prompt": "a" * rng.randrange(MOST_BODY, 20 * MOST_BODY)}).encode()
        try:
            await self._refused("oversize", 413, client, "/v1/completions", body, chunked=rng.random() < 0.5)
        except Cut as cut:  # the server closes with some of the body unread, and TCP may then drop what it wrote last
            assert cut.status == 413
            self.counts["oversize", "refused"] += 1

    async def _refused(self, kind, wanted, client, path, content, **options):
        self.sent += 1
        status, body = await client.ask(path, content, **options)
        error = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        full = status == 429 and wanted == 400  # where all places are taken, some mistakes are not even looked for
        assert status == wanted or full, (path, content[:200], body)
        self.counts[kind, "full" if full else "refused"] += 1

    async def half_header(self, rng, client):
        """Most leave, some wait for the answer."""
        client.close()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        if rng.random() < 0.1:
            assert (await client.read_to_end()).startswith(b"HTTP/1.1 408")
            self.counts["half a header", "refused"] += 1
        else:
            await asyncio.sleep(rng.random() * 0.2)
            self.counts["half a header", "left"] += 1
        client.close()

    async def half_body(self, rng, client):
        client.close()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {client.key}\r\n"
        self.sent += 1
        await client.send(f'{head}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{"prompt"'.encode())
        await asyncio.sleep(rng.random() * 0.2)
        client.close()
        self.counts["half a body", "left"] += 1

    async def read_nothing(self, rng, client):
        """Asks for the page, which nobody counts, again and again."""
        client.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # the server reads no further while nobody reads its answers
                await client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
                await asyncio.sleep(1.0)
        client.close()
        self.counts["pages that nobody reads", "left"] += 200

    def of(self, outcome):
        return sum(count for (_, own), count in self.counts.items() if own == outcome)


def memory(process):
    """Resident memory of a process, MiB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) / 1024


def open_files(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


async def metrics(port):
    """Each metric by its name and labels."""
    async with httpx.AsyncClient(timeout=HANGS, verify=False) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer one"})).text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def outcomes(found):
    """Requests that a server counted, by outcome."""
    counts = collections.Counter()
    for name, value in found.items():
        if name.startswith("dllm_requests_total"):
            counts[re.search(r'outcome="(\w+)"', name)[1]] += int(value)
    return counts


async def settle(port, wanted):
    """Waits until the metrics are as wanted."""
    async with asyncio.timeout(HANGS):
        while not wanted(found := await metrics(port)):
            await asyncio.sleep(0.1)
    return found


async def stay_healthy(port):
    async with httpx.AsyncClient(timeout=HANGS, verify=False) as client:
        while True:
            answer = await client.get(f"http://127.0.0.1:{port}/health")
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
            await asyncio.sleep(0.5)


async def besiege(process, port):
    """The siege, and the numbers for its file."""
    table = requests()
    await warm_up(port, table)
    alone = await answers_alone(port, table)
    siege, start, before = Siege(port, table, alone), time.monotonic(), outcomes(await metrics(port))
    health, files = asyncio.create_task(stay_healthy(port)), open_files(process)
    resident = []
    for part in range(1, 6):
        enough = lambda part=part: (
            siege.answers >= ANSWERS * part / 5 and (part < 5 or time.monotonic() - start >= SECONDS)
        )
        await siege.run(lambda enough=enough: health.done() or enough())
        resident.append({"answers": siege.answers, "resident": round(memory(process), 1)})
    seconds = time.monotonic() - start
    assert not health.done(), health.exception()
    health.cancel()

    found = await settle(port, lambda found: (outcomes(found) - before).total() == siege.sent)
    counted = outcomes(found) - before
    assert counted.keys() == {"done", "full", "gone", "refused"}, counted
    headless = siege.counts["half a header", "refused"]  # these nobody counts
    for outcome, count in {
        "done": siege.answers,
        "full": siege.of("full"),
        "refused": siege.of("refused") - headless,
    }.items():
        assert 0 < count <= counted[outcome] <= count + siege.of("left"), (outcome, counted, siege.counts)
    assert found['dllm_tokens_total{kind="completion"}'] >= siege.tokens
    assert found["dllm_slots_busy"] == found["dllm_queue_length"] == 0
    full = json.dumps({"prompt": "Q: ", "max_tokens": 1, "n": SLOTS + QUEUE}).encode()
    for key in KEYS:  # there is room for so many if no earlier request still holds a place
        status, _ = await Client(port, key).ask("/v1/completions", full)
        assert status == 200
    assert open_files(process) <= files + 2 * len(KEYS) + 2, "connections stay open"
    kinds = sorted({kind for kind, _ in siege.counts})
    rows = [
        {"kind": kind, **{own: count for (name, own), count in sorted(siege.counts.items()) if name == kind}}
        for kind in kinds
    ]
    return {
        "seconds": round(seconds, 1),
        "clients": CLIENTS,
        "slots": SLOTS,
        "queue": QUEUE,
        "requests": len(table),
        "answers": siege.answers,
        "tokens": siege.tokens,
        "counted": dict(counted),
        "memory_mib": resident,
        "rows": rows,
    }


@pytest.mark.processes
def test_a_siege_of_ten_minutes(folder, tmp_path):
    """Whole answers are those of the request alone, streamed or not, nothing hangs, nothing is left behind."""
    limits = ["--constraint-states", "320", "--queue", str(QUEUE), "--max-body", str(MOST_BODY)]
    log = tmp_path / "log"
    process, port = start(folder, log, *limits)
    try:
        found = asyncio.run(besiege(process, port))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    line = (
        r"[-\d]+ [\d:,]+ (\(\d+ lines dropped\) )?(POST|GET) \S+ (\d{3}|-) [\d.]+ s( \d+\+\d+ tokens)?( client gone)?"
    )
    gone = r"|[-\d]+ [\d:,]+ socket\.send\(\) raised exception\."  # asyncio's word for a client that has left
    assert not [own for own in log.read_text().splitlines() if not re.fullmatch(line + gone, own)]
    if path := os.environ.get("DLLM_JAX_SIEGE_JSON"):
        Path(path).write_text(json.dumps({"cores": len(os.sched_getaffinity(0)), **found}, indent=2) + "\n")
    if SECONDS >= 600:  # in a shorter one the first fifth ends before the allocator has what it keeps for later
        first, *_, last = (own["resident"] for own in found["memory_mib"])
        assert last - first < MOST_GROWTH, found["memory_mib"]


# Two servers ----------------------------------------------------------------------------------------------------------


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def nginx_conf(ports):
    """The page's file, with other ports."""
    (text,) = (block.text for block in pages.blocks("docs/serving.md") if block.file == "nginx.conf")
    for own, port in zip((8000, 8001, 8002), ports, strict=True):
        assert f"127.0.0.1:{own}" in text
        text = text.replace(f"127.0.0.1:{own}", f"127.0.0.1:{port}")
    return text


@dataclasses.dataclass
class Load:
    """Clients of nginx, whole and streamed by turns.

    Attributes:
        answers: that came whole.
        cut: streams that ended in the middle.
    """

    port: int
    table: list
    alone: list
    answers: int = 0
    cut: list = dataclasses.field(default_factory=list)
    over: bool = False

    async def client(self, number):
        rng, client = random.Random(number), Client(self.port, KEYS[number % 2])
        while not self.over:
            at, stream = rng.randrange(len(self.table)), rng.random() < 0.5
            try:
                status, body = await client.ask(self.table[at].route, self.table[at].content(stream))
            except Cut as cut:
                assert stream and cut.status == 200, cut  # nginx has an answer for whatever has not begun
                assert b"[DONE]" not in cut.body
                (choice,) = self.alone[at]["choices"]
                assert choice["text"].startswith(text_so_far(cut.body)), (cut, choice)
                self.cut.append(cut)
                continue
            assert status == 200, body
            assert same(summary(self.table[at], stream, body), self.alone[at]), (self.table[at], stream, body)
            self.answers += 1
        client.close()

    async def more(self, count):
        """Waits for more answers."""
        until = self.answers + count
        async with asyncio.timeout(HANGS):
            while self.answers < until:
                await asyncio.sleep(0.05)


async def kill_and_drain(ports, servers, restart):
    """The load, while one server is killed and comes back, and then the other ends and comes back."""
    table = [asked for asked in requests() if asked.kind in ("short", "long", "stop", "logprobs")]
    load = Load(ports[0], table, await answers_alone(ports[1], table))
    done = lambda found: outcomes(found)["done"] > 0

    async def operate():
        try:
            await load.more(50)
            while not load.cut:  # until one was in the middle
                servers[1].kill()
                await load.more(100)
                await asyncio.to_thread(restart, 1)
                await settle(ports[1], done)
            await asyncio.sleep(3.0)  # until fail_timeout is over, as the page asks
            cut = len(load.cut)
            servers[2].terminate()
            assert await asyncio.to_thread(servers[2].wait, 120) == 0
            await load.more(50)
            await asyncio.to_thread(restart, 2)
            await settle(ports[2], done)
            await load.more(50)
            assert len(load.cut) == cut  # a server that ends finishes its answers
        finally:
            load.over = True

    async with asyncio.TaskGroup() as group:
        group.create_task(operate())
        for number in range(16):
            group.create_task(load.client(number))
    return load


@pytest.mark.skipif(shutil.which("nginx") is None, reason="there is no nginx on this machine")
def test_behind_nginx_the_death_of_a_server_costs_no_whole_answer(folder, tmp_path):
    ports, servers = free_ports(3), {}

    def restart(number):
        process, _ = start(folder, tmp_path / f"log{number}", "--no-buckets", "--grace", "100", port=ports[number])
        stack.callback(process.stdout.close)
        stack.callback(process.kill)
        servers[number] = process

    (tmp_path / "nginx.conf").write_text(nginx_conf(ports))
    with contextlib.ExitStack() as stack:
        for number in (1, 2):
            restart(number)
        command = ["nginx", "-p", str(tmp_path), "-c", "nginx.conf", "-e", "nginx.log"]
        nginx = stack.enter_context(subprocess.Popen(command))
        stack.callback(nginx.terminate)
        wait_until(lambda: listens(ports[0]))
        load = asyncio.run(kill_and_drain(ports, servers, restart))
    assert load.answers >= 250
