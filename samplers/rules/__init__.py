"""Unmasking rules by name. A new rule is one file in this folder and one line in `RULES`."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from dllm_jax.errors import DllmError
from samplers.rules.base import BlockView, Rule
from samplers.rules.dream import Dream
from samplers.rules.eb import EB
from samplers.rules.factor import Factor
from samplers.rules.fast_dllm_dream import FastDllmDream
from samplers.rules.llada import LLaDA
from samplers.rules.threshold import Threshold
from samplers.rules.topk import TopK

RULES: Mapping[str, type[Rule]] = types.MappingProxyType(
    {"llada": LLaDA, "dream": Dream, "topk": TopK, "threshold": Threshold, "factor": Factor, "eb": EB}
)

__all__ = [
    "RULES",
    "BlockView",
    "Dream",
    "EB",
    "Factor",
    "FastDllmDream",
    "LLaDA",
    "Rule",
    "Threshold",
    "TopK",
    "make_rule",
]


def make_rule(name: str, **options: Any) -> Rule:
    """A rule by its name and options, e.g. ``make_rule("threshold", threshold=0.8)``.

    Raises:
        DllmError: for an unknown rule, an option it does not have, or a required one that is missing.
    """
    if name not in RULES:
        raise DllmError(f"no unmasking rule is called {name!r}; choose one of {', '.join(RULES)}")
    fields = {field.name: field for field in dataclasses.fields(RULES[name])}  # type: ignore[arg-type]
    if unknown := sorted(set(options) - set(fields)):
        raise DllmError(f"rule {name} has no option {unknown[0]!r}; it has {', '.join(fields)}")
    for option, field in fields.items():
        if option not in options and field.default is dataclasses.MISSING:
            raise DllmError(f"rule {name} needs {option}; pass {option}=...")
        if options.get(option, field) is None and field.default is not None:
            raise DllmError(f"{option} of rule {name} is None; leave it out or give a value")
    return RULES[name](**options)
