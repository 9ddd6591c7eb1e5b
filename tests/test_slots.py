"""An engine's promise: a request's tokens and counts are those of the same request alone, whatever else is in the slots
and whenever it was admitted."""

import dataclasses
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_equal, refuses
from test_apd import VERIFIER
from test_engine import ROWS, first_layers

from dllm_jax import Model, load, make_mesh
from dllm_jax.text.tokenizer import token_bytes
from samplers import (
    BlockSampler,
    Engine,
    Request,
    Result,
    TopK,
    make_sampler,
    sample_jit,
    stop_on,
    use_command_buffers,
)
from samplers import sampler as sampling
from samplers.engine import runner as runners
from samplers.engine import slots
from samplers.engine.engine import Stats
from samplers.engine.program import numbers_of, run_steps_buffered, run_steps_jit, with_numbers
from samplers.engine.runner import Runner
from samplers.engine.slots import Size, Slots, sizes_up_to
from samplers.generate import generate
from samplers.stopping import end_tokens
from samplers.text import prompts
from samplers.text.decode import TextStream
from samplers.text.prompts import pad_prompts

GEN, WIDTH, SLOTS = 24, 96, 3
OPTIONS = {"gen_length": GEN, "block_length": 8}

BIAS = {"logit_bias": {ord("1"): 6.0, ord("2"): 4.0, ord(" "): -100, 0: 0.5}}

# sampler -> numbers that requests differ in
SPECS: dict[str, list[dict[str, Any]]] = {
    "threshold:cache=dual": [{"threshold": 0.3}, {"threshold": 0.95}, {}],
    "eb:cache=none": [{"gamma": 0.01}, {"gamma": 1.0}, {"temperature": 0.8} | BIAS, {"top_p": 0.6, "temperature": 1.0}],
    "credit:cache=prefix,refresh_every=3": [{"threshold": 0.5}, {"refresh_every": 2}, BIAS],
    "hierarchical:cache=vicinity,smoothing=true": [
        {"threshold": 0.8},
        {"low_threshold": 0.2},
        {"smoothing_weight": 0.5},
    ],
    "topk:k=2,guidance=0.5,cache=dual": [{"k": 1}, {"guidance": 1.5} | BIAS],
    "dream:steps=12,alg_temp=0.5,temperature=0.2": [{"steps": 24}, {"alg_temp": 1.0}],
    "remask:steps=12": [{"steps": 24}],
    "edit:cache=prefix": [{"threshold": 0.4}],
    "d2f:rule=eb,gamma=0.3,in_flight=2": [{"tau_add": 0.5}, {"gamma": 0.01} | BIAS, {"tau_act": 0.2}],
    "leftright:tokens_per_step=2,window=4,most_window=6,lookahead=5": [{"tokens_per_step": 3} | BIAS, {"window": 6}],
}


def needs_draws(numbers: list[dict[str, Any]]) -> bool:
    return any({"top_p", "logit_bias"} & own.keys() for own in numbers)


@pytest.fixture(scope="module")
def llada(llada_tiny) -> Model:
    return first_layers(llada_tiny, 1)


def assert_alone(engine: Engine, request: Request, width: int = WIDTH) -> None:
    """Of the same request in a batch of one, by the usual loop."""
    model, stop = engine.model, engine.sampler.stop
    if request.stop:
        tokens = end_tokens(model.config, request.stop, ignore_eos=stop is None)
        strings = [item for item in request.stop if isinstance(item, str)]
        pieces = token_bytes(model.tokenizer, model.config.vocab_size)
        stop = stop_on(tokens, strings=strings, vocab_size=model.config.vocab_size, token_bytes=pieces)
    numbers = [np.asarray([number]) for number in request.numbers or numbers_of(engine.sampler)]
    sampler = with_numbers(dataclasses.replace(engine.sampler, stop=stop), numbers)
    key = jax.random.wrap_key_data(jnp.asarray(request.key_data)[None])
    options = {} if request.given is None else {"given": jnp.asarray(request.given)[None]}
    lengths = jnp.asarray([request.gen_length])
    prompt = pad_prompts([request.prompt], width)
    denoiser = model.denoiser
    if request.logit_bias:
        bias = np.zeros((1, denoiser.vocab_size), np.float32)
        bias[0, [*request.logit_bias]] = [*request.logit_bias.values()]
        denoiser = denoiser.with_bias(jnp.asarray(bias))
    result = jax.device_get(sample_jit(sampler, denoiser, *prompt, key=key, gen_lengths=lengths, **options))
    assert_same(request.result, result)


