"""From settings to the parts of a run: model config, tokenizer, rows of data."""

import dataclasses
import functools
import math
import tempfile
import typing
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dllm_jax.checkpoints import checkpoint
from dllm_jax.checkpoints.loading import Model
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import find_family, published_config
from dllm_jax.parallel.sharding import Layout
from dllm_jax.text.tokenizer import has_tokenizer, load_tokenizer
from train.config import DataPart, ModelPart, TrainConfig
from train.data import SOURCES, Rows, Setup, Source, count_examples, in_words, make_referenced, source_of_split
from train.data.checks import BadExamples, Subset, drop_bad_examples, scans_all
from train.data.heldout import choose_examples, split_heldout
from train.data.mixture import Mixture, epochs_of
from train.lora import check_init, tokenizer_files
from train.objectives import objective_of
from train.settings import convert_value, unknown_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIXTURE = "mixture"
_BUILTIN = (*SOURCES, MIXTURE)
_NAMES = f"{', '.join(_BUILTIN)} or module:name"


@dataclasses.dataclass(frozen=True)
class Parts:
    """Attributes:
    model: config of the backbone.
    rows: training rows by position.
    files: of the trained checkpoint: the tokenizer's, empty where there is none, and how it is sampled.
    generation: how it is sampled.
    heldout: rows for the loss that `watch` reports, each of them once; None where there are none.
    task: what a data.source of other code made: a task, or the source itself; None for a built-in one.
    """

    model: ModelConfig
    rows: Rows
    files: Mapping[str, bytes]
    generation: Mapping[str, Any]
    heldout: Rows | None = None
    task: Any = None

    def check_examples(self, config: TrainConfig, *, progress: bool) -> tuple["Parts", list[BadExamples]]:
        """The parts with rows of good examples alone, and what was wrong with others, see `train.data.checks`."""
        rows, faults = self._drop_bad(self.rows, progress)
        heldout, more = self.heldout, None
        if config.data.heldout:
            own, held = split_heldout(rows.source, config.data.heldout, progress=progress)
            rows = dataclasses.replace(rows, source=own)
            heldout = _heldout(config, held, self.model, checked=rows.checked) if config.watch.every else None
        elif heldout is not None:
            heldout, more = self._drop_bad(heldout, progress)
        if heldout is not None:
            heldout = dataclasses.replace(heldout, source=choose_examples(heldout.source, config.watch.rows))
        rows(0)  # of an endless source the first
        return dataclasses.replace(self, rows=rows, heldout=heldout), [found for found in (faults, more) if found]

    def _drop_bad(self, rows: Rows, progress: bool) -> tuple[Rows, BadExamples | None]:
        source, faults = drop_bad_examples(rows.source, rows.part, rows.kind, self.model, progress=progress)
        return dataclasses.replace(rows, source=source, checked=scans_all(source, rows.part)), faults

    def outline(self, name: str, layout: Layout | None) -> Model:
        """The model as samplers take it, still without parameters."""
        return Model(self.model, {}, _tokenizer(self.files, self.model), name, None, self.generation, layout)


class Outline(NamedTuple):
    """What a run's model is besides its weights.

    Attributes:
        model: config of the backbone.
        files: the tokenizer's, empty where there is none.
        generation: how it is sampled.
        task: what a data.source of other code made: a task, or the source itself; None for a built-in one.
    """

    model: ModelConfig
    files: Mapping[str, bytes]
    generation: Mapping[str, Any]
    task: Any

    @property
    def checkpoint_files(self) -> dict[str, bytes]:
        """Of the trained checkpoint."""
        return {**self.files, **checkpoint.generation_file(self.generation)}


def read_outline(config: TrainConfig) -> Outline:
    """Reads and checks what the settings name but weights and data; a task of `data.source` is made all the same.

    Raises:
        DllmError: for missing checkpoints, and for parts that do not fit each other.
    """
    task = None if config.data.source in _BUILTIN else _make_referenced(config.data)
    objective = objective_of(config)
    model = objective.fit_model(model_config(config.model, getattr(task, "vocabulary", None)), config)
    if config.data.length > model.max_length:
        raise DllmError(
            f"data.length {config.data.length} exceeds the model's longest context of {model.max_length} tokens; lower "
            "it, or set model.config.max_length"
        )
    if config.lora.init:
        objective.trainable(config, model)  # refuses a run without a model to add them to
        check_init(model, config.lora, config.model.init)
    files = _tokenizer_files(config.model, task)
    if config.model.adapt:
        _check_unused_mask(files, model)
    return Outline(model, files, _generation_defaults(config, model, task), task)


