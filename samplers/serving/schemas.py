"""What the body of a request may contain. As OpenAI does, unknown fields are refused: a misspelt number would change
the answer silently."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from samplers.constraints.automaton import ANY_OBJECT
from samplers.engine.slots import MOST_BIASES
from samplers.serving.calls import Habits, Reading, call_schema
from samplers.serving.errors import Fault
from samplers.serving.shapes import ChatShape, Shape, TextShape
from samplers.text.prompts import Conversation

MOST_NUMBER = 1e9
MOST_ITEMS = 4096
"""Most fields and items of a body, without the prompt's. Each wrong one would make an error of some 5 kB."""

OUR_ERROR = "wrong"
"""The type of pydantic's errors that have a message of ours."""

IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""OpenAI's fields that have no effect on the answer."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "mcp_servers": (None, []),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None, "none"),
    "thinking": (None, {"type": "disabled"}),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""OpenAI's and Anthropic's fields that this server does not support, each with the values that ask for nothing."""


def _check_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(OUR_ERROR, "holds half of a surrogate pair, which is no character") from None
    return value


def _check_prompt(value: Any) -> Any:
    """A prompt of /v1/completions, checked up to the first mistake."""
    lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in lists):  # True is none
        return value
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError(
            OUR_ERROR, "must be a text, a list of texts, token ids, or a list of lists of token ids"
        )
    return [_check_text(text) for text in texts]


def _parse_stop(value: Any) -> Any:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError(OUR_ERROR, "must be a text or a list of texts")
    return tuple(_check_text(text) for text in texts)


def _check_if_text(value: Any) -> Any:
    return _check_text(value) if isinstance(value, str) else value


String = Annotated[str, AfterValidator(_check_text)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]


class Part(BaseModel):
    """A part of a body that has no further fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class TextPart(Part):
    """A part of a message; it must be text."""

    type: Literal["text"]
    text: String
    cache_control: Any = None


class CalledFunction(Part):
    """A function's name and its arguments, the text of a JSON object."""

    name: String
    arguments: String


class ToolCall(Part):
    """A call of a tool in a message of the assistant."""

    type: Literal["function"] = "function"
    id: String | None = None
    index: int | None = None
    function: CalledFunction

    @property
    def call(self) -> dict[str, Any]:
        """The call as chat templates take it; raises Fault for arguments that are no JSON object."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise Fault(400, "the arguments of a tool call must be a JSON object", param="messages")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(BaseModel):
    """A turn of a conversation. Other fields of this server's own messages may come back empty."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: String | list[TextPart] | None = None
    reasoning_content: String | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: String | None = None

    @property
    def turn(self) -> dict[str, Any]:
        """The message as chat templates take it.

        Raises:
            Fault: for fields that they do not take.
        """
        for name, value in (self.model_extra or {}).items():
            if value not in (None, [], {}):
                raise Fault(400, f"messages with {name!r:.60} are not supported by this server", param="messages")
        parts = self.content if isinstance(self.content, list) else None
        text = "".join(part.text for part in parts) if parts is not None else self.content or ""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": str(text)}
        calls = [call.call for call in self.tool_calls or ()] or None
        own = {"reasoning_content": self.reasoning_content, "tool_calls": calls, "tool_call_id": self.tool_call_id}
        return found | {name: value for name, value in own.items() if value is not None}


class Function(Part):
    """A function that a model may call. Its schema is kept where the call is forced, strict or not."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: String | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool; it must be a function."""

    type: Literal["function"]
    function: Function


class FunctionName(Part):
    name: String


class ToolChoice(Part):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class NamedSchema(Part):
    """The schema of a response format. Its name has no effect, and it is always kept, strict or not."""

    name: String
    schema_: dict[str, Any] = Field(alias="schema")
    description: String | None = None
    strict: bool | None = None


