"""Prompts in files: one per line, as a text or as a JSON object, read when they are needed (docs/batch.md)."""

import codecs
import contextlib
import itertools
import json
import reprlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax

from dllm_jax import DllmError, Model
from samplers.checks import refuse_unknown
from samplers.config.factory import settings_for
from samplers.config.registry import called, options_of
from samplers.engine.engine import Engine
from samplers.engine.requests import Request

JSON_LINES = (".jsonl", ".ndjson")
LONGEST = 16 * 2**20
"""Bytes of a line."""
WRITTEN = (
    *("line", "error", "text", "gaps", "tokens", "logprobs", "prompt_tokens", "nfe", "full_forwards", "cache_updates"),
    *("verifier_forwards", "tokens_per_forward", "decoded_at", "canvas", "room", "settings"),
    *("seconds", "compile_seconds", "tokens_per_second"),
)
"""Keys of an output line, which an input line cannot have."""
_SAID = ("gen_length", "seed", "stop")  # of a line, beside its options
_DRAWN = {"temperature", "top_p", "top_k"}


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


class Room(NamedTuple):
    """What the lines of a file need.

    Attributes:
        total: lines that are not blank, None where that is not known before.
        draws: whether lines draw otherwise than the command says.
    """

    total: int | None
    draws: bool


class LineFile:
    """A file of prompts, or "-" for the standard input.

    Attributes:
        regular: whether it can be read again.
        is_json: whether lines are JSON objects.
    """

    def __init__(self, name: str) -> None:
        """
        Raises:
            DllmError: when it cannot be read, or has nothing but blank lines.
        """
        self.name, self.regular = name, name != "-" and Path(name).is_file()
        self._lines = self._read()
        first = next(self._lines, None)
        if first is None:
            raise DllmError(f"{self.called} has no prompts; write one per line")
        self._first = first
        self.is_json = name.endswith(JSON_LINES) or _is_entry(first.data)

    @property
    def called(self) -> str:
        return "the standard input" if self.name == "-" else self.name

    def where(self, line: Line) -> str:
        """The line's name in sentences."""
        return f"line {line.number}" if self.name == "-" else f"{self.name} line {line.number}"

    def lines(self) -> Iterator[Line]:
        """All lines that are not blank, once."""
        return itertools.chain([self._first], self._lines)

    def own(self, line: Line) -> dict[str, Any]:
        """What a line says that becomes part of an output, with its prompt not yet looked at.

        Raises:
            DllmError: as `entry`, and for keys that answers have.
        """
        entry = self.entry(line)
        if taken := [name for name in entry if name in WRITTEN]:
            raise DllmError(f'"{taken[0]}" is a key of the output; rename it')
        return entry

    def entry(self, line: Line) -> dict[str, Any]:
        """What a line says.

        Raises:
            DllmError: for what is no UTF-8 or no JSON object.
        """
        if len(line.data) > LONGEST:
            raise DllmError(f"longer than {LONGEST >> 20} MiB; is this a file of prompts, one per line?")
        try:
            text = line.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DllmError(f"not valid UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8") from None
        return _object(text) if self.is_json else {"prompt": text}

    def room(self) -> Room:
        """What the lines need: of a regular file all are looked at, else the first, since the others are not there."""
        total, draws = 0, False
        for line in self._read() if self.regular else [self._first]:
            total += 1
            if not self.is_json or b'"options"' not in line.data:
                continue
            with contextlib.suppress(DllmError):  # which is said when it is the line's turn
                said = self.own(line)
                draws |= not _DRAWN.isdisjoint(_dict(said.get("options")))
        return Room(total if self.regular else None, draws)

    def _read(self) -> Iterator[Line]:
        try:
            with contextlib.ExitStack() as stack:
                file = sys.stdin.buffer if self.name == "-" else stack.enter_context(open(self.name, "rb"))
                yield from _numbered(file)
        except OSError as error:
            raise DllmError(f"{self.called} could not be read ({error})") from None


def _numbered(file: BinaryIO) -> Iterator[Line]:
    row = 0
    for number in itertools.count(1):
        data = file.readline(LONGEST + 1)
        if not data:
            return
        rest = data
        while not rest.endswith(b"\n") and len(rest) > LONGEST:  # too long; only its beginning is kept
            rest = file.readline(LONGEST + 1)
        data = data.removesuffix(b"\n").removesuffix(b"\r")
        data = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
        if data.strip():
            yield Line(row, number, data)
            row += 1


