"""NI-Sampling's indicator: from the published file, a pickled PyTorch state dict or safetensors, to ours and back.

The published checkpoint has no config: sizes are read off the tensors' shapes. A JSON file of the same name next to it
may say the rest, and must agree.
"""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from convert.output import check_out, check_space
from convert.safetensors_reader import PICKLE_ENDINGS, read_block, read_header
from convert.tensors import as_dtype, checked_cast
from dllm_jax import storage
from dllm_jax.errors import DllmError
from dllm_jax.indicator import (
    CONFIG_FILE,
    PARAMS_FOLDER,
    Indicator,
    IndicatorConfig,
    check_indicator,
    load_indicator,
    save_indicator,
)
from dllm_jax.storage import sha256

WEIGHTS_FILE, HUB_CONFIG_FILE = "indicator.safetensors", "indicator.json"
_FIELDS = {
    "depth": "depth",
    "width": "width",
    "hidden_states_dim": "hidden_dim",
    "token_emb_dim": "embed_dim",
    "topk": "num_values",
    "input_topk_token": "num_tokens",
    "topk_norm": "probabilities",
    "concat_proj": "mix",
}
_MODULES = {
    "hidden_states_proj": "hidden_proj",
    "token_emb_proj": "token_proj",
    "logits_proj": "values_proj",
    "extra_token_proj": "others_proj",
    "concat_proj": "mix",
    "out_layer.0": "norm",
    "out_layer.1": "head",
}
_OF_BLOCK = {"layer_norm": "norm", "mlp.0": "up", "mlp.3": "down", "shortcut": "shortcut"}


def convert_indicator(
    source: str | Path, out: str | Path, *, dtype: str | None = None, overwrite: bool = False
) -> IndicatorConfig:
    """Converts a published indicator into a folder that `dllm_jax.indicator.load_indicator` reads.

    Args:
        source: a .safetensors file, or a file that `torch.save` wrote, which needs PyTorch; or a folder that holds one
            such file.
        out: the new folder; it appears whole at the end or not at all.
        dtype: "float32", "bfloat16" or "float16"; the source's own by default.

    Raises:
        DllmError: for a file that is damaged, is none, or holds other tensors; and for a full disk.
    """
    path = _file_of(Path(source).expanduser())
    check_out(out, source=source, overwrite=overwrite, kind=PARAMS_FOLDER)
    tensors = _read(path)
    config = _config_of(path, {name: x.shape for name, x in tensors.items()})
    params = {}
    for theirs, ours in published_names(config).items():
        array = tensors.pop(theirs)
        array = checked_cast(array, as_dtype(dtype or array.dtype.name), theirs)
        params[ours] = jnp.asarray(array.T if ours.endswith(".kernel") else array)
    if tensors:
        raise DllmError(f"{path} holds {min(tensors)}, which no indicator has; is it another checkpoint?")
    check_space(out, sum(x.nbytes for x in params.values()))
    indicator = Indicator(config, params)
    check_indicator(indicator, str(path))
    notes = {"family": "ni-indicator", "source": path.name, "sha256": sha256(path)}
    save_indicator(out, indicator, source=notes, overwrite=overwrite)
    return config


