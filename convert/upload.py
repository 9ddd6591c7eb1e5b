"""To the hub: a checkpoint or adapters in the hub's format with a model card, in one commit."""

import contextlib
import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from convert.adapters import SETTINGS_FILE, Adapters, read_adapters, write_adapters
from convert.indicator import is_indicator
from convert.model_card import CARD_FILE, find_base, find_repository, model_card
from convert.output import check_out
from convert.to_hub import export
from dllm_jax import storage
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError, first_line

# Names that an export's weights have; those of an earlier push may be other ones of them.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


class Push(NamedTuple):
    """Attributes:
    files: bytes of each file by its name in the repository.
    url: address of the commit; None if nothing was uploaded.
    """

    files: dict[str, int]
    url: str | None


def push(
    model: str | Path,
    repository: str,
    *,
    out: str | Path | None = None,
    dry_run: bool = False,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    card: str | Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Push:
    """Uploads a converted, trained or merged checkpoint, or adapters of a run, to the Hugging Face hub.

    All files arrive in one commit, so the repository holds either what it had before or all of them. Those of an
    earlier push with other shards are removed by it. The token is that of `hf auth login`, or $HF_TOKEN.

    Args:
        model: folder or name of a checkpoint, or folder of adapters.
        repository: "USER/NAME", which is made if it does not exist.
        out: a new folder that keeps the files; by default a temporary one, which needs the model's size.
        dry_run: write the files into `out` and upload nothing.
        private: make a new repository private; one that exists stays as it is.
        revision: the branch, which is made if it does not exist; by default the main one.
        message: of the commit.
        license: the hub's word for the model's license, for the card, such as "apache-2.0".
        base_model: the repository of the model it was made from, where the checkpoint's notes do not say it.
        card: a README.md of your own instead of the one that is written.
        dtype: as of `convert.export`; adapters are float32.
        overwrite: replace `out` if it holds such files already.
        progress: show a bar on stderr while files are written; that of the upload is huggingface_hub's.

    Raises:
        DllmError: before anything is uploaded, for names, folders and options that cannot be, for a checkpoint that has
            no place in the hub's format, and without a token; and where the hub refuses or cannot be reached.
    """
    _check_name(repository)
    if base_model is not None:
        _check_name(base_model)
    if dry_run and out is None:
        raise DllmError("a dry run writes the files into a folder; name it with --out")
    folder, adapters = _find(model, base_model, dtype)
    config = checkpoint.load_config(folder)
    base = adapters.base if adapters else base_model or find_base(folder)
    if card is None:
        text = model_card(
            folder, config, repository, adapters=adapters, base=base, license=license, revision=revision
        ).encode()
    else:
        text = _read_card(card, license)
    hub = None if dry_run else _log_in(repository)
    with contextlib.ExitStack() as scratch:
        if out is None:
            out = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="dllm_jax-"))) / "files"
        if adapters:
            _write_adapters(folder, out, config, adapters, text, overwrite)
        else:
            export(folder, out, dtype=dtype, files={CARD_FILE: text}, overwrite=overwrite, progress=progress)
        root = Path(out).expanduser()
        paths = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
        files = {name: path.stat().st_size for name, path in paths.items()}
        message = message or f"Upload {repository.partition('/')[2]}"
        url = None if hub is None else _commit(hub, repository, paths, private, revision, message)
    return Push(files, url)


def _check_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise DllmError(f"{repository!r} is no repository's name ({first_line(error)}); write USER/NAME") from None
    if "/" not in repository:
        raise DllmError(f"the repository {repository!r} has no owner; write USER/{repository}")


def _find(model: str | Path, base_model: str | None, dtype: str | None) -> tuple[Path, Adapters | None]:
    """The folder of a checkpoint that can be pushed, or of adapters and these, with their base's name on the hub."""
    folder = checkpoint.find_or_none(model)
    if folder is not None and is_indicator(folder):
        what = f"{model} is an indicator, which is no model of its own"
        raise DllmError(f"{what}; write it by python -m convert export, and upload that by hf upload")
    if folder is None or not (folder / SETTINGS_FILE).is_file():
        folder = checkpoint.find(model)
        checkpoint.require_plain(checkpoint.load_config(folder), folder, "pushed")
        return folder, None
    if dtype is not None:
        raise DllmError(f"--dtype {dtype} is for models, and {model} holds adapters; leave it out")
    found = read_adapters(folder, checkpoint.load_config(folder))
    base = base_model or find_repository(found.base)
    if base is None:
        raise DllmError(
            f"the adapters in {folder} belong to {found.base or 'a model that they do not name'}, of which no "
            "repository on the hub is known; name it with --base-model USER/NAME"
        )
    return folder, dataclasses.replace(found, base=base)


def _read_card(path: str | Path, license: str | None) -> bytes:
    from huggingface_hub.repocard import metadata_load

    if license is not None:
        raise DllmError(f"--license {license} is for the card that is written; put it into the front matter of {path}")
    try:
        metadata_load(path)
        return Path(path).read_bytes()
    except Exception as error:  # of the file, its encoding or its YAML
        raise DllmError(f"{path} is no model card ({first_line(error)}); correct the file") from None


def _write_adapters(
    folder: Path, out: str | Path, config: ModelConfig, adapters: Adapters, card: bytes, overwrite: bool
) -> None:
    check_out(out, source=folder, overwrite=overwrite, kind="*.safetensors")
    with storage.atomic_folder(out, overwrite=overwrite) as scratch:
        try:
            write_adapters(scratch, config, adapters)
            (scratch / CARD_FILE).write_bytes(card)
        except OSError as error:
            raise storage.write_error(out, error) from error


def _log_in(repository: str) -> Any:
    """The hub, which knows the token."""
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise DllmError("there is no token for the hub; run hf auth login, or set HF_TOKEN")
    hub = huggingface_hub.HfApi()
    try:
        hub.whoami()
    except Exception as error:  # HTTP and connection errors of several libraries
        raise _hub_error(repository, error) from error
    return hub


def _commit(
    hub: Any, repository: str, paths: dict[str, Path], private: bool, revision: str | None, message: str
) -> str:
    """Uploads the files in one commit, which `HfApi.upload_folder` may split, and returns its address."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    additions = [CommitOperationAdd(name, str(path)) for name, path in paths.items()]
    try:
        hub.create_repo(repository, private=private or None, exist_ok=True)
        if revision is not None:
            hub.create_branch(repository, branch=revision, exist_ok=True)
        there = [] if SETTINGS_FILE in paths else hub.list_repo_files(repository, revision=revision)
        stale = [name for name in there if _WEIGHTS.fullmatch(name) and name not in paths]
        operations = [*map(CommitOperationDelete, stale), *additions]
        return hub.create_commit(repository, operations, commit_message=message, revision=revision).commit_url
    except Exception as error:  # HTTP, connection and file errors of several libraries
        raise _hub_error(repository, error) from error


def _hub_error(repository: str, error: Exception) -> DllmError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return DllmError("the hub does not accept the token; run hf auth login again, or correct HF_TOKEN")
    if status == 403:
        remedy = "choose a name under your own account, or a token that may write to it"
        return DllmError(f"the hub does not let this token write to {repository}; {remedy}")
    why = first_line(error)
    return DllmError(
        f"{repository} was not pushed, because the hub failed ({why}); check the connection, and try again"
    )