class ResponseFormat(Part):
    """The form of an answer, as OpenAI writes it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StreamOptions(Part):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Body(BaseModel):
    """The fields of all endpoints. The sampler's numbers, such as `threshold`, are further fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MOST_BIASES)] | None = None
    stops: Annotated[tuple[str, ...], PlainValidator(_parse_stop)] = Field((), alias="stop")

    @model_validator(mode="before")
    @classmethod
    def _bound(cls, body: Any) -> Any:
        """Counts all fields and items before any is checked."""
        left, inside = MOST_ITEMS, [{**body, "prompt": None}] if isinstance(body, dict) else []
        while inside:
            value = inside.pop()
            left -= len(value)
            if left < 0:
                raise PydanticCustomError(OUR_ERROR, f"has more than {MOST_ITEMS} fields and items besides the prompt")
            inside += [item for item in (value.values() if isinstance(value, dict) else value) if _is_container(item)]
        return body

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each as `generate` takes it."""
        raise NotImplementedError

    @property
    def length(self) -> int | None:
        """Positions to generate."""
        return self.max_tokens

    @property
    def with_logprobs(self) -> bool:
        """Whether the answer has the log-probability of its tokens."""
        return False

    @property
    def top(self) -> int:
        """How many of the most probable tokens it has for each."""
        return 0

    @property
    def form(self) -> dict[str, Any]:
        """The form of the answer, as `Engine.request` takes it."""
        return {}

    @property
    def bias(self) -> dict[int, float] | None:
        """What is added to logits, as `Engine.request` takes it."""
        return None if self.logit_bias is None else {int(token): added for token, added in self.logit_bias.items()}

    def check(self) -> None:
        """Raises Fault for unknown fields, and for unsupported ones of OpenAI's."""
        for name, value in self._extra_fields():
            _check_number(name, value)

    @property
    def numbers(self) -> dict[str, int | float]:
        """The sampler's numbers for this request; raises Fault as `check`."""
        own = {name: value for name in ("temperature", "top_p") if (value := getattr(self, name)) is not None}
        return own | {name: _check_number(name, value) for name, value in self._extra_fields()}

    def _extra_fields(self) -> list[tuple[str, Any]]:
        """The further fields that have an effect."""
        found = []
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or (name in UNSUPPORTED and any(_is_idle(value, idle) for idle in UNSUPPORTED[name])):
                continue
            if name in UNSUPPORTED:
                raise Fault(400, f"{name} is not supported by this server; leave it out", param=name)
            found.append((name, value))
        return found


class FormedBody(Body):
    """The fields of answers that may have a form."""

    response_format: ResponseFormat | None = None
    regex: String | None = None

    @property
    def form(self) -> dict[str, Any]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return {} if self.regex is None else {"regex": self.regex}
        if self.regex is not None:
            raise Fault(400, "regex and response_format both say what the answer looks like; give one", param="regex")
        if (wanted.type == "json_schema") != (wanted.json_schema is not None):
            raise Fault(400, "a response_format has a json_schema if that is its type", param="response_format")
        return {"json_schema": ANY_OBJECT if wanted.json_schema is None else wanted.json_schema.schema_}

    def check(self) -> None:
        super().check()
        if self.form and self.stops:
            raise Fault(400, "stop may cut an answer before its form is complete; leave one of them out", param="stop")


