"""What an unmasking rule is: a pure function from predictions and masks to the positions that are committed."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dllm_jax.errors import DllmError
from samplers.caches.base import DenoiserLike
from samplers.noise import Noise, Purpose, gumbel
from samplers.predictions import Predictions, ScoreFrom

Number = float | jax.Array
Proxy = Literal["confidence", "entropy", "margin"]
PROXIES: tuple[Proxy, ...] = ("confidence", "entropy", "margin")


@dataclasses.dataclass(frozen=True)
class BlockView:
    """The active block of every row as a rule sees it. W is the block length.

    Attributes:
        masked: [B, W] bool, the positions that may be committed now.
        positions: [B, W] int32, relative to the start of the generation.
        first: [B] int32, position of the block's first token.
        step: [B] int32, forwards this row has spent on this block before this one.
        block_masks: [B] int32, masks the block had when the row entered it.
        num_blocks: [B] int32, blocks of the row's generation.
        noise: source of random numbers, None where the caller gave none.
        nfe: [B] int32, forwards of the row before this one.
        caution: [B] float32, thresholds on the confidence count as at least this (see `Smoothing`); None for no such
            bound.
    """

    masked: jax.Array
    positions: jax.Array
    first: jax.Array
    step: jax.Array
    block_masks: jax.Array
    num_blocks: jax.Array
    noise: Noise | None
    nfe: jax.Array
    caution: jax.Array | None = None

    def at_least(self, threshold: "Number") -> jax.Array:
        """A rule's threshold on the confidence as it counts now, against [B, W]."""
        wanted = per_row(threshold)
        return wanted if self.caution is None else jnp.maximum(wanted, self.caution[:, None])

    def draw(self, purpose: Purpose, ids: jax.Array | None = None) -> jax.Array:
        """Fresh draws in (0, 1) for the block's positions: [B, W], or [B, W, n] for each of some ids [n].

        Raises:
            DllmError: when the generation was started without a key.
        """
        if self.noise is None:
            raise DllmError("this sampler draws random numbers and was given none; pass key=jax.random.key(seed)")
        return self.noise.uniform(purpose, self.nfe, self.positions, ids)

    def uniform(self) -> jax.Array:
        """Fresh draws in (0, 1) that order or select the block's positions, [B, W]."""
        return self.draw(Purpose.ORDER)

    def gumbel(self) -> jax.Array:
        """Fresh standard Gumbel noise for the block's positions, [B, W]."""
        return gumbel(self.uniform())


class Rule:
    """Base of all unmasking rules; subclasses are pytrees (`dllm_jax.pytree`) whose numbers are traced leaves.

    Numbers are scalars, or [B] arrays for a value per row. State is a pytree of arrays with a leading batch axis.
    """

    score_from: ScoreFrom = "raw"
    reads_hidden: bool = False  # whether `sure` is asked
    reads_logits: bool = False  # whether `adjust` is asked; only then do logits of a whole block exist

    def check(self, gen_length: int, num_blocks: int | None) -> None:
        """Raises DllmError when the rule's numbers make no sense with these lengths; the number of blocks is None
        where it differs by row."""

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        """State for `batch` rows of blocks of `width` at the start of a generation."""
        return ()

    def adjust(self, logits: jax.Array, view: "BlockView", state: Any) -> tuple[jax.Array, Any]:
        """The logits [B, W, V] float32 that tokens and scores are taken from, and the new state. The engine asks rules
        that set `reads_logits`."""
        return logits, state

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        """Which positions are committed, [B, W] bool (a subset of `view.masked`), and the new state."""
        raise NotImplementedError

    def sure(self, denoiser: DenoiserLike, hidden: jax.Array, logits: jax.Array, best: Predictions) -> jax.Array:
        """Positions that are committed besides those of `decide`, [B, W] bool, by the model's hidden states. The engine
        asks for the active block, and for later ones if the rule `looks_ahead`; it drops what is not masked, and what
        has the mask token or a deferred one as its best. What is committed this way is the best token, never a drawn
        one.

        Args:
            hidden: [B, W, D], as `DenoiserLike.logits` takes them.
            logits: [B, W, V] float32, of these.
            best: the most probable tokens and their scores.
        """
        raise NotImplementedError

    def looks_ahead(self, cached: bool) -> bool:
        """Whether `sure` is asked for later blocks as well, as far as a forward runs them.

        Args:
            cached: whether a cache policy reuses keys and values, in which tokens written ahead are still masks.
        """
        return False

    def block_done(self, view: BlockView, masks_left: jax.Array) -> jax.Array:
        """[B] bool, whether a row may leave its block after this step. masks_left [B] bool: masks remain in it."""
        return ~masks_left


def per_row(value: Number) -> jax.Array:
    """A scalar or [B] number as something that broadcasts against [B, W]."""
    return jnp.asarray(value)[..., None]


def rank(score: jax.Array, masked: jax.Array) -> jax.Array:
    """0 for the largest score among the masked positions, 1 for the next ...; ties go to the lower position.

    [B, W] -> [B, W] int32; positions that are not masked rank behind all that are. Counting comparisons costs W^2
    cheap operations and no sort.
    """
    score = jnp.where(masked, score, -jnp.inf)
    index = jnp.arange(score.shape[-1])
    mine, other = score[..., :, None], score[..., None, :]
    earlier = index[None, :] < index[:, None]
    tie_first = jnp.where(masked[..., :, None] == masked[..., None, :], earlier, masked[..., None, :])
    return jnp.sum((other > mine) | ((other == mine) & tie_first), axis=-1, dtype=jnp.int32)


def not_masks(predictions: Predictions, masked: jax.Array) -> jax.Array:
    """The masked positions whose best token is not the mask token itself, [B, W] bool; where there are none, the surest
    masked position alone, so that a step can always commit something."""
    free = masked & ~predictions.mask_wins
    stuck = masked & ~jnp.any(free, axis=-1, keepdims=True)
    return free | (stuck & (rank(predictions.confidence, stuck) == 0))


def error_of(predictions: Predictions, proxy: Proxy) -> jax.Array:
    """EB-Sampler's error proxy (section 3 of arXiv 2505.24857), [B, W]: smaller is surer."""
    match proxy:
        case "confidence":
            return -predictions.max_probability
        case "entropy":
            return predictions.entropy
        case "margin":
            return -predictions.margin
