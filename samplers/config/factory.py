"""Samplers from what people write: by names and plain values, in Python, or as a text on a command line.

A spec is a name with options behind it: `threshold:threshold=0.9,cache=dual,block_length=32`. The name is that of an
unmasking rule, of a preset, or of a sampler with a loop of its own: `d2f:block_length=8,rule=eb,gamma=0.1`,
`apd:verifier=DIR,weight=0.7`. A value may be a list, `eb:gamma=0.01|0.1|1`, which stands for one sampler per value.
A rule or cache policy of one's own is `module:Class`, `own:Falling:bound=0.9,cache=own:Sparse`.
What follows the last `@` is the model that the sampler runs, a folder or a name: `d2f:block_length=8@runs/d2f/model`.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

import dllm_jax
from dllm_jax import Model, ModelConfig, spec
from dllm_jax.errors import DllmError
from dllm_jax.indicator import Indicator, load_indicator
from dllm_jax.text.tokenizer import encode_text, token_bytes
from samplers.caches import CachePolicy
from samplers.checks import assemble, check_length, check_token
from samplers.config.presets import PRESETS
from samplers.config.registry import (
    ENDS,
    LOOPS,
    PLAIN,
    USUAL,
    Owner,
    SamplerConfig,
    called,
    fields_of,
    is_outside,
    kind_of,
    kinds_of,
    named,
    options_of,
    resolve,
    unfolded,
)
from samplers.loops.renoise import Renoise
from samplers.loops.verifier import Verifier, verifier_for
from samplers.rules import RULES, Rule
from samplers.sampler import Sampler
from samplers.stopping import Stop, check_stop, end_tokens, stop_on, stop_strings
from samplers.tokens.predictions import Sampling
from samplers.tokens.smoothing import Smoothing

_OF_CANVAS = ("gen_length", "ignore_eos")


class CanvasSampler(Sampler[Any], Protocol):
    """A sampler that tells where it writes, as all here do; its state has a `canvas`.

    Attributes:
        gen_length: G, positions to generate.
        canvas_length: positions of prompt and canvas together, where the canvas is longer than the generation.
        width: length of a block.
    """

    @property
    def gen_length(self) -> int: ...

    @property
    def canvas_length(self) -> int | None: ...

    @property
    def width(self) -> int: ...

    def pending(self, state: Any) -> jax.Array:
        """[B, G] bool, positions that may still change."""
        ...

    def forwards(self, prompt_length: int) -> tuple[int, int]:
        """Fewest and most forwards of a row behind such a prompt, if no end token ends it before."""
        ...


def make_sampler(model: Model, name: str | Rule | None = None, **options: Any) -> CanvasSampler:
    """A sampler for a model, from plain values.

    What is not said is as the checkpoint's `generation.json` says, else as usual: the rule "threshold" with the dual
    cache, 256 positions in blocks of 32.

    Args:
        name: of an unmasking rule ("threshold", "eb", ...; all in `samplers.RULES`, or "module:Class" of your own), a
            preset, or a sampler with a loop of its own ("d2f", "apd", ...), with options behind it if you like:
            "eb:gamma=0.1,cache=dual"; or a rule. `rule=` says the same.
        options: fields of the sampler, of its rule (``rule="eb", gamma=0.1``) and of its cache policy
            (``cache="vicinity", warmup=2``), which may be given as objects. How tokens are drawn, as in `Sampling`:
            temperature: 0 takes the most probable token, the default.
            top_p, top_k: draw from the smallest set of tokens above this probability, or from so many.
            Of every `BlockSampler`:
            gen_length: positions to generate.
            guidance: scale of classifier-free guidance.
            align_blocks, sub_block_length, canvas_length, fill_after_eos: see there. Besides:
            block_length: capped at gen_length; 0 and None are one block.
            stop: strings or token ids that end an answer, in addition to the model's own end tokens.
            ignore_eos: do not end at the model's end tokens.
            suppress, defer: lists of token ids, or of texts that are one token each; "word" and " word" are two. "eos"
                is the model's end-of-sequence token and "ends" all its end tokens, the only ones that a spec can name.
            smoothing: True, numbers as in "weight=0.2,growth=0.1", or a `Smoothing`.
            verifier: a loaded causal model of the same tokens, its folder or name, or a `Verifier`.
            indicator: a folder, or an `Indicator`.
            steps: one per token where a rule cannot do without.

    Raises:
        DllmError: for unknown names, options that nobody owns, and numbers out of range.
    """
    settings = settings_for(model, name, options)
    try:
        return build(model, settings)
    except DllmError:
        if model.generation:  # which may be at fault
            with _of_checkpoint(model):
                build(model, defaults_of(model))
        raise


def sampler_of(model: Model, sampler: str | Rule | CanvasSampler | None, options: Mapping[str, Any]) -> CanvasSampler:
    """A sampler as it is, or what `make_sampler` makes of a name or rule with options.

    Raises:
        DllmError: as there, and for options beside a sampler.
    """
    if sampler is None or isinstance(sampler, str | Rule):
        return make_sampler(model, sampler, **options)
    if options:
        raise DllmError(f"options {', '.join(sorted(options))} have no effect beside a sampler; set them in it")
    return sampler


def settings_for(model: Model, name: str | Rule | None, options: Mapping[str, Any]) -> SamplerConfig:
    """What `make_sampler` makes a sampler of: its class and all that is said of it, by the model's defaults too.

    Raises:
        DllmError: for unknown names, and options that nobody owns.
    """
    under = defaults_of(model)
    if isinstance(name, Rule):
        name, options = None, {"rule": name, **options}
    if isinstance(name, str):
        said = parse_sampler(name, under)
        said.check_unbound()
        refuse_twice(said.options, options)
        name, options = said.name, {**said.options, **options}
    elif name is not None:
        raise DllmError(f"sampler is {name!r}; give a name, such as 'threshold', or a rule object")
    return resolve(name, options, under)


def defaults_of(model: Model) -> SamplerConfig:
    """The library's defaults and, over them, those that the checkpoint came with.

    Raises:
        DllmError: for a `generation.json` with unknown options, or values of another type.
    """
    usual = in_blocks(USUAL, model)
    if not model.generation:
        return usual
    with _of_checkpoint(model):
        texts = {o: str(v) if isinstance(v, list | dict) else spec.format_value(v) for o, v in model.generation.items()}
        if own := [name for name in ("sampler", "rule", "cache") if is_outside(texts.get(name))]:
            raise DllmError(
                f"{own[0]} {texts[own[0]]!r} is other code, which a checkpoint may not name; say so yourself"
            )
        said = typed(texts.pop("sampler", None), texts, under=usual)
        return resolve(said.name, said.options, usual, "generation.json")


def in_blocks(settings: SamplerConfig, model: Model) -> SamplerConfig:
    """Defaults as they are for a block diffusion model: its own blocks, and their cache, which is exact; and for a
    model with a canvas, of which this is the length."""
    length = model.config.block_length
    if length is None:
        return settings
    if model.config.has_canvas:
        canvas = {name: value for name, value in settings.options.items() if name == "gen_length"}
        origins = {name: settings.origins[name] for name in canvas if name in settings.origins}
        own: dict[str, Any] = {"block_length": length}
        return SamplerConfig(Renoise, {**own, **canvas}, {**dict.fromkeys(("sampler", *own), "the model"), **origins})
    own = {"block_length": length, "align_blocks": True, "cache": "exact"}
    origins = {**settings.origins, **dict.fromkeys(own, "the model")}
    return dataclasses.replace(settings, options={**settings.options, **own}, origins=origins)


@contextlib.contextmanager
def _of_checkpoint(model: Model) -> Iterator[None]:
    try:
        yield
    except DllmError as error:
        raise DllmError(f"generation.json of {model.name}: {error}") from None


# From settings to samplers


def build(model: Model, settings: SamplerConfig) -> CanvasSampler:
    """The sampler of these settings, as `resolve` gives them; what they leave out is as its class says.

    Raises:
        DllmError: for values of the wrong kind, and numbers out of range.
    """
    if model.config.has_canvas != (settings.kind is Renoise):
        fitting = "give one with a canvas, diffusion-gemma" if settings.kind is Renoise else "it takes renoise"
        raise DllmError(f"sampler {called(settings)} cannot run a {model.config.family} model; {fitting}")
    dealt: dict[type | None, dict[str, Any]] = {}  # owner -> its fields' values
    owners = options_of(settings)
    for option, value in settings.options.items():
        dealt.setdefault(owners[option].kind, {})[owners[option].field] = value
    own = dealt.get(None, {})
    said: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(settings.kind)} | own
    length, ignore_eos = said["gen_length"], own.pop("ignore_eos", False)
    check_length("gen_length", length)
    appends = "end_ids" in said  # what ends a generation is that no block follows an end token
    made: dict[str, Callable[[], Any]] = {
        "block_length": lambda: _block_length(model, said["block_length"], length),
        "rule": lambda: _rule(said["rule"], dealt, length, optional=appends),
        "cache": lambda: _cache(said["cache"], dealt),
        "smoothing": lambda: _smoothing(said["smoothing"], dealt.get(Smoothing, {})),
        "sampling": lambda: _sampling(model, dealt.get(Sampling, {})),
        "guidance": lambda: _unless(0, said["guidance"]),
        "stop": lambda: _stop(model, said["stop"], ignore_eos or appends),
        "end_ids": lambda: jnp.asarray(end_tokens(model.config, ignore_eos=ignore_eos), jnp.int32),
    }
    values = own | {name: make() for name, make in made.items() if name in said}
    if "verifier" in own:
        values["verifier"] = _verifier(model, own["verifier"])
    found: CanvasSampler = assemble(f"sampler {called(settings)}", settings.kind, values)
    return found


Dealt = Mapping[type | None, Mapping[str, Any]]


def _block_length(model: Model, length: Any, gen_length: int) -> int:
    check_length("block_length", length or None, optional=True)
    if model.config.block_length is not None and length and length > gen_length:
        raise DllmError(f"gen_length {gen_length} is less than a block of {length}; generate a block at least")
    return min(length or gen_length, gen_length)


def _rule(rule: Any, dealt: Dealt, gen_length: int, *, optional: bool) -> Rule | None:
    if isinstance(rule, Rule) or (optional and rule is None):
        return rule
    if not isinstance(rule, str):
        raise DllmError(f"rule is {rule!r}; give a rule's name or a rule object")
    kind = named("rule", rule)
    values = dict(dealt.get(kind, {}))
    if any(field.name == "steps" and field.default is dataclasses.MISSING for field in fields_of(kind)):
        values = {"steps": gen_length, **values}
    if isinstance(values.get("indicator"), str | Path):
        values["indicator"] = _indicator(str(values["indicator"]))
    return assemble(f"rule {rule}", kind, values)


@functools.lru_cache(maxsize=1)
def _indicator(folder: str) -> Indicator:
    """An indicator, once for all its numbers in a sweep."""
    return load_indicator(folder)


def _cache(cache: Any, dealt: Dealt) -> CachePolicy:
    if isinstance(cache, str):
        kind = named("cache", cache)
        return assemble(f"cache {cache}", kind, dealt.get(kind, {}))
    if isinstance(cache, type) or not hasattr(cache, "predict"):
        raise DllmError(f"cache is {cache!r}; give a policy's name, such as 'none', or a policy object")
    policy: CachePolicy = cache
    return policy


def _smoothing(smoothing: Any, numbers: Mapping[str, Any]) -> Smoothing | None:
    if not (smoothing is None or isinstance(smoothing, bool | Smoothing)):
        raise DllmError(f"smoothing is {smoothing!r}; give True, a Smoothing, or None")
    if smoothing is False or (smoothing is None and not numbers):
        return None
    return dataclasses.replace(smoothing if isinstance(smoothing, Smoothing) else Smoothing(), **numbers)


def _sampling(model: Model, values: Mapping[str, Any]) -> Sampling:
    """How tokens are drawn; temperature 0 and top_p 1 leave their code out of the program."""
    ids = {name: _token_array(model, name, values.get(name)) for name in ("suppress", "defer")}
    plain = {"temperature": _unless(0, values.get("temperature")), "top_p": _unless(1, values.get("top_p"))}
    return Sampling(**{**values, **plain, **ids})


def _unless(idle: int, value: Any) -> Any:
    """A number, or None for the one that changes nothing."""
    return None if isinstance(value, int | float) and value == idle else value


def _token_array(model: Model, what: str, items: Sequence[int | str] | None) -> jax.Array | None:
    """Tokens as `Sampling` takes them, None for none; raises DllmError for what is no token of the model."""
    items = () if items is None else ends_called(model.config, items)
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise DllmError(f"{what} is {items!r}; give a list of token ids, or of texts that are one token each")
    ids = [_only_token(model, what, item) if isinstance(item, str) else item for item in items]
    for token in ids:
        check_token(what, token, model.config)
    return jnp.asarray(sorted(ids), jnp.int32) if ids else None


def ends_called(config: ModelConfig, items: Any) -> Any:
    """The tokens that a word of `registry.ENDS` stands for; anything else as it is."""
    words = dict(zip(ENDS, ([config.eos_id], [*config.end_ids]), strict=True))
    return words.get(items, items) if isinstance(items, str) else items


def _only_token(model: Model, what: str, text: str) -> int:
    ids = encode_text(model.require_tokenizer(), text)
    if len(ids) != 1:
        need = "which other texts need as well; name texts that are one token"
        raise DllmError(f"{what} text {text!r} is {len(ids)} tokens, {need}")
    return ids[0]


def _stop(model: Model, stop: Sequence[str | int] | None, ignore_eos: bool) -> Stop | None:
    """Strings and token ids that end an answer, and the model's own end tokens unless they are ignored."""
    stop = () if stop is None else stop
    check_stop(stop, model.config)
    strings = stop_strings(stop)
    tokens = end_tokens(model.config, stop, ignore_eos=ignore_eos)
    pieces = token_bytes(model.require_tokenizer(), model.config.vocab_size) if strings else None
    return stop_on(tokens, strings=strings, vocab_size=model.config.vocab_size, token_bytes=pieces)


