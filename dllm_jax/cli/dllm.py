"""The command `dllm`: the commands of all packages under one name."""

import importlib
import os
import sys
from collections.abc import Sequence

from dllm_jax import DllmError, __version__
from dllm_jax.cli.command import called
from dllm_jax.cli.commands import COMMANDS, COMPLETION
from dllm_jax.cli.completion import SHELLS, script


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `dllm COMMAND ...`, which is `python -m PACKAGE ...`; returns the exit status, 2 for no such command."""
    said = sys.argv[1:] if arguments is None else list(arguments)
    if said[:1] in ([], ["-h"], ["--help"]):
        print(_help())
        return 0
    if said[0] == "--version":
        print(f"dllm {__version__}")
        return 0
    if said[0] == "completion":
        return _complete(said[1:])
    if said[0] not in COMMANDS:
        print(f"error: no command is called {said[0]!r}; use {', '.join(COMMANDS)}, completion", file=sys.stderr)
        return 2
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where rules and tasks of one's own are, as `python -m` has it
    package, *first = COMMANDS[said[0]].run
    with called(" ".join([package, *first]), f"dllm {said[0]}"):
        status: int = importlib.import_module(f"{package}.__main__").main([*first, *said[1:]])
    return status


def _complete(said: Sequence[str]) -> int:
    if said in (["-h"], ["--help"]):
        print(f"usage: dllm completion {'|'.join(SHELLS)}\n\n{COMPLETION}; docs/start.md says where it belongs")
        return 0
    try:
        if len(said) != 1:
            raise DllmError(f"completion needs a shell; write dllm completion {'|'.join(SHELLS)}")
        print(script(said[0]))
    except DllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _help() -> str:
    lines = [f"  {name:10} {about} (python -m {' '.join(run)})" for name, (about, run, _) in COMMANDS.items()]
    return "\n".join(
        ["usage: dllm COMMAND ...; dllm COMMAND --help says more", "", *lines, f"  completion {COMPLETION}"]
    )
