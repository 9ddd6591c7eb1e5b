"""Attention: every implementation that can run or be interpreted here is the reference, in parts as in whole, with
results and gradients; where the others stand in programs is in test_dispatch.py."""

import dataclasses
import functools
import importlib.util
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dllm_jax.kernels import attention as module
from dllm_jax.kernels.attention import ATTENTION, CAUSAL, IN_BLOCKS, attention, reference, tokamax, tpu, xla
from dllm_jax.kernels.attention.xla import blocks_in_parts, in_parts
from dllm_jax.kernels.dispatch import use_kernels
from dllm_jax.models import kv_cache
from dllm_jax.parallel.sharding import Layout, make_mesh
from train.step import REMAT

B, N, K, H, S = 2, 4, 2, 8, 23
INTERPRETED = functools.partial(tpu.attend, None, interpret=True)

needs_tokamax = pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")


@pytest.fixture
def tokamax_here(monkeypatch):
    """tokamax's kernels replaced by XLA's operations of the same interface: its own forward, and the backward kernels'
    formula (`pallas_mosaic_gpu_vjp_kernel_sm90.py`), which takes the sums that it is given."""
    from tokamax._src.ops.attention import base, pallas_mosaic_gpu

    def backward(residuals, out, gradient, q, k, v, *, mask, logits_scale, **options):
        most, total = residuals  # [B, N, T]
        heads = lambda x: jnp.repeat(x, q.shape[2] // k.shape[2], 2).astype(jnp.float32)
        scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), heads(k)) * logits_scale
        scores = jnp.where(mask.as_array(q.shape[1], k.shape[1]), scores, -jnp.inf)
        weights = jnp.exp(scores - most[..., None]) / total[..., None]
        gradient = gradient.astype(jnp.float32)
        mean = jnp.einsum("btnh,btnh->bnt", gradient, out.astype(jnp.float32))[..., None]
        to_scores = weights * (jnp.einsum("btnh,bsnh->bnts", gradient, heads(v)) - mean) * logits_scale
        shared = lambda x: x.reshape(*k.shape[:3], -1, k.shape[3]).sum(3).astype(k.dtype)
        return {
            "q": jnp.einsum("bnts,bsnh->btnh", to_scores, heads(k)).astype(q.dtype),
            "k": shared(jnp.einsum("bnts,btnh->bsnh", to_scores, q.astype(jnp.float32))),
            "v": shared(jnp.einsum("bnts,btnh->bsnh", weights, gradient)),
        }

    @dataclasses.dataclass(frozen=True)
    class InXla(base.DotProductAttention):
        def __post_init__(self):
            if self.vjp is None:
                object.__setattr__(self, "vjp", backward)

    monkeypatch.setattr(pallas_mosaic_gpu, "PallasMosaicGpuFlashAttention", InXla)
    monkeypatch.setattr(tokamax, "refusal", lambda *_: None)


def kernel_of(operation, name):
    """An operation's implementation as it runs here, None for XLA's."""
    (kernel,) = [each for each in operation.kernels if each.name == name] or [None]
    if name == "tpu":
        return dataclasses.replace(kernel, run=functools.partial(kernel.run, interpret=True))
    return None if kernel is None else dataclasses.replace(kernel, refusal=lambda *_: None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["xla", "xla elsewhere", "tpu", pytest.param("tokamax", marks=needs_tokamax)])
