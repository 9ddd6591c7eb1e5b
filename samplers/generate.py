"""Text in, text out: prompts are encoded, padded to a bucket, sampled in one compiled call and decoded."""

import dataclasses
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dllm_jax import DllmError, Model
from dllm_jax.tokenizer import encode_chat, encode_text
from samplers.apd_loop import DraftResult
from samplers.build import CanvasSampler, check_token, make_sampler
from samplers.checks import check_length, check_whole
from samplers.engine import Result, sample_jit, warn_if_broken
from samplers.noise import row_keys
from samplers.rules import Rule
from samplers.text import text_of

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


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

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens per forward (TPF)."""
        return len(self.tokens) / max(self.nfe, 1)

    @property
    def committed(self) -> int:
        """Tokens that the forwards wrote, those behind the end too."""
        return sum(at >= 0 for at in self.decoded_at)


def bucket_length(length: int) -> int:
    """The padded prompt length: the next of 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024 ..., so that few lengths
    are ever compiled and at most half of a prompt is padding."""
    if length <= 64:
        return 32 if length <= 32 else 64
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 else power


def pad_prompts(rows: Sequence[Sequence[int]], width: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Prompts as one left-aligned array.

    Returns:
        tokens [B, width] int32 (width: the bucket of the longest by default), and lengths [B] int32.
    """
    lengths = [len(row) for row in rows]
    width = bucket_length(max(lengths)) if width is None else width
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)


def given_canvas(answers: Sequence[tuple[np.ndarray, np.ndarray | None]], width: int, mask_id: int) -> jax.Array | None:
    """What canvases come with, [B, width] int32 with the mask id where a token is to be generated; None where nothing
    is given.

    Args:
        answers: per row the tokens [N] and which of them are given, [N] bool or None for none.
    """
    if all(given is None for _, given in answers):
        return None
    canvas = np.full((len(answers), width), mask_id, np.int32)
    for row, (ids, given) in enumerate(answers):
        if given is not None:
            canvas[row, : len(ids)] = np.where(given, ids, mask_id)
    return jnp.asarray(canvas)


def encode_prompt(model: Model, prompt: Prompt, *, chat: bool = False, system: str | None = None) -> list[int]:
    """Token ids of a prompt: raw text, a user's chat message (`chat`), a list of messages, or ids as they are.

    Raises:
        DllmError: for an empty prompt, ids outside the vocabulary, or a mask token in the prompt.
    """
    if isinstance(prompt, str) and (chat or system is not None):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        return _checked_ids(model, encode_text(model.require_tokenizer(), prompt))
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, (Sequence, np.ndarray, jax.Array)):
        raise DllmError(f"a prompt is a string, a list of token ids or a list of messages, not {reprlib.repr(prompt)}")
    if any(isinstance(item, Mapping) for item in prompt):
        head: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        return _checked_ids(model, encode_chat(model.require_tokenizer(), [*head, *prompt]))
    return _checked_ids(model, prompt.tolist() if isinstance(prompt, (np.ndarray, jax.Array)) else prompt)


def _checked_ids(model: Model, ids: Sequence[Any]) -> list[int]:
    if len(ids) < max(model.denoiser.min_prompt_length, 1):
        raise DllmError("the prompt is empty; give at least one token")
    for token in ids:
        check_token("prompt", token, model.config)
    if model.denoiser.mask_id in ids:
        raise DllmError("the prompt contains the mask token; to fill gaps give BlockSampler.init a `given` canvas")
    return [int(token) for token in ids]


def check_lengths(model: Model, sampler: CanvasSampler, rows: Sequence[Sequence[int]]) -> None:
    """Refuses prompts that do not fit the trained context.

    Raises:
        DllmError: when prompt and canvas together are longer than the model was trained for.
    """
    check_width(model, sampler, max((len(row) for row in rows), default=0))


def check_width(model: Model, sampler: CanvasSampler, longest: int) -> None:
    """As `check_lengths`, for a longest prompt of so many tokens."""
    limit = model.config.max_length
    total = max(longest + sampler.gen_length, sampler.canvas_length or 0)
    if total > limit:
        parts = f"a prompt of {longest} tokens and a canvas up to position {total}"
        raise DllmError(f"{parts} exceed the {limit} tokens {model.name} was trained for; shorten one of them")


