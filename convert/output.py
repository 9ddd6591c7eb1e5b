"""What all commands say about their output: whether it may be there, whether it fits, and how far it is."""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dllm_jax import buckets, storage
from dllm_jax.errors import DllmError

SPARE_BYTES = 64 * 2**20  # metadata, tokenizer files and what the file system keeps for itself


def check_out(out: str | Path, *, source: str | Path, overwrite: bool, kind: str) -> None:
    """Refuses early what would fail, or destroy something, after hours of downloading.

    Args:
        kind: glob pattern of what a folder must contain to be replaced by `overwrite`.

    Raises:
        DllmError: when `out` exists and is not to be overwritten, is not such a folder, or holds the source.
    """
    if buckets.is_address(out):
        raise DllmError(f"{out} is in an object store; write to a folder, and copy that: gcloud storage cp -r")
    storage.check_out(out, overwrite=overwrite)
    out = Path(out).expanduser().resolve()
    if Path(source).expanduser().resolve().is_relative_to(out):
        raise DllmError(f"{out} holds the source, which would be overwritten; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not any(out.glob(kind)):
        raise DllmError(f"{out} holds something other than a checkpoint and is not overwritten; choose another --out")


def check_space(out: str | Path, num_bytes: int) -> None:
    """Refuses what will not fit.

    Raises:
        DllmError: when the disk of `out` has less free space than `num_bytes` and a little more.
    """
    folder = Path(out).expanduser().resolve()
    while not folder.exists():
        folder = folder.parent
    free, need = shutil.disk_usage(folder).free, num_bytes + SPARE_BYTES
    if free < need:
        raise DllmError(
            f"{out} needs {need / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free; "
            "free some space or choose another --out"
        )


def byte_bar(total: int, shown: bool) -> "tqdm[Any]":
    """A progress bar over bytes on stderr; never shown where stderr is no terminal."""
    return tqdm(total=total, unit="B", unit_scale=True, disable=None if shown else True)


@contextlib.contextmanager
def keep_refreshing(bar: "tqdm[Any]") -> Iterator[None]:
    """Redraws a bar every second, so that its clock runs while nothing is counted."""
    if bar.disable:
        yield
        return
    over = threading.Event()

    def tick() -> None:
        while not over.wait(1.0):
            bar.refresh()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
