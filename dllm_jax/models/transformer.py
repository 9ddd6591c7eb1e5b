"""The one backbone: RMSNorm, RoPE, grouped-query attention, SwiGLU or a mixture of experts; every family is a config.

Modules are Flax NNX, used as plain pytrees: built without arrays (`nnx.Param` holds a `jax.ShapeDtypeStruct`), filled
from a flat dict by `bind`, and only ever read. No mutable state, no `nnx.jit`, so they work inside `lax` loops, `vmap`
and your own jit. Shape letters are those of `ModelConfig`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dllm_jax.config import Experts, ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.kernels.dispatch import asked_for
from dllm_jax.kernels.experts import apply_experts
from dllm_jax.models.gemma import GemmaLayer, SelfConditioning, WideNorm
from dllm_jax.models.kv_cache import KVCache, LayerKV, slice_rows
from dllm_jax.models.layers import (
    MLP,
    Linear,
    ParamSpec,
    Place,
    RMSNorm,
    SelfAttention,
    Tile,
    Turn,
    heads_first,
    param,
    rope_table,
    tile_of,
)
from dllm_jax.models.moe import Routing, routing_of
from dllm_jax.parallel.layout import LayoutLike
from dllm_jax.params.products import of_outputs, product, rows, sums

Params = Mapping[str, Any]  # arrays, and what stands for a kernel (`dllm_jax.params.products.Kernel`)
RematPolicy = Callable[..., bool]


class MoE(nnx.Module):
    """Mixture of SwiGLU experts: every token through its best `per_token` experts, none dropped (LLaDA-MoE, LLaDA2).

    `w_in` [E, 2, D, F] holds each expert's gate and up projections, `w_out` [E, F, D] the way back. The axis of two is
    of its own so that a split of F leaves both halves of a hidden unit on one device; it is no part of a matrix, whose
    tiles in a TPU's memory are those of its last two axes.
    """

    def __init__(self, config: ModelConfig, experts: Experts):
        count, dim, width = experts.num_experts, config.embed_dim, experts.dim
        # Not split over the experts' axis: every device ranks all experts.
        # A sigmoid's bias and products differ by little from expert to expert: rounded, other experts are chosen.
        keep = experts.score == "sigmoid"
        self.router = param((dim, count), ("embed", None), keep_float32=keep)
        self.bias = param((count,), (None,), "zeros", keep_float32=keep) if experts.expert_bias else None
        self.w_in = param((count, 2, dim, width), ("expert", None, "embed", "mlp"), shared=2)
        self.w_out = param((count, width, dim), ("expert", "mlp", "embed"), shared=1)
        self.shared = MLP(dim, experts.shared_dim) if experts.shared_dim else None
        self.experts = experts

    def scores(self, x: jax.Array) -> jax.Array:
        """The router's products: [B, T, D] -> [B, T, E] float32.

        In float32 throughout, whatever the parameters' dtype: rounded scores swap experts that nearly tie.
        """
        router = self.router[...].astype(jnp.float32)
        return jnp.einsum("btd,de->bte", x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)

    def route(self, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each token's experts, best first: `scores` [B, T, E] -> weights [B, T, per_token] float32, and their ids."""
        experts = self.experts
        scores = jax.nn.sigmoid(scores) if experts.score == "sigmoid" else jax.nn.softmax(scores, axis=-1)
        chosen_by = scores if self.bias is None else scores + self.bias[...].astype(jnp.float32)
        weights, ids = jax.lax.top_k(_within_groups(chosen_by, experts), experts.per_token)
        if experts.score == "sigmoid":
            weights = jnp.take_along_axis(scores, ids, axis=-1)
        if experts.normalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * experts.scale, ids

    def __call__(
        self, x: jax.Array, layout: LayoutLike | None = None, counted: jax.Array | None = None
    ) -> tuple[jax.Array, Routing | None]:
        """The experts' output [B, T, D], and how the tokens that are `counted` [B, T] bool were routed, if that is
        asked for."""
        scores = self.scores(x)
        weights, ids = self.route(scores)
        y = apply_experts(x, ids, weights.astype(x.dtype), self.w_in.get_value(), self.w_out.get_value(), layout)
        routing = None if counted is None else routing_of(scores, ids, counted)
        return (y if self.shared is None else y + self.shared(x)), routing


def _within_groups(scores: jax.Array, experts: Experts) -> jax.Array:
    """The routers' scores [B, T, E], -inf outside the groups that a token chooses within."""
    if experts.groups == 1:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], experts.groups, -1)
    best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(axis=-1), experts.top_groups)[1]  # [B, T, top_groups]
    taken = jnp.any(best[..., None] == jnp.arange(experts.groups), axis=-2)
    return jnp.where(taken[..., None], grouped, -jnp.inf).reshape(scores.shape)


