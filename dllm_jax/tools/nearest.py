"""What people may have meant by a name that there is not."""

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
"""Names that others use, and ours."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like another, None where none is; of dotted names the last parts are compared."""
    by_last = {_last(one): one for one in known}
    wanted = _last(name)
    found = [ours for ours in SYNONYMS.get(wanted, ()) if ours in by_last]
    found += difflib.get_close_matches(wanted, by_last, n=1, cutoff=0.7)
    return by_last[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a sentence about an unknown name: a question about the nearest one, or else what is known."""
    near = nearest(name, known)
    return otherwise if near is None else f"did you mean {near!r}?"


def _last(name: str) -> str:
    return name.rpartition(".")[2]
