"""Files and folders that are there whole or not at all, and locks."""

import errno
import io
import os
import stat
from pathlib import Path

import pytest

from dllm_jax import DllmError, storage


@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_a_written_file_has_the_permissions_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        storage.write_file(tmp_path / "view.html", "a")
    finally:
        os.umask(before)
    assert (tmp_path / "view.html").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("fails", ["write", "replace"])
def test_a_file_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch, fails, error):
    class Full(io.FileIO):
        def write(self, data):
            super().write(bytes(data)[:1])
            raise error

    def fail(*_):
        raise error

    path = tmp_path / "view.html"
    path.write_text("before")
    if fails == "write":
        monkeypatch.setattr(Path, "open", lambda path, mode: Full(path, mode.replace("b", "")))
    else:
        monkeypatch.setattr(os, "replace", fail)
    wanted = (DllmError, path.name) if isinstance(error, OSError) else (KeyboardInterrupt, None)
    with pytest.raises(wanted[0], match=wanted[1]):
        storage.write_file(path, "after")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "before"


def test_a_file_is_on_the_disk_before_it_replaces_another_and_its_folder_after(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace

    def synced(number):
        done.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else next(tmp_path.iterdir()).read_text())
        sync(number)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("os.replace", lambda *paths: (done.append("replace"), replace(*paths)))
    storage.write_file(tmp_path / "a", "text")
    assert done == ["text", "replace", "folder"] and (tmp_path / "a").read_text() == "text"


def test_a_lock_is_held_by_one(tmp_path):
    path = tmp_path / ".lock"
    for _ in range(2):
        with storage.lock(path, "busy"):
            with pytest.raises(DllmError, match="^busy$"), storage.lock(path, "busy"):
                pass


def test_overwriting_never_loses_what_was_there(tmp_path, monkeypatch):
    """Neither when the last rename fails, nor when a run was killed between its two renames."""
    out = tmp_path / "model"
    out.mkdir()
    (out / "old").touch()
    real = Path.rename

    def fail(self, target):
        if self.name.endswith(".partial"):
            raise OSError("no")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError), storage.atomic_folder(out, overwrite=True):
        pass
    monkeypatch.undo()
    assert [path.name for path in out.iterdir()] == ["old"] and len(list(tmp_path.iterdir())) == 1

    out.rename(tmp_path / ".model.retired")
    with storage.atomic_folder(tmp_path / "other"):
        pass
    with pytest.raises(DllmError, match="exists already"), storage.atomic_folder(out):
        pass
    assert (out / "old").exists()
    with storage.atomic_folder(out, overwrite=True) as scratch:
        (scratch / "new").touch()
    assert [path.name for path in out.iterdir()] == ["new"]
