"""Sources from files and data sets of Hugging Face's hub; what they hold is tokenised once, see `train.data.cache`."""

import functools
import glob
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax.errors import DllmError
from train.data.cache import Entries, StreamRows, TokenisedExamples, tokenise
from train.data.entries import EntryForm, Turns
from train.data.source import Setup

_PART = 1024  # rows, or characters by thousands, that are read together


def text(setup: Setup, *, path: str, separator: str = "") -> TokenisedExamples | StreamRows:
    """Plain text files, concatenated and cut into rows of the full length; with `data.pack` documents.

    Args:
        path: a file, a folder of .txt files, or a pattern such as "books/*.txt".
        separator: what stands between two documents of one file; a file is one document by default.
    """
    files = _files(path, "*.txt")

    def documents() -> Iterator[tuple[int, int, Any]]:
        for file, name in enumerate(files):
            parts = (part for part in _split(name, separator) if part.strip())
            yield from ((file, number, {"text": part}) for number, part in enumerate(parts, start=1))

    identity = {"separator": separator, "files": _identities(files)}
    found = tokenise(setup, Entries(files, "document", identity, documents), EntryForm(pack=True))
    return found if setup.pack else StreamRows(found, setup.length)


def jsonl(
    setup: Setup,
    *,
    path: str,
    columns: dict[str, str] | None = None,
    turns: Turns = "all",
    concatenate: bool = False,
    drop_long: bool = False,
) -> TokenisedExamples | StreamRows:
    """JSON lines; see `train.data.entries.EntryForm` for what a line may hold.

    Args:
        path: a file, a folder of .jsonl files, or a pattern.
        columns, turns: as of `EntryForm`.
        concatenate: join examples into rows of the full length, each ended by the end token; for pre-training.
        drop_long: leave out examples that do not fit into a row with their canvas, which are refused otherwise.
    """
    files = _files(path, "*.jsonl")

    def lines() -> Iterator[tuple[int, int, Any]]:
        for file, name in enumerate(files):
            with _open(name) as stream:
                yield from ((file, number, line) for number, line in enumerate(stream, start=1) if line.strip())

    return _source(setup, Entries(files, "line", _identities(files), lines), columns, turns, concatenate, drop_long)


def parquet(
    setup: Setup,
    *,
    path: str,
    columns: dict[str, str] | None = None,
    turns: Turns = "all",
    concatenate: bool = False,
    drop_long: bool = False,
) -> TokenisedExamples | StreamRows:
    """Parquet files, whose rows are as JSON lines; other columns are not read.

    Args:
        path: a file, a folder of .parquet files, or a pattern.
        columns, turns, concatenate, drop_long: as of `jsonl`.
    """
    library = _library("pyarrow.parquet", "pyarrow", "parquet")
    files = _files(path, "*.parquet")
    form = EntryForm(columns or {})

    opened = functools.partial(_open_by, library.ParquetFile, "Parquet")

    def rows() -> Iterator[tuple[int, int, Any]]:
        for file, name in enumerate(files):
            with opened(name) as table:
                try:
                    names = form.names(table.schema_arrow.names)
                except DllmError as error:
                    raise DllmError(f"{name}: {error}") from None
                number = 0
                for part in table.iter_batches(_PART, columns=names or None):
                    for row in part.to_pylist():
                        number += 1
                        yield file, number, row

    count = 0
    for name in files:
        with opened(name) as table:
            count += table.metadata.num_rows
    entries = Entries(files, "row", _identities(files), rows, count)
    return _source(setup, entries, columns, turns, concatenate, drop_long)


def arrayrecord(
    setup: Setup,
    *,
    path: str,
    columns: dict[str, str] | None = None,
    turns: Turns = "all",
    concatenate: bool = False,
    drop_long: bool = False,
) -> TokenisedExamples | StreamRows:
    """ArrayRecord files, read by `grain`, whose records are JSON objects in UTF-8 as those of JSON lines.

    Args:
        path: a file, a folder of .array_record files, or a pattern.
        columns, turns, concatenate, drop_long: as of `jsonl`.
    """
    from grain.sources import ArrayRecordDataSource  # takes half a second

    files = _files(path, "*.array_record")

    opened = functools.partial(_open_by, ArrayRecordDataSource, "ArrayRecord")

    def records() -> Iterator[tuple[int, int, Any]]:
        for file, name in enumerate(files):
            with opened(name) as source:
                for start in range(0, len(source), _PART):
                    part = source.__getitems__(range(start, min(start + _PART, len(source))))
                    yield from ((file, start + number, record) for number, record in enumerate(part, start=1))

    entries = Entries(files, "record", _identities(files), records, sum(len(opened(name)) for name in files))
    return _source(setup, entries, columns, turns, concatenate, drop_long)


