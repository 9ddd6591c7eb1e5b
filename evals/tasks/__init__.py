"""Verifiable tasks by name. A new task is one file in this folder and one line in `TASKS`."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from dllm_jax.errors import DllmError
from evals import spec
from evals.tasks.base import SPLITS, Draws, Example, Source, Task, Verdict, split_of
from evals.tasks.maze import Mazes
from evals.tasks.sudoku import Sudoku
from evals.tasks.word_problems import WordProblems

TASKS: Mapping[str, type[Task]] = types.MappingProxyType({task.name: task for task in (WordProblems, Sudoku, Mazes)})

__all__ = [
    "SPLITS",
    "TASKS",
    "Draws",
    "Example",
    "Mazes",
    "Source",
    "Sudoku",
    "Task",
    "Verdict",
    "WordProblems",
    "make_task",
    "split_of",
]


def make_task(text: str, **options: Any) -> Task:
    """A task from its name and options, ``make_task("maze:size=5")`` or ``make_task("maze", size=5)``.

    Raises:
        DllmError: for an unknown task or option, or a value out of range.
    """
    name, written = spec.parse(text, "task")
    if name not in TASKS:
        raise DllmError(f"no task is called {name!r}; choose one of {', '.join(TASKS)}")
    kinds = option_kinds(name)
    if unknown := sorted(set(options) - set(kinds)):
        raise DllmError(f"task {name} has no option {unknown[0]!r}; it has {', '.join(kinds)}")
    return TASKS[name](**spec.converted(written, kinds, f"task {name}"), **options)


def option_kinds(name: str) -> dict[str, Any]:
    """Option -> type of a task, without what only a program can set."""
    hints = typing.get_type_hints(TASKS[name])
    fields = dataclasses.fields(TASKS[name])  # type: ignore[arg-type]
    return {field.name: hints[field.name] for field in fields if field.repr}
