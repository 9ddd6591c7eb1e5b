"""DiffusionGemma (google/diffusiongemma-26B-A4B-it): the text stack of Gemma 4, which encoder and decoder share.

Tensors are named as transformers saves them: what both share under the decoder. The vision tower is left out, so images
cannot be read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dllm_jax.config import Experts, Gemma, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families.base import CheckpointLayout, Family, Published, TensorRule
from dllm_jax.families.hub_config import HubConfig

END_OF_TURN = "<turn|>"
SOFTCAP = 30.0  # of all there are; in no config.json that transformers writes
FULL_HEAD_DIM = 512  # where a config.json says nothing of it
SLIDING, FULL = "sliding_attention", "full_attention"

# What the backbone implements of the switches that decide results, where a config has them.
_SWITCHES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0, 0),
    "attention_k_eq_v": (True,),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (None, "vision"),
}

_DECODER, _ENCODER = "model.decoder.", "model.encoder.language_model."
_LAYER, _OURS = _DECODER + "layers.{layer}.", "layers.{layer}."
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm_1": "mlp_post_norm",
    "pre_feedforward_layernorm_2": "moe_norm",
    "post_feedforward_layernorm_2": "moe_post_norm",
    "post_feedforward_layernorm": "post_norm",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
}
_MATRICES = {f"self_attn.{name}_proj": f"attn.{name}_proj" for name in "qkvo"} | {
    f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")
}
_CONDITIONING = _DECODER + "self_conditioning."
RULES = (
    TensorRule(_DECODER + "embed_tokens.weight", "embed.embedding"),
    *(TensorRule(f"{_LAYER}{hub}.weight", f"{_OURS}{ours}.scale") for hub, ours in _NORMS.items()),
    *(TensorRule(f"{_LAYER}{hub}.weight", f"{_OURS}{ours}.kernel", transpose=True) for hub, ours in _MATRICES.items()),
    TensorRule(_LAYER + "router.proj.weight", _OURS + "moe.router", transpose=True),
    TensorRule(_LAYER + "router.scale", _OURS + "moe.router_scale"),
    TensorRule(_LAYER + "router.per_expert_scale", _OURS + "moe.expert_scale"),
    TensorRule(_LAYER + "experts.gate_up_proj", _OURS + "moe.w_in", transpose=True, place=("*", "*")),
    TensorRule(_LAYER + "experts.down_proj", _OURS + "moe.w_out", transpose=True, place=("*",)),
    TensorRule(_LAYER + "layer_scalar", _OURS + "decoder_scalar"),
    TensorRule(_ENCODER + "layers.{layer}.layer_scalar", _OURS + "encoder_scalar"),
    TensorRule(_DECODER + "norm.weight", "final_norm.scale"),
    TensorRule(_CONDITIONING + "pre_norm.weight", "conditioning.norm.scale"),
    *(
        TensorRule(f"{_CONDITIONING}{name}_proj.weight", f"conditioning.mlp.{name}_proj.kernel", transpose=True)
        for name in ("gate", "up", "down")
    ),
    TensorRule("lm_head.weight", "lm_head.kernel", transpose=True),
)


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a DiffusionGemma config.json, of which only the text part counts.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    text = _within(hub, "text_config")
    text.require(hidden_activation="gelu_pytorch_tanh")
    for part in (hub, text):
        for name, values in _SWITCHES.items():
            part.allow(name, *values)
    vocab_size, kinds = text.integer("vocab_size"), _kinds(text)
    ropes = _within(text, "rope_parameters")
    sliding, full = _rope(ropes, SLIDING, "default"), _rope(ropes, FULL, "proportional")
    head_dim, kv_heads = _full_heads(text, kinds)
    return ModelConfig(
        family="diffusion-gemma",
        vocab_size=vocab_size,
        embed_dim=text.integer("hidden_size"),
        num_layers=len(kinds),
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=text.integer("head_dim"),
        mlp_dim=text.integer("intermediate_size"),
        rope_theta=sliding.number("rope_theta"),
        norm_eps=text.number("rms_norm_eps"),
        max_length=text.integer("max_position_embeddings"),
        eos_id=text.eos_ids()[0],
        pad_id=text.pad_id(),
        mask_id=None,
        bos_id=text.bos_id("<bos>", vocab_size, None),
        end_ids=text.end_ids(END_OF_TURN, vocab_size, None),
        attention="canvas",
        block_length=hub.integer("canvas_length"),
        tied_embeddings=True,
        experts=Experts(
            num_experts=text.integer("num_experts"),
            per_token=text.integer("top_k_experts"),
            dim=text.integer("moe_intermediate_size"),
            normalize=True,
        ),
        gemma=Gemma(
            window=text.integer("sliding_window"),
            full_layers=tuple(index for index, kind in enumerate(kinds) if kind == FULL),
            head_dim=head_dim,
            num_kv_heads=kv_heads,
            rope_theta=full.number("rope_theta"),
            rope_pairs=int(full.number("partial_rotary_factor") * head_dim // 2),
            softcap=text.number("final_logit_softcapping") if "final_logit_softcapping" in text.values else SOFTCAP,
        ),
    )


def _within(hub: HubConfig, name: str) -> HubConfig:
    """A field that must be an object, as a config of its own."""
    values = hub.values.get(name)
    if not isinstance(values, Mapping):
        raise DllmError(f"{hub.where}: {name} is {values!r}, but must be an object; take the original config.json")
    return dataclasses.replace(hub, values=values, where=f"{hub.where}: {name}")


def _kinds(text: HubConfig) -> list[str]:
    """The kind of attention of every layer."""
    kinds, count = text.values.get("layer_types"), text.integer("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count or {*kinds} - {SLIDING, FULL} or kinds[-1] != FULL:
        wanted = f"a list of {count} times {SLIDING} or {FULL}, which the last one is"
        raise DllmError(f"{text.where}: layer_types is {kinds!r}, but must be {wanted}")
    return kinds


def _rope(ropes: HubConfig, kind: str, rope_type: str) -> HubConfig:
    found = _within(ropes, kind)
    found.require(rope_type=rope_type)
    found.allow("factor", 1.0)
    if rope_type == "default":
        found.allow("partial_rotary_factor", 1.0)
    return found


def _full_heads(text: HubConfig, kinds: list[str]) -> tuple[int, int]:
    """Size and number of the heads of keys in the layers that see everything: `per_layer_config` as transformers writes
    it, or the same for all of them in fields of their own."""
    if "per_layer_config" not in text.values:
        own = {"head_dim": text.values.get("global_head_dim", FULL_HEAD_DIM)}
        own |= {"num_key_value_heads": text.values.get("num_global_key_value_heads")}
    else:
        layers = _within(text, "per_layer_config").values
        own = dict(layers.get(str(kinds.index(FULL)), {}))
        wanted = {str(index): own for index, kind in enumerate(kinds) if kind == FULL}
        if layers != wanted or not own.keys() <= {"head_dim", "num_key_value_heads"}:
            what = "must give head_dim and num_key_value_heads, the same ones, for every full_attention layer"
            raise DllmError(f"{text.where}: per_layer_config is {layers!r}, but {what}, and nothing else")
    said = {name: value for name, value in own.items() if value is not None}
    heads = dataclasses.replace(text, values={**text.values, **said})
    return heads.integer("head_dim"), heads.integer("num_key_value_heads")


def read_generation(hub: HubConfig) -> dict[str, Any]:
    """Options of the sampler that a generation_config.json gives."""
    names = {
        "max_new_tokens": "gen_length",
        "max_denoising_steps": "steps",
        "t_max": "t_max",
        "t_min": "t_min",
        "stability_threshold": "stability",
        "confidence_threshold": "confidence",
    }
    sampler = hub.generation.get("sampler_config")
    bound = {"gamma": sampler["entropy_bound"]} if isinstance(sampler, dict) and "entropy_bound" in sampler else {}
    return {ours: hub.generation[name] for name, ours in names.items() if hub.generation.get(name) is not None} | bound


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A DiffusionGemma config.json from a ModelConfig.

    Raises:
        DllmError: for a model without Gemma's layers.
    """
    gemma, experts = config.gemma, config.experts
    if gemma is None or experts is None:
        raise DllmError("a diffusion-gemma checkpoint has Gemma's layers, with experts")
    full = {"head_dim": gemma.head_dim, "num_key_value_heads": gemma.num_kv_heads}
    factor = 2 * gemma.rope_pairs / gemma.head_dim
    return {
        "model_type": "diffusion_gemma",
        "canvas_length": config.block_length,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "diffusion_gemma_text",
            **{name: values[0] for name, values in _SWITCHES.items() if name != "attention_k_eq_v"},
            "bos_token_id": config.bos_id,
            "eos_token_id": config.eos_id,
            "final_logit_softcapping": gemma.softcap,
            "head_dim": config.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": config.embed_dim,
            "intermediate_size": config.mlp_dim,
            "layer_types": [FULL if i in gemma.full_layers else SLIDING for i in range(config.num_layers)],
            "max_position_embeddings": config.max_length,
            "moe_intermediate_size": experts.dim,
            "num_attention_heads": config.num_heads,
            "num_experts": experts.num_experts,
            "num_hidden_layers": config.num_layers,
            "num_key_value_heads": config.num_kv_heads,
            "pad_token_id": config.pad_id,
            "per_layer_config": {str(index): full for index in gemma.full_layers},
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": config.rope_theta},
                FULL: {
                    "rope_type": "proportional",
                    "rope_theta": gemma.rope_theta,
                    "partial_rotary_factor": factor,
                },
            },
            "sliding_window": gemma.window,
            "top_k_experts": experts.per_token,
            "vocab_size": config.vocab_size,
        },
    }


