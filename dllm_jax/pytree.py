"""Frozen dataclasses as JAX pytrees: numbers are traced leaves, `static` fields are part of the program."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform

import jax
from jax import lax

T = TypeVar("T")

_STATIC = "__static_fields__"


@dataclass_transform(frozen_default=True)
def pytree(*, static: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Class decorator: a frozen dataclass registered as a pytree whose leaves are all fields but the `static` ones.

    Changing a leaf (a threshold, a temperature) never recompiles and can be vmapped; a static field must be hashable,
    and changing it makes another program. A leaf that is None is absent, which makes another program as well.
    What is static in a base class is so in its subclasses.
    """

    def register(cls: type[T]) -> type[T]:
        frozen = dataclasses.dataclass(frozen=True)(cls)
        names = [field.name for field in dataclasses.fields(frozen)]  # type: ignore[arg-type]
        fixed = tuple(dict.fromkeys(name for base in cls.__mro__ for name in base.__dict__.get(_STATIC, ())))
        fixed += static
        setattr(frozen, _STATIC, fixed)
        _register(frozen, tuple(name for name in names if name not in fixed), fixed)
        return frozen

    return register


def _register(cls: type, data: tuple[str, ...], static: tuple[str, ...]) -> None:
    """Not by `jax.tree_util.register_dataclass`: tree structures made by that compare equal whatever the class when
    their fields do (jax 0.10 to 0.12), and a jit cache may then take one rule or cache policy for another."""
    keys = [jax.tree_util.GetAttrKey(name) for name in data]

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(node, name) for name in data), tuple(getattr(node, name) for name in static)

    def flatten_with_keys(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, aux = flatten(node)
        return tuple(zip(keys, children, strict=True)), aux

    def unflatten(aux: tuple[Any, ...], children: Iterable[Any]) -> Any:
        node: Any = object.__new__(cls)  # past __post_init__: leaves may be tracers or placeholders
        for name, value in zip((*data, *static), (*children, *aux), strict=True):
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


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
