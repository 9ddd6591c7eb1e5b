"""Generations by single steps, which keep what every forward did.

A compiled generation keeps of each position the forward that wrote it last. Which token stood there before, and which
forwards covered the whole sequence, is known only to who looks after every forward:

    answer = record(model, "Question", rule="remask")
    show(answer)
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from tqdm import tqdm

from dllm_jax import Model
from samplers.config.factory import CanvasSampler
from samplers.engine.engine import Request, requests_of
from samplers.generate import prepare
from samplers.generation import Generation, moment
from samplers.rules import Rule
from samplers.sampler import Result, stream, warn_if_broken
from samplers.text.prompts import Prompt, bucket_length, pad_prompts

_result_jit = jax.jit(lambda sampler, denoiser, state: sampler.result(denoiser, state))


@overload
def record(model: Model, prompts: str, **options: Any) -> Generation: ...


@overload
def record(model: Model, prompts: Sequence[Prompt], **options: Any) -> list[Generation]: ...


def record(
    model: Model,
    prompts: str | Sequence[Prompt],
    *,
    sampler: str | Rule | CanvasSampler | None = None,
    chat: bool = False,
    system: str | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> Generation | list[Generation]:
    """The answers of `samplers.generate`, whose traces tell of every forward; slower, since each is a call of its own.

    Args:
        prompts, sampler, chat, system, seed, options: as in `samplers.generate`.
        progress: a progress bar over prompts; by default where there are several and someone is watching.

    Returns:
        A `Generation` for a single string, else a list of them.

    Raises:
        DllmError: for bad prompts or options; before anything is compiled.

    Warns:
        RuntimeWarning: naming the row and the forward, when the model's logits are not finite.
    """
    listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
    sampler, rows, keys = prepare(model, listed, sampler=sampler, chat=chat, system=system, seed=seed, **options)
    requests = requests_of(sampler, rows, keys, stop=options.get("stop") or ())
    answers = [request.generation for request in record_all(model, sampler, requests, progress)]
    return answers[0] if isinstance(prompts, str) else answers


def record_all(
    model: Model, sampler: CanvasSampler, requests: Sequence[Request], progress: bool | None = None
) -> Iterator[Request]:
    """The requests, each recorded alone, with a progress bar as `record` has it.

    Warns:
        RuntimeWarning: as `record`.
    """
    hide = len(requests) == 1 if progress is None else not progress
    for request in tqdm(requests, desc="recording", unit="prompt", disable=hide or None):
        yield recorded(model, sampler, request)


def compile_steps(model: Model, sampler: CanvasSampler, requests: Sequence[Request]) -> float:
    """Compiles what the requests will run, by the first steps of one of each padded length; the seconds it took."""
    start = time.perf_counter()
    lengths = {bucket_length(len(request.prompt)): request for request in requests}
    for request in lengths.values():
        for state in itertools.islice(states_of(model, sampler, request), 3):
            jax.block_until_ready(look(model, sampler, state))
    return time.perf_counter() - start


def recorded(model: Model, sampler: CanvasSampler, request: Request) -> Request:
    """The request, run alone by single steps; its own numbers must be those of the sampler.

    Warns:
        RuntimeWarning: as `record`.
    """
    for _ in steps_of(model, sampler, request):
        pass
    assert request.result is not None
    warn_if_broken(request.result, [request.number])
    return request


def steps_of(model: Model, sampler: CanvasSampler, request: Request) -> Iterator[tuple[Result, float]]:
    """Runs a request, and puts its result and its moments into it.

    Yields:
        Its result so far on the host, before the first step and after each one, and the seconds the step took.
    """
    moments, start = list[Any](), time.perf_counter()
    states, request.seconds = states_of(model, sampler, request), 0.0
    while (state := jax.block_until_ready(next(states, None))) is not None:
        took = time.perf_counter() - start
        result: Result = jax.device_get(look(model, sampler, state))
        now = moment(result, 0, request.gen_length)
        if moments and moments[-1].nfe == now.nfe:  # a step without a forward
            moments.pop()
        moments.append(now)
        request.seconds += took
        request.result, request.moments = result, moments
        request.run_by(model, sampler)
        yield result, took
        start = time.perf_counter()


def states_of(model: Model, sampler: CanvasSampler, request: Request) -> Iterator[Any]:
    """States of a request that runs alone, of a batch of one."""
    options: dict[str, Any] = {}
    if request.given is not None:
        options["given"] = jnp.asarray(request.given)[None]
    if request.gen_length != sampler.gen_length:
        options["gen_lengths"] = jnp.asarray([request.gen_length], jnp.int32)
    key = jax.random.wrap_key_data(jnp.asarray(request.key_data))[None]
    return stream(sampler, model.denoiser, *pad_prompts([request.prompt]), key=key, **options)


def look(model: Model, sampler: CanvasSampler, state: Any) -> Result:
    """The result so far."""
    found: Result = _result_jit(sampler, model.denoiser, state)
    return found