def assert_same(one: Result | None, other: Result) -> None:
    assert one is not None
    for field in dataclasses.fields(other):
        assert_equal(getattr(one, field.name), getattr(other, field.name), field.name)


def arrivals(engine: Engine, numbers: list[dict[str, Any]], rng: np.random.Generator, count: int) -> list[Request]:
    """Requests of all kinds that arrive while others run; one is taken back."""
    found = []
    while len(found) < count or not engine.idle:
        for _ in range(rng.integers(0, 3) if len(found) < count else 0):
            options = dict(numbers[rng.integers(len(numbers))])
            length = int(rng.integers(1, GEN + 1)) if rng.random() < 0.5 else None
            options |= {"seed": int(rng.integers(9)), "gen_length": length}
            found.append(engine.submit(engine.request(ROWS[rng.integers(4)], **options)))
        if len(found) == count // 2:
            engine.cancel(found[-1])
        engine.step(int(rng.integers(1, 6)))
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_as_alone_in_any_order_of_arrival(llada, spec: str) -> None:
    options = {"gen_length": GEN} if spec.startswith("leftright") else OPTIONS
    draws = needs_draws(SPECS[spec])
    engine = Engine(llada, spec, slots=SLOTS, prompt_length=WIDTH, draws=draws, **options)
    found = arrivals(engine, SPECS[spec], np.random.default_rng(0), 9)
    ended = [request for request in found if request.result is not None]
    assert engine.idle and ended == [request for request in found if not request.cancelled]
    assert sum(request.cancelled for request in found) <= 1
    for request in ended:
        assert_alone(engine, request)
    assert engine.stats.row_steps >= sum(int(request.result.nfe[0]) for request in ended if request.result is not None)


@pytest.mark.parametrize(
    ("spec", "built", "asked"),
    [
        ("threshold", {"threshold": 1}, {"threshold": 0.6}),
        ("threshold:threshold=0.6", {"temperature": 1}, {"temperature": 0.7}),
        ("eb", {"gamma": np.int64(0)}, {"gamma": 0.5}),
        ("topk:cache=none", {"guidance": 2}, {"guidance": 0.5}),
    ],
)
def test_numbers_of_a_request_have_the_type_of_their_field(llada, spec: str, built: Any, asked: Any) -> None:
    """A whole number among the engine's own does not cut fractions off those of requests."""
    engine = Engine(llada, spec, slots=2, prompt_length=WIDTH, **OPTIONS, **built)
    requests = [engine.submit(engine.request(ROWS[0], seed=3, **asked)), engine.submit(engine.request(ROWS[0], seed=3))]
    list(engine.results())
    for request, options in zip(requests, (built | asked, built), strict=True):
        (answer,) = generate(llada, [ROWS[0]], sampler=spec, seed=3, **OPTIONS, **options)
        assert request.generation == answer


def test_command_buffers_are_an_option_of_both_programs(llada, monkeypatch) -> None:
    """Also of an engine whose steps are called elsewhere. XLA checks the option's kinds for a CPU too."""
    with refuses("NVIDIA"):
        use_command_buffers()
    gpu = SimpleNamespace(client=SimpleNamespace(platform_version="PJRT CUDA 12.8"), device_kind="NVIDIA H100")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        patch.setattr(jax, "devices", lambda: [gpu])
        context = use_command_buffers()
    sampler = make_sampler(llada, "topk:k=8", ignore_eos=True, **OPTIONS)
    arguments = (sampler, llada.denoiser, *pad_prompts([ROWS[0]]))
    alone, known = sample_jit(*arguments), run_steps_buffered._cache_size()
    with context:
        buffered = sample_jit(*arguments)
        engine = Engine(llada, sampler, slots=1, prompt_length=WIDTH)
    request = engine.submit(engine.request(ROWS[0]))
    assert list(engine.results()) == [request]
    assert sampling._sample_buffered._cache_size() == 1 and run_steps_buffered._cache_size() == known + 1
    jax.tree.map(np.testing.assert_array_equal, alone, buffered)
    np.testing.assert_array_equal(request.generation.tokens, alone.tokens[0][: alone.lengths[0]])


