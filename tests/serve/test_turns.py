"""A running turn by itself: what its reader gets, and when."""

from __future__ import annotations

import asyncio

import pytest
from polling import eventually

from memora.conversations import Started
from memora.core.conversation import Conversation
from memora.core.window import Budget, select_context
from memora.web.errors import Refused
from memora.web.turns import RunningTurn

CONTEXT = select_context(Conversation("talk"), "Be brief.", "Hello!", Budget(1_000, 3, 300))


async def read_into(read: list[str], turn: RunningTurn) -> None:
    """Read to the end."""
    async for piece in turn.pieces():
        read.append(piece)  # noqa: PERF401  # what was read before an error counts


async def test_a_stream_begins_without_a_piece_when_patience_ends() -> None:
    """The client gets its head while the model still thinks, and every piece afterwards."""
    turn = RunningTurn(first_piece_seconds=0.02)
    turn.start(Started(0, 0, CONTEXT))
    await asyncio.wait_for(turn.begin(), 5)
    turn.write("Hi ")
    turn.write("there")
    read: list[str] = []
    reading = asyncio.create_task(read_into(read, turn))

    async def is_read() -> bool:
        return read == ["Hi there"]

    await eventually(is_read)
    turn.write("!")
    turn.end(None, LookupError())
    with pytest.raises(LookupError):
        await reading
    assert read == ["Hi there", "!"]


async def test_nobody_waits_for_a_turn_that_has_not_started() -> None:
    """Patience is for the first piece; while a turn stands in line there is no head to send."""
    turn = RunningTurn(first_piece_seconds=0.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(turn.begin(), 0.05)
    turn.start(Started(0, 0, CONTEXT))
    await asyncio.wait_for(turn.begin(), 5)


async def test_a_reader_that_was_cancelled_holds_up_nobody() -> None:
    """Whoever waits for news may go: the turn writes on, and what is written is there for the next."""
    turn = RunningTurn()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(turn.finish(), 0.01)
    turn.write("Hi")
    turn.end(None)
    read: list[str] = []
    with pytest.raises(Refused, match="not finished"):
        await read_into(read, turn)
    assert read == ["Hi"]
