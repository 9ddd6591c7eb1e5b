"""Checks of a denoiser of your own: whether it keeps what samplers take for granted.

    from dllm_jax.testing import check_denoiser

    print(check_denoiser(denoiser))  # what was checked; an AssertionError says in one sentence what differs, and where

The reference is the denoiser itself, run over everything at once: the checks say nothing about its weights, and cannot
know that all its logits are one position off. For that, compare it with the model that the weights come from.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.errors import DllmError
from dllm_jax.models.denoiser import DenoiserLike, Span, block_causal
from dllm_jax.models.transformer import Tile

BATCH, LENGTH, WIDTH = 3, 24, 7  # of the random rows, and of the windows
LEAST_LENGTH = WIDTH + 3


def check_denoiser(
    denoiser: DenoiserLike,
    *,
    tokens: jax.Array | None = None,
    lengths: jax.Array | None = None,
    key: jax.Array | None = None,
    tolerance: float = 1e-4,
) -> list[str]:
    """Checks a denoiser on a few rows; run it once, in float32 and with weights that are not all tiny.

    Checked of every denoiser: ids and sizes, finite logits that depend on other positions, spans of outputs, tiles of
    the vocabulary, rows that depend neither on each other nor on tokens after their length, `jit` and `vmap`. Checked
    where it has them: key/value buffers that windows and scattered positions read and rewrite, masks of writes, a
    number of visible positions for each query, and embeddings.

    Args:
        denoiser: a pytree with the members of `DenoiserLike`.
        tokens: [B, S] int32, at least two rows of at least 10; random ones by default.
        lengths: [B] int32, valid positions of each; by default S and fewer. At least 10.
        key: source of what is random; `jax.random.key(0)` by default.
        tolerance: what two ways to compute the same may differ by, as a share of the largest number among them: raise
            it for bfloat16.

    Returns:
        The names of the checks that were made, in order. What a denoiser refuses by a `DllmError` or a
        `NotImplementedError`, or has no method for, is not among them.

    Raises:
        AssertionError: one sentence with what differs, the row, the position, and by how much.
        DllmError: for tokens or lengths that cannot be used, or what the denoiser itself refuses of every denoiser's.
    """
    _check_sizes(denoiser)
    case = _begin(denoiser, tokens, lengths, jax.random.key(0) if key is None else key, tolerance)
    checked = ["ids and sizes"]
    for name, check in _CHECKS.items():
        try:
            check(case)
        except _Missing:
            continue
        checked.append(name)
    return checked


class _Missing(Exception):
    """The denoiser has no such part."""


def require(holds: Any, sentence: str) -> None:
    """Not `assert`, which `python -O` leaves out."""
    if not holds:
        raise AssertionError(sentence)


def _check_sizes(denoiser: DenoiserLike) -> None:
    """Raises AssertionError unless the denoiser is a pytree with sensible numbers."""
    leaf = any(node is denoiser for node in jax.tree.leaves(denoiser))
    require(not leaf, f"a {type(denoiser).__name__} is no pytree; decorate its class with dllm_jax.pytree.pytree")
    vocab_size = denoiser.vocab_size
    for name in ("mask_id", "eos_id"):
        token = getattr(denoiser, name)
        inside = isinstance(token, int) and 0 <= token < vocab_size
        require(inside, f"{name} {token} is no id of a vocabulary of {vocab_size} tokens")
    least = denoiser.min_prompt_length
    require(
        least in (0, 1), f"min_prompt_length is {least}; it must be 1 if nothing predicts the first position, else 0"
    )
    for name in ("batch_parts", "vocab_parts"):
        parts = getattr(denoiser, name)
        require(isinstance(parts, int) and parts >= 1, f"{name} is {parts}; it must be a whole number of at least 1")
    parts = denoiser.vocab_parts
    require(vocab_size % parts == 0, f"vocab_parts {parts} does not divide the vocabulary of {vocab_size} tokens")


# The rows, and the forward over everything that all else is compared with ------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Case:
    """What the checks share.

    Attributes:
        denoiser: what is checked.
        tokens, lengths: [B, S] and [B], host arrays.
        rng: random numbers, used up by the checks.
        tolerance: as in `check_denoiser`.
        logits: [B, S, V] of the forward over everything; entries from `lengths` on mean nothing.
        kv: its keys and values as they are in buffers of the denoiser's own; None where it has none.
    """

    denoiser: DenoiserLike
    tokens: np.ndarray
    lengths: np.ndarray
    rng: np.random.Generator
    tolerance: float
    logits: np.ndarray
    kv: Any

    @property
    def least(self) -> int:
        """The first position that can be predicted."""
        return self.denoiser.min_prompt_length

    @property
    def valid(self) -> np.ndarray:
        """[B, S] bool, positions that mean something."""
        position = np.arange(self.tokens.shape[1])
        return (position >= self.least) & (position < self.lengths[:, None])

    @property
    def starts(self) -> np.ndarray:
        """[B] int32, where windows of `WIDTH` positions begin: the first row's as early as it may, the last at its
        end."""
        last = self.lengths - WIDTH
        starts = self.rng.integers(self.least, last + 1)
        starts[0], starts[-1] = self.least, last[-1]
        return starts.astype(np.int32)

    def buffers(self) -> Any:
        """Those of the forward over everything."""
        if self.kv is None:
            raise _Missing
        return self.kv

    def other_tokens(self, where: np.ndarray) -> np.ndarray:
        """The tokens with others at some positions [B, S] bool."""
        shift = self.rng.integers(1, self.denoiser.vocab_size, self.tokens.shape)
        return np.where(where, (self.tokens + shift) % self.denoiser.vocab_size, self.tokens).astype(np.int32)

    def spoiled(self, kv: Any, where: np.ndarray) -> Any:
        """Buffers with random entries, as large as the others, at some positions [B, S] bool."""

        def spoil(x: np.ndarray) -> np.ndarray:
            noise = self.rng.standard_normal(x.shape).astype(np.float32) * _size(x)
            return np.where(where.reshape(where.shape + (1,) * (x.ndim - 2)), noise.astype(x.dtype), x)

        return jax.tree.map(spoil, kv)


def _begin(denoiser: DenoiserLike, tokens: Any, lengths: Any, key: jax.Array, tolerance: float) -> _Case:
    rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,))))
    if tokens is None:
        tokens = rng.integers(0, denoiser.vocab_size, (BATCH, LENGTH))
        tokens = np.where(rng.random(tokens.shape) < 0.3, denoiser.mask_id, tokens)
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 2 or tokens.shape[0] < 2 or tokens.shape[1] < LEAST_LENGTH:
        raise DllmError(f"tokens have shape {list(tokens.shape)}; give at least two rows of at least {LEAST_LENGTH}")
    if lengths is None:
        lengths = np.linspace(tokens.shape[1], max(tokens.shape[1] // 2, LEAST_LENGTH), len(tokens))
    lengths = np.asarray(lengths, np.int32)
    if lengths.shape != tokens.shape[:1] or lengths.min() < LEAST_LENGTH or lengths.max() > tokens.shape[1]:
        raise DllmError(f"lengths are {lengths.tolist()}; give one of {LEAST_LENGTH} to {tokens.shape[1]} for each row")
    logits, kv = _run(denoiser, tokens, lengths)
    wanted = (*tokens.shape, denoiser.vocab_size)
    require(logits.shape == wanted, f"logits of everything have shape {list(logits.shape)}, not {list(wanted)}")
    return _Case(denoiser, tokens, lengths, rng, tolerance, logits, _stored(denoiser, kv, tokens.shape))


def _stored(denoiser: DenoiserLike, kv: Any, shape: tuple[int, ...]) -> Any:
    """Keys and values of a forward over everything as `empty_cache` would hold them; None where there are no
    buffers."""
    try:
        empty = _optional(denoiser, "empty_cache", lambda: jax.eval_shape(lambda: denoiser.empty_cache(*shape)))
    except _Missing:
        return None
    ours, theirs = _structure(kv), _structure(empty)
    require(ours == theirs, f"a forward gives keys and values {ours}, empty_cache buffers {theirs}; they must be alike")
    for found, wanted in zip(jax.tree.leaves(kv), jax.tree.leaves(empty), strict=True):
        sizes = f"keys and values of shape {list(found.shape)} do not fit buffers of shape {list(wanted.shape)}"
        require(found.shape == wanted.shape and wanted.shape[:2] == shape, f"{sizes}; both begin with {list(shape)}")
    return jax.tree.map(lambda found, wanted: found.astype(wanted.dtype), kv, empty)


def _structure(tree: Any) -> Any:  # jax types it as something that cannot be compared
    return jax.tree.structure(tree)


@functools.partial(jax.jit, static_argnames=("width", "outputs_width"))
def _compiled(
    denoiser: Any,
    inputs: Any,
    visible: Any,
    at: Any,
    kv: Any,
    write: Any,
    outputs: Any,
    *,
    width: int | None,
    outputs_width: int,
) -> tuple[jax.Array, Any]:
    at = at if width is None else Span(at, width)
    outputs = None if outputs is None else Span(outputs, outputs_width)
    hidden, kv = denoiser.forward(inputs, visible, at=at, kv=kv, write=write, outputs=outputs)
    return denoiser.logits(hidden), kv


def _run(
    denoiser: DenoiserLike,
    inputs: Any,
    visible: Any,
    *,
    at: Any = None,
    width: int | None = None,
    kv: Any = None,
    write: Any = None,
    outputs: Any = None,
    outputs_width: int = 0,
) -> tuple[np.ndarray, Any]:
    """A compiled forward's logits, float32, and its keys and values, on the host; spans are `at` or `outputs` with
    their widths."""
    found = _compiled(denoiser, inputs, visible, at, kv, write, outputs, width=width, outputs_width=outputs_width)
    logits, kv = jax.device_get(found)
    return logits.astype(np.float32), kv


def _optional(denoiser: DenoiserLike, method: str, run: Callable[[], Any]) -> Any:
    """What a method of a denoiser answers that it need not have, or may refuse."""
    if not hasattr(denoiser, method):
        raise _Missing
    try:
        return run()
    except (DllmError, NotImplementedError):
        raise _Missing from None


# Comparing -----------------------------------------------------------------------------------------------------------


def _size(x: np.ndarray) -> float:
    return float(np.abs(x.astype(np.float32)).max(initial=0.0))


def _same(
    case: _Case, what: str, found: np.ndarray, wanted: np.ndarray, at: np.ndarray, where: np.ndarray, rows: Any = None
) -> None:
    """Raises AssertionError unless two arrays [B, T, ...] are close.

    Args:
        what: the first half of the sentence.
        at: [B, T], the positions that they are of.
        where: [B, T] bool, entries that count.
        rows: [B], the rows that they are of, for the sentence; all in order by default.
    """
    rows = np.arange(len(found)) if rows is None else rows
    mine, other = (
        np.where(where.reshape(*where.shape, *[1] * (x.ndim - 2)), x.astype(np.float32), 0.0) for x in (found, wanted)
    )
    distance = np.abs(mine - other).reshape(*where.shape, -1).max(axis=-1)
    distance = np.where(np.isnan(distance), np.inf, distance)
    allowed = case.tolerance * max(_size(other), 1e-30)
    row, entry = np.unravel_index(np.argmax(distance), distance.shape)
    place = f"row {rows[row]}, position {at[row, entry]}: the largest difference is {distance[row, entry]:.3g}"
    require(distance[row, entry] <= allowed, f"{what} at {place}, and {allowed:.3g} is allowed")


def _same_logits(case: _Case, what: str, found: np.ndarray, at: np.ndarray, where: np.ndarray | None = None) -> None:
    """As `_same`, of logits [B, T, V] against those of everything at valid positions `at` [B, T]."""
    take = lambda x: np.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1)
    wanted, counts = take(case.logits), take(case.valid) & (True if where is None else where)
    shape = f"{what}: logits have shape {list(found.shape)}, not {list(wanted.shape)}"
    require(found.shape == wanted.shape, shape)
    _same(case, f"{what}: logits are not those of a forward over everything", found, wanted, at, counts)


def _same_buffers(case: _Case, what: str, found: Any, wanted: Any, where: np.ndarray, exactly: bool = False) -> None:
    """Raises AssertionError unless buffers agree at positions [B, S] bool: bit for bit, or up to the tolerance."""
    require(_structure(found) == _structure(wanted), f"{what}: the buffers come back as another pytree")
    at = np.broadcast_to(np.arange(where.shape[1]), where.shape)
    strict = dataclasses.replace(case, tolerance=0.0) if exactly else case
    for number, (mine, other) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)):
        sizes = f"{mine.dtype}{list(mine.shape)}, not {other.dtype}{list(other.shape)}"
        alike = mine.shape == other.shape and mine.dtype == other.dtype
        require(alike, f"{what}: buffer {number} comes back as {sizes}")
        _same(strict, f"{what}: buffer {number} differs", mine, other, at, where)


def _span(starts: np.ndarray, width: int) -> np.ndarray:
    """[B, width], the positions of spans."""
    return starts[:, None] + np.arange(width, dtype=np.int32)


def _among(positions: np.ndarray, length: int, where: np.ndarray | None = None) -> np.ndarray:
    """[B, length] bool, which positions are among [B, T] of each row, where `where` [B, T] says so."""
    hits = positions[..., None] == np.arange(length)
    return (hits if where is None else hits & where[..., None]).any(axis=1)


# The checks ----------------------------------------------------------------------------------------------------------


def _finite(case: _Case) -> None:
    broken = case.valid & ~np.isfinite(case.logits).all(axis=-1)
    row, position = np.unravel_index(np.argmax(broken), broken.shape)
    require(not broken.any(), f"logits are not finite at row {row}, position {position}")


def _context(case: _Case) -> None:
    """Without this, all other checks would mean little."""
    first = np.arange(case.tokens.shape[1]) == case.least
    logits, _ = _run(case.denoiser, case.other_tokens(np.broadcast_to(first, case.tokens.shape)), case.lengths)
    later = (case.valid & (np.arange(case.tokens.shape[1]) > case.least + 1))[..., None]
    change, size = _size((logits - case.logits) * later), _size(case.logits * later)
    sentence = (
        f"logits hardly follow from other positions: another token at position {case.least} changes later ones by"
    )
    least = 10 * case.tolerance * size
    require(change > least, f"{sentence} {change:.3g}, not {least:.3g}; give larger weights, so that mistakes show")


def _outputs(case: _Case) -> None:
    starts = case.starts
    logits, _ = _run(case.denoiser, case.tokens, case.lengths, outputs=starts, outputs_width=WIDTH)
    _same_logits(case, "a span of outputs", logits, _span(starts, WIDTH))


def _tiles(case: _Case) -> None:
    """Tiles at a traced start, and their columns' ids."""
    parts, part = case.denoiser.vocab_parts, case.denoiser.vocab_size // case.denoiser.vocab_parts
    width = max(part // 3, 1)

    @jax.jit
    def tile(denoiser: Any, tokens: Any, lengths: Any, start: Any) -> jax.Array:
        return denoiser.logits(denoiser.forward(tokens, lengths)[0], Tile(start, width))

    at = np.broadcast_to(np.arange(case.tokens.shape[1]), case.tokens.shape)
    for start in (0, part - width, part // 2 - width // 2):
        found = np.asarray(tile(case.denoiser, case.tokens, case.lengths, start))
        ids = (np.arange(parts)[:, None] * part + start + np.arange(width)).reshape(-1)
        what = f"a tile of the vocabulary from entry {start} on"
        shape = (*case.tokens.shape, parts * width)
        require(found.shape == shape, f"{what}: logits have shape {list(found.shape)}, not {list(shape)}")
        _same(case, f"{what}: logits are not the columns of all", found, case.logits[..., ids], at, case.valid)


def _padding(case: _Case) -> None:
    length = case.tokens.shape[1]
    at = np.broadcast_to(np.arange(length), case.tokens.shape)
    logits, kv = _run(case.denoiser, case.other_tokens(at >= case.lengths[:, None]), case.lengths)
    what = "other tokens after a row's length"
    _same_logits(case, what, logits, at)
    if case.kv is not None:
        _same_buffers(case, what, kv, case.kv, at < case.lengths[:, None])


def _independent_rows(case: _Case) -> None:
    """Each row alone without its padding, and all in other slots."""
    order = np.roll(np.arange(len(case.tokens)), 1)
    logits, _ = _run(case.denoiser, case.tokens[order], case.lengths[order])
    at = np.broadcast_to(np.arange(case.tokens.shape[1]), case.tokens.shape)
    what = "rows in another order: logits are not those of the rows in theirs"
    _same(case, what, logits, case.logits[order], at, case.valid[order], order)
    for row in (0, len(case.tokens) - 1):
        one, length = slice(row, row + 1), case.lengths[row]
        logits, _ = _run(case.denoiser, case.tokens[one, :length], case.lengths[one])
        what, places = "a row alone and without padding: logits are not those in the batch", at[one, :length]
        _same(case, what, logits, case.logits[one, :length], places, case.valid[one, :length], [row])


def _vmap(case: _Case) -> None:
    """Rows as an axis of `vmap`, each a batch of one."""
    run = lambda row, length: _compiled(
        case.denoiser, row[None], length[None], None, None, None, None, width=None, outputs_width=0
    )[0][0]
    logits = np.asarray(jax.vmap(run)(case.tokens, case.lengths))
    _same_logits(case, "vmap over rows", logits, np.broadcast_to(np.arange(case.tokens.shape[1]), case.tokens.shape))


def _window(case: _Case) -> None:
    """Stale entries in a window and after a row's length have no effect."""
    kv, length, starts = case.buffers(), case.tokens.shape[1], case.starts
    at, later = _span(starts, WIDTH), np.arange(length) >= case.lengths[:, None]
    stale = case.spoiled(kv, _among(at, length) | later)
    logits, new = _run(case.denoiser, case.tokens, case.lengths, at=starts, width=WIDTH, kv=stale)
    what = "a forward over a window"
    _same_logits(case, what, logits, at)
    _same_buffers(case, f"{what} does not mend its own entries", new, kv, _among(at, length) & ~later)
    _same_buffers(case, f"{what} touches entries outside", new, stale, ~_among(at, length), exactly=True)
    for row in (0, len(starts) - 1):
        one = lambda x, row=row: x[row : row + 1]
        options = {"at": one(starts), "width": WIDTH, "kv": jax.tree.map(one, stale)}
        alone, _ = _run(case.denoiser, one(case.tokens), one(case.lengths), **options)
        rows = "a window of a row alone: logits are not those in the batch"
        _same(case, rows, alone, one(logits), one(at), np.ones((1, WIDTH), bool), [row])


def _window_outputs(case: _Case) -> None:
    kv, starts = case.buffers(), case.starts
    offset, width = (starts * 0 + 2).astype(np.int32), WIDTH - 3
    offset[0] = 0
    stale = case.spoiled(kv, _among(_span(starts, WIDTH), case.tokens.shape[1]))
    options = {"at": starts, "width": WIDTH, "kv": stale, "outputs": starts + offset, "outputs_width": width}
    logits, _ = _run(case.denoiser, case.tokens, case.lengths, **options)
    _same_logits(case, "a span of outputs within a window", logits, _span(starts + offset, width))


def _write(case: _Case) -> None:
    """Entries that are written are mended; others stay bit for bit, and are what the window's queries read."""
    kv, length, starts = case.buffers(), case.tokens.shape[1], case.starts
    at = _span(starts, WIDTH)
    write = case.rng.random(at.shape) < 0.5
    write[:, :2] = [[True, False]]
    run = lambda tokens, kv, write: _run(
        case.denoiser, tokens, case.lengths, at=starts, width=WIDTH, kv=kv, write=write
    )
    stale = case.spoiled(kv, _among(at, length))
    _, new = run(case.tokens, stale, write)
    kept = ~_among(at, length, write)
    _same_buffers(case, "a window that writes some of its entries touches another", new, stale, kept, exactly=True)
    logits, new = run(case.tokens, case.spoiled(kv, _among(at, length, write)), write)
    what = "a window that writes some of its entries"
    _same_logits(case, what, logits, at)
    _same_buffers(case, what, new, kv, _among(at, length) & (np.arange(length) < case.lengths[:, None]))
    first = np.broadcast_to(np.arange(WIDTH) < WIDTH // 2, at.shape)  # the others' keys come from the buffers
    logits, _ = run(case.other_tokens(_among(at, length, ~first)), kv, first)
    _same_logits(case, "a window reads keys or values that it does not write, not the buffers'", logits, at, first)


def _scattered(case: _Case) -> None:
    """Any positions, in any order, some of which are not written."""
    kv, length = case.buffers(), case.tokens.shape[1]
    choose = lambda end: case.least + case.rng.permutation(end - case.least)[:WIDTH]
    at = np.stack([choose(end) for end in case.lengths]).astype(np.int32)
    write = np.broadcast_to(np.arange(WIDTH) != 1, at.shape)
    stale = case.spoiled(kv, _among(at, length, write))
    run = lambda: _run(case.denoiser, case.tokens, case.lengths, at=at, kv=stale, write=write)
    logits, new = _optional(case.denoiser, "forward", run)
    what = "a forward over scattered positions"
    _same_logits(case, what, logits, at)
    inside = np.arange(length) < case.lengths[:, None]
    _same_buffers(case, f"{what} does not mend its own entries", new, kv, _among(at, length, write) & inside)
    _same_buffers(case, f"{what} touches others", new, stale, ~_among(at, length, write), exactly=True)


def _block_causal(case: _Case) -> None:
    """Positions see different numbers of others: a later block has no effect, and a window gives the same."""
    length, starts = case.tokens.shape[1], np.full(len(case.tokens), 3, np.int32)
    blocks = np.asarray(block_causal(length, jnp.asarray(starts), WIDTH))
    visible = np.minimum(blocks, case.lengths[:, None])
    logits, kv = _optional(case.denoiser, "forward", lambda: _run(case.denoiser, case.tokens, visible))
    at = np.broadcast_to(np.arange(length), case.tokens.shape)
    whole = dataclasses.replace(case, logits=logits, kv=kv)
    later = at >= 3 + WIDTH
    found, changed = _run(case.denoiser, case.other_tokens(later), visible)
    what = "other tokens in a later block"
    _same_logits(whole, what, found, at, ~later)
    if case.kv is None:
        return
    _same_buffers(whole, what, changed, kv, ~later & case.valid)
    first = np.where(case.lengths >= 3 + 2 * WIDTH, 3 + WIDTH, 3).astype(np.int32)
    stale = case.spoiled(kv, at >= first[:, None])  # the buffers' entries of later blocks are not read either
    found, new = _run(case.denoiser, case.tokens, visible, at=first, width=WIDTH, kv=stale)
    what = "a window under a number of visible positions for each query"
    _same_logits(whole, what, found, _span(first, WIDTH))
    _same_buffers(whole, what, new, kv, _among(_span(first, WIDTH), length) & case.valid)


def _embeddings(case: _Case) -> None:
    embed = jax.jit(lambda denoiser, tokens: denoiser.embed(tokens))
    x = np.asarray(_optional(case.denoiser, "embed", lambda: embed(case.denoiser, case.tokens)))
    shape = case.tokens.shape
    require(x.ndim == 3 and x.shape[:2] == shape, f"embeddings of {list(shape)} tokens have shape {list(x.shape)}")
    at = np.broadcast_to(np.arange(shape[1]), shape)
    logits, _ = _run(case.denoiser, x, case.lengths)
    _same_logits(case, "embeddings instead of tokens", logits, at)


def _expected_embeddings(case: _Case) -> None:
    """Of a distribution that is sure."""

    @jax.jit
    def both(denoiser: Any, tokens: Any) -> tuple[jax.Array, jax.Array]:
        sure = 1e4 * jax.nn.one_hot(tokens, denoiser.vocab_size)
        return denoiser.expected_embedding(sure), denoiser.embed(tokens)

    run = lambda: both(case.denoiser, case.tokens)
    found, wanted = (np.asarray(x) for x in _optional(case.denoiser, "expected_embedding", run))
    require(
        found.shape == wanted.shape, f"an expected embedding has shape {list(found.shape)}, not {list(wanted.shape)}"
    )
    at = np.broadcast_to(np.arange(case.tokens.shape[1]), case.tokens.shape)
    what = "the expected embedding of a sure distribution is not its token's"
    _same(case, what, found, wanted, at, np.ones(at.shape, bool))


_CHECKS: dict[str, Callable[[_Case], None]] = {
    "finite logits": _finite,
    "context": _context,
    "spans of outputs": _outputs,
    "tiles of the vocabulary": _tiles,
    "padding": _padding,
    "rows are independent": _independent_rows,
    "vmap": _vmap,
    "windows": _window,
    "spans of outputs within windows": _window_outputs,
    "write masks": _write,
    "scattered positions": _scattered,
    "block-causal attention": _block_causal,
    "embeddings": _embeddings,
    "expected embeddings": _expected_embeddings,
}
