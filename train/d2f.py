"""The objective of discrete diffusion forcing (D2F, arXiv 2508.09192, sections 4.1 and 4.2): `python -m train d2f`.

The answer is cut into blocks of k positions. Each has its own share of masked positions, which rises from block to
block, as in the pipeline that the student will decode with (`samplers.pipeline`). The student, the base model with
adapters, sees under block-causal attention what the teacher, the base model without them, sees under full attention:

    loss = mean over masked positions of - sum over v of teacher_v log student_v / p(block)

Its gradient is that of KL(teacher || student) / p. The mean is over all masked positions of a batch (of each of the
parts that `optimizer.accumulate` makes of it).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from dllm_jax.denoiser import Denoiser, block_causal
from dllm_jax.transformer import RematPolicy
from train.config import D2FPart, Schedule
from train.objective import Batch, Metrics, cross_entropies, head_sums, hidden_states


class Draws(NamedTuple):
    """Uniform draws in [0, 1) for R rows of T positions and at most N blocks.

    Attributes:
        first: [R], of the first block's share.
        increments: [R, N - 1], of the other blocks'.
        tokens: [R, T], of each position.
    """

    first: jax.Array
    increments: jax.Array
    tokens: jax.Array


class Blocks(NamedTuple):
    """A batch after the forward process.

    Attributes:
        inputs: [..., T] int32, tokens with masks.
        tokens: [..., T] int32, as they were.
        weights: [..., T] float32, 1 / p(block) where masked, else 0.
        lengths: [...] int32, positions that count.
        prompt_lengths: [...] int32, positions before the first block.
    """

    inputs: jax.Array
    tokens: jax.Array
    weights: jax.Array
    lengths: jax.Array
    prompt_lengths: jax.Array


def draw(key: jax.Array, rows: int, length: int, block_length: int) -> Draws:
    """Fresh draws; a row's depend on the key and its number."""
    first, increments, tokens = jax.random.split(key, 3)
    return Draws(
        jax.random.uniform(first, (rows,)),
        jax.random.uniform(increments, (rows, -(-length // block_length) - 1)),
        jax.random.uniform(tokens, (rows, length)),
    )


def block_ratios(draws: Draws, blocks: jax.Array, schedule: Schedule, low: float, high: float) -> jax.Array:
    """The share of masked positions of every block, [R, N].

    Monotone: p_1 = low + (high - low) u and p_b = p_(b-1) + v_b (high - p_1) / (blocks - 1), which never falls and
    stays below `high`. Random: each is uniform in [low, high).

    Args:
        blocks: [R] int32, number of blocks of the row. (The official code takes the batch's largest number for every
            row; its batches have one.)
    """
    first = low + (high - low) * draws.first[:, None]
    if schedule == "random":
        return jnp.concatenate([first, low + (high - low) * draws.increments], axis=1)
    step = draws.increments * (high - first) / jnp.maximum(blocks[:, None] - 1, 1)
    return jnp.minimum(jnp.concatenate([first, first + jnp.cumsum(step, axis=1)], axis=1), 1.0)


def spans(batch: Batch, eos_id: int, *, end_padding: bool) -> tuple[jax.Array, jax.Array]:
    """Where the blocks of each row begin, behind the prompt, and end: two [...] int32. A row without targets has none.

    Args:
        end_padding: whether end tokens behind the last other token belong to them.
    """
    length = batch.tokens.shape[-1]
    position = jnp.arange(length, dtype=jnp.int32)
    learned = batch.targets if end_padding else batch.targets & (batch.tokens != eos_id)
    first = jnp.min(jnp.where(batch.targets, position, length), axis=-1)
    return first, jnp.maximum(jnp.max(jnp.where(learned, position + 1, 0), axis=-1), first)


def corrupt(
    batch: Batch, draws: Draws, denoiser: Denoiser, settings: D2FPart, blocks: jax.Array | None = None
) -> Blocks:
    """The forward process: masks the targets of each block independently with the block's share.

    Args:
        batch: with any leading axes; its rows in order are those of `draws`.
        denoiser: for the special tokens and the positions that have no predictor; its parameters are not read.
        blocks: [R], as in `block_ratios`; the rows' own numbers by default.
    """
    shape, length = batch.tokens.shape, batch.tokens.shape[-1]
    first, end = spans(batch, denoiser.eos_id, end_padding=settings.end_padding)
    if blocks is None:
        blocks = -(-(end - first) // settings.block_length).reshape(-1)
    ratios = block_ratios(draws, blocks, settings.schedule, settings.low, settings.high)
    position = jnp.arange(length)
    block = jnp.clip((position - first[..., None]) // settings.block_length, 0, ratios.shape[1] - 1)
    ratio = jnp.take_along_axis(ratios, block.reshape(-1, length), axis=1)
    targets = batch.targets & (position < end[..., None]) & (position >= denoiser.min_prompt_length)
    masked = targets & (draws.tokens < ratio).reshape(shape)
    return Blocks(
        inputs=jnp.where(masked, denoiser.mask_id, batch.tokens),
        tokens=batch.tokens,
        weights=jnp.where(masked, 1.0 / ratio.reshape(shape), 0.0),
        lengths=batch.lengths,
        prompt_lengths=first,
    )


@dataclasses.dataclass(frozen=True)
class D2F:
    """The objective with its settings, see `train.objective.Objective`."""

    settings: D2FPart

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> Blocks:
        """As `Objective`."""
        draws = draw(key, batch.lengths.size, batch.tokens.shape[-1], self.settings.block_length)
        return corrupt(batch, draws, denoiser, self.settings)

    def loss(
        self,
        denoiser: Denoiser,
        base: Denoiser,
        noised: Blocks,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """As `Objective`; reports the plain mean over masked positions of KL(teacher || student), or of the data's
        cross entropy, in nats."""
        first = denoiser.min_prompt_length
        visible = block_causal(noised.inputs.shape[1], noised.prompt_lengths, self.settings.block_length)
        visible = jnp.minimum(visible, noised.lengths[:, None])
        hidden = hidden_states(denoiser, noised.inputs, visible, remat=remat, sharding=sharding)
        weights = noised.weights[:, first:]
        count = jnp.maximum(jnp.sum(weights > 0), 1)
        sum_up = functools.partial(head_sums, chunk=self.settings.chunk, groups=groups, sharding=sharding)
        if self.settings.target == "data":
            name = "cross_entropy"
            total, plain = sum_up(cross_entropies, (denoiser,), (hidden, noised.tokens[:, first:]), weights)
        else:
            name = "kl"
            teacher = lax.stop_gradient(hidden_states(base, noised.inputs, noised.lengths, sharding=sharding))
            total, plain = sum_up(_teacher_sums, (denoiser, base), (hidden, teacher), weights)
        loss = total / count
        return loss, {"loss": loss, name: plain / count}


def _teacher_sums(
    denoiser: Denoiser, base: Denoiser, student: jax.Array, teacher: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weighted sum of the soft cross entropies of hidden states [C, D], and plain sum of the divergences."""
    log_teacher = lax.stop_gradient(jax.nn.log_softmax(base.logits(teacher)))
    log_student = jax.nn.log_softmax(denoiser.logits(student))
    probability = jnp.exp(log_teacher)
    cross = -jnp.sum(probability * log_student, axis=-1)
    divergence = jnp.sum(probability * (log_teacher - log_student), axis=-1)  # of small differences, none cancelled
    return jnp.sum(weights * cross), jnp.sum(jnp.where(weights > 0, divergence, 0.0))
