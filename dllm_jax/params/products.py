"""What is done with kernels and tables, whether plain, with an adapter, or quantized.

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
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from dllm_jax.params.gptq import ObservedKernel
from dllm_jax.params.low_rank import LowRankKernel
from dllm_jax.params.quantized import QuantizedKernel

Table = jax.Array | QuantizedKernel
Kernel = Table | LowRankKernel | ObservedKernel

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
        return y + kernel.adapter_output(x).astype(y.dtype)
    if isinstance(kernel, QuantizedKernel):
        return kernel.product(x, dtype)
    if isinstance(kernel, ObservedKernel):
        kernel.observe(x)
        kernel = kernel.kernel
    kernel = kernel.astype(x.dtype)
    if x.dtype == jnp.bfloat16 and dtype == jnp.float32:
        return _product_to_float32(x, kernel)
    if x.dtype != jnp.float32 or kernel.ndim != 2 or _suits_ynnpack(math.prod(x.shape[:-1]), *kernel.shape):
        return jnp.tensordot(x, kernel, 1, preferred_element_type=dtype)
    return _product_by_columns(x, kernel, dtype)


@jax.custom_jvp
def _product_to_float32(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A product of bfloat16 arrays in float32, whose gradients are products of bfloat16 arrays too: autodiff would
    multiply the float32 cotangent, at half the rate of a GPU or less."""
    return jnp.tensordot(x, kernel, 1, preferred_element_type=jnp.float32)


def _product_to_float32_jvp(primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    y = _product_to_float32(x, kernel)
    change = jnp.zeros_like(y)
    if not isinstance(dx, SymbolicZero):
        change += jnp.tensordot(dx, kernel, 1)
    if not isinstance(dkernel, SymbolicZero):
        change += jnp.tensordot(x, dkernel, 1)
    return y, change


_product_to_float32.defjvp(_product_to_float32_jvp, symbolic_zeros=True)


@jax.custom_jvp
def redirect_gradient(wide: jax.Array, value: jax.Array) -> jax.Array:
    """`value`, whose gradient goes to `wide`, the same numbers as float32.

    For what a loop reads in every turn: autodiff adds up the turns' gradients in the array's own dtype, and in bfloat16
    the sum stops growing. `wide` is read by nothing, so that no program holds it.
    """
    return value


@redirect_gradient.defjvp
def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    return primals[1], tangents[0].astype(primals[1].dtype)


def _suits_ynnpack(rows: int, inputs: int, outputs: int) -> bool:
    """Whether YNNPACK, XLA's own choice of a library for float32 products on CPU, is the faster one.

    It arranges the kernel anew in every product, which only many rows make up for. Eigen reads the kernel by columns of
    a few outputs; where a row is a multiple of 4 KiB, all of them compete for the same lines of the cache.
    `docs/results.md` has timings.
    """
    return inputs < 32 * rows and (outputs <= inputs or outputs % 1024 == 0)


def _product_by_columns(x: jax.Array, kernel: jax.Array, dtype: jnp.dtype | None) -> jax.Array:
    """`product` in float32, on CPU by Eigen, which XLA asks for where the left side is given by columns. The barrier
    keeps XLA from seeing that it is not.

    The product itself does not depend on the platform. The gradient of one that did would be a conditional with
    collectives in it, and XLA's CPU backend runs the collectives of two conditionals in any order, in each process
    another.
    """
    columns = x.reshape(-1, x.shape[-1]).T
    columns = lax.platform_dependent(columns, cpu=lax.optimization_barrier, default=lambda columns: columns)
    y = lax.dot_general(columns, kernel, (((0,), (0,)), ((), ())), preferred_element_type=dtype)
    return y.reshape(*x.shape[:-1], kernel.shape[1])


def in_float32(operation: Callable[..., jax.Array], x: jax.Array, parameter: jax.Array) -> jax.Array:
    """`operation(x, parameter)` in float32, in the dtype of x: [..., D] and [D] -> [..., D].

    For two bfloat16 numbers that is their bfloat16 product or sum. The gradient of the parameter, a sum over all
    positions, is a sum of float32 numbers, which one of bfloat16 numbers misses by a fifth at 32,768 positions.
    """
    return operation(x.astype(jnp.float32), parameter.astype(jnp.float32)).astype(x.dtype)


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
        return jax.tree.map(lambda x: x[index], table).dequantize(dtype)
    return table[index].astype(dtype)


def mixed_rows(weights: jax.Array, table: Table, dtype: jnp.dtype, result: jnp.dtype | None = None) -> jax.Array:
    """sum over v of weights_v table_v, computed in `dtype`: [..., V] float32 and [V, D] -> [..., D].

    Args:
        result: its dtype and that of the sums; `dtype` by default.
    """
    if not isinstance(table, QuantizedKernel):
        return jnp.tensordot(weights.astype(dtype), table.astype(dtype), 1, preferred_element_type=result)
    largest = jnp.max(table.scale)  # relative to it the scales fit with probabilities in float16
    shares = weights * (table.scale[:, 0] / largest)
    y = jnp.tensordot(shares.astype(dtype), table.values.astype(dtype), 1, preferred_element_type=jnp.float32)
    return (y * largest).astype(result or dtype)
