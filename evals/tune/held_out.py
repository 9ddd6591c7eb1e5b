"""Held-out problems: different from each other and from those of a search, and used by one run alone (docs/tune.md).

$DLLM_JAX_HOME/held-out/MODEL/RUN.json     the settings of a run, and hashes of the questions that it used
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax.checkpoints import checkpoint
from dllm_jax.errors import DllmError
from dllm_jax.storage import write_file
from evals import files
from evals.runner import draw_examples
from evals.tasks import DrawnTask, Example, Task


def hashes_of(task: Task, examples: Sequence[Example]) -> list[str]:
    """A hash of each example's question, the same for all models."""
    return [_hash(task.question(example)) for example in examples]


def draw_different(
    task: Task, split: str, n: int, taken: set[str], progress: bool | None = None
) -> tuple[list[Example], int]:
    """The first n examples of a split whose questions differ from each other and from those that are taken.

    Args:
        taken: hashes of questions, to which those of the result are added.

    Returns:
        The examples, fewer where there are no more, and how many were left out before.
    """
    found, drawn_before = list[Example](), 0
    while len(found) < n and (drawn := draw_examples(task, split, n - len(found), progress, drawn_before)):
        drawn_before, before = drawn_before + len(drawn), len(found)
        for example, own in zip(drawn, hashes_of(task, drawn), strict=True):
            if own not in taken:
                taken.add(own)
                found.append(example)
        if task.count(split) is None and len(found) == before:  # the task seems to have no others
            break
    return found, drawn_before - len(found)


class HeldOutRecord:
    """The record of the held-out problems that a run used.

    Args:
        model: which answers, as text.
        settings: of the run; one with the same settings is the same run.
    """

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._path = checkpoint.home() / "held-out" / _hash(model) / f"{_hash(json.dumps(settings))}.json"

    def check(self, task: Task, hashes: Sequence[str]) -> None:
        """Raises DllmError when another run used some of these questions, or its record cannot be read."""
        for path in sorted(self._path.parent.glob("*.json")):
            if path == self._path:
                continue
            used, floor = _read_record(path)
            if again := len(used.intersection(hashes)):
                others = "another seed= of the task" if isinstance(task, DrawnTask) else "new lines"
                raise DllmError(
                    f"a run with floor {floor} used {again} of the {len(hashes)} held-out problems, so another bound "
                    f"on them promises nothing; take others, by {others}, or remove {path} if nobody has read "
                    "that run's results"
                )

    def add(self, hashes: Sequence[str]) -> None:
        """Records that the run uses these questions, the first ones of its held-out problems.

        Raises:
            DllmError: when that cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            advice = "set DLLM_JAX_HOME to a folder that can be written"
            raise DllmError(f"the folder {self._path.parent} could not be made ({error}); {advice}") from None
        write_file(self._path, files.as_json({"settings": self._settings, "problems": hashes}))


def _read_record(path: Path) -> tuple[set[str], float]:
    """The hashes of a record, and its run's floor."""
    try:
        found = json.loads(path.read_bytes())
        return set(found["problems"]), found["settings"]["floor"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DllmError(f"{path} is no record of held-out problems ({error}); remove it") from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