def test_whole_numbers_of_a_request_are_not_rounded(llada) -> None:
    engine = Engine(llada, "topk:k=2", slots=2, prompt_length=WIDTH, **OPTIONS)
    for number in (1.5, 2.0, 10**12):
        with refuses("k"):
            engine.submit(dataclasses.replace(engine.request(ROWS[0]), numbers=(number,)))
    with refuses("k"):
        sample_jit(BlockSampler(TopK(jnp.asarray([1.5, 2.0])), 16), llada.denoiser, jnp.ones((2, 4), jnp.int32))


def test_one_program_whatever_comes(llada, caplog) -> None:
    engine = Engine(llada, "threshold", slots=2, prompt_length=WIDTH, draws=True, **OPTIONS)
    engine.submit(engine.request(ROWS[0]))
    list(engine.results())
    kinds = [
        {"threshold": 0.2},
        {"temperature": 1.0, "top_k": 3},
        {"stop": ["12", "\n"]},
        {"stop": [7], "gen_length": 3},
        {"logit_bias": {7: 1.5}},
    ]
    found = []
    with jax.log_compiles():
        for row, kind in enumerate(kinds * 2):
            found.append(engine.submit(engine.request(ROWS[row % 4], seed=row, **kind)))
            engine.step(row)
        list(engine.results())
        assert all(request.result is not None for request in found)
        jax.jit(lambda x: x + 1)(1)  # proves that compilations are logged
    assert caplog.records and not [record for record in caplog.records if "Compiling jit(run_steps)" in record.message]


@pytest.mark.parametrize("spec", ["threshold:threshold=0.5", "edit:cache=prefix", "d2f:in_flight=2", "leftright"])
def test_stop_patterns_of_single_requests(llada, spec: str) -> None:
    """Tokens, lengths and forwards are those of a sampler that has the patterns itself."""
    options = {"gen_length": GEN} if spec == "leftright" else OPTIONS
    engine = Engine(llada, spec, slots=2, prompt_length=WIDTH, ignore_eos=True, **options)
    (whole,) = generate(llada, [ROWS[0]], sampler=spec, ignore_eos=True, **options)
    first, later = whole.text[3:5], whole.text[9:12]
    assert len(whole.text) > 12
    stops = [[first], [later, "never"], [whole.tokens[4]], [later, first], [whole.text[:1], whole.tokens[0]], []]
    found = [engine.submit(engine.request(ROWS[0], stop=stop)) for stop in stops]
    found += [engine.submit(engine.request(row, seed=i, stop=["1", "13", ord("3")])) for i, row in enumerate(ROWS)]
    assert len(list(engine.results())) == len(found)
    for request in found:
        assert_alone(engine, request)
    for request, stop in zip(found, stops, strict=False):
        cuts = [whole.text.index(item) for item in stop if isinstance(item, str) and item in whole.text]
        if all(isinstance(item, str) for item in stop):
            assert request.generation.text == whole.text[: min(cuts, default=None)]


def test_stop_strings_of_many_sizes_never_keep_the_queue_waiting(llada) -> None:
    """Whatever strings ended before: each request is admitted as soon as a slot is free."""
    engine = Engine(llada, "threshold:threshold=0.5", slots=1, prompt_length=WIDTH, **OPTIONS)
    for sizes in ((7, 4), (4, 11), (30, 1)):
        requests = [engine.submit(engine.request(ROWS[0], gen_length=2, stop=["x" * size])) for size in sizes]
        engine.step()
        assert requests[0].slot is not None or requests[0].result is not None
        list(engine.results())
        assert all(request.result is not None for request in requests)


def test_a_stop_frees_its_slot_in_the_step_that_completes_it(llada) -> None:
    engine = Engine(llada, "leftright", slots=1, prompt_length=WIDTH, gen_length=GEN, ignore_eos=True)
    (whole,) = generate(llada, [ROWS[0]], sampler="leftright", gen_length=GEN, ignore_eos=True)
    stop = whole.text[3:5]
    request, after = (
        engine.submit(engine.request(ROWS[0], stop=[stop])),
        engine.submit(engine.request(ROWS[1], gen_length=1)),
    )
    steps = 0
    while request.result is None:
        (update,) = engine.step(100)
        steps += 1
        shown = llada.tokenizer.decode(update.tokens[: update.final])
        assert update.done == (stop in shown) and engine.stats.steps == steps
    assert engine.busy == 0 and request.generation.text == whole.text[: whole.text.index(stop)]
    assert [update.request for update in engine.step()] == [after]


