"""uvicorn's connection with an end to patience: the head of a request comes within seconds, and is not endless.

Owns what is said where no request has been understood yet. Must not know what is served.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from memora.web.refusals import Refusal

HEAD_SECONDS: Final = 10.0
"""From the connection, or from the first byte of the next request on it, to the end of the head."""

MOST_HEAD_BYTES: Final = 65_536

_HEAD: Final = b"HTTP/"


class _HeadWithBody(asyncio.Transport):
    """A transport that sends the head of a reply together with what is written next, or soon if nothing is.

    Sending wakes the client, which costs the sender most of what a small write costs. What comes after the head is sent
    as it is written: under load each turn of the event loop takes milliseconds, and nothing is to wait for another one.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send this now, unless it is a head."""
        head, self._head = self._head, b""
        if not head and data[:5] == _HEAD:
            self._head = bytes(data)
            self._loop.call_soon(self._send)
        else:
            self._transport.write(head + data)

    def close(self) -> None:
        """Close when everything is sent."""
        self._send()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._head = b""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closing or closed."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the connection."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Receive no more for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        self._transport.resume_reading()

    def _send(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


class Protocol(HttpToolsProtocol):
    """One connection; requests come one after the other."""

    head_seconds = HEAD_SECONDS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0
        self._in_head = True
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Wait for the first request, but not for ever."""
        super().connection_made(_HeadWithBody(transport, self.loop))
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """There is nothing left to wait for."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on. What comes in the same piece behind a head is its body, or the next head: no need to be exact."""
        if self._patience is None and self._in_head:
            self._wait_for_head()
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(Refusal(431, "headers_too_large", f"The head is larger than {MOST_HEAD_BYTES:,} bytes."))

    def on_headers_complete(self) -> None:
        """The head is there; its body has a deadline of its own."""
        self._stop_waiting()
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next thing that comes is a head."""
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Say in OpenAI's form that this is no HTTP."""
        self._refuse(Refusal(400, "invalid_request", msg))

    def _wait_for_head(self) -> None:
        late = Refusal(408, "request_timeout", "The request did not arrive in time.")
        self._patience = self.loop.call_later(self.head_seconds, self._refuse, late)

    def _stop_waiting(self) -> None:
        if self._patience:
            self._patience.cancel()
            self._patience = None

    def _refuse(self, refusal: Refusal) -> None:
        """Answer by hand, and close."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        status, body = HTTPStatus(refusal.status), refusal.body
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        )
        self.transport.write("\r\n".join((*lines, "", "")).encode() + body)
        self.transport.close()
