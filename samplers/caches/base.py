"""What a cache policy is: how one step's hidden states come about, and which keys and values are kept for the next."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.denoiser import Tile
from dllm_jax.kv_cache import KVCache, write_rows
from dllm_jax.pytree import pytree, vary_like
from samplers.checks import check_whole


class DenoiserLike(Protocol):
    """What samplers need of a model: `dllm_jax.Denoiser`, or anything else with these methods that is a pytree."""

    @property
    def mask_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def vocab_parts(self) -> int: ...

    @property
    def min_prompt_length(self) -> int: ...

    def empty_cache(self, batch: int, length: int) -> KVCache: ...

    def full(
        self, inputs: jax.Array, lengths: jax.Array, start: jax.Array, width: int
    ) -> tuple[jax.Array, KVCache]: ...

    def window(
        self,
        inputs: jax.Array,
        lengths: jax.Array,
        cache: KVCache,
        feed: tuple[jax.Array, int],
        target: tuple[jax.Array, int] | None = None,
        fresh: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]: ...

    def final_hidden(self, hidden: jax.Array) -> jax.Array: ...

    def logits(self, hidden: jax.Array, tile: Tile | None = None) -> jax.Array: ...

    def embed(self, tokens: jax.Array) -> jax.Array: ...

    def expected_embedding(self, logits: jax.Array) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Request:
    """What one step asks of the policy. All positions are absolute.

    Attributes:
        inputs: tokens [B, S] (or input embeddings [B, S, D]).
        lengths: [B], valid positions, prompt and canvas.
        longest_suffix: no row has more valid positions than this from its first block's start on.
        block: [B], number of the active block.
        block_start, block_end: [B], where it begins and ends.
        start, width: span that covers the block: start [B].
        ragged: whether a block may be shorter than `width`; its span then holds other positions too.
        active: [B] bool, rows that are not finished.
        nfe: [B], forwards of the row so far.
        iteration: [B], dInfer's counter of the row's iterations: its forwards so far, where without smoothing one that
            rebuilt a cache counts together with the next.
        wide: whether the hidden states of everything that is run are wanted, not of the span alone.
    """

    inputs: jax.Array
    lengths: jax.Array
    longest_suffix: int
    block: jax.Array
    block_start: jax.Array
    block_end: jax.Array
    start: jax.Array
    width: int
    ragged: bool
    active: jax.Array
    nfe: jax.Array
    iteration: jax.Array
    wide: bool = False


class Outcome(NamedTuple):
    """What a policy answers.

    Attributes:
        hidden: for `DenoiserLike.logits`: [B, width, D] of the span; of all positions, [B, S, D], when the request is
            wide, and then meaningless outside [low, high).
        state: the policy's new state.
        ran: [B] bool, rows that got their forward in this step; the others wait and must not commit.
        full: [B] bool, of those, the rows whose forward covered the whole sequence.
        updated: [B] bool, of those, the rows whose keys and values were all stored for later forwards.
        low, high: [B], which positions were run, as far as they may be masked.
    """

    hidden: jax.Array
    state: Any
    ran: jax.Array
    full: jax.Array
    updated: jax.Array
    low: jax.Array
    high: jax.Array


class CachePolicy(Protocol):
    """A cache policy: a pytree (`dllm_jax.pytree`) with these two methods."""

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> Any:
        """State before the first forward, for sequences of `length` buffer positions."""
        ...

    def predict(self, denoiser: DenoiserLike, request: Request, state: Any) -> Outcome:
        """Runs one forward for every row that can have one."""
        ...


def full_forward(denoiser: DenoiserLike, request: Request) -> tuple[jax.Array, KVCache]:
    """A forward over everything: hidden states as `Outcome` wants them, and the keys and values of all positions."""
    if not request.wide:
        return denoiser.full(request.inputs, request.lengths, request.start, request.width)
    first, length = denoiser.min_prompt_length, request.inputs.shape[1]
    width = min(request.longest_suffix, length - first)
    start = jnp.minimum(request.block_start, length - width)  # what lies before the block holds no mask
    hidden, kv = denoiser.full(request.inputs, request.lengths, start, width)
    return spread(hidden, start, length), kv


def window_forward(
    denoiser: DenoiserLike,
    request: Request,
    kv: KVCache,
    feed: tuple[jax.Array, int],
    fresh: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """A forward over the positions of `feed`, as `DenoiserLike.window`: hidden states as `Outcome` wants them."""
    if request.wide:
        hidden, kv = denoiser.window(request.inputs, request.lengths, kv, feed, fresh=fresh)
        return spread(hidden, feed[0], request.inputs.shape[1]), kv
    # rows that are finished may lie outside the window: their hidden states are not looked at
    start = jnp.clip(request.start, feed[0], feed[0] + feed[1] - request.width)
    return denoiser.window(request.inputs, request.lengths, kv, feed, (start, request.width), fresh)


def spread(hidden: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """Hidden states [B, W, D] at their absolute positions start[b] ... of [B, length, D], zeros elsewhere."""
    batch, _, dim = hidden.shape
    return write_rows(vary_like(hidden, jnp.zeros((batch, length, dim), hidden.dtype)), hidden, start)


Forward = Callable[[KVCache], tuple[jax.Array, KVCache]]


class Windows(NamedTuple):
    """What a block cache can run instead of a full forward.

    Attributes:
        forwards: over parts of the sequence.
        choice: number of the one to run now.
        low, high: [B], the positions that each row runs then, as far as they may be masked.
    """

    forwards: Sequence[Forward]
    choice: jax.Array | int
    low: jax.Array
    high: jax.Array


@pytree()
class BlockCacheState:
    """Key/value buffers and what each row knows of its own part of them.

    Attributes:
        kv: the buffers.
        built_for: [B], the block the row's keys and values were built for; -1 for none.
        just_built: [B] bool, whether the row's last forward built them: a window follows before they can be stale.
    """

    kv: KVCache
    built_for: jax.Array
    just_built: jax.Array


@pytree()
class BlockCache:
    """Base of the policies that rebuild all keys and values by one full forward when a row enters a block.

    The rebuilding forward also decodes. Rows that finish their block early wait for the others, so that one full
    forward serves them all; waiting costs a row neither forwards nor tokens.

    Attributes:
        refresh_every: rebuild also in each iteration of a row whose number is a multiple of this (dInfer's
            `cache_update_freq`, arXiv 2510.08666); None does at block starts only.
    """

    refresh_every: int | jax.Array | None = None

    def check(self) -> None:
        """Raises DllmError for numbers that make no sense."""
        check_whole("refresh_every", self.refresh_every, 1)

    def windows(self, denoiser: DenoiserLike, request: Request) -> Windows:
        """The forwards over part of the sequence."""
        raise NotImplementedError

    def warming(self, request: Request) -> jax.Array:
        """[B] bool, rows that run everything anew without storing it."""
        return request.active & False

    def stale(self, request: Request, state: BlockCacheState) -> jax.Array:
        """[B] bool, rows whose keys and values must be rebuilt before their next window."""
        return (state.built_for != request.block) | self.due(request.iteration, state)

    def due(self, iteration: jax.Array, state: BlockCacheState) -> jax.Array:
        """[B] bool, rows for which `refresh_every` asks for it; a rebuild is always followed by a window."""
        if self.refresh_every is None:
            return iteration < 0
        return (iteration % jnp.asarray(self.refresh_every) == 0) & ~state.just_built

    def built(self, request: Request, state: BlockCacheState) -> jax.Array:
        """[B], what `built_for` becomes of rows whose keys and values are rebuilt."""
        return request.block

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> BlockCacheState:
        none = jnp.full((batch,), -1, jnp.int32)
        return BlockCacheState(denoiser.empty_cache(batch, length), none, none >= 0)

    def predict(self, denoiser: DenoiserLike, request: Request, state: BlockCacheState) -> Outcome:
        warming = request.active & self.warming(request)
        stale = request.active & ~warming & self.stale(request, state)
        everything = jnp.all(warming | stale | ~request.active)
        windows = self.windows(denoiser, request)
        forwards = [lambda kv: full_forward(denoiser, request), *windows.forwards]
        hidden, kv = switch_in_place(jnp.where(everything, 0, windows.choice + 1), forwards, state.kv)
        ran = request.active & (everything | ~(warming | stale))
        updated = everything & stale
        built_for = jnp.where(updated, self.built(request, state), state.built_for)
        just_built = jnp.where(ran, updated, state.just_built)
        return Outcome(
            hidden,
            BlockCacheState(kv, built_for, just_built),
            ran,
            ran & everything,
            updated,
            jnp.where(everything, request.block_start, windows.low),
            jnp.where(everything, request.lengths, windows.high),
        )


def switch_in_place(index: jax.Array, branches: Sequence[Forward], kv: KVCache) -> tuple[jax.Array, KVCache]:
    """`lax.switch` over forwards that update the buffers, without copying them.

    XLA copies buffers that pass through a conditional, but aliases those that a while loop carries: so each branch is
    a loop that runs once or not at all.
    """
    shape = jax.eval_shape(branches[0], kv)[0]
    hidden = vary_like(index, jnp.zeros(shape.shape, shape.dtype))
    for number, branch in enumerate(branches):
        carry = (index == number, hidden, kv)
        _, hidden, kv = lax.while_loop(lambda carry: carry[0], functools.partial(_once, branch), carry)
    return hidden, kv


def _once(branch: Forward, carry: tuple[jax.Array, jax.Array, KVCache]) -> tuple[jax.Array, jax.Array, KVCache]:
    pending, _, kv = carry
    return (pending & False, *branch(kv))
