"""Samplers from a class and its options: each option goes to its owner, and the parts are put together."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp

import dllm_jax
from dllm_jax import Model, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.indicator import Indicator, load_indicator
from dllm_jax.params.low_rank import LowRank
from dllm_jax.text.tokenizer import encode_text, token_bytes
from samplers.caches import CachePolicy
from samplers.checks import assemble, check_length, check_token
from samplers.config.registry import BASE, ENDS, FORMS, SELF, base_class, fields_of, owners_of, part_class
from samplers.constraints.automaton import constraint_for
from samplers.constraints.constraint import Constraint
from samplers.loops.block import BlockSampler
from samplers.loops.causal_context import ContextBlocks
from samplers.loops.renoise import Renoise
from samplers.loops.verifier import Verifier, verifier_for
from samplers.rules import Rule
from samplers.sampler import Sampler
from samplers.stopping import Stop, check_stop, end_tokens, stop_on, stop_strings
from samplers.tokens.predictions import Sampling
from samplers.tokens.smoothing import Smoothing


class CanvasSampler(Sampler[Any], Protocol):
    """A sampler with a canvas, as all here; its state has a `canvas`.

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
        """Fewest and most forwards of a row after a prompt of this length, if no end token ends it before."""
        ...


def build_sampler(model: Model, kind: type, options: Mapping[str, Any], what: str) -> CanvasSampler:
    """The sampler of this class with these options; unset ones have the defaults of their class.

    Args:
        what: named in the errors, such as "sampler eb".

    Raises:
        DllmError: for values of the wrong kind, and numbers out of range.
    """
    if model.config.has_canvas != (kind is Renoise):
        fitting = "give one with a canvas, diffusion-gemma" if kind is Renoise else "it takes renoise"
        raise DllmError(f"{what} cannot run a {model.config.family} model; {fitting}")
    if model.config.has_causal_context and kind is BlockSampler:
        kind, options = ContextBlocks, _of_context(model, options, what)
    dealt: dict[type | None, dict[str, Any]] = {}  # owner -> its fields' values
    owners = owners_of(kind, options)
    for option, value in options.items():
        dealt.setdefault(owners[option].kind, {})[owners[option].field] = value
    own = dealt.get(None, {})
    fields: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(kind)} | own
    length, ignore_eos = fields["gen_length"], own.pop("ignore_eos", False)
    form = {name: own.pop(name) for name in FORMS if name in own}
    check_length("gen_length", length)
    appends = "end_ids" in fields  # what ends a generation is that no block follows an end token
    optional = any(field.name == "rule" and field.default is None for field in dataclasses.fields(kind))
    made: dict[str, Callable[[], Any]] = {
        "block_length": lambda: _block_length(model, fields["block_length"], length),
        "rule": lambda: _rule(fields["rule"], dealt, length, optional=optional),
        "cache": lambda: _cache(fields["cache"], dealt),
        "smoothing": lambda: _smoothing(fields["smoothing"], dealt.get(Smoothing, {})),
        "sampling": lambda: _sampling(model, dealt.get(Sampling, {})),
        "guidance": lambda: _unless(0, fields["guidance"]),
        "stop": lambda: _stop(model, fields["stop"], ignore_eos or appends),
        "end_ids": lambda: jnp.asarray(end_tokens(model.config, ignore_eos=ignore_eos), jnp.int32),
    }
    if any(fields.get(name) is not None for name in ("thinking_budget", "end_think")):
        made["end_think"] = lambda: _end_of_thought(model, fields["end_think"])
    if any(value is not None for value in form.values()):
        others = {"suppress": dealt.get(Sampling, {}).get("suppress"), "stop": fields["stop"]}
        made["constraint"] = lambda: jax.tree.map(jnp.asarray, build_constraint(model, form, **others))
    if "adapter" in fields:
        made["adapter"] = lambda: _adapter(model, fields["adapter"])
    values = own | {name: make() for name, make in made.items() if name in fields}
    if "verifier" in own:
        values["verifier"] = _verifier(model, own["verifier"])
    found: CanvasSampler = assemble(what, kind, values)
    return found


