"""How the losses of block diffusion are run: cases of kind "block_diffusion_loss" of LLaDA2, SDAR and Fast-dLLM v2."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from golden_base import Assets, Case

import dllm_jax
from dllm_jax.families import find_family
from train.objectives.block_diffusion import BlockDiffusion, BlockDiffusionPart, NoisyCopies


def run_loss(case: Case, assets: Assets) -> None:
    """The loss, the norms of its gradient by the hub's tensors, and the entropy of right predictions."""
    denoiser = assets.model(case["checkpoint"]).denoiser.in_blocks(case["args"]["block_length"])
    settings = BlockDiffusionPart(
        loss="bound" if "mask_probability" in case["args"] else "mean",
        complementary=case["args"].get("complementary", False),
    )
    noised, expected = noised_of(case, denoiser, settings), case["expected"]
    (loss, metrics), gradient = _loss(denoiser.config, denoiser.params, noised, settings)
    np.testing.assert_allclose(loss, expected["loss"], atol=2e-6)
    np.testing.assert_allclose(metrics["loss"], loss)
    found = norms(gradient, denoiser.config)
    for name, norm in expected["grad_norms"].items():
        np.testing.assert_allclose(found[name], norm, rtol=5e-5, err_msg=name)
    if "confidence_loss" in expected:
        beta = BlockDiffusionPart(complementary=settings.complementary, confidence=2.0)
        loss, metrics = jax.jit(BlockDiffusion(beta).loss)(denoiser, denoiser, noised)
        np.testing.assert_allclose(metrics["entropy"], expected["confidence_loss"], atol=2e-6)
        np.testing.assert_allclose(loss, expected["loss"] + 2.0 * expected["confidence_loss"], atol=5e-6)


def noised_of(case: Case, denoiser: dllm_jax.Denoiser, settings: BlockDiffusionPart) -> NoisyCopies:
    """The case's rows, of which twins follow each other."""
    tokens, noisy = jnp.asarray(case["input_ids"]), jnp.asarray(case["noisy_input_ids"])
    masked, copies = noisy == denoiser.mask_id, settings.copies
    weights = jnp.where(masked, 1.0 / case["args"].get("mask_probability", 1.0), 0.0)
    labels = np.asarray(case["labels"])
    assert (np.asarray(tokens) == labels)[np.asarray(masked)].all()
    by_row = lambda x: x.reshape(-1, copies, x.shape[1])
    return NoisyCopies(
        by_row(noisy),
        by_row(tokens)[:, 0],
        by_row(weights),
        by_row(jnp.asarray(labels >= 0))[:, 0],
        jnp.full(len(tokens) // copies, tokens.shape[1]),
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def _loss(config: dllm_jax.ModelConfig, params: dict, noised: NoisyCopies, settings: BlockDiffusionPart) -> Any:
    loss = lambda params: BlockDiffusion(settings).loss(
        dllm_jax.Denoiser(config, params), dllm_jax.Denoiser(config, {}), noised
    )
    return jax.value_and_grad(loss, has_aux=True)(params)


def norms(gradient: dict, config: dllm_jax.ModelConfig) -> dict[str, float]:
    """Norms of the gradient by the hub's tensors. LLaDA2's code gives the embedding of the padding token, which is the
    end token, none: a habit of `torch.nn.Embedding` that training here does not have."""
    if config.family == "llada2":
        table = gradient["embed.embedding"]
        gradient = gradient | {"embed.embedding": table.at[config.pad_id].set(0.0)}
    squares: Counter[str] = Counter()
    for slot in find_family(config.family).layouts[0].slots(config):
        squares[slot.tensor] += sum(float(jnp.sum(gradient[slot.ours][piece] ** 2)) for piece in slot.pieces)
    return {name: square**0.5 for name, square in squares.items()}
