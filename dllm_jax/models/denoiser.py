"""The aligned denoiser: "what token belongs at position i", for every family, in one method.

`Denoiser` runs this library's own models; `FunctionDenoiser` makes one of any function from tokens to logits.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError, first_line
from dllm_jax.kernels.dispatch import on_device
from dllm_jax.models import kv_cache
from dllm_jax.models.kv_cache import KVCache, gather_rows, slice_rows
from dllm_jax.models.layers import Place, Tile, tile_of
from dllm_jax.models.moe import Routing
from dllm_jax.models.transformer import Params, RematPolicy, Transformer, bind, embedding_scale
from dllm_jax.parallel.sharding import Layout
from dllm_jax.params.low_rank import LowRank
from dllm_jax.params.products import mixed_rows
from dllm_jax.pytree import pytree


class Span(NamedTuple):
    """Consecutive positions of every row: the first of each, [B] int32, and how many."""

    start: jax.Array
    width: int

    @property
    def positions(self) -> jax.Array:
        """[B, width] int32."""
        return self.start[:, None] + jnp.arange(self.width, dtype=jnp.int32)


class DenoiserLike(Protocol):
    """What samplers need of a model, which must be a pytree; see `Denoiser` for what each member means.

    A cache policy also needs `empty_cache`, smoothing `embed` and `expected_embedding`, and a rule that reads hidden
    states `final_hidden` and `embed`, and requests that change logits `with_bias`; a model without them works with
    everything else. A model whose positions attend to their block and everything before it has a `block_length`, and
    `in_blocks` if that can be another. Key/value buffers may be any pytree whose leaves begin with batch and position,
    [B, S, ...], the same from `empty_cache` and `forward`: samplers exchange their rows.
    `dllm_jax.testing.check_denoiser` checks a model of your own.
    """

    @property
    def mask_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def min_prompt_length(self) -> int: ...

    @property
    def batch_parts(self) -> int: ...

    @property
    def vocab_parts(self) -> int: ...

    def forward(
        self,
        inputs: jax.Array,
        visible: jax.Array,
        *,
        at: Span | jax.Array | None = None,
        kv: Any = None,
        write: jax.Array | None = None,
        outputs: Span | None = None,
    ) -> tuple[jax.Array, Any]: ...

    def logits(self, hidden: jax.Array, tile: Tile | None = None) -> jax.Array: ...

    def empty_cache(self, batch: int, length: int) -> Any: ...

    def embed(self, tokens: jax.Array) -> jax.Array: ...

    def expected_embedding(self, logits: jax.Array) -> jax.Array: ...

    def final_hidden(self, hidden: jax.Array) -> jax.Array: ...


def block_length_of(model: Any) -> int | None:
    """Length of a block diffusion model's blocks, None for other models."""
    length: int | None = getattr(model, "block_length", None)
    return length


