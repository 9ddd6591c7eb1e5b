"""Learning from rewards: GRPO on trajectories, `python -m train grpo`.

A completion is a trajectory: in step t the model got the state s_t and drew the tokens x_i of the positions A_t that
the rule chose. Its log-probability is the sum of those of all draws,

    log pi(trajectory) = sum over t, over i in A_t of log p(x_i | s_t)

which is exact where the choice of positions does not depend on the tokens drawn (`proxy=entropy` or `margin`); the
choice itself is treated as given. p is what tokens are drawn from: softmax(logits / temperature) without the mask
token, which is never drawn. With R = p / p_old, of the weights that learn over those that sampled, and A the
completion's advantage within its group (`train.rollout.advantages`), the loss of GRPO (DeepSeekMath, 2402.03300) is

    loss = mean over completions of the sum over draws of share (beta KL - min(R A, clip(R, 1 - eps, 1 + eps) A))

with KL = q / p - log(q / p) - 1, q of the model before training, and share = 1 / draws, or 1 / canvas as Dr. GRPO.

`shrink` sets how exact log p is: the number of steps whose tokens are scored in one forward, in the state before the
first of them (TraceRL, arXiv 2509.06949). 1 is exact; 0 takes all of them, from the empty canvas, which is diffu-GRPO's
estimate (d1, arXiv 2504.12216) with `mask_prompt` 0.15.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.transformer import RematPolicy
from samplers.tokens.predictions import logprobs_of, readout
from train.config import DataPart, Kind, TrainConfig
from train.losses import Mean, Means, head_sums, hidden_states, position_draws
from train.objectives.base import Objective, Passes
from train.rollout import Advantage, Rollout, RolloutPart, Rollouts, sampler_for, steps_per_round
from train.settings import setting
from train.trainable import Params, Trainable, WholeModelAndBase, check_frozen

_PLAIN = DataPart()
_NEVER = -1e30  # a score of probability 0; with -inf, p log p and what weight 0 leaves out would be NaN


@dataclasses.dataclass(frozen=True)
class GrpoPart:
    """The loss of `python -m train grpo`.

    Attributes:
        shrink: steps of a trajectory whose tokens are scored in one forward; 1 is exact, 0 takes all of them.
        states: most states of a completion that a step learns from, drawn without repetition and weighted so that the
            sum over all is unbiased; all of them if there are fewer.
        mask_prompt: probability with which each token that was not generated is masked, by a draw of each step (d1).
        advantage: "grpo", over the standard deviation of the group's rewards, and the mean over a completion's tokens;
            "dr-grpo" without either (arXiv 2503.20783).
        clip: eps, how far the ratio may go from 1 before its gradient stops.
        beta: weight of KL to the model before training, which is kept for it; 0 leaves that out.
        updates: how often the completions of an iteration are learned.
        chunk: positions whose logits exist at once; 0 computes the logits of all positions.
    """

    shrink: int = setting(1, at_least=0)
    states: int = setting(8, at_least=1)
    mask_prompt: float = setting(0.0, at_least=0, at_most=1)
    advantage: Advantage = "grpo"
    clip: float = setting(0.2, at_least=0)
    beta: float = setting(0.0, at_least=0)
    updates: int = setting(1, at_least=1)
    chunk: int = setting(0, at_least=0)

    kind: ClassVar[Kind] = "prompts"


@dataclasses.dataclass(frozen=True)
class GrpoConfig(TrainConfig):
    """A run of `python -m train grpo`. A step learns from `optimizer.batch` completions."""

    objective: GrpoPart = dataclasses.field(default_factory=GrpoPart)
    rollout: RolloutPart = dataclasses.field(default_factory=RolloutPart)
    command: Literal["grpo"] = "grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = steps_per_round(self.rollout, self.optimizer.batch, self.objective.updates)
        for name, value in (("steps", self.steps), ("checkpoint.every", self.checkpoint.every)):
            if rest := value % steps:
                advice = f"set it to {value - rest + steps}"
                raise DllmError(f"{name} {value} is no whole number of iterations, of {steps} steps each; {advice}")
        if self.lora.dropout:
            raise DllmError("lora.dropout would learn from other weights than those that sampled; set it to 0")
        for name in ("bucket", "random_length", "pad"):
            if getattr(self.data, name) != getattr(_PLAIN, name):
                raise DllmError(f"data.{name} is for learning from answers, and grpo samples its own; leave it out")


class ScoredStates(NamedTuple):
    """States of completions, M of each, and what was drawn in them.

    Attributes:
        inputs: [..., M, T] int32, with masks.
        tokens: [..., T] int32, the completion.
        weights: [..., M, T] float32, of the loss of each draw; 0 where none is learned.
        lengths: [...] int32.
        advantage: [...] float32.
        old: as in `Rollout`.
    """

    inputs: jax.Array
    tokens: jax.Array
    weights: jax.Array
    lengths: jax.Array
    advantage: jax.Array
    old: jax.Array | None


def choose_states(uniform: jax.Array, count: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Some of the states 0 ... count - 1 of each row, all sets equally likely; all states where there are no more.

    Args:
        uniform: [..., N] draws in [0, 1), N at least any count.
        count: [...] int32.
        most: M.

    Returns:
        numbers [..., M] int32, and how much each counts, [..., M] float32: count / drawn, or 0 for one too many.
    """
    place = jnp.arange(uniform.shape[-1])
    order = jnp.argsort(jnp.where(place < count[..., None], uniform, jnp.inf), axis=-1, stable=True)[..., :most]
    drawn = jnp.minimum(count, most)[..., None]
    weight = count[..., None] / jnp.maximum(drawn, 1)
    return order.astype(jnp.int32), jnp.where(jnp.arange(order.shape[-1]) < drawn, weight, 0.0)


