"""The one backbone: RMSNorm, RoPE, grouped-query attention, SwiGLU or a mixture of experts; every family is a config.

Modules are Flax NNX, used as plain pytrees: built without arrays (`nnx.Param` holds a `jax.ShapeDtypeStruct`), filled
from a flat dict by `bind`, and only ever read. No mutable state, no `nnx.jit`, so they work inside `lax` loops, `vmap`
and other people's jit. Shape letters are those of `ModelConfig`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from dllm_jax.attention import attention
from dllm_jax.config import Experts, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.kernels import of_outputs, product, product_of_sums, rows, sums
from dllm_jax.kv_cache import KVCache, LayerKV, scatter_rows, slice_rows, write_rows
from dllm_jax.layout import Layout, LogicalAxes, apart_on_cuda
from dllm_jax.moe import apply_experts

Params = Mapping[str, Any]  # arrays, and what stands for a kernel (`dllm_jax.kernels.Kernel`)
RematPolicy = Callable[..., bool]

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
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str
    shared: int | None


def _param(
    shape: tuple[int, ...], axes: tuple[str | None, ...], init: str = "normal", shared: int | None = None
) -> nnx.Param:
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes, init=init, shared=shared)


class Linear(nnx.Module):
    """y = x W + b with W [in, out] any `Kernel`; computes in the dtype of x, y in `dtype` if that is another."""

    def __init__(self, in_dim: int, out_dim: int, axes: tuple[str, str], *, bias: bool = False):
        self.kernel = _param((in_dim, out_dim), axes, shared=0)
        self.bias = _param((out_dim,), axes[1:], "zeros") if bias else None

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        y = product(x, self.kernel.get_value(), dtype)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) in float32, cast to the scale's dtype, that of products, *then* scaled: the order of all families."""

    def __init__(self, dim: int, eps: float, axis: str = "embed"):
        self.scale = _param((dim,), (axis,), "ones")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...]
        return unit.astype(scale.dtype) * scale


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the rotary angles in float32: [B, T] -> two [B, T, 1, H/2] arrays."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency  # a product, not a matmul: exact positions
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding in the half-split convention, in float32, cast back: [B, T, N, H] -> [B, T, N, H]."""
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


class SelfAttention(nnx.Module):
    """Grouped-query attention; queries of the inputs against the inputs' keys or against static buffers."""

    def __init__(self, config: ModelConfig):
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.embed_dim, queries, ("embed", "heads"), bias=config.qkv_bias)
        self.k_proj = Linear(config.embed_dim, keys, ("embed", "kv_heads"), bias=config.qkv_bias)
        self.v_proj = Linear(config.embed_dim, keys, ("embed", "kv_heads"), bias=config.qkv_bias)
        self.o_proj = Linear(queries, config.embed_dim, ("heads", "embed"))
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, "head_dim") if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, "head_dim") if config.qk_norm else None
        self.head_dim, self.clip = config.head_dim, config.clip_qkv

    def heads(self, x: jax.Array, norm: RMSNorm | None) -> jax.Array:
        x = x.reshape(*x.shape[:-1], -1, self.head_dim)
        x = x if norm is None else norm(x)
        return x if self.clip is None else jnp.clip(x, -self.clip, self.clip)

    def keys_values(self, x: jax.Array, cos: jax.Array, sin: jax.Array, layout: Layout | None = None) -> LayerKV:
        # Of products of one array with several kernels CUDA's compiler makes one with all of them side by side, and to
        # have them so it copies the weights in every forward.
        x = apart_on_cuda(x)
        key = _in_order(self.k_proj(x), "kv_heads", layout)
        x, key = apart_on_cuda((x, key))
        value = _in_order(self.v_proj(x), "kv_heads", layout)
        return LayerKV(rotate(self.heads(key, self.k_norm), cos, sin), self.heads(value, None))  # [B, T, K, H] each

    def attend(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        kv: LayerKV,
        visible: jax.Array,
        layout: Layout | None = None,
    ) -> jax.Array:
        query = self.heads(_in_order(self.q_proj(x), "heads", layout), self.q_norm)
        query = rotate(query, cos, sin)  # [B, T, N, H]
        out = attention(query, kv.key, kv.value, visible, layout)
        return self.o_proj(out.reshape(*x.shape[:-1], -1), sums(x.dtype))


