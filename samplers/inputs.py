"""Checks of what a sampler is started with; all that can be known without running anything."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.errors import DllmError
from samplers.caches import DenoiserLike


class Inputs(NamedTuple):
    """A checked start: prompt [B, P], prompt_lengths [B], gen_lengths [B] and given [B, G] or None, all int32."""

    prompt: jax.Array
    prompt_lengths: jax.Array
    gen_lengths: jax.Array
    given: jax.Array | None


def checked(
    denoiser: DenoiserLike,
    prompt: jax.Array,
    prompt_lengths: jax.Array | None,
    gen_lengths: jax.Array | None,
    given: jax.Array | None,
    gen_length: int,
) -> Inputs:
    """The arguments of a sampler's `init`, with defaults filled in.

    Raises:
        DllmError: for wrong shapes or dtypes, and for lengths that cannot be (where they are concrete: inside jit only
            shapes and dtypes are known).
    """
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise DllmError(f"prompt is {prompt.dtype}{list(prompt.shape)}; it must be integer token ids [batch, length]")
    batch, width = prompt.shape
    low = denoiser.min_prompt_length
    if width < low:
        raise DllmError("this model cannot predict its very first position; give a prompt of at least one token")
    if given is not None and jnp.shape(given) != (batch, gen_length):
        wanted = f"{[batch, gen_length]}, the generation of every row"
        raise DllmError(f"given has shape {list(jnp.shape(given))}; it must be {wanted}")
    if given is not None and not jnp.issubdtype(jnp.asarray(given).dtype, jnp.integer):
        raise DllmError(
            f"given is {jnp.asarray(given).dtype}; it must be integer token ids, the mask id where one is missing"
        )
    return Inputs(
        prompt.astype(jnp.int32),
        _lengths("prompt", prompt_lengths, batch, low, width),
        _lengths("gen", gen_lengths, batch, 1, gen_length),
        None if given is None else jnp.asarray(given, jnp.int32),
    )


def _lengths(what: str, lengths: jax.Array | None, batch: int, low: int, high: int) -> jax.Array:
    if lengths is None:
        return jnp.full((batch,), high, jnp.int32)
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,):
        raise DllmError(f"{what}_lengths has shape {list(lengths.shape)}; it must be [{batch}], one per row")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise DllmError(f"{what}_lengths is {lengths.dtype}; it must hold integers")
    if not isinstance(lengths, jax.core.Tracer) and lengths.is_fully_addressable:
        for row, length in enumerate(np.asarray(lengths).tolist()):
            if not low <= length <= high:
                bounds = f"between {low} and {high}"
                raise DllmError(f"{what} length {length} of row {row} is impossible; it must be {bounds}")
    return lengths.astype(jnp.int32)
