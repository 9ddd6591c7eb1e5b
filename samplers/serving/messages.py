"""Answers of /v1/messages, in the shape of Anthropic's API, made of those of /v1/chat/completions."""

from collections.abc import AsyncIterator
from typing import Any

from samplers.serving.shapes import Json


def as_message(answer: Json) -> Json:
    """A whole answer."""
    (choice,) = answer["choices"]
    content = [{"type": "text", "text": choice["message"]["content"]}]
    return {**_head(answer), "content": content, **_ending(choice), "usage": _usage(answer["usage"])}


async def as_events(chunks: AsyncIterator[Json], prompt_tokens: int) -> AsyncIterator[Json]:
    """The events of a streamed answer, of which the last chunk has the counts of tokens."""
    ending: Json | None = None
    async for chunk in chunks:
        if ending is None:
            ending = {"stop_reason": None, "stop_sequence": None}
            usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
            yield {"type": "message_start", "message": {**_head(chunk), "content": [], **ending, "usage": usage}}
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
            if choice["finish_reason"]:
                ending = _ending(choice)
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": ending, "usage": _usage(chunk["usage"])}
    yield {"type": "message_stop"}


def _head(answer: Json) -> Json:
    name = answer["id"].replace("chatcmpl-", "msg_")
    return {"id": name, "type": "message", "role": "assistant", "model": answer["model"]}


def _ending(choice: Json) -> dict[str, Any]:
    stop = choice["stop_reason"]
    reason = "max_tokens" if choice["finish_reason"] == "length" else "end_turn" if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Json) -> Json:
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
