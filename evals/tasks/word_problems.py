"""Arithmetic word problems with worked steps: `Tom has 12 books. Tom buys 23.` -> `12+23=35. #### 35`.

Every sentence after the first is one step, every step an equation that continues from the last result. A model must
copy numbers, compute, and carry results on. One token at a time that is easy; in parallel the equations contradict each
other, by which unmasking rules are compared.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from dllm_jax import Model
from dllm_jax.errors import DllmError
from dllm_jax.text.tokenizer import encode_text, load_tokenizer
from evals import tokens
from evals.tasks.base import DrawnTask, Draws, Example, Ids, Verdict, draw_of_split, draws_for
from evals.tokens import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Difficulty = Literal["easy", "medium", "hard", "long"]
Wording = Literal["terse", "free", "fields"]

TOKENIZER = Path(__file__).parents[1] / "tokenizers" / "word-problems"

NAMES = ("Tom Ann Eve Sam Ben Mia Leo Max Zoe Amy Kim Jay Liz Ian Ada Eli").split()
OBJECTS = ("books pens cups coins eggs cards balls apples stamps shells beads keys nuts pears stones toys").split()
PHRASES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "+": ("buys {}", "finds {}", "gets {} more"),
        "-": ("gives away {}", "loses {}", "sells {}"),
        "*": ("gets {} times as many", "makes it {} times as many"),
        "/": ("keeps one of {} equal parts", "shares equally among {}"),
    }
)

VERBS = ("has", "gets", "finds", "buys", "loses")
VERB_WEIGHTS = (8, 5, 3, 2, 2)  # how often each is chosen, of 20: as in language, some words are more usual


class ProblemLimits(NamedTuple):
    """What a difficulty allows: numbers of steps, largest number anywhere, operations, factors of * and /."""

    steps: tuple[int, int]
    max_total: int
    operations: str
    factors: tuple[int, int]
    phrases: int


DIFFICULTIES: Mapping[str, ProblemLimits] = types.MappingProxyType(
    {
        "easy": ProblemLimits(steps=(1, 2), max_total=50, operations="+-", factors=(2, 2), phrases=1),
        "medium": ProblemLimits(steps=(2, 4), max_total=50, operations="+-*/", factors=(2, 4), phrases=3),
        "hard": ProblemLimits(steps=(2, 4), max_total=999, operations="+-*/", factors=(2, 9), phrases=3),
        "long": ProblemLimits(steps=(4, 8), max_total=50, operations="+-*/", factors=(2, 4), phrases=3),
    }
)


class Problem(NamedTuple):
    """The canonical problem: who and what it is about is no part of it."""

    start: int
    steps: tuple[tuple[str, int], ...]

    def equations(self) -> list[tuple[int, str, int, int]]:
        """The worked steps, (left, operation, right, result)."""
        found, total = [], self.start
        for operation, number in self.steps:
            result = _apply(total, operation, number)
            found.append((total, operation, number, result))
            total = result
        return found

    @property
    def answer(self) -> int:
        """The last result."""
        return self.equations()[-1][-1]


@dataclasses.dataclass(frozen=True)
class WordProblems(DrawnTask):
    """Arithmetic word problems as text.

    Attributes:
        difficulty: "easy": 1 or 2 steps of + and - with numbers up to 50 and one phrase each; "medium": 2 to 4 steps
            of + - * / up to 50; "hard": 2 to 4 steps up to 999; "long": 4 to 8 steps up to 50.
        steps: fewest and most steps; by default the difficulty's.
        max_total: largest number that occurs; by default the difficulty's.
        operations: which of "+-*/" occur; by default the difficulty's.
        wording: "terse" answers are equations alone; in "free" ones each stands in a sentence whose verb is anyone's
            choice, `Tom gets 12+23=35.`: a model cannot be sure of it, however much it knows. "fields" ones are typed
            decisions without steps: a line each of `fields`, such as `even: no`.
        seed: another seed gives other examples of the same splits.
        codec, eos_id: the transformers tokenizer and its end id; the task's own by default. `bind` sets a model's.
    """

    name: ClassVar[str] = "word-problems"
    stops: ClassVar[bool] = True

    difficulty: Difficulty = "medium"
    steps: tuple[int, int] | None = None
    max_total: int | None = None
    operations: str | None = None
    wording: Wording = "terse"
    seed: int = 0
    codec: Any = dataclasses.field(default=None, repr=False, compare=False)
    eos_id: int | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.difficulty not in DIFFICULTIES:
            raise DllmError(f"no difficulty is called {self.difficulty!r}; choose one of {', '.join(DIFFICULTIES)}")
        if self.wording not in typing.get_args(Wording):
            raise DllmError(
                f"no wording is called {self.wording!r}; choose one of {', '.join(typing.get_args(Wording))}"
            )
        (low, high), limits = self.limits.steps, self.limits
        if not 1 <= low <= high <= 99:
            raise DllmError(f"steps {low}-{high} is no range; give the fewest and the most between 1 and 99, as 1-3")
        if not 8 <= limits.max_total <= 99_999:
            raise DllmError(f"max_total is {limits.max_total}; it must be between 8 and 99999")
        if not limits.operations or set(limits.operations) - set(PHRASES):
            raise DllmError(f"operations is {limits.operations!r}; give some of the characters {''.join(PHRASES)}")
        if set(limits.operations) <= set("*/") and high > 1:
            raise DllmError(f"operations {limits.operations} run out of numbers after a step or two; add + or -")

    @functools.cached_property
    def limits(self) -> ProblemLimits:
        """The difficulty's limits with this task's own changes."""
        own: dict[str, Any] = {"steps": self.steps, "max_total": self.max_total, "operations": self.operations}
        return DIFFICULTIES[self.difficulty]._replace(**{name: value for name, value in own.items() if value})

    def example(self, split: str, index: int) -> Example:
        problem, question, answer = self._draw_texts(split, index)
        codec, eos_id = self._coding
        return Example(
            prompt_ids=np.array(encode_text(codec, question), np.int32),
            answer_ids=np.array([*encode_text(codec, answer), eos_id], np.int32),
            problem=problem,
        )

    def texts(self, split: str, index: int) -> tuple[str, str]:
        """The same example as text: prompt and answer."""
        return self._draw_texts(split, index)[1:]

    def verify(self, example: Example, ids: Ids) -> Verdict:
        problem: Problem = example.problem
        text, reference = self.show(ids), example.answer_ids[:-1]
        if self.wording == "fields":
            correct = strict = text == fields_text(problem)
        else:
            correct = final_answer(text) == problem.answer
            strict = correct and worked_steps(text, words=self.wording == "free") == problem.equations()
        exact = len(ids) == len(reference) and bool(np.array_equal(ids, reference))
        return Verdict(correct=correct, strict=strict, exact=exact)

    @property
    def fields(self) -> Mapping[str, Sequence[Any]] | None:
        if self.wording != "fields":
            return None
        return {"answer": range(1, self.limits.max_total + 1), "even": ("yes", "no"), "more": ("yes", "no")}

    def decided(self, example: Example) -> Mapping[str, Any]:
        return field_values(example.problem)

    def show(self, ids: Ids) -> str:
        codec = self._coding[0]
        return str(codec.decode([int(i) for i in ids if i >= 0], skip_special_tokens=True))

    @property
    def vocabulary(self) -> Vocabulary:
        return tokens.vocabulary_of(TOKENIZER)

    @functools.cached_property
    def prompt_width(self) -> int:
        longest = max((p for phrases in PHRASES.values() for p in phrases), key=len)
        digits = "8" * len(str(self.limits.max_total))
        sentences = [f"Tom {longest.format(digits)}."] * self.limits.steps[1]
        text = _prompt([f"Tom has {digits} {max(OBJECTS, key=len)}.", *sentences])
        return -(-len(encode_text(self._coding[0], text)) // 8) * 8

    @functools.cached_property
    def answer_width(self) -> int:
        digits = "8" * len(str(self.limits.max_total))
        if self.wording == "fields":
            return -(-(len(encode_text(self._coding[0], f"answer: {digits}\neven: yes\nmore: yes")) + 1) // 8) * 8
        subjects = [f"{name} {verb} " for name in NAMES for verb in VERBS] if self.wording == "free" else [""]
        steps = lambda subject: f"{subject}{digits}+{digits}={digits}. " * self.limits.steps[1]
        longest = max(len(encode_text(self._coding[0], f"{steps(subject)}#### {digits}")) for subject in subjects)
        return -(-(longest + 1) // 16) * 16  # whole blocks of the usual lengths

    def write_tokenizer(self, folder: str | Path) -> None:
        tokens.copy(TOKENIZER, folder)

    def bind(self, model: Model) -> Self:
        return dataclasses.replace(self, codec=model.require_tokenizer(), eos_id=model.config.eos_id)

    @functools.cached_property
    def _coding(self) -> tuple["PreTrainedTokenizerBase", int]:
        if self.codec is not None and self.eos_id is not None:
            return self.codec, self.eos_id
        return _own_codec(), self.vocabulary.eos_id

    def _draw_texts(self, split: str, index: int) -> tuple[Problem, str, str]:
        """The problem, its question and the reference answer."""
        draws = draws_for(self.name, self.seed, split, index)
        problem = draw_of_split(self.name, split, lambda: self._problem(draws), canonical)
        name = draws.choice(NAMES)
        question = self._question(problem, name, draws)
        if self.wording == "fields":
            return problem, question, fields_text(problem)
        subjects = [f"{name} {_verb(draws)} " for _ in problem.steps] if self.wording == "free" else None
        return problem, question, solution_text(problem, subjects)

    def _problem(self, draws: Draws) -> Problem:
        limits = self.limits
        wanted = draws.between(*limits.steps)
        while True:
            total = start = draws.between(2, limits.max_total)
            steps: list[tuple[str, int]] = []
            while len(steps) < wanted and (step := _step(total, limits, draws)):
                steps.append(step)
                total = _apply(total, *step)
            if len(steps) == wanted:
                return Problem(start, tuple(steps))

    def _question(self, problem: Problem, name: str, draws: Draws) -> str:
        thing = draws.choice(OBJECTS)
        sentences = [f"{name} has {problem.start} {thing}."]
        for operation, number in problem.steps:
            phrase = draws.choice(PHRASES[operation][: self.limits.phrases])
            sentences.append(f"{name} {phrase.format(number)}.")
        return _prompt(sentences)


def _prompt(sentences: Sequence[str]) -> str:
    return f"Q: {' '.join(sentences)}\nA: "


def _step(total: int, limits: ProblemLimits, draws: Draws) -> tuple[str, int] | None:
    """A step that keeps the number between 1 and the limit, None where there is none."""
    low, high = limits.factors
    numbers = {
        "+": range(2, limits.max_total - total + 1),
        "-": range(2, total),
        "*": range(low, min(high, limits.max_total // total) + 1),
        "/": [factor for factor in range(low, high + 1) if total % factor == 0],
    }
    possible = [operation for operation in limits.operations if numbers[operation]]
    if not possible:
        return None
    operation = draws.choice(possible)
    return operation, draws.choice(numbers[operation])


def _apply(total: int, operation: str, number: int) -> int:
    if operation == "+":
        return total + number
    if operation == "-":
        return total - number
    return total * number if operation == "*" else total // number


def canonical(problem: Problem) -> str:
    """The text whose hash decides the split: numbers and operations."""
    return f"{problem.start} " + " ".join(f"{operation}{number}" for operation, number in problem.steps)


def _verb(draws: Draws) -> str:
    return draws.choice([verb for verb, weight in zip(VERBS, VERB_WEIGHTS, strict=True) for _ in range(weight)])


def solution_text(problem: Problem, subjects: Sequence[str] | None = None) -> str:
    """The reference answer: `12+23=35. 35-5=30. #### 30`.

    Args:
        subjects: what stands before each equation.
    """
    before = subjects or [""] * len(problem.steps)
    equations = (f"{left}{operation}{right}={result}. " for left, operation, right, result in problem.equations())
    steps = "".join(subject + equation for subject, equation in zip(before, equations, strict=True))
    return f"{steps}#### {problem.answer}"


def field_values(problem: Problem) -> dict[str, Any]:
    """The decisions: the answer, whether it is even, and whether it is more than there was at first."""
    word = {True: "yes", False: "no"}
    answer = problem.answer
    return {"answer": answer, "even": word[answer % 2 == 0], "more": word[answer > problem.start]}


def fields_text(problem: Problem) -> str:
    """The reference answer of wording "fields": `answer: 35`, a line for each field."""
    return "\n".join(f"{name}: {value}" for name, value in field_values(problem).items())


_ANSWER = re.compile(r"####\s*([0-9]{1,9})(?![0-9]|[.,][0-9])")
_EQUATION = re.compile(r"([0-9]{1,9})\s*([-+*/])\s*([0-9]{1,9})\s*=\s*([0-9]{1,9})(?![0-9])")


def final_answer(text: str) -> int | None:
    """The number after the first ####, whatever follows it; None for none."""
    match = _ANSWER.search(text)
    return None if match is None else int(match[1])


