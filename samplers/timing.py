"""Sampling and timing it, with compilation apart."""

import time
from typing import Any

import jax

from samplers.engine import Result, sample_jit

SHORT_RUN = 2.0  # seconds


class Programs:
    """Generations compiled ahead of time, one per sampler structure and shape, so that compiling is timed apart.

    Attributes:
        compiled: how many there are.
        compile_seconds: what they took, together.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self.compile_seconds = 0.0

    @property
    def compiled(self) -> int:
        return len(self._made)

    def run(self, *arguments: Any, **options: Any) -> tuple[Result, float]:
        """Calls `sample_jit`, and says how many seconds it took."""
        leaves, structure = jax.tree.flatten((arguments, options))
        key = (structure, tuple(str(jax.typeof(leaf)) for leaf in leaves))
        first = key not in self._made
        if first:
            start = time.perf_counter()
            self._made[key] = sample_jit.lower(*arguments, **options).compile()
            self.compile_seconds += time.perf_counter() - start
        result, took = _timed(self._made[key], arguments, options)
        if first and took < SHORT_RUN:  # a program's first call also loads it, which shows where it is short
            self.compile_seconds += took
            result, took = _timed(self._made[key], arguments, options)
        return result, took


def _timed(program: Any, arguments: Any, options: Any) -> tuple[Result, float]:
    start = time.perf_counter()
    result = jax.block_until_ready(program(*arguments, **options))
    return result, time.perf_counter() - start
