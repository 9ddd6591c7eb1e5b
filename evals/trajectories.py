"""Trajectories as data: any sampler over many prompts, and for each generation the step that wrote each token.

    out/trajectories.json                      what was run; the same command resumes
    out/trajectories-00000000-00001024.npz     the prompts of these numbers, the last not included

A shard appears whole under its final name or not at all, and its name says which prompts it holds: a kill loses
at most the shard that was being made, and no prompt is there twice. A generation depends on its prompt, its
number and the seed alone, so that the result is the same however often it was cut off.
"""

import argparse
import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dllm_jax import Model
from dllm_jax.errors import DllmError
from dllm_jax.parallel.sharding import check_splits
from dllm_jax.storage import write_file
from evals.flags import add_batch, add_model, add_task, command, models_of
from evals.models import Models
from evals.tasks import Task, make_task
from samplers.checks import check_length
from samplers.config.factory import CanvasSampler
from samplers.config.registry import settings_of
from samplers.config.sampler_config import SamplerConfig, parse_sampler
from samplers.engine.engine import Engine
from samplers.engine.requests import Request
from samplers.engine.runner import Engines
from samplers.inputs import open_id
from samplers.sampler import Result, describe_broken
from samplers.text.prompts import add_start_token, bucket_length, check_lengths, given_canvas, pad_prompts
from train.data import ExampleLike, Setup, Source, count_examples
from train.data.files import jsonl
from train.data.shards import ABOUT_FILE, shards
from train.trajectory import trajectory_of

_BATCH = "prompts (--batch-size)"

Verify = Callable[[Any, list[int]], bool]  # of an example, and the tokens that were generated for it


def collect(
    model: Model,
    sampler: CanvasSampler,
    source: Source,
    out: str | Path,
    *,
    about: Mapping[str, Any],
    n: int | None = None,
    batch_size: int = 64,
    shard_size: int = 1024,
    seed: int = 0,
    stops: bool = True,
    verify: Verify | None = None,
    progress: bool = True,
) -> int:
    """Samples prompts 0 to n - 1 of a source, those that `out` does not hold yet.

    Args:
        source: examples; of these the prompt and what is given of the answer are used.
        about: what was run, for the folder, besides the sampler; a run with other settings is refused there.
        n: prompts; all of a finite source by default.
        batch_size: prompts sampled together; on a mesh, which is the model's, split over its devices.
        shard_size: prompts per file, which is also what a kill costs at most.
        seed: of the sampler's random numbers.
        stops: whether an end token ends an answer; else a canvas is as long as the example's answer.
        verify: whether an answer is right, stored as `correct`.
        progress: show a bar on stderr.

    Returns:
        How many prompts were sampled.

    Raises:
        DllmError: for bad numbers, a folder with something else, prompts that do not fit, and for a full disk.
    """
    count = count_examples(source)
    check_length("n", n, optional=True)
    check_length("batch_size", batch_size)
    check_length("shard_size", shard_size)
    if model.layout is not None:
        check_splits(model.layout.mesh, batch_size, _BATCH)
    if n is None and count is None:
        raise DllmError("the data has no end; say how many prompts are wanted by --n")
    total = min(n or count or 0, count or n or 0)
    ran = {"seed": seed, "gen_length": sampler.gen_length, "settings": settings_of(sampler)}
    folder = _begin(Path(out).expanduser(), {**about, **ran})
    done = max((shard.end for shard in shards(folder)), default=0)
    make = _ShardSampler(model, sampler, source, batch_size, seed, stops, verify)
    with tqdm(total=total, initial=min(done, total), unit="prompt", disable=None if progress else True) as bar:
        for first in range(done, total, shard_size):
            last = min(first + shard_size, total)
            _write(folder / f"trajectories-{first:08d}-{last:08d}.npz", make.shard(range(first, last), bar))
    return max(total - done, 0)


