"""Bad examples are found before the first step: all examples of a finite source are checked once."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from tqdm import tqdm

from dllm_jax.checkpoints.checkpoint import home
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.storage import write_file
from train.config import DataPart, Kind
from train.data.cache import Flat, StreamRows, TokenisedExamples
from train.data.mixture import Mixture
from train.data.source import (
    Example,
    ExampleLike,
    Source,
    count_examples,
    draws_of,
    example_name,
    lengths_of,
    prompt_lengths_of,
)

_SLOW = 5.0  # seconds; results of longer checks are kept in a file
_MOST = 2**31  # most tokens that are all read before the first step: 8 GiB, some seconds to a minute
_LISTED = 1000  # sentences that are kept
_NAMED = 5  # of them in a refusal


class ExampleFault(NamedTuple):
    """Attributes:
    kind: in two words, for counting.
    text: the rest of a sentence that begins with the example's name.
    """

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class BadExamples:
    """What is wrong with a source.

    Attributes:
        count: its examples, those among them that could not be read.
        bad: numbers of the bad ones among those that could be read, ascending.
        kinds: how many there are of each kind.
        sentences: one for each of the first thousand.
    """

    count: int
    bad: list[int]
    kinds: dict[str, int]
    sentences: list[str]

    @classmethod
    def of_all(cls, parts: Sequence["BadExamples"]) -> Self:
        """What is wrong with several sources; the numbers are those of each."""
        kinds: collections.Counter[str] = collections.Counter()
        for part in parts:
            kinds.update(part.kinds)
        join = lambda name: [x for part in parts for x in getattr(part, name)]
        return cls(sum(part.count for part in parts), join("bad"), dict(kinds), join("sentences")[:_LISTED])

    @property
    def total(self) -> int:
        """How many examples are bad."""
        return sum(self.kinds.values())

    def __str__(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.kinds.items())
        return f"{self.total} of {self.count} examples are bad: {kinds}"

    def listing(self) -> str:
        """A line for each sentence, and one with the number of the others."""
        rest = self.total - len(self.sentences)
        return "".join(line + "\n" for line in [*self.sentences, *([f"and {rest} more"] if rest else [])])


class Subset:
    """Some examples of a source: a finite source."""

    def __init__(self, source: Source, numbers: np.ndarray) -> None:
        self._source, self._numbers = source, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def example(self, index: int) -> ExampleLike:
        """Example `index` of those that are left."""
        return self._source.example(int(self._numbers[index]))

    def lengths(self) -> np.ndarray | None:
        """Tokens of each example, [N], where the source knows."""
        lengths = lengths_of(self._source)
        return None if lengths is None else lengths[self._numbers]

    def prompts(self) -> np.ndarray | None:
        """Tokens of each example's prompt, [N], where the source knows."""
        prompts = prompt_lengths_of(self._source)
        return None if prompts is None else prompts[self._numbers]

    def draws(self, *, shown: str | None) -> np.ndarray | None:
        """`train.data.heldout.heldout_draw` of each example, [N], where the source keeps them."""
        draws = draws_of(self._source, shown=shown)
        return None if draws is None else draws[self._numbers]

    def name(self, index: int) -> str:
        """What it is called in its source."""
        return example_name(self._source, int(self._numbers[index]))


def drop_bad_examples(
    source: Source, part: DataPart, kind: Kind, config: ModelConfig, *, progress: bool = False
) -> tuple[Source, BadExamples | None]:
    """A source whose examples all make rows, and what was wrong with others, which `data.on_bad` drops or refuses.

    All examples are checked, one after the other; of tokenised data only those that a scan by NumPy finds doubtful. If
    that takes long, the result is kept under $DLLM_JAX_HOME/checks for sources that have an `identity`. The rows of an
    endless source, and those of one for which `scans_all` is false, are checked when they are read, and refused.

    Args:
        progress: show a bar.

    Raises:
        DllmError: for bad examples that are refused, where none is left, and where an endless source's are to be
            dropped.
    """
    if isinstance(source, Mixture):
        parts = [drop_bad_examples(one, part, kind, config, progress=progress) for one in source.sources]
        bad = [found for _, found in parts if found]
        return Mixture([one for one, _ in parts], source.epochs), BadExamples.of_all(bad) if bad else None
    if not isinstance(source, Sized):
        if part.on_bad == "drop":
            raise DllmError('data.on_bad "drop" is for data with an end, and this has none; set it to "refuse"')
        return source, None
    faults = _faults(source, len(source), part, kind, config, progress)
    if not faults.kinds:
        count_examples(source)  # is not 0
        return source, None
    if part.on_bad == "refuse" or faults.total == faults.count:
        raise DllmError(_refusal(faults))
    return Subset(source, np.delete(np.arange(len(source)), faults.bad)), faults


