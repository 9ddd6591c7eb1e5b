"""A kernel with a low-rank adapter (LoRA, arXiv 2106.09685), which stands where a plain kernel would."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.params.quantized import QuantizedKernel
from dllm_jax.pytree import pytree


@pytree(static=("scale", "dropout"))
class LowRankKernel:
    """x W + scale drop(x) A B, without ever adding A B to W.

    So training has no gradient of W's size, which a sum of both would need on the way to those of A and B, and dropout
    can have the adapter's inputs alone, as in the paper.

    Attributes:
        kernel: W, [in, out].
        a: A, [in, rank].
        b: B, [rank, out].
        key: typed key of the dropout's draws; None leaves nothing out.
        rows: [B] bool, the rows of x [B, ..., in] that the adapter acts on; None for all.
        scale: how much the adapter counts.
        dropout: share of the adapter's inputs that are left out, in [0, 1); the others are scaled up.
    """

    kernel: jax.Array | QuantizedKernel
    a: jax.Array
    b: jax.Array
    key: jax.Array | None
    scale: float
    dropout: float
    rows: jax.Array | None = None

    def adapter_output(self, x: jax.Array) -> jax.Array:
        """scale drop(x) A B, [..., in] -> [..., out] in the dtype of x."""
        if self.key is not None and self.dropout:
            keep = jax.random.bernoulli(self.key, 1.0 - self.dropout, x.shape)
            x = jnp.where(keep, x / (1.0 - self.dropout), 0.0).astype(x.dtype)
        y = self.scale * (x @ self.a.astype(x.dtype) @ self.b.astype(x.dtype))
        return y if self.rows is None else jnp.where(self.rows.reshape((-1,) + (1,) * (y.ndim - 1)), y, 0)


@pytree(static=("scale",))
class LowRank:
    """Adapters of a model, which can be on for some rows of a forward and off for others.

    Attributes:
        values: kernel's flat name -> (A [in, rank], B [rank, out]).
        scale: alpha / rank, how much they count.
    """

    values: Mapping[str, tuple[jax.Array, jax.Array]]
    scale: float

    def attach(self, params: Mapping[str, Any], rows: jax.Array | None = None) -> dict[str, Any]:
        """The parameters with every adapted kernel as a `LowRankKernel` that acts on these rows [B] bool."""
        adapted = {
            name: LowRankKernel(params[name], a, b, None, self.scale, 0.0, rows) for name, (a, b) in self.values.items()
        }
        return {**params, **adapted}
