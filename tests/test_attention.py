"""Attention: in parts it is attention, no scores of all queries exist, and the kernels are attention as well."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dllm_jax.kernels import attention as module
from dllm_jax.kernels.attention import attention, attention_in_blocks, blocks_fused, blocks_in_parts, in_parts
from dllm_jax.kernels.dispatch import lie_on_one_device, one_device, use_kernels
from dllm_jax.kernels.pallas_attention import filled, fits, fused
from dllm_jax.models.kv_cache import LayerKV
from dllm_jax.parallel.sharding import Layout, make_mesh

B, N, K, H, S = 2, 4, 2, 8, 23


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
    of = lambda queries: jax.jit(lambda *x: in_parts(*x, visible, queries))
    (parts, whole), args = (of(4), of(length)), operands(length)
    np.testing.assert_allclose(parts(*args), whole(*args), atol=1e-6)
    for one, other in zip(gradient(parts, *args), gradient(whole, *args), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("kind", ["lengths", "blocks"])
def test_a_window_slides(kind) -> None:
    """A query that sees only the last of its keys, whether queries are taken in parts or not."""
    (query, key, value), visible = operands(12), seen(12)[kind]
    since = jnp.broadcast_to(visible - 3, (B, 1) if kind == "lengths" else (B, 12))
    place = jnp.arange(key.shape[1])
    mask = (place < visible[..., None]) & (place >= since[..., None])
    repeat = lambda x: jnp.repeat(x, N // K, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", query, repeat(key)) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    wanted = jnp.einsum("bnts,bsnh->btnh", weights, repeat(value))
    for queries in (4, 512):
        np.testing.assert_allclose(in_parts(query, key, value, visible, queries, since), wanted, atol=1e-5)
    np.testing.assert_allclose(attention(query, key, value, visible, since=since), wanted, atol=1e-5)


def test_no_scores_of_all_queries() -> None:
    """Neither forward nor backward."""
    length, visible, args = 64, seen(64)["blocks"], operands(64)
    for queries, wanted in ((8, False), (64, True)):
        loss = lambda *x, queries=queries: jnp.sum(in_parts(*x, visible, queries))
        text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*args))
        scores = [f"f32[{B},{N},{length},{S}]", f"f32[{B},{K},{N // K},{length},{S}]", f"f32[{B},{length},{N},{S}]"]
        assert any(shape in text for shape in scores) == wanted


@pytest.mark.parametrize("kind", ["lengths", "any"])
def test_kernels_are_attention(kind) -> None:
    """Results and gradients, of lengths that no tile divides, several queries' heads to one of keys."""
    length, keys = 300, 520
    visible = jnp.broadcast_to(seen(length, keys)[kind], (B, length))
    args = operands(length, keys, head_dim=64)
    kernels = jax.jit(lambda *x: fused("interpret", *x, visible))
    plain = jax.jit(lambda *x: in_parts(*x, visible))
    np.testing.assert_allclose(kernels(*args), plain(*args), atol=2e-6)
    for one, other in zip(gradient(kernels, *args), gradient(plain, *args), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


def test_kernels_in_bfloat16() -> None:
    """As far from the exact result as XLA's operations are, or less."""
    visible = jnp.broadcast_to(seen(256, 256)["lengths"], (B, 256))
    args = operands(256, 256, head_dim=64)
    exact = in_parts(*args, visible)
    narrow = [x.astype(jnp.bfloat16) for x in args]
    apart = lambda found: float(jnp.abs(found.astype(jnp.float32) - exact).max())
    found = fused("interpret", *narrow, visible)
    assert found.dtype == jnp.bfloat16 and apart(found) <= 1.1 * apart(in_parts(*narrow, visible))


def test_a_query_that_sees_nothing_harms_nobody() -> None:
    """Its own result is some number, and the gradients of what others see are what they are without it."""
    args = operands(256, 256, head_dim=64)
    visible = jnp.full((B, 256), 100).at[0, 3].set(0)
    loss = lambda attend: lambda *x: attend(*x, visible).at[0, 3].set(0)
    for one, other in zip(
        gradient(loss(functools.partial(fused, "interpret")), *args), gradient(loss(in_parts), *args), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


def test_kernels_on_a_mesh(monkeypatch) -> None:
    """Every device runs its own rows and heads, and nothing is sent."""
    axes = (module.QUERY, module.KEYS, module.KEYS, ("batch", None))
    on_a_mesh = jax.jit(lambda *x: Layout(make_mesh(data=2, tensor=2)).locally(kernel, axes, module.QUERY)(*x))
    kernel = functools.partial(fused, "interpret")
    visible = jnp.broadcast_to(seen(256, 256)["blocks"], (B, 256))
    args = (*operands(256, 256, head_dim=64), visible)
    np.testing.assert_allclose(on_a_mesh(*args), in_parts(*args), atol=2e-6)
    text = on_a_mesh.lower(*args).as_text()
    assert "all_gather" not in text and "all_reduce" not in text


def test_kernels_within_shard_map_and_vmap() -> None:
    """A caller's own; what varies over its axes is said to the compiler, though the interpreter cannot say it."""
    visible = jnp.broadcast_to(seen(256, 256)["blocks"], (B, 256))
    args = (*operands(256, 256, head_dim=64), visible)
    kernel = functools.partial(fused, "interpret")
    rows = PartitionSpec("rows")
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    by_device = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    by_row = jax.jit(jax.vmap(lambda *row: kernel(*(x[None] for x in row))[0]))
    wanted = in_parts(*args)
    np.testing.assert_allclose(by_device(*args), wanted, atol=2e-6)
    np.testing.assert_allclose(by_row(*args), wanted, atol=2e-6)
    checked = jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=rows, out_specs=rows))
    assert has_kernel(checked.trace(*args).lower(lowering_platforms=("tpu",)).as_text())


