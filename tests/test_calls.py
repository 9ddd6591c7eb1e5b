"""Thoughts and tool calls: how answers are read, whole and while they arrive, and what chat templates are given."""

import json
import re

import pytest
from conftest import refuses

from convert import embedded
from dllm_jax import DllmError
from dllm_jax.text.tokenizer import chat_pieces, chat_text, encode_pieces, load_tokenizer, without_special_tokens
from samplers.constraints.automaton import schema_regex
from samplers.serving.calls import Habits, PartStream, Reading, call_schema, habits_of
from samplers.serving.errors import Fault
from samplers.serving.schemas import ChatBody

BOTH = Reading(thinks=True, calls=True)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
OTHER = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
CALLED = [("f", {"a": 1})]

TEMPLATE = (
    '{%- for tool in tools or [] %}{{ tool | tojson ~ "\\n" }}{% endfor %}{% for turn in messages %}{{ turn.role }}: '
    "{% if turn.reasoning_content %}<think>{{ turn.reasoning_content }}</think>{% endif %}{{ turn.content }}"
    "{% for call in turn.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    '</tool_call>{% endfor %}{{ "\\n" }}{% endfor %}'
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)
"""A chat template with thoughts and tools."""

READ = {
    "text": (BOTH, "Hi <b>there", (None, "Hi <b>there", [])),
    "thought": (BOTH, "<think>\nhm\n</think>\n\nHi", ("hm", "Hi", [])),
    "no end": (BOTH, "<think>hm </thi", ("hm </thi", "", [])),
    "opened": (Reading(thinks=True, opened=True), "hm</think>Hi", ("hm", "Hi", [])),
    "not asked": (Reading(calls=True), "<think>hm</think>Hi", (None, "<think>hm</think>Hi", [])),
    "a beginning": (BOTH, " <thi", (None, " <thi", [])),
    "empty": (BOTH, "", (None, "", [])),
    "call": (BOTH, CALL, (None, "", CALLED)),
    "all": (BOTH, f"<think>hm</think>\nSo:\n{CALL}\n{OTHER}\n", ("hm", "So:", [*CALLED, ("g", {})])),
    "one": (Reading(calls=True, several=False), CALL + OTHER, (None, "", CALLED)),
    "after": (BOTH, f"a {CALL} b", (None, "a b", CALLED)),
    "no call": (BOTH, 'a <tool_call>{"name": 1}</tool_call>', (None, 'a <tool_call>{"name": 1}</tool_call>', [])),
    "cut": (BOTH, f"a {CALL}{OTHER[:-3]}", (None, f"a{OTHER[:-3]}", CALLED)),
    "no tools": (Reading(thinks=True), CALL, (None, CALL, [])),
    "forced": (Reading(calls=True, forced=True), '{"name": "f", "arguments": {"a": 1}}', (None, "", CALLED)),
}


@pytest.mark.parametrize("name", READ)
def test_an_answer_is_read(name) -> None:
    """Whole, and in pieces of any size, of which nothing that was sent changes."""
    reading, text, wanted = READ[name]
    assert reading.parts(text) == wanted
    for size in (1, 2, 5, 100):
        stream, found = PartStream(reading), []
        for at in range(0, len(text), size):
            found += stream.feed(text[at : at + size])
        found += stream.feed("", final=True)
        joined = lambda key, found=found: "".join(part.get(key, "") for part in found)
        calls = [call["function"] for part in found for call in part.get("tool_calls", [])]
        assert (joined("reasoning_content") or None, joined("content")) == wanted[:2]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == wanted[2]
        assert stream.called == bool(wanted[2])


def test_a_message_is_as_openai_writes_it() -> None:
    message, called = BOTH.message(f"<think>hm</think>{CALL}")
    (call,) = message.pop("tool_calls")
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert message == {"reasoning_content": "hm", "content": None} and called
    assert BOTH.message("") == ({"content": ""}, False)


def test_the_schema_of_calls() -> None:
    number = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    regex = schema_regex(call_schema([("f", number), ("g", None)]))
    assert re.fullmatch(regex, '{"name": "f", "arguments": {"a": 12}}')
    assert re.fullmatch(regex, '{"name": "g", "arguments": {}}')
    assert not re.fullmatch(regex, '{"name": "g", "arguments": {"a": 12}}')


