"""Scores samplers on verifiable tasks.

    python -m evals run --model DIR --task word-problems --sampler threshold:threshold=0.9,cache=dual,block_length=16
    python -m evals sweep --model DIR --task sudoku --sampler 'eb:gamma=0.01|0.1|1' --sampler 'topk:k=1|2|4' --out DIR
    python -m evals sweep --task word-problems --sampler 'd2f:threshold=0.7|0.9@STUDENT' --sampler topk@BASE --out DIR
    python -m evals figure eb-maze --model DIR --out DIR
    python -m evals figure apd --model DREAM --verifier AR --out DIR
    python -m evals figure d2f --model TEACHER --student STUDENT --ar AR --out DIR
    python -m evals figure ni --model DIR --indicator DIR --indicator DIR --out DIR
    python -m evals compare --model word-problems --task word-problems --index 3
    python -m evals oracle --model DIR --task sudoku --sampler threshold:threshold=0.9
    python -m evals indicator --model DIR --indicator DIR --trajectories DIR --out DIR
    python -m evals show --task maze:size=5 --split train
    python -m evals tokenizer --task sudoku --out DIR

Examples come from the test split, whose problems no generator gives out for training.
"""

import argparse
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dllm_jax import DllmError, Model
from dllm_jax.tools.command import Parser, run_printing
from evals import figures, files, plots
from evals.indicator import score_indicator
from evals.models import Models
from evals.oracle import OracleReport, oracle
from evals.runner import Report, run
from evals.sampler import SamplerSpec, all_samplers, parse_sampler
from evals.sweeps import Sweep, pareto_plot, sweep, write_tables
from evals.tasks import SPLITS, TASKS, Example, Task, WordProblems, make_task
from evals.tasks.base import check_split
from evals.tasks.word_problems import train_tokenizer
from samplers.indicator import load_indicator

