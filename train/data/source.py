"""What training data is: a source gives examples by number, so a position in the data is one integer."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from tqdm import tqdm

from dllm_jax import spec
from dllm_jax.cli import progress_bars
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class ExampleLike(Protocol):
    """One example; `evals.tasks` has its own class of this form.

    Attributes:
        prompt_ids: [P] integers, never masked in SFT; may be empty.
        answer_ids: [A] integers, to be learned; a document without prompt is all answer.
        given: [A] bool, positions of the answer that the model gets and that are never masked; None where none is.

    A trajectory has a `step` as well, see `Example`.
    """

    @property
    def prompt_ids(self) -> np.ndarray: ...
    @property
    def answer_ids(self) -> np.ndarray: ...
    @property
    def given(self) -> np.ndarray | None: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """An `ExampleLike` for sources that have no class of their own.

    Attributes:
        step: [A] integers, of a trajectory: number of the step that wrote each position, -1 where none did.
    """

    prompt_ids: np.ndarray
    answer_ids: np.ndarray
    given: np.ndarray | None = None
    step: np.ndarray | None = None


class Source(Protocol):
    """Examples by number.

    `example` must be a pure function: the same index gives the same example in every process, for ever. A finite source
    also has `__len__`; one without is an endless generator. A source that knows held-out splits gives training's here.
    Optional are: `name(index)`, an example's name for error messages; `faults`, a sentence for each entry that is no
    example; `identity`, JSON that changes when the examples do; `lengths()`, the number of tokens of each example, and
    `prompts()`, of its prompt, without which `data.bucket` and `data.pack` read all examples.
    """

    def example(self, index: int) -> ExampleLike:
        """Example `index`, from 0 on."""
        ...


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a built-in source may need to know.

    Attributes:
        config: of the model; its special ids.
        tokenizer: None where there is none.
        length: positions per row.
        canvas: positions after each prompt; 0 extends it to the end of the row.
        cache: folder for what is tokenised, see `train.data.cache`; None is $DLLM_JAX_HOME/data.
        pack: whether rows hold several examples, see `train.config.DataPart`.
        workers: processes that tokenise; 0 is this one.
    """

    config: ModelConfig
    tokenizer: "PreTrainedTokenizerBase | None"
    length: int
    canvas: int = 0
    cache: Path | None = None
    pack: bool = False
    workers: int = 0

    def fits(self, prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
        """Whether prompts and answers of these numbers of tokens fit into a row."""
        canvas = self.canvas or answer
        return (prompt < self.length) & (answer <= canvas) & (prompt + canvas <= self.length)

    def require_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer.

        Raises:
            DllmError: when there is none.
        """
        if self.tokenizer is None:
            raise DllmError("the data is text but there is no tokenizer; set model.tokenizer to a folder that has one")
        return self.tokenizer


def count_examples(source: Source) -> int | None:
    """Number of examples, None for an endless source.

    Raises:
        DllmError: for a source without examples.
    """
    if not isinstance(source, Sized):
        return None
    count = len(source)
    if not count:
        raise DllmError("the data source has no examples; give it at least one")
    return count


def lengths_of(source: Source) -> np.ndarray | None:
    """How many tokens each example of a source has, where it knows."""
    lengths = getattr(source, "lengths", None)
    return None if lengths is None else lengths()


def prompt_lengths_of(source: Source) -> np.ndarray | None:
    """How many tokens each example's prompt has, where a source knows."""
    prompts = getattr(source, "prompts", None)
    return None if prompts is None else prompts()


def draws_of(source: Source, *, shown: str | None) -> np.ndarray | None:
    """`train.data.heldout.heldout_draw` of each example of a source that keeps them, [N] uint64; None of another."""
    draws = getattr(source, "draws", None)
    return None if draws is None else draws(shown=shown)


def example_name(source: Source, index: int) -> str:
    """An example's name for error messages."""
    name = getattr(source, "name", None)
    return f"example {index}" if name is None else str(name(index))


def progress(items: Iterable[T], what: str, unit: str, total: int | None) -> "tqdm[T]":
    """A progress bar around items, of work that takes longer than a moment."""
    return tqdm(items, what, total, unit=unit, delay=2, mininterval=progress_bars.interval())


def make_referenced(reference: str, options: Mapping[str, Any], table: str = "data") -> Any:
    """What a callable named "module:name" makes of the options: a source, or a task, whose `source("train")` is one.

    Args:
        table: of the settings that name it, for error messages.

    Raises:
        DllmError: when it cannot be imported, or refuses the options.
    """
    target = spec.import_object(reference, f"{table}.source")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    try:
        inspect.signature(target).bind(**given)
    except TypeError as error:
        raise DllmError(f"{table}.options do not fit {reference}: {error}") from None
    except ValueError:
        pass  # written in C, without a signature
    return target(**given)


def source_of_split(made: Any, reference: str, split: str = "train", table: str = "data") -> Source:
    """What `make_referenced` made, or the split of it where that is a task.

    Raises:
        DllmError: when it is neither.
    """
    source: Source = made.source(split) if hasattr(made, "source") else made
    if not hasattr(source, "example"):
        raise DllmError(f"{table}.source {reference!r} made a {type(made).__name__}, which has no example(index)")
    return source


def in_words(task: Any) -> bool:
    """Whether a task's examples are texts, which have no tokens but those of the model that it is bound to."""
    return hasattr(task, "bind") and not hasattr(task, "vocabulary")
