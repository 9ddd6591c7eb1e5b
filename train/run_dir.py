"""The output folder of a run.

out/run.json        all settings
out/metrics.jsonl   one line of metrics every few steps, and one for each look of `watch`
out/generations.jsonl  what was answered then
out/state/          the latest training states (Orbax), each whole or not there, with checksums of its files
out/model/          the trained model as a checkpoint of this library, written at the end
out/adapters/       instead of it, the trained adapters of a LoRA run
out/indicator/      or the trained indicator
out/result.json     of which step and which weights that is
out/dropped.txt     the examples that data.on_bad left out, and why
out/data.json       what tells the data from other data, see `train.data.fingerprint.data_fingerprint`

The folder may be one in an object store, gs://bucket/run. Objects do not grow, so there the logs are kept locally while
the run lasts, and sent before each state and at the end.
"""

import contextlib
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dllm_jax import buckets
from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost
from dllm_jax.storage import folder_path, lock, sha256, write_error, write_file
from train.config import TrainConfig
from train.settings import build_settings, differences, flat_names, on_resume, to_json, unknown_key

RUN_FILE, METRICS_FILE, STATE_FOLDER, RESULT_FILE = "run.json", "metrics.jsonl", "state", "result.json"
DATA_FILE = "data.json"
MODEL_FOLDER, ADAPTERS_FOLDER, INDICATOR_FOLDER = "model", "adapters", "indicator"
DROPPED_FILE, GENERATIONS_FILE, WANDB_FILE = "dropped.txt", "generations.jsonl", "wandb-id"
CHECKSUMS_FILE = "checksums.sha256"
_LOGS = {METRICS_FILE, GENERATIONS_FILE, WANDB_FILE}  # what a run that goes on reads of those
DATA = "data"
"""What --allow-change calls other examples, beside the settings."""
WATCH_SECONDS = "look_seconds"
"""Key that tells lines of metrics about a look."""