@overload
def generate(model: Model, prompts: str, **options: Any) -> Generation: ...


@overload
def generate(model: Model, prompts: Sequence[Prompt], **options: Any) -> list[Generation]: ...


def generate(
    model: Model,
    prompts: str | Sequence[Prompt],
    *,
    sampler: str | Rule | CanvasSampler | None = None,
    chat: bool = False,
    system: str | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool | None = None,
    run: Callable[..., Result] = sample_jit,
    **options: Any,
) -> Generation | list[Generation]:
    """Answers prompts.

    A row's answer depends on its prompt, its number in the list and the seed; not on its neighbours or batch_size.

    Args:
        prompts: one string, or a list whose items are strings, token ids or lists of chat messages.
        sampler: what to do: a sampler, or a name or spec that `make_sampler` makes one of, with `options`.
        chat: take strings as a user's message in the model's chat format; system: with this system message.
        seed: of the random numbers, where any are drawn.
        batch_size: rows that are sampled together; all by default.
        progress: a progress bar over batches; by default where there are several and someone is watching.
        run: what samples a batch, called like `sample_jit`; for timing it, or sampling elsewhere.
        options: see `make_sampler`.

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
    if not rows:
        return []
    found = list(_in_batches(model, sampler, rows, keys, batch_size, progress, run))
    texts = options.get("stop") or ()
    answers = [answer(model, row, *pair, texts) for row, pair in zip(rows, found, strict=True)]
    return answers[0] if isinstance(prompts, str) else answers


def prepare(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    sampler: str | Rule | CanvasSampler | None = None,
    chat: bool = False,
    system: str | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[CanvasSampler, list[list[int]], jax.Array]:
    """Everything `generate` does before the first forward: the sampler, the prompts' token ids and a key per prompt.

    Arguments and errors are those of `generate`; the model's parameters are not looked at.
    """
    if not isinstance(model, Model):
        raise DllmError(f"model is a {type(model).__name__}; load one by dllm_jax.load")
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, (Sequence, np.ndarray, jax.Array)):
        raise DllmError(f"prompts is {reprlib.repr(prompts)}; give a string or a list of prompts")
    if not isinstance(seed, (int, np.integer)):
        raise DllmError(f"seed is {seed!r}; it must be a whole number")
    check_whole("seed", seed, 0, 2**32 - 1)  # JAX drops the bits above, so that other seeds would give equal numbers
    if sampler is None or isinstance(sampler, str | Rule):
        sampler = make_sampler(model, sampler, **options)
    elif options:
        raise DllmError(f"options {', '.join(sorted(options))} have no effect beside a sampler; set them in it")
    rows = [encode_prompt(model, prompt, chat=chat, system=system) for prompt in prompts]
    check_lengths(model, sampler, rows)
    return sampler, rows, row_keys(jax.random.key(seed), len(rows))


def _in_batches(
    model: Model,
    sampler: CanvasSampler,
    rows: list[list[int]],
    keys: jax.Array,
    batch_size: int | None,
    progress: bool | None,
    run: Callable[..., Result],
) -> Iterator[tuple[Result, int]]:
    """(result, row in it) for every prompt; all batches have one shape, so they share one program."""
    size = min(batch_size or len(rows), len(rows))
    starts = range(0, len(rows), size)
    width = bucket_length(max(len(row) for row in rows))
    hide = len(starts) == 1 if progress is None else not progress
    for start in tqdm(starts, desc="generating", unit="batch", disable=hide or None):
        index = np.minimum(np.arange(start, start + size), len(rows) - 1)  # the last batch is filled up
        prompt, lengths = pad_prompts([rows[i] for i in index], width)
        result = run(sampler, model.denoiser, prompt, lengths, key=keys[index])
        result = jax.device_get(result)
        warn_if_broken(result, index[: len(rows) - start].tolist())
        for i in range(min(size, len(rows) - start)):
            yield result, i


def answer(model: Model, prompt: list[int], result: Result, row: int, stop: Sequence[str | int] = ()) -> Generation:
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
        logprobs=[x if math.isfinite(x) else None for x in result.logprobs[row, : len(tokens)].tolist()],
        verifier_forwards=int(result.verifier_forwards[row]) if isinstance(result, DraftResult) else None,
    )
