"""Between HTTP and the engine: who is admitted, how long it may take, and what is answered."""

import asyncio
import concurrent.futures
import contextlib
import copy
import dataclasses
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import jax

import dllm_jax
from dllm_jax import DllmError, Model
from dllm_jax.params.quantized import told_dtype
from dllm_jax.text.tokenizer import token_strings
from samplers.config.registry import settings_of, title
from samplers.engine.engine import Engine, Stats
from samplers.engine.program import with_numbers
from samplers.engine.requests import Request, Update
from samplers.generation import Generation
from samplers.sampler import describe_broken
from samplers.serving.engine_thread import Job, Worker
from samplers.serving.errors import Fault, stopping
from samplers.serving.metrics import Metrics
from samplers.serving.schemas import Body, CanvasBody, ChatBody, Completing, TextBody
from samplers.serving.shapes import Chat, Json, Shape, Text, token_scores, usage_of
from samplers.text.decode import TextStream, text_of
from samplers.text.prompts import PromptTooLong, encode_prompt

JOIN_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
        queue: requests that may wait while all slots are at work.
        deadline: seconds that a request may take, waiting included; None for any time.
        forwards: that an answer may take; None for four a position, or what the server's own sampler may take if that
            is more.
    """

    queue: int = 64
    deadline: float | None = 600.0
    forwards: int | None = None


class Ticket:
    """What the engine does for one HTTP request.

    Attributes:
        jobs: one for each choice of the answer.
        prompts: of how many prompts.
        changed: set when there is news.
        fault: why there will be none any more.
    """

    def __init__(self, jobs: Sequence[Job], prompts: int, until: float | None, service: "Service") -> None:
        """
        Args:
            until: of the event loop's clock.
        """
        self.jobs, self.prompts, self._until, self._service = jobs, prompts, until, service
        self.changed = asyncio.Event()
        self.fault: Fault | None = None

    async def updates(self) -> AsyncIterator[tuple[Job, Update]]:
        """News of the jobs, the last of each at least; a slow reader gets several steps as one.

        Raises:
            Fault: at the deadline, and when the engine has stopped.
        """
        left = len(self.jobs)
        while left:
            with _deadline():
                async with asyncio.timeout_at(self._until):
                    await self.changed.wait()
            self.changed.clear()
            if self.fault is not None:
                raise self.fault
            for job in self.jobs:
                update, job.latest = job.latest, None
                if update is not None:
                    left -= int(update.done)
                    yield job, update

    async def answers(self) -> list[Generation]:
        """The answers, when all are there.

        Raises:
            Fault: as `updates`, and for a broken model.
        """
        async for _ in self.updates():
            pass
        return [answer_of(job) for job in self.jobs]

    def close(self) -> None:
        """Takes back what has not ended."""
        self._service.close_ticket(self)


class Service:
    """An engine that answers bodies. To be made and used in one event loop.

    Attributes:
        engine: which nobody else may use.
        metrics: of this server.
        draining: whether nothing new is taken.
        broken: the error that has stopped the engine.
        held: requests of the engine that are waiting or running.
        ended: called when the engine has stopped by an error.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        """
        Raises:
            DllmError: when the engine's sampler itself may take more forwards than the limit.
        """
        self.engine, self.limits, self.name = engine, limits, engine.model.name
        self.metrics = Metrics(engine.slots)
        self.draining, self.held = False, 0
        self.broken: BaseException | None = None
        self.ended: Callable[[], None] = lambda: None
        self.created, self.fingerprint = int(time.time()), _fingerprint(engine)
        self._strings = _strings(engine.model)
        self._most_forwards = _most_forwards(engine, limits)
        # Its own tokenizer: the event loop decodes meanwhile, and one is not made for two threads.
        self._reader = dataclasses.replace(engine.model, tokenizer=copy.deepcopy(engine.model.tokenizer))
        self._busy, self._waiting = 0, 0
        self._tickets: dict[Job, Ticket] = {}
        self._begun: dict[Job, float] = {}
        self._encoding = concurrent.futures.ThreadPoolExecutor(1, "encoding")
        self._loop = asyncio.get_running_loop()
        self._worker = Worker(engine, self._loop, self._apply, self._break)
        self._worker.start()

    # Requests --------------------------------------------------------------------------------------------------------

    async def completion(self, body: ChatBody | TextBody) -> Json:
        """An answer as a whole.

        Raises:
            Fault: when there is none.
        """
        shape, ticket = _shape(body), await self.open(body, streamed=False)
        try:
            answers = await ticket.answers()
        finally:
            ticket.close()
        choices = [self._choice(shape, body, *pair) for pair in zip(ticket.jobs, answers, strict=True)]
        head = self._head(shape, shape.whole, ticket)
        return {**head, "choices": choices, "usage": usage_of(answers, ticket.prompts)}

    async def parts(self, body: ChatBody | TextBody, ticket: Ticket) -> AsyncIterator[Json]:
        """An answer bit by bit, of `open(body, streamed=True)`.

        Raises:
            Fault: when it breaks off.
        """
        shape = _shape(body)
        head = self._head(shape, shape.part, ticket)
        usage = {"usage": None} if body.with_usage else {}
        part = lambda job, **said: {**head, "choices": [{"index": job.index, **_BLANK, **said}], **usage}
        texts = {job: self._text(body) for job in ticket.jobs}
        if (opening := shape.opening()) is not None:
            for job in ticket.jobs:
                yield part(job, **opening)
        async for job, update in ticket.updates():
            if not update.done:
                if new := texts[job].feed(update.tokens[: update.final].tolist()):
                    yield part(job, **shape.delta(new))
                continue
            answer = answer_of(job)
            rest, said = texts[job].finish(answer.tokens), self._logprobs(shape, body, answer)
            if rest or said:
                yield part(job, **shape.delta(rest), **said)
            yield part(job, **shape.delta(""), finish_reason=self._reason(job, answer))
        if body.with_usage:
            answers = [job.request.generation for job in ticket.jobs]
            yield {**head, "choices": [], "usage": usage_of(answers, ticket.prompts)}

    async def frames(self, body: CanvasBody, ticket: Ticket) -> AsyncIterator[Json]:
        """The canvas, forward by forward: first how large it is, then cells as they change, then the answer.

        A cell is [position, text or None for a mask, whether it is final]. Where the reader, or this event loop, is
        slower than the engine, an event tells of several forwards.

        Raises:
            Fault: when it breaks off.
        """
        (job,), sampler = ticket.jobs, self.engine.sampler
        shown: list[tuple[str | None, bool]] = [(None, False)] * job.request.gen_length
        yield {"length": len(shown), "block": sampler.width, "seed": job.seed, "slots": self.engine.slots}
        async for _, update in ticket.updates():
            cells = _cells(update, len(shown), self._strings)
            changed = [[at, *cell] for at, cell in enumerate(cells) if cell != shown[at]]
            shown = cells
            busy = {"busy": self._busy, "waiting": self._waiting}
            yield {"forward": update.nfe, "written": update.written, "cells": changed, **busy}
        answer = answer_of(job)
        yield {"text": answer.text, "finish_reason": self._reason(job, answer), "usage": usage_of([answer], 1)}

    async def open(self, body: Body, *, streamed: bool) -> Ticket:
        """Admits a request.

        Raises:
            Fault: for what is refused.
        """
        self._check_open(body)
        prompts, copies = body.prompts, (body.n or 1) if isinstance(body, Completing) else 1
        count = len(prompts) * copies
        self._admit(count)
        begun = self._loop.time()
        until = None if self.limits.deadline is None else begun + self.limits.deadline
        try:
            with _deadline():
                async with asyncio.timeout_at(until):
                    work = self._loop.run_in_executor(self._encoding, self._requests, body, prompts, copies)
                    made = await work
            self._check_alive()
        except BaseException:
            self.held -= count
            raise
        jobs = [Job(index, request, seed, streamed) for index, (request, seed) in enumerate(made)]
        ticket = Ticket(jobs, len(prompts), until, self)
        self._tickets |= dict.fromkeys(jobs, ticket)
        self._begun |= dict.fromkeys(jobs, begun)
        self._worker.submit(jobs)
        return ticket

    # Life ------------------------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Takes nothing new and waits so long for what is there; what has not ended then is broken off."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.held and self.broken is None:
                    await asyncio.sleep(0.02)
        self.break_off(stopping())

    async def close(self) -> None:
        """Ends the threads; a step that never ends is left behind."""
        self._worker.stop()
        self._encoding.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._worker.join, JOIN_SECONDS)

    @property
    def health(self) -> str:
        """ok, stopping or broken."""
        return "broken" if self.broken is not None else "stopping" if self.draining else "ok"

    # -----------------------------------------------------------------------------------------------------------------

    def _check_open(self, body: Body) -> None:
        self._check_alive()
        if self.draining:
            raise stopping()
        if body.model not in (None, self.name):
            sentence = f"the model {body.model!r:.80} does not exist here; this server has {self.name}"
            raise Fault(404, sentence, param="model", code="model_not_found")
        body.check()
        most = self.engine.sampler.gen_length
        if body.length is not None and body.length > most:
            raise Fault(400, f"max_tokens {body.length} exceeds {most}, this server's limit", param="max_tokens")

    def _check_alive(self) -> None:
        if self.broken is not None:
            raise _stopped()

    def _admit(self, count: int) -> None:
        room = self.engine.slots + self.limits.queue
        if count > room:
            raise Fault(400, f"the request asks for {count} answers; this server has room for {room}", param="n")
        if self.held + count > room:
            advice = "try again in a moment"
            raise Fault(
                429, f"{self.held} requests are waiting or running; {advice}", outcome="full", code="queue_full"
            )
        self.held += count

    def _requests(self, body: Body, prompts: Sequence[Any], copies: int) -> list[tuple[Request, int]]:
        """The engine's requests and their seeds; not in the event loop, since long prompts take long."""
        count, numbers = len(prompts) * copies, body.numbers
        self._check_numbers(numbers)
        seed = secrets.randbelow(2**32 - count) if body.seed is None else body.seed
        said: dict[str, Any] = {"gen_length": body.length, "stop": body.stops, **numbers}
        try:
            ids = [row for prompt in prompts for row in [self._encoded(prompt)] * copies]
            made = [(self.engine.request(row, seed=seed + i, **said), seed + i) for i, row in enumerate(ids)]
        except DllmError as error:
            raise Fault(400, str(error)) from None
        self._check_forwards(made[0][0])
        return made

    def _check_numbers(self, numbers: Mapping[str, int | float]) -> None:
        idle, settable = {"temperature": 0, "top_p": 1}, self.engine.settable
        for name, value in numbers.items():
            if name not in settable and idle.get(name) != value:
                known = f"a request may set {', '.join(settable)}"
                raise Fault(400, f"{name!r:.60} cannot be set here; {known}", param=name, code="unknown_parameter")

    def _check_forwards(self, request: Request) -> None:
        if request.numbers is not None:
            most = _forwards(with_numbers(self.engine.sampler, request.numbers), len(request.prompt))
            if most > self._most_forwards:
                sentence = f"the answer may take {most} forwards, more than the {self._most_forwards} of this server"
                raise Fault(400, f"{sentence}; ask for fewer steps", code="too_many_forwards")

    def _encoded(self, prompt: Any) -> list[int]:
        room = self.engine.prompt_length
        try:
            ids, words = encode_prompt(self._reader, prompt, most=room), ""
            count = len(ids)
        except PromptTooLong as error:
            count, words = error.tokens, "at least "
        if count > room:
            sentence = f"the prompt has {words}{count} tokens; this server takes {room}"
            raise Fault(400, sentence, code="context_length_exceeded")
        return ids

    def _apply(self, updates: list[tuple[Job, Update]], stats: Stats, busy: int, waiting: int) -> None:
        """Passes on what a call of the engine did."""
        self._busy, self._waiting = busy, waiting
        self.metrics.count_steps(stats, busy, waiting)
        for job, update in updates:
            ticket = self._tickets.get(job)
            if ticket is None:  # cancelled meanwhile
                continue
            job.latest = update if job.latest is None else _merge(job.latest, update)
            ticket.changed.set()
            if update.done:
                self.metrics.count_answer(job.request, self._loop.time() - self._begun[job])
                self._end(job)

    def _break(self, error: BaseException) -> None:
        self.broken = error
        self.break_off(_stopped())
        self.ended()

    def break_off(self, fault: Fault) -> None:
        """Ends what waits and what runs by a fault; the first one tells why."""
        for ticket in set(self._tickets.values()):
            ticket.fault = ticket.fault or fault
            ticket.changed.set()

    def close_ticket(self, ticket: Ticket) -> None:
        """Takes back what has not ended of it."""
        left = [job for job in ticket.jobs if job in self._tickets]
        if left:
            self._worker.cancel(left)
        for job in left:
            self._end(job)

    def _end(self, job: Job) -> None:
        del self._tickets[job], self._begun[job]
        self.held -= 1

    def _head(self, shape: Shape, kind: str, ticket: Ticket) -> Json:
        return {
            "id": f"{shape.prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": self.fingerprint,
            "seed": ticket.jobs[0].seed,
        }

    def _choice(self, shape: Shape, body: ChatBody | TextBody, job: Job, answer: Generation) -> Json:
        said = {**shape.choice(answer.text), **self._logprobs(shape, body, answer)}
        return {"index": job.index, **_BLANK, **said, "finish_reason": self._reason(job, answer)}

    def _logprobs(self, shape: Shape, body: ChatBody | TextBody, answer: Generation) -> Json:
        if not body.with_logprobs:
            return {}
        return {"logprobs": shape.logprobs(token_scores(self.engine.model, answer, self._stops(body)))}

    def _reason(self, job: Job, answer: Generation) -> str:
        """Whether an end token or a stop pattern ended it, or the canvas."""
        full = len(answer.tokens) == job.request.gen_length
        cut = answer.text != text_of(self.engine.model, answer.tokens)
        return "length" if full and not cut else "stop"

    def _stops(self, body: Body) -> tuple[str | int, ...]:
        return (*self.engine.stop, *body.stops)

    def _text(self, body: Body) -> TextStream:
        return TextStream(self.engine.model, self._stops(body), ignore_eos=self.engine.ignore_eos)


