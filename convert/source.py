"""Where a checkpoint in the hub's format comes from: a folder, or a repository id that is downloaded first."""

import dataclasses
import re
from pathlib import Path

from convert import families
from convert.families import Family
from convert.hub_config import HubConfig, folder_name, read_hub_config
from convert.safetensors_reader import TensorEntry, read_folder
from dllm_jax.errors import DllmError

# Weights, settings and tokenizers as plain data; no code and no pickles reach the disk.
DOWNLOADED = ("*.safetensors", "*.json", "*.txt", "*.jinja")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint in the hub's format.

    Attributes:
        name: repository id, or the folder's name: what may be told to others about where it was.
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
    families.check_family(family, hub)
    return Source(folder, name, commit, hub, read_folder(folder))


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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DllmError(
            f"there is no folder {repository}, and downloading it from the hub failed ({reason}); "
            "check the name, the connection and the login"
        ) from error
