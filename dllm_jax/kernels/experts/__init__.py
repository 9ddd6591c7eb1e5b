"""The experts of a mixture: every token's chosen feed-forward networks, weighted and summed.

| implementation | runs | takes | in "auto" |
|---|---|---|---|
| `xla` | everywhere | everything; on TPU by `lax.ragged_dot`, elsewhere in rounds | where nothing else fits |
| `tokamax` | NVIDIA GPUs of compute capability 9.x and 10.x, where it is installed | bfloat16 and float16 | yes |

Gradients run in rounds everywhere.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from dllm_jax.kernels.dispatch import Kernel, Name, Operation, choose
from dllm_jax.kernels.experts import reference, tokamax
from dllm_jax.kernels.experts.xla import TILE_ROWS, Grouped, in_groups, in_rounds
from dllm_jax.parallel.layout import LayoutLike, MeshAxes, mesh_names
from dllm_jax.params.products import Activation, Table
from dllm_jax.params.quantized import QuantizedKernel

RAGGED: tuple[str, ...] = ("tpu",)
"""Platforms on which `lax.ragged_dot` is a kernel."""

TOKENS = ("batch", None, None)
AXES = (("expert", None, None, "mlp"), ("expert", "mlp", None))
"""Logical axes of tokens, and of `w_in` and `w_out` where they are used; what else splits them is gathered first."""


def apply_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w_in: Table,
    w_out: Table,
    layout: LayoutLike | None = None,
    activation: Activation = "silu",
    implementation: Name | None = None,
) -> jax.Array:
    """sum_k weights[..., k] * expert[ids[..., k]](x), with expert(x) = (activation(x gate) * (x up)) w_out.

    Every assignment is computed, and (up to padding) nothing else. A token's result depends on no other token.

    Reverse mode goes through it, forward mode does not.

    Args:
        x: [B, T, D].
        ids: [B, T, k] int32 below E, no expert twice for one token.
        weights: [B, T, k], in the dtype of x.
        w_in: [E, 2, D, F], gate first; w_out: [E, F, D]; either may be quantized.
        layout: how tokens and experts lie on a mesh; None for one device, and where the caller places everything (on
            TPU tokens and experts that are split without a layout are gathered, unless there is a gradient; on CUDA
            they are run in rounds where there are several devices).
        activation: between the two products.
        implementation: as of `dllm_jax.use_kernels`, which decides by default.

    Returns:
        [B, T, D] in the `sums` of the dtype of x.

    Raises:
        DllmError: if `implementation` names one that cannot run this.
    """
    on: dict[str, Callable[..., jax.Array]] = {
        platform: functools.partial(in_rounds, rows, activation=activation) for platform, rows in TILE_ROWS.items()
    }
    groups = functools.partial(functools.partial, _on_parts, layout, activation)
    reason = _why_no_groups(x, w_in, layout)
    if reason is None:
        on |= {platform: groups(Grouped()) for platform in RAGGED}
    operands = x, ids, weights, w_in, w_out
    chosen = choose(EXPERTS, (*operands[:3], _part(w_in, layout), w_out), layout, implementation, reason)
    on |= {platform: groups(Grouped(device)) for platform, (_, device) in chosen.items()}
    if on_cpus(layout):
        # Nothing is left to the platform: the gradient would be a conditional with collectives in it, which XLA's CPU
        # backend runs in each process in another order.
        return on.get("cpu", on["default"])(*operands)
    return lax.platform_dependent(*operands, **on)


def on_cpus(layout: LayoutLike | None) -> bool:
    """Whether arrays lie on a mesh of CPUs."""
    return layout is not None and layout.mesh.devices.flat[0].platform == "cpu"


def _why_no_groups(x: jax.Array, w_in: Table, layout: LayoutLike | None) -> str | None:
    """Why `in_groups` cannot run this, None if it can, and on a mesh knows what each device is to run."""
    if isinstance(w_in, QuantizedKernel) and w_in.bits != "int8":
        return f"there are no grouped products of weights in {w_in.bits}"
    if x.dtype == jnp.float16:
        return "there are no grouped products in float16"
    mesh = jax.sharding.get_abstract_mesh()
    if not (mesh.empty or mesh.are_all_axes_manual):
        return "a mesh in the caller's context places the arrays"
    if layout is not None and {*mesh_names(*layout.spec(x, TOKENS))} & {*mesh_names(*_split(w_in, layout))}:
        return "tokens and experts are split along one axis of the mesh"
    return None


def _part(w_in: Table, layout: LayoutLike | None) -> Any:
    """A device's part of plain weights, as a shape."""
    if layout is None or isinstance(w_in, QuantizedKernel):
        return w_in
    part = NamedSharding(layout.mesh, layout.spec(w_in, AXES[0])).shard_shape(w_in.shape)
    return jax.ShapeDtypeStruct(part, w_in.dtype)


def _on_parts(
    layout: LayoutLike | None,
    activation: Activation,
    by: Grouped,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *tables: Table,
) -> jax.Array:
    """`in_groups` of each device's tokens with its part of the experts, summed over the devices that share tokens.

    So are gradients, whose rounds then need no other device's weights: what is split for storage alone is gathered once
    a layer, and its gradient summed once. Rounds of the whole do both in every round.
    """
    if layout is None or not jax.sharding.get_abstract_mesh().empty:
        return in_groups(by, x, ids, weights, *tables, None, activation)
    tokens, (experts, width) = layout.spec(x, TOKENS), _split(tables[0], layout)

    def part(x: jax.Array, ids: jax.Array, weights: jax.Array, w_in: Table, w_out: Table) -> jax.Array:
        first = lax.axis_index(experts) * w_out.shape[0] if experts else None
        return lax.psum(in_groups(by, x, ids, weights, w_in, w_out, first, activation), mesh_names(experts, width))

    place = lambda table, axes: jax.tree.map(lambda x: layout.spec(x, axes), table)
    specs = (tokens, tokens, tokens, *map(place, tables, AXES))
    mapped = jax.shard_map(part, mesh=layout.mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return mapped(x, ids, weights, *tables)


def _split(w_in: Table, layout: LayoutLike) -> tuple[MeshAxes, MeshAxes]:
    """The mesh axes that split the experts, and their hidden width."""
    experts, _, _, width = layout.spec(jax.tree.leaves(w_in)[0], AXES[0])
    return experts, width


def _examples() -> Mapping[str, Sequence[np.ndarray]]:
    """Two rows of 40 tokens, each to 2 of 4 experts, of which one gets none."""
    rng = np.random.default_rng(0)
    normal = lambda *shape, scale=1.0: (scale * rng.standard_normal(shape)).astype(np.float32)
    ids = np.stack([np.zeros((2, 40)), rng.integers(1, 3, (2, 40))], -1).astype(np.int32)
    tables = normal(4, 2, 128, 256, scale=0.1), normal(4, 256, 128, scale=0.1)
    return {"2 of 4 experts": (normal(2, 40, 128), ids, np.abs(normal(2, 40, 2)), *tables)}


def _by_tokamax(device: jax.Device, *operands: Any) -> jax.Array:
    return in_groups(Grouped(device), *operands)


EXPERTS = Operation(
    "experts",
    reference.apply,
    functools.partial(apply_experts, implementation="xla"),
    (Kernel("tokamax", "cuda", tokamax.refusal, _by_tokamax),),
    "in rounds of up to 256 rows for each expert",
    ("x", "ids", "weights", "w_in", "w_out"),
    _examples,
)
