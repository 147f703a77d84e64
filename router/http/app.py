"""The HTTP front door: OpenAI's completions and chat, models, metrics and health."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from router.answer import Delta
from router.callers import Caller
from router.fleet import Fleet
from router.http.chat import read_chat
from router.http.completions import Asked, read_completion
from router.http.errors import Refusal, body_of, refusal_of
from router.http.fields import parse_object
from router.http.presence import ClientLeft, EventStream, unless_gone
from router.http.replies import ChatReply, CompletionReply, Envelope, Reply
from router.http.static import page_routes
from router.http.targets import scrape_targets
from router.job import Outcome
from router.merge import merge
from router.pipeline import Pipeline
from router.state import WorkerTable
from router.status import status_of
from router.validation import validate_request_id
from tandem.errors import RequestError, UnknownModel
from tandem.trace_context import TraceContext
from tandem.tracing import read_context

__all__ = ["Gateway"]

log = logging.getLogger(__name__)

_REQUEST_ID = "x-request-id"
_GONE = 499  # the client will not read it
Item = tuple[int, Delta | Outcome]
T = TypeVar("T")


@dataclass(frozen=True)
class Gateway:
    """stopping: no new requests are wanted. metrics: the text of Prometheus' format."""

    pipeline: Pipeline
    fleet: Fleet
    table: WorkerTable
    max_body_bytes: int
    metrics: Callable[[], bytes]
    stopping: Callable[[], bool] = lambda: False

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._one_model), methods=["GET"]),
            Route("/status", self._guarded(self._status), methods=["GET"]),
            *page_routes(),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/metrics/targets", self._guarded(self._targets), methods=["GET"]),
            Route("/healthz", self._alive, methods=["GET"]),
            Route("/readyz", self._ready, methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_thing})

    # ---- routes ----

    async def _completions(self, request: Request, request_id: str) -> Response:
        asked = read_completion(parse_object(await self._body(request)))
        envelope = self._envelope(f"cmpl-{request_id}")
        first = asked.messages[0]
        tells_logprobs = first.HasField("logprobs")
        reply = CompletionReply(envelope, self._token_bytes, asked.num_answers, tells_logprobs, asked.include_usage)
        return await self._answer(request, request_id, asked, reply)

    async def _chat(self, request: Request, request_id: str) -> Response:
        asked = read_chat(parse_object(await self._body(request)))
        envelope = self._envelope(f"chatcmpl-{request_id}")
        reply = ChatReply(envelope, self._token_bytes, asked.messages[0].HasField("logprobs"), asked.include_usage)
        return await self._answer(request, request_id, asked, reply)

    async def _models(self, request: Request, request_id: str) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()] if self.fleet.model else []})

    async def _one_model(self, request: Request, request_id: str) -> Response:
        name = request.path_params["name"]
        if self.fleet.model is None or name != self.fleet.model.info.name:
            raise UnknownModel(f"{name!r} is not served here")
        return JSONResponse(self._model())

    async def _status(self, request: Request, request_id: str) -> Response:
        status = status_of(self.fleet, self.table, self.pipeline.num_by_phase)
        return JSONResponse(MessageToDict(status, preserving_proto_field_name=True))

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _targets(self, request: Request, request_id: str) -> Response:
        return JSONResponse(scrape_targets(request.url.scheme, request.url.netloc, self.table.entries))

    async def _alive(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, request: Request) -> Response:
        if self.stopping():
            return PlainTextResponse("stopping\n", 503)
        if not self.table.can_serve:
            return PlainTextResponse("no ready worker in each pool\n", 503)
        return PlainTextResponse("ok\n")

    # ---- from a request to its answer ----

    def _guarded(self, handle: Callable[[Request, str], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """A request id in and out, and every error in OpenAI's form. The broad except is where a request ends."""

        async def endpoint(request: Request) -> Response:
            given = request.headers.get(_REQUEST_ID)
            request_id = uuid.uuid4().hex if given is None else given
            try:
                validate_request_id(request_id)
                request.state.caller = self.pipeline.callers.identify(request.headers.items())
                response = await handle(request, request_id)
            except (RequestError, TimeoutError) as error:
                response = _refuse(refusal_of(error))
            except HTTPException:
                raise
            except (ClientLeft, ClientDisconnect):
                return Response(status_code=_GONE)
            except Exception:
                log.exception("request %s ended by a bug", request_id)
                response = _refuse(_bug(request_id))
            if request_id.isprintable() and request_id.isascii():
                response.headers[_REQUEST_ID] = request_id[:128]
            return response

        return endpoint

    async def _answer(self, request: Request, request_id: str, asked: Asked, reply: Reply) -> Response:
        whose = request_id, request.state.caller, read_context(request.headers.items())
        stream = merge([self._items(place, message, *whose) for place, message in enumerate(asked.messages)])
        if not asked.stream:
            await unless_gone(request.receive, _collect(stream, reply))
            return JSONResponse(reply.whole())
        try:
            # What is wrong with a request shows before its first token: it gets a status of its own.
            first = await unless_gone(request.receive, _first(stream))
        except BaseException:
            await stream.aclose()
            raise
        events = _events(first, stream, reply, asked.include_usage, request_id)
        return EventStream(events)

    async def _items(
        self, place: int, message: Any, request_id: str, caller: Caller, trace: TraceContext
    ) -> AsyncGenerator[Item, None]:
        async with contextlib.aclosing(self.pipeline.generate(message, request_id, None, caller, trace)) as answer:
            async for item in answer:
                yield place, item

    async def _body(self, request: Request) -> bytes:
        """At most so much is ever held."""
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self.max_body_bytes:
                raise HTTPException(413, f"the body has more than {self.max_body_bytes} bytes")
            parts.append(part)
        return b"".join(parts)

    def _envelope(self, name: str) -> Envelope:
        return Envelope(name, int(time.time()), self.fleet.model.info.name if self.fleet.model else "")

    def _token_bytes(self, token_id: int) -> bytes:
        return self.fleet.model.tokenizer.token_bytes(token_id) if self.fleet.model else b""

    def _model(self) -> dict[str, Any]:
        assert self.fleet.model is not None
        info = self.fleet.model.info
        return {
            "id": info.name,
            "object": "model",
            "created": 0,
            "owned_by": "tandem",
            "max_model_len": info.max_context_tokens,
            "fingerprint": info.fingerprint,
        }


async def _collect(stream: AsyncGenerator[Item, None], reply: Reply) -> None:
    async with contextlib.aclosing(stream):
        async for place, item in stream:
            reply.add(place, item)


async def _first(stream: AsyncGenerator[Item, None]) -> Item:
    return await anext(stream)


async def _events(
    first: Item, stream: AsyncGenerator[Item, None], reply: Reply, include_usage: bool, request_id: str
) -> AsyncGenerator[str, None]:
    """Server-sent events, up to `[DONE]`. An error after the first token is an event too. Broad: the request ends here."""
    async with contextlib.aclosing(stream):
        try:
            for chunk in reply.chunks(*first):
                yield _event(chunk)
            async for place, item in stream:
                for chunk in reply.chunks(place, item):
                    yield _event(chunk)
        except (RequestError, TimeoutError) as error:
            yield _event(body_of(refusal_of(error)))
            return
        except Exception:
            log.exception("request %s ended by a bug", request_id)
            yield _event(body_of(_bug(request_id)))
            return
        if include_usage:
            yield _event(reply.usage_chunk())
        yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _refuse(refusal: Refusal) -> Response:
    return JSONResponse(body_of(refusal), refusal.status, refusal.headers)


def _bug(request_id: str) -> Refusal:
    return Refusal(500, "server_error", f"internal error; the router's log has it under request {request_id}")


async def _no_such_thing(request: Request, error: Exception) -> Response:
    """An unknown path, another method, a body that is too large."""
    assert isinstance(error, HTTPException)
    refusal = Refusal(error.status_code, "invalid_request_error", error.detail)
    return JSONResponse(body_of(refusal), error.status_code, error.headers)
