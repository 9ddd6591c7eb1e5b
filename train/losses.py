"""What objectives have in common: batches, hidden states, and cross entropies of masked positions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding

from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.kv_cache import KVCache
from dllm_jax.models.moe import Routing
from dllm_jax.models.transformer import RematPolicy
from train.config import Kind
from train.vocabulary import head_sums

Metrics = dict[str, jax.Array]

LEVELS = tuple(f"cross_entropy_t{low}-{low + 25}" for low in (0, 25, 50, 75))
"""Names of the cross entropy of rows with t in each quarter of (0, 1), in percent."""


class Mean(NamedTuple):
    """A mean that is not divided yet: the sums of the parts of a batch are those of the whole batch.

    Attributes:
        total: scalar float32, the sum of what is averaged.
        weight: scalar float32 above 0, of how many, or of how much weight; of nothing next to none.
    """

    total: jax.Array
    weight: jax.Array

    @classmethod
    def of(cls, total: jax.Array, weight: Any) -> "Mean":
        """With a weight of any dtype."""
        return cls(total, jnp.maximum(jnp.asarray(weight, jnp.float32), 1e-6))

    @property
    def value(self) -> jax.Array:
        """The mean, scalar float32; 0 of nothing."""
        return self.total / self.weight

    def plus(self, mean: jax.Array) -> "Mean":
        """With the mean of something else over as much added."""
        return self._replace(total=self.total + mean * self.weight)


Means = dict[str, Mean]


def mean_values(means: Means) -> Metrics:
    """The values of means."""
    return {name: mean.value for name, mean in means.items()}


class Documents(NamedTuple):
    """Which document of its row each position belongs to: it sees nothing of others, and is counted from its first.

    Attributes:
        first: [..., T] int32, the document's first position.
        end: [..., T] int32, the first position after it.
    """

    first: jax.Array
    end: jax.Array


class Batch(NamedTuple):
    """Rows to learn from.

    Attributes:
        tokens: [..., T] int32, without masks.
        targets: [..., T] bool, positions that may be masked and are learned.
        lengths: [...] int32, positions that count; later ones are never attended to. A row of length 0, without
            targets, only fills a batch up and counts in no mean.
        step: [..., T] int32, of trajectories: number of the step that wrote each position, -1 where none did; None of
            other data.
        documents: of rows that hold several (`data.pack`); None where a row is one.
    """

    tokens: jax.Array
    targets: jax.Array
    lengths: jax.Array
    step: jax.Array | None = None
    documents: Documents | None = None

    @property
    def places(self) -> jax.Array:
        """[T] or [..., T] int32, each position counted from the first of its document."""
        place = jnp.arange(self.tokens.shape[-1], dtype=jnp.int32)
        return place if self.documents is None else place - self.documents.first

    def of_document(self, x: jax.Array) -> jax.Array:
        """Sums of [..., T] over each position's document, [..., T]."""
        assert self.documents is not None
        sums = jnp.pad(jnp.cumsum(x, axis=-1), [*[(0, 0)] * (x.ndim - 1), (1, 0)])
        up_to = lambda place: jnp.take_along_axis(sums, place, axis=-1)
        return up_to(self.documents.end) - up_to(self.documents.first)


class Noised(NamedTuple):
    """A batch after the forward process.

    Attributes:
        inputs: [..., T] int32, tokens with masks.
        tokens: [..., T] int32, as they were.
        weights: [..., T] float32: of each position's cross entropy, 1 / (t targets) where masked, else 0.
        lengths: [...] int32.
        alpha: [...] float32, weight of the soft inputs of each row; None where there are none.
        documents: of the batch.
        examples: [...] int32, how many examples each row counts as in the mean; None where each counts once, and a
            row of length 0 not at all.
        level: [..., T or 1] float32, t of each example, where cross entropies are reported by it; else None.
        ahead: as of `seen_keys`, the same in all rows, [...] float32; None for all.
    """

    inputs: jax.Array
    tokens: jax.Array
    weights: jax.Array
    lengths: jax.Array
    alpha: jax.Array | None = None
    documents: Documents | None = None
    examples: jax.Array | None = None
    level: jax.Array | None = None
    ahead: jax.Array | None = None


def annealed_ahead(lengths: jax.Array, step: jax.Array, steps: int) -> jax.Array | None:
    """`ahead` of rows of these lengths [...] at a step: step / steps, and 1 from `steps` on; None with 0 steps."""
    return jnp.broadcast_to(jnp.minimum(step / steps, 1.0), lengths.shape) if steps else None


def position_draws(key: jax.Array, rows: int, length: int) -> jax.Array:
    """Uniform draws in [0, 1) for each position, [rows, length] float32; how long the rows are changes none of them, so
    that `data.bucket` does not."""
    return jax.random.uniform(key, (length, rows)).T


