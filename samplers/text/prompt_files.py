"""Files of prompts: one per line, as a text or as a JSON object, read when they are needed (docs/batch.md)."""

import codecs
import contextlib
import itertools
import json
import reprlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dllm_jax import DllmError
from samplers.config.registry import FORMS

LINE_OPTIONS = ("gen_length", "seed", "stop", *FORMS)
"""Keys of a line that change its own answer, besides its `options`."""
_LONGEST = 16 * 2**20  # bytes of a line
_DRAWN = (b'"temperature"', b'"top_p"', b'"top_k"')
_FORMED = tuple(f'"{name}"'.encode() for name in FORMS)


class Line(NamedTuple):
    """A line that is not blank.

    Attributes:
        row: its number among these, from 0: its row in `generate`.
        number: its number in the file, from 1.
        data: its bytes, without its end.
    """

    row: int
    number: int
    data: bytes


class Needs(NamedTuple):
    """What the lines of a file need.

    Attributes:
        total: lines that are not blank; None for a pipe.
        draws: whether lines may set temperature, top_p or top_k.
        forms: whether lines may set regex or json_schema.
    """

    total: int | None
    draws: bool
    forms: bool = False


class PromptFile:
    """A file of prompts, or "-" for the standard input.

    Attributes:
        title: its name in sentences.
        regular: whether it can be read again.
        is_json: whether lines are JSON objects.
    """

    def __init__(self, name: str) -> None:
        """
        Raises:
            DllmError: when it cannot be read.
        """
        self._name, self.title = name, "the standard input" if name == "-" else name
        self.regular = name != "-" and Path(name).is_file()
        self._lines = self._read()
        self._first = list(itertools.islice(self._lines, 1))
        self.is_json = name.endswith((".jsonl", ".ndjson")) or any(_holds_prompt(line.data) for line in self._first)

    def place(self, line: Line) -> str:
        """The line's name in sentences."""
        return f"line {line.number}" if self._name == "-" else f"{self._name} line {line.number}"

    def lines(self) -> Iterator[Line]:
        """All lines that are not blank, once.

        Raises:
            DllmError: when the file cannot be read, and for a line of more than 16 MiB.
        """
        return itertools.chain(self._first, self._lines)

    def needs(self) -> Needs:
        """What the lines need: a regular file is read for it; of a pipe the first line is all that is there."""
        total, draws, forms = 0, False, False
        for line in self._read() if self.regular else self._first:
            total += 1
            draws |= self.is_json and any(name in line.data for name in _DRAWN)
            forms |= self.is_json and any(name in line.data for name in _FORMED)
        return Needs(total if self.regular else None, draws, forms)

    def entry(self, line: Line) -> dict[str, Any]:
        """The keys of a line.

        Raises:
            DllmError: for a line that is not UTF-8 or not a JSON object.
        """
        try:
            text = line.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DllmError(f"not valid UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8") from None
        if not self.is_json:
            return {"prompt": text}
        try:
            entry = json.loads(text)
            json.dumps(entry, allow_nan=False)  # it becomes part of the output
        except (ValueError, RecursionError) as error:
            raise DllmError(f"not valid JSON ({error})") from None
        if not isinstance(entry, dict):
            raise DllmError('no object; write {"prompt": "..."} or {"messages": [...]}')
        return entry

    def _read(self) -> Iterator[Line]:
        try:
            with contextlib.ExitStack() as stack:
                file = sys.stdin.buffer if self._name == "-" else stack.enter_context(open(self._name, "rb"))
                row = 0
                for number in itertools.count(1):
                    data = file.readline(_LONGEST + 1)
                    if not data:
                        return
                    if len(data) > _LONGEST:
                        raise DllmError(
                            f"{self.title} line {number}: longer than {_LONGEST >> 20} MiB; write one prompt per line"
                        )
                    data = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
                    if data.strip():
                        yield Line(row, number, data.removesuffix(b"\n").removesuffix(b"\r"))
                        row += 1
        except OSError as error:
            raise DllmError(f"{self.title} could not be read ({error})") from None


def _holds_prompt(data: bytes) -> bool:
    """Whether the first line of a file, whose name does not say what it is, is a JSON line."""
    with contextlib.suppress(ValueError, RecursionError):
        entry = json.loads(data)
        return isinstance(entry, dict) and not {"prompt", "messages", "template"}.isdisjoint(entry)
    return False


def prompt_of(entry: Mapping[str, Any]) -> Any:
    """The prompt of a line as `generate` takes it.

    Raises:
        DllmError: for none, two, and what is no prompt.
    """
    if "template" in entry:
        raise DllmError("a line has a prompt; gaps are filled by --infill or samplers.infill")
    if ("prompt" in entry) == ("messages" in entry):
        raise DllmError('it must be an object with either "prompt" or "messages"')
    prompt = entry.get("prompt", entry.get("messages"))
    if not isinstance(prompt, list if "messages" in entry else (str, list)):
        raise DllmError(f"a prompt must be a text, token ids or messages, not {reprlib.repr(prompt)}")
    return prompt


def read_prompts(name: str) -> list[Any]:
    """All prompts of a file at once, where lines have no options.

    Raises:
        DllmError: for a file without lines, and naming the first line that has no prompt, or options.
    """
    file, found = PromptFile(name), list[Any]()
    for line in file.lines():
        try:
            entry = file.entry(line)
            if extra := [key for key in ("options", *LINE_OPTIONS) if key in entry]:
                raise DllmError(f'"{extra[0]}" has no effect here; leave it out')
            found.append(prompt_of(entry))
        except DllmError as error:
            raise DllmError(f"{file.place(line)}: {error}") from None
    if not found:
        raise DllmError(f"{file.title} has no prompts; write one per line")
    return found
