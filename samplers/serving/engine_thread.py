"""The one thread that owns the engines: it takes commands, runs steps, and sends updates to the event loop."""

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from samplers.decisions.answers import Decision, answer_questions
from samplers.decisions.questions import Question
from samplers.engine.engine import Engine, Stats
from samplers.engine.requests import Request, Update
from samplers.infill import InfillPlan
from samplers.serving.fair_queue import FairQueue

CALL_SECONDS = 0.02
"""Duration of an engine call when no client streams: a command waits at most that long."""

STEPS_PER_CALL = 64
"""Most steps of one engine call."""


@dataclasses.dataclass(eq=False)
class Job:
    """One choice of an answer, which is one request of the engine.

    Attributes:
        index: its place among the choices.
        request: the engine's request.
        seed: of its random numbers.
        streamed: report every step, not only the last.
        engine: that runs it.
        client: who asked for it.
        plan: of an infilling; None for another request.
        latest: the last update that was not sent to the client yet.
    """

    index: int
    request: Request
    seed: int
    streamed: bool
    engine: Engine
    client: str
    plan: InfillPlan | None = None
    latest: Update | None = None


OnCall = Callable[[list[tuple[Job, Update]], Stats, int, int], None]
"""Called in the event loop after every engine call, with the updates of streamed jobs and of those that ended, the
statistics of this call alone, the slots in use now and the requests that wait for one."""


class EngineThread(threading.Thread):
    """Runs engines for an event loop, which calls its methods; none of them waits. A job's engine is stepped from its
    submission on. Clients take turns in getting free slots."""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        on_call: OnCall,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            engine: that reads questions. No other thread may step it, or a job's, from now on.
            on_error: called in the event loop with an error of the engine; the thread then ends.
        """
        super().__init__(name="engine", daemon=True)
        self._loop, self._on_call, self._on_error = loop, on_call, on_error
        self._engines: dict[Engine, FairQueue[Job]] = {engine: FairQueue()}  # and what waits for their slots
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[Request, Job] = {}
        self._questions: list[tuple[Question, asyncio.Future[Decision | None]]] = []
        self._step_seconds = CALL_SECONDS

    def submit(self, jobs: Sequence[Job]) -> None:
        self._commands.put(lambda: self._submit(jobs))

    def cancel(self, jobs: Sequence[Job]) -> None:
        self._commands.put(lambda: self._cancel(jobs))

    def decide(self, question: Question) -> "asyncio.Future[Decision | None]":
        """The decision, None where the logits are not finite. Questions that wait are read together, between steps."""
        future: asyncio.Future[Decision | None] = self._loop.create_future()
        self._commands.put(lambda: self._questions.append((question, future)))
        return future

    def stop(self) -> None:
        """Ends the thread after the call that is running."""
        self._commands.put(None)

    # In the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while self._run_commands():
                self._decide()
                for engine, queue in self._engines.items():
                    self._fill(engine, queue)
                    if not engine.idle:
                        self._step(engine)
        except BaseException as error:  # clients wait, whatever it is
            self._call_in_loop(self._on_error, error)

    def _run_commands(self) -> bool:
        """Runs the commands that have come, and waits for one while there is nothing to do; False to stop."""
        while True:
            try:
                command = self._commands.get(block=self._idle and not self._questions)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            if self._idle and self._commands.empty():
                self._send_updates([], Stats())

    @property
    def _idle(self) -> bool:
        return all(engine.idle and not queue for engine, queue in self._engines.items())

    def _fill(self, engine: Engine, queue: "FairQueue[Job]") -> None:
        """Submits as many jobs as the engine has free slots."""
        while queue and engine.busy + engine.waiting < engine.slots:
            job = queue.pop()
            self._jobs[engine.submit(job.request)] = job

    def _step(self, engine: Engine) -> None:
        before = engine.stats
        updates = engine.step(self._steps())
        stats = engine.stats - before
        if stats.steps:
            self._step_seconds += 0.3 * (stats.seconds / stats.steps - self._step_seconds)
        jobs = [(self._jobs[update.request], update) for update in updates]
        for job, update in jobs:
            if update.done:
                del self._jobs[job.request]
        self._send_updates([(job, update) for job, update in jobs if job.streamed or update.done], stats)

    def _decide(self) -> None:
        """Answers the questions that wait. An error, such as a lack of memory, ends them alone."""
        asked, self._questions = [pair for pair in self._questions if not pair[1].done()], []
        if not asked:
            return
        found: Sequence[Decision | None | Exception]
        try:
            engine = next(iter(self._engines))
            found = answer_questions(engine.model, [question for question, _ in asked], engine.slots)
        except Exception as error:
            found = [error] * len(asked)
        for (_, future), answer in zip(asked, found, strict=True):
            self._call_in_loop(_settle, future, answer)

    def _steps(self) -> int:
        """Steps of the next engine call: one if a job is streamed, else as many as fit into `CALL_SECONDS`."""
        if any(job.streamed for job in self._jobs.values()):
            return 1
        return min(max(int(CALL_SECONDS / max(self._step_seconds, 1e-6)), 1), STEPS_PER_CALL)

    def _submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._engines.setdefault(job.engine, FairQueue()).push(job.client, job)

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._engines[job.engine].remove(job.client, job)
            if self._jobs.pop(job.request, None) is not None:
                job.engine.cancel(job.request)

    def _send_updates(self, updates: list[tuple[Job, Update]], stats: Stats) -> None:
        busy = sum(engine.busy for engine in self._engines)
        waiting = sum(engine.waiting + len(queue) for engine, queue in self._engines.items())
        self._call_in_loop(self._on_call, updates, stats, busy, waiting)

    def _call_in_loop(self, call: Callable[..., None], *values: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody reads it
            self._loop.call_soon_threadsafe(call, *values)


def _settle(future: "asyncio.Future[Decision | None]", answer: "Decision | None | Exception") -> None:
    """Ends a future that nobody has cancelled; in the event loop."""
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