def collect_from(
    model: Model | Models,
    sampler: str | SamplerConfig,
    out: str | Path,
    *,
    task: str | Task | None = None,
    data: str | Path | None = None,
    split: str | None = None,
    **options: Any,
) -> int:
    """`collect` for the problems of a task, whose checker's verdicts are stored, or for the prompts of a file.

    Args:
        model: the model, or several, of which the sampler names one.
        sampler, task: objects, or specs as on the command line.
        data: in place of a task, JSON lines as for training: prompt and answer, or messages.
        split: of the task, "train" (the default) or "validation".
        options: n, batch_size, shard_size, seed and progress of `collect`.

    Returns:
        How many prompts were sampled.

    Raises:
        DllmError: as `collect`, for neither or both of task and data, bad specs, and a task that is for scoring.
    """
    if (task is None) == (data is None):
        raise DllmError("prompts come from --task or from --data; pass one of them")
    if data is not None and split:
        raise DllmError("--split is for --task; leave it out")
    spec = parse_sampler(sampler) if isinstance(sampler, str) else sampler
    models = model if isinstance(model, Models) else Models(model)
    about: dict[str, Any] = {"data": str(task or data), "sampler": str(spec)}
    if data is not None:
        chosen = models.of(spec)
        built = spec.anywhere().load_verifier(models.load).build(chosen)
        setup = Setup(chosen.config, chosen.tokenizer, chosen.config.max_length)
        source: Source = jsonl(setup, path=str(data), turns="last")
        about["model"] = chosen.name
        return collect(chosen, built, source, out, about=about, **options)
    assert task is not None
    chosen, bound, built = models.build(spec, make_task(task) if isinstance(task, str) else task)
    problems = bound.source(split or "train")
    verify = lambda example, ids: bound.verify(example, ids).correct
    about |= {"model": chosen.name, "split": problems.split}
    return collect(chosen, built, problems, out, about=about, stops=bound.stops, verify=verify, **options)


def _begin(folder: Path, about: dict[str, Any]) -> Path:
    """Makes the folder, or compares what it was made with.

    Raises:
        DllmError: when it holds something else.
    """
    path = folder / ABOUT_FILE
    try:
        if path.is_file():
            old = json.loads(path.read_text(encoding="utf-8"))
            about = {name: value for name, value in about.items() if name != "settings" or name in old}  # of late
            if other := sorted(name for name in old.keys() | about.keys() if old.get(name) != about.get(name)):
                was, now = old.get(other[0]), about.get(other[0])
                raise DllmError(f"{folder} was made with {other[0]} {was!r}, not {now!r}; choose another --out")
            return folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DllmError(f"{folder} holds something else than trajectories; choose another --out")
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(about, indent=2) + "\n")
    except (OSError, ValueError) as error:
        raise DllmError(f"{folder} cannot be used ({error}); choose another --out") from None
    return folder


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    write_file(path, file.getvalue())


