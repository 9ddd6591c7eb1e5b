"""The pipeline sampler against a plain loop that recomputes everything, and its properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_toys import DREAM, LLADA

from dllm_jax import Denoiser, DllmError
from dllm_jax.params import init_params
from samplers import EB, PipelineSampler, block_causal, sample_jit, stream

LENGTH, GEN, WIDTH = 4, 12, 6
PROMPTS = np.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0], [3, 1, 4, 1, 5, 0]])
PROMPT_LENGTHS, GEN_LENGTHS = np.array([6, 3, 5]), np.array([12, 10, 3])
TAUS = {
    "tau_add": np.array([0.1, 0.5, 1.0], np.float32),
    "tau_act": np.array([0.95, 0.5, 0.95], np.float32),
    "threshold": np.array([0.3, 0.4, 0.5], np.float32),
}


def denoiser_of(config):
    params = init_params(config, jax.random.key(1), dtype="float32")
    return Denoiser(config, {name: x * 8 if x.ndim > 1 else x for name, x in params.items()})  # far from uniform


@jax.jit
def probabilities(denoiser, tokens, prompt_length, length):
    """Of one row, every position computed anew under the block-causal mask."""
    return jax.nn.softmax(block_causal(denoiser, prompt_length[None], LENGTH)(tokens[None], length[None])[0])


def reference(denoiser, prompt, gen_length, tau_add, tau_act, threshold):
    """D2F's loop without a cache: all blocks are masks from the start, those that are not appended are ignored."""
    start, blocks = len(prompt), -(-gen_length // LENGTH)
    tokens = np.full(WIDTH + GEN, denoiser.eos_id)
    tokens[:start] = prompt
    tokens[start : start + gen_length] = denoiser.mask_id
    decoded_at, appended, ended, nfe = np.full(GEN, -1), 0, False, 0
    canvas = tokens[start : start + gen_length]
    span = lambda b: slice(b * LENGTH, min((b + 1) * LENGTH, gen_length))
    ratio = lambda b: 1.0 if b < 0 else float(np.float32(np.mean(canvas[span(b)] != denoiser.mask_id)))
    while True:
        if appended < blocks and not ended and ratio(appended - 1) >= tau_add:
            appended += 1
        full = [ratio(b - 1) >= tau_act for b in range(appended)]
        if all(ratio(b) == 1 for b in range(appended)):
            return tokens, decoded_at, nfe
        scores = np.array(
            probabilities(denoiser, jnp.asarray(tokens), jnp.asarray(start), jnp.asarray(start + gen_length))
        )
        scores = scores[start : start + gen_length]
        scores[:, denoiser.mask_id] = -1
        before = canvas == denoiser.mask_id
        for b in range(appended):
            places = [i for i in range(gen_length)[span(b)] if before[i]]
            sure = [i for i in places if scores[i].max() > threshold]
            if not sure and full[b] and places:
                sure = [max(places, key=lambda i: scores[i].max())]
            for i in sure:
                canvas[i], decoded_at[i] = scores[i].argmax(), nfe
                ended |= canvas[i] == denoiser.eos_id
        nfe += 1


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_ragged_batch_with_a_cache_is_each_row_without(config):
    denoiser = denoiser_of(config)
    sampler = PipelineSampler(GEN, LENGTH, **{name: jnp.asarray(value) for name, value in TAUS.items()})
    result = sample_jit(sampler, denoiser, PROMPTS, PROMPT_LENGTHS, gen_lengths=GEN_LENGTHS)
    forwards = []
    for row, (prompt, length, gen) in enumerate(zip(PROMPTS, PROMPT_LENGTHS, GEN_LENGTHS, strict=True)):
        taus = {name: value[row] for name, value in TAUS.items()}
        tokens, decoded_at, nfe = reference(denoiser, prompt[:length], int(gen), **taus)
        found = np.where(tokens == denoiser.mask_id, denoiser.eos_id, tokens)[length : length + GEN]
        assert result.tokens[row, :gen].tolist() == found[:gen].tolist()
        assert result.decoded_at[row].tolist() == decoded_at.tolist()
        assert int(result.nfe[row]) == nfe
        forwards.append(nfe)
    assert min(forwards) > 1
    assert result.full_forwards.tolist() == [1, 1, 1]


@pytest.mark.parametrize("options", [{"rule": EB(0.5)}, {"in_flight": 1}], ids=["eb", "one-in-flight"])
def test_progress_and_frozen_blocks(options):
    """Every forward commits or caches, nothing is committed twice, the bound holds, keys of cached blocks stay."""
    denoiser = denoiser_of(LLADA)
    sampler = PipelineSampler(GEN, LENGTH, end_ids=jnp.asarray([denoiser.vocab_size]), **options)
    states = list(stream(sampler, denoiser, PROMPTS, PROMPT_LENGTHS))
    for before, after in zip(states, states[1:], strict=False):
        wrote = (after.decoded_at >= 0).sum(1) > (before.decoded_at >= 0).sum(1)
        assert (np.asarray(wrote) | np.asarray(after.cached > before.cached) | np.asarray(before.done)).all()
        same = np.where(before.decoded_at >= 0, after.decoded_at == before.decoded_at, True)
        assert same.all()
        flight = (after.appended_at >= 0).sum(1) - before.cached
        assert int(flight.max()) <= sampler.most_in_flight
        for row in range(3):
            final = int(before.cached[row]) * LENGTH + int(PROMPT_LENGTHS[row]) if int(before.nfe[row]) else 0
            old, new = (np.asarray(state.kv[1].key)[row, :final] for state in (before, after))
            assert (old == new).all()
    result = sampler.result(denoiser, states[-1])
    assert (np.asarray(result.decoded_at) >= 0).all()
    assert not (np.asarray(result.tokens) == denoiser.mask_id).any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"block_length": 16}, "must be between 1 and gen_length 12"),
        ({"tau_add": 1.5}, "tau_add is 1.5; it must be between 0 and 1"),
        ({"in_flight": 0}, "in_flight is 0; it must be at least 1"),
        ({"forced": "luck"}, "forced 'luck' is unknown"),
        ({"rule": "threshold"}, "give a rule object"),
    ],
)
def test_refusals(options, sentence):
    with pytest.raises(DllmError, match=sentence):
        PipelineSampler(**{"gen_length": GEN, "block_length": LENGTH, **options}).init(denoiser_of(LLADA), PROMPTS)


def test_a_causal_model_is_refused():
    config = LLADA.replace(attention="causal")
    with pytest.raises(DllmError, match="give a diffusion model"):
        PipelineSampler(GEN, LENGTH).init(denoiser_of(config), PROMPTS)
