"""Model configurations: one frozen dataclass for every family, and the published sizes by name."""

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal

from dllm_jax.errors import DllmError

Attention = Literal["bidirectional", "causal"]
Quantize = Literal["int8", "int4"]


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of the feed-forward network (LLaDA-MoE, arXiv 2509.24389).

    Attributes:
        num_experts: E, the routed experts of a layer.
        per_token: how many of them each token goes to. Their router probabilities are used as they are, never
            renormalised.
        dim: F, the hidden width of one routed expert.
        shared_dim: hidden width of the expert that every token goes to as well; None for none.
        expert_bias: a bias per expert is added to the router's probabilities, for the choice and in the weights.
        dense_layers: numbers of the layers that keep an ordinary feed-forward network of width `ModelConfig.mlp_dim`.
    """

    num_experts: int
    per_token: int
    dim: int
    shared_dim: int | None = None
    expert_bias: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_experts", "per_token", "dim", "shared_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DllmError(f"config field experts.{name} is {value}; it must be a positive integer")
        if self.per_token > self.num_experts:
            raise DllmError(f"experts.per_token {self.per_token} exceeds experts.num_experts {self.num_experts}")
        if list(self.dense_layers) != sorted(set(self.dense_layers)):
            raise DllmError(f"experts.dense_layers {list(self.dense_layers)} must be increasing layer numbers")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that tells one Transformer from another; hashable, so that jit can key on it.

    Letters used in shapes throughout the library: B batch, T query positions, S key positions (buffer length),
    N query heads, K key/value heads, H head dim, D model width, F feed-forward width, V vocabulary, W window,
    E experts.

    Attributes:
        family: checkpoint family, decides tensor names and the chat template ("llada", "llada-moe", "dream", "qwen2").
        attention: which keys a query may see. "bidirectional" for dLLMs, "causal" for autoregressive verifiers.
        shift: True when raw logits at position i predict token i+1 (Dream, and every causal model); the
            `Denoiser` undoes it, nothing else ever looks at it.
        max_length: longest trained context, prompt and canvas together, in tokens.
        mask_id: the mask token, or None for a model that has none (an autoregressive verifier).
        end_ids: ids that end an answer: end of sequence, and end of turn where the family has one.
        mlp_dim: width of the feed-forward network; of a mixture of experts, that of its dense layers.
        clip_qkv: queries and keys (after their norm) and values are clamped to +- clip_qkv; None for no limit.
        experts: the mixture of experts that replaces the feed-forward networks; None for a dense model.
        dtype: dtype the published weights are stored in.
        quantize: what the kernels are quantized to (`dllm_jax.params.forms` says which how); None for plain ones.
    """

    family: str
    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float
    norm_eps: float
    max_length: int
    eos_id: int
    pad_id: int
    mask_id: int | None
    end_ids: tuple[int, ...]
    bos_id: int | None = None
    attention: Attention = "bidirectional"
    shift: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    clip_qkv: float | None = None
    tied_embeddings: bool = False
    experts: Experts | None = None
    dtype: str = "bfloat16"
    quantize: Quantize | None = None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "embed_dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
            "max_length",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise DllmError(f"config field {name} is {getattr(self, name)}; it must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise DllmError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise DllmError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even one")
        if self.clip_qkv is not None and not self.clip_qkv > 0:
            raise DllmError(f"clip_qkv is {self.clip_qkv}; it must be a positive number, or None")
        if self.experts and self.experts.dense_layers and not self.experts.dense_layers[-1] < self.num_layers:
            raise DllmError(f"experts.dense_layers names layer {self.experts.dense_layers[-1]} of {self.num_layers}")
        if self.experts and self.experts.dense_layers and self.experts.dense_layers[0] < 0:
            raise DllmError(f"experts.dense_layers names layer {self.experts.dense_layers[0]}; layers start at 0")
        if self.attention not in ("bidirectional", "causal"):
            raise DllmError(f"attention {self.attention!r} is not implemented; use 'bidirectional' or 'causal'")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise DllmError(f"dtype {self.dtype!r} is not supported; use bfloat16, float16 or float32")
        check_quantize(self.quantize)
        for name, value in self.special_ids().items():
            if not 0 <= value < self.vocab_size:
                raise DllmError(f"{name} {value} lies outside the vocabulary of {self.vocab_size} tokens")

    def special_ids(self) -> dict[str, int]:
        """The special token ids that are set, by field name (`end_ids[i]` for the members of end_ids)."""
        ids = {name: getattr(self, name) for name in ("eos_id", "pad_id", "mask_id", "bos_id")}
        ids |= {f"end_ids[{i}]": value for i, value in enumerate(self.end_ids)}
        return {name: value for name, value in ids.items() if value is not None}

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """The config as indented JSON; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str, where: str = "config") -> "ModelConfig":
        """Reads what `to_json` wrote.

        Raises:
            DllmError: for text that is not JSON, and for unknown, missing or mistyped fields; the sentence starts with
                `where`.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise DllmError(f"{where} is not valid JSON ({error}); convert the checkpoint again") from None
        if not isinstance(values, dict):
            raise DllmError(f"{where} holds no JSON object; convert the checkpoint again")
        if isinstance(values.get("experts"), dict):
            values["experts"] = Experts(**_checked(Experts, values["experts"], f"{where}: experts"))
        return cls(**_checked(cls, values, where))


