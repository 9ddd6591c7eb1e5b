"""NI sampling: an ordinary rule, plus a trained network that predicts which tokens are already final."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.indicator import Indicator, IndicatorConfig, load_indicator
from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.pytree import pytree
from samplers.checks import check_choice, check_number, check_steps, check_threshold
from samplers.rules.base import BlockView, Number, Rule, per_row
from samplers.rules.llada import LLaDA
from samplers.tokens.predictions import Predictions, ranked


@pytree(static=("scope",))
class NI(Rule):
    """Neural indicator sampling (arXiv 2604.18471): each forward commits a quota of the most confident positions, all
    whose confidence reaches a threshold, and all that the indicator scores above a threshold of its own.

    The first two concern the active block. The third does, too, wherever a cache is used; without one it concerns every
    position after it as well; later blocks then find those written.

    Attributes:
        indicator: the trained network, or the folder of one. It is trained for one model, so there is no default.
        threshold: least confidence; None commits by the quota and the indicator alone. Default: NI-Sampling's published
            one.
        indicator_threshold: scores above it are committed; at 1 none are. Default: NI-Sampling's published one.
        steps: forwards of the whole generation, which set the quota as in LLaDA's sampler; None is one per forward.
            Default: none, so that the two thresholds decide.
        scope: where the indicator is evaluated: in the active "block", in the "rest", which is all that a forward runs
            from there on, or "auto", the published choice, the rest without a cache and the block with one. With a
            prefix cache, whose forwards run all that is left, "rest" saves more (`evals/results`). Default: as
            published.
    """

    indicator: Indicator | str
    threshold: Number | None = 0.95
    indicator_threshold: Number = 0.89
    steps: int | jax.Array | None = None
    scope: Literal["auto", "block", "rest"] = "auto"

    reads_hidden = True

    def __post_init__(self) -> None:
        if isinstance(self.indicator, str):
            object.__setattr__(self, "indicator", load_indicator(self.indicator))

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        if not isinstance(self.indicator, Indicator):
            raise DllmError(f"indicator is of type {type(self.indicator).__name__}; load one by load_indicator")
        check_threshold("threshold", self.threshold)
        check_number("indicator_threshold", self.indicator_threshold, 0.0, 1.0)
        check_choice("scope", self.scope, ("auto", "block", "rest"))
        if self.steps is not None:
            check_steps(self.steps, num_blocks)

    def looks_ahead(self, cached: bool) -> bool:
        return self.scope == "rest" or (self.scope == "auto" and not cached)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        steps = view.block_undecided * view.num_blocks if self.steps is None else jnp.asarray(self.steps)
        chosen, state = LLaDA(steps).decide(predictions, view, state)
        if self.threshold is not None:
            chosen |= view.undecided & (predictions.confidence >= view.at_least(self.threshold))
        return chosen, state

    def judge(self, denoiser: DenoiserLike, hidden: jax.Array, logits: jax.Array, best: Predictions) -> jax.Array:
        assert isinstance(self.indicator, Indicator)
        features = features_of(self.indicator.config, denoiser, hidden, logits, best.token)
        return self.indicator.scores(*features) > per_row(self.indicator_threshold)


def features_of(
    config: IndicatorConfig, denoiser: DenoiserLike, hidden: jax.Array, logits: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What an indicator reads about positions, in sampling and in training.

    Args:
        hidden: [B, W, D], as `DenoiserLike.logits` takes them.
        logits: [B, W, V] float32, of these.
        token: [B, W], what would be written: the best token but for suppressed ones and the mask.

    Returns:
        Hidden states [B, W, D], embeddings [B, W, K1, E] and values [B, W, K2], for `Indicator.logits`.

    Raises:
        DllmError: when the indicator was made for a model of other sizes.
    """
    hidden = denoiser.final_hidden(hidden)
    values, best = ranked(logits, config.check_vocabulary(logits.shape[-1]))
    best = jnp.concatenate([token[..., None], best[..., 1 : config.num_tokens]], axis=-1)
    embeddings = denoiser.embed(best.reshape(best.shape[0], -1))
    embeddings = embeddings.reshape(*best.shape, embeddings.shape[-1])
    if (hidden.shape[-1], embeddings.shape[-1]) != (config.hidden_dim, config.embed_dim):
        sizes = f"{config.hidden_dim} and {config.embed_dim}, the model's have {hidden.shape[-1]}"
        raise DllmError(f"the indicator reads hidden states and embeddings of {sizes}; use the one of this model")
    own = jnp.take_along_axis(logits, token[..., None], axis=-1)
    values = jnp.concatenate([own, values[..., 1 : config.num_values]], axis=-1)[..., : config.num_values]
    if config.probabilities:
        values = jnp.exp(values - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return hidden, embeddings, values