_26B = ModelConfig(
    family="diffusion-gemma",
    vocab_size=262144,
    embed_dim=2816,
    num_layers=30,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    mlp_dim=2112,
    rope_theta=1e4,
    norm_eps=1e-6,
    max_length=262144,
    eos_id=1,
    pad_id=0,
    mask_id=None,
    bos_id=2,
    end_ids=(1, 106),
    attention="canvas",
    block_length=256,
    tied_embeddings=True,
    experts=Experts(num_experts=128, per_token=8, dim=704, normalize=True),
    gemma=Gemma(
        window=1024,
        full_layers=(5, 11, 17, 23, 29),
        head_dim=512,
        num_kv_heads=2,
        rope_theta=1e6,
        rope_pairs=64,
        softcap=SOFTCAP,
    ),
)
"""Gemma 4 26B-A4B's text stack, whose sizes DiffusionGemma's own config.json was not here to confirm: 25,250,986,812
parameters of the 25,823,778,864 that are reported, the vision tower's being among those."""

FAMILY = Family(
    name="diffusion-gemma",
    layouts=(CheckpointLayout("tied", "DiffusionGemmaForBlockDiffusion", RULES),),
    model_types=("diffusion_gemma",),
    read_config=read_config,
    write_config=write_config,
    published={"diffusion-gemma-26b": Published(_26B, "google/diffusiongemma-26B-A4B-it")},
    attention="canvas",
    note="the text part alone: the vision tower is left out, so images cannot be read",
    read_generation=read_generation,
    ignored=(r"model\.encoder\.(vision_tower|embed_vision)\..*",),
)
