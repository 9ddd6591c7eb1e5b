"""What a cache policy is: how one step's hidden states come about, and which keys and values are kept for the next."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.kv_cache import KVCache
from dllm_jax.pytree import pytree, vary_like


class DenoiserLike(Protocol):
    """What samplers need of a model: `dllm_jax.Denoiser`, or anything else with these methods that is a pytree."""

    @property
    def mask_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

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

    def logits(self, hidden: jax.Array) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Request:
    """What one step asks of the policy. All positions are absolute.

    Attributes:
        inputs: tokens [B, S] (or input embeddings [B, S, D]).
        lengths: [B], valid positions, prompt and canvas.
        longest_suffix: no row has more valid positions than this from its generation's start on.
        block: [B], number of the active block.
        block_start, block_end: [B], where it begins and ends.
        start, width: span whose hidden states are wanted: start [B]; covers the block.
        ragged: whether the last block is shorter than `width`; its span then begins before the block.
        active: [B] bool, rows that are not finished.
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


class Outcome(NamedTuple):
    """What a policy answers.

    Attributes:
        hidden: [B, width, D] for `DenoiserLike.logits`.
        state: the policy's new state.
        ran: [B] bool, rows that got their forward in this step; the others wait and must not commit.
        full: [B] bool, of those, the rows whose forward covered the whole sequence.
    """

    hidden: jax.Array
    state: Any
    ran: jax.Array
    full: jax.Array


class CachePolicy(Protocol):
    """A cache policy: a pytree (`dllm_jax.pytree`) with these two methods."""

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> Any:
        """State before the first forward, for sequences of `length` buffer positions."""
        ...

    def predict(self, denoiser: DenoiserLike, request: Request, state: Any) -> Outcome:
        """Runs one forward for every row that can have one."""
        ...


Forward = Callable[[KVCache], tuple[jax.Array, KVCache]]


@pytree()
class BlockCacheState:
    """Key/value buffers and, per row, the block they were built for (-1: none)."""

    kv: KVCache
    built_for: jax.Array


class BlockCache:
    """Base of the policies that rebuild all keys and values by one full forward when a row enters a block.

    The rebuilding forward also decodes. Rows that finish their block early wait for the others, so that one full
    forward serves them all; waiting costs a row neither forwards nor tokens.
    """

    def windows(self, denoiser: DenoiserLike, request: Request) -> tuple[Sequence[Forward], jax.Array | int]:
        """Forwards over part of the sequence, and the number of the one to run now."""
        raise NotImplementedError

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> BlockCacheState:
        return BlockCacheState(denoiser.empty_cache(batch, length), jnp.full((batch,), -1, jnp.int32))

    def predict(self, denoiser: DenoiserLike, request: Request, state: BlockCacheState) -> Outcome:
        stale = request.active & (state.built_for != request.block)
        rebuild = jnp.all(stale | ~request.active)

        def full(kv: KVCache) -> tuple[jax.Array, KVCache]:
            return denoiser.full(request.inputs, request.lengths, request.start, request.width)

        windows, choice = self.windows(denoiser, request)
        hidden, kv = switch_in_place(jnp.where(rebuild, 0, choice + 1), [full, *windows], state.kv)
        built_for = jnp.where(rebuild & request.active, request.block, state.built_for)
        ran = request.active & (rebuild | ~stale)
        return Outcome(hidden, BlockCacheState(kv, built_for), ran, ran & rebuild)


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
