"""The objective of DiffusionGemma, whose noise is uniform and whose canvas is denoised by a decoder:
`python -m train uniform-diffusion`.

The encoder reads each row as it is, causally. One of the row's canvases, any as likely as another, is noised: each of
its L tokens becomes a random one of the vocabulary with probability t ~ U(eps, 1). The decoder denoises it, with the
keys and values of what the encoder has read before it:

    loss = mean over the canvas's positions of - log p(token | noised canvas, soft, all before the canvas)
           + next_token * mean over a row's positions of - log p(token | all before it), the encoder's

both averaged over rows. All L positions count, replaced or not, without a weight by t. For a share of the rows,
`soft` is what a first pass expects in each place, with a gradient of the embeddings alone; for the others it is zeros,
as in the first step of sampling.

This is what Google's own fine-tuning does (google-deepmind/gemma, `gemma/diffusion/hackable_diffusion_adapter`), which
also teaches the encoder the end tokens of a canvas's rest. NVIDIA's (NeMo AutoModel) has no loss of the encoder and
denoises all canvases of a row.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.models.kv_cache import KVCache, slice_rows, with_room
from dllm_jax.models.transformer import RematPolicy
from train.config import Kind, TrainConfig, UnfilledDataPart
from train.losses import Batch, Mean, Means, cross_entropies, expected_embeddings, position_draws
from train.objectives.base import Objective
from train.settings import setting
from train.vocabulary import head_sums


@dataclasses.dataclass(frozen=True)
class UniformDiffusionPart:
    """The loss of `python -m train uniform-diffusion`. Google's fine-tuning is nothing changed.

    Attributes:
        kind: "sft" puts canvases on answers alone, each answer's first one where it begins; "pretrain" on all of a row.
        block_length: L, the length of a canvas, which the trained model is sampled with too; 0 keeps the model's.
        eps: least probability that a token is replaced; t ~ U(eps, 1) for each row.
        self_conditioning: share of the rows whose decoder receives what a first pass expected.
        next_token: weight of the encoder's loss.
        prompt: whether the encoder's loss is also of the prompt's tokens.
        chunk: positions of a device whose logits exist at once; 0 computes the logits of all positions.
    """

    kind: Kind = "sft"
    block_length: int = setting(0, at_least=0)
    eps: float = setting(1e-4, at_least=0, at_most=1)
    self_conditioning: float = setting(0.5, at_least=0, at_most=1)
    next_token: float = setting(1.0, at_least=0)
    prompt: bool = True
    chunk: int = setting(0, at_least=0)


@dataclasses.dataclass(frozen=True)
class UniformDiffusionConfig(TrainConfig):
    """A run of `python -m train uniform-diffusion`."""

    data: UnfilledDataPart = dataclasses.field(default_factory=UnfilledDataPart)
    objective: UniformDiffusionPart = dataclasses.field(default_factory=UniformDiffusionPart)
    command: Literal["uniform-diffusion"] = "uniform-diffusion"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.pad:
            raise DllmError(
                "data.pad fills rows with end tokens, of which whole canvases would be learned; leave it out (the "
                "last canvas of an answer is filled)"
            )
        if self.data.random_length:
            raise DllmError(
                "data.random_length cuts texts where they do not end, and end tokens would be learned there; leave it "
                "out"
            )


class NoisedCanvas(NamedTuple):
    """A batch with one noised canvas in each row.

    Attributes:
        tokens: [..., T] int32, the rows as they are.
        learned: [..., T] bool, what the encoder's loss is of.
        lengths: [...] int32, positions that count.
        start: [...] int32, the canvas's first position.
        canvas: [..., L] int32, the canvas as it is; end tokens after its text.
        inputs: [..., L] int32, with its noise.
        weights: [...] float32, 1 for a row that has a canvas, else 0.
        conditioned: [...] bool, rows whose decoder receives what a first pass expected.
    """

    tokens: jax.Array
    learned: jax.Array
    lengths: jax.Array
    start: jax.Array
    canvas: jax.Array
    inputs: jax.Array
    weights: jax.Array
    conditioned: jax.Array


def canvas_starts(targets: jax.Array, length: int) -> jax.Array:
    """Where canvases of this length begin, [..., T] bool, of targets [..., T] bool: each run of targets is cut into
    canvases from its first position on."""
    place = jnp.arange(targets.shape[-1], dtype=jnp.int32)
    before = jnp.pad(targets[..., :-1], [(0, 0)] * (targets.ndim - 1) + [(1, 0)])
    first = lax.cummax(jnp.where(targets & ~before, place, -1), axis=targets.ndim - 1)
    return targets & ((place - first) % length == 0)


def corrupt_canvases(key: jax.Array, batch: Batch, denoiser: Denoiser, settings: UniformDiffusionPart) -> NoisedCanvas:
    """The forward process. The draws of a row depend on the key and on its number in the batch.

    Args:
        batch: with any leading axes.
        denoiser: for the canvas's length and the tokens that exist; its parameters are not read.
    """
    length = denoiser.block_length
    assert length is not None
    shape, rows, width = batch.lengths.shape, batch.lengths.size, batch.tokens.shape[-1]
    choice_key, share_key, place_key, token_key, soft_key = jax.random.split(key, 5)
    tokens, targets = batch.tokens.reshape(rows, width), batch.targets.reshape(rows, width)
    starts = canvas_starts(targets, length)
    count = starts.sum(axis=1)
    chosen = (jax.random.uniform(choice_key, (rows,)) * count).astype(jnp.int32)
    start = jnp.argmax(starts & (jnp.cumsum(starts, axis=1) == chosen[:, None] + 1), axis=1).astype(jnp.int32)
    own, text = (slice_rows(jnp.pad(x, ((0, 0), (0, length))), start, length) for x in (tokens, targets))
    canvas = jnp.where(jnp.cumprod(text, axis=1) > 0, own, denoiser.eos_id)  # a later turn is another canvas's
    share = settings.eps + (1.0 - settings.eps) * jax.random.uniform(share_key, (rows, 1))
    random = jax.random.randint(token_key, (length, rows), 0, denoiser.vocab_size).T
    inputs = jnp.where(position_draws(place_key, rows, length) < share, random, canvas)
    conditioned = jax.random.uniform(soft_key, (rows,)) < settings.self_conditioning
    found = (start, canvas, inputs, (count > 0).astype(jnp.float32), conditioned)
    position = jnp.arange(width)
    learned = (position > 0) & (position < batch.lengths[..., None]) & (settings.prompt | batch.targets)
    return NoisedCanvas(batch.tokens, learned, batch.lengths, *(x.reshape(*shape, *x.shape[1:]) for x in found))


@dataclasses.dataclass(frozen=True)
class UniformDiffusion(Objective):
    """The objective with its settings."""

    about = "train a model with a canvas and uniform noise (DiffusionGemma)"
    config = UniformDiffusionConfig

    settings: UniformDiffusionPart

    def fit_model(self, model: ModelConfig, config: TrainConfig) -> ModelConfig:
        """The model with canvases of the length that it is trained with."""
        if not model.has_canvas:
            raise DllmError(f"a {model.family} model has no canvas; uniform-diffusion trains diffusion-gemma models")
        self.check_router(model, config)
        return model.replace(block_length=self.settings.block_length or model.block_length)

    def corrupt(self, key: jax.Array, batch: Batch, denoiser: Denoiser) -> NoisedCanvas:
        return corrupt_canvases(key, batch, denoiser, self.settings)

    def means(
        self,
        denoiser: Denoiser,
        base: Denoiser,
        noised: NoisedCanvas,
        /,
        *,
        groups: int = 1,
        remat: RematPolicy | None = None,
        sharding: NamedSharding | None = None,
    ) -> Means:
        """Reports both losses without their weights, in nats. `Objective.passes` counts the encoder's alone, so the
        utilisation that a run reports is less than it is."""
        settings, length = self.settings, noised.inputs.shape[1]
        read, kv = denoiser.forward(noised.tokens, noised.lengths, remat=remat)
        soft = jnp.zeros((*noised.inputs.shape, denoiser.config.embed_dim), denoiser.dtype)
        if settings.self_conditioning:
            hidden = lax.stop_gradient(run_decoder(denoiser, noised, soft, kv))
            expected = expected_embeddings(denoiser, hidden, chunk=settings.chunk)
            soft = jnp.where(noised.conditioned[:, None, None], expected, soft)
        hidden = run_decoder(denoiser, noised, soft, kv, remat=remat)
        sum_up = functools.partial(
            head_sums, cross_entropies, (denoiser,), chunk=settings.chunk, groups=groups, sharding=sharding
        )
        total, _ = sum_up((hidden, noised.canvas), jnp.repeat(noised.weights[:, None] / length, length, axis=1))
        diffusion = Mean.of(total, jnp.sum(noised.weights))
        if not settings.next_token:
            return {"loss": diffusion, "diffusion": diffusion}
        learned, count = noised.learned[:, 1:], jnp.sum(noised.learned, axis=1, keepdims=True)
        total, _ = sum_up((read[:, :-1], noised.tokens[:, 1:]), learned / jnp.maximum(count, 1))
        next_token = Mean.of(total, jnp.sum(count > 0))
        loss = diffusion.plus(settings.next_token * next_token.value)
        return {"loss": loss, "diffusion": diffusion, "next_token": next_token}


def run_decoder(
    denoiser: Denoiser, noised: NoisedCanvas, soft: jax.Array, kv: KVCache, *, remat: RematPolicy | None = None
) -> jax.Array:
    """Hidden states [B, L, D] of the canvases, from the keys and values that the encoder has for the rows."""
    kv = with_room(kv, noised.inputs.shape[1])
    return denoiser.denoise(noised.inputs, soft, noised.start, kv, remat=remat)[0]
