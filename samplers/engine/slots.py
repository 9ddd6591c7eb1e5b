"""The slots of an engine on the device: their rows, the state of the loop, and the program that runs them."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dllm_jax import Model
from dllm_jax.parallel.sharding import batch_sharding, check_splits
from samplers.command_buffers import asked_for_command_buffers
from samplers.config.factory import CanvasSampler
from samplers.engine.program import (
    Progress,
    SlotRows,
    begin_jit,
    number_dtypes_of,
    number_names,
    numbers_of,
    run_steps_buffered,
    run_steps_jit,
    run_steps_on,
)
from samplers.engine.requests import Request
from samplers.inputs import check_kept, open_id


def with_draws(sampler: Any, vocab_size: int) -> Any:
    """The sampler with a number for temperature, top_p and top_k, which leaves the draw as it is."""
    idle = {"temperature": 0.0, "top_p": 1.0, "top_k": vocab_size}
    found = sampler.sampling
    missing = {name: idle[name] for name in getattr(sampler, "draws", idle) if getattr(found, name) is None}
    return dataclasses.replace(sampler, sampling=dataclasses.replace(found, **missing))


class Slots:
    """B rows that one compiled program runs; two programs with `draws`, the second for when no request draws.

    Attributes:
        sampler: what runs; with `draws`, with numbers for temperature, top_p and top_k.
        numbers: its numbers, of requests that bring none.
    """

    def __init__(self, model: Model, sampler: CanvasSampler, count: int, prompt_length: int, draws: bool) -> None:
        """
        Raises:
            DllmError: for numbers that no array holds as they are, and slots that the devices of a mesh cannot share.
        """
        self._model, self._count, self._draws, self._without_draws = model, count, draws, sampler
        self.sampler: Any = with_draws(sampler, model.config.vocab_size) if draws else sampler
        self.numbers, self._dtypes = numbers_of(self.sampler), number_dtypes_of(self.sampler)
        self.check_numbers(self.numbers)
        names = set(number_names(sampler))
        self._is_own = [name in names for name in number_names(self.sampler)]  # and not one of `with_draws`
        layout = getattr(model.denoiser, "layout", None)
        if layout is not None:
            check_splits(layout.mesh, count, "slots (batch_size)")
        self._sharding = None if layout is None else batch_sharding(layout.mesh)
        self._rows = self._empty_rows(prompt_length)
        self._state: Any = None
        self._buffered = asked_for_command_buffers()  # here: another thread may make the calls
        self._program: Any = run_steps_buffered if self._buffered else run_steps_jit

    def check_numbers(self, numbers: Sequence[Any]) -> None:
        """Raises DllmError for numbers that the rows cannot hold as they are."""
        for name, number, dtype in zip(number_names(self.sampler), numbers, self._dtypes, strict=True):
            check_kept(name.rpartition(".")[2], number, dtype)

    @property
    def compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._state is not None

    def compile(self) -> None:
        """Makes the state and compiles the program, by a run that does nothing."""
        self._state = begin_jit(self.sampler, self._model.denoiser, self._place(self._rows))
        if self._sharding is not None:
            on_all = lambda x: jax.device_put(x, self._sharding) if x.sharding.is_fully_replicated else x
            leaves, tree = jax.tree.flatten(jax.tree.map(on_all, self._state))
            self._state = jax.tree.unflatten(tree, leaves)
            self._program = run_steps_on(tuple(leaf.sharding for leaf in leaves), tree, self._buffered)
        none = np.zeros(self._count, bool)
        for draws in (True, False) if self._draws else (False,):
            self._call(none, none, 0, 1, draws)

    def write(self, slot: int, request: Request) -> None:
        """Writes a request into its row, for the `run` that admits it."""
        rows, ids = self._rows, request.prompt
        rows.prompt[slot, : len(ids)] = ids
        rows.prompt_lengths[slot], rows.gen_lengths[slot] = len(ids), request.gen_length
        rows.key_data[slot] = request.key_data
        rows.given[slot] = open_id(self._model.denoiser) if request.given is None else request.given
        for array, number in zip(rows.numbers, request.numbers or self.numbers, strict=True):
            array[slot] = number

    def run(self, admitted: np.ndarray, free: np.ndarray, most_steps: int, wanted: int) -> Progress:
        """`run_steps` over the rows as they were written; the progress lies on the host.

        Args:
            admitted: [B] bool, slots whose row begins.
            free: [B] bool, slots without a request, those of the admitted among them.
        """
        draws = self._draws and self._draws_now(admitted | ~free)
        return self._call(admitted, free, most_steps, wanted, draws)

    def _draws_now(self, busy: np.ndarray) -> bool:
        """Whether a request uses the numbers of `with_draws`; else the program without them gives the same, sooner."""
        pairs = zip(self._rows.numbers, self.numbers, strict=True)
        added = itertools.compress(pairs, [not own for own in self._is_own])
        return any((array[busy] != idle).any() for array, idle in added)

    def _call(self, admitted: np.ndarray, free: np.ndarray, most_steps: int, wanted: int, draws: bool) -> Progress:
        sampler, rows = self.sampler, self._rows
        if not draws:
            sampler = self._without_draws
            rows = dataclasses.replace(rows, numbers=tuple(itertools.compress(rows.numbers, self._is_own)))
        rows, *masks = self._place((rows, admitted, free))
        bounds = np.int32(most_steps), np.int32(wanted)
        self._state, progress = self._program(sampler, self._model.denoiser, self._state, rows, *masks, *bounds)
        found: Progress = jax.device_get(progress)
        return found

    def _place(self, arrays: Any) -> Any:
        return arrays if self._sharding is None else jax.device_put(arrays, self._sharding)

    def _empty_rows(self, prompt_length: int) -> SlotRows:
        batch, length, denoiser = self._count, self.sampler.gen_length, self._model.denoiser
        numbers = (np.full(batch, *pair) for pair in zip(self.numbers, self._dtypes, strict=True))
        return SlotRows(
            prompt=np.zeros((batch, prompt_length), np.int32),
            prompt_lengths=np.full(batch, denoiser.min_prompt_length, np.int32),
            gen_lengths=np.full(batch, length, np.int32),
            given=np.full((batch, length), open_id(denoiser), np.int32),
            key_data=np.zeros((batch, 2), np.uint32),
            numbers=tuple(numbers),
        )
