"""One way to write a sampler: a name and options, in Python, as a text on a command line, or as flags.

A spec is a name and its options: `threshold:threshold=0.9,cache=dual,block_length=32`. The name is that of an
unmasking rule, of a preset, or of a sampler with a loop of its own: `d2f:block_length=8,rule=eb,gamma=0.1`,
`apd:verifier=DIR,weight=0.7`. A value may be a list, `eb:gamma=0.01|0.1|1`, which stands for one sampler per value.
A rule or cache policy of your own is `module:Class`, `own:Falling:bound=0.9,cache=own:Sparse`.
What follows the last `@` is the model that the sampler runs, a folder or a name: `d2f:block_length=8@runs/d2f/model`.

Written options win, then a preset's, then defaults: `GENERATION_DEFAULTS` below those of the checkpoint
where texts are generated, `EVALUATION_DEFAULTS` where samplers are compared.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax

from dllm_jax import Model, spec
from dllm_jax.errors import DllmError
from samplers.caches import CACHES
from samplers.checks import refuse_unknown
from samplers.config.factory import CanvasSampler, build_sampler
from samplers.config.presets import PRESETS
from samplers.config.registry import (
    BASE,
    FORMS,
    LOOPS,
    PARTS,
    SELF,
    Owner,
    field_types,
    fields_of,
    is_outside,
    owners_of,
    suggest_name,
    type_of,
)
from samplers.loops.block import BlockSampler
from samplers.rules import RULES, Rule
from samplers.tokens.smoothing import Smoothing

_OF_CANVAS = ("gen_length", "ignore_eos")

ARGUMENTS, COMMAND_LINE = "the arguments", "the command line"
"""Origins of options that a person wrote."""


class TaskCanvas(Protocol):
    """What a task decides about generations.

    Attributes:
        name: for people.
        stops: whether an end token ends an answer; False where the canvas has a fixed length.
        answer_width: length of the canvas.
        stop_strings: texts that end an answer.
    """

    name: ClassVar[str]
    stops: ClassVar[bool]

    @property
    def answer_width(self) -> int: ...

    @property
    def stop_strings(self) -> Sequence[str]: ...


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """A sampler without a model: the written options and, after `over`, the defaults of unset ones.

    Attributes:
        name: of an unmasking rule, of a preset, or of a sampler with a loop of its own; None leaves that open.
        options: option -> value, as `make_sampler` takes them.
        model: folder or name of the model that it runs; None leaves that open.
        origins: option -> where its value comes from: `ARGUMENTS`, `COMMAND_LINE`, "preset NAME", "generation.json";
            "sampler" -> where the name comes from. It does not count when two are compared.
    """

    name: str | None
    options: Mapping[str, Any]
    model: str | None = None
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def from_one(
        cls, name: str | None, options: Mapping[str, Any], origin: str, model: str | None = None
    ) -> "SamplerConfig":
        """One whose name and options are all of one origin."""
        return cls(name, dict(options), model, dict.fromkeys([*options, *(["sampler"] if name else [])], origin))

    @property
    def kind(self) -> type:
        """The sampler's class."""
        return LOOPS.get(self.name or "", BlockSampler)

    @property
    def label(self) -> str:
        """The name, else the rule's."""
        rule = self.options.get("rule")
        return self.name or (rule if isinstance(rule, str) else type(rule).__name__)

    def is_written(self, option: str) -> bool:
        """Whether a person wrote this option: it is no default, and not a preset's."""
        return self.origins.get(option) in (ARGUMENTS, COMMAND_LINE)

    @property
    def owners(self) -> dict[str, Owner]:
        """Option -> its owner, of all options there are with these parts.

        Raises:
            DllmError: for an unknown rule or cache policy.
        """
        return owners_of(self.kind, self.options)

    @property
    def types(self) -> dict[str, Any]:
        """Option -> the type of its values, of what can be written; errors are those of `owners`."""
        found = {option: type_of(owner.kind or self.kind, owner.field) for option, owner in self.owners.items()}
        return {option: kind for option, kind in found.items() if spec.is_writable(kind)}

    def over(self, defaults: "SamplerConfig") -> "SamplerConfig":
        """The same with defaults under it; those of a rule or cache policy that is not taken do not count.

        Returns:
            One whose name is that of a loop, or None: a rule is then among the options.

        Raises:
            DllmError: for unknown names, and options that no part has.
        """
        name, loop = self.name, self.name if self.name in LOOPS else None
        rule = {"rule": name} if name in RULES or is_outside(name) else {}
        if rule and "rule" in self.options:
            raise DllmError(f"{name} and rule={self.options['rule']} both name the rule; leave one of them out")
        if name is None and "rule" not in self.options:
            loop = defaults.name
        elif name is not None and name in PRESETS:
            defaults = SamplerConfig.from_one(None, PRESETS[name], f"preset {name}")._fill(defaults)
        elif name is not None and not rule and loop is None:
            names = suggest_name(name, (*RULES, *PRESETS, *LOOPS))
            raise DllmError(f"no unmasking rule or preset is called {name!r}; {names}")
        origins = {**self.origins, **{part: self.origins.get("sampler", "the library") for part in rule}}
        written = dataclasses.replace(self, name=loop, options={**self.options, **rule}, origins=origins)
        found = written._fill(defaults)
        form = next((option for option in FORMS if option in self.options), None)
        if form is not None and "constraint" not in field_types(found.kind):
            raise DllmError(f"sampler {name}: {form} is kept by unmasking rules, not by this loop; name a rule instead")
        known = [option for option in found.owners if option not in rule]
        refuse_unknown(f"sampler {name or found.label}", self.options, known, _parts_with)
        return found

    def _fill(self, defaults: "SamplerConfig") -> "SamplerConfig":
        """The same with those options of `defaults` that are unset and mean the same here."""
        parts = {part: defaults.options[part] for part in (*PARTS, BASE) if part in defaults.options}
        if self.kind is not defaults.kind:
            parts.pop("rule", None)  # of another sampler, where it does something else
        ours, theirs = owners_of(self.kind, {**parts, **self.options}), defaults.owners
        same = {option: value for option, value in defaults.options.items() if ours.get(option) == theirs[option]}
        kept = {option: value for option, value in same.items() if option not in PARTS or option in parts}
        taken = {*kept, *(["sampler"] if self.name == defaults.name else [])} - self.options.keys()
        origins = {option: defaults.origins[option] for option in defaults.origins if option in taken}
        return dataclasses.replace(self, options={**kept, **self.options}, origins={**origins, **self.origins})

    def for_canvas(self, canvas: TaskCanvas) -> "SamplerConfig":
        """The same with the task's values for unset options: the length, what ends an answer.

        Raises:
            DllmError: where such an option is written and the canvas has a fixed length.
        """
        if not canvas.stops and (fixed := sorted(set(_OF_CANVAS) & set(self.options))):
            raise DllmError(f"sampler {self}: {fixed[0]} cannot be chosen; the canvas of {canvas.name} is fixed")
        own = {"gen_length": canvas.answer_width, "ignore_eos": not canvas.stops}
        stop = {"stop": canvas.stop_strings} if canvas.stop_strings else {}
        return dataclasses.replace(self, options={**own, **stop, **self.options})

    def load_verifier(self, load: Callable[[str], Model]) -> "SamplerConfig":
        """The same with the verifier as a model, where there is one."""
        verifier = self.options.get("verifier")
        if not isinstance(verifier, str) or verifier == SELF:
            return self
        return self.with_options(verifier=load(verifier))

    def with_options(self, **options: Any) -> "SamplerConfig":
        """The same with other options as well."""
        return dataclasses.replace(self, options={**self.options, **options})

    def without(self, option: str) -> "SamplerConfig":
        """The same without an option."""
        return dataclasses.replace(self, options={k: v for k, v in self.options.items() if k != option})

    def anywhere(self) -> "SamplerConfig":
        """The same for any model."""
        return dataclasses.replace(self, model=None)

    @property
    def settings(self) -> dict[str, Any]:
        """All options in an evaluation, the rule among them, but for what the task decides, which is not a preset's
        canvas."""
        found = self.over(EVALUATION_DEFAULTS).options
        return {name: value for name, value in found.items() if name not in _OF_CANVAS or name in self.options}

    @property
    def numbers(self) -> dict[str, Any]:
        """The written numbers of the rule, or of a loop of its own, which may change without another compilation."""
        found = self.over(EVALUATION_DEFAULTS)
        owners = found.owners
        roomy = lambda option: f"most_{option}" in self.options or f"most_{option}" not in owners
        traced = [option for option in self.options if _is_traced(owners[option], found.kind) and roomy(option)]
        return {option: self.options[option] for option in traced if type(self.options[option]) in (int, float)}

    @property
    def series(self) -> str:
        """The spec without its numbers: samplers of one series differ in numbers only and make one curve."""
        structure = {k: v for k, v in self.options.items() if k not in self.numbers}
        return str(dataclasses.replace(self, options=structure))

    def __str__(self) -> str:
        options = ",".join(f"{name}={spec.format_value(value)}" for name, value in self.options.items())
        at = "" if self.model is None else f"@{self.model}"
        return (f"{self.name}:{options}" if options else str(self.name)) + at

    def check_unbound(self) -> None:
        """Raises DllmError when it names its model: its builder loads that one, and calls `anywhere`."""
        if self.model is not None:
            raise DllmError(f"sampler {self} names a model of its own; load that one, and leave @{self.model} out")

    def build(self, model: Model) -> CanvasSampler:
        """The sampler of a model. Unset options are as in evaluations, `EVALUATION_DEFAULTS`, and `gen_length` is the
        checkpoint's; a block diffusion model runs in its own blocks, whose cache is exact.

        Raises:
            DllmError: for numbers out of range, combinations that make no sense, and as `check_unbound`.
        """
        self.check_unbound()
        if not _can_generate(model):
            problem = f"sampler {self.label}: {model.name} has no mask token to mark undecided positions with"
            raise DllmError(f"{problem}; use it as a verifier, or set an unused id as mask_id in its config")
        found = self.over(_fit(EVALUATION_DEFAULTS, model))
        if "gen_length" not in found.options:
            found = found.with_options(gen_length=defaults_of(model).options["gen_length"])
        return build_sampler(model, found.kind, found.options, f"sampler {found.label}")


