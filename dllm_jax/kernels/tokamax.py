"""What both operations need of `tokamax`, the optional package of kernels that the extra `kernels` installs.

Its kernels for NVIDIA GPUs of compute capability 9.x and 10.x are used by name: its own choice goes by JAX's default
device. No GPU ran them with this library yet; they compile ahead of time for an H100, and some run in JAX's interpreter
(`tests/test_interpreted.py`).
"""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from importlib.metadata import version

import jax

from dllm_jax.kernels.dispatch import capability

PINNED = ("0.0.12", "0.0.17")
"""Versions whose private modules have what is used here: for Python 3.11, and for 3.12 and later."""

CAPABILITIES = (9.0, 11.0)
"""Compute capabilities from the first on, up to the second: Hopper and Blackwell of data centers."""


def missing() -> str | None:
    """What keeps every kernel of tokamax from running, None if nothing does."""
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed; pip install 'dllm_jax[kernels]'"
    installed = version("tokamax")
    return None if installed in PINNED else f"tokamax is {installed}, and it was tried with {' and '.join(PINNED)} only"


def refusal(device: jax.Device | None) -> str | None:
    """Why no kernel of tokamax runs on a device, None if some do."""
    if (reason := missing()) is not None:
        return reason
    has = capability(device)
    if has is None:
        return "there is no NVIDIA GPU to compile it for"
    if not CAPABILITIES[0] <= has < CAPABILITIES[1]:
        return f"its kernels are for compute capability 9.x and 10.x, and {device.device_kind} has {has}"  # type: ignore[union-attr]
    return None


@contextlib.contextmanager
def tracing_for(device: jax.Device) -> Iterator[None]:
    """A block whose kernels of tokamax are traced for a device, which may be absent: it asks JAX's default device what
    there is, reads flags from the command line unless they count as read, and logs every shape it has no timings of."""
    from absl import flags
    from tokamax import config

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    logger = logging.getLogger("absl")
    logger.addFilter(_unless_about_timings)
    try:
        with config.cross_compile(True), jax.default_device(device):
            yield
    finally:
        logger.removeFilter(_unless_about_timings)


def _unless_about_timings(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Autotuning cache miss")
