"""Experts: every implementation that can run here is the reference, results and gradients. More of XLA's own ways is in
test_moe.py, where the others stand in programs in test_dispatch.py."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import dllm_jax
from dllm_jax.kernels.experts import EXPERTS, Grouped, in_groups, reference
from dllm_jax.kernels.experts.xla import in_rounds

needs_tokamax = pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")
ON = jax.devices()[0]
NAMES = ["rounds", "groups", pytest.param("tokamax", marks=needs_tokamax)]


@pytest.fixture(params=NAMES)
def run(request, monkeypatch):
    """An implementation; tokamax's is its own function with its XLA operations in the place of its Mosaic kernels."""
    if request.param == "tokamax":
        import tokamax

        of_xla = tokamax.ragged_dot
        change = lambda *operands, implementation, **rest: of_xla(*operands, implementation="xla", **rest)
        monkeypatch.setattr(tokamax, "ragged_dot", change)
    grouped = lambda device: functools.partial(in_groups, Grouped(device))
    return {"rounds": functools.partial(in_rounds, 8), "groups": grouped(None), "tokamax": grouped(ON)}[request.param]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_implementation_is_the_reference(run, dtype):
    """Forward and gradient; one expert is everybody's first, and one has no token."""
    checks = dataclasses.replace(EXPERTS, xla=run).check(None, ON, dtype)
    assert [check.what.split(", ")[1] for check in checks] == ["forward"] + [
        f"gradient of {name}" for name in ("x", "weights", "w_in", "w_out")
    ]
    assert all(check.error < {"float32": 1e-5, "bfloat16": 5e-2}[dtype] for check in checks), checks


def test_a_part_of_the_experts(run):
    """What is elsewhere adds zero, and with the other part it is the whole; the number of tokens divides no tile."""
    x, ids, weights, w_in, w_out = EXPERTS.examples()["2 of 4 experts"]
    x, ids, weights = (part[:, :37] for part in (x, ids, weights))
    parts = [run(x, ids, weights, w_in[i : i + 2], w_out[i : i + 2], jnp.int32(i)) for i in (0, 2)]
    wanted = reference.apply(x, ids, weights, w_in, w_out)
    np.testing.assert_allclose(parts[0] + parts[1], wanted, atol=1e-4)
    np.testing.assert_array_equal(run(x, ids * 0, weights, w_in[2:], w_out[2:], jnp.int32(2)), 0)


def test_in_a_callers_shard_map(run):
    """Each device runs its own rows."""
    *tokens, w_in, w_out = EXPERTS.examples()["2 of 4 experts"]
    spec, mesh = PartitionSpec("data"), dllm_jax.make_mesh(data=2)
    by_device = jax.shard_map(lambda *x: run(*x, w_in, w_out), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(by_device)(*tokens), reference.apply(*tokens, w_in, w_out), atol=1e-4)
