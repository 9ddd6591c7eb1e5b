"""The small files of a hub checkpoint: config.json, the generation config and the tokenizer's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dllm_jax.checkpoints import checkpoint
from dllm_jax.errors import DllmError
from dllm_jax.families import HubConfig
from dllm_jax.storage import read_json
from dllm_jax.text.tokenizer import TOKENIZER_FILES

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
# Copied along with converted weights. Names, not endings: nothing that could be code or a pickle slips in.
COPIED_FILES = (*TOKENIZER_FILES, GENERATION_FILE, checkpoint.GENERATION_FILE)


def folder_name(folder: Path) -> str:
    """What a folder in the hub's format is called: its own name, or, in the hub's cache, where that is a commit
    ("models--OWNER--NAME/snapshots/COMMIT"), the repository's, "OWNER/NAME"."""
    folder = folder.resolve()
    cached = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    return cached.removeprefix("models--").replace("--", "/") if cached.startswith("models--") else folder.name


def read_hub_config(folder: Path, name: str) -> HubConfig:
    """`config.json` of a folder in the hub's format, with the added tokens of its tokenizer.

    Args:
        name: as of `HubConfig`.

    Raises:
        DllmError: when it is missing or not JSON, or the tokenizer's files contradict each other.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise DllmError(f"{path} is missing; a checkpoint in the hub's format has one next to its weights")
    return with_tokenizer(read_json(path), folder, str(path), name)


def with_tokenizer(values: Mapping[str, Any], folder: Path, where: str, name: str) -> HubConfig:
    """A config's values together with what the files in a folder say about special tokens.

    Raises:
        DllmError: when one of them is not JSON, or the tokenizer's files contradict each other.
    """
    return HubConfig(
        values=values,
        where=where,
        name=name,
        generation=read_json(folder / GENERATION_FILE),
        tokenizer=read_json(folder / "tokenizer_config.json"),
        meta=read_json(folder / "meta.json"),
        tokens=_added_tokens(folder),
    )


def copied_files(folder: Path) -> dict[str, bytes]:
    """Names and contents of the tokenizer's files and both generation configs, the hub's and ours; no code, no pickles.

    Raises:
        DllmError: when one cannot be read.
    """
    try:
        return {name: (folder / name).read_bytes() for name in COPIED_FILES if (folder / name).is_file()}
    except OSError as error:
        raise DllmError(f"{error.filename} cannot be read ({error.strerror}); check the file") from None


def _added_tokens(folder: Path) -> dict[str, int]:
    """Ids of added tokens by text; a tokenizer keeps them in up to three files."""
    readers = {
        "added_tokens.json": lambda values: values.items(),
        "tokenizer_config.json": lambda values: [
            (entry["content"], int(token)) for token, entry in (values.get("added_tokens_decoder") or {}).items()
        ],
        "tokenizer.json": lambda values: [
            (entry["content"], entry["id"]) for entry in values.get("added_tokens") or []
        ],
    }
    found: dict[str, int] = {}
    for name, pairs in readers.items():
        try:
            tokens = dict(pairs(read_json(folder / name)))
        except DllmError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DllmError(f"the added tokens of {folder / name} are malformed; download it again") from None
        for text, token in tokens.items():
            if found.setdefault(text, token) != token:
                raise DllmError(f"{folder / name} says {text!r} is {token}, another tokenizer file says {found[text]}")
    return found
