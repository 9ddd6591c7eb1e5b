"""Which implementation a program takes: a table of faked devices, what is in the lowered program, and what happens when
a kernel is wrong or cannot run."""

import dataclasses
import functools
import re
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses
from train_toys import LLADA

import dllm_jax
from dllm_jax.kernels import attention as module
from dllm_jax.kernels import dispatch
from dllm_jax.kernels import tokamax as package
from dllm_jax.kernels.attention import ATTENTION, CAUSAL, IN_BLOCKS, attention, attention_in_blocks
from dllm_jax.kernels.checks import compare
from dllm_jax.kernels.dispatch import choose, device_of, on_device, use_kernels
from dllm_jax.kernels.experts import EXPERTS, apply_experts
from dllm_jax.models.denoiser import Span
from dllm_jax.models.kv_cache import LayerKV
from dllm_jax.parallel.sharding import Layout, make_mesh
from dllm_jax.params.quantized import Form, quantize_kernel


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that is not here."""

    platform: str
    compute_capability: str | None = None
    device_kind: str = "faked"


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine one with a device, whose kernels are right, with tokamax or without it."""

    def make(platform, capability=None, tokamax=False):
        device = Device({"cuda": "gpu"}.get(platform, platform), capability)
        monkeypatch.setattr(dispatch, "present", lambda name: (device,) if name == platform else ())
        monkeypatch.setattr(dispatch, "failure", lambda *_: None)
        monkeypatch.setattr(package, "missing", lambda: None if tokamax else "tokamax is not installed")
        return device

    dispatch.warn_once.cache_clear()
    return make


def shapes(dtype="bfloat16", length=512, head_dim=128, per_query=False, window=False):
    of = lambda heads: jax.ShapeDtypeStruct((2, length, heads, head_dim), dtype)
    bound = jax.ShapeDtypeStruct((2, length if per_query or window else 1), jnp.int32)
    return (of(4), of(2), of(2), *[bound] * (1 + window))


H100, A100, L4, T4, B200, AMD = "9.0", "8.0", "8.9", "7.5", "10.0", "gfx942"


@pytest.mark.parametrize(
    ("platform", "capability", "tokamax", "asked", "call", "taken"),
    [
        ("cpu", None, False, "auto", {}, "xla"),
        ("cpu", None, True, "auto", {}, "xla"),
        ("cuda", H100, False, "auto", {}, "cudnn"),
        ("cuda", A100, False, "auto", {}, "cudnn"),
        ("cuda", B200, True, "auto", {}, "cudnn"),
        ("cuda", H100, False, "auto", {"dtype": "float16"}, "cudnn"),
        ("cuda", H100, True, "auto", {"dtype": "float32"}, "xla"),
        ("cuda", T4, True, "auto", {"dtype": "float16"}, "xla"),
        ("cuda", AMD, True, "auto", {}, "xla"),
        ("cuda", H100, False, "auto", {"head_dim": 256}, "cudnn"),
        ("cuda", L4, False, "auto", {"head_dim": 256}, "xla"),
        ("cuda", H100, False, "auto", {"head_dim": 72}, "cudnn"),
        ("cuda", H100, True, "auto", {"head_dim": 68}, "xla"),
        ("cuda", H100, False, "auto", {"per_query": True}, "xla"),
        ("cuda", H100, True, "auto", {"per_query": True}, "tokamax"),
        ("cuda", B200, True, "auto", {"window": True}, "tokamax"),
        ("cuda", A100, True, "auto", {"per_query": True}, "xla"),
        ("cuda", H100, True, "auto", {"length": 100_000}, "cudnn"),
        ("cuda", H100, True, "tokamax", {}, "tokamax"),
        ("cuda", H100, True, "cudnn", {"per_query": True}, "xla"),
        ("cuda", H100, True, "xla", {}, "xla"),
        ("cuda", H100, True, True, {}, "cudnn"),
        ("cuda", H100, True, False, {}, "xla"),
        ("tpu", None, False, "auto", {}, "xla"),
        ("tpu", None, False, "tpu", {}, "tpu"),
        ("tpu", None, False, "tpu", {"per_query": True, "dtype": "float32"}, "tpu"),
        ("tpu", None, False, "tpu", {"window": True}, "tpu"),
        ("tpu", None, False, "tpu", {"length": 100_000}, "tpu"),
        ("tpu", None, False, "tpu", {"head_dim": 96}, "xla"),
    ],
)
@pytest.mark.filterwarnings("ignore:attention cannot")
def test_attention_takes(machine, platform, capability, tokamax, asked, call, taken):
    machine(platform, capability, tokamax)
    with use_kernels(asked):
        chosen = choose(ATTENTION, shapes(**call), None)
    assert chosen.keys() <= {platform}
    assert (chosen[platform][0].name if chosen else "xla") == taken


