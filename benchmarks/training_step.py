"""A step of training as it is compiled for devices that are not there; part of `benchmarks.compile`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dllm_jax import ModelConfig
from dllm_jax.params import abstract_params
from dllm_jax.sharding import param_shardings
from train.config import TrainConfig
from train.losses import Batch
from train.objectives.d2f import D2FConfig
from train.objectives.indicator import IndicatorRun
from train.objectives.masked_diffusion import MaskedDiffusionConfig
from train.settings import build
from train.step import Stepper
from train.trainer import placement_of

RECIPES: Mapping[str, tuple[type[TrainConfig], dict[str, Any]]] = {
    "sft": (MaskedDiffusionConfig, {}),
    "lora": (MaskedDiffusionConfig, {"lora": {"rank": 32, "alpha": 32.0}}),
    "d2f": (D2FConfig, {"lora": {"rank": 32, "alpha": 32.0}}),
    "indicator": (IndicatorRun, {}),
}


def training_step(
    recipe: str, model: ModelConfig, mesh: Mesh, *, batch: int, length: int, chunk: int, dtype: str
) -> Any:
    """One optimiser step, compiled: [batch, length] tokens, every layer rematerialised, logits `chunk` at a time."""
    kind, values = RECIPES[recipe]
    values = values | {
        "out": "unused",
        "steps": 1000,
        "model": {"init": "random weights"},
        "data": {"length": length},
        "objective": {"chunk": chunk},
        "optimizer": {"batch": batch},
        "compute": {"dtype": dtype, "remat": "none" if recipe == "indicator" else "layers"},
    }
    config = build(kind, values)
    stepper = Stepper(config, model, placement_of(config, model, mesh))
    shapes = stepper.trained.shapes()
    state = stepper.abstract({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})
    base = {} if recipe == "sft" else abstract_params(model, dtype, param_shardings(model, mesh))
    like: Any = lambda shape, dtype: jax.ShapeDtypeStruct((1, batch, *shape), dtype, sharding=stepper.placement.batch)
    written = like((length,), jnp.int32) if recipe == "indicator" else None
    rows = Batch(like((length,), jnp.int32), like((length,), jnp.bool_), like((), jnp.int32), written)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return stepper.jitted(state).lower(state, base, rows, key).compile()
