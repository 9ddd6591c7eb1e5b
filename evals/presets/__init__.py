"""The papers' benchmarks as data: what each published number was measured with, and what is known of it."""

import difflib

from dllm_jax.errors import DllmError
from evals.presets.checks import check
from evals.presets.preset import FORMS, Preset, Published, modified, resolved
from evals.presets.reading import presets
from evals.presets.report import Comparison, Row, comparison

__all__ = [
    "FORMS",
    "Comparison",
    "Preset",
    "Published",
    "Row",
    "check",
    "comparison",
    "find",
    "modified",
    "presets",
    "resolved",
]


def find(name: str) -> Preset:
    """The preset of that name.

    Raises:
        DllmError: for any other name; the sentence has the nearest.
    """
    known = presets()
    if name in known:
        return known[name]
    near = [one for one in known if one.startswith(f"{name}/")][:3]
    near = near or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    advice = f"did you mean {', '.join(near)}?" if near else "python -m evals presets lists them"
    raise DllmError(f"no preset is called {name!r}; {advice}")
