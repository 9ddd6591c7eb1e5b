"""Learning from rewards: GRPO on trajectories, `python -m train grpo`.

A completion is a trajectory: in step t the model got the state s_t and drew the tokens x_i of the positions A_t that
the rule chose. Its log-probability is the sum of those of all draws,

    log pi(trajectory) = sum over t, over i in A_t of log p(x_i | s_t)

which is exact where the choice of positions does not depend on the tokens drawn (`proxy=entropy` or `margin`); the
choice itself is treated as given. p is what tokens are drawn from: softmax(logits / temperature) without the mask
token, which is never drawn. With R = p / p_old, of the weights that learn over those that sampled, and A the
completion's advantage within its group (`train.rollout.advantages`), the loss of GRPO (DeepSeekMath, 2402.03300) is

    loss = mean over completions of the mean over draws of beta KL - min(R A, clip(R, 1 - epsilon, 1 + epsilon_high) A)

with KL = q / p - log(q / p) - 1, q of the model before training. `loss_type` says how the sum over draws is divided
otherwise. At `importance_sampling_level` "sequence" R is the completion's: the geometric mean of its draws' R (GSPO,
arXiv 2507.18071). Settings have the names that they have in TRL's `GRPOConfig`.

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
from train.losses import Mean, Means, hidden_states, position_draws
from train.objectives.base import Objective, Passes
from train.rollout import LossType, Rollout, RolloutPart, Rollouts, ScaleRewards, sampler_for, steps_per_round
from train.settings import setting
from train.trainable import Params, Trainable, WholeModelAndBase, check_frozen
from train.vocabulary import head_sums

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
        num_iterations: how often the completions of an iteration are learned.
        epsilon: how far the ratio may go from 1 before its gradient stops.
        epsilon_high: the same above 1 ("clip-higher", DAPO, arXiv 2503.14476); by default `epsilon`.
        importance_sampling_level: what has a ratio and is clipped: each "token", or the whole "sequence", whose ratio
            is the geometric mean of its tokens'. It is estimated where `states` leaves some out.
        loss_type: what a sum over tokens is divided by. "grpo": the completion's tokens, and their mean over
            completions is the loss. "bnpo": the tokens of all completions of a part of `optimizer.accumulate`. "dapo":
            those of the whole batch. "dr_grpo": completions times the canvas (Dr. GRPO, arXiv 2503.20783).
        scale_rewards: what rewards less the group's mean are divided by: the standard deviation of the "group", or of
            all rewards of an iteration ("batch"), or nothing ("none").
        beta: weight of KL to the model before training, which is kept for it; 0 leaves that out.
        chunk: positions of a device whose logits exist at once; 0 computes the logits of all positions.
    """

    shrink: int = setting(1, at_least=0)
    states: int = setting(8, at_least=1)
    mask_prompt: float = setting(0.0, at_least=0, at_most=1)
    num_iterations: int = setting(1, at_least=1)
    epsilon: float = setting(0.2, at_least=0)
    epsilon_high: float | None = setting(None, at_least=0)
    importance_sampling_level: Literal["token", "sequence"] = "token"
    loss_type: LossType = "grpo"
    scale_rewards: ScaleRewards = "group"
    beta: float = setting(0.0, at_least=0)
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
        steps = steps_per_round(self.rollout, self.optimizer.batch, self.objective.num_iterations)
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
        weights: [..., M, T] float32, of each draw that is learned in a state, so that the sum over all M states is
            one over all draws; 0 where none is learned.
        lengths: [...] int32.
        draws: [...] int32, of the completion.
        advantage, share, old: as in `Rollout`.
    """

    inputs: jax.Array
    tokens: jax.Array
    weights: jax.Array
    lengths: jax.Array
    draws: jax.Array
    advantage: jax.Array
    share: jax.Array
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
            num_iterations=self.settings.num_iterations,
            loss_type=self.settings.loss_type,
            scale_rewards=self.settings.scale_rewards,
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
        return ScoredStates(
            jnp.where(masked, denoiser.mask_id, batch.tokens[..., None, :]),
            batch.tokens,
            jnp.where(learned, weight[..., None], 0.0),
            batch.lengths,
            jnp.sum(batch.drawn, axis=-1),
            batch.advantage,
            batch.share,
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
        """Reports `clipped`, `entropy` and `kl`, means over the draws that are learned; `clipped` of whole completions
        where these have one ratio each."""
        part, count, first = self.settings, len(states.lengths), learner.min_prompt_length
        rows = self._tokens(states).shape
        every = lambda x: jnp.broadcast_to(x, states.weights.shape).reshape(rows)[:, first:]
        each = lambda x: every(x[:, None, None])
        old = every(jnp.zeros(()) if states.old is None else states.old)
        heads, hidden = [learner], [self._hidden(learner, states, remat=remat, sharding=sharding)]
        if part.beta:
            heads.append(base)
            hidden.append(lax.stop_gradient(self._hidden(base, states, sharding=sharding)))
        own = (every(states.tokens[:, None]), each(states.advantage), each(jnp.arange(count)), old)
        sums = functools.partial(self._sums, count, states.old is None)
        options: dict[str, Any] = {"chunk": part.chunk, "groups": groups, "sharding": sharding}
        gain, clipped, entropy, *kl = head_sums(sums, tuple(heads), (*hidden, *own), every(states.weights), **options)
        learned = jnp.sum(states.weights > 0)
        clips = Mean.of(clipped, learned)
        if part.importance_sampling_level == "sequence":
            draws = jnp.maximum(states.draws, 1)
            gain, clipped = self._gain(gain / draws, states.advantage)
            gain, clips = gain * draws, Mean.of(lax.stop_gradient(jnp.sum(clipped)), count)
        total, tokens = jnp.sum(states.share * ((part.beta * kl[0] if kl else 0.0) - gain)), jnp.sum(states.draws)
        loss = Mean.of(total, tokens if part.loss_type == "dapo" else count)
        if part.loss_type == "bnpo":
            loss = Mean.of(total / jnp.maximum(tokens, 1), 1)
        metrics = {"clipped": clips, "entropy": Mean.of(entropy, learned)}
        return {"loss": loss, **metrics, **({"kl": Mean.of(kl[1], learned)} if kl else {})}

    def _gain(self, log_ratio: jax.Array, advantage: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What a step gains by ratios, and whether they are clipped."""
        low, high = self.settings.epsilon, self.settings.epsilon_high
        ratio = jnp.exp(log_ratio)
        bounded = jnp.clip(ratio, 1.0 - low, 1.0 + (low if high is None else high)) * advantage
        return jnp.minimum(ratio * advantage, bounded), bounded < ratio * advantage

    def _sums(self, count: int, on_policy: bool, *arguments: Any) -> tuple[jax.Array, ...]:
        """Sums over positions [C]: of each completion's gains [count], or of the logarithms of its ratios where they
        make one; of clipped ratios and entropy; and of KL, of each completion and of all."""
        *of_models, tokens, advantage, row, old, weights = arguments
        half = len(of_models) // 2
        log, *frozen = (self._log(head, x) for head, x in zip(of_models[:half], of_models[half:], strict=True))
        own = lambda log: jnp.take_along_axis(log, tokens[:, None], axis=-1)[:, 0]
        of_rows = lambda x: jax.ops.segment_sum(weights * x, row, count)
        total = lambda x: lax.stop_gradient(jnp.sum(jnp.where(weights > 0, x, 0.0)))
        new = own(log)
        log_ratio = new - (lax.stop_gradient(new) if on_policy else old)
        gain, clipped = self._gain(log_ratio, advantage)
        whole = self.settings.importance_sampling_level == "sequence"
        found = of_rows(log_ratio if whole else gain), total(clipped), total(-jnp.sum(jnp.exp(log) * log, axis=-1))
        if not frozen:
            return found
        gap = own(frozen[0]) - new
        kl = jnp.exp(gap) - gap - 1.0
        return *found, of_rows(kl), total(kl)

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
