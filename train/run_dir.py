"""The output folder of a run.

out/run.json        all settings
out/metrics.jsonl   one line of metrics every few steps, and one for each evaluation of `watch`
out/generations.jsonl  the answers of these evaluations
out/starts.jsonl    a line for each time that the run was started: from which step on, on what, with which versions
out/state/          the training states that stay (Orbax), see `train.states`
out/model/          the trained model as a checkpoint of this library, written at the end
out/adapters/       instead of it, the trained adapters of a LoRA run
out/indicator/      or the trained indicator
out/result.json     of which step and which weights that is
out/dropped.txt     the examples that data.on_bad left out, and why
out/data.json       by which a resumed run recognises its data, see `train.data.fingerprint`

The folder may be in an object store, gs://bucket/run. Objects cannot be appended to, so the logs are then local files
while the run lasts, which are uploaded before each state and at the end.
"""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dllm_jax import buckets
from dllm_jax.environment import environment
from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost
from dllm_jax.storage import folder_path, lock, write_error, write_file
from train.config import TrainConfig
from train.settings import build_settings, differences, flat_names, on_resume, to_json, unknown_key
from train.states import States

RUN_FILE, METRICS_FILE, STATE_FOLDER, RESULT_FILE = "run.json", "metrics.jsonl", "state", "result.json"
DATA_FILE = "data.json"
MODEL_FOLDER, ADAPTERS_FOLDER, INDICATOR_FOLDER = "model", "adapters", "indicator"
DROPPED_FILE, GENERATIONS_FILE, WANDB_FILE = "dropped.txt", "generations.jsonl", "wandb-id"
STARTS_FILE = "starts.jsonl"
_LOGS = {METRICS_FILE, GENERATIONS_FILE, STARTS_FILE, WANDB_FILE}  # what a resumed run continues
DATA = "data"
"""The name of other examples for --allow-change, which otherwise takes settings."""
WATCH_SECONDS = "watch_seconds"
"""A metric that only lines about evaluations have: their duration."""


