"""Thoughts and tool calls in the text of an answer, as Qwen's chat template and those made after it have models write
them: <think>...</think>, then text, then <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

import dataclasses
import json
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from samplers.serving.shapes import Json

THOUGHT, THOUGHT_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


class Parts(NamedTuple):
    """An answer in parts.

    Attributes:
        thought: what precedes the answer; None for an answer without.
        content: its text.
        calls: (name, arguments) of each call.
    """

    thought: str | None
    content: str
    calls: list[tuple[str, Json]]


class Habits(NamedTuple):
    """What a chat template has models write: thoughts, and calls that can be read."""

    thinks: bool
    calls: bool


def habits_of(template: str) -> Habits:
    """Those that the text of a chat template shows; other templates write arguments as XML between the same marks."""
    return Habits(
        THOUGHT_END in template, CALL in template and "arguments" in template and "<function=" not in template
    )


@dataclasses.dataclass(frozen=True)
class Reading:
    """How answers to a request are read.

    Attributes:
        thinks: whether they may begin with a thought; `opened` if the prompt has begun it.
        calls: whether they may have calls: of these several, or one.
        forced: whether an answer is the object of a call and nothing else.
    """

    thinks: bool = False
    opened: bool = False
    calls: bool = False
    several: bool = True
    forced: bool = False

    def parts(self, text: str, final: bool = True) -> Parts:
        """The parts of an answer, or of its beginning: then without what later text may turn into another part."""
        if self.forced:
            call = _call(text) if final else None
            return Parts(None, "", [call] if call else [])
        thought, rest = self._without_thought(text, final)
        if not self.calls:
            return Parts(thought, rest, [])
        content, *others = rest.split(CALL)
        if not final:
            return Parts(thought, content[: _certain(content, CALL)].rstrip(), [])
        found = []
        for piece in others:
            body, end, after = piece.partition(CALL_END)
            call = _call(body) if end else None
            if call is None:  # it stays text
                content += CALL + piece
            else:
                found.append(call)
                content = content.rstrip() + ("" if after.isspace() else after)
        return Parts(thought, content, found if self.several else found[:1])

    def _without_thought(self, text: str, final: bool) -> tuple[str | None, str]:
        """The thought, if there is one, and what follows it."""
        begun = text.lstrip()
        if not self.thinks or not (self.opened or begun.startswith(THOUGHT)):
            undecided = self.thinks and not final and THOUGHT.startswith(begun)
            return None, "" if undecided else text
        thought, end, rest = (text if self.opened else begun.removeprefix(THOUGHT)).partition(THOUGHT_END)
        if not end and not final:
            thought = thought[: _certain(thought, THOUGHT_END)]
        return thought.strip(), rest.lstrip("\n")

    def message(self, text: str) -> tuple[Json, bool]:
        """What an answer adds to a message, and whether it calls tools."""
        parts = self.parts(text)
        found: Json = {"content": parts.content or (None if parts.calls else "")}
        if parts.thought is not None:
            found["reasoning_content"] = parts.thought
        if parts.calls:
            found["tool_calls"] = _as_calls(parts.calls)
        return found, bool(parts.calls)


class PartStream:
    """An answer's parts while its text arrives; texts that were returned never change."""

    def __init__(self, reading: Reading) -> None:
        self._reading, self._text, self._sent = reading, "", Parts("", "", [])

    def feed(self, text: str, final: bool = False) -> list[Json]:
        """The deltas that a further text makes certain, those of calls at the end."""
        if not text and not final:
            return []
        self._text += text
        parts = self._reading.parts(self._text, final)
        found: list[Json] = []
        if thought := (parts.thought or "")[len(self._sent.thought or "") :]:
            found.append({"reasoning_content": thought})
        if content := parts.content[len(self._sent.content) :]:
            found.append({"content": content})
        if parts.calls:
            calls = _as_calls(parts.calls)
            found.append({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
        self._sent = parts
        return found

    @property
    def called(self) -> bool:
        """Whether there were calls."""
        return bool(self._sent.calls)


def call_schema(functions: Sequence[tuple[str, Json | None]]) -> Json:
    """The JSON schema of a call of one of some functions, each a name and the schema of its arguments."""
    options = []
    for name, parameters in functions:
        arguments = parameters or {"type": "object", "properties": {}}
        properties = {"name": {"const": name}, "arguments": arguments}
        options.append({"type": "object", "properties": properties, "required": [*properties]})
    return options[0] if len(options) == 1 else {"anyOf": options}


def _certain(text: str, mark: str) -> int:
    """How much of a text cannot become a part of a mark, whatever follows."""
    return len(text) - max((size for size in range(len(mark)) if text.endswith(mark[:size])), default=0)


def _call(text: str) -> tuple[str, Json] | None:
    """The call that a text is, if it is one."""
    try:
        found: Any = json.loads(text)
        name, arguments = found["name"], found["arguments"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _as_calls(calls: Sequence[tuple[str, Json]]) -> list[Json]:
    """Calls as OpenAI writes them."""
    text = lambda arguments: json.dumps(arguments, ensure_ascii=False)
    made = [{"name": name, "arguments": text(arguments)} for name, arguments in calls]
    return [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": one} for one in made]