def example_weights(batch: Batch, targets: jax.Array, kind: Kind) -> tuple[jax.Array, jax.Array | None]:
    """What a target [..., T] bool counts in a loss whose examples count alike, [..., T or 1] float32, and `examples` of
    `Noised`. The examples are rows; documents where a row holds several and `kind` is "sft"."""
    if batch.documents is None or kind != "sft":
        return 1.0 / jnp.maximum(jnp.sum(targets, axis=-1, keepdims=True), 1), None
    count = batch.of_document(targets)
    return 1.0 / jnp.maximum(count, 1), jnp.sum((batch.places == 0) & (count > 0), axis=-1)


class Losses(NamedTuple):
    """Attributes:
    loss: the mean over examples of the objective.
    cross_entropy: the plain mean over masked positions, in nats: steadier than the loss.
    by_level: the same of rows with t in each of `LEVELS`, by its name, if the batch has levels; else empty.
    routing: of the layers with experts, if `counted` was given.
    """

    loss: Mean
    cross_entropy: Mean
    by_level: Means
    routing: Routing | None


def diffusion_loss(
    denoiser: Denoiser,
    noised: Noised,
    *,
    chunk: int = 0,
    groups: int = 1,
    remat: RematPolicy | None = None,
    sharding: NamedSharding | None = None,
    counted: jax.Array | None = None,
    soft: jax.Array | None = None,
) -> Losses:
    """The objective on a noised batch [B, T].

    Args:
        chunk: positions of each group whose logits exist at a time, forward and backward; 0 computes all B T at once.
        groups: with `chunk`, number of equal parts of the batch whose masked positions are gathered apart: the number
            of devices that the batch is split over, so that no position leaves its device.
        remat: what of each layer is kept for the backward pass, see `Transformer.forward`.
        sharding: of arrays whose first axis is the batch; keeps the activations split by it alone.
        counted: [B, T] bool, positions whose routing is returned, see `Denoiser.routed`.
        soft: [B, T, D], what is added to the inputs' embeddings.
    """
    first = denoiser.min_prompt_length
    seen: Any = {"documents": noised.documents, "ahead": noised.ahead}
    place: Any = {"remat": remat, "sharding": sharding, "soft": soft, **seen}
    hidden, routing = routed_states(denoiser, noised.inputs, noised.lengths, counted, **place)
    tokens, weights = noised.tokens[:, first:], noised.weights[:, first:]
    sums: Callable[..., tuple[jax.Array, ...]] = cross_entropies
    parts: tuple[jax.Array, ...] = (hidden, tokens)
    if noised.level is not None:
        number = jnp.minimum((noised.level * len(LEVELS)).astype(jnp.int32), len(LEVELS) - 1)
        sums, parts = level_entropies, (*parts, jnp.broadcast_to(number, noised.weights.shape)[:, first:])
    total, plain, *apart = head_sums(sums, (denoiser,), parts, weights, chunk=chunk, groups=groups, sharding=sharding)
    examples = noised.lengths > 0 if noised.examples is None else noised.examples
    loss, cross_entropy = Mean.of(total, jnp.sum(examples)), Mean.of(plain, jnp.sum(weights > 0))
    count = lambda number: jnp.sum((weights > 0) & (parts[-1] == number))
    by_level = {LEVELS[number]: Mean.of(part, count(number)) for number, part in enumerate(apart)}
    return Losses(loss, cross_entropy, by_level, routing)


def seen_keys(
    denoiser: Denoiser, visible: jax.Array, documents: Documents | None, ahead: jax.Array | None, length: int
) -> tuple[jax.Array, jax.Array | None]:
    """`visible` and `since` of `Denoiser.forward_with_routing` for rows of T = `length` positions: where rows hold
    several documents, theirs.

    Args:
        ahead: [B] float32 in [0, 1], share that each position sees of what the model shows it after itself: 0 is causal
            attention, and 1 or None the model's.
    """
    visible, since = (visible, None) if documents is None else (documents.end, documents.first)
    if ahead is None:
        return visible, since
    own = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (len(visible), length))
    end = denoiser.seen_until(own if since is None else own - since, visible, since)
    least = jnp.minimum(own + 1, end)
    return least + jnp.round(ahead[:, None] * (end - least)).astype(jnp.int32), since


def hidden_states(
    denoiser: Denoiser,
    inputs: jax.Array,
    visible: jax.Array,
    *,
    before: KVCache | None = None,
    remat: RematPolicy | None = None,
    sharding: NamedSharding | None = None,
    documents: Documents | None = None,
    ahead: jax.Array | None = None,
) -> jax.Array:
    """What predicts each position that has a predictor, from tokens [B, T]: [B, T - min_prompt_length, D]. `visible`
    is as in `Denoiser.forward`, such as the rows' lengths [B]; with documents it is not read. `ahead` is as of
    `seen_keys`."""
    place: Any = {"before": before, "remat": remat, "sharding": sharding, "documents": documents, "ahead": ahead}
    return routed_states(denoiser, inputs, visible, None, **place)[0]


