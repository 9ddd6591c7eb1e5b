"""Figures 6 and 7 of EB-Sampler (arXiv 2505.24857): puzzles solved against forwards, EB against Top-k."""

import types
from collections.abc import Mapping

from dllm_jax.errors import DllmError
from evals import plots
from evals.sampler import SamplerSpec, parse_samplers
from evals.sweeps import Sweep, curves, title

# The paper lists neither gammas nor ks for the puzzles; these cover its curves from one token per forward to all.
GAMMAS = (0, 0.00001, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 1, 2, 4, 8, float("inf"))
KS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
PROXIES = ("confidence", "entropy", "margin")

FIGURES: Mapping[str, str] = types.MappingProxyType({"eb-sudoku": "sudoku", "eb-maze": "maze"})
"""Figure -> its task."""


def task_of(figure: str) -> str:
    """The task of a figure.

    Raises:
        DllmError: for a name that is not in `FIGURES`.
    """
    if figure not in FIGURES:
        raise DllmError(f"no figure is called {figure!r}; choose one of {', '.join(FIGURES)}")
    return FIGURES[figure]


def samplers() -> list[SamplerSpec]:
    """Both samplers with all three proxies: 75 points, six programs."""
    gammas, ks, proxies = ("|".join(map(str, values)) for values in (GAMMAS, KS, PROXIES))
    specs = [f"eb:proxy={proxies},gamma={gammas}", f"topk:proxy={proxies},k={ks}"]
    return [sampler for spec in specs for sampler in parse_samplers(spec)]


def plot(found: Sweep) -> bytes:
    """Accuracy against mean forwards, linear, as in the paper, as a PNG."""
    return plots.draw([plots.Panel("mean forwards (NFE)", curves(found, "nfe"))], title(found))
