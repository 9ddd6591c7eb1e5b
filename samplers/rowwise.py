"""Forwards for some rows of a batch, or for none, without copies of the key/value buffers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.models.kv_cache import put_rows, take_rows
from dllm_jax.pytree import vary_like

Forward = Callable[[Any, Any], tuple[Any, Any]]


def run_if(wanted: jax.Array, forward: Forward, hidden: Any, kv: Any) -> tuple[Any, Any]:
    """`lax.cond` over a forward that updates the buffers, without copying them.

    XLA copies buffers that pass through a conditional, but aliases those that a while loop carries: so this is a loop
    that runs once or not at all.

    Args:
        wanted: scalar bool.
        forward: (hidden, buffers) -> both.
    """
    once = lambda carry: (carry[0] & False, *forward(*carry[1:]))
    return lax.while_loop(lambda carry: carry[0], once, (wanted, hidden, kv))[1:]


def each_row(
    rows: jax.Array,
    parts: int,
    forward: Callable[..., tuple[Any, Any]],
    request: Any,
    kv: Any,
    *,
    reads: bool = False,
) -> tuple[jax.Array, Any]:
    """Runs a forward for some rows alone, one after another, and puts the results into place.

    If the batch lies on several devices, one row of each part runs at a time.

    Args:
        rows: [B] bool.
        parts: equal parts of the batch that lie on different devices.
        forward: a request with as many rows as there are parts -> its hidden states, and keys and values from the
            first position on; if it `reads`, of a request and those rows' buffers.
        request: a pytree whose leaves begin with the batch axis.
        kv: the buffers; n consecutive entries of a leaf belong to a row.

    Returns:
        Hidden states of all rows, zeros where none were computed, and the buffers.
    """
    batch = rows.shape[0]
    run = forward if reads else lambda request, _: forward(request)
    shape = jax.eval_shape(lambda: run(request, kv)[0])
    hidden = vary_like(rows, jnp.zeros(shape.shape, shape.dtype))
    parts = parts if batch % parts == 0 else 1
    if batch == 1:
        into = lambda old, new: lax.dynamic_update_slice(old, new.astype(old.dtype), (0,) * old.ndim)

        def alone(_: Any, kv: Any) -> tuple[Any, Any]:
            hidden, new = run(request, kv)
            return hidden, jax.tree.map(into, kv, new)

        return run_if(rows[0], alone, hidden, kv)

    def next_row(carry: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, Any, Any]:
        pending, hidden, kv = carry
        index = jnp.argmax(pending, axis=1)
        write = None if parts == 1 else pending.any(axis=1)
        take = lambda x: take_rows(x, index)
        entries = lambda x: take(x.reshape(batch, -1, *x.shape[1:])).reshape(-1, *x.shape[1:])
        found, new = run(jax.tree.map(take, request), jax.tree.map(entries, kv) if reads else None)
        put = lambda old, new: put_rows(old, new, index, write)
        pending &= jnp.arange(batch // parts) != index[:, None]
        return pending, put(hidden, found), jax.tree.map(put, kv, new)

    return lax.while_loop(lambda carry: carry[0].any(), next_row, (rows.reshape(parts, -1), hidden, kv))[1:]
