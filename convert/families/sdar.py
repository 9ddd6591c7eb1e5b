"""SDAR (arXiv 2510.06303): Qwen3 as block diffusion, 1.7B to 8B dense, 30B-A3B with experts."""

import re
from pathlib import Path
from typing import Any

from convert.families import qwen2
from convert.families.base import Family, Layout, Rule
from convert.hub_config import HubConfig
from dllm_jax.config import Experts, ModelConfig, published
from dllm_jax.errors import DllmError

_ORIGINAL = published("sdar-8b-chat")
_MASK = "<|MASK|>"

_LAYER, _OURS = "model.layers.{layer}.", "layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."
RULES = (
    *(rule for rule in qwen2.RULES if not rule.hub.endswith("bias")),
    Rule(_LAYER + "self_attn.q_norm.weight", _OURS + "attn.q_norm.scale"),
    Rule(_LAYER + "self_attn.k_norm.weight", _OURS + "attn.k_norm.scale"),
)
_EXPERTS = (
    Rule(_LAYER + "mlp.gate.weight", _OURS + "mlp.router", transpose=True),
    Rule(_EXPERT + "gate_proj.weight", _OURS + "mlp.w_in", transpose=True, place=("expert", 0)),
    Rule(_EXPERT + "up_proj.weight", _OURS + "mlp.w_in", transpose=True, place=("expert", 1)),
    Rule(_EXPERT + "down_proj.weight", _OURS + "mlp.w_out", transpose=True, place=("expert",)),
)


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of an SDAR config.json.

    The block's length is `block_size`, else what the folder's name ends in (`-b8`, `-b16`, ...), else 4.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    hub.require(attention_bias=False)
    hub.integer("head_dim")  # which is not hidden_size / heads
    base = qwen2.read_config(hub)
    known = base.vocab_size == _ORIGINAL.vocab_size
    return base.replace(
        family="sdar",
        attention="block",
        block_length=_block_length(hub),
        shift=False,
        qkv_bias=False,
        qk_norm=True,
        mask_id=hub.mask_id(hub.tokens.get(_MASK, _ORIGINAL.mask_id if known else None)),
        experts=_experts(hub) if "num_experts" in hub.values else None,
    )


def _block_length(hub: HubConfig) -> int:
    if "block_size" in hub.values:
        return hub.integer("block_size")
    named = re.search(r"-b(\d+)(?:-|$)", Path(hub.where).parent.name)
    return int(named[1]) if named else 4


def _experts(hub: HubConfig) -> Experts:
    hub.allow("decoder_sparse_step", 1)
    hub.allow("mlp_only_layers", [])
    return Experts(
        num_experts=hub.integer("num_experts"),
        per_token=hub.integer("num_experts_per_tok"),
        dim=hub.integer("moe_intermediate_size"),
        normalize=hub.boolean("norm_topk_prob"),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """An SDAR config.json from a ModelConfig.

    Raises:
        DllmError: for experts that this format cannot describe.
    """
    fields = {
        **qwen2.write_config(config),
        "model_type": "sdar",
        "attention_bias": False,
        "block_size": config.block_length,
        "mask_token_id": config.mask_id,
    }
    experts = config.experts
    if experts is None:
        return fields
    if experts != Experts(experts.num_experts, experts.per_token, experts.dim, normalize=experts.normalize):
        raise DllmError("the experts of an sdar checkpoint have a plain softmax router and no shared one beside them")
    return {
        **fields,
        "model_type": "sdar_moe",
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.dim,
        "norm_topk_prob": experts.normalize,
    }


FAMILY = Family(
    name="sdar",
    layouts=(
        Layout("dense", "SDARForCausalLM", RULES),
        Layout("experts", "SDARMoeForCausalLM", RULES + _EXPERTS),
    ),
    model_types=("sdar", "sdar_moe"),
    read_config=read_config,
    write_config=write_config,
    ignored=qwen2.IGNORED,
)
