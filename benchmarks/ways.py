"""The ways to have an answer that the benchmarks compare, each as one call that says when what happened.

Owns the same work for all: instructions, summary, three turns word for word and a question. `bare` is the official
client with its typed stream and no memory; `thin` writes the same request to a socket, and is what the endpoint alone
takes; `memora` is the engine in this process; `inline` is the same engine as people build it without a worker: it folds
in the path of the request and has each context counted by the endpoint; `http` is `memora serve`, asked over a socket.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import openai
from arq.connections import ArqRedis
from endpoint import STAMP_DIGITS, SUMMARY
from measuring import until

from memora.bootstrap import Memora
from memora.chat import ChatService
from memora.core.conversation import Conversation, Message
from memora.core.tokens import count_text_tokens
from memora.core.window import Context, select_context
from memora.fold import Folded
from memora.store import Turn

QUESTION: Final = "What is the difference between journey and travel? Please give me two short examples."
ANSWER: Final = "A journey is one trip from one place to another. Travel is going to places in general. " * 2
WINDOW_MESSAGES: Final = 6
_STAMP: Final = re.compile(rb'"delta": ?"(\d{%d})' % STAMP_DIGITS)
_END: Final = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Observed:
    """One turn, in nanoseconds from the call: the request at the endpoint, the first word here, the end."""

    before_model: int
    first_word: int
    whole: int


class Way(Protocol):
    """One way to have an answer."""

    async def turn(self, conversation_id: str) -> Observed:
        """Ask the question in this conversation, and stream the answer to its end."""


class Stopwatch:
    """Takes the times of one turn."""

    def __init__(self) -> None:
        self._arrived = self._first = 0
        self._started = time.monotonic_ns()

    def first_word(self, stamp: str | bytes) -> None:
        """The first word is here; it says when the request was at the endpoint."""
        if not self._first:
            self._first = time.monotonic_ns()
            self._arrived = int(stamp)

    def stop(self) -> Observed:
        """The answer is complete."""
        assert self._first, "there was no first word"
        started = self._started
        return Observed(self._arrived - started, self._first - started, time.monotonic_ns() - started)


class Bare:
    """The official client, with typed parameters and events, and a context that somebody else has made."""

    def __init__(self, url: str, context: Context) -> None:
        self._client = openai.AsyncOpenAI(api_key="benchmark", base_url=url, max_retries=0)
        self._instructions = context.request.instructions
        self._input: Any = [{"role": role, "content": content} for role, content in context.request.messages]

    async def turn(self, conversation_id: str) -> Observed:  # noqa: ARG002  # it remembers nothing
        """Stream one answer."""
        watch = Stopwatch()
        stream = await self._client.responses.create(
            model="benchmark", instructions=self._instructions, input=self._input, store=False, stream=True
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                watch.first_word(event.delta[:STAMP_DIGITS])
        return watch.stop()


class Thin:
    """A socket and the bytes of a request; `body` gets the conversation if there is a place for it."""

    def __init__(self, url: str, body: dict[str, Any], *, remembers: bool = False) -> None:
        address, _, path = url.removeprefix("http://").partition("/")
        self._host, _, self._port = address.partition(":")
        self._head = f"POST /{path}/responses HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
        self._body, self._remembers = body, remembers
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def turn(self, conversation_id: str) -> Observed:
        """Stream one answer."""
        watch = Stopwatch()
        place = {"conversation": conversation_id} if self._remembers else {}
        body = json.dumps({**self._body, **place}, separators=(",", ":")).encode()
        connection = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, int(self._port))
        reader, writer = connection
        writer.write(f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body)
        received, first = bytearray(), False
        while not received.endswith(_END):
            data = await reader.read(65_536)
            received += data
            if not data or not received.startswith(b"HTTP/1.1 200"):
                raise ConnectionError(f"no answer: {bytes(received[:1_000])!r}")
            if not first and (stamp := _STAMP.search(received)):
                watch.first_word(stamp[1])
                first = True
        self._idle.append(connection)
        return watch.stop()

    def close(self) -> None:
        """Close the connections."""
        for _, writer in self._idle:
            writer.close()


class Engine:
    """Memora in this process."""

    def __init__(self, memora: Memora) -> None:
        self._memora = memora

    async def turn(self, conversation_id: str) -> Observed:
        """One turn, stored."""
        return await _reply(Stopwatch(), self._memora.chat, conversation_id)


class Inline:
    """The same parts without a worker: what is pending is folded first, and the endpoint counts every context."""

    def __init__(self, memora: Memora) -> None:
        self._memora = memora
        settings = memora.settings.model_copy(update={"token_counter": "api"})
        self._chat = ChatService(settings, memora.store, memora.client)

    async def turn(self, conversation_id: str) -> Observed:
        """One turn, stored, behind a fold."""
        watch = Stopwatch()
        outcome = await self._memora.folds.fold(conversation_id)
        assert isinstance(outcome, Folded), "there has to be something to fold"
        return await _reply(watch, self._chat, conversation_id)


async def _reply(watch: Stopwatch, chat: ChatService, conversation_id: str) -> Observed:
    async def emit(piece: str) -> None:
        watch.first_word(piece[:STAMP_DIGITS])

    await chat.reply(conversation_id, QUESTION, emit)
    return watch.stop()


def question_and_answer() -> tuple[Message, Message]:
    """A turn as it is stored."""
    return (
        Message("user", QUESTION, count_text_tokens(QUESTION)),
        Message("assistant", ANSWER, count_text_tokens(ANSWER)),
    )


async def grow(memora: Memora, name: str, messages: int, *, pending: int = 0) -> Conversation:
    """A conversation of this many messages of which all but the window, and what shall be pending, are folded."""
    redis, settings = memora.storage.redis, memora.settings
    user, assistant = question_and_answer()
    context = select_context(Conversation(name), settings.instructions_text, QUESTION, settings.budget)
    await memora.store.append(name, Turn("first", "", user, assistant, context, WINDOW_MESSAGES, 300, 60))
    history, summary = (f"memora:{{0}}:{name}:{part}" for part in ("history", "summary"))
    records = await redis.lrange(history, 0, -1)  # type: ignore[misc]  # annotated as sync and async at once
    missing = messages // 2 - 1
    for turns in (*[500] * (missing // 500), missing % 500):
        if turns:
            await redis.rpush(history, *(records * turns))  # type: ignore[misc]  # likewise
    folded = messages - WINDOW_MESSAGES - pending
    fields = {
        "message_count": messages,
        "summarized_message_count": folded,
        "summary": SUMMARY,
        "summary_tokens": count_text_tokens(SUMMARY),
        "seen_summarized_message_count": folded,
    }
    await redis.hset(summary, mapping=fields)  # type: ignore[misc]  # likewise
    return await memora.store.load(name, messages)


async def restore(redis: ArqRedis, name: str, messages: int) -> None:
    """Take the last turn off again, with what it asked for, so that the next one meets the same conversation."""
    async with redis.pipeline(transaction=False) as pipe:
        pipe.ltrim(f"memora:{{0}}:{name}:history", 0, messages - 1)
        pipe.hset(f"memora:{{0}}:{name}:summary", "message_count", str(messages))
        pipe.delete("memora:{0}:pending", "memora:{0}:queue")
        await pipe.execute()


async def copies(redis: ArqRedis, name: str, names: Sequence[str]) -> None:
    """The same conversation again under other names."""
    async with redis.pipeline(transaction=False) as pipe:
        for copy in names:
            for part in ("history", "summary"):
                pipe.copy(f"memora:{{0}}:{name}:{part}", f"memora:{{0}}:{copy}:{part}", replace=True)
        await pipe.execute()


async def remove(redis: ArqRedis, names: Sequence[str]) -> None:
    """All keys of these conversations, and everything that waits."""
    parts = ("history", "summary", "folds", "turns", "context", "events", "lock")
    keys = [f"memora:{{0}}:{name}:{part}" for name in names for part in parts]
    await redis.delete(*keys, "memora:{0}:pending", "memora:{0}:queue")
    await redis.zrem("memora:{0}:conversations", *names)


async def caught_up(memora: Memora) -> None:
    """Wait until nothing is due any more."""

    async def nothing_waits() -> bool:
        return not await memora.storage.redis.exists("memora:{0}:pending", "memora:{0}:queue")

    await until(nothing_waits)
