"""Folders in object stores, such as gs://bucket/run: how they are named, listed, copied and written.

An object appears whole or not at all; none can be appended to, renamed or locked. So logs grow in a local folder and
are sent from there, and checkpoints are read from a local copy. States and models go there as they are: Orbax reads and
writes such addresses itself, by all processes together. Everything else is gcsfs, which Orbax uses as well.
"""

import contextlib
import errno
import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost

_ADDRESS = re.compile(r"([a-z][a-z0-9]+):/+")
Sent = dict[Path, tuple[int, int]]
"""Files that were sent -> their size and time of change."""


def is_address(path: str | Path) -> bool:
    """Whether this names something in an object store; of a `Path`, which has one slash of the two, as well."""
    return _ADDRESS.match(str(path)) is not None


def remote(address: str | Path) -> Path:
    """A folder in an object store as `etils.epath` has it, which is used like a `Path`.

    Raises:
        DllmError: for other stores than gs://, a bucket without a folder in it, and where gcsfs is missing.
    """
    text = _ADDRESS.sub(r"\1://", str(address), count=1).rstrip("/")
    if not re.fullmatch(r"gs://[^/]+/.+", text):
        advice = "write gs://BUCKET/FOLDER; mount other stores, or use a folder"
        raise DllmError(f"{text} is no folder in Google Cloud Storage, the only object store that is known; {advice}")
    if importlib.util.find_spec("gcsfs") is None:
        raise DllmError(f'{text} needs the package gcsfs; install it: pip install "dllm_jax[gcs]"')
    from etils import epath  # here, because only Orbax and addresses need it

    return cast(Path, epath.Path(text))


@contextlib.contextmanager
def reach(where: str | Path) -> Iterator[None]:
    """Something that is done with an address; what is missing stays a FileNotFoundError, and local paths' errors stay.

    Raises:
        DllmError: for whatever networks, accounts and buckets do.
    """
    try:
        yield
    except (DllmError, FileNotFoundError):
        raise
    except Exception as error:  # of gcsfs, aiohttp, google.auth, Orbax
        if is_address(where):
            raise unreached_error(where, error) from error
        raise


def unreached_error(where: str | Path, error: BaseException) -> DllmError:
    """The sentence for an address that could not be read or written."""
    advice = (
        "see that the network is up, and that your account may use the bucket (gcloud auth application-default login)"
    )
    return DllmError(f"{where} could not be reached ({multihost.first_line(error)}); {advice}")


def list_names(folder: Path) -> list[str]:
    """Names of what is in a folder, local or remote; none where there is no such folder.

    Raises:
        DllmError: when it cannot be reached, or there is no such bucket.
    """
    if not is_address(folder):
        return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    with reach(folder):
        try:
            found = _store().ls(str(folder), detail=False)
        except FileNotFoundError:
            _check_bucket(folder)
            return []
    return [name for path in found if (name := path.rpartition("/")[2])]


def remove(folder: Path) -> None:
    """Removes all objects of a folder; those that lie in no other folder first, for they say what it is.

    Raises:
        DllmError: when it cannot be reached.
    """
    with reach(folder):
        found = _store().find(str(folder))
        depth = len(folder.parts)
        for part in (True, False):
            if paths := [path for path in found if (path.count("/") == depth - 2) == part]:
                _store().rm(paths)


def send(folder: Path, to: Path, sent: Sent | None = None) -> None:
    """Copies a local folder's files to a remote one, the deepest first.

    Args:
        sent: what was sent before and is left out while it is the same; what is sent now is added.

    Raises:
        DllmError: when it cannot be reached.
    """
    known = {} if sent is None else sent
    for path in sorted(folder.rglob("*"), key=lambda path: (-len(path.parts), path)):
        if not path.is_file():
            continue
        status = path.stat()
        now = status.st_size, status.st_mtime_ns
        if known.get(path) != now:
            try:
                _store().put_file(str(path), str(to / path.relative_to(folder).as_posix()))
            except Exception as error:  # of gcsfs, aiohttp, google.auth
                raise unreached_error(to, error) from error
            known[path] = now


def local_copy(address: str | Path, home: Path) -> Path:
    """A local copy of a remote folder, made once for each state of its objects.

    Args:
        home: where copies are kept. Processes that share it copy one after the other, so the first for all.

    Raises:
        DllmError: when it cannot be reached, holds nothing, is changed meanwhile, or the disk is full.
    """
    import filelock

    source = remote(address)
    objects = _objects(source)
    place = home / _digest(str(source)) / _digest(objects)
    place.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place.parent / ".lock"):
        if not place.is_dir():
            partial = place.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                _copy(source, list(objects), partial / source.name)
                if _objects(source) != objects:
                    raise DllmError(f"{source} was written to while it was copied; try again")
                partial.rename(place)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return place / source.name


def _copy(source: Path, paths: list[str], to: Path) -> None:
    from fsspec.callbacks import TqdmCallback

    above = len(str(source).removeprefix("gs://")) + 1
    shown = TqdmCallback(tqdm_kwargs={"desc": f"copying {source}", "unit": "file", "disable": None})
    try:
        with reach(source):
            _store().get(paths, [str(to / path[above:]) for path in paths], callback=shown)
    except DllmError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC:
            raise DllmError(f"the disk of {to} is full; free space, or set DLLM_JAX_HOME to a larger one") from None
        raise


def _objects(source: Path) -> dict[str, str]:
    """Paths of a folder's objects -> what changes when they do."""
    with reach(source):
        found: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):  # of the bucket
            found = _store().find(str(source), detail=True)
        if not found:
            _check_bucket(source)
            raise DllmError(f"there is nothing at {source}; correct the address")
    return {path: str(about.get("generation") or about.get("etag")) for path, about in sorted(found.items())}


def _check_bucket(folder: Path) -> None:
    bucket = "/".join(str(folder).split("/")[:3])
    try:
        _store().info(bucket)
    except FileNotFoundError:
        raise DllmError(f"there is no bucket {bucket}; make it, or correct the address") from None


def _store() -> Any:
    """The file system that `etils.epath` uses, with nothing remembered of what is where: others write there, too."""
    import fsspec

    store = fsspec.filesystem("gcs", finalize_on_close=True)
    store.invalidate_cache()
    return store


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
