"""Tokens as readable text: one printable text per position, with marks for line breaks, tabs and end tokens."""

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from dllm_jax import DllmError, ModelConfig
from dllm_jax.text.tokenizer import special_tokens, token_bytes

END = "\x03"  # stands for any end token until it is drawn


class HasTokens(Protocol):
    """A tokenizer and a config: of a `Model` or a `Trace`."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def config(self) -> ModelConfig: ...


class Glyphs(NamedTuple):
    """Characters that a canvas is drawn with."""

    mask: str
    border: str
    dot: str
    times: str
    marks: dict[str, str]


UNICODE = Glyphs("░", "│", "·", "×", {"\n": "↵", "\t": "⇥", END: "∎"})
ASCII = Glyphs("_", "|", "-", "x", {"\n": "\\n", "\t": "\\t", END: "$"})


def printable(text: str, ascii_only: bool = False, marks: dict[str, str] | None = None) -> str:
    """A text without control characters, for any terminal: marks for some characters, escapes for others."""
    marks = marks or {}
    shown = (marks.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
    return "".join(shown).encode("ascii" if ascii_only else "utf-8", "backslashreplace").decode()


class Speller:
    """The texts of tokens: a character appears at the token that completes it, parts of one as \\xNN."""

    def __init__(self, model: HasTokens) -> None:
        self._piece, self._names = _piece_of(model), dict[int, str]()
        if model.tokenizer is not None:
            self._names |= {token: name for name, token in special_tokens(model.tokenizer).items()}
        self._names |= dict.fromkeys((model.config.eos_id, *model.config.end_ids), END)

    def __call__(self, tokens: Sequence[int], written: Sequence[bool]) -> list[str | None]:
        """One text per position; None where nothing is written."""
        texts: list[str | None] = [None] * len(tokens)
        plain = [shown and token not in self._names for token, shown in zip(tokens, written, strict=True)]
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        for i, token in enumerate(tokens):
            if plain[i]:
                ends = not any(plain[i + 1 : i + 2])  # the next token cannot complete a character
                texts[i] = decoder.decode(self._piece(token) or f"<{token}>".encode(), final=ends)
            elif written[i]:
                texts[i] = self._names[token]
        return texts


def _piece_of(model: HasTokens) -> Callable[[int], bytes]:
    """The bytes of a token; without a tokenizer its id in digits."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return lambda token: f"{token} ".encode()
    try:
        return token_bytes(tokenizer, model.config.vocab_size).__getitem__
    except DllmError:  # not byte-level: neighbours cannot complete each other's characters
        return functools.cache(lambda token: str(tokenizer.decode([token])).encode())
