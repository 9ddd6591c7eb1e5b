"""What an objective is: the settings of its command, what it asks of the model, what it trains, and its loss."""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
from jax.sharding import NamedSharding

from dllm_jax.config import ModelConfig
from dllm_jax.denoiser import Denoiser
from dllm_jax.errors import DllmError
from dllm_jax.transformer import RematPolicy
from train.config import DataPart, TrainConfig
from train.losses import Batch, Metrics, Noised, diffusion_loss
from train.trained import Trained, whole_or_adapters


class Passes(NamedTuple):
    """How many times a step does the matrix products of a forward, backward passes included.

    Attributes:
        layers: those of the layers' weights.
        attention: those of queries, keys and values.
        head: those of the vocabulary head.
    """

    layers: int
    attention: int
    head: int


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """What a command trains for. A new one is a file in this folder and a name in `OBJECTIVES`.

    Attributes:
        about: what the command does, in a few words.
        config: class of its settings, which name the command.
        trajectories: whether it learns from trajectories alone.
        settings: the table `objective`.
    """

    about: ClassVar[str]
    config: ClassVar[type[TrainConfig]]
    trajectories: ClassVar[bool] = False

    settings: Any

    @classmethod
    def of(cls, config: Any) -> Self:
        """The objective of a run with settings of the class `config`."""
        return cls(config.objective)

    def fitted(self, model: ModelConfig, config: Any) -> ModelConfig:
        """The model as it is trained.

        Raises:
            DllmError: for a model that the command cannot train.
        """
        if model.attention == "causal":
            advice = "train it by python -m train autoregressive"
            raise DllmError(f"a {model.family} model sees only what is before; {advice}")
        if model.attention == "canvas":
            raise DllmError(f"a {model.family} model cannot be trained here; samplers run it")
        if model.mask_id is None:
            raise DllmError(f"a {model.family} model has no mask token and cannot be trained; set model.config.mask_id")
        return model

    def trained(self, config: Any, model: ModelConfig) -> Trained:
        """What is trained: the whole model, or adapters where `lora.rank` says so.

        Raises:
            DllmError: when there is no model where one must be frozen.
        """
        return whole_or_adapters(config, model)

    def passes(self, trained: Trained) -> Passes:
        """What a step computes; gradients of frozen weights do not count."""
        return Passes(trained.passes, 3 if trained.passes > 1 else 1, trained.passes)

    def still(self) -> Any:
        """The settings under which rows are looked at that are not learned from: nothing left out, and what varies
        least. None for an objective that is no loss of rows by themselves, whose runs have no held-out loss."""
        return self.settings

    @abc.abstractmethod
    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> Any:
        """A noised batch: a tuple of arrays with the batch's leading axes; the denoiser's parameters are not read."""

    @abc.abstractmethod
    def loss(
        self,
        learner: Any,
        base: Denoiser,
        noised: Any,
        /,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """The loss of a noised batch [B, ...] and what is reported, the loss among it.

        Args:
            learner: what is trained: a `Denoiser`, or an `Indicator`.
            base: the frozen model under adapters or beside an indicator; without either it has no parameters.
            groups, remat, sharding: as in `train.losses.diffusion_loss`.
        """


class CrossEntropy(Objective):
    """An objective whose loss is `diffusion_loss` of what its `corrupt` has weighed; settings have a `chunk`."""

    def loss(
        self,
        denoiser: Denoiser,
        base: Denoiser,
        noised: Noised,
        /,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """As `Objective`."""
        chunk = self.settings.chunk
        losses = diffusion_loss(denoiser, noised, chunk=chunk, groups=groups, remat=remat, sharding=sharding)
        return losses.loss, losses._asdict()


def check_whole_blocks(data: DataPart, block_length: int) -> None:
    """Raises DllmError where rows of `data.length`, or of multiples of `data.bucket`, are no whole number of a model's
    blocks."""
    for name, length in (("length", data.length), ("bucket", data.bucket)):
        if rest := length % block_length:
            whole = length - rest + block_length
            raise DllmError(f"data.{name} {length} is no whole number of blocks of {block_length}; set it to {whole}")
