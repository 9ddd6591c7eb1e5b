"""How the processes of a run end together: when a signal asks one of them to stop, and when one fails.

A step is a collective of all processes' devices, so nobody can leave alone: the others would wait for it in vain.
"""

import contextlib
import itertools
import json
import math
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, NoReturn, cast

import jax

from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost

PREEMPTED, INTERRUPTED, MISTAKE = 75, 130, 2  # statuses: EX_TEMPFAIL of sysexits.h, as shells say SIGINT, and errors
_PART = 5  # seconds that process 0 stays for the others to hear
_OVERDUE = 300  # seconds from a signal until a run ends that has not come to the end of its step
_LOST = re.compile(r"Gloo|NCCL|Connection (closed|reset)|Socket closed|UNAVAILABLE|heartbeat", re.IGNORECASE)
_NUMBERS = itertools.count()  # of topics: all processes come to the same ones in the same order


class Interrupted(Exception):
    """A signal asked the run to end; its state was written, unless its last steps were skipped.

    Attributes:
        status: with which a command leaves then: 130 after SIGINT, 75 after SIGTERM, by which schedulers know that it
            wants to be started again.
    """

    def __init__(self, step: int, kept: int, status: int) -> None:
        """After `step`, with the state of step `kept`, or without one for 0."""
        where = "there" if kept == step else f"state {kept}" if kept else "the beginning"
        super().__init__(f"interrupted after step {step}; the same command goes on from {where}")
        self.status = status


class Stop:
    """Whether the run is to stop after a step, which all processes ask after each, and all hear the same.

    A step that does not end `_OVERDUE` seconds after the signal ends the process: nothing leads out of it otherwise.

    Attributes:
        status: of `Interrupted`.
    """

    def __init__(self) -> None:
        self.status = PREEMPTED
        self._asked, self._first = threading.Event(), threading.Lock()
        self._overdue = threading.Timer(_OVERDUE, self.leave)
        self._overdue.daemon = True

    def ask(self, number: int) -> None:
        """Notes a signal, the first of them."""
        if self._first.acquire(blocking=False):
            self.status = INTERRUPTED if number == signal.SIGINT else PREEMPTED
            self._asked.set()
            self._overdue.start()

    def after(self, step: int) -> bool:
        """Whether this step is the last."""
        return self._stops(self._asked.is_set())

    def leave(self) -> NoReturn:
        """Ends the process in the midst of a step."""
        print("error: the step did not end; the same command goes on from the last state", file=sys.stderr, flush=True)
        multihost.leave(self.status)

    def close(self) -> None:
        """No step is asked about any more."""
        self._overdue.cancel()

    def _stops(self, stops: bool) -> bool:
        if stops:
            self._overdue.cancel()  # writing the state takes as long as it takes
        return stops


class SharedStop(Stop):
    """In several processes: the step behind the last that one of them has begun.

    The one that is asked tells all. Each holds on between two steps, says how far it is, and hears where the others
    are, which takes no longer than these messages: threads exchange them, whatever the processes wait for. JAX's own
    `reached_preemption_sync_point` is not used: Orbax asks it with the step of a state that it has written meanwhile,
    so a process can have passed the step that was agreed on, which is met by equality; and it knows of SIGTERM alone.
    """

    def __init__(self, done: int) -> None:
        """Begins to listen, in a run that has done so many steps."""
        super().__init__()
        self._here, self._all = multihost.index(), multihost.count()
        self._step, self._last, self._told = done, math.inf, False
        self._lock, self._post = threading.Lock(), _Post("stop")
        self._post.listen(self._agree)

    def ask(self, number: int) -> None:
        """As `Stop`."""
        super().ask(number)
        self._post.say("stop")

    def after(self, step: int) -> bool:
        """As `Stop`."""
        with self._lock:
            self._step = step
            return self._stops(step >= self._last)

    def close(self) -> None:
        """As `Stop`."""
        super().close()
        with self._lock:
            self._tell()
        self._post.say("")  # the others agree on a step that nobody reaches, and listen no more
        self._post.close()

    def _tell(self) -> None:
        """Says how far this one is, once."""
        if not self._told:
            self._told = True
            self._post.say(str(self._step), str(self._here))

    def _agree(self, word: str | None) -> None:
        if word == "stop":
            super().ask(signal.SIGTERM)  # unless this one was asked itself
        with self._lock, contextlib.suppress(jax.errors.JaxRuntimeError):  # a loss that `watched` tells of
            self._tell()
            self._last = max(int(self._post.heard(str(process))) for process in range(self._all)) + 1


@contextlib.contextmanager
def stop_requests(done: int) -> Iterator[Stop]:
    """Turns SIGINT and SIGTERM into a `Stop` between two steps of a run that has done so many; a second signal acts as
    usual. Signals reach the main thread alone: in another one nothing is asked here, but may be by other processes."""
    stop = SharedStop(done) if multihost.count() > 1 else Stop()
    main = threading.current_thread() is threading.main_thread()
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}

    def restore() -> None:
        for number, handler in old.items():
            signal.signal(number, handler)

    with _heard_by_thread(stop) if main else contextlib.nullcontext():
        for number in old:
            signal.signal(number, lambda *_: restore())
        try:
            yield stop
        except Interrupted:
            stop.close()
            raise
        else:
            stop.close()  # after an error nobody may be there to agree with
        finally:
            restore()