class Layer(nnx.Module):
    """Pre-norm attention and feed-forward (or mixture of experts), each with a residual connection."""

    def __init__(self, config: ModelConfig, index: int):
        self.attn_norm = RMSNorm(config, config.embed_dim)
        self.attn = SelfAttention(config)
        self.mlp_norm = RMSNorm(config, config.embed_dim)
        self.mlp: MLP | MoE
        if config.experts is None or index in config.experts.dense_layers:
            self.mlp = MLP(config.embed_dim, config.mlp_dim)
        else:
            self.mlp = MoE(config, config.experts)

    def after_attention(
        self, x: jax.Array, attended: jax.Array, layout: LayoutLike | None, decoder: bool, counted: jax.Array | None
    ) -> tuple[jax.Array, Routing | None]:
        """The layer's output [B, T, D] from its input and what attention makes of it, in the `sums` of the dtype; and
        the routing of the tokens that are `counted`, of a layer with experts.

        Args:
            decoder: that of a Gemma layer; must be False.
        """
        assert not decoder
        x = x + attended
        y = self.mlp_norm(x)
        mixed, routing = self.mlp(y, layout, counted) if isinstance(self.mlp, MoE) else (self.mlp(y), None)
        return x + mixed, routing


class Embedding(nnx.Module):
    """The input embedding table [V, D]."""

    def __init__(self, config: ModelConfig):
        self.embedding = param((config.vocab_size, config.embed_dim), ("vocab", "embed"), shared=1)


class Transformer(nnx.Module):
    """The backbone. `forward` gives hidden states before the final norm, `logits` scores those that are needed."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embed = Embedding(config)
        gemma = config.gemma
        layer = lambda index: Layer(config, index) if gemma is None else GemmaLayer(config, gemma, index)
        self.layers = nnx.List([layer(index) for index in range(config.num_layers)])
        self.final_norm = (RMSNorm if gemma is None else WideNorm)(config, config.embed_dim)
        self.conditioning = None if gemma is None else SelfConditioning(config)
        self.lm_head = (
            None if config.tied_embeddings else Linear(config.embed_dim, config.vocab_size, ("embed", "vocab"))
        )

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """[B, T] int32 -> [B, T, D] in the model's dtype."""
        x = rows(self.embed.embedding.get_value(), tokens, jnp.dtype(self.config.dtype))
        return x if self.config.gemma is None else x * jnp.asarray(embedding_scale(self.config), x.dtype)

    def forward(
        self,
        x: jax.Array,
        positions: jax.Array,
        visible: jax.Array,
        *,
        kv: KVCache | None = None,
        place: Place | None = None,
        before: KVCache | None = None,
        outputs: tuple[jax.Array, int] | None = None,
        remat: RematPolicy | None = None,
        layout: LayoutLike | None = None,
        scan: bool = False,
        decoder: bool = False,
        counted: jax.Array | None = None,
        since: jax.Array | None = None,
        causal: bool = False,
    ) -> tuple[jax.Array, KVCache, Routing | None]:
        """Runs all layers over embedded inputs.

        Args:
            x: inputs [B, T, D].
            positions: absolute positions of the inputs [B, T] int32.
            visible: [B, T] or [B, 1] int32: input t of row b sees the keys at [0, visible[b, t]).
            kv: key/value buffers of S positions to attend to; None makes the inputs the whole sequence (S = T).
            place: where the inputs sit in `kv`; given exactly when `kv` is.
            before: keys and values of S = T positions, without `kv` and `outputs` and of a block diffusion model only:
                what an input sees ahead of its own block, instead of the inputs there.
            outputs: (first [B], width): return only the hidden states of inputs first[b] .. first[b] + width - 1. The
                last layer then computes no query and no feed-forward for the others.
            remat: for training, what of each layer is kept for the backward pass besides its input, the rest being
                computed again (see `jax.checkpoint_policies`); None keeps everything.
            layout: how the parameters lie on a mesh; None for one device, and where the caller places everything.
            scan: for training, make layers that are alike one loop, which compiles as fast as one layer, and for which
                their kernels are copied side by side. With `outputs`, or with `kv` but for a decoder, it does nothing.
            decoder: of a model with a canvas, run its decoder, of which the inputs are the canvas: their sliding
                windows all begin with that of its first position.
            counted: [B, T] bool, of the inputs, without `outputs`: the ones whose routing is counted; None counts
                none.
            since: [B, T] int32, the first key that each input sees, from which on `positions` count; None for key 0.
            causal: without `kv` and `since`: `visible` is the smaller of an input's number + 1 and its row's length.

        Returns:
            Hidden states before the final norm [B, T or width, D], in the `sums` of the dtype of x; the keys and
            values: the updated buffers, or without any those of the inputs; and how the layers with experts routed what
            is `counted`, None if `counted` is None, or there are none.
        """
        x = x.astype(sums(x.dtype))
        keys = x.shape[1] if kv is None else kv[0].key.shape[1]
        ropes = dict.fromkeys(layer.attn.rope for layer in self.layers)
        tables = {rope: rope_table(positions, keys, rope) for rope in ropes}
        bounds = lambda layer: (visible, _since(layer.attn.window, positions, decoder, since))
        at, write = (None, None) if place is None else (place.at, place.write)
        skip = 0 if place is None else place.skip
        static = {"skip": skip, "policy": remat, "layout": layout, "decoder": decoder, "causal": causal}
        new: list[LayerKV] = []
        routed: list[Routing] = []  # each with an axis of layers
        if scan and outputs is None and (kv is None or decoder):
            for run in self._alike():
                given = tables[run[0].attn.rope], bounds(run[0])
                step = lambda x, each, given=given: _run_layer(
                    each[0], x, *given, each[1], at, write, None, each[2], counted, width=0, **static
                )
                these = slice(len(new), len(new) + len(run))
                own = [[None] * len(run) if each is None else each[these] for each in (kv, before)]
                stacked = jax.tree.map(lambda *each: jnp.stack(each), *zip(run, *own, strict=True))
                x, (kvs, routing) = jax.lax.scan(step, x, stacked)
                new += [LayerKV(kvs.key[index], kvs.value[index]) for index in range(len(run))]
                routed += [] if routing is None else [routing]
            return x, tuple(new), _joined(routed)
        for index, layer in enumerate(self.layers):
            buffers = None if kv is None else kv[index]
            first, width = outputs if outputs is not None and index == self.config.num_layers - 1 else (None, 0)
            ahead = None if before is None else before[index]
            given = tables[layer.attn.rope], bounds(layer)
            x, (layer_kv, routing) = _run_layer(
                layer, x, *given, buffers, at, write, first, ahead, counted, width=width, **static
            )
            new.append(layer_kv)
            routed += [] if routing is None else [jax.tree.map(lambda x: x[None], routing)]
        return x, tuple(new), _joined(routed)

    def _alike(self) -> list[list[Layer | GemmaLayer]]:
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
        scores = product(self.final_norm(hidden), kernel, jnp.dtype(jnp.float32))
        cap = None if self.config.gemma is None else self.config.gemma.softcap
        return scores if cap is None else cap * jnp.tanh(scores / cap)


