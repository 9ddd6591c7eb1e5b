"""Many requests through a fixed number of slots: when one ends, the next takes its slot.

    engine = Engine(model, "threshold:threshold=0.9", slots=16, prompt_length=512)
    for number, prompt in enumerate(prompts):
        engine.submit(engine.request(prompt, seed=number))
    for request in engine.results():                     # as they end
        print(request.number, request.generation.text)

A request's tokens and forwards are those of the same request alone, whatever else is in the slots and whenever it was
admitted.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dllm_jax import DllmError, Model
from dllm_jax.text.tokenizer import token_bytes
from samplers.checks import check_length, check_number, check_seed, check_token, check_whole, refuse_unknown
from samplers.config.factory import CanvasSampler, build_constraint, refuse_stop
from samplers.config.registry import FORMS
from samplers.config.sampler_config import SamplerConfig, configure, make_sampler
from samplers.constraints.constraint import Constraint
from samplers.engine.prefill import USUAL_BYTES, USUAL_CHUNK, Prefill, PrefixStore, Reading, supports_prefill
from samplers.engine.program import Progress, number_names, numbers_of, structure_of
from samplers.engine.requests import EngineLimit, Request, Update
from samplers.engine.slots import MOST_BIASES, Size, Slots, with_draws
from samplers.inputs import check_given, given_tokens
from samplers.rules import Rule
from samplers.stopping import NEVER, Matcher, check_stop, stop_strings
from samplers.text.prompts import Prompt, check_width, encode_prompt
from samplers.tokens.noise import row_keys

_FIXED = {"ignore_eos", "verifier", "indicator", *FORMS}  # options of the program that `structure_of` does not compare
_UNBOUNDED = np.iinfo(np.int32).max

MOST_TOP = 20
"""Most probable tokens of a position that requests may ask for, as in OpenAI's API."""