@pytest.mark.parametrize("operation", [ATTENTION, CAUSAL, IN_BLOCKS], ids=lambda each: each.name)
def test_every_implementation_is_the_reference(request, monkeypatch, operation, name, dtype) -> None:
    """Of all examples that it takes, forward and gradient, ragged `visible` among them."""
    if name == "tokamax":
        request.getfixturevalue("tokamax_here")
    if name == "xla elsewhere":  # what other devices than a CPU run
        monkeypatch.setattr(xla, "attend_on_cpu", xla.attend_by_jax)
    kernel = kernel_of(operation, name)
    checks = operation.check(kernel, jax.devices()[0], dtype)
    assert len({check.what.split(",")[0] for check in checks}) == len(operation.examples())
    most = {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    assert all(check.error < most for check in checks), checks


@pytest.mark.parametrize(("operation", "example"), [(ATTENTION, "a length per row"), (CAUSAL, "causal")])
def test_cudnn_is_asked_for_the_reference(monkeypatch, operation, example) -> None:
    """What JAX computes where it is asked for the same of XLA; nothing here runs cuDNN."""
    in_xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, implementation, **options: in_xla(*x, **options))
    one = dataclasses.replace(operation, examples=lambda: {example: operation.examples()[example]})
    checks = one.check(kernel_of(operation, "cudnn"), jax.devices()[0], "float32")
    assert len(checks) == 4 and all(check.error < 1e-5 for check in checks), checks


@pytest.mark.parametrize("name", ["tpu", "xla", pytest.param("tokamax", marks=needs_tokamax)])
def test_a_query_that_sees_nothing_harms_nobody(request, name) -> None:
    """Its own result is some number, and the gradients of what others see are what they are without it."""
    if name == "tokamax":
        request.getfixturevalue("tokamax_here")
    attend = {"tpu": INTERPRETED, "xla": in_parts, "tokamax": functools.partial(tokamax.attend, jax.devices()[0])}[name]
    args, visible = operands(256, 256, head_dim=64), jnp.full((B, 256), 100).at[0, 3].set(0)
    assert bool(jnp.isfinite(attend(*args, visible)).all())
    loss = lambda attend: lambda *x: attend(*x, visible).at[0, 3].set(0)
    for one, other in zip(gradient(loss(attend), *args), gradient(loss(reference.attend), *args), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


def operands(length, keys=S, head_dim=H):
    shapes = (B, length, N, head_dim), (B, keys, K, head_dim), (B, keys, K, head_dim)
    each = zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    return [jax.random.normal(key, shape) for key, shape in each]


def seen(length, keys=S):
    lengths = jnp.asarray([5, keys])
    return {
        "lengths": lengths[:, None],
        "blocks": jnp.minimum(lengths[:, None], 1 + jnp.arange(length)[None] // 4 * 4),
        "any": jax.random.randint(jax.random.key(1), (B, length), 1, keys + 9),  # some more than there are
    }


def gradient(function, *args):
    return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), argnums=(0, 1, 2)))(*args)


