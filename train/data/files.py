"""Sources from local files: plain text, JSON lines, and data sets saved by Hugging Face's `datasets`."""

import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dllm_jax.errors import DllmError
from dllm_jax.tokenizer import encode_chat, encode_text
from train.data.source import Example, Setup


class Listed:
    """A finite source of examples that are held in memory."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def example(self, index: int) -> Example:
        """Example `index`."""
        return self._examples[index]


class Packed:
    """Documents one behind the other, an end token after each, cut into rows of one length; the rest is dropped."""

    def __init__(self, documents: Iterable[Sequence[int]], length: int, eos_id: int) -> None:
        parts = [np.asarray([*document, eos_id], np.int32) for document in documents]
        stream = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        count = len(stream) // length
        if not count:
            raise DllmError(
                f"the documents hold {len(stream)} tokens, less than one row of {length}; lower data.length"
            )
        self._rows = stream[: count * length].reshape(count, length)

    def __len__(self) -> int:
        return len(self._rows)

    def example(self, index: int) -> Example:
        """Row `index`, all of it answer."""
        return Example(np.zeros(0, np.int32), self._rows[index])


def text(setup: Setup, *, path: str, separator: str = "") -> Packed:
    """Plain text files, packed into rows of the full length.

    Args:
        path: a file, a folder of .txt files, or a pattern such as "books/*.txt".
        separator: what stands between two documents of one file; a file is one document by default.
    """
    tokenizer = setup.require_tokenizer()
    files = (read_text(file) for file in _files(path, "*.txt"))
    documents = (part for file in files for part in (file.split(separator) if separator else [file]) if part.strip())
    return Packed((encode_text(tokenizer, part) for part in documents), setup.length, setup.config.eos_id)


def jsonl(setup: Setup, *, path: str, pack: bool = False, drop_long: bool = False) -> Listed | Packed:
    """JSON lines; see `entry_to_example` for what a line may hold.

    Args:
        path: a file, a folder of .jsonl files, or a pattern.
        pack: join documents into rows of the full length, as for plain text; for pre-training.
        drop_long: leave out examples that are longer than a row, which are refused otherwise.
    """
    entries: list[tuple[str, Any]] = []
    for file in _files(path, "*.jsonl"):
        for number, line in enumerate(read_text(file).split("\n"), start=1):
            if line.strip():
                entries.append((f"{file} line {number}", _json(line, f"{file} line {number}")))
    return _listed(setup, entries, pack, drop_long)


def datasets(setup: Setup, *, path: str, pack: bool = False, drop_long: bool = False) -> Listed | Packed:
    """A folder that `Dataset.save_to_disk` wrote; its columns are those of `entry_to_example`.

    Args:
        path: the folder.
        pack, drop_long: as for JSON lines.
    """
    try:
        import datasets as library
    except ImportError:
        raise DllmError('data.source "datasets" needs the package datasets; install it: pip install datasets') from None
    try:
        table = library.load_from_disk(path)
    except Exception as error:  # the library raises whatever its file formats do
        raise DllmError(f"{path} is no data set that datasets can load ({error})") from None
    if not isinstance(table, library.Dataset):
        raise DllmError(f"{path} holds several splits ({', '.join(table)}); name the folder of one")
    return _listed(setup, [(f"{path} row {i}", row) for i, row in enumerate(table)], pack, drop_long)


def entry_to_example(setup: Setup, entry: Any, where: str) -> Example:
    """One line as an example.

    It holds one of: "prompt" and "answer" (texts or token ids); "messages", of which the last is the answer and the
    others are the prompt in the model's chat format; "text" or "ids", a document. A text answer gets the end token (the
    end of the turn for messages) behind it; token ids are taken as they are.

    Raises:
        DllmError: for an entry of another form.
    """
    if not isinstance(entry, Mapping):
        raise DllmError(f"{where} is no object; write one with prompt and answer, messages, text or ids")
    config = setup.config
    if {"prompt", "answer"} <= entry.keys():
        return Example(_ids(setup, entry["prompt"], where, ()), _ids(setup, entry["answer"], where, (config.eos_id,)))
    if messages := entry.get("messages"):
        last = messages[-1] if isinstance(messages, list) else None
        if not isinstance(last, Mapping) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            raise DllmError(f"{where}: messages must end with one of the assistant")
        prompt = encode_chat(setup.require_tokenizer(), messages[:-1])
        answer = _ids(setup, last["content"].strip(), where, (config.end_ids[-1],))
        return Example(np.asarray(prompt, np.int32), answer)
    for name in ("text", "ids"):
        if name in entry:
            return Example(np.zeros(0, np.int32), _ids(setup, entry[name], where, ()))
    raise DllmError(f"{where} has {sorted(entry)}; it needs prompt and answer, messages, text or ids")


def read_text(path: str | Path) -> str:
    """A file's text.

    Raises:
        DllmError: when it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DllmError(f"{path} could not be read ({error})") from None


def _listed(setup: Setup, entries: list[tuple[str, Any]], pack: bool, drop_long: bool) -> Listed | Packed:
    examples = [entry_to_example(setup, entry, where) for where, entry in entries]
    if pack:
        documents = ([*example.prompt_ids, *example.answer_ids] for example in examples)
        return Packed(documents, setup.length, setup.config.eos_id)
    if drop_long:
        examples = [e for e in examples if len(e.prompt_ids) + len(e.answer_ids) <= setup.length]
    return Listed(examples)


def _ids(setup: Setup, value: Any, where: str, end: tuple[int, ...]) -> np.ndarray:
    if isinstance(value, str):
        return np.asarray([*encode_text(setup.require_tokenizer(), value), *end], np.int32)
    if isinstance(value, list) and all(type(item) is int for item in value):
        if all(0 <= item < setup.config.vocab_size for item in value):
            return np.asarray(value, np.int32)
        raise DllmError(f"{where} has token ids outside the vocabulary of {setup.config.vocab_size}")
    raise DllmError(f"{where}: {str(value)[:40]!r} is neither a text nor a list of token ids")


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DllmError(f"{where} is not valid JSON ({error})") from None


def _files(path: str, pattern: str) -> list[str]:
    """Sorted, so that the order of the data does not depend on the file system."""
    found = sorted(glob.glob(str(Path(path) / pattern) if Path(path).is_dir() else path))
    if not found:
        raise DllmError(f"no file is at {path}; set data.options.path to a file, a folder with {pattern}, or a pattern")
    return found
