"""What a test says to the offline model, and what it hears back: rules, gates, and a record of every request.

Owns the state of scripting; one event loop uses it. Must not answer requests.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio

from memora.offline_model.call import Call, CallKind
from memora.offline_model.errors import Rejected
from memora.offline_model.faults import FaultBook, Rule, is_match, read_target
from memora.offline_model.wire import HttpRequest

MAX_RECORDS: Final = 10_000
MAX_RECORDED_BYTES: Final = 128 * 1024 * 1024
"""Bodies beyond this are forgotten, oldest first, so that long load tests do not fill the memory."""

_SHOWN_KEY_CHARACTERS: Final = 4


@dataclass(slots=True)
class Record:
    """A request as it was sent. `fault` is the id of the rule that happened to it.

    `is_ended`: nothing more will be sent. `is_finished`: the reply was sent to its end.
    """

    request: HttpRequest
    at: float
    kind: CallKind = "unknown"
    fault: int | None = None
    is_ended: bool = False
    is_finished: bool = False

    def shown(self) -> dict[str, Any]:
        """As a test sees it, the key redacted."""
        return {
            "kind": self.kind,
            "method": self.request.method,
            "path": self.request.path,
            "headers": {name: _redacted(name, value) for name, value in self.request.headers.items()},
            "body": _body(self.request.body),
            "at": self.at,
            "fault": self.fault,
            "ended": self.is_ended,
            "finished": self.is_finished,
        }


@dataclass(frozen=True, slots=True)
class _Hold:
    id: int
    match: str
    contains: str | None
    opened: anyio.Event


class Script:
    """Everything scripted, and everything seen."""

    def __init__(self) -> None:
        self.faults = FaultBook()
        self._records: deque[Record] = deque()
        self._recorded_bytes = 0
        self._forgotten = 0
        self._holds: list[_Hold] = []
        self._held = 0
        self._waiting = 0
        self._in_flight = 0

    def arrive(self, request: HttpRequest, at: float) -> Record:
        """Record a request; `end` has to follow."""
        record = Record(request, at)
        self._records.append(record)
        self._recorded_bytes += len(request.body)
        self._in_flight += 1
        while len(self._records) > MAX_RECORDS or self._recorded_bytes > MAX_RECORDED_BYTES:
            self._recorded_bytes -= len(self._records.popleft().request.body)
            self._forgotten += 1
        return record

    def end(self, record: Record, *, is_finished: bool) -> None:
        """Note that a request is over."""
        record.is_ended, record.is_finished = True, is_finished
        self._in_flight -= 1

    def requests(self, since: int = 0) -> list[dict[str, Any]]:
        """The requests from the `since`-th on (the first is 0), as far as they are not forgotten, oldest first."""
        skipped = max(0, since - self._forgotten)
        return [record.shown() for place, record in enumerate(self._records) if place >= skipped]

    def clear_requests(self) -> None:
        """Forget every request and count from 0 again."""
        self._records.clear()
        self._recorded_bytes = self._forgotten = 0

    def choose(self, call: Call, record: Record) -> Rule | None:
        """The rule that happens to a request, noted in its record."""
        chosen = self.faults.choose(call)
        if chosen is None:
            return None
        record.fault, rule = chosen
        return rule

    def hold(self, target: Mapping[str, Any]) -> int:
        """Close a gate for requests like `target`; returns its id.

        Raises:
            Rejected: the target is no `match` and `contains`.
        """
        match, contains = read_target(target)
        self._held += 1
        self._holds.append(_Hold(self._held, match, contains, anyio.Event()))
        return self._held

    def release(self, hold_id: int | None = None) -> None:
        """Open one gate, or all of them, for good.

        Raises:
            Rejected: there is no such gate.
        """
        opening = [hold for hold in self._holds if hold_id in {None, hold.id}]
        if hold_id is not None and not opening:
            raise Rejected(404, f"There is no hold {hold_id}.", param="id")
        for hold in opening:
            self._holds.remove(hold)
            hold.opened.set()

    async def pass_gates(self, call: Call) -> None:
        """Wait until every gate that was closed for a request when it came is open."""
        for hold in [hold for hold in self._holds if is_match(hold.match, hold.contains, call)]:
            self._waiting += 1
            try:
                await hold.opened.wait()
            finally:
                self._waiting -= 1

    def state(self) -> dict[str, int]:
        """How many requests wait at a gate, and how many have come and are not over."""
        return {"waiting": self._waiting, "in_flight": self._in_flight}


def _body(body: bytes) -> object:
    """Decoded JSON; what is not JSON as text."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")


def _redacted(name: str, value: str) -> str:
    return f"…{value[-_SHOWN_KEY_CHARACTERS:]}" if name == "authorization" else value
