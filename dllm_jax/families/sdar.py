"""SDAR (arXiv 2510.06303): Qwen3 as block diffusion, 1.7B to 8B dense, 30B-A3B with experts."""

import re
from typing import Any

from dllm_jax.config import Experts, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import qwen2
from dllm_jax.families.base import CheckpointLayout, Family, Published, TensorRule
from dllm_jax.families.hub_config import HubConfig

_8B = ModelConfig(
    family="sdar",
    vocab_size=151936,
    embed_dim=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=12288,
    rope_theta=1000000.0,
    norm_eps=1e-6,
    max_length=32768,
    eos_id=151643,
    pad_id=151643,
    mask_id=151669,
    end_ids=(151643, 151645),
    attention="block",
    block_length=4,
    qk_norm=True,
)
_30B_A3B = _8B.replace(
    embed_dim=2048,
    num_layers=48,
    num_kv_heads=4,
    mlp_dim=6144,
    experts=Experts(num_experts=128, per_token=8, dim=768, normalize=True),
)

_MASK = "<|MASK|>"
_PUBLISHED, _UNNAMED = r"SDAR-[\d.]+B(-A\d+B)?(-[a-z]+)?", 4  # names without -bN, and the length of their blocks

_LAYER, _OURS = "model.layers.{layer}.", "layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."
RULES = (
    *(rule for rule in qwen2.RULES if not rule.hub.endswith("bias")),
    TensorRule(_LAYER + "self_attn.q_norm.weight", _OURS + "attn.q_norm.scale"),
    TensorRule(_LAYER + "self_attn.k_norm.weight", _OURS + "attn.k_norm.scale"),
)
_EXPERTS = (
    TensorRule(_LAYER + "mlp.gate.weight", _OURS + "mlp.router", transpose=True),
    TensorRule(_EXPERT + "gate_proj.weight", _OURS + "mlp.w_in", transpose=True, place=("expert", 0)),
    TensorRule(_EXPERT + "up_proj.weight", _OURS + "mlp.w_in", transpose=True, place=("expert", 1)),
    TensorRule(_EXPERT + "down_proj.weight", _OURS + "mlp.w_out", transpose=True, place=("expert",)),
)


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of an SDAR config.json.

    The block's length is `block_size`. Published files lack it: there it is what the name says, `-b8`, `-b16` and so
    on, or 4 where the name is a published one without. Of other names the user has to say it.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement; where nothing says
            how long blocks are, or two things do and differ.
    """
    hub.require(attention_bias=False)
    hub.integer("head_dim")  # which is not hidden_size / heads
    base = qwen2.read_config(hub)
    known = base.vocab_size == _8B.vocab_size
    return base.replace(
        family="sdar",
        attention="block",
        block_length=_block_length(hub),
        shift=False,
        qkv_bias=False,
        qk_norm=True,
        mask_id=hub.mask_id(hub.tokens.get(_MASK, _8B.mask_id if known else None)),
        experts=_experts(hub) if "num_experts" in hub.values else None,
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
        raise DllmError("the experts of an sdar checkpoint have a plain softmax router and no shared one")
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
        CheckpointLayout("dense", "SDARForCausalLM", RULES),
        CheckpointLayout("experts", "SDARMoeForCausalLM", RULES + _EXPERTS),
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
