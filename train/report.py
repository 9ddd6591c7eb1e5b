"""One page about runs, which needs no other file: `python -m train report DIR DIR --out report.html`."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax import buckets
from dllm_jax.storage import folder_path, write_file
from train.curves import draw, drawable, is_number, metric_names, read_log, read_logs, short_names
from train.losses import LEVELS
from train.objectives import config_of_run
from train.run_dir import (
    DATA_FILE,
    GENERATIONS_FILE,
    RESULT_FILE,
    STARTS_FILE,
    STATE_FOLDER,
    WATCH_SECONDS,
    RunFolder,
    read_settings,
)

REPORT_FILE = "report.html"
_CURVES = ("loss", "cross_entropy", *LEVELS, "accuracy", "reward", "grad_norm", "lr", "tokens_per_second", "mfu")
_NO_RESULT = {"step", "steps", "seconds", WATCH_SECONDS}  # numbers that say nothing about how good a run is
_ANSWERS = 8  # of each run
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222; }}
table {{ border-collapse: collapse; margin-bottom: 1em; }}
td, th {{ border: 1px solid #ddd; padding: .2em .6em; text-align: left; vertical-align: top; }}
td {{ overflow-wrap: anywhere; white-space: pre-wrap; }}
tr.differs {{ background: #fff4d6; }}
.curves svg {{ width: 31%; min-width: 300px; height: auto; }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes a page with the settings, data, curves, last numbers, states and last answers of runs; returns its path.

    Args:
        runs: folders; curves are drawn over each other.
        out: by default `REPORT_FILE` in the first folder.

    Raises:
        DllmError: for a folder without a run or without a log, without matplotlib, and when it cannot be written.
    """
    names, settings = short_names(runs), [_flat(read_settings(run)) for run in runs]
    logs = read_logs(runs)
    curves = (draw(logs, [name], "svg").decode() for name in drawable(_CURVES, metric_names(logs)))
    body = [
        _table(names, _rows(map(_facts, runs, logs.values()))),
        f'<div class="curves">{"".join(svg[svg.index("<svg") :] for svg in curves)}</div>',
        "<h2>Last numbers</h2>",
        _table(names, _rows(map(_last_numbers, logs.values()))),
        *map(_answers, names, runs),
        "<h2>Settings</h2>",
        _table(names, _rows(settings), mark=len(runs) > 1),
    ]
    path = folder_path(runs[0]) / REPORT_FILE if out is None else Path(out)
    write_file(path, _PAGE.format(title=html.escape(", ".join(names)), body="\n".join(body)))
    return path


def _facts(run: str | Path, log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run is and how far it came."""
    config, path = config_of_run(run), folder_path(run)
    data, result = (_read(path / name) for name in (DATA_FILE, RESULT_FILE))
    facts = {
        "objective": config.command,
        "model": config.model.init or config.model.published,
        "data": config.data.source,
        "examples": "no end" if data.get("examples", "") is None else data.get("examples", ""),
        "digest of examples": data.get("digest", ""),
        "steps done": f"{max((line['step'] for line in log), default=0)} of {config.steps}",
        "result": f"weights of step {result['step']}, {result['weights']}" if result else "not written yet",
        "states": "none",
        "peak that mfu is of": next((line["mfu_of"] for line in reversed(log) if "mfu_of" in line), ""),
    }
    found = buckets.list_names(path)
    if STARTS_FILE in found:  # a run by an older version has none
        starts = read_log(run, STARTS_FILE)
        facts["started from step"] = ", ".join(str(line["step"]) for line in starts)
        hardware, versions = starts[-1]["hardware"], starts[-1]["versions"]
        processes = f" in {hardware['processes']} processes" if hardware["processes"] > 1 else ""
        facts["last on"] = f"{hardware['devices']} x {hardware['device']}{processes}"
        facts["last with"] = ", ".join(f"{name} {number}" for name, number in versions.items())
    if STATE_FOLDER in found:
        with RunFolder(config).states(training=False) as states:
            metrics, best = states.metrics, states.best
        score = lambda step: metrics[step].get(config.checkpoint.metric)
        about = lambda step: f"{step}" if score(step) is None else f"{step} ({score(step):.4g})"
        facts["states"] = ", ".join(map(about, metrics))
        if best is not None:
            facts["best state"] = f"{best}, {config.checkpoint.metric} {score(best):.4g}"
    return facts


def _read(path: Path) -> dict[str, Any]:
    """A file of JSON; empty where there is none yet."""
    with buckets.reach(path):
        return dict(json.loads(path.read_text())) if path.is_file() else {}


def _last_numbers(log: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The last value of everything that a log has numbers of."""
    last = {name: value for line in log for name, value in line.items() if is_number(value)}
    return {name: f"{value:.6g}" for name, value in last.items() if name not in _NO_RESULT}


def _answers(name: str, run: str | Path) -> str:
    """The answers to a run's prompts, and to some of its task's problems."""
    there = GENERATIONS_FILE in buckets.list_names(folder_path(run))
    log = read_log(run, GENERATIONS_FILE) if there else []
    if not log:
        return ""
    last = [line for line in log if line["step"] == log[-1]["step"]][:_ANSWERS]
    columns = [key for key in ("prompt", "text", "nfe", "correct") if any(key in line for line in last)]
    rows = {str(number): [line.get(key, "") for key in columns] for number, line in enumerate(last, 1)}
    head = f"<h2>Answers of {html.escape(name)} after step {log[-1]['step']}</h2>"
    return head + _table(columns, rows)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested tables by dotted key."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {prefix + name: value}
    return found


def _rows(columns: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """A row for each name, with its value in every column."""
    columns = list(columns)
    return {name: [column.get(name, "") for column in columns] for name in dict.fromkeys(n for c in columns for n in c)}


def _table(head: Sequence[str], rows: Mapping[str, Sequence[Any]], *, mark: bool = False) -> str:
    """A table of rows by name.

    Args:
        mark: highlight rows whose values differ.
    """
    text = lambda value: html.escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    line = lambda tag, cells: "".join(f"<{tag}>{text(cell)}</{tag}>" for cell in cells)
    made = [f"<tr>{line('th', ['', *head])}</tr>"]
    for name, values in rows.items():
        differs = mark and any(value != values[0] for value in values)
        made.append(f"<tr{' class=differs' if differs else ''}>{line('th', [name])}{line('td', values)}</tr>")
    return f"<table>{''.join(made)}</table>"