@contextlib.contextmanager
def _heard_by_thread(stop: Stop) -> Iterator[None]:
    """A thread hears of signals: Python's handlers wait until the main thread comes back from a step."""
    here, there = socket.socketpair()
    there.setblocking(False)

    def hear() -> None:
        while number := here.recv(1):  # nothing when the other end is closed
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                stop.ask(number[0])

    thread = threading.Thread(target=hear, daemon=True)
    before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        there.close()
        thread.join(_PART)  # it may be telling a coordinator that is gone
        here.close()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """A block in which the processes wait for each other's devices.

    When one fails, each of the others ends at once, wherever it is, with status 2 and that one's sentence on stderr: no
    other way leads out of a collective. Those that lose touch with another one end as well.

    Raises:
        DllmError: where this one has lost touch, or heard of the other before it hung.
    """
    if multihost.count() == 1:
        yield
        return
    watch = _Watch()
    try:
        yield
    except Interrupted:
        watch.end()
        raise
    except BaseException as error:
        watch.fail(error)
    else:
        watch.end()


class _Watch:
    """Listens for the sentence of a process that failed."""

    def __init__(self) -> None:
        self._over, self._post = False, _Post("failed")
        self._post.listen(self._listen)
        self._lifeline = _Lifeline(self._gone)

    def _gone(self, process: int) -> None:
        reason = "it is gone; it was killed, or its own output says why it ended"
        self._post.say(json.dumps([process, reason]))
        self._post.say("", f"left/{process}")

    def end(self) -> None:
        """Waits until all have come so far: before, one may still fail."""
        self._post.meet()
        self._over = True
        self._post.say("")
        self._post.close()
        self._lifeline.close()

    def fail(self, error: BaseException) -> NoReturn:
        """Tells the others, unless one was first, and raises what there is to be told."""
        self._over = True
        lost = not isinstance(error, DllmError) and _LOST.search(str(error)) is not None
        told = _lost_touch(multihost.first_line(error)) if lost else error
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if lost:  # somebody may know who is gone
                process, first = json.loads(self._post.heard("", 1))
                told = DllmError(multihost.of(process, multihost.count(), first))
        self._post.say(json.dumps([multihost.index(), multihost.sentence(told)]))
        self._part()
        raise told from (error if lost else error.__cause__)

    def _listen(self, said: str | None) -> None:
        if self._over or said == "":
            return
        reason = str(_lost_touch("process 0, where they meet, is gone"))
        if said is not None:
            process, told = json.loads(said)
            reason = multihost.of(process, multihost.count(), told)
        print(f"error: {reason}", file=sys.stderr, flush=True)
        self._part()
        multihost.leave(MISTAKE)

    def _part(self) -> None:
        """Process 0 goes last: without the coordinator nobody hears anything."""
        self._post.say("", f"left/{multihost.index()}")
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for process in range(multihost.count()) if multihost.index() == 0 else ():
                self._post.heard(f"left/{process}", _PART)


class _Lifeline:
    """Connections of the processes to process 0, which break when one dies: its system closes them at once, whatever
    the others wait for. The coordinator misses it a minute later, and JAX then aborts everything.

    Nobody waits for a connection: one that cannot be made is missing, and the coordinator's patience is what is left.
    """

    def __init__(self, gone: Callable[[int], None]) -> None:
        """Connects.

        Args:
            gone: is called in process 0, by a thread, with a process that died.
        """
        self._post, self._gone = _Post("lifeline"), gone
        self._line: Any = None  # to process 0
        self._thread = threading.Thread(target=self._serve if multihost.index() == 0 else self._connect, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says that this one ends well; process 0 waits for the others to say so."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send_bytes(b"end")
        self._thread.join(_PART)

    def _connect(self) -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError, jax.errors.JaxRuntimeError):
            port, secret = json.loads(self._post.heard(""))
            self._line = Client((multihost.coordinator_host(), port), authkey=secret.encode())
            self._line.send_bytes(str(multihost.index()).encode())

    def _serve(self) -> None:
        secret = secrets.token_hex()
        with Listener(("", 0), backlog=multihost.count(), authkey=secret.encode()) as listener:
            self._post.say(json.dumps([listener.address[1], secret]))
            lines: dict[Any, int] = {}
            while len(lines) < multihost.count() - 1:
                with contextlib.suppress(OSError, EOFError, AuthenticationError):  # of a stranger
                    line = listener.accept()
                    lines[line] = int(line.recv_bytes())
        while lines:
            for heard in wait(list(lines)):
                process = lines.pop(heard)
                try:
                    cast("Connection", heard).recv_bytes()
                except (EOFError, OSError):
                    self._gone(process)


class _Post:
    """Words that processes leave at the coordinator, each once under a name."""

    def __init__(self, topic: str) -> None:
        self._key, self._client = f"dllm_jax/{topic}/{next(_NUMBERS)}/", multihost.coordinator()

    def listen(self, hear: Callable[[str | None], None]) -> None:
        """Begins to wait for the word without a name, with which the thread calls `hear`, or with None when the
        coordinator is gone."""
        self._thread = threading.Thread(target=self._listen, args=(hear,), daemon=True)
        self._thread.start()

    def say(self, word: str, name: str = "") -> None:
        """Leaves a word, unless one is there; nothing is said where the coordinator is gone."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(self._key + name, word)

    def heard(self, name: str, seconds: int = multihost.MONTH) -> str:
        """The word under a name, as soon as it is there."""
        return self._client.blocking_key_value_get(self._key + name, seconds * 1000)

    def meet(self) -> None:
        """Waits until all processes are here."""
        self._client.wait_at_barrier(f"{self._key}met", multihost.MONTH * 1000)

    def close(self) -> None:
        """Waits for the thread, which has heard its word: inside the client it would end the interpreter by a crash."""
        self._thread.join(_PART)

    def _listen(self, hear: Callable[[str | None], None]) -> None:
        try:
            word = self.heard("")
        except jax.errors.JaxRuntimeError:
            word = None
        hear(word)


def _lost_touch(how: str) -> DllmError:
    return DllmError(f"the processes lost touch with each other ({how}); start all again to go on from the last state")
