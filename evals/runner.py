"""Scoring a model on a task: accuracy and speed of one sampler, whose examples pass through slots of one program."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dllm_jax import Model
from dllm_jax.environment import environment
from dllm_jax.params.quantized import dtype_label
from dllm_jax.text.tokenizer import token_bytes
from evals import stderr
from evals.distributed import ALONE, Processes
from evals.extraction import tokens_before_stop
from evals.models import Models
from evals.sampler import SamplerConfig, parse_sampler
from evals.tasks import Example, Task, Verdict, make_task
from evals.token_counts import CountedAnswer, answer_of, complete_at, count_as, forwards_of, method_of, speed_of
from samplers import Generation, Result
from samplers.checks import check_length, check_whole
from samplers.config.factory import CanvasSampler
from samplers.engine.engine import Engine
from samplers.engine.program import numbers_of
from samplers.engine.requests import Request
from samplers.engine.runner import Engines, run_all, slots_for, warn_at_end
from samplers.inputs import open_id
from samplers.text.prompts import add_start_token, check_lengths, given_canvas, pad_prompts
from samplers.tokens.noise import row_keys

USUAL = 256
"""Examples of a task that draws them, by default."""


@dataclasses.dataclass(frozen=True)
class ScoredRow:
    """One example's outcome.

    Attributes:
        index: number of the example in its split.
        tokens: generated tokens before the first end, without what was given.
        nfe: forwards of the denoiser.
        full_forwards: those of them that covered the whole sequence.
        committed: tokens that the forwards wrote, those after the end too.
        verifier_forwards: forwards of the verifier, 0 where there is none.
        ids, text: the answer, up to and without its end.
    """

    index: int
    correct: bool
    strict: bool
    exact: bool
    tokens: int
    nfe: int
    full_forwards: int
    committed: int
    verifier_forwards: int
    ids: list[int] = dataclasses.field(repr=False)
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was run, and where.

    Attributes:
        model, task, sampler: what was run; the sampler as its spec, `settings` as all its options.
        split, seed, n, batch_size: of the examples; `seed` is of the sampler's random numbers, the task has its own.
        hardware, versions, dtype, parameters: of the run; devices are those of all processes.
    """

    model: str
    task: str
    sampler: str
    settings: dict[str, Any]
    split: str
    seed: int
    n: int
    batch_size: int
    dtype: str
    parameters: int
    hardware: dict[str, Any]
    versions: dict[str, str]

    def summary(self) -> dict[str, Any]:
        """Everything but the rows, as JSON takes it."""
        return {name: value for name, value in vars(self).items() if name != "rows"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Measurement):
    """The scores of one sampler.

    Attributes:
        accuracy: share of examples whose final answer is right, with its standard error by Wilson's interval.
        strict_accuracy: share whose steps are all right, too.
        exact_match: share whose tokens are those of the reference.
        nfe: mean forwards per example, with the standard error of the mean; `full_forwards` those of the whole
            sequence.
        tokens: mean generated tokens per example up to and without the first end.
        tokens_per_forward: all tokens over all forwards (TPF).
        committed_per_forward: the same with what was written after the end; what APD calls accepted per iteration.
        verifier_forwards: mean forwards of the verifier per example, 0 where there is none.
        tokens_per_second: without compilation and the host's work on answers.
        seconds: wall time of sampling everything, of several processes the slowest one's; `compile_seconds` apart, next
            to 0 where the program was there.
        occupancy: share of the batch's rows that were at work, over all steps.
        compat_count: how the papers that were asked for count the same answers: name -> fields of `PaperCount` that
            they report. Speeds over each answer's own seconds need a batch of one.
        rows: every example.
    """

    accuracy: float
    accuracy_stderr: float
    strict_accuracy: float
    exact_match: float
    nfe: float
    nfe_stderr: float
    full_forwards: float
    tokens: float
    tokens_per_forward: float
    committed_per_forward: float
    verifier_forwards: float
    tokens_per_second: float
    seconds: float
    compile_seconds: float
    occupancy: float
    compat_count: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    rows: tuple[ScoredRow, ...] = dataclasses.field(default=(), repr=False)


