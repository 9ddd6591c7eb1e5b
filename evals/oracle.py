"""How few forwards a sampler's own trajectories would need: the two oracles of NI sampling (arXiv 2604.18471).

Every example is sampled. The lossless order then does, from the first state on, all following steps at once that the
model predicts rightly there. Tokens and states stay the same, so the number of steps is what an indicator that is never
wrong would reach. The unordered oracle commits in every state all positions that are predicted rightly there, whatever
their step: the tokens stay the same, the states do not, and it takes fewer steps.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from dllm_jax import Model
from evals.runner import prepare_batches
from evals.sampler import SamplerConfig
from evals.tasks import Task
from samplers.engine.runner import Engines
from train.trajectory import MergedSteps, Trajectory, merge_steps, trajectory_of

_merge_compiled = jax.jit(merge_steps, static_argnames="ordered")


@dataclasses.dataclass(frozen=True)
class OracleRow:
    """One example.

    Attributes:
        index: number of the example in its split.
        nfe: forwards of the sampler.
        steps: those of them that committed something.
        merged_steps: steps of the lossless order.
        forced: those of them whose own forward would have given another token.
        unordered_steps: steps of the unordered oracle.
        unordered_forced: those of them in which no final token was predicted, so that the next step was written.
        merged_step: per position of the canvas the step of the lossless order, -1 where none was generated.
    """

    index: int
    nfe: int
    steps: int
    merged_steps: int
    forced: int
    unordered_steps: int
    unordered_forced: int
    merged_step: list[int] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class OracleReport:
    """What the lossless order and the unordered oracle could save.

    Attributes:
        model, task, sampler, split, seed, n: what was run.
        nfe, steps, merged_steps, unordered_steps: means over the examples, of what `OracleRow` has.
        speed_up: forwards of all examples over steps of their lossless orders.
        forced: share of these steps whose own forward would have given another token. It is 0 for a sampler that writes
            the most probable tokens of exact forwards; above, the lossless order is one for the trajectories as they
            are and not for the sampler that made them.
        unordered_forced: share of the unordered oracle's steps in which no final token was predicted.
        rows: every example.
    """

    model: str
    task: str
    sampler: str
    split: str
    seed: int
    n: int
    nfe: float
    steps: float
    merged_steps: float
    unordered_steps: float
    speed_up: float
    forced: float
    unordered_forced: float
    rows: tuple[OracleRow, ...] = dataclasses.field(default=(), repr=False)

    def summary(self) -> dict[str, Any]:
        """Everything but the rows."""
        return {name: value for name, value in vars(self).items() if name != "rows"}


def oracle(
    model: Model,
    task: str | Task,
    sampler: str | SamplerConfig,
    *,
    n: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    split: str = "test",
    progress: bool | None = None,
) -> OracleReport:
    """Samples examples 0 to n - 1 of a split and merges the steps of their trajectories, by both oracles.

    Raises:
        DllmError: as `evals.run`.
    """
    spec, batches = prepare_batches(model, task, sampler, n, batch_size, seed, split, progress=progress)
    rows: list[OracleRow] = []
    ended = batches.results(batches.engine(Engines()), progress, f"oracle of {spec}")
    results = {request.number: result for request, result in ended}
    for index, result, known in batches.batch(results):
        trajectory = trajectory_of(result, **known, mask_id=model.denoiser.mask_id)
        orders = [_merge_compiled(model.denoiser, trajectory, ordered=ordered) for ordered in (True, False)]
        found = _rows(index, *jax.device_get((result.nfe, trajectory, *orders)))
        rows += found[: len(batches.examples) - len(rows)]
    names = ("nfe", "steps", "merged_steps", "unordered_steps")
    total = {name: np.asarray([getattr(row, name) for row in rows]) for name in names}
    share = lambda forced, steps: sum(getattr(row, forced) for row in rows) / max(int(total[steps].sum()), 1)
    return OracleReport(
        model.name,
        str(batches.task),
        str(spec),
        split,
        seed,
        len(rows),
        **{name: float(values.mean()) for name, values in total.items()},
        speed_up=float(total["nfe"].sum() / max(total["merged_steps"].sum(), 1)),
        forced=share("forced", "merged_steps"),
        unordered_forced=share("unordered_forced", "unordered_steps"),
        rows=tuple(rows),
    )


def _rows(
    index: list[int], nfe: np.ndarray, trajectory: Trajectory, order: MergedSteps, unordered: MergedSteps
) -> list[OracleRow]:
    steps = np.asarray(trajectory.step).max(axis=1) + 1
    return [
        OracleRow(
            index=number,
            nfe=int(nfe[row]),
            steps=int(steps[row]),
            merged_steps=int(order.steps[row]),
            forced=int(order.forced[row]),
            unordered_steps=int(unordered.steps[row]),
            unordered_forced=int(unordered.forced[row]),
            merged_step=np.asarray(order.step[row]).tolist(),
        )
        for row, number in enumerate(index)
    ]