@pytest.mark.parametrize(
    ("platform", "capability", "tokamax", "asked", "taken"),
    [
        ("cpu", None, True, "auto", "xla"),
        ("cuda", A100, False, "auto", "cudnn"),
        ("cuda", H100, True, "auto", "cudnn"),
        ("cuda", H100, True, "tokamax", "tokamax"),
        ("cuda", H100, True, "xla", "xla"),
        ("cuda", T4, False, "auto", "xla"),
        ("tpu", None, False, "auto", "xla"),
        ("tpu", None, False, "tpu", "tpu"),
    ],
)
def test_causal_attention_takes(machine, platform, capability, tokamax, asked, taken):
    machine(platform, capability, tokamax)
    with use_kernels(asked):
        chosen = choose(CAUSAL, shapes(per_query=True), None)
    assert (chosen[platform][0].name if chosen else "xla") == taken


@pytest.mark.parametrize(
    ("platform", "capability", "tokamax", "asked", "taken"),
    [
        ("cpu", None, True, "auto", "xla"),
        ("cuda", H100, False, "auto", "xla"),
        ("cuda", H100, True, "auto", "tokamax"),
        ("cuda", A100, True, "auto", "xla"),
        ("cuda", H100, True, "xla", "xla"),
        ("tpu", None, False, "auto", "xla"),
        ("tpu", None, False, "tpu", "tpu"),
    ],
)
def test_blocks_take(machine, platform, capability, tokamax, asked, taken):
    """cuDNN returns no gradient of its sums, so it has no part in them."""
    machine(platform, capability, tokamax)
    query, key, *_ = shapes()
    with use_kernels(asked):
        chosen = choose(IN_BLOCKS, (query, *[key] * 4, jax.ShapeDtypeStruct((2, 512), jnp.int32)), None)
    assert (chosen[platform][0].name if chosen else "xla") == taken


@pytest.mark.parametrize(
    ("platform", "capability", "tokamax", "asked", "dtype", "width", "taken"),
    [
        ("cuda", H100, True, "auto", "bfloat16", 768, "tokamax"),
        ("cuda", B200, True, "auto", "bfloat16", 768, "tokamax"),
        ("cuda", H100, False, "auto", "bfloat16", 768, "xla"),
        ("cuda", A100, True, "auto", "bfloat16", 768, "xla"),
        ("cuda", H100, True, "auto", "float32", 768, "xla"),
        ("cuda", H100, True, "auto", "int8", 768, "xla"),
        ("cuda", H100, True, "auto", "bfloat16", 96, "xla"),
        ("cuda", H100, True, "xla", "bfloat16", 768, "xla"),
        ("cuda", H100, True, "cudnn", "bfloat16", 768, "xla"),
        ("tpu", None, True, "auto", "bfloat16", 768, "xla"),
        ("cpu", None, True, "auto", "bfloat16", 768, "xla"),
    ],
)
@pytest.mark.filterwarnings("ignore:experts cannot")
def test_experts_take(machine, platform, capability, tokamax, asked, dtype, width, taken):
    machine(platform, capability, tokamax)
    tables = jnp.zeros((2, 2, 128, width)), jnp.zeros((2, width, 128))
    if dtype == "int8":
        tables = [quantize_kernel(table, Form("int8", axis, 1)) for table, axis in zip(tables, (2, 1), strict=True)]
    x = jax.ShapeDtypeStruct((1, 8, 128), "bfloat16" if dtype == "int8" else dtype)
    with use_kernels(asked):
        chosen = choose(EXPERTS, (x, None, None, *tables), None)
    assert (chosen[platform][0].name if chosen else "xla") == taken


def test_what_lies_where_nobody_knows_runs_in_xla(machine, monkeypatch):
    """Several devices and no layout; a mesh's own devices decide, and those of a caller's `shard_map` are known."""
    gpu = machine("cuda", H100)
    monkeypatch.setattr(dispatch, "present", lambda name: (gpu, Device("gpu", A100)) if name == "cuda" else ())
    assert not choose(ATTENTION, shapes(), None)
    with on_device(gpu):
        assert choose(ATTENTION, shapes(), None)["cuda"][1] == gpu
    with on_device(Device("gpu", "9.0", "absent")):
        assert not choose(ATTENTION, shapes(), None), "an absent device is not tried, so that no kernel is used"
    mesh = make_mesh(data=2, tensor=2)
    with jax.set_mesh(mesh):
        assert not choose(ATTENTION, shapes(), Layout(mesh))


def test_absent_devices_take_kernels_by_name_alone(machine):
    machine("cpu", tokamax=True)
    absent = Device("gpu", H100)
    with on_device(absent):
        assert not choose(ATTENTION, shapes(), None)
        with use_kernels("tokamax"):
            assert choose(ATTENTION, shapes(per_query=True), None)["cuda"][1] == absent
        with refuses("cuDNN"):
            choose(ATTENTION, shapes(), None, "cudnn")


