"""Our rules, cache policies and loops with quirks of official code, which the recorded cases reproduce token for token.

`docs/design.md` and the papers' pages list them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.models.denoiser import DenoiserLike
from dllm_jax.pytree import pytree
from samplers import rules
from samplers.caches import DualCache, ForwardRequest, Outcome, PrefixCache, VicinityCache
from samplers.caches.base import BlockCacheState, RefreshedCache
from samplers.canvas import Canvas
from samplers.checks import check_whole
from samplers.loops import apd
from samplers.loops.block import BlockSampler, BlockState
from samplers.loops.left_to_right import LeftToRight
from samplers.rules.base import BlockView, Rule, rank
from samplers.tokens.noise import Purpose
from samplers.tokens.predictions import Predictions, ScoreFrom, column

# Rules ---------------------------------------------------------------------------------------------------------------


@pytree()
class LLaDA(rules.LLaDA):
    """Runs all S forwards of every block, empty ones too."""

    def block_done(self, view: BlockView, left: jax.Array, state: Any) -> jax.Array:
        return left & False

    def most_steps(self, view: BlockView) -> jax.Array:
        return self.block_steps(view)


@pytree()
class Dream(rules.Dream):
    """Runs every step of the schedule, also those that commit nothing."""

    def next_step(self, index: jax.Array, empty: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return index

    def block_done(self, view: BlockView, left: jax.Array, state: Any) -> jax.Array:
        return left & False

    def most_steps(self, view: BlockView) -> jax.Array:
        return self.block_steps(view)


@pytree()
class Factor(rules.Factor):
    """When all but the last candidate pass, the last is taken untested (Fast-dLLM)."""

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        accepted, state = super().decide(predictions, view, state)
        before_last = rank(predictions.confidence, view.undecided) < view.undecided.sum(axis=-1, keepdims=True) - 1
        return accepted | (
            view.undecided & jnp.all(accepted | ~before_last | ~view.undecided, axis=-1, keepdims=True)
        ), state


@pytree()
class Hierarchical(rules.Hierarchical):
    """The mask token can win its segment, which then commits nothing (dInfer); so can a whole forward."""

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        accepted = self.accepted(predictions.max_probability, view, view.undecided)
        return accepted & ~predictions.mask_wins, state

    def most_steps(self, view: BlockView) -> jax.Array:
        return jnp.full_like(view.step, jnp.iinfo(jnp.int32).max)


@pytree()
class FastDllmDream(Rule):
    """Fast-dLLM's block sampler for Dream: a block's first forward commits its first position and nothing else.

    The official window cannot predict its first position (its left neighbour is outside), so the cache-building pass
    must fill it; our `Denoiser` has no such gap and needs no such rule.
    """

    rule: Rule

    @property
    def score_from(self) -> ScoreFrom:  # type: ignore[override]
        return self.rule.score_from

    @property
    def reads_logits(self) -> bool:  # type: ignore[override]
        return self.rule.reads_logits

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        self.rule.check(gen_length, num_blocks)

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        return self.rule.init(batch, width, vocab_size)

    def adjust(self, logits: jax.Array, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        return self.rule.adjust(logits, view, state)

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        select, state = self.rule.decide(predictions, view, state)
        opening = (view.step == 0)[:, None]
        first = view.undecided & (view.positions == view.first[:, None])
        return (opening & first) | (~opening & select), state

    def most_steps(self, view: BlockView) -> jax.Array | None:
        return self.rule.most_steps(view)

    def block_done(self, view: BlockView, left: jax.Array, state: Any) -> jax.Array:
        return self.rule.block_done(view, left, state) & (view.step > 0)


# Cache policies of dInfer --------------------------------------------------------------------------------------------


@pytree()
class DInferCacheState(BlockCacheState):
    """`BlockCacheState`, and how often each row's keys and values were rebuilt, [B]."""

    builds: jax.Array


