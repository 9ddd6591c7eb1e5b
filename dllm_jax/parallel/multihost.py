"""Processes that work together: how they connect, and report results and failures to each other.

Messages travel through the coordinator of `jax.distributed`, to which every process is connected already. That needs
no devices, which would be busy with waiting, and no file system that all see.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from dllm_jax.errors import DllmError

_HEARTBEAT = 60  # seconds after which JAX aborts all processes when one of them has died in silence
MONTH = 30 * 24 * 3600  # seconds, for waits of unknown length
_ALL_FAILED = threading.Event()


def join(where: str, *, wait: int = 300, shutdown_timeout: int = 300) -> None:
    """Connects the processes of a command; to be called before anything is computed.

    Args:
        where: "HOST:PORT,N,I", the address of process 0, how many there are and which this is; empty for what
            `jax.distributed.initialize` finds out in clusters that it knows.
        wait: seconds until all have to be there. Then this process ends with a sentence and status 2: JAX itself would
            abort it, and raises nothing.
        shutdown_timeout: seconds that a process which ends waits for the others.

    Raises:
        DllmError: for an address that cannot be read, where there is no cluster, and when the processes cannot meet.
    """
    found = re.fullmatch(r"([^,]+:\d+),(\d+),(\d+)", where) if where else None
    if where and (found is None or int(found[3]) >= int(found[2])):
        raise DllmError(f"--distributed {where}: write HOST:PORT,N,I, with I from 0 to N - 1, or nothing in a cluster")
    names = ("coordinator_address", "num_processes", "process_id")
    said: dict[str, Any] = (
        {} if found is None else dict(zip(names, (found[1], int(found[2]), int(found[3])), strict=True))
    )
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, see train/multihost_stop.py
    overdue = threading.Timer(wait, _overdue, (found[1] if found else "the cluster's coordinator", wait))
    overdue.daemon = True
    overdue.start()
    try:
        jax.distributed.initialize(
            **said,
            initialization_timeout=wait + 60,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=shutdown_timeout,
        )
        jax.devices()  # all find out together, before one fails in what it does alone
    except (RuntimeError, ValueError) as error:
        if not where and "should be defined" in str(error):
            known = "SLURM, Open MPI, Kubernetes and TPU pods number their processes"
            raise DllmError(f"there is no cluster here ({known}); pass --distributed HOST:PORT,N,I") from None
        hint = "check that all were started, or pass --distributed HOST:PORT,N,I"
        raise DllmError(f"the processes did not meet ({first_line(error)}); {hint}") from None
    finally:
        overdue.cancel()


def _overdue(where: str, seconds: int) -> NoReturn:
    hint = "check that all were started"
    print(f"error: not all processes met at {where} within {seconds} seconds; {hint}", file=sys.stderr)
    leave(2)


def leave(status: int) -> NoReturn:
    """Ends this process without waiting for others, which have failed or are about to.

    After a failure that all hear of (`fail_together`) process 0 waits until they have left, a minute at most: the
    coordinator ends with it, and then JAX ends them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if _ALL_FAILED.is_set():
        key, until = "dllm_jax/left/{}", time.monotonic() + _HEARTBEAT
        with contextlib.suppress(Exception):  # somebody has not heard of it in time
            if index():
                coordinator().key_value_set(key.format(index()), "")
            for other in range(1, count()) if not index() else ():
                seconds = max(until - time.monotonic(), 0)
                coordinator().blocking_key_value_get(key.format(other), int(1000 * seconds))
    os._exit(status)


def count() -> int:
    """How many processes there are; unlike `jax.process_count` it starts no devices."""
    return _state().num_processes if jax.distributed.is_initialized() else 1


def index() -> int:
    """Which of them this one is."""
    return _state().process_id if jax.distributed.is_initialized() else 0


class Channel:
    """Values that every process shares with all; each must do so equally often, in the same order.

    Attributes:
        process: which one this is.
        processes: how many there are.
    """

    def __init__(self, name: str, process: int, processes: int) -> None:
        self.process, self.processes = process, processes
        self._name, self._numbers = name, itertools.count()

    def gather(self, own: Any) -> list[Any]:
        """What every process hands in, as JSON takes it, in their order. Waits as long as one needs.

        Raises:
            DllmError: the sentence of a process that failed.
        """
        if self.processes == 1:
            return [own]
        number = next(self._numbers)
        self._send(number, {"found": own})
        return [self._receive(number, process)["found"] for process in range(self.processes)]

    def fail(self, error: BaseException) -> None:
        """Reports a failure in place of the next gathered value."""
        if self.processes > 1:
            with contextlib.suppress(Exception):  # the coordinator may be what failed
                self._send(next(self._numbers), {"failed": sentence(error)})

    def _send(self, number: int, message: Any) -> None:
        key = f"dllm_jax/{self._name}/{number}/{self.process}"
        coordinator().key_value_set_bytes(key, zlib.compress(json.dumps(message).encode(), 1))

    def _receive(self, number: int, process: int) -> Any:
        key = f"dllm_jax/{self._name}/{number}/{process}"
        message = json.loads(zlib.decompress(coordinator().blocking_key_value_get_bytes(key, MONTH * 1000)))
        if "failed" in message:
            raise DllmError(name_process(process, self.processes, message["failed"]))
        return message


@functools.cache
def _agreement() -> Channel:
    return Channel("agreed", index(), count())


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """A block that all processes run, in the same order, and that succeeds only if it does in all.

    Raises:
        DllmError: the sentence of a process in which it failed, in those in which it did not.
    """
    if count() == 1:
        yield
        return
    try:
        try:
            yield
        except BaseException as error:
            _agreement().fail(error)
            raise
        _agreement().gather(None)
    except Exception:
        _ALL_FAILED.set()
        raise


def gather(own: Any) -> list[Any]:
    """What every process hands in, as JSON takes it, in their order; all call this."""
    return [own] if count() == 1 else _agreement().gather(own)


def of_first_process(value: Any) -> Any:
    """What process 0 hands in, as JSON takes it; all call this."""
    return gather(value)[0]


def gather_arrays(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays that lie on the devices of all processes, on every host, in their order. All call this; for small ones."""
    return {name: _gather_array(array) for name, array in arrays.items()}


def _gather_array(array: Any) -> np.ndarray:
    if getattr(array, "is_fully_addressable", True):
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def first_line(error: BaseException) -> str:
    """The beginning of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def sentence(error: BaseException) -> str:
    """What other processes report of an error."""
    return first_line(error) if isinstance(error, DllmError) else f"{type(error).__name__}: {first_line(error)}"


def name_process(process: int, processes: int, text: str) -> str:
    """A sentence with the process that it comes from."""
    return f"process {process} of {processes}: {text}"


def coordinator() -> Any:
    """The client of `jax.distributed`'s coordinator, which JAX itself does not hand out."""
    return _state().client


def _state() -> Any:
    """What `jax.distributed` keeps to itself."""
    from jax._src import distributed

    return distributed.global_state
