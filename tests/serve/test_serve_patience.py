"""Connections that say nothing, too little or too much: each has an end, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from arq.connections import ArqRedis
from serving import Serving, ask, request_bytes, serve

from memora.settings import Settings
from memora.web.protocol import MOST_HEAD_BYTES, Protocol


@pytest.fixture
async def serving(
    settings: Settings,
    redis: ArqRedis,  # noqa: ARG001  # empties the server
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Serving]:
    """A server with less patience than usual."""
    monkeypatch.setattr(Protocol, "head_seconds", 0.3)
    async with serve(settings) as running:
        yield running


async def reply_to(port: int, *pieces: bytes) -> tuple[int, str]:
    """Status and code of what comes back for these bytes, once the server has hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("pieces", [(), (b"GET /livez HTTP/1.1\r\nhost: x\r\n",)])
async def test_a_head_that_never_comes_is_not_waited_for(serving: Serving, pieces: tuple[bytes, ...]) -> None:
    """Silence, or half a head: 408, and the connection is closed."""
    assert await reply_to(serving.port, *pieces) == (408, "request_timeout")


async def test_the_next_request_of_a_connection_has_to_come_whole_too(serving: Serving) -> None:
    """A kept connection may be silent for long; once it begins to speak, the same holds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    writer.write(request_bytes(serving.port, "GET", "/livez"))
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split()[0])
    await reader.readexactly(length)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 1.0)
    writer.write(b"GET /livez HT")
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_an_endless_head_is_cut_short(serving: Serving) -> None:
    """431 after 64 kB, however it is made up."""
    line = b"x-filler: " + b"x" * 1_000 + b"\r\n"
    head = b"GET /livez HTTP/1.1\r\nhost: x\r\n" + line * (MOST_HEAD_BYTES // len(line) + 1)
    # Not a byte more than is read: what is unread when a connection is closed can take the reply with it.
    assert await reply_to(serving.port, head[: MOST_HEAD_BYTES + 1]) == (431, "headers_too_large")


async def test_what_is_no_http_is_told_so(serving: Serving) -> None:
    """400 in OpenAI's form."""
    assert await reply_to(serving.port, b"\x16\x03\x01\x02\x00 hello\r\n\r\n") == (400, "invalid_request")


async def test_two_hundred_silent_connections_disturb_nobody(serving: Serving) -> None:
    """While they wait for their end, others are answered; then all of them are gone."""
    lines = [await asyncio.open_connection("127.0.0.1", serving.port) for _ in range(200)]
    async with serving.client() as client:
        conversation = (await client.conversations.create()).id
        assert await ask(client, "I live in Taipei.", conversation)
    ends = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in lines)), 10)
    assert all(end.startswith(b"HTTP/1.1 408 ") for end in ends)
    for _, writer in lines:
        writer.close()
