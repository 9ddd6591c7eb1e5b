"""One optimiser step as one program: noise, forward, backward, accumulation, update, moving average."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dllm_jax.config import ModelConfig
from dllm_jax.kernels.attention import tpu
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.transformer import RematPolicy
from dllm_jax.parallel.sharding import (
    Layout,
    ShardingRules,
    batch_parts,
    batch_sharding,
    mesh_for_batch,
    param_shardings,
)
from dllm_jax.params.specs import cast_for_training
from dllm_jax.pytree import pytree
from train.config import TrainConfig
from train.losses import Batch, Means, Metrics, mean_values
from train.objectives import objective_of
from train.optimizer import frozen_names, make_optimizer, update_average
from train.trainable import Kernels, Params

_TABLE = "embed.embedding"
_DROPOUT = 2**31 - 1  # objectives fold other numbers into the same key

_policies = jax.checkpoint_policies
_KEEP_ATTENTION = _policies.save_only_these_names(tpu.KEPT)
REMAT: Mapping[str, RematPolicy | None] = types.MappingProxyType(
    {
        "none": None,
        "layers": _KEEP_ATTENTION,
        "matmuls": _policies.save_from_both_policies(_KEEP_ATTENTION, _policies.dots_with_no_batch_dims_saveable),
    }
)


@pytree()
class TrainState:
    """Everything that a step changes.

    Attributes:
        step: scalar int32, steps done.
        trained: flat name -> float32 master weights that the optimiser changes, see `train.trainable`.
        optimizer: optax's state.
        average: moving average of `trained`, or None.
    """

    step: jax.Array
    trained: dict[str, jax.Array]
    optimizer: Any
    average: dict[str, jax.Array] | None


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where things are.

    Attributes:
        mesh: the devices.
        trained: sharding of every trained array by flat name.
    """

    mesh: Mesh
    trained: Mapping[str, NamedSharding]

    @property
    def replicated(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Of arrays [accumulate, rows, ...]: rows are split."""
        return NamedSharding(self.mesh, PartitionSpec(None, *ShardingRules().spec(("batch",), self.mesh)))

    @property
    def batch_parts(self) -> int:
        """Number of devices that rows are split over."""
        return batch_parts(self.mesh)


def training_mesh(config: TrainConfig) -> Mesh:
    """The mesh of `compute.mesh`.

    Raises:
        DllmError: as `mesh_for_batch`.
    """
    rows = config.optimizer.batch // config.optimizer.accumulate
    unit = "rows (optimizer.batch over optimizer.accumulate)"
    return mesh_for_batch(config.compute.mesh, rows, "compute.mesh", unit)


class Stepper:
    """Makes states and advances them; holds no arrays itself.

    Attributes:
        trainable: what is trained.
        optimizer: optax's transformation.
        objective: what is trained for.
        placement: where states and batches are.
    """

    def __init__(self, config: TrainConfig, model: ModelConfig, placement: Placement) -> None:
        self._config, self._model, self.placement = config, model, placement
        self.objective = objective_of(config)
        self.trainable = self.objective.trainable(config, model)
        self._frozen = frozen_names(self.trainable.shapes(), config.model.freeze)
        self.optimizer = make_optimizer(config.optimizer, config.steps, self._frozen)
        self._layout = Layout(placement.mesh) if placement.mesh.size > 1 else None
        platform = placement.mesh.devices.flat[0].platform
        wanted = platform == "tpu" or (platform == "gpu" and model.experts is not None and placement.mesh.size > 1)
        self._scan = config.compute.scan == "on" or (config.compute.scan == "auto" and wanted)
        self._table_sharding = param_shardings(model, placement.mesh, ShardingRules(embed=None))[_TABLE]

    def start(self, trained: Mapping[str, jax.Array]) -> TrainState:
        """The state before the first step, from float32 arrays in their shardings, whose buffers it takes over."""
        shardings = self.shardings(jax.eval_shape(self._fresh, dict(trained)))
        return jax.jit(self._fresh, out_shardings=shardings, donate_argnums=0)(dict(trained))

    def abstract_state(self, trained: Mapping[str, jax.ShapeDtypeStruct]) -> TrainState:
        """Shapes, dtypes and shardings of a state without any memory."""
        state = jax.eval_shape(self._fresh, dict(trained))
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(place, state, self.shardings(state))

    def shardings(self, state: TrainState) -> Any:
        """The sharding of every leaf: moments, which optax keeps by their weights' names, and average lie where their
        weights do."""
        trained, everywhere = dict(self.placement.trained), self.placement.replicated

        def place(path: tuple[Any, ...], _: Any) -> NamedSharding:
            last = path[-1]
            return trained.get(last.key, everywhere) if isinstance(last, jax.tree_util.DictKey) else everywhere

        moments = jax.tree_util.tree_map_with_path(place, state.optimizer)
        tree: Any = TrainState  # of shardings instead of arrays
        return tree(everywhere, trained, moments, None if state.average is None else trained)

    def _fresh(self, trained: dict[str, jax.Array]) -> TrainState:
        average = trained if self._config.optimizer.ema else None
        return TrainState(jnp.zeros((), jnp.int32), trained, self.optimizer.init(trained), average)

    def __call__(self, state: TrainState, frozen: Params, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        """One optimiser step.

        Args:
            frozen: the parameters that stay as they are, see `train.trainable`.
            batch: [accumulate, rows, ...].
            key: of the run; the noise of a step depends on it and on the step's number alone.

        Returns:
            The next state, and scalars: those of the objective, grad_norm (before clipping), and skipped, whether one
            of them is no finite number: then nothing but the step's number has changed.
        """
        noised = self.add_noise(batch, key, state.step)
        dropout = jax.random.fold_in(jax.random.fold_in(key, state.step), _DROPOUT)
        gradient, metrics = self.gradient(state.trained, frozen, noised, dropout)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        # Not optax.apply_if_finite: it would put counts of its own into the states, and the average would still change.
        finite = jnp.all(jnp.isfinite(jnp.stack(jax.tree.leaves(metrics))))
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), self._update(gradient, state), state)
        return dataclasses.replace(state, step=state.step + 1), {**metrics, "skipped": ~finite}

    def add_noise(self, batch: Any, key: jax.Array, step: jax.Array) -> Any:
        """A batch with the noise of a step; the key is the run's."""
        noised = self.objective.corrupt(jax.random.fold_in(key, step), batch, Denoiser(self._model, {}))
        return self.objective.at_step(noised, step)

    def learner(self, trained: Params, frozen: Params) -> Any:
        """What an objective's loss takes as what is trained, with nothing left out of it."""
        return self.trainable.parts(trained, frozen, self._denoiser, None)[0]

    def measure(self, trained: Params, frozen: Params, batch: Batch, key: jax.Array) -> Means:
        """What the objective reports of a batch [1, rows, ...] that is not learned from.

        Args:
            key: of the batch's noise.
        """
        noised = self.objective.corrupt_heldout(key, batch, Denoiser(self._model, {}))
        return self.means(trained, frozen, jax.tree.map(lambda x: x[0], noised), jax.random.fold_in(key, _DROPOUT))

    def _update(self, gradient: Params, state: TrainState) -> TrainState:
        """The state with a gradient applied; the step's number stays. The learning rate is that of this number, however
        many steps were skipped."""
        counts = optax.tree.set(state.optimizer, _counts_the_schedule, count=state.step)
        updates, optimizer = self.optimizer.update(gradient, counts, state.trained)
        trained = dict(optax.apply_updates(state.trained, updates))
        average = state.average
        if average is not None:
            average = update_average(average, trained, state.step, self._config.optimizer.ema)
        return TrainState(state.step, trained, optimizer, average)

    def soundness(self, state: TrainState) -> tuple[jax.Array, jax.Array]:
        """Whether all numbers of a state are finite, and the norm of what is trained.

        Not a part of the step, which writes the next state over the last: a step that chose between both would hold
        both in memory.
        """
        floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats])), optax.tree.norm(state.trained)

    def jit_step(self, state: TrainState) -> Any:
        """The step under `jax.jit`; the state's buffers are reused for the next state."""
        return jax.jit(
            self.__call__,
            donate_argnums=0,
            out_shardings=(self.shardings(state), self.placement.replicated),
        )

    def gradient(
        self, trained: dict[str, jax.Array], frozen: Params, noised: Any, key: jax.Array
    ) -> tuple[Params, Metrics]:
        """Gradient and metrics of a batch, in float32, whatever parts it is computed in; each has dropout of its own.

        Gradients are of the parts' sums, and divided by what the loss of the whole batch is: means of parts that weigh
        differently would be another objective.
        """

        def part(noised: Any, key: jax.Array) -> tuple[Params, Means]:
            def total(trained: dict[str, jax.Array]) -> tuple[jax.Array, Means]:
                stay = lambda name, x: lax.stop_gradient(x) if name in self._frozen else x
                trained = {name: stay(name, x) for name, x in trained.items()}
                means = self.means(trained, frozen, noised, key)
                return means["loss"].total, means

            return jax.grad(total, has_aux=True)(trained)

        count = jax.tree.leaves(noised)[0].shape[0]
        keys = jax.random.split(key, count)
        first = jax.tree.map(lambda x: x[0], (noised, keys))

        def add(sums: tuple[Params, Means], one: tuple[Any, jax.Array]) -> tuple[tuple[Params, Means], None]:
            return jax.tree.map(jnp.add, sums, part(*one)), None

        if count == 1:
            gradient, means = part(*first)
        else:
            zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, *first))
            gradient, means = lax.scan(add, zero, (noised, keys))[0]
        return jax.tree.map(lambda x: x / means["loss"].weight, gradient), mean_values(means)

    def means(self, trained: Params, frozen: Params, noised: Any, key: jax.Array) -> Means:
        """What the objective reports of [rows, T]; `key` as in `Trained.parts`."""
        learner, base = self.trainable.parts(trained, frozen, self._denoiser, key)
        return self.objective.means(
            learner,
            base,
            noised,
            groups=self.placement.batch_parts,
            remat=REMAT[self._config.compute.remat],
            sharding=batch_sharding(self.placement.mesh),
        )

    def _denoiser(self, kernels: Kernels) -> Denoiser:
        """The model with parameters, in the dtype of computation."""
        model = self._model.replace(dtype=self._config.compute.dtype)
        params = cast_for_training(model, kernels)
        # Gathered for the lookup: rows of a table that is split by columns would be split so as well, not by batch.
        params[_TABLE] = lax.with_sharding_constraint(params[_TABLE], self._table_sharding)
        alone = self.placement.mesh.devices.flat[0] if self.placement.mesh.size == 1 else None
        return Denoiser(model, params, self._layout, self._scan, alone)


def _counts_the_schedule(path: Any, _: Any) -> bool:
    """Whether this leaf of optax's state is the count by which a schedule is read; others are of what was applied."""
    return getattr(path[-1], "tuple_name", "") == optax.ScaleByScheduleState.__name__
