"""The figures of papers, each one command: a task, the samplers of every curve, panels, and comparisons in words.

Figures 6 and 7 of EB-Sampler (arXiv 2505.24857), Figures 3, 4 and 6 and Table 2 of APD (arXiv 2506.00413), the tables
of Fast-dLLM (arXiv 2505.22618), D2F (arXiv 2508.09192), NI-Sampling (arXiv 2604.18471), dInfer and its trajectory
compression (arXiv 2510.08666) as curves. A new figure is an entry in `FIGURES`.
"""

import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any

from evals.figures import EqualAccuracy, Figure, FigureLine, FigurePanel


def _against(plain: str, *labels: str, baseline: str = "threshold") -> list[EqualAccuracy]:
    """Comparisons of lines with a plain one, each under its own label."""
    return [EqualAccuracy(label, plain, label, label, baseline) for label in labels if label != plain]


def _labels(lines: Sequence[FigureLine]) -> list[str]:
    return [line.label for line in lines]


def _panels(groups: Mapping[Any, Sequence[FigureLine]]) -> list[FigurePanel]:
    """Forwards and speed of every group of lines."""
    costs = ("nfe", "tokens_per_second")
    return [FigurePanel(cost, lines=_labels(lines)) for lines in groups.values() for cost in costs]


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
_DRAWN = "temperature=0.2,top_p=0.95"
_NOISES = {
    "shared": "APD, shared noise, temperature 0.2",
    "independent": "APD, independent noise, temperature 0.2",
    "none": "APD, no noise, temperature 0.2",
}
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
    *(
        FigureLine(label, [f"apd:verifier={{verifier}},weight=0.3|0.5|0.7,noise={noise},{_DRAWN}"])
        for noise, label in _NOISES.items()
    ),
    FigureLine("left to right, temperature 0.2", [f"{_ONE},{_DRAWN}"]),
    FigureLine("verifier alone, temperature 0.2", [f"leftright:window=1,lookahead=1,{_DRAWN}@{{verifier}}"]),
    FigureLine("autoregressive model", ["leftright:window=1,lookahead=1@{ar}"]),
    FigureLine("APD, verified by it", ["apd:verifier={ar},weight=0.1|0.3|0.5|0.7|0.9"]),
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
_TEACHER, _BLOCK_MODEL = "teacher, threshold", "block diffusion model"
_D2F = [
    FigureLine("teacher, one token per forward", ["topk:k=1"]),
    FigureLine(_TEACHER, [f"threshold:{_D2F_THRESHOLDS},block_length=32|64"], front=True),
    FigureLine("teacher, Fast-dLLM", [f"threshold:{_D2F_THRESHOLDS},cache=dual,{_D2F_BLOCKS}"], front=True),
    FigureLine("D2F", [f"d2f:{_D2F_BLOCKS},tau_add=0.1,tau_act=0.95,{_D2F_THRESHOLDS}@{{student}}"], front=True),
    FigureLine(
        "D2F, one block in flight",
        [f"d2f:{_D2F_BLOCKS},tau_add=0.1,tau_act=0.95,{_D2F_THRESHOLDS},in_flight=1@{{student}}"],
        front=True,
    ),
    *(
        FigureLine(
            f"D2F, tau_act {tau_act}",
            [f"d2f:{_D2F_BLOCKS},tau_add=0.1|0.5|0.7|0.9|0.95,tau_act={tau_act},threshold=0.9@{{student}}"],
            front=True,
        )
        for tau_act in (0.5, 0.95)
    ),
    FigureLine(
        "D2F, single state", [f"d2f:{_D2F_BLOCKS},tau_add=0.95,tau_act=0.95,{_D2F_THRESHOLDS}@{{student}}"], front=True
    ),
    FigureLine(
        "D2F, EB inside",
        [f"d2f:{_D2F_BLOCKS},tau_add=0.1,tau_act=0.95,rule=eb,gamma=0.01|0.1|0.25|0.5|1@{{student}}"],
        front=True,
    ),
    FigureLine(_BLOCK_MODEL, [f"threshold:{_D2F_THRESHOLDS}@{{block_model}}"], front=True),
    FigureLine("autoregressive, cached", ["leftright:window=1,lookahead=1@{ar}"]),
]

