"""A turn as server-sent events, in whichever API's form.

Owns when the head of a stream is sent, what it says, and that nothing is left open when the client leaves. Must not
know what the events are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from memora.web.api import REPLAYED, as_headers, news_before, timing
from memora.web.errors import Told, log_unexpected, told_of
from memora.web.turns import RunningTurn

EVENT_STREAM: Final = "text/event-stream"

_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class TurnStream(StreamingResponse):
    """The events of a turn that has begun."""

    def __init__(self, turn: RunningTurn, events: AsyncIterator[bytes]) -> None:
        news = as_headers(news_before(turn.started.context)) if turn.started else REPLAYED
        super().__init__(events, media_type=EVENT_STREAM, headers={**_HEADERS, **news, **timing(turn.times)})
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # as ASGI has it
        """Send them to the end, also when the client has left: the turn goes on, and what is sent then goes nowhere.

        So nobody has to wait for a client to leave, which takes a group of tasks for each stream.
        """
        try:
            await self.stream_response(send)
        finally:
            self._turn.close()


async def begun(turn: RunningTurn) -> RunningTurn:
    """Wait until there is something to send.

    Raises:
        MemoraError: the turn failed before that.
    """
    try:
        await turn.begin()
    except BaseException:
        turn.close()
        raise
    return turn


def broken_off(error: Exception, request_id: str) -> Told:
    """What the client is told when an answer ends in the middle."""
    told = told_of(error)
    if told.is_unexpected:
        log_unexpected(error, request_id)
    return told
