"""What the command lines of benchmarks share."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import jax

from dllm_jax import DllmError


def status_of(work: Callable[[], None]) -> int:
    """Runs `work`; the exit status: 0, or 2 after a user's mistake, which is printed as one sentence."""
    try:
        work()
    except DllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(
    options: argparse.Namespace,
    report: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[list[dict[str, Any]]], None],
) -> int:
    """Measures, shows the rows and writes the file of `--json`; the exit status, 2 after a mistake.

    Args:
        options: among them `dtype`, None for the device's usual one, and `json`.
        report: everything that is measured, its `rows` among it.
        show: prints the rows.
    """
    options.dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")

    def work() -> None:
        result = report(options)
        show(result["rows"])
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")

    return status_of(work)
