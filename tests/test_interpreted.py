"""tokamax's own kernels for GPUs, in the interpreter that JAX has from 0.12 on: `make newest` runs these tests.

Elsewhere XLA's operations stand in their place (`test_attention.py`, `test_experts.py`). The interpreter simulates the
threads of a GPU's blocks, their memories and barriers. It can run attention for compute capability 10.x and grouped
products for 9.x; of the others it lacks operations (`run_state`, collective copies).
"""

import dataclasses
import importlib.util
import os
import types

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu

from dllm_jax.kernels.attention import ATTENTION, IN_BLOCKS
from dllm_jax.kernels.experts import EXPERTS

THREADS = 32  # of XLA's: a simulated thread that waits for others blocks one, and with too few all wait for ever
LENGTH, HEADS = 96, {"query": 2, "key": 1, "value": 1}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed"),
    pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="this JAX has no interpreter for these kernels"),
    pytest.mark.skipif(int(os.environ.get("NPROC", 0)) < THREADS, reason=f"it needs threads of XLA: NPROC={THREADS}"),
]


@pytest.fixture
def interpreted(monkeypatch):
    """A context in which kernels are those for a compute capability, and interpreted."""
    from jax.extend import backend
    from tokamax._src import mosaic_gpu as of_tokamax

    # A fence of memory, whose counterpart the interpreter ignores.
    monkeypatch.setattr(of_tokamax, "tcgen05_fence_after_thread_sync", lambda: None)

    def make(capability):
        about = {"platform": "gpu", "device_kind": "NVIDIA", "compute_capability": capability, "core_count": 2}
        device = types.SimpleNamespace(**about)
        monkeypatch.setattr(backend, "get_default_device", lambda: device)  # which tokamax asks
        # What JAX calls its knowledge of the instructions that tokamax writes out, named barriers among them.
        inline = "_hack_model_inline_mgpu_tokamax"
        return mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams(inline_mgpu=inline))

    return make


def check(operation):
    """Compares tokamax's kernels with the reference."""
    (kernel,) = [each for each in operation.kernels if each.name == "tokamax"]
    kernel = dataclasses.replace(kernel, refusal=lambda *_: None)
    checks = operation.check(kernel, jax.devices()[0], "bfloat16")
    assert checks and all(each.ok for each in checks), checks


def few(operation):
    """The same with fewer positions and heads, as each costs a second."""

    def cut(name, x):
        return x[:, :LENGTH, : HEADS[name.split()[0]]] if x.ndim == 4 else x[:, :LENGTH]

    examples = {
        about: [cut(name, x) for name, x in zip(operation.operands, operands, strict=False)]
        for about, operands in operation.examples().items()
        if about != "a length per row"  # which is the same for each query
    }
    return dataclasses.replace(operation, examples=lambda: examples)


@pytest.mark.parametrize("operation", [ATTENTION, IN_BLOCKS], ids=lambda each: each.name)
def test_attention_for_compute_capability_10(interpreted, operation):
    """Results and gradients."""
    with interpreted("10.0"):
        check(few(operation))


def test_experts_for_compute_capability_9(interpreted):
    """Results; gradients run in rounds."""
    with interpreted("9.0"):
        check(EXPERTS)