def read_parts(config: TrainConfig) -> Parts:
    """Reads and checks everything that the settings name but weights.

    Raises:
        DllmError: for missing checkpoints or data, and for parts that do not fit each other.
    """
    shell, objective = read_outline(config), objective_of(config)
    model, files, task = shell.model, shell.files, shell.task
    cache = Path(config.data.cache).expanduser() if config.data.cache else None
    lengths = config.data.length, config.data.answer_length
    if config.data.pack and not objective.packs:
        raise DllmError(f"python -m train {config.command} takes one example a row; set data.pack to false")
    setup = functools.cache(lambda: Setup(model, _tokenizer(files, model), *lengths, cache, config.data.pack))
    part = config.data
    if task is None:
        source = _builtin_source(part, setup())
    else:
        if config.objective.kind == "prompts" and in_words(task):
            task = task.bind(Model(model, {}, setup().tokenizer, str(config.model.init or "the model being trained")))
            part = dataclasses.replace(part, answer_length=task.answer_width)
        source = source_of_split(task, part.source)
    if config.data.heldout and objective.evaluation_settings() is None:
        raise DllmError(f"python -m train {config.command} has no loss of rows by themselves; set data.heldout to 0")
    if config.data.random_length and config.objective.kind == "sft":
        raise DllmError('data.random_length is for objective.kind "pretrain"; set it to 0')
    kind, batch = config.objective.kind, config.optimizer.batch
    rows = Rows(source, part, kind, model, config.seed, batch, in_flight=objective.in_flight)
    other = _other_source(config, setup, task)
    for table, one in (("data", source), ("watch", other)):
        if one is not None and objective.trajectories and not _has_steps(one):
            raise DllmError(
                "this command learns from trajectories; make some by python -m evals trajectories, and set "
                f'{table}.source to "trajectories" and {table}.options.path to their folder'
            )
    heldout = None if other is None else _heldout(config, other, model)
    return Parts(model, rows, shell.checkpoint_files, shell.generation, heldout, task)


def _has_steps(source: Source) -> bool:
    """Whether examples are trajectories; a source without examples is refused elsewhere."""
    return count_examples(source) == 0 or getattr(source.example(0), "step", None) is not None


def _other_source(config: TrainConfig, setup: Callable[[], Setup], task: Any) -> Source | None:
    """Data for the loss that `watch` reports, other than the training data: what `watch.source` names, or the
    validation split of the task that is trained on."""
    watch = config.watch
    if not watch.every:
        return None
    if objective_of(config).evaluation_settings() is None:
        if watch.source:
            raise DllmError(f"python -m train {config.command} has no loss of rows by themselves; unset watch.source")
        return None
    if watch.source:
        part = dataclasses.replace(config.data, source=watch.source, options=watch.options)
        if watch.source in _BUILTIN:
            return _builtin_source(part, setup(), "watch")
        found = source_of_split(_make_referenced(part, "watch"), watch.source, "validation", "watch")
    elif hasattr(task, "source") and not config.data.heldout:
        found = task.source("validation")
    else:
        return None
    return found if isinstance(found, Sized) else choose_examples(found, watch.rows)


def _heldout(config: TrainConfig, source: Source, model: ModelConfig, *, checked: bool = False) -> Rows:
    watch, rows = config.watch, config.optimizer.batch // config.optimizer.accumulate
    part = dataclasses.replace(config.data, shuffle=False, random_length=0.0)
    if watch.source:
        part = dataclasses.replace(part, source=watch.source, options=watch.options)
    in_flight = objective_of(config).in_flight
    return Rows(source, part, config.objective.kind, model, config.seed, rows, checked, in_flight)


