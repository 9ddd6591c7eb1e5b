"""Making parameters from nothing: random weights of any config, made directly on the device and in its dtype."""

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.config import ModelConfig, Quantize
from dllm_jax.errors import DllmError
from dllm_jax.models.transformer import ParamSpec, param_specs
from dllm_jax.params.quantized import Form, QuantizedKernel, quantize_kernel

INIT_STD = 0.02
GROUP, LEAST_GROUP = 128, 32  # inputs that share a scale in int4: the largest power of two that gives pairs of groups


@functools.lru_cache(maxsize=64)
def forms(config: ModelConfig) -> Mapping[str, Form]:
    """How the quantized parameters are quantized, by name; none of a plain model.

    Kernels as `config.quantize` says. The table of embeddings and the vocabulary head are int8, with a scale for each
    token, in int4 models too: four bits would save little there.
    Norms, biases and routers stay as they are.

    Raises:
        DllmError: when the inputs of a kernel do not make groups for int4.
    """
    if config.quantize is None:
        return MappingProxyType({})
    found = {}
    for name, spec in param_specs(config).items():
        if spec.shared is not None:
            bits: Quantize = "int8" if "vocab" in spec.axes else config.quantize
            found[name] = form_of(name, spec, bits)
    return MappingProxyType(found)


def float32_params(config: ModelConfig) -> frozenset[str]:
    """The parameters that are stored as float32 whatever the model's dtype: routers whose scores are nearly equal."""
    return frozenset(name for name, spec in param_specs(config).items() if spec.keep_float32)


def cast_for_training(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as a forward and backward pass in the config's dtype takes them.

    Kernels of products are cast: their gradients are products too, whose sums are float32. What else there is stays as
    it is, float32 where it is trained: the embedding table, scales of norms and biases, whose gradients add up one
    number or row for every position in the parameter's own dtype, and routers, which choose other experts when they are
    rounded. It is cast where it is used.

    Args:
        config: whose dtype is that of the computation.
        params: flat name -> array, or what stands for a kernel, which casts by itself.
    """
    specs = param_specs(config)
    kernel = lambda name: specs[name].shared is not None and name != "embed.embedding"
    cast = lambda name, x: x.astype(config.dtype) if isinstance(x, jax.Array) and kernel(name) else x
    return {name: cast(name, x) for name, x in params.items()}


def form_of(name: str, spec: ParamSpec, bits: Quantize) -> Form:
    """How a parameter that can be quantized is quantized, to this many bits.

    Raises:
        DllmError: as `forms`.
    """
    assert spec.shared is not None
    size = spec.shape[spec.shared]
    group = math.gcd(size // 2, GROUP)
    if bits == "int8":
        return Form(bits, spec.shared, 1)
    if size % 2 or group < LEAST_GROUP:
        raise DllmError(f"{name} has {size} inputs, no multiple of {2 * LEAST_GROUP} as int4 needs; quantize to int8")
    return Form(bits, spec.shared, size // group)


def abstract_params(
    config: ModelConfig, dtype: jnp.dtype | str | None = None, shardings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Shapes and dtypes (and shardings) of all parameters without any memory, for `jax.eval_shape` and restoring.

    Args:
        dtype: of what is neither quantized nor one of `float32_params`; the config's by default.
        shardings: as `dllm_jax.param_shardings` gives them.

    Returns:
        Name -> `jax.ShapeDtypeStruct`, or a `QuantizedKernel` of two.

    Raises:
        DllmError: as `forms`.
    """
    dtype = jnp.dtype(dtype or config.dtype)
    return {
        name: _abstract(spec, dtype, forms(config).get(name), shardings[name] if shardings else None)
        for name, spec in param_specs(config).items()
    }


def _abstract(spec: ParamSpec, dtype: jnp.dtype, form: Form | None, sharding: Any) -> Any:
    if form is None:
        return jax.ShapeDtypeStruct(spec.shape, spec.stored_dtype(dtype), sharding=sharding)
    where = QuantizedKernel(None, None, form.bits) if sharding is None else sharding
    along = lambda count: tuple(count if axis == form.axis else size for axis, size in enumerate(spec.shape))
    size = spec.shape[form.axis]
    return QuantizedKernel(
        jax.ShapeDtypeStruct(along(size // 2 if form.bits == "int4" else size), jnp.int8, sharding=where.values),
        jax.ShapeDtypeStruct(along(form.groups), jnp.float32, sharding=where.scale),
        form.bits,
    )


def init_params(
    config: ModelConfig,
    key: jax.Array,
    *,
    dtype: jnp.dtype | str | None = None,
    shardings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Random parameters: normal with standard deviation 0.02, ones for norm scales, zeros for biases.

    Tensor by tensor, each made where it stays (`shardings`, else the default device), so that the peak is the model
    plus one tensor's random bits. A parameter depends on the key and its name alone, not on the sharding.

    Args:
        key: a typed `jax.random.key`.
        dtype: dtype of the parameters, before they are quantized; the config's by default.

    Raises:
        DllmError: as `forms`.
    """
    dtype = jnp.dtype(dtype or config.dtype)
    return {
        name: _init_tensor(spec, dtype, forms(config).get(name), shardings[name] if shardings else None)(
            jax.random.fold_in(key, zlib.crc32(name.encode()))
        )
        for name, spec in param_specs(config).items()
    }


@functools.lru_cache(maxsize=256)
def _init_tensor(
    spec: ParamSpec, dtype: jnp.dtype, form: Form | None, sharding: Any
) -> Callable[[jax.Array], jax.Array | QuantizedKernel]:
    dtype = spec.stored_dtype(dtype)

    def init(key: jax.Array) -> jax.Array | QuantizedKernel:
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, dtype)
        made = jax.random.normal(key, spec.shape, dtype) * jnp.asarray(INIT_STD, dtype)
        return made if form is None else quantize_kernel(made, form)

    return jax.jit(init, out_shardings=sharding)
