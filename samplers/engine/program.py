"""Slots: a fixed number of rows over static buffers, each of which takes the next request as soon as it is free.

A batch is as slow as its slowest row; in slots a row that has ended frees its slot at once. Admission and steps are one
compiled program, `run_steps`, whatever the requests are: what they differ in are arrays, a row for each slot.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from dllm_jax.indicator import Indicator
from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.params.low_rank import LowRank
from dllm_jax.pytree import pytree
from samplers.command_buffers import COMMAND_BUFFERS
from samplers.constraints.constraint import START, Constraint
from samplers.inputs import number_dtypes
from samplers.loops.verifier import Verifier
from samplers.rowwise import each_row
from samplers.sampler import Result
from samplers.stopping import Stop

# Parts of a sampler whose arrays, scalars too, are the same for all requests.
_SHARED = (Verifier, Indicator, LowRank, Stop, Constraint)


@pytree(static=("top",))
class SlotRows:
    """What requests differ in, a row for each slot: leaves [B, ...], NumPy's on the host.

    Attributes:
        prompt, prompt_lengths, gen_lengths, given: as in `BlockSampler.init`.
        key_data: [B, 2] uint32, of each request's typed key.
        numbers: of the sampler, in the order of `numbers_of`.
        constraint: of each request's answer; None for slots whose requests bring none.
        bias: ids [B, N] int32, those outside the vocabulary for none, and what is added to their logits, [B, N]
            float32; None for slots whose requests bring none.
        top: whether the program keeps the most probable tokens, where the state has room for them.
    """

    prompt: Any
    prompt_lengths: Any
    gen_lengths: Any
    given: Any
    key_data: Any
    numbers: tuple[Any, ...]
    constraint: Constraint | None = None
    bias: tuple[Any, Any] | None = None
    top: bool = False


class Progress(NamedTuple):
    """Where the slots are after some steps.

    Attributes:
        result: of every slot so far.
        done: [B] bool.
        pending: [B, G] bool, positions that may still change.
        steps: int32, steps that were run.
        row_steps: int32, the sum over these of the busy slots.
        top: of every slot so far, as in `BlockState`; None where the program keeps none.
    """

    result: Result
    done: Any
    pending: Any
    steps: Any
    row_steps: Any
    top: Any = None


def numbers_of(sampler: Any) -> tuple[Any, ...]:
    """A sampler's numbers, scalars all, which may differ by request."""
    return tuple(leaf for leaf in _leaves(sampler) if _is_number(leaf))


def number_names(sampler: Any) -> tuple[str, ...]:
    """Where in a sampler its numbers are, in the order of `numbers_of`."""
    leaves = jax.tree_util.tree_flatten_with_path(sampler, is_leaf=_is_shared)[0]
    return tuple(jax.tree_util.keystr(path) for path, leaf in leaves if _is_number(leaf))


def number_dtypes_of(sampler: Any) -> tuple[np.dtype, ...]:
    """What the numbers of a sampler are arrays of, in the order of `numbers_of`: as their fields say, so that requests
    differ in values alone; a number of no such field is as it is."""
    paths = jax.tree_util.tree_flatten_with_path(sampler, is_leaf=_is_shared)[0]
    return tuple(_dtype_at(sampler, path, leaf) for path, leaf in paths if _is_number(leaf))


def _dtype_at(part: Any, path: Sequence[Any], leaf: Any) -> np.dtype:
    if not all(isinstance(key, jax.tree_util.GetAttrKey) for key in path):
        return jnp.result_type(leaf)
    for key in path[:-1]:
        part = getattr(part, key.name)
    kind: Any = type(part)
    return number_dtypes(kind).get(path[-1].name, jnp.result_type(leaf))


def structure_of(sampler: Any) -> Any:
    """All of a sampler but its numbers and the parts that all requests share: equal for requests of one engine."""
    leaves, tree = jax.tree.flatten(sampler, is_leaf=_is_shared)
    kept = (None if _is_shared(leaf) or _is_number(leaf) else tuple(jnp.ravel(leaf).tolist()) for leaf in leaves)
    return tree, tuple(kept)