def _generation_defaults(config: TrainConfig, model: ModelConfig, task: Any) -> dict[str, Any]:
    """How the trained model is sampled: a task's canvas in one block without a cache, else as the model before it, and
    as long as the answers that it is trained on; a block diffusion model in its blocks."""
    before = checkpoint.load_generation(checkpoint.find(config.model.init)) if config.model.init else {}
    width = getattr(task, "answer_width", None)
    if model.has_blocks:
        before |= {"block_length": model.block_length, "align_blocks": True, "cache": "exact"}
    elif model.has_causal_context:  # whose blocks and cache are its own
        before = {name: value for name, value in before.items() if name not in ("cache", "align_blocks")}
        before |= {"block_length": model.block_length}
    elif model.has_canvas:
        before |= {"block_length": model.block_length}
    elif width and not in_words(task):
        return {"gen_length": width, "block_length": width, "cache": "none"}
    length = width or config.data.answer_length
    return before | ({"gen_length": length} if length else {})


OF_CONTEXT = ("max_length", "rope_theta")
"""Fields of `model.config` that may differ from those of `model.init`: no parameter's shape depends on them."""


def model_config(part: ModelPart, vocabulary: Any = None) -> ModelConfig:
    """The backbone's config.

    Args:
        vocabulary: of the task that is trained on: its size and special ids, taken where `part.config` is silent.

    Raises:
        DllmError: for unknown fields, values of another type, and a checkpoint with fields that it has already.
    """
    if part.init:
        other, own = sorted(part.config.keys() - {*OF_CONTEXT, "mask_id"}), f"model.init {part.init} has its own"
        if other:
            may = f"only {' and '.join(OF_CONTEXT)} may differ, and mask_id where it has none"
            raise DllmError(f"{own} config; remove model.config.{other[0]} ({may})")
        config = checkpoint.load_config(checkpoint.find(part.init))
        if config.mask_id is not None and "mask_id" in part.config:
            raise DllmError(f"{own} mask token, {config.mask_id}; remove model.config.mask_id")
        config = config.replace(**_config_values(part))
        checkpoint.require_plain(config, part.init, "trained")
        if vocabulary is not None and (config.mask_id, config.eos_id) != (vocabulary.mask_id, vocabulary.eos_id):
            raise DllmError(f"model.init {part.init} has other special tokens than the task in data.source; train anew")
        return adapt_config(config, part.adapt) if part.adapt else config
    if part.adapt:
        raise DllmError(f"model.adapt {part.adapt} needs a checkpoint to adapt; set model.init, or model.published")
    values: dict[str, Any] = {}
    if vocabulary is not None:
        names = ("eos_id", "pad_id", "mask_id", "bos_id", "end_ids")
        values = {name: getattr(vocabulary, name) for name in names} | {"vocab_size": vocabulary.size}
    return published_config(part.published).replace(**values | _config_values(part))


def _config_values(part: ModelPart) -> dict[str, Any]:
    """`part.config` as values of `ModelConfig`'s fields."""
    hints, values = typing.get_type_hints(ModelConfig), {}
    for name, value in part.config.items():
        if name not in hints:
            raise DllmError(unknown_key(f"model.config.{name}", [f"model.config.{known}" for known in hints]))
        values[name] = convert_value(value, hints[name], f"model.config.{name}")
    return values


def adapt_config(config: ModelConfig, kind: str) -> ModelConfig:
    """A model's config with the family, attention, shift and biases of a published one, and its mask token where the
    model has none. Its own family where the other's checkpoints have no place for its parameters.

    Raises:
        DllmError: where the weights do not fit: experts, norms of queries and keys; for a mask token that lies outside
            the vocabulary, or is another special token.
    """
    like = published_config(kind)
    for name in ("experts", "qk_norm"):
        if bool(getattr(config, name)) != bool(getattr(like, name)):
            raise DllmError(f"a {config.family} model cannot become a {like.family} model: only one of them has {name}")
    same = {name: getattr(like, name) for name in ("family", "attention", "block_length", "shift")}
    mask_id = like.mask_id if config.mask_id is None else config.mask_id
    taken = [name for name, token in config.replace(mask_id=None).special_ids().items() if token == mask_id]
    if mask_id is not None and (taken or mask_id >= config.vocab_size):
        why = f"is its {taken[0]}" if taken else f"lies outside its vocabulary of {config.vocab_size} tokens"
        raise DllmError(
            f"the mask token {mask_id} for a {config.family} model as a {like.family} model {why}; set "
            "model.config.mask_id to an id that no text has"
        )
    found = config.replace(**same, mask_id=mask_id, qkv_bias=config.qkv_bias or like.qkv_bias)
    fits = any(layout.holds(found) for layout in find_family(found.family).layouts)
    return found if fits else found.replace(family=config.family)


