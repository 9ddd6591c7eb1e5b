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
from jax.sharding import NamedSharding, PartitionSpec

from dllm_jax.denoiser import Denoiser, Span
from dllm_jax.sharding import ShardingRules
from dllm_jax.transformer import ParamSpec, RematPolicy, param_specs
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
    sharding: NamedSharding | None = None,
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
    total, plain = head_sums(
        cross_entropies, (denoiser,), (hidden, tokens), weights, chunk=chunk, groups=groups, sharding=sharding
    )
    return Losses(total / batch, plain / jnp.maximum(jnp.sum(weights > 0), 1))


def hidden_states(
    denoiser: Denoiser,
    inputs: jax.Array,
    visible: jax.Array,
    *,
    remat: RematPolicy | None = None,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """What predicts each position that has a predictor, from tokens [B, T]: [B, T - min_prompt_length, D]. What a
    position sees is said as in `Denoiser.forward`, such as by the rows' lengths [B]."""
    place = lambda x: x if sharding is None else lax.with_sharding_constraint(x, sharding)
    batch, length = inputs.shape
    first = denoiser.min_prompt_length
    start = jnp.full((batch,), first, jnp.int32)
    outputs = Span(start, length - first)
    return place(denoiser.forward(place(denoiser.embed(inputs)), visible, outputs=outputs, remat=remat)[0])


def cross_entropies(
    denoiser: Denoiser, hidden: jax.Array, tokens: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weighted and plain sum of the cross entropies where the weight is not zero; [C, D], [C], [C]."""
    entropy = optax.softmax_cross_entropy_with_integer_labels(denoiser.logits(hidden), tokens)
    return jnp.sum(weights * entropy), jnp.sum(jnp.where(weights > 0, entropy, 0.0))


def head_sums(
    sums: Callable[..., tuple[jax.Array, jax.Array]],
    heads: tuple[Denoiser, ...],
    parts: tuple[jax.Array, ...],
    weights: jax.Array,
    *,
    chunk: int,
    groups: int,
    sharding: NamedSharding | None,
) -> tuple[jax.Array, jax.Array]:
    """Sums over all positions of what needs their logits.

    The masked positions of each group are gathered to the front and taken `chunk` at a time, of all groups together.
    Chunks without any are not computed, and the logits of each are computed again in the backward pass instead of being
    kept. Every group has the vocabulary head for itself: so it is gathered once, and so its gradient, which would cross
    the wire once for each chunk, is summed over the devices after the last.

    Args:
        sums: two scalars from the heads, arrays [C, ...] of positions and their weights [C]; a position of weight 0
            adds nothing.
        heads: the models whose logits are asked for.
        parts: arrays [B, T, ...].
        weights: [B, T] float32.
        chunk, groups, sharding: as in `diffusion_loss`.
    """
    parts = tuple(x.reshape(groups, -1, *x.shape[2:]) for x in (*parts, weights))
    batch = sharding.spec[0] if sharding is not None and sharding.spec else None  # what groups are split over
    own = [_place_head(_head_of_each_group(head, groups), head, sharding, batch) for head in heads]

    def of_group(own: list[dict[str, Any]], part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        with_own = zip(heads, own, strict=True)
        return sums(*(dataclasses.replace(head, params={**head.params, **mine}) for head, mine in with_own), *part)

    def of_all(*part: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Said again in here for the gradients, which the compiler would split otherwise.
        placed = [_place_head(mine, head, sharding, batch) for mine, head in zip(own, heads, strict=True)]
        first, second = jax.vmap(of_group)(placed, tuple(_split(x, sharding, batch) for x in part))
        return jnp.sum(first), jnp.sum(second)

    with jax.named_scope("vocabulary"):  # what profiles show
        return _in_chunks(of_all, parts, max(1, chunk // groups)) if chunk else of_all(*parts)


def _head_of_each_group(denoiser: Denoiser, groups: int) -> dict[str, Any]:
    """The parameters of a vocabulary head with a leading axis of groups."""

    def spread(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # of an adapter's dropout
            return jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(groups))
        return jnp.broadcast_to(x, (groups, *x.shape))

    return jax.tree.map(spread, {name: denoiser.params[name] for name in denoiser.head_names})


def with_head_gathered(denoiser: Denoiser, sharding: NamedSharding | None) -> Denoiser:
    """The same model, with all rows of its vocabulary head on every device: for loops, which would gather it in each
    turn. Of no use where a gradient is asked for, see `head_sums`."""
    head = _place_head({name: denoiser.params[name] for name in denoiser.head_names}, denoiser, sharding)
    return dataclasses.replace(denoiser, params={**denoiser.params, **head})


def _place_head(
    head: dict[str, Any], denoiser: Denoiser, sharding: NamedSharding | None, *leading: Any
) -> dict[str, Any]:
    """Parameters of a vocabulary head where each device has all of them but other parts of the vocabulary.

    Args:
        leading: mesh axes that an array's axes before those of the parameter are split over, one entry for each.
    """
    specs, rules = param_specs(denoiser.config), ShardingRules(embed=None)

    def place(spec: ParamSpec, x: jax.Array) -> jax.Array:
        if sharding is None or x.shape[len(leading) :] != spec.shape:
            return _split(x, sharding, *leading)
        return _split(x, sharding, *leading, *rules.spec(spec.axes, sharding.mesh))

    return {name: jax.tree.map(functools.partial(place, specs[name]), x) for name, x in head.items()}


def _split(x: jax.Array, sharding: NamedSharding | None, *axes: Any) -> jax.Array:
    """x split over these axes of the mesh that a batch's sharding is on; keys stay as they are."""
    if sharding is None or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, PartitionSpec(*axes)))


def _in_chunks(
    sums: Callable[..., tuple[jax.Array, jax.Array]], parts: tuple[jax.Array, ...], size: int
) -> tuple[jax.Array, jax.Array]:
    """`sums(*parts)` of arrays [G, N, ...], whose last are weights, for `size` positions of each group at a time."""
    weights = parts[-1]
    order = jnp.argsort(weights == 0, axis=1, stable=True)
    order = jnp.pad(order, ((0, 0), (0, -order.shape[1] % size)), constant_values=order.shape[1])  # out of range

    def chunks(x: jax.Array) -> jax.Array:  # [G, P, ...] -> [P / size, G, size, ...]
        index = order if x.ndim == 2 else order[..., None]
        x = jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)
        return jnp.moveaxis(x.reshape(len(weights), -1, size, *x.shape[2:]), 1, 0)

    def one(*part: jax.Array) -> tuple[jax.Array, jax.Array]:
        zero = jnp.zeros((), jnp.float32)
        return lax.cond(jnp.any(part[-1] > 0), lambda: sums(*part), lambda: (zero, zero))

    def add(
        total: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        first, second = jax.checkpoint(one, prevent_cse=False)(*part)
        return (total[0] + first, total[1] + second), None

    start = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    return lax.scan(add, start, tuple(map(chunks, parts)))[0]


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
        sharding: NamedSharding,
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
        sharding: NamedSharding | None = None,
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
