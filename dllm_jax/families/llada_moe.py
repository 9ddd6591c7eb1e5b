"""LLaDA-MoE-7B-A1B (arXiv 2509.24389): Qwen2's names with norms on queries and keys, and experts in two layouts.

The published layout has three tensors per expert, the fused one (of dInfer) two per layer: `w1` [E, 2F, D], each
expert's gate rows before its up rows, and `w2` [E, D, F].
"""

from typing import Any

from dllm_jax.config import Experts, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import qwen2
from dllm_jax.families.base import CheckpointLayout, Family, Published, TensorRule
from dllm_jax.families.hub_config import HubConfig

_7B = ModelConfig(
    family="llada-moe",
    vocab_size=157184,
    embed_dim=2048,
    num_layers=16,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    mlp_dim=8192,
    rope_theta=50000.0,
    norm_eps=1e-5,
    max_length=8192,
    eos_id=156892,
    pad_id=156892,
    mask_id=156895,
    end_ids=(156892,),
    qk_norm=True,
    experts=Experts(num_experts=64, per_token=8, dim=1024),
)

# "detailed thinking off" is what the public evaluations send. A system message of one's own comes before it in the same
# turn, on a line of its own, so that the switch is always there and there is one system turn.
TEMPLATE = (
    "{% set roles = {'system': 'SYSTEM', 'user': 'HUMAN', 'assistant': 'ASSISTANT'} %}"
    "{{ '<role>SYSTEM</role>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    "{{ 'detailed thinking off<|role_end|>' }}"
    "{% for message in messages %}"
    "{% if not (loop.first and message['role'] == 'system') %}"
    "{{ '<role>' + roles[message['role']] + '</role>' + message['content'] + '<|role_end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)
END_OF_TURN = "<|role_end|>"

# What the backbone implements of the switches that decide results; each must be there.
_SWITCHES: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_router_score_function": "softmax",
}
# The same, for fields that no published code reads, or that older configs lack.
_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "rope_scaling": (None,),
    "norm_topk_prob": (None, False),
    "routed_scaling_factor": (None, 1, 1.0),
    "router_num_group": (None,),
    "router_topk_group": (None,),
    "sliding_window": (None,),
}

_LAYER, _OURS = "model.layers.{layer}.", "layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."
_COMMON = (
    *(rule for rule in qwen2.RULES if not rule.hub.endswith("bias")),
    TensorRule(_LAYER + "self_attn.q_norm.weight", _OURS + "attn.q_norm.scale"),
    TensorRule(_LAYER + "self_attn.k_norm.weight", _OURS + "attn.k_norm.scale"),
    TensorRule(_LAYER + "mlp.gate.weight", _OURS + "mlp.router", transpose=True),
    TensorRule(_LAYER + "mlp.expert_bias", _OURS + "mlp.bias"),
    TensorRule(_LAYER + "shared_expert.gate_proj.weight", _OURS + "mlp.shared.gate_proj.kernel", transpose=True),
    TensorRule(_LAYER + "shared_expert.up_proj.weight", _OURS + "mlp.shared.up_proj.kernel", transpose=True),
    TensorRule(_LAYER + "shared_expert.down_proj.weight", _OURS + "mlp.shared.down_proj.kernel", transpose=True),
)
_UNFUSED = (
    TensorRule(_EXPERT + "gate_proj.weight", _OURS + "mlp.w_in", transpose=True, place=("expert", 0)),
    TensorRule(_EXPERT + "up_proj.weight", _OURS + "mlp.w_in", transpose=True, place=("expert", 1)),
    TensorRule(_EXPERT + "down_proj.weight", _OURS + "mlp.w_out", transpose=True, place=("expert",)),
)
_FUSED = (
    TensorRule(_LAYER + "mlp.w1", _OURS + "mlp.w_in", transpose=True, place=("*", "*")),
    TensorRule(_LAYER + "mlp.w2", _OURS + "mlp.w_out", transpose=True, place=("*",)),
)


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a LLaDA-MoE config.json.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    hub.require(**_SWITCHES)
    for name, values in _OPTIONAL.items():
        hub.allow(name, *values)
    if hub.number("partial_rotary_factor") != 1:
        raise DllmError(f"{hub.where}: partial_rotary_factor is implemented only as 1")
    vocab_size = hub.integer("vocab_size")
    num_heads, head_dim = hub.heads("hidden_size", "num_attention_heads")
    experts = _experts(hub)
    return ModelConfig(
        family="llada-moe",
        vocab_size=vocab_size,
        embed_dim=hub.integer("hidden_size"),
        num_layers=hub.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=hub.integer("num_key_value_heads"),
        head_dim=head_dim,
        mlp_dim=hub.integer("dense_intermediate_size"),
        rope_theta=hub.number("rope_theta"),
        norm_eps=hub.number("rms_norm_eps"),
        max_length=hub.integer("max_position_embeddings"),
        eos_id=hub.eos_ids()[0],
        pad_id=hub.pad_id(),
        mask_id=hub.mask_id(_7B.mask_id if vocab_size == _7B.vocab_size else None),
        end_ids=hub.end_ids(END_OF_TURN, vocab_size, None),
        qk_norm=hub.boolean("qk_layernorm"),
        clip_qkv=None if hub.values.get("clip_qkv") is None else hub.number("clip_qkv"),
        tied_embeddings="tie_word_embeddings" in hub.values and hub.boolean("tie_word_embeddings"),
        experts=experts,
    )


