"""Several blocks in flight: what a noisy position sees, how many masks, and that it is what the pipeline shows it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train_block import SDAR, TWO, L, T, denoiser_of

from dllm_jax import Denoiser
from samplers.loops.d2f import PipelineSampler
from train.losses import Batch, routed_states
from train.objectives.block_diffusion import BlockDiffusionPart, corrupt_copies, rising_in_groups


def hidden_of(denoiser, noisy, clean, lengths, in_flight):
    """Hidden states of noisy rows after clean ones, [B, T, D], as the objective computes them."""
    before = denoiser.forward(clean, lengths)[1]
    return routed_states(denoiser, noisy, lengths, None, before=before, in_flight=in_flight)[0]


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_what_is_not_seen_changes_no_bit(in_flight):
    """And what is seen changes something, in blocks of two of a row of six, the last group of four being short."""
    denoiser, lengths = denoiser_of(TWO), jnp.full(1, T)
    noisy, clean = jax.random.randint(jax.random.key(0), (2, 1, T), 0, 20)
    run = jax.jit(lambda noisy, clean: hidden_of(denoiser, noisy, clean, lengths, in_flight))
    plain, block = np.asarray(run(noisy, clean))[0], np.arange(T) // 2
    for changed in range(T // 2):
        other = lambda x, changed=changed: jnp.where(block == changed, (x + 1) % 20, x)
        sees = {
            "noisy": (block >= changed) & (block // in_flight == changed // in_flight),
            "clean": block // in_flight > changed // in_flight,
        }
        found = {"noisy": run(other(noisy), clean), "clean": run(noisy, other(clean))}
        for name, seen in sees.items():
            differs = np.abs(np.asarray(found[name])[0] - plain).max(axis=-1)
            assert (differs[~seen] == 0).all() and (differs[seen] > 1e-4).all(), (name, changed)


def test_a_trained_position_sees_what_it_sees_in_the_pipeline():
    """Three blocks in flight, with two tokens, one and none, after prompts of three blocks and six: the pipeline's
    log-probabilities are those of the noisy copy, whatever the clean row holds from the group on."""
    config, size = SDAR.replace(max_length=64), 3
    denoiser, lengths = denoiser_of(config), jnp.array([3 * L, 6 * L])
    prompt = jax.random.randint(jax.random.key(3), (2, 6 * L), 0, 20)
    # In every forward a block begins, and each in flight writes its most confident position, whatever the weights.
    wait = PipelineSampler(
        size * L,
        L,
        align_blocks=True,
        tau_add=0.0,
        tau_act=0.0,
        threshold=np.inf,
        end_ids=jnp.zeros(0, jnp.int32),
    )
    state = wait.init(denoiser, prompt, lengths)
    for _ in range(2):
        state = jax.jit(wait.step)(denoiser, state)
    undecided = np.asarray(state.canvas.undecided)
    assert (undecided.reshape(2, size, L).sum(-1) == [2, 3, 4]).all()
    after = jax.jit(dataclasses.replace(wait, threshold=0.0).step)(denoiser, state).canvas  # writes every position
    assert not np.asarray(after.undecided).any()

    noisy = state.canvas.tokens
    clean = jnp.where(jnp.arange(noisy.shape[1]) < lengths[:, None], noisy, 7)
    hidden = jax.jit(hidden_of, static_argnums=4)(denoiser, noisy, clean, lengths + size * L, size)
    log = jax.nn.log_softmax(denoiser.logits(hidden))
    chosen = np.asarray(jnp.take_along_axis(log, after.tokens[..., None], axis=-1))[..., 0]
    for row, start in enumerate(lengths.tolist()):
        wanted, found = np.asarray(after.logprobs)[row], chosen[row, start : start + size * L]
        np.testing.assert_allclose(found[undecided[row]], wanted[undecided[row]], rtol=1e-4, atol=1e-5)
    assert np.ptp(chosen) > 0.1


def test_shares_rise_within_groups():
    """From the first learned block of each on; the draws are those of one block in flight."""
    rows, blocks, size = 50, 10, 4
    draws = jax.random.uniform(jax.random.key(0), (rows, blocks))
    learned = np.arange(blocks) >= np.arange(rows)[:, None] % 4
    learned[:, 9] = False
    found = np.asarray(rising_in_groups(draws, jnp.asarray(learned), size))
    for row in range(rows):
        for first in range(0, blocks, size):
            own = np.flatnonzero(learned[row, first : first + size]) + first
            np.testing.assert_array_equal(found[row, own], np.sort(np.asarray(draws)[row, own]))
    shorter = rising_in_groups(draws[:, :9], jnp.asarray(learned[:, :9]), size)  # as rows of another bucket
    np.testing.assert_array_equal(np.where(learned, found, 0)[:, :9], np.where(learned[:, :9], shorter, 0))
    one = rising_in_groups(draws, jnp.asarray(learned), 1)
    np.testing.assert_array_equal(np.where(learned, one, 0), np.where(learned, draws, 0))


def test_noise_with_a_copy_of_the_rest_and_wrong_tokens():
    """Weights are of the sorted shares, which fall in the complementary copy; wrong tokens stand among what is left."""
    part = BlockDiffusionPart(loss="bound", low=0.2, high=0.7, complementary=True, in_flight=3, wrong=0.5)
    tokens = jax.random.randint(jax.random.key(0), (200, T), 0, 20)
    batch = Batch(tokens, jnp.ones((200, T), bool), jnp.full(200, T))
    noised = corrupt_copies(jax.random.key(1), batch, Denoiser(SDAR, {}), part)
    weights, masked = np.asarray(noised.weights), np.asarray(noised.inputs == SDAR.mask_id)
    assert (masked[:, 0] ^ masked[:, 1]).all()
    of_blocks = np.where(masked, 1 / np.maximum(weights, 1e-9), np.nan).reshape(200, 2, T // L, L)
    share = np.nanmax(of_blocks, axis=-1, initial=0.0)  # 0 where a block has no mask
    both = (share > 0).all(axis=(1, 2))
    assert both.sum() > 50
    assert (np.diff(share[both, 0]) >= -1e-6).all() and (np.diff(share[both, 1]) <= 1e-6).all()
    np.testing.assert_allclose(share[both].sum(axis=1), 1.0, rtol=1e-5)
    wrong = ~masked & (np.asarray(noised.inputs) != np.asarray(tokens)[:, None])
    assert (weights[wrong] == 1).all() and 0.4 < wrong.sum() / (~masked).sum() < 0.6
