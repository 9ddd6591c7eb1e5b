"""What estimates of a likelihood are worth: bias, noise and cost on an embedded model, against sums over every mask.

    python -m benchmarks.likelihood --json benchmarks/results/likelihood-cpu.json

A question is a word problem and its worked steps but the last; its two answers are (of the kinds `ANSWERS`, 2, 5 and
8 tokens) the last step as it is, and with another result. Every mask of each answer is run once, and estimates are made
of those by drawn masks, so that thousands of draws cost nothing. Of each estimator `rows` have, in nats: `exact`, the
mean of what is estimated; `bias`, the estimate's mean error, and its standard error; `sd`, an estimate's standard
deviation; `apart` and `shared`, that of the difference of a question's two answers, with seeds of their own and with
one; and the share of questions, `flips_apart` and `flips_shared`, that another answer wins than by exact values. `cost`
is `score` against a loop over pairs that runs every copy: forwards and seconds (of the process, on CPU), compile time
apart.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from math import comb
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from convert import embedded
from dllm_jax import Model, Span
from dllm_jax.text.tokenizer import encode_text
from evals.tasks import make_task
from samplers import score
from samplers.likelihood.estimators import Estimator, draw_masks, log_likelihood, masked_logprobs

T = TypeVar("T")
Row = dict[str, Any]
Pair = tuple[list[int], list[int]]

ANSWERS = ("={result}", "{step}={result}", "{step}={result}. #### {result}")
ESTIMATORS: tuple[Estimator, ...] = ("llada", "llada-official", "dream")
LONGEST = 8  # tokens of an answer
SAMPLES = (1, 8, 16, 32, 128, 512)
BATCHES = (1, 8, 16)

clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter


def questions(model: Model, n: int, answer: str) -> list[tuple[Pair, Pair]]:
    """A question's prompt with the right and with a wrong answer."""
    task, rng, found = make_task("word-problems").bind(model), np.random.default_rng(0), []
    encode = lambda text: encode_text(model.require_tokenizer(), text)
    for index in range(n):
        example = task.example("test", index)
        text = model.require_tokenizer().decode(example.answer_ids, skip_special_tokens=True)
        *steps, last = text.split(" #### ")[0].rstrip(".").split(". ")
        step, result = last.split("=")
        wrong = str((int(result) + int(rng.integers(1, 51))) % 51)
        given = "".join(f"{done}. " for done in steps) + ("" if "{step}" in answer else step)
        prompt = [*example.prompt_ids.tolist(), *encode(given)]
        right, other = (encode(answer.format(step=step, result=number)) for number in (result, wrong))
        found.append(((prompt, right), (prompt, other)))
    return found


def masks_of(length: int) -> np.ndarray:
    """Every mask of an answer, [2^A, A] bool; the row's number is its code."""
    return (np.arange(2**length)[:, None] >> np.arange(length)) % 2 == 1


def sums_of(model: Model, pairs: Sequence[Pair], end: Sequence[int]) -> np.ndarray:
    """The sum of log-probabilities under every mask of every answer, [pairs, 2^A] float64."""
    masks, width = masks_of(len(pairs[0][1])), len(pairs[0][1])
    room = max(len(prompt) for prompt, _ in pairs) + width + len(end)

    @jax.jit
    def run(denoiser: Any, tokens: jax.Array, start: jax.Array) -> jax.Array:
        starts = jnp.full(len(masks), start)
        masked = jax.lax.dynamic_update_slice(jnp.zeros((len(masks), room), bool), jnp.asarray(masks), (0, start))
        rows, lengths = jnp.broadcast_to(tokens, (len(masks), room)), starts + width + len(end)
        return masked_logprobs(denoiser, rows, masked, lengths, span=Span(starts, width), prompt_lengths=starts)

    found = []
    for prompt, answer in pairs:
        tokens = np.zeros(room, np.int32)
        tokens[: len(prompt) + width + len(end)] = [*prompt, *answer, *end]
        found.append(np.asarray(run(model.denoiser, tokens, len(prompt)), np.float64))
    return np.stack(found)


def exact_weights(length: int, estimator: str) -> np.ndarray:
    """What an estimator multiplies the sum under each mask by, on average: [2^A]."""
    counts = masks_of(length).sum(axis=1)
    if estimator == "dream":  # the mean over p of P(mask) / p, by a rule that is exact for polynomials of this degree
        nodes, shares = np.polynomial.legendre.leggauss(length + 1)
        p = 0.5 * (1 + 1e-3) + 0.5 * (1 - 1e-3) * nodes[:, None]
        of = p ** (counts - 1.0) * (1 - p) ** (length - counts)
        return np.where(counts > 0, (shares[:, None] / 2 * of).sum(axis=0), 0.0)
    return np.asarray([n and 1 / (n * comb(length, n)) for n in counts.tolist()])


@functools.partial(jax.jit, static_argnames=("width", "num_samples", "batch_size", "estimator"))
def drawn(seeds: jax.Array, length: jax.Array, *, width: int, **options: Any) -> tuple[jax.Array, jax.Array]:
    """`draw_masks` for every seed; of which the first n are those of n samples, and all those of any width."""
    return jax.vmap(lambda seed: draw_masks(jax.random.key(seed), length, width, **options))(seeds)


