"""Attention in which a query sees the first keys, or the last of those, with softmax in float32.

| implementation | runs | takes | in "auto" |
|---|---|---|---|
| `xla` | everywhere | everything | where nothing else fits |
| `cudnn` | NVIDIA GPUs from compute capability 8.0 on | one length per row, causal masks, bfloat16 and float16 | yes |
| `tokamax` | compute capability 9.x and 10.x, where it is installed | bfloat16 and float16 | yes |
| `tpu` | TPUs from v5e on | float32 and bfloat16 | no: only the compiler has seen it |

Shape letters: B batch, T queries, S keys, N heads, K heads of keys and values, H head size.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import lax

from dllm_jax.kernels.attention import cudnn, reference, tokamax, tpu
from dllm_jax.kernels.attention.xla import blocks_in_parts, fill, in_parts
from dllm_jax.kernels.dispatch import Kernel, Name, Operation, asked_for, choose
from dllm_jax.models.kv_cache import LayerKV
from dllm_jax.parallel.layout import LayoutLike, LogicalAxes

FUSED_FROM = 256
"""Queries from which "auto" takes kernels: of fewer, such as a block's, scores are less than the keys and values."""

QUERY, KEYS, ROWS = ("batch", None, "heads", None), ("batch", None, "kv_heads", None), ("batch", None)
"""Logical axes of queries, of keys and values, and of what is visible."""

COST = "which hold the scores of 512 queries at a time in memory (256 MiB for 32 heads and 4096 keys)"


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    layout: LayoutLike | None = None,
    since: jax.Array | None = None,
    implementation: Name | None = None,
    causal: bool = False,
) -> jax.Array:
    """softmax(query key / sqrt(H)) value, over the first `visible` keys of each query: [B, T, N, H].

    Args:
        query: [B, T, N, H].
        key, value: [B, S, K, H], K dividing N.
        visible: [B, T or 1] int32; what a query with 0 gets is some number.
        layout: how the heads lie on a mesh; None for one device, and where the caller places everything, which is done
            without kernels where there are several.
        since: [B, T or 1] int32, of the visible keys only those from here on are seen (a sliding window, or several
            documents in a row); None for all.
        implementation: as of `use_kernels`, which decides by default.
        causal: without `since` and with T = S: `visible` is the smaller of a query's number + 1 and its row's length.

    Raises:
        DllmError: if `implementation` names one that cannot run this.
    """
    operands = (query, key, value, visible) + (() if since is None else (since,))
    axes = (QUERY, KEYS, KEYS, ROWS, ROWS)[: len(operands)]
    operation = CAUSAL if causal and since is None else ATTENTION
    return _on_platforms(operation, operands, axes, layout, implementation)