MOST_STOPS = 8
"""Stop patterns that a request may bring."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """What an engine did so far.

    Attributes:
        seconds: wall time of all steps; `compile_seconds` is apart.
        steps: in each, every busy slot had one forward.
        row_steps: the sum over the steps of the busy slots; `slot_steps` that of all slots.
    """

    seconds: float = 0.0
    compile_seconds: float = 0.0
    steps: int = 0
    row_steps: int = 0
    slot_steps: int = 0

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(*(own + more for own, more in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __sub__(self, other: "Stats") -> "Stats":
        return Stats(*(own - less for own, less in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def occupancy(self) -> float:
        """Share of the slots that were busy, over all steps."""
        return self.row_steps / max(self.slot_steps, 1)


class Engine:
    """A model and a sampler that answer any number of requests, a fixed number at a time.

    One program is compiled for the admission of requests and steps, one more with `draws`, one more with
    `constraint_states`, and one more with `top_logprobs`, or two with both; no request compiles another. With `buckets`
    there are several sizes of each, compiled while larger ones run. Only `request` may be called by several threads at
    once.

    Attributes:
        model, sampler: what runs.
        config: the sampler before it was built, if it was by a name; else None.
        slots, prompt_length, draws, buckets, top_logprobs, constraint_states: as it was built.
        prefixes: the kept prefixes, None where prompts are not read before their first step.
        rows: slots of the program that runs, which are all of them without `buckets`.
        stop, ignore_eos: the sampler's, if the engine was built by a name; else none.
        stats: what it did so far.
    """

    def __init__(
        self,
        model: Model,
        sampler: str | Rule | SamplerConfig | CanvasSampler | None = None,
        *,
        slots: int = 8,
        prompt_length: int | None = None,
        draws: bool = False,
        buckets: bool = False,
        prefix_cache: int | None = 0,
        prefill_chunk: int | None = None,
        constraint_states: int = 0,
        top_logprobs: int = 0,
        **options: Any,
    ) -> None:
        """
        Args:
            sampler, options: as in `samplers.generate`.
            slots: B, requests that run together.
            prompt_length: P, the longest prompt; each slot reserves this many positions; by default 512, or less where
                the model's context ends.
            draws: let single requests set temperature, top_p, top_k and logit_bias. A second program is compiled, which
                runs while no request does.
            buckets: run a program of 1, 2, 4 ... rows, and for prompts of 64, 128 ... tokens, whichever is the smallest
                with room for the requests, so that a step costs what is in it. They are compiled by another thread when
                requests first fit them, and each takes room for an empty copy of its slots meanwhile.
            prefix_cache: bytes of keys and values of prompts that are kept on the device, so that requests which begin
                alike read their common beginning once. For block diffusion models under the exact cache, and others
                under one with a `prompt_block_length`; None is 256 MiB for these, in pieces of 512 positions, and
                nothing for others.
            prefill_chunk: positions of a prompt that are read between two steps; None reads a prompt at once. For the
                same models.
            constraint_states: let single requests set regex or json_schema whose automaton has so many states at most;
                0 lets none. A further program is compiled, which runs while a request has one, and each slot takes some
                4 bytes per token of the vocabulary and 2 per state and state.
            top_logprobs: K, the most probable tokens of each position that single requests may ask for, at most
                `MOST_TOP`; 0 lets none. A further program is compiled, two with `constraint_states`, which runs while a
                request asks, and each slot takes 8 K bytes per position.

        Raises:
            DllmError: for bad numbers and options; before anything is compiled.
        """
        if not hasattr(model, "denoiser"):
            raise DllmError(f"model is of type {type(model).__name__}; load one by dllm_jax.load")
        check_length("slots", slots)
        check_whole("prompt_length", prompt_length, 0)
        self.model, self.slots = model, slots
        self.config: SamplerConfig | None = None
        if sampler is None or isinstance(sampler, str | Rule | SamplerConfig):
            sampler, options = configure(model, sampler, options), {}
            self.config = sampler
        written = {} if self.config is None else self.config.options
        self.stop: tuple[str | int, ...] = tuple(written.get("stop") or ())
        self.ignore_eos = bool(written.get("ignore_eos"))
        sampler = make_sampler(model, sampler, **options)
        if "verifier" in written and self.config is not None:  # one for all requests: another is another program
            self.config = self.config.with_options(verifier=vars(sampler)["verifier"])
        room = model.config.max_length - sampler.gen_length
        self.prompt_length = max(min(512, room), 1) if prompt_length is None else prompt_length
        check_width(model, sampler, self.prompt_length)
        self.draws, self.buckets = draws, buckets
        check_whole("constraint_states", constraint_states, 0)
        check_whole("top_logprobs", top_logprobs, 0, min(MOST_TOP, model.config.vocab_size - 1))
        self.top_logprobs = top_logprobs
        self.constraint_states = constraint_states
        self._slots = Slots(model, sampler, slots, self.prompt_length, draws, buckets, constraint_states, top_logprobs)
        self.sampler: Any = self._slots.sampler
        self._prefill: Prefill | None = None
        if prefix_cache is None and supports_prefill(model, sampler):
            prefix_cache, prefill_chunk = USUAL_BYTES, prefill_chunk or USUAL_CHUNK
        if prefix_cache or prefill_chunk is not None:
            self._prefill = Prefill(model, sampler, self.prompt_length, prefill_chunk, prefix_cache or 0)
        self._reading: dict[Request, Reading | None] = {}  # requests in slots, before and while their prompt is read
        self.stats = Stats()
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: list[Request | None] = [None] * slots
        self._matchers: dict[Request, Matcher] = {}  # of requests in slots that bring stop patterns
        self._count = 0

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
        regex: str | None = None,
        json_schema: Mapping[str, Any] | None = None,
        logit_bias: Mapping[int, float] | None = None,
        top_logprobs: int = 0,
        **numbers: Any,
    ) -> Request:
        """Makes a request for `submit`; any thread may call this, also while the engine runs.

        Its answer is that of ``generate(model, [prompt], seed=seed, ...)`` with the same sampler.

        Args:
            prompt, chat, system: as in `samplers.generate`.
            seed: of its random numbers; or `key`, a typed key of its own.
            gen_length: positions to generate, at most the sampler's, which is the default.
            given: [G] int32, tokens the canvas comes with, the mask id where one is to be generated.
            stop: strings or token ids that end it, at most `MOST_STOPS`, besides the sampler's. They are checked after
                each step, so while such a request runs the engine runs one step at a time.
            regex, json_schema: the form of its answer, as in `samplers.make_sampler`, of an engine with
                `constraint_states`.
            logit_bias: token id -> number from -100 to 100 that is added to the model's logits of it at every position,
                before anything else, at most `slots.MOST_BIASES`; -100 as good as bans a token. Log-probabilities are
                of these logits. Of an engine with `draws`.
            top_logprobs: keep so many of the most probable tokens of each position, or more, in `Request.top`; of an
                engine with `top_logprobs`.
            numbers: options of the sampler that are numbers (threshold=0.8, gamma=0.1, temperature=0.7), for this
                request alone; see `settable`.

        Raises:
            DllmError: for bad values, a prompt that is too long, and options that would make another program.
        """
        check_seed(seed)
        check_length("gen_length", gen_length, optional=True)
        most = self.sampler.gen_length
        if gen_length is not None and gen_length > most:
            raise DllmError(f"gen_length {gen_length} exceeds the sampler's {most}; ask for less")
        check_stop(stop, self.model.config)
        own = row_keys(jax.random.key(seed), 1)[0] if key is None else key
        made = Request(
            prompt=encode_prompt(self.model, prompt, chat=chat, system=system),
            gen_length=gen_length or most,
            key_data=np.asarray(jax.random.key_data(own)),
            given=None if given is None else np.asarray(given),
            numbers=self.numbers_with(numbers) if numbers else None,
            constraint=self.constraint_of({"regex": regex, "json_schema": json_schema}, stop),
            logit_bias=logit_bias,
            top_logprobs=top_logprobs,
            stop=tuple(stop),
            sampler_stop=self.stop,
        )
        self.check(made)
        return made

    def constraint_of(self, form: Mapping[str, Any], stop: Sequence[str | int] = ()) -> Constraint | None:
        """A request's constraint, with this engine's room, from a cache after the first time; errors as of `request`.

        Args:
            form: values of regex and json_schema.
            stop: the request's.
        """
        if all(value is None for value in form.values()):
            return None
        if self._slots.any_form is None:
            problem = "regex and json_schema of a request need room"
            raise EngineLimit(problem, "build the engine with constraint_states=512", room=True)
        suppress = None if self.config is None else self.config.options.get("suppress")
        found = build_constraint(self.model, form, suppress=suppress, stop=[*stop, *self.stop])
        (states, classes), room = found.used, self._slots.any_form.sizes
        if states > room[0] or classes > room[1]:
            has = f"{states} states and {classes} classes of tokens"
            raise DllmError(f"the form has {has}; this engine has room for {room[0]} and {room[1]}; simplify it")
        return found.padded(*room)

    def _check_bias(self, bias: Mapping[int, float] | None) -> None:
        """Raises DllmError for a `logit_bias` that is none, or that the program has no room for."""
        if bias is None:
            return
        number = lambda x: isinstance(x, int | float | np.number) and not isinstance(x, bool)
        if not isinstance(bias, Mapping) or not all(map(number, bias.values())):
            raise DllmError("logit_bias is no table of token ids and numbers; give one such as {11: -100}")
        if bias and not self._slots.takes_bias:
            needs = "a model with with_bias, and a program of its own; build the engine with draws=True"
            raise DllmError(f"logit_bias of a request needs {needs}")
        if len(bias) > MOST_BIASES:
            raise DllmError(f"logit_bias has {len(bias)} tokens; a request may bring {MOST_BIASES}")
        for token, added in bias.items():
            check_token("logit_bias", token, self.model.config)
            check_number(f"logit_bias of token {token}", added, -100.0, 100.0)
            if token == self.model.config.mask_id:
                raise DllmError("the mask token is never written; leave it out of logit_bias")

    def numbers_with(self, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """The sampler's numbers with some of them changed, for `Request.numbers`; errors as of `request`."""
        if self.config is None:
            raise DllmError(f"options {', '.join(sorted(options))} need an engine that was built by a sampler's name")
        refuse_unknown(f"sampler {self.config.label}", options, self.config.owners)
        if fixed := sorted(_FIXED & set(options)):
            raise EngineLimit(f"{fixed[0]} cannot be chosen by request", "build another engine")
        changed = self.config.with_options(**options)
        # Compiling stop strings would take longer than all else, and they are no numbers.
        found: Any = changed.without("stop").build(self.model)
        found = dataclasses.replace(found, stop=self.sampler.stop)
        found = with_draws(found, self.model.config.vocab_size) if self.draws else found
        if structure_of(found) != structure_of(self.sampler):
            names = ", ".join(sorted(options))
            room = "" if self.draws else ", or draws=True for temperature, top_p and top_k"
            remedy = f"build an engine with it{room}"
            raise EngineLimit(f"{names} would make another program", remedy, room=not self.draws)
        return numbers_of(found)

    @property
    def settable(self) -> list[str]:
        """Options that `request` takes as numbers; none if the engine was not built by a sampler's name."""
        known = set() if self.config is None else set(self.config.owners)
        paths = [path.lstrip(".").replace(".", "_") for path in number_names(self.sampler)]
        found = (path if path in known else path.partition("_")[2] for path in paths)
        return sorted(name for name in found if name in known)

    def submit(self, request: Request) -> Request:
        """Puts a request, of `request` or one that you made, at the end of the queue.

        Raises:
            DllmError: for a prompt that is too long, a canvas of another length, and bad stop patterns.
        """
        if not isinstance(request, Request):
            raise DllmError(f"the request is a {type(request).__name__}; make one by engine.request(prompt, ...)")
        self.check(request)
        request.number = self._count if request.number < 0 else request.number
        request.bind(self.model, self.sampler)
        self._count += 1
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Cancels a request; its slot is free in the next step. One that has ended stays as it is."""
        if request.result is not None:
            return
        request.cancelled = True
        if request.slot is None:
            self._waiting = collections.deque(other for other in self._waiting if other is not request)
        else:
            self._free(request)

    def step(self, most: int | None = 1) -> list[Update]:
        """Admits waiting requests, runs steps, and returns what they did to each request that ran.

        While a request runs that brings stop patterns of its own, a call runs one step.

        Args:
            most: steps to run, fewer if a request ends before; None runs until a waiting request can have a slot or,
                if none waits, until all have ended.
        """
        if self.idle:
            return []
        progress, ran = self._run(most)
        return [self._update(slot, request, progress) for slot, request in ran]

    def results(self) -> Iterator[Request]:
        """Runs until nothing is left to do, and yields requests as they end; you may submit others meanwhile."""
        while not self.idle:
            yield from (request for _, request in self._run(None)[1] if request.result is not None)

    @property
    def busy(self) -> int:
        """The busy slots."""
        return sum(request is not None for request in self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.busy

    @property
    def rows(self) -> int:
        return self._slots.size.rows

    @property
    def prefixes(self) -> PrefixStore | None:
        return None if self._prefill is None else self._prefill.store

    @property
    def compiling(self) -> bool:
        """Whether a program of another size is being compiled."""
        return self._slots.compiling

    def compile(self) -> None:
        """Compiles the program now, and not in the first step."""
        if not self._slots.compiled:
            start = time.perf_counter()
            self._slots.compile()
            self.stats += Stats(compile_seconds=time.perf_counter() - start)

    # -----------------------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises DllmError for a request that the program has no room for."""
        check_width(self.model, self.sampler, len(request.prompt))
        if len(request.prompt) > self.prompt_length:
            room = f"this engine has room for {self.prompt_length}; build it with a larger prompt_length"
            raise DllmError(f"the prompt has {len(request.prompt)} tokens and {room}")
        if request.given is not None:
            check_given(request.given, (self.sampler.gen_length,), self.model.denoiser)
        if request.numbers is not None:
            self._slots.check_numbers(request.numbers)
        self._check_bias(request.logit_bias)
        check_whole("top_logprobs", request.top_logprobs, 0)
        if request.top_logprobs > self.top_logprobs:
            wanted = f"top_logprobs={request.top_logprobs}"
            raise DllmError(
                f"{wanted} of a request needs room; build the engine with {wanted}, a server with --top-logprobs"
            )
        if (constraint := request.constraint or getattr(self.sampler, "constraint", None)) is not None:
            refuse_stop(request.stop)
            constraint.check(request.gen_length, given_tokens(request.given, self.model.denoiser))
        check_stop(request.stop, self.model.config)
        if len(set(request.stop)) > MOST_STOPS:
            raise DllmError(f"stop has {len(set(request.stop))} patterns; a request may bring {MOST_STOPS}")
        self._token_bytes(request.stop)  # a tokenizer may have none

    def _token_bytes(self, stop: Sequence[str | int]) -> Sequence[bytes]:
        """The bytes of each token, in which stop strings are found; empty if there are no strings."""
        if not stop_strings(stop):
            return ()
        return token_bytes(self.model.require_tokenizer(), self.model.config.vocab_size)

    def _run(self, most: int | None) -> tuple[Progress, list[tuple[int, Request]]]:
        """Runs steps as `step` says: where the slots are, and each request that ran with its slot."""
        self.compile()
        self._fit()
        free = np.asarray([request is None for request in self._running])
        start, admitted = time.perf_counter(), self._admit()
        self._read_prompts(admitted, free)
        wanted = self.rows if most is None and not self._waiting else 1
        most = 1 if self._matchers or self._reading else _UNBOUNDED if most is None else most
        progress = self._end_at_stops(self._slots.run(admitted, free, most, wanted))
        seconds, steps = time.perf_counter() - start, int(progress.steps)
        self.stats += Stats(seconds, 0.0, steps, int(progress.row_steps), steps * self.rows)
        slots = enumerate(self._running)
        ran = [(slot, request) for slot, request in slots if request is not None and request not in self._reading]
        for slot, request in ran:
            if progress.done[slot]:
                request.result = jax.tree.map(lambda x, slot=slot: x[slot : slot + 1].copy(), progress.result)
                if request.top_logprobs:
                    request.top = jax.tree.map(lambda x, slot=slot: x[slot].copy(), progress.top)
                request.seconds += self.stats.seconds
                self._free(request)
        return progress, ran

    def _fit(self) -> None:
        """Changes to a program with room for the running requests, and for those that a slot is free for."""
        running = [request for request in self._running if request is not None]
        coming = list(itertools.islice(self._waiting, self.slots - len(running)))
        longest = max(len(request.prompt) for request in [*running, *coming])
        needed = Size(len(running) + len(coming), longest)
        if self._slots.fit([request.slot for request in running if request.slot is not None], needed):
            for slot, request in enumerate(running):
                request.slot = slot
            self._running = [*running, *[None] * (self.rows - len(running))]

    def _admit(self) -> np.ndarray:
        """Gives free slots to waiting requests, [B] bool."""
        admitted = np.zeros(self.rows, bool)
        for slot in range(self.rows):
            if self._running[slot] is None and self._waiting:
                request = self._waiting.popleft()
                self._slots.write(slot, request)
                if request.stop:
                    self._matchers[request] = Matcher(request.stop, self._token_bytes(request.stop))
                request.slot, self._running[slot], request.reported = slot, request, 0
                request.seconds = -self.stats.seconds
                admitted[slot] = True
        return admitted

    def _read_prompts(self, admitted: np.ndarray, free: np.ndarray) -> None:
        """Reads as much of prompts as one call may. A row begins once its prompt is read and counts as free until then.
        Changes both arrays, which are as `Slots.run` takes them."""
        if self._prefill is None:
            return
        for request in self._running:
            if request is not None and admitted[request.slot] and self._prefill.reads(request.prompt):
                self._reading[request], admitted[request.slot] = None, False
        room = self._prefill.chunk
        for request, begun in list(self._reading.items()):
            slot = request.slot
            assert slot is not None
            free[slot] = True
            if not room:
                continue
            if begun is None:  # only now, as a prompt before it may begin alike
                begun = self._reading[request] = self._prefill.begin(request.prompt)
                request.cached = begun.read
            room -= self._prefill.read(begun, room)
            if begun.done:
                del self._reading[request]
                begins = np.arange(self.rows) == slot
                self._slots.run(begins, free, 0, 1)
                self._slots.put_prompt(slot, begun.kv, begun.whole)
                free[slot] = False

    def _end_at_stops(self, progress: Progress) -> Progress:
        """The progress with the rows ended in which a request's own stop pattern is complete and final."""
        done: Any = np.array(progress.done)
        lengths: Any = np.array(progress.result.lengths)
        tokens: Any = progress.result.tokens
        for request, matcher in self._matchers.items():
            if request in self._reading:
                continue
            slot = request.slot
            assert slot is not None
            length = matcher.read(tokens[slot, : _final_length(progress, slot, request)])
            done[slot] |= length != NEVER
            lengths[slot] = min(lengths[slot], length)
        return progress._replace(done=done, result=dataclasses.replace(progress.result, lengths=lengths))

    def _update(self, slot: int, request: Request, progress: Progress) -> Update:
        result: Any = jax.tree.map(lambda x: x[slot : slot + 1], progress.result)
        done, pending, nfe = bool(progress.done[slot]), progress.pending[slot], int(result.nfe[0])
        written = np.flatnonzero(result.decoded_at[0] >= request.reported).tolist()
        request.reported = nfe
        return Update(
            request=request,
            nfe=nfe,
            tokens=result.tokens[0],
            written=written,
            masked=pending & (result.decoded_at[0] < 0) & (not done),
            pending=pending & (not done),
            final=int(result.lengths[0]) if done else _final_length(progress, slot, request),
            done=done,
            result=result,
        )

    def _free(self, request: Request) -> None:
        assert request.slot is not None
        self._matchers.pop(request, None)
        self._reading.pop(request, None)
        self._running[request.slot], request.slot = None, None


def _final_length(progress: Progress, slot: int, request: Request) -> int:
    """Tokens at the beginning of a request's canvas that will not change."""
    pending = progress.pending[slot]
    return int(np.argmax(pending)) if pending.any() else request.gen_length
