"""The masked-diffusion objective of LLaDA (arXiv 2502.09992, equations 3 and 5, algorithms 1 and 2).

Per row t ~ U(eps, 1), every target position is masked with probability t, and the row's loss is the sum of the masked
positions' cross entropies over t and over the number of targets; the loss is the mean over rows. Pre-training targets
every position, SFT the answer (its end-token padding included). Dream (arXiv 2508.15487) differs by the shift alone,
which the `Denoiser` undoes: the first position of a shifted family has no predictor, is never masked and carries no
loss.

A row's loss times its number of targets is the estimate that `samplers.likelihood.masked_loss` gives of -log p, with t
in the place of the share of masked tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Sharding

from dllm_jax.denoiser import Denoiser, Span
from dllm_jax.transformer import RematPolicy
from train.config import ObjectivePart

Metrics = dict[str, jax.Array]


class Batch(NamedTuple):
    """Rows to learn from.

    Attributes:
        tokens: [..., T] int32, without masks.
        targets: [..., T] bool, positions that may be masked and are learned.
        lengths: [...] int32, positions that count; later ones are never attended to.
        step: [..., T] int32, of trajectories: number of the step that wrote each position, -1 where none did; None of
            other data.
    """

    tokens: jax.Array
    targets: jax.Array
    lengths: jax.Array
    step: jax.Array | None = None


class Noised(NamedTuple):
    """A batch after the forward process.

    Attributes:
        inputs: [..., T] int32, tokens with masks.
        tokens: [..., T] int32, as they were.
        weights: [..., T] float32: of each position's cross entropy, 1 / (t targets) where masked, else 0.
        lengths: [...] int32.
    """

    inputs: jax.Array
    tokens: jax.Array
    weights: jax.Array
    lengths: jax.Array


def mask_probabilities(key: jax.Array, rows: int, eps: float, *, stratified: bool = False) -> jax.Array:
    """t ~ U(eps, 1) for each row, [rows] float32: (1 - eps) u + eps with u ~ U(0, 1).

    Args:
        stratified: u_i = (u + i / rows) mod 1 of a single u, in random order: each is uniform by itself, together they
            cover the interval (Kingma et al., arXiv 2107.00630, appendix I.1).
    """
    if stratified:
        first, order = jax.random.split(key)
        u = (jax.random.uniform(first) + jnp.arange(rows, dtype=jnp.float32) / rows) % 1.0
        u = jax.random.permutation(order, u)
    else:
        u = jax.random.uniform(key, (rows,))
    return (1.0 - eps) * u + eps


def corrupt(key: jax.Array, batch: Batch, denoiser: Denoiser, *, eps: float = 1e-3, stratified: bool = False) -> Noised:
    """The forward process: masks each row's targets independently with the row's probability.

    The draw of a row depends on the key and on its number in the batch, not on how the batch is divided into leading
    axes or devices.

    Args:
        batch: with any leading axes.
        denoiser: for the mask token and the positions that have no predictor; its parameters are not read.
    """
    length = batch.tokens.shape[-1]
    shape, rows = batch.lengths.shape, batch.lengths.size
    row_key, token_key = jax.random.split(key)
    probability = mask_probabilities(row_key, rows, eps, stratified=stratified).reshape(shape)[..., None]
    draws = jax.random.uniform(token_key, (rows, length)).reshape(batch.tokens.shape)
    targets = batch.targets & (jnp.arange(length) >= denoiser.min_prompt_length)
    masked = targets & (draws < probability)
    count = jnp.maximum(jnp.sum(targets, axis=-1, keepdims=True), 1)
    weights = jnp.where(masked, 1.0 / (probability * count), 0.0)
    return Noised(jnp.where(masked, denoiser.mask_id, batch.tokens), batch.tokens, weights, batch.lengths)


class Losses(NamedTuple):
    """Attributes:
    loss: scalar float32, the mean over rows of the objective.
    cross_entropy: scalar float32, the plain mean over masked positions, in nats: steadier, for people.
    """

    loss: jax.Array
    cross_entropy: jax.Array


def diffusion_loss(
    denoiser: Denoiser,
    noised: Noised,
    *,
    chunk: int = 0,
    groups: int = 1,
    remat: RematPolicy | None = None,
    sharding: Sharding | None = None,
) -> Losses:
    """The objective on a noised batch [B, T].

    Args:
        chunk: positions whose logits exist at a time, forward and backward; 0 computes all B T at once.
        groups: with `chunk`, number of equal parts of the batch whose masked positions are gathered apart: the number
            of devices that the batch is split over, so that no position leaves its device.
        remat: what of each layer is kept for the backward pass, see `Transformer.forward`.
        sharding: of arrays whose first axis is the batch; keeps the activations split by it alone.
    """
    batch, length = noised.tokens.shape
    first = denoiser.min_prompt_length
    hidden = hidden_states(denoiser, noised.inputs, noised.lengths, remat=remat, sharding=sharding)
    tokens, weights = noised.tokens[:, first:], noised.weights[:, first:]
    sums = functools.partial(_sums, denoiser)
    if chunk:
        total, plain = chunked_sums(sums, (hidden, tokens), weights, chunk, groups)
    else:
        total, plain = sums(hidden, tokens, weights)
    return Losses(total / batch, plain / jnp.maximum(jnp.sum(weights > 0), 1))


def hidden_states(
    denoiser: Denoiser,
    inputs: jax.Array,
    visible: jax.Array,
    *,
    remat: RematPolicy | None = None,
    sharding: Sharding | None = None,
) -> jax.Array:
    """What predicts each position that has a predictor, from tokens [B, T]: [B, T - min_prompt_length, D]. What a
    position sees is said as in `Denoiser.forward`, such as by the rows' lengths [B]."""
    place = lambda x: x if sharding is None else lax.with_sharding_constraint(x, sharding)
    batch, length = inputs.shape
    first = denoiser.min_prompt_length
    start = jnp.full((batch,), first, jnp.int32)
    outputs = Span(start, length - first)
    return place(denoiser.forward(place(denoiser.embed(inputs)), visible, outputs=outputs, remat=remat)[0])