def export_indicator(folder: str | Path, out: str | Path, *, dtype: str | None = None, overwrite: bool = False) -> None:
    """Writes an indicator under the published names: a folder with indicator.safetensors and indicator.json.

    Args:
        dtype: "float32", "bfloat16" or "float16"; the stored one by default.

    Raises:
        DllmError: when it cannot be read, and for a full disk.
    """
    check_out(out, source=folder, overwrite=overwrite, kind="*.safetensors")
    indicator = load_indicator(folder)
    tensors = _published_tensors(indicator)
    if dtype is not None:
        tensors = {name: checked_cast(array, as_dtype(dtype), name) for name, array in tensors.items()}
    values = {theirs: getattr(indicator.config, ours) for theirs, ours in _FIELDS.items()}
    with storage.atomic_folder(out, overwrite=overwrite) as scratch:
        try:
            (scratch / WEIGHTS_FILE).write_bytes(_safetensors(tensors))
            settings = {**values, "use_positional_embedding": False, "dropout": 0.2}
            (scratch / HUB_CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        except OSError as error:
            raise storage.write_error(out, error) from error


def verify_indicator(source: str | Path, folder: str | Path) -> int:
    """Compares a converted indicator with its source, value by value in the converted dtype.

    Returns:
        The number of tensors.

    Raises:
        DllmError: naming the first that differs.
    """
    wanted, found = _read(_file_of(Path(source).expanduser())), _published_tensors(load_indicator(folder))
    if wanted.keys() != found.keys():
        raise DllmError(f"{folder} and {source} differ in {min(wanted.keys() ^ found.keys())}; convert it again")
    for name, array in found.items():
        if not np.array_equal(wanted[name].astype(array.dtype), array):
            raise DllmError(f"{folder} and {source} differ in {name}; convert it again")
    return len(found)


def _published_tensors(indicator: Indicator) -> dict[str, np.ndarray]:
    """The parameters under their published names and in their published layout."""
    arrays = {theirs: np.asarray(indicator.params[ours]) for theirs, ours in published_names(indicator.config).items()}
    return {name: np.ascontiguousarray(x.T if x.ndim == 2 else x) for name, x in arrays.items()}


def is_indicator(folder: str | Path) -> bool:
    """Whether a folder holds an indicator of ours."""
    return (Path(folder).expanduser() / CONFIG_FILE).is_file()


def published_names(config: IndicatorConfig) -> dict[str, str]:
    """Published name -> ours, of all parameters; matrices are stored transposed."""
    modules = {ours: theirs for theirs, ours in _MODULES.items()}
    parts = {ours: theirs for theirs, ours in _OF_BLOCK.items()}
    found = {}
    for name in config.shapes():
        module, _, leaf = name.rpartition(".")
        if block := re.fullmatch(r"blocks\.(\d+)\.(\w+)", module):
            theirs = f"backbone.{block[1]}.{parts[block[2]]}"
        else:
            theirs = modules[module]
        found[f"{theirs}.{'bias' if leaf == 'bias' else 'weight'}"] = name
    return found


def _file_of(source: Path) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        raise DllmError(f"there is no file {source}; give the indicator's .pth or .safetensors file")
    found = [path for path in sorted(source.iterdir()) if path.suffix in (*PICKLE_ENDINGS, ".safetensors")]
    if len(found) != 1:
        raise DllmError(f"{source} holds {len(found)} files of weights; name the indicator's own")
    return found[0]


def _read(path: Path) -> dict[str, np.ndarray]:
    if path.suffix != ".safetensors":
        return _read_pickle(path)
    entries = read_header(path)
    return {name: np.array(read_block(entry, slice(0, entry.shape[0]))) for name, entry in entries.items()}


def _read_pickle(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file that `torch.save` wrote, in float32. PyTorch's own reader runs nothing of the file."""
    try:
        import torch
    except ImportError:
        raise DllmError(f"reading {path} needs PyTorch; pip install torch, or save it as safetensors") from None
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        return {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}
    except (OSError, EOFError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
        raise DllmError(f"{path} is no state dict of PyTorch ({type(error).__name__})") from None


def _config_of(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> IndicatorConfig:
    """The config that the shapes speak of, and what a JSON file next to them adds.

    Raises:
        DllmError: naming the first tensor that is missing or does not fit.
    """
    settings = _read_settings(path)
    wanted = ("hidden_states_proj.weight", "token_emb_proj.weight")
    if missing := [name for name in wanted if len(shapes.get(name, ())) != 2]:
        raise DllmError(f"{path} has no matrix {missing[0]}; is it an indicator of NI sampling?")
    (width, hidden_dim), (_, embed_dim) = (shapes[name] for name in wanted)
    numbers = [int(match[1]) for name in shapes if (match := re.match(r"backbone\.(\d+)\.", name))]
    columns = lambda name: [*shapes.get(name, ()), 0, 0][1]
    config = IndicatorConfig(
        depth=max(numbers, default=-1) + 1,
        width=width,
        hidden_dim=hidden_dim,
        embed_dim=embed_dim,
        num_values=columns("logits_proj.weight"),
        num_tokens=1 + columns("extra_token_proj.weight") // max(embed_dim, 1),
        probabilities=bool(settings.get("topk_norm", True)),
        mix="concat_proj.weight" in shapes,
    )
    for theirs, ours in _FIELDS.items():
        if theirs in settings and (settings[theirs] or 0) != getattr(config, ours):
            raise DllmError(f"{path} has {theirs} {getattr(config, ours)}, but its JSON file says {settings[theirs]}")
    for theirs, ours in published_names(config).items():
        shape = config.shapes()[ours]
        shape = shape[::-1] if ours.endswith(".kernel") else shape
        if shapes.get(theirs) != shape:
            raise DllmError(f"{path}: {theirs} has shape {shapes.get(theirs)}, an indicator of its kind has {shape}")
    return config


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings in the JSON file next to the weights, {} without one."""
    sidecar = path.with_suffix(".json")
    settings = storage.read_json(sidecar)
    if settings.get("use_positional_embedding"):
        raise DllmError(f"{sidecar} asks for positional embeddings, which no published indicator has or can run with")
    return settings


def _safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file of these arrays."""
    from safetensors.numpy import save

    return save(dict(tensors), {"format": "pt"})
