"""From a regular expression or a JSON schema to a `Constraint`: on the host, before anything is compiled.

The expression becomes a deterministic automaton over bytes, in a process of its own (`byte_table`). Every token then
runs through it from every state, and tokens that lead everywhere to the same states become one class.
"""

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dllm_jax.errors import DllmError
from dllm_jax.text.tokenizer import token_bytes
from samplers.constraints import byte_table
from samplers.constraints.constraint import DEAD, READ, START, Constraint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_STATES = 4096
"""States of an automaton over bytes."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any JSON object: one whose objects and lists are at most `OBJECT_DEPTH` deep, itself counted."""

OBJECT_DEPTH = 3
_ANY_TEXT = "(?s:.*)"

_NOTES = set(
    "title description default examples deprecated readOnly writeOnly discriminator $schema $id $comment".split()
)
_TABLES = {"properties", "$defs", "definitions"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties"}
# What outlines-core keeps of a schema; it ignores other keywords, and some of these beside others.
_TOGETHER = [
    {"type", "properties", "required", "additionalProperties"},
    {"type", "items", "minItems", "maxItems"},
    {"type", "minLength", "maxLength"},
    *({"type", word} for word in ("prefixItems", "pattern", "format", "enum", "const")),
    *({word} for word in ("anyOf", "oneOf", "allOf", "$ref")),
]
_FORMATS = ("date", "date-time", "uuid")  # its expressions of others let a string end within
_DEEPEST = 50  # schemas in each other

_LAST = "\U0010ffff"
"""No character, and none of an answer. It follows the whole expression, because outlines-core loses transitions from
accepting states to others."""


class Bytes(NamedTuple):
    """An automaton over bytes: table [Q, 256] int16, the next state, and accept [Q] bool; see `DEAD` and `START`."""

    table: np.ndarray
    accept: np.ndarray


def constraint_for(
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    end_ids: Sequence[int],
    *,
    regex: str | Sequence[str | None] | None = None,
    json_schema: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
    never: Sequence[int] = (),
) -> Constraint:
    """The constraint that a whole answer matches a regular expression, or is JSON of a schema; in NumPy's arrays.

    A list has the form of each gap of a canvas, which comes with what is between and after the gaps; None is any text.
    The same question is answered from a cache, so the arrays are shared: do not change them.

    Args:
        vocab_size: V, the model's.
        end_ids: tokens that may follow a complete answer.
        regex: in the syntax of Rust's `regex`, without look-around and back references; of the whole answer, anchored.
        json_schema: a schema; one of the two.
        never: ids that are never written.

    Raises:
        DllmError: for both or neither, what cannot be compiled, what no tokens of this model match, and a missing
            package.
    """
    if (regex is None) == (json_schema is None):
        raise DllmError("regex and json_schema both say what an answer looks like; give one of them")
    form: Any = regex if json_schema is None else json_schema
    read = _checked_regex if json_schema is None else schema_regex
    has_gaps = isinstance(form, list | tuple) and len(form) > 0
    regexes = [_ANY_TEXT if one is None else read(one) for one in (form if has_gaps else [form])]
    return _compiled(tuple(regexes), has_gaps, tokenizer, vocab_size, tuple(end_ids), tuple(sorted(never)))


def _checked_regex(regex: Any) -> str:
    if not isinstance(regex, str) or not regex:
        raise DllmError(f"regex is {regex!r}; give a regular expression that the whole answer matches")
    return regex


@functools.lru_cache(maxsize=64)
def _compiled(
    regexes: tuple[str, ...],
    has_gaps: bool,
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    end_ids: tuple[int, ...],
    never: tuple[int, ...],
) -> Constraint:
    pieces = list(token_bytes(tokenizer, vocab_size))
    for token in never:
        pieces[token] = b""
    if has_gaps:
        return gaps_constraint([bytes_of(regex) for regex in regexes], pieces)
    return constraint_of(bytes_of(regexes[0]), pieces, [token for token in end_ids if token not in never])


def schema_regex(schema: Mapping[str, Any]) -> str:
    """The regular expression of a JSON schema, recursion cut at a depth of 3.

    Raises:
        DllmError: for what is no schema, and for keywords and patterns that a regular expression cannot keep.
    """
    if not isinstance(schema, Mapping):
        raise DllmError(f"json_schema is of type {type(schema).__name__}; give a schema such as {dict(ANY_OBJECT)}")
    if schema == ANY_OBJECT:
        return _object_regex(OBJECT_DEPTH)
    try:
        text = json.dumps(_kept(schema))
    except (TypeError, ValueError) as error:
        raise DllmError(f"json_schema is no JSON ({error}); give plain values") from None
    return _regex_of_schema(text)


@functools.lru_cache(maxsize=256)
def _regex_of_schema(text: str) -> str:
    return str(_run_worker("json_schema", {"schema": text})["regex"])


def _object_regex(depth: int) -> str:
    """Any JSON object, with objects and lists to this depth; a space may stand where JSON lets it."""
    text = r'"([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])*"'
    plain = rf"{text}|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null"
    listed = lambda item: f"[ ]?(({item}[ ]?,[ ]?)*{item}[ ]?)?"
    table = lambda value: rf"\{{{listed(f'{text}[ ]?:[ ]?{value}')}\}}"
    value = f"({plain})"
    for _ in range(depth - 1):
        value = rf"({plain}|{table(value)}|\[{listed(value)}\])"
    return table(value)


def _kept(schema: Any, depth: int = 0) -> Any:
    """The schema as outlines-core keeps it.

    Raises:
        DllmError: for the first keyword that would be ignored or break the text, and for deep nesting.
    """
    if not isinstance(schema, Mapping):
        return schema
    words = {*schema} - _NOTES - {"$defs", "definitions"}
    known = set[str]().union(*_TOGETHER)
    if depth > _DEEPEST:
        raise DllmError(f"json_schema nests more than {_DEEPEST} schemas; simplify it")
    if unknown := sorted(map(str, words - known)):
        raise DllmError(f"json_schema has {unknown[0]!r:.60}, which is not kept; leave it out, and check the answer")
    if not any(words <= together for together in _TOGETHER):
        raise DllmError(f"json_schema has {', '.join(sorted(words))} together, not all of which are kept; split them")
    found = {}
    for word, value in schema.items():
        found[word] = value
        if word in _TABLES and isinstance(value, Mapping):
            found[word] = {name: _kept(one, depth + 1) for name, one in value.items()}
        elif word in _LISTS and isinstance(value, list):
            found[word] = [_kept(one, depth + 1) for one in value]
        elif word in _SCHEMAS:
            found[word] = _kept(value, depth + 1)
    _check_names(schema)
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise DllmError("json_schema has an allOf of several schemas, which is not kept here; merge them into one")
    if schema.get("format") not in (None, *_FORMATS):
        raise DllmError(f"json_schema has the format {schema['format']!r:.60}; kept are {', '.join(_FORMATS)}")
    if isinstance(schema.get("pattern"), str):
        found["pattern"] = f"^(?:{_within_string(schema['pattern'])})$"
    return found


def _check_names(schema: Mapping[str, Any]) -> None:
    """Raises DllmError for properties that cannot be named, and for names that stand for none."""
    names = schema.get("properties", {})
    names = [*names] if isinstance(names, Mapping) else []
    if wrong := [name for name in names if json.dumps(name, ensure_ascii=False) != f'"{name}"']:
        raise DllmError(f"json_schema has the property {wrong[0]!r:.60}; names without quotes and backslashes are kept")
    required = schema.get("required", [])
    if missing := [name for name in required if name not in names] if isinstance(required, list) else []:
        raise DllmError(f"json_schema requires {missing[0]!r:.60}, which is none of its properties; describe it there")


def _within_string(pattern: str) -> str:
    """A pattern without its anchors.

    Raises:
        DllmError: if what it matches would end a JSON string, or leave it no JSON.
    """
    if bytes_of(pattern).table[:, [*range(0x20), ord('"'), ord("\\")]].any():
        what = "matches quotes, backslashes or control characters, which end a JSON string"
        advice = r'exclude them, as [^"\\\x00-\x1f] does'
        raise DllmError(f"the pattern {pattern!r:.60} of json_schema {what}; {advice}")
    return _without_anchors(pattern)


@functools.lru_cache(maxsize=256)
def bytes_of(regex: str) -> Bytes:
    """The smallest automaton over bytes of a regular expression.

    Raises:
        DllmError: for what cannot be compiled, and a missing package.
    """
    whole = _without_anchors(regex)
    found = _run_worker("regex", {"regex": whole, "last": _LAST, "states": MOST_STATES})
    names = {found["start"]: START}
    for state, _, to in found["edges"]:
        names.setdefault(state, len(names) + 1)
        names.setdefault(to, len(names) + 1)
    table, accept = np.zeros((len(names) + 1, 256), np.int16), np.zeros(len(names) + 1, bool)
    for state, byte, to in found["edges"]:
        table[names[state], byte] = names[to]
    accept[[names[state] for state in found["accept"]]] = True
    before = np.arange(len(table))  # a text matches if it does with the last character after it
    for byte in _LAST.encode():
        before = table[before, byte]
    return _minimized(table, accept[before])


def _without_anchors(regex: str) -> str:
    """The expression without ^ and $ at its ends, which change nothing: all of a text matches anyway."""
    regex = regex.removeprefix("^")
    slashes = len(regex) - len(regex.removesuffix("$").rstrip("\\")) - 1
    return regex[:-1] if regex.endswith("$") and slashes % 2 == 0 else regex


def _run_worker(what: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """What `byte_table` answers.

    Raises:
        DllmError: for its error, a bound that it reached, and a missing package.
    """
    if importlib.util.find_spec("outlines_core") is None:
        raise DllmError("constraints need the package outlines-core; pip install 'dllm_jax[constraints]'")
    command = [sys.executable, "-P", str(Path(byte_table.__file__))]
    bound = f"{what} takes more than {byte_table.SECONDS} s or {byte_table.MEMORY // 2**30} GiB to compile; simplify it"
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=2 * byte_table.SECONDS
        )
    except subprocess.TimeoutExpired:
        raise DllmError(bound) from None
    if done.returncode:
        raise DllmError(bound)
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise DllmError(f"{what} cannot be compiled ({answer['error']}); correct or simplify it")
    return answer


def _minimized(table: np.ndarray, accept: np.ndarray) -> Bytes:
    """The same automaton with as few states as possible, by refining groups of equal states (Moore)."""
    group, count = np.unique(accept, return_inverse=True)[1], 0
    while count < group.max() + 1:
        count = group.max() + 1
        group = _number_rows(np.concatenate([group[:, None], group[table]], axis=1).astype(np.int16))
    first = np.unique(group, return_index=True)[1]
    order = np.full(count, -1)
    for place, one in enumerate(dict.fromkeys([group[DEAD], group[START], *range(count)])):
        order[one] = place
    if group[DEAD] == group[START]:
        return Bytes(np.zeros((2, 256), np.int16), np.zeros(2, bool))  # nothing is accepted
    smallest, ends = np.zeros((count, 256), np.int16), np.zeros(count, bool)
    smallest[order], ends[order] = order[group[table[first]]], accept[first]
    return Bytes(smallest, ends)


def _number_rows(rows: np.ndarray) -> np.ndarray:
    """A number for each different row, [N]."""
    rows = np.ascontiguousarray(rows)
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    found: np.ndarray = np.unique(whole, return_inverse=True)[1].ravel()
    return found


def constraint_of(machine: Bytes, pieces: Sequence[bytes], end_ids: Sequence[int]) -> Constraint:
    """The constraint of an automaton over bytes, in NumPy's arrays.

    Args:
        pieces: the bytes of each token; one without any is never written.
        end_ids: tokens that may follow a complete answer, and then follow it to the canvas's end.

    Raises:
        DllmError: if no sequence of tokens is accepted.
    """
    ended = len(machine.accept)
    states = np.zeros((ended + 1, len(pieces)), np.int16)
    states[:ended] = _walk(machine.table, pieces)
    states[:, list(end_ids)] = np.where(np.append(machine.accept, True), ended, DEAD)[:, None]
    return token_constraint(states, np.append(machine.accept, True))


def gaps_constraint(machines: Sequence[Bytes], pieces: Sequence[bytes]) -> Constraint:
    """The constraint of a canvas whose gaps have an automaton over bytes each, in NumPy's arrays.

    The automata follow each other: from where one accepts, a token that the canvas came with leads to the next one's
    beginning, and further ones stay there. So the gap before must end as its form does.

    Raises:
        DllmError: if a gap's form has no tokens, and for too many states.
    """
    if (total := 1 + sum(len(machine.accept) for machine in machines)) > MOST_STATES:
        raise DllmError(f"the forms of all gaps have {total} states, of {MOST_STATES} at most; simplify them")
    states, fixed, first = list[np.ndarray](), list[np.ndarray](), 0
    for number, (table, accept) in enumerate(machines):
        own = _walk(table, pieces)
        own[own != DEAD] += first
        after = np.where(accept, first + len(table), DEAD)
        if number:  # all share the first one's dead state; in its place is where what the canvas came with leads
            own[DEAD], after[DEAD] = own[START], first
        states.append(own)
        fixed.append(after)
        first += len(table)
    last = np.zeros(total, bool)
    last[first - len(table) + START : first], last[first] = accept[START:], True
    states.append(np.zeros_like(states[0][:1]))
    return token_constraint(np.concatenate(states), last, np.append(np.concatenate(fixed), first))


def _walk(table: np.ndarray, pieces: Sequence[bytes]) -> np.ndarray:
    """The state after each token from each state, [Q, V]; dead for tokens without bytes. The longest tokens come first,
    so that those that still have a byte are a prefix."""
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    text = np.frombuffer(b"".join(pieces[i] for i in order), np.uint8)
    found = np.zeros((len(table), len(pieces)), np.int16)
    for first in range(0, len(table), _CHUNK):
        rows = slice(first, first + _CHUNK)
        state = np.repeat(np.arange(len(table), dtype=np.int16)[rows, None], len(pieces), axis=1)
        for at in range(int(lengths.max(initial=0))):
            live = int(np.searchsorted(-lengths[order], -at))  # tokens longer than `at`
            state[:, :live] = table[state[:, :live], text[ends[:live] - lengths[order[:live]] + at]]
        state[:, lengths[order] == 0] = DEAD
        found[rows, order] = state
    return found


_CHUNK = 16  # states, so that what is read and written stays in the processor's cache


def token_constraint(states: np.ndarray, accept: np.ndarray, fixed: np.ndarray | None = None) -> Constraint:
    """The constraint of an automaton over tokens, in NumPy's arrays, without the states that no answer passes through.

    Args:
        states: [Q, V] int16, the next state; see `DEAD` and `START`.
        accept: [Q] bool, states in which an answer may end.
        fixed: [Q], as of `Constraint`; by default every token is read.

    Raises:
        DllmError: if no sequence of tokens is accepted.
    """
    fixed = np.full(len(states), READ) if fixed is None else fixed
    leads = np.zeros((len(states), len(states)), bool)
    for state, row in enumerate(states):
        leads[state, row] = True
    leads[:, DEAD] = leads[DEAD] = False
    steps = leads.copy()
    steps[fixed > DEAD, fixed[fixed > DEAD]] = True
    least = np.where(accept, 0, len(states))  # tokens to the nearest acceptance
    least[DEAD] = len(states)
    reached = np.arange(len(states)) == START
    for _ in range(len(states)):
        least = np.minimum(least, 1 + np.where(steps, least, len(states)).min(axis=1))
        reached = reached | steps[reached].any(axis=0)
    if least[START] >= len(states):
        raise DllmError("no sequence of this model's tokens matches; change the regex or json_schema")
    kept = reached & (least < len(states))  # START is the first of them
    numbers = np.where(kept, np.cumsum(kept), DEAD).astype(np.int16)
    states, fixed = numbers[states[kept]], np.where(fixed == READ, READ, numbers[fixed])[kept].astype(np.int16)
    classes = _number_rows(states.T)
    examples = np.unique(classes, return_index=True)[1].astype(np.int32)
    rows, columns = _room(1 + len(states), 32), _room(len(examples), 16)
    padded = lambda x, *sizes: np.pad(x, [(0, size - n) for n, size in zip(x.shape, sizes, strict=True)])[None]
    leads = padded(np.pad(leads[np.ix_(kept, kept)], [(1, 0), (1, 0)]), rows, rows)
    return Constraint(
        classes=classes.astype(np.int32)[None],
        table=padded(np.pad(states[:, examples].T, [(0, 0), (1, 0)]), columns, rows),
        accept=padded(np.append(False, accept[kept]), rows),
        after=_words(leads),
        before=_words(leads.transpose(0, 2, 1)),
        example=padded(examples, columns),
        least=least[[START]].astype(np.int32),
        fixed=padded(np.append(np.int16(DEAD), fixed), rows),
    )


def _words(flags: np.ndarray) -> np.ndarray:
    """Flags [..., N] bool as bits, [..., N / 32] uint32."""
    return np.ascontiguousarray(np.packbits(flags, axis=-1, bitorder="little")).view("<u4").astype(np.uint32)


def _room(count: int, least: int) -> int:
    """A power of two, so that constraints of similar sizes share a program."""
    return max(least, 1 << (count - 1).bit_length())
