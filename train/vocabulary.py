"""What needs the logits of many positions, in training: a part of them at a time, on every device of a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.transformer import ParamSpec, param_specs
from dllm_jax.parallel.sharding import ShardingRules
from dllm_jax.params.products import redirect_gradient


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
            return _sum_chunks(of_all, wide, own, _chunks(parts, min(chunk, parts[-1].shape[1])))
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
