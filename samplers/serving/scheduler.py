"""Between HTTP and the engine: admission, deadlines and answers."""

import asyncio
import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import hashlib
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import jax

import dllm_jax
from dllm_jax import DllmError, Model
from dllm_jax.params.quantized import dtype_label
from dllm_jax.text.tokenizer import token_strings, without_special_tokens
from samplers.config.registry import settings_of, title
from samplers.decisions.questions import Question, prepare_questions
from samplers.engine.engine import Engine, Stats
from samplers.engine.program import with_numbers
from samplers.engine.requests import Request, Update
from samplers.generation import Generation
from samplers.infill import Infilling, config_for_gaps, escape_gaps, infilling_of, prepare_infill, requests_for
from samplers.sampler import describe_broken
from samplers.serving.calls import THOUGHT, PartStream, Reading, habits_of
from samplers.serving.engine_thread import EngineThread, Job
from samplers.serving.errors import Fault, stopping_fault
from samplers.serving.metrics import Metrics
from samplers.serving.schemas import Body, CanvasBody, ChatBody, CompletionBody, DecideBody, InfillBody, TextBody
from samplers.serving.shapes import Json, Shape, token_scores, usage_of
from samplers.stopping import stop_strings
from samplers.text.decode import TextStream, text_of
from samplers.text.prompts import PromptTooLong, encode_prompt

JOIN_SECONDS = 10.0

GAP_TOKENS = 16
"""Tokens before a suffix where `max_tokens` is not given, as in OpenAI's API."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        queue: requests that may wait while all slots are in use.
        deadline: seconds that a request may take, including its wait; None for no limit.
        forwards: that an answer may take; None for four per position, or as many as the server's own sampler may take
            if that is more.
        clamp: let `max_tokens` above the canvas mean all of it, instead of refusing them.
        special_tokens: let special tokens that clients write become their ids, instead of text.
    """

    queue: int = 64
    deadline: float | None = 600.0
    forwards: int | None = None
    clamp: bool = True
    special_tokens: bool = False


class Ticket:
    """One HTTP request in the engine.

    Attributes:
        jobs: one for each choice of the answer.
        prompts: how many prompts they answer.
        changed: set when there is an update or a fault.
        fault: the reason why no update will come.
    """

    def __init__(self, jobs: Sequence[Job], prompts: int, until: float | None, service: "Service") -> None:
        """
        Args:
            until: the deadline by the event loop's clock; None for none.
        """
        self.jobs, self.prompts, self._until, self._service = jobs, prompts, until, service
        self.changed = asyncio.Event()
        self.fault: Fault | None = None

    async def updates(self) -> AsyncIterator[tuple[Job, Update]]:
        """Updates of the jobs, the last of each at least; a slow reader gets several steps as one update.

        Raises:
            Fault: at the deadline, and when the engine has stopped.
        """
        left = len(self.jobs)
        while left:
            async with _deadline(self._until):
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
        """The answers, once all have ended; otherwise the ticket is closed.

        Raises:
            Fault: as `updates`, and for logits that are not finite.
        """
        try:
            async for _ in self.updates():
                pass
        finally:
            self.close()
        return self.ended()

    def ended(self) -> list[Generation]:
        """The answers of jobs that have all ended; raises Fault for logits that are not finite."""
        return [answer_of(self._service.reader, job) for job in self.jobs]

    def close(self) -> None:
        """Cancels the jobs that have not ended."""
        self._service.cancel(self.jobs)


