"""A whole generation as one portable program, which runs with JAX alone, without this library."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from dllm_jax import Denoiser, DllmError, Model, use_kernels
from dllm_jax.checkpoints import checkpoint
from dllm_jax.params.quantized import num_bytes
from samplers.checks import check_length
from samplers.config.factory import CanvasSampler
from samplers.sampler import sample
from samplers.text.prompts import check_width
from samplers.tokens.noise import row_keys

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
MOST_BYTES = 64 * 2**20  # of a sampler's own arrays, which become part of the program


def export(
    sampler: CanvasSampler,
    model: Model,
    *,
    batch: int = 1,
    prompt_length: int,
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
) -> bytearray:
    """A sampler as StableHLO for other platforms, to be written to a file; the weights stay outside.

    `jax.export.deserialize(...).call(params, prompt, lengths, seed)` runs it, where

    - params: name -> array as a checkpoint folder holds them: `orbax.checkpoint.v1.load(folder / "params")`, in the
      dtype of `model`;
    - prompt [batch, prompt_length] int32, left-aligned, and lengths [batch] int32;
    - seed [] int32: rows draw the numbers of `generate` with this seed.

    It returns the fields of `Result` by name. Rules' numbers are those of the sampler; Versions of JAX up to half a
    year newer can read the program. It has XLA's own operations alone, because a kernel is tried before it is used.

    Args:
        model: its parameters may be shapes (`jax.ShapeDtypeStruct`).
        platforms: the platforms it can run on; none of them is needed here, and each is checked when the program runs
            there.

    Raises:
        DllmError: for bad sizes, unknown platforms, prompts that do not fit the model, a sampler that carries a
            model of its own, and if the package that writes programs is missing.
    """
    check_length("batch", batch)
    check_length("prompt_length", prompt_length)
    check_width(model, sampler, prompt_length)
    if unknown := sorted({*platforms} - {*PLATFORMS}):
        raise DllmError(f"platform {unknown[0]!r} is unknown; use {', '.join(PLATFORMS)}")
    if not platforms:
        raise DllmError(f"no platform to export for; name some of {', '.join(PLATFORMS)}")
    if (own := num_bytes(jax.eval_shape(lambda: sampler))) > MOST_BYTES:
        size = f"{own / 2**20:.0f} MiB of weights of its own"
        raise DllmError(f"this sampler has {size}, which would become part of the program; at most 64 MiB do")
    if importlib.util.find_spec("flatbuffers") is None:
        raise DllmError("programs are written by the package flatbuffers; install it: pip install 'dllm_jax[export]'")
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)

    def run(params: dict[str, jax.Array], prompt: jax.Array, lengths: jax.Array, seed: jax.Array) -> dict[str, Any]:
        denoiser = Denoiser(model.config, checkpoint.unflatten_params(params, like))
        result = sample(sampler, denoiser, prompt, lengths, key=row_keys(jax.random.key(seed), batch))
        return vars(result)

    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    arguments = (checkpoint.flatten_params(like), ints(batch, prompt_length), ints(batch), ints())
    safe = [jax_export.DisabledSafetyCheck.custom_call("LayoutConstraint")]  # the Transformer's, on TPU
    with use_kernels("xla"):
        exported = jax_export.export(jax.jit(run), platforms=tuple(platforms), disabled_checks=safe)(*arguments)
    return exported.serialize()
