"""What the tests stand on: one real private server for each test process, emptied before each test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from hypothesis import settings as hypothesis_settings

from memora.bootstrap import Memora, open_memora
from memora.embedded_redis import EmbeddedRedis
from memora.offline_model import OfflineModel
from memora.redis_connection import close_redis, open_redis
from memora.settings import Settings
from memora.store import ConversationStore

# A busy machine is no failure, so there is no deadline. `--hypothesis-profile=thorough` looks for the rare case.
hypothesis_settings.register_profile("usual", deadline=None, max_examples=40)
hypothesis_settings.register_profile("thorough", deadline=None, max_examples=1_000)
hypothesis_settings.load_profile("usual")


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> Iterator[None]:
    """No setting of the person who runs the tests leaks into them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("MEMORA_", "OPENAI_")) or name in ("REDIS_URL", "NO_COLOR"):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A real server on a socket of its own."""
    with EmbeddedRedis(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
async def redis(redis_server: EmbeddedRedis) -> AsyncIterator[ArqRedis]:
    """A client of the emptied server."""
    client = open_redis(redis_server.url)
    await client.flushall()
    yield client
    await close_redis(client)


@pytest.fixture
async def store(redis: ArqRedis) -> ConversationStore:
    """The store over the emptied server."""
    return ConversationStore(redis)


@pytest.fixture
async def offline() -> AsyncIterator[OfflineModel]:
    """The offline model, scriptable."""
    async with OfflineModel(scriptable=True) as model:
        yield model


@pytest.fixture
def settings(redis_server: EmbeddedRedis, offline: OfflineModel, tmp_path: Path) -> Settings:
    """Settings that point to the server and the scriptable model; quick to retry."""
    return Settings(
        _env_file=None,
        redis_url=redis_server.url,
        openai_api_key="test-key-0123",
        openai_base_url=offline.url,
        data_dir=tmp_path,
        fold_retry_seconds=0.1,
        fold_lease_seconds=1.0,
    )


@pytest.fixture
async def memora(settings: Settings, redis: ArqRedis) -> AsyncIterator[Memora]:  # noqa: ARG001  # empties the server
    """Memora as a chat and a worker both see it, over the emptied server."""
    async with open_memora(settings) as opened:
        # What the client loads at its first call would count against the short deadlines of some tests.
        opened.client.warm_up()
        yield opened
