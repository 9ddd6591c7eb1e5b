"""Stop patterns: the automaton against a search in the finished text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from samplers import stop_on
from samplers.stopping import NEVER, Matcher, advance, begin

MASK, WIDTH, VOCAB = 9, 12, 10
read = jax.jit(lambda stop, state, tokens, lengths: advance(stop, state, tokens, lengths, tokens == MASK))


def lengths_of(stop, *canvases: list[int], limit: int = WIDTH) -> list[int]:
    """Reads growing canvases of one row and gives the stop length after each."""
    state, found = begin(stop, 1), []
    for canvas in canvases:
        state = read(stop, state, jnp.asarray([canvas]), jnp.asarray([limit]))
        found.append(int(state.length[0]))
    return found


tokens = st.lists(st.sampled_from([1, 2, 3]), min_size=WIDTH, max_size=WIDTH)
two_patterns = st.tuples(*[st.lists(st.sampled_from([1, 2, 3]), min_size=3, max_size=3)] * 2)


def search(canvas: list[int], patterns) -> int:
    """Start of the match that ends first (the shortest prefix with a match decides)."""
    for end in range(1, WIDTH + 1):
        starts = [end - len(ids) for ids in patterns if canvas[:end][-len(ids) :] == list(ids) and end >= len(ids)]
        if starts:
            return min(starts)
    return NEVER


@settings(max_examples=100)
@given(tokens, two_patterns, st.sets(st.integers(0, WIDTH - 1)))
def test_sequences_equal_a_search(canvas, patterns, late) -> None:
    """Wherever masks are at first, the answer at the end is that of a search; before, nothing after a mask counts."""
    stop = stop_on(sequences=patterns, vocab_size=VOCAB)
    partial = [MASK if i in late else token for i, token in enumerate(canvas)]
    early, final = lengths_of(stop, partial, canvas)
    first_mask = min(late, default=WIDTH)
    assert early == search(canvas[:first_mask] + [0] * (WIDTH - first_mask), patterns)
    assert final == search(canvas, patterns)


def test_tokens_and_limit() -> None:
    stop = stop_on([4, 5], vocab_size=VOCAB)
    assert lengths_of(stop, [1, 1, 5, 1, 4, 1, 1, 1, 1, 1, 1, 1]) == [2]
    assert lengths_of(stop, [1, MASK, 5, 1, 4, 1, 1, 1, 1, 1, 1, 1]) == [NEVER]
    assert lengths_of(stop, [1, 1, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1], limit=3) == [NEVER]
    assert stop_on(vocab_size=VOCAB) is None


PIECES = [b"a", b"b", b"ab", b"ba", b"abc", b"c", b"", b"\xc3", b"\xa9", b""]


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 8), min_size=WIDTH, max_size=WIDTH), st.sampled_from(["abc", "aab", "bab", "\u00e9", "c"])
)
def test_strings_cross_token_borders(ids, text) -> None:
    """A string is found however it is tokenised; the row stops after the token that completes it."""
    stop = stop_on(strings=[text], vocab_size=VOCAB, token_bytes=PIECES)
    joined = [b"".join(PIECES[i] for i in ids[: end + 1]) for end in range(WIDTH)]
    wanted = next((end + 1 for end in range(WIDTH) if text.encode() in joined[end]), NEVER)
    assert lengths_of(stop, ids) == [wanted]


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 8), min_size=WIDTH, max_size=WIDTH),
    st.lists(st.sampled_from(["abc", "aab", "\u00e9", "c", 1, 5]), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(0, WIDTH), max_size=4),
)
def test_the_host_finds_what_the_program_finds(ids, patterns, frontiers) -> None:
    """However the final tokens grow from call to call."""
    strings = [item for item in patterns if isinstance(item, str)]
    tokens = [item for item in patterns if not isinstance(item, str)]
    stop = stop_on(tokens, strings=strings, vocab_size=VOCAB, token_bytes=PIECES)
    matcher = Matcher(patterns, PIECES)
    for final in [*sorted(frontiers), WIDTH]:
        hidden = ids[:final] + [MASK] * (WIDTH - final)
        assert [matcher.read(np.asarray(ids[:final]))] == lengths_of(stop, hidden)


def test_rows_are_independent() -> None:
    stop = stop_on([4], sequences=[[1, 2]], vocab_size=VOCAB)
    rows = np.asarray([[1, 2, 4, 3], [3, 3, 3, 3], [3, 4, 1, 2], [1, 1, 2, 4]])
    together = read(stop, begin(stop, 4), jnp.asarray(rows), jnp.full((4,), 4))
    assert together.length.tolist() == [0, NEVER, 1, 1]
    for row in range(4):
        alone = read(stop, begin(stop, 1), jnp.asarray(rows[row : row + 1]), jnp.full((1,), 4))
        assert int(alone.length[0]) == int(together.length[row])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sequences": [[]]}, "stop sequence"),
        ({"tokens": [10]}, "10"),
        ({"strings": [""], "token_bytes": PIECES}, "stop string"),
        ({"strings": ["\ud800"], "token_bytes": PIECES}, "surrogate"),
        ({"strings": ["x"]}, "tokenizer"),
    ],
)
def test_bad_patterns(options: dict, name: str) -> None:
    with refuses(name):
        stop_on(vocab_size=VOCAB, **options)