def run(
    model: Model | Models,
    task: str | Task,
    sampler: str | SamplerConfig,
    *,
    n: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    split: str = "test",
    first: int = 0,
    examples: Sequence[Example] | None = None,
    counts: Sequence[str] = (),
    engines: Engines | None = None,
    processes: Processes = ALONE,
    progress: bool | None = None,
) -> Report:
    """Scores a sampler on n examples of a task's split, from number `first` on.

    Every row depends on its example, its index and the seed alone. `batch_size` examples run together, and the next
    begins as soon as one has ended. Samplers that differ in numbers only run the same program.

    Args:
        model: the model, or several, of which the sampler names one.
        task, sampler: objects, or specs as on the command line.
        n: examples, at most; by default 256, or all of a file.
        examples: the examples themselves (for this model's tokens, see `Task.bind`).
        counts: names of papers whose counts are added, see `evals.token_counts.COUNTS`.
        engines: compiled programs, which several runs may share.
        processes: those that share the examples; each gets the whole report.
        progress: whether to show a progress bar; by default in a terminal.

    Raises:
        DllmError: for bad specs and numbers, a model of other tokens, or sequences longer than its context; before
            anything is compiled.
    """
    models = model if isinstance(model, Models) else Models(model)
    drawn = (n, batch_size, seed, split, first, examples)
    spec, batches = prepare_batches(models, task, sampler, *drawn, processes=processes, progress=progress)
    outcome = batches.score(engines or Engines(), progress, str(spec), counts)
    about: dict[str, Any] = {"split": split, "seed": seed, "n": len(batches.examples), "batch_size": batches.size}
    names = names_of(spec, batches)
    return Report(**names, **about, **outcome.scores(), **environment_of(batches.model))


def run_traced(
    model: Model | Models, task: str | Task, sampler: str | SamplerConfig, example: Example
) -> tuple[ScoredRow, Generation]:
    """`run` on one example, and the answer with the trace of every forward, for `samplers.show`."""
    _, batches = prepare_batches(model, task, sampler, n=1, batch_size=1, seed=0, split="test", examples=[example])
    (request,) = run_all(batches.model, batches.sampler, [batches.request(0)], progress=False, trace=True)[1]
    assert request.result is not None
    return batches.row_of(request.result, 0), request.generation


def prepare_batches(
    model: Model | Models,
    task: str | Task,
    sampler: str | SamplerConfig,
    n: int | None,
    batch_size: int,
    seed: int,
    split: str,
    first: int = 0,
    examples: Sequence[Example] | None = None,
    processes: Processes = ALONE,
    progress: bool | None = None,
) -> tuple[SamplerConfig, "Batches"]:
    """Everything before the first forward, with the arguments and errors of `run`; if one model is given, the sampler
    must not name another."""
    spec = parse_sampler(sampler) if isinstance(sampler, str) else sampler
    if not isinstance(model, Models):
        spec.check_unbound()
    models = model if isinstance(model, Models) else Models(model)
    chosen, task, built = models.build(spec, make_task(task) if isinstance(task, str) else task)
    check_length("n", n, optional=True)
    check_length("batch_size", batch_size)
    check_whole("seed", seed, 0, 2**32 - 1)
    examples = draw_examples(task, split, n, progress, first) if examples is None else examples[:n]
    check_length("the number of examples", len(examples))
    slots = slots_for(chosen, processes.most(len(examples)), batch_size)
    return spec, Batches(chosen, task, built, examples, slots, seed, first, processes)