_BLANK: Json = {"logprobs": None, "finish_reason": None}


def answer_of(job: Job) -> Generation:
    """The answer of a job that has ended.

    Raises:
        Fault: when the model's logits were no numbers.
    """
    request = job.request
    assert request.result is not None
    if describe_broken(request.result.broken_at, [request.number]):
        raise Fault(500, "the model's logits were not finite, so there is no answer", outcome="failed")
    return request.generation


def as_event(message: Json | str) -> bytes:
    """A message as a server-sent event."""
    text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def _shape(body: ChatBody | TextBody) -> Shape:
    return Chat if isinstance(body, ChatBody) else Text


def _merge(missed: Update, update: Update) -> Update:
    """Two updates of a request as one: where it is after the second, with what both wrote."""
    return dataclasses.replace(update, written=sorted({*missed.written, *update.written}))


def _cells(update: Update, length: int, strings: Sequence[str]) -> list[tuple[str | None, bool]]:
    text = lambda at: None if update.masked[at] else strings[int(update.tokens[at])]
    return [(text(at), not update.pending[at]) for at in range(length)]


def _strings(model: Model) -> list[str]:
    """How each token looks alone; half a second for a large vocabulary."""
    tokenizer, size = model.require_tokenizer(), model.config.vocab_size
    try:
        return token_strings(tokenizer, size)
    except DllmError:  # its tokens do not simply follow each other
        return [str(tokenizer.decode([token])) for token in range(size)]


