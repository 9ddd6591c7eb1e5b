"""A file of prompts in, a file of answers out: lazily, in order, resumable (docs/batch.md).

    python -m samplers --prompts in.jsonl --out out.jsonl

Each answer is written at once, so a killed run loses none, and the same command resumes it. An answer depends on its
line, the line's number and the seed alone.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from dllm_jax import DllmError, Model
from dllm_jax.cli import progress_bars
from dllm_jax.json_lines import JsonLines
from dllm_jax.parallel import multihost
from samplers.checks import refuse_unknown
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
from samplers.config.sampler_config import SamplerConfig, configure
from samplers.engine.engine import Engine
from samplers.engine.requests import EngineLimit, Request
from samplers.engine.runner import Runner
from samplers.text.prompt_files import LINE_OPTIONS, Line, Needs, PromptFile, prompt_of

SLOTS = 16
"""Prompts of a file that run together by default."""
FORM_STATES = 512
"""States that the automaton of a line's `regex` or `json_schema` may have, as of `Engine`."""
WRITTEN = (
    *("line", "error", "text", "gaps", "tokens", "logprobs", "prompt_tokens", "nfe", "full_forwards", "cache_updates"),
    *("verifier_forwards", "tokens_per_forward", "decoded_at", "canvas", "room", "settings"),
    *("seconds", "compile_seconds", "tokens_per_second"),
)
"""Keys of an output line, which an input line cannot have."""


