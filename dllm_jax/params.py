"""Making parameters from nothing: random weights of any config, made directly on the device and in its dtype."""

import functools
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from dllm_jax.config import ModelConfig
from dllm_jax.transformer import ParamSpec, param_specs

INIT_STD = 0.02


def abstract_params(
    config: ModelConfig, dtype: jnp.dtype | str | None = None, shardings: Mapping[str, Sharding] | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes (and shardings) of all parameters without any memory, for `jax.eval_shape` and restoring."""
    dtype = jnp.dtype(dtype or config.dtype)
    return {
        name: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=shardings[name] if shardings else None)
        for name, spec in param_specs(config).items()
    }


def init_params(
    config: ModelConfig,
    key: jax.Array,
    *,
    dtype: jnp.dtype | str | None = None,
    shardings: Mapping[str, Sharding] | None = None,
) -> dict[str, jax.Array]:
    """Random parameters: normal with standard deviation 0.02, ones for norm scales, zeros for biases.

    Tensor by tensor, each made where it stays (`shardings`, else the default device), so that the peak is the model
    plus one tensor's random bits. A parameter depends on the key and its name alone, not on the sharding.

    Args:
        key: a typed `jax.random.key`.
        dtype: dtype of the parameters; the config's by default.
    """
    dtype = jnp.dtype(dtype or config.dtype)
    return {
        name: _init_tensor(spec, dtype, shardings[name] if shardings else None)(
            jax.random.fold_in(key, zlib.crc32(name.encode()))
        )
        for name, spec in param_specs(config).items()
    }


@functools.lru_cache(maxsize=256)
def _init_tensor(spec: ParamSpec, dtype: jnp.dtype, sharding: Sharding | None) -> Callable[[jax.Array], jax.Array]:
    def init(key: jax.Array) -> jax.Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, dtype)
        return jax.random.normal(key, spec.shape, dtype) * jnp.asarray(INIT_STD, dtype)

    return jax.jit(init, out_shardings=sharding)
