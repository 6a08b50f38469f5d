"""Waiting for something to become true, with a deadline: what every test uses instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

Value = TypeVar("Value")

STEP_SECONDS = 0.02


async def eventually(probe: Callable[[], Awaitable[Value]], *, seconds: float = 10.0) -> Value:
    """Call `probe` until it returns something true; return that."""
    deadline = anyio.current_time() + seconds
    while True:
        value = await probe()
        if value:
            return value
        if anyio.current_time() >= deadline:
            raise AssertionError(f"still {value!r} after {seconds:.0f} s: {probe}")
        await anyio.sleep(STEP_SECONDS)


def eventually_sync(probe: Callable[[], Value], *, seconds: float = 10.0) -> Value:
    """The same for tests without an event loop."""
    deadline = time.monotonic() + seconds
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"still {value!r} after {seconds:.0f} s: {probe}")
        time.sleep(STEP_SECONDS)