class CompletionBody(FormedBody):
    """The fields of both of OpenAI's endpoints."""

    shape: ClassVar[Shape] = ChatShape
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def reading(self, habits: Habits, opened: bool) -> Reading:
        """How the answer is read.

        Args:
            opened: whether the prompt has begun a thought.
        """
        return Reading()

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(CompletionBody):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[String, bool | int | float | String] | None = None
    separate_reasoning: bool = True

    @property
    def callable(self) -> list[Function]:
        """The functions that the answer may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def forced(self) -> list[Function]:
        """Those of which it must call one."""
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            return [function for function in self.callable if function.name == name]
        return self.callable if self.tool_choice == "required" else []

    @property
    def form(self) -> dict[str, Any]:
        if not self.forced:
            return super().form
        return {"json_schema": call_schema([(function.name, function.parameters) for function in self.forced])}

    def reading(self, habits: Habits, opened: bool) -> Reading:
        thinks, several = habits.thinks and self.separate_reasoning, self.parallel_tool_calls is not False
        return Reading(thinks, opened, bool(self.callable), several, bool(self.forced))

    def check_habits(self, habits: Habits) -> None:
        """Raises Fault for tools whose calls would not be found in the answer."""
        if self.callable and not self.forced and not habits.calls:
            sentence = "the calls that this model's chat template asks for are not read here; force one by tool_choice"
            raise Fault(400, sentence, param="tools")

    def check(self) -> None:
        super().check()
        if self.tool_choice not in (None, "none", "auto") and not self.forced:
            raise Fault(400, "tool_choice wants a function that is not among the tools", param="tool_choice")
        if self.forced and super().form:
            raise Fault(400, "a forced call has a form of its own; leave out response_format and regex", param="tools")

    @property
    def length(self) -> int | None:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise Fault(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        return next(iter(both), None)

    @property
    def prompts(self) -> list[Any]:
        template: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.callable:
            about = [function.model_dump(exclude_none=True, exclude={"strict"}) for function in self.callable]
            template["tools"] = [{"type": "function", "function": function} for function in about]
        return [Conversation([message.turn for message in self.messages], template)]

    @property
    def with_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def top(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else 0


class TextBody(CompletionBody):
    """The body of /v1/completions."""

    shape = TextShape
    prompt: Annotated[Any, PlainValidator(_check_prompt)]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    suffix: String | None = None

    @property
    def prompts(self) -> list[Any]:
        """Texts, or lists of token ids."""
        found: list[Any] = self.prompt
        return found if found and isinstance(found[0], str | list) else [found]

    @property
    def with_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def top(self) -> int:
        return self.logprobs or 0

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            raise Fault(400, "the prompt of an echo has no logprobs here; leave one of them out", param="echo")
        if self.suffix:
            more = self.top if self.top > 1 else None
            idle = {"stop": self.stops or None, "echo": self.echo or None, "regex": self.form or None}
            _refuse({**idle, "logprobs": more}, "a text before a suffix")


class MessageBody(CompletionBody):
    """The body of /v1/messages, Anthropic's."""

    max_tokens: int = Field(ge=1)
    messages: list[ChatMessage]
    system: String | list[TextPart] = ""
    stops: Annotated[tuple[str, ...], PlainValidator(_parse_stop)] = Field((), alias="stop_sequences")

    @property
    def prompts(self) -> list[Any]:
        head = [ChatMessage(role="system", content=self.system)] if self.system else []
        return [[message.turn for message in [*head, *self.messages]]]

    @property
    def with_usage(self) -> bool:
        return True

    def check(self) -> None:
        super().check()
        _refuse({"n": self.n}, "a message, which is one answer")
        if self.messages and self.messages[-1].role == "assistant":
            raise Fault(400, "the last message is the assistant's; end with one of the user", param="messages")


class PromptBody(Body):
    """A body with one prompt: a raw text, or a conversation."""

    prompt: String | None = None
    messages: list[ChatMessage] | None = None

    @property
    def prompts(self) -> list[Any]:
        if (self.prompt is None) == (self.messages is None):
            raise Fault(400, "give either a prompt or messages", param="prompt")
        return [self.prompt if self.messages is None else [message.turn for message in self.messages]]


class CanvasBody(PromptBody, FormedBody):
    """The body of /v1/canvas."""


class InfillBody(PromptBody, FormedBody):
    """The body of /v1/infill: a text with gaps, with or without a prompt that it answers."""

    template: String
    regex: String | list[String | None] | None = None  # type: ignore[assignment]

    @property
    def prompts(self) -> list[Any]:
        return [] if self.prompt is None and self.messages is None else super().prompts

    def check(self) -> None:
        _refuse({"max_tokens": self.max_tokens, "stop": self.stops or None}, "an infilling")
        super().check()


class DecideBody(PromptBody):
    """The body of /v1/decide; `temperature` divides scores."""

    fields: dict[String, list[Annotated[Any, AfterValidator(_check_if_text)]]]
    template: String | None = None
    gamma: float | None = Field(None, ge=0)
    joint: bool = False

    def check(self) -> None:
        super().check()
        own = {"max_tokens": self.max_tokens, "top_p": self.top_p, "stop": self.stops, "logit_bias": self.logit_bias}
        idle = {name: value or None for name, value in own.items()}
        _refuse({**idle, **dict(self._extra_fields())}, "a decision")


def _refuse(idle: dict[str, Any], what: str) -> None:
    """Raises Fault for a field that has no effect, if it is given."""
    if name := next((name for name, value in idle.items() if value is not None), None):
        raise Fault(400, f"{name!r:.60} has no effect on {what}; leave it out", param=name[:60])


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list)


def _is_idle(value: Any, idle: Any) -> bool:
    """Equal, where 0 and False are different."""
    return bool(value == idle) and (isinstance(value, bool) == isinstance(idle, bool))


def _check_number(name: str, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        sentence = f"{name!r:.60} is not known, or is no number; OpenAI's fields and the sampler's numbers are"
        raise Fault(400, sentence, param=name[:60], code="unknown_parameter")
    if not abs(value) <= MOST_NUMBER:
        raise Fault(400, f"{name!r:.60} is out of range", param=name[:60])
    return value
