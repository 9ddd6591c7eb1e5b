"""Models that are not ours: a function from tokens to logits, and a class with key/value buffers of its own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_equal, refuses

from dllm_jax import FunctionDenoiser, Span
from dllm_jax.indicator import IndicatorConfig, init_indicator
from dllm_jax.models.kv_cache import gather_rows, scatter_rows, slice_rows
from dllm_jax.pytree import pytree
from dllm_jax.testing import check_denoiser
from samplers import (
    RULES,
    BlockSampler,
    DualCache,
    LeftRight,
    PipelineSampler,
    PrefixCache,
    Sampling,
    Smoothing,
    sample,
    sample_jit,
    stop_on,
    stream,
)
from samplers.likelihood.estimators import is_greedy, log_likelihood

VOCAB, DIM, MASK, EOS, MOST = 19, 16, 17, 18, 48
GEN, BLOCK = 12, 6
PROMPT = jnp.array([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0], [9, 1, 0, 0, 0]])
LENGTHS = jnp.array([5, 3, 2])
OPTIONS = {"threshold": {"threshold": 0.3}, "llada": {"steps": 6}, "dream": {"steps": 6}, "remask": {"steps": 6}}


# A model with learned positions, layer norm and a single head per layer: nothing of it is ours ------------------------


def init(key: jax.Array) -> dict[str, Any]:
    normal = lambda number, *shape: jax.random.normal(jax.random.fold_in(key, number), shape)
    layer = lambda n: {
        name: normal(10 * n + i, DIM, DIM) / 4 for i, name in enumerate(("q", "k", "v", "o", "up", "down"))
    }
    table, head = normal(1, VOCAB, DIM), normal(3, DIM, VOCAB)
    return {"tokens": table, "positions": normal(2, MOST, DIM), "layers": [layer(1), layer(2)], "head": head}


def norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(axis=-1, keepdims=True)) / (x.std(axis=-1, keepdims=True) + 1e-5)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array) -> jax.Array:
    scores = jnp.where(seen, jnp.einsum("btd,bsd->bts", query, key) / DIM**0.5, -jnp.inf)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, axis=-1), value)


def my_model(params: dict[str, Any], tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B, S] int32 and [B] -> logits [B, S, V]."""
    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    seen = (jnp.arange(tokens.shape[1]) < lengths[:, None])[:, None]
    for layer in params["layers"]:
        y = norm(x)
        x = x + attend(y @ layer["q"], y @ layer["k"], y @ layer["v"], seen) @ layer["o"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    return norm(x) @ params["head"]


@pytree()
class MyDenoiser:
    """The same model with key/value buffers."""

    params: dict[str, Any]

    mask_id, eos_id, vocab_size, min_prompt_length, batch_parts, vocab_parts = MASK, EOS, VOCAB, 0, 1, 1

    def empty_cache(self, batch: int, length: int) -> Any:
        return [
            {"k": jnp.zeros((batch, length, DIM)), "v": jnp.zeros((batch, length, DIM))} for _ in self.params["layers"]
        ]

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.params["tokens"][tokens]

    def expected_embedding(self, logits: jax.Array) -> jax.Array:
        return jax.nn.softmax(logits, axis=-1) @ self.params["tokens"]

    def forward(self, inputs, visible, *, at=None, kv=None, write=None, outputs=None):
        length = inputs.shape[1]
        at = Span(jnp.zeros((inputs.shape[0],), jnp.int32), length) if at is None else at
        positions = at.positions if isinstance(at, Span) else at
        inputs = gather_rows(inputs, positions)
        x = self.embed(inputs) if jnp.issubdtype(inputs.dtype, jnp.integer) else inputs
        x = x + self.params["positions"][positions]
        visible = visible[:, None] if visible.ndim == 1 else gather_rows(visible, positions)
        seen = jnp.arange(length) < visible[..., None]
        kv = self.empty_cache(inputs.shape[0], length) if kv is None else kv
        put = lambda buffer, new: scatter_rows(buffer, new, positions, write)
        updated = []
        for layer, old in zip(self.params["layers"], kv, strict=True):
            y = norm(x)
            new = {"k": put(old["k"], y @ layer["k"]), "v": put(old["v"], y @ layer["v"])}
            x = x + attend(y @ layer["q"], new["k"], new["v"], seen) @ layer["o"]
            x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
            updated.append(new)
        if outputs is not None:
            x = slice_rows(x, outputs.start - at.start, outputs.width)
        return x, updated

    def final_hidden(self, hidden: jax.Array) -> jax.Array:
        return norm(hidden)

    def logits(self, hidden, tile=None):
        head = self.params["head"]
        if tile is not None:
            head = jax.lax.dynamic_slice_in_dim(head, tile.start, tile.width, axis=1)
        return norm(hidden) @ head


PARAMS = init(jax.random.key(0))
OWN = MyDenoiser(PARAMS)


def own_function(params: dict[str, Any] = PARAMS) -> FunctionDenoiser:
    return FunctionDenoiser(my_model, mask_id=MASK, eos_id=EOS, params=params)


def blocks(name: str, **options: Any) -> BlockSampler:
    return BlockSampler(RULES[name](**OPTIONS.get(name, {})), GEN, BLOCK, **options)


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    for name, value in vars(wanted).items():
        assert_equal(np.asarray(getattr(found, name)), np.asarray(value), name)


def row(result: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], result)


