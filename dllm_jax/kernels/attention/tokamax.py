"""Attention by tokamax's Mosaic kernels for NVIDIA GPUs: queries that each see a range of keys.

The range is `Mask(k_start=, k_end=)` of a private module, so versions are pinned (`dllm_jax.kernels.tokamax`). Forward
and backward kernels are called one by one: the operation's own gradient leaves out that of the sums which it returns,
and the merge with a block's own keys needs the backward kernel with the sums of both.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.kernels import tokamax as package
from dllm_jax.kernels.attention.xla import attend_own_blocks, block_starts, fill, merge

MULTIPLE = 128
"""What lengths are filled up to, because the kernels fail at others."""


def refusal(device: jax.Device | None, query: Any, *others: Any) -> str | None:
    """Why it cannot attend, None if it can; operands as of `attend` or their shapes."""
    if (reason := package.refusal(device)) is not None:
        return reason
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"its kernels are for bfloat16 and float16, and the model computes in {query.dtype}"
    return None if query.shape[3] in (64, 128, 256) else f"heads of {query.shape[3]} are not 64, 128 or 256"


def attend(
    device: jax.Device,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    since: jax.Array | None = None,
) -> jax.Array:
    """softmax(query key / sqrt(H)) value over the keys [since, visible) of each query: [B, T, N, H], with a gradient.

    A query that sees nothing gets one of the values, so that no result and no gradient is undefined.

    Args:
        query: [B, T, N, H] bfloat16 or float16.
        key, value: [B, S, K, H], K dividing N.
        visible, since: [B, T or 1] int32.
    """
    wide = lambda bound: jnp.broadcast_to(bound, query.shape[:2])
    end = jnp.clip(wide(visible), 1, key.shape[1])
    start = None if since is None else jnp.clip(wide(since), 0, end - 1)
    return _attend(device, query, key, value, start, end)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(device: jax.Device, *operands: Any) -> jax.Array:
    return _forward(device, *operands)[0]


def _forward(device: jax.Device, *operands: Any) -> tuple[jax.Array, tuple]:
    out, sums = _kernel(device, *operands)
    return out, (*operands, out, sums)


def _backward(device: jax.Device, saved: tuple, gradient: jax.Array) -> tuple:
    *operands, out, sums = saved
    return *_gradients(device, tuple(operands), out, sums, gradient), None, None


_attend.defvjp(_forward, _backward)


_fill = functools.partial(fill, multiple=MULTIPLE)


def _bind(query: jax.Array, key: jax.Array, value: jax.Array, start: Any, end: jax.Array) -> tuple[Any, Any]:
    """The operation, and its arguments with filled lengths and with defaults."""
    from tokamax._src.ops.attention import base
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    operation = PallasMosaicGpuFlashAttention()
    of_heads = lambda bound: None if bound is None else _fill(bound)[:, None]  # [B, 1, T]
    mask = base.Mask(k_start=of_heads(start), k_end=of_heads(end))
    return operation, operation.bind(*map(_fill, (query, key, value)), mask=mask, return_residuals=True)


def _kernel(
    device: jax.Device, query: jax.Array, key: jax.Array, value: jax.Array, start: Any, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """[B, T, N, H], and the logarithm of each query's sum of exponentials, [B, T, N] float32."""
    with package.tracing_for(device):
        operation, bound = _bind(query, key, value, start, jnp.maximum(end, 1))
        out, (most, total) = operation(*bound.args, **bound.kwargs)
    length = query.shape[1]
    return out[:, :length], jnp.swapaxes(most + jnp.log(total), 1, 2)[:, :length]


def _gradients(
    device: jax.Device, operands: tuple, out: jax.Array, sums: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of query, key and value. Where other keys count too, `out` and `sums` are those of all keys."""
    query, key, value, start, end = operands
    with package.tracing_for(device):
        operation, bound = _bind(query, key, value, start, end)
        options = {name: each for name, each in bound.kwargs.items() if name != "return_residuals"}
        most = jnp.swapaxes(_fill(sums), 1, 2)
        found = operation.vjp((most, jnp.ones_like(most)), _fill(out), _fill(gradient), *bound.args, **options)
    return found["q"][:, : query.shape[1]], found["k"][:, : key.shape[1]], found["v"][:, : key.shape[1]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_in_blocks(device: jax.Device, block_length: int, *operands: jax.Array) -> jax.Array:
    """`attention_in_blocks` by a kernel for what lies before each block, of which the rest is a small part.

    Args:
        operands: query, own keys and values, those before, visible [B, T or 1], and since if there is one.
    """
    return _forward_in_blocks(device, block_length, *operands)[0]


def _forward_in_blocks(
    device: jax.Device, block_length: int, *operands: jax.Array
) -> tuple[jax.Array, tuple[Any, ...]]:
    (query, key, value, *before, visible), since = operands[:6], operands[6:]
    end = jnp.minimum(block_starts(query, block_length), visible)
    start = jnp.minimum(since[0], end) if since else None
    some = None if start is None else jnp.minimum(start, jnp.maximum(end - 1, 0))
    part, sums = _kernel(device, query, before[0], before[1], some, end)
    none = (end <= (0 if start is None else start))[..., None]  # what the kernel gives of no key is not defined
    part, sums = jnp.where(none[..., None], 0, part), jnp.where(none, -1e30, sums)
    own, own_sums = attend_own_blocks(block_length, query, key, value, visible)
    out = merge(own, own_sums, part, sums)
    return out, (operands, start, end, part, sums, out, jnp.logaddexp(own_sums, sums))


def _backward_in_blocks(device: jax.Device, block_length: int, saved: tuple, gradient: jax.Array) -> tuple:
    operands, start, end, part, sums, out, total = saved
    query, key, value, *before, visible = operands[:6]

    def of_own(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        own, own_sums = attend_own_blocks(block_length, query, key, value, visible)
        return merge(own, own_sums, part, sums)

    by_own, *to_own = jax.vjp(of_own, query, key, value)[1](gradient)
    by_before, *to_before = _gradients(device, (query, *before, start, end), out, total, gradient)
    return by_own + by_before, *to_own, *to_before, *[None] * len(operands[5:])


attend_in_blocks.defvjp(_forward_in_blocks, _backward_in_blocks)