def check_quantize(quantize: object) -> None:
    """Raises DllmError for what is no `ModelConfig.quantize`."""
    if quantize not in (None, "int8", "int4"):
        raise DllmError(f"quantize {quantize!r} is not supported; use int8 or int4")


def _checked(cls: Any, values: dict[str, Any], where: str) -> dict[str, Any]:
    """JSON values as arguments of a config class: none unknown, none missing, all of the right type."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := sorted(set(values) - set(fields)):
        raise DllmError(f"{where} has unknown fields {unknown}; it was written by another version of dllm_jax")
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise DllmError(f"{where} lacks the fields {missing}; convert the checkpoint again")
    if not isinstance(values.get("end_ids", []), list):
        raise DllmError(f"{where}: end_ids must be a list of token ids; convert the checkpoint again")
    for name, value in values.items():
        if not _has_type(value, fields[name].type):
            raise DllmError(f"{where}: {name} cannot be {value!r}; convert the checkpoint again")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a JSON value may be that of a field; bool is no number here, and other fields check themselves."""
    if isinstance(kind, types.UnionType):
        return any(value is None if one is types.NoneType else _has_type(value, one) for one in kind.__args__)
    if kind == tuple[int, ...]:
        return isinstance(value, list) and all(type(item) is int for item in value)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind in (int, str, bool, Experts):
        return type(value) is kind
    return True


_LLADA_8B = ModelConfig(
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

_QWEN2_7B = ModelConfig(
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

# Dream is Qwen2.5-7B with full attention and a mask token; its trained context is 2048 whatever its config.json says.
_DREAM_7B = _QWEN2_7B.replace(family="dream", attention="bidirectional", mask_id=151666, bos_id=151665, max_length=2048)

_LLADA_MOE_7B = ModelConfig(
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

PUBLISHED: Mapping[str, ModelConfig] = types.MappingProxyType(
    {
        "llada-8b-base": _LLADA_8B,
        "llada-8b-instruct": _LLADA_8B,
        "llada-1.5": _LLADA_8B,
        "llada-moe-7b-a1b-base": _LLADA_MOE_7B,
        "llada-moe-7b-a1b-instruct": _LLADA_MOE_7B,
        "dream-7b-base": _DREAM_7B,
        "dream-7b-instruct": _DREAM_7B,
        "qwen2.5-0.5b": _QWEN2_7B.replace(
            vocab_size=151936,
            embed_dim=896,
            num_layers=24,
            num_heads=14,
            num_kv_heads=2,
            head_dim=64,
            mlp_dim=4864,
            tied_embeddings=True,
        ),
        "qwen2.5-1.5b": _QWEN2_7B.replace(
            vocab_size=151936,
            embed_dim=1536,
            num_heads=12,
            num_kv_heads=2,
            mlp_dim=8960,
            tied_embeddings=True,
        ),
        "qwen2.5-7b": _QWEN2_7B,
    }
)


def published(name: str) -> ModelConfig:
    """The config of a published size by name, e.g. ``published("llada-8b-instruct")``.

    Raises:
        DllmError: for a name that is not in `PUBLISHED`; the sentence lists those that are.
    """
    if name not in PUBLISHED:
        raise DllmError(f"no published model is called {name!r}; choose one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
