"""Training of the neural indicator (NI sampling, arXiv 2604.18471, section 4): `python -m train indicator`.

Of a trajectory of n steps a state t ~ U{0, ..., n - 1} is restored. The frozen model predicts every masked position,
and the merging criterion (`train.trajectory.mergeable_steps`) gives those that could be written now without changing
the result: these are the positives. The indicator reads what it reads in sampling (`features_of`), and learns by

    loss = mean over masked positions of the cross entropy of the two classes

where positives may count more than once (`positive_weight`; the mean is then over weights). Nothing but the indicator
has a gradient.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.indicator import Indicator, IndicatorConfig, init_indicator, save_indicator
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.transformer import RematPolicy
from dllm_jax.parallel import multihost
from samplers.rules.ni import features_of
from samplers.tokens.predictions import Sampling, given, predict
from train.config import Kind, TrainConfig
from train.losses import Batch, Mean, Means, hidden_states
from train.objectives.base import Objective
from train.run_dir import INDICATOR_FOLDER
from train.settings import setting
from train.trainable import Kernels, Params, SamplerInputs, Trainable, Weights, check_frozen, frozen_model, provenance
from train.trajectory import mergeable_steps
from train.vocabulary import with_head_gathered

PUBLISHED_THRESHOLD = 0.89


@dataclasses.dataclass(frozen=True)
class IndicatorPart:
    """The loss of `python -m train indicator`.

    Attributes:
        positive_weight: of positions that may be committed; the others have 1.
        dropout: share of activations that are dropped in training.
        chunk: positions of a device whose logits exist at once; 0 computes the logits of all positions.
    """

    positive_weight: float = setting(1.0, at_least=1e-6)
    dropout: float = setting(0.2, at_least=0, at_most=0.999)
    chunk: int = setting(0, at_least=0)

    kind: ClassVar[Kind] = "sft"


@dataclasses.dataclass(frozen=True)
class IndicatorTable:
    """The shape of the indicator, as `dllm_jax.indicator.IndicatorConfig` has it; the model's sizes are the model's.

    Attributes:
        depth: blocks of the network.
        width: features of each input after its projection, and of every block's output.
        num_values: K2, how many of the largest scores over the vocabulary are read; 0 reads none.
        num_tokens: K1, how many of the best tokens' embeddings are read, at least the best.
        probabilities: whether these scores are probabilities over the whole vocabulary, or else logits.
        mix: whether the projected inputs are mixed by one more matrix before the blocks.
    """

    depth: int = 5
    width: int = 768
    num_values: int = 100
    num_tokens: int = 4
    probabilities: bool = True
    mix: bool = False


@dataclasses.dataclass(frozen=True)
class IndicatorRun(TrainConfig):
    """A run of `python -m train indicator`.

    Attributes:
        indicator: its shape.
    """

    objective: IndicatorPart = dataclasses.field(default_factory=IndicatorPart)
    indicator: IndicatorTable = setting(default_factory=IndicatorTable, on_resume="never")
    command: Literal["indicator"] = "indicator"

    def __post_init__(self) -> None:
        super().__post_init__()
        others = {
            "lora.rank": bool(self.lora.rank),
            "optimizer.name": self.optimizer.name != "adamw",
            "compute.remat": self.compute.remat != "none",
        }
        for name, changed in others.items():
            if changed:
                raise DllmError(f"{name} is for training a model, and an indicator's model is frozen; leave it out")


class RolledBack(NamedTuple):
    """Trajectories at one of their states.

    Attributes:
        inputs: [..., T] int32, the state.
        tokens: [..., T] int32, the final tokens.
        step: [..., T] int32, number of the step that wrote each position, -1 where none did.
        lengths: [...] int32, positions that count.
        reached: [...] int32, steps that are done in the state.
        keys: [...] typed keys, of each row's dropout.
    """

    inputs: jax.Array
    tokens: jax.Array
    step: jax.Array
    lengths: jax.Array
    reached: jax.Array
    keys: jax.Array


class Evidence(NamedTuple):
    """The frozen model's outputs at positions of rolled-back rows: W = T - min_prompt_length of them, or as many as
    the canvas has.

    Attributes:
        features: hidden states [B, W, D], embeddings [B, W, K1, E] and values [B, W, K2], for `Indicator.logits`.
        confidence: [B, W] float32, probability of the token that would be written now.
        masked: [B, W] bool, positions that some later step wrote.
        label: [B, W] bool, those of them that could be written now without changing the result.
    """

    features: tuple[jax.Array, jax.Array, jax.Array]
    confidence: jax.Array
    masked: jax.Array
    label: jax.Array


def roll_back(batch: Batch, reached: jax.Array, keys: jax.Array, mask_id: int) -> RolledBack:
    """Trajectories after their first `reached` [...] steps."""
    assert batch.step is not None
    inputs = jnp.where(batch.step >= reached[..., None], mask_id, batch.tokens)
    return RolledBack(inputs, batch.tokens, batch.step, batch.lengths, reached, keys)


def gather_evidence(
    config: IndicatorConfig,
    denoiser: Denoiser,
    rows: RolledBack,
    *,
    canvas: int = 0,
    chunk: int = 0,
    sharding: NamedSharding | None = None,
) -> Evidence:
    """One forward of the model on rows [B, T], and what it shows about each position.

    Args:
        config: the indicator's inputs.
        canvas: positions of a row that a step wrote, at most: the others are left out. 0 keeps all.
        chunk: positions whose logits exist at once, of all rows together; 0 computes the logits of all.
        sharding: as in `train.losses.diffusion_loss`.
    """
    first = denoiser.min_prompt_length
    hidden = hidden_states(denoiser, rows.inputs, rows.lengths, sharding=sharding)
    step, tokens = rows.step[:, first:], rows.tokens[:, first:]
    if 0 < canvas < step.shape[1]:
        written = jnp.argsort(step < 0, axis=1, stable=True)[:, :canvas]
        hidden = jnp.take_along_axis(hidden, written[..., None], axis=1)
        step, tokens = (jnp.take_along_axis(x, written, axis=1) for x in (step, tokens))
    masked = step >= rows.reached[:, None]

    denoiser = with_head_gathered(denoiser, sharding)

    def read(hidden: jax.Array) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array, jax.Array]:
        logits = denoiser.logits(hidden)
        best = predict(given(logits), Sampling(), mask_id=denoiser.mask_id, score_from="raw", draw=None)
        return features_of(config, denoiser, hidden, logits, best.token), best.token, best.confidence

    batch, width = masked.shape
    size = max(1, chunk // batch) if chunk else width
    with jax.named_scope("vocabulary"):  # what profiles show
        features, best, confidence = read(hidden) if size >= width else _in_columns(read, hidden, masked, size)
    label, _ = mergeable_steps(step, best == tokens, rows.reached)
    return Evidence(features, confidence, masked, label)


Read = Callable[[jax.Array], tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array, jax.Array]]


def _in_columns(read: Read, hidden: jax.Array, masked: jax.Array, size: int) -> Any:
    """`read(hidden)` for `size` columns at a time; those in which nothing is masked stay zeros."""
    batch, width = masked.shape
    missing = -width % size
    fold = lambda x: jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0)
    unfold = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :width]
    hidden = fold(jnp.pad(hidden, ((0, 0), (0, missing), (0, 0))))
    masked = fold(jnp.pad(masked, ((0, 0), (0, missing))))
    shapes = jax.eval_shape(read, hidden[0])
    nothing = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    found = lax.map(lambda part: lax.cond(jnp.any(part[1]), read, nothing, part[0]), (hidden, masked))
    return jax.tree.map(unfold, found)


def auc(scores: jax.Array, label: jax.Array, masked: jax.Array) -> jax.Array:
    """Probability that a random positive scores above a random negative, ties as one half, exactly: scalar float32,
    0.5 where one of the classes is empty.

    Args:
        scores: [...] float32, not infinite.
        label: [...] bool, positives, which are among `masked`.
        masked: [...] bool, positions that count.
    """
    scores = jnp.where(masked, scores, jnp.inf).reshape(-1)
    label, negative = label.reshape(-1), (masked & ~label).reshape(-1)
    below = jnp.sort(jnp.where(negative, scores, jnp.inf))
    wins = jnp.searchsorted(below, scores, side="left") + jnp.searchsorted(below, scores, side="right")
    positives, negatives = jnp.sum(label), jnp.sum(negative)
    share = jnp.where(label, wins / (2.0 * jnp.maximum(negatives, 1)), 0.0)
    mean = jnp.sum(share) / jnp.maximum(positives, 1)
    return jnp.where((positives > 0) & (negatives > 0), mean, 0.5)


@dataclasses.dataclass(frozen=True)
class IndicatorOfModel:
    """A neural indicator that reads what a frozen model computes; every device has all of it."""

    config: IndicatorRun
    model: ModelConfig
    folder: str = INDICATOR_FOLDER
    passes: int = 1

    @property
    def indicator(self) -> IndicatorConfig:
        """Its shape: the settings, and the model's sizes."""
        width = self.model.embed_dim
        return IndicatorConfig(hidden_dim=width, embed_dim=width, **dataclasses.asdict(self.config.indicator))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.indicator.shapes()

    def shardings(self, mesh: Mesh) -> Mapping[str, NamedSharding]:
        return dict.fromkeys(self.shapes(), NamedSharding(mesh, PartitionSpec()))

    def initial(self, key: jax.Array, shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
        return jax.jit(lambda key: init_indicator(self.indicator, key).params, out_shardings=dict(shardings))(key)

    def frozen(self, mesh: Mesh) -> dict[str, jax.Array]:
        return frozen_model(self.config, self.model, mesh)

    def parts(
        self, trained: Params, frozen: Params, denoiser: Callable[[Kernels], Denoiser], key: jax.Array | None
    ) -> tuple[Any, Denoiser]:
        # The indicator is computed in float32 whatever the model is.
        return Indicator(self.indicator, trained), denoiser(frozen)

    def for_sampling(self, weights: Params, frozen: Params) -> SamplerInputs:
        config = self.model.replace(dtype=self.config.compute.dtype)
        return SamplerInputs(config, dict(frozen), {"indicator": Indicator(self.indicator, dict(weights))})

    def write(
        self, out: Path, weights: Weights, *, steps: int, files: Mapping[str, bytes], overwrite: bool = False
    ) -> None:
        """Writes a folder for `load_indicator`."""
        found = Indicator(
            self.indicator, {name: jnp.asarray(x) for name, x in multihost.gather_arrays(weights).items()}
        )
        with multihost.fail_together():
            if not multihost.index():
                save_indicator(out, found, source=provenance(self.config, steps), overwrite=overwrite)


@dataclasses.dataclass(frozen=True)
class FinalTokens(Objective):
    """The objective with its settings.

    Attributes:
        canvas: as in `gather_evidence`.
    """

    about = "train a neural indicator (NI sampling) on a model's trajectories"
    config = IndicatorRun
    trajectories = True

    settings: IndicatorPart
    canvas: int = 0

    @classmethod
    def of(cls, config: IndicatorRun) -> Self:
        return cls(config.objective, config.data.answer_length, router=config.router)

    def trainable(self, config: IndicatorRun, model: ModelConfig) -> Trainable:
        """The indicator.

        Raises:
            DllmError: when there is no model that it could read, or it has too few tokens.
        """
        check_frozen(config, "an indicator needs a model to be trained for")
        found = IndicatorOfModel(config, model)
        found.indicator.check_vocabulary(model.vocab_size)
        return found

    def evaluation_settings(self) -> IndicatorPart:
        """Without dropout."""
        return dataclasses.replace(self.settings, dropout=0.0)

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> RolledBack:
        """Trajectories at a random state each."""
        assert batch.step is not None
        state_key, dropout_key = jax.random.split(key)
        shape, rows = batch.lengths.shape, batch.lengths.size
        steps = jnp.maximum(jnp.max(batch.step, axis=-1) + 1, 1)
        draws = jax.random.uniform(state_key, (rows,)).reshape(shape)
        reached = jnp.minimum((draws * steps).astype(jnp.int32), steps - 1)
        keys = jax.vmap(lambda row: jax.random.fold_in(dropout_key, row))(jnp.arange(rows)).reshape(shape)
        return roll_back(batch, reached, keys, denoiser.mask_id)

    def means(
        self,
        indicator: Indicator,
        base: Denoiser,
        noised: RolledBack,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> Means:
        """Reports the share of positives, the AUC, and precision and recall of scores above the published threshold.

        Of a batch in parts the AUC is the mean over these. Where no score is above, precision and recall are 0.
        """
        settings = self.settings
        chunk = settings.chunk * groups
        found = gather_evidence(indicator.config, base, noised, canvas=self.canvas, chunk=chunk, sharding=sharding)
        found = lax.stop_gradient(found)
        logits = _drop_out_logits(indicator, found, noised.keys, settings.dropout)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, found.label.astype(jnp.int32))
        weights = jnp.where(found.label, settings.positive_weight, 1.0) * found.masked
        loss = Mean.of(jnp.sum(weights * entropy), jnp.sum(weights))
        scores = jax.nn.softmax(lax.stop_gradient(logits))[..., 1]
        chosen = found.masked & (scores > PUBLISHED_THRESHOLD)
        right, positives, masked = (jnp.sum(x) for x in (chosen & found.label, found.label, found.masked))
        return {
            "loss": loss,
            "positives": Mean.of(positives, masked),
            "auc": Mean.of(auc(scores, found.label, found.masked) * masked, masked),
            "precision": Mean.of(right, jnp.sum(chosen)),
            "recall": Mean.of(right, positives),
        }


def _drop_out_logits(indicator: Indicator, found: Evidence, keys: jax.Array, rate: float) -> jax.Array:
    """[B, W, 2] logits with dropout; that of a row depends on its key alone."""
    if not rate:
        return indicator.logits(*found.features)

    def one(key: jax.Array, hidden: jax.Array, embeddings: jax.Array, values: jax.Array) -> jax.Array:
        return indicator.logits(hidden, embeddings, values, (key, rate))

    return jax.vmap(one)(keys, *found.features)
