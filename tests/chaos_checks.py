"""What has to hold when the storm is over: everything drained, nothing lost, nothing twice, nothing of another's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from arq.connections import ArqRedis
from chaos_clients import Entry, Life
from redis_view import command

from memora.offline_model.markers import read_markers, read_summary

_BEFORE = re.compile(r"the (\d+) turns before it")


@dataclass(frozen=True, slots=True)
class Stored:
    """One conversation as it lies in Redis."""

    history: tuple[dict[str, Any], ...]
    summary: dict[str, str]
    folds: tuple[dict[str, Any], ...]

    def number(self, name: str) -> int:
        """A counter of the summary."""
        return int(self.summary.get(name, 0))

    @property
    def turns(self) -> list[tuple[str, str]]:
        """Question and answer of each turn."""
        contents = [message["content"] for message in self.history]
        return list(zip(contents[::2], contents[1::2], strict=True))


async def read_stored(redis: ArqRedis, conversation_id: str) -> Stored:
    """Everything that is stored of a conversation, read without Memora."""
    prefix = f"memora:{{0}}:{conversation_id}:"
    history = await command(redis, "LRANGE", prefix + "history", 0, -1)
    folds = await command(redis, "LRANGE", prefix + "folds", 0, -1)
    summary = await command(redis, "HGETALL", prefix + "summary")
    return Stored(
        tuple(map(json.loads, history)),
        {name.decode(): value.decode() for name, value in summary.items()},
        tuple(map(json.loads, folds)),
    )


async def is_drained(redis: ArqRedis) -> bool:
    """Whether nothing waits: no fold is due, none is queued, no job is left."""
    waiting = await command(redis, "EXISTS", "memora:{0}:pending", "memora:{0}:queue")
    return not waiting and not await command(redis, "KEYS", "arq:job:*")


def faults_of(life: Life, stored: Stored) -> Iterator[str]:
    """What is wrong with one conversation, one line each."""
    for fault in (*_history_faults(life.entries, stored), *_fold_faults(stored), *_summary_faults(life, stored)):
        yield f"{life.conversation_id} ({life.tag}): {fault}"


def _history_faults(entries: Sequence[Entry], stored: Stored) -> Iterator[str]:
    """The ledger and the history, side by side; only an unknown turn may be there or not."""
    roles = [message["role"] for message in stored.history]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        yield f"the history is not made of whole turns: {roles}"
        return
    turns = stored.turns
    place = 0
    for entry in entries:
        found = turns[place] if place < len(turns) else None
        if found is not None and found[0] == entry.question and entry.outcome != "failed":
            if entry.answer not in {None, found[1]}:
                yield f"{entry.marker} was answered {entry.answer!r}, and {found[1]!r} is stored"
            yield from _context_faults(entry, found[1], place, stored)
            place += 1
        elif entry.outcome == "ok":
            yield f"{entry.marker} was answered, and at its place is {found and found[0][:40]!r}"
            return  # what follows is out of step with the ledger
    if place < len(turns):
        yield f"{len(turns) - place} turns too many, the first is {turns[place][0][:40]!r}"


def _context_faults(entry: Entry, answer: str, place: int, stored: Stored) -> Iterator[str]:
    """The model says with each answer how many turns it was shown: all that are stored before it, less the gap."""
    said = _BEFORE.search(answer)
    if said is None or entry.outcome != "ok":
        return
    seen = int(said[1]) + entry.gap_messages // 2
    unfolded = sum(len(fold.get("unfolded", ())) for fold in stored.folds)
    if not place - unfolded <= seen <= place:
        yield f"{entry.marker} is turn {place} of the history and was answered from {seen}"


def _fold_faults(stored: Stored) -> Iterator[str]:
    """The folds tile the history from its beginning, each with a version of its own."""
    reached = 0
    for version, fold in enumerate(stored.folds, 1):
        if (fold["from"], fold["version"]) != (reached, version) or fold["to"] <= reached:
            yield f"fold {version} goes from {fold['from']} to {fold['to']} and has version {fold['version']}"
        reached = fold["to"]
    if stored.history and (reached, len(stored.folds)) != (
        stored.number("summarized_message_count"),
        stored.number("version"),
    ):
        yield f"{len(stored.folds)} folds reach {reached}, and the summary says {stored.summary}"
    if stored.number("message_count") != len(stored.history):
        yield f"{len(stored.history)} messages, and the summary counts {stored.number('message_count')}"
    pending = len(stored.history) - stored.number("window_messages") - reached
    if pending > 0:
        yield f"{pending} messages have left the window and are in no summary"


def _summary_faults(life: Life, stored: Stored) -> Iterator[str]:
    """The summary covers exactly the turns of the history that the count says, but for those a note stands for."""
    if not stored.folds:
        return
    read = read_summary(stored.summary["summary"])
    folded = stored.turns[: stored.number("summarized_message_count") // 2]
    expected = {marker.turn for question, _ in folded for marker in read_markers(question)}
    covered = {turn for turn in range(len(life.entries)) if read.coverage and turn in read.coverage.turns}
    if read.fault or (read.coverage and read.coverage.tag != life.tag):
        yield f"the summary is not its own: {stored.summary['summary']!r}"
    elif not covered <= expected or len(expected - covered) > read.noted_messages:
        yield f"the summary covers {sorted(covered)} of the folded turns {sorted(expected)}"
