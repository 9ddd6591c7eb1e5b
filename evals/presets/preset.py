"""A published number and the settings that it was measured with."""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dllm_jax import spec
from dllm_jax.errors import DllmError
from samplers.config.registry import fields_of
from samplers.config.sampler_config import EVALUATION_DEFAULTS, SamplerConfig, parse_sampler, read_options
from samplers.likelihood.scoring import Estimator
from samplers.tokens.smoothing import Smoothing

Form = Literal["raw", "chat0", "chat1", "chatN"]
Kind = Literal["generate", "likelihood"]
Status = Literal["A", "B", "C"]
FORMS: tuple[Form, ...] = typing.get_args(Form)

GIVEN = ("verifier", "indicator")
"""Options of samplers that a preset leaves to the user: folders."""


@dataclasses.dataclass(frozen=True)
class PublishedScore:
    """A published number.

    Attributes:
        value: the score, in percent.
        metric: as lm-eval names it; empty where the source does not say which of the preset's metrics it is.
        what: "paper", "OpenCompass", or who reproduced it how.
        source: paper and table, file of a repository, or issue.
        nfe: forwards per sample; tpf: tokens per forward; tps: tokens per second, of the source's own counting.
        hardware: where `tps` was measured.
    """

    value: float
    metric: str = ""
    what: str = "paper"
    source: str = ""
    nfe: float | None = None
    tpf: float | None = None
    tps: float | None = None
    hardware: str = ""

    def __str__(self) -> str:
        counts = {"NFE": self.nfe, "tokens/forward": self.tpf, "tokens/s": self.tps}
        numbers = [f"{value:g} {name}" for name, value in counts.items() if value is not None]
        where = [self.hardware] if self.hardware and self.tps is not None else []
        return ", ".join([f"{self.value:g} ({self.what})", *numbers, *where, *([self.source] if self.source else [])])


@dataclasses.dataclass(frozen=True)
class Preset:
    """Everything that decides what a published number is of.

    Attributes:
        name: family/model/task/variant, as far as there are several.
        model: the published checkpoint that the numbers are of; reported, never loaded.
        task: of lm-eval, or one of ours, "dllm_...".
        shots: examples in the prompt; None is the task's own number.
        form: "raw" text; a chat without examples ("chat0"), with examples and question in one turn ("chat1"), or with
            examples as turns ("chatN").
        bos: beginnings of sequence in front of the prompt, besides what a template writes.
        system: the system message of a chat; None is the template's own.
        limit: the first N problems (of each subtask) are asked; None asks all.
        kind: whether answers are generated, or given ones scored.
        sampler: what generates, as a spec (`samplers.parse_sampler`); by default with no cache and in one block.
        max_prompt: longest prompt in tokens, cut on the left; None is what the model's context leaves.
        until: whether answers are cut at the task's stop strings; they always are at an end token.
        samples: masked copies that a likelihood is estimated from; mc_batch: of them in one stratified batch.
        guidance: scale of classifier-free guidance, of likelihoods.
        estimator: of likelihoods, see `samplers.score`.
        metrics: as lm-eval names them, "exact_match,strict-match".
        published: what is to be compared with.
        warnings: why the numbers may not be met, with the issues that report it.
        status: "A" is complete in code, "B" has one or two fields that were inferred, "C" more.
        source: where the settings stand.

    Raises:
        DllmError: for settings that contradict each other.
    """

    name: str
    model: str
    task: str
    shots: int | None
    form: Form
    bos: int = 0
    system: str | None = None
    limit: int | None = None
    kind: Kind = "generate"
    sampler: str = ""
    max_prompt: int | None = None
    until: bool = True
    samples: int = 128
    mc_batch: int = 1
    guidance: float = 0.0
    estimator: Estimator = "llada"
    metrics: tuple[str, ...] = ()
    published: tuple[PublishedScore, ...] = ()
    warnings: tuple[str, ...] = ()
    status: Status = "C"
    source: str = ""

    def __post_init__(self) -> None:
        for name, low in (("shots", 0), ("bos", 0), ("limit", 1), ("max_prompt", 1), ("samples", 1), ("mc_batch", 1)):
            if (value := getattr(self, name)) is not None and value < low:
                raise DllmError(f"{self.name}: {name} is {value}; it must be at least {low}")
        if self.guidance < 0:
            raise DllmError(f"{self.name}: guidance is {self.guidance:g}; it must be at least 0")
        if self.form == "chat0" and self.shots:
            raise DllmError(f"{self.name}: a chat0 has no examples and shots is {self.shots}; write chat1 or chatN")
        if self.form == "raw" and self.system is not None:
            raise DllmError(f"{self.name}: a raw prompt has no system message; leave it out, or write a chat")
        if self.kind == "generate" and not self.sampler:
            raise DllmError(f"{self.name}: sampler is not set; write what generates, such as llada:gen_length=256")
        if self.kind == "likelihood" and self.sampler:
            raise DllmError(f"{self.name}: a likelihood has no sampler; leave {self.sampler} out")
        if self.kind == "likelihood" and self.samples % self.mc_batch:
            advice = "choose one that divides it"
            raise DllmError(f"{self.name}: samples {self.samples} is no multiple of mc_batch {self.mc_batch}; {advice}")

    @property
    def spec(self) -> SamplerConfig:
        """What generates; `build` makes it the sampler of a model."""
        return parse_sampler(self.sampler)

    @property
    def hash(self) -> str:
        """A hash of everything that changes an answer: neither of what is published nor of the number of problems."""
        settings = {name: getattr(self, name) for name in ("kind", *_PROMPT, *_OF_KIND[self.kind])}
        if self.kind == "generate":
            settings["sampler"] = all_options(self.spec)
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


