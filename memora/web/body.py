"""The body of a request: strict JSON, or a refusal in OpenAI's words.

Owns what counts as JSON here: UTF-8, finite numbers, whole characters, and no nesting that only an attack has. Must not
know what a body is about.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

MOST_LEVELS: Final = 64


class StrictRequest(Request):
    """A request whose body is strict JSON."""

    async def json(self) -> Any:
        """Decode the body, once.

        Raises:
            HTTPException: it is not JSON as everybody understands it (400).
        """
        if not hasattr(self, "_strict_json"):
            self._strict_json = _decode(await self.body())
        return self._strict_json


class StrictRoute(APIRoute):
    """A route that reads strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The usual handler, given the other kind of request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle


async def fingerprint(request: Request) -> str:
    """A name for what the body says, however it is written; the same request sent again has the same."""
    canonical = json.dumps(await request.json(), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _decode(body: bytes) -> Any:
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
        _check_depth(value, MOST_LEVELS)
        # Lone surrogates and numbers like 1e999 get through the parser, but could not be written again.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The body is not JSON: {_reason(error)}.") from None
    return value


def _check_depth(value: object, levels: int) -> None:
    if not isinstance(value, dict | list):
        return
    if not levels:
        raise ValueError("it is nested too deep")
    for inner in value.values() if isinstance(value, dict) else value:
        _check_depth(inner, levels - 1)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, UnicodeEncodeError):
        return "it holds half of a character (a lone surrogate)"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)
