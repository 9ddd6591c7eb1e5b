"""A constraint on the form of an answer, kept while positions are written in any order.

An automaton reads tokens. A written position is one transition from each state, an undecided one any. F is the set of
states that reading up to a position can lead to, B the set from which what follows can end in acceptance. A token fits
where it leads from a state of F to one of B. Rules see the model's distribution over the tokens that fit; of what they
choose in one forward, from left to right, what fits with the chosen before it is written, and the rest waits. So at
every moment some completion is accepted, and the leftmost chosen position is always written.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dllm_jax.errors import DllmError
from dllm_jax.models.kv_cache import slice_rows
from dllm_jax.pytree import pytree, vary_like
from samplers.canvas import Canvas
from samplers.rules.base import Change

DEAD, START = 0, 1
"""States of every automaton: the one that nothing leads out of, and the first."""

READ = -1
"""In the place of a state: a token that the canvas came with is read as any other."""

WORD = 32


def any_form(vocab_size: int, states: int, classes: int) -> "Constraint":
    """One that every answer keeps, in NumPy's arrays with room for so many states and classes."""
    one = np.zeros((1, WORD), bool)
    one[0, START] = True
    leads = np.zeros((1, WORD, 1), np.uint32)
    leads[0, START] = 1 << START
    table = np.where(one, START, DEAD).astype(np.int16)[:, None]
    none, read = np.zeros((1, vocab_size), np.int32), np.full((1, WORD), READ, np.int16)
    return Constraint(none, table, one, leads, leads, none[:, :1], none[:, 0], read).padded(states, classes)