def measure(sums: np.ndarray, estimator: Estimator, mc_batch: int, draws: int) -> Iterator[Row]:
    """A row for each number of samples, of questions' two answers each [2 n, 2^A]."""
    length = sums.shape[1].bit_length() - 1
    options: Any = {"num_samples": max(SAMPLES), "batch_size": mc_batch, "estimator": estimator}
    masked, ratio = jax.device_get(drawn(np.arange(draws, dtype=np.uint32), length, width=LONGEST, **options))
    codes, weights = masked @ (1 << np.arange(LONGEST)), 1.0 / ratio.astype(np.float64)
    for samples in SAMPLES:
        if not samples % mc_batch:
            told = {"tokens": length, "estimator": estimator, "samples": samples, "mc_batch": mc_batch}
            yield told | compare(sums, exact_weights(length, estimator), codes[:, :samples], weights[:, :samples])


def compare(sums: np.ndarray, exact_weights: np.ndarray, codes: np.ndarray, weights: np.ndarray) -> Row:
    """Estimates of so many samples each against what they estimate."""
    draws, kinds = len(codes), sums.shape[1]
    places = (codes + kinds * np.arange(draws)[:, None]).reshape(-1)
    drawn = np.bincount(places, weights.reshape(-1) / codes.shape[1], draws * kinds).reshape(draws, -1)
    found, exact = drawn @ sums.T, sums @ exact_weights
    margin, shared = exact[0::2] - exact[1::2], found[:, 0::2] - found[:, 1::2]
    apart = found[:, 0::2] - np.roll(found, 1, axis=0)[:, 1::2]
    deviation = lambda values: float(np.sqrt(values.var(axis=0, ddof=1).mean()))
    errors = (found - exact).mean(axis=1)
    return {
        "forwards": float(np.count_nonzero(drawn[:, 1:], axis=1).mean()),
        "exact": float(exact.mean()),
        "bias": float(errors.mean()),
        "bias_stderr": float(errors.std(ddof=1) / np.sqrt(draws)),
        "sd": deviation(found),
        "apart": deviation(apart),
        "shared": deviation(shared),
        "flips_apart": float(np.mean((apart > 0) != (margin > 0))),
        "flips_shared": float(np.mean((shared > 0) != (margin > 0))),
    }


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Seconds of a second run, and what it gave."""
    run()
    start = clock()
    found = run()
    return clock() - start, found


def cost(model: Model, pairs: Sequence[Pair], batch_size: int) -> Row:
    """`score` and a loop over pairs, both with 128 copies in batches of 16."""
    denoiser, longest = model.denoiser, max(len(prompt) for prompt, _ in pairs)
    padded = [(np.pad(np.asarray(prompt), (0, longest - len(prompt))), len(prompt), answer) for prompt, answer in pairs]
    one = jax.jit(lambda *pair, length: log_likelihood(*pair, key=jax.random.key(0), prompt_length=length))

    def loop() -> list[float]:
        rows = [one(denoiser, prompt, jnp.asarray(answer), length=length) for prompt, length, answer in padded]
        return [float(row) for row in rows]

    many = lambda: score(model, pairs, seeds=[0] * len(pairs), batch_size=batch_size)
    loop_seconds, wanted = timed(loop)
    seconds, found = timed(many)
    worst = max(abs(own.log_likelihood - other) for own, other in zip(found, wanted, strict=True))
    return {
        "pairs": len(pairs),
        "batch_size": batch_size,
        "forwards": sum(own.forwards for own in found),
        "loop_forwards": 128 * len(pairs),
        "seconds": seconds,
        "loop_seconds": loop_seconds,
        "largest_difference": worst,
    }


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured."""
    model, rows, some = embedded.load("word-problems"), list[Row](), list[Pair]()
    for answer in ANSWERS:
        asked = questions(model, options.n, answer)
        pairs = [pair for both in asked for pair in both]
        plain, ended = sums_of(model, pairs, []), sums_of(model, pairs, [model.denoiser.eos_id])
        for estimator in ESTIMATORS:
            for mc_batch in BATCHES:
                rows += measure(ended if estimator == "dream" else plain, estimator, mc_batch, options.draws)
        some += pairs[:8]
    return {
        "command": f"python -m benchmarks.likelihood --n {options.n} --draws {options.draws}",
        "device": jax.devices()[0].device_kind,
        "cpu_cores": os.cpu_count(),
        "versions": {"jax": version("jax")},
        "rows": rows,
        "cost": cost(model, some, 64),
    }


def show(rows: Sequence[Row]) -> None:
    """A line per row."""
    for row in rows:
        told = f"{row['tokens']} tokens  {row['estimator']:14} {row['samples']:4} samples by {row['mc_batch']:2}"
        noise = f"sd {row['sd']:.3f}, of differences {row['apart']:.3f}, {row['shared']:.3f}"
        flips = f"flips {100 * row['flips_apart']:.2f}, {100 * row['flips_shared']:.2f} %"
        bias = f"bias {row['bias']:+.4f} +- {row['bias_stderr']:.4f}"
        print(f"{told} {row['forwards']:6.1f} forwards  {bias}  {noise}; {flips}")


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--n", type=int, default=16, help="questions of each kind (default 16)")
    made.add_argument("--draws", type=int, default=1024, help="estimates of each pair (default 1024)")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    options = parser().parse_args(arguments)
    options.dtype = "float32"
    return command.run(options, report, show)


if __name__ == "__main__":
    raise SystemExit(main())
