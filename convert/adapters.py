"""Low-rank adapters in the hub's format (peft): `adapter_model.safetensors` and `adapter_config.json`.

    base_model.model.<module>.lora_A.weight [rank, in], lora_B.weight [out, rank];  W + (alpha / rank) B A

Here a kernel [in, out] has "<kernel>.lora_a" [in, rank] and "<kernel>.lora_b" [rank, out] in a flat dict of its own.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.hub_folder import copied_files
from convert.output import check_out
from convert.safetensors_reader import read_header
from convert.source import locate
from convert.tensors import Piece, load
from dllm_jax import buckets, storage
from dllm_jax.checkpoints import checkpoint, draft_adapter
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import Slot, find_family
from dllm_jax.storage import read_json

KERNEL, A, B = ".kernel", ".lora_a", ".lora_b"
WEIGHTS_FILE, SETTINGS_FILE = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_KEY = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")
# What would change results and is not implemented; each may be missing or "off".
_OFF = ("use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Adapters on the host.

    Attributes:
        values: flat name -> float32 array, an A and a B for each adapted kernel.
        rank: r, of all.
        alpha: the product counts alpha / rank times.
        base: name or folder of the model they were trained on.
        dropout: share of their inputs that was left out in training; for the record.
    """

    values: Mapping[str, np.ndarray]
    rank: int
    alpha: float
    base: str
    dropout: float = 0.0

    @property
    def kernels(self) -> tuple[str, ...]:
        """The adapted kernels."""
        return tuple(name.removesuffix(A) + KERNEL for name in self.values if name.endswith(A))


