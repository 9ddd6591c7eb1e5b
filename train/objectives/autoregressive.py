"""Next-token training of causal models, the verifiers and baselines of diffusion models: `python -m train
autoregressive`.

Every target token is predicted from all tokens before it; the loss is the mean over rows of each row's mean cross
entropy. With kind "sft" the answer is learned, with "pretrain" every token but the first.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser
from train.config import Kind, TrainConfig
from train.losses import Batch, Noised, example_weights
from train.objectives.base import CrossEntropy
from train.settings import setting


@dataclasses.dataclass(frozen=True)
class AutoregressivePart:
    """The loss of `python -m train autoregressive`.

    Attributes:
        kind: "sft" learns the answer, "pretrain" every token but the first.
        chunk: positions of a device whose logits exist at once; 0 computes the logits of all positions.
    """

    kind: Kind = "sft"
    chunk: int = setting(0, at_least=0)


@dataclasses.dataclass(frozen=True)
class AutoregressiveConfig(TrainConfig):
    """A run of `python -m train autoregressive`."""

    objective: AutoregressivePart = dataclasses.field(default_factory=AutoregressivePart)
    command: Literal["autoregressive"] = "autoregressive"


@dataclasses.dataclass(frozen=True)
class Autoregressive(CrossEntropy):
    """The objective with its settings.

    A causal model's raw logits are those of the next token, which the `Denoiser` undoes, and no position sees a later
    one: so it is the masked-diffusion loss of a row in which nothing is masked and every target counts alike.
    """

    about = "train a causal model, for verifiers and baselines"
    config = AutoregressiveConfig
    packs = True

    settings: AutoregressivePart

    def fit_model(self, model: ModelConfig, config: TrainConfig) -> ModelConfig:
        if not model.is_causal:
            raise DllmError(
                f"a {model.family} model has bidirectional attention and cannot be trained token by token; set "
                "model.published to a causal one such as qwen2.5-0.5b"
            )
        self.check_router(model, config)
        return model

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> Noised:
        """Nothing is drawn: weights of the rows as they are."""
        targets = batch.targets & (batch.places >= denoiser.min_prompt_length)
        weights, examples = example_weights(batch, targets, self.settings.kind)
        weights = jnp.where(targets, weights, 0.0)
        return Noised(batch.tokens, batch.tokens, weights, batch.lengths, None, batch.documents, examples)
