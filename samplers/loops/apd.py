"""Adaptive parallel decoding (APD, arXiv 2506.00413): a dLLM drafts from left to right, a small causal model decides
how much of the draft is kept. And its baseline, which always keeps the same number of tokens."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.models.kv_cache import write_rows
from dllm_jax.pytree import pytree
from samplers.canvas import Canvas, checked_prompt
from samplers.checks import check_choice, check_number, check_whole
from samplers.loops.left_to_right import Draft, Frontier, LeftRightState, LeftToRight, Whole
from samplers.loops.verifier import Verifier
from samplers.stopping import Stop
from samplers.tokens.noise import Purpose
from samplers.tokens.predictions import Sampling, column

TargetNoise = Literal["shared", "independent", "none"]

STATIC = ("gen_length", "most_window", "most_lookahead", "limits")


@pytree(static=(*STATIC, "noise"))
class APD(LeftToRight):
    """Writes as much of the dLLM's draft as a product of experts with an autoregressive verifier agrees with.

    In each step the dLLM draws a token for every undecided position; the verifier reads them in one forward; the target
    of a position is drawn from ``p_D^weight p_A^(1 - weight)``: at temperature T argmax over what top-p and top-k leave
    of ``R z / T + (1 - R) v / T + g``, g being Gumbel noise. The draft is written up to the first position where the
    two differ. The first position is always written: it is an exact sample of the dLLM. Rejected positions get nothing
    of the target.

    Attributes:
        verifier: the causal model, see `verifier_for`; its parameters are data. It must have the dLLM's tokenizer, so
            there is no default.
        gen_length: G, positions to generate. Default: 256, enough for a reasoned answer.
        weight: R, between 0 (the verifier alone decides) and 1 (all is accepted); scalar or [B]. Default: 0.7, within
            APD's trade-off from 0.1 (more tokens a forward) to 0.9.
        window: W, positions before those of the step before whose keys and values are kept fresh; None recomputes
            everything. Scalar or [B], at least 1. Default: none, exact.
        lookahead: M, masked positions that exist at once; None is all. Scalar or [B]. Default: none, exact.
        sampling: how the draft is drawn; greedy by default. Not with `defer`.
        stop: when a row ends; only generated tokens are checked. Tokens that the same step wrote after the end stay in
            `Result.tokens`; `Result.lengths` leaves them out. Default: the model's end tokens.
        most_window, most_lookahead: the largest window and lookahead that the program has room for, so that changing
            them compiles nothing; None takes the numbers themselves, which must then be plain ones. Default: none, no
            more room than the numbers need.
        noise: g of the target: that of the draft ("shared", the universal coupling of section 3.2, by which most is
            accepted), fresh noise ("independent"), or "none", with which the target is the best token of the models'
            mixture at temperature 1 over all tokens, as in the official code. At temperature 0 all are the same.
            Default: shared, as in the paper.
        limits: derived from the rooms; do not pass it.
    """

    verifier: Verifier
    gen_length: int
    weight: float | jax.Array = 0.7
    window: Whole | None = None
    lookahead: Whole | None = None
    sampling: Sampling = Sampling()
    stop: Stop | None = None
    most_window: int | None = None
    most_lookahead: int | None = None
    noise: TargetNoise = "shared"
    limits: tuple[int, int] | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("weight", self.weight, 0.0, 1.0)
        check_choice("noise", self.noise, ("shared", "independent", "none"))
        if isinstance(self.sampling, Sampling) and self.sampling.target is not None:
            raise DllmError("apd writes a draft that its verifier agrees with, and a target is none; use leftright")

    def start_parts(self, denoiser: DenoiserLike) -> None:
        if not isinstance(self.verifier, Verifier):
            kind = type(self.verifier).__name__
            raise DllmError(f"verifier is of type {kind}; make one by verifier_for(model, verifier)")
        self.verifier.check(denoiser.vocab_size)

    def blocked(self, denoiser: DenoiserLike) -> jax.Array:
        return super().blocked(denoiser) | ~self.verifier.knows(denoiser.vocab_size)

    def read_prompt(self, prompt: jax.Array, canvas: Canvas, length: int) -> Any:
        checked_prompt(self.verifier.denoiser, prompt, canvas.prompt_lengths)
        return self.verifier.prefill(prompt, canvas.prompt_lengths, length)

    def write(
        self, denoiser: DenoiserLike, state: LeftRightState, front: Frontier, draft: Draft
    ) -> tuple[jax.Array, Any]:
        assert state.verifier_kv is not None
        tokens = write_rows(state.canvas.tokens, draft.token, front.start, front.undecided)
        scores, kv = self.verifier.scores(
            tokens, front.right, state.verifier_kv, front.span, front.undecided, denoiser.vocab_size
        )
        agreed = draft.token == self.target(denoiser, state, front, draft, scores)
        agreed |= ~front.open | front.among_first(1)  # what is written already or given, and the first that is drafted
        return jnp.cumprod(agreed, axis=1).astype(bool), kv

    def target(
        self, denoiser: DenoiserLike, state: LeftRightState, front: Frontier, draft: Draft, scores: jax.Array
    ) -> jax.Array:
        """The token that the product of experts draws at each position, [B, L].

        Args:
            scores: the verifier's logits [B, L, V].
        """
        weight = column(self.weight).astype(jnp.float32)
        mixed = weight * draft.logits + (1.0 - weight) * scores
        allowed = ~self.blocked(denoiser) & (jnp.arange(denoiser.vocab_size) != denoiser.mask_id)
        if draft.noise is None or self.noise == "none":
            return jnp.argmax(jnp.where(allowed, mixed, -jnp.inf), axis=-1)
        temperature, noise = column(self.sampling.temperature), draft.noise  # type: ignore[arg-type]
        if self.noise == "independent":
            noise = jnp.where(temperature > 0, self.draw_gumbel(denoiser, state, front, Purpose.TARGET), 0.0)
        mixed = mixed / jnp.where(temperature > 0, temperature, 1.0) + noise
        left = jnp.where(temperature > 0, draft.candidates, allowed)
        return jnp.argmax(jnp.where(left, mixed, -jnp.inf), axis=-1)


@pytree(static=STATIC)
class LeftRight(LeftToRight):
    """The baseline of APD: always writes the same number of tokens; one is exact left-to-right sampling of the dLLM.

    Attributes:
        gen_length: G, positions to generate. Default: 256, enough for a reasoned answer.
        tokens_per_step: K, tokens that a step writes, as far as the lookahead and the generation go. Scalar or [B].
            Default: exact left-to-right sampling.
        window: W, as in `APD`. Default: none, exact.
        lookahead: M, as in `APD`. Default: none, exact.
        sampling, limits: as in `APD`.
        stop: as in `APD`. Default: the model's end tokens.
        most_window, most_lookahead: as in `APD`. Default: none, no more room than the numbers need.
    """

    gen_length: int
    tokens_per_step: Whole = 1
    window: Whole | None = None
    lookahead: Whole | None = None
    sampling: Sampling = Sampling()
    stop: Stop | None = None
    most_window: int | None = None
    most_lookahead: int | None = None
    limits: tuple[int, int] | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("tokens_per_step", self.tokens_per_step, 1)

    def forwards(self, prompt_length: int) -> tuple[int, int]:
        """The same number twice, where all rows write as many tokens a step."""
        count = -(-self.gen_length // np.minimum(np.asarray(self.tokens_per_step), self.reach))
        return int(count.min()), int(count.max())

    def write(
        self, denoiser: DenoiserLike, state: LeftRightState, front: Frontier, draft: Draft
    ) -> tuple[jax.Array, Any]:
        return front.among_first(jnp.maximum(jnp.asarray(self.tokens_per_step), 1)), None
