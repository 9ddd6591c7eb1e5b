"""LoRA (arXiv 2106.09685): W + (alpha / rank) A B, with A and B in a second small flat dict.

    {"layers.0.attn.q_proj.lora_a": [in, rank], "layers.0.attn.q_proj.lora_b": [rank, out]}

Training keeps the product apart from the weights (`attach_adapters`), for reasons in `dllm_jax.params.low_rank`.
`add_adapters` and `merge_adapters` add it, which computes the same.
"""

import fnmatch
import math
import types
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from convert import adapters as hub
from convert.adapters import KERNEL, A, B, add_low_rank
from dllm_jax import storage
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.transformer import param_specs
from dllm_jax.params.low_rank import LowRankKernel
from dllm_jax.text.tokenizer import TOKENIZER_FILES
from train.config import LoraPart

TARGETS: Mapping[str, str] = types.MappingProxyType(
    {"attention": "layers.*.attn.*.kernel", "mlp": "layers.*.mlp.*.kernel", "all-linear": "layers.*.kernel"}
)
"""Words for patterns of kernels."""


def target_names(config: ModelConfig, part: LoraPart) -> list[str]:
    """The kernels that get adapters: what any pattern matches, without what later ones with a "!" match.

    Raises:
        DllmError: for a pattern that matches no parameter, or one that is no matrix, and where nothing is left.
    """
    specs = param_specs(config)
    names: dict[str, None] = {}
    for pattern in part.targets:
        written = pattern.removeprefix("!")
        found = fnmatch.filter(specs, TARGETS.get(written, written))
        if not found:
            why = "; the weights of experts take no adapters" if written == "mlp" and config.experts else ""
            raise DllmError(f"lora.targets: {pattern!r} matches no parameter; names look like {list(specs)[1]!r}{why}")
        if pattern != written:
            names = {name: None for name in names if name not in found}
            continue
        for name in found:
            if len(specs[name].shape) > 2:
                raise DllmError(f"lora.targets: {pattern!r} matches {name}, weights of experts, which take no adapters")
            if len(specs[name].shape) != 2 or not name.endswith(KERNEL):
                raise DllmError(f"lora.targets: {pattern!r} matches {name}, which is no projection; match kernels only")
        names |= dict.fromkeys(found)
    if not names:
        raise DllmError("lora.targets leaves no kernel; name one before what begins with a !")
    return list(names)


def adapter_shapes(config: ModelConfig, part: LoraPart) -> dict[str, tuple[int, int]]:
    """Shape of every adapter by flat name."""
    specs, shapes = param_specs(config), {}
    for name in target_names(config, part):
        rows, columns = specs[name].shape
        shapes[name.removesuffix(KERNEL) + A] = (rows, part.rank)
        shapes[name.removesuffix(KERNEL) + B] = (part.rank, columns)
    return shapes


def adapter_shardings(config: ModelConfig, part: LoraPart, base: Mapping[str, Sharding]) -> dict[str, NamedSharding]:
    """A is split as the kernel's rows are, B as its columns, the rank never."""
    shardings = {}
    for name in target_names(config, part):
        kernel = base[name]
        assert isinstance(kernel, NamedSharding)
        rows, columns = kernel.spec
        shardings[name.removesuffix(KERNEL) + A] = NamedSharding(kernel.mesh, PartitionSpec(rows, None))
        shardings[name.removesuffix(KERNEL) + B] = NamedSharding(kernel.mesh, PartitionSpec(None, columns))
    return shardings


def init_adapters(
    config: ModelConfig, part: LoraPart, key: jax.Array, shardings: Mapping[str, Sharding] | None = None
) -> dict[str, jax.Array]:
    """A normal with standard deviation 1 / sqrt(in), B zero, float32: the model is unchanged at the start; or those of
    `lora.init`."""
    if part.init:
        found = load_adapters(part.init)[2]
        return {name: jax.device_put(x, shardings[name] if shardings else None) for name, x in found.items()}

    def init() -> dict[str, jax.Array]:
        return {name: _init_adapter(name, shape, key) for name, shape in adapter_shapes(config, part).items()}

    return jax.jit(init, out_shardings=dict(shardings) if shardings else None)()


def _init_adapter(name: str, shape: tuple[int, int], key: jax.Array) -> jax.Array:
    if name.endswith(B):
        return jnp.zeros(shape, jnp.float32)
    return jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), shape) / math.sqrt(shape[0])


def add_adapters(
    params: Mapping[str, jax.Array], adapters: Mapping[str, jax.Array], scale: float
) -> dict[str, jax.Array]:
    """The parameters with scale * A B added to their kernels in float32, in the kernels' dtypes."""
    merged = dict(params)
    for name, a in adapters.items():
        if name.endswith(A):
            kernel = name.removesuffix(A) + KERNEL
            merged[kernel] = add_low_rank(params[kernel], a, adapters[name.removesuffix(A) + B], scale)
    return merged


