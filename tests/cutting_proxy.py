"""A TCP proxy in front of the HTTP server that cuts connections at a byte of one's choice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from proxy import Proxy

Direction = Literal["request", "reply"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where one connection ends: right after so many bytes in a direction, without a word of goodbye."""

    after: int
    direction: Direction = "reply"


Plan = Callable[[], Cut | None]
"""What happens to the next connection; None lets it live."""


class CuttingProxy(Proxy):
    """Forwards every connection to a port of the loopback, and cuts those that `plan` says."""

    def __init__(self, port: int, plan: Plan = lambda: None) -> None:
        super().__init__()
        self._upstream_port = port
        self.plan = plan
        self.connections = 0
        self.cuts = 0
        self.reply_bytes = 0

    def cut_next(self, *cuts: Cut) -> None:
        """Cut the next connections in this way, and let the later ones live."""
        waiting = list(cuts)
        self.plan = lambda: waiting.pop(0) if waiting else None

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection, or cut it."""
        self.connections += 1
        cut = self.plan()
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            writer.transport.abort()
            return
        for flushed in (writer, up_writer):
            flushed.transport.set_write_buffer_limits(high=0)  # what was carried has left when `drain` returns
        try:
            ways = {
                asyncio.create_task(self._carry(reader, up_writer, cut, "request")),
                asyncio.create_task(self._carry(up_reader, writer, cut, "reply")),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.wait(ways)
        finally:
            up_writer.transport.abort()
            writer.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: Cut | None, direction: Direction
    ) -> None:
        """Carry one way until an end, or the cut."""
        left = cut.after if cut and cut.direction == direction else None
        try:
            while data := await reader.read(65_536):
                carried = data if left is None else data[:left]
                if direction == "reply":
                    self.reply_bytes += len(carried)
                writer.write(carried)
                await writer.drain()
                if left is not None:
                    left -= len(carried)
                    if len(carried) < len(data):
                        self.cuts += 1
                        return
        except OSError:
            return
