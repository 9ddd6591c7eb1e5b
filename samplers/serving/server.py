"""Listening, and a shutdown that finishes running answers."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvicorn

from dllm_jax import DllmError
from dllm_jax.cli.command import out_of_memory
from samplers.engine.engine import Engine
from samplers.serving.connections import ACCEPTED_AT_ONCE, Connections, connection_limit
from samplers.serving.errors import stopping_fault
from samplers.serving.middleware import Guard, allowed_hosts, error_place
from samplers.serving.routes import make_app
from samplers.serving.scheduler import Limits, Service

BROKEN_SECONDS = 1.0
"""Time in which clients and /health report that the engine has stopped, before the server ends."""

SHUTDOWN_SECONDS = 5.0
"""Time in which the last answers are sent at shutdown."""

BACKLOG = 2048
"""Connections that the system queues until they are accepted."""


class Server(uvicorn.Server):
    """Ends at SIGINT or SIGTERM when all admitted requests are answered; at the second signal at once."""

    def __init__(
        self, config: uvicorn.Config, service: Service, grace: float, on_start: "Callable[[Server], None]"
    ) -> None:
        """
        Args:
            grace: seconds that admitted requests have then.
            on_start: called once it listens.
        """
        super().__init__(config)
        self.service, self._grace, self._on_start = service, grace, on_start
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Task[None] | None = None
        service.on_broken = self.stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Uvicorn's handler of signals."""
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Shuts down; called again, at once. Call it in the event loop."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
            return
        self.service.break_off(stopping_fault())
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Lengthens the system's queue, for which uvicorn takes the number of connections that it accepts at once."""
        await super().startup(sockets)
        for at in sockets or ():
            at.listen(BACKLOG)
        self._on_start(self)

    async def _end(self) -> None:
        await self.service.drain(self._grace)
        if self.service.broken is not None:
            await asyncio.sleep(BROKEN_SECONDS)
        self.should_exit = True


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address, which does not listen yet.

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
    """The URL of a socket."""
    host, port = at.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    engine: Engine,
    at: socket.socket,
    limits: Limits,
    *,
    keys: Sequence[str] = (),
    most_body: int = 1 << 20,
    grace: float = 30.0,
    connections: Connections | None = None,
    on_start: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serves an engine until it is stopped.

    Args:
        at: a bound socket.
        keys: the API keys, one of which requests must have; none for no check.
        most_body: largest body of a request, bytes.
        grace: seconds that running answers have at shutdown.
        connections: their limits; by default more connections than requests, as far as the limit of open files allows.
        on_start: called once clients can connect.

    Raises:
        DllmError: when the limit of open files is too low, when the engine's own sampler may take more forwards than
            the limits allow, and when the engine has stopped by an error.
        JaxRuntimeError: when it has stopped for lack of memory.
    """
    service = Service(engine, limits)  # which refuses what it cannot serve, before anything is compiled
    guard = Guard(
        make_app(service),
        service.metrics.requests,
        keys=keys,
        most_body=most_body,
        hosts=allowed_hosts(at.getsockname()[0]) if not keys else None,
    )
    http: Any = connections or Connections(connection_limit(2 * (engine.slots + limits.queue) + 256))
    config = uvicorn.Config(
        guard,
        http=http,
        backlog=ACCEPTED_AT_ONCE,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=int(SHUTDOWN_SECONDS),
        ws="none",
    )
    server = Server(config, service, grace, on_start)
    try:
        engine.compile()
        await server.serve(sockets=[at])
    finally:
        await service.close()
    if service.broken is not None:
        if out_of_memory(service.broken):  # the command prints advice
            raise service.broken
        raise DllmError(f"the engine has stopped by an error: {error_place(service.broken)}") from service.broken