class RunFolder:
    """A run's output folder; nothing is written before `hold`.

    Attributes:
        path: where it is.
        logs: where its logs are appended to: the same folder, or a local one for a folder in an object store.
        changes: dotted key -> (old value, new value) of settings that change when the run resumes.
    """

    def __init__(self, config: TrainConfig, allow_change: Collection[str] = ()) -> None:
        """Compares the settings with those of a run in the folder.

        Args:
            allow_change: dotted keys of settings that may differ from the run's.

        Raises:
            DllmError: when the folder holds something else, or a run with other settings.
        """
        self.path = self.logs = folder_path(config.out)
        self._sent: buckets.Sent = {}
        self._config, self._allowed = config, allow_change
        self.changes: dict[str, tuple[Any, Any]] = {}
        _check_allowed(config, allow_change)
        if not buckets.is_address(self.path) and self.path.exists() and not self.path.is_dir():
            raise DllmError(f"out {self.path} is a file; choose a folder")
        found = buckets.list_names(self.path)
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
                    f"the run in {self.path} has {name} = {was!r}, not {now!r}; "
                    f"restore the setting to continue it{advice}, or choose another out"
                )
            self.changes[name] = was, now

    def compare_data(self, data: Mapping[str, Any]) -> None:
        """Compares the data with those that the run has learned from.

        Args:
            data: the fingerprint of the present data, see `train.data.fingerprint`.

        Raises:
            DllmError: when they differ, unless --allow-change names "data" or a setting of `[data]` that has changed.
        """
        path = self.path / DATA_FILE
        try:
            with buckets.reach(path):
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
                f"the data of the run in {self.path} {what}, so their order differs; restore the data, or continue "
                f"with these from the present position, by --allow-change {DATA}"
            )
        self.changes[DATA] = old, dict(data)

    def _with_defaults(self, old: dict[str, Any]) -> dict[str, Any]:
        """A run's settings, with defaults for settings that are newer than the run."""
        try:
            return json.loads(to_json(build_settings(type(self._config), old)))
        except DllmError:  # of an older version, say
            return old

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Makes the folder, writes the settings, and locks the folder as long as the context lasts.

        Raises:
            DllmError: when it cannot be written, or another process trains in it.
        """
        with contextlib.ExitStack() as held:
            with multihost.fail_together():
                if not multihost.index():
                    held.enter_context(self._hold_folder())
                    if not self.changes:  # which `resume_logs` writes into the log first
                        write_file(self.path / RUN_FILE, to_json(self._config) + "\n")
            yield

    def _hold_folder(self) -> contextlib.AbstractContextManager[object]:
        """Locks the folder; in an object store, which has no locks, copies its logs here."""
        return self._local_logs() if buckets.is_address(self.path) else self._lock()

    @contextlib.contextmanager
    def _local_logs(self) -> Iterator[None]:
        # Errors are ignored because a writer may still hold a file open.
        with tempfile.TemporaryDirectory(prefix="dllm_jax-", ignore_cleanup_errors=True) as name:
            with buckets.reach(self.path):
                for log in _LOGS.intersection(buckets.list_names(self.path)):
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
        """Uploads the logs to an object store. To be called before a state is written, which must not be there without
        its lines.

        Raises:
            DllmError: when it cannot be reached.
        """
        if self.logs != self.path:
            buckets.send(self.logs, self.path, self._sent)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Two processes that train in one folder would overwrite each other's states."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.path, error) from None
        busy = f"another process trains in {self.path}; wait for it, or choose another out"
        with lock(self.path / f".{RUN_FILE}.lock", busy):
            yield

    def states(self, *, training: bool) -> States:
        """Its training states.

        Args:
            training: remove what a killed run left half-written; a reader leaves what another process may be writing.
        """
        return States(self.path / STATE_FOLDER, self._config.checkpoint, clean=training)

    def write_result(self, name: str, step: int, write: Callable[[Path], None]) -> Path:
        """Writes the result of `step`, unless it is there, and returns its folder.

        Args:
            name: of its folder.
            write: writes it to a path, in all processes.
        """
        out, note = self.path / name, self.path / RESULT_FILE
        made = json.dumps({"step": step, "weights": self._config.checkpoint.weights}) + "\n"
        with buckets.reach(note):
            there = out.is_dir() and note.is_file() and note.read_text() == made
        if multihost.of_first_process(there):
            return out
        with multihost.fail_together():
            if not multihost.index():  # a kill must not leave the note of another result
                try:
                    with buckets.reach(note):
                        note.unlink(missing_ok=True)
                except OSError as error:
                    raise write_error(note, error) from None
        write(out)
        if not multihost.index():
            write_file(note, made)
        return out

    def resume_logs(self, step: int, data: Mapping[str, Any], *, evaluates: bool = False) -> None:
        """Drops from the logs what was reported after `step`, and a line that was cut off. Then writes what changes
        from there on into the log, the settings and the data's fingerprint into their files, and that it starts.

        Args:
            data: the fingerprint of the present data.
            evaluates: whether the run begins with an evaluation, which writes the lines about `step` again.
        """
        if multihost.index():
            return
        kept = self._lines_until(METRICS_FILE, step, lambda entry: evaluates and WATCH_SECONDS in entry)
        if self.changes:
            line = json.dumps({"step": step, "changed": self.changes})
            kept += [line] if line not in kept else []
        answers = self._lines_until(GENERATIONS_FILE, step, lambda _: evaluates)
        for name, lines in ((METRICS_FILE, kept), (GENERATIONS_FILE, answers)):
            if lines or (self.logs / name).is_file():
                write_file(self.logs / name, "".join(line + "\n" for line in lines))
        if self.changes:
            write_file(self.path / RUN_FILE, to_json(self._config) + "\n")
        write_file(self.path / DATA_FILE, json.dumps(data) + "\n")
        starts = self.logs / STARTS_FILE
        before = starts.read_text() if starts.is_file() else ""
        write_file(starts, before + json.dumps({"step": step, **environment()}) + "\n")

    def _lines_until(self, name: str, step: int, again: Callable[[Mapping[str, Any]], bool]) -> list[str]:
        """The whole lines of a log up to `step`, without lines about this step that will be written again."""
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
        """Writes which examples were left out."""
        if not multihost.index():
            write_file(self.path / DROPPED_FILE, text)


def _check_allowed(config: TrainConfig, names: Collection[str]) -> None:
    """Raises DllmError for a name that is no setting, or of one that can never change."""
    known = flat_names(dataclasses.asdict(config))  # with the tables, of which `DATA` is one
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
        with buckets.reach(path):
            return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DllmError(f"{folder} is no training run: {path} could not be read ({error})") from None