def attach_adapters(
    params: Mapping[str, jax.Array],
    adapters: Mapping[str, jax.Array],
    part: LoraPart,
    key: jax.Array | None = None,
) -> dict[str, jax.Array | LowRankKernel]:
    """The parameters, for a `Denoiser`, with every adapted kernel as a `LowRankKernel`.

    Args:
        key: typed key of the dropout's draws, of which each kernel has its own; None leaves nothing out.
    """
    adapted: dict[str, jax.Array | LowRankKernel] = dict(params)
    for name, a in adapters.items():
        if name.endswith(A):
            stem = name.removesuffix(A)
            own = None if key is None else jax.random.fold_in(key, zlib.crc32(stem.encode()))
            kernel = LowRankKernel(params[stem + KERNEL], a, adapters[stem + B], own, part.scale, part.dropout)
            adapted[stem + KERNEL] = kernel
    return adapted


def write_adapters(
    out: Path, config: ModelConfig, part: LoraPart, adapters: Mapping[str, Any], *, base: str, overwrite: bool = False
) -> None:
    """Writes a folder with the adapters in the hub's format and the model's config; it appears whole at the end."""
    values = {name: np.asarray(value, np.float32) for name, value in adapters.items()}
    found = hub.Adapters(values, part.rank, part.alpha, base, part.dropout)
    hub.save_adapters(out, config, found, overwrite=overwrite)


def load_adapters(folder: str | Path) -> tuple[ModelConfig, LoraPart, dict[str, np.ndarray], str]:
    """What `write_adapters` wrote: the model's config, the settings, the adapters on the host, and the base's name.

    Raises:
        DllmError: for a folder that is none of ours, or is damaged.
    """
    folder = checkpoint.local_folder(folder)
    if not (folder / hub.SETTINGS_FILE).is_file():
        missing = f"it has no {hub.SETTINGS_FILE}"
        raise DllmError(f"{folder} holds no adapters ({missing}); name the adapters folder of a run")
    config = checkpoint.load_config(folder)
    found = hub.read_adapters(folder, config)
    return config, LoraPart(found.rank, found.alpha, found.dropout, found.kernels), dict(found.values), found.base


def check_init(config: ModelConfig, part: LoraPart, base: str | Path) -> None:
    """Raises DllmError unless the adapters of `lora.init` are some that this run could have made.

    Args:
        base: the model under them, as `checkpoint.find` takes it.
    """
    folder, base = checkpoint.find(base), checkpoint.name_of(base)
    trained, found, _, named = load_adapters(part.init)
    where = f"lora.init {part.init}"
    for name in ("rank", "alpha"):
        was, now = getattr(found, name), getattr(part, name)
        if was != now:
            raise DllmError(f"{where} holds adapters of {name} {was:g}, and lora.{name} is {now:g}; set it to {was:g}")
    if trained != config:
        raise DllmError(f"{where} holds adapters of a model of another config than {base}'s")
    wanted = set(target_names(config, part))
    if other := sorted(wanted.symmetric_difference(found.targets)):
        missing = "no adapter" if other[0] in wanted else "an adapter"
        raise DllmError(f"{where} has {missing} for {other[0]}, unlike lora.targets; set them to its kernels")
    made_from = str(checkpoint.load_source(folder).get("source") or base)
    if Path(named).expanduser().resolve() != Path(base).resolve() and named.rstrip("/") != made_from.rstrip("/"):
        raise DllmError(
            f"{where} was trained on {named}, and model.init is {base}; give that model, or, if it is the same in "
            f"another place, correct base_model_name_or_path in {part.init}/{hub.SETTINGS_FILE}"
        )


def merge_adapters(base: str | Path, adapters: str | Path, out: str | Path, *, overwrite: bool = False) -> None:
    """Writes the plain checkpoint base + (alpha / rank) A B, tensor by tensor, in the base's dtype.

    Raises:
        DllmError: when the adapters were trained on a model of another config, or a folder is missing or damaged.
    """
    storage.check_out(out, overwrite=overwrite)
    folder = checkpoint.find(base)
    config = checkpoint.load_config(folder)
    checkpoint.require_plain(config, folder, "given adapters")
    trained, part, values, named = load_adapters(adapters)
    if config != trained:
        raise DllmError(f"the adapters in {adapters} were trained on a model of another config than {folder}'s")
    found = hub.Adapters(values, part.rank, part.alpha, named)
    hub.save_merged(folder, config, found, str(adapters), out, overwrite=overwrite)


def tokenizer_files(folder: str | Path) -> dict[str, bytes]:
    """Name -> content of the tokenizer's files in a folder."""
    paths = [Path(folder) / name for name in TOKENIZER_FILES]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}
