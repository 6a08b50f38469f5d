"""The audit over a real Redis: planted faults are found, named and mended; a live system gives no false alarm."""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from arq.connections import ArqRedis
from redis_view import command, dump
from talk import changed
from turns import MOST_MESSAGES, WINDOW_MESSAGES, append_turns, fold_result

from memora.audit import AuditReport, audit
from memora.bootstrap import Memora
from memora.core.tokens import count_text_tokens
from memora.settings import Settings
from memora.storage import Storage, open_storage
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
    """Turns, folds, what waits, a conversation without messages and a held lock are no finding; nothing is written."""
    await storage.store.create("empty", owner="someone", metadata={"topic": "nothing"})
    await command(redis, "SET", f"{PREFIX}begun:lock", "token", "PX", "60000")
    before = await dump(redis)
    report = await audit(storage)
    assert report.findings == ()
    assert (report.ok, report.conversations, report.messages, report.folds) == (True, 3, 28, 3)
    assert {check.status for check in report.checks} == {"ok"}
    assert await dump(redis) == before


LONG = "word " * 400
FAR = 4_000_000_000_000
"""In the year 2096, in ms."""


def message_json(role: str = "user", content: str = "hello", **other: object) -> str:
    """A message as it is stored, with its tokens counted unless told otherwise."""
    return json.dumps({"role": role, "content": content, "tokens": count_text_tokens(content), "at": 1, **other})


def fold_json(**changes: object) -> str:
    """The second entry of the audit trail of `demo`, but for some changes."""
    entry = {"version": 2, "from": 4, "to": 8, "summary": "summary to 8", "model": "some-model", "input_tokens": 7}
    return json.dumps({**entry, "output_tokens": 3, "duration_seconds": 0.25, "at": 1, **changes})


@dataclass(frozen=True)
class Fault:
    """Commands that plant a fault, the checks that find it, and the keys its repair may write besides undoing it."""

    commands: tuple[tuple[object, ...], ...]
    checks: set[str]
    writes: set[str] = field(default_factory=set)
    conversation: str | None = "demo"


OUTBOX_KEYS = {f"{PREFIX}pending", f"{PREFIX}queue"}
JOB = "arq:job:fold:ghost:0123456789abcdef:0"

MENDABLE = {
    "message count too high": Fault((("HSET", SUMMARY, "message_count", 22),), {"counters"}),
    "message count no number": Fault((("HSET", SUMMARY, "message_count", "many"),), {"counters"}),
    "version": Fault((("HSET", SUMMARY, "version", 5),), {"counters"}),
    "summarized count": Fault((("HSET", SUMMARY, "summarized_message_count", 6),), {"counters", "jobs"}),
    "summary tokens": Fault((("HSET", SUMMARY, "summary_tokens", 99),), {"tokens"}),
    "fold tokens too low": Fault((("HSET", SUMMARY, "fold_input_tokens", 13),), {"usage"}),
    "not in the index": Fault((("ZREM", f"{PREFIX}conversations", "demo"),), {"index"}, {f"{PREFIX}conversations"}),
    "gone and in the index": Fault((("ZADD", f"{PREFIX}conversations", 1, "ghost"),), {"index"}, conversation="ghost"),
    "not in the outbox": Fault((("ZREM", f"{PREFIX}pending", "demo"),), {"outbox"}, OUTBOX_KEYS),
    "in the outbox for nothing": Fault(
        (("ZADD", f"{PREFIX}pending", 1, "other"),), {"outbox"}, OUTBOX_KEYS, conversation="other"
    ),
    "gone and in the outbox": Fault((("ZADD", f"{PREFIX}pending", 1, "ghost"),), {"outbox"}, conversation="ghost"),
    "due in a hundred years": Fault((("ZADD", f"{PREFIX}pending", FAR, "demo"),), {"outbox"}, OUTBOX_KEYS),
    "left over": Fault(
        (("RPUSH", f"{PREFIX}ghost:folds", "text"), ("SET", f"{PREFIX}ghost:lock", "x")), {"keys"}, conversation="ghost"
    ),
    "a lock for ever": Fault((("SET", f"{PREFIX}demo:lock", "x"),), {"lifetimes"}, {f"{PREFIX}demo:lock"}),
    "one key expires": Fault((("PEXPIREAT", FOLDS, FAR),), {"lifetimes"}),
    "a turn that is not there": Fault((("ZADD", f"{PREFIX}demo:turns", 22, "x"),), {"turns"}),
    "a context of no message": Fault(
        (("SET", f"{PREFIX}demo:context", '{"position":20}'),), {"turns"}, {f"{PREFIX}demo:context"}
    ),
    "a job of nobody": Fault(
        (("SET", JOB, "{}"), ("ZADD", f"{PREFIX}queue", 1, JOB.removeprefix("arq:job:"))),
        {"jobs"},
        conversation="ghost",
    ),
}

