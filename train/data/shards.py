"""Trajectories as training data: the shards that `python -m evals trajectories` writes, and the source that reads them.

DIR/trajectories.json                      what was run
DIR/trajectories-00000000-00001024.npz     the prompts of these numbers, the last not included
"""

import bisect
import dataclasses
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dllm_jax.errors import DllmError
from samplers.text.prompts import bucket_length
from train.data.source import Example, Setup
from train.trajectory import Trajectory

ABOUT_FILE = "trajectories.json"
_SHARD = re.compile(r"trajectories-(\d{8,})-(\d{8,})\.npz")
_ARRAYS = ("prompts", "prompt_lengths", "gen_lengths", "tokens", "step")


@dataclasses.dataclass(frozen=True)
class Shard:
    """Some of a folder's trajectories.

    Attributes:
        path: the file.
        first, end: numbers of its prompts, the last not included.
    """

    path: Path
    first: int
    end: int

    def load(self, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Its arrays, for N prompts: `prompts`, all prompts concatenated, `prompt_lengths` [N], `gen_lengths`
        [N], `tokens` [N, G] (the mask id where none was written), `step` [N, G] (see `train.trajectory.Trajectory`),
        `nfe` [N], and, of a task, `correct` [N] bool, whether its checker accepts the answer.

        Args:
            names: of the arrays to read, of which those that are there are returned; all by default.

        Raises:
            DllmError: when it cannot be read.
        """
        try:
            with np.load(self.path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files if names is None or name in names}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DllmError(f"{self.path} could not be read ({error}); remove it and run the command again") from None

    def trajectories(self, rows: Sequence[int] | None = None) -> Trajectory:
        """Its trajectories, or some rows of it, as one batch on the host, as wide as the longest prompt's bucket."""
        data = self.load()
        ends = np.cumsum(data["prompt_lengths"])
        chosen = np.arange(self.end - self.first) if rows is None else np.asarray(rows)
        width = bucket_length(int(data["prompt_lengths"].max()))
        prompt = np.zeros((len(chosen), width), np.int32)
        for row, number in enumerate(chosen):
            length = data["prompt_lengths"][number]
            prompt[row, :length] = data["prompts"][ends[number] - length : ends[number]]
        whole = lambda name: data[name][chosen].astype(np.int32)
        names = ("prompt_lengths", "gen_lengths", "tokens", "step")
        return Trajectory(prompt, *map(whole, names))  # type: ignore[arg-type]


def shards(folder: str | Path) -> list[Shard]:
    """The shards of a folder in order.

    Raises:
        DllmError: when they do not follow one another from prompt 0 on.
    """
    matches = [(path, _SHARD.fullmatch(path.name)) for path in sorted(Path(folder).glob("trajectories-*.npz"))]
    found = sorted((Shard(path, int(m[1]), int(m[2])) for path, m in matches if m), key=lambda shard: shard.first)
    end = 0
    for shard in found:
        if shard.first != end or shard.end <= shard.first:
            raise DllmError(f"{shard.path} does not begin at prompt {end}; a file is missing, or one too many")
        end = shard.end
    return found


class Trajectories:
    """A finite source: the trajectories of a folder in order, each shard read on first use, and kept
    in the small integers that it is stored in.

    An example's answer is the final canvas, mask tokens where nothing was ever written; its `step` says when each
    position was, and what no step wrote counts as given.

    Attributes:
        width: positions of the longest one, prompt and canvas.
    """

    def __init__(self, folder: Path, *, correct: bool) -> None:
        """Reads lengths and, with `correct`, which answers are right.

        Raises:
            DllmError: for a folder without trajectories, and for `correct` where no checker was asked.
        """
        self._shards = shards(folder)
        if not self._shards:
            raise DllmError(f"{folder} holds no trajectories; make some by python -m evals trajectories --out {folder}")
        self._loaded: dict[int, tuple[dict[str, np.ndarray], np.ndarray]] = {}
        self._starts = [shard.first for shard in self._shards]
        chosen, self.width = [], 0
        for shard in self._shards:
            data = shard.load(("prompt_lengths", "gen_lengths", "correct"))
            if correct and "correct" not in data:
                raise DllmError(
                    f"{shard.path} does not say which answers are correct; make trajectories of a --task, or leave "
                    "data.options.correct out"
                )
            rows = np.flatnonzero(data["correct"]) if correct else np.arange(shard.end - shard.first)
            lengths = (data["prompt_lengths"].astype(int) + data["gen_lengths"])[rows]
            self.width = max(self.width, int(lengths.max(initial=0)))
            chosen.append(shard.first + rows)
        self._numbers = np.concatenate(chosen)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": {}}  # every process reads shards for itself

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def identity(self) -> list[tuple[str, int, int]]:
        """The shards with their sizes and times."""
        status = [(str(shard.path.resolve()), shard.path.stat()) for shard in self._shards]
        return [(path, found.st_size, found.st_mtime_ns) for path, found in status]

    def example(self, index: int) -> Example:
        """Trajectory `index` of those that were chosen."""
        number = int(self._numbers[index])
        place = bisect.bisect_right(self._starts, number) - 1
        row = number - self._starts[place]
        data, ends = self._arrays(place)
        length, end = int(data["gen_lengths"][row]), int(ends[row])
        prompt = data["prompts"][end - int(data["prompt_lengths"][row]) : end].astype(np.int32)
        step = data["step"][row, :length].astype(np.int32)
        return Example(prompt, data["tokens"][row, :length].astype(np.int32), given=step < 0, step=step)

    def _arrays(self, place: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The arrays of a shard, and where each prompt ends."""
        if place not in self._loaded:
            data = self._shards[place].load(_ARRAYS)
            self._loaded[place] = data, np.cumsum(data["prompt_lengths"], dtype=np.int64)
        return self._loaded[place]


def trajectories(setup: Setup, *, path: str, correct: bool = False) -> Trajectories:
    """What `python -m evals trajectories` wrote.

    Args:
        path: its folder.
        correct: take only the answers that the task's checker accepted.
    """
    return Trajectories(Path(path).expanduser(), correct=correct)
