"""How often progress bars are printed."""

import sys

SELDOM = 30.0
"""Seconds between two lines in a log."""


def interval() -> float:
    """Seconds between two updates of a bar on the standard error: more in a log, which keeps them all."""
    return 0.2 if sys.stderr.isatty() else SELDOM
