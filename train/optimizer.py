"""AdamW with warm-up, cosine decay and clipping, and the moving average of the weights; all of it optax's."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from train.config import OptimizerPart


def learning_rate(part: OptimizerPart, steps: int) -> optax.Schedule:
    """Linear warm-up from 0 to lr, then a cosine down to lr * final_ratio at the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if part.warmup else part.lr,
        peak_value=part.lr,
        warmup_steps=part.warmup,
        decay_steps=max(steps, part.warmup + 1),
        end_value=part.lr * part.final_ratio,
    )


def make_optimizer(part: OptimizerPart, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (arXiv 1711.05101); vectors, which are norms and biases, do not decay."""
    adamw = optax.adamw(
        learning_rate(part, steps),
        b1=part.b1,
        b2=part.b2,
        eps=part.eps,
        weight_decay=part.weight_decay,
        mask=decayed,
    )
    return optax.chain(optax.clip_by_global_norm(part.clip), adamw) if part.clip else adamw


def decayed(params: Mapping[str, jax.Array]) -> dict[str, bool]:
    """Which parameters decay: those with two axes or more. A bias per expert has two and is told by its name."""
    return {name: x.ndim > 1 and not name.endswith((".bias", ".scale")) for name, x in params.items()}


def update_average(
    average: Mapping[str, jax.Array], params: Mapping[str, jax.Array], step: jax.Array, decay: float
) -> dict[str, jax.Array]:
    """average + (1 - d) (params - average) with d = min(decay, (1 + step) / (10 + step)); step counts from 0."""
    step = step.astype(jnp.float32)
    d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return dict(optax.incremental_update(params, average, 1.0 - d))
