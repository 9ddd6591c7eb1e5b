"""Answers that a run of the harness has, in memory and in a file, so that a run that was killed goes on where it was.

A file is of one preset, model and seed: its name holds a hash of all three, and every line says them. An answer is
found by what it is the answer to: the prompt's ids, the stop strings, the length and the draws. Several processes write
a part each, and whoever opens the file reads all parts that there are, by however many processes.
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
from dllm_jax.params.quantized import dtype_label
from evals import files
from evals.presets import Preset
from samplers.cli.outputs import Output, Share, part_of

_ENDS = 2**16  # bytes of a file's beginning and of its end that are looked at


class Answers:
    """What is known, by key.

    Attributes:
        settings: preset, model and seed, which every line says.
        path: the file that is written; None without one.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any], share: Share) -> None:
        """
        Args:
            folder: of the file; None keeps answers in memory alone.
            share: which of several processes this is.

        Raises:
            DllmError: when the folder cannot be made.
        """
        self.settings = settings
        self.path: Path | None = None
        self._known: dict[str, dict[str, Any]] = {}
        self._output: Output | None = None
        self._share = share
        if folder is not None:
            name = re.sub(r"[^\w.-]+", "-", str(settings["preset"]))
            self._whole = files.make_folder(folder) / f"{name}-{digest(settings)[:12]}.jsonl"
            self.path = part_of(self._whole, share)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Reads what is there, and holds this process's file as long as it is written.

        Raises:
            DllmError: for a file of something else, and where it cannot be written.
        """
        if self.path is None:
            yield
            return
        with Output(self.path) as self._output:
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
        """Keeps an answer."""
        line = {"line": key, **entry, "share": list(self._share), "settings": self.settings}
        if self._output is not None:
            self._output.append(line)
        self._known[key] = line

    def learn(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes what other processes answered, and keep."""
        self._known |= {line["line"]: dict(line) for line in lines}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file, which another process may be writing."""
    with path.open("rb") as file:
        yield from (json.loads(line) for line in file if line.endswith(b"\n"))


def settings_of(model: Model, preset: Preset, seed: int) -> dict[str, Any]:
    """Whatever decides answers, beside what they answer."""
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
    """Tells models apart, at little cost: by the config, and by names, sizes and ends of the folder's files, the
    tokenizer's among them; by the config alone where there is no folder."""
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
    """32 hexadecimal digits of what JSON can say, other things by their text."""
    said = json.dumps(parts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(said, digest_size=16).hexdigest()
