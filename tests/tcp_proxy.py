"""A TCP proxy in front of a server's socket, for what a network does: replies that never arrive, and silence."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import unquote

from proxy import Proxy


class TcpProxy(Proxy):
    """Forwards every connection to a unix socket, except where it was told to misbehave."""

    def __init__(self, upstream_url: str) -> None:
        super().__init__()
        self._path = unquote(upstream_url.removeprefix("unix://"))
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._doomed: list[bytes] = []
        self._unheard: list[bytes] = []
        self._cuts = 0
        self.lost_replies = 0
        self.lost_requests = 0
        self.held_back = b""

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"redis://127.0.0.1:{self.port}"

    def lose_reply_to(self, fragment: bytes, times: int = 1) -> None:
        """Let the server carry out the next commands that hold this fragment, and cut the line before it replies."""
        self._doomed += [fragment] * times

    def lose_request_with(self, fragment: bytes, times: int = 1) -> None:
        """Cut the line before the server hears of the next commands that hold this fragment."""
        self._unheard += [fragment] * times

    def cut_lines(self) -> None:
        """Cut every line there is; new ones are carried."""
        for writer in self._writers:
            writer.transport.abort()

    def partition(self) -> None:
        """Carry nothing any more, in either direction; what comes from clients can be seen in `held_back`."""
        self._open.clear()

    def heal(self) -> None:
        """Carry everything again, what was held back first."""
        self._open.set()

    def cut(self) -> None:
        """Carry everything again, but on new connections only: what was held back is lost, and so are the old ones."""
        self._cuts += 1
        self._open.set()

    def retarget(self, upstream_url: str) -> None:
        """End every connection; new ones go to another server, as after a fail-over."""
        self._path = unquote(upstream_url.removeprefix("unix://"))
        for writer in self._writers:
            writer.transport.abort()
        self._open.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection, and misbehave where it was told to."""
        try:
            upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, upstream_writer}
        loses = asyncio.Event()
        try:
            back = asyncio.create_task(self._carry_back(upstream_reader, writer, loses))
            self.own(back)
            while data := await reader.read(65_536):
                if not self._open.is_set():
                    self.held_back += data
                    cuts = self._cuts
                    await self._open.wait()
                    if cuts != self._cuts:
                        break
                if unheard := next((fragment for fragment in self._unheard if fragment in data), None):
                    self._unheard.remove(unheard)
                    self.lost_requests += 1
                    break
                if doomed := next((fragment for fragment in self._doomed if fragment in data), None):
                    self._doomed.remove(doomed)
                    loses.set()
                upstream_writer.write(data)
                await upstream_writer.drain()
        except (OSError, asyncio.CancelledError):
            pass  # cancelled only at the end of the proxy, and Python 3.11 makes a noise of a cancelled one
        finally:
            self._writers -= {writer, upstream_writer}
            upstream_writer.transport.abort()
            writer.transport.abort()

    async def _carry_back(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, loses: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._open.wait()
                if loses.is_set():
                    self.lost_replies += 1
                    break
                writer.write(data)
        writer.transport.abort()
