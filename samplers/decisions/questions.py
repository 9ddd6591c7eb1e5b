"""What is to be decided: fields, the template that has a slot for each, and the prompts."""

import itertools
import json
import math
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dllm_jax import DllmError, Model
from dllm_jax.text.tokenizer import encode_text
from samplers.checks import check_number, check_seed
from samplers.inputs import open_id
from samplers.text.prompts import Prompt, check_prompts, encode_prompt
from samplers.tokens.noise import row_keys

MOST_COMBINATIONS = 4096
"""Of values, that `joint` scores."""


def value_text(value: Any) -> str:
    """A value as it is written into its slot: a string as it is, other values as JSON spells them."""
    return value if isinstance(value, str) else json.dumps(value)


class Field(NamedTuple):
    """A field: its name, values, and each value's tokens."""

    name: str
    values: list[Any]
    ids: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        """Of its values in tokens: each once, the shortest first."""
        return sorted({len(ids) for ids in self.ids})


class Row(NamedTuple):
    """A canvas with -1 in its open places, and the tokens whose log-probabilities are wanted, by place."""

    body: list[int]
    wanted: dict[int, list[int]]


Beginning = tuple[tuple[int, ...], tuple[int, ...]]
"""The lengths of a combination's values in tokens, and its first tokens."""


