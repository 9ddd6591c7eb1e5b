"""A generation as one command buffer (a CUDA graph) of an NVIDIA GPU.

By default XLA puts straight runs of kernels into command buffers, and the host reads the predicate of every loop in
between. With WHILE among the kinds, the loops go in as well, and with them the whole generation.
"""

import types
from collections.abc import Mapping
from contextlib import AbstractContextManager

import jax

from dllm_jax.errors import DllmError

KINDS = ("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION", "CONDITIONAL", "WHILE")
"""XLA's own (jaxlib 0.10.2), which an option of a program replaces and a flag with + adds to, and WHILE."""
COMMAND_BUFFERS: Mapping[str, str] = types.MappingProxyType({"xla_gpu_enable_command_buffer": ",".join(KINDS)})
"""For `jax.jit(compiler_options=)` and `lowered.compile(compiler_options=)`."""

_asked = jax.make_user_context(default_value=False)


def use_command_buffers() -> AbstractContextManager[None]:
    """`with use_command_buffers():` runs a generation of `sample_jit`, or of an `Engine` or `generate` that is called
    within, as one command buffer, so that the host reads nothing until it is done.

    It needs one NVIDIA GPU, CUDA 12.3 or newer and a driver to match; with older ones, and on several GPUs, XLA leaves
    the loops outside. No GPU has run it with this library yet.

    Raises:
        DllmError: where JAX finds no NVIDIA GPU.
    """
    platform = jax.devices()[0].client.platform_version
    if jax.default_backend() != "gpu" or "cuda" not in platform.lower():
        found = jax.devices()[0].device_kind
        raise DllmError(f"command buffers are for NVIDIA GPUs, and JAX finds none here ({found}); leave them out")
    context: AbstractContextManager[None] = _asked(True)
    return context


def asked_for_command_buffers() -> bool:
    """Whether this is within `use_command_buffers`."""
    return bool(_asked.value)