_HIERARCHICAL = "threshold=0.8|0.92|0.95"
_THRESHOLDS = "threshold:threshold=0.3|0.5|0.7|0.8|0.9|0.95"
# A cache, its name, and the positions that the indicator scores: those of every forward.
_NI_CACHES = (("none", "no cache", "rest"), ("prefix", "prefix cache", "rest"), ("dual", "dual cache", "block"))
# A base rule, its numbers alone, and those with the indicator: their defaults.
_NI_BASES = (
    ("eb", "gamma=0.01|0.03|0.1|0.3|1", "gamma=0.1"),
    ("credit", "threshold=0.7|0.8|0.9|0.95", "threshold=0.8"),
    ("hierarchical", f"{_HIERARCHICAL},low_threshold=0.62", "threshold=0.92,low_threshold=0.62"),
)


def _indicated(label: str, base: str, cache: str, scope: str) -> FigureLine:
    options = f"{base},indicator_threshold=0.5|0.6|0.7|0.8|0.9,scope={scope},cache={cache}"
    return FigureLine(label, [f"ni:indicator={{indicator}},{options},block_length={{block_length}}"])


_NI = {
    name: [
        FigureLine(f"threshold, {name}", [f"{_THRESHOLDS},cache={cache},block_length={{block_length}}"]),
        _indicated(f"NI and threshold 0.9, {name}", "threshold=0.9", cache, scope),
        *(
            line
            for base, alone, number in _NI_BASES
            for line in (
                FigureLine(f"{base}, {name}", [f"{base}:{alone},cache={cache},block_length={{block_length}}"]),
                _indicated(f"NI and {base}, {name}", f"base={base},{number}", cache, scope),
            )
        ),
    ]
    for cache, name, scope in _NI_CACHES
}
_NI["dual cache"].append(_indicated("NI and threshold 0.9, dual cache, rest", "threshold=0.9", "dual", "rest"))

_BEFORE, _AFTER, _CONTROL = "before compression", "after compression", "control: same texts, random masks"
_COMPRESSION = [
    FigureLine(_BEFORE, [f"{_THRESHOLDS},block_length={{block_length}}"]),
    FigureLine(_AFTER, [f"{_THRESHOLDS},block_length={{block_length}}@{{compressed}}"]),
    FigureLine(_CONTROL, [f"{_THRESHOLDS},block_length={{block_length}}@{{control}}"]),
]

# dInfer's tables: its decoders with and without smoothing under every cache, of one model and of a compressed one.
_DINFER_RULES = {
    "threshold": "threshold:threshold=0.7|0.8|0.9|0.95,tolerance=1e-05,skip_masks=true",
    "credit": "credit:threshold=0.7|0.8|0.9|0.95",
    "hierarchical": f"hierarchical:{_HIERARCHICAL},low_threshold=0.62",
}
_DINFER_CACHES = {"none": "no cache", "dual": "dual cache", "vicinity": "vicinity"}
_DINFER = {
    (model, name): [
        FigureLine(f"{model}{rule}{also}, {name}", [f"{spec},cache={cache},block_length=32{option}{at}"])
        for also, option in (("", ""), (" and smoothing", ",smoothing=true"))
        for rule, spec in _DINFER_RULES.items()
    ]
    for model, at in (("", ""), ("compressed, ", "@{compressed}"))
    for cache, name in _DINFER_CACHES.items()
}

_FAST_CACHES = {"none": "no cache", "prefix": "prefix cache", "dual": "dual cache"}
_FAST_BLOCKS = "block_length=8|16|32|64"
_FAST_RULES = {
    "threshold": "threshold:threshold=0.5|0.7|0.8|0.9|0.95|0.99",
    "factor": "factor:factor=0.1|0.25|0.5|1|2",
}
_FAST = [
    FigureLine(f"{rule}, {name}", [f"{spec},cache={cache},{_FAST_BLOCKS}"], front=True)
    for cache, name in _FAST_CACHES.items()
    for rule, spec in _FAST_RULES.items()
]