def lowered(length, dtype=jnp.bfloat16, layout=None, platform="tpu", head_dim=128):
    shapes = (8, length, 8, head_dim), (8, length, 4, head_dim), (8, length, 4, head_dim)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    function = jax.jit(lambda *x: attention(*x, layout))
    visible = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    return function.trace(*args, visible).lower(lowering_platforms=(platform,)).as_text()


def has_kernel(text):
    return "tpu_custom_call" in text or "triton" in text


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_where_kernels_are_used(monkeypatch, lowers_for_gpus, platform) -> None:
    """On TPU and CUDA, for many queries, in dtypes that are not a T4's, where every device has its own part."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert has_kernel(lowered(1024, platform=platform)) == (platform != "cpu")
    assert not has_kernel(lowered(32, platform=platform))
    assert not has_kernel(lowered(1024, jnp.float16, platform=platform))
    assert not has_kernel(lowered(1024, head_dim=48, platform=platform))
    monkeypatch.undo()
    assert not has_kernel(lowered(1024, platform=platform)), "the arrays may lie on several of the devices"
    mesh = make_mesh(data=2, tensor=4)
    assert has_kernel(lowered(1024, layout=Layout(mesh), platform=platform)) == (platform != "cpu")
    with jax.set_mesh(mesh):
        assert not has_kernel(lowered(1024, layout=Layout(mesh), platform=platform))


def test_without_kernels(monkeypatch) -> None:
    """By choice, and so for several platforms at once."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with use_kernels(False):
        assert not has_kernel(lowered(1024))
        exported = jax.export.export(jax.jit(attention), platforms=("cpu", "cuda", "tpu"))
        assert exported(*operands(256, 256, head_dim=64), jnp.full((B, 256), 9)).platforms == ("cpu", "cuda", "tpu")
    assert has_kernel(lowered(1024))


def test_an_old_gpu_gets_no_kernels(monkeypatch, lowers_for_gpus) -> None:
    """Triton's begin with compute capability 8."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for capability, wanted in (("7.5", False), ("9.0", True), ("gfx942", True)):
        device = type("Device", (), {"compute_capability": capability})()
        monkeypatch.setattr(jax, "devices", lambda *_, device=device: [device])
        assert has_kernel(lowered(1024, platform="cuda")) == wanted


def test_what_fits() -> None:
    """Lengths are filled up to whole tiles, and a head's keys and values have to fit into a TPU core."""
    assert [filled(n) for n in (1, 256, 257)] == [256, 256, 512]
    narrow, wide = jnp.dtype("bfloat16"), jnp.dtype("float32")
    tpu, gpu = (functools.partial(fits, backend) for backend in ("tpu", "cuda"))
    assert tpu(10240, 10240, 128, narrow) and not tpu(10241, 10240, 128, narrow) and tpu(5120, 5120, 128, wide)
    for on in (tpu, gpu):
        assert on(1024, 1024, 256, narrow) and not on(1024, 1024, 256, wide) and not on(1024, 1024, 192, narrow)
    assert gpu(131072, 131072, 128, narrow)  # whose memory holds a few tiles, however long a row is


def test_arrays_on_one_of_several_devices_have_kernels(lowers_for_gpus) -> None:
    """What counts is where they lie, not how many devices there are."""
    first = jax.device_put({"x": jnp.ones(2), "y": jnp.ones(3)}, jax.devices()[1])
    assert jax.device_count() > 1 and lie_on_one_device(first)
    assert lie_on_one_device(jax.ShapeDtypeStruct((2,), "float32"))
    assert not lie_on_one_device({**first, "z": jax.device_put(1, jax.devices()[0])})
    assert not lie_on_one_device(jnp.ones(2)), "it goes wherever others are"
    jax.jit(lambda x: pytest.fail("of traced arrays nobody knows") if lie_on_one_device(x) else x)(first)
    for platform in ("tpu", "cuda"):
        with one_device(True):
            assert has_kernel(lowered(1024, platform=platform))


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_blocks_have_kernels_for_what_lies_ahead(lowers_for_gpus, platform) -> None:
    shapes = [(8, 1024, heads, 128) for heads in (8, 4, 4, 4, 4)]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def run(query, *kvs):
        visible = jnp.full((8, 1), 1000)
        out = attention_in_blocks(query, LayerKV(*kvs[:2]), LayerKV(*kvs[2:]), visible, 32)
        return jnp.sum(out.astype(jnp.float32))

    with one_device(True):
        text = jax.jit(jax.grad(run)).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert has_kernel(text) == (platform != "cpu")


@pytest.mark.parametrize("block_length", [4, 30])
def test_blocks_with_kernels_are_those_in_parts(block_length) -> None:
    """Results and gradients; the first block sees nothing ahead, and rows end within a block."""
    length = 300
    query, key, value = operands(length, length, head_dim=64)
    before = [x[::-1] for x in (key, value)]
    ends = (jnp.arange(length) // block_length + 1) * block_length
    visible = jnp.minimum(ends, jnp.asarray([[101], [length]]))
    args = query, key, value, *before
    of = lambda run: jax.jit(lambda *x: run(*x, visible) * (jnp.arange(length) < visible[:, -1:])[..., None, None])
    fused = of(functools.partial(blocks_fused, block_length, "interpret"))
    plain = of(functools.partial(blocks_in_parts, block_length))
    np.testing.assert_allclose(fused(*args), plain(*args), atol=2e-6)
    loss = lambda run: lambda *x: jnp.sum(jnp.sin(run(*x)))
    gradients = [jax.jit(jax.grad(loss(run), argnums=range(5)))(*args) for run in (fused, plain)]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)
