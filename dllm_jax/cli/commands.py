"""The commands of `dllm`: what runs them, what parses them, what they are for."""

from collections.abc import Mapping
from typing import NamedTuple


class Command(NamedTuple):
    """A command.

    Attributes:
        about: what it is for.
        run: the words after `python -m`: a package, and its first arguments.
        parser: the module whose `command_line` makes its parser.
    """

    about: str
    run: tuple[str, ...]
    parser: str


COMMANDS: Mapping[str, Command] = {
    "convert": Command("checkpoints of the hub into this library's, and back", ("convert",), "convert.__main__"),
    "sample": Command("answer prompts, fill gaps", ("samplers",), "samplers.cli.sample"),
    "decide": Command("choices and scores from one forward", ("samplers", "decide"), "samplers.cli.decide"),
    "serve": Command("a server in the shape of OpenAI's", ("samplers", "serve"), "samplers.serving.cli"),
    "train": Command("train and fine-tune models, students and indicators", ("train",), "train.__main__"),
    "eval": Command("score samplers on tasks, sweep, compare, plot", ("evals",), "evals.__main__"),
    "doctor": Command(
        "what runs on this machine, and whether it is right", ("dllm_jax.doctor",), "dllm_jax.doctor.__main__"
    ),
}
COMPLETION = "print what makes a shell complete all this: bash, zsh or fish"
"""What the command `completion` is for."""
