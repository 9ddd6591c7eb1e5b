"""The figures of papers, each one command: a task, the samplers of every curve, panels, and comparisons in words.

Figures 6 and 7 of EB-Sampler (arXiv 2505.24857), Figures 3, 4 and 6 and Table 2 of APD (arXiv 2506.00413), the tables
of D2F (arXiv 2508.09192), of NI-Sampling (arXiv 2604.18471) and of dInfer's trajectory compression (arXiv 2510.08666)
as curves. A new figure is an entry in `FIGURES`.
"""

import types
from collections.abc import Mapping
from typing import Any

from evals.figures import EqualAccuracy, Figure, FigureLine, FigurePanel

# The paper lists neither gammas nor ks for the puzzles; these cover its curves from one token per forward to all.
_EB = [
    *(
        FigureLine(
            f"eb:proxy={proxy}",
            [f"eb:proxy={proxy},gamma=0|1e-05|0.0001|0.0003|0.001|0.003|0.01|0.03|0.1|0.3|0.5|1|2|4|8|inf"],
        )
        for proxy in ("confidence", "entropy", "margin")
    ),
    *(
        FigureLine(f"topk:proxy={proxy}", [f"topk:proxy={proxy},k=1|2|3|4|6|8|12|16|32"])
        for proxy in ("confidence", "entropy", "margin")
    ),
]

_WEIGHTS, _STEPS = "APD, R (no W, no M)", "fixed k, left to right"
_LOOKAHEADS, _WINDOWS = "lookahead M, k = 1", "window W, k = 1"
_ONE = "leftright:tokens_per_step=1"
_APD = [
    FigureLine(_WEIGHTS, ["apd:verifier={verifier},weight=0.1|0.2|0.3|0.4|0.5|0.6|0.7|0.8|0.9"]),
    FigureLine(_STEPS, ["leftright:tokens_per_step=1|2|3|4|5|6|7|8"]),
    FigureLine(_LOOKAHEADS, [_ONE, f"{_ONE},lookahead=64|32|16|8|4"], few_programs=",most_lookahead=64"),
    FigureLine(_WINDOWS, [_ONE, f"{_ONE},window=64|32|16|8|4|1"], few_programs=",most_window=64"),
    FigureLine(
        "APD, R x W x M",
        ["apd:verifier={verifier},weight=0.5|0.6|0.7|0.8,window=8|16|32,lookahead=8|16|32"],
        few_programs=",most_window=32,most_lookahead=32",
        front=True,
    ),
    FigureLine("verifier alone", ["leftright:window=1,lookahead=1@{verifier}"]),
]
_SWEPT = (
    ("R", _WEIGHTS, "weight", "committed_per_forward"),
    ("k", _STEPS, "tokens_per_step", "committed_per_forward"),
    ("M", _LOOKAHEADS, "lookahead", "tokens"),
    ("W", _WINDOWS, "window", "tokens"),
)
_APD_PANELS = [
    *(FigurePanel(name, "accuracy", [label], option) for name, label, option, _ in _SWEPT),
    *(FigurePanel(name, "tokens_per_second", [label], option) for name, label, option, _ in _SWEPT),
    *(FigurePanel(name, written, [label], option) for name, label, option, written in _SWEPT),
    FigurePanel("tokens_per_forward"),
    FigurePanel("tokens_per_second"),
]

_D2F_BLOCKS, _D2F_THRESHOLDS = "block_length=8|16|32", "threshold=0.5|0.7|0.8|0.9|0.95"
_D2F = [
    FigureLine("teacher, one token per forward", ["topk:k=1"]),
    FigureLine("teacher, Fast-dLLM", [f"threshold:{_D2F_THRESHOLDS},cache=dual,{_D2F_BLOCKS}"], front=True),
    FigureLine("D2F", [f"d2f:{_D2F_BLOCKS},tau_add=0.1,tau_act=0.95,{_D2F_THRESHOLDS}@{{student}}"], front=True),
    FigureLine(
        "D2F, single state", [f"d2f:{_D2F_BLOCKS},tau_add=0.95,tau_act=0.95,{_D2F_THRESHOLDS}@{{student}}"], front=True
    ),
    FigureLine(
        "D2F, EB inside",
        [f"d2f:{_D2F_BLOCKS},tau_add=0.1,tau_act=0.95,rule=eb,gamma=0.01|0.1|0.25|0.5|1@{{student}}"],
        front=True,
    ),
    FigureLine("autoregressive, cached", ["leftright:window=1,lookahead=1@{ar}"]),
]

