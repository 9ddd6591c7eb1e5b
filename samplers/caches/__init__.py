"""Cache policies by name. A new policy is one file in this folder and one line in `CACHES`."""

import types
from collections.abc import Mapping

from dllm_jax.errors import DllmError
from samplers.caches.base import CachePolicy, DenoiserLike, Outcome, Request
from samplers.caches.dual import DualCache
from samplers.caches.none import NoCache
from samplers.caches.prefix import PrefixCache

CACHES: Mapping[str, type] = types.MappingProxyType({"none": NoCache, "prefix": PrefixCache, "dual": DualCache})

__all__ = [
    "CACHES",
    "CachePolicy",
    "DenoiserLike",
    "DualCache",
    "NoCache",
    "Outcome",
    "PrefixCache",
    "Request",
    "make_cache",
]


def make_cache(name: str) -> CachePolicy:
    """A cache policy by its name.

    Raises:
        DllmError: for a name that is not in `CACHES`.
    """
    if name not in CACHES:
        raise DllmError(f"no cache policy is called {name!r}; choose one of {', '.join(CACHES)}")
    return CACHES[name]()
