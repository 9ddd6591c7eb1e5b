"""The families that can be converted: one module each, and one line of this table."""

from convert.families import diffusion_gemma, dream, fast_dllm_v2, llada, llada2, llada_moe, qwen2, sdar
from convert.families.base import Family, Layout, Move, Rule, Slot, plan
from convert.hub_config import HubConfig
from dllm_jax.errors import DllmError

__all__ = ["FAMILIES", "Family", "Layout", "Move", "Rule", "Slot", "check_family", "get", "plan"]

FAMILIES: dict[str, Family] = {
    "llada": llada.FAMILY,
    "llada-1.5": llada.FAMILY,
    "llada-moe": llada_moe.FAMILY,
    "llada2": llada2.FAMILY,
    "dream": dream.FAMILY,
    "sdar": sdar.FAMILY,
    "fast-dllm-v2": fast_dllm_v2.FAMILY,
    "diffusion-gemma": diffusion_gemma.FAMILY,
    "qwen2": qwen2.FAMILY,
}


def get(name: str) -> Family:
    """The family of that name.

    Raises:
        DllmError: for any other name; the sentence lists those there are.
    """
    if name not in FAMILIES:
        raise DllmError(f"no family is called {name!r}; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def check_family(family: Family, hub: HubConfig) -> None:
    """Compares what a config.json calls itself with the family that was asked for.

    Raises:
        DllmError: when it is another family's, or none that is supported.
    """
    found = _identify(hub)
    if found is not family:
        raise DllmError(
            f"{hub.where} belongs to a {found.name} checkpoint, not {family.name}; use {found.name} instead"
        )


def _identify(hub: HubConfig) -> Family:
    """By `architectures`, because LLaDA and LLaDA-MoE share a model_type; where there are none, by that and by the
    field that only one of them has."""
    names, model_type = hub.values.get("architectures"), hub.values.get("model_type")
    names = names if isinstance(names, list) else []
    for family in sorted(FAMILIES.values(), key=lambda family: family.marker is None):
        told = model_type in family.model_types and (family.marker is None or family.marker in hub.values)
        if set(family.architectures) & set(map(str, names)) or (not names and told):
            return family
    supported = ", ".join(dict.fromkeys(name for family in FAMILIES.values() for name in family.architectures))
    what = f"architecture {names[0]!r}" if names else f"model_type {model_type!r}"
    raise DllmError(f"{hub.where}: {what} is not supported; supported are {supported}")
