"""CPU with eight virtual devices, full float32 matmuls, kept compilations, and the tiny checkpoints as fixtures."""

import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import re
import socket
import time
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import hypothesis
import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "goldens"

JAX_SETTINGS = {
    "jax_platforms": os.environ.get("DLLM_JAX_TEST_PLATFORM", "cpu"),
    "jax_num_cpu_devices": 8,
    "jax_default_matmul_precision": "highest",  # accelerators round float32 operands otherwise, and goldens then differ
}
if not os.environ.get("DLLM_JAX_NO_CACHE"):
    # One folder per worker: JAX writes a program bit by bit, and a worker that reads another's half crashes.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    JAX_SETTINGS["jax_compilation_cache_dir"] = str(ROOT / ".jax_cache" / worker)
    JAX_SETTINGS["jax_persistent_cache_min_compile_time_secs"] = 0.1  # the smaller ones are not worth their files

# Most of the time goes into compiling: LLVM's optimisations take longer than they save on shapes as small as these.
# DLLM_JAX_AS_USERS leaves XLA as users have it; CI runs the goldens so.
if not os.environ.get("DLLM_JAX_AS_USERS"):
    XLA_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if jax.__version_info__ < (0, 11):  # later ones end the process at a flag that they do not know
        XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # which make compiling take two to three times as long
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS])

for name, value in JAX_SETTINGS.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)  # for the processes that tests start
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1e9"  # which read programs and keep none: some are killed
for name in ("COLUMNS", "LINES"):  # which readline, which pytest imports, gives the processes that it starts
    os.environ.pop(name, None)


