"""Chat templates: the built-in one of every family, and rendering in a sandbox, since templates come from downloads."""

import functools
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dllm_jax.errors import DllmError

ROLES = ("system", "user", "assistant")

# The published LLaDA template opens the assistant's turn always, whatever add_generation_prompt says.
_LLADA = (
    "{% for message in messages %}"
    "{{ (bos_token if loop.first else '') + '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)

_CHATML = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# "detailed thinking off" is what the public evaluations send. A system message of one's own comes before it in the same
# turn, on a line of its own, so that the switch is always there and there is one system turn.
_LLADA_MOE = (
    "{% set roles = {'system': 'SYSTEM', 'user': 'HUMAN', 'assistant': 'ASSISTANT'} %}"
    "{{ '<role>SYSTEM</role>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    "{{ 'detailed thinking off<|role_end|>' }}"
    "{% for message in messages %}"
    "{% if not (loop.first and message['role'] == 'system') %}"
    "{{ '<role>' + roles[message['role']] + '</role>' + message['content'] + '<|role_end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)

BUILT_IN: Mapping[str, str] = types.MappingProxyType(
    {"llada": _LLADA, "llada-moe": _LLADA_MOE, "dream": _CHATML, "qwen2": _CHATML}
)
"""Jinja templates by family, for checkpoints that bring none of their own."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation.

    Args:
        template: Jinja source, as in a tokenizer_config.json; it runs in a sandbox.
        messages: the turns, each with a "role" of `ROLES` and a string "content".
        tokens: named special tokens a template may use, such as "bos_token".
        add_generation_prompt: end with the opening of the assistant's turn, where the template asks.

    Raises:
        DllmError: for messages that are not such turns, and when the template fails or refuses them.
    """
    turns = check_messages(messages)
    variables = {"tools": None, "documents": None, "bos_token": "", "eos_token": "", **tokens}
    try:
        return _compiled(template).render(messages=turns, add_generation_prompt=add_generation_prompt, **variables)
    except Exception as error:  # a template can fail in any way a program can
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DllmError(f"the chat template failed ({reason}); check the messages or the template") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The turns of a conversation as dicts.

    Raises:
        DllmError: for an empty conversation, and naming the first turn without a known role or string content.
    """
    example = '[{"role": "user", "content": "Hello"}]'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise DllmError(f"a conversation is a list of messages, not a {type(messages).__name__}; pass {example}")
    if not messages:
        raise DllmError(f"the conversation has no messages; pass at least one, such as {example}")
    for number, message in enumerate(messages):
        if fault := _fault(message):
            raise DllmError(f"message {number} {fault}; a message looks like {example[1:-1]}")
    return [dict(message) for message in messages]


def _fault(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return f"is a {type(message).__name__}, not a dict"
    if "role" not in message:
        return "has no role"
    if message["role"] not in ROLES:
        return f"has the unknown role {message['role']!r} (known: {', '.join(ROLES)})"
    if not isinstance(message.get("content"), str):
        return f"has {type(message.get('content')).__name__} content where a string must be"
    return None


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    # The whitespace settings and the two helpers are those that published templates are written for.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(template)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
