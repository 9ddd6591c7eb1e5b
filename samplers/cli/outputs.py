"""Files that commands write: JSON lines that a run goes on with, alone or in parts by processes.

out.jsonl                  whole lines; a torn one at the end is of a killed run, which the next one cuts off
out.jsonl.part-0-of-2      those of the first of two processes, its line i is line 2i of the whole
"""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax

from dllm_jax import DllmError
from dllm_jax.parallel import multihost

_MAY_CHANGE = {"batch_size", "device", "versions"}  # what a run that goes on may do otherwise


class Share(NamedTuple):
    """Which lines are a process's: every `processes`-th, from its own number on."""

    process: int = 0
    processes: int = 1

    def of(self, total: int) -> int:
        """How many of so many."""
        return len(range(self.process, total, self.processes))


def joined(where: str | None) -> Share:
    """Meets the other processes, and tells which of them this one is.

    Each reads, computes and writes for itself; one that ends waits for the others, which need the coordinator.

    Args:
        where: as `hosts.join` takes it, None for nothing.

    Raises:
        DllmError: as `hosts.join`.
    """
    multihost.join(where or "", shutdown_timeout=multihost.MONTH)
    return Share(jax.process_index(), jax.process_count())


class Output:
    """A file of JSON lines; nothing is written before `begin`. Use it by `with`.

    Attributes:
        done: whole lines that are there.
        last: the last of them, None for none.
    """

    def __init__(self, path: Path) -> None:
        """Looks at what is there.

        Raises:
            DllmError: when it is no file of such lines, or no file can be there.
        """
        self.path, self.done, self.last = path, 0, dict[str, Any]()
        self._end, self._seen = 0, 0
        self._file: int | None = None
        if not path.parent.is_dir():
            raise DllmError(f"the folder {path.parent} of --out does not exist; make it")
        if path.exists():
            self._look()

    def _look(self) -> None:
        if not self.path.is_file():
            raise DllmError(f"{self.path} is no regular file; choose another --out")
        last = data = b""
        try:
            with self.path.open("rb") as file:
                for data in file:
                    self._seen += len(data)
                    if data.endswith(b"\n"):
                        last, self.done, self._end = data, self.done + 1, self._seen
        except OSError as error:
            raise DllmError(f"{self.path} could not be read ({error}); choose another --out") from None
        self.last = _object(last)
        ours = {"line", "settings"} <= self.last.keys() if self.done else data[:1] in (b"", b"{")
        if not ours:
            raise DllmError(f"{self.path} holds something else than answers; choose another --out")

    def entries(self) -> Iterator[dict[str, Any]]:
        """The whole lines that are there, one after the other; {} for what is no object of JSON."""
        if not self.done:
            return
        with self.path.open("rb") as file:
            yield from map(_object, itertools.islice(file, self.done))

    def compare(self, settings: Mapping[str, Any]) -> None:
        """Compares some settings with those of the lines that are there.

        Raises:
            DllmError: naming one that differs.
        """
        if not self.done:
            return
        old, new = _dict(self.last["settings"]), json.loads(json.dumps(settings))
        new = {**{name: None for name in old.keys() - new.keys() - {"dtype"}}, **new}
        for name in sorted(new.keys() - _MAY_CHANGE):
            if old.get(name) != new[name]:
                was, now = json.dumps(old.get(name)), json.dumps(new[name])
                raise DllmError(f"{self.path} was made with {name} {was}, not {now}; choose another --out")

    def begin(self) -> None:
        """Makes the file, or cuts off what a killed run left of a line, and holds it.

        Raises:
            DllmError: when it cannot be written, or another process writes it.
        """
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            if not _locked(self._file) or os.fstat(self._file).st_size != self._seen:
                raise DllmError(f"another process writes {self.path}; wait for it, or choose another --out")
            os.truncate(self._file, self._end)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            raise self._failed(error) from None

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes a line, all of it or nothing.

        Raises:
            DllmError: when the disk is full, or cannot be written.
        """
        assert self._file is not None
        data = json.dumps(entry).encode() + b"\n"
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self._file, self._end)
            raise self._failed(error) from None
        self._end += len(data)
        self.done += 1

    def _failed(self, error: OSError) -> DllmError:
        on = "what is there stays, and the same command goes on behind it"
        return DllmError(f"{self.path} could not be written ({error.strerror}); {on}")

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it, so that other machines see all of it."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            with contextlib.closing(os.fdopen(file)):
                os.fsync(file)
        except OSError as error:
            raise self._failed(error) from None


def part_of(out: Path, share: Share) -> Path:
    """The file that a process writes."""
    return out if share.processes == 1 else out.with_name(f"{out.name}.part-{share.process}-of-{share.processes}")


def check_parts(out: Path, share: Share) -> None:
    """Raises DllmError for parts of a run by another number of processes."""
    for path in out.parent.iterdir():
        found = re.fullmatch(re.escape(out.name) + r"\.part-\d+-of-(\d+)", path.name)
        if found and int(found[1]) != share.processes:
            raise DllmError(f"{path} is of a run by {found[1]} processes; go on with as many, or choose another --out")


def merge(out: Path, share: Share, total: int) -> bool:
    """Makes the whole of all parts, if they are complete, and removes them; any process may do it, also two at once.

    Returns:
        Whether the whole is there.

    Raises:
        DllmError: when it cannot be written.
    """
    shares = [Share(process, share.processes) for process in range(share.processes)]
    paths = [part_of(out, each) for each in shares]
    try:
        if not all(_count(path) == each.of(total) for path, each in zip(paths, shares, strict=True)):
            return _whole(out, total, paths)
        partial = out.with_name(f".{out.name}.{share.process}.partial")
        with contextlib.ExitStack() as stack:
            parts = [stack.enter_context(path.open("rb")) for path in paths if path.exists()]
            _interleave(parts, partial)
        os.replace(partial, out)
    except FileNotFoundError:  # another process was faster
        return _whole(out, total, paths)
    except OSError as error:
        raise DllmError(f"{out} could not be written ({error.strerror}); the same command merges the parts") from None
    return _whole(out, total, paths)


def _interleave(parts: Sequence[BinaryIO], into: Path) -> None:
    with into.open("wb") as file:
        for part in itertools.cycle(parts):
            line = part.readline()
            if not line:  # the first that has ended: all have
                break
            file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _whole(out: Path, total: int, parts: list[Path]) -> bool:
    """Whether the whole is there; then the parts need not be."""
    if not out.exists() or _count(out) != total:
        return False
    for path in parts:
        path.unlink(missing_ok=True)
    return True


def _count(path: Path) -> int:
    """Whole lines of a file."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(line.endswith(b"\n") for line in file)


def _locked(file: int) -> bool:
    """Holds a file as long as it is open, where the system can; whether no other process does."""
    try:
        import fcntl  # Unix alone has it

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True  # a system without locks
    return True


def _object(data: bytes) -> dict[str, Any]:
    try:
        return _dict(json.loads(data))
    except (ValueError, RecursionError):
        return {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
