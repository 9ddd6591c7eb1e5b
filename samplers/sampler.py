"""The protocol of all samplers (`init`, `step`, `is_done`, `result`) and the one loop over it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.pytree import pytree
from samplers.command_buffers import COMMAND_BUFFERS, asked_for_command_buffers
from samplers.inputs import check_is_pytree, checked_call

State = TypeVar("State")


@pytree()
class Result:
    """What every sampler returns. G is the length of the generation.

    Attributes:
        tokens: [B, G] int32. Positions that a stop condition left unwritten hold the end-of-sequence id.
        lengths: [B] int32, tokens before the first end-of-sequence or stop pattern.
        decoded_at: [B, G] int32, the row's forward (from 0) that committed the position; -1 where none did: given
            tokens, and positions a stop condition left unwritten.
        logprobs: [B, G] float32, the token's log-probability in nats by the model's own distribution in that forward:
            of its logits (the guided ones with guidance) at temperature 1, nothing cut off, suppressed or deferred.
            NaN where no forward chose the token: as `decoded_at`, and what `fill_after_eos` filled.
        nfe: [B] int32, forwards of the denoiser this row needed; a guided forward counts once.
        full_forwards: [B] int32, those among them that covered the whole sequence.
        cache_updates: [B] int32, those among them whose keys and values were all stored for later ones.
        edits: [B] int32, how often a token that was written was replaced by another.
        broken_at: [B] int32, the row's first forward whose logits were not finite where it decided; -1 for none. Its
            tokens from there on mean nothing.
    """

    tokens: jax.Array
    lengths: jax.Array
    decoded_at: jax.Array
    logprobs: jax.Array
    nfe: jax.Array
    full_forwards: jax.Array
    cache_updates: jax.Array
    edits: jax.Array
    broken_at: jax.Array


def describe_broken(broken_at: Sequence[int] | jax.Array, numbers: Sequence[int]) -> str | None:
    """One sentence about rows whose logits were not finite; None if all were.

    Args:
        broken_at: of each row, as in `Result`; on the host.
        numbers: each row's name.
    """
    found = [(number, int(at)) for number, at in zip(numbers, broken_at, strict=True) if at >= 0]
    if not found:
        return None
    (number, at), others = found[0], f" (and those of {len(found) - 1} others)" if len(found) > 1 else ""
    advice = "what was written from there on means nothing; load the model in float32, or check its weights"
    return f"the logits of row {number}{others} were not finite in forward {at}: {advice}"


class Sampler(Protocol[State]):
    """A sampler: a pytree whose numbers are traced leaves, with four pure functions."""

    @property
    def init(self) -> Callable[..., State]:
        """(denoiser, prompt [B, P], prompt_lengths [B] or None, *, key, ...) -> the state before the first step."""
        ...

    def step(self, denoiser: DenoiserLike, state: State) -> State: ...

    def is_done(self, state: State) -> jax.Array: ...

    def result(self, denoiser: DenoiserLike, state: State) -> Result: ...


def sample(
    sampler: Sampler[State],
    denoiser: DenoiserLike,
    prompt: jax.Array,
    prompt_lengths: jax.Array | None = None,
    *,
    key: jax.Array | None = None,
    **options: Any,
) -> Result:
    """A whole generation as one `lax.while_loop`, for use inside your own `jit`, `vmap`, `scan` or `shard_map`.

    Args:
        sampler: what to do, e.g. a `BlockSampler`.
        denoiser: the model.
        prompt: [B, P] int32, left-aligned; tokens after a row's prompt length are ignored.
        prompt_lengths: [B] int32; None means that all rows are P long.
        key: one typed key, or one per row [B]; needed by whatever draws random numbers.
        options: further arguments of the sampler's `init`.

    Raises:
        DllmError: for arguments of wrong types and shapes, and, where they are concrete, for impossible lengths, tokens
            outside the vocabulary, and rows that are longer than the model's context; before anything is traced.
    """
    prompt = checked_call(sampler, denoiser, prompt, prompt_lengths, key, options)

    def run(sampler: Sampler[State], denoiser: DenoiserLike, prompt: jax.Array, lengths: Any, options: Any) -> Result:
        state = sampler.init(denoiser, prompt, lengths, **options)
        state = lax.while_loop(lambda s: ~jnp.all(sampler.is_done(s)), lambda s: sampler.step(denoiser, s), state)
        return sampler.result(denoiser, state)

    return _without_explicit_axes(run, prompt)(sampler, denoiser, prompt, prompt_lengths, {"key": key, **options})


def _without_explicit_axes(run: Callable[..., Result], prompt: jax.Array) -> Callable[..., Result]:
    """In a mesh with Explicit axes every operation must name its sharding; ours leave that to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.explicit_axes:
        return run
    batch = jax.typeof(prompt).sharding.spec[:1]
    return jax.sharding.auto_axes(run, out_sharding=PartitionSpec(*batch))


_sample_jit = jax.jit(sample)
_sample_buffered = jax.jit(sample, compiler_options=dict(COMMAND_BUFFERS))


def sample_jit(
    sampler: Sampler[Any],
    denoiser: DenoiserLike,
    prompt: jax.Array,
    prompt_lengths: jax.Array | None = None,
    *,
    key: jax.Array | None = None,
    **options: Any,
) -> Result:
    """`sample`, compiled once per combination of shapes and static choices; arguments and errors are those of `sample`.

    Tokens and lengths are checked on the host: less than 0.1 ms a call on a CPU, and a wait for a
    prompt that another program still computes; `jax.jit(sample)` leaves that out. It has the methods of compiled
    functions, such as `sample_jit.lower`.
    """
    check_is_pytree(denoiser)
    prompt = checked_call(sampler, denoiser, prompt, prompt_lengths, key, options)
    run = _sample_buffered if asked_for_command_buffers() else _sample_jit
    result: Result = run(sampler, denoiser, prompt, prompt_lengths, key=key, **options)
    return result


for _name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
    setattr(sample_jit, _name, getattr(_sample_jit, _name))

# The parameters are kept as inputs so that the first state lies on their devices: else step is compiled twice.
_init_jit = jax.jit(lambda sampler, *args, **options: sampler.init(*args, **options), keep_unused=True)
_step_jit = jax.jit(lambda sampler, denoiser, state: sampler.step(denoiser, state), donate_argnums=2)


def stream(
    sampler: Sampler[State],
    denoiser: DenoiserLike,
    prompt: jax.Array,
    prompt_lengths: jax.Array | None = None,
    *,
    key: jax.Array | None = None,
    **options: Any,
) -> Iterator[State]:
    """The same generation from a Python loop: yields the state before the first step and after each one.

    For live views and custom loops; each step is a compiled call of its own, so `sample` is faster. A step works in
    place: it consumes the state that was yielded before it; copy what you want to keep.

    Raises:
        DllmError: as `sample`, for the first state.
    """
    check_is_pytree(denoiser)
    prompt = checked_call(sampler, denoiser, prompt, prompt_lengths, key, options)
    arguments = (sampler, denoiser, prompt, prompt_lengths, {"key": key, **options})
    theirs = {id(leaf) for leaf in jax.tree.leaves(arguments)}
    state = _init_jit(*arguments[:-1], **arguments[-1])
    # An array that init passes through is the caller's own; no step may consume it.
    state = jax.tree.map(lambda leaf: leaf.copy() if id(leaf) in theirs else leaf, state)
    yield state
    while not bool(jnp.all(sampler.is_done(state))):
        state = _step_jit(sampler, denoiser, state)
        yield state
