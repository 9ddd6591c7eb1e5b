"""What people write on the command line, `name:option=value,option=value`, read in one place."""

import importlib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dllm_jax.errors import DllmError
from dllm_jax.suggestions import did_you_mean


class Spec(NamedTuple):
    """A name and its options as they were written."""

    name: str
    options: dict[str, str]


def parse(text: str, what: str) -> Spec:
    """Reads ``"eb:gamma=0.1,proxy=entropy"``.

    Args:
        what: named in the errors, such as "sampler".

    Raises:
        DllmError: for an empty name, and as `parse_options`.
    """
    name, _, rest = text.partition(":")
    if not name:
        raise DllmError(f"{what} {text!r} has no name; write it as name:option=value,option=value")
    return Spec(name, parse_options(rest, f"{what} {text!r}"))


def parse_options(text: str, what: str) -> dict[str, str]:
    """Reads ``"gamma=0.1,proxy=entropy"``, or nothing.

    Args:
        what: named in the errors.

    Raises:
        DllmError: for an option without a value, or one given twice.
    """
    options: dict[str, str] = {}
    for item in text.split(",") if text else ():
        option, equals, value = item.partition("=")
        if not option or not equals or not value:
            raise DllmError(f"{what}: {item!r} is no option; write it as option=value")
        if option in options:
            raise DllmError(f"{what} gives {option} twice; leave one out")
        options[option] = value
    return options


def convert_options(options: Mapping[str, str], kinds: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Every option as the type that it should have.

    Args:
        options: option -> what was written.
        kinds: option -> type: int, float, bool, str, a choice of words, a range of two integers (written ``1-3``), or
            a union of these; "none" is read as None where None is allowed.
        what: named in the errors, such as "task maze".

    Raises:
        DllmError: for an option that is not there, or a value that is not of its type.
    """
    for option in options:
        if option not in kinds:
            raise DllmError(f"{what} has no option {option!r}; {did_you_mean(option, kinds, options_sentence(kinds))}")
    return {option: _convert(text, kinds[option], f"{what}: {option}") for option, text in options.items()}


def options_sentence(options: Iterable[str]) -> str:
    """What options there are, for sentences."""
    return f"it has {', '.join(options) or 'none'}"


def import_object(reference: str, what: str) -> Any:
    """What a user's own code is called "module:name".

    Args:
        what: named in the errors, such as "data.source".

    Raises:
        DllmError: when it cannot be imported.
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the user's
        raise DllmError(f"{what} {reference!r} cannot be imported ({error}); write it like module:name") from None


def format_value(value: Any) -> str:
    """A value as it is written in a spec; what `convert_options` reads."""
    if isinstance(value, (list, tuple)):
        return "-".join(map(format_value, value))
    if isinstance(value, float):
        return "inf" if math.isinf(value) else f"{value:.12g}"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def members(kind: Any) -> tuple[Any, ...]:
    """The types that a union allows, and a type itself."""
    united = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if united else (kind,)


def choices(kind: Any) -> tuple[str, ...]:
    """The words that a type allows; none where it is no choice of words."""
    return next((typing.get_args(one) for one in members(kind) if typing.get_origin(one) is typing.Literal), ())


def is_writable(kind: Any) -> bool:
    """Whether a value of this type can be written as a word or a number."""
    return bool({int, float, bool, str} & set(members(kind)) or choices(kind))


def _convert(text: str, kind: Any, what: str) -> Any:
    allowed = members(kind)
    if text.lower() == "none" and type(None) in allowed:
        return None
    if words := choices(kind):
        return _one_of(text, words, what)
    if tuple[int, int] in allowed:
        return _range(text, what)
    if bool in allowed:
        return _one_of(text.lower(), ("true", "false"), what) == "true"
    if float in allowed:
        return _number(float, text, f"{what} {text!r} is no number")
    if int in allowed:
        return _number(int, text, f"{what} {text!r} is no whole number")
    return text


def _number(kind: type, text: str, complaint: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise DllmError(complaint) from None


def _one_of(text: str, choices: tuple[str, ...], what: str) -> str:
    if text not in choices:
        raise DllmError(f"{what} {text!r} is unknown; choose one of {', '.join(choices)}")
    return text


def _range(text: str, what: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    complaint = f"{what} {text!r} is no range; write it as 1-3"
    low_number = _number(int, low, complaint)
    return low_number, _number(int, high, complaint) if dash else low_number
