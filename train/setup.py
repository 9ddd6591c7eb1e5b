"""From settings to the parts of a run: model config, tokenizer, rows of data."""

import dataclasses
import tempfile
import typing
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_jax import checkpoint
from dllm_jax.config import ModelConfig, published
from dllm_jax.errors import DllmError
from dllm_jax.tokenizer import has_tokenizer, load_tokenizer
from train.config import DataPart, ModelPart, TrainConfig
from train.data import SOURCES, Rows, Setup, Source, from_reference, size
from train.data.checks import Faults, checked
from train.lora import tokenizer_files
from train.objectives import objective_of
from train.settings import converted, unknown_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Parts:
    """Attributes:
    model: config of the backbone.
    rows: training rows by position.
    files: of the trained checkpoint: the tokenizer's, empty where there is none, and how it is sampled.
    task: what a data.source of other code made: a task, or the source itself; None for a built-in one.
    """

    model: ModelConfig
    rows: Rows
    files: Mapping[str, bytes]
    task: Any = None

    def checked(self, config: TrainConfig, *, progress: bool) -> tuple["Parts", Faults | None]:
        """The parts with rows of good examples alone, and what was wrong with others, see `train.data.checks`."""
        source, faults = checked(self.rows.source, config.data, self.rows.kind, self.model, progress=progress)
        rows = dataclasses.replace(self.rows, source=source, checked=isinstance(source, Sized))
        rows(0)  # of an endless source the first
        return dataclasses.replace(self, rows=rows), faults


def prepare(config: TrainConfig) -> Parts:
    """Reads and checks everything that the settings name but weights.

    Raises:
        DllmError: for missing checkpoints or data, and for parts that do not fit each other.
    """
    source, task = None, None
    if config.data.source not in SOURCES:
        source, task = _referenced(config.data)
    objective = objective_of(config)
    model = objective.fitted(model_config(config.model, getattr(task, "vocabulary", None)), config)
    if config.data.length > model.max_length:
        raise DllmError(
            f"data.length {config.data.length} exceeds the model's longest context of {model.max_length} tokens; lower "
            "it, or set model.config.max_length"
        )
    files = _tokenizer_files(config.model, task)
    if source is None:
        cache = Path(config.data.cache).expanduser() if config.data.cache else None
        setup = Setup(model, _tokenizer(files, model), config.data.length, config.data.answer_length, cache)
        source = _builtin(config.data, setup)
    if config.data.random_length and config.objective.kind == "sft":
        raise DllmError('data.random_length is for objective.kind "pretrain"; set it to 0')
    rows = Rows(source, config.data, config.objective.kind, model, config.seed, config.optimizer.batch)
    if objective.trajectories and size(source) != 0 and getattr(source.example(0), "step", None) is None:
        raise DllmError(
            "this command learns from trajectories; make some by python -m evals trajectories, and set data.source to "
            '"trajectories" and data.options.path to their folder'
        )
    return Parts(model, rows, {**files, **checkpoint.generation_file(_generation(config, model, task))}, task)


def _generation(config: TrainConfig, model: ModelConfig, task: Any) -> dict[str, Any]:
    """How the trained model is sampled: a task's canvas in one block without a cache, else as the model before it, and
    as long as the answers that it is trained on; a block diffusion model in its blocks."""
    before = checkpoint.load_generation(checkpoint.find(config.model.init)) if config.model.init else {}
    width = getattr(task, "answer_width", None)
    if model.attention == "block":
        before |= {"block_length": model.block_length, "align_blocks": True, "cache": "exact"}
    elif width:
        return {"gen_length": width, "block_length": width, "cache": "none"}
    length = width or config.data.answer_length
    return before | ({"gen_length": length} if length else {})


