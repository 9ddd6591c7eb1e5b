"""The output folder of a run.

out/run.json        all settings
out/metrics.jsonl   one line of metrics every few steps
out/state/          the latest training states (Orbax), each whole or not there
out/model/          the trained model as a checkpoint of this library, written at the end
out/adapters/       instead of it, the trained adapters of a LoRA run
out/indicator/      or the trained indicator
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from dllm_jax.checkpoint import write_error
from dllm_jax.errors import DllmError
from train.config import TrainConfig, build, differences, to_json

RUN_FILE, METRICS_FILE, STATE_FOLDER = "run.json", "metrics.jsonl", "state"
MODEL_FOLDER, ADAPTERS_FOLDER, INDICATOR_FOLDER = "model", "adapters", "indicator"
_MAY_CHANGE = ("out", "log.", "checkpoint.", "compute.mesh")  # what a continued run may do otherwise


class RunFolder:
    """A run's output folder; nothing is written before `begin`."""

    def __init__(self, config: TrainConfig) -> None:
        """Looks at the folder.

        Raises:
            DllmError: when it holds something else, or a run with other settings.
        """
        self.path = Path(config.out).expanduser().resolve()
        self._config = config
        if self.path.exists() and not self.path.is_dir():
            raise DllmError(f"out {self.path} is a file; choose a folder")
        if not self.path.exists():
            return
        if (self.path / RUN_FILE).is_file():
            self._compare()
        elif [entry.name for entry in self.path.iterdir() if not entry.name.startswith(f".{RUN_FILE}")]:
            raise DllmError(f"out {self.path} holds something that is no training run; choose another folder")

    def _compare(self) -> None:
        try:
            old = json.loads((self.path / RUN_FILE).read_text())
        except (OSError, ValueError) as error:
            raise DllmError(f"{self.path / RUN_FILE} could not be read ({error}); choose another out") from None
        for name, (was, now) in differences(self._whole(old), json.loads(to_json(self._config))).items():
            if not name.startswith(_MAY_CHANGE):
                raise DllmError(
                    f"the run in {self.path} was started with {name} = {was!r}, not {now!r}; "
                    "restore the setting to continue it, or choose another out"
                )

    def _whole(self, old: dict[str, Any]) -> dict[str, Any]:
        """A run's settings, those that came into being after it at their defaults."""
        try:
            return json.loads(to_json(build(type(self._config), old)))
        except DllmError:  # of another command, say
            return old

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Makes the folder, writes the settings, and holds the folder as long as the context lasts.

        Raises:
            DllmError: when it cannot be written, or another process trains in it.
        """
        if jax.process_index():
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / f".{RUN_FILE}.lock").open("w")
        except OSError as error:
            raise self._unwritable(error) from None
        with lock:
            self._lock(lock)
            try:
                replace_file(self.path / RUN_FILE, to_json(self._config) + "\n")
            except OSError as error:
                raise self._unwritable(error) from None
            yield

    def _unwritable(self, error: OSError) -> DllmError:
        return DllmError(f"out {self.path} cannot be written to ({error.strerror}); choose another")

    def _lock(self, file: TextIO) -> None:
        """Two processes that train in one folder would overwrite each other's states; a killed one locks nothing."""
        try:
            import fcntl  # Unix alone has it

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DllmError(f"another process trains in {self.path}; wait for it, or choose another out") from None
        except (ImportError, OSError):
            return  # a system without locks

    def states(self, *, training: bool) -> "States":
        """Its training states.

        Args:
            training: remove what a killed run left half-written; a reader leaves what may be in the making.
        """
        return States(self.path / STATE_FOLDER, self._config.checkpoint.keep, clean=training)

    def cut_metrics(self, step: int) -> None:
        """Drops what was reported after `step`, and a line that was cut off."""
        path = self.path / METRICS_FILE
        if jax.process_index() or not path.is_file():
            return
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        replace_file(path, "".join(kept))


def replace_file(path: Path, text: str) -> None:
    """Writes a file that is there with the old text or the new, whatever happens meanwhile."""
    partial = path.parent / f".{path.name}.partial"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


class States:
    """Training states by step, the latest of them kept; use it by `with`."""

    def __init__(self, path: Path, keep: int, *, clean: bool) -> None:
        from orbax.checkpoint import v1 as ocp  # here, because it takes a second to import

        self._path, self._keep, self._clean, self._ocp = path, keep, clean, ocp

    def __enter__(self) -> "States":
        ocp = self._ocp
        context = ocp.Context()
        context.array.saving.use_compression = False  # random mantissas do not shrink
        self._checkpointer = ocp.training.Checkpointer(
            self._path,
            context=context,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=ocp.training.preservation_policies.LatestN(self._keep),
            cleanup_tmp_directories=self._clean,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    @property
    def latest(self) -> int | None:
        """The step of the latest whole state."""
        found = self._checkpointer.latest
        return None if found is None else found.step

    def save(self, step: int, state: Any, notes: Mapping[str, Any]) -> None:
        """Writes a state and waits for it, so that the next step may reuse its buffers.

        Raises:
            DllmError: when the disk is full or cannot be written.
        """
        try:
            self._checkpointer.save(step, flat(state), custom_metadata=dict(notes), overwrite=True)
        except Exception as error:  # Orbax raises whatever its storage layer does
            raise write_error(self._path, error) from error

    def load(self, step: int, abstract: Any) -> Any:
        """The state of a step, in the shardings of `abstract`.

        Raises:
            DllmError: when it cannot be read.
        """
        try:
            leaves = self._checkpointer.load(step, flat(abstract))
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise DllmError(f"the state {self._path / str(step)} could not be read ({first}); remove it") from error
        return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in flat(abstract)])


def flat(tree: Any) -> dict[str, Any]:
    """Leaves by name, in the tree's order: a form that does not depend on classes of ours or of optax."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/").replace("/", ":"): leaf for path, leaf in leaves}
