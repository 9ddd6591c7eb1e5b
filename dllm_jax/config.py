"""Model configurations: one frozen dataclass for every family, and the published sizes by name."""

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal

from dllm_jax.errors import DllmError

Attention = Literal["bidirectional", "causal"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that tells one Transformer from another; hashable, so that jit can key on it.

    Letters used in shapes throughout the library: B batch, T query positions, S key positions (buffer length),
    N query heads, K key/value heads, H head dim, D model width, F feed-forward width, V vocabulary, W window.

    Attributes:
        family: checkpoint family, decides tensor names and the chat template ("llada", "dream", "qwen2").
        attention: which keys a query may see. "bidirectional" for dLLMs, "causal" for autoregressive verifiers.
        shift: True when raw logits at position i predict token i+1 (Dream, and every causal model); the
            `Denoiser` undoes it, nothing else ever looks at it.
        max_length: longest trained context, prompt and canvas together, in tokens.
        mask_id: the mask token, or None for a model that has none (an autoregressive verifier).
        end_ids: ids that end an answer: end of sequence, and end of turn where the family has one.
        dtype: dtype the published weights are stored in.
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
    tied_embeddings: bool = False
    dtype: str = "bfloat16"

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
        if self.attention not in ("bidirectional", "causal"):
            raise DllmError(f"attention {self.attention!r} is not implemented; use 'bidirectional' or 'causal'")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise DllmError(f"dtype {self.dtype!r} is not supported; use bfloat16, float16 or float32")
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
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - set(fields)):
            raise DllmError(f"{where} has unknown fields {unknown}; it was written by another version of dllm_jax")
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if missing := sorted(required - set(values)):
            raise DllmError(f"{where} lacks the fields {missing}; convert the checkpoint again")
        if not isinstance(values["end_ids"], list):
            raise DllmError(f"{where}: end_ids must be a list of token ids; convert the checkpoint again")
        for name, value in values.items():
            if not _has_type(value, fields[name].type):
                raise DllmError(f"{where}: {name} cannot be {value!r}; convert the checkpoint again")
        return cls(**{**values, "end_ids": tuple(values["end_ids"])})


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a JSON value may be that of a field; bool is no number here, and other fields check themselves."""
    if kind == tuple[int, ...]:
        return isinstance(value, list) and all(type(item) is int for item in value)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind in (int, str, bool):
        return type(value) is kind
    return kind != int | None or value is None or type(value) is int


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

PUBLISHED: Mapping[str, ModelConfig] = types.MappingProxyType(
    {
        "llada-8b-base": _LLADA_8B,
        "llada-8b-instruct": _LLADA_8B,
        "llada-1.5": _LLADA_8B,
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
