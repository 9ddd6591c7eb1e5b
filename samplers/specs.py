"""Samplers as they are written on command lines: `threshold:threshold=0.9,cache=dual,block_length=32`.

The name is an unmasking rule's or a preset's; the options are those of the rule, of the cache policy and of
`samplers.make_sampler`. A preset's canvas is replaced by that of the task. Or the name is one of `samplers.MAKERS`:
`d2f:block_length=8,rule=eb,gamma=0.1`, `apd:verifier=DIR,weight=0.7`, `leftright:tokens_per_step=2`. A value may be a
list, `eb:gamma=0.01|0.1|1`, which stands for one sampler per value. What follows the last `@` is the model that the
sampler runs, a folder or a name: `d2f:block_length=8@runs/d2f/model`.
"""

import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import dllm_jax
from dllm_jax import Model
from dllm_jax.errors import DllmError
from dllm_jax.tools import spec
from samplers.apd_loop import LeftToRight
from samplers.block import BlockSampler
from samplers.caches import CACHES
from samplers.generate import make_sampler
from samplers.indicator import Indicator, load_indicator
from samplers.makers import MAKERS
from samplers.pipeline import PipelineSampler
from samplers.presets import PRESETS, preset
from samplers.rules import RULES

DEFAULTS: Mapping[str, Any] = {"cache": "none", "block_length": None}  # the plain sampler: one block, no approximation
_WRITABLE = {int, float, bool, str}
_OF_CANVAS = ("gen_length", "ignore_eos")
_CURVES = {  # the numbers of a curve
    "d2f": ("tau_add", "tau_act", "threshold", "rule_threshold"),
    "apd": ("weight",),
    "leftright": ("tokens_per_step",),
}