def test_given_canvases(llada) -> None:
    engine = Engine(llada, "threshold", slots=SLOTS, prompt_length=WIDTH, **OPTIONS)
    given = np.full(GEN, llada.denoiser.mask_id)
    given[3:9], given[20] = 65, 66
    found = [engine.submit(engine.request(row, given=given if i % 2 else None)) for i, row in enumerate(ROWS)]
    list(engine.results())
    for request in found:
        assert_alone(engine, request)
    everything = engine.submit(engine.request(ROWS[0], given=np.full(GEN, 65)))  # nothing is left to generate
    assert [request is everything for request in engine.results()] == [True]
    assert int(everything.result.nfe[0]) == 0


@pytest.mark.parametrize("spec", ["threshold", "d2f"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_any_end_token_ends_an_answer_and_its_text(llada, spec: str, ignore_eos: bool) -> None:
    """Also the one that is not the end of the sequence, amid a block, and of a sampler that completes its blocks."""
    other = next(token for token in llada.config.end_ids if token != llada.config.eos_id)
    engine = Engine(llada, spec, slots=1, prompt_length=WIDTH, ignore_eos=ignore_eos, **OPTIONS)
    given = np.full(GEN, 65)
    given[3], given[6], given[10] = other, llada.denoiser.mask_id, llada.config.eos_id
    request = engine.submit(engine.request(ROWS[0], given=given))
    list(engine.results())
    tokens = request.generation.tokens
    assert len(tokens) == 3 if not ignore_eos else 3 < len(tokens) <= 10
    stream = TextStream(llada, ignore_eos=ignore_eos)
    shown = stream.feed(request.generation.canvas)
    assert shown + stream.finish(tokens) == request.generation.text
    assert ignore_eos or shown == "AAA"


def test_with_an_indicator_and_a_verifier(llada, dream_tiny, ni_indicator) -> None:
    """Their parameters, scalars among them, are shared by all requests."""
    engine = Engine(
        llada, f"ni:indicator={ni_indicator},threshold=0.5", slots=2, prompt_length=WIDTH, cache="none", **OPTIONS
    )
    found = [
        engine.submit(engine.request(row, threshold=number))
        for row, number in zip(ROWS, (0.2, 0.9, 0.5, 0.99), strict=True)
    ]
    dream = first_layers(dream_tiny, 1)
    other = Engine(dream, "apd", slots=2, prompt_length=WIDTH, verifier=VERIFIER, gen_length=GEN, temperature=0.5)
    found_there = [
        other.submit(other.request(row, weight=number)) for row, number in zip(ROWS, (0.1, 0.9, 0.5, 0.7), strict=True)
    ]
    for one, requests in ((engine, found), (other, found_there)):
        assert len(list(one.results())) == 4
        for request in requests:
            assert_alone(one, request)


def test_updates_tell_what_happened(llada) -> None:
    """Written positions are each told once, and what is final stays."""
    engine = Engine(llada, "threshold", slots=SLOTS, prompt_length=WIDTH, **OPTIONS)
    found = [engine.submit(engine.request(row)) for row in ROWS]
    written: dict[int, list[int]] = {request.number: [] for request in found}
    final: dict[int, list[int]] = {request.number: [] for request in found}
    while not engine.idle:
        for update in engine.step():
            number = update.request.number
            written[number] += update.written
            assert update.tokens[: len(final[number])].tolist() == final[number]
            final[number] = update.tokens[: update.final].tolist()
            assert update.done == (update.request.result is not None)
    for request in found:
        assert request.result is not None
        assert sorted(written[request.number]) == np.flatnonzero(request.result.decoded_at[0] >= 0).tolist()
        assert final[request.number] == request.generation.tokens


def test_what_is_taken_back_leaves_its_slot(llada) -> None:
    engine = Engine(llada, "threshold", slots=SLOTS, prompt_length=WIDTH, **OPTIONS)
    first, second, third = (engine.submit(engine.request(row)) for row in ROWS[:3])
    engine.step()
    engine.cancel(first)
    engine.cancel(second)
    assert list(engine.results()) == [third]
    engine.cancel(third)
    assert first.result is second.result is None and not third.cancelled
    assert_alone(engine, third)
    with refuses("request 0"):
        first.generation  # noqa: B018


def test_on_a_mesh(llada_tiny, llada, caplog) -> None:
    """Slots split over four devices, and heads over two."""
    mesh = make_mesh(data=4, tensor=2)
    split = first_layers(load(llada_tiny.folder, mesh=mesh), 1)
    options = {"prompt_length": WIDTH, "draws": True, "top_logprobs": 3, **OPTIONS}
    engine = Engine(split, "threshold:threshold=0.6", slots=8, **options)
    alone = Engine(llada, "threshold:threshold=0.6", slots=SLOTS, **options)
    asked = [(row, {"seed": i} | (BIAS | {"top_logprobs": 3} if i % 2 else {})) for i, row in enumerate(ROWS * 3)]
    pairs = [[each.submit(each.request(row, **own)) for each in (engine, alone)] for row, own in asked]
    list(alone.results())
    engine.step()
    with jax.log_compiles():
        list(engine.results())
    assert not [record for record in caplog.records if "Compiling jit(run_steps)" in record.message]
    for one, other in pairs:
        assert_same(one.result, other.result)
        assert (one.top is None) == (other.top is None)
        if one.top is not None:
            np.testing.assert_allclose(one.top[1], other.top[1], atol=1e-4)


def settled(engine: Engine) -> Engine:
    """The engine, once all programs that it asked for are compiled."""
    while engine.compiling:
        time.sleep(0.01)
    return engine


BUCKETS = [
    "threshold:cache=dual",
    "hierarchical:cache=vicinity,smoothing=true",
    "topk:k=2,guidance=0.5,cache=dual",
    "dream:steps=12,alg_temp=0.5,temperature=0.2",
    "d2f:rule=eb,gamma=0.3,in_flight=2",
]


@pytest.mark.parametrize("spec", BUCKETS)
def test_as_alone_in_programs_of_any_size(llada, spec: str, caplog) -> None:
    """Rows that move to smaller and larger programs while they run, and to shorter and longer buffers."""
    draws = needs_draws(SPECS[spec])
    engine = Engine(llada, spec, slots=4, prompt_length=128, buckets=True, draws=draws, **OPTIONS)
    rng, sizes, found = np.random.default_rng(1), set(), list[Request]()
    for count in (1, 8, 2, 5):
        for number in range(count):
            if number == 1:
                engine.step()  # the others come while the first runs
                settled(engine)
            prompt = ROWS[rng.integers(4)] if count % 2 else [int(token) for token in rng.integers(40, 100, 90)]
            numbers = SPECS[spec][rng.integers(len(SPECS[spec]))]
            found.append(engine.submit(engine.request(prompt, seed=int(rng.integers(9)), **numbers)))
        while not engine.idle:
            before = engine.stats
            engine.step()
            steps = engine.stats - before
            sizes.add(engine._slots.size)
            assert steps.row_steps <= steps.slot_steps == steps.steps * engine.rows
            settled(engine)
    assert {size.rows for size in sizes} == {1, 2, 4} and {size.prompt_length for size in sizes} == {64, 128}
    for request in found:
        assert_alone(engine, request, 128)
    with jax.log_compiles():
        again = engine.submit(engine.request(ROWS[0]))
        list(engine.results())
    assert engine.rows == 1 and not [line for line in caplog.messages if "Compiling jit(run_steps)" in line]
    assert_alone(engine, again, 128)


def test_a_program_that_cannot_be_compiled_leaves_the_larger_one(llada, monkeypatch) -> None:
    compile_size = Slots._compile

    def fail(self: Slots, size: Size) -> Any:
        if size.rows == 1:
            raise RuntimeError("out of memory\nin detail")
        return compile_size(self, size)

    monkeypatch.setattr(Slots, "_compile", fail)
    engine = Engine(llada, "threshold", slots=2, prompt_length=WIDTH, buckets=True, **OPTIONS)
    with pytest.warns(UserWarning, match=r"1 rows and prompts of 96 tokens was not compiled.*\(out of memory\)"):
        engine.compile()
        settled(engine)
    request = engine.submit(engine.request(ROWS[0]))
    assert list(engine.results()) == [request] and engine.rows == 2
    assert_alone(engine, request)


@pytest.mark.parametrize(
    ("largest", "parts", "rows", "lengths"),
    [
        ((8, 512), 1, [1, 2, 4, 8], [64, 128, 256, 512]),
        ((6, 100), 1, [1, 2, 4, 6], [100]),
        ((12, 129), 4, [4, 8, 12], [65, 129]),
        ((1, 0), 1, [1], [0]),
    ],
)
def test_sizes(largest: tuple[int, int], parts: int, rows: list[int], lengths: list[int]) -> None:
    found = sizes_up_to(Size(*largest), parts)
    assert found == [(count, length) for count in rows for length in lengths]


def test_sizes_on_a_mesh(llada_tiny, llada, monkeypatch) -> None:
    """Four devices share each size's slots, so the fewest are four. Rows that run move at once."""
    monkeypatch.setattr(slots, "PATIENCE", 1)
    split = first_layers(load(llada_tiny.folder, mesh=make_mesh(data=4, tensor=2)), 1)
    engine = Engine(split, "threshold:threshold=0.6", slots=8, prompt_length=WIDTH, buckets=True, **OPTIONS)
    engine.compile()
    settled(engine)
    requests = [engine.submit(engine.request(row, seed=i)) for i, row in enumerate(ROWS * 2)]
    engine.step()
    assert engine.rows == 8
    for request in requests[3:]:
        engine.cancel(request)
    list(engine.results())
    assert engine.rows == 4
    alone = Engine(llada, "threshold:threshold=0.6", slots=SLOTS, prompt_length=WIDTH, **OPTIONS)
    others = [alone.submit(alone.request(row, seed=i)) for i, row in enumerate(ROWS[:3])]
    list(alone.results())
    for one, other in zip(requests, others, strict=False):
        assert_same(one.result, other.result)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("100 tokens", {"prompt": [65] * 100}),
        ("gen_length 25", {"gen_length": 25}),
        ("gen_length is 0", {"gen_length": 0}),
        ("draws=True", {"temperature": 0.5}),
        ("draws=True", {"logit_bias": {5: 1}}),
        ("table", {"logit_bias": [5]}),
        ("table", {"logit_bias": {5: "1"}}),
        ("table", {"logit_bias": {5: None}}),
        ("block_length", {"block_length": 4}),
        ("'gamma'", {"gamma": 0.5}),
        ("threshold is -1", {"threshold": -1.0}),
        ("stop is 'x'", {"stop": "x"}),
        ("stop string", {"stop": [""]}),
        ("surrogate", {"stop": ["\ud800"]}),
        ("9 patterns", {"stop": list("123456789")}),
        ("token 700", {"stop": [700]}),
        ("[24]", {"given": [1, 2]}),
        ("seed", {"seed": -1}),
        ("ignore_eos", {"ignore_eos": True}),
    ],
)
def test_bad_requests(llada, name: str, options: dict[str, Any]) -> None:
    engine = Engine(llada, "threshold", slots=2, prompt_length=WIDTH, **OPTIONS)
    with refuses(name):
        engine.submit(engine.request(**{"prompt": ROWS[0], **options}))
    assert engine.idle


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("301 tokens", dict.fromkeys(range(301), 1)),
        ("token 700 lies outside", {700: 1}),
        ("token '5'", {"5": 1}),
        ("token 5 is 101", {5: 101}),
        ("token 5 is nan", {5: float("nan")}),
        ("mask token", {129: 1}),
    ],
)
def test_bad_biases(llada, name: str, bias: Any) -> None:
    engine = Engine(llada, "threshold", slots=2, prompt_length=WIDTH, draws=True, **OPTIONS)
    with refuses(name):
        engine.request(ROWS[0], logit_bias=bias)
    assert engine.request(ROWS[0], logit_bias={}).logit_bias == {}