class RunFolder:
    """A run's output folder; nothing is written before `hold`.

    Attributes:
        path: where it is.
        logs: where its logs grow: the same, unless that is in an object store.
        changes: dotted key -> (old value, new value) of settings with which the run goes on otherwise.
    """

    def __init__(self, config: TrainConfig, allow_change: Collection[str] = ()) -> None:
        """Looks at the folder.

        Args:
            allow_change: dotted keys of settings that may be others than those that the run was started with.

        Raises:
            DllmError: when it holds something else, or a run with other settings.
        """
        self.path = self.logs = folder_path(config.out)
        self._sent: buckets.Sent = {}
        self._config, self._allowed = config, allow_change
        self.changes: dict[str, tuple[Any, Any]] = {}
        _check_allowed(config, allow_change)
        if not buckets.is_address(self.path) and self.path.exists() and not self.path.is_dir():
            raise DllmError(f"out {self.path} is a file; choose a folder")
        found = buckets.names(self.path)
        if RUN_FILE in found and not (self.path / RUN_FILE).is_dir():
            self._compare()
        elif [name for name in found if not name.startswith(f".{RUN_FILE}")]:
            raise DllmError(f"out {self.path} holds something that is no training run; choose another folder")

    def _compare(self) -> None:
        old = read_settings(self.path)
        command = old.get("command", self._config.command)
        if command != self._config.command:
            raise DllmError(f"the run in {self.path} is one of python -m train {command}; choose another out")
        for name, (was, now) in differences(self._with_defaults(old), json.loads(to_json(self._config))).items():
            rule = on_resume(self._config, name)
            if rule == "free":
                continue
            fixed = rule == "never" or (name == "optimizer.ema" and not (was and now))  # states hold an average or none
            grown = rule == "grow" and now > (was or 0)
            if not grown and (fixed or name not in self._allowed):
                advice = "" if fixed else f", allow it by --allow-change {name}"
                raise DllmError(
                    f"the run in {self.path} goes by {name} = {was!r}, not {now!r}; "
                    f"restore the setting to continue it{advice}, or choose another out"
                )
            self.changes[name] = was, now

    def compare_data(self, data: Mapping[str, Any]) -> None:
        """Compares the data with those that the run has learned from.

        Args:
            data: their `train.data.fingerprint.data_fingerprint`.

        Raises:
            DllmError: when they differ, unless --allow-change names "data" or a setting of `[data]` that has changed.
        """
        path = self.path / DATA_FILE
        try:
            with buckets.reached(path):
                if not path.is_file():
                    return  # of a run by an older version
                old = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise DllmError(f"{path} could not be read ({error}); remove it to continue without comparing") from None
        if old == data:
            return
        if DATA not in self._allowed and not any(name.startswith("data.") for name in self.changes):
            was, now = (found.get("examples") for found in (old, data))
            what = "holds other examples" if was == now else f"had {was} examples and has {now} now"
            raise DllmError(
                f"the data of the run in {self.path} {what}, so that their order is another one; restore the data, or "
                f"continue with these from the position that was reached, by --allow-change {DATA}"
            )
        self.changes[DATA] = old, dict(data)

    def _with_defaults(self, old: dict[str, Any]) -> dict[str, Any]:
        """A run's settings, those that came into being after it at their defaults."""
        try:
            return json.loads(to_json(build_settings(type(self._config), old)))
        except DllmError:  # of an older version, say
            return old

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Makes the folder, writes the settings, and holds the folder as long as the context lasts.

        Raises:
            DllmError: when it cannot be written, or another process trains in it.
        """
        with contextlib.ExitStack() as held:
            with multihost.agreed():
                if not multihost.index():
                    held.enter_context(self._hold_folder())
                    if not self.changes:  # which are told in the log before
                        write_file(self.path / RUN_FILE, to_json(self._config) + "\n")
            yield

    def _hold_folder(self) -> contextlib.AbstractContextManager[object]:
        """Holds the folder; in an object store, which has no locks, its logs alone."""
        return self._local_logs() if buckets.is_address(self.path) else self._locked()

    @contextlib.contextmanager
    def _local_logs(self) -> Iterator[None]:
        # What a writer still holds open goes when it may.
        with tempfile.TemporaryDirectory(prefix="dllm_jax-", ignore_cleanup_errors=True) as name:
            with buckets.reached(self.path):
                for log in _LOGS.intersection(buckets.names(self.path)):
                    (Path(name) / log).write_bytes((self.path / log).read_bytes())
            self.logs = Path(name)
            try:
                yield
            except BaseException:
                with contextlib.suppress(DllmError, OSError):
                    self.send_logs()
                raise
            self.send_logs()

    def send_logs(self) -> None:
        """Sends what the logs tell to an object store; before a state, lest that be there without its lines.

        Raises:
            DllmError: when it cannot be reached.
        """
        if self.logs != self.path:
            buckets.send(self.logs, self.path, self._sent)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the folder: two processes that train in one would overwrite each other's states."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.path, error) from None
        busy = f"another process trains in {self.path}; wait for it, or choose another out"
        with lock(self.path / f".{RUN_FILE}.lock", busy):
            yield

    def states(self, *, training: bool) -> "States":
        """Its training states.

        Args:
            training: remove what a killed run left half-written; a reader leaves what may be in the making.
        """
        return States(self.path / STATE_FOLDER, self._config.checkpoint.keep, clean=training)

    def write_result(self, name: str, step: int, write: Callable[[Path], None]) -> Path:
        """Writes the result of `step`, unless it is there; returns where it is.

        Args:
            name: of its folder.
            write: writes it to a path, in all processes.
        """
        out, note = self.path / name, self.path / RESULT_FILE
        made = json.dumps({"step": step, "weights": self._config.checkpoint.weights}) + "\n"
        with buckets.reached(note):
            there = out.is_dir() and note.is_file() and note.read_text() == made
        if multihost.first_says(there):
            return out
        with multihost.agreed():
            if not multihost.index():  # or the note would be of another one after a kill
                try:
                    with buckets.reached(note):
                        note.unlink(missing_ok=True)
                except OSError as error:
                    raise write_error(note, error) from None
        write(out)
        if not multihost.index():
            write_file(note, made)
        return out

    def resume_logs(self, step: int, data: Mapping[str, Any], *, looks: bool = False) -> None:
        """Drops from the logs what was reported after `step`, and a line that was cut off; writes into them what
        changes from there on, and then the settings and what tells the data from others.

        Args:
            data: as of `compare_data`.
            looks: whether the run begins with a look, of which lines of the same step tell as well.
        """
        if multihost.index():
            return
        kept = self._lines_until(METRICS_FILE, step, lambda entry: looks and WATCH_SECONDS in entry)
        if self.changes:
            line = json.dumps({"step": step, "changed": self.changes})
            kept += [line] if line not in kept else []
        answers = self._lines_until(GENERATIONS_FILE, step, lambda _: looks)
        for name, lines in ((METRICS_FILE, kept), (GENERATIONS_FILE, answers)):
            if lines or (self.logs / name).is_file():
                write_file(self.logs / name, "".join(line + "\n" for line in lines))
        if self.changes:
            write_file(self.path / RUN_FILE, to_json(self._config) + "\n")
        write_file(self.path / DATA_FILE, json.dumps(data) + "\n")

    def _lines_until(self, name: str, step: int, again: Callable[[Mapping[str, Any]], bool]) -> list[str]:
        """The whole lines of a log up to `step`, but for those of the step that will come again."""
        path, kept = self.logs / name, list[str]()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
            try:
                entry = json.loads(line)
                if entry["step"] < step or (entry["step"] == step and not again(entry)):
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
        return kept

    def write_dropped(self, text: str) -> None:
        """Says which examples were left out."""
        if not multihost.index():
            write_file(self.path / DROPPED_FILE, text)


def _check_allowed(config: TrainConfig, names: Collection[str]) -> None:
    """Raises DllmError for a name that is no setting, or of one that can never change."""
    known = flat_names(dataclasses.asdict(config))  # the tables, and so `DATA`, among them
    for name in names:
        if name not in known:
            raise DllmError(unknown_key(name, known))
        if on_resume(config, name) == "never":
            raise DllmError(f"{name} cannot change in a run, whose states depend on it; choose another out")


def read_settings(folder: str | Path) -> dict[str, Any]:
    """The settings that a run was started with.

    Raises:
        DllmError: for a folder without them.
    """
    path = folder_path(folder) / RUN_FILE
    try:
        with buckets.reached(path):
            return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DllmError(f"{folder} is no training run: {path} could not be read ({error})") from None


def write_checksums(folder: Path) -> None:
    """Notes the SHA-256 of every file in a folder, in a file as `sha256sum --check` reads it.

    Raises:
        OSError: when the disk is full or cannot be written.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    write_file(folder / CHECKSUMS_FILE, "".join(lines))


