"""What is done with kernels and tables, whether plain, with an adapter beside them, or quantized.

float16 has no number above 65504. What can exceed that in a Transformer is the stream that layers add to, the product
of gate and up projections, and a sum of quantized weights; the rest is normalised, or in float32 anyway (scores of
attention, logits). So in float16 those sums are float32 (`sums`), and what is multiplied again is scaled down to fit
(`product_of_sums`). In other dtypes this changes nothing.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.low_rank import LowRankKernel
from dllm_jax.quantized import QuantizedKernel

Table = jax.Array | QuantizedKernel
Kernel = Table | LowRankKernel

Activation = Literal["silu", "gelu"]

ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = types.MappingProxyType(
    {"silu": jax.nn.silu, "gelu": functools.partial(jax.nn.gelu, approximate=True)}
)
"""What a gate passes through; "gelu" is its approximation by a hyperbolic tangent."""

FLOAT16_ROOM = 2.0**15  # half of what float16 can hold


def product(x: jax.Array, kernel: Kernel, dtype: jnp.dtype | None = None) -> jax.Array:
    """x times a kernel, [..., in] x [in, ...] -> [..., ...], computed in the dtype of x.

    Args:
        dtype: of the result and its sums; that of x by default.
    """
    if isinstance(kernel, LowRankKernel):
        y = product(x, kernel.kernel, dtype)
        return y + kernel.added(x).astype(y.dtype)
    if isinstance(kernel, QuantizedKernel):
        return kernel.product(x, dtype)
    kernel = kernel.astype(x.dtype)
    plain = lambda x, kernel: jnp.tensordot(x, kernel, 1, preferred_element_type=dtype)
    if x.dtype != jnp.float32 or kernel.ndim != 2 or _suits_ynnpack(math.prod(x.shape[:-1]), *kernel.shape):
        return plain(x, kernel)
    return lax.platform_dependent(x, kernel, cpu=_product_by_eigen, default=plain)


def _suits_ynnpack(rows: int, inputs: int, outputs: int) -> bool:
    """Whether YNNPACK, XLA's own choice of a library for float32 products on CPU, is the faster one.

    It arranges the kernel anew in every product, which only many rows make up for; `docs/performance.md` has timings.
    """
    return outputs <= inputs < 16 * rows


def _product_by_eigen(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`product` in float32 by Eigen, which XLA asks for where the left side is given by columns. The barrier keeps XLA
    from seeing that it is not."""
    columns = lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
    y = lax.dot_general(columns, kernel, (((0,), (0,)), ((), ())))
    return y.reshape(*x.shape[:-1], kernel.shape[1])


def sums(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of sums whose terms have this one: float32 for float16, and otherwise the same."""
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def product_of_sums(x: jax.Array, kernel: Kernel, dtype: jnp.dtype) -> jax.Array:
    """x times a kernel, [..., in] x [in, out] -> [..., out], computed in `dtype`; x is in its `sums`, the result too.

    A position of x that does not fit is divided by what makes it fit, and its product multiplied.
    """
    if x.dtype == dtype:
        return product(x, kernel)
    factor = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / FLOAT16_ROOM, 1.0)
    return product((x / factor).astype(dtype), kernel, x.dtype) * factor


def of_outputs(change: Callable[[jax.Array], jax.Array], kernel: Kernel) -> Kernel:
    """A kernel after a change of all its arrays that have the axis of outputs."""
    if isinstance(kernel, LowRankKernel):
        return dataclasses.replace(kernel, kernel=jax.tree.map(change, kernel.kernel), b=change(kernel.b))
    return jax.tree.map(change, kernel)


def rows(table: Table, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """table[index] in `dtype`: [V, D] and [...] int32 -> [..., D]."""
    if isinstance(table, QuantizedKernel):
        return jax.tree.map(lambda x: x[index], table).dequantized(dtype)
    return table[index].astype(dtype)


def mixed_rows(weights: jax.Array, table: Table, dtype: jnp.dtype, result: jnp.dtype | None = None) -> jax.Array:
    """sum over v of weights_v table_v, computed in `dtype`: [..., V] float32 and [V, D] -> [..., D].

    Args:
        result: its dtype and that of the sums; `dtype` by default.
    """
    if not isinstance(table, QuantizedKernel):
        return jnp.tensordot(weights.astype(dtype), table, 1, preferred_element_type=result)
    largest = jnp.max(table.scale)  # relative to it the scales fit beside probabilities in float16
    shares = weights * (table.scale[:, 0] / largest)
    y = jnp.tensordot(shares.astype(dtype), table.values.astype(dtype), 1, preferred_element_type=jnp.float32)
    return (y * largest).astype(result or dtype)
