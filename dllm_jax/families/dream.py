"""Dream 7B and its relatives (Dream-Coder, DiffuCoder): Qwen2.5 with full attention and a mask token."""

from typing import Any

from dllm_jax.config import ModelConfig
from dllm_jax.families import qwen2
from dllm_jax.families.base import CheckpointLayout, Family, Published
from dllm_jax.families.hub_config import HubConfig

_7B = qwen2.CONFIG_7B.replace(family="dream", attention="bidirectional", mask_id=151666, bos_id=151665, max_length=2048)


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a Dream config.json.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    base = qwen2.read_config(hub)
    mask_id = hub.integer("mask_token_id", least=0)
    known = (base.vocab_size, mask_id) == (_7B.vocab_size, _7B.mask_id)
    return base.replace(
        family="dream",
        attention="bidirectional",
        mask_id=mask_id,
        bos_id=hub.bos_id("<|beginoftext|>", base.vocab_size, _7B.bos_id if known else None),
        max_length=min(base.max_length, _7B.max_length),  # trained on 2048 tokens; the file says 131072
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
    layouts=(CheckpointLayout("hub", "DreamModel", qwen2.RULES),),
    model_types=("Dream",),
    read_config=read_config,
    write_config=write_config,
    published={
        "dream-7b-base": Published(_7B, "Dream-org/Dream-v0-Base-7B"),
        "dream-7b-instruct": Published(_7B, "Dream-org/Dream-v0-Instruct-7B"),
    },
    chat_template=qwen2.CHATML,
    ignored=qwen2.IGNORED,
    generation={"gen_length": 256},
)
