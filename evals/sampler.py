"""Samplers as they are written on the command line: `threshold:threshold=0.9,cache=dual,block_length=32`.

The name is an unmasking rule's or a preset's; the options are those of the rule, of the cache policy and of
`samplers.make_sampler`. A preset's canvas is replaced by that of the task. Or the name is one of `samplers.MAKERS`:
`d2f:block_length=8,rule=eb,gamma=0.1`, `apd:verifier=DIR,weight=0.7`, `leftright:tokens_per_step=2`. A value may be a
list, `eb:gamma=0.01|0.1|1`, which stands for one sampler per value.
"""

import dataclasses
import functools
import inspect
import itertools
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dllm_jax
from dllm_jax import Model
from dllm_jax.errors import DllmError
from evals import spec
from evals.tasks import Task
from samplers import CACHES, MAKERS, RULES, BlockSampler, LeftToRight, PipelineSampler, make_sampler
from samplers.presets import PRESETS, preset

DEFAULTS: Mapping[str, Any] = {"cache": "none", "block_length": None}  # the plain sampler: one block, no approximation
_WRITABLE = {int, float, bool, str}
_OF_TASK = ("gen_length", "ignore_eos")
_CURVES = {  # the numbers of a curve
    "d2f": ("tau_add", "tau_act", "threshold"),
    "apd": ("weight",),
    "leftright": ("tokens_per_step",),
}


