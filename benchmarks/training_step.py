"""A step of training as it is lowered for devices that are not there; part of `benchmarks.compile`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dllm_jax import PUBLISHED, DllmError, ModelConfig, published
from dllm_jax.parallel.sharding import param_shardings
from dllm_jax.params.specs import abstract_params
from train.config import TrainConfig
from train.losses import Batch
from train.objectives import objective_of
from train.setup import adapted
from train.step import Stepper
from train.trainable import WholeModel
from train.trainer import placement_of


def model_of(config: TrainConfig, layers: int = 0) -> ModelConfig:
    """The model that a run trains, by its name alone: the last part of `model.init` is that of a published one.

    Args:
        layers: of the model; 0 for all.

    Raises:
        DllmError: for another name, and for a model that the run cannot train.
    """
    name = Path(config.model.init).name
    if name not in PUBLISHED:
        raise DllmError(
            f"model.init is {config.model.init!r}, which is not the name of a published model; write "
            "model.init=llada-8b-base behind the options"
        )
    model = adapted(published(name), config.model.adapt) if config.model.adapt else published(name)
    if not layers:
        return objective_of(config).fitted(model, config)
    return objective_of(config).fitted(model.replace(num_layers=layers), config)


def training_step(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> Any:
    """One optimiser step of a run on rows of `data.length` tokens, lowered without weights and data."""
    stepper = Stepper(config, model, placement_of(config, model, mesh))
    shapes = stepper.trained.shapes()
    state = stepper.abstract({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})
    whole = isinstance(stepper.trained, WholeModel)
    frozen = {} if whole else abstract_params(model, config.compute.dtype, param_shardings(model, mesh))
    optimizer, length = config.optimizer, config.data.length
    rows = (optimizer.accumulate, optimizer.batch // optimizer.accumulate)
    like: Any = lambda shape, dtype: jax.ShapeDtypeStruct((*rows, *shape), dtype, sharding=stepper.placement.batch)
    step = like((length,), jnp.int32) if stepper.objective.trajectories else None
    batch = Batch(like((length,), jnp.int32), like((length,), jnp.bool_), like((), jnp.int32), step)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return stepper.jitted(state).lower(state, frozen, batch, key)