def scans_all(source: Source, part: DataPart) -> bool:
    """Whether `drop_bad_examples` reads all tokens of a source. Of tokenised data with more than 2^31 of them it reads
    the lengths alone, unless bad examples are to be dropped."""
    if isinstance(source, Mixture):
        return all(scans_all(one, part) for one in source.sources)
    if not isinstance(source, TokenisedExamples | StreamRows):
        return isinstance(source, Sized)
    return part.on_bad == "drop" or len(source.tokens) <= _MOST


def find_fault(example: ExampleLike, part: DataPart, kind: Kind, config: ModelConfig) -> ExampleFault | None:
    """Why an example cannot be a row, None where it can."""
    prompt, answer = np.asarray(example.prompt_ids), np.asarray(example.answer_ids)
    given, step = example.given, getattr(example, "step", None)
    for name, ids in (("prompt", prompt), ("answer", answer)):
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            return ExampleFault("of wrong type", f"has a {name} that is no list of token ids")
    for name, values in (("given", given), ("step", step)):
        if values is not None and np.shape(values) != answer.shape:
            return ExampleFault(
                "of wrong type", f"has an answer of {answer.size} tokens and {np.size(values)} of {name}"
            )
    unbounded = kind == "pairs" or (part.pack and kind == "pretrain")
    if not unbounded and (too_long := _too_long(len(prompt), len(answer), part)):
        return ExampleFault("too long", too_long)
    tokens = np.concatenate((prompt, answer))
    if not tokens.size:
        return ExampleFault("empty", "is empty; give every example at least one token")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        return ExampleFault("outside the vocabulary", f"has token ids outside the vocabulary of {config.vocab_size}")
    if kind == "prompts":
        return None
    learned = tokens if kind == "pretrain" else answer if given is None else answer[~np.asarray(given, bool)]
    if config.mask_id in learned:
        return ExampleFault(
            "with a mask token", f"has the mask token {config.mask_id} in its answer; it cannot be learned"
        )
    if kind == "pairs":
        return _find_pair_fault(example, part)
    if kind == "sft" and step is None and given is None:
        ends = (config.eos_id, *config.end_ids)
        if all(token in ends for token in answer):
            return ExampleFault(
                "without an answer", "has an empty answer; give it at least one token that is no end token"
            )
    elif kind == "sft" and not learned.size:
        return ExampleFault("without an answer", "has nothing to learn, all of its answer is given")
    return None


def split_pair(example: ExampleLike) -> tuple[Example, Example] | None:
    """The better and the worse answer of a pair, each with the prompt; None of an example that is no pair: two runs of
    given tokens, each with a run of learned ones after it."""
    prompt, answer = example.prompt_ids, example.answer_ids
    given = np.zeros(len(answer), bool) if example.given is None else np.asarray(example.given, bool)
    changes = np.flatnonzero(given[1:] != given[:-1]) + 1
    if not len(prompt) or not len(given) or given[0] or given[-1] or len(changes) != 2:
        return None
    first, second = changes
    return Example(prompt, answer[:first]), Example(answer[first:second], answer[second:])


def _find_pair_fault(example: ExampleLike, part: DataPart) -> ExampleFault | None:
    if (pair := split_pair(example)) is None:
        return ExampleFault("no pair", "is no pair of answers to a prompt; give it prompt, chosen and rejected")
    canvas, needed = part.answer_length, 0
    for half in pair:
        prompt, answer = len(half.prompt_ids), len(half.answer_ids)
        if canvas and answer > canvas:
            return ExampleFault(
                "too long", f"has an answer of {answer} tokens and data.answer_length is {canvas}; raise it"
            )
        needed += prompt + (max(canvas, answer) if part.pad else answer)
    if needed > part.length:
        return ExampleFault(
            "too long", f"needs {needed} positions for both answers and data.length is {part.length}; raise it"
        )
    return None


def _too_long(prompt: int, answer: int, part: DataPart) -> str | None:
    length, canvas = part.length, part.answer_length
    if prompt >= length:
        return f"has a prompt of {prompt} tokens and data.length is {length}; raise it"
    if canvas and not answer and prompt + canvas > length:
        return f"has a prompt of {prompt} tokens, and data.length {length} does not fit {canvas} more; raise it"
    if canvas and (answer > canvas or prompt + canvas > length):
        return (
            f"has a prompt of {prompt} and an answer of {answer} tokens, which do not fit data.length {length} with "
            f"data.answer_length {canvas}; raise them"
        )
    return f"has {prompt + answer} tokens and data.length is {length}; raise it" if prompt + answer > length else None


