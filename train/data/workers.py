"""Work that is done before it is needed: batches by a thread or by worker processes of `grain`, text by processes."""

import collections
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

import cloudpickle
import jax
from absl import flags

from dllm_jax.errors import DllmError, first_line
from dllm_jax.text.tokenizer import quiet_transformers

S = TypeVar("S")
T = TypeVar("T")
_AHEAD = 4  # values that a thread computes before they are used
_AHEAD_EACH = 2  # those that a worker process does
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Loader(Generic[T]):
    """Values of a function of a number, computed before they are used. They do not depend on the number of workers."""

    def __init__(self, make: Callable[[int], T], workers: int = 0) -> None:
        """
        Args:
            make: the function.
            workers: processes that compute; 0 is a thread of this one.

        Raises:
            DllmError: for a function that processes cannot be given.
        """
        self._make, self._workers = make, workers
        self._portable = _Portable(make) if workers else None

    @contextlib.contextmanager
    def values(self, numbers: range) -> Iterator[Iterator[T]]:
        """The values of these numbers in order. Their computation ends with the context, and the processes with it.

        Raises:
            DllmError: when a worker process ends by itself. An error of the function is raised where its value would
                have come; one of a worker that cannot be pickled as a RuntimeError.
        """
        import grain  # takes half a second

        workers = min(self._workers, len(numbers))
        data = grain.MapDataset.range(numbers.start, numbers.stop, numbers.step)
        if self._portable is None or not workers:
            iterator = iter(
                data.map(functools.partial(_attempt, self._make)).to_iter_dataset(grain.ReadOptions(1, _AHEAD))
            )
        else:
            if (name := "grain_enable_multiprocess_worker_profiling") in flags.FLAGS:
                flags.FLAGS[name].present = True  # or it is read before it is parsed: google/grain issue 1355
            data = data.map(self._portable).to_iter_dataset(grain.ReadOptions(0, 0))
            iterator = iter(data.mp_prefetch(grain.MultiprocessingOptions(workers, _AHEAD_EACH), _begin_worker))
            iterator.get_state()  # makes the parts of all processes, so that they start together and all are closed
        try:
            with _signals_blocked() if workers else contextlib.nullcontext():
                iterator.start_prefetch()
            with contextlib.closing(_values(iterator)) as values:
                yield values
        finally:
            iterator.close()


class _Portable:
    """A function that was pickled once; it returns pickled values, which need no shared memory."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        try:
            self._pickled = cloudpickle.dumps(make)
        except Exception as error:  # what objects of others raise
            raise DllmError(
                f"data.workers needs a data source that can be pickled ({first_line(error)}); change it, or set "
                "data.workers to 0"
            ) from None

    @functools.cached_property
    def _make(self) -> Callable[[int], Any]:
        return _unpickle(self._pickled)

    def __call__(self, number: int) -> bytes:
        value, error = _attempt(lambda number: self._make(number), number)
        if error is not None:
            error.add_note("".join(traceback.format_exception(error)))
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                error = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps((value, error))


def _unpickle(pickled: bytes) -> Callable[[Any], Any]:
    with quiet_transformers():  # whose tokenizers may be among it
        found: Callable[[Any], Any] = pickle.loads(pickled)
    return found


def _attempt(make: Callable[[int], T], number: int) -> tuple[T | None, BaseException | None]:
    """A value, or the error in its place: grain adds to the text of those that pass through it."""
    try:
        return make(number), None
    except BaseException as error:  # SystemExit, too, which would end the worker: the value would never come
        return None, error


def _values(pairs: Iterator[Any]) -> Generator[Any, None, None]:
    """What `_attempt` found, pickled by a worker or not."""
    try:
        for pair in pairs:
            value, error = pickle.loads(pair) if isinstance(pair, bytes) else pair
            if error is not None:
                raise error
            yield value
    except RuntimeError as error:
        if not str(error).startswith("Worker process was terminated"):
            raise
        raise _ended(str(error).split(". ")[0]) from None


def _ended(how: str) -> DllmError:
    return DllmError(
        f"a process of data.workers ended ({how}); lower data.workers if memory ran out, and call train in a script "
        'under if __name__ == "__main__":'
    )


def map_in_order(work: Callable[[S], T], items: Iterable[S], workers: int) -> Generator[T, None, None]:
    """work(item) of each item, in order.

    Args:
        workers: processes that work ahead, few items; 0 is this one, which works when it is asked. Close the iterator.

    Raises:
        DllmError: when a worker process ends by itself.
    """
    if not workers:
        yield from map(work, items)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _begin_work, (cloudpickle.dumps(work),))
    waiting: collections.deque[concurrent.futures.Future[T]] = collections.deque()
    try:
        for item in items:
            with _signals_blocked():
                waiting.append(pool.submit(_do_work, item))
            if len(waiting) > _AHEAD_EACH * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise _ended(first_line(error)) from None
    finally:
        pool.shutdown(cancel_futures=True)


_work: Callable[[Any], Any]


def _begin_work(pickled: bytes) -> None:
    global _work
    _begin_process(signal.SIGINT)
    _work = _unpickle(pickled)


def _do_work(item: Any) -> Any:
    return _work(item)


def _begin_worker(*_: int) -> None:
    _begin_process(*_SIGNALS)  # the run ends when its step has


def _begin_process(*ignored: signal.Signals) -> None:
    """Makes a worker process end with its parent alone, and never start an accelerator, which is the parent's."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks the signals that ask a run to stop in the threads and processes that start meanwhile: a terminal and
    schedulers send them to all processes, of which only the run's own is to end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
