"""All settings of a command with meanings, ranges and defaults: `python -m train COMMAND --settings`."""

import dataclasses
import json
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from dllm_jax.cli import docs
from train.settings import range_of

_FIXED = "command"  # no setting, but the command that has them


def listing(kind: type, width: int = 120) -> str:
    """The settings of a class as a TOML file, with comments; each at its default, those without one, or with None,
    left out, as a comment.

    Args:
        kind: of nested frozen dataclasses, whose docstrings say what their fields are.
        width: of the comments.
    """
    return "\n".join(_table(kind, "", width)).strip() + "\n"


def _table(kind: type, prefix: str, width: int) -> Iterator[str]:
    hints, about = typing.get_type_hints(kind), docs.attributes(kind)
    parts = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            parts.append(field.name)
        elif field.name != _FIXED:
            meaning, bounds = about.get(field.name, docs.About()).meaning, range_of(field)
            yield from _comment(f"{meaning.removesuffix('.')} ({bounds})." if bounds else meaning, width)
            yield _line(field)
    for name in parts:
        yield from ("", f"# {docs.summary(hints[name])}", f"[{prefix}{name}]")
        yield from _table(hints[name], f"{prefix}{name}.", width)


def _comment(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="# ", subsequent_indent="# ")


def _line(field: "dataclasses.Field[Any]") -> str:
    value: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    return f"# {field.name} = ..." if value in (dataclasses.MISSING, None) else f"{field.name} = {json.dumps(value)}"
