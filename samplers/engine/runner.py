"""Any number of requests in their own order, and engines that are used again."""

import collections
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from tqdm import tqdm

from dllm_jax import Model
from samplers.config.factory import CanvasSampler
from samplers.engine.engine import Engine, Stats
from samplers.engine.program import program_of, structure_of
from samplers.engine.requests import Request, Update
from samplers.sampler import describe_broken
from samplers.text.prompts import bucket_length


class Engines:
    """Keeps the engine that ran last, for the next sampler that it can run: one that differs in numbers alone.

    Attributes:
        programs: a key of each different program that was asked for.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Engine] | None = None
        self.programs: set[Any] = set()

    def of(self, model: Model, sampler: CanvasSampler, slots: int, prompt_length: int) -> Engine:
        """An engine that runs requests with this sampler's numbers, see `numbers_of`; of the same arguments otherwise.

        Raises:
            DllmError: as `Engine`.
        """
        key = (id(model.params), program_of(sampler), slots, prompt_length)
        if self._last is None or self._last[0] != key or not self._last[1].idle:
            self._last = None  # before the next takes as much memory
            self._last = key, Engine(model, sampler, slots=slots, prompt_length=prompt_length)
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), model.denoiser)
        self.programs.add((str(shapes), structure_of(sampler), slots, prompt_length))
        return self._last[1]


def warn_at_end(requests: Iterable[Request]) -> Iterator[Request]:
    """The requests, which have ended.

    Warns:
        RuntimeWarning: once, after the last, when logits were not finite, naming the first row and its forward.
    """
    found: dict[int, int] = {}
    for request in requests:
        if request.result is not None and request.result.broken_at[0] >= 0:
            found[request.number] = int(request.result.broken_at[0])
        yield request
    if sentence := describe_broken(list(found.values()), list(found)):
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


class Runner:
    """Runs any number of requests through an engine, and yields them in their order.

    Requests are taken when slots are about to be free, so a source may be a file of any size. If a prompt is longer
    than the engine has room for, those that run end first, and then a larger engine is built: a few times at most, as
    lengths are rounded up to buckets. A cancelled request is yielded in its place, and not run.

    Attributes:
        slots: requests that run together.
    """

    AHEAD = 64  # times the slots: requests that may have ended, or run, after one that has not

    def __init__(
        self,
        model: Model,
        sampler: CanvasSampler,
        slots: int,
        *,
        trace: bool = False,
        on_update: Callable[[Update], None] | None = None,
        constraint_states: int = 0,
    ) -> None:
        """
        Args:
            slots: requests that run together.
            trace: keep each request's result after every step, for its `trace`; every step is then a call of its own.
            on_update: called after every step with what it did to each request; likewise.
            constraint_states: as of `Engine`, of requests that bring a form.
        """
        self.slots, self._trace, self._on_update = slots, trace, on_update
        self._most = model.config.max_length - sampler.gen_length
        self._make = lambda longest: Engine(
            model, sampler, slots=slots, prompt_length=longest, constraint_states=constraint_states
        )
        self._engine: Engine | None = None
        self._former = Stats()  # of engines that were replaced

    @property
    def stats(self) -> Stats:
        """What all engines did so far."""
        return self._former if self._engine is None else self._former + self._engine.stats

    def run(self, requests: Iterable[Request], longest: int = 0) -> Iterator[Request]:
        """The same requests when they have ended. An error of the source is raised after the requests before it are
        done.

        Args:
            longest: tokens of the longest prompt, where it is known.

        Warns:
            RuntimeWarning: at the end, when logits were not finite, naming the first row and its forward.
        """
        source = _Source(requests)
        yield from warn_at_end(self._run(source, longest))
        if source.failure is not None:
            raise source.failure

    def _run(self, source: "_Source", longest: int) -> Iterator[Request]:
        order = collections.deque[Request]()
        while source.peek() is not None or order:
            self._submit(source, order, longest)
            while order and (order[0].result is not None or order[0].cancelled):
                yield order.popleft()
            if self._engine is not None and not self._engine.idle:
                self._advance(self._engine)

    def _advance(self, engine: Engine) -> None:
        """Runs until a request has ended, or, if each step is observed, one step."""
        if not self._trace and self._on_update is None:
            next(engine.results(), None)  # others may have ended with it; all of them have their result
            return
        for update in engine.step():
            if self._trace:
                update.request.keep_step(update.result)
            if self._on_update is not None:
                self._on_update(update)

    def _submit(self, source: "_Source", order: collections.deque[Request], longest: int) -> None:
        """Submits as many requests as there may be."""
        while (request := source.peek()) is not None and len(order) < self.AHEAD * self.slots:
            if request.cancelled:
                order.append(source.pop())
                continue
            if self._engine is None or len(request.prompt) > self._engine.prompt_length:
                if self._engine is not None and not self._engine.idle:
                    return
                self._grow(max(longest, len(request.prompt)))
            assert self._engine is not None
            if self._engine.waiting >= self.slots:
                return
            order.append(self._engine.submit(source.pop()))

    def _grow(self, longest: int) -> None:
        """Makes an engine with room for a prompt of this length."""
        self._former = self.stats
        self._engine = None  # before the next takes as much memory
        self._engine = self._make(self.room_for(longest))

    def room_for(self, longest: int) -> int:
        """Positions reserved for prompts, the longest of which has this many tokens: a bucket, within the model's
        context."""
        return max(min(bucket_length(longest), self._most), longest)


def slots_for(model: Model, requests: int, batch_size: int | None = None) -> int:
    """Requests that run together: no more than there are, rounded up to what a mesh can split evenly.

    Args:
        batch_size: the most; all of them by default.
    """
    parts = model.denoiser.batch_parts
    return min(batch_size or sys.maxsize, -(-max(requests, 1) // parts) * parts)


def run_all(
    model: Model,
    sampler: CanvasSampler,
    requests: Sequence[Request],
    batch_size: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> tuple[Runner, Iterator[Request]]:
    """A runner, and known requests in their order as it ends them, with a progress bar if they do not all run together.

    Args:
        batch_size: slots, see `slots_for`; one for each request by default.
        progress: whether there is a bar; by default on a terminal.
        options: `trace` and `on_update`, see `Runner`.
    """
    runner = Runner(model, sampler, slots_for(model, len(requests), batch_size), **options)
    done = runner.run(requests, longest=max((len(request.prompt) for request in requests), default=0))
    hide = len(requests) <= runner.slots if progress is None else not progress
    return runner, iter(tqdm(done, desc="generating", unit="prompt", total=len(requests), disable=hide or None))


class _Source:
    """Requests, the next of which can be read without being taken. An error of their source is stored, and ends
    them."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._rest, self._first = iter(requests), list[Request]()
        self.failure: Exception | None = None

    def peek(self) -> Request | None:
        """The next one; None after the last."""
        if not self._first and self.failure is None:
            try:
                self._first = list(itertools.islice(self._rest, 1))
            except Exception as error:
                self.failure = error
        return self._first[0] if self._first else None

    def pop(self) -> Request:
        """Takes the next one."""
        return self._first.pop()
