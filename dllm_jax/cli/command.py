"""What the command lines share: mistakes are one sentence on the standard error, and an exit status."""

import argparse
import contextlib
import contextvars
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
from rich.console import Console

from dllm_jax.checkpoints import checkpoint
from dllm_jax.cli.interrupts import INTERRUPTED, interruptible
from dllm_jax.errors import DllmError

_CALLED: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("_CALLED", default=("", ""))


@contextlib.contextmanager
def called(module: str, name: str) -> Iterator[None]:
    """A block in which `python -m MODULE` is called by another name in usages and mistakes: what somebody typed."""
    before = _CALLED.set((f"python -m {module}", name))
    try:
        yield
    finally:
        _CALLED.reset(before)


class Parser(argparse.ArgumentParser):
    """Raises DllmError for a command line that it does not understand, instead of printing the usage and leaving."""

    def __init__(self, *, prog: str | None = None, **options: Any) -> None:
        """As argparse's; a `prog` as `called` says."""
        module, name = _CALLED.get()
        if prog is not None and module and f"{prog} ".startswith(f"{module} "):
            prog = name + prog.removeprefix(module)
        super().__init__(prog=prog, **options)

    def error(self, message: str) -> NoReturn:
        raise DllmError(f"{message}; see {self.prog} --help")


def console(otherwise: int = 160) -> Console:
    """What tables are printed on: as wide as COLUMNS says, else the terminal, or `otherwise` columns where nobody
    watches. Colours are left out through a pipe, and where NO_COLOR is set."""
    found = Console()
    return found if found.is_terminal or os.environ.get("COLUMNS", "").isdigit() else Console(width=otherwise)


def keep_programs() -> None:
    """Compiled programs are kept under `checkpoint.home()` and read again by the next command, unless JAX's own setting
    (JAX_COMPILATION_CACHE_DIR) says where, or nothing can be written there."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    folder = checkpoint.home() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))


def run_printing(work: Callable[[], None], when_out_of_memory: str) -> int:
    """Runs a command that prints results, by compiled programs that are kept, and says how it ended.

    Args:
        when_out_of_memory: what to do then, for the sentence about it.

    Returns:
        0 when it worked, 2 after a mistake or for lack of device memory, which is printed as one sentence, 130 when
        interrupted, 141 when the reader of the output has gone.
    """
    try:
        keep_programs()
        with interruptible(), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            work()
            sys.stdout.flush()
    except DllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print("; ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
        return INTERRUPTED
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        print(f"error: the device ran out of memory; {when_out_of_memory}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def out_of_memory(error: BaseException) -> bool:
    """Whether a device had not enough memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
