"""LLaDA2.0 and 2.1, mini and flash (arXiv 2512.15745, 2602.08676): block diffusion with experts.

The published layout has three tensors per expert, the merged one (of dFactory) three per layer.
"""

import dataclasses
from typing import Any

from dllm_jax.config import Experts, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import llada_moe
from dllm_jax.families.base import CheckpointLayout, Family, Published, TensorRule
from dllm_jax.families.hub_config import HubConfig

BLOCK_LENGTH = 32  # of all published ones; in no config.json

_MINI_EXPERTS = Experts(
    num_experts=256,
    per_token=8,
    dim=512,
    shared_dim=512,
    expert_bias=True,
    dense_layers=(0,),
    score="sigmoid",
    normalize=True,
    scale=2.5,
    groups=8,
    top_groups=4,
)
_MINI = ModelConfig(
    family="llada2",
    vocab_size=157184,
    embed_dim=2048,
    num_layers=20,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    mlp_dim=5120,
    rope_theta=600000.0,
    rope_dim=64,
    norm_eps=1e-6,
    max_length=16384,
    eos_id=156892,
    pad_id=156892,
    mask_id=156895,
    end_ids=(156892,),
    attention="block",
    block_length=BLOCK_LENGTH,
    qk_norm=True,
    experts=_MINI_EXPERTS,
)
_FLASH = _MINI.replace(
    embed_dim=4096,
    num_layers=32,
    num_heads=32,
    mlp_dim=9216,
    experts=dataclasses.replace(_MINI_EXPERTS, dim=1024, shared_dim=1024),
)

# What the backbone implements of the switches that decide results, where a config has them; the published code reads
# none of those of the router.
_SWITCHES: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, 0.0),
    "embedding_dropout": (0, 0.0),
    "output_dropout": (0, 0.0),
    "moe_router_enable_expert_bias": (True,),
    "norm_head": (False,),
    "norm_softmax": (False,),
    "rope_scaling": (None,),
    "score_function": ("sigmoid",),
    "use_bias": (False,),
    "use_qk_norm": (True,),
    "use_qkv_bias": (False,),
    "use_sliding_window": (False,),
}

