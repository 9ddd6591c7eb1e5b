"""What objectives have in common: batches, cross entropies of masked positions, and sums over positions whose logits
never exist all at once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.kv_cache import KVCache
from dllm_jax.models.moe import Routing
from dllm_jax.models.transformer import ParamSpec, RematPolicy, param_specs
from dllm_jax.parallel.sharding import ShardingRules
from dllm_jax.params.products import redirect_gradient
from train.config import Kind

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


def head_sums(
    sums: Callable[..., tuple[jax.Array, ...]],
    heads: tuple[Denoiser, ...],
    parts: tuple[jax.Array, ...],
    weights: jax.Array,
    *,
    chunk: int,
    groups: int,
    sharding: NamedSharding | None,
) -> tuple[jax.Array, ...]:
    """Sums over all positions of what needs their logits.

    The masked positions of each group are gathered to the front and taken `chunk` at a time, of all groups at once.
    Chunks without any are not computed, and the logits of each are computed again in the backward pass instead of being
    kept. Every group has the vocabulary head for itself: so it is gathered once, and so its gradient, which would cross
    the wire once for each chunk, is summed over the devices after the last.

    Args:
        sums: float32 sums from the heads, arrays [C, ...] of positions and their weights [C], scalars or of any shape;
            a position of weight 0 adds nothing.
        heads: the models whose logits `sums` reads.
        parts: arrays [B, T, ...].
        weights: [B, T] float32.
        chunk, groups, sharding: as in `diffusion_loss`.
    """
    parts = tuple(x.reshape(groups, -1, *x.shape[2:]) for x in (*parts, weights))
    batch = sharding.spec[0] if sharding is not None and sharding.spec else None  # what groups are split over
    place = lambda mine, head: _place_head(mine, head, sharding, batch)
    own, wide = [], []
    for head in heads:
        params = {name: head.params[name] for name in head.head_names}
        wide.append(place(_of_each_group(jax.tree.map(_widened, params), groups), head))
        own.append(place(_of_each_group(lax.stop_gradient(_narrowed(params, head.dtype)), groups), head))

    def of_group(own: list[dict[str, Any]], part: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        with_own = zip(heads, own, strict=True)
        return sums(*(dataclasses.replace(head, params={**head.params, **mine}) for head, mine in with_own), *part)

    def of_all(own: list[dict[str, Any]], *part: jax.Array) -> tuple[jax.Array, ...]:
        # Said again in here for the gradients, which the compiler would split otherwise.
        placed = [place(mine, head) for mine, head in zip(own, heads, strict=True)]
        found = jax.vmap(of_group)(placed, tuple(_split(x, sharding, batch) for x in part))
        return tuple(jnp.sum(x, axis=0) for x in found)

    with jax.named_scope("vocabulary"):  # what profiles show
        if chunk:
            return _sum_chunks(of_all, wide, own, _chunks(parts, chunk))
        return of_all(jax.tree.map(_redirected, wide, own), *parts)


def _of_each_group(head: dict[str, Any], groups: int) -> dict[str, Any]:
    """Parameters with a leading axis of groups."""

    def spread(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # of an adapter's dropout
            return jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(groups))
        return jnp.broadcast_to(x, (groups, *x.shape))

    return jax.tree.map(spread, head)


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _narrowed(head: dict[str, Any], dtype: jnp.dtype) -> dict[str, Any]:
    """With plain matrices in the dtype that the model computes in."""
    is_matrix = lambda x: isinstance(x, jax.Array) and x.ndim > 1
    return {name: x.astype(dtype) if is_matrix(x) else x for name, x in head.items()}


def _redirected(wide: jax.Array, value: jax.Array) -> jax.Array:
    """`redirect_gradient`, of what has a gradient."""
    return redirect_gradient(wide, value) if jnp.issubdtype(value.dtype, jnp.floating) else value


def with_head_gathered(denoiser: Denoiser, sharding: NamedSharding | None) -> Denoiser:
    """The same model, with all rows of its vocabulary head on every device: for loops, which would gather it in each
    turn. Not for gradients, see `head_sums`."""
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


def _chunks(parts: tuple[jax.Array, ...], size: int) -> tuple[jax.Array, ...]:
    """Arrays [G, P, ...], whose last are weights, as [N, G, size, ...]: in each group the positions with a weight come
    first, and some of weight 0 fill up the last chunk."""
    weights = parts[-1]
    order = jnp.argsort(weights == 0, axis=1, stable=True)
    order = jnp.pad(order, ((0, 0), (0, -order.shape[1] % size)), constant_values=order.shape[1])  # out of range

    def cut(x: jax.Array) -> jax.Array:
        index = order if x.ndim == 2 else order[..., None]
        x = jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)
        return jnp.moveaxis(x.reshape(len(weights), -1, size, *x.shape[2:]), 1, 0)

    return tuple(map(cut, parts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_chunks(
    sums: Callable[..., tuple[jax.Array, ...]], wide: Any, own: Any, chunks: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The sum of `sums(own, *chunk)` over chunks, whose last are weights; one without any is not computed, here and in
    the backward pass, which computes the others again.

    Autodiff would write `own`, or zeros in its place, for each chunk.

    Args:
        wide: what has the gradient of `own`, the same numbers in float32, in which chunks are added up: in bfloat16 a
            sum stops growing. Nothing reads it, so that no program holds it.
    """
    start = tuple(jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(sums, own, *(x[0] for x in chunks)))

    def add(total: tuple[jax.Array, ...], chunk: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
        found = lax.cond(jnp.any(chunk[-1] > 0), lambda: sums(own, *chunk), lambda: start)
        return tuple(map(jnp.add, total, found)), None

    return lax.scan(add, start, chunks)[0]


def _forward(sums: Callable[..., tuple[jax.Array, ...]], wide: Any, own: Any, chunks: Any) -> tuple[Any, Any]:
    """Keeps what has a gradient apart from what has none, each with None in the other's place."""
    apart = lambda by, x: [
        jax.tree.map(lambda by, x, learned=learned: x.value if by.perturbed == learned else None, by, x)
        for learned in (True, False)
    ]
    own, chunks = apart(wide, own), apart(chunks, chunks)
    return _sum_chunks(sums, None, _whole(*own), _whole(*chunks)), (own, chunks)


def _whole(some: Any, others: Any) -> Any:
    """One tree of two that have None in each other's place."""
    return jax.tree.map(lambda x, y: y if x is None else x, some, others, is_leaf=lambda x: x is None)


def _backward(sums: Callable[..., tuple[jax.Array, ...]], saved: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients of `wide`, of nothing, and of chunks."""
    (learned, frozen), chunks = saved
    wanted = {place: x for place, x in enumerate(gradients) if not isinstance(x, SymbolicZero)}

    def add(total: Any, chunk: list[Any]) -> tuple[Any, Any]:
        varied, fixed = chunk

        def of(learned: Any, varied: Any) -> dict[int, jax.Array]:
            found = sums(_whole(learned, frozen), *_whole(varied, fixed))
            return {place: found[place] for place in wanted}

        def compute(turn: int, before: tuple[Any, Any]) -> tuple[Any, Any]:
            # XLA would compute before the loop what none of its turns changes.
            mine, _ = lax.optimization_barrier((varied, turn))
            of_own, of_chunk = jax.vjp(of, learned, mine)[1](wanted)
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), before[0], of_own), of_chunk

        # A loop of one round or none: XLA would copy what passes through a conditional.
        rounds = jnp.any(_whole(varied, fixed)[-1] > 0).astype(jnp.int32)
        found: tuple[Any, Any] = lax.fori_loop(0, rounds, compute, (total, jax.tree.map(jnp.zeros_like, varied)))
        return found

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), learned)
    total, of_chunks = lax.scan(add, start, chunks, reverse=True)
    return total, None, of_chunks


_sum_chunks.defvjp(_forward, _backward, symbolic_zeros=True)