def changed_files(folder: Path, part: int = 0, parts: int = 1) -> Iterator[str]:
    """Names of files that are no longer what `write_checksums` found; none where it was never called.

    Args:
        part, parts: look at every `parts`-th file from number `part` on.
    """
    noted = folder / CHECKSUMS_FILE
    if not noted.is_file():
        return
    lines = noted.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    for line in lines[part::parts]:
        wanted, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file() or sha256(path) != wanted:
            yield name or CHECKSUMS_FILE


class States:
    """Training states by step, the latest of them kept; use it by `with`."""

    def __init__(self, path: Path, keep: int, *, clean: bool) -> None:
        from orbax.checkpoint import v1 as ocp  # here, because it takes a second to import

        self._path, self._keep, self._clean, self._ocp = path, keep, clean, ocp
        self._with_defaults: int | None = None
        self._coming: tuple[int, Future[None]] | None = None  # the step that is being written
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> "States":
        ocp = self._ocp
        context = ocp.Context()
        context.array.saving.use_compression = False  # random mantissas do not shrink
        with buckets.reached(self._path):
            self._checkpointer = ocp.training.Checkpointer(
                self._path,
                context=context,
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=ocp.training.preservation_policies.LatestN(self._keep),
                cleanup_tmp_directories=self._clean,
            )
            found = self._checkpointer.latest
        self._with_defaults = None if found is None else found.step
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._coming is not None and multihost.count() > 1:
            return  # the others, whom the write would wait for, may be gone
        with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
            self._checkpointer.close()
        self._thread.shutdown(wait=False)

    @property
    def latest(self) -> int | None:
        """The step of the latest whole state; one that is being written is waited for.

        Raises:
            DllmError: as `save`.
        """
        self.wait()
        return self._with_defaults

    @property
    def steps(self) -> list[int]:
        """The steps of all whole states, ascending; as `latest`."""
        self.wait()
        return sorted(found.step for found in self._checkpointer.checkpoints)

    def save(self, step: int, state: Any, notes: Mapping[str, Any]) -> None:
        """Begins to write a state, whose buffers the next step may reuse. At most one is being written: another one is
        waited for.

        Raises:
            DllmError: when the disk is full or cannot be written, for this state or the one before.
        """
        self.wait()
        with self._writing():
            begun = self._checkpointer.save_async(step, flat_leaves(state), custom_metadata=dict(notes), overwrite=True)
            assert begun is not None  # the policy leaves none out
            self._coming = step, self._thread.submit(self._end, step, begun)

    def _end(self, step: int, begun: Any) -> None:
        """Waits until Orbax has written a state, and notes its checksums; object stores have their own."""
        begun.result()
        if not multihost.index() and not buckets.is_address(self._path):
            write_checksums(self._path / str(step))

    def check(self) -> None:
        """Says whether the write that has ended meanwhile, if any, went well.

        Raises:
            DllmError: as `save`.
        """
        if self._coming is not None and self._coming[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits for the state that is being written.

        Raises:
            DllmError: as `save`.
        """
        if self._coming is None:
            return
        (step, ending), self._coming = self._coming, None
        with self._writing():
            ending.result()
        self._with_defaults = step

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax raises whatever its storage layer does
            raise write_error(self._path, error) from error

    def notes(self, step: int) -> dict[str, Any]:
        """What was written with the state of a step.

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
        """Some arrays of a step's state, which are read when they are asked for.

        Args:
            names: what they are called -> what they are called in the state.

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
        """Compares a state's files with their checksums, each process a share of them.

        Raises:
            DllmError: naming the first that differs.
        """
        folder = self._path / str(step)
        if buckets.is_address(folder):
            return
        with multihost.agreed():
            try:
                changed = next(changed_files(folder, multihost.index(), multihost.count()), None)
            except OSError as error:
                changed = f"{error.filename} ({error.strerror})"
            if changed:
                raise DllmError(f"the state {folder} is damaged in {changed}; {self._remedy(step)}")

    def _remedy(self, step: int) -> str:
        """What to do about a state that cannot be used."""
        before = [other for other in self.steps if other < step]
        return f"remove it to go on from state {before[-1]}" if before else "remove it to start anew"

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whose words are Orbax's, about its own classes
            folder = self._path / str(step)
            if buckets.is_address(self._path):
                raise buckets.unreached(folder, error) from error
            reason = f" ({error})" if isinstance(error, DllmError) else ""
            raise DllmError(f"the state {folder} could not be read{reason}; {self._remedy(step)}") from error


class StoredArrays(Mapping[str, np.ndarray]):
    """Arrays on the disk, each read anew when it is asked for."""

    def __init__(self, names: Mapping[str, str], read: Callable[[str], np.ndarray]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _match_names(wanted: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Names of a state's leaves -> those that a state on the disk has them under: places in optax's chains are others
    when one link, such as clipping, comes or goes; their order is not."""

    def by_order(names: Iterable[str]) -> list[tuple[list[str], list[int], str]]:
        parts = ((name.split(":"), name) for name in names)
        return sorted(([p for p in of if not p.isdigit()], [int(p) for p in of if p.isdigit()], n) for of, n in parts)

    pairs = list(itertools.zip_longest(by_order(wanted), by_order(stored)))
    if any(one is None or other is None or one[0] != other[0] for one, other in pairs):
        raise DllmError("it holds other arrays than these settings ask for")
    return {one[2]: other[2] for one, other in pairs}


def flat_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by name, in the tree's order: a form that does not depend on classes of ours or of optax."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/").replace("/", ":"): leaf for path, leaf in leaves}
