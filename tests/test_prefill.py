"""Prompts that are read before their first step: the same answers, what is found, what is kept, and who waits."""

import dataclasses
import functools
import time

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import converted, refuses

import dllm_jax
from dllm_jax import make_mesh
from samplers import Engine, Request
from samplers.engine.prefill import LEAST_KEPT, Prefix, PrefixStore

SHAPE = {"gen_length": 24, "block_length": 8}
SYSTEM = list(b"You count things, and answer with one number alone. ")  # 52 tokens, six whole blocks
QUESTIONS = [b"Tom has 3.", b"Kim has 31 shells and finds 25 more of them in the sand. How many?", b"", b"Ann."]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A converted model of each family, by name."""
    return functools.cache(lambda family: converted(family, tmp_path_factory))


def engine_of(model, **options) -> Engine:
    given = {"slots": 3, "prompt_length": 160, **SHAPE, **options}
    return Engine(model, given.pop("sampler", "threshold:threshold=0.7"), **given)


def assert_same(one: Request, other: Request) -> None:
    """But for the counts of full forwards, which are those that ran."""
    assert one.result is not None and other.result is not None
    for name in ("tokens", "lengths", "decoded_at", "nfe", "edits"):
        np.testing.assert_array_equal(getattr(one.result, name), getattr(other.result, name), err_msg=name)


def answers(engine: Engine, prompts, **options) -> list[Request]:
    found = [engine.submit(engine.request(prompt, **options)) for prompt in prompts]
    list(engine.results())
    return found


BY_8 = [56, 112, 48, 48, 64, 0, 0]  # positions that are found, where blocks have 8
BY_16 = [32, 96, 32, 32, 48, 0, 0]  # all but the last


@pytest.mark.parametrize(
    ("family", "sampler", "options", "found"),
    [
        ("llada2", "threshold:threshold=0.7", {}, BY_8),
        ("sdar", "edit:threshold=0.4", {"buckets": True}, BY_8),
        ("fast-dllm-v2", "threshold:threshold=0.7", {}, BY_8),
        ("fast-dllm-v2", "fast-dllm-v2:sub_block_length=4", {}, BY_8),
        ("llada", "threshold:cache=dual,prompt_block_length=16", {}, BY_16),
        ("llada", "threshold:cache=vicinity,prompt_block_length=16", {"buckets": True}, BY_16),
        ("dream", "threshold:cache=prefix,prompt_block_length=16", {}, BY_16),
        ("dream", "threshold:cache=dual,prompt_block_length=16,align_blocks=True", {}, BY_16),
    ],
)
def test_answers_are_those_without(models, family, sampler, options, found) -> None:
    """Of prompts with a common beginning, with none, and shorter than a block, whole and in pieces."""
    prompts = [SYSTEM + list(text) for text in QUESTIONS] + [list(text) or [65] for text in QUESTIONS[1:]]
    plain = answers(engine_of(models(family), sampler=sampler), prompts)
    for chunk in (None, 16):
        engine = engine_of(models(family), sampler=sampler, prefix_cache=1 << 20, prefill_chunk=chunk, **options)
        for _ in range(2):
            read = answers(engine, prompts)
            for one, other in zip(read, plain, strict=True):
                assert_same(one, other)
            while engine.compiling:
                time.sleep(0.01)
        # those that are mostly new were kept, and the others found the beginning that all share
        assert [request.cached for request in read] == found


def test_a_prompt_that_fills_the_room(models) -> None:
    """What follows its beginning is read at once, by the program for everything."""
    model, prompts = models("fast-dllm-v2"), [SYSTEM, (SYSTEM * 2)[:96]]
    plain = answers(engine_of(model, prompt_length=96), prompts)
    read = answers(engine_of(model, prompt_length=96, prefix_cache=1 << 20, slots=1), prompts)
    for one, other in zip(read, plain, strict=True):
        assert_same(one, other)
    assert read[1].cached == 48


def test_those_that_arrive_together_share(models) -> None:
    engine = engine_of(models("sdar"), slots=3, prefix_cache=1 << 20)
    found = answers(engine, [SYSTEM + list(b"How many?"), SYSTEM, SYSTEM + list(b"Why?")])
    assert [request.cached for request in found] == [0, 48, 48]


def test_a_conversation_is_one_entry(models) -> None:
    engine = engine_of(models("sdar"), prefix_cache=1 << 20)
    prompt, seen = list(SYSTEM), []
    for turn in range(3):
        (request,) = answers(engine, [prompt])
        seen.append(request.cached)
        prompt = prompt + list(b"and then? ") * (turn + 1)
    assert seen == [0, 48, 56] and engine.prefixes is not None and len(engine.prefixes) == 1


def test_a_long_prompt_does_not_stop_the_others(models) -> None:
    """It is read in pieces, after each of which the others have a step."""
    engine = engine_of(models("llada2"), prefill_chunk=16, sampler="topk:k=1")
    short = engine.submit(engine.request(list(b"Q: ")))
    engine.step()
    long = engine.submit(engine.request(SYSTEM * 3))
    forwards = []
    while long not in (updated := [update.request for update in engine.step(4)]):
        assert updated == [short]
        forwards.append(1)
    assert len(forwards) == len(SYSTEM * 3) // 16  # the last piece is less, and the row begins with it
    engine.cancel(long)
    list(engine.results())
    assert_same(short, *answers(engine_of(models("llada2"), sampler="topk:k=1"), [short.prompt]))


@pytest.mark.parametrize("stop", [[], ["7"]])
def test_what_is_taken_back_while_it_is_read_leaves_its_slot(models, stop) -> None:
    engine = engine_of(models("llada2"), slots=1, prefill_chunk=16)
    first = engine.submit(engine.request(SYSTEM, stop=stop))
    second = engine.submit(engine.request(SYSTEM[:20], stop=stop))
    assert engine.step() == [] and engine.busy == 1
    engine.cancel(first)
    assert list(engine.results()) == [second] and first.result is None
    assert_same(second, answers(engine_of(models("llada2")), [SYSTEM[:20]], stop=stop)[0])


def test_on_a_mesh(models) -> None:
    """Heads over two devices. A split batch is refused."""
    split = dllm_jax.load(models("sdar").folder, mesh=make_mesh(tensor=2))
    prompts = [SYSTEM + list(text) for text in QUESTIONS]
    plain = answers(engine_of(models("sdar")), prompts)
    for one, other in zip(answers(engine_of(split, prefix_cache=1 << 20), prompts), plain, strict=True):
        assert_same(one, other)
    apart = dllm_jax.load(models("sdar").folder, mesh=make_mesh(data=2))
    with refuses("devices that share each row"):
        engine_of(apart, slots=2, prefix_cache=1 << 20)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("exact cache", {"sampler": "threshold:cache=none", "prefix_cache": 9}),
        ("without guidance", {"guidance": 0.5, "prefill_chunk": 16}),
        ("prefill_chunk is 0", {"prefill_chunk": 0}),
        ("prefix_cache is -1", {"prefix_cache": -1}),
    ],
)
def test_what_cannot_be_is_refused(models, words, options) -> None:
    with refuses(words):
        engine_of(models("llada2"), **options)


def test_other_families_are_refused_unless_it_is_left_to_the_engine(llada_tiny, models) -> None:
    with refuses("block diffusion model"):
        Engine(llada_tiny, "threshold", slots=1, prefix_cache=1, gen_length=8)
    assert Engine(llada_tiny, "threshold", slots=1, prefix_cache=None, gen_length=8).prefixes is None
    assert engine_of(models("sdar"), prefix_cache=None).prefixes is not None


# The store -----------------------------------------------------------------------------------------------------------


def prefix(*tokens: int, length: int = 40) -> Prefix:
    """Some tokens, filled up by the last of them; a number of four bytes for each."""
    filled = np.asarray([*tokens, *[tokens[-1]] * (length - len(tokens))], np.int32)
    return Prefix(filled, jnp.zeros(length, jnp.float32))


def test_the_store_has_a_limit_and_drops_what_was_used_longest_ago() -> None:
    store = PrefixStore(3 * 160)
    for number in (1, 2, 3):
        store.keep(prefix(number))
    assert store.find(prefix(1).tokens)[1] == 40
    store.keep(prefix(4))
    assert store.size == 480 and [store.find(prefix(number).tokens)[1] for number in (1, 2, 3, 4)] == [40, 0, 40, 40]
    assert not store.takes(prefix(5, length=500).tokens, 2000) and not PrefixStore(0).takes(prefix(5).tokens, 1)
    assert not store.takes(prefix(5).tokens[: LEAST_KEPT - 1], 1)


def test_the_store_takes_what_is_mostly_new_or_continues() -> None:
    store = PrefixStore(10_000)
    assert store.find(prefix(1).tokens) == (None, 0)
    store.keep(prefix(1))
    takes = lambda one: store.takes(one.tokens, one.size)
    assert not takes(prefix(1)) and not takes(prefix(*[1] * 20, 2)) and takes(prefix(*[1] * 19, 2))
    longer = prefix(*[1] * 40, 2, length=48)
    assert takes(longer)
    store.keep(longer)
    assert len(store) == 1 and store.find(dataclasses.replace(longer, tokens=longer.tokens[:44]).tokens)[1] == 44
