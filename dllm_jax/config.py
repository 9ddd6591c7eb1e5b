"""Model configurations: one frozen dataclass for every family."""

import dataclasses
import json
import math
import types
import typing
from typing import Any, Literal

from dllm_jax.errors import DllmError

Attention = Literal["bidirectional", "causal", "block", "causal-block", "canvas"]
RouterScore = Literal["softmax", "sigmoid"]
Quantize = Literal["int8", "int4"]


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of the feed-forward network (LLaDA-MoE, arXiv 2509.24389; LLaDA2, 2512.15745).

    Attributes:
        num_experts: E, the routed experts of a layer.
        per_token: how many of them each token goes to.
        dim: F, the hidden width of one routed expert.
        shared_dim: hidden width of the expert that every token goes to as well; None for none.
        expert_bias: a bias per expert is added to the router's scores: for the choice, and of a softmax in the weights
            too (LLaDA-MoE); a sigmoid's weights are those without it (LLaDA2).
        dense_layers: numbers of the layers that keep an ordinary feed-forward network of width `ModelConfig.mlp_dim`.
        score: what makes the router's products scores, over all experts or of each by itself.
        normalize: divide a token's weights by their sum.
        scale: of a token's weights after that.
        groups: runs of neighbouring experts of equal size, of which a token chooses within the best `top_groups`: those
            whose two best scores have the largest sum.
    """

    num_experts: int
    per_token: int
    dim: int
    shared_dim: int | None = None
    expert_bias: bool = False
    dense_layers: tuple[int, ...] = ()
    score: RouterScore = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "per_token", "dim", "shared_dim", "groups", "top_groups"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DllmError(f"config field experts.{name} is {value}; it must be a positive integer")
        if self.per_token > self.num_experts:
            raise DllmError(f"experts.per_token {self.per_token} exceeds experts.num_experts {self.num_experts}")
        if self.score not in ("softmax", "sigmoid"):
            raise DllmError(f"experts.score {self.score!r} is not implemented; use 'softmax' or 'sigmoid'")
        if not 0 < self.scale < math.inf:
            raise DllmError(f"experts.scale is {self.scale}; it must be a positive number")
        self._check_groups()
        if list(self.dense_layers) != sorted(set(self.dense_layers)):
            raise DllmError(f"experts.dense_layers {list(self.dense_layers)} must be increasing layer numbers")

    def _check_groups(self) -> None:
        if self.num_experts % self.groups or self.top_groups > self.groups:
            what = f"experts.groups {self.groups} (of which {self.top_groups} are taken)"
            raise DllmError(f"{what} do not fit {self.num_experts} experts; give equal groups, and no more than all")
        size = self.num_experts // self.groups
        if self.groups > 1 and (size < 2 or self.per_token > self.top_groups * size):
            raise DllmError(f"{self.top_groups} groups of {size} experts are too few for {self.per_token} per token")


@dataclasses.dataclass(frozen=True)
class Gemma:
    """What a Gemma 4 text stack has besides a `ModelConfig`, whose head_dim, num_kv_heads and rope_theta are those of
    its sliding layers (`dllm_jax/models/gemma.py`).

    Attributes:
        window: keys that a query of a sliding layer sees, its own and those before it.
        full_layers: numbers of the layers whose queries see everything, and whose keys are their values as well.
        head_dim, num_kv_heads, rope_theta: of these.
        rope_pairs: pairs of a head's dimensions that are turned in these, the first ones.
        softcap: logits z become softcap tanh(z / softcap).
    """

    window: int
    full_layers: tuple[int, ...]
    head_dim: int
    num_kv_heads: int
    rope_theta: float
    rope_pairs: int
    softcap: float

    def __post_init__(self) -> None:
        for name in ("window", "head_dim", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise DllmError(f"config field gemma.{name} is {getattr(self, name)}; it must be a positive integer")
        if self.head_dim % 2 or not 0 <= self.rope_pairs <= self.head_dim // 2:
            raise DllmError(f"gemma.rope_pairs {self.rope_pairs} does not fit heads of {self.head_dim} dimensions")
        for name in ("rope_theta", "softcap"):
            if not 0 < getattr(self, name) < math.inf:
                raise DllmError(f"config field gemma.{name} is {getattr(self, name)}; it must be a positive number")
        if list(self.full_layers) != sorted(set(self.full_layers)):
            raise DllmError(f"gemma.full_layers {list(self.full_layers)} must be increasing layer numbers")


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN's rotary frequencies (arXiv 2309.00071), and the query scale that Llama 4 and Ministral 3 have with them.

    A pair of dimensions that turns at most `beta_slow` times within the original length turns `factor` times slower,
    one that turns `beta_fast` times or more as before, and those between in between.

    Attributes:
        factor: how much longer positions may become; below 1 the slow pairs turn faster.
        original_length: O, positions that the model was trained on before.
        beta_fast, beta_slow: turns within O positions.
        attention_factor: cosines and sines are multiplied by it.
        query_scale: b; queries at position p are multiplied by 1 + b ln(1 + floor(p / O)). 0 for none.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    query_scale: float = 0.0

    def __post_init__(self) -> None:
        if self.original_length < 1:
            raise DllmError(f"config field yarn.original_length is {self.original_length}; it must be positive")
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise DllmError(f"config field yarn.{name} is {getattr(self, name)}; it must be a positive number")
        if not 0 <= self.query_scale < math.inf:
            raise DllmError(f"config field yarn.query_scale is {self.query_scale}; it must not be negative")


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Rotary frequencies of Llama 3.1 and later, as its reference code stretches them.

    A pair of dimensions that turns at most `low_frequency` times within the original length turns `factor` times
    slower, one that turns `high_frequency` times or more as before, and those between in between.

    Attributes:
        factor: how much longer positions may become.
        original_length: O, positions that the model was trained on before.
        low_frequency, high_frequency: turns within O positions, the first one below the second.
    """

    factor: float
    original_length: int
    low_frequency: float = 1.0
    high_frequency: float = 4.0

    def __post_init__(self) -> None:
        if self.original_length < 1 or not 0 < self.factor < math.inf:
            raise DllmError(f"config field llama3 is {self}; factor and original_length must be positive")
        if not 0 < self.low_frequency < self.high_frequency < math.inf:
            raise DllmError(f"config field llama3 is {self}; low_frequency must be positive and below high_frequency")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything in which Transformers differ; hashable, so that jit can key on it.

    Letters used in shapes throughout the library: B batch, T query positions, S key positions (buffer length),
    N query heads, K key/value heads, H head dim, D model width, F feed-forward width, V vocabulary, W window,
    E experts.

    Attributes:
        family: a key of `dllm_jax.families.FAMILIES`, whose record has tensor names and the chat template.
        attention: which keys a query may see. "bidirectional" for dLLMs, "causal" for autoregressive verifiers, "block"
            for block diffusion: those of its own block and of all before, blocks counted from position 0.
            "causal-block" for block diffusion over a causal context: the caller says per position what it sees, all up
            to itself where tokens are read, or the whole block where one is drafted; blocks begin anywhere. "canvas"
            for an encoder that is causal, and a decoder whose queries see all it has read and their canvas.
        block_length: of "block" and "causal-block" attention, or of a canvas, as the model was trained; None for
            others.
        shift: True when raw logits at position i predict token i+1 (Dream, and every causal model); the
            `Denoiser` undoes it, and only it reads this field.
        max_length: longest trained context, prompt and canvas together, in tokens.
        mask_id: the mask token, or None for a model that has none (an autoregressive verifier).
        end_ids: ids that end an answer: end of sequence, and end of turn where the family has one.
        mlp_dim: width of the feed-forward network; of a mixture of experts, that of its dense layers.
        rope_dim: leading dimensions of a head that are rotated, the others carry no position; None for all.
        yarn, llama3: how the rotary frequencies are stretched, in one of these ways; None for plain ones.
        clip_qkv: queries and keys (after their norm) and values are clamped to +- clip_qkv; None for no limit.
        experts: the mixture of experts that replaces the feed-forward networks, or is added to those of `gemma`; None
            for a dense model.
        gemma: what makes the layers Gemma 4's, used as encoder and as decoder; None for all others.
        dtype: what the model computes in, and its weights are stored in; `dllm_jax.load` gives another.
        quantize: what the kernels are quantized to (`dllm_jax.params.specs.forms` says which how); None for plain ones.
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
    block_length: int | None = None
    rope_dim: int | None = None
    yarn: Yarn | None = None
    llama3: Llama3Rope | None = None
    shift: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    clip_qkv: float | None = None
    tied_embeddings: bool = False
    experts: Experts | None = None
    gemma: Gemma | None = None
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
        if self.rope_dim is not None and (self.rope_dim % 2 or not 2 <= self.rope_dim <= self.head_dim):
            raise DllmError(f"rope_dim is {self.rope_dim}; it must be an even number up to head_dim {self.head_dim}")
        if self.yarn is not None and self.llama3 is not None:
            raise DllmError("config fields yarn and llama3 both stretch the rotary frequencies; give one of them")
        if self.clip_qkv is not None and not self.clip_qkv > 0:
            raise DllmError(f"clip_qkv is {self.clip_qkv}; it must be a positive number, or None")
        if self.experts and self.experts.dense_layers and not self.experts.dense_layers[-1] < self.num_layers:
            raise DllmError(f"experts.dense_layers names layer {self.experts.dense_layers[-1]} of {self.num_layers}")
        if self.experts and self.experts.dense_layers and self.experts.dense_layers[0] < 0:
            raise DllmError(f"experts.dense_layers names layer {self.experts.dense_layers[0]}; layers start at 0")
        if self.attention not in typing.get_args(Attention):
            known = ", ".join(typing.get_args(Attention))
            raise DllmError(f"attention {self.attention!r} is not implemented; use one of {known}")
        if (self.attention in ("block", "causal-block", "canvas")) != (self.block_length is not None):
            raise DllmError(f"block_length is {self.block_length} with {self.attention} attention; it is for 'block'")
        if self.block_length is not None and self.block_length < 1:
            raise DllmError(f"config field block_length is {self.block_length}; it must be a positive integer")
        self._check_gemma()
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise DllmError(f"dtype {self.dtype!r} is not supported; use bfloat16, float16 or float32")
        check_quantize(self.quantize)
        for name, value in self.special_ids().items():
            if not 0 <= value < self.vocab_size:
                raise DllmError(f"{name} {value} lies outside the vocabulary of {self.vocab_size} tokens")

    def _check_gemma(self) -> None:
        gemma = self.gemma
        if (gemma is not None) != self.has_canvas:
            raise DllmError(f"{self.attention} attention with gemma = {gemma}; the two belong together")
        if gemma is None:
            return
        if self.mask_id is not None:
            raise DllmError(f"mask_id is {self.mask_id}; a canvas of random tokens has no mask token")
        if self.experts is None or self.experts != Experts(
            self.experts.num_experts, self.experts.per_token, self.experts.dim, normalize=True
        ):
            raise DllmError(f"the layers of gemma have experts with normalized weights, not {self.experts}")
        if gemma.full_layers and not 0 <= gemma.full_layers[0] <= gemma.full_layers[-1] < self.num_layers:
            raise DllmError(f"gemma.full_layers {list(gemma.full_layers)} are not among {self.num_layers} layers")
        if self.num_heads % gemma.num_kv_heads:
            raise DllmError(f"num_heads {self.num_heads} is no multiple of gemma.num_kv_heads {gemma.num_kv_heads}")

    @property
    def is_causal(self) -> bool:
        """Whether a query sees only what is before it: an autoregressive model, which can verify."""
        return self.attention == "causal"

    @property
    def has_blocks(self) -> bool:
        """Whether a query sees its own block and those before it: block diffusion."""
        return self.attention == "block"

    @property
    def has_causal_context(self) -> bool:
        """Whether blocks are drafted over tokens that are read causally, and one set of weights does both:
        Nemotron-Labs-Diffusion."""
        return self.attention == "causal-block"

    @property
    def has_canvas(self) -> bool:
        """Whether a decoder writes a canvas after what a causal encoder has read: DiffusionGemma."""
        return self.attention == "canvas"

    def heads_of(self, layer: int) -> tuple[int, int]:
        """A layer's number of heads of keys and values, and the size of a head."""
        if self.gemma is not None and layer in self.gemma.full_layers:
            return self.gemma.num_kv_heads, self.gemma.head_dim
        return self.num_kv_heads, self.head_dim

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
        for name, kind in (("experts", Experts), ("gemma", Gemma), ("yarn", Yarn), ("llama3", Llama3Rope)):
            if isinstance(values.get(name), dict):
                values[name] = kind(**_check_fields(kind, values[name], f"{where}: {name}"))
        return cls(**_check_fields(cls, values, where))


def check_quantize(quantize: object) -> None:
    """Raises DllmError for what is no `ModelConfig.quantize`."""
    if quantize not in (None, "int8", "int4"):
        raise DllmError(f"quantize {quantize!r} is not supported; use int8 or int4")


def _check_fields(cls: Any, values: dict[str, Any], where: str) -> dict[str, Any]:
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
    if kind in (int, str, bool, Experts, Gemma, Yarn):
        return type(value) is kind
    return True