def alone(sampler: Any, denoiser: Any, index: int, key: Any = None) -> Any:
    """The result of a row without the others and without padding."""
    prompt = PROMPT[index : index + 1, : int(LENGTHS[index])]
    return row(sample_jit(sampler, denoiser, prompt, key=None if key is None else key[index : index + 1]), 0)


# A function ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["threshold", "credit", "remask"])
def test_a_rule_runs_a_function_inside_ones_own_jit(name):
    """Closing over traced parameters, in a ragged batch, with temperature, top-p, guidance and a stop condition: every
    row as if it were alone."""
    keys = jax.random.split(jax.random.key(1), 3)
    more = {"sampling": Sampling(0.7, top_p=0.9), "guidance": 0.5, "stop": stop_on([EOS, 3], vocab_size=VOCAB)}
    sampler = blocks(name, **more)

    @jax.jit
    def mine(params, prompt, lengths, key):
        denoiser = FunctionDenoiser(lambda tokens, lengths: my_model(params, tokens, lengths), mask_id=MASK, eos_id=EOS)
        return sample(sampler, denoiser, prompt, lengths, key=key)

    result = mine(PARAMS, PROMPT, LENGTHS, keys)
    assert not (result.tokens == MASK).any() and (result.broken_at == -1).all()
    assert_same(row(result, 1), alone(sampler, own_function(), 1, keys))


@pytest.mark.parametrize("name", ["threshold", "remask"])
def test_a_function_is_the_model_with_buffers_that_are_not_used(name):
    sampler = blocks(name, sampling=Sampling(0.5))
    run = lambda denoiser: sample_jit(sampler, denoiser, PROMPT, LENGTHS, key=jax.random.key(2))
    assert_same(run(own_function()), run(OWN))


def test_a_function_in_vmap_scan_and_stream():
    many = jax.vmap(init)(jax.random.split(jax.random.key(5), 2))
    sampler = blocks("threshold", stop=stop_on([EOS], vocab_size=VOCAB))
    one = lambda params: sample(sampler, own_function(params), PROMPT, LENGTHS)

    def closed(params):
        fn = lambda tokens, lengths: my_model(params, tokens, lengths)
        return sample(sampler, FunctionDenoiser(fn, MASK, EOS), PROMPT, LENGTHS)

    wanted = [jax.jit(one)(row(many, i)) for i in range(2)]
    scanned = lambda many: jax.lax.scan(lambda _, params: (None, closed(params)), None, many)[1]
    for found in (jax.jit(jax.vmap(one))(many), jax.jit(jax.vmap(closed))(many), jax.jit(scanned)(many)):
        for i in range(2):
            assert_same(row(found, i), wanted[i])
    *_, state = stream(sampler, own_function(row(many, 0)), PROMPT, LENGTHS)
    assert_same(sampler.result(own_function(), state), wanted[0])


def test_new_weights_compile_nothing():
    sampler, traces = blocks("topk"), []

    def counted(params, tokens, lengths):
        traces.append(tokens.shape)
        return my_model(params, tokens, lengths)

    run = lambda params: sample_jit(sampler, FunctionDenoiser(counted, MASK, EOS, params, VOCAB), PROMPT, LENGTHS)
    first, count = run(PARAMS), len(traces)
    other = run(init(jax.random.key(9)))
    assert len(traces) == count and not np.array_equal(first.tokens, other.tokens)


def test_a_function_from_left_to_right():
    keys, sampling = jax.random.split(jax.random.key(3), 3), Sampling(0.8, top_k=5)
    sampler = LeftRight(GEN, tokens_per_step=3, lookahead=6, sampling=sampling, stop=stop_on([EOS], vocab_size=VOCAB))
    result = jax.jit(lambda *args: sample(sampler, own_function(), *args, key=keys))(PROMPT, LENGTHS)
    assert_same(row(result, 2), alone(sampler, own_function(), 2, keys))


