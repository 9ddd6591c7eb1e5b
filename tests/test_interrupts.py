"""Ctrl-C: it ends a command wherever it comes, once, with one sentence."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import ROOT

from dllm_jax.cli.interrupts import interruptible

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def listening():
    """A shell's job in the background ignores Ctrl-C, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(process: subprocess.Popen) -> tuple[int, str]:
    """The status and the errors of a process that gets a Ctrl-C when it prints that it is ready."""
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    try:
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    return process.returncode, err


def start(command: list[str], *path: os.PathLike) -> subprocess.Popen:
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], env=settings, **pipes)


def test_importing_the_libraries_leaves_signals_alone():
    look = "import signal; before = list(map(signal.getsignal, signal.valid_signals()))\n"
    look += "import dllm_jax, convert, samplers, train, evals\n"
    look += "print(before == list(map(signal.getsignal, signal.valid_signals())))"
    assert start(["-c", look]).communicate(timeout=60)[0] == "True\n"


@pytest.mark.parametrize("dropping", ["gc.collect()", "Finalized()"])
def test_what_python_drops_is_raised_again(tmp_path, dropping):
    (tmp_path / "busy.py").write_text(
        textwrap.dedent(f"""
            import gc, sys, time
            from dllm_jax.cli.command import run_printing

            class Finalized:
                def __del__(self):
                    time.sleep(0.001)

            def work():
                print("ready", flush=True)
                while True:
                    {dropping}
                    time.sleep(0.001)

            sys.exit(run_printing(work, ""))
        """)
    )
    assert interrupt(start([str(tmp_path / "busy.py")])) == (130, "interrupted\n")


def test_hook_and_callbacks_are_restored():
    def drop(*_):
        raise KeyboardInterrupt

    hook = sys.unraisablehook
    gc.callbacks.append(drop)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            gc.collect()
            assert drop not in gc.callbacks
            time.sleep(60)
        assert gc.callbacks.count(drop) == 1 and sys.unraisablehook is hook
    finally:
        gc.callbacks.remove(drop)
