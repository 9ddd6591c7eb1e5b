"""`python -m evals reproduce PAPER`: every published number of a paper that has a preset, with our own next to it.

out/index.md           the page: published and own numbers side by side, and the command of every row
out/PRESET/            as of `python -m evals lm --out`: the harness's results and the answers
out/PRESET/row.json    the row of the page; the same command resumes with the presets that have none
"""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax.checkpoints import checkpoint
from dllm_jax.errors import DllmError
from dllm_jax.families import FAMILIES
from dllm_jax.storage import write_file
from dllm_jax.suggestions import did_you_mean
from evals import files, presets
from evals.flags import add_distributed, command, models_of
from evals.harness.command import add_running, evaluate_preset, folder_of, parse_changes, read_tasks, write_preset
from evals.presets import Preset
from evals.presets.preset import GIVEN

ROW = "row.json"
PAGE = "index.md"

Row = dict[str, Any]
"""A preset on the page: `preset`, `comparison` (`Comparison.as_json`), `counts`, and what it was run with: `hash`,
`changes`, `model`, `dtype`, `quantize`."""


def add(commands: Any) -> None:
    """The command and its flags."""
    about = "run every preset of a paper, and write a page with its published numbers and ours (docs/harness.md)"
    add = command(commands, "reproduce", _run, about)
    add("paper", metavar="PAPER", help=f"a family of presets: {', '.join(papers())}")
    name = "checkpoint of a published model, by the last part of its repository; repeatable"
    add("--model", action="append", default=[], dest="folders", metavar="NAME=DIR", help=f"{name}. Default: its name")
    add("--only", metavar="TEXT", help="the presets whose names contain this, such as gsm8k")
    add("--verifier", metavar="DIR", help="of APD's presets")
    add("--indicator", metavar="DIR", help="of NI's presets")
    add("--plan", action="store_true", help="print the commands of every row, and run nothing")
    add("--dtype", help="bfloat16, float16 or float32; as stored by default")
    add("--quantize", metavar="BITS", help="int8 or int4: bits of kernels; as stored by default")
    add("--mesh", metavar="AXES", help="devices to split prompts and model over, such as data=8 or data=2,tensor=4")
    add("--out", metavar="DIR", help="folder of the page and of every result; the same command resumes")
    add_running(add)
    add_distributed(add)


def papers() -> list[str]:
    """Families of presets: what stands before the first slash of their names."""
    return list(dict.fromkeys(name.partition("/")[0] for name in presets.presets()))


@dataclasses.dataclass(frozen=True)
class Job:
    """A preset to run.

    Attributes:
        preset, changes: as `presets.select` gives them.
        model: folder or name of the checkpoint; None where there is none.
        missing: what keeps it from running, in a sentence with the remedy; "" for nothing.
        dtype, quantize: of the weights; None as they are stored.
        command: what runs it alone.
    """

    preset: Preset
    changes: Sequence[str]
    model: str | None
    missing: str
    dtype: str | None
    quantize: str | None
    command: str

    @property
    def identity(self) -> Row:
        """What the row of an earlier run must have in common with it."""
        same = {"hash": self.preset.hash, "changes": list(self.changes), "model": self.model}
        return same | {"dtype": self.dtype, "quantize": self.quantize}


def plan(paper: str, options: argparse.Namespace) -> list[Job]:
    """What the command runs, in the order of the presets, those of one model together.

    Raises:
        DllmError: for an unknown paper, model or change, and a text that no preset contains.
    """
    named = [one for name, one in presets.presets().items() if name.startswith(f"{paper}/")]
    if not named:
        raise DllmError(f"no paper is called {paper!r}; {did_you_mean(paper, papers(), 'see --help')}")
    chosen = [one for one in named if options.only is None or options.only in one.name]
    if not chosen:
        raise DllmError(f"no preset of {paper} contains {options.only!r}; python -m evals presets {paper}/ lists them")
    folders = _folders(options.folders, named)
    models, changes = list(dict.fromkeys(one.model for one in chosen)), parse_changes(options)
    return [_job(one, folders, changes, options) for one in sorted(chosen, key=lambda one: models.index(one.model))]


