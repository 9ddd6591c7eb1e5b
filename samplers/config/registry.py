"""Everything that has a name, and what can be said of it: unmasking rules, cache policies, samplers with a loop of
their own, and published settings. Options are read off the fields of dataclasses: a new one is one file and one line.

An option belongs to a field of the sampler, of its rule, of its cache policy, of `Sampling` or of `Smoothing`. Where
the sampler itself has a field of that name, the rule's is written `rule_NAME`; those of `Smoothing` `smoothing_NAME`.
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
from samplers.checks import refuse_unknown
from samplers.config.presets import PRESETS
from samplers.loops.apd import APD, LeftRight
from samplers.loops.block import BlockSampler
from samplers.loops.d2f import PipelineSampler
from samplers.loops.renoise import Renoise
from samplers.rules import RULES, Rule
from samplers.tokens.predictions import Sampling
from samplers.tokens.smoothing import Smoothing

LOOPS: Mapping[str, type] = types.MappingProxyType(
    {"d2f": PipelineSampler, "apd": APD, "leftright": LeftRight, "renoise": Renoise}
)
"""Samplers that are no `BlockSampler`."""

PARTS: Mapping[str, Mapping[str, type]] = types.MappingProxyType({"rule": RULES, "cache": CACHES})
"""Field of a sampler -> what may be named there."""

ENDS = ("eos", "ends")
"""Words for end tokens, whatever the model's are."""

_CALLED = {"rule": "unmasking rule", "cache": "cache policy"}
_MADE = ("sampling", "end_ids")  # fields that are made of options of other names
_TYPES = {  # of options that are written otherwise than their field is
    "rule": str,
    "cache": str,
    "verifier": str,
    "smoothing": bool,
    "ignore_eos": bool,
    "block_length": int | None,
    "suppress": Literal["eos", "ends"] | None,
    "defer": Literal["eos", "ends"] | None,
}


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """What a sampler is made of.

    Attributes:
        kind: its class.
        options: option -> value, with the names of its rule and cache policy; others have the defaults of their class.
        origins: option -> where its value comes from: "the command line", "preset NAME", "generation.json", ...;
            "sampler" -> where the class comes from. It does not count when two are compared.
    """

    kind: type
    options: Mapping[str, Any]
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def from_one(cls, kind: type, options: Mapping[str, Any], origin: str) -> "SamplerConfig":
        """One whose options are all of one origin."""
        return cls(kind, dict(options), dict.fromkeys(options, origin))


class Owner(NamedTuple):
    """Whose field an option is: of a class, or of the sampler itself, whatever its class (None)."""

    kind: type | None
    field: str


USUAL = SamplerConfig.from_one(
    BlockSampler, {"rule": "threshold", "cache": "dual", "gen_length": 256, "block_length": 32}, "the library"
)
"""The library's defaults."""

PLAIN = SamplerConfig.from_one(BlockSampler, {"rule": "threshold", "cache": "none"}, "evaluations")
"""Where samplers are compared: no approximation but what is written, and one block."""


def fields_of(kind: type) -> list[dataclasses.Field]:
    """The fields of a rule, a policy or a sampler that options can be about."""
    found = dataclasses.fields(kind)
    return [field for field in found if field.init and field.name not in _MADE]


def options_of(settings: SamplerConfig) -> dict[str, Owner]:
    """Option -> its owner, of all that can be said of a sampler with these parts.

    Raises:
        DllmError: for an unknown rule or cache policy.
    """
    own = [field.name for field in fields_of(settings.kind)]
    found: dict[str, Owner] = {}
    for part in PARTS:
        name = settings.options.get(part)
        if part in own and isinstance(name, str):
            fields = [Owner(named(part, name), field.name) for field in fields_of(named(part, name))]
            found |= {f"{part}_{owner.field}" if owner.field in own else owner.field: owner for owner in fields}
    found |= {name: Owner(None, name) for name in [*own, "ignore_eos"]}
    found |= {field.name: Owner(Sampling, field.name) for field in fields_of(Sampling)}
    if "smoothing" in own:
        found |= {f"smoothing_{field.name}": Owner(Smoothing, field.name) for field in fields_of(Smoothing)}
    return found


