"""`dllm completion SHELL`: a script with which a shell completes commands and options, by the package shtab."""

import argparse
import importlib

from dllm_jax.cli.commands import COMMANDS, COMPLETION
from dllm_jax.errors import DllmError

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """The script for a shell. It is made once: completing runs no Python.

    Args:
        shell: one of `SHELLS`.

    Raises:
        DllmError: for another shell, and without the package shtab.
    """
    if shell not in SHELLS:
        raise DllmError(f"no completion for {shell!r}; choose one of {', '.join(SHELLS)}")
    try:
        import shtab
    except ImportError:
        raise DllmError("completion needs the package shtab; pip install 'dllm_jax[completion]'") from None
    made: str = shtab.complete(full_parser(), shell=shell)
    return made


def full_parser() -> argparse.ArgumentParser:
    """A parser of all commands."""
    parser = argparse.ArgumentParser(prog="dllm")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = importlib.import_module(command.parser).command_line()
        commands.add_parser(name, help=command.about, parents=[own], add_help=False)
    completion = commands.add_parser("completion", help=COMPLETION)
    completion.add_argument("shell", choices=SHELLS)
    return parser
