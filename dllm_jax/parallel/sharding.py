"""Sharding as one table: logical axis names of the parameters -> mesh axes. The model code never mentions a device."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.transformer import param_specs
from dllm_jax.parallel.layout import LogicalAxes, MeshAxes, mesh_names
from dllm_jax.params.quantized import Form, QuantizedKernel
from dllm_jax.params.specs import forms
from dllm_jax.spec import convert_options, parse_options


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Which mesh axis splits each logical axis; None replicates it. Axes that a mesh does not have count as None.

    The defaults serve one device, tensor-parallel sampling and FSDP training alike: on a mesh without "fsdp" only the
    tensor axis splits, and the other way round. With an "expert" axis every device keeps its own experts (and with a
    "tensor" axis its share of their hidden width) and runs the tokens routed to them.
    """

    embed: MeshAxes = "fsdp"
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    mlp: MeshAxes = "tensor"
    expert: MeshAxes = "expert"
    vocab: MeshAxes = "tensor"
    head_dim: MeshAxes = None
    batch: MeshAxes = ("data", "fsdp")

    def spec(self, axes: LogicalAxes, mesh: Mesh | AbstractMesh) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes on this mesh; None is an axis that is never split.

        Raises:
            DllmError: when one mesh axis would split two dimensions of the array.
        """
        entries = [_present(axis and getattr(self, axis), mesh) for axis in axes]
        used = [name for entry in entries for name in entry]
        if len(used) != len(set(used)):
            raise DllmError(
                f"sharding rules split two of the axes {axes} over one mesh axis {used}; map one of them to None"
            )
        return PartitionSpec(*(entry if len(entry) > 1 else (entry[0] if entry else None) for entry in entries))


def _present(entry: MeshAxes, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    return tuple(name for name in mesh_names(entry) if name in mesh.axis_names)


def make_mesh(**axes: int) -> Mesh:
    """A mesh of the visible devices with Auto axes, e.g. ``make_mesh(data=2, tensor=4)``.

    Raises:
        DllmError: when the product of the axis sizes exceeds the number of devices.
    """
    size = 1
    for count in axes.values():
        size *= count
    if size > jax.device_count():
        raise DllmError(
            f"a mesh {axes} needs {size} devices and this process sees {jax.device_count()}; make the axes smaller, or "
            f"on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={size}"
        )
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[:size]
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lies on a mesh, for the arrays that a forward makes; hashable, part of the program.

    Attributes:
        mesh: the devices.
        rules: how its axes split the logical axes.
    """

    mesh: Mesh
    rules: ShardingRules = ShardingRules()

    def parts(self, axis: str) -> int:
        """Number of equal parts that a logical axis is split into."""
        return math.prod(self.mesh.shape[name] for name in _present(getattr(self.rules, axis), self.mesh))

    def place(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        """x with its logical axes split as the rules say; an axis that does not divide stays whole, and one on the
        devices that split the weights' embed axis as well (FSDP) is left to the compiler, which would otherwise gather
        weights.

        Inside a mesh of the caller's own (`jax.set_mesh`, `jax.shard_map`) no sharding is set: that is the caller's.
        """
        if not jax.sharding.get_abstract_mesh().empty:
            return x
        spec = self.spec(x, axes)
        weights = set(_present(self.rules.embed, self.mesh))
        spec = PartitionSpec(
            *(PartitionSpec.UNCONSTRAINED if weights & {*mesh_names(entry)} else entry for entry in spec)
        )
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def locally(
        self, function: Callable[..., jax.Array], inputs: Sequence[LogicalAxes], output: LogicalAxes
    ) -> Callable[..., jax.Array]:
        """A function of arrays with these logical axes that every device applies to its own part; it must be one to
        which parts are as good as the whole. An axis that does not divide stays whole."""

        def applied(*arrays: jax.Array) -> jax.Array:
            if not jax.sharding.get_abstract_mesh().empty:
                return function(*arrays)
            specs = tuple(self.spec(x, axes) for x, axes in zip(arrays, inputs, strict=True))
            out = self.spec(jax.eval_shape(function, *arrays), output)
            return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)(*arrays)

        return applied

    def spec(self, x: Any, axes: LogicalAxes) -> PartitionSpec:
        """How x with these logical axes lies; an axis that does not divide stays whole."""
        fits = (axis and not size % self.parts(axis) for size, axis in zip(x.shape, axes, strict=True))
        return self.rules.spec(tuple(axis if fit else None for axis, fit in zip(axes, fits, strict=True)), self.mesh)


