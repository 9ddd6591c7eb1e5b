"""What was committed when: reading it on the host, and, on the device, which steps could have been one without changing
the result (NI sampling's criterion)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dllm_jax.models.denoiser import DenoiserLike, Span
from dllm_jax.models.kv_cache import write_rows
from dllm_jax.pytree import pytree
from samplers.sampler import Result
from samplers.tokens.predictions import Sampling, predict, readout


def steps_of(result: Result, row: int) -> list[list[int]]:
    """Positions committed by each forward of a row, in order; a forward that committed nothing gives an empty list."""
    decoded_at = np.asarray(result.decoded_at[row])
    return [np.flatnonzero(decoded_at == step).tolist() for step in range(int(result.nfe[row]))]


def forwards_until(result: Result, row: int, sequences: Sequence[Sequence[int]]) -> int | None:
    """Forwards after which one of the token sequences stood in the generation with no mask before its end ("NFE with
    generate_until" of arXiv 2505.24857); None if that never happened."""
    complete_at = np.maximum.accumulate(np.asarray(result.decoded_at[row]))
    ends = [start + len(ids) - 1 for ids in sequences for start in _matches(result, row, ids)]
    return min((int(complete_at[end]) + 1 for end in ends), default=None)


def first_match(result: Result, row: int, sequences: Sequence[Sequence[int]]) -> int | None:
    """Where the earliest of the token sequences begins, as an answer's length; None if none is in the generation."""
    return min((start for ids in sequences for start in _matches(result, row, ids)), default=None)


def _matches(result: Result, row: int, ids: Sequence[int]) -> list[int]:
    """Starts of the sequence within the unbroken, written beginning of the row's generation."""
    written = np.asarray(result.decoded_at[row]) >= 0
    length = len(written) if written.all() else int(np.argmin(written))
    tokens = np.asarray(result.tokens[row])[:length]
    wanted = np.asarray(ids)
    return [start for start in range(length - len(ids) + 1) if (tokens[start : start + len(ids)] == wanted).all()]


# On the device: trajectories as data, and which of their steps could have been one ------------------------------------


@pytree()
class Trajectory:
    """How generations came about. B rows, P prompt positions, G generated ones.

    Attributes:
        prompt: [B, P] int32, left-aligned.
        prompt_lengths, gen_lengths: [B] int32, valid positions of each.
        tokens: [B, G] int32, the final tokens; the mask id where a position was never written.
        step: [B, G] int32, number of the step that committed the position: 0, 1, ... without gaps; -1 where none did,
            which is a token that was given, or a mask.
    """

    prompt: jax.Array
    prompt_lengths: jax.Array
    gen_lengths: jax.Array
    tokens: jax.Array
    step: jax.Array

    @property
    def steps(self) -> jax.Array:
        """[B] int32, steps that committed something."""
        return self.step.max(axis=1) + 1


@pytree()
class MergedSteps:
    """The lossless order of a trajectory, or the one of a bound without an order (see `merge_steps`).

    Attributes:
        step: [B, G] int32, as in `Trajectory`, when all that can be committed at once is.
        steps: [B] int32, how many are left: forwards that would have given the same result.
        forced: [B] int32, those of them whose own forward would have given another token: none where the trajectory was
            made by the model's most probable tokens without an approximation.
    """

    step: jax.Array
    steps: jax.Array
    forced: jax.Array


def trajectory_of(
    result: Result,
    prompt: jax.Array,
    prompt_lengths: jax.Array,
    *,
    mask_id: int,
    gen_lengths: jax.Array | None = None,
    given: jax.Array | None = None,
) -> Trajectory:
    """The trajectory of a sampled batch; the arguments are those that were sampled with."""
    batch, length = result.tokens.shape
    gen_lengths = jnp.full((batch,), length, jnp.int32) if gen_lengths is None else gen_lengths
    rest = jnp.full_like(result.tokens, mask_id) if given is None else given
    tokens = jnp.where(result.decoded_at >= 0, result.tokens, rest)
    return Trajectory(prompt, prompt_lengths, gen_lengths, tokens, step_numbers(result.decoded_at))


def step_numbers(decoded_at: jax.Array) -> jax.Array:
    """[B, G] forwards, -1 for none -> [B, G] steps: the same order without gaps."""

    def dense(row: jax.Array) -> jax.Array:
        order = jnp.argsort(row)
        ordered = row[order]
        new = (ordered >= 0) & (ordered != jnp.concatenate([jnp.full((1,), -1, row.dtype), ordered[:-1]]))
        return jnp.zeros_like(row).at[order].set(jnp.cumsum(new, dtype=row.dtype) - 1)

    return jax.vmap(dense)(decoded_at)


def mergeable_steps(step: jax.Array, right: jax.Array, reached: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which following steps may be done at once without changing the result (arXiv 2604.18471, algorithms 1 and 2).

    These are the steps up to the first that commits a position whose final token is not the one predicted now: a
    prefix, so that the state afterwards is one the trajectory has been through. The next step always belongs to it.

    Args:
        step: [B, G] int32, as in `Trajectory`.
        right: [B, G] bool, whether the prediction in the present state is the final token.
        reached: [B] int32, steps that are done.

    Returns:
        label [B, G] bool, the positions of these steps, and [B] int32, the steps that are done after them.
    """
    masked = step >= reached[:, None]
    ends = step.max(axis=1, initial=-1) + 1
    first_wrong = jnp.min(jnp.where(masked & ~right, step, ends[:, None]), axis=1)
    until = jnp.minimum(jnp.maximum(first_wrong, reached + 1), ends)
    return masked & (step < until[:, None]), until


def best_tokens(denoiser: DenoiserLike, trajectory: Trajectory, canvas: jax.Array) -> jax.Array:
    """What the model holds most probable at every position of a canvas [B, G], in one forward: [B, G] int32."""
    length = canvas.shape[1]
    tokens = jnp.pad(trajectory.prompt, ((0, 0), (0, length)))
    tokens = write_rows(tokens, canvas, trajectory.prompt_lengths)
    lengths = trajectory.prompt_lengths + trajectory.gen_lengths
    hidden, _ = denoiser.forward(tokens, lengths, outputs=Span(trajectory.prompt_lengths, length))
    scores = readout(denoiser, hidden)
    return predict(scores, Sampling(), mask_id=denoiser.mask_id, score_from="raw", draw=None).token


def merge_steps(denoiser: DenoiserLike, trajectory: Trajectory, *, ordered: bool = True) -> MergedSteps:
    """The lossless order: from the first state on, all steps that may be done at once are; for use inside `jit`.

    Its number of steps bounds what any order of unmasking can save that keeps the trajectory's states.

    Args:
        ordered: if False, the paper's bound without the order: every forward commits all undecided positions whose
            final token is predicted now, whatever their step. It keeps the tokens but not the states, so a forward may
            predict none of them; then the trajectory's next step is forced.
    """

    def step(carry: tuple[jax.Array, MergedSteps]) -> tuple[jax.Array, MergedSteps]:
        undecided, done = carry
        active = jnp.any(undecided, axis=1)
        canvas = jnp.where(undecided, denoiser.mask_id, trajectory.tokens)
        right = best_tokens(denoiser, trajectory, canvas) == trajectory.tokens
        reached = jnp.min(jnp.where(undecided, trajectory.step, trajectory.steps[:, None]), axis=1)
        if ordered:
            label, _ = mergeable_steps(trajectory.step, right, reached)
        else:
            found = undecided & right
            following = undecided & (trajectory.step == reached[:, None])
            label = jnp.where(jnp.any(found, axis=1, keepdims=True), found, following)
        return undecided & ~label, MergedSteps(
            jnp.where(label, done.steps[:, None], done.step),
            done.steps + active,
            done.forced + (active & jnp.any(label & ~right, axis=1)),
        )

    zeros = jnp.zeros_like(trajectory.steps)
    start = MergedSteps(jnp.full_like(trajectory.step, -1), zeros, zeros)
    return lax.while_loop(lambda carry: jnp.any(carry[0]), step, (trajectory.step >= 0, start))[1]
