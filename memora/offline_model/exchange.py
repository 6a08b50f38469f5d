"""One request and the reply to it: the ways a reply goes out, well or badly.

Owns pacing, tearing and breaking. Must not decide what is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Final

import anyio

from memora.json_bytes import encode_json
from memora.offline_model.behaviour import Timing
from memora.offline_model.faults import Delivery
from memora.offline_model.wire import HttpRequest, Wire
from memora.responses_wire import Event

AS_USUAL: Final = Delivery()
JSON: Final = "application/json"
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
HTML: Final = "text/html; charset=utf-8"

_DRIPS: Final = 20


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, the connection it came on, and the id its reply carries."""

    request: HttpRequest
    id: str
    wire: Wire

    async def send_json(self, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
        """Reply with JSON."""
        await self.send(status, encode_json(value), JSON, headers)

    async def send(self, status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        """Reply at once."""
        await self.wire.send(status, self._headers(content_type, headers or {}), body)

    async def deliver(self, value: object, delivery: Delivery) -> None:
        """Reply with JSON in the way asked for."""
        body = encode_json(value)
        if delivery.is_torn:
            await self.send(200, body[: len(body) // 2], JSON)
        elif delivery.cut_after_characters is not None:
            await self._send_head_of(body, [body.decode()[: delivery.cut_after_characters].encode()[: len(body) - 1]])
            await self.wire.close()
        elif delivery.over_seconds:
            size = -(-len(body) // _DRIPS)
            drops = [body[start : start + size] for start in range(0, len(body), size)]
            await self._send_head_of(body, drops, delivery.over_seconds / len(drops))
            await self.wire.send_end()
        else:
            await self.send(200, body, JSON)

    async def stream(self, events: Sequence[Event], delivery: Delivery, timing: Timing) -> None:
        """Reply with events, waiting before each piece of the text."""
        await self.wire.send_head(200, self._headers(EVENT_STREAM, {"cache-control": "no-cache"}))
        drip = delivery.over_seconds / max(1, sum(event.is_delta for event in events))
        pauses = chain([max(timing.first_seconds, drip)], repeat(max(timing.piece_seconds, drip)))
        for event in events:
            await anyio.sleep(next(pauses) if event.is_delta else 0)
            if delivery.is_torn and (event.is_delta or event is events[-1]):
                await self.wire.send_piece(_torn(event.encode()))
                break
            await self.wire.send_piece(event.encode())
        if delivery.cut_after_characters is None:
            await self.wire.send_end()
        else:
            await self.wire.close()

    async def _send_head_of(self, body: bytes, pieces: Iterable[bytes], delay_seconds: float = 0.0) -> None:
        """Announce a whole body and send only these pieces of it."""
        await self.wire.send_head(200, self._headers(JSON, {"content-length": str(len(body))}))
        for piece in pieces:
            await anyio.sleep(delay_seconds)
            await self.wire.send_piece(piece)

    def _headers(self, content_type: str, extra: Mapping[str, str]) -> list[tuple[str, str]]:
        usual = {"content-type": content_type, "x-request-id": self.id, "server": "memora-offline"}
        return list({**usual, **{name.lower(): value for name, value in extra.items()}}.items())


def _torn(event: bytes) -> bytes:
    """An event of the right form whose JSON ends in the middle."""
    return event[: len(event) * 2 // 3].rstrip() + b"\n\n"
