"""Limits on connections: their number, and how long a client may take to send a request or to read an answer."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dllm_jax import DllmError
from samplers.serving.errors import Fault

LOG = logging.getLogger("samplers.serving")

REQUEST_SECONDS = 10.0
"""Time from the first byte of a request's header until it is complete."""

KEEP_SECONDS = 75
"""Time that a connection without a request stays open. Clients and proxies keep theirs for up to a minute, and a
request that is sent while the connection closes is lost."""

READ_SECONDS = 60.0
"""Time in which a slow client must read some 50 kB of its answer."""

ACCEPTED_AT_ONCE = 4
"""Connections that asyncio accepts before it handles the first of them."""

SPARE_FILES = 4 * ACCEPTED_AT_ONCE + 32
"""Open files that are not connections in use: accepted ones, those being closed, and the engine's."""

LEAST_CONNECTIONS = 8  # a server with fewer makes no sense


class Connections:
    """Makes uvicorn's connections, at most `most`: a new one takes the place of the one whose client has been silent
    for longest, so that clients that neither send nor read do not keep others out."""

    def __init__(
        self,
        most: int,
        *,
        keep_seconds: float = KEEP_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        self.most, self.keep_seconds = most, keep_seconds
        self.request_seconds, self.read_seconds = request_seconds, read_seconds
        self.silent: dict[Connection, None] = {}  # whose client must send or read, the longest silent first

    def __call__(self, **options: Any) -> "Connection":
        """A new connection, as uvicorn calls its protocol class."""
        return Connection(self, **options)


class TurnTransport:
    """Sends in one piece what one turn of the event loop writes. uvicorn writes an answer's head, body and end apart; a
    server that is killed between them would have sent a part of a short answer."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._written = transport, loop, bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if data and not self._written:
            self._loop.call_soon(self._send)
        self._written += data

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._written:
            piece, self._written = self._written, bytearray()
            self._transport.write(piece)


class Connection(H11Protocol):
    """A connection that ends when its client neither sends nor reads."""

    def __init__(self, pool: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._pool = pool
        self._begun = False  # whether part of a header has arrived
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(TurnTransport(transport, self.loop))  # type: ignore[arg-type]
        self._watch_client()
        if len(self.connections) > self._pool.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.silent.pop(self, None)
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self._answering or self._has_part != self._begun:
            self._watch_client()

    def on_response_complete(self) -> None:
        self._watch_client()
        super().on_response_complete()  # which may find the next request
        self._unset_keepalive_if_required()  # uvicorn's own timer, which ours makes superfluous

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pool.silent[self] = None
        self._start_timer(self._pool.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_client()

    def send_400_response(self, msg: str) -> None:
        """Answers in JSON; uvicorn's own answer is plain text."""
        self._refuse(Fault(400, "the request is not valid HTTP", code="invalid_http"))

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_part(self) -> bool:
        """Whether part of a header waits for the rest."""
        return bool(self.conn.trailing_data[0])

    def _watch_client(self) -> None:
        """Starts the time for the next request once the client has read its answers, and stops it during an answer."""
        if self.flow.write_paused:
            return
        self._begun = not self._answering and self._has_part
        if not self._answering:
            self._pool.silent[self] = None
            seconds = self._pool.request_seconds if self._begun else self._pool.keep_seconds
            self._start_timer(seconds, self._refuse_late_header)
            return
        self._stop_timer()  # the application watches how long a body takes
        if not self.cycle.more_body:
            self._pool.silent.pop(self, None)

    def _refuse_late_header(self) -> None:
        if self._begun:
            sentence = f"the header was not complete after {self._pool.request_seconds:g} seconds"
            self._refuse(Fault(408, sentence, code="timeout"))
        else:
            self._close()

    def _make_room(self) -> None:
        longest = next(iter(self._pool.silent))
        if longest is not self:
            del self._pool.silent[longest]
            longest.transport.abort()
            return
        LOG.warning("all %d connections are in use", self._pool.most)
        sentence = "all connections of the server are in use; try again in a moment"
        self._refuse(Fault(503, sentence, code="too_many_connections"))

    def _refuse(self, fault: Fault) -> None:
        """Sends the fault if no answer has begun, and closes."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(fault.body("")).encode()
            length = ("Content-Length", str(len(body)))
            headers = [("Content-Type", "application/json"), length, ("Connection", "close")]
            phrase = HTTPStatus(fault.status).phrase.encode()
            head = h11.Response(status_code=fault.status, headers=headers, reason=phrase)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._close()

    def _close(self) -> None:
        """Closes when the client has read what was sent, or its time is over."""
        self.transport.close()
        self._start_timer(self._pool.read_seconds, self.transport.abort)

    def _start_timer(self, seconds: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_limit(wanted: int) -> int:
    """The number of connections that is wanted, or that the limit of open files allows if that is less.

    Raises:
        DllmError: when the limit leaves no room for a server.
    """
    try:
        import resource
    except ModuleNotFoundError:  # there is no such limit on Windows
        return wanted
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    used = len(os.listdir("/dev/fd"))
    room = limit - used - SPARE_FILES
    if room < LEAST_CONNECTIONS:
        least = used + SPARE_FILES + LEAST_CONNECTIONS
        raise DllmError(f"the limit of open files is {limit}; the server needs at least {least}: ulimit -n {least}")
    return min(wanted, room)
