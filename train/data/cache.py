"""Text that is tokenised once: the examples of a source as flat files, which are mapped into memory.

CACHE/KEY/about.json    where it comes from, written last: without it there is more to tokenise
CACHE/KEY/tokens.bin    int32, the concatenated tokens of all examples, ~id where nothing is learned in SFT
CACHE/KEY/index.bin     a `RECORD` for each example, and for each entry that is none
CACHE/KEY/faults.jsonl  why the latter are none
CACHE/KEY/draws*.bin    uint64, the `heldout_draw` of each record, or of each packed row; made on first use

The key depends on the data, the tokenizer and the settings that change tokens, so not on `data.length`. Files are the
same if name, size and time of change are. The process after a killed one resumes after the last record; others wait.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from dllm_jax.checkpoints.checkpoint import home
from dllm_jax.errors import DllmError
from dllm_jax.storage import lock, write_file
from dllm_jax.text.tokenizer import encode_texts
from train.data.entries import EntryForm, Segment
from train.data.source import Example, Setup, progress
from train.data.workers import map_in_order

ABOUT, TOKENS, INDEX, FAULTS = "about.json", "tokens.bin", "index.bin", "faults.jsonl"
RECORD = np.dtype([("end", "<i8"), ("prompt", "<i4"), ("file", "<i4"), ("number", "<i8")])
"""Where the example's tokens end, how many of them come before the first that is learned (-1: it is no example), and
which entry of which file it is."""
_FORMAT = 1
_FAULTY = -1
_CHARACTERS = 2**21  # that are encoded together
_PIECE = 2**22  # tokens that are scanned together


@dataclasses.dataclass(frozen=True)
class Entries:
    """Where entries come from.

    Attributes:
        files: names.
        unit: what an entry of a file is: "line", "row".
        identity: changes where the data does; JSON.
        read: all of them in order: number of the file, number of the entry there, the entry (see `EntryForm`).
        count: how many there are, None if unknown before reading.
    """

    files: tuple[str, ...]
    unit: str
    identity: Any
    read: Callable[[], Iterator[tuple[int, int, Any]]]
    count: int | None = None

    def name(self, file: int, number: int) -> str:
        """An entry in words."""
        return _entry_name(self.files, self.unit, file, number)


def _entry_name(files: Sequence[str], unit: str, file: int, number: int) -> str:
    return f"{files[file]} {unit} {number}"


class Flat(NamedTuple):
    """Some concatenated examples.

    Attributes:
        stored: [T] int32, as in `TOKENS`.
        bounds: [N + 1], where each begins, and the last ends.
        prompts: [N], tokens of each before the first that is learned.
    """

    stored: np.ndarray
    bounds: np.ndarray
    prompts: np.ndarray


class TokenisedExamples:
    """A finite source: the examples of a cache folder, none of them in memory.

    Attributes:
        tokens: all of them in order, as in the file.
        faults, identity: as of `Source`.
    """

    def __init__(
        self, folder: Path, entries: Entries, fits: Callable[[np.ndarray, np.ndarray], np.ndarray] | None
    ) -> None:
        """Opens a finished folder.

        Args:
            fits: which examples to take, from numbers of tokens in prompts and in answers; all by default.

        Raises:
            DllmError: when it is damaged.
        """
        self._files, self._unit, self.folder, self.identity = entries.files, entries.unit, folder, folder.name
        try:
            self.faults = [json.loads(line) for line in (folder / FAULTS).read_text(encoding="utf-8").splitlines()]
            self._map()
            if len(self.tokens) != (self._index["end"][-1] if len(self._index) else 0):
                raise ValueError("its tokens are not those of its index")
        except (OSError, ValueError) as error:
            raise DllmError(f"{folder} is damaged ({error}); remove it, and it is made again") from None
        chosen = self._index["prompt"] != _FAULTY
        if fits is not None:
            prompts = self._index["prompt"]
            chosen &= fits(prompts, np.diff(self._index["end"], prepend=0) - prompts)
        self._numbers = None if chosen.all() else np.flatnonzero(chosen)

    def _map(self) -> None:
        self._index, self.tokens = _map_file(self.folder / INDEX, RECORD), _map_tokens(self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_index", "tokens")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()  # as every process does for itself

    def __len__(self) -> int:
        return len(self._index if self._numbers is None else self._numbers)

    def example(self, index: int) -> Example:
        """Example `index`."""
        number = self._number(index)
        end, prompt = (int(self._index[number][name]) for name in ("end", "prompt"))
        tokens, given = _decode(self.tokens[self._start(number) : end])
        return Example(tokens[:prompt], tokens[prompt:], given[prompt:] if given[prompt:].any() else None)

    def lengths(self) -> np.ndarray:
        """Tokens of each example, [N] int64."""
        return self._of_examples(np.diff(self._index["end"], prepend=0))

    def prompts(self) -> np.ndarray:
        """Tokens of each example's prompt, [N]."""
        return self._of_examples(self._index["prompt"])

    def name(self, index: int) -> str:
        """Example `index` in words: file and line."""
        record = self._index[self._number(index)]
        return _entry_name(self._files, self._unit, int(record["file"]), int(record["number"]))

    def map_examples(self, of: Callable[[Flat], np.ndarray], *, shown: str | None = None) -> np.ndarray:
        """A NumPy function's values for all examples, [N]. It gets some millions of tokens at once.

        Args:
            shown: text of a progress bar; None shows none.
        """
        return self._of_examples(_map_pieces(self._flat, _piece_bounds(self._index["end"]), of, shown))

    def draws(self, *, shown: str | None = None) -> np.ndarray:
        """`train.data.heldout.heldout_draw` of each example in units of 2^-64, [N] uint64: hashed once, and kept.

        Args:
            shown: as in `map_examples`.
        """
        make = lambda: _map_pieces(self._flat, _piece_bounds(self._index["end"]), _heldout_draws, shown)
        return self._of_examples(_load_or_make(self.folder / "draws.bin", len(self._index), make))

    def _flat(self, first: int, end: int) -> Flat:
        """The examples of records, those that are none among them, without tokens."""
        start, records = self._start(first), self._index[first:end]
        bounds = np.concatenate(([0], records["end"] - start))
        return Flat(self.tokens[start : start + int(bounds[-1])], bounds, np.maximum(records["prompt"], 0))

    def _of_examples(self, values: np.ndarray) -> np.ndarray:
        """Values of the examples, from values of all records."""
        return values if self._numbers is None else values[self._numbers]

    def _number(self, index: int) -> int:
        """The record of example `index`."""
        return index if self._numbers is None else int(self._numbers[index])

    def _start(self, number: int) -> int:
        """Where a record's tokens begin."""
        return int(self._index["end"][number - 1]) if number else 0