@dataclasses.dataclass(frozen=True)
class Grpo(Objective):
    """The objective with its settings.

    Attributes:
        temperature: of the policy, whose probabilities are softmax(logits / temperature) over all tokens but the mask.
    """

    about = "learn from rewards of sampled answers (GRPO)"
    config = GrpoConfig

    settings: GrpoPart
    temperature: float = 1.0

    @classmethod
    def of(cls, config: GrpoConfig) -> Self:
        return cls(config.objective, config.rollout.temperature, router=config.router)

    @property
    def states(self) -> int:
        """M, states of a completion that a step runs."""
        return self.settings.states if self.settings.shrink else 1

    def trainable(self, config: GrpoConfig, model: ModelConfig) -> Trainable:
        if config.lora.rank or not self.settings.beta:
            return super().trainable(config, model)
        check_frozen(config, "objective.beta needs a model to stay near to")
        return WholeModelAndBase(config, model)

    def passes(self, trained: Trainable) -> Passes:
        """Of learning; sampling is not counted."""
        base = int(self.settings.beta > 0)
        return Passes(*(self.states * (of_learner + base) for of_learner in super().passes(trained)))

    def evaluation_settings(self) -> None:
        """None: rows have no loss by themselves, only completions and their rewards have."""

    def feed(self, config: GrpoConfig, parts: Any, stepper: Any, frozen: Mapping[str, jax.Array]) -> Rollouts:
        """Completions of the model being trained.

        Raises:
            DllmError: for samplers that cannot be learned from, and data without rewards.
        """
        if jax.process_count() > 1:
            raise DllmError("grpo samples in one process; start it with one, whose mesh has all devices")
        key = jax.jit(lambda: jax.random.key(config.seed), out_shardings=stepper.placement.replicated)()

        @functools.partial(jax.jit, out_shardings=stepper.placement.batch)
        def old(trained: Params, frozen: Params, batch: Rollout, key: jax.Array, step: jax.Array) -> jax.Array:
            learner = stepper.learner(trained, frozen)
            return lax.map(functools.partial(self.logprobs, learner), stepper.add_noise(batch, key, step))

        model = parts.outline("the model being trained", None)
        return Rollouts(
            config.rollout,
            parts.rows,
            parts.task,
            sampler_for(config.rollout, model, parts.task, config.data.answer_length),
            batch=(config.optimizer.accumulate, config.optimizer.batch // config.optimizer.accumulate),
            updates=self.settings.updates,
            advantage=self.settings.advantage,
            policy=lambda state: stepper.learner(state.trained, frozen),
            old=lambda state, batch, step: old(state.trained, frozen, batch, key, jnp.int32(step)),
            sharding=stepper.placement.batch,
        )

    def corrupt(self, key: jax.Array, batch: Rollout, denoiser: Denoiser) -> ScoredStates:
        """The states that a step learns from."""
        shape, length = batch.lengths.shape, batch.tokens.shape[-1]
        state_key, prompt_key = jax.random.split(key)
        draws = lambda key: position_draws(key, batch.lengths.size, length).reshape(*shape, length)
        shrink = self.settings.shrink or length
        group = jnp.where(batch.step >= 0, batch.step // shrink, -1)
        chosen, weight = choose_states(draws(state_key), group.max(axis=-1) + 1, min(self.states, length))
        masked = batch.step[..., None, :] >= (chosen * shrink)[..., None]
        given = (batch.step < 0) & (jnp.arange(length) < batch.lengths[..., None])
        masked |= (given & (draws(prompt_key) < self.settings.mask_prompt))[..., None, :]
        learned = batch.drawn[..., None, :] & (group[..., None, :] == chosen[..., None])
        share = (weight * batch.share[..., None])[..., None]
        return ScoredStates(
            jnp.where(masked, denoiser.mask_id, batch.tokens[..., None, :]),
            batch.tokens,
            jnp.where(learned, share, 0.0),
            batch.lengths,
            batch.advantage,
            batch.old,
        )

    def logprobs(self, learner: Denoiser, states: ScoredStates) -> jax.Array:
        """Log-probabilities of a completion's tokens in its states [B, ...]: [B, M, T] float32, 0 where there is no
        predictor."""
        hidden, tokens = self._hidden(learner, states), self._tokens(states)
        scores = readout(learner, hidden)
        policy = lambda tile: self._scores(learner, scores.of(tile), scores.ids(tile))
        found = logprobs_of(dataclasses.replace(scores, of=policy), tokens[:, learner.min_prompt_length :])
        return jnp.pad(found, ((0, 0), (learner.min_prompt_length, 0))).reshape(states.weights.shape)

    def means(
        self,
        learner: Denoiser,
        base: Denoiser,
        states: ScoredStates,
        /,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> Means:
        """Reports `clipped`, `entropy` and `kl`, means over the draws that are learned."""
        first, on_policy = learner.min_prompt_length, states.old is None
        rows = self._tokens(states).shape
        every = lambda x: jnp.broadcast_to(x, states.weights.shape).reshape(rows)[:, first:]
        old = every(jnp.zeros(()) if states.old is None else states.old)
        heads, hidden = [learner], [self._hidden(learner, states, remat=remat, sharding=sharding)]
        if self.settings.beta:
            heads.append(base)
            hidden.append(lax.stop_gradient(self._hidden(base, states, sharding=sharding)))
        parts = (*hidden, every(states.tokens[:, None]), every(states.advantage[:, None, None]), old)
        sums = functools.partial(self._sums, on_policy)
        options: dict[str, Any] = {"chunk": self.settings.chunk, "groups": groups, "sharding": sharding}
        loss, *others = head_sums(sums, tuple(heads), parts, every(states.weights), **options)
        draws, mean = jnp.sum(states.weights > 0), Mean.of(loss, len(states.lengths))
        means = {name: Mean.of(x, draws) for name, x in zip(("clipped", "entropy", "kl"), others, strict=False)}
        return {"loss": mean, **means}

    def _sums(self, on_policy: bool, *arguments: Any) -> tuple[jax.Array, ...]:
        """Sums over positions [C] of the loss and of metrics: clipped ratios, entropy, KL."""
        *of_models, tokens, advantage, old, weights = arguments
        count = len(of_models) // 2
        log, *frozen = (self._log(head, x) for head, x in zip(of_models[:count], of_models[count:], strict=True))
        own = lambda log: jnp.take_along_axis(log, tokens[:, None], axis=-1)[:, 0]
        new = own(log)
        ratio = jnp.exp(new - (lax.stop_gradient(new) if on_policy else old))
        bounded = jnp.clip(ratio, 1.0 - self.settings.clip, 1.0 + self.settings.clip)
        gain, counted = jnp.minimum(ratio * advantage, bounded * advantage), weights > 0
        total = lambda x: jnp.sum(jnp.where(counted, x, 0.0))
        metrics = [total(bounded * advantage < ratio * advantage), total(-jnp.sum(jnp.exp(log) * log, axis=-1))]
        if not frozen:
            return (-jnp.sum(weights * gain), *map(lax.stop_gradient, metrics))
        gap = own(frozen[0]) - new
        kl = jnp.exp(gap) - gap - 1.0
        loss = jnp.sum(weights * (self.settings.beta * kl - gain))
        return (loss, *map(lax.stop_gradient, (*metrics, total(kl))))

    def _log(self, model: Denoiser, hidden: jax.Array) -> jax.Array:
        """The policy's log-probabilities, [C, V]."""
        return jax.nn.log_softmax(self._scores(model, model.logits(hidden), jnp.arange(model.vocab_size)))

    def _scores(self, model: Denoiser, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """What the policy's probabilities are the softmax of: logits [..., n] of the tokens `ids` [n] over the
        temperature, and the mask token out of reach, which sampling never draws."""
        return jnp.where(ids == model.mask_id, _NEVER, logits / self.temperature)

    def _tokens(self, states: ScoredStates) -> jax.Array:
        """[B * M, T] int32."""
        return jnp.broadcast_to(states.tokens[:, None], states.inputs.shape).reshape(-1, states.inputs.shape[-1])

    def _hidden(self, model: Denoiser, states: ScoredStates, **options: Any) -> jax.Array:
        """What predicts each position of every state, as `hidden_states`."""
        inputs = states.inputs.reshape(-1, states.inputs.shape[-1])
        return hidden_states(model, inputs, jnp.repeat(states.lengths, states.inputs.shape[1]), **options)