_LAYER, _OURS = "model.layers.{layer}.", "layers.{layer}."
_QKV, _EXPERT = _LAYER + "attention.query_key_value.weight", _LAYER + "mlp.experts.{expert}."
_COMMON = (
    TensorRule("model.word_embeddings.weight", "embed.embedding"),
    TensorRule(_LAYER + "input_layernorm.weight", _OURS + "attn_norm.scale"),
    TensorRule(_QKV + "/query", _OURS + "attn.q_proj.kernel", transpose=True),
    TensorRule(_QKV + "/key", _OURS + "attn.k_proj.kernel", transpose=True),
    TensorRule(_QKV + "/value", _OURS + "attn.v_proj.kernel", transpose=True),
    TensorRule(_LAYER + "attention.query_layernorm.weight", _OURS + "attn.q_norm.scale"),
    TensorRule(_LAYER + "attention.key_layernorm.weight", _OURS + "attn.k_norm.scale"),
    TensorRule(_LAYER + "attention.dense.weight", _OURS + "attn.o_proj.kernel", transpose=True),
    TensorRule(_LAYER + "post_attention_layernorm.weight", _OURS + "mlp_norm.scale"),
    *(
        TensorRule(_LAYER + f"mlp.{where}{name}_proj.weight", _OURS + f"mlp.{ours}{name}_proj.kernel", transpose=True)
        for where, ours in (("", ""), ("shared_experts.", "shared."))
        for name in ("gate", "up", "down")
    ),
    TensorRule(_LAYER + "mlp.gate.weight", _OURS + "mlp.router", transpose=True),
    TensorRule(_LAYER + "mlp.gate.expert_bias", _OURS + "mlp.bias"),
    TensorRule("model.norm.weight", "final_norm.scale"),
    TensorRule("lm_head.weight", "lm_head.kernel", transpose=True),
)
_SINGLE = (
    TensorRule(_EXPERT + "gate_proj.weight", _OURS + "mlp.w_in", transpose=True, place=("expert", 0)),
    TensorRule(_EXPERT + "up_proj.weight", _OURS + "mlp.w_in", transpose=True, place=("expert", 1)),
    TensorRule(_EXPERT + "down_proj.weight", _OURS + "mlp.w_out", transpose=True, place=("expert",)),
)
_MERGED = (
    TensorRule(_LAYER + "mlp.experts.gate_proj", _OURS + "mlp.w_in", transpose=True, place=("*", 0)),
    TensorRule(_LAYER + "mlp.experts.up_proj", _OURS + "mlp.w_in", transpose=True, place=("*", 1)),
    TensorRule(_LAYER + "mlp.experts.down_proj", _OURS + "mlp.w_out", transpose=True, place=("*",)),
)


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a LLaDA2 config.json.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    hub.require(hidden_act="silu")
    for name, values in _SWITCHES.items():
        hub.allow(name, *values)
    vocab_size, head_dim = hub.integer("vocab_size"), hub.integer("head_dim")
    rope_dim = int(head_dim * hub.number("partial_rotary_factor"))
    width, per_token = hub.integer("moe_intermediate_size"), hub.integer("num_experts_per_tok")
    eos_id = hub.eos_ids()[0] if "eos_token_id" in hub.values else hub.pad_id()
    end_ids = hub.end_ids(llada_moe.END_OF_TURN, vocab_size, None) if "eos_token_id" in hub.values else (eos_id,)
    return ModelConfig(
        family="llada2",
        vocab_size=vocab_size,
        embed_dim=hub.integer("hidden_size"),
        num_layers=hub.integer("num_hidden_layers"),
        num_heads=hub.integer("num_attention_heads"),
        num_kv_heads=hub.integer("num_key_value_heads"),
        head_dim=head_dim,
        mlp_dim=hub.integer("intermediate_size"),
        rope_theta=hub.number("rope_theta"),
        rope_dim=None if rope_dim == head_dim else rope_dim,
        norm_eps=hub.number("rms_norm_eps"),
        max_length=hub.integer("max_position_embeddings"),
        eos_id=eos_id,
        pad_id=hub.pad_id(),
        mask_id=hub.mask_id(_MINI.mask_id if vocab_size == _MINI.vocab_size else None),
        end_ids=end_ids,
        attention="block",
        block_length=BLOCK_LENGTH,
        qk_norm=True,
        tied_embeddings=hub.boolean("tie_word_embeddings"),
        experts=Experts(
            num_experts=hub.integer("num_experts"),
            per_token=per_token,
            dim=width,
            shared_dim=width * hub.integer("num_shared_experts"),
            expert_bias=True,
            dense_layers=tuple(range(hub.integer("first_k_dense_replace", least=0))),
            score="sigmoid",
            normalize=per_token > 1,  # whatever norm_topk_prob says
            scale=hub.number("routed_scaling_factor"),
            groups=hub.integer("n_group"),
            top_groups=hub.integer("topk_group"),
        ),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A LLaDA2 config.json from a ModelConfig.

    Raises:
        DllmError: for what this format cannot say.
    """
    experts = config.experts
    if experts is None or experts.shared_dim is None or experts.shared_dim % experts.dim:
        raise DllmError("a llada2 checkpoint has experts, and a shared one of a multiple of their width")
    if experts.dense_layers != tuple(range(len(experts.dense_layers))):
        raise DllmError("the layers without experts of a llada2 checkpoint are its first ones")
    rope_dim = config.rope_dim or config.head_dim
    return {
        "model_type": "llada2_moe",
        **{name: values[0] for name, values in _SWITCHES.items()},
        "eos_token_id": config.eos_id,
        "first_k_dense_replace": len(experts.dense_layers),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "mask_token_id": config.mask_id,
        "max_position_embeddings": config.max_length,
        "moe_intermediate_size": experts.dim,
        "n_group": experts.groups,
        "norm_topk_prob": experts.normalize,
        "num_attention_heads": config.num_heads,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_shared_experts": experts.shared_dim // experts.dim,
        "pad_token_id": config.pad_id,
        "partial_rotary_factor": rope_dim / config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rotary_dim": rope_dim,
        "routed_scaling_factor": experts.scale,
        "tie_word_embeddings": config.tied_embeddings,
        "topk_group": experts.top_groups,
        "vocab_size": config.vocab_size,
    }


FAMILY = Family(
    name="llada2",
    layouts=(
        CheckpointLayout("single", "LLaDA2MoeModelLM", _COMMON + _SINGLE),
        CheckpointLayout("merged", "LLaDA2MoeModelLM", _COMMON + _MERGED),
    ),
    model_types=("llada2_moe", "llada2_moe_veomni"),
    read_config=read_config,
    write_config=write_config,
    published={
        "llada2.0-mini": Published(_MINI, "inclusionAI/LLaDA2.0-mini"),
        "llada2.0-flash": Published(_FLASH, "inclusionAI/LLaDA2.0-flash"),
        "llada2.1-mini": Published(_MINI.replace(max_length=32768), "inclusionAI/LLaDA2.1-mini"),
        "llada2.1-flash": Published(_FLASH.replace(max_length=32768), "inclusionAI/LLaDA2.1-flash"),
    },
    attention="block",
    chat_template=llada_moe.TEMPLATE,
    generation={"threshold": 0.95},
)
