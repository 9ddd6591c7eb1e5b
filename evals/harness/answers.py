"""Answers of a run of the harness, in memory and in a file, from which a killed run resumes.

A file has the answers of one preset, model and seed: a hash of the three is in its name, and the three are on every
line. The key of an answer is a hash of the prompt's ids, the stop strings, the length and the draws. Each of several
processes writes a part; the parts of any number of processes are read.
"""

import contextlib
import glob
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import dllm_jax
from dllm_jax import DllmError, Model
from dllm_jax.json_lines import JsonLines
from dllm_jax.params.quantized import dtype_label
from evals import files
from evals.distributed import ALONE, Processes
from evals.presets import Preset

_ENDS = 2**16  # bytes at a file's beginning and at its end that are hashed


class AnswerFile:
    """The known answers, by key.

    Attributes:
        settings: preset, model and seed, which every line has.
        path: the file that is written; None without one.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any], processes: Processes = ALONE) -> None:
        """
        Args:
            folder: of the file; None keeps answers in memory alone.
            processes: those that write a part each.

        Raises:
            DllmError: when the folder cannot be made.
        """
        self.settings = settings
        self.path: Path | None = None
        self._known: dict[str, dict[str, Any]] = {}
        self._output: JsonLines | None = None
        self._share = processes.index, processes.count
        if folder is not None:
            name = re.sub(r"[^\w.-]+", "-", str(settings["preset"]))
            self._whole = files.make_folder(folder) / f"{name}-{digest(settings)[:12]}.jsonl"
            part = f".part-{processes.index}-of-{processes.count}" if processes.count > 1 else ""
            self.path = self._whole.with_name(self._whole.name + part)

    @contextlib.contextmanager
    def hold_file(self) -> Iterator[None]:
        """Reads the files, and holds this process's own while it is written.

        Raises:
            DllmError: for a file of something else, and where it cannot be written.
        """
        if self.path is None:
            yield
            return
        with JsonLines(self.path) as self._output:
            self._output.compare(self.settings)
            self._output.begin()
            for ending in ("", ".part-*-of-*"):
                for path in self._whole.parent.glob(glob.escape(self._whole.name) + ending):
                    self._known |= {line["line"]: line for line in _lines(path)}
            yield

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._known[key]

    def add(self, key: str, entry: Mapping[str, Any]) -> None:
        """Stores an answer."""
        line = {"line": key, **entry, "share": list(self._share), "settings": self.settings}
        if self._output is not None:
            self._output.append(line)
        self._known[key] = line

    def learn(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes answers that other processes have stored."""
        self._known |= {line["line"]: dict(line) for line in lines}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file, which another process may be writing."""
    with path.open("rb") as file:
        yield from (json.loads(line) for line in file if line.endswith(b"\n"))


def settings_of(model: Model, preset: Preset, seed: int) -> dict[str, Any]:
    """What decides answers, other than the questions."""
    return {
        "preset": preset.name,
        "preset_hash": preset.hash,
        "model": model.name,
        "fingerprint": fingerprint(model),
        "dtype": dtype_label(model.params),
        "seed": seed,
        "dllm_jax": dllm_jax.__version__,
    }


def fingerprint(model: Model) -> str:
    """A hash of the config and of the names, sizes and ends of the folder's files, the tokenizer's among them; of the
    config alone without a folder."""
    folder, parts = model.folder, [model.config.to_json()]
    if folder is None:
        return digest(*parts)
    try:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            parts += [str(path.relative_to(folder)), str(path.stat().st_size), _ends(path)]
    except OSError as error:
        raise DllmError(f"the folder {folder} could not be read ({error})") from None
    return digest(*parts)


def _ends(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(_ENDS)
        file.seek(max(path.stat().st_size - _ENDS, 0))
        return hashlib.blake2b(head + file.read(), digest_size=16).hexdigest()


def digest(*parts: Any) -> str:
    """32 hexadecimal digits of values as JSON, of others as text."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