@dataclasses.dataclass
class _ShardSampler:
    """Samples prompts by number, in batches, and makes the arrays of a file of them."""

    model: Model
    sampler: CanvasSampler
    source: Source
    batch_size: int
    seed: int
    stops: bool
    verify: Verify | None
    engines: Engines = dataclasses.field(default_factory=Engines)

    def shard(self, numbers: range, bar: "tqdm[Any]") -> dict[str, np.ndarray]:
        """The arrays of one file, see `Shard.load`."""
        examples = [self.source.example(number) for number in numbers]
        rows = [add_start_token(self.model, example.prompt_ids) for example in examples]
        check_lengths(self.model, self.sampler, rows)
        width = bucket_length(max(map(len, rows)))
        engine = self.engines.of(self.model, self.sampler, self.batch_size, width)
        for request in self._requests(numbers, examples, rows):
            engine.submit(request)
        found: dict[int, Result] = {}
        for request in engine.results():
            assert request.result is not None
            if sentence := describe_broken(request.result.broken_at, [request.number]):
                raise DllmError(f"{sentence}; no trajectories are made of it")
            found[request.number] = request.result
            bar.set_postfix_str(self._speed(engine, found), refresh=False)
            bar.update()
        return self._arrays(examples, rows, jax.tree.map(lambda *x: np.concatenate(x), *(found[i] for i in numbers)))

    def _requests(self, numbers: range, examples: list[ExampleLike], rows: list[list[int]]) -> Iterator[Request]:
        """Long answers first, so that few rows are at work at the end of a file."""
        keys = jax.vmap(lambda number: jax.random.fold_in(jax.random.key(self.seed), number))(jnp.asarray(numbers))
        key_data, missing = np.asarray(jax.random.key_data(keys)), open_id(self.model.denoiser)
        for i in sorted(range(len(rows)), key=lambda i: -self._length(examples[i])):
            answer = (np.asarray(examples[i].answer_ids), examples[i].given)
            given = given_canvas([answer], self.sampler.gen_length, missing)
            yield Request(
                prompt=rows[i],
                gen_length=self._length(examples[i]),
                key_data=key_data[i],
                given=None if given is None else given[0],
                number=numbers[i],
            )

    def _length(self, example: ExampleLike) -> int:
        return self.sampler.gen_length if self.stops else len(example.answer_ids)

    def _speed(self, engine: Engine, found: Mapping[int, Result]) -> str:
        """The speed on this file, for the progress bar."""
        nfe = np.mean([result.nfe[0] for result in found.values()])
        return f"{engine.stats.row_steps / max(engine.stats.seconds, 1e-9):.0f} forwards/s, NFE {nfe:.1f}"

    def _arrays(self, examples: list[ExampleLike], rows: list[list[int]], result: Result) -> dict[str, np.ndarray]:
        prompt, lengths = pad_prompts(rows)
        answers = [(np.asarray(example.answer_ids), example.given) for example in examples]
        known: dict[str, Any] = {
            "gen_lengths": jnp.asarray([self._length(example) for example in examples], jnp.int32),
            "given": given_canvas(answers, self.sampler.gen_length, open_id(self.model.denoiser)),
        }
        found = trajectory_of(result, prompt, lengths, mask_id=self.model.denoiser.mask_id, **known)
        tokens, step = np.asarray(found.tokens), np.asarray(found.step)
        small = np.uint16 if self.model.config.vocab_size <= 1 << 16 else np.int32
        return {
            "prompts": np.concatenate(rows).astype(small),
            "prompt_lengths": np.asarray(lengths),
            "gen_lengths": np.asarray(known["gen_lengths"]),
            "tokens": tokens.astype(small),
            "step": step.astype(np.int16),
            "nfe": np.asarray(result.nfe),
        } | self._verdicts(examples, tokens, np.asarray(result.lengths))

    def _verdicts(self, examples: list[ExampleLike], tokens: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
        """Which answers are right, where that can be said."""
        if self.verify is None:
            return {}
        cut = [ends[row] if self.stops else len(example.answer_ids) for row, example in enumerate(examples)]
        answers = [tokens[row, :end].tolist() for row, end in enumerate(cut)]
        return {"correct": np.asarray([self.verify(*pair) for pair in zip(examples, answers, strict=True)], bool)}


def add(commands: Any) -> None:
    """The command `python -m evals trajectories`."""
    flag = command(commands, "trajectories", _run, "sample prompts, and record when each token was written")
    add_model(flag)
    add_task(flag, required=False)
    flag("--data", metavar="FILE", help="instead of --task, JSON lines as for training: prompt and answer, or messages")
    flag("--split", metavar="SPLIT", help="of the task: train or validation (default: train)")
    flag("--sampler", required=True, metavar="SPEC", help="as in run, such as threshold:threshold=0.8,block_length=32")
    flag("--out", required=True, metavar="DIR", help="folder of the trajectories; the same command resumes")
    flag("--n", type=int, metavar="N", help="prompts; by default all there are")
    add_batch(flag)
    flag("--shard-size", type=int, default=1024, metavar="N", help="prompts per file (default: 1024)")
    flag("--no-progress", action="store_true", help="no progress bar")


def _run(options: argparse.Namespace) -> None:
    count = collect_from(
        models_of(options),
        options.sampler,
        options.out,
        task=options.task,
        data=options.data,
        split=options.split,
        progress=not options.no_progress,
        **{name: getattr(options, name) for name in ("n", "batch_size", "shard_size", "seed")},
    )
    print(f"{options.out}: {count} prompts sampled, {shards(options.out)[-1].end} there")
