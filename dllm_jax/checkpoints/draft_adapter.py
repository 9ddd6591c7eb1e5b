"""The low-rank adapter that a checkpoint's model drafts with, in one file next to its parameters."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.transformer import param_specs
from dllm_jax.parallel.sharding import Layout
from dllm_jax.params.low_rank import LowRank

FILE = "draft_adapter.safetensors"
_A, _B = ".a", ".b"


def adapter_file(values: Mapping[str, tuple[np.ndarray, np.ndarray]], scale: float) -> dict[str, bytes]:
    """The file's name and content, for kernels' names with their A [in, rank] and B [rank, out], float32."""
    parts = {name + _A: a for name, (a, _) in values.items()} | {name + _B: b for name, (_, b) in values.items()}
    parts = {name: np.ascontiguousarray(x) for name, x in parts.items()}
    return {FILE: save(parts, metadata={"scale": repr(scale)})}


Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def read_adapter(folder: str | Path, config: ModelConfig) -> tuple[Pairs, float] | None:
    """What `adapter_file` wrote, on the host; None for a checkpoint without.

    Raises:
        DllmError: when the file is damaged, or not of a model of this config.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            scale = float((file.metadata() or {})["scale"])
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except Exception as error:  # what safetensors raises is no common class
        raise DllmError(f"{path} cannot be read ({error}); convert the checkpoint again") from None
    specs, pairs = param_specs(config), Pairs()
    for name in dict.fromkeys(key.removesuffix(_A).removesuffix(_B) for key in found):
        a, b = found.get(name + _A), found.get(name + _B)
        shape = specs[name].shape if name in specs else None
        if a is None or b is None or shape is None or (a.shape[0], b.shape[1]) != shape or a.shape[1] != b.shape[0]:
            raise DllmError(f"{path} does not fit the model (at {name}); convert the checkpoint again")
        pairs[name] = (a, b)
    return pairs, scale


def load_adapter(folder: str | Path, config: ModelConfig, layout: Layout | None = None) -> LowRank | None:
    """The adapter in the model's dtype, on its devices; None for a checkpoint without. Errors are `read_adapter`'s."""
    found = read_adapter(folder, config)
    if found is None:
        return None
    cast = lambda x: jnp.asarray(x, config.dtype)
    if layout is not None:
        everywhere = NamedSharding(layout.mesh, PartitionSpec())
        cast = lambda x: jax.device_put(np.asarray(x, jnp.dtype(config.dtype)), everywhere)
    return LowRank({name: (cast(a), cast(b)) for name, (a, b) in found[0].items()}, found[1])
