"""The papers' benchmarks as data: what each published number was measured with, and what is known of it."""

import difflib
from collections.abc import Mapping
from typing import Any

from dllm_jax.errors import DllmError
from evals.presets.checks import check
from evals.presets.preset import FORMS, Preset, PublishedScore, describe_preset, modify
from evals.presets.reading import presets
from evals.presets.report import Comparison, ScoreRow, comparison
from samplers.config.sampler_config import parse_sampler

__all__ = [
    "FORMS",
    "Comparison",
    "Preset",
    "PublishedScore",
    "ScoreRow",
    "check",
    "comparison",
    "find",
    "modify",
    "presets",
    "select",
    "describe_preset",
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


def select(
    preset: str | None, sampler: str | None, form: str | None, changes: Mapping[str, Any]
) -> tuple[Preset, list[str]]:
    """The preset of a name, or one made of a sampler, and how it differs from the published setting.

    Args:
        sampler: as it is written, without a preset; without either, likelihoods are scored.
        form: of prompts; "raw" by default without a preset.
        changes: fields of the preset, or options of its sampler.

    Raises:
        DllmError: for both a preset and a sampler, and as `find` and `modify`.
    """
    if preset is not None and sampler is not None:
        raise DllmError("pass a preset or a sampler, not both; a preset's is changed by its options")
    if preset is not None:
        return modify(find(preset), **changes, **({} if form is None else {"form": form}))
    own: dict[str, Any] = {"name": "own", "model": "", "task": "", "shots": None, "form": form or "raw"}
    own |= {"kind": "likelihood"} if sampler is None else {"sampler": str(parse_sampler(sampler))}
    return modify(Preset(**own), **changes)[0], []
