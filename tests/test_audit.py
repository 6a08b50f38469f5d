"""The audit over a real Redis: planted faults are found, named and mended; a live system gives no false alarm."""

from __future__ import annotations

import pytest
from arq.connections import ArqRedis
from redis_view import command, dump
from turns import MOST_MESSAGES, WINDOW_MESSAGES, append_turns, fold_result

from memora.audit import AuditReport, audit
from memora.bootstrap import Memora
from memora.storage import Storage
from memora.store import ConversationStore

PREFIX = "memora:{0}:"
HISTORY, SUMMARY, FOLDS = (f"{PREFIX}demo:{part}" for part in ("history", "summary", "folds"))


@pytest.fixture
async def storage(memora: Memora) -> Storage:
    """Two conversations: `demo` with 10 turns, two folds and a rest that waits, and `other`, all folded."""
    store = memora.store
    await append_turns(store, "demo", range(10))
    for end in (4, 8):
        await fold(store, "demo", end)
    await append_turns(store, "other", range(4))
    await fold(store, "other", 2)
    return memora.storage


async def fold(store: ConversationStore, name: str, end: int) -> None:
    """Commit a fold up to this message."""
    snapshot = await store.load_fold(name, most_messages=MOST_MESSAGES, window=WINDOW_MESSAGES)
    assert snapshot
    await store.commit_fold(
        snapshot, end, fold_result(f"summary to {end}"), fold_id=f"{name}-{end}", window_messages=WINDOW_MESSAGES
    )


def found(report: AuditReport) -> set[tuple[str | None, str]]:
    """Conversation and check of each finding."""
    return {(finding.conversation, finding.check) for finding in report.findings}


async def test_what_memora_writes_audits_clean(storage: Storage, redis: ArqRedis) -> None:
    """Turns, folds, pending messages, a conversation without messages and a held lock are no finding; nothing is written."""
    await storage.store.create("empty", owner="someone", metadata={"topic": "nothing"})
    await command(redis, "SET", f"{PREFIX}begun:lock", "token", "PX", "60000")
    before = await dump(redis)
    report = await audit(storage)
    assert report.findings == ()
    assert (report.ok, report.conversations, report.messages, report.folds) == (True, 3, 28, 3)
    assert {check.status for check in report.checks} == {"ok"}
    assert await dump(redis) == before
