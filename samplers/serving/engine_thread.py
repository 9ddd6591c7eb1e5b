"""The one thread that owns the engine: it takes commands, runs steps, and hands what they did to the event loop."""

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from samplers.engine.engine import Engine, Stats
from samplers.engine.requests import Request, Update

CALL_SECONDS = 0.02
"""How long a call of the engine lasts if no client streams: a command waits at most that long."""

MOST_STEPS = 64


@dataclasses.dataclass(eq=False)
class Job:
    """A request of the engine as the event loop sees it.

    Attributes:
        index: of the answer's choices.
        request: the engine's.
        seed: of its random numbers.
        streamed: whether every step is reported, not the last alone.
        latest: its last update that the event loop has not sent.
    """

    index: int
    request: Request
    seed: int
    streamed: bool
    latest: Update | None = None


class Reports(Protocol):
    """Called in the event loop after every call of the engine."""

    def __call__(self, updates: list[tuple[Job, Update]], stats: Stats, busy: int, waiting: int) -> None:
        """
        Args:
            updates: of the jobs that ended or are streamed.
            stats: of this call alone.
            busy: slots at work now.
            waiting: requests in the engine's queue now.
        """


class Worker(threading.Thread):
    """Runs an engine for an event loop. Its methods are called there, and wait for nothing."""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        report: Reports,
        report_error: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            engine: which no other thread steps from now on.
            report_error: called in the event loop when the engine has raised; the thread then ends.
        """
        super().__init__(name="engine", daemon=True)
        self._engine, self._loop, self._report, self._report_error = engine, loop, report, report_error
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[Request, Job] = {}
        self._step_seconds = CALL_SECONDS

    def submit(self, jobs: Sequence[Job]) -> None:
        self._commands.put(lambda: self._submit(jobs))

    def cancel(self, jobs: Sequence[Job]) -> None:
        self._commands.put(lambda: self._cancel(jobs))

    def stop(self) -> None:
        """Ends the thread after the call that is running."""
        self._commands.put(None)

    # In the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while self._run_commands():
                self._step()
        except BaseException as error:  # whatever it is, clients are waiting
            self._call_in_loop(self._report_error, error)

    def _run_commands(self) -> bool:
        """Runs the commands that came meanwhile, and waits for one if the engine is idle; False at the end."""
        while True:
            try:
                command = self._commands.get(block=self._engine.idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            if self._engine.idle and self._commands.empty():
                self._report_to_loop([], Stats())

    def _step(self) -> None:
        before = self._engine.stats
        updates = self._engine.step(self._steps())
        stats = self._engine.stats - before
        if stats.steps:
            self._step_seconds += 0.3 * (stats.seconds / stats.steps - self._step_seconds)
        jobs = [(self._jobs[update.request], update) for update in updates]
        for job, update in jobs:
            if update.done:
                del self._jobs[job.request]
        self._report_to_loop([(job, update) for job, update in jobs if job.streamed or update.done], stats)

    def _steps(self) -> int:
        """Steps of the next call: one if a job is streamed, else as many as fit into a call's time."""
        if any(job.streamed for job in self._jobs.values()):
            return 1
        return min(max(int(CALL_SECONDS / max(self._step_seconds, 1e-6)), 1), MOST_STEPS)

    def _submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._jobs[self._engine.submit(job.request)] = job

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self._jobs.pop(job.request, None) is not None:
                self._engine.cancel(job.request)

    def _report_to_loop(self, updates: list[tuple[Job, Update]], stats: Stats) -> None:
        self._call_in_loop(self._report, updates, stats, self._engine.busy, self._engine.waiting)

    def _call_in_loop(self, call: Callable[..., None], *values: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to read it
            self._loop.call_soon_threadsafe(call, *values)
