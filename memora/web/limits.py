"""How much one client may ask for: requests a minute, turns at the same time, bytes of a body, seconds to send it.

Owns the counting; its own state is bounded whatever clients do. Must not know what a request means.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memora.web.refusals import Refusal, try_again

API_PREFIX: Final = "/v1/"
_MINUTE_SECONDS: Final = 60.0
_MOST_CLIENTS: Final = 10_000
"""Buckets that are kept; the one unused for longest goes first, and it is the fullest."""

BODY_SECONDS: Final = 30.0
"""Longest time for a client to send its body; at four megabytes that is a slow modem."""

_BUSY_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class RateLimit:
    """A token bucket for each client: so many requests a minute, all at once or evenly."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = anyio.current_time) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_seconds(self, client: str) -> float:
        """Count one request; 0 if it may go on, else how long to wait."""
        now, rate = self._clock(), self._per_minute / _MINUTE_SECONDS
        bucket = self._buckets.pop(client, None) or _Bucket(self._per_minute, now)
        bucket.tokens = min(self._per_minute, bucket.tokens + (now - bucket.at) * rate)
        bucket.at = now
        self._buckets[client] = bucket
        if len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / rate
        bucket.tokens -= 1
        return 0.0


class RateLimiter:
    """Refuses API requests of a key (or of an address, where no keys are set) that come too fast."""

    def __init__(self, app: ASGIApp, per_minute: int) -> None:
        self._app = app
        self._per_minute = per_minute
        self._limit = RateLimit(per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count one request."""
        seconds = self._limit.wait_seconds(_client(scope)) if _is_api(scope) else 0.0
        if seconds:
            what = f"More than {self._per_minute} requests in a minute: wait {seconds:.0f} s or slow down."
            await try_again(429, "rate_limit_exceeded", what, seconds)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class TurnLimiter:
    """Refuses work (`POST` to the API) beyond so many requests at the same time."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request in, if there is room."""
        if not (_is_api(scope) and scope["method"] == "POST"):
            await self._app(scope, receive, send)
        elif self._running >= self._most:
            what = "The server answers as many requests as it may at the same time: try again in a moment."
            await try_again(503, "server_overloaded", what, _BUSY_SECONDS)(scope, receive, send)
        else:
            self._running += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._running -= 1


class BodyLimiter:
    """Reads the whole body before anybody else does, and not a byte more than may come."""

    def __init__(self, app: ASGIApp, most_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and pass it on in one piece."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            with anyio.fail_after(self._seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            await _close(Refusal(408, "request_timeout", "The body did not arrive in time."), scope, receive, send)
            return
        if isinstance(body, Refusal):
            await _close(body, scope, receive, send)
        elif body is not None:
            await self._app(scope, _replaying(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | Refusal | None:
        """The body; None if the client has left before its end."""
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._most_bytes:
            return self._too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._most_bytes:
                return self._too_large
            if not message.get("more_body", False):
                return bytes(body)

    @property
    def _too_large(self) -> Refusal:
        return Refusal(413, "request_too_large", f"The body is larger than {self._most_bytes:,} bytes.")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """What is left of a request whose body was read: the body, then whatever comes."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


async def _close(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse, and close the connection: the rest of the body is on its way and will not be read."""
    closing = (*refusal.headers, (b"connection", b"close"))
    await Refusal(refusal.status, refusal.code, refusal.message, refusal.type, closing)(scope, receive, send)


def _is_api(scope: Scope) -> bool:
    return scope["type"] == "http" and str(scope["path"]).startswith(API_PREFIX)


def _client(scope: Scope) -> str:
    owner: str = scope.get("state", {}).get("owner", "")
    address = scope.get("client")
    return owner or (address[0] if address else "")
