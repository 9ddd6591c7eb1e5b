"""Checkpoints on disk: a folder with `config.json`, the parameters in Orbax's format, and the tokenizer's files.

    folder/config.json        the ModelConfig
    folder/generation.json    how it is usually sampled, where that was said
    folder/source.json        where it was converted from, and what the original config said
    folder/params/            Orbax: {"layers.0.attn.q_proj.kernel": array, ...}
    folder/tokenizer*.json    and whatever else the family's tokenizer reads

Of a quantized kernel there are two arrays (`quantized.QuantizedKernel`), whose names say what they are:
"layers.0.attn.q_proj.kernel.scale", and "layers.0.attn.q_proj.kernel.int8" or "layers.0.attn.q_proj.kernel.int4".

A folder is written under a scratch name and renamed at the end, so it is there whole or not at all. In an object
store nothing can be renamed: there the parameters come first, and `config.json`, without which nothing is read, last.
"""

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dllm_jax import buckets
from dllm_jax.config import ModelConfig, Quantize
from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost
from dllm_jax.params.quantized import LARGEST, QuantizedKernel, quantize_on_host
from dllm_jax.params.specs import abstract_params, float32_params, forms
from dllm_jax.storage import atomic_folder, folder_path, read_json, write_error
from dllm_jax.suggestions import did_you_mean

CONFIG_FILE, SOURCE_FILE, PARAMS_FOLDER = "config.json", "source.json", "params"
GENERATION_FILE = "generation.json"
SCALE = "scale"
GROUP_BYTES = 256 * 2**20  # written at a time: bounds the writer's memory, whatever the checkpoint's size


EMBEDDED = ("chains", "long-problems", "maze", "sudoku", "word-problems")
"""Names of the models that come with the library."""


def home() -> Path:
    """Where checkpoints are looked up by name: $DLLM_JAX_HOME, by default ~/.cache/dllm_jax."""
    return Path(os.environ.get("DLLM_JAX_HOME", Path.home() / ".cache" / "dllm_jax"))


def find(path_or_name: str | Path) -> Path:
    """The folder of a converted checkpoint, given as a path, as a name under `home()`, or as an address in an object
    store, of which it is a local copy.

    Raises:
        DllmError: when there is none, it was not converted, or it cannot be reached.
    """
    folder = find_or_none(path_or_name)
    if folder is None:
        make = "make one with python -m convert published NAME, embedded NAME (--help lists them), or of a folder"
        missing = f"no checkpoint at {path_or_name!s} and none of that name in {home()}"
        if path_or_name in EMBEDDED:
            raise DllmError(f"{missing}; it comes with the library: python -m convert embedded {path_or_name}")
        raise DllmError(f"{missing}; {did_you_mean(Path(path_or_name).name, _nearby_names(path_or_name), make)}")
    if not (folder / PARAMS_FOLDER).is_dir():
        what = f"{folder} is not a converted checkpoint (it has no {PARAMS_FOLDER} folder)"
        raise DllmError(f"{what}; {_instead(folder)}")
    return folder


def find_or_none(path_or_name: str | Path) -> Path | None:
    """The folder that `find` means, whatever is in it; None where there is none.

    Raises:
        DllmError: for an address that cannot be reached.
    """
    candidates = [local_folder(path_or_name), home() / str(path_or_name)]
    try:
        return next((path for path in candidates if path.is_dir()), None)
    except OSError:  # a name too long for any file
        return None


def _nearby_names(path_or_name: str | Path) -> list[str]:
    """Names of the converted checkpoints where one was looked for."""
    places = (Path(path_or_name).expanduser().parent, home())
    try:
        return [path.parent.name for place in places if place.is_dir() for path in place.glob(f"*/{PARAMS_FOLDER}")]
    except OSError:
        return []


def _instead(folder: Path) -> str:
    """What to do with a folder that is no checkpoint."""
    if (folder / "adapter_config.json").is_file():
        return f"it holds adapters, merge them: python -m train merge-lora --base BASE --adapters {folder} --out DIR"
    if (folder / "run.json").is_file():
        made = next((folder / name for name in ("model", "adapters", "indicator") if (folder / name).is_dir()), None)
        return f"it is a training run, which {f'wrote {made}' if made else 'has not ended'}"
    return "convert it first: python -m convert FAMILY --source DIR --out DIR"


