"""The offline model as a server: its address, its connections, its end.

Owns the life of every connection; a connection is one task, and `stop` ends them all. Must not know what is replied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import anyio

from memora.offline_model.behaviour import Behaviour
from memora.offline_model.errors import Rejected
from memora.offline_model.exchange import Exchange
from memora.offline_model.faults import read_rule
from memora.offline_model.judge import Judge
from memora.offline_model.script import Script
from memora.offline_model.service import Service, new_id
from memora.offline_model.wire import HttpRequest, Wire

MAX_CONNECTIONS: Final = 4096
STOP_SECONDS: Final = 1.0
_BACKLOG: Final = 1024

_log = logging.getLogger(__name__)


class OfflineModel:
    """An OpenAI-compatible endpoint on `http://host:port/v1`, with no model behind it.

    Port 0 takes a free one. `piece_delay_seconds` is how long it takes for each piece of a text, about a word, whether
    it is streamed or not; a `behaviour`, given instead, says more. Only a `scriptable` one keeps what it was sent and
    can be made to misbehave, over HTTP under `/_control` or by the methods here, which are called in its own event
    loop. A `judging` one judges every request that carries markers; its `judge` is under `/_control/judge` too.
    """

    def __init__(
        self,
        *,
        scriptable: bool = False,
        judging: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
        piece_delay_seconds: float = 0.0,
        behaviour: Behaviour | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._script = Script() if scriptable else None
        self._judge = Judge() if judging else None
        behaviour = behaviour or Behaviour(piece_delay_seconds=piece_delay_seconds)
        self._service = Service(self._script, self._judge, behaviour)
        self._server: asyncio.Server | None = None
        self._is_open = False
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Started again after `stop`, it takes the same port.

        Raises:
            OSError: the port is taken.
        """
        if self._server is not None:
            raise RuntimeError("the offline model runs already")
        self._is_open = True
        self._server = await asyncio.start_server(self._accept, self._host, self._port, backlog=_BACKLOG)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and end every request, finished or not, within `STOP_SECONDS`."""
        server, self._server, self._is_open = self._server, None, False
        if server is None:
            return
        server.close()
        for task in self._connections:
            task.cancel()
        with anyio.move_on_after(STOP_SECONDS, shield=True):
            if self._connections:
                await asyncio.wait(self._connections)
            await server.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """What a client takes as its base URL.

        Raises:
            RuntimeError: it was never started, so it has no port.
        """
        if not self._port:
            raise RuntimeError("the offline model has no address before it is started")
        return f"http://{self._host}:{self._port}/v1"

    @property
    def judge(self) -> Judge:
        """The judge of its requests.

        Raises:
            RuntimeError: it is not judging.
        """
        if self._judge is None:
            raise RuntimeError("make it with OfflineModel(judging=True) to have its requests judged")
        return self._judge

    def requests(self, since: int = 0) -> list[dict[str, Any]]:
        """What it was sent, from the `since`-th request on, oldest first; as `GET /_control/requests`."""
        return self._scripting().requests(since)

    def add_fault(
        self,
        fault: Mapping[str, Any] | None = None,
        *,
        match: str = "any",
        contains: str | None = None,
        times: int | None = None,
        skip: int = 0,
        delay_seconds: float = 0.0,
    ) -> int:
        """Make replies go wrong; as `POST /_control/faults`. Returns the rule's id.

        Raises:
            Rejected: there is no such fault.
        """
        record = {
            "match": match,
            "contains": contains,
            "times": times,
            "skip": skip,
            "delay_seconds": delay_seconds,
            "fault": fault,
        }
        return self._scripting().faults.add(read_rule(record))

    def hold(self, match: str = "any", contains: str | None = None) -> int:
        """Let requests wait until `release`; as `POST /_control/hold`. Returns the gate's id."""
        return self._scripting().hold({"match": match, "contains": contains})

    def release(self, hold_id: int | None = None) -> None:
        """Open one gate or all; as `POST /_control/release`."""
        self._scripting().release(hold_id)

    def state(self) -> dict[str, int]:
        """`waiting` at a gate and `in_flight`; as `GET /_control/state`."""
        return self._scripting().state()

    def clear_faults(self) -> None:
        """Behave again; as `DELETE /_control/faults`."""
        self._scripting().faults.clear()

    def clear_requests(self) -> None:
        """Forget what it was sent; as `DELETE /_control/requests`."""
        self._scripting().clear_requests()

    def clear(self) -> None:
        """Forget every fault and request and open every gate."""
        self.clear_faults()
        self.clear_requests()
        self.release()

    def _scripting(self) -> Script:
        if self._script is None:
            raise RuntimeError("make it with OfflineModel(scriptable=True) to script it")
        return self._script

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS or not self._is_open:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(Wire(reader, writer)))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, wire: Wire) -> None:
        """Serve one connection until one side is through with it."""
        try:
            while (request := await wire.next_request()) is not None:
                await self._serve_request(Exchange(request, new_id("req_"), wire))
                if not wire.start_next():
                    break
            await wire.close()
        except Rejected as rejected:
            await _reject_unread(wire, rejected)
        except OSError as error:
            _log.debug("a connection broke: %s", error)
        finally:
            wire.abort()

    async def _serve_request(self, exchange: Exchange) -> None:
        """Reply, unless the client leaves before."""
        async with anyio.create_task_group() as group:

            async def cancel_when_left() -> None:
                await exchange.wire.wait_until_left()
                group.cancel_scope.cancel()

            group.start_soon(cancel_when_left)
            await self._service.reply(exchange)
            group.cancel_scope.cancel()


async def _reject_unread(wire: Wire, rejected: Rejected) -> None:
    """Say why a request was not read to its end, and close."""
    exchange = Exchange(HttpRequest("", "", {}, {}, b""), new_id("req_"), wire)
    try:
        if wire.can_reply:
            await exchange.send_json(rejected.status, rejected.body, {**rejected.headers, "connection": "close"})
        await wire.close()
    except OSError as error:
        _log.debug("a connection broke: %s", error)
