"""Ctrl-C: the first one ends a command, wherever it is.

Python raises KeyboardInterrupt between any two steps of its own, also inside callbacks of the garbage collector (JAX
has one) and finalizers, whose errors it drops; and while a package is imported, where nobody can catch it.
"""

import _thread
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from dllm_jax.cli.commands import COMMANDS

INTERRUPTED = 130
"""The status of a command that was interrupted, as shells say SIGINT."""

_AGAIN = 0.01  # seconds until what was dropped is raised again
_PACKAGES = {command.run[0] for command in COMMANDS.values()} - {"train"}  # which has signals of its own


def leave_while_importing() -> None:
    """Makes Ctrl-C end a process that was started as one of the commands, until it is `interruptible`, and behind that:
    with one word and at once, as there is nothing to clean up yet. Other processes, and those that ignore SIGINT, stay
    as they are. Called first of all when `dllm_jax` is imported."""
    if _is_command() and _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A block that Ctrl-C ends by KeyboardInterrupt; one that Python drops is raised again. A callback of the collector
    that dropped one waits until the block ends: the first step behind a long collection is its own, again and again."""
    if not _is_main_thread():  # signals reach that one alone
        yield
        return
    before, told = signal.getsignal(signal.SIGINT), sys.unraisablehook
    over, waiting, main = threading.Event(), list[Any](), threading.get_ident()

    def again() -> None:
        time.sleep(_AGAIN)
        if over.is_set():
            return
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(main, signal.SIGINT)  # which ends waiting, too
        else:
            _thread.interrupt_main()

    def dropped(failure: Any) -> None:
        if issubclass(failure.exc_type, KeyboardInterrupt):
            if failure.object in gc.callbacks:
                gc.callbacks.remove(failure.object)
                waiting.append(failure.object)
            _thread.start_new_thread(again, ())  # takes no lock, which the collector may have interrupted somebody at
        else:
            told(failure)

    sys.unraisablehook = dropped
    if before is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        over.set()
        gc.callbacks.extend(waiting)
        if before is _leave:
            signal.signal(signal.SIGINT, before)
        sys.unraisablehook = told


def is_second(error: KeyboardInterrupt) -> bool:
    """Whether it was raised while another one was being cleaned up after."""
    before: BaseException | None = error.__context__
    while before is not None and not isinstance(before, KeyboardInterrupt):
        before = before.__context__
    return before is not None


def _leave(*_: Any) -> NoReturn:
    os.write(2, b"interrupted\n")  # print may be what was interrupted
    os._exit(INTERRUPTED)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_command() -> bool:
    """Whether the process runs `python -m PACKAGE`, whose package is about to be imported, or `dllm COMMAND`."""
    program, *said = sys.argv or [""]
    if program == "-m":
        given = sys.orig_argv
        return any(pair in zip(given, given[1:], strict=False) for pair in (("-m", name) for name in _PACKAGES))
    name = os.path.splitext(os.path.basename(program))[0]
    return name == "dllm" and said[:1] != ["train"]
