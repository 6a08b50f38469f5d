"""Running the application: the socket, uvicorn, and a stop that lets answers finish.

Owns how long a stop may take. Must not handle signals: the command does.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import uvicorn
from fastapi import FastAPI

from memora.errors import AddressUnavailable, MemoraError
from memora.web.operations import Operations
from memora.web.protocol import Protocol
from memora.web.turns import Turns

_BACKLOG: Final = 2_048
_KEEP_ALIVE_SECONDS: Final = 65
"""A little longer than the minute of usual proxies, so that it is they who close."""

_TELL_SECONDS: Final = 3
"""When the grace is over, answers are cut off, and their clients have so long to be told."""

_LAST_SECONDS: Final = 2.0
"""Beyond that, for closing."""


def listen(host: str, port: int) -> socket.socket:
    """Take an address; connections wait from now on until the application runs.

    Raises:
        AddressUnavailable: it is taken, or is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unavailable(host, port, error) from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise _unavailable(host, port, error) from None
    return listening


def url_of(host: str, listening: socket.socket) -> str:
    """Where a person on this machine finds it."""
    port = listening.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104  # it is only translated
    return f"http://{f'[{shown}]' if ':' in shown and not shown.startswith('[') else shown}:{port}"


class WebServer:
    """An application that is being served."""

    def __init__(self, app: FastAPI, listening: socket.socket, grace_seconds: float) -> None:
        self._operations: Operations = app.state.operations
        self._turns: Turns = app.state.turns
        self._listening = listening
        self._grace_seconds = grace_seconds
        self._stopping = anyio.Event()
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="on",
                http=Protocol,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(grace_seconds) + _TELL_SECONDS,
            )
        )

    async def run(self) -> None:
        """Serve until stopped; bounded from then on.

        Raises:
            MemoraError: the application does not start.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._give_up, tasks.cancel_scope)
            try:
                await self._server.serve([self._listening])
            except SystemExit:
                raise MemoraError("the application does not start; its log says why") from None
            tasks.cancel_scope.cancel()

    async def started(self) -> None:
        """Wait until requests are answered."""
        await self._server.is_up.wait()

    @property
    def is_stopping(self) -> bool:
        """Whether it has been told to stop."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Take no more connections, end event streams, let answers finish."""
        self._operations.stop()
        self._turns.stop()
        self._server.should_exit = True
        self._stopping.set()

    async def _give_up(self, serving: anyio.CancelScope) -> None:
        await self._stopping.wait()
        await anyio.sleep(math.ceil(self._grace_seconds) + _TELL_SECONDS + _LAST_SECONDS)
        serving.cancel()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self.is_up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the command."""
        yield


def _unavailable(host: str, port: int, error: OSError) -> AddressUnavailable:
    return AddressUnavailable(
        f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()}. Stop what uses it, or choose "
        "another with --port or MEMORA_PORT (0 takes a free one)"
    )