class Form(NamedTuple):
    """What is decided, and how.

    Attributes:
        fields: in the order of their slots.
        pieces: tokens before, between and after the slots.
        gamma, joint, temperature: as in `decide`.
    """

    fields: list[Field]
    pieces: list[list[int]]
    gamma: float | None
    joint: bool
    temperature: float

    def lay_out(self, slots: Sequence[Sequence[int]]) -> tuple[list[int], list[range]]:
        """The canvas with these tokens in its slots, and the places of each slot."""
        body, places = [*self.pieces[0]], []
        for own, piece in zip(slots, self.pieces[1:], strict=True):
            places.append(range(len(body), len(body) + len(own)))
            body += [*own, *piece]
        return body, places

    @property
    def longest(self) -> int:
        """Tokens of the longest canvas."""
        return sum(map(len, self.pieces)) + sum(field.lengths[-1] for field in self.fields)

    @property
    def most_rows(self) -> int:
        """Sequences that a decision takes at most."""
        lengths = max(len(field.lengths) for field in self.fields)
        if self.joint:
            return lengths + len(self.beginnings())
        return lengths * (1 if self.gamma is None else len(self.fields))

    @property
    def combinations(self) -> Iterator[tuple[int, ...]]:
        """Every combination, as the number of each field's value."""
        return itertools.product(*(range(len(field.values)) for field in self.fields))

    def spell(self, values: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        """A combination's lengths in tokens, its tokens, and their places."""
        own = [field.ids[value] for field, value in zip(self.fields, values, strict=True)]
        places = self.lay_out(own)[1]
        return tuple(map(len, own)), tuple(itertools.chain(*own)), list(itertools.chain(*places))

    def beginnings(self) -> dict[Beginning, Row]:
        """The rows that score every combination by the chain rule."""
        found = dict[Beginning, Row]()
        for values in self.combinations:
            lengths, tokens, places = self.spell(values)
            for count, (place, token) in enumerate(zip(places, tokens, strict=True)):
                beginning = (lengths, tokens[:count])
                if beginning not in found:
                    left = iter([*tokens[:count], *[-1] * (len(tokens) - count)])
                    slots = [list(itertools.islice(left, length)) for length in lengths]
                    found[beginning] = Row(self.lay_out(slots)[0], {place: []})
                wanted = found[beginning].wanted[place]
                wanted += [token] * (token not in wanted)
        return found


class Question(NamedTuple):
    """A form that is filled for a prompt of these tokens; `key` is of its random tokens."""

    prompt: list[int]
    form: Form
    key: jax.Array


def prepare_questions(
    model: Model,
    prompts: Sequence[Prompt],
    fields: Mapping[str, Iterable[Any]],
    *,
    template: str | None = None,
    chat: bool = False,
    system: str | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Question]:
    """Everything that `decide` does before the first forward, with its arguments and errors; it reads no parameters."""
    if model.config.is_causal:
        raise DllmError(f"a {model.config.family} model reads from left to right only; decide needs a diffusion model")
    check_prompts(prompts)
    check_seed(seed)
    _check_options(**options)
    rows = [encode_prompt(model, prompt, chat=chat, system=system) for prompt in prompts]
    checked = _check_fields(fields)
    plain = lambda prompt: isinstance(prompt, str) and not chat and system is None and not prompt.endswith("\n")
    lines = "\n".join(f"{name}: {{{name}}}" for name in checked)
    texts = [("\n" if plain(prompt) else "") + lines if template is None else template for prompt in prompts]
    forms = {text: _form_of(model, checked, text, **options) for text in dict.fromkeys(texts)}
    keys = row_keys(jax.random.key(seed), len(rows))
    questions = [Question(ids, forms[text], key) for ids, text, key in zip(rows, texts, keys, strict=True)]
    for question in questions:
        _check_room(model, question)
    return questions


def _check_options(*, gamma: float | None, joint: bool, temperature: float) -> None:
    check_number("gamma", gamma, 0)
    check_number("temperature", temperature, 0)
    if not 0 < temperature < math.inf:
        raise DllmError(f"temperature is {temperature}; it must be above 0, and 1 changes nothing")
    if joint and gamma is not None:
        raise DllmError("joint scores all combinations, so nothing is left for gamma to decide first; leave one out")


def _check_fields(fields: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    if not isinstance(fields, Mapping) or not fields:
        raise DllmError('fields is no table of names and values; give one such as {"answer": ["yes", "no"]}')
    checked = {}
    for name, values in fields.items():
        if not isinstance(name, str) or not name or set(name) & set("{}[].!:"):
            raise DllmError(f"a field is called {name!r}; a name is a text without any of {{}}[].!:")
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise DllmError(f"the values of {name} are {values!r}; give a list of them")
        checked[name] = list[Any]()
        for value in values:
            value = value.item() if isinstance(value, np.generic) else value
            if not isinstance(value, str | int | float):
                raise DllmError(f"{name} has the value {value!r}; give strings, numbers or booleans")
            if not value_text(value).strip():
                raise DllmError(f"{name} has the value {value!r}, which is empty; give a text")
            if value in checked[name] or value_text(value) in map(value_text, checked[name]):
                raise DllmError(f"{name} has the value {value_text(value)} twice; leave one out")
            checked[name].append(value)
        if len(checked[name]) < 2:
            raise DllmError(f"{name} has {len(checked[name])} values; give at least two to decide between")
    return checked


def _form_of(model: Model, fields: Mapping[str, list[Any]], template: str, **options: Any) -> Form:
    tokenizer = model.require_tokenizer()

    def encode(text: str) -> list[int]:
        ids = encode_text(tokenizer, text) if text else []
        if open_id(model.denoiser) in ids:
            raise DllmError("the template or a value contains the mask token; leave it out")
        return ids

    names, texts = _parse(template, fields)
    made, pieces = list[Field](), list[list[int]]()
    for name, text in zip(names, texts, strict=False):
        values = [value_text(value) for value in fields[name]]
        end = _end_of_piece(encode, text, values)
        pieces.append(encode(text[:end]))
        own = [encode(text[end:] + value) for value in values]
        if same := next((at for at, ids in enumerate(own) if own.index(ids) < at), None):
            pair = f"{values[own.index(own[same])]} and {values[same]}"
            raise DllmError(f"{pair}, values of {name}, have the same tokens; leave one out")
        made.append(Field(name, fields[name], own))
    form = Form(made, [*pieces, [*encode(texts[-1]), model.denoiser.eos_id]], **options)
    if form.joint and (count := math.prod(len(field.values) for field in made)) > MOST_COMBINATIONS:
        raise DllmError(f"there are {count} combinations of values, more than {MOST_COMBINATIONS}; leave out joint")
    return form


def _end_of_piece(encode: Callable[[str], list[int]], text: str, values: Sequence[str]) -> int:
    """Where a piece of text ends: before its last spaces if more values have their usual tokens together with them."""
    whole = [encode(text + value) for value in values]
    pieces = {end: encode(text[:end]) for end in (len(text), len(text.rstrip(" ")))}
    usual = lambda end: sum(
        ids == pieces[end] + encode(text[end:] + value) for ids, value in zip(whole, values, strict=True)
    )
    return max(pieces, key=usual)


def _parse(template: str, fields: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The names of a template's slots, and the texts around them."""
    names, texts = [], [""]
    try:
        parts = list(string.Formatter().parse(template))
    except (ValueError, TypeError) as error:
        raise DllmError(f"the template cannot be read ({error}); write {{{{ and }}}} for braces") from None
    for text, name, form, conversion in parts:
        texts[-1] += text
        if name is None:
            continue
        if form or conversion or name not in fields:
            known = ", ".join(f"{{{name}}}" for name in fields)
            raise DllmError(f"the template has {{{name}}}, which is no field; there are {known}")
        if name in names:
            raise DllmError(f"the template has {{{name}}} twice; give each field one place")
        names.append(name)
        texts.append("")
    if missing := [name for name in fields if name not in names]:
        raise DllmError(f"the template has no {{{missing[0]}}}; give every field a place")
    return names, texts


def _check_room(model: Model, question: Question) -> None:
    config, prompt, longest = model.config, len(question.prompt), question.form.longest
    if config.has_canvas and longest > (config.block_length or 0):
        what = f"the template has up to {longest} tokens and a canvas {config.block_length}"
        raise DllmError(f"{what}; shorten it, or decide fewer fields at once")
    room = config.block_length or 0 if config.has_canvas else longest
    if prompt + room > config.max_length:
        what = f"a prompt of {prompt} tokens and a template of up to {room}"
        raise DllmError(f"{what} exceed the {config.max_length} that {model.name} was trained for; shorten one")
