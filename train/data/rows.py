"""From examples to fixed shapes: rows of one length, in a shuffled order that any position can be computed from."""

import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from train.config import DataPart, Kind
from train.data.source import ExampleLike, Source, size

T = TypeVar("T")
_ORDER, _CUT = 1, 2  # purposes of random numbers


class Row(NamedTuple):
    """Attributes:
    tokens: [T] int32.
    targets: [T] bool, positions that are learned.
    length: positions that count.
    step: [T] int32, of a trajectory: the step that wrote each position, -1 where none did; None for other data.
    """

    tokens: np.ndarray
    targets: np.ndarray
    length: int
    step: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row number `position` of the endless sequence of training rows: a pure function of the position.

    Attributes:
        part: lengths, padding and shuffling.
        kind: "sft" or "pretrain"; the latter makes the prompt a part of the answer.
        seed: of the order and of random lengths.
    """

    source: Source
    part: DataPart
    kind: Kind
    config: ModelConfig
    seed: int

    def __call__(self, position: int) -> Row:
        """The row.

        Raises:
            DllmError: when its example does not fit.
        """
        index = self.index(position)
        row = self._fill(self.source.example(index), f"example {index}")
        draws = np.random.default_rng([self.seed, _CUT, position]) if self.part.random_length else None
        if draws is None or draws.random() >= self.part.random_length:
            return row
        length = int(draws.integers(1, self.part.length + 1))
        targets = row.targets & (np.arange(self.part.length) < length)
        return row._replace(targets=targets, length=min(length, row.length))

    def index(self, position: int) -> int:
        """The number of the example at a position: the position itself in an endless source, else a new order of all
        examples each epoch."""
        count = size(self.source)
        if count is None:
            return position
        epoch, place = divmod(position, count)
        return int(_order(count, self.seed, epoch)[place]) if self.part.shuffle else place

    def _fill(self, example: ExampleLike, where: str) -> Row:
        length, prompt, answer = self.part.length, example.prompt_ids, example.answer_ids
        used = len(prompt) + len(answer)
        if len(prompt) >= length and len(prompt):
            raise DllmError(f"{where} has a prompt of {len(prompt)} tokens and data.length is {length}; raise it")
        canvas = self.part.answer_length
        if canvas and (len(answer) > canvas or len(prompt) + canvas > length):
            raise DllmError(
                f"{where} has a prompt of {len(prompt)} and an answer of {len(answer)} tokens, which do not fit "
                f"data.length {length} with data.answer_length {canvas}; raise them"
            )
        if used > length:
            raise DllmError(f"{where} has {used} tokens and data.length is {length}; raise it")
        if not used:
            raise DllmError(f"{where} is empty; give every example at least one token")
        order = getattr(example, "step", None)  # a trajectory's canvas is as long as it was
        end = (len(prompt) + canvas if canvas else length) if self.part.pad and order is None else used
        tokens = np.full(length, self.config.eos_id, np.int32)
        tokens[: len(prompt)] = prompt
        tokens[len(prompt) : used] = answer
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise DllmError(f"{where} has token ids outside the vocabulary of {self.config.vocab_size}")
        targets = np.arange(length) < end
        if self.kind == "sft":
            targets[: len(prompt)] = False
            if example.given is not None:
                targets[len(prompt) : used] &= ~np.asarray(example.given, bool)
        if np.any(tokens[targets] == self.config.mask_id):
            raise DllmError(f"{where} has the mask token {self.config.mask_id} in its answer; it cannot be learned")
        step = None
        if order is not None:
            step = np.full(length, -1, np.int32)
            step[len(prompt) : used] = order
        return Row(tokens, targets, end, step)


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, _ORDER, epoch]).permutation(count)


class Ahead(Generic[T]):
    """Values of make(start), make(start + 1), ... computed ahead of their use by a thread; use it by `with`."""

    def __init__(self, make: Callable[[int], T], start: int, stop: int, depth: int = 4) -> None:
        self._make, self._span = make, range(start, stop)
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Iterator[T]:
        self._thread.start()
        return self._values()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        while self._thread.is_alive():  # it may wait for room
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.05)

    def _values(self) -> Iterator[T]:
        for _ in self._span:
            value, error = self._ready.get()
            if error is not None:
                raise error
            yield value  # type: ignore[misc]

    def _work(self) -> None:
        try:
            for number in self._span:
                if self._closed.is_set():
                    return
                self._ready.put((self._make(number), None))
        except BaseException as error:  # raised where the value would have been used
            self._ready.put((None, error))
