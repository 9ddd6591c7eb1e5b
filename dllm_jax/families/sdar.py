"""SDAR (arXiv 2510.06303): Qwen3 as block diffusion, 1.7B to 8B dense, 30B-A3B with experts."""

import re
from typing import Any

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import qwen2, qwen3
from dllm_jax.families.base import CheckpointLayout, Family, Published
from dllm_jax.families.hub_config import HubConfig

_8B, _30B_A3B = (
    config.replace(family="sdar", attention="block", block_length=4, shift=False, mask_id=151669)
    for config in (qwen3.CONFIG_8B, qwen3.CONFIG_30B_A3B)
)

_MASK = "<|MASK|>"
_PUBLISHED, _UNNAMED = r"SDAR-[\d.]+B(-A\d+B)?(-[a-z]+)?", 4  # names without -bN, and the length of their blocks


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of an SDAR config.json.

    The block's length is `block_size`. Published files lack it: there it is what the name says, `-b8`, `-b16` and so
    on, or 4 where the name is a published one without. Of other names the user has to say it.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement; where nothing says
            how long blocks are, or two things do and differ.
    """
    base = qwen3.read_config(hub)
    known = base.vocab_size == _8B.vocab_size
    return base.replace(
        family="sdar",
        attention="block",
        block_length=_block_length(hub),
        shift=False,
        mask_id=hub.mask_id(hub.tokens.get(_MASK, _8B.mask_id if known else None)),
    )


def _block_length(hub: HubConfig) -> int:
    asked = hub.block_length
    found = hub.integer("block_size") if "block_size" in hub.values else _named_block_length(hub.name)
    if found is not None and asked not in (None, found):
        raise DllmError(f"{hub.where}: the blocks of {hub.name} are {found} positions long, not {asked}")
    length = asked if found is None else found
    if length is None:
        raise DllmError(
            f"{hub.where} has no block_size, and the name {hub.name!r} does not say how long blocks are; add "
            "--block-length N"
        )
    return length


def _named_block_length(name: str) -> int | None:
    """What a published name says; None of another name."""
    own = name.rpartition("/")[2]
    if named := re.search(r"-b([1-9]\d*)(?:-|$)", own):
        return int(named[1])
    return _UNNAMED if re.fullmatch(_PUBLISHED, own, re.IGNORECASE) else None


def write_config(config: ModelConfig) -> dict[str, Any]:
    """An SDAR config.json from a ModelConfig.

    Raises:
        DllmError: for experts that this format cannot describe.
    """
    fields = qwen3.write_config(config)
    return {
        **fields,
        "model_type": str(fields["model_type"]).replace("qwen3", "sdar"),
        "block_size": config.block_length,
        "mask_token_id": config.mask_id,
    }


FAMILY = Family(
    name="sdar",
    layouts=(
        CheckpointLayout("dense", "SDARForCausalLM", qwen3.RULES),
        CheckpointLayout("experts", "SDARMoeForCausalLM", qwen3.EXPERT_RULES),
    ),
    model_types=("sdar", "sdar_moe"),
    read_config=read_config,
    write_config=write_config,
    published={
        "sdar-1.7b-chat": Published(
            _8B.replace(embed_dim=2048, num_layers=28, num_heads=16, mlp_dim=6144), "JetLM/SDAR-1.7B-Chat"
        ),
        "sdar-4b-chat": Published(_8B.replace(embed_dim=2560, mlp_dim=9728), "JetLM/SDAR-4B-Chat"),
        "sdar-8b-chat": Published(_8B, "JetLM/SDAR-8B-Chat"),
        "sdar-30b-a3b-chat": Published(_30B_A3B, "JetLM/SDAR-30B-A3B-Chat"),
    },
    attention="block",
    chat_template=qwen2.TURNS,
    ignored=qwen2.IGNORED,
    asks_block_length=True,
)