COMPARED = (
    "topk",
    "topk:k=2",
    "threshold:threshold=0.9",
    "eb:gamma=0.1",
    "factor:factor=1.0",
    "threshold:threshold=0.9,cache=dual,block_length=8",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; 0 when it worked, 2 after a mistake, which is printed as one sentence."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what it raises as well
    return run_printing(lambda: _run_command(arguments), "use a smaller --batch-size")


def _run_command(arguments: Sequence[str] | None) -> None:
    options = _parser().parse_args(arguments)
    options.command(options)


def _parser() -> argparse.ArgumentParser:
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
    return parser


def _command(commands: Any, name: str, command: Any, about: str) -> Any:
    parser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.set_defaults(command=command)
    return parser.add_argument


def _add_run(commands: Any) -> None:
    _add_scoring(_command(commands, "run", _run, "score one sampler"))


def _add_scoring(add: Any) -> None:
    _add_measuring(add)
    _add_task(add)
    add(
        "--sampler",
        required=True,
        metavar="SPEC",
        help="RULE or PRESET, with options as in eb:gamma=0.1; @DIR is its model",
    )
    add("--json", action="store_true", help="print the whole report as JSON")
    add("--results", metavar="FILE", help="write one JSON line per example")


def _add_sweep(commands: Any) -> None:
    add = _command(commands, "sweep", _sweep, "score many samplers; write results.json, results.csv and pareto.png")
    _add_measuring(add)
    _add_task(add)
    add("--sampler", action="append", default=[], metavar="SPEC", help="as in run, with lists: eb:gamma=0.1|1")
    add("--grid", metavar="FILE", help="TOML with [[sampler]] tables: rule, and options as values or lists")
    add("--out", required=True, metavar="DIR", help="folder of the results")


def _add_figure(commands: Any) -> None:
    about = "a paper's figure: results.json, results.csv and the plot"
    parser = commands.add_parser("figure", help=about, description=about, allow_abbrev=False)
    chosen = parser.add_subparsers(required=True, metavar="FIGURE", parser_class=Parser)
    for name, figure in figures.FIGURES.items():
        add = _command(chosen, name, functools.partial(_figure, name), figure.about)
        _add_measuring(add, n=figure.n)
        add("--task", default=figure.task, metavar="TASK", help=f"{figure.task_name} (default: {figure.task})")
        add("--out", required=True, metavar="DIR", help="folder of the results")
        for flag, how in figure.options.items():
            add(flag, **how)


def _add_compare(commands: Any) -> None:
    add = _command(commands, "compare", _compare, "answer one example by several samplers")
    _add_model(add)
    _add_example(add, "test")
    add("--sampler", action="append", default=[], metavar="SPEC", help="as in run, with lists; by default a choice")


def _add_oracle(commands: Any) -> None:
    about = "how few forwards would keep a sampler's trajectories as they are"
    _add_scoring(_command(commands, "oracle", _oracle, about))


def _add_indicator(commands: Any) -> None:
    about = "how well a trained indicator tells tokens that are final: precision_recall.csv and .png"
    add = _command(commands, "indicator", _indicator, about)
    _add_model(add)
    add("--indicator", required=True, metavar="DIR", help="folder that python -m train indicator wrote")
    add("--trajectories", required=True, metavar="DIR", help="of python -m train trajectories --split validation")
    add("--out", required=True, metavar="DIR", help="folder of the results")
    add("--precision", type=float, default=0.98, metavar="P", help="to find a threshold for, in (0, 1] (default: 0.98)")
    add("--n", type=int, metavar="N", help="trajectories; by default all")
    add("--batch-size", type=int, default=64, metavar="N", help="trajectories per forward (default: 64)")
    add("--seed", type=int, default=0, metavar="N", help="of the states (default: 0)")


def _add_show(commands: Any) -> None:
    add = _command(commands, "show", _show, "print an example")
    _add_example(add, "train")


def _add_example(add: Any, split: str) -> None:
    _add_task(add)
    add("--split", default=split, metavar="SPLIT", help=f"{', '.join(SPLITS)} (default: {split})")
    add("--index", type=int, default=0, metavar="N", help="number of the example (default: 0)")


def _add_tokenizer(commands: Any) -> None:
    add = _command(commands, "tokenizer", _tokenizer, "write a task's tokenizer, for the folder of a checkpoint")
    _add_task(add)
    add("--out", required=True, metavar="DIR", help="folder of tokenizer.json and tokenizer_config.json")
    add("--vocab-size", type=int, metavar="N", help="train the word problems' anew, with at most so many tokens")


def _add_model(add: Any) -> None:
    add("--model", metavar="DIR_OR_NAME", help="converted checkpoint, of samplers that name none by @DIR")
    add("--dtype", help="bfloat16, float16 or float32; as stored by default")
    add("--quantize", metavar="BITS", help="int8 or int4: kernels in so many bits; as stored by default")


def _add_measuring(add: Any, n: int = 256) -> None:
    _add_model(add)
    add("--split", default="test", metavar="SPLIT", help=f"{', '.join(SPLITS)} (default: test)")
    add("--n", type=int, default=n, metavar="N", help=f"examples (default: {n})")
    add("--batch-size", type=int, default=64, metavar="N", help="examples sampled together (default: 64)")
    add("--seed", type=int, default=0, metavar="N", help="of the sampler's random numbers (default: 0)")


def _add_task(add: Any) -> None:
    about = f"{', '.join(TASKS)}, with options as in maze:size=5"
    add("--task", required=True, metavar="TASK", help=about)


def _run(options: argparse.Namespace) -> None:
    _score(options, run, describe)


def _oracle(options: argparse.Namespace) -> None:
    _score(options, _oracle_of, _describe_oracle)


def _oracle_of(models: Models, task: Task, sampler: SamplerSpec, **measuring: Any) -> OracleReport:
    return oracle(models.of(sampler), task, sampler.anywhere(), **measuring)


def _score(options: argparse.Namespace, score: Callable[..., Any], described: Callable[[Any], str]) -> None:
    """Runs one sampler by `run` or `oracle`, whose reports are alike, and prints and writes what was asked for."""
    task, sampler = make_task(options.task), parse_sampler(options.sampler)
    models = Models(options.model, options.dtype, options.quantize)
    check_split(options.split)
    if options.results:
        files.make_folder(Path(options.results).parent)
    report = score(models, task, sampler, **_measuring(options))
    if options.results:
        files.write(options.results, files.as_json_lines([vars(row) for row in report.rows]))
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
    files.write(folder / "precision_recall.csv", files.as_csv(report.rows()))
    files.write(folder / "precision_recall.png", report.plot())
    print(report.told(options.precision))


def _sweep(options: argparse.Namespace) -> None:
    samplers = all_samplers(options.sampler, options.grid)
    found, folder = _run_all(options, options.task, samplers)
    files.write(folder / "pareto.png", pareto_plot(found))
    for name, area in found.areas().items():
        print(f"AUP {area:8.1f}  {name}")
    print(
        f"{len(found.reports)} samplers, {found.programs} programs; results.json, results.csv, pareto.png in {folder}"
    )


def _figure(name: str, options: argparse.Namespace) -> None:
    figure = figures.FIGURES[name]
    if make_task(options.task).name != figure.task_name:
        advice = "leave --task out, or give its options"
        raise DllmError(f"figure {name} is about {figure.task_name}, not {options.task}; {advice}")
    lines = figure.lines(options)
    found, folder = _run_all(options, options.task, figures.samplers_of(lines))
    more = figures.summary(figure, found, lines)
    write_tables(folder, found, more)
    files.write(folder / f"{name}.png", figures.plot(figure, found, lines))
    for note in more["notes"]:
        print(note)
    made = f"results.json, results.csv, {name}.png in {folder}"
    print(f"{len(found.reports)} points, {found.programs} programs; {made}")


def _run_all(options: argparse.Namespace, task_text: str, samplers: Sequence[SamplerSpec]) -> tuple[Sweep, Path]:
    """Runs the samplers; the tables are on the disk after every one, so that a run that is cut short loses nothing."""
    task = make_task(task_text)
    check_split(options.split)
    plots.require_matplotlib()
    folder = files.make_folder(options.out)
    found = Sweep()
    for found in sweep(Models(options.model, options.dtype, options.quantize), task, samplers, **_measuring(options)):
        write_tables(folder, found)
        print(f"{describe(found.reports[-1])}  {found.samplers[-1]}", flush=True)
    return found, folder


def _compare(options: argparse.Namespace) -> None:
    samplers, task = all_samplers(options.sampler or COMPARED), make_task(options.task)
    models = Models(options.model, options.dtype, options.quantize)
    bound = [models.build(sampler, task)[1] for sampler in samplers]
    print(puzzle(bound[0], bound[0].example(options.split, options.index)), end="\n\n")
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(Column("sampler", no_wrap=True), "forwards", "tokens/forward", "", "answer", box=box.SIMPLE)
    with console.status("sampling", spinner="line") if console.is_terminal else contextlib.nullcontext():
        for sampler, own in zip(samplers, bound, strict=True):
            examples = [own.example(options.split, options.index)]
            (row,) = run(models, task, sampler, n=1, examples=examples, progress=False).rows
            mark = "right" if row.correct else "wrong"
            table.add_row(Text(str(sampler)), str(row.nfe), f"{row.tokens / max(row.nfe, 1):.1f}", mark, Text(row.text))
    console.print(table)


def _show(options: argparse.Namespace) -> None:
    task = make_task(options.task)
    example = task.example(options.split, options.index)
    end = "" if example.given is None else "\n\n"
    print(puzzle(task, example) + end + task.show(example.answer_ids))


def puzzle(task: Task, example: Example) -> str:
    """What a model is given: the prompt, and the canvas with a full stop for every blank where it comes with clues."""
    prompt = task.show(example.prompt_ids)
    if example.given is None:
        return prompt
    pairs = zip(example.answer_ids, example.given, strict=True)
    return prompt + "".join(task.show([i]) if given else "." for i, given in pairs)


def _tokenizer(options: argparse.Namespace) -> None:
    task = make_task(options.task)
    if options.vocab_size is not None and not isinstance(task, WordProblems):
        raise DllmError(f"--vocab-size is for word-problems; the tokens of {task.name} are what they are")
    if options.vocab_size is None:
        task.write_tokenizer(options.out)
        print(f"{task.vocabulary.size} tokens in {options.out}")
        return
    print(f"{train_tokenizer(options.out, vocab_size=options.vocab_size).size} tokens in {options.out}")


def _load(options: argparse.Namespace) -> Model:
    """The model of a command that runs no sampler."""
    if options.model is None:
        raise DllmError("no model was named; pass --model DIR_OR_NAME")
    return Models(None, options.dtype, options.quantize).load(options.model)


def _measuring(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("n", "batch_size", "seed", "split")}


def _describe_oracle(report: OracleReport) -> str:
    exact = "all of them lossless" if not report.forced else f"{100 * report.forced:.1f} % of these forced"
    steps = f"NFE {report.nfe:.2f} | {report.merged_steps:.2f} steps in the lossless order, {exact}"
    return f"{steps} | {report.speed_up:.2f} times fewer forwards"


def describe(report: Report) -> str:
    """A report in one line."""
    parts = [
        f"accuracy {100 * report.accuracy:5.1f} +- {100 * report.accuracy_stderr:.1f} %",
        f"strict {100 * report.strict_accuracy:5.1f} %",
        f"NFE {report.nfe:6.2f}",
        f"{report.tokens_per_forward:5.2f} tokens per forward",
        f"{report.tokens_per_second:8.1f} tokens/s",
        f"{report.seconds:.1f} s, compiled in {report.compile_seconds:.1f} s",
    ]
    return " | ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
