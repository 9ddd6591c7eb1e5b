"""Suggestions for unknown names."""

import difflib
import types
from collections.abc import Iterable, Mapping

SYNONYMS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "learning_rate": ("lr",),
        "batch_size": ("batch",),
        "max_new_tokens": ("gen_length",),
        "max_tokens": ("gen_length",),
        "temp": ("temperature",),
        "guidance_scale": ("guidance",),
        "cfg_scale": ("guidance",),
    }
)
"""Names of other libraries -> ours."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar, None where none is. Of dotted names the last parts are compared, those of
    the same table first."""
    known = list(known)
    table, _, wanted = name.rpartition(".")
    for some in ([one for one in known if one.rpartition(".")[0] == table], known):
        lasts = [one.rpartition(".")[2] for one in some]
        found = [ours for ours in SYNONYMS.get(wanted, ()) if ours in lasts]
        found += difflib.get_close_matches(wanted, lasts, n=1, cutoff=0.7)
        if found:
            same = [one for one, last in zip(some, lasts, strict=True) if last == found[0]]
            return difflib.get_close_matches(name, same, n=1, cutoff=0)[0]
    return None


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a sentence about an unknown name: a question about the most similar one, else `otherwise`."""
    near = nearest(name, known)
    return otherwise if near is None else f"did you mean {near!r}?"