def test_what_a_template_shows() -> None:
    assert habits_of(TEMPLATE) == Habits(True, True)
    assert habits_of('"<tool_call>{\\"name\\": <name>, \\"arguments\\": <object>}</tool_call>"') == Habits(False, True)
    assert habits_of("arguments: <tool_call><function=f></function></tool_call>") == Habits(False, False)
    assert habits_of("{{ messages }}") == Habits(False, False)


def body(**fields) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
F = {"type": "function", "function": {"name": "f"}}


def test_who_may_and_who_must_be_called() -> None:
    names = lambda functions: [function.name for function in functions]
    for choice, callable, forced in [
        (None, ["f", "g"], []),
        ("auto", ["f", "g"], []),
        ("none", [], []),
        ("required", ["f", "g"], ["f", "g"]),
        (F, ["f", "g"], ["f"]),
    ]:
        found = body(tools=TOOLS, tool_choice=choice)
        found.check()
        assert (names(found.callable), names(found.forced)) == (callable, forced)
        assert bool(found.form) == bool(forced)
        assert ("tools" in found.prompts[0].template) == bool(callable)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("not among the tools", {"tool_choice": "required"}),
        ("not among the tools", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}),
        ("form of its own", {"tools": TOOLS, "tool_choice": F, "regex": "a"}),
        ("stop may cut", {"tools": TOOLS, "tool_choice": F, "stop": "a"}),
    ],
)
def test_what_cannot_be_asked_is_refused(words, fields) -> None:
    with pytest.raises(Fault) as found:
        body(**fields).check()
    assert words in found.value.message


def test_arguments_in_a_message_are_an_object() -> None:
    for arguments in ("[1]", "{", ""):
        calls = [{"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}]
        with pytest.raises(Fault) as found:
            _ = body(messages=[{"role": "assistant", "tool_calls": calls}]).prompts
        assert "JSON object" in found.value.message


@pytest.fixture(scope="module")
def tokenizer(llada_tiny):
    """One that can write all characters."""
    ids = {"vocab_size": 517, "eos_id": 0, "pad_id": 0, "mask_id": 1, "end_ids": (0, 2), "bos_id": 3}
    found = load_tokenizer(embedded.source("word-problems"), llada_tiny.config.replace(**ids))
    found.chat_template = TEMPLATE
    return found


def test_templates_get_tools_calls_and_options(tokenizer) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]
    text = chat_text(tokenizer, talk, {"tools": TOOLS[:1], "enable_thinking": True})
    assert text == (
        '{"type": "function", "function": {"name": "f"}}\nuser: Hi\nassistant: <think>hm</think>'
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\ntool: 7\nassistant: <think>'
    )
    for name in ("unknown", "chat_template", "messages", "tokenize", "conversation", "continued"):
        with refuses("takes no", name):
            chat_text(tokenizer, talk, {name: "x"})


def test_special_tokens_of_tools_and_calls_are_text(tokenizer) -> None:
    """Wherever a client writes them."""
    token, plain = tokenizer.eos_token, without_special_tokens(tokenizer)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {token: token}}}]
    tool = {"type": "function", "function": {"name": "f", "description": token, "parameters": {token: [token]}}}
    talk = [{"role": "user", "content": token}, {"role": "assistant", "content": "", "tool_calls": calls}]
    ids = encode_pieces(plain, chat_pieces(plain, talk, {"tools": [tool]}))
    text = chat_text(tokenizer, talk, {"tools": [tool]})
    assert text.count(token) == 6 and not set(tokenizer.all_special_ids) & set(ids) and plain.decode(ids) == text
    assert set(tokenizer.all_special_ids) & set(
        encode_pieces(tokenizer, chat_pieces(tokenizer, talk, {"tools": [tool]}))
    )


def test_what_is_nested_too_deeply_is_refused(tokenizer) -> None:
    deep: list = []
    for _ in range(600):
        deep = [deep]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}
    with pytest.raises(DllmError, match="deeply|template failed"):
        chat_pieces(without_special_tokens(tokenizer), [{"role": "user", "content": "a"}], {"tools": [tool]})
