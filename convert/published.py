"""Published models by name: `python -m convert published fast-dllm-v2-1.5b`.

model = published.load("fast-dllm-v2-1.5b")  # downloaded and converted at its first use
"""

from pathlib import Path
from typing import Any

from convert.to_jax import convert
from dllm_jax import Model
from dllm_jax import load as load_checkpoint
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import Quantize, check_quantize
from dllm_jax.errors import DllmError
from dllm_jax.families import REPOSITORIES, published_config


def install(
    name: str, folder: str | Path | None = None, *, quantize: Quantize | None = None, progress: bool = False
) -> Path:
    """Downloads and converts a model, unless that was done before, and returns the converted checkpoint.

    The download stays in the hub's own cache, whose weights may be removed afterwards.

    Args:
        name: a key of `dllm_jax.PUBLISHED`.
        folder: where to; by default the name, followed by the bits of a quantized model ("llada-8b-instruct-int8"),
            under `dllm_jax.checkpoints.checkpoint.home()`, where models are found by name.
        quantize: "int8" or "int4" stores the kernels so.
        progress: show bars on stderr.

    Raises:
        DllmError: for an unknown name, when the folder holds something else, and as `convert.convert`.
    """
    config = published_config(name)
    check_quantize(quantize)
    out = checkpoint.home() / (f"{name}-{quantize}" if quantize else name) if folder is None else Path(folder)
    if not (out / checkpoint.PARAMS_FOLDER).is_dir():
        convert(config.family, REPOSITORIES[name], out, quantize=quantize, progress=progress)
    elif (found := checkpoint.load_config(out).quantize) != quantize:
        kinds = f"{found or 'unquantized'} weights, not {quantize or 'unquantized'} ones"
        raise DllmError(f"{out} holds {kinds}; name another folder")
    return out


def load(name: str, *, quantize: Quantize | None = None, progress: bool = False, **options: Any) -> Model:
    """A model, installed at its first use.

    Args:
        name, quantize, progress: as in `install`.
        options: those of `dllm_jax.load`.

    Raises:
        DllmError: as `install` and `dllm_jax.load`.
    """
    return load_checkpoint(install(name, quantize=quantize, progress=progress), **options)