@pytree(static=("smooth",))
class DInferCache(RefreshedCache):
    """Rebuilds in each iteration whose number is a multiple of `refresh_every`; a rebuild is always followed by a
    window. Without smoothing a forward that rebuilds is one iteration with the next.

    Attributes:
        smooth: whether the sampler smooths.
    """

    smooth: bool = False

    def init(self, denoiser: DenoiserLike, batch: int, length: int) -> DInferCacheState:
        return DInferCacheState(**vars(super().init(denoiser, batch, length)), builds=jnp.zeros((batch,), jnp.int32))

    def stale(self, request: ForwardRequest, state: BlockCacheState) -> jax.Array:
        assert isinstance(state, DInferCacheState)
        iteration = request.nfe if self.smooth else request.nfe - state.builds
        return (state.built_for != request.block) | self.due(iteration, request, state)

    def due(self, iteration: jax.Array, request: ForwardRequest, state: BlockCacheState) -> jax.Array:
        """[B] bool, rows for which `refresh_every` asks for a rebuild."""
        if self.refresh_every is None:
            return iteration < 0
        return (iteration % jnp.asarray(self.refresh_every) == 0) & (state.built_at != request.nfe - 1)

    def rebuilt(self, request: ForwardRequest, state: BlockCacheState, rows: jax.Array) -> BlockCacheState:
        assert isinstance(state, DInferCacheState)
        new = super().rebuilt(request, state, rows)
        assert isinstance(new, DInferCacheState)
        return dataclasses.replace(new, builds=state.builds + rows)


@pytree()
class DInferPrefix(DInferCache, PrefixCache):
    """`PrefixCache` with dInfer's iterations."""


@pytree()
class DInferDual(DInferCache, DualCache):
    """`DualCache` with dInfer's iterations."""


_TWICE = -2  # of `built_for`: built, and to be built once more


@pytree()
class DInferVicinity(DInferCache, VicinityCache):
    """`VicinityCache` that counts forwards, refreshes in time from a row's second block on, and builds keys and values
    once more after one window when they were first stored in another block than the first."""

    def stale(self, request: ForwardRequest, state: BlockCacheState) -> jax.Array:
        again = (state.built_for == _TWICE) & (state.built_at != request.nfe - 1)
        often = self.due(request.nfe, request, state) & (request.block > 0)
        return ((state.built_for != request.block) & (state.built_for != _TWICE)) | again | often

    def rebuilt(self, request: ForwardRequest, state: BlockCacheState, rows: jax.Array) -> BlockCacheState:
        late = rows & (state.built_for == -1) & (request.block > 0)
        state = super().rebuilt(request, state, rows)
        return dataclasses.replace(state, built_for=jnp.where(late, _TWICE, state.built_for))


# Samplers ------------------------------------------------------------------------------------------------------------


@pytree()
class FastDllm(BlockSampler):
    """`fill_after_eos` does not fill after a forward that rebuilt a cache."""

    def filled(self, denoiser: DenoiserLike, state: BlockState, rows: jax.Array, outcome: Outcome) -> Canvas:
        return super().filled(denoiser, state, rows & ~outcome.full, outcome)


@pytree()
class NISampling(BlockSampler):
    """Enters blocks that the indicator has completed, for one forward each."""

    def next_block(self, state: BlockState) -> tuple[jax.Array, jax.Array]:
        block = jnp.where(state.canvas.nfe == 0, 0, state.block + 1)
        return block, block >= self.num_blocks(state.canvas)


@pytree(static=("eos_id", "early"))
class BlockDiffusion(BlockSampler):
    """Looks whether a row has ended when its block is complete (LLaDA2.0, SDAR), and besides in forwards that wrote an
    end token (LLaDA2.0's `eos_early_stop`).

    Attributes:
        eos_id: the end token.
        early: end within a block.
    """

    eos_id: int = 0
    early: bool = False

    def ends(self, state: BlockState, stopped: jax.Array, leaving: jax.Array) -> jax.Array:
        if not self.early:
            return stopped & leaving
        canvas = state.canvas
        now = (canvas.decoded_at == canvas.nfe[:, None] - 1) & (canvas.decoded_at >= 0)
        wrote = jnp.any(now & (canvas.generation(self.eos_id) == self.eos_id), axis=1)
        return stopped & (leaving | wrote)


@pytree()
class DInferState(BlockState):
    """`BlockState`, and the iterations until each row looks at its block again, [B]."""

    repeats: jax.Array


