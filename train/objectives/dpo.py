"""Preference optimisation of masked diffusion models: DPO with the estimates of VRPO (LLaDA 1.5, arXiv 2505.19223).

A row is a pair: a prompt with the better answer y_w, and the same prompt with the worse one y_l, which do not see each
other (`train.losses.Documents`).

    loss = -log sigmoid(beta ((B(y_w) - B_ref(y_w)) - (B(y_l) - B_ref(y_l))))
    B(y) = mean over n draws of  sum over masked positions of log p(y_i | masked y, prompt) / t,  t ~ U(eps, 1)

B is the bound on log p(y | prompt) that masked diffusion is trained by, and ref the model before training. Of VRPO's
three measures, `samples` is the budget n; every draw has a t and masks of its own (the best allocation);
and both models see the same masks (antithetic sampling). The sigmoid is not linear, so an estimate with noise is
biased: more samples bring less of it.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.transformer import RematPolicy
from train.config import Kind, TrainConfig, UnfilledDataPart, check_canvas
from train.losses import Batch, Documents, Mean, Means, hidden_states, position_draws
from train.objectives.base import Objective, Passes
from train.settings import setting
from train.trainable import Trainable, WholeModelAndBase, check_frozen
from train.vocabulary import head_sums


@dataclasses.dataclass(frozen=True)
class DpoPart:
    """The loss of `python -m train dpo`.

    Attributes:
        beta: how much a difference of log-probabilities counts.
        samples: n, masked copies of each pair that a step runs through both models.
        eps: least mask probability.
        stratified: spread the n t of an answer evenly over (eps, 1) instead of drawing them independently.
        sft: weight of the better answer's loss in masked diffusion, the mean over its tokens of -B.
        chunk: positions of a device whose logits exist at once; 0 computes the logits of all positions.
    """

    beta: float = setting(0.2, at_least=0)
    samples: int = setting(8, at_least=1)
    eps: float = setting(1e-3, at_least=1e-6, at_most=1)
    stratified: bool = False
    sft: float = setting(0.0, at_least=0)
    chunk: int = setting(0, at_least=0)

    kind: ClassVar[Kind] = "pairs"


@dataclasses.dataclass(frozen=True)
class DpoConfig(TrainConfig):
    """A run of `python -m train dpo`. A row of data has room for the prompt twice and both answers; with `data.pad`
    both have a canvas of `data.answer_length`."""

    data: UnfilledDataPart = dataclasses.field(default_factory=UnfilledDataPart)
    objective: DpoPart = dataclasses.field(default_factory=DpoPart)
    command: Literal["dpo"] = "dpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_canvas(self.data, "dpo")


class NoisedPairs(NamedTuple):
    """A batch after the forward process, in n copies of each row.

    Attributes:
        inputs: [..., n, T] int32, with masks.
        tokens: [..., T] int32.
        weights: [..., n, T] float32, 1 / (n t) where masked, else 0.
        better: [..., T] bool, positions of the better answer and its prompt.
        targets: [..., T] bool, positions of both answers.
        lengths: [...] int32.
        documents: the pairs' halves.
    """

    inputs: jax.Array
    tokens: jax.Array
    weights: jax.Array
    better: jax.Array
    targets: jax.Array
    lengths: jax.Array
    documents: Documents


@dataclasses.dataclass(frozen=True)
class Dpo(Objective):
    """The objective with its settings."""

    about = "learn from pairs of a better and a worse answer (DPO, VRPO)"
    config = DpoConfig

    settings: DpoPart

    def fit_model(self, model: ModelConfig, config: Any) -> ModelConfig:
        if model.has_blocks:
            raise DllmError(f"a {model.family} model is one of block diffusion, whose likelihood dpo does not estimate")
        return super().fit_model(model, config)

    def trainable(self, config: DpoConfig, model: ModelConfig) -> Trainable:
        if config.lora.rank:
            return super().trainable(config, model)
        check_frozen(config, "dpo needs a model to start from and to compare with")
        return WholeModelAndBase(config, model)

    def passes(self, trained: Trainable) -> Passes:
        return Passes(*(self.settings.samples * (of_learner + 1) for of_learner in super().passes(trained)))

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> NoisedPairs:
        """The copies; the draws of a row depend on the key and on its number in the batch."""
        assert batch.documents is not None
        part, rows, length = self.settings, batch.lengths.size, batch.tokens.shape[-1]
        time_key, mask_key = jax.random.split(key)
        shape = (*batch.lengths.shape, part.samples, length)
        draws = lambda key: position_draws(key, rows * part.samples, length).reshape(shape)
        first = jnp.broadcast_to(batch.documents.first[..., None, :], shape)
        u = jnp.take_along_axis(draws(time_key), first, axis=-1)  # one of each answer and copy
        if part.stratified:
            u = (u[..., :1, :] + jnp.arange(part.samples)[:, None] / part.samples) % 1.0
        t = (1.0 - part.eps) * u + part.eps
        targets = batch.targets & (batch.places >= denoiser.min_prompt_length)
        masked = targets[..., None, :] & (draws(mask_key) < t)
        return NoisedPairs(
            jnp.where(masked, denoiser.mask_id, batch.tokens[..., None, :]),
            batch.tokens,
            jnp.where(masked, 1.0 / (part.samples * t), 0.0),
            batch.documents.first == 0,
            targets,
            batch.lengths,
            batch.documents,
        )

    def means(
        self,
        learner: Denoiser,
        base: Denoiser,
        pairs: NoisedPairs,
        /,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> Means:
        """Reports `accuracy`, the share of pairs whose better answer gained more than its worse one; `chosen` and
        `rejected`, beta times what each gained in nats; `margin`, their difference; and `cross_entropy` of the better
        answer, -B in nats a token."""
        part, first, copies = self.settings, learner.min_prompt_length, self.settings.samples
        each = lambda x: jnp.repeat(x, copies, axis=0)  # for every copy
        flat = lambda x: x.reshape(-1, x.shape[-1])
        inputs, lengths = flat(pairs.inputs), each(pairs.lengths)
        options: dict[str, Any] = {"documents": jax.tree.map(each, pairs.documents), "sharding": sharding}
        hidden = hidden_states(learner, inputs, lengths, remat=remat, **options)
        before = lax.stop_gradient(hidden_states(base, inputs, lengths, **options))
        rows = len(pairs.lengths)
        number = jnp.broadcast_to(jnp.arange(rows)[:, None], pairs.tokens.shape)
        own = [each(x)[:, first:] for x in (pairs.tokens, number, pairs.better)]
        sums = functools.partial(_bounds, rows)
        weights = flat(pairs.weights)[:, first:]
        now, then = head_sums(
            sums, (learner, base), (hidden, before, *own), weights, chunk=part.chunk, groups=groups, sharding=sharding
        )
        gained = part.beta * (now - then)  # [B, 2], of the better and the worse answer
        margin, counted = gained[:, 0] - gained[:, 1], pairs.lengths > 0
        tokens = jnp.maximum(jnp.sum(pairs.targets & pairs.better, axis=-1), 1)
        learned = -now[:, 0] / tokens
        mean = lambda x: Mean.of(jnp.sum(jnp.where(counted, x, 0.0)), jnp.sum(counted))
        metrics = {"accuracy": margin > 0, "chosen": gained[:, 0], "rejected": gained[:, 1], "margin": margin}
        loss = mean(jax.nn.softplus(-margin) + part.sft * learned)
        return {"loss": loss, "cross_entropy": mean(learned), **{name: mean(x) for name, x in metrics.items()}}


def _bounds(
    rows: int,
    learner: Denoiser,
    base: Denoiser,
    hidden: jax.Array,
    before: jax.Array,
    tokens: jax.Array,
    number: jax.Array,
    better: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """What positions [C] add to B of both models: [rows, 2] each, of the better and the worse answer of each row."""

    def bound(model: Denoiser, hidden: jax.Array) -> jax.Array:
        entropy = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), tokens)
        place = 2 * number + ~better
        return -jax.ops.segment_sum(weights * entropy, place, 2 * rows).reshape(rows, 2)

    return bound(learner, hidden), lax.stop_gradient(bound(base, before))