def test_a_named_implementation_that_cannot_run(machine):
    """An error where the call names it, one warning that says what runs instead where a context does."""
    machine("cpu")
    query, key, value, visible = (jnp.ones(x.shape, x.dtype) for x in shapes("float32", 8, 8))
    for name in ("cudnn", "tokamax"):
        with refuses(name):
            attention(query, key, value, visible, implementation=name)
    with refuses("experts"):
        apply_experts(query[:, :, 0], *[None] * 4, implementation="cudnn")
    with refuses("'triton'"):
        attention(query, key, value, visible, implementation="triton")
    with refuses("'triton'"):
        use_kernels("triton")
    with use_kernels("cudnn"), pytest.warns(UserWarning) as told:
        for _ in range(2):
            attention(query, key, value, visible)
    (warning,) = told
    assert all(part in str(warning.message) for part in ("cudnn", "XLA's operations run instead", "MiB"))
    with warnings.catch_warnings(), use_kernels("auto"):
        warnings.simplefilter("error")
        attention(query, key, value, visible)


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_a_kernel_that_fails_its_test_is_replaced(machine, monkeypatch, fault):
    """One warning in a process, and XLA, also where a program is being traced."""

    def run(device, query, *others):
        if fault == "raises":
            raise RuntimeError("no such\nkernel image")
        return query * 0

    broken = dataclasses.replace(ATTENTION.kernels[0], platform="cpu", refusal=lambda *_: None, run=run)
    monkeypatch.setattr(module, "ATTENTION", dataclasses.replace(ATTENTION, kernels=(broken,)))
    dispatch.warn_once.cache_clear()
    query, key, value, visible = (jnp.ones(x.shape, x.dtype) for x in shapes("float32", 256, 8))
    with on_device(jax.devices()[0]), pytest.warns(UserWarning) as told:
        for _ in range(2):
            found = jax.jit(lambda *x: attention(*x))(query, key, value, visible)
    (warning,) = [each for each in told if "cudnn" in str(each.message)]
    assert ("kernel image" not in str(warning.message)) and "XLA's operations run instead" in str(warning.message)
    assert {"raises": "RuntimeError: no such", "wrong": "is off by"}[fault] in str(warning.message)
    assert bool(jnp.all(found == 1))


def test_a_kernel_is_tried_once_and_used(monkeypatch):
    tries = []

    def run(device, *operands):
        tries.append(device)
        return module.reference.attend(*operands)

    kernel = dataclasses.replace(ATTENTION.kernels[0], platform="cpu", refusal=lambda *_: None, run=run)
    operation = dataclasses.replace(ATTENTION, kernels=(kernel,))
    device = jax.devices()[0]
    with on_device(device):
        chosen = [choose(operation, shapes(), None) for _ in range(2)]
    assert chosen == [{"cpu": (kernel, device)}] * 2
    assert len(tries) == 2 * len(operation.examples()), "a forward and a gradient"


def test_a_kernel_that_is_wrong_without_a_gradient_is_found():
    """Its forward is not compared as what a gradient's own rule computes."""
    kernel = jax.custom_vjp(lambda x: 2 * x)
    kernel.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))
    checks = compare(kernel, lambda x: x, [np.ones(3, np.float32)], jax.devices()[0], "float32", ["x"], "ones")
    assert {check.what: check.ok for check in checks} == {"ones, forward": False, "ones, gradient of x": True}


# --- in the lowered program -------------------------------------------------------------------------------------------


