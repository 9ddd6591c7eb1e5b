"""The model card of a checkpoint: a README.md that says what the checkpoint's own files say, and nothing else.

family, sizes         config.json
where it came from    source.json
how it was trained    source.json, and run.json, result.json and metrics.jsonl in the folder of its training run
how it is sampled     generation.json
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from convert.adapters import Adapters
from dllm_jax import buckets
from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.transformer import num_params
from dllm_jax.storage import read_json
from dllm_jax.text.tokenizer import has_tokenizer

CARD_FILE = "README.md"
_RESULTS = ("model", "adapters")  # of a run: the folders that its result.json may be about
# Of a line of the log, and not about the model.
_NOT_OF_MODEL = {"step", "steps", "seconds", "watch_seconds", "tokens_per_second", "mfu"}
_WEIGHTS = {"ema": "moving average", "raw": "last step"}
_FOLDERS = re.compile(r"(?:(?<=[=:,;])|^)(?:[a-z0-9]+://|~?/)[^\s:,;]*/")


class _Run(NamedTuple):
    """What a run's folder says about its result."""

    settings: Mapping[str, Any]
    step: int
    weights: str
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]


def find_base(folder: Path) -> str | None:
    """The repository of the hub that a checkpoint was made from; None where its notes name none."""
    notes = checkpoint.load_source(folder)
    if "trained" in notes:
        return find_repository(str(notes["trained"].get("init") or ""))
    return _repository(notes)


def find_repository(model: str) -> str | None:
    """The repository whose very weights a checkpoint holds, given as a path or a name; None if that is not known."""
    folder = None if not model or buckets.is_address(model) else checkpoint.find_or_none(model)
    notes = checkpoint.load_source(folder) if folder else {}
    return None if {"trained", "merged_adapters"} & notes.keys() else _repository(notes)


def _repository(notes: Mapping[str, Any]) -> str | None:
    source = str(notes.get("source") or "")
    return source if "/" in source else None  # a folder is noted by its last name


def model_card(
    folder: Path,
    config: ModelConfig,
    repository: str,
    *,
    adapters: Adapters | None = None,
    base: str | None = None,
    license: str | None = None,
    revision: str | None = None,
) -> str:
    """The text of a README.md with the front matter that the hub reads.

    Args:
        folder: of a checkpoint, or of adapters.
        config: of the model, or of the one that the adapters belong to.
        repository, revision: where the card will be.
        adapters: what the folder holds, if it is adapters.
        base: repository of the model it was made from.
        license: the hub's word for it, such as "apache-2.0".

    Raises:
        DllmError: when a file about the checkpoint is damaged.
    """
    from huggingface_hub import ModelCardData

    kind = () if config.is_causal else ("diffusion-language-model",)
    front = ModelCardData(
        library_name="peft" if adapters else "dllm_jax",
        pipeline_tag="text-generation",
        license=license,
        base_model=base,
        tags=["dllm_jax", config.family, *kind, *(("lora",) if adapters else ())],
    )
    sections = [
        f"# {repository.partition('/')[2]}",
        _table("Model", _about(config, adapters)),
        *_origin(folder, base, adapters),
        *_training(folder, base, adapters),
        *_sampling(folder),
        _usage(folder, config, repository, adapters, base, revision),
    ]
    return f"---\n{front.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def _about(config: ModelConfig, adapters: Adapters | None) -> dict[str, Any]:
    rows = {
        "Family": config.family,
        "Parameters": f"{num_params(config):,}",
        "Layers": config.num_layers,
        "Width": config.embed_dim,
        "Vocabulary": f"{config.vocab_size:,} tokens",
        "Longest context": f"{config.max_length:,} tokens, prompt and canvas together",
        "Attention": config.attention,
    }
    if config.block_length:
        rows["Block length"] = config.block_length
    if adapters:
        count = sum(x.size for x in adapters.values.values())
        low_rank = {"Adapters": f"{count:,} parameters of rank {adapters.rank}, alpha {adapters.alpha:g}"}
        rows = low_rank | {f"{name} of the base" if name == "Parameters" else name: x for name, x in rows.items()}
    return rows


