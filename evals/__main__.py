"""Scores samplers on verifiable tasks.

    python -m evals run --model DIR --task word-problems --sampler threshold:threshold=0.9,cache=dual,block_length=16
    python -m evals sweep --model DIR --task sudoku --sampler 'eb:gamma=0.01|0.1|1' --sampler 'topk:k=1|2|4' --out DIR
    python -m evals sweep --task word-problems --sampler 'd2f:threshold=0.7|0.9@STUDENT' --sampler topk@BASE --out DIR
    python -m evals figure eb-maze --model DIR --out DIR
    python -m evals figure apd --model DREAM --verifier AR --out DIR
    python -m evals figure d2f --model TEACHER --student STUDENT --ar AR --out DIR
    python -m evals figure ni --model DIR --indicator DIR --indicator DIR --out DIR
    python -m evals compare --model word-problems --task word-problems --index 3
    python -m evals decompose --model DIR --task sudoku --sampler 'topk:k=1|4' --sampler 'eb:gamma=0.1|1' --out DIR
    python -m evals decide --model DIR --task word-problems:wording=fields --gamma 0.1 --joint --out DIR
    python -m evals oracle --model DIR --task sudoku --sampler threshold:threshold=0.9
    python -m evals trajectories --model DIR --task maze --sampler topk --n 1000 --out DIR
    python -m evals indicator --model DIR --indicator DIR --trajectories DIR --out DIR
    python -m evals quantize --model DIR --task maze:size=4 --out DIR
    python -m evals tune --model DIR --task sudoku --floor 0.99 --out DIR
    python -m evals show --task maze:size=5 --split train
    python -m evals run --model DIR --task text:file=questions.jsonl,score=number --sampler threshold --count d3llm
    python -m evals aup --results DIR --task gsm8k --out DIR
    python -m evals tokenizer --task sudoku --out DIR
    python -m evals presets [NAME] [--check] [--json]
    python -m evals lm --model DIR --preset llada-base/gsm8k --out DIR

Examples come from the test split, which no generator uses for training.
"""

import argparse
import contextlib
import functools
import logging
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from dllm_jax import DllmError, Model
from dllm_jax.cli.command import Parser, console, run_printing
from dllm_jax.indicator import load_indicator
from dllm_jax.storage import write_file
from evals import decisions, decomposition, files, leaderboard, plots, quantize, stderr, trajectories
from evals.distributed import meeting
from evals.figures import draw_figure, samplers_of, summarize_figure
from evals.flags import add_batch, add_count, add_distributed, add_model, add_task, command, models_of
from evals.harness import command as harness
from evals.harness import reproduce
from evals.indicator import score_indicator
from evals.models import Models
from evals.oracle import OracleReport, oracle
from evals.paper_figures import FIGURES
from evals.presets import command as presets
from evals.runner import USUAL, Report, run, run_traced
from evals.sampler import SamplerConfig, all_samplers, parse_sampler
from evals.sweeps import Sweep, pareto_plot, sweep, write_tables
from evals.tasks import SPLITS, DrawnTask, Task, WordProblems, make_task
from evals.tasks.base import check_split
from evals.tasks.word_problems import train_tokenizer
from evals.token_counts import as_line
from evals.tune import command as tune
from samplers import Generation
from samplers.config.sampler_config import EVALUATION_DEFAULTS
from samplers.viewer.view import check_path, view_of

