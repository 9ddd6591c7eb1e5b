"""Nemotron-Labs-Diffusion (arXiv 2607.05722), 3B, 8B and 14B: a Ministral 3 that is read causally and drafts blocks.

One set of weights and one head: read causally row i predicts token i + 1, in a block of masks row i predicts token i.
"""

import math
from typing import Any

from dllm_jax.config import ModelConfig, Yarn
from dllm_jax.errors import DllmError
from dllm_jax.families import qwen2
from dllm_jax.families.base import CheckpointLayout, Family, Published, TensorRule
from dllm_jax.families.hub_config import HubConfig

_8B = ModelConfig(
    family="nemotron",
    vocab_size=131072,
    embed_dim=4096,
    num_layers=34,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=14336,
    rope_theta=1000000.0,
    norm_eps=1e-5,
    max_length=262144,
    eos_id=11,
    pad_id=11,
    mask_id=100,
    bos_id=None,
    end_ids=(11,),
    attention="causal-block",
    block_length=32,
    yarn=Yarn(factor=16.0, original_length=16384, query_scale=0.1),
)
_3B = _8B.replace(embed_dim=3072, num_layers=26, mlp_dim=9216)
_14B = _8B.replace(embed_dim=5120, num_layers=40, mlp_dim=16384, rope_theta=1e9)

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' + ('<think>\n' if enable_thinking else '<think></think>') }}"
    "{% endif %}"
)

_HUB = {"model.": "encoder.", "lm_head.": "diffusion_head."}


def _renamed(name: str) -> str:
    for old, new in _HUB.items():
        name = new + name.removeprefix(old) if name.startswith(old) else name
    return name


RULES = tuple(TensorRule(_renamed(rule.hub), rule.ours, rule.transpose) for rule in qwen2.UNBIASED_RULES)
# Rotary frequencies, and the scales of keys and values of quantized files.
IGNORED = (
    r"encoder\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    r"encoder\.layers\.\d+\.self_attn\.[kv]_scale",
)


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a Nemotron-Labs-Diffusion config.json. `dlm_paradigm`, which chooses a mode after loading, and
    the weights of the losses are not read.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    hub.require(hidden_act="silu")
    for name in ("attention_bias", "mlp_bias"):
        hub.allow(name, False)
    hub.allow("sliding_window", None)
    vocab_size, eos_ids = hub.integer("vocab_size"), hub.eos_ids()
    rope = hub.values.get("rope_parameters")
    if not isinstance(rope, dict):
        raise DllmError(f"{hub.where} lacks rope_parameters, which decide results; take the original config.json")
    nested = HubConfig(rope, f"{hub.where}: rope_parameters")
    return ModelConfig(
        family="nemotron",
        vocab_size=vocab_size,
        embed_dim=hub.integer("hidden_size"),
        num_layers=hub.integer("num_hidden_layers"),
        num_heads=hub.integer("num_attention_heads"),
        num_kv_heads=hub.integer("num_key_value_heads"),
        head_dim=hub.integer("head_dim"),  # which is not hidden_size / heads
        mlp_dim=hub.integer("intermediate_size"),
        rope_theta=nested.number("rope_theta"),
        norm_eps=hub.number("rms_norm_eps"),
        max_length=hub.integer("max_position_embeddings"),
        eos_id=eos_ids[0],
        pad_id=hub.pad_or_eos_id(vocab_size),
        mask_id=hub.integer("mask_token_id", least=0),
        end_ids=hub.end_ids(qwen2.END_OF_TURN, vocab_size, None),
        attention="causal-block",
        block_length=hub.integer("block_size"),
        tied_embeddings=hub.boolean("tie_word_embeddings"),
        yarn=read_yarn(nested),
    )


def read_yarn(rope: HubConfig) -> Yarn | None:
    """YaRN as transformers' `rope_parameters` describe it, with Ministral 3's query scale; None for plain frequencies.

    Raises:
        DllmError: for another kind of frequencies, and numbers that are missing or out of range.
    """
    if rope.values.get("rope_type") == "default" and not rope.values.get("llama_4_scaling_beta"):
        return None
    rope.require(rope_type="yarn")
    rope.allow("truncate", True)
    optional = lambda name, otherwise: rope.number(name) if rope.values.get(name) else otherwise
    factor, attention = rope.number("factor"), optional("attention_factor", None)
    strength = lambda times: 1.0 if factor <= 1.0 else 0.1 * times * math.log(factor) + 1.0
    if attention is None:
        both = [optional(name, None) for name in ("mscale", "mscale_all_dim")]
        attention = strength(1.0) if None in both else strength(both[0]) / strength(both[1])
    return Yarn(
        factor=factor,
        original_length=rope.integer("original_max_position_embeddings"),
        beta_fast=optional("beta_fast", 32.0),
        beta_slow=optional("beta_slow", 1.0),
        attention_factor=attention,
        query_scale=optional("llama_4_scaling_beta", 0.0),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A Nemotron-Labs-Diffusion config.json from a ModelConfig."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (yarn := config.yarn) is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_length,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "attention_factor": yarn.attention_factor,
            "llama_4_scaling_beta": yarn.query_scale,
        }
    return {
        "model_type": "nemotron_labs_diffusion",
        "attention_bias": False,
        "block_size": config.block_length,
        "eos_token_id": config.eos_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "mask_token_id": config.mask_id,
        "max_position_embeddings": config.max_length,
        "mlp_bias": False,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": config.pad_id,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "sliding_window": None,
        "tie_word_embeddings": config.tied_embeddings,
        "vocab_size": config.vocab_size,
    }


FAMILY = Family(
    name="nemotron",
    layouts=(CheckpointLayout("hub", "NemotronLabsDiffusionModel", RULES),),
    model_types=("nemotron_labs_diffusion",),
    read_config=read_config,
    write_config=write_config,
    published={
        "nemotron-diffusion-3b": Published(_3B, "nvidia/Nemotron-Labs-Diffusion-3B"),
        "nemotron-diffusion-8b": Published(_8B, "nvidia/Nemotron-Labs-Diffusion-8B"),
        "nemotron-diffusion-14b": Published(_14B, "nvidia/Nemotron-Labs-Diffusion-14B"),
    },
    attention="causal-block",
    chat_template=TEMPLATE,
    ignored=IGNORED,
    draft_adapter="linear_spec_lora",
)
