"""Four bits for a model's own inputs: products that are closer than with rounding to nearest, and what is refused."""

import dataclasses
import json

import hub_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_error, refuses
from test_quantized import CONFIG, MOE, assert_same, random_model

import convert
import dllm_jax
from dllm_jax.checkpoints import checkpoint
from dllm_jax.params.gptq import ObservedKernel, quantize_for_inputs
from dllm_jax.params.products import product
from dllm_jax.params.quantized import Form, QuantizedKernel, quantize_kernel
from evals.__main__ import main as evals_main
from evals.quantize import _batches, _quantized, divergence, quantize_checkpoint
from samplers import generate

FORM = Form("int4", 0, 4)  # of 256 inputs, which are two blocks of the algorithm


def correlated(rows=2000, inputs=256, sources=64):
    """Inputs of a layer that are mostly mixtures of fewer, and a kernel."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(rows, sources)) @ draws.normal(size=(sources, inputs)) / 8
    x += 0.1 * draws.normal(size=x.shape)
    return x.astype(np.float32), draws.normal(size=(inputs, 24)).astype(np.float32)


def error(x, weights, kernel):
    """Of a product, relative to it."""
    found = np.asarray(kernel.dequantize(jnp.float32))
    return np.linalg.norm(x @ (weights - found)) / np.linalg.norm(x @ weights)


def test_products_are_closer_for_the_inputs_it_was_rounded_for() -> None:
    """And for others of the same kind; each weight by itself is farther off than with rounding to nearest."""
    x, weights = correlated()
    nearest, found = quantize_kernel(weights, FORM), quantize_for_inputs(weights, x[:1000].T @ x[:1000], FORM)
    assert error(x[:1000], weights, found) < 0.6 * error(x[:1000], weights, nearest)
    assert error(x[1000:], weights, found) < 0.6 * error(x[1000:], weights, nearest)
    assert error(np.eye(256), weights, found) > error(np.eye(256), weights, nearest)
    assert_same(found.scale, nearest.scale)


def test_it_is_the_algorithm_without_blocks_in_the_order_of_the_moments(monkeypatch) -> None:
    """Equations 2 and 3 of the paper: after each input the inverse of what is left is computed anew."""
    monkeypatch.setattr("dllm_jax.params.gptq.BLOCK", 24)
    x, weights = correlated(inputs=64, sources=16)
    moments, order = (x.T @ x).astype(np.float64), list(np.argsort(-np.diag(x.T @ x), kind="stable"))
    damped = moments + 0.01 * np.diag(moments).mean() * np.eye(64)
    scales = np.repeat(np.abs(weights.reshape(4, 16, 24)).max(axis=1) / 7.5, 16, axis=0)
    left, wanted = weights.astype(np.float64), np.empty(weights.shape)
    while order:
        inverse, at = np.linalg.inv(damped[np.ix_(order, order)]), order[0]
        wanted[at] = np.clip(np.rint(left[at] / scales[at]), -8, 7) * scales[at]
        left[order] -= np.outer(inverse[0], (left[at] - wanted[at]) / inverse[0, 0])
        order.pop(0)
    found = np.asarray(quantize_for_inputs(weights, moments, FORM).dequantize(jnp.float32))
    assert (np.abs(found - wanted) < 1e-5).mean() > 0.9  # one on an edge may fall to either side, and change others


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
def test_inputs_that_are_not_correlated_leave_the_nearest_numbers(scale) -> None:
    _, weights = correlated()
    moments = np.diag(np.random.default_rng(1).uniform(0.5, 2.0, 256)) * scale
    moments[3, 3] = 0.0  # an input that is always 0
    assert_same(quantize_for_inputs(weights, moments, FORM), quantize_kernel(weights, FORM))


def test_observed_products_are_plain_ones_and_report_the_positions_that_count() -> None:
    found = {}
    report = lambda number, moments: found.setdefault(int(number), []).append(np.asarray(moments))
    x, kernel = jax.random.normal(jax.random.key(0), (2, 5, 8)), jax.random.normal(jax.random.key(1), (8, 3))
    counted = jnp.arange(5) < jnp.array([[5], [2]])
    step = jax.jit(lambda number: product(x, ObservedKernel(kernel, number, counted, report)))
    for number in (4, -1):
        np.testing.assert_allclose(step(jnp.int32(number)), product(x, kernel), atol=1e-6)
        jax.effects_barrier()
    rows = np.concatenate([x[0], x[1, :2]])
    assert list(found) == [4] and len(found[4]) == 1
    np.testing.assert_allclose(found[4][0], rows.T @ rows, atol=1e-4)


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Twelve examples for the tiny LLaDA."""
    file = tmp_path_factory.mktemp("gptq") / "lines.jsonl"
    examples = [{"prompt": f"Q: {i} + {i}?\nA: ", "answer": f"{2 * i}" * (1 + i % 3)} for i in range(12)]
    file.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return file


@pytest.fixture(scope="module")
def made(llada_tiny, lines, tmp_path_factory):
    """The tiny LLaDA for eight of these examples, and how far it is from the plain one."""
    out = tmp_path_factory.mktemp("gptq") / "out"
    return out, quantize_checkpoint(llada_tiny.folder, out, data=lines, n=8, batch_size=3, progress=False)


