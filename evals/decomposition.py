"""Why a sampler loses: the nats of data under it, as the model's own error, that of writing together, and that of
approximations.

The sampler chooses which positions each forward writes, as it always does, but what is written is the data's tokens x
(teacher forcing). Of the positions S_1, S_2, ... that its forwards write,

    sampler  = - sum_k sum_{i in S_k} ln p'(x_i)                      as the sampler read it, approximations included
    marginal = - sum_k sum_{i in S_k} ln p(x_i | all before S_k)      by an exact forward per step
    chain    = - sum_k sum_{i in S_k} ln p(x_i | all before S_k, and what of S_k was written before i)

where the chain writes the position next that an exact forward is most confident of. Then

    sampler = chain (model) + (marginal - chain) (joint) + (sampler - marginal) (approximation).

EB-Sampler has the first two (arXiv 2505.24857, eqs. 7 to 9); its bound on the expected joint error of a step is the sum
of the entropies of the marginals less the largest.
"""

import argparse
import dataclasses
import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from dllm_jax import DllmError, Model
from dllm_jax.models.denoiser import DenoiserLike, Span
from dllm_jax.models.kv_cache import slice_rows, write_rows
from dllm_jax.pytree import pytree
from dllm_jax.storage import write_file
from evals import files, plots, stderr
from evals.flags import add_batch, add_model, add_task, command, models_of
from evals.models import Models
from evals.runner import USUAL, Batches, Measurement, environment_of, names_of, prepare_batches
from evals.sampler import SamplerConfig, all_samplers, parse_sampler
from evals.tasks import SPLITS, Example, Task, make_task
from evals.tasks.base import check_split
from samplers.canvas import Canvas
from samplers.sampler import describe_broken, sample_jit
from samplers.tokens.predictions import Sampling, logprobs_of, predict, readout

PARTS = ("nats", "model_error", "joint_error", "approximation_error", "bound")
"""What a row and a decomposition have, in nats per answer; the first is the sum of the next three."""


@dataclasses.dataclass(frozen=True)
class DecomposedStep:
    """A forward that wrote tokens of the answer.

    Attributes:
        written: how many.
        joint_error, bound: nats of this forward.
    """

    written: int
    joint_error: float
    bound: float


