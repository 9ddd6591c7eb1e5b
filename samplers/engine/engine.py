"""Many prompts through a fixed number of slots: the next begins as soon as a row has ended.

    engine = Engine(model, "threshold:threshold=0.9", slots=16, prompt_length=512)
    requests = [engine.submit(prompt, seed=i) for i, prompt in enumerate(prompts)]
    for request in engine.results():                     # as they end
        print(request.number, request.generation.text)

A request's tokens and forwards are those of the same request alone, whatever else is in the slots and whenever it was
admitted.
"""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dllm_jax import DllmError, Model
from dllm_jax.parallel.sharding import batch_sharding, check_splits
from dllm_jax.text.tokenizer import token_bytes
from samplers.checks import check_length, check_whole, refuse_unknown
from samplers.config.factory import CanvasSampler, build, check_token, sampler_of, settings_for
from samplers.config.registry import SamplerConfig, called, options_of, title
from samplers.engine.program import (
    Report,
    Rows,
    begin_jit,
    number_dtypes_of,
    number_names,
    numbers_of,
    structure_of,
    turn_jit,
    turn_on,
    with_numbers,
)
from samplers.generation import Generation, Trace, answer
from samplers.inputs import check_given, check_kept
from samplers.rules import Rule
from samplers.sampler import Result
from samplers.stopping import NEVER, Matcher, stop_bytes
from samplers.text.prompts import Prompt, check_width, encode_prompt
from samplers.tokens.noise import row_keys

_FIXED = {"ignore_eos", "verifier", "indicator"}  # which are not told apart by the structure
_FOREVER = np.iinfo(np.int32).max