GENERATION_DEFAULTS = SamplerConfig.from_one(
    None, {"rule": "threshold", "cache": "dual", "gen_length": 256, "block_length": 32}, "the library"
)
"""Defaults where texts are generated, below those of the checkpoint."""

EVALUATION_DEFAULTS = SamplerConfig.from_one(None, {"rule": "threshold", "cache": "none"}, "evaluations")
"""Defaults where samplers are compared: no approximation but what is written, and one block."""


def _can_generate(model: Model) -> bool:
    return model.config.mask_id is not None or model.config.has_canvas


def _is_traced(owner: Owner, sampler: type) -> bool:
    kind = owner.kind or sampler
    numbers = issubclass(kind, Rule) or kind in LOOPS.values()
    return numbers and jax.Array in spec.members(type_of(kind, owner.field))


def _parts_with(option: str) -> list[str]:
    """Names of the rules, policies and loops that have such an option of their own."""
    common = {field.name for field in fields_of(BlockSampler)}
    kinds = {**RULES, **CACHES, **LOOPS}
    return [name for name in kinds if option in {field.name for field in fields_of(kinds[name])} - common]


def make_sampler(
    model: Model, sampler: str | Rule | SamplerConfig | CanvasSampler | None = None, **options: Any
) -> CanvasSampler:
    """A sampler for a model, from plain values.

    Unset options come from the checkpoint's `generation.json`, then from `GENERATION_DEFAULTS`: the rule "threshold"
    with the dual cache, 256 positions in blocks of 32.

    Args:
        sampler: the name of an unmasking rule ("threshold", "eb", ...; all in `samplers.RULES`, or "module:Class" of
            your own), of a preset, or of a sampler with a loop of its own ("d2f", "apd", ...), with options if you
            like: "eb:gamma=0.1,cache=dual"; what `parse_sampler` made of such a text; a rule; or a sampler, which is
            taken as it is. `rule=` does the same as a rule's name.
        options: fields of the sampler, of its rule (``rule="eb", gamma=0.1``) and of its cache policy
            (``cache="vicinity", warmup=2``), which may be given as objects. How tokens are drawn, as in `Sampling`:
            temperature: 0 takes the most probable token, the default.
            top_p, top_k: draw from the smallest set of tokens above this probability, or the k most probable.
            Of every `BlockSampler`:
            gen_length: positions to generate.
            guidance: scale of classifier-free guidance.
            align_blocks, sub_block_length, canvas_length, fill_after_eos: see there. Besides:
            block_length: capped at gen_length; 0 and None are one block.
            stop: strings or token ids that end an answer, in addition to the model's own end tokens.
            ignore_eos: do not end at the model's end tokens.
            regex: a regular expression that the whole answer matches.
            json_schema: a JSON schema, as a dict, that the answer is JSON of (see docs/constraints.md). For `infill`,
                a list of either has one for each gap.
            suppress, defer: lists of token ids, or of texts that are one token each; "word" and " word" are two. "eos"
                is the model's end-of-sequence token and "ends" all its end tokens, the only ones that a spec can name.
            smoothing: True, numbers as in "weight=0.2,growth=0.1", or a `Smoothing`.
            verifier: a loaded causal model of the same tokens, its folder or name, a `Verifier`, or "self": the model
                itself, where that can be read causally.
            indicator: a folder, or an `Indicator`.
            steps: one per token if a rule needs them.

    Raises:
        DllmError: for unknown names, options that no part has, numbers out of range, and options with a sampler.
    """
    if not isinstance(sampler, str | Rule | SamplerConfig | None):
        if not hasattr(sampler, "step"):
            raise DllmError(f"sampler is {sampler!r}; give a name, such as 'threshold', a rule object or a sampler")
        if options:
            raise DllmError(f"options {', '.join(sorted(options))} have no effect with a sampler; set them in it")
        return sampler
    config = configure(model, sampler, options)
    try:
        return config.build(model)
    except DllmError:
        if model.generation and _can_generate(model):  # the defaults may be at fault
            with _of_checkpoint(model):
                defaults_of(model).build(model)
        raise


