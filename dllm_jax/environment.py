"""What evaluations and runs of training are recorded with: hardware and versions."""

import os
import platform
from importlib.metadata import version
from typing import Any

import jax

import dllm_jax


def environment() -> dict[str, Any]:
    """`hardware`, of which devices are those of all processes, and `versions`."""
    devices = jax.devices()
    return {
        "hardware": {
            "backend": jax.default_backend(),
            "device": devices[0].device_kind,
            "devices": len(devices),
            "processes": jax.process_count(),
            "machine": platform.machine(),
            "cpu_cores": os.cpu_count(),
        },
        "versions": {
            "dllm_jax": dllm_jax.__version__,
            **{name: version(name) for name in ("jax", "jaxlib", "numpy")},
            "python": platform.python_version(),
        },
    }