@dataclasses.dataclass(frozen=True)
class SamplerSpec:
    """A sampler before it meets a model.

    Attributes:
        name: of an unmasking rule, of a preset, or of another sampler.
        options: what was written behind it, as `make_sampler` takes it.
    """

    name: str
    options: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """All options of `make_sampler`, the rule among them, but for what the task decides."""
        if self.name in MAKERS:
            return dict(self.options)
        if self.name not in PRESETS:
            return {"rule": self.name, **DEFAULTS, **self.options}
        chosen = preset(self.name, **self.options)
        return {name: value for name, value in chosen.items() if name not in _OF_TASK or name in self.options}

    @property
    def numbers(self) -> dict[str, Any]:
        """The written numbers of the rule, which may change without another compilation."""
        if self.name in MAKERS:
            return {name: value for name, value in self.options.items() if name in _CURVES[self.name]}
        kinds = _part_kinds(RULES[self.settings["rule"]])
        return {
            name: value
            for name, value in self.options.items()
            if name in kinds and type(value) in (int, float) and {int, float} & set(spec.members(kinds[name]))
        }

    @property
    def series(self) -> str:
        """The spec without its numbers: samplers of one series differ in numbers only and make one curve."""
        return str(SamplerSpec(self.name, {k: v for k, v in self.options.items() if k not in self.numbers}))

    def __str__(self) -> str:
        options = ",".join(f"{name}={spec.written(value)}" for name, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    def build(self, model: Model, task: Task) -> BlockSampler | LeftToRight | PipelineSampler:
        """The sampler of a model for the canvas of a task.

        Raises:
            DllmError: for numbers out of range, and combinations that make no sense.
        """
        if not task.stops and (fixed := sorted(set(_OF_TASK) & set(self.options))):
            raise DllmError(f"sampler {self}: {fixed[0]} cannot be chosen, the canvas of {task.name} is what it is")
        canvas = {"gen_length": task.answer_width, "ignore_eos": not task.stops}
        if self.name not in MAKERS:
            return make_sampler(model, **{**canvas, **self.settings})
        settings = {**canvas, **self.settings}
        if "verifier" in settings:
            settings["verifier"] = _load(settings["verifier"])
        elif self.name == "apd":
            raise DllmError(f"sampler {self} has no verifier; write apd:verifier=DIR_OR_NAME")
        return MAKERS[self.name](model, **settings)


def parse_samplers(text: str) -> list[SamplerSpec]:
    """All samplers that a spec stands for, in the order of its values.

    Raises:
        DllmError: for unknown names and options, and values of another type; numbers are checked by `build`.
    """
    name, written = spec.parse(text, "sampler")
    choices = [value.split("|") for value in written.values()]
    return [_typed(name, dict(zip(written, values, strict=True))) for values in itertools.product(*choices)]


def parse_sampler(text: str) -> SamplerSpec:
    """One sampler, see `parse_samplers`.

    Raises:
        DllmError: as there, and for a list of values.
    """
    found = parse_samplers(text)
    if len(found) != 1:
        raise DllmError(f"sampler {text!r} stands for {len(found)} samplers; choose one, or sweep over them")
    return found[0]


def read_grid(path: str | Path) -> list[SamplerSpec]:
    """The samplers of a TOML file: tables `[[sampler]]` with a `rule` and options, each a value or a list of values.

    Raises:
        DllmError: for a file that cannot be read, is not like that, or names no sampler.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("sampler")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DllmError(f"the grid {path} could not be read ({error})") from None
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise DllmError(f"the grid {path} has no [[sampler]] tables; write one per rule, with lists of values")
    return list(itertools.chain.from_iterable(_of_table(table, path) for table in tables))


def unique(samplers: Iterable[SamplerSpec]) -> list[SamplerSpec]:
    """The samplers without repetitions, those of one series together."""
    by_series: dict[str, dict[str, SamplerSpec]] = {}
    for sampler in samplers:
        by_series.setdefault(sampler.series, {})[str(sampler)] = sampler
    return [sampler for group in by_series.values() for sampler in group.values()]


def _of_table(table: Mapping[str, Any], path: str | Path) -> list[SamplerSpec]:
    rule = table.get("rule")
    if not isinstance(rule, str):
        raise DllmError(f'the grid {path} has a [[sampler]] without a rule; write rule = "eb", or another\'s name')
    lists = {k: v if isinstance(v, list) else [v] for k, v in table.items() if k != "rule"}
    products = itertools.product(*lists.values())
    return [_typed(rule, {k: spec.written(v) for k, v in zip(lists, values, strict=True)}) for values in products]


@functools.lru_cache(maxsize=1)
def _load(verifier: str) -> Model:
    """The verifier, once for all samplers of a sweep."""
    return dllm_jax.load(verifier)


def _typed(name: str, written: Mapping[str, str]) -> SamplerSpec:
    if name in MAKERS:
        kinds = _keyword_kinds(MAKERS[name])
        if name == "d2f" and "rule" in written:
            kinds = {**_part_kinds(_rule(written["rule"])), **kinds, "rule": str}
        return SamplerSpec(name, spec.converted(written, kinds, f"sampler {name}"))
    names = (*RULES, *PRESETS, *MAKERS)
    if name not in names:
        raise DllmError(f"no unmasking rule or preset is called {name!r}; choose one of {', '.join(names)}")
    usual = PRESETS.get(name, {"rule": name, **DEFAULTS})
    cache = written.get("cache", usual["cache"])
    if cache not in CACHES:
        raise DllmError(f"no cache policy is called {cache!r}; choose one of {', '.join(CACHES)}")
    kinds = {**_part_kinds(RULES[usual["rule"]]), **_part_kinds(CACHES[cache]), **_keyword_kinds(make_sampler)}
    return SamplerSpec(name, spec.converted(written, kinds, f"sampler {name}"))


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


def all_samplers(texts: Sequence[str], grid: str | Path | None = None) -> list[SamplerSpec]:
    """The samplers of several specs and of a grid's file.

    Raises:
        DllmError: as `parse_samplers` and `read_grid`, and when there are none.
    """
    found = [sampler for text in texts for sampler in parse_samplers(text)]
    found += read_grid(grid) if grid is not None else []
    if not found:
        raise DllmError("no sampler was given; pass --sampler RULE:OPTION=VALUE, or a file by --grid")
    return unique(found)
