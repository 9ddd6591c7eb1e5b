"""What all command lines share: an error is one sentence on the standard error, and an exit status."""

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

_TYPED: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("_TYPED", default=("", ""))


@contextlib.contextmanager
def command_name(module: str, name: str) -> Iterator[None]:
    """A block in which usages and errors of `python -m MODULE` name the command as it was typed."""
    before = _TYPED.set((f"python -m {module}", name))
    try:
        yield
    finally:
        _TYPED.reset(before)


class Parser(argparse.ArgumentParser):
    """Raises DllmError for a command line that it cannot parse, instead of printing the usage and exiting."""

    def __init__(self, *, prog: str | None = None, **options: Any) -> None:
        """As argparse's, with the `prog` that `command_name` gives."""
        module, name = _TYPED.get()
        if prog is not None and module and f"{prog} ".startswith(f"{module} "):
            prog = name + prog.removeprefix(module)
        super().__init__(prog=prog, **options)

    def error(self, message: str) -> NoReturn:
        raise DllmError(f"{message}; see {self.prog} --help")


def console(otherwise: int = 160) -> Console:
    """The console that tables are printed on: COLUMNS wide if that is set, else as wide as the terminal, else
    `otherwise` columns. There are no colours in a pipe or with NO_COLOR."""
    usual = Console()
    return usual if usual.is_terminal or os.environ.get("COLUMNS", "").isdigit() else Console(width=otherwise)


def keep_programs() -> None:
    """Keeps compiled programs under `checkpoint.home()` for the next command, unless JAX_COMPILATION_CACHE_DIR is set
    or the folder cannot be written."""
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
    """Runs a command that prints results, with compiled programs that are kept; an error is printed as one sentence.

    Args:
        when_out_of_memory: the advice in the sentence about device memory.

    Returns:
        The exit status: 0 for success, 2 for a mistake or lack of device memory, 130 for an interrupt, 141 when the
        reader of the output has gone.
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
