"""How far an implementation is from the reference, on the device that it is for: before a kernel's first use, in
`python -m dllm_jax.doctor` and in the tests."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MOST = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest difference that counts as right, over the largest entry of the result: some roundings of each dtype. Products
of float32 are asked for with full precision."""


class Check(NamedTuple):
    """A comparison with the reference.

    Attributes:
        what: the operands' name, and "forward" or the gradient of one.
        error: largest difference over the largest entry; NaN for a result that is not finite.
        most: that which counts as right.
    """

    what: str
    error: float
    most: float

    @property
    def ok(self) -> bool:
        """Whether it is right."""
        return self.error <= self.most  # which NaN is not

    @property
    def sentence(self) -> str:
        """For people."""
        return f"{self.what} is off by {self.error:.1e} of its largest entry, and {self.most:.0e} is allowed"


def compare(
    run: Callable[..., jax.Array],
    reference: Callable[..., jax.Array],
    operands: Sequence[Any],
    device: jax.Device,
    dtype: str,
    names: Sequence[str],
    example: str,
) -> list[Check]:
    """The result and the gradients of `run` in a dtype against those of `reference` in float32, of the same numbers.

    Args:
        operands: NumPy arrays; those in float32 have gradients.
        names: of all of them.
        device: where both run.
        dtype: "float32" or "bfloat16".
        example: the operands' name.
    """
    floats = [i for i, x in enumerate(operands) if x.dtype == np.float32]
    narrow = [jax.device_put(jnp.asarray(x, dtype if i in floats else None), device) for i, x in enumerate(operands)]
    exact = [x.astype(jnp.float32) if i in floats else x for i, x in enumerate(narrow)]
    results = []
    with jax.default_matmul_precision("highest"):
        for function, arguments in ((run, narrow), (reference, exact)):
            gradients = jax.grad(functools.partial(_loss, function), floats)
            # The result for itself: beside a gradient a rule of its own computes it, which may be other code.
            both = jax.jit(lambda *x, run=function, gradients=gradients: (run(*x), *gradients(*x)))
            results.append(both(*arguments))
    named = zip(("forward", *(f"gradient of {names[i]}" for i in floats)), *results, strict=True)
    return [Check(f"{example}, {what}", _error(found, wanted), MOST[dtype]) for what, found, wanted in named]


def describe(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def _loss(function: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(function(*operands).astype(jnp.float32)))


def _error(found: jax.Array, wanted: jax.Array) -> float:
    one, other = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(one - other).max() / np.abs(other).max())
