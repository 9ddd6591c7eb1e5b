"""The text of a generation: whole, or as a stream while a sampler still writes.

A diffusion model writes positions in any order. What a reader may be shown is the text of the *final* tokens, the
unbroken beginning of the generation up to the first position that may still change, less what later tokens may
change: a character of which a part is missing, the beginning of a stop string.

shown = TextStream(model, stop=["\\n\\n"])
for tokens in ...:  # the final tokens so far, of one row
    print(shown.feed(tokens), end="")
print(shown.finish(answer.tokens))  # and all of it is `answer.text`
"""

import codecs
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dllm_jax import DllmError, Model
from dllm_jax.text.tokenizer import settles, special_tokens, token_bytes
from samplers.stopping import certain_length, end_tokens, stop_at, stop_strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Grow = Callable[[Sequence[int]], str]
"""From tokens that follow those of the calls before to the text that is certain by now."""


def text_of(model: Model, tokens: Sequence[int], stop: Sequence[str | int] = ()) -> str:
    """The text of a row's tokens, special ones left out, up to its first stop string; empty without a tokenizer."""
    if model.tokenizer is None:
        return ""
    text = str(model.tokenizer.decode(list(tokens), skip_special_tokens=True))
    return text[: stop_at(text, stop_strings(stop))]


class TextStream:
    """The text of one row, as far as it is certain. What `feed` and `finish` return is together `text_of` of the
    answer's tokens, and no character of it ever changes.

    End tokens and special tokens are never shown, nor is anything after an end token. A few tokenizers decode in ways
    that the last token can change all of (`dllm_jax.text.tokenizer.settles`); their text comes at the end, as a whole.

    Attributes:
        text: all that was returned so far.
    """

    def __init__(self, model: Model, stop: Sequence[str | int] = (), *, ignore_eos: bool = False) -> None:
        """
        Args:
            stop: strings and token ids that end the answer, as `make_sampler` takes them.
            ignore_eos: the answer continues after the model's end tokens, but for that of the sequence.
        """
        config = model.config
        self.text = ""
        self._model, self._stop = model, tuple(stop)
        self._strings = stop_strings(stop)
        self._ends = {config.eos_id, *end_tokens(config, stop, ignore_eos=ignore_eos)}
        self._grow = _grow_by(model)
        self._read, self._ended, self._held = 0, False, ""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain.

        Args:
            tokens: all final tokens of the row so far: those of the call before, and what follows them.
        """
        fresh = [int(token) for token in tokens[self._read :]]
        self._read += len(fresh)
        before_end = [] if self._ended else list(itertools.takewhile(lambda token: token not in self._ends, fresh))
        self._ended |= len(before_end) < len(fresh)
        self._held += self._grow(before_end)
        safe = certain_length(self._held, self._strings)
        new, self._held = self._held[:safe], self._held[safe:]
        self.text += new
        return new

    def finish(self, tokens: Sequence[int]) -> str:
        """The rest of the text.

        Args:
            tokens: the answer's, up to and without its end, as `Generation.tokens`.

        Raises:
            DllmError: when tokens that were fed have changed since.
        """
        whole = text_of(self._model, tokens, self._stop)
        if not whole.startswith(self.text):
            raise DllmError("the answer does not begin with the tokens that were fed; feed only what is final")
        rest, self.text = whole[len(self.text) :], whole
        return rest


def _grow_by(model: Model) -> Grow:
    """How the tokens of a model become text, bit by bit."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return lambda tokens: ""
    try:
        return _BytePieces(token_bytes(tokenizer, model.config.vocab_size))
    except DllmError:  # its tokens do not simply follow each other
        settled = settles(tokenizer)
        return (lambda tokens: "") if settled is None else _DecodedFromAnchor(tokenizer, settled)


class _BytePieces:
    """Tokens that are bytes: a character is certain when its last byte is there."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces, self._decoder = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(self._pieces[token] for token in tokens))


class _DecodedFromAnchor:
    """Tokens whose text depends on their place: decoded with those before them, from an anchor on.

    Decoders treat the very first token in a way of its own, so the anchor is one that has text before what is new. What
    one token does to the next is no further than that.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", settled: Callable[[str], bool]) -> None:
        self._core, self._settled = tokenizer.backend_tokenizer, settled
        self._silent = set(special_tokens(tokenizer).values())
        self._tokens: list[int] = []  # from the anchor on
        self._certain, self._text = 0, ""  # how many of them are certain, and their text

    def __call__(self, tokens: Sequence[int]) -> str:
        end = self._certain
        for token in tokens:
            name = None if token in self._silent else self._core.id_to_token(token)
            if name is None:  # nobody's id, which is no text
                continue
            self._tokens.append(token)
            end = len(self._tokens) if self._settled(name) else end
        if end == self._certain:
            return ""
        text = self._core.decode(self._tokens[:end])
        new = text[len(self._text) :]
        if alone := self._core.decode(self._tokens[self._certain : end]):
            self._tokens, self._certain, self._text = self._tokens[self._certain :], end - self._certain, alone
        else:
            self._certain, self._text = end, text
        return new