def build_constraint(
    model: Model, form: Mapping[str, Any], *, suppress: Any = None, stop: Sequence[str | int] | None = None
) -> Constraint:
    """The constraint that options of `FORMS` describe, in NumPy's arrays.

    Args:
        suppress, stop: options of the sampler.

    Raises:
        DllmError: for stop patterns, which would cut an answer before its form is complete; and as `constraint_for`.
    """
    refuse_stop(stop)
    found = _token_array(model, "suppress", suppress)
    never = [] if found is None else found.tolist()
    config = model.config
    return constraint_for(model.require_tokenizer(), config.vocab_size, config.end_ids, never=never, **form)


def refuse_stop(stop: Sequence[str | int] | None) -> None:
    """Raises DllmError for stop patterns of answers that have a form."""
    if stop:
        raise DllmError(f"stop {stop[0]!r} may cut an answer before its form is complete; leave out stop, or the form")


def _of_context(model: Model, options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The options that `ContextBlocks` has, of those of a `BlockSampler`.

    Raises:
        DllmError: for others that would do something.
    """
    own = owners_of(ContextBlocks, options)
    usual = {field.name: field.default for field in dataclasses.fields(BlockSampler)} | {"cache": "exact"}
    for option, value in options.items():
        if option not in own and not (option in usual and value in (usual[option], None)):
            why = "reads every token once, exactly" if option == "cache" else "drafts blocks over a causal context"
            raise DllmError(f"{what}: {option} is not for a {model.config.family} model, which {why}; leave it out")
    return {option: value for option, value in options.items() if option in own}


def _end_of_thought(model: Model, token: Any) -> int:
    """The token that ends a thought, by default the tokenizer's own."""
    if token is None or isinstance(token, str):
        text = "</think>" if token is None else token
        found = dict(model.require_tokenizer().get_vocab()).get(text)
        if found is None:
            raise DllmError(f"the tokenizer of {model.name} has no token {text!r} that ends a thought; set end_think")
        return int(found)
    check_token("end_think", token, model.config)
    return int(token)


def _adapter(model: Model, adapter: Any) -> LowRank | None:
    """The checkpoint's adapter for drafts, unless it is unwanted; or another."""
    if isinstance(adapter, LowRank):
        return adapter
    if adapter is True and model.draft_adapter is None:
        raise DllmError(f"{model.name} came without an adapter for drafts; leave adapter out")
    return None if adapter is False else model.draft_adapter


Dealt = Mapping[type | None, Mapping[str, Any]]


def _block_length(model: Model, length: Any, gen_length: int) -> int:
    check_length("block_length", length or None, optional=True)
    if model.config.has_causal_context:  # a last block is cut, or drafted as a whole
        return length or gen_length
    if model.config.block_length is not None and length and length > gen_length:
        raise DllmError(f"gen_length {gen_length} is less than a block of {length}; generate a block at least")
    return min(length or gen_length, gen_length)


def _rule(rule: Any, dealt: Dealt, gen_length: int, *, optional: bool) -> Rule | None:
    if isinstance(rule, Rule) or (optional and rule is None):
        return rule
    if not isinstance(rule, str):
        raise DllmError(f"rule is {rule!r}; give a rule's name or a rule object")
    kind = part_class("rule", rule)
    values = dict(dealt.get(kind, {}))
    if any(field.name == "steps" and field.default is dataclasses.MISSING for field in fields_of(kind)):
        values = {"steps": gen_length, **values}
    if isinstance(values.get("indicator"), str | Path):
        values["indicator"] = _indicator(str(values["indicator"]))
    if base_class(kind, values) is not None:
        values[BASE] = _rule(values[BASE], dealt, gen_length, optional=False)
    return assemble(f"rule {rule}", kind, values)


@functools.lru_cache(maxsize=1)
def _indicator(folder: str) -> Indicator:
    """An indicator, once for all its numbers in a sweep."""
    return load_indicator(folder)


def _cache(cache: Any, dealt: Dealt) -> CachePolicy:
    if isinstance(cache, str):
        kind = part_class("cache", cache)
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
    items = () if items is None else find_end_ids(model.config, items)
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise DllmError(f"{what} is {items!r}; give a list of token ids, or of texts that are one token each")
    ids = [_only_token(model, what, item) if isinstance(item, str) else item for item in items]
    for token in ids:
        check_token(what, token, model.config)
    return jnp.asarray(sorted(ids), jnp.int32) if ids else None


def find_end_ids(config: ModelConfig, items: Any) -> Any:
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
    if verifier == SELF:
        return Verifier(model.denoiser.as_causal)
    return verifier_for(model, verifier if isinstance(verifier, Model) else dllm_jax.load(verifier))
