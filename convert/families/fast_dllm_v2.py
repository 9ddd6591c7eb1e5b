"""Fast-dLLM v2 (arXiv 2509.26328), 1.5B and 7B: Qwen2.5 as block diffusion, logits shifted by one as in Qwen2.5."""

from typing import Any

from convert.families import qwen2
from convert.families.base import Family, Layout
from convert.hub_config import HubConfig
from dllm_jax.config import ModelConfig, published

_ORIGINAL = published("fast-dllm-v2-7b")
_MASK = "|<MASK>|"


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a Fast-dLLM v2 config.json.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    base = qwen2.read_config(hub)
    known = base.vocab_size in {published(name).vocab_size for name in ("fast-dllm-v2-1.5b", "fast-dllm-v2-7b")}
    return base.replace(
        family="fast-dllm-v2",
        attention="block",
        block_length=hub.integer("bd_size"),
        mask_id=hub.mask_id(hub.tokens.get(_MASK, _ORIGINAL.mask_id if known else None)),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A Fast-dLLM v2 config.json from a ModelConfig."""
    return {
        **qwen2.write_config(config),
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": config.block_length,
        "mask_token_id": config.mask_id,
    }


FAMILY = Family(
    name="fast-dllm-v2",
    layouts=(Layout("hub", "Fast_dLLM_QwenForCausalLM", qwen2.RULES),),
    model_types=("Fast_dLLM_Qwen",),
    read_config=read_config,
    write_config=write_config,
    ignored=qwen2.IGNORED,
    generation={"rule": "fast-dllm-v2"},
)
