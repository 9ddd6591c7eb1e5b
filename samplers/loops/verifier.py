"""The verifier of adaptive parallel decoding: an autoregressive model that scores what a dLLM drafted."""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax import Model
from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike, Span
from dllm_jax.pytree import pytree
from dllm_jax.text.tokenizer import token_strings


@pytree()
class Verifier:
    """A causal model next to a dLLM (arXiv 2506.00413, section 3.2): data of the sampler, never part of the program.

    Its keys and values lie in buffers as long as the sequence. A position's entry depends on the tokens up to it and on
    nothing else, and no query attends to what comes after it: so rejected tokens are rolled back by writing over them.

    Attributes:
        denoiser: the model, `Model.denoiser` of a causal family; any size.
        token_map: [V] int32, the verifier's id of each id of the dLLM, -1 where it has none; None where both have one
            tokenizer. See `verifier_for`, which makes sure of that. Ids without a counterpart are never drafted.
    """

    denoiser: DenoiserLike
    token_map: jax.Array | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.denoiser, "forward"):
            kind = type(self.denoiser).__name__
            raise DllmError(f"the verifier's model is a {kind}; give a denoiser, such as Model.denoiser")
        config = getattr(self.denoiser, "config", None)
        if config is not None and not config.is_causal:
            raise DllmError(f"a {config.family} model is not causal and cannot verify; give one of the qwen2 family")

    def check(self, vocab_size: int) -> None:
        """Raises DllmError for a token map that does not fit a dLLM with this vocabulary."""
        if self.token_map is None:
            return
        found = jnp.asarray(self.token_map)
        if found.shape != (vocab_size,) or not jnp.issubdtype(found.dtype, jnp.integer):
            wanted = f"int32[{vocab_size}], the verifier's id of every token of the dLLM"
            raise DllmError(f"token_map is {found.dtype}{list(found.shape)}; it must be {wanted}")
        known = not isinstance(found, jax.core.Tracer) and found.is_fully_addressable
        if known and found.size and int(found.max()) >= self.denoiser.vocab_size:
            total = f"the verifier's {self.denoiser.vocab_size} tokens"
            raise DllmError(f"token_map names id {int(found.max())}, which lies outside {total}")

    def knows(self, vocab_size: int) -> jax.Array:
        """[V] bool: ids of the dLLM that the verifier has as well."""
        if self.token_map is None:
            return jnp.arange(vocab_size) < self.denoiser.vocab_size
        return jnp.asarray(self.token_map) >= 0

    def prefill(self, tokens: jax.Array, lengths: jax.Array, length: int) -> Any:
        """Buffers of `length` positions that hold the keys and values of prompts [B, P] with lengths [B]."""
        last = Span(jnp.ones_like(lengths), 1)  # which hidden state comes back does not matter
        _, kv = self.denoiser.forward(self._ids(tokens), lengths, outputs=last)
        more = [(0, 0), (0, length - tokens.shape[1]), (0, 0), (0, 0)]
        return jax.tree.map(lambda x: jnp.pad(x, more), kv)

    def scores(
        self,
        tokens: jax.Array,
        lengths: jax.Array,
        kv: Any,
        at: Span,
        write: jax.Array,
        vocab_size: int,
    ) -> tuple[jax.Array, Any]:
        """Scores the tokens at W positions, each given everything before it, in one forward.

        Args:
            tokens: [B, S] int32 in the dLLM's ids, what was drafted among them.
            lengths: [B], where each row's draft ends.
            kv: buffers whose entries before each row's first drafted position are valid.
            at: the positions, from 1 on.
            write: [B, W] bool, which of them are drafted.
            vocab_size: V, of the dLLM.

        Returns:
            Logits [B, W, V] float32 over the dLLM's ids (0 where the verifier has none), and the updated buffers.
        """
        hidden, kv = self.denoiser.forward(self._ids(tokens), lengths, at=at, kv=kv, write=write)
        return self._aligned(self.denoiser.logits(hidden), vocab_size), kv

    def _aligned(self, logits: jax.Array, vocab_size: int) -> jax.Array:
        if self.token_map is not None:
            index = jnp.asarray(self.token_map)
            return jnp.where(index >= 0, logits[..., jnp.maximum(index, 0)], 0.0)
        missing = vocab_size - logits.shape[-1]
        return jnp.pad(logits, [(0, 0), (0, 0), (0, missing)]) if missing > 0 else logits[..., :vocab_size]

    def _ids(self, tokens: jax.Array) -> jax.Array:
        """Tokens in the verifier's own ids; what it lacks (the mask among them) becomes any of its ids."""
        if self.token_map is not None:
            tokens = jnp.asarray(self.token_map)[tokens]
        return jnp.clip(tokens, 0, self.denoiser.vocab_size - 1)


def verifier_for(model: Model, verifier: Model, token_map: Any = None) -> Verifier:
    """A loaded causal model as the verifier of a loaded dLLM.

    Args:
        model: the dLLM.
        verifier: the causal model, such as Qwen2.5-0.5B for Dream.
        token_map: [V], the verifier's id of each of the dLLM's, -1 for none; needed where the tokenizers differ.

    Raises:
        DllmError: for a verifier that is not causal, and where no map is given for tokenizers that do not agree on
            all ids that both define (checkpoints without tokenizers: vocabularies of different sizes).
    """
    if token_map is not None:
        found = Verifier(verifier.denoiser, jnp.asarray(token_map))
        found.check(model.config.vocab_size)
        return found
    found = Verifier(verifier.denoiser)
    advice = "give a verifier of the same tokenizer, or a token_map"
    if model.tokenizer is None or verifier.tokenizer is None:
        sizes = model.config.vocab_size, verifier.config.vocab_size
        if sizes[0] != sizes[1]:
            raise DllmError(
                f"{model.name} has {sizes[0]} tokens and {verifier.name} {sizes[1]}, and there are no two tokenizers "
                f"to compare; {advice}"
            )
        return found
    own = token_strings(model.tokenizer, model.config.vocab_size)
    pairs = zip(own, token_strings(verifier.tokenizer, verifier.config.vocab_size), strict=False)
    for token, (ours, theirs) in enumerate(pairs):
        if ours != theirs and ours and theirs:
            raise DllmError(f"token {token} is {ours!r} to {model.name} and {theirs!r} to {verifier.name}; {advice}")
    return found