def routed_states(
    denoiser: Denoiser,
    inputs: jax.Array,
    visible: jax.Array,
    counted: jax.Array | None,
    *,
    before: KVCache | None = None,
    remat: RematPolicy | None = None,
    sharding: NamedSharding | None = None,
    soft: jax.Array | None = None,
    documents: Documents | None = None,
    ahead: jax.Array | None = None,
    in_flight: int = 1,
) -> tuple[jax.Array, Routing | None]:
    """`hidden_states`, and how the positions that are `counted` [B, T] bool were routed, see `Denoiser.routed`; `soft`
    [B, T, D] is added to the inputs' embeddings. Of so many blocks `in_flight`, counted from position 0, a position
    sees the inputs of those up to its own, and `before` ahead of them."""
    place = lambda x: x if sharding is None else lax.with_sharding_constraint(x, sharding)
    embedded = denoiser.embed(inputs)
    embedded = embedded if soft is None else embedded + soft.astype(embedded.dtype)
    visible, since = seen_keys(denoiser, visible, documents, ahead, inputs.shape[1])
    if in_flight > 1 and (block_length := denoiser.block_length):
        own = jnp.arange(inputs.shape[1], dtype=jnp.int32)
        visible = denoiser.seen_until(own if since is None else own - since, visible, since)
        denoiser = denoiser.in_blocks(in_flight * block_length)  # what is seen of the own one is said by `visible`
    # All of them: layers that are a loop take no `outputs`.
    hidden, _, routing = denoiser.forward_with_routing(
        place(embedded), visible, counted, before=before, remat=remat, since=since
    )
    return place(hidden[:, denoiser.min_prompt_length :]), routing


def expected_embeddings(denoiser: Denoiser, hidden: jax.Array, *, chunk: int = 0) -> jax.Array:
    """`Denoiser.expected_embedding` of hidden states, [B, T, D] -> [B, T, D] in the model's dtype. The table of
    embeddings alone has a gradient.

    Args:
        chunk: positions of a row whose logits exist at once; 0 for all.
    """
    rows, length, width = hidden.shape
    size = min(chunk or length, length)
    parts = jnp.pad(hidden, ((0, 0), (0, -length % size), (0, 0))).reshape(rows, -1, size, width)
    expect = lambda part: denoiser.expected_embedding(lax.stop_gradient(denoiser.logits(part)))
    mixed = lax.map(jax.checkpoint(expect), parts.swapaxes(0, 1))
    return mixed.swapaxes(0, 1).reshape(rows, -1, width)[:, :length]


def router_losses(routing: Routing, balance: float, z: float) -> tuple[jax.Array, Metrics]:
    """What routing costs, and what is reported of it: `balance`, 1 where all experts are used alike, `router_z`, and
    the largest expert's share of a layer's assignments.

    Args:
        routing: of L layers, with sums over all tokens of a batch, those of other devices too.
        balance: weight of the mean over layers of E sum_e f_e P_e, with f_e the share of the assignments that expert e
            got and P_e the mean of its probability (Switch Transformer, arXiv 2101.03961, equation 4).
        z: weight of the mean over layers and tokens of logsumexp(scores)^2 (ST-MoE, arXiv 2202.08906, equation 5).

    Returns:
        The weighted sum, scalar float32, and the parts without their weights.
    """
    tokens = jnp.maximum(routing.tokens, 1)
    share = routing.chosen / jnp.maximum(jnp.sum(routing.chosen, axis=1, keepdims=True), 1)
    even = jnp.sum(share * routing.probability / tokens[:, None], axis=1) * share.shape[1]
    metrics = {"balance": jnp.mean(even), "router_z": jnp.mean(routing.square / tokens)}
    loss = balance * metrics["balance"] + z * metrics["router_z"]
    return loss, {**metrics, "largest_expert": jnp.max(share)}


def cross_entropies(
    denoiser: Denoiser, hidden: jax.Array, tokens: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weighted and plain sum of the cross entropies where the weight is not zero; [C, D], [C], [C]."""
    entropy = optax.softmax_cross_entropy_with_integer_labels(denoiser.logits(hidden), tokens)
    return jnp.sum(weights * entropy), jnp.sum(jnp.where(weights > 0, entropy, 0.0))


def level_entropies(
    denoiser: Denoiser, hidden: jax.Array, tokens: jax.Array, level: jax.Array, weights: jax.Array
) -> tuple[jax.Array, ...]:
    """The sums of `cross_entropies`, and the plain one of each of `LEVELS`, of positions with its number [C] int32."""
    entropy = optax.softmax_cross_entropy_with_integer_labels(denoiser.logits(hidden), tokens)
    plain = jnp.where(weights > 0, entropy, 0.0)
    apart = (jnp.sum(jnp.where(level == number, plain, 0.0)) for number in range(len(LEVELS)))
    return jnp.sum(weights * entropy), jnp.sum(plain), *apart