def _verifier(model: Model, verifier: Any) -> Verifier:
    if isinstance(verifier, Verifier):
        return verifier
    return verifier_for(model, verifier if isinstance(verifier, Model) else dllm_jax.load(verifier))


# Specs


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
class SamplerSpec:
    """A sampler before it meets a model.

    Attributes:
        name: of an unmasking rule, of a preset, or of a sampler with a loop of its own; None leaves that open.
        options: what was written behind it, as `make_sampler` takes it.
        model: folder or name of the model that it runs; None leaves that open.
    """

    name: str | None
    options: Mapping[str, Any]
    model: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """All options, the rule among them, but for what the task decides, which is not a preset's canvas."""
        return self._over(PLAIN)

    def _over(self, under: SamplerConfig) -> dict[str, Any]:
        found = resolve(self.name, self.options, under).options
        return {name: value for name, value in found.items() if name not in _OF_CANVAS or name in self.options}

    @property
    def numbers(self) -> dict[str, Any]:
        """The written numbers of the rule, or of a loop of its own, which may change without another compilation."""
        settings = resolve(self.name, self.options, PLAIN)
        owners = options_of(settings)
        roomy = lambda option: f"most_{option}" in self.options or f"most_{option}" not in owners
        traced = [option for option in self.options if _is_traced(owners[option], settings.kind) and roomy(option)]
        return {option: self.options[option] for option in traced if type(self.options[option]) in (int, float)}

    @property
    def series(self) -> str:
        """The spec without its numbers: samplers of one series differ in numbers only and make one curve."""
        structure = {k: v for k, v in self.options.items() if k not in self.numbers}
        return str(dataclasses.replace(self, options=structure))

    def anywhere(self) -> "SamplerSpec":
        """The same for any model."""
        return dataclasses.replace(self, model=None)

    def without(self, option: str) -> "SamplerSpec":
        """The same without an option."""
        return dataclasses.replace(self, options={k: v for k, v in self.options.items() if k != option})

    def __str__(self) -> str:
        options = ",".join(f"{name}={spec.format_value(value)}" for name, value in self.options.items())
        at = "" if self.model is None else f"@{self.model}"
        return (f"{self.name}:{options}" if options else str(self.name)) + at

    def check_unbound(self) -> None:
        """Raises DllmError when it names its model: whoever builds it loads that one, and says so by `anywhere`."""
        if self.model is not None:
            raise DllmError(f"sampler {self} names a model of its own; load that one, and leave @{self.model} out")

    def build(
        self, model: Model, canvas: TaskCanvas | None = None, load: Callable[[str], Model] = dllm_jax.load
    ) -> CanvasSampler:
        """The sampler of a model, plain but for what is written: without a cache, in one block; a block diffusion model
        in its own blocks, whose cache is exact.

        Args:
            model: what it runs.
            canvas: what a task decides; the model's usual length, and its end tokens, by default.
            load: gives a verifier by its folder or name.

        Raises:
            DllmError: for numbers out of range, combinations that make no sense, and as `check_unbound`.
        """
        self.check_unbound()
        if canvas is not None and not canvas.stops and (fixed := sorted(set(_OF_CANVAS) & set(self.options))):
            raise DllmError(f"sampler {self}: {fixed[0]} cannot be chosen, the canvas of {canvas.name} is what it is")
        if model.config.mask_id is None and not model.config.has_canvas:
            advice = "use it as a verifier, or set an unused id as mask_id in its config"
            raise DllmError(
                f"sampler {self}: {model.name} has no mask token to mark undecided positions with; {advice}"
            )
        under = in_blocks(PLAIN, model)
        found = resolve(self.name, self.options, under)
        options = dict(found.options)
        if canvas is None:
            options = {"gen_length": defaults_of(model).options["gen_length"], **options}
        else:
            stop = {"stop": canvas.stop_strings} if canvas.stop_strings else {}
            own = {"gen_length": canvas.answer_width, "ignore_eos": not canvas.stops, **stop}
            options = {**own, **self._over(under)}
        return build(model, SamplerConfig(found.kind, with_verifier(options, load)))


