"""Likelihood of an answer under a masked diffusion model, and whether greedy decoding gives it.

The estimators, LLaDA's and Dream's (`draw_masks`), are of one bound, by masked copies of the answer. The functions here
take one pair and can be jitted; `samplers.likelihood.scoring` takes thousands of pairs.
"""

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike, Span
from dllm_jax.models.kv_cache import slice_rows, write_rows
from samplers.checks import check_choice, check_length
from samplers.loops.autoregressive import Autoregressive
from samplers.loops.block import BlockSampler
from samplers.rules import TopK
from samplers.sampler import sample
from samplers.tokens.guidance import Guided, paired
from samplers.tokens.noise import KeyNoise, Purpose
from samplers.tokens.predictions import logprobs_of, readout

DrawnEstimator = Literal["llada", "llada-official", "dream"]
DRAWN_ESTIMATORS: tuple[str, ...] = get_args(DrawnEstimator)

LEAST_RATIO = 1e-3  # of tokens that Dream's estimator masks


def mask_counts(
    first: jax.Array, batch_size: int, answer_length: jax.Array | int, *, to_even: bool = False
) -> jax.Array:
    """How many answer tokens each row of a Monte Carlo batch masks: a stratified cover of 1 .. answer_length.

    n_r = ((round(first + r t / b) - 1) mod t) + 1, in whole numbers, so that every program and platform counts alike
    (official code has float32, whose halves are exact where b is a power of two).

    Args:
        first: scalar int32 in 1 .. answer_length, drawn uniformly per batch.
        to_even: round halves to even, as official code does; then even numbers are drawn more often than odd ones, and
            the estimate has a bias: of two tokens and batches of four, 3/4 of all rows mask both. Halves are rounded up
            otherwise, so that each number is as frequent as any other.

    Returns:
        [batch_size] int32.
    """
    whole, rest = jnp.divmod(jnp.arange(batch_size, dtype=jnp.int32) * answer_length, batch_size)
    below = first + whole
    x = below + (2 * rest + (below % 2 if to_even else 1) > batch_size)
    return (x - 1) % answer_length + 1