class Service:
    """Answers bodies with an engine. Make and use it in one event loop. What takes a body raises Fault for one that is
    refused or fails.

    Attributes:
        engine: nobody else may use it.
        metrics: of this server.
        draining: whether new requests are refused.
        broken: the error that has stopped the engine; None while it runs.
        reader: the engine's model for the event loop, with a tokenizer of its own.
        tickets: of the admitted ones, by job.
        on_broken: called when an error has stopped the engine.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        """
        Raises:
            DllmError: when the engine's sampler itself may take more forwards than the limit, and as
                `without_special_tokens`.
        """
        self.engine, self.limits, self.name = engine, limits, engine.model.name
        self._gaps: Engine | None = None
        self._making_gaps = threading.Lock()
        self.metrics = Metrics(engine, lambda: engine.compiling or (self._gaps is not None and self._gaps.compiling))
        self.draining, self._in_flight_of = False, collections.Counter[str]()
        self.broken: BaseException | None = None
        self.on_broken: Callable[[], None] = lambda: None
        self.created, self.fingerprint = int(time.time()), _fingerprint(engine)
        self._token_texts = _find_token_texts(engine.model)
        self._most_forwards = _most_forwards(engine, limits)
        # With a tokenizer of its own: the event loop decodes meanwhile, and one tokenizer is not safe in two threads.
        own = copy.deepcopy if limits.special_tokens else without_special_tokens
        self.reader = dataclasses.replace(engine.model, tokenizer=own(engine.model.require_tokenizer()))
        self._habits = habits_of(str(self.reader.require_tokenizer().chat_template or ""))
        self._busy, self._waiting = 0, 0
        self.tickets: dict[Job, Ticket] = {}
        self._admitted_at: dict[Job, float] = {}
        self._deciding: set[Any] = set()
        self._encoding = concurrent.futures.ThreadPoolExecutor(1, "encoding")
        self._forming = concurrent.futures.ThreadPoolExecutor(1, "forming")
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(engine, self._loop, self._apply, self._fail)
        self._thread.start()

    # Requests --------------------------------------------------------------------------------------------------------

    async def completion(self, body: CompletionBody, client: str) -> Json:
        """A whole answer."""
        shape, ticket = body.shape, await self.admit(body, client, streamed=False)
        answers = await ticket.answers()
        choices = [self._choice(shape, body, *pair) for pair in zip(ticket.jobs, answers, strict=True)]
        head = self._named(shape.prefix, shape.whole, ticket.jobs[0].seed)
        return {**head, "choices": choices, "usage": self._usage(body, answers, ticket)}

    async def chunks(self, body: CompletionBody, ticket: Ticket) -> AsyncIterator[Json]:
        """The chunks of an answer, while its text is written.

        Args:
            ticket: of `admit`, streamed.
        """
        shape = body.shape
        head = self._named(shape.prefix, shape.chunk, ticket.jobs[0].seed)
        usage = {"usage": None} if body.with_usage else {}
        chunk = lambda job, **fields: {**head, "choices": [{"index": job.index, **_BLANK, **fields}], **usage}
        texts = {job: self._text_stream(body) for job in ticket.jobs}
        parts = {job: PartStream(self._reading(body, job)) for job in ticket.jobs}
        for job in ticket.jobs:
            if (opening := shape.opening()) is not None:
                yield chunk(job, **opening)
            if echo := self._echo(body, job):
                yield chunk(job, **shape.delta({"content": echo}))
        async for job, update in ticket.updates():
            if not update.done:
                new = "" if job.plan is not None else texts[job].feed(update.tokens[: update.final].tolist())
                for part in parts[job].feed(new):
                    yield chunk(job, **shape.delta(part))
                continue
            answer = answer_of(self.reader, job)
            rest = texts[job].finish(answer.tokens) if job.plan is None else _text(answer)
            *others, last = parts[job].feed(rest, final=True) or [{}]
            for part in others:
                yield chunk(job, **shape.delta(part))
            scores = self._logprobs(shape, body, job, answer)
            if last or scores:
                yield chunk(job, **shape.delta(last), **scores)
            yield chunk(job, **shape.delta({}), **self._ending(body, job, answer, called=parts[job].called))
        if body.with_usage:
            yield {**head, "choices": [], "usage": self._usage(body, ticket.ended(), ticket)}

    async def canvas_events(self, body: CanvasBody, ticket: Ticket) -> AsyncIterator[Json]:
        """The canvas, forward by forward: first its length, then cells as they change, then the answer.

        A cell is [position, text or None for a mask, whether it is final]. Where the reader, or this event loop, is
        slower than the engine, an event covers several forwards.
        """
        (job,), sampler = ticket.jobs, self.engine.sampler
        shown: list[tuple[str | None, bool]] = [(None, False)] * job.request.gen_length
        yield {"length": len(shown), "block": sampler.width, "seed": job.seed, "slots": self.engine.slots}
        async for _, update in ticket.updates():
            cells = _cells(update, len(shown), self._token_texts)
            changed = [[at, *cell] for at, cell in enumerate(cells) if cell != shown[at]]
            shown = cells
            busy = {"busy": self._busy, "waiting": self._waiting}
            yield {"forward": update.nfe, "written": update.written, "cells": changed, **busy}
        answer = answer_of(self.reader, job)
        usage = self._usage(body, [answer], ticket)
        yield {"text": answer.text, "finish_reason": self._ending(body, job, answer)["finish_reason"], "usage": usage}

    async def infill(self, body: InfillBody, client: str) -> Json:
        """A text with its gaps filled."""
        ticket = await self.admit(body, client, streamed=False)
        (found,) = await ticket.answers()
        assert isinstance(found, Infilling)
        head = self._named("infilling", "infilling", ticket.jobs[0].seed)
        return {**head, "text": found.text, "gaps": found.gaps, "usage": usage_of([found], 1)}

    async def decide(self, body: DecideBody, client: str) -> Json:
        """A decision."""
        self._check_body(body)
        self._reserve(client, 1)
        start = self._loop.time()
        future = None
        try:
            async with _deadline(None if self.limits.deadline is None else start + self.limits.deadline):
                question, seed = await self._loop.run_in_executor(self._encoding, self._make_question, body)
                self._check_alive()
                future = self._thread.decide(question)
                self._deciding.add(future)
                decision = await future
        finally:
            self._release(client, 1)
            self._deciding.discard(future)
        if decision is None:
            raise _broken_fault()
        self.metrics.count_decision(decision, self._loop.time() - start)
        read = decision.prompt_tokens
        usage = {"prompt_tokens": read, "completion_tokens": 0, "total_tokens": read, "forwards": decision.nfe}
        found = {name: value for name, value in decision.to_json().items() if name not in ("prompt_tokens", "nfe")}
        return {**self._named("decision", "decision", seed), **found, "usage": usage}

    async def admit(self, body: Body, client: str, *, streamed: bool) -> Ticket:
        """Gives a request to the engine.

        Args:
            client: who asks; clients take turns.
        """
        self._check_body(body)
        prompts, copies = body.prompts, (body.n or 1) if isinstance(body, CompletionBody) else 1
        count = max(len(prompts), 1) * copies
        self._reserve(client, count)
        start = self._loop.time()
        until = None if self.limits.deadline is None else start + self.limits.deadline
        try:
            async with _deadline(until):
                if body.form:  # some seconds the first time, in which other requests are encoded
                    await self._loop.run_in_executor(self._forming, self._compile_form, body)
                about = (body, client, prompts, copies, streamed)
                jobs = await self._loop.run_in_executor(self._encoding, self._make_jobs, *about)
            self._check_alive()
        except BaseException:
            self._release(client, count)
            raise
        ticket = Ticket(jobs, max(len(prompts), 1), until, self)
        self.tickets |= dict.fromkeys(jobs, ticket)
        self._admitted_at |= dict.fromkeys(jobs, start)
        self._thread.submit(jobs)
        return ticket

    # Life ------------------------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits so long for those in flight, and ends the others by a fault."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.in_flight and self.broken is None:
                    await asyncio.sleep(0.02)
        self.break_off(stopping_fault())

    async def close(self) -> None:
        """Ends the threads; a step that never ends is abandoned."""
        self._thread.stop()
        self._encoding.shutdown(wait=False, cancel_futures=True)
        self._forming.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    @property
    def health(self) -> str:
        """ok, stopping or broken."""
        return "broken" if self.broken is not None else "stopping" if self.draining else "ok"

    # -----------------------------------------------------------------------------------------------------------------

    def _check_body(self, body: Body) -> None:
        self._check_alive()
        if self.draining:
            raise stopping_fault()
        if body.model not in (None, self.name):
            sentence = f"the model {body.model!r:.80} does not exist here; this server has {self.name}"
            raise Fault(404, sentence, param="model", code="model_not_found")
        body.check()
        if isinstance(body, ChatBody):
            body.check_habits(self._habits)
        most = self.engine.sampler.gen_length
        if body.length is not None and body.length > most and not self.limits.clamp:
            raise Fault(400, f"max_tokens {body.length} exceeds {most}, this server's limit", param="max_tokens")

    def _check_alive(self) -> None:
        if self.broken is not None:
            raise _engine_fault()

    def _reserve(self, client: str, count: int) -> None:
        """Gives a client places. One that has none gets them even if others have filled the queue, up to twice."""
        room = self.engine.slots + self.limits.queue
        if count > room:
            raise Fault(400, f"the request asks for {count} answers; this server has room for {room}", param="n")
        if self.in_flight + count > (room if self._in_flight_of[client] else 2 * room):
            sentence = f"{self.in_flight} requests are waiting or running; try again in a moment"
            raise Fault(429, sentence, outcome="full", code="queue_full")
        self._in_flight_of[client] += count

    def _release(self, client: str, count: int) -> None:
        self._in_flight_of[client] -= count
        if not self._in_flight_of[client]:
            del self._in_flight_of[client]

    @property
    def in_flight(self) -> int:
        """Requests of the engine that are being admitted, waiting or running."""
        return self._in_flight_of.total()

    def _make_jobs(self, body: Body, client: str, prompts: Sequence[Any], copies: int, streamed: bool) -> list[Job]:
        """The jobs of a request, for the engine or the one that fills gaps. Not for the event loop: long prompts take
        long."""
        count, numbers = max(len(prompts), 1) * copies, body.numbers
        self._check_numbers(numbers)
        seed = secrets.randbelow(2**32 - count) if body.seed is None else body.seed
        try:
            encoded = [None if prompt is None else self._encode(prompt) for prompt in prompts or [None]]
            rows: list[Any] = [row for row in encoded for _ in range(copies)]
            if (template := self._template(body)) is None:
                options: dict[str, Any] = {"gen_length": self._length(body), "stop": body.stops}
                options |= {"logit_bias": body.bias, "top_logprobs": self._top(body), **numbers, **body.form}
                made = [self.engine.request(row, seed=seed + i, **options) for i, row in enumerate(rows)]
                jobs = [Job(i, request, seed + i, streamed, self.engine, client) for i, request in enumerate(made)]
            else:
                pairs = enumerate(rows)
                jobs = [self._make_infilling(template, row, i, seed + i, body, client) for i, row in pairs]
        except DllmError as error:
            raise Fault(400, str(error)) from None
        self._check_forwards(jobs[0].request)
        return jobs

    def _top(self, body: Body) -> int:
        """The most probable tokens that the engine keeps for an answer; 1 is the token itself where it keeps none."""
        return body.top if self.engine.top_logprobs or body.top > 1 else 0

    def _compile_form(self, body: Body) -> None:
        """Compiles the form of an answer, which a cache keeps. Not for the event loop."""
        try:
            engine = self._infiller() if isinstance(body, InfillBody) else self.engine
            engine.constraint_of(body.form)
        except DllmError as error:
            raise Fault(400, str(error), param="response_format" if "json_schema" in body.form else "regex") from None

    def _template(self, body: Body) -> str | None:
        """What is to be filled: an infilling's template, or a gap and the suffix after it."""
        if isinstance(body, InfillBody):
            return body.template
        if not isinstance(body, TextBody) or not body.suffix:
            return None
        return f"<gap:{self._length(body) or GAP_TOKENS}>{escape_gaps(body.suffix)}"

    def _length(self, body: Body) -> int | None:
        """Positions that an answer gets; None for as many as there are."""
        return None if body.length is None else min(body.length, self.engine.sampler.gen_length)

    def _make_infilling(self, template: str, prompt: Any, index: int, seed: int, body: Body, client: str) -> Job:
        """Raises DllmError for what cannot be filled."""
        engine, numbers = self._infiller(), body.numbers
        plan = prepare_infill(self.reader, [template], prompt=prompt, seed=seed, made=engine.sampler, **body.form)
        (request,) = requests_for(self.reader, plan)
        if len(request.prompt) > engine.prompt_length:
            words = f"the text before the first gap has {len(request.prompt)} tokens"
            raise DllmError(f"{words}; this server takes {engine.prompt_length}")
        request.number, request.numbers = -1, engine.numbers_with(numbers) if numbers else None
        request.logit_bias, request.constraint = body.bias, engine.constraint_of(body.form)
        engine.check(request)
        return Job(index, request, seed, False, engine, client, plan)

    def _infiller(self) -> Engine:
        """The engine that fills gaps, made for the first that ask: without end tokens, and with text in every gap.
        Raises DllmError for a sampler that fills none."""
        engine = self.engine
        if engine.config is None:
            raise DllmError("this server's sampler fills no gaps; start it with one by name")
        with self._making_gaps:
            if self._gaps is None:
                config = config_for_gaps(engine.model, engine.config)
                names = ("slots", "prompt_length", "draws", "buckets", "constraint_states")
                self._gaps = Engine(engine.model, config, **{name: getattr(engine, name) for name in names})
            return self._gaps

    def _make_question(self, body: DecideBody) -> tuple[Question, int]:
        """The question and its seed. Not for the event loop."""
        (prompt,), seed = body.prompts, secrets.randbelow(2**32) if body.seed is None else body.seed
        self._encode(prompt)  # refused by this server's own limit first
        options: dict[str, Any] = {"template": body.template, "gamma": body.gamma, "joint": body.joint, "seed": seed}
        temperature = 1.0 if body.temperature is None else body.temperature
        try:
            (question,) = prepare_questions(self.reader, [prompt], body.fields, temperature=temperature, **options)
        except DllmError as error:
            raise Fault(400, str(error)) from None
        form, room = question.form, self.engine.sampler.gen_length
        if form.longest > room:
            sentence = f"the template has up to {form.longest} tokens; this server takes {room}"
            raise Fault(400, sentence, param="template", code="context_length_exceeded")
        if form.most_rows > self._most_forwards:
            sentence = f"the decision may take {form.most_rows} sequences, more than the {self._most_forwards}"
            raise Fault(400, f"{sentence} of this server; give fewer values", code="too_many_forwards")
        return question, seed

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

    def _encode(self, prompt: Any) -> list[int]:
        room = self.engine.prompt_length
        try:
            ids, words = encode_prompt(self.reader, prompt, most=room), ""
            count = len(ids)
        except PromptTooLong as error:
            count, words = error.tokens, "at least "
        if count > room:
            sentence = f"the prompt has {words}{count} tokens; this server takes {room}"
            raise Fault(400, sentence, code="context_length_exceeded")
        return ids

    def _apply(self, updates: list[tuple[Job, Update]], stats: Stats, busy: int, waiting: int) -> None:
        """Hands the updates of an engine call to their tickets."""
        self._busy, self._waiting = busy, waiting
        self.metrics.count_steps(stats, busy, waiting)
        for job, update in updates:
            ticket = self.tickets.get(job)
            if ticket is None:  # it was cancelled
                continue
            missed = () if job.latest is None else job.latest.written
            job.latest = dataclasses.replace(update, written=sorted({*missed, *update.written}))
            ticket.changed.set()
            if update.done:
                self.metrics.count_answer(job.request, self._loop.time() - self._admitted_at[job])
                self._end(job)

    def _fail(self, error: BaseException) -> None:
        self.broken = error
        self.break_off(_engine_fault())
        self.on_broken()

    def break_off(self, fault: Fault) -> None:
        """Ends all requests in flight by a fault; of several the first counts."""
        for ticket in set(self.tickets.values()):
            ticket.fault = ticket.fault or fault
            ticket.changed.set()
        for future in self._deciding:
            if not future.done():
                future.set_exception(fault)

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancels those that have not ended."""
        if left := [job for job in jobs if job in self.tickets]:
            self._thread.cancel(left)
        for job in left:
            self._end(job)

    def _end(self, job: Job) -> None:
        del self.tickets[job], self._admitted_at[job]
        self._release(job.client, 1)

    def _named(self, prefix: str, kind: str, seed: int) -> Json:
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": self.fingerprint,
            "seed": seed,
        }

    def _choice(self, shape: Shape, body: CompletionBody, job: Job, answer: Generation) -> Json:
        message, called = self._reading(body, job).message(self._echo(body, job) + _text(answer))
        own = {**shape.choice(message), **self._logprobs(shape, body, job, answer)}
        return {"index": job.index, **_BLANK, **own, **self._ending(body, job, answer, called=called)}

    def _reading(self, body: CompletionBody, job: Job) -> Reading:
        """How an answer is read."""
        end = str(self.reader.require_tokenizer().decode(job.request.prompt[-8:])) if self._habits.thinks else ""
        return body.reading(self._habits, opened=end.rstrip().endswith(THOUGHT))

    def _usage(self, body: Body, answers: Sequence[Generation], ticket: Ticket) -> Json:
        """As `usage_of`, and `max_tokens` where less were generated than asked for because the canvas is no longer."""
        most = self.engine.sampler.gen_length
        clamped = {"max_tokens": most} if body.length is not None and body.length > most else {}
        cached = None if self.engine.prefixes is None else [job.request.cached for job in ticket.jobs]
        return usage_of(answers, ticket.prompts, cached) | clamped

    def _echo(self, body: Body, job: Job) -> str:
        """The prompt's text, if it is wanted."""
        if not isinstance(body, TextBody) or not body.echo:
            return ""
        prompt = body.prompts[job.index // (body.n or 1)]
        return prompt if isinstance(prompt, str) else str(self.reader.require_tokenizer().decode(prompt))

    def _logprobs(self, shape: Shape, body: CompletionBody, job: Job, answer: Generation) -> Json:
        if not body.with_logprobs:
            return {}
        alternatives = body.top, job.request.top
        return {"logprobs": shape.logprobs(token_scores(self.engine.model, answer, self._stops(body), *alternatives))}

    def _ending(self, body: Body, job: Job, answer: Generation, *, called: bool = False) -> Json:
        """Why an answer ended: "stop", an end token or a stop pattern, "length", a full canvas, or "tool_calls", if it
        has `called` some; and the stop string that did it, if one did."""
        if job.plan is not None:  # a gap is as long as it was asked to be
            return {"finish_reason": "length", "stop_reason": None}
        stops = stop_strings(self._stops(body))
        cut = text_of(self.engine.model, answer.tokens)[len(answer.text) :] if stops else ""
        full = len(answer.tokens) == job.request.gen_length
        stop = next((text for text in stops if cut.startswith(text)), None)
        reason = "tool_calls" if called else "length" if full and not cut else "stop"
        return {"finish_reason": reason, "stop_reason": stop}

    def _stops(self, body: Body) -> tuple[str | int, ...]:
        return (*self.engine.stop, *body.stops)

    def _text_stream(self, body: Body) -> TextStream:
        return TextStream(self.engine.model, self._stops(body), ignore_eos=self.engine.ignore_eos)


_BLANK: Json = {"logprobs": None, "finish_reason": None, "stop_reason": None}


def answer_of(reader: Model, job: Job) -> Generation:
    """The answer of a job that has ended; of one that fills gaps an `Infilling`.

    Raises:
        Fault: when the model's logits were not finite.
    """
    request = job.request
    assert request.result is not None
    if describe_broken(request.result.broken_at, [request.number]):
        raise _broken_fault()
    return request.generation if job.plan is None else infilling_of(reader, job.plan, request, 0)


def _text(answer: Generation) -> str:
    """What was generated."""
    return "".join(answer.gaps) if isinstance(answer, Infilling) else answer.text


def as_event(message: Json | str) -> bytes:
    """A message as a server-sent event, which is called by its type if it has one."""
    if isinstance(message, str):
        return f"data: {message}\n\n".encode()
    name = f"event: {message['type']}\n" if "type" in message else ""
    return f"{name}data: {json.dumps(message, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _cells(update: Update, length: int, strings: Sequence[str]) -> list[tuple[str | None, bool]]:
    text = lambda at: None if update.masked[at] else strings[int(update.tokens[at])]
    return [(text(at), not update.pending[at]) for at in range(length)]


def _find_token_texts(model: Model) -> list[str]:
    """The text of each token alone; this takes half a second for a large vocabulary."""
    tokenizer, size = model.require_tokenizer(), model.config.vocab_size
    try:
        return token_strings(tokenizer, size)
    except DllmError:  # not byte-level
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


@contextlib.asynccontextmanager
async def _deadline(until: float | None) -> AsyncIterator[None]:
    """A block that may take until some time of the event loop's clock; raises Fault if it takes longer."""
    try:
        async with asyncio.timeout_at(until):
            yield
    except TimeoutError:
        sentence = "the answer was not ready at the server's deadline"
        raise Fault(503, sentence, outcome="late", code="deadline_exceeded") from None


def _broken_fault() -> Fault:
    return Fault(500, "the model's logits were not finite, so there is no answer", outcome="failed")


def _engine_fault() -> Fault:
    return Fault(
        500, "the engine has stopped by an error; the server will end", outcome="failed", code="engine_stopped"
    )


def _fingerprint(engine: Engine) -> str:
    """A hash of all that determines an answer but the request."""
    versions = (dllm_jax.__version__, jax.__version__, jax.default_backend())
    about = (engine.model.name, dtype_label(engine.model.params), title(engine.sampler), settings_of(engine.sampler))
    return "dllm_" + hashlib.sha256(repr((versions, about)).encode()).hexdigest()[:12]
