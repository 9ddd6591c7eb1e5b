"""Cache policies by name. A new policy is one file in this folder and one line in `CACHES`."""

import types
from collections.abc import Mapping
from typing import Any

from samplers.caches.base import CachePolicy, Outcome, Request
from samplers.caches.dual import DualCache
from samplers.caches.none import NoCache
from samplers.caches.prefix import PrefixCache
from samplers.caches.vicinity import VicinityCache
from samplers.checks import make

CACHES: Mapping[str, type] = types.MappingProxyType(
    {"none": NoCache, "prefix": PrefixCache, "dual": DualCache, "vicinity": VicinityCache}
)

__all__ = [
    "CACHES",
    "CachePolicy",
    "DualCache",
    "NoCache",
    "Outcome",
    "PrefixCache",
    "Request",
    "VicinityCache",
    "make_cache",
]


def make_cache(name: str, **options: Any) -> CachePolicy:
    """A cache policy by its name and options, e.g. ``make_cache("vicinity", warmup=2)``.

    Raises:
        DllmError: for a name that is not in `CACHES`, or an option that the policy does not have.
    """
    return make("cache policy", CACHES, name, options)
