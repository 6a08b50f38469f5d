"""`memora serve`: the HTTP API until it is told to stop.

Owns what a person sees of it, and the order in which things end: first the server, then the worker beside it, then
Redis.
"""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from memora.bootstrap import Memora, open_memora
from memora.cli.exit import Exit
from memora.cli.runner import Signals, event_loop, run_command
from memora.cli.streams import is_terminal
from memora.cli.texts import Texts, texts_for
from memora.errors import StoreError
from memora.settings import load_settings
from memora.web.access import Access
from memora.web.app import create_app
from memora.web.logs import start_log
from memora.web.server import WebServer, listen, url_of


@dataclass(slots=True)
class _Run:
    """One run of the command."""

    server: WebServer
    texts: Texts
    stopped_by: list[signal.Signals] = field(default_factory=list)

    def take_signal(self, number: signal.Signals) -> bool:
        """The first signal lets answers finish; the second ends everything at once."""
        if self.stopped_by:
            return False
        self.stopped_by.append(number)
        _tell(self.texts.server_stopping)
        self.server.stop()
        return True


def run(*, host: str | None, port: int | None, offline: bool) -> int:
    """Serve. Returns the exit code."""
    return run_command(partial(_serve, wishes(host=host, port=port, offline=offline)), loop=event_loop())


def wishes(*, host: str | None, port: int | None, offline: bool) -> dict[str, Any]:
    """What the command line says, as settings."""
    said = {"host": host, "port": port, "offline": offline or None}
    return {name: value for name, value in said.items() if value is not None}


async def _serve(overrides: dict[str, Any], signals: Signals) -> int:
    settings = load_settings(**overrides)
    Access.of(settings)
    start_log(settings, is_terminal=is_terminal(sys.stderr))
    with closing(listen(settings.host, settings.port)) as listening:
        async with open_memora(settings) as memora:
            server = WebServer(create_app(memora), listening, settings.shutdown_grace_seconds)
            running = _Run(server, texts_for(settings.lang))
            signals.handler = running.take_signal
            await _run_all(memora, server, url_of(settings.host, listening), running.texts)
    return Exit.INTERRUPTED if signal.SIGINT in running.stopped_by else Exit.DONE


async def _run_all(memora: Memora, server: WebServer, url: str, texts: Texts) -> None:
    """Run the server and, with a private Redis, a worker beside it that outlives it by a moment."""
    async with anyio.create_task_group() as beside:
        worker = memora.worker() if memora.storage.embedded else None
        if worker:
            beside.start_soon(worker.run)
        introducing = anyio.CancelScope()
        beside.start_soon(_introduce, introducing, memora, server, url, texts)
        await server.run()
        introducing.cancel()
        if worker:
            worker.stop()


async def _introduce(scope: anyio.CancelScope, memora: Memora, server: WebServer, url: str, texts: Texts) -> None:
    """Say where it is, once it answers, and what a person should know."""
    with scope:
        await server.started()
        sys.stdout.write(texts.server_started.format(url=url) + "\n")
        sys.stdout.flush()
        settings = memora.settings
        if settings.uses_offline_model:
            _tell(texts.offline_chosen if settings.offline else texts.offline_model)
        if not memora.storage.embedded and not await _has_worker(memora):
            _tell(texts.no_worker)


async def _has_worker(memora: Memora) -> bool:
    try:
        return await memora.storage.workers() > 0
    except StoreError:
        return True  # nobody knows, and there are other worries


def _tell(text: str) -> None:
    sys.stderr.write(f"memora: {text}\n")
    sys.stderr.flush()