COMPARED = (
    "topk",
    "topk:k=2",
    "threshold:threshold=0.9",
    "eb:gamma=0.1",
    "factor:factor=1.0",
    "threshold:threshold=0.9,cache=dual,block_length=8",
)
NUMBERS = 40
"""Columns of a terminal that the table of `compare` needs besides samplers and answers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; 0 when it worked, 2 after a mistake, which is printed as one sentence."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what it raises as well
    return run_printing(lambda: _run_command(arguments), "use a smaller --batch-size")


def _run_command(arguments: Sequence[str] | None) -> None:
    options = command_line().parse_args(arguments)
    with meeting(getattr(options, "distributed", None)) as options.processes:
        options.command(options)


def command_line() -> argparse.ArgumentParser:
    """The options, for the command itself and for `dllm completion`."""
    parser = Parser(
        prog="python -m evals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    _add_run(commands)
    _add_sweep(commands)
    _add_figure(commands)
    _add_compare(commands)
    _add_oracle(commands)
    _add_indicator(commands)
    _add_show(commands)
    _add_tokenizer(commands)
    harness.add(commands)
    reproduce.add(commands)
    presets.add(commands)
    leaderboard.add(commands)
    tune.add(commands)
    trajectories.add(commands)
    quantize.add(commands)
    decomposition.add(commands)
    decisions.add(commands)
    return parser


def _add_run(commands: Any) -> None:
    add = command(commands, "run", _run, "score one sampler")
    _add_scoring(add)
    add_count(add)
    add_distributed(add)


_UNSET = f"Unset: {', '.join(f'{k}={v}' for k, v in EVALUATION_DEFAULTS.options.items())}, one block"


def _add_scoring(add: Any) -> None:
    _add_measuring(add)
    add_task(add)
    add(
        "--sampler",
        required=True,
        action="append",
        metavar="SPEC",
        help=f"RULE or PRESET, with options as in eb:gamma=0.1; @DIR is its model. {_UNSET}",
    )
    add("--json", action="store_true", help="print the whole report as JSON")
    add("--results", metavar="FILE", help="write one JSON line per example")


def _add_sweep(commands: Any) -> None:
    add = command(commands, "sweep", _sweep, "score many samplers; write results.json, results.csv and pareto.png")
    _add_measuring(add)
    add_task(add)
    add("--sampler", action="append", default=[], metavar="SPEC", help="as in run, with lists: eb:gamma=0.1|1")
    add_count(add)
    add_distributed(add)
    add("--grid", metavar="FILE", help="TOML with [[sampler]] tables: rule, and options as values or lists")
    add("--out", required=True, metavar="DIR", help="folder of the results")


def _add_figure(commands: Any) -> None:
    about = "a paper's figure: results.json, results.csv and the plot"
    parser = commands.add_parser("figure", help=about, description=about, allow_abbrev=False)
    chosen = parser.add_subparsers(required=True, metavar="FIGURE", parser_class=Parser)
    for name, figure in FIGURES.items():
        add = command(chosen, name, functools.partial(_figure, name), figure.about)
        _add_measuring(add, n=figure.n)
        add("--task", default=figure.task, metavar="TASK", help=f"{figure.task_name} (default: {figure.task})")
        add("--out", required=True, metavar="DIR", help="folder of the results")
        for flag, how in figure.options.items():
            add(flag, **how)


def _add_compare(commands: Any) -> None:
    add = command(commands, "compare", _compare, "answer one example by several samplers")
    add_model(add)
    _add_example(add, "test")
    add("--sampler", action="append", default=[], metavar="SPEC", help="as in run, with lists; by default a choice")
    add("--save-view", metavar="FILE", help="write the canvases side by side: .html, .gif or .png (docs/viewer.md)")


def _add_oracle(commands: Any) -> None:
    about = "how few forwards would keep a sampler's trajectories as they are, or their tokens alone"
    _add_scoring(command(commands, "oracle", _oracle, about))


def _add_indicator(commands: Any) -> None:
    about = "precision and recall of a trained indicator: precision_recall.csv and .png"
    add = command(commands, "indicator", _indicator, about)
    add_model(add)
    add("--indicator", required=True, metavar="DIR", help="folder that python -m train indicator wrote")
    add("--trajectories", required=True, metavar="DIR", help="of python -m evals trajectories --split validation")
    add("--out", required=True, metavar="DIR", help="folder of the results")
    add("--precision", type=float, default=0.98, metavar="P", help="to find a threshold for, in (0, 1] (default: 0.98)")
    add("--n", type=int, metavar="N", help="trajectories; by default all")
    add("--batch-size", type=int, default=64, metavar="N", help="trajectories per forward (default: 64)")
    add("--seed", type=int, default=0, metavar="N", help="of the states (default: 0)")


def _add_show(commands: Any) -> None:
    add = command(commands, "show", _show, "print an example")
    _add_example(add, "train")


def _add_example(add: Any, split: str) -> None:
    add_task(add)
    add("--split", default=split, metavar="SPLIT", help=f"{', '.join(SPLITS)} (default: {split})")
    add("--index", type=int, default=0, metavar="N", help="number of the example (default: 0)")


def _add_tokenizer(commands: Any) -> None:
    add = command(commands, "tokenizer", _tokenizer, "write a task's tokenizer, for the folder of a checkpoint")
    add_task(add)
    add("--out", required=True, metavar="DIR", help="folder of tokenizer.json and tokenizer_config.json")
    add("--vocab-size", type=int, metavar="N", help="train a new one for word problems, with at most this many tokens")


def _add_measuring(add: Any, n: int | None = None) -> None:
    add_model(add)
    add("--split", default="test", metavar="SPLIT", help=f"{', '.join(SPLITS)} (default: test)")
    add("--n", type=int, default=n, metavar="N", help=f"examples (default: {n or f'{USUAL}, of a file all'})")
    add_batch(add)


def _run(options: argparse.Namespace) -> None:
    score = functools.partial(run, counts=options.counts, processes=options.processes)
    _score(options, score, lambda report: "\n".join(_lines(report)))


def _oracle(options: argparse.Namespace) -> None:
    _score(options, _oracle_of, _describe_oracle)


def _oracle_of(models: Models, task: Task, sampler: SamplerConfig, **measuring: Any) -> OracleReport:
    return oracle(models.of(sampler), task, sampler.anywhere(), **measuring)


def _score(options: argparse.Namespace, score: Callable[..., Any], described: Callable[[Any], str]) -> None:
    """Runs one sampler by `run` or `oracle`, whose reports are alike, and prints and writes the report."""
    if len(options.sampler) > 1:
        raise DllmError(f"this scores one sampler, not {len(options.sampler)}; leave others out, or use sweep")
    task, sampler = make_task(options.task), parse_sampler(options.sampler[0])
    models = models_of(options)
    check_split(options.split)
    if options.results:
        files.make_folder(Path(options.results).parent)
    report = score(models, task, sampler, **_measuring(options))
    if options.results and options.processes.first:
        write_file(options.results, files.as_json_lines([vars(row) for row in report.rows]))
    if options.json:
        print(files.as_json(report.summary()), end="")
        return
    print(f"{report.model} on {report.task}, {report.n} {report.split} examples, {report.sampler}")
    print(described(report))


def _indicator(options: argparse.Namespace) -> None:
    if not 0 < options.precision <= 1:
        raise DllmError(f"--precision is {options.precision:g}; it must be above 0 and at most 1")
    plots.require_matplotlib()
    indicator = load_indicator(options.indicator)
    folder = files.make_folder(options.out)
    chosen = {name: getattr(options, name) for name in ("n", "batch_size", "seed")}
    report = score_indicator(_load(options), indicator, options.trajectories, **chosen)
    write_file(folder / "precision_recall.csv", files.as_csv(report.rows()))
    write_file(folder / "precision_recall.png", report.plot())
    print(report.describe(options.precision))


def _sweep(options: argparse.Namespace) -> None:
    samplers = all_samplers(options.sampler, options.grid)
    found, folder = _run_all(options, options.task, samplers)
    if options.processes.first:
        write_file(folder / "pareto.png", pareto_plot(found))
    areas = found.areas()
    for name, area in areas.items():
        print(f"AUP {area:8.1f}  {name}, of accuracy over tokens per forward")
    if len(areas) < len(found.series()):
        print("series without AUP have no start to be compared from; sweep over topk:k=1 of their model as well")
    print(
        f"{len(found.reports)} samplers, {found.programs} programs; results.json, results.csv, pareto.png in {folder}"
    )


def _figure(name: str, options: argparse.Namespace) -> None:
    figure = FIGURES[name]
    if not figure.fits(make_task(options.task)):
        advice = "leave --task out, or give its options"
        raise DllmError(f"figure {name} is about {figure.task_name}, not {options.task}; {advice}")
    lines = figure.lines(options)
    found, folder = _run_all(options, options.task, samplers_of(lines))
    more = summarize_figure(figure, found, lines)
    write_tables(folder, found, more)
    write_file(folder / f"{name}.png", draw_figure(figure, found, lines))
    for note in more["notes"]:
        print(note)
    made = f"results.json, results.csv, {name}.png in {folder}"
    print(f"{len(found.reports)} points, {found.programs} programs; {made}")


def _run_all(options: argparse.Namespace, task_text: str, samplers: Sequence[SamplerConfig]) -> tuple[Sweep, Path]:
    """Runs the samplers; the tables are on the disk after every one, so that a run that is cut short loses nothing."""
    task = make_task(task_text)
    check_split(options.split)
    plots.require_matplotlib()
    folder = files.make_folder(options.out)
    found = Sweep()
    models, counts, processes = models_of(options), getattr(options, "counts", ()), options.processes
    for found in sweep(models, task, samplers, counts=counts, processes=processes, **_measuring(options)):
        if processes.first:
            write_tables(folder, found)
        print(f"{describe(found.reports[-1])}  {found.samplers[-1]}", flush=True)
    return found, folder


def _compare(options: argparse.Namespace) -> None:
    samplers, task = all_samplers(options.sampler or COMPARED), make_task(options.task)
    if options.save_view is not None:
        check_path(options.save_view)
    models, answers = models_of(options), list[Generation]()
    bound = [models.build(sampler, task)[1] for sampler in samplers]
    print(bound[0].question(bound[0].example(options.split, options.index)), end="\n\n")
    shown = console()
    number = functools.partial(Column, justify="right", no_wrap=True)
    table = Table("sampler", number("forwards"), number("tokens/\nforward"), "", "answer", box=box.SIMPLE)
    names = _wrap_names(list(map(str, samplers)), shown.width)
    with contextlib.ExitStack() as stack:
        if shown.is_terminal:
            status = stack.enter_context(shown.status("sampling", spinner="line"))
            say = lambda line: status.update(Text(line))
        else:
            say = lambda line: print(line, file=sys.stderr, flush=True)
        for place, (name, sampler, own) in enumerate(zip(names, samplers, bound, strict=True), start=1):
            say(f"sampling with {sampler} ({place} of {len(samplers)})")
            examples = [own.example(options.split, options.index)]
            if options.save_view is None:
                (row,) = run(models, task, sampler, n=1, examples=examples, progress=False).rows
            else:
                row, answer = run_traced(models, task, sampler, examples[0])
                answers.append(answer)
            mark = "right" if row.correct else "wrong"
            table.add_row(Text(name), str(row.nfe), f"{row.tokens / max(row.nfe, 1):.1f}", mark, Text(row.text))
    shown.print(table)
    if options.save_view is not None:
        view_of(answers, [str(sampler) for sampler in samplers]).save(options.save_view)


def _wrap_names(names: list[str], width: int) -> list[str]:
    """Samplers as text, broken after commas if their part of the terminal is too narrow."""
    room = max(3 * (width - NUMBERS) // 5, 8)
    return [textwrap.fill(name.replace(",", ", "), room, break_on_hyphens=False).replace(", ", ",") for name in names]


def _show(options: argparse.Namespace) -> None:
    task = make_task(options.task)
    example = task.example(options.split, options.index)
    print(task.question(example), task.reference(example), sep="\n\n")


def _tokenizer(options: argparse.Namespace) -> None:
    task = make_task(options.task)
    if not isinstance(task, DrawnTask):
        raise DllmError(f"{task.name} is in the tokens of any model; there is none to write")
    if options.vocab_size is not None and not isinstance(task, WordProblems):
        raise DllmError(f"--vocab-size is for word-problems; the tokens of {task.name} are fixed")
    if options.vocab_size is None:
        task.write_tokenizer(options.out)
        print(f"{task.vocabulary.size} tokens in {options.out}")
        return
    print(f"{train_tokenizer(options.out, vocab_size=options.vocab_size).size} tokens in {options.out}")


def _load(options: argparse.Namespace) -> Model:
    """The model of a command that runs no sampler."""
    if options.model is None:
        raise DllmError("no model was named; pass --model DIR_OR_NAME")
    return models_of(options).load(options.model)


def _measuring(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("n", "batch_size", "seed", "split")}


def _describe_oracle(report: OracleReport) -> str:
    exact = "all of them lossless" if not report.forced else f"{100 * report.forced:.1f} % of these forced"
    steps = f"NFE {report.nfe:.2f} | {report.merged_steps:.2f} steps in the lossless order, {exact}"
    free = f"{report.unordered_steps:.2f} without the order, {100 * report.unordered_forced:.1f} % of these forced"
    return f"{steps} | {report.speed_up:.2f} times fewer forwards | {free}"


def _lines(report: Report) -> list[str]:
    """A report in one line, and one more for each paper's count of it."""
    return [describe(report), *(f"as {name} counts: {as_line(found)}" for name, found in report.compat_count.items())]


def describe(report: Report) -> str:
    """A report in one line."""
    parts = [
        f"accuracy {stderr.as_percent(report.accuracy, report.accuracy_stderr):>12} %",
        f"strict {100 * report.strict_accuracy:5.1f} %",
        f"NFE {report.nfe:6.2f}",
        f"{report.tokens_per_forward:5.2f} tokens per forward",
        f"{report.tokens_per_second:8.1f} tokens/s",
        f"{report.seconds:.1f} s, compiled in {report.compile_seconds:.1f} s",
    ]
    return " | ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
