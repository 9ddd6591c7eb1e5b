"""Files and folders that are there whole or not at all, and locks: what every package writes its outputs by."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
from tqdm import tqdm

from dllm_jax import buckets
from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost

# Files ---------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file.

    Raises:
        DllmError: when it cannot be read, or holds anything else.
    """
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DllmError(f"{path} could not be read as JSON ({error}); correct it, or copy it again") from None
    if not isinstance(values, dict):
        raise DllmError(f"{path} holds no JSON object; correct it, or copy it again")
    return values


def write_file(path: str | Path, content: bytes | str) -> None:
    """Writes a file, which has the old content or the new, whatever happens meanwhile.

    Args:
        content: bytes, or a text that is written as UTF-8.

    Raises:
        DllmError: when it cannot be written; what was there before is then untouched.
    """
    data = content.encode() if isinstance(content, str) else content
    if buckets.is_address(path):
        with buckets.reach(path):
            buckets.remote(path).write_bytes(data)
        return
    path = Path(path)
    scratch = _hidden(path, f"{secrets.token_hex(8)}.partial")
    try:
        with contextlib.ExitStack() as failed:
            with scratch.open("xb") as file:  # which has the permissions that the umask leaves
                failed.callback(scratch.unlink, missing_ok=True)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # or a name could outlive a power cut without its content
            os.replace(scratch, path)
            failed.pop_all()
        _sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from None


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(PermissionError):  # of Windows, which syncs no folders
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _hidden(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{kind}"


def sha256(path: Path) -> str:
    """Hex digest of a file's content.

    Raises:
        DllmError: when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DllmError(f"{path} cannot be read ({error.strerror}); check the file") from None


@contextlib.contextmanager
def lock(path: Path, busy: str, *, wait: bool = False) -> Iterator[None]:
    """Holds a lock file as long as the context lasts. The system frees the lock of a killed process.

    Args:
        busy: the sentence when another process holds it.
        wait: print the sentence and wait for that process, instead of failing.

    Raises:
        DllmError: the sentence.
    """
    held = filelock.FileLock(path)
    try:
        held.acquire(timeout=0)
    except filelock.Timeout:
        if not wait:
            raise DllmError(busy) from None
        tqdm.write(busy, file=sys.stderr)
        held.acquire()
    except (OSError, NotImplementedError):  # a file system without locks
        pass
    try:
        yield
    finally:
        held.release()


# Folders -------------------------------------------------------------------------------------------------------------


def folder_path(path: str | Path) -> Path:
    """The absolute path of a folder that is written to, or what is used like one for an address in an object store.

    Raises:
        DllmError: for an address that cannot be written to, see `buckets.remote`.
    """
    return buckets.remote(path) if buckets.is_address(path) else Path(path).expanduser().resolve()


def check_out(out: str | Path, *, overwrite: bool = False) -> None:
    """Refuses an output folder that `atomic_folder` would refuse, without touching the disk: for long work, beforehand.

    Raises:
        DllmError: when `out` exists and is not to be overwritten, is a file, lies below one, or is an address that
            cannot be reached.
    """
    out = folder_path(out)
    exists = bool(buckets.list_names(out)) if buckets.is_address(out) else out.exists()
    if exists and not overwrite:
        raise DllmError(f"{out} exists already; choose another --out, or pass --overwrite to replace it")
    if buckets.is_address(out):
        return
    if exists and not out.is_dir():
        raise DllmError(f"{out} is a file; choose a folder that does not exist yet")
    existing = next(parent for parent in out.parents if parent.exists())
    if not existing.is_dir():
        raise DllmError(f"{existing} is not a folder; choose another output folder")


@contextlib.contextmanager
def atomic_folder(out: str | Path, *, overwrite: bool = False, together: bool = False) -> Iterator[Path]:
    """A scratch folder next to `out` that becomes `out` when the block ends well, and vanishes when it does not.

    Left-overs of an interrupted run with the same `out` are removed first. For an address in an object store the
    scratch folder is a local one, which is sent at the end; what was there before is removed at the beginning.

    Args:
        together: all processes of `jax.distributed` fill the folder, on a file system that all see; process 0 makes it
            and renames it when the block has ended well in all of them.

    Raises:
        DllmError: when `out` exists and is not to be overwritten, or its parent is not a folder.
    """
    out = folder_path(out)
    fill = _sent_folder if buckets.is_address(out) else _atomic_folder
    if not together:
        with fill(out, overwrite=overwrite) as scratch:
            yield scratch
        return
    with contextlib.ExitStack() as folder:
        scratch = _hidden(out, "partial")
        with multihost.fail_together():
            if not multihost.index():
                scratch = folder.enter_context(fill(out, overwrite=overwrite))
        with multihost.fail_together():
            yield scratch
        with multihost.fail_together():
            folder.close()


@contextlib.contextmanager
def _sent_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """The local folder for an address; what the block itself has sent there is removed when it fails."""
    check_out(out, overwrite=overwrite)
    buckets.remove(out)
    with tempfile.TemporaryDirectory(prefix="dllm_jax-") as name:
        try:
            yield Path(name)
            buckets.send(Path(name), out)
        except BaseException:
            with contextlib.suppress(DllmError):
                buckets.remove(out)
            raise


@contextlib.contextmanager
def _atomic_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    scratch, retired = _hidden(out, "partial"), _hidden(out, "retired")
    check_out(out, overwrite=overwrite)
    if retired.exists() and not out.exists():  # a run was killed between its two renames
        retired.rename(out)
        check_out(out, overwrite=overwrite)
    shutil.rmtree(retired, ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise DllmError(f"{out.parent} cannot be written to ({error.strerror}); choose another output folder") from None
    try:
        yield scratch
        if out.exists():
            out.rename(retired)
        scratch.rename(out)
    finally:
        if retired.exists() and not out.exists():
            retired.rename(out)
        if scratch.exists():
            _remove(scratch)
        shutil.rmtree(retired, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Removes a folder that is still being written to: after one failed write Orbax leaves the others on their way."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)  # a late write would make the folder again
        if not folder.exists():
            return


def write_error(out: str | Path, error: Exception) -> Exception:
    """The sentence for a failed write, by a full disk or otherwise; an error of another kind comes back as it is."""
    if buckets.is_address(out):
        return buckets.unreached_error(out, error)
    text = " ".join(str(part) for part in (error, error.__cause__, error.__context__))
    if "No space left" in text or "RESOURCE_EXHAUSTED" in text or "ENOSPC" in text or "Disk quota" in text:
        return DllmError(
            f"the disk of {out} is full; free space or choose another output folder (nothing was left there)"
        )
    if reason := re.search(r"([^:]+) \[os_error_code=", text):  # tensorstore's, which raises ValueError for everything
        return DllmError(f"{out} could not be written ({reason[1].strip()}); choose another output")
    if isinstance(error, OSError):
        return DllmError(f"{out} could not be written ({multihost.first_line(error)}); choose another output")
    return error