def read_adapters(folder: str | Path, config: ModelConfig) -> Adapters:
    """The adapters in a folder of the hub's format, for a model of this config.

    Raises:
        DllmError: when files are missing or damaged, settings are not implemented, or tensors are not the config's.
    """
    folder = Path(folder)
    for name in (SETTINGS_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise DllmError(f"{folder} holds no adapters (it has no {name}); name a folder that has them")
    settings = read_json(folder / SETTINGS_FILE)
    rank, alpha = _rank_and_alpha(settings, folder / SETTINGS_FILE)
    entries = read_header(folder / WEIGHTS_FILE)
    slots = {slot.hub.removesuffix(".weight"): slot for slot in _matrices(config)}
    values: dict[str, np.ndarray] = {}
    for key, entry in entries.items():
        match = _KEY.fullmatch(key)
        if match is None or match[1] not in slots:
            raise DllmError(f"{entry.path}: {key} belongs to no matrix of a {config.family} model; choose its own base")
        rows, columns = slots[match[1]].shape  # of the hub: [out, in]
        wanted = (rank, columns) if match[2] == "A" else (rows, rank)
        if entry.shape != wanted or entry.dtype.name not in ("float32", "bfloat16", "float16"):
            found = f"{entry.dtype.name}{list(entry.shape)}"
            raise DllmError(f"{entry.path}: {key} is {found}, and the model and r = {rank} need floats {list(wanted)}")
        ours = slots[match[1]].ours.removesuffix(KERNEL) + (A if match[2] == "A" else B)
        values[ours] = load([Piece(entry, (), True)], wanted[::-1], np.dtype(np.float32))
    stems = {name[: -len(A)] for name in values}
    if not stems or len(values) != 2 * len(stems):
        raise DllmError(f"{folder / WEIGHTS_FILE} does not hold an A and a B for every matrix; download it again")
    dropout = settings.get("lora_dropout")
    base = str(settings.get("base_model_name_or_path") or "")
    return Adapters(values, rank, alpha, base, float(dropout) if isinstance(dropout, int | float) else 0.0)


def read_draft_adapter(folder: Path, config: ModelConfig) -> dict[str, bytes]:
    """Of a published repository the file in our format with the adapters that its model drafts with; {} without any.

    Raises:
        DllmError: as `read_adapters`.
    """
    name = find_family(config.family).draft_adapter
    if name is None or not (folder / name).is_dir():
        return {}
    found = read_adapters(folder / name, config)
    return draft_adapter.adapter_file(_pairs(found), found.alpha / found.rank)


def install_draft_adapter(source: str | Path, model: str | Path, *, overwrite: bool = False) -> Adapters:
    """Puts adapters in the hub's format into a converted model's checkpoint, as those that it drafts with.

    Args:
        source: folder with the adapters, such as `adapters` of a run of `python -m train joint`.
        model: the checkpoint, which is changed.
        overwrite: replace those that it has.

    Raises:
        DllmError: when either is missing or damaged, they do not belong together, or it has some already.
    """
    if buckets.is_address(model):
        raise DllmError(f"{model} is in an object store, and its checkpoint is changed in place; give a folder")
    folder = checkpoint.find(model)
    config = checkpoint.load_config(folder)
    if not config.has_causal_context:
        raise DllmError(
            f"{folder} holds a {config.family} model, which does not draft for itself; merge adapters into it"
        )
    if (folder / draft_adapter.FILE).exists() and not overwrite:
        raise DllmError(f"{folder} has a draft adapter already; pass --overwrite to replace it")
    found = read_adapters(Path(source), config)
    ((name, content),) = draft_adapter.adapter_file(_pairs(found), found.alpha / found.rank).items()
    storage.write_file(folder / name, content)
    return found


def _pairs(adapters: Adapters) -> draft_adapter.Pairs:
    stems = [kernel.removesuffix(KERNEL) for kernel in adapters.kernels]
    return {stem + KERNEL: (adapters.values[stem + A], adapters.values[stem + B]) for stem in stems}


def write_draft_adapter(folder: Path, out: Path, config: ModelConfig) -> None:
    """Writes what `read_draft_adapter` reads into an export of one of our checkpoints, if that has any."""
    name, found = find_family(config.family).draft_adapter, draft_adapter.read_adapter(folder, config)
    if name is None or found is None:
        return
    pairs, scale = found
    values = {k.removesuffix(KERNEL) + end: x for k, pair in pairs.items() for end, x in zip((A, B), pair, strict=True)}
    rank = next(iter(values.values())).shape[1]
    (out / name).mkdir()
    base = str(checkpoint.load_source(folder).get("source") or "")
    write_adapters(out / name, config, Adapters(values, rank, scale * rank, base))


def write_adapters(folder: Path, config: ModelConfig, adapters: Adapters) -> None:
    """Writes both files into a folder, with the base's name as it is."""
    from safetensors.numpy import save_file

    slots = {slot.ours: slot.hub.removesuffix(".weight") for slot in _matrices(config)}
    modules = [slots[name] for name in adapters.kernels]
    tensors = {}
    for name, value in adapters.values.items():
        stem, end = (name.removesuffix(A), "A") if name.endswith(A) else (name.removesuffix(B), "B")
        tensors[f"{_PREFIX}{slots[stem + KERNEL]}.lora_{end}.weight"] = np.ascontiguousarray(np.asarray(value).T)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": _targets(modules, list(slots.values())),
        "bias": "none",
        "fan_in_fan_out": False,
        "task_type": None,
        "inference_mode": True,
        "base_model_name_or_path": adapters.base,
    }
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")


def save_adapters(out: str | Path, config: ModelConfig, adapters: Adapters, *, overwrite: bool = False) -> None:
    """Writes a folder with the adapters and the model's config; it appears whole at the end.

    Raises:
        DllmError: when `out` exists, or cannot be written.
    """
    with storage.atomic_folder(out, overwrite=overwrite) as scratch:
        try:
            write_adapters(scratch, config, adapters)
            (scratch / checkpoint.CONFIG_FILE).write_text(config.to_json() + "\n")
        except Exception as error:
            raise storage.write_error(out, error) from error


