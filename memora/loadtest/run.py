"""A run: the plan carried out, what was seen meanwhile, and the verdicts at the end.

Owns the order of things, and that nothing outlives the run. What is planned, sent and shown is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import aiohttp

from memora.audit import audit, audit_record
from memora.errors import MemoraError
from memora.loadtest.client import Client, Heard
from memora.loadtest.histogram import Histogram
from memora.loadtest.plan import Load, PlannedTurn, plan_turns
from memora.loadtest.private import Ground
from memora.settings import Settings
from memora.storage import open_storage

DRAIN_SECONDS: Final = 90.0
"""How long folds may take to catch up after the last turn, before the audit."""

_LOOK_SECONDS: Final = 1.0
_MOST_SHOWN: Final = 100


@dataclass(frozen=True, slots=True)
class Faults:
    """Accidents during a run: seconds between two of a kind (0: none), and the share of turns whose model stumbles."""

    kill_worker_every: float = 0.0
    restart_redis_every: float = 0.0
    provider_errors: float = 0.0


@dataclass(slots=True)
class Second:
    """What happened in one second of the run."""

    at: int
    turns: int = 0
    errors: int = 0
    lag_messages: float = 0.0
    lag_seconds: float = 0.0
    first_piece: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class Seen:
    """Everything a run has seen. Latencies count from the moment at which a turn was due, whatever it waited for."""

    first_piece: Histogram = field(default_factory=Histogram)
    whole_turn: Histogram = field(default_factory=Histogram)
    memory: Histogram = field(default_factory=Histogram)
    lag_messages: Histogram = field(default_factory=Histogram)
    lag_seconds: Histogram = field(default_factory=Histogram)
    seconds: dict[int, Second] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    accidents: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    gap_messages: int = 0
    most_at_once: int = 0
    running: int = 0
    elapsed: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    judge: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        """Turns that were answered."""
        return self.outcomes["ok"]

    @property
    def failures(self) -> int:
        """Turns that were not."""
        return self.outcomes.total() - self.outcomes["ok"]

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong, as far as it could be looked at."""
        verdicts = (self.audit, self.judge, self.ledger)
        return not self.failures and all(verdict.get("ok") is not False for verdict in verdicts)

    def second(self, at: float) -> Second:
        """The record of a second."""
        return self.seconds.setdefault(int(at), Second(int(at)))


OnProgress = Callable[[Seen, float], None]
"""Is told about once a second what was seen so far and how many seconds have passed."""