def draw_masks(
    key: jax.Array,
    answer_length: jax.Array | int,
    width: int,
    *,
    num_samples: int,
    batch_size: int,
    estimator: DrawnEstimator = "llada",
) -> tuple[jax.Array, jax.Array]:
    """The tokens that each copy of an answer masks.

    LLaDA's copies mask a number of tokens that covers 1 .. answer_length evenly in each batch, at places drawn without
    replacement; "llada-official" has official code's bias (`mask_counts`). Dream's mask each token with the copy's
    probability p = (1 - 1e-3) t + 1e-3, where the t of a batch cover [0, 1) evenly from a drawn one on; a copy may have
    no mask at all.

    A draw is a hash of the key, the copy and the position: it depends neither on `width` nor on other pairs, and
    answers of one key have the same draws where both have tokens.

    Args:
        key: a typed key.
        answer_length: how many of `width` positions are the answer.
        num_samples: copies in all, a multiple of batch_size.
        batch_size: copies that are stratified together.

    Returns:
        [num_samples, width] bool, and [num_samples] float32, the share of tokens masked: what losses are divided by.
    """
    noise, copies = KeyNoise(jnp.broadcast_to(key, (num_samples,))), jnp.arange(num_samples)
    place = jnp.arange(width)
    order = noise.uniform(Purpose.ORDER, copies, jnp.broadcast_to(place, (num_samples, width)))
    first = noise.uniform(Purpose.SHARE, copies // batch_size, jnp.zeros((num_samples, 1), jnp.int32))[:, 0]
    inside = place < answer_length
    if estimator == "dream":
        t = (first + (copies % batch_size).astype(jnp.float32) / batch_size) % 1.0
        ratio = (1.0 - LEAST_RATIO) * t + LEAST_RATIO
        return (order < ratio[:, None]) & inside, ratio
    starts = 1 + jnp.minimum((first[::batch_size] * answer_length).astype(jnp.int32), answer_length - 1)
    count = functools.partial(
        mask_counts, batch_size=batch_size, answer_length=answer_length, to_even=estimator == "llada-official"
    )
    counts = jax.vmap(count)(starts).reshape(-1)
    rank = jnp.argsort(jnp.argsort(jnp.where(inside, order, 2.0), axis=1), axis=1)
    return rank < counts[:, None], counts / answer_length


def masked_logprobs(
    denoiser: DenoiserLike,
    tokens: jax.Array,
    masked: jax.Array,
    lengths: jax.Array,
    *,
    span: Span,
    prompt_lengths: jax.Array,
    guidance: float | jax.Array | None = None,
    scored: jax.Array | None = None,
) -> jax.Array:
    """Log-probabilities of the masked tokens by one forward, summed over each row. The head runs on the span alone, in
    tiles (`samplers.tokens.predictions`).

    Args:
        tokens: [B, S] int32, prompt and answer; masked: [B, S] bool, within the answer.
        lengths: [B] int32, tokens that count.
        span: positions that hold all of a row's masks.
        prompt_lengths: [B] int32.
        guidance: scale of classifier-free guidance, with the whole prompt masked; None runs without.
        scored: [B, S] bool, which of the masked tokens are summed; None sums all.

    Returns:
        [B] float32, sums of log-probabilities in nats.
    """
    inputs = jnp.where(masked, denoiser.mask_id, tokens)
    if guidance is not None:
        inputs = paired(denoiser, inputs, jnp.arange(tokens.shape[1]) < prompt_lengths[:, None])
        denoiser = Guided(denoiser, guidance)
    hidden, _ = denoiser.forward(inputs, lengths, outputs=span)
    found = logprobs_of(readout(denoiser, hidden), slice_rows(tokens, *span))
    summed = slice_rows(masked if scored is None else scored, *span)
    return jnp.sum(jnp.where(summed, found, 0.0), axis=1)


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
    place_after_prompt = lambda prompt, rows: write_rows(
        jnp.pad(jnp.broadcast_to(prompt, (batch, prompt.shape[0])), ((0, 0), (0, width))), rows, start
    )
    found = masked_logprobs(
        denoiser,
        place_after_prompt(prompt.astype(jnp.int32), jnp.broadcast_to(answer.astype(jnp.int32), (batch, width))),
        place_after_prompt(prompt < 0, (perturbed == denoiser.mask_id) & (jnp.arange(width) < answer_length)),
        start + answer_length,
        span=Span(start, width),
        prompt_lengths=start,
        guidance=guidance,
    )
    return -jnp.mean(found / mask_ratio)


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
    estimator: DrawnEstimator = "llada",
) -> jax.Array:
    """Monte Carlo lower bound of log p(answer | prompt) in nats (LLaDA, arXiv 2502.09992, equation 6 and appendix B).

    Jittable; lengths are traced, so that answers padded to one width share a program. LLaDA's value of an answer of one
    token is exact whatever is drawn, and [1] answers take one forward.

    Args:
        prompt: [P] int32, answer: [A] int32; `prompt_length` and `answer_length` say how much of them counts.
        num_samples: masked copies in all, a multiple of batch_size; batch_size: those of one stratified batch.
        guidance: as in `masked_loss`.
        estimator: see `draw_masks`. Of "dream" an end token follows the answer and is never masked.

    Raises:
        DllmError: when batch_size does not divide num_samples, or the prompt or answer is too short.
    """
    check_samples(estimator, num_samples=num_samples, batch_size=batch_size)
    if prompt.ndim != 1 or answer.ndim != 1:
        raise DllmError("prompt and answer must be vectors of token ids; use jax.vmap for several pairs")
    if prompt.shape[0] < least_prompt(denoiser, estimator):
        raise DllmError("this model cannot score its very first position; give a prompt of at least one token")
    if not answer.shape[0]:
        raise DllmError("the answer is empty; give at least one token")
    if answer.shape[0] == 1 and estimator != "dream":
        num_samples = batch_size = 1
    length = jnp.asarray(answer.shape[0] if answer_length is None else answer_length, jnp.int32)
    masked, ratio = draw_masks(
        key, length, answer.shape[0], num_samples=num_samples, batch_size=batch_size, estimator=estimator
    )
    if estimator == "dream":
        answer = jnp.pad(answer, (0, 1)).at[length].set(denoiser.eos_id)
        masked, length = jnp.pad(masked, ((0, 0), (0, 1))), length + 1

    def one_batch(batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        copies = jnp.where(batch[0], denoiser.mask_id, answer)
        return masked_loss(
            denoiser,
            prompt,
            answer,
            copies,
            batch[1],
            prompt_length=prompt_length,
            answer_length=length,
            guidance=guidance,
        )

    batches = masked.reshape(-1, batch_size, answer.shape[0]), ratio.reshape(-1, batch_size)
    return -jnp.mean(lax.map(one_batch, batches))


def check_samples(estimator: str, **numbers: int) -> None:
    """Raises DllmError for an unknown estimator, and for a number of copies (the first) that the size of a batch (the
    second) does not divide."""
    check_choice("estimator", estimator, DRAWN_ESTIMATORS)
    for name, number in numbers.items():
        check_length(name, number)
    (copies, count), (batch, size) = numbers.items()
    if count % size:
        raise DllmError(f"{copies} {count} is not a multiple of {batch} {size}; choose a multiple")


def least_prompt(denoiser: DenoiserLike, estimator: str) -> int:
    """Tokens that a prompt must have: Dream's estimator masks no sequence's first token."""
    return max(denoiser.min_prompt_length, int(estimator == "dream"))


def decode_greedily(
    denoiser: DenoiserLike,
    prompt: jax.Array,
    answer: jax.Array,
    prompt_lengths: jax.Array | None = None,
    answer_lengths: jax.Array | None = None,
    *,
    guidance: float | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `is_greedy`, with the number of forwards: [B] bool and [B] int32."""
    config = getattr(denoiser, "config", None)
    sampler: Any = BlockSampler(TopK(1, proxy="confidence"), gen_length=answer.shape[1], guidance=guidance)
    if config is not None and config.is_causal:
        sampler = Autoregressive(answer.shape[1])
    result = sample(sampler, denoiser, prompt, prompt_lengths, gen_lengths=answer_lengths)
    length = answer.shape[1] if answer_lengths is None else answer_lengths[:, None]
    right = jnp.all((result.tokens == answer) | (jnp.arange(answer.shape[1]) >= length), axis=1)
    return right, result.nfe


def is_greedy(
    denoiser: DenoiserLike,
    prompt: jax.Array,
    answer: jax.Array,
    prompt_lengths: jax.Array | None = None,
    answer_lengths: jax.Array | None = None,
    *,
    guidance: float | jax.Array | None = None,
) -> jax.Array:
    """Whether decoding the most confident position first, one per forward, gives the answer; of a causal model, whether
    greedy generation does.

    Args:
        prompt: [B, P] int32 and answer: [B, A] int32, left-aligned.
        prompt_lengths, answer_lengths: [B] int32, how much of them counts; all by default.

    Returns:
        [B] bool.
    """
    return decode_greedily(denoiser, prompt, answer, prompt_lengths, answer_lengths, guidance=guidance)[0]
