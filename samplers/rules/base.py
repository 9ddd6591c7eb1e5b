"""What an unmasking rule is: a pure function from predictions and masks to the positions that are committed."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.errors import DllmError
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
    """

    masked: jax.Array
    positions: jax.Array
    first: jax.Array
    step: jax.Array
    block_masks: jax.Array
    num_blocks: jax.Array
    noise: Noise | None
    nfe: jax.Array

    def draw(self, purpose: Purpose, columns: int | None = None) -> jax.Array:
        """Fresh draws in (0, 1) for the block's positions: [B, W], or [B, W, columns].

        Raises:
            DllmError: when the generation was started without a key.
        """
        if self.noise is None:
            raise DllmError("this sampler draws random numbers and was given none; pass key=jax.random.key(seed)")
        return self.noise.uniform(purpose, self.nfe, self.positions, columns)

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

    def check(self, gen_length: int, num_blocks: int) -> None:
        """Raises DllmError when the rule's numbers make no sense with these lengths."""

    def init(self, batch: int) -> Any:
        """State for `batch` rows at the start of a generation."""
        return ()

    def decide(self, predictions: Predictions, view: BlockView, state: Any) -> tuple[jax.Array, Any]:
        """Which positions are committed, [B, W] bool (a subset of `view.masked`), and the new state."""
        raise NotImplementedError

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


def error_of(predictions: Predictions, proxy: Proxy) -> jax.Array:
    """EB-Sampler's error proxy (section 3 of arXiv 2505.24857), [B, W]: smaller is surer."""
    match proxy:
        case "confidence":
            return -predictions.max_probability
        case "entropy":
            return predictions.entropy
        case "margin":
            return -predictions.margin


def check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises DllmError unless the value is one of those allowed."""
    if value not in allowed:
        raise DllmError(f"{what} {value!r} is unknown; choose one of {', '.join(allowed)}")


def check_number(what: str, value: Any, low: float, high: float = float("inf")) -> None:
    """Raises DllmError for a string, and for a concrete number outside [low, high] or NaN; arrays are let through."""
    if isinstance(value, str):
        raise DllmError(f"{what} is the string {value!r}; give a number")
    if isinstance(value, (int, float, np.number)) and not low <= value <= high:
        bound = f"between {low:.12g} and {high:.12g}" if high != float("inf") else f"at least {low:.12g}"
        raise DllmError(f"{what} is {value:.12g}; it must be {bound}")


def check_whole(what: str, value: Any, low: float, high: float = float("inf")) -> None:
    """`check_number` for what only makes sense as a whole number."""
    check_number(what, value, low, high)
    if isinstance(value, (float, np.floating)):
        raise DllmError(f"{what} is {value}; it must be a whole number")


def check_length(what: str, value: Any, optional: bool = False) -> None:
    """Raises DllmError unless a length, which must be known when the program is built, is a whole number above 0."""
    if not isinstance(value, (int, float, str, np.number)) and not (optional and value is None):
        raise DllmError(f"{what} is {value!r}; it must be a whole number")
    check_whole(what, value, 1)


def check_steps(steps: Any, num_blocks: int) -> None:
    """Raises DllmError for a concrete number of steps that the blocks cannot share evenly."""
    check_whole("steps", steps, 1)
    if isinstance(steps, (int, np.integer)) and steps % num_blocks:
        raise DllmError(f"steps {steps} is not a multiple of the {num_blocks} blocks; choose a multiple")