def _rope(positions: jax.Array, length: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """`rope_angles` of positions within `length`, on CPU looked up: left to itself the compiler computes cosines where
    they are used, in every layer and for every head."""
    angles = lambda positions: rope_angles(positions, head_dim, theta)

    def looked_up(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        cos, sin = (table[0][positions] for table in angles(jnp.arange(length, dtype=jnp.int32)[None]))
        return cos, sin

    return jax.lax.platform_dependent(positions, cpu=looked_up, default=angles)


def _in_order(x: jax.Array, axis: str, layout: Layout | None) -> jax.Array:
    """x [B, T, logical axis], on TPU with its axes in memory as they are written: left to itself the compiler wants
    heads before positions, and to get them so from the product it transposes the kernel in every step of a generation.
    """
    pin = _in_memory((0, 1, 2), ("batch", None, axis), layout)
    return jax.lax.platform_dependent(x, tpu=pin, default=lambda x: x)


def _heads_first(x: jax.Array, layout: Layout | None, platforms: Sequence[str]) -> jax.Array:
    """Keys or values [B, S, K, H], on these platforms with heads before positions in memory, as kernels of attention
    want them: where full and window forwards disagree, the loop around both copies all buffers in every step."""
    pin = _in_memory((0, 2, 1, 3), ("batch", None, "kv_heads", None), layout)
    return jax.lax.platform_dependent(x, **dict.fromkeys(platforms, pin), default=lambda x: x)


def _in_memory(order: tuple[int, ...], axes: LogicalAxes, layout: Layout | None) -> Callable[[jax.Array], jax.Array]:
    """Pins the order of an array's axes in memory, the last one fastest."""
    pin = lambda x: with_layout_constraint(x, MemoryLayout(order))
    return pin if layout is None else layout.locally(pin, [axes], axes)  # the partitioner would gather what is pinned


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), in the `sums` of the dtype of x."""

    def __init__(self, dim: int, width: int):
        self.gate_proj = Linear(dim, width, ("embed", "mlp"))
        self.up_proj = Linear(dim, width, ("embed", "mlp"))
        self.down_proj = Linear(width, dim, ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(self.gate_proj(x, sums(x.dtype))) * self.up_proj(x, sums(x.dtype))
        return product_of_sums(hidden, self.down_proj.kernel.get_value(), x.dtype)


class MoE(nnx.Module):
    """Mixture of SwiGLU experts: every token through its best `per_token` experts, none dropped (LLaDA-MoE).

    `w_in` [E, 2, D, F] holds each expert's gate and up projections, `w_out` [E, F, D] the way back. The axis of two is
    of its own so that a split of F leaves both halves of a hidden unit on one device; it is no part of a matrix, whose
    tiles in a TPU's memory are those of its last two axes.
    """

    def __init__(self, config: ModelConfig, experts: Experts):
        count, dim, width = experts.num_experts, config.embed_dim, experts.dim
        # Not split over the experts' axis: every device ranks all experts.
        self.router = _param((dim, count), ("embed", None))
        self.bias = _param((count,), (None,), "zeros") if experts.expert_bias else None
        self.w_in = _param((count, 2, dim, width), ("expert", None, "embed", "mlp"), shared=2)
        self.w_out = _param((count, width, dim), ("expert", "mlp", "embed"), shared=1)
        self.shared = MLP(dim, experts.shared_dim) if experts.shared_dim else None
        self.per_token = experts.per_token

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each token's experts, best first: [B, T, D] -> weights [B, T, per_token] float32, and their ids.

        In float32 throughout, whatever the parameters' dtype: rounded scores swap experts that nearly tie.
        """
        router = self.router[...].astype(jnp.float32)
        scores = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
        scores = jax.nn.softmax(scores, axis=-1)
        if self.bias is not None:
            scores = scores + self.bias[...].astype(jnp.float32)
        return jax.lax.top_k(scores, self.per_token)

    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        weights, ids = self.route(x)
        y = apply_experts(x, ids, weights.astype(x.dtype), self.w_in.get_value(), self.w_out.get_value(), layout)
        return y if self.shared is None else y + self.shared(x)


class Layer(nnx.Module):
    """Pre-norm attention and feed-forward (or mixture of experts), each with a residual connection."""

    def __init__(self, config: ModelConfig, index: int):
        self.attn_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.attn = SelfAttention(config)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.mlp: MLP | MoE
        if config.experts is None or index in config.experts.dense_layers:
            self.mlp = MLP(config.embed_dim, config.mlp_dim)
        else:
            self.mlp = MoE(config, config.experts)

    def feed_forward(self, x: jax.Array, layout: Layout | None) -> jax.Array:
        """[B, T, D] -> [B, T, D] in the `sums` of the dtype of x."""
        return self.mlp(x, layout) if isinstance(self.mlp, MoE) else self.mlp(x)


class Embedding(nnx.Module):
    """The input embedding table [V, D]."""

    def __init__(self, config: ModelConfig):
        self.embedding = _param((config.vocab_size, config.embed_dim), ("vocab", "embed"), shared=1)


class Transformer(nnx.Module):
    """The backbone. `forward` gives hidden states before the final norm, `logits` scores those that are needed."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embed = Embedding(config)
        self.layers = nnx.List([Layer(config, index) for index in range(config.num_layers)])
        self.final_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.lm_head = (
            None if config.tied_embeddings else Linear(config.embed_dim, config.vocab_size, ("embed", "vocab"))
        )

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """[B, T] int32 -> [B, T, D] in the dtype of products."""
        return rows(self.embed.embedding.get_value(), tokens, self.final_norm.scale[...].dtype)

    def forward(
        self,
        x: jax.Array,
        positions: jax.Array,
        visible: jax.Array,
        *,
        kv: KVCache | None = None,
        place: Place | None = None,
        outputs: tuple[jax.Array, int] | None = None,
        remat: RematPolicy | None = None,
        layout: Layout | None = None,
        scan: bool = False,
    ) -> tuple[jax.Array, KVCache]:
        """Runs all layers over embedded inputs.

        Args:
            x: inputs [B, T, D].
            positions: absolute positions of the inputs [B, T] int32.
            visible: [B, T] or [B, 1] int32: input t of row b sees the keys at [0, visible[b, t]).
            kv: key/value buffers of S positions to attend to; None makes the inputs the whole sequence (S = T).
            place: where the inputs sit in `kv`; given exactly when `kv` is.
            outputs: (first [B], width): return only the hidden states of inputs first[b] .. first[b] + width - 1. The
                last layer then computes no query and no feed-forward for the others.
            remat: for training, what of each layer is kept for the backward pass besides its input, the rest being
                computed again (see `jax.checkpoint_policies`); None keeps everything.
            layout: how the parameters lie on a mesh; None for one device, and where the caller places everything.
            scan: for training, make layers that are alike one loop, which compiles as fast as one layer, and for which
                their kernels are copied side by side. Without `kv` and `outputs` only; beside them it does nothing.

        Returns:
            Hidden states before the final norm [B, T or width, D], in the `sums` of the dtype of x, and the keys and
            values: the updated buffers, or without any those of the inputs.
        """
        x = x.astype(sums(x.dtype))
        keys = x.shape[1] if kv is None else kv[0].key.shape[1]
        rope = _rope(positions, keys, self.config.head_dim, self.config.rope_theta)
        at, write = (None, None) if place is None else (place.at, place.write)
        static = {"skip": 0 if place is None else place.skip, "policy": remat, "layout": layout}
        new: list[LayerKV] = []
        if scan and kv is None and outputs is None:
            none = (None,) * 4
            step = lambda x, layer: _run_layer(layer, x, rope, visible, *none, width=0, **static)
            for run in self._alike():
                x, kvs = jax.lax.scan(step, x, jax.tree.map(lambda *each: jnp.stack(each), *run))
                new += [LayerKV(kvs.key[index], kvs.value[index]) for index in range(len(run))]
            return x, tuple(new)
        for index, layer in enumerate(self.layers):
            buffers = None if kv is None else kv[index]
            first, width = outputs if outputs is not None and index == self.config.num_layers - 1 else (None, 0)
            x, layer_kv = _run_layer(layer, x, rope, visible, buffers, at, write, first, width=width, **static)
            new.append(layer_kv)
        return x, tuple(new)

    def _alike(self) -> list[list[Layer]]:
        """The layers in runs of the same structure and shapes."""
        shapes = lambda layer: [(x.shape, x.dtype) for x in jax.tree.leaves(layer)]
        what = lambda layer: (jax.tree.structure(layer), shapes(layer))
        return [list(run) for _, run in itertools.groupby(self.layers, what)]

    def logits(self, hidden: jax.Array, tile: Tile | None = None, parts: int = 1) -> jax.Array:
        """Final norm and vocabulary head: [B, T, D] -> [B, T, V] float32.

        Args:
            tile: compute these entries of the vocabulary alone, [B, T, parts * width]; None computes all.
            parts: how many parts the tile sees the vocabulary as; must divide V.
        """
        if self.lm_head is None:
            rows_of = lambda x: tile_of(x, 0, tile, parts)
            kernel = jax.tree.map(lambda x: rows_of(x).T, self.embed.embedding.get_value())
        else:
            kernel = of_outputs(lambda x: tile_of(x, 1, tile, parts), self.lm_head.kernel.get_value())
        return product(self.final_norm(hidden), kernel, jnp.dtype(jnp.float32))


def tile_of(table: jax.Array, axis: int, tile: Tile | None, parts: int) -> jax.Array:
    """The tile's entries of an array whose `axis` is the vocabulary in `parts`; all where `tile` is None or whole."""
    size = table.shape[axis] // parts
    if tile is None or tile.width == size:
        return table
    before, behind = table.shape[:axis], table.shape[axis + 1 :]
    split = table.reshape(*before, parts, size, *behind)
    cut = jax.lax.dynamic_slice_in_dim(split, tile.start, tile.width, axis + 1)
    return cut.reshape(*before, parts * tile.width, *behind)


@functools.partial(jax.jit, static_argnames=("skip", "width", "policy", "layout"))
def _run_layer(
    layer: Layer,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    visible: jax.Array,
    buffers: LayerKV | None,
    at: jax.Array | None,
    write: jax.Array | None,
    first: jax.Array | None,
    *,
    skip: int,
    width: int,
    policy: RematPolicy | None,
    layout: Layout | None,
) -> tuple[jax.Array, LayerKV]:
    """One layer, with the arguments of `Transformer.forward`: its output, and its keys and values.

    Under `jit` so that equal layers are traced once: tracing 32 of them takes longer than compiling a small program.
    """

    def run(layer: Layer, x: jax.Array) -> tuple[jax.Array, LayerKV]:
        (cos, sin), seen = rope, visible
        y = layer.attn_norm(x)
        kv = layer.attn.keys_values(y, cos, sin, layout)
        if buffers is not None and at is not None:
            kv = LayerKV(*map(Place(at, skip, write).put, buffers, kv))
        pinned = ("tpu", "cuda") if buffers is None else ("cuda",)  # on TPU a window's follow the full forward's
        kv = LayerKV(*(_heads_first(part, layout, pinned) for part in kv))
        if first is not None:
            x, y, cos, sin = (slice_rows(part, first, width) for part in (x, y, cos, sin))
            seen = slice_rows(visible, first, width) if visible.shape[1] > 1 else visible
        x = x + layer.attn.attend(y, cos, sin, kv, seen, layout)
        return x + layer.feed_forward(layer.mlp_norm(x), layout), kv

    return (run if policy is None else jax.checkpoint(run, policy=policy))(layer, x)


@functools.lru_cache(maxsize=64)
def _skeleton(config: ModelConfig) -> tuple[nnx.GraphDef, dict[tuple, nnx.Param]]:
    graphdef, state = nnx.split(Transformer(config))
    return graphdef, dict(nnx.to_flat_state(state))


def _name(path: tuple) -> str:
    return ".".join(map(str, path))


def param_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Every parameter of the backbone by its flat name, e.g. ``layers.0.attn.q_proj.kernel``: the single list that
    initialisation, checkpoints, conversion and sharding work from."""
    _, params = _skeleton(config)
    return {
        _name(path): ParamSpec(
            param.get_value().shape, *(param.get_metadata(field) for field in ("axes", "init", "shared"))
        )
        for path, param in params.items()
    }


def bind(config: ModelConfig, params: Params) -> Transformer:
    """The module with the flat dict's arrays in it; free inside a trace, microseconds outside.

    Raises:
        DllmError: when names do not match the config.
    """
    graphdef, skeleton = _skeleton(config)
    names = {_name(path): path for path in skeleton}
    if names.keys() != params.keys():
        difference = sorted(names.keys() ^ params.keys())[:3]
        raise DllmError(f"parameters do not fit the {config.family} config: they differ in {difference} ...")
    state = [(path, skeleton[path].replace(params[name])) for name, path in names.items()]
    return nnx.merge(graphdef, nnx.from_flat_state(state))


def num_params(config: ModelConfig) -> int:
    """Number of parameters, e.g. 8_015_581_184 for LLaDA-8B."""
    total = 0
    for spec in param_specs(config).values():
        size = 1
        for dim in spec.shape:
            size *= dim
        total += size
    return total