def _experts(hub: HubConfig) -> Experts:
    kinds, num_layers = hub.values.get("moe_layer_freq"), hub.integer("num_hidden_layers")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(type(x) is int and x in (0, 1) for x in kinds)
    ):
        raise DllmError(
            f"{hub.where}: moe_layer_freq must be a list of {num_layers} numbers, 1 for experts and 0 without"
        )
    if not any(kinds):
        raise DllmError(f"{hub.where}: moe_layer_freq has experts in no layer; this is not a mixture of experts")
    shared = hub.values.get("shared_expert_intermediate_size")
    return Experts(
        num_experts=hub.integer("num_experts"),
        per_token=hub.integer("num_experts_per_tok"),
        dim=hub.integer("expert_intermediate_size"),
        shared_dim=None if shared is None else hub.integer("shared_expert_intermediate_size"),
        expert_bias=hub.boolean("moe_router_enable_expert_bias"),
        dense_layers=tuple(layer for layer, kind in enumerate(kinds) if not kind),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A LLaDA-MoE config.json from a ModelConfig.

    Raises:
        DllmError: for a model without experts, or whose heads do not fill the width, which this format cannot say.
    """
    experts = config.experts
    if experts is None:
        raise DllmError("a config without experts has no place in a llada-moe checkpoint")
    if config.num_heads * config.head_dim != config.embed_dim:
        raise DllmError(f"head_dim {config.head_dim} is not embed_dim / num_heads, as LLaDA-MoE's config.json assumes")
    return {
        "model_type": "llada",
        **_SWITCHES,
        "clip_qkv": config.clip_qkv,
        "dense_intermediate_size": config.mlp_dim,
        "eos_token_id": config.eos_id,
        "expert_intermediate_size": experts.dim,
        "hidden_size": config.embed_dim,
        "mask_token_id": config.mask_id,
        "max_position_embeddings": config.max_length,
        "moe_layer_freq": [int(layer not in experts.dense_layers) for layer in range(config.num_layers)],
        "moe_router_enable_expert_bias": experts.expert_bias,
        "norm_topk_prob": None,
        "num_attention_heads": config.num_heads,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": config.pad_id,
        "partial_rotary_factor": 1,
        "qk_layernorm": config.qk_norm,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "routed_scaling_factor": 1,
        "shared_expert_intermediate_size": experts.shared_dim,
        "tie_word_embeddings": config.tied_embeddings,
        "vocab_size": config.vocab_size,
    }


FAMILY = Family(
    name="llada-moe",
    layouts=(
        CheckpointLayout("unfused", "LLaDAMoEModelLM", _COMMON + _UNFUSED),
        CheckpointLayout("fused", "FusedLLaDAMoEModelLM", _COMMON + _FUSED),
    ),
    model_types=("llada",),
    read_config=read_config,
    write_config=write_config,
    published={
        "llada-moe-7b-a1b-base": Published(_7B, "inclusionAI/LLaDA-MoE-7B-A1B-Base"),
        "llada-moe-7b-a1b-instruct": Published(_7B, "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"),
    },
    chat_template=TEMPLATE,
    ignored=qwen2.IGNORED,
    marker="num_experts",
    generation={"gen_length": 256, "block_length": 64},  # dInfer's block
)
