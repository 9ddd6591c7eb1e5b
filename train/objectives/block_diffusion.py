"""The objective of block diffusion (BD3-LM, arXiv 2503.09573, equation 8; LLaDA2 2512.15745, SDAR 2510.06303, Fast-dLLM
v2 2509.26328): `python -m train block-diffusion`.

A row is cut into blocks of L from its first position on. Each position of a noisy copy of the row sees the copy in its
own block, and the row as it is in the blocks before: as when all blocks before it are decoded.

With m blocks `in_flight` the blocks are taken in groups of m, from the row's first on. A position sees the copy in its
group's blocks up to its own, and the row as it is before its group: as in the pipeline (`samplers.loops.d2f`) with m
blocks. Shares of masks are drawn for each block, and a group's are sorted: its later blocks are masked more.

    "mean"     loss = mean over masked positions of - log p(token)           (LLaDA2's SFT, Fast-dLLM v2)
    "bound"    loss = sum over masked positions of - log p(token) / p / number of targets      (SDAR)

with p the position's probability of being masked, drawn from [low, high] for each block or each row; the bound on
- log p(row) per token needs all of (0, 1], and one block in flight. A complementary copy, if there is one, masks just
the targets that the first leaves, with probability 1 - p. Sums and numbers are of all rows of a batch (of each of the
parts that `optimizer.accumulate` makes of it). With the "bound" a block of the row's length is LLaDA's objective.

The published codes run rows of twice the length, [noisy; clean], under a mask of four parts. Clean positions never see
noisy ones, so here the row runs first, by itself and once for all its copies, and hands on its keys and values.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.transformer import RematPolicy
from train.config import Kind, TrainConfig
from train.losses import (
    Batch,
    Documents,
    Mean,
    Means,
    annealed_ahead,
    cross_entropies,
    position_draws,
    routed_states,
    seen_keys,
)
from train.objectives.base import Objective, Passes, check_annealing, check_whole_blocks
from train.settings import setting
from train.trainable import Trainable
from train.vocabulary import head_sums

Noise = Literal["block", "sequence"]
BlockLoss = Literal["mean", "bound"]
Fill = Literal["end", "mask"]


@dataclasses.dataclass(frozen=True)
class BlockDiffusionPart:
    """The loss of `python -m train block-diffusion`.

    LLaDA2's SFT is noise "sequence", low 0.3, high 0.8; SDAR's noise "sequence", loss "bound"; Fast-dLLM v2's
    complementary, fill "mask"; nothing else changed.

    Attributes:
        kind: "sft" never masks the prompt; "pretrain" treats it as the rest of the document.
        block_length: L, which the trained model is sampled with too; 0 keeps the model's. Divides `data.length`.
        noise: draw the probability of being masked for each block, or one for each row.
        low, high: bounds of it.
        loss: "mean" over masked positions, or the "bound" on the likelihood, in which each counts 1 / p times.
        in_flight: m, blocks of a group, of which each sees the noise of those before it; 1 is final tokens before each
            block. For the sampler `d2f`, whose own `in_flight` should not be larger.
        complementary: learn from a second copy of each row, which masks just what the first does not. With several
            blocks in flight its shares fall from block to block, as no pipeline has them.
        wrong: share of the targets left unmasked that become random tokens and are learned too, each counting once:
            for samplers that edit (LLaDA2.1).
        confidence: how often the mean entropy of right predictions is added to the loss (CAP's and dParallel's beta,
            published 2.0), which makes a model more confident where it is right: fewer forwards.
        fill: what fills the rest of a row's last block, as sampling decodes whole blocks: "end" tokens that are masked
            and learned, or "mask" tokens that are not. With `data.pad` that is after the canvas.
        chunk: positions of a device whose logits exist at once; 0 computes the logits of all positions.
        anneal_attention: steps from causal attention to that of blocks, for models that were autoregressive: at step t
            a position sees, besides all before it and itself, the next t / anneal_attention of the rest of its block,
            rounded. See `train.objectives.masked_diffusion`.
    """

    kind: Kind = "sft"
    block_length: int = setting(0, at_least=0)
    noise: Noise = "block"
    low: float = setting(1e-3, at_least=1e-6, at_most=1)
    high: float = setting(1.0, at_least=1e-6, at_most=1)
    loss: BlockLoss = "mean"
    in_flight: int = setting(1, at_least=1)
    complementary: bool = False
    wrong: float = setting(0.0, at_least=0, at_most=1)
    confidence: float = setting(0.0, at_least=0)
    fill: Fill = "end"
    chunk: int = setting(0, at_least=0)
    anneal_attention: int = setting(0, at_least=0)

    @property
    def copies(self) -> int:
        """Noisy copies of each row."""
        return 1 + self.complementary

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise DllmError(f"objective.low {self.low:g} is above objective.high {self.high:g}; lower it")
        if self.complementary and self.loss == "bound" and self.high > 0.999:
            raise DllmError(
                f'with objective.complementary and loss "bound" the second copy counts 1 / (1 - p) times, and '
                f"objective.high {self.high:g} lets p come to 1; set it to 0.999 or less"
            )
        if self.in_flight > 1 and self.noise == "sequence":
            raise DllmError(
                f"objective.in_flight {self.in_flight} masks later blocks more than earlier ones, and objective.noise "
                '"sequence" all alike; set it to "block"'
            )


@dataclasses.dataclass(frozen=True)
class BlockDiffusionConfig(TrainConfig):
    """A run of `python -m train block-diffusion`."""

    objective: BlockDiffusionPart = dataclasses.field(default_factory=BlockDiffusionPart)
    command: Literal["block-diffusion"] = "block-diffusion"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_annealing(self.objective.anneal_attention, self.steps)
        if self.data.random_length and self.objective.fill == "end":
            raise DllmError(
                "data.random_length cuts texts where they do not end, and end tokens would be learned there; set "
                'objective.fill to "mask"'
            )


class NoisyCopies(NamedTuple):
    """A batch after the forward process, in C noisy copies of each row.

    Attributes:
        inputs: [..., C, T] int32, tokens with masks.
        tokens: [..., T] int32, as they were, filled up to a whole number of blocks.
        weights: [..., C, T] float32, of each position's cross entropy; 0 where nothing is learned.
        targets: [..., T] bool, positions of the row that may be masked.
        lengths: [...] int32, positions that count, a whole number of blocks.
        documents: of rows that hold several, each a whole number of blocks.
        ahead: as of `train.losses.seen_keys`, of the copies and of the row as it is, [...] float32; None for all.
    """

    inputs: jax.Array
    tokens: jax.Array
    weights: jax.Array
    targets: jax.Array
    lengths: jax.Array
    documents: Documents | None = None
    ahead: jax.Array | None = None


def fill_blocks(batch: Batch, denoiser: Denoiser, settings: BlockDiffusionPart) -> Batch:
    """The rows, or the documents in them, with their last block filled up, with end tokens that are learned, or masks
    that are not."""
    assert denoiser.block_length is not None
    position = jnp.arange(batch.tokens.shape[-1], dtype=jnp.int32)
    up = lambda length: -(-length // denoiser.block_length) * denoiser.block_length
    documents, end = batch.documents, batch.lengths[..., None]
    if documents is not None:
        end, documents = documents.end, documents._replace(end=documents.first + up(documents.end - documents.first))
    filled = (position >= end) & (position < (up(end) if documents is None else documents.end))
    learned = settings.fill == "end"
    tokens = jnp.where(filled, denoiser.eos_id if learned else denoiser.mask_id, batch.tokens)
    targets = (batch.targets | (filled & learned)) & (batch.places >= denoiser.min_prompt_length)
    return Batch(tokens, targets, up(batch.lengths), documents=documents)


def corrupt_copies(key: jax.Array, batch: Batch, denoiser: Denoiser, settings: BlockDiffusionPart) -> NoisyCopies:
    """The forward process. The draws of a row depend on the key and on its number in the batch.

    (SDAR's code draws the masks of a row again while it has none, up to ten times. Here such a row stays: the weight
    1 / p requires it.)

    Args:
        batch: with any leading axes; T is a multiple of the block's length.
        denoiser: for the special tokens and the blocks; its parameters are not read.
    """
    assert denoiser.block_length is not None
    batch = fill_blocks(batch, denoiser, settings)
    tokens, targets = batch.tokens[..., None, :], batch.targets[..., None, :]
    rows, length = batch.lengths.size, batch.tokens.shape[-1]
    in_blocks = settings.noise == "block"
    shares = length // denoiser.block_length if in_blocks else 1 if batch.documents is None else length
    share_key, mask_key, wrong_key = jax.random.split(key, 3)
    draws = position_draws(share_key, rows, shares)
    if settings.in_flight > 1:
        draws = rising_in_groups(draws, targets.reshape(rows, shares, -1).any(axis=-1), settings.in_flight)
    share = settings.low + (settings.high - settings.low) * draws
    share = jnp.repeat(share, length // shares, axis=1).reshape(tokens.shape)
    if batch.documents is not None and not in_blocks:
        share = jnp.take_along_axis(share, batch.documents.first[..., None, :], axis=-1)
    masked = targets & (position_draws(mask_key, rows, length).reshape(tokens.shape) < share)
    if settings.complementary:
        masked = jnp.concatenate([masked, targets & ~masked], axis=-2)
        share = jnp.concatenate([share, 1.0 - share], axis=-2)
    inputs = jnp.where(masked, denoiser.mask_id, tokens)
    weights = jnp.where(masked, 1.0 if settings.loss == "mean" else 1.0 / share, 0.0)
    if settings.wrong:
        draws, others = jax.random.split(wrong_key)
        copies = rows * masked.shape[-2]
        other = jax.random.randint(others, (length, copies), 1, denoiser.vocab_size).T.reshape(masked.shape)
        other = (tokens + other) % denoiser.vocab_size  # any but the right one
        wrong = position_draws(draws, copies, length).reshape(masked.shape) < settings.wrong
        wrong &= targets & ~masked & (other != denoiser.mask_id)
        inputs, weights = jnp.where(wrong, other, inputs), jnp.where(wrong, 1.0, weights)
    return NoisyCopies(inputs, batch.tokens, weights, batch.targets, batch.lengths, batch.documents)


def rising_in_groups(draws: jax.Array, learned: jax.Array, size: int) -> jax.Array:
    """Draws in [0, 1), of which those of a group's learned blocks are sorted: [R, N] -> [R, N].

    Args:
        learned: [R, N] bool, blocks with targets. What others get means nothing: a prompt's take no draw away.
        size: blocks of a group; the last may be smaller.
    """
    count = draws.shape[1]
    fold = lambda x: jnp.pad(x, ((0, 0), (0, -count % size))).reshape(len(x), -1, size)
    draws, learned = fold(draws), fold(learned)
    ordered = jnp.sort(jnp.where(learned, draws, 1.0), axis=-1)
    place = jnp.maximum(jnp.cumsum(learned, axis=-1) - 1, 0)
    return jnp.take_along_axis(ordered, place, axis=-1).reshape(len(draws), -1)[:, :count]


@dataclasses.dataclass(frozen=True)
class BlockDiffusion(Objective):
    """The objective with its settings."""

    about = "train a block diffusion model (LLaDA2, SDAR, Fast-dLLM v2)"
    config = BlockDiffusionConfig
    routes = packs = True

    settings: BlockDiffusionPart

    @property
    def in_flight(self) -> int:
        return self.settings.in_flight

    def fit_model(self, model: ModelConfig, config: BlockDiffusionConfig) -> ModelConfig:
        """The model in the blocks that it is trained in: a model of full attention becomes one of block diffusion if
        the settings give a block length."""
        model = self._in_blocks(model, config)
        if not model.has_blocks:
            raise DllmError(
                f"a {model.family} model has no blocks; set objective.block_length for one of full attention, or "
                "model.adapt to a kind that has, such as fast-dllm-v2-1.5b (of Qwen2.5) or sdar-8b-chat (of Qwen3)"
            )
        return super().fit_model(model, config)

    def _in_blocks(self, model: ModelConfig, config: BlockDiffusionConfig) -> ModelConfig:
        length, own = self.settings.block_length or model.block_length, model.block_length
        if length is None or model.is_causal:
            return model
        if length != own and config.lora.rank:
            raise DllmError(
                f"adapters need a model to be added to as it is, in blocks of {own}; leave out objective.block_length, "
                "or train all weights"
            )
        check_whole_blocks(config.data, length)
        if self.in_flight > (most := config.data.length // length):
            raise DllmError(
                f"objective.in_flight {self.in_flight} exceeds the {most} blocks of {length} in rows of data.length "
                f"{config.data.length}; set it to {most} or less"
            )
        return model.replace(attention="block", block_length=length)

    def passes(self, trained: Trainable) -> Passes:
        """The clean row runs first, without the head, and then its noisy copies."""
        layers, attention, head = super().passes(trained)
        copies = self.settings.copies
        return Passes(layers * (1 + copies), attention * (1 + copies), head * copies)

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> NoisyCopies:
        return corrupt_copies(key, batch, denoiser, self.settings)

    def at_step(self, noised: NoisyCopies, step: jax.Array) -> NoisyCopies:
        return noised._replace(ahead=annealed_ahead(noised.lengths, step, self.settings.anneal_attention))

    def means(
        self,
        denoiser: Denoiser,
        base: Denoiser,
        noised: NoisyCopies,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> Means:
        """Reports the plain mean cross entropy of what is learned, in nats, and with `confidence` the mean entropy
        where the most probable token is right."""
        first, count = denoiser.min_prompt_length, noised.inputs.shape[1]
        each = lambda x: jnp.repeat(x, count, axis=0)  # for every copy
        flat = lambda x: x.reshape(-1, x.shape[-1])
        counted = self.counted_positions(noised.lengths, noised.tokens.shape[1])
        inputs, reader = denoiser.embed(noised.tokens), self.reader(denoiser, base)
        visible, since = seen_keys(
            reader, self.visible_to_clean(noised), noised.documents, noised.ahead, noised.tokens.shape[1]
        )
        read, clean, of_clean = reader.forward_with_routing(inputs, visible, counted, remat=remat, since=since)
        hidden, routing = routed_states(
            denoiser,
            flat(noised.inputs),
            each(noised.lengths),
            None if counted is None else each(counted),
            before=jax.tree.map(each, clean),
            remat=remat,
            sharding=sharding,
            documents=jax.tree.map(each, noised.documents),
            ahead=jax.tree.map(each, noised.ahead),
            in_flight=self.in_flight,
        )
        tokens, weights = each(noised.tokens)[:, first:], flat(noised.weights)[:, first:]
        sum_up = functools.partial(head_sums, chunk=self.settings.chunk, groups=groups, sharding=sharding)
        sums = _with_entropies if self.settings.confidence else cross_entropies
        total, plain, *entropy = sum_up(sums, (denoiser,), (hidden, tokens), weights)
        learned = jnp.sum(weights > 0)
        loss, metrics = self.diffusion_mean(total, learned, noised), {"cross_entropy": Mean.of(plain, learned)}
        if entropy:
            metrics["entropy"] = Mean.of(*entropy)
            loss = loss.plus(self.settings.confidence * metrics["entropy"].value)
        loss, metrics = self.with_clean_loss(loss, metrics, denoiser, read, noised, groups, sharding)
        both = None if routing is None else jax.tree.map(jnp.add, of_clean, routing)
        return self.add_router_losses(loss, metrics, both)

    # What a subclass may do otherwise --------------------------------------------------------------------------------

    def reader(self, denoiser: Denoiser, base: Denoiser) -> Denoiser:
        """What runs the row as it is."""
        return denoiser

    def visible_to_clean(self, noised: NoisyCopies) -> jax.Array:
        """What positions of the row as it is see, `visible` of `Denoiser.forward`."""
        return noised.lengths

    def diffusion_mean(self, total: jax.Array, learned: jax.Array, noised: NoisyCopies) -> Mean:
        """The loss of the noisy copies.

        Args:
            total: weighted sum of the cross entropies.
            learned: number of positions that are learned.
        """
        return Mean.of(total, learned if self.settings.loss == "mean" else self.settings.copies * noised.targets.sum())

    def with_clean_loss(
        self,
        loss: Mean,
        metrics: Means,
        denoiser: Denoiser,
        hidden: jax.Array,
        noised: NoisyCopies,
        groups: int,
        sharding: NamedSharding | None,
    ) -> tuple[Mean, Means]:
        """The loss and other metrics, after a loss of the row as it is, whose hidden states are [B, T, D], is added."""
        return loss, metrics


def _with_entropies(
    denoiser: Denoiser, hidden: jax.Array, tokens: jax.Array, weights: jax.Array
) -> tuple[jax.Array, ...]:
    """The two sums of `cross_entropies`, and the sum of entropies and the number of positions whose most probable token
    is right (CAP, arXiv 2512.15745; dParallel, 2509.26488)."""
    log = jax.nn.log_softmax(denoiser.logits(hidden))
    cross = -jnp.take_along_axis(log, tokens[:, None], axis=-1)[:, 0]
    right = (weights > 0) & (jnp.argmax(log, axis=-1) == tokens)
    entropy = -jnp.sum(jnp.exp(log) * log, axis=-1)
    of = lambda chosen, x: jnp.sum(jnp.where(chosen, x, 0.0))
    return jnp.sum(weights * cross), of(weights > 0, cross), of(right, entropy), of(right, 1.0)
