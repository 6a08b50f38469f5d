"""The fold worker for arq's own command: `arq workers.fold_worker.WorkerSettings`.

Owns nothing: it hands what `memora worker` runs to arq's command. That command has no supervisor, so whoever runs it
has to start it again when Redis was away; `memora worker` outlives that by itself.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from memora.bootstrap import Memora, open_memora
from memora.embedded_redis import EmbeddedRedis
from memora.errors import MemoraError
from memora.redis_connection import open_redis
from memora.settings import Settings, load_settings
from memora.storage import data_directory
from memora.worker import STOP_GRACE_SECONDS, arq_options, new_heartbeat_key


def worker_settings(settings: Settings) -> type:
    """The class that arq's command takes.

    Raises:
        SettingsError, StoreError: the private Redis, started here if none is configured, does not come up.
    """
    embedded = None if settings.redis_url else EmbeddedRedis(data_directory(settings), server=settings.redis_server)
    url = embedded.start().url if embedded else _configured_url(settings)
    holder = _Holder(settings)

    async def on_shutdown(ctx: dict[str, Any]) -> None:  # noqa: ARG001  # arq passes it
        await holder.close()
        if embedded:
            await asyncio.to_thread(embedded.stop)

    options = {
        **arq_options(settings, holder.fold, heartbeat_key=new_heartbeat_key()),
        "redis_pool": open_redis(url),
        "on_startup": staticmethod(holder.open),
        "on_shutdown": staticmethod(on_shutdown),
        # SIGTERM lets running folds finish for this long, then leaves them untouched.
        "job_completion_wait": int(STOP_GRACE_SECONDS),
    }
    return type("WorkerSettings", (), options)


class _Holder:
    """Keeps Memora open in a task of its own, since arq starts up in one task and shuts down in another."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[Memora] | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, ctx: dict[str, Any]) -> None:
        self._opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(self._opened), name="memora")
        ctx["fold_worker"] = (await self._opened).worker()

    async def close(self) -> None:
        self._closing.set()
        if self._task:
            await self._task

    async def fold(self, ctx: dict[str, Any], *job: Any) -> None:
        await ctx["fold_worker"].fold_job(ctx, *job)

    async def _hold(self, opened: asyncio.Future[Memora]) -> None:
        try:
            async with open_memora(self._settings) as memora:
                opened.set_result(memora)
                sweeping = asyncio.create_task(memora.worker().sweep_forever(), name="sweep")
                await self._closing.wait()
                sweeping.cancel()
                await asyncio.wait({sweeping})
        except MemoraError as error:
            if opened.done():
                raise
            opened.set_exception(error)


def _configured_url(settings: Settings) -> str:
    return settings.redis_url.get_secret_value() if settings.redis_url else ""


def __getattr__(name: str) -> Any:
    """Make `WorkerSettings` when arq asks for it: importing this module reads no settings and starts nothing."""
    if name != "WorkerSettings":
        raise AttributeError(name)
    try:
        return worker_settings(load_settings())
    except MemoraError as error:
        sys.stderr.write(f"memora: {error}\n")
        raise SystemExit(2) from None
