"""Programs that a model wrote, run where they can do no harm, and judged by whether their tests ran to the end."""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dllm_jax.errors import DllmError

_BOX, _HARNESS = (Path(__file__).parent / name for name in ("box.py", "program.py"))
_TOKENS = 1000  # of which one says that a program passed
_STARTING = 60.0  # seconds that a loaded machine may take to build a box and to clear it away
_SYSTEM = (
    *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/usr/share/zoneinfo"),
)
# The same hash of the same text in every run: what passes once passes again. One thread and two heaps, for the limits.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


@dataclasses.dataclass(frozen=True)
class ProgramOutcome:
    """The outcome of a program.

    Attributes:
        passed: the code, tests included, ran to its end within its limits.
        reason: why not, in a few words, some of which may be the program's own; empty where it passed.
        seconds: from its start to its end, by the clock.
    """

    passed: bool
    reason: str
    seconds: float


def run_program(
    code: str,
    *,
    seconds: float = 3.0,
    wall: float | None = None,
    memory: int = 1 << 30,
    files: int = 16 << 20,
    processes: int = 16,
    unsafe: bool = False,
) -> ProgramOutcome:
    """Runs a Python program in a box of its own and says whether it ran to its end.

    The program has the interpreter's library and the installed packages to read, an empty folder, no network, no view
    of other processes and no privileges; what it prints is dropped. `docs/code-tasks.md` says what confines it.

    Args:
        code: the program, followed by its tests. `__name__` is not "__main__", as where code is run by `exec`.
        seconds: of the processor, for all its processes together, so that other load fails no program.
        wall: seconds by the clock for programs that wait, without those that they wait for a processor; by default ten
            times `seconds`. Ten times this is the end in any case.
        memory: bytes of all its processes together, and of the addresses of each.
        files: bytes that it may write, in all and per file.
        processes: how many it may have at a time, threads included. Not counted with `unsafe`.
        unsafe: without the box, where the system has none: the program sees the files and the network that the caller
            sees. It still has the limits (but on files in all and processes, and each process has `seconds` of its own
            until it ends), an empty folder and an end.

    Raises:
        DllmError: for limits that are none, and where this system cannot confine a program.
    """
    wall = 10 * seconds if wall is None else wall
    if not (0 < seconds < math.inf and 0 < wall < math.inf and memory > 0 and files > 0 and processes > 0):
        raise DllmError("seconds, wall, memory, files and processes of a program must be above 0, and the times finite")
    if not unsafe and sys.platform != "linux":
        raise DllmError(f"programs can be confined on Linux only, not on {sys.platform}; {_ADVICE}")
    limits = {"seconds": seconds, "wall": wall, "memory": memory, "files": files, "processes": processes}
    job = _shared_job() | limits | {"unsafe": unsafe, "code": code}
    if not unsafe:
        return _outcome_of(_run_box(job))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _outcome_of(_run_box(job | {"folder": folder}))


@cache
def require_box(unsafe: bool = False) -> None:
    """Checks, once per process, that programs can be run at all, before anything long begins.

    Raises:
        DllmError: where they cannot, as `run_program`.
    """
    run_program("pass", seconds=60, unsafe=unsafe)


def run_programs(
    codes: Sequence[str], *, workers: int | None = None, progress: bool | None = None, **limits: Any
) -> list[ProgramOutcome]:
    """Runs many programs at a time, each as `run_program` does; the outcomes are in their order.

    Args:
        workers: how many at a time; by default one per core that this process may use.
        progress: whether to show a progress bar; by default where there is a terminal.
        limits: as of `run_program`.

    Raises:
        DllmError: as `run_program`.
    """
    if workers is not None and workers < 1:
        raise DllmError(f"workers is {workers}; it must be at least 1")
    most = workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    hide = None if progress is None else not progress
    with concurrent.futures.ThreadPoolExecutor(most) as pool:
        try:
            running = pool.map(partial(run_program, **limits), codes)
            return list(tqdm(running, desc="judging", unit="program", total=len(codes), disable=hide))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_ADVICE = "run them on Linux; if you trust their author, pass unsafe=True, or DLLM_UNSAFE_PROGRAMS=1 for the tasks"


@cache
def _shared_job() -> dict[str, Any]:
    """What all jobs share: the interpreter, what it may read, and its environment.

    Its `site` is left out (-S): packages are to be imported from, but their start-up files are not to run.
    """
    python = os.path.realpath(sys.executable)
    packages = list(dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")))
    libraries = os.path.realpath(os.path.dirname(sysconfig.get_path("stdlib")))
    environment = _ENVIRONMENT | {k: os.environ[k] for k in ("LD_LIBRARY_PATH",) if k in os.environ}
    return {
        "python": [python, "-B", "-P", "-s", "-S"],
        "packages": packages,
        "readable": list(dict.fromkeys([*_SYSTEM, python, libraries, *packages])),
        "environment": environment,
        "harness": _HARNESS.read_text(),
        "tokens": _TOKENS,
    }


def _run_box(job: dict[str, Any]) -> dict[str, Any]:
    """Runs `box.py`; nothing of it is left when this returns, in whatever way."""
    longest = 10 * job["wall"] + _STARTING
    box = subprocess.Popen(
        [*job["python"], str(_BOX)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=job["environment"],
        cwd="/",
        start_new_session=True,
    )
    with box:
        try:
            answer, errors = box.communicate(json.dumps(job).encode(), timeout=longest)
        except subprocess.TimeoutExpired:
            return {"passed": False, "reason": "its box did not answer", "seconds": longest}
        finally:
            if box.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(box.pid, signal.SIGKILL)
    if box.returncode < 0:
        return {"passed": False, "reason": "its box was ended", "seconds": 0.0}
    lines = errors.decode(errors="replace").strip().splitlines()
    return json.loads(answer) if answer else {"refused": lines[-1] if lines else "its box ended without a word"}


def _outcome_of(answer: dict[str, Any]) -> ProgramOutcome:
    if "refused" in answer:
        raise DllmError(f"this system cannot confine a program ({answer['refused']}); {_ADVICE}")
    if why := answer.pop("unfiltered", ""):
        _warn_unfiltered(why)
    return ProgramOutcome(**answer)


@cache
def _warn_unfiltered(why: str) -> None:
    warnings.warn(f"programs run without a filter of system calls: {why}; the rest of the box stands", stacklevel=4)