class Canvas(Protocol):
    """What a task decides about generations.

    Attributes:
        name: for people.
        stops: whether an end token ends an answer; False where the canvas has a fixed length.
        answer_width: length of the canvas.
    """

    name: ClassVar[str]
    stops: ClassVar[bool]

    @property
    def answer_width(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class SamplerSpec:
    """A sampler before it meets a model.

    Attributes:
        name: of an unmasking rule, of a preset, or of another sampler.
        options: what was written behind it, as `make_sampler` takes it.
        model: folder or name of the model that it runs; None leaves that open.
    """

    name: str
    options: Mapping[str, Any]
    model: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """All options of `make_sampler`, the rule among them, but for what the task decides."""
        if self.name in MAKERS:
            return dict(self.options)
        if self.name not in PRESETS:
            return {"rule": self.name, **DEFAULTS, **self.options}
        chosen = preset(self.name, **self.options)
        return {name: value for name, value in chosen.items() if name not in _OF_CANVAS or name in self.options}

    @property
    def numbers(self) -> dict[str, Any]:
        """The written numbers of the rule, which may change without another compilation."""
        rule = self.settings.get("rule")
        kinds = {} if rule is None else _part_kinds(RULES[rule])
        own = _CURVES.get(self.name, ())
        return {
            name: value
            for name, value in self.options.items()
            if name in own
            or f"most_{name}" in self.options
            or (name in kinds and type(value) in (int, float) and {int, float} & set(spec.members(kinds[name])))
        }

    @property
    def series(self) -> str:
        """The spec without its numbers: samplers of one series differ in numbers only and make one curve."""
        structure = {k: v for k, v in self.options.items() if k not in self.numbers}
        return str(dataclasses.replace(self, options=structure))

    def anywhere(self) -> "SamplerSpec":
        """The same for any model."""
        return dataclasses.replace(self, model=None)

    def without(self, option: str) -> "SamplerSpec":
        """The same without an option."""
        return dataclasses.replace(self, options={k: v for k, v in self.options.items() if k != option})

    def __str__(self) -> str:
        options = ",".join(f"{name}={spec.written(value)}" for name, value in self.options.items())
        at = "" if self.model is None else f"@{self.model}"
        return (f"{self.name}:{options}" if options else self.name) + at

    def build(
        self, model: Model, canvas: Canvas, load: Callable[[str], Model] = dllm_jax.load
    ) -> BlockSampler | LeftToRight | PipelineSampler:
        """The sampler of a model for the canvas of a task.

        Args:
            model: what it runs.
            load: gives a verifier by its folder or name.

        Raises:
            DllmError: for numbers out of range, combinations that make no sense, and a sampler that names its model:
                whoever builds it loads that one, and says so by `anywhere`.
        """
        if self.model is not None:
            raise DllmError(f"sampler {self} names a model of its own; load that one, and leave @{self.model} out")
        if not canvas.stops and (fixed := sorted(set(_OF_CANVAS) & set(self.options))):
            raise DllmError(f"sampler {self}: {fixed[0]} cannot be chosen, the canvas of {canvas.name} is what it is")
        if model.config.mask_id is None:
            advice = "use it as a verifier, or set an unused id as mask_id in its config"
            raise DllmError(f"sampler {self}: {model.name} has no mask token to mark open positions with; {advice}")
        settings = {"gen_length": canvas.answer_width, "ignore_eos": not canvas.stops, **self.loaded(load)}
        make = MAKERS.get(self.name, make_sampler)
        return make(model, **settings)

    def loaded(self, load: Callable[[str], Model]) -> dict[str, Any]:
        """`settings` with the verifier as a model and the indicator as itself, where there are such.

        Raises:
            DllmError: when there must be one and none was named.
        """
        settings = self.settings
        if self.name == "apd" and "verifier" not in settings:
            raise DllmError(f"sampler {self} has no verifier; write apd:verifier=DIR_OR_NAME")
        loads: dict[str, Callable[[str], Any]] = {"verifier": load, "indicator": _indicator}
        return {name: loads[name](value) if name in loads else value for name, value in settings.items()}


def parse_samplers(text: str) -> list[SamplerSpec]:
    """All samplers that a spec stands for, in the order of its values.

    Raises:
        DllmError: for unknown names and options, and values of another type; numbers are checked by `build`.
    """
    written, at, model = text.rpartition("@")
    if at and not (written and model):
        raise DllmError(f"sampler {text!r} has no {'model behind' if written else 'name before'} the @; write NAME@DIR")
    name, options = spec.parse(written if at else text, "sampler")
    choices = [value.split("|") for value in options.values()]
    products = itertools.product(*choices)
    return [typed(name, dict(zip(options, values, strict=True)), model if at else None) for values in products]


def parse_sampler(text: str) -> SamplerSpec:
    """One sampler, see `parse_samplers`.

    Raises:
        DllmError: as there, and for a list of values.
    """
    found = parse_samplers(text)
    if len(found) != 1:
        raise DllmError(f"sampler {text!r} stands for {len(found)} samplers; choose one, or sweep over them")
    return found[0]


def typed(name: str, written: Mapping[str, str], model: str | None = None) -> SamplerSpec:
    """A sampler whose options are texts still.

    Raises:
        DllmError: as `parse_samplers`.
    """
    return SamplerSpec(name, spec.converted(written, option_kinds(name, written), f"sampler {name}"), model)


@functools.lru_cache(maxsize=1)
def _indicator(folder: str) -> Indicator:
    """An indicator, once for all its numbers in a sweep."""
    return load_indicator(folder)


def option_kinds(name: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """Option -> type, of all that a sampler takes which can be written.

    Args:
        written: its options, of which the rule of d2f and the cache policy bring options of their own.

    Raises:
        DllmError: for unknown names.
    """
    if name in MAKERS:
        kinds = _keyword_kinds(MAKERS[name])
        if name != "d2f":
            return kinds
        inside = _part_kinds(_rule(written["rule"])) if "rule" in written else {}
        return {**inside, **kinds, "rule": str}
    names = (*RULES, *PRESETS, *MAKERS)
    if name not in names:
        raise DllmError(f"no unmasking rule or preset is called {name!r}; choose one of {', '.join(names)}")
    usual = PRESETS.get(name, {"rule": name, **DEFAULTS})
    cache = written.get("cache", usual["cache"])
    if cache not in CACHES:
        raise DllmError(f"no cache policy is called {cache!r}; choose one of {', '.join(CACHES)}")
    return {**_part_kinds(RULES[usual["rule"]]), **_part_kinds(CACHES[cache]), **_keyword_kinds(make_sampler)}


def _rule(name: str) -> type:
    if name not in RULES:
        raise DllmError(f"no unmasking rule is called {name!r}; choose one of {', '.join(RULES)}")
    return RULES[name]


def _part_kinds(part: type) -> dict[str, Any]:
    """Option -> type of a rule or a cache policy, of what can be written; without the quirks of official code."""
    hints = typing.get_type_hints(part)
    names = [field.name for field in dataclasses.fields(part) if field.name != "compat"]
    return {name: hints[name] for name in names if _writable(hints[name])}


def _keyword_kinds(make: Any) -> dict[str, Any]:
    """Option -> type of what makes a sampler, of what can be written."""
    hints, own = typing.get_type_hints(make), ("rule", "return")
    named = [name for name, p in inspect.signature(make).parameters.items() if p.kind is p.KEYWORD_ONLY]
    return {name: hints[name] for name in named if name not in own and _writable(hints[name])}


def _writable(kind: Any) -> bool:
    members = spec.members(kind)
    return any(member in _WRITABLE or typing.get_origin(member) is typing.Literal for member in members)
