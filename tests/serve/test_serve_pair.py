"""Two server processes over one Redis: the lock and what is known of a turn live there, not in a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import openai
import pytest
from arq.connections import ArqRedis
from openai import AsyncOpenAI
from server_process import server_process, turns_of
from serving import ask, ask_streaming
from talk import model_waits

from memora.offline_model import OfflineModel
from memora.settings import Settings

TURNS = 10
KEY = {"Idempotency-Key": "the-same"}


@pytest.fixture
async def clients(
    settings: Settings,
    redis: ArqRedis,  # noqa: ARG001  # empties the server
    offline: OfflineModel,
) -> AsyncIterator[tuple[AsyncOpenAI, AsyncOpenAI]]:
    """A client of each of the two."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server_process(settings, offline)) for _ in range(2)]
        one, other = [await stack.enter_async_context(server.client()) for server in servers]
        yield one, other


async def test_two_tabs_at_two_servers_never_interleave(
    clients: tuple[AsyncOpenAI, AsyncOpenAI], redis: ArqRedis
) -> None:
    """Ten turns from each side at the same time, plain and streaming: each is there once, answer behind question."""
    conversation = (await clients[0].conversations.create()).id

    async def talk(name: str, client: AsyncOpenAI) -> list[tuple[str, str]]:
        said = []
        for number in range(TURNS):
            text = f"My {name} number {number} is called Ann{number}."
            answer = await (ask_streaming if number % 2 else ask)(client, text, conversation)
            said.append((text, answer))
        return said

    ledgers = await asyncio.gather(talk("cat", clients[0]), talk("dog", clients[1]))
    stored = await turns_of(redis, conversation)
    turns = list(zip(stored[::2], stored[1::2], strict=True))
    assert sorted(turns) == sorted(ledgers[0] + ledgers[1])
    for ledger in ledgers:
        assert [turn for turn in turns if turn in ledger] == ledger


async def test_a_key_is_known_to_both(
    clients: tuple[AsyncOpenAI, AsyncOpenAI], redis: ArqRedis, offline: OfflineModel
) -> None:
    """The same key at the other server, while the first still answers, waits and gets that answer; then a replay."""
    text = "I live in Taipei."
    conversation = (await clients[0].conversations.create()).id
    offline.hold("answer")
    first = asyncio.create_task(ask_streaming(clients[0], text, conversation, extra_headers=KEY))
    await model_waits(offline)
    second = asyncio.create_task(ask_streaming(clients[1], text, conversation, extra_headers=KEY))
    offline.release()
    answers = await asyncio.gather(first, second)
    third = await ask_streaming(clients[1], text, conversation, extra_headers=KEY)
    assert {*answers, third} == {answers[0]}
    assert await turns_of(redis, conversation) == [text, answers[0]]
    with pytest.raises(openai.UnprocessableEntityError):
        await ask(clients[1], "Something else.", conversation, extra_headers=KEY)
