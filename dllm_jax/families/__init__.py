"""The model families: one file each, and one line of this table."""

from collections.abc import Mapping
from types import MappingProxyType

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import (
    diffusion_gemma,
    dream,
    fast_dllm_v2,
    llada,
    llada2,
    llada_moe,
    llama,
    nemotron,
    qwen2,
    qwen3,
    sdar,
)
from dllm_jax.families.base import CheckpointLayout, Family, Published, Slot, TensorRule
from dllm_jax.families.hub_config import HubConfig

__all__ = [
    "FAMILIES",
    "PUBLISHED",
    "REPOSITORIES",
    "CheckpointLayout",
    "Family",
    "HubConfig",
    "Published",
    "TensorRule",
    "Slot",
    "find_family",
    "published_config",
]

FAMILIES: dict[str, Family] = {
    "llada": llada.FAMILY,
    "llada-1.5": llada.FAMILY,
    "llada-moe": llada_moe.FAMILY,
    "llada2": llada2.FAMILY,
    "dream": dream.FAMILY,
    "sdar": sdar.FAMILY,
    "fast-dllm-v2": fast_dllm_v2.FAMILY,
    "nemotron": nemotron.FAMILY,
    "diffusion-gemma": diffusion_gemma.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "llama": llama.FAMILY,
}

_MODELS = {name: model for family in FAMILIES.values() for name, model in family.published.items()}
PUBLISHED: Mapping[str, ModelConfig] = MappingProxyType({name: model.config for name, model in _MODELS.items()})
"""The configs of published models by name."""
REPOSITORIES: Mapping[str, str] = MappingProxyType({name: model.repository for name, model in _MODELS.items()})
"""Their repositories on the hub."""


def find_family(name: str) -> Family:
    """The family of that name.

    Raises:
        DllmError: for any other name; the sentence lists those there are.
    """
    if name not in FAMILIES:
        raise DllmError(f"no family is called {name!r}; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def published_config(name: str) -> ModelConfig:
    """The config of a published size by name, e.g. ``published_config("llada-8b-instruct")``.

    Raises:
        DllmError: for a name that is not in `PUBLISHED`; the sentence lists those that are.
    """
    if name not in PUBLISHED:
        raise DllmError(f"no published model is called {name!r}; choose one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