NOT_MENDABLE = {
    "half a turn": Fault((("RPOP", HISTORY),), {"history", "counters", "turns"}),
    "no history": Fault((("DEL", HISTORY),), {"counters", "turns"}),
    "a message is no JSON": Fault((("LSET", HISTORY, 3, "nonsense"),), {"history"}),
    "a message of the wrong role": Fault((("LSET", HISTORY, 3, message_json()),), {"history"}),
    "a message without content": Fault((("LSET", HISTORY, 2, '{"role":"user"}'),), {"history"}),
    "an absent message with a text": Fault((("LSET", HISTORY, 2, message_json(absent=True)),), {"history"}),
    "a message with an odd phase": Fault((("LSET", HISTORY, 2, message_json(phase=3)),), {"history"}),
    "a wrong token count": Fault((("LSET", HISTORY, 2, message_json(tokens=7)),), {"tokens"}),
    "an unknown vocabulary": Fault((("LSET", HISTORY, 2, message_json(vocabulary="klingon")),), {"tokens"}),
    "a lone surrogate": Fault(
        (("LSET", HISTORY, 2, '{"role":"user","content":"\\ud800","tokens":1,"at":1}'),), {"tokens"}
    ),
    "a hole in the folds": Fault((("LSET", FOLDS, 1, fold_json(**{"from": 6})),), {"folds"}),
    "an overlap of folds": Fault((("LSET", FOLDS, 1, fold_json(**{"from": 2})),), {"folds"}),
    "a wrong version": Fault((("LSET", FOLDS, 1, fold_json(version=3)),), {"folds"}),
    "a fold that is none": Fault((("LSET", FOLDS, 0, "[]"),), {"folds"}),
    "a note for another fold": Fault((("LSET", FOLDS, 1, fold_json(unfolded=[2])),), {"folds"}),
    "folds beyond the history": Fault((("LSET", FOLDS, 1, fold_json(to=40)),), {"counters"}),
    "no folds": Fault((("DEL", FOLDS),), {"summary", "counters"}),
    "another summary": Fault((("HSET", SUMMARY, "summary", "summary to 9"),), {"summary"}),
    "a summary that is no text": Fault((("HSET", SUMMARY, "summary", b"\xff\xfe"),), {"summary", "tokens"}),
    "a summary over its cap": Fault(
        (
            ("HSET", SUMMARY, "summary", LONG, "summary_tokens", count_text_tokens(LONG)),
            ("LSET", FOLDS, 1, fold_json(summary=LONG)),
        ),
        {"summary"},
    ),
    "negative usage": Fault((("HSET", SUMMARY, "answer_input_tokens", -5),), {"counters"}),
    "the newest turn is forgotten": Fault((("ZREMRANGEBYRANK", f"{PREFIX}demo:turns", -1, -1),), {"turns"}),
    "an id of half a turn": Fault((("ZADD", f"{PREFIX}demo:turns", 3, "x"),), {"turns"}),
    "a context that is none": Fault((("SET", f"{PREFIX}demo:context", "nonsense"),), {"turns"}),
    "should have expired": Fault((("HSET", SUMMARY, "expires_at", 1),), {"lifetimes"}),
    "no summary": Fault((("DEL", SUMMARY),), {"keys"}),
    "no generation": Fault((("HDEL", SUMMARY, "generation"),), {"keys"}),
    "a key of another type": Fault((("DEL", HISTORY), ("SET", HISTORY, "x")), {"keys"}),
    "a key of no known part": Fault((("SET", f"{PREFIX}demo:nonsense", "x"),), {"keys"}, conversation=None),
    "a key in another shard": Fault((("RPUSH", "memora:{3}:demo:history", "x"),), {"keys"}, conversation=None),
    "a list of another type": Fault(
        (("DEL", f"{PREFIX}pending"), ("SET", f"{PREFIX}pending", "x")), {"keys"}, conversation=None
    ),
}


async def plant(redis: ArqRedis, fault: Fault) -> None:
    """Break what is stored."""
    for words in fault.commands:
        await command(redis, *words)


@pytest.mark.parametrize("name", [*MENDABLE, *NOT_MENDABLE])
async def test_a_fault_is_found_with_its_key(storage: Storage, redis: ArqRedis, name: str) -> None:
    """Each planted fault gives a finding of its conversation and check that names a key; reading writes nothing."""
    fault = {**MENDABLE, **NOT_MENDABLE}[name]
    await plant(redis, fault)
    before = await dump(redis)
    report = await audit(storage)
    assert {check for conversation, check in found(report) if conversation == fault.conversation} == fault.checks
    assert all(finding.keys for finding in report.findings)
    assert not report.ok
    assert {check.name for check in report.checks if check.status == "finding"} >= fault.checks
    assert await dump(redis) == before


