"""What a task is: examples that are pure functions of (options, split, index), and a verifier for answers.

Splits. Every problem that is drawn belongs to one split, which a hash of its content decides (`split_of`): neither
seed, index nor options play a part. A generator draws problems until one of the wanted split appears, so no problem can
ever be in two splits, whatever was generated when. 18 of 20 problems are for training, one for validation and one for
tests.

Random numbers. Raw 64-bit words of Philox, seeded by `SeedSequence`, are all that is taken from NumPy: both streams are
fixed by NumPy's compatibility policy, whereas the distributions built on them may change with its versions.
"""

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from dllm_jax import Model, spec
from dllm_jax.errors import DllmError
from evals import tokens
from evals.tokens import Vocabulary

T = TypeVar("T")
Ids = Sequence[int] | np.ndarray

SPLITS = ("train", "validation", "test")
_SLOTS = 20  # slot 0 is test, slot 1 validation, the others train
_MOST_TRIES = 20_000


@dataclasses.dataclass(frozen=True)
class Example:
    """One problem as token ids.

    Attributes:
        prompt_ids: [P] int32, never masked; may be empty.
        answer_ids: [A] int32, the canvas as it should become, with an end token where the task has one; empty where
            many answers may be right.
        given: [A] bool, positions of the answer that the model is given (a Sudoku's clues); None for none.
        problem: the canonical problem, which decides the split and is all that a verifier needs.
    """

    prompt_ids: np.ndarray
    answer_ids: np.ndarray
    given: np.ndarray | None = None
    problem: Any = None

    @property
    def targets(self) -> np.ndarray:
        """[A] bool, the positions that are to be generated, and trained on."""
        return np.ones(len(self.answer_ids), bool) if self.given is None else ~self.given


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A verifier's verdict on an answer.

    Attributes:
        correct: the final answer is right; this is what accuracy counts.
        strict: every step that leads to it is right too. For tasks without steps the same as `correct`.
        exact: the tokens are those of the reference.
    """

    correct: bool
    strict: bool
    exact: bool


class Task(abc.ABC):
    """Base of all tasks: frozen dataclasses whose fields are the options.

    Attributes:
        name: in the registry, on the command line and in hashes.
        stops: whether an end token ends an answer; False where the canvas has a fixed length.
    """

    name: ClassVar[str]
    stops: ClassVar[bool] = False

    @abc.abstractmethod
    def example(self, split: str, index: int) -> Example:
        """Example `index` (from 0) of a split.

        Raises:
            DllmError: for an unknown split, an index that is not there, or options that leave a split without problems.
        """

    @abc.abstractmethod
    def verify(self, example: Example, ids: Ids) -> Verdict:
        """The verdict on an answer, given up to and without its end; never raises, whatever the ids."""

    def partial(self, example: Example, ids: Ids) -> float:
        """Share of the positions to be generated that are as in the reference: what training by rewards may be given
        where hardly any answer is right.

        Raises:
            DllmError: for a task without references.
        """
        targets, wanted = example.targets, np.asarray(example.answer_ids)
        if not targets.any():
            raise DllmError(f"{self.name} has no answers of its own to compare with; reward what is correct")
        found = np.full(len(wanted), -1)
        found[: min(len(ids), len(wanted))] = list(ids)[: len(wanted)]
        return float((found == wanted)[targets].mean())

    @abc.abstractmethod
    def show(self, ids: Ids) -> str:
        """Token ids as text for people."""

    @property
    @abc.abstractmethod
    def prompt_width(self) -> int:
        """No prompt is longer than this, in the task's own tokens; 0 where that is not known before."""

    @property
    @abc.abstractmethod
    def answer_width(self) -> int:
        """Length of the canvas: no answer is longer, end token included."""

    @abc.abstractmethod
    def bind(self, model: Model) -> Self:
        """The task in the tokens of a model.

        Raises:
            DllmError: when the model was made for other tokens.
        """

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end an answer and are no part of it, besides the model's end tokens."""
        return ()

    @property
    def fields(self) -> Mapping[str, Sequence[Any]] | None:
        """Of a task of typed decisions the values of each field, in the order of `samplers.decide`'s default template,
        which its answers are written by; None for other tasks."""
        return None

    def decided(self, example: Example) -> Mapping[str, Any]:
        """The right value of each field."""
        return {}

    def count(self, split: str) -> int | None:
        """Number of examples of a split, None where there is no end of them."""
        return None

    def question(self, example: Example) -> str:
        """What a model is given: the prompt, and the canvas with a full stop for every blank where it comes with
        clues."""
        prompt = self.show(example.prompt_ids)
        if example.given is None:
            return prompt
        pairs = zip(example.answer_ids, example.given, strict=True)
        return prompt + "".join(self.show([i]) if given else "." for i, given in pairs)

    def reference(self, example: Example) -> str:
        """The right answer, for people."""
        return self.show(example.answer_ids)

    def with_reference(self, example: Example) -> Example:
        """The example with the tokens of its one right answer, where it has one."""
        return example

    def source(self, split: str = "train") -> "Source":
        """The examples of a split for training.

        Raises:
            DllmError: for the test split, on which accuracy is measured.
        """
        return Source(self, split)

    def __str__(self) -> str:
        """The task as it is written on the command line, with the options that differ from the defaults."""
        fields = [field for field in dataclasses.fields(self) if field.repr]  # type: ignore[arg-type]
        changed = [field.name for field in fields if getattr(self, field.name) != field.default]
        options = ",".join(f"{name}={spec.format_value(getattr(self, name))}" for name in changed)
        return f"{self.name}:{options}" if options else self.name