MOST_STOPS = 8
"""Stop patterns that a request may bring."""


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt on its way.

    Attributes:
        prompt: its token ids.
        gen_length: positions to generate.
        key_data: [2] uint32, of its typed key.
        given: [G] int32, tokens the canvas comes with, as in `BlockSampler.init`; None for none.
        numbers: the sampler's for this request, in the order of `slots.numbers_of`; None for the engine's own.
        stop: strings and token ids that end it, besides those of the engine's sampler.
        texts: strings that the engine's sampler ends it at, where its text is cut as well.
        number: what it is called; by the order of submission, from 0, if nothing is said.
        slot: where it runs; None before and after.
        result: on the host, with a batch of one; None until it has ended.
        seconds: from its admission to its end, beside what else was in the slots.
        cancelled: whether it was taken back.
        steps: its result after each step so far, where these are kept (`keep_step`).
    """

    prompt: list[int]
    gen_length: int
    key_data: np.ndarray
    given: np.ndarray | None = None
    numbers: tuple[Any, ...] | None = None
    stop: Sequence[str | int] = ()
    texts: Sequence[str | int] = ()
    number: int = -1
    slot: int | None = None
    result: Result | None = None
    seconds: float = 0.0
    cancelled: bool = False
    steps: list[Result] = dataclasses.field(default_factory=list, repr=False)
    _model: Model | None = dataclasses.field(default=None, repr=False)
    _sampler: Any = dataclasses.field(default=None, repr=False)

    def run_by(self, model: Model, sampler: CanvasSampler) -> None:
        """Notes who runs it, of which its answer tells."""
        self._model, self._sampler = model, sampler

    @functools.cached_property
    def generation(self) -> Generation:
        """The answer.

        Raises:
            DllmError: before it has ended.
        """
        if self.result is None or self._model is None:
            raise DllmError(f"request {self.number} has not ended; run engine.results(), or engine.step() until it has")
        return answer(self._model, self.prompt, self.result, 0, [*self.stop, *self.texts], self.trace)

    @property
    def trace(self) -> Trace:
        """The history so far; of a request that an engine runs or ran."""
        assert self._model is not None
        sampler = self._sampler if self.numbers is None else with_numbers(self._sampler, self.numbers)
        length = self.gen_length
        # Only models with a mask token take given tokens.
        given = None if self.given is None else np.asarray(self.given[:length]) != self._model.denoiser.mask_id
        return Trace(
            tokenizer=self._model.tokenizer,
            config=self._model.config,
            sampler=title(sampler),
            block_length=sampler.width,
            prompt=self.prompt,
            given=np.zeros(length, bool) if given is None else given,
            steps=self.steps or ([] if self.result is None else [self.result]),
        )

    def keep_step(self, result: Result) -> None:
        """Adds the result after a step to `steps`; after a step without a forward it replaces the one before."""
        if self.steps and self.steps[-1].nfe[0] == result.nfe[0]:
            self.steps.pop()
        self.steps.append(result)


@dataclasses.dataclass(frozen=True)
class Update:
    """What a step did to a request.

    Attributes:
        nfe: its forwards so far.
        tokens: [G] int32, its canvas; where nothing is written, the end of the sequence.
        written: positions that the step wrote.
        masked: [G] bool, positions where nothing is written yet.
        open: [G] bool, positions that may still change; those of them that are written are provisional.
        final: length of the unbroken beginning that will not change.
        done: whether it has ended.
        result: on the host, with a batch of one, so far.
    """

    request: Request
    nfe: int
    tokens: np.ndarray
    written: list[int]
    masked: np.ndarray
    open: np.ndarray
    final: int
    done: bool
    result: Result


class Engine:
    """A model and a sampler that answer any number of requests, a fixed number at a time.

    One program is compiled for the admission of requests and steps, two with `draws`; nothing is compiled again
    whatever the requests are. Not for use by several threads at once.

    Attributes:
        model, sampler: what runs.
        slots: B, requests that are worked on together.
        prompt_length: P, the longest prompt there is room for.
        seconds: wall time of all turns but the first, empty one, which is `compile_seconds`.
        steps: steps so far; in each every slot at work had one forward.
        row_steps: the sum over the steps of the slots at work.
    """

    def __init__(
        self,
        model: Model,
        sampler: str | Rule | CanvasSampler | None = None,
        *,
        slots: int = 8,
        prompt_length: int | None = None,
        draws: bool = False,
        **options: Any,
    ) -> None:
        """
        Args:
            sampler, options: as in `samplers.generate`.
            slots: B, requests that are worked on together.
            prompt_length: P, the longest prompt that there is room for; by default 512, or less where the model's
                context ends.
            draws: leave room for temperature, top_p and top_k of single requests. A second program, which is compiled
                as well, runs while nobody uses them.

        Raises:
            DllmError: for bad numbers and options; before anything is compiled.
        """
        if not hasattr(model, "denoiser"):
            raise DllmError(f"model is of type {type(model).__name__}; load one by dllm_jax.load")
        check_length("slots", slots)
        check_whole("prompt_length", prompt_length, 0)
        self.model, self.slots = model, slots
        self._settings: SamplerConfig | None = None
        if sampler is None or isinstance(sampler, str | Rule):
            self._settings = settings_for(model, sampler, options)
        sampler = sampler_of(model, sampler, options)
        self._draws = draws
        self._plain: Any = sampler
        self.sampler: Any = self._roomy(sampler)
        plain_names = set(number_names(sampler))
        self._of_plain = [name in plain_names for name in number_names(self.sampler)]
        self._structure, self._numbers = structure_of(self.sampler), numbers_of(self.sampler)
        self._dtypes = number_dtypes_of(self.sampler)
        self._check_numbers(self._numbers)
        room = model.config.max_length - self.sampler.gen_length
        self.prompt_length = max(min(512, room), 1) if prompt_length is None else prompt_length
        check_width(model, self.sampler, self.prompt_length)
        layout = getattr(model.denoiser, "layout", None)
        if layout is not None:
            check_splits(layout.mesh, slots, "slots (batch_size)")
        self._sharding = None if layout is None else batch_sharding(layout.mesh)
        self._waiting: collections.deque[Request] = collections.deque()
        self._rows = self._empty_rows()
        self._at: list[Request | None] = [None] * slots
        self._matchers: dict[Request, Matcher] = {}  # of requests in slots that bring stop patterns
        self._seen = np.zeros(slots, np.int32)  # forwards that updates have told of
        self._ended: list[Request] = []
        self._state: Any = None
        self._program: Any = turn_jit
        self._count = 0
        self.seconds, self.compile_seconds, self.steps, self.row_steps = 0.0, 0.0, 0, 0

    # What callers do -------------------------------------------------------------------------------------------------

    def submit(self, prompt: Prompt, **options: Any) -> Request:
        """Puts a request at the end of the queue; arguments and errors are those of `request`."""
        return self.enqueue(self.request(prompt, **options))

    def request(
        self,
        prompt: Prompt,
        *,
        chat: bool = False,
        system: str | None = None,
        seed: int = 0,
        key: jax.Array | None = None,
        gen_length: int | None = None,
        given: Any = None,
        stop: Sequence[str | int] = (),
        **numbers: Any,
    ) -> Request:
        """A request for `enqueue`, which may be made in any thread, whatever the engine does meanwhile.

        Its answer is that of ``generate(model, [prompt], seed=seed, ...)`` with the same sampler.

        Args:
            prompt, chat, system: as in `samplers.generate`.
            seed: of its random numbers; or `key`, a typed key of its own.
            gen_length: positions to generate, at most the sampler's, which is the default.
            given: [G] int32, tokens the canvas comes with, the mask id where one is to be generated.
            stop: strings or token ids that end it, at most `MOST_STOPS`, besides the sampler's. They are looked for
                after each step, so while such a request runs the engine runs one step at a time.
            numbers: options of the sampler that are numbers (threshold=0.8, gamma=0.1, temperature=0.7), for this
                request alone.

        Raises:
            DllmError: for bad values, a prompt that is too long, and options that would make another program.
        """
        check_whole("seed", seed, 0, 2**32 - 1)
        check_length("gen_length", gen_length, optional=True)
        most = self.sampler.gen_length
        if gen_length is not None and gen_length > most:
            raise DllmError(f"gen_length {gen_length} exceeds the engine's {most}; ask for less, or build another")
        if isinstance(stop, str) or not isinstance(stop, Sequence):
            raise DllmError(f"stop is {stop!r}; give a list of strings or token ids")
        own = row_keys(jax.random.key(seed), 1)[0] if key is None else key
        made = Request(
            prompt=encode_prompt(self.model, prompt, chat=chat, system=system),
            gen_length=gen_length or most,
            key_data=np.asarray(jax.random.key_data(own)),
            given=None if given is None else np.asarray(given),
            numbers=self._numbers_with(numbers) if numbers else None,
            stop=tuple(stop),
            texts=tuple(self._settings.options.get("stop") or ()) if self._settings else (),
        )
        self._check(made)
        return made

    def enqueue(self, request: Request) -> Request:
        """Puts a request that you made at the end of the queue.

        Raises:
            DllmError: for a prompt that is too long, a canvas of another length, and bad stop patterns.
        """
        self._check(request)
        request.number = self._count if request.number < 0 else request.number
        request.run_by(self.model, self.sampler)
        self._count += 1
        self._waiting.append(request)
        return request

    def _check(self, request: Request) -> None:
        check_width(self.model, self.sampler, len(request.prompt))
        if len(request.prompt) > self.prompt_length:
            room = f"this engine has room for {self.prompt_length}; build it with a larger prompt_length"
            raise DllmError(f"the prompt has {len(request.prompt)} tokens and {room}")
        if request.given is not None and request.given.shape != (self.sampler.gen_length,):
            wanted = f"[{self.sampler.gen_length}], the engine's generation"
            raise DllmError(f"given has shape {list(request.given.shape)}; it must be {wanted}")
        if request.given is not None and not np.issubdtype(request.given.dtype, np.integer):
            raise DllmError(f"given is {request.given.dtype}; it must hold token ids, the mask id where one is missing")
        if request.given is not None:
            check_given(request.given[None], self.model.config.vocab_size)
        if request.numbers is not None:
            self._check_numbers(request.numbers)
        if request.given is not None and self._rows.given is None:
            raise DllmError("given tokens cannot be kept by this sampler; use BlockSampler")
        self._check_stops(request.stop)

    def _check_stops(self, stop: Sequence[str | int]) -> None:
        """Raises DllmError for patterns that cannot be found in a row."""
        for item in stop:
            if isinstance(item, str):
                stop_bytes(item)
            else:
                check_token("stop", item, self.model.config)
        if len(set(stop)) > MOST_STOPS:
            raise DllmError(f"stop has {len(set(stop))} patterns; a request may bring {MOST_STOPS}")
        self._pieces(stop)

    def _pieces(self, stop: Sequence[str | int]) -> Sequence[bytes]:
        """The bytes of each token, if there are strings to be found in them; kept from the first time on."""
        strings = any(isinstance(item, str) for item in stop)
        return token_bytes(self.model.require_tokenizer(), self.model.config.vocab_size) if strings else ()

    def _check_numbers(self, numbers: Sequence[Any]) -> None:
        """Raises DllmError for numbers that the rows cannot hold as they are."""
        for name, number, dtype in zip(number_names(self.sampler), numbers, self._dtypes, strict=True):
            check_kept(name.rpartition(".")[2], number, dtype)

    def cancel(self, request: Request) -> None:
        """Takes a request back; its slot is free in the next step. One that has ended stays as it is."""
        if request.result is not None:
            return
        request.cancelled = True
        if request.slot is None:
            self._waiting = collections.deque(other for other in self._waiting if other is not request)
            return
        self._free(request)

    @property
    def busy(self) -> int:
        """Slots at work."""
        return sum(request is not None for request in self._at)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.busy

    @property
    def occupancy(self) -> float:
        """Share of the slots that were at work, over all steps."""
        return self.row_steps / max(self.steps * self.slots, 1)

    def compile(self) -> None:
        """Compiles the program now, and not in the first step."""
        if self._state is None:
            self._begin()

    def step(self, count: int = 1) -> list[Update]:
        """Admits what waits, runs so many steps, and tells what they did to each; fewer steps where a request ends, and
        one while a request runs that brings stop patterns of its own."""
        if self.idle:
            return []
        report = self._turn(count, 1)
        found = [self._update(request, report) for request in self._at if request is not None]
        self._collect(report)
        return found

    def advance(self) -> list[Request]:
        """Admits what waits and runs until a slot is free again, or all are where nothing waits: what has ended."""
        before = len(self._ended)
        while not self.idle and len(self._ended) == before:
            self._collect(self._turn(_FOREVER, 1 if self._waiting else self.slots))
        return self.take_ended()

    def take_ended(self) -> list[Request]:
        """Requests that have ended since the last call; the engine knows them no more."""
        ended, self._ended = self._ended, []
        return ended

    def results(self) -> Iterator[Request]:
        """Runs until nothing is left to do, and yields requests as they end, those that ended in `step` before first;
        others may be submitted meanwhile."""
        while self._ended or not self.idle:
            yield from self.advance()

    # -----------------------------------------------------------------------------------------------------------------

    def _roomy(self, sampler: Any) -> Any:
        """The sampler with room for drawing, if that is wanted."""
        if not self._draws:
            return sampler
        found = sampler.sampling
        plain = {"temperature": 0.0, "top_p": 1.0, "top_k": self.model.config.vocab_size}
        missing = {name: plain[name] for name in getattr(sampler, "draws", plain) if getattr(found, name) is None}
        return dataclasses.replace(sampler, sampling=dataclasses.replace(found, **missing))

    def _numbers_with(self, options: dict[str, Any]) -> tuple[Any, ...]:
        """The sampler's numbers with some of them changed."""
        if self._settings is None:
            raise DllmError(f"options {', '.join(sorted(options))} need an engine that was built by a sampler's name")
        refuse_unknown(f"sampler {called(self._settings)}", options, options_of(self._settings))
        if fixed := sorted(_FIXED & set(options)):
            raise DllmError(f"{fixed[0]} cannot be chosen by request; build another engine")
        said = {**self._settings.options, **options}
        said.pop("stop", None)  # compiling its strings would take longer than all else, and they are no numbers
        found: Any = build(self.model, dataclasses.replace(self._settings, options=said))
        found = self._roomy(dataclasses.replace(found, stop=self.sampler.stop))
        if structure_of(found) != self._structure:
            words = ", ".join(sorted(options))
            room = "" if self._draws else ", or draws=True for temperature, top_p and top_k"
            raise DllmError(f"{words} would make another program; build an engine with it{room}")
        return numbers_of(found)

    def _empty_rows(self) -> Rows:
        batch, length, low = self.slots, self.sampler.gen_length, self.model.denoiser.min_prompt_length
        numbers = (np.full(batch, *pair) for pair in zip(self._numbers, self._dtypes, strict=True))
        takes_given = getattr(self.sampler, "takes_given", True)
        return Rows(
            prompt=np.zeros((batch, self.prompt_length), np.int32),
            prompt_lengths=np.full(batch, low, np.int32),
            gen_lengths=np.full(batch, length, np.int32),
            given=np.full((batch, length), self.model.denoiser.mask_id, np.int32) if takes_given else None,
            key_data=np.zeros((batch, 2), np.uint32),
            numbers=tuple(numbers),
        )

    def _fill(self, slot: int, request: Request) -> None:
        """Writes a request into the rows that the next turn reads."""
        rows, ids = self._rows, request.prompt
        rows.prompt[slot, : len(ids)] = ids
        rows.prompt_lengths[slot], rows.gen_lengths[slot] = len(ids), request.gen_length
        rows.key_data[slot] = request.key_data
        if rows.given is not None:
            rows.given[slot] = self.model.denoiser.mask_id if request.given is None else request.given
        for array, number in zip(rows.numbers, request.numbers or self._numbers, strict=True):
            array[slot] = number
        if request.stop:
            self._matchers[request] = Matcher(request.stop, self._pieces(request.stop))
        request.slot, self._at[slot], self._seen[slot] = slot, request, 0
        request.seconds = -self.seconds

    def _admit(self) -> np.ndarray:
        """Gives free slots to what waits, [B] bool."""
        admitted = np.zeros(self.slots, bool)
        for slot in range(self.slots):
            if self._at[slot] is None and self._waiting:
                self._fill(slot, self._waiting.popleft())
                admitted[slot] = True
        return admitted

    def _turn(self, most_steps: int, wanted: int) -> Report:
        self.compile()
        free = np.asarray([request is None for request in self._at])  # of what was taken back, too
        admitted, start = self._admit(), time.perf_counter()
        report = self._stopped(self._call(admitted, free, 1 if self._matchers else most_steps, wanted))
        self.seconds += time.perf_counter() - start
        self.steps += int(report.steps)
        self.row_steps += int(report.row_steps)
        return report

    def _stopped(self, report: Report) -> Report:
        """The report with the rows ended in which a request's own stop pattern is complete and final."""
        tokens = np.asarray(report.result.tokens)
        done: Any = np.array(report.done)
        lengths: Any = np.array(report.result.lengths)
        for request, matcher in self._matchers.items():
            slot = request.slot
            assert slot is not None
            length = matcher.read(tokens[slot, : _final(report, request)])
            done[slot] |= length != NEVER
            lengths[slot] = min(lengths[slot], length)
        return dataclasses.replace(report, done=done, result=dataclasses.replace(report.result, lengths=lengths))

    def _call(
        self, admitted: np.ndarray, cancelled: np.ndarray, most_steps: int, wanted: int, plain: bool | None = None
    ) -> Report:
        plain = self._none_draws() if plain is None else plain
        sampler, rows = self._sampler(plain), self._rows
        if plain:
            rows = dataclasses.replace(rows, numbers=tuple(itertools.compress(rows.numbers, self._of_plain)))
        rows, *masks = self._placed((rows, admitted, cancelled))
        numbers = np.int32(most_steps), np.int32(wanted)
        self._state, report = self._program(sampler, self.model.denoiser, self._state, rows, *masks, *numbers)
        found: Report = jax.device_get(report)
        return found

    def _none_draws(self) -> bool:
        """Whether no request uses the room for drawing, so that the program without it gives the same, and sooner."""
        busy = [request is not None for request in self._at]
        pairs = zip(self._rows.numbers, self._numbers, strict=True)
        added = itertools.compress(pairs, [not own for own in self._of_plain])
        return self._draws and all((array[busy] == idle).all() for array, idle in added)

    def _sampler(self, plain: bool = False) -> Any:
        """The sampler, with room for drawing or without."""
        return self._plain if plain else self.sampler

    def _placed(self, arrays: Any) -> Any:
        return arrays if self._sharding is None else jax.device_put(arrays, self._sharding)

    def _begin(self) -> None:
        """Makes the slots and compiles the program, by a turn that does nothing."""
        start, none = time.perf_counter(), np.zeros(self.slots, bool)
        self._state = begin_jit(self._sampler(), self.model.denoiser, self._placed(self._rows))
        if self._sharding is not None:
            on_all = lambda x: jax.device_put(x, self._sharding) if x.sharding.is_fully_replicated else x
            leaves, tree = jax.tree.flatten(jax.tree.map(on_all, self._state))
            self._state = jax.tree.unflatten(tree, leaves)
            self._program = turn_on(tuple(leaf.sharding for leaf in leaves), tree)
        for plain in (False, True) if self._draws else (False,):
            self._call(none, none, 0, 1, plain)
        self.compile_seconds += time.perf_counter() - start

    def _update(self, request: Request, report: Report) -> Update:
        slot = request.slot
        assert slot is not None
        done, open = bool(report.done[slot]), np.asarray(report.pending[slot])
        result = jax.tree.map(lambda x: np.asarray(x[slot]), report.result)
        nfe, before = int(result.nfe), int(self._seen[slot])
        self._seen[slot] = nfe
        return Update(
            request=request,
            nfe=nfe,
            tokens=np.asarray(result.tokens),
            written=np.flatnonzero(result.decoded_at >= before).tolist(),
            masked=open & np.asarray(result.decoded_at < 0) & (not done),
            open=open & (not done),
            final=int(result.lengths) if done else _final(report, request),
            done=done,
            result=jax.tree.map(lambda x: np.asarray(x[slot : slot + 1]), report.result),
        )

    def _collect(self, report: Report) -> None:
        """Takes out what has ended."""
        for slot, request in enumerate(self._at):
            if request is None or not report.done[slot]:
                continue
            request.result = jax.tree.map(lambda x, slot=slot: x[slot : slot + 1].copy(), report.result)
            request.seconds += self.seconds
            self._free(request)
            self._ended.append(request)

    def _free(self, request: Request) -> None:
        assert request.slot is not None
        self._matchers.pop(request, None)
        self._at[request.slot], request.slot = None, None


def _final(report: Report, request: Request) -> int:
    """Tokens at the beginning of a request's canvas that will not change."""
    open = np.asarray(report.pending[request.slot])
    return int(np.argmax(open)) if open.any() else request.gen_length


def requests_of(
    sampler: CanvasSampler, prompts: Sequence[list[int]], keys: jax.Array, stop: Sequence[str | int] = ()
) -> list[Request]:
    """Requests with the sampler's own numbers and stop patterns.

    Args:
        prompts: token ids.
        keys: typed, one for each.
        stop: what the sampler was made with, where texts are cut.
    """
    data = np.asarray(jax.random.key_data(keys))
    pairs = enumerate(zip(prompts, data, strict=True))
    return [Request(prompt, sampler.gen_length, key, texts=stop, number=i) for i, (prompt, key) in pairs]
