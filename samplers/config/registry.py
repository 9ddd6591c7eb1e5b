"""Everything that has a name, and its options: unmasking rules, cache policies, samplers with a loop of their own.
Options are read off the fields of dataclasses: a new one is one file and one line.

An option belongs to a field of the sampler, of its rule, of its cache policy, of `Sampling` or of `Smoothing`. Where
the sampler itself has a field of that name, the rule's is written `rule_NAME`; those of `Smoothing` `smoothing_NAME`.
A rule may hold another, its `base`, whose options are written as its own.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from dllm_jax import spec
from dllm_jax.errors import DllmError
from dllm_jax.indicator import Indicator
from dllm_jax.suggestions import nearest
from samplers.caches import CACHES
from samplers.loops.apd import APD, LeftRight
from samplers.loops.autoregressive import Autoregressive
from samplers.loops.block import BlockSampler
from samplers.loops.causal_context import ContextBlocks
from samplers.loops.d2f import PipelineSampler
from samplers.loops.renoise import Renoise
from samplers.loops.self_speculation import SelfSpeculation
from samplers.rules import RULES, Rule
from samplers.tokens.predictions import Sampling
from samplers.tokens.smoothing import Smoothing

LOOPS: Mapping[str, type] = types.MappingProxyType(
    {
        "d2f": PipelineSampler,
        "apd": APD,
        "leftright": LeftRight,
        "autoregressive": Autoregressive,
        "context-blocks": ContextBlocks,
        "self-speculation": SelfSpeculation,
        "renoise": Renoise,
    }
)
"""Samplers that are no `BlockSampler`."""

PARTS: Mapping[str, Mapping[str, type]] = types.MappingProxyType({"rule": RULES, "cache": CACHES})
"""Field of a sampler -> what may be named there."""

BASE = "base"
"""Field of a rule that holds another."""

ENDS = ("eos", "ends")
"""Words for end tokens, whatever the model's are."""

SELF = "self"
"""A verifier's name for the model itself, read causally."""

_PART_NAMES = {"rule": "unmasking rule", "cache": "cache policy"}
_MADE = ("sampling", "end_ids", "constraint")  # fields that are made of options of other names
FORMS = ("regex", "json_schema")
"""Options that make a sampler's constraint."""

_TYPES = {  # of options that are not written as their field's type
    "rule": str,
    "cache": str,
    "verifier": str,
    "adapter": bool,
    "end_think": str | int,
    "smoothing": bool,
    "ignore_eos": bool,
    "block_length": int | None,
    "suppress": Literal["eos", "ends"] | None,
    "defer": Literal["eos", "ends"] | None,
    "regex": str | None,
    "json_schema": dict | None,
}


class Owner(NamedTuple):
    """Whose field an option is: of a class, or of the sampler itself, whatever its class (None)."""

    kind: type | None
    field: str


def fields_of(kind: type) -> list[dataclasses.Field]:
    """The fields of a rule, a policy or a sampler that options can be about."""
    found = [field for field in dataclasses.fields(kind) if field.init and field.name not in _MADE]
    return [field for field in found if kind is not Sampling or field.name != "target"]  # that is data


def owners_of(kind: type, options: Mapping[str, Any]) -> dict[str, Owner]:
    """Option -> its owner, of all options that a sampler of this class has with the rule and cache policy among these.

    Raises:
        DllmError: for an unknown rule or cache policy.
    """
    own = [field.name for field in fields_of(kind)]
    found: dict[str, Owner] = {}
    for part in PARTS:
        name = options.get(part)
        if part in own and isinstance(name, str):
            fields = _owners_in(part_class(part, name), options)
            found |= {f"{part}_{field}" if field in own else field: owner for field, owner in fields.items()}
    forms = FORMS if "constraint" in field_types(kind) else ()
    found |= {name: Owner(None, name) for name in [*own, "ignore_eos", *forms]}
    found |= {field.name: Owner(Sampling, field.name) for field in fields_of(Sampling)}
    if "smoothing" in own:
        found |= {f"smoothing_{field.name}": Owner(Smoothing, field.name) for field in fields_of(Smoothing)}
    return found


def _owners_in(kind: type, options: Mapping[str, Any]) -> dict[str, Owner]:
    """Field -> its owner, of a rule or cache policy and the rule that it holds by name."""
    found = {field.name: Owner(kind, field.name) for field in fields_of(kind)}
    base = base_class(kind, options)
    if base is None:
        return found
    if holds_rule(base):
        raise DllmError(f"base {options[BASE]} has a base of its own; name a rule that has none")
    own = {field: owner for field, owner in found.items() if field not in getattr(kind, "without_base", ())}
    return own | {field.name: Owner(base, field.name) for field in fields_of(base)}


def holds_rule(kind: type) -> bool:
    """Whether a rule holds another, as its `base`."""
    return any(field.name == BASE for field in fields_of(kind)) and Rule in spec.members(field_types(kind)[BASE])


