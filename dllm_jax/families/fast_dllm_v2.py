"""Fast-dLLM v2 (arXiv 2509.26328), 1.5B and 7B: Qwen2.5 as block diffusion, logits shifted by one as in Qwen2.5."""

from typing import Any

from dllm_jax.config import ModelConfig
from dllm_jax.families import qwen2
from dllm_jax.families.base import CheckpointLayout, Family, Published
from dllm_jax.families.hub_config import HubConfig

_7B, _1_5B = (
    config.replace(
        family="fast-dllm-v2",
        attention="block",
        block_length=32,
        mask_id=151665,
        eos_id=151645,
        pad_id=151645,
        end_ids=(151645,),
    )
    for config in (qwen2.CONFIG_7B, qwen2.CONFIG_1_5B)
)
_MASK = "|<MASK>|"


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a Fast-dLLM v2 config.json.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    base = qwen2.read_config(hub)
    known = base.vocab_size in (_1_5B.vocab_size, _7B.vocab_size)
    return base.replace(
        family="fast-dllm-v2",
        attention="block",
        block_length=hub.integer("bd_size"),
        mask_id=hub.mask_id(hub.tokens.get(_MASK, _7B.mask_id if known else None)),
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
    layouts=(CheckpointLayout("hub", "Fast_dLLM_QwenForCausalLM", qwen2.RULES),),
    model_types=("Fast_dLLM_Qwen",),
    read_config=read_config,
    write_config=write_config,
    published={
        "fast-dllm-v2-1.5b": Published(_1_5B, "Efficient-Large-Model/Fast_dLLM_v2_1.5B"),
        "fast-dllm-v2-7b": Published(_7B, "Efficient-Large-Model/Fast_dLLM_v2_7B"),
    },
    attention="block",
    chat_template=qwen2.CHATML,
    ignored=qwen2.IGNORED,
    generation={"rule": "fast-dllm-v2"},
)