def _most_forwards(engine: Engine, limits: Limits) -> int:
    own = _forwards(engine.sampler, engine.prompt_length)
    if limits.forwards is None:
        return max(4 * engine.sampler.gen_length, own)
    if own > limits.forwards:
        raise DllmError(
            f"the server's own sampler may take {own} forwards; raise max_forwards, which is {limits.forwards}"
        )
    return limits.forwards


def _forwards(sampler: Any, prompt_length: int) -> int:
    return int(sampler.forwards(prompt_length)[1])


@contextlib.contextmanager
def _deadline() -> Any:
    try:
        yield
    except TimeoutError:
        sentence = "the answer was not ready at the server's deadline"
        raise Fault(503, sentence, outcome="late", code="deadline_exceeded") from None


def _stopped() -> Fault:
    return Fault(
        500, "the engine has stopped by an error; the server will end", outcome="failed", code="engine_stopped"
    )


def _fingerprint(engine: Engine) -> str:
    """Of all that decides about answers but the request itself."""
    versions = (dllm_jax.__version__, jax.__version__, jax.default_backend())
    about = (engine.model.name, told_dtype(engine.model.params), title(engine.sampler), settings_of(engine.sampler))
    return "dllm_" + hashlib.sha256(repr((versions, about)).encode()).hexdigest()[:12]
