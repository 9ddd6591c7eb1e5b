"""The slots of an engine on the device: their rows, the state of the loop, and the program that runs them.

With `buckets` there is a program for 1, 2, 4 ... rows, and for prompts of 64, 128 ... tokens, and the smallest that has
room for the requests runs. A change of size copies the rows of the running requests once; steps copy nothing. Programs
are compiled by another thread when they are wanted, and the next larger one runs until then.
"""

import concurrent.futures
import dataclasses
import itertools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dllm_jax import Model
from dllm_jax.errors import DllmError, first_line
from dllm_jax.parallel.sharding import batch_sharding, check_splits
from samplers.command_buffers import asked_for_command_buffers
from samplers.config.factory import CanvasSampler
from samplers.config.registry import title
from samplers.constraints.constraint import Constraint, any_form
from samplers.engine.program import (
    Progress,
    SlotRows,
    begin_jit,
    move_rows,
    number_dtypes_of,
    number_names,
    numbers_of,
    put_prompt,
    run_steps_buffered,
    run_steps_jit,
    run_steps_on,
)
from samplers.engine.requests import EngineLimit, Request
from samplers.inputs import check_kept, open_id
from samplers.loops.block import BlockSampler


def with_draws(sampler: Any, vocab_size: int) -> Any:
    """The sampler with a number for temperature, top_p and top_k, which leaves the draw as it is."""
    idle = {"temperature": 0.0, "top_p": 1.0, "top_k": vocab_size}
    found = sampler.sampling
    missing = {name: idle[name] for name in getattr(sampler, "draws", idle) if getattr(found, name) is None}
    return dataclasses.replace(sampler, sampling=dataclasses.replace(found, **missing))


PATIENCE = 8
"""Calls in a row that a smaller size must have room for before running rows are copied into it."""

MOST_BIASES = 300
"""Tokens whose logits a request may change, as in OpenAI's API."""

LEAST_PROMPT = 64
"""Tokens of the shortest prompts that have programs of their own."""


class Size(NamedTuple):
    """The size of a program: B rows, with room for prompts of P tokens."""

    rows: int
    prompt_length: int

    def fits(self, other: "Size") -> bool:
        """Whether it has room for what another has room for."""
        return self.rows >= other.rows and self.prompt_length >= other.prompt_length


