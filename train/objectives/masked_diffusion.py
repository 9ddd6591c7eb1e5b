"""The masked-diffusion objective of LLaDA (arXiv 2502.09992, equations 3 and 5, algorithms 1 and 2).

Per row t ~ U(eps, 1), every target position is masked with probability t, and the row's loss is the sum of the masked
positions' cross entropies over t and over the number of targets; the loss is the mean over rows. Pre-training targets
every position, SFT the answer (its end-token padding included). Dream (arXiv 2508.15487) differs by the shift alone,
which the `Denoiser` undoes: the first position of a shifted family has no predictor, is never masked and carries no
loss.

With `smoothing`, masks carry what a first forward expects in their place, as in iteration smoothing (dInfer, arXiv
2510.08666): without that a model meets soft inputs at sampling alone.

A row's loss times its number of targets is the estimate of -log p by `samplers.likelihood.estimators.masked_loss`, with
t in the place of the share of masked tokens.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser
from train.config import Kind, TrainConfig
from train.losses import (
    Batch,
    Noised,
    annealed_ahead,
    example_weights,
    expected_embeddings,
    hidden_states,
    position_draws,
)
from train.objectives.base import CrossEntropy, Passes, check_annealing
from train.settings import setting
from train.trainable import Trainable

_SOFT, _DOCUMENTS = 1, 2  # of the noise's key, for the weights of soft inputs and for documents


@dataclasses.dataclass(frozen=True)
class MaskedDiffusionPart:
    """The loss of `python -m train masked-diffusion`.

    Attributes:
        kind: "sft" never masks the prompt; "pretrain" treats it as the rest of the document.
        eps: least mask probability; t ~ U(eps, 1) per row.
        stratified: spread the t of a batch evenly over (eps, 1) instead of drawing them independently; each is still
            uniform, the loss has the same mean and varies less.
        smoothing: largest weight of soft inputs, such as the 0.3 of `samplers.Smoothing`; 0 has none. Every row draws
            its own from U(0, smoothing), and a step takes one forward more, whose predictions have no gradient.
        chunk: positions of a device whose logits exist at once, for large vocabularies; 0 computes the logits of all
            positions.
        anneal_attention: steps from causal attention to the model's, for models that were autoregressive: at step t a
            position sees, besides all before it and itself, the next t / anneal_attention of what it sees in the end.
            So its view grows from the left. (DiffuLLaMA, arXiv 2410.17891, shows random later positions instead.) Of
            later steps, of held-out rows and with 0 all is seen.
    """

    kind: Kind = "sft"
    eps: float = setting(1e-3, at_least=1e-6, at_most=1)
    stratified: bool = False
    smoothing: float = setting(0.0, at_least=0, at_most=1)
    chunk: int = setting(0, at_least=0)
    anneal_attention: int = setting(0, at_least=0)


@dataclasses.dataclass(frozen=True)
class MaskedDiffusionConfig(TrainConfig):
    """A run of `python -m train masked-diffusion`."""

    objective: MaskedDiffusionPart = dataclasses.field(default_factory=MaskedDiffusionPart)
    command: Literal["masked-diffusion"] = "masked-diffusion"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_annealing(self.objective.anneal_attention, self.steps)


def mask_probabilities(key: jax.Array, rows: int, eps: float, *, stratified: bool = False) -> jax.Array:
    """t ~ U(eps, 1) for each row, [rows] float32: (1 - eps) u + eps with u ~ U(0, 1).

    Args:
        stratified: u_i = (u + i / rows) mod 1 of a single u, in random order: each is uniform by itself, together they
            cover the interval (Kingma et al., arXiv 2107.00630, appendix I.1).
    """
    if stratified:
        first, order = jax.random.split(key)
        u = (jax.random.uniform(first) + jnp.arange(rows, dtype=jnp.float32) / rows) % 1.0
        u = jax.random.permutation(order, u)
    else:
        u = jax.random.uniform(key, (rows,))
    return (1.0 - eps) * u + eps


def corrupt(
    key: jax.Array,
    batch: Batch,
    denoiser: Denoiser,
    *,
    eps: float = 1e-3,
    stratified: bool = False,
    kind: Kind = "sft",
) -> Noised:
    """The forward process: masks each row's targets independently with the row's probability, or of rows that hold
    several documents with each document's.

    The draw of a row depends on the key and on its number in the batch, not on how the batch is divided into leading
    axes or devices.

    Args:
        batch: with any leading axes.
        denoiser: for the mask token and the positions that have no predictor; its parameters are not read.
        kind: of "sft" each document counts alike, of "pretrain" each row.
    """
    length = batch.tokens.shape[-1]
    shape, rows = batch.lengths.shape, batch.lengths.size
    row_key, token_key = jax.random.split(key)
    probability = mask_probabilities(row_key, rows, eps, stratified=stratified).reshape(shape)[..., None]
    if batch.documents is not None:
        own = position_draws(jax.random.fold_in(key, _DOCUMENTS), rows, length).reshape(batch.tokens.shape)
        turn = jnp.take_along_axis(own, batch.documents.first, axis=-1)  # of the circle, where a turn is uniform too
        probability = eps + (probability - eps + (1.0 - eps) * turn) % (1.0 - eps)
    draws = position_draws(token_key, rows, length).reshape(batch.tokens.shape)
    targets = batch.targets & (batch.places >= denoiser.min_prompt_length)
    masked = targets & (draws < probability)
    weights, examples = example_weights(batch, targets, kind)
    weights = jnp.where(masked, weights / probability, 0.0)
    inputs = jnp.where(masked, denoiser.mask_id, batch.tokens)
    return Noised(inputs, batch.tokens, weights, batch.lengths, None, batch.documents, examples, probability)


def soft_inputs(denoiser: Denoiser, noised: Noised, *, chunk: int = 0, **options: Any) -> jax.Array:
    """What smoothing adds to the embeddings of masks after one forward: [B, T, D] in the model's dtype, no gradient.

    Args:
        chunk: positions of a row whose logits exist at once; 0 for all.
        options: of `train.losses.hidden_states`.
    """
    assert noised.alpha is not None
    denoiser, first = lax.stop_gradient(denoiser), denoiser.min_prompt_length
    options |= {"documents": noised.documents, "ahead": noised.ahead}
    hidden = hidden_states(denoiser, noised.inputs, noised.lengths, **options)
    mixed = expected_embeddings(denoiser, hidden, chunk=chunk) * noised.alpha[:, None, None]
    masked = noised.weights[:, first:, None] > 0
    return jnp.pad(jnp.where(masked, mixed, 0).astype(denoiser.dtype), ((0, 0), (first, 0), (0, 0)))


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion(CrossEntropy):
    """The objective with its settings."""

    about = "train a masked diffusion model"
    config = MaskedDiffusionConfig
    packs = True

    settings: MaskedDiffusionPart

    def fit_model(self, model: ModelConfig, config: TrainConfig) -> ModelConfig:
        if model.has_blocks:
            advice = "train it by python -m train block-diffusion"
            raise DllmError(f"a {model.family} model is one of block diffusion; {advice}")
        return super().fit_model(model, config)

    def evaluation_settings(self) -> MaskedDiffusionPart:
        """With the t of a batch spread evenly."""
        return dataclasses.replace(self.settings, stratified=True)

    def passes(self, trained: Trainable) -> Passes:
        found = super().passes(trained)
        return Passes(*(count + 1 for count in found)) if self.settings.smoothing else found

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> Noised:
        return self.corrupt_heldout(key, batch, denoiser)._replace(level=None)

    def corrupt_heldout(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> Noised:
        settings = self.settings
        noised = corrupt(key, batch, denoiser, eps=settings.eps, stratified=settings.stratified, kind=settings.kind)
        if not self.settings.smoothing:
            return noised
        draws = jax.random.uniform(jax.random.fold_in(key, _SOFT), noised.lengths.shape)
        return noised._replace(alpha=self.settings.smoothing * draws)

    def at_step(self, noised: Noised, step: jax.Array) -> Noised:
        return noised._replace(ahead=annealed_ahead(noised.lengths, step, self.settings.anneal_attention))

    def soften(self, denoiser: Denoiser, noised: Noised, **options: Any) -> jax.Array | None:
        if noised.alpha is None:
            return None
        return soft_inputs(denoiser, noised, chunk=self.settings.chunk, **options)
