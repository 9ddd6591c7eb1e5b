"""Published settings by name: options of `make_sampler`, which any other option may change.

The settings are the papers', the loop is ours. The recorded cases equal official code token for token; where that has
quirks they run `tests/official.py`: `DInfer` with `DInferVicinity` and `Hierarchical` for "llada-moe-...", `FastDllm`
for "fast-dllm".
"""

import types
from collections.abc import Mapping
from typing import Any

from samplers.tokens.smoothing import Smoothing

_DINFER = {"gen_length": 1024, "block_length": 64, "align_blocks": True, "smoothing": Smoothing(weight=0.3)}
_VICINITY = {"cache": "vicinity", "prefix_look": 16, "after_look": 16, "warmup": 4}

PRESETS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        # dInfer (arXiv 2510.08666), the three rows of its main table; the last is for a model with compressed
        # trajectories.
        "llada-moe-no-cache": {**_DINFER, "rule": "credit", "threshold": 0.8, "cache": "none"},
        "llada-moe-cache": {
            **_DINFER,
            **_VICINITY,
            "rule": "threshold",
            "threshold": 0.8,
            "tolerance": 1e-5,
            "skip_masks": True,
        },
        "llada-moe-td": {**_DINFER, **_VICINITY, "rule": "hierarchical", "threshold": 0.92, "low_threshold": 0.62},
        # Fast-dLLM (arXiv 2505.22618), the baseline of most papers.
        "fast-dllm": {"rule": "threshold", "threshold": 0.9, "cache": "dual", "gen_length": 256, "block_length": 32},
    }
)

_PAPERS = {"llada-moe": "dInfer (arXiv 2510.08666), main table", "fast-dllm": "Fast-dLLM (arXiv 2505.22618)"}


def paper_of(name: str) -> str:
    """The paper that a preset's settings are from."""
    return next(paper for prefix, paper in _PAPERS.items() if name.startswith(prefix))
