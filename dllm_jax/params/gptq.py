"""GPTQ (arXiv 2210.17323): kernels in four bits whose products stay close for the inputs that a model sees.

Rounding to nearest makes the error of each weight small. What counts is the error of x W over the inputs x, and there
the errors of weights whose inputs are correlated can cancel: when a weight is rounded, those that are not rounded yet
change so that the product changes least. The second moments of the inputs, the sum of x x^T, are all that this needs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.params.quantized import Form, QuantizedKernel, pack, round_to, shared_scale
from dllm_jax.pytree import pytree

DAMPING = 0.01  # of the mean of the moments' diagonal, added to it: the paper's, section 3.3
BLOCK = 128  # inputs that are rounded before the weights of all later inputs are changed, as there


@pytree(static=("report",))
class ObservedKernel:
    """A plain kernel whose products report the second moments of their inputs.

    Attributes:
        kernel: [in, out].
        number: scalar int32, the kernel's number in reports; negative for none, at no cost.
        counted: [B, T] bool, the positions that count.
        report: called on the host, with the number and the moments [in, in] float32 of each product.
    """

    kernel: jax.Array
    number: jax.Array
    counted: jax.Array
    report: Callable[[Any, Any], None]

    def observe(self, x: jax.Array) -> None:
        """Reports the inputs of a product, [B, T, in]."""

        def observe(x: jax.Array) -> None:
            x = jnp.where(self.counted[..., None], x, 0).astype(jnp.float32)
            jax.debug.callback(self.report, self.number, jnp.einsum("bti,btj->ij", x, x))

        jax.lax.cond(self.number >= 0, observe, lambda x: None, x)


def quantize_for_inputs(kernel: np.ndarray, moments: np.ndarray, form: Form) -> QuantizedKernel:
    """The kernel in int4, with `quantize_kernel`'s scales and other whole numbers, for which products are closer to the
    plain ones; where the moments are diagonal, no input helps another, and the numbers are the same.

    Algorithm 1 of the paper. Inputs with large moments are rounded first, when most other weights can still change
    (the official code's `--act-order`); scales are those of the plain weights (its `--static-groups`).

    Args:
        kernel: [in, out], floating and finite.
        moments: sum of x x^T over the inputs x, [in, in], finite.
        form: along axis 0.
    """
    order = np.argsort(-np.diag(moments), kind="stable")
    upper = _inverse_factor(moments[np.ix_(order, order)].astype(np.float64)).astype(np.float32)
    weights = kernel.astype(np.float32)
    scale = shared_scale(weights.reshape(form.groups, -1, weights.shape[1]), 1, form.bits)
    scales = np.repeat(scale[:, 0], len(weights) // form.groups, axis=0)[order]
    weights = weights[order]
    values, errors = np.empty(weights.shape, np.int8), np.empty_like(weights)
    for first in range(0, len(weights), BLOCK):
        end = min(first + BLOCK, len(weights))
        for row in range(first, end):
            values[row] = round_to(form.bits, weights[row] / scales[row])
            errors[row] = (weights[row] - values[row] * scales[row]) / upper[row, row]
            weights[row + 1 : end] -= np.outer(upper[row, row + 1 : end], errors[row])
        weights[end:] -= upper[first:end, end:].T @ errors[first:end]
    return pack(values[np.argsort(order)].reshape(form.groups, -1, weights.shape[1]), scale, form)


def _inverse_factor(moments: np.ndarray) -> np.ndarray:
    """U, the upper Cholesky factor of the inverse U^T U of the damped moments, 1 for an input that is always 0."""
    diagonal = np.diag(moments)
    damped = moments + np.diag(np.where(diagonal == 0, 1.0, DAMPING * diagonal.mean()))
    inverse = np.linalg.inv(damped)
    return np.linalg.cholesky((inverse + inverse.T) / 2).T
