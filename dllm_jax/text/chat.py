"""The families' built-in chat templates."""

import types
from collections.abc import Mapping

ROLES = ("system", "user", "assistant")

# The published LLaDA template opens the assistant's turn always, whatever add_generation_prompt says.
_LLADA = (
    "{% for message in messages %}"
    "{{ bos_token if loop.first and bos_token }}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)

_TURNS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}" + _TURNS
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

TEMPLATES: Mapping[str, str] = types.MappingProxyType(
    {
        "llada": _LLADA,
        "llada-moe": _LLADA_MOE,
        "llada2": _LLADA_MOE,
        "sdar": _TURNS,
        "fast-dllm-v2": _CHATML,
        "dream": _CHATML,
        "qwen2": _CHATML,
    }
)
"""Jinja template by family, for tokenizers that bring none of their own."""