def draw_examples(task: Task, split: str, n: int | None, progress: bool | None = None, first: int = 0) -> list[Example]:
    """n examples of a split from number `first` on, or all there are, with a progress bar if that takes long."""
    there, hide = task.count(split), None if progress is None else not progress
    end = first + (n or USUAL) if there is None else min(first + (n or there), there)
    numbers = tqdm(range(first, end), desc="drawing", unit="example", disable=hide, delay=2.0)
    return [task.example(split, i) for i in numbers]


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """The outcome of all examples."""

    rows: Sequence[ScoredRow]
    seconds: float
    compile_seconds: float
    occupancy: float
    compat_count: dict[str, dict[str, Any]]

    def scores(self) -> dict[str, Any]:
        """The part of a report that was measured."""
        rows = self.rows
        accuracy = float(np.mean([row.correct for row in rows]))
        return {
            "accuracy": accuracy,
            "accuracy_stderr": stderr.of_share(accuracy, len(rows)),
            "strict_accuracy": float(np.mean([row.strict for row in rows])),
            "exact_match": float(np.mean([row.exact for row in rows])),
            **speed_of([vars(row) for row in rows], self.seconds),
            "compile_seconds": self.compile_seconds,
            "occupancy": self.occupancy,
            "compat_count": self.compat_count,
            "rows": tuple(rows),
        }