def _folders(texts: Sequence[str], named: Sequence[Preset]) -> dict[str, str]:
    """Repository's last part -> folder, of `--model NAME=DIR`."""
    known = list(dict.fromkeys(short_name(one.model) for one in named))
    found = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or not folder:
            raise DllmError(f"--model {text!r} names no folder; write {known[0]}=DIR")
        if name not in known:
            raise DllmError(f"no preset of this paper is of a model {name!r}; they are of {', '.join(known)}")
        found[name] = folder
    return found


def short_name(model: str) -> str:
    """What `--model` calls a published model: the last part of its repository, or of the last of several."""
    return model.rpartition("/")[2]


def _job(preset: Preset, folders: Mapping[str, str], changes: Mapping[str, str], options: argparse.Namespace) -> Job:
    name = short_name(preset.model)
    model = folders.get(name) or _converted(preset.model)
    wanted = {one: getattr(options, one) for one in GIVEN if preset.kind == "generate" and one in preset.spec.types}
    missing = [f"{preset.model} is not here; {_how_to_make(preset.model)}, or pass --model {name}=DIR"] * (not model)
    missing += [f"it needs --{one} DIR" for one, folder in wanted.items() if folder is None]
    settings = {**{one: folder for one, folder in wanted.items() if folder is not None}, **changes}
    limit = {} if options.limit is None else {"limit": options.limit}
    own, told = presets.select(preset.name, None, None, settings | limit)
    words = ["python", "-m", "evals", "lm", "--model", model or f"{name}-DIR", "--preset", preset.name]
    given = {**limit, "dtype": options.dtype, "quantize": options.quantize}
    words += [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]
    words += ["--set", ",".join(f"{key}={value}" for key, value in settings.items())] if settings else []
    command = shlex.join([*words, "--out", options.out or "DIR"])
    return Job(own, told, model, "; ".join(missing), options.dtype, options.quantize, command)


def _converted(repository: str) -> str | None:
    """The name of a published model that was converted already."""
    return next((name for name in _published(repository) if checkpoint.find_or_none(name)), None)


def _published(repository: str) -> list[str]:
    return [name for one in FAMILIES.values() for name, it in one.published.items() if it.repository == repository]


def _how_to_make(model: str) -> str:
    """The commands that convert a published model."""
    base, _, adapter = model.partition(" + ")
    name = next(iter(_published(base)), None)
    if name is None:
        return "convert it"
    made = f"python -m convert published {name}"
    if not adapter:
        return made
    return f"{made}, then python -m convert d2f-lora --source {adapter} --base {name} --out {short_name(adapter)}"


def _run(options: argparse.Namespace) -> None:
    options.model = None  # every preset names its own
    jobs = plan(options.paper, options)
    if options.plan:
        print("\n".join(f"# {job.missing}\n{job.command}" if job.missing else job.command for job in jobs))
        return
    if options.out is None:
        raise DllmError("no folder was named; pass --out DIR, or --plan to print the commands")
    if all(job.missing for job in jobs):
        raise DllmError(f"none of {len(jobs)} presets can run: {jobs[0].missing}")
    folder, rows = files.make_folder(options.out), dict[str, Row]()
    for job, row in _rows(jobs, folder, options):
        rows[job.preset.name] = row
        if options.processes.first:
            write_file(folder / PAGE, page(options.paper, jobs, rows))
    failed = [row for row in rows.values() if "failed" in row]
    print(f"{len(rows) - len(failed)} of {len(jobs)} presets measured; {PAGE} and a folder for each in {folder}")
    if failed:
        raise DllmError(f"{len(failed)} presets failed, the first {failed[0]['preset']}: {failed[0]['failed']}")


