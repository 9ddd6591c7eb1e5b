"""Likelihood of an answer under a masked diffusion model, and whether greedy decoding would give it (LLaDA's)."""

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.denoiser import DenoiserLike, Span
from dllm_jax.errors import DllmError
from dllm_jax.kv_cache import write_rows
from samplers.block import BlockSampler
from samplers.engine import sample
from samplers.guidance import Guided, paired
from samplers.rules import TopK


def mask_counts(first: jax.Array, batch_size: int, answer_length: jax.Array | int) -> jax.Array:
    """How many answer tokens each row of a Monte Carlo batch masks: a stratified cover of 1 .. answer_length.

    n_r = ((round(first + r t / b) - 1) mod t) + 1, rounding halves to even.

    Args:
        first: scalar int32 in 1 .. answer_length, drawn uniformly per batch.

    Returns:
        [batch_size] int32.
    """
    stride = jnp.asarray(answer_length, jnp.float32) / batch_size
    x = jnp.round(first + jnp.arange(batch_size, dtype=jnp.float32) * stride).astype(jnp.int32)
    return (x - 1) % answer_length + 1


def perturb(
    key: jax.Array, answer: jax.Array, answer_length: jax.Array, batch_size: int, mask_id: int
) -> tuple[jax.Array, jax.Array]:
    """A stratified batch of masked copies of an answer.

    Args:
        answer: [A] int32, of which the first `answer_length` count.

    Returns:
        Copies [batch_size, A] and the share of tokens masked in each [batch_size] float32.
    """
    first_key, order_key = jax.random.split(key)
    counts = mask_counts(jax.random.randint(first_key, (), 1, answer_length + 1), batch_size, answer_length)
    draws = jax.random.uniform(order_key, (batch_size, answer.shape[0]))
    draws = jnp.where(jnp.arange(answer.shape[0]) < answer_length, draws, 2.0)
    place = jnp.argsort(jnp.argsort(draws, axis=1), axis=1)
    return jnp.where(place < counts[:, None], mask_id, answer), counts / answer_length


def masked_loss(
    denoiser: DenoiserLike,
    prompt: jax.Array,
    answer: jax.Array,
    perturbed: jax.Array,
    mask_ratio: jax.Array,
    *,
    prompt_length: jax.Array | int | None = None,
    answer_length: jax.Array | int | None = None,
    guidance: float | jax.Array | None = None,
) -> jax.Array:
    """One Monte Carlo batch's bound on -log p(answer | prompt): mean over rows of the cross entropy / mask ratio.

    Args:
        prompt: [P] int32; answer: [A] int32; perturbed: [b, A] masked copies of it; mask_ratio: [b] float32.
        prompt_length, answer_length: how much of prompt and answer counts; all by default.
        guidance: scale of classifier-free guidance, with the whole prompt masked; None runs without.

    Returns:
        Scalar float32, in nats.
    """
    batch, width = perturbed.shape
    start = jnp.full((batch,), prompt.shape[0] if prompt_length is None else prompt_length, jnp.int32)
    answer_length = jnp.asarray(width if answer_length is None else answer_length, jnp.int32)
    tokens = jnp.pad(jnp.broadcast_to(prompt, (batch, prompt.shape[0])), ((0, 0), (0, width)))
    tokens = write_rows(tokens.astype(jnp.int32), perturbed.astype(jnp.int32), start)
    if guidance is not None:
        tokens = paired(denoiser, tokens, jnp.arange(tokens.shape[1]) < start[:, None])
        denoiser = Guided(denoiser, guidance)
    hidden, _ = denoiser.forward(tokens, start + answer_length, outputs=Span(start, width))
    scores = jax.nn.log_softmax(denoiser.logits(hidden), axis=-1)
    wanted = jnp.broadcast_to(answer, (batch, width))
    loss = -jnp.take_along_axis(scores, wanted[..., None], axis=-1)[..., 0]
    counted = (perturbed == denoiser.mask_id) & (jnp.arange(width) < answer_length)
    return jnp.mean(jnp.sum(jnp.where(counted, loss, 0.0), axis=1) / mask_ratio)


def log_likelihood(
    denoiser: DenoiserLike,
    prompt: jax.Array,
    answer: jax.Array,
    *,
    key: jax.Array,
    num_samples: int = 128,
    batch_size: int = 16,
    prompt_length: jax.Array | int | None = None,
    answer_length: jax.Array | int | None = None,
    guidance: float | jax.Array | None = None,
) -> jax.Array:
    """Monte Carlo lower bound of log p(answer | prompt) in nats (LLaDA, arXiv 2502.09992, equation 6 and appendix B).

    An answer of one token needs one sample and is exact. Jittable; lengths are traced, so that answers padded to one
    width share a program.

    Args:
        prompt: [P] int32, answer: [A] int32; `prompt_length` and `answer_length` say how much of them counts.
        num_samples: masked copies in all, a multiple of batch_size.

    Raises:
        DllmError: when batch_size does not divide num_samples, or the prompt or answer is too short.
    """
    if num_samples < 1 or batch_size < 1 or num_samples % batch_size:
        raise DllmError(f"num_samples {num_samples} is not a multiple of batch_size {batch_size}; choose a multiple")
    if prompt.ndim != 1 or answer.ndim != 1:
        raise DllmError("prompt and answer must be vectors of token ids; use jax.vmap for several pairs")
    if prompt.shape[0] < denoiser.min_prompt_length:
        raise DllmError("this model cannot score its very first position; give a prompt of at least one token")
    if not answer.shape[0]:
        raise DllmError("the answer is empty; give at least one token")
    length = jnp.asarray(answer.shape[0] if answer_length is None else answer_length, jnp.int32)

    def one_batch(batch_key: jax.Array) -> jax.Array:
        perturbed, ratio = perturb(batch_key, answer, length, batch_size, denoiser.mask_id)
        return masked_loss(
            denoiser,
            prompt,
            answer,
            perturbed,
            ratio,
            prompt_length=prompt_length,
            answer_length=length,
            guidance=guidance,
        )

    return -jnp.mean(lax.map(one_batch, jax.random.split(key, num_samples // batch_size)))


def is_greedy(
    denoiser: DenoiserLike,
    prompt: jax.Array,
    answer: jax.Array,
    prompt_lengths: jax.Array | None = None,
    answer_lengths: jax.Array | None = None,
    *,
    guidance: float | jax.Array | None = None,
) -> jax.Array:
    """Whether decoding the surest position first, one per forward, reproduces the answer.

    Args:
        prompt: [B, P] int32 and answer: [B, A] int32, left-aligned.
        prompt_lengths, answer_lengths: [B] int32, how much of them counts; all by default.

    Returns:
        [B] bool.
    """
    sampler = BlockSampler(TopK(1, proxy="confidence"), gen_length=answer.shape[1], guidance=guidance)
    result = sample(sampler, denoiser, prompt, prompt_lengths, gen_lengths=answer_lengths)
    length = answer.shape[1] if answer_lengths is None else answer_lengths[:, None]
    return jnp.all((result.tokens == answer) | (jnp.arange(answer.shape[1]) >= length), axis=1)
