"""What is on this machine, which implementation each operation takes there, and whether each is right."""

import math
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from dllm_jax.kernels import OPERATIONS
from dllm_jax.kernels.checks import MOST, describe
from dllm_jax.kernels.dispatch import Kernel, Operation, capability, on_device, platform_of, why_not

PACKAGES = ("dllm_jax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "flax", "numpy", "tokamax")
SETTINGS = ("JAX_", "XLA_", "CUDA_VISIBLE", "TPU_", "TF_CPP_")
"""Beginnings of names of environment variables that change what runs."""

PLATFORMS = {"cuda": "NVIDIA GPUs", "tpu": "TPUs"}


def examine() -> dict[str, Any]:
    """Everything that `python -m dllm_jax.doctor` reports, as JSON has it; `ok` and `verdict` at the end."""
    device = jax.local_devices()[0]
    about = {
        "versions": {"python": platform.python_version(), "system": platform.platform()} | dict(_versions()),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
        "devices": [_describe(each) for each in jax.local_devices()],
    }
    checks = [row for operation in OPERATIONS for row in _check(operation, device)]
    choices = [row for operation in OPERATIONS for row in _choices(operation, device)]
    problems = [problem for problem in (_unused_gpu(device),) if problem]
    problems += [
        f"{row['operation']} by {row['implementation']} in {row['dtype']}: {row['problem']}"
        for row in checks
        if not row["ok"]
    ]
    verdict = "; ".join(problems) or f"everything that can run on {device.device_kind} is right"
    return {**about, "choices": choices, "checks": checks, "ok": not problems, "verdict": verdict}


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, None


def _describe(device: jax.Device) -> dict[str, Any]:
    try:
        memory = device.memory_stats() or {}
    except Exception:  # what a plug-in without this raises
        memory = {}
    about = {"kind": device.device_kind, "platform": platform_of(device), "compute_capability": capability(device)}
    return about | {"memory_bytes": memory.get("bytes_limit"), "in_use_bytes": memory.get("bytes_in_use")}


def _unused_gpu(device: jax.Device) -> str | None:
    """What is wrong where there is an NVIDIA GPU that JAX does not use, though nothing tells it not to."""
    if not Path("/proc/driver/nvidia/gpus").exists() or device.platform != "cpu" or "JAX_PLATFORMS" in os.environ:
        return None
    return "this machine has an NVIDIA GPU, and JAX computes on the CPU; pip install 'dllm_jax[cuda]'"


def _choices(operation: Operation, device: jax.Device) -> Iterator[dict[str, Any]]:
    """For each dtype and example the implementation that "auto" takes, and why not the others."""
    for dtype in MOST:
        for example, shapes in operation.shapes(dtype).items():
            with on_device(device):
                reasons = {each.name: _reason(operation, each, device, shapes) for each in operation.kernels}
            taken = next((name for name, reason in reasons.items() if reason is None), "xla")
            others = {name: reason for name, reason in reasons.items() if reason}
            row = {"operation": operation.name, "call": example, "dtype": dtype}
            yield {**row, "implementation": taken, "others": others}


def _reason(operation: Operation, kernel: Kernel, device: jax.Device, shapes: Any) -> str | None:
    if kernel.platform != platform_of(device):
        return f"it is for {PLATFORMS[kernel.platform]}"
    reason = why_not(operation, kernel, device, shapes, None, kernel.automatic)
    return reason if reason or kernel.automatic else "it is used by name only"


def _check(operation: Operation, device: jax.Device) -> Iterator[dict[str, Any]]:
    """Each implementation that runs on a device against the reference; one that raises is wrong."""
    here = [kernel for kernel in operation.kernels if kernel.platform == platform_of(device)]
    for kernel in (None, *here):
        for dtype in MOST:
            row: dict[str, Any] = {"operation": operation.name, "implementation": kernel.name if kernel else "xla"}
            start = time.perf_counter()
            try:
                found = operation.check(kernel, device, dtype)
            except Exception as error:  # whatever a compiler, a driver or a missing library raises
                row |= {"dtype": dtype, "ok": False, "problem": describe(error)}
                yield {**row, "errors": {}, "seconds": None}
                continue
            if found:
                seconds, wrong = time.perf_counter() - start, next((each for each in found if not each.ok), None)
                errors = {each.what: each.error if math.isfinite(each.error) else None for each in found}
                row |= {"dtype": dtype, "ok": wrong is None, "problem": wrong and wrong.sentence}
                yield {**row, "errors": errors, "seconds": round(seconds, 2)}
