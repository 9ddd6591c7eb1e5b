"""Stop conditions as one automaton over tokens, stepped inside the compiled loop.

The patterns of a sampler are compiled; those of a single request are found by `Matcher` on the host between two steps,
where the next step ends its row: the same tokens and forwards, and no program or table depends on requests.

A row stops when a stop pattern is complete and everything up to its end is final, so that nothing written later can
change the text up to there (`generate_until` of arXiv 2505.24857). A pattern is a sequence
of token ids, or a string that is matched byte by byte across token borders, whatever the tokenisation.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dllm_jax.config import ModelConfig
from dllm_jax.errors import DllmError
from dllm_jax.pytree import pytree
from samplers.checks import check_token

T = TypeVar("T", str, bytes)


@pytree()
class Stop:
    """Patterns, compiled to one table. N patterns have Q states in all.

    Attributes:
        table: [Q, V] int32, the state after reading a token.
        start: [N] int32, each pattern's first state.
        accept: [Q] bool, states in which a pattern is complete.
        drop: int32 of the same shape, tokens that the pattern itself takes at the end of a match (0 for strings, whose
            text is cut by the caller).
    """

    table: jax.Array
    start: jax.Array
    accept: jax.Array
    drop: jax.Array


@pytree()
class StopState:
    """Per row: how far the unbroken beginning of the generation was read [B], the patterns' states [B, N], and the
    number of tokens before the match [B] (a large number while there is none)."""

    read: jax.Array
    states: jax.Array
    length: jax.Array


NEVER = np.iinfo(np.int32).max


def end_tokens(config: ModelConfig, stop: Sequence[str | int] = (), *, ignore_eos: bool = False) -> tuple[int, ...]:
    """The single tokens that end an answer: those among its stop patterns and, unless they are ignored, the model's."""
    own = (item for item in stop if not isinstance(item, str))
    return tuple(dict.fromkeys((*own, *(() if ignore_eos else config.end_ids))))


def stop_strings(stop: Sequence[str | int]) -> list[str]:
    """The strings among stop patterns; the others are token ids."""
    return [item for item in stop if isinstance(item, str)]


def check_stop(stop: Any, config: ModelConfig) -> None:
    """Raises DllmError for anything but a list of strings that can be found, and of the model's token ids."""
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise DllmError(f"stop is {stop!r}; give a list of strings or token ids")
    for item in stop:
        if isinstance(item, str):
            stop_bytes(item)
        else:
            check_token("stop", item, config)


def certain_length(text: str, stop: Sequence[str]) -> int:
    """Characters of a text that no stop string cuts off, whatever follows: those before each string, or before what may
    become one."""
    return min((_certain_length(text, string) for string in stop), default=len(text))


def _certain_length(text: str, stop: str) -> int:
    found = text.find(stop)
    if found >= 0:
        return found
    begun = (length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length]))
    return len(text) - next(begun, 0)


def stop_at(text: T, stop: Sequence[T]) -> int:
    """Where a text, or its bytes, is cut: at the first of its stop strings, or its end."""
    return min((at for at in map(text.find, stop) if at >= 0), default=len(text))


def stop_on(
    tokens: Sequence[int] = (),
    sequences: Sequence[Sequence[int]] = (),
    strings: Sequence[str] = (),
    *,
    vocab_size: int,
    token_bytes: Sequence[bytes] | None = None,
) -> Stop | None:
    """Compiles stop patterns; None when there are none.

    Args:
        tokens: single ids that stop, such as the end-of-sequence token.
        sequences: sequences of ids.
        strings: texts; `token_bytes[id]` gives the bytes each id stands for.
        vocab_size: V.

    Raises:
        DllmError: for an empty pattern, an id outside the vocabulary, or strings without `token_bytes`.
    """
    parts = [sequence_table(tuple(ids), vocab_size) for ids in [*((token,) for token in tokens), *sequences]]
    drops = [1] * len(tokens) + [len(ids) for ids in sequences] + [0] * len(strings)
    if strings and token_bytes is None:
        raise DllmError("a stop string needs a tokenizer to be matched against; give stop token ids instead")
    parts += [string_table(text, token_bytes or (), vocab_size) for text in strings]
    if not parts:
        return None
    offsets = np.cumsum([0, *(len(part) for part in parts)])
    table = np.concatenate([part + offset for part, offset in zip(parts, offsets, strict=False)])
    accept = np.zeros(len(table), bool)
    accept[offsets[1:] - 1] = True
    return Stop(
        table=jnp.asarray(table, jnp.int32),
        start=jnp.asarray(offsets[:-1], jnp.int32),
        accept=jnp.asarray(accept),
        drop=jnp.asarray(drops, jnp.int32),
    )