@pytest.mark.parametrize("name", MENDABLE)
async def test_a_repair_mends_exactly_what_was_found(storage: Storage, redis: ArqRedis, name: str) -> None:
    """Afterwards everything is as it was before the fault, and a second audit is clean."""
    fault = MENDABLE[name]
    healthy = await dump(redis)
    await plant(redis, fault)
    report = await audit(storage, repair=True)
    assert (report.ok, report.findings) == (True, ())
    assert set() < {finding.check for finding in report.repaired} <= fault.checks
    repaired = await dump(redis)
    different = {key.decode() for key in healthy.keys() | repaired.keys() if healthy.get(key) != repaired.get(key)}
    assert {key for key in different if not key.startswith("arq:")} <= fault.writes
    again = await audit(storage, repair=True)
    assert (again.ok, again.repaired) == (True, ())


@pytest.mark.parametrize("name", NOT_MENDABLE)
async def test_what_cannot_be_derived_is_left_as_it_is(storage: Storage, redis: ArqRedis, name: str) -> None:
    """A repair writes nothing where it would have to invent, and goes on saying so."""
    fault = NOT_MENDABLE[name]
    await plant(redis, fault)
    before = await dump(redis)
    report = await audit(storage, repair=True)
    assert {check for conversation, check in found(report) if conversation == fault.conversation} == fault.checks
    assert report.repaired == ()
    assert await dump(redis) == before


# --- more shards than one

SHARDS = 4
SPREAD = tuple(f"talk-{number}" for number in range(12))


def key_of(name: str, part: str) -> str:
    """The name of a key, worked out here once more."""
    return f"memora:{{{zlib.crc32(name.encode()) % SHARDS}}}:{name}:{part}"


def shared_key_of(name: str, part: str) -> str:
    """The list that a conversation is in."""
    return key_of(name, "").removesuffix(f"{name}:") + part


@pytest.fixture
async def sharded(settings: Settings, redis: ArqRedis) -> AsyncIterator[Storage]:
    """Twelve conversations over four shards, each with a fold and something that waits."""
    async with open_storage(changed(settings, shards=SHARDS)) as storage:
        for name in SPREAD:
            await append_turns(storage.store, name, range(6))
            await fold(storage.store, name, 2)
        assert len({key_of(name, "").partition("}")[0] for name in SPREAD}) == SHARDS
        assert await command(redis, "EXISTS", *(key_of(name, "history") for name in SPREAD)) == len(SPREAD)
        yield storage


async def test_shards_audit_clean_together(sharded: Storage) -> None:
    """Every conversation of every shard is looked at, with everything it holds."""
    report = await audit(sharded)
    assert report.findings == ()
    assert (report.ok, report.conversations, report.messages, report.folds) == (True, 12, 144, 12)


async def test_a_fault_in_each_shard_is_found_and_mended_there(sharded: Storage, redis: ArqRedis) -> None:
    """Another fault in each of the four; the repair leaves all of them as they were, and no other is touched."""
    healthy = await dump(redis)
    by_shard = {shared_key_of(name, ""): name for name in SPREAD}
    counted, listed, waiting, aged = (by_shard[f"memora:{{{shard}}}:"] for shard in range(SHARDS))
    await command(redis, "HSET", key_of(counted, "summary"), "message_count", 22)
    await command(redis, "ZREM", shared_key_of(listed, "conversations"), listed)
    await command(redis, "ZREM", shared_key_of(waiting, "pending"), waiting)
    await command(redis, "PEXPIREAT", key_of(aged, "folds"), FAR)
    report = await audit(sharded)
    planted = {(counted, "counters"), (listed, "index"), (waiting, "outbox"), (aged, "lifetimes")}
    assert found(report) == planted
    for conversation, check in planted:
        one = await audit(sharded, conversation)
        assert found(one) == {(conversation, check)}
    repaired = await audit(sharded, repair=True)
    assert (repaired.ok, repaired.findings) == (True, ())
    assert {(finding.conversation, finding.check) for finding in repaired.repaired} == planted
    after = await dump(redis)
    different = {key.decode() for key in healthy.keys() | after.keys() if healthy.get(key) != after.get(key)}
    times = {shared_key_of(listed, "conversations"), shared_key_of(waiting, "pending"), "memora:{0}:queue"}
    assert {key for key in different if not key.startswith("arq:")} <= times


async def test_under_another_number_of_shards_everything_is_misplaced(
    settings: Settings, sharded: Storage, redis: ArqRedis
) -> None:
    """Conversations that a changed MEMORA_SHARDS has put out of reach are named, and no repair destroys them."""
    assert (await audit(sharded)).ok
    before = await dump(redis)
    async with open_storage(changed(settings, shards=1)) as other:
        report = await audit(other, repair=True)
    assert not report.ok
    histories = [key_of(name, "history") for name in SPREAD]
    out_of_reach = {key for key in histories if not key.startswith(PREFIX)}
    assert out_of_reach <= {key for finding in report.findings for key in finding.keys}
    assert all("MEMORA_SHARDS=1" in finding.expected for finding in report.findings if finding.keys[0] in out_of_reach)
    after = await dump(redis)
    assert {key: after.get(key) for key in before if b"{0}" not in key and not key.startswith(b"arq:")} == {
        key: value for key, value in before.items() if b"{0}" not in key and not key.startswith(b"arq:")
    }
