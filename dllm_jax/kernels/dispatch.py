"""Where kernels of our own, written in Pallas, can stand in a program."""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from dllm_jax.parallel.layout import LayoutLike

AMPERE = 8.0
"""CUDA compute capability from which on there are bfloat16 and Triton; all but a T4 of today's have it."""

use_kernels = jax.make_user_context(default_value=True)
"""`with use_kernels(False):` compiles what is called within to XLA's own operations alone: to compare, and because no
kernel can be lowered for several platforms at once (`jax.export`)."""


one_device = jax.make_user_context(default_value=False)
"""`with one_device(True):` says that all arrays of what is called within lie on one device, however many there are."""


def lie_on_one_device(arrays: Any) -> bool:
    """Whether what is compiled for these arrays runs on one device: all are committed to the same. Shapes that are not
    placed will be; of traced arrays that is not known."""
    leaves = [x for x in jax.tree.leaves(arrays) if not (isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None)]
    placed = [isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed for x in leaves]
    return all(placed) and len(set().union(*(x.sharding.device_set for x in leaves))) <= 1


def lowering_for(gpu: str | None) -> AbstractContextManager[None]:
    """A context in which programs are lowered for a GPU that may be absent: from JAX 0.12 on Triton asks which it is.

    Args:
        gpu: its kind as JAX has it, such as "NVIDIA H100"; None if nothing is lowered for one.
    """
    known = {field.name for field in dataclasses.fields(AbstractDevice)}
    if gpu is None or "platform" not in known:  # JAX 0.10.0, which asks nothing
        return nullcontext()
    device = AbstractDevice(device_kind=gpu, num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def kernels_run(dtype: jnp.dtype, layout: LayoutLike | None) -> bool:
    """Whether kernels may be used for arrays of this dtype: they are not turned off, this machine's GPU, if any,
    supports them, and every device will run its own part.

    Float16 is left to XLA: it is what a T4, which is too old, has instead of bfloat16.

    Args:
        layout: how arrays lie on a mesh; None for one device, and where the caller places everything.
    """
    if dtype == jnp.float16 or not use_kernels.value:
        return False
    return not before_ampere() and _is_local(layout)


def before_ampere() -> bool:
    """Whether this machine's GPU, if any, is NVIDIA's and too old for bfloat16 and for Triton, such as a T4."""
    capability = jax.devices()[0].compute_capability if jax.default_backend() == "gpu" else ""
    return capability[:1].isdigit() and float(capability) < AMPERE  # AMD's are names


def _is_local(layout: LayoutLike | None) -> bool:
    """Whether it is known what each device runs: a compiler cannot split a kernel over devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:  # the caller's
        return all(size == 1 or name in mesh.manual_axes for name, size in mesh.shape.items())
    return layout is not None or one_device.value or jax.device_count() == 1
