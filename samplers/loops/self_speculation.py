"""Self-speculation (arXiv 2607.05722, linear): a model drafts a block and reads it causally, and what it would have
written itself is kept."""

from typing import Literal

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.params.low_rank import LowRank
from dllm_jax.pytree import pytree
from samplers.canvas import Canvas
from samplers.checks import check_choice
from samplers.loops.causal_context import CausalContext, ContextState, Whole
from samplers.loops.left_to_right import DraftResult
from samplers.rules.base import Decision, Rule
from samplers.stopping import Stop
from samplers.tokens.noise import Purpose, gumbel
from samplers.tokens.predictions import Predictions, Sampling, kept, logprob_of, temper, truncate

Accept = Literal["match", "residual"]


@pytree(static=("gen_length", "block_length", "accept"))
class SelfSpeculation(CausalContext):
    """Drafts a block after the last token, reads it, and keeps the tokens up to the first that differs from what the
    read predicts, which takes its place: every cycle writes at least one token, and after a draft that is all right one
    more than was drafted.

    At temperature 0 the tokens are those of the causal model, token by token; above, both ways to accept draw from its
    distribution exactly. With `block_length=1` nothing is drafted: that is autoregressive generation, of causal models
    too. In `Result`, `nfe` counts drafts and reads, `verifier_forwards` the reads, the prompt's among them.

    Attributes:
        gen_length: G, positions to generate; a last draft that reaches beyond is cut. Default: 256, enough for a
            reasoned answer.
        block_length: L, the last token and L - 1 that are drafted. Default: 32, as published.
        rule: what of a draft is committed in each of its forwards; None takes all from one. Default: none, as
            published.
        adapter: adapters that are on where the model drafts, not where it reads; None for none. Default: the
            checkpoint's, if it has any.
        accept: at a temperature, "match" draws a token of the read and compares, as published; "residual" accepts a
            draft d with probability min(1, p(d) / q(d)) and draws the first that is not from max(p - q, 0), p being the
            read's distribution and q the draft's (arXiv 2211.17192): more is accepted, for [B, L, V] float32 of memory.
            Default: match.
        sampling: how tokens are drawn; greedy by default.
        stop: when a row ends. Tokens that the same read wrote after the end stay in `Result.tokens`; `Result.lengths`
            leaves them out. Default: the model's end tokens.
        thinking_budget: tokens after which a thought ends, where the model has not ended it: the next token of a read
            is `end_think` then. Default: none.
        end_think: the token that ends a thought. Default: the tokenizer's `</think>`.
    """

    gen_length: int
    block_length: int = 32
    rule: Rule | None = None
    adapter: LowRank | None = None
    accept: Accept = "match"
    sampling: Sampling = Sampling()
    stop: Stop | None = None
    thinking_budget: Whole | None = None
    end_think: Whole | None = None

    cut_blocks = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("accept", self.accept, ("match", "residual"))
        if self.accept == "residual" and self.rule is not None:
            why = "a rule that chooses among drawn tokens changes their distribution, which the residual would need"
            raise DllmError(f"accept=residual takes no rule: {why}; leave rule out, or use match")

    @property
    def needs_logits(self) -> bool:  # type: ignore[override]
        """Whether the logits of a whole block must exist."""
        return self.accept == "residual" and self.sampling.temperature is not None

    def forwards(self, prompt_length: int) -> tuple[int, int]:
        """Fewest and most forwards of a row, if no end token ends it before."""
        masks = self.block_length - 1
        drafts = (min(masks, 1),) * 2 if self.rule is None or not masks else self.rule.forwards(masks, 1)
        cycles = -(-(self.gen_length - 1) // self.block_length)
        return 1 + cycles * (1 + drafts[0]), 1 + (self.gen_length - 1) * (1 + drafts[1])

    def result(self, denoiser: DenoiserLike, state: ContextState) -> DraftResult:
        """The generation so far."""
        found = super().result(denoiser, state)
        reads = state.canvas.cache_updates
        return DraftResult(**vars(found), verifier_forwards=reads, most_accepted=state.most_accepted)

    def new_seed(
        self, state: ContextState, found: Predictions, logits: jax.Array | None, known: jax.Array, prompt: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        drafted = jnp.roll(state.block, -1, axis=1)
        token, agrees = found.token, found.token == drafted
        if state.scores is not None and logits is not None:
            token, agrees = self._residual(state, found, logits, drafted)
        token, agrees = jnp.where(prompt[:, None], found.token, token), agrees & ~prompt[:, None]
        agrees = (agrees | known).at[:, -1].set(False)
        count = 1 + jnp.cumprod(agrees, axis=1, dtype=jnp.int32).sum(axis=1)
        accepted = jnp.arange(self.block_length) < count[:, None] - 1
        return jnp.where(accepted, drafted, token), jnp.ones_like(agrees), count

    def _residual(
        self, state: ContextState, found: Predictions, logits: jax.Array, drafted: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens [B, L] for the first position that is not accepted, and where the draft is, bool [B, L]."""
        assert state.scores is not None and state.canvas.noise is not None
        no_mask = -1  # which a draw from the logits never gave
        read = self.log_probabilities(logits, no_mask)
        draft = jnp.roll(state.scores, -1, axis=1).at[:, -1].set(-jnp.inf)  # nothing was drafted after the block
        place = (state.start - state.canvas.prompt_lengths)[:, None] + 1 + jnp.arange(self.block_length)
        ids, noise = jnp.arange(logits.shape[-1]), state.canvas.noise
        of = lambda x: jnp.take_along_axis(x, drafted[..., None], axis=-1)[..., 0]
        share = noise.uniform(Purpose.SHARE, state.canvas.nfe, place)
        accepts = jnp.log(share) < of(read) - of(draft)
        rest = jnp.maximum(jnp.exp(read) - jnp.exp(draft), 0.0)
        drawn = jnp.log(rest) + gumbel(noise.uniform(Purpose.TARGET, state.canvas.nfe, place, ids))
        warm = jnp.broadcast_to(jnp.asarray(self.sampling.temperature) > 0, state.start.shape)[:, None]
        drawn = jnp.where(rest.any(axis=-1), jnp.argmax(drawn, axis=-1).astype(jnp.int32), found.token)
        return jnp.where(warm, drawn, found.token), jnp.where(warm, accepts, found.token == drafted)

    def log_probabilities(self, logits: jax.Array, mask_id: int) -> jax.Array:
        sampling = self.sampling
        z = temper(logits, sampling)
        if sampling.suppress is not None:
            z = z.at[..., sampling.suppress].set(-jnp.inf)
        return jax.nn.log_softmax(truncate(z, kept(z, sampling), mask_id), axis=-1)

    def _logprobs(self, logits: jax.Array | None, tokens: jax.Array) -> jax.Array:
        return super()._logprobs(logits, tokens) if logits is None else logprob_of(logits, tokens)

    def drafted(self, canvas: Canvas, state: ContextState, decision: Decision, rows: jax.Array) -> Canvas:
        return canvas

    def budget_place(self, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        return end, end >= jnp.asarray(self.thinking_budget)
