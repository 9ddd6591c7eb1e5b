"""NI sampling: any ordinary rule, plus a trained network that predicts which tokens are already final."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.indicator import Indicator, IndicatorConfig, load_indicator
from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.pytree import pytree
from samplers.checks import check_choice, check_number, check_steps, check_threshold
from samplers.rules.base import BlockView, Number, Rule, per_row
from samplers.rules.llada import LLaDA
from samplers.tokens.predictions import Predictions, ScoreFrom, ranked


@pytree(static=("scope",))
class NI(Rule):
    """Neural indicator sampling (arXiv 2604.18471): each forward commits what a base rule chooses, and all positions
    that the indicator scores above a threshold of its own.

    The published base rule is a quota of the most confident positions and all whose confidence reaches a threshold;
    any rule that does not revise can take its place. It concerns the active block. The indicator does, too, wherever a
    cache is used; without one it concerns every position after it as well; later blocks then find those written.

    Attributes:
        indicator: the trained network, or the folder of one. It is trained for one model, so there is no default.
        threshold: least confidence of the published base rule; None commits by the quota and the indicator alone.
            Default: NI-Sampling's published one.
        indicator_threshold: scores above it are committed; at 1 none are. Default: NI-Sampling's published one.
        steps: forwards of the whole generation, which set the published base rule's quota as in LLaDA's sampler; None
            is one per forward. Default: none, so that the two thresholds decide.
        scope: where the indicator is evaluated: in the active "block", in the "rest", which is all that a forward runs
            from there on, or "auto", the published choice, the rest without a cache and the block with one. With a
            prefix cache, whose forwards run all that is left, "rest" saves more (`evals/results`). Default: as
            published.
        base: another base rule, whose options then replace `threshold` and `steps`; None is the published one. It may
            neither revise nor read hidden states. Default: as published.
    """

    indicator: Indicator | str
    threshold: Number | None = 0.95
    indicator_threshold: Number = 0.89
    steps: int | jax.Array | None = None
    scope: Literal["auto", "block", "rest"] = "auto"
    base: Rule | None = None

    reads_hidden = True
    without_base: ClassVar = ("threshold", "steps")  # of the published base rule

    @property
    def score_from(self) -> ScoreFrom:  # type: ignore[override]
        return self._base.score_from

    @property
    def reads_logits(self) -> bool:  # type: ignore[override]
        return self._base.reads_logits

    @property
    def _base(self) -> Rule:
        return _Published(self.threshold, self.steps) if self.base is None else self.base

    def __post_init__(self) -> None:
        if isinstance(self.indicator, str):
            object.__setattr__(self, "indicator", load_indicator(self.indicator))

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        if not isinstance(self.indicator, Indicator):
            raise DllmError(f"indicator is of type {type(self.indicator).__name__}; load one by load_indicator")
        check_number("indicator_threshold", self.indicator_threshold, 0.0, 1.0)
        check_choice("scope", self.scope, ("auto", "block", "rest"))
        self._check_base()
        self._base.check(gen_length, num_blocks)

    def _check_base(self) -> None:
        """Raises DllmError for a base that is no rule, or not one that fits, and for numbers that it replaces."""
        if self.base is None:
            return
        if not isinstance(self.base, Rule):
            raise DllmError(f"base is {self.base!r}; give a rule object, such as EB(); make_sampler takes names")
        name = type(self.base).__name__
        if self.base.revises or self.base.reads_hidden:
            what = "revises what is written" if self.base.revises else "reads hidden states"
            raise DllmError(f"base {name} {what}; give a rule that chooses positions by their predictions")
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        for number in self.without_base:
            value = getattr(self, number)
            if isinstance(value, int | float) and value != usual[number]:
                raise DllmError(f"{number} {value:g} is of the published base rule; leave it out with base {name}")

    def looks_ahead(self, cached: bool) -> bool:
        return self.scope == "rest" or (self.scope == "auto" and not cached)

    def forwards(self, undecided: int, num_blocks: int) -> tuple[int, int]:
        return 1, self._base.forwards(undecided, num_blocks)[1]

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        return self._base.init(batch, width, vocab_size)

    def adjust(self, logits: jax.Array, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        return self._base.adjust(logits, view, state)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        return self._base.decide(predictions, view, state)

    def most_steps(self, view: BlockView) -> jax.Array | None:
        return self._base.most_steps(view)

    def block_done(self, view: BlockView, left: jax.Array, state: Any) -> jax.Array:
        return self._base.block_done(view, left, state)

    def judge(self, denoiser: DenoiserLike, hidden: jax.Array, logits: jax.Array, best: Predictions) -> jax.Array:
        assert isinstance(self.indicator, Indicator)
        features = features_of(self.indicator.config, denoiser, hidden, logits, best.token)
        return self.indicator.scores(*features) > per_row(self.indicator_threshold)


@pytree()
class _Published(Rule):
    """The base rule of NI-Sampling's code: LLaDA's quota, and all whose confidence reaches a threshold. See `NI`."""

    threshold: Number | None
    steps: int | jax.Array | None

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_threshold("threshold", self.threshold)
        if self.steps is not None:
            check_steps(self.steps, num_blocks)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        steps = view.block_undecided * view.num_blocks if self.steps is None else jnp.asarray(self.steps)
        chosen, state = LLaDA(steps).decide(predictions, view, state)
        if self.threshold is not None:
            chosen |= view.undecided & (predictions.confidence >= view.at_least(self.threshold))
        return chosen, state


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
