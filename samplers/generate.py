"""Text in, text out: prompts are encoded, pass through the slots of one compiled program, and are decoded."""

from collections.abc import Callable, Sequence
from typing import Any, overload

import jax

from dllm_jax import DllmError, Model
from samplers.checks import check_length, check_seed
from samplers.config.factory import CanvasSampler
from samplers.config.sampler_config import SamplerConfig, make_sampler
from samplers.engine.requests import Update, requests_of
from samplers.engine.runner import run_all
from samplers.generation import Generation
from samplers.rules import Rule
from samplers.text.prompts import Prompt, check_lengths, check_prompts, encode_prompt
from samplers.tokens.noise import row_keys


@overload
def generate(model: Model, prompts: str, **options: Any) -> Generation: ...


@overload
def generate(model: Model, prompts: Sequence[Prompt], **options: Any) -> list[Generation]: ...


def generate(
    model: Model,
    prompts: str | Sequence[Prompt],
    *,
    sampler: str | Rule | SamplerConfig | CanvasSampler | None = None,
    chat: bool = False,
    system: str | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool | None = None,
    trace: bool = False,
    on_update: Callable[[Update], None] | None = None,
    **options: Any,
) -> Generation | list[Generation]:
    """Answers prompts.

    A row's answer depends on its prompt, its number in the list and the seed; not on its neighbours or batch_size.

    Args:
        prompts: one string, or a list whose items are strings, token ids, lists of chat messages or `Conversation`s.
        sampler, options: as `make_sampler` takes them.
        chat: take strings as a user's message in the model's chat format; system: with this system message.
        seed: of the random numbers, if any are drawn.
        batch_size: prompts that are sampled together, the next as soon as one has ended; all by default.
        progress: a progress bar over prompts; by default on a terminal, if they do not all run together.
        trace: keep what every forward did, for `show`: which token a position held before, and which forwards
            covered the whole sequence. The answers are the same; each step is then a call of its own, which is slower.
        on_update: called after every step with the `Update` of each running prompt, such as a
            `samplers.viewer.terminal.LiveView`; each step is then a call of its own, too.

    Returns:
        A `Generation` for a single string, else a list of them.

    Raises:
        DllmError: for bad prompts or options; before anything is compiled.

    Warns:
        RuntimeWarning: naming the row and the forward, when the model's logits are not finite.
    """
    listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
    check_length("batch_size", batch_size, optional=True)
    sampler, rows, keys = prepare(model, listed, sampler=sampler, chat=chat, system=system, seed=seed, **options)
    requests = requests_of(sampler, rows, keys, stop=options.get("stop") or ())
    _, ended = run_all(model, sampler, requests, batch_size, progress, trace=trace, on_update=on_update)
    answers = [request.generation for request in ended]
    return answers[0] if isinstance(prompts, str) else answers


def prepare(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    sampler: str | Rule | SamplerConfig | CanvasSampler | None = None,
    chat: bool = False,
    system: str | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[CanvasSampler, list[list[int]], jax.Array]:
    """Everything `generate` does before the first forward: the sampler, the prompts' token ids and a key per prompt.

    Arguments and errors are those of `generate`; the model's parameters are not read.
    """
    if not isinstance(model, Model):
        load = "load one by dllm_jax.load"
        own = "samplers.sample_jit(sampler, denoiser, prompt) runs a denoiser of your own"
        raise DllmError(f"model is of type {type(model).__name__}; {own if hasattr(model, 'forward') else load}")
    check_prompts(prompts)
    check_seed(seed)
    sampler = make_sampler(model, sampler, **options)
    rows = [encode_prompt(model, prompt, chat=chat, system=system) for prompt in prompts]
    check_lengths(model, sampler, rows)
    return sampler, rows, row_keys(jax.random.key(seed), len(rows))
