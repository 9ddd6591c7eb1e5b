"""Prompts and answers as text: start tokens, chats, and where an answer is cut."""

import bisect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dllm_jax import DllmError
from dllm_jax.text.tokenizer import chat_text, encode_text, special_tokens
from evals.presets import Preset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def arguments_of(form: str) -> dict[str, bool]:
    """The harness's arguments for prompts of a form.

    "raw" is the few-shot text as it is; with a chat template "chat0" has no examples, "chat1" has them in one user's
    turn, and "chatN" has them as turns.
    """
    return {"apply_chat_template": form != "raw", "fewshot_as_multiturn": form == "chatN"}


def render_chat(
    tokenizer: "PreTrainedTokenizerBase", preset: Preset, messages: Sequence[Mapping[str, Any]], continued: bool
) -> str:
    """A conversation as the preset's form has it.

    Raises:
        DllmError: when the harness has another form than the preset, and as `chat_text`.
    """
    turns = sum(message["role"] == "user" for message in messages)
    first = messages[0]["content"] if messages[0]["role"] == "system" else ""
    if preset.form == "raw":
        raise _form_error(preset, "leave --apply_chat_template out")
    if preset.form != "chatN" and turns > 1:
        raise _form_error(preset, "pass --fewshot_as_multiturn false")
    if preset.form == "chatN" and preset.shots and turns == 1:
        raise _form_error(preset, "pass --fewshot_as_multiturn true, and the preset's number of examples")
    if preset.system and not first.startswith(preset.system):
        raise _form_error(preset, f"pass --system_instruction {preset.system!r}")
    return chat_text(tokenizer, messages, continued=continued)


def check_templated(preset: Preset, templated: bool) -> None:
    """Raises DllmError if a preset's form is a chat and the harness applied no template."""
    if preset.form != "raw" and not templated:
        raise _form_error(preset, "pass --apply_chat_template")


def _form_error(preset: Preset, advice: str) -> DllmError:
    return DllmError(f"preset {preset.name} is of form {preset.form}, and the prompts are not; {advice}")


def prompt_text(tokenizer: "PreTrainedTokenizerBase", preset: Preset, text: str) -> str:
    """A prompt's text with the preset's start tokens, to be encoded without special tokens: templates have their own.

    Raises:
        DllmError: when the preset wants a start token that the tokenizer does not have.
    """
    if preset.bos and not tokenizer.bos_token:
        raise DllmError(f"preset {preset.name} wants a start token, and the tokenizer has none")
    return str(tokenizer.bos_token) * preset.bos + text


def pair_ids(
    tokenizer: "PreTrainedTokenizerBase", preset: Preset, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Ids of a context and its continuation, encoded together; spaces at the context's end belong to the latter."""
    bare = context.rstrip()
    whole = encode_text(tokenizer, prompt_text(tokenizer, preset, context + continuation))
    start = len(encode_text(tokenizer, prompt_text(tokenizer, preset, bare)))
    return whole[:start], whole[start:]


def strings_of(until: Any) -> tuple[str, ...]:
    """The stop strings of a request.

    Raises:
        DllmError: for anything but a string or a list of strings.
    """
    found = [until] if isinstance(until, str) else [] if until is None else until
    if not isinstance(found, Sequence) or not all(isinstance(item, str) for item in found):
        raise DllmError(f"until is {until!r}; it must be a string or a list of strings")
    return tuple(dict.fromkeys(item for item in found if item))


def cut_answer(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], until: Sequence[str]) -> tuple[str, int]:
    """The text before the first of each stop string, without special tokens, and how many tokens it takes.

    Unlike `samplers.text.decode.text_of` it finds stop strings that name special tokens.
    """
    decoded = lambda count: str(tokenizer.decode(list(ids[:count]), skip_special_tokens=False))
    whole = text = decoded(len(ids))
    for item in until:
        text = text.partition(item)[0]
    count = len(ids)
    if len(text) < len(whole):
        count = bisect.bisect_left(range(len(ids)), len(text), key=lambda n: len(decoded(n)))
    for name in special_tokens(tokenizer):
        text = text.replace(name, "")
    return text, count
