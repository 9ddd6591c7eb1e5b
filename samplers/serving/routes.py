"""The routes: OpenAI's, the canvas, and what operators look at."""

import asyncio
import functools
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from samplers.serving.errors import Fault, unexpected
from samplers.serving.metrics import CONTENT_TYPE
from samplers.serving.middleware import LOG, Record, errors_of, record_of, refusal, where
from samplers.serving.page import HEADERS, PAGE
from samplers.serving.scheduler import Service, Ticket, as_event
from samplers.serving.schemas import CanvasBody, ChatBody, TextBody
from samplers.serving.shapes import Json

T = TypeVar("T")


def make_app(service: Service) -> FastAPI:
    """An application whose routes ask a service."""
    app = FastAPI(title="dllm_jax", openapi_url=None)  # whose pages about it load scripts from elsewhere
    _add_looks(app, service)
    _add_answers(app, service)
    app.add_exception_handler(Fault, _on_fault)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_error)
    return app


def _add_looks(app: FastAPI, service: Service) -> None:
    """What does not ask the engine."""
    look = functools.partial(app.api_route, methods=["GET", "HEAD"])

    @look("/")
    async def page() -> Response:
        return HTMLResponse(PAGE, headers=HEADERS)

    @look("/health")
    async def health() -> Response:
        found = service.health
        return JSONResponse({"status": found}, 200 if found == "ok" else 503)

    @look("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @look("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model(service)]}

    @look("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        if name != service.name:
            raise Fault(404, "this model does not exist here", param="model", code="model_not_found")
        return _model(service)


def _add_answers(app: FastAPI, service: Service) -> None:
    """What asks the engine."""

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _complete(service, body, request)

    @app.post("/v1/completions")
    async def text(body: TextBody, request: Request) -> Response:
        return await _complete(service, body, request)

    @app.post("/v1/canvas")
    async def canvas(body: CanvasBody, request: Request) -> Response:
        ticket = await _unless_gone(request, service.open(body, streamed=True))
        return Events(ticket, service.frames(body, ticket), _begun(request))


async def _complete(service: Service, body: ChatBody | TextBody, request: Request) -> Response:
    record = _begun(request)
    if body.stream:
        ticket = await _unless_gone(request, service.open(body, streamed=True))
        return Events(ticket, service.parts(body, ticket), record)
    answer = await _unless_gone(request, service.completion(body))
    record.outcome, usage = "done", answer["usage"]
    record.read, record.wrote = usage["prompt_tokens"], usage["completion_tokens"]
    return JSONResponse(answer)


class Events(StreamingResponse):
    """Messages as server-sent events, and [DONE] at the end; with whose client the work ends."""

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
            yield as_event("[DONE]")
            self._record.outcome = "done"
            self._record.wrote = sum(len(job.request.generation.tokens) for job in self._ticket.jobs)
        except Fault as fault:
            self._record.outcome = fault.outcome
            yield as_event(fault.body)
        except Exception as error:
            LOG.error("%s", where(error))
            self._record.outcome = "failed"
            yield as_event(unexpected().body)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What some work gives; it is broken off when the client goes away.

    Raises:
        Fault: when it did, for nobody to read.
    """
    going, working = asyncio.ensure_future(_gone(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait((going, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Fault(499, "the client has gone", outcome="gone")
        return working.result()
    finally:
        for task in (going, working):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _begun(request: Request) -> Record:
    record = record_of(request)
    record.outcome = "gone"  # until it has another end
    return record


def _model(service: Service) -> Json:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "dllm_jax"}


async def _on_fault(request: Request, fault: Any) -> Response:
    record_of(request).outcome = fault.outcome
    return refusal(fault)


async def _on_invalid(request: Request, error: Any) -> Response:
    return await _on_fault(request, errors_of(error.errors(), error.body))


async def _on_http(request: Request, error: Any) -> Response:
    """Of FastAPI's own: paths and methods that are not there, bodies that cannot be read."""
    if isinstance(error.__cause__, Fault):  # of the guard, while the body was read
        return await _on_fault(request, error.__cause__)
    words = {404: "there is nothing at this path", 405: "this path does not take this method"}
    return await _on_fault(request, Fault(error.status_code, words.get(error.status_code, "the body cannot be read")))


async def _on_error(request: Request, error: Any) -> Response:
    """Of ours; the guard writes down where."""
    return await _on_fault(request, unexpected())