def program_of(sampler: Any) -> Any:
    """The same with the shared parts: equal for samplers whose requests one engine can run."""
    parts = [part for part in _leaves(sampler) if _is_shared(part)]
    patterns = [
        (np.asarray(part.table).tobytes(), np.asarray(part.drop).tobytes()) for part in parts if isinstance(part, Stop)
    ]
    others = [id(leaf) for part in parts if not isinstance(part, Stop) for leaf in jax.tree.leaves(part)]
    return structure_of(sampler), tuple(patterns), tuple(others)


def _leaves(sampler: Any) -> list[Any]:
    return jax.tree.leaves(sampler, is_leaf=_is_shared)


def _is_shared(part: Any) -> bool:
    return isinstance(part, _SHARED)


def _is_number(leaf: Any) -> bool:
    return not _is_shared(leaf) and jnp.ndim(leaf) == 0


def with_numbers(sampler: Any, numbers: Sequence[Any]) -> Any:
    """The sampler with other numbers, in the order of `numbers_of`."""
    own = iter(numbers)
    return jax.tree.map(lambda leaf: next(own) if _is_number(leaf) else leaf, sampler, is_leaf=_is_shared)


def for_rows(sampler: Any, rows: SlotRows) -> Any:
    """The sampler with each row's own numbers and constraint."""
    found = with_numbers(sampler, rows.numbers)
    return found if rows.constraint is None else dataclasses.replace(found, constraint=rows.constraint)


def begin(sampler: Any, denoiser: DenoiserLike, rows: SlotRows, top: int) -> Any:
    """The state of slots that are all free, with room for so many of the most probable tokens."""
    state = _init(sampler, denoiser, rows)
    if top:
        shape = *state.canvas.decoded_at.shape, top
        state = dataclasses.replace(state, top=(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)))
    return _end(state, jnp.ones_like(state.canvas.done))