def kinds_of(settings: SamplerConfig) -> dict[str, Any]:
    """Option -> the type of its values, of what can be written."""
    found = {
        option: kind_of(owner.kind or settings.kind, owner.field) for option, owner in options_of(settings).items()
    }
    return {option: kind for option, kind in found.items() if spec.is_writable(kind)}


def kind_of(kind: type, field: str) -> Any:
    """The type of a field's values where they are written."""
    return _TYPES[field] if field in _TYPES else _hints(kind)[field]


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def named(part: str, name: str) -> type:
    """The rule or cache policy of that name.

    Raises:
        DllmError: when there is none.
    """
    if is_outside(name):
        return _outside(part, name)
    if name not in PARTS[part]:
        raise DllmError(f"no {_CALLED[part]} is called {name!r}; {one_of(name, PARTS[part])}")
    return PARTS[part][name]


def is_outside(name: Any) -> bool:
    """Whether a name is that of a class of somebody's own, "module:Class"."""
    return isinstance(name, str) and ":" in name


def one_of(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name."""
    near = nearest(name, known)
    own = f"choose one of {', '.join(known)}, or name a class of your own, module:Class"
    return own if near is None else f"did you mean {near!r}? {own[0].upper()}{own[1:]}"


def _outside(part: str, name: str) -> type:
    """A rule or cache policy of somebody's own.

    Raises:
        DllmError: when it cannot be imported, or is none.
    """
    kind: Any = spec.import_object(name, part)
    what, base = f"{part} {name!r}", _CALLED[part]
    fits = isinstance(kind, type) and (issubclass(kind, Rule) if part == "rule" else hasattr(kind, "predict"))
    if not fits:
        derive = "derive its class from samplers.Rule" if part == "rule" else "it needs init and predict"
        raise DllmError(f"{what} is no {base}; {derive}")
    if "__static_fields__" not in vars(kind):
        raise DllmError(f"{what} is no pytree; decorate its class with dllm_jax.pytree.pytree")
    try:
        _hints(kind)
    except Exception as error:  # of names that mean nothing in its module
        raise DllmError(f"{what} has fields whose types cannot be read ({error}); correct its annotations") from None
    found: type = kind
    return found


def resolve(
    name: str | None, options: Mapping[str, Any], under: SamplerConfig, origin: str = "the arguments"
) -> SamplerConfig:
    """A sampler's class and all its options, each with its origin.

    Args:
        name: of a rule, a preset, or a loop; None is the rule that is among the options, else what lies under them.
        options: what was said; it counts most, then a preset, then what lies under both.
        under: defaults; those of a rule or policy that is not taken do not count.
        origin: of the name and the options.

    Raises:
        DllmError: for unknown names, and options that nobody owns.
    """
    options, own = unfolded(options), rule_called(name)
    kind: type = BlockSampler
    if own and "rule" in options:
        raise DllmError(f"{name} and rule={options['rule']} both name the rule; leave one of them out")
    if name is None:
        kind = kind if "rule" in options else under.kind
    elif name in LOOPS:
        kind = LOOPS[name]
    elif name in PRESETS:
        under = _laid_over(under, SamplerConfig.from_one(kind, PRESETS[name], f"preset {name}"))
    elif not own:
        names = one_of(name, (*RULES, *PRESETS, *LOOPS))
        raise DllmError(f"no unmasking rule or preset is called {name!r}; {names}")
    found = _laid_over(under, SamplerConfig.from_one(kind, {**options, **own}, origin))
    if name in LOOPS:
        found = dataclasses.replace(found, origins={**found.origins, "sampler": origin})
    known = [option for option in options_of(found) if option not in own]
    refuse_unknown(f"sampler {name or called(found)}", options, known, _owners)
    return found


def _owners(option: str) -> list[str]:
    """Names of the rules, policies and loops that have such an option of their own."""
    common = {field.name for field in fields_of(BlockSampler)}
    kinds = {**RULES, **CACHES, **LOOPS}
    return [name for name in kinds if option in {field.name for field in fields_of(kinds[name])} - common]


def rule_called(name: str | None) -> dict[str, Any]:
    """The option that a sampler's name is, where that is a rule's."""
    return {"rule": name} if name in RULES or is_outside(name) else {}


def _laid_over(under: SamplerConfig, over: SamplerConfig) -> SamplerConfig:
    """All options of `over`, and those of `under` that mean the same there."""
    parts = {part: under.options[part] for part in PARTS if part in under.options}
    if over.kind is not under.kind:
        parts.pop("rule", None)  # of another sampler, where it does something else
    ours, theirs = options_of(SamplerConfig(over.kind, {**parts, **over.options})), options_of(under)
    same = {option: value for option, value in under.options.items() if ours.get(option) == theirs[option]}
    kept = {option: value for option, value in same.items() if option not in PARTS or option in parts}
    origins = {option: under.origins[option] for option in kept if option in under.origins}
    if over.kind is under.kind and "sampler" in under.origins:
        origins["sampler"] = under.origins["sampler"]
    return SamplerConfig(over.kind, {**kept, **over.options}, {**origins, **over.origins})


def called(settings: SamplerConfig) -> str:
    """The name of a sampler with a loop of its own, else of its rule."""
    rule = settings.options.get("rule")
    loops = [name for name, kind in LOOPS.items() if kind is settings.kind]
    return str(loops[0] if loops else rule if isinstance(rule, str) else type(rule).__name__)


def unfolded(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with smoothing's numbers, where it is written as `weight=0.2,growth=0.1`, as options of their own."""
    text = options.get("smoothing")
    if not isinstance(text, str) or "=" not in text:
        return dict(options)
    numbers = spec.convert_options(spec.parse_options(text, "smoothing"), _hints(Smoothing), "smoothing")
    return {**options, "smoothing": True, **{f"smoothing_{name}": value for name, value in numbers.items()}}


def settings_of(part: Any) -> dict[str, Any]:
    """A rule, a cache policy or a sampler as plain values: {"name": ..., its numbers and choices}."""
    name = _name_of(part)
    values = {field.name: _plain(getattr(part, field.name)) for field in fields_of(type(part))}
    told = {field: value for field, value in values.items() if value is not _UNTOLD}
    return ({} if name is None else {"name": name}) | told


def title(sampler: Any) -> str:
    """A sampler in a few words, `eb gamma=0.1 × dual`, `threshold=0.9 × vicinity warmup=2 × smoothing` or
    `d2f threshold=0.5 block_length=8 × eb gamma=0.1`: its rule's first number, and others that are not as usual."""
    own = [] if isinstance(sampler, BlockSampler) else [_described(sampler, ("gen_length", *PARTS))]
    parts = {name: getattr(sampler, name, None) for name in (*PARTS, "smoothing")}
    return " × ".join(own + [_described(part) for part in parts.values() if part is not None])


_UNTOLD = object()


def _plain(value: Any) -> Any:
    """A field as JSON takes it; models, token choice and the like are told elsewhere."""
    if _name_of(value) is not None or isinstance(value, Smoothing):
        return settings_of(value)
    if isinstance(value, Indicator):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else _UNTOLD


def _name_of(part: Any) -> str | None:
    return name_of(type(part))


def name_of(kind: type) -> str | None:
    """What a rule, a policy or a loop is called, "module:Class" where it is somebody's own; None of other classes."""
    found = next((name for name, one in {**RULES, **CACHES, **LOOPS}.items() if one is kind), None)
    own = issubclass(kind, Rule) or hasattr(kind, "predict")
    return f"{kind.__module__}:{kind.__qualname__}" if found is None and own else found


def _described(part: Any, untold: tuple[str, ...] = ()) -> str:
    if not dataclasses.is_dataclass(part):  # somebody's own
        return type(part).__name__
    settings = settings_of(part)
    name = settings.pop("name", None)
    name = type(part).__name__.lower() if name is None or is_outside(name) else name
    first = next(iter(settings), None) if isinstance(part, Rule) else None
    usual = {field.name: field.default for field in dataclasses.fields(part)}
    changed = {option: value for option, value in settings.items() if option == first or value != usual[option]}
    numbers = [f"{option}={value}" for option, value in changed.items() if option not in untold]
    return " ".join(numbers if name in settings else [name, *numbers])
