"""Outcomes of samplers on a task's problems, in a file, so that none is computed twice."""

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dllm_jax.errors import DllmError
from dllm_jax.json_lines import JsonLines
from dllm_jax.params.quantized import dtype_label
from evals.models import Models
from evals.runner import prepare_batches, run
from evals.sampler import SamplerConfig
from evals.tasks import Example, Task
from evals.tune.held_out import HeldOutRecord, draw_different, hashes_of
from evals.tune.trials import Goal, Outcomes
from samplers.engine.program import numbers_of, program_of
from samplers.engine.runner import Engines

REPORT = 512  # problems, at most, that a kill loses


class TuneScorer:
    """Outcomes of samplers on a task's problems; those in the file are not computed again.

    Attributes:
        samplers: without repetitions and without the reference.
        goal: with as many problems as exist.
        problems: a hash of all questions.
    """

    def __init__(
        self,
        models: Models,
        task: Task,
        reference: SamplerConfig,
        samplers: Sequence[SamplerConfig],
        goal: Goal,
        *,
        batch_size: int = 64,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        """Loads the models, builds all samplers and draws all problems.

        Raises:
            DllmError: as `evals.run`, for a floor that so many problems cannot prove, and when another run used
                some of the held-out problems; before anything is compiled.

        Warns:
            RuntimeWarning: when problems were left out.
        """
        goal.check_provable()
        self._models, self._task = models, task
        self._how: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "progress": progress}
        self._engines, self._drawn = Engines(), dict[Any, Mapping[str, list[Example]]]()
        self._entries = dict[tuple[str, str], list[Mapping[str, Any]]]()
        self._output: JsonLines | None = None
        self._settings: Mapping[str, Any] = {}
        self.goal = goal
        different = dict[Any, tuple[SamplerConfig, Any]]()  # with what was built, which keeps the ids in the keys alive
        for sampler in (reference, *samplers):
            for split, examples in self._examples(sampler).items():
                batches = prepare_batches(models, task, sampler, None, batch_size, seed, split, examples=examples)[1]
            numbers = tuple(float(number) for number in numbers_of(batches.sampler))
            key = (id(batches.model), program_of(batches.sampler), numbers)
            different.setdefault(key, (sampler, batches.sampler))
        self.samplers = [sampler for sampler, _ in different.values() if sampler is not reference]
        if not self.samplers:
            raise DllmError(f"there is no sampler but the reference {reference}; pass others by --sampler or --grid")
        questions = {split: hashes_of(task, examples) for split, examples in self._examples(reference).items()}
        self.problems = digest_of([*questions["validation"], "", *questions["test"]])
        model, tried = models.of(reference), digest_of(self.samplers)
        about = {"task": str(task), "reference": str(reference), "samplers": tried, "problems": self.problems}
        self._held_out = questions["test"]
        self._record = HeldOutRecord(
            str(getattr(model, "folder", None) or model.name),
            {**dataclasses.asdict(self.goal), **about, "seed": seed, "dtype": dtype_label(model.params)},
        )
        self._record.check(task, self._held_out)

    def attach_file(self, output: JsonLines, settings: Mapping[str, Any]) -> None:
        """Reads the outcomes of a file, and appends further ones.

        Raises:
            DllmError: when it was made with other settings, or another process writes it.
        """
        output.compare(settings)
        entries = list(output.entries())
        output.begin()
        self._output, self._settings = output, settings
        for entry in entries:
            self._entries.setdefault((entry["sampler"], entry["split"]), []).append(entry)

    def __call__(self, sampler: SamplerConfig, split: str, n: int) -> Outcomes:
        """Outcomes on the first n problems of a split."""
        entries = self._entries.setdefault((str(sampler), split), [])
        while (done := sum(len(entry["nfe"]) for entry in entries)) < n:
            entries.append(self._run(sampler, split, done, min(n - done, REPORT)))
        correct = [right for entry in entries for right in entry["correct"]][:n]
        nfe = [count for entry in entries for count in entry["nfe"]][:n]
        seconds = [entry["seconds"] / len(entry["nfe"]) for entry in entries for _ in entry["nfe"]][:n]
        return Outcomes([bool(right) for right in correct], sum(nfe) / n, sum(seconds) / n)

    def _run(self, sampler: SamplerConfig, split: str, first: int, n: int) -> Mapping[str, Any]:
        examples = self._examples(sampler)[split][first : first + n]
        if split == "test":
            self._record.add(self._held_out[: first + n])
        where: dict[str, Any] = {"split": split, "first": first, "examples": examples, "engines": self._engines}
        report = run(self._models, self._task, sampler, n=n, **where, **self._how)
        entry = {
            "line": 1 if self._output is None else self._output.done + 1,
            "sampler": str(sampler),
            "split": split,
            "correct": [int(row.correct) for row in report.rows],
            "nfe": [row.nfe for row in report.rows],
            "seconds": report.seconds,
            "settings": self._settings,
        }
        if self._output is not None:
            self._output.append(entry)
        return entry

    def _examples(self, sampler: SamplerConfig) -> Mapping[str, list[Example]]:
        """Split -> its problems; all models share them if the task has its own tokens."""
        model = self._models.of(sampler)
        bound = self._task.bind(model)
        tokens = None if bound is self._task else id(model)
        if tokens not in self._drawn:
            self._drawn[tokens] = self._draw(bound)
        return self._drawn[tokens]

    def _draw(self, task: Task) -> Mapping[str, list[Example]]:
        """The problems of both splits, and how many there are; no question is in both, or twice in one."""
        taken, found, left_out = set[str](), dict[str, list[Example]](), dict[str, int]()
        for split, n in (("validation", self.goal.validation), ("test", self.goal.n)):
            found[split], left_out[split] = draw_different(task, split, n, taken, self._how["progress"])
            if not found[split]:
                raise DllmError(f"all {left_out[split]} {split} problems are in the search as well; give others")
        if sum(left_out.values()) and not self._drawn:
            repeats = [f"{count} of {split}" for split, count in left_out.items() if count]
            warnings.warn(f"problems that repeat others are left out: {', '.join(repeats)}", RuntimeWarning, 4)
        self.goal = dataclasses.replace(self.goal, n=len(found["test"]), validation=len(found["validation"]))
        self.goal.check_provable()
        return found


def digest_of(items: Sequence[Any]) -> str:
    return hashlib.sha256("\n".join(map(str, items)).encode()).hexdigest()[:12]
