"""The objective of discrete diffusion forcing (D2F, arXiv 2508.09192, sections 4.1 and 4.2): `python -m train d2f`.

The answer is cut into blocks of k positions. Each has its own share of masked positions, which rises from block to
block, as in the pipeline that the student will decode with (`samplers.loops.d2f`). The student, the base model with
adapters, sees under block-causal attention what the teacher, the base model without them, sees under full attention:

    loss = mean over masked positions of - sum over v of teacher_v log student_v / p(block)

A block diffusion model's teacher is the base as it decodes: it sees its block's noise and, before it, final tokens. The
student sees masks there, so what it learns is the teacher's mean over the texts that those masks may hide.

The loss's gradient is that of KL(teacher || student) / p. The mean is over all masked positions of a batch.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser, block_causal
from dllm_jax.models.transformer import RematPolicy
from train.config import Kind, TrainConfig
from train.losses import Batch, Mean, Means, cross_entropies, hidden_states, position_draws, routed_states
from train.objectives.base import Objective, Passes, check_whole_blocks
from train.settings import setting
from train.trainable import Trainable
from train.vocabulary import head_sums

Schedule = Literal["monotone", "random"]
Target = Literal["teacher", "data"]


@dataclasses.dataclass(frozen=True)
class D2FPart:
    """The loss of `python -m train d2f`.

    Attributes:
        kind: "sft" never masks the prompt; with "pretrain" there is no prompt, and all positions are blocks.
        block_length: k, positions per block after the prompt.
        schedule: "monotone" masks later blocks more than earlier ones, "random" draws each block's share anew.
        low, high: bounds of the shares of masked positions.
        target: "teacher" learns the base model's distribution under full attention, "data" the data's tokens.
        end_padding: mask and learn end tokens after the answer like text, which teaches the student to end early;
            False lays blocks only up to the last token that is none.
        chunk: masked positions of a device whose logits exist at once.
    """

    kind: Kind = "sft"
    block_length: int = setting(16, at_least=1)
    schedule: Schedule = "monotone"
    low: float = setting(0.2, at_least=1e-6, at_most=1)
    high: float = setting(0.7, at_least=1e-6, at_most=1)
    target: Target = "teacher"
    end_padding: bool = True
    chunk: int = setting(256, at_least=1)

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise DllmError(f"objective.low {self.low:g} is above objective.high {self.high:g}; lower it")


@dataclasses.dataclass(frozen=True)
class D2FConfig(TrainConfig):
    """A run of `python -m train d2f`."""

    objective: D2FPart = dataclasses.field(default_factory=D2FPart)
    command: Literal["d2f"] = "d2f"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.target == "teacher" and not self.lora.rank:
            raise DllmError(
                "the teacher is the base model without adapters, and lora.rank is 0; set it to 32, or objective.target "
                'to "data"'
            )


class BlockDraws(NamedTuple):
    """Uniform draws in [0, 1) for R rows of T positions and at most N blocks.

    Attributes:
        first: [R], of the first block's share.
        increments: [R, N - 1], of the other blocks'.
        tokens: [R, T], of each position.
    """

    first: jax.Array
    increments: jax.Array
    tokens: jax.Array


class NoisyBlocks(NamedTuple):
    """A batch after the forward process.

    Attributes:
        inputs: [..., T] int32, tokens with masks.
        tokens: [..., T] int32, as they were.
        weights: [..., T] float32, 1 / p(block) where masked, else 0.
        lengths: [...] int32, positions that count.
        prompt_lengths: [...] int32, positions before the first block; 0 for a block diffusion model.
    """

    inputs: jax.Array
    tokens: jax.Array
    weights: jax.Array
    lengths: jax.Array
    prompt_lengths: jax.Array


def draw_blocks(key: jax.Array, rows: int, length: int, block_length: int) -> BlockDraws:
    """Fresh draws; a row's depend on the key and its number."""
    first, increments, tokens = jax.random.split(key, 3)
    return BlockDraws(
        jax.random.uniform(first, (rows,)),
        position_draws(increments, rows, -(-length // block_length) - 1),
        position_draws(tokens, rows, length),
    )


def block_ratios(draws: BlockDraws, blocks: jax.Array, schedule: Schedule, low: float, high: float) -> jax.Array:
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


def block_spans(batch: Batch, eos_id: int, *, end_padding: bool) -> tuple[jax.Array, jax.Array]:
    """Where the blocks of each row begin, after the prompt, and end: two [...] int32. A row without targets has none.

    Args:
        end_padding: whether end tokens after the last other token belong to them.
    """
    length = batch.tokens.shape[-1]
    position = jnp.arange(length, dtype=jnp.int32)
    learned = batch.targets if end_padding else batch.targets & (batch.tokens != eos_id)
    first = jnp.min(jnp.where(batch.targets, position, length), axis=-1)
    return first, jnp.maximum(jnp.max(jnp.where(learned, position + 1, 0), axis=-1), first)


def corrupt_blocks(
    batch: Batch, draws: BlockDraws, denoiser: Denoiser, settings: D2FPart, blocks: jax.Array | None = None
) -> NoisyBlocks:
    """The forward process: masks the targets of each block independently with the block's share.

    Args:
        batch: with any leading axes; its rows in order are those of `draws`.
        denoiser: for the special tokens and the positions that have no predictor; its parameters are not read.
        blocks: [R], as in `block_ratios`; the rows' own numbers by default.
    """
    shape, length = batch.tokens.shape, batch.tokens.shape[-1]
    first, end = block_spans(batch, denoiser.eos_id, end_padding=settings.end_padding)
    if denoiser.block_length is not None:
        first = first // denoiser.block_length * denoiser.block_length
    if blocks is None:
        blocks = -(-(end - first) // settings.block_length).reshape(-1)
    ratios = block_ratios(draws, blocks, settings.schedule, settings.low, settings.high)
    position = jnp.arange(length)
    block = jnp.clip((position - first[..., None]) // settings.block_length, 0, ratios.shape[1] - 1)
    ratio = jnp.take_along_axis(ratios, block.reshape(-1, length), axis=1)
    targets = batch.targets & (position < end[..., None]) & (position >= denoiser.min_prompt_length)
    masked = targets & (draws.tokens < ratio).reshape(shape)
    return NoisyBlocks(
        inputs=jnp.where(masked, denoiser.mask_id, batch.tokens),
        tokens=batch.tokens,
        weights=jnp.where(masked, 1.0 / ratio.reshape(shape), 0.0),
        lengths=batch.lengths,
        prompt_lengths=first if denoiser.block_length is None else jnp.zeros_like(first),
    )


@dataclasses.dataclass(frozen=True)
class D2F(Objective):
    """The objective with its settings."""

    about = "train adapters for pipelined decoding (discrete diffusion forcing)"
    config = D2FConfig
    routes = True

    settings: D2FPart

    def fit_model(self, model: ModelConfig, config: D2FConfig) -> ModelConfig:
        if model.block_length is not None:
            if self.settings.block_length != model.block_length:
                own, wanted = model.block_length, self.settings.block_length
                raise DllmError(f"objective.block_length {wanted} is not the {model.family} model's; set it to {own}")
            check_whole_blocks(config.data, model.block_length)
        return super().fit_model(model, config)

    def passes(self, trained: Trainable) -> Passes:
        """The student's; a teacher adds its forward, and a block diffusion model's one more, over the clean rows."""
        layers, attention, head = super().passes(trained)
        if self.settings.target == "data":
            return Passes(layers, attention, head)
        forwards = 1 if trained.model.block_length is None else 2
        return Passes(layers + forwards, attention + forwards, head + 1)

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> NoisyBlocks:
        draws = draw_blocks(key, batch.lengths.size, batch.tokens.shape[-1], self.settings.block_length)
        return corrupt_blocks(batch, draws, denoiser, self.settings)

    def means(
        self,
        denoiser: Denoiser,
        base: Denoiser,
        noised: NoisyBlocks,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> Means:
        """Reports the plain mean over masked positions of KL(teacher || student), or of the data's cross entropy, in
        nats."""
        first = denoiser.min_prompt_length
        visible = block_causal(noised.inputs.shape[1], noised.prompt_lengths, self.settings.block_length)
        visible = jnp.minimum(visible, noised.lengths[:, None])
        counted = self.counted_positions(noised.lengths, visible.shape[1])
        hidden, routing = routed_states(denoiser, noised.inputs, visible, counted, remat=remat, sharding=sharding)
        weights = noised.weights[:, first:]
        count = jnp.sum(weights > 0)
        sum_up = functools.partial(head_sums, chunk=self.settings.chunk, groups=groups, sharding=sharding)
        if self.settings.target == "data":
            name = "cross_entropy"
            total, plain = sum_up(cross_entropies, (denoiser,), (hidden, noised.tokens[:, first:]), weights)
        else:
            name = "kl"
            teacher = lax.stop_gradient(_teacher_states(base, noised, sharding))
            total, plain = sum_up(_teacher_sums, (denoiser, base), (hidden, teacher), weights)
        return self.add_router_losses(Mean.of(total, count), {name: Mean.of(plain, count)}, routing)


def _teacher_states(base: Denoiser, noised: NoisyBlocks, sharding: NamedSharding | None) -> jax.Array:
    """Hidden states of the noisy rows: under full attention, or each block after final tokens."""
    clean = None
    if base.block_length is not None:
        clean = base.forward(base.embed(noised.tokens), noised.lengths)[1]
    return hidden_states(base, noised.inputs, noised.lengths, before=clean, sharding=sharding)


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
