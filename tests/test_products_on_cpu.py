"""What the backbone does otherwise on CPU: the same numbers, and other platforms' programs know nothing of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models.layers import Rope, rope_angles, rope_table
from dllm_jax.params.products import product


@pytest.mark.parametrize(
    ("shape", "outputs", "by_columns"),
    [
        ((2, 2, 128), 96, True),
        ((2, 4, 96), 128, True),
        ((2, 4, 96), 1024, False),
        ((2, 4, 128), 128, False),
        ((128,), 64, True),
        ((128,), 1024, True),
    ],
)
def test_products_by_columns(shape, outputs, by_columns):
    """Few rows, or more outputs than inputs unless these are a multiple of 4 KiB, go by columns."""
    x, kernel = (
        jax.random.normal(jax.random.key(seed), size) for seed, size in ((0, shape), (1, (shape[-1], outputs)))
    )
    np.testing.assert_allclose(product(x, kernel), jnp.tensordot(x, kernel, 1), rtol=1e-4, atol=1e-4)
    lowered = lambda platform: jax.jit(product).trace(x, kernel).lower(lowering_platforms=(platform,)).as_text()
    assert ("optimization_barrier" in lowered("cpu")) == by_columns
    assert "optimization_barrier" not in lowered("tpu") + lowered("cuda")
    assert "optimization_barrier" not in jax.jit(product).lower(*map(half, (x, kernel))).as_text()


def half(x):
    return x.astype(jnp.bfloat16)


def test_gradients_of_products_by_columns():
    x, kernel = jax.random.normal(jax.random.key(0), (2, 3, 8)), jax.random.normal(jax.random.key(1), (8, 12))
    gradients = lambda product: jax.grad(lambda *both: jnp.sum(product(*both) ** 2), argnums=(0, 1))(x, kernel)
    plain = gradients(lambda x, kernel: jnp.tensordot(x, kernel, 1))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4), gradients(product), plain)


def test_angles_that_are_looked_up():
    positions = jnp.array([[0, 5, 63], [7, 7, 8]], jnp.int32)
    angles = jax.jit(lambda positions: rope_table(positions, 64, Rope(16, 500.0)))
    close = lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, angles(positions), rope_angles(positions, Rope(16, 500.0)))
    direct = jax.jit(lambda positions: rope_angles(positions, Rope(16, 500.0)))
    lowered = lambda function: function.trace(positions).lower(lowering_platforms=("tpu",)).as_text().count("cosine")
    assert lowered(angles) == lowered(direct) == 1
