"""`dllm completion SHELL`: a script with which a shell completes commands and options, by the package shtab."""

import argparse
import importlib
from collections.abc import Mapping

from dllm_jax.errors import DllmError

PARSERS: Mapping[str, str] = {
    "convert": "convert.__main__",
    "sample": "samplers.__main__",
    "serve": "samplers.serving.command",
    "train": "train.__main__",
    "eval": "evals.__main__",
}
"""Command -> the module whose `command_line` makes its parser."""

SHELLS = ("bash", "zsh", "fish")


def script(shell: str, about: Mapping[str, str]) -> str:
    """The script for a shell. It is made once: completing runs no Python.

    Args:
        shell: one of `SHELLS`.
        about: command -> what it is for.

    Raises:
        DllmError: for another shell, and without the package shtab.
    """
    if shell not in SHELLS:
        raise DllmError(f"no completion for {shell!r}; choose one of {', '.join(SHELLS)}")
    try:
        import shtab
    except ImportError:
        raise DllmError("completion needs the package shtab; pip install 'dllm_jax[completion]'") from None
    made: str = shtab.complete(whole(about), shell=shell)
    return made


def whole(about: Mapping[str, str]) -> argparse.ArgumentParser:
    """One parser of all commands.

    Args:
        about: as in `script`.
    """
    parser = argparse.ArgumentParser(prog="dllm")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, module in PARSERS.items():
        own = importlib.import_module(module).command_line()
        commands.add_parser(name, help=about[name], parents=[own], add_help=False)
    completion = commands.add_parser("completion", help=about["completion"])
    completion.add_argument("shell", choices=SHELLS)
    return parser
