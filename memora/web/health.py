"""Is it alive, is it ready: what a supervisor or a load balancer asks.

Owns what counts as ready. Answers within two seconds whatever hangs, and says nothing that only an operator may know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from memora import __version__
from memora.bootstrap import Memora
from memora.errors import MemoraError, StoreError

_PATIENCE_SECONDS: Final = 1.5
_REDIS_SECONDS: Final = 1.0
_MODEL_FRESH_SECONDS: Final = 10.0
_WORKERS_FRESH_SECONDS: Final = 1.0
_SCAN_SHARE: Final = 20
"""Looking for workers walks through all keys: it may take one part in twenty of the time."""

Record = dict[str, Any]
Look = Callable[[], Awaitable[Record]]


class Probe:
    """Something looked at in the background, one look at a time; the newest answer is kept for a while."""

    def __init__(self, look: Look, fresh_seconds: float, share: int = 0) -> None:
        self._look = look
        self._fresh_seconds = fresh_seconds
        self._share = share
        self._looking: asyncio.Task[None] | None = None
        self._fresh_until = 0.0
        self._known: Record = {"status": "unknown"}

    async def latest(self, patience_seconds: float = _PATIENCE_SECONDS) -> Record:
        """What is known, after waiting so long for something newer."""
        if time.monotonic() >= self._fresh_until:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._refresh(), name="probe")
            await asyncio.wait({self._looking}, timeout=patience_seconds)
            if not self._looking.done():
                return {"status": "unknown"}
        return self._known

    async def close(self) -> None:
        """End a look that is still going on."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    async def _refresh(self) -> None:
        started = time.monotonic()
        try:
            self._known = await self._look()
        except MemoraError as error:
            self._known = {"status": "down", "code": error.code}
        now = time.monotonic()
        self._fresh_until = now + max(self._fresh_seconds, (now - started) * self._share)


class Health:
    """The state of one server and of what it stands on."""

    def __init__(self, memora: Memora) -> None:
        self._memora = memora
        self._model = Probe(self._look_at_model, _MODEL_FRESH_SECONDS)
        self._workers = Probe(self._look_for_workers, _WORKERS_FRESH_SECONDS, _SCAN_SHARE)
        self.is_stopping = False

    async def close(self) -> None:
        """End what still goes on in the background."""
        await self._model.close()
        await self._workers.close()

    async def report(self) -> Record:
        """What is well and what is not. `unavailable` is the one state in which nothing can be answered."""
        async with asyncio.TaskGroup() as looking:
            redis = looking.create_task(self._look_at_redis())
            worker = looking.create_task(self._workers.latest(_REDIS_SECONDS))
            model = looking.create_task(self._model.latest())
        parts = {"redis": redis.result(), "worker": worker.result(), "model": model.result()}
        if parts["redis"]["status"] != "ok":
            parts["worker"] = {"status": "unknown"}
        if self.is_stopping or parts["redis"]["status"] != "ok":
            status = "unavailable"
        else:
            status = "ok" if all(part["status"] == "ok" for part in parts.values()) else "degraded"
        return {"status": status, **parts}

    async def live(self, _: Request) -> Response:
        """The process answers: nothing else is looked at."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """503 where no turn could be answered; a dead worker or model is `degraded`, and no reason to be restarted."""
        report = await self.report()
        return JSONResponse(report, 503 if report["status"] == "unavailable" else 200)

    async def version(self, _: Request) -> Response:
        """What runs here."""
        return JSONResponse({"name": "memora", "version": __version__})

    async def _look_at_redis(self) -> Record:
        try:
            with anyio.fail_after(_REDIS_SECONDS):
                await self._memora.storage.ping()
        except (StoreError, TimeoutError):
            return {"status": "down"}
        return {"status": "ok"}

    async def _look_for_workers(self) -> Record:
        alive = await self._memora.storage.workers()
        return {"status": "ok" if alive else "down", "alive": alive}

    async def _look_at_model(self) -> Record:
        settings = self._memora.settings
        found = {"status": "ok", "name": settings.model, "offline": settings.uses_offline_model}
        if not settings.uses_offline_model:
            await self._memora.client.check(settings.model)
        return found