@pytree(static=("config", "layout", "scan", "device"))
class Denoiser:
    """A model as samplers use it: a pytree whose only data is the flat parameter dict.

    Positions always mean *target* positions: the hidden state returned for position i is the one whose logits predict
    the token at i. Families whose raw logits are shifted by one (Dream) feed position i - 1 for it; no code outside
    this class depends on it. Rows are left-aligned: row b's RoPE positions start at 0.

    Attributes:
        config: what the model is.
        params: flat name -> array, or what stands for a kernel (`dllm_jax.params.products.Kernel`).
        layout: the mesh that the parameters lie on, so that buffers and hidden states are split alike; None for one
            device, and where the caller places everything.
        scan: run layers as a loop where training does: see `Transformer.forward`.
        device: that all arrays lie on, though there may be others, here or absent: kernels need to know. None for a
            mesh, and where nobody knows.
        bias: [B, V] float32, of a batch of B rows what `logits` adds to each row's; None for nothing.
    """

    config: ModelConfig
    params: Params
    layout: Layout | None = None
    scan: bool = False
    device: jax.Device | None = None
    bias: jax.Array | None = None

    @property
    def mask_id(self) -> int:
        """The mask token's id.

        Raises:
            DllmError: for a model without one.
        """
        if self.config.mask_id is None:
            use = "it takes renoise" if self.config.has_canvas else "use it as a verifier"
            raise DllmError(f"a {self.config.family} model has no mask token and cannot denoise; {use}")
        return self.config.mask_id

    @property
    def eos_id(self) -> int:
        """The end-of-sequence token's id."""
        return self.config.eos_id

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""
        return self.config.vocab_size

    @property
    def min_prompt_length(self) -> int:
        """Tokens a prompt must have: 1 for families that predict a position from the one before, else 0."""
        return int(self.config.shift or self.config.has_causal_context)

    @property
    def batch_parts(self) -> int:
        """Equal parts of a batch that lie on different devices; inside `jax.shard_map` a batch is a device's own."""
        own = self.layout is None or jax.sharding.get_abstract_mesh().manual_axes
        return 1 if own or self.layout is None else self.layout.parts("batch")

    @property
    def vocab_parts(self) -> int:
        """Equal parts of the vocabulary that a `Tile` takes the same entries of: one for each device that it is split
        over, so that no column of the head leaves its device."""
        return 1 if self.layout is None else self.layout.parts("vocab")

    @property
    def block_length(self) -> int | None:
        """Length of the blocks of a block diffusion model, counted from position 0; None for another."""
        return None if self.config.has_causal_context else self.config.block_length

    @property
    def as_causal(self) -> "Denoiser":
        """The same weights read causally, row i predicting token i + 1, as a verifier or for `autoregressive`.

        Raises:
            DllmError: for a model that was not trained to be read so.
        """
        config = self.config
        if config.is_causal:
            return self
        if not config.has_causal_context:
            raise DllmError(f"a {config.family} model cannot be read causally; give a causal one")
        return dataclasses.replace(self, config=config.replace(attention="causal", block_length=None, shift=True))

    @property
    def unshifted(self) -> "Denoiser":
        """The same without the shift by one: the hidden state at i is that of input i, whatever it predicts."""
        return dataclasses.replace(self, config=self.config.replace(shift=False))

    def with_adapter(self, adapter: LowRank, rows: jax.Array | None = None) -> "Denoiser":
        """The model with low-rank adapters on some of its kernels.

        Args:
            rows: [B] bool, rows of the batch that they act on; None for all.
        """
        return dataclasses.replace(self, params=adapter.attach(self.params, rows))

    def with_bias(self, bias: jax.Array) -> "Denoiser":
        """The model with numbers added to its logits, [B, V] float32. Guided logits are raised by just as much: both
        halves are, and their difference stays."""
        return dataclasses.replace(self, bias=bias)

    @property
    def head_names(self) -> tuple[str, str]:
        """The parameters that `logits` reads."""
        return "final_norm.scale", "embed.embedding" if self.config.tied_embeddings else "lm_head.kernel"

    @property
    def dtype(self) -> jnp.dtype:
        """What it computes in, the config's, whatever its parameters are stored as."""
        return jnp.dtype(self.config.dtype)

    @property
    def _model(self) -> Transformer:
        return bind(self.config, self.params)

    def empty_cache(self, batch: int, length: int) -> KVCache:
        """Zero-filled key/value buffers for `length` positions, in `dtype`."""
        config = self.config
        heads = [config.heads_of(layer) for layer in range(config.num_layers)]
        return self._placed(kv_cache.empty(heads, batch, length, self.dtype))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Input embeddings, [B, S] int32 -> [B, S, D]."""
        return self._model.embed_tokens(tokens)

    def expected_embedding(self, logits: jax.Array) -> jax.Array:
        """sum over v of softmax(logits)_v embedding(v): [B, W, V] float32 -> [B, W, D] in `dtype`.

        The softmax is over the whole vocabulary, the mask token included (iteration smoothing, arXiv 2510.08666).
        """
        return self.mixed_embeddings(jax.nn.softmax(logits, axis=-1)).astype(self.dtype)

    def mixed_embeddings(self, weights: jax.Array, tile: Tile | None = None) -> jax.Array:
        """sum over v of weights_v embedding(v) with products in `dtype`: [B, W, V] float32 -> [B, W, D] float32.

        Args:
            tile: the weights are those of a tile of the vocabulary, [B, W, vocab_parts * width].
        """
        table = jax.tree.map(lambda x: tile_of(x, 0, tile, self.vocab_parts), self.params["embed.embedding"])
        mixed = mixed_rows(weights, table, self.dtype, jnp.dtype(jnp.float32))
        return mixed if self.config.gemma is None else mixed * embedding_scale(self.config)

    def forward(
        self,
        inputs: jax.Array,
        visible: jax.Array,
        *,
        at: Span | jax.Array | None = None,
        kv: KVCache | None = None,
        write: jax.Array | None = None,
        outputs: Span | None = None,
        before: KVCache | None = None,
        remat: RematPolicy | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """One forward: over everything, or over some positions that attend to key/value buffers for all others.

        A shifted family also runs the position before each that is asked for, which predicts it; that position's own
        buffer entry is read, not refreshed, so that cached and uncached spans mean the same for every family.

        Args:
            inputs: the whole sequence: tokens [B, S] int32, or input embeddings [B, S, D].
            visible: how many of the first positions a query sees: [B, S] int32 by the query's position, or [B], the
                same for all; of these a causal model's sees none after itself, a block diffusion model's none after
                its block, and one with a causal context all, as in a block that is drafted.
                Of a model with a canvas this is the encoder, which is causal.
            at: the positions that are run: a `Span`, or any [B, T] (slower; those that are written must differ).
                None runs all S and reads no buffers. A span must end within the sequence, and begin at
                `min_prompt_length` or later.
            kv: buffers of S positions, given exactly when `at` is.
            write: [B, T] bool, which positions' keys and values replace the buffers' entries; None for all.
            outputs: positions whose hidden states are returned, within `at` (a `Span` then); None for all that run.
            before: for training a block diffusion model on everything, a whole number of blocks, without `outputs`:
                keys and values that a query sees of the positions ahead of its block, instead of these inputs'.
            remat: as in `Transformer.forward`, for training.

        Returns:
            Hidden states [B, T, D] for `logits`, and the keys and values: the updated buffers, or without any those of
            all S positions (free if unused). Where everything is returned, entry 0 of a shifted family, which has no
            predictor, repeats entry 1.
        """
        shift = int(self.config.shift)
        assert before is None or (at is None and outputs is None)
        if at is None or kv is None:
            return self.forward_with_routing(inputs, visible, None, outputs=outputs, before=before, remat=remat)[:2]
        if isinstance(at, Span):
            fed = Span(at.start - shift, at.width + shift)
            within = lambda x: slice_rows(x, *fed)
            inner = (at.start - at.start, at.width) if outputs is None else (outputs.start - at.start, outputs.width)
            place = Place(at.start, shift, write)
            options: dict[str, Any] = {"kv": kv, "place": place, "outputs": inner}
            return self._run(within(inputs), fed.positions, _of(visible, within), **options)[:2]
        positions = jnp.concatenate([at - 1, at], axis=1) if shift else at
        within = lambda x: gather_rows(x, positions)
        place = Place(at, at.shape[1] * shift, write)
        hidden, kv, _ = self._run(within(inputs), positions, _of(visible, within), kv=kv, place=place)
        return hidden[:, : at.shape[1]], kv

    def forward_with_routing(
        self,
        inputs: jax.Array,
        visible: jax.Array,
        counted: jax.Array | None,
        *,
        outputs: Span | None = None,
        before: KVCache | None = None,
        remat: RematPolicy | None = None,
        since: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache, Routing | None]:
        """`forward` of all S positions, which also returns the experts' routing, for training.

        Args:
            counted: [B, S] bool, the positions whose routing is counted; None counts none. A shifted family's position
                is the one that is fed.
            since: of rows that hold several documents, [B, S] int32, the first position of each position's document:
                positions are counted from there, and it sees none before. `visible` [B, S] is then the document's end,
                and within it what the model's attention sees. A shifted family's first position of a document has no
                predictor: its hidden state is the last of the document before.

        Returns:
            As `forward`, and the routing, with an axis of layers; None where nothing is asked for, or nothing routed.
        """
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32), inputs.shape[:2])
        positions = positions if since is None else positions - since
        shift = int(self.config.shift)
        outer = None if outputs is None else (outputs.start - shift, outputs.width)
        options: dict[str, Any] = {
            "before": before,
            "outputs": outer,
            "remat": remat,
            "counted": counted,
            "since": since,
        }
        hidden, kv, routing = self._run(inputs, positions, visible, **options)
        if shift and outputs is None:
            hidden = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
        return hidden, kv, routing

    def denoise(
        self,
        canvas: jax.Array,
        soft: jax.Array,
        start: jax.Array,
        kv: KVCache,
        *,
        remat: RematPolicy | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """The decoder of a model with a canvas, `attention` "canvas", whose encoder is `forward`.

        Every position of the canvas attends to all of it and to everything before it, whose keys and values the encoder
        stored in the buffers. The canvas's own keys and values are put after that, where the encoder overwrites them
        when it reads the finished canvas.

        Args:
            canvas: tokens [B, L] int32.
            soft: [B, L, D], the embeddings that the step before expected there; zeros in the first.
            start: [B] int32, the canvas's first position.
            kv: buffers of at least start[b] + L positions.
            remat: as in `Transformer.forward`, for training.

        Returns:
            Hidden states [B, L, D] for `logits`, and the buffers.
        """
        model, span = self._model, Span(start, canvas.shape[1])
        assert model.conditioning is not None
        inputs = model.conditioning(model.embed_tokens(canvas), soft.astype(self.dtype))
        end = (start + span.width)[:, None]
        options: dict[str, Any] = {"place": Place(start), "decoder": True, "remat": remat}
        return self._run(inputs, span.positions, end, kv=kv, **options)[:2]

    def seen_until(self, positions: jax.Array, visible: jax.Array, since: jax.Array | None = None) -> jax.Array:
        """Where the keys end that each position sees, [B, T or 1] int32: of `visible` and `since` as
        `forward_with_routing` takes them what the model's attention shows; `visible` [B, T] alone is that already.

        Args:
            positions: [B, T] int32, counted from the first of the row or of the document.
        """
        if visible.ndim == 2 and since is None:
            return visible
        bound = {"causal": 1, "canvas": 1, "block": self.config.block_length}.get(self.config.attention)
        ends, first = visible.reshape(len(visible), -1), 0 if since is None else since
        return ends if bound is None else jnp.minimum(first + (positions // bound + 1) * bound, ends)

    def _run(
        self, inputs: jax.Array, positions: jax.Array, visible: jax.Array, **options: Any
    ) -> tuple[jax.Array, KVCache, Routing | None]:
        """`Transformer.forward` of what is fed, tokens or embeddings, with `visible` [B] or [B, T]."""
        model = self._model
        since = options.get("since")
        given = visible.ndim == 2 or since is not None or "kv" in options
        causal = (self.config.is_causal or self.config.has_canvas) and not given
        visible = self.seen_until(positions, visible, since)
        x = model.embed_tokens(inputs) if jnp.issubdtype(inputs.dtype, jnp.integer) else inputs
        place = lambda x: x if self.layout is None else self.layout.place(x, ("batch", None, None))
        profiled = jax.named_scope("window_forward" if "kv" in options else "full_forward")
        with profiled, on_device(self.device):
            hidden, kv, routing = model.forward(
                place(x), positions, visible, layout=self.layout, scan=self.scan, causal=causal, **options
            )
        return place(hidden), self._placed(kv), routing

    def _placed(self, kv: KVCache) -> KVCache:
        layout = self.layout
        if layout is None:
            return kv
        return jax.tree.map(lambda x: layout.place(x, ("batch", None, "kv_heads", "head_dim")), kv)

    def in_blocks(self, length: int | None) -> "Denoiser":
        """A block diffusion model with blocks of another length, as those that a sampler decodes in; another model, and
        with None, as it is."""
        if not self.config.has_blocks or length is None:
            return self
        return dataclasses.replace(self, config=self.config.replace(block_length=length))

    def final_hidden(self, hidden: jax.Array) -> jax.Array:
        """Hidden states after the final norm, which the vocabulary head reads: [B, W, D] -> [B, W, D]."""
        return self._model.final_norm(hidden)

    def logits(self, hidden: jax.Array, tile: Tile | None = None) -> jax.Array:
        """Vocabulary scores of hidden states, [..., D] -> [..., V] float32; of a tile of the vocabulary,
        [..., vocab_parts * width]."""
        scores = self._model.logits(hidden, tile, self.vocab_parts)
        return scores if self.bias is None else scores + tile_of(self.bias, 1, tile, self.vocab_parts)[:, None]

    def __call__(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Aligned logits of every position, [B, S] int32 -> [B, S, V] float32: entry i scores the token at i.

        For shifted families entry 0 has no predictor and repeats entry 1.
        """
        lengths = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32) if lengths is None else lengths
        return self.logits(self.forward(tokens, lengths)[0])


