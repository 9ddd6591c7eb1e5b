"""Qwen3, autoregressive, dense or with experts: what SDAR was made of. Norms of queries and keys, no biases."""

from typing import Any

from dllm_jax.config import Experts, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import qwen2
from dllm_jax.families.base import CheckpointLayout, Family, Published, TensorRule
from dllm_jax.families.hub_config import HubConfig

CONFIG_8B = qwen2.CONFIG_7B.replace(
    family="qwen3",
    vocab_size=151936,
    embed_dim=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    mlp_dim=12288,
    qkv_bias=False,
    qk_norm=True,
)
_4B = CONFIG_8B.replace(embed_dim=2560, mlp_dim=9728, tied_embeddings=True)
_1_7B = _4B.replace(embed_dim=2048, num_layers=28, num_heads=16, mlp_dim=6144)
CONFIG_30B_A3B = CONFIG_8B.replace(
    embed_dim=2048,
    num_layers=48,
    num_kv_heads=4,
    mlp_dim=6144,
    experts=Experts(num_experts=128, per_token=8, dim=768, normalize=True),
)

_LAYER, _OURS = "model.layers.{layer}.", "layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."
RULES = (
    *qwen2.UNBIASED_RULES,
    TensorRule(_LAYER + "self_attn.q_norm.weight", _OURS + "attn.q_norm.scale"),
    TensorRule(_LAYER + "self_attn.k_norm.weight", _OURS + "attn.k_norm.scale"),
)
EXPERT_RULES = (
    *RULES,
    TensorRule(_LAYER + "mlp.gate.weight", _OURS + "mlp.router", transpose=True),
    TensorRule(_EXPERT + "gate_proj.weight", _OURS + "mlp.w_in", transpose=True, place=("expert", 0)),
    TensorRule(_EXPERT + "up_proj.weight", _OURS + "mlp.w_in", transpose=True, place=("expert", 1)),
    TensorRule(_EXPERT + "down_proj.weight", _OURS + "mlp.w_out", transpose=True, place=("expert",)),
)

_NUMBERS = "num_experts", "num_local_experts"  # the latter of what transformers 5 saves


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a Qwen3 config.json.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    hub.require(attention_bias=False)
    hub.integer("head_dim")  # which is not hidden_size / heads
    number = next((name for name in _NUMBERS if name in hub.values), None)
    experts = _experts(hub, number) if number else None
    return qwen2.read_config(hub).replace(family="qwen3", qkv_bias=False, qk_norm=True, experts=experts)


def _experts(hub: HubConfig, number: str) -> Experts:
    hub.allow("decoder_sparse_step", 1)
    hub.allow("mlp_only_layers", [])
    return Experts(
        num_experts=hub.integer(number),
        per_token=hub.integer("num_experts_per_tok"),
        dim=hub.integer("moe_intermediate_size"),
        normalize=hub.boolean("norm_topk_prob"),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A Qwen3 config.json from a ModelConfig.

    Raises:
        DllmError: for experts that this format cannot describe.
    """
    fields = {**qwen2.write_config(config), "model_type": "qwen3", "attention_bias": False}
    experts = config.experts
    if experts is None:
        return fields
    if experts != Experts(experts.num_experts, experts.per_token, experts.dim, normalize=experts.normalize):
        raise DllmError(f"the experts of a {config.family} checkpoint have a plain softmax router and no shared one")
    return {
        **fields,
        "model_type": "qwen3_moe",
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.dim,
        "norm_topk_prob": experts.normalize,
    }


FAMILY = Family(
    name="qwen3",
    layouts=(
        CheckpointLayout("dense", "Qwen3ForCausalLM", RULES),
        CheckpointLayout("experts", "Qwen3MoeForCausalLM", EXPERT_RULES),
    ),
    model_types=("qwen3", "qwen3_moe"),
    read_config=read_config,
    write_config=write_config,
    published={
        "qwen3-0.6b-base": Published(_1_7B.replace(embed_dim=1024, mlp_dim=3072), "Qwen/Qwen3-0.6B-Base"),
        "qwen3-1.7b-base": Published(_1_7B, "Qwen/Qwen3-1.7B-Base"),
        "qwen3-4b-base": Published(_4B, "Qwen/Qwen3-4B-Base"),
        "qwen3-8b-base": Published(CONFIG_8B, "Qwen/Qwen3-8B-Base"),
        "qwen3-30b-a3b-base": Published(CONFIG_30B_A3B, "Qwen/Qwen3-30B-A3B-Base"),
    },
    attention="causal",
    chat_template=qwen2.TURNS,
    ignored=qwen2.IGNORED,
)
