"""A file of prompts in, a file of answers out: lazily, in order, and again from where it was (docs/batch.md).

    python -m samplers --prompts in.jsonl --out out.jsonl

What is answered is written at once, a line for a line, so a killed run has all that it had done; the same command goes
on behind it. An answer depends on its line, the line's number and the seed alone.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from dllm_jax import DllmError, Model
from dllm_jax.cli import progress_bars
from samplers.cli.lines import WRITTEN, Desk, Line, LineFile, Room
from samplers.cli.outputs import Output, Share, check_parts, merge, part_of
from samplers.cli.report import (
    Totals,
    answer_json,
    print_after,
    print_statistics,
    print_text,
    run_json,
    settings_json,
    speed_json,
)
from samplers.engine.requests import Request
from samplers.engine.runner import Runner
from samplers.generation import Generation

SLOTS = 16
"""Prompts that are worked on together, where nothing is said."""

WIDE = 110
"""Columns of a terminal from which on the bar has room for everything."""

Emit = Callable[[dict[str, Any], Generation | None], None]  # a line of JSON, and the answer in it


class Loading(NamedTuple):
    """A model and the options of its sampler, first without parameters, then with them.

    Attributes:
        bare: the model's outline.
        said: options of the sampler as they were written.
        outlined: what `Desk` takes, of outlines.
        load: gives the model, and the same of it.
    """

    bare: Model
    said: Mapping[str, Any]
    outlined: Mapping[str, Any]
    load: Callable[[], tuple[Model, Mapping[str, Any]]]


class _BadLine(DllmError):
    """What is wrong with a line, where such lines are not skipped."""


class Asked(NamedTuple):
    """A line that was read: what it says, and what is wrong with it."""

    line: Line
    own: dict[str, Any]
    error: str | None


def check_flags(options: argparse.Namespace) -> None:
    """Raises DllmError for flags of files that have no effect, and those that miss another."""
    if options.out is not None and (options.prompts is None or options.infill is not None):
        raise DllmError("--out takes the answers to a file of prompts; name it by --prompts")
    if options.distributed is not None and options.out is None:
        raise DllmError("--distributed answers a file by several processes; pass --prompts FILE --out FILE")
    if options.distributed is not None and not Path(options.prompts).is_file():
        raise DllmError(f"--distributed needs a regular file as --prompts, which {options.prompts} is not")
    if options.on_error is not None and (options.prompts is None or options.infill is not None):
        raise DllmError("--on-error is about lines of --prompts; leave it out")
    paths = [Path(name).resolve() for name in (options.prompts, options.out) if name is not None]
    if options.out is not None and paths[0] == paths[1]:
        raise DllmError("--out and --prompts are the same file; choose another --out")


def answer_file(options: argparse.Namespace, loading: Loading, share: Share) -> None:
    """`python -m samplers --prompts FILE`, with and without `--out`.

    Raises:
        DllmError: for bad files and options, before the model is loaded where that is possible; and, unless bad lines
            are skipped, naming the first of them, when those before it are answered.
    """
    source = LineFile(options.prompts)
    room = source.room()
    desk = Desk(loading.bare, room, **loading.outlined)
    settings = settings_json(options, loading.said, loading.bare.name, desk.sampler)
    settings |= {name: None for name, idle in _idle(loading.bare).items() if settings[name] == idle}
    if options.out is None:
        show = _printing(options, room.total)
        _Job(options, source, room, share, settings).answer(source.lines(), loading, desk, show)
        return
    out = Path(options.out).expanduser()
    with Output(part_of(out, share)) as output:
        check_parts(out, share)
        if not _ended(out, share, source, room, settings):
            output.compare(settings)
            job = _Job(options, source, room, share, settings)
            job.answer(_behind(source, output, share), loading, desk, lambda told, _: output.append(told), output)
    if share.processes == 1:
        return
    assert room.total is not None
    if merge(out, share, room.total):
        print_after(f"{out} is complete")
    else:
        print_after(f"{output.path} is complete; the last of {share.processes} processes puts the parts together")


def _idle(model: Model) -> dict[str, Any]:
    """Numbers that an engine has where it only leaves room for those of lines, which is no setting."""
    return {"top_p": 1.0, "top_k": model.config.vocab_size}


def _ended(out: Path, share: Share, source: LineFile, room: Room, settings: Mapping[str, Any]) -> bool:
    """Whether several processes have made the whole."""
    if share.processes == 1 or not out.exists():
        return False
    whole = Output(out)
    whole.compare(settings)
    if whole.done != room.total:
        raise DllmError(f"{out} is of a run by one process; go on without --distributed, or choose another --out")
    _behind(source, whole, Share())
    return True


def _behind(source: LineFile, output: Output, share: Share) -> Iterator[Line]:
    """A process's lines behind those that are answered.

    Raises:
        DllmError: when a line that is there is not the answer to its line of the input, as that is now.
    """
    lines = itertools.islice(source.lines(), share.process, None, share.processes)
    for number, entry in enumerate(output.entries(), start=1):
        line = next(lines, None)
        if line is None or not _answers(entry, line, source):
            which = "a line" if line is None else f"line {line.number}"
            raise DllmError(
                f"line {number} of {output.path} is not the answer to {which} of {source.called} as it is now; "
                "delete it and what follows, or choose another --out"
            )
    return lines


def _answers(entry: Mapping[str, Any], line: Line, source: LineFile) -> bool:
    """Whether a line of output is about a line of input: it repeats all that this says."""
    try:
        own = source.own(line)
    except DllmError:
        return entry.get("line") == line.number and "error" in entry
    repeated = {name: value for name, value in entry.items() if name not in WRITTEN}
    same = json.dumps(repeated, sort_keys=True) == json.dumps(own, sort_keys=True)  # true is not 1
    return entry.get("line") == line.number and same


def _printing(options: argparse.Namespace, total: int | None) -> Emit:
    """Prints answers as they come, as JSON or as text."""
    numbers = itertools.count(1)
    of = "" if total is None else f" of {total}"

    def show(told: dict[str, Any], answer: Generation | None) -> None:
        number = next(numbers)
        if options.json:
            print(json.dumps(told), flush=True)
            return
        if total != 1:
            print(f"--- {number}{of}")
        if answer is None:
            print(f"line {told['line']}: {told['error']}", file=sys.stderr)
        else:
            print_text(answer.text)

    return show


@dataclasses.dataclass
class _Job:
    """The lines of one process on their way.

    Attributes:
        settings: of the run, as far as they are known before the model is loaded.
        tally, errors: of what was told.
        asked: lines whose requests are under way, in their order.
    """

    options: argparse.Namespace
    source: LineFile
    room: Room
    share: Share
    settings: dict[str, Any]
    tally: Totals = dataclasses.field(default_factory=Totals)
    errors: int = 0
    asked: collections.deque[Asked] = dataclasses.field(default_factory=collections.deque)

    def answer(
        self, lines: Iterator[Line], loading: Loading, desk: Desk, emit: Emit, output: Output | None = None
    ) -> None:
        """Answers lines, and hands on what is to be told of each, in their order.

        Args:
            desk: of the model's outline.

        Raises:
            DllmError: see `answer_file`.
        """
        first = next(lines, None)
        if first is None:
            assert output is not None
            print_after(f"{output.path}: nothing left to do, {output.done} lines are there")
            return
        try:
            self._read(first, desk)  # a mistake in all lines comes before gigabytes are read
            self._answer(itertools.chain([first], lines), loading, emit, output)
        except _BadLine as error:
            again = "mend it, or pass --on-error skip"
            if output is not None:
                again = f"{_written(output)}; mend the line and give the same command again, or add --on-error skip"
            raise DllmError(f"{error}; {again}") from None
        except KeyboardInterrupt:
            if output is None:
                raise
            raise KeyboardInterrupt(f"{_written(output)}; the same command goes on behind them") from None

    def _answer(self, lines: Iterator[Line], loading: Loading, emit: Emit, output: Output | None) -> None:
        """`answer`, once the first line was found to be sound."""
        model, given = loading.load()
        settings = self.settings | run_json(model)
        if output is not None:
            output.compare(settings)
            output.begin()
        desk = Desk(model, self.room, **given)
        runner = Runner(model, desk.sampler, self._slots())
        self._run(runner, self._requests(lines, desk), settings, emit, output)
        speed = f"{runner.stats.seconds:.3f} s, compiled before in {runner.stats.compile_seconds:.1f} s"
        print_statistics(self.tally, runner.stats.seconds, speed, model, desk.sampler)
        if self.errors:
            have = "it has" if self.errors == 1 else "they have"
            where = "" if output is None else f"; {have} an 'error' in {output.path}"
            print_after(f"{_lines(self.errors)} could not be answered{where}")

    def _requests(self, lines: Iterable[Line], desk: Desk) -> Iterator[Request]:
        for line in lines:
            asked, request = self._read(line, desk)
            self.asked.append(asked)
            yield request

    def _read(self, line: Line, desk: Desk) -> tuple[Asked, Request]:
        """A line and its request; one that is cancelled already for a bad line, if these are skipped."""
        own: dict[str, Any] = {}
        try:
            own = self.source.own(line)
            return Asked(line, own, None), desk.request(line, own)
        except DllmError as error:
            if self.options.on_error != "skip":
                raise _BadLine(f"{self.source.where(line)}: {error}") from None
            nobody = Request([], 0, np.zeros(2, np.uint32), number=line.number, cancelled=True)
            return Asked(line, own, str(error)), nobody

    def _run(
        self,
        runner: Runner,
        requests: Iterator[Request],
        settings: dict[str, Any],
        emit: Emit,
        output: Output | None,
    ) -> None:
        width = 0 if output is None else int(output.last.get("room") or 0)
        hidden = output is None and sys.stdout.isatty()  # a bar would stand among the answers
        about: dict[str, Any] = {"desc": "answering", "unit": "line", "disable": hidden, "dynamic_ncols": True}
        about |= {"mininterval": progress_bars.interval(), "delay": 0 if sys.stderr.isatty() else progress_bars.SELDOM}
        total, compiling = None if self.room.total is None else self.share.of(self.room.total), 0.0
        with tqdm(total=total, initial=0 if output is None else output.done, smoothing=0, **about) as bar:
            for request in runner.run(requests, longest=width):
                asked = self.asked.popleft()
                width = max(width, runner.room_for(len(request.prompt)))
                told, answer = self._told(asked, request, runner, {"room": width, "settings": settings})
                emit(told, answer)
                if not hidden:
                    bar.start_t += runner.stats.compile_seconds - compiling  # which is no work that comes again
                    compiling = runner.stats.compile_seconds
                bar.set_postfix_str(self._speed(runner), refresh=False)
                bar.update()

    def _told(
        self, asked: Asked, request: Request, runner: Runner, always: dict[str, Any]
    ) -> tuple[dict[str, Any], Generation | None]:
        """A line of output, and the answer in it."""
        told = {**asked.own, "line": asked.line.number}
        if asked.error is not None:
            self.errors += 1
            return {**told, "error": asked.error, **always}, None
        answer = request.generation
        self.tally.add(answer)
        speed = speed_json(answer, request.seconds, runner.stats.compile_seconds)
        return {**told, **answer_json(answer), **always, **speed}, answer

    def _slots(self) -> int:
        """As many for a run that goes on as for one that was not cut off, so that both are one program."""
        most = self.options.batch_size or SLOTS
        return most if self.room.total is None else max(min(most, self.share.of(self.room.total)), 1)

    def _speed(self, runner: Runner) -> str:
        """What the progress bar tells."""
        nfe = self.tally.nfe / max(self.tally.answers, 1)
        stats = runner.stats
        speed = self.tally.tokens / max(stats.seconds, 1e-9)
        slots = f", {stats.occupancy:.0%} of the slots at work" if shutil.get_terminal_size().columns >= WIDE else ""
        return f"{speed:.0f} tokens/s, NFE {nfe:.1f}{slots}"


def _written(output: Output) -> str:
    return f"{_lines(output.done)} answered in {output.path}"


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count} lines"
