"""How the Transformer tells the compiler where arrays lie; `dllm_jax.parallel.sharding` builds on it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

Arrays = TypeVar("Arrays")
LogicalAxes = tuple[str | None, ...]
MeshAxes = str | tuple[str, ...] | None


class LayoutLike(Protocol):
    """The part of a `dllm_jax.parallel.sharding.Layout` that the Transformer uses."""

    @property
    def mesh(self) -> Mesh: ...

    def parts(self, axis: str) -> int: ...

    def spec(self, x: Any, axes: LogicalAxes) -> PartitionSpec: ...

    def locally(
        self, function: Callable[..., jax.Array], inputs: Sequence[LogicalAxes], output: LogicalAxes
    ) -> Callable[..., jax.Array]: ...


def mesh_names(*entries: MeshAxes) -> tuple[str, ...]:
    """All names of mesh axes in entries of a `PartitionSpec`."""
    return tuple(name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry or ()))


def apart_on_cuda(arrays: Arrays) -> Arrays:
    """The same arrays, but on CUDA unlike themselves to the compiler, which fuses nothing across."""
    return lax.platform_dependent(arrays, cuda=lax.optimization_barrier, default=lambda arrays: arrays)
