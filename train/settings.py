"""Settings as frozen dataclasses, read from a TOML file and `key=value` overrides.

A field's range, and whether a resumed run may change it, stand at the field (`setting`).
Nothing is guessed: an unknown key is refused with the nearest known one, a value of another type with the type wanted.
"""

import dataclasses
import json
import math
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from dllm_jax.errors import DllmError
from dllm_jax.suggestions import did_you_mean

T = TypeVar("T")
OnResume = Literal["free", "grow", "allow", "never"]
_RANGE, _ON_RESUME = "range", "on_resume"  # keys of a field's metadata


def setting(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    on_resume: OnResume | None = None,
) -> Any:
    """A field of settings, as `dataclasses.field`, with what holds for its value.

    Args:
        at_least, at_most: range of a number, bounds included.
        on_resume: whether a resumed run may have another value. "free": it may. "grow": a larger one; others by
            `--allow-change`. "allow": by `--allow-change`. "never": states depend on it. A table's value holds for
            its fields without one. Default: "allow".
    """
    metadata = {_RANGE: (at_least, at_most), _ON_RESUME: on_resume}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=metadata)


def range_of(field: "dataclasses.Field[Any]") -> str:
    """A field's range in words, such as "at least 0"; empty where it has none."""
    low, high = field.metadata.get(_RANGE, (-math.inf, math.inf))
    if math.isinf(low):
        return "" if math.isinf(high) else f"at most {high:.10g}"
    return f"at least {low:.10g}" if math.isinf(high) else f"between {low:.10g} and {high:.10g}"


def check_ranges(settings: Any, prefix: str = "") -> None:
    """Raises DllmError for a number of nested settings that is out of its field's range, by its dotted name."""
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{name}.")
        elif range_of(field) and value is not None:
            low, high = field.metadata[_RANGE]
            if not low <= value <= high:
                raise DllmError(f"{name} is {value}; it must be {range_of(field)}")


def on_resume(settings: Any, name: str) -> OnResume:
    """Whether a resumed run may have another value of the setting with this dotted name."""
    found: OnResume = "allow"
    for part in name.split("."):
        fields = dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()
        field = next((field for field in fields if field.name == part), None)
        if field is None:
            break
        found = field.metadata.get(_ON_RESUME) or found
        settings = getattr(settings, part)
    return found


def read_table(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """A TOML file as nested tables, changed by overrides such as ``optimizer.lr=3e-4``.

    An override's value is written as in TOML; words need no quotation marks.

    Raises:
        DllmError: for a file that cannot be read, and for what is no setting.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DllmError(f"the config {path} could not be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise DllmError(f"the config {path} is not valid TOML ({error})") from None
    for override in overrides:
        _override(values, override)
    return values


def to_json(settings: Any) -> str:
    """All settings, defaults included."""
    return json.dumps(dataclasses.asdict(settings), indent=2)


def flat_names(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of nested tables' values, and of the tables."""
    found = []
    for name, value in table.items():
        found += [prefix + name, *(flat_names(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [])]
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old value, new value) of what differs between two nested tables."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in [*old, *(name for name in new if name not in old)]:
        was, now = old.get(name), new.get(name)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            found |= differences(was, now, f"{prefix}{name}.")
        elif was != now:
            found[prefix + name] = (was, now)
    return found


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, written = text.partition("=")
    *tables, name = key.strip().split(".")
    if not equals or not name:
        raise DllmError(f"{text!r} is no setting; write it like optimizer.lr=3e-4")
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        value = written.strip()  # a word without quotation marks
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise DllmError(f"{key.strip()}: {table} is a value, not a table; name a key that exists")
    values[name] = value


def build_settings(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """A settings dataclass from a table.

    Raises:
        DllmError: for unknown or missing keys and values of another type.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise DllmError(unknown_key(prefix + name, [prefix + known for known in fields]))
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in values and not optional:
            raise DllmError(f"{prefix}{name} is not set; write it into the config, or {prefix}{name}=VALUE after it")
    return kind(**{name: convert_value(value, hints[name], prefix + name) for name, value in values.items()})


def unknown_key(name: str, known: Iterable[str]) -> str:
    """The sentence for an unknown name, with the nearest known one."""
    known = list(known)
    return f"there is no setting {name!r}; " + did_you_mean(name, known, f"known: {', '.join(known)}")


def convert_value(value: Any, kind: Any, name: str) -> Any:
    """A TOML value as the type of a field.

    Raises:
        DllmError: when it is of another type; the sentence starts with `name`.
    """
    if typing.get_origin(kind) in (typing.Union, types.UnionType):  # X | None: TOML has no None, but run.json has
        if value is None:
            return None
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return build_settings(typing.cast(type, kind), value, f"{name}.")
    if typing.get_origin(kind) is Literal:
        if value in typing.get_args(kind):
            return value
        raise DllmError(f"{name} is {value!r}; choose one of {', '.join(typing.get_args(kind))}")
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        item = typing.get_args(kind)[1]
        return {key: part if item is Any else convert_value(part, item, f"{name}.{key}") for key, part in value.items()}
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return tuple(convert_value(part, typing.get_args(kind)[0], name) for part in value)
    raise DllmError(f"{name} is {value!r}; it must be {_WANTED.get(typing.get_origin(kind) or kind, 'a table')}")


_WANTED: Mapping[Any, str] = types.MappingProxyType(
    {
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        bool: "true or false",
        tuple: "a list",
        dict: "a table",
    }
)
