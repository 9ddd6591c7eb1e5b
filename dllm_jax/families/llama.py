"""Llama 2 and 3 and what has their form (SmolLM2), autoregressive: the start of a run that adapts one."""

from typing import Any

from dllm_jax.config import Llama3Rope, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.families import qwen2
from dllm_jax.families.base import CheckpointLayout, Family, Published
from dllm_jax.families.hub_config import HubConfig

_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    embed_dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=14336,
    rope_theta=500000.0,
    norm_eps=1e-5,
    max_length=131072,
    eos_id=128001,
    pad_id=128001,
    mask_id=None,
    bos_id=128000,
    end_ids=(128001, 128009),
    attention="causal",
    shift=True,
    llama3=Llama3Rope(factor=8.0, original_length=8192),
)
_3B = _8B.replace(
    embed_dim=3072,
    num_layers=28,
    num_heads=24,
    mlp_dim=8192,
    llama3=Llama3Rope(factor=32.0, original_length=8192),
    tied_embeddings=True,
)
_1B = _3B.replace(embed_dim=2048, num_layers=16, num_heads=32, head_dim=64)
_SMALL = _8B.replace(
    vocab_size=49152,
    embed_dim=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_dim=1536,
    rope_theta=100000.0,
    max_length=8192,
    eos_id=0,
    pad_id=0,
    bos_id=None,
    end_ids=(0, 2),
    llama3=None,
    tied_embeddings=True,
)

TURNS = (
    "{% for message in messages %}"
    "{{ bos_token if loop.first and bos_token }}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
)
OPENING = "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}" + OPENING + "{% endif %}"


def read_config(hub: HubConfig) -> ModelConfig:
    """The ModelConfig of a Llama config.json.

    Raises:
        DllmError: naming the field that is missing, or whose value the backbone does not implement.
    """
    hub.require(hidden_act="silu")
    for name in ("attention_bias", "mlp_bias"):
        hub.allow(name, False)
    sizes = qwen2.read_sizes(hub)
    vocab_size = sizes["vocab_size"]
    nested = hub.values.get("rope_parameters")  # where transformers 5 keeps both
    rope = HubConfig(nested, f"{hub.where}: rope_parameters") if isinstance(nested, dict) else hub
    scaling = nested if isinstance(nested, dict) else hub.values.get("rope_scaling")
    turn = "<|eot_id|>" if "<|eot_id|>" in hub.tokens else qwen2.END_OF_TURN
    return ModelConfig(
        family="llama",
        **sizes,
        rope_theta=rope.number("rope_theta"),
        eos_id=hub.eos_ids()[0],
        pad_id=hub.pad_or_eos_id(vocab_size),  # published ones have none
        mask_id=None,
        bos_id=hub.bos_id("<|begin_of_text|>", vocab_size, None),
        end_ids=hub.end_ids(turn, vocab_size, None),
        attention="causal",
        shift=True,
        llama3=_llama3(hub, scaling),
    )


def _llama3(hub: HubConfig, scaling: Any) -> Llama3Rope | None:
    """Llama 3.1's stretched frequencies as `rope_scaling` or `rope_parameters` describe them; None for plain ones."""
    if scaling is None:
        return None
    if not isinstance(scaling, dict):
        raise DllmError(f"{hub.where}: rope_scaling is {scaling!r}, but must be an object or null")
    nested = HubConfig(scaling, f"{hub.where}: rope_scaling")
    if scaling.get("rope_type") == "default":
        return None
    nested.require(rope_type="llama3")
    return Llama3Rope(
        factor=nested.number("factor"),
        original_length=nested.integer("original_max_position_embeddings"),
        low_frequency=nested.number("low_freq_factor"),
        high_frequency=nested.number("high_freq_factor"),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A Llama config.json from a ModelConfig."""
    stretch = config.llama3
    scaling = None if stretch is None else {
        "rope_type": "llama3",
        "factor": stretch.factor,
        "original_max_position_embeddings": stretch.original_length,
        "low_freq_factor": stretch.low_frequency,
        "high_freq_factor": stretch.high_frequency,
    }  # fmt: skip
    fields = {**qwen2.write_config(config), "model_type": "llama", "attention_bias": False, "mlp_bias": False}
    fields |= {"rope_scaling": scaling, "bos_token_id": config.bos_id}
    return {name: value for name, value in fields.items() if "sliding_window" not in name}


FAMILY = Family(
    name="llama",
    layouts=(CheckpointLayout("hub", "LlamaForCausalLM", qwen2.UNBIASED_RULES),),
    model_types=("llama",),
    read_config=read_config,
    write_config=write_config,
    published={
        "smollm2-135m": Published(_SMALL, "HuggingFaceTB/SmolLM2-135M"),
        "smollm2-360m": Published(
            _SMALL.replace(embed_dim=960, num_layers=32, num_heads=15, num_kv_heads=5, mlp_dim=2560),
            "HuggingFaceTB/SmolLM2-360M",
        ),
        "llama-3.2-1b": Published(_1B, "meta-llama/Llama-3.2-1B"),
        "llama-3.2-3b": Published(_3B, "meta-llama/Llama-3.2-3B"),
        "llama-3.1-8b": Published(_8B, "meta-llama/Llama-3.1-8B"),
    },
    attention="causal",
    chat_template=TEMPLATE,
    ignored=qwen2.IGNORED,
)
