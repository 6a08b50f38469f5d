"""Turns that outlive the requests that asked for them.

Owns the tasks in which turns are answered: a client that leaves loses nothing, and one that reads slowly holds nobody
up. Must not know what a reply looks like.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from memora.chat import TurnResult
from memora.conversations import Answered, OnStart, Replayed, Started
from memora.errors import MemoraError
from memora.llm import Emit
from memora.web.errors import SERVER_ERROR, Refused, Told, log_unexpected

DRAIN_SECONDS: Final = 20.0
"""How long a server that stops waits for the turns that are being answered."""

FIRST_PIECE_SECONDS: Final = 10.0
"""How long a stream holds its head back: an error before the first piece is then a status that a client can retry."""

Outcome = Answered | Replayed
Work = Callable[[Emit, OnStart], Awaitable[Outcome]]
OnTurn = Callable[[TurnResult, float | None, float], None]
"""Is told of each answered turn, the seconds to its first piece, and its seconds in all."""
OnTurnFailed = Callable[[str], None]
"""Is told the code of the error of a turn that came to nothing."""


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


_News = Started | str | Answered | Replayed | _Failed
"""What a turn sends: that it has started, pieces of its answer, how it ended."""


class RunningTurn:
    """The reading end of one turn. The turn goes on when nobody reads."""

    def __init__(self, news: MemoryObjectReceiveStream[_News]) -> None:
        self._news = news
        self._ahead: list[_News] = []
        self.started: Started | None = None
        self.outcome: Outcome | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Read no further."""
        self._news.close()

    async def begin(self) -> None:
        """Wait for the first piece, or for the end if it comes before; not for ever once the turn has started.

        Raises:
            MemoraError: the turn failed.
        """
        await self._look_ahead()
        if self.started and not self._ahead:
            with anyio.move_on_after(FIRST_PIECE_SECONDS):
                await self._look_ahead()
        if self._ahead and isinstance(failed := self._ahead[0], _Failed):
            raise failed.error

    async def pieces(self) -> AsyncIterator[str]:
        """The pieces of the answer; then `outcome` is there.

        Raises:
            MemoraError: the turn failed.
        """
        while self.outcome is None:
            news = self._ahead.pop() if self._ahead else await self._next()
            if isinstance(news, str):
                yield news
            elif isinstance(news, Started):
                self.started = news
            elif isinstance(news, _Failed):
                raise news.error
            else:
                self.outcome = news

    async def finish(self) -> Outcome:
        """Wait for the end.

        Raises:
            MemoraError: the turn failed.
        """
        async for _ in self.pieces():
            pass
        assert self.outcome  # noqa: S101  # pieces end with it
        return self.outcome

    async def _look_ahead(self) -> None:
        news = await self._next()
        if isinstance(news, Started):
            self.started = news
        else:
            self._ahead.append(news)

    async def _next(self) -> _News:
        try:
            return await self._news.receive()
        except anyio.EndOfStream:
            what = "The server is stopping, and the turn was not finished: send it again."
            raise Refused(Told(503, what, SERVER_ERROR, "server_stopping")) from None


class Turns:
    """The turns that are being answered."""

    def __init__(self) -> None:
        self._tasks: TaskGroup | None = None
        self.on_turn: OnTurn = _ignore
        self.on_turn_failed: OnTurnFailed = _ignore

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer turns inside; at the end wait for those that run, for a bounded time."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            yield
            self._tasks = None
            tasks.cancel_scope.deadline = anyio.current_time() + DRAIN_SECONDS

    def start(self, work: Work, request_id: str) -> RunningTurn:
        """Answer a turn in a task of its own.

        Raises:
            RuntimeError: the server is not running.
        """
        if self._tasks is None:
            raise RuntimeError("turns are answered only while the server runs")
        send, receive = anyio.create_memory_object_stream[_News](float("inf"))
        self._tasks.start_soon(self._answer, work, send, request_id)
        return RunningTurn(receive)

    async def _answer(self, work: Work, send: MemoryObjectSendStream[_News], request_id: str) -> None:
        began = time.monotonic()
        first: float | None = None

        async def emit(piece: str) -> None:
            nonlocal first
            first = time.monotonic() - began if first is None else first
            _tell(send, piece)

        async def start(started: Started) -> None:
            _tell(send, started)

        with send:
            try:
                outcome = await work(emit, start)
                if isinstance(outcome, Answered):
                    self.on_turn(outcome.result, first, time.monotonic() - began)
                _tell(send, outcome)
            except MemoraError as error:
                self.on_turn_failed(error.code)
                _tell(send, _Failed(error))
            except Exception as error:  # noqa: BLE001  # one turn's bug must not end the others
                log_unexpected(error, request_id)
                self.on_turn_failed(MemoraError.code)
                _tell(send, _Failed(error))


def _tell(send: MemoryObjectSendStream[_News], news: _News) -> None:
    try:
        send.send_nowait(news)
    except anyio.BrokenResourceError:
        return  # nobody reads any more; the turn goes on


def _ignore(*_: object) -> None:
    """Whoever counts turns puts another function in its place."""