def _of(visible: jax.Array, within: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return visible if visible.ndim == 1 else within(visible)


def block_causal(length: int, starts: jax.Array, block_length: int) -> jax.Array:
    """What each position attends to if a block attends to itself and everything before it, and nothing after: [B,
    length].

    D2F (arXiv 2508.09192, section 3.2) counts blocks from the prompt's end; LLaDA2 from position 0.

    Args:
        starts: [B] int32, where the first block begins; what lies before it is a block of its own.
        block_length: L; block b >= 0 is [start + b L, start + (b + 1) L).

    Returns:
        int32, the first position after each position's block: `visible` of `Denoiser.forward`.
    """
    place = jnp.arange(length, dtype=jnp.int32) - starts[:, None]
    return starts[:, None] + jnp.where(place < 0, 0, (place // block_length + 1) * block_length)


@pytree(static=("fn", "mask_id", "eos_id", "vocab_size", "min_prompt_length"))
class FunctionDenoiser:
    """Any function from tokens to logits as a denoiser, for every rule without a cache that reads no hidden states.

    The function may close over traced arrays where the denoiser is built inside your own `jit`. Where the denoiser is
    an argument of one (`samplers.sample_jit`), pass the weights as `params`: arrays that the function closes over would
    be constants of the program, which later changes do not reach.

    Attributes:
        fn: traceable (tokens [B, S] int32, lengths [B] int32) -> logits [B, S, V]: entry i scores the token at i. Row
            b is valid on [0, lengths[b]); what lies after must not matter. With `params` given it is called as
            fn(params, tokens, lengths).
        mask_id, eos_id: ids of the mask token and of the end of the sequence.
        params: any pytree of arrays, the denoiser's data; None for none.
        vocab_size: V; found by tracing `fn` with tokens [1, 8] if 0.
        min_prompt_length: tokens that a prompt must have: 1 if nothing predicts the first position, else 0.

    Raises:
        DllmError: for a function that cannot be traced or whose result is not logits, and ids that it lacks.
    """

    fn: Callable[..., jax.Array]
    mask_id: int
    eos_id: int
    params: Any = None
    vocab_size: int = 0
    min_prompt_length: int = 0

    batch_parts = vocab_parts = 1

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise DllmError(f"fn is of type {type(self.fn).__name__}; give a function (tokens, lengths) -> logits")
        try:
            hash(self.fn)
        except TypeError:  # it is part of the program that jit keeps
            raise DllmError("fn is not hashable; wrap it in a function, and pass its weights as params=") from None
        for name in ("mask_id", "eos_id", "vocab_size", "min_prompt_length"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if self.min_prompt_length not in (0, 1):
            raise DllmError(f"min_prompt_length is {self.min_prompt_length}; it must be 0 or 1")
        if not self.vocab_size:
            object.__setattr__(self, "vocab_size", self._traced_vocab_size())
        for name, token in (("mask_id", self.mask_id), ("eos_id", self.eos_id)):
            if not 0 <= token < self.vocab_size:
                raise DllmError(f"{name} {token} lies outside the vocabulary of {self.vocab_size} tokens")
        if self.mask_id == self.eos_id:
            raise DllmError(f"mask_id and eos_id are both {self.mask_id}; they must be two tokens")

    def _traced_vocab_size(self) -> int:
        tokens, lengths = jax.ShapeDtypeStruct((1, 8), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        try:
            found = jax.eval_shape(self._logits, tokens, lengths)
        except Exception as error:  # whatever a user's code raises
            way_out = "give a function of int32 [B, S] and [B], or vocab_size= if it takes no sequence so short"
            raise DllmError(
                f"fn cannot be traced with tokens [1, 8] and lengths [1] ({first_line(error).rstrip('.')}); {way_out}"
            ) from error
        return _checked_logits(found, (1, 8)).shape[2]

    def _logits(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return self.fn(tokens, lengths) if self.params is None else self.fn(self.params, tokens, lengths)

    def forward(
        self,
        inputs: jax.Array,
        visible: jax.Array,
        *,
        at: Any = None,
        kv: Any = None,
        write: Any = None,
        outputs: Span | None = None,
    ) -> tuple[jax.Array, Any]:
        """As `Denoiser.forward`, of everything: a function has no key/value buffers and one way to attend.

        Raises:
            DllmError: for other arguments, and if the function returns something other than logits [B, S, V].
        """
        if at is not None or kv is not None:
            self.empty_cache(*inputs.shape[:2])
        if visible.ndim != 1:
            raise DllmError(
                "a FunctionDenoiser attends in one way only; give a model's denoiser for block-causal attention"
            )
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            self.embed(inputs)
        logits = _checked_logits(self._logits(inputs, visible), inputs.shape, self.vocab_size)
        return (logits if outputs is None else slice_rows(logits, *outputs)).astype(jnp.float32), None

    def logits(self, hidden: jax.Array, tile: Tile | None = None) -> jax.Array:
        """The hidden states of a function are its logits."""
        return tile_of(hidden, 2, tile, self.vocab_parts)

    def empty_cache(self, batch: int, length: int) -> Any:
        """Raises DllmError: there are no buffers."""
        way_out = "use BlockSampler with NoCache(), or LeftRight without a window"
        raise DllmError(f"a FunctionDenoiser has no key/value buffers; {way_out}")

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Raises DllmError: there are no embeddings."""
        way_out = "leave out smoothing and rules that read hidden states (NI)"
        raise DllmError(f"a FunctionDenoiser has no embeddings and no hidden states; {way_out}")

    expected_embedding = final_hidden = embed

    def __call__(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Logits of every position, as `Denoiser.__call__`."""
        lengths = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32) if lengths is None else lengths
        return self.forward(tokens, lengths)[0]


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise DllmError(f"{name} is {value!r}; it must be a whole number") from None


def _checked_logits(found: Any, shape: tuple[int, ...], vocab_size: int | None = None) -> Any:
    """The function's result for tokens of this shape, if it is logits."""
    wanted = f"logits [{shape[0]}, {shape[1]}, {vocab_size or 'V'}]"
    if not hasattr(found, "shape") or not hasattr(found, "dtype"):
        raise DllmError(f"fn returns a {type(found).__name__}; it must give one array, {wanted}")
    fits = len(found.shape) == 3 and found.shape[:2] == shape and found.shape[2] == (vocab_size or found.shape[2])
    if not fits or not jnp.issubdtype(found.dtype, jnp.floating):
        raise DllmError(f"fn returns {found.dtype}{list(found.shape)} for tokens {list(shape)}; it must give {wanted}")
    return found