@pytest.fixture
def cudnn_here(machine, monkeypatch):
    """cuDNN's calls can be lowered, as on a machine with an H100."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
    return machine("cuda", H100)


def calls(text):
    """Names of the custom calls of kernels."""
    return set(re.findall(r"@(__cudnn\$\w+|tpu_custom_call|mosaic_gpu\w*|__gpu\$xla\.gpu\.triton)", text))


def lowered(platform, function=attention, gradient=False, layout=None, **call):
    run = lambda *x: function(*x[:4], layout, *x[4:])
    loss = lambda *x: jnp.sum(run(*x).astype(jnp.float32))
    program = jax.grad(loss, argnums=(0, 1, 2)) if gradient else run
    return calls(jax.jit(program).trace(*shapes(**call)).lower(lowering_platforms=(platform,)).as_text())


FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


def test_the_program_has_cudnn_where_it_is_meant(cudnn_here):
    assert lowered("cuda") == {FORWARD} and lowered("cuda", gradient=True) == {FORWARD, BACKWARD}
    assert not lowered("cuda", length=32), "a block's scores are small"
    assert not lowered("cuda", per_query=True) and not lowered("cuda", window=True)
    assert not lowered("cuda", dtype="float32")
    for platform in ("cpu", "tpu"):
        assert not lowered(platform)
    with use_kernels("xla"):
        assert not lowered("cuda")
    with use_kernels("cudnn"):
        assert lowered("cuda", length=32) == {FORWARD}
    causal = functools.partial(attention, causal=True)
    assert lowered("cuda", causal, gradient=True, per_query=True) == {FORWARD, BACKWARD}
    assert not lowered("cuda", causal, window=True), "padding may see nothing"


def test_cudnn_in_vmap_and_on_a_mesh(cudnn_here):
    """Mapped rows, also of one row each; on a mesh each device has its own."""
    mapped = lambda *x: jax.vmap(lambda *row: attention(*(part[None] for part in row))[0])(*x[:4])
    text = jax.jit(mapped).trace(*shapes()).lower(lowering_platforms=("cuda",)).as_text()
    assert calls(text) == {FORWARD}
    mesh, rows = make_mesh(data=2), jax.sharding.PartitionSpec("data")
    for check in (True, False):
        by_device = jax.shard_map(attention, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check)
        text = jax.jit(by_device).trace(*shapes()).lower(lowering_platforms=("cuda",)).as_text()
        assert calls(text) == {FORWARD}
    assert lowered("cuda", layout=Layout(mesh)) == {FORWARD}


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_the_tpu_kernel_stands_by_name_alone(machine, platform):
    machine("tpu")
    assert not lowered(platform)
    with use_kernels("tpu"):
        assert lowered(platform) == ({"tpu_custom_call"} if platform == "tpu" else set())
        blocks = lambda q, k, v, visible, _: attention_in_blocks(q, LayerKV(k, v), LayerKV(v, k), visible, 32)
        assert bool(lowered(platform, blocks, gradient=True)) == (platform == "tpu")


def test_one_program_for_several_platforms(machine):
    machine("cpu")
    exported = jax.export.export(jax.jit(attention), platforms=("cpu", "cuda", "tpu"))
    assert exported(*shapes()).platforms == ("cpu", "cuda", "tpu")


def test_the_device_that_arrays_are_committed_to():
    first = jax.device_put({"x": jnp.ones(2), "y": jnp.ones(3)}, jax.devices()[1])
    assert device_of(first) == jax.devices()[1]
    assert device_of({**first, "z": jax.device_put(1, jax.devices()[0])}) is None
    assert device_of(jnp.ones(2)) is None, "it goes wherever others are"
    assert device_of(jax.ShapeDtypeStruct((2,), "float32")) is None and device_of({}) is None
    jax.jit(lambda x: pytest.fail("of traced arrays nobody knows") if device_of(x) else x)(first)


def test_a_model_s_denoiser_says_where_it_lies(machine, cudnn_here):
    """So that its full forward has the kernel, though there are several devices."""
    config = LLADA.replace(num_heads=2, num_kv_heads=2, head_dim=64, max_length=1024, dtype="bfloat16")
    model = dllm_jax.random_model(config)
    model = dataclasses.replace(model, params=jax.device_put(model.params, jax.devices()[1]))
    assert model.denoiser.device == jax.devices()[1]
    run = jax.jit(lambda denoiser, tokens, lengths: denoiser.forward(tokens, lengths)[0])
    arguments = model.denoiser, jnp.zeros((2, 512), int), jnp.array([512, 300])
    assert calls(run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()) == {FORWARD}
    causal = dataclasses.replace(model.denoiser, config=config.replace(attention="causal"))
    text = run.trace(causal, *arguments[1:]).lower(lowering_platforms=("cuda",)).as_text()
    assert calls(text) == {FORWARD} and "PADDING_CAUSAL" in text
    per_position = causal, arguments[1], jnp.full((2, 512), 512)
    assert not calls(run.trace(*per_position).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.filterwarnings("ignore:attention cannot be computed by tokamax")
@pytest.mark.parametrize(("platform", "asked", "pinned"), [("cuda", "xla", True), ("cuda", "tokamax", False)])
def test_buffers_lie_as_their_reader_wants_them(machine, platform, asked, pinned):
    """Heads before positions for XLA's products and cuDNN; tokamax would transpose whole buffers in every window."""
    machine(platform, H100)
    denoiser = dllm_jax.random_model(LLADA).denoiser
    run = jax.jit(
        lambda denoiser, *x: denoiser.forward(*x, at=Span(jnp.zeros(2, int), 8), kv=denoiser.empty_cache(2, 16))
    )
    with use_kernels(asked):
        lowered = run.trace(denoiser, jnp.zeros((2, 16), int), jnp.array([16, 9])).lower(lowering_platforms=(platform,))
    assert ("LayoutConstraint" in lowered.as_text()) == pinned
