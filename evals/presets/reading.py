"""Presets as they are written: a TOML file for each family.

A file has `[defaults]`, tables `[group.NAME]` and `[preset]`, whose keys are names. A group's settings are those of
every preset in whose name all the group's parts occur ("512/prefix" in "gsm8k/512/prefix"; "math|mbpp" is either), in
the order of the file; later ones count more, and what a preset says itself most. `sampler` is a table, "name" and
options, which are inherited one by one; warnings add up. `published` is a list in a preset, and in defaults and groups
a table of what its entries share. `tasks.toml` has the metrics of each task, and warnings.
"""

import functools
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dllm_jax import spec
from dllm_jax.errors import DllmError
from evals.presets.preset import Preset
from samplers.config.sampler_config import read_options
from train.settings import build_settings

FOLDER = Path(__file__).parent
TASKS_FILE = "tasks.toml"

_STATED = ("model", "task", "shots", "form", "bos", "metrics", "status", "source")


def read(folder: str | Path = FOLDER) -> tuple[dict[str, Preset], list[str]]:
    """All presets of a folder's files by name, and a sentence for everything in them that makes no sense."""
    found: dict[str, Preset] = {}
    faults: list[str] = []
    tasks = _table(Path(folder) / TASKS_FILE, faults)
    for path in sorted(Path(folder).glob("*.toml")):
        if path.name != TASKS_FILE:
            for name, values in _settings_by_name(path, faults).items():
                try:
                    found[name] = _preset(name, _merge_layers([tasks.get(str(values.get("task")), {}), values]))
                except DllmError as error:
                    faults.append(str(error) if str(error).startswith(name) else f"{name}: {error}")
    return found, faults


@functools.cache
def presets() -> Mapping[str, Preset]:
    """The presets of this library by name.

    Raises:
        DllmError: for the first of what makes no sense in their files.
    """
    found, faults = read()
    if faults:
        raise DllmError(faults[0])
    return types.MappingProxyType(found)


def _table(path: Path, faults: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        faults.append(f"{path} could not be read as TOML ({error})")
        return {}


def _settings_by_name(path: Path, faults: list[str]) -> dict[str, dict[str, Any]]:
    """Name -> settings, each with all that it inherits."""
    table = _table(path, faults)
    defaults, groups, named = (table.get(key, {}) for key in ("defaults", "group", "preset"))
    if wrong := [key for key, one in (*groups.items(), *named.items()) if not isinstance(one, dict)]:
        faults.append(f"{path}: {wrong[0]!r} is no table; write its settings as [group.NAME] or NAME = {{ ... }}")
        return {}
    faults += [f"{path}: there is no table {key!r}" for key in table if key not in ("defaults", "group", "preset")]
    used: set[str] = set()
    found = {}
    for name, own in named.items():
        parts = set(name.split("/"))
        taken = [group for group in groups if all(parts & set(part.split("|")) for part in group.split("/"))]
        used.update(taken)
        layers = [defaults, *(groups[group] for group in taken), own]
        found[f"{path.stem}/{name}"] = _merge_layers(layers)
    faults += [f"{path}: group {group!r} belongs to no preset" for group in groups if group not in used]
    return found


def _merge_layers(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """One table of several, the last counting most; what is of the wrong type stays, to be found later."""
    found = {key: value for layer in layers for key, value in layer.items()}
    if tables := _values_of(dict, "sampler", layers):
        found["sampler"] = {key: value for table in tables for key, value in table.items()}
    if lists := _values_of(list, "warnings", layers):
        found["warnings"] = [sentence for some in lists for sentence in some]
    *above, last = layers
    shared = {key: value for table in _values_of(dict, "published", above) for key, value in table.items()}
    own = last.get("published", [])
    found["published"] = (
        [shared | one if isinstance(one, dict) else one for one in own] if isinstance(own, list) else own
    )
    return found


def _values_of(kind: type, key: str, layers: list[dict[str, Any]]) -> list[Any]:
    """The values of a key in the layers; none if one of them has another type."""
    found = [layer[key] for layer in layers if key in layer]
    return found if all(isinstance(value, kind) for value in found) else []


def _preset(name: str, values: Mapping[str, Any]) -> Preset:
    for field in _STATED:
        if field not in values:
            raise DllmError(f"{name}: {field} is not stated; write it into the preset, its group or the defaults")
    sampler = values.get("sampler", {})
    if not isinstance(sampler, dict):
        raise DllmError(f'{name}: sampler is {sampler!r}; write a table, as in sampler = {{ name = "llada" }}')
    values = {**values, "name": name, "sampler": _spec(name, sampler) if sampler else ""}
    return build_settings(Preset, values, f"{name}: ")


def _spec(name: str, table: Mapping[str, Any]) -> str:
    options = {option: spec.format_value(value) for option, value in table.items() if option != "name"}
    if "name" not in table:
        raise DllmError(f"{name}: the sampler has no name; write one next to {', '.join(options)}")
    return str(read_options(table["name"], options))
