"""A training run: the loop, and what makes it continue bit-exactly after a kill at any moment.

A state is everything that a step reads: weights, moments, average and the step's number. Noise is drawn by a key that
depends on the run's seed and the step's number, and a state notes which position of the data comes next; so a run that
starts again from a state repeats what the killed one did.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax import storage
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost
from train.batches import HostBatches, place_batch
from train.config import TrainConfig
from train.data import Loader
from train.data.fingerprint import data_fingerprint
from train.evaluation import Watch
from train.logs import Reporter, fetch_metrics
from train.losses import Batch
from train.multihost_stop import Interrupted, stop_requests
from train.objectives import objective_of
from train.optimizer import learning_rate
from train.run_dir import DROPPED_FILE, STATE_FOLDER, WATCH_SECONDS, RunFolder
from train.setup import Parts, read_outline, read_parts
from train.states import States
from train.step import Placement, Stepper, TrainState, training_mesh
from train.writers import check_writers

# Times that the weights' norm may grow from one state to the next; rates that train never come near.
_MOST_GROWTH = 1000


class TrainResult(NamedTuple):
    """Attributes:
    step: steps done in all.
    started: steps that were done before this call.
    metrics: the last line of metrics, empty if no step was run.
    folder: where the trained weights are.
    """

    step: int
    started: int
    metrics: Mapping[str, float]
    folder: Path


def train(config: TrainConfig, *, progress: bool = False, allow_change: Collection[str] = ()) -> TrainResult:
    """Trains a model, or resumes the run in `config.out`.

    Everything is checked, all of the data included, before anything is compiled or written. In a run of several
    processes, started by `jax.distributed.initialize`, every process calls this with the same config.

    Args:
        progress: show bars on stderr.
        allow_change: settings, such as "optimizer.lr", that may differ from the run's, and "data" for other examples;
            the log records the step. `steps` may grow without.

    Raises:
        DllmError: for mistakes in the settings or the data, when the loss stays no finite number, when the weights
            explode, and when most steps were skipped; the last good state is kept.
        Interrupted: after SIGINT or SIGTERM, in all processes after the same step.
    """
    with multihost.fail_together():
        check_writers(config.log.to)
        parts, mesh = read_parts(config), training_mesh(config)
        folder = RunFolder(config, allow_change)
        parts, faults = parts.check_examples(config, progress=progress)
        data = data_fingerprint(parts.rows.source)
        if (padding := parts.rows.padding) is not None:
            data |= {"rows": parts.rows.count, "padding": round(padding, 6)}
        placement = placement_of(config, parts.model, mesh)
        watch = Watch(config, parts, placement)
    with contextlib.ExitStack() as held:
        run = Run(config, parts, placement)
        watch.check_metric(run.frozen)
        held.enter_context(folder.hold())
        states = held.enter_context(folder.states(training=True))
        if faults:
            folder.write_dropped("".join(found.listing() for found in faults))
            summary = "; ".join(map(str, faults))
            warnings.warn(f"{summary}; they are left out, see {folder.path / DROPPED_FILE}", stacklevel=2)
        started = states.latest or 0
        if started > config.steps:
            raise DllmError(f"the run in {config.out} has done {started} steps; set steps to {started} or more")
        notes = {"position": 0}
        if started:
            with multihost.fail_together():
                notes |= states.notes(started)
                folder.compare_data(data)
                run.check_start(started, notes["position"], folder)
        state = run.restore(states, started) if started else run.initial_state()
        skips = Skips(config, states, notes.get("skipped", 0))
        metrics: Mapping[str, float] = {}
        unfinished = started < config.steps
        folder.resume_logs(started, data, evaluates=unfinished and watch.due(started))
        if unfinished:
            state, metrics = run.advance(
                state, started, notes["position"], states, folder, watch, skips, progress=progress
            )
        skips.check_all()
        write = lambda out: run.write(state, out, overwrite=True)
        out = folder.write_result(run.trainable.folder, config.steps, write)
    return TrainResult(config.steps, started, metrics, out)


def write_weights(
    config: TrainConfig, out: str | Path, *, step: int | Literal["best"] | None = None, overwrite: bool = False
) -> int:
    """Writes the weights of a run's state as a checkpoint (or adapters, or an indicator), and returns the step.

    Also for a run that has not ended. Only the weights are read, one array after the other, and no device holds any.
    The data may be gone.

    Args:
        step: of the state: by default the latest; "best" is the best by `checkpoint.metric`.

    Raises:
        DllmError: when there is no such state.
    """
    storage.check_out(out, overwrite=overwrite)
    shell = read_outline(config)
    trained = objective_of(config).trainable(config, shell.model)
    with RunFolder(config).states(training=False) as states:
        if not states.steps:
            raise DllmError(f"the run in {config.out} has no state yet; train at least checkpoint.every steps")
        step = states.best if step == "best" else states.latest if step is None else step
        if step is None:
            why = f"none has {config.checkpoint.metric!r}" if config.checkpoint.best else "checkpoint.best is 0"
            raise DllmError(f"the run in {config.out} has no best state, as {why}; name a step, or take the latest")
        if step not in states.steps:
            there = ", ".join(map(str, states.steps))
            raise DllmError(f"the run in {config.out} keeps no state of step {step}; there are {there}")
        kind = "trained" if config.checkpoint.weights == "raw" else "average"
        weights = states.arrays(step, {name: f"{kind}:{name}" for name in trained.shapes()})
        files = shell.checkpoint_files
        trained.write(storage.folder_path(out), weights, steps=step, files=files, overwrite=overwrite)
    return step


def placement_of(config: TrainConfig, model: ModelConfig, mesh: Any) -> Placement:
    """Where the arrays of a run are."""
    return Placement(mesh, objective_of(config).trainable(config, model).shardings(mesh))


class Run:
    """The parts of a run that hold no state.

    Attributes:
        trainable: what is trained.
        frozen: the arrays that are not.
        feed: what makes batches of the states, None where they are rows of the data.
        loader: of this process's part of the batches, by positions of the data; None where `feed` makes them.
    """

    def __init__(self, config: TrainConfig, parts: Parts, placement: Placement) -> None:
        self.config, self.parts, self.placement = config, parts, placement
        self.stepper = Stepper(config, parts.model, placement)
        self.trainable = self.stepper.trainable
        self.frozen = self.trainable.frozen(placement.mesh)
        self.feed = self.stepper.objective.feed(config, parts, self.stepper, self.frozen)
        self.loader: Loader[Batch] | None = None
        if not self.feed:
            self.loader = Loader(HostBatches.of_steps(parts.rows, config, placement.batch), config.data.workers)

    def check_start(self, step: int, position: int, folder: RunFolder) -> None:
        """Raises DllmError for changes with which the run cannot continue after `step` steps, at `position` of the
        data."""
        batch, bucket = self.config.optimizer.batch, self.config.data.bucket
        if bucket and ("optimizer.batch" in folder.changes or position % batch):
            raise DllmError("data.bucket orders rows batch by batch; restore optimizer.batch, or set data.bucket to 0")
        if self.feed:
            self.feed.check_start(step, position)

    def initial_state(self) -> TrainState:
        """The state before the first step."""
        return self.stepper.start(self.trainable.initial(jax.random.key(self.config.seed), self.placement.trained))

    def restore(self, states: States, step: int) -> TrainState:
        """A state that was written."""
        shardings = self.placement.trained
        arrays = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[name])
            for name, shape in self.trainable.shapes().items()
        }
        return states.load(step, self.stepper.abstract_state(arrays))

    def write(self, state: TrainState, out: Path, *, overwrite: bool) -> None:
        """Writes the trained weights, by all processes together."""
        weights = state.trained if self.config.checkpoint.weights == "raw" else state.average
        assert weights is not None
        self.trainable.write(out, weights, steps=int(state.step), files=self.parts.files, overwrite=overwrite)

    def advance(
        self,
        state: TrainState,
        done: int,
        position: int,
        states: States,
        folder: RunFolder,
        watch: Watch,
        skips: "Skips",
        *,
        progress: bool,
    ) -> tuple[TrainState, Mapping[str, float]]:
        """Runs the remaining steps, from a position of the data on, and writes metrics, evaluations and states.

        No state is written after a skipped step: the step before may have spoilt the weights, and the last good state
        would be removed. The state is written after the next step that is not skipped.
        """
        config = self.config
        at = lambda step: position + (step - done) * config.optimizer.batch
        key = jax.jit(lambda: jax.random.key(config.seed), out_shardings=self.placement.replicated)()
        schedule = learning_rate(config.optimizer, config.steps)
        pending: list[Mapping[str, Any]] = []
        feed = self.feed
        loaded: contextlib.AbstractContextManager[Iterator[Batch]] = contextlib.nullcontext(iter(()))
        if self.loader:
            loaded = self.loader.values(range(position, at(config.steps), config.optimizer.batch))
        sound = Soundness(jax.jit(self.stepper.soundness), state, skips)
        kept, owed = done, False  # the step of the last state, and whether one should have been written since
        line: Mapping[str, float] = {}
        with (
            stop_requests(done) as stop,
            loaded as batches,
            Reporter(config, self.parts.model, folder.logs, done, progress=progress) as reporter,
        ):
            if watch.due(done):
                self._evaluate(done, state, watch, reporter)
            programs: dict[int, Callable[..., tuple[TrainState, dict[str, jax.Array]]]] = {}  # by the rows' length
            for step in range(done + 1, config.steps + 1):
                rows = feed(step - 1, at(step - 1), state) if feed else place_batch(next(batches), self.placement.batch)
                length = rows.tokens.shape[-1]
                if length not in programs:
                    with reporter.paused("compiling"):
                        programs[length] = self.stepper.jit_step(state).lower(state, self.frozen, rows, key).compile()
                state, metrics = programs[length](state, self.frozen, rows, key)
                reporter.count(length)
                pending.append({**metrics, **feed.metrics} if feed else metrics)
                states.check()
                between = not (feed and step % feed.round)
                stopping = stop.after(step) and between
                found: Mapping[str, float] = {}
                if watch.due(step) and (not stopping or config.checkpoint.best):  # whose states need it now
                    found = self._evaluate(step, state, watch, reporter)
                last = step == config.steps or stopping
                keep = last or step % config.checkpoint.every == 0 or (owed and between)
                if keep or step % config.log.every == 0:
                    values = skips.means(fetch_metrics(pending), step)
                    line = reporter.report(step, {**values, "lr": float(schedule(step - 1))})
                    pending = []
                if keep:
                    owed = skips.in_a_row > 0
                if (keep and not owed) or step == config.steps:
                    sound.check(state, step)
                if keep and not owed:
                    with reporter.paused("saving"):
                        folder.send_logs()
                        states.save(step, state, {"position": at(step), "skipped": skips.in_all}, found)
                        kept = step
                if stopping and step < config.steps:
                    states.wait()
                    raise Interrupted(step, kept, stop.status)
        states.wait()
        return state, line

    def _evaluate(self, step: int, state: TrainState, watch: Watch, reporter: Reporter) -> dict[str, float]:
        """Evaluates and reports, and returns the metrics but the duration, which differs between processes."""
        jax.block_until_ready(state)  # what is waited for is training
        with reporter.paused("evaluating"):
            evaluation = watch(state, self.frozen)
            reporter.report_evaluation(step, evaluation)
        return {name: value for name, value in evaluation.metrics.items() if name != WATCH_SECONDS}


class Skips:
    """Steps that were skipped because their loss or gradient was no finite number, and means of the others' metrics.

    Attributes:
        in_a_row: up to the last step.
        in_all: of the run, also before it was resumed.
    """

    def __init__(self, config: TrainConfig, states: States, in_all: int) -> None:
        self._config, self._states = config, states
        self.in_a_row, self.in_all = 0, in_all  # no state is written in a row of them, so none is resumed in one

    def means(self, steps: list[dict[str, float]], last: int) -> dict[str, float]:
        """Means over the steps that end with number `last`, and the number of skipped ones if there are any.

        Raises:
            DllmError: when too many in a row were skipped.
        """
        most = self._config.optimizer.skip
        for number, values in enumerate(steps, start=last - len(steps) + 1):
            self.in_a_row = self.in_a_row + 1 if values["skipped"] else 0
            self.in_all += bool(values["skipped"])
            if self.in_a_row > most:
                name, value = next(
                    (name, values[name]) for name in ("loss", *values) if not math.isfinite(values[name])
                )
                since = f", after {most} that were skipped" if most else ""
                raise self.failure(f"the {name.replace('_', ' ')} of step {number} is {value}{since}")
        done = [values for values in steps if not values["skipped"]]
        means = {name: sum(values[name] for values in done) / len(done) for name in (done[0] if done else ())}
        means.pop("skipped", None)
        return means | ({"skipped": len(steps) - len(done)} if len(done) < len(steps) else {})

    def check_all(self) -> None:
        """Raises DllmError when most steps of a run that has ended were skipped."""
        if 2 * self.in_all > self._config.steps:
            raise self.failure(f"{self.in_all} of {self._config.steps} steps were skipped, and no result is written")

    def failure(self, why: str) -> DllmError:
        """The error for a run that diverged, with the state to resume from."""
        part, written = self._config.optimizer, self._states.steps
        folder = f"{self._config.out}/{STATE_FOLDER}/{written[-1]}" if written else ""
        before = f"remove {folder} to resume from state {written[-2]}" if len(written) > 1 else "choose another out"
        kept = f"state {written[-1]} is kept" if written else "no state was written before"
        again = f"; if that fails as well, {before}" if written else ""
        clip = "lower optimizer.clip" if part.clip else "set optimizer.clip"
        return DllmError(
            f"{why}; {kept}: see whether the weights of model.init are finite, or lower optimizer.lr or {clip}, by "
            f"--allow-change{again}"
        )


class Soundness:
    """Checks states before they are written over older ones."""

    def __init__(self, measure: Callable[[TrainState], tuple[Any, Any]], state: TrainState, skips: Skips) -> None:
        """
        Args:
            measure: `Stepper.soundness`.
        """
        self._measure, self._skips = measure, skips
        self._norm = float(measure(state)[1])

    def check(self, state: TrainState, step: int) -> None:
        """Raises DllmError for a state with a number that is not finite, and for weights that have exploded since the
        last check."""
        finite, norm = (value.item() for value in jax.device_get(self._measure(state)))
        if not finite:
            raise self._skips.failure(f"the weights or the optimizer's moments after step {step} are not all finite")
        if not norm <= _MOST_GROWTH * max(self._norm, 1.0):
            grown = f"the norm of the weights is {norm:.3g} after step {step}, and was {self._norm:.3g}"
            raise self._skips.failure(grown)
        self._norm = norm