class Run:
    """One load test against one server."""

    def __init__(
        self, load: Load, faults: Faults, client: Client, ground: Ground | None, on_progress: OnProgress
    ) -> None:
        self._load, self._faults, self._client, self._ground = load, faults, client, ground
        self._on_progress = on_progress
        self.seen = Seen()
        self._ids: list[str] = []
        self._entries = [Counter[str]() for _ in range(load.conversations)]
        self._places = [asyncio.Lock() for _ in range(load.conversations)]
        self._dice = random.Random(load.seed)  # noqa: S311  # accidents are no secret
        self._nonce = secrets.token_hex(4)
        self._began = 0.0

    async def talk(self) -> None:
        """Carry out the plan. Cancelled, it leaves what was seen so far.

        Raises:
            aiohttp.ClientError: the server does not even begin conversations.
        """
        await self._set_model()
        for _ in range(self._load.conversations):
            self._ids.append(await self._client.begin())
        self._began = time.monotonic()
        beside = [asyncio.create_task(work) for work in self._beside()]
        try:
            async with asyncio.TaskGroup() as turns:
                for turn in plan_turns(self._load):
                    await asyncio.sleep(max(0.0, self._began + turn.due - time.monotonic()))
                    turns.create_task(self._turn(turn))
        finally:
            self.seen.elapsed = time.monotonic() - self._began
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def judge(self, settings: Settings) -> None:
        """Let the folds catch up, then audit what is stored and hear the judge."""
        until = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < until:
            figures = await self._client.metrics()
            if figures.get("memora_fold_pending_conversations") == 0:
                break
            await asyncio.sleep(_LOOK_SECONDS / 4)
        self.seen.audit = await self._audit(settings)
        self.seen.judge = await self._verdict()

    async def _turn(self, turn: PlannedTurn) -> None:
        seen = self.seen
        seen.running += 1
        seen.most_at_once = max(seen.most_at_once, seen.running)
        try:
            async with self._places[turn.conversation]:
                key = f"{self._nonce}-{turn.conversation}-{turn.marker.turn}"
                heard = await self._client.turn(self._ids[turn.conversation], turn, key)
                await self._report(turn, heard)
        finally:
            seen.running -= 1
        self._count(turn, heard)

    def _count(self, turn: PlannedTurn, heard: Heard) -> None:
        seen, due = self.seen, self._began + turn.due
        now = time.monotonic() - self._began
        seen.outcomes[heard.outcome] += 1
        self._entries[turn.conversation][heard.outcome] += 1
        seen.retries += heard.tries - 1
        second = seen.second(now)
        if heard.outcome != "ok":
            seen.errors[heard.error] += 1
            second.errors += 1
            return
        second.turns += 1
        seen.gap_messages += heard.gap_messages
        seen.whole_turn.add(heard.ended_at - due)
        if heard.first_piece_at:
            seen.first_piece.add(heard.first_piece_at - due)
            second.first_piece.add(heard.first_piece_at - due)
        if heard.memory_seconds is not None:
            seen.memory.add(heard.memory_seconds)

    async def _report(self, turn: PlannedTurn, heard: Heard) -> None:
        """Tell the judge before the next turn of this conversation is asked for."""
        if self._ground:
            report = {"marker": str(turn.marker), "outcome": heard.outcome, "gap_messages": heard.gap_messages}
            await self._ground.say("POST", "judge", {"reports": [report]})

    async def _set_model(self) -> None:
        """Tell the private model how fast it is, and where it stumbles."""
        if self._ground:
            share = self._faults.provider_errors
            stumbles = [str(turn.marker) for turn in plan_turns(self._load) if self._dice.random() < share]
            await self._ground.set_model(stumbles)
            if stumbles:
                self.seen.accidents["provider errors"] = len(stumbles)

    def _beside(self) -> Sequence[Any]:
        """What goes on beside the turns."""
        ground, faults = self._ground, self._faults
        beside = [self._watch()]
        if ground and faults.kill_worker_every:
            killing = partial(ground.kill_a_worker, self._dice)
            beside.append(self._again("workers killed", faults.kill_worker_every, killing))
        if ground and faults.restart_redis_every:
            beside.append(self._again("Redis restarts", faults.restart_redis_every, ground.restart_redis))
        return beside

    async def _again(self, name: str, seconds: float, happen: Callable[[], Any]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await happen()
            self.seen.accidents[name] += 1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            figures = await self._client.metrics()
            elapsed = time.monotonic() - self._began
            second = self.seen.second(elapsed)
            lag, seconds = figures.get("memora_fold_lag_messages"), figures.get("memora_fold_lag_seconds")
            if lag is not None and seconds is not None and not math.isnan(lag):
                second.lag_messages, second.lag_seconds = lag, seconds
                self.seen.lag_messages.add(lag)
                self.seen.lag_seconds.add(seconds)
            self._on_progress(self.seen, elapsed)

    async def _audit(self, settings: Settings) -> dict[str, Any]:
        if not settings.redis_url:
            return {"ok": None, "why": "set MEMORA_REDIS_URL to the Redis of that server to have it audited"}
        try:
            async with open_storage(settings) as storage:
                report = await audit(storage)
                stored = [(await storage.store.inspect(each, 0)).conversation for each in self._ids]
        except MemoraError as error:
            return {"ok": None, "why": str(error)}
        for name in ("answer_input", "answer_output", "fold_input", "fold_output"):
            self.seen.tokens[name] = sum(int(getattr(each.usage, f"{name}_tokens")) for each in stored)
        self.seen.ledger = self._compare([each.message_count for each in stored])
        return audit_record(report)

    def _compare(self, counts: Sequence[int]) -> dict[str, Any]:
        """Hold what the clients know against what is stored: every answered turn, and no other but unknown ones."""
        wrong = [
            {
                "conversation": each,
                "answered": said["ok"],
                "unknown": said["unknown"],
                "messages": count,
            }
            for each, said, count in zip(self._ids, self._entries, counts, strict=True)
            if not said["ok"] * 2 <= count <= (said["ok"] + said["unknown"]) * 2
        ]
        return {"ok": not wrong, "conversations": len(counts), "differences": wrong[:_MOST_SHOWN]}

    async def _verdict(self) -> dict[str, Any]:
        if not self._ground:
            return {"ok": None, "why": "only the offline model of a private load test judges"}
        with suppress(aiohttp.ClientError):
            return dict(await self._ground.say("GET", "judge"))
        return {"ok": None, "why": "the judge did not answer"}
