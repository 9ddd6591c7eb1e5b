"""`python -m evals lm`: published settings, or your own, through lm-evaluation-harness."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dllm_jax import DllmError, Model, spec
from dllm_jax.cli.command import console
from dllm_jax.storage import write_file
from dllm_jax.suggestions import did_you_mean
from evals import files, presets, stderr
from evals.flags import add_count, add_distributed, add_model, command, models_of
from evals.models import Models
from evals.presets import Comparison, Preset
from evals.presets.report import problems_of
from evals.token_counts import as_line, method_of

TASKS = Path(__file__).parent / "tasks"
"""Tasks that the harness lacks."""


def add(commands: Any) -> None:
    """The command and its flags."""
    about = "published settings through lm-evaluation-harness, next to the published scores (docs/harness.md)"
    add = command(commands, "lm", _run, about)
    add_model(add)
    add("--preset", action="append", default=[], metavar="NAME", help="or a beginning, llada-base/; repeatable")
    add("--sampler", metavar="SPEC", help="in place of a preset, with --tasks: threshold:threshold=0.9,gen_length=256")
    add("--form", choices=presets.FORMS, help="of prompts: as they are, or chat with examples in one turn or as turns")
    add("--tasks", metavar="A,B", help="the harness's tasks, in place of the preset's")
    add("--out", metavar="DIR", help="write results, tables and answers there; the same command resumes")
    add_running(add)
    add_distributed(add)


def add_running(add: Any) -> None:
    """The flags of everything that runs presets."""
    add("--include-path", action="append", default=[], metavar="DIR", help="folder of more tasks; repeatable")
    add("--limit", type=int, metavar="N", help="of each task the first N documents")
    add("--set", metavar="NAME=VALUE,...", help="changes the preset or its sampler, such as gen_length=128")
    add("--log-samples", action="store_true", help="write every document with its answers, too")
    add("--batch-size", type=int, default=16, metavar="N", help="prompts, or masked copies, together (default: 16)")
    add("--seed", type=int, default=0, metavar="N", help="of the random numbers (default: 0)")
    add_count(add)
    add("--unsafe-code", action="store_true", help="let tasks run generated code that is not confined")


@dataclasses.dataclass(frozen=True)
class PresetRun:
    """The outcome of a preset.

    Attributes:
        changes: how it differs from the published setting.
        model: what was run.
        results: the harness's.
        counts: as `DllmLM.counts`.
    """

    preset: Preset
    changes: Sequence[str]
    model: Model
    results: Mapping[str, Any]
    counts: Mapping[str, Any]

    @property
    def comparison(self) -> Comparison | None:
        """Its scores next to the published ones; None for other tasks than the preset's."""
        known = self.results["results"].keys() | self.results.get("groups", {}).keys()
        if not self.preset.metrics or self.preset.task not in known:
            return None
        return presets.comparison(self.preset, self.results, self.changes, self.model)


def _run(options: argparse.Namespace) -> None:
    if options.model is None:
        raise DllmError("no model was named; pass --model DIR_OR_NAME")
    settings = _settings(options)
    folder = None if options.out is None else files.make_folder(options.out)
    tasks = read_tasks(options, [preset for preset, _ in settings])
    models = models_of(options)
    found = []
    for preset, changes in settings:
        lines = [presets.describe_preset(preset), *(f"modified: {change}" for change in changes)]
        print("\n".join(lines), end="\n\n", flush=True)
        found.append(evaluate_preset(models, tasks, preset, changes, folder, options))
        if folder is not None and options.processes.first:
            write_preset(folder, found[-1])
            write_results(folder, found)
    _print(found, console())
    if folder is not None:
        print(f"results.json, table.txt and a folder for each preset in {folder}")


def _settings(options: argparse.Namespace) -> list[tuple[Preset, list[str]]]:
    """The presets to run, and how each differs from the published setting."""
    changes = parse_changes(options)
    changes |= {name: value for name, value in (("task", options.tasks), ("limit", options.limit)) if value is not None}
    if options.sampler is not None and options.preset:
        raise DllmError("--sampler has no effect with --preset; change a preset by --set")
    if not options.preset and options.tasks is None:
        raise DllmError(
            "nothing was chosen; pass --preset NAME, or --tasks NAME, with --sampler SPEC where they generate"
        )
    if not options.preset:
        return [presets.select(None, options.sampler, options.form, changes)]
    names = [name for pattern in options.preset for name in _names_of(pattern)]
    return [presets.select(name, None, options.form, changes) for name in dict.fromkeys(names)]