class Batches:
    """A task's examples as requests to an engine.

    Attributes:
        size: examples that run together.
        first: number of the first one in its split.
        processes: those that share the requests.
    """

    def __init__(
        self,
        model: Model,
        task: Task,
        sampler: CanvasSampler,
        examples: Sequence[Example],
        size: int,
        seed: int,
        first: int = 0,
        processes: Processes = ALONE,
    ) -> None:
        self.model, self.task, self.sampler, self.size, self.examples = model, task, sampler, size, examples
        self.first, self.processes = first, processes
        self._prompts = [add_start_token(model, example.prompt_ids) for example in examples]
        check_lengths(model, sampler, self._prompts)
        self._width = max(task.prompt_width, *map(len, self._prompts))
        self.keys = np.asarray(jax.random.key_data(row_keys(jax.random.key(seed), first + len(examples))[first:]))

    def score(self, engines: Engines, progress: bool | None, name: str, counts: Sequence[str] = ()) -> _Outcome:
        """Samples and verifies all examples."""
        for kind in counts:
            method_of(kind, len(self.examples))
            self.model.require_tokenizer()
        engine = self.engine(engines)
        before = engine.stats
        rows, answers = list[ScoredRow](), list[tuple[int, dict[str, Any]]]()
        for request, result in self.results(engine, progress, name):
            rows.append(row := self.row_of(result, request.number))
            if counts:
                answers.append((row.index, vars(self._counted_answer(request, result, row))))
        spent = vars(engine.stats - before)
        own = {"rows": [vars(row) for row in rows], "answers": answers, **spent}
        return self._merge(self.processes.gather(own), counts)

    def _merge(self, parts: Sequence[Mapping[str, Any]], counts: Sequence[str]) -> _Outcome:
        """The outcomes of all processes, in the order of the examples; times are the slowest process's."""
        seconds, compile_seconds = (max(part[name] for part in parts) for name in ("seconds", "compile_seconds"))
        occupancy = sum(part["row_steps"] for part in parts) / max(sum(part["slot_steps"] for part in parts), 1)
        rows = sorted((ScoredRow(**row) for part in parts for row in part["rows"]), key=lambda row: row.index)
        answers = {index: CountedAnswer(**answer) for part in parts for index, answer in part["answers"]}
        in_order = [answers[index] for index in sorted(answers)]
        return _Outcome(rows, seconds, compile_seconds, occupancy, count_as(counts, self.model, in_order, seconds))

    def engine(self, engines: Engines) -> Engine:
        """The engine with slots for them."""
        return engines.of(self.model, self.sampler, self.size, self._width)

    def results(self, engine: Engine, progress: bool | None, name: str) -> Iterator[tuple[Request, Result]]:
        """This process's requests, called by their examples' numbers, as they end, and their results, with a progress
        bar. Long answers begin first, so that few slots are at work at the end."""
        mine = self.processes.mine(sorted(range(len(self.examples)), key=lambda i: -self._length(self.examples[i])))
        for index in mine:
            engine.submit(self.request(index))
        hide = not self.processes.first or (None if progress is None else not progress)
        ended = warn_at_end(engine.results())
        for request in tqdm(ended, total=len(mine), desc=name, unit="example", disable=hide):
            assert request.result is not None
            yield request, request.result

    def batch(self, results: Mapping[int, Result]) -> Iterator[tuple[list[int], Result, dict[str, Any]]]:
        """Numbers of the examples of each batch, their results, and what they began with: prompt, prompt_lengths,
        gen_lengths, given; the last batch is filled up with the last example."""
        for start in range(0, len(self.examples), self.size):
            index = [min(i, len(self.examples) - 1) for i in range(start, start + self.size)]
            merged = jax.tree.map(lambda *rows: np.concatenate(rows), *(results[i] for i in index))
            yield index, merged, self.inputs(index)

    def inputs(self, index: Sequence[int]) -> dict[str, Any]:
        """What generations of some examples begin with: prompt, prompt_lengths, gen_lengths, given."""
        examples = [self.examples[i] for i in index]
        prompt, lengths = pad_prompts([self._prompts[i] for i in index], self._width)
        answers = [(example.answer_ids, example.given) for example in examples]
        return {
            "prompt": prompt,
            "prompt_lengths": lengths,
            "gen_lengths": jnp.asarray([self._length(example) for example in examples], jnp.int32),
            "given": given_canvas(answers, self.sampler.gen_length, open_id(self.model.denoiser)),
        }

    def request(self, index: int) -> Request:
        """An example as a request with the sampler's own numbers."""
        example, missing = self.examples[index], open_id(self.model.denoiser)
        given = given_canvas([(example.answer_ids, example.given)], self.sampler.gen_length, missing)
        return Request(
            prompt=self._prompts[index],
            gen_length=self._length(example),
            key_data=self.keys[index],
            given=None if given is None else given[0],
            numbers=numbers_of(self.sampler),
            number=index,
        )

    def _length(self, example: Example) -> int:
        """Positions to generate: the answer's own length only if the task has a fixed canvas."""
        return self.sampler.gen_length if self.task.stops else len(example.answer_ids)

    def row_of(self, result: Result, index: int) -> ScoredRow:
        example = self.examples[index]
        end = self._end(result) if self.task.stops else self._length(example)
        ids = result.tokens[0, :end].tolist()
        verdict: Verdict = self.task.verify(example, ids)
        return ScoredRow(
            index=self.first + index,
            correct=verdict.correct,
            strict=verdict.strict,
            exact=verdict.exact,
            tokens=int((result.decoded_at[0, :end] >= 0).sum()),
            **forwards_of(result),
            ids=ids,
            text=self.task.show(ids),
        )

    def _end(self, result: Result) -> int:
        """Tokens before the first end token or stop string; a sampler that ends at a string counts the string's."""
        ids, stop = result.tokens[0, : int(result.lengths[0])], self.task.stop_strings
        if not stop:
            return len(ids)
        pieces = token_bytes(self.model.require_tokenizer(), self.model.config.vocab_size)
        return tokens_before_stop([pieces[token] for token in ids], stop)

    def _counted_answer(self, request: Request, result: Result, row: ScoredRow) -> CountedAnswer:
        stop, alone = self.task.stop_strings, request.seconds if self.size == 1 else None
        numbers = {"tokens": row.tokens, "nfe": row.nfe, "committed": row.committed, "prompt_ids": request.prompt}
        numbers["complete_at"] = complete_at(result, len(row.ids), self.model, stop)
        return answer_of(self.model, result.tokens[0].tolist(), stop, seconds=alone, **numbers)


def names_of(spec: SamplerConfig, batches: Batches) -> dict[str, Any]:
    """The part of a report that names what was run."""
    plain = (bool, int, float, str, type(None))
    chosen = {name: value if isinstance(value, plain) else str(value) for name, value in spec.settings.items()}
    settings = {**chosen, "gen_length": batches.sampler.gen_length, "block_length": batches.sampler.width}
    return {"model": batches.model.name, "task": str(batches.task), "sampler": str(spec), "settings": settings}


def environment_of(model: Model) -> dict[str, Any]:
    """The part of a report that names the model's size, the hardware and the versions."""
    return {
        "dtype": dtype_label(model.params),
        "parameters": sum(int(np.prod(value.shape)) for value in model.params.values()),
        **environment(),
    }
