"""Unmasking rules by name. A new rule is one file in this folder and one line in `RULES`."""

import types
from collections.abc import Mapping

from samplers.rules.base import BlockView, Rule
from samplers.rules.credit import Credit
from samplers.rules.dream import Dream
from samplers.rules.dynamic import Dynamic
from samplers.rules.eb import EB
from samplers.rules.edit import Edit
from samplers.rules.factor import Factor
from samplers.rules.fast_dllm_v2 import FastDllmV2
from samplers.rules.hierarchical import Hierarchical
from samplers.rules.llada import LLaDA
from samplers.rules.ni import NI
from samplers.rules.remask import Remask
from samplers.rules.threshold import Threshold
from samplers.rules.topk import TopK

RULES: Mapping[str, type[Rule]] = types.MappingProxyType(
    {
        "llada": LLaDA,
        "dream": Dream,
        "topk": TopK,
        "threshold": Threshold,
        "factor": Factor,
        "eb": EB,
        "credit": Credit,
        "hierarchical": Hierarchical,
        "ni": NI,
        "remask": Remask,
        "edit": Edit,
        "dynamic": Dynamic,
        "fast-dllm-v2": FastDllmV2,
    }
)

__all__ = [
    "RULES",
    "BlockView",
    "Credit",
    "Dream",
    "Dynamic",
    "EB",
    "Edit",
    "Factor",
    "FastDllmV2",
    "Hierarchical",
    "LLaDA",
    "NI",
    "Remask",
    "Rule",
    "Threshold",
    "TopK",
]
