"""The command `dllm`: the commands of all packages under one name."""

import importlib
import sys
from collections.abc import Sequence

from dllm_jax import __version__

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
    if said[0] not in _COMMANDS:
        print(f"error: no command is called {said[0]!r}; use {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    package, first, _ = _COMMANDS[said[0]]
    status: int = importlib.import_module(f"{package}.__main__").main([*first, *said[1:]])
    return status


def _help() -> str:
    lines = [f"  {name:8} {about} (python -m {' '.join((p, *f))})" for name, (p, f, about) in _COMMANDS.items()]
    return "\n".join(["usage: dllm COMMAND ...; dllm COMMAND --help says more", "", *lines])
