"""One HTTP/1.1 connection of the offline model: h11 on an asyncio stream, with its hands on the socket.

Owns reading requests within limits, writing replies in pieces, noticing that the client left, and breaking a connection
on purpose. Must not know what a request means.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import anyio
import h11

from memora.offline_model.errors import Rejected

MAX_HEADER_BYTES: Final = 64 * 1024
MAX_BODY_BYTES: Final = 8 * 1024 * 1024
IDLE_SECONDS: Final = 60.0
"""How long a connection may stand idle. Clients drop theirs after 5 s, so it is never the server that races them."""

_REQUEST_SECONDS: Final = 30.0
_WRITE_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 1.0
_READ_BYTES: Final = 64 * 1024

Headers = Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A whole request; header names are lower case, the path is decoded."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


class Wire:
    """The server's end of one connection. One task uses it, but for `wait_until_left`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._is_bodiless = False

    async def next_request(self) -> HttpRequest | None:
        """Read a request; None when the client closed the connection or said nothing for `IDLE_SECONDS`.

        Raises:
            Rejected: what came is no HTTP, too large or too slow; the connection can only be closed after the reply.
            OSError: the connection broke.
        """
        try:
            return await self._read_request()
        except h11.RemoteProtocolError as error:
            raise Rejected(error.error_status_hint, str(error)) from None

    async def wait_until_left(self) -> None:
        """Return when the client is gone, or sends so much ahead that it is no longer worth serving."""
        with suppress(OSError):
            while data := await self._reader.read(_READ_BYTES):
                self._protocol.receive_data(data)
                if len(self._protocol.trailing_data[0]) > MAX_HEADER_BYTES:
                    return

    @property
    def can_reply(self) -> bool:
        """Whether no byte of a reply has been sent yet."""
        return self._protocol.our_state in {h11.IDLE, h11.SEND_RESPONSE}

    @property
    def has_replied(self) -> bool:
        """Whether the reply to the current request was sent to its end."""
        return self._protocol.our_state in {h11.DONE, h11.MUST_CLOSE}

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole reply."""
        sized = [*headers, ("content-length", str(len(body)))]
        await self._write(self._head(status, sized), self._data(body), h11.EndOfMessage())

    async def send_head(self, status: int, headers: Headers) -> None:
        """Begin a reply; without `content-length` its body is chunked."""
        await self._write(self._head(status, headers))

    async def send_piece(self, piece: bytes) -> None:
        """Send a part of the body."""
        await self._write(self._data(piece))

    async def send_end(self) -> None:
        """End a reply begun with `send_head`."""
        await self._write(h11.EndOfMessage())

    def start_next(self) -> bool:
        """Make ready for another request on this connection; False if it has to be closed."""
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        return True

    def reset(self) -> None:
        """Break the connection with a TCP reset: the client sees "connection reset by peer"."""
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    async def close(self) -> None:
        """Close after what was written has gone out; whatever a rejected client is still sending is thrown away."""
        with suppress(OSError), anyio.move_on_after(_CLOSE_SECONDS):
            if self._protocol.their_state in {h11.SEND_BODY, h11.ERROR}:
                await self._throw_away_the_rest()
            self._writer.close()
            await self._writer.wait_closed()
        self.abort()

    def abort(self) -> None:
        """Drop the connection and everything not sent yet."""
        self._writer.transport.abort()

    async def _read_request(self) -> HttpRequest | None:
        head: object = None
        with anyio.move_on_after(IDLE_SECONDS):
            head = await self._next_event()
        if not isinstance(head, h11.Request):
            return None
        self._is_bodiless = head.method == b"HEAD"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        with anyio.move_on_after(_REQUEST_SECONDS):
            body = await self._read_body(int(headers.get("content-length", "0")))
            return _request(head, headers, body)
        raise Rejected(408, f"The request did not arrive within {_REQUEST_SECONDS:g} s.")

    async def _read_body(self, announced_bytes: int) -> bytes:
        _check_size(announced_bytes)
        if self._protocol.they_are_waiting_for_100_continue:
            await self._write(h11.InformationalResponse(status_code=100, headers=[]))
        body = bytearray()
        while isinstance(event := await self._next_event(), h11.Data):
            body += event.data
            _check_size(len(body))
        return bytes(body)

    async def _next_event(self) -> object:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await self._reader.read(_READ_BYTES))
        return event

    def _head(self, status: int, headers: Headers) -> h11.Response:
        return h11.Response(status_code=status, headers=list(headers))

    def _data(self, piece: bytes) -> h11.Data:
        return h11.Data(data=b"" if self._is_bodiless else piece)

    async def _write(self, *events: h11.Event) -> None:
        self._writer.write(b"".join(self._protocol.send(event) or b"" for event in events))
        try:
            with anyio.fail_after(_WRITE_SECONDS):
                await self._writer.drain()
        except TimeoutError:
            raise ConnectionAbortedError(f"the client read nothing for {_WRITE_SECONDS:g} s") from None

    async def _throw_away_the_rest(self) -> None:
        # Closing with unread bytes resets the connection, and the client would never see why it was rejected.
        self._writer.write_eof()
        while await self._reader.read(_READ_BYTES):
            pass


def _request(head: h11.Request, headers: Mapping[str, str], body: bytes) -> HttpRequest:
    target = urlsplit(head.target.decode("latin-1"))
    return HttpRequest(
        method=head.method.decode("latin-1"),
        path=unquote(target.path),
        query=dict(parse_qsl(target.query)),
        headers=headers,
        body=body,
    )


def _check_size(size_bytes: int) -> None:
    if size_bytes > MAX_BODY_BYTES:
        raise Rejected(413, f"The request body is larger than {MAX_BODY_BYTES:,} bytes.", code="request_too_large")
