"""Requests, and what a step of the engine changed about them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dllm_jax import DllmError, Model
from samplers.config.factory import CanvasSampler
from samplers.config.registry import title
from samplers.constraints.constraint import Constraint
from samplers.engine.program import with_numbers
from samplers.generation import Generation, Trace, answer
from samplers.inputs import is_given
from samplers.sampler import Result


class EngineLimit(DllmError):
    """What an engine cannot do that another could.

    Attributes:
        problem: the sentence without its remedy, for callers who know another.
        room: whether an engine with `draws` or `constraint_states` may be all that is missing.
    """

    def __init__(self, problem: str, remedy: str, *, room: bool = False) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.room = problem, room


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt to answer, and its answer once it has ended.

    Attributes:
        prompt: its token ids.
        gen_length: positions to generate.
        key_data: [2] uint32, of its typed key.
        given: [G] int32, tokens the canvas comes with, as in `BlockSampler.init`; None for none.
        numbers: the sampler's for this request, in the order of `program.numbers_of`; None for the engine's own.
        constraint: the form of its answer, in NumPy's arrays of the engine's sizes; None for any.
        logit_bias: token id -> what is added to its logits; None for nothing.
        top_logprobs: most probable tokens to keep of each position, 0 for none.
        stop: strings and token ids that end it, besides those of the engine's sampler.
        sampler_stop: those of the engine's sampler; the text is cut at their strings, too.
        number: its name; by default the engine counts from 0 in the order of submission.
        slot: where it runs; None before and after.
        result: on the host, with a batch of one; None until it has ended.
        top: with `top_logprobs`, once it has ended, the most probable tokens [G, K] int32 of the forward that wrote
            each position, the most probable first, and their log-probabilities [G, K] float32, of the distribution that
            `Result.logprobs` is of, without the mask token. Where no forward chose the token they mean nothing.
        seconds: from its admission to its end, together with whatever ran in the other slots.
        cancelled: whether it was cancelled.
        cached: tokens of its prompt that were not read, as a kept prompt begins with them.
        reported: its forwards that updates have reported.
        steps: its result after each step so far, if these are kept (`keep_step`).
    """

    prompt: list[int]
    gen_length: int
    key_data: np.ndarray
    given: np.ndarray | None = None
    numbers: tuple[Any, ...] | None = None
    constraint: Constraint | None = None
    logit_bias: Mapping[int, float] | None = None
    top_logprobs: int = 0
    stop: Sequence[str | int] = ()
    sampler_stop: Sequence[str | int] = ()
    number: int = -1
    slot: int | None = None
    result: Result | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None
    seconds: float = 0.0
    cancelled: bool = False
    cached: int = 0
    reported: int = 0
    steps: list[Result] = dataclasses.field(default_factory=list, repr=False)
    _model: Model | None = dataclasses.field(default=None, repr=False)
    _sampler: Any = dataclasses.field(default=None, repr=False)

    def bind(self, model: Model, sampler: CanvasSampler) -> None:
        """Stores the model and the sampler that run it, which its answer needs."""
        self._model, self._sampler = model, sampler

    @functools.cached_property
    def generation(self) -> Generation:
        """The answer.

        Raises:
            DllmError: before it has ended.
        """
        if self.result is None or self._model is None:
            raise DllmError(f"request {self.number} has not ended; run engine.results(), or engine.step() until it has")
        return answer(self._model, self.prompt, self.result, 0, [*self.stop, *self.sampler_stop], self.trace)

    @property
    def trace(self) -> Trace:
        """The history so far, of a request that was submitted."""
        assert self._model is not None
        sampler = self._sampler if self.numbers is None else with_numbers(self._sampler, self.numbers)
        length = self.gen_length
        given = None if self.given is None else is_given(np.asarray(self.given[:length]), self._model.denoiser)
        return Trace(
            tokenizer=self._model.tokenizer,
            config=self._model.config,
            sampler=title(sampler),
            block_length=sampler.width,
            prompt=self.prompt,
            given=np.zeros(length, bool) if given is None else given,
            steps=self.steps or ([] if self.result is None else [self.result]),
        )

    def keep_step(self, result: Result) -> None:
        """Adds the result after a step to `steps`; after a step without a forward it replaces the one before."""
        if self.steps and self.steps[-1].nfe[0] == result.nfe[0]:
            self.steps.pop()
        self.steps.append(result)


@dataclasses.dataclass(frozen=True)
class Update:
    """What a step did to a request.

    Attributes:
        nfe: its forwards so far.
        tokens: [G] int32, its canvas; the end-of-sequence id where nothing is written.
        written: positions that the step wrote.
        masked: [G] bool, positions where nothing is written yet.
        pending: [G] bool, positions that may still change; those of them that are written are provisional.
        final: length of the unbroken beginning that will not change.
        done: whether it has ended.
        result: on the host, with a batch of one, so far.
    """

    request: Request
    nfe: int
    tokens: np.ndarray
    written: list[int]
    masked: np.ndarray
    pending: np.ndarray
    final: int
    done: bool
    result: Result


def requests_of(
    sampler: CanvasSampler, prompts: Sequence[list[int]], keys: jax.Array, stop: Sequence[str | int] = ()
) -> list[Request]:
    """Requests with the sampler's own numbers and stop patterns.

    Args:
        prompts: token ids.
        keys: typed, one for each.
        stop: the patterns that the sampler was made with; texts are cut at their strings.
    """
    data = np.asarray(jax.random.key_data(keys))
    pairs = enumerate(zip(prompts, data, strict=True))
    return [Request(prompt, sampler.gen_length, key, sampler_stop=stop, number=i) for i, (prompt, key) in pairs]
