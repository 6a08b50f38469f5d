"""The log of the server: one line a request, with ids and figures only, and the id of the request on every reply.

Owns what is said of a request: never its content, its keys, or what stands behind the question mark.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
import traceback
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memora.chat import TurnResult
from memora.settings import Settings
from memora.web.metrics import Metrics
from memora.web.refusals import Refusal

logger = logging.getLogger(__name__)

_UNKNOWN_ROUTE: Final = "other"
"""Paths that are none of ours would make a label each."""

_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_LEFT_EARLY: Final = 499
_SAFE_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_BROKEN: Final = Refusal(
    500, "server_error", "The server failed; its log says why under this request id.", "server_error"
)


@dataclass(slots=True)
class RequestNotes:
    """What becomes known of a request while it is answered."""

    request_id: str
    status: int = 0
    conversation: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None


_current: ContextVar[RequestNotes | None] = ContextVar("request_notes", default=None)


def note_turn(result: TurnResult) -> None:
    """Add the figures of a turn to the line of the request that asked for it."""
    notes = _current.get()
    if notes is not None:
        stats = result.stats
        notes.conversation = notes.conversation or result.conversation_id
        notes.input_tokens = (
            stats.counted_input_tokens if stats.actual_input_tokens is None else stats.actual_input_tokens
        )
        notes.output_tokens = stats.output_tokens


class RequestLog:
    """The outermost layer: names each request, counts it, logs it, and answers where everything else has failed."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        notes = RequestNotes(f"req_{secrets.token_hex(16)}")
        scope.setdefault("state", {})["request_id"] = notes.request_id
        started = time.monotonic()
        token = _current.set(notes)
        self._metrics.in_flight.inc()
        try:
            await self._answer(scope, receive, _Sender(send, notes))
        finally:
            self._metrics.in_flight.dec()
            _current.reset(token)
            self._finish(scope, notes, time.monotonic() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: _Sender) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            # The text of an error may hold content; where it happened does not.
            fields = {"request_id": send.notes.request_id, "error": type(error).__name__, "where": _places(error)}
            logger.error("a request failed", extra={"fields": fields})
            if send.notes.status:
                raise  # the reply is cut off, which is all that is left to tell
            await _BROKEN(scope, receive, send)

    def _finish(self, scope: Scope, notes: RequestNotes, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        route, status = _template(scope), notes.status or _LEFT_EARLY
        self._metrics.request(method, route, status, seconds)
        parameters = scope.get("path_params") or {}
        fields: dict[str, Any] = {
            "request_id": notes.request_id,
            "method": method,
            "route": route,
            "status": status,
            "seconds": round(seconds, 4),
            "conversation": notes.conversation or _known_id(parameters.get("conversation_id")),
            "input_tokens": notes.input_tokens,
            "output_tokens": notes.output_tokens,
        }
        shown = {name: value for name, value in fields.items() if value not in (None, "")}
        logger.info("request", extra={"fields": shown})


class _Sender:
    """Puts the id of the request on its reply, and what keeps browsers from guessing."""

    def __init__(self, send: Send, notes: RequestNotes) -> None:
        self._send = send
        self.notes = notes

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.notes.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.notes.request_id
            for name, value in _SAFE_HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)


class LogFormatter(logging.Formatter):
    """One line a record: JSON for programs, or `time LEVEL message name=value …` for people."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        at = datetime.fromtimestamp(record.created, UTC)
        fields: dict[str, Any] = getattr(record, "fields", {})
        message = record.getMessage()
        if record.exc_info and record.exc_info[0]:
            fields = {**fields, "error": record.exc_info[0].__name__}
        if self._as_json:
            head = {"at": at.isoformat(timespec="milliseconds"), "level": record.levelname, "message": message}
            return json.dumps({**head, **fields}, ensure_ascii=False)
        shown = " ".join(f"{name}={value}" for name, value in fields.items())
        local = at.astimezone().strftime("%H:%M:%S")
        line = f"{local} {record.levelname} {message} {shown}".rstrip()
        return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def start_log(settings: Settings, *, is_terminal: bool) -> None:
    """Log to stderr: our own from the level that was set (INFO if none was), of libraries warnings only."""
    was_set = "log_level" in settings.model_fields_set
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and (was_set or not is_terminal))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(as_json=as_json))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("memora").setLevel(settings.log_level if was_set else "INFO")
    # uvicorn logs tracebacks with the texts of errors; ours says where it was without them.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)


def _template(scope: Scope) -> str:
    route = scope.get("route")
    return getattr(route, "path_format", None) or getattr(route, "path", None) or _UNKNOWN_ROUTE


def _known_id(value: object) -> str:
    """A conversation's id if it can be one; anything else is content."""
    text = str(value or "")
    return text if len(text) <= 128 and text.replace("-", "").replace("_", "").isalnum() and text.isascii() else ""


def _places(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
