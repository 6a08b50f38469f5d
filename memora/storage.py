"""The storage: an open Redis with conversations in it, the configured one or a private one.

Owns which server is used and what can be seen of it. Must not know the model: what only reads conversations starts
without loading it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import platformdirs
from arq.connections import ArqRedis

from memora.embedded_redis import EmbeddedRedis
from memora.errors import StoreError
from memora.fold_queue import HEARTBEAT_PREFIX
from memora.redis_connection import PubSub, close_redis, open_redis, redis_errors, redis_operation
from memora.settings import Settings
from memora.store import ConversationStore

_RESULT_CHANNELS: Final = "memora:{*}:folds"
_HINT_POLL_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class RedisHealth:
    """What can be seen of the server: what it is, and whether it keeps what it is given; `forbids`: "" for nothing."""

    server: str
    evicts: bool
    persists: bool
    clock_skew_seconds: float
    workers: int
    forbids: str


@dataclass(frozen=True, slots=True)
class Hint:
    """Something of this kind (`turn`, `fold`, `retry`, `conflict`, `deleted`, ...) has happened to a conversation.

    The kind is "" where listening has begun, or begun again: something may have been missed. Without a conversation it
    is how a fold of any of them ended.
    """

    conversation_id: str
    kind: str


class Hints:
    """One connection that listens: to the conversations that are followed and, if wanted, to how all folds end.

    It is opened with the first thing there is to listen to.
    """

    def __init__(self, pubsub: PubSub, store: ConversationStore) -> None:
        self._pubsub = pubsub
        self._store = store
        self._followed: dict[str, str] = {}
        self._counts_folds = False
        self._is_open = anyio.Event()

    async def follow(self, conversation_ids: AbstractSet[str], *, counts_folds: bool) -> None:
        """Listen to these conversations and to no others; once folds are counted, to how they end from then on.

        Raises:
            InvalidId, StoreError.
        """
        wanted = {self._store.hint_channel(conversation_id): conversation_id for conversation_id in conversation_ids}
        new, old = wanted.keys() - self._followed.keys(), self._followed.keys() - wanted.keys()
        self._followed = wanted
        with redis_operation():
            if counts_folds and not self._counts_folds:
                await self._pubsub.psubscribe(_RESULT_CHANNELS)
                self._counts_folds = True
            if new:
                await self._pubsub.subscribe(*new)
            if old:
                await self._pubsub.unsubscribe(*old)
        if wanted or self._counts_folds:
            self._is_open.set()

    async def __aiter__(self) -> AsyncGenerator[Hint]:
        """What happens, as it happens.

        Raises:
            StoreError: the connection is lost and could not be made again.
        """
        await self._is_open.wait()
        with redis_errors():
            while True:
                message = await self._pubsub.get_message(timeout=_HINT_POLL_SECONDS)
                if message is not None and (hint := self._hint(message)):
                    yield hint

    def _hint(self, message: dict[str, Any]) -> Hint | None:
        """What a message says; None for the last ones of a conversation that is not followed any more."""
        if message["type"] == "pmessage":
            return Hint("", message["data"].decode())
        conversation_id = self._followed.get(message["channel"].decode())
        if conversation_id is None:
            return None
        return Hint(conversation_id, message["data"].decode() if message["type"] == "message" else "")


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
            forbids = await self.store.missing_right()
        return RedisHealth(
            server=_server_name(server),
            evicts=memory.get("maxmemory_policy", "noeviction") != "noeviction",
            persists=bool(persistence.get("aof_enabled")) or persistence.get("rdb_saves", 0) > 0,
            clock_skew_seconds=seconds + microseconds / 1e6 - now,
            workers=workers,
            forbids=forbids,
        )

    async def workers(self) -> int:
        """How many fold workers have shown a sign of life within their interval.

        Raises:
            StoreError.
        """
        with redis_operation():
            return len([key async for key in self.redis.scan_iter(match=f"{HEARTBEAT_PREFIX}*", count=1_000)])

    async def ping(self) -> None:
        """See whether Redis answers.

        Raises:
            StoreError.
        """
        with redis_operation():
            await self.redis.ping()

    @asynccontextmanager
    async def hints(self) -> AsyncIterator[Hints]:
        """Listen, over a connection of its own.

        Raises:
            StoreError.
        """
        with redis_errors():
            async with self.redis.pubsub() as pubsub:
                yield Hints(pubsub, self.store)

    async def _info(self, *sections: str) -> list[dict[str, Any]]:
        return [await self.redis.info(section) for section in sections]


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