def model_config(part: ModelPart, vocabulary: Any = None) -> ModelConfig:
    """The backbone's config.

    Args:
        vocabulary: of the task that is trained on: its size and special ids, taken where `part.config` is silent.

    Raises:
        DllmError: for unknown fields, values of another type, or both a checkpoint and fields.
    """
    if part.init:
        if part.config:
            raise DllmError(f"model.init {part.init} has its own config; remove model.config")
        config = checkpoint.load_config(checkpoint.find(part.init))
        checkpoint.require_plain(config, part.init, "trained")
        if vocabulary is not None and (config.mask_id, config.eos_id) != (vocabulary.mask_id, vocabulary.eos_id):
            raise DllmError(f"model.init {part.init} has other special tokens than the task in data.source; train anew")
        return adapted(config, part.adapt) if part.adapt else config
    if part.adapt:
        raise DllmError(f"model.adapt {part.adapt} needs a checkpoint to adapt; set model.init, or model.published")
    values: dict[str, Any] = {}
    if vocabulary is not None:
        names = ("eos_id", "pad_id", "mask_id", "bos_id", "end_ids")
        values = {name: getattr(vocabulary, name) for name in names} | {"vocab_size": vocabulary.size}
    hints = typing.get_type_hints(ModelConfig)
    for name, value in part.config.items():
        if name not in hints:
            raise DllmError(unknown_key(f"model.config.{name}", [f"model.config.{known}" for known in hints]))
        values[name] = converted(value, hints[name], f"model.config.{name}")
    return published(part.published).replace(**values)


def adapted(config: ModelConfig, kind: str) -> ModelConfig:
    """A model's config with the family, attention, shift and biases of a published one, and its mask token where the
    model has none.

    Raises:
        DllmError: where the weights do not fit: experts, norms of queries and keys.
    """
    like = published(kind)
    for name in ("experts", "qk_norm"):
        if bool(getattr(config, name)) != bool(getattr(like, name)):
            raise DllmError(f"a {config.family} model cannot become a {like.family} model: only one of them has {name}")
    same = {name: getattr(like, name) for name in ("family", "attention", "block_length", "shift")}
    mask_id = like.mask_id if config.mask_id is None else config.mask_id
    return config.replace(**same, mask_id=mask_id, qkv_bias=config.qkv_bias or like.qkv_bias)


def _referenced(part: DataPart) -> tuple[Source, Any]:
    if not part.source:
        raise DllmError(f"data.source is not set; use {', '.join(SOURCES)} or module:name")
    if ":" not in part.source:
        raise DllmError(f"no data source is called {part.source!r}; use {', '.join(SOURCES)} or module:name")
    return from_reference(part.source, part.options)


def _builtin(part: DataPart, setup: Setup) -> Source:
    make = SOURCES[part.source]
    hints = typing.get_type_hints(make)
    known = [name for name in hints if name not in ("setup", "return")]
    for name in part.options:
        if name not in known:
            raise DllmError(unknown_key(f"data.options.{name}", [f"data.options.{option}" for option in known]))
    options = {name: converted(value, hints[name], f"data.options.{name}") for name, value in part.options.items()}
    if "path" not in options:
        raise DllmError(f"data.options.path is not set; name the file or folder that {part.source} reads")
    return make(setup, **options)


def _tokenizer_files(part: ModelPart, task: Any) -> Mapping[str, bytes]:
    if part.tokenizer:
        folder = Path(part.tokenizer).expanduser()
        if not folder.is_dir() or not has_tokenizer(folder):
            raise DllmError(f"model.tokenizer {folder} is no folder with a tokenizer's files; name one that has them")
        return tokenizer_files(folder)
    if hasattr(task, "write_tokenizer"):
        with tempfile.TemporaryDirectory() as folder_name:
            task.write_tokenizer(Path(folder_name))
            return tokenizer_files(folder_name)
    return tokenizer_files(checkpoint.find(part.init)) if part.init else {}


def _tokenizer(files: Mapping[str, bytes], model: ModelConfig) -> "PreTrainedTokenizerBase | None":
    with tempfile.TemporaryDirectory() as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        return load_tokenizer(name, model) if has_tokenizer(name) else None
