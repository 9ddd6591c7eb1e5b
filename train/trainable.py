"""What a run trains: the whole model, or adapters to it. Objectives define others, such as an indicator.

The trainer knows one interface (`Trainable`): arrays that the optimiser changes, arrays that stay, how an objective
reads both, and how the result is written.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dllm_jax.checkpoints import checkpoint
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.transformer import param_specs
from dllm_jax.parallel import multihost
from dllm_jax.parallel.sharding import param_shardings
from dllm_jax.params.low_rank import LowRankKernel
from dllm_jax.params.specs import abstract_params, init_params
from train.config import TrainConfig
from train.lora import adapter_shapes, adapter_shardings, attach_adapters, init_adapters, write_adapters
from train.run_dir import ADAPTERS_FOLDER, MODEL_FOLDER

Params = Mapping[str, jax.Array]
Weights = Params | Mapping[str, np.ndarray]
Kernels = Mapping[str, jax.Array | LowRankKernel]


class SamplerInputs(NamedTuple):
    """What samplers take of a run.

    Attributes:
        config: of the model, with the dtype that it computes in.
        params: of the model.
        options: of the sampler that are trained themselves, such as an indicator.
    """

    config: ModelConfig
    params: dict[str, Any]
    options: dict[str, Any]


class Trainable(Protocol):
    """What is trained.

    Attributes:
        folder: name of the result in the run's folder.
        model: config of the backbone.
        passes: how many times a step multiplies by the model's matrices: forward, backward to the activations, and
            for the gradients of the matrices themselves.
    """

    @property
    def folder(self) -> str: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def passes(self) -> int: ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every trained array, float32, by flat name."""
        ...

    def shardings(self, mesh: Mesh) -> Mapping[str, NamedSharding]:
        """Sharding of every trained array."""
        ...

    def initial(self, key: jax.Array, shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
        """The arrays before the first step."""
        ...

    def frozen(self, mesh: Mesh) -> dict[str, jax.Array]:
        """Arrays that stay as they are, in the dtype of computation; none where everything is trained."""
        ...

    def parts(
        self, trained: Params, frozen: Params, denoiser: Callable[[Kernels], Denoiser], key: jax.Array | None
    ) -> tuple[Any, Denoiser]:
        """What an objective's loss takes: the learner, and the frozen model, without parameters where there is none.

        Args:
            denoiser: the model with parameters, in the dtype of computation.
            key: typed key of what is left out of adapters (`lora.dropout`); None leaves out nothing.
        """
        ...

    def for_sampling(self, weights: Params, frozen: Params) -> SamplerInputs:
        """What samplers take of the trained arrays, or of their average, as they are written in the end."""
        ...

    def write(
        self, out: Path, weights: Weights, *, steps: int, files: Mapping[str, bytes], overwrite: bool = False
    ) -> None:
        """Writes the result, whole or not at all, by all processes of the run together.

        Args:
            weights: by flat name, in the order of `shapes`; on the devices or the host.
            steps: that it was trained for.
            files: the tokenizer's, by name.
        """
        ...


@dataclasses.dataclass(frozen=True)
class WholeModel:
    """All weights of the model, from a checkpoint or from random ones."""

    config: TrainConfig
    model: ModelConfig
    folder: str = MODEL_FOLDER
    passes: int = 3

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: spec.shape for name, spec in param_specs(self.model).items()}

    def shardings(self, mesh: Mesh) -> Mapping[str, NamedSharding]:
        return param_shardings(self.model, mesh)

    def initial(self, key: jax.Array, shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
        if self.config.model.init:
            return _loaded(checkpoint.find(self.config.model.init), self.model, shardings)
        return init_params(self.model, key, dtype="float32", shardings=shardings)

    def frozen(self, mesh: Mesh) -> dict[str, jax.Array]:
        return {}

    def parts(
        self, trained: Params, frozen: Params, denoiser: Callable[[Kernels], Denoiser], key: jax.Array | None
    ) -> tuple[Any, Denoiser]:
        return denoiser(trained), Denoiser(self.model, {})

    def for_sampling(self, weights: Params, frozen: Params) -> SamplerInputs:
        return SamplerInputs(self.model, dict(_stored(self.model, weights)), {})

    def write(
        self, out: Path, weights: Weights, *, steps: int, files: Mapping[str, bytes], overwrite: bool = False
    ) -> None:
        """Writes a checkpoint of this library."""
        source = provenance(self.config, steps)
        together, tensors = multihost.count() > 1, _stored(self.model, weights)
        checkpoint.save(out, self.model, tensors, files=files, source=source, overwrite=overwrite, together=together)


@dataclasses.dataclass(frozen=True)
class LoraModel:
    """Low-rank adapters of a frozen model."""

    config: TrainConfig
    model: ModelConfig
    folder: str = ADAPTERS_FOLDER
    passes: int = 2

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return adapter_shapes(self.model, self.config.lora)

    def shardings(self, mesh: Mesh) -> Mapping[str, NamedSharding]:
        return adapter_shardings(self.model, self.config.lora, param_shardings(self.model, mesh))

    def initial(self, key: jax.Array, shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
        return init_adapters(self.model, self.config.lora, key, shardings)

    def frozen(self, mesh: Mesh) -> dict[str, jax.Array]:
        return frozen_model(self.config, self.model, mesh)

    def parts(
        self, trained: Params, frozen: Params, denoiser: Callable[[Kernels], Denoiser], key: jax.Array | None
    ) -> tuple[Any, Denoiser]:
        return denoiser(attach_adapters(frozen, trained, self.config.lora, key)), denoiser(frozen)

    def for_sampling(self, weights: Params, frozen: Params) -> SamplerInputs:
        # The product stays apart, so that no second model is in memory.
        config = self.model.replace(dtype=self.config.compute.dtype)
        return SamplerInputs(config, attach_adapters(frozen, weights, self.config.lora), {})

    def write(
        self, out: Path, weights: Weights, *, steps: int, files: Mapping[str, bytes], overwrite: bool = False
    ) -> None:
        """Writes a folder of adapters in the hub's format."""
        base = checkpoint.name_of(self.config.model.init)
        values = multihost.gather_arrays(weights)
        with multihost.fail_together():
            if not multihost.index():
                write_adapters(out, self.model, self.config.lora, values, base=base, overwrite=overwrite)


def whole_or_adapters(config: TrainConfig, model: ModelConfig) -> Trainable:
    """The whole model, or adapters where `lora.rank` is set.

    Raises:
        DllmError: when there is no model that adapters could be added to.
    """
    if not config.lora.rank:
        if config.lora.init:
            raise DllmError("lora.init names adapters to start from, and lora.rank is 0; set it to their rank")
        return WholeModel(config, model)
    check_frozen(config, "adapters need a model to be added to")
    return LoraModel(config, model)


@dataclasses.dataclass(frozen=True)
class WholeModelAndBase(WholeModel):
    """All weights, and the model before training, which stays."""

    def frozen(self, mesh: Mesh) -> dict[str, jax.Array]:
        return frozen_model(self.config, self.model, mesh)

    def parts(
        self, trained: Params, frozen: Params, denoiser: Callable[[Kernels], Denoiser], key: jax.Array | None
    ) -> tuple[Any, Denoiser]:
        return denoiser(trained), denoiser(frozen)


def check_frozen(config: TrainConfig, need: str) -> None:
    """Raises DllmError where there is no model that can stay as it is."""
    if not config.model.init:
        raise DllmError(f"{need}; set model.init to a converted checkpoint")
    if config.model.adapt:
        raise DllmError(f"{need} as it is; leave out model.adapt, or train all weights")


def _stored(model: ModelConfig, weights: Weights) -> Iterator[tuple[str, Any]]:
    """Trained weights in the dtypes of a checkpoint, one by one."""
    specs = param_specs(model)
    return ((name, x.astype(specs[name].stored_dtype(model.dtype))) for name, x in weights.items())


def _loaded(folder: Path, model: ModelConfig, shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
    """A checkpoint's parameters as float32; biases that it lacks, where `model` was adapted from it, are 0."""
    found = checkpoint.load_params(folder, dtype="float32", shardings=shardings)
    lacking = {name: x for name, x in abstract_params(model, "float32", shardings).items() if name not in found}
    return found | {name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in lacking.items()}


def frozen_model(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> dict[str, jax.Array]:
    """The parameters of a model that stays as it is, in the dtype of computation."""
    folder = checkpoint.find(config.model.init)
    return checkpoint.load_params(folder, dtype=config.compute.dtype, shardings=param_shardings(model, mesh))


def provenance(config: TrainConfig, steps: int) -> dict[str, Any]:
    """What a result keeps of how it was trained."""
    return {"trained": {"steps": steps, "weights": config.checkpoint.weights, "init": config.model.init}}