def name_of(path_or_name: str | Path) -> str:
    """What notes call a converted checkpoint: its address in an object store, or its folder."""
    return str(buckets.remote(path_or_name) if buckets.is_address(path_or_name) else find(path_or_name))


def local_folder(path: str | Path) -> Path:
    """A folder to read from: of an address in an object store a copy under `home()`, which is made once.

    Raises:
        DllmError: when an address cannot be reached, or there is nothing.
    """
    return buckets.local_copy(path, home() / "stores") if buckets.is_address(path) else Path(path).expanduser()


def load_config(folder: str | Path) -> ModelConfig:
    """The ModelConfig of a converted checkpoint.

    Raises:
        DllmError: when the file is missing or not one of ours.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise DllmError(f"{path} is missing; convert the checkpoint again")
    # Bytes that are no text must end in from_json's sentence, not in a UnicodeDecodeError.
    return ModelConfig.from_json(path.read_text(encoding="utf-8", errors="replace"), str(path))


def load_source(folder: str | Path) -> dict[str, Any]:
    """What the converter noted about the source: `{}` for a checkpoint that was trained here."""
    return read_json(Path(folder) / SOURCE_FILE)


def load_generation(folder: str | Path) -> dict[str, Any]:
    """Options of samplers that a checkpoint came with; `{}` where there is no such file.

    Raises:
        DllmError: when the file is damaged.
    """
    return read_json(Path(folder) / GENERATION_FILE)


def generation_file(options: Mapping[str, Any]) -> dict[str, bytes]:
    """The file that `load_generation` reads, by name, as `save` takes it; none for no options."""
    return {GENERATION_FILE: (json.dumps(dict(options), indent=2) + "\n").encode()} if options else {}


def load_params(
    folder: str | Path,
    *,
    dtype: str | None = None,
    shardings: Mapping[str, Any] | None = None,
    quantize: Quantize | None = None,
) -> dict[str, Any]:
    """Restores the parameters straight into their shardings (default: the first device), cast to `dtype`.

    Those of a plain checkpoint that is to be quantized are read and quantized on the host, one by one, so that a device
    holds no more than it keeps.

    Args:
        dtype: of what is not quantized; as stored by default.
        shardings: of the parameters as they will be, see `dllm_jax.param_shardings`.
        quantize: "int8" or "int4"; as stored by default.

    Returns:
        Name -> array or `QuantizedKernel`.

    Raises:
        DllmError: when the stored names or shapes are not those of the config, it is quantized otherwise, or the files
            cannot be read.
    """
    config, path = load_config(folder), (Path(folder) / PARAMS_FOLDER).resolve()
    stored = stored_params(folder)
    wanted = params_to_load(folder, dtype=dtype, shardings=shardings, quantize=quantize)
    if shardings is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), wanted)
    if quantize != config.quantize and quantize is not None:
        tensors = quantize_params(iter_params(folder), config.replace(quantize=quantize), str(path))
        return {name: _put(param, wanted[name]) for name, param in tensors}
    with without_other_processes() if shardings is None else contextlib.nullcontext():
        return _restore(path, stored, wanted)


def params_to_load(
    folder: str | Path,
    *,
    dtype: str | None = None,
    shardings: Mapping[str, Any] | None = None,
    quantize: Quantize | None = None,
) -> dict[str, Any]:
    """Shapes and dtypes (and shardings) of what `load_params` gives, which stand in the files' headers.

    Arguments and errors are those of `load_params`.
    """
    config, path, stored = load_config(folder), (Path(folder) / PARAMS_FOLDER).resolve(), stored_params(folder)
    kept = float32_params(config)
    plain = {name: x for name, x in stored.items() if not _is_quantized(name, stored) and name not in kept}
    dtypes = {str(dtype) if dtype else str(entry.dtype) for entry in plain.values()}
    if len(dtypes) > 1:
        raise DllmError(f"{path} mixes the dtypes {sorted(dtypes)}; say which one to load with dtype=")
    check_names_and_shapes({name: tuple(entry.shape) for name, entry in stored.items()}, config, str(path))
    return abstract_params(quantized_config(config, quantize, str(folder)), dtypes.pop(), shardings)


def without_other_processes() -> Any:
    """Where this process reads or writes for itself, whatever others that it has met do; Orbax would wait for all."""
    from orbax.checkpoint import v1 as ocp

    if jax.process_count() == 1:
        return contextlib.nullcontext()
    here = jax.process_index()
    only = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process-{here}"
    )
    return ocp.Context(multiprocessing_options=only)


def quantized_config(config: ModelConfig, quantize: Quantize | None, where: str) -> ModelConfig:
    """The config of a checkpoint after quantizing it; as it is for None.

    Raises:
        DllmError: for one that is quantized otherwise, and what is neither "int8" nor "int4".
    """
    wanted = config if quantize is None else config.replace(quantize=quantize)
    if config.quantize not in (None, wanted.quantize):
        way_out = f"load it as it is, or quantize the checkpoint that it was made from to {quantize}"
        raise DllmError(f"{where} is quantized to {config.quantize} and cannot become {quantize}; {way_out}")
    return wanted


def require_plain(config: ModelConfig, where: str | Path, what: str) -> None:
    """Raises DllmError for a quantized checkpoint, which `what` cannot be done with."""
    if config.quantize is not None:
        way_out = "name the checkpoint that it was made from"
        raise DllmError(f"{where} is quantized to {config.quantize} and cannot be {what}; {way_out}")


def quantize_params(
    tensors: Iterable[tuple[str, np.ndarray]], config: ModelConfig, where: str
) -> Iterator[tuple[str, np.ndarray | QuantizedKernel]]:
    """A stream of plain host arrays as a quantized model has them, in the same order.

    Raises:
        DllmError: for weights that are no numbers.
    """
    for name, array in tensors:
        if form := forms(config).get(name):
            kernel = quantize_on_host(array, form)
            if not np.isfinite(kernel.scale).all():
                raise DllmError(f"{where}: {name} contains NaN or infinity and cannot be quantized; convert it again")
            yield name, kernel
        else:
            yield name, array


def _put(param: Any, wanted: Any) -> Any:
    return jax.tree.map(lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding), param, wanted)


def _restore(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as they are stored, straight into the shardings of `wanted`."""
    from orbax.checkpoint import v1 as ocp  # here, because it takes two seconds to import

    flat = flatten_params(wanted)
    for key, x in flat.items():
        if _is_quantized(key, stored) and stored[key].dtype != x.dtype:
            found = f"{stored[key].dtype}, not {x.dtype}"
            raise DllmError(f"{path}: {key} is stored as {found}; convert the checkpoint again")
    try:
        return unflatten_params(dict(ocp.load(path, flat)), wanted)
    except Exception as error:  # Orbax raises whatever its storage layer does
        raise _read_error(path, error) from error


