"""How answers are written: chat completions and completions, whole and in chunks."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from dllm_jax import Model
from dllm_jax.errors import DllmError
from dllm_jax.text.tokenizer import special_tokens, token_bytes
from samplers.generation import Generation
from samplers.stopping import stop_at, stop_strings

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""The log-probability of what is impossible, as in OpenAI's API."""


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """A token of an answer and its log-probability.

    Attributes:
        text: its text alone.
        bytes: what it adds to the answer's text; None where that depends on its neighbours.
        logprob: in nats; None where no forward chose it.
        offset: characters of the answer before it.
        top: the most probable tokens in the forward that chose it, if they are wanted.
    """

    text: str
    bytes: list[int] | None
    logprob: float | None
    offset: int = 0
    top: Sequence["TokenScore"] = ()


def token_scores(
    model: Model, answer: Generation, stops: Sequence[str | int], count: int = 0, top: Any = None
) -> list[TokenScore]:
    """The tokens of an answer's text, up to the one in which a stop string begins.

    Args:
        count: most probable tokens that are wanted with each.
        top: as in `Request`; None for each token as its own only one.
    """
    tokenizer = model.require_tokenizer()
    names = {i: name for name, i in special_tokens(tokenizer).items()}
    known: Sequence[bytes] | None = None
    with contextlib.suppress(DllmError):  # not byte-level
        known = token_bytes(tokenizer, model.config.vocab_size)

    def score(token: int, logprob: float | None) -> TokenScore:
        if known is None:
            return TokenScore(str(tokenizer.decode([token])), None, logprob)
        return TokenScore(names.get(token) or known[token].decode("utf-8", "replace"), list(known[token]), logprob)

    def most_probable(place: int, own: TokenScore) -> list[TokenScore]:
        if top is None or own.logprob is None:  # nothing chose it
            return [own][:count]
        pairs = zip(top[0][place, :count].tolist(), top[1][place, :count].tolist(), strict=True)
        return [score(token, max(logprob, LEAST_LOGPROB)) for token, logprob in pairs]

    scores = [score(*pair) for pair in zip(answer.tokens, answer.logprobs, strict=True)]
    scores = [dataclasses.replace(own, top=most_probable(place, own)) for place, own in enumerate(scores)]
    if known is None:
        return scores
    whole, found, at = b"".join(known[token] for token in answer.tokens), [], 0
    end = stop_at(whole, [text.encode() for text in stop_strings(stops)])
    for own in scores:
        if at < end or (at == end == len(whole)):
            found.append(dataclasses.replace(own, offset=len(whole[:at].decode("utf-8", "replace"))))
        at += len(own.bytes or ())
    return found


def usage_of(answers: Sequence[Generation], prompts: int, cached: Sequence[int] | None = None) -> Json:
    """Counts of tokens and forwards.

    Args:
        answers: of all prompts in order, equally many for each.
        prompts: how many prompts.
        cached: of each answer the tokens of its prompt that were not read, where prompts are kept.
    """
    copies = len(answers) // prompts
    read = sum(answer.prompt_tokens for answer in answers[::copies])
    wrote = sum(len(answer.tokens) for answer in answers)
    forwards = sum(answer.nfe for answer in answers)
    found = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote, "forwards": forwards}
    return found if cached is None else {**found, "prompt_tokens_details": {"cached_tokens": sum(cached[::copies])}}


class ChatShape:
    """Answers of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @staticmethod
    def choice(message: Json) -> Json:
        return {"message": {"role": "assistant", "refusal": None, **message}}

    @staticmethod
    def opening() -> Json | None:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}}

    @staticmethod
    def delta(part: Json) -> Json:
        return {"delta": part}

    @staticmethod
    def logprobs(tokens: Sequence[TokenScore]) -> Json:
        entry = lambda token: {"token": token.text, "bytes": token.bytes, "logprob": token.logprob}
        content = [{**entry(token), "top_logprobs": [*map(entry, token.top)]} for token in tokens]
        return {"content": content, "refusal": None}


class TextShape:
    """Answers of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    @staticmethod
    def choice(message: Json) -> Json:
        return {"text": message["content"]}

    @staticmethod
    def opening() -> Json | None:
        return None

    @staticmethod
    def delta(part: Json) -> Json:
        return {"text": part.get("content", "")}

    @staticmethod
    def logprobs(tokens: Sequence[TokenScore]) -> Json:
        by_text = lambda token: {one.text: one.logprob for one in (*token.top, token)}
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [*map(by_text, tokens)] if any(token.top for token in tokens) else None,
            "text_offset": [token.offset for token in tokens],
        }


Shape = type[ChatShape] | type[TextShape]