@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_a_bias_is_added_to_the_logits(llada, guidance: float) -> None:
    """One forward that writes everything, by NumPy: after guidance, before what is left out; beside a request without
    a bias."""
    room = {"slots": 2, "prompt_length": WIDTH, "draws": True, "gen_length": 8}
    engine = Engine(llada, "topk:k=8", suppress=[50], guidance=guidance, **room)
    bias = np.zeros(llada.config.vocab_size, np.float32)
    bias[[49, 50, 32, 128]] = 7, 100, -100, -3
    own = {int(token): float(bias[token]) for token in np.flatnonzero(bias)}
    requests = [engine.submit(engine.request(ROWS[0], logit_bias=table)) for table in (own, None)]
    list(engine.results())
    mask = llada.config.mask_id
    rows = np.full((2, len(ROWS[0]) + 8), mask)
    rows[0, : len(ROWS[0])] = ROWS[0]
    first, second = np.asarray(llada.denoiser(jnp.asarray(rows)), np.float64)[:, len(ROWS[0]) :]
    logits = second + (guidance + 1) * (first - second)
    for request, added in zip(requests, (bias, 0 * bias), strict=True):
        z, result = logits + added, request.result
        logprobs = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)
        mine = np.take_along_axis(logprobs, result.tokens[0][:, None], 1)[:, 0]
        assert (result.nfe[0], result.tokens[0].tolist().count(50)) == (1, 0), "suppress comes after"
        np.testing.assert_allclose(result.logprobs[0], mine, atol=1e-4)
        logprobs[:, [50, mask]] = -np.inf
        np.testing.assert_allclose(mine, logprobs.max(-1), atol=1e-4)  # the best, or its equal in float32
    assert requests[0].result.tokens.tolist() != requests[1].result.tokens.tolist()


