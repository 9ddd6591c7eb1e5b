"""Frozen dataclasses as JAX pytrees: numbers are traced leaves, `static` fields are part of the program."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar, dataclass_transform

import jax
from jax import lax

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(*, static: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Class decorator: a frozen dataclass registered as a pytree whose leaves are all fields but the `static` ones.

    Changing a leaf (a threshold, a temperature) never recompiles and can be vmapped; a static field must be hashable,
    and changing it makes another program. A leaf that is None is absent, which makes another program as well.
    """

    def register(cls: type[T]) -> type[T]:
        frozen = dataclasses.dataclass(frozen=True)(cls)
        names = [field.name for field in dataclasses.fields(frozen)]  # type: ignore[arg-type]
        data = [name for name in names if name not in static]
        return jax.tree_util.register_dataclass(frozen, data_fields=data, meta_fields=list(static))

    return register


def vary_like(reference: jax.Array, tree: T) -> T:
    """Inside `jax.shard_map`, marks every leaf as varying over the mesh axes that the reference varies over, so that
    loop carries that start as constants keep their type; outside it does nothing."""
    axes = jax.typeof(reference).manual_axis_type.varying
    if not axes:
        return tree

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)
