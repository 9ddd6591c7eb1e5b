"""Requests without end in their own order, and engines that are used again."""

import collections
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from dllm_jax import Model
from samplers.config.factory import CanvasSampler
from samplers.engine.engine import Engine, Request, Update
from samplers.engine.program import program_of, structure_of
from samplers.sampler import broken, warn_if_broken
from samplers.text.prompts import bucket_length


class Engines:
    """The engine that ran last, for the next sampler that it can run: one that differs in numbers alone.

    Attributes:
        compiled: how many different programs were asked for.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Engine] | None = None
        self._seen: set[Any] = set()

    @property
    def compiled(self) -> int:
        return len(self._seen)

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
        self._seen.add((str(shapes), structure_of(sampler), slots, prompt_length))
        return self._last[1]


class Warned:
    """Those of many requests whose logits were not finite, for one warning about all of them."""

    def __init__(self) -> None:
        self._broken: list[Request] = []

    def saw(self, request: Request) -> Request:
        """The request, which has ended."""
        if request.result is not None and broken(request.result, [request.number]):
            self._broken.append(request)
        return request

    def warn(self) -> None:
        """Warns, if there is something to be said."""
        results = [request.result for request in self._broken]
        if results:
            all_of_them = jax.tree.map(lambda *rows: np.concatenate(rows), *results)
            warn_if_broken(all_of_them, [request.number for request in self._broken])


class Runner:
    """Runs requests, of which there may be any number, and hands them out in their order.

    Requests are taken when slots are about to be free, so a source may be a file of any size. Where a prompt is longer
    than all before it, those that run end first, and then there is room for it: a few times at most, as lengths are
    rounded up to buckets. A request that was cancelled is handed out in its place, and not run.

    Attributes:
        slots: requests that are worked on together.
        seconds, compile_seconds, steps, row_steps: as of an `Engine`, of all that were used.
    """

    AHEAD = 64  # times the slots: requests that may have ended, or run, behind one that has not

    def __init__(
        self,
        model: Model,
        sampler: CanvasSampler,
        slots: int,
        *,
        trace: bool = False,
        on_update: Callable[[Update], None] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            slots: requests that are worked on together.
            trace: keep each request's result after every step, for its `trace`; every step is then a call of its own.
            on_update: called after every step with what it did to each request; likewise.
            options: further ones of `Engine`.
        """
        self.slots, self._trace, self._on_update = slots, trace, on_update
        self._most = model.config.max_length - sampler.gen_length
        self._make = lambda longest: Engine(model, sampler, slots=slots, prompt_length=longest, **options)
        self._engine: Engine | None = None
        self._before = dict.fromkeys(("seconds", "compile_seconds", "steps", "row_steps"), 0.0)

    def __getattr__(self, name: str) -> float:
        if name not in ("seconds", "compile_seconds", "steps", "row_steps"):
            raise AttributeError(name)
        return self._before[name] + (0.0 if self._engine is None else getattr(self._engine, name))

    @property
    def occupancy(self) -> float:
        """Share of the slots that were at work, over all steps."""
        return self.row_steps / max(self.steps * self.slots, 1)

    def run(self, requests: Iterable[Request], longest: int = 0) -> Iterator[Request]:
        """The same requests when they have ended. What the source raises is raised when those before it are done.

        Args:
            longest: tokens of the longest prompt, where it is known.

        Warns:
            RuntimeWarning: at the end, when logits were not finite, naming the first row and its forward.
        """
        source, order, ended = _Source(requests), collections.deque[Request](), Warned()
        while source.peek() is not None or order:
            self._take(source, order, longest)
            while order and (order[0].result is not None or order[0].cancelled):
                yield ended.saw(order.popleft())
            if self._engine is not None and not self._engine.idle:
                self._advance(self._engine)
        ended.warn()
        if source.failure is not None:
            raise source.failure

    def _advance(self, engine: Engine) -> None:
        """Runs until a request has ended, or, if each step is observed, one step."""
        if not self._trace and self._on_update is None:
            engine.advance()
            return
        for update in engine.step():
            if self._trace:
                update.request.keep_step(update.result)
            if self._on_update is not None:
                self._on_update(update)
        engine.take_ended()  # `order` holds them

    def _take(self, source: "_Source", order: collections.deque[Request], longest: int) -> None:
        """Puts requests into the queue, as many as there may be."""
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
            order.append(self._engine.enqueue(source.pop()))

    def _grow(self, longest: int) -> None:
        """Makes an engine with room for such a prompt."""
        self._before = {name: getattr(self, name) for name in self._before}
        self._engine = None  # before the next takes as much memory
        self._engine = self._make(self.room_for(longest))

    def room_for(self, longest: int) -> int:
        """Positions kept for prompts, of which the longest has so many tokens: a bucket, within the model's context."""
        return max(min(bucket_length(longest), self._most), longest)


def slots_for(model: Model, requests: int, batch_size: int | None = None) -> int:
    """How many are worked on together: no more than there are, but for what a mesh needs to split them evenly.

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
    """What runs known requests, and these in their order, with a progress bar where they do not all run together.

    Args:
        batch_size: slots, see `slots_for`; one for each request by default.
        progress: whether there is a bar; by default where someone is watching.
        options: `trace` and `on_update`, see `Runner`.
    """
    runner = Runner(model, sampler, slots_for(model, len(requests), batch_size), **options)
    done = runner.run(requests, longest=max((len(request.prompt) for request in requests), default=0))
    hide = len(requests) <= runner.slots if progress is None else not progress
    return runner, iter(tqdm(done, desc="generating", unit="prompt", total=len(requests), disable=hide or None))


class _Source:
    """Requests, the first of which can be looked at. What their maker raises is kept, and ends them."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._rest, self._first = iter(requests), list[Request]()
        self.failure: Exception | None = None

    def peek(self) -> Request | None:
        """The next one, None behind the last."""
        if not self._first and self.failure is None:
            try:
                self._first = list(itertools.islice(self._rest, 1))
            except Exception as error:
                self.failure = error
        return self._first[0] if self._first else None

    def pop(self) -> Request:
        """The next one, which is taken."""
        return self._first.pop()