def _failures(pattern: Sequence[int]) -> list[int]:
    """Knuth-Morris-Pratt: for each prefix length the longest proper prefix that is also its suffix."""
    failure, k = [0, 0], 0
    for symbol in pattern[1:]:
        while k and pattern[k] != symbol:
            k = failure[k]
        k += pattern[k] == symbol
        failure.append(k)
    return failure


def sequence_table(ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """[len + 1, V] transitions of one id sequence; the last state stays."""
    if not ids:
        raise DllmError("a stop sequence is empty; leave it out")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise DllmError(f"stop token {token} lies outside the vocabulary of {vocab_size} tokens")
    failure = _failures(ids)
    table = np.zeros((len(ids) + 1, vocab_size), np.int32)
    for state in range(len(ids)):
        if state:
            table[state] = table[failure[state]]
        table[state, ids[state]] = state + 1
    table[-1] = len(ids)
    return table


def stop_bytes(text: str) -> bytes:
    """The bytes that a stop string is matched by.

    Raises:
        DllmError: for an empty one, and for characters that no text has.
    """
    if not text:
        raise DllmError("a stop string is empty; leave it out")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise DllmError(f"the stop string {text!r} has half a surrogate pair, which no text has; correct it") from None


def string_table(text: str, token_bytes: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """[bytes + 1, V] transitions of a text: each token runs the text's byte automaton over its own bytes."""
    machine = sequence_table(tuple(stop_bytes(text)), 256)
    longest = max((len(piece) for piece in token_bytes), default=0)
    symbols = np.full((vocab_size, longest), -1, np.int16)
    for token, piece in enumerate(token_bytes[:vocab_size]):
        symbols[token, : len(piece)] = np.frombuffer(piece, np.uint8)
    state = np.repeat(np.arange(len(machine), dtype=np.int32)[:, None], vocab_size, axis=1)
    for column in symbols.T:  # all states and all tokens at once, byte by byte
        state = np.where(column >= 0, machine[state, np.maximum(column, 0)], state)
    return state


def begin(stop: Stop, batch: int) -> StopState:
    """The state before anything was read."""
    states = jnp.broadcast_to(stop.start, (batch, len(stop.start)))
    return StopState(jnp.zeros((batch,), jnp.int32), states, jnp.full((batch,), NEVER, jnp.int32))


def advance(
    stop: Stop, state: StopState, generated: jax.Array, gen_lengths: jax.Array, pending: jax.Array
) -> StopState:
    """Advances over the tokens [B, G] up to each row's first position that may still change, `pending` [B, G] bool, or
    its length [B]; over a whole generation every token once."""
    width = generated.shape[1]
    frontier = jnp.where(pending.any(axis=1), jnp.argmax(pending, axis=1), gen_lengths).astype(jnp.int32)

    def unread(s: StopState) -> jax.Array:
        return (s.read < frontier) & (s.length == NEVER)

    def read(s: StopState) -> StopState:
        go = unread(s)
        token = jnp.take_along_axis(generated, jnp.minimum(s.read, width - 1)[:, None], axis=1)
        states = stop.table[s.states, token]  # [B, N]
        match = jnp.where(stop.accept[states], s.read[:, None] + 1 - stop.drop, NEVER).min(axis=1)
        return StopState(
            read=s.read + go,
            states=jnp.where(go[:, None], states, s.states),
            length=jnp.where(go, jnp.minimum(s.length, match), s.length),
        )

    return lax.while_loop(lambda s: unread(s).any(), read, state)


class Matcher:
    """Stop patterns of one row, found on the host in its tokens as these become final.

    Attributes:
        length: tokens before the first match, as in `StopState`; `NEVER` while there is none.
    """

    def __init__(self, patterns: Sequence[str | int], token_bytes: Sequence[bytes]) -> None:
        """
        Args:
            patterns: strings, and single ids.
            token_bytes: the bytes of each id; may be empty if there are no strings.
        """
        self._strings = [stop_bytes(text) for text in stop_strings(patterns)]
        self._ids = {item for item in patterns if not isinstance(item, str)}
        self._pieces = token_bytes
        self._read, self._text, self.length = 0, bytearray(), NEVER

    def read(self, tokens: np.ndarray) -> int:
        """Reads all final tokens of the row so far [N], those of the previous call included, and returns the length."""
        for token in tokens[self._read :].tolist() if self.length == NEVER else ():
            before, self._read = len(self._text), self._read + 1
            if self._strings:
                self._text += self._pieces[token]
            if token in self._ids:
                self.length = self._read - 1
                break
            if any(self._text.find(text, max(before - len(text) + 1, 0)) >= 0 for text in self._strings):
                self.length = self._read
                break
        return self.length
