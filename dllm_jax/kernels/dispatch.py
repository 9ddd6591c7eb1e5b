"""Which implementation of an operation a program takes.

Every operation runs in XLA's own operations on every platform. A kernel is for one platform. `choose` says, while a
program is traced, which kernel a call takes on each platform, by the device that the arrays lie on, the call itself and
what was asked for; `jax.lax.platform_dependent` picks one when the program is lowered.
"""

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import jax
import numpy as np

from dllm_jax.errors import DllmError
from dllm_jax.kernels.checks import Check, compare, describe
from dllm_jax.parallel.layout import LayoutLike

Name = Literal["auto", "xla", "cudnn", "tokamax", "tpu"]
"""What `use_kernels` and every argument `implementation=` take."""

AMPERE = 8.0
"""CUDA compute capability from which on there are bfloat16 and kernels; all but a T4 of today's have it."""

_asked = jax.make_user_context(default_value="auto")
on_device = jax.make_user_context(default_value=None)
"""`with on_device(device):` says that all arrays of what is called within lie on this device, here or absent."""


def use_kernels(implementation: Name | bool) -> AbstractContextManager[None]:
    """`with use_kernels("xla"):` compiles what is called within with that implementation of attention and experts.

    Args:
        implementation: "auto" (or True), the default: cuDNN or tokamax where they fit an NVIDIA GPU, else XLA; "xla"
            (or False): XLA's own operations alone; "cudnn", "tokamax" or "tpu": that one wherever it takes the call,
            else XLA, with one warning that says why.

    Raises:
        DllmError: for another name.
    """
    name = {True: "auto", False: "xla"}[implementation] if isinstance(implementation, bool) else implementation
    context: AbstractContextManager[None] = _asked(_known(name))
    return context


def asked_for(implementation: Name | None) -> Name:
    """The name that a call goes by: its own argument, else that of `use_kernels`.

    Raises:
        DllmError: for an unknown name.
    """
    name: Name = _asked.value if implementation is None else _known(implementation)
    return name


def _known(name: Any) -> Any:
    if name not in get_args(Name):
        raise DllmError(f"no implementation is called {name!r}; use {', '.join(get_args(Name))}")
    return name


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation of an operation besides XLA's.

    Attributes:
        name: what chooses it.
        platform: that it runs on, as XLA names it: "cuda" or "tpu".
        refusal: (device or None, *operands) -> why it cannot run them there, None if it can; None stands for a device
            that nobody knows.
        run: (device, *static, *operands) -> the result.
        automatic: "auto" takes it.
    """

    name: Name
    platform: str
    refusal: Callable[..., str | None]
    run: Callable[..., jax.Array]
    automatic: bool = True


@dataclasses.dataclass(frozen=True)
class Operation:
    """What has several implementations.

    Attributes:
        name: for people.
        reference: (*static, *operands) -> the result: the specification, all in the dtype of the operands.
        xla: the same in XLA's own operations, as they are used.
        kernels: the others, the preferred ones first.
        cost: of XLA's operations instead of a kernel, half a sentence.
        operands: their names.
        examples: () -> name -> small operands in NumPy, on which an implementation is compared with the reference.
        static: the leading arguments of these.
    """

    name: str
    reference: Callable[..., jax.Array]
    xla: Callable[..., jax.Array]
    kernels: tuple[Kernel, ...]
    cost: str
    operands: tuple[str, ...]
    examples: Callable[[], Mapping[str, Sequence[Any]]]
    static: tuple[int, ...] = ()

    def check(self, kernel: Kernel | None, device: jax.Device, dtype: str) -> list[Check]:
        """How far a kernel, or XLA (None), is from the reference on a device: results and gradients of all examples
        that it takes."""
        run = self.xla if kernel is None else functools.partial(kernel.run, device)
        found, shapes = [], self.shapes(dtype)
        for name, operands in self.examples().items():
            if kernel is None or kernel.refusal(device, *shapes[name]) is None:
                own, reference = (functools.partial(function, *self.static) for function in (run, self.reference))
                found += compare(own, reference, operands, device, dtype, self.operands, name)
        return found

    def shapes(self, dtype: str) -> dict[str, list[jax.ShapeDtypeStruct]]:
        """Those of the examples' operands, the floating ones in a dtype."""
        as_used = lambda x: dtype if x.dtype == np.float32 else x.dtype
        struct = lambda x: jax.ShapeDtypeStruct(x.shape, as_used(x))
        return {name: list(map(struct, operands)) for name, operands in self.examples().items()}