def _rows(jobs: Sequence[Job], folder: Path, options: argparse.Namespace) -> Iterator[tuple[Job, Row]]:
    """The row of every preset that can run; those of an earlier run come first, and what fails does not stop others."""
    todo = []
    for job in jobs:
        if (row := _read_row(job, folder)) is not None:
            yield job, row
        elif not job.missing:
            todo.append(job)
    tasks = read_tasks(options, [job.preset for job in todo]) if todo else None
    model, models = None, models_of(options)
    for number, job in enumerate(todo, start=1):
        print(f"{job.preset.name} ({number} of {len(todo)})", flush=True)
        if job.model != model:  # the one before leaves memory
            model, models = job.model, models_of(options)
        about = {"preset": job.preset.name, **job.identity}
        arguments = argparse.Namespace(**{**vars(options), "model": model})
        try:
            found = evaluate_preset(models, tasks, job.preset, job.changes, folder, arguments)
        except DllmError as error:
            print(f"failed: {error}", flush=True)
            yield job, about | {"failed": str(error)}
            continue
        compared = None if found.comparison is None else found.comparison.as_json()
        row = about | {"comparison": compared, "counts": dict(found.counts)}
        if options.processes.first:
            write_preset(folder, found)
            write_file(folder_of(job.preset, folder) / ROW, files.as_json(row))
        yield job, row


def _read_row(job: Job, folder: Path) -> Row | None:
    """The row that an earlier run wrote with the same settings and weights."""
    try:
        row: Row = json.loads((folder_of(job.preset, folder) / ROW).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return row if job.identity.items() <= row.items() else None


COLUMNS = "preset", "status", "metric", "published", "ours", "", "forwards", "tokens per forward", "tokens per second"
COUNTED = {"nfe": "nfe", "tpf": "tokens_per_forward", "tps": "tokens_per_second"}
"""Field of `PublishedScore` -> ours, of the last three columns."""

MEANS = """Scores are in percent, ours with its standard error. "Within" is at most 2 standard errors of the difference
and 1 point away. Forwards, tokens per forward and tokens per second are published / ours; ours count tokens before the
first end, and speeds are of different hardware. Status A is complete in published code, B has one or two inferred
fields, C has more."""


def page(paper: str, jobs: Sequence[Job], rows: Mapping[str, Row]) -> str:
    """The page in Markdown: a table of all presets, measured or not, why those are missing, and the commands."""
    row_of = lambda job: rows.get(job.preset.name, {})
    table = [COLUMNS, ("---",) * len(COLUMNS), *(cells for job in jobs for cells in _cells(job, row_of(job)))]
    measured = [row["comparison"]["rows"] for row in rows.values() if row.get("comparison")]
    told = [score["told"] for scores in measured for score in scores if score["published"]]
    judged = [one for one in told if one == "within" or one.startswith(("above", "below"))]  # by `presets.comparison`
    within = f"{judged.count('within')} of {len(judged)} judged scores are within"
    lines = [f"# {paper}: published numbers and ours", "", MEANS, "", *(f"| {' | '.join(cells)} |" for cells in table)]
    lines += ["", f"{len(measured)} of {len(jobs)} presets are measured; {within}.", "", "## Notes", ""]
    lines += [f"* `{job.preset.name}`: {note}" for job in jobs for note in _notes(job, row_of(job))]
    return "\n".join([*lines, "", "## Commands", "", "```sh", *(job.command for job in jobs), "```", ""])


def _cells(job: Job, row: Row) -> Iterator[list[str]]:
    """The lines of a preset: one for each of its scores."""
    outcome, counts = "failed" if "failed" in row else "not run", row.get("counts", {})
    unmeasured: list[Row] = [{"published": dataclasses.asdict(one)} for one in job.preset.published]
    for score in row["comparison"]["rows"] if row.get("comparison") else unmeasured:
        theirs, ours, error = score["published"] or {}, score.get("ours"), score.get("stderr")
        own = "" if ours is None else f"{ours:.1f}" if error is None else f"{ours:.1f} ± {error:.1f}"
        value = f"{theirs['value']:g} ({theirs['what']})" if theirs else ""
        metric = score.get("metric") or theirs.get("metric", "")
        pairs = [(theirs.get(name), counts.get(field)) for name, field in COUNTED.items()]
        speeds = ["" if pair == (None, None) else " / ".join(map(_number, pair)) for pair in pairs]
        yield [f"`{job.preset.name}`", job.preset.status, metric, value, own, score.get("told", outcome), *speeds]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _notes(job: Job, row: Row) -> Iterator[str]:
    if job.changes:
        yield f"modified: {', '.join(job.changes)}"
    if not row and job.missing:
        yield job.missing
    if "failed" in row:
        yield str(row["failed"])
    yield from job.preset.warnings
