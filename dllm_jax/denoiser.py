"""The aligned denoiser: "what token belongs at position i", for every family, with or without key/value buffers."""

import jax
import jax.numpy as jnp

from dllm_jax import kv_cache
from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.kv_cache import KVCache, slice_rows
from dllm_jax.pytree import pytree
from dllm_jax.transformer import Params, RematPolicy, Tile, Transformer, Window, bind


@pytree(static=("config",))
class Denoiser:
    """A model as samplers see it: a pytree (the flat parameter dict is its only data) with five methods.

    Positions always mean *target* positions: the hidden state returned for position i is the one whose logits predict
    the token at i. Families whose raw logits are shifted by one (Dream) feed position i - 1 for it; nobody outside
    this class knows. Rows are left-aligned: row b is valid on [0, lengths[b]), its RoPE positions start at 0.
    """

    config: ModelConfig
    params: Params

    @property
    def mask_id(self) -> int:
        """The mask token's id.

        Raises:
            DllmError: for a model without one.
        """
        if self.config.mask_id is None:
            raise DllmError(f"a {self.config.family} model has no mask token and cannot denoise; use it as a verifier")
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
    def vocab_parts(self) -> int:
        """Equal parts of the vocabulary that a `Tile` takes the same entries of: one for each device that it is split
        over."""
        return 1

    @property
    def min_prompt_length(self) -> int:
        """Tokens a prompt must have: 1 for shifted families, whose first position has no predictor, else 0."""
        return int(self.config.shift)

    @property
    def _model(self) -> Transformer:
        return bind(self.config, self.params)

    def empty_cache(self, batch: int, length: int) -> KVCache:
        """Zero-filled key/value buffers for `length` positions, in the parameters' dtype."""
        config, dtype = self.config, self.params["embed.embedding"].dtype
        return kv_cache.empty(config.num_layers, batch, length, config.num_kv_heads, config.head_dim, dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Input embeddings, [B, S] int32 -> [B, S, D]."""
        return self._model.embed_tokens(tokens)

    def expected_embedding(self, logits: jax.Array) -> jax.Array:
        """sum over v of softmax(logits)_v embedding(v): [B, W, V] float32 -> [B, W, D] in the parameters' dtype.

        The softmax is over the whole vocabulary, the mask token included (iteration smoothing, arXiv 2510.08666).
        """
        table = self.params["embed.embedding"]
        probability = jax.nn.softmax(logits, axis=-1).astype(table.dtype)
        return jnp.einsum("bwv,vd->bwd", probability, table)

    def full(
        self,
        inputs: jax.Array,
        lengths: jax.Array,
        start: jax.Array,
        width: int,
        *,
        remat: RematPolicy | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """One forward over the whole sequence.

        Args:
            inputs: tokens [B, S] int32, or input embeddings [B, S, D].
            lengths: valid positions per row [B] int32.
            start, width: target span; row b gets the hidden states of start[b] .. start[b] + width - 1.
            remat: as in `Transformer.forward`, for training.

        Returns:
            Hidden states [B, width, D] for `logits`, and the keys and values of all S positions (free if unused).
        """
        model = self._model
        x = _embedded(model, inputs)
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        keep = None if width == x.shape[1] else (start - self.config.shift, width)  # of all, start can only be 0
        return model.forward(x, positions, lengths, keep=keep, remat=remat)

    def window(
        self,
        inputs: jax.Array,
        lengths: jax.Array,
        cache: KVCache,
        feed: tuple[jax.Array, int],
        target: tuple[jax.Array, int] | None = None,
        fresh: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """One forward over the span `feed`, attending to it and to the buffers' entries for all other positions.

        A shifted family also runs the position before the span, which predicts its first token; that position's own
        buffer entry is read, not refreshed, so that cached and uncached spans mean the same for every family.

        Args:
            inputs: as in `full`, the whole sequence; only the span is read.
            lengths: valid positions per row [B] int32.
            cache: buffers of S positions.
            feed: (start [B], width): positions that are run. start[b] + width must not exceed S.
            target: (start [B], width) within the feed: positions whose hidden states are returned; None for all.
            fresh: [B, feed width] bool, positions whose keys and values replace the buffers' entries; None for all.

        Returns:
            Hidden states [B, target width, D] and the updated buffers.
        """
        shift, (start, width) = int(self.config.shift), feed
        model = self._model
        span = slice_rows(inputs, start - shift, width + shift)
        positions = (start - shift)[:, None] + jnp.arange(width + shift, dtype=jnp.int32)
        keep = (start - start, width) if target is None else (target[0] - start, target[1])
        window = Window(start=start, skip=shift, fresh=fresh)
        return model.forward(_embedded(model, span), positions, lengths, cache=cache, window=window, keep=keep)

    def final_hidden(self, hidden: jax.Array) -> jax.Array:
        """Hidden states behind the final norm, which the vocabulary head reads: [B, W, D] -> [B, W, D]."""
        return self._model.final_norm(hidden)

    def logits(self, hidden: jax.Array, tile: Tile | None = None) -> jax.Array:
        """Vocabulary scores of hidden states, [B, W, D] -> [B, W, V] float32; of a tile's ids alone where one is given,
        [B, W, vocab_parts * width]."""
        return self._model.logits(hidden, tile, self.vocab_parts)

    def __call__(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Aligned logits of every position, [B, S] int32 -> [B, S, V] float32: entry i scores the token at i.

        For shifted families entry 0 has no predictor and repeats entry 1.
        """
        batch, length = tokens.shape
        lengths = jnp.full((batch,), length, jnp.int32) if lengths is None else lengths
        model = self._model
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
        hidden, _ = model.forward(model.embed_tokens(tokens), positions, lengths)
        if self.config.shift:
            hidden = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
        return model.logits(hidden)


def _embedded(model: Transformer, inputs: jax.Array) -> jax.Array:
    return model.embed_tokens(inputs) if jnp.issubdtype(inputs.dtype, jnp.integer) else inputs