def embedding_scale(config: ModelConfig) -> float:
    """What embeddings are multiplied with where they are read."""
    return 1.0 if config.gemma is None else math.sqrt(config.embed_dim)


def _joined(routed: list[Routing]) -> Routing | None:
    """Those of some layers each as one of all."""
    return jax.tree.map(lambda *each: jnp.concatenate(each), *routed) if routed else None


def _since(window: int | None, positions: jax.Array, decoder: bool, since: jax.Array | None) -> jax.Array | None:
    """The first key that each position sees through a window, and of its document, [B, T or 1]; None for all."""
    if window is None:
        return since
    first = (positions[:, :1] if decoder else positions) + 1 - window
    return first if since is None else since + jnp.maximum(first, 0)


@functools.partial(jax.jit, static_argnames=("skip", "width", "policy", "layout", "decoder", "causal"))
def _run_layer(
    layer: Layer | GemmaLayer,
    x: jax.Array,
    turn: Turn,
    bounds: tuple[jax.Array, jax.Array | None],
    buffers: LayerKV | None,
    at: jax.Array | None,
    write: jax.Array | None,
    first: jax.Array | None,
    before: LayerKV | None,
    counted: jax.Array | None,
    *,
    skip: int,
    width: int,
    policy: RematPolicy | None,
    layout: LayoutLike | None,
    decoder: bool,
    causal: bool,
) -> tuple[jax.Array, tuple[LayerKV, Routing | None]]:
    """One layer, with the arguments of `Transformer.forward`: its output, its keys and values, and its routing.
    `bounds` are `visible` and `since` of `attention`.

    Under `jit` so that equal layers are traced once: tracing 32 of them takes longer than compiling a small program.
    """

    def run(layer: Layer | GemmaLayer, x: jax.Array) -> tuple[jax.Array, tuple[LayerKV, Routing | None]]:
        own_turn, (visible, since) = turn, bounds
        y = layer.attn_norm(x)
        positions = math.prod(y.shape[:2]) // (1 if layout is None else layout.parts("batch"))  # of a device
        pinned = buffers is not None or positions < y.shape[2]
        kv = layer.attn.keys_values(y, own_turn, layout, pinned=pinned)
        if buffers is not None and at is not None:
            kv = LayerKV(*map(Place(at, skip, write).put, buffers, kv))
        platforms = ["tpu"] if buffers is None else []  # a window's follow the full forward's
        platforms += [] if asked_for(None) == "tokamax" else ["cuda"]  # tokamax's kernels read positions before heads
        kv = LayerKV(*(heads_first(part, layout, platforms) for part in kv))
        if first is not None:
            x, y, own_turn = jax.tree.map(lambda part: slice_rows(part, first, width), (x, y, own_turn))
            own = lambda bound: bound if bound is None or bound.shape[1] == 1 else slice_rows(bound, first, width)
            visible, since = own(visible), own(since)
        attended = layer.attn.attend(
            y, own_turn, kv, visible, layout, before, since, causal and first is None, pinned=pinned
        )
        x, routing = layer.after_attention(x, attended, layout, decoder, counted)
        return x, (kv, routing)

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
    fields = ("axes", "init", "shared", "keep_float32")
    return {
        _name(path): ParamSpec(param.get_value().shape, *map(param.get_metadata, fields))
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
