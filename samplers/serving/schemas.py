"""What the body of a request may say. Unknown fields are refused, as OpenAI does: a misspelt number would be a silent
change of the answer."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from samplers.serving.errors import Fault

MOST_NUMBER = 1e9
MOST_ITEMS = 4096
"""Fields and items of a body, the prompt's left out. Each that is wrong would cost an error of some 5 kB."""

WRONG = "wrong"
"""Type of pydantic's errors whose words are our own."""

UNREAD = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""OpenAI's fields that do not say anything about the answer."""

IDLE: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""OpenAI's fields that this server cannot do, and the values that ask for nothing."""


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(WRONG, "holds half of a surrogate pair, which is no character") from None
    return value


def _prompt(value: Any) -> Any:
    """A prompt of /v1/completions, by a look that ends at the first thing that is wrong."""
    lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in lists):  # True is none
        return value
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError(WRONG, "must be a text, a list of texts, token ids, or a list of lists of token ids")
    return [_text(text) for text in texts]


def _stop(value: Any) -> Any:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError(WRONG, "must be a text or a list of texts")
    return tuple(_text(text) for text in texts)


String = Annotated[str, AfterValidator(_text)]


class Part(BaseModel):
    """A part of a message; only texts are understood."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: String


class Message(BaseModel):
    """A turn of a conversation. What else an answer of this server has in its message may come back empty."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant"]
    content: String | list[Part] | None = None

    @property
    def turn(self) -> dict[str, str]:
        """As chat templates take it.

        Raises:
            Fault: for what they have no place for.
        """
        for name, value in (self.model_extra or {}).items():
            if value not in (None, [], {}):
                raise Fault(400, f"messages with {name!r:.60} are not supported by this server", param="messages")
        parts = self.content if isinstance(self.content, list) else None
        text = "".join(part.text for part in parts) if parts is not None else self.content or ""
        return {"role": "system" if self.role == "developer" else self.role, "content": str(text)}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Body(BaseModel):
    """What all endpoints take. Beside its fields stand the numbers of the sampler, such as `threshold`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stops: Annotated[tuple[str, ...], PlainValidator(_stop)] = Field((), alias="stop")

    @model_validator(mode="before")
    @classmethod
    def _bound(cls, body: Any) -> Any:
        """Counts what there is before each is looked at."""
        left, inside = MOST_ITEMS, [{**body, "prompt": None}] if isinstance(body, dict) else []
        while inside:
            value = inside.pop()
            left -= len(value)
            if left < 0:
                raise PydanticCustomError(WRONG, f"has more than {MOST_ITEMS} fields and items beside the prompt")
            inside += [item for item in (value.values() if isinstance(value, dict) else value) if _holds(item)]
        return body

    @property
    def prompts(self) -> list[Any]:
        """What is to be answered, each as `generate` takes it."""
        raise NotImplementedError

    @property
    def length(self) -> int | None:
        """Positions to generate."""
        return self.max_tokens

    @property
    def with_logprobs(self) -> bool:
        """Whether the answer tells the log-probability of its tokens."""
        return False

    def check(self) -> None:
        """Raises Fault for fields that nobody knows, and OpenAI's that ask for what is not there."""
        for name, value in self._others():
            _number(name, value)

    @property
    def numbers(self) -> dict[str, int | float]:
        """The sampler's for this request; raises Fault as `check`."""
        said = {name: value for name in ("temperature", "top_p") if (value := getattr(self, name)) is not None}
        return said | {name: _number(name, value) for name, value in self._others()}

    def _others(self) -> list[tuple[str, Any]]:
        """The further fields that mean something."""
        found = []
        for name, value in (self.model_extra or {}).items():
            if name in UNREAD or (name in IDLE and any(_same(value, idle) for idle in IDLE[name])):
                continue
            if name in IDLE:
                raise Fault(400, f"{name} is not supported by this server; leave it out", param=name)
            found.append((name, value))
        return found


class Completing(Body):
    """What both of OpenAI's endpoints take."""

    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(Completing):
    """Of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def length(self) -> int | None:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise Fault(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        return next(iter(both), None)

    @property
    def prompts(self) -> list[Any]:
        return [[message.turn for message in self.messages]]

    @property
    def with_logprobs(self) -> bool:
        return bool(self.logprobs)

    def check(self) -> None:
        super().check()
        if self.top_logprobs:
            raise Fault(400, "top_logprobs above 0 is not there; logprobs tells each token's own", param="top_logprobs")


class TextBody(Completing):
    """Of /v1/completions."""

    prompt: Annotated[Any, PlainValidator(_prompt)]
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def prompts(self) -> list[Any]:
        """Texts, or lists of token ids."""
        found: list[Any] = self.prompt
        return found if found and isinstance(found[0], str | list) else [found]

    @property
    def with_logprobs(self) -> bool:
        return self.logprobs is not None

    def check(self) -> None:
        super().check()
        if self.logprobs:
            raise Fault(400, "logprobs above 0 is not there; logprobs=0 tells each token's own", param="logprobs")


class CanvasBody(Body):
    """Of /v1/canvas: a text as it is, or a conversation."""

    prompt: String | None = None
    messages: list[Message] | None = None

    @property
    def prompts(self) -> list[Any]:
        if (self.prompt is None) == (self.messages is None):
            raise Fault(400, "give either a prompt or messages", param="prompt")
        return [self.prompt if self.messages is None else [message.turn for message in self.messages]]


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)


def _same(value: Any, idle: Any) -> bool:
    """Equal, and not as 0 and False are."""
    return bool(value == idle) and (isinstance(value, bool) == isinstance(idle, bool))


def _number(name: str, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        sentence = f"{name!r:.60} is not known, or is no number; OpenAI's fields and the sampler's numbers are"
        raise Fault(400, sentence, param=name[:60], code="unknown_parameter")
    if not abs(value) <= MOST_NUMBER:
        raise Fault(400, f"{name!r:.60} is out of range", param=name[:60])
    return value
