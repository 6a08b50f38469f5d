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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import aiohttp
import anyio

from memora.audit import audit, audit_record
from memora.errors import MemoraError
from memora.loadtest.client import Client, Heard
from memora.loadtest.histogram import Histogram
from memora.loadtest.plan import Load, PlannedTurn, plan_turns
from memora.loadtest.private import Ground
from memora.offline_model.judge import Outcome
from memora.settings import Settings
from memora.storage import open_storage

DRAIN_SECONDS: Final = 60.0
"""After the last turn folds may take their time, but not so long without one that is done."""

_LOOK_SECONDS: Final = 1.0
_BEGIN_AT_ONCE: Final = 16
_MOST_SHOWN: Final = 100


@dataclass(frozen=True, slots=True)
class Faults:
    """Accidents during a run: seconds between two of a kind, 0 for none."""

    kill_worker_every: float = 0.0
    restart_redis_every: float = 0.0


@dataclass(slots=True)
class Second:
    """What happened in one second of the run; `in_flight` and `active` are the most there were of them in it.

    The lag is None in a second in which nobody looked.
    """

    at: int
    turns: int = 0
    errors: int = 0
    in_flight: int = 0
    active: int = 0
    lag_messages: float | None = None
    lag_seconds: float | None = None
    first_piece: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class Seen:
    """Everything a run has seen. Latencies count from the moment at which a turn was due, whatever it waited for.

    `in_flight` turns are sent and not yet answered. A turn that is due while the one before it in its conversation is
    not answered is `held_back` until it is. A conversation is `active` from its first turn to the end of its last.
    `lateness` is the load test's own: how long after a turn was due it got to it. Of a `is_private` server everything
    has to be looked at. `unfolded` messages were left when folds no longer came nearer to the end, -1: nobody knows.
    """

    is_private: bool = False
    first_piece: Histogram = field(default_factory=Histogram)
    whole_turn: Histogram = field(default_factory=Histogram)
    memory: Histogram = field(default_factory=Histogram)
    lag_messages: Histogram = field(default_factory=partial(Histogram, 1.0))
    lag_seconds: Histogram = field(default_factory=Histogram)
    seconds: dict[int, Second] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    accidents: Counter[str] = field(default_factory=Counter)
    lateness: Histogram = field(default_factory=Histogram)
    retries: int = 0
    gap_messages: int = 0
    held_back: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    active: int = 0
    most_active: int = 0
    elapsed: float = 0.0
    unfolded: int = 0
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
        """Whether nothing is wrong, as far as it could be looked at; a private server is always looked at."""
        good = (True,) if self.is_private else (True, None)
        verdicts = (self.audit, self.judge, self.ledger)
        return not self.failures and self.unfolded <= 0 and all(verdict.get("ok") in good for verdict in verdicts)

    def second(self, at: float) -> Second:
        """The record of a second."""
        return self.seconds.setdefault(int(at), Second(int(at)))

    def in_order(self) -> list[Second]:
        """The seconds of which there is a record, ascending."""
        return [self.seconds[at] for at in sorted(self.seconds)]

    def look(self, at: float) -> None:
        """Take down how much goes on at once, at this moment."""
        second = self.second(at)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.most_active = max(self.most_active, self.active)
        second.in_flight = max(second.in_flight, self.in_flight)
        second.active = max(second.active, self.active)


OnProgress = Callable[[Seen, float], None]
"""Is told about once a second what was seen so far and how many seconds have passed."""