@pytree()
class Constraint:
    """An automaton over tokens of Q states and C classes of tokens, which answers must bring to acceptance. R is 1 for
    one that all rows share, else B. `samplers.constraint_for` makes it.

    Attributes:
        classes: [R, V] int32, each token's class: tokens of one class lead everywhere to the same state.
        table: [R, C, Q] int16, the state after a token of the class.
        accept: [R, Q] bool, states in which an answer may end.
        after, before: [R, Q, Q / 32] uint32, bits of the states that one token leads to from each, and from which.
        example: [R, C] int32, a token of each class.
        least: [R] int32, tokens of the shortest answer.
        fixed: [R, Q] int16, the state after a token that the canvas came with, whatever it is; or `READ`.
    """

    classes: Any
    table: Any
    accept: Any
    after: Any
    before: Any
    example: Any
    least: Any
    fixed: Any

    @property
    def sizes(self) -> tuple[int, int]:
        """Q and C."""
        return self.table.shape[2], self.table.shape[1]

    @property
    def used(self) -> tuple[int, int]:
        """Q and C without what is there for room alone: the last state and the last class that have a token."""
        live = np.asarray(self.after).any(axis=(0, 2)) | np.asarray(self.accept).any(axis=0)
        return 1 + int(np.flatnonzero(live)[-1]), 1 + int(np.asarray(self.classes).max())

    def padded(self, states: int, classes: int) -> "Constraint":
        """The same, in NumPy's arrays, with this room for states and classes, at least the `used` ones."""
        words = states // WORD
        tables = {"table": (classes, states), "after": (states, words), "before": (states, words)}
        grown = {}
        for name, shape in {**tables, "accept": (states,), "fixed": (states,), "example": (classes,)}.items():
            old = np.asarray(getattr(self, name))
            old = old[(slice(None), *map(slice, shape))]
            grown[name] = np.pad(old, [(0, 0), *((0, new - n) for n, new in zip(old.shape[1:], shape, strict=True))])
        return dataclasses.replace(self, **grown)

    def check_length(self, gen_length: int, row: int = 0) -> None:
        """Raises DllmError if the shortest answer is longer; inside a program nothing is checked."""
        if not isinstance(self.least, jax.core.Tracer) and (least := int(self.least[row])) > gen_length:
            raise DllmError(f"the shortest answer of this form has {least} tokens; gen_length is {gen_length}")

    def check(self, gen_length: int, given: np.ndarray | None = None, row: int = 0) -> None:
        """Raises DllmError if no answer of this length is accepted; inside a program nothing is checked.

        Args:
            given: [G] int32, tokens that the canvas of a row comes with, negative where there is none.
            row: whose constraint is checked, if each has its own.
        """
        if any(isinstance(leaf, jax.core.Tracer) for leaf in (self.least, self.table)):
            return
        row = min(row, self.least.shape[0] - 1)
        self.check_length(gen_length, row)
        classes, table, accept, after, fixed = (
            np.asarray(x[row]) for x in (self.classes, self.table, self.accept, self.after, self.fixed)
        )
        for token in [READ] * gen_length if given is None else given[gen_length - 1 :: -1]:
            if token < 0:
                bits = np.packbits(accept, bitorder="little").view("<u4")
                accept = ((after & bits) != 0).any(axis=1)
            else:
                accept = accept[np.where(fixed == READ, table[classes[token]], fixed)]
        if not accept[START]:
            what = "" if given is None else " with the given ones"
            raise DllmError(f"no text of {gen_length} tokens{what} has this form; correct the form, or the length")

    # Inside a program ------------------------------------------------------------------------------------------------

    def begin(self, canvas: Canvas) -> "ConstraintState":
        """The state before anything is written."""
        tokens = _tokens(canvas, canvas.prompt_lengths, canvas.gen_length)
        inside = jnp.arange(canvas.gen_length) < canvas.gen_lengths[:, None]

        def of_row(own: Constraint, *cells: jax.Array) -> jax.Array:
            accept = vary_like(tokens, own.accept)
            earlier = own._backward(accept, *cells)
            return jnp.concatenate([earlier, accept[None]])

        ends = self._each(of_row, tokens, canvas.undecided, inside)
        zeros = jnp.zeros_like(canvas.prompt_lengths)
        return ConstraintState(zeros, zeros + START, ends)

    def look(self, state: "ConstraintState", canvas: Canvas, start: jax.Array, width: int) -> tuple[Any, "Window"]:
        """The state, and what fits at the positions of a window. Everything before the window is written, and nothing
        after it but what the canvas came with.

        Args:
            start: [B] int32, the sequence's position of the window's first token.
        """
        state = self._read(state, canvas)
        place = (start - canvas.prompt_lengths)[:, None] + jnp.arange(width)
        tokens, undecided = _tokens(canvas, start, width), canvas.of_window(canvas.undecided, start, width)
        inside = (place >= state.read[:, None]) & (place < canvas.gen_lengths[:, None])
        end = jnp.clip(place[:, -1] + 1, 0, canvas.gen_length)
        last = jnp.take_along_axis(state.ends, end[:, None, None], axis=1)[:, 0]

        def of_row(own: Constraint, state: jax.Array, last: jax.Array, *cells: jax.Array) -> tuple[jax.Array, ...]:
            begun = jnp.arange(own.accept.shape[0]) == state
            later = jnp.concatenate([own._backward(last, *cells)[1:], last[None]])
            reached = own._forward(begun, *cells)
            return begun, later, own._fitting(reached, later) | _words(~cells[-1])

        begun, later, fits = self._each(of_row, state.state, last, tokens, undecided, inside)
        return state, Window(self, begun, later, fits, tokens, undecided, inside)

    def _each(self, of: Callable[..., Any], *rows: jax.Array) -> Any:
        """A function of a row's own constraint, without its axis R, and other arrays, of every row."""
        shared = self.accept.shape[0] == 1
        own = jax.tree.map(lambda x: x[0], self) if shared else self
        return jax.vmap(of, in_axes=(None if shared else 0, *[0] * len(rows)))(own, *rows)

    def _read(self, state: "ConstraintState", canvas: Canvas) -> "ConstraintState":
        """The state after reading up to each row's first undecided position."""
        undecided, tokens = canvas.undecided, _tokens(canvas, canvas.prompt_lengths, canvas.gen_length)
        frontier = jnp.where(undecided.any(axis=1), jnp.argmax(undecided, axis=1), canvas.gen_lengths).astype(jnp.int32)

        def next_state(own: Constraint, state: jax.Array, token: jax.Array) -> jax.Array:
            return own._next(token)[state].astype(jnp.int32)

        def read(s: ConstraintState) -> ConstraintState:
            go = s.read < frontier
            at = jnp.minimum(s.read, canvas.gen_length - 1)[:, None]
            token = jnp.take_along_axis(tokens, at, axis=1)[:, 0]
            new = jnp.where(go, self._each(next_state, s.state, token), s.state)
            return dataclasses.replace(s, read=s.read + go, state=new)

        return lax.while_loop(lambda s: (s.read < frontier).any(), read, state)

    # Of one row, without the axis R

    def _next(self, token: jax.Array) -> jax.Array:
        """The state after each, [Q], by a token as of `_tokens`."""
        came = token < 0
        after = self.table[self.classes[jnp.where(came, ~token, token)]]
        return jnp.where(came & (self.fixed != READ), self.fixed, after)

    def _backward(self, last: jax.Array, tokens: jax.Array, undecided: jax.Array, inside: jax.Array) -> jax.Array:
        """B before each of some positions [W]: [W, Q] bool, from B after the last of them [Q]."""

        def step(later: jax.Array, cell: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            token, is_undecided, is_inside = cell
            free = ((self.after & _words(later)) != 0).any(axis=-1)
            found = jnp.where(is_undecided, free, later[self._next(token)])
            found = jnp.where(is_inside, found, later)
            return found, found

        return lax.scan(step, last, (tokens, undecided, inside), reverse=True)[1]

    def _forward(self, begun: jax.Array, tokens: jax.Array, undecided: jax.Array, inside: jax.Array) -> jax.Array:
        """F before each position: [W, Q] bool, from F before the first [Q]."""

        def step(states: jax.Array, cell: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            token, is_undecided, is_inside = cell
            found = jnp.where(is_undecided, self._free(states), self._taken(states, token))
            return jnp.where(is_inside, found, states), states

        return lax.scan(step, begun, (tokens, undecided, inside))[1]

    def _free(self, states: jax.Array) -> jax.Array:
        """F after an undecided position."""
        return ((self.before & _words(states)) != 0).any(axis=-1)

    def _taken(self, states: jax.Array, token: jax.Array) -> jax.Array:
        """F after a token."""
        return jnp.zeros_like(states).at[self._next(token)].max(states).at[DEAD].set(False)

    def _fitting(self, reached: jax.Array, later: jax.Array) -> jax.Array:
        """Which classes fit at each position: [C, W / 32] uint32, bits of the positions.

        All positions of a word are tried at once, for each state and class.
        """
        mine, theirs = _words(reached.T), _words(later.T)  # [Q, W / 32]
        hits = [mine[None, :, n] & theirs[:, n][self.table] for n in range(mine.shape[1])]
        joined = [lax.reduce(hit, np.uint32(0), lax.bitwise_or, (1,)) for hit in hits]
        return jnp.stack(joined, axis=-1)


@pytree()
class ConstraintState:
    """How far each row was read, leaves [B, ...].

    Attributes:
        read, state: [B] int32, positions at the beginning that are written and were read, and the state after them.
        ends: [B, G + 1, Q] bool, the states before each position from which the rest of the canvas, as it came, can end
            in acceptance.
    """

    read: jax.Array
    state: jax.Array
    ends: jax.Array


class Window(NamedTuple):
    """What fits at the positions of every row's window, W of them.

    Attributes:
        constraint: whose window this is.
        begun: [B, Q] bool, the state at the first undecided position.
        later: [B, W, Q] bool, the states after each position from which the rest can end in acceptance.
        fits: [B, C, W / 32] uint32, bits of the positions at which each class fits: all where nothing is undecided.
        tokens: [B, W] int32, as of `_tokens`.
        undecided, inside: [B, W] bool; positions that are not inside are outside the canvas, or read already.
    """

    constraint: Constraint
    begun: jax.Array
    later: jax.Array
    fits: jax.Array
    tokens: jax.Array
    undecided: jax.Array
    inside: jax.Array

    def allowed(self, ids: jax.Array) -> jax.Array:
        """Which of some tokens [n] fit at each position: [B, W, n] bool."""

        def of_row(own: Constraint, fits: jax.Array) -> jax.Array:
            return _flags(fits[own.classes[ids]], self.inside.shape[1]).T

        found: jax.Array = self.constraint._each(of_row, self.fits)
        return found

    def mended(self, token: jax.Array) -> jax.Array:
        """Tokens [B, W] int32, each that does not fit replaced by one that does: it was chosen where the logits leave
        no choice."""

        def of_row(own: Constraint, fits: jax.Array, token: jax.Array) -> jax.Array:
            flags = _flags(fits, token.shape[0])  # [C, W]
            fitting = jnp.take_along_axis(flags, own.classes[token][None], axis=0)[0]
            return jnp.where(fitting, token, own.example[jnp.argmax(flags, axis=0)])

        found: jax.Array = self.constraint._each(of_row, self.fits, token)
        return found

    def joint(self, change: Change) -> Change:
        """The change without what does not fit with what it writes further left."""

        def of_row(own: Constraint, begun: jax.Array, *cells: jax.Array) -> jax.Array:
            def step(carry: Any, cell: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
                states, first = carry
                token, later, undecided, chosen, inside = cell
                taken = own._taken(states, token)
                writes = chosen & (first | (taken & later).any())  # the first fits, if anything does
                after = jnp.where(undecided & ~writes, own._free(states), taken)
                return (jnp.where(inside, after, states), first & ~chosen), writes

            return lax.scan(step, (begun, vary_like(begun, jnp.bool_(True))), cells)[1]

        chosen = self.undecided & ~change.undecided
        tokens = jnp.where(self.undecided, change.tokens, self.tokens)
        cells = tokens, self.later, self.undecided, chosen, self.inside
        writes = self.constraint._each(of_row, self.begun, *cells)
        waits = chosen & ~writes
        return Change(jnp.where(waits, self.tokens, change.tokens), change.undecided | waits)


def _tokens(canvas: Canvas, start: jax.Array, width: int) -> jax.Array:
    """The tokens of a window [B, W] int32; those that the canvas came with, which no forward wrote, as ~id."""
    came = canvas.of_window(~canvas.undecided & (canvas.decoded_at < 0), start, width)
    tokens = slice_rows(canvas.tokens, start, width)
    return jnp.where(came, ~tokens, tokens)


def _words(flags: jax.Array) -> jax.Array:
    """Flags [..., N] bool as bits, [..., N / 32] uint32."""
    missing = [(0, 0)] * (flags.ndim - 1) + [(0, -flags.shape[-1] % WORD)]
    parts = jnp.pad(flags, missing).reshape(*flags.shape[:-1], -1, WORD)
    return jnp.sum(parts.astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _flags(words: jax.Array, count: int) -> jax.Array:
    """`count` flags [..., count] bool of bits [..., N]."""
    parts = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return parts.reshape(*words.shape[:-1], -1)[..., :count].astype(bool)
