"""The client of the servers under load: lean, so that what is measured are they.

Owns where a turn is sent, how it is tried again, and what became of it. Must not know the plan.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from memora.loadtest.plan import PlannedTurn
from memora.offline_model.judge import Outcome

TURN_SECONDS: Final = 90.0
"""After so long a turn is given up."""

_PAUSE_SECONDS: Final = 0.2
_METRICS_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)
_PIECE: Final = b'"type":"response.output_text.delta"'
_ENDINGS: Final = (b'"type":"response.completed"', b'"type":"response.incomplete"', b'"type":"response.failed"')
_NOTHING_STORED: Final = frozenset({"upstream_error", "upstream_timeout"})
_TRY_AGAIN: Final = frozenset({408, 409, 429})
"""What a server says if the same request can succeed later; its other 4xx are about the request and final."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a client knows of one turn at its end. Times are in seconds of the monotonic clock, 0 if it never came.

    `outcome` is `unknown` if nobody can say whether the turn is stored. `memory_seconds` is what the server says it
    took before it asked the model. `error` is empty if it was answered.
    """

    outcome: Outcome
    first_piece_at: float = 0.0
    ended_at: float = 0.0
    memory_seconds: float | None = None
    gap_messages: int = 0
    tries: int = 1
    error: str = ""


class Client:
    """Sends turns to servers that share a store; safe to share between tasks.

    Each turn of a conversation goes to the next server, and so does each new try: whoever gets it must know all before.
    """

    def __init__(self, urls: Sequence[str], key: str) -> None:
        self._session = aiohttp.ClientSession(
            headers={"authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=TURN_SECONDS),
        )
        self._urls = [url.rstrip("/") for url in urls]

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def begin(self) -> str:
        """Begin a conversation; its id.

        Raises:
            aiohttp.ClientError: the server does not take it.
        """
        async with self._session.post(f"{self._urls[0]}/v1/conversations", json={}, raise_for_status=True) as reply:
            return str((await reply.json())["id"])

    async def metrics(self) -> dict[str, float]:
        """The plain figures of `/metrics`; none if they cannot be had now."""
        try:
            url = f"{self._urls[0]}/metrics"
            async with self._session.get(url, raise_for_status=True, timeout=_METRICS_TIMEOUT) as reply:
                lines = (await reply.text()).splitlines()
        except (aiohttp.ClientError, TimeoutError):
            return {}
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(figure) for name, figure in pairs}

    async def turn(self, conversation_id: str, turn: PlannedTurn, key: str) -> Heard:
        """Stream one turn; tried again under its key until it is answered, refused for good, or given up."""
        body = {"model": "memora", "conversation": conversation_id, "input": turn.text, "stream": True}
        first = turn.conversation + turn.marker.turn
        until, tries, error = time.monotonic() + TURN_SECONDS, 0, ""
        while time.monotonic() < until:
            url = self._urls[(first + tries) % len(self._urls)]
            tries += 1
            try:
                heard = await self._try(url, body, key, tries)
            except (aiohttp.ClientError, TimeoutError, OSError) as failure:
                error = type(failure).__name__
            else:
                if heard.outcome != "unknown":
                    return heard
                error = heard.error
            await asyncio.sleep(_PAUSE_SECONDS)
        return Heard("unknown", tries=tries, error=error or "timeout")

    async def _try(self, url: str, body: dict[str, Any], key: str, tries: int) -> Heard:
        headers = {"Idempotency-Key": key}
        async with self._session.post(f"{url}/v1/responses", json=body, headers=headers) as reply:
            if reply.status != 200:
                code = _code(await reply.read())
                is_final = code in _NOTHING_STORED or (400 <= reply.status < 500 and reply.status not in _TRY_AGAIN)
                return Heard("failed" if is_final else "unknown", tries=tries, error=code)
            first, tail = 0.0, b""
            async for chunk in reply.content.iter_any():
                tail += chunk
                if not first and _PIECE in tail:
                    first = time.monotonic()
                if first and not any(ending in tail for ending in _ENDINGS):
                    tail = tail[tail.rfind(b"\n\n") + 2 :]
            memory = _memory_seconds(reply.headers.get("server-timing", ""))
        return _heard(tail, first, memory, tries)


def _heard(tail: bytes, first: float, memory: float | None, tries: int) -> Heard:
    """What the last events say."""
    for block in tail.split(b"\n\n"):
        data = block.partition(b"data: ")[2]
        if not any(ending in data for ending in _ENDINGS):
            continue
        response = json.loads(data)["response"]
        if response["status"] == "failed":
            return Heard("failed", tries=tries, error=str((response.get("error") or {}).get("code")))
        gap = int(response["metadata"].get("memora_gap_messages", 0))
        return Heard("ok", first, time.monotonic(), memory, gap, tries)
    return Heard("unknown", tries=tries, error="broken_off")


def _memory_seconds(header: str) -> float | None:
    _, _, milliseconds = header.partition("memory;dur=")
    return float(milliseconds) / 1e3 if milliseconds else None


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return "unreadable"
