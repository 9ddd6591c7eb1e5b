"""The documentation of a class and its fields, for help, lists and explanations."""

import inspect
import re
from typing import NamedTuple


class About(NamedTuple):
    """The documentation of a field.

    Attributes:
        meaning: what it is.
        why: the reason for its default, the text after "Default:"; may be empty.
    """

    meaning: str = ""
    why: str = ""


def summary(kind: type) -> str:
    """The first paragraph of a class's documentation on one line."""
    return _line((inspect.getdoc(kind) or "").partition("\n\n")[0])


def attributes(kind: type) -> dict[str, About]:
    """Field -> what the documentation of the class, or of the class that it comes from, says under "Attributes:"."""
    sections = [(inspect.getdoc(base) or "").partition("Attributes:\n")[2] for base in reversed(kind.__mro__)]
    found: dict[str, About] = {}
    for names, text in re.findall(r"^    (\w+(?:, \w+)*): (.+(?:\n {8}.+)*)", "\n".join(sections), re.MULTILINE):
        meaning, _, why = _line(text).partition("Default: ")
        found |= dict.fromkeys(names.split(", "), About(meaning.rstrip(), why.removesuffix(".")))
    return found


def _line(text: str) -> str:
    return " ".join(text.split())
