"""How often progress bars say how far they are."""

import sys

SELDOM = 30.0
"""Seconds between two words where nobody watches."""


def interval() -> float:
    """Seconds between two words of a bar on the standard error: rarely where that is a log, which keeps all of them."""
    return 0.2 if sys.stderr.isatty() else SELDOM
