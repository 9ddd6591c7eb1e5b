"""Attention in parts is attention, and no scores of all queries exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.attention import attention

B, N, K, H, S = 2, 4, 2, 8, 23


def operands(length):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, length, N, H), (B, S, K, H), (B, S, K, H)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def masks(length):
    visible = jnp.asarray([5, S])
    each = jnp.minimum(visible[:, None], 1 + jnp.arange(length)[None] // 4 * 4)
    return {
        name: (jnp.arange(S) < x[..., None])[:, None]
        for name, x in {"lengths": visible[:, None], "blocks": each}.items()
    }


@pytest.mark.parametrize("length", [8, 12, 19])  # whole parts, and one that is not
@pytest.mark.parametrize("kind", ["lengths", "blocks"])
def test_parts_change_nothing(length, kind) -> None:
    """Results and gradients."""
    mask = masks(length)[kind]
    of = lambda queries: jax.jit(lambda *x: attention(*x, mask, queries))
    (in_parts, whole), args = (of(4), of(length)), operands(length)
    np.testing.assert_allclose(in_parts(*args), whole(*args), atol=1e-6)
    gradient = lambda f: jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), argnums=(0, 1, 2)))(*args)
    for one, other in zip(gradient(in_parts), gradient(whole), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_no_scores_of_all_queries() -> None:
    """Neither forward nor backward."""
    length, mask, args = 64, masks(64)["blocks"], operands(64)
    for queries, wanted in ((8, False), (64, True)):
        loss = lambda *x, queries=queries: jnp.sum(attention(*x, mask, queries))
        text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*args))
        scores = [f"f32[{B},{N},{length},{S}]", f"f32[{B},{K},{N // K},{length},{S}]", f"f32[{B},{length},{N},{S}]"]
        assert any(shape in text for shape in scores) == wanted
