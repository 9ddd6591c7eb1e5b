"""AdamW or Muon with warm-up, a schedule and clipping, and the moving average of the weights; all of it optax's."""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from dllm_jax.errors import DllmError
from train.config import OptimizerPart

_MUON_MOMENTUM = 0.95
_MUON_RMS = 0.2  # root mean square of an update, in learning rates: that of AdamW's updates


def learning_rate(part: OptimizerPart, steps: int) -> optax.Schedule:
    """Linear warm-up from 0 to lr, then `part.schedule`, down to lr * final_ratio at the last step."""
    start, end, rest = part.lr if part.warmup == 0 else 0.0, part.lr * part.final_ratio, max(steps - part.warmup, 1)
    if part.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(start, part.lr, part.warmup, part.warmup + rest, end)
    stays, falls = optax.constant_schedule(part.lr), max(round(part.decay * steps), 1)
    after, boundaries = {
        "linear": ([optax.linear_schedule(part.lr, end, rest)], []),
        "constant": ([stays], []),
        "wsd": ([stays, optax.linear_schedule(part.lr, end, falls)], [steps - falls]),
    }[part.schedule]
    warmup = optax.linear_schedule(start, part.lr, max(part.warmup, 1))
    return optax.join_schedules([warmup, *after], [part.warmup, *boundaries])


def frozen_names(trained: Iterable[str], patterns: Iterable[str]) -> frozenset[str]:
    """The trained arrays that stay as they are (`model.freeze`).

    Raises:
        DllmError: for a pattern that matches none, and where nothing else is left.
    """
    names, found = list(trained), set[str]()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise DllmError(f"model.freeze: {pattern!r} matches nothing that is trained, such as {names[0]}")
        found |= set(matched)
    if found >= set(names):
        raise DllmError("model.freeze matches everything that is trained; leave something to be trained")
    return frozenset(found)


def make_optimizer(
    part: OptimizerPart, steps: int, frozen: frozenset[str] = frozenset()
) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (arXiv 1711.05101) or Muon; norms and biases do not decay.

    Muon orthogonalises the momentum of the matrices between embedding and head (Jordan, 2024), with updates of AdamW's
    size (Liu et al., arXiv 2502.16982), so that AdamW's learning rates hold; AdamW changes everything else. The moments
    of both are kept in `part.moments` between steps.

    Args:
        frozen: names of parameters that stay as they are; no moments are kept of them.
    """
    rate = learning_rate(part, steps)
    if part.name == "muon":
        chosen = optax.contrib.muon(
            rate,
            beta=_MUON_MOMENTUM,
            weight_decay=part.weight_decay,
            adam_b1=part.b1,
            adam_b2=part.b2,
            adam_weight_decay=part.weight_decay,
            eps=part.eps,
            muon_weight_dimension_numbers=_muon_axes,
            consistent_rms=_MUON_RMS,
        )
    else:
        chosen = optax.adamw(
            rate, b1=part.b1, b2=part.b2, eps=part.eps, weight_decay=part.weight_decay, mask=decay_mask
        )
    if part.moments != "float32":
        chosen = _round_moments(part.moments, chosen)
    chosen = optax.chain(optax.clip_by_global_norm(part.clip), chosen) if part.clip else chosen
    if not frozen:
        return chosen
    which = lambda params: {name: "frozen" if name in frozen else "trained" for name in params}
    return optax.partition({"trained": chosen, "frozen": optax.set_to_zero()}, which)


def _round_moments(dtype: str, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same, computed in float32, with all moments rounded to `dtype` between steps (optax's `mu_dtype` rounds the
    first moments alone)."""

    def cast(state: Any, to: str) -> Any:
        moment = lambda path: isinstance(path[-1], jax.tree_util.DictKey)  # by its parameter's name; Muon has constants
        return jax.tree_util.tree_map_with_path(lambda path, x: x.astype(to) if moment(path) else x, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, cast(state, "float32"), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(inner.init(params), dtype), update)


def _muon_axes(params: Mapping[str, Any]) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
    """Input and output axes of what Muon changes, None of what AdamW does, which optax may have taken out of `params`.

    Experts [E, D, F] are a batch of matrices.
    """
    matrix = lambda name, x: name.startswith("layers.") and _decays(name, x)
    axes = lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
    return {name: axes(x) if matrix(name, x) else None for name, x in params.items()}


def decay_mask(params: Mapping[str, jax.Array]) -> dict[str, bool]:
    """Which parameters decay: those with two axes or more. A bias per expert also has two; its name excludes it."""
    return {name: _decays(name, x) for name, x in params.items()}


def _decays(name: str, x: Any) -> bool:
    return not isinstance(x, optax.MaskedNode) and x.ndim > 1 and not name.endswith((".bias", ".scale"))


def update_average(
    average: Mapping[str, jax.Array], params: Mapping[str, jax.Array], step: jax.Array, decay: float
) -> dict[str, jax.Array]:
    """average + (1 - d) (params - average) with d = min(decay, (1 + step) / (10 + step)); step counts from 0."""
    step = step.astype(jnp.float32)
    d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return dict(optax.incremental_update(params, average, 1.0 - d))
