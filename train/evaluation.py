"""Evaluations during a run: the loss of held-out rows, answers to prompts, and a task's accuracy.

An evaluation reads the weights and changes nothing, so a run with evaluations is the run without. Several processes
run one engine over the mesh in lock-step, and each checks all answers; what the first one counts holds.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import spec
from dllm_jax.checkpoints.loading import Model
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost
from dllm_jax.parallel.sharding import Layout
from samplers.generate import generate, prepare
from samplers.text.prompt_files import read_prompts
from train.batches import batch_of
from train.config import RouterPart, TrainConfig, WatchPart
from train.data import Rows
from train.logs import Evaluation, fetch_metrics
from train.losses import LEVELS, Batch, Means, mean_values
from train.objectives import objective_of
from train.run_dir import WATCH_SECONDS
from train.setup import Parts
from train.step import Placement, Stepper, TrainState
from train.trainable import Params, SamplerInputs

_NOISE = 2**30  # the noise of evaluations differs from that of steps, which are numbered from 0
_TOGETHER = 32  # prompts or problems that are sampled in one batch


class TaskScorer(Protocol):
    """Scores a model at a task.

    `watch.scorer` names what makes a scorer, from: a model without parameters (see
    `dllm_jax.checkpoints.loading.outline`), the `WatchPart`, the sampler's text, those of its options that are trained,
    how many problems are sampled in one batch, and a seed. It raises DllmError for settings that do not fit.

    Attributes:
        names: of its metrics, one of which `checkpoint.metric` may be.
    """

    @property
    def names(self) -> Sequence[str]: ...

    def __call__(self, model: Model, options: Mapping[str, Any]) -> Evaluation:
        """The score of the model as it is now, and some of its answers."""
        ...


class Watch:
    """Evaluates a run's weights every `watch.every` steps, before the first step and after the last."""

    def __init__(self, config: TrainConfig, parts: Parts, placement: Placement) -> None:
        """Checks everything that can be checked before anything is compiled.

        Args:
            parts: after `check_examples`.

        Raises:
            DllmError: when there is nothing to evaluate, and for prompts, samplers and tasks that do not fit the model.
        """
        part = config.watch
        self._config, self._part = config, part
        self._heldout: HeldOut | None = None
        self._answers: PromptAnswers | None = None
        self._scorer: TaskScorer | None = None
        asks = bool(part.prompts or part.file or part.task)
        if not part.every:
            return
        if parts.heldout is None and not asks:
            raise DllmError(
                "watch.every is set and there is nothing to evaluate; set data.heldout, watch.source, watch.prompts, "
                "watch.file or watch.task"
            )
        if parts.heldout is not None:
            self._heldout = HeldOut(config, parts.heldout, parts.model, placement)
        if not asks:
            return
        self._trained = objective_of(config).trainable(config, parts.model)
        self._outline = parts.outline(config.out, Layout(placement.mesh) if placement.mesh.size > 1 else None)
        sampled, sampler = self._trained.for_sampling({}, {}), _sampler_text(part, parts.model, config)
        together = -(-_TOGETHER // placement.batch_parts) * placement.batch_parts
        if part.prompts or part.file:
            self._answers = PromptAnswers(self._outline, part, sampler, sampled.options, together)
        if part.task:
            make = spec.import_object(part.scorer, "watch.scorer")
            self._scorer = make(self._outline, part, sampler, sampled.options, together, config.seed)

    def check_metric(self, frozen: Params) -> None:
        """Raises DllmError for a `checkpoint.metric` that evaluations do not report; compiles nothing."""
        wanted = self._config.checkpoint.metric
        if not wanted:
            return
        names = list(self._scorer.names if self._scorer else ())
        if self._heldout is not None:
            kinds = ("", "ema_") if self._config.optimizer.ema else ("",)
            names += [f"heldout_{kind}{name}" for kind in kinds for name in self._heldout.names(frozen)]
        if wanted not in names:
            there = ", ".join(sorted(names)) or "none"
            raise DllmError(f"checkpoint.metric {wanted!r} is no number that evaluations report; there are {there}")

    def due(self, step: int) -> bool:
        """Whether there is an evaluation after this many steps."""
        return self._part.every > 0 and (step % self._part.every == 0 or step == self._config.steps)

    def __call__(self, state: TrainState, frozen: Params) -> Evaluation:
        """Evaluates the weights; answers and accuracy are of those that the result is to hold."""
        start, metrics = time.perf_counter(), dict[str, float]()
        if self._heldout is not None:
            metrics |= {f"heldout_{name}": x for name, x in self._heldout(state.trained, frozen).items()}
            if state.average is not None:
                metrics |= {f"heldout_ema_{name}": x for name, x in self._heldout(state.average, frozen).items()}
        scorers: list[TaskScorer] = [scorer for scorer in (self._answers, self._scorer) if scorer is not None]
        generations: list[dict[str, Any]] = []
        if scorers:
            average = self._config.checkpoint.weights == "ema"
            weights = state.average if average and state.average is not None else state.trained
            sampled: SamplerInputs = self._trained.for_sampling(weights, frozen)
            model = dataclasses.replace(self._outline, config=sampled.config, params=sampled.params)
            for scorer in scorers:
                with multihost.fail_together():
                    found = scorer(model, sampled.options)
                metrics |= multihost.of_first_process(dict(found.metrics))  # by which the best states are kept
                generations += found.generations
        return Evaluation({**metrics, WATCH_SECONDS: time.perf_counter() - start}, generations)


class HeldOut:
    """The objective on rows that are not trained on: each once, under the same noise each time, without dropout and
    without the routers' losses."""

    def __init__(self, config: TrainConfig, rows: Rows, model: ModelConfig, placement: Placement) -> None:
        """
        Args:
            rows: of a finite source.
        """
        still = objective_of(config).evaluation_settings()
        lora = dataclasses.replace(config.lora, dropout=0.0)
        config = dataclasses.replace(config, objective=still, lora=lora, router=RouterPart())
        self._rows, self._sharding = rows, placement.batch
        self._stepper = Stepper(config, model, placement)
        self._measure = jax.jit(self._stepper.measure, out_shardings=placement.replicated)
        self._key = jax.jit(lambda: jax.random.key(config.seed), out_shardings=placement.replicated)
        self._count = rows.count or 0

    def names(self, frozen: Params) -> list[str]:
        """Of what the objective reports."""
        shapes = self._stepper.trainable.shapes().items()
        weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes}
        return list(jax.eval_shape(self._stepper.measure, weights, frozen, self._batch(0), jax.random.key(0)))

    def __call__(self, weights: Params, frozen: Params) -> dict[str, float]:
        """What the objective reports of all rows, as of one batch."""
        found, key = list[Means](), jax.random.fold_in(self._key(), _NOISE)
        for first in range(0, self._count, self._rows.batch):
            found.append(self._measure(weights, frozen, self._batch(first), jax.random.fold_in(key, first)))
        whole = jax.tree.map(lambda *parts: np.sum(parts, dtype=np.float64), *jax.device_get(found))
        # Few rows may have no t in a quarter.
        some = {name: mean for name, mean in whole.items() if name not in LEVELS or mean.weight >= 1}
        return fetch_metrics([mean_values(some)])[0]

    def _batch(self, first: int) -> Batch:
        return batch_of(self._rows, first, (1, self._rows.batch), self._sharding, self._count)


