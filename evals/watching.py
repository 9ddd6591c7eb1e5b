"""A task's accuracy while a model is trained (`watch.task`), by the code of `python -m evals run`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dllm_jax import Model
from dllm_jax.errors import DllmError
from evals.runner import draw_examples, prepare_batches
from evals.sampler import parse_sampler
from evals.tasks import make_task
from samplers.engine.runner import Engines
from train.config import WatchPart
from train.logs import Evaluation

_SHOWN = 4  # answers that are reported


class Accuracy:
    """A `train.evaluation.TaskScorer`: the share of the same problems that is answered right."""

    names = ("accuracy", "accuracy_stderr", "nfe", "tokens_per_forward")

    def __init__(
        self, model: Model, part: WatchPart, sampler: str, options: Mapping[str, Any], together: int, seed: int
    ) -> None:
        """As `train.evaluation.TaskScorer` says.

        Raises:
            DllmError: as `evals.runner.run`.
        """
        self._sampler, self._together, self._seed, self._split = sampler or "threshold", together, seed, part.split
        try:
            self._task = make_task(part.task).bind(model)
            self._examples = draw_examples(self._task, part.split, part.n, progress=False)
            self._prepared(model, options)
        except DllmError as error:
            raise DllmError(f"watch.task: {error}") from None

    def _prepared(self, model: Model, options: Mapping[str, Any]) -> Any:
        spec = parse_sampler(self._sampler)
        spec = dataclasses.replace(spec, options={**spec.options, **options})
        count, examples = len(self._examples), self._examples
        return prepare_batches(
            model, self._task, spec, count, self._together, self._seed, self._split, examples=examples
        )[1]

    def __call__(self, model: Model, options: Mapping[str, Any]) -> Evaluation:
        """Accuracy with its standard error, forwards per answer, and the first answers."""
        batches = self._prepared(model, options)
        scores = batches.score(Engines(), False, self._sampler).scores()
        ask = lambda row: batches.task.question(self._examples[row.index])
        answers = [
            {"prompt": ask(row), "text": row.text, "nfe": row.nfe, "correct": row.correct}
            for row in scores["rows"][:_SHOWN]
        ]
        return Evaluation({name: scores[name] for name in self.names}, answers)