def datasets(
    setup: Setup,
    *,
    path: str,
    name: str = "",
    split: str = "train",
    columns: dict[str, str] | None = None,
    turns: Turns = "all",
    concatenate: bool = False,
    drop_long: bool = False,
) -> TokenisedExamples | StreamRows:
    """A data set of Hugging Face's `datasets`, whose rows are as JSON lines.

    Args:
        path: a folder that `save_to_disk` wrote, or what `load_dataset` takes: a data set's name on the hub, such as
            "openai/gsm8k", or a folder like one.
        name: which configuration of those of the hub.
        split: such as "train", or, of those of the hub, "train[:1%]".
        columns, turns, concatenate, drop_long: as of `jsonl`.
    """
    library = _library("datasets", "datasets", "datasets")
    folder = Path(path).expanduser()
    try:
        if any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
            table = library.load_from_disk(str(folder))
        else:
            table = library.load_dataset(str(folder) if folder.is_dir() else path, name or None, split=split)
    except Exception as error:  # the library raises whatever its file formats and the network do
        raise DllmError(f"{path} is no data set that datasets can load ({error})") from None
    if isinstance(table, library.DatasetDict):
        if split not in table:
            raise DllmError(f"{path} has no split {split!r}; set data.options.split to one of {', '.join(table)}")
        table = table[split]
    form = EntryForm(columns or {})
    try:
        chosen = table.select_columns(form.names(table.column_names) or table.column_names)
    except DllmError as error:
        raise DllmError(f"{path}: {error}") from None

    def rows() -> Iterator[tuple[int, int, Any]]:
        yield from ((0, number, row) for number, row in enumerate(chosen))

    entries = Entries((path,), "row", [path, table._fingerprint], rows, len(table))
    return _source(setup, entries, columns, turns, concatenate, drop_long)


def _source(
    setup: Setup, entries: Entries, columns: Mapping[str, str] | None, turns: Turns, concatenate: bool, drop_long: bool
) -> TokenisedExamples | StreamRows:
    if concatenate and setup.pack:
        raise DllmError("data.pack keeps examples apart and data.options.concatenate joins them; set one of them")
    form = EntryForm(columns or {}, turns, concatenate, setup.pack)
    if concatenate:
        return StreamRows(tokenise(setup, entries, form), setup.length)
    return tokenise(setup, entries, form, drop_long=drop_long)


def _library(module: str, package: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DllmError(
            f'data.source "{source}" needs the package {package}; install it: pip install "dllm_jax[data]"'
        ) from None


def _split(name: str, separator: str) -> Iterator[str]:
    """The documents of a file, no more of it in memory than one of them."""
    rest = ""
    try:
        with open(name, encoding="utf-8-sig") as stream:
            while part := stream.read(1000 * _PART if separator else -1):
                *documents, rest = (rest + part).split(separator) if separator else [part]
                yield from documents
    except (OSError, UnicodeDecodeError) as error:
        raise DllmError(f"{name} could not be read ({error})") from None
    yield rest


def _open_by(reader: Callable[[str], Any], kind: str, name: str) -> Any:
    """A library's reader of a file."""
    try:
        return reader(name)
    except Exception as error:  # the library raises whatever its format does
        raise DllmError(f"{name} is no {kind} file that can be read ({error})") from None


def _open(name: str) -> Any:
    try:
        return open(name, "rb")
    except OSError as error:
        raise DllmError(f"{name} could not be read ({error})") from None


def _files(path: str, pattern: str) -> tuple[str, ...]:
    """Sorted, so that the order of the data does not depend on the file system."""
    place = Path(path).expanduser()
    found = sorted(glob.glob(str(place / pattern) if place.is_dir() else str(place), recursive=True))
    if not found:
        raise DllmError(f"no file is at {path}; set data.options.path to a file, a folder with {pattern}, or a pattern")
    return tuple(found)


def _identities(files: Sequence[str]) -> list[tuple[str, int, int]]:
    status = [Path(name).stat() for name in files]
    return [(str(Path(name).resolve()), s.st_size, s.st_mtime_ns) for name, s in zip(files, status, strict=True)]
