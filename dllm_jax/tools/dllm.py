"""The command `dllm`: the commands of all packages under one name."""

import importlib
import sys
from collections.abc import Sequence

from dllm_jax import DllmError, __version__
from dllm_jax.tools.completion import SHELLS, script

_COMMANDS = {
    "convert": ("convert", (), "checkpoints of the hub into this library's, and back"),
    "sample": ("samplers", (), "answer prompts, fill gaps"),
    "serve": ("samplers", ("serve",), "a server in the shape of OpenAI's"),
    "train": ("train", (), "train and fine-tune models, students and indicators"),
    "eval": ("evals", (), "score samplers on tasks, sweep, compare, plot"),
}


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
    if said[0] not in _COMMANDS:
        print(f"error: no command is called {said[0]!r}; use {', '.join(_ABOUT)}", file=sys.stderr)
        return 2
    package, first, _ = _COMMANDS[said[0]]
    status: int = importlib.import_module(f"{package}.__main__").main([*first, *said[1:]])
    return status


_ABOUT = {name: about for name, (_, _, about) in _COMMANDS.items()} | {
    "completion": "print what makes a shell complete all this: bash, zsh or fish"
}


def _complete(said: Sequence[str]) -> int:
    try:
        if len(said) != 1:
            raise DllmError(f"completion needs a shell; write dllm completion {'|'.join(SHELLS)}")
        print(script(said[0], _ABOUT))
    except DllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _help() -> str:
    longer = {name: f" (python -m {' '.join((package, *first))})" for name, (package, first, _) in _COMMANDS.items()}
    lines = [f"  {name:10} {about}{longer.get(name, '')}" for name, about in _ABOUT.items()]
    return "\n".join(["usage: dllm COMMAND ...; dllm COMMAND --help says more", "", *lines])
