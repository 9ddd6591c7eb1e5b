"""Prompts that are read in blocks and never refreshed: what is kept is what would be read anew, in every row alone and
in a batch, and nothing of it changes."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import converted, refuses

import dllm_jax
from dllm_jax import make_mesh
from dllm_jax.pytree import pytree
from samplers import DualCache, PrefixCache, Threshold, VicinityCache, make_sampler, sample_jit
from samplers.text.prompts import pad_prompts

BLOCK = 4
PROMPTS = [list(b"Q: Sam has 21 pens."), list(b"Sam"), list(b"Max buys 3 apples, Eve 12!"), list(b"12345678")]
SHAPE = {"rule": Threshold(0.6), "gen_length": 24, "block_length": 8}


class ReadAnew:
    """A policy that keeps nothing: each refresh reads the prompt with the rest, in its blocks."""

    def predict(self, denoiser, request, state):
        outcome = super().predict(denoiser, request, state)
        return outcome._replace(state=dataclasses.replace(outcome.state, final=state.final * 0))


@pytree()
class DualAnew(ReadAnew, DualCache):
    pass


@pytree()
class PrefixAnew(ReadAnew, PrefixCache):
    pass


@pytree()
class VicinityAnew(ReadAnew, VicinityCache):
    pass


ANEW = {DualCache: DualAnew, PrefixCache: PrefixAnew, VicinityCache: VicinityAnew}


def generate(model, cache, prompts=PROMPTS, **options):
    sampler = make_sampler(model, **{**SHAPE, **options}, cache=cache)
    return jax.device_get(sample_jit(sampler, model.denoiser, *pad_prompts(prompts, 32)))


def assert_same(found, wanted, rows=slice(None)):
    for name in ("tokens", "lengths", "decoded_at", "nfe"):
        np.testing.assert_array_equal(getattr(found, name)[rows], getattr(wanted, name), err_msg=name)


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("llada", DualCache, {"refresh_every": 2}),
        ("llada", DualCache, {"guidance": 0.5}),
        ("llada", PrefixCache, {"smoothing": True}),
        ("llada", VicinityCache, {"warmup": 2}),
        ("llada", DualCache, {"block_length": 12, "align_blocks": True}),
        ("llada", DualCache, {"canvas_length": 80}),
        ("dream", DualCache, {}),
        ("dream", PrefixCache, {"align_blocks": True}),
        ("dream", VicinityCache, {}),
    ],
)
def test_what_is_kept_is_what_would_be_read(llada_tiny, dream_tiny, family, kind, options) -> None:
    """Also in rows alone, and where a prompt is too short for that."""
    model = {"llada": llada_tiny, "dream": dream_tiny}[family]
    own = {name: value for name, value in options.items() if hasattr(kind, name)}
    rest = {name: value for name, value in options.items() if name not in own}
    cache = kind(prompt_block_length=BLOCK, **own)
    found = generate(model, cache, **rest)
    assert_same(found, generate(model, ANEW[kind](**vars(cache)), **rest))
    for row in (0, 1):
        assert_same(found, generate(model, cache, PROMPTS[row : row + 1], **rest), slice(row, row + 1))
    if "canvas_length" not in options:
        assert_same(found, generate(model, kind(**own), PROMPTS[1:2], **rest), slice(1, 2))
    warmed = options.get("warmup", VicinityCache.warmup if kind is VicinityCache else 1)
    assert found.full_forwards[0] == found.full_forwards[2] == 1
    assert found.full_forwards[1] >= min(warmed, found.nfe[1])


def test_the_prompt_does_not_see_the_canvas(llada_tiny) -> None:
    """Its keys and values are the same whatever the canvas comes with, and another answer than the usual one's."""
    model, cache = llada_tiny, DualCache(prompt_block_length=BLOCK)
    sampler = make_sampler(model, **SHAPE, cache=cache)
    prompt, lengths = pad_prompts(PROMPTS, 32)
    given = np.full((len(PROMPTS), 24), model.config.mask_id, np.int32)
    given[:, 9:14] = 65

    def buffers(given):
        state = sampler.step(model.denoiser, sampler.init(model.denoiser, prompt, lengths, given=given))
        return state.cache.final, [np.asarray(x) for x in jax.tree.leaves(state.cache.kv)]

    (final, one), (_, other) = buffers(np.full_like(given, model.config.mask_id)), buffers(given)
    assert list(final) == [12, 0, 20, 4]
    for x, y in zip(one, other, strict=True):
        for row, count in enumerate(np.asarray(final)):
            np.testing.assert_array_equal(x[row, :count], y[row, :count])
    # the last layer's, which have seen what their position sees
    assert not np.array_equal(one[-1][0, 16], other[-1][0, 16])


def test_on_a_mesh(llada_tiny) -> None:
    cache = DualCache(prompt_block_length=BLOCK)
    split = dllm_jax.load(llada_tiny.folder, mesh=make_mesh(data=2))
    assert_same(generate(split, cache), generate(llada_tiny, cache))


def test_what_cannot_be_is_refused(tmp_path_factory) -> None:
    sdar = converted("sdar", tmp_path_factory)
    with refuses("prompt_block_length"):
        DualCache(prompt_block_length=0).check()
    with refuses("prompt_block_length", "exact cache"):
        generate(sdar, DualCache(prompt_block_length=8))
