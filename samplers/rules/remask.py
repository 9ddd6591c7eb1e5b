"""Remasking: committed positions may be masked again while steps are left."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax.pytree import pytree
from samplers.checks import check_choice, check_number, check_steps, check_threshold, check_whole
from samplers.rules.base import BlockView, Change, Number, Rule, per_row, rank
from samplers.tokens.predictions import Predictions


class RemaskState(NamedTuple):
    """What is remembered of the active block.

    Attributes:
        confidence: [B, W] float32, of a written token the confidence with which it was committed (ReMDM's psi).
        reopened: [B] int32, how often a position was reopened.
    """

    confidence: jax.Array
    reopened: jax.Array


@pytree(static=("schedule",))
class Remask(Rule):
    """ReMDM (arXiv 2503.00307), or the reopening of tokens that the model has become uncertain of; both in S = steps /
    number of blocks forwards per block, of which the last commits all and reopens none. ReMDM itself uses one block.

    ReMDM's sampler: time falls linearly, so that a_t = i / S and a_s = (i + 1) / S in forward i (from 0), and

    - an undecided position is committed with probability (a_s - (1 - sigma) a_t) / (1 - a_t), that is
      (1 + sigma i) / (S - i);
    - a written one is reopened with probability sigma <= sigma_max = min(1, (1 - a_s) / a_t), which is 0 in the last.

    The published tokens are drawn: set `Sampling(temperature=1.0)`. With the defaults it is ReMDM-conf; more steps than
    positions are useful. eta = 0 is `Dream(steps, alg="origin", eps=0)`.

    With a `threshold`, which is ours and deterministic: forward i commits the most confident ceil(undecided / (S - i)),
    as `LLaDA` does, and reopens the least probable written tokens below the threshold. A prediction gives a written
    token's probability only if it is the predicted token; else at most what the other one leaves and at most the
    largest of all, and that bound is compared. The block is complete when a forward finds nothing to reopen.

    Attributes:
        steps: forwards of the whole generation, a multiple of the number of blocks. Default: one a position; more of
            them give more chances to correct tokens.
        schedule: sigma is min(eta, sigma_max) for "cap" and eta sigma_max for "rescale"; "conf" shares the latter among
            the block's written tokens by softmax(-psi), psi being the probability that each had when it was committed,
            and commits undecided positions with sigma = 0, as the published code does. Default: ReMDM-conf, which
            spares tokens that were committed with confidence.
        eta: in [0, 1]. Default: all that the schedule allows.
        threshold: None is ReMDM, and `budget` counts only with a number. Default: none, ReMDM as published.
        budget: how often a block's positions are reopened in all; None is once for each on average. Default: none, so
            that no block is written over and over.
    """

    steps: int | jax.Array
    schedule: Literal["conf", "cap", "rescale"] = "conf"
    eta: Number = 1.0
    threshold: Number | None = None
    budget: int | jax.Array | None = None

    revises = True

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        check_steps(self.steps, num_blocks)
        check_choice("schedule", self.schedule, ("conf", "cap", "rescale"))
        check_number("eta", self.eta, 0.0, 1.0)
        check_threshold("threshold", self.threshold)
        check_whole("budget", self.budget, 0)

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        return RemaskState(jnp.ones((batch, width), jnp.float32), jnp.zeros((batch,), jnp.int32))

    def most_steps(self, view: BlockView) -> jax.Array:
        """S."""
        return jnp.maximum(jnp.asarray(self.steps) // view.num_blocks, 1)

    def change(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[Change, Any]:
        first = view.step == 0
        state = RemaskState(
            jnp.where(first[:, None], 1.0, state.confidence), jnp.where(first, 0, state.reopened).astype(jnp.int32)
        )
        if self.threshold is None:
            commit, reopen = self._drawn(view, state)
        else:
            commit, reopen = self._most_confident(predictions, view), self._doubted(predictions, view, state)
        tokens = jnp.where(reopen, view.mask_id, jnp.where(commit, predictions.token, view.tokens))
        state = RemaskState(
            jnp.where(commit, predictions.confidence, state.confidence),
            state.reopened + reopen.sum(axis=1, dtype=jnp.int32),
        )
        return Change(tokens, (view.undecided & ~commit) | reopen), state

    def block_done(self, view: BlockView, left: jax.Array, state: Any) -> jax.Array:
        """Rows without undecided positions in which no forward, or only the last one, could reopen a position."""
        if self.threshold is None:
            settled = jnp.asarray(self.eta) <= 0
        else:
            may_not = (jnp.asarray(self.threshold) <= 0) | (state.reopened >= self._budget(view))
            settled = may_not | ~view.undecided.any(axis=1)
        return ~left & (settled | (view.step + 2 >= self.most_steps(view)))

    def _drawn(self, view: BlockView, state: RemaskState) -> tuple[jax.Array, jax.Array]:
        """What is committed and what reopened by chance, [B, W] bool each. A position is undecided or written, so that
        one draw for each decides both."""
        i, steps, eta = view.step[:, None], self.most_steps(view)[:, None], per_row(self.eta)
        highest = jnp.clip((steps - 1 - i) / jnp.maximum(i, 1), 0.0, 1.0)
        sigma = jnp.minimum(eta, highest) if self.schedule == "cap" else eta * highest
        draw, commit_sigma = view.uniform(), sigma
        if self.schedule == "conf":
            weight = jnp.where(view.written, jnp.exp(-state.confidence), 0.0)
            commit_sigma = jnp.zeros_like(sigma)
            sigma = sigma * weight / jnp.maximum(weight.sum(axis=1, keepdims=True), 0.1)
        commit = view.undecided & (draw < (1 + commit_sigma * i) / jnp.maximum(steps - i, 1))
        return commit, view.written & (draw < sigma)

    def _most_confident(self, predictions: Predictions, view: BlockView) -> jax.Array:
        """The undecided positions that are committed, [B, W] bool, such that the steps left have about as many each."""
        left = jnp.maximum(self.most_steps(view) - view.step, 1)
        quota = -(-view.undecided.sum(axis=1, dtype=jnp.int32) // left)
        return view.undecided & (rank(predictions.confidence, view.undecided) < quota[:, None])

    def _doubted(self, predictions: Predictions, view: BlockView, state: RemaskState) -> jax.Array:
        """The written positions that are reopened, [B, W] bool."""
        sure = predictions.confidence
        at_most = jnp.minimum(1.0 - sure, predictions.max_probability)
        now = jnp.where(predictions.token == view.tokens, sure, at_most)
        low = view.written & predictions.finite & (now < per_row(self.threshold))  # type: ignore[arg-type]
        low &= (view.step + 1 < self.most_steps(view))[:, None]
        return low & (rank(-now, low) < (self._budget(view) - state.reopened)[:, None])

    def _budget(self, view: BlockView) -> jax.Array:
        return view.block_undecided if self.budget is None else jnp.asarray(self.budget)
