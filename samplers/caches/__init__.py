"""Cache policies by name. A new policy is one file in this folder and one line in `CACHES`."""

import types
from collections.abc import Mapping

from samplers.caches.base import CachePolicy, ForwardRequest, Outcome
from samplers.caches.dual import DualCache
from samplers.caches.exact import ExactCache, SubBlockCache
from samplers.caches.none import NoCache
from samplers.caches.prefix import PrefixCache
from samplers.caches.vicinity import VicinityCache

CACHES: Mapping[str, type] = types.MappingProxyType(
    {
        "none": NoCache,
        "prefix": PrefixCache,
        "dual": DualCache,
        "vicinity": VicinityCache,
        "exact": ExactCache,
        "sub-block": SubBlockCache,
    }
)

__all__ = [
    "CACHES",
    "CachePolicy",
    "DualCache",
    "ExactCache",
    "NoCache",
    "Outcome",
    "PrefixCache",
    "ForwardRequest",
    "SubBlockCache",
    "VicinityCache",
]