def _faults(source: Source, count: int, part: DataPart, kind: Kind, config: ModelConfig, progress: bool) -> BadExamples:
    unread = list(getattr(source, "faults", ()))
    path = _path(source, count, part, kind, config)
    if path is not None and path.is_file():
        with contextlib.suppress(OSError, ValueError, TypeError):  # of a file that something has damaged
            return BadExamples(**json.loads(path.read_text(encoding="utf-8")))
    start, bad, sentences = time.perf_counter(), list[int](), unread[:_LISTED]
    kinds = collections.Counter({"unreadable": len(unread)} if unread else {})
    numbers = _doubtful(source, part, kind, config, progress)
    for index in tqdm(numbers, desc="checking", unit=" examples", delay=1.0, disable=not progress):
        if fault := _check_one(source, index, part, kind, config):
            bad.append(index)
            kinds[fault.kind] += 1
            if len(sentences) < _LISTED:
                sentences.append(f"{example_name(source, index)} {fault.text}")
    found = BadExamples(count + len(unread), bad, dict(kinds), sentences)
    if path is not None and time.perf_counter() - start > _SLOW:
        with contextlib.suppress(OSError, DllmError):  # then they are checked again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(dataclasses.asdict(found)))
    return found


def _doubtful(source: Source, part: DataPart, kind: Kind, config: ModelConfig, progress: bool) -> Sequence[int]:
    """The examples that may be bad: all, or of tokenised data those that NumPy finds, some millions of tokens at a
    time."""
    assert isinstance(source, Sized)
    if not isinstance(source, TokenisedExamples | StreamRows):
        return range(len(source))
    canvas, length, scans = part.answer_length, part.length, scans_all(source, part)

    def doubtful(some: Flat) -> np.ndarray:
        totals, prompts = np.diff(some.bounds), some.prompts
        found = (totals == 0) | (prompts >= length) | (totals > length)
        if canvas:
            found |= (totals - prompts > canvas) | (prompts + canvas > length)
        if not scans:
            return found  # and no token was read
        ids = np.where(some.stored < 0, ~some.stored, some.stored)
        learned = some.stored >= 0
        wrong = ids >= config.vocab_size
        if kind != "prompts":
            wrong |= (ids == config.mask_id) & (learned | (kind == "pretrain"))
        found[np.searchsorted(some.bounds, np.flatnonzero(wrong), side="right") - 1] = True
        if kind == "pairs":
            found[:] = True  # each is looked at
        elif kind == "sft":
            for end in {config.eos_id, *config.end_ids}:
                learned &= ids != end
            counts = np.concatenate(([0], np.cumsum(learned)))
            found |= np.diff(counts[some.bounds]) == 0
        return found

    found: list[int] = np.flatnonzero(source.map_examples(doubtful, shown="checking" if progress else None)).tolist()
    return found


def _check_one(source: Source, index: int, part: DataPart, kind: Kind, config: ModelConfig) -> ExampleFault | None:
    try:
        return find_fault(source.example(index), part, kind, config)
    except DllmError as error:
        return ExampleFault("unreadable", f"cannot be read: {error}")
    except Exception as error:  # a source's own code raises whatever it does
        return ExampleFault("unreadable", f"cannot be made ({type(error).__name__}: {error})")


def _refusal(faults: BadExamples) -> str:
    """One sentence, with the first faults by name."""
    if faults.total == 1 < faults.count:
        return f'{faults.sentences[0]} (or leave it out by data.on_bad="drop")'
    first = "; ".join(faults.sentences[:_NAMED])
    more = f"; and {faults.total - _NAMED} more" if faults.total > _NAMED else ""
    return f'{first}{more}; {faults}; correct them, or leave them out by data.on_bad="drop"'


def _path(source: Source, count: int, part: DataPart, kind: Kind, config: ModelConfig) -> Path | None:
    """The file for the result, None for a source without an `identity`."""
    identity = getattr(source, "identity", None)
    if identity is None:
        return None
    ids = (config.vocab_size, config.mask_id, config.eos_id, config.end_ids)
    about = [identity, count, part.source, part.options, part.length, part.answer_length, kind, ids]
    about += [] if scans_all(source, part) else ["lengths"]
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
    return home() / "checks" / f"{key}.json"