_PROMPT = ("task", "shots", "form", "bos", "system", "max_prompt")
_OF_KIND: Mapping[Kind, tuple[str, ...]] = {
    "generate": ("sampler", "until"),
    "likelihood": ("samples", "mc_batch", "guidance", "estimator"),
}


def all_options(sampler: SamplerConfig) -> dict[str, Any]:
    """A sampler's name and all its options, unset ones with their defaults."""
    found = sampler.over(EVALUATION_DEFAULTS)
    given, kinds = dict(found.options), found.types
    if isinstance(smoothing := given.get("smoothing"), Smoothing):
        numbers = {f"smoothing_{name}": value for name, value in vars(smoothing).items()}
        given |= {"smoothing": True, **numbers}
    if not given.get("smoothing"):
        kinds = {option: kind for option, kind in kinds.items() if not option.startswith("smoothing_")}
    owned = {option: given.get(option, _default_of(found, option)) for option in kinds}
    return {"sampler": found.label, **owned}


def _default_of(config: SamplerConfig, option: str) -> Any:
    owner = config.owners[option]
    found = {field.name: field.default for field in fields_of(owner.kind or config.kind)}.get(owner.field, False)
    if found is not dataclasses.MISSING:
        return found if found is None or isinstance(found, bool | int | float | str) else spec.format_value(found)
    return config.options.get("gen_length") if option == "steps" else None


def modify(preset: Preset, **changes: Any) -> tuple[Preset, list[str]]:
    """The preset with other settings, and the changes, such as "gen_length: 512 -> 256".

    A verifier or an indicator, which a preset leaves to the user, is no change.

    Args:
        changes: settings of the preset or options of its sampler, as values or as they are written on a command line.

    Raises:
        DllmError: for what is no such setting or option, values of another type, and settings that make no sense.
    """
    fields = (*_PROMPT, "limit", *_OF_KIND[preset.kind])
    own = {name: value for name, value in changes.items() if name in fields}
    hints = typing.get_type_hints(Preset)
    texts = {name: spec.format_value(value) for name, value in own.items()}
    values = spec.convert_options(texts, {name: hints[name] for name in own}, preset.name)
    made = [_change(name, getattr(preset, name), value) for name, value in values.items()]
    found = dataclasses.replace(preset, **values)
    options = {name: value for name, value in changes.items() if name not in own}
    if options and preset.kind == "likelihood":
        raise DllmError(f"{preset.name} has no setting {next(iter(options))!r}; it has {', '.join(fields)}")
    if preset.kind == "generate":
        before = all_options(found.spec)
        found = dataclasses.replace(found, sampler=_with_options(found, options)) if options else found
        after = all_options(found.spec)
        made += [_change(name, before.get(name), after[name]) for name in options if name not in GIVEN]
    return found, [change for change in made if change]


def _with_options(preset: Preset, options: Mapping[str, Any]) -> str:
    texts = {name: spec.format_value(value) for name, value in options.items()}
    for name, text in texts.items():
        if set(text) & set(",|@"):
            raise DllmError(f"{preset.name}: {name} {text!r} cannot stand in a spec; use one without , | and @")
    try:
        return str(read_options(preset.spec.name, {**preset.spec.options, **texts}))
    except DllmError as error:
        raise DllmError(f"{preset.name}: {error}") from None


def _change(name: str, old: Any, new: Any) -> str:
    return "" if old == new else f"{name}: {spec.format_value(old)} -> {spec.format_value(new)}"


def describe_preset(preset: Preset) -> str:
    """The whole preset, one setting a line: what is run, then what is published."""
    shown = [
        name for name in ("kind", *_PROMPT, "limit", *_OF_KIND[preset.kind]) if preset.form != "raw" or name != "system"
    ]
    rows = [("preset", preset.name), ("model", preset.model)]
    rows += [(name, _text_of(name, getattr(preset, name))) for name in shown if name != "sampler"]
    if preset.kind == "generate":
        options = all_options(preset.spec)
        rows += [("sampler", options.pop("sampler"))]
        rows += [(f"  {name}", _text_of(name, value)) for name, value in options.items()]
    rows += _lines_of("metric", preset.metrics) + _lines_of("published", preset.published)
    rows += [("status", f"{preset.status}, {preset.source}" if preset.source else preset.status), ("hash", preset.hash)]
    rows += _lines_of("warning", preset.warnings)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _lines_of(name: str, values: Sequence[Any]) -> list[tuple[str, str]]:
    return [(name, str(value)) for value in values]


def _text_of(name: str, value: Any) -> str:
    if value is None:
        return _UNSET.get(name, "none")
    return spec.format_value(value)


_UNSET = {
    "shots": "the task's own",
    "system": "the template's own",
    "limit": "all problems",
    "max_prompt": "what the context leaves",
    "block_length": "one block",
    "verifier": "yours, by --set verifier=DIR",
    "indicator": "yours, by --set indicator=DIR",
}