def sizes_up_to(largest: Size, parts: int) -> list[Size]:
    """The sizes of programs: halves of halves of the largest, that is rows by powers of two, which as many devices
    share, and prompts down to `LEAST_PROMPT`."""
    rows = {min(parts << power, largest.rows) for power in range(largest.rows.bit_length() + 1)}
    lengths = {largest.prompt_length}
    while min(lengths) >= 2 * LEAST_PROMPT:
        lengths.add(-(-min(lengths) // 2))
    return [Size(*pair) for pair in itertools.product(sorted(rows), sorted(lengths))]


def room_for_forms(sampler: Any, vocab_size: int, states: int) -> Constraint | None:
    """What a slot whose request brings no constraint has in the place of one; None where no request does.

    Args:
        states: of the largest automaton that a request may bring, 0 for none; it may have as many classes of tokens.

    Raises:
        DllmError: for a sampler that keeps no constraints, or has one.
    """
    if not states:
        return None
    if not hasattr(sampler, "constraint") or sampler.constraint is not None:
        why = "has a form of its own" if hasattr(sampler, "constraint") else "keeps no form"
        raise EngineLimit(f"a {type(sampler).__name__} {why}, so requests bring none", "leave out constraint_states")
    found = any_form(vocab_size, -(-states // 32) * 32, states)
    dataclasses.replace(sampler, constraint=found)  # which its parts may refuse
    return found


class Kind(NamedTuple):
    """Which program of a size runs: what its rows may do. Whoever has a form or wants the most probable tokens may also
    draw, so there are no programs for these alone."""

    draws: bool
    forms: bool
    top: bool


class Slots:
    """Rows that a compiled program of each size and kind runs, that of the kind that the running requests need.

    Attributes:
        sampler: what runs; with `draws`, with numbers for temperature, top_p and top_k.
        numbers: its numbers, of requests that bring none.
        size: of the program that runs.
        any_form: as of `room_for_forms`.
        top: most probable tokens that requests may ask for.
    """

    def __init__(
        self,
        model: Model,
        sampler: CanvasSampler,
        count: int,
        prompt_length: int,
        draws: bool,
        buckets: bool,
        constraint_states: int = 0,
        top: int = 0,
    ) -> None:
        """
        Raises:
            DllmError: for numbers that no array holds as they are, and slots that the devices of a mesh cannot share.
        """
        self._model, self._draws, self._without_draws = model, draws, sampler
        self.sampler: Any = with_draws(sampler, model.config.vocab_size) if draws else sampler
        self.numbers, self._dtypes = numbers_of(self.sampler), number_dtypes_of(self.sampler)
        self.check_numbers(self.numbers)
        names = set(number_names(sampler))
        self._is_own = [name in names for name in number_names(self.sampler)]  # and not one of `with_draws`
        self.any_form = room_for_forms(sampler, model.config.vocab_size, constraint_states)
        self._has_form = np.zeros(count, bool)  # of each slot, whether its request brought one
        if top and (not isinstance(sampler, BlockSampler) or sampler.looks_ahead):
            raise DllmError(f"{title(sampler)} keeps no alternatives to tokens; leave out top_logprobs")
        self.top, self._wants_top = top, np.zeros(count, bool)
        every = itertools.product((draws,), {self.any_form is not None, False}, {top > 0, False})
        self._kinds = sorted({*itertools.starmap(Kind, every), Kind(False, False, False)}, reverse=True)
        self._forms: Constraint | None = None  # those of the rows, on the device; None when others were written
        layout = getattr(model.denoiser, "layout", None)
        if layout is not None:
            check_splits(layout.mesh, count, "slots (batch_size)")
        self._sharding = None if layout is None else batch_sharding(layout.mesh)
        self._apart = layout is not None and jax.process_count() > 1
        self.size = self._largest = Size(count, prompt_length)
        self._rows = self._empty_rows()
        self._state: Any = None
        self._sizes = sizes_up_to(self.size, model.denoiser.batch_parts) if buckets else [self.size]
        self._shapes: dict[Size, list[tuple[int, ...]]] = {}  # of the state's leaves, for each program that is compiled
        self._compiling: dict[Size, concurrent.futures.Future[None]] = {}
        self._too_large = 0  # calls in a row for which a smaller size had room
        self._compiler = concurrent.futures.ThreadPoolExecutor(1, "compiling")
        self._buffered = asked_for_command_buffers()  # here: another thread may make the calls
        self._program: Any = run_steps_buffered if self._buffered else run_steps_jit

    def check_numbers(self, numbers: Sequence[Any]) -> None:
        """Raises DllmError for numbers that the rows cannot hold as they are."""
        for name, number, dtype in zip(number_names(self.sampler), numbers, self._dtypes, strict=True):
            check_kept(name.rpartition(".")[2], number, dtype)

    @property
    def takes_bias(self) -> bool:
        """Whether requests may change logits."""
        return self._draws and hasattr(self._model.denoiser, "with_bias")

    @property
    def compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._state is not None

    @property
    def compiling(self) -> bool:
        """Whether a program is being compiled by the other thread."""
        return not all(future.done() for future in self._compiling.values())

    def compile(self) -> None:
        """Makes the state and compiles the largest program; the program for the fewest rows follows in the other
        thread."""
        self._state = self._compile(self._largest)
        self._want(Size(self._sizes[0].rows, self._largest.prompt_length))

    def fit(self, slots: Sequence[int], needed: Size) -> bool:
        """Changes to the cheapest compiled size with room for `needed`, and asks for the best one. It changes from one
        with room to spare when nothing runs, or after a while, so that requests which come and go copy nothing.

        Args:
            slots: those of the running requests, which become the slots 0, 1, ... if the size changes.

        Returns:
            Whether it changed.
        """
        cost = lambda size: size.rows * (size.prompt_length + self.sampler.gen_length)
        fitting = sorted((size for size in self._sizes if size.fits(needed)), key=cost)
        self._want(fitting[0])
        best = next(size for size in fitting if size in self._shapes)
        waits = best != self.size and self.size.fits(needed) and len(slots) > 0
        self._too_large = self._too_large + 1 if waits else 0
        if best == self.size or 0 < self._too_large < PATIENCE:
            return False
        self._too_large = 0
        others = [slot for slot in range(self._largest.rows) if slot not in slots]
        moved = jax.tree.map(lambda x: x[[*slots, *others]], (self._rows, self._has_form, self._wants_top))
        self._rows, self._has_form, self._wants_top = moved
        self._forms = None
        index = np.resize(np.asarray([*slots, 0], np.int32), best.rows)  # whatever is in the others, they are free
        leaves, tree = jax.tree.flatten(self._state)
        for number, shape in enumerate(self._shapes[best]):
            old = leaves[number]
            leaves[number] = jax.device_put(move_rows(old, index, self.size.rows, shape), old.sharding)
            old.delete()  # so that two states never exist at once
        self._state, self.size = jax.tree.unflatten(tree, leaves), best
        return True

    def _want(self, size: Size) -> None:
        """Has a program compiled by the other thread, once."""
        if size not in self._shapes and size not in self._compiling:
            self._compiling[size] = self._compiler.submit(self._compile_ahead, size)

    def _compile_ahead(self, size: Size) -> None:
        try:
            self._compile(size)
        except Exception as error:  # the larger one stays in use
            about = f"the program for {size.rows} rows and prompts of {size.prompt_length} tokens was not compiled"
            warnings.warn(f"{about}, so a larger one runs in its place ({first_line(error)})", stacklevel=1)

    def _compile(self, size: Size) -> Any:
        """Compiles the programs of a size by a run that does nothing; the state after it."""
        rows = self._rows_of(self._empty_rows(), size)
        state = begin_jit(self.sampler, self._model.denoiser, self._place(rows), self.top)
        rows = dataclasses.replace(rows, constraint=jax.device_put(rows.constraint, self._sharding))
        if self._sharding is not None:
            on_all = lambda x: jax.device_put(x, self._sharding) if x.sharding.is_fully_replicated else x
            leaves, tree = jax.tree.flatten(jax.tree.map(on_all, state))
            state = jax.tree.unflatten(tree, leaves)
            shardings = tuple(leaf.sharding for leaf in leaves)
            self._program = run_steps_on(shardings, tree, self._buffered, self._apart)
        none = np.zeros(size.rows, bool)
        for kind in self._kinds:
            state, _ = self._call(state, rows, none, none, 0, 1, kind)
        self._shapes[size] = [leaf.shape for leaf in jax.tree.leaves(state)]
        return state

    def write(self, slot: int, request: Request) -> None:
        """Writes a request into its row, for the `run` that admits it."""
        rows, ids = self._rows, request.prompt
        rows.prompt[slot, : len(ids)] = ids
        rows.prompt_lengths[slot], rows.gen_lengths[slot] = len(ids), request.gen_length
        rows.key_data[slot] = request.key_data
        rows.given[slot] = open_id(self._model.denoiser) if request.given is None else request.given
        self._wants_top[slot] = request.top_logprobs > 0
        for array, number in zip(rows.numbers, request.numbers or self.numbers, strict=True):
            array[slot] = number
        if rows.bias is not None:
            (ids, added), bias = rows.bias, request.logit_bias or {}
            ids[slot], added[slot] = self._model.config.vocab_size, 0.0
            ids[slot, : len(bias)], added[slot, : len(bias)] = [*bias], [*bias.values()]
        if self.any_form is not None and (request.constraint is not None or self._has_form[slot]):
            own = self.any_form if request.constraint is None else request.constraint
            jax.tree.map(lambda rows, one: rows.__setitem__(slot, one[0]), rows.constraint, own)
            self._has_form[slot], self._forms = request.constraint is not None, None

    def put_prompt(self, slot: int, kv: Any, whole: int) -> None:
        """Gives the row that was admitted to a slot the keys and values of its first `whole` positions."""
        self._state = put_prompt(self._state, np.int32(slot), kv, np.int32(whole))

    def run(self, admitted: np.ndarray, free: np.ndarray, most_steps: int, wanted: int) -> Progress:
        """`run_steps` over the rows as they were written; the progress lies on the host.

        Args:
            admitted: [B] bool, slots whose row begins.
            free: [B] bool, slots without a request, those of the admitted among them.
        """
        busy = np.flatnonzero(admitted | ~free)
        forms, top = bool(self._has_form[busy].any()), bool(self._wants_top[busy].any())
        draws = self._draws and (forms or top or self._draws_now(busy))
        rows = self._rows_of(self._rows, self.size)
        if forms:  # several MB, which are not sent anew in each call
            if self._forms is None:
                self._forms = jax.device_put(rows.constraint, self._sharding)
            rows = dataclasses.replace(rows, constraint=self._forms)
        kind = Kind(draws, forms, top)
        self._state, progress = self._call(self._state, rows, admitted, free, most_steps, wanted, kind)
        return progress

    def _draws_now(self, busy: np.ndarray) -> bool:
        """Whether a request in slots `busy` uses the numbers of `with_draws`, or a bias; else the program without them
        gives the same, sooner."""
        pairs = zip(self._rows.numbers, self.numbers, strict=True)
        added = itertools.compress(pairs, [not own for own in self._is_own])
        biased = self._rows.bias is not None and self._rows.bias[1][busy].any()
        return bool(biased) or any((array[busy] != idle).any() for array, idle in added)

    def _call(
        self,
        state: Any,
        rows: SlotRows,
        admitted: np.ndarray,
        free: np.ndarray,
        most_steps: int,
        wanted: int,
        kind: Kind,
    ) -> tuple[Any, Progress]:
        sampler = self.sampler
        rows = dataclasses.replace(rows, constraint=rows.constraint if kind.forms else None, top=kind.top)
        if not kind.draws:
            sampler = self._without_draws
            own = tuple(itertools.compress(rows.numbers, self._is_own))
            rows = dataclasses.replace(rows, numbers=own, bias=None)
        rows, *masks = self._place((rows, admitted, free))
        bounds = np.int32(most_steps), np.int32(wanted)
        state, progress = self._program(sampler, self._model.denoiser, state, rows, *masks, *bounds)
        found: Progress = jax.device_get(progress)
        return state, found

    def _rows_of(self, rows: SlotRows, size: Size) -> SlotRows:
        """Those of the first slots, with so much of their prompts."""
        first = jax.tree.map(lambda x: x[: size.rows], rows)
        return dataclasses.replace(first, prompt=np.ascontiguousarray(first.prompt[:, : size.prompt_length]))

    def _place(self, arrays: Any) -> Any:
        sharding = self._sharding
        if sharding is None or not self._apart:
            return arrays if sharding is None else jax.device_put(arrays, sharding)
        # Not `device_put`, in which the processes would compare all arrays first.
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), arrays)

    def _empty_rows(self) -> SlotRows:
        (batch, prompt_length), length, denoiser = self._largest, self.sampler.gen_length, self._model.denoiser
        numbers = (np.full(batch, *pair) for pair in zip(self.numbers, self._dtypes, strict=True))
        added = np.zeros((batch, MOST_BIASES), np.float32)
        return SlotRows(
            prompt=np.zeros((batch, prompt_length), np.int32),
            prompt_lengths=np.full(batch, denoiser.min_prompt_length, np.int32),
            gen_lengths=np.full(batch, length, np.int32),
            given=np.full((batch, length), open_id(denoiser), np.int32),
            key_data=np.zeros((batch, 2), np.uint32),
            numbers=tuple(numbers),
            constraint=jax.tree.map(lambda x: np.repeat(x, batch, axis=0), self.any_form),
            bias=(np.full(added.shape, denoiser.vocab_size, np.int32), added) if self.takes_bias else None,
        )
