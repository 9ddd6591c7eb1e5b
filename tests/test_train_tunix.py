"""`train.tunix` against Tunix's contract: its fields, shapes and formula, and its own types where it is installed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses
from flax import nnx
from test_train_loss import denoiser_of, make_batch
from train_toys import DREAM, LLADA

from train.losses import diffusion_loss
from train.objectives.masked_diffusion import corrupt
from train.tunix import DenoiserModule, batch_fields, token_logits, token_loss

FAMILIES = pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])


class TokenBatch(NamedTuple):
    """The fields of Tunix's batch, in its order: a pytree of arrays [B, ...], integers [B, T], weights [B, T]."""

    model_inputs: Any
    target_ids: jax.Array
    loss_weights: jax.Array


def example(config):
    """A denoiser, rows of several lengths that are masked, of which the last only fills the batch up."""
    denoiser, batch = denoiser_of(config), make_batch("sft")
    batch = batch._replace(lengths=batch.lengths.at[-1].set(0), targets=batch.targets.at[-1].set(False))
    return denoiser, corrupt(jax.random.key(2), batch, denoiser, eps=0.1)


def formula(logits, batch):
    """Sum over positions of weight times cross entropy at the same position; float64."""
    logits, weights = np.asarray(logits, np.float64), np.asarray(batch.loss_weights, np.float64)
    of_targets = np.take_along_axis(logits, np.asarray(batch.target_ids)[..., None], axis=2)[..., 0]
    return np.sum(weights * (np.log(np.sum(np.exp(logits), axis=2)) - of_targets))


@FAMILIES
def test_batch_keeps_the_contract(config):
    _, noised = example(config)
    batch = TokenBatch(**batch_fields(noised))
    assert batch.target_ids.ndim == 2 and jnp.issubdtype(batch.target_ids.dtype, jnp.integer)
    assert batch.loss_weights.shape == batch.target_ids.shape and jnp.all(batch.loss_weights >= 0)
    assert jnp.array_equal(batch.loss_weights > 0, noised.inputs == config.mask_id)
    assert all(x.shape[0] == len(batch.target_ids) for x in jax.tree.leaves(batch.model_inputs))


@FAMILIES
def test_formula_on_the_logits_is_the_loss(config):
    denoiser, noised = example(config)
    model, batch = DenoiserModule(denoiser), TokenBatch(**batch_fields(noised))
    logits = token_logits(model, batch.model_inputs)
    assert logits.shape == (*batch.target_ids.shape, config.vocab_size) and logits.dtype == jnp.float32
    total, rows = formula(logits, batch), np.sum(np.asarray(noised.lengths) > 0)
    wanted = diffusion_loss(denoiser, noised).loss
    for chunk in (0, 5):
        loss = token_loss(model, batch, chunk=chunk)
        np.testing.assert_allclose([loss.total, loss.weight], [total, rows], rtol=1e-5)
    np.testing.assert_allclose(total / rows, wanted.value, rtol=1e-5)
    assert rows == len(noised.lengths) - 1 and wanted.value > 0.5


@FAMILIES
def test_gradients_are_those_of_the_denoiser(config):
    denoiser, noised = example(config)
    batch = TokenBatch(**batch_fields(noised))
    found = nnx.jit(nnx.grad(lambda model: token_loss(model, batch).value))(DenoiserModule(denoiser))
    wanted = jax.jit(jax.grad(lambda denoiser: diffusion_loss(denoiser, noised).loss.value))(denoiser)
    for one, other in zip(jax.tree.leaves(nnx.as_pure(found)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert any(jnp.any(x != 0) for x in jax.tree.leaves(wanted))


def test_module_shows_what_an_update_wrote():
    model = DenoiserModule(denoiser_of(LLADA))
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
    assert all(not jnp.any(x) for x in jax.tree.leaves(model.denoiser))


def test_refusals():
    denoiser, noised = example(LLADA)
    with refuses("smoothing"):
        batch_fields(noised._replace(alpha=jnp.ones(4)))
    with refuses("[2, 2, 12]"):
        batch_fields(jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), noised))
    with refuses("causal"):
        DenoiserModule(denoiser_of(LLADA.replace(family="causal", attention="causal", shift=True)))
    with refuses("quantized"):
        DenoiserModule(jax.tree.map(lambda x: x.astype(jnp.int8), denoiser))


@FAMILIES
def test_tunix_takes_them(config):
    diffusion = pytest.importorskip("tunix.diffusion")
    denoiser, noised = example(config)
    model, batch = DenoiserModule(denoiser), diffusion.DiffusionTokenBatch.create(**batch_fields(noised))
    logits = diffusion.compute_diffusion_logits(model, batch, token_logits)
    np.testing.assert_allclose(formula(logits, batch), token_loss(model, batch).total, rtol=1e-5)