def convert_adapters(
    source: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    apart: bool = False,
    any_base: bool = False,
    revision: str | None = None,
    overwrite: bool = False,
) -> Adapters:
    """Published adapters merged into their base, a plain checkpoint; or kept apart, for `python -m train merge-lora`.

    Args:
        source: folder or repository id with adapters in the hub's format.
        base: the converted model they belong to.
        out: the new folder.
        apart: write the adapters with the base's config instead of a merged checkpoint.
        any_base: do not compare the names of the base and of the model that the adapters were trained on. The wrong
            one of two models of a shape gives text that is merely bad (an Instruct model's adapters on its Base).
        revision: branch, tag or commit of a repository.
        overwrite: replace `out` if it holds what this writes.

    Raises:
        DllmError: when either is missing or damaged, or they do not belong together.
    """
    kind = SETTINGS_FILE if apart else checkpoint.PARAMS_FOLDER
    check_out(out, source=source, overwrite=overwrite, kind=kind)
    folder, (where, name, _) = checkpoint.find(base), locate(source, revision)
    config = checkpoint.load_config(folder)
    checkpoint.require_plain(config, folder, "given adapters")
    adapters = read_adapters(where, config)
    made_from = str(checkpoint.load_source(folder).get("source") or "")
    if not any_base and made_from and adapters.base and _last(made_from) != _last(adapters.base):
        raise DllmError(
            f"the adapters in {name} were trained on {adapters.base}, and {folder} was made from {made_from}; "
            "give that base, or pass --any-base if it is the same model by another name"
        )
    if apart:
        save_adapters(out, config, adapters, overwrite=overwrite)
    else:
        save_merged(folder, config, adapters, name, out, overwrite=overwrite)
    return adapters


def save_merged(
    base: Path, config: ModelConfig, adapters: Adapters, name: str, out: str | Path, *, overwrite: bool = False
) -> None:
    """Writes the plain checkpoint base + (alpha / rank) A B, tensor by tensor, in the base's dtype; `name` is noted."""
    source = {**checkpoint.load_source(base), "merged_adapters": name}
    tensors = _merged_tensors(base, adapters)
    checkpoint.save(out, config, tensors, files=copied_files(base), source=source, overwrite=overwrite)


def add_low_rank(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """kernel + scale a b, computed in float32, in the kernel's dtype."""
    return (kernel.astype(jnp.float32) + scale * (a @ b)).astype(kernel.dtype)


def _merged_tensors(folder: Path, adapters: Adapters) -> Iterator[tuple[str, jax.Array | np.ndarray]]:
    for name, array in checkpoint.iter_params(folder):
        stem = name.removesuffix(KERNEL)
        if stem + A not in adapters.values:
            yield name, array
        else:
            a, b = (jnp.asarray(adapters.values[stem + end]) for end in (A, B))
            yield name, add_low_rank(jnp.asarray(array), a, b, adapters.alpha / adapters.rank)


def _matrices(config: ModelConfig) -> Iterator[Slot]:
    """The hub's tensors that are one of our kernels each."""
    for slot in find_family(config.family).layout(None, config).slots(config):
        if slot.ours.endswith(KERNEL) and slot.pieces == ((),) and slot.transpose:
            yield slot


def _rank_and_alpha(settings: Mapping[str, Any], where: Path) -> tuple[int, float]:
    if settings.get("peft_type") != "LORA":
        raise DllmError(f"{where}: peft_type {settings.get('peft_type')!r} is not implemented, only LORA")
    for name in _OFF:
        if settings.get(name):
            raise DllmError(f"{where}: {name} = {json.dumps(settings[name])} is not implemented")
    if settings.get("bias", "none") != "none":
        raise DllmError(f"{where}: bias = {settings['bias']!r} is not implemented, only 'none'")
    rank: Any = settings.get("r")
    alpha: Any = settings.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not 0 < alpha < float("inf"):
        raise DllmError(f"{where}: r is {rank!r} and lora_alpha {alpha!r}; they must be positive numbers")
    return rank, float(alpha)


def _targets(modules: list[str], every: list[str]) -> list[str]:
    """Last names of the adapted modules, or whole names where another module has the last name too."""
    untouched = {_last(name, ".") for name in set(every) - set(modules)}
    return sorted({name if _last(name, ".") in untouched else _last(name, ".") for name in modules})


def _last(name: str, separator: str = "/") -> str:
    return name.rstrip(separator).rpartition(separator)[2]
