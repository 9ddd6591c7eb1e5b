"""A generation that was exported runs without this library, and writes the same tokens."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from conftest import refuses
from jax import export as jax_export
from test_quantized import MOE, random_model

import dllm_jax
from samplers import export, generate, make_sampler
from samplers.generate import prepare
from samplers.testing import TINY
from samplers.text.prompts import pad_prompts

PROMPTS = [[5, 9, 30, 22, 41], [7, 8]]

# What a machine has that got two things, the program and the checkpoint's folder of weights.
ELSEWHERE = """
import json, sys
for name in ("dllm_jax", "samplers", "convert", "train", "evals"):
    sys.modules[name] = None  # importing it now is an error
import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

program, params, prompt, lengths = sys.argv[1:]
exported = jax.export.deserialize(bytearray(open(program, "rb").read()))
integers = lambda text: jnp.asarray(json.loads(text), jnp.int32)
result = exported.call(dict(ocp.load(params)), integers(prompt), integers(lengths), jnp.int32(3))
print(json.dumps({name: x.tolist() for name, x in result.items()}))
"""


def elsewhere(program, folder, prompt, lengths):
    arguments = [str(program), str(folder / "params"), json.dumps(prompt.tolist()), json.dumps(lengths.tolist())]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *arguments], capture_output=True, text=True, cwd=program.parent
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_it_runs_where_the_library_is_not(llada_tiny, tmp_path, quantize) -> None:
    folder = llada_tiny.folder
    if quantize is not None:
        model = dllm_jax.load(folder, quantize=quantize)
        dllm_jax.checkpoints.checkpoint.save(tmp_path / "small", model.config, model.params.items())
        folder = tmp_path / "small"
    model = dllm_jax.load(folder)
    options = {"gen_length": 16, "block_length": 8, "cache": "dual", "temperature": 0.7}
    sampler, rows, _ = prepare(model, PROMPTS, sampler="threshold:threshold=0.6", seed=3, **options)
    prompt, lengths = pad_prompts(rows)
    (tmp_path / "program").write_bytes(
        export(sampler, model, batch=2, prompt_length=prompt.shape[1], platforms=["cpu"])
    )
    found = elsewhere(tmp_path / "program", folder, prompt, lengths)
    wanted = generate(model, PROMPTS, sampler=sampler, seed=3)
    assert found["tokens"] == [answer.canvas for answer in wanted]
    assert found["nfe"] == [answer.nfe for answer in wanted]


def test_other_platforms_need_not_be_here(llada_tiny) -> None:
    sampler = make_sampler(llada_tiny, "eb", gen_length=8, block_length=8, cache="prefix")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), llada_tiny.params)
    absent = dllm_jax.Model(llada_tiny.config, shapes, None, "absent")
    exported = jax_export.deserialize(export(sampler, absent, batch=2, prompt_length=32))
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert sorted(exported.in_tree.unflatten(range(exported.in_tree.num_leaves))[0][0]) == sorted(llada_tiny.params)


def test_experts_run_their_own_way_on_each_platform() -> None:
    model = random_model(MOE)
    sampler = make_sampler(model, "topk", gen_length=8, block_length=8)
    exported = jax_export.deserialize(export(sampler, model, prompt_length=8))
    assert "ragged_dot" in exported.mlir_module()  # of TPUs, in one branch; that of this platform runs
    result = exported.call(model.params, jnp.ones((1, 8), jnp.int32), jnp.array([8]), jnp.int32(0))
    assert int(result["nfe"][0]) > 0


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_no_kernel_becomes_part_of_a_program(platform) -> None:
    """Not even where one is asked for: each is tried on its device before it is used."""
    config = TINY.replace(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=64, max_length=1024, dtype="bfloat16")
    model = random_model(config)
    sampler = make_sampler(model, "topk", gen_length=8, block_length=8, cache="none")
    with dllm_jax.use_kernels("tpu"):
        exported = jax_export.deserialize(export(sampler, model, prompt_length=504, platforms=[platform]))
    assert exported.platforms == (platform,) and "tpu_custom_call" not in exported.mlir_module()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("batch", {"batch": 0}),
        ("1000000 tokens", {"prompt_length": 10**6}),
        ("'npu'", {"platforms": ["cpu", "npu"]}),
        ("platform", {"platforms": []}),
    ],
)
def test_mistakes_get_a_sentence(llada_tiny, name, options) -> None:
    sampler = make_sampler(llada_tiny, gen_length=8, block_length=8)
    with refuses(name):
        export(sampler, llada_tiny, **{"prompt_length": 32, **options})