def attention_in_blocks(
    query: jax.Array,
    own: LayerKV,
    before: LayerKV,
    visible: jax.Array,
    block_length: int,
    layout: LayoutLike | None = None,
    since: jax.Array | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    """`attention` whose keys and values are `own` in a query's block and `before` ahead of it: [B, T, N, H].

    Args:
        query: [B, T, N, H] of all positions, float32 or bfloat16.
        own, before: of the same positions, [B, T, K, H] each, K dividing N.
        visible: [B, T or 1] int32, at most the end of a query's block.
        block_length: L; block c is [c L, (c + 1) L), of which the last may be shorter.
        since: [B, T or 1] int32, at most the start of a query's block.
        layout, implementation: as of `attention`.
    """
    operands = (query, *own, *before, visible) + (() if since is None else (since,))
    axes = (QUERY, KEYS, KEYS, KEYS, KEYS, ROWS, ROWS)[: len(operands)]
    run = lambda *operands: _on_platforms(IN_BLOCKS, operands, axes, layout, implementation, block_length)
    if (length := query.shape[1]) % block_length == 0:
        return run(*operands)
    return run(*(x if x.shape[1] == 1 else fill(x, block_length) for x in operands))[:, :length]


def _on_platforms(
    operation: Operation,
    operands: tuple[jax.Array, ...],
    axes: Sequence[LogicalAxes],
    layout: LayoutLike | None,
    implementation: Name | None,
    *static: int,
) -> jax.Array:
    """Each platform's kernel of those operands where there is one, else XLA's operations."""
    otherwise = functools.partial(operation.xla, *static)
    if operands[0].shape[1] < FUSED_FROM and asked_for(implementation) == "auto":
        return otherwise(*operands)
    chosen = choose(operation, operands, layout, implementation, _why_not_on_parts(layout))
    if not chosen:
        return otherwise(*operands)
    locally = (lambda function: function) if layout is None else lambda function: layout.locally(function, axes, QUERY)
    on = {name: locally(functools.partial(kernel.run, device, *static)) for name, (kernel, device) in chosen.items()}
    return lax.platform_dependent(*operands, **on, default=otherwise)


def _why_not_on_parts(layout: LayoutLike | None) -> str | None:
    """Why devices cannot run a kernel on their own heads, None if they can."""
    if (
        layout is None
        or not jax.sharding.get_abstract_mesh().empty
        or layout.parts("heads") == layout.parts("kv_heads")
    ):
        return None
    return "heads of keys do not lie where the queries' that share them do"


def _examples() -> Mapping[str, Sequence[np.ndarray]]:
    """Two rows of 320 positions, one of them short."""
    query, key, value = _arrays()
    lengths = _LENGTHS
    ends = np.minimum(lengths, 32 * (np.arange(320, dtype=np.int32) // 32 + 1))
    return {
        "a length per row": (query, key, value, lengths),
        "a length per query": (query, key, value, ends),
        "a sliding window": (query, key, value, ends, np.maximum(ends - 50, 0)),
    }


def _examples_causal() -> Mapping[str, Sequence[np.ndarray]]:
    """The same under a causal mask."""
    return {"causal": (*_arrays(), np.minimum(_LENGTHS, np.arange(1, 321, dtype=np.int32)))}


def _examples_in_blocks() -> Mapping[str, Sequence[np.ndarray]]:
    """The same in blocks of 32, with other keys and values before them."""
    query, key, value = _arrays()
    *_, ends = _examples()["a length per query"]
    operands = (query, key, value, key[:, ::-1], value[:, ::-1], ends)
    since = 64 * (np.maximum(ends - 1, 0) // 64)  # documents of two blocks
    return {"blocks of 32": operands, "documents in blocks of 32": (*operands, since)}


_LENGTHS = np.array([[320], [37]], np.int32)


def _arrays() -> list[np.ndarray]:
    """Queries, keys and values: 4 heads on 2, of size 64."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 320, heads, 64)).astype(np.float32) for heads in (4, 2, 2)]


ATTENTION = Operation(
    "attention",
    reference.attend,
    in_parts,
    (
        Kernel("cudnn", "cuda", cudnn.refusal, cudnn.attend),
        Kernel("tokamax", "cuda", tokamax.refusal, tokamax.attend),
        Kernel("tpu", "tpu", tpu.refusal, tpu.attend, automatic=False),
    ),
    COST,
    ("query", "key", "value", "visible", "since"),
    _examples,
)
CAUSAL = dataclasses.replace(
    ATTENTION,
    name="causal attention",
    kernels=(
        Kernel("cudnn", "cuda", cudnn.causal_refusal, functools.partial(cudnn.attend, causal=True)),
        *ATTENTION.kernels[1:],
    ),
    examples=_examples_causal,
)
IN_BLOCKS = Operation(
    "attention in blocks",
    reference.attend_in_blocks,
    blocks_in_parts,
    (
        Kernel("tokamax", "cuda", tokamax.refusal, tokamax.attend_in_blocks),
        Kernel("tpu", "tpu", tpu.refusal, tpu.attend_in_blocks, automatic=False),
    ),
    COST,
    ("query", "key", "value", "key before", "value before", "visible", "since"),
    _examples_in_blocks,
    (32,),
)