def flatten_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as they are stored: of a quantized kernel two arrays, with names of their own."""
    return {key: x for name, param in params.items() for key, x in _entries(name, param).items()}


def unflatten_params(stored: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters such as `like` from what is stored of them."""
    put_together = lambda name, like: jax.tree.unflatten(
        jax.tree.structure(like), map(stored.get, _entries(name, like))
    )
    return {name: put_together(name, param) for name, param in like.items()}


def _entries(name: str, param: Any) -> dict[str, Any]:
    """What is stored of a parameter, by name, in the order of its leaves."""
    if not isinstance(param, QuantizedKernel):
        return {name: param}
    return {f"{name}.{param.bits}": param.values, f"{name}.{SCALE}": param.scale}


def _is_quantized(key: str, stored: Iterable[str]) -> bool:
    """Whether a stored array is a part of a quantized kernel."""
    stem, _, kind = key.rpartition(".")
    return kind in LARGEST or (kind == SCALE and any(f"{stem}.{bits}" in stored for bits in LARGEST))


def stored_params(folder: str | Path) -> dict[str, Any]:
    """Name -> entry with `.shape` and `.dtype` of what is stored, without reading any tensor.

    Raises:
        DllmError: when the folder's metadata cannot be read.
    """
    from orbax.checkpoint import v1 as ocp

    path = (Path(folder) / PARAMS_FOLDER).resolve()
    try:
        return dict(ocp.metadata(path).metadata)
    except Exception as error:
        raise _read_error(path, error) from error


