"""Attention by cuDNN, through `jax.nn.dot_product_attention`, where every query of a row sees the same keys, or under a
causal mask. Of a causal mask with a sliding window cuDNN leaves undefined what padding gets, which may see no key.

It can return the logarithm of the sums too, but its gradient leaves those out, so it is no part of a merge.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.kernels import dispatch

MULTIPLE, MOST, MOST_BEFORE_HOPPER = 8, 256, 128
"""What head sizes are a multiple of, and the largest, from compute capability 9.0 on and before."""


def refusal(device: jax.Device | None, query: Any, key: Any, value: Any, visible: Any, since: Any = None) -> str | None:
    """Why it cannot attend, None if it can; operands as of `attend` or their shapes."""
    if (reason := causal_refusal(device, query)) is not None:
        return reason
    if since is not None or visible.shape[1] != 1:
        return "cuDNN takes one length per row, and here queries of a row see different keys"
    return None


def causal_refusal(device: jax.Device | None, query: Any, *others: Any) -> str | None:
    """Why it cannot attend causally, None if it can."""
    has, size = dispatch.capability(device), query.shape[3]
    if has is None or device not in dispatch.present("cuda"):
        return "cuDNN compiles on a machine with the NVIDIA GPU alone"
    if has < dispatch.AMPERE:
        return f"cuDNN's kernels are for compute capability 8.0 and later, and {device.device_kind} has {has}"  # type: ignore[union-attr]
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's kernels are for bfloat16 and float16, and the model computes in {query.dtype}"
    if size % MULTIPLE or size > (MOST if has >= 9.0 else MOST_BEFORE_HOPPER):
        return f"cuDNN has no kernel for heads of {size} on compute capability {has}"
    return None


def attend(
    device: jax.Device,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    causal: bool = False,
) -> jax.Array:
    """softmax(query key / sqrt(H)) value over the first `visible` keys of each row: [B, T, N, H], with a gradient.

    A row that sees nothing gets its first value, so that no result and no gradient is undefined.

    Args:
        query: [B, T, N, H] bfloat16 or float16.
        key, value: [B, S, K, H], K dividing N.
        visible: [B, 1] int32; where it is `causal` [B, T], the smaller of a query's number + 1 and its row's length.
        causal: a query sees no later key; T = S.
    """
    lengths = jnp.clip(visible[:, -1], 1, key.shape[1]).astype(jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        query_seq_lengths=0 * lengths + query.shape[1],  # of all positions: JAX's own is not mapped by `vmap`
        key_value_seq_lengths=lengths,
        is_causal=causal,
        implementation="cudnn",
    )
