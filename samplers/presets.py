"""Published settings by name: options of `generate` and `make_sampler`, which any other option may change."""

import types
from collections.abc import Mapping
from typing import Any

from dllm_jax.errors import DllmError
from samplers.smoothing import Smoothing

_DINFER = {"gen_length": 1024, "block_length": 64, "align_blocks": True, "smoothing": Smoothing(weight=0.3)}
_VICINITY = {"cache": "vicinity", "prefix_look": 16, "after_look": 16, "warmup": 4}
_THRESHOLD = {"rule": "threshold", "threshold": 0.8, "tolerance": 1e-5, "skip_masks": True}

PRESETS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        # dInfer (arXiv 2510.08666), the three rows of its main table.
        "llada-moe-no-cache": {**_DINFER, "rule": "credit", "threshold": 0.8, "cache": "none"},
        "llada-moe-cache": {**_DINFER, **_VICINITY, **_THRESHOLD},
        "llada-moe-td": {**_DINFER, **_VICINITY, "rule": "hierarchical", "threshold": 0.92, "low_threshold": 0.62},
        # Fast-dLLM (arXiv 2505.22618), the baseline of most papers.
        "fast-dllm": {"rule": "threshold", "threshold": 0.9, "cache": "dual", "gen_length": 256, "block_length": 32},
    }
)


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """The options of a published setting: ``generate(model, prompt, **preset("llada-moe-cache", gen_length=256))``.

    Args:
        name: a key of `PRESETS`: dInfer's "llada-moe-no-cache" (credit decoding and iteration smoothing),
            "llada-moe-cache" (threshold, smoothing, vicinity refresh) and "llada-moe-td" (hierarchical, smoothing,
            vicinity refresh; for a model with compressed trajectories), or "fast-dllm" (threshold and dual cache).
        changes: options that replace or join the preset's. Another rule or cache policy drops the numbers of the
            preset's own.

    Raises:
        DllmError: for a name that is not in `PRESETS`.
    """
    if name not in PRESETS:
        raise DllmError(f"no preset is called {name!r}; choose one of {', '.join(PRESETS)}")
    options = dict(PRESETS[name])
    if changes.get("rule", options["rule"]) != options["rule"]:
        options = {key: value for key, value in options.items() if key not in _RULE_NUMBERS}
    if changes.get("cache", options["cache"]) != options["cache"]:
        options = {key: value for key, value in options.items() if key not in _VICINITY}
    return {**options, **changes}


_RULE_NUMBERS = {*_THRESHOLD, "low_threshold"}