def _origin(folder: Path, base: str | None, adapters: Adapters | None) -> Iterator[str]:
    notes, link = checkpoint.load_source(folder), f"[{base}](https://huggingface.co/{base})"
    if adapters:
        yield f"Low-rank adapters (LoRA) in PEFT's format for {link}."
    elif "trained" in notes:
        started = "random weights" if not notes["trained"].get("init") else link if base else "another checkpoint"
        yield f"Trained from {started}."
    elif base and base == _repository(notes):
        commit = f" at commit `{notes['revision']}`" if notes.get("revision") else ""
        yield f"Converted from {link}{commit}."
    if "merged_adapters" in notes:
        yield "Low-rank adapters were merged into these weights."


def _training(folder: Path, base: str | None, adapters: Adapters | None) -> Iterator[str]:
    trained = checkpoint.load_source(folder).get("trained")
    run = None if trained is None and not adapters else _find_run(folder, trained)
    if run is None:
        if trained is not None:
            yield _table("Training", {"Steps": trained["steps"], "Weights": _WEIGHTS[trained["weights"]]})
        return
    settings = _shorten_paths(run.settings)
    rows = {
        "Command": f"`python -m train {settings['command']}`",
        "Data": f"`{settings['data']['source']}`, {json.dumps(settings['data'].get('options') or {})}",
        "Steps": run.step,
        "Rows per step": settings["optimizer"]["batch"],
        "Seed": settings["seed"],
        "Weights": _WEIGHTS[run.weights],
    }
    yield _table("Training", rows)
    for about, line in (("Training metrics", run.metrics), ("Evaluation", run.evaluation)):
        shown = {f"`{name}`": x for name, x in line.items() if name not in _NOT_OF_MODEL and isinstance(x, int | float)}
        if shown:
            yield _table(f"{about} after step {line['step']}", shown, level=3)
    text = json.dumps(settings, indent=2)
    yield f"<details>\n<summary>All settings</summary>\n\n```json\n{text}\n```\n\n</details>"


def _find_run(folder: Path, trained: Mapping[str, Any] | None) -> _Run | None:
    """The run whose result a folder is; None where it lies elsewhere."""
    run = folder.resolve().parent
    settings, result = read_json(run / "run.json"), read_json(run / "result.json")
    if folder.resolve().name not in _RESULTS or not settings or not result:
        return None
    if trained and (trained["steps"], trained["weights"]) != (result["step"], result["weights"]):
        return None
    lines = _read_log(run / "metrics.jsonl", result["step"])
    last: Callable[[str], dict[str, float]] = lambda name: next((line for line in lines[::-1] if name in line), {})
    return _Run(settings, result["step"], result["weights"], last("loss"), last("watch_seconds"))


def _read_log(path: Path, until: int) -> list[dict[str, Any]]:
    """The lines of a run's log up to a step; an extended run goes beyond its last result."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
        return [line for line in lines if line["step"] <= until]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DllmError(
            f"{path} could not be read ({error}); correct it, or pass --card with a card of yours"
        ) from None


def _shorten_paths(value: Any) -> Any:
    """Settings without the folders of absolute paths and addresses, which may be private."""
    if isinstance(value, Mapping):
        return {name: _shorten_paths(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_shorten_paths(x) for x in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def _sampling(folder: Path) -> Iterator[str]:
    options = checkpoint.load_generation(folder)
    if options:
        about = "The samplers of this library start from `generation.json`:"
        yield f"## Sampling\n\n{about}\n\n```json\n{json.dumps(options, indent=2)}\n```"


def _usage(
    folder: Path,
    config: ModelConfig,
    repository: str,
    adapters: Adapters | None,
    base: str | None,
    revision: str | None,
) -> str:
    name, at = repository.partition("/")[2], f" --revision {revision}" if revision else ""
    source = base if adapters else repository + at
    lines = [f"python -m convert {config.family} --source {source} --out {'base' if adapters else name}"]
    if adapters:
        lines += [f"python -m convert d2f-lora --source {repository}{at} --base base --out {name}"]
    if config.mask_id is not None and (adapters or has_tokenizer(folder)):  # or no sampler takes a prompt
        sampler = " --sampler leftright" if config.is_causal else ""
        lines += [f'python -m samplers "your prompt" --model {name}{sampler}']
    about = "With dllm_jax, which reads safetensors and runs no code of this repository:"
    return f"## Usage\n\n{about}\n\n```sh\n" + "\n".join(lines) + "\n```"


def _table(title: str, rows: Mapping[str, Any], level: int = 2) -> str:
    lines = ["| {} | {} |".format(name, str(value).replace("|", "\\|")) for name, value in rows.items()]
    return "\n".join([f"{'#' * level} {title}", "", "| | |", "|---|---|", *lines])
