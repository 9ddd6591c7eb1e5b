"""A model and masked rows of this library in the form of Tunix's diffusion contracts, for Tunix's trainers.

[Tunix](https://github.com/google/tunix) has in `tunix.diffusion` a batch (`DiffusionTokenBatch`: inputs of the model,
target tokens and a weight for each) and a function from an nnx module and those inputs to logits that are aligned with
the targets (`DiffusionLogitsFn`). What is here has their arguments and fields, and does not import Tunix.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser
from train.losses import Mean, Noised, diffusion_loss


class TokenBatch(Protocol):
    """What `token_loss` reads of a `DiffusionTokenBatch`; see `batch_fields`."""

    @property
    def model_inputs(self) -> Mapping[str, jax.Array]: ...

    @property
    def target_ids(self) -> jax.Array: ...

    @property
    def loss_weights(self) -> jax.Array: ...


class DenoiserModule(nnx.Module):
    """A denoiser as an nnx module: each array is an `nnx.Param`, all of which are trained.

    Raises:
        DllmError: for a model that masked diffusion does not train, and for quantized parameters.
    """

    def __init__(self, denoiser: Denoiser) -> None:
        config = denoiser.config
        if config.is_causal or config.has_causal_context or config.has_canvas or config.has_blocks:
            raise DllmError(f"a {config.family} model is not one of masked diffusion; train it by python -m train")
        if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(denoiser)):
            raise DllmError("quantized parameters cannot be trained; load the model without quantization")
        self.variables = nnx.data(jax.tree.map(nnx.Param, denoiser))

    @property
    def denoiser(self) -> Denoiser:
        """The denoiser with the arrays as they are now."""
        pure: Denoiser = nnx.as_pure(self.variables)
        return pure


def token_logits(model: DenoiserModule, model_inputs: Mapping[str, jax.Array], /) -> jax.Array:
    """A `DiffusionLogitsFn`: aligned logits [B, T, V] float32, entry i scores the token at i.

    Entry 0 of a shifted family has no predictor and repeats entry 1; `train.corrupt` gives it no weight.

    Args:
        model_inputs: "tokens" [B, T] int32 and "lengths" [B] int32, see `batch_fields`.
    """
    return model.denoiser(model_inputs["tokens"], model_inputs["lengths"])


def batch_fields(noised: Noised) -> dict[str, Any]:
    """The arguments of `DiffusionTokenBatch.create` for rows [B, T] that `train.corrupt` masked.

    Returns:
        `model_inputs`, with the masked "tokens" [B, T] int32 and the "lengths" [B] int32; `target_ids` [B, T] int32;
        `loss_weights` [B, T] float32, 1 / (t targets) where masked, else 0.

    Raises:
        DllmError: for rows with soft inputs or several documents, or with other leading axes.
    """
    if noised.alpha is not None:
        raise DllmError("Tunix's batch has no soft inputs; set smoothing to 0")
    if noised.documents is not None:
        raise DllmError("Tunix's batch has one example a row; give rows without documents")
    if noised.inputs.ndim != 2:
        raise DllmError(f"Tunix's batch is [batch, length]; these rows are {list(noised.inputs.shape)}")
    return {
        "model_inputs": {"tokens": noised.inputs, "lengths": noised.lengths},
        "target_ids": noised.tokens,
        "loss_weights": noised.weights,
    }


def token_loss(model: DenoiserModule, batch: TokenBatch, *, chunk: int = 0) -> Mean:
    """The loss of `python -m train masked-diffusion`, as the two arguments of Tunix's `WeightedMetric`: the weighted
    sum of the cross entropies, and the number of rows.

    A loss that divides by the sum of the weights instead has another value: that sum is the number of rows on average
    alone.

    Args:
        batch: of `batch_fields`.
        chunk: positions whose logits exist at once, for large vocabularies; 0 computes the logits of all positions.
    """
    inputs = batch.model_inputs
    noised = Noised(inputs["tokens"], batch.target_ids, batch.loss_weights, inputs["lengths"])
    return diffusion_loss(model.denoiser, noised, chunk=chunk).loss
