"""Listening, and ending without losing what is being answered."""

import asyncio
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from dllm_jax import DllmError
from dllm_jax.cli.command import out_of_memory
from samplers.engine.engine import Engine
from samplers.serving.connections import AT_A_TIME, Connections, most_connections
from samplers.serving.errors import stopping
from samplers.serving.middleware import Guard, hosts_of, where
from samplers.serving.routes import make_app
from samplers.serving.scheduler import Limits, Service

TOLD_SECONDS = 1.0
"""Time in which clients and whoever asks for /health hear that the engine has stopped."""

LEAVING_SECONDS = 5.0
"""Time in which the last answers are sent."""

BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""


class Server(uvicorn.Server):
    """Ends at SIGINT or SIGTERM when everything that was admitted is answered; at once at the second."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        """
        Args:
            grace: seconds that what was admitted has then.
        """
        super().__init__(config)
        self.service, self._grace = service, grace
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Task[None] | None = None
        service.ended = self.stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of uvicorn, for signals."""
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Ends; called again, ends at once. To be called in the event loop."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
            return
        self.service.break_off(stopping())
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Of uvicorn, which has one number for what the system keeps and for what is accepted at a time."""
        await super().startup(sockets)
        for at in sockets or ():
            at.listen(BACKLOG)

    async def _end(self) -> None:
        await self.service.drain(self._grace)
        if self.service.broken is not None:
            await asyncio.sleep(TOLD_SECONDS)
        self.should_exit = True


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which nobody can connect to yet.

    Raises:
        DllmError: when there is no such address, or it is taken.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except (OSError, OverflowError) as error:
        raise DllmError(f"cannot listen at {host} port {port} ({error}); choose another by --host and --port") from None
    return found


def url_of(at: socket.socket) -> str:
    """The address of a socket as clients write it."""
    host, port = at.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    engine: Engine,
    at: socket.socket,
    limits: Limits,
    *,
    key: str | None = None,
    most_body: int = 1 << 20,
    grace: float = 30.0,
    connections: Connections | None = None,
    began: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serves an engine until it is told to stop.

    Args:
        at: a bound socket.
        key: that requests must bring.
        most_body: bytes of a request's body.
        grace: seconds that answers have when the server is to end.
        connections: how many, and how long they may be silent; by default some more than there are requests, as far as
            the limit of open files allows.
        began: called before the first request is read.

    Raises:
        DllmError: when the limit of open files is too low, when the engine's own sampler may take more forwards than
            the limits allow, and when the engine has stopped by an error.
        JaxRuntimeError: when it has stopped for lack of memory.
    """
    engine.compile()
    service = Service(engine, limits)
    guard = Guard(
        make_app(service),
        service.metrics.requests,
        key=key,
        most_body=most_body,
        hosts=hosts_of(at.getsockname()[0]) if key is None else None,
    )
    http: Any = connections or Connections(most_connections(2 * (engine.slots + limits.queue) + 256))
    config = uvicorn.Config(
        guard,
        http=http,
        backlog=AT_A_TIME,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=int(LEAVING_SECONDS),
        ws="none",
    )
    server = Server(config, service, grace)
    began(server)
    try:
        await server.serve(sockets=[at])
    finally:
        await service.close()
    if service.broken is not None:
        if out_of_memory(service.broken):  # whose advice the command has
            raise service.broken
        raise DllmError(f"the engine has stopped by an error: {where(service.broken)}") from service.broken
