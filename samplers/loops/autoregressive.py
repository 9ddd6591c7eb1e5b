"""Token by token: autoregressive generation of causal models and of those with a causal context."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.canvas import Canvas
from samplers.loops.causal_context import CausalContext, ContextState, Whole
from samplers.rules.base import Decision
from samplers.stopping import Stop
from samplers.tokens.predictions import Predictions, Sampling


@pytree(static=("gen_length",))
class Autoregressive(CausalContext):
    """Each forward reads the last token and predicts the next; the first reads the prompt.

    Attributes:
        gen_length: G, positions to generate. Default: 256, enough for a reasoned answer.
        sampling: how tokens are drawn; greedy by default.
        stop: when a row ends. Default: the model's end tokens.
        thinking_budget: tokens after which a thought ends, where the model has not ended it: the next token is
            `end_think` then. Default: none.
        end_think: the token that ends a thought. Default: the tokenizer's `</think>`.
    """

    gen_length: int
    sampling: Sampling = Sampling()
    stop: Stop | None = None
    thinking_budget: Whole | None = None
    end_think: Whole | None = None

    block_length: ClassVar[int] = 1  # type: ignore[misc]
    rule: ClassVar[None] = None  # type: ignore[misc]
    cut_blocks = True

    def forwards(self, prompt_length: int) -> tuple[int, int]:
        """The same number twice: one a token."""
        return self.gen_length, self.gen_length

    def new_seed(
        self, state: ContextState, found: Predictions, logits: jax.Array | None, known: jax.Array, prompt: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return found.token, ~known, jnp.ones_like(state.start)

    def drafted(self, canvas: Canvas, state: ContextState, decision: Decision, rows: jax.Array) -> Canvas:
        return canvas

    def budget_place(self, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        return end, end >= jnp.asarray(self.thinking_budget)
