"""Turns that outlive the requests that asked for them.

Owns the tasks in which turns are answered: a client that leaves loses nothing, and one that reads slowly holds nobody
up. Must not know what a reply looks like.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import anyio
from anyio.abc import TaskGroup

from memora.chat import TurnResult
from memora.conversations import Answered, OnStart, Replayed, Started
from memora.errors import MemoraError
from memora.llm import Emit
from memora.web.errors import SERVER_ERROR, Refused, Told, log_unexpected

FIRST_PIECE_SECONDS: Final = 10.0
"""How long a stream holds its head back: an error before the first piece is then a status that a client can retry."""

Outcome = Answered | Replayed
Work = Callable[[Emit, OnStart], Awaitable[Outcome]]
OnTurn = Callable[[TurnResult, "TurnTimes"], None]
"""Is told of each answered turn and how long it took."""
OnTurnFailed = Callable[[str], None]
"""Is told the code of the error of a turn that came to nothing."""


@dataclass(slots=True)
class TurnTimes:
    """Seconds of one turn since it was asked for: until the model was asked, to the first piece, and in all.

    The first is what memory costs: waiting for the conversation, loading it, and selecting the context.
    """

    memory: float | None = None
    first_piece: float | None = None
    whole: float = 0.0


class RunningTurn:
    """One turn: the task that answers it writes, the request that asked for it reads. It goes on when nobody reads.

    Pieces that were not read yet wait in memory as one text, so that a slow reader costs no more than its answer.
    """

    def __init__(self, first_piece_seconds: float = FIRST_PIECE_SECONDS) -> None:
        self.started: Started | None = None
        self.outcome: Outcome | None = None
        self.times = TurnTimes()
        self._began = time.monotonic()
        self._first_piece_seconds = first_piece_seconds
        self._pieces: list[str] = []
        self._error: Exception | None = None
        self._is_over = False
        self._is_read = True
        self._is_patient = True
        self._news: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Read no further."""
        self._is_read = False
        self._pieces.clear()

    async def begin(self) -> None:
        """Wait for the first piece, or for the end if it comes before; not for ever once the turn has started.

        Raises:
            MemoraError: the turn failed.
        """
        while not (self.started or self._is_over):
            await self._wait()
        patience = asyncio.get_running_loop().call_later(self._first_piece_seconds, self._lose_patience)
        try:
            while not (self._pieces or self._is_over) and self._is_patient:
                await self._wait()
        finally:
            patience.cancel()
        if self._is_over and not self._pieces:
            self._check()

    async def pieces(self) -> AsyncIterator[str]:
        """The answer as it comes, all that has arrived at a time; then `outcome` is there.

        Raises:
            MemoraError: the turn failed.
        """
        while True:
            if self._pieces:
                piece = "".join(self._pieces)
                self._pieces.clear()
                yield piece
            elif self._is_over:
                self._check()
                return
            else:
                await self._wait()

    async def finish(self) -> Outcome:
        """Wait for the end.

        Raises:
            MemoraError: the turn failed.
        """
        while not self._is_over:
            await self._wait()
        self._check()
        assert self.outcome  # noqa: S101  # it is over, and it did not fail
        return self.outcome

    def start(self, started: Started) -> None:
        """Write that the answer is about to be asked for."""
        self.started = started
        self.times.memory = self._seconds
        self._tell()

    def write(self, piece: str) -> None:
        """Write a piece of the answer."""
        if self.times.first_piece is None:
            self.times.first_piece = self._seconds
        if self._is_read:
            self._pieces.append(piece)
            self._tell()

    def end(self, outcome: Outcome | None, error: Exception | None = None) -> None:
        """Write how it ended: one of the two, or neither if it was cut off."""
        self.outcome, self._error, self._is_over = outcome, error, True
        self.times.whole = self._seconds
        self._tell()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _check(self) -> None:
        if self._error:
            raise self._error
        if not self.outcome:
            raise _stopping("The server is stopping, and the turn was not finished: send it again.")

    async def _wait(self) -> None:
        # One for each piece, so it is no more than has to be: one reader waits for it, and nobody else.
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _lose_patience(self) -> None:
        self._is_patient = False
        self._tell()

    def _tell(self) -> None:
        if self._news and not self._news.done():
            self._news.set_result(None)


class Turns:
    """The turns that are being answered, and the seconds they have to end once the server stops."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._tasks: TaskGroup | None = None
        self._is_stopping = False
        self.on_turn: OnTurn = _ignore
        self.on_turn_failed: OnTurnFailed = _ignore

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer turns inside; at the end wait for those that run, for a bounded time."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            yield
            self.stop()

    def stop(self) -> None:
        """Take no more turns, and cut off what still runs when the grace is over."""
        if self._tasks and not self._is_stopping:
            self._tasks.cancel_scope.deadline = anyio.current_time() + self._grace_seconds
        self._is_stopping = True

    def start(self, work: Work, request_id: str) -> RunningTurn:
        """Answer a turn in a task of its own.

        Raises:
            Refused: the server is stopping.
            RuntimeError: the server is not running.
        """
        if self._is_stopping:
            raise _stopping("The server is stopping: send the turn again, to the one that takes its place.")
        if self._tasks is None:
            raise RuntimeError("turns are answered only while the server runs")
        turn = RunningTurn()
        self._tasks.start_soon(self._answer, work, turn, request_id)
        return turn

    async def _answer(self, work: Work, turn: RunningTurn, request_id: str) -> None:
        outcome: Outcome | None = None
        failed: Exception | None = None

        async def emit(piece: str) -> None:
            turn.write(piece)

        async def start(started: Started) -> None:
            turn.start(started)

        try:
            outcome = await work(emit, start)
        except MemoraError as error:
            self.on_turn_failed(error.code)
            failed = error
        except Exception as error:  # noqa: BLE001  # one turn's bug must not end the others
            log_unexpected(error, request_id)
            self.on_turn_failed(MemoraError.code)
            failed = error
        finally:
            turn.end(outcome, failed)
        if isinstance(outcome, Answered):
            self.on_turn(outcome.result, turn.times)


def _stopping(what: str) -> Refused:
    return Refused(Told(503, what, SERVER_ERROR, "server_stopping"))


def _ignore(*_: object) -> None:
    """Whoever counts turns puts another function in its place."""
