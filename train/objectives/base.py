"""What an objective is: the settings of its command, its requirements on the model, what it trains, and its loss."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.moe import Routing
from dllm_jax.models.transformer import RematPolicy
from train.config import DataPart, RouterPart, TrainConfig
from train.losses import Mean, Means, Metrics, Noised, diffusion_loss, mean_values, router_losses
from train.trainable import Trainable, whole_or_adapters


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


class Feed(Protocol):
    """Batches that are made of a run's state, and not of rows of data alone.

    Attributes:
        round: steps whose batches are made of one state, which a run has to start from: so states are kept, and runs
            end, only between two rounds.
        metrics: numbers about the last batches, reported with those of the steps.
    """

    @property
    def round(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...

    def check_start(self, step: int, position: int) -> None:
        """Raises DllmError where a run cannot continue after `step` steps at a position of the data, because no round
        begins there."""
        ...

    def __call__(self, step: int, position: int, state: Any) -> Any:
        """The batch of step `step` (from 0) at a position of the data, [accumulate, rows, ...] as `Objective.corrupt`
        takes it, from the state before that step; only a round's first batch uses the state."""
        ...


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """What a command trains for. A new one is a file in this folder and a name in `OBJECTIVES`.

    Attributes:
        about: what the command does, in a few words.
        config: class of its settings, which name the command.
        trajectories: whether it learns from trajectories alone.
        routes: whether its loss adds those of the routers, by `counted_positions` and `add_router_losses`.
        packs: whether it takes rows of several documents (`data.pack`).
        settings: the table `objective`.
        router: the table `router`.
    """

    about: ClassVar[str]
    config: ClassVar[type[TrainConfig]]
    trajectories: ClassVar[bool] = False
    routes: ClassVar[bool] = False
    packs: ClassVar[bool] = False

    settings: Any
    router: RouterPart = dataclasses.field(default_factory=RouterPart, kw_only=True)

    @property
    def in_flight(self) -> int:
        """Blocks of the model that are learned together; documents begin at multiples of them in a row."""
        return 1

    @classmethod
    def of(cls, config: Any) -> Self:
        """The objective of a run with settings of the class `config`."""
        return cls(config.objective, router=config.router)

    def fit_model(self, model: ModelConfig, config: Any) -> ModelConfig:
        """The model as it is trained.

        Raises:
            DllmError: for a model that the command cannot train.
        """
        if model.is_causal:
            advice = (
                "set model.adapt to what it shall become, such as dream-7b-base, or train it by python -m train "
                "autoregressive"
            )
            raise DllmError(f"a {model.family} model is causal; {advice}")
        if model.has_causal_context:
            raise DllmError(f"a {model.family} model is read causally and in blocks; train it by python -m train joint")
        if model.has_canvas:
            raise DllmError(f"a {model.family} model has a canvas; train it by python -m train uniform-diffusion")
        if model.mask_id is None:
            raise DllmError(f"a {model.family} model has no mask token and cannot be trained; set model.config.mask_id")
        self.check_router(model, config)
        return model

    def check_router(self, model: ModelConfig, config: TrainConfig) -> None:
        """Raises DllmError where the table `router` sets losses that the objective or the model does not have."""
        if self.router == RouterPart():
            return
        if not self.routes:
            raise DllmError(f"python -m train {config.command} adds no losses of routers; leave out the table router")
        if model.experts is None:
            raise DllmError(f"a {model.family} model has no experts to balance; leave out the table router")
        if model.experts.score != "softmax":
            raise DllmError(
                f"the router of a {model.family} model has no softmax, and is balanced by its bias, which stays as it "
                "is; leave out the table router"
            )

    def trainable(self, config: Any, model: ModelConfig) -> Trainable:
        """What is trained: the whole model, or adapters where `lora.rank` is set.

        Raises:
            DllmError: when there is no model where one must be frozen.
        """
        return whole_or_adapters(config, model)

    def passes(self, trained: Trainable) -> Passes:
        """What a step computes; gradients of frozen weights do not count."""
        return Passes(trained.passes, 3 if trained.passes > 1 else 1, trained.passes)

    def counted_positions(self, lengths: jax.Array, width: int) -> jax.Array | None:
        """Which of `width` positions of rows of these lengths [B] the routers' losses are of, [B, width] bool: those
        that count. None without such losses."""
        return None if self.router == RouterPart() else jnp.arange(width) < lengths[:, None]

    def add_router_losses(self, loss: Mean, metrics: Means, routing: Routing | None) -> Means:
        """A loss and other metrics, with the routers' losses added if there are any."""
        if routing is None:
            return {"loss": loss, **metrics}
        more, reported = router_losses(routing, self.router.balance, self.router.z)
        loss = loss.plus(more)
        of_routers = {name: Mean.of(x * loss.weight, loss.weight) for name, x in reported.items()}
        return {"loss": loss, **metrics, **of_routers}

    def feed(self, config: Any, parts: Any, stepper: Any, frozen: Mapping[str, jax.Array]) -> Feed | None:
        """What makes batches of a run's states; None where they are rows of the data.

        Args:
            parts: of `train.setup`.
            stepper: of `train.step`.
            frozen: the arrays that are not trained.

        Raises:
            DllmError: for settings and data that do not fit each other.
        """
        return None

    def evaluation_settings(self) -> Any:
        """The settings for the loss of held-out rows: without dropout, and with the least variance.

        None for an objective that has no loss of single rows, whose runs have no held-out loss.
        """
        return self.settings

    @abc.abstractmethod
    def corrupt(self, key: jax.Array, batch: Any, denoiser: Denoiser) -> Any:
        """A noised batch: a tuple of arrays with the batch's leading axes; the denoiser's parameters are not read.

        Args:
            batch: a `Batch`, or what the objective's `feed` makes.
        """

    def at_step(self, noised: Any, step: jax.Array) -> Any:
        """A noised batch as step `step` (from 0) learns from it; held-out rows are measured without."""
        return noised

    def corrupt_heldout(self, key: jax.Array, batch: Any, denoiser: Denoiser) -> Any:
        """`corrupt` of rows that are not learned from, of which `means` may report more."""
        return self.corrupt(key, batch, denoiser)

    def loss(self, *arguments: Any, **options: Any) -> tuple[jax.Array, Metrics]:
        """The loss, scalar float32, and all that is reported, of the arguments of `means`."""
        values = mean_values(self.means(*arguments, **options))
        return values["loss"], values

    @abc.abstractmethod
    def means(
        self,
        learner: Any,
        base: Denoiser,
        noised: Any,
        /,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> Means:
        """What is reported of a noised batch [B, ...], or of a part of one (`optimizer.accumulate`): "loss", which is
        learned, and others.

        Args:
            learner: what is trained: a `Denoiser`, or an `Indicator`.
            base: the frozen model under adapters or an indicator; without either it has no parameters.
            groups, remat, sharding: as in `train.losses.diffusion_loss`.
        """


class CrossEntropy(Objective):
    """An objective whose loss is `diffusion_loss` of what its `corrupt` has weighed; settings have a `chunk`."""

    routes = True

    def soften(self, denoiser: Denoiser, noised: Noised, **options: Any) -> jax.Array | None:
        """What is added to the embeddings of the inputs, [B, T, D]; None for nothing. Options are those of
        `train.losses.hidden_states`."""
        return None

    def means(
        self,
        denoiser: Denoiser,
        base: Denoiser,
        noised: Noised,
        /,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> Means:
        place: Any = {"remat": remat, "sharding": sharding}
        counted = self.counted_positions(noised.lengths, noised.tokens.shape[1])
        options: Any = {"chunk": self.settings.chunk, "groups": groups, **place}
        found = diffusion_loss(
            denoiser, noised, counted=counted, soft=self.soften(denoiser, noised, **place), **options
        )
        return self.add_router_losses(
            found.loss, {"cross_entropy": found.cross_entropy, **found.by_level}, found.routing
        )


def check_annealing(steps: int, run: int) -> None:
    """Raises DllmError where a run ends before its attention is the model's (`objective.anneal_attention`)."""
    if steps > run:
        raise DllmError(
            f"objective.anneal_attention {steps} is longer than the run of {run} steps, whose model would be sampled "
            f"with more attention than it was trained with; set it to {run} or less"
        )


def check_whole_blocks(data: DataPart, block_length: int) -> None:
    """Raises DllmError where rows of `data.length`, or of multiples of `data.bucket`, are no whole number of a model's
    blocks."""
    for name, length in (("length", data.length), ("bucket", data.bucket)):
        if rest := length % block_length:
            whole = length - rest + block_length
            raise DllmError(f"data.{name} {length} is no whole number of blocks of {block_length}; set it to {whole}")
