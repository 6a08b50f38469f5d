"""Everything of the server that is not the API itself, put around an application: `install` is the one way in.

Owns the order of the layers and what runs beside the requests. Must not know what a turn is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from fastapi.routing import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from memora.bootstrap import Memora
from memora.chat import TurnResult
from memora.web.access import OPEN_PATHS, Access, AccessGuard
from memora.web.events import EventHub, EventStreams
from memora.web.health import Health
from memora.web.limits import BodyLimiter, RateLimiter, TurnLimiter
from memora.web.logs import RequestLog, note_turn
from memora.web.metrics import Metrics
from memora.web.page import Page
from memora.web.turns import TurnTimes

_REFUSALS: Final = {
    "401": "The API key is missing or wrong",
    "403": "The Host or the Origin is not allowed",
    "429": "Too many requests in a minute",
    "503": "Redis does not answer, or the server has too much to do",
}
_REFUSALS_OF_BODIES: Final = {
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
}


@dataclass(frozen=True)
class Operations:
    """What runs around the requests of one application."""

    metrics: Metrics
    hub: EventHub
    health: Health

    def stop(self) -> None:
        """The server is about to stop: not ready any more, and open pages end at once."""
        self.health.is_stopping = True
        self.hub.close()

    def turn(self, result: TurnResult, times: TurnTimes) -> None:
        """A turn was answered: count it, and add its figures to the log line of its request."""
        self.metrics.turn(result, times)
        note_turn(result)


def install(app: FastAPI, memora: Memora) -> Operations:
    """Put the layers around an application and add its routes.

    Raises:
        SettingsError: the settings would let strangers in.
    """
    settings = memora.settings
    access = Access.of(settings)
    metrics = Metrics(memora.storage)
    hub = EventHub(memora.storage, settings.max_event_streams, metrics.fold)
    metrics.event_streams.set_function(lambda: hub.count)
    operations = Operations(metrics, hub, Health(memora))
    app.state.operations = operations
    app.state.on_turn = operations.turn
    app.state.on_turn_failed = metrics.turn_failed
    _add_routes(app, operations, EventStreams(memora, hub))
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimiter, most_bytes=settings.max_body_bytes)
    app.add_middleware(TurnLimiter, most=settings.max_concurrent_requests)
    if settings.rate_limit_per_minute is not None:
        app.add_middleware(RateLimiter, per_minute=settings.rate_limit_per_minute)
    app.add_middleware(AccessGuard, access=access)
    app.add_middleware(RequestLog, metrics=metrics)
    _run_beside(app, operations)
    _describe_refusals(app)
    return operations


def _add_routes(app: FastAPI, operations: Operations, streams: EventStreams) -> None:
    async def events(request: Request, conversation_id: str) -> Response:
        """Turns, folds, retries and conflicts as they happen: a snapshot first, then resumable by `Last-Event-ID`."""
        return await streams.open(request, conversation_id)

    async def figures(request: Request) -> Response:
        """Counters of this server, and how far the folds are behind."""
        operations.hub.count_folds()
        return await operations.metrics.page(request)

    health = operations.health
    router = APIRouter()
    unavailable: dict[int | str, dict[str, Any]] = {
        503: {"description": "Redis does not answer, or the server is about to stop"}
    }
    problems: dict[int | str, dict[str, Any]] = {
        200: {"description": "Server-sent events", "content": {"text/event-stream": {}}},
        400: {"description": "The id of the conversation or of the last event is none"},
        404: {"description": "There is no such conversation"},
    }
    router.add_api_route("/livez", health.live, tags=["health"])
    router.add_api_route("/readyz", health.ready, tags=["health"], responses=unavailable)
    router.add_api_route("/version", health.version, tags=["health"])
    router.add_api_route("/metrics", figures, tags=["health"], response_class=Response)
    router.add_api_route("/", Page().show, include_in_schema=False)
    router.add_api_route(
        "/v1/conversations/{conversation_id}/events",
        events,
        tags=["memory"],
        response_class=Response,
        responses=problems,
    )
    app.include_router(router)


def _run_beside(app: FastAPI, operations: Operations) -> None:
    """Let the hub run from the start of the application to its end, around whatever else it has to run."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[Any]:
        listening = asyncio.create_task(operations.hub.run(), name="event hub")
        try:
            async with inner(application) as state:
                yield state
        finally:
            operations.stop()
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening
            await operations.health.close()

    app.router.lifespan_context = lifespan


def _describe_refusals(app: FastAPI) -> None:
    """Add what the layers may answer to every operation of the API's description."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        for path, operations in schema.get("paths", {}).items():
            for method, operation in operations.items():
                _add_refusals(path, method, operation["responses"])
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


def _add_refusals(path: str, method: str, responses: dict[str, Any]) -> None:
    refusals = {"403": _REFUSALS["403"]} if path in OPEN_PATHS else _REFUSALS
    if method == "post":
        refusals = refusals | _REFUSALS_OF_BODIES
    for status, description in refusals.items():
        responses.setdefault(status, {"description": description})