def run_steps(
    sampler: Any,
    denoiser: DenoiserLike,
    state: Any,
    rows: SlotRows,
    admitted: jax.Array,
    freed: jax.Array,
    most_steps: jax.Array,
    wanted: jax.Array,
) -> tuple[Any, Progress]:
    """Admits requests, and runs steps until enough rows have ended.

    Args:
        sampler: any of this library; its numbers are those of the rows.
        state: of the slots, from `begin` or the call before.
        admitted: [B] bool, slots whose row begins.
        freed: [B] bool, slots whose row ends first, if one runs.
        most_steps: int32, steps at most.
        wanted: int32, stop when this many of the running rows have ended.
    """
    state = _end(state, freed)
    unused = None if rows.top else getattr(state, "top", None)
    if unused is not None:
        state = dataclasses.replace(state, top=None)
    state = _admit(sampler, denoiser, state, rows, admitted)
    own, biased = for_rows(sampler, rows), _biased(denoiser, rows.bias)
    began = ~own.is_done(state)

    def continues(carry: tuple[Any, jax.Array, jax.Array]) -> jax.Array:
        state, steps, _ = carry
        done = own.is_done(state)
        return (steps < most_steps) & ~done.all() & ((began & done).sum() < wanted)

    def step(carry: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        state, steps, row_steps = carry
        busy = (~own.is_done(state)).sum(dtype=jnp.int32)
        return own.step(biased, state), steps + 1, row_steps + busy

    state, steps, row_steps = lax.while_loop(continues, step, (state, jnp.int32(0), jnp.int32(0)))
    progress = Progress(own.result(denoiser, state), own.is_done(state), own.pending(state), steps, row_steps)
    if unused is not None:
        state = dataclasses.replace(state, top=unused)
    return state, progress._replace(top=state.top) if rows.top else progress


def _init(sampler: Any, denoiser: DenoiserLike, rows: SlotRows) -> Any:
    """The state before the first forward of some rows."""
    key = jax.random.wrap_key_data(rows.key_data)
    options = {} if rows.given is None else {"given": rows.given}
    own = for_rows(sampler, rows)
    return own.init(denoiser, rows.prompt, rows.prompt_lengths, key=key, gen_lengths=rows.gen_lengths, **options)


def _biased(denoiser: Any, bias: tuple[jax.Array, jax.Array] | None) -> Any:
    """The model with each row's own bias."""
    if bias is None:
        return denoiser
    row = jnp.zeros(denoiser.vocab_size, jnp.float32)
    return denoiser.with_bias(jax.vmap(lambda ids, added: row.at[ids].add(added, mode="drop"))(*bias))


def _end(state: Any, rows: jax.Array) -> Any:
    return dataclasses.replace(state, canvas=dataclasses.replace(state.canvas, done=state.canvas.done | rows))


def _admit(sampler: Any, denoiser: DenoiserLike, state: Any, rows: SlotRows, admitted: jax.Array) -> Any:
    """The state after `init` of the admitted rows, each alone: nothing that the other rows hold, such as their
    key/value buffers, is read or moved."""
    begin_row = lambda rows: (rows.prompt_lengths, _with_room(_init(sampler, denoiser, rows), state))
    return each_row(admitted, denoiser.batch_parts, begin_row, rows, state)[1]


@functools.partial(jax.jit, donate_argnums=0)
def put_prompt(state: Any, row: jax.Array, kv: Any, whole: jax.Array) -> Any:
    """The state after the first blocks of a row's prompt were read, see `ExactState.after_reading`."""
    return dataclasses.replace(state, cache=state.cache.after_reading(row, kv, whole))


@functools.partial(jax.jit, static_argnums=(2, 3))
def move_rows(x: jax.Array, index: jax.Array, batch: int, shape: tuple[int, ...]) -> jax.Array:
    """Some rows of a leaf of the state, for slots of another size: [n B, ...] to `shape`, [n B', ...].

    Args:
        index: [B'] int32, which of the B = `batch` rows each is; n entries of the leaf belong to one.
        shape: where it is shorter than that of x positions at the end are cut off, where it is longer there are zeros.
    """
    rows = x.reshape(batch, -1, *x.shape[1:])[index].reshape(shape[0], *x.shape[1:])
    rows = rows[tuple(slice(length) for length in shape)]
    if rows.shape == shape:  # keys of random numbers cannot be padded
        return rows
    return jnp.pad(rows, [(0, length - own) for length, own in zip(shape, rows.shape, strict=True)])


def _with_room(new: Any, state: Any) -> Any:
    """New rows of any form, where some rows of the state have one, and with room for the most probable tokens."""
    form, top = getattr(state, "form", None), getattr(state, "top", None)
    if top is not None:
        zeros = jax.tree.map(lambda x: jnp.zeros((len(new.canvas.done), *x.shape[1:]), x.dtype), top)
        new = dataclasses.replace(new, top=zeros)
    if form is None or new.form is not None:
        return new
    zeros = jnp.zeros_like(new.canvas.prompt_lengths)
    ends = jnp.ones((len(zeros), *form.ends.shape[1:]), bool)
    return dataclasses.replace(new, form=dataclasses.replace(form, read=zeros, state=zeros + START, ends=ends))


# The parameters are kept as inputs so that the first state lies on their devices: else `run_steps` is compiled twice.
begin_jit = jax.jit(begin, static_argnums=3, keep_unused=True)
run_steps_jit = jax.jit(run_steps, donate_argnums=2)
run_steps_buffered = jax.jit(run_steps, donate_argnums=2, compiler_options=dict(COMMAND_BUFFERS))


@functools.cache
def run_steps_on(shardings: tuple[Any, ...], tree: Any, buffered: bool, everywhere: bool) -> Any:
    """The same for slots on a mesh: they keep their sharding, or the next call would compile again.

    Args:
        everywhere: give every device all of the progress, so that each of several processes can read it.
    """
    options = dict(COMMAND_BUFFERS) if buffered else None
    progress = NamedSharding(shardings[0].mesh, PartitionSpec()) if everywhere else None
    out = (jax.tree.unflatten(tree, shardings), progress)
    return jax.jit(run_steps, donate_argnums=2, out_shardings=out, compiler_options=options)
