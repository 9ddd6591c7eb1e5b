"""Ctrl-C ends a command, also where Python drops the KeyboardInterrupt: in finalizers and in callbacks of the garbage
collector (JAX has one)."""

import _thread
import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 130
"""The exit status of a command that was interrupted, as shells report SIGINT."""

_RETRY_SECONDS = 0.01


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A block that Ctrl-C ends by KeyboardInterrupt; one that Python drops is raised again.

    A callback of the collector that dropped one is put aside until the block ends: it is the first Python code after
    each collection, and where collections are long it would get every signal.
    """
    if threading.current_thread() is not threading.main_thread():  # signals reach that one alone
        yield
        return
    report, ended, main = sys.unraisablehook, threading.Event(), threading.get_ident()
    aside: list[Any] = []

    def raise_again() -> None:
        if ended.wait(_RETRY_SECONDS):
            return
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(main, signal.SIGINT)  # which also ends a wait
        else:
            _thread.interrupt_main()

    def handle(failure: Any) -> None:
        if issubclass(failure.exc_type, KeyboardInterrupt):
            if failure.object in gc.callbacks:
                gc.callbacks.remove(failure.object)
                aside.append(failure.object)
            _thread.start_new_thread(raise_again, ())  # takes no lock, which the interrupted code may hold
        else:
            report(failure)

    sys.unraisablehook = handle
    try:
        yield
    finally:
        ended.set()
        gc.callbacks.extend(aside)
        sys.unraisablehook = report
