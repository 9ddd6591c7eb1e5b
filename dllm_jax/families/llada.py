"""LLaDA-8B-Base, LLaDA-8B-Instruct and LLaDA-1.5: one architecture and one set of names."""

from typing import Any

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import llama
from dllm_jax.families.base import CheckpointLayout, Family, Published, TensorRule
from dllm_jax.families.hub_config import HubConfig

_8B = ModelConfig(
    family="llada",
    vocab_size=126464,
    embed_dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    mlp_dim=12288,
    rope_theta=500000.0,
    norm_eps=1e-5,
    max_length=4096,
    eos_id=126081,
    pad_id=126081,
    mask_id=126336,
    bos_id=126080,
    end_ids=(126081, 126348),
)

# The published LLaDA template opens the assistant's turn always, whatever add_generation_prompt says.
_TEMPLATE = llama.TURNS + llama.OPENING

# What the backbone implements of the OLMo-like switches; each decides results, so each must be there.
_SWITCHES: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rope": True,
    "rope_full_precision": True,
    "scale_logits": False,
}

_BLOCK = "model.transformer.blocks.{layer}."
_RULES = (
    TensorRule("model.transformer.wte.weight", "embed.embedding"),
    TensorRule(_BLOCK + "attn_norm.weight", "layers.{layer}.attn_norm.scale"),
    TensorRule(_BLOCK + "q_proj.weight", "layers.{layer}.attn.q_proj.kernel", transpose=True),
    TensorRule(_BLOCK + "k_proj.weight", "layers.{layer}.attn.k_proj.kernel", transpose=True),
    TensorRule(_BLOCK + "v_proj.weight", "layers.{layer}.attn.v_proj.kernel", transpose=True),
    TensorRule(_BLOCK + "attn_out.weight", "layers.{layer}.attn.o_proj.kernel", transpose=True),
    TensorRule(_BLOCK + "ff_norm.weight", "layers.{layer}.mlp_norm.scale"),
    TensorRule(_BLOCK + "ff_proj.weight", "layers.{layer}.mlp.gate_proj.kernel", transpose=True),
    TensorRule(_BLOCK + "up_proj.weight", "layers.{layer}.mlp.up_proj.kernel", transpose=True),
    TensorRule(_BLOCK + "ff_out.weight", "layers.{layer}.mlp.down_proj.kernel", transpose=True),
    TensorRule("model.transformer.ln_f.weight", "final_norm.scale"),
    TensorRule("model.transformer.ff_out.weight", "lm_head.kernel", transpose=True),  # not a layer's ff_out
)


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a LLaDA config.json.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    hub.require(**_SWITCHES)
    hub.allow("multi_query_attention", None, False)
    hub.allow("rope_scaling", None)
    hub.allow("clip_qkv", None)
    vocab_size = hub.integer("vocab_size")
    hub.allow("embedding_size", None, vocab_size)  # rows of the table; more of them than tokens would be logits too
    num_heads, head_dim = hub.heads("d_model", "n_heads")
    mask_id = hub.integer("mask_token_id", least=0)
    known = (vocab_size, mask_id) == (_8B.vocab_size, _8B.mask_id)
    return ModelConfig(
        family="llada",
        vocab_size=vocab_size,
        embed_dim=hub.integer("d_model"),
        num_layers=hub.integer("n_layers"),
        num_heads=num_heads,
        num_kv_heads=hub.integer_or_null("n_kv_heads") or num_heads,
        head_dim=head_dim,
        mlp_dim=hub.integer("mlp_hidden_size"),
        rope_theta=hub.number("rope_theta"),
        norm_eps=hub.number("rms_norm_eps"),
        max_length=hub.integer("max_sequence_length"),
        eos_id=hub.eos_ids()[0],
        pad_id=hub.pad_id(),
        mask_id=mask_id,
        bos_id=hub.bos_id("<|startoftext|>", vocab_size, _8B.bos_id if known else None),
        end_ids=hub.end_ids("<|eot_id|>", vocab_size, _8B.end_ids[1] if known else None),
        tied_embeddings=hub.boolean("weight_tying"),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A LLaDA config.json from a ModelConfig.

    Raises:
        DllmError: when heads do not fill the model width, which this format cannot say.
    """
    if config.num_heads * config.head_dim != config.embed_dim:
        raise DllmError(f"head_dim {config.head_dim} is not embed_dim / num_heads, which LLaDA's config.json assumes")
    fields = {
        "model_type": "llada",
        **_SWITCHES,
        "d_model": config.embed_dim,
        "embedding_size": config.vocab_size,
        "eos_token_id": config.eos_id,
        "mask_token_id": config.mask_id,
        "max_sequence_length": config.max_length,
        "mlp_hidden_size": config.mlp_dim,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "n_layers": config.num_layers,
        "pad_token_id": config.pad_id,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "vocab_size": config.vocab_size,
        "weight_tying": config.tied_embeddings,
    }
    return fields if config.bos_id is None else {**fields, "bos_token_id": config.bos_id}


FAMILY = Family(
    name="llada",
    layouts=(CheckpointLayout("hub", "LLaDAModelLM", _RULES),),
    model_types=("llada",),
    read_config=read_config,
    write_config=write_config,
    published={
        "llada-8b-base": Published(_8B, "GSAI-ML/LLaDA-8B-Base"),
        "llada-8b-instruct": Published(_8B, "GSAI-ML/LLaDA-8B-Instruct"),
        "llada-1.5": Published(_8B, "GSAI-ML/LLaDA-1.5"),
    },
    chat_template=_TEMPLATE,
    generation={"gen_length": 256, "block_length": 32},
)
