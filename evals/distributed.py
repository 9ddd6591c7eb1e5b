"""Processes that share an evaluation: each answers its own part, and then all have all answers.

Answers travel through a channel (`dllm_jax/parallel/multihost.py`). A collective would keep the devices of a process
that waits busy, perhaps for hours, and needs equally many devices in each. Files would need a shared file system.
"""

import contextlib
import contextvars
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console

from dllm_jax.parallel import multihost

T = TypeVar("T")


class Processes:
    """The processes of an evaluation, from the view of one of them.

    All must gather equally often, in the same order.

    Attributes:
        index: of this process.
        count: of all.
    """

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count
        self._channel = multihost.Channel("evals", index, count)

    @property
    def first(self) -> bool:
        """Whether this one prints and writes."""
        return self.index == 0

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """This one's part of what all share."""
        return items[self.index :: self.count]

    def most(self, total: int) -> int:
        """The most items of so many that one process has."""
        return -(-total // self.count)

    def each(self, items: Sequence[T], work: Callable[[Sequence[T]], Sequence[Any]]) -> list[Any]:
        """The result of `work` for each item, as JSON takes it, in their order; every process works on its part alone.

        Raises:
            DllmError: as `gather`.
        """
        found: list[Any] = [None] * len(items)
        for process, part in enumerate(self.gather(list(work(self.mine(items))))):
            found[process :: self.count] = part
        return found

    def gather(self, own: Any) -> list[Any]:
        """What every process hands in, as JSON takes it, in their order. Waits for the slowest.

        Raises:
            DllmError: the sentence of a process that failed.
        """
        waiting = Console(stderr=True).status("waiting for the other processes", spinner="line")
        with waiting if self.count > 1 else contextlib.nullcontext():
            return self._channel.gather(own)

    def fail(self, error: BaseException) -> None:
        """Hands in an error in place of what is gathered next."""
        self._channel.fail(error)


ALONE = Processes()
_CURRENT = contextvars.ContextVar("the processes that have met", default=ALONE)


def current_processes() -> Processes:
    """The processes of the command that runs, inside `meeting`; elsewhere this one alone."""
    return _CURRENT.get()


@contextlib.contextmanager
def meeting(where: str | None) -> Iterator[Processes]:
    """The processes of a command: alone for None, else those that `multihost.join` meets.

    Each reads, computes and writes for itself; one that ends waits for the others, which need the coordinator.
    The first one prints, the others print errors only. If one fails, the others end with its
    sentence when they have done their part.

    Raises:
        DllmError: as `multihost.join`.
    """
    if where is None:
        yield ALONE
        return
    multihost.join(where, shutdown_timeout=multihost.MONTH)
    processes = Processes(multihost.index(), multihost.count())
    token = _CURRENT.set(processes)
    silent = contextlib.nullcontext() if processes.first else contextlib.redirect_stdout(io.StringIO())
    with silent:
        try:
            yield processes
        except BaseException as error:
            processes.fail(error)
            raise
        finally:
            _CURRENT.reset(token)