class Run:
    """One load test against one server, or several that share a store."""

    def __init__(
        self, load: Load, faults: Faults, client: Client, ground: Ground | None, on_progress: OnProgress
    ) -> None:
        self._load, self._faults, self._client, self._ground = load, faults, client, ground
        self._on_progress = on_progress
        self.seen = Seen(is_private=ground is not None)
        self._ids: list[str] = []
        self._entries = [Counter[str]() for _ in range(load.conversations)]
        self._left = [load.turns_of(number) for number in range(load.conversations)]
        self._places = [asyncio.Lock() for _ in range(load.conversations)]
        self._dice = random.Random(load.seed)  # noqa: S311  # accidents are no secret
        self._nonce = secrets.token_hex(4)
        self._began = 0.0
        self._over = asyncio.Event()

    async def talk(self) -> None:
        """Carry out the plan. Cancelled, it leaves what was seen so far.

        Raises:
            aiohttp.ClientError: the server does not even begin conversations.
            MemoraError: an accident went further than it was meant to.
        """
        await self._begin()
        self._began = time.monotonic()
        beside = [asyncio.create_task(work) for work in self._beside()]
        try:
            async with asyncio.TaskGroup() as turns:
                for turn in plan_turns(self._load):
                    await asyncio.sleep(max(0.0, turn.due - self._elapsed))
                    turns.create_task(self._turn(turn))
        finally:
            self.seen.elapsed = self._elapsed
            self._over.set()
            with anyio.CancelScope(shield=True):  # what was killed or stopped is started again before anybody looks
                ended = await asyncio.gather(*beside, return_exceptions=True)
        for failure in ended:
            if failure is not None:
                raise failure

    async def judge(self, settings: Settings) -> None:
        """Let the folds catch up, then audit what is stored and hear the judge."""
        self.seen.unfolded = await self._catch_up()
        self.seen.audit = await self._audit(settings)
        self.seen.judge = await self._verdict()

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    async def _begin(self) -> None:
        """Begin all conversations, a few at a time."""
        places = asyncio.Semaphore(_BEGIN_AT_ONCE)

        async def begin() -> str:
            async with places:
                return await self._client.begin()

        self._ids = await asyncio.gather(*(begin() for _ in range(self._load.conversations)))

    async def _catch_up(self) -> int:
        """Wait for the folds as long as they get on; how many messages are left, -1 if the server does not tell."""
        fewest, until = math.inf, time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < until:
            figures = await self._client.metrics()
            if figures.get("memora_fold_pending_conversations") == 0:
                return 0
            if (lag := figures.get("memora_fold_lag_messages", math.nan)) < fewest:
                fewest, until = lag, time.monotonic() + DRAIN_SECONDS
            await asyncio.sleep(_LOOK_SECONDS / 4)
        return -1 if math.isinf(fewest) else int(fewest)

    async def _turn(self, turn: PlannedTurn) -> None:
        seen, place = self.seen, self._places[turn.conversation]
        seen.lateness.add(self._elapsed - turn.due)
        seen.held_back += place.locked()
        seen.active += turn.marker.turn == 0
        async with place:
            seen.in_flight += 1
            seen.look(self._elapsed)
            outcome: Outcome = "unknown"  # so it stays if Ctrl-C breaks the turn off
            try:
                key = f"{self._nonce}-{turn.conversation}-{turn.marker.turn}"
                heard = await self._client.turn(self._ids[turn.conversation], turn, key)
                outcome = heard.outcome
                await self._report(turn, heard)
            finally:
                self._entries[turn.conversation][outcome] += 1
                seen.in_flight -= 1
        self._left[turn.conversation] -= 1
        seen.active -= self._left[turn.conversation] == 0
        self._count(turn, heard)

    def _count(self, turn: PlannedTurn, heard: Heard) -> None:
        seen, due = self.seen, self._began + turn.due
        seen.outcomes[heard.outcome] += 1
        seen.retries += heard.tries - 1
        second = seen.second(self._elapsed)
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

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on beside the turns, until they are over."""
        ground, faults = self._ground, self._faults
        beside = [self._watch()]
        if ground and faults.kill_worker_every:
            killing = partial(ground.kill_a_worker, self._dice)
            beside.append(self._again("workers killed", faults.kill_worker_every, killing))
        if ground and faults.restart_redis_every:
            beside.append(self._again("Redis restarts", faults.restart_redis_every, ground.restart_redis))
        return beside

    async def _is_over_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
        return self._over.is_set()

    async def _again(self, name: str, seconds: float, happen: Callable[[], Awaitable[None]]) -> None:
        while not await self._is_over_within(seconds):
            await happen()
            self.seen.accidents[name] += 1

    async def _watch(self) -> None:
        while not await self._is_over_within(_LOOK_SECONDS):
            figures = await self._client.metrics()
            elapsed = self._elapsed
            self.seen.look(elapsed)
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
            if failed := (await self._ground.say("GET", "failures"))["failures"]:
                self.seen.accidents["provider errors"] = failed
            return dict(await self._ground.say("GET", "judge"))
        return {"ok": None, "why": "the judge did not answer"}