def configure(model: Model, sampler: str | Rule | SamplerConfig | None, options: Mapping[str, Any]) -> SamplerConfig:
    """What `make_sampler` builds: the sampler and its options over the model's defaults.

    Raises:
        DllmError: for unknown names, and options that no part has.
    """
    defaults = defaults_of(model)
    if isinstance(sampler, str):
        sampler = parse_sampler(sampler, defaults)
    elif sampler is None or isinstance(sampler, Rule):
        sampler = SamplerConfig.from_one(None, {} if sampler is None else {"rule": sampler}, ARGUMENTS)
    sampler.check_unbound()
    refuse_twice(sampler.options, options)
    more = SamplerConfig.from_one(None, _split_smoothing(options), ARGUMENTS)
    origins = {**sampler.origins, **more.origins}
    return dataclasses.replace(sampler.with_options(**more.options), origins=origins).over(defaults)


def defaults_of(model: Model) -> SamplerConfig:
    """The library's defaults and, over them, those that the checkpoint came with.

    Raises:
        DllmError: for a `generation.json` with unknown options, or values of another type.
    """
    usual = _fit(GENERATION_DEFAULTS, model)
    if not model.generation:
        return usual
    with _of_checkpoint(model):
        texts = {o: str(v) if isinstance(v, list | dict) else spec.format_value(v) for o, v in model.generation.items()}
        if own := [name for name in ("sampler", *PARTS, BASE) if is_outside(texts.get(name))]:
            raise DllmError(
                f"{own[0]} {texts[own[0]]!r} is other code, which a checkpoint may not name; pass it yourself"
            )
        return read_options(texts.pop("sampler", None), texts, usual, "generation.json").over(usual)


