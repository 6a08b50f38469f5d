"""The connection to Redis: a bounded pool that survives restarts, and the one place where Redis errors become ours.

Owns timeouts, retries and the translation of exceptions. Must not know a single key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Final

import anyio
from arq.connections import ArqRedis
from redis import exceptions
from redis.asyncio import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.client import PubSub as PubSub  # noqa: PLC0414  # for those who listen
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.connection import HiredisRespSerializer

from memora.errors import ConversationDamaged, SettingsError, StoreError, StoreRefused, StoreUnavailable
from memora.fold_queue import QUEUE, deserialize_job, serialize_job

MAX_CONNECTIONS: Final = 32
_CONNECT_TIMEOUT_SECONDS: Final = 2.0
_SOCKET_TIMEOUT_SECONDS: Final = 5.0
"""Without it a frozen server hangs arq for ever."""

DEADLINE_SECONDS: Final = 10.0
"""Longest time of one operation. redis-py's retries nest (a command's, its connection's, a health check's), so that a
frozen server would be waited for some minutes."""

_POOL_TIMEOUT_SECONDS: Final = 5
_HEALTH_CHECK_SECONDS: Final = 30
_RETRIES: Final = 5
_RETRIED: Final = [
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    # A refused connection is raised as the bare OSError from inside connect().
    OSError,
]

_DAMAGED: Final = "DAMAGED "


def open_redis(url: str) -> ArqRedis:
    """A client for this URL; connects on first use.

    Raises:
        SettingsError: the URL cannot be read.
    """
    try:
        options: dict[str, Any] = {**_pool_options(), **_connection_options(), **parse_url(url)}
        # from_url() would override the connection class for unix:// and rediss://, so the pool is built by hand.
        options["connection_class"] = _CANCELLABLE[options["connection_class"]]
        pool = _FairPool(**options)
        pool.make_connection()  # type: ignore[no-untyped-call]  # it only makes the object, and so checks the options
    except (ValueError, TypeError, exceptions.RedisError):
        # What the URL parser says may quote a part of the password.
        raise SettingsError(
            "the Redis URL cannot be used (not shown): check its port and options, and write special characters of the "
            "password as %XX"
        ) from None
    return ArqRedis(pool, job_serializer=serialize_job, job_deserializer=deserialize_job, default_queue_name=QUEUE)


async def close_redis(client: ArqRedis) -> None:
    """Close the client and all its connections."""
    await client.aclose(close_connection_pool=True)


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turn whatever redis-py raises inside into a `StoreError`."""
    try:
        yield
    except _FAILURES as error:
        raise _translated(error) from error


class redis_operation:  # noqa: N801  # one that is entered several times in each turn: a generator costs twice as much
    """The same, and it is over after so many seconds, whatever happens."""

    def __init__(self, seconds: float = DEADLINE_SECONDS) -> None:
        self._scope = anyio.CancelScope(deadline=anyio.current_time() + seconds)

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught:
            raise _translated(TimeoutError()) from error
        if isinstance(error, _FAILURES):
            raise _translated(error) from error


_FAILURES: Final = (exceptions.RedisError, OSError)


def _translated(error: Exception) -> StoreError:
    if isinstance(error.__cause__, exceptions.RedisError):
        # What goes wrong while a connection is opened, a wrong password say, is raised as a broken connection.
        error = error.__cause__
    text = str(error)
    if text.startswith(_DAMAGED):
        key, _, problem = text.removeprefix(_DAMAGED).partition(" ")
        return ConversationDamaged(key, problem)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return StoreRefused(
            "the certificate of Redis cannot be verified, so nothing was sent: name the file of its authority with "
            "?ssl_ca_certs=FILE in MEMORA_REDIS_URL"
        )
    for kind, codes, explanation in _REFUSALS:
        if isinstance(error, kind) or text.startswith(codes):
            return StoreRefused(explanation)
    if isinstance(error, exceptions.ResponseError) and not text.startswith("BUSY "):
        return StoreError(f"Redis rejects a command: {text[:200]}")
    return StoreUnavailable("Redis does not answer: check that it runs and that MEMORA_REDIS_URL points to it")