def test_it_is_an_int4_checkpoint_as_others(made, llada_tiny) -> None:
    out, found = made
    model, nearest = dllm_jax.load(out), dllm_jax.load(llada_tiny.folder, quantize="int4")
    assert model.config == nearest.config and found.keys() == {"int8", "int4", "gptq"}
    assert all(0 < one.mean and 0 < one.stderr for one in found.values()) and found["int8"].mean < found["gptq"].mean
    changed = {name for name, x in model.params.items() if not np.array_equal(*map(_bytes, (x, nearest.params[name])))}
    kernels = {name for name, x in model.params.items() if isinstance(x, QuantizedKernel) and x.bits == "int4"}
    assert changed == kernels and len(kernels) == 7 * model.config.num_layers
    for name in kernels:
        assert_same(model.params[name].scale, nearest.params[name].scale)
    assert checkpoint.load_source(out)["calibrated"]["rows"] == 8
    assert generate(model, "Q: 1 + 1?\nA: ", gen_length=8, block_length=8) is not None
    with refuses("out"):
        convert.verify(hub_files.CHECKPOINTS / "llada-tiny", out)


def _bytes(param):
    return np.concatenate([np.asarray(x).reshape(-1).view(np.uint8) for x in jax.tree.leaves(param)])


def rounded(model, file):
    """The parameters that would be written."""
    used, _ = _batches(model, None, file, 8, 3, 0)
    return dict(_quantized(model, model.config.replace(quantize="int4"), used, False))


def test_seeds_choose_rows_and_layers_see_what_rounded_ones_give(made, llada_tiny, lines, monkeypatch) -> None:
    """The same seed gives the same checkpoint, and another seed another. If layer 0 became zeros, its own moments would
    be what they were, and those of layer 1 others."""
    written, name = dict(checkpoint.iter_params(made[0])), "layers.1.attn.q_proj.kernel"
    moments = []

    def record(kernel, found, form):
        moments.append(found)
        return quantize_for_inputs(kernel, found, form)

    monkeypatch.setattr("evals.quantize.quantize_for_inputs", record)
    again = rounded(llada_tiny, lines)
    assert again.keys() == written.keys() and all((_bytes(again[key]) == _bytes(x)).all() for key, x in written.items())
    before, moments[:] = list(moments), []
    zeros = lambda kernel, found, form: record(kernel * (len(moments) >= 7), found, form)
    monkeypatch.setattr("evals.quantize.quantize_for_inputs", zeros)
    other = rounded(llada_tiny, lines)
    assert all(np.array_equal(*pair) for pair in zip(before[:7], moments[:7], strict=True))
    assert not np.allclose(before[7], moments[7], rtol=1e-3) and (_bytes(other[name]) != _bytes(written[name])).any()
    first, second = (_batches(llada_tiny, None, lines, 8, 3, seed)[0] for seed in (0, 1))
    tokens = [np.concatenate([batch.inputs for batch in some(llada_tiny.denoiser)]) for some in (first, second)]
    assert (tokens[0] != tokens[1]).any()


def test_a_model_is_no_distance_from_itself(llada_tiny, lines) -> None:
    _, compared = _batches(llada_tiny, None, lines, 8, 3, 0)
    found = divergence(llada_tiny.denoiser, llada_tiny.denoiser, compared)
    assert compared.count == 4 and abs(found.mean) < 1e-6 and found.stderr < 1e-6
    assert _batches(llada_tiny, None, lines, 100, 3, 0)[1] is None


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_what_is_refused_before_anything_is_written(llada_tiny, lines, tmp_path) -> None:
    out, folder = tmp_path / "out", llada_tiny.folder
    (tmp_path / "empty.jsonl").write_text("")
    checkpoint.save(tmp_path / "moe", MOE, random_model(MOE).params.items())
    checkpoint.save(tmp_path / "small", CONFIG.replace(quantize="int8"), random_model(CONFIG, "int8").params.items())
    causal = CONFIG.replace(family="qwen2", attention="causal", shift=True, mask_id=None)
    checkpoint.save(tmp_path / "causal", causal, dllm_jax.random_model(causal).params.items())
    before = sorted(tmp_path.iterdir())
    for names, model, options in [
        (("--task", "--data"), folder, {}),
        (("--task", "--data"), folder, {"task": "sudoku", "data": lines}),
        (("no examples",), folder, {"data": tmp_path / "empty.jsonl"}),
        (("nowhere.jsonl",), folder, {"data": tmp_path / "nowhere.jsonl"}),
        (("n is 0",), folder, {"data": lines, "n": 0}),
        (("batch_size",), folder, {"data": lines, "batch_size": -1}),
        (("small", "int8"), tmp_path / "small", {"data": lines}),
        (("experts",), tmp_path / "moe", {"data": lines}),
        (("causal",), tmp_path / "causal", {"data": lines}),
        (("sudoku",), folder, {"task": "sudoku"}),
    ]:
        with refuses(*names):
            quantize_checkpoint(model, out, progress=False, **options)
    with refuses("small", "--overwrite"):
        quantize_checkpoint(folder, tmp_path / "small", data=lines, progress=False)
    assert sorted(tmp_path.iterdir()) == before


def test_weights_that_are_no_numbers(llada_tiny, lines) -> None:
    name = "layers.0.mlp.up_proj.kernel"
    params = {**llada_tiny.params, name: llada_tiny.params[name].at[3, 2].set(jnp.nan)}
    with refuses("layers.0.", "NaN"):
        rounded(dataclasses.replace(llada_tiny, params=params), lines)


def test_command(capsys, llada_tiny, lines, tmp_path) -> None:
    given = ["quantize", "--model", str(llada_tiny.folder), "--out", str(tmp_path / "out"), "--no-progress"]
    assert evals_main([*given, "--data", str(lines), "--n", "10", "--batch-size", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gptq"]["mean"] > 0
    assert checkpoint.load_config(tmp_path / "out").quantize == "int4"
    assert evals_main([*given, "--data", str(lines)]) == 2 and "--overwrite" in one_error(capsys)
    assert evals_main([*given, "--data", str(lines), "--overwrite"]) == 0
    assert "nats" not in capsys.readouterr().out  # no row is left to compare with
