"""What a line of a data file, or a row of a table, may hold, and the pieces of examples that become of it."""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from dllm_jax.errors import DllmError
from dllm_jax.text.tokenizer import Turn, chat_text, chat_turns, check_messages
from train.data.source import Setup

Turns = Literal["all", "each", "last"]
COLUMNS = ("prompt", "answer", "user", "assistant", "messages", "text", "ids", "chosen", "rejected")
WANTED = "prompt and answer, user and assistant, messages, text or ids, or chosen and rejected"


class Segment(NamedTuple):
    """A part of an example.

    Attributes:
        value: a text to be encoded, or token ids.
        learned: whether it is learned in SFT.
    """

    value: str | list[int]
    learned: bool


@dataclasses.dataclass(frozen=True)
class EntryForm:
    """How entries are read.

    Attributes:
        columns: column of `COLUMNS` -> what it is called in the data; where it is empty they have their own names.
        turns: of conversations: learn "all" messages of the assistant in one example; one example for "each", which
            shows nothing of what comes after it, the pairs that LLaDA's SFT (arXiv 2502.09992, section 2.3) draws from;
            or only the "last".
        pack: end every example with the model's end token, so that examples can be concatenated.
        end_documents: end documents with it, and leave answers and conversations as they are.
    """

    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    turns: Turns = "all"
    pack: bool = False
    end_documents: bool = False

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in COLUMNS:
                raise DllmError(f"data.options.columns has no place for {name!r}; it maps {', '.join(COLUMNS)}")

    def names(self, there: list[str]) -> list[str]:
        """Those of a table's columns that are read.

        Raises:
            DllmError: where one that `columns` names is missing.
        """
        for name in self.columns.values():
            if name not in there:
                raise DllmError(f"it has {sorted(there)} and no {name!r}; correct data.options.columns")
        return list(self.columns.values()) or [name for name in there if name in COLUMNS]

    def examples(self, setup: Setup, entry: Any) -> list[list[Segment]]:
        """The examples of an entry: an object, or JSON of one.

        It holds one of: "prompt" and "answer" (texts or token ids); "messages", a conversation that ends with the
        assistant's, in the model's chat format, or "user" and "assistant", one of two messages; "text" or "ids", a
        document; or "chosen" and "rejected", a better and a worse answer to "prompt", texts or token ids, or
        messages, where "prompt" may be missing because both begin with it. The end token is added to a text answer;
        token ids are taken as they are. Messages of the assistant end as the chat template ends them (see
        `dllm_jax.text.tokenizer.chat_turns`), and the last with the model's end token where that ends no generation.

        Raises:
            DllmError: for an entry of another form.
        """
        if isinstance(entry, bytes | str):
            entry = _json(entry)
        if not isinstance(entry, Mapping):
            raise DllmError(f"it is no object; write one with {WANTED}")
        if self.columns:
            self.names([str(name) for name in entry])
            entry = {name: entry[column] for name, column in self.columns.items()}
        examples = self._pieces(setup, entry)
        for piece in itertools.chain(*examples):
            _check(setup, piece.value)
        return examples

    def _pieces(self, setup: Setup, entry: Mapping[str, Any]) -> list[list[Segment]]:
        if {"chosen", "rejected"} <= entry.keys():
            return [self._answers(setup, entry, "chosen") + self._answers(setup, entry, "rejected")]
        if {"prompt", "answer"} <= entry.keys():
            end = [Segment([setup.config.eos_id], True)] if isinstance(entry["answer"], str) else []
            return [[Segment(entry["prompt"], False), Segment(entry["answer"], True), *end]]
        if {"user", "assistant"} <= entry.keys():
            pair = [{"role": role, "content": entry[role]} for role in ("user", "assistant")]
            return self._conversation(setup, pair)
        if entry.get("messages") is not None:
            return self._conversation(setup, entry["messages"])
        for name in ("text", "ids"):
            if name in entry:
                document, eos_id = entry[name], setup.config.eos_id
                whole = not self.end_documents or (isinstance(document, list) and document[-1:] == [eos_id])
                return [[Segment(document, True), *([] if whole else [Segment([eos_id], True)])]]
        raise DllmError(
            f"it has {sorted(map(str, entry))}; it needs {WANTED}; name its columns in data.options.columns"
        )

    def _answers(self, setup: Setup, entry: Mapping[str, Any], name: str) -> list[Segment]:
        """The prompt and one of two answers."""
        prompt, answer = entry.get("prompt", []), entry[name]
        if isinstance(answer, list) and answer and isinstance(answer[0], Mapping):
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            return dataclasses.replace(self, turns="last")._conversation(setup, [*prompt, *answer])[0]
        return self._pieces(setup, {"prompt": prompt, "answer": answer})[0]

    def _conversation(self, setup: Setup, messages: Any) -> list[list[Segment]]:
        tokenizer = setup.require_tokenizer()
        check_messages(messages)
        messages = [_strip(message) for message in messages]
        if self.turns == "all":
            turns = chat_turns(tokenizer, messages)
            before = "".join(turn.given + turn.message + turn.end for turn in turns[:-1]) + turns[-1].given
            if before != chat_text(tokenizer, messages[:-1]):
                raise DllmError(
                    "the chat template writes a turn otherwise once another follows; set data.options.turns to "
                    '"each" or "last"'
                )
            return [_turns(setup, turns)]
        examples, last = [], len(messages) - 1
        for place, message in enumerate(messages):
            if place == last or (message["role"] == "assistant" and self.turns == "each"):
                turn = chat_turns(tokenizer, messages[: place + 1])[-1]
                examples.append(_turns(setup, [turn._replace(given=chat_text(tokenizer, messages[:place]))]))
        return examples


def _strip(message: Mapping[str, str]) -> Mapping[str, str]:
    """White space around what the assistant writes is left out, as by some templates and not by others."""
    return {**message, "content": message["content"].strip()} if message["role"] == "assistant" else message


def _turns(setup: Setup, turns: list[Turn]) -> list[Segment]:
    pieces = []
    for turn in turns:
        pieces += [Segment(turn.given, False), Segment(turn.message + turn.end, True)]
    stops = turns[-1].end_id in setup.config.end_ids
    return pieces if stops else [*pieces, Segment([setup.config.eos_id], True)]


def _check(setup: Setup, value: Any) -> None:
    if isinstance(value, str):
        setup.require_tokenizer()
    elif not isinstance(value, list) or not all(type(item) is int for item in value):
        raise DllmError(f"{str(value)[:40]!r} is neither a text nor a list of token ids")
    elif not all(0 <= item < setup.config.vocab_size for item in value):
        raise DllmError(f"it has token ids outside the vocabulary of {setup.config.vocab_size}")


def _json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DllmError(f"it is not valid JSON ({error})") from None
