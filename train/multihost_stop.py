"""How a run ends when a signal asks for it: after a whole step, and in all processes after the same one.

A step is a collective of all processes' devices, so none can leave alone: the others would wait for it in vain.
"""

import contextlib
import itertools
import math
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

import jax

from dllm_jax.parallel import multihost

PREEMPTED, INTERRUPTED = 75, 130  # statuses: EX_TEMPFAIL of sysexits.h, and what shells give for SIGINT
_PATIENCE = 5  # seconds that a thread has to end
_OVERDUE = 300  # seconds from a signal until a process ends whose step does not
_NUMBERS = itertools.count()  # of runs in this process: all processes start the same ones in the same order


class Interrupted(Exception):
    """A signal ended the run; its state was written, unless its last steps were skipped.

    Attributes:
        status: of a command that ends so: 130 after SIGINT; 75 after SIGTERM, by which schedulers know that they should
            start it again.
    """

    def __init__(self, step: int, kept: int, status: int) -> None:
        """After `step`, with the state of step `kept`, or without one for 0."""
        where = "there" if kept == step else f"state {kept}" if kept else "the beginning"
        super().__init__(f"interrupted after step {step}; the same command resumes from {where}")
        self.status = status


class StopRequest:
    """Whether the run stops after a step. All processes ask after each step, and get the same answer.

    If a step does not end within `_OVERDUE` seconds of the signal, the process ends: nothing else leads out of it.

    Attributes:
        status: of `Interrupted`.
    """

    def __init__(self) -> None:
        self.status = PREEMPTED
        self._asked, self._first = threading.Event(), threading.Lock()
        self._overdue = threading.Timer(_OVERDUE, self.leave)
        self._overdue.daemon = True

    def ask(self, number: int) -> None:
        """Notes a signal; only the first counts."""
        if self._first.acquire(blocking=False):
            self.status = INTERRUPTED if number == signal.SIGINT else PREEMPTED
            self._asked.set()
            self._overdue.start()

    def after(self, step: int) -> bool:
        """Whether this step is the last."""
        return self._stops(self._asked.is_set())

    def leave(self) -> NoReturn:
        """Ends the process amid a step."""
        print("error: the step did not end; the same command resumes from the last state", file=sys.stderr, flush=True)
        multihost.leave(self.status)

    def close(self) -> None:
        """To be called after the last step."""
        self._overdue.cancel()

    def _stops(self, stops: bool) -> bool:
        if stops:
            self._overdue.cancel()  # writing the state takes as long as it takes
        return stops


class SharedStopRequest(StopRequest):
    """In several processes: the step after the last that any of them has begun.

    A process that receives a signal reports it to all. Each then holds on between two steps, reports its own step and
    reads those of the others. That takes no longer than the messages: threads exchange them, whatever the processes
    wait for. JAX's own `reached_preemption_sync_point` is not used: Orbax asks it with the step of a state that it has
    written meanwhile, so a process can have passed the step that was agreed on, which is met by equality; and it
    handles SIGTERM alone.
    """

    def __init__(self, done: int) -> None:
        """Begins to listen, in a run that has done this many steps."""
        super().__init__()
        self._here, self._all = multihost.index(), multihost.count()
        self._step, self._last, self._reported = done, math.inf, False
        self._key, self._client = f"dllm_jax/stop/{next(_NUMBERS)}", multihost.coordinator()
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ask(self, number: int) -> None:
        super().ask(number)
        self._post("word", "stop")

    def after(self, step: int) -> bool:
        with self._lock:
            self._step = step
            return self._stops(step >= self._last)

    def close(self) -> None:
        super().close()
        with self._lock:
            self._report_step()
        self._post("word", "end")  # no other can stop any more: they would agree on a step that no process reaches
        self._listener.join(_PATIENCE)  # a thread inside the client would crash the interpreter at its end

    def _listen(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone, and JAX ends this process
            if self._read("word") == "stop":
                super().ask(signal.SIGTERM)  # unless this process has received a signal itself
            with self._lock:
                self._report_step()
                self._last = max(int(self._read(process)) for process in range(self._all)) + 1

    def _report_step(self) -> None:
        if not self._reported:
            self._reported = True
            self._post(self._here, str(self._step))

    def _post(self, name: str | int, text: str) -> None:
        """Leaves a text at the coordinator, unless one is there."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{self._key}/{name}", text)

    def _read(self, name: str | int) -> str:
        """The text under a name, as soon as it is there."""
        return self._client.blocking_key_value_get(f"{self._key}/{name}", multihost.MONTH * 1000)


@contextlib.contextmanager
def stop_requests(done: int) -> Iterator[StopRequest]:
    """Turns SIGINT and SIGTERM into a `StopRequest` between two steps; a second signal acts as usual.

    Python delivers signals to the main thread alone: in another one only other processes can stop the run.

    Args:
        done: steps that the run has done.
    """
    stop = SharedStopRequest(done) if multihost.count() > 1 else StopRequest()
    main = threading.current_thread() is threading.main_thread()
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}

    def restore() -> None:
        for number, handler in old.items():
            signal.signal(number, handler)

    with _signals_in_thread(stop) if main else contextlib.nullcontext():
        for number in old:
            signal.signal(number, lambda *_: restore())
        try:
            yield stop
        except Interrupted:
            stop.close()
            raise
        else:
            stop.close()  # not after an error, when the others may be gone
        finally:
            restore()


@contextlib.contextmanager
def _signals_in_thread(stop: StopRequest) -> Iterator[None]:
    """Hands signals to a thread: Python's handlers wait until the main thread comes back from a step."""
    here, there = socket.socketpair()
    there.setblocking(False)

    def pass_on() -> None:
        while number := here.recv(1):  # nothing when the other end is closed
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                stop.ask(number[0])

    thread = threading.Thread(target=pass_on, daemon=True)
    before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        there.close()
        thread.join(_PATIENCE)  # it may be writing to a coordinator that is gone
        here.close()