def _fit(defaults: SamplerConfig, model: Model) -> SamplerConfig:
    """Defaults for a block diffusion model: its own blocks, and their cache, which is exact; and for a model with a
    canvas, of which this is the length."""
    length = model.config.block_length
    if length is None:
        return defaults
    if model.config.has_canvas:
        canvas = {name: value for name, value in defaults.options.items() if name == "gen_length"}
        own = SamplerConfig.from_one("renoise", {"block_length": length}, "the model")
        origins = {**own.origins, **{name: defaults.origins[name] for name in canvas}}
        return dataclasses.replace(own.with_options(**canvas), origins=origins)
    aligned = {} if model.config.has_causal_context else {"align_blocks": True}
    own = SamplerConfig.from_one(None, {"block_length": length, **aligned, "cache": "exact"}, "the model")
    return own.over(defaults)


@contextlib.contextmanager
def _of_checkpoint(model: Model) -> Iterator[None]:
    try:
        yield
    except DllmError as error:
        raise DllmError(f"generation.json of {model.name}: {error}") from None


# Texts


def parse_samplers(text: str, defaults: SamplerConfig = EVALUATION_DEFAULTS) -> list[SamplerConfig]:
    """All samplers that a spec stands for, in the order of its values.

    Args:
        defaults: whose parts have options of their own.

    Raises:
        DllmError: for unknown names and options, and values of another type; numbers are checked when it is built.
    """
    name, options, model = split_spec(text)
    products = itertools.product(*(value.split("|") for value in options.values()))
    return [read_options(name, dict(zip(options, values, strict=True)), defaults, model=model) for values in products]


