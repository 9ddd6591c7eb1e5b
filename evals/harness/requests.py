"""Requests of lm-evaluation-harness as this library runs them."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dllm_jax import DllmError
from evals.harness.answers import digest

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Options of tasks that mean the number of positions to generate; the first that is set counts."""


@dataclasses.dataclass(frozen=True)
class TextRequest:
    """A request for text.

    Attributes:
        instance: the harness's.
        key: of its answer.
        ids: of the prompt.
        until: strings that its text is cut at.
        gen_length: positions to generate.
        draws: [2] uint32, the data of its typed key.
    """

    instance: "Instance"
    key: str
    ids: list[int]
    until: tuple[str, ...]
    gen_length: int
    draws: np.ndarray

    @property
    def options(self) -> list[tuple[str, Any]]:
        """The task's options that are numbers or words."""
        return [(name, x) for name, x in self.instance.args[1].items() if isinstance(x, (int, float, str))]


@dataclasses.dataclass(frozen=True)
class PairRequest:
    """A request for a likelihood.

    Attributes:
        instance: the harness's.
        key: of its answer.
        context, continuation: token ids.
        seed: of the masks.
        greedy: whether to find out what greedy decoding gives.
    """

    instance: "Instance"
    key: str
    context: list[int]
    continuation: list[int]
    seed: int
    greedy: bool


def length_of(options: Mapping[str, Any]) -> int | None:
    """The number of positions that a task's options ask for; None for none.

    Raises:
        DllmError: for anything but a whole number.
    """
    length = next((options[name] for name in LENGTHS if options.get(name) is not None), None)
    return None if length is None else whole_number("max_gen_toks", length)


def whole_number(what: str, value: Any) -> int:
    """The number that a value, or its text, is.

    Raises:
        DllmError: for anything else.
    """
    try:
        return int(value)
    except (TypeError, ValueError):
        raise DllmError(f"{what} is {value!r}; it must be a whole number") from None


def key_data_of(draws: str) -> np.ndarray:
    """[2] uint32 of hexadecimal digits."""
    return np.asarray([int(draws[:8], 16), int(draws[8:16], 16)], np.uint32)


def number_repeats(requests: "Sequence[Instance]") -> list[int]:
    """The repetition that each request is: the harness sends the same object once per repetition."""
    before = collections.Counter[int]()
    repeats = []
    for request in requests:
        repeats.append(before[id(request)])
        before[id(request)] += 1
    return repeats


def slowest_seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    """The seconds of the slowest process, added over the runs with each number of processes.

    Args:
        lines: of answers, with "share" (process and number of processes) and "wall".
    """
    spent = collections.Counter[tuple[int, int]]()
    for line in lines:
        process, processes = line["share"]
        spent[processes, process] += line["wall"]
    return sum(max(spent[key] for key in spent if key[0] == number) for number in {number for number, _ in spent})


def document_of(request: "Instance") -> tuple[Any, ...]:
    """Equal for the requests of one document."""
    return request.task_name, request.doc_id, digest(request.doc)


def task_of(requests: "Sequence[Instance]") -> str:
    """The first request's task, for sentences."""
    return f"task {requests[0].task_name}" if requests else "a task"
