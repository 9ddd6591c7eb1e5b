"""What came out of one prompt, for people."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dllm_jax import Model, ModelConfig
from samplers.loops.left_to_right import DraftResult
from samplers.sampler import Result
from samplers.text.decode import text_of


class Moment(NamedTuple):
    """A canvas of G positions after some forwards; fields as in `Result`, of one row on the host.

    Attributes:
        nfe, full_forwards, cache_updates: forwards so far.
        tokens: [G] int32, where nothing is written anything.
        decoded_at: [G] int32.
        logprobs: [G] float32.
    """

    nfe: int
    full_forwards: int
    cache_updates: int
    tokens: np.ndarray
    decoded_at: np.ndarray
    logprobs: np.ndarray


def moment(result: Result, row: int, length: int) -> Moment:
    """The first `length` positions of a row of a result on the host."""
    own = lambda x: np.array(x[row, :length])
    return Moment(
        nfe=int(result.nfe[row]),
        full_forwards=int(result.full_forwards[row]),
        cache_updates=int(result.cache_updates[row]),
        tokens=own(result.tokens),
        decoded_at=own(result.decoded_at),
        logprobs=own(result.logprobs),
    )


@dataclasses.dataclass(frozen=True)
class Trace:
    """How an answer came about, for `samplers.show`.

    Attributes:
        tokenizer, config: the model's, which say what its tokens look like.
        sampler: it in a few words.
        block_length: positions between two borders.
        prompt: token ids.
        given: [G] bool, positions of the canvas that came with a token.
        edits: how often a token that was written was replaced by another.
        moments: the canvas before the first forward and after each where `samplers.record` made the answer; else its
            end alone.
    """

    tokenizer: Any
    config: ModelConfig
    sampler: str
    block_length: int
    prompt: list[int]
    given: np.ndarray
    edits: int
    moments: Sequence[Moment]


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's answer.

    Attributes:
        text: the answer up to the first end token or stop string, special tokens left out.
        tokens: its token ids, without the end token.
        prompt_tokens: number of tokens of the prompt.
        nfe: forwards of the denoiser.
        full_forwards: those of them that covered the whole sequence.
        cache_updates: those of them whose keys and values were all stored for later ones.
        decoded_at: per canvas position the forward that committed it, -1 where none did.
        canvas: all tokens of the canvas.
        logprobs: of `tokens`, as in `Result`; None where no forward chose the token.
        verifier_forwards: forwards of the verifier, 0 for a sampler that writes from left to right without one; None
            for all other samplers.
        trace: what `samplers.show` draws besides; None for an answer that was put together by hand.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    nfe: int
    full_forwards: int
    cache_updates: int
    decoded_at: list[int] = dataclasses.field(repr=False)
    canvas: list[int] = dataclasses.field(repr=False)
    logprobs: list[float | None] = dataclasses.field(repr=False, compare=False)  # programs differ in the last bits
    verifier_forwards: int | None = None
    trace: Trace | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens per forward (TPF)."""
        return len(self.tokens) / max(self.nfe, 1)

    @property
    def committed(self) -> int:
        """Tokens that the forwards wrote, those behind the end too."""
        return sum(at >= 0 for at in self.decoded_at)


def answer(
    model: Model,
    prompt: list[int],
    result: Result,
    row: int,
    stop: Sequence[str | int] = (),
    trace: Trace | None = None,
) -> Generation:
    """One row of a result on the host as a `Generation`, its text cut at the stop strings."""
    tokens = result.tokens[row, : int(result.lengths[row])].tolist()
    return Generation(
        text=text_of(model, tokens, stop),
        tokens=tokens,
        prompt_tokens=len(prompt),
        nfe=int(result.nfe[row]),
        full_forwards=int(result.full_forwards[row]),
        cache_updates=int(result.cache_updates[row]),
        decoded_at=result.decoded_at[row].tolist(),
        canvas=result.tokens[row].tolist(),
        logprobs=told_logprobs(result.logprobs[row, : len(tokens)]),
        verifier_forwards=int(result.verifier_forwards[row]) if isinstance(result, DraftResult) else None,
        trace=trace,
    )


def told_logprobs(values: np.ndarray | jax.Array) -> list[float | None]:
    """Log-probabilities [N] as JSON takes them."""
    return [x if math.isfinite(x) else None for x in values.tolist()]
