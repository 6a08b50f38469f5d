"""The clients of a chaos run, and the ledger they keep: what each turn came to, as far as its client can know.

A client gives up on a turn only where it may: when every try was refused outright (`failed`), or when the only try had
begun and its stream broke off (`unknown`). In all other cases it sends the turn again under its own key until it is
answered. A try nobody heard of again could still arrive later, so a turn that had one is never given up.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
from chaos_processes import Child
from serving import KEY

from memora.offline_model.judge import Judge, Outcome, Report
from memora.offline_model.markers import Marker

TURN_SECONDS = 90.0
"""After so long without an answer something is wrong with the service, whatever was done to it."""

_SILENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.1
_WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "near",
    "my",
    "house",
    "and",
    "it",
    "went",
    "to",
    "Taipei",
    "by",
    "train",
)
_REFUSALS = frozenset({"upstream_error", "upstream_timeout"})
"""Codes that say that nothing was stored."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One turn as its client knows it; `answer` is None unless it is `ok`."""

    marker: Marker
    question: str
    outcome: Outcome
    answer: str | None = None
    gap_messages: int = 0


@dataclass(slots=True)
class Life:
    """One conversation from its beginning to its end. `has_loose_ends`: a try may still arrive."""

    tag: str
    conversation_id: str
    entries: list[Entry] = field(default_factory=list)
    has_loose_ends: bool = False
    is_deleted: bool = False

    @property
    def exists(self) -> bool:
        """Whether a turn of it is stored for certain."""
        return any(entry.outcome == "ok" for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Ok:
    """An answer that came whole."""

    text: str
    gap_messages: int


@dataclass(frozen=True, slots=True)
class Refused:
    """An error that was said."""

    status: int
    code: str


@dataclass(frozen=True, slots=True)
class Lost:
    """No word of how it ended; `has_begun` if it had started to answer."""

    has_begun: bool


class Ledger:
    """Every life, and the judge that is told how their turns ended."""

    def __init__(self, judge: Judge) -> None:
        self.lives: list[Life] = []
        self.counts: Counter[str] = Counter()
        self._judge = judge

    def begin(self, conversation_id: str | None = None) -> Life:
        """A new conversation, or a new one under an id that was used before."""
        tag = f"k{len(self.lives)}"
        life = Life(tag, conversation_id or f"chaos-{tag}")
        self.lives.append(life)
        return life

    def enter(self, life: Life, entry: Entry) -> None:
        """Take down how a turn ended."""
        life.entries.append(entry)
        self.counts[entry.outcome] += 1
        self.counts["gap_messages"] += entry.gap_messages
        self._judge.report(Report(entry.marker, entry.outcome, entry.gap_messages))


@dataclass(frozen=True, slots=True)
class Habits:
    """What clients do: how many turns a conversation has, and how often it is deleted and begun again, and so on."""

    turns: tuple[int, int] = (8, 50)
    deletes: float = 0.3
    streams: float = 0.4
    gives_up: float = 0.5
    leaves: float = 0.03
    pause_seconds: float = 0.3


class WebClient:
    """One person who talks to whichever server answers, one conversation after the other."""

    def __init__(
        self, http: httpx2.AsyncClient, ports: list[int], ledger: Ledger, habits: Habits, rng: random.Random
    ) -> None:
        self._http = http
        self._ports = ports
        self._ledger = ledger
        self._habits = habits
        self._rng = rng

    async def talk(self, is_over: Callable[[], bool]) -> None:
        """Talk until it is over; the turn that is being asked for is brought to its end."""
        life = self._ledger.begin()
        while True:
            for number in range(self._rng.randint(*self._habits.turns)):
                if is_over():
                    return
                await self._turn(life, number)
                await asyncio.sleep(self._habits.pause_seconds * self._rng.random())
            life = self._ledger.begin(await self._delete(life))

    async def _turn(self, life: Life, number: int) -> None:
        marker = Marker(life.tag, number)
        question = f"{marker} " + " ".join(self._rng.choices(_WORDS, k=self._rng.randint(3, 40)))
        ask = partial(self._try, life.conversation_id, question, f"{life.tag}-{number}", begins=not life.exists)
        is_first, is_loose = True, False
        give_up_at = asyncio.get_running_loop().time() + TURN_SECONDS
        while True:
            reply = await ask()
            match reply:
                case Ok(text, gap):
                    return self._ledger.enter(life, Entry(marker, question, "ok", text, gap))
                case Refused(_, code) if code in _REFUSALS and not is_loose and self._gives_up():
                    return self._ledger.enter(life, Entry(marker, question, "failed"))
                case Lost(has_begun=True) if is_first and self._gives_up():
                    life.has_loose_ends = True
                    return self._ledger.enter(life, Entry(marker, question, "unknown"))
                case Lost() | Refused(status=500 | 503):
                    is_loose = life.has_loose_ends = True
            assert asyncio.get_running_loop().time() < give_up_at, f"{marker} is not answered, the last was {reply}"
            self._ledger.counts["retries"] += 1
            is_first = False
            await asyncio.sleep(_PAUSE_SECONDS * (1 + self._rng.random()))

    def _gives_up(self) -> bool:
        return self._rng.random() < self._habits.gives_up

    async def _try(self, conversation_id: str, question: str, key: str, *, begins: bool) -> Ok | Refused | Lost:
        """One request. Conversations are begun at the door that takes any id, and go on at the other."""
        headers = {"authorization": f"Bearer {KEY}", "idempotency-key": key}
        body: dict[str, Any] = {"model": "memora"}
        if begins:
            headers["x-memora-conversation"] = conversation_id
            body["messages"] = [{"role": "user", "content": question}]
        else:
            body |= {"input": question, "conversation": conversation_id}
        body["stream"] = streams = not begins and self._rng.random() < self._habits.streams
        silence = 0.05 if self._rng.random() < self._habits.leaves else _SILENCE_SECONDS
        patience = silence if streams else 3 * silence
        url = self._url("chat/completions" if begins else "responses")
        has_begun = False
        try:
            async with self._http.stream("POST", url, json=body, headers=headers, timeout=patience) as response:
                if response.status_code != 200:
                    return Refused(response.status_code, _code(await response.aread()))
                if streams:
                    has_begun = True
                    return await _last_event(response.aiter_lines())
                reply = json.loads(await response.aread())
                return _completion(reply, response.headers) if begins else _answer(reply)
        except (httpx2.TransportError, json.JSONDecodeError):
            return Lost(has_begun)

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._rng.choice(self._ports)}/v1/{path}"

    async def _delete(self, life: Life) -> str | None:
        """Delete the conversation now and then; the id, if it can be used again at once."""
        if life.has_loose_ends or self._rng.random() >= self._habits.deletes:
            return None
        url = self._url(f"conversations/{life.conversation_id}")
        life.is_deleted = True
        try:
            reply = await self._http.delete(url, headers={"authorization": f"Bearer {KEY}"}, timeout=5)
        except httpx2.TransportError:
            return None  # it may be carried out later, so nothing new begins under this id
        self._ledger.counts["deleted"] += 1
        return life.conversation_id if reply.status_code == 200 else None


