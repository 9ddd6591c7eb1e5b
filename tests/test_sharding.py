"""A model on a mesh: what its forwards say about the buffers, what sampling gives, and what the devices exchange."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_equal
from jax.sharding import PartitionSpec as P
from train_toys import LLADA

import dllm_jax
from dllm_jax import Denoiser, Span
from samplers import BlockSampler, DualCache, LeftRight, PipelineSampler, PrefixCache, Threshold, sample, sample_jit

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

CONFIG = LLADA.replace(num_heads=4, num_kv_heads=2)
PROMPT = jax.random.randint(jax.random.key(2), (8, 20), 0, 20)
LENGTHS = jnp.array([20, 3, 11, 5, 7, 1, 20, 2])
SAMPLERS = {
    "dual": BlockSampler(Threshold(0.4), 12, 6, cache=DualCache(2)),
    "prefix, guided": BlockSampler(Threshold(0.4), 12, 6, cache=PrefixCache(), guidance=0.5),
    "pipeline": PipelineSampler(12, 6, threshold=0.4),
    "left to right": LeftRight(12, tokens_per_step=2, window=3, lookahead=4),
}


@pytest.fixture(scope="module")
def models():
    """The same random weights on one device and on two times two."""
    mesh = dllm_jax.make_mesh(data=2, tensor=2)
    params = {name: x * 25 if x.ndim > 1 else x for name, x in dllm_jax.random_model(CONFIG).params.items()}
    placed = jax.device_put(params, dict(dllm_jax.param_shardings(CONFIG, mesh)))
    layout = dllm_jax.random_model(CONFIG, mesh=mesh).layout
    return Denoiser(CONFIG, params), Denoiser(CONFIG, placed, layout), mesh


def constraints(fn, *args):
    """The specs that a function puts on its arrays, of the outermost program."""
    equations = jax.make_jaxpr(fn)(*args).eqns
    return [
        equation.params["sharding"].spec for equation in equations if equation.primitive.name == "sharding_constraint"
    ]


def test_buffers_and_hidden_states_lie_as_the_weights_do(models):
    denoiser = models[1]
    assert (denoiser.batch_parts, denoiser.vocab_parts) == (2, 2)
    buffer, hidden = P("data", None, "tensor", None), P("data", None, None)
    kv = denoiser.empty_cache(8, 20)
    assert {x.sharding.spec for x in jax.tree.leaves(kv)} <= {buffer, P("data", None, "tensor")}
    window = lambda tokens, lengths, kv: denoiser.forward(tokens, lengths, at=Span(lengths * 0, 4), kv=kv)
    for fn, args in ((denoiser.forward, (PROMPT, LENGTHS)), (window, (PROMPT, LENGTHS, kv))):
        found = constraints(fn, *args)
        assert found.count(buffer) == 2 * CONFIG.num_layers and found.count(hidden) == 2
    assert constraints(denoiser.forward, PROMPT[:3], LENGTHS[:3]).count(P(None, None, "tensor", None)) == 4


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_tokens_are_those_of_one_device(models, name):
    one, four, mesh = models
    sampler = SAMPLERS[name]
    wanted = sample_jit(sampler, one, PROMPT, LENGTHS)
    placed = jax.device_put((PROMPT, LENGTHS), dllm_jax.batch_sharding(mesh))
    compiled = sample_jit.lower(sampler, four, *placed).compile()
    assert_same(compiled(sampler, four, *placed), wanted)
    check_traffic(compiled.as_text(), one.vocab_size, rows=2 if "guided" in name else 1)


def check_traffic(program, vocab_size, rows):
    """Devices exchange activations: the sum of a row's or a window's hidden states over the heads' devices, and numbers
    by position; never keys and values, weights or logits.

    Args:
        rows: that a row of the batch is fed as.
    """
    length, local = PROMPT.shape[1] + 12, PROMPT.shape[0] // 2
    activations = rows * max(length, local * 12) * CONFIG.embed_dim
    buffer = local * length * CONFIG.num_kv_heads * CONFIG.head_dim
    assert activations < rows * buffer
    kinds = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"
    found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", program)
    assert found
    for shapes, kind in found:
        for shape in re.findall(r"\[([\d,]*)\]", shapes):
            size = math.prod(int(n) for n in shape.split(",") if n)
            assert size <= (activations if kind == "all-reduce" else 4 * local * vocab_size), (kind, shapes)


def test_single_rows_are_refreshed_by_hand_as_well(models):
    """In `shard_map` a device has its own rows, and whole weights, whatever mesh the model was loaded for."""
    one, four, _ = models
    sampler = SAMPLERS["dual"]
    parts = []

    def run(denoiser, prompt, lengths):
        parts.append(denoiser.batch_parts)
        return sample(sampler, denoiser, prompt, lengths)

    whole = Denoiser(CONFIG, jax.device_get(four.params), four.layout)
    split = P("data")
    mapped = jax.shard_map(run, mesh=dllm_jax.make_mesh(data=4), in_specs=(P(), split, split), out_specs=split)
    assert_same(jax.jit(mapped)(whole, PROMPT, LENGTHS), sample_jit(sampler, one, PROMPT, LENGTHS))
    assert set(parts) == {1}


def test_a_batch_that_does_not_divide_runs(models):
    one, four, _ = models
    sampler = SAMPLERS["dual"]
    assert_same(sample_jit(sampler, four, PROMPT[:3], LENGTHS[:3]), sample_jit(sampler, one, PROMPT[:3], LENGTHS[:3]))


def assert_same(found, wanted):
    for name, value in vars(wanted).items():
        assert_equal(jax.device_get(getattr(found, name)), np.asarray(value), name)
