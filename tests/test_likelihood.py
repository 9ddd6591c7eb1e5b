"""The likelihood estimate against exact sums on a tiny answer, and the greedy check against the sampler."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses

from samplers import BlockSampler, TopK, sample_jit
from samplers.likelihood.estimators import draw_masks, is_greedy, log_likelihood, mask_counts, masked_loss

PROMPT = jnp.asarray([ord(char) for char in "Q: Tom has 12 books. Tom buys 23.\nA: "])
estimate = jax.jit(log_likelihood, static_argnames=("num_samples", "batch_size"))


def test_counts_cover_every_number_evenly() -> None:
    """With as many rows as answer tokens each number of masks occurs once, whatever was drawn first."""
    for first in (1, 3, 7):
        assert sorted(np.asarray(mask_counts(jnp.asarray(first), 7, 7)).tolist()) == list(range(1, 8))


def test_masks_are_as_many_as_their_ratio() -> None:
    masked, ratio = draw_masks(jax.random.key(1), 5, 6, num_samples=20, batch_size=10)
    np.testing.assert_allclose(masked.sum(axis=1) / 5, ratio)
    assert not masked[:, 5:].any(), "nothing after the answer is masked"
    assert sorted(np.asarray(masked[:10].sum(axis=1)).tolist()) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (masked[:, :5].sum(axis=0) > 0).all()


@pytest.mark.parametrize("fixture", ["llada_tiny", "dream_tiny"])
def test_estimate_is_unbiased(request, fixture: str) -> None:
    """The mean of many draws is the exact bound: the mean over counts and subsets of loss times length / count."""
    denoiser = request.getfixturevalue(fixture).denoiser
    answer = jnp.asarray([49, 50, 43])
    subsets = [list(s) for n in (1, 2, 3) for s in itertools.combinations(range(3), n)]
    copies = jnp.stack([answer.at[jnp.asarray(s)].set(denoiser.mask_id) for s in subsets])
    loss = jax.jit(masked_loss)
    each = {len(s): [] for s in subsets}
    for subset, copy in zip(subsets, copies, strict=True):
        ratio = jnp.asarray([len(subset) / 3])
        each[len(subset)].append(float(loss(denoiser, PROMPT, answer, copy[None], ratio)))
    exact = -np.mean([np.mean(losses) for losses in each.values()])
    found = float(estimate(denoiser, PROMPT, answer, key=jax.random.key(0), num_samples=1536, batch_size=6))
    assert abs(found - exact) < 0.05 * abs(exact)


def test_padding_changes_nothing(llada_tiny) -> None:
    """Prompts and answers padded to a bucket, with their lengths as data, give the same likelihood."""
    answer = jnp.asarray([49, 50, 43, 50])
    options = {"num_samples": 1, "batch_size": 1, "key": jax.random.key(0)}
    single = estimate(llada_tiny.denoiser, PROMPT, answer[:1], **options)
    padded = estimate(
        llada_tiny.denoiser,
        jnp.pad(PROMPT, (0, 9)),
        jnp.pad(answer[:1], (0, 3)),
        prompt_length=len(PROMPT),
        answer_length=1,
        **options,
    )
    np.testing.assert_allclose(single, padded, atol=1e-4)


def test_greedy_check_agrees_with_the_sampler(llada_tiny) -> None:
    sampler = BlockSampler(TopK(1), gen_length=6)
    answer = sample_jit(sampler, llada_tiny.denoiser, PROMPT[None]).tokens
    wrong = answer.at[0, 2].set(65)
    both = jnp.pad(jnp.concatenate([answer, wrong]), ((0, 0), (0, 2)))
    prompts, lengths = jnp.tile(PROMPT, (2, 1)), jnp.asarray([6, 6])
    assert jax.jit(is_greedy)(llada_tiny.denoiser, prompts, both, None, lengths).tolist() == [True, False]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_samples": 5, "batch_size": 2}, "num_samples"),
        ({"answer": jnp.zeros((0,), jnp.int32)}, "answer"),
        ({"prompt": PROMPT[None]}, "prompt"),
    ],
)
def test_bad_requests(llada_tiny, options: dict, name: str) -> None:
    arguments = {"prompt": PROMPT, "answer": PROMPT[:2], "key": jax.random.key(0), **options}
    with refuses(name):
        log_likelihood(llada_tiny.denoiser, **arguments)
