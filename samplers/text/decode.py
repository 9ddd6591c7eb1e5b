"""The text of a generation: whole, or as a stream while a sampler still writes.

A diffusion model writes positions in any order. What a reader may be shown is the text of the *final* tokens, the
unbroken beginning of the generation up to the first position that may still change, less what later tokens may
change: a character of which a part is missing, the beginning of a stop string.

shown = TextStream(model, stop=["\\n\\n"])
for tokens in ...:  # the final tokens so far, of one row
    print(shown.feed(tokens), end="")
print(shown.finish(answer.tokens))  # and all of it is `answer.text`
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from dllm_jax import DllmError, Model
from dllm_jax.text.tokenizer import settled_test, special_tokens
from samplers.stopping import certain_length, end_tokens, stop_at, stop_strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
"""From the tokens after those of the calls before, to the text that they make certain."""


def text_of(model: Model, tokens: Sequence[int], stop: Sequence[str | int] = ()) -> str:
    """The text of a row's tokens, special ones left out, up to its first stop string; empty without a tokenizer."""
    if model.tokenizer is None:
        return ""
    text = str(model.tokenizer.decode(list(tokens), skip_special_tokens=True))
    return text[: stop_at(text, stop_strings(stop))]


class TextStream:
    """The text of one row, as far as it is certain. What `feed` and `finish` return is together `text_of` of the
    answer's tokens, and no character of it ever changes.

    End tokens and special tokens are never shown, nor is anything after an end token. With a few
    tokenizers any token can change the whole text (`dllm_jax.text.tokenizer.settled_test`); theirs comes at the end.

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
        self._decode = _decoder_for(model)
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
        self._held += self._decode(before_end)
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


def _decoder_for(model: Model) -> Decode:
    """How the tokens of a model become text step by step; no text at all where later tokens may change any of it."""
    tokenizer = model.tokenizer
    settled = None if tokenizer is None else settled_test(tokenizer)
    return (lambda tokens: "") if settled is None else _IncrementalDecoder(tokenizer, settled)


class _IncrementalDecoder:
    """Feeds a `DecodeStream`, which waits for the last byte of a character.

    A token waits here until no later one changes its text: the stream raises an error if a text that it returned does.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", settled: Callable[[str], bool]) -> None:
        self._core, self._settled = tokenizer.backend_tokenizer, settled
        self._silent = set(special_tokens(tokenizer).values())
        self._stream, self._waiting = DecodeStream(), list[int]()

    def __call__(self, tokens: Sequence[int]) -> str:
        self._waiting += [token for token in tokens if token not in self._silent]
        names = map(self._core.id_to_token, self._waiting)
        end = max((i for i, name in enumerate(names, 1) if name is not None and self._settled(name)), default=0)
        certain, self._waiting = self._waiting[:end], self._waiting[end:]
        return (self._stream.step(self._core, certain) if certain else None) or ""
