"""Small models that come with the library, in LLaDA's format as the hub has it: `python -m convert embedded`.

Each folder beside this file holds config.json, model.safetensors, the tokenizer, how to sample it, and how
the model came about: recipe.toml (the training config, seed and data), metrics.jsonl (its log) and scores.json.

model = embedded.load("word-problems")
"""

from pathlib import Path
from typing import Any

from convert.hub_folder import copied_files
from convert.safetensors_reader import SINGLE_FILE
from convert.to_jax import convert
from dllm_jax import Model
from dllm_jax import load as load_checkpoint
from dllm_jax.checkpoints import checkpoint
from dllm_jax.errors import DllmError
from dllm_jax.storage import sha256

_HERE = Path(__file__).parent
_FAMILY = "llada"


def names() -> tuple[str, ...]:
    """The models' names."""
    return tuple(sorted(path.parent.name for path in _HERE.glob(f"*/{SINGLE_FILE}")))


def source(name: str) -> Path:
    """The folder of a model in the hub's format.

    Raises:
        DllmError: for an unknown name.
    """
    if name not in names():
        raise DllmError(f"no embedded model is called {name!r}; choose one of {', '.join(names())}")
    return _HERE / name


def install(name: str, folder: str | Path | None = None) -> Path:
    """Converts a model, unless that was done before, and returns the converted checkpoint.

    Args:
        folder: where to; by default the name under `dllm_jax.checkpoints.checkpoint.home()`, where models are found.

    Raises:
        DllmError: for an unknown name, and when the folder holds something else or cannot be written.
    """
    hub = source(name)
    out = checkpoint.home() / name if folder is None else Path(folder)
    if not _is_current(out, hub):
        convert(_FAMILY, hub, out, overwrite=_is_older(out, name))
    return out


def load(name: str, **options: Any) -> Model:
    """A model, installed at its first use; options are those of `dllm_jax.load`.

    Raises:
        DllmError: as `install` and `dllm_jax.load`.
    """
    return load_checkpoint(install(name), **options)


def _is_current(out: Path, hub: Path) -> bool:
    noted = checkpoint.load_source(out).get("files", {}).get(SINGLE_FILE, {})
    same = noted.get("sha256") == sha256(hub / SINGLE_FILE)
    files = copied_files(hub)
    return same and (out / checkpoint.PARAMS_FOLDER).is_dir() and all(_holds(out / name, files[name]) for name in files)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _is_older(out: Path, name: str) -> bool:
    """Whether the folder is a conversion of an earlier version of the model, which may be replaced."""
    return checkpoint.load_source(out).get("source") == name