def _is_traced(owner: Owner, sampler: type) -> bool:
    kind = owner.kind or sampler
    numbers = issubclass(kind, Rule) or kind in LOOPS.values()
    return numbers and jax.Array in spec.members(kind_of(kind, owner.field))


def with_verifier(options: Mapping[str, Any], load: Callable[[str], Model]) -> dict[str, Any]:
    """The options with the verifier as a model, where there is one."""
    verifier = options.get("verifier")
    return {**options, "verifier": load(verifier)} if isinstance(verifier, str) else dict(options)


def parse_samplers(text: str, under: SamplerConfig = PLAIN) -> list[SamplerSpec]:
    """All samplers that a spec stands for, in the order of its values.

    Args:
        under: defaults, whose parts have options of their own.

    Raises:
        DllmError: for unknown names and options, and values of another type; numbers are checked when it is built.
    """
    name, options, model = read(text)
    products = itertools.product(*(value.split("|") for value in options.values()))
    return [typed(name, dict(zip(options, values, strict=True)), model, under) for values in products]


def parse_sampler(text: str, under: SamplerConfig = PLAIN) -> SamplerSpec:
    """One sampler, see `parse_samplers`.

    Raises:
        DllmError: as there, and for a list of values.
    """
    found = parse_samplers(text, under)
    if len(found) != 1:
        raise DllmError(f"sampler {text!r} stands for {len(found)} samplers; choose one, or sweep over them")
    return found[0]


