"""Verifiable tasks by name. A new task is one file in this folder and one line in `TASKS`."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from dllm_jax import spec
from dllm_jax.errors import DllmError
from evals.tasks.base import SPLITS, DrawnTask, Draws, Example, Source, Task, Verdict, split_of
from evals.tasks.chains import Chains
from evals.tasks.maze import Mazes
from evals.tasks.sudoku import Sudoku
from evals.tasks.text import TextTask
from evals.tasks.word_problems import WordProblems

TASKS: Mapping[str, type[Task]] = types.MappingProxyType(
    {task.name: task for task in (WordProblems, Sudoku, Mazes, Chains, TextTask)}
)

__all__ = [
    "SPLITS",
    "TASKS",
    "Chains",
    "DrawnTask",
    "Draws",
    "Example",
    "Mazes",
    "Source",
    "Sudoku",
    "Task",
    "TextTask",
    "Verdict",
    "WordProblems",
    "make_task",
    "split_of",
]


def make_task(task: str, **options: Any) -> Task:
    """A task from its name and options: ``make_task("maze:size=5")``, ``make_task("maze", size=5)``.

    Also what the data part of a training config names: ``source = "evals.tasks:make_task"`` with
    ``options = {task = "word-problems", steps = [1, 2]}``.

    Raises:
        DllmError: for an unknown task or option, or a value of another type or out of range.
    """
    name, written = spec.parse(task, "task")
    if name not in TASKS:
        raise DllmError(f"no task is called {name!r}; choose one of {', '.join(TASKS)}")
    if twice := sorted(set(written) & set(options)):
        raise DllmError(f"task {task!r} and the options both give {twice[0]}; leave one out")
    every = {**written, **{option: spec.format_value(value) for option, value in options.items()}}
    return TASKS[name](**spec.convert_options(every, option_kinds(name), f"task {name}"))


def option_kinds(name: str) -> dict[str, Any]:
    """Option -> type of a task, without what only a program can set."""
    hints = typing.get_type_hints(TASKS[name])
    fields = dataclasses.fields(TASKS[name])  # type: ignore[arg-type]
    return {field.name: hints[field.name] for field in fields if field.repr}