def choose(
    operation: Operation,
    operands: Sequence[Any],
    layout: LayoutLike | None,
    implementation: Name | None = None,
    reason: str | None = None,
) -> dict[str, tuple[Kernel, jax.Device | None]]:
    """Platform -> the kernel that a call takes there, and its device; a platform that is missing takes XLA.

    "auto" takes kernels on devices of this process alone, each tried once before (`failure`). A name that
    `use_kernels` gave and that cannot run costs one warning.

    Args:
        operands: arrays, tracers or shapes, as of the operation's kernels.
        layout: how they lie on a mesh; None for one device, and where the caller places everything.
        reason: why no kernel can run this call, where the caller knows.

    Raises:
        DllmError: if an implementation that the call itself names cannot run it.
    """
    name = asked_for(implementation)
    if name == "xla":
        return {}
    chosen: dict[str, tuple[Kernel, jax.Device | None]] = {}
    named = [each for each in operation.kernels if (each.automatic if name == "auto" else each.name == name)]
    for kernel in named if reason is None else []:
        if kernel.platform in chosen:  # of those behind it none is tried either
            continue
        device = device_for(kernel.platform, layout)
        reason = why_not(operation, kernel, device, operands, layout, automatic=name == "auto")
        if reason is None:
            chosen[kernel.platform] = kernel, device
    if name != "auto" and not chosen:
        reason = reason if named else "it has no such implementation"
        problem = f"{operation.name} cannot be computed by {name}: {reason}"
        if implementation is not None:
            raise DllmError(f'{problem}; use implementation="auto" or "xla"')
        warn_once(f"{problem}; XLA's operations run instead, {operation.cost}")
    return chosen


def why_not(
    operation: Operation,
    kernel: Kernel,
    device: jax.Device | None,
    operands: Sequence[Any],
    layout: LayoutLike | None,
    automatic: bool = True,
) -> str | None:
    """Why a kernel does not run a call on a device, None if it does.

    Args:
        automatic: as "auto" asks: the device must be here, and the kernel right on it.
    """
    if not _is_local(kernel.platform, layout):
        return "nothing says which device holds which part of the arrays; load the model with mesh="
    if automatic and device not in present(kernel.platform):
        return f"this process has no such device ({kernel.platform}) to try it on"
    reason = kernel.refusal(device, *operands)
    if reason is not None or not automatic:
        return reason
    return failure(operation, kernel, device)


@functools.cache
def failure(operation: Operation, kernel: Kernel, device: jax.Device) -> str | None:
    """Why a kernel is not to be used on a device of this process, None if it is: it is compiled and run once on small
    operands and compared with the reference. A kernel that fails costs one warning."""
    found: list[str | None] = []

    def run() -> None:  # in a thread, where nothing is traced and no context of the caller's holds
        try:
            checks = operation.check(kernel, device, "bfloat16")
            found.append(next((check.sentence for check in checks if not check.ok), None))
        except Exception as error:  # whatever a compiler, a driver or a missing library raises
            found.append(describe(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if found[0] is not None:
        problem = f"{operation.name}: {kernel.name} failed its test on {device.device_kind} ({found[0]})"
        warn_once(f"{problem}; XLA's operations run instead, {operation.cost}; python -m dllm_jax.doctor shows more")
    return found[0]


@functools.cache
def warn_once(message: str) -> None:
    """A warning, once in a process."""
    warnings.warn(message, stacklevel=3)


@functools.cache
def present(platform: str) -> tuple[jax.Device, ...]:
    """The devices of this process of a platform, "cpu", "cuda" or "tpu"."""
    try:
        return tuple(jax.local_devices(backend=platform))
    except RuntimeError:  # there is no such platform
        return ()


def platform_of(device: jax.Device) -> str:
    """A device's platform as XLA names it, AMD's GPUs aside."""
    return "cuda" if device.platform == "gpu" else str(device.platform)


def device_for(platform: str, layout: LayoutLike | None = None) -> jax.Device | None:
    """A device that a program for this platform runs on: of the layout's mesh, or that of `on_device`, or the first
    that is here; None where nobody knows."""
    device = on_device.value if layout is None else layout.mesh.devices.flat[0]
    if device is not None and platform_of(device) == platform:
        return device
    return next(iter(present(platform)), None)


def capability(device: Any) -> float | None:
    """CUDA compute capability, such as 9.0; None for what is not NVIDIA's."""
    text = str(getattr(device, "compute_capability", ""))
    return float(text) if text[:1].isdigit() else None  # AMD's are names


def before_ampere() -> bool:
    """Whether this machine computes on an NVIDIA GPU that is too old for bfloat16, such as a T4."""
    return (capability(jax.local_devices()[0]) or AMPERE) < AMPERE


def device_of(arrays: Any) -> jax.Device | None:
    """The device that all of these arrays are committed to; None for several, and where it is not known, as of shapes
    and of traced arrays."""
    leaves = jax.tree.leaves(arrays)
    placed = [isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed for x in leaves]
    devices = set().union(*(x.sharding.device_set for x in leaves)) if all(placed) else set()
    return devices.pop() if len(devices) == 1 else None


def _is_local(platform: str, layout: LayoutLike | None) -> bool:
    """Whether it is known what each device runs: a compiler cannot split a kernel over devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:  # the caller's
        return all(size == 1 or name in mesh.manual_axes for name, size in mesh.shape.items())
    return layout is not None or on_device.value is not None or len(present(platform)) == 1
