"""Qwen2.5, the autoregressive verifiers: causal attention, biases on q, k and v, often a tied head."""

from typing import Any

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families.base import CheckpointLayout, Family, Published, TensorRule
from dllm_jax.families.hub_config import HubConfig

CONFIG_7B = ModelConfig(
    family="qwen2",
    vocab_size=152064,
    embed_dim=3584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    mlp_dim=18944,
    rope_theta=1000000.0,
    norm_eps=1e-6,
    max_length=32768,
    eos_id=151643,
    pad_id=151643,
    mask_id=None,
    bos_id=None,
    end_ids=(151643, 151645),
    attention="causal",
    shift=True,
    qkv_bias=True,
)
_SMALL = CONFIG_7B.replace(vocab_size=151936, num_kv_heads=2, tied_embeddings=True)
CONFIG_1_5B = _SMALL.replace(embed_dim=1536, num_heads=12, mlp_dim=8960)
_0_5B = _SMALL.replace(embed_dim=896, num_layers=24, num_heads=14, head_dim=64, mlp_dim=4864)

TURNS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}" + TURNS
)
END_OF_TURN = "<|im_end|>"

_LAYER = "model.layers.{layer}."
RULES = (
    TensorRule("model.embed_tokens.weight", "embed.embedding"),
    TensorRule(_LAYER + "input_layernorm.weight", "layers.{layer}.attn_norm.scale"),
    TensorRule(_LAYER + "self_attn.q_proj.weight", "layers.{layer}.attn.q_proj.kernel", transpose=True),
    TensorRule(_LAYER + "self_attn.k_proj.weight", "layers.{layer}.attn.k_proj.kernel", transpose=True),
    TensorRule(_LAYER + "self_attn.v_proj.weight", "layers.{layer}.attn.v_proj.kernel", transpose=True),
    TensorRule(_LAYER + "self_attn.q_proj.bias", "layers.{layer}.attn.q_proj.bias"),
    TensorRule(_LAYER + "self_attn.k_proj.bias", "layers.{layer}.attn.k_proj.bias"),
    TensorRule(_LAYER + "self_attn.v_proj.bias", "layers.{layer}.attn.v_proj.bias"),
    TensorRule(_LAYER + "self_attn.o_proj.weight", "layers.{layer}.attn.o_proj.kernel", transpose=True),
    TensorRule(_LAYER + "post_attention_layernorm.weight", "layers.{layer}.mlp_norm.scale"),
    TensorRule(_LAYER + "mlp.gate_proj.weight", "layers.{layer}.mlp.gate_proj.kernel", transpose=True),
    TensorRule(_LAYER + "mlp.up_proj.weight", "layers.{layer}.mlp.up_proj.kernel", transpose=True),
    TensorRule(_LAYER + "mlp.down_proj.weight", "layers.{layer}.mlp.down_proj.kernel", transpose=True),
    TensorRule("model.norm.weight", "final_norm.scale"),
    TensorRule("lm_head.weight", "lm_head.kernel", transpose=True),
)
UNBIASED_RULES = tuple(rule for rule in RULES if not rule.hub.endswith("bias"))
# Old versions of transformers stored the rotary frequencies, which follow from rope_theta.
IGNORED = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


def read_sizes(hub: HubConfig) -> dict[str, Any]:
    """The fields of a ModelConfig that Qwen2's config.json and those of its form call by the same names.

    Raises:
        DllmError: naming the field that is missing, or that is no such number.
    """
    given_head_dim = hub.values.get("head_dim") is not None
    return {
        "vocab_size": hub.integer("vocab_size"),
        "embed_dim": hub.integer("hidden_size"),
        "num_layers": hub.integer("num_hidden_layers"),
        "num_heads": hub.integer("num_attention_heads"),
        "num_kv_heads": hub.integer("num_key_value_heads"),
        "head_dim": hub.integer("head_dim") if given_head_dim else hub.heads("hidden_size", "num_attention_heads")[1],
        "mlp_dim": hub.integer("intermediate_size"),
        "norm_eps": hub.number("rms_norm_eps"),
        "max_length": hub.integer("max_position_embeddings"),
        "tied_embeddings": hub.boolean("tie_word_embeddings"),
    }


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a Qwen2 config.json.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    hub.require(hidden_act="silu")
    hub.allow("use_sliding_window", False)
    if "use_sliding_window" not in hub.values:
        hub.allow("sliding_window", None)
    kinds = hub.values.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise DllmError(f"{hub.where}: layer_types is implemented only as full_attention for every layer")
    sizes = read_sizes(hub)
    vocab_size = sizes["vocab_size"]
    known = vocab_size in (CONFIG_1_5B.vocab_size, CONFIG_7B.vocab_size)  # bigger models pad the vocabulary
    return ModelConfig(
        family="qwen2",
        **sizes,
        rope_theta=_rope_theta(hub),
        eos_id=hub.eos_ids()[0],
        pad_id=hub.pad_id(),
        mask_id=None,
        end_ids=hub.end_ids(END_OF_TURN, vocab_size, CONFIG_7B.end_ids[1] if known else None),
        attention="causal",
        shift=True,
        qkv_bias=True,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A Qwen2 config.json from a ModelConfig."""
    return {
        "model_type": "qwen2",
        "eos_token_id": config.eos_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": config.pad_id,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": config.tied_embeddings,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def _rope_theta(hub: HubConfig) -> float:
    if "rope_parameters" not in hub.values:
        hub.allow("rope_scaling", None)
        return hub.number("rope_theta")
    values = hub.values["rope_parameters"]  # where transformers 5 keeps both
    nested = HubConfig(values if isinstance(values, dict) else {}, f"{hub.where}: rope_parameters")
    nested.require(rope_type="default")
    return nested.number("rope_theta")


FAMILY = Family(
    name="qwen2",
    layouts=(CheckpointLayout("hub", "Qwen2ForCausalLM", RULES),),
    model_types=("qwen2",),
    read_config=read_config,
    write_config=write_config,
    published={
        "qwen2.5-0.5b": Published(_0_5B, "Qwen/Qwen2.5-0.5B"),
        "qwen2.5-1.5b": Published(CONFIG_1_5B, "Qwen/Qwen2.5-1.5B"),
        "qwen2.5-7b": Published(CONFIG_7B, "Qwen/Qwen2.5-7B"),
    },
    attention="causal",
    chat_template=CHATML,
    ignored=IGNORED,
)