class ChatClient:
    """One person in a terminal: `memora chat`, one turn a line. It has no keys, so what is not answered is unknown."""

    def __init__(self, child: Child, ledger: Ledger, rng: random.Random) -> None:
        self._child = child
        self._ledger = ledger
        self._rng = rng

    async def talk(self, is_over: Callable[[], bool]) -> None:
        """Talk until it is over. After an unknown turn, or the end of the process, a new conversation begins."""
        while not is_over():
            life = self._ledger.begin()
            self._child.arguments = ["chat", "--json", "-c", life.conversation_id]
            self._child.start(with_pipes=True)
            try:
                await self._converse(life, is_over)
            finally:
                self._child.kill()

    async def _converse(self, life: Life, is_over: Callable[[], bool]) -> None:
        for number in range(60):
            if is_over():
                return
            marker = Marker(life.tag, number)
            question = f"{marker} " + " ".join(self._rng.choices(_WORDS, k=8))
            entry = _entry(marker, question, await asyncio.to_thread(self._child.ask, question, TURN_SECONDS))
            self._ledger.enter(life, entry)
            if entry.outcome == "unknown":
                return
            await asyncio.sleep(0.1 * self._rng.random())


def _entry(marker: Marker, question: str, line: bytes) -> Entry:
    """What a line of `chat --json` says of a turn; no line says nothing."""
    found: dict[str, Any] = {}
    with suppress(ValueError):
        found = json.loads(line)
    if found.get("type") == "turn":
        return Entry(marker, question, "ok", found["text"], found["stats"]["gap_messages"])
    return Entry(marker, question, "failed" if found.get("code") in _REFUSALS else "unknown")


async def _last_event(lines: AsyncIterator[str]) -> Ok | Refused | Lost:
    async for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if event["type"] in {"response.completed", "response.incomplete"}:
            return _answer(event["response"])
        if event["type"] == "error":
            return Refused(200, event.get("code") or "")
    return Lost(has_begun=True)


def _answer(response: dict[str, Any]) -> Ok:
    text = "".join(
        part.get("text", part.get("refusal", "")) for item in response["output"] for part in item.get("content", ())
    )
    return Ok(text, int(response["metadata"]["memora_gap_messages"]))


def _completion(reply: dict[str, Any], headers: Mapping[str, str]) -> Ok:
    message = reply["choices"][0]["message"]
    return Ok(message["content"] or message["refusal"] or "", int(headers["x-memora-gap-messages"]))


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return ""
