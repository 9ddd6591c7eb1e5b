"""The settings of a run with their origins, and what it takes: `python -m samplers --explain`."""

import dataclasses
import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from dllm_jax import spec
from samplers.config.costs import Costs, device_memory
from samplers.config.registry import BASE, FORMS, LOOPS, PARTS, base_class, name_of, part_class
from samplers.config.sampler_config import SamplerConfig
from samplers.tokens.predictions import Sampling
from samplers.tokens.smoothing import Smoothing


class Setting(NamedTuple):
    """One setting of a run.

    Attributes:
        name, value: as they are written.
        origin: where the value comes from.
    """

    name: str
    value: str
    origin: str


def list_settings(config: SamplerConfig) -> list[Setting]:
    """All settings of a sampler that have an effect, with their origins."""
    loop = [Setting("sampler", config.label, config.origins.get("sampler", "the library"))]
    return (loop if config.kind in LOOPS.values() else []) + [_setting(option, config) for option in _in_order(config)]


def _in_order(final: SamplerConfig) -> Iterator[str]:
    """The options that have an effect: those of a part follow it."""
    owners = final.owners
    kinds = {part: part_class(part, name) for part in PARTS if isinstance(name := final.options.get(part), str)}
    if "rule" in kinds and (base := base_class(kinds["rule"], final.options)) is not None:
        kinds[BASE] = base
    of = lambda kind: (option for option, owner in owners.items() if owner.kind is kind)

    def with_parts(option: str) -> Iterator[str]:
        yield option
        if option in kinds:
            for inner in of(kinds[option]):
                yield from with_parts(inner)

    for option in of(None):
        yield from with_parts(option)
    yield from of(Sampling)
    if final.options.get("smoothing") not in (None, False):
        yield from of(Smoothing)


def _setting(option: str, config: SamplerConfig) -> Setting:
    place = config.owners[option]
    kind = place.kind or config.kind
    smoothing = config.options.get("smoothing")
    if option in config.options:
        return Setting(option, _written(config.options[option]), config.origins.get(option, "the library"))
    if kind is Smoothing and isinstance(smoothing, Smoothing):
        return Setting(option, spec.format_value(getattr(smoothing, place.field)), config.origins["smoothing"])
    if option in ("ignore_eos", *FORMS):  # no field of a class
        return Setting(option, "none" if option in FORMS else "false", "the library")
    owner = name_of(kind)
    return Setting(option, _default(kind, place.field, config), f"default of {owner}" if owner else "the library")


def _default(kind: type, field: str, final: SamplerConfig) -> str:
    default = next(one.default for one in dataclasses.fields(kind) if one.name == field)
    if default is dataclasses.MISSING:  # `build` fills in the steps of a schedule
        default = final.options["gen_length"]
    return _written(default)


def _written(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return "true" if isinstance(value, Smoothing) else name_of(type(value)) or type(value).__name__
    return ", ".join(map(repr, value)) or "none" if isinstance(value, list | tuple) else spec.format_value(value)


# Costs


def list_costs(costs: Costs, gen_length: int) -> list[str]:
    """What a run takes, a line each."""
    *windows, whole = costs.positions
    least, most = costs.forwards
    run = f"{whole} in a full one, {', '.join(map(str, windows))} in a window" if windows else str(whole)
    forwards = str(least) if least == most else f"{least} to {most}"
    here, memory = jax.devices()[0].device_kind, device_memory()
    lines = [
        f"rows together: {costs.batch}, each of up to {costs.prompt_length} + {gen_length} positions",
        f"positions of a row that a forward runs: {run}",
        f"forwards of a row: {forwards}, fewer if an end token comes before",
        f"weights: {format_bytes(costs.weights)}",
        f"keys and values: {format_bytes(costs.buffers)}; other state: {format_bytes(costs.state)}",
        f"work besides them: about {format_bytes(costs.work)}",
    ]
    total = f"together about {format_bytes(costs.total)}"
    if memory is None:
        return [*lines, f"{total}; how much memory {here} has is not known"]
    fits = "fits" if costs.total <= memory else f"does not fit; {SMALLER}"
    return [*lines, f"{total} of {format_bytes(memory)} ({here}): {fits}"]


SMALLER = "use --quantize int8 or int4, a smaller --batch-size, or a smaller --gen-length"
"""What helps where memory is short."""


def format_bytes(count: int) -> str:
    """Bytes for people: 14.93 GiB, 32.0 MiB, 12.5 KiB."""
    unit, digits = next(((unit, d) for unit, d in (("GiB", 2), ("MiB", 1)) if count >= _UNITS[unit]), ("KiB", 1))
    return f"{count / _UNITS[unit]:.{digits}f} {unit}"


_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def print_explanation(settings: Sequence[Setting], costs: Costs, gen_length: int) -> None:
    """Prints both, no wider than the terminal; options at their default "off" are listed by name only."""
    width = max(min(shutil.get_terminal_size().columns, 110), 40)
    names, values = (min(max(map(len, column)), width // 4) for column in list(zip(*settings, strict=True))[:2])
    usual = [setting.name for setting in settings if _is_left_out(setting)]
    for name, value, origin in (setting for setting in settings if not _is_left_out(setting)):
        head = f"{name:{names}}  {value:{values}}  "
        print("\n".join(textwrap.wrap(head + origin, width, subsequent_indent=" " * min(len(head), width // 2))))
    if usual:
        text = f"not set: {', '.join(usual)}"
        print("\n".join(textwrap.wrap(text, width, subsequent_indent="  ")))
    print()
    for line in list_costs(costs, gen_length):
        print("\n".join(textwrap.wrap(line, width, subsequent_indent="  ")))


def _is_left_out(setting: Setting) -> bool:
    """Whether a setting is off by default, and no choice between parts."""
    unset = setting.origin == "the library" or setting.origin.startswith("default of ")
    return unset and setting.value in ("none", "false") and setting.name not in _CHOICES


_CHOICES = ("chat", "cache", "block_length")
"""Settings that are printed even if they are unset."""


def explanation_json(settings: Sequence[Setting], costs: Costs) -> str:
    """Both as one JSON object; memory in bytes."""
    memory = device_memory()
    fits = None if memory is None else costs.total <= memory
    shown = {**dataclasses.asdict(costs), "total": costs.total, "memory": memory, "fits": fits}
    return json.dumps({"settings": [setting._asdict() for setting in settings], "costs": shown})
