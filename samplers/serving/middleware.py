"""Around the routes: who may ask, how much may be sent, and what is logged."""

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import time
import traceback
from collections.abc import Sequence
from typing import Any

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samplers.serving.errors import MESSAGES, Fault, internal_fault, stopping_fault
from samplers.serving.schemas import OUR_ERROR

LOG = logging.getLogger("samplers.serving")

KEYLESS = ("/", "/health")
"""Paths without a key: a page without data, and the server's health."""

_ANSWERS = ("/v1/chat/completions", "/v1/completions", MESSAGES, "/v1/canvas", "/v1/infill", "/v1/decide")

ROUTES = (*KEYLESS, "/metrics", "/v1/models", *_ANSWERS)
"""Paths that are logged by name; others may be a client's own words."""

BODY_SECONDS = 60.0
DISCARDED, DISCARD_SECONDS = 16, 5.0  # what is read of a body that is too large: times the limit, and how long
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclasses.dataclass
class Record:
    """What is logged and counted of a request; never a word of its text.

    Attributes:
        route: one of `ROUTES`, else "other".
        outcome: how the request ended; None for one that is not counted.
        status: of the answer, 0 before it has begun.
        read, wrote: tokens of the prompt and of the answer.
    """

    route: str = "other"
    outcome: str | None = None
    status: int = 0
    read: int = 0
    wrote: int = 0


def record_of(request: Request) -> Record:
    """The record of a request."""
    found: Record = request.scope["dllm_record"]
    return found


def client_of(request: Request) -> str:
    """Who asks: the number of the key, or without keys the address."""
    found: str = request.scope["dllm_client"]
    return found


class Guard:
    """An ASGI application that checks and logs requests to another."""

    def __init__(
        self, app: ASGIApp, requests: Counter, *, keys: Sequence[str], most_body: int, hosts: tuple[str, ...] | None
    ) -> None:
        """
        Args:
            requests: the counter of requests by route and outcome.
            keys: the API keys, one of which a request must have; none for no check.
            most_body: largest body, bytes.
            hosts: allowed names in the Host header; None for any.
        """
        self._app, self._requests, self._hosts, self._most_body = app, requests, hosts, most_body
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        record = scope["dllm_record"] = Record(scope["path"] if scope["path"] in ROUTES else "other")
        start = time.perf_counter()
        try:
            await self._answer(scope, receive, _note_status(record, send))
        finally:
            self._log_request(scope, record, time.perf_counter() - start)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
            await self._app(scope, self._bound(receive), send)
        except Fault as fault:
            if fault.status == 413:
                await self._discard(receive)
            await _send_fault(fault, scope, receive, send)
        except asyncio.CancelledError:  # by uvicorn, at shutdown
            if not scope["dllm_record"].status:
                await _send_fault(stopping_fault(), scope, receive, send)
        except Exception as error:
            LOG.error("%s", error_place(error))
            if not scope["dllm_record"].status:
                await _send_fault(internal_fault(), scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._hosts is not None and _host(headers) not in self._hosts:
            raise Fault(400, "this server answers on the machine that it runs on alone", code="unknown_host")
        scope["dllm_client"] = scope["client"][0] if scope["client"] else ""
        if self._keys and scope["path"] not in KEYLESS:
            scope["dllm_client"] = self._key_of(headers)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._most_body:
            raise self._too_large()

    def _key_of(self, headers: Headers) -> str:
        """The number of the request's key; each is compared in constant time."""
        own = f"bearer {headers.get('x-api-key', '')}"  # as Anthropic's clients send it
        scheme, _, key = headers.get("authorization", own).partition(" ")
        same = [hmac.compare_digest(key.strip().encode(), known) for known in self._keys]
        if not any(same) or scheme.lower() != "bearer":
            raise Fault(401, "the API key is missing or wrong; send it as a bearer token", code="invalid_api_key")
        return f"key {same.index(True)}"

    def _bound(self, receive: Receive) -> Receive:
        """`receive` with limits on the size of a body and on the time that it takes."""
        received, until, complete = 0, time.monotonic() + BODY_SECONDS, False

        async def receive_bounded() -> Message:
            nonlocal received, complete
            if complete:  # next is the client's disconnect
                return await receive()
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise Fault(408, f"the body was not complete after {BODY_SECONDS:.0f} seconds") from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._most_body:
                if not complete:
                    await self._discard(receive)
                raise self._too_large()
            return message

        return receive_bounded

    async def _discard(self, receive: Receive) -> None:
        """Reads what follows for a while: a client that is still sending would not read the answer."""
        left = DISCARDED * self._most_body
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    def _too_large(self) -> Fault:
        return Fault(413, f"the body is larger than {self._most_body} bytes, this server's limit", code="too_large")

    def _log_request(self, scope: Scope, record: Record, seconds: float) -> None:
        if record.outcome is not None:
            self._requests.labels(record.route, record.outcome).inc()
        tokens = f" {record.read}+{record.wrote} tokens" if record.read else ""
        gone = " client gone" if record.outcome == "gone" else ""
        method = scope["method"] if scope["method"] in _METHODS else "?"
        LOG.info("%s %s %s %.3f s%s%s", method, record.route, record.status or "-", seconds, tokens, gone)


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def error_place(error: BaseException) -> str:
    """An error's class and place, without its message, which may hold a client's words."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{at}"


def fault_response(fault: Fault, scope: Scope) -> JSONResponse:
    """A fault as a response to a request of this scope."""
    headers = {"Retry-After": "1"} if fault.status in (429, 503) else {}
    if fault.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse(fault.body(scope["path"]), fault.status, headers)


async def _send_fault(fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
    scope["dllm_record"].outcome = fault.outcome
    await fault_response(fault, scope)(scope, receive, send)


def _note_status(record: Record, send: Send) -> Send:
    async def send_noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
        with contextlib.suppress(OSError):  # of a client that has gone
            await send(message)

    return send_noted


def _host(headers: Headers) -> str:
    """The name in the Host header, without its port."""
    host = headers.get("host", "").lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def allowed_hosts(address: str) -> tuple[str, ...] | None:
    """Names that the Host header may have: the machine's own for a server on a loopback address, so that no web page
    reaches it through a name that points there; None, any name, for others."""
    return LOOPBACK if address in LOOPBACK else None


def invalid_body(problems: Any, body: Any) -> Fault:
    """The fault for a body that pydantic refused: of its problems, the one that lies deepest."""
    found = [(_place(problem["loc"][1:], body), problem) for problem in problems]
    at, problem = max(found, key=lambda pair: len(pair[0]))
    if problem["type"] == "json_invalid":
        return Fault(400, "the body is no valid JSON", code="invalid_json")
    ours, words = problem["type"] == OUR_ERROR, problem["msg"]
    if not at:
        sentence = f"the body {words}" if ours else "the body must be a JSON object, sent as application/json"
        return Fault(400, sentence, code="invalid_body")
    name = ".".join(at)
    return Fault(422, f"{name} {words}" if ours else f"{name}: {words}", param=name, code="invalid_value")


def _place(path: Any, body: Any) -> list[str]:
    """The path to a problem in a body, without pydantic's names of the types that it tried."""
    found = []
    for i, part in enumerate(path):
        missing = isinstance(body, dict) and i == len(path) - 1
        if (isinstance(body, list) and isinstance(part, int)) or (isinstance(body, dict) and part in body):
            body = body[part]
        elif not missing:
            continue
        found.append(str(part)[:60])
    return found
