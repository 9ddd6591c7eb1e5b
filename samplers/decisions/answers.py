"""From questions to decisions: which rows a form needs, and what their scores say."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from dllm_jax import Model
from samplers.decisions.forwards import Scores, read_rows
from samplers.decisions.questions import Beginning, Field, Form, Question, Row, value_text

Combination = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Decision:
    """A value for each field.

    Attributes:
        values: of each field the most probable value; with `joint` the most probable combination.
        probabilities: of each field the probability of every value; they sum up to 1. With `gamma`, given the values
            that were decided before it; with `joint`, summed over the other fields.
        mass: of each field the share of the model's probability that its values had before they were normalised (of
            values of several lengths, the largest share of one length). A small one says that the model would have
            written something else.
        expected: of each field whose values are numbers, their mean.
        nfe: forwards, one after the other.
        rows: sequences that they ran for this prompt.
        prompt_tokens: the prompt's length.
        joint: with `joint` the probability of every combination, values in the order of the template's slots.
        dependence: with `joint` how far that is from independent fields, in nats: the Kullback-Leibler divergence from
            the product of what one forward reads. None without.
    """

    values: dict[str, Any]
    probabilities: dict[str, dict[Any, float]]
    mass: dict[str, float]
    expected: dict[str, float]
    nfe: int
    rows: int
    prompt_tokens: int
    joint: dict[Combination, float] | None = None
    dependence: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON has it: probabilities by the values' texts."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        named = lambda values: dict(zip(self.probabilities, values, strict=True))
        found["probabilities"] = {
            name: {value_text(value): share for value, share in own.items()} for name, own in self.probabilities.items()
        }
        if self.joint is None:
            return {name: value for name, value in found.items() if name not in ("joint", "dependence")}
        found["joint"] = [{"values": named(values), "probability": share} for values, share in self.joint.items()]
        return found


Asking = Generator[list[Row], list[Scores], Decision]
"""Yields the rows that a decision needs, receives their scores, and returns the decision."""


def answer_questions(
    model: Model, questions: Sequence[Question], batch_size: int, progress: Callable[[int], Any] | None = None
) -> list[Decision | None]:
    """Decisions in the questions' order; None where the logits were not finite.

    Args:
        progress: is called with the number of sequences of each forward.
    """
    askings = [(_ask_joint if question.form.joint else _ask)(question) for question in questions]
    asked = {number: next(asking) for number, asking in enumerate(askings)}
    found: list[Decision | None] = [None] * len(questions)
    while asked:
        rows = [(questions[number], row) for number, own in asked.items() for row in own]
        read = iter(read_rows(model, rows, batch_size, progress))
        scores = {number: list(itertools.islice(read, len(own))) for number, own in asked.items()}
        asked = {}
        for number, own in scores.items():
            if any(math.isnan(value) for row in own for value in row.values()):
                continue
            try:
                asked[number] = askings[number].send(own)
            except StopIteration as ended:
                found[number] = ended.value
    return found


def _ask(question: Question) -> Asking:
    """Fields by one forward, or by several within the bound gamma."""
    form, rows, nfe = question.form, 0, 0
    shares, mass, decided = dict[int, np.ndarray](), dict[int, float](), dict[int, int]()
    while len(decided) < len(form.fields):
        asked, slots = _rows_of(form, decided)
        found = yield asked
        rows, nfe = rows + len(asked), nfe + 1
        read = _scores_of(form, slots, found)
        mass |= {at: _mass_of(form.fields[at], scores) for at, scores in read.items()}
        now = {at: _normalised(scores, form.temperature) for at, scores in read.items()}
        shares |= now
        decided |= {at: int(np.argmax(now[at])) for at in _surest(now, form.gamma)}
    return _decision(question, shares, decided, mass, nfe, rows)


def _ask_joint(question: Question) -> Asking:
    """All combinations, and what the fields are if read alone."""
    form = question.form
    (asked, slots), chain = _rows_of(form, {}), form.beginnings()
    found = yield [*asked, *chain.values()]
    read = _scores_of(form, slots, found[: len(asked)])
    mass = {at: _mass_of(form.fields[at], scores) for at, scores in read.items()}
    at_beginning = dict(zip(chain, found[len(asked) :], strict=True))
    scores = np.asarray([_chain_score(form, at_beginning, values) for values in form.combinations])
    shares = _normalised(scores, form.temperature).reshape([len(field.values) for field in form.fields])
    alone = [_normalised(read[at], form.temperature) for at in range(len(form.fields))]
    best = np.unravel_index(int(np.argmax(shares)), shares.shape)
    others = lambda at: tuple(axis for axis in range(shares.ndim) if axis != at)
    margins = {at: shares.sum(axis=others(at)) for at in range(shares.ndim)}
    decision = _decision(question, margins, dict(enumerate(map(int, best))), mass, 1, len(asked) + len(chain))
    named = lambda values: tuple(field.values[value] for field, value in zip(form.fields, values, strict=True))
    joint = {named(values): float(shares[values]) for values in form.combinations}
    apart = _log(shares) - _log(functools.reduce(np.multiply.outer, alone))
    return dataclasses.replace(decision, joint=joint, dependence=max(float((shares * apart).sum()), 0.0))


def _decision(
    question: Question,
    shares: Mapping[int, np.ndarray],
    decided: Mapping[int, int],
    mass: Mapping[int, float],
    nfe: int,
    rows: int,
) -> Decision:
    """Of each field's probabilities, value's number, and mass, by its number."""
    fields = dict(enumerate(question.form.fields))
    numeric = [at for at, field in fields.items() if all(_is_number(value) for value in field.values)]
    return Decision(
        values={field.name: field.values[decided[at]] for at, field in fields.items()},
        probabilities={
            field.name: dict(zip(field.values, shares[at].tolist(), strict=True)) for at, field in fields.items()
        },
        mass={field.name: mass[at] for at, field in fields.items()},
        expected={fields[at].name: float(shares[at] @ np.asarray(fields[at].values, float)) for at in numeric},
        nfe=nfe,
        rows=rows,
        prompt_tokens=len(question.prompt),
    )


def _rows_of(form: Form, decided: Mapping[int, int]) -> tuple[list[Row], dict[tuple[int, int], tuple[int, range]]]:
    """The rows that score all open fields at once, and where each of their values is: its row and places.

    Values of several lengths need several canvases: row j has each field's j-th length, or its last.

    Args:
        decided: the value's number of decided fields, by the field's number.
    """
    rows, slots = list[Row](), dict[tuple[int, int], tuple[int, range]]()
    left = {at: field for at, field in enumerate(form.fields) if at not in decided}
    for number in range(max(len(field.lengths) for field in left.values())):
        lengths = [field.lengths[min(number, len(field.lengths) - 1)] for field in form.fields]
        body, places = form.lay_out(
            [field.ids[decided[at]] if at in decided else [-1] * lengths[at] for at, field in enumerate(form.fields)]
        )
        wanted = dict[int, list[int]]()
        for at, field in left.items():
            if number < len(field.lengths):
                fitting = [value for value, ids in enumerate(field.ids) if len(ids) == lengths[at]]
                slots |= {(at, value): (number, places[at]) for value in fitting}
                columns = zip(*(field.ids[value] for value in fitting), strict=True)
                wanted |= {place: [*dict.fromkeys(ids)] for place, ids in zip(places[at], columns, strict=True)}
        rows.append(Row(body, wanted))
    return rows, slots


def _scores_of(
    form: Form, slots: Mapping[tuple[int, int], tuple[int, range]], found: Sequence[Scores]
) -> dict[int, np.ndarray]:
    """Of each field that `_rows_of` asked for, the scores of its values."""
    scores = {at: np.zeros(len(form.fields[at].values)) for at, _ in slots}
    for (at, value), (row, places) in slots.items():
        tokens = zip(places, form.fields[at].ids[value], strict=True)
        scores[at][value] = sum(found[row][place] for place in tokens)
    return scores


def _chain_score(form: Form, found: Mapping[Beginning, Scores], values: Sequence[int]) -> float:
    lengths, tokens, places = form.spell(values)
    return sum(found[lengths, tokens[:at]][step] for at, step in enumerate(zip(places, tokens, strict=True)))


def _surest(shares: Mapping[int, np.ndarray], gamma: float | None) -> list[int]:
    """The fields that are decided by what one forward says of them."""
    if gamma is None:
        return list(shares)
    entropies = {at: -float((own * _log(own)).sum()) for at, own in shares.items()}
    order = sorted(entropies, key=lambda at: entropies[at])
    before = itertools.accumulate((entropies[at] for at in order), initial=0.0)
    return [at for number, (at, spent) in enumerate(zip(order, before, strict=False)) if not number or spent <= gamma]


def _normalised(scores: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities that sum up to 1; equal ones where no value has any."""
    best = scores.max()
    shares = np.exp((scores - best) / temperature) if best > -math.inf else np.ones_like(scores)
    return np.asarray(shares / shares.sum())


def _mass_of(field: Field, scores: np.ndarray) -> float:
    lengths = np.asarray([len(ids) for ids in field.ids])
    share = max(float(np.exp(scores[lengths == length]).sum()) for length in field.lengths)
    return min(share, 1.0)  # which rounding may exceed


def _log(shares: np.ndarray) -> np.ndarray:
    """Logarithms, finite for 0 so that 0 times it is 0."""
    return np.log(np.maximum(shares, np.finfo(float).tiny))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