# Inside a script the same refusals arrive as plain errors that begin with these codes.
_REFUSALS: Final[tuple[tuple[type[Exception], tuple[str, ...], str], ...]] = (
    (
        exceptions.OutOfMemoryError,
        ("OOM",),
        "Redis is full (maxmemory reached): raise maxmemory or delete conversations; nothing was stored",
    ),
    (
        exceptions.ReadOnlyError,
        ("READONLY",),
        "Redis is a read-only replica: point MEMORA_REDIS_URL to the primary; nothing was stored",
    ),
    (
        exceptions.MasterDownError,
        ("MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN"),
        "Redis takes no writes for now: see its log about its disk, its primary or its replicas; nothing was stored",
    ),
    (
        exceptions.AuthenticationError,
        ("NOAUTH", "WRONGPASS"),
        "Redis wants another password: check MEMORA_REDIS_URL",
    ),
    (
        exceptions.NoPermissionError,
        ("NOPERM", "ACL failure in script"),
        "the Redis user may not do this: its ACL must allow scripts, and to read and write the keys memora:* and arq:*",
    ),
)


def _pool_options() -> dict[str, Any]:
    return {"connection_class": Connection, "max_connections": MAX_CONNECTIONS, "timeout": _POOL_TIMEOUT_SECONDS}


def _connection_options() -> dict[str, Any]:
    return {
        "socket_timeout": _SOCKET_TIMEOUT_SECONDS,
        "socket_connect_timeout": _CONNECT_TIMEOUT_SECONDS,
        "health_check_interval": _HEALTH_CHECK_SECONDS,
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.02), _RETRIES),
        "retry_on_error": _RETRIED,
    }


class _FairPool(ConnectionPool):
    """A bounded pool in which whoever has waited longest gets the next connection.

    redis-py's own lets newcomers in first: of forty tasks on 32 connections some waited for five seconds in vain, and
    an answer that cannot be stored is lost.
    """

    def __init__(self, *, max_connections: int, timeout: float, **options: Any) -> None:
        super().__init__(max_connections=max_connections, **options)
        self._free = asyncio.Semaphore(max_connections)
        self.timeout = timeout

    async def get_connection(self, *_: object, **__: object) -> AbstractConnection:
        """A connection that is ready, once all who came before have theirs."""
        try:
            async with asyncio.timeout(self.timeout):
                await self._free.acquire()
        except TimeoutError:
            raise exceptions.ConnectionError("no connection became free in time") from None
        # It cannot fail: the semaphore has let us in.
        connection: AbstractConnection = self.get_available_connection()  # type: ignore[no-untyped-call]  # redis-py
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        """Connect it if it is not.

        redis-py also looks for bytes that nobody has read, which costs each command a turn of the event loop. There are
        none: a connection whose reply was given up is closed. One that the server has closed fails the first command,
        which is then sent again over a new one.
        """
        await connection.connect()  # type: ignore[no-untyped-call]  # redis-py

    async def release(self, connection: AbstractConnection) -> None:
        """Give a connection back."""
        try:
            await super().release(connection)
        finally:
            self._free.release()


class _CancellableSend:
    """Sends under `asyncio.timeout`, and packs with hiredis.

    redis-py 5.3 sends under `asyncio.wait_for`, and on Python 3.11 that swallows cancellations: a worker then ignores
    SIGTERM. It packs with hiredis in its blocking connection only. Everything else is redis-py's own.
    """

    def pack_command(self, *command: Any) -> list[bytes]:
        packed: list[bytes] = _SERIALIZER.pack(*command)
        return packed

    async def send_packed_command(self: Any, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect()
        elif check_health:
            await self.check_health()
        packed = command.encode() if isinstance(command, str) else command
        try:
            self._writer.writelines([packed] if isinstance(packed, bytes) else packed)
            # Only what Redis does not take at once has to be waited for.
            waits = self._writer.transport.get_write_buffer_size()
            async with asyncio.timeout(self.socket_timeout) if waits else nullcontext():
                await self._writer.drain()
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise exceptions.TimeoutError("Timeout writing to socket") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise exceptions.ConnectionError(f"Error while writing to socket: {error}") from error
        except BaseException:
            # A half-sent command leaves nothing that could be continued.
            await self.disconnect(nowait=True)
            raise


_SERIALIZER: Final = HiredisRespSerializer()


class _TcpConnection(_CancellableSend, Connection):
    pass


class _UnixConnection(_CancellableSend, UnixDomainSocketConnection):
    pass


class _TlsConnection(_CancellableSend, SSLConnection):
    pass


_CANCELLABLE: Final[dict[Any, Any]] = {
    Connection: _TcpConnection,
    UnixDomainSocketConnection: _UnixConnection,
    SSLConnection: _TlsConnection,
}