def param_shardings(config: ModelConfig, mesh: Mesh, rules: ShardingRules | None = None) -> dict[str, Any]:
    """The sharding of every parameter by flat name; of a quantized one, a `QuantizedKernel` of two, for its scales lie
    with their values.

    Raises:
        DllmError: when a dimension is not a multiple of the devices it is split over, or a head, or a group of
            quantized weights, would be torn apart.
    """
    layout = Layout(mesh, rules or ShardingRules())
    kv_heads = {config.heads_of(layer)[0] for layer in range(config.num_layers)}
    for axis, heads in (("heads", config.num_heads), *(("kv_heads", number) for number in sorted(kv_heads))):
        if heads % layout.parts(axis):
            split = f"axis {axis} of {heads} whole heads does not split over {layout.parts(axis)} devices"
            raise DllmError(f"attention: {split}; use fewer, or leave it whole by rules=ShardingRules({axis}=None)")
    shardings: dict[str, Any] = {}
    for name, spec in param_specs(config).items():
        for size, logical in zip(spec.shape, spec.axes, strict=True):
            if logical is not None and size % layout.parts(logical):
                raise DllmError(
                    f"{name}: axis {logical} of {size} does not split over {layout.parts(logical)} devices; "
                    f"use fewer, or leave it whole by rules=ShardingRules({logical}=None)"
                )
        shardings[name] = NamedSharding(mesh, layout.rules.spec(spec.axes, mesh))
        if form := forms(config).get(name):
            scale = _scale_sharding(name, spec.axes, form, layout)
            shardings[name] = QuantizedKernel(shardings[name], scale, form.bits)
    return shardings


def _scale_sharding(name: str, axes: LogicalAxes, form: Form, layout: Layout) -> NamedSharding:
    """That of the values, but for the axis that one scale is shared along."""
    shared = axes[form.axis]
    parts = 1 if shared is None else layout.parts(shared)
    if form.bits == "int4" and form.groups // 2 % parts:
        pairs = f"the {form.groups // 2} pairs of groups that int4 has along axis {shared}"
        way_out = f"leave it whole by rules=ShardingRules({shared}=None), or quantize to int8"
        raise DllmError(f"{name}: {pairs} do not split over {parts} devices; {way_out}")
    split = (None if axis == form.axis and form.bits == "int8" else entry for axis, entry in enumerate(axes))
    return NamedSharding(layout.mesh, layout.rules.spec(tuple(split), layout.mesh))


def batch_sharding(mesh: Mesh, rules: ShardingRules | None = None) -> NamedSharding:
    """The sharding of arrays whose first axis is the batch (prompts, results)."""
    return NamedSharding(mesh, (rules or ShardingRules()).spec(("batch",), mesh))


def batch_parts(mesh: Mesh) -> int:
    """Number of parts that a mesh splits a batch into."""
    (entry,) = ShardingRules().spec(("batch",), mesh)
    return math.prod(mesh.shape[name] for name in mesh_names(entry))


def mesh_for_batch(axes: Mapping[str, int], rows: int, setting: str, unit: str) -> Mesh:
    """The mesh of settings such as {"data": 2, "tensor": 4}, for batches of `rows` rows; one device if there are none.

    Args:
        setting: name of the axes in errors.
        unit: name of the rows in errors.

    Raises:
        DllmError: for an unknown axis, more devices than there are, devices of other processes left over, or a batch
            that does not split.
    """
    axes = dict(axes) or {"data": 1}
    known = sorted({name for field in dataclasses.asdict(ShardingRules()).values() for name in mesh_names(field)})
    for name, count in axes.items():
        if name not in known:
            raise DllmError(f"{setting} has no axis {name!r}; use {', '.join(known)}")
        if count < 1:
            raise DllmError(f"{setting}.{name} is {count}; it must be at least 1")
    mesh = make_mesh(**axes)
    if jax.process_count() > 1 and mesh.size != jax.device_count():
        raise DllmError(
            f"{setting} {axes} has {mesh.size} devices and the {jax.process_count()} processes have "
            f"{jax.device_count()}; use them all"
        )
    check_splits(mesh, rows, unit)
    return mesh


def parse_mesh(text: str, rows: int, unit: str) -> Mesh:
    """The mesh of `--mesh data=2,tensor=4`; arguments and errors are those of `mesh_for_batch`, and words that are no
    axes are an error too."""
    try:
        options = parse_options(text, "--mesh")
        axes = convert_options(options, dict.fromkeys(options, int), "--mesh")
    except DllmError:
        axes = {}
    if not axes:
        raise DllmError(f"--mesh {text} is no list of axes; write it like data=8 or data=2,tensor=4")
    return mesh_for_batch(axes, rows, "--mesh", unit)


def check_splits(mesh: Mesh, rows: int, unit: str) -> None:
    """Raises DllmError unless a mesh splits a batch of `rows` rows, `unit` in errors, into equal parts."""
    parts = batch_parts(mesh)
    if rows % parts:
        raise DllmError(
            f"{rows} {unit} do not split over the {parts} devices of the mesh's batch axes; choose a multiple"
        )
