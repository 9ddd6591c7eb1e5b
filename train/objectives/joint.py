"""The joint objective of models that are read causally and draft blocks (Nemotron-Labs-Diffusion, arXiv 2607.05722):
`python -m train joint`.

Each row runs twice: as it is and causally, which learns the next tokens, and noised, in blocks that see themselves and
the row as it is before them, as in `train/objectives/block_diffusion.py`:

    loss = weight * sum over masked targets of - log p(token) / p  /  their number
           + next_token * sum over targets of - log p(token | all before it)  /  their number

with p the probability of being masked, drawn for each row.

With `objective.draft_adapter` low-rank adapters alone are trained, for drafts: they are on in the noised row, whose
blocks are masked but for their first token, as self-speculation drafts them, and off in the row as it is.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser
from train.config import TrainConfig
from train.losses import Batch, Mean, Means, cross_entropies
from train.objectives.base import Passes, check_annealing, check_whole_blocks
from train.objectives.block_diffusion import (
    BlockDiffusion,
    BlockDiffusionPart,
    BlockLoss,
    Noise,
    NoisyCopies,
    corrupt_copies,
)
from train.settings import setting
from train.trainable import Trainable
from train.vocabulary import head_sums


@dataclasses.dataclass(frozen=True)
class JointPart(BlockDiffusionPart):
    """The loss of `python -m train joint`. Published training (the report's; 0.3 was the best of 0.1 to 1) is nothing
    changed.

    Attributes:
        noise: draw the probability of being masked for each block, or one for each row.
        loss: "bound" counts a masked position 1 / p times, "mean" once.
        weight: of the diffusion loss.
        next_token: weight of the causal loss.
        draft_adapter: train the adapters that are on where the model drafts, and nothing else; needs `lora.rank`.
            `python -m convert draft-adapter` puts them into the model's checkpoint.
    """

    noise: Noise = "sequence"
    loss: BlockLoss = "bound"
    weight: float = setting(0.3, at_least=0)
    next_token: float = setting(1.0, at_least=0)
    draft_adapter: bool = False

    def __post_init__(self) -> None:
        if self.in_flight > 1:
            raise DllmError("a model that is read causally drafts one block at a time; leave out objective.in_flight")
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class JointConfig(TrainConfig):
    """A run of `python -m train joint`."""

    objective: JointPart = dataclasses.field(default_factory=JointPart)
    command: Literal["joint"] = "joint"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_annealing(self.objective.anneal_attention, self.steps)


@dataclasses.dataclass(frozen=True)
class Joint(BlockDiffusion):
    """The objective with its settings."""

    about = "train a model that is read causally and drafts blocks (Nemotron-Labs-Diffusion)"
    config = JointConfig  # type: ignore[assignment]
    routes = packs = False

    settings: JointPart

    def fit_model(self, model: ModelConfig, config: TrainConfig) -> ModelConfig:
        """The model in the blocks that it is trained in."""
        if not model.has_causal_context:
            raise DllmError(
                f"a {model.family} model is not read causally and in blocks; set model.adapt to nemotron-diffusion-3b, "
                "which makes it one"
            )
        length = self.settings.block_length or model.block_length
        assert length is not None
        check_whole_blocks(config.data, length)
        if model.mask_id is None:
            raise DllmError(f"a {model.family} model has no mask token and cannot be trained; set model.config.mask_id")
        if self.settings.draft_adapter and not config.lora.rank:
            raise DllmError("objective.draft_adapter trains adapters, and lora.rank is 0; set it, to 128 as published")
        self.check_router(model, config)
        return model.replace(block_length=length)

    def passes(self, trained: Trainable) -> Passes:
        """As of block diffusion, and the head also for the clean row."""
        layers, attention, head = super().passes(trained)
        return Passes(layers, attention, head + trained.passes)

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> NoisyCopies:
        settings = self.settings
        if not settings.draft_adapter:
            return corrupt_copies(key, batch, in_blocks(denoiser), settings)
        noised = corrupt_copies(key, batch, in_blocks(denoiser), dataclasses.replace(settings, low=1.0, high=1.0))
        block_length = denoiser.config.block_length
        assert block_length is not None
        seed = jnp.arange(noised.tokens.shape[-1]) % block_length == 0
        inputs = jnp.where(seed, noised.tokens[..., None, :], noised.inputs)
        return noised._replace(inputs=inputs, weights=jnp.where(seed, 0.0, noised.weights))

    def means(self, denoiser: Denoiser, base: Denoiser, noised: NoisyCopies, **options: Any) -> Means:
        """Reports both losses without their weights, and the plain mean cross entropy of masked positions, in nats."""
        return super().means(in_blocks(denoiser), in_blocks(base), noised, **options)

    def reader(self, denoiser: Denoiser, base: Denoiser) -> Denoiser:
        return base if self.settings.draft_adapter else denoiser

    def visible_to_clean(self, noised: NoisyCopies) -> jax.Array:
        """All before each position and itself."""
        until = jnp.arange(noised.tokens.shape[1], dtype=jnp.int32) + 1
        return jnp.minimum(until, noised.lengths[:, None])

    def diffusion_mean(self, total: jax.Array, learned: jax.Array, noised: NoisyCopies) -> Mean:
        return Mean.of(total, learned)

    def with_clean_loss(
        self,
        loss: Mean,
        metrics: Means,
        denoiser: Denoiser,
        hidden: jax.Array,
        noised: NoisyCopies,
        groups: int,
        sharding: NamedSharding | None,
    ) -> tuple[Mean, Means]:
        if self.settings.draft_adapter:
            return loss, metrics
        weights = noised.targets[:, 1:].astype(jnp.float32)
        sum_up = functools.partial(head_sums, chunk=self.settings.chunk, groups=groups, sharding=sharding)
        total, _ = sum_up(cross_entropies, (denoiser,), (hidden[:, :-1], noised.tokens[:, 1:]), weights)
        next_token = Mean.of(total, jnp.sum(noised.targets))
        both = Mean(self.settings.weight * loss.total, loss.weight).plus(self.settings.next_token * next_token.value)
        return both, {**metrics, "diffusion": loss, "next_token": next_token}


def in_blocks(denoiser: Denoiser) -> Denoiser:
    """The model as one of block diffusion, as which its noised rows run."""
    return dataclasses.replace(denoiser, config=denoiser.config.replace(attention="block"))