def worked_steps(text: str, *, words: bool = False) -> list[tuple[int, str, int, int]] | None:
    """All equations before the ####, or None when anything else stands there.

    Args:
        words: words may stand there.
    """
    head = text.partition("####")[0]
    head = re.sub("[A-Za-z]", "", head) if words else head
    if _EQUATION.sub("", head).strip(" .\n"):
        return None
    return [(int(a), operation, int(b), int(c)) for a, operation, b, c in _EQUATION.findall(head)]


def corpus(count: int) -> Iterator[str]:
    """Training texts of all difficulties in turn, for the tokenizer, with all numbers of two digits."""
    medium = WordProblems(difficulty="medium", steps=(1, 3), max_total=99)
    tasks = [WordProblems(difficulty="easy"), medium, WordProblems(difficulty="hard")]
    return ("".join(tasks[i % len(tasks)].texts("train", i)) for i in range(count))


def train_tokenizer(folder: str | Path, *, vocab_size: int = 640, texts: int = 20_000) -> Vocabulary:
    """Trains the byte-level BPE on generated training problems and writes it in Hugging Face's files.

    Args:
        vocab_size: tokens at most; fewer when the texts have no more pairs to merge.
        texts: number of training texts.
    """
    return tokens.train_bpe(corpus(texts), folder, vocab_size=vocab_size)


@functools.cache
def _own_codec() -> "PreTrainedTokenizerBase":
    """The task's own tokenizer, without a model around it."""
    return load_tokenizer(TOKENIZER)
