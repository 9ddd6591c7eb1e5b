"""What can be wrong with a preset, found without a model and without a network."""

import functools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from dllm_jax import Model
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import PUBLISHED, REPOSITORIES
from dllm_jax.indicator import Indicator, IndicatorConfig
from evals.presets.preset import Preset
from samplers.config.sampler_config import EVALUATION_DEFAULTS
from samplers.loops.verifier import Verifier

TASKS_FOLDER = Path(__file__).parents[1] / "harness" / "tasks"
"""Our own tasks."""

CHECKPOINTS = {repository: name for name, repository in REPOSITORIES.items()} | {
    "inclusionAI/LLaDA-MoE-7B-A1B-Instruct-TD": "llada-moe-7b-a1b-instruct"
}
"""Checkpoint -> its size, as `dllm_jax.published_config` has it."""


def config_of(preset: Preset) -> ModelConfig | None:
    """The config of the checkpoint that a preset's numbers are of, adapters aside; None where it is not known."""
    size = CHECKPOINTS.get(preset.model.partition(" + ")[0])
    return None if size is None else PUBLISHED[size]


@functools.cache
def known_tasks() -> Mapping[str, frozenset[str]]:
    """The names of lm-eval's tasks and of ours, and what each reports, by its file.

    Raises:
        DllmError: where lm-eval is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise DllmError("the tasks are lm-eval's; install it by pip install 'dllm_jax[lm-eval]'") from None
    own = str(TASKS_FOLDER) if TASKS_FOLDER.is_dir() else None
    return {name: _metrics_of(entry.cfg or {}) for name, entry in TaskManager(include_path=own).task_index.items()}


def _metrics_of(config: Mapping[str, Any]) -> frozenset[str]:
    """The metrics of a task or a group, as the results name them; none of what has none of its own, such as a tag."""
    listed = lambda value: value if isinstance(value, list) else [value]
    found = listed(config.get("aggregate_metric_list" if "group" in config else "metric_list") or [])
    own = [one["name"] for one in config.get("filter_list") or [{"name": "none"}]]
    filters = lambda one: listed(one.get("filter_list", "none")) if "group" in config else own
    return frozenset(f"{name},{which}" for one in found for name in _names_of_metric(one) for which in filters(one))


def _names_of_metric(metric: Mapping[str, Any]) -> list[str]:
    """The names under which a metric is reported: a function's own, or one for each k."""
    if "k" in metric:
        return [f"pass@{k}" for k in metric["k"]]
    return [str(metric["metric"]).rpartition(".")[2]]


def check(preset: Preset, tasks: Mapping[str, Collection[str]] | None = None) -> list[str]:
    """A sentence for everything that is wrong with a preset.

    Args:
        tasks: tasks there are, with their metrics; `known_tasks` by default, which takes lm-eval half a minute.
    """
    tasks = known_tasks() if tasks is None else tasks
    found = [*_of_sampler(preset)] if preset.kind == "generate" else []
    if preset.task not in tasks:
        where = f"evals/harness/tasks/{preset.task}.yaml" if preset.task.startswith("dllm_") else "lm-eval"
        found.append(f"there is no task {preset.task!r} in {where}")
    elif unknown := sorted(set(preset.metrics) - set(tasks[preset.task])):
        metrics = ", ".join(sorted(tasks[preset.task])) or "nothing of its own"
        found.append(f"task {preset.task} does not report {unknown[0]!r}; it reports {metrics}")
    if config_of(preset) is None:
        found.append(f"model {preset.model!r} is unknown; its size belongs into evals/presets/checks.py")
    found += [] if preset.metrics else ["no metric is named; write what lm-eval reports, such as exact_match,none"]
    return [f"{preset.name}: {sentence}" for sentence in (*found, *_of_numbers(preset))]


def _of_sampler(preset: Preset) -> Iterable[str]:
    """Builds the sampler for a model without weights, with a verifier or an indicator of the right shapes."""
    config = config_of(preset) or PUBLISHED["llada-8b-instruct"]
    try:
        sampler = preset.spec
        found = sampler.over(EVALUATION_DEFAULTS)
        if "gen_length" not in found.options:
            yield "the sampler says no gen_length"
            return
        unmade = {"verifier": _verifier, "indicator": _indicator}
        given = {name: make(config) for name, make in unmade.items() if name in found.owners}
        model = Model(config, {}, None, preset.model)
        built = sampler.with_options(**given).build(model)
    except DllmError as error:
        yield str(error)
        return
    if built.gen_length % built.width:
        yield f"gen_length {built.gen_length} is no multiple of block_length {built.width}"
    longest = config.max_length - built.gen_length
    if (preset.max_prompt or 1) > longest:
        yield f"a prompt and gen_length {built.gen_length} do not fit the model's {config.max_length} positions"


def _verifier(_: ModelConfig) -> Verifier:
    return Verifier(Model(PUBLISHED["qwen2.5-0.5b"], {}, None, "verifier").denoiser)


def _indicator(config: ModelConfig) -> Indicator:
    return Indicator(IndicatorConfig(hidden_dim=config.embed_dim, embed_dim=config.embed_dim), {})


def _of_numbers(preset: Preset) -> Iterable[str]:
    for number in preset.published:
        if not 0 <= number.value <= 100:
            yield f"the published {number.value:g} is no percentage"
        if number.metric and number.metric not in preset.metrics:
            yield f"the published {number.value:g} is of {number.metric!r}, which is not among the preset's metrics"
        for name in ("nfe", "tpf", "tps"):
            value = getattr(number, name)
            if value is not None and not 0 < value < math.inf:
                yield f"the published {name} {value:g} is no positive number"
        if not number.source or not number.what:
            yield f"the published {number.value:g} has no source"
        by = re.match(r"reproduced by (?!a user|users)([^ ,]+)", number.what)
        if by and by[1] not in number.source:
            yield f"the published {number.value:g} was {number.what}, and its source is {number.source}; name {by[1]}'s"
        if number.tps is not None and not number.hardware and preset.status == "A":
            yield f"the published {number.tps:g} tokens per second are of no hardware"
