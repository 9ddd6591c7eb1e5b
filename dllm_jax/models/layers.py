"""What layers are made of: parameters and their specs, linear maps, norms, rotary embeddings, attention and SwiGLU.

Modules are Flax NNX, used as plain pytrees (`dllm_jax.models.transformer`). Shape letters are those of `ModelConfig`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from dllm_jax.config import Llama3Rope, ModelConfig, Yarn
from dllm_jax.kernels.attention import attention, attention_in_blocks
from dllm_jax.models.kv_cache import LayerKV, scatter_rows, write_rows
from dllm_jax.parallel.layout import LayoutLike, LogicalAxes, apart_on_cuda
from dllm_jax.params.products import ACTIVATIONS, Activation, in_float32, product, product_of_sums, sums

Norm = Callable[[jax.Array], jax.Array]

PRODUCT_FROM = 256
"""Positions from which TPUs rotate by a product: by the compiler's estimate a v5e's window of 32 is 5% slower so."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What a parameter is.

    Attributes:
        shape: of the array.
        axes: logical axis name per dimension; None is never split.
        init: initialiser, "normal", "ones" or "zeros".
        shared: the axis that a quantized one's scales are shared along; None for one that is never quantized.
        keep_float32: it is stored as float32 whatever the model's dtype.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str
    shared: int | None
    keep_float32: bool = False

    def stored_dtype(self, dtype: jnp.dtype | str) -> jnp.dtype:
        """Its dtype in checkpoints and in memory, of a model whose dtype is `dtype`."""
        return jnp.dtype(jnp.float32 if self.keep_float32 else dtype)


def param(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: str = "normal",
    shared: int | None = None,
    keep_float32: bool = False,
) -> nnx.Param:
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    return nnx.Param(like, axes=axes, init=init, shared=shared, keep_float32=keep_float32)


class Linear(nnx.Module):
    """y = x W + b with W [in, out] any `Kernel`; computes in the dtype of x, y in `dtype` if that is another."""

    def __init__(self, in_dim: int, out_dim: int, axes: tuple[str, str], *, bias: bool = False):
        self.kernel = param((in_dim, out_dim), axes, shared=0)
        self.bias = param((out_dim,), axes[1:], "zeros") if bias else None

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        y = product(x, self.kernel.get_value(), dtype)
        return y if self.bias is None else in_float32(jnp.add, y, self.bias[...])


class RMSNorm(nnx.Module):
    """x / rms(x) in float32, cast to the model's dtype, *then* scaled: the order of all families."""

    def __init__(self, config: ModelConfig, dim: int, axis: str = "embed"):
        self.scale = param((dim,), (axis,), "ones")
        self.eps, self.dtype = config.norm_eps, config.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        return in_float32(jnp.multiply, unit(x, self.eps).astype(self.dtype), self.scale[...])


def unit(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) in float32, over the last axis."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class Rope(NamedTuple):
    """The rotary embedding of a layer: how many dimensions of a head are its, the base of its frequencies, how many of
    the pairs of dimensions turn, the first ones, the others having angle 0 (proportional RoPE), None for all; and how
    the frequencies are stretched."""

    dim: int
    theta: float
    turned: int | None = None
    yarn: Yarn | None = None
    llama3: Llama3Rope | None = None


class Turn(NamedTuple):
    """What turns the heads of positions: cos and sin of the rotary angles, float32 [B, T, 1, H/2] each, and what
    queries are multiplied by after that, float32 [B, T, 1, 1]; None for nothing."""

    cos: jax.Array
    sin: jax.Array
    query_scale: jax.Array | None = None