def parse_changes(options: argparse.Namespace) -> dict[str, str]:
    """What `--set` changes, as it is written."""
    return spec.parse_options(options.set or "", "--set")


def _names_of(pattern: str) -> list[str]:
    """The name itself, or all names that begin with it if it ends with a slash."""
    found = [name for name in presets.presets() if pattern.endswith("/") and name.startswith(pattern)]
    return found or [presets.find(pattern).name]


def read_tasks(options: argparse.Namespace, chosen: Sequence[Preset]) -> Any:
    """The harness's task manager, with the presets' tasks. It reads its own thousands of files, which takes a while,
    only if they are needed. `--unsafe-code` holds from here on.

    Raises:
        DllmError: for an unknown task or count, and without the harness.
    """
    for kind in options.counts:
        method_of(kind, sys.maxsize)
    if options.unsafe_code:
        os.environ |= {"HF_ALLOW_CODE_EVAL": "1", "DLLM_UNSAFE_PROGRAMS": "1"}  # for the harness's tasks and for ours
    from lm_eval.tasks import TaskManager

    import evals.harness.model  # noqa: F401 - says what to install

    paths = [str(path) for path in (TASKS, *map(Path, options.include_path)) if path.is_dir()]
    names = {name for preset in chosen for name in preset.task.split(",") if not Path(name).is_file()}
    found = TaskManager(include_path=paths, include_defaults=False)
    if not names <= set(found.all_subtasks):
        with Console(stderr=True).status("reading the harness's tasks", spinner="line"):
            found = TaskManager(include_path=paths)
    if unknown := sorted(names - set(found.all_tasks)):
        advice = did_you_mean(unknown[0], found.all_tasks, "name its folder by --include-path")
        raise DllmError(f"no task is called {unknown[0]!r}; {advice}")
    return found


def evaluate_preset(
    models: Models,
    tasks: Any,
    preset: Preset,
    changes: Sequence[str],
    folder: Path | None,
    options: argparse.Namespace,
) -> PresetRun:
    """Runs a preset on the model of `options.model`.

    Args:
        models: where that is loaded, once for several presets.
        tasks: as `read_tasks` gives them.
        changes: how the preset differs from the published setting.
        folder: where answers are kept; None keeps none.
        options: the flags of `add_running` and `add_distributed`.

    Raises:
        DllmError: for everything that goes wrong in the harness, and as `dllm_jax.load`.
    """
    from lm_eval import simple_evaluate

    from evals.harness.forms import arguments_of
    from evals.harness.model import DllmLM

    lm = DllmLM(
        models.load(options.model),
        preset,
        batch_size=options.batch_size,
        answers=None if folder is None else folder / "answers",
        seed=options.seed,
        changes=changes,
        counts=options.counts,
        processes=options.processes,
        load=models.load,
    )
    try:
        results = simple_evaluate(
            lm,
            tasks=preset.task.split(","),
            num_fewshot=preset.shots,
            batch_size=options.batch_size,
            limit=preset.limit,
            system_instruction=preset.system,
            task_manager=tasks,
            log_samples=options.log_samples,
            confirm_run_unsafe_code=options.unsafe_code,
            **arguments_of(preset.form),
        )
    except DllmError:
        raise
    except (AssertionError, ValueError, KeyError, FileNotFoundError) as error:
        raise DllmError(f"lm-evaluation-harness: {error}") from error
    for task, shots in results["n-shot"].items():
        if preset.shots not in (None, shots):
            print(f"warning: task {task} was run with {shots} examples, not {preset.shots}, as its own file says")
    return PresetRun(preset, changes, lm.model, results, lm.counts())


def scores(found: Sequence[PresetRun]) -> Table:
    """Every metric of every task, with its standard error."""
    table = Table("preset", "task", "shots", "metric", "score", "modified", box=box.SIMPLE)
    for one in found:
        for row in score_rows(one):
            scale = 100 if 0 <= row["score"] <= 1 else 1  # shares in percent, others as they are
            error = "" if row["stderr"] is None else f" ± {scale * row['stderr']:.1f}"
            shots = "" if row["shots"] is None else str(row["shots"])
            score = f"{scale * row['score']:.2f}{error}"
            table.add_row(one.preset.name, row["task"], shots, row["metric"], score, ", ".join(one.changes))
    return table