def test_a_bias_bans_and_forces(llada) -> None:
    """Also beside a form, within which the bias chooses."""
    room = {"slots": 2, "prompt_length": WIDTH, "draws": True, "constraint_states": 32}
    engine = Engine(llada, "threshold:cache=dual", **room, **OPTIONS)
    plain, forced = (engine.submit(engine.request(ROWS[0], logit_bias=own)) for own in (None, {65: 100}))
    list(engine.results())
    assert set(forced.result.tokens[0].tolist()) == {65} and 65 not in plain.result.tokens[0]
    banned = dict.fromkeys(map(int, plain.result.tokens[0]), -100)
    asked = [{"logit_bias": banned}]
    asked += [{"regex": "(yes|no)!", "logit_bias": {ord(char): 100}} for char in "yn"]
    requests = [engine.submit(engine.request(ROWS[0], **own)) for own in asked]
    list(engine.results())
    assert banned.keys().isdisjoint(requests[0].result.tokens[0].tolist())
    assert [request.generation.text for request in requests[1:]] == ["yes!", "no!"]


TOP = [
    "threshold:cache=dual,threshold=0.5",
    "topk:k=8,guidance=0.5,block_length=24,cache=none",
    "edit:cache=prefix",
    "credit:cache=none,smoothing=true,fill_after_eos=true",
]


