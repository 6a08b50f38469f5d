"""The HTTP server of a test, over the test's Redis and model, on a free port of the loopback; and clients of it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from openai import APIStatusError, AsyncOpenAI, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from polling import eventually

from memora.bootstrap import Memora, open_memora
from memora.settings import Settings
from memora.web.app import create_app
from memora.web.server import WebServer, listen

KEY = "sk-memora-test-0123456789"
"""What clients send; a server without keys of its own takes any."""

START_SECONDS = 10.0
STOP_SECONDS = 2.0


@dataclass(frozen=True)
class Serving:
    """A server that runs: the engine behind it, and where it listens."""

    memora: Memora
    port: int

    @property
    def root(self) -> str:
        """The address without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """What a client takes as its base URL."""
        return f"{self.root}/v1"

    def client(self, port: int | None = None, **options: Any) -> AsyncOpenAI:
        """The official client, which is to be closed; `port` is that of something in between."""
        return AsyncOpenAI(**_client_options(port or self.port, options))

    def sync_client(self, **options: Any) -> OpenAI:
        """The same without an event loop, for a thread."""
        return OpenAI(**_client_options(self.port, options))

    def http(self, **options: Any) -> httpx2.AsyncClient:
        """A plain HTTP client, which is to be closed."""
        headers = {"authorization": f"Bearer {KEY}", **options.pop("headers", {})}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=20, trust_env=False, **options)

    async def history(self, conversation_id: str) -> list[str]:
        """What is stored, oldest first."""
        return [item.content async for item in self.memora.store.messages(conversation_id) if not item.absent]

    async def turns(self, conversation_id: str) -> list[tuple[str, str]]:
        """The stored history as pairs of a question and its answer."""
        said = [(item.role, item.content) async for item in self.memora.store.messages(conversation_id)]
        assert [role for role, _ in said] == ["user", "assistant"] * (len(said) // 2)
        texts = [text for _, text in said]
        return list(zip(texts[::2], texts[1::2], strict=True))

    async def turns_become(self, conversation_id: str, number: int) -> list[tuple[str, str]]:
        """Wait until so many turns are stored; return them."""

        async def stored() -> bool:
            return len(await self.turns(conversation_id)) >= number

        await eventually(stored)
        return await self.turns(conversation_id)

    async def is_free(self, conversation_id: str) -> bool:
        """Whether no turn holds the lock."""
        return not await self.memora.storage.redis.exists(f"memora:{{0}}:{conversation_id}:lock")


@asynccontextmanager
async def serve(settings: Settings) -> AsyncIterator[Serving]:
    """Serve as long as the block lasts; leaving it stops the server as Ctrl-C does."""
    async with open_memora(settings) as memora:
        listening = listen("127.0.0.1", 0)
        port = int(listening.getsockname()[1])
        server = WebServer(create_app(memora), listening, STOP_SECONDS)
        running = asyncio.create_task(server.run(), name="server under test")
        starting = asyncio.create_task(server.started())
        try:
            await asyncio.wait({running, starting}, return_when=asyncio.FIRST_COMPLETED, timeout=START_SECONDS)
            assert starting.done(), "the server did not start"
            yield Serving(memora, port)
        finally:
            starting.cancel()
            server.stop()
            await asyncio.wait_for(running, STOP_SECONDS + START_SECONDS)


async def ask(client: AsyncOpenAI, text: str, conversation: str, **more: Any) -> str:
    """One plain turn; the answer."""
    response: Response = await client.responses.create(model="memora", input=text, conversation=conversation, **more)
    assert response.status == "completed"
    return response.output_text


async def ask_streaming(client: AsyncOpenAI, text: str, conversation: str, **more: Any) -> str:
    """One streaming turn; the answer, the same in the pieces and in the last event."""
    events = await stream_events(client, text, conversation, **more)
    last = events[-1]
    assert last.type == "response.completed"
    assert text_of(events) == last.response.output_text
    return last.response.output_text


def text_of(events: Iterable[ResponseStreamEvent]) -> str:
    """The pieces of an answer put together."""
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def stream_events(client: AsyncOpenAI, text: str, conversation: str, **more: Any) -> list[ResponseStreamEvent]:
    """Every event of one streaming turn."""
    async with await client.responses.create(
        model="memora", input=text, conversation=conversation, stream=True, **more
    ) as stream:
        return [event async for event in stream]


class Line:
    """A connection of one's own, for what a client library would never do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, request: bytes, *, receive_buffer: int | None = None) -> Line:
        """Connect and send."""
        line = socket.socket()
        if receive_buffer:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        line.setblocking(False)
        await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=line, limit=2_048)
        writer.write(request)
        await writer.drain()
        return cls(reader, writer)

    async def status(self) -> int:
        """The status of the reply."""
        first = await asyncio.wait_for(self.reader.readline(), 15)
        return int(first.split()[1]) if first else 0

    def leave(self) -> None:
        """Hang up without a word."""
        self._writer.transport.abort()


async def failure_of_stream(client: AsyncOpenAI, text: str, conversation: str) -> str:
    """The code that a streaming turn fails with: as a status, or as an event if the stream had begun."""
    try:
        events = await stream_events(client, text, conversation)
    except APIStatusError as error:
        return error.code or ""
    assert events[-1].type == "response.failed"
    (code,) = [event.code for event in events if event.type == "error"]
    return code or ""


def request_bytes(port: int, method: str, target: str, body: object = None, **headers: str) -> bytes:
    """An HTTP request as it goes over the wire, for what a client library would never send."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = {
        "host": f"127.0.0.1:{port}",
        "authorization": f"Bearer {KEY}",
        "content-type": "application/json",
        "content-length": str(len(content)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + content


def turn_body(text: str, conversation: str | None = None, **more: Any) -> dict[str, Any]:
    """The body of a turn."""
    return {"model": "memora", "input": text, **({"conversation": conversation} if conversation else {}), **more}


def _client_options(port: int, options: dict[str, Any]) -> dict[str, Any]:
    return {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": KEY, "timeout": 30, **options}
