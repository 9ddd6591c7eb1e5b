"""The command `dllm`: the commands of all packages under one name."""

import importlib
import os
import sys
from collections.abc import Sequence

from dllm_jax import DllmError, __version__
from dllm_jax.cli.command import command_name
from dllm_jax.cli.commands import COMMANDS, COMPLETION
from dllm_jax.cli.completion import SHELLS, script


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `dllm COMMAND ...`, which is `python -m PACKAGE ...`; returns the exit status, 2 for no such command."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] in ([], ["-h"], ["--help"]):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"dllm {__version__}")
        return 0
    if words[0] == "completion":
        return _complete(words[1:])
    if words[0] not in COMMANDS:
        print(f"error: no command is called {words[0]!r}; use {', '.join(COMMANDS)}, completion", file=sys.stderr)
        return 2
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where your own rules and tasks are, as with `python -m`
    package, *first = COMMANDS[words[0]].run
    with command_name(" ".join([package, *first]), f"dllm {words[0]}"):
        status: int = importlib.import_module(f"{package}.__main__").main([*first, *words[1:]])
    return status


def _complete(words: Sequence[str]) -> int:
    if words in (["-h"], ["--help"]):
        print(f"usage: dllm completion {'|'.join(SHELLS)}\n\n{COMPLETION}; docs/start.md says where it belongs")
        return 0
    try:
        if len(words) != 1:
            raise DllmError(f"completion needs a shell; write dllm completion {'|'.join(SHELLS)}")
        print(script(words[0]))
    except DllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _help() -> str:
    lines = [f"  {name:10} {about} (python -m {' '.join(run)})" for name, (about, run, _) in COMMANDS.items()]
    return "\n".join(
        ["usage: dllm COMMAND ...; dllm COMMAND --help says more", "", *lines, f"  completion {COMPLETION}"]
    )
