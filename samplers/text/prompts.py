"""Prompts as token ids, and rows of them as one array."""

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import DllmError, Model
from dllm_jax.text.tokenizer import chat_pieces, encode_pieces, least_tokens
from samplers.checks import check_token
from samplers.config.factory import CanvasSampler
from samplers.inputs import check_context

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages, and what else the model's chat template takes.

    Attributes:
        messages: of roles system, user, assistant and tool; the assistant's may have `tool_calls`.
        template: such as {"tools": [...], "enable_thinking": False}.
    """

    messages: Sequence[Message]
    template: Mapping[str, Any] | None = None


Prompt = str | Sequence[int] | Sequence[Message] | Conversation


def bucket_length(length: int) -> int:
    """The padded prompt length: the next of 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024 ... So few lengths are
    compiled, and at most half of a prompt is padding."""
    if length <= 64:
        return 32 if length <= 32 else 64
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 else power


def next_power(count: int) -> int:
    """The next power of two, so that few widths are ever compiled."""
    return 1 << (count - 1).bit_length()


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


def given_canvas(
    answers: Sequence[tuple[np.ndarray, np.ndarray | None]], width: int, missing: int
) -> np.ndarray | None:
    """Initial canvases [B, width] int32, `missing` where a token is to be generated; None where nothing is given.

    Args:
        answers: per row the tokens [N] and which of them are given, [N] bool or None for none.
        missing: `samplers.inputs.open_id` of the model.
    """
    if all(given is None for _, given in answers):
        return None
    canvas = np.full((len(answers), width), missing, np.int32)
    for row, (ids, given) in enumerate(answers):
        if given is not None:
            canvas[row, : len(ids)] = np.where(given, ids, missing)
    return canvas


class PromptTooLong(DllmError):
    """A prompt with more tokens than fit; `tokens` is a lower bound on their number."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(f"the prompt has at least {tokens} tokens and there is room for {most}; shorten it")
        self.tokens = tokens


def check_prompts(prompts: Any) -> None:
    """Raises DllmError for what is no list of prompts."""
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, (Sequence, np.ndarray, jax.Array)):
        raise DllmError(f"prompts is {reprlib.repr(prompts)}; give a string or a list of prompts")
    flat = isinstance(prompts, np.ndarray | jax.Array) and prompts.ndim == 1
    if flat or any(isinstance(item, int | np.integer) for item in prompts):
        ids = reprlib.repr(prompts.tolist() if isinstance(prompts, np.ndarray | jax.Array) else list(prompts))
        raise DllmError(f"prompts is {ids}; token ids of one prompt are a list in a list, [{ids}]")


def encode_prompt(
    model: Model, prompt: Prompt, *, chat: bool = False, system: str | None = None, most: int | None = None
) -> list[int]:
    """Token ids of a prompt: raw text, a user's chat message (`chat`), a conversation, or ids as they are.

    Args:
        most: largest number of tokens; by default the model's context. A text that must have more, by its size, is
            refused before it is encoded, which would take long. The returned ids may still be more.

    Raises:
        DllmError: for an empty prompt, ids outside the vocabulary, or a mask token in the prompt.
        PromptTooLong: for a prompt whose size shows that it has more than `most` tokens.
    """
    most = model.config.max_length if most is None else most
    if isinstance(prompt, str) and (chat or system is not None):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        return _check_ids(model, _encode(model, [prompt], most))
    template: Mapping[str, Any] | None = None
    if isinstance(prompt, Conversation):
        template, prompt = prompt.template, prompt.messages
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, (Sequence, np.ndarray, jax.Array)):
        raise DllmError(f"a prompt is a string, a list of token ids or a list of messages, not {reprlib.repr(prompt)}")
    if any(isinstance(item, Mapping) for item in prompt):
        head: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        pieces = chat_pieces(model.require_tokenizer(), [*head, *prompt], template)
        return _check_ids(model, _encode(model, pieces, most))
    if len(prompt) > most:
        raise PromptTooLong(len(prompt), most)
    return _check_ids(model, prompt.tolist() if isinstance(prompt, (np.ndarray, jax.Array)) else prompt)


def _encode(model: Model, pieces: Sequence[str | int], most: int) -> list[int]:
    tokenizer = model.require_tokenizer()
    if (least := sum(1 if isinstance(piece, int) else least_tokens(tokenizer, piece) for piece in pieces)) > most:
        raise PromptTooLong(least, most)
    return encode_pieces(tokenizer, pieces)


def _check_ids(model: Model, ids: Sequence[Any]) -> list[int]:
    if len(ids) < max(model.denoiser.min_prompt_length, 1):
        raise DllmError("the prompt is empty; give a prompt of at least one token")
    for token in ids:
        check_token("prompt", token, model.config)
    if not model.config.has_canvas and model.denoiser.mask_id in ids:
        raise DllmError("the prompt contains the mask token; to fill gaps of a text use samplers.infill")
    return [int(token) for token in ids]


def add_start_token(model: Model, ids: Sequence[int] | np.ndarray) -> list[int]:
    """A prompt of data; for an empty prompt the start token where the model needs a token.

    Raises:
        DllmError: when the model has no start token.
    """
    missing = max(model.denoiser.min_prompt_length - len(ids), 0)
    if missing and model.config.bos_id is None:
        raise DllmError(f"a prompt is empty and {model.name} has no start token; give at least one token")
    return [int(model.config.bos_id or 0)] * missing + np.asarray(ids, int).tolist()


def check_lengths(model: Model, sampler: CanvasSampler, rows: Sequence[Sequence[int]]) -> None:
    """Refuses prompts that do not fit the trained context.

    Raises:
        DllmError: when prompt and canvas together are longer than the model was trained for.
    """
    check_width(model, sampler, max((len(row) for row in rows), default=0))


def check_width(model: Model, sampler: CanvasSampler, longest: int) -> None:
    """As `check_lengths`, for a longest prompt of this many tokens."""
    total = max(longest + sampler.gen_length, sampler.canvas_length or 0)
    check_context(model.name, model.config.max_length, longest, total, sampler.width)
