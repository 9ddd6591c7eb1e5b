"""From a name or a folder to a model that is ready to sample: config, parameters on their devices, tokenizer."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dllm_jax.checkpoints import checkpoint
from dllm_jax.checkpoints.draft_adapter import load_adapter
from dllm_jax.config import ModelConfig, Quantize
from dllm_jax.errors import DllmError
from dllm_jax.families import PUBLISHED, published_config
from dllm_jax.kernels.dispatch import before_ampere, device_of
from dllm_jax.models.denoiser import Denoiser
from dllm_jax.parallel.sharding import Layout, ShardingRules, param_shardings
from dllm_jax.params.low_rank import LowRank
from dllm_jax.params.specs import abstract_params, init_params
from dllm_jax.text.tokenizer import has_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded model.

    Attributes:
        params: flat name -> array, or `QuantizedKernel` of two, on the devices where it was loaded to.
        tokenizer: one of transformers'; None for a checkpoint without a tokenizer's files, and for random weights.
        name: for people: the folder's or the published size's name.
        folder: where it was loaded from, None for random weights.
        generation: options of `samplers.make_sampler` that it came with, in `generation.json`, and that stand in for
            what is not said; "sampler" among them may name a sampler.
        layout: the mesh that it was loaded onto, None for one device.
        draft_adapter: adapters that are on where the model drafts, in self-speculation; None for none.
    """

    config: ModelConfig
    params: dict[str, Any] = dataclasses.field(repr=False)
    tokenizer: "PreTrainedTokenizerBase | None"
    name: str
    folder: Path | None = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: Layout | None = None
    draft_adapter: LowRank | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property  # engines ask in every step, and where hundreds of arrays lie takes a while to see
    def denoiser(self) -> Denoiser:
        """The model as samplers take it."""
        device = device_of(self.params) if self.layout is None else None
        return Denoiser(self.config, self.params, self.layout, device=device)

    def require_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer, for callers that were given text.

        Raises:
            DllmError: when there is none.
        """
        if self.tokenizer is not None:
            return self.tokenizer
        if self.folder is None:
            raise DllmError(f"the random model {self.name} has no tokenizer; give it token ids, or load a checkpoint")
        raise DllmError(
            f"{self.folder} has no tokenizer, so text cannot be used; "
            "put the tokenizer.json (or vocab.json and merges.txt) of the original checkpoint into it"
        )


def load(
    path_or_name: str | Path,
    *,
    dtype: DTypeLike | None = None,
    quantize: Quantize | None = None,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
) -> Model:
    """Loads a converted checkpoint.

    Args:
        path_or_name: its folder, or its name under `dllm_jax.checkpoints.checkpoint.home()`.
        dtype: what the model computes in, bfloat16, float16 or float32; its parameters are cast to it. By default the
            stored one, but float16 for bfloat16 on a GPU that has none (a T4).
        quantize: "int8" or "int4" quantizes the kernels on their way, which gives the same as converting with
            `--quantize`; as stored by default.
        mesh: restore every parameter straight into its shards on this mesh; the first device by default.
        rules: how the mesh's axes split the parameters, see `ShardingRules`.

    Raises:
        DllmError: when there is no such checkpoint, a part of it is damaged or does not fit the others, the dtype is
            not one of the three, it cannot be quantized so, or a parameter does not split over the mesh.
    """
    found, layout = outline(path_or_name), _layout(mesh, rules)
    assert found.folder is not None
    config, cast = _as_asked(found.config, dtype, quantize, str(found.folder))
    shardings = None if layout is None else param_shardings(config, layout.mesh, layout.rules)
    params = checkpoint.load_params(found.folder, dtype=cast, shardings=shardings, quantize=quantize)
    adapter = load_adapter(found.folder, config, layout)
    return dataclasses.replace(found, config=config, params=params, layout=layout, draft_adapter=adapter)


def outline(path_or_name: str | Path) -> Model:
    """A converted checkpoint without its parameters, for checks that come before gigabytes are read.

    Raises:
        DllmError: as `load`.
    """
    folder = checkpoint.find(path_or_name)
    config = checkpoint.load_config(folder)
    tokenizer = load_tokenizer(folder, config) if has_tokenizer(folder) else None
    return Model(config, {}, tokenizer, folder.resolve().name, folder, checkpoint.load_generation(folder))


def load_shapes(path_or_name: str | Path, *, dtype: DTypeLike | None = None, quantize: Quantize | None = None) -> Model:
    """The model that `load` would give on one device, with the shapes of its parameters instead of arrays.

    A published name (see `PUBLISHED`) that has no checkpoint here is what converting it would give, without a folder, a
    tokenizer and settings of its own. Arguments and errors are those of `load`.
    """
    name = str(path_or_name)
    if name in PUBLISHED and checkpoint.find_or_none(name) is None:
        config, _ = _as_asked(published_config(name), dtype, quantize, name)
        return Model(config, abstract_params(config), None, name)
    found = outline(path_or_name)
    assert found.folder is not None
    config, cast = _as_asked(found.config, dtype, quantize, str(found.folder))
    params = checkpoint.params_to_load(found.folder, dtype=cast, quantize=quantize)
    adapter = jax.eval_shape(functools.partial(load_adapter, found.folder, config))
    return dataclasses.replace(found, config=config, params=params, draft_adapter=adapter)


def random_model(
    name_or_config: str | ModelConfig,
    *,
    key: jax.Array | int = 0,
    dtype: DTypeLike | None = None,
    quantize: Quantize | None = None,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
) -> Model:
    """A model with random weights, for benchmarks and tests: made on the device, without tokenizer.

    Args:
        name_or_config: a published size by name (see `PUBLISHED`), or any config.
        key: a typed `jax.random.key`, or a seed.
        dtype: dtype of the parameters; the config's by default.
        quantize, mesh, rules: as in `load`.

    Raises:
        DllmError: for an unknown name or dtype, what cannot be quantized so, or a parameter that does not split over
            the mesh.
    """
    name, config = "random", name_or_config
    if isinstance(config, str):
        name, config = config, published_config(config)
    config = checkpoint.quantized_config(config, quantize, name)
    config = config.replace(dtype=_dtype_name(dtype) or config.dtype)
    key = jax.random.key(key) if isinstance(key, int) else key
    layout = _layout(mesh, rules)
    shardings = None if layout is None else param_shardings(config, layout.mesh, layout.rules)
    params = init_params(config, key, shardings=shardings)
    return Model(config, params, None, name=name, layout=layout)


def _as_asked(
    config: ModelConfig, dtype: DTypeLike | None, quantize: Quantize | None, where: str
) -> tuple[ModelConfig, str | None]:
    """A stored model's config as it is loaded, and what its parameters are cast to: None as they are stored, in the
    dtype that was asked for, or in float16 where this machine's GPU cannot compute in the model's own."""
    cast = _dtype_name(dtype)
    if cast is None and config.dtype == "bfloat16" and before_ampere():
        cast = "float16"
    config = checkpoint.quantized_config(config, quantize, where)
    return config.replace(dtype=cast or config.dtype), cast


def _dtype_name(dtype: DTypeLike | None) -> str | None:
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise DllmError(f"dtype {name} is not supported; use one of {', '.join(DTYPES)}")
    return name


def _layout(mesh: Mesh | None, rules: ShardingRules | None) -> Layout | None:
    if mesh is None and rules is not None:
        raise DllmError("sharding rules were given without a mesh; pass mesh= too, see make_mesh")
    return None if mesh is None else Layout(mesh, rules or ShardingRules())
