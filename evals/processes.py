"""Processes that share an evaluation: each answers its own part, and then all know everything and go on alike.

What a process found travels through the coordinator of `jax.distributed`, with which every process is in touch already.
A collective of the devices (`jax.experimental.multihost_utils`) would keep them busy with waiting, for hours where one
process has more left to do than the others, wants as many devices in each, and on CPU prints to the standard output.
Files would need a file system that all see, and a place there, which `run` has not.
"""

import contextlib
import io
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console

from dllm_jax import DllmError
from samplers.outputs import Share, joined

T = TypeVar("T")
_MONTH = 30 * 24 * 3600 * 1000  # milliseconds


class Processes:
    """The processes of an evaluation, as one of them sees them.

    All have to gather equally often, in the same order.

    Attributes:
        share: which of them this is.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self._numbers = itertools.count()

    @property
    def first(self) -> bool:
        """Whether this one prints and writes."""
        return self.share.process == 0

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """This one's part of what all share."""
        return items[self.share.process :: self.share.processes]

    def most(self, total: int) -> int:
        """Of so many items, the most that a process has."""
        return -(-total // self.share.processes)

    def gather(self, own: Any) -> list[Any]:
        """What every process hands in, as JSON takes it, in their order. Waits as long as one needs.

        Raises:
            DllmError: the sentence of a process that failed.
        """
        if self.share.processes == 1:
            return [own]
        number = next(self._numbers)
        self._tell(number, {"found": own})
        with Console(stderr=True).status("waiting for the other processes", spinner="line"):
            found = [self._heard(number, process) for process in range(self.share.processes)]
        return [one["found"] for one in found]

    def fail(self, error: BaseException) -> None:
        """Hands in, in place of what is gathered next, why there will be nothing."""
        if self.share.processes > 1:
            first = (str(error).splitlines() or [""])[0]
            told = first if isinstance(error, DllmError) else f"{type(error).__name__}: {first}"
            with contextlib.suppress(Exception):  # the coordinator may be what failed
                self._tell(next(self._numbers), {"failed": told})

    def _tell(self, number: int, told: Any) -> None:
        key = f"dllm_jax/evals/{number}/{self.share.process}"
        _coordinator().key_value_set_bytes(key, zlib.compress(json.dumps(told).encode(), 1))

    def _heard(self, number: int, process: int) -> Any:
        data = _coordinator().blocking_key_value_get_bytes(f"dllm_jax/evals/{number}/{process}", _MONTH)
        told = json.loads(zlib.decompress(data))
        if "failed" in told:
            raise DllmError(f"process {process} of {self.share.processes}: {told['failed']}")
        return told


ALONE = Processes(Share())


@contextlib.contextmanager
def meeting(where: str | None) -> Iterator[Processes]:
    """The processes of a command: alone for None, else those that meet as `samplers.outputs.joined` says.

    The first one prints, the others keep silent but for errors. One that fails tells the others, which then end with
    its sentence when they have done their part.

    Raises:
        DllmError: as `joined`.
    """
    if where is None:
        yield ALONE
        return
    processes = Processes(joined(where))
    silent = contextlib.nullcontext() if processes.first else contextlib.redirect_stdout(io.StringIO())
    with silent:
        try:
            yield processes
        except BaseException as error:
            processes.fail(error)
            raise


def _coordinator() -> Any:
    """The client of `jax.distributed`, which JAX itself does not hand out."""
    from jax._src import distributed

    return distributed.global_state.client