@dataclasses.dataclass(frozen=True)
class DecomposedRow:
    """One example.

    Attributes:
        index: number of the example in its split.
        positions: tokens of the answer up to and with its first end token, without what was given.
        all_forwards: forwards that wrote the whole canvas.
        nats, model_error, joint_error, approximation_error, bound: as in `Decomposition`.
        wrong_together: positions whose token is not the best one of the exact forward before their step.
        wrong_one_by_one: those whose token is not the best one where the step's positions are written one by one.
        steps: forwards that wrote tokens of the answer.
    """

    index: int
    positions: int
    all_forwards: int
    nats: float
    model_error: float
    joint_error: float
    approximation_error: float
    bound: float
    wrong_together: int
    wrong_one_by_one: int
    steps: tuple[DecomposedStep, ...] = dataclasses.field(repr=False)

    @property
    def forwards(self) -> int:
        """Forwards that wrote tokens of the answer."""
        return len(self.steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decomposition(Measurement):
    """Why a sampler loses. Nats are means per answer, each with its standard error over the answers.

    Attributes:
        positions: mean tokens of an answer, its first end token included.
        forwards: mean forwards that wrote some of them; `all_forwards` those that wrote the whole canvas.
        nats: minus the log-probability of the data, as the sampler read it; the sum of the next three.
        model_error: nats of the exact model, one position at a time.
        joint_error: what writing several positions in a forward adds.
        approximation_error: what stale keys and values, smoothing, guidance and a lookahead add.
        bound: EB-Sampler's bound on the expected joint error.
        wrong_together: share of the positions where greedy decoding by the exact model is wrong, all positions of a
            step together, with Wilson's standard error as if positions were independent.
        wrong_one_by_one: the same, one position after the other.
        rows: every example.
    """

    positions: float
    forwards: float
    forwards_stderr: float
    all_forwards: float
    nats: float
    nats_stderr: float
    model_error: float
    model_error_stderr: float
    joint_error: float
    joint_error_stderr: float
    approximation_error: float
    approximation_error_stderr: float
    bound: float
    bound_stderr: float
    wrong_together: float
    wrong_together_stderr: float
    wrong_one_by_one: float
    wrong_one_by_one_stderr: float
    rows: tuple[DecomposedRow, ...] = dataclasses.field(default=(), repr=False)

    def by_written(self) -> list[dict[str, Any]]:
        """Of forwards that wrote equally many tokens of the answer: how many there were, and their mean nats."""
        groups = defaultdict[int, list[DecomposedStep]](list)
        for row in self.rows:
            for step in row.steps:
                groups[step.written].append(step)
        mean = lambda steps, name: float(np.mean([getattr(step, name) for step in steps]))
        return [
            {"written": written, "forwards": len(steps)}
            | {name: mean(steps, name) for name in ("joint_error", "bound")}
            for written, steps in sorted(groups.items())
        ]


def decompose(
    model: Model | Models,
    task: str | Task,
    sampler: str | SamplerConfig,
    *,
    n: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    split: str = "test",
    examples: Sequence[Example] | None = None,
    progress: bool | None = None,
) -> Decomposition:
    """Splits a sampler's error on the references of n examples into the model's, the joint and the approximation's.

    The whole canvas is written, whatever ends an answer; tokens after an answer's first end token are not counted.
    Arguments are those of `evals.run`.

    Raises:
        DllmError: as `evals.run`, for a sampler that revises what it wrote, asks a verifier or draws tokens, and for
            examples without a reference.
    """
    spec, batches = _prepare(model, task, sampler, n, batch_size, seed, split, examples, progress)
    return _measure(spec, batches, seed, split, progress)


def _prepare(
    model: Model | Models,
    task: str | Task,
    sampler: str | SamplerConfig,
    n: int | None,
    batch_size: int,
    seed: int,
    split: str,
    examples: Sequence[Example] | None = None,
    progress: bool | None = None,
) -> tuple[SamplerConfig, Batches]:
    """Everything before the first forward; the sampler writes its whole canvas."""
    spec = parse_sampler(sampler) if isinstance(sampler, str) else sampler
    problems = make_task(task) if isinstance(task, str) else task
    if ends := sorted({"stop", "ignore_eos"} & spec.options.keys()):
        raise DllmError(f"sampler {spec}: {ends[0]} has no effect where the whole canvas is written; leave it out")
    whole = spec.with_options(ignore_eos=True, stop=()) if problems.stops else spec
    batches = prepare_batches(model, problems, whole, n, batch_size, seed, split, 0, examples, progress=progress)[1]
    built: Any = batches.sampler
    if built.sampling.temperature is not None:
        why = "the data's tokens are written, whatever is drawn"
        raise DllmError(f"sampler {spec}: temperature has no meaning here, as {why}; leave it out")
    if getattr(built, "fill_after_eos", False):
        raise DllmError(f"sampler {spec}: fill_after_eos writes tokens that no forward predicted; leave it out")
    for number, example in enumerate(map(batches.task.with_reference, batches.examples)):
        if not example.targets.any():
            needs = "decompose needs a task with one right answer"
            raise DllmError(f"{problems} has examples without a reference; {needs}")
        if (length := len(example.answer_ids)) > built.gen_length:
            longer = f"the answer of {split} example {number} has {length} tokens"
            raise DllmError(f"sampler {spec}: {longer} and gen_length is {built.gen_length}; raise it")
    try:
        _force(built, np.zeros((batches.size, built.gen_length), np.int32))
    except DllmError as error:
        raise DllmError(f"sampler {spec}: {error}") from None
    return spec, batches


def _force(sampler: Any, target: np.ndarray) -> Any:
    """The sampler, which writes these tokens [B, G]."""
    return dataclasses.replace(sampler, sampling=dataclasses.replace(sampler.sampling, target=jnp.asarray(target)))


def _measure(spec: SamplerConfig, batches: Batches, seed: int, split: str, progress: bool | None) -> Decomposition:
    rows = sorted(_decompose_all(batches, progress, str(spec)), key=lambda row: row.index)
    column = lambda name: [getattr(row, name) for row in rows]
    positions = sum(column("positions"))
    found: dict[str, Any] = {name: float(np.mean(column(name))) for name in ("positions", "all_forwards")}
    for name in ("forwards", *PARTS):
        found |= {name: float(np.mean(column(name))), f"{name}_stderr": stderr.of_mean(column(name))}
    for name in ("wrong_together", "wrong_one_by_one"):
        share = sum(column(name)) / positions
        found |= {name: share, f"{name}_stderr": stderr.of_share(share, positions)}
    about: dict[str, Any] = {"split": split, "seed": seed, "n": len(rows), "batch_size": batches.size}
    environment = environment_of(batches.model)
    return Decomposition(**names_of(spec, batches), **about, **found, **environment, rows=tuple(rows))


def _decompose_all(batches: Batches, progress: bool | None, name: str) -> Iterator[DecomposedRow]:
    """The rows, in the order of their answers' lengths: a batch takes as many exact forwards as its longest answer."""
    model, length = batches.model, batches.sampler.gen_length
    pairs = [_target(model, batches, number, length) for number in range(len(batches.examples))]
    targets, counted = map(np.stack, zip(*pairs, strict=True))
    order = np.argsort(counted.sum(axis=1), kind="stable").tolist()
    hide = None if progress is None else not progress
    with tqdm(total=len(order), desc=name, unit="example", disable=hide) as bar:
        for first in range(0, len(order), batches.size):
            chunk = order[first : first + batches.size]
            index = chunk + chunk[-1:] * (batches.size - len(chunk))  # one program for all
            inputs, forced = batches.inputs(index), _force(batches.sampler, targets[index])
            keys = jax.random.wrap_key_data(jnp.asarray(batches.keys[index]))
            result = sample_jit(forced, model.denoiser, **inputs, key=keys)
            canvas, visible = _begin(forced, model.denoiser, inputs)
            what = targets[index], counted[index], result.decoded_at
            exact = _conditionals(model.denoiser, canvas, visible, *what)
            result, exact = jax.device_get((result, exact))
            if sentence := describe_broken(result.broken_at, index):
                raise DllmError(f"{sentence}; nothing is decomposed")
            for row, number in enumerate(chunk):
                one = jax.tree.map(lambda x, row=row: x[row], (result, exact))
                yield _row_of(number, counted[number], *one)
            bar.update(len(chunk))


def _target(model: Model, batches: Batches, number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of an example's canvas [G], end tokens after its answer, and which of them count."""
    example, position = batches.task.with_reference(batches.examples[number]), np.arange(length)
    target = np.full(length, model.config.eos_id, np.int32)
    target[: len(example.answer_ids)] = example.answer_ids
    counted = np.pad(example.targets, (0, length - len(example.answer_ids)), constant_values=batches.task.stops)
    ends = np.isin(target, model.config.end_ids) & batches.task.stops
    return target, counted & (position <= (np.argmax(ends) if ends.any() else length))


def _row_of(index: int, counted: np.ndarray, result: Any, exact: "Conditionals") -> DecomposedRow:
    """The row of one example, of arrays [G]."""
    steps = []
    for step in np.unique(result.decoded_at[counted]):
        among = counted & (result.decoded_at == step)
        entropy = exact.entropy[among].astype(np.float64)
        joint = (exact.chain[among].astype(np.float64) - exact.marginal[among]).sum()
        steps.append(DecomposedStep(int(among.sum()), float(joint), float(entropy.sum() - entropy.max())))
    nats = lambda logprobs: -float(logprobs[counted].sum(dtype=np.float64))
    sampler, marginal, chain = map(nats, (result.logprobs, exact.marginal, exact.chain))
    return DecomposedRow(
        index=index,
        positions=int(counted.sum()),
        all_forwards=int(result.nfe),
        nats=sampler,
        model_error=chain,
        joint_error=marginal - chain,
        approximation_error=sampler - marginal,
        bound=sum(step.bound for step in steps),
        wrong_together=int(exact.wrong_together[counted].sum()),
        wrong_one_by_one=int(exact.wrong_one_by_one[counted].sum()),
        steps=tuple(steps),
    )


@pytree()
class Conditionals:
    """What exact forwards say about tokens [B, G] where these count; 0 elsewhere.

    Attributes:
        marginal: float32, log-probability before the position's step.
        entropy: float32, in nats, of that distribution.
        wrong_together: bool, whether its best token is another.
        chain: float32, log-probability given also what of the step is written before.
        wrong_one_by_one: bool, whether the best token of that distribution is another.
    """

    marginal: jax.Array
    entropy: jax.Array
    wrong_together: jax.Array
    chain: jax.Array
    wrong_one_by_one: jax.Array


@jax.jit
def _begin(sampler: Any, denoiser: DenoiserLike, inputs: dict[str, Any]) -> tuple[Canvas, jax.Array]:
    """The canvas before the first forward, and what an exact forward over it sees."""
    canvas = sampler.init(denoiser, **inputs).canvas
    return canvas, sampler.visible(denoiser, canvas)


@jax.jit
def _conditionals(
    denoiser: DenoiserLike,
    canvas: Canvas,
    visible: jax.Array,
    target: jax.Array,
    counted: jax.Array,
    decoded_at: jax.Array,
) -> Conditionals:
    """One exact forward per counted position of the longest row: every row writes a position in each. A step's counted
    positions come first, so that nothing after the answer is a condition within it.

    Args:
        canvas, visible: as `_begin` gives them; one program serves all samplers of equal shapes.
        target: [B, G] int32, the data's tokens.
        counted: [B, G] bool.
        decoded_at: [B, G] int32, as in `Result`.
    """
    start, length, never = canvas.prompt_lengths, canvas.gen_length, jnp.iinfo(jnp.int32).max
    masked = slice_rows(canvas.tokens, start, length)

    def write_next(carry: tuple[jax.Array, Conditionals]) -> tuple[jax.Array, Conditionals]:
        left, found = carry
        step = jnp.min(jnp.where(left, decoded_at, never), axis=1, keepdims=True)
        together = counted & (decoded_at == step)
        written = canvas.undecided & ((decoded_at < step) | (together & ~left))
        tokens = write_rows(canvas.tokens, jnp.where(written, target, masked), start)
        scores = readout(denoiser, denoiser.forward(tokens, visible, outputs=Span(start, length))[0])
        best = predict(scores, Sampling(), mask_id=denoiser.mask_id, score_from="raw", draw=None)
        logprob, wrong = logprobs_of(scores, target), best.token != target
        next_one = jnp.argmax(jnp.where(together & left, best.confidence, -1.0), axis=1)[:, None]
        chosen = left & (jnp.arange(length) == next_one)
        entered = together & ~jnp.any(together & ~left, axis=1, keepdims=True)
        return left & ~chosen, Conditionals(
            marginal=jnp.where(entered, logprob, found.marginal),
            entropy=jnp.where(entered, best.entropy, found.entropy),
            wrong_together=jnp.where(entered, wrong, found.wrong_together),
            chain=jnp.where(chosen, logprob, found.chain),
            wrong_one_by_one=jnp.where(chosen, wrong, found.wrong_one_by_one),
        )

    numbers, no = jnp.zeros(target.shape, jnp.float32), jnp.zeros(target.shape, bool)
    nothing = Conditionals(numbers, numbers, no, numbers, no)
    return lax.while_loop(lambda carry: carry[0].any(), write_next, (counted, nothing))[1]


# The command ---------------------------------------------------------------------------------------------------------

COLUMNS = (
    "sampler model n positions forwards forwards_stderr all_forwards nats nats_stderr model_error model_error_stderr "
    "joint_error joint_error_stderr approximation_error approximation_error_stderr bound bound_stderr wrong_together "
    "wrong_together_stderr wrong_one_by_one wrong_one_by_one_stderr"
).split()


def add(commands: Any) -> None:
    """The command `python -m evals decompose`."""
    about = "why samplers lose: the model's error, the joint one and approximations (docs/decompose.md)"
    flag = command(commands, "decompose", _run, about)
    add_model(flag)
    add_task(flag)
    flag("--split", default="test", metavar="SPLIT", help=f"{', '.join(SPLITS)} (default: test)")
    flag("--n", type=int, metavar="N", help=f"examples (default: {USUAL}, of a file all)")
    add_batch(flag)
    flag("--sampler", action="append", default=[], metavar="SPEC", help="as in run, with lists: eb:gamma=0.1|1")
    flag("--out", required=True, metavar="DIR", help="folder of results.json, results.csv, steps.csv, decompose.png")


def _run(options: argparse.Namespace) -> None:
    samplers, task, models = all_samplers(options.sampler), make_task(options.task), models_of(options)
    check_split(options.split)
    plots.require_matplotlib()
    drawn = (options.n, options.batch_size, options.seed, options.split)
    prepared = [_prepare(models, task, sampler, *drawn) for sampler in samplers]
    folder = files.make_folder(options.out)
    print("forwards   nats of an answer = model + joint + approximation   EB's bound   wrong together, one by one, %")
    found = list[Decomposition]()
    for spec, batches in prepared:
        found.append(_measure(spec, batches, options.seed, options.split, None))
        _write(folder, found)
        print(_describe(found[-1]), flush=True)
    write_file(folder / "decompose.png", draw(found))
    print(f"{len(found)} samplers; results.json, results.csv, steps.csv, decompose.png in {folder}")


def _describe(one: Decomposition) -> str:
    parts = " + ".join(f"{getattr(one, name):.3f}" for name in PARTS[1:4])
    wrong = f"{100 * one.wrong_together:6.2f} {100 * one.wrong_one_by_one:6.2f}"
    total = f"{one.nats:8.3f} +- {one.nats_stderr:.3f}"
    return f"{one.forwards:8.2f} {total} = {parts:24s} {one.bound:8.3f} {wrong}  {one.sampler}"


def _write(folder: Any, found: Sequence[Decomposition]) -> None:
    summaries = [one.summary() for one in found]
    write_file(folder / "results.json", files.as_json({"decompositions": summaries}))
    write_file(folder / "results.csv", files.as_csv([{name: row[name] for name in COLUMNS} for row in summaries]))
    steps = [{"sampler": one.sampler} | step for one in found for step in one.by_written()]
    write_file(folder / "steps.csv", files.as_csv(steps))


_SHOWN = {"model_error": "the model's own", "joint_error": "writing together", "approximation_error": "approximations"}


def draw(found: Sequence[Decomposition]) -> bytes:
    """A bar for each sampler, most forwards first: its nats per answer by their cause, as a PNG."""
    ordered = sorted(found, key=lambda one: one.forwards)  # the first bar is the lowest
    figure = plots.require_matplotlib()(figsize=(9.0, 1.7 + 0.32 * len(ordered)), layout="constrained")
    axes, place = figure.subplots(), np.arange(len(ordered))
    above, below = np.zeros(len(ordered)), np.zeros(len(ordered))
    for (name, label), colour in zip(_SHOWN.items(), plots.COLOURS[:3], strict=True):
        nats = np.asarray([getattr(one, name) for one in ordered])
        axes.barh(place, nats, left=np.where(nats < 0, below, above), height=0.7, color=colour, label=label)
        above, below = above + np.maximum(nats, 0), below + np.minimum(nats, 0)
    bounds = np.asarray([one.model_error + one.bound for one in ordered])
    total, error = ([getattr(one, name) for one in ordered] for name in ("nats", "nats_stderr"))
    axes.errorbar(total, place, xerr=error, fmt="none", ecolor="0.2", elinewidth=1.0, capsize=2)
    look = {"color": "black", "markerfacecolor": "white", "markersize": 4.5}
    axes.plot(bounds, place, "D", label="the model's own + EB's bound on writing together", **look)
    right = np.max([above, bounds, np.add(total, error)], axis=0)
    for at, (one, end) in enumerate(zip(ordered, right, strict=True)):
        text = f"{one.forwards:.1f} forwards"
        axes.annotate(text, (end, at), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(place, [one.sampler for one in ordered], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("nats per answer, with the standard error of their sum")
    axes.set_xlim(min(1.05 * below.min(), 0), 1.2 * right.max())
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()  # the marker comes first
    figure.legend(
        handles[1:] + handles[:1],
        labels[1:] + labels[:1],
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    first = found[0]
    figure.suptitle(f"{first.model} on {first.task}, {first.n} {first.split} examples", fontsize=10)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()
