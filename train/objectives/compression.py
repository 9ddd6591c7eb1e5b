"""Trajectory compression (dInfer, arXiv 2510.08666, appendix C.1): `python -m train compression`.

A second stage of fine-tuning on the model's own trajectories. A trajectory of n steps has n + 1 states, s_0 all masked
and s_n the final one. Of each, two states i < j are drawn, every pair equally likely. The model gets s_i and learns the
final tokens of the positions that are masked there and written in s_j:

    loss = mean over rows of the sum over these positions of - log p(final token | s_i)

So it learns to write in one step what took it j - i.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from dllm_jax.models.denoiser import Denoiser
from train.config import Kind, TrainConfig
from train.losses import Batch, Noised
from train.objectives.base import CrossEntropy
from train.settings import setting


@dataclasses.dataclass(frozen=True)
class CompressionPart:
    """The loss of `python -m train compression`.

    Attributes:
        chunk: positions of a device whose logits exist at once; 0 computes the logits of all positions.
    """

    chunk: int = setting(0, at_least=0)

    kind: ClassVar[Kind] = "sft"


@dataclasses.dataclass(frozen=True)
class CompressionConfig(TrainConfig):
    """A run of `python -m train compression`."""

    objective: CompressionPart = dataclasses.field(default_factory=CompressionPart)
    command: Literal["compression"] = "compression"


def draw_states(draws: jax.Array, steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two states i < j of 0 ... steps, each pair equally likely; both 0 where there is no step.

    Args:
        draws: [..., 2] uniform in [0, 1).
        steps: [...] int32, n.

    Returns:
        i and j, [...] int32.
    """
    one = jnp.minimum((draws[..., 0] * (steps + 1)).astype(jnp.int32), steps)
    other = jnp.minimum((draws[..., 1] * steps).astype(jnp.int32), jnp.maximum(steps - 1, 0))
    other += (other >= one) & (steps > 0)  # all states but the first drawn
    return jnp.minimum(one, other), jnp.maximum(one, other)


@dataclasses.dataclass(frozen=True)
class Compression(CrossEntropy):
    """The objective with its settings."""

    about = "train a model to take its own trajectories in fewer steps"
    config = CompressionConfig
    trajectories = True

    settings: CompressionPart

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> Noised:
        """Two states of each trajectory: the earlier one, with weights where the later one has more tokens."""
        assert batch.step is not None
        draws = jax.random.uniform(key, (batch.lengths.size, 2)).reshape(*batch.lengths.shape, 2)
        start, end = draw_states(draws, jnp.max(batch.step, axis=-1) + 1)
        masked = batch.step >= start[..., None]
        targets = masked & (batch.step < end[..., None])
        inputs = jnp.where(masked, denoiser.mask_id, batch.tokens)
        return Noised(inputs, batch.tokens, targets.astype(jnp.float32), batch.lengths)
