"""Building everything, once, by hand, and closing it in reverse order.

Owns what is made from the settings and which of it is private (our own Redis, the offline model). Must not parse a
command line or print.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import platformdirs
from arq.connections import ArqRedis

from memora.chat import ChatService
from memora.embedded_redis import EmbeddedRedis
from memora.errors import StoreError
from memora.fold import FoldService
from memora.llm import ModelClient
from memora.offline_model import OfflineModel
from memora.redis_connection import close_redis, open_redis, redis_operation
from memora.settings import Settings
from memora.store import ConversationStore
from memora.summarizer import Summarizer
from memora.worker import HEARTBEAT_PREFIX, FoldWorker, OnFold

OFFLINE_MODEL: Final = "memora-offline"


@dataclass(frozen=True, slots=True)
class RedisHealth:
    """What can be seen of the server: what it is, and whether it keeps what it is given."""

    server: str
    evicts: bool
    persists: bool
    clock_skew_seconds: float
    workers: int


@dataclass(frozen=True)
class Storage:
    """An open Redis with conversations in it. `embedded` is set if it is our private one."""

    settings: Settings
    redis: ArqRedis
    store: ConversationStore
    embedded: EmbeddedRedis | None

    async def health(self, now: float) -> RedisHealth:
        """Look at the server; `now` is the time here in seconds since the epoch.

        Raises:
            StoreError.
        """
        with redis_operation():
            seconds, microseconds = await self.redis.time()
            server, memory, persistence = await self._info("server", "memory", "persistence")
            workers = await self.workers()
        return RedisHealth(
            server=_server_name(server),
            evicts=memory.get("maxmemory_policy", "noeviction") != "noeviction",
            persists=bool(persistence.get("aof_enabled")) or persistence.get("rdb_saves", 0) > 0,
            clock_skew_seconds=seconds + microseconds / 1e6 - now,
            workers=workers,
        )

    async def workers(self) -> int:
        """How many fold workers have shown a sign of life within their interval.

        Raises:
            StoreError.
        """
        with redis_operation():
            return len([key async for key in self.redis.scan_iter(match=f"{HEARTBEAT_PREFIX}*", count=1_000)])

    async def _info(self, *sections: str) -> list[dict[str, Any]]:
        return [await self.redis.info(section) for section in sections]


@dataclass(frozen=True)
class Memora:
    """Everything an entry point needs: conversations, answers, folds."""

    settings: Settings
    storage: Storage
    client: ModelClient
    chat: ChatService
    folds: FoldService

    @property
    def store(self) -> ConversationStore:
        """The conversations."""
        return self.storage.store

    def worker(self, on_fold: OnFold | None = None) -> FoldWorker:
        """A fold worker over the same parts."""
        return FoldWorker(self.settings, self.storage.redis, self.store, self.folds, on_fold)


@asynccontextmanager
async def open_storage(settings: Settings) -> AsyncIterator[Storage]:
    """Open Redis: the configured one, or a private one that starts with its first user and stops with its last.

    Raises:
        SettingsError, StoreError.
    """
    async with AsyncExitStack() as stack:
        embedded = None
        url = settings.redis_url.get_secret_value() if settings.redis_url else ""
        if not url:
            embedded = await stack.enter_async_context(_embedded(settings))
            url = embedded.url
        redis = open_redis(url)
        stack.push_async_callback(close_redis, redis)
        with redis_operation():
            await redis.ping()
        store = ConversationStore(redis, shards=settings.shards, ttl_seconds=settings.conversation_ttl)
        yield Storage(settings, redis, store, embedded)


@asynccontextmanager
async def open_model(settings: Settings) -> AsyncIterator[tuple[Settings, ModelClient]]:
    """Open the model's endpoint: the configured one, or the offline model. The settings come back with its name.

    Raises:
        StoreError: the offline model cannot listen.
    """
    async with AsyncExitStack() as stack:
        if settings.uses_offline_model:
            offline = await stack.enter_async_context(OfflineModel())
            settings = settings.model_copy(update={"model": OFFLINE_MODEL, "summary_model": OFFLINE_MODEL})
            client = ModelClient(api_key="offline", base_url=offline.url)
        else:
            key = settings.openai_api_key.get_secret_value() if settings.openai_api_key else "none"
            client = ModelClient(api_key=key, base_url=settings.openai_base_url)
        stack.push_async_callback(client.close)
        yield settings, client


@asynccontextmanager
async def open_memora(settings: Settings) -> AsyncIterator[Memora]:
    """Open Redis and the model and build the services over them.

    Raises:
        SettingsError, StoreError.
    """
    async with open_storage(settings) as storage, open_model(settings) as (named, client):
        summarizer = Summarizer(
            client,
            model=named.fold_model,
            limits=named.fold_limits,
            timeout_seconds=named.summary_timeout_seconds,
        )
        yield Memora(
            settings=named,
            storage=replace(storage, settings=named),
            client=client,
            chat=ChatService(named, storage.store, client),
            folds=FoldService(named, storage.store, summarizer),
        )


def data_directory(settings: Settings) -> Path:
    """Where the private Redis lives."""
    return settings.data_dir or platformdirs.user_data_path("memora", appauthor=False)


@asynccontextmanager
async def _embedded(settings: Settings) -> AsyncIterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(data_directory(settings), server=settings.redis_server)
    try:
        await anyio.to_thread.run_sync(embedded.start)
        yield embedded
    finally:
        with anyio.CancelScope(shield=True), suppress(StoreError):
            await anyio.to_thread.run_sync(embedded.stop)


def _server_name(info: dict[str, Any]) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', 'of unknown version')}"