# Time limits mean nothing where an example may compile; in CI every run tries the same examples.
hypothesis.settings.register_profile("dllm_jax", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("dllm_jax")


MOST_MAPS = 40_000  # of the 65,530 memory maps that Linux lets a process have; a compiled program takes about 230
TESTS_RUN = itertools.count()
SLOW = Path(__file__).with_name("slow.txt")
SECONDS: Counter[str] = Counter()

gc.set_threshold(100_000, 20, 20)  # tracing makes objects by the million, and few of them are garbage in cycles


def assert_equal(mine, theirs, name: str) -> None:
    """Whole numbers and booleans are equal; floats are up to rounding, which differs between programs."""
    assert mine.dtype == theirs.dtype, name
    if np.issubdtype(mine.dtype, np.floating):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
    else:
        np.testing.assert_array_equal(mine, theirs, err_msg=name)


def assert_same_row(one, i: int, other, j: int) -> None:
    """Row i of one result is row j of another."""
    for field in dataclasses.fields(one):
        assert_equal(getattr(one, field.name)[i], getattr(other, field.name)[j], field.name)


@contextlib.contextmanager
def refuses(*names, kind=None):
    """Asserts that what follows raises a DllmError, or another `kind`, of one line which has each of the names."""
    from dllm_jax import DllmError  # here, because option parsing must not wait for Flax and Orbax

    with pytest.raises(kind or DllmError) as caught:
        yield
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert not [name for name in names if name not in sentence], sentence


def programs_in(jaxpr):
    """A program and those in it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for inner in jaxprs_in_params(equation.params):
            yield from programs_in(inner)


def one_error(capsys):
    """What a command printed, which is one line on stderr: an error."""
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err


@pytest.fixture
def compiled():
    """Names of the programs of ours that were compiled; jnp's single operations have other names."""
    names = []

    def listen(event, seconds, *, fun_name="", **rest):
        if event == "/jax/core/compile/backend_compile_duration" and fun_name in ("jit(sample)", "jit(<lambda>)"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def free_ports(count):
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def wait_until(true, seconds=60):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def few_programs_at_a_time():
    """Lets go of compiled programs before there are so many that the system refuses memory and XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    look = next(TESTS_RUN) % 8 == 0 and maps.exists()  # which takes a moment where there are many
    if look and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def lowers_for_gpus(request):
    """Skips a test of programs for a GPU where JAX, from 0.12 on, lowers Triton's kernels only with a GPU there."""
    platform = getattr(request.node, "callspec", None) and request.node.callspec.params.get("platform")
    if platform in (None, "cuda") and jax.__version_info__ >= (0, 12) and jax.default_backend() != "gpu":
        pytest.skip("this JAX asks the GPU that Triton's kernels are lowered for; see make compile-check TARGET=h100")


def pytest_addoption(parser):
    parser.addoption(
        "--goldens",
        type=Path,
        metavar="DIR",
        help="run every golden case of this folder, written --goldens=DIR; by default a part of our own",
    )
    parser.addoption("--part", metavar="K/N", help="of slow tests, or with --goldens of all, the K-th of N parts")
    parser.addoption(
        "--list-slow", type=float, metavar="SECONDS", help=f"write tests that take longer to {SLOW.name}, see Makefile"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks slow tests, which `make slow` runs, and lets tests of processes run once more."""
    slow = SLOW.read_text().splitlines()
    marked, collected = set(slow), {item.nodeid for item in items}
    files = set(map(file_of, collected))
    gone = [name for name in slow if name not in collected and file_of(name) in files]
    whole = not config.getoption("goldens") and not any("::" in argument for argument in config.args)
    if gone and whole:  # --goldens names its cases after the folder's
        raise pytest.UsageError(f"no test is called {gone[0]}; take it out of {SLOW.name}")
    for item in items:
        if item.nodeid in marked:
            item.add_marker("slow")
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if part := config.getoption("part"):
        long = items if config.getoption("goldens") else [item for item in items if item.get_closest_marker("slow")]
        groups = groups_in(part, [item.nodeid for item in long])
        config.hook.pytest_deselected(items=[item for item in items if group_of(item.nodeid) not in groups])
        items[:] = [item for item in items if group_of(item.nodeid) in groups]


def file_of(nodeid):
    return nodeid.split("::")[0]


def group_of(nodeid):
    """Tests that share programs: those of a file; of recorded cases those of one recording."""
    recording = re.search(r"/test_goldens\.py::\w+\[([\w-]+)/", nodeid)
    return f"{file_of(nodeid)}:{recording[1]}" if recording else file_of(nodeid)


def groups_in(part, nodeids):
    """The groups of one part, "K/N": the largest first, each goes to the part that has the fewest tests so far."""
    number, count = map(int, part.split("/"))
    sizes = Counter(map(group_of, nodeids))
    parts = [Counter() for _ in range(count)]
    for group in sorted(sizes, key=lambda group: (-sizes[group], group)):
        min(parts, key=Counter.total)[group] = sizes[group]
    return set(parts[number % count])


def pytest_runtest_logreport(report):
    SECONDS[report.nodeid] += report.duration


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(config):
    """Only where the reports of all workers are."""
    if (limit := config.getoption("list_slow")) is not None:
        slow = sorted(name for name, seconds in SECONDS.items() if seconds > limit)
        SLOW.write_text("\n".join([*slow, ""]))


def pytest_sessionfinish():
    """Buries in silence the tasks that Orbax abandons when a read fails, lest they print pages after the result."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with mock.patch("sys.unraisablehook"), warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture(scope="session")
def goldens(request):
    """The folder of golden files that was asked for."""
    return request.config.getoption("--goldens") or GOLDENS


def converted(family, tmp_path_factory, name=""):
    import convert  # here, because option parsing must not wait for Flax and Orbax
    import dllm_jax

    name = name or f"{family.replace('-', '')}-tiny"
    out = tmp_path_factory.mktemp("checkpoints") / name
    convert.convert(family, GOLDENS / "checkpoints" / name, out)
    return dllm_jax.load(out)


@pytest.fixture(scope="session")
def llada_tiny(tmp_path_factory):
    """The project's own tiny LLaDA, converted and loaded: a Model with .config .params .denoiser .tokenizer."""
    return converted("llada", tmp_path_factory)


@pytest.fixture(scope="session")
def lladamoe_tiny(tmp_path_factory):
    """The tiny LLaDA-MoE, likewise."""
    return converted("llada-moe", tmp_path_factory)


@pytest.fixture(scope="session")
def dream_tiny(tmp_path_factory):
    """The tiny Dream, likewise."""
    return converted("dream", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen2_tiny(tmp_path_factory):
    """The tiny autoregressive Qwen2, likewise."""
    return converted("qwen2", tmp_path_factory)


@pytest.fixture(scope="session")
def nemotron_tiny(tmp_path_factory):
    """Nemotron-Labs-Diffusion's."""
    return converted("nemotron", tmp_path_factory, "nemotron-diffusion-tiny")


@pytest.fixture(scope="session")
def bucket():
    """Google Cloud Storage over loopback: a `buckets.Bucket` called gs://bucket."""
    from buckets import serving  # here, because few tests need it

    with serving() as found:
        yield found


@pytest.fixture(scope="session")
def ni_indicator(tmp_path_factory):
    """The tiny indicator of NI sampling for the tiny LLaDA, converted: its folder."""
    from convert.indicator import convert_indicator

    out = tmp_path_factory.mktemp("indicators") / "llada-tiny"
    convert_indicator(GOLDENS / "ni-indicator-llada-tiny.safetensors", out)
    return out