def test_likelihoods_of_a_function():
    prompt, answer = PROMPT[0], jnp.array([3, 1, 4])
    run = lambda denoiser: log_likelihood(
        denoiser, prompt, answer, key=jax.random.key(0), num_samples=8, batch_size=4, guidance=0.5
    )
    np.testing.assert_allclose(run(own_function()), run(OWN), rtol=1e-5)
    greedy = sample_jit(BlockSampler(RULES["topk"](), 3), own_function(), PROMPT, LENGTHS).tokens
    assert is_greedy(own_function(), PROMPT, greedy, LENGTHS).all()
    np.testing.assert_allclose(own_function()(PROMPT, LENGTHS), my_model(PARAMS, PROMPT, LENGTHS), atol=1e-5)


NI = init_indicator(IndicatorConfig(1, 8, DIM, DIM, 4, 2), jax.random.key(5))
REFUSED = {
    "dual": (blocks("threshold", cache=DualCache()), "buffers"),
    "prefix": (blocks("threshold", cache=PrefixCache()), "buffers"),
    "window": (LeftRight(GEN, window=2), "window"),
    "pipeline": (PipelineSampler(GEN, BLOCK), "buffers"),
    "smoothing": (blocks("topk", smoothing=Smoothing()), "smoothing"),
    "ni": (BlockSampler(RULES["ni"](indicator=NI), GEN, BLOCK), "NI"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_function_cannot_do_is_said_at_the_start(name):
    sampler, lacking = REFUSED[name]
    with refuses("FunctionDenoiser", lacking):
        sampler.init(own_function(), PROMPT, LENGTHS)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int", {"fn": 3}),
        ("[1, 8]", {"fn": lambda t: t}),
        ("int32[1, 8]", {"fn": lambda t, n: t}),
        ("dict", {"fn": lambda t, n: {"logits": t}}),
        ("float32[1, 7, 19]", {"fn": lambda t, n: jax.nn.one_hot(t, 19)[:, 1:]}),
        ("int32[1, 8, 19]", {"fn": lambda t, n: jax.nn.one_hot(t, 19, dtype=jnp.int32)}),
        ("fn", {"fn": lambda t, n: np.asarray(t)}),
        ("mask_id 19", {"mask_id": 19}),
        ("eos_id -1", {"eos_id": -1}),
        ("mask_id is 'mask'", {"mask_id": "mask"}),
        ("min_prompt_length", {"min_prompt_length": 2}),
    ],
)
def test_functions_that_are_none_are_refused(name, options):
    with refuses(name):
        FunctionDenoiser(**{"fn": functools.partial(my_model, PARAMS), "mask_id": MASK, "eos_id": EOS, **options})


def test_an_answer_that_depends_on_the_shape_is_refused():
    fn = lambda tokens, lengths: jax.nn.one_hot(tokens, VOCAB)[:, :8]
    with refuses("float32[3, 8, 19]", "[3, 17]"):
        sample_jit(blocks("topk"), FunctionDenoiser(fn, MASK, EOS), PROMPT, LENGTHS)
    denoiser, visible = own_function(), jnp.ones(PROMPT.shape, jnp.int32)
    with refuses("block-causal"):
        denoiser.forward(PROMPT, visible)


# A class with buffers ------------------------------------------------------------------------------------------------


def test_own_buffers_pass_the_kit():
    checked = check_denoiser(OWN)
    assert checked[-1] == "expected embeddings" and len(checked) == 15
    assert check_denoiser(own_function()) == checked[: checked.index("windows")]


@pytest.mark.parametrize(("name", "cache"), [("threshold", DualCache(2)), ("eb", PrefixCache())], ids=str)
def test_rows_with_own_buffers_are_as_if_alone(name, cache):
    sampler = blocks(name, cache=cache, stop=stop_on([EOS], vocab_size=VOCAB))
    result = sample_jit(sampler, OWN, PROMPT, LENGTHS)
    for index in range(3):
        assert_same(row(result, index), alone(sampler, OWN, index))


def test_own_buffers_in_the_pipeline_with_smoothing_and_windows():
    samplers = [
        PipelineSampler(GEN, BLOCK, threshold=0.3),
        LeftRight(GEN, window=3, lookahead=4),
        blocks("threshold", cache=PrefixCache(), smoothing=Smoothing(), guidance=0.5),
        BlockSampler(RULES["ni"](indicator=NI), GEN, BLOCK, cache=DualCache()),
    ]
    for sampler in samplers:
        result = sample_jit(sampler, OWN, PROMPT, LENGTHS)
        assert_same(row(result, 1), alone(sampler, OWN, 1))