def _make_referenced(part: DataPart, table: str = "data") -> Any:
    if not part.source:
        raise DllmError(f"data.source is not set; use {_NAMES}")
    if ":" not in part.source:
        raise DllmError(f"no data source is called {part.source!r}; use {_NAMES}")
    return make_referenced(part.source, part.options, table)


def _mixture(part: DataPart, setup: Setup, table: str) -> Mixture:
    """What `data.options.sources` lists, with each source's share of the examples (`weight`) or how often each of its
    examples comes (`epochs`)."""
    entries = part.options.get("sources")
    if part.options.keys() - {"sources"} or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise DllmError(f"a mixture has {table}.options.sources, a list of tables with source, options and weight")
    sources, times = list[Source](), {name: list[float]() for name in ("weight", "epochs")}
    for number, entry in enumerate(entries):
        here = f"{table}.options.sources[{number}]"
        for name in entry.keys() - {"source", "options", "take", *times}:
            raise DllmError(f"{here} has no {name}; it takes source, options, weight, epochs and take")
        own = dataclasses.replace(part, source=entry.get("source", ""), options=entry.get("options", {}))
        if own.source in _BUILTIN:
            found = _builtin_source(own, setup, here)
        else:
            found = source_of_split(_make_referenced(own, here), own.source, table=here)
        if take := convert_value(entry.get("take", 0), int, f"{here}.take"):
            there = count_examples(found)
            if take < 0 or (there is not None and take > there):
                raise DllmError(f"{here}.take is {take}, and the source has {there} examples; give a number of them")
            found = Subset(found, np.arange(take))
        sources.append(found)
        for name in times.keys() & entry.keys():
            value = convert_value(entry[name], float, f"{here}.{name}")
            if not 0 < value < math.inf:
                raise DllmError(f"{here}.{name} is {value:g}; give a number above 0")
            times[name].append(value)
    if sorted(map(len, times.values())) != [0, len(sources)]:
        raise DllmError(f"each of {table}.options.sources needs a weight, or each its epochs; give all of them one")
    if times["epochs"]:
        return Mixture(sources, times["epochs"])
    return Mixture(sources, epochs_of(times["weight"], [count_examples(source) or 1 for source in sources]))


def _builtin_source(part: DataPart, setup: Setup, table: str = "data") -> Source:
    if part.source == MIXTURE:
        return _mixture(part, setup, table)
    make = SOURCES[part.source]
    hints = typing.get_type_hints(make)
    known = [name for name in hints if name not in ("setup", "return")]
    for name in part.options:
        if name not in known:
            raise DllmError(unknown_key(f"{table}.options.{name}", [f"{table}.options.{option}" for option in known]))
    convert = lambda name, value: convert_value(value, hints[name], f"{table}.options.{name}")
    options = {name: convert(name, value) for name, value in part.options.items()}
    if "path" not in options:
        raise DllmError(f"{table}.options.path is not set; name the file or folder that {part.source} reads")
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


def _check_unused_mask(files: Mapping[str, bytes], model: ModelConfig) -> None:
    """Raises DllmError where text is made of the mask token, as of one that a model got when it was adapted."""
    tokenizer = _tokenizer(files, model)
    if tokenizer is None or model.mask_id is None or model.mask_id in tokenizer.added_tokens_decoder:
        return
    if (text := tokenizer.convert_ids_to_tokens(model.mask_id)) is not None:
        raise DllmError(
            f"the mask token {model.mask_id} is the tokenizer's {text!r}, which text is made of; set "
            "model.config.mask_id to an id that no text has"
        )


def _tokenizer(files: Mapping[str, bytes], model: ModelConfig) -> "PreTrainedTokenizerBase | None":
    with tempfile.TemporaryDirectory() as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        return load_tokenizer(name, model) if has_tokenizer(name) else None
