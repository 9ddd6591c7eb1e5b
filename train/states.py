"""The training states in a run's folder: written while training continues, checked and read when it resumes."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from dllm_jax import buckets
from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost
from dllm_jax.storage import sha256, write_error, write_file
from train.config import CheckpointPart

CHECKSUMS_FILE = "checksums.sha256"


def write_checksums(folder: Path) -> None:
    """Writes the SHA-256 of every file in a folder into `CHECKSUMS_FILE`, which `sha256sum --check` reads.

    Raises:
        DllmError: when the disk is full or cannot be written.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    write_file(folder / CHECKSUMS_FILE, "".join(lines))


def changed_files(folder: Path, part: int = 0, parts: int = 1) -> Iterator[str]:
    """Names of files that differ from what `write_checksums` wrote; none where it was never called.

    Args:
        part, parts: check every `parts`-th file from number `part` on.
    """
    checksums = folder / CHECKSUMS_FILE
    if not checksums.is_file():
        return
    lines = checksums.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    for line in lines[part::parts]:
        wanted, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file() or sha256(path) != wanted:
            yield name or CHECKSUMS_FILE


class States:
    """Training states by step, of which the latest stay, and others by `CheckpointPart`. Use it by `with`."""

    def __init__(self, path: Path, part: CheckpointPart, *, clean: bool) -> None:
        """
        Args:
            path: the folder of all states.
            part: which of them stay.
            clean: remove what a killed run left half-written.
        """
        from orbax.checkpoint import v1 as ocp  # here, because it takes a second to import

        self._path, self._part, self._clean, self._ocp = path, part, clean, ocp
        self._latest: int | None = None
        self._pending: tuple[int, Future[None]] | None = None  # the step that is being written
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> "States":
        ocp = self._ocp
        context = ocp.Context()
        context.array.saving.use_compression = False  # random mantissas do not shrink
        with buckets.reach(self._path):
            self._checkpointer = ocp.training.Checkpointer(
                self._path,
                context=context,
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=self._preservation(),
                cleanup_tmp_directories=self._clean,
            )
            found = self._checkpointer.latest
        self._latest = None if found is None else found.step
        return self

    def _preservation(self) -> Any:
        """Orbax's policy for the states that stay."""
        part, policies = self._part, self._ocp.training.preservation_policies
        found = [policies.LatestN(part.keep)]
        if part.keep_every:
            found.append(policies.EveryNSteps(part.keep_every))
        if part.best:
            found.append(policies.BestN(get_metric_fn=self._score, n=part.best, keep_checkpoints_without_metrics=False))
        return policies.AnyPreservationPolicy(found)

    def _score(self, metrics: Mapping[str, float]) -> float:
        """How good a state is, higher is better; the worst without the metric."""
        value = metrics.get(self._part.metric)
        return -math.inf if value is None else -value if self._part.lower_is_better else value

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._pending is not None and multihost.count() > 1:
            return  # the others, whom the write would wait for, may be gone
        with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
            self._checkpointer.close()
        self._thread.shutdown(wait=False)

    @property
    def latest(self) -> int | None:
        """The step of the latest whole state, after any write in progress.

        Raises:
            DllmError: as `save`.
        """
        self.wait()
        return self._latest

    @property
    def steps(self) -> list[int]:
        """The steps of all whole states, ascending; as `latest`."""
        return list(self.metrics)

    @property
    def metrics(self) -> dict[int, Mapping[str, float]]:
        """What the evaluation at each step of `steps` reported, empty where there was none; as `latest`."""
        self.wait()
        return {found.step: found.metrics or {} for found in self._checkpointer.checkpoints}

    @property
    def best(self) -> int | None:
        """The step of the best of all whole states by `CheckpointPart.metric`, of equals the latest; None where none
        has it. As `latest`."""
        scores = {step: score for step, found in self.metrics.items() if (score := self._score(found)) > -math.inf}
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def save(
        self, step: int, state: Any, notes: Mapping[str, Any], metrics: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Begins to write a state, whose buffers the next step may reuse, after any write in progress.

        Args:
            metrics: of the evaluation at this step, the same in all processes; those that are not finite are left out.

        Raises:
            DllmError: when the disk is full or cannot be written, for this state or the one before.
        """
        self.wait()
        with self._writing():
            begun = self._checkpointer.save_async(
                step,
                flat_leaves(state),
                metrics={name: value for name, value in metrics.items() if math.isfinite(value)} or None,
                custom_metadata=dict(notes),
                overwrite=True,
            )
            assert begun is not None  # the policy leaves none out
            self._pending = step, self._thread.submit(self._end, step, begun)

    def _end(self, step: int, begun: Any) -> None:
        """Waits until Orbax has written a state, and writes its checksums; object stores have their own."""
        begun.result()
        if not multihost.index() and not buckets.is_address(self._path):
            write_checksums(self._path / str(step))

    def check(self) -> None:
        """Raises the error of a write that has ended since; does not wait.

        Raises:
            DllmError: as `save`.
        """
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits for any write in progress.

        Raises:
            DllmError: as `save`.
        """
        if self._pending is None:
            return
        (step, ending), self._pending = self._pending, None
        with self._writing():
            ending.result()
        self._latest = step

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax raises whatever its storage layer does
            raise write_error(self._path, error) from error

    def notes(self, step: int) -> dict[str, Any]:
        """The `notes` that were saved with the state of a step.

        Raises:
            DllmError: when it cannot be read.
        """
        with self._reading(step):
            return dict(self._checkpointer.metadata(step).custom_metadata or {})

    def load(self, step: int, abstract: Any) -> Any:
        """The state of a step, in the shardings of `abstract`; all processes read it together.

        Raises:
            DllmError: when it is damaged or cannot be read.
        """
        self._verify(step)
        wanted = flat_leaves(abstract)
        with self._reading(step):
            stored = _match_names(wanted, self._checkpointer.metadata(step).metadata)
            leaves = self._checkpointer.load(step, {stored[name]: leaf for name, leaf in wanted.items()})
        return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[stored[name]] for name in wanted])

    def arrays(self, step: int, names: Mapping[str, str]) -> "StoredArrays":
        """Some arrays of a step's state, each read on access.

        Args:
            names: key of the result -> name of the array in the state.

        Raises:
            DllmError: when the state is damaged or cannot be read.
        """
        self._verify(step)
        with self._reading(step):
            stored = dict(self._checkpointer.metadata(step).metadata)
        left_out = dict.fromkeys(stored, self._ocp.PLACEHOLDER)

        def read(name: str) -> np.ndarray:
            with self._reading(step):
                like = np.empty(stored[name].shape, stored[name].dtype)
                return np.asarray(self._checkpointer.load(step, {**left_out, name: like})[name])

        return StoredArrays(names, read)

    def _verify(self, step: int) -> None:
        """Compares a state's files with their checksums, each process a part of them.

        Raises:
            DllmError: with the name of the first that differs.
        """
        folder = self._path / str(step)
        if buckets.is_address(folder):
            return
        with multihost.fail_together(), self._reading(step):
            if changed := next(changed_files(folder, multihost.index(), multihost.count()), None):
                raise DllmError(f"it is damaged in {changed}")

    def _remedy(self, step: int) -> str:
        """What to do about a state that cannot be used."""
        before = [other for other in self.steps if other < step]
        return f"remove it to resume from state {before[-1]}" if before else "remove it to start anew"

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whose words are Orbax's, about its own classes
            folder = self._path / str(step)
            if buckets.is_address(self._path):
                raise buckets.unreached_error(folder, error) from error
            reason = f" ({error})" if isinstance(error, DllmError) else ""
            raise DllmError(f"the state {folder} could not be read{reason}; {self._remedy(step)}") from error


class StoredArrays(Mapping[str, np.ndarray]):
    """Arrays on the disk, each read anew on every access."""

    def __init__(self, names: Mapping[str, str], read: Callable[[str], np.ndarray]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _match_names(wanted: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Names of a state's leaves -> their names on the disk.

    A name holds places in optax's chains. They change when a link such as clipping comes or goes; their order does not.
    """

    def split(name: str) -> tuple[list[str], list[int]]:
        parts = name.split(":")
        return [part for part in parts if not part.isdigit()], [int(part) for part in parts if part.isdigit()]

    pairs = list(itertools.zip_longest(sorted(wanted, key=split), sorted(stored, key=split)))
    if any(one is None or other is None or split(one)[0] != split(other)[0] for one, other in pairs):
        raise DllmError("it holds other arrays than these settings ask for")
    return dict(pairs)


def flat_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by name, in the tree's order: a form that does not depend on classes of ours or of optax."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/").replace("/", ":"): leaf for path, leaf in leaves}