def read(text: str) -> tuple[str, dict[str, str], str | None]:
    """A spec's name, its options as texts, and its model.

    Raises:
        DllmError: for what is no spec.
    """
    written, at, model = text.rpartition("@")
    if at and not (written and model):
        raise DllmError(f"sampler {text!r} has no {'model behind' if written else 'name before'} the @; write NAME@DIR")
    return *_read_name(written if at else text), model if at else None


def _read_name(text: str) -> spec.Spec:
    """A name, which may be "module:Class", and its options: what stands between colons and has no "=" is no option."""
    name, _, rest = text.partition(":")
    own, colon, options = rest.partition(":")
    if not name or not own or "=" in own or "," in own or name in {**RULES, **LOOPS, **PRESETS}:
        return spec.parse(text, "sampler")
    return spec.Spec(f"{name}:{own}", spec.parse_options(options, f"sampler {text!r}"))


def typed(
    name: str | None, options: Mapping[str, Any], model: str | None = None, under: SamplerConfig = PLAIN
) -> SamplerSpec:
    """A sampler whose options, or some of them, are texts still.

    Raises:
        DllmError: as `parse_samplers`.
    """
    settings, options = resolve(name, options, under), unfolded(options)
    texts = {option: value for option, value in options.items() if isinstance(value, str)}
    values = spec.convert_options(texts, kinds_of(settings), f"sampler {name or called(settings)}")
    return SamplerSpec(name, {**options, **values}, model)


def refuse_twice(spec_options: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raises DllmError for an option that stands in a spec and beside it."""
    if twice := sorted(spec_options.keys() & others.keys()):
        raise DllmError(f"{twice[0]} is in the sampler and an option of its own; leave one out")