_THRESHOLDS = "threshold:threshold=0.3|0.5|0.7|0.8|0.9|0.95"
# A cache, its name, and the positions that the indicator scores: those of every forward.
_NI_CACHES = (("none", "no cache", "rest"), ("prefix", "prefix cache", "rest"), ("dual", "dual cache", "block"))
_NI_LABELS = {name: (f"threshold, {name}", f"NI and threshold 0.9, {name}") for _, name, _ in _NI_CACHES}
_NI = [
    line
    for cache, name, scope in _NI_CACHES
    for plain, helped in [_NI_LABELS[name]]
    for line in (
        FigureLine(plain, [f"{_THRESHOLDS},cache={cache},block_length={{block_length}}"]),
        FigureLine(
            helped,
            [
                "ni:indicator={indicator},threshold=0.9,indicator_threshold=0.5|0.6|0.7|0.8|0.9,"
                f"scope={scope},cache={cache},block_length={{block_length}}"
            ],
        ),
    )
]

_BEFORE, _AFTER, _CONTROL = "before compression", "after compression", "control: same texts, random masks"
_COMPRESSION = [
    FigureLine(_BEFORE, [f"{_THRESHOLDS},block_length={{block_length}}"]),
    FigureLine(_AFTER, [f"{_THRESHOLDS},block_length={{block_length}}@{{compressed}}"]),
    FigureLine(_CONTROL, [f"{_THRESHOLDS},block_length={{block_length}}@{{control}}"]),
]

_LONG_PROBLEMS = "word-problems:difficulty=long"
_FREE_WORDS = f"{_LONG_PROBLEMS},steps=4-6,wording=free"


def _flag(about: str, **more: Any) -> Mapping[str, Any]:
    return {"help": about, **more}


_BLOCK_LENGTH = _flag("of all samplers (default: 16)", type=int, default=16, metavar="N")

FIGURES: Mapping[str, Figure] = types.MappingProxyType(
    {
        "eb-sudoku": Figure("EB-Sampler's Figure 7", "sudoku", _EB, [FigurePanel("nfe", front=False)], n=2000),
        "eb-maze": Figure("EB-Sampler's Figure 6", "maze", _EB, [FigurePanel("nfe", front=False)], n=2000),
        "apd": Figure(
            "APD's Figures 3, 4 and 6 and Table 2",
            _LONG_PROBLEMS,
            _APD,
            _APD_PANELS,
            {
                "--verifier": _flag("autoregressive model of the same tokens", required=True, metavar="DIR_OR_NAME"),
                "--few-programs": _flag(
                    "one program per curve; the speed of small W and M is then that of the largest",
                    action="store_true",
                ),
            },
            columns=4,
        ),
        "d2f": Figure(
            "D2F against its teacher and an autoregressive model",
            _LONG_PROBLEMS,
            _D2F,
            [FigurePanel("nfe"), FigurePanel("tokens_per_second")],
            {
                "--student": _flag("model that D2F trained", required=True, metavar="DIR_OR_NAME"),
                "--ar": _flag("autoregressive model of the same tokens", metavar="DIR_OR_NAME"),
            },
        ),
        "ni": Figure(
            "NI-Sampling against confidence thresholds",
            _FREE_WORDS,
            _NI,
            [
                FigurePanel(cost, lines=labels)
                for labels in _NI_LABELS.values()
                for cost in ("nfe", "tokens_per_second")
            ],
            {
                "--indicator": _flag(
                    "trained indicator; repeatable, for several seeds", action="append", required=True, metavar="DIR"
                ),
                "--block-length": _BLOCK_LENGTH,
            },
            [EqualAccuracy(name, *labels, "NI") for name, labels in _NI_LABELS.items()],
        ),
        "compression": Figure(
            "a model before and after trajectory compression",
            _FREE_WORDS,
            _COMPRESSION,
            [FigurePanel("nfe"), FigurePanel("tokens_per_forward")],
            {
                "--compressed": _flag("model that it was trained to", required=True, metavar="DIR_OR_NAME"),
                "--control": _flag("model trained on the same texts by masked diffusion", metavar="DIR_OR_NAME"),
                "--block-length": _BLOCK_LENGTH,
            },
            [EqualAccuracy(label, _BEFORE, label, label) for label in (_AFTER, _CONTROL)],
        ),
    }
)
"""Name -> figure."""
