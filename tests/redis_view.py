"""Looking at a whole Redis from outside: every key as bytes, every value as text, every command that arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from arq.connections import ArqRedis

_READERS: dict[bytes, tuple[object, ...]] = {
    b"string": ("GET",),
    b"list": ("LRANGE", 0, -1),
    b"hash": ("HGETALL",),
    b"stream": ("XRANGE", "-", "+"),
    b"zset": ("ZRANGE", 0, -1),
    b"set": ("SMEMBERS",),
}


async def command(redis: ArqRedis, *words: object) -> Any:
    """Send one command as it is."""
    return await redis.execute_command(*words)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped


async def all_keys(redis: ArqRedis) -> list[bytes]:
    """Every key, sorted."""
    return sorted(await command(redis, "KEYS", "*"))


async def dump(redis: ArqRedis) -> dict[bytes, tuple[bytes, int]]:
    """Every key with its value, byte for byte, and its absolute expiry."""
    return {key: (await redis.dump(key), await command(redis, "PEXPIRETIME", key)) for key in await all_keys(redis)}


async def places_of(redis: ArqRedis, text: str) -> list[str]:
    """Every place where a text occurs, in the name of a key or in its value."""
    found = []
    for key in await all_keys(redis):
        first, *rest = _READERS[await command(redis, "TYPE", key)]
        value = await command(redis, first, key, *rest)
        if text.encode() in key:
            found.append(f"key {key.decode()}")
        if text.encode() in repr(value).encode():
            found.append(f"value of {key.decode()}")
    return found


class Traffic:
    """What arrived at the server: `sent` by clients, `inside` by scripts on their behalf."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.inside: list[str] = []


@asynccontextmanager
async def traffic(redis: ArqRedis) -> AsyncIterator[Traffic]:
    """Every command that arrives meanwhile; complete when the block is left."""
    seen = Traffic()
    async with redis.monitor() as monitor:
        # The monitor took a connection away; whatever it takes to open another one is over with the first echo.
        await redis.echo("traffic begins")
        while (await monitor.next_command())["command"] != "ECHO traffic begins":
            pass
        yield seen
        await redis.echo("traffic ends")
        while (arrived := await monitor.next_command())["command"] != "ECHO traffic ends":
            (seen.inside if arrived["client_type"] == "lua" else seen.sent).append(arrived["command"])
