"""How far cheap estimates of a completion's log-probability are from the exact one, and their policy gradients.

    python -m benchmarks.estimates train/configs/grpo-sudoku.toml --sampler topk:k=4 --sampler threshold \
        --json benchmarks/results/estimates-sudoku-cpu.json

Completions are those of a first iteration of `python -m train grpo` at temperature 1, of a model as it is.
`shrink` 1 scores each draw in the state that it was drawn in, which is exact; s scores the draws of s steps in the
state before the first of them (TraceRL); 0 scores all of them in the empty canvas (diffu-GRPO), with `mask_prompt`
after this share of the prompt was masked.

Log-probabilities are means over a completion's drawn tokens, in nats. `bias` is the mean difference to the exact one,
with a standard error over prompts, whose completions are not independent. `rank_correlation` is Spearman's, over all
completions. `cosine` is that of the gradients of GRPO's loss of the same completions and rewards, over all weights of
the model. `states` is how many forwards a completion takes, `learned` the share of completions whose advantage is not
0.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import command
from dllm_jax import Denoiser
from evals import stderr
from train.objectives import read_config
from train.objectives.grpo import Grpo, GrpoConfig
from train.rollout import Rollout
from train.setup import read_parts
from train.step import training_mesh
from train.trainer import Run, placement_of

Row = dict[str, Any]

ESTIMATES = ((1, 0.0), (2, 0.0), (4, 0.0), (0, 0.0), (0, 0.15))
"""`shrink` and `mask_prompt` of each; the exact one first."""

_ROWS = 16  # completions that are scored at once


def completions(config: GrpoConfig) -> tuple[Run, Any, Rollout]:
    """A run, its state before the first step, and the first iteration's completions [parts, rows, ...]."""
    parts, _ = read_parts(config).check_examples(config, progress=False)
    run = Run(config, parts, placement_of(config, parts.model, training_mesh(config)))
    state = run.initial_state()
    assert run.feed is not None
    return run, state, run.feed(0, 0, state)


def estimate(run: Run, state: Any, batch: Rollout, shrink: int, mask_prompt: float) -> tuple[np.ndarray, Any]:
    """Of each completion the mean log-probability of its drawn tokens, [N] float64, and the gradient of the loss."""
    given = cast(Grpo, run.stepper.objective)
    states = int(batch.step.max()) // max(shrink, 1) + 1  # all of them
    part = dataclasses.replace(given.settings, shrink=shrink, states=states, mask_prompt=mask_prompt)
    objective = dataclasses.replace(given, settings=part)

    def of_part(trained: Any, batch: Rollout, key: jax.Array) -> tuple[jax.Array, Any]:
        noised = objective.corrupt(key, batch, Denoiser(run.parts.model, {}))
        logprobs = objective.logprobs(run.stepper.learner(trained, run.frozen), noised)
        total = lambda trained: (
            objective.means(run.stepper.learner(trained, run.frozen), Denoiser(run.parts.model, {}), noised)[
                "loss"
            ].total
        )
        sums = jnp.sum(jnp.where(noised.weights > 0, logprobs, 0.0), axis=(1, 2))
        return sums / jnp.maximum(noised.draws, 1), jax.grad(total)(trained)

    means, gradient, run_part = [], None, jax.jit(of_part)
    for number in range(len(batch.lengths)):
        rows = jax.tree.map(lambda x, number=number: x[number], batch)
        mean, one = run_part(state.trained, rows, jax.random.fold_in(jax.random.key(run.config.seed), number))
        means.append(np.asarray(mean, np.float64))
        gradient = one if gradient is None else jax.tree.map(jnp.add, gradient, one)
    return np.concatenate(means), gradient


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 1 on; numbers that are equal up to 1e-5 have their mean."""
    _, place, count = np.unique(np.round(x, 5), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def compared(found: np.ndarray, exact: np.ndarray, group: int) -> Row:
    """Bias and rank correlation of estimates [N], those of a prompt one after another."""
    differences = np.mean((found - exact).reshape(-1, group), axis=1).tolist()
    return {
        "logprob": float(np.mean(found)),
        "bias": statistics.fmean(differences),
        "bias_stderr": stderr.of_mean(differences),
        "rank_correlation": float(np.corrcoef(ranks(found), ranks(exact))[0, 1]),
    }


def cosine(one: Any, other: Any) -> float | None:
    """Of two gradients; None where one is 0, because all groups have the same rewards."""
    norms = optax.tree.norm(one) * optax.tree.norm(other)
    return float(optax.tree.vdot(one, other) / norms) if norms else None


def measure(config: GrpoConfig, sampler: str) -> list[Row]:
    """A row for each of `ESTIMATES`."""
    run, state, batch = completions(config)
    assert run.feed is not None
    steps = np.asarray(batch.step).max(axis=-1).reshape(-1) + 1
    about = {
        "task": config.data.options.get("task", config.data.source),
        "sampler": sampler,
        "completions": len(steps),
        "reward": run.feed.metrics["reward"],
        "learned": float(np.mean(np.asarray(batch.advantage) != 0)),
    }
    found = [(pair, *estimate(run, state, batch, *pair)) for pair in ESTIMATES]
    _, exact, gradient = found[0]
    rows = []
    for (shrink, mask_prompt), means, slope in found:
        states = float(np.mean(-(-steps // shrink))) if shrink else 1.0
        row = {**about, "shrink": shrink, "mask_prompt": mask_prompt, "states": states}
        rows.append(row | compared(means, exact, config.rollout.num_generations) | {"cosine": cosine(slope, gradient)})
    return rows


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured."""
    rows, batch = list[Row](), options.prompts * options.generations
    changes = {
        "rollout.prompts": options.prompts,
        "rollout.num_generations": options.generations,
        "rollout.temperature": 1.0,
        "rollout.redraw": 0,
        "optimizer.batch": batch,
        "optimizer.accumulate": max(batch // _ROWS, 1),
        "lora.rank": 0,
    }
    for sampler in options.samplers:
        overrides = [f"{name}={value}" for name, value in (changes | {"rollout.sampler": sampler}).items()]
        rows += measure(cast(GrpoConfig, read_config(options.config, overrides, "grpo")), sampler)
        show(rows[-len(ESTIMATES) :])
    samplers = " ".join(f"--sampler {sampler}" for sampler in options.samplers)
    sizes = f"--prompts {options.prompts} --generations {options.generations}"
    return {
        "command": f"python -m benchmarks.estimates {options.config} {samplers} {sizes}",
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": version("jax")},
        "rows": rows,
    }


def show(rows: Sequence[Row]) -> None:
    """A line per row."""
    for row in rows:
        of_gradients = math.nan if row["cosine"] is None else row["cosine"]
        print(
            f"{row['task']:14} {row['sampler']:10} shrink {row['shrink']} mask_prompt {row['mask_prompt']:<4} "
            f"states {row['states']:5.2f}  log p {row['logprob']:.4f}, bias {row['bias']:+.4f} +- "
            f"{row['bias_stderr']:.4f}, rank {row['rank_correlation']:.3f}, cosine {of_gradients:.3f}",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    about = "as `rollout.sampler`; repeatable"
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("config", metavar="TOML", help="settings of a run of python -m train grpo")
    made.add_argument("--sampler", required=True, action="append", dest="samplers", metavar="SPEC", help=about)
    made.add_argument("--prompts", type=int, default=64, help="(default 64)")
    made.add_argument("--generations", type=int, default=4, help="completions of each (default 4)")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    options = made.parse_args(arguments)
    options.dtype = "float32"
    return command.run(options, report, show)


if __name__ == "__main__":
    raise SystemExit(main())