def rope_frequencies(rope: Rope) -> jax.Array:
    """The angle by which each pair of dimensions turns from one position to the next, [H/2] float32."""
    frequency = rope.theta ** (-jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim)
    pair = jnp.arange(rope.dim // 2, dtype=jnp.float32)
    if rope.turned is not None:
        frequency = jnp.where(pair < rope.turned, frequency, 0.0)
    if (yarn := rope.yarn) is not None:
        turning = lambda turns: (  # the pair that turns so often within the original length
            rope.dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )
        low = max(math.floor(turning(yarn.beta_fast)), 0)
        high = min(math.ceil(turning(yarn.beta_slow)), rope.dim - 1)
        slow = jnp.clip((pair - low) / (high - low if high > low else 0.001), 0.0, 1.0)
        frequency = frequency * (1.0 - slow) + frequency / yarn.factor * slow
    if (llama3 := rope.llama3) is not None:
        turns = llama3.original_length * frequency / (2 * math.pi)
        fast = (turns - llama3.low_frequency) / (llama3.high_frequency - llama3.low_frequency)
        fast = jnp.clip(fast, 0.0, 1.0)
        frequency = frequency / llama3.factor * (1.0 - fast) + frequency * fast
    return frequency


def rope_angles(positions: jax.Array, rope: Rope) -> Turn:
    """What turns the heads of positions [B, T]."""
    angle = positions.astype(jnp.float32)[..., None, None] * rope_frequencies(rope)  # no matmul: exact positions
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if (yarn := rope.yarn) is None:
        return Turn(cos, sin)
    scale = None
    if yarn.query_scale:
        times = (positions // yarn.original_length).astype(jnp.float32)[..., None, None]
        scale = 1.0 + yarn.query_scale * jnp.log1p(times)
    return Turn(cos * yarn.attention_factor, sin * yarn.attention_factor, scale)


def rope_table(positions: jax.Array, length: int, rope: Rope) -> Turn:
    """`rope_angles` of positions within `length`, on CPU looked up: left to itself the compiler computes cosines where
    they are used, in every layer and for every head."""
    angles = lambda positions: rope_angles(positions, rope)

    def look_up(positions: jax.Array) -> Turn:
        return jax.tree.map(lambda table: table[0][positions], angles(jnp.arange(length, dtype=jnp.int32)[None]))

    found: Turn = jax.lax.platform_dependent(positions, cpu=look_up, default=angles)
    return found


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding in the half-split convention, in float32, cast back: [B, T, N, H] -> [B, T, N, H]; of as many
    leading dimensions as there are angles, the others stay as they are."""
    if (size := 2 * cos.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], cos, sin), x[..., size:]], axis=-1)
    if x.shape[1] < PRODUCT_FROM:
        return _rotate_halves(x, cos, sin)
    return jax.lax.platform_dependent(x, cos, sin, tpu=_rotate_by_product, default=_rotate_halves)


def _rotate_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _rotate_by_product(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The same numbers on TPU, where halves of a head are halves of a register's lanes, which are costly to take apart:
    (-second, first) by a product with a matrix of one 1 or -1 in every column, exact, and three times as fast."""
    half = x.shape[-1] // 2
    turn = jnp.eye(2 * half, k=half, dtype=x.dtype) - jnp.eye(2 * half, k=-half, dtype=x.dtype)
    turned = jnp.matmul(x, turn, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    twice = lambda x: jnp.concatenate([x, x], axis=-1)
    return (x.astype(jnp.float32) * twice(cos) + turned * twice(sin)).astype(x.dtype)


class Place(NamedTuple):
    """Where the inputs of a forward lie in the key/value buffers.

    Attributes:
        at: buffer position of the first input that is written, the others following it, [B] int32; or that of every
            input that is written, [B, T - skip].
        skip: number of leading inputs that read the buffers but leave their own entry as it was.
        write: [B, T - skip] bool, which of the others are written; None for all.
    """

    at: jax.Array
    skip: int = 0
    write: jax.Array | None = None

    def put(self, buffer: jax.Array, new: jax.Array) -> jax.Array:
        """The buffer [B, S, ...] with what the inputs [B, T, ...] write."""
        new = new[:, self.skip :].astype(buffer.dtype)
        return (write_rows if self.at.ndim == 1 else scatter_rows)(buffer, new, self.at, self.write)


class Tile(NamedTuple):
    """A piece of the vocabulary, seen as [parts, V / parts]: entries [start, start + width) of every part, which must
    lie within it. Its ids are `part * (V // parts) + start + j`, in rising order.

    Attributes:
        start: first entry, a number or a traced scalar int32.
        width: how many of every part.
    """

    start: int | jax.Array
    width: int


def tile_of(table: jax.Array, axis: int, tile: Tile | None, parts: int) -> jax.Array:
    """The tile's entries of an array whose `axis` is the vocabulary in `parts`; all where `tile` is None or whole."""
    size = table.shape[axis] // parts
    if tile is None or tile.width == size:
        return table
    before, after = table.shape[:axis], table.shape[axis + 1 :]
    split = table.reshape(*before, parts, size, *after)
    cut = jax.lax.dynamic_slice_in_dim(split, tile.start, tile.width, axis + 1)
    return cut.reshape(*before, parts * tile.width, *after)


class SelfAttention(nnx.Module):
    """Grouped-query attention; queries of the inputs against the inputs' keys or against static buffers.

    Attributes:
        v_proj: None where the values are the keys before their norm.
        rope: how queries and keys are turned.
        window: keys that a query sees, its own and those before it; None for all.
    """

    def __init__(self, config: ModelConfig):
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.embed_dim, queries, ("embed", "heads"), bias=config.qkv_bias)
        self.k_proj = Linear(config.embed_dim, keys, ("embed", "kv_heads"), bias=config.qkv_bias)
        self.v_proj: Linear | None = Linear(config.embed_dim, keys, ("embed", "kv_heads"), bias=config.qkv_bias)
        self.o_proj = Linear(queries, config.embed_dim, ("heads", "embed"))
        self.q_norm = RMSNorm(config, config.head_dim, "head_dim") if config.qk_norm else None
        self.k_norm = RMSNorm(config, config.head_dim, "head_dim") if config.qk_norm else None
        self.v_norm: Norm | None = None
        self.head_dim, self.clip, self.block_length = config.head_dim, config.clip_qkv, config.block_length
        size = config.rope_dim or config.head_dim
        self.rope = Rope(size, config.rope_theta, yarn=config.yarn, llama3=config.llama3)
        self.window: int | None = None

    def heads(self, x: jax.Array, norm: Norm | None) -> jax.Array:
        x = x.reshape(*x.shape[:-1], -1, self.head_dim)
        x = x if norm is None else norm(x)
        return x if self.clip is None else jnp.clip(x, -self.clip, self.clip)

    def keys_values(
        self, x: jax.Array, turn: Turn, layout: LayoutLike | None = None, *, pinned: bool = True
    ) -> LayerKV:
        # Of products of one array with several kernels CUDA's compiler makes one with all of them side by side, and to
        # have them so it copies the weights in every forward.
        x = apart_on_cuda(x)
        ordered = functools.partial(in_order, axis="kv_heads", layout=layout, pinned=pinned)
        key = value = ordered(self.k_proj(x))
        if self.v_proj is not None:
            x, key = apart_on_cuda((x, key))
            value = ordered(self.v_proj(x))
        key, value = self.heads(key, self.k_norm), self.heads(value, self.v_norm)
        return LayerKV(rotate(key, turn.cos, turn.sin), value)  # [B, T, K, H] each

    def attend(
        self,
        x: jax.Array,
        turn: Turn,
        kv: LayerKV,
        visible: jax.Array,
        layout: LayoutLike | None = None,
        before: LayerKV | None = None,
        since: jax.Array | None = None,
        causal: bool = False,
        *,
        pinned: bool = True,
    ) -> jax.Array:
        query = self.heads(in_order(self.q_proj(x), "heads", layout, pinned), self.q_norm)
        query = rotate(query, turn.cos, turn.sin)  # [B, T, N, H]
        if turn.query_scale is not None:
            query = query * turn.query_scale.astype(query.dtype)  # rounded before the product, as published code does
        if before is None:
            out = attention(query, kv.key, kv.value, visible, layout, since, causal=causal)
        else:
            assert self.block_length is not None
            out = attention_in_blocks(query, kv, before, visible, self.block_length, layout, since)
        return self.o_proj(out.reshape(*x.shape[:-1], -1), sums(x.dtype))


def in_order(x: jax.Array, axis: str, layout: LayoutLike | None, pinned: bool) -> jax.Array:
    """x [B, T, logical axis], on TPU, if `pinned`, with its axes in memory as they are written: left to itself the
    compiler wants heads before positions, and to get them so from the product it transposes the kernel, in every step
    of a generation. Where a step has more positions than the kernel has rows, that costs less than the other order."""
    if not pinned:
        return x
    pin = _in_memory((0, 1, 2), ("batch", None, axis), layout)
    return jax.lax.platform_dependent(x, tpu=pin, default=lambda x: x)


def heads_first(x: jax.Array, layout: LayoutLike | None, platforms: Sequence[str]) -> jax.Array:
    """Keys or values [B, S, K, H], on these platforms with heads before positions in memory, as kernels of attention
    want them: where full and window forwards disagree, the loop around both copies all buffers in every step."""
    pin = _in_memory((0, 2, 1, 3), ("batch", None, "kv_heads", None), layout)
    return jax.lax.platform_dependent(x, **dict.fromkeys(platforms, pin), default=lambda x: x)


def _in_memory(
    order: tuple[int, ...], axes: LogicalAxes, layout: LayoutLike | None
) -> Callable[[jax.Array], jax.Array]:
    """Pins the order of an array's axes in memory, the last one fastest."""
    pin = lambda x: with_layout_constraint(x, MemoryLayout(order))
    return pin if layout is None else layout.locally(pin, [axes], axes)  # the partitioner would gather what is pinned


class MLP(nnx.Module):
    """SwiGLU, or GeGLU: down(activation(gate(x)) * up(x)), in the `sums` of the dtype of x."""

    def __init__(self, dim: int, width: int, activation: Activation = "silu"):
        self.gate_proj = Linear(dim, width, ("embed", "mlp"))
        self.up_proj = Linear(dim, width, ("embed", "mlp"))
        self.down_proj = Linear(width, dim, ("mlp", "embed"))
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = ACTIVATIONS[self.activation](self.gate_proj(x, sums(x.dtype))) * self.up_proj(x, sums(x.dtype))
        return product_of_sums(hidden, self.down_proj.kernel.get_value(), x.dtype)