@pytest.mark.parametrize("spec", TOP)
def test_the_most_probable_tokens_of_each_position(llada, spec: str) -> None:
    """Requests that ask for them have the tokens of those that do not, whatever else runs."""
    options = {key: value for key, value in OPTIONS.items() if f"{key}=" not in spec}
    engine = Engine(llada, spec, slots=2, prompt_length=WIDTH, draws=True, top_logprobs=6, **options)
    asked = [{}, {"top_logprobs": 3}, {"top_logprobs": 6, "temperature": 0.9}, {"top_logprobs": 6} | BIAS, {}]
    engine.compile()
    programs = run_steps_jit._cache_size()
    requests = [engine.submit(engine.request(ROWS[i % 4], seed=i, **own)) for i, own in enumerate(asked)]
    list(engine.results())
    assert run_steps_jit._cache_size() == programs, "a request stalls the others while it compiles"
    for request, own in zip(requests, asked, strict=True):
        assert_alone(engine, request)
        if not own:
            assert request.top is None
            continue
        ids, logprobs = request.top
        chosen = np.flatnonzero(~np.isnan(request.result.logprobs[0]))
        assert ids.shape == logprobs.shape == (GEN, 6) and len(chosen)
        assert (np.diff(logprobs[chosen]) <= 0).all() and (np.exp(logprobs[chosen]).sum(axis=1) < 1 + 1e-5).all()
        assert not (ids[chosen] == llada.config.mask_id).any()
        for place in chosen:
            assert len(set(ids[place])) == 6
            mine, token = request.result.logprobs[0, place], request.result.tokens[0, place]
            among = logprobs[place][ids[place] == token]
            np.testing.assert_allclose(mine, among[0] if len(among) else min(mine, logprobs[place, -1]), atol=1e-4)
        if "temperature" not in own and "credit" not in spec:
            np.testing.assert_allclose(logprobs[chosen, 0], request.result.logprobs[0, chosen], atol=1e-4)


def test_the_most_probable_tokens_are_those_of_the_logits(llada) -> None:
    """One forward that writes everything, by NumPy, in a program of any size."""
    room = {"slots": 2, "prompt_length": WIDTH, "top_logprobs": 20, "buckets": True}
    engine = Engine(llada, "topk:k=8", gen_length=8, **room)
    for _ in range(2):  # of two rows, then of one
        request = engine.submit(engine.request(ROWS[0], top_logprobs=20))
        list(settled(engine).results())
        rows = jnp.asarray([ROWS[0] + [llada.config.mask_id] * 8])
        wanted = np.array(jax.nn.log_softmax(llada.denoiser(rows)))[0, len(ROWS[0]) :]
        ids, logprobs = request.top
        np.testing.assert_allclose(logprobs, np.take_along_axis(wanted, ids, axis=1), atol=1e-4)
        wanted[:, llada.config.mask_id] = -np.inf
        np.testing.assert_allclose(logprobs, -np.sort(-wanted)[:, :20], atol=1e-4)
    assert engine.rows == 1