class PromptAnswers:
    """Prompts that are answered at every evaluation, by one program."""

    names: Sequence[str] = ()

    def __init__(self, model: Model, part: WatchPart, sampler: str, options: Mapping[str, Any], together: int) -> None:
        """
        Args:
            model: without parameters.
            options: of the sampler that are trained themselves.
            together: prompts that are sampled in one batch.
        """
        self._prompts: list[Any] = [*part.prompts, *(read_prompts(part.file) if part.file else [])]
        self._chosen: dict[str, Any] = {"sampler": sampler or None, "chat": part.chat}
        self._together = together
        try:
            prepare(model, self._prompts, **self._chosen, **options)
        except DllmError as error:
            raise DllmError(f"watch: {error}") from None

    def __call__(self, model: Model, options: Mapping[str, Any]) -> Evaluation:
        """The answers."""
        missing = -len(self._prompts) % model.denoiser.batch_parts  # a mesh splits them evenly
        prompts = self._prompts + self._prompts[:1] * missing
        found = generate(model, prompts, batch_size=self._together, progress=False, **self._chosen, **options)
        pairs = zip(self._prompts, found[: len(self._prompts)], strict=True)
        text = lambda answer: answer.text if model.tokenizer else " ".join(map(str, answer.tokens))
        return Evaluation({}, [{"prompt": prompt, "text": text(answer), "nfe": answer.nfe} for prompt, answer in pairs])


def _sampler_text(part: WatchPart, model: ModelConfig, config: TrainConfig) -> str:
    """The sampler's text; empty where the model's own defaults hold."""
    if part.sampler or config.command == "indicator":
        return part.sampler or "ni"
    return "leftright" if model.is_causal else "renoise" if model.has_canvas else ""
