"""Where random numbers come from: keys split per row and per step, or a recorded table.

A row's draws depend on its own key, its own count of forwards, the position and the token id: never on the batch it
runs in, nor on the order in which the vocabulary is read.
"""

import enum
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from dllm_jax.errors import DllmError
from dllm_jax.pytree import pytree, vary_like


class Purpose(enum.IntEnum):
    """What a draw is for; two purposes of one step never share numbers."""

    TOKENS = 0
    ORDER = 1
    SHARE = 2
    CANVAS = 3
    TARGET = 4


class Noise(Protocol):
    """A source of uniform draws for the positions of one step."""

    def uniform(
        self, purpose: Purpose, step: jax.Array, positions: jax.Array, ids: jax.Array | None = None
    ) -> jax.Array:
        """Draws in (0, 1) for `positions` [B, W] (relative to the generation's start) at each row's `step` [B]:
        [B, W] float32, or [B, W, n] for each of some ids [n] int32. A draw does not depend on which others are
        requested.
        """
        ...


@pytree()
class KeyNoise:
    """Draws from one typed `jax.random.key` per row, keys [B]: a hash of the row's key, its step, the purpose, the
    position and the id (Threefry-2x32; Salmon et al., SC 2011)."""

    keys: jax.Array

    def uniform(
        self, purpose: Purpose, step: jax.Array, positions: jax.Array, ids: jax.Array | None = None
    ) -> jax.Array:
        """As `Noise`."""

        def words(key: jax.Array, at: jax.Array) -> jax.Array:
            return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, at), int(purpose)), (2,), jnp.uint32)

        key = jax.vmap(words)(self.keys, step)
        place = positions.astype(jnp.uint32)
        if ids is None:
            return _hashed(key[:, None], place, jnp.uint32(_NO_ID))
        return _hashed(key[:, None, None], place[..., None], ids.astype(jnp.uint32))


_NO_ID = 2**32 - 1  # no token has it


def _hashed(key: jax.Array, place: jax.Array, of: jax.Array) -> jax.Array:
    """Uniforms strictly within (0, 1) from two words of key [..., 2] and two of counter, place [...] and of [...]; all
    uint32, and broadcast.

    The primitive itself, not `threefry_2x32`: that one takes both words of the counter in one array of twice the size.
    On CPU it is a loop that carries all four words: the counter's must have one shape, also when `jax.vmap` maps over
    positions alone, and the key's are better left small.
    """
    of = of | (place & 0)
    bits, _ = threefry2x32_p.bind(key[..., 0], key[..., 1], jnp.broadcast_to(place, of.shape), of)
    bits = vary_like(key, bits)  # which the primitive forgets
    return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # of 24 bits, so exact


def check_key(key: jax.Array | None, batch: int) -> None:
    """Raises DllmError for anything but None, a typed key, or a typed key per row."""
    if key is None:
        return
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise DllmError(f"key is no typed key, nor [{batch}] of them; make one by jax.random.key(seed)")
    if key.shape not in ((), (batch,)):
        raise DllmError(f"key has shape {list(key.shape)}; give one key, or [{batch}], one per row of the prompt")


def source_of(noise: Noise | None, key: jax.Array | None, batch: int) -> Noise | None:
    """What a generation draws from: `noise`, or else one key or one per row; None for neither.

    Raises:
        DllmError: for what is no key, and keys of another number of rows.
    """
    check_key(key, batch)
    return KeyNoise(row_keys(key, batch)) if noise is None and key is not None else noise


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """One key per row [batch]: a [batch] array of keys as it is, a single key folded with each row's number."""
    if key.ndim == 1:
        return key
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))


def token_of(uniform: jax.Array, vocab_size: int) -> jax.Array:
    """Tokens int32 from uniforms, each of the vocabulary as likely as any other."""
    return jnp.minimum((uniform * vocab_size).astype(jnp.int32), vocab_size - 1)


def gumbel(uniform: jax.Array) -> jax.Array:
    """Standard Gumbel noise -ln(-ln u) from uniforms."""
    tiny = jnp.finfo(jnp.float32).tiny
    return -jnp.log(jnp.maximum(-jnp.log(jnp.maximum(uniform, tiny)), tiny))