def test_engines_and_requests_without_alternatives(llada) -> None:
    options = {"slots": 1, "prompt_length": WIDTH}
    with refuses("top_logprobs", "leave out"):
        Engine(llada, "d2f", top_logprobs=2, **OPTIONS, **options)
    with refuses("top_logprobs is 21"):
        Engine(llada, "threshold", top_logprobs=21, **OPTIONS, **options)
    engine = Engine(llada, "threshold", top_logprobs=2, **OPTIONS, **options)
    for wrong, name in ((3, "--top-logprobs"), (-1, "top_logprobs is -1"), (1.5, "whole number")):
        with refuses(name):
            engine.request(ROWS[0], top_logprobs=wrong)


def test_a_prompt_that_is_surely_too_long_is_refused_before_it_is_encoded(llada, monkeypatch) -> None:
    engine = Engine(llada, "threshold", slots=2, prompt_length=WIDTH, **OPTIONS)
    encoded = []
    monkeypatch.setattr(prompts, "encode_pieces", lambda tokenizer, pieces: encoded.extend(pieces) or [65])
    for long in ("x" * 20_000, [{"role": "user", "content": "x" * 20_000}], [65] * 20_000):
        with pytest.raises(prompts.PromptTooLong) as refused:
            engine.submit(engine.request(long))
        assert refused.value.tokens > llada.config.max_length
        with pytest.raises(prompts.PromptTooLong):
            prompts.encode_prompt(llada, long, most=WIDTH)
    assert not encoded and engine.submit(engine.request("x" * 90)).prompt == [65] and encoded


@pytest.mark.parametrize(
    ("name", "options"),
    [("slots", {"slots": 0}), ("5000", {"prompt_length": 5000}), ("position", {"gen_length": 5000})],
)
def test_engines_that_cannot_be(llada, name: str, options: dict[str, Any]) -> None:
    with refuses(name):
        Engine(llada, "threshold", **options)


def test_room_for_prompts_ends_with_the_context(llada) -> None:
    with refuses("489 tokens"):
        Engine(llada, gen_length=24, block_length=8, prompt_length=96).request([65] * 489)


def test_cancelled_requests_are_handed_out_in_their_place(llada) -> None:
    """However many there are: neither does one of them run, nor are more of them read than there may be at a time."""
    runner, read = Runner(llada, make_sampler(llada, gen_length=24, block_length=8), 2), []

    def requests():
        for number in range(1000):
            read.append(number)
            yield Request([], 1, np.zeros(2, np.uint32), number=number, cancelled=True)

    for number, request in enumerate(runner.run(requests())):
        assert request.number == number and len(read) - number <= Runner.AHEAD * 2 + 1
    assert len(read) == 1000 and runner.stats.steps == 0


class OneIsSlow:
    """An engine that ends requests at once, but the first only when there is nothing else to do."""

    prompt_length, waiting, held, queue, stats = 96, 0, None, (), Stats()

    @property
    def idle(self) -> bool:
        return not self.queue and self.held is None

    def submit(self, request: Request) -> Request:
        self.held, self.queue = (request, ()) if request.number == 0 else (self.held, (*self.queue, request))
        return request

    def results(self) -> Iterator[Request]:
        ended, self.queue = self.queue or (self.held,), ()
        self.held = None if ended == (self.held,) else self.held
        for request in ended:
            request.result = SimpleNamespace(broken_at=[-1])
        yield from ended


def test_few_requests_are_under_way_whatever_their_source(llada, monkeypatch) -> None:
    monkeypatch.setattr(runners, "Engine", lambda *_, **__: OneIsSlow())
    runner, read, most = Runner(llada, make_sampler(llada, gen_length=24, block_length=8), 2), [], 0

    def requests():
        for number in range(5000):
            read.append(number)
            yield Request([65], 1, np.zeros(2, np.uint32), number=number)

    for number, request in enumerate(runner.run(requests())):
        most = max(most, len(read) - number)
        assert request.number == number
    assert len(read) == 5000 and most == Runner.AHEAD * 2 + 1
