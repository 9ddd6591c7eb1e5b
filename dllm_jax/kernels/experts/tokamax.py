"""Grouped products by tokamax's Mosaic kernels for NVIDIA GPUs, which read the matrices of each group about once."""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.kernels import tokamax as package
from dllm_jax.params.quantized import QuantizedKernel

MULTIPLE = 128
"""What both sizes of a matrix are a multiple of: the width of the kernels' tiles."""


def refusal(device: jax.Device | None, x: Any, ids: Any, weights: Any, w_in: Any, w_out: Any) -> str | None:
    """Why it does not compute experts, None if it does; operands as of `apply_experts`, or a device's part of them."""
    if (reason := package.refusal(device)) is not None:
        return reason
    if x.dtype != jnp.bfloat16 or isinstance(w_in, QuantizedKernel):
        stored = f"weights in {w_in.bits}" if isinstance(w_in, QuantizedKernel) else f"{x.dtype}"
        return f"its kernels are used with plain weights and bfloat16 here, and this model has {stored}"
    if any(size % MULTIPLE for size in w_in.shape[2:]):
        return f"sizes of {w_in.shape[2]} and {w_in.shape[3]} on a device are no multiples of {MULTIPLE}"
    return None


def ragged_dot(device: jax.Device, rows: jax.Array, tables: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows sorted by group times their groups' matrices: [A, in], [G, in, out], [G] -> [A, out].

    Rows after all groups are not written.
    """
    import tokamax

    with package.tracing_for(device):
        out: jax.Array = tokamax.ragged_dot(
            rows, tables, sizes, precision=jax.lax.Precision.DEFAULT, implementation="mosaic"
        )
    return out
