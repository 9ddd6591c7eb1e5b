"""How answers are written: chat completions and completions, whole and in chunks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dllm_jax import Model
from dllm_jax.errors import DllmError
from dllm_jax.text.tokenizer import special_tokens, token_bytes
from samplers.generation import Generation
from samplers.stopping import stop_at, stop_strings

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """A token of an answer and its log-probability.

    Attributes:
        text: its text alone.
        bytes: what it adds to the answer's text; None where that depends on its neighbours.
        logprob: in nats; None where no forward chose it.
        offset: characters of the answer before it.
    """

    text: str
    bytes: list[int] | None
    logprob: float | None
    offset: int


def token_scores(model: Model, answer: Generation, stops: Sequence[str | int]) -> list[TokenScore]:
    """The tokens of an answer's text, up to the one in which a stop string begins."""
    tokenizer = model.require_tokenizer()
    names = {i: name for name, i in special_tokens(tokenizer).items()}
    try:
        pieces = [token_bytes(tokenizer, model.config.vocab_size)[token] for token in answer.tokens]
    except DllmError:  # not byte-level
        texts = [str(tokenizer.decode([token])) for token in answer.tokens]
        return [TokenScore(text, None, x, 0) for text, x in zip(texts, answer.logprobs, strict=True)]
    whole, found, at = b"".join(pieces), [], 0
    end = stop_at(whole, [text.encode() for text in stop_strings(stops)])
    for token, piece, x in zip(answer.tokens, pieces, answer.logprobs, strict=True):
        if at < end or (at == end == len(whole)):
            text = names.get(token) or piece.decode("utf-8", "replace")
            found.append(TokenScore(text, list(piece), x, len(whole[:at].decode("utf-8", "replace"))))
        at += len(piece)
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
    def choice(text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    @staticmethod
    def opening() -> Json | None:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}}

    @staticmethod
    def delta(text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    @staticmethod
    def logprobs(tokens: Sequence[TokenScore], alternatives: bool) -> Json:
        def entry(token: TokenScore) -> Json:
            own = {"token": token.text, "bytes": token.bytes, "logprob": token.logprob}
            return {**own, "top_logprobs": [own] if alternatives else []}

        return {"content": [entry(token) for token in tokens], "refusal": None}


class TextShape:
    """Answers of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    @staticmethod
    def choice(text: str) -> Json:
        return {"text": text}

    @staticmethod
    def opening() -> Json | None:
        return None

    @staticmethod
    def delta(text: str) -> Json:
        return {"text": text}

    @staticmethod
    def logprobs(tokens: Sequence[TokenScore], alternatives: bool) -> Json:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{token.text: token.logprob} for token in tokens] if alternatives else None,
            "text_offset": [token.offset for token in tokens],
        }


Shape = type[ChatShape] | type[TextShape]