def _is_entry(data: bytes) -> bool:
    """Whether the first line of a file without a telling name is a JSON line."""
    with contextlib.suppress(ValueError, RecursionError):
        entry = json.loads(data)
        return isinstance(entry, dict) and not {"prompt", "messages", "template"}.isdisjoint(entry)
    return False


def _object(text: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
        json.dumps(entry, allow_nan=False)  # it becomes part of the output
    except (ValueError, RecursionError) as error:
        raise DllmError(f"not valid JSON ({error})") from None
    if not isinstance(entry, dict):
        raise DllmError('no object; write {"prompt": "..."} or {"messages": [...]}')
    return entry


def prompt_of(entry: dict[str, Any]) -> Any:
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


def prompts_of(name: str) -> list[Any]:
    """All prompts of a file at once, for templates.

    Raises:
        DllmError: naming the first line that has none, or says more.
    """
    file, found = LineFile(name), list[Any]()
    for line in file.lines():
        try:
            entry = file.own(line)
            refuse_unknown("a line beside --infill", [name for name in entry if name in ("options", *_SAID)], ())
            found.append(prompt_of(entry))
        except DllmError as error:
            raise DllmError(f"{file.where(line)}: {error}") from None
    return found


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class Desk:
    """Makes requests of lines. It holds an engine that never starts, so that a line means what it means to
    `Engine.request`; they are run by a `Runner` of its sampler.

    Attributes:
        sampler: with room for what lines change.
    """

    def __init__(
        self,
        model: Model,
        room: Room,
        *,
        sampler: str | None,
        seed: int = 0,
        chat: bool = False,
        system: str | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            sampler, seed, chat, system, options: as in `samplers.generate`.

        Raises:
            DllmError: as `Engine`.
        """
        settings = settings_for(model, sampler, options)
        length = settings.options.get("gen_length")
        longest = max(model.config.max_length - length, 1) if isinstance(length, int) else None
        more: dict[str, Any] = {"prompt_length": longest, "draws": room.draws}
        self._engine = Engine(model, sampler, slots=1, **more, **options)
        self.sampler: Any = self._engine.sampler
        self._chat: dict[str, Any] = {"chat": chat, "system": system}
        self._key = jax.random.key(seed)
        self._called = f"sampler {called(settings)}"
        self._known = [name for name in options_of(settings) if name not in _SAID]
        self._regular = room.total is not None

    def request(self, line: Line, entry: dict[str, Any]) -> Request:
        """The request of a line, with the random numbers of its row in `generate`, unless it brings a seed.

        Raises:
            DllmError: as `Engine.request`.
        """
        prompt, numbers = prompt_of(entry), self._numbers(entry.get("options", {}))
        said = {name: entry[name] for name in _SAID if name in entry}
        if type(said.get("seed", 0)) is not int:
            raise DllmError(f"seed is {said['seed']!r}; it must be a whole number")
        key = None if "seed" in said else _folded(self._key, line.row)
        try:
            request = self._engine.request(prompt, key=key, **self._chat, **said, **numbers)
        except DllmError as error:
            raise DllmError(self._for_lines(str(error))) from None
        request.number = line.number
        return request

    def _numbers(self, options: Any) -> dict[str, Any]:
        """The options of a line, which are numbers of the sampler."""
        if not isinstance(options, dict):
            raise DllmError('options are an object, such as {"threshold": 0.8}')
        if beside := [name for name in options if name in _SAID]:
            raise DllmError(f'"{beside[0]}" stands beside "options", not in them')
        refuse_unknown(self._called, options, self._known)
        for name, value in options.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30:
                raise DllmError(f"{name} is {value!r}; options of a line are numbers, others are flags for all lines")
        return options

    def _for_lines(self, sentence: str) -> str:
        """A sentence about an engine, for people who have none."""
        problem, found, _ = sentence.partition("; build ")
        if not found:
            return sentence.replace("exceeds the engine's", "exceeds --gen-length").replace(", or build another", "")
        if self._regular or "would make" not in problem:
            return f"{problem}; pass it as a flag, for all lines"
        return f"{problem}; of a pipe the first line says what there is room for: put it there too, or name a file"


@jax.jit
def _folded(key: jax.Array, row: int) -> jax.Array:
    return jax.random.fold_in(key, row)