def base_class(kind: type, options: Mapping[str, Any]) -> type | None:
    """The class of the rule that a rule of this class holds, if these options name one.

    Raises:
        DllmError: for an unknown rule.
    """
    name = options.get(BASE)
    return part_class("rule", name) if isinstance(name, str) and holds_rule(kind) else None


def type_of(kind: type, field: str) -> Any:
    """The type of a field's values as they are written."""
    if field == BASE and holds_rule(kind):
        return str
    return _TYPES[field] if field in _TYPES else field_types(kind)[field]


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def part_class(part: str, name: str) -> type:
    """The rule or cache policy of that name.

    Raises:
        DllmError: when there is none.
    """
    if is_outside(name):
        return _outside(part, name)
    if name not in PARTS[part]:
        raise DllmError(f"no {_PART_NAMES[part]} is called {name!r}; {suggest_name(name, PARTS[part])}")
    return PARTS[part][name]


def is_outside(name: Any) -> bool:
    """Whether a name is that of a user's own class, "module:Class"."""
    return isinstance(name, str) and ":" in name


def suggest_name(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name."""
    near = nearest(name, known)
    own = f"choose one of {', '.join(known)}, or name a class of your own, module:Class"
    return own if near is None else f"did you mean {near!r}? {own[0].upper()}{own[1:]}"


def _outside(part: str, name: str) -> type:
    """A user's own rule or cache policy.

    Raises:
        DllmError: when it cannot be imported, or is none.
    """
    kind: Any = spec.import_object(name, part)
    what, base = f"{part} {name!r}", _PART_NAMES[part]
    fits = isinstance(kind, type) and (issubclass(kind, Rule) if part == "rule" else hasattr(kind, "predict"))
    if not fits:
        derive = "derive its class from samplers.Rule" if part == "rule" else "it needs init and predict"
        raise DllmError(f"{what} is no {base}; {derive}")
    if "__static_fields__" not in vars(kind):
        raise DllmError(f"{what} is no pytree; decorate its class with dllm_jax.pytree.pytree")
    try:
        field_types(kind)
    except Exception as error:  # of names that mean nothing in its module
        raise DllmError(f"{what} has fields whose types cannot be read ({error}); correct its annotations") from None
    found: type = kind
    return found


def settings_of(part: Any) -> dict[str, Any]:
    """A rule, a cache policy or a sampler as plain values: {"name": ..., its numbers and choices}."""
    name = _name_of(part)
    values = {field.name: _plain(getattr(part, field.name)) for field in fields_of(type(part))}
    shown = {field: value for field, value in values.items() if value is not _HIDDEN}
    return ({} if name is None else {"name": name}) | shown


def title(sampler: Any) -> str:
    """A sampler in a few words, `eb gamma=0.1 × dual`, `threshold=0.9 × vicinity warmup=2 × smoothing` or
    `d2f threshold=0.5 block_length=8 × eb gamma=0.1`: its rule's first number, and the options that differ from their
    defaults."""
    own = [] if isinstance(sampler, BlockSampler) else [_describe(sampler, ("gen_length", *PARTS))]
    parts = {name: getattr(sampler, name, None) for name in (*PARTS, "smoothing")}
    return " × ".join(own + [_describe(part) for part in parts.values() if part is not None])


_HIDDEN = object()


def _plain(value: Any) -> Any:
    """A field as JSON takes it; models, token choice and the like are reported elsewhere."""
    if _name_of(value) is not None or isinstance(value, Smoothing):
        return settings_of(value)
    if isinstance(value, Indicator):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else _HIDDEN


def _name_of(part: Any) -> str | None:
    return name_of(type(part))


def name_of(kind: type) -> str | None:
    """The name of a rule, a policy or a loop, "module:Class" if it is a user's own; None of other classes."""
    found = next((name for name, one in {**RULES, **CACHES, **LOOPS}.items() if one is kind), None)
    own = issubclass(kind, Rule) or hasattr(kind, "predict")
    return f"{kind.__module__}:{kind.__qualname__}" if found is None and own else found


def _describe(part: Any, hidden: tuple[str, ...] = ()) -> str:
    if not dataclasses.is_dataclass(part):  # a user's own
        return type(part).__name__
    settings = settings_of(part)
    name = settings.pop("name", None)
    name = type(part).__name__.lower() if name is None or is_outside(name) else name
    first = next(iter(settings), None) if isinstance(part, Rule) else None
    usual = {field.name: field.default for field in dataclasses.fields(part)}
    changed = {option: value for option, value in settings.items() if option == first or value != usual[option]}
    words = {
        option: f"({_describe(getattr(part, option))})" if option == BASE and value else value
        for option, value in changed.items()
    }
    numbers = [f"{option}={value}" for option, value in words.items() if option not in hidden]
    return " ".join(numbers if name in settings else [name, *numbers])
