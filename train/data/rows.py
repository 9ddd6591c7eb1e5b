"""From examples to fixed shapes: rows of one length, at least in a batch, in an order that knows every position."""

import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from train.config import DataPart, Kind
from train.data.checks import find_fault, split_pair
from train.data.order import BucketOrder, Order
from train.data.packing import Packing
from train.data.source import ExampleLike, Source, count_examples, example_name, lengths_of, progress, prompt_lengths_of

T = TypeVar("T")
_ORDER, _CUT = 1, 2  # purposes of random numbers


class Row(NamedTuple):
    """Attributes:
    tokens: [T] int32.
    targets: [T] bool, positions that are learned.
    length: positions that count.
    step: [T] int32, of a trajectory: the step that wrote each position, -1 where none did; None for other data.
    documents: of a row of several examples, see `train.losses.Documents`.
    """

    tokens: np.ndarray
    targets: np.ndarray
    length: int
    step: np.ndarray | None = None
    documents: tuple[np.ndarray, np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row number `position` of the endless sequence of training rows: a pure function of the position.

    Attributes:
        part: lengths, padding and shuffling.
        kind: "pretrain" makes the prompt a part of the answer; "pairs" are two documents.
        seed: of the order and of random lengths.
        batch: rows that are computed together, which `DataPart.bucket` makes equally wide.
        checked: whether all examples are known to make rows, see `train.data.checks`.
        in_flight: blocks of the model that documents begin at multiples of in a row, see `train.objectives.base`.
    """

    source: Source
    part: DataPart
    kind: Kind
    config: ModelConfig
    seed: int
    batch: int = 1
    checked: bool = False
    in_flight: int = 1

    def __call__(self, position: int) -> Row:
        """The row.

        Raises:
            DllmError: when its example does not fit, and for buckets of an endless source.
        """
        index, width = self.index(position), self.width(position)
        if self._packing is not None:
            return self._join(self._pieces(index), width)
        row = self._fill(self.source.example(index), index, width)
        draws = np.random.default_rng([self.seed, _CUT, position]) if self.part.random_length else None
        if draws is None or draws.random() >= self.part.random_length:
            return row
        length = int(draws.integers(1, width + 1))
        targets = row.targets & (np.arange(width) < length)
        return row._replace(targets=targets, length=min(length, row.length))

    def index(self, position: int) -> int:
        """The number of the example at a position, with `DataPart.pack` of the row: the position itself in an endless
        source, else a new order of all of them each epoch."""
        return self._order(position) if self._order else position

    @property
    def count(self) -> int | None:
        """Rows of an epoch, None for an endless source."""
        return count_examples(self.source) if self._packing is None else len(self._packing)

    @property
    def in_documents(self) -> bool:
        """Whether rows hold several documents."""
        return self.part.pack or self.kind == "pairs"

    @property
    def padding(self) -> float | None:
        """Share of all positions that hold no token, of rows of several examples."""
        return None if self._packing is None else self._packing.padding

    def width(self, position: int) -> int:
        """T of the rows that are in a position's batch."""
        length = self.part.length
        return min(self._order.width(position), length) if isinstance(self._order, BucketOrder) else length

    @functools.cached_property
    def _packing(self) -> Packing | None:
        if not self.part.pack:
            return None
        if (count := count_examples(self.source)) is None:
            raise DllmError("data.pack needs to know all lengths and the source is endless; set it to false")
        return Packing(self._lengths(count), self.part.length, self._align)

    @functools.cached_property
    def _order(self) -> Order | BucketOrder | None:
        if (count := self.count) is None:
            if self.part.bucket:
                raise DllmError("data.bucket needs to know all lengths and the source is endless; set it to 0")
            return None
        order = Order(count, (self.seed, _ORDER), self.part.shuffle)
        return BucketOrder(order, self._lengths(count), self.part.bucket, self.batch) if self.part.bucket else order

    def _lengths(self, count: int) -> np.ndarray:
        """Positions that each example needs."""
        canvas = self._canvas
        known, prompts = lengths_of(self.source), prompt_lengths_of(self.source) if canvas else np.zeros(1, np.int64)
        if known is not None and prompts is not None and not (canvas and self.kind == "pairs"):
            return np.maximum(known, prompts + canvas)
        examples = map(self.source.example, progress(range(count), "lengths", " examples", count))
        return np.fromiter(map(self._positions, examples), np.int64, count)

    def _pieces(self, number: int) -> Iterator[Row]:
        """What stands in a packed row."""
        assert self._packing is not None
        for example, start, end in self._packing.row(number):
            found = self.source.example(example)
            row = self._fill(found, example, self._positions(found))
            yield Row(row.tokens[start:end], row.targets[start:end], end - start)

    def _join(self, parts: Iterable[Row], width: int) -> Row:
        """A row of several documents, each of the whole of its own row."""
        tokens, targets = np.full(width, self.config.eos_id, np.int32), np.zeros(width, bool)
        first, end = np.zeros(width, np.int32), np.zeros(width, np.int32)
        at, used, align = 0, 0, self._align
        for part in parts:
            used = at + part.length
            tokens[at:used], targets[at:used] = part.tokens, part.targets
            first[at:], end[at:] = at, used
            at += -(-part.length // align) * align
        return Row(tokens, targets, used, None, (first, end))

    @property
    def _align(self) -> int:
        """What documents begin at multiples of in a row: a block diffusion model's blocks, or some of them."""
        return (self.config.block_length or 1) * self.in_flight

    @property
    def _canvas(self) -> int:
        """Positions of each example's canvas that are filled up; 0 for none."""
        return self.part.answer_length if self.part.pad else 0

    def _positions(self, example: ExampleLike) -> int:
        """Positions that an example needs where it has no rest of a row to fill."""
        if self.kind == "pairs" and (pair := split_pair(example)):
            return sum(map(self._positions, pair))
        return len(example.prompt_ids) + max(self._canvas, len(example.answer_ids))

    def _fill(self, example: ExampleLike, index: int, width: int) -> Row:
        if not self.checked and (fault := find_fault(example, self.part, self.kind, self.config)):
            raise DllmError(f"{example_name(self.source, index)} {fault.text}")
        if self.kind == "pairs" and (pair := split_pair(example)):
            return self._join([self._row(half, self._positions(half)) for half in pair], width)
        return self._row(example, width)

    def _row(self, example: ExampleLike, width: int) -> Row:
        prompt, answer = example.prompt_ids, example.answer_ids
        canvas, used = self.part.answer_length, len(prompt) + len(answer)
        order = getattr(example, "step", None)  # a trajectory's canvas is as long as it was
        end = (len(prompt) + canvas if canvas else width) if self.part.pad and order is None else used
        tokens = np.full(width, self.config.eos_id, np.int32)
        tokens[: len(prompt)] = prompt
        tokens[len(prompt) : used] = answer
        targets = np.arange(width) < end
        if self.kind in ("sft", "pairs"):
            targets[: len(prompt)] = False
            if example.given is not None:
                targets[len(prompt) : used] &= ~np.asarray(example.given, bool)
        step = None
        if order is not None:
            step = np.full(width, -1, np.int32)
            step[len(prompt) : used] = order
        return Row(tokens, targets, end, step)


class Prefetcher(Generic[T]):
    """Values of make(start), make(start + 1), ..., which a thread computes before they are used. Use it by `with`."""

    def __init__(self, make: Callable[[int], T], start: int, stop: int, depth: int = 4) -> None:
        self._make, self._span = make, range(start, stop)
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._compute, daemon=True)

    def __enter__(self) -> Iterator[T]:
        self._thread.start()
        return self._values()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        while self._thread.is_alive():  # it may wait until the queue has a free place
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

    def _compute(self) -> None:
        try:
            for number in self._span:
                if self._closed.is_set():
                    return
                self._ready.put((self._make(number), None))
        except BaseException as error:  # raised where the value would have been used
            self._ready.put((None, error))