def score_rows(one: PresetRun) -> list[dict[str, Any]]:
    """The numbers of a preset: task, metric as the harness calls it, score, stderr (None for none) and shots."""
    found = []
    for task, numbers in {**one.results["results"], **one.results.get("groups", {})}.items():
        for metric, score in numbers.items():
            name, comma, kind = metric.partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(score, (int, float)):
                continue
            error = numbers.get(f"{name}_stderr,{kind}")
            error = error if isinstance(error, float) else None
            if error == 0 and 0 <= score <= 1 and (n := problems_of(one.results, task)):
                error = stderr.of_share(score, n)  # lm-eval knows no error where all answers are right, or all wrong
            shots = one.results["n-shot"].get(task)
            found.append({"task": task, "metric": metric, "score": score, "stderr": error, "shots": shots})
    return found


def report_of(one: PresetRun) -> dict[str, Any] | None:
    """A report as a sweep has it, for `python -m evals aup`: the preset's first metric, or the task's. None for
    likelihoods, for several tasks, and for a metric that is no share."""
    metrics = [row for row in score_rows(one) if row["task"] == one.preset.task]
    named = [row for name in one.preset.metrics for row in metrics if row["metric"] == name]
    if "texts" not in one.counts or not metrics:
        return None
    first, n = (named or metrics)[0], one.counts["texts"]
    accuracy, error = first["score"], first["stderr"]
    if not 0 <= accuracy <= 1:
        return None
    return {
        "model": one.model.name,
        "task": one.preset.task,
        "preset": one.preset.name,
        "sampler": one.preset.sampler,
        "metric": first["metric"],
        "n": n,
        "accuracy": accuracy,
        "accuracy_stderr": error or stderr.of_share(accuracy, n),
        **one.counts,
    }


def speeds(found: Sequence[PresetRun]) -> Table:
    """Forwards and tokens of every preset."""
    table = Table("preset", "texts", "NFE", "tokens", "tokens/forward", "tokens/s", "likelihoods", box=box.SIMPLE)
    for one in found:
        counts = one.counts
        texts = ["", "", "", "", ""]
        if "texts" in counts:
            nfe = f"{counts['nfe']:.1f} ± {counts['nfe_stderr']:.1f}"
            speed = [f"{counts[name]:.2f}" for name in ("tokens_per_forward", "tokens_per_second")]
            texts = [str(counts["texts"]), nfe, f"{counts['tokens']:.1f}", *speed]
        table.add_row(one.preset.name, *texts, str(counts.get("likelihoods", "")))
    return table


def folder_of(preset: Preset, folder: Path) -> Path:
    """Where a preset's own files lie in a folder of results."""
    return folder / preset.name.replace("/", "-")


def write_preset(folder: Path, one: PresetRun) -> None:
    """Writes the harness's own results of a preset, and its samples, in the preset's folder."""
    own = files.make_folder(folder_of(one.preset, folder))
    for task, samples in one.results.get("samples", {}).items():
        write_file(own / f"samples_{task}.jsonl", "".join(_as_json(sample) for sample in samples))
    scores_alone = {name: value for name, value in one.results.items() if name != "samples"}
    write_file(own / "results.json", _as_json(scores_alone, indent=1))


def _as_json(value: Any, indent: int | None = None) -> str:
    from lm_eval.utils import handle_non_serializable

    return json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False) + "\n"


def write_results(folder: Path, found: Sequence[PresetRun]) -> None:
    """Writes the summary of everything so far, so that a killed run loses nothing."""
    summaries = [
        {
            "preset": dataclasses.asdict(one.preset),
            "preset_hash": one.preset.hash,
            "changes": list(one.changes),
            "scores": score_rows(one),
            "comparison": None if (compared := one.comparison) is None else compared.as_json(),
            "counts": dict(one.counts),
        }
        for one in found
    ]
    reports = [report for one in found if (report := report_of(one)) is not None]
    write_file(folder / "results.json", _as_json({"presets": summaries, "reports": reports}, indent=1))
    with (wide := Console(width=160, color_system=None)).capture() as text:
        _print(found, wide)
    write_file(folder / "table.txt", text.get())


def _print(found: Sequence[PresetRun], to: Console) -> None:
    for one in found:
        if (compared := one.comparison) is not None:
            to.print(compared.table())
    to.print(scores(found))
    to.print(speeds(found))
    for one in found:
        for name, counted in one.counts.get("compat_count", {}).items():
            to.print(f"{one.preset.name} as {name} counts: {as_line(counted)}", markup=False, highlight=False)
