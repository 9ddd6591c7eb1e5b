"""CPU with eight virtual devices, full float32 matmuls, kept compilations, and the tiny checkpoints as fixtures."""

import gc
import logging
import os
import warnings
from pathlib import Path
from unittest import mock

import hypothesis
import jax
import pytest

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "goldens"

JAX_SETTINGS = {
    "jax_platforms": os.environ.get("DLLM_JAX_TEST_PLATFORM", "cpu"),
    "jax_num_cpu_devices": 8,
    "jax_default_matmul_precision": "highest",  # accelerators round float32 operands otherwise, and goldens then differ
}
if not os.environ.get("DLLM_JAX_NO_CACHE"):
    JAX_SETTINGS["jax_compilation_cache_dir"] = str(ROOT / ".jax_cache")
    JAX_SETTINGS["jax_persistent_cache_min_compile_time_secs"] = 0.1  # the smaller ones are not worth their files

for name, value in JAX_SETTINGS.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)  # for the processes that tests start

# Time limits mean nothing where an example may compile; in CI every run tries the same examples.
hypothesis.settings.register_profile("dllm_jax", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("dllm_jax")


def pytest_addoption(parser):
    parser.addoption(
        "--goldens", type=Path, default=GOLDENS, metavar="DIR", help="golden files to run, written --goldens=DIR"
    )


def pytest_sessionfinish():
    """Buries in silence the tasks that Orbax abandons when a read fails, lest they print pages after the result."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with mock.patch("sys.unraisablehook"), warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture(scope="session")
def goldens(request):
    """The folder of golden files that was asked for."""
    return request.config.getoption("--goldens")


def converted(family, tmp_path_factory):
    import convert  # here, because option parsing must not wait for Flax and Orbax
    import dllm_jax

    name = f"{family.replace('-', '')}-tiny"
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
