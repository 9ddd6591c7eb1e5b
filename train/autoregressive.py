"""Next-token training of causal models, the verifiers and baselines of diffusion models: `python -m train
autoregressive`.

Every target token is predicted from all tokens before it; the loss is the mean over rows of each row's mean cross
entropy. With kind "sft" the answer is learned, with "pretrain" every token but the first.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dllm_jax.denoiser import Denoiser
from train.config import AutoregressivePart
from train.objective import Batch, CrossEntropy, Noised


@dataclasses.dataclass(frozen=True)
class Autoregressive(CrossEntropy):
    """The objective with its settings, see `train.objective.Objective`.

    A causal model's raw logits are those of the next token, which the `Denoiser` undoes, and no position sees a later
    one: so it is the masked-diffusion loss of a row in which nothing is masked and every target counts alike.
    """

    settings: AutoregressivePart

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> Noised:
        """As `Objective`; nothing is drawn."""
        targets = batch.targets & (jnp.arange(batch.tokens.shape[-1]) >= denoiser.min_prompt_length)
        count = jnp.maximum(jnp.sum(targets, axis=-1, keepdims=True), 1)
        return Noised(batch.tokens, batch.tokens, jnp.where(targets, 1.0 / count, 0.0), batch.lengths)
