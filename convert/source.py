"""Where a checkpoint in the hub's format comes from: a folder, or a repository id that is downloaded first."""

import dataclasses
import re
from pathlib import Path

from convert.hub_folder import folder_name, read_hub_config
from convert.safetensors_reader import TensorEntry, read_folder
from dllm_jax.errors import DllmError, first_line
from dllm_jax.families import FAMILIES, Family, HubConfig

# Weights, settings and tokenizers as plain data; no code and no pickles reach the disk.
DOWNLOADED = ("*.safetensors", "*.json", "*.txt", "*.jinja")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint in the hub's format.

    Attributes:
        name: repository id, or the folder's name: what notes say about where it was.
        revision: the commit of a downloaded repository.
    """

    folder: Path
    name: str
    revision: str | None
    hub: HubConfig
    entries: dict[str, TensorEntry]

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files, in the order of `entries`."""
        return list(dict.fromkeys(entry.path for entry in self.entries.values()))


def open_source(
    source: str | Path, family: Family, revision: str | None = None, block_length: int | None = None
) -> Source:
    """Finds or downloads a checkpoint and reads its config and its tensors' headers.

    Args:
        block_length: as of `HubConfig`.

    Raises:
        DllmError: when it is not there, belongs to another family, or its files are damaged.
    """
    folder, name, commit = locate(source, revision)
    hub = dataclasses.replace(read_hub_config(folder, name), block_length=block_length)
    _check_family(family, hub)
    return Source(folder, name, commit, hub, read_folder(folder))


def _check_family(family: Family, hub: HubConfig) -> None:
    """Raises DllmError for a config.json of another family, or of none that is supported."""
    found = _identify(hub)
    if found is not family:
        raise DllmError(
            f"{hub.where} belongs to a {found.name} checkpoint, not {family.name}; use {found.name} instead"
        )


def _identify(hub: HubConfig) -> Family:
    """By `architectures`, because LLaDA and LLaDA-MoE share a model_type; where there are none, by that and by the
    field that only one of them has."""
    names, model_type = hub.values.get("architectures"), hub.values.get("model_type")
    names = names if isinstance(names, list) else []
    for family in sorted(FAMILIES.values(), key=lambda family: family.marker is None):
        typed = model_type in family.model_types and (family.marker is None or family.marker in hub.values)
        if set(family.architectures) & set(map(str, names)) or (not names and typed):
            return family
    supported = ", ".join(dict.fromkeys(name for family in FAMILIES.values() for name in family.architectures))
    what = f"architecture {names[0]!r}" if names else f"model_type {model_type!r}"
    raise DllmError(f"{hub.where}: {what} is not supported; supported are {supported}")


def locate(source: str | Path, revision: str | None) -> tuple[Path, str, str | None]:
    """The folder of a source, its name, and the commit of a repository, which is downloaded.

    Raises:
        DllmError: when there is no such folder or repository.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise DllmError(f"--revision {revision} is for repository ids, and {folder} is a folder; leave it out")
        return folder, folder_name(folder), None
    if folder.exists():
        raise DllmError(f"{folder} is a file; give the folder that holds config.json and the safetensors files")
    if not _REPOSITORY.fullmatch(str(source)):
        raise DllmError(f"there is no folder {folder}; give a checkpoint folder or a repository id such as owner/name")
    folder = _download(str(source), revision)
    return folder, str(source), folder.name


def _download(repository: str, revision: str | None) -> Path:
    import huggingface_hub  # here, because only a download needs it

    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(DOWNLOADED)))
    except Exception as error:  # HTTP, cache and file errors of several libraries
        raise DllmError(
            f"there is no folder {repository}, and downloading it from the hub failed ({first_line(error)}); "
            "check the name, the connection and the login"
        ) from error