@pytree(static=("lockstep",))
class DInfer(BlockSampler):
    """dInfer's loop: looks whether a block is complete only after masks // `per_iteration` iterations, at least one and
    at most `most`; forwards on complete blocks change nothing, but count. A forward that rebuilt a cache is one
    iteration with the next. A stop condition ends a row when its block is complete.

    Attributes:
        most, per_iteration: of the unrolling.
        lockstep: rows of equal lengths stay in a block until all have completed it, still counting forwards.
    """

    most: int | jax.Array = 1
    per_iteration: int | jax.Array = 1
    lockstep: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("most", self.most, 1)
        check_whole("per_iteration", self.per_iteration, 1)

    def init(self, denoiser: DenoiserLike, prompt: jax.Array, *arguments: Any, **options: Any) -> DInferState:
        state = super().init(denoiser, prompt, *arguments, **options)
        return DInferState(**vars(state), repeats=self._iterations(state))

    def leaves(
        self, state: BlockState, view: BlockView, outcome: Outcome, last: jax.Array
    ) -> tuple[jax.Array, BlockState]:
        assert isinstance(state, DInferState)
        active = ~state.canvas.done
        repeats = state.repeats - (active & ~outcome.updated)
        done = self.rule.block_done(view, self._count(state) > 0, state.rule)
        again = jnp.where(repeats == 0, self._iterations(state), repeats)
        return active & done & (repeats == 0), dataclasses.replace(state, repeats=again)

    def entered(self, state: BlockState, rows: jax.Array) -> BlockState:
        state = super().entered(state, rows)
        if not isinstance(state, DInferState):  # before the first forward
            return state
        return dataclasses.replace(state, repeats=jnp.where(rows, self._iterations(state), state.repeats))

    def ends(self, state: BlockState, stopped: jax.Array, leaving: jax.Array) -> jax.Array:
        return stopped & leaving

    def _count(self, state: BlockState) -> jax.Array:
        """[B], undecided positions of the active block; in lockstep those of all rows together."""
        count = self.block_undecided(state).sum(axis=1, dtype=jnp.int32)
        if not self.lockstep:
            return count
        return jnp.broadcast_to(jnp.where(state.canvas.done, 0, count).sum(dtype=jnp.int32), count.shape)

    def _iterations(self, state: BlockState) -> jax.Array:
        """[B], iterations until the next look at the block."""
        return jnp.clip(self._count(state) // self.per_iteration, 1, self.most)


class SquaredTemperature(LeftToRight):
    """The draft's temperature counts twice, argmax(z / T + T g) (APD)."""

    def perturbed(self, z: jax.Array, noise: jax.Array) -> jax.Array:
        assert self.sampling.temperature is not None  # else nothing is drawn
        return z + column(self.sampling.temperature) * noise


@pytree()
class APD(SquaredTemperature, apd.APD):
    """With `noise="none"` the official code's."""


@pytree()
class LeftRight(SquaredTemperature, apd.LeftRight):
    """The official code's."""


@pytree()
class DInferBlocks(DInfer):
    """dInfer's loop for block diffusion: at least two iterations between two looks, and every forward is one."""

    def leaves(
        self, state: BlockState, view: BlockView, outcome: Outcome, last: jax.Array
    ) -> tuple[jax.Array, BlockState]:
        return super().leaves(state, view, outcome._replace(updated=outcome.updated & False), last)

    def _iterations(self, state: BlockState) -> jax.Array:
        return jnp.maximum(super()._iterations(state), 2)


# Random numbers ------------------------------------------------------------------------------------------------------


@pytree()
class TableNoise:
    """Replays recorded draws, the same for every row: for comparing with other implementations' random numbers.

    Attributes:
        tokens: [steps, positions, V] uniforms for drawing tokens, or None.
        order: [steps, positions] uniforms for random orders and random unmasking, or None.
    """

    tokens: jax.Array | None = None
    order: jax.Array | None = None

    def uniform(
        self, purpose: Purpose, step: jax.Array, positions: jax.Array, ids: jax.Array | None = None
    ) -> jax.Array:
        """As `Noise`."""
        table = self.tokens if purpose == Purpose.TOKENS else self.order
        if table is None:
            raise ValueError(f"this TableNoise has no draws for {purpose.name.lower()}")
        if ids is None:
            return table[step[:, None], positions]
        return table[step[:, None, None], positions[..., None], ids]