class DrawnTask(Task):
    """Base of tasks that draw problems without end, in tokens of their own.

    Attributes:
        seed: another one gives other examples of the same splits.
    """

    seed: int

    @property
    @abc.abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The task's own tokens."""

    @abc.abstractmethod
    def write_tokenizer(self, folder: Any) -> None:
        """Writes tokenizer.json and tokenizer_config.json, for a checkpoint of a model trained on this task."""

    def bind(self, model: Model) -> Self:
        own, config = self.vocabulary, model.config
        theirs = (config.mask_id, config.eos_id)
        if config.vocab_size < own.size or theirs != (own.mask_id, own.eos_id):
            raise DllmError(
                f"{model.name} has {config.vocab_size} tokens, mask {theirs[0]} and end {theirs[1]}, but {self.name} "
                f"needs {own.size}, {own.mask_id} and {own.eos_id}; evaluate a model that was trained on this task"
            )
        return self


class SymbolTask(DrawnTask):
    """Base of tasks in one token per symbol.

    Attributes:
        pattern: regular expression of a symbol in text.
    """

    pattern: ClassVar[str]

    @property
    @abc.abstractmethod
    def symbols(self) -> Mapping[str, int]:
        """Symbol -> id, special tokens among them."""

    @property
    def vocabulary(self) -> Vocabulary:
        return tokens.vocabulary_of_symbols(self.symbols)

    def show(self, ids: Ids) -> str:
        return tokens.join(self.symbols, ids)

    def write_tokenizer(self, folder: Any) -> None:
        tokens.write_symbols(self.symbols, self.pattern, folder)


@dataclasses.dataclass(frozen=True)
class Source:
    """What a trainer takes: `example(index)` of one split, an unlimited supply.

    Raises:
        DllmError: for the test split, which must not be trained on.
    """

    task: Task
    split: str = "train"

    def __post_init__(self) -> None:
        check_split(self.split)
        if self.split == "test":
            raise DllmError("the test split is what accuracy is measured on; train on 'train', look at 'validation'")

    def example(self, index: int) -> Example:
        """Example `index` from 0 on."""
        return self.task.example(self.split, index)


class Draws:
    """Random numbers of one example: the same on every platform and with every version of NumPy."""

    def __init__(self, *entropy: int) -> None:
        self._bits = np.random.Philox(np.random.SeedSequence(entropy))
        self._words: Iterator[int] = iter(())

    def below(self, bound: int) -> int:
        """A whole number in [0, bound)."""
        for word in self._words:
            return (word * bound) >> 64  # the bias, bound / 2^64, is beyond notice
        self._words = iter(self._bits.random_raw(64).tolist())
        return self.below(bound)

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Puts a list into a random order, in place."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]


def check_split(split: str) -> None:
    """Raises DllmError for a word that is none of `SPLITS`."""
    if split not in SPLITS:
        raise DllmError(f"no split is called {split!r}; choose one of {', '.join(SPLITS)}")


def check_index(what: str, value: Any) -> None:
    """Raises DllmError for anything but a whole number from 0 on."""
    if not isinstance(value, (int, np.integer)) or value < 0:
        raise DllmError(f"{what} is {value!r}; it must be a whole number from 0 on")


def split_of(task: str, problem: str) -> str:
    """The split a problem belongs to, by a hash of its canonical text."""
    digest = hashlib.blake2b(f"{task}:{problem}".encode(), digest_size=8).digest()
    slot = int.from_bytes(digest, "big") % _SLOTS
    return "test" if slot == 0 else "validation" if slot == 1 else "train"


def draws_for(task: str, seed: int, split: str, index: int) -> Draws:
    """The random numbers of one example.

    Raises:
        DllmError: for an unknown split or a negative seed or index.
    """
    check_split(split)
    check_index("seed", seed)
    check_index("index", index)
    tag = int.from_bytes(hashlib.blake2b(task.encode(), digest_size=4).digest(), "big")
    return Draws(tag, int(seed), SPLITS.index(split), int(index))


def draw_of_split(task: str, split: str, draw: Callable[[], T], canonical: Callable[[T], str]) -> T:
    """Draws problems until one belongs to the split.

    Raises:
        DllmError: when none does after many tries: the options allow too few problems.
    """
    for _ in range(_MOST_TRIES):
        problem = draw()
        if split_of(task, canonical(problem)) == split:
            return problem
    raise DllmError(f"no {split} problem of {task} was found; its options allow too few different problems")
