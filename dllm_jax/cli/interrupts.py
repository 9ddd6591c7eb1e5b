"""Ctrl-C: the first one ends a command.

Python raises KeyboardInterrupt between any two steps of its own, also inside callbacks of the garbage collector (JAX
has one) and finalizers, whose errors it drops.
"""

import _thread
import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 130
"""The status of a command that was interrupted, as shells say SIGINT."""

_AGAIN = 0.01  # seconds until what was dropped is raised again


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A block that Ctrl-C ends by KeyboardInterrupt; one that Python drops is raised again. A callback of the collector
    that dropped one waits until the block ends: the first step behind a long collection is its own, again and again."""
    if not _is_main_thread():  # signals reach that one alone
        yield
        return
    reported = sys.unraisablehook
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
            reported(failure)

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        over.set()
        gc.callbacks.extend(waiting)
        sys.unraisablehook = reported


def is_second(error: KeyboardInterrupt) -> bool:
    """Whether it was raised while another one was being cleaned up after."""
    before: BaseException | None = error.__context__
    while before is not None and not isinstance(before, KeyboardInterrupt):
        before = before.__context__
    return before is not None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
