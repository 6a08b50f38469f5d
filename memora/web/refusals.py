"""Replies that are given before a request reaches a route: OpenAI's error body, sent by hand.

Owns their form. Must not decide who is refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from memora.responses_wire import INVALID_REQUEST, error_body


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request goes no further."""

    status: int
    code: str
    message: str
    type: str = INVALID_REQUEST
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def body(self) -> bytes:
        """OpenAI's error body."""
        return json.dumps(error_body(self.message, kind=self.type, code=self.code)).encode()

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send it, as an ASGI application does. What is left of the request's body is not read."""
        body = self.body
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def try_again(status: int, code: str, message: str, seconds: float) -> Refusal:
    """A refusal that says when it will be over."""
    kind = "rate_limit_error" if status == 429 else "server_error"
    return Refusal(status, code, message, kind, ((b"retry-after", str(max(1, math.ceil(seconds))).encode()),))
