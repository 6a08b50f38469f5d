"""What the server's tests share: a server over the emptied Redis and the scriptable model, a client, a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from arq.connections import ArqRedis
from openai import AsyncOpenAI
from serving import Serving, serve

from memora.settings import Settings


@pytest.fixture
async def serving(settings: Settings, redis: ArqRedis) -> AsyncIterator[Serving]:  # noqa: ARG001  # empties the server
    """The server under test."""
    async with serve(settings) as running:
        yield running


@pytest.fixture
async def client(serving: Serving) -> AsyncIterator[AsyncOpenAI]:
    """The official client; it gives up at once."""
    async with serving.client(max_retries=0) as made:
        yield made


@pytest.fixture
async def conversation(client: AsyncOpenAI) -> str:
    """An empty conversation."""
    return (await client.conversations.create()).id