def parse_sampler(text: str, defaults: SamplerConfig = EVALUATION_DEFAULTS) -> SamplerConfig:
    """One sampler, see `parse_samplers`.

    Raises:
        DllmError: as there, and for a list of values.
    """
    found = parse_samplers(text, defaults)
    if len(found) != 1:
        raise DllmError(f"sampler {text!r} stands for {len(found)} samplers; choose one, or sweep over them")
    return found[0]


def split_spec(text: str) -> tuple[str, dict[str, str], str | None]:
    """A spec's name, its options as texts, and its model.

    Raises:
        DllmError: for what is no spec.
    """
    written, at, model = text.rpartition("@")
    if at and not (written and model):
        raise DllmError(f"sampler {text!r} has no {'model after' if written else 'name before'} the @; write NAME@DIR")
    return *_split_name(written if at else text), model if at else None


def _split_name(text: str) -> spec.Spec:
    """A name, which may be "module:Class", and its options: text between colons without "=" is not an option."""
    name, _, rest = text.partition(":")
    own, colon, options = rest.partition(":")
    if not name or not own or "=" in own or "," in own or name in {**RULES, **LOOPS, **PRESETS}:
        return spec.parse(text, "sampler")
    return spec.Spec(f"{name}:{own}", spec.parse_options(options, f"sampler {text!r}"))


def read_options(
    name: str | None,
    options: Mapping[str, Any],
    defaults: SamplerConfig = EVALUATION_DEFAULTS,
    origin: str = ARGUMENTS,
    model: str | None = None,
) -> SamplerConfig:
    """A sampler whose options, or some of them, are texts.

    Raises:
        DllmError: as `parse_samplers`.
    """
    written = SamplerConfig.from_one(name, _split_smoothing(options), origin, model)
    found = written.over(defaults)
    texts = {option: value for option, value in written.options.items() if isinstance(value, str)}
    return written.with_options(**spec.convert_options(texts, found.types, f"sampler {name or found.label}"))


def _split_smoothing(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with smoothing's numbers, where it is written as `weight=0.2,growth=0.1`, as options of their own."""
    text = options.get("smoothing")
    if not isinstance(text, str) or "=" not in text:
        return dict(options)
    numbers = spec.convert_options(spec.parse_options(text, "smoothing"), field_types(Smoothing), "smoothing")
    return {**options, "smoothing": True, **{f"smoothing_{name}": value for name, value in numbers.items()}}


def refuse_twice(spec_options: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raises DllmError for an option that is both in a spec and outside it."""
    if twice := sorted(spec_options.keys() & others.keys()):
        raise DllmError(f"{twice[0]} is in the sampler and an option of its own; leave one out")