def iter_params(folder: str | Path, names: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
    """The parameters one at a time as host arrays, in the stored dtype: memory stays at one tensor.

    Yields:
        Name, and array or `QuantizedKernel` of two.

    Raises:
        DllmError: when the files cannot be read.
    """
    path, stored = (Path(folder) / PARAMS_FOLDER).resolve(), stored_params(folder)
    read = functools.partial(_read_one, path, stored)
    parts = {key.rpartition(".")[0] if _is_quantized(key, stored) else key: None for key in stored}
    for name in parts if names is None else names:
        bits = next((bits for bits in LARGEST if f"{name}.{bits}" in stored), None)
        if bits is None:
            yield name, read(name)
        else:
            yield name, QuantizedKernel(read(f"{name}.{bits}"), read(f"{name}.{SCALE}"), bits)


def _read_one(path: Path, stored: Mapping[str, Any], key: str) -> np.ndarray:
    from orbax.checkpoint import v1 as ocp

    placeholder = {other: ocp.PLACEHOLDER for other in stored}
    wanted = {**placeholder, key: np.empty(stored[key].shape, stored[key].dtype)}
    try:
        with without_other_processes():
            return np.asarray(ocp.load(path, wanted)[key])
    except Exception as error:  # Orbax raises whatever its storage layer does
        raise _read_error(path, error) from error


def check_names_and_shapes(found: Mapping[str, tuple[int, ...]], config: ModelConfig, where: str) -> None:
    """Compares stored names and shapes with the config's.

    Raises:
        DllmError: naming the first missing, unexpected and misshapen parameters together.
    """
    wanted = {key: x.shape for key, x in flatten_params(abstract_params(config)).items()}
    faults = [f"missing {name}" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"unexpected {name}" for name in sorted(found.keys() - wanted.keys())]
    faults += [
        f"{name} has shape {list(found[name])}, not {list(wanted[name])}"
        for name in sorted(wanted.keys() & found.keys())
        if tuple(found[name]) != tuple(wanted[name])
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise DllmError(f"{where} does not hold the config's parameters: {'; '.join(faults[:3])}{more}")


def save(
    out: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Any]],
    *,
    files: Mapping[str, bytes] | None = None,
    source: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    together: bool = False,
) -> None:
    """Writes a checkpoint folder from a stream of (flat name, array); at most `GROUP_BYTES` plus one tensor is held, or
    the whole model for an address in an object store, where Orbax can add nothing to what it wrote.

    Args:
        out: the folder, which appears whole at the end.
        tensors: exactly the config's parameters, in any order; jax or numpy arrays, or a `QuantizedKernel` of two.
        files: more files to put next to them, such as the tokenizer's.
        source: JSON-able notes about the origin, read back by `load_source`.
        together: all processes of `jax.distributed` call this with the same stream of arrays that lie on the devices of
            all, and each writes what lies on its own, to a file system that all see.

    Raises:
        DllmError: when the stream's names or shapes are not the config's, `out` exists, or the disk is full.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False  # random mantissas: a third of the bytes for 4x the time to write
    seen: dict[str, tuple[int, ...]] = {}

    def checked() -> Iterator[tuple[str, Any]]:
        for name, param in tensors:
            for key, array in _entries(name, param).items():
                seen[key] = tuple(array.shape)
                yield key, array

    remote = buckets.is_address(out)
    with atomic_folder(out, overwrite=overwrite, together=together) as scratch, context:
        params = (folder_path(out) if remote else scratch) / PARAMS_FOLDER
        write = ocp.save if remote else ocp.partial.save
        try:
            for group in _grouped(checked(), math.inf if remote else GROUP_BYTES):
                write(params, group)
            check_names_and_shapes(seen, config, "the stream of tensors")
            if not remote:
                ocp.partial.finalize(params)
            if together and multihost.index():
                return
            (scratch / CONFIG_FILE).write_text(config.to_json() + "\n")
            if source:
                (scratch / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n")
            for name, content in (files or {}).items():
                (scratch / name).write_bytes(content)
        except DllmError:
            raise
        except Exception as error:
            raise write_error(out, error) from error


def _grouped(tensors: Iterable[tuple[str, Any]], limit: float) -> Iterator[dict[str, Any]]:
    group: dict[str, Any] = {}
    size = 0
    for name, array in tensors:
        if group and size + array.nbytes > limit:
            yield group
            group, size = {}, 0
        group[name] = array
        size += array.nbytes
    if group:
        yield group


def _read_error(path: Path, error: Exception) -> DllmError:
    return DllmError(f"{path} could not be read ({multihost.first_line(error)}); convert the checkpoint again")