@pytest.mark.parametrize("length", [8, 12, 19])  # whole parts, and one that is not
@pytest.mark.parametrize("kind", ["lengths", "blocks"])
def test_parts_change_nothing(length, kind) -> None:
    """Results and gradients."""
    visible = seen(length)[kind]
    of = lambda queries: jax.jit(lambda *x: in_parts(*x, visible, queries=queries))
    (parts, whole), args = (of(4), of(length)), operands(length)
    np.testing.assert_allclose(parts(*args), whole(*args), atol=1e-6)
    for one, other in zip(gradient(parts, *args), gradient(whole, *args), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("kind", ["lengths", "blocks"])
def test_a_window_slides(kind) -> None:
    """A query that sees only the last of its keys, whether queries are taken in parts or not."""
    (query, key, value), visible = operands(12), seen(12)[kind]
    since = jnp.broadcast_to(visible - 3, (B, 1) if kind == "lengths" else (B, 12))
    wanted = reference.attend(query, key, value, visible, since)
    for queries in (4, 512):
        np.testing.assert_allclose(in_parts(query, key, value, visible, since, queries), wanted, atol=1e-5)
    np.testing.assert_allclose(attention(query, key, value, visible, since=since), wanted, atol=1e-5)


def test_no_scores_of_all_queries() -> None:
    """Neither forward nor backward."""
    length, visible, args = 64, seen(64)["blocks"], operands(64)
    for queries, wanted in ((8, False), (64, True)):
        loss = lambda *x, queries=queries: jnp.sum(in_parts(*x, visible, queries=queries))
        text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*args))
        scores = [f"f32[{B},{N},{length},{S}]", f"f32[{B},{K},{N // K},{length},{S}]", f"f32[{B},{length},{N},{S}]"]
        scores.append(f"f32[{B},{K},{N // K * length},{S}]")  # on a CPU
        assert any(shape in text for shape in scores) == wanted


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("kind", ["lengths", "any", "windows"])
def test_tpu_kernels_of_lengths_that_no_tile_divides(monkeypatch, kind, in_parts) -> None:
    """Results and gradients, also of rows whose queries and keys a core's memory does not hold at once."""
    length, keys = 300, 520
    if in_parts:
        monkeypatch.setattr(tpu, "VMEM", 2**20)
        spans = tpu._spans(jnp.zeros((1, 1, 768, 64)))
        assert spans == [slice(0, 256), slice(256, 512), slice(512, 768)]
    visible, args = seen(length, keys)["any" if kind == "windows" else kind], operands(length, keys, head_dim=64)
    bounds = (visible, jnp.maximum(visible - 200, 0)) if kind == "windows" else (visible,)
    kernels, plain = (jax.jit(lambda *x, run=run: run(*x, *bounds)) for run in (INTERPRETED, reference.attend))
    np.testing.assert_allclose(kernels(*args), plain(*args), atol=2e-6)
    for one, other in zip(gradient(kernels, *args), gradient(plain, *args), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("remat", ["layers", "matmuls"])
def test_rematerialisation_keeps_what_tpu_kernels_computed(remat) -> None:
    """The backward pass computes the rest again, as the operands here."""
    args, visible = operands(256, 256, head_dim=64), jnp.full((B, 256), 100)

    def again(policy):
        """Names of what is computed again."""
        run = jax.checkpoint(lambda *x: INTERPRETED(*map(jnp.sin, x), visible), policy=policy)
        text = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(run(*x))))).lower(*args).compile().as_text()
        return {name for name in re.findall(r'op_name="([^"]*)"', text) if "rematted_computation" in name}

    everything, rest = again(jax.checkpoint_policies.nothing_saveable), again(REMAT[remat])
    of_kernel = lambda names: [name for name in names if "/result/" in name]
    assert of_kernel(everything) and not of_kernel(rest) and rest


def test_tpu_kernels_on_a_mesh() -> None:
    """Every device runs its own rows and heads, and nothing is sent."""
    axes = (module.QUERY, module.KEYS, module.KEYS, module.ROWS)
    on_a_mesh = jax.jit(lambda *x: Layout(make_mesh(data=2, tensor=2)).locally(INTERPRETED, axes, module.QUERY)(*x))
    args = (*operands(256, 256, head_dim=64), seen(256, 256)["blocks"])
    np.testing.assert_allclose(on_a_mesh(*args), in_parts(*args), atol=2e-6)
    text = on_a_mesh.lower(*args).as_text()
    assert "all_gather" not in text and "all_reduce" not in text


def test_tpu_kernels_within_shard_map_and_vmap() -> None:
    """A caller's own; what varies over its axes is said to the compiler, though the interpreter cannot say it."""
    args, rows = (*operands(256, 256, head_dim=64), seen(256, 256)["blocks"]), PartitionSpec("rows")
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    by_device = jax.jit(jax.shard_map(INTERPRETED, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    by_row = jax.jit(jax.vmap(lambda *row: INTERPRETED(*(x[None] for x in row))[0]))
    wanted = in_parts(*args)
    np.testing.assert_allclose(by_device(*args), wanted, atol=2e-6)
    np.testing.assert_allclose(by_row(*args), wanted, atol=2e-6)
    with use_kernels("tpu"):
        checked = jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=rows, out_specs=rows))
        assert "tpu_custom_call" in checked.trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def test_what_tpu_kernels_take() -> None:
    """Any length, in parts of about the same length that a core's memory holds."""

    def shape(length, head_dim, dtype):
        return jax.ShapeDtypeStruct((1, length, 1, head_dim), dtype)

    takes = lambda *sizes: tpu.refusal(None, *[shape(*sizes)] * 3, None) is None
    assert takes(32768, 128, "bfloat16") and takes(1024, 256, "bfloat16")
    assert not takes(1024, 256, "float32") and not takes(1024, 192, "bfloat16") and not takes(1024, 128, "float16")
    lengths = lambda length, dtype: [x.stop - x.start for x in tpu._spans(jnp.zeros((1, 1, length, 128), dtype))]
    assert lengths(10240, "bfloat16") == [10240] and lengths(32768, "bfloat16") == [8192] * 4
    assert lengths(10496, "bfloat16") == [5376, 5120] and lengths(5120, "float32") == [5120]
    v4 = types.SimpleNamespace(device_kind="TPU v4")
    assert "TPU v4" in tpu.refusal(v4, *[shape(256, 128, "bfloat16")] * 3, None)