# A model that is read causally and drafts blocks: its three modes, and APD with itself as the verifier.
_THRESHOLD = "block diffusion, threshold"
_SELF_BLOCKS = "block_length=4|8|16|32"
_NEMOTRON_RULES = {
    _THRESHOLD: "threshold:threshold=0.5|0.7|0.8|0.9|0.95|0.99",
    "block diffusion, EB": "eb:gamma=0.01|0.03|0.1|0.3|1",
    "block diffusion, credit": "credit:threshold=0.7|0.8|0.9|0.95",
    "block diffusion, hierarchical": f"hierarchical:{_HIERARCHICAL},low_threshold=0.62",
    "block diffusion, factor": "factor:factor=0.1|0.25|0.5|1|2",
}
_SELF = "self-speculation"
_NEMOTRON = [
    FigureLine("autoregressive", ["autoregressive"]),
    FigureLine("block diffusion, one token per forward", ["topk:k=1,block_length=8|32"]),
    *(FigureLine(name, [f"{spec},block_length=8|32"], front=True) for name, spec in _NEMOTRON_RULES.items()),
    FigureLine(_SELF, [f"{_SELF}:{_SELF_BLOCKS}"]),
    FigureLine(f"{_SELF}, draft adapter", [f"{_SELF}:{_SELF_BLOCKS}@{{drafting}}"]),
    FigureLine(f"{_SELF}, drafts by a threshold", [f"{_SELF}:{_SELF_BLOCKS},rule=threshold,threshold=0.5|0.9"]),
    FigureLine("APD, verified by itself", ["apd:verifier=self,weight=0|0.1|0.3|0.5|0.7|0.9,lookahead=32,window=1"]),
    FigureLine("D2F", ["d2f:block_length=16,tau_add=0.1,threshold=0.5|0.7|0.9|0.95@{student}"]),
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
                "--ar": _flag("autoregressive model of the diffusion model's size", metavar="DIR_OR_NAME"),
                "--few-programs": _flag(
                    "one program per curve; the speed of small W and M is then that of the largest",
                    action="store_true",
                ),
            },
            _against(*_NOISES.values(), baseline="shared noise"),
            columns=4,
        ),
        "fast-dllm": Figure(
            "Fast-dLLM: threshold and factor with every cache and block length",
            _LONG_PROBLEMS,
            [FigureLine("one token per forward", ["topk:k=1"]), *_FAST],
            [FigurePanel("nfe"), FigurePanel("tokens_per_second")],
            comparisons=_against(*_labels(_FAST)),
        ),
        "dinfer": Figure(
            "dInfer's decoders, smoothing and caches",
            _LONG_PROBLEMS,
            list(itertools.chain(*_DINFER.values())),
            _panels(_DINFER),
            {"--compressed": _flag("model that trajectory compression trained", metavar="DIR_OR_NAME")},
            [
                compared
                for (_, name), lines in _DINFER.items()
                for compared in _against(f"threshold, {name}", *_labels(lines))
            ],
        ),
        "d2f": Figure(
            "D2F against its teacher and an autoregressive model",
            _LONG_PROBLEMS,
            _D2F,
            [FigurePanel("nfe"), FigurePanel("tokens_per_second")],
            {
                "--student": _flag("model that D2F trained", required=True, metavar="DIR_OR_NAME"),
                "--block-model": _flag("block diffusion model of the same tokens", metavar="DIR_OR_NAME"),
                "--ar": _flag("autoregressive model of the same tokens", metavar="DIR_OR_NAME"),
            },
            _against(_TEACHER, "D2F", "D2F, one block in flight", "D2F, single state", _BLOCK_MODEL),
        ),
        "ni": Figure(
            "NI-Sampling against confidence thresholds",
            _FREE_WORDS,
            list(itertools.chain(*_NI.values())),
            _panels(_NI),
            {
                "--indicator": _flag(
                    "trained indicator; repeatable, for several seeds", action="append", required=True, metavar="DIR"
                ),
                "--block-length": _BLOCK_LENGTH,
            },
            [compared for lines in _NI.values() for compared in _against(*_labels(lines))],
        ),
        "nemotron": Figure(
            "Nemotron-Labs-Diffusion's three modes on a model of one's own",
            _LONG_PROBLEMS,
            _NEMOTRON,
            # Without APD, whose forwards do not count its verifier's, which are of the same model.
            [FigurePanel(cost, lines=[*_labels(_NEMOTRON[:-2]), "D2F"]) for cost in ("tokens_per_forward", "nfe")],
            {
                "--drafting": _flag("the model with a draft adapter", metavar="DIR_OR_NAME"),
                "--student": _flag("model that D2F trained", metavar="DIR_OR_NAME"),
            },
            _against(_THRESHOLD, *_NEMOTRON_RULES, _SELF, f"{_SELF}, draft adapter"),
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
            _against(_BEFORE, _AFTER, _CONTROL),
        ),
    }
)
"""Name -> figure."""
