"""Samplers that are no `BlockSampler`, by the names that people write."""

import types
from collections.abc import Callable, Mapping
from typing import Any

from samplers.apd_make import make_apd, make_left_right
from samplers.pipeline_make import make_pipeline

MAKERS: Mapping[str, Callable[..., Any]] = types.MappingProxyType(
    {"d2f": make_pipeline, "apd": make_apd, "leftright": make_left_right}
)
"""Name -> what makes such a sampler for a model from plain values."""
