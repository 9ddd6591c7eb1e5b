"""The answer to one prompt, and its history."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dllm_jax import Model, ModelConfig
from samplers.loops.left_to_right import DraftResult
from samplers.sampler import Result
from samplers.text.decode import text_of


@dataclasses.dataclass(frozen=True)
class Trace:
    """The history of an answer, which `samplers.show` draws. G positions.

    Attributes:
        tokenizer, config: the model's, which turn its tokens into text.
        sampler: its short name.
        block_length: positions between two borders.
        prompt: token ids.
        given: [G] bool, positions of the canvas that came with a token.
        steps: results on the host, each with a batch of one and at least G positions: after every forward where
            `generate(..., trace=True)` made the answer, else the last one alone.
    """

    tokenizer: Any
    config: ModelConfig
    sampler: str
    block_length: int
    prompt: list[int]
    given: np.ndarray
    steps: Sequence[Result]


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
        trace: its history, which `samplers.show` draws; None for an answer that was made by hand.
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
        """Tokens that the forwards wrote, those after the end too."""
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
        logprobs=finite_or_none(result.logprobs[row, : len(tokens)]),
        verifier_forwards=int(result.verifier_forwards[row]) if isinstance(result, DraftResult) else None,
        trace=trace,
    )


def finite_or_none(values: np.ndarray | jax.Array) -> list[float | None]:
    """Log-probabilities [N] as JSON writes them."""
    return [x if math.isfinite(x) else None for x in values.tolist()]
