"""The one thread that owns the engine: it takes commands, runs steps, and hands what they did to the event loop."""

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from samplers.engine.engine import Engine, Request, Update

TURN_SECONDS = 0.02
"""How long a turn lasts where nobody watches: commands wait so long, and the host works once in it."""

MOST_STEPS = 64


@dataclasses.dataclass(eq=False)
class Job:
    """A request of the engine as the event loop sees it.

    Attributes:
        index: of the answer's choices.
        request: the engine's.
        seed: of its random numbers.
        watched: whether every step is told, not the last alone.
        latest: what was done to it last and has not been looked at.
        ended: whether nothing more will come.
    """

    index: int
    request: Request
    seed: int
    watched: bool
    latest: Update | None = None
    ended: bool = False


class Turn(NamedTuple):
    """What the thread did, for the event loop.

    Attributes:
        updates: the jobs that something was done to.
        steps: of the engine, and `seconds` they took.
        busy: slots at work afterwards.
        waiting: requests in the engine's queue.
    """

    updates: list[tuple[Job, Update]]
    steps: int
    seconds: float
    busy: int
    waiting: int


class Worker(threading.Thread):
    """Runs an engine for an event loop. Its methods are called there, and wait for nothing."""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        told: Callable[[Turn], None],
        died: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            engine: which no other thread steps from now on.
            told: called in the event loop after every turn.
            died: called there when the engine has raised, after which nothing is done any more.
        """
        super().__init__(name="engine", daemon=True)
        self._engine, self._loop, self._told, self._died = engine, loop, told, died
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[Request, Job] = {}
        self._step_seconds = TURN_SECONDS

    def submit(self, jobs: Sequence[Job]) -> None:
        self._commands.put(lambda: self._enqueue(jobs))

    def cancel(self, jobs: Sequence[Job]) -> None:
        self._commands.put(lambda: self._drop(jobs))

    def stop(self) -> None:
        """Ends the thread after the turn that is running."""
        self._commands.put(None)

    # In the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while self._obey():
                self._tell(*self._turn())
        except BaseException as error:  # whatever it is, clients are waiting
            self._hand_on(self._died, error)

    def _obey(self) -> bool:
        """Does what was asked meanwhile, waits for it where there is nothing else to do; False at the end."""
        while True:
            try:
                command = self._commands.get(block=self._engine.idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            if self._engine.idle and self._commands.empty():
                self._tell([], 0, 0.0)

    def _turn(self) -> tuple[list[Update], int, float]:
        before, start = self._engine.steps, time.perf_counter()
        updates = self._engine.step(self._steps())
        self._engine.take_ended()  # or it keeps them
        steps, seconds = self._engine.steps - before, time.perf_counter() - start
        if steps:
            self._step_seconds += 0.3 * (seconds / steps - self._step_seconds)
        return updates, steps, seconds

    def _steps(self) -> int:
        """Steps of the next turn: one where each is looked at, as many as fit into a turn's time otherwise."""
        if any(job.watched for job in self._jobs.values()):
            return 1
        return min(max(int(TURN_SECONDS / max(self._step_seconds, 1e-6)), 1), MOST_STEPS)

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._jobs[self._engine.enqueue(job.request)] = job

    def _drop(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self._jobs.pop(job.request, None) is not None:
                self._engine.cancel(job.request)

    def _tell(self, updates: list[Update], steps: int, seconds: float) -> None:
        jobs = [(self._jobs[update.request], update) for update in updates]
        for job, update in jobs:
            if update.done:
                del self._jobs[job.request]
        wanted = [(job, update) for job, update in jobs if job.watched or update.done]
        self._hand_on(self._told, Turn(wanted, steps, seconds, self._engine.busy, self._engine.waiting))

    def _hand_on(self, call: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to be told
            self._loop.call_soon_threadsafe(call, value)