class LazyModel(NamedTuple):
    """A model and its sampler, at first without parameters.

    Attributes:
        outline: the model without parameters.
        sampler: as it was written.
        options: what `LineRequests` takes, where verifiers are outlines, too.
        load: loads the model, and gives it and its `options`.
    """

    outline: Model
    sampler: SamplerConfig
    options: Mapping[str, Any]
    load: Callable[[], tuple[Model, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class LineShard:
    """The part of a file that a process answers: consecutive lines, so that the outputs of all shards are concatenated.

    Attributes:
        index: from 0.
        count: of shards.
    """

    index: int = 0
    count: int = 1

    def rows(self, total: int) -> range:
        """Rows of this shard, of a file with this many."""
        return range(total * self.index // self.count, total * (self.index + 1) // self.count)

    def path(self, out: Path) -> Path:
        """Where this shard's answers are: in `out` if there is only one."""
        return out if self.count == 1 else out.with_name(f"{out.name}-{self.index:05d}-of-{self.count:05d}")


def shard_of(options: argparse.Namespace) -> LineShard:
    """The shard that --shard names, or the number of this process among those of --distributed.

    Raises:
        DllmError: for what is no shard, and as `multihost.join`.
    """
    if options.distributed is not None:
        multihost.join(options.distributed, shutdown_timeout=multihost.MONTH)
        return LineShard(multihost.index(), multihost.count())
    if options.shard is None:
        return LineShard()
    found = re.fullmatch(r"(\d+)/(\d+)", options.shard)
    if not found or int(found[1]) >= int(found[2]):
        raise DllmError(f"--shard {options.shard}: write I/N, with I from 0 to N - 1")
    return LineShard(int(found[1]), int(found[2]))


def check_flags(options: argparse.Namespace) -> None:
    """Raises DllmError for flags of files that have no effect, and those that need another."""
    answers_file = options.prompts is not None and options.infill is None
    if options.out is not None and not answers_file:
        raise DllmError("--out takes the answers to a file of prompts; name it by --prompts")
    if options.on_error is not None and not answers_file:
        raise DllmError("--on-error is about lines of --prompts; leave it out")
    if options.out is not None and Path(options.prompts).resolve() == Path(options.out).resolve():
        raise DllmError("--out and --prompts are the same file; choose another --out")
    if options.shard is None and options.distributed is None:
        return
    flag = "--distributed" if options.shard is None else "--shard"
    if options.out is None:
        raise DllmError(f"{flag} answers a part of a file; pass --prompts FILE --out FILE")
    if not Path(options.prompts).is_file():
        raise DllmError(f"{flag} needs a regular file as --prompts, which {options.prompts} is not")
    if options.shard is not None and options.distributed is not None:
        raise DllmError("--shard has no effect with --distributed, which numbers the processes; leave one out")


def answer_file(options: argparse.Namespace, lazy: LazyModel, shard: LineShard) -> None:
    """`python -m samplers --prompts FILE`, with and without `--out`.

    Raises:
        DllmError: for bad files and options, before the model is loaded where that is possible; and, unless bad lines
            are skipped, naming the first of them when those before it are answered, or counting them at the end.
    """
    job = _FileRun(options, lazy, shard)
    if options.out is None:
        job.run(None)
        return
    with JsonLines(shard.path(Path(options.out).expanduser())) as output:
        try:
            job.run(output)
        except _BadLineError as error:
            advice = "correct the line and run the same command again, or add --on-error skip"
            raise DllmError(f"{error}; {_count(output.done)} answered in {output.path}; {advice}") from None
        except KeyboardInterrupt:
            done = f"{_count(output.done)} answered in {output.path}"
            raise KeyboardInterrupt(f"{done}; the same command resumes") from None


class _BadLineError(DllmError):
    """The error of a line, if such lines are not skipped."""


def _skip_answered(lines: Iterator[Line], output: JsonLines, source: PromptFile) -> None:
    """Takes from the lines those that the output answers.

    Raises:
        DllmError: when a line of the output is not the answer to its line of the input, as that is now.
    """
    for number, entry in enumerate(output.entries(), start=1):
        line = next(lines, None)
        if line is None or not _answers(entry, line, source):
            which = "a line" if line is None else f"line {line.number}"
            raise DllmError(
                f"line {number} of {output.path} is not the answer to {which} of {source.title} as it is now; "
                "delete it and what follows, or choose another --out"
            )


def _answers(entry: Mapping[str, Any], line: Line, source: PromptFile) -> bool:
    """Whether a line of output is about a line of input: it repeats all keys of it."""
    if entry.get("line") != line.number:
        return False
    try:
        own = _own_entry(source, line)
    except DllmError:
        return "error" in entry
    repeated = {name: value for name, value in entry.items() if name not in WRITTEN}
    return json.dumps(repeated, sort_keys=True) == json.dumps(own, sort_keys=True)  # true is not 1


def _own_entry(source: PromptFile, line: Line) -> dict[str, Any]:
    """The keys of a line, all of which the output repeats.

    Raises:
        DllmError: as `PromptFile.entry`, and for keys that answers have.
    """
    entry = source.entry(line)
    if taken := [name for name in entry if name in WRITTEN]:
        raise DllmError(f'"{taken[0]}" is a key of the output; rename it')
    return entry


class _FileRun:
    """Answers the lines of one shard."""

    def __init__(self, options: argparse.Namespace, lazy: LazyModel, shard: LineShard) -> None:
        """
        Raises:
            DllmError: for a bad file, and bad options of the sampler.
        """
        self._options, self._lazy = options, lazy
        self._source = PromptFile(options.prompts)
        self._needs = self._source.needs()
        self._rows = None if self._needs.total is None else shard.rows(self._needs.total)
        self._outlined = LineRequests(lazy.outline, self._needs, **lazy.options)
        self._settings = settings_json(options, lazy.sampler.options, lazy.outline.name, self._outlined.sampler)
        idle = {"top_p": 1.0, "top_k": lazy.outline.config.vocab_size}  # of a program in which lines may set these
        self._settings |= {name: None for name, value in idle.items() if self._settings[name] == value}
        self._totals, self._errors = Totals(), 0
        self._running = collections.deque[tuple[dict[str, Any], str | None]]()  # of lines: their keys, and errors

    def run(self, output: JsonLines | None) -> None:
        """Answers the lines that the output does not answer yet, and writes or prints the answers in their order.

        Raises:
            DllmError: see `answer_file`.
        """
        lines = self._source.lines()
        if self._rows is not None:
            lines = itertools.islice(lines, self._rows.start, self._rows.stop)
        if output is not None:
            output.compare(self._settings)
            _skip_answered(lines, output, self._source)
        first = next(lines, None)
        if first is None:
            if output is not None:
                output.begin()
                print_after(f"{output.path}: nothing left to do, {_count(output.done)} answered")
            return
        self._read(first, self._outlined)  # a mistake in all lines is reported before gigabytes are read
        self._running.clear()
        model, options = self._lazy.load()
        self._settings |= run_json(model)
        if output is not None:
            output.compare(self._settings)
            output.begin()
        requests = LineRequests(model, self._needs, **options)
        most = self._options.batch_size or SLOTS
        slots = most if self._rows is None else min(most, len(self._rows))
        runner = Runner(model, requests.sampler, slots, constraint_states=requests.constraint_states)
        self._answer(runner, (self._read(line, requests) for line in itertools.chain([first], lines)), output)
        speed = f"{runner.stats.seconds:.3f} s, compiled before in {runner.stats.compile_seconds:.1f} s"
        print_statistics(self._totals, runner.stats.seconds, speed, model, requests.sampler)
        if self._errors:
            have = "it has" if self._errors == 1 else "they have"
            where = "" if output is None else f"; {have} an 'error' in {output.path}"
            sentence = f"{_count(self._errors)} could not be answered{where}"
            if self._options.on_error == "fail":
                raise DllmError(sentence)
            print_after(sentence)

    def _read(self, line: Line, requests: "LineRequests") -> Request:
        """A line's request; a cancelled one for a bad line, if these are skipped."""
        own: dict[str, Any] = {}
        try:
            own = _own_entry(self._source, line)
            request, problem = requests.request(line, own), None
        except DllmError as error:
            if self._options.on_error in (None, "stop"):
                advice = "" if self._options.out is not None else "; correct it, or pass --on-error skip"
                raise _BadLineError(f"{self._source.place(line)}: {error}{advice}") from None
            request, problem = Request([], 0, np.zeros(2, np.uint32), number=line.number, cancelled=True), str(error)
        self._running.append((own, problem))
        return request

    def _answer(self, runner: Runner, requests: Iterator[Request], output: JsonLines | None) -> None:
        width = 0 if output is None else int(output.last.get("room") or 0)  # a resumed run has the same program
        write = self._print if output is None else output.append
        with self._bar(output) as bar:
            for request in runner.run(requests, longest=width):
                own, problem = self._running.popleft()
                width = max(width, runner.room_for(len(request.prompt)))
                if problem is None:
                    answer = request.generation
                    self._totals.add(answer)
                    result = answer_json(answer)
                    speed = speed_json(answer, request.seconds, runner.stats.compile_seconds)
                else:
                    self._errors += 1
                    result, speed = {"error": problem}, {}
                write({**own, "line": request.number, **result, "room": width, "settings": self._settings, **speed})
                nfe = self._totals.nfe / max(self._totals.answers, 1)
                tokens = self._totals.tokens / max(runner.stats.seconds, 1e-9)
                bar.set_postfix_str(f"{tokens:.0f} tokens/s, NFE {nfe:.1f}", refresh=False)
                bar.update()

    def _bar(self, output: JsonLines | None) -> "tqdm[Any]":
        return tqdm(
            desc="answering",
            unit="line",
            total=None if self._rows is None else len(self._rows),
            initial=0 if output is None else output.done,
            disable=output is None and sys.stdout.isatty(),  # it would appear among the answers
            mininterval=progress_bars.interval(),
            delay=0 if sys.stderr.isatty() else progress_bars.SELDOM,
            dynamic_ncols=True,
        )

    def _print(self, line: dict[str, Any]) -> None:
        """Prints a line of output: as JSON, or its text."""
        if self._options.json:
            print(json.dumps(line), flush=True)
            return
        total = self._needs.total
        if total != 1:
            print(f"--- {self._totals.answers + self._errors}" + ("" if total is None else f" of {total}"))
        if "error" in line:
            print(f"line {line['line']}: {line['error']}", file=sys.stderr)
        else:
            print_text(line["text"])


class LineRequests:
    """Makes requests of lines. It holds an engine that never starts, so that lines are checked as by `Engine.request`;
    a `Runner` of its sampler runs them.

    Attributes:
        sampler: its program covers every option that lines change.
        constraint_states: room for the forms that lines bring, as of `Engine`.
    """

    def __init__(
        self,
        model: Model,
        needs: Needs,
        *,
        sampler: str | SamplerConfig | None,
        seed: int = 0,
        chat: bool = False,
        system: str | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            sampler, seed, chat, system, options: as in `samplers.generate`.

        Raises:
            DllmError: as `Engine`.
        """
        config = configure(model, sampler, options)
        length = config.options.get("gen_length")
        longest = max(model.config.max_length - length, 1) if isinstance(length, int) else None
        self.constraint_states = FORM_STATES if needs.forms else 0
        room: dict[str, Any] = {"draws": needs.draws, "constraint_states": self.constraint_states}
        try:
            self._engine = Engine(model, config, slots=1, prompt_length=longest, **room)
        except EngineLimit as error:
            raise DllmError(f"{error.problem}; leave out regex and json_schema of lines") from None
        self.sampler: Any = self._engine.sampler
        self._chat: dict[str, Any] = {"chat": chat, "system": system}
        self._key = jax.random.key(seed)
        self._title = f"sampler {config.label}"
        self._known = [name for name in config.owners if name not in LINE_OPTIONS]
        self._regular = needs.total is not None

    def request(self, line: Line, entry: Mapping[str, Any]) -> Request:
        """The request of a line, with the random numbers of its row in `generate`, unless it brings a seed.

        Raises:
            DllmError: as `Engine.request`.
        """
        prompt, numbers = prompt_of(entry), self._numbers(entry.get("options", {}))
        options = {name: entry[name] for name in LINE_OPTIONS if name in entry}
        if type(options.get("seed", 0)) is not int:
            raise DllmError(f"seed is {options['seed']!r}; it must be a whole number")
        length, most = options.get("gen_length"), self.sampler.gen_length
        if type(length) is int and length > most:
            raise DllmError(f"gen_length {length} exceeds --gen-length {most}; ask for less")
        key = None if "seed" in options else jax.random.fold_in(self._key, line.row)
        try:
            request = self._engine.request(prompt, key=key, **self._chat, **options, **numbers)
        except EngineLimit as error:
            pipe = "the first line of a pipe decides: set it there too, or name a file"
            decides = error.room and not self._regular
            raise DllmError(f"{error.problem}; {pipe if decides else 'pass it as a flag, for all lines'}") from None
        request.number = line.number
        return request

    def _numbers(self, options: Any) -> dict[str, Any]:
        """The options of a line, which are numbers of the sampler."""
        if not isinstance(options, dict):
            raise DllmError('options are an object, such as {"threshold": 0.8}')
        if misplaced := [name for name in options if name in LINE_OPTIONS]:
            raise DllmError(f'"{misplaced[0]}" is a key of the line, not of "options"; move it there')
        refuse_unknown(self._title, options, self._known)
        for name, value in options.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30:
                raise DllmError(f"{name} is {value!r}; options of a line are numbers, others are flags for all lines")
        return options


def _count(lines: int) -> str:
    return "1 line" if lines == 1 else f"{lines} lines"