def _sums(denoiser: Denoiser, hidden: jax.Array, tokens: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weighted and plain sum of the cross entropies where the weight is not zero; [G, C, D], [G, C], [G, C]."""
    entropy = optax.softmax_cross_entropy_with_integer_labels(denoiser.logits(hidden), tokens)
    return jnp.sum(weights * entropy), jnp.sum(jnp.where(weights > 0, entropy, 0.0))


def chunked_sums(
    sums: Callable[..., tuple[jax.Array, jax.Array]],
    parts: tuple[jax.Array, ...],
    weights: jax.Array,
    chunk: int,
    groups: int,
) -> tuple[jax.Array, jax.Array]:
    """`sums(*parts, weights)` with the masked positions gathered to the front and taken `chunk` at a time.

    Chunks without any are not computed, and the logits of each are computed again in the backward pass instead of being
    kept.

    Args:
        sums: two scalars from arrays [G, C, ...] of positions and their weights [G, C]; a position of weight 0 adds
            nothing.
        parts: arrays [B, T, ...].
        weights: [B, T] float32.
        chunk, groups: as in `diffusion_loss`.
    """
    size = max(1, chunk // groups)
    parts = tuple(x.reshape(groups, -1, *x.shape[2:]) for x in parts)
    weights = weights.reshape(groups, -1)
    order = jnp.argsort(weights == 0, axis=1, stable=True)
    order = jnp.pad(order, ((0, 0), (0, -order.shape[1] % size)), constant_values=order.shape[1])  # out of range

    def chunks(x: jax.Array) -> jax.Array:  # [G, P, ...] -> [P / size, G, size, ...]
        index = order if x.ndim == 2 else order[..., None]
        x = jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)
        return jnp.moveaxis(x.reshape(groups, -1, size, *x.shape[2:]), 1, 0)

    def one(*part: jax.Array) -> tuple[jax.Array, jax.Array]:
        zero = jnp.zeros((), jnp.float32)
        return lax.cond(jnp.any(part[-1] > 0), lambda: sums(*part), lambda: (zero, zero))

    def add(
        total: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        first, second = jax.checkpoint(one, prevent_cse=False)(*part)
        return (total[0] + first, total[1] + second), None

    start = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    return lax.scan(add, start, tuple(chunks(x) for x in (*parts, weights)))[0]


class Objective(Protocol):
    """What a command trains for: how a batch is noised, and the loss of a noised batch."""

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> Any:
        """A noised batch: a tuple of arrays with the batch's leading axes; the denoiser's parameters are not read."""
        ...

    def loss(
        self,
        learner: Any,
        base: Denoiser,
        noised: Any,
        /,
        *,
        groups: int,
        remat: RematPolicy | None,
        sharding: Sharding,
    ) -> tuple[jax.Array, Metrics]:
        """The loss of a noised batch [B, ...] and what is reported, the loss among it.

        Args:
            learner: what is trained: a `Denoiser`, or an `Indicator`.
            base: the frozen model under adapters or beside an indicator; without either it has no parameters.
            groups, remat, sharding: as in `diffusion_loss`.
        """
        ...


class CrossEntropy:
    """An objective whose loss is `diffusion_loss` of what its `corrupt` has weighed; settings have a `chunk`."""

    settings: Any

    def loss(
        self,
        denoiser: Denoiser,
        base: Denoiser,
        noised: Noised,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: Sharding | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """As `Objective`."""
        chunk = self.settings.chunk
        losses = diffusion_loss(denoiser, noised, chunk=chunk, groups=groups, remat=remat, sharding=sharding)
        return losses.loss, losses._asdict()


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion(CrossEntropy):
    """The objective of this module with its settings."""

    settings: ObjectivePart

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> Noised:
        """As `Objective`."""
        return corrupt(key, batch, denoiser, eps=self.settings.eps, stratified=self.settings.stratified)