class StoredExample(NamedTuple):
    """An example as files hold it.

    Attributes:
        prompt: how many tokens come before the first that is learned.
        stored: [T] int32, as in `TOKENS`.
    """

    prompt: int
    stored: np.ndarray


class StreamRows:
    """A finite source: the concatenated examples of a cache, cut into rows of one length, without the rest.

    Attributes:
        faults, identity: as of `Source`.
    """

    def __init__(self, source: TokenisedExamples, length: int) -> None:
        self.faults, self.identity, self._folder = source.faults, source.identity, source.folder
        count = len(source.tokens) // length
        if not count and not self.faults:
            raise DllmError(
                f"the documents hold {len(source.tokens)} tokens, less than one row of {length}; lower data.length"
            )
        self._shape = count, length
        self._map()

    def _map(self) -> None:
        count, length = self._shape
        self._rows = _map_tokens(self._folder)[: count * length].reshape(count, length)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def __len__(self) -> int:
        return len(self._rows)

    def example(self, index: int) -> Example:
        """Row `index`, all of it answer."""
        tokens, given = _decode(self._rows[index])
        return Example(tokens[:0], tokens, given if given.any() else None)

    def lengths(self) -> np.ndarray:
        """Tokens of each row, [N] int64."""
        return np.full(len(self), self._rows.shape[1])

    def prompts(self) -> np.ndarray:
        """Tokens of each row's prompt, [N]: none."""
        return np.zeros(len(self), np.int64)

    @property
    def tokens(self) -> np.ndarray:
        """Those of all rows in order, as in the file."""
        return self._rows.reshape(-1)

    def map_examples(self, of: Callable[[Flat], np.ndarray], *, shown: str | None = None) -> np.ndarray:
        return _map_pieces(self._flat, self._row_cuts(), of, shown)

    def draws(self, *, shown: str | None = None) -> np.ndarray:
        make = lambda: _map_pieces(self._flat, self._row_cuts(), _heldout_draws, shown)
        return _load_or_make(self._folder / f"draws-{self._rows.shape[1]}.bin", len(self), make)

    def _flat(self, first: int, end: int) -> Flat:
        bounds = np.arange(end - first + 1) * self._rows.shape[1]
        return Flat(self._rows[first:end].reshape(-1), bounds, np.zeros(end - first, np.int64))

    def _row_cuts(self) -> list[int]:
        together = max(1, _PIECE // self._rows.shape[1])
        return [*range(0, len(self), together), len(self)]


def _piece_bounds(ends: np.ndarray) -> list[int]:
    """Numbers of records, between which some `_PIECE` tokens lie, at least one record each: [0, ..., N]."""
    pieces = int(ends[-1]) // _PIECE if len(ends) else 0
    found = np.searchsorted(ends, np.arange(1, pieces + 1) * _PIECE, side="right")
    return np.unique(np.concatenate(([0], found, [len(ends)]))).tolist()


def _map_pieces(
    flat: Callable[[int, int], Flat], cuts: list[int], of: Callable[[Flat], np.ndarray], shown: str | None
) -> np.ndarray:
    pieces = tqdm(itertools.pairwise(cuts), shown, len(cuts) - 1, delay=1.0, disable=shown is None)
    return np.concatenate([of(flat(first, end)) for first, end in pieces] or [np.zeros(0, bool)])


def _heldout_draws(some: Flat) -> np.ndarray:
    """`train.data.heldout.heldout_draw` of examples as they are stored, [N] uint64."""
    tokens = memoryview(np.asarray(_decode(some.stored)[0], "<i4").tobytes())
    bounds = (4 * some.bounds).tolist()
    found = bytearray()
    for prompt, start, end in zip(some.prompts.tolist(), bounds, bounds[1:], strict=False):
        digest = hashlib.blake2b(prompt.to_bytes(8, "little"), digest_size=8)
        digest.update(tokens[start:end])
        found += digest.digest()
    return np.frombuffer(bytes(found), "<u8")


def _load_or_make(path: Path, count: int, make: Callable[[], np.ndarray]) -> np.ndarray:
    """An array [count] of uint64 that is made once and then mapped; where the folder cannot be written, made each
    time."""
    there = lambda: path.is_file() and path.stat().st_size == 8 * count
    try:
        if not there():
            with _lock(path.parent):
                if not there():
                    write_file(path, make().astype("<u8").tobytes())
        return _map_file(path, np.dtype("<u8"))
    except (OSError, DllmError):
        return make()


def tokenise(setup: Setup, entries: Entries, form: EntryForm, *, drop_long: bool = False) -> TokenisedExamples:
    """The entries' examples, from the cache where they are there.

    Args:
        drop_long: leave out those that do not fit into a row.

    Raises:
        DllmError: when the cache cannot be written, and when no entry at the beginning is an example.
    """
    about = {
        "format": _FORMAT,
        "data": entries.identity,
        "form": dataclasses.asdict(form),
        "eos_id": setup.config.eos_id,
        "end_ids": list(setup.config.end_ids),
        "vocab_size": setup.config.vocab_size,
        "tokenizer": _tokenizer_digest(setup),
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
    folder = (setup.cache or home() / "data") / key
    if not (folder / ABOUT).is_file():
        try:
            with _lock(folder):
                if not (folder / ABOUT).is_file():
                    _tokenise_rest(folder, setup, entries, form)
                    write_file(folder / ABOUT, json.dumps(about, indent=2) + "\n")
        except OSError as error:
            raise DllmError(
                f"the data could not be tokenised into {folder} ({error}); set data.cache to another"
            ) from None
    return TokenisedExamples(folder, entries, setup.fits if drop_long else None)


def _lock(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Makes a folder, and holds it as long as the context lasts; waits while another process does."""
    folder.mkdir(parents=True, exist_ok=True)
    return lock(folder / ".lock", f"another process tokenises the data in {folder}; waiting for it", wait=True)


def _tokenise_rest(folder: Path, setup: Setup, entries: Entries, form: EntryForm) -> None:
    """Tokenises what is not yet in a folder.

    Raises:
        DllmError: when no entry of the first batch is an example, with the first entry's fault.
    """
    last, end = _recover(folder)
    with (
        (folder / TOKENS).open("ab") as tokens,
        (folder / FAULTS).open("ab") as faults,
        (folder / INDEX).open("ab") as index,
        progress(entries.read(), "tokenising", f" {entries.unit}s", entries.count) as bar,
        contextlib.ExitStack() as stack,
    ):
        rest = itertools.dropwhile(lambda entry: entry[:2] <= last, bar)
        encode = functools.partial(encode_batch, setup, form)
        encoded = stack.enter_context(
            contextlib.closing(map_in_order(encode, batch_entries(rest, setup.workers), setup.workers))
        )
        for found in encoded:
            records = []
            for file, number, made in found:
                if isinstance(made, str):
                    faults.write(json.dumps(f"{entries.name(file, number)}: {made}").encode() + b"\n")
                    records.append((end, _FAULTY, file, number))
                else:
                    tokens.write(made.stored.tobytes())
                    end += len(made.stored)
                    records.append((end, made.prompt, file, number))
            file, number, made = found[0]
            if end == 0 and isinstance(made, str):
                raise DllmError(f"{entries.name(file, number)}: {made}")
            for written in (tokens, faults):  # before the records that speak of them
                written.flush()
                os.fsync(written.fileno())
            index.write(np.array(records, RECORD).tobytes())
            index.flush()


def _recover(folder: Path) -> tuple[tuple[int, int], int]:
    """Truncates the files after the last entry that is surely whole.

    Returns:
        The entry's (file, number), and how many tokens come up to its end.
    """
    for name in (TOKENS, INDEX, FAULTS):
        (folder / name).touch()
    records = _map_file(folder / INDEX, RECORD)
    if len(records):  # of the last entry there may be more examples
        records = records[(records["file"] != records["file"][-1]) | (records["number"] != records["number"][-1])]
    end, _, file, number = records[-1].tolist() if len(records) else (0, 0, -1, -1)
    lines = (folder / FAULTS).read_bytes().splitlines(keepends=True)[: int(np.sum(records["prompt"] == _FAULTY))]
    for name, size in ((TOKENS, 4 * end), (INDEX, records.nbytes), (FAULTS, sum(map(len, lines)))):
        os.truncate(folder / name, size)
    return (file, number), end


def batch_entries(entries: Iterable[tuple[int, int, Any]], workers: int) -> Iterator[list[tuple[int, int, Any]]]:
    """Entries in batches to encode together, smaller ones where processes do."""
    most = _CHARACTERS // 8 if workers else _CHARACTERS
    batch: list[tuple[int, int, Any]] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += 100 + _size(entry[-1])
        if size >= most:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(entry: Any) -> int:
    """About how many characters and token ids an entry has."""
    if isinstance(entry, Mapping):
        return sum(map(_size, entry.values()))
    if isinstance(entry, list) and entry and isinstance(entry[0], Mapping):
        return sum(map(_size, entry))
    return len(entry) if isinstance(entry, Sized) else 1


def encode_batch(
    setup: Setup, form: EntryForm, batch: list[tuple[int, int, Any]]
) -> list[tuple[int, int, StoredExample | str]]:
    """The examples of entries as they are stored, or what is wrong with them."""
    numbers, examples = list[tuple[int, int]](), list[list[Segment] | str]()
    for file, number, entry in batch:
        try:
            made: Sequence[list[Segment] | str] = form.examples(setup, entry)
        except DllmError as error:
            made = [str(error)]
        examples += made
        numbers += [(file, number)] * len(made)
    return [(*at, found) for at, found in zip(numbers, _encode(setup, form, examples), strict=True)]


def _encode(setup: Setup, form: EntryForm, examples: Sequence[list[Segment] | str]) -> list[StoredExample | str]:
    """Examples as they are stored, or why they cannot be encoded."""
    pieces = [piece for example in examples if not isinstance(example, str) for piece in example]
    try:
        texts = [piece.value for piece in pieces if isinstance(piece.value, str)]
        encoded = iter(encode_texts(setup.require_tokenizer(), texts) if texts else [])
    except DllmError as error:
        if len(examples) == 1:
            return [str(error)]
        half = len(examples) // 2
        return _encode(setup, form, examples[:half]) + _encode(setup, form, examples[half:])
    return [example if isinstance(example, str) else _join(example, encoded, form, setup) for example in examples]


def _join(pieces: list[Segment], encoded: Iterator[list[int]], form: EntryForm, setup: Setup) -> StoredExample:
    prompt, learned, stored = 0, False, list[int]()
    for piece in pieces:
        ids = next(encoded) if isinstance(piece.value, str) else piece.value
        stored += ids if piece.learned else [~i for i in ids]
        learned |= piece.learned
        prompt = prompt if learned else len(stored)
    if form.pack and stored[-1:] != [setup.config.eos_id]:
        stored.append(setup.config.eos_id)
    return StoredExample(prompt, np.asarray(stored, "<i4"))


def _decode(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, and which of them are given, from a file's integers."""
    given = stored < 0
    return np.where(given, ~stored, stored).astype(np.int32), given


def _map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """The whole records of a file."""
    count = path.stat().st_size // dtype.itemsize
    return np.asarray(np.memmap(path, dtype, "r", shape=(count,))) if count else np.zeros(0, dtype)


def _map_tokens(folder: Path) -> np.ndarray:
    return _map_file(folder / TOKENS, np.dtype("<i4"))


def _tokenizer_digest(setup: Setup) -> str:
    if setup.tokenizer is None:
        return ""
    tokenizer = setup.tokenizer
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
