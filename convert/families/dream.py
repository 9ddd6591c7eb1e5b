"""Dream 7B and its relatives (Dream-Coder, DiffuCoder): Qwen2.5 with full attention and a mask token."""

from typing import Any

from convert.families import qwen2
from convert.families.base import Family, Layout
from convert.hub_config import HubConfig
from dllm_jax.config import ModelConfig, published

_ORIGINAL = published("dream-7b-instruct")


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a Dream config.json.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    base = qwen2.read_config(hub)
    mask_id = hub.integer("mask_token_id", least=0)
    known = (base.vocab_size, mask_id) == (_ORIGINAL.vocab_size, _ORIGINAL.mask_id)
    return base.replace(
        family="dream",
        attention="bidirectional",
        mask_id=mask_id,
        bos_id=hub.bos_id("<|beginoftext|>", base.vocab_size, _ORIGINAL.bos_id if known else None),
        max_length=min(base.max_length, _ORIGINAL.max_length),  # trained on 2048 tokens; the file says 131072
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A Dream config.json from a ModelConfig."""
    fields = {
        **qwen2.write_config(config),
        "model_type": "Dream",
        "mask_token_id": config.mask_id,
    }
    return fields if config.bos_id is None else {**fields, "bos_token_id": config.bos_id}


FAMILY = Family(
    name="dream",
    layouts=(Layout("hub", "DreamModel", qwen2.RULES),),
    model_types=("Dream",),
    read_config=read_config,
    write_config=write_config,
    ignored=qwen2.IGNORED,
    generation={"gen_length": 256},
)
