"""Kernels in 8 and 4 bits, which stand where plain ones would (weight-only quantization).

A weight is a small whole number times a float32 scale, which is the largest magnitude of the weights that share it over
127 or 7.5, so that none is off by more than half of it: four bits hold -8 to 7. In int8 all inputs of an output share a
scale (per channel), in int4 up to 128 neighbouring inputs do (per group). Products are computed in the dtype of the
activations.

Four bits lie two to a byte, in memory as on disk: the same place of two neighbouring groups, so that shifts and a stack
undo it. `jnp.int4` is not used: committed arrays of it are refused by programs that were compiled ahead of time (jax
0.10, on CPU), and Orbax gives each number a byte.
"""

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.config import Quantize
from dllm_jax.pytree import pytree

LARGEST: Mapping[Quantize, float] = {"int8": 127, "int4": 7.5}  # of a group's weights, in its scale
BLOCK_ELEMENTS = 2**22  # of float32, quantized at a time on the host


class Form(NamedTuple):
    """How an array is quantized.

    Attributes:
        bits: "int8" or "int4".
        axis: the axis that products sum over; scales are shared along it.
        groups: into how many runs of neighbours it is split, each with a scale of its own: 1 for int8, even for int4.
    """

    bits: Quantize
    axis: int
    groups: int


@pytree(static=("bits",))
class QuantizedKernel:
    """The array values * scale, as whole numbers and scales. Of a `jax.ShapeDtypeStruct` or a sharding each as well.

    Attributes:
        values: int8, of the array's shape; for int4 half as long along `axis`, the first of two groups in the low bits.
        scale: float32, of the array's shape but for `axis`, where it has one entry for each group.
        bits: "int8" or "int4".
    """

    values: Any
    scale: Any
    bits: Quantize

    @property
    def axis(self) -> int:
        """The axis that scales are shared along, derived from the shapes: `vmap` counts axes anew."""
        pairs = enumerate(zip(self.values.shape, self.scale.shape, strict=True))
        return next((axis for axis, (size, scales) in pairs if size != scales), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        doubled = self.axis if self.bits == "int4" else None
        return tuple(2 * size if axis == doubled else size for axis, size in enumerate(self.values.shape))

    def in_groups(self, dtype: jnp.dtype) -> jax.Array:
        """The array in `dtype`; of int4 with three axes for `axis`, [..., groups / 2, 2, group, ...]."""
        if self.bits == "int8":
            return self.values.astype(dtype) * self.scale.astype(dtype)
        axis, pairs = self.axis, self.scale.shape[self.axis] // 2
        before, after = self.values.shape[:axis], self.values.shape[axis + 1 :]
        both = self.values.reshape(*before, pairs, -1, *after)
        values = jnp.stack([(both << 4) >> 4, both >> 4], axis + 1)  # shifts to the right keep the sign
        return values.astype(dtype) * self.scale.reshape(*before, pairs, 2, 1, *after).astype(dtype)

    def dequantize(self, dtype: jnp.dtype) -> jax.Array:
        """The array, [shape] in `dtype`."""
        return self.in_groups(dtype).reshape(self.shape)

    def product(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """x times the array, [..., in] x [in, ...] -> [..., ...], in `dtype`, by default that of x.

        The scale of all inputs comes after the sum, which is float32: its terms are up to 127 times too large for
        float16 until then. Scales of groups multiply the weights on their way into the product, which TPU's compiler
        fuses as long as the groups keep axes of their own; sums by group would be as many times the result's size.
        """
        if self.bits == "int4":
            weights = self.in_groups(x.dtype)
            x = x.reshape(*x.shape[:-1], *weights.shape[:3])
            return jnp.tensordot(x, weights, 3, preferred_element_type=dtype)
        y = jnp.tensordot(x, self.values.astype(x.dtype), 1, preferred_element_type=jnp.dtype(jnp.float32))
        return (y * self.scale[0]).astype(dtype or x.dtype)


def quantize_kernel(array: Any, form: Form) -> QuantizedKernel:
    """A floating array as a `QuantizedKernel`, of numpy or of JAX as the array is; halves are rounded to even.

    A group of zeros (or of less than a scale can tell from it) has scale 1.
    """
    xp, axis = array.__array_namespace__(), form.axis
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    wide = array.astype(xp.float32).reshape(*before, form.groups, -1, *after)
    scale = shared_scale(wide, axis + 1, form.bits)
    return pack(round_to(form.bits, wide / scale), scale, form)


def shared_scale(weights: Any, axis: int, bits: Quantize) -> Any:
    """The scale of the float32 weights that lie along an axis, which is kept with size 1."""
    xp = weights.__array_namespace__()
    scale = xp.max(xp.abs(weights), axis=axis, keepdims=True) * np.float32(1 / LARGEST[bits])  # as compilers divide
    return xp.where(scale < np.finfo(np.float32).tiny, xp.float32(1.0), scale)


def round_to(bits: Quantize, multiples: Any) -> Any:
    """The nearest whole numbers in int8, -127 to 127 or -8 to 7, of multiples of a scale."""
    xp, most = multiples.__array_namespace__(), LARGEST[bits]
    return xp.clip(xp.rint(multiples), -math.ceil(most), math.floor(most)).astype(xp.int8)


def pack(values: Any, scale: Any, form: Form) -> QuantizedKernel:
    """Whole numbers in groups [..., groups, group, ...] int8 and their scales [..., groups, 1, ...] as a kernel."""
    xp, axis = values.__array_namespace__(), form.axis
    before, after = values.shape[:axis], values.shape[axis + 2 :]
    if form.bits == "int4":
        both = xp.moveaxis(values.reshape(*before, form.groups // 2, 2, -1, *after), axis + 1, 0)
        values = (both[0] & 15) | (both[1] << 4)
    return QuantizedKernel(values.reshape(*before, -1, *after), xp.squeeze(scale, axis + 1), form.bits)


def quantize_on_host(array: np.ndarray, form: Form) -> QuantizedKernel:
    """`quantized` of a host array, a block at a time: there is no float32 copy of the whole."""

    def part_of(part: np.ndarray) -> QuantizedKernel:
        with np.errstate(invalid="ignore"):  # NaN shows in the scale
            return quantize_kernel(part, form)

    across = 0 if form.axis else 1  # along which nothing is shared
    step = max(1, BLOCK_ELEMENTS * array.shape[across] // array.size)
    parts = np.split(array, range(step, array.shape[across], step), axis=across)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # numpy lets go of the GIL while it computes
        done = list(pool.map(part_of, parts))
    return jax.tree.map(lambda *parts: np.concatenate(parts, across), *done)


def dtype_label(params: Mapping[str, Any]) -> str:
    """What a model's parameters are stored as, for people: "bfloat16", or "int8 in bfloat16" of a quantized model."""
    found = [param for param in params.values() if isinstance(param, QuantizedKernel)]
    plain = next(param.dtype.name for param in params.values() if not isinstance(param, QuantizedKernel))
    return f"{min(param.bits for param in found)} in {plain}" if found else plain


def num_bytes(tree: Any) -> int:
    """Bytes of a pytree of arrays or their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
