"""The routes: OpenAI's, the canvas, and those for operators."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from samplers.serving.errors import MESSAGES, Fault, internal_fault
from samplers.serving.messages import as_events, as_message
from samplers.serving.metrics import CONTENT_TYPE
from samplers.serving.middleware import LOG, Record, client_of, error_place, fault_response, invalid_body, record_of
from samplers.serving.page import HEADERS, PAGE
from samplers.serving.scheduler import Service, Ticket, as_event
from samplers.serving.schemas import CanvasBody, ChatBody, CompletionBody, DecideBody, InfillBody, MessageBody, TextBody
from samplers.serving.shapes import Json

T = TypeVar("T")


def make_app(service: Service) -> FastAPI:
    """The application with all routes of a service."""
    app = FastAPI(title="dllm_jax", openapi_url=None)  # FastAPI's pages about the API load scripts from other servers
    _add_status_routes(app, service)
    _add_answer_routes(app, service)
    app.add_exception_handler(Fault, _on_fault)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_error)
    return app


def _add_status_routes(app: FastAPI, service: Service) -> None:
    """Routes that do not use the engine."""
    get = functools.partial(app.api_route, methods=["GET", "HEAD"])

    @get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE, headers=HEADERS)

    @get("/health")
    async def health() -> Response:
        return JSONResponse({"status": service.health}, 200 if service.health == "ok" else 503)

    @get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model(service)]}

    @get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        if name != service.name:
            raise Fault(404, "this model does not exist here", param="model", code="model_not_found")
        return _model(service)


def _add_answer_routes(app: FastAPI, service: Service) -> None:
    """Routes that use the engine."""

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _complete(service, body, request)

    @app.post("/v1/completions")
    async def text(body: TextBody, request: Request) -> Response:
        return await _complete(service, body, request)

    @app.post(MESSAGES)
    async def messages(body: MessageBody, request: Request) -> Response:
        return await _complete(service, body, request)

    @app.post("/v1/infill")
    async def infill(body: InfillBody, request: Request) -> Response:
        return await _answer(service.infill(body, client_of(request)), request)

    @app.post("/v1/decide")
    async def decide(body: DecideBody, request: Request) -> Response:
        return await _answer(service.decide(body, client_of(request)), request)

    @app.post("/v1/canvas")
    async def canvas(body: CanvasBody, request: Request) -> Response:
        ticket = await _cancel_if_gone(request, service.admit(body, client_of(request), streamed=True))
        return EventStream(ticket, service.canvas_events(body, ticket), _start_record(request))


async def _complete(service: Service, body: CompletionBody, request: Request) -> Response:
    is_message = isinstance(body, MessageBody)
    if body.stream:
        ticket = await _cancel_if_gone(request, service.admit(body, client_of(request), streamed=True))
        chunks = service.chunks(body, ticket)
        events = as_events(chunks, len(ticket.jobs[0].request.prompt)) if is_message else chunks
        return EventStream(ticket, events, _start_record(request))
    form = as_message if is_message else None
    return await _answer(service.completion(body, client_of(request)), request, form)


async def _answer(
    work: Coroutine[Any, Any, Json], request: Request, form: Callable[[Json], Json] | None = None
) -> Response:
    record = _start_record(request)
    answer = await _cancel_if_gone(request, work)
    record.outcome, usage = "done", answer["usage"]
    record.read, record.wrote = usage["prompt_tokens"], usage["completion_tokens"]
    return JSONResponse(answer if form is None else form(answer))


class EventStream(StreamingResponse):
    """Messages as server-sent events, and OpenAI's [DONE]; when the client leaves, the engine's work is cancelled."""

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, messages: AsyncIterator[Json], record: Record) -> None:
        super().__init__(self._events(messages), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._ticket, self._record = ticket, record
        record.read = sum(len(job.request.prompt) for job in ticket.jobs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.close()

    async def _events(self, messages: AsyncIterator[Json]) -> AsyncIterator[bytes]:
        try:
            async for message in messages:
                yield as_event(message)
            if self._record.route != MESSAGES:
                yield as_event("[DONE]")
            self._record.outcome = "done"
            self._record.wrote = sum(len(answer.tokens) for answer in self._ticket.ended())
        except Fault as fault:
            self._record.outcome = fault.outcome
            yield as_event(fault.body(self._record.route))
        except Exception as error:
            LOG.error("%s", error_place(error))
            self._record.outcome = "failed"
            yield as_event(internal_fault().body(self._record.route))


async def _cancel_if_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client disconnects.

    Raises:
        Fault: when it did; nobody reads it.
    """
    leaving, working = asyncio.ensure_future(_wait_for_disconnect(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait((leaving, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Fault(499, "the client has gone", outcome="gone")
        return working.result()
    finally:
        for task in (leaving, working):
            task.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _start_record(request: Request) -> Record:
    record = record_of(request)
    record.outcome = "gone"  # unless it ends otherwise
    return record


def _model(service: Service) -> Json:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "dllm_jax"}


async def _on_fault(request: Request, fault: Any) -> Response:
    record_of(request).outcome = fault.outcome
    return fault_response(fault, request.scope)


async def _on_invalid(request: Request, error: Any) -> Response:
    return await _on_fault(request, invalid_body(error.errors(), error.body))


async def _on_http(request: Request, error: Any) -> Response:
    """FastAPI's own errors: unknown paths, wrong methods, unreadable bodies."""
    if isinstance(error.__cause__, Fault):  # raised by the guard while the body was read
        return await _on_fault(request, error.__cause__)
    words = {404: "there is nothing at this path", 405: "this path does not take this method"}
    return await _on_fault(request, Fault(error.status_code, words.get(error.status_code, "the body cannot be read")))


async def _on_error(request: Request, error: Any) -> Response:
    """Unforeseen errors; the guard logs their place."""
    return await _on_fault(request, internal_fault())