@pytest.mark.parametrize("name", ["tpu", pytest.param("tokamax", marks=needs_tokamax)])
@pytest.mark.parametrize("block_length", [4, 30])
def test_blocks_with_kernels_are_those_in_parts(request, block_length, name) -> None:
    """Results and gradients; the first block sees nothing ahead, and rows end within a block."""
    if name == "tokamax":
        request.getfixturevalue("tokamax_here")
    length = 300
    query, key, value = operands(length, length, head_dim=64)
    before = [x[::-1] for x in (key, value)]
    ends = (jnp.arange(length) // block_length + 1) * block_length
    visible = jnp.minimum(ends, jnp.asarray([[101], [length]]))
    args = query, key, value, *before
    of = lambda run: jax.jit(lambda *x: run(*x, visible) * (jnp.arange(length) < visible[:, -1:])[..., None, None])
    kernel = kernel_of(IN_BLOCKS, name)
    fused = of(functools.partial(kernel.run, jax.devices()[0], block_length))
    plain = of(functools.partial(blocks_in_parts, block_length))
    np.testing.assert_allclose(fused(*args), plain(*args), atol=2e-6)
    loss = lambda run: lambda *x: jnp.sum(jnp.sin(run(*x)))
    gradients = [jax.jit(jax.grad(loss(run), argnums=range(5)))(*args) for run in (fused, plain)]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


@needs_tokamax
def test_the_pinned_tokamax_has_what_is_used() -> None:
    """Modules that are private there, with the fields and arguments of the pinned version."""
    import tokamax as package
    from tokamax._src.ops.attention import base
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    from dllm_jax.kernels.tokamax import PINNED

    assert package.__version__ in PINNED and {"k_start", "k_end"} <= {x.name for x in dataclasses.fields(base.Mask)}
    operation = PallasMosaicGpuFlashAttention()
    query, key, value = operands(8, 8)
    bound = operation.bind(query, key, value, mask=base.Mask(k_end=jnp.ones((B, 1, 8), int)), return_residuals=True)
    assert callable(operation.vjp) and len(bound.args) == 3 and {"mask", "return_residuals"} <= bound.kwargs.keys()
    seen = base.Mask(k_start=jnp.array([[[1, 0]]]), k_end=jnp.array([[[2, 1]]])).as_array(2, 3)
    np.testing.assert_array_equal(seen[0, 0], [[False, True, False], [True, False, False]])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [2, 32, 33, 70])
def test_rows_are_written_one_by_one_as_together(rows, masked) -> None:
    """A TPU's way and the others', beyond the rows that are unrolled as well."""
    keys = jax.random.split(jax.random.key(rows), 4)
    buffer, new = jax.random.normal(keys[0], (rows, 9, 2, 4)), jax.random.normal(keys[1], (rows, 3, 2, 4))
    start = jax.random.randint(keys[2], (rows,), 0, 9)  # some beyond the end, which are moved back
    write = jax.random.bernoulli(keys[3], 0.5, (rows, 3, 1, 1)) if masked else None
    found = jax.jit(kv_cache._write_one_by_one)(buffer, new, start, write)
    np.testing.assert_array_equal(found, kv_cache._write_together(buffer, new, start, write))
    assert not np.array_equal(found, buffer)
