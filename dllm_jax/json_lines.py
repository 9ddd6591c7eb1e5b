"""Files of JSON lines that grow while a run lasts, and that the same command resumes after a kill.

A line is an object with its number or key, `line`, and the settings of its run, `settings`. A torn line at the end is a
killed run's; the next one cuts it off.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dllm_jax.errors import DllmError
from dllm_jax.storage import lock

_MAY_CHANGE = {"batch_size", "device", "versions"}  # what a resumed run may do otherwise


class JsonLines:
    """A file of JSON lines; nothing is written before `begin`. Use it by `with`.

    Attributes:
        path: where it is.
        done: whole lines that are there.
        last: the last of them, {} for none.
    """

    def __init__(self, path: Path) -> None:
        """Reads what is there.

        Raises:
            DllmError: when it is no file of such lines, or no file can be there.
        """
        self.path, self.done, self.last = path, 0, dict[str, Any]()
        self._size = self._end = 0  # bytes that were read, and up to the end of the last whole line
        self._file: BinaryIO | None = None
        self._held = contextlib.ExitStack()
        if not path.parent.is_dir():
            raise DllmError(f"the folder {path.parent} of --out does not exist; make it")
        if path.exists():
            self._read()

    def _read(self) -> None:
        if not self.path.is_file():
            raise DllmError(f"{self.path} is no regular file; choose another --out")
        last = data = b""
        try:
            with self.path.open("rb") as file:
                for data in file:
                    self._size += len(data)
                    if data.endswith(b"\n"):
                        last, self.done, self._end = data, self.done + 1, self._size
        except OSError as error:
            raise DllmError(f"{self.path} could not be read ({error}); choose another --out") from None
        self.last = _as_object(last)
        ours = {"line", "settings"} <= self.last.keys() if self.done else data[:1] in (b"", b"{")
        if not ours:
            raise DllmError(f"{self.path} holds something else than answers; choose another --out")

    def entries(self) -> Iterator[dict[str, Any]]:
        """The whole lines that were read, one after the other; {} for what is no object of JSON."""
        if self.done:
            with self.path.open("rb") as file:
                yield from map(_as_object, itertools.islice(file, self.done))

    def compare(self, settings: Mapping[str, Any]) -> None:
        """Compares some settings with those of the lines that are there.

        Raises:
            DllmError: naming one that differs.
        """
        if not self.done:
            return
        old, new = self.last["settings"], json.loads(json.dumps(settings))
        old = old if isinstance(old, dict) else {}
        new = {**dict.fromkeys(old.keys() - new.keys() - {"dtype"}), **new}  # known once the model is loaded
        for name in sorted(new.keys() - _MAY_CHANGE):
            if old.get(name) != new[name]:
                was, now = json.dumps(old.get(name)), json.dumps(new[name])
                raise DllmError(f"{self.path} was made with {name} {was}, not {now}; choose another --out")

    def begin(self) -> None:
        """Makes the file, or cuts off a torn line at its end, and locks it.

        Raises:
            DllmError: when it cannot be written, or another process writes it.
        """
        busy = f"another process writes {self.path}; wait for it, or choose another --out"
        self._held.enter_context(lock(self.path.with_name(f".{self.path.name}.lock"), busy))
        try:
            self._file = self._held.enter_context(self.path.open("ab", buffering=0))
            if self._file.tell() != self._size:
                raise DllmError(busy)
            self._file.truncate(self._end)
        except OSError as error:
            raise self._failure(error) from None

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes a line.

        Raises:
            DllmError: when the disk is full, or cannot be written.
        """
        assert self._file is not None
        left = memoryview(json.dumps(entry).encode() + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._failure(error) from None
        self.done += 1

    def _failure(self, error: OSError) -> DllmError:
        return DllmError(f"{self.path} could not be written ({error.strerror}); the same command resumes")

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file, so that other machines read all of it."""
        try:
            with self._held:
                if self._file is not None:
                    os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failure(error) from None


def _as_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
